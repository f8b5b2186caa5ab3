"""Chooses the TileSchedule of a Body for a GPU, from what `tile_rows` and `tile_blocks` cover its axes with and `tile_threads` says of threads."""
from __future__ import annotations

import math
from dataclasses import replace

from ..fuse import sharing
from ..fuse.cost import Hints
from ..fuse.sharing import HELD
from ..ir.index import Axis
from ..ir.ops import CARRIERS
from . import column_words, equal_pieces, held_columns, peeled, short_rows, tile_flat, tile_programs, tile_stages, tile_statistics, turned_rows
from .body import Body
from .schedule import strides_of
from .tile_access import LINE, fits, once
from .tile_blocks import FILLED, MANY, SUMMED_ANYWHERE_SHARES, TileBlocks
from .tile_facts import ALONE
from .tile_schedule import TileSchedule, cover
from .tile_stages import evenly, power
from .tile_threads import CARRY_RESIDENT, COLUMN_STAGES, KEPT_WORDS, REGISTERS, RESIDENT

DOWN_LEAST = 6          # rows at least of a program of `tile_threads.DOWN_WARPS`: GELU's backward of 100 x 30001 f16 12.3 us, 13.1 with two (H200)
SHARED_STAGES = 3       # tiles of columns of 16 bits under way that programs of one warp share: column sums of 17832 x 126 f16 9.0 us, of 12000 x 300
                        # bf16 10.2, with what folds their partial results; 9.8 and 11.0 with one (H200)
IDLE_ROWS = 2           # idle lanes, one in so many, of a tile of columns of 32 bits, mostly partial results, from which on they are in equal pieces
IDLE_PIECE = 8          # of so many rows at least: partial results of 132 over 416 f32 4.3 us
                        # between two events, 5.0, of 282 over 160 4.1, 4.5 (H200)
LONG = 16384            # elements of a looped row from which on each has a program to itself, where programs leave one number each: cross entropy
                        # forward over 32000 and 50257 columns 88 and 90%, 81 and 83 with as many programs as run at once
HELD_TURNS = 4          # turns of a loop down columns that a program makes at once,
HELD_EACH = 128         # elements to a thread at most: blocks of 128 x 376 f16 19.4 us, 23.3 in four; partial results of 528 over 1480 6.5, 7.3 in
                        # two, of 264 over 3013 6.3, 6.8 (H100). But of one matrix of many bytes, 400 x 30000 f16 and 200 x 50000 bf16, 18.9 and
                        # 14.2, 13.9 and 12.5 in turns
CARRIED_LANES = 32768   # lanes that folds across programs carry for themselves: half of a multiprocessor's registers
FEW_TURNS = 3           # turns of a program that carries partial results along rows, several rows under way, up to which half as many programs do,
                        # one of each multiprocessor at least: turns are fuller, and there is less to fold. LayerNorm backward of 1696 x 1224 bf16
                        # 11.9 us, of 3500 x 600 f16 12.2, of 4201 x 511 bf16 12.3, RMSNorm of 2100 x 1000 10.0; 16.6, 15.4, 14.4 and 10.8 by twice
                        # as many; but of 1377 x 1691 f32, a row at a time, 18.0, 16.1 (H100)
ROUNDS = 20             # rows of each warp that keeps what is read beside rows of 16 bits of more than KEPT_WORDS, from which on there are so many
ROUND_PROGRAMS = 4      # times as many, most of which begin when others have ended: RMSNorm of 93326 x 716 f16 72.4 us, 83.8 (H200)
HELD_BYTES = 3 * REGISTERS      # of a row that begins anywhere and all read along it, which one program holds as it is: f32 LayerNorm backward over
                                # 32767 columns, three values of each, 37%, 25 by one program that spills


def choose(b: Body, hints: Hints, target) -> TileSchedule:
    """The schedule for `b` on a GPU."""
    found = _Chooser(b, hints, target)
    s = found.schedule()
    return s if found.lies_across else _shared_out(tile_programs.filled(found, equal_pieces.laid(found, s)))


