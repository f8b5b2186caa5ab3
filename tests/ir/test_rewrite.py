"""Every rule: it applies to its examples, and both sides are equal on special values. The driver on whole graphs."""
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from tests.ir.test_meaning import same, samples
from tokamak.ir.check import check_graph
from tokamak.ir.dtype import BF16, BOOL, F16, F32, F64, I8, I32, I64, U8
from tokamak.ir.expr import Cast, Const, Coord, Load, Op, Reduce, Scan, loads, walk
from tokamak.ir.graph import Compute, Graph, Input, Opaque, Origin, Result, View, Write
from tokamak.ir.index import Axis, Fetch, Size, as_index, row_major
from tokamak.ir.reference import evaluate
from tokamak.ir.rewrite import Simplifier, simplify
from tokamak.ir.rules import FAST, RULES, Rule, fits, widens

N = Size("n", 1)
I = Axis(0, N)
VARIABLES = {(name, d): Input(f"{name}_{d}", (as_index(N),), (as_index(1),), d)
             for name in "xyc" for d in (BOOL, U8, I8, I32, I64, F16, BF16, F32, F64)}


def var(name, d):
    return Load(VARIABLES[name, d], (as_index(I),))


def k(value, d=F32):
    return Const(value, d)


X, Y, C, B = var("x", F32), var("y", F32), var("c", BOOL), var("x", BOOL)
XI, YI, XL = var("x", I32), var("y", I32), var("x", I64)
XH = var("x", BF16)
T = as_index(I)
LT = Op("lt", X, Y)

EMPTY = Input("empty", (as_index(0),), (as_index(1),), F32)
J, K5 = Axis(1, 5), Axis(2, 3)
PICK = Op("and", Op("eq", Coord(as_index(J)), XL), C)

