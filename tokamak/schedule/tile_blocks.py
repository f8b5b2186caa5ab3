"""How the parallel axes of a tile are covered, beside its rows. Every threshold is a named constant with what it was measured on."""
from __future__ import annotations

import math

from ..fuse import sharing
from ..fuse.gpu import FILL
from ..fuse.lines import SECTOR as SECTOR_BYTES
from ..fuse.sharing import HELD
from ..ir.expr import Coord, Load, Op, Random, Reduce, Scan, walk
from ..ir.index import Axis, as_index
from ..ir.ops import OPS
from . import tile_statistics
from .body import exprs_of
from .schedule import strides_of
from .tile_access import narrowest
from .tile_elements import FOLDED, SCANNED_COLUMNS, SHORT_COLUMNS, SHORT_FEW, SHORT_FROM
from .tile_facts import SECTOR, SHORT_LANES, TILE
from .tile_rows import LARGEST, RAGGED_DOWN, SCANNED_FEW, SCANNED_SHORT, TURNED, TileRows
from .tile_schedule import WASTE, blocks, cover
from .tile_stages import few_idle, power
from .tile_statistics import COLUMNS, WORD
from .tile_threads import RESIDENT

SMALLEST = 256          # of a pointwise tile where there are few: 65536 elements in 1.6 us, 1.9 with POINTWISE; and of rows that are only folded:
                        # 1024 of 8 1.5 us, 2.6 by two programs
RAGGED = 1024           # of a tile with rows that begin anywhere and are too short for whole words: f32 softmax over 65 columns 77%, f16 LayerNorm
                        # 57; 61 and 54 with twice as many, 36 and 31 with TILE
RAGGED_FOLDED = 2048    # the same where rows are only folded: f32 sums along 65 and 17 columns 95 and 91%, 66 and 82 with TILE
FOLDED_WIDE = 512       # the same of 32-bit elements, ROWS rows at least: f32 sums of 262144 rows of 31 12.7 us, of 65536 of 63 7.3, of 131072 of 127
                        # 19.1; 15.4, 10.4 and 21.5 with RAGGED_FOLDED by two warps
FOLDED_FROM = 24        # elements of such a row at least; twice as many in all of one piece of
FOLDED_PIECE = 64       # so many lanes: L1 norms of 524287 of 63 37.7, 44.5, of 300000 24.5, 28.1
STORED_WIDE = 512       # of rows of 32-bit elements that are written, too, as many as there are powers of two: f32 softmax of 131072 rows of 255 and
                        # 127 69.5 and 34.4 us, 110 and 40.4 with RAGGED_STORED; of 16384 of 129 6.5, 7.4; of 65536 of 257 35.9, 35.0
RAGGED_STORED = 2048    # the same of longer rows that are written, too: see RAGGED_EACH. Half as many where several values are read along them or
                        # exponentials are made: f16 softmax backward of 42451 rows of 255 31.8 us, bf16 softmax of 65536 of 255 31.7; 39.1 and
                        # 35.2. And where that many leave a multiprocessor fewer than RESIDENT warps: a Python LayerNorm of 18224 of 255 13.1,
                        # 14.2, weight norm of 24938 of 255 15.1, 16.2 (H100)
WIDTH = 32              # lanes of a warp, as many of which a program has rows that are one element longer: of a piece of fewer single elements each
                        # is made by several lanes. Log-softmax of 2405381 rows of 33 bf16 118 us, 405 by 16, softmax of 1747888 f16 80.4, 129; but
                        # prefixes of 131310 of 33 f16 13.6, 10.3
PIECES = 512            # of a tile of rows of 16 bits that are one piece of a warp's width and written, too: bf16 LayerNorm of 32768 and 131072 rows
                        # of 31 4.0 and 10.9 us, f16 softmax of 32768 of 31 4.0, by four warps; 4.9, 11.8 and 5.1 with RAGGED by one
