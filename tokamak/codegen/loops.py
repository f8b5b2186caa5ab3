"""The loops that a phase's items stand in: which of the open ones an item enters, which are new, and which hold what folds down columns have so far.

A fold keeps its result in a register, where its own loops are innermost. Where loops over other axes run inside of them (rows are summed, and the
columns lie along lanes), it keeps a partial result a column in a buffer: in loops made for it, or in those that others have opened.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ..ir import ops
from ..ir.dtype import F32, F64
from ..ir.expr import Expr, Load, Reduce, walk
from ..ir.index import Axis, Size, as_index
from .emit import Emitter
from .kernel import BLOCK, FEWEST_NEAR, NEAR, Accumulator, Buffer, Finish, Fold, Loop, Read, Splat, Write
from .scope import Block, FoldRecord, literal


class Loops(Emitter):
    """The loops of one phase, and the folds whose partial results lie in them; the expressions are the Emitter's."""

    def __init__(self, low, parallel, vector: Axis | None, block: int | None, partial_of: dict, also: tuple[Axis, ...] = ()):
        super().__init__(low, parallel, vector, block, partial_of, also)
        self.records: dict[Expr, FoldRecord] = {}
        self.nests: dict = {}                           # (home, folded axes) -> the outermost loop of buffered folds, and their blocks
        self.carried: dict = {}                         # loop -> (its block, it, sums in it: (fold, f32 buffer, f64 buffer))

    # -- entering and opening ----------------------------------------------------------------------------------------------
    def _descend(self, block: Block, axes: list[Axis], needs) -> Block:
        for a in axes:
            last = block.loops[-1] if block.loops else None
            if last is not None and last[0].axis is a and not last[0].piece and not any(r.home is block and r.nest is last[0] for r in needs):
                block = last[1]
            else:
                block = self._open(block, a)
        return block

    def _open(self, block: Block, a: Axis) -> Block:
        loop = self._bare(a)
        child = Block(loop.items, block.open | {a}, block, len(block.loops))
        block.items.append(loop)
        block.loops.append((loop, child))
        return child

    def _bare(self, a: Axis) -> Loop:
        extent = self.low.extent(a)
        if a is self.vector and self.block:
            return Loop(a, as_index(Size("b0")), as_index(Size("b1")), True)
        return Loop(a, as_index(0), extent, a is self.vector)

    def _loop_of(self, block: Block) -> Loop:
        return block.parent.loops[block.slot][0]

    def _needs(self, *roots: Expr) -> list[FoldRecord]:
        return [self.records[e] for e in walk(*roots) if e in self.records]

    # -- how sums are cut -------------------------------------------------------------------------------------------------
    def _few(self, f: Reduce, axes: list[Axis]) -> bool:
        """Are these windows of so few elements (`axes`: those that are loops) that a sum in f32 would not move into f64 on the way? Then it never
        does: means of windows of 8 x 8 of 8 x 64 x 56 x 56 took 0.85 ms on one core with it, 0.39 without. Sums over one axis have one kernel for
        short rows and long, and those of exact targets do not depend on what is known of sizes."""
        extents = [a.extent.constant for a in axes]
        windows = len(f.over) > 1 and not self._cut_alike and None not in extents
        return not extents or windows and prod(extents) <= BLOCK

    @property
    def _cut_alike(self) -> bool:
        """Are sums cut alike whatever is known or guessed of sizes? On exact targets, whose quotients are exact, too."""
        return self.low.s.divide == "exact"

    # -- loops made for a fold -----------------------------------------------------------------------------------------
    def _place_buffered_fold(self, f: Reduce, free, bound, needs) -> None:
        """A fold whose free axes hold the vector axis and whose bound axes are long: partial results of the whole block lie in a buffer, and the
        input is read in its own order."""
        low = self.low
        outer = [a for a in free if a is not self.vector]
        home = self._descend(self.root, outer, needs)
        wide = F64 if f.monoid == "sum" and f.dtype is F32 else f.dtype
        spot, size, _ = self._buffer_spot(f)
        buffer = Buffer(low.fresh("u"), wide, size)
        self.buffers.append(buffer)
        first = low.fresh()
        steps = [(e.index[0].coefficient(self.vector), e.index[0].coefficient(bound[-1])) for e in walk(*f.args) if isinstance(e, Load)]
        across = any(column != 1 and row == 1 for column, row in steps)
        start, columns, inner = self._column_nest(home, bound, needs) if not across else self._row_nest(home, bound, needs)
        start.items.append(Splat(first, wide, literal(ops.identity(f.monoid, wide), wide)))
        self._use(buffer, f, start, Write(buffer.name, wide, spot, "unit", first))
        if across:
            part = self.emit(f.args[0], inner).var
        else:
            part, acc = low.fresh(), Accumulator(low.fresh("a"), f.monoid, f.args[0].dtype)
            low.sources[acc.var] = f
            columns.items.insert(columns.items.index(columns.loops[-1][0]), acc)
            inner.items.append(Fold(acc, (self.emit(f.args[0], inner).var,), False))
            columns.items.append(Finish((part,), acc, False))
        self._use(buffer, f, columns, Write(buffer.name, wide, spot, "unit", part, monoid=f.monoid, widened=wide is not f.dtype))
        self.records[f] = FoldRecord(home, home.loops[-1][0])
        self.buffered[f] = buffer

    def _row_nest(self, home: Block, bound: list[Axis], needs) -> tuple[Block, Block, Block]:
        """As `_column_nest`, row by row: what is read across the columns goes through tiles."""
        start = self._open(home, self.vector)
        inner = self._descend(self._open(home, bound[0]), [*bound[1:], self.vector], needs)
        return start, inner, inner

    def _column_nest(self, home: Block, bound: list[Axis], needs) -> tuple[Block, Block, Block]:
        """(where a buffer is filled first, a register of columns, a row of these): loops over `bound`, the last of them in pieces within which each
        register of the columns is folded by itself. Folds that do not need each other share them."""
        made = self.nests.get((id(home), *bound))
        if made is not None and home.loops[-1][0] is made[0] and not any(r.home is home and r.nest is made[0] for r in needs):
            return made[1:]
        low, last = self.low, bound[-1]
        start, block = self._open(home, self.vector), home
        for a in bound[:-1]:
            block = self._open(block, a)
        pieces = self._open(block, last)
        pieces.open = block.open
        loop = self._loop_of(pieces)
        loop.piece = self._piece()
        columns = self._open(pieces, self.vector)
        inner = self._open(columns, last)
        rows, name = self._loop_of(inner), low.names[last]
        rows.low, rows.high = as_index(Size(f"c{name}")), as_index(Size(f"d{name}"))
        self.nests[(id(home), *bound)] = home.loops[-1][0], start, columns, inner
        return start, columns, inner

    def _piece(self) -> int:
        """Rows of a piece: those whose columns stay in the first-level cache, and few enough for a sum in f32."""
        width = self.block or self.low.hints(self.vector.extent)
        return min(max(NEAR // (4 * width), FEWEST_NEAR), BLOCK)

    # -- loops that others have opened ---------------------------------------------------------------------------------
    def _loops_around(self, f: Reduce, free, bound, needs) -> tuple[Block, list[Axis]] | None:
        """(home, axes of the loops in it) where something that a fold needs is made in loops over `bound` that stand outside of loops over `free`:
        statistics of rows, whose elements are then summed over the rows. None, too, where the rows of other iterations lie between those of one."""
        if any(self._apart(f, a) for a in bound):
            return None
        for r in needs:
            block, axes = r.home, []
            while block is not self.root:
                axes.insert(0, self._loop_of(block).axis)
                block = block.parent
            before = next((n for n, a in enumerate(axes) if a in bound), None)
            if before is not None and set(free).difference(axes[:before]):
                for _ in axes[before:]:
                    r = replace(r, home=r.home.parent)
                return r.home, [*axes[before:], *self._inner({*free, *bound}.difference(axes))]
        return None

    def _apart(self, f: Reduce, axis: Axis) -> bool:
        """Does what `f` reads along the vector axis step further along `axis` than along a parallel axis? Statistics of 16 x 128 rows of 768 and sums
        over the 16 took 2.5 ms on one core in one kernel, 0.7 in kernels of their own: no prefetcher follows such rows, and their lines collide."""
        for e in walk(*f.args):
            if isinstance(e, Load) and e.index[0].coefficient(self.vector) == 1:
                step, *others = [e.index[0].coefficient(a) for a in (axis, *self.parallel)]
                if any(c.terms and not {*c.axes(), *step.axes()} and self.low.hints(c) < self.low.hints(step) for c in others):
                    return True
        return False

    def _place_carried_fold(self, f: Reduce, home: Block, axes: list[Axis], needs) -> None:
        """A fold in loops over `axes` that others have opened in `home`: partial results of its free axes lie in a buffer, which is filled before.
        A long sum in f32 moves into another one, in f64, after every piece of the outermost loop."""
        low = self.low
        long = f.monoid == "sum" and f.dtype is F32 and not self._few(f, list(f.over))
        kept, *wide = [Buffer(low.fresh("u"), dtype, self._buffer_spot(f)[1]) for dtype in (f.dtype, F64)[:1 + long]]
        self.buffers += [kept, *wide]
        inner = self._descend(home, axes, needs)
        loop = home.loops[-1][0]
        start = self._nest(f, home, home.items, home.items.index(loop))
        for b in (kept, *wide):
            self._keep(b, f, start)
        self._keep(kept, f, inner, self.emit(f.args[0], inner).var)
        if long:
            self.carried.setdefault(id(loop), (home, loop, []))[2].append((f, kept, *wide))
        self.records[f] = FoldRecord(home, loop)
        self.buffered[f] = (kept, *wide)[-1]

    def _nest(self, f: Reduce, home: Block, items: list, at: int) -> Block:
        """The innermost of new loops over what `home` leaves open of the free axes of `f`, at `at` in `items`: nothing is ever placed in them."""
        block, slot = home, len(home.loops) - 1
        for a in (a for a in self._inner(f.free) if a not in home.open):
            made = self._bare(a)
            items.insert(at, made)
            block = Block(made.items, block.open | {a}, block, slot)
            items, at, slot = made.items, 0, 0
        return block

    def _keep(self, b: Buffer, f: Reduce, block: Block, var: str | None = None, widened: bool = False) -> None:
        """Adds a value to what `b` has of `f`; None: sets it to the fold of nothing."""
        address, _, mode = self._buffer_spot(f)
        if var is None:
            first = self.low.fresh()
            block.items.append(Splat(first, b.dtype, literal(ops.identity(f.monoid, b.dtype), b.dtype)))
            self._use(b, f, block, Write(b.name, b.dtype, address, mode, first))
        else:
            self._use(b, f, block, Write(b.name, b.dtype, address, mode, var, monoid=f.monoid, widened=widened))

    def _flush_carried(self) -> None:
        """Long sums of `_place_carried_fold`: their loop runs in pieces, and what a piece has summed in f32 is added in f64."""
        for home, loop, sums in self.carried.values():
            name = self.low.names[loop.axis]
            rows = Loop(loop.axis, as_index(Size(f"c{name}")), as_index(Size(f"d{name}")), False, loop.items)
            loop.items = [rows]
            inner = [[a for a in f.over if a is not loop.axis] for f, _, _ in sums]
            steps = max(BLOCK if axes and self._cut_alike else self.low.hints.count(axes) for axes in inner)
            loop.piece = max(BLOCK // steps, 1)
            for f, kept, wide in sums:
                block = self._nest(f, home, loop.items, len(loop.items))
                part = self.low.fresh()
                self._use(kept, f, block, Read(part, kept.name, kept.dtype, *self._buffer_spot(f)[::2]))
                self._keep(wide, f, block, part, widened=True)
                self._keep(kept, f, block)
