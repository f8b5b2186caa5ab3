"""Pointwise producers move into their readers by index substitution.

    reader: ... Load(p, index, guard, other) ...   p: expr   =>   where(guard, expr[axes := index], other)

The domains may differ (pad, cat, roll, stencils). A producer moves when that cannot cost: it is cheap and reads no more than it would be read
as, or it has one reader that uses each element once. Everything else stays a node, and the planner may still put it in its readers' kernel.
Prefixes whose one reader runs along them from the other end (cumsum's gradient is turned, summed and turned back) are made from that end.
"""
from __future__ import annotations

from ..ir.dtype import F32
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Rewriter, Scan, _fetches, walk, loads
from ..ir.graph import Compute, Graph, Input, Opaque, Result, Scatter, View, Write, is_pointwise, topological, with_value
from ..ir.index import Axis, FloorDiv, Mod, as_index
from ..ir.ops import OPS, can_fail
from ..ir.ranges import below
from ..ir.rewrite import Simplifier
from ..ir.rules import picked
from .axes import fold_of
from .contraction import contraction, multiplied, of_vector
from .cost import estimates, is_heavy, pinned_nodes, weight

SMALL = 4           # operations below which computing again is cheaper than any memory traffic
GROWN = 160         # operations to which an inlined expression may grow
IN_FRONT = 8        # operations an element of a vector that every program of its product with a matrix may compute again


def inline(graph: Graph, target, moves: frozenset = frozenset()) -> Graph:
    """`graph` with producers moved into their readers; nodes that nobody reads any more are gone. `moves`: pairs (producer, reader) that the planner
    found cheaper computed again, whatever else reads the producer."""
    return _Inliner(graph, target, moves).run()


