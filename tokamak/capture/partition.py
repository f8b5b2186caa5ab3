"""The joint graph of forward and backward is cut in two: what forward keeps for backward, and what backward computes again.

torch's min-cut partitioner decides, by bytes and by which operations it takes to be free. It takes an operation that it does not know to fuse for a
reader that needs its argument in memory anyway, and saves that: so nodes that compute nothing are removed first.
"""
from __future__ import annotations

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

_aten = torch.ops.aten
IDENTITIES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}      # in a functional graph: their argument


def partition(joint: fx.GraphModule, joint_inputs, *, num_fwd_outputs: int, **others) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) graphs of `joint`. The arguments are those of torch's partition functions."""
    without_identities(joint)
    return min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)


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
