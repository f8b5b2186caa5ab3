"""Random numbers of policy `fast`: by distribution and by seed; the other policies keep ATen's calls."""
import numpy as np
import pytest
import torch
from functorch.compile import aot_function
from torch.fx.experimental.proxy_tensor import make_fx

from tokamak.capture import tables  # noqa: F401  (fills the table)
from tokamak.capture.fx import Capture
from tokamak.ir.dtype import I64
from tokamak.ir.expr import Const, Random, walk
from tokamak.ir.graph import Compute, Opaque
from tokamak.ir.reference import evaluate

aten = torch.ops.aten
N = 40_000


def run(fn, *args, seed=5, policy="fast"):
    """Outputs of the captured `fn` by the reference, its seed being `seed`, and the opaque calls."""
    graph = Capture(make_fx(fn, tracing_mode="fake")(*args), policy).graph()
    out = evaluate(graph, [a.numpy() for a in args], opaque=lambda call, args, kwargs: (np.array([seed]),)).outputs
    return out, [n for n in graph.nodes if isinstance(n, Opaque)]


UNIFORM = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
X = torch.zeros(N)
DRAWS = {
    "rand": (lambda x: torch.rand(N), UNIFORM),
    "rand_like": (lambda x: torch.rand_like(x), UNIFORM),
    "rand f64": (lambda x: torch.rand(N, dtype=torch.float64), UNIFORM),
    "rand bf16": (lambda x: torch.rand(N, dtype=torch.bfloat16), UNIFORM),
    "uniform": (lambda x: aten.uniform(x, -1.0, 3.0), UNIFORM * 4 - 1),
    "randn": (lambda x: torch.randn(N), np.array([-6, -0.6745, 0, 0.6745, 6])),
    "normal": (lambda x: aten.normal_functional(x, 2.0, 3.0), np.array([-6, -0.6745, 0, 0.6745, 6]) * 3 + 2),
}


@pytest.mark.parametrize("name", DRAWS)
def test_quartiles(name):
    fn, quartiles = DRAWS[name]
    (out,), calls = run(fn, X)
    assert len(calls) == 1 and calls[0].target is aten.randint.low
    assert quartiles[0] <= out.min() and out.max() < quartiles[-1]
    share, _ = np.histogram(out, quartiles)
    assert np.all(abs(share / N - 0.25) < 0.012)


def test_bernoulli():
    for fn in (lambda x: torch.bernoulli(x), lambda x: aten.bernoulli.p(x, 0.3), lambda x: aten.bernoulli.Tensor(x, torch.full_like(x, 0.3))):
        (out,), _ = run(fn, torch.full((N,), 0.3))
        assert set(np.unique(out)) == {0.0, 1.0} and abs(out.mean() - 0.3) < 0.012


def test_one_seed_a_call_and_numbers_apart():
    def fn(x):
        return torch.rand(N), torch.rand(N), torch.randn(N)
    (a, b, c), calls = run(fn, X)
    assert len(calls) == 1
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03 and abs(np.corrcoef(a, c)[0, 1]) < 0.03
    (again, *_), _ = run(fn, X)
    (other, *_), _ = run(fn, X, seed=6)
    assert np.array_equal(a, again) and not np.array_equal(a, other)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("train", [True, False, None])
def test_dropout(p, train):
    x = torch.randn(N)
    (out, mask), calls = run(lambda x: aten.native_dropout(x, p, train), x)
    want, wanted_mask = aten.native_dropout(x, p, train)
    assert mask.dtype == bool and abs(mask.mean() - wanted_mask.float().mean().item()) < 0.012
    scale = 1 if train is False or p == 1 else 1 / (1 - p)
    np.testing.assert_allclose(out, np.where(mask, x.numpy() * np.float32(scale), 0), rtol=1e-6)
    assert out.dtype == want.numpy().dtype and len(calls) == (train is not False and 0 < p < 1)


def test_dropout_backward_uses_the_mask():
    x = torch.randn(1000, requires_grad=True)
    graphs = []

    def compiler(gm, _example):
        graphs.append(Capture(gm).graph())
        return gm
    aot_function(lambda x: torch.nn.functional.dropout(x, 0.4), fw_compiler=compiler, bw_compiler=compiler)(x).sum().backward()
    forward, backward = graphs
    assert sum(isinstance(n, Opaque) for n in forward.nodes) == 1 and not any(isinstance(n, Opaque) for n in backward.nodes)


@pytest.mark.parametrize("policy", ["eager", "strict"])
def test_other_policies_call_aten(policy):
    graph = Capture(make_fx(lambda x: (torch.rand_like(x), aten.native_dropout(x, 0.5, True)[0]), tracing_mode="fake")(X), policy).graph()
    assert [n.target for n in graph.nodes if isinstance(n, Opaque)] == [aten.rand_like.default, aten.native_dropout.default]


def test_no_two_draws_share_a_counter():
    """Four uniform numbers come of one counter, a normal one has its own: the counters of many draws of both kinds lie apart."""
    draws = (torch.randn, torch.rand, torch.rand, torch.randn, torch.rand) * 4
    graph = Capture(make_fx(lambda x: tuple(draw(N) for draw in draws), tracing_mode="fake")(X), "fast").graph()
    drawn = {e for n in graph.nodes if isinstance(n, Compute) for e in walk(n.expr) if isinstance(e, Random)}
    each = {"uniform": 4, "normal": 1}
    spans = sorted((e.offset.value // each[e.kind], (e.offset.value + N - 1) // each[e.kind]) for e in drawn)
    assert len(spans) == 20 and all(e.offset.value % 4 == 0 for e in drawn)
    assert all(end < start for (_, end), (start, _) in zip(spans, spans[1:]))


def test_an_offset_is_a_multiple_of_four():
    with pytest.raises(TypeError, match="offset of random numbers is 6, which is no multiple of 4"):
        Random("uniform", Const(1, I64), Const(6, I64), 0)
