"""A PersistentSchedule: how contractions of many rows and columns run on GPUs whose copy engine moves tiles (sm_90 on). A few programs stay on the
machine and make tile after tile of the result; factors come through descriptors where memory allows that, and what is pointwise behind the products
is done in parts of the tile, so that it finds registers beside the accumulators.

    parts       of how many columns' ranges the tile is finished, one after the other
    boxes       are descriptors used at all; without, every read and write is by address (where a call's memory is not aligned)
    flat        are the loops over tiles and depth run as one, so that the next tile's first steps load while this one is finished
    last        into how many smaller ones a tile of the last round is cut, where few programs would have one: halves of its columns, or quarters
    paired      are two products of one left factor made as one of twice the columns: a descriptor with a dimension of two reads both right factors

What can be copied is a fact about addresses: `fuse.boxes`. What a tile's sides are is what `fuse.products` says is fastest.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..fuse.boxes import Box, box, lies, plain
from ..fuse.contraction import TURNED, Contraction, product_type
from ..fuse.cost import Hints
from ..fuse.products import PRODUCTS, Tile, last, ours, prices
from ..ir.dtype import F32
from ..ir.expr import Expr, Random, loads, walk
from ..ir.index import Axis
from .body import Body, Store, exprs_of
from .matmul import GROUP, STEPS, MatmulSchedule, _side, folds_of, inner_of, sums_beside
from .tile_access import wide

STEP = 128              # bytes of a step along the depth: what the engine copies of a row at once
SHARED = 226 << 10      # bytes of shared memory for steps under way, and for what is read and written behind them
MOST_PRODUCTS = 4       # that share a tile's registers
SHARERS = 16            # programs that could share the depth of each tile: then they do, by addresses (`matmul`), rather than leave the machine idle


@dataclass(frozen=True)
class PersistentSchedule(MatmulSchedule):
    """A MatmulSchedule whose programs stay."""
    parts: int = 1
    boxes: bool = True
    flat: bool = True
    paired: bool = False
    last: int = 1

    def __str__(self) -> str:
        words = {f"parts({self.parts})": self.parts > 1, "addressed": not self.boxes, "flat": self.flat, "paired": self.paired,
                 f"last(1 / {self.last})": self.last > 1}
        return " ".join((super().__str__(), *(text for text, shown in words.items() if shown)))


def smaller(s: PersistentSchedule) -> PersistentSchedule:
    """How the tiles of the last round are made: `s` with halves of the columns, and of the rows where there are quarters."""
    (first, second), sizes = s.dims, {a: n for a, (n,) in s.pieces}
    sizes |= {second: sizes[second] // 2} | ({first: sizes[first] // 2} if s.last == 4 else {})
    return replace(s, pieces=tuple((a, (sizes[a],)) for a, _ in s.pieces), parts=max(1, s.parts // 2), last=1, flat=False, stages=s.stages + 1)


def factor_box(e: Expr, dims: tuple[Axis, Axis], depth: Axis, hints: Hints) -> Box | None:
    """The box of a factor that is plain memory, as products take it."""
    read = plain(e)
    found = box(read.node, read.index[0], dims, hints) if read is not None else None
    return found if lies(found, depth) else None


def store_box(s: Store, dims: tuple[Axis, Axis], hints: Hints) -> Box | None:
    """The box of what a store writes, where it writes all coordinates."""
    whole = s.guard is None and s.monoid is None and s.memory.dtype.is_float and s.memory.dtype.bytes in (2, 4)
    return box(s.memory, s.address, dims, hints) if whole else None


def choose(b: Body, hints: Hints, target) -> PersistentSchedule | None:
    """The schedule of a body whose folds are contractions of many rows and columns, at least one factor of which can be copied; None for any
    other."""
    found = folds_of(b)
    if target.arch[:1] != ("cuda",) or target.arch[1] < 90 or found is None or inner_of(found) or sums_beside(b):
        return None
    c = found[0]
    if c.exponents is not None or len(c.rows) != 1 or len(c.columns) != 1 or c.digits or c.outer or c.scales:
        return None
    dims = first, second = _dims(b, c, hints)
    if min(hints(a.extent) for a in dims) <= TURNED or len(found) > MOST_PRODUCTS or not _enough(found, dims, hints):
        return None
    wanted = _columns(b, c, dims, len(found), hints, target)
    sizes = {first: _side(first, 128, hints), second: _side(second, wanted, hints), c.depth: _side(c.depth, STEP // product_type(c).bytes, hints)}
    tiles = _tiles(b, dims, sizes, hints)
    if product_type(c) is not F32 and tiles * SHARERS <= target.threads and hints(c.depth.extent) >= SHARERS * STEPS * sizes[c.depth]:
        return None
    return _schedule(b, found, sizes, hints, target)


def _enough(found: list[Contraction], dims: tuple[Axis, Axis], hints: Hints) -> bool:
    """Are factors copied: of 16-bit types some, of TF32 all?"""
    return any(boxed(found[0], dims, hints)) if product_type(found[0]) is not F32 else all(all(boxed(c, dims, hints)) for c in found)


def _tiles(b: Body, dims: tuple[Axis, Axis], sizes: dict[Axis, int], hints: Hints) -> int:
    """How many tiles of these sizes the results have."""
    return hints.count(b.parallel - set(dims)) * math.prod(-(-hints(a.extent) // sizes[a]) for a in dims)


def _columns(b: Body, c: Contraction, dims: tuple[Axis, Axis], products: int, hints: Hints, target) -> int:
    """Of a tile."""
    if products > 1:
        return 256 >> (products - 1).bit_length()
    sizes = hints.count(b.parallel - set(dims)), hints(dims[0].extent), hints(dims[1].extent), hints(c.depth.extent)
    known = prices(target, product_type(c)) or PRODUCTS["cuda", 90]
    return ours(known, target.threads, sizes)[1].columns


def _dims(b: Body, c: Contraction, hints: Hints) -> tuple[Axis, Axis]:
    """The accumulator's axes: the one along which the first result is contiguous comes second."""
    rows, columns = (max(axes, key=lambda a: hints(a.extent)) for axes in (c.rows, c.columns))
    return (columns, rows) if b.stores[0].address.coefficient(rows) == 1 else (rows, columns)


