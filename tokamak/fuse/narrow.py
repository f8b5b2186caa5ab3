"""Layers so narrow that a program holds all their weights, and all that is summed over their rows: one kernel runs through the rows and makes both
what stands along them and the gradients of the weights.

    within ::= sum over a narrow axis of a value of the row times a weight          the row's results of a layer, or of its gradient
    across ::= sum over the rows of a value of the row, or of the product of two    the gradients of a bias, and of weights

What is within reads 16-bit values and weights; what is across is carried from row to row and left as partial sums.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

from ..ir.expr import Expr, Load, Op, Random, Reduce, Scan, loads, walk
from ..ir.graph import Scatter
from ..ir.index import Axis, as_index
from .axes import Group
from .contraction import NARROW, SIDE, factors_of, halves
from .legal import Roles, roles
from .reason import Reason

ROWS = 64               # of a step
CARRIED = 16384         # elements of f32 of weights' gradients that a program carries
SHARED = 200 << 10      # bytes of shared memory for weights, and for the rows under way


@dataclass(frozen=True, eq=False)
class Product:
    """A sum of products left * right of 16-bit values. Within a row: `left` is of the row and of `first`, which is summed over, `right` of `first`
    and `second`. Across the rows: `left` of a row and of `first`, `right` of a row and of `second`."""
    left: Expr
    right: Expr
    first: Axis
    second: Axis


def within(e: Reduce, rows: frozenset[Axis]) -> Product | None:
    """The product of a row and weights that `e` is; or None."""
    for left, right in _factors(e) if len(e.over) == 1 and not rows & set(e.over) else ():
        second = right.free - set(e.over)
        if left.free == rows | set(e.over) and len(second) == 1 and not rows & second and right.free == second | set(e.over):
            return Product(left, right, e.over[0], *second)
    return None


def across(e: Reduce, rows: frozenset[Axis]) -> Product | None:
    """The product, summed over all rows, of two values of a row that `e` is; or None."""
    for left, right in _factors(e)[:1] if set(e.over) == rows else ():
        first, second = left.free - rows, right.free - rows
        if len(first) == len(second) == 1 and first != second and rows <= left.free and rows <= right.free:
            return Product(left, right, *first, *second)
    return None


def added_up(e: Reduce, rows: frozenset[Axis]) -> bool:
    """Is `e` the sum of a value over all rows, an element for each coordinate of another axis?"""
    return e.monoid == "sum" and set(e.over) == rows and len(e.args) == 1 and len(e.args[0].free - rows) == 1 and rows <= e.args[0].free


def _factors(e: Reduce) -> list[tuple[Expr, Expr]]:
    """The two factors of 16 bits whose products `e` adds up, in either order; () where it does not."""
    if e.monoid != "sum" or not isinstance(e.args[0], Op) or e.args[0].name != "mul":
        return []
    found = factors_of(e.args[0])
    alike = len(found) == 2 and halves(found[0]) is not None and halves(found[0]) is halves(found[1])
    return [tuple(found), tuple(reversed(found))] if alike else []


def rows_of(axes: Iterable[Axis], exprs: Iterable[Expr]) -> frozenset[Axis] | None:
    """The axes of rows, over which something is summed: all others are narrow, whatever the sizes are."""
    short = lambda a: a.extent.constant is not None and 0 < a.extent.constant <= NARROW
    sums = {frozenset(e.over) for e in folds(exprs)}
    long = [x for x in sums if not all(map(short, x)) or _count(x) > NARROW]
    return long[0] if len(long) == 1 and all(short(a) for a in axes if a not in long[0]) else None


def expressed(exprs: Iterable[Expr], rows: frozenset[Axis]) -> bool:
    """Are all folds in `exprs` within a row or across the rows, and no random numbers in front of them?"""
    for e in walk(*exprs):
        if isinstance(e, (Scan, Random)) or isinstance(e, Load) and e.guard is not None:
            return False
        if isinstance(e, Reduce) and within(e, rows) is None and across(e, rows) is None and not added_up(e, rows):
            return False
        if isinstance(e, Reduce) and rows & set(e.over) and any(isinstance(x, Reduce) and rows & set(x.over) for a in e.args for x in walk(a)):
            return False
    return True


def narrow_roles(group: Group) -> Roles | None:
    """The roles in a group whose folds are all within rows or across them, of which there is one at least; None for any other."""
    exprs = _exprs(group)
    rows = rows_of(group.axes, exprs)
    if rows is None or any(isinstance(m.node, Scatter) for m in group.members) or not expressed(exprs, rows):
        return None
    made = roles(group, rows)
    if not isinstance(made, Roles) or not made.accumulating or any(len(m.free - rows) != 1 for m in made.local):
        return None
    return made if len(rows) == 1 or _as_one(group, rows) else None


def _as_one(group: Group, rows: frozenset[Axis]) -> bool:
    """Do all accesses go through `rows`, several axes, in step, so that a kernel counts them as one?"""
    lie = lambda index, node: sum((i * s for i, s in zip(index, node.strides)), as_index(0))
    found = [lie(e.index, e.node) for m in group.members for e in m.loads] + [lie(m.dims, m.node) for m in group.members]
    used = [i for i in found if rows & set(i.axes())]
    whole = lambda order, i: all(i.coefficient(b).terms and i.coefficient(a) is i.coefficient(b) * b.extent for a, b in zip(order, order[1:]))
    plain = all(rows <= {a for a in i.atoms() if isinstance(a, Axis)} for i in used)
    return plain and any(all(whole(order, i) for i in used) for order in permutations(rows))


def stepped(group: Group, r: Roles) -> bool:
    """Is `group`, with roles `r`, run through row by row with all weights held?"""
    exprs = _exprs(group) if r.accumulating else []
    if not multiplied(exprs):
        return False
    rows = rows_of(group.axes, exprs)
    return rows is not None and r.parallel == rows and expressed(exprs, rows)


def multiplied(exprs: Iterable[Expr]) -> bool:
    """Is anything multiplied by tiles?"""
    return any(_factors(e) for e in folds(exprs))


def _exprs(group: Group) -> list[Expr]:
    return [x for m in group.members for x in m.roots()]


def infeasible(exprs: list[Expr], rows: frozenset[Axis]) -> Reason | None:
    """Why no program can hold what the folds in `exprs` need; None when one can."""
    count = carried(exprs, rows)
    if count > CARRIED:
        return Reason("accumulators", "infeasible", f"{count} partial results a program")
    return None if stages(exprs, rows) >= 2 else Reason("no_registers", "infeasible", "weights and rows that shared memory does not hold")


def carried(exprs: list[Expr], rows: frozenset[Axis]) -> int:
    """Elements of weights' gradients."""
    return sum(held(c.first) * held(c.second) for e in folds(exprs) if (c := across(e, rows)) is not None)


