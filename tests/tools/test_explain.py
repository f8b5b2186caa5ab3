"""`tokamak.explain`."""
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tokamak
from tokamak.capture.fx import Unsupported
from tokamak.fuse.reason import CODES
from tokamak.tools.explain import explanation
from tokamak.tools.record import recording

from .programs import Block, Dropped, branch, broken, broken_at_once, chain, line_of


@pytest.fixture(autouse=True)
def strict():
    torch.manual_seed(0)
    with tokamak.scope(strict=True):
        yield


def test_kernels_with_operations_and_lines():
    found, = tokamak.explain(chain, *(torch.randn(8, 32) for _ in range(3))).kernels
    assert found.operations == ("pow.Tensor_Scalar", "mul.Tensor", "add.Tensor")
    first = line_of(chain, "x.pow")
    assert [s.line for s in found.sources] == [first, first + 1, first + 2] and found.sources[0].code == "y = x.pow(2)"
    assert dict(found.words)["n0"] == "256" and "x" in dict(found.words).values()


def test_graph_breaks_have_a_line():
    e = tokamak.explain(broken, torch.randn(4))
    where, = e.breaks
    assert where.place.line == line_of(broken, "graph_break") and "graph_break" in where.reason and where.code == "broken"
    assert len(e.frames) == len(e.graphs) == 2


def test_a_break_before_any_operation_has_a_line_too():
    where, = tokamak.explain(broken_at_once, torch.randn(4)).breaks
    assert where.place.line == line_of(broken_at_once, "graph_break") and where.code == "broken_at_once"


def test_a_break_in_what_a_function_only_calls_has_the_line_there():
    places = [b.place.line for b in tokamak.explain(lambda x: broken_at_once(x), torch.randn(4)).breaks]
    assert places and set(places) == {line_of(broken_at_once, "graph_break")}


def test_a_branch_on_a_tensors_value():
    where, = tokamak.explain(branch, torch.ones(4)).breaks
    assert where.place.line == line_of(branch, "if ") and "branches on a tensor's value" in where.reason


def test_why_dynamo_captured_again():
    e = tokamak.explain(lambda x: x + 1, torch.randn(4), also=[(torch.randn(5),), (torch.randn(6),)])
    again, = e.recompiles
    assert "size mismatch" in again.reason and "expected 4, actual 5" in again.reason
    assert [k.how for k in e.kernels][1:] == ["process"]


def test_backward_is_explained_and_leaves_gradients_alone():
    model = Block()
    e = tokamak.explain(model, torch.randn(4, 16))
    assert [g.kind for g in e.graphs] == ["forward", "backward"] and all(p.grad is None for p in model.parameters())


def test_a_training_step_that_runs_backward_itself():
    model = Block()

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss
    e = tokamak.explain(step, torch.randn(4, 16))
    assert [g.kind for g in e.graphs] == ["forward", "backward"] and "backward" in e.breaks[0].reason
    found = tokamak.profile(step, torch.randn(4, 16), seconds=0.01)
    assert found.compiled.bytes > 0 and list(found.compiled.phases) == ["forward"]


def test_unfused_edges_and_opaque_calls_say_why_and_what_it_costs():
    with torch.no_grad():
        e = tokamak.explain(Block(), torch.randn(4, 16))
    call, = e.opaque
    assert call.op == "addmm.default" and call.reason and call.module == "fc" and call.bytes == 4 * (16 + 64 + 256 + 64)
    assert all(x.code in CODES and x.bytes == 256 for x in e.edges) and {"opaque"} == {x.code for x in e.edges}
    assert [x.bytes for x in e.edges] == sorted((x.bytes for x in e.edges), reverse=True)


def test_a_graph_that_torch_runs_is_told_call_by_call(monkeypatch):
    def unable(*_, **__):
        raise Unsupported("a test")
    monkeypatch.setattr("tokamak.backend.plan", unable)
    e = tokamak.explain(chain, *(torch.randn(8, 32) for _ in range(3)))
    assert [o.op for o in e.opaque] == ["pow.Tensor_Scalar", "mul.Tensor", "add.Tensor"] and not e.kernels and e.before == e.after
    assert [o.source.line - e.opaque[0].source.line for o in e.opaque] == [0, 1, 2] and "a test" in e.opaque[0].reason
    assert e.after.operations == 3 and sum(o.bytes for o in e.opaque) == e.after.bytes > 0
    told = str(e)
    assert "3 operations became 0 kernels and 3 calls of torch" in told and "compiled in" not in told


