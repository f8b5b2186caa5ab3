"""The invariants of a Graph, checked in one pass: what `graph` promises, every later stage relies on.

Constructors check expressions at birth; here is what concerns a node among others. Whether an unguarded index stays inside is proved only where its
bounds show it lies outside everywhere; the reference checks the rest on real values.
"""
from __future__ import annotations

from typing import NoReturn

from ..errors import InternalError
from . import ops
from .dtype import BOOL
from .expr import Const, Expr, Load, Reduce, Scan, loads, walk
from .graph import Compute, Graph, Input, Opaque, Result, Scatter, View, fold, reads
from .index import Axis, Index, Size, as_index
from .ranges import bounds
from .text import spec_parts


def check_graph(graph: Graph) -> Graph:
    """`graph` itself; InternalError names the first invariant that does not hold, and where."""
    _Check(graph).run()
    return graph


class _Check:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.known: dict = {}
        self.where = "graph"
        self.sizes = {*graph.sizes, *(i for i in graph.inputs if isinstance(i, str))}

    def fail(self, message: str) -> NoReturn:
        raise InternalError(f"{self.graph.name}, {self.where}: {message}")

    def run(self) -> None:
        graph = self.graph
        for i, node in enumerate(graph.nodes):
            origin = graph.origin(node)
            self.where = f"node {i} ({type(node).__name__} {getattr(node, 'name', '') or origin.name})".replace(" )", ")")
            if node in self.known:
                self.fail("stands twice in the graph")
            for r in reads(node):
                if r not in self.known:
                    self.fail(f"reads a {type(r).__name__} ({getattr(r, 'name', graph.origin(r).name)}) that does not stand before it")
            _NODE_CHECKS.get(type(node), _Check.unknown)(self, node)
            self.known[node] = i
        self.where = "inputs"
        self.inputs()
        for i, out in enumerate(graph.outputs):
            self.where = f"output {i}"
            self.argument(out)
        self.writes()

    def unknown(self, node) -> None:
        self.fail(f"{type(node).__name__} is no node")

    # -- values ------------------------------------------------------------------------------------------------------
    def layout(self, shape, strides) -> None:
        if len(shape) != len(strides):
            self.fail(f"{len(shape)} extents but {len(strides)} strides")
        for s in (*shape, *strides):
            if not isinstance(s, Index):
                self.fail(f"extents and strides are Index, not {type(s).__name__}")
            if s.axes():
                self.fail(f"the extent or stride {s!r} depends on an axis")
            if s.constant is not None and s.constant < 0:
                self.fail(f"the extent or stride {s!r} is negative")

    def input(self, node: Input) -> None:
        self.layout(node.shape, node.strides)
        self.sizes.update(a.name for s in node.shape for a in s.atoms() if isinstance(a, Size) and s is as_index(a))

    def known_sizes(self, shape) -> None:
        for s in shape:
            for a in s.atoms():
                if isinstance(a, Size) and a.name not in self.sizes:
                    self.fail(f"nothing gives the size {a.name}")

    def compute(self, node: Compute) -> None:
        self.layout(node.shape, node.strides)
        self.known_sizes(node.shape)
        root = fold(node)
        for e in walk(node.expr):
            if isinstance(e, (Reduce, Scan)) and e is not root:
                self.fail(f"a {e.monoid} {'fold' if isinstance(e, Reduce) else 'scan'} stands inside its expression: every fold is a node of its own")
            if isinstance(e, Load):
                self.load(e)
        if isinstance(root, Reduce):
            ids = [a.id for a in root.over]
            if len(set(ids)) != len(ids):
                self.fail(f"the fold binds an axis twice: {root.over}")
            if any(i < len(node.shape) for i in ids):
                self.fail(f"the fold binds {root.over}, but ids below {len(node.shape)} are the value's own axes")
        self.free(node.expr, node.axes)
        if isinstance(root, Scan) and root.along not in node.axes:
            self.fail(f"it scans along {root.along!r}, which is no axis of it")

    def free(self, e: Expr, axes) -> None:
        for a in e.free:
            if a not in axes:
                self.fail(f"axis {a!r} with extent {a.extent!r} is neither an axis of it nor bound")

    def load(self, e: Load) -> None:
        if e.guard is not None:
            return
        for i, extent in zip(e.index, e.node.shape):
            low, high = bounds(i)
            outside = low is not None and _constant(extent - 1 - low) < 0 or high is not None and _constant(high) < 0
            if outside and not any(a.extent == 0 for a in e.free):
                self.fail(f"{e!r} reads outside the extent {extent!r}")

    def scatter(self, node: Scatter) -> None:
        self.layout(node.shape, node.strides)
        self.known_sizes((*node.shape, *node.domain))
        if len(node.index) != len(node.shape):
            self.fail(f"{len(node.index)} indices into {len(node.shape)} dimensions")
        if isinstance(node.base, Expr):
            if not isinstance(node.base, Const):
                self.fail(f"its base is a {type(node.base).__name__}, neither a node nor a Const")
        elif node.base.shape != node.shape:
            self.fail(f"its base has shape {node.base.shape}, it has {node.shape}")
        if node.base.dtype is not node.dtype:
            self.fail(f"its base is {node.base.dtype}, its value {node.dtype}")
        if node.monoid != "last" and ops.MONOIDS.get(node.monoid) != 1:
            self.fail(f"it combines by '{node.monoid}'")
        if node.guard is not None and node.guard.dtype is not BOOL:
            self.fail(f"its guard is {node.guard.dtype}")
        for e in (node.value, *((node.guard,) if node.guard is not None else ())):
            self.free(e, node.axes)
            if any(isinstance(x, (Reduce, Scan)) for x in walk(e)):
                self.fail("a fold stands inside it")
            for x in loads(e):
                self.load(x)
        for i in node.index:
            if not i.axes() <= set(node.axes):
                self.fail(f"the index {i!r} depends on an axis outside its domain")

    def opaque(self, node: Opaque) -> None:
        for view in _views((node.args, node.kwargs)):
            if view.node not in node.reads:
                self.fail("an argument's node is missing in `reads`")
        self.argument(node.args)
        self.argument(node.kwargs)
        if node.meaning is not None:
            self.meaning(node)

    def meaning(self, node: Opaque) -> None:
        if len(node.results) != 1 or node.results[0] is None:
            self.fail("a meaning belongs to a call of one tensor")
        shape, _, dtype, _ = spec_parts(node.results[0])
        if node.meaning.dtype is not dtype:
            self.fail(f"it gives {dtype}, its meaning is {node.meaning.dtype}")
        self.free(node.meaning, tuple(Axis(i, s) for i, s in enumerate(shape)))
        for e in loads(node.meaning):
            self.load(e)
            if e.node not in node.reads:
                self.fail("its meaning reads what it does not")

    def result(self, node: Result) -> None:
        self.layout(node.shape, node.strides)
        if not 0 <= node.position < len(node.opaque.results) or node.opaque.results[node.position] is None:
            self.fail(f"the opaque call has no tensor at position {node.position}")

    # -- the border --------------------------------------------------------------------------------------------------
    def inputs(self) -> None:
        names = [i.name if isinstance(i, Input) else i for i in self.graph.inputs]
        if len(set(names)) != len(names):
            self.fail("two inputs have one name")
        for i in self.graph.inputs:
            if isinstance(i, Input) and i not in self.known:
                self.fail(f"{i.name} is no node of the graph")

    def writes(self) -> None:
        targets = [w.target for w in self.graph.writes]
        for i, w in enumerate(self.graph.writes):
            self.where = f"write {i}"
            if w.target not in self.graph.inputs:
                self.fail("its target is no input")
            if targets.count(w.target) > 1:
                self.fail(f"{w.target.name} is written twice")
            self.view(w.source)
            if w.source.shape != w.target.shape or w.source.node.dtype is not w.target.dtype:
                self.fail(f"{w.target.name} is {w.target.dtype}{list(w.target.shape)}, it receives {w.source.node.dtype}{list(w.source.shape)}")

    def argument(self, x) -> None:
        """An output, or an argument of an opaque call."""
        if isinstance(x, View):
            self.view(x)
        elif isinstance(x, Expr):
            if x.free or loads(x):
                self.fail(f"{x!r} is no number of the host")
        elif isinstance(x, (tuple, list)):
            for v in x:
                self.argument(v)
        elif isinstance(x, dict):
            self.argument(tuple(x.values()))

    def view(self, v: View) -> None:
        if v.node not in self.known:
            self.fail(f"it shows a {type(v.node).__name__} that is no node of the graph")
        self.layout(v.shape, v.strides)
        size = _last(v.node.shape, v.node.strides, as_index(0))
        last = _last(v.shape, v.strides, v.offset)
        if last is not None and (v.offset.constant < 0 or size is not None and last > size):
            self.fail(f"it shows elements {v.offset!r} to {last} of a node whose last is {size}")
        if last is not None and size is None and all(s.constant is not None for s in v.node.shape):
            self.fail("it shows elements of an empty node")


def _constant(i: Index) -> int:
    """The value of a constant index, 0 for one that depends on sizes."""
    return i.constant or 0


def _last(shape, strides, offset: Index) -> int | None:
    """The position of the last element; None for an empty or symbolic one."""
    numbers = [i.constant for i in (*shape, *strides, offset)]
    if None in numbers or any(s == 0 for s in shape):
        return None
    return numbers[-1] + sum((n - 1) * s for n, s in zip(numbers[:len(shape)], numbers[len(shape):-1]))


def _views(x) -> list[View]:
    if isinstance(x, View):
        return [x]
    if isinstance(x, (tuple, list)):
        return [v for y in x for v in _views(y)]
    if isinstance(x, dict):
        return _views(tuple(x.values()))
    return []


_NODE_CHECKS = {Input: _Check.input, Compute: _Check.compute, Scatter: _Check.scatter, Opaque: _Check.opaque, Result: _Check.result}