CARRIED_ROWS = 4        # short rows of 16 bits that begin anywhere of a program of one warp that carries sums: of columns, of one piece, LayerNorm
                        # backward of 524289 of 61 f16 120 us, 158, with dropout of 114215 of 57 42, 57.5; of all rows, of 96 lanes and more, cross
                        # entropy of 378619 of 93 bf16 108, 166; but of 500000 of 65 98, 90
CARRIED_FEW = 4         # rows of such a tile (`tile_threads.carries_middling`), half as many that begin anywhere
WIDE_ROW = 512          # of tiles of aligned rows of 32 bits that are written, up to SHORT_FEW elements: f32 softmax of 4096 rows of 512 5.5 us, of
                        # 8192 of 256 5.6, LayerNorm of 4096 of 128 2.8; 6.3, 6.2 and 3.2 with RAGGED. Of 8192 of 512 RMSNorm 10.0, 9.4
ROWS = 8                # of such tiles at least: f32 sums along 257 columns 85%, 40 with one
TURNED_TILE = 4096      # elements of a pointwise tile that is read along one axis and written along another, TURNED of each where pieces of the one
                        # lie side by side: the last kernel of GroupNorm backward from NHWC of 4 x 512 x 128 x 128 bf16 51 us, 54 with POINTWISE,
                        # forward 33.7, 36, of f32 of 16 x 256 x 96 x 90 67, 78
SPREAD = 4096           # of one for which nothing is read element by element: a masked mean's gradient of 33 x 1025 x 432 f16 13.2 us, 19.5 with
                        # POINTWISE, of 18 x 4096 x 120 bf16 7.9, 9.5, of 33 x 1025 x 432 f32 17.9, 20.1, of 64 x 511 x 96 7.1, 7.4 (H200)
TURNED_SHORT = 16       # elements of the one axis, fewer than which
SHORT_ACROSS = 4        # so many are in a tile,
SHORT_ALONG = 256       # and so many along the other axis, of one plane: the last kernel of InstanceNorm3D backward in NDHWC of
                        # 5 x 8 x 64 x 64 x 64 bf16 21.8 us, of 5 x 8 x 60 x 64 x 60 f32 33.9, of 6 x 10 x 56 x 60 x 60 bf16 26.0 in half of that;
                        # 26.0, 36.3 and 38.9 in 8 x 64 of eight or four planes; but of 4 x 16 x 56 x 56 x 56 f16 24.5, 23.6 (H200)
TURNED_ANYWHERE = 512   # elements of a tile of sums of rows that begin anywhere, of which another value lies along another axis: InstanceNorm3D
                        # backward in NDHWC of 3 x 24 x 33 x 33 x 33 bf16 14.8 us, of 6 x 16 x 33 x 33 x 33 15.8; 21.7 and 19.9 in four times as
                        # many (H200)
TURNED_ONE = 4          # times as many of one sum of 16 bits: means along rows of a product with what lies across of 249 x 13 x 8191 bf16 52.6 us, of
                        # 40 x 12 x 20011 27; 94.5 and 46.9 (H200)
POINTWISE = 1024        # elements of a pointwise tile: 8 to a thread, one 16-byte access of a 16-bit type
COLUMN_VALUES = 3       # values of the columns alone, read beside what is made of all, from which on a tile has twice as many elements: the last
                        # kernel of BatchNorm in NHWC of 32 x 96 x 57 x 57 bf16 9.1 us, 10.2, of 64 x 256 x 56 x 56 47.0, 48.0
TOGETHER = 32           # columns of a tile whose columns, and whose rows across programs, are summed where they begin anywhere: see TOGETHER_THREAD
TOGETHER_MOST = 8192    # elements of such a tile at most: RMSNorm backward along the middle of 16 x 512 x 2049 bf16 76 us, 134 with TOGETHER
SCANNED_WIDE = 1024     # columns that begin anywhere to a multiprocessor from which on a tile has SCANNED_COLUMNS: along the middle of
                        # 39 x 86 x 4095 f16 30.3 us, of 64 x 1024 x 1024 bf16 101.6; 35.2 and 105.3 with half as many; but of 6 x 1249 x 10001
                        # bf16 175, 149 (H100). Half as many of 32 bits: of 186 x 192 x 599 76.3, 91.2, of 100 x 300 x 999 101, 120 (H100)
