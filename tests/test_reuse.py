"""Pointwise kernels of a GPU write where they have read, if nobody needs what was there."""
from __future__ import annotations

import pytest
import torch

import tokamak
from tokamak.codegen import host
from tokamak.fuse.axes import Group
from tokamak.schedule.matmul import MatmulSchedule
from tokamak.tools.record import Recorder


def taken(fn, *args) -> list[int]:
    """How many values take over memory in each graph of `fn`."""
    return [len(host.reused(g.values["lower"].plan, g.values["render"])) for g in graphs(fn, args, "vendor", rtol=1e-4, atol=1e-5)]


def graphs(fn, args, contractions: str, **tolerance: float) -> list:
    """The graphs of `fn`, compared with eager, twice: no call may change an argument."""
    torch._dynamo.reset()
    recorder = Recorder()
    run = tokamak.compile(fn, target="interpret", strict=True, cache_dir="", contractions=contractions, recorder=recorder)
    before = [a.clone() for a in args]
    for _ in range(2):
        torch.testing.assert_close(run(*args), fn(*args), **tolerance)
    assert all(torch.equal(a, b) for a, b in zip(args, before))
    return recorder.graphs


def square(n=24, seed=0):
    return torch.randn(n, n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fn, count", [
    (lambda x, y: (x @ y).relu() @ y, 1),                                        # over the product
    (lambda x, y: ((x @ y).relu() @ y).tanh() @ y, 2),
    (lambda x, y: (x @ y).relu(), 1),                                            # a result of the graph may be written there
    (lambda x, y: x.relu() @ y, 0),                                              # an input stays
    (lambda x, y: [(p := x @ y), p.relu() @ y], 0),                              # a result stays
    (lambda x, y: (p := x @ y).relu() @ y @ p, 0),                               # needed later
    (lambda x, y: (x @ y).t().contiguous().relu() @ y, 0),                       # read at other places
    (lambda x, y: ((p := x @ y) + p.flip(0)).relu() @ y, 0),
    (lambda x, y: ((p := x @ y) + p[0]).relu() @ y, 0),
    (lambda x, y: (x @ y).softmax(1) @ y, 0),                                    # folded
    (lambda x, y: (x @ y).double().relu() @ y.double(), 0),                      # another type
    (lambda x, y: [(p := x @ y).relu() @ y, p.tanh() @ y], 0),                   # two stores of one kernel read it
    (lambda x, y: ((x @ y) * (y @ x)).relu() @ y, 1),
], ids=lambda x: str(x) if isinstance(x, int) else "")
def test_what_is_taken_over(fn, count):
    assert taken(fn, square(), square(seed=1)) == [count]


def test_what_a_view_shows_stays():
    def fn(x, y):
        p = x @ y
        return torch.ops.aten.as_strided(p, (24,), (25,)).clone(), p.relu() @ y
    taken(fn, square(), square(seed=1))


def test_what_a_collective_may_still_read_stays():
    """An operator that is not torch's own may go on reading, on a stream of its own, until somebody waits for it."""
    with torch.library._scoped_library("tokamak_test_reuse", "FRAGMENT") as library:
        library.define("gather(Tensor x) -> Tensor")
        library.impl("gather", lambda x: torch.cat([x, x]), "CompositeExplicitAutograd")

        def fn(x, y):
            p = x @ y
            return torch.ops.tokamak_test_reuse.gather(p), p.relu() @ y
        assert taken(fn, square(), square(seed=1)) == [0]


def test_training():
    layers = torch.nn.Sequential(*(m for _ in range(3) for m in (torch.nn.Linear(24, 24), torch.nn.GELU()))).double().float()

    def step(x):
        out = layers(x).square().sum()
        return torch.autograd.grad(out, [x, *layers.parameters()])
    x = square().requires_grad_()
    run = tokamak.compile(layers, target="interpret", strict=True, cache_dir="", contractions="vendor")
    got = torch.autograd.grad(run(x).square().sum(), [x, *layers.parameters()])
    for g, w in zip(got, step(x)):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


# -- behind products ---------------------------------------------------------------------------------------------------------
def half(*shape, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 4).bfloat16()


def added(fn, *args) -> list[int]:
    """As `taken`, of 16-bit products that are kernels of ours: how many of these take over memory."""
    return [sum(isinstance(g.values["lower"].bodies[s][1], MatmulSchedule) and any(n in found for n in s.nodes())
                for s in g.values["lower"].plan.steps if isinstance(s, Group))
            for g in graphs(fn, args, "kernels", rtol=3e-2, atol=3e-2) for found in [host.reused(g.values["lower"].plan, g.values["render"])]]


@pytest.mark.parametrize("fn, count", [
    (lambda r, x, w, v: ((x @ w) + r.sort().values).relu(), 1),
    (lambda r, x, w, v: [(s := r.sort().values), ((x @ w) + s).relu()], 0),               # a result stays
    (lambda r, x, w, v: ((x @ w) + (s := r.sort().values)).relu() * s.t(), 0),                    # read at other places, too
    (lambda r, x, w, v: ((s := r.sort().values) @ w + s).relu(), 0),                      # a factor, too
    (lambda r, x, w, v: ((h := (x @ w + r.sort().values).relu()) @ v).relu() + h.sum(), 1),       # a second layer behind it reads what is written
    (lambda r, x, w, v: ((h := (x @ w + (s := r.sort().values)).relu()) @ v).relu() + s, 0),      # that one reads it once more
], ids=lambda x: str(x) if isinstance(x, int) else "")
def test_products_write_over_what_is_added_to_them(fn, count):
    args = half(128, 128), half(128, 128, seed=1), half(128, 128, seed=2), half(128, 128, seed=3)
    assert added(fn, *args) == [count]


@pytest.mark.parametrize("fn", [
    lambda b, x, y: b.mul_(0.9).add_(x @ y, alpha=0.1),
    lambda b, x, y: b.copy_((x @ y).relu()),
    lambda b, x, y: b.lerp_(torch.tanh(x @ y), 0.3),
    lambda b, x, y: b.add_((s := (x @ y).softmax(1)) + s.sum(0)),
], ids=["moved", "copied", "lerp", "folded"])
def test_what_is_written_into_an_input_lies_there(fn):
    def step(b, x, y):
        fn(b, x, y)
        return x.sum()
    run = tokamak.compile(step, target="interpret", strict=True, cache_dir="", contractions="vendor")
    held, want = square(seed=2), square(seed=2)
    for seed in (3, 4):
        x, y = square(seed=seed), square(seed=seed + 10)
        torch.testing.assert_close(run(held, x, y), step(want, x, y), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(held, want, rtol=1e-4, atol=1e-5)


def test_a_value_that_an_input_receives_takes_over_no_memory():
    def fn(b, x):
        held = b.repeat(3, 1) * 1
        b.copy_((held * x).sum(0))
        rows = b.repeat(3, 1)
        b.lerp_(rows[0] + x[0], 0.3)
        return held, rows
    run = tokamak.compile(fn, target="interpret", strict=True, cache_dir="")
    held, want, x = square()[0], square()[0], square(seed=1)[:3]
    torch.testing.assert_close(run(held, x), fn(want, x))
    torch.testing.assert_close(held, want)
