"""A group as what its kernel must do: stores of expressions, over as few axes as possible, with every access a flat address.

    Body  ::= Store in order
    Store ::= memory[address] = expr           for all coordinates of its axes (a Scatter: combined in by a monoid)

Reads of the group's own members are replaced by their expressions (hash-consed, so nothing is written twice); what is stored is read as stored:
its 16-bit rounding is no longer implicit. Axes that all accesses walk through in step are merged (`coalesce`).
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from ..errors import InternalError
from ..fuse.axes import Group, Member
from ..ir.dtype import DType
from ..ir.expr import Cast, Coord, Expr, Load, Random, Reduce, Rewriter, Scan, walk
from ..ir.graph import Scatter
from ..ir.index import Axis, Fetch, Index, as_index, dot
from ..ir.normal import floordiv, mod
from ..ir.rewrite import Simplifier
from ..ir.expr import Const, Op
from ..ir.dtype import F32

LAST = 2 ** 63 - 1      # behind every place


@dataclass(frozen=True, eq=False)
class Memory:
    """The flat memory of a node: element 0 is the node's first element. Loads in a Body read these. `rounds`: what is made of it is rounded to 16
    bits (`fuse.cost.rounded_sums`)."""
    node: object
    dtype: DType
    shape: tuple = (as_index(1),)
    strides: tuple = (as_index(1),)
    rounds: bool = False


@dataclass(frozen=True, eq=False)
class Store:
    """`memory[address] = expr`; with `monoid` it is an update in place, done in order, where `guard` holds."""
    memory: Memory
    address: Index
    expr: Expr
    axes: frozenset[Axis]
    monoid: str | None = None
    guard: Expr | None = None
    bounds: tuple = ()


@dataclass(frozen=True, eq=False)
class Body:
    """`axes` in loop order, outermost first. `base`: for a scatter, the Store that fills the result first."""
    axes: tuple[Axis, ...]
    stores: tuple[Store, ...]
    parallel: frozenset[Axis]
    base: Store | None = None


def body(group: Group, stored: tuple, parallel: frozenset, memories: dict) -> Body:
    """The Body of `group`; `memories` keeps one Memory a node over the whole plan."""
    made: dict = {}

    def memory(node) -> Memory:
        found = memories.get(node)
        if found is None:
            found = memories[node] = Memory(node, node.dtype)
        return found

    def leaf(e: Expr):
        if isinstance(e, Load) and not isinstance(e.node, Memory):
            inner = made.get(e.node)
            if inner is None:
                return Load(memory(e.node), (flat(e.index, e.node.strides),), e.guard, e.other)
            member, expr = inner
            if member.dims != e.index:
                raise InternalError("a member is read at other coordinates than it is made at")
            if e.guard is None:
                return expr
            if expr.dtype.is_half:
                return Cast(expr.dtype, Op("where", e.guard, Cast(F32, expr), Const(e.other.value, F32)))
            return Op("where", e.guard, expr, e.other)
        return None
    rewrite, simplify = Rewriter(leaf=leaf), Simplifier()
    out: list[Store] = []
    base = None
    for m in group.members:
        expr = simplify.root(rewrite(m.expr))
        keep = m.node in stored
        if keep and isinstance(expr, Cast) and expr.implicit:
            expr = Cast(expr.dtype, expr.arg)
        made[m.node] = (m, expr)
        if isinstance(m.node, Scatter):
            base = None if memory(m.node).node is m.node.base else _scatter_base(m, memory)        # in place: what is there already
            out.append(Store(memory(m.node), flat(tuple(rewrite.index(i) for i in m.index), m.node.strides), expr, m.free, m.node.monoid,
                             rewrite(m.guard) if m.guard is not None else None))
        elif keep:
            out.append(Store(memory(m.node), flat(m.dims, m.node.strides), expr, m.free))
    return _forward_scans(Body(group.axes, tuple(out), parallel, base))


def flat(index: tuple[Index, ...], strides: tuple[Index, ...]) -> Index:
    """The element offset of `index`."""
    return dot(index, strides)


def _scatter_base(m: Member, memory) -> Store:
    """The store that fills a scatter's result with its base: a phase of its own, over all of the result and so over axes of its own."""
    node = m.node
    fresh = count(max((a.id for a in m.free), default=0) + 100000)
    dims = tuple(as_index(Axis(next(fresh), s)) if s != 1 else as_index(0) for s in node.shape)
    value = node.base if isinstance(node.base, Expr) else Load(memory(node.base), (flat(dims, node.base.strides),))
    axes = tuple(a for d in dims for a in d.axes())
    return coalesce(Body(axes, (Store(memory(node), flat(dims, node.strides), value, frozenset(axes)),), frozenset(axes))).stores[0]


