"""How many elements of a tile of a GPU a thread has, when its pieces stand. Every threshold is a named constant with what it was measured on."""
from __future__ import annotations

import math

from ..fuse.cost import Hints
from ..fuse.lines import SECTOR as SECTOR_BYTES
from ..ir.expr import Load, walk
from ..ir.index import Axis
from .body import Body, exprs_of
from .schedule import strides_of
from .tile_access import begin_anywhere
from .tile_facts import SHORT_LANES, TILE, TileFacts
from .tile_schedule import alike, Shift
from .tile_stages import power
from .tile_statistics import COLUMNS, WORD

PER_THREAD = 16         # elements of a pointwise tile to one thread, and of a held row where each multiprocessor has one at most: f16 LayerNorm of
                        # 128 rows of 8192 3.55 us, 4.06 with ROW_THREAD
ROW_THREAD = 32         # of a tile that is folded: norms forward reach 75% of the limit over many sizes, against 69 with 16 and 62 with 8
CARRY_THREAD = 16       # elements of a row to one thread where column sums are carried: 16-bit LayerNorm backward at six sizes 70 to 77%, 26 to 61
                        # with half as many; f32 83, 78 and 54% against 82, 68 and 41
RAGGED_EACH = 64        # of longer rows that begin anywhere and are written, too: warps fold their rows by themselves. bf16 LayerNorm over 255 and
                        # 257 columns 47.7 and 38.1 us, 55.1 and 46.6 with tiles of twice as many (RAGGED_STORED) or twice the warps
RUN_THREAD = 16         # of looped rows whose runs are short (`whole_runs`), CARRY_STAGES tiles under way: moments of groups by a program each, which
                        # writes them behind, by hand: GroupNorm NHWC of 12 x 2048 x 97 x 96 bf16 358 us, of 12 x 1024 x 55 x 56 f32 130, of
                        # 16 x 2048 x 56 x 56 f16 184; 481, 136 and 196 with half as many of one tile, 408, 135 and 173 with twice as many of one
STACKED = 8192          # PER_THREAD of more elements of rows along two axes, STACKED_ROWS of the one at least, by up to CARRY_WARPS, where
STACKED_ROWS = 16       # several values are read: RMSNorm backward along the middle of 28 x 477 x 511 bf16, where they are 28 x 511, 36.0 us, 73
                        # spilled by eight warps (H100); but of 3 x 1882 x 4097 88.6, 105 so, of BatchNorm of 43 x 640 x 15 x 15 25.6, 27.8
PIECE_EACH = 4          # of such rows that are one piece of a warp's width, 512 elements to a program (`tile_blocks.PIECES`)
SHORT_EACH = 256        # elements up to which rows that begin anywhere and are only folded have RAGGED_EACH, too: bf16 sums of 32768 and 262144 rows
                        # of 127 5.3 and 21.5 us by one warp, 6.5 and 28.8 by two
TURNED_BYTES = 128      # bytes to a thread of a pointwise tile along three axes that is read along one of them and written along another, where rows
                        # along either begin anywhere: the last kernel of GroupNorm from NHWC to NCHW of 38 x 480 x 56 x 56 bf16 86.3 us, of
                        # 500 x 96 x 14 x 14 23.4, of 2964 x 320 x 7 x 7 87.9; 91.6, 26.9 and 135 in a quarter. Where they begin at words
                        # InstanceNorm3D backward of 192 x 96 x 16 x 16 x 16 bf16 takes 342, 294, of 51 x 8 x 32 x 32 x 32 f16 62.8, 57.2 (H100)
TURNED_WIDE = 8         # elements to a thread of such a tile of 32 bits along two axes: see `tile_blocks.EDGE_IDLE`
WITHIN_LINES = 65, 256  # elements of lines that are written and begin within sectors, of which such a tile has whole ones, or twice as many as of
WITHIN_BYTES = 256, 64  # others (`tile_blocks.TURNED`), and bytes to a thread, of 32 bits and of 16: a sector that two programs write is read and
                        # written once more. Scores' gradient of 32362 x 16 x 78 f32 85.6 us, bf16 54.6, of 238 x 1186 x 94 f32 57.5, bf16 72.8, of
                        # 900 x 150 x 150 f32 49.4; 128, 77.8, 84.5, 90.0 and 66.5 in 32 of them (H200)
WITHIN_TILES = 1 << 16  # elements of tiles to a multiprocessor from which on it is: of 6 x 464 x 1147 f16 7.8 us in 128, 6.9 in 64
SHORT_FROM = 96         # elements from which on aligned rows that are written lie in tiles of 1024, with PER_THREAD of up to SHORT_EACH: RMSNorm of
                        # 8192 and 65536 rows of 128 bf16 2.7 and 10.1 us, of 32768 of 512 18.0, LayerNorm of 65536 of 256 19.0, softmax of 8192 of
                        # 256 3.9; 3.3, 10.6, 19.2, 21.0 and 4.8 with larger tiles and 32 a thread. LayerNorm and softmax of 131072 of 96 15.5 and
                        # 14.8, 19.2 and 16.7; but RMSNorm of 60000 of 80 7.1, 6.8, LayerNorm of 100000 of 64 8.7, 8.5
