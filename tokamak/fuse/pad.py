"""Products of 16-bit matrices whose rows begin anywhere, made a little larger: zeros behind the extents that are no multiple of eight elements.

    mm(x[4096, 1024], w[1024, 50257])    becomes    mm(x, w'[1024, 50264]), of which nobody reads the last seven columns

The vendor's fast kernels want every row of every factor and of the result at a multiple of 16 bytes. What is computed is written at the wider pitch at
once; what is in memory already is copied, which is little beside the product.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..ir.dtype import I64
from ..ir.expr import Const, Coord, Load, Op
from ..ir.graph import Compute, Graph, Opaque, Result, View
from ..ir.index import Axis, Index, as_index, axis, substitute
from ..ir.rewrite import GraphRewrite
from ..ir.text import spec_parts
from .price import RATES, Rates

PITCH = 8               # elements of 16 bits: 16 bytes
UNALIGNED = {1: 96e12, 2: 245e12, 4: 262e12}     # operations a second by the power of two that divides the extents, where the rate is 700e12: products of
                        # 4096 x 1024 x 50257 in 4.40 ms forward, 3.06 and 2.88 backward, 0.58, 0.53 and 0.55 so; x 30522: 1.04, 0.96, 1.09; 0.35, 0.32, 0.35
                        # x 50258 and x 50260: 1.60, x 50264: 0.56; 4096 x 4092 x 4096: 0.53, 4096 x 4096 x 4092: 0.49, x 4096: 0.17
WORTH = 2.0             # times as much as copying takes that has to be saved


@dataclass(frozen=True)
class _Larger:
    """What a call is made of: positions of its matrices, and of a vector that is added, among its arguments; extents (rows, depth, columns) before and
    after."""
    matrices: tuple[int, int]
    added: int | None
    before: tuple[int, int, int]
    after: tuple[int, int, int]


def padded(graph: Graph, target, products: Mapping) -> Graph:
    """`graph` with such products made larger where that pays, on GPUs that were measured. `products`: target of a call -> the positions of a vector that is
    added (or None) and of its two matrices."""
    rates = RATES.get(tuple(target.arch[:2])) if target.kind == "gpu" and not target.ordered else None
    found = {n: made for n in graph.nodes if isinstance(n, Opaque) and (made := _larger(n, products.get(n.target), rates)) is not None} if rates is not None else {}
    return _Padded(graph, found).result() if found else graph


def _larger(call: Opaque, positions: tuple | None, rates: Rates) -> _Larger | None:
    if positions is None or call.kwargs:
        return None
    added, (a, b) = positions
    left, right = call.args[a], call.args[b]
    extents = tuple(s.constant for s in (*left.shape, right.shape[1]))
    if None in extents or not left.node.dtype.is_half or added is not None and [x.constant for x in call.args[added].shape] != [extents[2]]:
        return None
    rows, depth, columns = extents
    along = [columns, *(x for v, (first, second) in ((left, (rows, depth)), (right, (depth, columns)))
                        for x in ((second,) if v.strides[1] == 1 else (first,) if v.strides[0] == 1 else ()))]
    bad = [x for x in along if x % PITCH]
    if not bad:
        return None
    after = tuple(-(-x // PITCH) * PITCH if x in bad else x for x in extents)
    made = _Larger((a, b), added, extents, after)
    if _element(left) is None or _element(right) is None or added is not None and _element(call.args[added]) is None:
        return None
    slow = UNALIGNED[min(x & -x for x in bad)]
    saved = 2 * rows * depth * columns * (1 / slow - 1 / rates.products)
    copied = sum(4 * p * q for p, q, old in ((after[0], after[1], extents[:2]), (after[1], after[2], extents[1:])) if (p, q) != old)
    copied += 4 * rows * columns if after[2] != columns else 0
    return made if saved > WORTH * (copied / rates.copy + 3 * rates.step) else None


def _element(view: View) -> tuple[Index, ...] | None:
    """The index in the view's node of its element (Axis(0), Axis(1), ...); None where the view is no window on the node's whole rows and columns."""
    if view.offset != 0 or any(s.constant is None for s in (*view.node.shape, *view.node.strides, *view.strides)):
        return None
    left = {d: (s.constant, t.constant) for d, (s, t) in enumerate(zip(view.node.shape, view.node.strides)) if s != 1}
    index = [as_index(0) for _ in view.node.shape]
    for v, (extent, stride) in enumerate(zip(view.shape, view.strides)):
        inner = 1
        while inner < extent.constant:
            d = next((d for d, (_, t) in left.items() if t == stride.constant * inner), None)
            if d is None:
                return None
            size, _ = left.pop(d)
            at = axis(v, extent) // inner if inner > 1 else axis(v, extent)
            index[d] = at if inner * size == extent.constant else at % size
            inner *= size
        if inner != extent.constant:
            return None
    return tuple(index) if not left else None


class _Padded(GraphRewrite):
    def __init__(self, graph: Graph, found: dict[Opaque, _Larger]):
        super().__init__(graph, "eager")
        self.found = found
        self.whole: dict[Result, Compute] = {}          # a result that became wider -> its values as they were laid out

    def result(self) -> Graph:
        made = super().result()
        origins = {new: self.graph.origins[old] for old, new in self.whole.items() if old in self.graph.origins}
        return replace(made, origins={**origins, **made.origins})

    def opaque(self, node: Opaque) -> Opaque:
        """The call, on wider windows; what another call is handed of a wider result is copied."""
        made = super().opaque(node)
        if any(r in self.whole for r in node.reads):
            made = replace(made, reads=tuple(dict.fromkeys(self.whole.get(r, self.nodes[r]) for r in node.reads)), meaning=None)
        plan = self.found.get(node)
        if plan is None:
            return made
        (a, b), args, (rows, depth, columns) = plan.matrices, list(made.args), plan.after
        args[a], args[b] = _wider(args[a], (rows, depth)), _wider(args[b], (depth, columns))
        if plan.added is not None:
            args[plan.added] = _wider(args[plan.added], (columns,))
        spec = _wider_spec(made.results[0], (as_index(rows), as_index(columns)))
        why = f"{made.reason}; {' x '.join(map(str, plan.before))} made {' x '.join(map(str, plan.after))}, so that rows begin at whole words"
        return Opaque(made.target, tuple(args), made.kwargs, (spec,), made.single, why, tuple(dict.fromkeys(x.node for x in args if isinstance(x, View))))

    def opaque_result(self, node: Result) -> Result:
        plan = self.found.get(node.opaque)
        if plan is None:
            return super().opaque_result(node)
        shape, strides, dtype, device = spec_parts(self.nodes[node.opaque].results[0])
        made = Result(self.nodes[node.opaque], node.position, shape, strides, dtype, device)
        if plan.after[2] != plan.before[2]:
            self.whole[node] = Compute(node.shape, node.strides, Load(made, tuple(axis(i, s) for i, s in enumerate(node.shape))), node.device)
        return made

    def mapped(self, x):
        if isinstance(x, View) and x.node in self.whole:
            return View(self.whole[x.node], x.shape, x.strides, x.offset)
        return super().mapped(x)


def _wider(view: View, extents: tuple[int, ...]) -> View:
    """A window of `extents` on a node that holds the view's elements, zeros behind them, contiguous along the same dimension; the view where it is as large."""
    if tuple(s.constant for s in view.shape) == extents:
        return view
    order = (1, 0) if len(extents) == 2 and view.strides[1] != 1 else tuple(range(len(extents)))
    place = {d: i for i, d in enumerate(order)}
    shape = tuple(as_index(extents[d]) for d in order)
    at = {Axis(d, s): axis(place[d], as_index(extents[d])) for d, s in enumerate(view.shape)}
    guard = None
    for d, s in enumerate(view.shape):
        if s != extents[d]:
            one = Op("lt", Coord(axis(place[d], as_index(extents[d]))), Const(s.constant, I64))
            guard = one if guard is None else Op("and", guard, one)
    index = tuple(substitute(i, at) for i in _element(view))
    node = Compute(shape, None, Load(view.node, index, guard, Const(0.0, view.node.dtype)), view.node.device)
    return View(node, tuple(map(as_index, extents)), tuple(node.strides[place[d]] for d in range(len(extents))), as_index(0))


def _wider_spec(spec, shape: tuple[Index, ...]):
    strides = (shape[1], as_index(1))
    return (shape, strides, *spec[2:]) if isinstance(spec, tuple) else replace(spec, shape=shape, strides=strides)
