"""Chooses the TileSchedule of a Body for a GPU. Every threshold is a named constant with what it was measured on."""
from __future__ import annotations

import math

from ..fuse import sharing
from ..fuse.cost import Hints
from ..fuse.gpu import FILL
from ..fuse.sharing import HELD
from ..ir.expr import Const, Coord, Load, Op, Random, Reduce, Scan, walk
from ..ir.index import Axis, Fetch, Index, Size
from ..ir.ops import CARRIERS, OPS
from . import column_words, held_columns, peeled, short_rows, tile_flat, tile_stages, tile_statistics
from .body import Body, exprs_of
from .schedule import strides_of
from .tile_access import once
from .tile_alike import TileAlike
from .tile_facts import ALONE, CHUNK, SECTOR, SHORT_LANES, TILE
from .tile_schedule import WASTE, Shift, TileSchedule, blocks, cover, shifted
from .tile_stages import power
from .tile_statistics import WORD
from .tile_threads import COLUMNS, REGISTERS, RESIDENT, SHORT_FEW, SHORT_FROM

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
ACROSS_BYTES = 16384    # bytes of a tile along rows that programs run through, and along a short axis that something else lies along: sums of
                        # GroupNorm backward, the gradient in channels-first, of 16 x 256 x 112 x 112 bf16 97 us, of 4 x 512 x 128 x 128 92, f32 of
                        # 16 x 256 x 96 x 90 117; 155, 116 and 132 in tiles of half and twice as many, 797, 380 and 713 along the rows alone
ACROSS_LEAST = 8        # bytes of such an axis at least: of 16 x 128 x 121 x 97 bf16, four channels a group, 69 us, 248 without
RAGGED_DOWN = 2048      # elements of a tile that walks down columns of one of several matrices where rows begin anywhere: bf16 sums along the middle
                        # of 512 x 257 x 511 51.2 us, of 2048 x 65 x 255 33.6, of 33 x 1000 x 8191 208, f16 of 1000 x 100 x 333 31.7; 55.5, 50.6, 246
                        # and 39.2 with TILE. Of 32 bits where that leaves fewer lanes idle: f32 of 512 x 257 x 255 42.0, 42.8; but of
                        # 30 x 3000 x 1025 108, 103, and of 107 x 55 x 8790, all rows at once with ROW_THREAD, 76 us, 91 (H100)
WIDE_ROW = 512          # of tiles of aligned rows of 32 bits that are written, up to SHORT_FEW elements: f32 softmax of 4096 rows of 512 5.5 us, of
                        # 8192 of 256 5.6, LayerNorm of 4096 of 128 2.8; 6.3, 6.2 and 3.2 with RAGGED. Of 8192 of 512 RMSNorm 10.0, 9.4
SPREAD = 8              # of tiles of short rows that are only folded and begin anywhere, that a multiprocessor should have where they are few, and
                        # two rows a tile at least: bf16 sums of 2048 rows of 513 2.65 us, 3.33 with ROWS
ROWS = 8                # of such tiles at least: f32 sums along 257 columns 85%, 40 with one
TURNED_TILE = 4096      # elements of a pointwise tile that is read along one axis and written along another, TURNED of each where pieces of the one
                        # lie side by side: the last kernel of GroupNorm backward from NHWC of 4 x 512 x 128 x 128 bf16 51 us, 54 with POINTWISE,
                        # forward 33.7, 36, of f32 of 16 x 256 x 96 x 90 67, 78
HEAVY_CHUNK = 1024      # of a chunk of a looped row at least, where the last one of longer chunks would compute a heavy function in many idle lanes:
                        # sums of EvoNorm backward over planes of 9120 f16 50 us in chunks of 2048, 74 of 8192
POINTWISE = 1024        # elements of a pointwise tile: 8 to a thread, one 16-byte access of a 16-bit type
COLUMN_VALUES = 3       # values of the columns alone, read beside what is made of all, from which on a tile has twice as many elements: the last
                        # kernel of BatchNorm in NHWC of 32 x 96 x 57 x 57 bf16 9.1 us, 10.2, of 64 x 256 x 56 x 56 47.0, 48.0
PLACES_CHUNK = 2048     # the same where the place of the greatest or least element is carried, too: amax and argmax of bf16 rows of 32000 by hand
                        # 90%, 87 with twice as many
CHUNK_BYTES = 16384     # bytes of it where rows are only folded, a few lanes carrying what comes of them: f16 sums of rows of 86021 80%, 71 with half
                        # as many
