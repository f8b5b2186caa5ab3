"""What threads a tile of a GPU has: warps, programs of a multiprocessor, registers, rows under way. Every threshold is a named constant with what it
was measured on; `tile_rows` and `tile_blocks` choose the pieces, `tile_elements` how much of them a thread has."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..ir.expr import Load, Reduce, walk
from ..ir.index import Axis
from . import tile_statistics
from .body import exprs_of
from .schedule import strides_of
from .tile_access import LINE, begin_anywhere, fits
from .tile_elements import CARRY_THREAD, SHORT_COLUMN, SHORT_RUN, TOGETHER_THREAD, TileElements
from .tile_facts import WORDS_OF
from .tile_schedule import alike
from .tile_stages import power
from .tile_statistics import BLOCK_WARPS, WORD

CARRY_PIECE = 32        # columns of each of the pieces of short rows that are all alike (`tile_alike.CARRY_SHORT`),
CARRY_ALIKE = 4         # which so many warps have; of more pieces than
CARRY_PIECES = 4        # so many, half as many programs
EVEN_ANYWHERE = 64      # rows at most that are held in equal pieces beside columns that begin anywhere, are summed and alone in a tile, by as many
                        # warps, too, with as many registers as they take: 9 x 39 x 127837 bf16 142 us, 280 (H100); but 13 x 1023 x 1826, two pieces
                        # of 512, 993 so, which spill 3648 bytes, 117 as `held_columns`
TWO_WARPS = 512         # elements of a tile of rows that begin anywhere and are written, of at most a warp's width in one piece, at no words of 8
                        # bytes, from which on it has two warps: a multiprocessor has no more than 32 programs. LayerNorm of 4194303 rows of 15 f16
                        # 117 us, 130, of 552509 of 31 f32 51.7, 56.1, log-softmax of 2082998 of 15 f32 110, 159; but RMSNorm of 4194303 of 21 f16,
                        # of 16 + 8, 140, 128
KEPT_REGISTERS = 64     # of a thread, as counted, from which on half of RESIDENT warps keep weights beside rows of 16 bits that begin anywhere, each
                        # CARRY_STAGES rows under way: LayerNorm of 65536 rows of 257 and 513 22.3 and 38.5 us, 25.3 and 47.6 a row at a time by
                        # RESIDENT warps; of 8192 of 511 7.5, 8.9; of 4096 of 257 and 1025, two rows at least a warp, 3.9 and 7.5, 5.1 and 9.5
KEPT_WORDS = 512        # elements of such a row at most; of longer ones so many rows a multiprocessor at most: LayerNorm of 16384 rows of 1023 21.6
KEPT_FEW = 128          # us, 22.8
TURNING_WARPS = 20      # warps of a multiprocessor up to which, several of a program,
TURNS = 1.5, 20         # and rows of a program from which on, up to which, CARRY_STAGES are under way: a Python LayerNorm of 768 rows of 5820 f16
                        # 9.8 us, of 1500 of 6001 bf16 17.7, of 4887 of 8191 62.3, of 348 of 13090 f32 18.4, LayerNorm of 2000 of 3001 bf16 12.0, of
                        # 900 of 4097 f16 8.2, of 7490 of 2641 40.6; 12.1, 21.8, 66.6, 23.3, 14.6, 9.4 and 54.9 a row at a time; but of 16388 of 4095
                        # bf16 104.6, 99.5, RMSNorm of 1611 of 4097, by 24 warps of a multiprocessor, 12.4, 11.5, dropout and LayerNorm of 7938 of
                        # 2612 f16 176, 148 (H100)
DRAWN_EACH = 8          # elements at least to a thread of a held row that begins anywhere, by which random numbers are drawn, a row to a program, and
DRAWN_WARPS = 2         # warps for each byte of an element up to which it has so few: dropout and LayerNorm of 1875 x 940 f16 15.1 us, of 9751 x 1023
                        # bf16 59, of 5852 x 1899 f16 66, of 1200 x 2733 bf16 24.4, of 1023 x 6389 f32 47, the first kernel of its training of
                        # 1696 x 1224 bf16 18.9, of 3134 x 1613 36.9, of 11008 x 2049 f32 159; 19.5, 67, 107, 34, 61, 29.4, 58 and 299 by programs
                        # of one to eight warps that keep the weights and take rows one after the other; of 27601 x 511 bf16 81, 80 (H100)
MIDDLING = 257, 512     # elements of rows of 32 bits beside which sums are carried, held in one piece by
MIDDLING_IDLE = 0.25    # where so few lanes of each element are idle or rows begin at words,
MIDDLING_WARPS = 4      # so many warps,
MIDDLING_RESIDENT = 2   # such programs of a multiprocessor, CARRY_STAGES under way: LayerNorm backward of 2500 x 300 f32 7.9 us, of 2680 x 416 8.8,
                        # of 3001 x 501 11.9; 10.9, 11.0 and 15.0 in eight rows by eight warps, one at a time (H200)
CARRIED_LONG = 8192     # elements of a row of 16 bits that begins anywhere, beside which sums are carried, from which on
LONG_CARRYING = 8       # so many warps have it, all of a multiprocessor's registers:
                        # LayerNorm backward of 1500 x 9001 bf16 49.7 us, of 835 x 10868 43.1; 54.7 and 52.0, which spill 104 bytes (H200)
IN_TWO = 4, 8           # warps of a program that carries sums beside rows of 32 bits that begin anywhere, whose words are two pieces, several rows
                        # under way: LayerNorm's gradient of 8192 x 2337 74.7 us, 96.3 a row at a time, RMSNorm's 68.3, 75.6, a Python LayerNorm's of
                        # 5000 x 3001 84.0, 97.1, of 20000 x 1501 139, 165, RMSNorm's of 16383 x 1511 86.9, 84.8; but in one piece of 3000 x 4097
                        # 51.4, 48.2, by fewer warps LayerNorm's of 20000 x 1023 78.5, 74.5, of 30000 x 701 82.3, 75.0 (H200)
LINES_WARPS = 8         # of tiles of rows of 32 bits along two axes that begin anywhere, where they have between half and all of
LINES_EACH = 32         # so many elements to a thread, beside three sums or more: EvoNorm backward in NCHW of 28 x 768 x 15 x 15 f32 47.7 us, 64.6
                        # by 16, which spill 304 bytes; but of 40 x 512 x 13 x 15, by four, 38.1, 27.6 (H200)
CARRIED_MOST = 136      # registers of a thread, as counted, from which on a program that carries sums beside a tile of rows has more warps,
CARRIED_EXACT = 170     # where they lie along two axes and no lane is idle, and
CARRIED_WIDE = 96       # where they are three sums or more of 32 bits, fewer than
CARRIED_ROOM = 48       # so many below those that it may have, and
CARRIED_LEAST = 4       # so many elements to a thread at least: LayerNorm backward with dropout of 1798203 x 17 bf16 186 us, 246 spilled, of
                        # 103541 x 26 23.2, 27.2, of 200000 x 63 f32, 64 rows at a step, 151, 172 by eight warps, 329 with rows under way, too
                        # (H100), EvoNorm backward of 46 x 480 x 15 x 15 f32 52, 78, of 240 x 320 x 7 x 7 bf16 47, 70; but of
                        # 399 x 512 x 7 x 7 f16 57, 65, of 1 x 2048 x 56 x 56 f32 in NHWC 32.4, 34, LayerNorm backward with
                        # dropout of 13933 x 512 bf16, which has 255, 48.5, 54.0
FEW_THREAD = 8          # at least of looped rows, where programs are too few for RESIDENT warps of a multiprocessor: place of the greatest element of
                        # 285 rows of 93565 bf16 27.6 us by 16 warps, 49.9 by four of ROW_THREAD, dropout and LayerNorm of 529 of 131073 bf16 1145
                        # by eight, 1407 by four (H100),
FEW_RESIDENT = 16       # where they are only folded, for so many: EvoNorm's backward sums of 17 x 320 x 28 x 28 f16 17.4 by eight, 30.1 by two; bf16
                        # sums of 64 rows of 16383 3.3, 5.2, cross entropy of 167 of 16383 f16 8.1, 10.7 by 16 and four; but sums of 287 of 39658
                        # f16 84.8 by four, 90.5 by 16 (H100)
MOST_WARPS = 16         # of a program
CARRY_WARPS = 32        # of one that carries the sums of columns, lane by lane: RMSNorm backward along the middle of 16 x 1024 x 4096 bf16, which
                        # folds them at each step, 144 us by MOST_WARPS, 154
SHORT_SUM_WARPS = 8     # of a program that sums a row of 16 bits of less than gpu.LONG_SUM bytes, in chunks of `tile_facts.CHUNK`: bf16 sums of 1827
                        # rows of 9184 and 3000 of 12000 11.6 and 21.1 us, f16 L2 norms of 537 of 7816 4.7; 12.4, 22.2 and 6.6 in chunks of twice as
                        # many by half the warps
PASSING_WARPS = 4       # of a program whose rows pass through chunks of 16384 bytes: eight 16-byte words a thread under way
SUMMED_WARPS = 16       # and of one that sums chunks of SUMMED_BYTES: f16 sums of rows of 65536 and 4194304 89 and 84%, 83 and 82 as other rows; with
                        # 8 warps 84 and 82. Cross entropy loses, 89 to 84 with 8 warps
LONG_WARPS = 32         # of a program that folds a long row of 32-bit elements to one number, half as many of 16 bits: more programs than run at
                        # once share out the memory evenly. f32 sums of 1024 rows of 32768 35.5 us, 39.0 with PASSING_WARPS; of 512 of 65535 37.1,
                        # 41.8; of 2048 of 16384 34.7, 38.3; bf16 of 1024 of 16384 12.5, 12.9, 12.7 with twice as many; f16 of 512 of 65535 and 1024
                        # of 32767, in tiles of SUMMED_BYTES, 20.3 and 20.1, 22.6 and 21.4
HELD_WARPS = 16         # of a program that sums a held row of 32-bit elements, HELD_SUM bytes at least, which begins anywhere: f32 sums of 16384 rows
HELD_SUM = 12 << 10     # of 4095 and 8192 of 4097 63.7 and 33.2 us, 67.9 and 35.3 by four; of 4096 of 3501, whose words are two pieces, 22.6, 17.2.
                        # And of a looped one of one turn: f32 sums of 8192 rows of 4097 48.3 us, 51.1 with PASSING_WARPS; by LONG_WARPS of more: L2
                        # norms of 3604 of 7610 38.9, 43.6 (H100)
HELD_REGISTERS = 64     # of a thread of programs that hold rows of 32 bits for nested sums, with HELD_EACH elements of each to a thread, where all
HELD_EACH = 32          # run at once so: f32 LayerNorm of 512 rows of 8192 and 1024 of 4096 11.0 and 10.7 us, 13.2 and 13.0 with more registers.
                        # RMSNorm, of one sum, spills so: 11.7 and 11.6, 11.1 and 10.7
WORDS_WARPS = 8         # of programs that share rows that begin anywhere: f16 sums of 8 rows of 131073 4.1 us, 5.4 with half as many
RESIDENT = 32           # warps a multiprocessor should have in flight
CARRY_RESIDENT = 16     # the same where folds across programs are carried: the fewer programs, the fewer partial results to fold
DOWN_EACH = 26          # elements at most, more than CARRY_THREAD, to a thread of a tile of 16 bits, of a group of channels, see `carries_down`; of
                        # fewer EvoNorm backward in NHWC of 200 x 160 x 15 x 15 bf16 81.6 us, 66.6 (H200)
DOWN_WARPS = 8          # of programs that walk down blocks of 16 bits that begin anywhere, and carry one sum,
DOWN_FROM = 112         # rows from which on (fewer are as quick by twice as many),
DOWN_RESIDENT = 3       # of which a multiprocessor has so many: GELU's backward with its bias of 113 x 85455 bf16 30.7 us, of
                        # 300 x 20001 f16 22.2; 39.3 and 22.9 by twice as many, one row under way (H200)
DOWN_TURNS = 32         # rows at least to each of two such programs, which have 16 warps and walk down blocks of long columns that they write, too:
                        # LayerNorm backward of 256 rows of 262144 bf16 178 us, 193 by one of each multiprocessor
REGISTERS = 65536       # of a multiprocessor
DOWN_FOLDED = 128       # elements to a thread of a tile of columns that are only summed: sums down 16 x 256380 bf16, 16 x 128 a tile, 10.6 us by four
                        # warps, 7.2 by one, means under a mask of 1422 x 4 x 1708 21.6, 12.4, statistics of 65 x 112 x 2288 33.7 by eight, 16.7 by
                        # two, of 2525 x 128 x 104 f32 62.2, 41.5 (H200),
DOWN_WRITTEN = 64       # and of one of columns that are written, too, by DOWN_LEAST warps at least: LayerNorm of channels of 207 x 192 x 40 x 40 f16
DOWN_LEAST = 4          # 95.4 us by eight, 71.5 by four, of 10 x 192 x 112 x 112 f32 81.4 by 16, 55.8, RMSNorm along the middle of 265 x 127 x 846
                        # f16 54.2, 46.6, FRN in NHWC of 591 x 128 x 16 x 16 bf16 32.5 by 16, 29.1 by eight; but response norm of 6161 x 96 x 8 x 8,
DOWN_IDLE = 8           # one lane in four idle, 45.7, 52.5, and softmax's gradient of 66 x 255 x 4400, of two values, 143, 200; so many lanes for an
DOWN_PROGRAMS = 8       # idle one, programs for each multiprocessor at least, and words at which columns begin, of so many
DOWN_WORDS = 2          # elements, whole ones where more than so many rows are only folded (f32 sums of 107 x 55 x 8790: `tile_elements.MIDDLE_ROWS`)
DOWN_ROWS = 16
BESIDE = 16             # registers of a thread beside those that hold a row and column sums: with the programs of a multiprocessor thus counted
                        # LayerNorm backward over 768 columns reaches 79% (66 where the last of them began when the first had ended), forward over
                        # 4095 77 (63), RMSNorm 90 (84)
PASSING_STAGES = 2      # tiles under way at once where exponentials of 32-bit elements are summed; where elements are folded as they are, one: f32
                        # sums of 64 rows of 262144, which programs share, 20.8 us, 23.9 with two, of 2048 of 16384 38.3, 42.0
CARRY_STAGES = 3        # rows under way at once in a loop that carries column sums: 77 to 85, 73 to 87, 76 to 89% (aligned rows); bf16 rows that
                        # begin anywhere, over 1023 and 4097 columns, 74 to 84 and 72 to 75, f32 64 to 62. Loops across rows lose up to nine tenths
                        # with more than one
COLUMN_STAGES = 2       # tiles under way where programs of several warps walk down columns that begin at words, and only fold one value; of 32 bits
COLUMN_FEW = 6          # where they are fewer than so many for each multiprocessor: sums along the middle of 3 x 1792 x 6072 f32 51.6 us, of
                        # 403 x 2146 x 80 f16 56.9, of 23 x 1256 x 1728 bf16 41.6, of 1023 x 44304 bf16 37.9; 109, 77.6, 51.4 and 45.4 with one; but
                        # of 1024 x 65536 f32 101.7, 97.1 (H100)
LONG_DRAWN_WARPS = 8         # at most of a held row that begins anywhere beside which random numbers are drawn, so many elements to a thread:
LONG_DRAWN = 32, 48     # LayerNorm with dropout and a residual of 1462 x 9814 bf16 96.1 us, 115 by twice as many (H200)
STAGED = 160 << 10      # bytes of shared memory at most that hold rows under way
TURNED_WARPS = 4        # of a program that sums contiguous rows of which another value lies along another axis, in tiles of half of TILE,
TURNED_RESIDENT = 6     # CARRY_STAGES under way, as many registers as it takes: sums of InstanceNorm3D backward in NDHWC with a gradient in NCDHW of
                        # 992 x 16 x 16 x 16 x 16 f16 91 us, of 7 x 8 x 33 x 33 x 33 bf16 16.2; 138 and 21.6 in TILE by eight, which spill. One
                        # where rows begin at words of 4 bytes alone, which are copied word by word: of a LayerNorm of 3000 x 64 x 58 bf16,
                        # transposed, 33.5, 80 (H200)
WALKED_STAGES = 4       # tiles under way where programs run down columns that begin at words, fold what they share and write: global response norm's
                        # gradient in NHWC of 30 x 64 x 56 x 56 f16 29.1 us, 67.4 a tile at a time, of 8 x 512 x 28 x 28 bf16 17.8, 34.0, of
                        # 16 x 192 x 32 x 32 f32 20.2, 33.5; 36.6, 18.1 and 22.3 with CARRY_STAGES (H200)
LANES = 32              # rows of a tile from which on several are under way: with fewer, what is one number a row is laid out again and again: f16
                        # LayerNorm backward over 256 and 512 columns 38 and 57%, 80 and 70 with one


@dataclass(frozen=True)
class Threads:
    """Warps of a program, programs of a multiprocessor, rows under way, registers of a thread (0: not capped). `by_thread`: each thread folds its own
    elements; `reread`: rows are read again, since a multiprocessor has no registers for one."""
    warps: int
    resident: float
    stages: int
    registers: int
    by_thread: bool
    reread: bool


class TileThreads(TileElements):
    """Of a tile whose axes are covered."""

    def threads(self, dims: tuple[Axis, ...], split: tuple[Axis, ...], several: bool) -> Threads:
        """Of programs that share the axes `split` of a tile of `dims`; `several`: rows of statistics that enter at once."""
        known = self._known(dims)
        if known is not None:           # bf16 sums of 17 arrays, written turned beside sums of their rows, wanted 264 KB
            return known if fits(known.stages, self.b, self.pieces, {*split, *self.looped}) else replace(known, stages=1)
        elements = math.prod(self.pieces[a][0] if self.words_shared(a) else sum(self.pieces[a]) for a in dims)
        columns = self.line in self.together
        carries = self.carries or self.down or columns
        one = self.carries and self.one_row(dims)
        shares = self.crossed and not self.rows
        staged = self.staged_columns() and not several
        by_thread = dims == (self.line,) and self.sums_along()
        each = self.each_thread(dims, carries, by_thread)
        down = self.carries_down(dims)
        lines = len(dims) == 2 and self._lines_anywhere(elements)
        if lines:
            each = LINES_EACH
        elif down:
            each = max(1, elements // (32 * CARRY_ALIKE)) if len(dims) == 2 else each * 2 if self.narrowest() >= 4 else each
        words = self.streams() and self.words_shared(self.line)
        most = CARRY_WARPS if carries and not one and not columns or self.stacked() else MOST_WARPS
        warps = tile_statistics.WORD_WARPS if several else self._warps(dims, elements, each, most, words)
        warps = min(warps, self._abreast(dims)) if self._folds_alone(dims) else self.down_columns(dims, elements, warps)
        long = one and self.shift is not None and self.narrowest() < 4 and CARRIED_LONG < self.hints(self.shift.words) <= 2 * CARRIED_LONG
        each_drawn = elements / (32 * LONG_DRAWN_WARPS)
        drawn = self.draws() and not self.carries and self.shift is not None and LONG_DRAWN[0] <= each_drawn <= LONG_DRAWN[1]
        warps = min(warps, LONG_CARRYING) if long else min(warps, LONG_DRAWN_WARPS) if drawn else warps
        # one-warp LayerNorm and RMSNorm over 1023: 83 and 88%, 65 and 78 when counted
        counted = carries or split and not self.crossed and warps > 1
        stay = tile_statistics.resident(self) if several else max(1, RESIDENT // (PASSING_WARPS if words or self.narrow_sums() else warps))
        if (self.carries or self.several_wide()) and not one and not columns and len(dims) == 2 and not down:
            warps = warps if lines else self._carrying(warps, elements)
        real = self.hints(self.line.extent) if one and alike(self.pieces[self.line]) else elements
        held = 2 * TOGETHER_THREAD if each == TOGETHER_THREAD and columns else real // (32 * warps)
        resident = self._holding(warps, held) if counted else stay
        keeps = bool(split) and self._keeps_weights(warps)
        if keeps:
            rows = self.hints.count(self.b.parallel) / self.target.threads
            resident = resident // 2 if self._registers(held) >= KEPT_REGISTERS else min(resident, max(resident // 2, rows / 2))
        reread = one and self.shift is None and resident == 0         # 59 to 68%, from 37 to 62; shifted rows lose, 55 to 49
        resident = max(1, resident)
        at_once = not split and self._at_once(dims, warps, elements)
        resident = REGISTERS // (32 * warps * HELD_REGISTERS) if at_once else resident
        # left open, a third of the programs would not run at once; but most rows that begin anywhere spill
        spills = by_thread and self.begin_anywhere() and (self.narrowest() < 4 or len(self.crossing) > 1 or self.shift is None)
        full = shares and self.carried() > 2 and not staged and not spills
        if full and not by_thread and not several:         # sums of GroupNorm backward in NHWC of 24 x 768 x 40 x 40 f32 94 us, 109 spilled
            need = BESIDE + elements // (32 * warps) * self.carried()
            resident = max(1, min(resident, REGISTERS // (32 * warps * need)))
        beside = lines or len(dims) > 2 and self.carries_lines()
        under_way = beside or staged or keeps or split and (self._takes_rows(warps, resident) or self._in_two(warps))
        stages = 1 if reread else CARRY_STAGES if under_way else self.stages()
        stages = stages if fits(stages, self.b, self.pieces, {*split, *self.looped}) else 1
        fewer = split and not keeps and resident < RESIDENT // warps and not (down or beside or long)
        capped = at_once or full and not (by_thread and self.angles()) or fewer
        if several and tile_statistics.short(self):
            return Threads(tile_statistics.SHORT_WARPS, resident, stages, 0, by_thread, reread)
        return Threads(warps, resident, stages,
                       min(REGISTERS // (32 * warps * resident) // 8 * 8, 255) if capped else 0, by_thread, reread)

    def _known(self, dims: tuple[Axis, ...]) -> Threads | None:
        """The same of kinds of tiles that have their own, whatever a thread has of them."""
        columns = self.line in self.together
        if self.carries_alike() or columns and self.held_anywhere():
            few = columns or len(self.pieces[self.line]) > CARRY_PIECES
            return Threads(CARRY_ALIKE, RESIDENT // CARRY_ALIKE // (2 if few else 1), 1, 0, False, False)
        if tile_statistics.by_blocks(self, self.pieces):
            return Threads(BLOCK_WARPS, tile_statistics.BLOCKS, CARRY_STAGES, 0, False, False)
        if self.carries_middling() and len(dims) == 2:
            return Threads(MIDDLING_WARPS, MIDDLING_RESIDENT, CARRY_STAGES, 0, False, False)
        if self.carries_shortest():
            warps = CARRY_ALIKE if self.narrowest() >= 4 else 2 * CARRY_ALIKE
            return Threads(warps, RESIDENT // warps, 1, 0, False, False)
        if self.carries_one_piece():
            return Threads(1, CARRY_RESIDENT, CARRY_STAGES if self.begin_at_words(WORDS_OF) else 1, 0, False, False)
        if self.scans_pieces():
            return Threads(1, RESIDENT, 1, 0, False, False)
        if self.walks_anywhere():
            return Threads(DOWN_WARPS, DOWN_RESIDENT, CARRY_STAGES, 0, False, False)
        if self.sums_turned() and len(dims) > 1:
            narrow = any(begin_anywhere(self.b, a, self.hints) and not begin_anywhere(self.b, a, self.hints, 4) for a in (self.line, self.turned()))
            return Threads(TURNED_WARPS, TURNED_RESIDENT, 1 if narrow else CARRY_STAGES, 0, False, False)
        return None

    def walks_anywhere(self) -> bool:
        """Do programs walk down blocks of 16 bits that begin anywhere, of DOWN_FROM rows at least, and carry one sum?"""
        return self.walks_plainly() and self.shift is not None and self.narrowest() < 4 and self.hints.count(self.crossed) >= DOWN_FROM

    def carries_shortest(self) -> bool:
        """Is one sum carried beside rows that begin anywhere, of a warp's width at most, in two pieces? By four warps, of 16 bits eight: RMSNorm
        backward of 625111 x 22 f32 47.2 us, of 400003 x 27 45.9; 101, which spills 184 bytes by one, and 70.4; but LayerNorm of 600001 x 21 80.9,
        57.2 (H200)."""
        row = self.pieces.get(self.line, ())
        alone = self.carries and self.rows == [self.line] and len(self.pieces) == 2 and not self.looped and self.shift is None
        return alone and len(self.crossing) == 1 and len(row) == 2 and sum(row) <= CARRY_PIECE and self.begin_anywhere()

    def carries_alike(self) -> bool:
        """Are sums carried along short rows, several of which lie in equal pieces of a warp's width?"""
        row = self.pieces.get(self.line, ())
        return self.carries and self.line in self.rows and len(self.pieces) == 2 and len(row) > 1 and set(row) == {CARRY_PIECE}

    def carries_down(self, dims: tuple[Axis, ...]) -> bool:
        """Are three sums and more carried along rows in several equal pieces down columns, of several of what is beside to a tile? They take
        more registers than are counted: EvoNorm backward in NHWC of 1511 x 96 x 7 x 7 bf16 78 us, of 359 x 128 x 7 x 7 f32 33.3, by four warps each;
        with 128 registers 101 and, by eight, 43.8, which spill 416 and 208 bytes; of 77 x 320 x 14 x 14 f16, a group of channels at a time, 36.3,
        46.3 (H200)."""
        down = any(alike(self.pieces[a]) and len(self.pieces[a]) > 2 for a in self.rows if a in self.pieces and a is not self.line)
        few = self.narrowest() < 4 and CARRY_THREAD < math.prod(sum(self.pieces[a]) for a in dims) / (32 * CARRY_ALIKE) <= DOWN_EACH
        return self.carries and (len(dims) > 2 or len(dims) == 2 and few) and len(self.crossing) > 2 and down

    def carries_middling(self) -> bool:
        """Are one or two sums carried beside rows of 32 bits of a middling length? Two, and few lanes idle, where they begin anywhere."""
        row = sum(self.pieces.get(self.line, (0,)))
        alone = self.carries and self.rows == [self.line] and not self.looped and self.shift is None
        if not alone or self.narrowest() < 4 or len(self.crossing) > 2 or not MIDDLING[0] <= row <= MIDDLING[1]:
            return False
        n = self.hints(self.line.extent)
        return not self.begin_anywhere() or len(self.crossing) == 2 and power(n) - n <= MIDDLING_IDLE * n

    def carries_lines(self) -> bool:
        """Are three sums and more of 32 bits carried beside rows along two axes, the contiguous one the longer? A tile has few of them, several tiles
        under way and as many registers as they take (`tile_alike.LINES_HELD`)."""
        lengths = [self.hints(a.extent) for a in self.rows]
        return self.carries and self.several_wide() and len(self.rows) == 2 and self.line in self.rows and self.hints(self.line.extent) > min(lengths)

    def _lines_anywhere(self, elements: int) -> bool:
        """Does a tile of so many elements have them, begin anywhere, and fill half of LINES_WARPS with LINES_EACH to a thread at least?"""
        return self.carries_lines() and self.begin_anywhere() and LINES_EACH * 16 * LINES_WARPS < elements <= LINES_EACH * 32 * LINES_WARPS

    def carries_one_piece(self) -> bool:
        """Are sums carried along short rows that begin anywhere, the shorter of them at no words of 4 bytes, and are one piece? A Python LayerNorm's
        backward of 524287 rows of 62 f16 126 us so, 109 by two warps, of 251065 of 63 71, 145. Several rows are under way where they begin at
        words: LayerNorm backward of 19122 of 124 bf16 15.8 us, of 30000 19.4, 22.6 and 24.9 with one (H200)."""
        return self.carries and not self.looped and self.short_anywhere() and (self.pieces[self.line][0] > 64 or not self.begin_at_words(4))

    def scans_pieces(self) -> bool:
        """Are prefixes made down columns that begin at words and are held in several equal pieces? One warp has all rows of its columns, and hands
        nothing on to another: along the middle of 40 x 49 x 2132 bf16 10.8 us, of 61 x 50 x 5552 31.4, of 761 x 50 x 80 f32 13.0; 19.9, 60.2 and 22.3
        by two or four; but of 690 x 49 x 511 f16, which begin anywhere, 39.6, 35.2 (H100)."""
        return self.scans_down() and not self.looped and not self.begin_anywhere() and alike(self.pieces[self.rows[0]])

    def _folds_alone(self, dims: tuple[Axis, ...]) -> bool:
        """Does a tile hold short columns of several matrices that begin at words, so that a thread may fold them by itself? RMSNorm along the
        middle of 900 x 16 x 1024 f16, four matrices of 64 columns, 20.2 us by one warp, 39.5 by four (H200)."""
        return len(dims) == 3 and self.folds_down() and not self.begin_anywhere() and sum(self.pieces[self.rows[0]]) <= SHORT_COLUMN

    def down_columns(self, dims: tuple[Axis, ...], elements: int, warps: int) -> int:
        """At most `warps` of a tile of whole lines' columns that begin at words, down which sums are made of what is held: the fewer they are the
        more of a column one thread folds (`DOWN_FOLDED`, `DOWN_WRITTEN`)."""
        rows = [a for a in dims if a in self.rows]
        if self.looped or self.crossed or self.shift is not None or len(rows) != 1 or rows != self.rows or len(dims) != 2 or not self.folds \
                or self.line not in self.b.parallel or sum(self.pieces[self.line]) < LINE // self.narrowest() \
                or begin_anywhere(self.b, self.line, self.hints, DOWN_WORDS * self.narrowest()) \
                or len(self.rows_read()) > 1:
            return warps
        if self.blocks(self.b.parallel, self.pieces) < DOWN_PROGRAMS * self.target.threads or self.hints.exactly(rows[0].extent) is None:
            return warps
        if not all(e.monoid in ("sum", "moments") for e in self.folds):
            return warps
        n, lanes = self.hints(rows[0].extent), sum(self.pieces[rows[0]])
        if not self.stored_along():
            return warps if lanes > DOWN_ROWS and self.begin_anywhere() else min(warps, power(-(-elements // (32 * DOWN_FOLDED))))
        few = max(DOWN_LEAST, power(elements // (32 * DOWN_WRITTEN) + 1) // 2)
        return min(warps, few) if (lanes - n) * DOWN_IDLE <= n else warps

    def _abreast(self, dims: tuple[Axis, ...]) -> int:
        """Warps whose threads have words of all columns of a tile, and nothing of each other's."""
        lanes = math.prod(sum(self.pieces[a]) for a in dims if a in self.b.parallel)
        return max(1, lanes * self.narrowest() // (32 * WORD))

    def held_anywhere(self) -> bool:
        """Are rows along a middle axis, few of them, held in equal pieces beside columns that begin anywhere?"""
        equal = [a for a, p in self.pieces.items() if a in self.rows and a is not self.line and alike(p)]
        return self.begin_anywhere() and any(self.hints(a.extent) <= EVEN_ANYWHERE for a in equal)

    def _at_once(self, dims: tuple[Axis, ...], warps: int, elements: int) -> bool:
        """Do programs that hold a row of 32 bits each all run at once with HELD_REGISTERS a thread, and not with twice as many?"""
        if not self.one_row(dims) or self.crossed or self.shift is not None or not self.stored_along() or self.narrowest() < 4:
            return False
        summed = all(e.monoid in ("sum", "moments") for e in self.folds)
        nested = any(isinstance(x, Reduce) for e in self.folds for a in e.args for x in walk(a))
        most = REGISTERS // (32 * warps * HELD_REGISTERS) * self.target.threads
        return summed and nested and len(self.rows_read()) == 1 and elements == 32 * warps * HELD_EACH \
            and most // 2 < self.hints.count(self.b.parallel) <= most

    def _keeps_weights(self, warps: int) -> bool:
        """Do programs of one warp, which keep what they read beside rows of 16 bits that begin anywhere, have a few of them, or many short ones?"""
        rows = self.hints.count(self.b.parallel)
        if self.crossed or self.shift is None or warps > 1 or self.narrowest() != 2 or rows <= RESIDENT // 2 * self.target.threads:
            return False
        return self.hints(self.shift.words) <= KEPT_WORDS or rows <= KEPT_FEW * self.target.threads

    def _takes_rows(self, warps: int, resident: float) -> bool:
        """Do programs of several warps take rows that begin anywhere one after the other, drawing no random numbers?"""
        rows = self.hints.count(self.b.parallel) / (self.target.threads * resident)
        few = warps * resident <= TURNING_WARPS and TURNS[0] <= rows <= TURNS[1]
        return not self.crossed and self.shift is not None and not self.looped and warps > 1 and few and not self.draws()

    def _warps(self, dims: tuple[Axis, ...], elements: int, each: int, most: int, words: bool) -> int:
        """Of a program whose threads have `each` of a tile's elements; `words`: programs share rows in whole words."""
        shares = self.crossed and not self.rows
        up = shares or self.several_wide() or self._several_rows(dims)
        warps = max(1, min(most, power(-(-elements // (32 * each)) if up else elements // (32 * each))))
        if self.shift is not None and self.line in self.rows and len(dims) > 1:
            warps = max(1, sum(self.pieces[dims[0]]) // 2)
        if self.shift is not None and self.one_row(dims) and not self.crossed and self.draws():
            warps = max(warps, min(DRAWN_WARPS * self.narrowest(), power(elements // (32 * DRAWN_EACH) + 1) // 2))
        row = self.pieces.get(self.line, (0,))
        if warps == 1 and elements >= TWO_WARPS and len(row) == 1 and row[0] <= 32 and self._short_written() and not self.begin_at_words(WORDS_OF):
            return 2
        if not self.streams() and not self._passes_through():
            long = self.one_row(dims) and self.shift is not None and self.narrowest() >= 4 and self.only_summed()
            long = long and len(self.pieces[self.line]) == 2
            return HELD_WARPS if long and self.hints(self.line.extent) * self.narrowest() >= HELD_SUM else self._few(warps, elements, most)
        if self.one_long():
            return min(LONG_WARPS, LONG_WARPS * self.narrowest() // 4)
        if self.short_sums():
            return SHORT_SUM_WARPS
        if self.shift is not None and not self.crossed and self.narrowest() >= 4 and self.only_summed():
            return LONG_WARPS if self.hints(self.line.extent) > sum(self.pieces[self.line]) else HELD_WARPS
        return WORDS_WARPS if words else self._few(min(warps, SUMMED_WARPS if self.summed() else PASSING_WARPS), elements, most)

    def _few(self, warps: int, elements: int, most: int) -> int:
        """More warps than `warps` where a program runs through rows, and there are few programs."""
        much = self.places() or self.draws()
        again = self.stored_along() and len(self.rows) > 1          # BatchNorm backward in NCHW of 55 x 320 x 56 x 56 bf16 153 us, 195 by four (H200)
        much = much or self.shift is not None and self.stored_along() and self.narrowest() >= 4      # power norm of 367 x 150991 f32 266, 188 by 16
        if not self.looped or self.crossed or self.line not in self.rows or self.whole_runs() or not (much or again or self.passing()):
            return warps            # logsumexp of 500 x 70001 bf16 33.8 us by four, 38.7
        enough = RESIDENT if much else FEW_RESIDENT
        programs = self.blocks(self.b.parallel, self.pieces)
        while warps < most and warps * programs < enough * self.target.threads and elements > FEW_THREAD * 32 * warps:
            warps *= 2
        return warps

    def _carrying(self, warps: int, elements: int) -> int:
        """More warps than `warps` of a program that carries sums beside a tile of rows, where its threads would spill."""
        exact = sum(a in self.pieces for a in self.rows) > 1 and self._exact_rows()
        ragged = self.carries_wide() and not exact
        most = CARRIED_WIDE if ragged or self.several_wide() else CARRIED_EXACT if exact else CARRIED_MOST
        while warps < MOST_WARPS and elements > 32 * warps * CARRIED_LEAST:
            need = self._registers(-(-elements // (32 * warps)))
            capped = min(REGISTERS // (32 * warps * max(1, REGISTERS // (32 * warps * need))), 255)
            if need <= most or capped - need >= CARRIED_ROOM and not ragged:
                break
            warps *= 2
        return warps

    def _exact_rows(self) -> bool:
        """Is no lane of a tile's rows idle?"""
        return all(self.hints.exactly(a.extent) == sum(self.pieces[a]) for a in self.rows if a in self.pieces)

    def _short_written(self) -> bool:
        """Are contiguous rows that begin anywhere held and written, and nothing folded across programs?"""
        held = not self.looped and not self.crossed and self.shift is None and self.rows == [self.line] and self.line in self.pieces
        return held and self.stored_along() and self.begin_anywhere()

    def _short_run(self) -> bool:
        """Is a row of a tile only a few elements long?"""
        last = [a for a in self.order if a in self.pieces][-1:]
        return bool(last) and last[0] in self.rows and sum(self.pieces[last[0]]) < SHORT_RUN

    def _several_rows(self, dims: tuple[Axis, ...]) -> bool:
        """Are several values read along a row that is held? f32 EvoNorm backward of 10 x 512 x 40 x 40 and 8 x 512 x 36 x 36 37.3
        and 27.3 us by two warps a plane of 1600 or 1296, 44.0 and 31.9 by one (H100)."""
        return self.one_row(dims) and self.shift is None and not self.crossed and len(self.rows_read()) > 1

    def _holding(self, warps: int, each: int) -> int:
        """How many programs that hold rows a multiprocessor has registers for. Perhaps 0."""
        most = (CARRY_RESIDENT if self.carries or self.down else RESIDENT) // warps
        if self.down and most == 1 and self.shift is None and self.narrowest() == 2:
            blocks = self.hints.count((self.line,)) // sum(self.pieces[self.line])
            most = 2 if self.hints.count(self.crossed) * blocks >= 2 * DOWN_TURNS * self.target.threads else 1
        return min(REGISTERS // (32 * warps * self._registers(each)), most)

    def _registers(self, each: int) -> int:
        """Registers of a thread with `each` elements of what is read of a row, weights, column sums and what is written beside them."""
        held = {(e.node, e.index) for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and self.line in e.index[0].axes()}
        sums = {e.key for e in self.crossing if not set(e.over) & self.together}
        made = [s for s in self.b.stores if self.line in s.axes and s.axes & self.crossed]
        return BESIDE + each * (len(held) + len(sums) + len(made))

    def stages(self) -> int:
        """Rows under way at once, as far as shared memory holds them."""
        if self.streams() or self._passes_through():
            return PASSING_STAGES if self.shift is None and self.narrowest() >= 4 and not self.singly() else 1
        if self.looped and self.scans_down() and self.begin_anywhere():
            return 1
        if self.looped and (self.scans_down() or self.whole_runs() and not self._written_across()):
            return CARRY_STAGES
        if self.folds_columns():
            return COLUMN_STAGES
        if self._walks_columns():
            return CARRY_STAGES if self.several_down() else WALKED_STAGES      # four spill: FRN's of 26 x 1280 x 40 x 40 bf16 153 us, 146
        if not (self.carries or self.down) or self.looped:
            return 1
        beside = math.prod(sum(self.pieces[a]) for a in self.pieces if a in self.b.parallel)
        ragged = self.carries_wide() and not self._exact_rows()
        if self.down and len(self.pieces) > 1:
            return CARRY_STAGES
        if 1 < beside < LANES or beside > 1 and self.shift is None and not self.down and self.begin_anywhere() or ragged:
            return 1
        if CARRY_STAGES * self.row_bytes() * sum(self.pieces.get(self.line, (1,))) > STAGED or self._short_run():
            return 1
        folded = any(isinstance(e, Reduce) and set(e.over) & set(self.rows) and not set(e.over) & self.crossed for e in walk(*exprs_of(self.b)))
        return 1 if self.shift is not None and (folded and self.narrowest() >= 4 or self.down) else CARRY_STAGES

    def folds_columns(self) -> bool:
        """Does a program walk down columns that begin at words, and only fold the one value that it reads of them, of 32 bits where they are few?"""
        if not self.looped or self.crossed or self.line not in self.b.parallel or not self.folds or self.stored_along() or self.begin_anywhere():
            return False
        if self.narrowest() >= 4 and self.blocks(self.b.parallel, self.pieces) >= COLUMN_FEW * self.target.threads:
            return False
        return len({(e.node, e.index) for e in walk(*exprs_of(self.b)) if isinstance(e, Load) and e.axes() & self.looped}) == 1

    def _in_two(self, warps: int) -> bool:
        """Are sums carried beside rows of 32 bits that begin anywhere, whose words are two pieces, by IN_TWO warps?"""
        two = self.shift is not None and not self.looped and len(self.pieces[self.line]) == 3 and self.line in self.rows
        return self.carries and two and self.narrowest() >= 4 and warps in IN_TWO

    def _walks_columns(self) -> bool:
        """Does a program run down columns that begin at words, fold what it shares and write?"""
        down = bool(self.looped) and bool(self.crossed) and self.line in self.b.parallel - self.crossed and not self.begin_anywhere()
        return down and self.stored_along()

    def words_shared(self, a: Axis) -> bool:
        """Do programs share the whole words of rows along `a` that begin anywhere?"""
        return self.shift is not None and a is self.shift.axis and a in self.crossed

    def _passes_through(self) -> bool:
        """Does a program run through its contiguous rows, and only fold them?"""
        return bool(self.looped) and self.line in self.rows and self.passing()

    def _written_across(self) -> bool:
        """Does something lie contiguously along another row axis than the line?"""
        return any(address.coefficient(a) == 1 for _, address, _ in strides_of(self.b) for a in self.rows if a is not self.line)