def boxed(c: Contraction, dims: tuple[Axis, Axis], hints: Hints) -> tuple[bool, bool]:
    """Can the engine copy the factor along the first of `dims`, and along the second?"""
    left, right = (c.left, c.right) if dims[0] in c.left.free else (c.right, c.left)
    return tuple(factor_box(e, (a, c.depth), c.depth, hints) is not None for e, a in ((left, dims[0]), (right, dims[1])))


def pair(found: list[Contraction], dims: tuple[Axis, Axis], hints: Hints) -> tuple[Box, Box] | None:
    """The boxes of two products' factors along the second of `dims`, where one descriptor can hold both, contiguous along the depth, beside a factor
    along the first that they share."""
    sides = [(c.left, c.right) if dims[0] in c.left.free else (c.right, c.left) for c in found]
    if len(found) != 2 or sides[0][0] != sides[1][0] or found[0].depth is not found[1].depth:
        return None
    first, second = (factor_box(right, (dims[1], found[0].depth), found[0].depth, hints) for _, right in sides)
    if first is None or second is None or first.memory.dtype is not second.memory.dtype:
        return None
    return (first, second) if (first.axes, first.strides) == (second.axes, second.strides) and first.axes == (dims[1], found[0].depth) else None


def _schedule(b: Body, found: list[Contraction], sizes: dict[Axis, int], hints: Hints, target) -> PersistentSchedule | None:
    (first, second, depth), c, products = sizes, found[0], len(found)
    paired = pair(found, (first, second), hints) is not None
    others = tuple(sorted(b.parallel - {first, second}, key=b.axes.index))
    exact = frozenset(a for a, n in sizes.items() if a.extent.constant is not None and a.extent.constant % n == 0)
    elements = sizes[first] * sizes[second] * products
    large = elements >= 128 * 256
    warps = 8 if elements >= 128 * 128 else 4
    single = products == 1 or paired
    width = product_type(c).bytes
    parts = width if large and products == 1 else 1
    beside = {e.node for s in b.stores for e in loads(s.expr) if {first, second} <= e.free and depth not in e.free}
    ends = sizes[first] * sizes[second] // parts * sum(m.dtype.bytes for m in (*beside, *(s.memory for s in b.stores)))
    step, turned = _step(found, sizes, hints)
    stages = min(_under_way(b, large, paired, products, width), (SHARED - ends - turned) // step)
    if stages < 2:
        return None
    pieces = tuple((a, (n,)) for a, n in sizes.items())
    cut = last(Tile(sizes[first], sizes[second], 0.0, 0.0), _tiles(b, (first, second), sizes, hints), target.threads, paired) if single else 1
    return PersistentSchedule((*others, first, second, depth), (first, second), pieces, frozenset((depth,)), (), 1, exact, warps, stages,
                              wide=wide(b, hints), depth=depth, group=GROUP, resident=target.threads,
                              parts=parts, flat=large and single, paired=paired, last=cut)


def _step(found: list[Contraction], sizes: dict[Axis, int], hints: Hints) -> tuple[int, int]:
    """(bytes of shared memory that a step along the depth takes, and those beside all steps): what the engine does not copy is under way as it lies
    in memory, and lies there once more as it is multiplied. Logits of 4096 x 50257 with a head's weights of f32 wanted 288 KB, and ran eagerly."""
    (first, second, depth), width = sizes, product_type(found[0]).bytes
    step, beside = 0, 0
    for k, c in enumerate(found):
        left, right = (c.left, c.right) if first in c.left.free else (c.right, c.left)
        for e, a, copied in zip((left, right), (first, second), boxed(c, (first, second), hints)):
            if k == 0 or a is second:
                read = {(x.node, x.index): x.dtype.bytes for x in loads(e) if {a, depth} <= x.free}
                step += sizes[a] * sizes[depth] * (width if copied else max(width, sum(read.values())))
                beside += 0 if copied else sizes[a] * sizes[depth] * width
    return step, beside


def _under_way(b: Body, large: bool, paired: bool, products: int, width: int) -> int:
    """Steps along the depth under way at most. Large tiles of one product in 16 bits by 3 and by 4, us, in turns: a GELU behind 8192x1024x4096 153,
    140; scales behind 4096x4096x4096 222, 213, behind 8192x4096x14336 1344, 1334; a ReLU behind 4096x14336x4096 612, 609. Pairs: 1380, 1375 of
    4096x4096x14336, but 114.0, 115.6 of 4096x1024x4096 and 199, 201 of 8192x1024x4096. Random numbers need the shared memory of a step."""
    if large and paired:
        return 3
    if large and products == 1:
        return 4 if width == 2 and not any(isinstance(e, Random) for e in walk(*exprs_of(b))) else 3
    return 5 if products == 1 else 4
