"""Tiles of columns that are held down a middle axis, beside which sums of each of their rows are carried: the backward of a norm along that axis,
with its weight's gradient, of several matrices. Few warps: what is folded down the columns crosses warps where there are more. One matrix at a time,
as many registers as a thread takes.

H200, us, by tiles of TILE elements, 16 warps and a cap on registers, and so: RMSNorm backward along the middle of bf16 14221 x 33 x 168 876, 217, f16
of 751 x 82 x 53 59.5, 22.9 to 24, bf16 of 45776 x 6 x 56 134, 41.8, of 1353 x 9 x 1025 95, 60, of 108 x 16 x 3344 29.4, 19.5, f16 of 658 x 21 x 1912
117, 61, bf16 of 332 x 49 x 4264 208, 137, f16 of 15421 x 63 x 33 247, 141, bf16 of 5 x 120 x 7328 26.0, 19.2, f32 of 239 x 143 x 792 127, 93, of
49 x 127 x 511 25.6, 24.6, f16 of 2200 x 255 x 37 324, 109, bf16 of 149 x 288 x 272 51.4, 38.6, of 3 x 716 x 5701 119, 75, of 114 x 2452 x 256
516, 265, f16 of 6 x 2831 x 3456 497, 341.
"""
from __future__ import annotations

import math

from ..ir.index import Axis
from ..ir.ops import CARRIERS
from .tile_stages import power
from .tile_threads import CARRY_RESIDENT, CARRY_STAGES, Threads, TileThreads

WORDS = (33, 64, 1), (256, 32, 4), (384, 16, 4)     # rows at most, columns, warps: where columns begin at words; up to DEEP rows in one piece, and of
LONGER = 1024           # more up to LONGER, elsewhere: of 36 x 64 x 2520 bf16 26 us by two warps, 18.8 as TILE, of 80 x 733 x 512 f16 114 by four, 85
ALIKE = 64, 4           # columns and warps of up to DEEP of those in equal pieces: of 332 x 49 x 4264 bf16 131 us, 163 in half as many columns; of
ALIKE_MOST = 96         # more as of others, up to so many: of 3102 x 88 x 120 65.6, 71.9 as TILE, but of 273 x 111 x 2488 184, 147
DEEP = 64               # rows at most, in one piece or equal ones, of which several tiles are under way where they begin at words: of 332 x 49 x 4264
                        # 131 and 189 us, of 14221 x 33 x 168, in 32 + 1, 508 and 222
SHORTEST = 16           # rows at most of columns that begin anywhere which one warp holds in 64 of them; twice as many in half as many columns by
SHORT_EACH = 8          # warps of so many elements to a thread; of more ANYWHERE are held, by
ANYWHERE = 8
EACH = 16               # so many elements to a thread, half as many of 32 bits: of 49 x 127 x 511 f32 24.6 us, 28.7. Not in equal pieces: of
                        # 1703 x 55 x 202 bf16 106 us so, 50 by `tile_threads.CARRY_ALIKE`
LONG_WORDS = 512, 768   # rows from which on, up to which, twice as many columns of 16 bits that begin at words of 4 bytes are held by MOST warps: of
                        # 10 x 700 x 2002 bf16 69 us, 77.5 (H100)
LONG = 60               # the same of longer columns that begin at words, half as many of 32 bits: 1200 rows of f32 spill 392 bytes a thread so (as
                        # compiled for sm_90; not timed)
WIDE = 24               # rows of 32 bits that begin at words which one warp holds, at most: 33 spill 176 bytes
MOST = 16               # warps; twice as many of more rows than
TALL = 2048             # so many that begin anywhere: 2500 spill 752 bytes so, 2200 by MOST (not timed)
VALUES = 3              # read and carried: of more a thread has as many elements fewer
FEW = 2                 # sums at most


def choose(of: TileThreads) -> tuple[int, Threads] | None:
    """(columns, threads) for a tile whose rows are covered; None for another one."""
    row = _held(of)
    if row is None:
        return None
    pieces, values = of.pieces[row], len(of.rows_read()) + len(of.crossing)
    need = sum(pieces) * max(1, values // VALUES)
    wide = of.narrowest() >= 4
    if of.begin_anywhere():
        found = _anywhere(pieces, need, wide, of.begin_at_words(4)) if not of.held_anywhere() else None
    else:
        found = _at_words(pieces, need, wide)
    if found is None:
        return None
    columns, warps, stages = found
    return min(columns, power(of.hints(of.line.extent))), Threads(warps, max(1, CARRY_RESIDENT // warps), stages, 0, False, False)


def _held(of: TileThreads) -> Axis | None:
    """The middle axis down which columns of several matrices are held and written, beside few sums of its rows that programs carry."""
    row = of.rows[0] if len(of.rows) == 1 else None
    down = row in of.pieces and row is not of.line and of.line in of.b.parallel and of.shift is None and not of.looped and not of.target.ordered
    carried = of.carries and bool(of.crossed - {of.line}) and len(of.crossing) <= FEW and not any(e.monoid in CARRIERS for e in of.crossing)
    return row if down and carried and of.stored_along() else None


def _at_words(pieces: tuple[int, ...], need: int, wide: bool) -> tuple[int, int, int] | None:
    """(columns, warps, tiles under way) of columns that begin at words, whose `pieces` take as many registers as `need` rows; `wide`: of 32 bits."""
    rows, alike = sum(pieces), len(set(pieces)) == 1
    deep, equal = WORDS[0][0] < rows <= DEEP, alike and len(pieces) > 1
    if (rows > ALIKE_MOST if equal else deep) or WORDS[-1][0] < need <= LONGER:
        return None
    stages = CARRY_STAGES if alike and rows <= DEEP else 1
    if equal and deep:
        return *ALIKE, stages
    fitting = WORDS[1:] if wide and need > WIDE else WORDS
    columns, warps = next(((c, w) for most, c, w in fitting if need <= most), (ANYWHERE, _warps(need * ANYWHERE, LONG // 2 if wide else LONG)))
    return columns, warps, stages


def _anywhere(pieces: tuple[int, ...], need: int, wide: bool, words: bool) -> tuple[int, int, int]:
    """The same of columns that begin anywhere; `words`: those of 16 bits at words of 4 bytes."""
    if need <= SHORTEST:
        return 64, 1, 1
    if need <= 2 * SHORTEST:
        return 32, _warps(need * 32, SHORT_EACH), 1
    if words and LONG_WORDS[0] <= need <= LONG_WORDS[1]:
        return 2 * ANYWHERE, MOST, 1
    return ANYWHERE, _warps(need * ANYWHERE, EACH // 2 if wide else EACH, 2 * MOST if sum(pieces) > TALL else MOST), 1


def _warps(elements: int, each: int, most: int = MOST) -> int:
    """Warps of a tile with about `each` elements to a thread."""
    return min(most, 1 << max(0, round(math.log2(elements / (32 * each)))))
