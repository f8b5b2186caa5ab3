"""How the rows of a tile are covered: held whole, in pieces, or run through in chunks. Every threshold is a named constant with what it was
measured on."""
from __future__ import annotations

import math

from ..fuse.lines import strides
from ..fuse.sharing import HELD
from ..ir.expr import Scan, walk
from ..ir.index import Axis, Fetch, Index, Size
from .body import exprs_of
from .schedule import strides_of
from .tile_access import begin_anywhere
from .tile_alike import TileAlike
from .tile_elements import FEW_ROWS, SEVERAL_TILE
from .tile_facts import CHUNK, SECTOR, TILE
from .tile_schedule import WASTE, Shift, cover, shifted
from .tile_stages import few_idle, power
from .tile_statistics import COLUMNS

ACROSS_BYTES = 16384    # bytes of a tile along rows that programs run through, and along a short axis that something else lies along: sums of
                        # GroupNorm backward, the gradient in channels-first, of 16 x 256 x 112 x 112 bf16 97 us, of 4 x 512 x 128 x 128 92, f32 of
                        # 16 x 256 x 96 x 90 117; 155, 116 and 132 in tiles of half and twice as many, 797, 380 and 713 along the rows alone
ACROSS_LEAST = 8        # bytes of such an axis at least: of 16 x 128 x 121 x 97 bf16, four channels a group, 69 us, 248 without
RAGGED_DOWN = 2048      # elements of a tile that walks down columns of one of several matrices where rows begin anywhere: bf16 sums along the middle
                        # of 512 x 257 x 511 51.2 us, of 2048 x 65 x 255 33.6, of 33 x 1000 x 8191 208, f16 of 1000 x 100 x 333 31.7; 55.5, 50.6, 246
                        # and 39.2 with TILE. Of 32 bits where that leaves fewer lanes idle: f32 of 512 x 257 x 255 42.0, 42.8; but of
                        # 30 x 3000 x 1025 108, 103, and of 107 x 55 x 8790, all rows at once with ROW_THREAD, 76 us, 91 (H100)
NARROW_FEW = 3          # tiles of such columns to a multiprocessor from which on they are half as wide, or where one lane in
NARROW_IDLE = 4         # so many would be idle: sums along the middle of 20 x 300 x 1001 bf16 11.5 us, of 11 x 129 x 1761 f32 8.8, of 295 x 1721 x 93
                        # f16 43.8; 15.5, 10.2 and 54.5; but of 100 x 1000 x 333 42.6, 33.5, of 15 x 1124 x 1139 f32 30.7, 28.6 (H200)
HEAVY_CHUNK = 1024      # of a chunk of a looped row at least, where the last one of longer chunks would compute a heavy function in many idle lanes:
                        # sums of EvoNorm backward over planes of 9120 f16 50 us in chunks of 2048, 74 of 8192
PLACES_CHUNK = 2048     # the same where the place of the greatest or least element is carried, too: amax and argmax of bf16 rows of 32000 by hand
                        # 90%, 87 with twice as many
CHUNK_BYTES = 16384     # bytes of it where rows are only folded, a few lanes carrying what comes of them: f16 sums of rows of 86021 80%, 71 with half
                        # as many
SUMMED_BYTES = 32768    # the same where elements are summed as they are: see SUMMED_WARPS
ACROSS_ROWS = 8         # rows of a tile that walks down columns which it writes, and along which programs fold, too: see `tile_elements.ACROSS_EACH`
MIDDLE = 128            # rows of columns that are only folded, and held rather than run through: sums along the middle of 2004 x 57 x 83 bf16
                        # 11.5 us, of 813 x 34 x 1023 26.6, f16 of 2623 x 69 x 257 42, bf16 sums of 38 x 262143 26.6; 14.5, 40, 55 and 48 in a loop,
                        # many of whose last lanes idle; also without any: of blocks of 128 x 74 bf16 17.4, 20.2 (H100). Half as many of 32 bits:
                        # of 107 x 75 x 8790 f32 157 us, 118 in a loop
