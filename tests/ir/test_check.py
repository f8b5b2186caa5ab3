"""Each invariant of a Graph is refused where it does not hold, with a message that says so."""
from __future__ import annotations

import pytest

from tokamak.errors import InternalError
from tokamak.ir.check import check_graph
from tokamak.ir.dtype import BF16, BOOL, F32, I64
from tokamak.ir.expr import Cast, Const, Coord, Load, Op, Reduce, Scan
from tokamak.ir.graph import Compute, Graph, Input, Opaque, Result, Scatter, View, Write
from tokamak.ir.index import Axis, Size, as_index, row_major


def tensor(name, *shape, dtype=F32):
    shape = tuple(map(as_index, shape))
    return Input(name, shape, row_major(shape), dtype)


def whole(node):
    return View(node, node.shape, node.strides, as_index(0))


X, Y = tensor("x", 3, 4), tensor("y", 4)
I, J = Axis(0, 3), Axis(1, 4)
XIJ = Load(X, (I, J))
EXP = Compute((3, 4), None, Op("exp", XIJ))
SUM = Compute((3,), None, Cast(BF16, Reduce("sum", (J,), (XIJ,))))
CALL = Opaque("mm", (whole(X),), {}, (((), (), F32, "cpu"),), True, "", (X,))
SCATTER = Scatter(Const(0.0, F32), Y.shape, Y.strides, (as_index(3),), (as_index(I),), Load(Y, (as_index(I),)), "sum")


def graph(nodes, outputs=(), inputs=(X, Y), writes=()):
    return Graph(inputs, (*(i for i in inputs if isinstance(i, Input)), *nodes), outputs, writes)


def scatter(**changes):
    fields = {k: getattr(SCATTER, k) for k in ("base", "shape", "strides", "domain", "index", "value", "monoid", "guard")}
    return Scatter(**{**fields, **changes})


GOOD = {
    "pointwise": graph([EXP], (whole(EXP),)),
    "fold": graph([SUM], (whole(SUM),)),
    "scatter": graph([SCATTER], (whole(SCATTER),)),
    "opaque": graph([CALL, Result(CALL, 0, (), (), F32)]),
    "write": graph([EXP], writes=(Write(X, whole(EXP)),)),
    "alias": graph([], (View(X, (as_index(3),), (as_index(4),), as_index(3)),)),
    "symbolic": graph([], inputs=(tensor("s", Size("s0")),)),
}


@pytest.mark.parametrize("name", GOOD)
def test_accepts(name):
    assert check_graph(GOOD[name]) is GOOD[name]


DIFF = Compute((3,), None, Reduce("sum", (J,), (Op("sub", XIJ, Load(EXP, (I, J))),)))
BAD = {
    "does not stand before": graph([DIFF]),
    "stands twice": graph([EXP, EXP]),
    "every fold is a node of its own": graph([Compute((3,), None, Op("exp", Reduce("sum", (J,), (XIJ,))))]),
    "scan stands inside": graph([Compute((3, 4), None, Op("exp", Scan("sum", J, (XIJ,))))]),
    "binds an axis twice": graph([Compute((3,), None, Reduce("sum", (J, J), (XIJ,)))]),
    "are the value's own axes": graph([Compute((3, 4), None, Reduce("sum", (Axis(1, 3),), (Load(X, (I, Axis(1, 3))),)))]),
    "reads outside": graph([Compute((3,), None, Load(Y, (as_index(I) + 4,)))]),
    "indices into": graph([scatter(index=())]),
    "its base has shape": graph([scatter(base=X)]),
    "its base is": graph([scatter(base=Const(0, I64))]),
    "combines by 'argmax'": graph([scatter(monoid="argmax")]),
    "its guard is": graph([scatter(guard=Coord(as_index(I)))]),
    "outside its domain": graph([scatter(index=(as_index(Axis(3, 9)),))]),
    "missing in `reads`": graph([Opaque("mm", (whole(X),), {}, (), True, "")]),
    "no tensor at position": graph([CALL, Result(CALL, 1, (), (), F32)]),
    "one name": graph([], inputs=(tensor("x", 1), tensor("x", 2))),
    "is no node of the graph": graph([], (whole(EXP),)),
    "whose last is": graph([], (View(X, (as_index(3),), (as_index(6),), as_index(0)),)),
    "is no input": graph([EXP], writes=(Write(tensor("z", 3, 4), whole(EXP)),)),
    "is written twice": graph([EXP], writes=(Write(X, whole(EXP)), Write(X, whole(EXP)))),
    "it receives": graph([EXP], writes=(Write(Y, whole(EXP)),)),
    "nothing gives the size": graph([Compute((Size("s9"),), None, Const(True, BOOL))]),
    "is no number of the host": graph([], (XIJ,)),
    "extents but": Graph((_odd := Input("o", (as_index(2),), (), F32),), (_odd,), ()),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    with pytest.raises(InternalError, match="graph, .*: ") as found:
        check_graph(BAD[message])
    assert message in str(found.value)
