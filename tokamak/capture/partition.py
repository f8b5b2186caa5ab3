"""The joint graph of forward and backward is cut in two: what forward keeps for backward, and what backward computes again.

torch's min-cut partitioner decides, by bytes and by which operations it takes to be free. It takes an operation that it does not know to fuse for a
reader that needs its argument in memory anyway, and saves that: so nodes that compute nothing are removed first, and it is told of the operators that
the tables build (a loss reads log-probabilities in registers: saving them would keep the logits in float32).
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx
from torch._functorch import partitioners

from .registry import TABLE

_aten = torch.ops.aten
IDENTITIES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}      # in a functional graph: their argument

_LISTING = threading.Lock()


def partition(joint: fx.GraphModule, joint_inputs, *, num_fwd_outputs: int, **others) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) graphs of `joint`. The arguments are those of torch's partition functions."""
    without_identities(joint)
    with _fusible({getattr(o, "overloadpacket", o) for o in TABLE}):
        return partitioners.min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)


@contextlib.contextmanager
def _fusible(operators: set) -> Iterator[None]:
    """torch's partitioner takes `operators`, too, to be fusible. Its list is a function of its module: there is no parameter."""
    with _LISTING:
        theirs = partitioners.get_default_op_list
        known = theirs()
        ours = replace(known, fusible_ops=known.fusible_ops | (operators - set(known.compute_intensive_ops)))
        partitioners.get_default_op_list = lambda: ours
        try:
            yield
        finally:
            partitioners.get_default_op_list = theirs


def without_identities(joint: fx.GraphModule) -> None:
    """Removes the calls of `joint` that only hand on their argument (what autograd saves, it detaches)."""
    for node in joint.graph.nodes:
        if node.target in IDENTITIES and _same_value(node):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    joint.recompile()


def _same_value(node: fx.Node) -> bool:
    """The argument may stand in the place of `node`: neither is a result of the graph, whose aliases the caller has been told of."""
    return not any(user.op == "output" for user in node.users)
