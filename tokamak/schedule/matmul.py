"""A MatmulSchedule: how a body whose folds are contractions runs on a GPU. Each program makes one tile of the result, by products of tiles along the
depth.

    dims        the two axes of the accumulator, in order: a result of few rows is turned, so that its columns fill the machine's 64 rows
    depth       the axis that is folded; `pieces` holds the length of a step along it
    unrolled    further folded axes of small constant extent: a step is repeated for each of their coordinates
    programs    how many programs share the depth of one tile; they leave partial sums, which a second kernel folds
    sharers     where those are neighbours of a cluster: they add up what they have, and each has a part of the tile along its first axis
    inner       the depth of a contraction within the left factor, all of which is held; its result's columns are the depth
    outer       an axis around the depth that is run through instead: all of the depth is one slice, and `pieces` says how many slices a step takes
    early       what is read beside the products is read before them
    resident    programs that make all tiles between them, one after the other; 0: a program each
    group       tiles along the first axis that are worked on together, so that what they read along the second is in the cache

What is chosen is a ladder over extents; every threshold stands beside what was measured.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..fuse import narrow
from ..fuse.contraction import LITTLE, SIDE, SLICE, TURNED, Contraction, chained, contraction, multiplied, of_one_row, of_vector, product_type, summed
from ..fuse.cost import Hints
from ..fuse.sharing import clusters
from ..ir.dtype import F32
from ..ir.expr import Load, Reduce, Rewriter, Scan, loads, walk
from ..ir.index import Axis, as_index
from . import vector
from .body import Body, Store, exprs_of, rewritten
from .tile_schedule import TileSchedule
from .tile_stages import power
from .tile_access import wide

FEWEST = 8              # rows of a tile where the machine is NVIDIA's, weights are of few bits and the depth is long: they leave room for more steps.
                        # 14336 to 4096, 4 rows, us: packed int4 14.0, 18.0 by sixteen; int8 22.0, 22.8; but 4096 to 4096 6.9, 6.7 and 8.9, 8.5
UNSHARED = 128          # elements of as long a step; a depth of fewer than twice STEPS of these is not worth sharing in TF32
SHARED = 200 << 10      # bytes of shared memory that a program may fill with steps under way
MOST_STAGES = 5         # steps under way at most
GROUP = 8               # tiles along the first axis that share what they read along the second
RESIDENT = 4            # programs to a multiprocessor that make narrow layers tile after tile
HELD_BLOCKS = 4         # of the hidden axis that are written out at most
VECTORS = 128           # of the hidden axis in such a block where vectors along it are read: fewer than a program's threads are loaded by each as its
                        # part of a product has them, 16 elements for one. Two layers of a ResNet, batch norms behind them (401408 rows, 64 to 256 to
                        # 128): 163 us, 193 with blocks of 64; 4010 lines of PTX, 5831, and three quarters of the compile's time
HELD_STAGES = 3         # tiles of rows under way then: 131072 rows, 128 to 256 to 128, 47.9 us, 57 where each tile reads the weights, 65 with 2;
                        # 49.7 with tiles of 128 rows by 8 warps; backward, in steps, 83 and 97
TALL = 128              # rows by eight warps where a mask is read beside the products: what lies between them stays in registers. 131072 rows, 128
                        # to 256 to 128, a ReLU's: 59 us; 66 in turned tiles, where it goes through shared memory. What is more than compared spills
ABREAST = 2             # products with a vector that a program carries at once: each holds a tile of f32
DEEP = 8192             # elements of the depth from which on weights of few bits have tiles of FEWEST rows, and more rows in TF32 tiles of 128
STEPS = 8               # steps along the depth that a program should have at least
FEW_SHARED = 100 << 10  # the same where a result is turned: two programs to a multiprocessor
FILLED = 32             # columns a multiprocessor, more of which tiles of 64 need not share the depth of
SPREAD = 24             # the same of tiles of 32, for several products with more than 32 rows: a gate of two, 64 rows, 4096 to 4096 25.5 us by 64
                        # columns, whose programs share the depth, 21.7; 2048 to 3584 14.9, 12.5; 1024 to 4096 8.9, 8.4; 11008 to 4096 54.1, 51.0; but
                        # 4096 to 2560 17.9, 20.6
SLICES = 4              # that a step takes, a warp each
PACKED = 256            # elements of a slice of what is unpacked
UNPACKED = 256          # bytes of one of what is not
LEAST_PART = 8          # columns of a part of a tile that programs of a cluster have added up
ROOM = 40 << 10         # bytes by way of which they do, at most: so much of a program's shared memory has a place before it is launched
PAD = 8                 # numbers between the rows of a tile there: eight rows, of which a warp has some of each, then lie in different banks
STEP = 512              # bytes of a step along what the many columns read; a quarter where a step is unpacked: more spills


@dataclass(frozen=True)
class MatmulSchedule(TileSchedule):
    """A TileSchedule whose `dims` are the accumulator's and whose `looped` axis is the depth."""
    depth: Axis | None = None
    group: int = 8
    inner: Axis | None = None
    resident: int = 0
    outer: Axis | None = None
    early: bool = False

    def __str__(self) -> str:
        parts = {f"group({self.group})": self.group > 1, f"share(depth / {self.programs})": self.programs > 1,
                 f"cluster({self.sharers})": self.sharers > 1, f"resident({self.resident})": self.resident > 0, "early": self.early}
        return " ".join((f"contraction {super().__str__()}", *(text for text, shown in parts.items() if shown)))


