"""Equal pieces of the held rows of a tile, where pieces of several sizes are slower. Every threshold is a named constant with what it was measured
on."""
from __future__ import annotations

import math

from ..ir.index import Axis
from ..ir.ops import CARRIERS
from .tile_elements import SHORT_COLUMN, SHORT_WIDE
from .tile_facts import TILE
from .tile_schedule import EVEN
from .tile_stages import evenly, power
from .tile_threads import CARRIED_LONG, CARRY_PIECE, EVEN_ANYWHERE, MIDDLING, TileThreads

EVEN_ROWS = 8           # rows of such a piece at least along a middle axis: RMSNorm along the middle of 485 x 80 x 648 bf16 46.1 us, 72.1, of
                        # 300 x 96 x 1000 f16 41.1, 62.0, of 500 x 48 x 1024 bf16 37.2, 50.8
EVEN_HELD = 128         # rows at most of which all are held so beside columns that are summed: RMSNorm backward along the middle, pieces of several
                        # sizes and so, us: bf16 485 x 80 x 648 180, 64, f16 300 x 96 x 1000 158, 59, bf16 500 x 48 x 1024 110, 48, f32
                        # 400 x 80 x 648 140, 69 by eight warps; but f16 4 x 214 x 43085 180, 320 and bf16 16 x 1024 x 4096 144, 690, by fewer warps
LITTLE_PIECE = 4        # rows whose column sums are carried, and whose last piece is so small a part of their first one: as one piece with idle lanes
WHOLE_WORD = 8          # where they begin at words of 8 bytes. LayerNorm backward of 300000 rows of 100 bf16 65.4 us, 114.9, of 60000 of 320 64.5,
                        # 78.1, f32 of 300000 of 72 78.3, 89.4, of 65536 of 160 45.5, 55.4; but bf16 of 65536 of 192 37.9, 34.8, f32 of 51 401, 340
CARRY_SHORT = 224       # columns at most of rows whose column sums are carried, and elements of all of them at least, where pieces are alike, of
CARRY_FROM = 1 << 20    # CARRY_PIECE columns, of so many rows by four warps with as many registers as they take: LayerNorm backward, H100, of 500000
CARRY_ROWS = 8          # rows of 50 bf16 76 us, of 300001 of 77 73, of 200000 of 112 58, of 100000 of 200 55, f32 of 131072 of 150 90; 101, 134, 63,
                        # 60 and 134 in pieces of several sizes, or one with idle lanes, and no more registers than let as many run as can; some spill
CARRY_TWICE = 3 << 15   # such rows from which on it is twice as many of two pieces of 16 bits, or of 32 bits that begin at words or have one sum: of
                        # 262145 of 33 bf16 47 us, 62, of 100000 of 52 16.8, 18.3, of 626320 of 56 f32 111, 117, RMSNorm backward of 479324 of 41
                        # f32 79, 97, of 131073 of 40 bf16 16.6, 19.3, with an addition of 1573015 of 48 f16 130, 176, a Python LayerNorm's of 125177
                        # of 40 bf16 19.2, 22.9; but of 92005 of 42 f16 17.2, 16.3, of 502291 of 43 f32 119, 108, a gated RMSNorm's of 262144 of 40
                        # f16 47.0, 44.6 (H200)
SEVERAL_ROWS = 512      # elements down a column held beside three sums and more at most, in equal pieces, SEVERAL_PIECES at most: of
SEVERAL_PIECES = 16     # 253 x 32 x 20 x 20 f32 40.4 us, 59.5, of 254 x 480 x 7 x 7 bf16 58.8, 92.4. Of so many lanes at least where the other axis
SEVERAL_LEAST = 512     # is in pieces of several lengths, of 25 x 640 x 15 x 15 f32 270 us as 16 + 4 in fifteen of 16 rows, 40.7 in two of 128 (H200)
LONG_PIECE = 2048       # elements at least of each equal piece of a long row of 16 bits: LayerNorm backward of 3000 x 9216 bf16 72.7 us, 88.3 as
                        # 8192 + 1024, with dropout of 6910 x 9440 f16 350, 431 (H200)