IDLE_TURN = 4           # idle lanes of two turns, one in so many at least, where rows that begin anywhere and are only folded are held: f32 L1 norms
                        # of 2047 rows of 4225 11.5 us, 17.3 in a loop, bf16 of 1177 of 19438 15.5, 17.1; but L2 norms of 2047 of 12954 18.4, 18.0
SCANNED = 64            # rows of columns from which on their prefixes are made in a loop, several tiles under way: 4096 x 16384 of f32 91%, 70 with
                        # one; 64 x 1024 x 1024 of bf16 along the middle about 50, 27 held
SCANNED_FEW = 512       # elements of a tile of few columns; twice as many of SCANNED_SHORT rows, of up to twice `tile_blocks.SCANNED_COLUMNS`:
SCANNED_SHORT = 8       # along the middle of 111924 x 4 x 18 f16 15.2 us, 21.1, of 1978 x 3 x 8193 bf16 74.9, 83.6 (H100)
SCANNED_HELD = 32767    # elements of a row at most whose prefixes are made at once, a quarter where there are many: bf16 ones of 300 rows of 20001
                        # 17.3 us, 19.8 in a loop; but of 1000 of 10001 33.2, 23.8, f16 of 64 of 131071 187, 58, f32 of 216 of 65535 286, 57, of 300
                        # of 32768 33.6, 31.2 (H100)
SCANNED_ROW = 128       # elements of a contiguous row up to which prefixes are made of one piece, where
SCANNED_ROW_IDLE = 3, 4         # one lane in so many is idle at most, the second of 16 bits: of 108162 x 55 f32 16.6 us, of 80001 x 90 17.3, of
                        # 300000 x 55 bf16 27.5, of 150000 x 110 18.7; 19.1, 18.9, 29.7 and 24.2 in several; but of 200000 x 37 f32 23.2, 22.7, of
                        # 200000 x 47 f16 18.2, 17.6 (H200)
SCANNED_ROWS = 16       # rows of a tile of theirs where one warp makes them: see `tile_facts.SCANNING`
TURNED = 64             # edge of a tile that is read along one axis and written along another; less where a program holds rows, too
LARGEST = 4 * HELD      # elements of any tile: with so many Triton takes 2 s, with four times as many 100
LONE = 8192             # elements of a tile that walks down columns so few that no multiprocessor has a second program: see LONE_THREAD
ALONE_WIDE = 512        # elements of rows of 32 bits up to which no program takes several for the sake of weights: f32 LayerNorm and RMSNorm of 65536
                        # rows of 511 67.9 and 65.6 us, 74.2 and 69.7
WRITTEN_CHUNK = 2048    # bytes of a chunk of lines that begin anywhere, of several axes, which are written: second kernel of RMSNorm's gradient along
                        # the middle of 41 x 1005 x 511 f32 75 us, 195 in 8 x 512, of 41 x 1805 x 511 f16 91, 114 (H200)
STREWN = 1024           # elements of a chunk of rows that begin anywhere, along several axes of which programs share sums: masked Huber loss of
                        # 2 x 3903 x 4903 bf16 92 us, 329 in chunks of 8192 (H200)
ALIKE = 2               # rows of a matrix that begin alike at least, where each matrix has something of its own that is read along all of its rows:
                        # adaptive LayerNorm of 5035 x 6 x 1023 f16 54.4 us as rows lie, 79.0 shifted, of 20000 x 2 x 321 28.3, 108, of
                        # 3000 x 7 x 2047 77.3, 110, of 2000 x 4 x 5001 bf16 87.3, 117, of 1000 x 12 x 1151 26.4, 26.9, of 1000 x 3 x 4095 f32
                        # 39.4, 59.2 (H200); by the estimate of its machine code of 2000 x 20 x 1023 f16 64, 67
