"""Tiles for folds of many columns that nothing else comes of: a warp reads words of whole lines of several rows, and a thread folds its rows before
it carries a word's elements on, so that what is carried is little and what is under way is much."""
from __future__ import annotations

import math

from ..fuse.cost import Hints
from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.index import Axis, Fetch
from ..ir.ops import CARRIERS
from .body import Body, exprs_of
from .tile_access import begin_anywhere

WORD = 16               # bytes of the widest access of a thread
DEEP = 8                # rows of a tile in a loop: sums over 777 x 86021, whose rows count as eight and four, 77% (f16) and 85% (f32), 61 and 74
                        # before; where one warp for each block of columns does not fill the machine, eight: 1024 x 65536 of f16 77, 84 with tiles of
                        # 64 x 64
RESIDENT = 8            # warps of a multiprocessor at least that there are blocks of columns for
FEW = 16                # rows at most that one program holds without a loop: f16 sums over 16 x 4194304 88%, 79 in tiles of 64 columns; f32 93, 92


def by_words(b: Body, line: Axis | None, rows: list[Axis], looped: set[Axis], hints: Hints, target) -> dict[Axis, int] | None:
    """The rows (where they are looped) and columns of a tile of one warp, where `b` only folds one contiguous value of 16 or 32 bits down columns,
    rows beginning at whole words, and such programs fill the machine; else None."""
    if len(rows) != 1 or line not in b.parallel or target.ordered:
        return None
    down, size = rows[0], _one_value(b, rows[0], line)
    if size not in (2, 4) or begin_anywhere(b, line, hints) or hints.least(line.extent) < 32 * WORD // size:
        return None
    columns = 32 * WORD // size
    blocks = -(-hints(line.extent) // columns) * math.prod(hints(a.extent) for a in b.parallel if a is not line)
    if blocks < RESIDENT * target.threads:
        return None
    if down in looped:
        return {down: DEEP, line: columns} if hints(down.extent) >= DEEP else None
    return {line: columns} if hints.most(down.extent) <= FEW else None


def _one_value(b: Body, down: Axis, line: Axis) -> int:
    """Bytes of an element where all that `b` folds is one value of one number, read along `line`, and its stores are one number a column; else 0."""
    found = list(walk(*exprs_of(b)))
    folds = {(e.monoid, e.over, e.args) for e in found if isinstance(e, Reduce)}
    reads = {(e.node, e.index, e.dtype.bytes) for e in found if isinstance(e, Load) and down in e.axes()}
    if len(folds) != 1 or len(reads) != 1 or any(isinstance(e, Scan) for e in found) or any(down in s.axes or s.monoid is not None for s in b.stores):
        return 0
    (monoid, over, args), = folds
    (_, index, size), = reads
    plain = len(index) == 1 and index[0].coefficient(line) == 1 and not any(isinstance(x, Fetch) for x in index[0].atoms())
    return size if plain and over == (down,) and len(args) == 1 and monoid not in (*CARRIERS, "logsumexp") else 0
