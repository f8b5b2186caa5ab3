"""Index tensors that are computed from nothing but their coordinates: torch's own decompositions of resampling, position numbers (arange), rolls.

    closed_form(expression, bound) -> Index | None
    whole_numbers(expression) -> Index | None

The values of such a tensor are known while a graph is read. Where they follow clamp((p*i + c) // q), the gather is an index map like any view, with
nothing to fetch and nothing to check. Values are computed as the language defines them, in the types of the program: rounding is the program's own.
A kernel may round less (a product that is added to something), and floor(x) is another number then where x is nearly a whole one. So what becomes a
whole number of a coordinate does so here, once for the index and for the weights that are made of the rest.
"""
from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

import numpy as np

from ..ir.expr import Coord, Expr, Load, Random, Rewriter, Scalar, walk
from ..ir.graph import Compute, Graph, View, elements, is_pointwise, topological
from ..ir.index import Axis, FloorDiv, Index, Max, Min, Mod, as_index
from ..ir.normal import floordiv, maximum, minimum
from ..ir.reference import evaluate

LARGEST = 1 << 16      # longest index tensor whose values are looked at


def closed_form(expr: Expr, bound: Index) -> Index | None:
    """`expr` (i64) as an index over its one axis, where its values depend on nothing else, all lie in 0 .. bound - 1 and follow the form above."""
    values = _known(expr) if bound.constant is not None else None
    if values is None or values.min() < 0 or values.max() >= bound.constant:
        return None
    return _fit(values, *expr.free, bound.constant)


def whole_numbers(expr: Expr) -> Index | None:
    """`expr`, which rounds a float to whole numbers, as an index over its one axis, where its values depend on nothing else and follow that form."""
    values = _known(expr)
    if values is None or not np.isfinite(values).all() or np.abs(values).max() > LARGEST:
        return None
    whole = values.astype(np.int64)
    return _fit(whole, *expr.free, int(whole.max()) + 1)


def _known(expr: Expr) -> np.ndarray | None:
    """The values of `expr` along its one axis, if they are known."""
    extents = [a.extent.constant for a in expr.free]
    if len(extents) != 1 or extents[0] is None or not 1 < extents[0] <= LARGEST:
        return None
    return _values(expr, *expr.free)


@lru_cache(maxsize=1024)
def _values(expr: Expr, axis: Axis) -> np.ndarray | None:
    """The values along `axis`; None when they depend on an input."""
    first = Axis(0, axis.extent)
    node = Compute((axis.extent,), None, Rewriter({axis: as_index(first)})(expr))
    nodes = topological([node])
    if not all(isinstance(n, Compute) and is_pointwise(n) and (elements(n).constant or LARGEST) < LARGEST and _settled(n.expr) for n in nodes):
        return None
    view = View(node, node.shape, node.strides, as_index(0))
    return evaluate(Graph((), tuple(nodes), (view,)), []).outputs[0]


def _settled(expr: Expr) -> bool:
    """Nothing in `expr` is known only at a call."""
    parts = walk(expr)
    indices = [i for e in parts for i in ((e.index,) if isinstance(e, Coord) else e.index if isinstance(e, Load) else ())]
    return all(map(_fixed, indices)) and not any(isinstance(e, (Scalar, Random)) for e in parts)


def _fixed(index: Index) -> bool:
    """Made of coordinates and numbers alone: no size, nothing gathered."""
    return all(isinstance(a, Axis) or (isinstance(a, (FloorDiv, Mod, Min, Max)) and _fixed(a.a) and _fixed(a.b)) for a in index.atoms())


def _fit(values: np.ndarray, axis: Axis, bound: int) -> Index | None:
    """clamp((p*i + c) // q, lowest, highest) with these values, the slope p/q from the ratio of the extents or from the length of a run."""
    low, high = int(values.min()), int(values.max())
    spots = np.arange(len(values))
    inner = (values > low) & (values < high)
    for slope in _slopes(values, bound):
        p, q = slope.numerator, slope.denominator
        for sure in (np.ones_like(inner), inner):
            if not sure.any():
                continue
            rest = values[sure] * q - p * spots[sure]
            c = int(rest.max())
            if c > int(rest.min()) + q - 1:
                continue
            if np.array_equal(np.clip((p * spots + c) // q, low, high), values):
                form = floordiv(as_index(axis) * p + c, q)
                return form if sure.all() else minimum(maximum(form, low), high)
    return None


def _slopes(values: np.ndarray, bound: int) -> list[Fraction]:
    n = len(values)
    steps = np.flatnonzero(np.diff(values))
    found = [Fraction(int(values[1] - values[0])), Fraction(1 if len(steps) else 0)]
    if len(steps) > 1:
        found.append(Fraction(1, int(np.diff(steps).max())))
    found.append(Fraction(bound, n))
    if n > 1 and bound > 1:
        found.append(Fraction(bound - 1, n - 1))
    return list(dict.fromkeys(found))
