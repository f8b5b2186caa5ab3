"""Losses with their backward operators. `reduction` is torch's number: 0 none, 1 mean, 2 sum."""
from __future__ import annotations

import torch

from ..ir.dtype import I64
from ..ir.index import as_index
from .arith import (absolute, add, all_dims, as_tensor, both, compute, coordinate, count, div, eq, exp, le, log, log1p, lt, maximum, minimum, mul, ne,
                    neg, sign, size, square, sub, where)
from .aten_index import position
from .registry import NotCompiled, register
from .tensor import Tensor, broadcast_shapes

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


def _reduced(b, loss: Tensor, reduction: int) -> Tensor:
    if reduction == NONE:
        return loss
    total = b.reduce("sum", loss, all_dims(loss))
    return div(total, size(count(loss, all_dims(loss)), loss.dtype)) if reduction == MEAN else total


def _share(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """What each element's loss gets of `grad`."""
    if reduction != MEAN:
        return compute(grad)
    elements = as_index(1)
    for s in broadcast_shapes(x.shape, target.shape):
        elements = elements * s
    grad = compute(grad)
    return div(grad, size(elements, grad.dtype))


# -- elementwise losses --------------------------------------------------------------------------------------------
@register(aten.mse_loss.default)
def mse_loss(b, x, target, reduction=MEAN):
    return _reduced(b, square(sub(x, target)), reduction)


@register(aten.mse_loss_backward.default)
def mse_loss_backward(b, grad, x, target, reduction):
    return mul(sub(x, target), 2.0, _share(grad, x, target, reduction))


@register(aten.smooth_l1_loss.default)
def smooth_l1_loss(b, x, target, reduction=MEAN, beta=1.0):
    d = absolute(sub(x, target))
    near = div(mul(square(d), 0.5), beta)
    return _reduced(b, where(lt(d, beta), near, sub(d, 0.5 * beta)), reduction)


@register(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(b, grad, x, target, reduction, beta):
    d = sub(x, target)
    slope = where(lt(absolute(d), beta), div(d, beta), where(ne(d, d), d, sign(d)))         # of a NaN, whose sign is 0, a NaN
    return mul(slope, _share(grad, x, target, reduction))


@register(aten.huber_loss.default)
def huber_loss(b, x, target, reduction=MEAN, delta=1.0):
    d = absolute(sub(x, target))
    return _reduced(b, where(le(d, delta), mul(square(d), 0.5), mul(sub(d, 0.5 * delta), delta)), reduction)


@register(aten.huber_loss_backward.default)
def huber_loss_backward(b, grad, x, target, reduction, delta):
    d = sub(x, target)
    slope = maximum(minimum(d, delta), -delta)
    return mul(slope, _share(grad, x, target, reduction))


@register(aten.soft_margin_loss.default)
def soft_margin_loss(b, x, target, reduction=MEAN):
    return _reduced(b, log1p(exp(mul(neg(compute(target)), x))), reduction)


@register(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(b, grad, x, target, reduction):
    z = exp(mul(neg(compute(target)), x))
    return mul(div(mul(neg(compute(target)), z), add(z, 1.0)), _share(grad, x, target, reduction))


@register(aten.binary_cross_entropy.default)
def binary_cross_entropy(b, x, target, weight=None, reduction=MEAN):
    """Logarithms are cut at -100, as torch does."""
    x = compute(x)
    miss = mul(sub(target, 1.0), maximum(log1p(neg(x)), -100.0))
    loss = sub(miss, mul(target, maximum(log(x), -100.0)))
    return _reduced(b, loss if weight is None else mul(loss, weight), reduction)


@register(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(b, grad, x, target, weight=None, reduction=MEAN):
    x = compute(x)
    slope = div(sub(x, target), maximum(mul(sub(1.0, x), x), 1e-12))
    return mul(slope if weight is None else mul(slope, weight), _share(grad, x, target, reduction))


@register(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(b, x, target, weight=None, pos_weight=None, reduction=MEAN):
    x = compute(x)
    softplus = add(log1p(exp(neg(absolute(x)))), maximum(neg(x), 0.0))       # log(1 + exp(-x))
    if pos_weight is not None:
        softplus = mul(softplus, add(mul(sub(pos_weight, 1.0), target), 1.0))
    loss = add(mul(sub(1.0, target), x), softplus)
    return _reduced(b, loss if weight is None else mul(loss, weight), reduction)


# -- negative log likelihood ---------------------------------------------------------------------------------------
def _class_dim(x: Tensor) -> int:
    return 1 if x.rank > 1 else 0


@register(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(b, x, target, weight, reduction, ignore_index):
    """-weight[t] * x[t] at each target t, 0 where t is `ignore_index`; the mean divides by the sum of the weights. Also the weights' sum."""
    dim = _class_dim(x)
    if x.rank == 1 and target.rank == 1:
        raise NotCompiled("a target of one dimension for an input without a batch dimension")
    target = target.cast(I64)
    counted = ne(target, ignore_index)
    chosen = position(where(counted, target, 0).expr, x.shape[dim])
    coords = list(target.axes)
    picked = compute(target.with_expr(x.at([*coords[:dim], chosen, *coords[dim:]])))
    scale = target.with_expr(weight.at([chosen])) if weight is not None else 1.0
    loss = where(counted, mul(neg(picked), scale), 0.0)
    dims = all_dims(loss)
    if reduction == NONE and x.rank > 1:
        return loss, as_tensor(0.0, loss.dtype)
    weights = where(counted, scale, 0.0) if weight is not None else counted.cast(loss.dtype)
    total = b.reduce("sum", weights, dims)
    summed = b.reduce("sum", loss, dims)
    return (div(summed, total) if reduction == MEAN else summed), total


@register(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(b, grad, x, target, weight, reduction, ignore_index, total_weight):
    """-weight[c] * grad at the target's class c, 0 elsewhere."""
    dim = _class_dim(x)
    target = target.cast(I64)
    here = both(eq(coordinate(x, x.axes[dim]), target.unsqueeze(dim)), ne(target, ignore_index).unsqueeze(dim))
    grad = compute(grad)
    if reduction == MEAN:
        grad = div(grad, total_weight)
    elif reduction == NONE and x.rank > 1:
        grad = grad.unsqueeze(dim)
    if weight is not None:
        grad = mul(grad, x.with_expr(weight.at([x.axes[dim]])))
    return where(here, neg(grad), 0.0)