IN_PIECES = 512         # elements of a row of 16 bits, folded SEVERAL times, that is read as it lies, in equal pieces, where in whole words it would
SEVERAL = 2             # be two of other lengths beside its ends, each folded by itself: softmax of 53691 x 298 bf16 18.5 us, 25.8 in words, of
                        # 53511 x 299 23.4, 26.0, of 40302 x 397 20.6, 23.5, of 35555 x 450 20.2, 24.3; but of 31311 x 511 23.5, 19.5, of
                        # 21333 x 750 19.3, 18.1, its gradient of 40302 x 397 f16, one fold, 30.6, 28.1 (H200)
AT_WORDS = 2048         # elements of a row of 16 bits at most that begins at words of 4 bytes and is read as it lies, where
MATRICES = 3            # so many of them, what is written included, have a weight beside: RMSNorm of a sum of 53691 x 298 bf16 28.1 us, 31.8 in words
                        # of 16 bytes, of 37784 x 444 f16 28.7, 30.9, of 21333 x 750 bf16 27.1, 32.5, of 15655 x 1022 28.5, 30.1, of 7820 x 2046
                        # 28.4, 33.8, two norms and a sum of 15655 x 1022 27.5, 32.8, a gated norm of 21333 x 750 f16 28.5, 30.8, of 35555 x 450
                        # bf16 30.9, 29.9; but RMSNorm of 35555 x 450, two matrices, 21.4, 19.2, of 10457 x 1530 19.2, 18.5, of a sum of
                        # 15640 x 1023 30.7, 29.2, beside random numbers, of 35555 x 450, 90.0, 81.8; two norms of 18453 x 386 16.6, 15.7 (H200)
LEFT_EACH = 8           # bytes of a partial result, which is written and read again,
LEFT = 20               # one part in so many of what is read and written of rows that begin anywhere, from which on programs take them as they lie:
                        # modulation's gradient of 500 x 5 x 8191 f32 201 us, 90, of 50 x 48 x 8191 108, 87, of 26 x 96 x 8191 100.5, 87.4, of
                        # 23 x 192 x 5569 f16 116, 70; but of 13 x 192 x 8191 f32, one part in 36, 94.3, 93.7. Rows that are held, too: adaptive
                        # LayerNorm's gradient of 879 x 8 x 5596 bf16 159, 451, of 500 x 16 x 4100 f16 91, 214 (H200)

RUNS_IDLE = 4           # one in so many idle at most of runs of looped rows that a tile has beside each other: sums of 5 x 1920 x 1024 bf16 10.3 us
                        # in two, 10.9 in eight, of 5 x 3072 x 1600 f16 18.2 in two, 21.4 in four, of 277 x 1280 x 49 bf16 26.5 in 64, 30.9 in
                        # 128, of 68 x 1920 x 196 22.3 in 16, 24.7 in 32 (H200)


