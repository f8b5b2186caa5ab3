"""Gradients of cuDNN's attention, asked for such that no other call's plan is taken for theirs.

torch keeps a plan for the gradient of attention, and finds it again by the extents and strides of queries, keys and values, by the share of weights
that is dropped and the like. Nothing of that says how the result and its gradient are laid out (`MHA.cpp`; newer sources have it), though the plan is
made for that as well: the same call with a gradient of other strides gives wrong numbers, silently. With torch 2.11 attention of 8 x 16 heads of
512 x 64 in bf16 was off by 1.4 of its gradients' norm (H100) behind the same step by Inductor, which lays the gradient out in another way, and
Inductor's behind ours.

So the gradient is laid out as the result here, whose strides follow from the queries'; and the share is another number of the same value, which no
caller outside has: -0.0, or the next one that is the same in float32.
"""
from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx

from .replaced import laid_out_alike

_aten = torch.ops.aten
GRADIENT = _aten._scaled_dot_product_cudnn_attention_backward.default
GIVEN, RESULT, DROPPED = 0, 4, 13           # positions: the incoming gradient, attention's result, the share that is dropped


def plans_apart(gm: fx.GraphModule) -> None:
    """Changes all such calls in a graph of aten operations."""
    calls = gm.graph.find_nodes(op="call_function", target=GRADIENT)
    for n in calls:
        n.update_arg(DROPPED, same_share(n.args[DROPPED]))
        given, result = n.args[GIVEN], n.args[RESULT]
        if not laid_out_alike(given.meta["val"], result.meta["val"]):
            with gm.graph.inserting_before(n):
                n.update_arg(GIVEN, _laid_out_as(gm.graph, given, result.meta["val"]))
    if calls:
        gm.recompile()


def same_share(share: float) -> float:
    """Another number that is the same share in float32; the same where the next is not."""
    if share == 0:
        return -0.0
    other = math.nextafter(share, 1.0)
    return other if np.float32(other) == np.float32(share) else share


def _laid_out_as(graph: fx.Graph, n: fx.Node, like: torch.Tensor) -> fx.Node:
    """`n`, copied into memory in the order of the dimensions of `like`."""
    order = sorted(range(like.dim()), key=lambda d: (-_hint(like.stride(d)), d))
    back = [order.index(d) for d in range(like.dim())]
    as_it_lies = {"memory_format": torch.contiguous_format}
    for target, args, kwargs in ((_aten.permute.default, (order,), {}), (_aten.clone.default, (), as_it_lies), (_aten.permute.default, (back,), {})):
        made = graph.call_function(target, (n, *args), kwargs)
        made.meta = {**n.meta, "val": target(n.meta["val"], *args, **kwargs)}
        n = made
    return n


def _hint(s: int | torch.SymInt) -> int:
    return s if isinstance(s, int) else s.node.hint or 0
