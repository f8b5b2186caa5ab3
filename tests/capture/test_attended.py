"""Attention written out in a training step (`capture.attended`): which joint graphs have it, and that results and gradients stay what they were."""
from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn.attention import SDPBackend

import tokamak
from tests.compiled.linear import error, wide
from tokamak.capture import aot, attended, partition
from tokamak.tools.record import recording

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


FORMS = {
    "divided": lambda q, k, v: torch.softmax(scores(q, k), -1) @ v,
    "multiplied": lambda q, k, v: torch.softmax(q @ k.mT * 0.3, 3) @ v,
    "plain": lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
    "in float32": lambda q, k, v: torch.softmax((q @ k.mT * 0.2).float(), -1).to(q.dtype) @ v,
    "softmax in float32": lambda q, k, v: torch.softmax(q @ k.mT * 0.2, -1, dtype=torch.float32).to(q.dtype) @ v,
    "by einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * 0.1, -1), v),
    "heads behind positions": lambda q, k, v: torch.softmax(q.transpose(1, 2) @ k.transpose(1, 2).mT * 0.1, -1) @ v.transpose(1, 2),
    "by bmm": lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q[0], k[0].mT) * 0.1, -1), v[0]),
    "by einsum, heads behind positions": lambda q, k, v: torch.einsum(
        "bhij,bjhd->bihd", torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * 0.1, -1), v),
    "twice": lambda q, k, v: torch.softmax(q @ k.mT * 0.1, -1) @ (torch.softmax(k @ q.mT * 0.1, -1) @ v),
}
INF, LOW = -math.inf, torch.finfo(torch.bfloat16).min
triangle = lambda n: torch.ones(n, n, dtype=torch.bool).tril()
length = lambda q: q.shape[-2]
below = lambda q, device: torch.arange(length(q), device=device)[None] <= torch.arange(length(q), device=device)[:, None]
at_most = lambda q, mask: torch.where(mask, torch.zeros((), dtype=q.dtype, device=q.device), torch.finfo(q.dtype).min)
within = lambda x, v: torch.softmax(x, -1) @ v

