"""Chains of folds along the same axes become one fold that rescales what it carries, so that what is folded is read once.

    s = sum[r](x)    q = sum[r]((x - h)^2)    h made from s    =>   s, q0 = moments[r](x, 0, 1)    q = q0 + (s - n h)^2 / n
    m = max[r](x)    t = sum[r](exp(x - h))   h made from m    =>   m, t0 = expsum[r](x, 1)        t = t0 exp(m - h)

The equations hold for every h that is the same along r; n is how many elements r has. With h = s / n and h = m the corrections are 0 and 1 but for
rows with infinities, where they are what the two folds would have given: NaN, mostly. Variance, the statistics of norms, softmax and logsumexp are
instances; nothing here knows them. Pointwise producers between the folds and their operands are looked through.

It pays where no program can hold the folded elements between the two folds (`gpu.reread`), or where long rows are only folded: in pieces, more are
under way at once.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Reduce, Rewriter, loads
from ..ir.graph import Compute, Graph, Scatter, fold, reads, topological
from ..ir.index import as_index
from ..ir.ops import CARRIERS
from ..ir.rewrite import GraphRewrite
from . import gpu
from .cost import estimates, pinned_nodes, weight
from .inline import GROWN, substituted


def _difference(e: Expr, bound: frozenset) -> tuple[Expr, Expr] | None:
    """(x, h) of x - h or h - x where h is the same along the axes `bound`."""
    if not isinstance(e, Op) or e.name != "sub":
        return None
    x, h = e.args if not e.args[1].free & bound else e.args[::-1]
    return None if h.free & bound or not x.free & bound else (x, h)


def _squared(e: Expr, bound: frozenset):
    return _difference(e.args[0], bound) if isinstance(e, Op) and e.name == "mul" and e.args[0] is e.args[1] else None


def _exponential(e: Expr, bound: frozenset):
    found = _difference(e.args[0], bound) if isinstance(e, Op) and e.name == "exp" else None
    return found if found is not None and e.args[0].args[0] is found[0] else None


def _sum_of_squares(carried: tuple[Expr, ...], h: Expr, n: Expr) -> Expr:
    s, q = carried
    away = Op("sub", s, Op("mul", h, n))
    return Op("add", q, Op("div", Op("mul", away, away), n))


def _sum_of_exponentials(carried: tuple[Expr, ...], h: Expr, n: Expr) -> Expr:
    m, t = carried
    return Op("mul", t, Op("exp", Op("sub", m, h)))


@dataclass(frozen=True)
class Chain:
    """A fold by `first` of x, then a sum of `later(its argument, folded axes)` = (x, h): both are components 0 and 1 of `carrier`, the second by
    `corrected((component 0, component 1), h, n)`."""
    name: str
    first: str
    carrier: str
    later: Callable[[Expr, frozenset], tuple[Expr, Expr] | None]
    corrected: Callable[[tuple[Expr, ...], Expr, Expr], Expr]

    def carried(self, over: tuple, x: Expr, component: int) -> Reduce:
        """The fold of the single elements x, each the carrier of a set of one."""
        rest = (Const(0, x.dtype),) * (len(CARRIERS[self.carrier]) - 2)
        return Reduce(self.carrier, over, (x, *rest, Const(1, x.dtype)), component)


CHAINS: tuple[Chain, ...] = (
    Chain("sum of squared differences", "sum", "moments", _squared, _sum_of_squares),
    Chain("sum of exponentials", "max", "expsum", _exponential, _sum_of_exponentials),
)


def stream(graph: Graph, target, chains: tuple[Chain, ...] = CHAINS) -> Graph:
    """`graph` (simplified) with the `chains` in it that pay on `target` as one fold each. A target whose folds have a fixed order keeps them."""
    if target.kind != "gpu" or target.ordered:
        return graph
    found = _Finder(graph, target, chains).found
    return _Streams(graph, found).result() if found else graph


@dataclass(frozen=True, eq=False)
class _Link:
    """`later`, a node whose fold uses `first`'s; h over the axes of `later`."""
    chain: Chain
    first: Compute
    later: Compute
    h: Expr


