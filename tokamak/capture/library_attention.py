"""The library's attention and its gradient, as calls for a graph: of queries, keys and values [batch, heads, length, width].

With a bias a GPU has cuDNN's, where torch chooses it. The other that takes one (memory-efficient attention) is slower than what is written: heads of
512 x 64 bf16, 128 of them, forward and backward on an H200, us, 107 and 277, by cuDNN 46 and 119, as written 246 for both.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten

# forward(q, k, v, bias, causal, scale, dropped) -> (result, what backward wants); dropped: the share of the weights that is left out at random
# backward(dy, q, k, v, result, what it wants, bias, causal, scale, dropped) -> the gradients of q, k and v
Calls = tuple[Callable, Callable]


def chosen(given: Sequence[torch.Tensor], bias: torch.Tensor | None, causal: bool, scale: float, dropped: float = 0.0) -> Calls | None:
    """What torch chooses for such queries, keys and values, and None where it has nothing better than what is written: on a CPU nothing that leaves
    out weights. It cannot tell of fake tensors, so it is asked of one head of real ones."""
    if given[0].device.type != "cuda":
        return CALLS["cpu"] if not dropped else None
    with unset_fake_temporarily(), torch.no_grad():
        one = lambda x: torch.empty((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
        return CALLS.get(torch._fused_sdp_choice(*map(one, given), None if bias is None else one(bias), dropped, causal, scale=scale))


def _flash(q, k, v, bias, causal, scale, dropped):
    out, *kept = _aten._scaled_dot_product_flash_attention.default(q, k, v, dropped, causal, False, scale=scale)
    return out, kept


def _flash_backward(dy, q, k, v, out, kept, bias, causal, scale, dropped):
    lse, *counts, seed, offset, _ = kept
    call = _aten._scaled_dot_product_flash_attention_backward.default
    return call(dy, q, k, v, out, lse, *counts, dropped, causal, seed, offset, scale=scale)


def _cudnn(q, k, v, bias, causal, scale, dropped):
    out, *kept = _aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, dropped, causal, False, scale=scale)
    return out, kept


def _cudnn_backward(dy, q, k, v, out, kept, bias, causal, scale, dropped):
    lse, *counts, seed, offset, _ = kept
    call = _aten._scaled_dot_product_cudnn_attention_backward.default
    return call(dy, q, k, v, out, lse, seed, offset, bias, *counts, dropped, causal, scale=scale)


def _on_cpu(q, k, v, bias, causal, scale, dropped):
    out, *kept = _aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, kept


def _on_cpu_backward(dy, q, k, v, out, kept, bias, causal, scale, dropped):
    call = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return call(dy, q, k, v, out, *kept, 0.0, causal, attn_mask=bias, scale=scale)


# what torch chooses for a GPU, or the device -> the calls
CALLS: dict[int | str, Calls] = {
    SDPBackend.FLASH_ATTENTION.value: (_flash, _flash_backward), SDPBackend.CUDNN_ATTENTION.value: (_cudnn, _cudnn_backward),
    "cpu": (_on_cpu, _on_cpu_backward)}
