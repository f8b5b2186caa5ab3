"""The loop tree of a phase: where folds, scans and stores go.

The body's folds and stores are items. Each is placed under loops over its own axes, in the loops of the item before it where that is right:
an item may enter an open loop unless a fold that it needs is completed only behind that loop. So three reductions and a store over one row become
three loops over the row, or two, or one, as their dependencies allow. A costly value that two loops of a row need is kept in a row buffer.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from ..ir import ops
from ..ir.dtype import F32, F64, compute_type
from ..ir.expr import Const, Expr, Load, Op, Reduce, Scan, walk
from ..ir.index import Axis, Fetch as FetchAtom, Index, Size, as_index
from ..ir.substitution import substitute
from ..schedule.body import Store
from ..schedule.schedule import LANE_SCANS, invariant, packable
from .emit import Emitter, rounded
from .kernel import (BLOCK, FEWEST_NEAR, NEAR, Accumulator, Buffer, Finish, Fold, Let, Loop, Partial, PartialUpdate, Phase, Prefix, Read, Refill,
                     Splat, Tile, Write)
from .scope import Block, Entry, FoldRecord, Unschedulable, all_atoms, inner_walk, level, literal


def _roots(s: Store) -> list[Expr]:
    """What a store computes: its value, its guard, and the numbers in its address."""
    guard = [s.guard] if s.guard is not None else []
    return [s.expr, *guard, *(x.expr for x in all_atoms(s.address) if isinstance(x, FetchAtom))]


def _scan_key(s: Scan):
    """What the components of one scan have in common."""
    return ("scan", s.monoid, s.along, s.reverse, s.args)


def _axes_of(item: Store | Reduce | Scan) -> frozenset[Axis]:
    """The axes whose loops an item runs in."""
    return item.axes if isinstance(item, Store) else item.free | frozenset(getattr(item, "over", ()))


def _around_scans(items) -> dict:
    """Key of each scan -> the axes that all its readers run over: it runs inside their loops, also in those that it does not depend on."""
    found: dict = {}
    for item in items:
        axes = _axes_of(item)
        for root in (item.expr,) if isinstance(item, Store) else item.args:
            for s in inner_walk(root):
                if isinstance(s, Scan):
                    found[_scan_key(s)] = found.get(_scan_key(s), axes) & axes
    return found


FAR_WORK = 4            # operations an element from which what is read later is asked for: x + 1, x + y and sums of rows took as long with as without


def _item_lists(loop: Loop):
    """The lists of items of `loop` and of the loops in it."""
    yield loop.items
    for s in loop.items:
        if isinstance(s, Loop):
            yield from _item_lists(s)


def _work(items) -> int:
    """A measure of a loop's arithmetic, in simple operations."""
    return sum(20 if ops.OPS[s.op].heavy else 1 for s in items if isinstance(s, Let))


