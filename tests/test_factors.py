"""Factors that are the same along all that a sum sums, in front of it."""
from dataclasses import replace

import numpy as np
import pytest

from tokamak.fuse import lines
from tokamak.ir.expr import Reduce
from tokamak.ir.graph import Compute, fold
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.ir.text import print_expr
from tokamak.target import Target

LARGE = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8, fast=True)
GRADIENT = """graph gradient {
  input %x: f32[16, 9216, 256](2359296, 256, 1)
  input %dy: f32[16, 9216, 256](2359296, 256, 1)
  input %gamma: f32[256](1)
  input %std: f32[16, 32](32, 1)
  %scaled: f32[16, 9216, 256](2359296, 256, 1) = div(neg(mul(%dy[i0, i1, i2], %gamma[i2])), %std[i0, (i2 // 8)])
  %group: f32[16, 32](32, 1) for i2<9216, i3<8 = sum[i2, i3](mul(%scaled[i0, i2, i1*8 + i3], %x[i0, i2, i1*8 + i3]))
  %channel: f32[256](1) for i1<16, i2<9216 = sum[i1, i2](mul(%dy[i1, i2, i0], %x[i1, i2, i0]))
  return %group, %channel
}"""


def columns(graph) -> list[str]:
    """What is summed along columns of pixels."""
    parts = [part for n in graph.nodes if isinstance(n, Compute) and isinstance(part := fold(n), Reduce)]
    return [print_expr(p.args[0]) for p in parts if p.over[0].extent.constant == 9216]


def test_sums_that_differ_in_factors_alone_become_alike():
    found = columns(lines.whole_lines(parse_graph(GRADIENT), LARGE))
    assert len(found) == 2 and all(text.startswith("mul(%dy[") and "gamma" not in text and "std" not in text for text in found)


def test_roundings_that_a_policy_keeps_stay_where_they_are():
    found = columns(lines.whole_lines(parse_graph(GRADIENT), replace(LARGE, fast=False)))
    assert [text.startswith("mul(%dy[") for text in found] == [False, True]


def test_a_value_that_is_stored_is_read_as_it_is_stored():
    graph = parse_graph(GRADIENT.replace("return", "return %scaled,"))
    assert [text.startswith("mul(%dy[") for text in columns(lines.whole_lines(graph, LARGE))] == [False, True]


@pytest.mark.parametrize("made", ["div(neg(mul(%dy[i0, i1, i2], %gamma[i2])), %std[i0, (i2 // 3)])",
                                  "mul(3.0:f32, div(%dy[i0, i1, i2], mul(%gamma[i2], %std[i0, (i2 // 3)])))"])
def test_the_values_are_the_same(monkeypatch, made):
    monkeypatch.setattr(lines, "LEAST", 1)
    monkeypatch.setattr(lines, "LEAST_BROKEN", 1)
    monkeypatch.setattr(lines, "HELD", 1)
    graph = parse_graph(f"""graph small {{
  input %x: f32[2, 35, 15](525, 15, 1)
  input %dy: f32[2, 35, 15](525, 15, 1)
  input %gamma: f32[15](1)
  input %std: f32[2, 5](5, 1)
  %scaled: f32[2, 35, 15](525, 15, 1) = {made}
  %group: f32[2, 5](5, 1) for i2<35, i3<3 = sum[i2, i3](mul(%scaled[i0, i2, i1*3 + i3], %x[i0, i2, i1*3 + i3]))
  %channel: f32[15](1) for i1<2, i2<35 = sum[i1, i2](mul(%scaled[i1, i2, i0], %x[i1, i2, i0]))
  return %group, %channel
}}""")
    changed = lines.whole_lines(graph, LARGE)
    assert changed is not graph and not any("scaled" in print_expr(n.expr) for n in changed.nodes if isinstance(n, Compute) and fold(n))
    r = np.random.default_rng(0)
    values = [r.standard_normal(shape).astype("f4") for shape in ((2, 35, 15), (2, 35, 15), (15,), (2, 5))]
    for want, got in zip(evaluate(graph, values).outputs, evaluate(changed, values).outputs):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
