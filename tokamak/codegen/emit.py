"""Expressions into statements: each sub-expression is computed once, in the outermost loop in which its axes are known (`Block.memo`)."""
from __future__ import annotations

from dataclasses import replace

from ..ir.dtype import BOOL, F32, I64, compute_type
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Scalar, Scan, walk
from ..ir.index import Axis, Fetch as FetchAtom, FloorDiv, Index, Max, Min, Mod, Size, as_index
from ..ir.ops import can_fail
from ..ir.ranges import positive
from ..ir.substitution import substitute
from ..schedule.body import Memory
from .kernel import (Buffer, Convert, Divisor, Fetch, IndexValue, LaneCompare, LaneDivide, Let, Loop, PartialRead, Quotient, RandomValue, Read,
                     Splat, Write)
from .scope import Block, Entry, Named, Unschedulable, all_atoms, literal, varies


STEPS = 1 << 20         # coordinates that grow by fewer from lane to lane are compared in 32 bits
ROWS_OF_TABLE, LARGEST_TABLE = 32, 4096      # rows from which on, and elements of a row up to which, an index that all rows use is computed once
_ROUNDS = ("round", "floor", "ceil", "trunc")
_FLIPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}        # a op b is b FLIPPED[op] a


def rounded(*roots: Expr) -> frozenset[Expr]:
    """What is rounded to integers somewhere in `roots`."""
    rounds = (e for e in walk(*roots) if isinstance(e, Op) and e.name in _ROUNDS or isinstance(e, Cast) and e.dtype.is_int)
    return frozenset(e.children()[0] for e in rounds)


def _behind(block: Block, home: Block, slot: int) -> bool:
    """Is what stands in `home` behind `slot` of its loops done when the statements at the end of `block` run? An item may enter a loop that ran
    before: what it needs there is computed again."""
    done = {id(b): n for b, n in block.chain()}
    at, before = home, slot
    while id(at) not in done:
        at, before = at.parent, at.slot + 1
    return done[id(at)] >= before