BESIDE_COLUMNS = 4      # where elements are counted as one axis, and wider values are read by their column, one by one: the further apart threads'
                        # elements are the more lines each access touches. Standardized columns' gradient of 5008 x 2139 bf16 29.5 us, 54.1 with
                        # PER_THREAD, of 1804 x 11389 f16 50.2, 87.8, correlations' of 1598 x 6002 24.2, 39.4, two softmaxes of 4096 x 3401 bf16
                        # 27.9, 35.1. But values as wide: dynamic tanh of 17114 x 1868 f16 39.6, 32.0, bias and GELU of 508 x 6166 f32 8.3, 7.4
BESIDE_ROWS = 8         # where no more than ROW_VALUES are, by their row: logsumexp's gradient of 979583 x 63 f16 76.5, 84.5, cross entropy's of
ROW_VALUES = 3          # 1425769 x 30 bf16 63.0, 72.2, of 170 x 172213 56.2, 58.8, scale norm's of 82 x 263497 f16 41.7, 44.8, L2 norm's of
                        # 4002 x 9481 46.3, 45.9; but BatchNorm's in NCHW, five, of 102 x 128 x 15 x 15 7.5, 6.9. And of words of 32 bits, or of
WORD_VALUES = 4         # which so many are read and nothing heavy computed: rotary embedding of 2485 x 93 x 1 x 112 f32 50.0, 53.9, of
                        # 374 x 333 x 3 x 112 bf16 42.4, 46.1; but modulated rows of 2 x 341 x 4192 bf16 5.0, 4.8, cross entropy's gradient of
                        # 8192 x 128256 1020, 982, EvoNorm's in NHWC of 128 x 1280 x 20 x 20 108, 104, snake's function of 674 x 512 x 14 x 14
                        # bf16, of angles, 115, 106 (H200)
FOLDED = 16384          # bytes at least of held rows that one program folds: f16 rows of 1024 88%, 76 a row a program
SPREAD = 8              # of tiles of short rows that are only folded, that a multiprocessor should have where they are few, and two rows a tile at
                        # least where they begin anywhere: bf16 sums of 2048 rows of 513 2.65 us, 3.33 with ROWS. With PER_THREAD where they do not:
                        # variance of 8193 of 256 f16 5.9 us, 6.7, logsumexp of 20000 of 120 6.8, 7.1 (H200)
SHORT_HALF = 128        # elements of a row of 16 bits of which half as many to a thread are quicker,
SHORT_FEW = 1 << 21     # where all rows have so many at most: LayerNorm of 8192 and 16384 rows of 128 bf16 3.0 and 4.4 us, 3.3 and 4.5; RMSNorm of
                        # 8192 2.7, 2.9
RAGGED_THREAD = 8       # elements to a thread of a tile that walks down columns whose rows begin anywhere: the compiler keeps few such loads under
                        # way. f16 sums of 1024 rows of 65537 64%, 17 with ROW_THREAD
TOGETHER_THREAD = 8     # of TOGETHER columns that are summed and begin anywhere: f32 LayerNorm backward of 64 rows of 65535 34.5 us, 51.9 with twice
                        # as many of each, which spill, 40.4 with half the columns; of 65536 36.2, 32.4
TOGETHER_PIECE = 8      # and of each of the equal pieces of columns that begin at words
ALIKE_THREAD = 72       # of columns of 16 bits that are held in several equal pieces, and written: RMSNorm along the middle of 878 x 288 x 20 bf16
                        # 11.4 us, 16.8 with ROW_THREAD, of 485 x 80 x 648 45.8, 50.4, of 500 x 100 x 130 15.9, 17.1 (H100)
LONG_ANYWHERE = 128     # rows of columns that begin anywhere from which on it is
ALIKE_ANYWHERE = 40     # so many of equal pieces, of 16 bits, and of one piece
LONG_ANYWHERE_THREAD = 16       # so many: RMSNorm along the middle of 50 x 300 x 1001 f16 30.3 us by eight warps, 36.5 by four, of 100 x 255 x 500
                        # bf16 23.7 by 16, 26.3 by eight (H200)
SHORT_COLUMN = 32       # rows of such columns that begin anywhere, up to which a program has one matrix of several, ROW_THREAD to a thread, two warps
SHORT_COLUMNS = 128     # at least, and so many columns where there are twice as many; of 32 bits half as much. H200: of 2065 x 5 x 2395 f32 53 us, of
                        # 2000 x 7 x 777 f16 16.9, of 700 x 12 x 1500 16.0, of 403 x 12 x 5514 33.8, of 1691 x 9 x 2049 bf16 64.4, of
                        # 1500 x 25 x 501 28.5, of 900 x 20 x 901 23.6, of 1000 x 32 x 1001 43.8; 75, 19.1, 27.1, 42.7, 83, 33.6, 30.4 and 46.8 of
                        # COLUMNS with a word to a thread. With ROW_THREAD of 32 bits 35499 x 8 x 205 takes 155, 129; of 32 bits none of whose
                        # lanes are idle COLUMNS with a word to a thread: 2000 x 16 x 801 59.2, 64.2
