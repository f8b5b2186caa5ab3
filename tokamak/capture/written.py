"""Inputs that a training step writes, and that its backward needs as they were.

Forward hands an input on to backward for nothing, so torch's partitioner likes to keep those. Where forward writes one (running statistics, a cache),
backward would compute again what it needs from the new value. So what reads such an input reads a copy of it, which may be kept but is not made
again; a copy that nobody keeps is taken out of the forward graph.
"""
from __future__ import annotations

from collections.abc import Iterator
from operator import getitem

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from .regions import aliases

_aten = torch.ops.aten


def copy_written(joint: fx.GraphModule) -> tuple[str, ...]:
    """Lets what reads an input of `joint` that is written read a copy. The names of the copies."""
    made = []
    first = next(n for n in joint.graph.nodes if n.op != "placeholder")
    for given in dict.fromkeys(_written(joint)):
        readers = [n for n in given.users if n.target is not _aten.copy_.default and n.op != "output"
                   and not isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))]
        if readers:
            with joint.graph.inserting_before(first), given.meta["val"].fake_mode:
                copy = joint.graph.call_function(_aten.clone.default, (given,))
                copy.meta = {"val": _aten.clone.default(given.meta["val"]), "recompute": CheckpointPolicy.MUST_SAVE}
            for reader in readers:
                reader.replace_input_with(given, copy)
            _lie_there(copy, given.meta["val"].fake_mode)
            made.append(copy.name)
    joint.recompile()
    return tuple(made)


def _lie_there(copy: fx.Node, mode: FakeTensorMode) -> None:
    """What shows `copy` lies in its memory, for those who look at storages."""
    for node in _shown(copy):
        if node is not copy:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*args, **kwargs)


def _written(joint: fx.GraphModule) -> Iterator[fx.Node]:
    """The inputs that `joint` writes, and those that torch writes behind forward."""
    output = joint.graph.output_node()
    behind = {d.mutated_input for d, n in zip(output.meta.get("desc", ()), output.args[0])
              if isinstance(d, InputMutationAOTOutput) and not _shows_input(n)}
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node.meta.get("desc") in behind:
            yield node
        elif node.target is _aten.copy_.default and node.args[0].op == "placeholder":
            yield node.args[0]


def _shows_input(node: fx.Node) -> bool:
    """Is it an input, or a view of one? Where that is returned as the input's new value, only its shape is another (`t_`)."""
    while aliases(node.target):
        node = node.args[0]
    return node.op == "placeholder"


def without_copies(forward: fx.GraphModule, names: tuple[str, ...]) -> None:
    """Takes those copies of `names` out of `forward` of which it hands on neither themselves nor views."""
    results = set(forward.graph.output_node().all_input_nodes)
    for node in forward.graph.nodes:
        if node.name in names and not results.intersection(_shown(node)):
            node.replace_all_uses_with(node.args[0])
            forward.graph.erase_node(node)
    forward.recompile()


def _shown(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, and what may lie in its memory."""
    yield node
    for user in node.users:
        if user.target is getitem or aliases(user.target):
            yield from _shown(user)
