"""Contractions: calls of torch whose meaning is a sum of products over a common axis. Which of them become kernels of ours, and which stay with the
vendor's library, with the reason and the price of either.

    meaning ::= expression around one Reduce(sum, k, a[m, k] * b[k, n])           a bias, factors and the rounding of the result stand around it
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.expr import Cast, Expr, Load, Op, Reduce, Rewriter, walk
from ..ir.graph import Compute, Graph, Opaque, Result
from ..ir.index import Axis, axis
from ..ir.rewrite import GraphRewrite
from ..ir.text import spec_parts
from .cost import Hints, estimates
from .reason import Reason


@dataclass(frozen=True, eq=False)
class Contraction:
    """`fold`: sum over `depth` of left * right. `rows`: the axes of `left` alone, `columns` of `right` alone, `batch` of both; in the result's order."""
    fold: Reduce
    left: Expr
    right: Expr
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]

    @property
    def depth(self) -> Axis:
        return self.fold.over[0]

    def sizes(self, hints: Hints) -> tuple[int, int, int, int]:
        """Extents (batch, rows, columns, depth), as numbers."""
        return (*(hints.count(a) for a in (self.batch, self.rows, self.columns)), hints(self.depth.extent))

    def flops(self, hints: Hints) -> int:
        b, m, n, k = self.sizes(hints)
        return 2 * b * m * n * k


def contraction(e: Expr) -> Contraction | None:
    """The contraction that `e` is: a sum over one axis of a product of two values that both depend on it."""
    if not isinstance(e, Reduce) or e.monoid != "sum" or len(e.over) != 1 or not isinstance(e.args[0], Op) or e.args[0].name != "mul":
        return None
    left, right = e.args[0].args
    k, = e.over
    if k not in left.free or k not in right.free:
        return None
    pick = lambda axes: tuple(sorted(axes - {k}, key=lambda a: a.id))
    return Contraction(e, left, right, pick(left.free & right.free), pick(left.free - right.free), pick(right.free - left.free))


def within(meaning: Expr) -> Contraction | None:
    """The one contraction in a call's meaning."""
    folds = [e for e in walk(meaning) if isinstance(e, Reduce)]
    return contraction(folds[0]) if len(folds) == 1 else None


def operand(e: Expr) -> Load | None:
    """The plain read that a factor of a contraction is, under casts to the type it is carried in; or None."""
    while isinstance(e, Cast):
        e = e.arg
    return e if isinstance(e, Load) else None


def size_text(c: Contraction, hints: Hints) -> str:
    """Extents and type for people: 16x4096x4096 bf16, rows by depth by columns."""
    b, m, n, k = c.sizes(hints)
    read = operand(c.left)
    return f"{f'{b} of ' if b > 1 else ''}{m}x{k}x{n} {read.dtype if read is not None else c.left.dtype}"


def contract(graph: Graph, target) -> Graph:
    """`graph` with what becomes kernels as nodes, and the reason beside every contraction that is left to the vendor's library."""
    hints = estimates(graph, target)
    return decided(graph, {n: refused(c, target) for n, c in contractions(graph).items()}, hints)


def contractions(graph: Graph) -> dict[Opaque, Contraction]:
    """The calls of torch that are contractions."""
    return {n: c for n in graph.nodes if isinstance(n, Opaque) and n.meaning is not None and (c := within(n.meaning)) is not None}


def refused(c: Contraction, target) -> Reason | None:
    """Why no kernel is made of a contraction; None where one is worth it."""
    if target.kind == "cpu":
        return Reason("vendor", "not attempted", "on a CPU")
    return Reason("vendor", "not attempted")


def decided(graph: Graph, reasons: dict[Opaque, Reason | None], hints: Hints) -> Graph:
    """`graph` with the calls whose reason is None as nodes of the language, and its reason beside each other one."""
    return _Decided(graph, reasons, hints).result() if reasons else graph


class _Decided(GraphRewrite):
    def __init__(self, graph: Graph, reasons: dict[Opaque, Reason | None], hints: Hints):
        super().__init__(graph, "eager")
        self.reasons, self.hints = reasons, hints
        self.meanings: dict[Opaque, Expr] = {}          # of calls that become nodes, over new nodes

    def opaque(self, node: Opaque) -> Opaque | Compute:
        """The call; or the contraction in its meaning as a node."""
        made = super().opaque(node)
        if node not in self.reasons:
            return made
        c, reason = within(made.meaning), self.reasons[node]
        if reason is not None:
            return replace(made, reason=f"contraction {size_text(c, self.hints)}: {reason}")
        shape, _, _, device = spec_parts(made.results[0])
        self.meanings[node] = made.meaning
        return Compute(shape, None, c.fold, device)

    def opaque_result(self, node: Result) -> Result | Compute:
        """What stands around the contraction, as a node."""
        call = self.nodes[node.opaque]
        if isinstance(call, Opaque):
            return super().opaque_result(node)
        fold, product = within(self.meanings[node.opaque]).fold, Load(call, tuple(axis(i, s) for i, s in enumerate(call.shape)))
        around = Rewriter(leaf=lambda e: product if e is fold else None)(self.meanings[node.opaque])
        return Compute(node.shape, node.strides, around, node.device)
