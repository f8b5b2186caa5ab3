"""Activations and their derivatives. The comparisons and their borders are ATen's own, so that NaN, infinities and ties come out as in eager."""
from __future__ import annotations

import math

import torch

from ..ir.expr import Const
from .aten_join import join
from .promote import Term, call, clip, formulas, like, pointwise, where
from .registry import register
from .tensor import Tensor

aten = torch.ops.aten

_SQRT_HALF, _TWO_OVER_SQRT_PI = math.sqrt(0.5), 2 / math.sqrt(math.pi)
_BETA, _KAPPA = math.sqrt(2) * _TWO_OVER_SQRT_PI * 0.5, 0.044715     # of gelu's approximation by tanh


def _sigmoid(x: Term) -> Term:
    return call("sigmoid", x)


def gelu(x: Term, approximate="none") -> Term:
    if approximate == "tanh":
        return 0.5 * x * (1 + call("tanh", _BETA * (x + _KAPPA * (x * x * x))))
    return x * 0.5 * (1 + call("erf", x * _SQRT_HALF))


def _gelu_backward(g: Term, x: Term, approximate="none") -> Term:
    if approximate == "tanh":
        t = call("tanh", _BETA * (x + _KAPPA * (x * x * x)))
        inner = _BETA * (1 + 3 * _KAPPA * (x * x))
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)
    cdf = 0.5 * (1 + call("erf", x * _SQRT_HALF))
    pdf = call("exp", x * x * -0.5) * (_TWO_OVER_SQRT_PI * _SQRT_HALF * 0.5)
    return g * (cdf + x * pdf)


def _elu(x: Term, alpha=1, scale=1, input_scale=1) -> Term:
    return where(x < 0, call("expm1", x * input_scale) * alpha * scale, x * scale)


def _elu_backward(g: Term, alpha, scale, input_scale, is_result, x: Term) -> Term:
    slope = like(g, alpha) * scale
    below = g * input_scale * (x + slope) if is_result else g * input_scale * slope * call("exp", x * input_scale)
    return where(x > 0, g * scale, below)


def _softplus(x: Term, beta=1, threshold=20) -> Term:
    return where(x * beta > threshold, x, call("log1p", call("exp", x * beta)) / beta)


def _softplus_backward(g: Term, x: Term, beta=1, threshold=20) -> Term:
    z = call("exp", x * beta)
    return where(x * beta > threshold, g, g * z / (z + 1))


def _mish_backward(g: Term, x: Term) -> Term:
    s, t = _sigmoid(x), call("tanh", call("log1p", call("exp", x)))
    return g * (t + x * s * (1 - t * t))


def _hardswish_backward(g: Term, x: Term) -> Term:
    return where(x <= -3, 0, where(x >= 3, g, g * (x / 3 + 0.5)))


def _logit_backward(g: Term, x: Term, eps=None) -> Term:
    if eps is None:
        return where((x < 0) | (x > 1), math.nan, g / (x * (1 - x)))
    return where((x >= eps) & (x <= 1 - eps), g / (x * (1 - x)), 0)


def _log_sigmoid_backward(g: Term, x: Term) -> Term:
    z = call("exp", -abs(x))
    negative = x < 0
    return g * (where(negative, like(x, 1), 0) - where(negative, like(x, 1), -1) * (z / (1 + z)))


def _shrink_backward(g: Term, x: Term, limit) -> Term:
    return where((x > limit) | (x < -limit), g, 0)


def _rrelu_backward(g: Term, x: Term, noise: Term, lower, upper, training: bool, is_result: bool) -> Term:
    if training and not (isinstance(lower.expr, Const) and isinstance(upper.expr, Const) and upper.expr.value - lower.expr.value <= 1e-6):
        return g * noise
    return where(x > 0, g, g * ((lower + upper) / 2))


formulas({
    "gelu": gelu,
    "gelu_backward": _gelu_backward,
    "silu": lambda x: x / (1 + call("exp", -x)),
    "silu_backward": lambda g, x: g * _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "tanh_backward": lambda g, y: g * (1 - y * y),
    "mish": lambda x: x * call("tanh", call("log1p", call("exp", x))),
    "mish_backward": _mish_backward,
    "threshold": lambda x, limit, value: where(x <= limit, value, x),
    "threshold_backward": lambda g, x, limit: where(x <= limit, 0, g),
    "hardtanh_backward": lambda g, x, low, high: where((x > low) & (x < high), g, 0),
    "leaky_relu": lambda x, slope=0.01: where(x > 0, x, x * slope),
    "leaky_relu_backward": lambda g, x, slope, is_result: where(x > 0, g, g * slope),
    "elu": _elu,
    "elu_backward": _elu_backward,
    "celu": lambda x, alpha=1.0: where(x < 0, call("expm1", x / alpha) * alpha, x),
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "hardswish": lambda x: x * clip(x + 3, 0, 6) / 6,
    "hardswish_backward": _hardswish_backward,
    "hardsigmoid": lambda x: clip(x + 3, 0, 6) / 6,
    "hardsigmoid_backward": lambda g, x: where((x > -3) & (x < 3), g / 6, 0),
    "hardshrink": lambda x, limit=0.5: where((x >= -limit) & (x <= limit), 0, x),
    "hardshrink_backward": _shrink_backward,
    "softshrink": lambda x, limit=0.5: where(x > limit, x - limit, where(x < -limit, x + limit, x * 0)),
    "softshrink_backward": _shrink_backward,
    "logit_backward": _logit_backward,
    "rrelu_with_noise_backward": _rrelu_backward,
    "_prelu_kernel": lambda x, slope: where(x > 0, x, slope * x),
})


@register(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(b, x: Tensor):
    """(value, buffer). The backward formula computes the buffer anew, so only its shape matters (torch's is empty on a GPU)."""
    value = pointwise(b, lambda v: call("min", v, 0) - call("log1p", call("exp", -abs(v))), x)
    buffer = b.specs[1]
    if buffer.shape != b.spec.shape:
        return value, b.tensor(buffer.shape, Const(0, buffer.dtype))
    return value, pointwise(b, lambda v: call("exp", -abs(v)), x)


@register(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(b, g: Tensor, x: Tensor, buffer: Tensor):
    return pointwise(b, _log_sigmoid_backward, g, x)


@register(aten._prelu_kernel_backward.default)
def prelu_backward(b, g: Tensor, x: Tensor, weight: Tensor):
    return (pointwise(b, lambda dy, v, w: where(v > 0, dy, w * dy), g, x, weight),
            pointwise(b, lambda dy, v: where(v > 0, 0, v * dy), g, x))


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    half = [n if i != dim else n // 2 for i, n in enumerate(x.shape)]
    shifted = x.view(half, lambda c: [i if d != dim else i + half[d] for d, i in enumerate(c)])
    return x.view(half, lambda c: c), shifted


@register(aten.glu.default)
def glu(b, x: Tensor, dim: int = -1) -> Tensor:
    value, gate = _halves(x, dim % x.rank)
    return pointwise(b, lambda v, s: v * _sigmoid(s), value, gate)


@register(aten.glu_backward.default)
def glu_backward(b, g: Tensor, x: Tensor, dim: int) -> Tensor:
    dim = dim % x.rank
    value, gate = _halves(x, dim)
    d_value = pointwise(b, lambda dy, s: dy * _sigmoid(s), g, gate, shape=g.shape)
    d_gate = pointwise(b, lambda dy, v, s: (1 - _sigmoid(s)) * _sigmoid(s) * dy * v, g, value, gate, shape=g.shape)
    return join(b, (d_value, d_gate), dim, b.spec.shape, d_value.dtype)