WIDE_FROM = 4096        # elements of a held row of 32 bits that begins at words from which on it is no three pieces but equal ones, of so many
WIDE_PIECE = 1024       # at least: a Python LayerNorm of 1500 x 7000 f32 26.3 us, of 3000 x 6800 43.0; 30.1 and 52.0 as 4096 + 2048 + 1024 (H200)
LINES_WHOLE = 64        # elements of the contiguous one of two axes of rows beside which three sums and more are carried, from which on it is one
LINES_IDLE = 0.3        # piece where so few lanes of each element are idle; equal pieces elsewhere, but no longer ones than LINES_EXACT of 16 bits
LINES_EXACT = 128       # that fit exactly. H200, EvoNorm backward in NCHW of 4000 x 320 x 7 x 7 f16 225 us, of 2000 x 256 x 7 x 7 bf16 86, of
                        # 500 x 480 x 15 x 15 244, of 1000 x 64 x 14 x 14 f32 59, of 3000 x 96 x 8 x 8, of three channels each, 106; 579, 210, 309,
                        # 91 and 326 in pieces of several lengths, which spill; dropout and LayerNorm backward of 200000 x 100 bf16 83, 127, of
                        # 400000 x 38 f32 82, 148; but EvoNorm of 1000 x 128 x 14 x 14 bf16 71, 65. Beside fewer sums of three lengths, too: global
                        # response norm backward in NCHW of 21749 x 64 x 7 x 7 f32 303, 1343
LINES_HELD = 2048       # elements of 32 bits of a tile of which several such rows lie beside each other: of 4248 x 192 x 7 x 7 343, 1007
SEVERAL_SHORT = 128     # elements of 32 bits of a tile of short rows beside such sums: EvoNorm backward in NCHW of 7153 x 32 x 7 x 7 84.9 us, 187 in
                        # tiles of 784 by two warps


