"""Norms of groups of channels on a large GPU: which programs hold them, and how what else is read and written is laid out."""
from __future__ import annotations

import pytest

from tests.large_gpu import LARGE, PLANES
from tokamak.codegen.stages import schedule_plan
from tokamak.fuse import lines
from tokamak.fuse.axes import Group
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph

NORM = """graph norm {{
  input %x: {d}[{n}, {p}, 32*{each}]({p}*32*{each}, 32*{each}, 1)
  %sum: f32[{n}, 32](32, 1) for i2<{p}, i3<{each} = sum[i2, i3](f32(%x[i0, i2, i1*{each} + i3]))
  %out: {d}[{n}, {p}, 32*{each}]({p}*32*{each}, 1, {p}) = {d}(mul(f32(%x[i0, i1, i2]), %sum[i0, (i2 // {each})]))
  return %out
}}"""
RUNS = """graph runs {{
  input %x: {d}[{n}, {p}, 32*{each}]({p}*32*{each}, 32*{each}, 1)
  %sum: f32[{n}, 32](32, 1) for i2<{p}, i3<{each} = sum[i2, i3](f32(%x[i0, i2, i1*{each} + i3]))
  return %sum
}}"""
IN_PLACE = """graph in_place {
  input %x: bf16[12, 9312, 32, 64](9312*2048, 2048, 64, 1)
  %sum: f32[12, 32](32, 1) for i2<9312, i3<64 = sum[i2, i3](f32(%x[i0, i2, i1, i3]))
  %out: bf16[12, 9312, 32, 64](9312*2048, 2048, 64, 1) = bf16(mul(f32(%x[i0, i1, i2, i3]), %sum[i0, i2]))
  return %out
}"""
LAST = """graph last {
  input %x: bf16[4, 16384, 32, 16](8388608, 512, 16, 1)
  input %sum: f32[4, 32](32, 1)
  %out: bf16[4, 16384, 32, 16](8388608, 1, 262144, 16384) = bf16(mul(f32(%x[i0, i1, i2, i3]), %sum[i0, i2]))
  return %out
}"""
SUMS = """graph sums {{
  input %x: bf16[{n}, 16384, 32, 16](8388608, 512, 16, 1)
  input %dy: bf16[{n}, 16384, 32, 16](8388608, 1, 262144, 16384)
  %sums: f32[{n}, 32, 16](512, 16, 1) for i3<16384 = sum[i3](mul(f32(%x[i0, i3, i1, i2]), f32(%dy[i0, i3, i1, i2])))
  %total: f32[{n}, 32, 16](512, 16, 1) for i3<16384 = sum[i3](f32(%dy[i0, i3, i1, i2]))
  %group: f32[{n}, 32](32, 1) for i2<16 = sum[i2](mul(%sums[i0, i1, i2], 3.0:f32))
  return %sums, %total, %group
}}"""
MOMENTS = """graph moments {
  input %x: f32[8, 25600, 256](6553600, 256, 1)
  %mean: f32[8, 32, 8](256, 8, 1) for i3<25600 = moments[i3](sub(%x[i0, i3, i1*8 + i2], %x[i0, 0, i1*8]), 0.0:f32, 1.0:f32)
  %square: f32[8, 32, 8](256, 8, 1) for i3<25600 = moments.1[i3](sub(%x[i0, i3, i1*8 + i2], %x[i0, 0, i1*8]), 0.0:f32, 1.0:f32)
  %weight: f32[8, 32, 8](256, 8, 1) for i3<25600 = moments.2[i3](sub(%x[i0, i3, i1*8 + i2], %x[i0, 0, i1*8]), 0.0:f32, 1.0:f32)
  %sum: f32[8, 32, 8](256, 8, 1) for i3<25600 = sum[i3](%x[i0, i3, i1*8 + i2])
  return %mean, %square, %weight, %sum
}"""
ALONG = """graph along {{
  input %x: f16[3072, {columns}]({columns}, 1)
  input %dy: f16[3072, {columns}]({columns}, 1)
  %sum: f32[3072](1) for i1<{columns} = sum[i1](mul(f32(%dy[i0, i1]), {made}(f32(%x[i0, i1]))))
  return %sum
}}"""
DOWN = """graph down {{
  input %x: bf16[16, {rows}, 2049]({rows}*2049, 2049, 1)
  input %w: bf16[{rows}](1)
  input %scale: f32[16, 2049](2049, 1)
  input %dy: bf16[16, {rows}, 2049]({rows}*2049, 2049, 1)
  %one: f32[16, {rows}, 2049]({rows}*2049, 2049, 1) = mul(f32(%dy[i0, i1, i2]), f32(%w[i1]))
  %rows: f32[16, 2049](2049, 1) for i2<{rows} = sum[i2](mul(%one[i0, i2, i1], f32(%x[i0, i2, i1])))
  %dx: bf16[16, {rows}, 2049]({rows}*2049, 2049, 1) = bf16(add(mul(%one[i0, i1, i2], %scale[i0, i2]), mul(f32(%x[i0, i1, i2]), %rows[i0, i2])))
  %columns: f32[{rows}](1) for i1<16, i2<2049 = sum[i1, i2](mul(f32(%dy[i1, i0, i2]), mul(f32(%x[i1, i0, i2]), %scale[i1, i2])))
  return %dx, %columns
}}"""