def exprs_of(b: Body) -> list[Expr]:
    roots = [s.expr for s in b.stores] + [s.guard for s in b.stores if s.guard is not None]
    return roots + ([b.base.expr] if b.base is not None else [])


def indices_of(b: Body) -> list[Index]:
    """Every index in the body: addresses of loads and stores, coordinates, gathers' bounds."""
    found = [s.address for s in b.stores] + ([b.base.address] if b.base is not None else [])
    for e in walk(*exprs_of(b), *(x.expr for i in list(found) for x in i.atoms() if isinstance(x, Fetch))):
        if isinstance(e, Load):
            found.extend(e.index)
        elif isinstance(e, (Coord, Random)):
            found.append(e.index)
    return list(dict.fromkeys(found))


def rewritten(b: Body, mapping: dict[Axis, Index], axes, parallel, rw: Rewriter | None = None) -> Body:
    """`b` with axes replaced in every index and expression, by `rw` where that is given."""
    rw = rw or Rewriter(mapping)

    def store(s: Store) -> Store:
        kept = frozenset(x for a in s.axes for x in (as_index(mapping[a]).axes() if a in mapping else (a,)))
        return Store(s.memory, rw.index(s.address), rw(s.expr), kept, s.monoid, rw(s.guard) if s.guard is not None else None)
    return Body(tuple(axes), tuple(store(s) for s in b.stores), frozenset(parallel), store(b.base) if b.base is not None else None)


def renamed(b: Body, rename: Rewriter, names: dict) -> Body:
    """`b` with other memories in the place of those that `names` has; `rename` does the same to expressions."""
    def store(s: Store) -> Store:
        return Store(names.get(s.memory, s.memory), s.address, rename(s.expr), s.axes, s.monoid,
                     rename(s.guard) if s.guard is not None else None, s.bounds)
    return Body(b.axes, tuple(store(s) for s in b.stores), b.parallel, store(b.base) if b.base is not None else None)


def _forward_scans(b: Body) -> Body:
    """Turns the axes of reverse scans around, so that every scan runs forward."""
    scans = [e for e in walk(*exprs_of(b)) if isinstance(e, Scan)]
    turned = {e.along for e in scans if e.reverse}
    if not turned:
        return b
    if any(e.along in turned and not e.reverse for e in scans):
        raise InternalError("a forward and a reverse scan along one axis in one kernel")
    fresh = count(max(a.id for a in b.axes) + 200000)
    new = {a: Axis(next(fresh), a.extent) for a in turned}
    turn = _Turn(new)
    return rewritten(b, turn.mapping, [new.get(a, a) for a in b.axes], {new.get(a, a) for a in b.parallel}, turn)


class _Turn(Rewriter):
    """Counts axes from their ends, those that folds and scans bind, too: the scans among them then run the other way."""

    def __init__(self, new: dict[Axis, Axis]):
        super().__init__({a: a.extent - 1 - as_index(x) for a, x in new.items()})
        self.new = new

    def __call__(self, e: Expr) -> Expr:
        bound = (e.along,) if isinstance(e, Scan) else e.over if isinstance(e, Reduce) else ()
        if e in self.memo or not any(a in self.new for a in bound):
            return super().__call__(e)
        over, args = tuple(self.new.get(a, a) for a in bound), tuple(map(self, e.args))
        made = Reduce(e.monoid, over, args, e.component) if isinstance(e, Reduce) else Scan(e.monoid, *over, args, e.component, not e.reverse)
        self.memo[e] = made
        return made


def shared_extremes(b: Body) -> Body:
    """`b` with a maximum (minimum) that an argmax (argmin) of the same values finds too taken from that."""
    pairs = [e for e in walk(*exprs_of(b)) if isinstance(e, Reduce) and e.monoid in ("argmax", "argmin")]
    same = {Reduce(e.monoid[3:], e.over, e.args[:1]): Reduce(e.monoid, e.over, e.args, 0) for e in pairs}
    if not same:
        return b
    rewrite = Rewriter(leaf=same.get)
    return Body(b.axes, tuple(Store(s.memory, s.address, rewrite(s.expr), s.axes, s.monoid, s.guard) for s in b.stores), b.parallel, b.base)


