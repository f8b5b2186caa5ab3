"""(Body, TileSchedule) -> TileKernels: what a GPU runs. A body becomes one kernel, or two where folds cross its parallel axes: the first leaves
partial results in a workspace, the second is the body that folds those.

A program of a kernel works on one tile. A tiled axis is a dimension of every register, a row axis with several pieces has a register for each piece;
all other axes are plain integers. Values are computed in the outermost scope that has what they depend on: the program, the loop over its share of the
split axes, the loops over the rows.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from ..ir.dtype import BOOL, DType
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Rewriter, Scalar, Scan, walk
from ..ir.index import Axis, Fetch, FloorDiv, Index, Max, Min, Mod, Size, as_index, floordiv, nonnegative, substitute
from ..schedule.body import Body, Memory, Store, coalesce
from ..schedule.tiles import TileSchedule
from . import tile_words as words
from .kernel import Param
from .lower import Lowering
from .scope import Named, Unschedulable, all_atoms


@dataclass
class Scope:
    """Statements at one level. `open`: the axes that have a coordinate here."""
    lines: list
    open: frozenset
    parent: "Scope | None" = None
    memo: dict = field(default_factory=dict)

    def chain(self):
        s = self
        while s is not None:
            yield s
            s = s.parent


@dataclass
class For:
    head: str
    lines: list


@dataclass(frozen=True)
class Value:
    """A register. `dims`: the tiled axes it differs along; a `block` has a dimension for every tiled axis, others are single numbers."""
    var: str
    dims: frozenset
    scope: Scope
    block: bool


@dataclass(frozen=True, eq=False)
class TileKernel:
    """`grid`: programs in all, as an Index. `sources`: register -> the Expr that it holds, for people. `spaces`: workspace nodes that it fills."""
    params: tuple[Param, ...]
    lines: tuple
    grid: Index
    schedule: TileSchedule
    body: Body
    errors: tuple
    sources: dict
    spaces: tuple


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch memory between two kernels of one group."""
    shape: tuple[Index, ...]
    dtype: DType
    device: str
    strides: tuple[Index, ...] = (as_index(1),)