SHORT_WIDE = 32         # columns of a tile of one matrix of 32 bits of SHORT_COLUMN rows, or some fewer,
SHORT_WIDE_THREAD = 8   # so many elements to a thread,
SHORT_IDLE = 3          # one lane in so many idle at most: LayerNorm backward of 25 x 310003 f32 58.7 us, RMSNorm of 32 x 293926 59.5; 74.0 and 82.8
                        # in COLUMNS by one warp or 16; but LayerNorm of 18 x 500001 83.5, 67.7 (H200)
FEW_TURNED = 256        # rows at most of columns that begin anywhere and are only folded, of one matrix,
FEW_SHARE = 4           # so many tiles of COLUMNS for each multiprocessor, of which a turn takes
FEW_ROWS = 1024         # elements: f16 sums of 215 x 45781 10.8 us, f32 of 200 x 50001 14.0, weights' gradients of a Python LayerNorm of 97 x 78875
                        # f32 26.0; 12.2, 15.0 and 32.0 with TILE by 16 warps (H200)
LONE_THREAD = 16        # of a tile of LONE elements: partial results of 1584 and 1980 programs over 768 columns 5.1 us, 10.2 and 15.1 with TILE and
                        # ROW_THREAD; of 1056 over 1024 2.9, 4.8
THREAD = 52             # elements of a tile to a thread that folds them into one lane: statistics of contiguous planes of 3136 bf16 by programs of
                        # two warps 91% of the limit of reading, by four 81, by eight 71
                        # Half as many of three values of 32 bits for two sums: f32 sums of LayerNorm backward of 64 rows of 65535 13.8 us, 18.2
ANGLES_THREAD = 16      # of functions of angles beside folds, of rows that are held (not timed) and where `by_thread`: snake's gradient of
                        # 100 x 128 x 56 x 56 bf16 572 us by four warps, 174 by eight; twice as many of 32 bits, of 32 x 64 x 56 x 56 66.1, 70.7 by
                        # eight (H200)
HEAVY_THREAD = 8        # beside heavy functions of several values: sums of a gated RMSNorm's gradient of 21 x 239896 f16 23.1 us, 59.1 with THREAD,
                        # which spill 416 bytes, of a Gaussian likelihood of 1641 x 18066 f32 95.0, 122, 72 bytes (H200)
MOMENTS_THREAD = 16     # of moments of 32-bit elements of such rows, in tiles of half of TILE: mean and variance of 16 x 180204 8.5 us, variance of
                        # 53 x 255216 19.6; 9.2 and 21.2 with THREAD, which spill; but of rows that begin anywhere, 1010 x 32767, 44.1, 39.5 (H200)
SUMMED_ANYWHERE_THREAD = 16     # the same of rows that begin anywhere and are not read in whole words, in shorter tiles, without a cap on
                        # registers: sums of what dropout and a residual give, written beside, of 138 x 154970 bf16 104 us, of 21 x 131071 f32 25,
                        # of a Python LayerNorm's backward over 38 x 262143 bf16 50 to 54; 127, 31.6 and 101 with TILE and THREAD, capped (H100).
                        # Half as many of several short rows: sums of BatchNorm's backward of 1669 x 256 x 7 x 7 f16 56, 71
MANY_ANYWHERE = 4       # times fewer, in tiles of so many times fewer, of as many sums or more: gradient of the least and the greatest of
                        # 72 x 262145 f16 54.7 us, 101 (H200)
MIDDLE_THREAD = 8       # of more than MIDDLE_ROWS rows of columns of 32 bits that begin anywhere, are held and only folded: f32 sums along the middle
MIDDLE_ROWS = 32        # of 107 x 55 x 8790 74 us, 86 with ROW_THREAD (H100); but of 30 x 18520 6.9, 9.6, of 60 x 16384, aligned, 21.7, 19.2
SCANNED_SHARE = 8       # rows to a multiprocessor from which on prefixes are made 1024 elements at a step,
SCANNED_COLUMNS = 128   # columns of a tile of many, down which prefixes are made, `tile_facts.SCANNING` a multiprocessor, or SCANNED_WIDE
SCANNED_ROWS = 32       # rows of 16 bits at most of which prefixes are made down many columns, twice SCANNED_COLUMNS at once (`scans_few`),
SCANNED_EACH = 128      # so many elements to a thread of more than half as many rows,
SCANNED_IDLE = 4        # one lane in so many idle at most where that is one tile
SCANNED_BYTES = 32      # so many bytes to a thread: of 1378 of 26899 f16 78 us, of 2000 of 10001 f32 65.8, of 1136 of 8755 35.6; 90.9, 66.0 and 41.2
                        # in twice as many with ROW_THREAD; but of 591 of 16383 f32 36.7, 39.9 (H100)
