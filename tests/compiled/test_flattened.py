"""Pointwise kernels whose axes are counted as one, and halves that change places read by one load, in Triton's interpreter, against eager: every kind
of value beside the elements, words and odd ends, sizes that are not known, and which kernels have such tiles."""
from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import gpu_plans
from tests.compiled.interpreted import assert_close, check, compiled, flat, schedules, values
from tests.large_gpu import alike
from tokamak.codegen.stages import schedule_plan
from tokamak.schedule.body import body, coalesce, exprs_of
from tokamak.schedule.either import joined
from tokamak.schedule.flattened import flattened
from tokamak.fuse.inline import inline
from tokamak.fuse.plan import plan
from tokamak.ir.expr import Load, walk
from tokamak.ir.parse import parse_graph
from tokamak.tools.record import Recorder

pytest.importorskip("triton")


def rotate(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from((1, 3, 4, 8, 12, 20, 24, 31, 33, 40, 66, 130)),
       st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=3),
       st.sampled_from((torch.float32, torch.float16, torch.bfloat16)), st.booleans())
def test_what_lies_beside(outer, inner, beside, dtype, written):
    """A value of all axes with values of any of them, one of them in another order of memory."""
    shape = (*outer, inner)
    others = [values(*(n if kept else 1 for n, kept in zip(shape, k)), dtype=dtype) for k in beside]

    def fn(x, *rest):
        out = x
        for y in rest:
            out = out * y + torch.tanh(y)
        return (out, out * 2) if written else out
    check(fn, values(*shape, dtype=dtype), *others)
    turned = values(*reversed(shape), dtype=dtype).permute(*range(len(shape) - 1, -1, -1))
    check(fn, values(*shape, dtype=dtype), turned, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 4, 40), (2, 7, 3, 64), (1, 9, 5, 16), (2, 3, 5, 12), (2, 4, 3, 6), (1, 1, 3, 128)], ids=str)
def test_rotary_embeddings(shape, dtype):
    batch, length, heads, width = shape
    cos, sin = values(length, width, dtype=dtype), values(length, width, dtype=dtype)
    check(lambda x, cos, sin: x * cos[:, None] + rotate(x) * sin[:, None], values(*shape, dtype=dtype, grad=True), cos, sin)
    by_heads = values(batch, heads, length, width, dtype=dtype, grad=True)
    check(lambda x, cos, sin: x * cos + rotate(x) * sin, by_heads, cos, sin)
    check(lambda x, cos, sin: x.transpose(1, 2) * cos + rotate(x.transpose(1, 2)) * sin, values(*shape, dtype=dtype, grad=True), cos, sin)


