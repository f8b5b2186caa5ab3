"""A PersistentSchedule: how contractions of many rows and columns run on GPUs whose copy engine moves tiles (sm_90 on). A few programs stay on the machine
and make tile after tile of the result; factors come through descriptors where memory allows that, and what is pointwise behind the products is done
in parts of the tile, so that it finds registers beside the accumulators.

    parts       of how many columns' ranges the tile is finished, one after the other
    boxes       are descriptors used at all; without, every read and write is by address (where a call's memory is not aligned)
    flat        are the loops over tiles and depth run as one, so that the next tile's first steps load while this one is finished

What can be copied is a fact about addresses (`box`): the engine wants one axis contiguous, all others in steps of 16 bytes.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..fuse.contraction import Contraction
from ..fuse.cost import Hints
from ..ir.expr import Cast, Expr, Load
from ..ir.index import Axis, Index
from .body import Body, Memory, Store
from .matmul import GROUP, TURNED, MatmulSchedule, _side, folds_of, inner_of
from .tiles import wide

ALIGNED = 16            # bytes: steps of every axis that is not contiguous, and where memory begins
PRODUCTS = 4            # that share a tile's registers
RANK = 5                # dimensions of a descriptor


@dataclass(frozen=True)
class PersistentSchedule(MatmulSchedule):
    """A MatmulSchedule whose programs stay."""
    parts: int = 1
    boxes: bool = True
    flat: bool = True

    def __str__(self) -> str:
        words = {f"parts({self.parts})": self.parts > 1, "addressed": not self.boxes, "flat": self.flat}
        return " ".join((super().__str__(), *(text for text, shown in words.items() if shown)))


@dataclass(frozen=True)
class Box:
    """Memory as the copy engine sees it: from element `offset` on, `axes` in steps of `strides` elements, the last one contiguous."""
    memory: Memory
    offset: Index
    axes: tuple[Axis, ...]
    strides: tuple[Index, ...]


def box(memory: Memory, address: Index, dims: tuple[Axis, Axis], hints: Hints) -> Box | None:
    """How the engine copies the tile of `dims` at `address`, or None where it cannot: another axis is contiguous, or steps are no multiple of 16 bytes."""
    axes, rest = sorted(address.axes(), key=lambda a: a.id), address
    strides = {a: address.coefficient(a) for a in axes}
    for a in axes:
        rest = rest.without(a)
    affine = not rest.axes() and not any(s.axes() for s in strides.values()) and sum((s * a for a, s in strides.items()), rest) is address
    if not affine or any(a not in strides for a in dims) or len(axes) > RANK:
        return None
    along = next((a for a in dims if strides[a] == 1), None)
    whole = lambda i: hints.divides(ALIGNED // memory.dtype.bytes, i)
    if along is None or not whole(rest) or not all(whole(s) and hints.least(s) > 0 for a, s in strides.items() if a is not along):
        return None
    across = dims[0] if along is dims[1] else dims[1]
    order = (*(a for a in axes if a not in dims), across, along)
    return Box(memory, rest, order, tuple(strides[a] for a in order))


def factor_box(e: Expr, dims: tuple[Axis, Axis], hints: Hints) -> Box | None:
    """The box of a factor that is plain memory of 16 bits."""
    read = e.arg if isinstance(e, Cast) else None
    if not isinstance(read, Load) or read.guard is not None or not read.dtype.is_half:
        return None
    return box(read.node, read.index[0], dims, hints)


def store_box(s: Store, dims: tuple[Axis, Axis], hints: Hints) -> Box | None:
    """The box of what a store writes, where it writes all coordinates."""
    whole = s.guard is None and s.monoid is None and s.memory.dtype.is_float and s.memory.dtype.bytes in (2, 4)
    return box(s.memory, s.address, dims, hints) if whole else None


def choose(b: Body, hints: Hints, target) -> PersistentSchedule | None:
    """The schedule of a body whose folds are contractions of many rows and columns, at least one factor of which can be copied; None for any other."""
    found = folds_of(b)
    if target.arch[0] != "cuda" or target.arch[1] < 90 or found is None or inner_of(found) or found[0].digits or found[0].outer or found[0].scales:
        return None
    c = found[0]
    dims = first, second = _dims(b, c, hints)
    if min(hints(a.extent) for a in dims) <= TURNED or len(found) > PRODUCTS or not any(boxed(c, dims, hints)):
        return None
    most = 256 >> (len(found) - 1).bit_length()
    wanted = most if _tiles(b, c, dims, (128, most), hints) >= target.threads else most // 2
    sizes = {first: _side(first, 128, hints), second: _side(second, wanted, hints), c.depth: _side(c.depth, 64, hints)}
    return _schedule(b, c, sizes, len(found), hints, target)


def _dims(b: Body, c: Contraction, hints: Hints) -> tuple[Axis, Axis]:
    """The accumulator's axes: the one along which the first result is contiguous comes second."""
    rows, columns = (max(axes, key=lambda a: hints(a.extent)) for axes in (c.rows, c.columns))
    return (columns, rows) if b.stores[0].address.coefficient(rows) == 1 else (rows, columns)


def boxed(c: Contraction, dims: tuple[Axis, Axis], hints: Hints) -> tuple[bool, bool]:
    """Can the engine copy the factor along the first of `dims`, and along the second?"""
    left, right = (c.left, c.right) if dims[0] in c.left.free else (c.right, c.left)
    return factor_box(left, (dims[0], c.depth), hints) is not None, factor_box(right, (dims[1], c.depth), hints) is not None


def _tiles(b: Body, c: Contraction, dims: tuple[Axis, Axis], sides: tuple[int, int], hints: Hints) -> int:
    """How many tiles the result has."""
    total = hints.count(b.parallel - set(dims))
    for a, n in zip(dims, sides):
        total *= -(-hints(a.extent) // n)
    return total


def _schedule(b: Body, c: Contraction, sizes: dict[Axis, int], products: int, hints: Hints, target) -> PersistentSchedule:
    first, second, depth = sizes
    others = tuple(sorted(b.parallel - {first, second}, key=b.axes.index))
    exact = frozenset(a for a, n in sizes.items() if a.extent.constant is not None and a.extent.constant % n == 0)
    elements = sizes[first] * sizes[second] * products
    warps = 8 if elements >= 128 * 128 else 4
    parts = 2 if elements >= 128 * 256 and products == 1 else 1
    stages = 3 if elements >= 128 * 256 else 4
    return PersistentSchedule((*others, first, second, depth), (first, second), tuple((a, (n,)) for a, n in sizes.items()), frozenset((depth,)), (), 1, exact,
                              warps, stages, wide=wide(b, hints, target), depth=depth, group=GROUP, resident=target.threads, parts=parts, flat=products == 1)