class _Inliner:
    def __init__(self, graph: Graph, target, moves: frozenset):
        self.exprs: dict = {}               # producer of a move -> its expression over its own axes
        self.graph = graph
        self.simplify = Simplifier()
        self.hints = estimates(graph, target)
        self.pinned = pinned_nodes(graph)
        self.products = {n for n in graph.nodes if isinstance(n, Compute) and _is_product(n, multiplied)}
        self.vectors = {n for n in graph.nodes if isinstance(n, Compute) and _is_product(n, of_vector)} if target.kind == "gpu" else frozenset()
        self.uses: dict = {}
        for n in graph.nodes:
            for e in _loads_of(n):
                self.uses.setdefault(e.node, []).append((n, e))
        self.moves = moves | {(e.node, n) for n in graph.nodes if (e := _picking(n)) is not None}
        self.turned = {n: dims for n in graph.nodes if (dims := self._turned(n))}
        self.laid = target.kind == "cpu" and not target.ordered
        self.new: dict = {}                 # node -> its replacement; or its expression when it moves into its readers
        self.origins: dict = {}

    def run(self) -> Graph:
        g = self.graph
        for n in g.nodes:
            self.new[n] = self._rebuild(n)
        fix = self._view
        outputs = tuple(fix(o) if isinstance(o, View) else o for o in g.outputs)
        writes = tuple(Write(w.target, fix(w.source)) for w in g.writes)
        roots = [n for n in self.new.values() if isinstance(n, Opaque)]
        roots += [o.node for o in outputs if isinstance(o, View)] + [w.source.node for w in writes]
        needed = set(topological(roots))
        nodes = [n for n in dict.fromkeys(x for x in self.new.values() if not isinstance(x, Expr)) if n in needed or isinstance(n, Input)]
        origins: dict = {}
        for n in g.nodes:
            made = self.new[n]
            if not isinstance(made, Expr):
                origins[made] = tuple(dict.fromkeys((*origins.get(made, ()), *g.origins.get(n, ()), *self.origins.get(n, ()))))
        return Graph(g.inputs, tuple(nodes), outputs, writes, origins, g.sizes, g.hints, g.name, g.classes)

    def _view(self, v: View) -> View:
        return View(self.new[v.node], v.shape, v.strides, v.offset)

    def _rebuild(self, n):
        if isinstance(n, Compute):
            expr = self.simplify.root(self._rewriter(n)(n.expr) if self._reads_changed(n) else n.expr)
            if n in self.turned:
                expr = self.simplify.root(_from_the_end(n, expr, self.turned[n]))
            self.exprs[n] = expr
            if n not in self.pinned and is_pointwise(n) and self._moves(n, expr):
                return expr
            strides = as_read(n, self.uses.get(n, ()), self.hints) if self.laid and n not in self.pinned else n.strides
            return Compute(n.shape, strides, expr, n.device, n.tag)
        if isinstance(n, Scatter):
            rw = self._rewriter(n)
            base = n.base if isinstance(n.base, Expr) else self.new[n.base]
            return Scatter(base, n.shape, n.strides, n.domain, tuple(rw.index(i) for i in n.index), self.simplify.root(rw(n.value)), n.monoid,
                           rw(n.guard) if n.guard is not None else None, n.device)
        if isinstance(n, Opaque):
            fix = lambda x: _map(x, lambda v: self._view(v) if isinstance(v, View) else v)
            return Opaque(n.target, fix(n.args), fix(n.kwargs), n.results, n.single, n.reason, tuple(dict.fromkeys(self.new[r] for r in n.reads)),
                          self._rewriter(n)(n.meaning) if n.meaning is not None else None)
        if isinstance(n, Result):
            return Result(self.new[n.opaque], n.position, n.shape, n.strides, n.dtype, n.device)
        return n

    def _reads_changed(self, n: Compute) -> bool:
        """Does `n` read what has moved, or has another node in its place?"""
        return any(self.new[e.node] is not e.node or (e.node, n) in self.moves for e in loads(n.expr))

    def _rewriter(self, reader) -> Rewriter:
        def leaf(e: Expr):
            if isinstance(e, Load):
                made = self.exprs[e.node] if (e.node, reader) in self.moves else self.new[e.node]
                if isinstance(made, Expr):
                    self.origins.setdefault(reader, []).extend(self.graph.origins.get(e.node, ()))
                    self.origins[reader].extend(self.origins.get(e.node, ()))
                    return substituted(e, e.node.axes, made)
                dims = self.turned.get(e.node, ())
                index = tuple(size - 1 - i if d in dims else i for d, (i, size) in enumerate(zip(e.index, e.node.shape)))
                return Load(made, index, e.guard, e.other) if made is not e.node else None
            return None
        return Rewriter(leaf=leaf)

    def _turned(self, n) -> frozenset[int]:
        """The dimensions of prefixes that their one reader runs along from the end."""
        uses = self.uses.get(n, ())
        if not isinstance(n, Compute) or not isinstance(fold_of(n.expr), Scan) or n in self.pinned or len(uses) != 1:
            return frozenset()
        (reader, e), = uses
        while isinstance(reader, Compute) and is_pointwise(reader) and e.index == tuple(map(as_index, reader.axes)) and reader not in self.pinned \
                and len(more := self.uses.get(reader, ())) == 1:
            (reader, e), = more
        return frozenset(d for d, (i, size) in enumerate(zip(e.index, n.shape))
                         if len(i.axes()) == 1 and i is size - 1 - as_index(next(iter(i.axes()))))

    def _moves(self, n: Compute, expr: Expr) -> bool:
        uses = self.uses.get(n, ())
        if not uses:
            return True
        if any(reader in self.products for reader, _ in uses):
            return False            # tiles are multiplied as they lie in memory
        if all(reader in self.vectors for reader, _ in uses) and self._in_front(n, expr):
            return True
        inner = loads(expr)
        cost = weight(expr)
        size = n.dtype.bytes
        cheap = cost <= SMALL and not is_heavy(expr) and len(inner) <= 1
        if cheap and self.laid and inner and _placed(expr) and any(self._domain(reader) > self.hints.extents(n.shape) * 1.01 for reader, _ in uses):
            return False
        if cheap and sum(e.node.dtype.bytes for e in inner) <= max(4, 2 * size):
            return True
        if len(uses) > 1 or cost > GROWN:
            return False
        reader, _ = uses[0]
        return self._domain(reader) <= self.hints.extents(n.shape) * 1.01 or (cheap and cost == 0)

    def _in_front(self, n: Compute, expr: Expr) -> bool:
        """Is it the vector of every product that reads it, cheap, and nothing that a product can have behind it: a norm's scale, say? Each program of
        such a product reads the whole vector in any case, and a kernel that makes it takes as long as it takes to start."""
        length = self.hints.extents(n.shape)
        whole = all(self.hints.count(fold_of(reader.expr).over) == length for reader, _ in self.uses[n])
        long = [e.node for e in loads(expr) if self.hints.extents(e.node.shape) > 1]
        made = any(m in self.vectors or isinstance(m, Result) for m in long)
        work = sum(OPS[x.name].flops for x in walk(expr) if isinstance(x, Op) and x.free)
        return whole and not made and len(long) <= 2 and work <= IN_FRONT and not any(isinstance(x, Random) for x in walk(expr))

    def _domain(self, reader) -> int:
        """How many elements a reader evaluates, its folded axes included."""
        if isinstance(reader, Scatter):
            return self.hints.count(reader.axes)
        bound = {a for e in walk(reader.expr) if isinstance(e, Reduce) for a in e.over}
        return self.hints.count((*reader.axes, *bound))


def _from_the_end(n: Compute, expr: Expr, dims: frozenset[int]) -> Expr:
    """`expr`, the prefixes of node `n`, with the dimensions `dims` counted from their ends."""
    mapping = {a: a.extent - 1 - as_index(a) for d, a in enumerate(n.axes) if d in dims}
    scan, turn = fold_of(expr), Rewriter(mapping)
    made = Scan(scan.monoid, scan.along, tuple(map(turn, scan.args)), scan.component, scan.reverse != (scan.along in mapping))
    return with_value(expr, made)


