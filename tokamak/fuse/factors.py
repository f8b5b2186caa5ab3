"""Factors of a sum that are the same for all that it adds, which need not be multiplied element by element.

    sum[p](f(p) * a / b)    becomes    sum[p](f(p)) * a / b

What is left is a product in one order, whatever order its factors came in, so that sums which differ by such factors alone are one sum. Where a
factor is infinite, what comes out is so or is NaN, as before, but not always the same of the two.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.dtype import F32
from ..ir.expr import Cast, Const, Expr, Load, Op, walk
from ..ir.graph import Compute, is_pointwise
from .inline import substituted

Factor = tuple[Expr, bool]          # and whether it divides


@dataclass(eq=False)
class Factors:
    """Of the sums of one graph. `stored`: values that everybody sees rounded; `seen`: those that sums have read so far, in order."""
    stored: set
    seen: dict = field(default_factory=dict)

    def of(self, e: Expr, over: frozenset) -> tuple[Expr, list[Factor]] | None:
        """(what is to be summed of `e` along the axes `over`, the factors of the sum); None where `e` has no such factors, or no others."""
        found = self._factors(e, over)
        outside = [(x, divides) for x, divides in found if not x.free & over]
        inside = [x for x, _ in found if x.free & over]
        if not inside or not outside:
            return None
        for x in walk(*inside):
            if isinstance(x, Load):
                self.seen.setdefault(x.node, len(self.seen))
        inside.sort(key=lambda x: [(len(walk(x)), self.seen[y.node]) for y in walk(x) if isinstance(y, Load)])
        made, *rest = *dict.fromkeys(inside), *(x for n, x in enumerate(inside) if x in inside[:n])       # what stands there twice comes last
        for x in rest:
            made = Op("mul", made, x)
        return made, sorted(outside, key=lambda x: x[1])

    def _factors(self, e: Expr, over: frozenset) -> list[Factor]:
        """The factors of `e`, those that divide it the same along `over`. What reads a value looks into it where that has such a factor."""
        if e.dtype is not F32 or not e.free & over:
            return [(e, False)]
        if isinstance(e, Op) and e.name == "mul":
            return [*self._factors(e.args[0], over), *self._factors(e.args[1], over)]
        if isinstance(e, Op) and e.name == "neg":
            return [*self._factors(e.args[0], over), (Const(-1.0, F32), False)]
        if isinstance(e, Op) and e.name == "div" and not e.args[1].free & over:
            return [*self._factors(e.args[0], over), (e.args[1], True)]
        inner = self._inner(e)
        found = self._factors(inner, over) if inner is not None else []
        return found if any(not x.free & over for x, _ in found) else [(e, False)]

    def _inner(self, e: Expr) -> Expr | None:
        """What a value that `e` reads is made of, without the rounding of its own that nothing else sees."""
        read = e.arg if isinstance(e, Cast) else e
        if not isinstance(read, Load) or read.guard is not None or not isinstance(read.node, Compute) or not is_pointwise(read.node):
            return None
        made = substituted(read, read.node.axes, read.node.expr)
        if made.dtype is F32:
            return made
        return made.arg if isinstance(made, Cast) and made.implicit and made.arg.dtype is F32 and read.node not in self.stored else None


def multiplied(e: Expr, factors: list[Factor]) -> Expr:
    """`e` times those."""
    for x, divides in factors:
        e = Op("div" if divides else "mul", e, x)
    return e