class _Finder:
    """The links of a graph: `found[later]`."""

    def __init__(self, graph: Graph, target, chains):
        self.hints, self.target = estimates(graph, target), target
        self.whole: dict = {}              # pointwise node -> its expression over inputs and folds
        self.found: dict[Compute, _Link] = {}
        self.pinned = pinned_nodes(graph)
        self.readers: dict = {}
        for n in graph.nodes:
            for r in reads(n):
                self.readers.setdefault(r, []).append(n)
        firsts: dict = {}                  # (monoid, shape, extents, expression over the node's axes) -> node
        for n in graph.nodes:
            if not isinstance(n, Compute):
                continue
            part = fold(n)
            if part is None:
                self._look_through(n)
            elif isinstance(part, Reduce) and part.over and part.args[0].dtype.is_float and len(part.args) == 1:
                link = self._link(n, part, firsts, chains) if part.monoid == "sum" else None
                if link is not None:
                    self.found[n] = link
                elif gpu.reread(n, part, self.hints, target) or self.hints.count(part.over) > gpu.PASSING and self._folded_away(n):
                    firsts.setdefault(self._key(n, part, part.monoid, self._seen(part.args[0])), n)

    def _folded_away(self, first: Compute) -> bool:
        """Is everything that is made of `first` in the end no larger than it, so that no row is needed a second time once its folds are known? Larger
        values on the way are folded again, or single elements of them are picked."""
        size, stack, seen = self.hints.extents(first.shape), [first], set()
        while stack:
            for n in self.readers.get(stack.pop(), ()):
                if n not in seen and isinstance(n, (Compute, Scatter)):
                    if self.hints.extents(n.shape) > size and (isinstance(n, Scatter) or fold(n) is not None or n in self.pinned):
                        return False
                    seen.add(n)
                    stack.append(n)
        return True

    def _look_through(self, n: Compute) -> None:
        e = self._seen(n.expr)
        if weight(e) <= GROWN:
            self.whole[n] = e

    def _seen(self, e: Expr) -> Expr:
        """`e` with the pointwise values that it reads written out."""
        def leaf(x: Expr):
            return substituted(x, x.node.axes, self.whole[x.node]) if isinstance(x, Load) and x.node in self.whole else None
        return Rewriter(leaf=leaf)(e)

    @staticmethod
    def _key(n: Compute, part: Reduce, monoid: str, x: Expr):
        names = {a: as_index(type(a)(len(n.shape) + i, a.extent)) for i, a in enumerate(part.over)}
        return monoid, n.shape, n.device, tuple(a.extent for a in part.over), Rewriter(names)(x)

    def _link(self, n: Compute, part: Reduce, firsts: dict, chains) -> _Link | None:
        whole = self._seen(part.args[0])
        for chain in chains:
            pair = chain.later(whole, frozenset(part.over))
            first = firsts.get(self._key(n, part, chain.first, pair[0])) if pair is not None else None
            if first is not None and first in topological([e.node for e in loads(pair[1])]):
                return _Link(chain, first, n, pair[1])
        return None


class _Streams(GraphRewrite):
    """The graph with the links' folds carried together."""

    def __init__(self, graph: Graph, found: dict[Compute, _Link]):
        super().__init__(graph, "fast")
        self.found = found
        self.made: dict = {}               # component of a carried fold -> the node that it was made for
        self.chains: dict = {}             # first node of a chain -> the Chain
        for link in found.values():
            self.chains.setdefault(link.first, link.chain)

    def result(self) -> Graph:
        made = super().result()
        origins = {n: self.graph.origins[old] for n, old in self.made.items() if old in self.graph.origins}
        return replace(made, origins={**origins, **made.origins})

    def compute(self, node: Compute) -> Compute:
        """The node's replacement: a component of a carried fold, or what is made from two of them."""
        link = self.found.get(node)
        if link is not None:
            return self._derived(node, link)
        return self._component(node, 0) if node in self.chains else super().compute(node)

    def _component(self, first: Compute, component: int) -> Compute:
        part = fold(first)
        carried = self.chains[first].carried(part.over, self.expr(part.args[0]), component)
        if component == 0:
            return Compute(first.shape, first.strides, self.expr.root(_replaced(first.expr, carried)), first.device, first.tag)
        return Compute(first.shape, None, carried, first.device)

    def _derived(self, node: Compute, link: _Link) -> Compute:
        axes = tuple(as_index(a) if a.extent != 1 else as_index(0) for a in node.axes)
        part = fold(link.first)
        plain = self.chains[link.first].carried(part.over, self.expr(part.args[0]), 0)
        first = self.nodes[link.first] if link.first.expr is part else Compute(node.shape, None, plain, node.device)
        second = self._component(link.first, 1)
        self.made.update({first: link.first, second: node})
        carried = Load(first, axes), Load(second, axes)
        total = as_index(1)
        for a in part.over:
            total = total * a.extent
        n = Coord(total)
        value = link.chain.corrected(carried, link.h, Cast(part.dtype, n))
        if total.constant is None:      # no elements: nothing to correct
            value = Op("where", Op("gt", n, Const(0, n.dtype)), value, Const(0, part.dtype))
        return Compute(node.shape, node.strides, self.expr.root(_replaced(node.expr, value)), node.device, node.tag)


def _replaced(e: Expr, value: Expr) -> Expr:
    """`e`, a fold under casts, with `value` in the fold's place."""
    return Cast(e.dtype, _replaced(e.arg, value), e.implicit) if isinstance(e, Cast) else value
