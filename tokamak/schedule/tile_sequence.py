"""Kernels in a row over the same memory: the second begins with what the first has read last, and that stays in the second-level cache until then."""
from __future__ import annotations

from dataclasses import replace

from ..fuse.cost import Hints
from ..ir.expr import Load, walk
from ..ir.index import Axis
from .body import Body, exprs_of
from .tile_schedule import TileSchedule

STAYING = 24 << 20      # bytes of what such a kernel reads that are still in the cache for the next: BatchNorm's two of 103 MB 76.8 us by
                        # hand, 78.8 with no hint; three of the product 84, 86 with none, the same with 12 or 36 MB
AGAIN = 16 << 20        # bytes that two kernels in a row read, from which on the second begins at the end: BatchNorm of 103 MB 85.4 to 82.5 us
LITTLE = 64             # times as much as a kernel writes it reads, where it only folds
SMALL = 1 << 20         # bytes of what a kernel between two such touches, at most


def small(b: Body, hints: Hints) -> bool:
    """Does a kernel touch so little that what lies in the cache before it is still there behind it? The statistics of groups, of what columns
    gave."""
    touched = {(e.node, e.index[0]) for e in walk(*exprs_of(b)) if isinstance(e, Load)} | {(s.memory, s.address) for s in b.stores}
    return sum(hints.count(address.axes()) * memory.dtype.bytes for memory, address in touched) <= SMALL


def after(made: tuple[Body, TileSchedule], before: tuple[Body, TileSchedule] | None, hints: Hints) -> TileSchedule:
    """The schedule of a kernel that runs behind `before`: backward where that has folded, and done little else with, much of what this one reads
    again."""
    b, s = made
    if before is None or s.split or s.staged is not None or not (before[1].split or _only_folds(before[0], hints)):
        return s
    read = [{e.node: e.index[0] for e in walk(*exprs_of(x)) if isinstance(e, Load)} for x in (b, before[0])]
    shared = [m for m in read[0] if m in read[1]]
    if sum(hints.count(read[0][m].axes()) * m.dtype.bytes for m in shared) < AGAIN:
        return s
    return replace(s, backward=True, order=_ordered(s, before[1], [(read[0][m], read[1][m]) for m in shared]) if before[1].programs > 1 else s.order)


def _only_folds(b: Body, hints: Hints) -> bool:
    """Does a kernel write next to nothing of what it reads?"""
    read = sum(hints.count(i.axes()) * m.dtype.bytes for m, i in {(e.node, e.index[0]) for e in walk(*exprs_of(b)) if isinstance(e, Load)})
    return LITTLE * sum(hints.count(s.address.axes()) * s.memory.dtype.bytes for s in b.stores) <= read


def _ordered(s: TileSchedule, first: TileSchedule, shared) -> tuple[Axis, ...]:
    """The axes of `s` with those foremost, which programs take last to first, that `first` runs along in its loops, in all of its programs at once:
    only what it has read last in each of them is still there. InstanceNorm3D of 4 images in NDHWC 55% of a copy with `tile_statistics.ALONE_AT_ONCE`,
    53 before both. `shared`: addresses of the same memory in both."""
    along = {(m, address.coefficient(a)) for m, (_, address) in enumerate(shared) for a in first.split if a in address.axes()}
    crossed = lambda a: any((m, address.coefficient(a)) in along for m, (address, _) in enumerate(shared) if a in address.axes())
    return tuple(sorted(s.order, key=lambda a: not crossed(a)))


def rows_last(made: tuple[Body, TileSchedule], before: tuple[Body, TileSchedule] | None, hints: Hints) -> TileSchedule | None:
    """The schedule of `before`, whose programs share long rows that they fold, where this kernel runs down blocks of the same rows' columns, and more
    is read than stays in the cache: rows one after the other, a block of each to a program, the last first. LayerNorm backward of 256 rows of 262144
    bf16 169 us, 178, RMSNorm 165, 174, f32 of 64 of 262144 89, 93. None where that is not so."""
    if before is None or not (before[1].once and before[1].by_thread and len(before[1].dims) == 1 and before[1].split == before[1].dims) \
            or len(made[1].split) != 1 or made[1].split[0] in made[1].dims:
        return None
    (b, s), (line,) = before, before[1].dims
    down, = made[1].split
    again = {e.node: e.index[0].coefficient(down) for e in walk(*exprs_of(made[0])) if isinstance(e, Load) and down in e.index[0].axes()}
    rows = {e.node: [e.index[0].coefficient(a) for a in e.index[0].axes() - {line}] for e in walk(*exprs_of(b))
            if isinstance(e, Load) and line in e.index[0].axes()}
    if not any(again.get(m) in steps for m, steps in rows.items()):
        return None
    return replace(s, programs=-(-hints(line.extent) // sum(s.sizes(line))), once=False, descending=True)


def leaving(made: tuple[Body, TileSchedule], hints: Hints) -> TileSchedule:
    """The schedule of a kernel before one that runs `after` it backward: what it reads last stays in the cache."""
    b, s = made
    read = sum(hints.count(i.axes()) * m.dtype.bytes for m, i in {(e.node, e.index[0]) for e in walk(*exprs_of(b)) if isinstance(e, Load)})
    if not s.split or read <= STAYING or not (s.once or s.abreast or s.by_thread):
        return replace(s, once=False)
    return replace(s, once=True, kept=max(64 * STAYING // read, 1))