SUMMED_BYTES = 32768    # the same where elements are summed as they are: see SUMMED_WARPS
LONG = 16384            # elements of a looped row from which on each has a program to itself, where programs leave one number each: cross entropy
                        # forward over 32000 and 50257 columns 88 and 90%, 81 and 83 with as many programs as run at once
FOLDED = 16384          # bytes at least of held rows that one program folds: f16 rows of 1024 88%, 76 a row a program
TOGETHER = 32           # columns of a tile whose columns, and whose rows across programs, are summed where they begin anywhere: see TOGETHER_THREAD
TOGETHER_MOST = 8192    # elements of such a tile at most: RMSNorm backward along the middle of 16 x 512 x 2049 bf16 76 us, 134 with TOGETHER
MIDDLE = 128            # rows of columns that are only folded, and held rather than run through: sums along the middle of 2004 x 57 x 83 bf16
                        # 11.5 us, of 813 x 34 x 1023 26.6, f16 of 2623 x 69 x 257 42, bf16 sums of 38 x 262143 26.6; 14.5, 40, 55 and 48 in a loop,
                        # many of whose last lanes idle; also without any: of blocks of 128 x 74 bf16 17.4, 20.2 (H100). Half as many of 32 bits:
                        # of 107 x 75 x 8790 f32 157 us, 118 in a loop
IDLE_TURN = 4           # idle lanes of two turns, one in so many at least, where rows that begin anywhere and are only folded are held: f32 L1 norms
                        # of 2047 rows of 4225 11.5 us, 17.3 in a loop, bf16 of 1177 of 19438 15.5, 17.1; but L2 norms of 2047 of 12954 18.4, 18.0
HELD_TURNS = 4          # turns of a loop down columns that a program makes at once,
HELD_EACH = 128         # elements to a thread at most: blocks of 128 x 376 f16 19.4 us, 23.3 in four; partial results of 528 over 1480 6.5, 7.3 in
                        # two, of 264 over 3013 6.3, 6.8 (H100). But of one matrix of many bytes, 400 x 30000 f16 and 200 x 50000 bf16, 18.9 and
                        # 14.2, 13.9 and 12.5 in turns
SCANNED = 64            # rows of columns from which on their prefixes are made in a loop, several tiles under way: 4096 x 16384 of f32 91%, 70 with
                        # one; 64 x 1024 x 1024 of bf16 along the middle about 50, 27 held
SCANNED_FEW = 512       # elements of a tile of few columns; twice as many of SCANNED_SHORT rows, of up to twice SCANNED_COLUMNS: along the middle of
SCANNED_SHORT = 8       # 111924 x 4 x 18 f16 15.2 us, 21.1, of 1978 x 3 x 8193 bf16 74.9, 83.6 (H100)
SCANNED_COLUMNS = 128   # columns of a tile of many, `tile_facts.SCANNING` a multiprocessor, or
SCANNED_WIDE = 1024     # so many where they begin anywhere: along the middle of 39 x 86 x 4095 f16 30.3 us, of 64 x 1024 x 1024 bf16 101.6; 35.2
                        # and 105.3 with half as many; but of 6 x 1249 x 10001 bf16 175, 149 (H100). Half as many of 32 bits: of 186 x 192 x 599
                        # 76.3, 91.2, of 100 x 300 x 999 101, 120 (H100)
SCANNED_TWICE = 1408    # and twice as many columns of 16 bits: of 200 x 200 x 1001 bf16 72.8, 78.6 (H100)
RAGGED_SPLIT = 512      # elements of a tile of 32-bit columns that begin anywhere and are summed across programs, by four warps: sums of squares of
                        # 3264 x 4325 25.6 us, 37.0 with TILE (H100)
SUMMED_ANYWHERE = 2048  # elements of a tile of rows that begin anywhere, which programs share, sum, and write or read again beside: see
SUMMED_ANYWHERE_SHARES = 4      # SUMMED_ANYWHERE_THREAD; and so many times as many programs as run at once: of 138 x 154970 104 us by 28, 121 by 7
SEVERAL_HELD = 4096     # elements of 32 bits at most of a tile of which three sums and more are carried across programs, 8 columns at least: EvoNorm
                        # backward in NHWC of 253 x 32 x 20 x 20 f32 69.9 us in 32 columns, which spill 528 bytes a thread (H100), and see
                        # `tile_alike.SEVERAL_ROWS`
SCANNED_HELD = 32767    # elements of a row at most whose prefixes are made at once, a quarter where there are many: bf16 ones of 300 rows of 20001
                        # 17.3 us, 19.8 in a loop; but of 1000 of 10001 33.2, 23.8, f16 of 64 of 131071 187, 58, f32 of 216 of 65535 286, 57, of 300
                        # of 32768 33.6, 31.2 (H100)