# a mask is given -> what is computed
MASKED = {
    "filled": (lambda n: triangle(n).float(), lambda q, k, v, m: within(scores(q, k).masked_fill(m == 0, INF), v)),
    "filled with -1e9": (triangle, lambda q, k, v, m: within(scores(q, k).masked_fill(~m, -1e9), v)),
    "chosen": (lambda n: triangle(n)[None, None], lambda q, k, v, m: within(torch.where(m, scores(q, k), LOW), v)),
    "chosen the other way": (triangle, lambda q, k, v, m: within(torch.where(~m, torch.full((), -1e9, dtype=q.dtype), scores(q, k)), v)),
    "scaled by a tensor": (triangle, lambda q, k, v, m: within(
        torch.where(m, q @ k.mT / torch.full([], 4.0, dtype=q.dtype, device=q.device), INF), v)),
    "a bias for all": (lambda n: torch.randn(n, n).bfloat16(), lambda q, k, v, m: within(scores(q, k) + m, v)),
    "a bias for each": (lambda n: torch.randn(2, 4, n, n).bfloat16(), lambda q, k, v, m: within(m + scores(q, k), v)),
    "a bias for each batch": (lambda n: torch.randn(2, 1, n, n).bfloat16(), lambda q, k, v, m: within(scores(q, k) + m, v)),
    "keys left out": (lambda n: torch.rand(2, 1, 1, n) < 0.7, lambda q, k, v, m: within(scores(q, k) + at_most(q, m), v)),
    "keys left out of 0 and 1": (lambda n: (torch.rand(2, 1, 1, n) < 0.7).float(), lambda q, k, v, m: within(
        scores(q, k) + (1.0 - m.to(q.dtype)) * -10000.0, v)),
    "scaled behind": (lambda n: torch.randn(4, n, n).bfloat16(), lambda q, k, v, m: within((q @ k.mT + m) * 0.2, v)),
    "a bias and a mask": (lambda n: torch.randn(n, n).bfloat16(), lambda q, k, v, m: within((scores(q, k) + m).masked_fill(m > 1, INF), v)),
    "in float32": (triangle, lambda q, k, v, m: torch.softmax((q @ k.mT * 0.2).float().masked_fill(~m, INF), -1).to(q.dtype) @ v),
    "of three dimensions": (triangle, lambda q, k, v, m: within((q[0] @ k[0].mT * 0.2).masked_fill(~m, INF), v[0])),
    "dropout of nothing": (triangle, lambda q, k, v, m: torch.nn.functional.dropout(
        torch.softmax(scores(q, k).masked_fill(~m, INF), -1), 0.0, True) @ v),
    "taken away": (lambda n: (torch.rand(2, 1, 1, n) < 0.3).bfloat16(), lambda q, k, v, m: within(scores(q, k) - m * 1e9, v)),
    "filled anew": (triangle, lambda q, k, v, m: within(scores(q, k) + torch.where(m, q.new_zeros(()), q.new_full(m.shape, -1e9)), v)),
    "taken away twice": (triangle, lambda q, k, v, m: within(scores(q, k) + torch.rsub(m.to(q.dtype), 2, alpha=2) * -1e9, v)),
    "within the product": (lambda n: torch.randn(n, n).bfloat16(), lambda q, k, v, m: within(torch.baddbmm(m, q[0], k[0].mT), v[0])),
    "by einsum": (lambda n: triangle(n)[:4, :4], lambda q, k, v, m: torch.einsum("bhij,bjhd->bihd", torch.softmax(
        (torch.einsum("bihd,bjhd->bhij", q, k) * 0.1).masked_fill(~m, INF), -1), v)),
    "heads behind positions": (triangle, lambda q, k, v, m: within(
        (q.transpose(1, 2) @ k.transpose(1, 2).mT * 0.1).masked_fill(~m[:4, :4], INF), v.transpose(1, 2)).transpose(1, 2).flatten(2)),
}
# rows that nothing is left of
SPENT = {
    "filled with -1e9": lambda q, k, v, m: within(scores(q, k).masked_fill(~m, -1e9), v),
    "chosen": lambda q, k, v, m: within(torch.where(m, scores(q, k), torch.finfo(q.dtype).min), v),
    "added": lambda q, k, v, m: within(scores(q, k) + at_most(q, m), v),
    "added twice as low": lambda q, k, v, m: within(scores(q, k) + (at_most(q, m) / 4 + torch.where(m[:1], 0.0, -1e30).to(q.dtype)), v),
    "added, not very low": lambda q, k, v, m: within(scores(q, k) + torch.where(m, 0.0, -1e4).to(q.dtype), v),
}
SPENT |= {"rows left out, " + name: lambda q, k, v, m, fn=fn: fn(q, k, v, m[..., :1]) for name, fn in SPENT.items() if "twice" not in name}
CAUSAL = {
    "filled": lambda q, k, v: within(scores(q, k).masked_fill(torch.ones(length(q), length(q), dtype=torch.bool).triu(1), INF), v),
    "filled with -1e9": lambda q, k, v: within(scores(q, k).masked_fill(torch.tril(torch.ones(length(q), length(q))) == 0, -1e9), v),
    "added": lambda q, k, v: within(scores(q, k) + at_most(q, below(q, q.device))[None, None].expand(2, 1, -1, -1), v),
    "added as -inf": lambda q, k, v: within(scores(q, k) + torch.full((length(q), length(q)), INF, dtype=q.dtype).triu(1), v),
}
APART = {
    "the weights are returned": lambda q, k, v: (p := torch.softmax(scores(q, k), -1), p @ v),
    "the scores are returned": lambda q, k, v: (s := scores(q, k), torch.softmax(s, -1) @ v),
    "filled with a number like others": lambda q, k, v: within(scores(q, k).masked_fill(~triangle(length(q)), -100.0), v),
    "a bias that is learnt": lambda q, k, v: within(scores(q, k) + v.mean(-1).unsqueeze(-2), v),
    "filled and a bias": lambda q, k, v: within(scores(q, k).masked_fill(k.detach().mean(-1).unsqueeze(-2) > 0, -1e9) + q.detach().mean(), v),
    "filled with two numbers": lambda q, k, v: within(
        scores(q, k).masked_fill(k.detach().mean(-1).unsqueeze(-2) > 0, -1e9).masked_fill(q.detach().mean(-1, True) > 1, -1e8), v),
    "its gradient is kept elsewhere": lambda q, k, v: within(Elsewhere.apply(scores(q, k), triangle(length(q))), v),
    "a scale within the product": lambda q, k, v: within(torch.baddbmm(torch.ones(32, 32, dtype=q.dtype), q[0], k[0].mT, alpha=0.5), v[0]),
    "along the other axis": lambda q, k, v: torch.softmax(scores(q, k), -2) @ v,
    "a negative scale": lambda q, k, v: torch.softmax(q @ k.mT * -0.1, -1) @ v,
    "a scale that is learnt": lambda q, k, v: torch.softmax(q @ k.mT * v.mean(), -1) @ v,
    "weights of more": lambda q, k, v: (torch.softmax(scores(q, k), -1) + 0.1) @ v,
    "values of other widths": lambda q, k, v: torch.softmax(scores(q, k), -1) @ v[..., :8],
}