class TileLowering(Lowering):
    """The main kernel of a body, and what is left for a second one."""

    def __init__(self, body: Body, schedule: TileSchedule, hints, device: str, stores=None):
        super().__init__(body, schedule, hints)
        self.device = device
        self.program = Scope([], frozenset())
        self.scope = self.program
        self.rank = len(schedule.dims)
        self.piece: dict[Axis, int] = {a: 0 for a in schedule.dims}
        self.coords: dict = {}               # (axis, piece) -> (Value, mask text or None)
        self.stores = list(body.stores if stores is None else stores)
        self.spaces: dict = {}

    # -- texts -----------------------------------------------------------------------------------------------------------
    def shape(self, dims) -> str:
        sizes = [str(self.s.sizes(a)[self.piece[a]]) if a in dims else "1" for a in self.s.dims]
        return f"[{', '.join(sizes)}]"

    def _placed(self, text: str, a: Axis) -> str:
        """A one-dimensional register as dimension `a` of a block."""
        if self.rank == 1:
            return text
        return f"{text}[{', '.join(':' if x is a else 'None' for x in self.s.dims)}]"

    def assign(self, scope: Scope, text: str, prefix: str = "t") -> str:
        var = self.fresh(prefix)
        scope.lines.append(f"{var} = {text}")
        return var

    def text(self, i: Index, key, scope: Scope | None = None) -> tuple[str, frozenset]:
        """(text, tiled axes) of an index: plain integers stand first, so that tiles are offsets from one address."""
        i = self._fetched(i)
        whole = self.integer(i, None, key)
        parts: list[tuple[str, frozenset]] = []
        for k, v in whole.terms.items():
            factors = [self._atom_text(a) for a in k]
            dims = frozenset().union(*(d for _, d in factors)) if factors else frozenset()
            texts = [t for t, _ in factors]
            if v != 1 or not texts:
                texts.append(str(v))
            parts.append((" * ".join(texts), dims))
        parts.sort(key=lambda p: len(p[1]))
        dims = frozenset().union(*(d for _, d in parts)) if parts else frozenset()
        return " + ".join(t for t, _ in parts) or "0", dims

    def _atom_text(self, a) -> tuple[str, frozenset]:
        if isinstance(a, Axis):
            return self.coordinate(a)
        if isinstance(a, Named):
            value = self.named[a]
            return value.var, value.dims
        if isinstance(a, Size):
            return a.name, frozenset()
        (x, dx), (y, dy) = self._plain(a.a), self._plain(a.b)
        if isinstance(a, (Min, Max)):
            return f"tl.{'minimum' if isinstance(a, Min) else 'maximum'}({x}, {y})", dx | dy
        exact = nonnegative(a.a) or self._never_negative(a.a)
        if isinstance(a, FloorDiv):
            return (f"(({x}) // ({y}))" if exact else f"tk.floordiv({x}, {y})"), dx | dy
        return (f"(({x}) % ({y}))" if exact else f"tk.mod({x}, {y})"), dx | dy

    @staticmethod
    def _never_negative(i: Index) -> bool:
        return all(v > 0 for v in i.terms.values()) and all(isinstance(a, (Axis, Size, FloorDiv, Mod)) and not isinstance(a, Named) for a in i.atoms())

    def _plain(self, whole: Index) -> tuple[str, frozenset]:
        """Text of an index whose factors are parameters already."""
        parts, dims = [], frozenset()
        for k, v in whole.terms.items():
            factors = [self._atom_text(a) for a in k]
            dims = dims.union(*(d for _, d in factors))
            texts = [t for t, _ in factors]
            parts.append(" * ".join(texts + ([str(v)] if v != 1 or not texts else [])))
        return " + ".join(parts) or "0", dims

    # -- coordinates and masks ---------------------------------------------------------------------------------------------
    def coordinate(self, a: Axis) -> tuple[str, frozenset]:
        value, _ = self.coords[a, self.piece.get(a, 0)]
        return value.var, value.dims

    def mask(self, axes) -> list[str]:
        """Masks of those of `axes` whose current piece may reach past the extent."""
        found = [self.coords[a, self.piece[a]][1] for a in self.s.dims if a in axes]
        return [m for m in found if m is not None]

    def _tile_coordinate(self, scope: Scope, a: Axis, base: str, piece: int, ragged: bool) -> None:
        size = self.s.sizes(a)[piece]
        lanes = self._placed(f"tl.arange(0, {size})", a)
        var = self.assign(scope, f"{base} + {lanes}" if base else lanes, "i")
        mask = self.assign(scope, f"{var} < {self._number(self.extent(a))}", "m") if ragged else None
        self.coords[a, piece] = (Value(var, frozenset((a,)), scope, True), mask)

    def _number(self, i: Index) -> str:      # an extent: a parameter or a literal
        return self._plain(i)[0]

    def _scalar_coordinate(self, scope: Scope, a: Axis, var: str) -> None:
        self.coords[a, 0] = (Value(var, frozenset(), scope, False), None)

    def blocks(self, a: Axis) -> Index:
        """How many blocks a parallel axis has, for the host."""
        return floordiv(a.extent + (self.s.sizes(a)[0] - 1), as_index(self.s.sizes(a)[0])) if a in self.s.dims else a.extent

    def _decode(self, scope: Scope, axes, number: str, prefix: str) -> None:
        """Coordinates of `axes` from the running `number` of a block, the last axis fastest."""
        rest = number
        for n, a in reversed(list(enumerate(axes))):
            if n == 0:
                block = rest
            else:
                count = self.param("int", ("blocks", a), self.blocks(a))
                block = self.assign(scope, f"{rest} % {count}", prefix)
                rest = self.assign(scope, f"{rest} // {count}", prefix)
            if a in self.s.dims:
                size = self.s.sizes(a)[0]
                self._tile_coordinate(scope, a, f"{block} * {size}", 0, a not in self.s.exact)
            else:
                self._scalar_coordinate(scope, a, block)

    # -- the kernel --------------------------------------------------------------------------------------------------------
    def kernel(self) -> TileKernel:
        s = self.s
        kept = [a for a in s.order if a in self.body_.parallel and a not in s.split]
        number = self.assign(self.program, "tl.program_id(0)" + (".to(tl.int64)" if s.wide else ""), "b")
        grid = as_index(1)
        for a in kept:
            grid = grid * self.blocks(a)
        share = None
        if s.split:
            if kept:
                count = self.param("int", ("kept",), grid)
                share = self.assign(self.program, f"{number} // {count}", "b")
                number = self.assign(self.program, f"{number} % {count}", "b")
            else:
                share = number
            grid = grid * s.programs
        self._decode(self.program, kept, number, "b")
        self.program.open = frozenset(kept)
        self._open_held()
        if s.split:
            self._accumulate(share)
        else:
            self._run(self.program, self.stores, ())
        return TileKernel(tuple(self.params), tuple(self.program.lines), grid, s, self.body_, tuple(self.errors), self.sources, tuple(self.spaces.values()))

    def _open_held(self) -> None:
        held = [a for a in self.s.dims if a not in self.body_.parallel and a not in self.s.looped]
        for a in held:
            start = 0
            for n, size in enumerate(self.s.sizes(a)):
                last = n == len(self.s.sizes(a)) - 1
                self._tile_coordinate(self.program, a, str(start) if start else "", n, last and a not in self.s.exact)
                start += size
        self.held = held
        self.program.open |= frozenset(held)

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
                    crossing.setdefault((e.monoid, e.over, e.args), e)
        for e in crossing.values():
            if (set(e.over) | e.free) & self.body_.parallel != set(self.body_.parallel) or set(s.split) - set(e.over):
                raise Unschedulable("folds across programs over different axes")
            if e.free & s.looped:
                raise Unschedulable("partial results along an axis that is run through in a loop")
            if any(isinstance(x, Reduce) and set(x.over) & set(s.split) for a in e.args for x in walk(a)):
                raise Unschedulable("a fold across programs of another one")
        local = [st for st in self.stores if not any(isinstance(e, Reduce) and set(e.over) & set(s.split) for e in walk(st.expr))]
        carried = {e: self._accumulators(self.program, e) for e in crossing.values()}
        count = self.param("int", ("split",), total)
        var = self.fresh("b")
        loop = For(f"for {var} in range({share}, {count}, {s.programs})", [])
        inner = Scope(loop.lines, self.program.open, self.program)
        self._decode(inner, list(s.split), var, "b")
        inner.open |= frozenset(s.split)
        self._run(inner, local, tuple(crossing.values()), carried)
        self.program.lines.append(loop)
        for e, accumulators in carried.items():
            self._leave(e, accumulators, share)

    def _leave(self, e: Reduce, accumulators, share: str) -> None:
        """Folds a program's carried values and stores them: workspace[share, free coordinates]."""
        free = [a for a in self.s.order if a in e.free]
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
            values = self._finish(self.program, e, accumulators)
            flat = as_index(0)
            for a in free:
                flat = flat + as_index(a) * strides[a]
            rest = self.param("int", ("space", size), size)
            for value, memory in zip(values, memories):
                address, dims = self.text(flat, ("space", size))
                self._write(self.program, memory, f"{share} * {rest} + {address}", dims, value)
        self._first_pieces()

    def _choices(self, axes):
        """Every choice of pieces of the held axes among `axes`; the other axes stay at their first piece."""
        held = [a for a in self.held if a in axes]
        for combination in itertools.product(*(range(len(self.s.sizes(a))) for a in held)):
            yield dict(zip(held, combination))

    def _first_pieces(self) -> None:
        for a in self.piece:
            self.piece[a] = 0

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
                folds.setdefault((e.monoid, e.over, e.args), e)
        depth = lambda e: max((self._passes(a) for a in e.args), default=0)
        last = max([depth(e) for e in folds.values()] + [self._passes(s.expr) for s in stores] + [depth(e) for e in crossing], default=0)
        for n in range(last + 1):
            now = [e for e in folds.values() if depth(e) == n]
            through = [s for s in stores if self._passes(s.expr) == n]
            inside = [s for s in through if s.axes & self.s.looped]
            across = [e for e in crossing if depth(e) == n]
            if looped and (now or inside or across):
                self._pass(outer, looped, now, inside, across, carried)
                across = []
            self.scope = outer
            for e in across:
                self._carry(outer, e, carried[e])
            self._store_all(outer, [s for s in through if not s.axes & self.s.looped])

    def _passes(self, e: Expr) -> int:
        """How many loops over the rows must be over before `e` is known."""
        return max((1 + max(self._passes(a) for a in f.args) if set(f.over) & self.s.looped else max(self._passes(a) for a in f.args)
                    for f in walk(e) if isinstance(f, Reduce)), default=0) if self.s.looped else 0

    def _pass(self, outer: Scope, looped, folds, stores, crossing, carried) -> None:
        accumulators = {e: self._accumulators(outer, e) for e in folds}
        scope, loops = outer, []
        scans = list({(e.monoid, e.args): e for r in [*(s.expr for s in stores), *(a for e in (*folds, *crossing) for a in e.args)]
                      for e in walk(r) if isinstance(e, Scan) and e.along in self.s.looped}.values())
        carries = {(e.monoid, e.args): self._carry_registers(outer, e) for e in scans}
        saved, self.carries = getattr(self, "carries", {}), carries
        for a in looped:
            number = self.fresh("r")
            tiled = a in self.s.dims
            head = f"for {number} in range(0, {self._number(self.extent(a))}{f', {self.s.sizes(a)[0]}' if tiled else ''})"
            loop = For(head, [])
            loops.append((scope, loop))
            scope = Scope(loop.lines, scope.open | {a}, scope)
            if tiled:
                self._tile_coordinate(scope, a, number, 0, a not in self.s.exact)
            else:
                self._scalar_coordinate(scope, a, number)
        self.scope = scope
        for e in folds:
            self._carry(scope, e, accumulators[e])
        for e in crossing:
            self._carry(scope, e, carried[e])
        self._store_all(scope, stores)
        for parent, loop in reversed(loops):
            parent.lines.append(loop)
        self.carries = saved
        self.scope = outer
        for e in folds:
            for choice in self._choices(e.free):
                self.piece.update(choice)
                self._remember(outer, e, self._finish(outer, e, accumulators[e]))
            self._first_pieces()

    # -- carried folds -------------------------------------------------------------------------------------------------------
    def _fold_dims(self, e: Reduce) -> frozenset:
        return frozenset(a for a in self.s.dims if a in e.over or any(a in x.free for x in e.args))

    def _accumulators(self, scope: Scope, e: Reduce) -> dict:
        """Registers that carry `e`: one tile a choice of pieces of the held axes that it depends on or folds."""
        dims, made = self._fold_dims(e), {}
        for choice in self._choices(dims):
            self.piece.update(choice)
            shape = self.shape(dims) if dims else "[]"
            made[tuple(sorted(((self.places[a], n) for a, n in choice.items())))] = tuple(
                self.assign(scope, words.full(shape, words.neutral(e.monoid, e.args[0].dtype, n), x.dtype), "a") for n, x in enumerate(e.args))
        self._first_pieces()
        return made

    def _key(self, axes) -> tuple:
        return tuple(sorted((self.places[a], self.piece[a]) for a in self.held if a in axes))

    def _carry(self, scope: Scope, e: Reduce, accumulators: dict) -> None:
        dims = self._fold_dims(e)
        for choice in self._choices(dims):
            self.piece.update(choice)
            values = [self._masked(scope, self.emit(x), x.dtype, e, n) for n, x in enumerate(e.args)]
            carried = accumulators[self._key(dims)]
            scope.lines += words.combine_lines(e.monoid, e.args[0].dtype, carried, carried, tuple(v.var for v in values))
        self._first_pieces()

    def _masked(self, scope: Scope, v: Value, d: DType, e: Reduce, component: int) -> Value:
        """`v` with idle lanes of the folded axes neutral, along every tiled axis that `e` folds."""
        folded = [a for a in self.s.dims if a in e.over]
        masks = self.mask(folded)
        neutral = words.literal(words.neutral(e.monoid, e.args[0].dtype, component), d)
        dims = v.dims | frozenset(folded)
        if masks:
            var = self.assign(scope, f"tl.where({' & '.join(masks)}, {v.var}, {neutral})")
            got = v.dims | frozenset(a for a in folded if self.coords[a, self.piece[a]][1] is not None)
            v = Value(var, got, scope, True)
        if v.dims != dims or not v.block and dims:
            v = Value(self.assign(scope, f"tl.broadcast_to({v.var}, {self.shape(dims)})"), dims, scope, True)
        return v

    def _finish(self, scope: Scope, e: Reduce, accumulators: dict) -> tuple[Value, ...]:
        """The folded value at the current pieces of its free axes: every piece of the folded axes combined."""
        dims = self._fold_dims(e)
        folded = [a for a in self.held if a in e.over]
        parts: dict = {}
        saved = dict(self.piece)
        for choice in self._choices(folded):
            self.piece.update(choice)
            sizes = tuple(self.s.sizes(a)[n] for a, n in choice.items())
            carried = accumulators[self._key(dims)]
            if sizes in parts:      # equal pieces first combine lane by lane: one fold across lanes
                carried = self._combined(scope, e, parts[sizes], carried)
            parts[sizes] = carried
        whole = None
        for sizes, carried in parts.items():
            for a, n in zip(folded, sizes):
                self.piece[a] = self.s.sizes(a).index(n)
            value, dims_left, block = self._across(scope, e, carried, dims)
            whole = value if whole is None else self._combined(scope, e, whole, value)
        self.piece.update(saved)
        return tuple(Value(v, dims_left, scope, block) for v in whole)

    def _combined(self, scope: Scope, e: Reduce, x: tuple, y: tuple) -> tuple:
        made = tuple(self.fresh() for _ in x)
        scope.lines += words.combine_lines(e.monoid, e.args[0].dtype, made, x, y)
        return made

    def _across(self, scope: Scope, e: Reduce, carried: tuple, dims: frozenset):
        """Lanes of the folded dimensions folded together: (registers, dims left, are they blocks)."""
        left = frozenset(a for a in dims if a not in e.over)
        if not dims:
            return carried, left, False
        over = [n for n, a in enumerate(self.s.dims) if a in e.over]
        if not over:
            return carried, left, True
        current, rank = carried, self.rank
        flatten = not left
        positions = sorted(range(self.rank), reverse=True) if flatten else over
        for n in positions:
            text = words.reduce(e.monoid, e.args[0].dtype, current, n)
            made = tuple(self.fresh() for _ in carried)
            scope.lines.append(f"{', '.join(made)} = {text}")
            if not flatten:
                scope.lines += [f"{m} = tl.expand_dims({m}, {n})" for m in made]
            current = made
        return current, left, not flatten

    def _remember(self, scope: Scope, e: Reduce, values) -> None:
        for n, v in enumerate(values):
            same = Reduce(e.monoid, e.over, e.args, n)
            scope.memo[same, self._key(e.free)] = v
            self.sources.setdefault(v.var, same)

    # -- stores --------------------------------------------------------------------------------------------------------------
    def _store_all(self, scope: Scope, stores) -> None:
        self.scope = scope
        written = {s.memory for s in stores}
        aliased = any(isinstance(x, Load) and x.node in written for s in stores for x in walk(s.expr))
        waiting: list = []
        for s in stores:
            for choice in self._choices(s.axes):
                self.piece.update(choice)
                value = self.emit(s.expr)
                guard = self.emit(s.guard) if s.guard is not None else None
                address, dims = self.text(s.address, ("address", s.memory))
                job = (s, address, dims, value, guard, dict(self.piece))
                if aliased:
                    waiting.append(job)
                else:
                    self._store(scope, *job)
            self._first_pieces()
        for job in waiting:
            self.piece.update(job[-1])
            self._store(scope, *job)
        self._first_pieces()

    def _store(self, scope: Scope, s: Store, address: str, dims, value: Value, guard, _pieces) -> None:
        self._write(scope, s.memory, address, dims, value, s.monoid, guard, frozenset(a for a in self.s.dims if a in s.axes))

    def _write(self, scope: Scope, memory: Memory, address: str, dims, value: Value, monoid=None, guard: Value | None = None, along=None) -> None:
        along = dims if along is None else along
        masks = self.mask(along) + ([guard.var] if guard is not None else [])
        block = value.block or bool(dims) or bool(guard and guard.block) or bool(along)
        whole = along | dims | value.dims
        target = f"{self.memory(memory)} + {self._parenthesised(address)}" if address != "0" else self.memory(memory)
        if block and dims != whole or block and not dims:
            target = f"{self.memory(memory)} + ({address} + tl.zeros({self.shape(whole)}, tl.int32))"
        mask = f", mask={' & '.join(masks)}" if masks else ""
        if monoid is not None:
            scope.lines.append(words.update(monoid, memory.dtype, target, value.var, " & ".join(masks)))
        else:
            scope.lines.append(f"tl.store({target}, {value.var}{mask})")

    @staticmethod
    def _parenthesised(address: str) -> str:
        return " + ".join(f"{p}" if "*" not in p else f"{p}" for p in (address,)) if " + " not in address else address

    # -- expressions -----------------------------------------------------------------------------------------------------------
    def emit(self, e: Expr) -> Value:
        found = self._known(e)
        if found is None:
            found = getattr(self, f"_emit_{type(e).__name__.lower()}")(e)
            self.sources.setdefault(found.var, e)
        return found

    def _known(self, e) -> Value | None:
        key = (e, self._key(e.free) if isinstance(e, Expr) else ())
        for s in self.scope.chain():
            found = s.memo.get(key)
            if found is not None:
                return found
        return None

    def _home(self, axes, values=()) -> Scope:
        """The outermost scope that has the coordinates of `axes` and knows `values`."""
        best = self.scope
        visible = [v.scope for v in values]
        for s in self.scope.chain():
            if axes <= s.open and all(any(x is v for x in s.chain()) for v in visible):
                best = s
            else:
                break
        return best

    def _put(self, e, text: str, axes, values=(), dims=None, block=None) -> Value:
        scope = self._home(frozenset(axes), values)
        dims = frozenset().union(*(v.dims for v in values)) if dims is None else dims
        block = any(v.block for v in values) if block is None else block
        value = Value(self.assign(scope, text), dims, scope, block)
        if e is not None:
            scope.memo[e, self._key(e.free) if isinstance(e, Expr) else ()] = value
        return value

    def _emit_const(self, e: Const) -> Value:
        name = self._number_text(e)
        if name is None:
            name = self.param("float" if e.dtype.is_float else "value", e, e, e.dtype)
            return self._put(e, words.number(name, e.dtype), (), block=False)
        return Value(words.literal(e.value, e.dtype), frozenset(), self.program, False) if not e.dtype.is_half else \
            self._put(e, words.literal(e.value, e.dtype), (), block=False)

    def _number_text(self, e: Const) -> str | None:
        """Literal text; None for numbers that may be a size in disguise (x / 64): other sizes build no kernel."""
        v = e.value
        if v in (0, 1, -1, 2, 0.5, -0.5, -2) or v != v or v in (float("inf"), float("-inf")) or e.dtype is BOOL:
            return words.literal(v, e.dtype)
        return None

    def _emit_scalar(self, e: Scalar) -> Value:
        name = self.param("float" if e.dtype.is_float else "value", e, e, e.dtype)
        return self._put(e, words.number(name, e.dtype), (), block=False)

    def _emit_coord(self, e: Coord) -> Value:
        text, dims = self.text(e.index, ("coord", e.index))
        return self._put(e, _as_i64(text), e.index.axes(), self._of(e.index), dims, bool(dims))

    def _of(self, i: Index) -> list[Value]:
        """The fetched values in an index."""
        i = self._fetched(i)
        return [self.named[a] for a in all_atoms(i) if isinstance(a, Named)]

    named: dict = {}

    def _fetched(self, i: Index) -> Index:
        """`i` with gathered indices replaced by the registers that hold them, checked and clamped."""
        atoms = {a for a in all_atoms(i) if isinstance(a, Fetch)}
        if not atoms:
            return i
        mapping = {}
        for a in sorted(atoms, key=lambda x: x.sort_key()):
            key = (a, self._key(a.expr.free), self.guard)
            found = next((s.memo[key] for s in self.scope.chain() if key in s.memo), None)
            if found is None:
                found = self._fetch(a, key)
            name = Named(found.var)
            self.named = {**self.named, name: found}
            mapping[a] = as_index(name)
        return substitute(i, mapping, lambda e: e)

    guard: "Value | None" = None

    def _fetch(self, a: Fetch, key) -> Value:
        guard = self.guard
        self.guard = None
        arg = self.emit(a.expr)
        bound, _ = self.text(a.bound, ("bound", a))
        self.guard = guard
        values = [arg] + ([guard] if guard is not None else [])
        axes = frozenset(a.expr.free) | (frozenset().union(*(v.dims for v in values)))
        scope = self._home(axes, values)
        active = self.mask(frozenset().union(*(v.dims for v in values))) + ([guard.var] if guard is not None else [])
        bad = " & ".join([*active, f"(({arg.var} < 0) | ({arg.var} >= {bound}))"])
        self._fail(scope, bad, "index", a)
        var = self.assign(scope, f"tl.minimum(tl.maximum({arg.var}, 0), {bound} - 1)", "f")
        value = Value(var, arg.dims, scope, arg.block)
        scope.memo[key] = value
        return value

    def _fail(self, scope: Scope, bad: str, kind: str, where) -> None:
        self.errors.append((kind, where))
        var = self.assign(scope, bad, "e")
        scope.lines.append(f"tl.store(err + {var}.to(tl.int32) * 0, {len(self.errors)}, mask={var})")

    def _emit_load(self, e: Load) -> Value:
        guard = self.emit(e.guard) if e.guard is not None else None
        saved, self.guard = self.guard, guard
        address, dims = self.text(e.index[0], ("address", e.node))
        values = self._of(e.index[0]) + ([guard] if guard is not None else [])
        self.guard = saved
        whole = dims | (guard.dims if guard is not None else frozenset())
        masks = self.mask(whole) + ([guard.var] if guard is not None else [])
        memory = self.memory(e.node)
        target = f"{memory} + {address}" if address != "0" else memory
        block = bool(whole) or bool(guard and guard.block)
        if block and dims != whole or block and not dims:
            target = f"{memory} + ({address} + tl.zeros({self.shape(whole)}, tl.int32))"
        text = f"tl.load({target}"
        if masks:
            text += f", mask={' & '.join(masks)}"
            if guard is not None:
                text += f", other={words.literal(e.other.value, e.other.dtype)}"
        loaded = self._put(e, text + ")", e.index[0].axes() | whole, values, whole, block)
        return loaded

    def _emit_op(self, e: Op) -> Value:
        values = [self.emit(a) for a in e.args]
        d = e.args[-1].dtype
        texts = tuple(v.var for v in values)
        if d.is_int and e.name in ("floordiv", "truncdiv", "mod", "rem"):
            dims = frozenset().union(*(v.dims for v in values))
            scope = self._home(e.free | dims, values)
            self._fail(scope, " & ".join([*self.mask(dims), f"({texts[1]} == 0)"]), "division", e)
            return self._put(e, words.op(e.name, d, texts), e.free | dims, values)
        return self._put(e, words.op(e.name, d, texts), (), values)

    def _emit_cast(self, e: Cast) -> Value:
        arg = self.emit(e.arg)
        return self._put(e, words.cast(e.dtype, e.arg.dtype, arg.var), (), (arg,))

    def _emit_random(self, e: Random) -> Value:
        seed, offset = self.emit(e.seed), self.emit(e.offset)
        text, dims = self.text(e.index, ("coord", e.index))
        return self._put(e, words.random(e.kind, seed.var, f"({offset.var} + {_as_i64(text)})"), e.free, (seed, offset, *self._of(e.index)), dims, bool(dims))

    def _emit_reduce(self, e: Reduce) -> Value:
        """A fold over held axes, where its arguments are known."""
        if set(e.over) & self.s.looped or set(e.over) & set(self.s.split):
            raise Unschedulable("a fold's result is needed in a loop that it does not reach")
        saved = dict(self.piece)
        dims = self._fold_dims(e)
        accumulators, values = {}, []
        folded = [a for a in self.held if a in e.over]
        scope = self.scope
        made: dict = {}
        for choice in self._choices(folded):
            self.piece.update(choice)
            made[self._key(dims)] = [self.emit(x) for x in e.args]
            values += made[self._key(dims)]
        self.piece.update(saved)
        scope = self._home(e.free, values)
        for choice in self._choices(folded):
            self.piece.update(choice)
            key = self._key(dims)
            accumulators[key] = tuple(self._masked(scope, v, x.dtype, e, n).var for n, (v, x) in enumerate(zip(made[key], e.args)))
        self.piece.update(saved)
        self._remember(scope, e, self._finish(scope, e, accumulators))
        return self._known(e)

    # -- scans -----------------------------------------------------------------------------------------------------------------
    def _carry_registers(self, scope: Scope, e: Scan) -> tuple:
        dims = frozenset(a for a in self.s.dims if a is not e.along and any(a in x.free for x in e.args))
        shape = self.shape(dims) if self.rank > 1 else "[]"
        return tuple(self.assign(scope, words.full(shape, words.neutral(e.monoid, e.args[0].dtype, n), x.dtype), "a") for n, x in enumerate(e.args))

    def _emit_scan(self, e: Scan) -> Value:
        scope = self.scope
        position = self.s.dims.index(e.along) if e.along in self.s.dims else None
        fold = Reduce(e.monoid, (e.along,), e.args)
        if position is None:
            return self._scan_by_step(scope, e)
        at = self.piece[e.along]
        saved = dict(self.piece)
        if e.along in self.s.looped:
            carry = self.carries[e.monoid, e.args]
            return self._scan_piece(scope, e, fold, position, carry, carry)
        carry = None
        for n in range(at + 1):
            self.piece[e.along] = n
            found = self._known(e)
            more = n + 1 < len(self.s.sizes(e.along))
            if found is None:
                after = tuple(self.fresh("a") for _ in e.args) if more else None
                found = self._scan_piece(scope, e, fold, position, carry, after)
                scope.memo[("carry", e.monoid, e.args), self._key(e.free)] = after
            carry = next(s.memo[("carry", e.monoid, e.args), self._key(e.free)] for s in self.scope.chain()
                         if (("carry", e.monoid, e.args), self._key(e.free)) in s.memo) if more else None
        self.piece.update(saved)
        return found

    def _scan_piece(self, scope: Scope, e: Scan, fold: Reduce, position: int, carry, after) -> Value:
        """The prefixes of the current piece behind `carry`; `after` receives what is carried on."""
        values = [self._masked(scope, self.emit(x), x.dtype, fold, n) for n, x in enumerate(e.args)]
        dims = frozenset().union(*(v.dims for v in values))
        made = tuple(self.fresh() for _ in e.args)
        scope.lines.append(f"{', '.join(made)} = {words.scan(e.monoid, e.args[0].dtype, tuple(v.var for v in values), position)}")
        if carry is not None:
            scope.lines += words.combine_lines(e.monoid, e.args[0].dtype, made, carry, made)
        if after is not None:
            total, _, _ = self._across(scope, fold, tuple(v.var for v in values), dims)
            scope.lines += words.combine_lines(e.monoid, e.args[0].dtype, after, carry, total) if carry is not None else \
                [f"{a} = {t}" for a, t in zip(after, total)]
        for n, m in enumerate(made):
            same = Scan(e.monoid, e.along, e.args, n, e.reverse)
            scope.memo[same, self._key(e.free)] = Value(m, dims, scope, True)
        return scope.memo[e, self._key(e.free)]

    def _scan_by_step(self, scope: Scope, e: Scan) -> Value:
        """Along a looped axis that is no dimension: the carry itself."""
        carry = self.carries[e.monoid, e.args]
        values = [self.emit(x) for x in e.args]
        scope.lines += words.combine_lines(e.monoid, e.args[0].dtype, carry, carry, tuple(v.var for v in values))
        dims = frozenset().union(*(v.dims for v in values))
        for n, c in enumerate(carry):
            var = self.assign(scope, c)
            scope.memo[Scan(e.monoid, e.along, e.args, n, e.reverse), self._key(e.free)] = Value(var, dims, scope, self.rank > 1)
        return scope.memo[e, self._key(e.free)]


