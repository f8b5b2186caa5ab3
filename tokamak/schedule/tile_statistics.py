"""Tiles of statistics: columns folded across programs by more than one sum of what is read. A thread has words of several rows, which enter what it
carries at once."""
from __future__ import annotations

import math

from ..fuse.cost import Hints
from ..ir.index import Axis
from .tile_facts import MOST_CARRIED, TileFacts
from .tile_stages import power

COLUMNS = 64            # columns of a tile that folds across rows: 128 bytes of a 16-bit type
WORD = 16               # bytes of the widest access of a thread
WORD_WARPS = 8          # of a program of which each thread has words of
SHORT_WARPS = 2         # the same, with as many registers as they take, where two sums of 16 bits are carried through so few bytes of each value to
SHORT = 128 << 10       # a multiprocessor: BatchNorm's in NHWC, backward, of 8 x 1024 x 28 x 28 f16 17.2 us, 19.9, of 16 x 512 x 28 x 28 bf16 16.9,
                        # 19.7, of 64 x 2048 x 7 x 7 f16 16.7, 19.2, of 20 x 1024 x 20 x 20 18.5, 20.6, of 95 x 320 x 16 x 16 bf16 19.2, 21.1; but
                        # of 32 x 256 x 56 x 56 64.1, 63.2 (H200)
BLOCKS = 2              # blocks of columns to a multiprocessor, of sums of a heavy function twice as many, from which on each is one program's, by
BLOCK_WARPS = 2         # so many warps with as many registers as they take, since all of them wait for each other in the end, tiles under way,
BLOCK_WORDS = 2         # so many words a thread at a time. Us, H100, one-pass statistics of EvoNorm in NHWC of 800 x 96 x 14 x 14 bf16 24.3, of
                        # GroupNorm of 38 x 480 x 56 x 56 58, sums of EvoNorm backward of 700 x 64 x 14 x 14 f16 23.2; 65.8, 68 and 38.0 by eight or
                        # 16 warps, 30, 62.8 and 26.5 by four. But in all, GroupNorm of 102 x 480 x 20 x 20 f32 110, 103, EvoNorm backward of
                        # 169 x 128 x 56 x 56 f32 550, 515, GroupNorm backward of 49 x 2048 x 14 x 14 bf16, light sums, 83.6, 64.4. Not of columns
                        # that begin anywhere, of which no thread has a word: mean and deviation along the middle of 3 x 1279 x 7761 bf16 36.0 us by
                        # eight warps, 75 by two (H200)
AT_ONCE = 4             # rows at a step: one-pass statistics of 200704 x 256 bf16 38 us, 44 a row at a step; in 256 columns in place of 64 52 us
ACROSS_RESIDENT = 3     # such programs of a multiprocessor: four spill, 43 us
ALONE_AT_ONCE = 8       # the same where one value is read and nothing but moments carried: 31.6 us, 32.9 with 4 and three programs. BatchNorm in NHWC
ALONE_RESIDENT = 2      # 59%, 58; InstanceNorm3D in NDHWC 55, 54
ALONE_ROUNDS = 1        # blocks a program then: those two have 12 and 8; BatchNorm in NHWC of 16 x 768 x 28 x 27 bf16 24.4 us, 25.3 with 4 at once,
                        # of 8 x 256 x 64 x 64 f16 19.5, 20.5
CARRIED = 32            # numbers that a thread carries, of sums, from which on two programs have the registers of a multiprocessor: of five sums of
                        # bf16, EvoNorm backward in NHWC, 49.6 us, 52.9 by three that spill; of f32, half as many numbers, 77.4 and 71.2
MANY_SUMS = 4           # of those that take several rows at once from which on it is two programs, too: EvoNorm backward of 32 x 256 x 56 x 56 in
                        # NHWC, four, bf16 39 us, f32 72, 84 and 122 by three that spill
BESIDE = 40             # and numbers of what is carried and read together: three sums of bf16 of two tensors and of their groups' statistics, EvoNorm
                        # backward in NHWC of 17 x 192 x 32 x 32, 31.8 us by three, which spill 264 bytes a thread (H100)