def schedules(text: str) -> list:
    """The schedules of a graph's groups, in order."""
    planned = plan(lines.whole_lines(parse_graph(text), LARGE), LARGE)
    return [s for _, s in schedule_plan(planned, LARGE).bodies.values()]


@pytest.mark.parametrize("d, n, p, each, sharers, beside", [
    ("bf16", 32, 3136, 8, 8, 4),                # half lines
    ("bf16", 24, 2337, 8, 8, 8),                # whole lines, as much as a program takes
    ("bf16", 128, 784, 8, 4, 8),                # one program could hold a group, of whose sectors two would read each
    ("bf16", 24, 4032, 4, 8, 8),                # two groups make a word
    ("f32", 64, 4096, 3, 8, 8),
    ("bf16", 16, 12544, 8, 8, 2),               # more to each program, of a sector
])
def test_groups_of_channels_that_clusters_hold(d, n, p, each, sharers, beside):
    schedule, = schedules(NORM.format(d=d, n=n, p=p, each=each))
    assert schedule.sharers == sharers and schedule.sizes(schedule.dims[0]) == (beside,)


@pytest.mark.parametrize("d, n, p, each", [("bf16", 256, 196, 8), ("bf16", 64, 961, 16)])
def test_groups_of_channels_that_programs_hold(d, n, p, each):
    """Those that are tiny, or of whole sectors."""
    schedule, = schedules(NORM.format(d=d, n=n, p=p, each=each))
    assert schedule.sharers == 1 and not schedule.split


@pytest.mark.parametrize("d, n, p, each, found", [("f32", 12, 3080, 32, "i1:128?, i3:32) looped(i1) warps(4)"),
                                                  ("bf16", 12, 9312, 64, "i1:128?, i3:64) looped(i1) warps(4)")])
def test_runs_of_looped_rows_lie_beside_each_other_in_a_tile(d, n, p, each, found):
    """Each run a line or more; programs take whole groups, not runs of several."""
    schedule, = schedules(RUNS.format(d=d, n=n, p=p, each=each))
    assert str(schedule).startswith(f"tile({found}") and not schedule.split


def test_groups_that_no_cluster_holds_are_read_several_tiles_ahead():
    schedule, = schedules(IN_PLACE)
    assert str(schedule).startswith("tile(i1:64?, i3:64) looped(i1) warps(8) stages(3)")


@pytest.mark.parametrize("each, p", [(5, 4288), (10, 3136), (12, 3136)])
def test_pieces_of_two_powers_that_are_no_words_are_folded_by_columns(each, p):
    assert len(schedules(NORM.format(d="bf16", n=24, p=p, each=each))) > 1


def test_tiles_that_turn_have_pieces_of_lines_side_by_side():
    assert str(schedules(LAST)[0]).startswith("tile(i2:16, i1:4, i3:64) warps(8)")


@pytest.mark.parametrize("n, shared", [(4, True), (32, True), (64, False)])
def test_few_rows_that_are_taken_several_at_once_are_shared(n, shared):
    """Their groups are summed by another kernel, which weights what it reads."""
    first, *rest = schedules(SUMS.format(n=n))
    assert (not first.looped) == shared and rest


def test_moments_of_what_is_shifted_are_one_kernel_with_the_sum():
    """They read a second place of the same memory, which has fewer of the axes."""
    group, = plan(parse_graph(MOMENTS), LARGE).steps
    assert isinstance(group, Group) and len(group.members) == 4


@pytest.mark.parametrize("c, p, found", [(20, 400, "i1:16+4, i2:64+64+64+64+64+64+64?) staged"), (32, 256, "i1:32, i2:256) warps")])
def test_planes_that_would_leave_lanes_idle_are_held_in_pieces(c, p, found):
    assert str(schedules(PLANES.format(d="f16", n=24, c=c, p=p))[0]).startswith(f"tile({found}")


