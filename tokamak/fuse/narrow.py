"""Layers so narrow that a program holds all their weights, and all that is summed over their rows: one kernel runs through the rows and makes both
what stands along them and the gradients of the weights.

    within ::= sum over a narrow axis of a value of the row times a weight          the row's results of a layer, or of its gradient
    across ::= sum over the rows of a value of the row, or of the product of two    the gradients of a bias, and of weights

What is within reads 16-bit values and weights; what is across is carried from row to row and left as partial sums. Where that is too much for one
program, and all of it has one axis, two neighbours run through the same rows, each with half of that axis (`halved`); the second finds them in the
cache.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..ir.dtype import F32
from ..ir.expr import Cast, Expr, Load, Op, Random, Reduce, Scan, loads, walk
from ..ir.graph import Scatter
from ..ir.index import Axis, Index, as_index
from ..ir.rules import fits
from .axes import Group, as_one
from .contraction import NARROW, SIDE, factors_of, halves
from .legal import Roles, roles
from .reason import Reason

ROWS = 64               # of a step
CARRIED = 16384         # elements of f32 of weights' gradients that a program carries
HALF_CARRIED = 32768    # the same of each of two programs that have half of an axis: 128 registers of 256 threads
SHARED = 200 << 10      # bytes of shared memory for weights, and for the rows under way
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
WARPGROUPS = 128        # rows of a product of eight warps, which turned tiles have


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
    """The two factors of 16 bits whose products `e` adds up, in either order; () where it does not. What is 16 bits without being rounded to them, an
    extreme of such values, counts as rounded."""
    if e.monoid != "sum" or not isinstance(e.args[0], Op) or e.args[0].name != "mul":
        return []
    found = factors_of(e.args[0])
    d = next((h for x in found if (h := halves(x)) is not None), None)
    found = [x if halves(x) is not None else Cast(F32, Cast(d, x)) if d is not None and x.dtype is F32 and fits(x, d) else x for x in found]
    alike = len(found) == 2 and halves(found[0]) is not None and halves(found[0]) is halves(found[1])
    return [tuple(found), tuple(reversed(found))] if alike else []


def rows_of(axes: Iterable[Axis], exprs: Iterable[Expr]) -> frozenset[Axis] | None:
    """The axes of rows, over which something is summed: all others are narrow, whatever the sizes are."""
    axes, sums = list(axes), {frozenset(e.over) for e in folds(exprs)}
    for most in (NARROW, 2 * WARPGROUPS):
        short = lambda a: a.extent.constant is not None and 0 < a.extent.constant <= most
        long = [x for x in sums if not all(map(short, x)) or _count(x) > most]
        if len(long) == 1 and all(short(a) for a in axes if a not in long[0]) and (most == NARROW or halved(exprs, long[0]) is not None):
            return long[0]
    return None


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
    return made if len(rows) == 1 or as_one(group.members, rows) else None


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


def infeasible(exprs: list[Expr], rows: frozenset[Axis], inside: frozenset = frozenset()) -> Reason | None:
    """Why no program can hold what the folds in `exprs` need, nor half of it; None when one can. `inside`: nodes that are made there and not read."""
    half = halved(exprs, rows)
    count = carried(exprs, rows, half)
    if count > (CARRIED if half is None else HALF_CARRIED):
        return Reason("accumulators", "infeasible", f"{count} partial results a program")
    fits = stages(exprs, rows, half=half, inside=inside if half is not None else frozenset()) >= 2
    return None if fits else Reason("no_registers", "infeasible", "weights and rows that shared memory does not hold")


def halved(exprs: Iterable[Expr], rows: frozenset[Axis]) -> Axis | None:
    """The axis of which each of two programs takes half: one that all products summed over the rows have, and every value of a row, and that nothing
    sums over, where one program has no registers for all. None where none is needed, or found."""
    exprs = list(exprs)
    made = [(e, within(e, rows), across(e, rows)) for e in folds(exprs)]
    sums, axes = [c for _, _, c in made if c is not None], {a for _, *cs in made for c in cs if c is not None for a in (c.first, c.second)}
    half = next((a for a in axes if fill_two(a.extent, *(x.extent for x in axes if x is not a))), None)
    if not sums or not any(c for _, c, _ in made) or half is None:
        return None
    apart = all(half in (c.first, c.second) for c in sums) and not any(half in e.over for e, *_ in made)
    return half if apart and all(half in e.free for e in exprs if rows & e.free) and carried(exprs, rows) > CARRIED else None


def carried(exprs: Iterable[Expr], rows: frozenset[Axis], half: Axis | None = None) -> int:
    """Elements of weights' gradients; `half`: of which axis a program has one half."""
    return sum(held(c.first, half) * held(c.second, half) for e in folds(exprs) if (c := across(e, rows)) is not None)


