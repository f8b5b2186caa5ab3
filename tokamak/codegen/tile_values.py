"""Values in tiles: addresses and expressions as Triton text, each in the outermost scope that has what it depends on."""
from __future__ import annotations

from collections.abc import Set
from functools import cached_property
from itertools import takewhile

from ..ir.dtype import BOOL, F32, I64
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Scalar, walk
from ..ir.index import Axis, Fetch, Index, as_index
from ..ir.ops import can_fail
from ..ir.substitution import substitute
from ..schedule.body import Body, exprs_of, indices_of, Memory
from ..schedule.tile_schedule import TileSchedule
from . import tile_words as words
from .scope import Named, all_atoms
from .tile_coordinates import TileCoordinates
from .tile_kernel import Scope, Value


class TileValues(TileCoordinates):
    """Indices that gather, and expressions, of one kernel."""

    def __init__(self, body: Body, schedule: TileSchedule, hints, device: str, stores=None, fast: bool = False):
        super().__init__(body, schedule, hints)
        self.device, self.relaxed = device, fast
        self.fast = fast and rounded(body)
        self.stores = list(body.stores if stores is None else stores)
        self.spaces: dict = {}
        self.rereading = False               # are held rows read for a second time?
        self.staying = False                 # does what is read now stay in the cache for the next kernel?
        self.fills = _fills(self.stores)     # Load -> what idle lanes of it hold
        self.filled: dict[str, float] = {}   # register -> what its idle lanes hold
        self.lanes: dict[int, str] = {}      # of a shifted axis: piece -> its whole words' lanes
        self.ends = ""                       # and the lanes before and behind them

    # -- indices ---------------------------------------------------------------------------------------------------------------
    def text(self, i: Index, key) -> tuple[str, frozenset]:
        """(text, tiled axes) of an index: plain integers stand first, so that tiles are offsets from one address."""
        shift = self.s.shift
        if shift is not None and self.piece[shift.axis] in self.lanes and i.coefficient(shift.axis) == 1 and i.without(shift.axis) is shift.origin:
            return f"{self._first_word()} + {self.lanes[self.piece[shift.axis]]}", self._shifted_dims()
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

    def _first_word(self) -> str:
        """Where the whole words of the row begin: an offset that is a multiple of the group."""
        shift = self.s.shift
        found = next((s.memo["first word"] for s in self.scope.chain() if "first word" in s.memo), None)
        if found is None:
            scope = self._home(frozenset(shift.origin.axes()))
            origin, _ = self.text(shift.origin, ("origin",))
            group = [shift.group] * self.rank if len(self._shifted_dims()) > 1 else shift.group
            found = scope.memo["first word"] = self.assign(scope, f"tl.multiple_of({origin} + {self.words_from}, {group})", "w")
        return found

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

    def _has(self, e: Expr) -> bool:
        """Is `e` in a register, for the pieces as they are chosen? (A subclass's `_known` may compute something.)"""
        return TileValues._known(self, e) is not None

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
        if empty(e.node):
            return self._put(e, words.full("[]", 0, e.dtype), (), block=False)
        memory = self.memory(e.node)
        target = f"{memory} + {address}" if address != "0" else memory
        block = bool(whole) or bool(guard and guard.block)
        if block and dims != whole or block and not dims:
            target = f"{memory} + ({address} + tl.zeros({self.shape(whole)}, tl.int32))"
        full = frozenset(self.s.dims) if self.s.abreast and whole and not whole & set(self.s.split) or self._beside_rows(whole) else None
        if full is not None and not self._folded_apart(e, full):        # as the rows lie in threads that it meets: Triton lays a row out otherwise
            target = f"{memory} + ({address} + tl.zeros({self.shape(full)}, tl.int32))"
        else:
            full = None
        text = f"tl.load({target}"
        if masks:
            text += f", mask={' & '.join(masks)}"
            if guard is not None:
                text += f", other={words.literal(e.other.value, e.other.dtype)}"
            elif e in self.fills:
                text += f", other={words.plain(self.fills[e])}"
        if block and self.s.once and not self.staying and e.index[0].axes() >= self.body_.parallel and not values:
            text += words.LEAVES_FIRST
        axes = e.index[0].axes() | whole
        if self.s.reread and whole & set(self.held):
            text += ", cache_modifier='.ca'" if self.rereading else ""
            axes |= frozenset(self.s.split)
        loaded = self._put(e, text + ")", axes, values, whole if full is None else full, block)
        if masks and guard is None and e in self.fills:
            self.filled[loaded.var] = self.fills[e]
        return loaded

    def _folded_apart(self, e: Load, full: frozenset) -> bool:
        """Does a fold read `e` that is the same along some axis of `full`?"""
        return any(isinstance(f, Reduce) and not full <= self._fold_dims(f) and e in set(walk(*f.args)) for f in walk(*exprs_of(self.body_)))

    def _beside_rows(self, dims) -> bool:
        """Does what has those dimensions lie along the held rows, in several pieces, of which a tile has several? bf16 RMSNorm of 60000 rows of 192
        13.1 us, 13.6, LayerNorm of 16384 of 144 5.6, 6.4; but LayerNorm of 65536 of 128, one piece, 11.0, 10.4. Not down columns that are only
        folded, of which a thread has several beside each other: sums of LayerNorm's backward of 55 x 78961 bf16 31.5 us, 15.6; but RMSNorm along the
        middle of 1154 x 40 x 1337 f32 216, 240."""
        s = self.s
        plain = not s.split and not s.looped and s.staged is None and s.shift is None and not s.flat
        along = plain and len(s.dims) == 2 and bool(dims) and dims == set(s.dims) - self.body_.parallel
        along = along and (s.dims[-1] in dims or any(x.axes & dims for x in self.body_.stores))
        return along and all(len(s.sizes(a)) > 1 for a in dims)

    def _forget(self) -> None:
        """What this scope knows of held rows is read and computed again where it is needed again: a load that differs from the first is a load."""
        self.rereading = True
        gone = [k for k, v in self.scope.memo.items() if not isinstance(k[0], Reduce) and isinstance(v, Value) and v.dims & set(self.held)]
        for k in gone:
            del self.scope.memo[k]

    def _emit_op(self, e: Op) -> Value:
        if e.name == "eq" and not self.s.wide and any(isinstance(a, Coord) for a in e.args):
            found = self._emit_place(e, *(e.args if isinstance(e.args[0], Coord) else e.args[::-1]))
            if found is not None:
                return found
        if e.name in _COMPARED and all(isinstance(a, Coord) or _short(a) for a in e.args) and any(isinstance(a, Coord) for a in e.args):
            return self._emit_compared(e)
        values = [self.emit(a) for a in e.args]
        d = e.args[-1].dtype
        texts = tuple(v.var for v in values)
        if can_fail(e.name, d):
            dims = frozenset().union(*(v.dims for v in values))
            scope = self._home(e.free | dims, values)
            self._fail(scope, " & ".join([*self.mask(dims), f"({texts[1]} == 0)"]), "division", e)
            return self._put(e, words.op(e.name, d, texts), e.free | dims, values)
        if e.name == "div" and d is F32 and (values[1].dims < values[0].dims or _before_loop(*values)):
            return self._emit_shared_division(e, *values)
        return self._put(e, words.op(e.name, d, texts, fast=self.fast or e in self.terms), (), values)

    @cached_property
    def terms(self) -> Set[Expr]:
        """Where the policy is `fast`, divisions that nothing but f32 sums is made of: by a reciprocal a term is off by one unit in the last place
        more, as each step of the sum makes it. H200, the loss of cosines of 12878 x 870 bf16 19.5 us, 26.0 with quotients that are rounded once,
        cosine similarity of 256 x 57352 f16 44.5, 55.6, a Python LayerNorm's gradient of 16384 x 4096 f32 202, 233."""
        return terms(self.body_) if self.relaxed and not self.fast else frozenset()

    def _emit_place(self, e: Op, at: Coord, x: Expr) -> Value | None:
        """Whether `x`, an i64 that many elements share, is the coordinate `at`: in 32 bits, where an `x` that these do not hold is no coordinate."""
        text, dims = self.text(at.index, ("coord", at.index))
        shared = self.emit(x)
        if dims <= shared.dims or x.dtype is not I64:
            return None
        key = ("place", shared.var)
        short = f"{shared.var}.to(tl.int32)"
        place = self._known(key) or self._put(key, f"tl.where({short} == {shared.var}, {short}, -2**31)", (), (shared,))
        return self._put(e, f"({text} == {place.var})", at.free, (shared, place, *self._of(at.index)), dims | shared.dims, True)

    def _emit_compared(self, e: Op) -> Value:
        """Comparison of coordinates with each other or with a number: as indices, whose factors say what they are multiples of, so that what the
        comparison guards is read in words that lie on one side of it. Rotary positions of 138176 rows of 4 x 72 bf16 (`cat` of two halves of 36)
        are read by eight bytes, else by two."""
        indices = [a.index if isinstance(a, Coord) else as_index(a.value) for a in e.args]
        texts, dims = zip(*(self.text(i, ("coord", i)) for i in indices))
        values = [v for i in indices for v in self._of(i)]
        whole = frozenset().union(*dims)
        return self._put(e, f"({texts[0]} {_COMPARED[e.name]} {texts[1]})", e.free, values, whole, bool(whole))

    def _emit_shared_division(self, e: Op, a: Value, b: Value) -> Value:
        """a / b by a reciprocal that many elements share: rounded once, by what the product leaves over, or as the product is. Divisors whose
        reciprocal is no number are taken nearer to 1 first, and the quotients back."""
        near, scaled, inverse = self._inverse(e, b)
        if self._loose(e):
            return self._put(e, f"{a.var} * {inverse.var} * {near.var}", (), (a, inverse, near))
        return self._put(e, f"tk.quotient({a.var}, {scaled.var}, {inverse.var}, {near.var})", (), (a, scaled, inverse, near))

    def _loose(self, division: Op) -> bool:
        return self.fast or division in self.terms

    def _inverse(self, division: Op, b: Value) -> tuple[Value, Value, Value]:
        """How near to 1 the divisor `b` is taken, the divisor so taken, the reciprocal of that."""
        loose = self._loose(division)
        near, inverse, one = ("near", "inverse", "1.0 / {}") if loose else ("within", "rounded inverse", words.op("div", F32, ("1.0", "{}")))
        put = lambda name, text, *of: self._known((name, b.var)) or self._put((name, b.var), text, (), of)
        taken = put(near, f"tk.{near}({b.var})", b)
        scaled = put(f"scaled, {near}", f"{b.var} * {taken.var}", b, taken)
        return taken, scaled, put(inverse, one.format(scaled.var), scaled)

    def _emit_cast(self, e: Cast) -> Value:
        arg = self.emit(e.arg)
        made = self._put(e, words.cast(e.dtype, e.arg.dtype, arg.var), (), (arg,))
        if arg.var in self.filled and _widens(e):
            self.filled[made.var] = self.filled[arg.var]
        return made

    def _emit_random(self, e: Random) -> Value:
        seed, offset = self.emit(e.seed), self.emit(e.offset)
        along = self._in_fours(e) if e.kind == "uniform" else None
        if along is not None:
            return self._emit_fours(e, along, seed, offset)
        text, dims = self.text(e.index, ("coord", e.index))
        number = words.random(e.kind, seed.var, f"({offset.var} + {_as_i64(text)})")
        return self._put(e, number, e.free, (seed, offset, *self._of(e.index)), dims, bool(dims))

    def _in_fours(self, e: Random) -> Axis | None:
        """The tiled axis along which the numbers stand in runs of four, each from a multiple of 4 on, whatever the sizes are; or None."""
        for a in self.s.dims if isinstance(e.offset, Const) else ():
            rest = e.index - as_index(a)
            if (a, self.piece[a]) in self.fours and a not in rest.axes() and all(v % 4 == 0 for v in rest.terms.values()):
                return a
        return None

    def _emit_fours(self, e: Random, a: Axis, seed: Value, offset: Value) -> Value:
        """Uniform numbers, four along `a` a call of Philox."""
        at = a, self.piece[a]
        lane, mask = self.coords[at]
        first = self._known(("fours", at))
        if first is None:
            base, size = self.fours[at], self.s.sizes(a)[at[1]]
            text = self._placed(f"tl.arange(0, {size // 4})", a) + " * 4"
            var = self.assign(lane.scope, f"{base} + {text}" if base else text, "i")
            first = lane.scope.memo[("fours", at), ()] = Value(var, lane.dims, lane.scope, True)
        self.coords[at] = first, mask
        text, dims = self.text(e.index, ("coord", e.index))
        self.coords[at] = lane, mask
        numbers = words.uniform_run(seed.var, f"({offset.var} + {_as_i64(text)})", self.s.dims.index(a), self.rank)
        return self._put(e, numbers, e.free, (seed, offset, *self._of(e.index)), dims, True)