LEAST_TURNED = 4        # rows at once from which on fewer may be: BatchNorm in NHWC of 16 x 768 x 28 x 27 bf16, six for eight, 23.1 us, 24.1, of
                        # 32 x 96 x 57 x 57, five, 22.4, 23.0, of 64 x 2048 x 7 x 7, seven, 20.4, 21.2
WHOLE = 16              # of the rows of all turns one more at most: eight of InstanceNorm3D in NDHWC of 4 x 32 x 64 x 64 x 64 f16 22.9 us, seven 23.4
SUMS_AT_ONCE = 2        # of sums, which are read a turn ahead: backward of InstanceNorm3D in NDHWC 39 us, 48 with four and none ahead; one-pass
                        # statistics gain nothing by that (24 us, 23; 31, 31). Five sums of f32 a row at a step 71.2, 76.4 with none ahead
SUMS = 3                # from which on columns that are no whole tiles lie in tiles of
NARROW = 8              # so many, or twice as many, and no more rows: standardized columns' gradient of 30000 x 200 f16 28.4 us, 77 in 64 columns,
                        # which spill 232 bytes, of 100000 x 40 bf16 20.0, 64, of 60000 x 72 f32 33.1, 64, of 38215 x 296 69, 90; but BatchNorm's in
                        # NHWC, two sums, of 50 x 200 x 20 x 20 bf16 19.5, 16.8 (H200)
NARROW_IDLE = 4         # one lane in so many idle, from which on those of up to COLUMNS columns, of two sums or more, lie in tiles of fewer:
                        # standardized columns' gradient of 350131 x 19 bf16 57.4 us, of 300000 x 19 f32 57.8, of 200001 x 23 f16 38.1, of
                        # 300000 x 37 bf16 79.1; 75.9, 82.9, 47.5 and 96.7 in 16 or 32 of them (H200)
WRITTEN = 2             # times fewer rows of a piece where something of 16 bits is written beside: RMSNorm backward along the middle of
                        # 400 x 1000 x 30 bf16 35.8 us, of 238 x 2014 x 19 f16 39.7; 96.8 and 100, which spill 208 and 248 bytes (H200)


