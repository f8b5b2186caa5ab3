"""torch's encoder layer in one call, taken apart.

`nn.TransformerEncoderLayer` makes one call of its whole layer where no gradients are needed. Here that call's parts stand in its place, as it makes
them: a mask says what is left out, whatever its type; a row that leaves out all is NaN; GELU is by tanh on a GPU.
"""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def layer(src: torch.Tensor, width: int, heads: int, qkv_weight, qkv_bias, out_weight, out_bias, gelu: bool, norm_first: bool, eps: float, weight_1,
          bias_1, weight_2, bias_2, up_weight, up_bias, down_weight, down_bias, mask: torch.Tensor | None = None, mask_type: int | None = None):
    """`src`: (batch, tokens, width); `qkv_weight`: those of queries, keys and values, one behind the other. NotImplemented where there is nothing to
    take apart."""
    if src.dim() != 3 or src.is_nested or any(isinstance(s, int) and s == 0 for s in src.shape):
        return NotImplemented
    norm = lambda x, weight, bias: F.layer_norm(x, (width,), weight, bias, eps)
    attended = lambda x: F.linear(_attention(F.linear(x, qkv_weight, qkv_bias), heads, mask, mask_type), out_weight, out_bias)
    act = (lambda x: F.gelu(x, approximate="tanh" if x.is_cuda else "none")) if gelu else F.relu
    fed = lambda x: F.linear(act(F.linear(x, up_weight, up_bias)), down_weight, down_bias)
    if norm_first:
        x = src + attended(norm(src, weight_1, bias_1))
        x = x + fed(norm(x, weight_2, bias_2))
    else:
        x = norm(src + attended(src), weight_1, bias_1)
        x = norm(x + fed(x), weight_2, bias_2)
    return x.contiguous()


def _attention(qkv: torch.Tensor, heads: int, mask: torch.Tensor | None, mask_type: int | None) -> torch.Tensor:
    """(batch, tokens, width) of queries, keys and values side by side. `mask`: what is left out; `mask_type`: 0, (queries, keys); 1, (batch, keys);
    2, something that broadcasts to (batch, heads, queries, keys)."""
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (x.view(batch, tokens, heads, width // heads).transpose(1, 2) for x in qkv.chunk(3, -1))
    if mask is None:
        out = F.scaled_dot_product_attention(q, k, v)
    else:
        left_out = mask.to(torch.bool)
        left_out = left_out[:, None, None] if mask_type == 1 else left_out
        scores = (q / math.sqrt(width // heads)) @ k.transpose(-2, -1)
        out = torch.softmax(scores.masked_fill(left_out, -math.inf), -1) @ v
    return out.transpose(1, 2).reshape(batch, tokens, width)