def _as_i64(text: str) -> str:
    return f"({text} + tl.full((), 0, tl.int64))"


def lower_tiles(body: Body, schedule: TileSchedule, hints, device: str, choose_again) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order. `choose_again(body)` gives the schedule of a further kernel. Raises Unschedulable."""
    first: tuple = ()
    if body.base is not None:
        base = Body(tuple(sorted(body.base.axes, key=lambda a: a.id)), (body.base,), body.base.axes)
        first = lower_tiles(base, choose_again(base), hints, device, choose_again)
    made = TileLowering(body, schedule, hints, device)
    kernels = [*first, made.kernel()]
    for second in combining(body, schedule, made.spaces):
        kernels += lower_tiles(second, choose_again(second), hints, device, choose_again)
    return tuple(kernels)


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
            replaced[Reduce(e.monoid, e.over, e.args, n)] = Reduce(e.monoid, (share,), args, n) if schedule.programs > 1 else args[n]
    rewrite = Rewriter()
    rewrite.memo.update(replaced)
    groups: dict = {}
    for s in body.stores:
        if any(x in replaced for x in walk(s.expr)):
            groups.setdefault(s.axes, []).append(Store(s.memory, s.address, rewrite(s.expr), s.axes, s.monoid, s.guard))
    return [coalesce(Body((*(a for a in body.axes if a in axes), *((share,) if schedule.programs > 1 else ())), tuple(stores), axes))
            for axes, stores in groups.items()]
