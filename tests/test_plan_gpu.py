"""What shares a kernel on a GPU, and what does not."""
from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.large_gpu import LARGE, alike
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.codegen.tile_parts import lower_tiles
from tokamak.fuse.axes import Group
from tokamak.fuse.cost import Hints
from tokamak.fuse.sharing import HELD, carrying, many_wide
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.ir.rewrite import simplify
from tokamak.runtime import gpu_build
from tokamak.schedule.tile_rows import LARGEST
from tokamak.schedule.tiles import choose
from tokamak.target import target

GPU = target("cpu", interpret=True)


def tiles_of(text: str) -> list[int]:
    """Elements of the tile of each kernel that is planned for a graph."""
    scheduled = schedule_plan(plan(parse_graph(text), GPU), GPU)
    return [math.prod(sum(sizes) for _, sizes in s.pieces) for _, s in scheduled.bodies.values()]


def test_readers_of_one_table_share_a_kernel_only_where_a_value_has_all_axes():
    """Rotary embeddings of 32 query and 8 key heads: in one kernel each program would make all of one for every step along the other."""
    graph = parse_graph("""graph rotary {
  input %q: bf16[4, 1024, 32, 64](2097152, 2048, 64, 1)
  input %k: bf16[4, 1024, 8, 64](524288, 512, 64, 1)
  input %angle: f32[4, 1024, 64](65536, 64, 1)
  %cos: f32[4, 1024, 64](65536, 64, 1) = cos(%angle[i0, i1, i2])
  %a: bf16[4, 1024, 32, 64](2097152, 2048, 64, 1) = bf16(mul(f32(%q[i0, i1, i2, i3]), %cos[i0, i1, i3]))
  %b: bf16[4, 1024, 8, 64](524288, 512, 64, 1) = bf16(mul(f32(%k[i0, i1, i2, i3]), %cos[i0, i1, i3]))
  return %a, %b
}""")
    kernels = [s for s in plan(graph, GPU).steps if isinstance(s, Group)]
    assert len(kernels) == 2 and all(any(set(k.axes) <= m.free for m in k.members) for k in kernels)


def test_what_is_made_of_sums_beside_a_matrix_and_a_vector_stays_with_them():
    """Backward of a norm: x . w along each row, sums of the columns beside it; their casts are no kernel of their own."""
    graph = parse_graph("""graph backward {
  input %x: f16[16384, 1024](1024, 1)
  input %w: f16[1024](1)
  %rows: f32[16384](1) for i1<1024 = sum[i1](mul(f32(%x[i0, i1]), f32(%w[i1])))
  %out: f16[16384, 1024](1024, 1) = f16(mul(f32(%x[i0, i1]), %rows[i0]))
  %columns: f32[1024](1) for i1<16384 = sum[i1](mul(f32(%x[i1, i0]), %rows[i1]))
  %cast: f16[1024](1) = f16(%columns[i0])
  return %out, %cast
}""")
    assert sum(isinstance(s, Group) for s in plan(graph, GPU).steps) == 1


@pytest.mark.parametrize("batch, heads", [(2, 4), (2, 16), (4, 32), (8, 64)])
def test_a_program_that_holds_rows_turns_no_more_than_it_has_registers_for(batch, heads):
    """Angles are read along positions and written along columns, and each program has all heads of a position: 64 x 64 x 128 elements were one
    tile."""
    shape, strides = f"{batch}, 1024, {heads}, 64", f"{heads * 65536}, {heads * 64}, 64, 1"
    tiles = tiles_of(f"""graph rotary {{
  input %angle: f32[64, 1024](1024, 1)
  input %q: bf16[{shape}]({strides})
  %cos: f32[1024, 64](64, 1) = cos(%angle[i1, i0])
  %out: bf16[{shape}]({strides}) = bf16(mul(f32(%q[i0, i1, i2, i3]), %cos[i1, i3]))
  return %cos, %out
}}""")
    assert max(tiles) <= HELD


def test_what_is_read_along_one_axis_and_written_along_another_is_turned_in_a_tile():
    tiles = tiles_of("""graph turned {
  input %x: f32[1024, 4096](4096, 1)
  %out: f32[4096, 1024](1024, 1) = neg(%x[i1, i0])
  return %out
}""")
    assert tiles == [64 * 64]


