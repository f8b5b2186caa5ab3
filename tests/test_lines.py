"""Groups of channels in channels-last: columns are folded first, whole lines at once, then what a group's columns give."""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.large_gpu import LARGE
from tokamak import backend
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.codegen.tile_kernel import For
from tokamak.codegen.tile_parts import lower_tiles
from tokamak.fuse import column_folds, gpu, lines, sharing
from tokamak.fuse.axes import Group
from tokamak.fuse.cost import Hints, estimates
from tokamak.fuse.plan import plan
from tokamak.ir.expr import Reduce, loads
from tokamak.ir.graph import Compute, fold
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.ir.text import print_expr
from tokamak.schedule import tiles
from tokamak.schedule.tiles import choose
from tokamak.target import Target


def grouped(n=16, pixels=9216, groups=32, each=8, strides=None, fold="sum", values="f32(%x[i0, i2, i1*{each} + i3])") -> str:
    """The text of a graph that folds groups of channels of images, in channels-last unless `strides` says otherwise."""
    c = groups * each
    values = values.format(each=each)
    return f"""graph groups {{
  input %x: bf16[{n}, {pixels}, {c}]({strides or f'{pixels * c}, {c}, 1'})
  %total: f32[{n}, {groups}]({groups}, 1) for i2<{pixels}, i3<{each} = {fold}[i2, i3]({values})
  return %total
}}"""


def folds(graph) -> list[tuple[int, ...]]:
    """The extents along which each node of a graph folds."""
    return [tuple(a.extent.constant for a in part.over) for n in graph.nodes if isinstance(n, Compute) and (part := fold(n)) is not None]


def test_groups_of_channels_are_folded_by_columns_first():
    found = lines.whole_lines(parse_graph(grouped()), LARGE)
    assert folds(found) == [(9216,), (8,)]


@pytest.mark.parametrize("fast", [True, False])
def test_what_keeps_a_sum_from_overflowing_stays_within_it(fast):
    """Squares of values over their largest: the division is by the same for all of a group, and must be element by element all the same."""
    text = grouped(values="f32(%x[i0, i2, i1*{each} + i3])").replace("return", """
  %largest: f32[16, 32](32, 1) for i2<9216, i3<8 = max[i2, i3](abs(f32(%x[i0, i2, i1*8 + i3])))
  %one: f32[16, 9216, 256](2359296, 256, 1) = div(f32(%x[i0, i1, i2]), %largest[i0, (i2 // 8)])
  %squares: f32[16, 32](32, 1) for i2<9216, i3<8 = sum[i2, i3](mul(%one[i0, i2, i1*8 + i3], %one[i0, i2, i1*8 + i3]))
  return %squares,""")
    found = lines.whole_lines(parse_graph(text), replace(LARGE, fast=fast))
    long = [part for n in found.nodes if isinstance(n, Compute) and isinstance(part := fold(n), Reduce) and part.over[0].extent.constant == 9216]
    squares, = (part.args[0] for part in long if "mul" in print_expr(part.args[0]))
    assert all("div" in print_expr(e.node.expr) for e in loads(squares))


@pytest.mark.parametrize("text", [
    grouped(n=1, pixels=64),                                            # next to nothing is read
    grouped(each=64),                                                   # a group's channels are a whole line
    grouped(strides="2359296, 1, 9216"),                                 # channels first: a group is contiguous
    grouped(groups=1, each=8, n=1024),                                  # all channels: no neighbour reads the rest of a line
    grouped(fold="prod"),
    grouped(n=32, pixels=3136),                                         # a program holds a group
])
def test_what_else_is_folded_stays_as_it_is(text):
    graph = parse_graph(text)
    assert lines.whole_lines(graph, LARGE) is graph


def test_a_group_beside_which_much_is_computed_is_folded_by_columns_though_a_program_could_hold_it():
    graph = parse_graph("""graph heavy {
  input %x: bf16[32, 3136, 256](802816, 256, 1)
  %group: f32[32, 32](32, 1) for i2<3136, i3<8 = sum[i2, i3](f32(%x[i0, i2, i1*8 + i3]))
  %out: f32[32, 3136, 256](802816, 256, 1) = exp(f32(%x[i0, i1, i2]))
  return %group, %out
}""")
    assert folds(lines.whole_lines(graph, LARGE)) == [(3136,), (8,)]