_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _short(e: Expr) -> bool:
    """Is `e` an integer that 32 bits hold?"""
    return isinstance(e, Const) and e.dtype is I64 and -1 << 31 <= e.value < 1 << 31


def _widens(e: Expr) -> bool:
    """Is `e` a cast that keeps 0 and infinities?"""
    return isinstance(e, Cast) and e.dtype.is_float and e.arg.dtype.is_float and e.dtype.bytes >= e.arg.dtype.bytes


def _fills(stores) -> dict[Load, float]:
    """For loads of floats that folds take as they are: the element that changes nothing in any of these folds."""
    wanted: dict[Load, set[float]] = {}
    for e in walk(*(s.expr for s in stores)):
        x = e.args[0] if isinstance(e, Reduce) else None
        while x is not None and _widens(x):
            x = x.arg
        if isinstance(x, Load) and x.guard is None and x.dtype.is_float:
            wanted.setdefault(x, set()).add(float(words.neutral(e.monoid, e.args[0].dtype, 0)))
    return {x: fill for x, (fill, *others) in wanted.items() if not others}


def rounded(body: Body) -> bool:
    """Is every floating result along the body's longest stores rounded to 16 bits, or what is made of it? What is folded away on the way may be
    stored as it is."""
    most = max((len(s.axes) for s in body.stores), default=0)
    rounds = lambda s: s.memory.dtype.is_half or s.memory.rounds
    return all(rounds(s) for s in body.stores if s.memory.dtype.is_float and len(s.axes) == most) and any(map(rounds, body.stores))


