"""Products of 16-bit matrices whose rows begin anywhere, made a little larger: zeros behind the extents that are no multiple of eight elements.

    mm(x[4096, 1024], w[1024, 50257])    becomes    mm(x, w'[1024, 50264]), of which nobody reads the last seven columns

The vendor's fast kernels want every row of every factor and of the result at a multiple of 16 bytes. What is computed is written at the wider pitch
at once; what is in memory already is copied, which is little beside the product.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..ir.dtype import I64
from ..ir.expr import Const, Coord, Load, Op
from ..ir.graph import Compute, Graph, Node, Opaque, Result, View, shown_nodes
from ..ir.index import Axis, Index, as_index, axis, row_major
from ..ir.substitution import substitute
from ..ir.rewrite import GraphRewrite
from ..ir.text import spec_parts
from .contraction import PITCH, contractions
from .cost import estimates, pinned_nodes
from .price import RATES, UNALIGNED, Rates, writes_any_row
from .products import PRODUCTS, ragged, vendors

BATCHED = {True: {1: 28e12, 2: 41e12, 4: 41e12}, False: {1: 50e12, 2: 75e12, 4: 75e12}}     # of many at once: are they the result's, or a factor's?
                        # 768 of 197 x 64 x 197 in 135 to 156 us, x 197 x 64 in 91, with 198 in 100 and 50, in whole words 40 and 34; 96 of 577 x 64 x
                        # 577 in 116 and 37, x 577 x 64 in 96 and 31
DEEP = 256              # of a depth from which on many at once are like one: 16 of 1025 x 512 x 1023 in 178 us and 33, 64 of 197 x 1024 x 197 in 73,
                        # 24
MOVED = 2.4e12          # bytes a second at most, of what many at once read and write
WORTH = 2.0             # times as much as copying takes that has to be saved
SPARED = 1.1            # times as long as the vendor's call and a copy of its result a kernel of ours may take, which needs no second result


@dataclass(frozen=True)
class _Larger:
    """What a call is made of: positions of its matrices, and of what is added, among its arguments; extents (rows, depth, columns) before and after;
    how many products it makes, None for one without an axis of them."""
    matrices: tuple[int, int]
    added: int | None
    before: tuple[int, int, int]
    after: tuple[int, int, int]
    batch: int | None = None

    def shape(self, *extents: int) -> tuple[int, ...]:
        """The shape of matrices of these extents."""
        return extents if self.batch is None else (self.batch, *extents)

    @property
    def changed(self) -> bool:
        """Does the result lie otherwise: are its rows longer, or is there more between one matrix and the next?"""
        return self.after[2] != self.before[2] or self.batch is not None and self.after[0] != self.before[0]


def padded(graph: Graph, target, products: Mapping, choice: str = "") -> Graph:
    """`graph` with such products made larger where that pays, on GPUs that were measured. `products`: target of a call -> the positions of what is
    added (or None) and of its two matrices. `choice`: as for `contract`."""
    rates = RATES.get(tuple(target.arch[:2])) if target.kind == "gpu" and not target.ordered else None
    if rates is None:
        return graph
    there = _in_memory(graph)
    found = {n: made for n in graph.nodes if isinstance(n, Opaque) and (made := _larger(n, products.get(n.target), rates, there)) is not None}
    own = _by_kernels(graph, found, target) if found and choice != "vendor" else set()
    found = {n: made for n, made in found.items() if n not in own}
    return _Padded(graph, found).result() if found else graph


def _in_memory(graph: Graph) -> Callable[[Node], bool]:
    """Is a node in memory at its own pitch, whatever one call does with it: does another call, or a caller, have it, or was it there?"""
    shown = shown_nodes(graph)
    calls = Counter(r for n in graph.nodes if isinstance(n, Opaque) for r in set(n.reads))
    return lambda n: n in shown or not isinstance(n, Compute) or calls[n] > 1


def _by_kernels(graph: Graph, found: Mapping[Opaque, _Larger], target) -> set[Opaque]:
    """Those of `found` that stay as they are, since a kernel of ours writes such rows: only the result's are bad, and it has to lie in memory as it
    is, so that a wider one would be copied."""
    shown, made, hints = pinned_nodes(graph), contractions(graph), estimates(graph, target)
    copied = {r.opaque for r in graph.nodes if isinstance(r, Result) and r in shown}

    def spared(n: Opaque) -> bool:
        c, plan = made.get(n), found[n]
        if c is None or n not in copied or plan.after[:2] != plan.before[:2] or not writes_any_row(c, target, hints):
            return False
        sizes, p = c.sizes(hints), PRODUCTS[target.arch[:2]]
        return ragged(p, target.threads, sizes) < SPARED * (vendors(p, target.threads, sizes) + 4 * sizes[1] * sizes[2] / p.copy + p.pass_)
    return {n for n in found if spared(n)}


def _larger(call: Opaque, positions: tuple | None, rates: Rates, there: Callable[[Node], bool]) -> _Larger | None:
    """How `call` is made larger; None where it is not. `there`: is a node in memory, so that a larger one is a copy?"""
    if positions is None:
        return None
    added, (a, b) = positions
    left, right = call.args[a], call.args[b]
    extents = tuple(s.constant for s in (*left.shape, right.shape[-1]))
    if None in extents or not left.node.dtype.is_half:
        return None
    *batch, rows, depth, columns = extents
    before, along = (rows, depth, columns), {2}             # positions of extents that rows of the result, or of a factor, have
    for v, (first, second) in ((left, (0, 1)), (right, (1, 2))):
        along |= {second} if v.strides[-1] == 1 else {first} if v.strides[-2] == 1 else set()
    after = tuple(-(-x // PITCH) * PITCH if n in along else x for n, x in enumerate(before))
    if before == after:
        return None
    made = _Larger((a, b), added, before, after, batch[0] if batch else None)
    wider = [(v, old, new) for v, old, new in ((left, before[:2], after[:2]), (right, before[1:], after[1:])) if old != new]
    if any(_element(v) is None for v, _, _ in wider) or added is not None and not _can_be_added(call.args[added], made):
        return None
    copied = sum(4 * new[0] * new[1] for v, _, new in wider if there(v.node)) + 4 * rows * columns * made.changed
    saved = _seconds(made, True, rates) - _seconds(made, False, rates)
    return made if saved > WORTH * ((made.batch or 1) * copied / rates.copy + 3 * rates.step) else None


def _seconds(x: _Larger, ragged: bool, rates: Rates) -> float:
    """What the vendor takes for a product with its rows as they are (`ragged`), or where they begin at whole words."""
    rows, depth, columns = x.before
    batch, least = x.batch or 1, min(e & -e for e, larger in zip(x.before, x.after) if e != larger)
    moved = 2 * batch * (rows * depth + depth * columns + rows * columns) / MOVED if x.batch is not None else 0.0
    slow = UNALIGNED if x.batch is None or depth >= DEEP else BATCHED[columns != x.after[2]]
    return max(2 * batch * rows * depth * columns / (slow[least] if ragged else rates.products), moved)


def _can_be_added(view, x: _Larger) -> bool:
    """Is `view` a vector of all columns, or a value of the result's own shape, of which a larger one can be made?"""
    shapes = (x.before[2],), x.shape(x.before[0], x.before[2])
    return isinstance(view, View) and tuple(s.constant for s in view.shape) in shapes and _element(view) is not None


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
        args[a], args[b] = _wider(args[a], plan.shape(rows, depth)), _wider(args[b], plan.shape(depth, columns))
        if plan.added is not None:
            args[plan.added] = _wider(args[plan.added], (columns,) if len(args[plan.added].shape) == 1 else plan.shape(rows, columns))
        spec = _wider_spec(made.results[0], tuple(map(as_index, plan.shape(rows, columns))))
        why = f"{made.reason}; {' x '.join(map(str, plan.before))} made {' x '.join(map(str, plan.after))}, so that rows begin at whole words"
        handed = tuple(dict.fromkeys(x.node for x in args if isinstance(x, View)))
        return Opaque(made.target, tuple(args), made.kwargs, (spec,), made.single, why, handed)

    def opaque_result(self, node: Result) -> Result:
        plan = self.found.get(node.opaque)
        if plan is None:
            return super().opaque_result(node)
        shape, strides, dtype, device = spec_parts(self.nodes[node.opaque].results[0])
        made = Result(self.nodes[node.opaque], node.position, shape, strides, dtype, device)
        if plan.changed:
            self.whole[node] = Compute(node.shape, node.strides, Load(made, tuple(axis(i, s) for i, s in enumerate(node.shape))), node.device)
        return made

    def mapped(self, x):
        if isinstance(x, View) and x.node in self.whole:
            return View(self.whole[x.node], x.shape, x.strides, x.offset)
        return super().mapped(x)


def _wider(view: View, extents: tuple[int, ...]) -> View:
    """A window of `extents` on a node that holds the view's elements, zeros behind them, contiguous along the same dimension; the view where it is as
    large."""
    if tuple(s.constant for s in view.shape) == extents:
        return view
    order = list(range(len(extents)))
    if len(order) > 1 and view.strides[-1] != 1:
        order[-2:] = order[:-3:-1]
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
    strides = row_major(shape)
    return (shape, strides, *spec[2:]) if isinstance(spec, tuple) else replace(spec, shape=shape, strides=strides)
