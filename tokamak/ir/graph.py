"""Graphs: the values of a program and how they come about.

    Graph ::= Node in order; outputs; writes
    Node  ::= Input | Compute(shape, strides, dtype, expr) | Scatter(base, index, value, monoid | last) | Opaque(aten op, args, meaning?)
            | Result(opaque, i)
    write ::= Input receives Node, after every read of the old value

Layout is part of a value: `strides` are those that torch traced, in elements, and a node's memory has exactly them. The axes of a Compute are
`Axis(0, shape[0]) ... Axis(n - 1, shape[n - 1])`; a Reduce binds axes with higher ids. A Reduce or Scan stands at the root of a Compute's
expression (under casts), so that every fold is a node of its own: `check.check_graph` holds this.

Nodes are immutable. Compute nodes are interned: equal computations are one node (`tag` tells copies apart that must not share memory).
Names, source lines and module paths ride beside the nodes in `Graph.origins`: a node's identity never depends on them.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from .dtype import DType
from .expr import _fetches, Cast, Expr, Load, Reduce, Scan, loads, walk
from .index import Axis, Index, as_index, row_major
from .table import Table

_NODES = Table()


@dataclass(frozen=True, eq=False)
class Input:
    """A tensor argument. `name` is the argument's name in the captured graph; `offset` in elements within its storage is the host's business."""
    name: str
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: DType
    device: str = "cpu"


class Compute:
    """A tensor whose element at (Axis(0), ..., Axis(n-1)) is `expr`. `reads` is kept with it by the function of that name."""
    __slots__ = ("shape", "strides", "dtype", "expr", "device", "tag", "reads", "__weakref__")

    def __new__(cls, shape, strides, expr: Expr, device: str = "cpu", tag: int = 0):
        shape = tuple([as_index(s) for s in shape])
        strides = row_major(shape) if strides is None else tuple([as_index(s) for s in strides])
        key = (shape, strides, expr, device, tag)
        known = _NODES.known.get(key)
        found = known() if known is not None else None
        if found is None:
            if len(strides) != len(shape):
                raise TypeError(f"{len(shape)} extents but {len(strides)} strides")
            for a in expr.free:
                if a.id >= len(shape) or a.extent is not shape[a.id]:
                    raise TypeError(f"axis {a!r} with extent {a.extent!r} does not belong to a value of shape {shape}")
            found = object.__new__(cls)
            found.shape, found.strides, found.expr, found.dtype, found.device, found.tag = shape, strides, expr, expr.dtype, device, tag
            found.reads = None
            _NODES.put(key, found)
        return found

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(i, s) for i, s in enumerate(self.shape))


@dataclass(frozen=True, eq=False)
class Scatter:
    """`base` with `value` combined in at `index`, for every coordinate of `domain` for which `guard` holds.

    `base` is a node of the result's shape, or a Const; `index` has one Index a result dimension, over Axis(0..len(domain)-1);
    `monoid` is a one-component monoid, or 'last' (duplicates: one of the values; on the CPU the last in row-major order).
    """
    base: Any
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    domain: tuple[Index, ...]
    index: tuple[Index, ...]
    value: Expr
    monoid: str
    guard: Expr | None = None
    device: str = "cpu"

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(Axis(i, s) for i, s in enumerate(self.domain))


@dataclass(frozen=True, eq=False)
class View:
    """A strided window on a node's memory: `strides` and `offset` in elements, relative to the node's first element."""
    node: "Node"
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    offset: Index


@dataclass(frozen=True, eq=False)
class Opaque:
    """A call that torch makes: `target(*args, **kwargs)`. `args` hold View, Index (a size), Scalar expressions and plain Python values, nested in
    tuples and dicts. `results` describes each output: (shape, strides, dtype, device) of a tensor, or None for anything else.
    `reason` says why it is opaque. `meaning`: an element of its one result over Axis(0..n-1), where the language can say what the call computes (a
    contraction); a fold may stand anywhere in it. What it loads is in `reads`."""
    target: Any
    args: tuple
    kwargs: dict
    results: tuple
    single: bool
    reason: str
    reads: tuple["Node", ...] = ()
    meaning: Expr | None = None


@dataclass(frozen=True, eq=False)
class Result:
    """Output `position` of an opaque call."""
    opaque: Opaque
    position: int
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: DType
    device: str = "cpu"


Node = Union[Input, Compute, Scatter, Opaque, Result]


@dataclass(frozen=True)
class Origin:
    """Where a node comes from: the aten operation, the user's source line, the module path."""
    op: str = ""
    file: str = ""
    line: int = 0
    code: str = ""
    module: str = ""
    name: str = ""        # the value's name in the captured graph