def stages(exprs: list[Expr], rows: frozenset[Axis], shared: int = SHARED) -> int:
    """Blocks of rows that can be under way at once, in so many bytes of shared memory."""
    weights = sum(2 * held(c.first) * held(c.second) for e in folds(exprs) if (c := within(e, rows)) is not None)
    factors = {x.arg for e in folds(exprs) if (c := within(e, rows) or across(e, rows)) is not None for x in (c.left, c.right) if rows & x.free}
    made = sum(2 * ROWS * _width(x, rows) for x in factors if not isinstance(x, Load))
    read = {(e.node, e.index): e.dtype.bytes * ROWS * _width(e, rows) for e in loads(*exprs) if rows & e.free}
    return min(3, (shared - weights - made) // max(sum(read.values()), 1))


def folds(exprs: Iterable[Expr]) -> list[Reduce]:
    """All folds in `exprs`, each once."""
    return [e for e in dict.fromkeys(walk(*exprs)) if isinstance(e, Reduce)]


def held(a: Axis) -> int:
    """Elements of a tile along a narrow axis."""
    return max(SIDE, 1 << (a.extent.constant - 1).bit_length())


def _width(e: Expr, rows: frozenset[Axis]) -> int:
    return math.prod(held(a) for a in e.free - rows)


def _count(axes: Iterable[Axis]) -> int:
    return math.prod(a.extent.constant for a in axes)
