"""Factors of a contraction that do not differ along its depth: sum(k, (a[n, k] * s[n]) * b) is s[n] * sum(k, a * b). And what integers of few
bits are made of."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtype import F32, I8, I16, DType
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Rewriter, walk
from ..ir.index import Axis, FloorDiv, Index, as_index

EXACT = {"bf16": 256, "f16": 2048}         # up to here a 16-bit type holds every integer
GROUP = 16              # elements of the depth at least that share a scale, for it to be multiplied to what their products add up to


def scales_behind(fold: Reduce) -> Expr:
    """The contraction `fold` with such factors behind the sum; or, where they are the same for groups of the depth, behind a group's sum: the depth
    is an axis of groups and one within them then, and the factor a third one of the product. What is left of the factor are small integers, or what
    was rounded before it was scaled: weights that were quantised. `fold` itself where there are none. The rounding of the scaled factor is left
    out."""
    product, behind, beside = [], [], []
    for e in fold.args[0].args:
        kept, scale = _without_scale(e, frozenset(fold.over))
        product.append(kept)
        (beside if any(s.free & set(fold.over) for s in scale) else behind).extend(scale)
    if not behind and not beside:
        return fold
    mapping = _in_groups(fold, beside)
    if mapping is None:
        return fold
    inner: Expr = Op("mul", *product)
    for s in beside:
        inner = Op("mul", inner, s)
    made: Expr = Rewriter(mapping)(Reduce(fold.monoid, fold.over, (inner,)))
    for s in behind:
        made = Op("mul", made, s)
    return made


def _in_groups(fold: Reduce, scales: list[Expr]) -> dict[Axis, Index] | None:
    """The depth as a number of groups and one within them, for scales that differ from group to group; None where no groups fit."""
    if not scales:
        return {}
    depth, sizes = fold.over[0], {n for s in scales for n in _group_sizes(s, fold.over[0])}
    if len(fold.over) != 1 or len(sizes) != 1 or depth.extent.constant is None or depth.extent.constant % max(sizes):
        return None
    size, free = sizes.pop(), max(a.id for a in (*fold.free, depth)) + 1
    return {depth: as_index(Axis(free, as_index(depth.extent.constant // size))) * size + as_index(Axis(free + 1, as_index(size)))}


def _group_sizes(e: Expr, depth: Axis) -> set[int]:
    """By what the depth is divided wherever it stands in `e`; with 0 where it stands undivided."""
    found: set[int] = set()
    for x in walk(e):
        for i in x.index if isinstance(x, Load) else (x.index,) if isinstance(x, (Coord, Random)) else ():
            for a in i.atoms():
                if a is depth:
                    found.add(0)
                elif not isinstance(a, Axis) and depth in Index({(a,): 1}).axes():
                    plain = isinstance(a, FloorDiv) and a.a is as_index(depth) and a.b.constant is not None
                    found.add(a.b.constant if plain else 0)
    return found


def _without_scale(e: Expr, over: frozenset) -> tuple[Expr, list[Expr]]:
    """(factor, what it was multiplied by) where `e` is a product of small integers, or of a rounded value, with what is the same along `over` or
    along groups of it."""
    rounded = e.arg if isinstance(e, Cast) and e.dtype is F32 and isinstance(e.arg, Cast) and e.arg.implicit else None
    if rounded is None or not isinstance(rounded.arg, Op) or rounded.arg.name != "mul":
        return e, []
    for kept, scale in (rounded.arg.args, rounded.arg.args[::-1]):
        if scale.free & over and (len(over) != 1 or min(_group_sizes(scale, *over), default=0) < GROUP):
            continue
        whole = small_integers(kept, EXACT[rounded.dtype.name])
        if whole is not None:
            return Cast(F32, Cast(rounded.dtype, Cast(F32, whole))), [scale]
        if isinstance(kept, Cast) and isinstance(kept.arg, Cast) and kept.arg.dtype is rounded.dtype and kept.free & over:
            return Cast(F32, Cast(rounded.dtype, kept.arg.arg)), [scale]
    return e, []


def small_integers(e: Expr, most: int) -> Expr | None:
    """`e`, an f32 expression, as one of small integers where it always is one of at most `most` in size; else None."""
    found = _ranged(e)
    if found is None:
        return None
    whole, low, high = found
    return whole if max(-low, high) <= most else None


def _ranged(e: Expr) -> tuple[Expr, int, int] | None:
    """(integers of as few bits as hold them, least, greatest) of an f32 expression that is always one."""
    if isinstance(e, Cast) and e.dtype is F32 and e.arg.dtype.is_int and e.arg.dtype.bytes == 1:
        return e.arg, *_bounds(e.arg)
    if isinstance(e, Const) and abs(e.value) <= 1024 and e.value == int(e.value):
        return Const(int(e.value), _fitting(e.value, e.value)), int(e.value), int(e.value)
    if isinstance(e, Op) and e.name in ("add", "sub"):
        parts = [_ranged(a) for a in e.args]
        if all(p is not None for p in parts):
            (x, a, b), (y, c, d) = parts
            low, high = (a + c, b + d) if e.name == "add" else (a - d, b - c)
            fit = _fitting(min(low, a, c), max(high, b, d))
            return Op(e.name, Cast(fit, x), Cast(fit, y)), low, high
    return None


def _fitting(low, high) -> DType:
    """A type for integers between two numbers."""
    return I8 if -128 <= low and high <= 127 else I16


def _bounds(e: Expr) -> tuple[int, int]:
    """Between which numbers an integer of 8 bits lies."""
    whole = (-128, 127) if e.dtype.kind == "i" else (0, 255)
    if isinstance(e, Const):
        return e.value, e.value
    if isinstance(e, Cast) and e.arg.dtype.is_int and e.arg.dtype.bytes == 1:
        low, high = _bounds(e.arg)
        return (low, high) if whole[0] <= low and high <= whole[1] else whole
    if not isinstance(e, Op):
        return whole
    if e.name == "and":
        tops = [a.value for a in e.args if isinstance(a, Const) and a.value >= 0]
        return (0, min(tops)) if tops else whole
    if e.name == "shr" and isinstance(e.args[1], Const) and 0 <= e.args[1].value < 8:
        low, high = _bounds(e.args[0])
        return low >> e.args[1].value, high >> e.args[1].value
    if e.name == "where":
        (a, b), (c, d) = map(_bounds, e.args[1:])
        return min(a, c), max(b, d)
    return whole


@dataclass(frozen=True)
class Bits:
    """The integers (((byte >> shift) & mask) ^ flip) - flip - minus, where `load` reads the byte and its sign is a bit like any other."""
    load: Load
    shift: int = 0
    mask: int = 255
    flip: int = 0
    minus: int = 0

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest of them."""
        found = [((b >> self.shift & self.mask) ^ self.flip) - self.flip - self.minus for b in range(256)]
        return min(found), max(found)


