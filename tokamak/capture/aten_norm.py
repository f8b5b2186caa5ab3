"""Normalisations and softmax with their backward operators, each as its formula over `arith` and `b.reduce`.

Shared names: `mean` and `rstd` = 1/sqrt(variance + eps) broadcast against the input; the normalised value is (x - mean) * rstd.
"""
from __future__ import annotations

import torch

from ..ir.dtype import F64
from ..ir.expr import Const
from .arith import (add, all_dims, compute, count, div, eq, exp, log, mul, rsqrt, size, sqrt, square, sub, where)
from .aten_reduce import mean_of, moments
from .registry import NotCompiled, register
from .tensor import Tensor

aten = torch.ops.aten


def _scale_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = mul(x, weight) if weight is not None else x
    return add(x, bias) if bias is not None else x


def _normalise(b, x: Tensor, dims, eps) -> tuple[Tensor, Tensor, Tensor]:
    """((x - mean) * rstd, mean, rstd) over `dims`; mean and rstd keep extents of 1."""
    variance, mean = moments(b, x, dims)
    rstd = rsqrt(add(variance, eps))
    return mul(sub(x, mean), rstd), mean, rstd


def _normalise_backward(b, grad: Tensor, xhat: Tensor, rstd: Tensor, dims) -> Tensor:
    """The gradient through xhat = (x - mean(x)) * rstd(x) over `dims`: what is left of `grad` without its parts along 1 and along xhat."""
    along_one = mean_of(b, compute(grad), dims, keepdim=True)
    along_xhat = mean_of(b, mul(grad, xhat), dims, keepdim=True)
    return mul(sub(sub(grad, along_one), mul(xhat, along_xhat)), rstd)


def _weighted(grad: Tensor, weight: Tensor | None) -> Tensor:
    return compute(grad) if weight is None else mul(grad, weight)


# -- layer norm and RMS norm ---------------------------------------------------------------------------------------
def _trailing(x: Tensor, normalized_shape) -> tuple[list[int], list[int]]:
    """(outer, inner) dimensions of `x`: the inner ones are normalised."""
    split = x.rank - len(normalized_shape)
    return list(range(split)), list(range(split, x.rank))


@register(aten.native_layer_norm.default)
def native_layer_norm(b, x, normalized_shape, weight, bias, eps):
    xhat, mean, rstd = _normalise(b, x, _trailing(x, normalized_shape)[1], eps)
    return _scale_shift(xhat, weight, bias), mean, rstd


