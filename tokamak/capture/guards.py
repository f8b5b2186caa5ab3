"""Conditions over coordinates, and values that are read only where one holds: what pads, joins and scattered slices are made of."""
from __future__ import annotations

from typing import Sequence

from ..ir.dtype import BOOL, DType
from ..ir.expr import Const, Coord, Expr, Load, Op, Rewriter
from ..ir.index import Index, as_index
from ..ir.ranges import nonnegative
from .tensor import Tensor, cast, compute

def coord(index) -> Coord:
    return Coord(as_index(index))


def within(index, low, high) -> Expr:
    """low <= index < high, without the half that is proved."""
    index, low, high = as_index(index), as_index(low), as_index(high)
    parts = []
    if not nonnegative(index - low):
        parts.append(Op("ge", coord(index), coord(low)))
    if not nonnegative(high - index - 1):
        parts.append(Op("lt", coord(index), coord(high)))
    return both(*parts)


def both(*conditions: Expr) -> Expr:
    """All of the conditions; those that are constants are folded."""
    left = [c for c in conditions if not (isinstance(c, Const) and c.value)]
    if any(isinstance(c, Const) for c in left):
        return Const(False, BOOL)
    total = left[0] if left else Const(True, BOOL)
    for c in left[1:]:
        total = Op("and", total, c)
    return total


def guarded(expr: Expr, guard: Expr) -> Expr:
    """`expr` with every load under `guard`: where it is false nothing is read, and the value is of no use."""
    def leaf(e: Expr):
        if isinstance(e, Load):
            return Load(e.node, e.index, both(guard, *((e.guard,) if e.guard is not None else ())), e.other or Const(0, e.node.dtype))
        return None
    return Rewriter(leaf=leaf)(expr)


def inside(t: Tensor, index: Sequence, guard: Expr, other: Expr) -> Expr:
    """Element `index` of `t` where `guard` holds, else `other` (an expression of t's type)."""
    expr = t.at(index)
    if isinstance(guard, Const):
        return expr if guard.value else other
    if isinstance(expr, Load) and isinstance(other, Const) and expr.guard is None:
        return Load(expr.node, expr.index, guard, other)
    return choose(guard, guarded(expr, guard), other)


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    """`a` where `condition`, else `b`, both of one type; 16-bit floats pass through f32, which is exact."""
    if isinstance(condition, Const):
        return a if condition.value else b
    return cast(Op("where", condition, compute(a), compute(b)), a.dtype, implicit=True)


def zero(d: DType) -> Const:
    return Const(0, d)


def equal(p: Index, q: Index) -> Expr:
    distance = (p - q).constant
    return Const(distance == 0, BOOL) if distance is not None else Op("eq", coord(p), coord(q))
