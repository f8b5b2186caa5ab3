"""(Body, Schedule) -> Kernel: the loop tree.

The body's folds and stores are items. Each is placed under loops over its own axes, in the loops of the item before it where that is right:
an item may enter an open loop unless a fold that it needs is completed only behind that loop. So three reductions and a store over one row become
three loops over the row, or two, or one, as their dependencies allow. Every sub-expression is computed once, in the outermost loop in which its
axes are known (`_Block.memo`); a costly value that two loops of a row need is kept in a row buffer.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from ..fuse.cost import Hints
from ..ir import ops
from ..ir.dtype import BOOL, F32, F64, I64, compute_type
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Scalar, Scan, walk
from ..ir.index import Axis, Fetch as FetchAtom, FloorDiv, Index, Max, Min, Mod, Size, as_index, positive
from ..schedule.body import Body, Memory, Store
from ..schedule.schedule import LANE_SCANS, TILE, Schedule
from .kernel import (Accumulator, Buffer, Convert, Fetch, Finish, Fold, IndexValue, Kernel, Let, Loop, Param, Partial, PartialRead,
                     PartialUpdate, Phase, Prefix, RandomValue, Read, Splat, Tile, Write)


class Unschedulable(Exception):
    """This body does not fit one loop tree (the message says why); the planner falls back to smaller groups."""


@dataclass
class _Entry:
    var: str
    home: "_Block"
    after: int                    # how many loops of `home` stand before it


@dataclass
class _FoldRecord:
    home: "_Block"
    nest: Loop | None             # the loop of `home` that must be over before the result is known


@dataclass
class _Block:
    """Statements at one level of the loop tree. `slot`: number of the loop in the parent that this block is the body of."""
    items: list
    open: frozenset
    parent: "_Block | None" = None
    slot: int = 0
    memo: dict = field(default_factory=dict)
    loops: list = field(default_factory=list)       # (Loop, _Block)

    def chain(self):
        """(block, how many of its loops are over) from here outwards."""
        block, slot = self, len(self.loops)
        while block is not None:
            yield block, slot
            block, slot = block.parent, block.slot


def lower(body: Body, schedule: Schedule, hints: Hints) -> Kernel:
    """The kernel of `body`. Raises Unschedulable when its items do not fit one loop tree."""
    return _Lowering(body, schedule, hints).kernel()


def inner_walk(e: Expr) -> list[Expr]:
    """Sub-expressions of `e`, not entering folds: those are available as values."""
    seen: dict = {}
    stack = [e]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen[x] = None
            if not isinstance(x, (Reduce, Scan)):
                stack.extend(x.children())
    return list(seen)


def folds_in(e: Expr) -> list[Expr]:
    return [x for x in inner_walk(e) if isinstance(x, (Reduce, Scan))]


class _Lowering:
    def __init__(self, body: Body, schedule: Schedule, hints: Hints):
        self.body_, self.s, self.hints = body, schedule, hints
        self.places = {a: n for n, a in enumerate(schedule.order)}
        self.params: list[Param] = []
        self.keys: dict = {}
        self.names: dict[Axis, str] = {}
        self.counter = 0
        self.errors: list = []
        self.phases: list[Phase] = []
        self.sources: dict[str, Expr] = {}        # register -> what it holds: for people, no part of the text

    # -- names and parameters ------------------------------------------------------------------------------------------
    def fresh(self, prefix: str = "t") -> str:
        self.counter += 1
        return f"{prefix}{self.counter - 1}"

    def param(self, kind: str, key, source, dtype=None) -> str:
        name = self.keys.get((kind, key))
        if name is None:
            letter = {"memory": "p", "int": "n", "float": "k", "value": "k"}[kind]
            name = f"{letter}{sum(p.name[0] == letter for p in self.params)}"
            self.keys[(kind, key)] = name
            self.params.append(Param(kind, name, source, dtype))
        return name

    def memory(self, m: Memory) -> str:
        return self.param("memory", m, m, m.dtype)

    def extent(self, a: Axis) -> Index:
        """The extent of `a` as a kernel integer: a literal where the schedule unrolls, else a parameter."""
        self.names.setdefault(a, f"i{len(self.names)}")
        if a in self.s.unrolled:
            return a.extent
        return as_index(Size(self.param("int", ("extent", a), a.extent)))

    def integer(self, i: Index, block: "_Block | None", key=None) -> Index:
        """`i` over loop variables, parameters and fetched indices: what a kernel can compute."""
        parts: dict = {}
        for k, v in i.terms.items():
            atoms = tuple(a for a in k if _varies(a))
            rest = Index({tuple(a for a in k if not _varies(a)): v})
            parts[atoms] = parts.get(atoms, as_index(0)) + rest
        total = as_index(0)
        for atoms, factor in sorted(parts.items(), key=lambda p: self._depth(p[0])):      # parameters are numbered alike whatever the axes' ids
            term = self._factor(factor, (key, atoms, factor))
            for a in atoms:
                term = term * self._atom(a, block, key)
            total = total + term
        return total

    def _depth(self, atoms) -> tuple[int, ...]:
        """How deep the loops of a term's axes lie, for an order of terms; a term without any is last."""
        return tuple(sorted(self.places.get(a, len(self.places)) for a in atoms)) or (len(self.places) + 1,)

    def _factor(self, factor: Index, key) -> Index:
        if factor.constant in (-1, 0, 1):
            return factor
        return as_index(Size(self.param("int", key, factor)))

    def _atom(self, a, block, key) -> Index:
        if isinstance(a, Axis):
            self.names.setdefault(a, f"i{len(self.names)}")
            return as_index(a)
        if isinstance(a, _Named):
            return as_index(a)
        if isinstance(a, FetchAtom):
            raise Unschedulable("a gathered index inside an index expression that differs between lanes")
        kind = type(a)
        return as_index(kind(self.integer(a.a, block, key), self.integer(a.b, block, (key, "b"))))

    # -- kernel ----------------------------------------------------------------------------------------------------------
    def kernel(self) -> Kernel:
        b = self.body_
        if b.base is not None:
            self._base_phase(b.base)
        tree = _Tree(self, self.s.parallel, self.s.vector, self.s.block, b.stores)
        self.phases.append(tree.phase())
        if tree.final:
            last = _Tree(self, (), _final_vector(tree.final, tree.made), None, tree.final, tree.made)
            self.phases.append(last.phase())
        return Kernel(tuple(self.params), tuple(self.phases), self.s.lanes, self.s.grain, dict(self.names), tuple(self.errors), self.sources)

    def _base_phase(self, base: Store) -> None:
        axes = sorted(base.axes, key=lambda a: -self.hints(base.address.coefficient(a)) if base.address.coefficient(a).constant is None
                      else -abs(base.address.coefficient(a).constant))
        vector = next((a for a in axes if base.address.coefficient(a) == 1), None)
        tree = _Tree(self, tuple(a for a in axes if a is not vector), vector, 4096 if vector is not None else None, (base,))
        self.phases.append(tree.phase())