SCANNED_TWICE = 1408    # and twice as many columns of 16 bits: of 200 x 200 x 1001 bf16 72.8, 78.6 (H100)
RAGGED_SPLIT = 512      # elements of a tile of 32-bit columns that begin anywhere and are summed across programs, by four warps: sums of squares of
                        # 3264 x 4325 25.6 us, 37.0 with TILE (H100)
SUMMED_ANYWHERE = 2048  # elements of a tile of rows that begin anywhere, which programs share, sum, and write or read again beside: see
SUMMED_ANYWHERE_SHARES = 4      # SUMMED_ANYWHERE_THREAD; and so many times as many programs as run at once: of 138 x 154970 104 us by 28, 121 by 7
SEVERAL_HELD = 4096     # elements of 32 bits at most of a tile of which three sums and more are carried across programs, 8 columns at least: EvoNorm
                        # backward in NHWC of 253 x 32 x 20 x 20 f32 69.9 us in 32 columns, which spill 528 bytes a thread (H100), and see
                        # `tile_alike.SEVERAL_ROWS`
EDGE_IDLE = 4           # lane in so many idle: the sum of images of 84 x 96 x 16 x 16 f32 in NCHW and in NHWC 12.3 us, 15.8 in 64 channels; of
                        # several values of 32 bits in any case: of 493 x 480 x 16 x 16 182.5, 203 in 32 x 64 (H200)
WITHIN_IDLE = 8, 3      # lane in so many idle at most of tiles of twice TURNED, the second where they would have half of it: the sum of images in
                        # both formats of 453 x 768 x 14 x 14 f16 106 us in 128 pixels, 154 in 32, 138 in 64, scores' gradient of
                        # 206 x 32 x 8191 bf16 63.4, 95.2 in 64; but of 19 x 513 x 2403 41.3 in 128 of the 513, 35.5 (H200)
ACROSS_SHORTEST = 4     # elements at least of the other axis along which a value lies of which sums of contiguous rows are made, no more than one
ACROSS_IDLE = 4         # lane in so many idle, and nothing else in a tile: InstanceNorm3D backward in NDHWC of 5 x 8 x 64 x 64 x 64 bf16 34.5 us, of
                        # 6 x 10 x 56 x 60 x 60 53.7, of 20 x 12 x 24 x 24 x 24 f16 18.7; 55.6, 85.8 and 22.4 with several images (H200)
FILLED = 0.75           # of the programs that run at once: where programs share folds, so many in one wave rather than a few more in two
DOWN_COLUMNS = 512      # of a tile of 32 bits of programs that walk down blocks of long columns, and carry one sum,
DOWN_ROWS = 4           # and so many rows: GELU's backward with its bias of 400 x 9000 f32 20.9 us, of 150 x 30000 23.5, of 199 x 14288 18.4; 26.1,
                        # 28.3 and 21.0 a row of 4096 at a time (H200)
SHORTEST_COLUMNS = 1024 # elements at least of such a tile of several matrices (`tile_elements.SHORT_COLUMNS`): RMSNorm along the middle of
                        # 5000 x 4 x 300 bf16 11.3 us in 256 columns, 16.0 in 128 (H200)
LARGE_HELD = 8192       # elements of a tile of columns that are held and written from which on it has half as many columns, where there are fewer
                        # than MANY to a multiprocessor: RMSNorm backward along the middle of 50 x 200 x 333 f16 16.3 us, 23.1 (H100); or
LARGE_ROWS = 160        # where they begin anywhere, of more rows than so many, or where fewer lanes are idle then: RMSNorm of 671 x 255 x 129 bf16
                        # 47.8, 64.8, of 100 x 255 x 500 21.6, 31.3, of 400 x 201 x 211 f16 30.6, 35.2, of 200 x 255 x 257 f32 40.8, 45.5, of
                        # 1941 x 129 x 129 bf16 55.9, 67.1; but of 1690 x 144 x 179 76.9, 66.2 (H200)