@dataclass(frozen=True, eq=False)
class Write:
    """`target` (an Input) receives the value of `source`, a View of a node, after every read of the old value."""
    target: Input
    source: View


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured program. `inputs`: Input, or the name of a host number, in calling order. `outputs`: View, Index (a size), Scalar, plain value or
    None."""
    inputs: tuple
    nodes: tuple[Node, ...]
    outputs: tuple
    writes: tuple[Write, ...] = ()
    origins: dict = field(default_factory=dict)      # node -> tuple[Origin, ...], first the one that names it
    sizes: dict = field(default_factory=dict)        # name of a Size atom, or of a Scalar that no input is -> text that computes it from the inputs
    hints: dict = field(default_factory=dict)        # Size atom name -> the value seen when the graph was traced: for cost only
    name: str = "graph"
    classes: dict = field(default_factory=dict)      # Size atom name -> the SizeClass (`fuse.sizes`) that kernels are made for

    def origin(self, node) -> Origin:
        found = self.origins.get(node)
        return found[0] if found else Origin()


def reads(node) -> tuple[Node, ...]:
    """The nodes that `node` reads, each once, in order of first use."""
    if isinstance(node, Compute):
        found = node.reads
        if found is None:
            found = node.reads = tuple({e.node: None for e in walk(node.expr) if e.__class__ is Load})
        return found
    if isinstance(node, Opaque):
        return node.reads
    if isinstance(node, Result):
        return (node.opaque,)
    return _scatter_reads(node) if isinstance(node, Scatter) else ()


def _scatter_reads(node: Scatter) -> tuple[Node, ...]:
    found = {x.node: None for x in loads(node.value, *((node.guard,) if node.guard is not None else ()), *_fetches(node.index))}
    if not isinstance(node.base, Expr):
        found[node.base] = None
    return tuple(found)


def elements(node) -> Index:
    """How many elements a tensor node has."""
    total = as_index(1)
    for s in node.shape:
        total = total * s
    return total


def is_pointwise(node) -> bool:
    """A Compute without a fold at its root."""
    return isinstance(node, Compute) and fold(node) is None


def readers_of(graph: Graph) -> dict[Node, list]:
    """Each node that is read -> the nodes that read it, in the graph's order."""
    found: dict = {}
    for n in graph.nodes:
        for r in reads(n):
            found.setdefault(r, []).append(n)
    return found


def shown_nodes(graph: Graph) -> set:
    """The nodes that the graph's outputs and writes show."""
    return {v.node for v in (*graph.outputs, *(w.source for w in graph.writes)) if isinstance(v, View)}


def fold(node: Compute):
    """The Reduce or Scan at the root of a Compute (under casts), or None."""
    e = node.expr
    while isinstance(e, Cast):
        e = e.arg
    return e if isinstance(e, (Reduce, Scan)) else None


def with_value(e: Expr, value: Expr) -> Expr:
    """`e` with `value` in the place of what stands under its casts (its fold)."""
    return Cast(e.dtype, with_value(e.arg, value), e.implicit) if isinstance(e, Cast) else value


def topological(roots) -> list[Node]:
    """Every node that `roots` need, producers first, roots in the order given."""
    done: dict = {}
    stack = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done[node] = None
        else:
            stack.append((node, True))
            stack.extend((r, False) for r in reversed(reads(node)) if r not in done)
    return list(done)