@pytest.mark.parametrize("rows, inner", [(256, 128), (512, 256)])
def test_no_tile_is_larger_than_triton_compiles_in_seconds(rows, inner):
    """A fold along one of two axes that a program holds, of columns that lie side by side."""
    tiles = tiles_of(f"""graph nested {{
  input %x: f32[64, {rows}, {inner}, 256]({rows * inner * 256}, {inner * 256}, 256, 1)
  %part: f32[64, {rows}, 256]({rows * 256}, 256, 1) for i3<{inner} = sum[i3](%x[i0, i1, i3, i2])
  %most: f32[64, 256](256, 1) for i2<{rows} = max[i2](%part[i0, i2, i1])
  %out: f32[64, {rows}, {inner}, 256]({rows * inner * 256}, {inner * 256}, 256, 1) = sub(mul(%x[i0, i1, i2, i3], %part[i0, i1, i3]), %most[i0, i3])
  return %out
}}""")
    assert max(tiles) <= LARGEST


@pytest.mark.parametrize("columns, programs, tile", [
    (768, 1584, f"i0:{alike(128, 13)}?, i1:8) warps(16)"), (1024, 1584, f"i0:{alike(128, 13)}?, i1:8) warps(16)"),
    (4096, 1584, "i0:256?, i1:32) looped(i0) warps(16)"),
    (88, 1056, "i0:1024+32) warps(4)"), (1480, 528, f"i0:{alike(64, 9)}?, i1:16?) warps(16)"), (200, 264, f"i0:{alike(32, 9)}?, i1:4) warps(4)")])
def test_partial_results_of_few_columns_are_folded_by_larger_tiles(columns, programs, tile):
    """The time is that of a few accesses one after the other: long tiles, of so few columns that every multiprocessor has a program where there are
    enough, and one each where there are not. Few over a power of two are held: a second turn of a loop would idle mostly."""
    scheduled = schedule_plan(plan(parse_graph(f"""graph columns {{
  input %x: f32[87381, {columns}]({columns}, 1)
  %total: f32[{columns}](1) for i1<87381 = sum[i1](%x[i1, i0])
  return %total
}}"""), LARGE), LARGE)
    (body, s), = scheduled.bodies.values()
    _, second = lower_tiles(body, replace(s, programs=programs), Hints({}), LARGE.name, lambda rest: choose(rest, Hints({}), LARGE))
    assert str(second.schedule).startswith(f"tile({tile}")


@pytest.mark.parametrize("columns, sums, read, aligned, programs", [
    (16384, 2, 6, True, 2), (25600, 2, 6, True, 8), (28672, 2, 6, True, 8), (65536, 2, 6, True, 8), (25600, 1, 6, True, 2), (25601, 2, 6, False, 0),
    (16385, 1, 6, False, 2), (16385, 2, 6, False, 2), (4096, 2, 6, True, 1), (262144, 2, 6, True, 0)])
def test_how_many_programs_share_rows_whose_column_sums_they_carry(columns, sums, read, aligned, programs):
    assert carrying(columns, sums, read, aligned, LARGE) == programs


@pytest.mark.parametrize("columns, sums, read, programs", [(65536, 2, 12, 8), (81920, 1, 12, 8), (81928, 1, 12, 0), (65544, 2, 12, 0)])
def test_a_program_carries_somewhat_more_of_rows_of_32_bits_where_no_fewer_would_do(columns, sums, read, programs):
    assert carrying(columns, sums, read, True, LARGE, narrowest=4) == programs
    assert carrying(columns, sums, read, True, LARGE, narrowest=2) == 0


@pytest.mark.parametrize("rows, columns, programs", [(1000, 30011, 8), (4096, 16383, 8), (512, 30011, 0), (4096, 10001, 0)])
def test_many_rows_of_32_bits_that_begin_anywhere_are_shared(rows, columns, programs):
    """Read element by element by more than two; not where one program could carry all, or few rows are left to each cluster."""
    assert carrying(columns, 2, 12, False, LARGE, many_wide(4, rows, LARGE)) == programs
    assert carrying(columns, 2, 12, False, LARGE, many_wide(2, rows, LARGE)) == 0


NORM = """graph norm {{
  input %x: f16[{rows}, {columns}]({columns}, 1)
  input %w: f16[{columns}](1)
  %squares: f32[{rows}](1) for i1<{columns} = sum[i1](mul(f32(%x[i0, i1]), f32(%x[i0, i1])))
  %out: f16[{rows}, {columns}]({columns}, 1) = f16(mul(mul(f32(%x[i0, i1]), rsqrt(%squares[i0])), f32(%w[i1])))
  return %out
}}"""


