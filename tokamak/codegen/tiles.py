"""(Body, TileSchedule) -> TileKernels: what a GPU runs. A body becomes one kernel, or two where folds cross its parallel axes: the first leaves
partial results in a workspace, the second is the body that folds those.

A program of a kernel works on one tile. A tiled axis is a dimension of every register, a row axis with several pieces has a register for each piece;
all other axes are plain integers. Values are computed in the outermost scope that has what they depend on: the program, the loop over its share of
the split axes, the loops over the rows.
"""
from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from ..fuse.gpu import atomic
from ..ir.expr import Const, Expr, Load, Op, Reduce, Rewriter, Scan, walk
from ..ir.index import Axis, Fetch, Index, as_index
from ..ir.ops import MEANS
from ..schedule.body import Body, Memory, Store, coalesce
from ..schedule.tile_access import loops_behind
from ..schedule.tile_schedule import TileSchedule
from . import tile_words as words
from .scope import Unschedulable, all_atoms
from .tile_ahead import TileAhead
from .tile_values import empty
from .tile_kernel import For, Scope, TileKernel, Value, Workspace


LITTLE = 1 << 21        # elements of a body whose programs ask for all that they read first: the second kernels of backward norms, which fold five
                        # values one after the other, 1.4 us, 3.0
ASKED = 64              # elements of a thread at most that are asked for so
BESIDE = 8              # registers of a thread at most that hold what is asked for beside what is folded: weight norm's gradient of 2232916 x 18 bf16
                        # 72.7 us, 86.9 without this and AHEAD (H200)
AHEAD = 16              # registers of a thread at most that hold what of the next pieces is asked for before anything is written: log-softmax's
                        # gradient of 57252 x 304 f16 27.8 us, 35.0, of 4485 x 16384 bf16 104.5, 117.2; as many, and no more, of those that the
REST = 28               # rows and these other registers leave: LayerNorm of 127 rows of 131071 in bf16 spilled so, 78.4 us, 47.2;
MANY_WARPS = 16         # none where programs are large, of which a multiprocessor holds one less then: 1525 rows of 8944 in bf16 23.4 us, 19.3
MOST_REGISTERS = 255