def test_planning_backward_is_no_part_of_a_capture():
    found = tokamak.explain(chain, *(torch.randn(8, 32, requires_grad=True) for _ in range(3)))
    forward, backward = found.graphs
    assert (forward.kind, backward.kind) == ("forward", "backward")
    timed = replace(found, compiling=5.0, graphs=(replace(forward, seconds={"fuse": 2.0}), replace(backward, seconds={"fuse": 4.0})))
    assert "first call: 3 s to capture it, 6 s to plan it" in str(timed).replace("3.00 s", "3 s").replace("6.00 s", "6 s")


def test_what_eager_writes_in_place_it_does_not_copy():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def average(e, p):
        e.mul_(0.9).add_(p, alpha=0.1)

    def copied(e, p):
        e.copy_(p * 2)
    for fn, accesses in ((average, 2 + 3), (copied, 2 + 2)):
        e, p = torch.randn(16, 16), torch.randn(16, 16)
        with Count() as count:
            fn(e, p)
        before = tokamak.explain(fn, e, p).before
        assert (before.operations, before.accesses, before.bytes) == (count.calls, accesses, accesses * 1024)


def test_what_backward_computes_again_is_no_operation_of_eager():
    def fn(x):
        return (x.exp() + 1).sum()
    e = tokamak.explain(fn, torch.randn(64, requires_grad=True))
    forward, backward = e.graphs
    assert forward.calls == 3 and backward.calls <= 2


def test_it_prints_and_all_of_it_is_json():
    e = tokamak.explain(broken, torch.randn(4), also=[(torch.randn(5),)])
    text = str(e)
    for words in ("2 graph breaks", "captured again as 0/1: broken", "poi_fused_mul_0", "programs.py"):
        assert words in text, words
    data = json.loads(e.to_json())
    assert len(data["graphs"]) == 4 and data["graphs"][0]["kernels"][0]["fewest"] == 32


def test_a_break_is_shown_once_with_what_to_do():
    def fn(x):
        y = x * 2
        print("x")
        return y + 1
    text = str(tokamak.explain(fn, torch.randn(4), also=[(torch.randn(5),)]))
    assert text.count("\ngraph break behind captures 0/0, 0/1") == 1 and "2 graph breaks" in text and "report an issue to PyTorch" not in text
    assert "    mend: print behind the compiled function" in text and "    mend: torch.compile(..., dynamic=True)" in text


def test_a_compiled_module_is_explained_as_its_original():
    assert tokamak.explain(torch.compile(Block(), backend="eager"), torch.randn(4, 16)).kernels


def test_loops_that_share_no_axis_are_kernels_of_their_own_whatever_is_known_of_sizes():
    def kernels(fn, **how):
        torch._dynamo.reset()
        with recording() as seen:
            tokamak.compile(fn, **how)(torch.randn(5, 32, requires_grad=True))
        return [k.name for g in explanation(seen).graphs if g.kind == "forward" for k in g.kernels]
    norm = torch.nn.LayerNorm(32)
    for how in ({}, {"dynamic": True}):
        rows, flat = kernels(lambda x: (norm(x), x.reshape(-1)[1:] * 2), **how)
        assert rows.startswith("per_fused_native_layer_norm") and flat.startswith("poi_fused_mul")
        whole, = kernels(Dropped(), **how)                # a mask that is drawn by rows is the norm's own
        assert whole.startswith("per_fused_") and "native_dropout" in whole and "native_layer_norm" in whole

def two_products(x, y):
    return x.sin() @ y + x.cos() @ x


def test_products_that_the_vendor_adds_up_have_their_names_and_lines():
    """The second is a call of a function of ours, which adds to what the first gives."""
    x, line = torch.randn(64, 64), line_of(two_products, "@")
    with recording(target="interpret") as recorder, torch.no_grad():
        torch.compile(two_products, backend="tokamak")(x, x + 1)
    e = explanation(recorder)
    assert [(o.op, o.name, o.source.line) for o in e.opaque] == [("mm.default", name, line) for name in ("mm", "mm_1")]


def test_a_call_of_torch_says_why_torch_runs_it_and_where_the_operators_are_listed():
    ordered = lambda x: x.sort().values + 1
    call, = tokamak.explain(ordered, torch.randn(8)).opaque
    assert call.op == "sort.default" and call.reason == "no kernel for this operator, torch runs it (docs/operators.md)"
    assert (Path(__file__).parents[2] / "docs/operators.md").is_file()
    with tokamak.scope(opaque_only=True):
        assert {"the option opaque_only leaves every operator to torch"} == {o.reason for o in tokamak.explain(ordered, torch.randn(8)).opaque}