def _varies(a) -> bool:
    """Depends on coordinates (or on memory), so that the host cannot compute it."""
    if isinstance(a, (Axis, FetchAtom, _Named)):
        return True
    if isinstance(a, (FloorDiv, Mod, Min, Max)):
        return any(_varies(x) for i in (a.a, a.b) for x in i.atoms())
    return False


def _final_vector(stores, partials) -> Axis | None:
    """The axis that runs along lanes when partial results are combined: contiguous in all that has it."""
    for a in sorted({a for s in stores for a in s.axes}, key=lambda a: a.id):
        if all(s.address.coefficient(a) == 1 for s in stores if a in s.axes) and all(axes[-1] is a for _, axes in partials.values() if a in axes):
            return a
    return None


@cache
def _level(e: Expr) -> int:
    """How many folds deep a value is."""
    inner = [1 + max((_level(a) for a in f.args), default=0) for f in folds_in(e)] if not isinstance(e, (Reduce, Scan)) else \
        [1 + max((_level(a) for a in e.args), default=0)]
    return max(inner, default=0)


def _scan_key(s: Scan):
    """What the components of one scan have in common."""
    return ("scan", s.monoid, s.along, s.reverse, s.args)


def _around_scans(items) -> dict:
    """Key of each scan -> the axes that all its readers run over: it runs inside their loops, also in those that it does not depend on."""
    found: dict = {}
    for item in items:
        axes = item.axes if isinstance(item, Store) else item.free | frozenset(getattr(item, "over", ()))
        for root in (item.expr,) if isinstance(item, Store) else item.args:
            for s in inner_walk(root):
                if isinstance(s, Scan):
                    found[_scan_key(s)] = found.get(_scan_key(s), axes) & axes
    return found