@pytest.mark.parametrize("p, found", [(3080, "i1:2+1, i2:2048+1024+8) staged(i1 / 4)"), (3072, "i1:8+4, i2:512+256) staged(i2 / 4)")])
def test_shares_of_planes_begin_with_whole_words(p, found):
    """Where programs would share planes elsewhere, each has planes of its own."""
    schedule, = schedules(PLANES.format(d="f32", n=64, c=12, p=p))
    assert str(schedule).startswith(f"tile({found}")


@pytest.mark.parametrize("columns, made, found", [(9120, "sigmoid", 2048), (16384, "sigmoid", 8192), (9120, "neg", 8192)])
def test_chunks_of_heavy_functions_leave_few_lanes_idle(columns, made, found):
    assert f"i1:{found}" in str(schedules(ALONG.format(columns=columns, made=made))[0])


@pytest.mark.parametrize("rows, columns", [(384, 8), (96, 8)])
def test_columns_that_are_held_together_fit_registers(rows, columns):
    schedule, = [s for s in schedules(DOWN.format(rows=rows)) if s.together]
    assert schedule.sizes(schedule.dims[-1]) == (columns,)


@pytest.mark.parametrize("rows, columns, found, warps", [(80, 648, "16+16+16+16+16", 4), (96, 1000, "32+32+32", 4), (64, 1024, "64", 8),
                                                         (214, 4096, "32+32+32+32+32+32+32?", 4)])
def test_columns_that_are_held_together_lie_in_equal_pieces(rows, columns, found, warps):
    schedule, = [s for s in schedules(DOWN.format(rows=rows).replace("2049", str(columns))) if s.together]
    assert str(schedule).startswith(f"tile(i1:{found}, i2:") and schedule.warps == warps


BESIDE = """graph beside {{
  input %x: {d}[{n}, 1679, {c}](1679*{c}, {c}, 1)
  %out: {d}[{n}, 1679, {c}](1679*{c}, {c}, 1) = {d}(mul(f32(%x[i0, i1, i2]), 3.0:f32))
  %sums: f32[1679](1) for i1<{n}, i2<{c} = sum[i1, i2](mul(f32(%x[i1, i0, i2]), f32(%x[i1, i0, i2])))
  return %out, %sums
}}"""


@pytest.mark.parametrize("n, c, d, looped", [(251, 89, "f32", True), (118, 64, "f32", False)])
def test_long_rows_that_are_written_beside_their_sums_are_run_through(n, c, d, looped):
    schedule, = schedules(BESIDE.format(n=n, c=c, d=d))
    assert bool(schedule.looped) == looped


TURNED = """graph turned {{
  input %x: {d}[64, 1152, 32, {each}](1152*32*{each}, 32*{each}, {each}, 1)
  input %dy: {d}[64, 1152, 32, {each}](1152*32*{each}, 1, {each}*1152, 1152)
  %sums: f32[64, 32, {each}](32*{each}, {each}, 1) for i3<1152 = sum[i3](mul(f32(%x[i0, i3, i1, i2]), f32(%dy[i0, i3, i1, i2])))
  %group: f32[64, 32](32, 1) for i2<{each} = sum[i2](mul(%sums[i0, i1, i2], 3.0:f32))
  %dx: {d}[64, 1152, 32, {each}](1152*32*{each}, 1, {each}*1152, 1152) = {d}(mul({product}, %group[i0, i2]))
  return %sums, %dx
}}"""


@pytest.mark.parametrize("d, each, held", [("f32", 10, False), ("f32", 8, True), ("bf16", 24, True)])
def test_two_values_of_32_bits_are_held_side_by_side_where_channels_are_one_power_of_two(d, each, held):
    found = schedules(TURNED.format(d=d, each=each, product="mul(f32(%dy[i0, i1, i2, i3]), f32(%x[i0, i1, i2, i3]))"))
    assert (found[0].staged is not None) == held and len(found) == (1 if held else 3)


@pytest.mark.parametrize("p, each, warps", [(3600, 10, 16), (4096, 16, 8)])
def test_moments_of_groups_with_idle_lanes_have_more_threads(p, each, warps):
    moments = RUNS.replace("sum[", "moments.1[").replace("+ i3])", "+ i3]), 0.0:f32, 1.0:f32")
    schedule, = schedules(moments.format(d="f16", n=2, p=p, each=each))
    assert schedule.split and schedule.warps == warps