STEP_LOST = EXACT["bf16"]


def unpacking(e: Expr) -> Bits | None:
    """`e` as bits of a byte that is read, where it is that and bf16 holds all that such bits can be; or None."""
    if isinstance(e, Load) and e.dtype.is_int and e.dtype.bytes == 1:
        return Bits(e, flip=128 if e.dtype.kind == "i" else 0)
    found = unpacking(e.arg) if isinstance(e, Cast) and e.dtype.is_int else _step_of(e) if isinstance(e, Op) and len(e.args) == 2 else None
    if found is None or max(map(abs, found.bounds())) > STEP_LOST or not _holds(e.dtype, *found.bounds()):
        return None
    return found if 0 <= found.flip + found.minus + STEP_LOST // 2 <= STEP_LOST else None


def _step_of(e: Op) -> Bits | None:
    """Bits with one more operation, by a number."""
    a, b = e.args if isinstance(e.args[1], Const) else e.args[::-1]
    x = unpacking(a) if isinstance(b, Const) else None
    if x is None or isinstance(e.args[0], Const) and e.name not in ("and", "add"):
        return None
    n, whole = b.value, x.minus == 0 and x.mask == 255 >> x.shift
    if e.name == "and" and whole and 0 <= n <= x.mask:
        return Bits(x.load, x.shift, n)
    if e.name == "shr" and x.minus == 0 and 0 <= n < 8 and x.flip in (0, 128 >> x.shift if whole else 0):
        return Bits(x.load, x.shift + n, x.mask >> n, x.flip >> n) if x.shift + n < 8 else None
    if e.name in ("sub", "add"):
        return Bits(x.load, x.shift, x.mask, x.flip, x.minus + (n if e.name == "sub" else -n))
    return None


def _holds(d: DType, low: int, high: int) -> bool:
    """Does an integer type hold all numbers between two?"""
    bits = 8 * d.bytes - (d.kind == "i")
    return (-(1 << bits) if d.kind == "i" else 0) <= low and high < 1 << bits
