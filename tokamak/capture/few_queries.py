"""The library's attention of few queries to many keys (decoding with a cache), where no gradients are needed: its calls are written out.

    y = softmax(a q k' + b) v       rows of which b leaves nothing are 0        (': transposed)

Then it is a weighted mean like any other (`fuse.weighted`): keys are read as they lie, once for all heads that share them, where the library wants
copies for each head or makes them, and programs share the keys.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from operator import getitem

import torch
from torch import fx

from .regions import MARK
from .replaced import Written, plain

_aten = torch.ops.aten
CALLS = {_aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default,
         _aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default}
COPIES = {_aten.view.default, _aten._unsafe_view.default, _aten.clone.default}
ROWS = 64               # queries at most of the heads that share keys, those of a tile
FEW = 16                # up to which it pays however many heads there are; but of one query to a key, and of more, where these are HEADS at most,
HEADS = 64              # whose keys the library does not share among programs: 8 heads of 8192 x 128 bf16, 16 x 4 queries each, 97.6 us, 17.1; but
                        # 128 of 4096 x 128, a query each, 72.7, 74.9
KEYS = 512              # from which on it pays. Four queries each, us: 8 heads of 512 x 64 6.4, 4.4; of 512 x 128 8.2, 5.1; of 8192 x 128 18.1, 15.1;
                        # a query each: 16 heads of 1024 x 64 6.7, 5.9; 32 of 2048 x 128 17.5, 15.0; keys copied for each of 32 heads, 8 of
                        # 8192 x 128, 187, 14.9
WIDEST = 128            # columns of a head that a program holds


def few_queries(graph: fx.GraphModule, decoding: Callable[[str], bool]) -> int:
    """Writes out the calls of `graph` that are of that kind, on devices that `decoding` is true of; how many."""
    found = [n for n in graph.graph.nodes if n.target in CALLS and _taken(n) and decoding(str(n.args[0].meta["val"].device))]
    for call in found:
        _write(graph.graph, call)
    if found:
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return len(found)


def _said(call: fx.Node) -> dict:
    """What `call` says, by the names of its operator."""
    names = [a.name for a in call.target._schema.arguments]
    defaults = {a.name: a.default_value for a in call.target._schema.arguments if a.has_default_value()}
    return defaults | dict(zip(names, call.args)) | call.kwargs


def _taken(call: fx.Node) -> bool:
    """Is a call of few queries, many keys, without dropout, and nothing but its first result read?"""
    said = _said(call)
    nodes = [said["query"], said["key"], said["value"]]
    if said["dropout_p"] != 0 or said["is_causal"] or MARK in (call.meta.get("custom") or {}) or not all(map(plain, call.all_input_nodes)):
        return False
    if not call.users or any(u.target is not getitem or u.args[1] != 0 for u in call.users):
        return False
    q, k, v = (n.meta["val"] for n in nodes)
    if q.dim() != 4 or k.shape[2] < KEYS or not q.dtype in (torch.float16, torch.bfloat16) or max(q.shape[3], v.shape[3]) > WIDEST:
        return False
    if min(q.shape[:3]) == 0 or q.shape[1] % k.shape[1] != 0 or k.shape[:3] != v.shape[:3]:
        return False
    rows, heads = q.shape[1] // k.shape[1] * q.shape[2], k.shape[0] * k.shape[1]
    return heads <= HEADS and rows <= ROWS or rows <= FEW and (rows > 1 or _copied(nodes[1]) or _copied(nodes[2]))


def _copied(n: fx.Node) -> bool:
    """Is `n` a copy of keys or values for each of several heads?"""
    while n.target in COPIES:
        n = n.args[0]
    return n.target is _aten.expand.default and n.meta["val"].numel() > n.args[0].meta["val"].numel()


def _write(graph: fx.Graph, call: fx.Node) -> None:
    said, written = _said(call), Written(graph, call)
    added = said.get("attn_bias", said.get("attn_mask"))
    with torch.no_grad(), torch._C._DisableAutocast(), graph.inserting_before(call), written:
        q, k, v, bias = (written.value(n) if n is not None else None for n in (said["query"], said["key"], said["value"], added))
        made = _lying_as(_mean(q, k, v, bias, said["scale"]), next(iter(call.users)).meta["val"])
    for user in list(call.users):
        user.replace_all_uses_with(written.made[id(made)])
        graph.erase_node(user)
    graph.erase_node(call)


def _mean(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """The equation above; the heads that share keys are rows of one product."""
    (batch, heads, rows, width), (kept, length), shared = q.shape, k.shape[1:3], q.shape[1] // k.shape[1]
    matrices = lambda x: x.reshape(batch * kept, -1, x.shape[3])
    x = torch.bmm(matrices(q), matrices(k).transpose(1, 2)).view(batch, kept, shared, rows, length).float()
    x = x * (1 / math.sqrt(width) if scale is None else scale)
    if bias is not None:
        x = x + bias.expand(batch, heads, rows, length).view(batch, kept, shared, rows, length).float()
    p = torch.softmax(x, -1).to(q.dtype).view(batch * kept, shared * rows, length)
    out = torch.bmm(p, matrices(v)).view(batch, heads, rows, v.shape[3])
    if bias is None:
        return out
    for d, stride in enumerate(bias.stride()):
        bias = bias.narrow(d, 0, 1) if stride == 0 else bias
    return out.masked_fill((bias == -math.inf).all(-1, keepdim=True), 0.0)


def _lying_as(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x` with the strides of `like`."""
    if x.stride() == like.stride():
        return x
    order = sorted(range(x.dim()), key=lambda d: -like.stride(d))
    return x.permute(order).clone(memory_format=torch.contiguous_format).permute([order.index(d) for d in range(x.dim())])