@pytest.mark.parametrize("rows, columns, kernels", [(256, 32768, 1), (256, 65537, 1), (140, 65536, 1), (256, 8192, 1), (64, 65537, 1)])
def test_programs_that_hold_long_rows_are_few(rows, columns, kernels):
    """One that has half of a multiprocessor's threads, or all of them, need not have a second beside it; 64 rows are shared."""
    assert sum(isinstance(s, Group) for s in plan(parse_graph(NORM.format(rows=rows, columns=columns)), LARGE).steps) == kernels


@pytest.mark.parametrize("rows, kernels", [(256, 1), (64, 1), (32, 2)])
def test_clusters_carry_column_sums_of_few_rows(rows, kernels):
    """Of rows that no program holds beside their sums: several share each, so that there are programs for the machine."""
    graph = parse_graph(f"""graph backward {{
  input %x: f32[{rows}, 32768](32768, 1)
  input %dy: f32[{rows}, 32768](32768, 1)
  %rows: f32[{rows}](1) for i1<32768 = sum[i1](mul(%dy[i0, i1], %x[i0, i1]))
  %out: f32[{rows}, 32768](32768, 1) = add(%dy[i0, i1], mul(%rows[i0], %x[i0, i1]))
  %columns: f32[32768](1) for i1<{rows} = sum[i1](mul(%dy[i1, i0], %x[i1, i0]))
  return %out, %columns
}}""")
    assert sum(isinstance(s, Group) for s in plan(graph, LARGE).steps) == kernels


def test_long_columns_are_summed_beside_what_is_written():
    """Where no program holds rows that begin anywhere: blocks of them are read in whole words, a row at a time, for both."""
    graph = parse_graph("""graph backward {
  input %x: f16[256, 131073](131073, 1)
  input %w: f16[131073](1)
  input %scale: f32[256](1)
  input %dy: f16[256, 131073](131073, 1)
  %rows: f32[256](1) for i1<131073 = sum[i1](mul(mul(f32(%dy[i0, i1]), f32(%w[i1])), f32(%x[i0, i1])))
  %out: f16[256, 131073](131073, 1) = f16(add(mul(mul(f32(%dy[i0, i1]), f32(%w[i1])), %scale[i0]), mul(%rows[i0], f32(%x[i0, i1]))))
  %columns: f32[131073](1) for i1<256 = sum[i1](mul(f32(%dy[i1, i0]), mul(f32(%x[i1, i0]), %scale[i1])))
  return %out, %columns
}""")
    steps = [s for s in plan(graph, LARGE).steps if isinstance(s, Group)]
    assert [len(s.nodes()) for s in steps] == [1, 2]


def test_each_pass_over_a_row_reads_its_whole_words():
    """What lies beside them may be read a turn ahead, and is another value than what a loop over the words is at."""
    graph = parse_graph("""graph losses {
  input %x: bf16[264, 100003](100003, 1)
  %most: f32[264](1) for i1<100003 = max[i1](f32(%x[i0, i1]))
  %sum: f32[264](1) for i1<100003 = sum[i1](exp(sub(f32(%x[i0, i1]), %most[i0])))
  %out: f32[264, 100003](100003, 1) = sub(f32(%x[i0, i1]), log(%sum[i0]))
  %total: f32[]() for i0<264 = sum[i0](log(%sum[i0]))
  return %out, %total
}""")
    built = render_plan(lower_plan(schedule_plan(plan(graph, LARGE), LARGE), LARGE))
    text = next(p.unit.text for b in built.values() for p in b.parts if p.kernel.schedule.looped and p.kernel.schedule.shift is not None)
    ahead, *passes = re.split(r"\n        for r.*:\n", text)
    assert len(passes) == 3 and all("tl.load(" in p.split("\n        t")[0] for p in passes)


GRADIENTS = """graph gradients {{
  input %x: bf16[{rows}, {columns}]({columns}, 1)
  input %dy: bf16[{rows}, {columns}]({columns}, 1)
  %rows: f32[{rows}](1) for i1<{columns} = sum[i1](mul(f32(%dy[i0, i1]), f32(%x[i0, i1])))
  %dx: bf16[{rows}, {columns}]({columns}, 1) = bf16(mul(sub(f32(%dy[i0, i1]), f32(%x[i0, i1])), %rows[i0]))
  %columns: f32[{columns}](1) for i1<{rows} = sum[i1](mul(f32(%dy[i1, i0]), f32(%x[i1, i0])))
  %plain: f32[{columns}](1) for i1<{rows} = sum[i1](f32(%dy[i1, i0]))
  return %columns, %plain, {out}
}}"""