@dataclass(frozen=True)
class VectorSchedule(MatmulSchedule):
    """The schedule of a product of a matrix and a vector, see `vector`."""


def choose(b: Body, hints: Hints, target, alone: bool = True) -> tuple[Body, MatmulSchedule] | None:
    """A body whose folds are contractions, its depth perhaps as slices, and its schedule; None for any other. `alone`: its programs have the machine
    to themselves, and if there are few they share the depth."""
    found = folds_of(b)
    if found is None or found[0].exponents is not None or product_type(found[0]) is F32 and min(found[0].sizes(hints)[1:3]) > TURNED:
        return None
    if sums_beside(b):
        made = _choose(b, found, hints, target, alone)
        return (b, made) if made is not None else None
    if not multiplied(found[0]):
        if target.ordered or len(found) > ABREAST:
            return None
        if found[0].outer:
            b = with_a_row(b, found)
            found = folds_of(b)
        else:
            s = _vector(b, found[0], hints)
            return (b, s) if s is not None else None
    made = _choose(b, found, hints, target, alone)
    if made is not None and (size := _slices(found, made, target.threads if alone else 0, hints)):
        b = sliced(b, found[0].depth, size)
        made = _choose(b, folds_of(b), hints, target, alone)
    return (b, made) if made is not None else None


