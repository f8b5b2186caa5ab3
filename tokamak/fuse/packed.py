"""Products that are read in parts alone: gate and up by `chunk`, or every second column, of one projection.

    r = x w;  f(r[:, :n], r[:, n:])    becomes    g = x w[:, :n];  u = x w[:, n:];  f(g, u)

The parts then share a kernel with what stands behind them, as products of weights apart do. They are no calls of torch: `contract` has them in a
graph only where all parts of a call become kernels.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..ir.expr import Expr, Load, Rewriter, loads
from ..ir.graph import Compute, Graph, Opaque, Result, is_pointwise, readers_of
from ..ir.index import Axis, as_index, row_major
from ..ir.rewrite import GraphRewrite
from ..ir.text import spec_parts
from .contraction import Contraction
from .cost import pinned_nodes

MOST = 4                # parts of one call


@dataclass(frozen=True)
class Cut:
    """How a result is read: along dimension `dim` by parts of so many elements (`extent`), in steps of `step`, from each of `begins` on."""
    dim: int
    extent: int
    step: int
    begins: tuple[int, ...]

    def part(self, e: Load) -> int:
        """The number of the part that `e` reads."""
        return self.begins.index(_place(e, self.dim)[2])


def cuts(graph: Graph, found: Mapping[Opaque, Contraction]) -> dict[Opaque, Cut]:
    """Those of the contractions `found` whose results nothing reads but pointwise nodes, in parts that do not overlap."""
    readers, pinned = readers_of(graph), pinned_nodes(graph)
    made = {}
    for r in graph.nodes:
        if not isinstance(r, Result) or r.opaque not in found or r in pinned or not all(map(is_pointwise, readers.get(r, ()))):
            continue
        read = [e for n in readers.get(r, ()) for e in loads(n.expr) if e.node is r]
        cut = next((c for d in reversed(range(len(r.shape))) if (c := _cut(read, d, r.shape[d].constant)) is not None), None)
        if cut is not None:
            made[r.opaque] = cut
    return made


def _cut(read: list[Load], dim: int, whole: int | None) -> Cut | None:
    """How all of `read` lie along a dimension of `whole` elements; None where that is not in parts."""
    places = {_place(e, dim) for e in read}
    if whole is None or None in places or len({p[:2] for p in places}) != 1:
        return None
    (extent, step, _), begins = next(iter(places)), tuple(sorted(p[2] for p in places))
    beside = step == 1 and all(b % extent == 0 for b in begins)
    between = step > 1 and step * extent == whole and begins[-1] < step
    return Cut(dim, extent, step, begins) if 1 < len(begins) <= MOST and (beside or between) else None


def _place(e: Load, dim: int) -> tuple[int, int, int] | None:
    """(extent of the axis, step, where it begins) of what `e` reads along a dimension, where that is one axis, of no other dimension."""
    i = e.index[dim]
    along = i.axes()
    a = next(iter(along)) if len(along) == 1 else None
    if a is None or e.guard is not None or a.extent.constant is None or any(a in x.axes() for d, x in enumerate(e.index) if d != dim):
        return None
    step, rest = i.coefficient(a).constant, i.without(a).constant
    plain = step is not None and step > 0 and rest is not None and as_index(a) * step + rest is i
    return (a.extent.constant, step, rest) if plain else None


def in_parts(graph: Graph, made: Mapping[Opaque, Cut]) -> tuple[Graph, dict[Opaque, Opaque]]:
    """(`graph` with the calls in `made` in their parts, each part -> the call that it is a part of)."""
    rewrite = _InParts(graph, made)
    return (rewrite.result(), rewrite.whole) if made else (graph, {})


class _InParts(GraphRewrite):
    def __init__(self, graph: Graph, made: Mapping[Opaque, Cut]):
        super().__init__(graph, "eager")
        self.made, self.whole = made, {}
        self.parts: dict[Opaque, list[Result]] = {}

    def opaque(self, node: Opaque) -> Opaque:
        made = super().opaque(node)
        if node not in self.made:
            return made
        cut, (extents, _, *rest) = self.made[node], spec_parts(node.results[0])
        shape = tuple(as_index(cut.extent) if d == cut.dim else n for d, n in enumerate(extents))
        along = as_index(Axis(cut.dim, shape[cut.dim]))
        for begin in cut.begins:
            meaning = Rewriter({Axis(cut.dim, extents[cut.dim]): along * cut.step + begin})(made.meaning)
            part = replace(made, results=((shape, row_major(shape), *rest),), meaning=meaning)
            self.whole[part] = node
            self.parts.setdefault(node, []).append(Result(part, 0, shape, row_major(shape), *rest))
        return self.parts[node][0].opaque

    def opaque_result(self, node: Result) -> Result:
        return self.parts[node.opaque][0] if node.opaque in self.parts else super().opaque_result(node)

    def compute(self, node: Compute) -> Compute:
        if not any(isinstance(r, Result) and r.opaque in self.parts for r in {e.node for e in loads(node.expr)}):
            return super().compute(node)
        return super().compute(Compute(node.shape, node.strides, Rewriter(leaf=self._part)(node.expr), node.device, node.tag))

    def _part(self, e: Expr) -> Load | None:
        """What is read of a part."""
        if not isinstance(e, Load) or not isinstance(e.node, Result) or e.node.opaque not in self.parts:
            return None
        cut = self.made[e.node.opaque]
        a, = e.index[cut.dim].axes()
        return Load(self.parts[e.node.opaque][cut.part(e)], tuple(as_index(a) if d == cut.dim else i for d, i in enumerate(e.index)))
