"""Loops over a program's share of the split axes and over rows, and what is read in them a turn ahead: while a program folds what it has read, what
it folds next is on its way.

    for b in ...: x = load(b); fold(x)      becomes      y = load(first); for b in ...: x = y; y = load(next b); fold(x)

Behind the last turn the last one's block is read again, and where there is none, the first of all; of rows nothing, where lanes behind their end are
masked.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ir.expr import Load
from ..ir.index import Axis, Index, Size, as_index
from ..ir.normal import floordiv
from .scope import all_atoms
from .tile_sums import TileSums
from .tile_kernel import For, Scope, Value
from .tile_values import empty


@dataclass(eq=False)
class Turns:
    """The turns of a loop, in `inside`. `first`: the number of its first turn, which `before`, a scope in front of it, reads for; `next`: that of the
    turn behind the one at hand, which `following`, a scope of the loop, reads for. `place`: enters in `coords` where the turn of a number lies, in a
    scope; none where a lowering finds that by itself."""
    inside: Scope
    before: Scope
    first: str
    following: Scope
    next: str
    place: Callable[[Scope, str], None] | None = None


class TileAhead(TileSums):
    """Loops over the split axes of one kernel, and over its rows."""
    turns: "Turns | None" = None        # of the loop at hand, where loads may be a turn ahead

    def _share_loops(self, share: str, total: Index, stores, crossing, carried) -> None:
        """The loop over this program's share of `total` blocks of the split axes, which stores and carries folds on; or two, the second over the
        blocks whose elements stay in the cache."""
        count = self.param("int", ("split",), total)
        if not self.s.kept or self.s.looped:
            self._share_loop(share, count, count, stores, crossing, carried)
            return
        leaving = self.param("int", ("leaving",), floordiv(total * (64 - self.s.kept), as_index(64 * self.s.programs)) * self.s.programs)
        self._share_loop(share, leaving, count, stores, crossing, carried)
        self.staying = True
        self._share_loop(f"{leaving} + {share}", count, count, stores, crossing, carried)
        self.staying = False

    def _share_loop(self, first: str, end: str, count: str, stores, crossing, carried) -> None:
        """The loop over every so many of the blocks from `first` on below `end`; there are `count` in all."""
        s = self.s
        var = self.fresh("b")
        loop = For(f"for {var} in {self._range(first, end, s.programs)}", [])
        inside = Scope(loop.lines, self.program.open, self.program)
        if self._peels(s.split):
            self._in_branches(inside, list(s.split), var, lambda scope: self._run(scope, stores, crossing, carried))
            self.program.lines.append(loop)
            return
        self._decode(inside, list(s.split), var, "b")
        inside.open |= frozenset(s.split)
        if self._reads_ahead(crossing):
            begin = f"tl.minimum({first}, {count} - 1)"
            begin = begin if self._some() else f"tl.maximum({begin}, 0)"
            following = Scope([] if s.ahead else loop.lines, inside.open, self.program)
            self.turns = Turns(inside, Scope(self.program.lines, inside.open, self.program), begin, following,
                               f"tl.minimum({var} + {s.programs}, {count} - 1)", lambda scope, turn: self._decode(scope, list(s.split), turn, "b"))
            self._run(inside, stores, crossing, carried)
            loop.lines[:0] = following.lines if s.ahead else ()
            self.turns = None
        else:
            self._run(inside, stores, crossing, carried)
        self.program.lines.append(loop)

    def _peels(self, axes) -> bool:
        """Are `axes`, those of a run over blocks, the one axis of the tile, and is the last of its blocks a branch of its own?"""
        return self.s.peeled and tuple(axes) == self.s.dims and self.s.dims[0] not in self.s.exact

    def _in_branches(self, scope: Scope, axes: list[Axis], number: str, run) -> None:
        """Calls `run` for two branches of `scope`: one for whole blocks of the one axis, which need no mask, and one for the last. `number`: of the
        block at hand."""
        a, = axes
        s, size = self.s, sum(self.s.sizes(a))
        end = self.words_in if self._words_shared(a) else self._number(self.extent(a))
        for head, exact in ((f"if {end} - {number} * {size} >= {size}", s.exact | {a}), ("else", s.exact)):
            branch = For(head, [])
            inside = Scope(branch.lines, scope.open, scope)
            self.s = replace(s, exact=exact)
            self._decode(inside, axes, number, "b")
            inside.open |= frozenset(axes)
            run(inside)
            scope.lines.append(branch)
        self.s = s

    def _some(self) -> bool:
        """Is there a block at least, whatever the sizes are?"""
        return all(self.hints.least(a.extent) > 0 for a in self.s.split)

    def _reads_ahead(self, crossing) -> bool:
        """May loads be a turn ahead: all of them, or those of which there is a number a turn?"""
        s = self.s
        if s.ahead:         # the first of all is there, or masked where there is none
            return not s.looped and all(self.hints.least(a.extent) > 0 or a in s.dims and a not in s.exact for a in s.split)
        held = s.stages == 1 and not crossing           # all of a row is waited for alike
        return len(s.split) == 1 and s.split[0] not in s.dims and self._some() and not s.kept and not held

    def _row_ahead(self, outer: Scope, inside: Scope, looped: list[Axis], number: str) -> Turns | None:
        """What reads ahead in the loop `inside` over the one of `looped`, from `outer`; None where nothing does. `number`: where a turn begins."""
        a, s = looped[-1], self.s
        if not s.ahead or len(looped) > 1 or s.shift is not None or self.hints.least(a.extent) == 0:
            return None
        step, ragged, end = s.sizes(a)[0] if a in s.dims else 1, a in s.dims and a not in s.exact, self._number(self.extent(a))
        return Turns(inside, Scope(outer.lines, inside.open, outer), "0", Scope([], inside.open, outer),
                     f"{number} + {step}" if ragged else f"tl.minimum({number} + {step}, {end} - {step})",
                     lambda scope, turn: self._chunk(scope, a, turn))

    def _emit_load(self, e: Load) -> Value:
        return self._read_ahead(e, self.turns) if self.turns is not None and self._ahead(e) else super()._emit_load(e)

    def _ahead(self, e: Load) -> bool:
        """Is `e` read a turn ahead? Not in memory that this kernel writes. Where not all of a turn is: if it is found by the number of the turn
        alone, but for lanes beside the whole words of a row; no copy would bring it before its turn."""
        if empty(e.node) or any(s.memory is e.node for s in self.stores):
            return False
        if self.s.ahead:
            return not e.free.isdisjoint(self.s.looped or self.s.split)
        (i,), shift = e.index, self.s.shift
        beside = shift is not None and shift.axis in i.axes() and self.piece[shift.axis] == len(self.s.sizes(shift.axis)) - 1
        axes = {*self.s.split, shift.axis} if beside else {*self.s.split}
        return e.guard is None and i.axes() == axes and all(isinstance(x, (Axis, Size)) for x in all_atoms(i))

    def _read_ahead(self, e: Load, turns: Turns) -> Value:
        """The register that has `e` in the turn at hand, read in the one before. What a loop in a turn leaves out has its own scope, each time."""
        home = turns.inside if e.free.isdisjoint(self.s.looped) else self.scope
        read = turns.inside.memo.get(("ahead", e))
        if read is None:
            first = self._load_at(e, turns.before, turns.first)
            name = self.assign(turns.following, first.var)
            again = self._load_at(e, turns.following, turns.next)
            turns.following.lines.append(f"{first.var} = {again.var}")
            if again.var in self.filled:
                self.filled[name] = self.filled[again.var]
            read = Value(name, again.dims, home, again.block)
            if home is not turns.inside:
                turns.inside.memo["ahead", e] = read
        value = home.memo[e, self._key(e.free)] = replace(read, scope=home)
        return value

    def _load_at(self, e: Load, scope: Scope, turn: str) -> Value:
        """`e` as it is read in `scope` for the turn of that number."""
        here, turns, coords, fours = self.scope, self.turns, self.coords, self.fours
        self.scope, self.turns = scope, None
        if "turn" not in scope.memo:
            self.coords, self.fours = dict(coords), dict(fours)
            turns.place(scope, self.assign(scope, turn, "b"))
            scope.memo["turn"] = self.coords, self.fours
        self.coords, self.fours = scope.memo["turn"]
        value = super()._emit_load(e)
        self.scope, self.turns, self.coords, self.fours = here, turns, coords, fours
        return value