class TileAlike(TileThreads):
    """Of a tile whose axes are covered."""

    def takes_columns(self) -> bool:
        """Are the columns of a tile folded where programs share them?"""
        return self.carries and not self.looped and self.line in self.crossed and not any(e.monoid in CARRIERS for e in self.crossing)

    def lay_alike(self) -> None:
        """Held rows of which a tile has several, in equal pieces: of pieces of different lengths each has its own layout of threads, and what is one
        number a row is laid out anew for each."""
        if self.looped or self.shift is not None or self.target.ordered:
            return
        if len(self.pieces) < 2:
            self._long_alike()
            return
        if len(self.crossing) > 2 and self._beside_sums():
            self._few_beside()
            return
        if len(self.rows) == 2 and len(self.crossing) < 3 and self.line in self.rows and len(self.pieces.get(self.line, ())) > 2:
            length, least = self.hints.exactly(self.line.extent), EVEN_ROWS if self.crossed else EVEN // self.narrowest()
            self.pieces[self.line] = length and evenly(length, least) or self.pieces[self.line]
            return
        if len(self.rows) != 1:
            return
        row, n = self.rows[0], self.hints.exactly(self.rows[0].extent)
        if self.short_wide():
            self.pieces.update({row: (SHORT_COLUMN,), self.line: (SHORT_WIDE,)})
            return
        if self.carries and row is self.line and self.narrowest() >= 4 and len(self.crossing) == 1 \
                and self.pieces[row] == (CARRY_PIECE,) and self.begin_anywhere():
            self.pieces[row] = (CARRY_PIECE // 2,) * 2
            return
        if n is None or len(found := self.pieces[row]) < 2:
            return
        held = row is not self.line and n <= (EVEN_ANYWHERE if self.begin_anywhere() else EVEN_HELD) and self.takes_columns()
        if self._carries_short(row, n):
            count = -(-n // CARRY_PIECE)
            fit = self.narrowest() < 4 or not self.begin_anywhere() or len(self.crossing) < 2
            twice = count == 2 and fit and self.hints.count(self.b.parallel) >= CARRY_TWICE
            rows = CARRY_ROWS * (2 if twice else 1)
            self.pieces = {a: (CARRY_PIECE,) * count if a is row else (self.at_most(a, rows),) for a in self.pieces}
        elif row is self.line and self.scans() and not self.begin_anywhere():
            # prefixes go on from piece to piece: of 60000 x 200 bf16 16.5 us, 26.1 as seven of 32, of 50000 x 300 f32 32.9, 40.8 (H200)
            self.pieces[row] = (power(n),)
        elif held or not self.crossed and not (row is self.line and self.begin_anywhere()):
            if held and self.begin_anywhere():
                self.pieces = {a: self.pieces[a] for a in self.pieces if a in (row, self.line)}
            self.pieces[row] = evenly(n, EVEN // self.narrowest() if row is self.line else EVEN_ROWS) or found
        elif self.carries_middling():
            self.pieces[row] = (power(n),)
        elif self.carries and row is self.line and self.narrowest() >= 4 and MIDDLING[0] <= n <= MIDDLING[1] and self.begin_anywhere():
            self.pieces[row] = evenly(n, 2 * CARRY_PIECE) or found          # LayerNorm backward of 100001 x 287 f32 109 us, 161 (H200)
        elif self.carries and row is self.line and n * self.narrowest() % WHOLE_WORD == 0 and LITTLE_PIECE * found[-1] <= found[0]:
            other, = (a for a in self.pieces if a is not row) if len(self.pieces) == 2 else (None,)
            if other in self.crossed and sum(self.pieces[other]) > 1 and power(n) < TILE:
                self.pieces.update({row: (power(n),), other: (self.at_most(other, TILE // power(n)),)})

    def _long_alike(self) -> None:
        """Lays a long row beside which sums are carried, the last of whose pieces is much shorter than the first, in equal ones."""
        lengths, n = self.pieces.get(self.line, ()), self.hints.exactly(self.line.extent) if self.rows == [self.line] else None
        if self.carries and n and n > CARRIED_LONG and self.narrowest() < 4 and lengths and LITTLE_PIECE * lengths[-1] <= lengths[0]:
            self.pieces[self.line] = evenly(n, LONG_PIECE) or lengths
        elif n and not self.crossed and self.narrowest() >= 4 and len(lengths) > 2 and WIDE_FROM < n < 2 * WIDE_FROM \
                and not self.begin_anywhere() and not self.scans():
            self.pieces[self.line] = evenly(n, WIDE_PIECE) or lengths

    def _beside_sums(self) -> bool:
        """Lays held elements beside which three sums or more are carried in equal pieces down columns, in one with few others along rows; says
        whether it has."""
        down, n = [a for a in self.rows if a is not self.line], [self.hints.exactly(a.extent) for a in self.rows]
        if not n or None in n:
            return False
        lines = self._lines_alike(n)
        if power(n[0]) == n[0]:
            return lines or self.carries_lines()
        if down == self.rows[:1] and n[0] <= SEVERAL_ROWS:
            lengths = self.pieces.get(self.line, (1,))
            size = max(EVEN_ROWS, power(-(-n[0] // SEVERAL_PIECES)), SEVERAL_LEAST // min(lengths) if len(set(lengths)) > 1 else 1)
            size = min(size, power(n[0]))
            self.pieces[down[0]] = (size,) * -(-n[0] // size)
            return True
        if lines:
            return True
        other, = (a for a in self.pieces if a is not self.line) if len(self.pieces) == 2 else (None,)
        if self.rows == [self.line] and self.narrowest() >= 4 and power(n[0]) <= SEVERAL_SHORT // 2 and other in self.crossed:
            self.pieces.update({self.line: (power(n[0]),), other: (self.at_most(other, SEVERAL_SHORT // power(n[0])),)})
            return True
        return False

    def _lines_alike(self, n: list[int]) -> bool:
        """Lays the contiguous one of two axes of rows in equal pieces where it has several, or in one with few idle lanes; says whether it has. `n`:
        elements along each axis."""
        if len(self.rows) != 2 or self.line not in self.rows or len(self.pieces.get(self.line, ())) < 2:
            return False
        length, wide = n[self.rows.index(self.line)], self.narrowest() >= 4
        whole = length > LINES_WHOLE and power(length) - length <= LINES_IDLE * length
        found = (power(length),) if whole else evenly(length, EVEN_ROWS)
        if not found or not wide and sum(self.pieces[self.line]) == length > LINES_EXACT:
            return False
        self.pieces[self.line] = found
        return True

    def _few_beside(self) -> None:
        """Has fewer rows along two axes to a tile, of 32 bits."""
        beside = [a for a in self.pieces if a in self.crossed]
        if self.carries_lines() and len(beside) == 1:
            row = math.prod(sum(p) for a, p in self.pieces.items() if a in self.rows)
            self.pieces[beside[0]] = (max(1, min(self.pieces[beside[0]][0], LINES_HELD // power(row))),)         # a row of 24 is 8 + 8 + 8

    def _carries_short(self, row: Axis, n: int) -> bool:
        """Are sums of columns carried beside many short rows, which are no one piece?"""
        several = len(self.pieces) == 2 and all(a is row or a in self.crossed and sum(self.pieces[a]) > 1 for a in self.pieces)
        return self.carries and row is self.line and several and CARRY_PIECE < n <= CARRY_SHORT and self.hints.count(self.b.axes) >= CARRY_FROM
