"""What a Body is like, as far as the choice of its tiles asks (`tiles`): which axes make rows, which lie contiguously, what is carried across
programs, whether a row is needed again. Nothing here is chosen."""
from __future__ import annotations

import math

from ..fuse.cost import Hints
from ..fuse.column_folds import walks_down
from ..fuse.gpu import LONG_SUM
from ..fuse.lines import strides
from ..ir.expr import Const, Load, Op, Random, Reduce, Scan, walk
from ..ir.index import as_index, atom_axes, Axis, FloorDiv, Mod
from ..ir.ops import OPS
from .body import Body, exprs_of
from .schedule import loop_order, strides_of
from .tile_access import begin_anywhere, narrowest, wide
from .tile_stages import WASTE, power

TILE = 4096             # elements of a tile that a program works on at once, at least where the sizes allow
CHUNK = 4096            # elements of a looped row that are in registers at once
SEVERAL_DOWN = 128      # elements down columns of 16 bits beside which three sums and more are carried, from which on they are run through twice
                        # rather than held, in pieces of which each makes all the sums: filter response norm's gradient in NHWC of
                        # 26 x 1280 x 40 x 40 bf16 146 us, 493 (H200)
ALONE = 16384           # elements that a single program holds: 8192 partial results 3 us, 6 in a loop
WRITTEN_HELD = 16384    # elements of a row that is written and folded, neither of what the other makes, from which on it is run through: the last
                        # kernel of RMSNorm backward along the middle of 251 x 1679 x 89 f32, rows of 251 x 89, 1101 us held, which spill; but of
                        # 118 x 672 x 59 bf16 59, 84 in a loop. Lanes, all axes but the longest as powers of two: the gradient of a snake activation
                        # in NCHW of 33 x 1024 x 20 x 20 f16, 64 x 400, 789 us held, which spills, 102 in a loop
ANGLES = frozenset({"sin", "cos", "tan"})       # functions that have a long way for large numbers, text of its own for each element of a thread:
ANGLES_HELD = 8         # of rows along which they are computed so many times fewer are held. Of 46 x 2048 x 15 x 15 bf16, 64 x 256, 897 us held, 179
                        # by a loop of Inductor's (ours is not timed yet)
WRITTEN_DOWN = 32       # the same of rows down columns, beside a sum that programs share: the last kernel of global response norm backward in NHWC of
                        # 22 x 2048 x 28 x 28 bf16 594 us held, 2384 bytes spilled
SECTOR = 16             # columns at least, of a tile that holds whole columns: 32 bytes of a 16-bit type
SUMMED_FROM = 65536      # elements of rows of whole words of 16 bits, summed only, from which on larger chunks pass through more warps
SCANNING = 448          # columns for each multiprocessor from which on one warp makes prefixes down 64 of them, 16 rows at a time, three such under
                        # way: 64 x 1024 x 1024 along the middle, bf16 74.8 us, 119 by four warps and 64 rows, f32 138, 146. Columns that begin
                        # anywhere one tile at a time: 100 x 77 x 2003 f16 26.0 us, 47.9 in tiles of 32, 64 x 1000 x 1001 bf16 to f32 143, 228
SCANNING_SEVERAL = 192  # columns that begin at words from which on one warp makes them 32 rows at a time: along the middle of 78 x 1024 x 432 bf16
                        # 59.9 us, of 40 x 2000 x 1024 127, of 32 x 1024 x 1024 57.7; 81.7, 157 and 66.3 by four warps and 64 rows (H100)
MANY_SHORT = 4096       # short rows to a multiprocessor from which on programs have four times as many: bf16 LayerNorm of 903216 of 30 36.4 us, 45.2,
                        # variance of 1938117 of 40 46.8, 57.2
MOST_CARRIED = 6        # numbers a lane from which on it is one row at a step: EvoNorm backward in f32 spilled 464 bytes with four, 593 us, 146 with
                        # one
SHIFTED = 256           # elements of a row from which on it is read in whole words wherever it begins: f16 LayerNorm over 257 columns 73%, 56 not so
SHIFTED_SCANNED = 320   # the same where prefixes are made: bf16 ones of 204331 rows of 257 and 40000 of 300 90 and 20.7 us, 125 and 26.4 in words;
                        # but of 32769 of 369 26.3, 22.5, of 100000 of 511 86, 70.7, f16 of 60000 of 1001 94, 82.6 (H100)
