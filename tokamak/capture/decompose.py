"""Operators in whose place the joint graph of a training step holds their parts, because of what backward then needs to be saved: the partitioner
keeps a row's maximum and sum, or a channel's mean, and computes the elements again; of a value that a gradient only compares with a number it may
keep what the comparison gave, a byte. Everything else stays whole. Softmax is contiguous, as torch's own is: what follows may view it so. What
TRACED has is replaced once the graph is traced (`replaced.py`). Inference graphs hold the parts of two calls: of log-softmax, and of a whole encoder
layer.
"""
from __future__ import annotations

import math

import torch

from . import encoder

_aten = torch.ops.aten


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _empty(x: torch.Tensor) -> bool:
    return any(isinstance(s, int) and s == 0 for s in x.shape)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if _empty(x):
        return NotImplemented
    wide = _wide(x)
    shifted = wide - wide.amax(dim, keepdim=True)
    out = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return (out if half_to_float else out.to(x.dtype)).contiguous()


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if _empty(x):
        return NotImplemented
    wide = _wide(x)
    powers = (wide - wide.amax(dim, keepdim=True)).exp()
    out = powers / powers.sum(dim, keepdim=True)
    return (out if half_to_float else out.to(x.dtype)).contiguous()


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Softmax with zeros for rows that are all -inf."""
    if _empty(x):
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    return torch.where((x == -math.inf).all(dim, keepdim=True), 0.0, _softmax(x, dim, False))


def _batch_norm(x: torch.Tensor, weight, bias, running_mean, running_var, training: bool, momentum: float, eps: float):
    """Statistics, and the normalised values made of them by arithmetic alone."""
    count = math.prod(x.shape[:1] + x.shape[2:])
    if not training or _empty(x) or not isinstance(count, int) or count < 2 or running_mean is None or running_var is None:
        return NotImplemented
    variance, mean = torch.var_mean(_wide(x), [d for d in range(x.dim()) if d != 1], correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = (_wide(x) - mean) * rstd
    along = lambda t: t.reshape([-1] + [1] * (x.dim() - 2))
    out = out if weight is None else out * along(weight)
    out = out if bias is None else out + along(bias)
    flat = [t.reshape(-1) for t in (mean, rstd, variance * (count / (count - 1)))]
    moved = lambda old, new: (new * momentum + old * (1.0 - momentum)).to(old.dtype)
    saved = [t if x.is_cuda else t.to(running_mean.dtype) for t in flat[:2]]
    return out.to(x.dtype), *saved, moved(running_mean, flat[0]), moved(running_var, flat[2])


def _threshold_backward(g: torch.Tensor, x: torch.Tensor, limit) -> torch.Tensor:
    return g.masked_fill(x <= limit, 0) if g.dtype is x.dtype and _exact(limit) else NotImplemented


def _leaky_relu_backward(g: torch.Tensor, x: torch.Tensor, slope, is_result: bool) -> torch.Tensor:
    return torch.where(x > 0, g, g * slope) if g.dtype is x.dtype else NotImplemented


def _hardtanh_backward(g: torch.Tensor, x: torch.Tensor, low, high) -> torch.Tensor:
    return g.masked_fill(~((x > low) & (x < high)), 0) if g.dtype is x.dtype and _exact(low) and _exact(high) else NotImplemented


def _exact(number) -> bool:
    """Is it the same in every type of floats? A comparison rounds it to its tensor's."""
    return float(number).is_integer() and abs(number) <= 256


ALWAYS = {_aten._log_softmax.default: _log_softmax, _aten._transformer_encoder_layer_fwd.default: encoder.layer}
TRAINING = {**ALWAYS, _aten._softmax.default: _softmax, _aten._safe_softmax.default: _safe_softmax}
TRACED = {_aten._native_batch_norm_legit_functional.default: _batch_norm,            # of a training step, too, but in the graph as traced: many calls
          _aten.threshold_backward.default: _threshold_backward,
          _aten.leaky_relu_backward.default: _leaky_relu_backward,
          _aten.hardtanh_backward.default: _hardtanh_backward}
