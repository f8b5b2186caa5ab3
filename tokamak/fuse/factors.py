"""Factors of a sum that are the same along all that it sums, taken out of it: sum[p](a[p] * b / c) becomes sum[p](a[p]) * b / c.

An element costs less then, and sums that differ in such factors alone are one. Where a product is read from a value that pointwise operations make,
its own factors are looked at. The order of what is left is that of the factors, so that equal sums look equal. (16-bit roundings on the way are
dropped: policy `fast` alone.) Powers stay as they are: squares of values over their largest are written so lest they overflow.
"""
from __future__ import annotations

from ..ir.expr import Cast, Const, Expr, Load, Op
from ..ir.graph import Compute, fold
from .inline import substituted

MOST = 16               # factors of a product that is taken apart


def factored(e: Expr, over, pinned: frozenset) -> tuple[Expr, list[tuple[Expr, bool]]]:
    """What is left of `e`, summed along the axes `over`, without the factors that are the same along them, and these: (factor, divides). `pinned`:
    values that are stored, rounded."""
    found = _factors(e, pinned)
    out = [(x, divides) for x, divides in found if not x.free & over]
    rest = [(x, divides) for x, divides in found if x.free & over]
    powers = len({x for x, _ in rest}) < len(rest)
    if not out or not rest or rest[0][1] or len(found) > MOST or powers:
        return e, []
    return product(rest[0][0], rest[1:]), out


def product(e: Expr, factors) -> Expr:
    """`e` times and by `factors`: (factor, divides)."""
    for x, divides in factors:
        e = Op("div" if divides else "mul", e, x)
    return e


def _factors(e: Expr, pinned: frozenset) -> list[tuple[Expr, bool]]:
    """(factor, divides) of `e`, in order."""
    if isinstance(e, Op) and e.name in ("mul", "div", "neg"):
        first = _factors(e.args[0], pinned)
        if e.name == "neg":
            return [*first, (Const(-1, e.dtype), False)]
        return first + (_factors(e.args[1], pinned) if e.name == "mul" else [(e.args[1], True)])
    made = _made(e, pinned)
    return _factors(made, pinned) if made is not None else [(e, False)]


def _made(e: Expr, pinned: frozenset) -> Expr | None:
    """The product that pointwise operations make `e` of, where `e` reads it: at the place where it is read, before it is rounded."""
    load = e.arg if isinstance(e, Cast) else e
    if not isinstance(load, Load) or load.guard is not None:
        return None
    if not isinstance(load.node, Compute) or fold(load.node) is not None or load.node in pinned:
        return None
    x = load.node.expr
    if isinstance(x, Cast):
        x = x.arg if x.implicit else None
    if not isinstance(x, Op) or x.name not in ("mul", "div", "neg") or x.dtype is not e.dtype:
        return None
    return substituted(load, load.node.axes, x)
