"""Operators of a joint graph that their parts replace once the graph is traced. As decompositions they would be traced part by part, which takes
torch several times as long as the fake tensors' own arithmetic: all that is needed here.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .ahead import frozen, like, Own


def replace(joint: fx.GraphModule, table: Mapping[Any, Callable]) -> None:
    """Puts what `table[operator]` calls in the place of every call of an operator in `joint`, of one result or of several that are taken one by one.
    An entry may return NotImplemented, and the call stays, as it does where a single result would lie another way, and one of several results where
    sizes are symbolic. Of calls that say the same the first alone is traced."""
    known: dict[tuple, tuple[tuple, list] | None] = {}          # what a call says -> its parts and their results' places, if it has any
    for node in list(joint.graph.nodes):
        parts = table.get(node.target) if node.op == "call_function" else None
        if parts is not None and (_single(node) or all(u.target is getitem for u in node.users) and all(map(plain, node.all_input_nodes))):
            says = _says(node)
            if says is None or says not in known:
                traced = _traced(joint.graph, node, parts)
                if says is not None:
                    known[says] = traced
            elif known[says] is not None:
                _again(joint.graph, node, *known[says])
    joint.recompile()


def _single(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def laid_out_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Have both the same strides, as far as these can be told, of all that is not of one element?"""
    return all(statically_known_true(n == 1) or statically_known_true(s == t) for n, s, t in zip(b.shape, a.stride(), b.stride()))


def plain(node: fx.Node) -> bool:
    """Is it a tensor of constant sizes? A symbolic number would have to be a node of its own."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride()))


def _says(node: fx.Node) -> tuple | None:
    """All that decides which parts `node` has; None where they are its own."""
    number = {n: i for i, n in enumerate(node.all_input_nodes)}
    try:
        return node.target, frozen(number, node.args), frozen(number, node.kwargs), tuple([like(n.meta["val"]) for n in number])
    except Own:
        return None


def _traced(graph: fx.Graph, node: fx.Node, parts: Callable) -> tuple[tuple, list] | None:
    """Puts its parts in the place of `node`: these, behind the nodes that it reads, and the place among them of each of its results. None where it
    stays."""
    values = lambda args: fx.map_arg(args, lambda n: n.meta["val"])
    written = Written(graph, node)
    with torch.no_grad(), torch._C._DisableAutocast(), graph.inserting_before(node), written:
        made = parts(*values(node.args), **values(node.kwargs))
    if made is NotImplemented:
        return None
    if _single(node):
        if not laid_out_alike(made, node.meta["val"]):
            for n in reversed(written.nodes):
                graph.erase_node(n)
            return None
        made = made,
    nodes = [*node.all_input_nodes, *written.nodes]
    place = {n: i for i, n in enumerate(nodes)}
    results = [place.get(written.made.get(id(value))) for value in made]
    calls = tuple([(n.target, n.args, n.kwargs, n.meta["val"]) for n in written.nodes])
    _take_place(graph, node, nodes, results)
    return (place, calls), results


def _again(graph: fx.Graph, node: fx.Node, parts: tuple, results: list) -> None:
    """As `_traced`, with the parts of a call that says the same."""
    place, calls = parts
    nodes = list(node.all_input_nodes)
    meta = _meta(node)
    here = partial(fx.map_arg, fn=lambda n: nodes[place[n]])
    with torch.no_grad(), torch._C._DisableAutocast(), graph.inserting_before(node):
        for target, args, kwargs, value in calls:
            args, kwargs = here(args), here(kwargs)
            nodes.append(_call(graph, target, args, kwargs, {**meta, "val": _value(target, args, kwargs, value)}))
    _take_place(graph, node, nodes, results)


def _value(target: Callable, args: tuple, kwargs: dict, first: Any) -> Any:
    """What stands for the value of a call where `first` does for that of one that says the same: other memory, or a view of its own argument's."""
    if target is getitem:
        return args[0].meta["val"][args[1]]
    if target.is_view:
        value = lambda args: fx.map_arg(args, lambda n: n.meta["val"])
        return target(*value(args), **value(kwargs))
    other = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    made = [t.fake_mode for t in pytree.tree_leaves(first) if isinstance(t, torch.Tensor)]
    with made[0]:
        return pytree.tree_map_only(torch.Tensor, other, first)


def _meta(node: fx.Node) -> dict:
    """The metadata of `node` that its parts have, too."""
    return {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}


def _call(graph: fx.Graph, target: Callable, args: tuple, kwargs: dict, meta: dict) -> fx.Node:
    made = graph.create_node("call_function", target, args, kwargs, "getitem" if target is getitem else target.overloadpacket.__name__)
    made.meta = meta
    return made


def _take_place(graph: fx.Graph, node: fx.Node, nodes: list, results: list) -> None:
    if _single(node):
        node.replace_all_uses_with(nodes[results[0]])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(nodes[results[user.args[1]]])
            graph.erase_node(user)
    graph.erase_node(node)


class Written(TorchDispatchMode):
    """Every call within becomes a node of `graph`, with the metadata of `node`, which it is a part of."""

    def __init__(self, graph: fx.Graph, node: fx.Node):
        super().__init__()
        self.graph, self.meta = graph, _meta(node)
        self.made: dict[int, fx.Node] = {id(n.meta["val"]): n for n in node.all_input_nodes}        # a tensor's id -> the node that is its value
        self.kept: list = []                                                                        # for as long as ids stand for them
        self.nodes: list[fx.Node] = []

    def value(self, node: fx.Node) -> torch.Tensor:
        """What stands for the value of `node`, for calls to read."""
        found = node.meta["val"]
        self.made[id(found)] = node
        return found

    def within(self, node: fx.Node) -> None:
        """What follows is part of `node`."""
        self.meta = _meta(node)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(out, (torch.Tensor, tuple, list)):        # a question: which device
            return out
        self.kept.append(out)
        place = lambda x: self.made[id(x)] if isinstance(x, torch.Tensor) else x
        call = self._node(func, *pytree.tree_map(place, (args, kwargs)), out)
        for i, value in enumerate(out) if isinstance(out, (tuple, list)) else ():
            self.made[id(value)] = self._node(getitem, (call, i), {}, value)
        self.made[id(out)] = call
        return out

    def _node(self, target: Callable, args: tuple, kwargs: dict, value: Any) -> fx.Node:
        made = _call(self.graph, target, args, kwargs, {**self.meta, "val": value})
        self.nodes.append(made)
        return made
