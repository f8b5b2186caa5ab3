"""Operators of a joint graph that their parts replace once the graph is traced. As decompositions they would be traced part by part, which takes
torch several times as long as the fake tensors' own arithmetic: all that is needed here.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def replace(joint: fx.GraphModule, table: Mapping[Any, Callable]) -> None:
    """Puts what `table[operator]` calls in the place of every call of an operator in `joint` whose results are taken one by one. An entry may return
    NotImplemented, and the call stays."""
    for node in list(joint.graph.nodes):
        parts = table.get(node.target) if node.op == "call_function" else None
        if parts is not None and all(u.target is getitem for u in node.users) and all(map(_plain, node.all_input_nodes)):
            _replace(joint.graph, node, parts)
    joint.recompile()


def _plain(node: fx.Node) -> bool:
    """Is it a tensor of constant sizes? A symbolic number would have to be a node of its own."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride()))


def _replace(graph: fx.Graph, node: fx.Node, parts: Callable) -> None:
    values = lambda args: fx.map_arg(args, lambda n: n.meta["val"])
    written = _Written(graph, node)
    with torch.no_grad(), torch._C._DisableAutocast(), graph.inserting_before(node), written:
        made = parts(*values(node.args), **values(node.kwargs))
    if made is NotImplemented:
        return
    for user in list(node.users):
        user.replace_all_uses_with(written.made[id(made[user.args[1]])])
        graph.erase_node(user)
    graph.erase_node(node)


class _Written(TorchDispatchMode):
    """Every call within becomes a node of `graph`, with the metadata of `node`, which it is a part of."""

    def __init__(self, graph: fx.Graph, node: fx.Node):
        super().__init__()
        self.graph, self.meta = graph, {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
        self.made: dict[int, fx.Node] = {id(n.meta["val"]): n for n in node.all_input_nodes}        # a tensor's id -> the node that is its value
        self.kept: list = []                                                                        # for as long as ids stand for them

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not isinstance(out, (torch.Tensor, tuple, list)):        # a question: which device
            return out
        self.kept.append(out)
        place = lambda x: self.made[id(x)] if isinstance(x, torch.Tensor) else x
        call = self._node(func, *pytree.tree_map(place, (args, kwargs)), out, func.overloadpacket.__name__)
        for i, value in enumerate(out) if isinstance(out, (tuple, list)) else ():
            self.made[id(value)] = self._node(getitem, (call, i), {}, value, "getitem")
        self.made[id(out)] = call
        return out

    def _node(self, target: Callable, args: tuple, kwargs: dict, value: Any, name: str) -> fx.Node:
        made = self.graph.create_node("call_function", target, args, kwargs, name)
        made.meta = {**self.meta, "val": value}
        return made
