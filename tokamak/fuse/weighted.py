"""Products whose one factor is made of exponentials, divided by their own sum along the depth, are weighted means, which one pass makes.

    m = max[r](x)   t = sum[r](exp(x - m))   p = exp(x - m) / t   y = sum[r](p * v)    =>    y = expmean.1[r](x, v)

Where x is pointwise in the result of another product, that one is made within the same kernel, a tile at a time: neither x nor p goes through memory
(Dao et al. 2022, "FlashAttention"; Milakov and Gimelshein 2018 for the rescaled carrier). Scores with any scale, bias or mask are instances; nothing
here knows them. What is multiplied is e^(x - what is carried) in the type of v, and p would be rounded to it: the same bits are kept of either.

The rewrite is of the meaning that the second call has: it stays a call until `contract` makes a kernel of it and of the first, at what that costs.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from ..ir.expr import Cast, Const, Expr, Load, Op, Random, Reduce, Rewriter, loads, walk
from ..ir.graph import Compute, Graph, Opaque, Result, View, is_pointwise, readers_of, shown_nodes
from ..ir.index import Axis, as_index
from ..ir.rewrite import GraphRewrite, Simplifier
from .axes import Group, Member, split_axes
from .contraction import SIDE, TURNED, WIDE, Contraction, contraction, contractions, halves, multiplied, of_one_row
from .cost import Hints, estimates, weight
from .inline import GROWN, substituted

LONG = 256              # keys from which on those of fewer rows are one kernel


def weighted(graph: Graph, target) -> Graph:
    """`graph` (simplified), the calls whose results are weighted means of that kind meant as such. A target whose folds have a fixed order has none,
    nor has one that rounds where torch does."""
    if target.kind != "gpu" or target.ordered or not target.fast:
        return graph
    found = contractions(graph)
    if len(found) < 2:
        return graph
    means = _Means(graph, found, estimates(graph, target)).found
    return _Meant(graph, means).result() if means else graph


def means(found: Mapping[Opaque, Contraction]) -> dict[Opaque, Opaque]:
    """Those of the contractions `found` that are weighted means -> the one that their weights are made of, which is among them, too."""
    made = {n: [e.node.opaque for e in loads(c.exponents) if isinstance(e.node, Result)] for n, c in found.items() if c.exponents is not None}
    return {n: calls[0] for n, calls in made.items() if len(set(calls)) == 1 and calls[0] in found}


def _made(c: Contraction) -> bool:
    """Can a program make it: products of tiles, of a row where keys are read for one alone?"""
    return multiplied(c) or of_one_row(c)


def few_means(found: Mapping[Opaque, Contraction], hints: Hints) -> dict[Opaque, Contraction]:
    """Those of `found` that are weighted means of few rows, and what their weights are made of, as they are where keys are read as they lie."""
    pairs = {x: shared(found[x]) for pair in means(found).items() for x in pair}
    return {x: c for last, first in means(found).items() for x, c in ((last, pairs[last]), (first, pairs[first]))
            if pairs[last] and pairs[first] and hints.count(pairs[last].rows) <= TURNED}


def shared(c: Contraction) -> Contraction | None:
    """A contraction whose factors are read where they are copied from, over axes that are split where its indices divide them: keys that several
    heads share have those heads as rows. None where that is none."""
    copied = lambda e: isinstance(e, Load) and e.guard is None and isinstance(e.node, Compute) and isinstance(e.node.expr, Load)
    seen = Rewriter(leaf=lambda e: substituted(e, e.node.axes, e.node.expr) if copied(e) else None)
    fold, last = seen(c.fold), c.fold
    while fold is not last:
        fold, last = Rewriter(leaf=seen.leaf)(fold), fold
    whole = Group((*sorted(fold.free, key=lambda a: a.id), *fold.over), (Member(None, (), fold),))
    return contraction(split_axes(whole, count(1 << 20)).members[0].expr)


def by_library(found: Mapping[Opaque, Contraction], pairs: Mapping[Opaque, Opaque], attended: Mapping) -> dict[Opaque, float]:
    """Those of the weighted means in `pairs` (see `means`) whose exponents are a product's result times a number -> that number. `attended`: overload
    of a product of batches -> what the library makes of two of them in that way."""
    made = {}
    for last, first in pairs.items():
        c, (x, scale) = found[last], scaled(found[last].exponents)
        read = x.arg if isinstance(x, Cast) else x
        if {first.target, last.target} <= set(attended) and first.target is last.target and isinstance(read, Load) and read.guard is None:
            rows = c.fold.free - c.right.free
            plain = len(c.batch) == 1 and len(rows) == 1 and read.index == tuple(map(as_index, (*c.batch, *rows, c.depth)))
            views = [v for v in (*first.args, *last.args) if isinstance(v, View) and len(v.shape) == 3]
            if plain and len(views) == 4 and not first.kwargs and not last.kwargs and last.meaning.children() == (c.fold,):
                made[last] = scale
    return made


def scaled(e: Expr) -> tuple[Expr, float]:
    """(x, a positive number) whose product is `e`."""
    if isinstance(e, Op) and e.name == "div" and isinstance(e.args[1], Const) and 1e-30 < e.args[1].value < 1e30:
        return e.args[0], 1.0 / e.args[1].value
    if isinstance(e, Op) and e.name == "mul":
        for x, by in (e.args, e.args[::-1]):
            if isinstance(by, Const) and 1e-30 < by.value < 1e30:
                return x, float(by.value)
    return e, 1.0


class _Meant(GraphRewrite):
    """The graph with other meanings of some calls, over its own nodes."""

    def __init__(self, graph: Graph, meanings: dict[Opaque, Expr]):
        super().__init__(graph, "eager")
        self.meanings = meanings

    def opaque(self, node: Opaque) -> Opaque:
        made = super().opaque(node)
        if node not in self.meanings:
            return made
        meaning = self.expr(self.meanings[node])
        return replace(made, meaning=meaning, reads=tuple(dict.fromkeys((*made.reads, *(e.node for e in loads(meaning))))))


class _Means:
    """`found`: call -> its meaning as a weighted mean."""

    def __init__(self, graph: Graph, products: dict[Opaque, Contraction], hints: Hints):
        self.products, self.hints = products, hints
        self.readers, self.shown = readers_of(graph), shown_nodes(graph)
        self.simplify = Simplifier()
        self.whole: dict[Compute, Expr] = {}        # pointwise node -> its expression over folds, calls and inputs
        self.powers: dict[Compute, bool] = {}       # pointwise node -> is there an exponential in that?
        self.found = {n: made for n, c in products.items() if (made := self._mean(n, c)) is not None}

    def _mean(self, call: Opaque, c: Contraction) -> Expr | None:
        for weights, values in ((c.left, c.right), (c.right, c.left)):
            read = weights.arg if halves(weights) is not None else None
            if not isinstance(read, Load) or read.guard is not None or not is_pointwise(read.node) or c.digits or c.outer or c.scales \
                    or not self._exponential(read.node):
                continue
            x = self._exponents(self._seen(read), c.depth)
            mean = Reduce("expmean", (c.depth,), (x, values), 1) if x is not None else None
            if mean is not None and self._made_within(call, contraction(mean), x, values):
                return Rewriter(leaf=lambda e: mean if e is c.fold else None)(call.meaning)
        return None

    def _exponential(self, n: Compute) -> bool:
        """Is `n`, a pointwise value, made of an exponential? Asked first: written out, values of a whole model are long."""
        if n not in self.powers:
            self.powers[n] = any(isinstance(x, Op) and x.name == "exp" or isinstance(x, Load) and is_pointwise(x.node) and self._exponential(x.node)
                                 for x in walk(n.expr))
        return self.powers[n]

    def _exponents(self, p: Expr, depth: Axis) -> Expr | None:
        """x where `p` is exp(x - m) over its sum along `depth`, m being the maximum."""
        while isinstance(p, Cast):
            p = p.arg
        if not isinstance(p, Op) or p.name != "div":
            return None
        above, below = p.args
        if not isinstance(above, Op) or above.name != "exp" or not isinstance(above.args[0], Op) or above.args[0].name != "sub":
            return None
        x, top = above.args[0].args
        return x if self._folded(below, "sum", depth) is above and self._folded(top, "max", depth) is x else None

    def _folded(self, e: Expr, monoid: str, along: Axis) -> Expr | None:
        """What `e`, an element of a fold by `monoid`, folds: over the axis `along`, as an expression where `e` stands; None where it is none."""
        e = e.arg if isinstance(e, Cast) else e
        if not isinstance(e, Load) or e.guard is not None or not isinstance(e.node, Compute) or along in e.free:
            return None
        part = e.node.expr
        part = part.arg if isinstance(part, Cast) and part.implicit else part
        if not isinstance(part, Reduce) or part.monoid != monoid or len(part.over) != 1 or part.over[0].extent is not along.extent:
            return None
        places = {a: i for a, i in zip(e.node.axes, e.index) if a.extent != 1} | {part.over[0]: as_index(along)}
        return self._written(Rewriter(places)(part.args[0]))

    def _seen(self, e: Load) -> Expr:
        """What `e` reads, pointwise values written out."""
        if e.node not in self.whole:
            made = self._written(e.node.expr)
            self.whole[e.node] = made if weight(made) <= GROWN and not any(isinstance(x, Random) for x in walk(made)) else None
        made = self.whole[e.node]
        return e if made is None else self.simplify(substituted(e, e.node.axes, made))

    def _written(self, e: Expr) -> Expr:
        """`e` with the pointwise values that it reads, and without roundings that are none of the user's."""
        return self.simplify.root(Rewriter(leaf=lambda x: self._seen(x) if isinstance(x, Load) and is_pointwise(x.node) else None)(e))

    def _made_within(self, call: Opaque, c: Contraction, x: Expr, values: Expr) -> bool:
        """Is x made of one other product's result, which nothing else needs, and can a program hold the depth of that and the columns of this one?"""
        read = {e.node for e in loads(x) if isinstance(e.node, Result) and e.node.opaque in self.products}
        c = c and shared(c)
        if len(read) != 1 or c is None or not _made(c) or self.hints.count(c.rows) < SIDE and self.hints(c.depth.extent) < LONG:
            return False
        result, = read
        first, chain = shared(self.products[result.opaque]), self._behind(result, call)
        columns = values.free - {c.depth} - x.free
        if first is None:
            return False
        held = [*first.fold.over, *columns]
        narrow = len(columns) == 1 and len(first.fold.over) == 1 and all((a.extent.constant or WIDE + 1) <= WIDE for a in held)
        return narrow and _made(first) and chain is not None and not any(e.node in chain for e in loads(values))

    def _behind(self, result: Result, call: Opaque) -> set | None:
        """All that is made of `result` on the way to `call`; None where something else is made of it."""
        found, waiting = set(), [result]
        while waiting:
            n = waiting.pop()
            if n in found:
                continue
            found.add(n)
            for reader in self.readers.get(n, ()):
                if reader is not call and (not isinstance(reader, Compute) or reader in self.shown):
                    return None
                waiting += [reader] if reader is not call else []
        return found if result not in self.shown else None