LITTLE_MATRIX = 256     # lanes of a tile of a whole matrix of short columns up to which it has those of several, four times as many: a masked mean's
                        # gradient of 73531 x 7 x 17 f16 19.7 us, 48.2 alone (H200)
HELD_IDLE = 2           # idle lanes of such a tile, one in so many of SECTOR columns, from which on it has half as many: RMSNorm along the middle of
                        # 3162 x 634 x 17 bf16 79.5 us, 104; and of one of COLUMNS, of 16 bits: masked softmax's gradient of 1000 x 90 x 70 f16 20.8
                        # us, 26.9, of 674 x 79 x 65 bf16 14.8, 16.6 (H200)
JUST_OVER = 4           # rows of a pointwise tile longer than a power of two by one part in so many at most are two pieces,
SHORTEST_PIECE = 32     # of so many elements at least: cross entropy backward of 322375 x 129 and 60000 x 257 f32 86.2 and 32.7 us, of 100000 x 129
                        # bf16 19.0; 126, 40.8 and 26.8 in one of twice the length
PARTS = 4               # equal powers of two at most that rows of a pointwise tile are cut into, rather than held in pieces of several lengths: last
                        # kernel of BatchNorm backward in NHWC of 7 x 768 x 112 x 112 f16 139 us, 161 as 512 + 256, of 16 x 768 x 15 x 15 9.9, 12.3
LEAST_BLOCK = 256       # elements of a block along the contiguous axis that is worth several pieces
MANY = 4                # programs for each share from which on none may be too many: it would begin when all others have ended
BESIDE_MOST = 512, 1024         # elements of 16-bit rows that begin anywhere of which a program has several, a warp two: where they are written, and
BESIDE_ROWS = 4, 2              # where they are only folded. f16 softmax of 65536 rows of 257 20.4 us, 41.1 a row a program, 22.2 element by element;
                                # of 16384 of 513 11.3, 12.1; sums of 65536 of 1025 35.2, 41.7. Softmax of 1025 70.9, 66.1, f32 of 513 74, 66