class Elsewhere(torch.autograd.Function):
    """Leaves out what `mask` does not hold, and sends back the gradient of all."""
    @staticmethod
    def forward(ctx, x, mask):
        return x.masked_fill(~mask, INF)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def step(fn, inputs, *masks):
    """(results, gradients) of a step: the sum of squares of all results."""
    made = fn(*inputs, *masks)
    made = made if isinstance(made, tuple) else (made,)
    sum(x.to(torch.float64).square().sum() for x in made).backward()
    return [*made, *(x.grad for x in inputs)]


def trained(fn, inputs, monkeypatch, *masks) -> tuple[list, list]:
    """(results and gradients of a compiled step, the library's attentions in its forward graph)."""
    monkeypatch.setattr(partition, "attended", lambda joint, results: attended.attended(joint, 1, results=results))
    torch._dynamo.reset()
    with recording() as recorder:
        made = step(tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir=""), inputs, *masks)
    graphs = [r.values["aten"].graph for r in recorder.graphs]
    return made, [n for g in graphs for n in g.nodes if n.target is FLASH]


def operands(dtype, rows=32, columns=32):
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, 16).to(dtype).requires_grad_() for n in (rows, columns, columns)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, dtype, monkeypatch):
    pytest.importorskip("triton")
    inputs = operands(dtype)
    want = step(FORMS[name], [wide(x) for x in inputs])
    usual = step(FORMS[name], [x.detach().clone().requires_grad_() for x in inputs])
    got, calls = trained(FORMS[name], inputs, monkeypatch)
    assert len(calls) == (2 if name == "twice" else 1)
    alike(got, usual, want)


def test_gradients_lie_as_the_library_makes_them(monkeypatch):
    """None is copied to lie as the transposed product that made it; a result is."""
    inputs = operands(torch.float32)
    monkeypatch.setattr(partition, "attended", lambda joint, results: attended.attended(joint, 1, results=results))
    torch._dynamo.reset()
    with recording() as recorder:
        made = tokamak.compile(FORMS["plain"], target="interpret", strict=True, dynamic=False, cache_dir="")(*inputs)
        made.square().sum().backward()
    backward, = (r for r in recorder.graphs if r.kind == "backward")
    assert not [n for n in backward.values["aten"].graph.nodes if n.target is torch.ops.aten.clone.default]
    assert all(x.grad.is_contiguous() for x in inputs)


def alike(got, usual, want):
    """Is what was `got` as near to what is wanted as what torch gives is, and does it lie as that does?"""
    for g, u, w in zip(got, usual, want, strict=True):
        assert g.shape == u.shape and g.dtype is u.dtype and g.stride() == u.stride() and error(g, w) <= max(1e-6, 1.5 * error(u, w))


