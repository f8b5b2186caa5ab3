"""Tiles for folds of columns that nothing else comes of. Where columns are many, a warp reads words of whole lines of several rows, and a thread
folds its rows before it carries a word's elements on: what is carried is little, what is under way is much. Elsewhere programs of as few warps
as fill the machine: they fold their columns without waiting for each other.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..fuse.cost import Hints
from ..fuse.gpu import FILL
from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.index import Axis, Fetch
from ..ir.ops import CARRIERS
from .body import Body, exprs_of
from .tile_access import ONCE, begin_anywhere
from .tile_stages import few_idle, power
from .tile_statistics import WORD

DEEP = 8                # rows of a tile in a loop: sums over 777 x 86021, whose rows count as eight and four, 77% (f16) and 85% (f32), 61 and 74
                        # before; where one warp for each block of columns does not fill the machine, eight: 1024 x 65536 of f16 77, 84 with tiles of
                        # 64 x 64
RESIDENT = 8            # warps of a multiprocessor at least that there are blocks of columns for
FEW = 16                # rows at most that one program holds without a loop: f16 sums over 16 x 4194304 88%, 79 in tiles of 64 columns; f32 93, 92
ENOUGH = 0.75           # of RESIDENT that will do for those: f16 sums over 4 x 262144, by 1024 programs, 2.4 us, 4.0 in tiles of 64 columns;
                        # 16 x 262144 4.6, 4.9; f32 over 4 x 262145 3.4, 4.4
HELD = 2048             # elements at least of such a tile, where columns are many: f16 sums over 2 x 4194304 10.5 us, 14.2 with a quarter
FEWEST = 4              # rows at most of such a tile where they begin anywhere: four of 1048575 of bf16 8.3 us by four warps for 256 columns, 13.8 by
                        # one for 64
WIDE_ANYWHERE = 16 << 20        # bytes of 32-bit elements up to which rows that begin anywhere are held by four warps, as those of 16 bits are
EACH_ANYWHERE = 16      # elements to a thread of such a tile, of ROWS_ANYWHERE rows at most,
ROWS_ANYWHERE = 64      # where rows begin anywhere: bf16 sums of 64 rows of 65535 and 131073 5.3 and 8.1 us, of 8 of 524289 5.3, f16 of 16 of 1048575
                        # 13.4, f32 of 64 of 32767 4.96; 6.6, 9.2, 7.1, 14.1 and 5.06 in tiles of 64 columns
WARPS_ANYWHERE = 4      # MANY_ANYWHERE rows at least of 16 bits are run through so, where there are RESIDENT such programs a multiprocessor: 256 of
MANY_ANYWHERE = 256     # 524289 90.7, 93.4; but 128 of 262145 27.1, 26.0, and 512 times 257 of 511 86 us, 55 in tiles of 64 x 64
WHOLE = 128             # rows at most, more than ROWS_ANYWHERE, of 16 bits that begin at whole words and are held, 32 columns of them and twice EACH
                        # elements to a thread: f16 sums of 128 of 32768 and 65536 5.0 and 8.1 us, of 96 of 32768 4.8; 6.5 (128 of 32768) and 5.9 (96)
                        # in a loop, 9.2 in two kernels
WARPS = 32              # of a multiprocessor, of programs that walk down columns: 33 MB of bf16, 8192 rows of 2047 that count as eight, 13.9 us, 17.7
                        # with half as many, 23.8 with a quarter
COLUMNS = 64            # columns of a tile of theirs; half as many where there are fewer such than multiprocessors and no more share them: f16
                        # sums over 256 x 4096 2.9 us, 3.6
EACH = 32               # elements of such a tile to a thread: 17.8 us with twice as many; by four warps that wait for each other 18.1 and 20.4
RAGGED_COLUMNS = 32     # the same where rows begin anywhere, which are read element by element: 8192 rows of 127 bf16 3.1 us by 128 programs of
RAGGED_EACH = 8         # eight warps and 1.1 for their partial results, 3.3 and 1.4 as other columns; 131072 rows of 15, by 16 warps, 3.7 and 1.2,
RAGGED_WARPS = 8        # 7.8 and 1.2 by four warps of 32 elements to a thread
LINES_FROM = 256        # rows of fewer than COLUMNS columns of 16 bits from which on, where they begin at words, programs do not share them, and many
LINES = 32              # lanes would be idle, so many of them are read at once, of more from NARROW_FROM rows on,
LINES_WARPS = 4         # by so many warps,
LINES_EACH = 64         # so many elements to a thread, where there are
LINES_HELD = 512, 1024  # half as many of more rows, up to those of four tiles, which a program makes at once; where there are
LINES_LEAST = 8         # so many programs to a multiprocessor: of a sector that several programs read each reads all. f16 sums along the middle of
                        # 4783 x 520 x 24 33.8 us, of 4783 x 900 x 24 53.8, of 2500 x 640 x 40 39.7, bf16 of 1500 x 1500 x 24 41.6; 45.1, 84.6, 62.7
                        # and 55.2 by fewer columns, of 4783 x 300 x 24 20.4, 23.2 by one warp; but of 3000 x 300 x 48 bf16 27.2, 25.2 (H200)
NARROW_FROM = 512       # rows of fewer than COLUMNS columns of 16 bits from which on, where they begin at words and programs do not share them,
NARROW_IDLE = 6         # tiles have fewer columns, so that no more than one lane in so many is idle, a word at least,
NARROW_ROWS = 256       # of so many rows at most,
NARROW_WARPS = 8        # by so many warps: bf16 sums along the middle of 267 x 3302 x 40 34 us in 16 or 8, f16 of 300 x 1500 x 24 14.4 in 8 by eight,
                        # 14.8 by four; 54 and 18.1 in 64 and 32 by eight (H100)
WIDEST = 16             # warps of a program: 256 rows of 4097 columns by 65 programs 3.3 us, 3.9 with half as many columns
SHARES = 512            # programs at most that share columns, whose partial results one kernel folds: 512 of 127 columns 1.4 us, 1024 1.7
SHARED_EACH = 4         # elements to a thread of a tile of 16 bits of several warps: column sums of 18015 x 160 bf16 10.1 us, of 30001 x 200 12.5, of
                        # 25000 x 72 f16 9.8, with what folds their partial results; 11.7, 14.7 and 11.3 with EACH (H200)
SHARED_WIDE = 64        # of 32 bits: of 60000 x 40 10.6 us, of 80001 x 36 12.1, of 70000 x 60 13.2; 12.2, 14.1 and 14.6 with EACH (H200)
LATE = 4 << 20          # bytes of 32-bit elements up to which the time is that of a few accesses one after the other: partial results, mostly.
                        # Also where columns are too few for the multiprocessors
LATE_ROWS = 8192        # elements of a tile then at most: partial results of 128 programs over 127 columns 1.1 us, 3.7 in tiles of 128 x 8 by
LATE_EACH = 16          # two warps; of 128 over 4097 1.6, 264 over 512 1.6, 512 over 2047 2.4
LATE_WARPS = 16         # of 1584 over 768 5.1 us, 10.2 in tiles of half as many elements
SEVERAL_EACH = 8        # of a tile of several values, of LATE bytes together: BatchNorm's partial results of 132 programs over 96 columns, three
                        # numbers each, 2.0 us, 3.4 in tiles of 256 x 8 that take them in one after the other; of 66 over 256 2.1, 3.3
SMALL = 1024            # elements of a tile of small matrices, where they are FULL for each multiprocessor at least: bf16 sums along the middle of
FULL = 16               # 60000 x 8 x 32 37.7 us, 14.2 of four at once, of 124001 x 16 x 24 76.4, 39.7 of two (H100). Twice as many of whole lines of
                        # more than COLUMNS: 47598 x 5 x 128 f16 took 58.8 in two tiles a matrix, 20.9 in a loop of Inductor's (ours is not timed yet)
LATE_COLUMNS = 4, 64    # columns of such a tile: the fewer, the more programs; 16 over 32768 1.5 us by 64, 2.5 by 16
LATE_DEEP = 512         # rows from which on columns, no more of them than multiprocessors, have a program each: partial results of 1056 programs,
                        # two numbers of each, over 88 and 31 columns 6.9 and 5.4 us, of 924 over 26 4.7; 12.5, 6.6 and 5.4 by four (H100)


@dataclass(frozen=True)
class Columns:
    """A tile of `rows` x `columns` to a program of so many warps; programs that share the rows of a block of columns. `by_thread`: a thread folds its
    rows before it carries them on. `once`: what is read leaves the cache first. `matrices`: of how many a tile holds the columns. `late`: their few
    bytes are late rather than many."""
    rows: int
    columns: int
    warps: int
    programs: int = 1
    by_thread: bool = False
    once: bool = False
    matrices: int = 1
    late: bool = False


def choose(b: Body, line: Axis | None, rows: list[Axis], crossed: frozenset[Axis], hints: Hints, target) -> Columns | None:
    """How programs fold the columns of `b`, where it only folds one contiguous value of 16 or 32 bits down one axis; None where it does something
    else, or other tiles do it as well."""
    down = next(iter((*rows, *crossed)), None)
    if len(rows) + len(crossed) != 1 or line not in b.parallel - crossed or target.ordered:
        return None
    if (size := _one_value(b, down, line)) not in (2, 4):
        return _several_late(b, down, line, hints, target) if not crossed else None
    others = math.prod(hints(a.extent) for a in b.parallel - crossed if a is not line)
    blocks = lambda columns: -(-hints(line.extent) // columns) * others
    touched = hints(down.extent) * hints(line.extent) * others * size
    if not crossed and (found := _by_words(b, line, down, size, blocks, hints, target)) is not None:
        return found
    if not crossed and (found := _few_of_any(b, line, down, blocks, hints, target)) is not None:
        return found
    if not crossed and others == 1 and (found := _held_anywhere(b, line, down, size, touched, blocks, hints, target)) is not None:
        return found
    if size == 4 and not crossed and (touched <= LATE or blocks(COLUMNS) < target.threads):
        return _late(hints(line.extent) * others, hints(line.extent), hints(down.extent), target)
    if size == 4 and touched > target.l2 or begin_anywhere(b, line, hints) and touched > LATE:
        return None
    ragged = bool(crossed) and begin_anywhere(b, line, hints)
    few = not crossed and blocks(COLUMNS) < target.threads
    columns, once = min(RAGGED_COLUMNS if ragged or few else COLUMNS, power(hints(line.extent))), ONCE * touched > target.l2
    narrow = _narrow(hints(line.extent), columns)
    if not crossed and size == 2 and not begin_anywhere(b, line, hints) and narrow < columns:
        deep = hints(down.extent)
        if blocks(LINES) >= LINES_LEAST * target.threads and deep >= (LINES_FROM if hints(line.extent) <= LINES else NARROW_FROM):
            twice = 1 + (LINES_HELD[0] < deep <= LINES_HELD[1])
            return replace(_tile(min(LINES, columns), LINES_WARPS * twice, LINES_EACH // twice, NARROW_ROWS), once=once)
        if deep >= NARROW_FROM:
            return replace(_tile(narrow, NARROW_WARPS, EACH // 2, NARROW_ROWS), once=once)
    held = not crossed and others == 1 and size == 2 and ROWS_ANYWHERE < (hints.most(down.extent) or 0) <= WHOLE
    if held and not begin_anywhere(b, line, hints) and FILL * target.threads <= blocks(COLUMNS) < RESIDENT * target.threads:
        return Columns(WHOLE, COLUMNS // 2, WHOLE * COLUMNS // 2 // (64 * EACH))
    many = (2 if ragged else 1) * WARPS * target.threads // blocks(columns)
    if not crossed:
        tile = replace(_tile(columns, max(1, min(WIDEST, power(many + 1) // 2)), EACH, hints(down.extent)), once=once)
        many = others >= FULL * target.threads and not begin_anywhere(b, line, hints)
        tile = _of_lines(tile, line, size, hints) if many else tile
        return replace(tile, matrices=_matrices(b, line, down, tile, hints, target))
    warps, each = (RAGGED_WARPS, RAGGED_EACH) if ragged else (1, EACH)
    programs = lambda warps: max(1, min(many // warps, -(-hints(down.extent) // _tile(columns, warps, each, hints(down.extent)).rows)))
    while programs(warps) > SHARES and warps < WIDEST:
        warps *= 2
    few = SHARED_EACH if warps > 1 and not ragged and size == 2 else each
    tile = _tile(columns, warps, few, hints(down.extent))
    wide = min(tile.warps, max(1, tile.rows * tile.columns // (32 * SHARED_WIDE)))
    return replace(tile, warps=wide if size == 4 else tile.warps, programs=programs(warps), once=once)


def _narrow(n: int, most: int) -> int:
    """The most columns, a power of two up to `most`, a word at least, with which few lanes of all `n` of 16 bits are idle, where those are fewer than
    COLUMNS."""
    return few_idle(n, most, NARROW_IDLE, WORD // 2) if n < COLUMNS else most


def _of_lines(tile: Columns, line: Axis, size: int, hints: Hints) -> Columns:
    """`tile` of one warp, of whole lines of up to twice its columns of 16 bits where that is no more than SMALL."""
    whole = power(hints(line.extent))
    wider = tile.warps == 1 and size == 2 and tile.columns == COLUMNS < whole <= 2 * COLUMNS and tile.rows * whole <= SMALL
    return replace(tile, columns=whole) if wider else tile


def _matrices(b: Body, line: Axis, down: Axis, tile: Columns, hints: Hints, target) -> int:
    """Of how many of a stack of small matrices a program of one warp holds the columns."""
    beside = [a for a in b.axes if a in b.parallel and a is not line]
    most = hints.most(down.extent)
    if tile.warps > 1 or not beside or most is None or most > tile.rows or hints(line.extent) > tile.columns:
        return 1
    count = max(1, SMALL * (2 if tile.columns > COLUMNS else 1) // (tile.rows * tile.columns))
    stack = math.prod(hints(a.extent) for a in beside)
    return count if all(hints(a.extent) >= count for a in beside) and stack >= count * FULL * target.threads else 1


def _tile(columns: int, warps: int, each: int, most: int) -> Columns:
    """A tile of so many columns and at most as many rows, with `each` elements to a thread."""
    rows = min(32 * warps * each // columns, power(most))
    return Columns(rows, columns, max(1, min(warps, rows * columns // (32 * each))))


def _late(many: int, across: int, down: int, target) -> Columns:
    """Tiles for columns whose few bytes are late rather than many."""
    least, most = LATE_COLUMNS
    least = 1 if many <= target.threads and down >= LATE_DEEP else least
    columns = min(max(least, min(most, power(many // target.threads))), power(across))
    rows = min(power(down), LATE_ROWS // columns)
    return Columns(rows, columns, max(1, min(LATE_WARPS, rows * columns // (32 * LATE_EACH))), late=True)


def _several_late(b: Body, down: Axis, line: Axis, hints: Hints, target) -> Columns | None:
    """Tiles for columns of several values, or of statistics, whose few bytes are late."""
    found = list(walk(*exprs_of(b)))
    folds = {e.key for e in found if isinstance(e, Reduce)}
    read = {(e.node, e.index): e for e in found if isinstance(e, Load) and down in e.axes()}.values()
    if not folds or any(isinstance(e, Scan) for e in found) or any(down in s.axes or s.monoid is not None for s in b.stores) \
            or any(over != (down,) for _, over, _ in folds) or any(e.dtype.bytes > 4 or e.index[0].coefficient(line) != 1 for e in read) \
            or any(isinstance(x, Reduce) for _, _, args in folds for a in args for x in walk(a)):
        return None
    across = hints.count(b.parallel)
    if sum(hints(down.extent) * across * e.dtype.bytes for e in read) > LATE:
        return None
    tile = _late(across, hints(line.extent), hints(down.extent), target)
    rows = max(1, min(tile.rows, LATE_ROWS // (tile.columns * power(len(read)))))
    return Columns(rows, tile.columns, max(1, min(LATE_WARPS, rows * tile.columns // (32 * SEVERAL_EACH))), late=True)


def _few_of_any(b: Body, line: Axis, down: Axis, blocks, hints: Hints, target) -> Columns | None:
    """Tiles of a few rows that begin anywhere and are held."""
    most = hints.most(down.extent)
    columns = 32 * RAGGED_EACH
    if most is None or most > FEWEST or not begin_anywhere(b, line, hints) or blocks(columns) < ENOUGH * RESIDENT * target.threads:
        return None
    return Columns(power(most), columns, max(1, min(WIDEST, power(most))))


def _held_anywhere(b: Body, line: Axis, down: Axis, size: int, touched: int, blocks, hints: Hints, target) -> Columns | None:
    """Tiles of four warps for columns of one matrix whose rows begin anywhere: whole columns, or many rows that are run through."""
    if not begin_anywhere(b, line, hints) or size == 4 and not LATE < touched <= WIDE_ANYWHERE:
        return None
    most, elements = hints.most(down.extent), 32 * WARPS_ANYWHERE * EACH_ANYWHERE
    held = most is not None and most <= ROWS_ANYWHERE
    rows = power(most) if held else FEW
    columns = elements // rows
    if rows < FEWEST or blocks(columns) < FILL * target.threads:
        return None
    if not held and (size != 2 or hints(down.extent) < MANY_ANYWHERE or blocks(columns) < RESIDENT * target.threads):
        return None
    return Columns(rows, columns, WARPS_ANYWHERE, once=ONCE * touched > target.l2)


def _by_words(b: Body, line: Axis, down: Axis, size: int, blocks, hints: Hints, target) -> Columns | None:
    """Tiles of one warp where rows begin at whole words and such programs fill the machine."""
    columns, most = 32 * WORD // size, hints.most(down.extent)
    few = most is not None and most <= FEW
    if begin_anywhere(b, line, hints) or hints.least(line.extent) < columns or blocks(columns) < (ENOUGH if few else 1) * RESIDENT * target.threads:
        return None
    if few:
        while power(most) * columns < HELD and blocks(2 * columns) >= RESIDENT * target.threads:
            columns *= 2
        return Columns(power(most), columns, 1)
    return Columns(DEEP, columns, 1, by_thread=True) if hints(down.extent) >= DEEP else None


def _one_value(b: Body, down: Axis, line: Axis) -> int:
    """Bytes of an element where all that `b` folds is one value of one number, read along `line`, and its stores are one number a column; else 0."""
    found = list(walk(*exprs_of(b)))
    folds = {e.key for e in found if isinstance(e, Reduce)}
    reads = {(e.node, e.index, e.dtype.bytes) for e in found if isinstance(e, Load) and down in e.axes()}
    if len(folds) != 1 or len(reads) != 1 or any(isinstance(e, Scan) for e in found) or any(down in s.axes or s.monoid is not None for s in b.stores):
        return 0
    (monoid, over, args), = folds
    (_, index, size), = reads
    plain = len(index) == 1 and index[0].coefficient(line) == 1 and not any(isinstance(x, Fetch) for x in index[0].atoms())
    return size if plain and over == (down,) and len(args) == 1 and monoid not in (*CARRIERS, "logsumexp") else 0