class Emitter:
    """Emits expressions into the blocks of one phase. `names` gives registers, parameters and kernel integers; `p` are the parallel axes, the vector
    axis among them when it is cut into blocks; `partial_of`: folds whose partial results are complete; `buffered`: values kept in a row buffer.
    `vectors`: every axis that runs along lanes; `vector`: the one of what is being placed."""

    def __init__(self, names, parallel, vector: Axis | None, block: int | None, partial_of: dict, also: tuple[Axis, ...] = ()):
        self.low, self.parallel, self.vector, self.block = names, tuple(parallel), vector, block
        self.vectors = (vector, *also) if vector is not None else ()
        self.p = frozenset(parallel) | (frozenset((vector,)) if block else frozenset())
        self.partial_of = partial_of                    # fold -> (its Partial, the axes of its copies), complete
        self.buffers: list[Buffer] = []
        self.buffered: dict[Expr, Buffer] = {}
        self.kept: dict[Expr, tuple[Block, int]] = {}   # buffered value -> where it is written: a block, and how many of its loops stand before
        self.uses: dict[str, list[tuple[Expr, Block, Read | Write]]] = {}       # buffer -> its value, written and read in these blocks
        self.named: dict[Named, Entry] = {}             # fetched index that is an integer -> where it is read
        self.tables: dict = {}                          # index that every row uses -> the Buffer in which a thread keeps it
        self.exact: frozenset[Expr] = frozenset()       # what something rounds to integers: a last bit of a quotient would be a whole step
        self.once = Block([], frozenset())
        self.root = Block([], frozenset(parallel), self.once, 0)

    def _inner(self, axes) -> list[Axis]:
        """The axes that need a loop inside an iteration, outermost first."""
        found = [a for a in axes if a not in self.p or a is self.vector]
        order = {a: i for i, a in enumerate(self.low.s.order)}
        last = () if self.low.s.vector in order and not order[self.low.s.vector] else self.vectors
        return sorted(found, key=lambda a: (a in last, order.get(a, -1), a.id))

    def _under(self, block: Block | None, root: Block) -> bool:
        while block is not None:
            if block is root:
                return True
            block = block.parent
        return False

    def _buffer_spot(self, e: Expr, around: frozenset = frozenset()) -> tuple[Index, Index, str]:
        """(offset, size, mode) of a buffered value, all of whose uses stand in loops over `around`."""
        address, size = as_index(0), as_index(1)
        for a in reversed(sorted(self._inner(e.free - around), key=lambda a: a in self.vectors)):
            if a is self.vector and self.block:
                address, size = as_index(a) - as_index(Size("b0")), as_index(self.block)
            else:
                address, size = address + as_index(a) * size, size * self.low.extent(a)
        return address, size, "unit" if any(v in e.free for v in self.vectors) else "splat"

    def _use(self, buffer: Buffer, e: Expr, block: Block, statement: Read | Write) -> None:
        """Adds to `block` a statement that reads or writes `e` in `buffer`."""
        block.items.append(statement)
        self.uses.setdefault(buffer.name, []).append((e, block, statement))

    def _fit_buffers(self) -> None:
        """Each buffer as large as the loops inside the innermost block that has all its uses."""
        for n, b in enumerate(self.buffers):
            used = self.uses[b.name]
            common = next(x for x, _ in used[0][1].chain() if all(self._under(block, x) for _, block, _ in used))
            address, size, _ = self._buffer_spot(used[0][0], common.open.difference(self.vectors))
            self.buffers[n] = replace(b, size=size)
            for _, block, statement in used:
                at = next(i for i, x in enumerate(block.items) if x is statement)
                block.items[at] = replace(statement, address=address)

    # -- expressions -------------------------------------------------------------------------------------------------------------
    def _find(self, e: Expr, block: Block) -> Entry | None:
        for b, slot in block.chain():
            entry = b.memo.get(e)
            if entry is not None and entry.after <= slot:
                return entry
        return None

    def _put(self, e: Expr | None, home: Block, block: Block, statement, var: str) -> Entry:
        """Adds `statement` to `home`, an ancestor of `block` or itself, before whatever of it encloses `block`."""
        slot = len(home.loops)
        b = block
        while b is not home:
            slot, b = b.slot, b.parent
        if slot < len(home.loops):
            home.items.insert(home.items.index(home.loops[slot][0]), statement)
        else:
            home.items.append(statement)
        entry = Entry(var, home, slot)
        if e is not None:
            home.memo[e] = entry
        return entry

    def _home(self, block: Block, axes, entries=()) -> Block:
        """The outermost block around `block` in which `axes` are open and `entries` are known."""
        wanted = {a for a in axes}
        best = block
        for b, _ in block.chain():
            if wanted <= b.open and all(self._under(b, x.home) for x in entries):
                best = b
            else:
                break
        return best

    def emit(self, e: Expr, block: Block) -> Entry:
        """The register that holds `e` in `block`, computed in the outermost block that can."""
        entry = self._find(e, block) or self._make(e, block)
        self.low.sources.setdefault(entry.var, e)
        return entry

    def _make(self, e: Expr, block: Block) -> Entry:
        if e in self.partial_of:
            return self._emit_partial(e, block)
        buffer = self.buffered.get(e)
        if buffer is not None and (e not in self.kept or _behind(block, *self.kept[e])):
            return self._emit_buffered(e, buffer, block)
        if isinstance(e, (Reduce, Scan)):
            raise Unschedulable("a fold's result is needed in a loop that it does not reach")
        entry = getattr(self, f"_emit_{type(e).__name__.lower()}")(e, block)
        if e in self.buffered and self.buffered[e] is None:
            address, size, mode = self._buffer_spot(e)
            made = Buffer(self.low.fresh("u"), compute_type(e.dtype), size)
            self.buffers.append(made)
            self.buffered[e] = made
            self.kept[e] = block, len(block.loops)
            self._use(made, e, block, Write(made.name, made.dtype, address, mode, entry.var))
        return entry

    def _emit_buffered(self, e, buffer: Buffer, block: Block) -> Entry:
        address, _, mode = self._buffer_spot(e)
        var = self.low.fresh()
        self._use(buffer, e, block, Read(var, buffer.name, buffer.dtype, address, mode))
        if buffer.dtype is not compute_type(e.dtype):
            narrow = self.low.fresh()
            return self._put(e, block, block, Convert(narrow, e.dtype, buffer.dtype, var), narrow)
        entry = block.memo[e] = Entry(var, block, len(block.loops))
        return entry

    def _emit_partial(self, e: Reduce, block: Block) -> Entry:
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
            if f.key == e.key:
                block.memo[f] = Entry(names[f.component], block, len(block.loops))
        return block.memo[e]

    def _emit_const(self, e: Const, block: Block) -> Entry:
        var = self.low.fresh()
        return self._put(e, self.once, block, Splat(var, e.dtype, self._number(e)), var)

    def _number(self, e: Const) -> str:
        """Literal text, or a parameter for numbers that may be a size in disguise (x / 64): other sizes build no kernel."""
        if e.value in (0, 1, -1, 2, 0.5, -0.5, -2) or e.value != e.value or e.value in (float("inf"), float("-inf")) or e.dtype is BOOL:
            return literal(e.value, e.dtype)
        return self.low.param("float" if e.dtype.is_float else "value", e, e, e.dtype)

    def _emit_scalar(self, e: Scalar, block: Block) -> Entry:
        var = self.low.fresh()
        name = self.low.param("float" if e.dtype.is_float else "value", e, e, e.dtype)
        return self._put(e, self.once, block, Splat(var, e.dtype, name), var)

    def _emit_coord(self, e: Coord, block: Block) -> Entry:
        return self._index_register(e.index, block, e)

    def _index_register(self, i: Index, block: Block, key: Expr | None) -> Entry:
        """i64 lanes of an index."""
        low = self.low
        v = self.vector
        plain, terms, entries = as_index(0), [], []
        for k, c in i.terms.items():
            lanes = [a for a in k if not isinstance(a, Axis) and varies(a)
                     and (v is not None and v in Index({(a,): 1}).axes() or any(isinstance(x, FetchAtom) for x in all_atoms(Index({(a,): 1}))))]
            if not lanes:
                plain = plain + Index({k: c})
                continue
            entry, rest = self._lane_product(lanes, block), [*k]
            for a in lanes:
                rest.remove(a)
            entries.append(entry)
            terms.append((entry.var, Index({tuple(rest): c})))
        entries += [self.named[a] for a in all_atoms(i) if isinstance(a, Named)]
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

    def _lane_product(self, atoms: list, block: Block) -> Entry:
        """i64 register of the product of atoms that differ between lanes."""
        first, *others = (self._lane_atom(a, block) for a in atoms)
        for other in others:
            var = self.low.fresh()
            home = self._home(block, (), (first, other))
            first = self._put(None, home, block, Let(var, "mul", I64, (first.var, other.var)), var)
        return first

    def _lane_atom(self, a, block: Block) -> Entry:
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
        if self._tabled(a, block):
            return self._from_table(a, block)
        x = self._index_register(a.a, block, None)
        var = low.fresh()
        if isinstance(a, (FloorDiv, Mod)) and not any(varies(y) for y in a.b.atoms()) and positive(a.b):
            by = low.integer(a.b, block, ("divisor", a))
            return self._put(None, x.home, block, LaneDivide(var, "mod" if isinstance(a, Mod) else "floordiv", x.var, by), var)
        y = self._index_register(a.b, block, None)
        name = {FloorDiv: "floordiv", Mod: "mod", Min: "min", Max: "max"}[type(a)]
        return self._put(None, self._home(block, a.a.axes() | a.b.axes(), (x, y)), block, Let(var, name, I64, (x.var, y.var)), var)

    def _tabled(self, a, block: Block) -> bool:
        """Is this index the same for many rows, and not just being computed for all of them?"""
        hints, axes = self.low.hints, Index({(a,): 1}).axes()
        again = axes == {self.vector} and hints.count(block.open - axes) >= ROWS_OF_TABLE and hints(self.vector.extent) <= LARGEST_TABLE
        return again and self._under(block, self.root) and not any(isinstance(x, (FetchAtom, Named)) for x in all_atoms(Index({(a,): 1})))

    def _from_table(self, a, block: Block) -> Entry:
        """An index that every row uses, which a thread computes once."""
        low, v = self.low, self.vector
        found = self._find(("lanes", a), block)
        if found is not None:
            return found
        table = self.tables.get(a)
        if table is None:
            table = self.tables[a] = Buffer(low.fresh("u"), I64, low.extent(v))
            loop = Loop(v, as_index(0), low.extent(v), True)
            fill = Block(loop.items, frozenset((v,)), self.once, len(self.once.loops))
            self.once.items.append(loop)
            self.once.loops.append((loop, fill))
            made = self._lane_atom(a, fill)
            loop.items.append(Write(table.name, I64, as_index(v), "unit", made.var))
        var = low.fresh()
        return self._put(("lanes", a), self._home(block, (v,)), block, Read(var, table.name, I64, as_index(v), "unit"), var)

    _guard: str | None = None

    def _error(self, kind: str, where) -> int:
        self.low.errors.append((kind, where))
        return len(self.low.errors)

    def _emit_load(self, e: Load, block: Block) -> Entry:
        guard = self.emit(e.guard, block) if e.guard is not None else None
        other = self.emit(e.other, block) if e.guard is not None else None
        around = self._around(e.index[0], block, e.node) if guard is None else None
        address, mode, step, at = (around[0], "around", around[1], None) if around else self._address(e.index[0], block, e.node, guard and guard.var)
        if mode == "splat" and guard is not None and self.vector in e.guard.free:
            mode = "shared"
        elif mode == "gather" and guard is None and not any(isinstance(x, FetchAtom) for x in all_atoms(e.index[0])):
            mode = "window"
        var = self.low.fresh()
        even = guard is not None and mode != "splat" and self.vector not in e.guard.free
        statement = Read(var, self.low.memory(e.node), e.dtype, address, mode, step, at, guard.var if guard else None, other.var if other else None,
                         turn=around[2] if around else None, even=even)
        entries = [x for x in (guard, other) if x is not None]
        gathered = any(isinstance(x, FetchAtom) for x in all_atoms(e.index[0]))
        empty = not all(positive(s) for s in e.node.node.shape)         # then it has no address, and a loop that is never entered reads it
        home = block if gathered or empty else self._home(block, e.index[0].axes(), entries)
        return self._put(e, home, block, statement, var)

    def _around(self, i: Index, block: Block, memory: Memory) -> tuple[Index, Index, Index] | None:
        """(address, start, turn) of a read that runs along the vector axis and begins again (a roll): `i` is address + (start + lane) % turn. Element
        by element four steps of a stencil of 1024 x 1024 took 58.7 ms on one core, so 1.9."""
        low, v = self.low, self.vector
        inner = [a for a in i.atoms() if not isinstance(a, Axis) and v is not None and v in Index({(a,): 1}).axes()]
        if len(inner) != 1 or not isinstance(inner[0], Mod) or i.coefficient(inner[0]) != 1 or any(isinstance(a, FetchAtom) for a in all_atoms(i)):
            return None
        turn, rest = inner[0], i - as_index(inner[0])
        if v in rest.axes() or v in turn.b.axes() or self._lane_step(turn.a) != 1:
            return None
        key = ("address", memory)
        start = low.integer(as_index(turn), block, (key, "start"))
        return low.integer(rest, block, key), start, low.integer(turn.b, block, (key, "turn"))

    def _address(self, i: Index, block: Block, memory: Memory, guard: str | None):
        """(address, mode, step, register of offsets) of an access in `block`."""
        low, v = self.low, self.vector
        saved, self._guard = self._guard, guard
        try:
            i = self._with_fetched(i, block)
            key = ("address", memory)
            if v is None or v not in i.axes():
                if not any(isinstance(a, FetchAtom) for a in all_atoms(i)):
                    return low.integer(i, block, key), "splat", None, None
            inner = [a for a in i.atoms() if not isinstance(a, Axis) and varies(a)
                     and (isinstance(a, FetchAtom) or v in Index({(a,): 1}).axes())]
            if not inner:
                step = i.coefficient(v)
                if any(k.count(v) > 1 for k in i.terms):
                    raise Unschedulable("an address that is no linear function of the vector axis")
                if step == 1:
                    return low.integer(i, block, key), "unit", None, None
                return low.integer(i, block, key), "strided", low.integer(step, block, ("step", memory)), None
            if any(isinstance(a, FetchAtom) for a in all_atoms(i)):
                return as_index(0), "gather", None, self._index_register(i, block, None).var
            lanes = Index({k: c for k, c in i.terms.items() if any(a is v or a in inner for a in k)})
            return low.integer(i - lanes, block, key), "gather", None, self._index_register(lanes, block, None).var
        finally:
            self._guard = saved

    def _with_fetched(self, i: Index, block: Block) -> Index:
        """`i` with gathered indices that are equal in all lanes replaced by integers."""
        found = {a for a in all_atoms(i) if isinstance(a, FetchAtom) and (self.vector is None or self.vector not in a.expr.free)}
        if not found:
            return i
        mapping = {}
        for a in found:
            entry = self._find(("scalar", a), block) if self._guard is None else None
            if entry is None:
                arg = self.emit(a.expr, block)
                var = self.low.fresh("f")
                statement = Fetch(var, arg.var, self.low.integer(a.bound, block, ("bound", a)), self._guard, True, self._error("index", a))
                home = arg.home if self._guard is None else block
                entry = self._put(("scalar", a) if self._guard is None else None, home, block, statement, var)
            name = Named(entry.var)
            self.named[name], mapping[a] = entry, as_index(name)
        return substitute(i, mapping, lambda e: e)

    def _emit_op(self, e: Op, block: Block) -> Entry:
        if e.name in _FLIPPED and e.args[0].dtype is I64:
            for position, lane in enumerate(e.args):
                other = e.args[1 - position]
                step = self._lane_step(lane.index) if isinstance(lane, Coord) and self.vector not in other.free else 0
                same = isinstance(lane, Coord) and isinstance(other, Const) and all(isinstance(a, Axis) or self._even(a) for a in lane.index.atoms())
                if step or same and self.vector not in lane.free:
                    return self._emit_lane_compare(e, _FLIPPED[e.name] if position else e.name, lane.index, e.args[1 - position], step, block)
        entries = [self.emit(a, block) for a in e.args]
        whole = isinstance(e.args[0], Reduce)           # once for all that it folds: the mean of equal values is that value
        reciprocal = e.name == "div" and e.dtype is F32 and self.low.s.divide == "reciprocal" and not whole and e not in self.exact
        if reciprocal and not self._under(entries[1].home, self._home(block, (), entries)):
            return self._emit_quotient(e, *entries, block)
        var = self.low.fresh()
        d = e.args[-1].dtype
        code = ()
        home = self._home(block, (), entries)
        if can_fail(e.name, d):
            code = (str(self._error("division", e)),)
            home = self._home(block, e.free, entries)
        return self._put(e, home, block, Let(var, e.name, d, tuple(x.var for x in entries) + code), var)

    def _lane_step(self, i: Index) -> int:
        """How much `i` grows from lane to lane, where it is an integer plus a positive multiple of the lane's number; else 0."""
        step = i.coefficient(self.vector).constant if self.vector is not None else None
        return step if step is not None and 0 < step < STEPS and all(isinstance(a, Axis) or self._even(a) for a in i.atoms()) else 0

    def _even(self, a) -> bool:
        """Is this atom an integer of the loops around, the same in all lanes?"""
        inside = all_atoms(Index({(a,): 1}))
        return not varies(a) or self.vector not in Index({(a,): 1}).axes() and not any(isinstance(x, (FetchAtom, Named)) for x in inside)

    def _emit_lane_compare(self, e: Op, name: str, i: Index, other, step: int, block: Block) -> Entry:
        arg = self.emit(other, block)
        var = self.low.fresh()
        base = self.low.integer(i, block, ("coord", i))
        return self._put(e, self._home(block, i.axes(), (arg,)), block, LaneCompare(var, name, base, arg.var, step), var)

    def _emit_quotient(self, e: Op, x: Entry, y: Entry, block: Block) -> Entry:
        """Division by what is the same all along a loop: its reciprocal is taken outside."""
        by = self._find(("divisor", e.args[1]), block)
        if by is None:
            name = self.low.fresh()
            by = self._put(("divisor", e.args[1]), y.home, block, Divisor(name, y.var), name)
        var = self.low.fresh()
        return self._put(e, self._home(block, (), (x, by)), block, Quotient(var, x.var, by.var), var)

    def _emit_cast(self, e: Cast, block: Block) -> Entry:
        arg = self.emit(e.arg, block)
        var = self.low.fresh()
        return self._put(e, arg.home, block, Convert(var, e.dtype, e.arg.dtype, arg.var), var)

    def _emit_random(self, e: Random, block: Block) -> Entry:
        seed = self.emit(e.seed, block)
        offset = self.emit(e.offset, block)
        index = self._index_register(e.index, block, None)
        total, var = self.low.fresh(), self.low.fresh()
        home = self._home(block, e.free, (seed, offset, index))
        self._put(None, home, block, Let(total, "add", I64, (offset.var, index.var)), total)
        return self._put(e, home, block, RandomValue(var, e.kind, seed.var, total), var)