SOUGHT = 64             # elements of a row from which on its extreme is found first, and then its place, in a second loop over what is in a cache by
                        # now. The largest of rows in ms on one core (AVX-512), both at once / one after the other: 60000 of 64 7.9 / 6.8, 16000 of
                        # 300 5.5 / 2.7, 4096 of 1000 4.0 / 1.3, 512 of 32000 13.8 / 3.5, in bf16 13.5 / 3.3


def sought_places(b: Body, hints, target) -> Body:
    """`b` with the place of a row's maximum (minimum) as the least place that has it: each step of a fold that carries both waits for the one before.
    What holds a NaN has none as its extreme, which equals nothing, and its place is that of the first NaN."""
    made: dict = {}
    for e in walk(*exprs_of(b)):
        if isinstance(e, Reduce) and e.monoid in ("argmax", "argmin") and not b.parallel & set(e.over) and _in_cache(e, hints, target):
            value, place = e.args
            extreme = Reduce(e.monoid[3:], e.over, (value,))
            found = Op("eq", value, extreme)
            if value.dtype.is_float:
                found = Op("or", found, Op("isnan", value))
            made[e] = (extreme, Reduce("min", e.over, (Op("where", found, place, Const(LAST, place.dtype)),)))[e.component]
    if not made:
        return b
    rewrite = Rewriter(leaf=made.get)
    return Body(b.axes, tuple(Store(s.memory, s.address, rewrite(s.expr), s.axes, s.monoid, s.guard) for s in b.stores), b.parallel, b.base)


def _in_cache(e: Reduce, hints, target) -> bool:
    """Does a fold run along long contiguous rows of one memory, of which two loops read one from a cache?"""
    value = e.args[0].arg if isinstance(e.args[0], Cast) else e.args[0]
    row = len(e.over) == 1 and isinstance(value, Load) and value.guard is None and value.index[0].coefficient(e.over[0]) == 1
    return row and SOUGHT <= hints(e.over[0].extent) <= target.l2 // (4 * value.dtype.bytes)


def unfolded(b: Body) -> Body:
    """`b` with the axes along which nothing is folded any more, and nothing done in order, parallel: simplifying may leave one term of a sum."""
    if b.base is not None or any(s.monoid is not None for s in b.stores):
        return b
    exprs = exprs_of(b)
    written = {s.memory for s in b.stores}
    if any(isinstance(e, Scan) or isinstance(e, Load) and e.node in written for e in walk(*exprs)):
        return b
    bound = frozenset(a for e in walk(*exprs) if isinstance(e, Reduce) for a in e.over)
    free = frozenset(a for a in b.axes if a not in b.parallel and a not in bound and all(a in s.axes for s in b.stores))
    return coalesce(Body(b.axes, b.stores, b.parallel | free)) if free else b


# -- merging axes --------------------------------------------------------------------------------------------------------
def coalesce(b: Body) -> Body:
    """Merges pairs of axes (a, b) wherever every index that uses them walks a in steps of b's whole extent."""
    fresh = count(max((a.id for a in b.axes), default=0) + 1)
    again = True
    while again:
        again = False
        for hi in b.axes:
            for lo in b.axes:
                if hi is not lo and _merges(b, hi, lo):
                    new = Axis(next(fresh), hi.extent * lo.extent)
                    axes = [new if a is lo else a for a in b.axes if a is not hi]
                    parallel = {new if a is lo else a for a in b.parallel if a is not hi}
                    b = rewritten(b, {lo: as_index(new), hi: as_index(0)}, axes, parallel)
                    again = True
                    break
            if again:
                break
    return b


SHORT = 64              # elements of a piece of a line that is no whole words, from which on it is read by itself
DIVIDED = 4             # divisions by a row's values, from which on rows of
DIVIDED_ROW = 1024      # so many elements are rows to a tile, which has the reciprocals: gradients of the loss of cosines of 214 x 202260 f16, six,
                        # 92.5 us, 179 as one; but weight norm of 242 x 281341 f16, one, 81, 62, logsumexp's gradient of 391 x 19393 f32 20.0, 16.8
                        # (H200)
