"""The text of a graph: a golden, the round trip of everything the grammar has, and what malformed text is told."""
from __future__ import annotations

import math

import numpy as np
import pytest

from tokamak.ir.dtype import BF16, F32, F64, I64, foreign
from tokamak.ir.expr import Cast, Const, Coord, Load, Op, Random, Reduce, Scalar, Scan
from tokamak.ir.graph import Compute, Graph, Input, Opaque, Origin, Result, Scatter, View, Write
from tokamak.ir.index import Axis, Fetch, FloorDiv, Max, Min, Mod, Size, as_index, row_major
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.ir.text import print_expr, print_graph
from tokamak.ir.tokens import TextError


def tensor(name, *shape, dtype=F32):
    shape = tuple(map(as_index, shape))
    return Input(name, shape, row_major(shape), dtype)


def whole(node):
    return View(node, node.shape, node.strides, as_index(0))


I, J = Axis(0, 3), Axis(1, 4)
S = Size("s0", 2)
X, IDS, SYM, C = tensor("x", 3, 4), tensor("ids", 3, dtype=I64), tensor("y", S, dtype=BF16), tensor("c", 4)
ROW = Load(IDS, (I,))
EXP = Op("exp", Load(X, (I, J)))
SOFT = Compute((3,), None, Cast(BF16, Reduce("sum", (J,), (EXP,)), True))
TWICE = Compute((3, 4), (as_index(1), as_index(3)), Op("mul", Op("add", EXP, Const(-0.0, F32)), Op("add", EXP, Const(-0.0, F32))), tag=2)
GATHER = Compute((3, 4), None, Load(X, (as_index(Fetch(ROW, 3)), J), Op("lt", Coord(as_index(J) + as_index(I) * -2), Const(2, I64)),
                                    Const(math.inf, F32)))
ARG = Compute((), None, Reduce("argmax", (I, J), (Load(X, (I, J)), Coord(as_index(I) * 4 + J)), 1))
SCAN = Compute((3, 4), None, Scan("sum", J, (Load(X, (I, J)),), reverse=True))
NOISE = Compute((3,), None, Random("uniform", Const(7, I64), Cast(I64, Scalar("seed", F64)), as_index(I) + 5))
N = Axis(0, S)
WRAP = Compute((S,), None, Load(SYM, (as_index(Mod(as_index(N) + 1, as_index(S))),)))
ODD = Compute((S,), None, Coord(as_index(Min(as_index(N), as_index(FloorDiv(as_index(N), as_index(2))))) + Max(as_index(N), as_index(S) * 3)))
PUT = Scatter(Const(0.0, F32), X.shape, X.strides, (as_index(3),), (as_index(Fetch(ROW, 3)), as_index(I)), Load(C, (I,)), "sum",
              Op("ne", ROW, Const(1, I64)))
LAST = Scatter(X, X.shape, X.strides, (as_index(3),), (as_index(I), as_index(0)), Const(math.nan, F32), "last")
CALL = Opaque("aten.mm.default", (whole(X), (View(X, (as_index(4),), (as_index(1),), as_index(4)), 1.5, None, "a\"b", [True, as_index(S)])),
              {"dtype": complex, "alpha": Scalar("seed", F64)},
              (((as_index(3), as_index(4)), row_major((as_index(3), as_index(4))), F32, "cpu"), None), False, "no table entry", (X,))
MM = Result(CALL, 0, X.shape, X.strides, F32)
MASK = Compute((3, 4), None, Op("isnan", Load(MM, (I, J))))
NODES = (X, IDS, SYM, C, SOFT, TWICE, GATHER, ARG, SCAN, NOISE, WRAP, ODD, PUT, LAST, CALL, MM, MASK)
GRAPH = Graph((X, IDS, "seed", SYM), NODES,
              (*map(whole, (SOFT, TWICE, GATHER, ARG, SCAN, NOISE, WRAP, ODD, PUT, LAST, MASK)), None, as_index(S), 3, 2.5),
              (Write(X, whole(TWICE)),), {SOFT: (Origin("sum", "model.py", 7, "x.exp().sum(1)", name="total"),), TWICE: (Origin(name="total"),)},
              {"h0": "seed * 2"}, {"s0": 5})

