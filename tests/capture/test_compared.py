"""A value that is compared with what was picked out of it is computed once: the gradient of an extreme is shared among the elements equal to it, and
none may be equal where the value was made again with other roundings."""
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.tools.record import Recorder

SHAPE = (4, 12, 9, 10)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch._dynamo.reset()
    torch.manual_seed(0)


def given(dtype, layout):
    """(x, w): in each channel one element is far above the others, so that it is the largest however the values are rounded."""
    x = torch.randn(SHAPE) * 0.7
    n, c = SHAPE[:2]
    x.view(n, c, -1).scatter_(2, torch.randint(0, SHAPE[2] * SHAPE[3], (n, c, 1)), 3 + torch.rand(n, c, 1))
    w = torch.rand(1, c, 1, 1) + 0.5
    return x.to(dtype).to(memory_format=layout).requires_grad_(), w.to(dtype).requires_grad_()


def value(x, w):
    return (x * w).sigmoid() * x


def both(x, w):
    return F.instance_norm(value(x, w)), value(x, w).amax((2, 3))


def smallest(x, w):
    return F.instance_norm(-value(x, w)), (-value(x, w)).amin((2, 3))


def infinite_norm(x, w):
    v = value(x, w)
    return F.instance_norm(v), torch.linalg.vector_norm(v, float("inf"), (2, 3))


def along(x, w):
    v = value(x, w).flatten(2)
    return F.layer_norm(v, v.shape[-1:]), v.max(-1)[0], v.amax(-1)


def whole(x, w):
    v = value(x, w)
    return F.instance_norm(v), v.max(), v.min()


def of_a_norm(x, w):
    v = F.layer_norm(value(x, w).flatten(2), (SHAPE[2] * SHAPE[3],))
    return v.tanh(), v.amax(-1)


def by_hand(x, w):
    v = value(x, w)
    mask = (v == v.amax((2, 3), keepdim=True)).to(v.dtype)
    return F.instance_norm(v), (v * mask).sum((2, 3)) / mask.sum((2, 3))


def picked(x, w):
    v = value(x, w).flatten(2)
    return F.layer_norm(v, v.shape[-1:]), (v.detach() >= v.topk(3, -1)[0][..., :1]).float() * v, v.gather(2, v.argmax(-1, keepdim=True))


CASES = [both, smallest, infinite_norm, along, whole, of_a_norm, by_hand, picked]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("target", ["", "interpret"])
def test_gradients_of_extremes(target, fn, dtype, layout):
    if dtype is torch.float32 and (target or layout is torch.contiguous_format):
        pytest.skip("nothing is rounded on the way but products before sums, which the interpreter does not leave out")
    grads = []
    x, w = given(dtype, layout)
    upstream = None
    for f in (tokamak.compile(fn, strict=True, cache_dir="", target=target), fn):
        out = f(x, w)
        upstream = upstream or [torch.randn_like(o) for o in out]
        grads.append(torch.autograd.grad(out, (x, w), upstream))
    tolerance = {torch.bfloat16: 0.04, torch.float16: 0.005, torch.float32: 1e-4}[dtype]
    for got, want in zip(*grads):
        assert got.isfinite().all()
        torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("target", ["", "interpret"])
def test_one_element_is_the_extreme_at_least(target, dtype, layout):
    """The value's own parts are stored for others; it is read by folds in two orders and compared in a third place."""
    def fn(x, w):
        s = (x * w).sigmoid()
        v = s * x
        largest, least = v.amax((2, 3), keepdim=True), v.amin((2, 3), keepdim=True)
        return s, v.sum(1), (v == largest).sum((2, 3)), (v <= least).sum((2, 3)), (v >= v.flatten(2).sort(-1)[0][..., -1:, None]).sum((2, 3))
    x, w = torch.randn(SHAPE).to(dtype).to(memory_format=layout), torch.randn(1, SHAPE[1], 1, 1).to(dtype)
    found = tokamak.compile(fn, strict=True, cache_dir="", target=target)(x, w)
    assert all(bool((count >= 1).all()) for count in found[2:])


def test_backward_keeps_what_is_compared_with_its_own_extreme():
    """And computes again, of the input, what is compared with another value."""
    kept = []
    x = torch.randn(64, 128, requires_grad=True)

    def pack(t):
        kept.append((tuple(t.shape), t.dtype))
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        tokamak.compile(lambda x: (x * 2).sin().amax(1), strict=True, cache_dir="")(x)
        with_extreme = list(kept)
        kept.clear()
        tokamak.compile(lambda x: torch.maximum((x * 2).sin(), (x * 3).cos()), strict=True, cache_dir="")(x)
    assert [k for k in kept if k[0] == (64, 128)] == [((64, 128), torch.float32)]
    assert len([k for k in with_extreme if k[0] == (64, 128)]) == 2


@pytest.mark.parametrize("shape", [(64, 100), (300, 5000)])
@pytest.mark.parametrize("largest", [True, False])
def test_what_is_computed_twice_in_one_graph_has_the_same_bits(largest, shape):
    """A product that is stored beside: the compiler adds to it unrounded only where it is not."""
    def fn(x):
        t = x * 1.2345678
        v = t + 0.1234567
        return t, ((v == v.amax(1, keepdim=True)) if largest else (v <= v.amin(1, keepdim=True))).sum(1)
    _, count = tokamak.compile(fn, strict=True, cache_dir="")(torch.randn(shape))
    assert bool((count >= 1).all())


@pytest.mark.parametrize("fn, exact", [(lambda x: (x * 3 + 1 == (x * 3 + 1).amax()).sum(), True),
                                       (lambda x: (x.sin() >= x.sin().topk(2)[0][1]).sum(), True),
                                       (lambda x: (x * 3 + 1 > x.sin()).sum(), False), (lambda x: (x == x.amax()).sum(), False),
                                       (lambda x: torch.softmax(x, 0), False), (lambda x: ((y := (x * 9).long()) == y.amax()).sum(), False)])
def test_only_what_is_compared_with_its_own_folds_needs_that(fn, exact):
    recorder = Recorder()
    tokamak.compile(fn, strict=True, cache_dir="", recorder=recorder)(torch.randn(90))
    (record,) = recorder.graphs
    assert record.values["target"].exact is exact and record.values["target"].fast is not exact
    assert {s.divide for _, s in record.values["lower"].bodies.values()} == {"exact" if exact else "reciprocal"}