EXAMPLES = {
    "load of nothing": [Load(EMPTY, (T,), Op("and", C, Op("not", C)), k(2.5))],
    "sum of one picked element": [Reduce("sum", (J,), (Op("where", PICK, X, k(0.0)),)), Reduce("sum", (J,), (Op("where", PICK, XI, k(0, I32)),)),
                                  Reduce("sum", (J, K5), (Op("where", Op("eq", XL, Coord(as_index(J))), Op("mul", X, Cast(F32, Coord(as_index(K5)))),
                                                             k(0.0)),))],
    "fold an operation on constants": [Op("add", k(0.1), k(0.2)), Op("mod", k(-7, I32), k(3, I32)), Op("lt", k(math.nan), k(1.0)), Op("neg", k(0.0)),
                                       Op("shl", k(3, I8), k(7, I8)), Op("div", k(1.0), k(0.0)), Op("add", k(2**31 - 1, I32), k(1, I32)),
                                       Op("where", k(True, BOOL), k(1.0), k(2.0)), Op("max", k(math.nan), k(2.0))],
    "fold a cast of a constant": [Cast(BF16, k(0.1)), Cast(I32, k(-2.7)), Cast(BOOL, k(math.nan)), Cast(U8, k(300, I32)),
                                  Cast(F32, k(2**24 + 1, I64)), Cast(F16, k(1e6))],
    "constants to the right": [Op("add", k(2.0), X), Op("eq", k(2, I32), XI)],
    "compared constants to the right": [Op("lt", k(2.0), X), Op("ge", k(2, I32), XI)],
    "(x + c1) + c2": [Op("add", Op("add", XI, k(2**31 - 1, I32)), k(5, I32)), Op("and", Op("and", XI, k(7, I32)), k(3, I32))],
    "x + 0": [Op("add", X, k(-0.0)), Op("add", XI, k(0, I32))],
    "x - 0": [Op("sub", X, k(0.0)), Op("sub", XI, k(0, I32))],
    "x * 1": [Op("mul", X, k(1.0)), Op("mul", XI, k(1, I32))],
    "x / 1": [Op("div", X, k(1.0))],
    "x // 1": [Op("floordiv", XI, k(1, I32)), Op("truncdiv", XI, k(1, I32))],
    "x * 0": [Op("mul", XI, k(0, I32))],
    "x * -1": [Op("mul", X, k(-1.0)), Op("mul", XI, k(-1, I32))],
    "x / 2**k": [Op("div", X, k(8.0)), Op("div", X, k(-0.25)), Op("div", var("x", F64), k(3 * 2.0**-1 - 1, F64))],
    "neg neg": [Op("neg", Op("neg", X)), Op("neg", Op("neg", XI))],
    "abs neg": [Op("abs", Op("neg", X)), Op("abs", Op("neg", XI))],
    "abs abs": [Op("abs", Op("abs", X)), Op("abs", Op("abs", XI))],
    "x + neg y": [Op("add", X, Op("neg", Y)), Op("sub", X, Op("neg", Y)), Op("add", Op("neg", X), Y), Op("add", XI, Op("neg", YI))],
    "x - x": [Op("sub", X, X), Op("sub", Op("neg", X), Op("neg", X)), Op("sub", XI, XI)],
    "x ** small": [Op("pow", X, k(v)) for v in (0, 1, 2, -1, 4)] + [Op("pow", XI, k(v, I32)) for v in (0, 1, 2, 3, 5, 7)],
    "max(x, x)": [Op("max", X, X), Op("fmin", X, X)],
    "where": [Op("where", k(True, BOOL), X, Y), Op("where", k(False, BOOL), X, Y), Op("where", C, X, X), Op("where", Op("not", C), X, Y),
              Op("where", C, Op("where", C, X, Y), Y), Op("where", C, X, Op("where", C, X, Y)), Op("where", C, k(True, BOOL), k(False, BOOL)),
              Op("where", C, k(False, BOOL), k(True, BOOL))],
    "not not": [Op("not", Op("not", B)), Op("not", Op("not", XI))],
    "not compared": [Op("not", Op("lt", XI, YI)), Op("not", Op("eq", X, Y)), Op("not", Op("ge", XI, YI))],
    "logic": [*(Op(o, b, k(v, d)) for o in ("and", "or", "xor") for b, d in ((B, BOOL), (XI, I32)) for v in (0, -1)),
              Op("xor", B, B), Op("and", B, B)],
    "bool == constant": [Op(o, B, k(v, BOOL)) for o in ("eq", "ne") for v in (True, False)],
    "x == x": [Op(o, XI, XI) for o in ("eq", "ne", "lt", "le", "gt", "ge")],
    "compare coordinates": [Op("lt", Coord(T), Coord(as_index(N))), Op("ge", Coord(T), k(0, I64)), Op("eq", Coord(T + 1), k(0, I64)),
                            Op("ne", Coord(T), Coord(as_index(N) + 3)), Op("le", Coord(T + N), Coord(T)), Op("gt", Coord(T + 1), Coord(T))],
    "coordinate arithmetic": [Op("add", Coord(T), k(3, I64)), Op("sub", Coord(T), Coord(as_index(N))), Op("mul", Coord(T), k(5, I64)),
                              Op("floordiv", Coord(T - 3), k(2, I64)), Op("mod", Coord(T - 3), k(2, I64)), Op("neg", Coord(T))],
    "constant coordinate": [Coord(as_index(7))],
    "cast of an exact cast": [Cast(F16, Cast(F32, var("x", F16))), Cast(I8, Cast(I64, XI)), Cast(BF16, Cast(F64, XI)), Cast(BOOL, Cast(F32, XH)),
                              Cast(I32, Cast(I64, XI)), Cast(U8, Cast(I32, XL)), Cast(F16, Cast(F32, B)), Cast(BF16, Cast(F32, XH))],
    "rounding of a rounded value": [Cast(F32, Cast(BF16, Op("neg", Cast(F32, XH)))), Cast(F32, Cast(BF16, Op("max", Cast(F32, XH), k(0.0)))),
                                    Cast(F32, Cast(F16, Op("where", C, Cast(F32, var("x", F16)), k(-math.inf))))],
}
KEPT = [Op("add", X, k(0.0)), Op("sub", X, k(-0.0)), Op("mul", X, k(0.0)), Op("div", X, k(3.0)), Op("div", X, k(2.0**127)), Op("not", LT),
        Op("eq", X, X),
        Op("exp", k(0.1)), Op("floordiv", k(1, I32), k(0, I32)), Cast(F32, Cast(F16, X)), Cast(I32, Cast(F32, XI)), Cast(BF16, Cast(F32, XL)),
        Op("lt", Coord(T), k(5, I64)), Cast(I8, Cast(BOOL, XI)), Cast(F32, Cast(BF16, Op("add", Cast(F32, XH), Cast(F32, XH)))),
        Cast(I8, k(math.inf)), Op("lt", Coord(as_index(Fetch(XL, N))), Coord(as_index(N))), Op("sub", k(0.0), X)]


def values(*exprs):
    """Each expression on all combinations of special values of its variables, by the reference."""
    used = list(dict.fromkeys(e.node for x in exprs for e in walk(x) if isinstance(e, Load) and e.node is not EMPTY))
    grids = np.meshgrid(*(np.arange(len(samples(u.dtype))) for u in used), indexing="ij") if used else []
    data = [samples(u.dtype)[g.reshape(-1)] for u, g in zip(used, grids)]
    nodes = [Compute((N,), None, e) for e in exprs]
    graph = Graph((*used, EMPTY), (*used, EMPTY, *nodes), tuple(View(n, n.shape, n.strides, as_index(0)) for n in nodes))
    return evaluate(graph, [*data, np.empty(0, np.float32)], sizes={"n": len(data[0]) if data else 5}).outputs


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rule(rule):
    for e in EXAMPLES[rule.name]:
        new = rule.apply(e)
        assert new is not None and new is not e, f"'{rule.name}' does not apply to {e!r}"
        assert new.dtype is e.dtype
        same(*values(new, e), ulps=2 if "pow(" in repr(e) else 0)


