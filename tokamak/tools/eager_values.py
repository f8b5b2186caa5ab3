"""What eager has where a kernel stored a value: the graph of aten calls, run by torch on the arguments of one call."""
from __future__ import annotations

import numpy as np
import torch
from torch import fx

from ..check import Seen
from ..ir.graph import Compute, Graph, Scatter
from .kernels import plan_of
from .record import GraphRecord


def eager_values(record: GraphRecord, seen: Seen) -> dict:
    """Stored node -> eager's tensor, for the nodes that are the whole value of an aten call; empty where torch cannot run the graph again. What
    follows from random numbers is left out: torch draws others when it runs the graph again."""
    random = drawn(record.values["aten"])
    wanted = {n: name for n, name in named_values(record).items() if name not in random}
    try:
        found = _Keep(record.values["aten"], set(wanted.values())).kept_of(tensors(record.values["aten"], seen.args))
    except Exception:           # whatever an operator of the user's may raise: then there is nothing to compare with
        return {}
    return {n: found[name] for n, name in wanted.items() if name in found and tuple(found[name].shape) == np.shape(seen.values.get(n))}


def named_values(record: GraphRecord) -> dict:
    """Stored node -> the aten value that it is, by name: where exactly one node has that name and shape, in the graph captured and in the
    one planned."""
    plan = plan_of(record)
    counts = [_counts(record.values["capture"]), _counts(plan.graph)]
    found = {}
    for nodes in plan.stores.values():
        for n in nodes:
            key = plan.graph.origin(n).name, n.shape
            if key[0] and all(c.get(key) == 1 for c in counts):
                found[n] = key[0]
    return found


def random_values(record: GraphRecord) -> set:
    """The stored nodes that are values of aten calls and follow from random numbers that the graph draws."""
    random = drawn(record.values["aten"])
    return {n for n, name in named_values(record).items() if name in random}


def drawn(gm: fx.GraphModule) -> set[str]:
    """Names of the values that follow from random numbers drawn in the graph."""
    found: set[str] = set()
    for node in gm.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    return found


def _counts(graph: Graph) -> dict[tuple, int]:
    found: dict[tuple, int] = {}
    for n in graph.nodes:
        if isinstance(n, (Compute, Scatter)):
            key = graph.origin(n).name, n.shape
            found[key] = found.get(key, 0) + 1
    return found


def tensors(gm: fx.GraphModule, args: list) -> list:
    """`args`, with arrays as tensors of the types and strides that were traced."""
    made = []
    for node, value in zip((n for n in gm.graph.nodes if n.op == "placeholder"), args):
        traced = node.meta.get("val")
        if isinstance(traced, torch.Tensor) and isinstance(value, np.ndarray):
            value = torch.from_numpy(np.array(value)).to(traced.device, traced.dtype)
            if value.numel() and not any(isinstance(s, torch.SymInt) for s in traced.stride()):
                value = torch.empty_strided(value.shape, traced.stride(), dtype=value.dtype, device=value.device).copy_(value)
        made.append(value)
    return made


class _Keep(fx.Interpreter):
    """Runs a graph and keeps the tensors called `names`, as they were when they were made."""

    def __init__(self, gm: fx.GraphModule, names: set[str]):
        super().__init__(gm)
        self.names, self.kept = names, {}

    def run_node(self, n):
        out = super().run_node(n)
        if n.name in self.names and isinstance(out, torch.Tensor):
            self.kept[n.name] = out.detach().clone()
        return out

    def kept_of(self, args: list) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            self.run(*args)
        return self.kept