NARROW_THREAD = 128     # of a tile of fewer than COLUMNS columns of 32 bits that begin at words, which programs sum: f32 sums of 440960 x 36 24.7 us,
                        # 34.5 with ROW_THREAD
SHORT_RUN = 8           # elements of a row of a tile beside which sums are carried from which on several are under way: GroupNorm backward of
                        # 8998 x 96 x 8 x 8 f16, of three channels a group, 12.4 us, 30.1
SPLIT_REGISTERS = 80    # of a thread, for what it carries and reads in a loop that folds across programs: one-pass statistics of 64x256x56x56 bf16 in
                        # 36 us with 8 warps a tile, 44 to 59 with 16, whose accesses are shorter
RAGGED_CARRIED = 2      # numbers more of each where lanes may be idle, and so have counts of their own, which spill else: moments of groups of
                        # channels, GroupNorm from NHWC of 4 x 320 x 60 x 60 f16 19.9 us, 48.8, EvoNorm of 1 x 640 x 96 x 97 24.9, 42.7, of
                        # 1 x 192 x 75 x 75 bf16 9.6, 22.4
SCANNED_THREAD = 64     # elements to a thread of a tile of 64 rows and columns, which begin anywhere, down which prefixes are made, none under way;
SCANNED_MATRICES = 128  # of one of several matrices of 16 bits that begin at words: down 1059 x 2968 x 16 bf16 101 us by one warp, 162 by four, the
                        # last kernel of 500 x 3000 x 32 f16 18.4, 21.0; but of 1000 x 2000 x 16 f32 76.6, 76.1 (H200)
SCANNED_WORDS = 128     # where all begin at words of 4 bytes: along the middle, H100, 10 x 1368 x 2310 bf16 66 us, of 10 x 1000 x 2001 f32 72; of
                        # 25 x 2605 x 385 bf16, by two warps, 118, of 6 x 1249 x 3279 72; 125, 99, 126, 76 in 32 columns by four warps
RAGGED_COLUMNS = 8      # columns of such a tile where there are fewer than twice COLUMNS to a multiprocessor, by one warp: 25 x 2605 x 385 f16 93 us;
RAGGED_SHARE = 32       # half as many, and twice as many rows, where there are fewer than so many: 910 x 1347 bf16 15.2 us, 2000 x 2047 f16 31.9,
                        # 3000 x 501 f32 43.0; 57.4, 65.8 and 133 in 64 x 32 by four warps (H100). Twice as many of 32 bits where there are more than
                        # twice so many: 4504 x 12915 f32 193 us, 289
ACROSS_EACH = 4         # of a tile of `tile_rows.ACROSS_ROWS`: dynamic tanh's gradient of 104 x 65537 f32 32.6 us,
                        # 107 in 64 rows with ROW_THREAD, of 300 x 20001 55.0, 128; but of 500 x 30001 f16 124, 66.8 (H200)
STREWN_EACH = 8         # of a chunk of `tile_rows.STREWN`
ONLY_THREAD = 4         # of all that is folded, by one program, where heavy functions are: the mean of what is made of 1023 logarithms
                        # of sums 5.0 us, 15.1 by one warp (H200)
SPLIT_WORD = 4          # elements of a thread of such a tile, see `tile_blocks.RAGGED_SPLIT`
SEVERAL_FOLDED = 4      # times fewer of columns of several values of 32 bits that are only folded: partial results of 132 programs
                        # over 9216, two of each, 9.4 us in 16 columns,
SEVERAL_TILE = 1024     # so many elements at a time, 16.2 in 64 (H200)
NARROW = 8              # columns at least, of a tile that folds across rows: 32 bytes of f32, one sector