def _picking(n) -> Load | None:
    """What a sum reads of a value that is zero at all but one coordinate along its axis (a one-hot, the gradient of an element that was looked up):
    made where it is read, that is no sum any more."""
    fold = fold_of(n.expr) if isinstance(n, Compute) else None
    e = fold.args[0] if isinstance(fold, Reduce) and fold.monoid == "sum" else None
    if not isinstance(e, Load) or e.guard is not None or not isinstance(e.node, Compute):
        return None
    if not isinstance(e.node.expr, Op) or e.node.expr.name != "where" or not is_pointwise(e.node):       # asked of every fold, again and again
        return None
    made = substituted(e, e.node.axes, e.node.expr)
    return e if picked(Reduce("sum", fold.over, (made,))) is not None else None


def _placed(expr: Expr) -> bool:
    """Does a value depend on quotients of its place (the size of a window), which a CPU's registers have no instruction for? An adaptive pool's
    gradient of 8 x 64 x 56 x 56, whose positions each divided by the sizes of four windows, took 27.8 ms on one core."""
    return any(isinstance(e, Coord) and any(isinstance(a, (FloorDiv, Mod)) for a in e.index.atoms()) and e.index.axes() for e in walk(expr))


def as_read(n: Compute, uses, hints) -> tuple:
    """Strides for a value that kernels alone see: contiguous along the dimension that its readers run along, where they read it several times (a bias
    that a table has for each position and head, read position by position). Its own strides where readers differ, or run along those."""
    along = set()
    for reader, e in uses:
        many = isinstance(reader, Compute) and is_pointwise(reader) and hints.extents(reader.shape) >= 2 * hints.extents(n.shape)
        fast = [a for a, s in zip(reader.axes, reader.strides) if s == 1 and hints(a.extent) > 1] if many else []
        dims = [d for d, i in enumerate(e.index) if fast and fast[-1] in i.axes()]
        along.add(dims[0] if len(dims) == 1 and e.index[dims[0]].coefficient(fast[-1]) == 1 else None)
    if len(along) != 1 or None in along or n.strides[d := along.pop()] == 1:
        return n.strides
    order, strides, step = sorted(range(len(n.shape)), key=lambda k: (k != d, hints(n.strides[k]))), {}, as_index(1)
    for k in order:
        strides[k], step = step, step * n.shape[k]
    return tuple(strides[k] for k in range(len(n.shape)))


def _is_product(n: Compute, kind) -> bool:
    """Is the fold of `n` a contraction of this kind?"""
    fold = fold_of(n.expr)
    found = contraction(fold) if fold is not None else None
    return found is not None and kind(found)


def _loads_of(n) -> list[Load]:
    if isinstance(n, Compute):
        roots: tuple = (n.expr,)
    elif isinstance(n, Scatter):
        roots = (n.value, *((n.guard,) if n.guard is not None else ()), *_fetches(n.index))
    else:
        return []
    return loads(*roots)


def substituted(load: Load, axes: tuple[Axis, ...], made: Expr) -> Expr:
    """`made`, the expression of the loaded node over `axes`, at the load's index and under its guard."""
    mapping = {a: i for a, i in zip(axes, load.index) if a.extent != 1}
    e = Rewriter(mapping)(made)
    if load.guard is None:
        return e
    guard, other = load.guard, load.other
    e = under_guard(e, guard)
    if e.dtype.is_half:
        implicit = e.implicit if isinstance(e, Cast) else False
        return Cast(e.dtype, Op("where", guard, Cast(F32, e), Const(other.value, F32)), implicit)
    return Op("where", guard, e, other)


def under_guard(e: Expr, guard: Expr) -> Expr:
    """`e` with every load in it done only where `guard` holds: its indices may be out of range elsewhere. Integers are divided by 1 there, since a
    load that is not done gives 0. What is the same wherever the guard is decided (a row's number in a gather, beside a guard on columns) stays one
    load for all of them."""
    def apart(x: Load) -> bool:
        return not x.free & guard.free and not _fetches(x.index) and all(below(i, s) for i, s in zip(x.index, x.node.shape))

    def leaf(x: Expr):
        if isinstance(x, Op) and can_fail(x.name, x.dtype):
            return Op(x.name, x.args[0], Op("where", guard, x.args[1], Const(1, x.dtype)))
        if isinstance(x, Load) and x.node.shape and not apart(x):
            both = guard if x.guard is None or x.guard is guard else Op("and", guard, x.guard)
            return Load(x.node, x.index, both, x.other if x.guard is not None else Const(0, x.dtype))
        return None
    return Rewriter(leaf=leaf)(e)


def _map(value, leaf):
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, leaf) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, leaf) for k, v in value.items()}
    return leaf(value)
