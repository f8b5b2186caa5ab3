"""Products of 16-bit matrices made larger for the vendor's kernels: the same values, rows at whole words, and only where that pays."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.fuse import pad, price
from tokamak.fuse import products as prices
from tokamak.tools.record import Recorder

BF16 = torch.bfloat16
PRODUCTS = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm")}


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def products(recorder: Recorder) -> list:
    """(extents of the factors and the result, reason) of each call of a product in the final graphs."""
    calls = [s for g in recorder.graphs for s in g.values["lower"].plan.steps if str(getattr(s, "target", "")) in PRODUCTS]
    return [([tuple(x.constant for x in v.shape) for v in c.args if hasattr(v, "node")], c.reason) for c in calls]


def run(fn, *args, grad=False, choice="vendor"):
    """(what `fn` gives compiled, its products); with `grad` the gradients of a weighted sum too."""
    def outcome(f):
        given = [a.clone().requires_grad_(grad) for a in args]
        out = f(*given)
        return [out.detach(), *(torch.autograd.grad((out.float() * weights).sum(), given) if grad else ())]
    torch._dynamo.reset()
    recorder = Recorder()
    with torch.no_grad():
        weights = torch.linspace(-1, 1, fn(*args).numel()).view(fn(*args).shape)
    got, want = outcome(tokamak.compile(fn, target="interpret", strict=True, recorder=recorder, cache_dir="", contractions=choice)), outcome(fn)
    for g, w in zip(got, want, strict=True):
        assert g.stride() == w.stride() and g.dtype is w.dtype
        torch.testing.assert_close(g, w, rtol=3e-2, atol=3e-2)
    return products(recorder)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(pad, "WORTH", -1.0)


CASES = {
    "columns": (lambda x, w: x @ w, (values(16, 32), values(32, 13))),
    "transposed": (lambda x, w: F.linear(x, w), (values(16, 32), values(13, 32))),
    "bias": (F.linear, (values(16, 32), values(13, 32), values(13))),
    "batched": (lambda x, w: F.linear(x, w) * 2, (values(2, 8, 32), values(13, 32))),
    "depth": (lambda x, w: x @ w, (values(16, 13), values(13, 24))),
    "all": (lambda x, w: x @ w, (values(11, 13), values(13, 21))),
    "left_transposed": (lambda x, w: x.t() @ w, (values(13, 11), values(13, 21))),
    "two": (lambda x, w, v: F.linear(x, w) @ v, (values(16, 32), values(13, 32), values(13, 9))),
    "scaled": (lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2), (values(16, 13), values(16, 32), values(32, 13))),
    "many": (torch.bmm, (values(3, 16, 32), values(3, 32, 13))),
    "many_transposed": (lambda x, w: x.mT @ w.mT, (values(3, 13, 11), values(3, 21, 13))),
    "many_depth": (torch.bmm, (values(3, 16, 13), values(3, 13, 24))),
    "many_added": (lambda c, x, w: torch.baddbmm(c, x, w, beta=0.5, alpha=2), (values(3, 11, 13), values(3, 11, 32), values(3, 32, 13))),
    "many_with_vector": (lambda c, x, w: torch.baddbmm(c, x, w), (values(13), values(3, 11, 32), values(3, 32, 13))),
    "attention": (lambda q, k, v: ((q @ k.mT) * 0.3).softmax(-1) @ v, (values(2, 3, 11, 16), values(2, 3, 11, 16), values(2, 3, 11, 16))),
    "computed": (lambda x, w: F.linear(torch.tanh(x), torch.sigmoid(w)).softmax(-1), (values(16, 32), values(13, 32))),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_same_values(always, name, grad):
    fn, args = CASES[name]
    found = run(fn, *args, grad=grad)
    assert found and all("so that rows begin at whole words" in why for _, why in found)
    assert all(s[-1] % 8 == 0 for shapes, _ in found for s in shapes if len(s) == 1)


def test_what_the_larger_extents_are(always):
    (shapes, why), = run(*[CASES["transposed"][0], *CASES["transposed"][1]])
    assert shapes == [(16, 32), (32, 16)] and "16 x 32 x 13 made 16 x 32 x 16" in why


def test_views_that_are_no_whole_matrix_stay(always):
    assert run(lambda x, w: x[:, 1:].contiguous() @ w[1:], values(16, 33), values(33, 13))[0][0] == [(16, 32), (32, 13)]


@pytest.mark.parametrize("shape", [(1,), (16, 1), (1, 13)])
@pytest.mark.parametrize("after", [lambda x: x, lambda x: F.gelu(x, approximate="tanh")], ids=["", "gelu"])
def test_what_is_added_to_every_column_stays(always, shape, after):
    """A bias that is no vector of columns is spread over them; zeros behind it would be added."""
    run(lambda x, w, b: after(torch.addmm(b, x, w)), values(16, 32), values(32, 13), values(*shape), grad=True)


def test_many_products_of_shared_memory(always):
    """One factor the same for all of them, one a window on larger memory: those stay as they are where their rows do."""
    shapes, why = run(lambda x, w: torch.bmm(x.expand(3, 16, 32), w), values(1, 16, 32), values(3, 32, 13))[0]
    assert shapes == [(3, 16, 32), (3, 32, 16)] and "16 x 32 x 13 made 16 x 32 x 16" in why
    assert run(torch.bmm, values(0, 16, 32), values(0, 32, 13))[0][0] == [(0, 16, 32), (0, 32, 13)]
    shapes, _ = run(lambda x, w: torch.bmm(x, w[..., 1:]), values(3, 16, 32), values(3, 32, 14))[0]
    assert shapes == [(3, 16, 32), (3, 32, 13)]
    shapes, _ = run(lambda x, w: torch.bmm(x[..., 1:], w), values(3, 16, 33), values(3, 32, 13))[0]
    assert shapes == [(3, 16, 32), (3, 32, 16)]


def test_it_has_to_pay():
    assert run(lambda x, w: x @ w, values(16, 32), values(32, 13))[0][0] == [(16, 32), (32, 13)]
    rates = pad.RATES["cuda", 90]

    def larger(m, k, n, batch=(), there=lambda node: True):
        from tokamak.ir.graph import Input, Opaque, View
        from tokamak.ir.index import as_index, row_major
        from tokamak.ir.dtype import BF16 as half
        nodes = [Input(c, tuple(map(as_index, s)), row_major(tuple(map(as_index, s))), half) for c, s
                 in (("x", (*batch, m, k)), ("w", (*batch, k, n)))]
        op = torch.ops.aten.bmm.default if batch else torch.ops.aten.mm.default
        call = Opaque(op, tuple(View(i, i.shape, i.strides, as_index(0)) for i in nodes), {}, (None,), True, "", tuple(nodes))
        return pad._larger(call, (None, (0, 1)), rates, there)
    assert larger(4096, 1024, 50257).after == (4096, 1024, 50264)
    assert larger(4096, 50257, 1024).after == (4096, 50264, 1024)
    assert larger(4096, 1024, 50264) is None and larger(1, 1024, 50257) is None and larger(64, 64, 65) is None
    assert larger(197, 64, 197, (768,)).after == (197, 64, 200) and larger(200, 64, 200, (768,)) is None and larger(33, 64, 33, (12,)) is None
    assert larger(197, 197, 64, (768,), lambda node: False).after == (197, 200, 64) and larger(197, 197, 64, (768,)) is None


def test_a_result_that_has_to_lie_as_it_is_comes_from_a_kernel_of_ours(monkeypatch):
    """Where that is worth it: no wider result is copied. What is computed further from a wider result needs no copy."""
    weights = values(100, 32, seed=1), values(101, 32, seed=2)
    linear = lambda x, w: F.linear(x, w)
    monkeypatch.setattr(pad, "WORTH", -1.0)
    assert "made 128 x 32 x 104" in run(linear, values(4, 32, 32), weights[1], choice="")[0][1]
    monkeypatch.setattr(price, "LEAST", 1e9)
    monkeypatch.setattr(pad, "SPARED", 1e9)
    assert not run(linear, values(4, 32, 32), weights[1], choice="")
    assert run(linear, values(4, 32, 32), weights[1])
    assert "made 128 x 32 x 104" in run(lambda x, w: F.linear(x, w).float().logsumexp(-1), values(4, 32, 32), weights[0], choice="")[0][1]


def test_the_price_of_rows_that_begin_anywhere():
    p = prices.PRODUCTS["cuda", 90]
    sizes = (1, 4096, 50257, 1024)
    assert prices.ours(p, 132, sizes)[0] < prices.ragged(p, 132, sizes) < 2 * prices.ours(p, 132, sizes)[0]