def several_rows(of: TileFacts, pieces: dict[Axis, tuple[int, ...]]) -> dict[Axis, tuple[int, ...]]:
    """The rows of a tile of `pieces` of which programs share statistics in equal pieces of a word a thread, which enter the statistics at once; empty
    where they cannot be divided so."""
    down = [a for a in pieces if a in of.crossed]
    if not of.statistics() or of.down or len(down) != 1 or len(pieces) < 2:
        return {}
    words, count = WORD_WARPS, ALONE_AT_ONCE if _alone(of) else SUMS_AT_ONCE if of.only_sums() else AT_ONCE
    if alone := by_blocks(of, pieces):
        words, count = BLOCK_WARPS * BLOCK_WORDS, 1 if of.only_sums() else AT_ONCE
    count = 1 if of.carried() > MOST_CARRIED else count
    words //= WRITTEN if any(s.axes & of.crossed for s in of.b.stores) and of.narrowest() < 4 else 1
    beside = math.prod(sum(p) for a, p in pieces.items() if a not in of.crossed)
    rows = 32 * words * (WORD // of.narrowest()) // (COLUMNS if _narrow(of, pieces) else power(beside))
    while alone and count > 1 and of.hints(down[0].extent) < rows * count:
        count //= 2
    return {down[0]: (rows,) * count} if rows and of.hints(down[0].extent) >= rows * count else {}


def by_blocks(of: TileFacts, pieces: dict[Axis, tuple[int, ...]]) -> bool:
    """Are there so many blocks of columns of which statistics of 16 bits, or heavy sums, are made that a program has one to itself? `pieces`: of a
    tile's axes."""
    if not of.statistics() or of.down or len(pieces) < 2 or of.begin_anywhere():
        return False
    share = of.blocks(of.b.parallel - of.crossed, pieces) / of.target.threads
    return share >= 2 * BLOCKS and of.heavy(of.crossing) if of.only_sums() else share >= BLOCKS and of.narrowest() == 2


def in_turns(several: dict[Axis, tuple[int, ...]], programs: int, hints: Hints) -> dict[Axis, tuple[int, ...]]:
    """`several`, of half as many pieces at least where `programs` then read fewer rows in all their turns: the last turn of each is fuller. Of those
    that cover the rows exactly, and need no masks, a few more (`WHOLE`)."""
    if not several or max(map(len, several.values())) < LEAST_TURNED:
        return several
    (down, sizes), = several.items()
    rows = lambda count: -(-(-(-hints(down.extent) // (count * sizes[0]))) // programs) * count
    counts = range(len(sizes), len(sizes) // 2 - 1, -1)
    fewest = min(counts, key=lambda count: (rows(count), -count))
    whole = next((c for c in counts if hints.divides(c * sizes[0], down.extent)), fewest)
    return {down: sizes[:whole if (rows(whole) - rows(fewest)) * WHOLE <= rows(fewest) else fewest]}


def short(of: TileFacts) -> bool:
    """Do programs that share statistics carry sums alone, of no heavy function of 16 bits, through few blocks?"""
    return of.only_sums() and len(of.crossing) == 2 and of.narrowest() < 4 and not of.heavy(of.crossing) \
        and math.prod(of.hints(a.extent) for a in of.order) * of.narrowest() <= SHORT * of.target.threads


def resident(of: TileFacts) -> int:
    """Programs of a multiprocessor where tiles have `several_rows`."""
    sums = sum(len(e.args) for e in of.crossing)
    many = sums * (WORD // of.narrowest()) > CARRIED or MANY_SUMS <= sums and of.carried() <= MOST_CARRIED \
        or of.carried() * (WORD // of.narrowest()) > BESIDE
    return ALONE_RESIDENT if _alone(of) or of.only_sums() and many else ACROSS_RESIDENT


def _alone(of: TileFacts) -> bool:
    """Do programs that share statistics read one value and carry its moments, through many blocks?"""
    block = 32 * WORD_WARPS * (WORD // of.narrowest()) * ALONE_AT_ONCE
    return of.carried() <= 4 and any(e.monoid == "moments" for e in of.crossing) \
        and of.hints.count(of.b.parallel) >= ALONE_ROUNDS * block * ALONE_RESIDENT * of.target.threads


def columns(of: TileFacts, most: int) -> int:
    """Columns, of at most `most`, of a tile that folds across rows which programs share: of statistics so many that no lane is idle."""
    whole = next((n for n in (most, most // 2) if of.hints.divides(n, of.line.extent)), 0) if of.statistics() else most
    if _few_columns(of):
        return NARROW
    if whole or not _many_sums(of):
        return whole or most
    return NARROW if of.hints.divides(NARROW, of.line.extent) else 2 * NARROW


def _few_columns(of: TileFacts) -> bool:
    """Are several sums made down the columns of one matrix, which are fewer than a tile has and would leave many of its lanes idle?"""
    n = of.hints(of.line.extent)
    return _sums_of_one(of, 2) and NARROW < n < COLUMNS and (power(n) - n) * NARROW_IDLE > n


def shares(of: TileFacts, pieces: dict[Axis, tuple[int, ...]]) -> int:
    """Times more programs than run at once that share a tile of `pieces`, of few columns because it would spill else: as many as of whole tiles."""
    return COLUMNS // sum(pieces[of.line]) if of.statistics() and _narrow(of, pieces) else 1


def _narrow(of: TileFacts, pieces: dict[Axis, tuple[int, ...]]) -> bool:
    """Are there so many sums, or so few columns, that a tile has fewer than others?"""
    narrow = of.line in pieces and sum(pieces[of.line]) == columns(of, COLUMNS) <= 2 * NARROW
    return narrow and (_many_sums(of) or _few_columns(of))


def _many_sums(of: TileFacts) -> bool:
    """Are several sums made down the columns of one matrix, more than a few of them?"""
    return _sums_of_one(of, SUMS) and of.hints(of.line.extent) > 2 * NARROW


def _sums_of_one(of: TileFacts, least: int) -> bool:
    """Are so many sums at least made down the columns of one matrix, and nothing else across programs?"""
    return of.b.parallel - of.crossed == {of.line} and of.only_sums() and len(of.crossing) >= least