@pytest.mark.parametrize("width", [24, 28, 30, 31, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_halves_of_one_projection(width, dtype):
    def geglu(x):
        a, b = x.chunk(2, -1)
        return F.gelu(a) * b
    check(geglu, values(19, 2 * width, dtype=dtype, grad=True))
    check(lambda x: x[:, :width] * x[:, -width:] + x[:, 1:width + 1], values(19, 2 * width, dtype=dtype))


@pytest.mark.parametrize("split, width", [(1, 9), (4, 12), (8, 12), (16, 20), (4, 40), (20, 40), (36, 40)])
def test_parts_that_change_places(split, width):
    """Of one length or of two, the first longer or shorter; also under masks of their own, and of different values."""
    swapped = lambda x: torch.cat((x[..., split:], x[..., :split]), -1)
    back = lambda x: torch.cat((x[..., width - split:] * 2, torch.relu(x[..., :width - split])), -1)
    check(lambda x: swapped(x) + x, values(5, 3, width))
    check(lambda x: back(swapped(x)) * x, values(5, 3, width, grad=True))
    check(lambda x, y: torch.cat((x[..., split:] + y[..., split:], y[..., :split]), -1), values(5, 3, width), values(5, 3, width))
    check(lambda x: torch.where(torch.arange(width) < split, x, x.roll(split, -1)), values(5, 3, width))


def test_nan_infinity_and_zero_pass():
    x = values(4, 6, 40)
    x[1, 2, 3], x[2, 3, 30], x[0, 0, 0], x[3, 5, 39] = float("nan"), float("inf"), -0.0, -float("inf")
    cos, sin = values(6, 40), values(6, 40)
    cos[2], sin[3, 5] = 0.0, float("nan")
    check(lambda x, cos, sin: x * cos + rotate(x) * sin, x, cos, sin)


def test_random_numbers_are_those_of_their_elements():
    """Dropout takes the same elements whatever tiles cover them."""
    x = torch.ones(3, 5, 40)
    fn = lambda x, b: F.dropout(x + b, 0.5)
    torch.manual_seed(3)
    got = compiled(fn)(x, torch.zeros(40))
    torch.manual_seed(3)
    alone = compiled(lambda x: F.dropout(x, 0.5))(x)
    assert torch.equal(got, alone) and 0.2 < (got == 0).float().mean() < 0.8


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_size_that_is_not_known(which):
    """The outermost one is counted with the others, any other one ends the run."""
    recorder = Recorder()
    fn = compiled(lambda x, cos, sin: x * cos[:, None] + rotate(x) * sin[:, None], dynamic=None, recorder=recorder)
    for n in (30, 5, 61):
        shape = [4, 7, 3, 40]
        shape[which] = n
        x, cos, sin = values(*shape), values(shape[1], 40), values(shape[1], 40)
        for tensor, dim in ((x, which), *(((cos, 0), (sin, 0)) if which == 1 else ())):
            torch._dynamo.mark_dynamic(tensor, dim)
        torch.testing.assert_close(fn(x, cos, sin), x * cos[:, None] + rotate(x) * sin[:, None], rtol=1e-5, atol=1e-5)
    found = [k.schedule for g in recorder.graphs for kernels in g.values["lower"].kernels.values() for k in kernels]
    assert any(a.extent.constant is None for s in found for a in s.order)
    assert all(s.dims[-1].extent == 4 for s in found)


def test_an_empty_value():
    check(lambda x, cos: x * cos[:, None], values(0, 7, 3, 40), values(7, 40))


# -- which kernels -----------------------------------------------------------------------------------------------------------
WORDS = r"^tile\(i\d:\d+\??, i\d:8\) warps\(2\)"
SEVERAL = WORDS.replace("2", "4")
ROW = r"^tile\(i0:1024\??\) warps\(2\)"


@pytest.mark.parametrize("name, kernel, found", [
    ("rotary_bf16_1x2048x32x128", 0, SEVERAL), ("rotary_bwd_bf16_236x172x25x40", 0, SEVERAL), ("layer_scale_bf16_5293x1704", 0, WORDS),
    ("layer_scale_bf16_5258x8192", 0, r"^tile\(i1:1024\)"), ("modulate_f16_304x159x214", 0, ROW),
    ("snake_bf16_nchw_67x2048x14x14", 0, r"^tile\(i1:1024\)"),
    ("geglu_packed_f16_871934x28", 0, r"^tile\(i0:256\?, i1:4\)"), ("geglu_packed_bwd_f16_871934x28", 0, WORDS),
    ("geglu_packed_bf16_65536x192", 0, WORDS),
    ("batchnorm_bwd_f32_nchw_48x128x40x40", 2, r"^tile\(i1:512\+256\+32\)"),
    ("standardize_columns_bwd_f16_64287x40", 2, r"^tile\(i0:32\?, i1:32\+8\)"),
    ("response_norm_f16_nchw_179x192x15x15", 2, r"^tile\(i1:4, i2:256\?\)"), ("masked_mean_bwd_bf16_1196x62x31", 0, r"^(?!tile\(i0:1024)"),
    ("rmsnorm_middle_bf16_3x3366x5603", 2, r"^tile\(i1:1024\?\)")])
def test_tiles(name, kernel, found):
    assert re.search(found, gpu_plans.planned(name)[kernel]["schedule"])


def test_fewer_tiles_than_of_rows():
    """In the interpreter, too: 25 heads of 40 are whole tiles of words of four f32."""
    fn = lambda x, cos: x * cos[:, None]
    assert [s.startswith("tile(i0:256?, i1:4)") for s in schedules(fn, values(20, 50, 25, 40), values(50, 40))] == [True]


SWAPPED = """graph swapped {
  input %x: f32[6, 40](40, 1)
  %out: f32[6, 40](40, 1) = where(FIRST, %x[i0, i1 + STEP if FIRST else 0.0:f32], neg(%x[i0, -SPLIT + i1 if ge(coord(i1), SPLIT:i64) else 0.0:f32]))
  return %out
}""".replace("FIRST", "lt(coord(i1), SPLIT:i64)")


@pytest.mark.parametrize("split, loads", [(20, 1), (8, 1), (36, 1), (10, 2), (21, 2)])
def test_one_load_where_words_stay_whole(split, loads):
    """Parts that begin at no multiple of four elements are read as they were: one load of both would be element by element."""
    graph = inline(parse_graph(SWAPPED.replace("SPLIT", str(split)).replace("STEP", str(40 - split))), gpu_plans.H200)
    made = plan(graph, gpu_plans.H200)
    group, = made.steps
    b = joined(coalesce(body(group, made.stores[group], made.roles[group].parallel, {})))
    read = {e for e in walk(*exprs_of(b)) if isinstance(e, Load)}
    assert len(read) == loads and all((e.guard is None) == (loads == 1) for e in read)


def test_what_folds_stays_as_it_is():
    graph = parse_graph("graph sums {\n input %x: f32[6, 40](40, 1)\n %out: f32[6](1) for i1<40 = sum[i1](%x[i0, i1])\n return %out\n}")
    made = plan(graph, gpu_plans.H200)
    group, = made.steps
    b = coalesce(body(group, made.stores[group], made.roles[group].parallel, {}))
    assert flattened(b) is b and joined(b) is b


# -- values in the way of columns, rows of a word to each thread -----------------------------------------------------------
@pytest.mark.parametrize("name, kernels", [
    ("masked_mean_bf16_1271x20x2322", ["per_fused_arange_le_sum_0", "per_fused_arange_div_le_mul_sum_to_copy_1"]),
    ("masked_mean_bf16_27734x5x16", ["per_fused_arange_div_le_mul_sum_to_copy_0"]),            # too few columns for a program of their own
    ("masked_huber_bf16_35x511x2672", ["red_fused_arange_div_huber_loss_le_mul_sum_1_more_0",
                                       "per_fused_arange_div_huber_loss_le_mul_sum_1_more_1"])])
def test_a_mask_of_positions(name, kernels):
    assert [k["name"] for k in gpu_plans.planned(name)] == kernels


@pytest.mark.parametrize("shape", [(5, 4, 300), (3, 37, 270), (2, 6, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_means_and_softmax_under_a_mask(shape, dtype):
    lengths = torch.randint(0, shape[1], shape[:1])
    there = lambda x, n: (torch.arange(x.shape[1]) <= n[:, None])[:, :, None]
    check(lambda x, n: (x.float() * there(x, n)).sum(1) / there(x, n).sum(1), values(*shape, dtype=dtype, grad=True), lengths)
    check(lambda x, n: torch.softmax(x.float().masked_fill(~there(x, n), -1e9), 1).to(x.dtype), values(*shape, dtype=dtype, grad=True), lengths)
    check(lambda x, n: (x.masked_fill(there(x, n), 0).amax(1), there(x, n).squeeze(-1)), values(*shape, dtype=dtype), lengths)


@pytest.mark.parametrize("name, found", [
    ("logsumexp_bf16_40000x1024", f"tile(i0:8, i1:{alike(256, 4)}) warps(8)"), ("entropy_f32_20000x512", f"tile(i0:8, i1:{alike(64, 8)}) warps(4)"),
    ("kurtosis_bf16_30000x1024", f"tile(i0:8, i1:{alike(256, 4)}) warps(8)"),
    ("amax_argmax_bf16_30000x1024", f"tile(i0:8, i1:{alike(256, 4)}) warps(8)"),
    ("softmax_f32_30000x512", "tile(i0:2, i1:512) warps(1)"), ("sum_inner_bf16_40000x1024", "tile(i0:")])
def test_rows_of_a_word_to_each_thread(name, found):
    assert gpu_plans.planned(name)[0]["schedule"].startswith(found)


def test_what_is_in_words_stays_as_it_is():
    graph = parse_graph("graph words {\n input %x: f32[60, 8](8, 1)\n input %b: f32[8](1)\n"
                        " %out: f16[60, 8](8, 1) = f16(add(%x[i0, i1], %b[i1]))\n return %out\n}")
    made = plan(graph, gpu_plans.H200)
    group, = made.steps
    b = coalesce(body(group, made.stores[group], made.roles[group].parallel, {}))
    assert flattened(b) is b


@pytest.mark.parametrize("divisors, columns, axes", [(4, 202260, 2), (4, 202261, 2), (3, 202260, 1), (4, 1020, 1)])
def test_rows_with_many_divisors_of_their_own_are_rows(divisors, columns, axes):
    """They are rows to a tile, which has the reciprocals, where they are long."""
    total = "f32(%x[i0, i1])"
    for n in range(divisors):
        total = f"add(div(f32(%x[i0, i1]), %d[i0, {n}]), {total})"
    graph = parse_graph(f"graph quotients {{\n input %x: f16[214, {columns}]({columns}, 1)\n input %d: f32[214, 8](8, 1)\n"
                        f" %out: f16[214, {columns}]({columns}, 1) = f16({total})\n return %out\n}}")
    (made, _), = schedule_plan(plan(graph, gpu_plans.H200), gpu_plans.H200).bodies.values()
    assert len(made.parallel) == axes


MADE = [lambda x: torch.sigmoid(x) * x, F.gelu, lambda x: x.erf() + 1, lambda x: torch.tanh(x) * 2, lambda x: x * x, lambda x: x.exp() + 1]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(MADE) - 1), st.sampled_from((1, 3, 8, 20, 33))), min_size=2, max_size=4), st.integers(1, 9),
       st.sampled_from((torch.float32, torch.bfloat16)), st.booleans())
def test_what_is_put_side_by_side_is_right(parts, rows, dtype, packed):
    """Functions of parts of one tensor, or of several, side by side in another; their gradients, which lie side by side as well."""
    widths = [w for _, w in parts]
    def fn(*xs):
        xs = xs[0].split(widths, -1) if packed else xs
        made = [MADE[k](x.float()).to(x.dtype) for (k, _), x in zip(parts, xs)]
        return torch.cat([a * b.amax(-1, keepdim=True) for a, b in zip(made, made[1:] + made[:1])], -1)
    inputs = [values(rows, w, dtype=dtype, grad=True) for w in ([sum(widths)] if packed else widths)]
    check(fn, *inputs, tolerance=1e-4 if dtype is torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [F.silu, F.gelu])
def test_the_gradient_of_a_packed_gate_is_right(gate, dtype):
    def fn(x):
        a, b = x.chunk(2, -1)
        return gate(a) * b
    check(fn, values(64, 96, dtype=dtype, grad=True), tolerance=1e-4 if dtype is torch.float32 else 3e-2)
