"""Equal parts of a model are planned, scheduled and lowered once, and the others copy that: the program is the one that planning each by itself
makes."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tokamak
from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.fuse import alike, plan
from tokamak.ir.graph import Compute
from tokamak.ir.parse import parse_graph
from tokamak.target import Target
from tokamak.tools.record import Recorder


class Layer(nn.Module):
    def __init__(self, width: int, p: float):
        super().__init__()
        self.up, self.down, self.norm, self.p = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width), p

    def forward(self, x):
        return self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), self.p, self.training))


def model(p: float = 0.0, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(24, p) for _ in range(layers)))


def programs(net: nn.Module, target: str) -> list[tuple]:
    """(steps as text, kernels, copies) of each graph of a training step of `net`."""
    found = []

    def one(gm, inputs, kind):
        seen: dict = {}
        def trace(stage, value):
            seen[stage] = value
            return value
        made = compile_graph(gm, inputs, tokamak.Options(target=target, strict=True, cache_dir=""), trace, kind)
        texts = [b.text if hasattr(b, "text") else [p.unit for p in b.parts] for b in seen["render"].values()]
        found.append((repr(seen["program"].steps), texts, len(seen["schedule"].copies)))
        return made
    torch._dynamo.reset()
    run = torch.compile(net, backend=lambda gm, inputs: aot.autograd(gm, inputs, one))
    run(torch.randn(6, 24)).square().sum().backward()
    return found


@pytest.mark.parametrize("target", ["", "interpret"])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_copies_are_what_planning_each_makes(monkeypatch, target, p):
    copied = programs(model(p), target)
    monkeypatch.setattr(plan, "parts", lambda *a: [replace(x, says=None) for x in alike.parts(*a)])
    alone = programs(model(p), target)
    assert [x[:2] for x in copied] == [x[:2] for x in alone]
    assert all(x[2] >= 2 for x in copied), [x[2] for x in copied]
    assert not any(x[2] for x in alone)


def test_copies_compute_the_same():
    net = model().eval()
    run, x = tokamak.compile(net, strict=True), torch.randn(6, 24, requires_grad=True)
    got, want = (torch.autograd.grad(f(x).square().sum(), [x, *net.parameters()]) for f in (run, net))
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


# -- which parts say the same --------------------------------------------------------------------------------------------------
def planned(text: str):
    return plan.plan(parse_graph(text), Target(vector_bytes=32, threads=4))


def kinds(text: str) -> int:
    """How many groups of `text` copy another."""
    return sum(getattr(g, "kind", None) is not None for g in planned(text).steps)


TWICE = """graph twice {{
  input %x: f32[64, 128](128, 1)
  input %y: f32[64, 128](128, 1)
  %a: f32[64](1) for i1<128 = sum[i1](%x[i0, i1])
  %b: f32[64, 128](128, 1) = div(%x[i0, i1], %a[i0])
  %c: f32[64](1) for i1<128 = sum[i1]({second})
  %d: f32[64, 128](128, 1) = div({second}, {by})
  return %b, %d{more}
}}"""


@pytest.mark.parametrize("changes, copies", [
    ({}, 1),
    ({"second": "mul(%y[i0, i1], 2.0:f32)"}, 0),          # another expression
    ({"more": ", %c"}, 0),                                 # a value that is stored in one alone
    ({"by": "%c[63 + -1*i0]"}, 0),                         # other coordinates
    ({"second": "%x[i0, i1]", "by": "%a[i0]"}, 0),         # one part
], ids=str)
def test_parts_that_differ_are_planned_themselves(changes, copies):
    assert kinds(TWICE.format(**{"second": "%y[i0, i1]", "by": "%c[i0]", "more": "", **changes})) == copies


def test_a_chain_of_sums_is_stored():
    """A residual stream: each kernel reads the sum before it, not all terms."""
    net = nn.Sequential(*(Layer(24, 0.0) for _ in range(6))).eval()

    class Stream(nn.Module):
        def forward(self, x):
            for layer in net:
                x = x + layer.down(F.gelu(layer.up(layer.norm(x))))
            return x
    with torch.no_grad():
        recorder = Recorder()
        run = tokamak.compile(Stream(), strict=True, recorder=recorder)
        x = torch.randn(5000, 24)
        torch.testing.assert_close(run(x), Stream()(x), rtol=1e-4, atol=1e-4)
    graph, = recorder.graphs
    assert max(len(set(g.reads) - set(g.nodes())) for g in graph.values["lower"].kernels) <= 6


KEPT = """graph kept {
  input %x: f32[64, 128](128, 1)
  input %w: f32[128, 128](128, 1)
  %s0: f32[64](1) for i1<128 = sum[i1](%x[i0, i1])
  %y0: f32[64, 128](128, 1) = sub(%x[i0, i1], %s0[i0])
  %c0 = call aten.mm.default(%y0, %w) -> f32[64, 128](128, 1) "torch makes it"
  %r0: f32[64, 128](128, 1) = result %c0 0
  %x1: f32[64, 128](128, 1) = add(%r0[i0, i1], sub(%x[i0, i1], %s0[i0]))
  %s1: f32[64](1) for i1<128 = sum[i1](%x1[i0, i1])
  %y1: f32[64, 128](128, 1) = sub(%x1[i0, i1], %s1[i0])
  %c1 = call aten.mm.default(%y1, %w) -> f32[64, 128](128, 1) "torch makes it"
  %r1: f32[64, 128](128, 1) = result %c1 0
  %x2: f32[64, 128](128, 1) = add(%r1[i0, i1], sub(%x1[i0, i1], %s1[i0]))
  %s2: f32[64](1) for i1<128 = sum[i1](%x2[i0, i1])
  %m0: f32[64](1) = mul(%s0[i0], 0.0078125:f32)
  %m1: f32[64](1) = mul(%s1[i0], 0.0078125:f32)
  return %s2, %m0, %m1
}"""


def test_what_is_kept_of_each_layer_ties_no_layers_together():
    """The means of rows, kept at the end, read the sums that the next layer reads, too, behind a call."""
    graph = parse_graph(KEPT)
    planner = plan._Planner(graph, Target(vector_bytes=32, threads=4), {})
    found = alike.parts(graph, planner.sources, planner.readers, planner.pinned)
    names = {n: name for name, n in zip(("s0", "y0", "x1", "s1", "y1", "x2", "s2", "m0", "m1"), (n for n in graph.nodes if isinstance(n, Compute)))}
    assert sorted(sorted(names[n] for n in p.nodes) for p in found) == [["m0", "s0", "y0"], ["m1", "s1", "x1", "y1"], ["s2", "x2"]]