class Tree(Emitter):
    """The loop tree of one phase: places folds, scans and stores; the expressions in them are the Emitter's."""

    def __init__(self, low, parallel, vector: Axis | None, block: int | None, stores, partial_of=None, also: tuple[Axis, ...] = ()):
        super().__init__(low, parallel, vector, block, partial_of or {}, also)
        self.made: dict = {}                            # fold over parallel axes -> (its Partial, the axes of its copies)
        self.partials: list[Partial] = []
        self.records: dict[Expr, FoldRecord] = {}
        self.accumulators: dict = {}                    # (monoid, over, args) -> fold already placed
        self.nests: dict = {}                           # (home, folded axes) -> the outermost loop of buffered folds, and their blocks
        self.carried: dict = {}                         # loop -> (its block, it, sums in it: (fold, f32 buffer, f64 buffer))
        self.final: list[Store] = []
        self.stores = []
        self.exact = rounded(*(r for s in stores for r in _roots(s)))
        for s in stores:
            (self.final if not self.partial_of and any(self._crosses(e) for e in walk(s.expr)) else self.stores).append(s)
        self.crossing = list(dict.fromkeys(e for s in self.final for e in walk(s.expr) if self._crosses(e)))

    def _crosses(self, e: Expr) -> bool:
        return isinstance(e, Reduce) and bool(set(e.over) & self.p)

    # -- phase -------------------------------------------------------------------------------------------------------------
    def phase(self) -> Phase:
        low = self.low
        extents = tuple((a, low.extent(a)) for a in self.parallel)
        items = self._items()
        self._choose_buffers(items)
        inside = tuple(a for a in self.parallel if a in low.s.reused)
        if inside:
            self._pack(inside, items)
        self.around = _around_scans(items)
        for item in items:
            self.vector = next((v for v in self.vectors if v in _axes_of(item)), self.vector)
            if isinstance(item, Store):
                self._place_store(item)
            elif isinstance(item, Scan):
                self._place_scan(item)
            else:
                self._place_fold(item)
        self._flush_carried()
        self._fit_buffers()
        if self.block:
            self._turn(self.root)
        else:
            self._look_ahead()
        self._look_far()
        work = as_index(1)
        axes: dict = {}
        for item in items:
            axes.update((a, None) for a in _axes_of(item))
        for a in axes:
            work = work * low.extent(a)
        vector_extent = low.extent(self.vector) if self.vector is not None and self.block else None
        return Phase(extents, self.vector, self.block, vector_extent, tuple(self.once.items), tuple(self.root.items), tuple(self.partials),
                     (*self.buffers, *self.tables.values()), work, len(inside))

    def _items(self) -> list:
        """Folds and stores in an order in which everything needed stands before."""
        folds: dict = {}
        roots = [s.expr for s in self.stores] + [s.guard for s in self.stores if s.guard is not None] + self.crossing
        for s in self.stores:
            roots += [x.expr for x in s.address.atoms() if isinstance(x, FetchAtom)]
        for e in walk(*roots):
            if isinstance(e, (Reduce, Scan)) and e not in self.partial_of:
                folds[e] = None
        if self.partial_of:
            inside = {x for f in self.partial_of for x in walk(*f.args)}
            folds = {f: None for f in folds if f not in inside}
        keyed = [(max((level(a) for a in f.args), default=0), 0, n, f) for n, f in enumerate(folds)]
        keyed += [(level(s.expr) if not self.partial_of else 0, 1, n, s) for n, s in enumerate(self.stores)]
        items = self._in_parts([k[3] for k in sorted(keyed, key=lambda k: k[:3])])
        return sorted(items, key=self._early) if self.low.early else items

    def _early(self, item) -> tuple[int, int]:
        """Where an item stands if those that need no other fold are first: partial results, then folds by the loops that they stand in."""
        if not isinstance(item, Reduce) or any(isinstance(e, (Reduce, Scan)) for e in walk(*item.args)):
            return 2, 0
        return (0, 0) if self._crosses(item) else (1, len(self._inner(item.free)))

    def _in_parts(self, items: list) -> list:
        """`items` so that those which share loops or folds follow each other: nothing unrelated closes a loop that a later one still needs."""
        parts: list[tuple[set, list]] = []
        for n, item in enumerate(items):
            store = isinstance(item, Store)
            axes = _axes_of(item)
            roots = (item.expr, *((item.guard,) if item.guard is not None else ())) if store else item.args
            marks = {item, *self._inner(axes), *(e for e in walk(*roots) if isinstance(e, (Reduce, Scan)))}
            mine = [p for p in parts if p[0] & marks]
            parts = [p for p in parts if not p[0] & marks]
            parts.append((marks.union(*(p[0] for p in mine)), sorted([(n, item), *(x for p in mine for x in p[1])], key=lambda x: x[0])))
        return [item for _, part in sorted(parts, key=lambda p: p[1][0][0]) for _, item in part]

    # -- placing -------------------------------------------------------------------------------------------------------------
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

    def _needs(self, *roots: Expr) -> list[FoldRecord]:
        return [self.records[e] for e in walk(*roots) if e in self.records]

    def _place_store(self, s: Store) -> None:
        along = [e.along for e in inner_walk(s.expr) if isinstance(e, Scan)]
        axes = self._inner(s.axes)
        if along:
            axes = [a for a in axes if a not in along] + list(dict.fromkeys(along))
        roots = (s.expr, *((s.guard,) if s.guard is not None else ()))
        block = self._descend(self.root, axes, self._needs(*roots))
        value = self.emit(s.expr, block)
        guard = self.emit(s.guard, block).var if s.guard is not None else None
        address, mode, step, at = self._address(s.address, block, s.memory, guard)
        total = self._streamed(s) if mode == "unit" and s.monoid is None and guard is None else None
        block.items.append(Write(self.low.memory(s.memory), s.memory.dtype, address, mode, value.var, step, at, s.monoid, guard, total))

    def _streamed(self, s: Store) -> Index | None:
        """How many elements the kernel stores in the memory of `s`, if it may go around the caches: in whole lines, to memory that the kernel does
        not read as well, as that is there already. (Half lines, of 16-bit types, cost 7 percent on bias + GELU, where whole ones save.)"""
        read = any(isinstance(e, Load) and e.node is s.memory for t in (*self.stores, *self.final) for e in walk(t.expr))
        if read or s.memory.dtype.bytes * self.low.s.lanes % 64 or self.low.s.reused:
            return None
        total = as_index(0)
        for t in self.stores:
            if t.memory is s.memory:
                count = as_index(1)
                for a in sorted(t.axes, key=lambda a: a.id):
                    count = count * self.low.extent(a)
                total = total + count
        return total

    def _place_fold(self, f: Reduce) -> None:
        key = (f.monoid, f.over, f.args)
        twin = self.accumulators.get(key)
        if twin is not None:
            self._adopt(f, twin)
            return
        if f.monoid in ops.CARRIERS:
            raise Unschedulable(f"kernels in C carry no '{f.monoid}'")
        bound = self._inner(a for a in f.over if a not in self.p or a is self.vector)
        free = self._inner(f.free)
        needs = self._needs(*f.args)
        vector_free = self.vector is not None and self.vector in f.free
        long = [a for a in bound if a not in self.low.s.unrolled]
        crossing = self._crosses(f)
        around = self._loops_around(f, free, bound, needs) if vector_free and not crossing and len(f.args) == 1 else None
        if around is not None:
            self._place_carried_fold(f, *around, needs)
            return
        if self.low.s.columns == "buffer" and vector_free and long and self.low.hints.count(long) > 16 and not crossing and len(f.args) == 1:
            self._place_buffered_fold(f, free, bound, needs)
            return
        home = self._descend(self.root, free, needs)
        names = self._component_vars(f)
        if bound:
            acc = Accumulator(self.low.fresh("a"), f.monoid, f.args[0].dtype)
            self.low.sources[acc.var] = f
            inner = self._descend(home, bound, needs)
            loop, _ = next((l, b) for l, b in reversed(home.loops) if self._under(inner, b))
            home.items.insert(home.items.index(loop), acc)
            args = tuple(self.emit(a, inner).var for a in f.args)
            inner.items.append(Fold(acc, args, self.vector in bound))
            if acc.monoid == "sum" and acc.dtype is F32 and not self._few(f, long):
                innermost = self._loop_of(inner)
                innermost.flush.append(acc)
            home.items.append(Finish(names, acc, self.vector in bound))
        else:
            loop = None
            args = tuple(self.emit(a, home).var for a in f.args)
            names = args
        self.accumulators[key] = (names, home, loop)
        if crossing:
            self._place_partial(f, names, home)
        else:
            self._adopt(f, self.accumulators[key])

    @property
    def _cut_alike(self) -> bool:
        """Are sums cut alike whatever is known or guessed of sizes? On exact targets, whose quotients are exact, too."""
        return self.low.s.divide == "exact"

    def _few(self, f: Reduce, axes: list[Axis]) -> bool:
        """Are these windows of so few elements (`axes`: those that are loops) that a sum in f32 would not move into f64 on the way? Then it never
        does: means of windows of 8 x 8 of 8 x 64 x 56 x 56 took 0.85 ms on one core with it, 0.39 without. Sums over one axis have one kernel for
        short rows and long, and those of exact targets do not depend on what is known of sizes."""
        extents = [a.extent.constant for a in axes]
        windows = len(f.over) > 1 and not self._cut_alike and None not in extents
        return not extents or windows and prod(extents) <= BLOCK

    def _component_vars(self, f) -> tuple[str, ...]:
        return tuple(self.low.fresh() for _ in f.args)

    def _adopt(self, f, placed) -> None:
        names, home, loop = placed
        if self._crosses(f):
            twin = next(g for g in self.made if (g.monoid, g.over, g.args) == (f.monoid, f.over, f.args))
            self.made[f] = self.made[twin]
            return
        home.memo[f] = Entry(names[f.component], home, len(home.loops))
        self.records[f] = FoldRecord(home, loop)

    def _loop_of(self, block: Block) -> Loop:
        return block.parent.loops[block.slot][0]

    def _place_partial(self, f: Reduce, names, home: Block) -> None:
        """Adds this iteration's part to the thread's partial result."""
        low = self.low
        axes = sorted(f.free, key=lambda a: (a is self.vector, a.id))
        address, size = as_index(0), as_index(1)
        for a in reversed(axes):
            low.extent(a)
            address = address + as_index(a) * size
            size = size * low.extent(a)
        runs = f.monoid == "sum" and f.args[0].dtype is F32 and self.vector in f.free and not f.free & self.p
        partial = Partial(low.fresh("q"), f.monoid, f.args[0].dtype, size, runs)
        self.partials.append(partial)
        if len(self.partials) > 24:
            raise Unschedulable("too many partial results")
        mode = "unit" if self.vector is not None and self.vector in f.free else "splat"
        home.items.append(PartialUpdate(partial, address, mode, names))
        self.made[f] = (partial, axes)

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

    def _place_scan(self, s: Scan) -> None:
        key = _scan_key(s)
        twin = self.accumulators.get(key)
        if twin is not None:
            names, inner = twin
            inner.memo[s] = Entry(names[s.component], inner, len(inner.loops))
            return
        along_lanes = s.along is self.vector
        if along_lanes and (self.block or s.monoid not in LANE_SCANS):
            raise Unschedulable("a scan of this kind along the vector axis")
        free = [a for a in self._inner(s.free | self.around.get(key, frozenset())) if a is not s.along]
        needs = self._needs(*s.args)
        home = self._descend(self.root, free, needs)
        inner = self._descend(home, [s.along], needs)
        loop = self._loop_of(inner)
        acc = Accumulator(self.low.fresh("a"), s.monoid, s.args[0].dtype)
        home.items.insert(home.items.index(loop), acc)
        names = self._component_vars(s)
        args = tuple(self.emit(a, inner).var for a in s.args)
        inner.items.append(Prefix(names, acc, args, along_lanes))
        self.accumulators[key] = (names, inner)
        inner.memo[s] = Entry(names[s.component], inner, len(inner.loops))

    def _pack(self, inside: tuple[Axis, ...], items) -> None:
        """What strides along the vector axis, or takes slow arithmetic, and is the same along the axes `inside` of a block is laid out by registers
        once for all of them."""
        refill = Refill(inside, [])
        block = Block(refill.items, self.root.open, self.root, 0)
        roots = [r for s in items for r in ((s.expr,) if isinstance(s, Store) else s.args)]
        for e in (*packable(roots, self.vector, inside), *invariant(roots, self.vector, inside)):
            inner = block
            for a in self._inner(e.free):
                inner = self._open(inner, a)
            var = self.emit(e, inner).var
            address, size, mode = self._buffer_spot(e)
            self.buffered[e] = made = Buffer(self.low.fresh("u"), compute_type(e.dtype), size)
            self.buffers.append(made)
            self._use(made, e, inner, Write(made.name, made.dtype, address, mode, var))
        self._turn(block)
        self.root.items.append(refill)

    def _turn(self, block: Block) -> None:
        """Reads that stride along the vector axis and are contiguous along the loop around it go through a tile that is filled line by line."""
        for loop, child in block.loops:
            self._turn(child)
            if not loop.vector and len(child.loops) == 1 and child.loops[0][0].vector and not child.loops[0][1].loops:
                if not any(isinstance(s, (Accumulator, Fold, Finish, Prefix, PartialUpdate)) for s in (*child.items, *child.loops[0][1].items)):
                    items = child.loops[0][1].items
                    items[:] = [self._turned(s, loop) if isinstance(s, Read) else s for s in items]

    def _turned(self, s: Read, loop: Loop) -> Read:
        if s.mode != "strided" or s.guard is not None or s.address.coefficient(loop.axis) != 1:
            return s
        tile = Tile(self.low.fresh("u"), s.memory, s.dtype, s.address, s.step)
        loop.tiles.append(tile)
        row = as_index(loop.axis) - as_index(Size(f"c{self.low.names[loop.axis]}"))
        return Read(s.var, tile.name, s.dtype, row * self.low.s.lanes, "unit")

    def _look_ahead(self) -> None:
        """Memory that an iteration reads in several loops: the longest of the later ones asks for what the next iteration reads there."""
        if not self.parallel:
            return
        last, found = self.parallel[-1], {}
        for loop, _ in self.root.loops:
            for items in _item_lists(loop):
                for n, s in enumerate(items):
                    if isinstance(s, Read) and s.mode == "unit" and s.guard is None and last in s.address.axes():
                        found.setdefault((s.memory, s.address), {}).setdefault(id(loop), (items, n))
        for places in found.values():
            if len(places) > 1:
                items, n = max(list(places.values())[1:], key=lambda p: _work(p[0]))
                s = items[n]
                items[n] = replace(s, ahead=substitute(s.address, {last: as_index(last) + 1}, lambda e: e), span=self._span(s))

    def _look_far(self) -> None:
        """The first loop that reads along a memory asks for what lies further behind in it, where there is something to compute meanwhile."""
        if sum(_work(items) for loop, _ in self.root.loops for items in _item_lists(loop)) < FAR_WORK:
            return
        seen: set = set()
        for loop, _ in self.root.loops:
            for n, s in enumerate(loop.items if loop.vector else ()):
                if isinstance(s, Read) and s.mode == "unit" and s.memory[0] == "p" and s.guard is None and (s.memory, s.address) not in seen:
                    seen.add((s.memory, s.address))
                    if s.ahead is None and loop.axis in s.address.axes():
                        loop.items[n] = replace(s, total=self._total(s))

    def _total(self, s: Read) -> Index:
        """Elements that the kernel reads at the address of `s`."""
        total = as_index(1)
        for a in sorted(s.address.axes(), key=lambda a: a.id):
            total = total * self.low.extent(a)
        return total

    def _span(self, s: Read) -> Index:
        """Elements that an iteration reads at the address of `s`."""
        span = as_index(1)
        for a in self._inner(s.address.axes()):
            span = span * self.low.extent(a)
        return span

    # -- row buffers -----------------------------------------------------------------------------------------------------------
    def _choose_buffers(self, items) -> None:
        """Costly values that several loops of one iteration need: kept in a buffer by the first, read by the others."""
        users: dict[Expr, set] = {}
        parents: dict[Expr, set] = {}
        for n, item in enumerate(items):
            roots = (item.expr,) if isinstance(item, Store) else item.args
            place = (level(item.expr) if isinstance(item, Store) else max(map(level, item.args)))
            for r in roots:
                for e in inner_walk(r):
                    users.setdefault(e, set()).add(place)
                    for c in e.children():
                        parents.setdefault(c, set()).add(e)
        shared = {e for e, where in users.items() if len(where) > 1 and self._costly(e) and self._inner(e.free)}
        for e in shared:
            if not any(p in shared and users[p] == users[e] for p in parents.get(e, ())):
                self.buffered[e] = None

    def _costly(self, e: Expr) -> bool:
        if isinstance(e, (Reduce, Scan, Const)):
            return isinstance(e, Scan)
        return any(isinstance(x, Scan) or isinstance(x, Op) and ops.OPS[x.name].heavy or self._gathered(x) for x in inner_walk(e))

    def _gathered(self, e: Expr) -> bool:
        """Is it read lane by lane, where an index from memory says?"""
        return isinstance(e, Load) and any(isinstance(x, FetchAtom) and x.expr.free.intersection(self.vectors) for x in all_atoms(e.index[0]))
