"""Tiles for folds of columns that nothing else comes of: each warp reads words of whole lines of several rows, and a thread folds its rows before it
carries a word's elements on, so that what is carried is little and what is under way is much."""
from __future__ import annotations

import math
from dataclasses import dataclass

from ..fuse.cost import Hints
from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.index import Axis, Fetch
from ..ir.ops import CARRIERS
from .body import Body, exprs_of
from .tile_access import begin_anywhere
from .tile_stages import power

WORD = 16               # bytes of the widest access of a thread
DEEP = 8                # rows of a tile to each warp: f16 sums of the columns of 4096 x 16400 in 39 us, of 65536 x 1024 in 39.5, of 1024 x 65536 in 38 (a copy
                        # of as many bytes 36); tiles of 64 x 64 of four warps 50, 45 and 46
RESIDENT = 16           # warps of a multiprocessor
MOST_WARPS = {2: 8, 4: 1}       # of a program, by bytes of an element: several to a block of columns leave fewer partial results
LEAST = 64              # columns at least: several rows to a warp where they are fewer than it has words for
FEW = 16                # rows at most that one program holds without a loop: 16 x 4194304 of f16 42 us with 512 and 256 columns


@dataclass(frozen=True)
class Words:
    """A tile that folds along `down`: its warps, rows (0: all of them) and columns."""
    down: Axis
    warps: int
    rows: int
    columns: int


def by_words(b: Body, line: Axis | None, rows: list[Axis], looped: set[Axis], crossed: frozenset[Axis], hints: Hints,
             target) -> Words | None:
    """The tile where `b` only folds one contiguous value down columns, rows beginning at whole words; else None. Of 32 bits, which
    are longer accesses anyway, only where programs of one warp fill the machine: f32 sums over 194 x 344084 75 us, 83 with tiles of 64 x 64."""
    down = next(iter(crossed), None) if not rows and len(crossed) == 1 else rows[0] if len(rows) == 1 and not crossed else None
    size = 0 if down is None or line not in b.parallel - crossed or target.ordered else _one_value(b, down, line)
    if size not in ((2,) if crossed else (2, 4)) or begin_anywhere(b, line, hints) or hints.least(line.extent) < LEAST:
        return None
    count, columns, lanes = hints(down.extent), hints(line.extent), 32 * WORD // size
    width = min(lanes, power(columns + 1) // 2)
    blocks = -(-columns // width) * math.prod(hints(a.extent) for a in b.parallel if a is not line and a is not down)
    if down not in crossed and down not in looped:
        return Words(down, 1, 0, width) if hints.most(down.extent) <= FEW and width == lanes and blocks >= RESIDENT * target.threads else None
    deep = DEEP * (lanes // width)
    warps = max(1, min(power(RESIDENT * target.threads // blocks + 1) // 2, power(count // deep + 1) // 2, MOST_WARPS[size]))
    if count < deep or down not in crossed and blocks * warps * 2 < RESIDENT * target.threads:
        return None
    return Words(down, warps, deep * warps, width)


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