SHIFTED_FOLDED = 1024   # the same of rows that are only folded: f16 sums along 257 and 513 columns 56 and 70%, 20 and 39 in words; along 2049 78 and
                        # 91
SHIFTED_SUMMED = 448    # the same where FOLDED_ROWS rows at least are summed, or their greatest elements found: f16 sums of 16384 rows of 511 7.3 us,
FOLDED_ROWS = 32        # bf16 of 8192 of 1023 7.4, of 65536 of 513 22.1; 9.1, 9.5 and 24.5 element by element. Rows to a multiprocessor;
                        # of 4608 of 700, in two pieces of words, 4.8, 4.4
SHIFTED_WIDE = 512      # the same where all are of 32 bits and more: f32 sums over 257 columns 40%, 85 element by element; softmax 79 and 94
WIDE_STORED = 384       # where they are written, too: f32 softmax of 262144 and 65536 rows of 511 254 and 66.0 us, 328 and 88.2 element by element;
                        # of 65536 of 385 50.0, 51.1 to 52.8, of 257 41.7, 35.0
FOLDED_WORDS = 128      # rows of columns, WORDS_ACROSS at least, from which on those of 16 bits at words of 4 bytes are read as others are, not as
WORDS_ACROSS = 512      # those that begin anywhere: sums of 129 x 28830 bf16 6.5 us, 9.1, along the middle of 59 x 752 x 578 23.9, 25.7, RMSNorm of
                        # 20 x 700 x 2002 65, 68; but prefixes of 260693 x 252 f16, which sum columns of blocks first, 210, 193 (H100)
WARP_LANES = 512        # lanes of rows that begin anywhere, are written and one piece of SHORT_LANES at most, of a program: a multiprocessor has
SHORT_LANES = 128       # no more than 32 programs, so one warp of which each has few rows under way, two where they are a warp's width (us, H200, and
                        # in 1024 lanes): log-softmax of 572813 rows of 99 bf16 128, 159, weight norm backward of 365404 of 63 f16 51.6, 66.6, dropout
                        # and LayerNorm of 69287 of 127 bf16 54, 68.7, a Python LayerNorm of 173861 of 53 f16 25.5, 28.1; LayerNorm of 524289 of 25
                        # bf16 35.5, 41.1, of 552509 of 31 f32 51.7, 56.1. Half as many of 32 bits where several values are read: weight norm backward
                        # of 65537 of 51 f32 19.6, 25.2
WORDS_OF = 8            # Twice as many of one value of 16 bits that begin at words of so many bytes, all of one warp: LayerNorm of 62080 of 108
                        # bf16 12.4, 14.8, of 408052 of 52 f16 29.9, 33.0, variance backward of 2097152 of 28 bf16 59.5, 80.8; and where it has one
                        # fold: weight norm of 294456 of 110 f16 35.9, 46.2, variance backward of 663628 of 45 bf16 44, 53