SCANNED_ROWS = 16       # rows of a tile of theirs where one warp makes them: see `tile_facts.SCANNING`
TURNED = 64             # edge of a tile that is read along one axis and written along another; less where a program holds rows, too
LARGEST = 4 * HELD      # elements of any tile: with so many Triton takes 2 s, with four times as many 100
CARRIED_LANES = 32768   # lanes that folds across programs carry for themselves: half of a multiprocessor's registers
FILLED = 0.75           # of the programs that run at once: where programs share folds, so many in one wave rather than a few more in two
LARGE_HELD = 8192       # elements of a tile of columns that are held and written from which on it has half as many columns, where there are fewer
                        # than MANY to a multiprocessor: RMSNorm backward along the middle of 50 x 200 x 333 f16 16.3 us, 23.1 (H100)
LONE = 8192             # elements of a tile that walks down columns so few that no multiprocessor has a second program: see LONE_THREAD
JUST_OVER = 4           # rows of a pointwise tile longer than a power of two by one part in so many at most are two pieces,
SHORTEST_PIECE = 32     # of so many elements at least: cross entropy backward of 322375 x 129 and 60000 x 257 f32 86.2 and 32.7 us, of 100000 x 129
                        # bf16 19.0; 126, 40.8 and 26.8 in one of twice the length
PARTS = 4               # equal powers of two at most that rows of a pointwise tile are cut into, rather than held in pieces of several lengths: last
                        # kernel of BatchNorm backward in NHWC of 7 x 768 x 112 x 112 f16 139 us, 161 as 512 + 256, of 16 x 768 x 15 x 15 9.9, 12.3
LEAST_BLOCK = 256       # elements of a block along the contiguous axis that is worth several pieces
HELD_BYTES = 3 * REGISTERS      # of a row that begins anywhere and all read along it, which one program holds as it is: f32 LayerNorm backward over
                                # 32767 columns, three values of each, 37%, 25 by one program that spills
MANY = 4                # programs for each share from which on none may be too many: it would begin when all others have ended
BESIDE_MOST = 512, 1024         # elements of 16-bit rows that begin anywhere of which a program has several, a warp two: where they are written, and
BESIDE_ROWS = 4, 2              # where they are only folded. f16 softmax of 65536 rows of 257 20.4 us, 41.1 a row a program, 22.2 element by element;
                                # of 16384 of 513 11.3, 12.1; sums of 65536 of 1025 35.2, 41.7. Softmax of 1025 70.9, 66.1, f32 of 513 74, 66
ALONE_WIDE = 512        # elements of rows of 32 bits up to which no program takes several for the sake of weights: f32 LayerNorm and RMSNorm of 65536
                        # rows of 511 67.9 and 65.6 us, 74.2 and 69.7


def choose(b: Body, hints: Hints, target) -> TileSchedule:
    """The schedule for `b` on a GPU."""
    return _Chooser(b, hints, target).schedule()


def plainest(b: Body, hints: Hints, target) -> TileSchedule:
    """A schedule that any body of one store fits: its rows are run through one coordinate at a time. For what no other schedule holds."""
    return _Chooser(b, hints, target).schedule(plain=True)


