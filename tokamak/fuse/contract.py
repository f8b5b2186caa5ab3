"""Which contractions among torch's calls become kernels of ours, and which stay with the vendor's library, with the price of either.

    meaning ::= expression around one contraction           a bias, factors and the rounding of the result stand around it
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from types import MappingProxyType

from ..ir.dtype import F32
from ..ir.expr import Cast, Coord, Expr, Load, Op, Random, Reduce, Rewriter, loads, walk
from ..ir.graph import Compute, Graph, Opaque, Result, View, is_pointwise, reads, shown_nodes
from ..ir.index import Axis, FloorDiv, Index, Mod, as_index, axis
from ..ir.rewrite import GraphRewrite
from ..ir.text import spec_parts
from .axes import Group, Member, split_axes
from .contraction import (
    DIGIT, LITTLE, NARROW, SLICE, Contraction, contraction, contractions, factors_of, few_in_tf32, halves, in_tf32, multiplied, of_one_row,
    product_type, size_text, within)
from .cost import Hints, estimates
from .inline import inline, substituted
from .reason import Reason
from .boxes import movable
from .packed import cuts, in_parts
from .price import MANY, Site, unprofitable
from .products import prices, vector_apart
from .scales import scales_behind
from .sizes import runs_along
from .vendor import Own, activations_behind, sums_behind, vectors_apart
from .weighted import by_library, few_means, means


def contract(graph: Graph, target, choice: str = "", activated: Mapping = MappingProxyType({}), added: Mapping = MappingProxyType({}),
             alone: Mapping = MappingProxyType({}), attended: Mapping = MappingProxyType({})) -> Graph:
    """`graph` with what becomes kernels as nodes, and the reason beside every contraction that is left to the vendor's library. `choice`: '' by their
    prices, 'vendor' for all of them, 'kernels' for those that can become one. `activated`, `added`: what the vendor makes behind a
    product, `alone`: the product without what it adds, `attended`: what it makes of two of them, see `capture.registry`."""
    site, reasons = _chosen(graph, target, choice, activated, added, attended)
    graph, hints, behind = site.graph, estimates(site.graph, target), site.behind
    found = contractions(graph)
    kernel = lambda kept: isinstance(kept, Opaque) and kept in reasons and reasons[kept] is None
    broken = {x.node for n, x in behind.items() if reasons.get(n) is None or kernel(x.kept)}        # sums are the vendor's with all of their products
    behind = {n: x for n, x in behind.items() if x.node not in broken}
    behind, apart = _without_vectors(graph, {n: c for n, c in found.items() if reasons[n] is not None}, behind, alone, hints, target)
    made = decided(graph, reasons, hints, target.fast, {n: site.fronts[n] for n, r in reasons.items() if r is None and n in site.fronts}, behind,
                   {n: alone[n.target] for n in apart},
                   {n: (attended[n.target], first, site.attended[n]) for n, first in site.means.items() if kernel(first) and not kernel(n)})
    return inline(made, target) if None in reasons.values() or apart else made


def _chosen(graph: Graph, target, choice: str, activated: Mapping, added: Mapping, attended: Mapping) -> tuple[Site, dict[Opaque, Reason | None]]:
    """(the graph with its contractions, those in parts of which all parts become kernels; why any other one stays with the vendor). As for
    `contract`."""
    graph = _rounded(graph, target)
    found = contractions(graph)
    cut = cuts(graph, found) if target.kind == "gpu" and not target.ordered and choice != "vendor" else {}
    while True:
        made, whole = in_parts(graph, cut)
        site, reasons = possible(made, target, activated, added, {part: found[n] for part, n in whole.items()}, attended)
        if choice != "kernels":
            asked = Reason("vendor", "not attempted", "as asked")
            reasons.update(unprofitable(site, estimates(made, target), target) if choice == "" else dict.fromkeys(site.found, asked))
        left = {n for part, n in whole.items() if reasons[part] is not None}
        if not left:
            return site, reasons
        cut = {n: c for n, c in cut.items() if n not in left}


def _rounded(graph: Graph, target) -> Graph:
    """`graph`, products of float32 as torch makes them where TF32 is allowed."""
    return _InTf32(graph).result() if target.tf32 and any(map(_of_f32, contractions(graph).values())) else graph


def possible(graph: Graph, target, activated: Mapping, added: Mapping,
             whole: Mapping[Opaque, Contraction] = MappingProxyType({}),
             attended: Mapping = MappingProxyType({})) -> tuple[Site, dict[Opaque, Reason | None]]:
    """(the graph with its contractions that can be kernels, why any other one cannot). As for `contract`; `whole`: see `price.Site`."""
    graph = _rounded(graph, target)
    found, hints = contractions(graph), estimates(graph, target)
    found |= few_means(found, hints)
    one_row = {x for pair in means(found).items() for x in pair if of_one_row(found[x])}
    reasons = {n: infeasible(c, target, hints, n in one_row) for n, c in found.items()}
    taken = fronts(graph, hints)
    sums = sums_behind(graph, added, found) if target.kind == "gpu" and target.fast and not target.ordered else {}
    behind = {**sums, **activations_behind(graph, activated, target.fast)} if not target.ordered else {}
    able = {n: _as_made(c, taken.get(n, ())) for n, c in found.items() if reasons[n] is None}
    pairs = means(able)
    return Site(graph, able, taken, back_to_back(graph, able), behind, whole, pairs, by_library(able, pairs, attended)), reasons


def _without_vectors(graph: Graph, found: dict[Opaque, Contraction], behind: Mapping, alone: Mapping, hints: Hints, target) -> tuple[dict, set]:
    """(`behind` without vectors that the vendor would add to products in TF32 more slowly than a pass, the calls that are better made without
    what they add). `found`: what stays with the vendor."""
    known = prices(target, F32)
    if known is None or target.ordered:
        return dict(behind), set()
    faster = lambda c: vector_apart(known, target.threads, c.sizes(hints))
    slow = {n for n, x in behind.items() if not x.kwargs and isinstance(x.kept, View) and len(x.kept.shape) == 1
            and product_type(found[n]) is F32 and faster(found[n])}
    rest = {n: x for n, x in behind.items() if n not in slow}
    return rest, vectors_apart(graph, {n: c for n, c in found.items() if n not in rest}, alone, faster)


class _InTf32(GraphRewrite):
    """Calls that are contractions of f32, meant as torch makes them where TF32 is allowed: of factors rounded to it."""

    def __init__(self, graph: Graph):
        super().__init__(graph, "eager")

    def opaque(self, node: Opaque) -> Opaque:
        made = super().opaque(node)
        c = within(made.meaning) if made.meaning is not None else None
        if c is None or not _of_f32(c):
            return made
        inside = Rewriter(leaf=lambda e: Op("tf32", e) if e is c.left or e is c.right else None)(c.fold.args[0])
        fold = Reduce("sum", c.fold.over, (inside,))
        return replace(made, meaning=Rewriter(leaf=lambda e: fold if e is c.fold else None)(made.meaning))


def _of_f32(c: Contraction) -> bool:
    """Are both factors read from memory of f32?"""
    return all(isinstance(e, Load) and e.dtype is F32 for e in (c.left, c.right))


def infeasible(c: Contraction, target, hints: Hints, one_row: bool = False) -> Reason | None:
    """Why a contraction cannot become a kernel of ours; None when it can. `one_row`: is it part of a weighted mean of one row?"""
    if target.kind == "cpu":
        return Reason("vendor", "infeasible", "no kernels for it on a CPU")
    if target.ordered:
        return Reason("vendor", "infeasible", "a fixed order of the sum")
    if product_type(c) is None or bool(c.rows) == bool(c.columns) and not multiplied(c):
        return Reason("vendor", "infeasible", "only 16-bit floats, and f32 where TF32 is allowed")
    if product_type(c) is F32 and not (few_in_tf32(c, hints) or min(c.sizes(hints)[1:3]) > MANY and movable(c, hints, joined=True)):
        return Reason("vendor", "infeasible", "f32 in TF32, of batches of few rows or not contiguous along the depth")
    whole = not long_steps(c.fold, c.depth)
    slices = None if whole and multiplied(c) else in_slices(c.fold)
    forms = [form for form in (c if whole else None, slices) if form is not None]
    if not forms or not multiplied(c) and not one_row and not any(map(of_a_vector, forms)):
        return Reason("vendor", "infeasible", "weights that are not contiguous along the depth" if forms else "its depth is divided")
    return None


def _as_made(c: Contraction, moved: tuple[Compute, ...]) -> Contraction:
    """A contraction with what it takes in, over the axes that its kernel will have."""
    made = in_slices(_taking_in(c.fold, moved)) if moved or long_steps(c.fold, c.depth) else None
    return made if made is not None else c


def in_slices(fold: Reduce) -> Contraction | None:
    """A contraction, its depth split where indices divide it, where nothing divides it then and its slices are such that a step holds; or None."""
    group = split_axes(Group((*sorted(fold.free, key=lambda a: a.id), *fold.over), (Member(None, (), fold),)), count(1 << 20))
    made = contraction(group.members[0].expr)
    if made is None or made.outer and (made.depth.extent.constant or SLICE + 1) > SLICE:
        return None
    return None if any(long_steps(made.fold, a, 1) for a in made.fold.over if a not in made.digits) else made


def of_a_vector(c: Contraction) -> bool:
    """Is one factor a vector, and the other one a matrix that is contiguous along the depth: a fold of rows like any other?"""
    matrix = c.left if not c.columns else c.right
    read = matrix.arg if halves(matrix) is not None else in_tf32(matrix) or matrix
    return (not c.rows) != (not c.columns) and not c.batch and product_type(c) is not None and isinstance(read, Load) and runs_along(read, c.depth)


def fronts(graph: Graph, hints: Hints) -> dict[Opaque, tuple[Compute, ...]]:
    """Of each contraction of few rows the factor that the many columns have, where it is computed pointwise and nothing else reads it: a kernel that
    takes all rows at once computes each of its elements once."""
    alone, found = _read_once(graph), {}
    for n, c in contractions(graph).items():
        if min(hints.count(c.rows), hints.count(c.columns)) <= LITTLE and c.exponents is None:
            side = c.right if hints.count(c.rows) <= hints.count(c.columns) else c.left
            made = [e.node for e in (side.arg,) if isinstance(e, Load) and e.guard is None] if halves(side) is not None else []
            whole = lambda m: not long_steps(m.expr, joined=False) and not long_steps(side, c.depth, joined=False)
            short = lambda m: whole(m) or in_slices(_taking_in(c.fold, (m,))) is not None
            taken = lambda m: is_pointwise(m) and alone(m) and short(m)
            found[n] = tuple(m for m in made if taken(m) and not any(isinstance(e, Random) for e in walk(m.expr)))
    return found


def _taking_in(e: Expr, moved) -> Expr:
    """`e` with what the nodes `moved` are in the place of their loads."""
    return Rewriter(leaf=lambda x: substituted(x, x.node.axes, x.node.expr) if isinstance(x, Load) and x.node in moved else None)(e)


def long_steps(e: Expr, depth: Axis | None = None, most: int = DIGIT, joined: bool = True) -> bool:
    """Are coordinates (`depth`; of any axis, without) divided in the indices of `e` by more than `most`, which a step can write out? `joined`: of
    memory that is read as it lies, where a quotient and its rest may be one step (`_address`)."""
    def divided(i: Index):
        for a in i.atoms():
            if isinstance(a, (FloorDiv, Mod)):
                yield from (a, *divided(a.a))
    of = lambda x: (_address(x) if joined else x.index) if isinstance(x, Load) else (x.index,) if isinstance(x, (Coord, Random)) else ()
    indices = [i for x in walk(e) for i in of(x)]
    found = [a for i in indices for a in divided(i)]
    return any((a.b.constant is None or a.b.constant > most) and (depth is None or depth in a.a.axes()) for a in found)


def _address(e: Load) -> tuple[Index, ...]:
    """The indices of `e`, but for a quotient and the rest of one division that are next to each other in memory: these are the coordinate itself
    there."""
    found, strides = list(e.index), list(getattr(e.node, "strides", ()))
    for d in range(len(found) - 1 if len(strides) == len(found) else 0):
        (high, *more), (low, *others) = found[d].atoms() or (None,), found[d + 1].atoms() or (None,)
        whole = isinstance(high, FloorDiv) and isinstance(low, Mod) and not more and not others and (high.a, high.b) == (low.a, low.b)
        if whole and found[d] is as_index(high) and found[d + 1] is as_index(low) and strides[d] is strides[d + 1] * high.b:
            found[d], found[d + 1] = as_index(0), high.a
    return tuple(found)


def _read_once(graph: Graph):
    """Does nothing but one node read this one?"""
    shown = shown_nodes(graph)
    count: dict = {}
    for n in graph.nodes:
        for r in reads(n):
            count[r] = count.get(r, 0) + 1
    return lambda n: n not in shown and count.get(n) == 1


def back_to_back(graph: Graph, found: dict[Opaque, Contraction]) -> dict[Opaque, tuple[Opaque, bool]]:
    """Calls whose left factor is pointwise in the result of another one that nothing else reads, both narrow: the second by (the first, does anything
    else read what lies between them: a kernel of both stores it then)."""
    alone, pairs = _read_once(graph), {}
    for n, c in found.items():
        factor = c.left.arg if halves(c.left) is not None else None
        if not isinstance(factor, Load) or factor.guard is not None or c.batch or len(c.columns) != 1:
            continue
        between = factor.node
        results = [r for r in (reads(between) if is_pointwise(between) else (between,)) if isinstance(r, Result) and r.opaque in found]
        if len(results) != 1 or is_pointwise(between) and not alone(results[0]):
            continue
        first = found[results[0].opaque]
        fits = all((a.extent.constant or NARROW + 1) <= NARROW for a in (first.depth, *c.columns))
        if fits and not first.batch and len(first.columns) == 1 and first.columns[0].extent is c.depth.extent:
            pairs[n] = results[0].opaque, not alone(between)
    return pairs


def decided(graph: Graph, reasons: dict[Opaque, Reason | None], hints: Hints, fast: bool = False,
            taken: Mapping = MappingProxyType({}), behind: Mapping = MappingProxyType({}), apart: Mapping = MappingProxyType({}),
            attended: Mapping = MappingProxyType({})) -> Graph:
    """`graph` with the calls whose reason is None as nodes of the language, and its reason beside each other one. `fast`: roundings of operations may
    be left out. `taken`: what calls take in that is computed in front of them. `behind`: call -> what the vendor makes behind it. `apart`: call
    -> the call that multiplies alone, where what is added is added behind it. `attended`: weighted mean -> (what the library makes of both products,
    the first of them, the scale between)."""
    return _Decided(graph, reasons, hints, fast, taken, behind, apart, attended).result() if reasons else graph


class _Decided(GraphRewrite):
    def __init__(self, graph: Graph, reasons: dict[Opaque, Reason | None], hints: Hints, fast: bool, taken: Mapping, behind: Mapping, apart: Mapping,
                 attended: Mapping):
        super().__init__(graph, "eager")
        self.reasons, self.hints, self.fast, self.behind, self.apart = reasons, hints, fast, behind, apart
        self.attended = attended
        self.calls: dict[Opaque, Opaque] = {}           # those behind which the vendor makes something
        self.own: dict[Opaque | Result, Opaque] = {}    # what the vendor makes then, and of what call
        self.made_by = {x.node: x for x in behind.values()}          # of several the last
        self.fronts = taken
        self.taken_in = {m for found in self.fronts.values() for m in found}
        self.meanings: dict[Opaque, Expr] = {}          # of calls that become nodes, over new nodes
        self.factors = {e.node for n, r in reasons.items() if r is None for e in loads(*_factors(within(n.meaning)))}
        self.factors |= {source for n in self.factors for source in _copied(n)}

    def result(self) -> Graph:
        """What the vendor makes behind a call comes from where the call does."""
        out = super().result()
        origins = {n: self.graph.origins[self.own[n]] for n in out.nodes if n in self.own and self.own[n] in self.graph.origins}
        return replace(out, origins={**origins, **out.origins})

    def compute(self, node: Compute) -> Compute | Result:
        """A factor of a product is rounded to the type in which it is multiplied. What the vendor makes behind a product is what its call gives."""
        if node in self.made_by:
            return self._vendors_own(node, self.made_by[node])
        made = super().compute(node)
        if node not in self.factors or node in self.taken_in:
            return made
        return Compute(made.shape, made.strides, _rounding(made.expr), made.device, made.tag)

    def opaque(self, node: Opaque) -> Opaque | Compute:
        """The call; or the contraction in its meaning as a node."""
        made = super().opaque(node)
        if node not in self.reasons:
            return made
        reason = self.reasons[node]
        if not reason and within(made.meaning) is None:
            reason = Reason("vendor", "infeasible", "a factor is the same all along the depth")
        if reason is not None:
            made = replace(made, reason=f"contraction {size_text(within(node.meaning), self.hints)}: {reason}")
            if node in self.apart:
                return self._alone(node, made)
            if node in self.attended:
                return self._attended(node, made)
            if node in self.behind:
                self.calls[node] = made
            return made if node not in self.behind else None
        shape, strides, _, device = spec_parts(made.results[0])
        self.meanings[node] = meaning = self._with_fronts(node, made.meaning)
        return Compute(shape, strides, within(meaning).fold, device)

    def _alone(self, node: Opaque, made: Opaque) -> Opaque:
        """The call that multiplies alone."""
        target, positions = self.apart[node]
        args = tuple(made.args[p] for p in positions)
        self.meanings[node] = made.meaning
        return replace(made, target=target, args=args, reads=tuple(dict.fromkeys(v.node for v in args)), meaning=None)

    def _attended(self, node: Opaque, made: Opaque) -> Opaque:
        """The library's call for both products and what lies between."""
        function, first, scale = self.attended[node]
        args = (*self.mapped(first.args), made.args[1], scale)
        return replace(made, target=function, args=args, reads=tuple(dict.fromkeys(v.node for v in args[:3])), meaning=None)

    def _vendors_own(self, node: Compute, x: Own) -> Result:
        """What the vendor's call gives that makes `node` too; it stands where `node` stood, behind all that it is handed."""
        product = next(n for n, own in self.behind.items() if own is x)
        call = self.calls[product]
        args, results = call.args, call.results
        if x.reshaped:
            results = tuple(replace(spec, shape=node.shape, strides=node.strides) for spec in results)
        if isinstance(x.kept, Opaque):
            before = self._vendors_own(node, self.behind[x.kept]) if x.kept in self.behind else \
                Result(self.nodes[x.kept], 0, *spec_parts(self.nodes[x.kept].results[0]))
            args = (View(before, node.shape, node.strides, as_index(0)), *args)
        elif x.kept is not None:
            args = (self.mapped(x.kept), *args)
        handed = tuple(dict.fromkeys(v.node for v in args if isinstance(v, View)))
        own = replace(call, target=x.target, args=(*args, *x.further), kwargs=x.kwargs, results=results, reads=handed, meaning=None)
        made = Result(own, 0, node.shape, node.strides, node.dtype, node.device)
        self.own |= {own: product, made: product}
        return made

    def _with_fronts(self, node: Opaque, meaning: Expr) -> Expr:
        """The meaning with what is computed pointwise in front of it in the product, and factors that do not differ along the depth behind it."""
        moved = {self.nodes[n] for n in self.fronts.get(node, ())}
        inside = _taking_in(meaning, moved)
        if within(inside) is None or within(inside).exponents is not None:
            return meaning
        fold = within(inside).fold
        behind = scales_behind(fold) if self.fast and moved else fold
        whole = inside if behind is fold else Rewriter(leaf=lambda e: behind if e is fold else None)(inside)
        factors = factors_of(within(whole).fold.args[0])
        return Rewriter(leaf=lambda e: Cast(F32, _rounding(e.arg)) if e in factors and halves(e) is not None else None)(whole)

    def opaque_result(self, node: Result) -> Result | Compute:
        """What stands around the contraction, as a node."""
        call = self.nodes[node.opaque]
        if node.opaque in self.calls:
            return None                 # nothing but what the vendor makes behind it reads it
        if isinstance(call, Opaque) and node.opaque not in self.apart:
            return super().opaque_result(node)
        made = super().opaque_result(node) if isinstance(call, Opaque) else call
        fold, product = within(self.meanings[node.opaque]).fold, Load(made, tuple(axis(i, s) for i, s in enumerate(made.shape)))
        around = Rewriter(leaf=lambda e: product if e is fold else None)(self.meanings[node.opaque])
        return Compute(node.shape, node.strides, _rounding(around) if node in self.factors else around, node.device)


def _copied(node) -> Iterator:
    """What `node` copies, and what that does: readers read it in the place of the copy."""
    while isinstance(node, Compute) and isinstance(node.expr, Load):
        node = node.expr.node
        yield node


def _factors(c: Contraction) -> tuple[Expr, ...]:
    """What is multiplied as it is rounded; exponents are not."""
    return c.fold.args if c.exponents is None else (c.right,)


def _rounding(e: Expr) -> Expr:
    """`e` with its own rounding there to stay."""
    return Cast(e.dtype, e.arg) if isinstance(e, Cast) and e.implicit else e