class TileFacts:
    """Of `b`, at the sizes of `hints`. `order`: its axes in loop order; `rows`: those that are not parallel; `folds`; `crossing`: the folds across
    programs, each once, and `crossed`, the parallel axes they fold; `line`: the axis along which most bytes lie contiguously. `whole`: rows have to
    be held whole; `carries`: partial results lie along a row, `carries_rows`: or folds across programs fold rows, too; `down`: long columns are
    folded by programs that write rows on the way; `wide`: addresses need 64 bits; `width`: numbers that a fold carries at most."""

    def __init__(self, b: Body, hints: Hints, target):
        self.b, self.hints, self.target = b, hints, target
        self.order = loop_order(b, hints)
        folds = [e for e in walk(*exprs_of(b)) if isinstance(e, Reduce)]
        self.crossed = frozenset(a for e in folds for a in e.over) & b.parallel
        self.rows = [a for a in self.order if a not in b.parallel]
        self.whole = any(set(self.rows) & set(e.over) and not set(self.rows) <= set(e.over) for e in folds) \
            or self.scans() or any(set(e.over) & self.crossed and e.free & set(self.rows) for e in folds)
        self.width = max((sum(1 for x in e.args if not isinstance(x, Const)) if e.monoid != "moments" else 3 for e in folds), default=1)
        self.folds = folds
        self.crossing = crossing = [e for e in folds if set(e.over) & self.crossed]
        self.carries = any(e.free & set(self.rows) for e in crossing)                       # partial results along a row
        self.carries_rows = self.carries or any(set(e.over) & set(self.rows) for e in crossing)
        self.crossing = list({e.key: e for e in crossing}.values())
        self.line, self.wide = self._contiguous(), wide(b, hints, counted=True)
        self.down = self._writes_down()

    def _writes_down(self) -> bool:
        """Are long columns folded by programs that write rows on the way?"""
        both = self.crossed | {self.line}
        return not self.rows and bool(self.crossed) and self.line in self.b.parallel - self.crossed and any(both <= s.axes for s in self.b.stores) \
            and walks_down(self.line.extent, self.hints.count(self.crossed), self.hints, self.target)

    def _contiguous(self) -> Axis | None:
        """The axis along which most bytes lie contiguously; the last in loop order where none does."""
        score: dict[Axis, float] = {a: 0 for a in self.b.axes}
        for _, address, size in strides_of(self.b):
            elements = self.hints.count(address.axes())
            for a in score:
                if address.coefficient(a) in (1, -1):                  # from the end, too
                    score[a] += elements * size * min(self.hints(a.extent), 32) / 32
        return max(self.order, key=lambda a: (score[a], self.order.index(a)), default=None)

    def read_beside(self) -> tuple[list[Load], list[Load]]:
        """Of elements that are counted as one axis (`flattened`): what is read by the row that each is in, and by its column."""
        rows, columns = [], []
        for e in {(e.node, e.index): e for e in walk(*exprs_of(self.b)) if isinstance(e, Load)}.values():
            divided = [x for x in e.index[0].atoms() if isinstance(x, (FloorDiv, Mod)) and self.line in atom_axes(x)]
            if divided:
                (columns if any(isinstance(x, Mod) and x.a == as_index(self.line) for x in divided) else rows).append(e)
        return rows, columns

    def writes_across(self) -> bool:
        """Do programs walk down columns of 32 bits that they write, and fold along them, too?"""
        across = self.line in self.crossed and bool(self.rows) and self.line not in self.rows and self.stored_along()
        return across and self.narrowest() >= 4

    def carried(self) -> int:
        """Of a thread for an element, in a loop that folds across programs: what is carried and what is read."""
        read = {(e.node, e.index) for e in walk(*(a for f in self.crossing for a in f.args))
                if isinstance(e, Load) and e.index[0].axes() & self.crossed}
        return len(read) + sum(3 if e.monoid == "moments" else len(e.args) for e in self.crossing)

    def staged_columns(self) -> bool:
        """Are one-pass statistics of columns folded across programs? BatchNorm in NHWC with rows of them under way 50%, 40 without, 44 with a cap on
        registers in place of them."""
        return not self.rows and bool(self.crossed) and self.line not in self.crossed and any(e.monoid == "moments" for e in self.crossing)

    def statistics(self) -> bool:
        """Are columns folded across programs by more than one sum of what is read?"""
        return self._several_sums() and self.line not in self.crossed

    def sums_along(self) -> bool:
        """Are contiguous rows that programs share folded by more than one sum of what is read along them?"""
        return self._several_sums() and self.line in self.crossed

    def _several_sums(self) -> bool:
        """Do programs share what they fold by more than one sum?"""
        shared = not self.rows and bool(self.crossed) and self.carried() > 2
        return shared and all(e.monoid in ("sum", "moments") for e in self.crossing)

    def sums_turned(self) -> bool:
        """Are they, where another value of 16 bits lies contiguously along another axis (channels-first and channels-last)?"""
        return self.sums_along() and self.narrowest() < 4 and self.turned() is not None

    def sums_anywhere(self) -> bool:
        """The same of rows that begin at any element and are not read in whole words (`folds_each`), or are several, and summed."""
        return self.sums_along() and self.begin_anywhere() and (self.only_sums() if len(self.crossed) > 1 else not self.folds_each())

    def folds_each(self) -> bool:
        """Do programs share rows and do nothing but fold them, each element for itself?"""
        folded = not self.rows and self.crossed == {self.line} and not any(self.line in s.axes for s in self.b.stores)
        return folded and all(e.monoid != "logsumexp" and all(isinstance(x, Const) for x in e.args[1:]) for e in self.folds)

    def spreads(self) -> bool:
        """Is what is written made of nothing that is read element by element?"""
        written = [s.axes for s in self.b.stores]
        read = [e.axes() for e in walk(*exprs_of(self.b)) if isinstance(e, Load)]
        return bool(read) and all(len(w) > 1 and not any(w <= r for r in read) for w in written)

    def passes_on(self) -> bool:
        """Is what programs share one sum of, down columns of 16 bits, written by them, too? Heads beside each other, whose bias is summed, of
        226 x 256 x 2 x 72 f16 38.9 us in 16 whole lines by two warps, 62.7 in 64 x 64 by four, of 12 x 500 x 16 x 96 bf16 38.1, 42.6 in 32 x 64, of
        30 x 512 x 12 x 64 43.7 so, 46.4 in 64 x 64 (H200)."""
        alone = len(self.crossing) == 1 and not self.rows and self.line not in self.crossed and self.carried() == 2
        return alone and self.narrowest() < 4 and any(s.axes & self.crossed for s in self.b.stores)

    def only_sums(self) -> bool:
        """Are sums all that programs share?"""
        return all(e.monoid == "sum" for e in self.crossing)

    def several_wide(self) -> bool:
        """Are three sums or more of 32-bit elements carried across programs beside rows? Not what a row has one of: the loss of 32768 rows of 440
        f32, with smoothed labels and a price for large logits, 36.9 us by four warps, 76.9 by 16 (H200)."""
        return self._several_along() and self.narrowest() >= 4

    def several_down(self) -> bool:
        """The same of 16-bit elements beside long columns that a program would hold."""
        down = len(self.rows) == 1 and self.line in self.b.parallel and self.hints.count(self.rows) > SEVERAL_DOWN
        return down and self.narrowest() < 4 and self._several_along()

    def _several_along(self) -> bool:
        """Are three sums or more of what lies along the rows carried across programs?"""
        rows = set(self.rows)
        return sum(any(rows & x.free for x in e.args) for e in self.crossing) > 2

    def carries_wide(self) -> bool:
        """The same beside short rows along two axes that begin anywhere, where something of 32 bits is read along them, perhaps beside a mask."""
        wide = any(size >= 4 and self.line in address.axes() and address.axes() & self.crossed for _, address, size in strides_of(self.b))
        short = len(self.rows) > 1 and self.line in self.rows and self.hints(self.line.extent) <= SHORT_LANES // 2
        return short and wide and len(self.crossing) > 2 and self.begin_anywhere()

    def scans_down(self) -> bool:
        """Are prefixes down columns all that is made of rows?"""
        return self.line not in self.rows and self._only_scanned()

    def scans_along(self) -> bool:
        """Are prefixes along contiguous rows all that is made of them?"""
        return self.line in self.rows and self._only_scanned()

    def _only_scanned(self) -> bool:
        """Are prefixes all that is made of rows along one axis?"""
        return len(self.rows) == 1 and not self.folds and self.scans()

    def places(self) -> bool:
        """Is the place of the greatest or least element found?"""
        return any(e.monoid.startswith("arg") for e in self.folds)

    def blocks(self, axes, pieces: dict[Axis, tuple[int, ...]]) -> int:
        """Blocks of `axes`, by a tile's `pieces` of them."""
        return math.prod(-(-self.hints(a.extent) // sum(pieces.get(a, (1,)))) for a in axes)

    def heavy(self, folds) -> bool:
        """Do `folds` take what a heavy function makes?"""
        return any(isinstance(e, Op) and OPS[e.name].heavy for f in folds for x in f.args for e in walk(x))

    def computes_heavy(self) -> bool:
        """Is a heavy function computed at all?"""
        return any(isinstance(e, Op) and OPS[e.name].heavy for e in walk(*exprs_of(self.b)))

    def draws(self) -> bool:
        """Are random numbers drawn?"""
        return any(isinstance(e, Random) for e in walk(*exprs_of(self.b)))

    def joins_moments(self) -> bool:
        """Are moments of parts joined?"""
        return any(e.monoid == "moments" and not all(isinstance(x, Const) for x in e.args[1:]) for e in self.folds)

    def many_short(self) -> bool:
        """Are there so many rows that short ones lie more to a program?"""
        return self.hints.count(self.b.parallel) >= MANY_SHORT * self.target.threads

    def scans(self) -> bool:
        return any(isinstance(e, Scan) for e in walk(*exprs_of(self.b)))

    def scans_ragged(self) -> bool:
        """Are prefixes made down few columns that begin anywhere?"""
        return self.scans_down() and self.line in self.b.parallel and self.begin_anywhere() and not self.scans_many()

    def scans_many(self) -> bool:
        """Are prefixes made down so many columns that a warp for each few fills the machine?"""
        many = self.hints.count(self.b.parallel) >= SCANNING * self.target.threads
        return many and self.scans_down()

    def scans_several(self) -> bool:
        """Are prefixes made down columns that begin at words, fewer of them, but enough for a warp for each few?"""
        several = self.hints.count(self.b.parallel) >= SCANNING_SEVERAL * self.target.threads and self.line in self.b.parallel
        return several and self.scans_down() and not self.scans_many() and not self.begin_anywhere()

    def columns_read(self) -> int:
        """Values that are read along the contiguous axis, and no other, where more is read along all axes."""
        read = {(e.node, e.index): e.index[0].axes() for e in walk(*exprs_of(self.b)) if isinstance(e, Load)}.values()
        return sum(axes == {self.line} for axes in read) if any(axes >= self.b.parallel for axes in read) and len(self.b.parallel) > 1 else 0

    def folds_words(self) -> bool:
        """Are long columns of 16 bits folded whose rows begin at words of 4 bytes, if not of 16?"""
        half = all(e.dtype.bytes == 2 for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and self.line in e.axes())
        long = bool(self.folds) and self.hints.count(self.rows) >= FOLDED_WORDS and self.hints(self.line.extent) >= WORDS_ACROSS
        return long and half and self.line in self.b.parallel and self.begin_anywhere() and self.begin_at_words(4)

    def rows_read(self) -> set[tuple]:
        """(memory, index) of what is read along the contiguous axis and differs from row to row."""
        return {(e.node, e.index) for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and self.line in e.axes() and e.axes() & self.b.parallel}

    def needed_again(self) -> bool:
        """Is a row looked at more than once: by a fold of what another one gives, or by a store along it (of a row longer than WRITTEN_HELD, one of
        what is made of a fold)? Or is it short?"""
        rows = set(self.rows)
        if not self.b.parallel and self.hints.count(rows) <= ALONE:
            return True
        lengths = sorted(self.hints(a.extent) for a in rows)
        held = math.prod([*map(power, lengths[:-1]), *lengths[-1:]])            # lanes
        most = WRITTEN_HELD if self.line in rows or not self.crossed else WRITTEN_DOWN
        short = not self.folds or held <= most // (ANGLES_HELD if self.angles() else 1)
        folded = lambda e: short or any(isinstance(x, Reduce) and rows & set(x.over) for x in walk(e))
        if self.hints.count(rows) <= (CHUNK if self.line in rows else 2 * SECTOR) or any(s.axes & rows and folded(s.expr) for s in self.b.stores):
            return True
        return any(isinstance(e, Reduce) and rows & set(e.over) and any(isinstance(x, Reduce) and rows & set(x.over) for a in e.args for x in walk(a))
                   for e in walk(*exprs_of(self.b)))

    def angles(self) -> bool:
        """Are functions of angles computed along the contiguous axis?"""
        return any(isinstance(e, Op) and e.name in ANGLES and self.line in e.free for e in walk(*exprs_of(self.b)))

    def passing(self) -> bool:
        """Are contiguous rows only folded, by folds that few lanes carry (`TileFolds._few`)?"""
        single = all(e.monoid != "logsumexp" and (len(e.args) == 1 or all(isinstance(x, Const) for x in e.args[1:]) and e.monoid == "expsum")
                     for e in self.folds if self.line in e.over)
        return single and not self.stored_along() and not self.scans()

    def strewn(self) -> bool:
        """Are they `passing` rows that begin anywhere, along several axes of which programs share folds?"""
        return self.line in self.rows and len(self.crossed) > 1 and self.begin_anywhere() and self.passing()

    def singly(self) -> bool:
        """Do `passing` rows, or parts of them, give one number a fold, each element for itself?"""
        return all(len(e.args) == 1 for e in self.folds if self.line in e.over)

    def one_long(self) -> bool:
        """Is a row of much memory summed by a program, and nothing else read along it?"""
        return self.only_summed() and self.hints(self.line.extent) * self.narrowest() >= LONG_SUM

    def short_sums(self) -> bool:
        """Does a program sum a row of whole words of 16-bit elements that is not long, and nothing else?"""
        return self.rows == [self.line] and self.only_summed() and self.narrowest() == 2 and not self.one_long() and not self.begin_anywhere()

    def only_summed(self) -> bool:
        """Is a row, all that is read along it, summed by a program?"""
        read = {(e.node, e.index) for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and self.line in e.axes()}
        sums = all(e.monoid == "sum" for e in self.folds if self.line in e.over)
        return self.line in self.rows and not self.crossed and sums and len(read) == 1 and not self.stored_along()

    def summed(self) -> bool:
        """Are `passing` rows long, whole words of 16-bit elements, and only summed?"""
        return self.narrowest() == 2 and self.hints(self.line.extent) >= SUMMED_FROM and not self.begin_anywhere() \
            and all(e.monoid == "sum" for e in self.folds if self.line in e.over)

    def streams(self) -> bool:
        """Is all that is read folded across programs, lane by lane, into no more than a sum? BatchNorm's backward sums with longer tiles: 28%, 55
        without."""
        return not self.rows and self.line in self.crossed and self.carried() <= 2 and self.passing()

    def shifted_from(self) -> int:
        """Elements of a row from which on it is read in whole words wherever it begins."""
        if self.scans() and self.narrowest() < 4:
            return SHIFTED_SCANNED
        if self.narrowest() >= 4:
            return WIDE_STORED if self.stored_along() and not self.crossed else SHIFTED_WIDE
        if self.crossed or self.stored_along():
            return SHIFTED
        n = self.hints(self.line.extent)
        many = self.hints.count(self.b.parallel) >= FOLDED_ROWS * self.target.threads and (power(n - 1) - n) * WASTE <= n
        return SHIFTED_SUMMED if many and self.passing() and self.singly() else SHIFTED_FOLDED

    def begin_anywhere(self) -> bool:
        """Do rows along the contiguous axis begin at any element, not at 16-byte words?"""
        return begin_anywhere(self.b, self.line, self.hints)

    def warp_rows(self, lanes: int) -> int:
        """Rows of so many lanes, in one piece, of a program that writes them where they begin anywhere and are short."""
        wide = lanes >= SHORT_LANES // 2
        several = len(self.rows_read()) > 1
        half = self.narrowest() >= 4 and wide and several
        light = wide and len({e.key for e in self.folds}) < 2 and self.narrowest() < 4
        twice = not several and (light or self.begin_at_words(WORDS_OF))
        return max(1, (WARP_LANES // 2 if half else WARP_LANES * 2 if twice else WARP_LANES) // lanes)

    def begin_at_words(self, size: int) -> bool:
        """Do rows of 16 bits along the contiguous axis begin at words of so many bytes?"""
        return self.narrowest() < 4 and not begin_anywhere(self.b, self.line, self.hints, size)

    def stored_along(self) -> bool:
        return any(s.axes & set(self.rows) for s in self.b.stores)

    def walks_plainly(self) -> bool:
        """Do programs walk down blocks of long columns, and carry one sum of what lies along them?"""
        beside = any(isinstance(e, Load) and e.axes() & self.crossed and self.line not in e.axes() for e in walk(*exprs_of(self.b)))
        return self.down and len(self.crossing) == 1 and not beside

    def reads_wide(self) -> bool:
        """Is all that is read along the contiguous axis of 32 bits and more? (What is written may be narrower.)"""
        return all(e.dtype.bytes >= 4 for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and self.line in e.axes())

    def row_bytes(self) -> int:
        """Bytes of an element of a row that programs fold across: of all that is read and written there along the contiguous axis."""
        return sum(size for _, address, size in set(strides_of(self.b)) if self.line in address.axes() and address.axes() & self.crossed)

    def narrowest(self) -> int:
        """Bytes of an element of the narrowest that is read along the contiguous axis."""
        return narrowest(self.b, self.line)

    def turned(self) -> Axis | None:
        """Another parallel axis that some access runs along contiguously, while it strides along the contiguous one."""
        if self.line not in self.b.parallel:
            return None
        for _, address, _ in strides_of(self.b):
            if strides(address, self.line):
                for a in self.order:
                    if a in self.b.parallel and a is not self.line and address.coefficient(a) == 1 and self._long(a, address) >= 8:
                        return a
        return None

    def turned_wide(self) -> bool:
        """Are several values of 32 bits read along the contiguous axis and the one that it is turned to?"""
        both = {self.line, self.turned()}
        read = {(e.node, e.index) for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and both <= e.axes()}
        return self.narrowest() >= 4 and len(read) > 1

    def _long(self, a: Axis, address) -> int:
        """Elements that lie contiguously along `a`, and along the axis whose steps are whole runs of it (channels within groups)."""
        behind = [x for x in self.b.parallel if address.coefficient(x) is a.extent] if not self.rows and not self.crossed else []
        return self.hints(a.extent) * (self.hints(behind[0].extent) if behind else 1)