RUN = 1 << 31           # elements of such rows, one behind the other, below which they are one where nothing is folded: bias and GELU, H100, of
                        # 584909 x 31 f32 50.5 us, 74.1 row by row, of 60018 x 159 bf16 15.4, 19.1, of 6047 x 4095 35.4, 41.6, of 135 x 44415 10.4,
                        # 12.6


def divided_by_rows(b: Body, line: Axis) -> bool:
    """Do `b`'s elements along `line` divide by many values that each row along it has one of, in rows long enough to be tiles?"""
    elements = {e for e in walk(*exprs_of(b)) if isinstance(e, Op) and e.name == "div" and e.dtype is F32 and line in e.free}
    return line.extent.constant is not None and line.extent.constant >= DIVIDED_ROW and sum(line not in e.args[1].free for e in elements) >= DIVIDED


def whole_words(b: Body) -> Body:
    """`b` with pairs of parallel axes (hi, lo) as one where all that runs along the inner one, which is no whole number of words, runs along both in
    step, and the rest along the outer one: a group's statistics, beside the channels of ten a group, are found at channel // 10. Where nothing is
    folded, the rest may run along the inner one, too: a bias beside rows of 31 is found at element % 31."""
    fresh = count(max((a.id for a in b.axes), default=0) + 1)
    folded = b.base is not None or any(isinstance(e, (Reduce, Scan)) for e in walk(*exprs_of(b))) or any(s.monoid is not None for s in b.stores)
    word = 8 if folded else 16 // min((s.memory.dtype.bytes for s in b.stores), default=1)
    for lo in b.axes:
        for hi in b.axes:
            n, both = lo.extent.constant, (hi.extent * lo.extent).constant
            if n is None or (n >= SHORT if folded else both is not None and both >= RUN):
                continue
            if hi is not lo and {hi, lo} <= b.parallel and n % word and _in_step(b, hi, lo, not folded) and (folded or not divided_by_rows(b, lo)):
                new = Axis(next(fresh), hi.extent * lo.extent)
                mapping = {hi: floordiv(as_index(new), lo.extent), lo: mod(as_index(new), lo.extent)}
                axes = [new if a is lo else a for a in b.axes if a is not hi]
                return whole_words(rewritten(b, mapping, axes, {new if a is lo else a for a in b.parallel if a is not hi}))
    return b


def _in_step(b: Body, hi: Axis, lo: Axis, alone: bool) -> bool:
    """Is every index that uses `hi` or `lo` one of both, in steps of lo's whole extent, or of `hi` alone, or where `alone` says so of `lo`? At least
    one is of both, and contiguous, and so is what is stored."""
    if any((hi in s.axes) != (lo in s.axes) for s in (*b.stores, *((b.base,) if b.base else ()))):
        return False
    for e in walk(*exprs_of(b)):
        if isinstance(e, Reduce) and {hi, lo} & set(e.over) or isinstance(e, Scan) and e.along in (hi, lo):
            return False
    along = False
    for i in indices_of(b):
        linear = {a for a in i.atoms() if isinstance(a, Axis)}
        if not {hi, lo} & i.axes():
            continue
        if {hi, lo} & i.axes() - linear:
            return False
        if lo in linear and i.coefficient(hi) is not i.coefficient(lo) * lo.extent and not (alone and hi not in linear):
            return False
        along = along or {hi, lo} <= linear and i.coefficient(lo) == 1
    return along and (not alone or all(s.address.coefficient(lo) == 1 for s in b.stores))


def _merges(b: Body, hi: Axis, lo: Axis) -> bool:
    if (hi in b.parallel) != (lo in b.parallel):
        return False
    if any((hi in s.axes) != (lo in s.axes) for s in (*b.stores, *((b.base,) if b.base else ()))):
        return False
    for e in walk(*exprs_of(b)):
        if isinstance(e, Reduce) and (hi in e.over) != (lo in e.over):
            return False
        if isinstance(e, Scan) and e.along in (hi, lo):
            return False
    for i in indices_of(b):
        used = i.axes()
        if hi in used or lo in used:
            linear = {a for a in i.atoms() if isinstance(a, Axis)}
            nested = {x for a in i.atoms() if not isinstance(a, Axis) for x in Index({(a,): 1}).axes()}
            if hi in nested or lo in nested or not (linear & {hi, lo}):
                return False
            if i.coefficient(hi) is not i.coefficient(lo) * lo.extent:
                return False
    return True