def test_every_rule_has_examples():
    assert set(EXAMPLES) == {r.name for r in RULES}


@pytest.mark.parametrize("e", KEPT, ids=repr)
def test_kept(e):
    assert Simplifier("eager")(e) is e


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, 3.0, -1.0, -2.0, 1.0, 0.0, 4.0, 5.0, 6.0, 7.0, 8.0])
def test_powers_are_torchs(exponent):
    x = samples(F32)
    made = Simplifier()(Op("pow", X, k(exponent)))
    assert not any(isinstance(e, Op) and e.name == "pow" for e in walk(made))
    found, _ = values(made, X)
    same(found, torch.pow(torch.from_numpy(x), exponent).numpy(), max(2, exponent))


@pytest.mark.parametrize("source, to", list(itertools.product((BOOL, U8, I8, I32, I64, F16, BF16, F32, F64), repeat=2)), ids=str)
def test_widening_keeps_values(source, to):
    e = var("x", source)
    if widens(source, to):
        same(*values(Cast(source, Cast(to, e)), e))


def test_fits():
    assert fits(Op("abs", Cast(F32, XH)), BF16) and fits(k(0.5), BF16) and not fits(k(0.1), BF16) and not fits(Op("add", k(1.0), k(1.0)), BF16)
    assert not fits(Cast(F32, XH), F16)


def test_fast_drops_implicit_roundings():
    rounded = Cast(F32, Cast(BF16, Op("exp", X), implicit=True))
    assert Simplifier("fast")(Op("add", rounded, Y)) is Op("add", Op("exp", X), Y)
    assert Simplifier("eager")(Op("add", rounded, Y)) is Op("add", rounded, Y)
    assert Simplifier("fast")(Op("lt", rounded, Y)) is Op("lt", rounded, Y)          # a value is rounded before it is compared
    explicit = Cast(F32, Cast(BF16, Op("exp", X)))
    assert Simplifier("fast")(Op("add", explicit, Y)) is Op("add", explicit, Y)
    total = Reduce("sum", (I,), (rounded,))
    assert Simplifier("fast")(total) is Reduce("sum", (I,), (Op("exp", X),))
    running = Scan("argmax", I, (rounded, Coord(T)), 1)
    assert Simplifier("fast")(running) is running
    assert len(FAST) == 1


# -- graphs --------------------------------------------------------------------------------------------------------
def whole(node):
    return View(node, node.shape, node.strides, as_index(0))


SHAPE = (as_index(3), as_index(4))
A = Input("a", SHAPE, row_major(SHAPE), BF16)
AT = Load(A, (Axis(0, 3), Axis(1, 4)))


def read(node):
    return Load(node, (Axis(0, 3), Axis(1, 4)))


def test_graph_reads_through_copies_and_drops_the_dead():
    copy = Compute(SHAPE, None, Cast(BF16, Op("mul", Cast(F32, AT), k(1.0)), True))
    unread = Compute(SHAPE, None, Op("exp", Cast(F32, AT)))
    out = Compute(SHAPE, None, Op("exp", Cast(F32, read(copy))))
    graph = Graph((A,), (A, copy, unread, out), (whole(out),))
    new = check_graph(simplify(graph))
    assert new.nodes == (A, Compute(SHAPE, None, Op("exp", Cast(F32, AT))))
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(evaluate(new, [data]).outputs[0], evaluate(graph, [data]).outputs[0])


def test_equal_outputs_keep_their_own_memory():
    one, two = Compute(SHAPE, None, Op("neg", Op("neg", Cast(F32, AT)))), Compute(SHAPE, None, Cast(F32, AT))
    new = check_graph(simplify(Graph((A,), (A, one, two), (whole(one), whole(two)))))
    assert new.outputs[0].node is not new.outputs[1].node


def test_opaque_calls_and_writes_follow():
    node = Compute(SHAPE, None, Op("neg", Op("neg", Cast(F32, AT))))
    call = Opaque("aten.mm.default", ((whole(node), 2),), {"v": whole(node)}, ((SHAPE, row_major(SHAPE), BF16, "cpu"),), True, "", (node,))
    result = Result(call, 0, SHAPE, row_major(SHAPE), BF16)
    out = Compute(SHAPE, None, Op("exp", Cast(F32, read(result))))
    graph = Graph((A,), (A, node, call, result, out), (whole(out),), (Write(A, whole(result)),), {out: (Origin("exp"),)})
    new = check_graph(simplify(graph))
    wanted = Compute(SHAPE, None, Cast(F32, AT))
    made = next(n for n in new.nodes if isinstance(n, Opaque))
    assert made.reads == (wanted,) and made.args[0][0].node is wanted and made.kwargs["v"].node is wanted
    assert isinstance(new.writes[0].source.node, Result) and new.origins == {new.outputs[0].node: (Origin("exp"),)}