def compared(fn, inputs, monkeypatch, *masks) -> list:
    """The library's attentions in the compiled step of `fn`, which is right."""
    usual = step(fn, [x.detach().clone().requires_grad_() for x in inputs], *masks)
    want = step(fn, [wide(x) for x in inputs], *(m.double() if m.is_floating_point() else m for m in masks))
    got, calls = trained(fn, inputs, monkeypatch, *masks)
    alike(got, usual, want)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masks(name, dtype, monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(3)
    mask, fn = MASKED[name]
    mask = mask(32)
    mask = mask.to(dtype) if mask.dtype is torch.bfloat16 else mask
    call, = compared(fn, operands(dtype), monkeypatch, mask)
    assert call.kwargs["attn_mask"].meta["val"].dtype is dtype and not call.args[4:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPENT)
def test_rows_that_nothing_is_left_of(name, dtype, monkeypatch):
    """Some rows, and all of a batch: equal weights, or those of the scores that have lost the same."""
    pytest.importorskip("triton")
    torch.manual_seed(4)
    mask = torch.rand(2, 1, 32, 32) < 0.6
    mask[0, 0, 5], mask[1, 0, ::3], mask[0, 0, 7, 1:] = False, False, False
    assert len(compared(SPENT[name], operands(dtype), monkeypatch, mask)) == 1


@pytest.mark.parametrize("fn", [lambda q, k, v, m: within(scores(q, k).masked_fill(~m, INF), v),
                                lambda q, k, v, m: within(scores(q, k) + torch.where(m, 0.0, INF).to(q.dtype), v)], ids=["filled", "added"])
def test_rows_of_nothing_but_infinity_are_nan(fn, monkeypatch):
    pytest.importorskip("triton")
    mask = triangle(32)
    mask[5] = False
    inputs = operands(torch.float32)
    want = step(fn, [x.detach().clone().requires_grad_() for x in inputs], mask)[0]
    (got, *_), calls = trained(fn, inputs, monkeypatch, mask)
    assert len(calls) == 1 and torch.equal(got.isnan(), want.isnan()) and want.isnan().any()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_torch_s_own_module(monkeypatch):
    """Its masks are added within the product."""
    pytest.importorskip("triton")
    torch.manual_seed(5)
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    keys = torch.rand(2, 32) < 0.3
    keys[:, 0] = False
    inputs = [torch.randn(2, 32, 64, requires_grad=True)]
    fn = lambda x: module(x, x, x, attn_mask=~triangle(32), key_padding_mask=keys)[0]
    usual = step(fn, [x.detach().clone().requires_grad_() for x in inputs])
    got, calls = trained(fn, inputs, monkeypatch)
    assert len(calls) == 1 and all(error(g, u) <= 2e-6 for g, u in zip(got, usual, strict=True))


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_of_constants(name, monkeypatch):
    pytest.importorskip("triton")
    call, = compared(CAUSAL[name], operands(torch.float32), monkeypatch)
    assert call.args[4] is True and call.kwargs.get("attn_mask") is None


def test_a_bias_of_constants_that_only_looks_like_a_mask(monkeypatch):
    """What is taken away is multiplied within the call."""
    pytest.importorskip("triton")
    below = lambda q: torch.sub(torch.zeros(32, 32), torch.ones(32, 32).triu(1) * 1e9, alpha=1e-9).to(q.dtype)
    call, = compared(lambda q, k, v: within(scores(q, k) + below(q), v), operands(torch.float32), monkeypatch)
    assert not call.args[4:] and call.kwargs.get("attn_mask") is not None


UNLIKE = {                  # softmax, or nearly so, over something else than rows
    "no axes": lambda x: x.mean().softmax(0) * x,
    "the largest of all": lambda x: (e := torch.exp(x - x.amax())) / e.sum(-1, True),
    "the sum of all": lambda x: (e := torch.exp(x - x.amax(-1, True))) / torch.sum(e, dim=None, keepdim=True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", UNLIKE)
def test_softmax_that_is_none_of_rows(name, grad):
    pytest.importorskip("triton")
    torch._dynamo.reset()
    torch.manual_seed(7)
    x = torch.randn(4, 5)
    functions = UNLIKE[name], tokamak.compile(UNLIKE[name], target="interpret", strict=True, cache_dir="")
    want, got = (step(fn, [x.clone().requires_grad_()]) if grad else [fn(x)] for fn in functions)
    torch.testing.assert_close(got, want)


def test_a_mask_of_constants_that_leaves_all(monkeypatch):
    pytest.importorskip("triton")
    keep = lambda q, k, v: within(scores(q, k).masked_fill(torch.zeros(32, 32, dtype=torch.bool), INF), v)
    call, = compared(keep, operands(torch.float32), monkeypatch)
    assert not call.args[4:] and call.kwargs.get("attn_mask") is None


def test_other_masks_of_constants_are_a_bias(monkeypatch):
    """A window, and a triangle of other lengths; no row is looked at, since something is left of each."""
    pytest.importorskip("triton")
    band = lambda q, k, v: within(scores(q, k).masked_fill(torch.ones(32, 48, dtype=torch.bool).triu(1), INF), v)
    call, = compared(band, operands(torch.float32, 32, 48), monkeypatch)
    targets = {n.target for n in call.graph.nodes}
    assert call.kwargs.get("attn_mask") is not None and torch.ops.aten.amax.default not in targets


@pytest.mark.parametrize("mask, dtype", [(torch.randn(32, 32), torch.bfloat16), (torch.randn(32, 32) < 1, torch.float16)], ids=["any", "far down"])
def test_a_bias_of_more_bits_than_the_library_takes(mask, dtype, monkeypatch):
    """Bits would be lost, or, of numbers beyond f16, what they are for."""
    pytest.importorskip("triton")
    bias = (lambda m: m) if mask.is_floating_point() else lambda m: torch.where(m, 0.0, torch.finfo(torch.float32).min)
    fn = lambda q, k, v, m: torch.softmax(scores(q, k).float() + bias(m), -1).to(q.dtype) @ v
    assert not trained(fn, operands(dtype), monkeypatch, mask)[1]


def test_masks_of_more_bits_are_rounded_where_they_say_the_same(monkeypatch):
    pytest.importorskip("triton")
    fn = lambda q, k, v, m: torch.softmax(scores(q, k).float() + torch.where(m, 0.0, torch.finfo(torch.float32).min), -1).to(q.dtype) @ v
    assert len(compared(fn, operands(torch.bfloat16), monkeypatch, torch.rand(2, 1, 32, 32) < 0.1)) == 1


def test_layers_copy_nothing(monkeypatch):
    """Heads are views of what a projection makes, and so is what the next one reads."""
    pytest.importorskip("triton")
    heads = lambda x: x.view(2, 32, 4, 16).transpose(1, 2)

    def fn(q, k, v, m):
        made = within(scores(heads(q), heads(k)) + m, heads(v))
        return (made.transpose(1, 2).reshape(64, 64) @ torch.ones_like(q[0, :1]).expand(64, 64)).view(2, 32, 64)
    inputs = [torch.randn(2, 32, 64, requires_grad=True) for _ in range(3)]
    call, = compared(fn, inputs, monkeypatch, torch.randn(32, 32))
    assert torch.ops.aten.clone.default not in {n.target for n in call.graph.nodes}


@pytest.mark.parametrize("rows, columns", [(32, 48), (1, 32), (33, 7)])
def test_lengths(rows, columns, monkeypatch):
    pytest.importorskip("triton")
    inputs = operands(torch.float32, rows, columns)
    want = step(FORMS["divided"], [wide(x) for x in inputs])
    got, _ = trained(FORMS["divided"], inputs, monkeypatch)
    assert all(error(g, w) <= 2e-6 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", APART)
def test_what_is_none(name, monkeypatch):
    pytest.importorskip("triton")
    inputs = operands(torch.float32)
    want = step(APART[name], [wide(x) for x in inputs])
    got, calls = trained(APART[name], inputs, monkeypatch)
    assert not calls and all(error(g, w) <= 2e-6 for g, w in zip(got, want, strict=True))


def inferred(fn, inputs, monkeypatch, *masks) -> list:
    """The library's attentions in what is compiled of `fn` without gradients, which is right."""
    monkeypatch.setattr(aot, "attended", lambda graph: attended.attended(graph, 1, 32))
    torch._dynamo.reset()
    with recording() as recorder, torch.no_grad():
        got = tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")(*inputs, *masks)
        usual, want = fn(*inputs, *masks), fn(*map(wide, inputs), *(m.double() if m.is_floating_point() else m for m in masks))
    alike([got], [usual], [want])
    return [n for r in recorder.graphs for n in r.values["aten"].graph.nodes if n.target is FLASH]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_without_gradients(name, monkeypatch):
    """The library leaves out what they leave out."""
    pytest.importorskip("triton")
    call, = inferred(CAUSAL[name], operands(torch.bfloat16), monkeypatch)
    assert call.args[4] is True


@pytest.mark.parametrize("name", MASKED)
def test_other_masks_without_gradients_are_left_to_kernels(name, monkeypatch):
    pytest.importorskip("triton")
    torch.manual_seed(3)
    mask, fn = MASKED[name]
    assert not inferred(fn, operands(torch.bfloat16), monkeypatch, mask(32))


def test_short_ones_without_gradients_are_left_to_kernels(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(aot, "attended", lambda graph: attended.attended(graph, 1))
    torch._dynamo.reset()
    with recording() as recorder, torch.no_grad():
        tokamak.compile(CAUSAL["filled"], target="interpret", strict=True, dynamic=False, cache_dir="")(*operands(torch.bfloat16))
    assert FLASH not in {n.target for r in recorder.graphs for n in r.values["aten"].graph.nodes}


def test_a_bias_of_wide_heads_stays(monkeypatch):
    """The library is slower than what is written."""
    pytest.importorskip("triton")
    mask, fn = MASKED["a bias for all"]
    torch.manual_seed(6)
    inputs = [torch.randn(1, 2, 16, 136, requires_grad=True) for _ in range(3)]
    assert not trained(fn, inputs, monkeypatch, mask(16))[1] and len(trained(FORMS["divided"], inputs, monkeypatch)[1]) == 1


@pytest.mark.parametrize("options", [{"policy": "eager"}, {"policy": "strict"}, {"streaming": False}, {"contractions": "vendor"}], ids=str)
def test_left_as_written(options, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(partition, "attended", lambda joint: pytest.fail("asked for"))
    inputs = operands(torch.float32)
    step(tokamak.compile(FORMS["divided"], **{"target": "interpret", "strict": True, "dynamic": False, "cache_dir": "", **options}), inputs)


def test_small_ones_stay(monkeypatch):
    """The library's calls take longer than products of small matrices."""
    counts = []
    real = attended.attended
    monkeypatch.setattr(partition, "attended", lambda joint, results: counts.append(real(joint, results=results)))
    step(tokamak.compile(FORMS["divided"], target="interpret", strict=True, dynamic=False, cache_dir=""), operands(torch.float32))
    assert counts == [0]


def on_the_gpu(fn, inputs, *masks) -> list[str]:
    """What torch calls in the compiled step of `fn`, which is right."""
    want = step(fn, [wide(x) for x in inputs], *(m.double() if m.is_floating_point() else m for m in masks))
    usual = step(fn, [x.detach().clone().requires_grad_() for x in inputs], *masks)
    torch._dynamo.reset()
    with recording() as recorder:
        got = step(tokamak.compile(fn, strict=True, dynamic=False), inputs, *masks)
    for g, u, w in zip(got, usual, want, strict=True):
        assert g.shape == u.shape and g.dtype is u.dtype and error(g, w) <= max(1e-4, 1.5 * error(u, w))
    return [str(n.target) for r in recorder.graphs for n in r.values["aten"].graph.nodes]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_on_the_gpu(name, dtype):
    torch.manual_seed(1)
    shape = (1, 64, 256, 64) if name == "by bmm" else (1, 256, 64, 64) if "heads behind" in name else (4, 16, 256, 64)
    called = on_the_gpu(FORMS[name], [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3)])
    assert sum("attention" in c and "backward" in c for c in called) == (2 if name == "twice" else 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_torch_s_own_module_on_the_gpu(masked):
    torch.manual_seed(5)
    module = torch.nn.MultiheadAttention(512, 8, batch_first=True, device="cuda", dtype=torch.bfloat16)
    keys = torch.rand(8, 256, device="cuda") < 0.3
    keys[:, 0] = False
    masks = {"attn_mask": ~triangle(256).cuda(), "key_padding_mask": keys} if masked else {}
    inputs = [torch.randn(8, 256, 512, device="cuda").bfloat16().requires_grad_()]
    run = lambda module: lambda x: module(x, x, x, **masks)[0]
    want = step(run(copy.deepcopy(module).double()), [wide(x) for x in inputs])
    usual = step(run(module), [x.detach().clone().requires_grad_() for x in inputs])
    torch._dynamo.reset()
    with recording() as recorder:
        got = step(tokamak.compile(run(module), strict=True, dynamic=False), inputs)
    assert all(error(g, w) <= 1.5 * error(u, w) for g, u, w in zip(got, usual, want, strict=True))
    called = [str(n.target) for r in recorder.graphs for n in r.values["aten"].graph.nodes]
    assert sum("attention" in c and "backward" in c for c in called) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", SPENT)
def test_masks_on_the_gpu(name):
    torch.manual_seed(2)
    mask = torch.rand(8, 1, 256, 256, device="cuda") < 0.6
    mask[0, 0, 5], mask[1, 0, ::3], mask[2] = False, False, False
    called = on_the_gpu(SPENT[name], [torch.randn(8, 16, 256, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)], mask)
    biased = torch._fused_sdp_choice(*(torch.empty(1, 1, 256, 64, device="cuda").bfloat16() for _ in range(3)), mask[:1, :1].bfloat16())
    assert sum("attention" in c and "backward" in c for c in called) == (biased == SDPBackend.CUDNN_ATTENTION.value)
