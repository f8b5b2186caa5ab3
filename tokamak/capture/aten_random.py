"""Random numbers, policy `fast`: Philox of (a seed drawn at each call from torch's generator, a counter range of the operator's own).

So `torch.manual_seed` reproduces a run, and a value read twice is computed twice alike. The other policies keep ATen's numbers: the calls
stay opaque.
"""
from __future__ import annotations

import math

import torch

from ..ir.dtype import BOOL, F32, F64, DType
from ..ir.expr import Const, Expr, Op
from .registry import NotCompiled, register
from .tensor import Tensor, cast, compute, constant

aten = torch.ops.aten

_MANTISSA = {"bf16": 8, "f16": 11}      # bits of a 16-bit uniform number: more would round up to 1


def _mine(b, generator=None) -> None:
    if b.policy != "fast":
        raise NotCompiled(f"policy '{b.policy}' keeps ATen's random numbers")
    if generator is not None:
        raise NotCompiled("a generator of the program's own")


def _uniform(b, shape, d: DType) -> Expr:
    """Uniform in [0, 1), with as many bits as `d` holds; f64 takes two draws of 24 bits."""
    first = b.random("uniform", shape)
    if d is F64:
        return Op("add", cast(first, F64), Op("mul", cast(b.random("uniform", shape), F64), Const(2.0**-24, F64)))
    if d.name in _MANTISSA:
        scale = 2.0 ** _MANTISSA[d.name]
        return Op("mul", Op("floor", Op("mul", first, Const(scale, F32))), Const(1 / scale, F32))
    return first


def _normal(b, shape, d: DType) -> Expr:
    if d is F64:
        raise NotCompiled("normal numbers with the bits of f64")
    return b.random("normal", shape)


def _floating(b) -> None:
    if not b.spec.dtype.is_float:
        raise NotCompiled(f"random numbers, or their gradients, of type {b.spec.dtype}")


def _affine(e: Expr, scale, offset) -> Expr:
    return Op("add", Op("mul", e, constant(scale, e.dtype)), constant(offset, e.dtype))


@register(aten.rand.default, aten.rand_like.default)
def rand(b, _of, **_like):
    _mine(b)
    _floating(b)
    return b.tensor(b.spec.shape, _uniform(b, b.spec.shape, b.spec.dtype))


@register(aten.randn.default, aten.randn_like.default)
def randn(b, _of, **_like):
    _mine(b)
    _floating(b)
    return b.tensor(b.spec.shape, _normal(b, b.spec.shape, b.spec.dtype))


@register(aten.uniform.default)
def uniform(b, self, low=0.0, high=1.0, *, generator=None):
    _mine(b, generator)
    _floating(b)
    drawn = _uniform(b, self.shape, b.spec.dtype)
    low = constant(low, drawn.dtype)
    return self.with_expr(_affine(drawn, Op("sub", constant(high, drawn.dtype), low), low))


@register(aten.normal_functional.default)
def normal(b, self, mean=0.0, std=1.0, *, generator=None):
    _mine(b, generator)
    _floating(b)
    return self.with_expr(_affine(_normal(b, self.shape, b.spec.dtype), std, mean))


def _chance(b, shape, p: Expr) -> Expr:
    """True with probability `p` (f32)."""
    return Op("lt", b.random("uniform", shape), p)


@register(aten.bernoulli.default)
def bernoulli(b, self, *, generator=None):
    _mine(b, generator)
    return self.with_expr(cast(_chance(b, self.shape, cast(self.expr, F32)), b.spec.dtype))


@register(aten.bernoulli.p)
def bernoulli_p(b, self, p=0.5, *, generator=None):
    _mine(b, generator)
    return self.with_expr(cast(_chance(b, self.shape, constant(p, F32)), b.spec.dtype))


@register(aten.bernoulli.Tensor)
def bernoulli_tensor(b, self, p, *, generator=None):
    _mine(b, generator)
    return self.with_expr(cast(_chance(b, self.shape, cast(p.expand(self.shape).expr, F32)), b.spec.dtype))


@register(aten.native_dropout.default)
def native_dropout(b, input, p, train):
    """(input * mask / (1 - p), mask); not in training the input itself and a mask of ones."""
    if train is not None and not train:
        return input, input.with_expr(Const(True, BOOL))
    _mine(b)
    if not isinstance(p, (int, float)):
        raise NotCompiled("a dropout probability that the host passes")
    keep = _chance(b, input.shape, Const(1.0 - p, F32)) if 0 < p < 1 else Const(p == 0, BOOL)
    return _kept(input, keep, 0.0 if p == 1 or math.isnan(p) else 1 / (1 - p)), input.with_expr(keep)


def _kept(t: Tensor, mask: Expr, scale) -> Tensor:
    """t * mask * scale, as torch multiplies: a NaN that is dropped stays NaN."""
    value = compute(t.expr)
    return t.with_expr(Op("mul", Op("mul", value, cast(mask, value.dtype)), constant(scale, value.dtype)))


@register(aten.native_dropout_backward.default)
def native_dropout_backward(b, grad_output, mask, scale):
    _floating(b)
    return _kept(grad_output, mask.expr, scale)