def test_the_meaning_of_a_call_reads_the_copy_that_it_is_handed():
    """What the copy is of may be computed where it is read, and gone."""
    node = Compute(SHAPE, None, Op("neg", Op("neg", Op("exp", Cast(F32, AT)))))
    copy = Compute(SHAPE, None, read(node))
    call = Opaque("aten.tanh.default", (whole(copy),), {}, ((SHAPE, row_major(SHAPE), F32, "cpu"),), True, "", (copy,), Op("tanh", read(copy)))
    result = Result(call, 0, SHAPE, row_major(SHAPE), F32)
    new = check_graph(simplify(Graph((A,), (A, node, copy, call, result), (whole(result),))))
    made = next(n for n in new.nodes if isinstance(n, Opaque))
    assert [e.node for e in loads(made.meaning)] == list(made.reads) == [made.args[0].node]


def test_a_stored_value_stays_rounded():
    node = Compute(SHAPE, None, Cast(BF16, Op("exp", Cast(F32, AT)), implicit=True))
    new = simplify(Graph((A,), (A, node), (whole(node),)))
    assert new.outputs[0].node is node


def test_guards_proved_by_bounds():
    i = as_index(Axis(0, 3))
    inside = Op("and", Op("ge", Coord(i), k(0, I64)), Op("lt", Coord(i), k(3, I64)))
    outside = Op("lt", Coord(i), k(0, I64))
    row = as_index(Axis(1, 4))
    assert Simplifier()(Load(A, (i, row), inside, k(0, BF16))) is AT
    assert Simplifier()(Load(A, (i, row), outside, k(7, BF16))) is k(7, BF16)


def test_deep_expressions():
    e = X
    for _ in range(5000):
        e = Op("add", e, k(1.0))
    assert Simplifier()(e) is e


@pytest.mark.parametrize("kind", ["reduce", "scan"])
def test_extremes_whose_places_nobody_asks_for_are_folded_alone(kind):
    x = Input("x", SHAPE, row_major(SHAPE), F32)
    rows, columns = Axis(0, 3), Axis(1, 4)
    if kind == "reduce":
        j = Axis(7, 4)
        shape, fold = SHAPE[:1], lambda c: Reduce("argmin", (j,), (Load(x, (rows, j)), Coord(j)), c)
        alone = Reduce("min", (j,), (Load(x, (rows, j)),))
    else:
        shape, fold = SHAPE, lambda c: Scan("argmin", columns, (Load(x, (rows, columns)), Coord(columns)), c)
        alone = Scan("min", columns, (Load(x, (rows, columns)),))
    value, place = Compute(shape, None, Cast(BF16, fold(0))), Compute(shape, None, fold(1))
    made = lambda *nodes: [n.expr for n in simplify(Graph((x,), (x, value, place), tuple(map(whole, nodes)))).nodes if isinstance(n, Compute)]
    assert made(value) == [Cast(BF16, alone)]
    assert set(made(value, place)) == {Cast(BF16, fold(0)), fold(1)} and made(place) == [fold(1)]


# -- expressions that no rule would change ----------------------------------------------------------------------------------
def test_loads_of_a_settled_expression_are_moved_over_without_asking_the_rules():
    e = Simplifier()(Op("add", X, Op("mul", Y, k(2.0))))
    z = Input("z", (as_index(N),), (as_index(1),), F32)
    other = Simplifier(nodes={X.node: z})
    other.rules = {name: [Rule("none", "", refuse)] for name in ("add", "mul", "Load", "Const")}
    assert other(e) is Op("add", Load(z, (T,)), Op("mul", Y, k(2.0)))


def refuse(e):
    raise AssertionError(f"a rule was asked for {e!r}")


def test_nodes_that_become_one_are_simplified_anew():
    e = Simplifier()(Op("max", X, Y))
    assert Simplifier(nodes={Y.node: X.node})(e) is X


def test_a_node_of_another_shape_is_simplified_anew():
    j = Axis(0, 4)
    some, none = (Input(name, (as_index(n),), (as_index(1),), F32) for name, n in (("some", 4), ("none", 0)))
    e = Simplifier()(Load(some, (as_index(j),), Op("lt", Coord(as_index(j)), Const(3, I64)), k(2.5)))
    assert Simplifier(nodes={some: none})(e) is k(2.5)
