"""Kernels whose rows are held in stages, by one program or shared by the neighbours of a cluster.

A fold over a row ends a stage. What was computed from the row before it is computed again behind it, from values in their own width: registers hold
twice as many of 16 bits. Where a row is shared, each program folds its share; the results of all are exchanged and folded, in their order, by each.
Folds that need nothing of one another are exchanged at once. A row is read once.
"""
from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from ..ir.dtype import BF16, BOOL, F32, F64, I32, I64, DType
from ..ir.expr import Cast, Expr, Load, Random, Reduce, walk
from ..ir.index import Axis, Fetch, Index, as_index
from ..schedule.body import Store, exprs_of
from ..schedule.tile_stages import power
from . import tile_words as words
from .scope import Unschedulable, all_atoms
from .tile_kernel import Scope, Value
from .tile_folds import folds_elements
from .tile_sums import SUMS
from .tiles import TileLowering

AT_ONCE = 4         # numbers of one exchange


class StagedLowering(TileLowering):
    """The kernel of a body whose row axis `s.staged` is held in stages, by `s.sharers` programs."""

    exchanged = False
    turn: str | None = None         # register that counts the turns of the loop in which values are swapped
    swaps = 0
    room = 0                        # bytes in which numbers of several rows are exchanged
    stages: "list | tuple" = ()
    beside: "list | tuple" = ()

    @property
    def row(self) -> frozenset:
        return frozenset((*(a for a in self.s.dims if a not in self.body_.parallel), self.s.staged))

    def _open_held(self, share: str | None) -> None:
        """Of an axis that is no dimension each program has the coordinate that is its own number."""
        super()._open_held(share)
        if self.s.staged not in self.s.dims:
            self._scalar_coordinate(self.program, self.s.staged, self.member)
            self.program.open |= {self.s.staged}

    def _place(self) -> tuple[str, Index]:
        number, count = super()._place()
        if self.s.sharers == 1:
            return number, count
        if not self.s.split:
            self.program.lines.insert(0, "tk.arrive()")
        self.member = self.assign(self.program, f"{number} % {self.s.sharers}", "b")
        self.lanes_of = self.assign(self.program, f"tl.arange(0, {power(self.s.sharers)})", "i")
        return self.assign(self.program, f"{number} // {self.s.sharers}", "b"), as_index(self.s.sharers)

    def _begin(self, a: Axis, start: int, size: int) -> str:
        """Programs take pieces of rows side by side in turn, so that those of a cluster read what lies together: EvoNorm of 32 x 256 x 56 x 56 in
        NHWC in bf16 41.2 us, 43.8, GroupNorm backward 65.8, 67.2."""
        if a is not self.s.staged or self.s.sharers == 1:
            return super()._begin(a, start, size)
        each, before = (size, start * self.s.sharers) if self.side else (self._share(), start)
        return f"{self.member} * {each}" + (f" + {before}" if before else "")

    def _share(self) -> int:
        """Elements of a row to one program."""
        sizes = self.s.sizes(self.s.staged)
        return sum(sizes if self.s.shift is None else sizes[:-1])

    def _behind(self, a: Axis, start: int, size: int) -> int:
        return (self.s.sharers - 1) * (start + size if self.side else self._share()) if a is self.s.staged else 0

    def _outermost(self, before: str, behind: str) -> tuple[str, str]:
        if self.s.sharers == 1:
            return before, behind
        return f"({before}) & ({self.member} == 0)", f"({behind}) & ({self.member} == {self.s.sharers - 1})"

    # -- stages --------------------------------------------------------------------------------------------------------------
    def _accumulate(self, share: str) -> None:
        """In a loop values are swapped, turn by turn."""
        if self.s.sharers > 1:
            at = len(self.program.lines)
            self.turn = self.assign(self.program, "tl.full([], 0, tl.int32)", "y")
        super()._accumulate(share)
        if self.s.sharers > 1:
            self.program.lines.insert(at, f"tk.meet({self.swaps})")

    def _run(self, outer: Scope, stores, crossing, carried=None) -> None:
        """Stores, and the folds `crossing` that are carried on, each behind as many folds of the row as it needs."""
        if any(not self.row <= e.free for e in crossing):
            raise Unschedulable("rows held in stages, with folds across them that are not along them")
        roots = [s.expr for s in stores] + [s.guard for s in stores if s.guard is not None] + [x for e in crossing for x in e.args]
        roots += [x.expr for s in stores for x in all_atoms(s.address) if isinstance(x, Fetch)]
        folds = {e.key: e for e in walk(*roots) if isinstance(e, Reduce) and self.row & set(e.over)}
        self.beside = [x for x in walk(*(s.expr for s in stores)) if isinstance(x, Load) and self.s.staged not in x.free and x.guard is None
                       and not any(isinstance(a, Fetch) for i in x.index for a in i.atoms())]
        before = lambda exprs: max(map(self._folded, exprs), default=0)
        last = max([1 + before(e.args) for e in folds.values()] + [before((s.expr,)) for s in stores] + [before(e.args) for e in crossing], default=0)
        self.scope = self.stage = outer
        self.stages, self.swaps = [outer], 0
        for n in range(last + 1):
            parts = [part for group in self._groups([e for e in folds.values() if before(e.args) == n]) for part in self._pieces_of(group)]
            for e in crossing:
                if before(e.args) == n:
                    self._carry(self.stage, e, carried[e])
            self._store_all(self.stage, [s for s in stores if before((s.expr,)) == n])
            if parts:
                whole = self._exchange(parts)
                self._next_stage()
                for (e, choice), values in whole:
                    self.piece.update(choice)
                    self._remember(self.stage, e, values)
                    self._first_pieces()
        self.scope, self.stages = outer, ()
        if self.room:
            self.program.lines.insert(0, f"tk.room({self.room})")
        if self.turn:
            outer.lines.append(f"{self.turn} = {self.turn} + 1")

    def _groups(self, folds: list[Reduce]) -> list[list[Reduce]]:
        """`folds`, which need nothing of one another, by those that are made at once."""
        alike: dict = {}
        for e in folds:
            alike.setdefault("sums" if self._at_once_with_others(e) else e, []).append(e)
        groups = [group[n:n + SUMS[1]] for group in alike.values() for n in range(0, len(group), SUMS[1])]
        return [part for group in groups for part in ([group] if self._worth(group) else [[e] for e in group])]

    def _pieces_of(self, folds: list[Reduce]) -> list:
        """[((fold, pieces), this program's values there)] of each of `folds`, at each choice of pieces of the row that stay."""
        if len(folds) > 1:
            return [((e, {}), (value,)) for e, value in self._held_sums(folds)]
        found, e = [], folds[0]
        for choice in self._choices(e.free & self.row):
            self.piece.update(choice)
            found.append(((e, choice), self._held_fold(e)))
        self._first_pieces()
        return found

    @property
    def side(self) -> bool:
        """Does a program have several rows, side by side?"""
        return any(a in self.body_.parallel for a in self.s.dims)

    def _folded(self, e: Expr) -> int:
        """How many folds of the row, one behind the other, `e` needs."""
        return max((int(bool(self.row & set(f.over))) + max(map(self._folded, f.args)) for f in walk(e) if isinstance(f, Reduce)), default=0)

    # -- what programs tell each other -------------------------------------------------------------------------------------------
    def _exchange(self, parts: list) -> list:
        """[((fold, pieces), this program's values)] -> the same with those of the whole row. What a program folds of the row that no other has any
        of is whole already."""
        if self.s.sharers == 1:
            return parts
        sent, got = [], []
        shared = [part for part in parts if self.s.staged in part[0][0].over]
        for (e, choice), values in shared:
            self.piece.update(choice)
            sent += [(self._sent(v, x.dtype), self._many(v)) for v, x in zip(values, e.args)]
        for many, same in groupby(sent, key=lambda x: x[1]):
            numbers = [text for text, _ in same]
            for n in range(0, len(numbers), AT_ONCE):
                now = numbers[n:n + AT_ONCE]
                made = [self.fresh("w") for _ in now]
                self.stage.lines.append(f"{', '.join(made)} = {self._asked(now, many)}")
                got += made
        rest, whole = iter(got), [part for part in parts if self.s.staged not in part[0][0].over]
        for (e, choice), values in shared:
            self.piece.update(choice)
            whole.append(((e, choice), self._of_all(e, [next(rest) for _ in e.args], values[0])))
        self._first_pieces()
        return whole

    def _asked(self, now: list[str], many: int) -> str:
        """The call that hands `now` to all programs, each a single number or `many`."""
        if self.turn and many:
            raise Unschedulable("partial folds of several rows at once, in a loop")
        if self.turn:
            self.swaps += 1
            return f"tk.swap{len(now)}({', '.join(now)}, {self.lanes_of}, {self.turn}, {self.s.sharers}, {self.swaps - 1})"
        first, self.exchanged = not self.exchanged, True
        if many:
            at, self.room = self.room, self.room + 8 * len(now) * self.s.sharers * many
            return f"tk.share{len(now)}({', '.join(now)}, {self.s.sharers}, {at}, {first})"
        return f"tk.exchange{len(now)}({', '.join(now)}, {self.lanes_of}, {self.s.sharers}, {first})"

    def _many(self, v: Value) -> int:
        """How many numbers `v` holds, one for each of the rows of a program; 0 where it is a single one."""
        return math.prod(self.s.sizes(a)[self.piece[a]] for a in v.dims) if v.block else 0

    def _sent(self, v: Value, d: DType) -> str:
        """A single number, or a run of them, as what travels."""
        var = v.var
        if v.block:
            if self.s.sharers != power(self.s.sharers):
                raise Unschedulable("partial folds of several rows at once")
            var = self.assign(self.stage, f"tl.reshape({var}, [{self._many(v)}])")
        if d is F64:
            return self.assign(self.stage, f"{var}.to(tl.int64, bitcast=True)")
        return var if d in (F32, I32, I64) else self.assign(self.stage, f"{var}.to(tl.int32)")

    def _of_all(self, e: Reduce, got: list[str], own: Value) -> tuple[Value, ...]:
        """The programs' results of `e` folded, in their order; each as this program's `own`."""
        scope, lanes, values = self.stage, power(self.s.sharers), []
        for n, (x, text) in enumerate(zip(e.args, got)):
            d = x.dtype
            if d not in (F32, I32, I64):
                text = f"{text}.to(tl.float64, bitcast=True)" if d is F64 else f"({text} != 0)" if d is BOOL else f"{text}.to({words.triton_type(d)})"
            if lanes != self.s.sharers:
                text = f"tl.where({self.lanes_of} < {self.s.sharers}, {text}, {words.literal(words.neutral(e.monoid, e.args[0].dtype, n), d)})"
            values.append(self.assign(scope, text))
        made = tuple(self.fresh() for _ in values)
        scope.lines.append(f"{', '.join(made)} = {words.reduce(e.monoid, e.args[0].dtype, tuple(values), 0)}")
        if own.block:
            made = tuple(self.assign(scope, f"tl.reshape({m}, {self.shape(own.dims)})") for m in made)
        return tuple(Value(m, own.dims, scope, own.block) for m in made)

    # -- values of a stage -----------------------------------------------------------------------------------------------------
    def _home(self, axes, values=()) -> Scope:
        """What differs along the row lives in its stage, but for what is the same for all rows of a program."""
        found = super()._home(axes, values)
        along = bool(self.row & axes) or any(self.row & v.dims for v in values)
        return self.scope if along and found in self.stages else found

    def _known(self, e) -> Value | None:
        found = super()._known(e)
        if found is None or not self.row & found.dims or found.scope is self.scope or self.scope not in self.stages or isinstance(e, Reduce):
            return found
        if isinstance(e, (Load, Random)):
            return self._kept(e, found)
        return None if found.scope in self.stages else found

    def _emit_load(self, e: Load) -> Value:
        found = super()._emit_load(e)
        if e.dtype.is_half and self.row & found.dims and self.stages and found.scope not in self.stages:          # kept for all rows of the program
            found = replace(found, var=self.assign(found.scope, f"tk.packed({found.var})"))
            found.scope.memo[e, self._key(e.free)] = found
        earlier = self._again(e) and self.row & found.dims and found.scope is not self.scope and self.scope in self.stages
        return self._kept(e, found) if earlier else found

    def _emit_cast(self, e: Cast) -> Value:
        """What is read of the row as bf16 lies two to a register, and is widened two at a time where `_widens`."""
        if e.dtype is not F32 or e.arg.dtype is not BF16 or not isinstance(e.arg, Load) or not self.stages or not self._widens:
            return super()._emit_cast(e)
        found = self.emit(e.arg)
        return self._put(e, f"tk.widened({found.var})", (), (found,)) if self.row & found.dims else super()._emit_cast(e)

    @cached_property
    def _widens(self) -> bool:
        """Rows side by side, or of which a mean and a variance are taken: LayerNorm of 4095 rows of 16385 82 us, 86 else, of 1024 of 65536
        84.4, 85.6; but softmax and RMSNorm of 256 of 262144 86.3 and 78.6, 80.1 and 77.6 else. Not where some is read along another axis:
        Triton lays it out anew before it is widened, in half as many bytes, as long as it sees that."""
        read = {e.index[0] for e in walk(*exprs_of(self.body_)) if isinstance(e, Load) and self.row <= e.index[0].axes()}
        turns = len({a for at in read for a in self.row if at.coefficient(a) == 1}) > 1
        return not turns and (self.side or any(isinstance(e, Reduce) and e.monoid == "moments" for e in walk(*exprs_of(self.body_))))

    def _again(self, e: Expr) -> bool:
        """Is what was computed from `e` in an earlier stage computed again?"""
        return e.dtype.is_half or self.side and e.dtype.bytes == 4 and isinstance(e, Load)

    def _kept(self, e: Expr, found: Value) -> Value:
        """What an earlier stage has read, as a value of this one."""
        var = self.assign(self.scope, f"tk.again({found.var})") if self._again(e) else found.var
        value = Value(var, found.dims, self.scope, found.block)
        self.scope.memo[e, self._key(e.free)] = value
        return value

    def _held_fold(self, e: Reduce) -> tuple[Value, ...]:
        """Piece after piece, so that one of them is there in the width it is computed in; all that is read is asked for first."""
        pieces = self._asked_for(e)
        if self.side and self.s.sharers > 1:
            self._ask_beside()
        if e.monoid == "moments" and folds_elements(e) and self.s.sharers > 1 and self.side:
            return self._held_moments(e, pieces)
        saved = dict(self.piece)
        folded = self._folded_elements if folds_elements(e) else self._folded_lanes
        parts = {sizes: folded(e, choices) for sizes, choices in pieces.items()}
        self.piece.update(saved)
        return self._lanes(self.scope, e, parts)

    def _ask_beside(self) -> None:
        """Asks for what is read beside the rows, which would be waited for else once the programs have told each other what they fold: GroupNorm
        backward of 32 x 256 x 56 x 56 from NHWC in bf16 67.5 us, 71."""
        saved = dict(self.piece)
        for load in self.beside:
            for choice in self._choices([a for a in self.held if a in load.free]):
                self.piece.update(choice)
                self.emit(load)
        self.piece.update(saved)
        self.beside = ()

    def _asked_for(self, e: Reduce) -> dict:
        """Length -> the choices of pieces that have it, once all that `e` reads of them is asked for."""
        pieces: dict = {}
        for choice in self._choices([a for a in self.held if a in e.over]):
            pieces.setdefault(tuple(self.s.sizes(a)[n] for a, n in choice.items()), []).append(choice)
        saved = dict(self.piece)
        for choice in (c for choices in pieces.values() for c in choices):
            self.piece.update(choice)
            for x in e.args:
                for load in walk(x):
                    if isinstance(load, Load) and self.row & load.free and load.guard is None:
                        self.emit(load)
        self.piece.update(saved)
        return pieces

    def _held_moments(self, e: Reduce, pieces: dict) -> tuple[Value, ...]:
        """The moments of what this program holds, by two sums: the second of squared differences from its own mean, behind which what was read is
        widened again. Other programs' are exchanged at once then."""
        total, saved = Reduce("sum", e.over, e.args[:1]), dict(self.piece)
        first, = self._lanes(self.scope, total, {sizes: self._folded_lanes(total, choices) for sizes, choices in pieces.items()})
        count = self._counted(e)
        mean = self.assign(self.scope, f"{first.var} / tl.maximum({count}, 1.0)")
        self._next_stage()
        parts: dict = {}
        for sizes, choices in pieces.items():
            for choice in choices:
                self.piece.update(choice)
                x = self.emit(e.args[0])
                away = replace(x, var=self.assign(self.scope, f"({x.var} - {mean})"), dims=x.dims | first.dims, block=True)
                away = self._masked(self.scope, away, self._type(e, 1), e, 1).var
                square = (self.assign(self.scope, f"({away} * {away})"),)
                parts[sizes] = self._combined(self.scope, total, parts[sizes], square) if sizes in parts else square
        self.piece.update(saved)
        second, = self._lanes(self.scope, total, parts)
        weight = replace(first, var=self.assign(self.scope, f"tl.zeros_like({first.var}) + {count}"), scope=self.scope)
        return replace(first, scope=self.scope), second, weight

    def _counted(self, e: Reduce) -> str:
        """How many elements `e` folds of what this program holds, as text."""
        a, start, whole, ragged = self.s.staged, 0, 0, []
        inside = math.prod(sum(self.s.sizes(x)) for x in self.s.dims if x in e.over and x is not a)
        for n, size in enumerate(self.s.sizes(a)):
            if self.coords[a, n][1] is None:
                whole += size * inside
            else:
                left = f"tl.minimum({self._number(self.extent(a))} - ({self._begin(a, start, size)}), {size})"
                ragged.append(f"tl.maximum({left}, 0).to(tl.float32) * {float(inside)}")
            start += size
        return self.assign(self.scope, " + ".join([*([f"{float(whole)}"] if whole else []), *ragged])) if ragged else f"{float(whole)}"

    def _next_stage(self) -> None:
        """What was computed from the row is computed again from here on."""
        self.scope = self.stage = Scope(self.stages[0].lines, self.stages[0].open, self.stage)
        self.stages.append(self.stage)

    def _folded_lanes(self, e: Reduce, choices: list) -> tuple:
        """The pieces `choices`, of one length, folded lane by lane."""
        made: tuple = ()
        for choice in choices:
            self.piece.update(choice)
            values = tuple(self._masked(self.scope, v, self._type(e, n), e, n).var for n, v in enumerate(self._arguments(e)))
            made = self._combined(self.scope, e, made, values) if made else values
        return made

    def _folded_elements(self, e: Reduce, choices: list) -> tuple:
        """The same into a rescaled carrier. The maximum of a lane comes first, so that an element costs one exponential."""
        self.piece.update(choices[0])
        shapes = [self.shape(d) if d else "[]" for d in self._component_dims(e)]
        if e.monoid != "expsum":
            carried = tuple(self.assign(self.scope, words.full(shapes[n], self._neutral(e, n), self._type(e, n)), "a") for n in range(len(e.args)))
            for choice in choices:
                self.piece.update(choice)
                self._step(self.scope, e, carried)
            return carried
        top = self._folded_lanes(Reduce("max", e.over, e.args[:1]), choices)
        total = self.assign(self.scope, words.full(shapes[1], 0.0, e.dtype), "a")
        for choice in choices:
            self.piece.update(choice)
            element = self._masked(self.scope, self.emit(e.args[0]), e.dtype, e, 0)
            self.scope.lines.append(f"{total} = {total} + tk.expsum_share({element.var}, {top[0]})")
        return *top, total

    def _emit_reduce(self, e: Reduce) -> Value:
        if self.row & set(e.over):
            raise Unschedulable("a fold's result is needed before its stage ends")
        return super()._emit_reduce(e)

    # -- memory ----------------------------------------------------------------------------------------------------------------
    def _store(self, scope: Scope, s: Store, address: str, dims, value: Value, guard, pieces) -> None:
        if self.s.sharers > 1 and self.s.staged not in s.axes:         # all of them know it, the first one stores it
            lead = self.assign(scope, f"{self.member} == 0" if guard is None else f"{guard.var} & ({self.member} == 0)", "m")
            guard = Value(lead, guard.dims if guard is not None else frozenset(), scope, guard is not None and guard.block)
        super()._store(scope, s, address, dims, value, guard, pieces)