class TileElements(TileFacts):
    """Of a tile whose axes are covered. `pieces`: of each tiled axis; `looped`: row axes that a program runs along; `shift`: where rows begin
    anywhere; `together`: axes that are folded where programs share them."""

    def __init__(self, b: Body, hints: Hints, target):
        super().__init__(b, hints, target)
        self.pieces: dict[Axis, tuple[int, ...]] = {}
        self.looped: set[Axis] = set()
        self.shift: Shift | None = None
        self.together: frozenset[Axis] = frozenset()

    def each_thread(self, dims: tuple[Axis, ...], carries: bool, by_thread: bool) -> int:
        """Elements of a tile to a thread."""
        plain = not self.looped and not self.crossed and self.shift is None
        shares = self.crossed and not self.rows
        each = self._carried_each() if carries or self.several_wide() else ROW_THREAD if self.rows or self.crossed else self._plain_each(dims)
        if self.line in self.together and self.begin_anywhere():
            each = TOGETHER_THREAD
        elif self.line in self.together and self.rows and alike(row := self.pieces[self.rows[0]]):
            each = TOGETHER_PIECE * len(row)
        if plain and self.one_row(dims) and self.stored_along() and self.hints.count(self.b.parallel) <= self.target.threads:
            each = PER_THREAD
        if self.looped and not self.crossed and self.line in self.b.parallel:
            ragged = self.begin_anywhere() and not self.scans_many() and not self._in_one_turn() and not self.folds_words()
            each = self._scanned_each() if self.scans_ragged() else LONE_THREAD if self.lone() else self._ragged_each() if ragged else each
        if plain and self.line in self.rows and self.stored_along() and self.begin_anywhere():
            each = self._stored_anywhere_each(dims)
        short = sum(self.pieces.get(self.line, (0,)))
        if plain and self.rows == [self.line] and short <= SHORT_EACH:
            each = self._short_each(short, each, dims)
        if plain and not self.rows and len(dims) == 2 and self.turned_wide():
            each = TURNED_WIDE
        if plain and not self.rows and len(dims) > 2 and self._turned_anywhere():
            each = TURNED_BYTES // self.narrowest()
        elif plain and self.turned() is not None and any(map(self.writes_within, dims)):
            each = WITHIN_BYTES[self.narrowest() < 4] // self.narrowest()
        each = self._walked_each() or each
        place = plain and self.places() and self.short_anywhere()       # amax and argmax of 314133 rows of 127 32.5 us, 48
        if self.width > 1 and not place and not (shares and any(e.monoid == "moments" for e in self.crossing)):
            each = max(each // self.width, 8)
        if self.looped and self.line not in self.rows and (self.scans_many() or self.scans_several()):
            each = math.prod(sum(self.pieces[a]) for a in dims) // 32 if self.scans_many() else SCANNED_THREAD
        elif self.looped and self.scans_down() and len(dims) > 2 and self.narrowest() < 4 and not self.begin_anywhere():
            each = SCANNED_MATRICES
        elif self.looped and self.scans_along() and self.scans_many_rows():
            each = SCANNED_BYTES // self.narrowest()
        elif self._many_wide():
            each = MIDDLE_THREAD
        if self.scans_few() and sum(self.pieces[self.rows[0]]) > SCANNED_ROWS // 2:
            each = SCANNED_EACH
        each = self._held_each(each, dims)
        if self.rows and self.folds and self.angles():
            each = min(each, ANGLES_THREAD)
        if self.whole_runs():
            each = RUN_THREAD // (2 if self.computes_heavy() else 1)
        if self.narrow_sums():
            return NARROW_THREAD
        if not self.b.parallel and not self.looped and self.heavy(self.folds):
            return ONLY_THREAD
        if self.moments_anywhere():
            return WORD // self.narrowest()
        if self.sums_anywhere():
            return SUMMED_ANYWHERE_THREAD // (self.fewer_anywhere() if by_thread else 2 if self.narrowest() < 4 else 8)
        if by_thread:
            read = {(e.node, e.index): e.dtype.bytes for x in self.crossing for e in walk(*x.args) if isinstance(e, Load) and self.line in e.axes()}
            half = sum(size >= 4 for size in read.values()) > 2 and len(self.crossing) > 1
            if self.angles():
                return ANGLES_THREAD * self.narrowest() // 2
            if len(read) > 1 and self.computes_heavy():
                return HEAVY_THREAD
            return MOMENTS_THREAD if self.moments_wide() else THREAD // 2 if half else THREAD
        ragged = any(e.monoid == "moments" for e in self.crossing) and not all(self.hints.divides(sum(self.pieces[a]), a.extent) for a in dims)
        return min(each, SPLIT_REGISTERS // (self.carried() + ragged * RAGGED_CARRIED)) if shares else each

    def _plain_each(self, dims: tuple[Axis, ...]) -> int:
        """Of a tile in which nothing is folded."""
        if dims == (self.line,):
            rows, columns = self.read_beside()
            if columns:
                return BESIDE_COLUMNS if any(e.dtype.bytes > self.narrowest() for e in columns) else PER_THREAD
            return BESIDE_ROWS if 0 < len(rows) <= ROW_VALUES and not self.angles() else PER_THREAD
        words = len(dims) == 2 and dims[-1] is self.line and self.hints.exactly(self.line.extent) == WORD // self.narrowest()
        many = words and len(self.rows_read()) >= WORD_VALUES and not self.computes_heavy()
        return BESIDE_ROWS if words and self.narrowest() >= 4 or many else PER_THREAD

    def _short_each(self, short: int, each: int, dims: tuple[Axis, ...]) -> int:
        """Of a tile of rows of `short` lanes, held: `each` where nothing else is known."""
        if self.begin_anywhere() and not self.stored_along() and not self.joins_moments():
            return RAGGED_EACH
        if self.few_folded() and len(dims) == 2:
            return PER_THREAD
        if self.stored_narrow():
            return PER_THREAD // 2
        if not self.begin_anywhere() and self.stored_along() and short >= SHORT_FROM:
            few = short == SHORT_HALF and self.narrowest() == 2 and self.hints.count(self.b.axes) <= SHORT_FEW
            return PER_THREAD // 2 if few else PER_THREAD
        return each

    def _held_each(self, each: int, dims: tuple[Axis, ...]) -> int:
        """Of a tile of held columns: `each` of others."""
        if self.short_columns():
            few = math.prod(sum(self.pieces[a]) for a in dims) // (32 * self.narrowest()) or 1  # four warps of 32 bits at least, two of 16
            word = len(self.b.parallel) < 2 or self.fills_wide()
            return SHORT_WIDE_THREAD if self.short_wide() else WORD // self.narrowest() if word else min(2 * ROW_THREAD // self.narrowest(), few)
        if self._columns_alike():
            return (ALIKE_ANYWHERE if self.long_anywhere() else ALIKE_THREAD) * 2 // self.narrowest()
        if self.long_anywhere() and self.narrowest() < 4:
            return LONG_ANYWHERE_THREAD
        return MIDDLE_THREAD if self.held_columns() and self.narrowest() >= 4 and self.begin_anywhere() else each

    def _ragged_each(self) -> int:
        """Of a tile that walks down columns that begin anywhere: fewer where it is narrow (`tile_rows.NARROW_FEW`)."""
        half = COLUMNS // 2
        narrow = self.pieces.get(self.line) == (half,) and self.hints(self.line.extent) > half and self.columns() == COLUMNS
        return RAGGED_THREAD // 2 if narrow or self.few_turns() and self.narrowest() < 4 else RAGGED_THREAD

    def scans_few(self) -> bool:
        """Are prefixes made down few rows of 16 bits, of columns that make one tile of twice SCANNED_COLUMNS or several, at once? Along the middle of
        2558 x 16 x 947 f16 51.5 us, of 172 x 11 x 8193 bf16 25.1, of 6537 x 32 x 211 58.7; 61.1, 27.0 and 84.2 in 64 columns (H200)."""
        if not self.scans_many() or self.looped or self.narrowest() >= 4 or self.hints.count(self.rows) > SCANNED_ROWS:
            return False
        n, most = self.hints(self.line.extent), 2 * SCANNED_COLUMNS
        return n >= 2 * most or most >= n and (most - n) * SCANNED_IDLE <= n

    def moments_anywhere(self) -> bool:
        """Are moments of planes of 32 bits made that begin anywhere and lie apart? BatchNorm in NCHW of 410 x 256 x 7 x 7 f32 17.8 us in half of
        TILE, a word to a thread, 24.4 in all of it, which spills (H200)."""
        several = self.sums_along() and len(self.crossed) > 1 and self.begin_anywhere()
        return several and self.narrowest() >= 4 and any(e.monoid == "moments" for e in self.crossing)

    def moments_wide(self) -> bool:
        """Are moments of 32-bit elements made of contiguous rows that programs share, which begin at words, and in the last tile idle?"""
        ragged = self.sums_along() and self.crossed == {self.line} and not self.begin_anywhere() and not self.hints.divides(TILE, self.line.extent)
        return ragged and self.narrowest() >= 4 and any(e.monoid == "moments" for e in self.crossing)

    def one_row(self, dims: tuple[Axis, ...]) -> bool:
        """Is a tile one contiguous row, held?"""
        return not self.looped and dims == (self.line,) == tuple(self.rows)

    def scans_many_rows(self) -> bool:
        """Are there so many rows that their prefixes are made fewer at a step?"""
        return self.hints.count(self.b.parallel) >= SCANNED_SHARE * self.target.threads

    def _turned_anywhere(self) -> bool:
        """Is a tile read along one axis and written along another, and do rows along either begin anywhere?"""
        other = self.turned()
        return other is not None and (self.begin_anywhere() or begin_anywhere(self.b, other, self.hints))

    def writes_within(self, a: Axis) -> bool:
        """Are short lines along `a` written that begin within sectors, of a pointwise tile, of which there are many?"""
        return WITHIN_LINES[0] <= self.hints(a.extent) <= WITHIN_LINES[1] and self.within_sectors(a, written=True)

    def within_sectors(self, a: Axis, written: bool = False) -> bool:
        """Do lines along `a` (`written`: those that are) begin within sectors, of a pointwise tile, of which there are many?"""
        pointwise = not self.rows and not self.crossed
        many = self.hints.count(self.b.parallel) >= WITHIN_TILES * self.target.threads
        return pointwise and many and begin_anywhere(self.b, a, self.hints, SECTOR_BYTES, written)

    def narrow_sums(self) -> bool:
        """Are few columns of 32 bits that begin at words summed across programs, and no more than a sum?"""
        columns = bool(self.crossed) and not self.rows and self.line in self.b.parallel - self.crossed and not self.down and self.carried() <= 2
        return columns and self.narrowest() >= 4 and self.hints(self.line.extent) < COLUMNS and not self.begin_anywhere()

    def stacked(self) -> bool:
        """Are rows along two axes, several of each, held that begin anywhere, and written?"""
        others = [a for a in self.rows if a is not self.line]
        held = not self.looped and self.line in self.rows and self.stored_along() and self.begin_anywhere()
        several = bool(others) and math.prod(sum(self.pieces[a]) for a in others if a in self.pieces) >= STACKED_ROWS
        return held and several and len(self.rows_read()) > 1

    def _many_wide(self) -> bool:
        """Are many rows of columns of 32 bits held that begin anywhere, and only folded?"""
        held = not self.looped and not self.crossed and self.line in self.b.parallel and bool(self.folds) and not self.stored_along()
        many = self.hints.count(self.rows) > MIDDLE_ROWS and self.hints(self.line.extent) >= COLUMNS
        return held and many and self.narrowest() >= 4 and self.begin_anywhere()

    def sums_ragged(self) -> bool:
        """Are columns of 32 bits that begin anywhere summed across programs?"""
        columns = self.line is not None and self.line in self.b.parallel - self.crossed and self.narrowest() >= 4
        return columns and bool(self.crossed) and not self.rows and not self.statistics() and not self.down and self.begin_anywhere()

    def _scanned_each(self) -> int:
        """Elements to a thread of a tile down which prefixes are made of columns that begin anywhere."""
        if self.columns() < COLUMNS:
            return LONE_THREAD * (2 if self.columns() > RAGGED_COLUMNS else 1)
        return SCANNED_THREAD if begin_anywhere(self.b, self.line, self.hints, 4) else SCANNED_WORDS

    def fewer_anywhere(self) -> int:
        """Times fewer elements of rows that begin anywhere, programs share, and many sums are made of."""
        return MANY_ANYWHERE if self.crossed == {self.line} and len(self.crossing) >= MANY_ANYWHERE else 1

    def short_columns(self) -> bool:
        """Are short columns held that begin anywhere, and written?"""
        if not self.held_columns() or sum(rows := self.pieces[self.rows[0]]) > SHORT_COLUMN or not self.begin_anywhere():
            return False
        return len(rows) == 1 or self.many_columns()

    def short_wide(self) -> bool:
        """Are columns of one matrix of 32 bits, of SHORT_COLUMN rows or some fewer, held that begin anywhere, and written?"""
        held = self.held_columns() and len(self.b.parallel) == 1 and self.begin_anywhere() and self.narrowest() >= 4 and not self.target.ordered
        n = self.hints.exactly(self.rows[0].extent) if held else None
        few = n is not None and power(n) == SHORT_COLUMN and (SHORT_COLUMN - n) * SHORT_IDLE <= SHORT_COLUMN
        return few and self.hints(self.line.extent) > COLUMNS

    def many_columns(self) -> bool:
        """Are there several matrices, of columns for several tiles of SHORT_COLUMNS?"""
        return len(self.b.parallel) > 1 and self.hints(self.line.extent) >= 2 * SHORT_COLUMNS

    def fills_wide(self) -> bool:
        """Are there, of 32 bits, and is no lane of a column idle? Not in pieces of two lengths, the shorter of which would leave most threads idle:
        softmax of 183 x 18 x 2774 f32 33.1 us by four warps, 179 by 16 (H200)."""
        row, = self.rows
        n = sum(self.pieces[row])
        one = len(set(self.pieces[row])) == 1 or n % 8 == 0         # which are alike then (`tile_alike`)
        return self.many_columns() and self.narrowest() >= 4 and one and n == self.hints.exactly(row.extent)

    def long_anywhere(self) -> bool:
        """Are long columns that begin anywhere held and written?"""
        return self.held_columns() and sum(self.pieces[self.rows[0]]) > LONG_ANYWHERE and self.begin_anywhere()

    def _columns_alike(self) -> bool:
        """Are columns held in several equal pieces, and written?"""
        return self.held_columns() and alike(self.pieces[self.rows[0]])

    def held_columns(self) -> bool:
        """Are columns, down one axis, held and written, and nothing folded across programs?"""
        return self.folds_down() and self.stored_along()

    def folds_down(self) -> bool:
        """Are columns folded down one axis that a program has all of?"""
        plain = not self.looped and not self.crossed and self.shift is None and len(self.rows) == 1 and self.rows[0] in self.pieces
        return plain and self.line in self.b.parallel and bool(self.folds)

    def _in_one_turn(self) -> bool:
        """Are rows of 32 bits, of one of several matrices, that a program runs through no longer than a turn?"""
        return self.narrowest() >= 4 and len(self.b.parallel) > 1 and all(self.hints(a.extent) <= sum(self.pieces.get(a, (1,))) for a in self.looped)

    def short_piece(self) -> bool:
        """Are contiguous rows, alone, one short piece?"""
        row = self.pieces.get(self.line, ())
        return self.rows == [self.line] and len(row) == 1 and row[0] <= SHORT_LANES

    def short_anywhere(self) -> bool:
        """Are they, of 16 bits, and begin anywhere?"""
        return self.short_piece() and self.narrowest() <= 2 and self.begin_anywhere()

    def one_piece(self) -> bool:
        """Is a row of 16 bits one short piece, a warp's width?"""
        return self.narrowest() == 2 and len(self.pieces[self.line]) == 1 and 16 < self.pieces[self.line][0] <= 32

    def _stored_anywhere_each(self, dims: tuple[Axis, ...]) -> int:
        """Elements to a thread of held rows that begin anywhere and are written."""
        stacked = math.prod(sum(self.pieces[a]) for a in dims) > STACKED and self.stacked()
        stacked = stacked or len(self.rows) > 1 and sum(self.pieces.get(self.line, (1,))) < SHORT_RUN * 4
        return PIECE_EACH * (4 if self.many_short() else 1) if self.one_piece() else PER_THREAD if stacked else RAGGED_EACH

    def _walked_each(self) -> int:
        """The same of tiles of sums that begin anywhere, and of what programs run through and write, or fold along several axes; 0 of others."""
        if self.sums_ragged():
            return SPLIT_WORD
        if not self.looped:
            return 0
        return ACROSS_EACH if self.writes_across() else STREWN_EACH if self.strewn() else WORD // self.narrowest() if self.writes_several() else 0

    def _carried_each(self) -> int:
        """Elements of a row to one thread where column sums are carried."""
        widest = max((size for _, address, size in strides_of(self.b) if self.line in address.axes() and address.axes() & self.crossed), default=4)
        return min(CARRY_THREAD, 4 * CARRY_THREAD // widest)

    def columns(self) -> int:
        """Columns of a tile that folds across rows: narrow where there are few, so that there are programs for every multiprocessor."""
        if self.line is None or self.crossed:
            return COLUMNS
        share = self.hints.count(self.b.parallel) // self.target.threads
        share = share // SEVERAL_FOLDED if self.folds_several() else share
        if self.scans_ragged():
            wide = 2 if self.narrowest() >= 4 and share >= 2 * RAGGED_SHARE else 1
            few = RAGGED_COLUMNS * wide if share >= RAGGED_SHARE else RAGGED_COLUMNS // 2
            return COLUMNS if share >= 2 * COLUMNS else few
        return max(NARROW, min(COLUMNS, power(share + 1) // 2))

    def writes_several(self) -> bool:
        """Does a program run through lines that begin anywhere, of several axes, and write them?"""
        several = len(self.rows) > 1 and self.line in self.rows and bool(self.looped)
        return several and self.stored_along() and self.begin_anywhere() and not self.angles()

    def folds_several(self) -> bool:
        """Are columns of several values of 32 bits that begin at words only folded (partial results, mostly), a few tiles of them to each
        multiprocessor?"""
        several = len({(e.node, e.index) for e in walk(*exprs_of(self.b)) if isinstance(e, Load)}) > 1
        columns = self.line in self.b.parallel and bool(self.folds) and not self.crossed and not self.stored_along() and not self.scans()
        one, share = COLUMNS * self.target.threads, self.hints.count(self.b.parallel)
        return columns and one <= share < SEVERAL_FOLDED * one and several and self.reads_wide() and not self.begin_anywhere()

    def few_folded(self) -> bool:
        """Are aligned rows only folded, and are there too few for programs of FOLDED bytes?"""
        return self._aligned_rows() and not self.stored_along() and self.spread() < FOLDED // self.narrowest()

    def spread(self) -> int:
        """Elements of tiles of which a multiprocessor has SPREAD."""
        return power(self.hints.count(self.b.axes) // (SPREAD * self.target.threads))

    def stored_narrow(self) -> bool:
        """Are short aligned rows of 32 bits held and written, whose length is no power of two?"""
        short = len(self.pieces.get(self.line, ())) > 1 and self.hints(self.line.extent) < SHORT_FROM
        return short and self._aligned_rows() and self.stored_along() and self.narrowest() >= 4

    def _aligned_rows(self) -> bool:
        """Are contiguous rows, alone, held that begin at words?"""
        return self.rows == [self.line] and not self.looped and not self.crossed and not self.begin_anywhere()

    def whole_runs(self) -> bool:
        """Does a tile of looped rows hold whole contiguous runs of theirs, side by side?"""
        return bool(self.looped) and not self.crossed and self.line in self.rows and self.line not in self.looped

    def few_turns(self) -> bool:
        """Does a program walk down few rows of many columns of one matrix that begin anywhere, and only fold?"""
        plain = len(self.rows) == 1 and not self.crossed and not self.stored_along() and not self.scans() and bool(self.folds)
        few = plain and len(self.b.parallel) == 1 and self.line in self.b.parallel and self.hints.count(self.rows) <= FEW_TURNED
        return few and self.hints(self.line.extent) >= FEW_SHARE * COLUMNS * self.target.threads and self.begin_anywhere()

    def lone(self) -> bool:
        """Do programs walk down the narrowest tiles of columns, no more of them than multiprocessors, and only fold?"""
        few = self.line in self.b.parallel and self.columns() == NARROW and self.hints.count(self.b.parallel) <= NARROW * self.target.threads
        return bool(self.looped) and not self.crossed and few and not self.stored_along()
