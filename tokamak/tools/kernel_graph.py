"""Parts of a compiled program as graphs of their own, for what is looked at kernel by kernel."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ..ir.dtype import F64
from ..ir.expr import Cast, Const, Expr, Load, Random, Rewriter, Scalar
from ..ir.graph import Compute, Graph, Input, Scatter, View, reads
from ..ir.index import Size, as_index
from ..ir.text import node_names


def part(graph: Graph, nodes: Iterable, shown: Iterable, names: Mapping | None = None) -> tuple[Graph, dict, dict]:
    """(the graph of `nodes` alone, its inputs, its results): what they read has become an Input, called as in the graph's text (`names`: its nodes',
    where they are known), and `shown` are the outputs. Inputs and results: node of `graph` -> node of the part."""
    inside, names = tuple(nodes), node_names(graph) if names is None else names
    within = set(inside)
    outside = dict.fromkeys(r for n in inside for r in reads(n) if r not in within)
    inputs = {n: Input(names[n], n.shape, n.strides, n.dtype, n.device) for n in outside}
    new = dict(inputs)
    rewrite = _rewriter(new, lambda e: None)
    for n in inside:
        new[n] = _mapped(n, new, rewrite)
    outputs = tuple(View(new[n], n.shape, n.strides, as_index(0)) for n in shown)
    made = tuple(dict.fromkeys((*inputs.values(), *(new[n] for n in inside))))
    numbers = tuple(i for i in graph.inputs if not isinstance(i, Input))
    cut = Graph((*inputs.values(), *numbers), made, outputs, origins={new[n]: graph.origins[n] for n in new if n in graph.origins},
                sizes=graph.sizes, hints=graph.hints, name=graph.name)
    return cut, inputs, {n: new[n] for n in inside}


def exact(graph: Graph) -> tuple[Graph, dict]:
    """(`graph`, of Inputs, Computes and Scatters, with every floating value in f64 and nothing rounded on the way; node -> its node there)."""
    new: dict = {}

    def widened(e: Expr) -> Expr | None:
        if isinstance(e, Cast):
            return e.arg if e.dtype.is_float and e.arg.dtype is F64 else Cast(F64, e.arg) if e.dtype.is_float else None
        if isinstance(e, Const):
            return Const(e.value, F64) if e.dtype.is_float else None
        if isinstance(e, Scalar):
            return Scalar(e.argument, F64) if e.dtype.is_float else None
        return Cast(F64, e) if isinstance(e, Random) else None
    rewrite = _rewriter(new, widened)
    for n in graph.nodes:
        if isinstance(n, Input):
            new[n] = Input(n.name, n.shape, n.strides, F64, n.device) if n.dtype.is_float else n
        else:
            new[n] = _mapped(n, new, rewrite)
    return replace(graph, inputs=tuple(new.get(i, i) for i in graph.inputs), nodes=tuple(dict.fromkeys(new[n] for n in graph.nodes)),
                   outputs=tuple(View(new[v.node], v.shape, v.strides, v.offset) for v in graph.outputs), origins={}), new


def _rewriter(new: dict, other) -> Rewriter:
    """Loads read the nodes in `new`; `other(expression)` changes what is no load, or not (None)."""
    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load):
            return other(e)
        node = new.get(e.node, e.node)           # already new where a cast around the load went
        filler = Const(e.other.value, node.dtype) if e.other is not None else None
        return Load(node, e.index, e.guard, filler)
    return Rewriter(leaf=leaf)


def _mapped(n: Compute | Scatter, new: dict, rewrite: Rewriter) -> Compute | Scatter:
    if isinstance(n, Compute):
        return Compute(n.shape, n.strides, rewrite(n.expr), n.device, n.tag)
    base = rewrite(n.base) if isinstance(n.base, Expr) else new[n.base]
    guard = rewrite(n.guard) if n.guard is not None else None
    return Scatter(base, n.shape, n.strides, n.domain, tuple(rewrite.index(i) for i in n.index), rewrite(n.value), n.monoid, guard, n.device)


# -- the values of a call ------------------------------------------------------------------------------------------------
def arguments(graph, cut, inputs: dict, values: dict, args: list) -> list:
    """The arguments of the part `cut` of `graph`: the values of what it reads, then the host's numbers."""
    numbers = dict(zip(graph.inputs, args))
    return [*(values[n] for n in inputs), *(numbers[i] for i in cut.inputs[len(inputs):])]


def sizes_of(values: dict) -> dict[str, int]:
    """Sizes that stand alone as an extent of a value, as they were in a call."""
    found: dict[str, int] = {}
    for node, value in values.items():
        for extent, n in zip(getattr(node, "shape", ()), np.shape(value)):
            atoms = extent.atoms()
            if len(atoms) == 1 and isinstance(atoms[0], Size) and extent is as_index(atoms[0]):
                found.setdefault(atoms[0].name, int(n))
    return found
