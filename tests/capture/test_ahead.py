"""Backward graphs that are planned while forward's kernels are built: taken only for the graph that they were made of."""
from __future__ import annotations

import threading

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tokamak
from tokamak import backend
from tokamak.capture.ahead import Ahead, said
from tokamak.errors import BuildError
from tokamak.options import Options
from tokamak.runtime.rehearsal import calls, Rehearsal
from tokamak.target import Target


def traced(fn, *shapes, dtype=torch.float32) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(s, dtype=dtype) for s in shapes))


def product(x, y):
    return (x * 2.0 + y).sum(0)


def test_equal_graphs_say_the_same():
    assert said(traced(product, (4, 8), (4, 8))) == said(traced(product, (4, 8), (4, 8)))


@pytest.mark.parametrize("other", [
    traced(product, (4, 8), (1, 8)),
    traced(product, (4, 8), (4, 8), dtype=torch.float64),
    traced(lambda x, y: (y * 2.0 + x).sum(0), (4, 8), (4, 8)),
    traced(lambda x, y: (x * 2 + y).sum(0), (4, 8), (4, 8)),
    traced(lambda x, y: (x * -2.0 + y).sum(0), (4, 8), (4, 8)),
    traced(lambda x, y: (x * 2.0 + y).sum(1), (4, 8), (4, 8)),
    traced(lambda x, y: (x * 2.0 - y).sum(0), (4, 8), (4, 8)),
    traced(lambda x, y: (x * 2.0 + y.t().contiguous().t()).sum(0), (4, 8), (4, 8)),
], ids=["shape", "type", "arguments", "integer", "number", "axis", "operator", "strides"])
def test_graphs_that_differ_do_not(other):
    assert said(other) != said(traced(product, (4, 8), (4, 8)))


def test_a_graph_with_tensors_of_its_own_says_nothing():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.ones(8)

        def forward(self, x):
            return x + self.w
    assert said(fx.symbolic_trace(Holder())) is None


def test_what_was_made_is_given_out_once_and_for_the_same_graph_only():
    graph, made = traced(product, (4, 8), (4, 8)), []
    ahead = Ahead(lambda gm: made.append(gm) or "made")
    ahead.now()
    assert not made and ahead.take(graph) is None
    ahead.expect(graph)
    ahead.now()
    ahead.now()
    assert made == [graph] and ahead.take(traced(product, (4, 8), (4, 8))) == "made" and ahead.take(graph) is None
    ahead.expect(graph)
    ahead.now()
    assert ahead.take(traced(product, (4, 9), (4, 9))) is None


def test_a_graph_that_is_changed_later_is_not_what_was_planned():
    graph = traced(product, (4, 8), (4, 8))
    ahead = Ahead(lambda gm: "made")
    ahead.expect(graph)
    ahead.now()
    next(n for n in graph.graph.nodes if n.target is torch.ops.aten.mul.Tensor).args = (next(iter(graph.graph.nodes)), 3.0)
    assert ahead.take(graph) is None


def test_work_that_fails_is_left_to_its_time():
    def fails(gm):
        raise ValueError("too early")
    graph = traced(product, (4, 8), (4, 8))
    ahead = Ahead(fails)
    ahead.expect(graph)
    ahead.now()
    assert ahead.take(graph) is None


def step(compiled, model, x) -> list[torch.Tensor]:
    model.zero_grad()
    loss = compiled(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
def test_a_training_step_is_right_and_its_backward_planned_once(watched, monkeypatch):
    """Where a recorder looks at the stages, each is done at its time."""
    begun, captured = [], []
    monkeypatch.setattr(backend, "_begun", lambda gm, real=backend._begun, **named: begun.append(gm) or real(gm, **named))
    monkeypatch.setattr(backend, "_understood", lambda gm, *a, real=backend._understood: captured.append(gm) or real(gm, *a))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(12, 16)
    from tokamak.tools.record import Recorder
    extra = {"recorder": Recorder()} if watched else {}
    compiled = tokamak.compile(model, target="interpret", strict=True, **extra)
    for a, b in zip(step(compiled, model, x), step(model, model, x)):
        torch.testing.assert_close(a, b)
    assert len(begun) == (0 if watched else 1) and len(captured) == 2
    for a, b in zip(step(compiled, model, x), step(model, model, x)):
        torch.testing.assert_close(a, b)
    assert len(captured) == 2


# -- kernels that are waited for at the first call ------------------------------------------------------------------------------
def softened(**options):
    """(softmax of a product as a boxed back end's function, its argument)."""
    x = torch.randn(4, 8)
    return backend.backend(fx.symbolic_trace(lambda x: (torch.softmax(x * 2.0, -1),)), [x], target="interpret", cache_dir="", **options), x


def test_a_gpus_kernels_are_waited_for_when_a_function_is_called_first(monkeypatch):
    waited = []

    def begin(*args, real=backend._begin_kernels):
        wait = real(*args)
        return lambda: waited.append(None) or wait()
    monkeypatch.setattr(backend, "_begin_kernels", begin)
    fn, x = softened(strict=True)
    assert not waited
    for _ in range(2):
        torch.testing.assert_close(fn(x)[0], torch.softmax(x * 2.0, -1))
    assert len(waited) == 1


def test_a_kernel_that_cannot_be_built_leaves_the_graph_to_torch(monkeypatch):
    def begin(*args):
        def wait():
            raise BuildError("no")
        return wait
    monkeypatch.setattr(backend, "_begin_kernels", begin)
    fn, x = softened()
    with pytest.warns(UserWarning, match="its kernels could not be built: no"):
        torch.testing.assert_close(fn(x)[0], torch.softmax(x * 2.0, -1))
    torch.testing.assert_close(fn(x)[0], torch.softmax(x * 2.0, -1))
    with pytest.raises(BuildError):
        softened(strict=True)[0](x)


def test_torchs_calls_are_handed_over_before_they_run_and_none_is_made_then():
    class Noted(Rehearsal):
        def add(self, program, inputs):
            seen.extend(c[0] for c in calls(program, inputs))

        def end(self):
            seen.append("end")
    seen, inputs = [], [torch.randn(4, 8), torch.randn(8, 4)]
    options = Options(target="interpret", strict=True, cache_dir="", contractions="vendor")
    fn = backend.compile_or_fall_back(traced(lambda x, w: (torch.mm(x, w).relu(),), (4, 8), (8, 4)), inputs, "inference", options, rehearsal=Noted())
    assert seen == [torch.ops.aten.mm.default]
    for _ in range(2):
        torch.testing.assert_close(fn(list(inputs))[0], torch.mm(*inputs).relu())
    assert seen == [torch.ops.aten.mm.default, "end"]


@pytest.mark.parametrize("there", [False, True])
def test_what_is_done_meanwhile_is_done_while_kernels_are_built(there, monkeypatch):
    done = threading.Event()

    def kernels(*args, meanwhile):
        if not there:
            meanwhile()
            assert done.wait(60)
        return {"k": "made"}
    monkeypatch.setattr(backend, "_gpu_kernels", kernels)
    wait = backend._begin_kernels({}, Target("cuda:0", kind="gpu"), Options(), lambda stage, value: value, done.set)
    assert wait() == {"k": "made"} and done.is_set() != there
