"""Tiles of short rows that lie one behind the other and begin anywhere: a program reads its rows as one run of whole words, and each lane then takes
its element from what other threads have read. Element by element an access is two bytes long, so that too few bytes are under way: f16 sums of rows
of 17 84% of a copy's rate, 57 element by element.
"""
from __future__ import annotations

from ..fuse.cost import Hints
from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.index import Axis, Fetch, as_index
from .body import Body, exprs_of
from .tile_schedule import cover
from .tile_stages import power

BYTES = 2               # of an element: 32-bit ones are read as quickly one by one (f32 sums of 17 columns 89%)
RUN = 4096              # elements that a program reads, at most: f16 sums of rows of 17 84%, 81 with twice as many, 82 with twice as many and 8 warps
WARPS = 4               # 75 with 8
WORDS = 8               # rows of a program are a multiple of so many, so that every program's first begins at a word
SHORTEST, LONGEST = 3, 64         # elements of such a row
READ = 4                # elements of which rows are made up that are read as they lie: logsumexp of f16 rows of 36 134 us as one run, 33.7 so
PIECE = 8               # elements of each of the equal pieces of a row of several lengths that is folded more than once: entropy of 691899 rows of 38
                        # bf16 48.4 us, 146 as 32 + 8, 82 as 64 (H200)
LEAST = 1 << 20         # elements read, below which a launch takes longer than they do
BUSY = 4                # where rows are folded more than once, a tile has a power of two of rows if fewer than 3 of BUSY lanes would hold one: of
                        # 1370890 rows of 29 bf16 a preference loss 90.7 us as 128 rows, 174 as 136 in 256 lanes, logsumexp of 900000 f16 55.1, 106,
                        # entropy of 25 59.0, 91.0, of 50 112, 147, logsumexp of 22 37.1, 40.9 (H200). Not 104 in 128 (by the estimate of its machine
                        # code entropy of 38 67, 60), nor where rows are only summed (of 25 61, 56)


def rows_of(b: Body, rows: list[Axis], line: Axis | None, hints: Hints, target) -> int:
    """How many rows of `b` a program reads as one run; 0 where it reads them otherwise."""
    n = hints.most(line.extent) if rows == [line] and len(b.parallel) == 1 else None
    if n is None or n > LONGEST or hints.least(line.extent) < SHORTEST or hints.divides(READ, line.extent) or target.ordered or b.base is not None:
        return 0
    row, = b.parallel
    if hints(row.extent) * hints(line.extent) < LEAST or any(line in s.axes or s.monoid is not None or s.guard is not None for s in b.stores):
        return 0
    found = list(walk(*exprs_of(b)))
    if any(isinstance(e, Scan) or isinstance(e, Reduce) and e.over != (line,) for e in found):
        return 0
    along = [e for e in found if isinstance(e, Load) and {row, line} <= e.axes()]
    if not along or not all(lies_flat(e, row, line) and e.dtype.bytes == BYTES for e in along):
        return 0
    count = RUN // n // WORDS * WORDS
    return power(count) // 2 if _several([e for e in found if isinstance(e, Reduce)]) and count * BUSY < 3 * power(count) else count


def pieces(folds: list[Reduce], n: int) -> tuple[int, ...]:
    """Pieces of a row of `n` elements, on which `folds` stand: of several folds a thread holds all of it."""
    found = cover(n)
    return (PIECE,) * -(-n // PIECE) if _several(folds) and len(found) > 1 else found


def _several(folds: list[Reduce]) -> bool:
    return len({e.key for e in folds}) > 1


def lies_flat(e: Load, row: Axis, line: Axis) -> bool:
    """Does `e` read rows along `line` that lie one behind the other from the beginning of its memory on, under no guard?"""
    i = e.index[0]
    return e.guard is None and i.axes() == {row, line} and i.coefficient(line) == 1 and i.coefficient(row) is as_index(line.extent) \
        and i.without(line).without(row) == 0 and not any(isinstance(x, Fetch) for x in i.atoms())