def _shared_out(s: TileSchedule) -> TileSchedule:
    """`s` by no more threads than a tile of its longest pieces has elements, where there are several: of fewer Triton gives every thread many. Sums
    of 528 partial ones of 9 x 42, in nine tiles of 64 x 4, 230 us by 16 warps, 5.2 by eight (H200)."""
    tile = math.prod(max(sizes) for _, sizes in s.pieces)
    cut = s.staged is None and s.shift is None and any(len(sizes) > 1 for _, sizes in s.pieces)
    return replace(s, warps=max(1, tile // 32), registers=0) if cut and tile < 32 * s.warps else s


def plainest(b: Body, hints: Hints, target) -> TileSchedule:
    """A schedule that any body of one store fits: its rows are run through one coordinate at a time. For what no other schedule holds."""
    return _Chooser(b, hints, target).schedule(plain=True)


class _Chooser(TileBlocks):
    lies_across = False         # something lies across the rows: `turned_rows`

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
        elif turned := turned_rows.choose(self):
            self.lies_across = True
            return self._rows_beside(turned)
        elif short := short_rows.choose(self):
            return self._rows_beside(turned_rows.Rows(*short))
        else:
            self.cover_rows()
        self.cover_parallel()
        self.lay_alike()
        several = tile_statistics.several_rows(self, self.pieces)
        self.pieces.update(several)
        held = held_columns.choose(self)
        if held is not None:
            self.pieces = {a: (held[0],) if a is self.line else p for a, p in self.pieces.items() if a is self.line or a in self.rows}
        dims = self._dims()
        self.together = self._together()
        self.carries = self.carries and not self.together
        split = tuple(a for a in self.order if a in self.crossed) or self.shared_rows()
        threads = held[1] if held is not None else self.threads(dims, split, bool(several))
        self.resident = threads.resident
        programs = self._programs(split, threads.stages > 1 or len(dims) > 1) if split else 1
        self.pieces.update(tile_statistics.in_turns(several, programs, self.hints))
        exact = frozenset(a for a in dims if self._exact(a))
        ahead = bool(several) and self.only_sums() or threads.stages == 1 and turned_rows.strided(self)
        return TileSchedule(self.order, dims, tuple((a, self.pieces[a]) for a in dims), frozenset(self.looped), split,
                            programs, exact, threads.warps, threads.stages, wide=self.wide,
                            peeled=not exact and peeled.last_block(self, self.pieces, threads.by_thread),
                            once=once(self.b, self.line, self.looped, self.hints, self.target), shift=self.shift, registers=threads.registers,
                            together=self.together, ahead=ahead, by_thread=threads.by_thread, reread=threads.reread)

    def _dims(self, beside: Axis | None = None) -> tuple[Axis, ...]:
        """The tiled axes in order: `beside` first, or of three the one that Triton should lay threads along next."""
        dims = tuple(a for a in self.order if a in self.pieces)
        if beside is not None:
            return tuple(sorted(dims, key=lambda a: a is not beside))
        if len(dims) != 3:
            return dims
        found = self._behind_first(dims) if dims[-1] is self.line else dims
        if self.rows or self.crossed or self.turned() is None or (first := self._nearest(found)) is found[0]:
            return found
        return tuple(sorted(dims, key=lambda a: a is not first))

    def _behind_first(self, dims: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Those first whose steps are whole pieces of the contiguous axis: backward sums of EvoNorm in NHWC of 32 x 256 x 56 x 56 in bf16 177 to
        79 us, in f32 146 to 119. But not rows, unless sums are carried beside what is folded along both: a thread has its own. RMSNorm along the
        middle of 1432 x 8 x 344 f32 12.0 us, 18.7, of 3000 x 6 x 500 23.9, 40.8, dropout and LayerNorm backward of 253448 x 63 f16 133, 150, EvoNorm
        in NCHW of 8470 x 192 x 7 x 7 bf16 213, 253; but EvoNorm backward of 4248 x 192 x 7 x 7 f32 343, 457, of 1000 x 64 x 14 x 14 59, 73 (H200)."""
        folded = {a for e in self.folds if self.carries and self.line in e.over for a in e.over}
        behind = {a for _, address, _ in strides_of(self.b) if address.coefficient(self.line) == 1
                  for a in dims if address.coefficient(a) is self.line.extent and a in self.b.parallel | folded}
        return tuple(sorted(dims, key=lambda a: a not in behind))

    def _nearest(self, dims: tuple[Axis, ...]) -> Axis:
        """The axis of a turned tile along which threads go on where the contiguous one of an access is shorter than a line: its next one, of the
        access whose runs are shortest, unless they do so as it is. Pixels that are shuffled together of 10 x 256 x 28 x 28 bf16, two of them beside
        each other, 11.2 us, 65.8 where threads go on along the columns (H200)."""
        asked, as_is = dict.fromkeys(dims, 0.0), True
        for address, size in {(address, size) for _, address, size in strides_of(self.b)}:
            run = next((a for a in dims if address.coefficient(a) == 1), None)
            others = [a for a in dims if a is not run and a in address.axes()]
            if run is not None and others and (length := sum(self.pieces[run]) * size) < LINE:
                nearest = min(others, key=lambda a: self.hints(address.coefficient(a)))
                asked[nearest] += self.hints.count(address.axes()) * size / length
                as_is = as_is and nearest is next(a for a in dims if a is not run)
        return dims[0] if as_is else max(dims, key=asked.__getitem__)

    def _together(self) -> frozenset[Axis]:
        """The held row axes that folds across programs cross, where carrying every lane of them would take more registers than a tile's own values;
        the columns of a tile, where sums along held columns cross them."""
        if self.line in self.pieces and self.takes_columns():
            return frozenset((self.line,))
        folds = {e.key for e in self.crossing if e.monoid not in CARRIERS}
        inside = frozenset(a for _, over, _ in folds for a in over if a in self.pieces and a in self.rows and a not in self.looped)
        lanes = math.prod(sum(self.pieces[a]) for a in self.pieces)
        return inside if inside and self.shift is None and lanes * len(folds) > CARRIED_LANES else frozenset()

    def _stages_of_rows(self) -> tile_stages.Stages | None:
        """How rows are held in stages, or None: also where a program that can hold one keeps what it reads beside rows that begin anywhere."""
        if self.crossed:
            return tile_stages.carrying(self.b, self.rows, self.line, self.crossed, self.hints, self.target)
        if not tile_stages.possible(self.b, self.rows, self.line, self.hints, self.target):
            return None
        self.shift = self.shift_along(self.line)
        few = self.hints.count(self.b.parallel) < self.target.threads
        shift, kept, self.shift = self.shift, () if few else self.rows_alike(), None
        found = tile_stages.keeping(self.b, self.line, shift.group, self.hints, self.target) if kept else \
            tile_stages.turns(self.b, self.rows, self.line, self.hints, self.target) if shift is None else None
        row = self.hints.count(self.rows) * sum(e.dtype.bytes for e in tile_stages.held(self.b, frozenset(self.rows)))
        whole = self.hints.count(self.rows) <= HELD and row <= HELD_BYTES
        return found if found is not None or kept and whole else tile_stages.stages(self.b, self.rows, self.line, self.hints, self.target)

    def _staged(self, s: tile_stages.Stages) -> TileSchedule:
        """One row to a program, or to several."""
        self.pieces.update(s.pieces)
        self.shift = None if self.crossed and s.sharers > sharing.FEW_SHARERS else self.shift_along(self.line)
        s = s if self.crossed else tile_stages.of_two(s, self.hints.count(self.rows), self.narrowest(), self.shift is not None)
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
        kept = (self.rows_alike() or tuple(self.b.parallel)) if s.kept else ()
        split = tuple(a for a in self.order if a in self.crossed) if self.crossed else kept
        self.resident = REGISTERS // (32 * s.warps * s.registers)
        if s.sharers > 1:
            self.resident *= sharing.clusters(s.sharers, self.target) / self.target.threads
        return TileSchedule(self.order, dims, tuple((a, self.pieces[a]) for a in dims), frozenset(), split,
                            self._programs(split) if split else 1, exact, s.warps, s.stages, wide=self.wide,
                            shift=self.shift, staged=s.shared, sharers=s.sharers,
                            registers=s.registers if s.registers < tile_stages.OPEN_REGISTERS else 0)

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
        if held and not turns and self.reads_wide() and found.columns > 1 == found.matrices and (found.rows - most) * IDLE_ROWS > most:
            rows = evenly(most, IDLE_PIECE) or rows
        self.pieces = {a: rows if a is down else (found.columns,) for a in self.order if a is down or a is self.line and found.columns > 1}
        if found.matrices > 1:
            beside = next(a for a in reversed(self.order) if a in self.b.parallel and a is not self.line)
            self.pieces = {a: self.pieces.get(a, (found.matrices,)) for a in self.order if a in self.pieces or a is beside}
        warps = self.down_columns(tuple(self.pieces), math.prod(map(sum, self.pieces.values())), found.warps)
        self.resident = found.programs * -(-self.hints.count(self.b.parallel - self.crossed) // found.columns) / self.target.threads
        split = tuple(self.crossed)
        stages = COLUMN_STAGES if found.once and found.warps > 1 and self.folds_columns() else \
            SHARED_STAGES if split and found.warps == 1 and self.narrowest() < 4 and not found.once else 1
        stages = stages if fits(stages, self.b, self.pieces, {*split, *self.looped}) else 1
        return TileSchedule(self.order, tuple(self.pieces), tuple(self.pieces.items()), frozenset(self.looped), split,
                            self._programs(split) if split else 1, frozenset(a for a in self.pieces if self._exact(a)), warps, stages,
                            wide=self.wide, by_thread=found.by_thread,
                            once=found.once or once(self.b, self.line, self.looped, self.hints, self.target))

    def _flat(self, count: int) -> TileSchedule:
        """So many short rows to a program, which are read as one run."""
        self.pieces = {a: tile_flat.pieces(self.folds, self.hints.most(a.extent)) if a is self.line else (power(count),) for a in self.order}
        exact = frozenset((self.line,)) if sum(self.pieces[self.line]) == self.hints.exactly(self.line.extent) else frozenset()
        return TileSchedule(self.order, self.order, tuple(self.pieces.items()), frozenset(), (), 1, exact, tile_flat.WARPS,
                            wide=self.wide, flat=count)

    def _rows_beside(self, rows: turned_rows.Rows) -> TileSchedule:
        """Several rows to a program, read as they lie; programs share what folds cross."""
        self.pieces, self.looped = {a: rows.pieces[a] for a in self.order if a in rows.pieces}, set(rows.looped)
        split = tuple(a for a in self.order if a in self.crossed)
        self.resident = CARRY_RESIDENT / rows.warps
        stages = rows.stages if fits(rows.stages, self.b, self.pieces, {*split, *rows.looped}) else 1
        programs, exact = self._programs(split, True) if split else 1, frozenset(a for a in self.pieces if self._exact(a))
        return TileSchedule(self.order, tuple(self.pieces), tuple(self.pieces.items()), rows.looped, split, programs, exact, rows.warps, stages,
                            wide=self.wide, once=once(self.b, self.line, self.looped, self.hints, self.target), ahead=rows.ahead)

    def _exact(self, a: Axis) -> bool:
        sizes = self.pieces[a]
        if self.shift is not None and a is self.shift.axis:
            return False
        if a in self.b.parallel:
            return self.hints.divides(sum(sizes), a.extent)
        return self.hints.exactly(a.extent) == sum(sizes) if a not in self.looped else self.hints.divides(sizes[0], a.extent)

    def _programs(self, split, several: bool = False) -> int:
        """Programs that share the split axes: enough to fill the machine, no more than there are blocks. `several`: rows are under way at once."""
        extent = lambda a: self.hints(self.shift.words if self.shift is not None and a is self.shift.axis else a.extent)
        size = lambda a: 1 if a not in self.pieces else self.pieces[a][0] if self.shift is not None and a is self.shift.axis else sum(self.pieces[a])
        blocks = lambda axes: math.prod(-(-extent(a) // size(a)) for a in axes)
        kept = blocks(a for a in self.order if a in self.b.parallel and a not in split)
        want = max(1, int(self.target.threads * self.resident))
        if self.crossed and self.hints.count(self.looped) >= LONG and not any(e.free for e in self.crossing):
            want = max(want, ALONE)
        want *= tile_statistics.shares(self, self.pieces)
        if self.sums_anywhere() and split == (self.line,):
            want *= SUMMED_ANYWHERE_SHARES
        keeps = not self.crossed and self.shift is not None and self.resident >= RESIDENT and self.narrowest() == 2
        if keeps and extent(self.shift.axis) > KEPT_WORDS and blocks(split) >= ROUNDS * want:
            want *= ROUND_PROGRAMS
        share = want // kept if self.carries or self.down or want >= MANY * kept or want // kept * kept >= FILLED * want else -(-want // kept)
        most = blocks(split)
        programs = max(1, min(share, most))
        if self.walks_anywhere():
            programs = max(1, min(programs, most // DOWN_LEAST))
        while self.carries and several and programs * FEW_TURNS > most and programs // 2 * kept >= self.target.threads:
            programs //= 2
        if self.shift is None or self.words_shared(self.shift.axis):
            return programs
        group = self.shift.group                                    # every row of a program begins alike
        return -(-most // group) * group if programs == most else programs // group * group or group