def stages(exprs: list[Expr], rows: frozenset[Axis], shared: int = SHARED, half: Axis | None = None, inside: frozenset = frozenset(),
           turned: bool = False) -> int:
    """Blocks of rows that can be under way at once, in so many bytes of shared memory. `inside`: nodes that are made there and not read. Of
    `turned` tiles those that are no factors wait in registers."""
    weights = {c.right: 2 * held(c.first, half) * held(c.second, half) for e in folds(exprs) if (c := within(e, rows)) is not None}
    multiplied = factors(exprs, rows)
    waits = multiplied if half is None else {c.left.arg for e in folds(exprs) if (c := within(e, rows)) is not None}     # else in registers
    made = sum(2 * ROWS * _width(x, rows, half) for x in multiplied & waits if not isinstance(x, Load) or x.node in inside)
    read = {(e.node, e.index): e.dtype.bytes * ROWS * _width(e, rows, half) for e in loads(*exprs) if rows & e.free and e.node not in inside
            and (e in multiplied or not turned)}
    return min(3, (shared - sum(weights.values()) - made) // max(sum(read.values()), 1))


def reused(exprs: Iterable[Expr], rows: frozenset[Axis]) -> list[Load]:
    """What is multiplied as it is read and also worked on in registers. Products and sums over the rows, which are products with ones, read it from
    shared memory."""
    stack, seen, multiplied, found = list(exprs), set(), factors(exprs, rows), []
    read = lambda f: isinstance(f, Cast) and isinstance(f.arg, Load)
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        found += [e] if isinstance(e, Load) and e in multiplied else []
        stack += [x for f in _multiplicands(e, rows) if not read(f) for x in f.children()] if isinstance(e, Reduce) else e.children()
    return found


def _multiplicands(e: Reduce, rows: frozenset[Axis]) -> list[Expr]:
    """The casts of 16-bit values that a fold multiplies; what it folds where it multiplies nothing."""
    product = within(e, rows) or across(e, rows)
    return [product.left, product.right] if product is not None else list(e.args)


def factors(exprs: Iterable[Expr], rows: frozenset[Axis]) -> set[Expr]:
    """The values of a row that are multiplied, in 16 bits."""
    found = [c for e in folds(exprs) if (c := within(e, rows) or across(e, rows)) is not None]
    return {x.arg for c in found for x in (c.left, c.right) if rows & x.free}


def beside(exprs: Iterable[Expr], rows: frozenset[Axis]) -> list[Load]:
    """What is read of a row and a narrow axis, and multiplied by nothing."""
    exprs = list(exprs)
    multiplied = factors(exprs, rows)
    return [e for e in loads(*exprs) if rows & e.free and len(e.free) == 2 and e.guard is None and e not in multiplied]


def compared(exprs: Iterable[Expr], read: Iterable[Load]) -> bool:
    """Is what is `read` compared, and nothing else? A mask waits in less than an element's register."""
    exprs, values = list(exprs), set(read)
    for e in walk(*exprs):
        mine = [x for x in e.children() if x in values or isinstance(x, Cast) and x.arg in values]
        if mine and not (isinstance(e, Cast) and e.arg in values or isinstance(e, Op) and e.name in COMPARISONS):
            return False
    return not values & set(exprs)


def folds(exprs: Iterable[Expr]) -> list[Reduce]:
    """All folds in `exprs`, each once."""
    return [e for e in dict.fromkeys(walk(*exprs)) if isinstance(e, Reduce)]


def held(a: Axis, half: Axis | None = None) -> int:
    """Elements of a tile along a narrow axis; of `half` a program has one half."""
    whole = max(SIDE, 1 << (a.extent.constant - 1).bit_length())
    return whole // 2 if a is half else whole


def fills(size: Index | int, groups: int) -> bool:
    """Is a narrow extent more than three quarters of a tile of so many times WARPGROUPS? A training step of 131072 rows, a ReLU between, of 100 to
    200 to 120 takes 210 us in such tiles, 226 in blocks of 64; of 96 to 192 to 96 208 and 156, of 128 to 176 to 72 211 and 159."""
    tile, n = groups * WARPGROUPS, as_index(size).constant
    return n is not None and 3 * tile < 4 * n <= 4 * tile


def fill_two(wide: Index | int, *others: Index | int) -> bool:
    """Do narrow extents fill their tiles, one of them those of two programs?"""
    return fills(wide, 2) and all(fills(n, 1) for n in others)


def _width(e: Expr, rows: frozenset[Axis], half: Axis | None) -> int:
    return math.prod(held(a, half) for a in e.free - rows)


def _count(axes: Iterable[Axis]) -> int:
    return math.prod(a.extent.constant for a in axes)