@pytest.mark.parametrize("n, each, columns", [
    (16, 3, True), (8, 3, False),           # pieces of six bytes: of 9.6 MB, of less than LEAST_BROKEN
    (16, 10, True), (6, 20, False),         # of 20 bytes, of 40: more than a sector
    (6, 8, False)])                         # whole words
def test_pieces_that_are_no_whole_words_are_folded_by_columns_from_fewer_bytes_on(n, each, columns):
    pixels = 3136 if each == 3 else 784
    found = lines.whole_lines(parse_graph(grouped(n=n, pixels=pixels, each=each, strides=f"{pixels * 32 * each}, {32 * each}, 1")), LARGE)
    assert folds(found) == ([(pixels,), (each,)] if columns else [(pixels, each)])


@pytest.mark.parametrize("n, each, beside", [(8, 3, True), (8, 5, True), (3, 10, False), (3, 7, False)])
def test_short_pieces_of_32_bits_lie_side_by_side_where_two_powers_of_two_make_them(n, each, beside):
    """From LEAST_HELD bytes on; ten channels are more than a sector, seven are three powers of two."""
    x = parse_graph(f"""graph held {{
  input %x: f32[{n}, 3136, {32 * each}]({3136 * 32 * each}, {32 * each}, 1)
  %total: f32[{n}, 32](32, 1) for i2<3136, i3<{each} = sum[i2, i3](%x[i0, i2, i1*{each} + i3])
  return %total
}}""")
    part = next(fold(x) for x in x.nodes if isinstance(x, Compute) and fold(x) is not None)
    assert lines.LEAST_HELD <= n * 3136 * 32 * each * 4 < lines.LEAST
    assert (lines.abreast(loads(*part.args), part.over, estimates(x, LARGE), LARGE) is not None) == beside


def test_a_target_of_fixed_order_keeps_its_folds():
    graph = parse_graph(grouped())
    assert lines.whole_lines(graph, Target(vector_bytes=32)) is graph


def test_what_folds_the_same_columns_along_more_axes_is_read_by_the_same_kernel():
    """A weight's gradient beside a group's sum."""
    graph = parse_graph("""graph both {
  input %x: f32[32, 9216, 256](2359296, 256, 1)
  %group: f32[32, 32](32, 1) for i2<9216, i3<8 = sum[i2, i3](%x[i0, i2, i1*8 + i3])
  %all: f32[256](1) for i1<32, i2<9216 = sum[i1, i2](mul(%x[i1, i2, i0], %x[i1, i2, i0]))
  return %group, %all
}""")
    found = lines.whole_lines(graph, LARGE)
    assert sorted(folds(found)) == [(8,), (32,), (9216,), (9216,)]
    planned = plan(found, LARGE)
    first = next(s for s in planned.steps if isinstance(s, Group))
    assert [tuple(a.extent.constant for a in m.bound) for m in first.members] == [(9216,), (9216,)]
    schedule = schedule_plan(planned, LARGE).bodies[first][1]
    assert schedule.split and not schedule.looped


def test_threads_lie_along_the_groups_of_a_line():
    """Of a tile of groups, pixels and channels of a group the groups stand first: Triton lays threads along channels, then along what stands
    first."""
    graph = parse_graph("""graph columns {
  input %x: f32[32, 3136, 32, 8](802816, 256, 8, 1)
  input %w: f32[32, 32](32, 1)
  %one: f32[32, 32, 8](256, 8, 1) for i3<3136 = sum[i3](mul(%x[i0, i3, i1, i2], %w[i0, i1]))
  %two: f32[32, 32, 8](256, 8, 1) for i3<3136 = sum[i3](mul(%x[i0, i3, i1, i2], %x[i0, i3, i1, i2]))
  return %one, %two
}""")
    planned = plan(graph, LARGE)
    (_, schedule), = schedule_plan(planned, LARGE).bodies.values()
    assert [a.extent.constant for a in schedule.dims] == [32, 3136, 8]


@pytest.mark.parametrize("monoid, values", [("sum", "f32(%x[i0, i2, i1*3 + i3])"), ("max", "f32(%x[i0, i2, i1*3 + i3])"),
                                            ("moments.1", "f32(%x[i0, i2, i1*3 + i3]), 0.0:f32, 1.0:f32")])
