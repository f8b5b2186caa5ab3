"""Moments of long rows, with sums beside them and nothing written along the rows: they are folded as what programs share is, each thread by itself,
since a thread that carries moments of every element that it reads at once has few under way. A program may have all of a row. H200, us, before and
so (Inductor): variance of 487 rows of 103168 bf16 64.8, 30.4 (56), of 8000 of 20000 224, 123 (166), with the mean of 2000 of 20000 57, 35 (47), of
300 of 50001 f16 25.4, 17.0 (28), of 4000 of 20000 f32 150, 91.5 (91.7), of 300 of 60000 44.4, 28.6 (27.0), of 1192 of 42195 99, 66 (82). H100:
of 576 of 87352 bf16 67.7, 50.2, of 300 of 50008 27.1, 16.4, of 2000 of 20008 f16 58.0, 34.8.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..fuse.cost import Hints
from ..fuse.gpu import MOMENTS
from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.index import Axis
from .body import Body, exprs_of
from .tile_schedule import TileSchedule

REGISTERS = 128         # of a thread with rows of 32 bits: of 4000 of 20000 140 us with half as many, of 1192 of 42195 109


def choose(b: Body, hints: Hints, target, again: Callable[[Body], TileSchedule]) -> tuple[Body, TileSchedule] | None:
    """`b` with its row among the axes that programs share and the schedule that `again` chooses for that; None where it is no such body, or is faster
    as it is."""
    line = _line(b, hints, target)
    if line is None:
        return None
    made = replace(b, parallel=b.parallel | {line})
    s = again(made)
    wide = _read(b, line)[0].dtype.bytes > 2
    if not s.by_thread or s.dims != (line,):
        return None
    return made, replace(s, registers=REGISTERS) if wide else s


def _line(b: Body, hints: Hints, target) -> Axis | None:
    """The row axis of `b`, where moments of long contiguous rows of elements of one size are what it folds."""
    rows = [a for a in b.axes if a not in b.parallel]
    if target.ordered or len(rows) != 1 or b.base is not None or (hints.exactly(rows[0].extent) or 0) < MOMENTS:
        return None
    line, found = rows[0], list(walk(*exprs_of(b)))
    if any(line in s.axes or s.monoid is not None or s.guard is not None for s in b.stores) or any(isinstance(e, Scan) for e in found):
        return None
    folds, read = [e for e in found if isinstance(e, Reduce)], _read(b, line)
    if any(e.monoid not in ("moments", "sum") or e.over != (line,) for e in folds) or not any(e.monoid == "moments" for e in folds):
        return None
    if any(isinstance(x, Reduce) for e in folds for x in walk(*e.args)):        # what needs the whole of another is no fold of what programs share
        return None
    plain = all(e.index[0].coefficient(line) == 1 for e in read) and len({e.dtype.bytes for e in read}) == 1
    return line if plain and read[0].dtype.bytes in (2, 4) else None


def _read(b: Body, line: Axis) -> list[Load]:
    """What is read along the row."""
    return [e for e in walk(*exprs_of(b)) if isinstance(e, Load) and line in e.axes()]
