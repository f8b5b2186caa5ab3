"""Equal calls of a training step's graph become one, by torch's rules, whose own function imports all of Inductor: a second in a process that has no
other use for it. Graphs that these few lines do not know are left to torch."""
from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._functorch import compile_utils

from .ahead import frozen, Own
from .regions import storage_of

_aten = torch.ops.aten
_KEPT = frozenset({_aten.empty, *compile_utils.rand_ops})         # each call of these has a result of its own; so has each that draws


def equal_calls_once(graph: fx.Graph) -> fx.Graph:
    """`graph`, or a copy, in which a call that says the same as an earlier one, with nothing written in between, is that one."""
    try:
        return _copied(graph)
    except Own:         # torch's rules take two draws for one where it does not know that they are draws
        return graph if any(_draws(n.target) and not _kept(n.target) for n in graph.nodes) else compile_utils.fx_graph_cse(graph)


def _copied(graph: fx.Graph) -> fx.Graph:
    """As `equal_calls_once`. Raises Own where an argument is an object of the graph's own, or where a call may write we do not know what."""
    new, known, written = fx.Graph(), {}, 0
    copies: dict[fx.Node, fx.Node] = {}
    returned = {s for n in graph.output_node().all_input_nodes if (s := _storage(n)) is not None}
    for node in graph.nodes:
        says = None
        if node.op == "call_function":
            written += _writes(node.target)
            if not _kept(node.target) and not _draws(node.target) and _storage(node) not in returned:
                says = written, node.target, frozen(copies, node.args), frozen(copies, node.kwargs)
        elif node.op not in ("placeholder", "get_attr", "output"):
            raise Own
        found = known.get(says)
        if found is None:
            found = new.node_copy(node, copies.__getitem__)
            if says is not None:
                known[says] = found
        copies[node] = found
    return new


def _kept(target: Any) -> bool:
    """Does each call have a result of its own, by torch's rules?"""
    return getattr(target, "overloadpacket", None) in _KEPT


def _draws(target: Any) -> bool:
    """Does each call draw random numbers of its own?"""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _writes(target: Any) -> bool:
    """Does a call change what it is given? Raises Own."""
    if isinstance(target, torch._ops.OpOverload) and target.namespace != "inductor":
        return target._schema.is_mutable
    if target is operator.getitem:
        return False
    raise Own


def _storage(node: fx.Node) -> int | None:
    """The memory of a node's value; None where it has none."""
    try:
        return storage_of(node.meta.get("val"))
    except NotImplementedError:
        return None
