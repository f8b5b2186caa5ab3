"""Layers so narrow that a program holds all their weights, and all that is summed over their rows: one kernel runs through the rows and makes both what
stands along them and the gradients of the weights.

    within ::= sum over a narrow axis of a value of the row times a weight          the row's results of a layer, or of its gradient
    across ::= sum over the rows of a value of the row, or of the product of two    the gradients of a bias, and of weights

What is within reads 16-bit values and weights; what is across is carried from row to row and left as partial sums.
"""
from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import Expr, Load, Random, Reduce, Scan, loads, walk
from ..ir.graph import Scatter
from ..ir.index import Axis
from .axes import Group
from .contraction import NARROW, SIDE, Contraction, contraction, halves, product_type
from .cost import Hints
from .legal import Roles, roles
from .reason import Reason

ROWS = 64               # of a step
CARRIED = 16384         # elements of f32 of weights' gradients that a program carries
SHARED = 200 << 10      # bytes of shared memory for weights, and for the rows under way


def within(e: Reduce, rows: Axis) -> Contraction | None:
    """The product of a row and weights that `e` is, the row's factor left; or None."""
    c = _product(e)
    if c is None or len(c.fold.over) != 1 or rows in e.over:
        return None
    c = c if rows in c.left.free else _turned(c)
    return c if c.rows == (rows,) and len(c.columns) == 1 else None


def across(e: Reduce, rows: Axis) -> Contraction | None:
    """The product, summed over all rows, of two values of a row that `e` is; or None."""
    c = _product(e)
    return c if c is not None and e.over == (rows,) and len(c.rows) == len(c.columns) == 1 else None


def added_up(e: Reduce, rows: Axis) -> bool:
    """Is `e` the sum of a value over all rows, an element for each coordinate of another axis?"""
    return e.monoid == "sum" and e.over == (rows,) and len(e.args) == 1 and len(e.free) == 1 and rows in e.args[0].free


def _product(e: Reduce) -> Contraction | None:
    c = contraction(e)
    plain = c is not None and not (c.batch or c.digits or c.outer or c.scales) and product_type(c) is not None
    return c if plain and halves(c.left) is not None and halves(c.right) is not None else None


def _turned(c: Contraction) -> Contraction:
    return Contraction(c.fold, c.right, c.left, c.batch, c.columns, c.rows, c.depth)


def rows_of(axes: Iterable[Axis]) -> Axis | None:
    """The axis of rows: all others are narrow, whatever the sizes are."""
    long = [a for a in axes if a.extent.constant is None or not 0 < a.extent.constant <= NARROW]
    return long[0] if len(long) == 1 else None


def expressed(exprs: Iterable[Expr], rows: Axis) -> bool:
    """Are all folds in `exprs` within a row or across the rows, and no random numbers in front of them?"""
    for e in walk(*exprs):
        if isinstance(e, (Scan, Random)) or isinstance(e, Load) and e.guard is not None:
            return False
        if isinstance(e, Reduce) and within(e, rows) is None and across(e, rows) is None and not added_up(e, rows):
            return False
        if isinstance(e, Reduce) and rows in e.over and any(isinstance(x, Reduce) and rows in x.over for a in e.args for x in walk(a)):
            return False
    return True


def narrow_roles(group: Group) -> Roles | None:
    """The roles in a group whose folds are all within rows or across them, of which there is one at least; None for any other."""
    rows = rows_of(group.axes)
    if rows is None or any(isinstance(m.node, Scatter) for m in group.members) or not expressed((x for m in group.members for x in m.roots()), rows):
        return None
    made = roles(group, frozenset((rows,)))
    if not isinstance(made, Roles) or not made.accumulating or any(len(m.free) != 2 for m in made.local):
        return None
    return made


def stepped(group: Group, r: Roles) -> bool:
    """Is `group`, with roles `r`, run through row by row with all weights held?"""
    rows = rows_of(group.axes)
    if rows is None or r.parallel != {rows} or not r.accumulating:
        return False
    exprs = [x for m in group.members for x in m.roots()]
    return any(isinstance(e, Reduce) and contraction(e) is not None for e in walk(*exprs)) and expressed(exprs, rows)


def infeasible(exprs: list[Expr], rows: Axis) -> Reason | None:
    """Why no program can hold what the folds in `exprs` need; None when one can."""
    carried = sum(held(c.rows[0]) * held(c.columns[0]) for e in folds(exprs) if (c := across(e, rows)) is not None)
    if carried > CARRIED:
        return Reason("accumulators", "infeasible", f"{carried} partial results a program")
    return None if stages(exprs, rows) >= 2 else Reason("no_registers", "infeasible", "weights and rows that shared memory does not hold")


def stages(exprs: list[Expr], rows: Axis) -> int:
    """Blocks of rows that can be under way at once."""
    weights = {e: held(c.depth) * held(c.columns[0]) for e in folds(exprs) if (c := within(e, rows)) is not None}
    made = {x.arg for e in folds(exprs) if (c := within(e, rows) or across(e, rows)) is not None for x in (c.left, c.right) if rows in x.free}
    made_here = sum(2 * ROWS * _width(x, rows) for x in made if not isinstance(x, Load))
    read = {(e.node, e.index): e.dtype.bytes * ROWS * _width(e, rows) for e in loads(*exprs) if rows in e.free}
    return min(3, (SHARED - 2 * sum(weights.values()) - made_here) // max(sum(read.values()), 1))


def folds(exprs: list[Expr]) -> list[Reduce]:
    """All folds in `exprs`, each once."""
    return [e for e in dict.fromkeys(walk(*exprs)) if isinstance(e, Reduce)]


def held(a: Axis) -> int:
    """Elements of a tile along a narrow axis."""
    return max(SIDE, 1 << (a.extent.constant - 1).bit_length())


def _width(e: Expr, rows: Axis) -> int:
    wide = 1
    for a in e.free - {rows}:
        wide *= held(a)
    return wide