class TileBlocks(TileRows):
    """Of a tile whose rows are covered."""

    def cover_parallel(self) -> None:
        """Parallel axes that fill up the tile: the contiguous one first, then one that an access runs along, then the innermost."""
        if self.down:
            self.shift = self.begins_alike(self.shift_along(self.line))
            self.pieces[self.line] = (self._block_down(),)
            if self.shift is not None:
                self.pieces[self.line] += (2 * self.shift.group,)
            elif self.narrowest() >= 4 and len(self.crossed) == 1 and self.walks_plainly():
                self.pieces[self.line] = (min(DOWN_COLUMNS, *self.pieces[self.line]),)
                self.tile(*self.crossed, DOWN_ROWS)
        if self._side_by_side():
            row, = self.shift.origin.axes()
            self.tile(row, BESIDE_ROWS[not self.stored_along()])
        if self.shift is not None or self.down:
            return
        hints = self.hints
        have = math.prod(sum(s) for s in self.pieces.values())
        turned = self.turned()
        want, least = self._wanted(have, turned)
        parallel = [a for a in self.order if a in self.b.parallel]
        if self.line in parallel:
            most = self._most_along(have, want, turned)
            have *= self._line_in_blocks(most) or self.tile(self.line, most)
            have *= self._line_continued(most)
        room = HELD // (2 * have) if self.rows else TURNED
        if turned is not None and turned not in self.pieces and room >= min(SECTOR, hints(turned.extent)):
            have *= self.tile(turned, self._across(turned, min(TURNED, room)))
            halved = any(sum(self.pieces.get(a, (1,))) < min(TURNED, hints(a.extent)) for a in (self.line, turned))
            if halved and not self.rows and not self.crossed and have >= (TURNED // 2) ** 2 and not self._turned_short(turned):
                want = min(want, have)
        aligned = self._whole_sectors()
        have, want = have * aligned, want * aligned
        short = self.short_columns()
        little = short and have <= LITTLE_MATRIX and hints(self.line.extent) <= sum(self.pieces[self.line])
        alone = short and not little or self.down_narrow() or self.sums_turned() or self._turned_short(turned)
        want = 4 * LITTLE_MATRIX if little else want
        free = [] if alone else parallel
        candidates = sorted((a for a in free if a not in self.pieces), key=lambda a: (a in self.crossed, self.order.index(a)), reverse=True)
        # a third axis of a large tile is spilled: backward sums of InstanceNorm3D in NDHWC 49 us, 55 with images in it
        few, beside = self.statistics(), sum(a not in self.crossed for a in self.pieces)
        many = self.scans_many() or self.scans_several() or self.scans_ragged()
        for a in candidates:
            most_axes = 1 + beside if few and have * 8 > want else 3
            wanted = min(want, SCANNED_FEW * (2 if self._scans_short() else 1)) if many else want
            room = max(want // 4, min(want, RAGGED), least) if self.rows and self.line in self.rows else wanted
            if have * 2 <= room and len(self.pieces) < most_axes and hints(a.extent) > 1:
                have *= self.tile(a, wanted // have)
        if self._only_folds_line():
            self.shift = self.shift_along(self.line)
            self.pieces[self.line] += (2 * self.shift.group,) if self.shift is not None else ()

    def _whole_sectors(self) -> int:
        """Tiles the axis whose steps are whole runs of the contiguous one, as many as make up whole sectors, where programs that carry a sum across
        store what they read; how many. Heads beside each other, whose bias is summed, of 24 x 1025 x 40 x 40 f16, 80 bytes each, 134 us in tiles of
        two of them, 242 of one; but beside three sums, EvoNorm's backward in NHWC of 6 x 1280 x 16 x 16 bf16, 12.4, 8.6 (H200)."""
        if len(self.crossing) != 1 or self.rows or self.line in self.crossed:
            return 1
        n = self.hints(self.line.extent)
        if sum(self.pieces.get(self.line, (1,))) < n:
            return 1
        for address, size in {(s.address, s.memory.dtype.bytes) for s in self.b.stores if s.address.coefficient(self.line) == 1}:
            run = n * size
            beside = [a for a in self.order if a in self.b.parallel - self.crossed and address.coefficient(a) is as_index(self.line.extent)]
            count = next((n for n in (2, 4) if run * n % SECTOR_BYTES == 0), 1) if run % SECTOR_BYTES else 1
            if beside and count > 1 and beside[0] not in self.pieces:
                return self.tile(beside[0], count)
        return 1

    def _wanted(self, have: int, turned: Axis | None) -> tuple[int, int]:
        """(elements that a tile should have, of which rows have `have`; at least)."""
        hints = self.hints
        pointwise = not self.rows and not self.crossed
        least, most = 0, 2 * POINTWISE if self.columns_read() >= COLUMN_VALUES else POINTWISE
        most = max(most, TURNED_TILE) if pointwise and turned is not None else most
        most = max(most, SPREAD) if pointwise and self.spreads() else most
        want = min(most, max(SMALLEST, power(hints.count(self.b.parallel) // (FILL * self.target.threads)))) if pointwise else TILE
        if self.line in self.rows and not self.looped and not self.crossed:
            if not self.stored_along():
                spread = self.spread()
                least = 2 * have if self.begin_anywhere() else 0
                wide = FOLDED_WIDE * (2 if have == FOLDED_PIECE else 1)
                folded = wide if self.narrowest() >= 4 and have >= FOLDED_FROM else RAGGED_FOLDED
                want = max(least, min(max(folded, ROWS * have), max(RAGGED, spread))) if least else \
                    max(RAGGED_FOLDED, spread) if self.few_folded() else max(TILE, FOLDED // self.narrowest())
            elif self.begin_anywhere():
                want = self._stored_anywhere(have)
            elif self.stored_narrow():
                want = RAGGED
            elif have >= SHORT_FROM:
                want = WIDE_ROW if self.narrowest() >= 4 and hints.count(self.b.axes) <= SHORT_FEW else RAGGED
        elif self.line in self.rows and not self.looped and self.begin_anywhere():
            want = max(RAGGED, min(ROWS * have, TILE))          # eight rows of 1960 elements spill 7 KB a thread
            if self.carries_one_piece() or not self.carries and self.narrowest() == 2 and 3 * SHORT_LANES // 4 <= have <= SHORT_LANES:
                want = CARRIED_ROWS * have
        if self.carries_middling():
            want = (CARRIED_FEW // 2 if self.begin_anywhere() else CARRIED_FEW) * power(have)
        if self.looped and not self.crossed and self.few_down():
            want = min(want, RAGGED_DOWN)
        if self.writes_several():
            want = have
        if self.rows and not self.crossed and not (self.line in self.rows and self.stored_along()):
            want = min(want, max(SMALLEST, power(hints.count(self.b.axes) // self.target.threads)))
        if self.sums_turned() and self.begin_anywhere():
            want = TURNED_ANYWHERE * (TURNED_ONE if len(self.crossing) == 1 else 1)
        elif self.sums_turned() or self.moments_wide() or self.moments_anywhere() \
                or self.passes_on() and hints(self.line.extent) >= COLUMNS:
            want = TILE // 2
        elif self.streams():
            want = self.passing_bytes() // self.narrowest()
        elif self.sums_ragged():
            want = RAGGED_SPLIT
        elif self.sums_anywhere():
            want = SUMMED_ANYWHERE // (2 * self.fewer_anywhere() if self.crossed == {self.line} else 1 if self.narrowest() < 4 else 4)
        return want, least

    def _most_along(self, have: int, want: int, turned: Axis | None) -> int:
        """Elements of a tile of `want` along the contiguous axis at most, which is parallel; rows have `have`."""
        together = self.takes_columns() and self.begin_anywhere()
        most = min(TOGETHER if together else self.columns(), max(SECTOR, (TOGETHER_MOST if together else HELD // 2) // have)) \
            if self.rows else self._most_turned(turned, want) if turned is not None else want // have
        share = self.hints.count(self.b.parallel) // self.target.threads
        half = self.narrowest() < 4
        if self.looped and self.scans_many() and (share >= SCANNED_WIDE // (1 if half else 2) or not self.begin_anywhere()):
            most = SCANNED_COLUMNS * (2 if half and self.begin_anywhere() and share >= SCANNED_TWICE else 1)
        most = 2 * SCANNED_COLUMNS if self._scans_short() or self.scans_few() else COLUMNS // 2 if self.down_narrow() else most
        most = max(SHORT_COLUMNS, SHORTEST_COLUMNS // have) if self.short_columns() and self.many_columns() and not self.fills_wide() else most
        most = 2 * COLUMNS if self.short_columns() and COLUMNS < self.hints(self.line.extent) <= 2 * COLUMNS and self.narrowest() < 4 else most
        most = max(SECTOR, most // 2) if self._few_held(have, most) else most
        most = power(most + 1) // 4 if self._idle_held(have, most) else most
        if self.crossed and self.line not in self.crossed:
            whole = self.passes_on() and COLUMNS < self.hints(self.line.extent) < 2 * COLUMNS
            most = 2 * COLUMNS if whole else tile_statistics.columns(self, COLUMNS)
            most = min(most, max(SECTOR // 2, SEVERAL_HELD // have)) if self.several_wide() else most
        return min(most, max(1, LARGEST // have))

    def _most_turned(self, turned: Axis, want: int) -> int:
        """The same of a tile that lies along `turned`, too."""
        across = min(TURNED, power(self.hints(turned.extent)))
        if self._turned_short(turned):
            return SHORT_ALONG
        return max(SECTOR, want // across) if self.sums_turned() and self.begin_anywhere() else self._edge(self.line)

    def _edge(self, a: Axis) -> int:
        """Elements along `a` of a turned tile: half of TURNED where that leaves fewer lanes idle, and many would be (`EDGE_IDLE`), and where several
        values of 32 bits are read; twice TURNED where lines of 16 bits begin within sectors, and where short ones do that are written."""
        if self.writes_within(a):
            return 2 * TURNED
        n = self.hints(a.extent)
        idle = -n % TURNED * EDGE_IDLE > n and -n % (TURNED // 2) < -n % TURNED
        edge = TURNED // 2 if idle or self.turned_wide() else TURNED
        return 2 * TURNED if narrowest(self.b, a) < 4 and self.within_sectors(a) and -n % (2 * TURNED) * WITHIN_IDLE[idle] <= n else edge

    def _across(self, turned: Axis, most: int) -> int:
        """Elements of a tile, of at most `most`, along the axis that it is turned to; few idle lanes of one of sums."""
        if not self.rows and not self.crossed:
            edge = self._edge(turned)
            most = edge if sum(self.pieces.get(self.line, (1,))) <= TURNED else min(most, edge)
        n, size = self.hints(turned.extent), min(most, power(self.hints(turned.extent)))
        if self.sums_turned() and not self.begin_anywhere():
            size = few_idle(n, size, ACROSS_IDLE, ACROSS_SHORTEST)
        return SHORT_ACROSS if self._turned_short(turned) else size

    def _turned_short(self, turned: Axis | None) -> bool:
        """Is a pointwise tile read along one axis and written along a short one, whole lines of which lie one behind the other?"""
        if turned is None or self.rows or self.crossed or self.hints(turned.extent) >= TURNED_SHORT or self.hints(self.line.extent) < SHORT_ALONG:
            return False
        return any(address.coefficient(turned) == 1 and address.coefficient(self.line) == turned.extent for _, address, _ in strides_of(self.b))

    def _scans_short(self) -> bool:
        """Are prefixes of few rows made down many columns?"""
        return self.scans_many() and not self.looped and self.hints.count(self.rows) <= SCANNED_SHORT

    def _few_held(self, rows: int, columns: int) -> bool:
        """Are so many rows of so many columns held and written, large tiles of which there are few, or which begin anywhere and are long or would
        idle?"""
        large = bool(self.rows) and not self.looped and not self.crossed and self.stored_along() and rows * columns > LARGE_HELD
        if large and self.begin_anywhere() and columns == COLUMNS:
            across = self.hints(self.line.extent)
            return rows > LARGE_ROWS or -across % (columns // 2) < -across % columns
        others = math.prod(self.hints(a.extent) for a in self.b.parallel if a is not self.line)
        return large and -(-self.hints(self.line.extent) // columns) * others < MANY * self.target.threads

    def _idle_held(self, rows: int, columns: int) -> bool:
        """Are columns held and written, few beside each other, of which many lanes of a tile of so many would be idle? Of SECTOR, long ones."""
        n, size = self.hints(self.line.extent), power(columns + 1) // 2
        large = self.narrowest() < 4 and rows * size > TILE if size == COLUMNS else size == SECTOR and rows * size > LARGE_HELD
        held = large and bool(self.rows) and not self.looped and not self.crossed and self.stored_along()
        return held and -n % size * HELD_IDLE > n and -n % (size // 2) < -n % size

    def _stored_anywhere(self, row: int) -> int:
        """Elements of a tile of rows that begin anywhere, of `row` lanes each, and are written."""
        wide = self.narrowest() >= 4
        if self.one_piece():
            return PIECES * (4 if self.many_short() else 1)
        if self.short_piece() and (wide or row > WIDTH):
            return self.warp_rows(row) * row
        if wide:
            return max(1, STORED_WIDE // (power(row + 1) // 2)) * row
        if self.pieces[self.line] == (WIDTH, 1) and row == WIDTH + 1 and not self.scans():
            return WIDTH * row
        several = len(self.rows_read()) > 1 or any(isinstance(e, Op) and OPS[e.name].heavy for e in walk(*exprs_of(self.b)) if self.line in e.free)
        few = self.hints.count(self.b.parallel) * row < RESIDENT * self.target.threads * RAGGED_STORED
        most = RAGGED_STORED // 2 if several or few else RAGGED_STORED
        return max(RAGGED, min(ROWS * row, most))

    def _block_down(self) -> int:
        """Elements of a block of long columns that programs sum where they write them. Rows that begin anywhere take programs in whole groups:
        smaller blocks where few groups of large ones would leave multiprocessors idle. As they lie half as many, several rows under way: modulation's
        gradient of 769 x 12 x 8191 f32 324 us, 267, of 1941 x 5 x 5569 f16 108.5, 93 (H200)."""
        anywhere = self.shift is None and self.begin_anywhere()
        most = min(TILE // 2 if anywhere else TILE, power(self.hints(self.line.extent) // sharing.WORDS * sharing.WORDS))
        for size in (most, most // 2, most // 4) if self.shift is not None else ():
            want, blocks_ = self.target.threads * max(1, TILE // size), -(-self.hints(self.shift.words) // size)
            share = want // blocks_ // self.shift.group * self.shift.group or self.shift.group
            if blocks_ * min(share, self.hints.count(self.crossed)) >= FILLED * want:
                return size
        return most

    def _side_by_side(self) -> bool:
        """Are rows that begin anywhere short and many, and is all that is read and written along them theirs, so that a program may hold several?"""
        if self.shift is None or self.rows != [self.line] or self.looped or self.crossed or self.shared_rows() \
                or len(self.shift.origin.axes()) != 1 or any(s.monoid is not None or s.guard is not None for s in self.b.stores):
            return False
        row, = self.shift.origin.axes()
        found = [e for e in walk(*exprs_of(self.b)) if self.line in e.free or isinstance(e, Reduce) and self.line in e.over]
        own = all(row in e.free and not (isinstance(e, Load) and e.guard is not None) for e in found if isinstance(e, (Load, Reduce)))
        plain = not any(isinstance(e, (Coord, Random, Scan)) for e in found)
        return own and plain and all(row in s.axes for s in self.b.stores) and self.narrowest() == 2 \
            and sum(self.pieces[self.line][:-1]) <= BESIDE_MOST[not self.stored_along()] \
            and self.hints(row.extent) >= 2 * RESIDENT * self.target.threads

    def _only_folds_line(self) -> bool:
        """Are tiles one piece of rows that programs share and do nothing but fold, each element for itself?"""
        return self.folds_each() and self.pieces.keys() == self.crossed and len(self.pieces[self.line]) == 1

    def _line_in_blocks(self, most: int) -> int:
        """Covers the contiguous axis, where programs fold across it, by blocks of about `most` elements in several pieces: lanes that are never idle
        count without weights. So where programs of a single piece would leave many lanes idle. 0 where one piece does as well."""
        n, size = self.line.extent.constant, min(power(self.hints(self.line.extent)), power(most + 1) // 2)
        if n is not None and not self.rows and not self.crossed and self._just_over(n, most):
            self.pieces[self.line] = found = cover(n)
            return sum(found)
        if n is None or size < LEAST_BLOCK or n % size == 0 or self.scans():
            return 0
        idle = -n % size * WASTE > n and not self.rows and not self.crossed and n * self.narrowest() % WORD == 0
        if self.line not in self.crossed and not idle:
            return 0
        if idle and LEAST_BLOCK <= (part := math.gcd(n, size)) and n <= PARTS * part:
            self.pieces[self.line] = (part,)
            return part
        self.pieces[self.line] = found = blocks(n, size * (2 if not idle else 4 if self.narrowest() < 4 else 1))
        if not found:
            del self.pieces[self.line]
        return sum(found)

    def _just_over(self, n: int, most: int) -> bool:
        """Is a row of a pointwise tile, of which there are several, a little longer than a power of two?"""
        half = power(n) // 2
        return len(self.b.parallel) > 1 and SHORTEST_PIECE <= half <= most and half < n and (n - half) * JUST_OVER <= half

    def _line_continued(self, most: int) -> int:
        """Tiles the axis whose steps are whole pieces of the contiguous one, where tiles of statistics hold all of those and have room for more
        columns."""
        have, n = math.prod(self.pieces.get(self.line, (1,))), self.line.extent
        if not self.statistics() or self.hints.exactly(n) != have or 2 * have > most:
            return 1
        beside = [a for a in self.order
                  if a in self.b.parallel - self.crossed and any(address.coefficient(a) is n for _, address, _ in strides_of(self.b))]
        return self.tile(beside[0], most // have) if beside else 1
