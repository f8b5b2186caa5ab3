"""Folds over small windows as chains of operations, on GPUs: the same values, and only for windows; what reads the same windows is one kernel."""
from __future__ import annotations

import numpy as np
import pytest

from tokamak.fuse.axes import Group
from tokamak.fuse.plan import plan
from tokamak.fuse.unroll import unrolled
from tokamak.ir.expr import Reduce, walk
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.target import Target, target

GPU = target("cpu", interpret=True)
WINDOWS = {name: f"""graph windows {{
  input %x: f32[4, 20](20, 1)
  %out: {kind}[4, 9](9, 1) for i2<3 = {fold}
  return %out
}}""" for name, kind, fold in (
    ("sum", "f32", "sum[i2](%x[i0, i1*2 + i2])"), ("max", "f32", "max[i2](%x[i0, i1*2 + i2])"), ("prod", "f32", "prod[i2](%x[i0, i1*2 + i2])"),
    ("place", "i64", "argmax.1[i2](%x[i0, i1*2 + i2], coord(i1*2 + i2))"), ("value", "f32", "argmin[i2](%x[i0, i1*2 + i2], coord(i1*2 + i2))"),
    ("any", "bool", "any[i2](lt(%x[i0, i1*2 + i2], 0.0:f32))"))}


def folds(graph) -> int:
    return sum(isinstance(e, Reduce) for n in graph.nodes if hasattr(n, "expr") for e in walk(n.expr))


@pytest.mark.parametrize("name", WINDOWS)
def test_the_same_values(name):
    graph, x = parse_graph(WINDOWS[name]), np.random.default_rng(0).integers(-2, 3, (4, 20)).astype(np.float32)
    x[1, 3], x[2, 6:9], x[3, :5] = np.nan, np.nan, -np.inf
    made = unrolled(graph, GPU)
    assert folds(graph) == 1 and folds(made) == 0
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(*(np.asarray(evaluate(g, [x]).outputs[0]) for g in (made, graph)))


@pytest.mark.parametrize("fold", ["sum[i2](%x[i0, i2])", "sum[i2](%x[i0, i1 + i2]) for i2<28", "sum[i2](%y[i0, i1, i2])",
                                  "sum[i2](%x[i0, i1*3 + i2])"])
def test_what_is_no_small_window_stays(fold):
    count = 28 if "28" in fold else 3
    graph = parse_graph(f"""graph others {{
  input %x: f32[4, 64](64, 1)
  input %y: f32[4, 9, 3](27, 3, 1)
  %out: f32[4, 9](9, 1) for i2<{count} = {fold.split(" for ")[0]}
  return %out
}}""")
    assert unrolled(graph, GPU) is graph


def test_a_cpu_folds_in_loops():
    graph = parse_graph(WINDOWS["max"])
    assert unrolled(graph, Target()) is graph


def test_two_readers_of_the_same_windows_are_one_kernel():
    graph = parse_graph("""graph two {
  input %x: f32[4096, 130](130, 1)
  %ends: f32[4096, 64](64, 1) = add(%x[i0, i1*2], %x[i0, 2 + i1*2])
  %middle: f32[4096, 64](64, 1) = exp(%x[i0, 1 + i1*2])
  return %ends, %middle
}""")
    kernel, = (s for s in plan(graph, GPU).steps if isinstance(s, Group))
    assert len(kernel.members) == len(kernel.axes) == 2