class TileRows(TileAlike):
    """Of a tile none of whose axes is covered yet."""

    def cover_rows(self) -> None:
        """Held whole where they fit registers, else looped: the contiguous (or longest) row axis in chunks, the others step by step."""
        if not self.rows:
            return
        if any(s.monoid is not None for s in self.b.stores):         # updates in order, one after the other
            self.looped.update(self.rows)
            return
        known = all(self.hints.most(a.extent) is not None for a in self.rows) and (self.whole or self.needed_again() or self.line not in self.rows
                                                                                 or self._idles_again())
        inner = self.line if self.line in self.rows else max(self.rows, key=lambda a: self.hints(a.extent))
        extent = lambda a: self.hints.most(a.extent) if known else self.hints(a.extent)         # an ordered target's hints are not the extents
        scanned = {e.along for e in walk(*exprs_of(self.b)) if isinstance(e, Scan)}         # Triton scans no tile of fewer elements than threads
        idle = SCANNED_ROW_IDLE[self.narrowest() < 4]
        at_once = lambda n: inner is self.line and inner in scanned and n <= SCANNED_ROW and (power(n) - n) * idle <= power(n)
        whole = {a: cover(extent(a)) if a is inner and scanned <= {inner} and not at_once(extent(a)) else (power(extent(a)),) for a in self.rows}
        elements = math.prod(sum(s) for s in whole.values())
        wide = 2 if self.narrowest() >= 4 else 1
        most = HELD if self.line in self.rows else HELD // SECTOR // wide if self.needed_again() else MIDDLE // wide
        most = SCANNED if self.scans_down() else self._scanned_most() if self.scans_along() else LARGEST if self.whole else most
        if known and elements <= most and len(self.rows) <= 3 and not self.several_down():
            self.pieces.update(whole)
            self.shift = self.begins_alike(self.shift_along(inner))
            if self.shift is not None:
                n, group = self.hints.most(inner.extent), self.shift.group
                self.pieces[inner] = (*shifted(n, group), 2 * group)
            return
        self.looped.update(self.rows)
        elements = LONE if self.lone() else RAGGED_DOWN if self.few_down() or self.several_down() else SEVERAL_TILE if self.folds_several() else \
            FEW_ROWS if self.few_turns() else TILE
        ragged = max(SCANNED, SCANNED_FEW // self.columns())
        down = ACROSS_ROWS if self.writes_across() else ragged if self.scans_ragged() else SCANNED_ROWS if self.scans_many() \
            else SCANNED // 2 if self.scans_several() else elements // self.columns()
        chunk = down if self.line not in self.rows else self.passing_bytes() // self.narrowest() if self.passing() else \
            PLACES_CHUNK if self.places() else self._scanned_chunk() if self.scans_along() else CHUNK
        chunk = min(chunk, STREWN) if self.strewn() else chunk
        across = self._across_lines()
        chunk = min(chunk, WRITTEN_CHUNK // self.narrowest()) if self.writes_several() else chunk
        while self.line in self.rows and chunk > HEAVY_CHUNK and self._idles(inner, across, chunk):
            chunk //= 2
        self.pieces[inner] = (min(chunk, power(self.hints(inner.extent))),)
        if across is not None:
            runs = min(power(chunk // self.pieces[inner][0] + 1) // 2, power(self.hints(across.extent)))
            self.tile(across, few_idle(self.hints(across.extent), runs, RUNS_IDLE))
            self.looped -= {inner} if self.hints.exactly(inner.extent) == self.pieces[inner][0] else set()
        beside = self._read_across()
        if beside is not None:
            self.pieces[beside] = (power(self.hints(beside.extent)),)
            self.pieces[inner] = (min(ACROSS_BYTES // self.narrowest() // self.pieces[beside][0], power(self.hints(inner.extent))),)
            return
        self.shift = self.shift_along(inner) if self.line is inner and not self.carries_rows else None
        if self.shift is not None:
            self.pieces[inner] = (self.pieces[inner][0], 2 * self.shift.group)

    def _many_rows(self) -> bool:
        """Are there rows for four programs of a multiprocessor?"""
        return self.hints.count(self.b.parallel) >= 4 * self.target.threads

    def _scanned_most(self) -> int:
        """Elements of a row at most of which all prefixes are made at once."""
        return SCANNED_HELD // 4 if self._many_rows() else SCANNED_HELD

    def _scanned_chunk(self) -> int:
        """Elements of a longer one at a step."""
        if self.scans_many_rows():
            return CHUNK // 4
        return CHUNK // 2 if self._many_rows() else CHUNK_BYTES // self.narrowest()

    def _idles_again(self) -> bool:
        """Would much of the second turn of a loop through rows that begin anywhere and are only folded be idle?"""
        n, chunk = self.hints.exactly(self.line.extent), self.passing_bytes() // self.narrowest()
        if n is None or self.rows != [self.line] or self.crossed or not self.passing():
            return False
        shift = self.shift_along(self.line)
        return shift is not None and chunk < self.hints(shift.words) and (2 * chunk - n) * IDLE_TURN > 2 * chunk

    def _idles(self, inner: Axis, across: Axis | None, chunk: int) -> bool:
        """Would much be computed in idle lanes of the last chunk, along `across` where it holds several runs of `inner`?"""
        n, run = self.hints(inner.extent), power(self.hints(inner.extent))
        if across is not None and run < chunk:
            n, chunk = self.hints(across.extent), chunk // run
        return -n % chunk * WASTE > n and self.heavy(self.folds)

    def _across_lines(self) -> Axis | None:
        """The longest axis of looped rows beside their contiguous one: tiles of rows whose contiguous runs are short hold several of them."""
        others = [a for a in self.rows if a is not self.line] if self.line in self.rows else []
        return max(others, key=lambda a: self.hints(a.extent), default=None)

    def _read_across(self) -> Axis | None:
        """A short parallel axis along which something lies contiguously that strides along the rows, which programs run through: tiles of both read
        whole words of it, too."""
        if self.rows != [self.line]:
            return None
        for _, address, _ in strides_of(self.b):
            if strides(address, self.line):
                for a in self.b.parallel:
                    if address.coefficient(a) == 1 and ACROSS_LEAST // self.narrowest() <= self.hints(a.extent) <= TURNED:
                        return a
        return None

    def few_down(self) -> bool:
        """Are columns of several matrices folded that begin anywhere, of 16 bits, or so short that larger tiles would leave many lanes idle?"""
        if self.line not in self.b.parallel or not self.folds or len(self.rows) != 1 or not self.begin_anywhere() \
                or not any(a is not self.line and self.hints(a.extent) > 1 for a in self.b.parallel):
            return False
        n, whole, part = self.hints(self.rows[0].extent), TILE // self.columns(), RAGGED_DOWN // self.columns()
        return self.narrowest() == 2 and not self.folds_words() or -n % whole * WASTE > n and -n % part < -n % whole

    def down_narrow(self) -> bool:
        """Are they in few tiles, or would much of the last tile be idle, so that narrower ones do better?"""
        if not self.looped or self.columns() < COLUMNS or not self.few_down():
            return False
        n = self.hints(self.line.extent)
        few = self.blocks(self.b.parallel, {self.line: (COLUMNS,)}) < NARROW_FEW * self.target.threads
        return n > COLUMNS // 2 and (few or -n % COLUMNS * NARROW_IDLE > n)

    def passing_bytes(self) -> int:
        if self.short_sums():
            return CHUNK * self.narrowest()
        return SUMMED_BYTES if self.summed() or self.one_long() and self.narrowest() == 2 and self.begin_anywhere() else CHUNK_BYTES

    def shift_along(self, a: Axis) -> Shift | None:
        """For rows along `a` that begin at any element, where most of what is read and written begins alike."""
        crossed = len(self.crossed)
        scans = any(isinstance(e, Scan) and (len(e.args) > 1 or a in self.looped) for e in walk(*exprs_of(self.b)))
        if len(self.rows) > 1 or self.hints.least(a.extent) < self.shifted_from() or crossed > 1 or scans or self.target.ordered:
            return None
        found: dict[Index, int] = {}
        smallest = 4
        for _, address, size in strides_of(self.b):
            if address.coefficient(a) == 1 and len(address.axes()) > 1 and not any(isinstance(x, Fetch) for x in address.atoms()):
                origin = address.without(a)
                found[origin] = found.get(origin, 0) + size * self.hints.count(address.axes())
                smallest = min(smallest, size)
        group = 16 // smallest
        origin = max(found, key=lambda i: found[i], default=None)
        if origin is None or any([isinstance(x, Axis) for x in k].count(True) != 1 or not all(isinstance(x, (Axis, Size)) for x in k)
                                 for k in origin.terms):
            return None
        anywhere = any(not self.hints.divides(group, origin.coefficient(x)) for x in origin.axes())
        lies = anywhere and (self._few_alike(a, origin, group) or smallest == 2 and (self._in_pieces(a, group) or self._at_words(a)))
        return Shift(a, group, origin) if anywhere and not lies else None

    def _in_pieces(self, a: Axis, group: int) -> bool:
        """Is it folded SEVERAL times, and written once, along rows of up to IN_PIECES elements whose whole words, `group` elements each, make up
        two or more powers of two, and which nothing lies beside?"""
        folds = {e.key for e in self.folds if a in e.over}
        short = self.hints(a.extent) <= IN_PIECES and len(shifted(self.hints(a.extent), group)) > 1
        stored = sum(s.address.coefficient(a) == 1 for s in self.b.stores)
        return short and stored == 1 and len(folds) >= SEVERAL and not self._beside(a) and not self.crossed and not self.looped

    def _at_words(self, a: Axis) -> bool:
        """Do rows of up to AT_WORDS elements of 16 bits, of MATRICES and something beside, begin at words of 4 bytes?"""
        matrices = {(e, address) for e, address, _ in strides_of(self.b) if address.coefficient(a) == 1 and len(address.axes()) > 1}
        short = self.hints(a.extent) <= AT_WORDS and len(matrices) >= MATRICES and self._beside(a)
        return short and not begin_anywhere(self.b, a, self.hints, 4) and not self.crossed and not self.looped and not self.draws()

    def _beside(self, a: Axis) -> bool:
        """Is something read that lies beside all rows along `a`?"""
        return any(address.axes() == {a} for _, address, _ in strides_of(self.b) if address.coefficient(a) == 1)

    def _few_alike(self, a: Axis, origin: Index, group: int) -> bool:
        """Has each matrix something of its own that is read along all its rows, and fewer than ALIKE rows along `a` that begin alike to share it?
        They begin at `origin`, every `group`-th of them alike."""
        rows = [x for x in self.order if x in self.b.parallel and x in origin.axes()]
        own = any(address.coefficient(a) == 1 and 1 < len(address.axes()) and rows[-1] not in address.axes() for _, address, _ in strides_of(self.b))
        return own and not self.crossed and not self.looped and self.hints(rows[-1].extent) < ALIKE * group

    def begins_alike(self, shift: Shift | None) -> Shift | None:
        """`shift`, unless programs that carry sums of rows (or of blocks of them) which begin alike, of several matrices, are more than run at
        once, and the partial results that each leaves more than a little (`LEFT`)."""
        if shift is None or not self.crossed or self.b.parallel - self.crossed <= {self.line}:
            return shift
        blocks = max(1, self.hints.count(self.b.parallel - self.crossed) // (1 if self.line in self.rows else TILE))
        left = shift.group * len(self.crossing) * LEFT_EACH
        much = left * LEFT > self.hints.count(self.crossed) * self.row_bytes()
        return None if much and shift.group * blocks > self.target.threads else shift

    def shared_rows(self) -> tuple[Axis, ...]:
        """The rows that programs take one after the other, keeping what they read beside: `rows_alike`, but where random numbers are drawn, which
        takes longer than reading it again (`tile_threads.DRAWN_EACH`)."""
        return () if self.draws() else self.rows_alike()

    def rows_alike(self) -> tuple[Axis, ...]:
        """Of shifted rows that read something else along the row (a weight): programs that took every so many rows, all of which begin alike, could
        keep it; not of short rows of 32 bits."""
        if self.shift is None or self.looped or not self.crossed and self.narrowest() >= 4 and self.hints(self.shift.words) <= ALONE_WIDE:
            return ()
        kept = any(address.coefficient(self.shift.axis) == 1 and address.without(self.shift.axis) is not self.shift.origin
                   for _, address, _ in strides_of(self.b))
        rows = [a for a in self.order if a in self.b.parallel and a in self.shift.origin.axes()]
        return tuple(rows[-1:]) if kept else ()

    def at_most(self, a: Axis, size: int) -> int:
        """`size`, a power of two, where `a` has so many elements."""
        return min(size, power(self.hints(a.extent)))

    def tile(self, a: Axis, most: int) -> int:
        size = max(1, self.at_most(a, power(most + 1) // 2))
        if size > 1:
            self.pieces[a] = (size,)
        return size