class _Tree:
    """The loop tree of one phase."""

    def __init__(self, low: _Lowering, parallel, vector: Axis | None, block: int | None, stores, partial_of=None):
        self.low, self.parallel, self.vector, self.block = low, tuple(parallel), vector, block
        self.p = frozenset(parallel) | (frozenset((vector,)) if block else frozenset())
        self.partial_of = partial_of or {}              # fold -> Partial, complete
        self.made: dict = {}                            # fold over parallel axes -> (its Partial, the axes of its copies)
        self.partials: list[Partial] = []
        self.buffers: list[Buffer] = []
        self.once = _Block([], frozenset())
        self.root = _Block([], frozenset(parallel), self.once, 0)
        self.records: dict[Expr, _FoldRecord] = {}
        self.accumulators: dict = {}                    # (monoid, over, args) -> fold already placed
        self.buffered: dict[Expr, Buffer] = {}
        self.final: list[Store] = []
        self.stores = []
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
        self.around = _around_scans(items)
        for item in items:
            if isinstance(item, Store):
                self._place_store(item)
            elif isinstance(item, Scan):
                self._place_scan(item)
            else:
                self._place_fold(item)
        if self.block and self.block <= TILE:
            self._turn(self.root)
        work = as_index(1)
        axes: dict = {}
        for item in items:
            axes.update((a, None) for a in (item.axes if isinstance(item, Store) else item.free | frozenset(getattr(item, "over", ()))))
        for a in axes:
            work = work * low.extent(a)
        vector_extent = low.extent(self.vector) if self.vector is not None and self.block else None
        return Phase(extents, self.vector, self.block, vector_extent, tuple(self.once.items), tuple(self.root.items), tuple(self.partials),
                     tuple(self.buffers), work)

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
        keyed = [(max((_level(a) for a in f.args), default=0), 0, n, f) for n, f in enumerate(folds)]
        keyed += [(_level(s.expr) if not self.partial_of else 0, 1, n, s) for n, s in enumerate(self.stores)]
        return self._in_parts([k[3] for k in sorted(keyed, key=lambda k: k[:3])])

    def _in_parts(self, items: list) -> list:
        """`items` so that those which share loops or folds follow each other: nothing unrelated closes a loop that a later one still needs."""
        parts: list[tuple[set, list]] = []
        for n, item in enumerate(items):
            store = isinstance(item, Store)
            axes = item.axes if store else item.free | frozenset(getattr(item, "over", ()))
            roots = (item.expr, *((item.guard,) if item.guard is not None else ())) if store else item.args
            marks = {item, *self._inner(axes), *(e for e in walk(*roots) if isinstance(e, (Reduce, Scan)))}
            mine = [p for p in parts if p[0] & marks]
            parts = [p for p in parts if not p[0] & marks]
            parts.append((marks.union(*(p[0] for p in mine)), sorted([(n, item), *(x for p in mine for x in p[1])], key=lambda x: x[0])))
        return [item for _, part in sorted(parts, key=lambda p: p[1][0][0]) for _, item in part]

    # -- placing -------------------------------------------------------------------------------------------------------------
    def _inner(self, axes) -> list[Axis]:
        """The axes that need a loop inside an iteration, outermost first."""
        found = [a for a in axes if a not in self.p or a is self.vector]
        order = {a: i for i, a in enumerate(self.low.s.order)}
        return sorted(found, key=lambda a: (a is self.vector, order.get(a, -1), a.id))

    def _descend(self, block: _Block, axes: list[Axis], needs) -> _Block:
        for a in axes:
            last = block.loops[-1] if block.loops else None
            if last is not None and last[0].axis is a and not any(r.home is block and r.nest is last[0] for r in needs):
                block = last[1]
            else:
                block = self._open(block, a)
        return block

    def _open(self, block: _Block, a: Axis) -> _Block:
        low = self.low
        if a is self.vector and self.block:
            low.extent(a)
            loop = Loop(a, as_index(Size("b0")), as_index(Size("b1")), True)
        else:
            loop = Loop(a, as_index(0), low.extent(a), a is self.vector)
        child = _Block(loop.items, block.open | {a}, block, len(block.loops))
        block.items.append(loop)
        block.loops.append((loop, child))
        return child

    def _needs(self, *roots: Expr) -> list[_FoldRecord]:
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
        block.items.append(Write(self.low.memory(s.memory), s.memory.dtype, address, mode, value.var, step, at, s.monoid, guard))

    def _place_fold(self, f: Reduce) -> None:
        key = (f.monoid, f.over, f.args)
        twin = self.accumulators.get(key)
        if twin is not None:
            self._adopt(f, twin)
            return
        bound = self._inner(a for a in f.over if a not in self.p or a is self.vector)
        free = self._inner(f.free)
        needs = self._needs(*f.args)
        vector_free = self.vector is not None and self.vector in f.free
        long = [a for a in bound if a not in self.low.s.unrolled]
        crossing = self._crosses(f)
        if self.low.s.columns == "buffer" and vector_free and long and self.low.hints.count(long) > 16 and not crossing:
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
            if acc.monoid == "sum" and acc.dtype is F32 and long:
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

    def _component_vars(self, f) -> tuple[str, ...]:
        return tuple(self.low.fresh() for _ in f.args)

    def _adopt(self, f, placed) -> None:
        names, home, loop = placed
        if self._crosses(f):
            twin = next(g for g in self.made if (g.monoid, g.over, g.args) == (f.monoid, f.over, f.args))
            self.made[f] = self.made[twin]
            return
        home.memo[f] = _Entry(names[f.component], home, len(home.loops))
        self.records[f] = _FoldRecord(home, loop)

    def _under(self, block: _Block | None, root: _Block) -> bool:
        while block is not None:
            if block is root:
                return True
            block = block.parent
        return False

    def _loop_of(self, block: _Block) -> Loop:
        return block.parent.loops[block.slot][0]

    def _place_partial(self, f: Reduce, names, home: _Block) -> None:
        """Adds this iteration's part to the thread's partial result."""
        low = self.low
        axes = sorted(f.free, key=lambda a: (a is self.vector, a.id))
        address, size = as_index(0), as_index(1)
        for a in reversed(axes):
            low.extent(a)
            address = address + as_index(a) * size
            size = size * low.extent(a)
        partial = Partial(low.fresh("q"), f.monoid, f.args[0].dtype, size)
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
        if len(f.args) > 1:
            raise Unschedulable("an arg-fold across long columns")
        outer = [a for a in free if a is not self.vector]
        home = self._descend(self.root, outer, needs)
        wide = F64 if f.monoid == "sum" and f.dtype is F32 else f.dtype
        spot, size, _ = self._buffer_spot(f)
        buffer = Buffer(low.fresh("u"), wide, size)
        self.buffers.append(buffer)
        start = self._open(home, self.vector)
        first = low.fresh()
        start.items.append(Splat(first, wide, _literal(ops.identity(f.monoid, wide), wide)))
        start.items.append(Write(buffer.name, wide, spot, "unit", first))
        nest = self._open(home, bound[0]) if bound else home
        inner = self._descend(nest, [*bound[1:], self.vector], needs)
        value = self.emit(f.args[0], inner).var
        if wide is not f.dtype:
            converted = low.fresh()
            inner.items.append(Convert(converted, wide, f.dtype, value))
            value = converted
        inner.items.append(Write(buffer.name, wide, spot, "unit", value, monoid=f.monoid))
        self.records[f] = _FoldRecord(home, home.loops[-1][0])
        self.buffered[f] = buffer

    def _place_scan(self, s: Scan) -> None:
        key = _scan_key(s)
        twin = self.accumulators.get(key)
        if twin is not None:
            names, inner = twin
            inner.memo[s] = _Entry(names[s.component], inner, len(inner.loops))
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
        inner.memo[s] = _Entry(names[s.component], inner, len(inner.loops))

    def _turn(self, block: _Block) -> None:
        """Reads that stride along the vector axis and are contiguous along an enclosing loop go through a tile that is filled line by line."""
        for loop, child in block.loops:
            self._turn(child)
            for _, inner in child.loops:
                if inner.open - child.open == {self.vector} and not loop.vector:
                    inner.items[:] = [self._turned(s, loop) if isinstance(s, Read) else s for s in inner.items]

    def _turned(self, s: Read, loop: Loop) -> Read:
        if s.mode != "strided" or s.guard is not None or s.address.coefficient(loop.axis) != 1:
            return s
        tile = Tile(self.low.fresh("u"), s.memory, s.dtype, s.address, s.step, self.block)
        loop.tiles.append(tile)
        rows = as_index(loop.axis) - as_index(Size(f"c{self.low.names[loop.axis]}"))
        return Read(s.var, tile.name, s.dtype, rows * self.block + as_index(self.vector) - as_index(Size("b0")), "unit")

    # -- row buffers -----------------------------------------------------------------------------------------------------------
    def _choose_buffers(self, items) -> None:
        """Costly values that several loops of one iteration need: kept in a buffer by the first, read by the others."""
        users: dict[Expr, set] = {}
        parents: dict[Expr, set] = {}
        for n, item in enumerate(items):
            roots = (item.expr,) if isinstance(item, Store) else item.args
            place = (_level(item.expr) if isinstance(item, Store) else max(map(_level, item.args)))
            for r in roots:
                for e in inner_walk(r):
                    users.setdefault(e, set()).add(place)
                    for c in e.children():
                        parents.setdefault(c, set()).add(e)
        shared = {e for e, where in users.items() if len(where) > 1 and self._costly(e) and any(a in e.free for a in self._loop_axes(e))}
        for e in shared:
            if not any(p in shared and users[p] == users[e] for p in parents.get(e, ())):
                self.buffered[e] = None

    def _loop_axes(self, e: Expr) -> list[Axis]:
        return self._inner(e.free)

    @staticmethod
    def _costly(e: Expr) -> bool:
        if isinstance(e, (Reduce, Scan, Load, Const)):
            return isinstance(e, Scan)
        return any(isinstance(x, Scan) or (isinstance(x, Op) and ops.OPS[x.name].heavy) for x in inner_walk(e))

    def _buffer_spot(self, e: Expr) -> tuple[Index, Index, str]:
        """(offset, size, mode) of a buffered value."""
        address, size = as_index(0), as_index(1)
        for a in reversed(self._loop_axes(e)):
            if a is self.vector and self.block:
                address, size = as_index(a) - as_index(Size("b0")), as_index(self.block)
            else:
                address, size = address + as_index(a) * size, size * self.low.extent(a)
        return address, size, "unit" if self.vector is not None and self.vector in e.free else "splat"

    # -- expressions -------------------------------------------------------------------------------------------------------------
    def _find(self, e: Expr, block: _Block) -> _Entry | None:
        for b, slot in block.chain():
            entry = b.memo.get(e)
            if entry is not None and entry.after <= slot:
                return entry
        return None

    def _put(self, e: Expr | None, home: _Block, block: _Block, statement, var: str) -> _Entry:
        """Adds `statement` to `home`, an ancestor of `block` or itself, before whatever of it encloses `block`."""
        slot = len(home.loops)
        b = block
        while b is not home:
            slot, b = b.slot, b.parent
        if slot < len(home.loops):
            home.items.insert(home.items.index(home.loops[slot][0]), statement)
        else:
            home.items.append(statement)
        entry = _Entry(var, home, slot)
        if e is not None:
            home.memo[e] = entry
        return entry

    def _home(self, block: _Block, axes, entries=()) -> _Block:
        """The outermost block around `block` in which `axes` are open and `entries` are known."""
        wanted = {a for a in axes}
        best = block
        for b, _ in block.chain():
            if wanted <= b.open and all(self._under(b, x.home) for x in entries):
                best = b
            else:
                break
        return best

    def emit(self, e: Expr, block: _Block) -> _Entry:
        """The register that holds `e` in `block`, computed in the outermost block that can."""
        entry = self._find(e, block) or self._make(e, block)
        self.low.sources.setdefault(entry.var, e)
        return entry

    def _make(self, e: Expr, block: _Block) -> _Entry:
        if e in self.partial_of:
            return self._emit_partial(e, block)
        buffer = self.buffered.get(e)
        if buffer is not None:
            return self._emit_buffered(e, buffer, block)
        if isinstance(e, (Reduce, Scan)):
            raise Unschedulable("a fold's result is needed in a loop that it does not reach")
        entry = getattr(self, f"_emit_{type(e).__name__.lower()}")(e, block)
        if e in self.buffered and self.buffered[e] is None:
            address, size, mode = self._buffer_spot(e)
            made = Buffer(self.low.fresh("u"), compute_type(e.dtype), size)
            self.buffers.append(made)
            self.buffered[e] = made
            block.items.append(Write(made.name, made.dtype, address, mode, entry.var))
        return entry

    def _emit_buffered(self, e, buffer: Buffer, block: _Block) -> _Entry:
        address, _, mode = self._buffer_spot(e)
        var = self.low.fresh()
        read = Read(var, buffer.name, buffer.dtype, address, mode)
        if buffer.dtype is not compute_type(e.dtype):
            narrow = self.low.fresh()
            block.items.append(read)
            return self._put(e, block, block, Convert(narrow, e.dtype, buffer.dtype, var), narrow)
        return self._put(e, block, block, read, var)

    def _emit_partial(self, e: Reduce, block: _Block) -> _Entry:
        partial, axes = self.partial_of[e]
        address, size = as_index(0), as_index(1)
        for a in reversed(axes):
            address, size = address + as_index(a) * size, size * self.low.extent(a)
        unit = self.vector is not None and self.vector in axes
        if unit and axes[-1] is not self.vector:
            raise Unschedulable("partial results in another order")
        names = tuple(self.low.fresh() for _ in e.args)
        self._put(None, block, block, PartialRead(names, partial, address, "unit" if unit else "splat"), names[0])
        for f in self.partial_of:
            if (f.monoid, f.over, f.args) == (e.monoid, e.over, e.args):
                block.memo[f] = _Entry(names[f.component], block, len(block.loops))
        return block.memo[e]

    def _emit_const(self, e: Const, block: _Block) -> _Entry:
        var = self.low.fresh()
        return self._put(e, self.once, block, Splat(var, e.dtype, self._number(e)), var)

    def _number(self, e: Const) -> str:
        """Literal text, or a parameter for numbers that may be a size in disguise (x / 64): other sizes build no kernel."""
        if e.value in (0, 1, -1, 2, 0.5, -0.5, -2) or e.value != e.value or e.value in (float("inf"), float("-inf")) or e.dtype is BOOL:
            return _literal(e.value, e.dtype)
        return self.low.param("float" if e.dtype.is_float else "value", e, e, e.dtype)

    def _emit_scalar(self, e: Scalar, block: _Block) -> _Entry:
        var = self.low.fresh()
        name = self.low.param("float" if e.dtype.is_float else "value", e, e, e.dtype)
        return self._put(e, self.once, block, Splat(var, e.dtype, name), var)

    def _emit_coord(self, e: Coord, block: _Block) -> _Entry:
        return self._index_register(e.index, block, e)

    def _index_register(self, i: Index, block: _Block, key: Expr | None) -> _Entry:
        """i64 lanes of an index."""
        low = self.low
        v = self.vector
        plain, terms, entries = as_index(0), [], []
        for k, c in i.terms.items():
            lanes = [a for a in k if not isinstance(a, Axis) and _varies(a) and (v is not None and v in Index({(a,): 1}).axes() or isinstance(a, FetchAtom))]
            if not lanes:
                plain = plain + Index({k: c})
                continue
            if len(lanes) > 1:
                raise Unschedulable("a product of computed indices")
            entry = self._lane_atom(lanes[0], block)
            rest = Index({tuple(a for a in k if a is not lanes[0]): c})
            entries.append(entry)
            terms.append((entry.var, rest))
        step = plain.coefficient(v) if v is not None else as_index(0)
        base = plain.without(v) if v is not None else plain
        home = self._home(block, i.axes(), entries)
        loops = frozenset(i.axes())
        whole = low.integer(base, block, ("coord", i))
        if step.terms:
            whole = whole + low.integer(step, block, ("coord", i, "v")) * as_index(v)
        var = low.fresh()
        statement = IndexValue(var, whole, low.integer(step, block, ("coord", i, "v")) if v in loops else as_index(0),
                               tuple((t, low.integer(f, block, ("coord", i, n))) for n, (t, f) in enumerate(terms)))
        return self._put(key, home, block, statement, var)

    def _lane_atom(self, a, block: _Block) -> _Entry:
        """i64 register of an atom that differs between lanes."""
        low = self.low
        if isinstance(a, FetchAtom):
            key = ("fetch", a)
            found = self._find(key, block)
            if found is None:
                arg = self.emit(a.expr, block)
                var = low.fresh()
                statement = Fetch(var, arg.var, low.integer(a.bound, block, ("bound", a)), self._guard, False, self._error("index", a))
                home = arg.home if self._guard is None else block
                found = self._put(key if self._guard is None else None, home, block, statement, var)
            return found
        x = self._index_register(a.a, block, None)
        y = self._index_register(a.b, block, None)
        var = low.fresh()
        name = {FloorDiv: "floordiv", Mod: "mod", Min: "min", Max: "max"}[type(a)]
        return self._put(None, self._home(block, a.a.axes() | a.b.axes(), (x, y)), block, Let(var, name, I64, (x.var, y.var)), var)

    _guard: str | None = None

    def _error(self, kind: str, where) -> int:
        self.low.errors.append((kind, where))
        return len(self.low.errors)

    def _emit_load(self, e: Load, block: _Block) -> _Entry:
        guard = self.emit(e.guard, block) if e.guard is not None else None
        other = self.emit(e.other, block) if e.guard is not None else None
        address, mode, step, at = self._address(e.index[0], block, e.node, guard.var if guard else None)
        if mode == "splat" and guard is not None and self.vector in e.guard.free:
            mode = "shared"
        var = self.low.fresh()
        statement = Read(var, self.low.memory(e.node), e.dtype, address, mode, step, at, guard.var if guard else None, other.var if other else None)
        entries = [x for x in (guard, other) if x is not None]
        gathered = any(isinstance(x, FetchAtom) for x in _all_atoms(e.index[0]))
        empty = not all(positive(s) for s in e.node.node.shape)         # then it has no address, and a loop that is never entered reads it
        home = block if gathered or empty else self._home(block, e.index[0].axes(), entries)
        return self._put(e, home, block, statement, var)

    def _address(self, i: Index, block: _Block, memory: Memory, guard: str | None):
        """(address, mode, step, register of offsets) of an access in `block`."""
        low, v = self.low, self.vector
        saved, self._guard = self._guard, guard
        try:
            i = self._with_fetched(i, block)
            key = ("address", memory)
            if v is None or v not in i.axes():
                if not any(isinstance(a, FetchAtom) for a in _all_atoms(i)):
                    return low.integer(i, block, key), "splat", None, None
            inner = [a for a in i.atoms() if not isinstance(a, Axis) and _varies(a)
                     and (isinstance(a, FetchAtom) or v in Index({(a,): 1}).axes())]
            if not inner:
                step = i.coefficient(v)
                if any(k.count(v) > 1 for k in i.terms):
                    raise Unschedulable("an address that is no linear function of the vector axis")
                if step == 1:
                    return low.integer(i, block, key), "unit", None, None
                return low.integer(i, block, key), "strided", low.integer(step, block, ("step", memory)), None
            at = self._index_register(i, block, None)
            return as_index(0), "gather", None, at.var
        finally:
            self._guard = saved

    def _with_fetched(self, i: Index, block: _Block) -> Index:
        """`i` with gathered indices that are equal in all lanes replaced by integers."""
        found = {a for a in _all_atoms(i) if isinstance(a, FetchAtom) and (self.vector is None or self.vector not in a.expr.free)}
        if not found:
            return i
        from ..ir.index import substitute
        mapping = {}
        for a in found:
            entry = self._find(("scalar", a), block) if self._guard is None else None
            if entry is None:
                arg = self.emit(a.expr, block)
                var = self.low.fresh("f")
                statement = Fetch(var, arg.var, self.low.integer(a.bound, block, ("bound", a)), self._guard, True, self._error("index", a))
                home = arg.home if self._guard is None else block
                entry = self._put(("scalar", a) if self._guard is None else None, home, block, statement, var)
            mapping[a] = as_index(_Named(entry.var))
        return substitute(i, mapping, lambda e: e)

    def _emit_op(self, e: Op, block: _Block) -> _Entry:
        entries = [self.emit(a, block) for a in e.args]
        var = self.low.fresh()
        d = e.args[-1].dtype
        code = ()
        home = self._home(block, (), entries)
        if d.is_int and e.name in ("floordiv", "truncdiv", "mod", "rem"):
            code = (str(self._error("division", e)),)
            home = self._home(block, e.free, entries)
        return self._put(e, home, block, Let(var, e.name, d, tuple(x.var for x in entries) + code), var)

    def _emit_cast(self, e: Cast, block: _Block) -> _Entry:
        arg = self.emit(e.arg, block)
        var = self.low.fresh()
        return self._put(e, arg.home, block, Convert(var, e.dtype, e.arg.dtype, arg.var), var)

    def _emit_random(self, e: Random, block: _Block) -> _Entry:
        seed = self.emit(e.seed, block)
        offset = self.emit(e.offset, block)
        index = self._index_register(e.index, block, None)
        total, var = self.low.fresh(), self.low.fresh()
        home = self._home(block, e.free, (seed, offset, index))
        self._put(None, home, block, Let(total, "add", I64, (offset.var, index.var)), total)
        return self._put(e, home, block, RandomValue(var, e.kind, seed.var, total), var)


class _Named(Size):
    """An integer that the kernel itself has computed (a fetched index): varies, unlike a Size."""
    __slots__ = ()

    def __new__(cls, name: str):
        return cls._make(0, name, 0)


def _all_atoms(i: Index) -> list:
    found: list = []
    for a in i.atoms():
        found.append(a)
        if isinstance(a, (FloorDiv, Mod, Min, Max)):
            found += _all_atoms(a.a) + _all_atoms(a.b)
    return found


def _literal(value, d) -> str:
    """Text of a number, the same for every target: 'true', 'inf', '-inf', 'nan', or digits."""
    if d is BOOL:
        return "1" if value else "0"
    if d.is_float:
        if value != value:
            return "nan"
        if value in (float("inf"), float("-inf")):
            return "inf" if value > 0 else "-inf"
        return repr(float(value))
    return str(int(value))