GOLDEN = '''\
graph graph {
  input %x: f32[3, 4](4, 1)
  input %ids: i64[3](1)
  number $seed
  input %y: bf16[s0'2](1)
  size h0 = "seed * 2"
  hint s0 = 5
  constant %c: f32[4](1)
  %total: bf16[3](1) for i1<4 = bf16~(sum[i1](exp(%x[i0, i1])))
  %total_1: f32[3, 4](1, 3) #2 = mul(t0, t0)
    t0 = add(exp(%x[i0, i1]), -0.0:f32)
'''


def test_golden():
    assert print_graph(GRAPH).startswith(GOLDEN)
    assert "# model.py:7 x.exp().sum(1)" in print_graph(GRAPH, sources=True)


def run(graph):
    def opaque(call, args, kwargs):
        return args[0] + kwargs["alpha"], None
    inputs = [np.arange(12.0).reshape(3, 4), np.array([2, 0, 1]), 3.0, np.arange(5.0)]
    return evaluate(graph, inputs, constants={n: np.arange(4.0) for n in graph.nodes if getattr(n, "name", "") == "c"}, opaque=opaque)


def test_round_trip():
    text = print_graph(GRAPH)
    again = parse_graph(text)
    assert print_graph(again) == text
    assert print_graph(parse_graph(print_graph(GRAPH, sources=True))) == text
    for one, two in zip(run(GRAPH).outputs, run(again).outputs):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(list(run(GRAPH).writes.values())[0], list(run(again).writes.values())[0])


def test_foreign_types_and_devices():
    x = Input("x", (as_index(2),), (as_index(1),), foreign("complex64", 8), "cuda:0")
    text = print_graph(Graph((x,), (x,), (whole(x),)))
    assert 'input %x: complex64!8[2](1) @"cuda:0"' in text and print_graph(parse_graph(text)) == text


def test_deep_and_shared_expressions_stay_short():
    e = Load(X, (I, J))
    for _ in range(300):
        e = Op("mul", Op("add", e, e), Const(0.5, F32))
    node = Compute((3, 4), None, e)
    text = print_graph(Graph((X,), (X, node), (whole(node),)))
    assert len(text) < 40_000 and print_graph(parse_graph(text)) == text
    assert len(print_expr(e)) < 40_000
    assert parse_graph(text).nodes[1].expr is not e          # its Input is another one
    assert repr(Op("neg", Load(C, (J,)))) == "neg(%c[i1])"


@pytest.mark.parametrize("line, message", [
    ("%a: f32[3](1) = exp(%b[i0])", "a node that stands above wanted, %b found"),
    ("%a: f32[3](1) = exp(%x[i7])", "an axis of this node wanted, i7 found"),
    ("%a: f32[3](1) = 1.0:f33", "a type wanted, f33 found"),
    ("%a: f32[3](1) = 1:i64", "a value of type f32, not i64"),
    ("%a: f32[3](1) = 1.0:f32 2", "the end of the line wanted, 2 found"),
    ("%a: f32[3](1) = foo(1.0:f32", "a type wanted, foo found"),
    ("frobnicate", "a statement wanted"),
    ("%a: f32[3](1) = neg(1.0:f32", "')' wanted, the end found"),
])
def test_malformed(line, message):
    with pytest.raises(TextError, match="line 3: ") as found:
        parse_graph(f"graph g {{\n  input %x: f32[3](1)\n  {line}\n}}\n")
    assert message in str(found.value)


def test_host_numbers_of_one_name_have_their_own_types():
    """Graphs of one process may call a number of each type by the same name."""
    kept = [Scalar("n.item()", d) for d in (I64, F64, F32)]
    assert [s.dtype for s in kept] == [I64, F64, F32] and all(Scalar("n.item()", s.dtype) is s for s in kept)
