"""Folds over small windows become chains of operations, on GPUs: a thread makes an element of its own from the few that it reads.

    out[o] = max[j](x[2 * o + j]) for j < 3    becomes    out[o] = max(max(x[2 * o], x[2 * o + 1]), x[2 * o + 2])

A tile would hold the window's elements beside each other, padded to powers of two (9 as 4 x 4) and folded across threads. A pooling's backward is a
fold over the windows that hold a position, so it becomes such a chain, too.
"""
from __future__ import annotations

import itertools

from ..ir.expr import Expr, Load, Op, Reduce, Rewriter, loads
from ..ir.graph import Compute, Graph, fold, with_value
from ..ir.index import as_index
from ..ir.normal import divide_exact
from ..ir.rewrite import replaced
from .sizes import runs_along

WINDOW = 27             # elements of the largest window that is unrolled: 3 x 3 x 3. ResNet-50's stem, 3 x 3: a training step on an H200 22.8 ms as
                        # tiles, 19.4 as chains and with what backward keeps of it
CHAINS = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and"}       # folds of one component -> of two


def unrolled(graph: Graph, target) -> Graph:
    """`graph` with every fold over a small window as a chain, on a GPU."""
    return replaced(graph, _chained) if target.kind == "gpu" and any(isinstance(n, Compute) and _chained(n) for n in graph.nodes) else graph


def _chained(n: Compute) -> Compute | None:
    """`n` without its fold, if that is one over windows."""
    part = fold(n)
    if not isinstance(part, Reduce) or not _window(part):
        return None
    return Compute(n.shape, n.strides, with_value(n.expr, _chain(part)), n.device, n.tag)


def _window(fold: Reduce) -> bool:
    """Does the fold take few elements, at positions that each depend on the element that is made as well as on the fold's axes?"""
    count = 1
    for a in fold.over:
        count *= a.extent.constant or WINDOW + 1
    if not 1 < count <= WINDOW or fold.monoid not in (*CHAINS, "argmax", "argmin"):
        return False
    read = loads(*fold.args)
    indices = [i.axes() for e in read for i in e.index]
    return all(any(a in axes and len(axes - set(fold.over)) for axes in indices) for a in fold.over) and not _pieces(fold, read)


def _pieces(fold: Reduce, read: list[Load]) -> bool:
    """Are these the pieces of rows, one behind the other in memory, that a tile reads as it reads rows (channels of a group)?"""
    a = fold.over[0]
    whole = lambda i: a not in i.axes() or i.coefficient(a) == 1 and divide_exact(i - as_index(a), a.extent) is not None
    return len(fold.over) == 1 and all(runs_along(e, a) and all(map(whole, e.index)) for e in read if any(a in i.axes() for i in e.index))


def _chain(fold: Reduce) -> Expr:
    """The fold's component as operations on its terms, in the order of its axes."""
    places = itertools.product(*(range(a.extent.constant) for a in fold.over))
    terms = [tuple(map(Rewriter({a: as_index(k) for a, k in zip(fold.over, at)}), fold.args)) for at in places]
    kept = terms[0]
    for term in terms[1:]:
        kept = (Op(CHAINS[fold.monoid], kept[0], term[0]),) if fold.monoid in CHAINS else _better(fold.monoid, kept, term)
    return kept[fold.component]


def _better(monoid: str, kept: tuple[Expr, Expr], term: tuple[Expr, Expr]) -> tuple[Expr, Expr]:
    """The pair (value, index) of two: `kept`, which comes first, unless the other's value is beyond it, or the first that is no number."""
    takes = Op("gt" if monoid == "argmax" else "lt", term[0], kept[0])
    if term[0].dtype.is_float:
        takes = Op("or", takes, Op("and", Op("isnan", term[0]), Op("not", Op("isnan", kept[0]))))
    return tuple(Op("where", takes, new, old) for new, old in zip(term, kept))
