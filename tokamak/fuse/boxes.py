"""What a GPU's copy engine can move: tiles of memory of which one axis is contiguous and every other lies in steps of 16 bytes."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtype import F32
from ..ir.expr import Cast, Expr, Load
from ..ir.graph import Compute
from ..ir.index import Axis, FloorDiv, Index, Mod, as_index
from .contraction import Contraction, in_tf32
from .cost import Hints
from .inline import substituted

ALIGNED = 16            # bytes: steps of every axis that is not contiguous, and where memory begins
RANK = 5                # dimensions of a descriptor


@dataclass(frozen=True)
class Box:
    """Memory as the copy engine sees it: from element `offset` on, `axes` in steps of `strides` elements, the last one contiguous."""
    memory: object
    offset: Index
    axes: tuple[Axis, ...]
    strides: tuple[Index, ...]


def box(memory, address: Index, dims: tuple[Axis, ...], hints: Hints) -> Box | None:
    """How the engine copies the tile along `dims` at `address`, or None where it cannot."""
    axes, rest = sorted(address.axes(), key=lambda a: a.id), address
    strides = {a: address.coefficient(a) for a in axes}
    for a in axes:
        rest = rest.without(a)
    affine = not rest.axes() and not any(s.axes() for s in strides.values()) and sum((s * a for a, s in strides.items()), rest) is address
    along = next((a for a in dims if strides.get(a) == 1), None)
    if not affine or along is None or any(a not in strides for a in dims) or len(axes) > RANK:
        return None
    whole = lambda i: hints.divides(ALIGNED // memory.dtype.bytes, i)
    if not whole(rest) or not all(whole(s) and hints.least(s) > 0 for a, s in strides.items() if a is not along):
        return None
    order = (*(a for a in axes if a not in dims), *(a for a in dims if a is not along), along)
    return Box(memory, rest, order, tuple(strides[a] for a in order))


def movable(c: Contraction, hints: Hints, joined: bool = False) -> bool:
    """Can the engine move both factors, as they lie in memory, for products? Of rows and columns of one axis each: others were not seen to work.
    `joined`: also where rows are those of a view of contiguous memory that has more dimensions, or several axes that lie there as one."""
    single = lambda axes: len(axes) == 1 or joined and places(c, axes) is not None
    return single(c.rows) and single(c.columns) and len(c.batch) <= 1 and all(_moves(e, c.depth, hints, joined) for e in (c.left, c.right))


def places(c: Contraction, axes: tuple[Axis, ...]) -> dict[Axis, Index] | None:
    """What each of `axes`, the rows of a contraction or its columns, counts for in the number that they make up, as their factor lies in memory;
    None where they do not lie there as one axis."""
    if len(axes) == 1:
        return {axes[0]: as_index(1)}
    read = plain(c.left if set(axes) <= c.left.free else c.right)
    address = read.offset() if read is not None and axes else as_index(0)
    if any(address.coefficient(a).constant is None for a in axes):
        return None
    found, place = {}, as_index(1)
    order = sorted(axes, key=lambda a: address.coefficient(a).constant)
    for a in order:
        found[a], place = place, place * a.extent
    return found if order and all(address.coefficient(a) is address.coefficient(order[0]) * found[a] for a in order) else None


def plain(e: Expr) -> Load | None:
    """What a factor reads, where it is plain memory of 16 bits, or of f32 in TF32; of a copy what is copied, since a kernel reads that."""
    read = e.arg if isinstance(e, Cast) else in_tf32(e)
    while isinstance(read, Load) and read.guard is None and isinstance(read.node, Compute) and isinstance(read.node.expr, Load):
        read = substituted(read, read.node.axes, read.node.expr)
    return read if isinstance(read, Load) and read.guard is None and (read.dtype.is_half or read.dtype is F32) else None


def lies(b: Box | None, depth: Axis) -> bool:
    """Do products take it as it lies? Those of TF32 take what is contiguous along the depth alone."""
    return b is not None and (b.memory.dtype is not F32 or b.axes[-1] is depth)


def _moves(e: Expr, depth: Axis, hints: Hints, joined: bool) -> bool:
    read = plain(e)
    if read is None:
        return False
    address = read.offset()
    address = _joined(address) if joined else address
    others = [a for a in address.axes() if a is not depth]
    return any(lies(box(read.node, address, (a, depth), hints), depth) for a in others)


def _joined(i: Index) -> Index:
    """`i` with (a // n) * (c * n) + (a % n) * c as a * c."""
    for high in [a for a in i.atoms() if isinstance(a, FloorDiv)]:
        low = next((a for a in i.atoms() if isinstance(a, Mod) and a.a is high.a and a.b is high.b), None)
        if low is not None and i.coefficient(high) is i.coefficient(low) * high.b:
            i = i.without(high).without(low) + high.a * i.coefficient(low)
    return i