def _before_loop(a: Value, b: Value) -> bool:
    """Is `b` known before a loop begins in which `a` is another in every turn, of the same elements?"""
    inside = takewhile(lambda s: s is not b.scope, a.scope.chain())
    return b.dims == a.dims and any(s.parent is not None and s.lines is not s.parent.lines and s.open != s.parent.open for s in inside)


def terms(body: Body) -> Set[Expr]:
    """Divisions of f32 of which nothing but sums of f32 is made, by operations that make nothing of a last bit that was none before. Not those of
    folds: the mean of equal values is that value, from which none differs."""
    roots = exprs_of(body)
    divisions = [e for e in walk(*roots) if isinstance(e, Op) and e.name == "div" and e.dtype is F32 and not isinstance(e.args[0], Reduce)]
    if not divisions:
        return frozenset()
    whole = dict.fromkeys((*roots, *(x.expr for i in indices_of(body) for x in i.atoms() if isinstance(x, Fetch))))
    readers: dict[Expr, list[Expr]] = {}
    summed: set[Expr] = set()
    for e in reversed(walk(*whole)):
        if e not in whole and all(_sums(r) or r in summed and _keeps(r, e) for r in readers[e]):
            summed.add(e)
        for x in e.children():
            readers.setdefault(x, []).append(e)
    return summed.intersection(divisions)


def _sums(e: Expr) -> bool:
    return isinstance(e, Reduce) and e.monoid == "sum" and e.dtype is F32


def _keeps(e: Expr, x: Expr) -> bool:
    """Is `e`, an operation of `x`, off by about as much as `x` is?"""
    if not isinstance(e, Op) or e.dtype is not F32:
        return False
    return e.name in ("add", "sub", "mul", "neg", "abs") or e.name == "div" and x is not e.args[1] or e.name == "where" and x is not e.args[0]


def empty(m: Memory) -> bool:
    """Is there no element to read or write? Every index into it is reported, and nothing is touched."""
    return any(s.constant == 0 for s in m.node.shape)


def _as_i64(text: str) -> str:
    return f"({text} + tl.full((), 0, tl.int64))"