def test_the_values_are_the_same(monkeypatch, monoid, values):
    monkeypatch.setattr(lines, "LEAST", 1)
    monkeypatch.setattr(lines, "LEAST_BROKEN", 1)
    monkeypatch.setattr(lines, "HELD", 1)
    graph = parse_graph(grouped(2, 35, 5, 3, fold=monoid, values=values))
    changed = lines.whole_lines(graph, LARGE)
    assert changed is not graph
    x = torch.randn(2, 35, 15).bfloat16().float().numpy()
    (want,), (got,) = (evaluate(g, [x]).outputs for g in (graph, changed))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def evonorm(x, v, gamma, beta, groups=4):
    n, c, h, w = x.shape
    std = torch.sqrt(x.reshape(n, groups, c // groups, h, w).var((2, 3, 4), keepdim=True, unbiased=False) + 1e-5)
    return x * torch.sigmoid(v * x) / std.expand(n, groups, c // groups, h, w).reshape(n, c, h, w) * gamma + beta


def assert_norms_of_groups(channels, height, width, dtype, group_norm):
    x = (torch.randn(2, channels, height, width) + 3).to(dtype).to(memory_format=torch.channels_last)
    assert_close_to_float64(evonorm, (x, *(torch.randn(1, channels, 1, 1).to(dtype) for _ in range(3))))
    assert_close_to_float64(group_norm, (x, *(torch.randn(channels).to(dtype) for _ in range(2))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels, height, width", [(32, 37, 9), (40, 8, 7)])
def test_norms_of_groups_agree_with_float64(monkeypatch, dtype, channels, height, width):
    """Also of ten channels a group, which are no whole words."""
    monkeypatch.setattr(lines, "LEAST", 1)
    monkeypatch.setattr(lines, "LEAST_BROKEN", 1)
    monkeypatch.setattr(lines, "HELD", 1)
    monkeypatch.setattr(column_folds, "SHARED_FROM", 1)
    assert_norms_of_groups(channels, height, width, dtype, lambda x, g, b: F.group_norm(x, 4, g, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels, height, width", [(32, 37, 9), (48, 17, 5), (96, 17, 5), (16, 37, 9)])
def test_groups_that_clusters_hold_side_by_side_agree_with_float64(monkeypatch, dtype, channels, height, width):
    """Channels of a group that are one or two powers of two, pixels that programs share unevenly."""
    monkeypatch.setattr(lines, "LEAST", 1)
    monkeypatch.setattr(lines, "LEAST_BROKEN", 1)
    monkeypatch.setattr(lines, "SHARE", 8192)
    monkeypatch.setattr(lines, "ALONE", 0)
    assert_norms_of_groups(channels, height, width, dtype, lambda x, g, b: F.group_norm(x, 4, g, b).contiguous())


NORM = """graph norm {{
  input %x: {d}[32, 3136, 256](802816, 256, 1)
  %sum: f32[32, 32](32, 1) for i2<3136, i3<8 = sum[i2, i3](f32(%x[i0, i2, i1*8 + i3]))
  %out: {d}[32, 3136, 256](802816, {out}) = {d}({made}(mul(f32(%x[i0, i1, i2]), %sum[i0, (i2 // 8)])))
  return %out
}}"""


@pytest.mark.parametrize("d, made, out, beside", [("bf16", "exp", "256, 1", 4), ("f32", "neg", "256, 1", 2), ("bf16", "neg", "256, 1", 4),
                                                  ("bf16", "neg", "1, 3136", 4)])
def test_groups_that_are_needed_again_stay_on_chip_side_by_side(d, made, out, beside):
    """By eight programs, 64 bytes of each line."""
    graph = parse_graph(NORM.format(d=d, made=made, out=out))
    assert folds(lines.whole_lines(graph, LARGE)) == folds(graph)
    planned = plan(graph, LARGE)
    group, = planned.steps
    schedule = schedule_plan(planned, LARGE).bodies[group][1]
    assert schedule.staged is not None and schedule.sharers == 8 and schedule.sizes(schedule.dims[0]) == (beside,)


def images(text: str, n: int, pixels: int = 3136, each: int = 8) -> str:
    """A graph of NORM or BEHIND at other sizes."""
    c = 32 * each
    for old, new in (("[32, 3136, 256]", f"[{n}, {pixels}, {c}]"), ("802816", f"{pixels * c}"), ("3136", f"{pixels}"), ("[32, 256]", f"[{n}, {c}]"),
                     ("[32, 32]", f"[{n}, 32]"), ("256", f"{c}"), ("i1*8", f"i1*{each}"), ("// 8", f"// {each}"), ("<8", f"<{each}")):
        text = text.replace(old, new)
    return text


def first_schedule(text: str):
    planned = plan(parse_graph(text), LARGE)
    bodies = schedule_plan(planned, LARGE).bodies
    return bodies[planned.steps[0]][1]


@pytest.mark.parametrize("n, sharers", [(8, 8), (1, 1)])
def test_few_images_are_held_side_by_side_down_to_a_least_size(n, sharers):
    assert first_schedule(images(NORM.format(d="bf16", made="neg", out="256, 1"), n)).sharers == sharers


def test_few_images_with_columns_beside_are_held_side_by_side():
    text = images(BEHIND.format(d="bf16", layout="256, 1"), 4)
    assert len(plan(parse_graph(text), LARGE).steps) == 1 and first_schedule(text).sharers == 8


def test_groups_of_channels_that_are_no_whole_words_lie_side_by_side_however_small():
    """Nine channels of 32 bits, 36 bytes; eight are whole words, of which a program by itself has a group."""
    norm = NORM.format(d="f32", made="neg", out="1, 3136")
    nine, eight = (first_schedule(images(norm, 200, 196, each)) for each in (9, 8))
    assert [len(s.dims) for s in (nine, eight)] == [3, 2] and nine.staged is not None and (4,) in [sizes for _, sizes in nine.pieces]


BEHIND = """graph behind {{
  input %x: {d}[32, 3136, 256](802816, 256, 1)
  input %dy: {d}[32, 3136, 256](802816, {layout})
  %sums: f32[32, 256](256, 1) for i2<3136 = sum[i2](mul(f32(%x[i0, i2, i1]), f32(%dy[i0, i2, i1])))
  %group: f32[32, 32](32, 1) for i2<8 = sum[i2](%sums[i0, i1*8 + i2])
  %dx: {d}[32, 3136, 256](802816, {layout}) = {d}(sub(f32(%dy[i0, i1, i2]), mul(f32(%x[i0, i1, i2]), %group[i0, (i2 // 8)])))
  return %dx, %sums
}}"""


@pytest.mark.parametrize("d, layout, beside", [("bf16", "256, 1", 4), ("f32", "256, 1", 2), ("bf16", "1, 3136", 4)])
def test_two_values_of_groups_are_held_side_by_side_with_the_sums_of_their_channels(d, layout, beside):
    """What a norm's backward pass reads: its input in channels-last, its gradient so or in channels-first."""
    planned = plan(lines.whole_lines(parse_graph(BEHIND.format(d=d, layout=layout)), LARGE), LARGE)
    group, = planned.steps
    schedule = schedule_plan(planned, LARGE).bodies[group][1]
    assert schedule.sharers == 8 and (beside,) in [sizes for _, sizes in schedule.pieces]


def text_of(text: str) -> str:
    """The Triton text of the one kernel of a graph."""
    planned = plan(lines.whole_lines(parse_graph(text), LARGE), LARGE)
    group, = planned.steps
    part, = render_plan(lower_plan(schedule_plan(planned, LARGE), LARGE))[group].parts
    return part.unit.text


def test_what_is_held_as_bf16_is_widened_two_at_a_time():
    """Side by side, or of rows of which a mean and a variance are taken; but not where Triton has to lay it out anew first."""
    whole = """graph whole {{
  input %x: bf16[256, 262144](262144, 1)
  {folded}
  %out: bf16[256, 262144](262144, 1) = bf16(mul(f32(%x[i0, i1]), %fold[i0]))
  return %out
}}"""
    assert "tk.widened(" in text_of(whole.format(folded="%fold: f32[256](1) for i2<262144 = moments.1[i2](f32(%x[i0, i2]), 0.0:f32, 1.0:f32)"))
    assert "tk.widened(" not in text_of(whole.format(folded="%fold: f32[256](1) for i2<262144 = sum[i2](f32(%x[i0, i2]))"))
    assert "tk.widened(" in text_of(NORM.format(d="bf16", made="exp", out="256, 1"))
    assert "tk.widened(" in text_of(BEHIND.format(d="bf16", layout="256, 1"))
    assert "tk.widened(" not in text_of(BEHIND.format(d="bf16", layout="1, 3136"))


def assert_close_to_float64(fn, given):
    """The value and all gradients of `fn`, compiled, are no further from float64 than a few roundings of the type, or eager's."""
    weights = torch.linspace(-1, 1, given[0].numel(), dtype=torch.float64).reshape(given[0].shape)

    def results(f, dtype):
        leaves = [t.detach().clone().to(dtype).requires_grad_() for t in given]
        out = f(*leaves)
        return out, *torch.autograd.grad(out, leaves, weights.to(dtype))
    dtype = given[0].dtype
    for got, eager, exact in zip(results(tokamak.compile(fn, target="interpret", strict=True), dtype), results(fn, dtype),
                                 results(fn, torch.float64)):
        far = lambda t: float((t.double() - exact).norm() / exact.norm())
        assert far(got) <= 1.5 * far(eager) + 8 * torch.finfo(dtype).eps


COLUMNS = """graph columns {
  input %x: f32[262144, 256](256, 1)
  input %y: f32[262144, 256](256, 1)
  input %w: f32[256](1)
  %one: f32[256](1) for i1<262144 = sum[i1](mul(%x[i1, i0], sub(%y[i1, i0], %w[i0])))
  %two: f32[256](1) for i1<262144 = sum[i1](%x[i1, i0])
  return %one, %two
}"""


def loops_of(**changes) -> tuple[list[str], list[list[str]]]:
    """The straight lines and the loops of the kernel that folds COLUMNS, its schedule changed."""
    planned = plan(parse_graph(COLUMNS), LARGE)
    (group, (body, schedule)), = schedule_plan(planned, LARGE).bodies.items()
    assert schedule.ahead
    kernel, *_ = lower_tiles(body, replace(schedule, **changes), estimates(planned.graph, LARGE), "cpu", lambda b: choose(b, Hints({}), LARGE))
    return [x for x in kernel.lines if isinstance(x, str)], [x.lines for x in kernel.lines if isinstance(x, For)]


def loaded(lines: list[str]) -> dict[str, str]:
    """Register -> what it is loaded from, with registers' numbers left out."""
    return {x.split(" = ")[0]: re.sub(r"\b([a-z])\d+", r"\1", x.split(" = ", 1)[1]) for x in lines if " = tl.load(" in x}


def test_a_loop_reads_what_its_next_turn_folds():
    """All of it is asked for before anything is folded, from the same places as before the loop; what differs by no turn stays out of it."""
    before, (loop,) = loops_of()
    first, following = loaded(before), loaded(loop)
    assert len(following) >= 4 and sorted(following.values()) == sorted(t for t in first.values() if t in following.values())
    assert len(first) > len(following)
    last = max(n for n, x in enumerate(loop) if " = tl.load(" in x)
    assert not any(re.match(r"a\d+ = ", x) for x in loop[:last])
    for name in following:                               # and handed on to the turn behind, by way of what the first was read into
        now, = (x.split(" = ")[0] for x in loop if x.endswith(f" = {name}"))
        assert now in first and any(x.endswith(f" = {now}") for x in loop)
    _, (plain,) = loops_of(ahead=False)
    assert [n for n, x in enumerate(plain) if " = tl.load(" in x][-1] > next(n for n, x in enumerate(plain) if re.match(r"a\d+ = ", x))


def test_what_is_read_last_is_read_by_a_loop_of_its_own():
    """All but the last of it leaves the cache first."""
    for ahead in (True, False):
        _, (leaving, staying) = loops_of(once=True, kept=16, ahead=ahead)
        assert len(leaving) == len(staying) and all("evict_first" in t for t in loaded(leaving).values())
        assert loaded(staying) and not any("evict_first" in t for t in loaded(staying).values())


def test_statistics_of_many_blocks_are_right_with_loads_ahead(monkeypatch):
    """Programs take several blocks each, the last of them with rows that do not exist."""
    monkeypatch.setattr(column_folds, "SHARED_FROM", 1)
    x = (torch.randn(3001, 64) * 2 + 5).bfloat16()
    fn = lambda x: torch.var_mean(x.float(), 0)
    got = tokamak.compile(fn, target="interpret", strict=True)(x)
    for a, b in zip(got, torch.var_mean(x.double(), 0)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


CHANNELS_FIRST = """graph both {{
  input %x: f32[{n}, {c}, {p}]({step}, {p}, 1)
  input %y: f32[{n}, {c}, {p}]({step}, {p}, 1)
  %group: f32[{n}, {g}]({g}, 1) for i2<8, i3<{p} = sum[i2, i3](mul(%x[i0, i1*8 + i2, i3], %y[i0, i1*8 + i2, i3]))
  %all: f32[{c}](1) for i1<{n}, i2<{p} = sum[i1, i2](mul(%x[i1, i0, i2], %x[i1, i0, i2]))
  return %group, %all
}}"""


def channels_first(n=32, g=32, p=3136) -> str:
    """Sums of groups of 8 channels and of channels over all images, of one memory in channels-first."""
    return CHANNELS_FIRST.format(n=n, g=g, c=8 * g, p=p, step=8 * g * p)


def test_what_sums_of_groups_and_of_channels_have_in_common_is_folded_first():
    """One kernel reads planes once for both; small ones fold what they give."""
    found = lines.whole_lines(parse_graph(channels_first()), LARGE)
    assert sorted(folds(found)) == [(8,), (32,), (3136,), (3136,)]
    first, *others = (s for s in plan(found, LARGE).steps if isinstance(s, Group))
    assert [tuple(a.extent.constant for a in m.bound) for m in first.members] == [(3136,), (3136,)]
    assert sorted(tuple(a.extent.constant for a in m.bound) for g in others for m in g.members) == [(8,), (32,)]


def test_runs_are_folded_first_where_a_program_could_hold_what_one_of_the_folds_reads():
    """The channels' sums, over few images: beside a group's, which it could not."""
    assert sorted(folds(lines.whole_lines(parse_graph(channels_first(n=4, p=4096)), LARGE))) == [(4,), (8,), (4096,), (4096,)]


def test_runs_of_a_few_megabytes_are_folded_first():
    assert sorted(folds(lines.whole_lines(parse_graph(channels_first(n=4, g=16)), LARGE))) == [(4,), (8,), (3136,), (3136,)]


def test_runs_are_folded_first_of_a_sum_that_reads_another_too():
    """As channels' sums of what a group's sum scales, in the gradient of a norm of groups."""
    text = channels_first().replace("mul(%x[i1, i0, i2], %x[i1, i0, i2])", "mul(%x[i1, i0, i2], %group[i1, (i0 // 8)])")
    found = lines.whole_lines(parse_graph(text), LARGE)
    assert sorted(folds(found)) == [(8,), (32,), (3136,), (3136,)]


@pytest.mark.parametrize("text", [
    channels_first(p=196),                                              # a program holds a group of both
    channels_first(n=4, g=4),                                           # next to nothing is read
    channels_first(n=2048, g=64, p=49),                                 # planes are short
    grouped(strides="2359296, 1, 9216"),                                # nothing else folds the same memory
])
def test_other_folds_of_planes_stay_as_they_are(text):
    graph = parse_graph(text)
    assert lines.whole_lines(graph, LARGE) is graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels, height, width", [(32, 37, 9), (20, 16, 16)])
def test_gradients_of_a_norm_of_groups_in_channels_first_agree_with_float64(monkeypatch, dtype, channels, height, width):
    for name, value in (("LEAST", 1), ("LEAST_BROKEN", 1), ("LEAST_COMMON", 1), ("RUN", 16), ("HELD", 64)):
        monkeypatch.setattr(lines, name, value)
    monkeypatch.setattr(sharing, "STAGED", 1024)
    x = (torch.randn(2, channels, height, width) + 3).to(dtype)
    assert_close_to_float64(evonorm, (x, *(torch.randn(1, channels, 1, 1).to(dtype) for _ in range(3))))


def test_small_folds_of_equal_extents_are_one_kernel():
    """What is left of sums for two weights; a fold that needs one of them, and one of other extents, stay apart."""
    graph = parse_graph("""graph left {
  input %a: f32[32, 256](256, 1)
  input %b: f32[32, 256](256, 1)
  input %c: f32[64, 256](256, 1)
  %one: f32[256](1) for i1<32 = sum[i1](%a[i1, i0])
  %two: bf16[256](1) for i1<32 = bf16(sum[i1](%b[i1, i0]))
  %three: f32[256](1) for i1<64 = sum[i1](%c[i1, i0])
  %last: f32[256](1) for i1<32 = sum[i1](mul(%a[i1, i0], %one[255 + -1*i0]))
  return %one, %two, %three, %last
}""")
    found = [s for s in plan(graph, LARGE).steps if isinstance(s, Group)]
    assert sorted(len(g.members) for g in found) == [1, 1, 2]


def test_small_folds_whose_axes_are_runs_of_others_are_one_kernel():
    """Channels, in groups for the sake of what one fold reads."""
    graph = parse_graph("""graph left {
  input %a: f32[32, 256](256, 1)
  input %b: f32[32, 256](256, 1)
  input %group: f32[32, 32](32, 1)
  %one: f32[256](1) for i1<32 = sum[i1](%a[i1, i0])
  %two: f32[256](1) for i1<32 = sum[i1](div(%b[i1, i0], %group[i1, (i0 // 8)]))
  %three: f32[32](1) for i1<256 = sum[i1](%a[i0, i1])
  return %one, %two, %three
}""")
    found = [s for s in plan(graph, LARGE).steps if isinstance(s, Group)]
    assert sorted(len(g.members) for g in found) == [1, 2]
    tensors = [torch.rand(32, n) + 0.5 for n in (256, 256, 32)]
    run = lambda a, b, group: (a.sum(0), (b.reshape(32, 32, 8) / group[:, :, None]).sum(0).reshape(256), a.sum(1))
    for got, want in zip(tokamak.compile(run, target="interpret", strict=True)(*tensors), run(*tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_small_folds_in_one_kernel_are_right():
    x = torch.randn(3, 33, 40)
    fn = lambda x, y, z: (x.sum(0), y.amax(0) + 1, z.var(0).bfloat16())
    for got, want in zip(tokamak.compile(fn, target="interpret", strict=True)(*x), fn(*x.double())):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-2, atol=1e-5)


def test_what_a_kernel_stores_for_another_is_made_again_as_a_whole():
    """Two values, one made of the other: neither alone would save anything, since the second then needs the first."""
    graph = parse_graph("""graph chain {
  input %x: f32[4096, 4096](4096, 1)
  input %y: f32[4096, 4096](4096, 1)
  %one: f32[4096, 4096](4096, 1) = mul(mul(%x[i0, i1], %y[i0, i1]), mul(%x[i0, i1], add(%y[i0, i1], 2.0:f32)))
  %two: f32[4096, 4096](4096, 1) = mul(mul(%one[i0, i1], add(%x[i0, i1], %y[i0, i1])), sub(3.0:f32, %one[i0, i1]))
  %sum: f32[4096](1) for i1<4096 = sum[i1](mul(%one[i1, i0], %two[i1, i0]))
  %again: f32[4096](1) for i1<4096 = sum[i1](mul(mul(%one[i1, i0], %two[i1, i0]), %sum[i0]))
  return %again
}""")
    planned = plan(graph, LARGE)
    stored = [n for nodes in planned.stores.values() for n in nodes]
    assert len(stored) == 2 and all(n.shape == (4096,) for n in stored)


SUMS = """graph sums {{
  input %x: {d}[64, 4096, 64](262144, 64, 1)
  %part: f32[64, 64](64, 1) for i2<4096 = sum[i2](sigmoid(f32(%x[i0, i2, i1])))
  %out: {o}[64](1) for i1<64 = {o}(sum[i1](%part[i1, i0]))
  return %out
}}"""


@pytest.mark.parametrize("d, o, short", [("bf16", "bf16", True), ("bf16", "f32", False), ("f32", "bf16", False)])
def test_sums_of_16_bit_values_that_are_rounded_in_the_end_take_short_functions(d, o, short):
    planned = plan(parse_graph(SUMS.format(d=d, o=o)), replace(LARGE, fast=True))
    rendered = render_plan(lower_plan(schedule_plan(planned, replace(LARGE, fast=True)), replace(LARGE, fast=True)))
    assert any("tk.sigmoid_short" in part.unit.text for built in rendered.values() for part in built.parts) == short


@pytest.mark.parametrize("made, sums, count, kernels", [("exp", 4, 6, 2), ("exp", 1, 6, 1), ("neg", 4, 6, 1), ("exp", 4, 8, 1)])
def test_several_rows_of_which_much_is_computed_for_many_sums_are_held_by_no_program(made, sums, count, kernels):
    """Sums of planes, and of groups of those, that all elements need; but where each program of a cluster has a plane."""
    size = count * 3136
    planes = "\n  ".join(f"%plane{n}: f32[64, 32, {count}]({32 * count}, {count}, 1) for i3<3136 = sum[i3](mul({made}(f32(%x[i0, i1, i2, i3])), "
                         f"add(f32(%y[i0, i1, i2, i3]), {n}.5:f32)))" for n in range(sums))
    product = "%plane0[i0, i1, i2]"
    for n in range(sums):
        product = f"mul({product}, %plane{n}[i0, i1, i2])"
    graph = parse_graph(f"""graph nested {{
  input %x: bf16[64, 32, {count}, 3136]({size * 32}, {size}, 3136, 1)
  input %y: bf16[64, 32, {count}, 3136]({size * 32}, {size}, 3136, 1)
  {planes}
  %group: f32[64, 32](32, 1) for i2<{count} = sum[i2]({product})
  %out: bf16[64, 32, {count}, 3136]({size * 32}, {size}, 3136, 1) = bf16(mul(mul(f32(%x[i0, i1, i2, i3]), f32(%y[i0, i1, i2, i3])), %group[i0, i1]))
  return %out
}}""")
    planned = plan(graph, LARGE)
    assert len([s for s in planned.steps if any(n.shape[-1] == 3136 for n in s.reads)]) == kernels


def test_a_kernel_behind_one_that_only_folds_rows_begins_where_that_has_ended():
    graph = parse_graph("""graph again {
  input %x: bf16[8192, 3136](3136, 1)
  %rows: f32[8192](1) for i1<3136 = sum[i1](f32(%x[i0, i1]))
  %out: bf16[8192, 3136](3136, 1) = bf16(mul(f32(%x[i0, i1]), %rows[(i0 // 8)*8]))
  return %out
}""")
    planned = plan(graph, LARGE)
    first, second = (schedule for _, schedule in schedule_plan(planned, LARGE).bodies.values())
    assert not first.split and not first.once and second.backward


def test_what_is_large_is_not_made_behind_folds_across_programs(monkeypatch):
    """Of which a second kernel would make it in any case."""
    graph = parse_graph("""graph behind {
  input %part: f32[32, 32, 8](256, 8, 1)
  input %x: f32[32, 256, 3136](802816, 3136, 1)
  %group: f32[32, 32](32, 1) for i2<8 = sum[i2](%part[i0, i1, i2])
  %out: f32[32, 256, 3136](802816, 3136, 1) = mul(%x[i0, i1, i2], %group[i0, (i1 // 8)])
  return %out
}""")
    assert not any(r.final for r in plan(graph, LARGE).roles.values())
    monkeypatch.setattr(gpu, "MATRIX", 1 << 30)
    assert any(r.final for r in plan(graph, LARGE).roles.values())


def test_small_folds_of_products_of_f32_are_one_kernel():
    """A norm's sums of channels, weighted, for two gradients: no kernel of products makes either."""
    graph = parse_graph("""graph weighted {
  input %a: f32[4, 640](640, 1)
  input %b: f32[4, 640](640, 1)
  input %w: bf16[640](1)
  %one: f32[4, 32](32, 1) for i2<20 = sum[i2](mul(%a[i0, i1*20 + i2], f32(%w[i1*20 + i2])))
  %two: f32[4, 32](32, 1) for i2<20 = sum[i2](mul(%b[i0, i1*20 + i2], f32(%w[i1*20 + i2])))
  return %one, %two
}""")
    found, = plan(graph, LARGE).steps
    assert len(found.members) == 2


STATISTICS = """graph statistics {{
  input %x: bf16[{n}, 1089, 320](348480, 320, 1)
  %sum: f32[{n}, 320](320, 1) for i2<1089 = sum[i2](f32(%x[i0, i2, i1]))
  %squares: f32[{n}, 320](320, 1) for i2<1089 = sum[i2](mul(f32(%x[i0, i2, i1]), f32(%x[i0, i2, i1])))
  %both: f32[{n}, 320](320, 1) = add(%sum[i0, i1], %squares[i0, i1])
  return %both
}}"""


@pytest.mark.parametrize("n, kernels", [(8, 2), (100, 1)])
def test_programs_that_share_no_columns_store_what_is_made_of_them(n, kernels):
    planned = plan(parse_graph(STATISTICS.format(n=n)), LARGE)
    group, = planned.steps
    scheduled = schedule_plan(planned, LARGE)
    assert (scheduled.bodies[group][1].programs == 1) == (kernels == 1)
    assert len(render_plan(lower_plan(scheduled, LARGE))[group].parts) == kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_programs_store_that_share_no_columns_is_right(monkeypatch, dtype):
    seen = []
    monkeypatch.setattr(backend, "target", lambda *_: LARGE)
    monkeypatch.setattr(tiles._Chooser, "_programs", lambda self, split, several=False: seen.append(split) or 1)
    x = (torch.randn(2, 1500, 64) + 1).to(dtype)
    fn = lambda x: ((x.sum(1, dtype=torch.float32) * 2 + (x.float() * x.float()).sum(1)).relu(), x.float().var(1))
    for got, want in zip(tokamak.compile(fn, target="interpret", strict=True)(x), fn(x)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert seen