def _choose(b: Body, found: list[Contraction], hints: Hints, target, alone: bool) -> MatmulSchedule | None:
    c, within = found[0], inner_of(found)
    if len(within) > 1 or within and not chained(c, within[0]):
        return None
    rows, columns = (max(axes, key=lambda a: hints(a.extent)) for axes in (c.rows, c.columns))
    if within:
        return _back_to_back(b, c, within[0], rows, columns, hints, target)
    if c.outer and (c.depth.extent.constant is None or c.depth.extent.constant > SLICE):
        return None
    result = next(s.address for s in b.stores if s.axes == b.parallel)
    few, many = sorted((rows, columns), key=lambda a: (hints(a.extent), result.coefficient(a) != 1))
    turned = hints(few.extent) <= TURNED
    cut = _tiles_of_slices if c.outer else _tiles
    sizes = _few_rows(many, few, c, hints, target, alone, len(found)) if turned else cut(rows, columns, c, hints)
    first, second = list(sizes)[:2]
    tiles = 1
    for a in b.parallel:
        tiles *= -(-hints(a.extent) // sizes.get(a, 1))
    walked = c.outer[0] if c.outer else c.depth
    steps = -(-hints(walked.extent) // sizes[walked])
    shares = max(1, min(target.threads // tiles, steps // STEPS)) if alone else 1
    shared = SHARED if not turned or alone and tiles * shares <= target.threads else FEW_SHARED
    room = len(found) * part_sums(sizes[first], sizes[second])
    joined = turned and not sums_beside(b) and _joins(shares, tiles, sizes[first], room, target)
    stages = _stages(sizes, found, shared, turned, room if joined else 0)
    return _schedule(b, c, sizes, hints, programs=shares, sharers=shares if joined else 1, group=1 if turned else GROUP, warps=_warps(sizes, c),
                     early=turned, stages=stages, once=turned and _read_once(b, found, many, few))


def _joins(shares: int, tiles: int, columns: int, room: int, target) -> bool:
    """Are the programs that share the depth of a tile of so many columns neighbours of a cluster, which add up what they have by way of so many bytes
    of shared memory? Clusters that do not all run at once would take twice as long."""
    return 1 < shares <= target.cluster and power(shares) == shares and columns // shares >= LEAST_PART and room <= ROOM \
        and tiles <= clusters(shares, target)


def part_sums(first: int, second: int) -> int:
    """Bytes by way of which programs of a cluster add up tiles of these extents."""
    return 4 * first * (second + PAD)


def _read_once(b: Body, found: list[Contraction], many: Axis, few: Axis) -> bool:
    """Is an element of the many columns' factors some program's alone? Then it leaves the cache first, and what others have written there need not go
    to memory for it. bf16 behind written lines, us: 16 rows, 4096 to 4096 12.3, 13.9; 14336 to 4096 33.5, 37.2; 8192 to 8192 36.7, 40.3; 64 rows,
    4096 to 4096 14.8, 16.4; a gate of two 21.2, 24.3; int8 8192 to 8192 22.9, 26.3; behind lines that were read 1 to 2% more, int4 3."""
    weights = (c.left if many in c.left.free else c.right for c in found)
    return all(e.free >= b.parallel - {few} for w in weights for e in loads(w) if many in e.free)


def tile_of_rows(many: Axis, few: Axis, c: Contraction, hints: Hints, target) -> int:
    """Rows of a tile of few."""
    along = (*c.outer, c.depth)
    eight = target.arch[0] == "cuda" and _width(c, many) == 1 and not c.scales and hints.count(along) * _places(c) > DEEP
    return max(FEWEST if eight else SIDE, power(hints(few.extent)))


def _few_rows(many: Axis, few: Axis, c: Contraction, hints: Hints, target, alone: bool, products: int) -> dict[Axis, int]:
    """Tiles of 64 of the many where there is one for every second multiprocessor or more; else narrow ones, so that there are programs for all of the
    machine, in steps of 512 bytes along what is read of them: 16 by 16 by 256 of bf16 and by 512 of int8 were the best, or near it, of ten shapes at
    three sizes, and of 35 tiles at 4096 to 4096. 16 rows of bf16 behind 4096, us, by 16 and 64 columns: 4352 14.0, 13.3; 5120 15.2, 14.3; 7680 20.5
    (by 32), 19.4; 8192 by 64, 32 and 16 36.8, 39.1, 43.2; 32 rows, 4608 20.6, 13.8; 6144 22.0, 16.8; 16 rows of a gate of two, 5120 30.9, 25.3. Those
    of 64 by steps of 128; by 64 where each multiprocessor has one: 16 rows, 4096 to 11008 26.2, 26.6, 32 rows 27.7, 29.8; but of several products up
    to 16 rows by 128: a gate, 4096 to 11008, 16 rows 52.4 by 64, 48.9; 5120 to 13824, 4 rows 78.3, 75.0; 32 rows 53.4, 58.3."""
    columns, processors = hints(many.extent), target.threads
    rows = tile_of_rows(many, few, c, hints, target) if alone and products == 1 else max(SIDE, power(hints(few.extent)))
    if c.outer:
        whole = max(SIDE, power(c.depth.extent.constant))
        slices = max(SLICES, STEP // (whole * _places(c)))
        packed = alone and products == 1 and slices == SLICES and _width(c, many) == 1
        side = _unpacked_side(columns, rows, processors, whole, _places(c)) if packed else SIDE
        return {many: side, few: rows, c.depth: whole, c.outer[0]: min(slices, power(hints(c.outer[0].extent)))}
    if product_type(c) is F32 and (found := _few_in_tf32(rows, columns, hints(c.depth.extent), processors, products) if alone else (32, UNSHARED)):
        return {many: _side(many, found[0], hints), few: rows, c.depth: _side(c.depth, found[1], hints)}
    if not c.digits and _width(c, many) > 1 and columns > (FILLED if alone else 64) * processors:
        long = columns <= 64 * processors or products > 1 and rows <= SIDE
        return {many: 64, few: rows, c.depth: _side(c.depth, 128 if long else 64, hints)}
    if rows > LITTLE:
        side = 32 if alone and products > 1 and columns > SPREAD * processors else 64
        return {many: _side(many, side, hints), few: rows, c.depth: _side(c.depth, 128, hints)}
    return {many: SIDE, few: rows, c.depth: _side(c.depth, STEP // _width(c, many) // (4 if c.digits else 1), hints)}


def _unpacked_side(columns: int, rows: int, processors: int, slice_: int, places: int) -> int:
    """Columns of a tile of what is unpacked: every tile reads all of the rows, which are more bytes than its own weights. 16 rows, us, by 16, 32 and
    64 columns: int8 8192 to 8192 28.5, 27.0, 27.4, 4096 to 14336 28.2, 27.7, 26.1; int4 21.9, 18.1, 20.1 and 24.3, 21.1, 19.2; a scale for each 128,
    8192 to 8192, int8 32.4, 28.2, 28.0, int4 27.9, 20.3, 21.3; but int8 4096 to 4096 9.7, 9.9, 12.8, 14336 to 4096 23.6, 24.5, 33.9."""
    if rows > SIDE or columns < 32 * processors or slice_ > PACKED // 2 or places > 2:
        return SIDE
    return 64 if columns >= 64 * processors and slice_ * places <= PACKED // 2 else 32


def _few_in_tf32(rows: int, columns: int, depth: int, processors: int, products: int) -> tuple[int, int] | None:
    """(columns, step) of tiles in TF32: 64, whose programs share the depth where they are few, or 32, where these need not; None where neither has
    the steps. 4 and 64 rows, us, by tiles of 16, 32 and 64: 4096 to 1024 16.4, 10.7, 9.8 and 20.2, 14.5, 12.6, the vendor 12.9, 13.9; 1024 to 4096
    8.2, 8.5, 9.7 and 10.8, 10.7, 11.9, the vendor 12.9, 11.8; 1024 to 1024 5.8 by 16. More than 32 rows: 128, since every tile reads all of them,
    where the depth is long or columns are many. 64 rows, us, by 32 or 64 and by 128: 14336 to 4096 100, 73, the vendor 75, a gate of two 205, 125,
    142; 11008 to 4096 78, 60, 61, a gate 158, 101, 115; 4096 to 14336 72.4, 69.8, 70.7; to 11008 66, 60, 58, a gate 112, 107, 108; but 4096 to 4096
    27.7, 30.0. Where 64 fill the machine, by steps of 128 and of 64: 16 rows, 4096 to 11008 53.6, 57.5, 14336 to 11008 157, 164; 32 rows 165, 178."""
    long = rows > LITTLE and depth > DEEP
    if columns >= 64 * processors and rows <= LITTLE and products == 1 and depth >= 2 * STEPS * UNSHARED:
        return 64, UNSHARED
    if columns >= 64 * processors or processors // -(-columns // 64) <= 1:
        return (128, 64) if rows > LITTLE else (64, 64)
    if processors // -(-columns // 32) <= 1:
        return (128, 64) if long else (32, UNSHARED)
    return (64, 64) if depth >= 2 * STEPS * UNSHARED else None


def _warps(sizes: dict[Axis, int], c: Contraction) -> int:
    """Each slice is a warp's own."""
    if c.outer:
        return max(2, min(SLICES, sizes[c.outer[0]]))
    (_, columns), (_, rows), *_ = sizes.items()
    return 2 if columns == SIDE else 8 if columns == 128 and rows <= TURNED else 4


def _slices(found: list[Contraction], s: MatmulSchedule, fill: int, hints: Hints) -> int:
    """Elements of a slice where the depth is better run through in several at once, 0 where not: what is unpacked keeps few warps busy, and so do
    fewer tiles than `fill`. 16 rows, 4096 to 4096: int8 9.4 us, 10.3 in one; int4 8.1, 10.3; bf16, 4096 to 1024: 7.0, 8.2, but to 4096 14.3, 14.1."""
    c, (first, second) = found[0], s.dims
    narrow = s.early and s.sizes(first)[0] == SIDE and s.sizes(second)[0] <= LITTLE
    if not narrow or c.outer or s.inner is not None or c.depth.extent.constant is None or len(found) > 1:
        return 0
    packed, tiles = _width(c, first) == 1, -(-hints(first.extent) // s.sizes(first)[0])
    most = _packed(_places(c), hints(first.extent), s.sizes(second)[0], fill) if packed else UNPACKED // _width(c, first) if tiles < fill else 0
    return next((n for n in (most, most // 2) if n >= SIDE and c.depth.extent.constant % n == 0 and c.depth.extent.constant >= 4 * n), 0)


def _packed(places: int, columns: int, rows: int, processors: int) -> int:
    """Elements of a slice of what is unpacked; fewer in wider tiles, see `_unpacked_side`."""
    half = PACKED // 2
    if not processors or _unpacked_side(columns, rows, processors, half // places, places) == SIDE:
        return PACKED // places
    return half // places if columns >= 64 * processors else min(half, PACKED // places)


def _places(c: Contraction) -> int:
    """Elements of the depth for each coordinate along it."""
    return math.prod(a.extent.constant for a in c.digits)


def with_a_row(b: Body, found: list[Contraction]) -> Body:
    """Products of a matrix and a vector as those of a matrix and a row: the vector, and what is stored, have an axis of one coordinate besides."""
    row, vectors = Axis(max(a.id for a in b.axes) + 600000, as_index(1)), [c.left if not c.rows else c.right for c in found]
    read = {e: Load(e.node, (e.index[0] + as_index(row) * c.fold.over[0].extent,), e.guard, e.other)
            for c, v in zip(found, vectors) for e in loads(v) if c.depth in e.free}
    rewrite = Rewriter(leaf=read.get)
    stores = tuple(Store(s.memory, s.address, rewrite(s.expr), s.axes | {row}, s.monoid, s.guard) for s in b.stores)
    return Body((row, *b.axes), stores, b.parallel | {row})


def sliced(b: Body, depth: Axis, size: int) -> Body:
    """`b` with an axis, whose extent `size` divides, as slices of so many elements."""
    first = max(a.id for a in b.axes) + 500000
    outer, inner = Axis(first, as_index(depth.extent.constant // size)), Axis(first + 1, as_index(size))
    axes = [x for a in b.axes for x in ((outer, inner) if a is depth else (a,))]
    return rewritten(b, {depth: as_index(outer) * size + as_index(inner)}, axes, b.parallel)


def _width(c: Contraction, a: Axis) -> int:
    """Bytes of an element of what is read along `a` and the depth."""
    side = c.left if a in c.left.free else c.right
    return min((e.dtype.bytes for e in loads(side) if a in e.free and c.depth in e.free), default=2)


def _tiles(rows: Axis, columns: Axis, c: Contraction, hints: Hints) -> dict[Axis, int]:
    return {rows: _side(rows, 128, hints), columns: _side(columns, 128, hints), c.depth: _side(c.depth, 64, hints)}


def _tiles_of_slices(rows: Axis, columns: Axis, c: Contraction, hints: Hints) -> dict[Axis, int]:
    """A slice a step."""
    return {rows: _side(rows, 128, hints), columns: _side(columns, 64, hints), c.depth: max(SIDE, power(c.depth.extent.constant)), c.outer[0]: 1}


def _side(a: Axis, most: int, hints: Hints) -> int:
    return max(SIDE, min(most, power(hints(a.extent))))


def _back_to_back(b: Body, c: Contraction, inner: Contraction, rows: Axis, columns: Axis, hints: Hints, target) -> MatmulSchedule:
    """Two contractions in a step: all columns and the inner depth are held, the hidden axis is run through, or held too, in blocks that are written
    out, where shared memory has room for both layers' weights: then a program reads them once."""
    sizes = {rows: _side(rows, 64, hints), columns: power(columns.extent.constant), c.depth: _side(c.depth, 64, hints)}
    hidden, width = hints(c.depth.extent), max(SIDE, power(inner.depth.extent.constant))
    left = c.left if rows in c.left.free else c.right
    vectors = {e.node for e in loads(left) if e.free == {c.depth}}
    if len(vectors) > 1 and VECTORS < hidden <= HELD_BLOCKS * sizes[c.depth] and sizes[columns] <= VECTORS:
        sizes[c.depth] = VECTORS
    blocks = -(-hidden // sizes[c.depth])
    masks = [e for e in loads(left) if rows in e.free and c.depth in e.free]
    beside = sum(e.dtype.bytes for e in masks)
    full = narrow.fill_two(c.depth.extent, inner.depth.extent, columns.extent)
    if full and masks and not hidden_stores(b) and narrow.compared(exprs_of(b), masks):
        sizes |= {rows: TALL, c.depth: TALL}
        return _schedule(b, c, sizes, hints, inner=inner.depth, stages=1, resident=target.threads, blocks=2, warps=8)
    each = sizes[rows] * (2 * width + beside * blocks * sizes[c.depth])
    held = 2 * blocks * sizes[c.depth] * (width + sizes[columns]) + (HELD_STAGES - 1) * each
    if 1 < blocks <= HELD_BLOCKS and c.depth.extent.constant is not None and held <= SHARED:
        return _schedule(b, c, sizes, hints, inner=inner.depth, stages=HELD_STAGES, resident=target.threads, blocks=blocks)
    return _schedule(b, c, sizes, hints, inner=inner.depth, stages=3 if blocks == 1 else 2, resident=RESIDENT * target.threads)


def _vector(b: Body, c: Contraction, hints: Hints) -> VectorSchedule | None:
    """A product of a matrix and a vector; its matrix is read once, and leaves the cache first."""
    found = vector.sizes(c, hints)
    if found is None:
        return None
    many, lengths = found
    others = tuple(sorted(b.parallel - {many}, key=b.axes.index))
    exact = frozenset(a for a, n in lengths.items() if a.extent.constant is not None and a.extent.constant % n == 0)
    pieces = tuple((a, (n,)) for a, n in lengths.items())
    return VectorSchedule((*others, many, c.depth, *c.digits), (many,), pieces, frozenset((c.depth,)), (), 1, exact, 4, 1,
                          wide=wide(b, hints), once=True, unrolled=frozenset(c.digits), depth=c.depth, group=1, early=True)


def _schedule(b: Body, c: Contraction, sizes: dict[Axis, int], hints: Hints, stages: int, inner: Axis | None = None, programs: int = 1,
              group: int = 1, resident: int = 0, warps: int = 4, early: bool = False, blocks: int = 1,
              once: bool = False, sharers: int = 1) -> MatmulSchedule:
    first, second, depth, *outer = sizes
    walked = outer[0] if outer else depth
    others = tuple(sorted(b.parallel - {first, second}, key=b.axes.index))
    order = (*others, first, second, *outer, depth, *c.digits, *((inner,) if inner is not None else ()))
    pieces = {**sizes, **({inner: max(SIDE, power(inner.extent.constant))} if inner is not None else {})}
    each = lambda a: pieces[a] * (programs if a is walked else 1)
    exact = frozenset(a for a in pieces if a.extent.constant is not None and a.extent.constant % each(a) == 0)
    each_once = tuple((a, (n,) * (blocks if a is depth else 1)) for a, n in pieces.items())
    looped = frozenset(() if blocks > 1 else (walked,))
    return MatmulSchedule(order, (first, second), each_once, looped, (), programs, exact, warps, stages, wide=wide(b, hints),
                          unrolled=frozenset(c.digits), depth=depth, group=group, inner=inner, resident=resident,
                          outer=outer[0] if outer else None, early=early, once=once, sharers=sharers)


def _stages(sizes: dict[Axis, int], found: list[Contraction], shared: int, turned: bool, room: int = 0) -> int:
    """Steps along the depth that are under way at once, and the one that is worked on: as many as so many bytes of shared memory hold beside `room`,
    of a few. What several products read is there once. Of a turned result the step that is worked on is in registers."""
    c, (first, second, *along) = found[0], sizes
    sides = lambda a: {x for p in found for x in (p.left, p.right) if a in x.free and p.depth in x.free}
    deep, made = math.prod(sizes[a] for a in along), product_type(c).bytes * _places(c)
    wide = max(made, _width(c, second))             # f32 that is rounded on its way is under way as it lies in memory, and there once more rounded
    vectors = {(x.node, x.index): x.dtype.bytes for p in found for x in loads(p.left, p.right) if c.depth in x.free and not {first, second} & x.free}
    step = (sizes[first] * _width(c, first) * len(sides(first)) + sizes[second] * wide * len(sides(second)) + sum(vectors.values())) * deep
    room += sizes[second] * made * deep if wide > made else 0
    from_memory = sizes[first] >= 64 and product_type(c) is not F32 and shared == SHARED         # the step that is worked on is there, too
    return max(1, min(MOST_STAGES, (shared - room) // step + (turned and not from_memory)))


def folds_of(b: Body) -> list[Contraction] | None:
    """The outermost contractions of `b` in order when they are its only folds, and all its stores and products are over the same axes and sum along
    one depth."""
    hidden, sums = hidden_stores(b), sums_beside(b)
    found = [contraction(e) for e in outermost(s.expr for s in b.stores if s not in hidden and s not in sums)]
    if not found or any(c is None for c in found) or b.base is not None or any(s.monoid is not None or s.guard is not None for s in b.stores):
        return None
    first = found[0]
    same = all((c.rows, c.columns, c.batch, c.fold.over) == (first.rows, first.columns, first.batch, first.fold.over) for c in found)
    everywhere = all(s.axes == first.fold.free for s in b.stores if s not in hidden and s not in sums) and b.parallel == first.fold.free
    beside = {e for s in hidden for e in outermost([s.expr])} <= {c.fold for c in inner_of(found) if c is not None}
    alone = len(found) == 1 and not hidden and not first.outer and multiplied(first) and not any(inner_of(found))
    if sums and not (alone and all(summed(e, first) for e in folds_beside(b))):
        return None
    return found if same and everywhere and beside and (all(map(_of_rows, found)) or all(map(of_vector, found)) and not hidden) else None


def _of_rows(c: Contraction) -> bool:
    """Is it made by products of tiles? Weighted means of one row are, whose tiles have more."""
    return multiplied(c) or c.exponents is not None and of_one_row(c)


def hidden_stores(b: Body) -> tuple[Store, ...]:
    """The stores of what lies between two contractions that are made back to back: over rows and depth."""
    return tuple(s for s in b.stores if not s.axes <= b.parallel)


def sums_beside(b: Body) -> tuple[Store, ...]:
    """The stores of what is made of sums of a contraction's factors along its depth: over rows or columns alone."""
    return tuple(s for s in b.stores if s.axes < b.parallel and any(isinstance(e, Reduce) for e in walk(s.expr)))


def folds_beside(b: Body) -> list[Reduce]:
    """These sums, each once."""
    return outermost(s.expr for s in sums_beside(b))


def left_over(b: Body, s: TileSchedule) -> bool:
    """Does a schedule of another kind run a contraction?"""
    products = (c for e in walk(*exprs_of(b)) if (c := contraction(e)) is not None)
    return not isinstance(s, MatmulSchedule) and not hasattr(s, "parts") and any(map(multiplied, products))


def inner_of(found: list[Contraction]) -> list[Contraction]:
    """The contractions in the factors of others; with a None in place of a fold that is none."""
    return [contraction(e) for e in outermost([x for c in found for x in (c.left, c.right)])]


def outermost(roots) -> list:
    """The folds in `roots` that stand in no other one, each once."""
    found, seen, waiting = [], set(), list(reversed(tuple(roots)))
    while waiting:
        e = waiting.pop()
        if e in seen:
            continue
        seen.add(e)
        if isinstance(e, (Reduce, Scan)):
            found.append(e)
        else:
            waiting.extend(reversed(e.children()))
    return found