class TileLowering(TileAhead):
    """The main kernel of a body, and what is left for further ones (`spaces`)."""

    # -- the kernel --------------------------------------------------------------------------------------------------------
    def kernel(self) -> TileKernel:
        s = self.s
        kept = [a for a in s.order if a in self.body_.parallel and a not in s.split]
        number, grid = self._place()
        for a in kept:
            grid = grid * self.blocks(a)
        share = None
        if s.split:
            if kept and s.descending:
                share = self.assign(self.program, f"{number} % {s.programs}", "b")
                number = self.assign(self.program, f"{number} // {s.programs}", "b")
            elif kept:
                count = self.param("int", ("kept",), grid)
                share = self.assign(self.program, f"{number} // {count}", "b")
                number = self.assign(self.program, f"{number} % {count}", "b")
            else:
                share = number
            grid = grid * s.programs
        peels = self._peels(kept)
        if not peels:
            self._decode(self.program, kept, number, "b")
            self.program.open = frozenset(kept)
        self._open_held(share)
        if peels:
            self._in_branches(self.program, kept, number, lambda scope: self._run(scope, self.stores, ()))
        elif s.split:
            self._accumulate(share)
        else:
            self._run(self.program, self.stores, ())
        aligned = frozenset(p.name for p in self.params if p.kind == "int" and self.hints.divides(16, p.source))
        return TileKernel(tuple(self.params), tuple(self.program.lines), grid, s, self.body_, tuple(self.errors), self.sources,
                          tuple(self.spaces.values()), aligned, programs=self.hints(grid))

    def _place(self) -> tuple[str, Index]:
        """This program's number, and how many programs have the same."""
        first = self._program() + (".to(tl.int64)" if self.s.wide else "")
        return self.assign(self.program, f"tl.num_programs(0) - 1 - {first}" if self.s.backward or self.s.descending else first, "b"), as_index(1)

    def _program(self) -> str:
        return "tl.program_id(0)"

    def _begin(self, a: Axis, start: int, size: int) -> str:
        """Where the piece of held axis `a` lies, of `size` elements, that begins `start` elements behind the program's first; '' is 0."""
        return str(start) if start else ""

    def _behind(self, a: Axis, start: int, size: int) -> int:
        """Elements of other programs before the end of such a piece of the last one."""
        return 0

    def _outermost(self, before: str, behind: str) -> tuple[str, str]:
        """Masks of the elements before, and behind, the whole words of a shifted row, where this program has them."""
        return before, behind

    def _range(self, low, high, step) -> str:
        stages = f", num_stages={self.s.stages}" if self.s.stages > 1 else ""
        return f"{'tl.' if stages else ''}range({low}, {high}, {step}{stages})"

    def _open_held(self, share: str | None) -> None:
        shifted = self.s.shift.axis if self.s.shift is not None else None
        dims = [a for a in self.s.dims if not self._words_shared(a)]
        held = [a for a in dims if (a not in self.body_.parallel or a is shifted) and a not in self.s.looped]
        self.held = [a for a in dims if a in held or a in self.body_.parallel and len(self.s.sizes(a)) > 1]
        if self.s.shift is not None:
            self._open_shifted(self.s.shift.axis, share)
        for a in held:
            if self.s.shift is not None:
                continue
            start = 0
            for n, size in enumerate(self.s.sizes(a)):
                ragged = a not in self.s.exact and self._behind(a, start, size) + start + size > self.hints.least(a.extent)
                self._tile_coordinate(self.program, a, self._begin(a, start, size), n, ragged)
                start += size
        self.program.open |= frozenset(held)

    def _open_shifted(self, a: Axis, share: str | None) -> None:
        """Pieces of rows that begin anywhere: whole 16-byte words, and one for the elements before them and behind them."""
        scope, shift, (*whole, ends) = self.program, self.s.shift, self.s.sizes(a)
        group, n = shift.group, self._number(self.extent(a))
        for x in self.s.split if not self._words_shared(a) else ():         # every row of a program begins like its first
            self._scalar_coordinate(scope, x, share)
        origin, _ = self.text(shift.origin, ("origin",))
        before = self.assign(scope, f"tl.minimum((0 - ({origin})) & {group - 1}, {n})", "h")
        words = self.assign(scope, f"({n} - {before}) // {group} * {group}", "h")
        self.words_from, self.words_in, start = before, words, 0
        for piece, size in enumerate(whole if a not in self.s.looped and not self._words_shared(a) else ()):
            ragged = self._behind(a, start, size) + start + size > (self.hints.least(a.extent) - group + 1) // group * group
            begin = self._begin(a, start, size)
            begin = begin if self.block is None else f"{self.block} * {size}"
            self._whole_words(scope, a, piece, f"{begin} + " if begin else "", ragged or self.block is not None)
            start += size
        self.ends = lanes = self.assign(scope, self._placed(f"tl.arange(0, {ends})", a), "j")
        at = self.assign(scope, f"tl.where({lanes} < {group}, {lanes}, {before} + {words} - {group} + {lanes})", "i")
        head, tail = self._outermost(f"{lanes} < {before}", f"{at} < {n}")
        mask = self.assign(scope, f"tl.where({lanes} < {group}, {head}, {tail})", "m")
        first = self.block if not self._words_shared(a) else share          # of those that have parts of the row, who has its ends
        if first is not None:
            mask = self.assign(scope, f"{mask} & ({first} == 0)", "m")
        self.coords[a, len(whole)] = (Value(at, self._shifted_dims(), scope, True), mask)

    def _whole_words(self, scope: Scope, a: Axis, piece: int, start: str, ragged: bool) -> None:
        """Coordinates of one piece of the whole words of a shifted row."""
        lanes = self._placed(f"tl.arange(0, {self.s.sizes(a)[piece]})", a)
        self.lanes[piece] = lanes = self.assign(scope, f"{start}{lanes}", "j")
        mask = self.assign(scope, f"{lanes} < {self.words_in}", "m") if ragged else None
        self.coords[a, piece] = (Value(self.assign(scope, f"{self.words_from} + {lanes}", "i"), self._shifted_dims(), scope, True), mask)

    # -- folds across programs ---------------------------------------------------------------------------------------------
    def _accumulate(self, share: str) -> None:
        """A loop over this program's share of the split axes; what crosses them is carried and left in workspaces."""
        s = self.s
        total = as_index(1)
        for a in s.split:
            total = total * self.blocks(a)
        crossing: dict = {}
        for st in self.stores:
            for e in walk(st.expr):
                if isinstance(e, Reduce) and set(e.over) & set(s.split):
                    crossing.setdefault(e.key, e)
        for e in crossing.values():
            if (set(e.over) | e.free) & self.body_.parallel != set(self.body_.parallel) or set(s.split) - set(e.over):
                raise Unschedulable("folds across programs over different axes")
            if e.free & s.looped:
                raise Unschedulable("partial results along an axis that is run through in a loop")
            if any(isinstance(x, Reduce) and set(x.over) & set(s.split) for a in e.args for x in walk(a)):
                raise Unschedulable("a fold across programs of another one")
        local = [st for st in self.stores if not any(isinstance(e, Reduce) and set(e.over) & set(s.split) for e in walk(st.expr))]
        first = Scope(self.program.lines, self.program.open | frozenset(s.split), self.program)
        if any(map(self._later, crossing.values())):
            self._decode(first, list(s.split), share, "b")
        carried = {e: self._accumulators(self.program, e, first) for e in crossing.values()}
        self._share_loops(share, total, local, tuple(crossing.values()), carried)
        ends = self._ends(self.program, s.split, carried, ())
        late = [st for st in self.stores if st not in local]
        if s.programs == 1 and self._finished(late, carried):
            for e, accumulators in carried.items():
                for choice in self._choices(e.free):
                    self.piece.update(choice)
                    self._remember(self.program, e, self._whole(e, accumulators, ends.get(e)))
                self._first_pieces()
            self._store_all(self.program, late)
            return
        for e, accumulators in carried.items():
            self._leave(e, accumulators, share, ends.get(e))

    def _finished(self, late: list[Store], crossing) -> bool:
        """Can a program that has all of the split axes to itself store what is made of the folds along them, too? It does so at the coordinates that
        the folds leave: of the axes that it has to itself, and of the rows that it holds, of those along them alone."""
        kept, held = self.body_.parallel - set(self.s.split), set(self.s.dims) - self.s.looped - set(self.s.split)
        left = {e.free for e in crossing} | {s.axes for s in late}
        if len(left) != 1 or any(s.monoid is not None for s in late):
            return False
        free, = left
        return free == kept or kept < free and held == free - kept

    def _whole(self, e: Reduce, accumulators, ends: tuple | None) -> tuple[Value, ...]:
        """A program's carried values folded, with what the `ends` of its row give."""
        values = self._finish(self.program, e, accumulators)
        return values if ends is None else self._with_ends(self.program, e, values, ends)

    def _leave(self, e: Reduce, accumulators, share: str, ends: tuple | None = None) -> None:
        """Folds a program's carried values, with what the `ends` of its row give, and stores them: workspace[share, free coordinates]."""
        free = self._space_axes(e)
        size = as_index(1)
        strides: dict = {}
        for a in reversed(free):
            strides[a] = size
            size = size * a.extent
        made = [Workspace((size * self.s.programs,), x.dtype, self.device) for x in e.args]
        self.spaces[e] = (e, tuple(free), made)
        memories = [Memory(node, node.dtype) for node in made]
        for choice in self._choices(frozenset(free)):
            self.piece.update(choice)
            values = self._whole(e, accumulators, ends)
            flat = as_index(0)
            for a in free:
                flat = flat + as_index(a) * strides[a]
            rest = self.param("int", ("space", size), size)
            for value, memory in zip(values, memories):
                address, dims = self.text(flat, ("space", size))
                self._write(self.program, memory, f"{share} * {rest} + {address}", dims, value)
        self._first_pieces()

    def _space_axes(self, e: Reduce) -> list[Axis]:
        """The axes of what is left of `e`, in the order in which they lie in the workspace."""
        return [a for a in self.s.order if a in e.free]

    # -- a run over the rows -------------------------------------------------------------------------------------------------
    def _run(self, outer: Scope, stores, crossing, carried=None) -> None:
        """Stores, and the folds `crossing` that are carried on: in loops over the looped axes, as many as the folds' levels ask for."""
        self.scope = outer
        looped = [a for a in self.s.order if a in self.s.looped]
        roots = [s.expr for s in stores] + [s.guard for s in stores if s.guard is not None] + [x for e in crossing for x in e.args]
        roots += [x.expr for s in stores for x in all_atoms(s.address) if isinstance(x, Fetch)]
        folds: dict = {}
        scans = [e for e in walk(*roots) if isinstance(e, Scan) and e.along in self.s.looped]
        if scans and len(looped) > 1:
            raise Unschedulable("a scan along one of several looped axes")
        for e in walk(*roots):
            if isinstance(e, Reduce) and set(e.over) & self.s.looped:
                if not self.s.looped <= set(e.over):
                    raise Unschedulable("a fold over some of the looped axes")
                folds.setdefault(e.key, e)
        if not looped and not crossing:
            self._ask(roots)
        passes = lambda e: loops_behind(e, self.s.looped)
        depth = lambda e: max(map(passes, e.args), default=0)
        last = max([depth(e) for e in folds.values()] + [passes(s.expr) for s in stores] + [depth(e) for e in crossing], default=0)
        for n in range(last + 1):
            now = [e for e in folds.values() if depth(e) == n]
            through = [s for s in stores if passes(s.expr) == n]
            inside = [s for s in through if s.axes & self.s.looped]
            across = [e for e in crossing if depth(e) == n]
            along = [e for e in across if set(e.over) & self.s.looped]
            if looped and (now or inside or along):
                self._pass(outer, looped, now, inside, along, carried)
            across = [e for e in across if e not in along] if looped else across
            self.scope = outer
            for e in across:
                self._carry(outer, e, carried[e])
            self._store_all(outer, [s for s in through if not s.axes & self.s.looped])

    def _read_alone(self, roots) -> list[Load]:
        """What `roots` read wherever they stand: not under a guard or at an address that is read."""
        plain = lambda x: x.guard is None and not any(isinstance(a, Fetch) for i in x.index for a in i.atoms())
        return [x for x in walk(*roots) if isinstance(x, Load) and plain(x)]

    def _read_by_folds(self, roots) -> list[Load]:
        """The same of what they fold."""
        return self._read_alone([a for e in walk(*roots) if isinstance(e, Reduce) for a in e.args])

    def _ask(self, roots) -> None:
        """Asks, before anything is folded, for what programs read that fold a little of several values, or that read little beside what they fold.
        What is read behind a fold would be waited for again; and what is written might lie where the next value is read, for all that the compiler
        knows."""
        if not any(isinstance(e, Reduce) for e in walk(*roots)):
            return
        reads, folded = self._read_alone(roots), self._read_by_folds(roots)
        beside = [x for x in reads if x not in folded]
        little = self.hints.count(self.body_.axes) <= LITTLE and self.s.shift is None and not self.s.split
        if little and sum(map(self._elements_of, reads)) <= ASKED * 32 * self.s.warps:
            asked = reads
        elif self.s.staged is None and beside and self._registers_for(beside) <= BESIDE * 32 * self.s.warps:
            asked = [*folded, *beside]
        else:
            return
        for x in asked:
            for choice in self._choices(x.axes()):
                self.piece.update(choice)
                self.emit(x)
        self._first_pieces()

    def _elements_of(self, x: Load) -> int:
        """Elements of all pieces of a program's tile."""
        return math.prod(sum(self.s.sizes(a)) for a in self.s.dims if a in x.axes())

    def _registers_for(self, reads: list[Load]) -> int:
        """Registers that they take, of all threads together."""
        return sum(self._elements_of(x) * x.dtype.bytes // 4 for x in reads)

    def _pass(self, outer: Scope, looped, folds, stores, crossing, carried) -> None:
        first = Scope(outer.lines, outer.open | set(looped), outer)
        for a in looped if any(map(self._later, folds)) else ():
            self._chunk(first, a, "")
        accumulators = {e: self._accumulators(outer, e, first) for e in folds}
        scope, loops = outer, []
        scans = list({(e.monoid, e.args): e for r in [*(s.expr for s in stores), *(a for e in (*folds, *crossing) for a in e.args)]
                      for e in walk(r) if isinstance(e, Scan) and e.along in self.s.looped}.values())
        carries = {(e.monoid, e.args): self._carry_registers(outer, e) for e in scans}
        saved, self.carries = getattr(self, "carries", {}), carries
        for a in looped:
            number = self.fresh("r")
            tiled = a in self.s.dims
            shift = self.s.shift is not None and a is self.s.shift.axis
            end = self.words_in if shift else self._number(self.extent(a))
            loop = For(f"for {number} in {self._range(0, end, self.s.sizes(a)[0] if tiled else 1)}", [])
            loops.append((scope, loop))
            scope = Scope(loop.lines, scope.open | {a}, scope)
            self._chunk(scope, a, number)
        self.scope = scope
        ahead = self._row_ahead(outer, scope, looped, number)
        self.turns, behind = ahead or self.turns, self.turns
        for e in folds:
            self._carry(scope, e, accumulators[e])
        for e in crossing:
            self._carry(scope, e, carried[e])
        self._store_all(scope, stores)
        scope.lines[:0] = ahead.following.lines if ahead else ()
        self.turns = behind
        for parent, loop in reversed(loops):
            parent.lines.append(loop)
        self.carries = saved
        self.scope = outer
        ends = self._ends(outer, looped, folds, stores)
        for e in folds:
            for choice in self._choices(e.free):
                self.piece.update(choice)
                whole = self._finish(outer, e, accumulators[e])
                whole = self._with_ends(outer, e, whole, ends[e]) if e in ends else whole
                self._remember(outer, e, whole)
            self._first_pieces()

    def _chunk(self, scope: Scope, a: Axis, start: str) -> None:
        """Coordinates of what a loop over row axis `a` takes at once, from `start` on ('' is its beginning)."""
        if self.s.shift is not None and a is self.s.shift.axis:
            self._whole_words(scope, a, 0, f"{start} + " if start else "", True)
        elif a in self.s.dims:
            self._tile_coordinate(scope, a, start, 0, a not in self.s.exact)
        else:
            self._scalar_coordinate(scope, a, start or "0")

    def _with_ends(self, scope: Scope, e: Reduce, whole: tuple[Value, ...], ends: tuple) -> tuple[Value, ...]:
        """What `e` gives of whole words, with what `_ends` gives: indices are i64 by now on both sides."""
        return tuple(replace(v, var=x) for v, x in zip(whole, self._combined(scope, e, tuple(v.var for v in whole), ends)))

    def _ends(self, outer: Scope, looped, folds, stores) -> dict:
        """What a loop over the whole words of shifted rows leaves out: the folds of the elements before and behind them, and their stores."""
        shift, found = self.s.shift, {}
        if shift is None or shift.axis not in looped:
            return found
        scope = Scope(outer.lines, outer.open | {shift.axis}, outer)
        self.piece[shift.axis], self.scope = 1, scope
        for e in folds:
            values = [self._masked(scope, v, self._type(e, n), e, n) for n, v in enumerate(self._arguments(e))]
            folded, _, _ = self._across(scope, e, tuple(v.var for v in values), self._fold_dims(e))
            found[e] = tuple(self.assign(scope, f"{v}.to(tl.int64)") if self._narrow(e, n) else v for n, v in enumerate(folded))
        for s in stores:
            self._store(scope, s, *self.text(s.address, ("address", s.memory)), self.emit(s.expr), None, {})
        self.piece[shift.axis], self.scope = 0, outer
        return found

    # -- stores --------------------------------------------------------------------------------------------------------------
    def _store_all(self, scope: Scope, stores) -> None:
        self.scope = scope
        written = {s.memory for s in stores}
        aliased = any(isinstance(x, Load) and x.node in written for s in stores for x in walk(s.expr))
        waiting: list = []
        for s in stores:
            again = self.s.reread and not aliased and self._know_folds(s)
            choices = list(self._choices(s.axes))
            for m, choice in enumerate(choices):
                self.piece.update(choice)
                if again:
                    self._forget()
                value = self.emit(s.expr)
                guard = self.emit(s.guard) if s.guard is not None else None
                self.guard = guard
                address, dims = self.text(s.address, ("address", s.memory))
                self.guard = None
                job = (s, address, dims, value, guard, dict(self.piece))
                if aliased:
                    waiting.append(job)
                    continue
                if not again:
                    self._read_before_writing(s.expr, choices[m + 1:])
                self._store(scope, *job)
            self._first_pieces()
        for job in waiting:
            self.piece.update(job[-1])
            self._store(scope, *job)
        self._first_pieces()

    def _read_before_writing(self, e: Expr, choices: list[dict]) -> None:
        """Asks for what `e` reads of the next pieces, as much as there are registers for, before anything is written: what is written might lie
        where the next value is read, for all that the compiler knows, and would be waited for."""
        behind = (self.s.looped | set(self.s.split)) - self.scope.open          # what loops that are over have read is in folds by now
        reads = [x for x in self._read_alone([e]) if not x.axes() & behind] if choices else []
        left, saved = self._ahead_registers * 32 * self.s.warps if reads else 0, dict(self.piece)
        for choice in choices if left else ():
            self.piece.update(choice)
            unknown = [x for x in reads if not self._has(x)]
            left -= sum(math.prod(self.s.sizes(a)[self.piece.get(a, 0)] for a in self.s.dims if a in x.axes()) * x.dtype.bytes // 4 for x in unknown)
            if left < 0:
                break
            for x in unknown:
                self.emit(x)
        self.piece.update(saved)

    @cached_property
    def _ahead_registers(self) -> int:
        """Registers of a thread for what is read before the pieces in front of it are written: of those that it may have, what the rows that are
        held and the rest leave."""
        held, threads = self._read_by_folds([s.expr for s in self.stores]), 32 * self.s.warps
        most = min(self.s.registers or MOST_REGISTERS, 65536 // threads)
        wide = self.s.staged is None and self.s.warps >= MANY_WARPS
        return max(min(0 if wide else AHEAD, most - REST - self._registers_for(held) // threads), 0)

    def _know_folds(self, s: Store) -> bool:
        """Computes what of held rows is folded for `s`. Says whether there is such a thing."""
        folds = [e for e in walk(s.expr) if isinstance(e, Reduce) and set(e.over) & set(self.held)]
        for e in folds:
            self.emit(e)
        return bool(folds)

    def _store(self, scope: Scope, s: Store, address: str, dims, value: Value, guard, _pieces) -> None:
        self._write(scope, s.memory, address, dims, value, s, guard, frozenset(a for a in self.s.dims if a in s.axes))

    def _write(self, scope: Scope, memory: Memory, address: str, dims, value: Value, store: Store | None = None, guard: Value | None = None,
               along=None) -> None:
        if empty(memory):
            return
        along = dims if along is None else along
        masks = self.mask(along) + ([guard.var] if guard is not None else [])
        block = value.block or bool(dims) or bool(guard and guard.block) or bool(along)
        whole = along | dims | value.dims
        offset = f"({address} + tl.zeros({self.shape(whole)}, tl.int32))" if block and (dims != whole or not dims) else address
        mask, where = " & ".join(masks), self.memory(memory)
        target = f"{where} + {offset}" if offset != "0" else where
        if store is None or store.monoid is None:
            hint = ", eviction_policy='evict_first'" if self.s.backward else ""
            scope.lines.append(f"tl.store({target}, {value.var}{f', mask={mask}' if mask else ''}{hint})")
        elif store.axes & self.s.looped or not atomic(store.monoid, memory.dtype):
            if store.axes & self.s.looped & set(self.s.dims):
                raise Unschedulable("several updates of a tile that are to be made one after the other")
            scope.lines += words.update_in_order(store.monoid, memory.dtype, target, value.var, mask, (self.fresh(), self.fresh()))
        else:
            scope.lines.append(words.update(store.monoid, where, offset, value.var, mask))


def base_body(body: Body) -> Body:
    """The body that fills a scatter's result with its base. NaN that maxima or minima are to keep get the sign which updates by bits look for."""
    s, monoid = body.base, body.stores[-1].monoid
    expr = s.expr
    if expr.dtype.is_float and monoid in ("max", "min") and atomic(monoid, expr.dtype):
        nan = Op("copysign", Const(float("nan"), expr.dtype), Const(1 if monoid == "max" else -1, expr.dtype))
        expr = Op("where", Op("isnan", expr), nan, expr)
    return Body(tuple(sorted(s.axes, key=lambda a: a.id)), (Store(s.memory, s.address, expr, s.axes),), s.axes)


def mean_of(share: Axis, level: Expr, mean: Expr) -> Expr:
    """The weighted mean of all, of what each share leaves (`ops.MEANS['expmean']`)."""
    weight = Op("exp", Op("sub", level, Reduce("max", (share,), (level,))))
    return Op("div", Reduce("sum", (share,), (Op("mul", weight, mean),)), Reduce("sum", (share,), (weight,)))


def combining(body: Body, schedule: TileSchedule, spaces: dict) -> list[Body]:
    """The bodies that fold the partial results which a first kernel has left, and store what depends on them: one for each set of axes."""
    share = Axis(max((a.id for a in body.axes), default=0) + 300000, as_index(schedule.programs))
    replaced: dict = {}
    for e, free, nodes in spaces.values():
        size, flat = as_index(1), as_index(0)
        for a in reversed(free):
            flat = flat + as_index(a) * size
            size = size * a.extent
        position = as_index(share) * size + flat if schedule.programs > 1 else flat
        args = tuple(Load(Memory(node, node.dtype), (position,)) for node in nodes)
        for n in range(len(args)):
            again = mean_of(share, *args) if e.monoid in MEANS else Reduce(e.monoid, (share,), args, n)
            replaced[Reduce(e.monoid, e.over, e.args, n)] = again if schedule.programs > 1 else args[n]
    rewrite = Rewriter()
    rewrite.memo.update(replaced)
    groups: dict = {}
    for s in body.stores:
        if any(x in replaced for x in walk(s.expr)):
            groups.setdefault(s.axes, []).append(Store(s.memory, s.address, rewrite(s.expr), s.axes, s.monoid, s.guard))
    return [coalesce(Body((*(a for a in body.axes if a in axes), *((share,) if schedule.programs > 1 else ())), tuple(stores), axes))
            for axes, stores in groups.items()]