@pytest.mark.parametrize("rows, columns", [(16, 524288), (64, 524288), (8, 131073)])
def test_columns_of_few_long_rows_are_summed_where_their_gradient_is_written(rows, columns):
    """Beside the rows' own sums only where nothing is written of those: programs would have short pieces of rows."""
    def kernels(out: str) -> list:
        graph = simplify(parse_graph(GRADIENTS.format(rows=rows, columns=columns, out=out)))
        return sorted([sorted({tuple(e.constant for e in n.shape) for n in g.nodes()}) for g in plan(graph, LARGE).steps])
    assert kernels("%dx") == [[(rows,)], [(rows, columns), (columns,)]]
    assert kernels("%rows") == [[(rows,), (columns,)]]


def test_columns_of_little_are_summed_beside_their_rows():
    graph = simplify(parse_graph(GRADIENTS.format(rows=3, columns=131073, out="%dx")))
    assert sorted(len(g.nodes()) for g in plan(graph, LARGE).steps) == [1, 3]


@pytest.mark.parametrize("made, kernels", [("%sums[i0, i1, i2]", 1), ("sub(%sums[i0, i1, i2], f32(%x[i0, i1, i2]))", 2)])
def test_what_only_reads_prefixes_stands_in_their_kernel(made, kernels):
    """Rows of columns that begin anywhere are read one by one by both then; what reads more of them reads several as one without."""
    text = f"""graph prefixes {{
  input %x: bf16[64, 1000, 1001](1001000, 1001, 1)
  %sums: f32[64, 1000, 1001](1001000, 1001, 1) = scan_sum[i1](f32(%x[i0, i1, i2]))
  %out: bf16[64, 1000, 1001](1001000, 1001, 1) = bf16({made})
  return %out
}}"""
    assert len(plan(parse_graph(text), LARGE).steps) == kernels


def test_what_tiles_are_multiplied_of_is_not_made_again_for_each():
    """A head's weights of f32 under autocast: their cast moved into the product of the logits, which wanted more shared memory than there is."""
    made = plan(parse_graph("""graph logits {
  input %x: bf16[4096, 1024](1024, 1)
  input %w: f32[50257, 1024](1024, 1)
  %h: bf16[50257, 1024](1024, 1) = bf16~(%w[i0, i1])
  %y: bf16[4096, 50257](50264, 1) for i2<1024 = bf16~(sum[i2](mul(f32(%x[i0, i2]), f32(%h[i1, i2]))))
  return %y
}"""), LARGE)
    assert len(made.steps) == 2
    schedules = [str(s) for _, s in schedule_plan(made, LARGE).bodies.values()]
    assert "contraction" in schedules[1] and "stages(4)" in schedules[1]


@pytest.mark.parametrize("batch, apart", [(16, True), (4, False)])
def test_what_a_batch_has_in_common_leaves_its_samples_to_programs_of_their_own(batch, apart):
    """Positions' biases that something else reads, too, beside scores they are added to: in one kernel programs would hold all of a large batch."""
    made = plan(parse_graph(f"""graph biased {{
  input %x: f32[{batch}, 16, 512, 512](4194304, 262144, 512, 1)
  input %w: f32[16, 512, 512](262144, 512, 1)
  %b: bf16[16, 512, 512](262144, 512, 1) = bf16(exp(%w[i0, i1, i2]))
  %s: f32[{batch}, 16, 512, 512](4194304, 262144, 512, 1) = add(%x[i0, i1, i2, i3], f32(%b[i1, i2, i3]))
  %m: f32[{batch}, 16, 512](8192, 512, 1) for i3<512 = max[i3](%s[i0, i1, i2, i3])
  return %m, %s, %b
}}"""), LARGE)
    bias, = (g for g in made.steps if any(m.node.dtype.is_half for m in g.members))
    assert (len(bias.members) == 1) == apart


def test_rows_under_way_that_are_written_turned_fit_in_shared_memory():
    """Sums of 17 arrays, beside sums of their rows: DeBERTa's gradient of its positions' weights ran eagerly."""
    added = "f32(%x[0, i0, i1])"
    for k in range(1, 17):
        added = f"add({added}, f32(%x[{k}, i0, i1]))"
    planned = plan(parse_graph(f"""graph turned {{
  input %x: bf16[17, 768, 4096](3145728, 4096, 1)
  %s: bf16[768, 4096](1, 768) = bf16({added})
  %c: f32[768](1) for i1<4096 = sum[i1](f32(%s[i0, i1]))
  return %s, %c
}}"""), LARGE)
    built, = render_plan(lower_plan(schedule_plan(planned, LARGE), LARGE)).values()
    first = built.parts[0]
    assert first.kernel.schedule.split and gpu_build.build([first.unit], LARGE.arch)[first.unit.name].shared <= 227 << 10