@register(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(b, grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    outer, inner = _trailing(x, normalized_shape)
    xhat = mul(sub(x, mean), rstd)
    grad = compute(grad)
    return (_normalise_backward(b, _weighted(grad, weight), xhat, rstd, inner) if output_mask[0] else None,
            b.reduce("sum", mul(grad, xhat), outer) if output_mask[1] and weight is not None else None,
            b.reduce("sum", grad, outer) if output_mask[2] and bias is not None else None)


@register(aten._fused_rms_norm.default)
def fused_rms_norm(b, x, normalized_shape, weight, eps):
    x = compute(x)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype is F64 else torch.float32).eps
    rstd = rsqrt(add(mean_of(b, square(x), _trailing(x, normalized_shape)[1], keepdim=True), eps))
    return _scale_shift(mul(x, rstd), weight, None), rstd


@register(aten._fused_rms_norm_backward.default)
def fused_rms_norm_backward(b, grad, x, normalized_shape, rstd, weight, output_mask):
    outer, inner = _trailing(x, normalized_shape)
    xhat = mul(x, rstd)
    weighted = _weighted(grad, weight)
    along_xhat = mean_of(b, mul(weighted, xhat), inner, keepdim=True)
    return (mul(sub(weighted, mul(xhat, along_xhat)), rstd) if output_mask[0] else None,
            b.reduce("sum", mul(grad, xhat), outer) if output_mask[1] and weight is not None else None)


# -- group norm ----------------------------------------------------------------------------------------------------
def _grouped(x: Tensor, groups: int) -> Tensor:
    """(N, C, ...) as (N, G, C/G, ...)."""
    each = x.shape[1] // groups
    return x.view([x.shape[0], groups, each, *x.shape[2:]], lambda c: [c[0], c[1] * each + c[2], *c[3:]])


def _ungrouped(x: Tensor) -> Tensor:
    """(N, G, D, ...) as (N, G*D, ...); extents of 1 in place of D and what follows broadcast over the group."""
    each = x.shape[2]
    return x.view([x.shape[0], x.shape[1] * each, *x.shape[3:]], lambda c: [c[0], c[1] // each, c[1] % each, *c[2:]])


def _per_channel(stat: Tensor, groups: int, x: Tensor) -> Tensor:
    """A statistic of each (sample, group), of N*G elements, at each element of `x` (N, C, ...): extents (N, C, 1, ...)."""
    each = x.shape[1] // groups
    pair = stat.reshape([x.shape[0], groups])
    return pair.view([*x.shape[:2], *[1] * (x.rank - 2)], lambda c: [c[0], c[1] // each])


def _channelwise(t: Tensor | None, rank: int) -> Tensor | None:
    """(C,) as (C, 1, ...), which broadcasts against (N, C, ...) of `rank`."""
    return None if t is None else t.reshape([*t.shape, *[1] * (rank - 2)])


def _but_channel(x: Tensor) -> list[int]:
    return [d for d in range(x.rank) if d != 1]


@register(aten.native_group_norm.default)
def native_group_norm(b, x, weight, bias, N, C, HxW, group, eps):
    by_group = _grouped(compute(x), group)
    variance, mean = moments(b, by_group, range(2, by_group.rank))
    rstd = rsqrt(add(variance, eps))
    mean, rstd = (t.squeeze(range(2, t.rank)) if t.shape[1] != 1 else t.reshape([t.shape[0], 1]) for t in (mean, rstd))
    xhat = mul(sub(x, _per_channel(mean, group, x)), _per_channel(rstd, group, x))
    return _scale_shift(xhat, _channelwise(weight, x.rank), _channelwise(bias, x.rank)), mean, rstd


@register(aten.native_group_norm_backward.default)
def native_group_norm_backward(b, grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    grad = compute(grad)
    scale = _per_channel(rstd, group, x)
    xhat = mul(sub(x, _per_channel(mean, group, x)), scale)
    inner, rank = list(range(2, x.rank)), x.rank
    ones, xhats = (b.reduce("sum", t, inner) for t in (grad, mul(grad, xhat)))         # (N, C): what all three results are made of
    dx = None
    if output_mask[0]:
        weighted = _weighted(grad, _channelwise(weight, rank))
        along_one, along_xhat = (_mean_of_group(b, _weighted(t, weight), group, count(x, inner)) for t in (ones, xhats))
        dx = mul(sub(sub(weighted, _per_channel(along_one, group, x)), mul(xhat, _per_channel(along_xhat, group, x))), scale)
    return (dx, b.reduce("sum", xhats, [0]) if output_mask[1] and weight is not None else None,
            b.reduce("sum", ones, [0]) if output_mask[2] else None)


def _mean_of_group(b, sums: Tensor, groups: int, each) -> Tensor:
    """(N, G): means over groups of channels, of whose elements `sums` (N, C) has the sums over `each`."""
    by_group = _grouped(sums, groups)
    return div(b.reduce("sum", by_group, [2]), size(each * by_group.shape[2], sums.dtype))


# -- batch norm ----------------------------------------------------------------------------------------------------
def _nothing(b, position: int) -> Tensor:
    """An empty result, as torch returns for statistics that it does not save."""
    spec = b.specs[position]
    return b.tensor(spec.shape, Const(0, spec.dtype))


def _batch_norm_train(b, x, weight, bias, eps):
    """(out, mean (C,), rstd (C,), variance (C,)) with the batch's own statistics."""
    variance, mean = moments(b, x, _but_channel(x))
    rstd = rsqrt(add(variance, eps))
    out = _scale_shift(mul(sub(x, mean), rstd), _channelwise(weight, x.rank), _channelwise(bias, x.rank))
    return out, *(t.reshape([x.shape[1]]) for t in (mean, rstd, variance))


def _batch_norm_eval(x, weight, bias, mean, variance, eps):
    mean, rstd = _channelwise(mean, x.rank), rsqrt(add(_channelwise(variance, x.rank), eps))
    return _scale_shift(mul(sub(x, mean), rstd), _channelwise(weight, x.rank), _channelwise(bias, x.rank))


def _running(old: Tensor, new: Tensor, momentum) -> Tensor:
    return add(mul(new, momentum), mul(old, 1.0 - momentum))


def _updated(b, x, mean, variance, running_mean, running_var, momentum) -> tuple[Tensor, Tensor]:
    """The running statistics after this batch; the running variance divides by N - 1."""
    total = size(count(x, _but_channel(x)), variance.dtype)
    unbiased = div(mul(variance, total), sub(total, 1.0))
    return _running(running_mean, mean, momentum), _running(running_var, unbiased, momentum)


def _batch_norm(b, x, weight, bias, running_mean, running_var, training, eps):
    """(out, saved mean, saved rstd, variance or None): what torch saves in evaluation is empty."""
    if training or running_mean is None:
        return _batch_norm_train(b, x, weight, bias, eps)
    return _batch_norm_eval(x, weight, bias, running_mean, running_var, eps), _nothing(b, 1), _nothing(b, 2), None


@register(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_legit_functional(b, x, weight, bias, running_mean, running_var, training, momentum, eps):
    out, mean, rstd, variance = _batch_norm(b, x, weight, bias, running_mean, running_var, training, eps)
    if not training:
        return out, mean, rstd, running_mean, running_var
    return out, mean, rstd, *_updated(b, x, mean, variance, running_mean, running_var, momentum)


@register(aten._batch_norm_with_update_functional.default)
def batch_norm_with_update_functional(b, x, weight, bias, running_mean, running_var, momentum, eps):
    out, mean, rstd, variance = _batch_norm_train(b, x, weight, bias, eps)
    return out, mean, rstd, _nothing(b, 3), *_updated(b, x, mean, variance, running_mean, running_var, momentum)


@register(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_no_stats(b, x, weight, bias, training, momentum, eps):
    return _batch_norm_train(b, x, weight, bias, eps)[:3]


@register(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm_no_training(b, x, weight, bias, running_mean, running_var, momentum, eps):
    return _batch_norm(b, x, weight, bias, running_mean, running_var, False, eps)[:3]


@register(aten._batch_norm_no_update.default)
def batch_norm_no_update(b, x, weight, bias, running_mean, running_var, momentum, eps):
    return *_batch_norm(b, x, weight, bias, running_mean, running_var, False, eps)[:3], _nothing(b, 3)


def _batch_norm_backward(b, grad, x, weight, running_mean, running_var, save_mean, save_rstd, train, eps, output_mask):
    grad = compute(grad)
    if train:
        mean, rstd = save_mean, save_rstd
    else:
        mean, rstd = running_mean, rsqrt(add(running_var, eps))
    mean, rstd = _channelwise(mean, x.rank), _channelwise(rstd, x.rank)
    xhat = mul(sub(x, mean), rstd)
    dims = _but_channel(x)
    dx = None
    if output_mask[0]:
        through = _normalise_backward(b, grad, xhat, rstd, dims) if train else mul(grad, rstd)
        dx = _weighted(through, _channelwise(weight, x.rank))       # a weight a channel: the folds are those of its gradient and the bias's
    return (dx, b.reduce("sum", mul(grad, xhat), dims) if output_mask[1] else None, b.reduce("sum", grad, dims) if output_mask[2] else None)


@register(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(b, grad, x, weight, running_mean, running_var, save_mean, save_rstd, train, eps, output_mask):
    return _batch_norm_backward(b, grad, x, weight, running_mean, running_var, save_mean, save_rstd, train, eps, output_mask)


@register(aten.batch_norm_backward.default)
def batch_norm_backward(b, grad, x, weight, running_mean, running_var, save_mean, save_rstd, update, eps, output_mask, reserve):
    return _batch_norm_backward(b, grad, x, weight, running_mean, running_var, save_mean, save_rstd, update, eps, output_mask)


# -- softmax -------------------------------------------------------------------------------------------------------
def softmax_of(b, x: Tensor, dim: int) -> Tensor:
    """exp(x - max) / sum of the same, `x` in its compute type."""
    dims = all_dims(x, dim)
    powers = exp(sub(x, b.reduce("max", x, dims, keepdim=True)))
    return div(powers, b.reduce("sum", powers, dims, keepdim=True))


@register(aten._softmax.default)
def softmax(b, x, dim, half_to_float):
    return softmax_of(b, compute(_floating(x)), dim)


def _floating(x: Tensor) -> Tensor:
    if not x.dtype.is_float:
        raise NotCompiled("torch has softmax of integers where there are none")
    return x


@register(aten._safe_softmax.default)
def safe_softmax(b, x, dim, dtype=None):
    """Softmax with zeros for rows that are all -inf."""
    x = compute(x.cast(b.spec.dtype))
    masked = b.reduce("all", eq(x, float("-inf")), all_dims(x, dim), keepdim=True)
    return where(masked, 0.0, softmax_of(b, x, dim))


@register(aten._log_softmax.default)
def log_softmax(b, x, dim, half_to_float):
    x = compute(_floating(x))
    dims = all_dims(x, dim)
    shifted = sub(x, b.reduce("max", x, dims, keepdim=True))
    return sub(shifted, log(b.reduce("sum", exp(shifted), dims, keepdim=True)))


@register(aten._softmax_backward_data.default)
def softmax_backward(b, grad, output, dim, input_dtype):
    inner = b.reduce("sum", mul(grad, output), all_dims(output, dim), keepdim=True)
    return mul(sub(grad, inner), output)


@register(aten._log_softmax_backward_data.default)
def log_softmax_backward(b, grad, output, dim, input_dtype):
    total = b.reduce("sum", compute(grad), all_dims(grad, dim), keepdim=True)
    return sub(grad, mul(exp(output), total))


# -- weight norm ----------------------------------------------------------------------------------------------------
def _but(x: Tensor, dim: int) -> list[int]:
    kept = all_dims(x, dim)
    return [d for d in range(x.rank) if d not in kept]


@register(aten._weight_norm_interface.default)
def weight_norm(b, v, g, dim=0):
    v = compute(v)
    length = sqrt(b.reduce("sum", square(v), _but(v, dim), keepdim=True))
    return mul(v, div(g, length)), length


@register(aten._weight_norm_interface_backward.default)
def weight_norm_backward(b, grad, v, g, norms, dim):
    along = div(b.reduce("sum", mul(grad, v), _but(v, dim), keepdim=True), norms)
    return mul(div(g, norms), sub(grad, mul(v, div(along, norms)))), along