class _Chooser(TileAlike):
    def schedule(self, plain: bool = False) -> TileSchedule:
        staged = None if plain else self._stages_of_rows()
        if plain:
            self.looped.update(self.rows)
        elif staged is not None:
            return self._staged(staged)
        elif columns := column_words.choose(self.b, self.line, self.rows, self.crossed, self.hints, self.target):
            return self._columns_only(columns)
        elif not self.wide and (flat := tile_flat.rows_of(self.b, self.rows, self.line, self.hints, self.target)):
            return self._flat(flat)
        elif short := short_rows.choose(self):
            return self._short(*short)
        else:
            self._cover_rows()
        self._cover_parallel()
        self.lay_alike()
        several = tile_statistics.several_rows(self, self.pieces)
        self.pieces.update(several)
        held = held_columns.choose(self)
        if held is not None:
            self.pieces = {a: (held[0],) if a is self.line else p for a, p in self.pieces.items() if a is self.line or a in self.rows}
        dims = self._dims()
        self.together = self._together()
        self.carries = self.carries and not self.together
        split = tuple(a for a in self.order if a in self.crossed) or self._shared_rows()
        threads = held[1] if held is not None else self.threads(dims, split, bool(several))
        self.resident = threads.resident
        programs = self._programs(split) if split else 1
        self.pieces.update(tile_statistics.in_turns(several, programs, self.hints))
        exact = frozenset(a for a in dims if self._exact(a))
        return TileSchedule(self.order, dims, tuple((a, self.pieces[a]) for a in dims), frozenset(self.looped), split,
                            programs, exact, threads.warps, threads.stages, wide=self.wide,
                            peeled=not exact and peeled.last_block(self, self.pieces, threads.by_thread),
                            once=once(self.b, self.line, self.looped, self.hints, self.target), shift=self.shift, registers=threads.registers,
                            together=self.together, ahead=bool(several) and self.only_sums(), by_thread=threads.by_thread, reread=threads.reread)

    def _dims(self, beside: Axis | None = None) -> tuple[Axis, ...]:
        """The tiled axes in order. `beside`, or of three one whose steps are whole pieces of the contiguous one, stands first, since Triton lays
        threads along it next: backward sums of EvoNorm in NHWC of 32 x 256 x 56 x 56 in bf16 177 to 79 us, in f32 146 to 119."""
        dims = tuple(a for a in self.order if a in self.pieces)
        if beside is not None:
            return tuple(sorted(dims, key=lambda a: a is not beside))
        if len(dims) != 3 or dims[-1] is not self.line:
            return dims
        behind = {a for _, address, _ in strides_of(self.b) if address.coefficient(self.line) == 1
                  for a in dims if address.coefficient(a) is self.line.extent}
        return tuple(sorted(dims, key=lambda a: a not in behind))

    def _together(self) -> frozenset[Axis]:
        """The held row axes that folds across programs cross, where carrying every lane of them would take more registers than a tile's own values;
        the columns of a tile, where sums along held columns cross them."""
        if self.line in self.pieces and self.takes_columns():
            return frozenset((self.line,))
        folds = {(e.monoid, e.over, e.args) for e in self.crossing if e.monoid not in CARRIERS}
        inside = frozenset(a for _, over, _ in folds for a in over if a in self.pieces and a in self.rows and a not in self.looped)
        lanes = math.prod(sum(self.pieces[a]) for a in self.pieces)
        return inside if inside and self.shift is None and lanes * len(folds) > CARRIED_LANES else frozenset()

    def _stages_of_rows(self) -> tile_stages.Stages | None:
        """How rows are held in stages, or None: also where a program that can hold one keeps what it reads beside rows that begin anywhere."""
        if self.crossed:
            return tile_stages.carrying(self.b, self.rows, self.line, self.crossed, self.hints, self.target)
        if not tile_stages.possible(self.b, self.rows, self.line, self.hints, self.target):
            return None
        self.shift = self._shift(self.line)
        few = self.hints.count(self.b.parallel) < self.target.threads
        shift, kept, self.shift = self.shift, () if few else self._shared_rows(), None
        found = tile_stages.keeping(self.b, self.line, shift.group, self.hints, self.target) if kept else \
            tile_stages.turns(self.b, self.rows, self.line, self.hints, self.target) if shift is None else None
        row = self.hints.count(self.rows) * sum(e.dtype.bytes for e in tile_stages.held(self.b, frozenset(self.rows)))
        whole = self.hints.count(self.rows) <= HELD and row <= HELD_BYTES
        return found if found is not None or kept and whole else tile_stages.stages(self.b, self.rows, self.line, self.hints, self.target)

    def _staged(self, s: tile_stages.Stages) -> TileSchedule:
        """One row to a program, or to several."""
        self.pieces.update(s.pieces)
        self.shift = None if self.crossed and s.sharers > sharing.FEW_SHARERS else self._shift(self.line)
        exact = frozenset(a for a in s.pieces if self.hints.exactly(a.extent) == sum(s.pieces[a]) * (s.sharers if a is s.shared else 1))
        if s.beside is not None:
            axis, count = s.beside
            self.pieces.update({axis: (count,)} if count > 1 else {})
            exact |= {axis}
        if self.shift is not None:
            n, group, whole = self.hints.exactly(self.line.extent), self.shift.group, s.pieces[self.line]
            whole = tile_stages.pieces(-(-(n // group * group) // s.sharers), whole[0]) if s.shared is self.line else whole
            self.pieces[self.line], exact = (*whole, 2 * group), frozenset()
        dims = self._dims(s.beside[0] if s.beside is not None else None)
        kept = (self._shared_rows() or tuple(self.b.parallel)) if s.kept else ()
        split = tuple(a for a in self.order if a in self.crossed) if self.crossed else kept
        self.resident = REGISTERS // (32 * s.warps * s.registers)
        if s.sharers > 1:
            self.resident *= sharing.clusters(s.sharers, self.target) / self.target.threads
        return TileSchedule(self.order, dims, tuple((a, self.pieces[a]) for a in dims), frozenset(), split,
                            self._programs(split) if split else 1, exact, s.warps, s.stages, wide=self.wide,
                            shift=self.shift, staged=s.shared, sharers=s.sharers, registers=s.registers)

    def _columns_only(self, found: column_words.Columns) -> TileSchedule:
        """Columns that are only folded."""
        down, = (*self.rows, *self.crossed)
        most = self.hints.most(down.extent)
        whole = cover(most) if most is not None and not self.crossed and not found.by_thread else ()
        turns = found.rows < sum(whole) <= HELD_TURNS * found.rows and sum(whole) * found.columns <= HELD_EACH * 32 * found.warps
        turns = turns and (found.late or len(self.b.parallel) > 1)
        held = turns or whole and most <= found.rows
        self.looped.update(() if self.crossed or held else self.rows)
        rows = whole if turns or held and found.columns == 1 else (found.rows,)
        self.pieces = {a: rows if a is down else (found.columns,) for a in self.order if a is down or a is self.line and found.columns > 1}
        if found.matrices > 1:
            beside = next(a for a in reversed(self.order) if a in self.b.parallel and a is not self.line)
            self.pieces = {a: self.pieces.get(a, (found.matrices,)) for a in self.order if a in self.pieces or a is beside}
        self.resident = found.programs * -(-self.hints.count(self.b.parallel - self.crossed) // found.columns) / self.target.threads
        split = tuple(self.crossed)
        return TileSchedule(self.order, tuple(self.pieces), tuple(self.pieces.items()), frozenset(self.looped), split,
                            self._programs(split) if split else 1, frozenset(a for a in self.pieces if self._exact(a)), found.warps, wide=self.wide,
                            once=found.once or once(self.b, self.line, self.looped, self.hints, self.target), by_thread=found.by_thread)

    def _flat(self, count: int) -> TileSchedule:
        """So many short rows to a program, which are read as one run."""
        self.pieces = {a: cover(self.hints.most(a.extent)) if a is self.line else (power(count),) for a in self.order}
        exact = frozenset((self.line,)) if sum(self.pieces[self.line]) == self.hints.exactly(self.line.extent) else frozenset()
        return TileSchedule(self.order, self.order, tuple(self.pieces.items()), frozenset(), (), 1, exact, tile_flat.WARPS,
                            wide=self.wide, flat=count)

    def _short(self, pieces: dict[Axis, tuple[int, ...]], warps: int) -> TileSchedule:
        """Several short rows to a program."""
        self.pieces = {a: pieces[a] for a in self.order if a in pieces}
        return TileSchedule(self.order, tuple(self.pieces), tuple(self.pieces.items()), frozenset(), (), 1,
                            frozenset(a for a in self.pieces if self._exact(a)), warps,
                            once=once(self.b, self.line, self.looped, self.hints, self.target))

    def _exact(self, a: Axis) -> bool:
        sizes = self.pieces[a]
        if self.shift is not None and a is self.shift.axis:
            return False
        if a in self.b.parallel:
            return self.hints.divides(sum(sizes), a.extent)
        return self.hints.exactly(a.extent) == sum(sizes) if a not in self.looped else self.hints.divides(sizes[0], a.extent)

    def _cover_rows(self) -> None:
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
        whole = {a: cover(extent(a)) if a is inner and scanned <= {inner} else (power(extent(a)),) for a in self.rows}
        elements = math.prod(sum(s) for s in whole.values())
        wide = 2 if self.narrowest() >= 4 else 1
        most = HELD if self.line in self.rows else HELD // SECTOR // wide if self.needed_again() else MIDDLE // wide
        most = SCANNED if self.scans_down() else self._scanned_most() if self.scans_along() else LARGEST if self.whole else most
        if known and elements <= most and len(self.rows) <= 3:
            self.pieces.update(whole)
            self.shift = self._shift(inner)
            if self.shift is not None:
                n, group = self.hints.most(inner.extent), self.shift.group
                self.pieces[inner] = (*shifted(n, group), 2 * group)
            return
        self.looped.update(self.rows)
        elements = LONE if self.lone() else RAGGED_DOWN if self._few_down() else TILE
        ragged = max(SCANNED, SCANNED_FEW // self.columns())
        down = ragged if self.scans_ragged() else SCANNED_ROWS if self.scans_many() else SCANNED // 2 if self.scans_several() \
            else elements // self.columns()
        chunk = down if self.line not in self.rows else self._passing_bytes() // self.narrowest() if self.passing() else \
            PLACES_CHUNK if self.places() else self._scanned_chunk() if self.scans_along() else CHUNK
        across = self._across_lines()
        while self.line in self.rows and chunk > HEAVY_CHUNK and self._idles(inner, across, chunk):
            chunk //= 2
        self.pieces[inner] = (min(chunk, power(self.hints(inner.extent))),)
        if across is not None:
            self._tile(across, chunk // self.pieces[inner][0])
            self.looped -= {inner} if self.hints.exactly(inner.extent) == self.pieces[inner][0] else set()
        beside = self._read_across()
        if beside is not None:
            self.pieces[beside] = (power(self.hints(beside.extent)),)
            self.pieces[inner] = (min(ACROSS_BYTES // self.narrowest() // self.pieces[beside][0], power(self.hints(inner.extent))),)
            return
        self.shift = self._shift(inner) if self.line is inner and not self.carries_rows else None
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
        n, chunk = self.hints.exactly(self.line.extent), self._passing_bytes() // self.narrowest()
        if n is None or self.rows != [self.line] or self.crossed or not self.passing():
            return False
        shift = self._shift(self.line)
        return shift is not None and chunk < self.hints(shift.words) and (2 * chunk - n) * IDLE_TURN > 2 * chunk

    def _idles(self, inner: Axis, across: Axis | None, chunk: int) -> bool:
        """Would much be computed in idle lanes of the last chunk, along `across` where it holds several runs of `inner`?"""
        n, run = self.hints(inner.extent), power(self.hints(inner.extent))
        if across is not None and run < chunk:
            n, chunk = self.hints(across.extent), chunk // run
        return -n % chunk * WASTE > n and any(isinstance(e, Op) and OPS[e.name].heavy for f in self.folds for x in f.args for e in walk(x))

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
            step = address.coefficient(self.line)
            if step.terms and step != 1:
                for a in self.b.parallel:
                    if address.coefficient(a) == 1 and ACROSS_LEAST // self.narrowest() <= self.hints(a.extent) <= TURNED:
                        return a
        return None

    def _few_down(self) -> bool:
        """Are columns of several matrices folded that begin anywhere, of 16 bits, or so short that larger tiles would leave many lanes idle?"""
        if self.line not in self.b.parallel or not self.folds or len(self.rows) != 1 or not self.begin_anywhere() \
                or not any(a is not self.line and self.hints(a.extent) > 1 for a in self.b.parallel):
            return False
        n, whole, part = self.hints(self.rows[0].extent), TILE // self.columns(), RAGGED_DOWN // self.columns()
        return self.narrowest() == 2 and not self.folds_words() or -n % whole * WASTE > n and -n % part < -n % whole

    def _passing_bytes(self) -> int:
        if self.short_sums():
            return CHUNK * self.narrowest()
        return SUMMED_BYTES if self.summed() or self.one_long() and self.narrowest() == 2 and self.begin_anywhere() else CHUNK_BYTES

    def _shift(self, a: Axis) -> Shift | None:
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
                found[origin] = found.get(origin, 0) + size
                smallest = min(smallest, size)
        group = 16 // smallest
        origin = max(found, key=lambda i: found[i], default=None)
        if origin is None or any([isinstance(x, Axis) for x in k].count(True) != 1 or not all(isinstance(x, (Axis, Size)) for x in k)
                                 for k in origin.terms):
            return None
        return Shift(a, group, origin) if any(not self.hints.divides(group, origin.coefficient(x)) for x in origin.axes()) else None

    def _shared_rows(self) -> tuple[Axis, ...]:
        """Of shifted rows that read something else along the row (a weight): programs take every so many rows, all of which begin alike, and keep
        it; not of short rows of 32 bits."""
        if self.shift is None or self.looped or not self.crossed and self.narrowest() >= 4 and self.hints(self.shift.words) <= ALONE_WIDE:
            return ()
        kept = any(address.coefficient(self.shift.axis) == 1 and address.without(self.shift.axis) is not self.shift.origin
                   for _, address, _ in strides_of(self.b))
        rows = [a for a in self.order if a in self.b.parallel and a in self.shift.origin.axes()]
        return tuple(rows[-1:]) if kept else ()

    def _cover_parallel(self) -> None:
        """Parallel axes that fill up the tile: the contiguous one first, then one that an access runs along, then the innermost."""
        if self.down:
            self.shift = self._shift(self.line)
            self.pieces[self.line] = (self._block_down(),)
            if self.shift is not None:
                self.pieces[self.line] += (2 * self.shift.group,)
        if self._side_by_side():
            row, = self.shift.origin.axes()
            self._tile(row, BESIDE_ROWS[not self.stored_along()])
        if self.shift is not None or self.down:
            return
        hints = self.hints
        have = math.prod(sum(s) for s in self.pieces.values())
        turned = self.turned()
        want, least = self._wanted(have, turned)
        parallel = [a for a in self.order if a in self.b.parallel]
        if self.line in parallel:
            most = self._most_along(have, want, turned)
            have *= self._line_in_blocks(most) or self._tile(self.line, most)
            have *= self._line_continued(most)
        room = HELD // (2 * have) if self.rows else TURNED
        if turned is not None and turned not in self.pieces and room >= min(SECTOR, hints(turned.extent)):
            have *= self._tile(turned, min(TURNED, room))
        free = [] if self.short_columns() else parallel
        candidates = sorted((a for a in free if a not in self.pieces), key=lambda a: (a in self.crossed, self.order.index(a)), reverse=True)
        # a third axis of a large tile is spilled: backward sums of InstanceNorm3D in NDHWC 49 us, 55 with images in it
        few, beside = self.statistics(), sum(a not in self.crossed for a in self.pieces)
        many = self.scans_many() or self.scans_several() or self.scans_ragged()
        for a in candidates:
            most_axes = 1 + beside if few and have * 8 > want else 3
            wanted = min(want, SCANNED_FEW * (2 if self._scans_short() else 1)) if many else want
            room = max(want // 4, min(want, RAGGED), least) if self.rows and self.line in self.rows else wanted
            if have * 2 <= room and len(self.pieces) < most_axes and hints(a.extent) > 1:
                have *= self._tile(a, wanted // have)
        if self._only_folds_line():
            self.shift = self._shift(self.line)
            self.pieces[self.line] += (2 * self.shift.group,) if self.shift is not None else ()

    def _wanted(self, have: int, turned: Axis | None) -> tuple[int, int]:
        """(elements that a tile should have, of which rows have `have`; at least)."""
        hints = self.hints
        pointwise = not self.rows and not self.crossed
        least, most = 0, 2 * POINTWISE if self.columns_read() >= COLUMN_VALUES else POINTWISE
        most = max(most, TURNED_TILE) if pointwise and turned is not None else most
        want = min(most, max(SMALLEST, power(hints.count(self.b.parallel) // (FILL * self.target.threads)))) if pointwise else TILE
        if self.line in self.rows and not self.looped and not self.crossed:
            if not self.stored_along():
                spread = power(hints.count(self.b.axes) // (SPREAD * self.target.threads))
                least = 2 * have if self.begin_anywhere() else 0
                wide = FOLDED_WIDE * (2 if have == FOLDED_PIECE else 1)
                folded = wide if self.narrowest() >= 4 and have >= FOLDED_FROM else RAGGED_FOLDED
                want = max(least, min(max(folded, ROWS * have), max(RAGGED, spread))) if least else max(TILE, FOLDED // self.narrowest())
            elif self.begin_anywhere():
                want = self._stored_anywhere(have)
            elif have >= SHORT_FROM:
                want = WIDE_ROW if self.narrowest() >= 4 and hints.count(self.b.axes) <= SHORT_FEW else RAGGED
        elif self.line in self.rows and not self.looped and self.begin_anywhere():
            want = max(RAGGED, min(ROWS * have, TILE))          # eight rows of 1960 elements spill 7 KB a thread
            if self.carries_one_piece() or not self.carries and self.narrowest() == 2 and 3 * SHORT_LANES // 4 <= have <= SHORT_LANES:
                want = CARRIED_ROWS * have
        if self.looped and not self.crossed and self._few_down():
            want = min(want, RAGGED_DOWN)
        if self.rows and not self.crossed and not (self.line in self.rows and self.stored_along()):
            want = min(want, max(SMALLEST, power(hints.count(self.b.axes) // self.target.threads)))
        if self.sums_turned():
            want = TILE // 2
        elif self.streams():
            want = self._passing_bytes() // self.narrowest()
        elif self.sums_ragged():
            want = RAGGED_SPLIT
        elif self.sums_anywhere():
            want = SUMMED_ANYWHERE // (2 if self.crossed == {self.line} else 1 if self.narrowest() < 4 else 4)
        return want, least

    def _most_along(self, have: int, want: int, turned: Axis | None) -> int:
        """Elements of a tile of `want` along the contiguous axis at most, which is parallel; rows have `have`."""
        together = self.takes_columns() and self.begin_anywhere()
        most = min(TOGETHER if together else self.columns(), max(SECTOR, (TOGETHER_MOST if together else HELD // 2) // have)) \
            if self.rows else TURNED if turned is not None else want // have
        share = self.hints.count(self.b.parallel) // self.target.threads
        half = self.narrowest() < 4
        if self.looped and self.scans_many() and (share >= SCANNED_WIDE // (1 if half else 2) or not self.begin_anywhere()):
            most = SCANNED_COLUMNS * (2 if half and self.begin_anywhere() and share >= SCANNED_TWICE else 1)
        most = 2 * SCANNED_COLUMNS if self._scans_short() else most
        most = max(SECTOR, most // 2) if self._few_held(have, most) else most
        if self.crossed and self.line not in self.crossed:
            most = tile_statistics.columns(self, COLUMNS)
            most = min(most, max(SECTOR // 2, SEVERAL_HELD // have)) if self.several_wide() else most
        return min(most, max(1, LARGEST // have))

    def _scans_short(self) -> bool:
        """Are prefixes of few rows made down many columns?"""
        return self.scans_many() and not self.looped and self.hints.count(self.rows) <= SCANNED_SHORT

    def _few_held(self, rows: int, columns: int) -> bool:
        """Are so many rows of so many columns held and written, large tiles of which there are few?"""
        large = bool(self.rows) and not self.looped and not self.crossed and self.stored_along() and rows * columns > LARGE_HELD
        others = math.prod(self.hints(a.extent) for a in self.b.parallel if a is not self.line)
        return large and -(-self.hints(self.line.extent) // columns) * others < MANY * self.target.threads

    def _stored_anywhere(self, row: int) -> int:
        """Elements of a tile of rows that begin anywhere, of `row` lanes each, and are written."""
        wide = self.narrowest() >= 4
        if self.one_piece():
            return PIECES * (4 if self.many_short() else 1)
        if self.short_piece() and (wide or row > WIDTH):
            return self.warp_rows(row) * row
        if wide:
            return max(1, STORED_WIDE // (power(row + 1) // 2)) * row
        if self.pieces[self.line] == (WIDTH, 1) and not self.scans():
            return WIDTH * row
        several = len(self.rows_read()) > 1 or any(isinstance(e, Op) and OPS[e.name].heavy for e in walk(*exprs_of(self.b)) if self.line in e.free)
        few = self.hints.count(self.b.parallel) * row < RESIDENT * self.target.threads * RAGGED_STORED
        most = RAGGED_STORED // 2 if several or few else RAGGED_STORED
        return max(RAGGED, min(ROWS * row, most))

    def _block_down(self) -> int:
        """Elements of a block of long columns that programs sum where they write them. Rows that begin anywhere take programs in whole groups:
        smaller blocks where few groups of large ones would leave multiprocessors idle."""
        most = min(TILE, power(self.hints(self.line.extent) // sharing.WORDS * sharing.WORDS))
        for size in (most, most // 2, most // 4) if self.shift is not None else ():
            want, blocks_ = self.target.threads * max(1, TILE // size), -(-self.hints(self.shift.words) // size)
            share = want // blocks_ // self.shift.group * self.shift.group or self.shift.group
            if blocks_ * min(share, self.hints.count(self.crossed)) >= FILLED * want:
                return size
        return most

    def _side_by_side(self) -> bool:
        """Are rows that begin anywhere short and many, and is all that is read and written along them theirs, so that a program may hold several?"""
        if self.shift is None or self.rows != [self.line] or self.looped or self.crossed or self._shared_rows() \
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
        return self._tile(beside[0], most // have) if beside else 1

    def _tile(self, a: Axis, most: int) -> int:
        size = max(1, min(power(self.hints(a.extent)), power(most + 1) // 2))
        if size > 1:
            self.pieces[a] = (size,)
        return size

    def _programs(self, split) -> int:
        """Programs that share the split axes: enough to fill the machine, no more than there are blocks."""
        extent = lambda a: self.hints(self.shift.words if self.shift is not None and a is self.shift.axis else a.extent)
        size = lambda a: 1 if a not in self.pieces else self.pieces[a][0] if self.shift is not None and a is self.shift.axis else sum(self.pieces[a])
        blocks = lambda axes: math.prod(-(-extent(a) // size(a)) for a in axes)
        kept = blocks(a for a in self.order if a in self.b.parallel and a not in split)
        want = max(1, int(self.target.threads * self.resident))
        if self.crossed and self.hints.count(self.looped) >= LONG and not any(e.free for e in self.crossing):
            want = max(want, ALONE)
        if self.sums_anywhere() and split == (self.line,):
            want *= SUMMED_ANYWHERE_SHARES
        share = want // kept if self.carries or self.down or want >= MANY * kept or want // kept * kept >= FILLED * want else -(-want // kept)
        most = blocks(split)
        programs = max(1, min(share, most))
        if self.shift is None or self.words_shared(self.shift.axis):
            return programs
        group = self.shift.group                                    # every row of a program begins alike
        return -(-most // group) * group if programs == most else programs // group * group or group
