"""The loop tree of a phase: where folds, scans and stores go.

The body's folds and stores are items. Each is placed under loops over its own axes, in the loops of the item before it where that is right:
an item may enter an open loop unless a fold that it needs is completed only behind that loop (`loops.py`). So three reductions and a store over one
row become three loops over the row, or two, or one, as their dependencies allow. A costly value that two loops of a row need is kept in a row buffer.
"""
from __future__ import annotations

from dataclasses import replace

from ..ir import ops
from ..ir.dtype import F32, compute_type
from ..ir.expr import Const, Coord, Expr, Load, Op, Reduce, Scan, walk
from ..ir.index import Axis, Fetch as FetchAtom, Index, Size, as_index
from ..ir.substitution import substitute
from ..schedule.body import Store
from ..schedule.schedule import LANE_SCANS, invariant, packable
from .emit import rounded
from .kernel import Accumulator, Buffer, Finish, Fold, Let, Loop, Partial, PartialUpdate, Phase, Prefix, Read, Refill, Tile, Write
from .loops import Loops
from .scope import Block, Entry, FoldRecord, Unschedulable, all_atoms, inner_walk, level


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


class Tree(Loops):
    """The loop tree of one phase: places folds, scans and stores, in the loops that `Loops` gives; the expressions in them are the Emitter's."""

    def __init__(self, low, parallel, vector: Axis | None, block: int | None, stores, partial_of=None, also: tuple[Axis, ...] = ()):
        super().__init__(low, parallel, vector, block, partial_of or {}, also)
        self.made: dict = {}                            # fold over parallel axes -> (its Partial, the axes of its copies)
        self.partials: list[Partial] = []
        self.accumulators: dict = {}                    # (monoid, over, args) -> fold already placed
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
        work, sets = as_index(0), list(dict.fromkeys(_axes_of(item) for item in items))
        for axes in (s for s in sets if not any(s < t for t in sets)):
            work = work + self._count(axes)
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
        """`items` so that those which share loops or folds (`apart`: folds) follow each other: nothing unrelated closes a loop that a later one still
        needs."""
        parts: list[tuple[set, list]] = []
        for n, item in enumerate(items):
            store = isinstance(item, Store)
            axes = _axes_of(item)
            roots = (item.expr, *((item.guard,) if item.guard is not None else ())) if store else item.args
            marks = {item, *(() if self.low.apart else self._inner(axes)), *(e for e in walk(*roots) if isinstance(e, (Reduce, Scan)))}
            mine = [p for p in parts if p[0] & marks]
            parts = [p for p in parts if not p[0] & marks]
            parts.append((marks.union(*(p[0] for p in mine)), sorted([(n, item), *(x for p in mine for x in p[1])], key=lambda x: x[0])))
        return [item for _, part in sorted(parts, key=lambda p: p[1][0][0]) for _, item in part]

    # -- placing -------------------------------------------------------------------------------------------------------------
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
        found = [e for t in (*self.stores, *self.final) for e in walk(t.expr)]
        read = any(isinstance(e, Load) and e.node is s.memory for e in found)
        # lanes up to the first whole line would be folded by themselves: an order that depends on where memory begins, and how much there is
        ordered = self.low.hints.ordered and any(isinstance(e, (Reduce, Scan)) for e in found)
        if read or ordered or s.memory.dtype.bytes * self.low.s.lanes % 64 or self.low.s.reused:
            return None
        total = as_index(0)
        for t in self.stores:
            if t.memory is s.memory:
                total = total + self._count(t.axes)
        return total

    def _count(self, axes) -> Index:
        """Elements of loops over `axes`."""
        total = as_index(1)
        for a in sorted(axes, key=lambda a: a.id):
            total = total * self.low.extent(a)
        return total

    def _place_fold(self, f: Reduce) -> None:
        key = f.key
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
            sought = self._sought(f)
            only = self.emit(f.args[0].args[0], inner).var if sought else None
            args = (self.emit(f.args[0].args[1], inner).var,) if sought else tuple(self.emit(a, inner).var for a in f.args)
            inner.items.append(Fold(acc, args, self.vector in bound, only))
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

    @staticmethod
    def _sought(f: Reduce) -> bool:
        """Is it the least place, or the largest, of what is sought: of others the fold of nothing?"""
        e = f.args[0]
        return f.monoid in ("min", "max") and isinstance(e, Op) and e.name == "where" and isinstance(e.args[1], Coord) \
            and isinstance(e.args[2], Const) and e.args[2].value == ops.identity(f.monoid, e.dtype)

    def _component_vars(self, f) -> tuple[str, ...]:
        return tuple(self.low.fresh() for _ in f.args)

    def _adopt(self, f, placed) -> None:
        names, home, loop = placed
        if self._crosses(f):
            twin = next(g for g in self.made if g.key == f.key)
            self.made[f] = self.made[twin]
            return
        home.memo[f] = Entry(names[f.component], home, len(home.loops))
        self.records[f] = FoldRecord(home, loop)

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
        return self._count(s.address.axes())

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
