"""Tensors made from numbers and coordinates."""
from __future__ import annotations

import math

import torch

from ..ir.dtype import BOOL, F64, DType, compute_type
from ..ir.expr import Coord, Expr, Op
from ..ir.index import Index, as_index, axis
from .promote import Term, call, every, where
from .registry import register
from .tensor import Tensor, cast, constant, size_value

aten = torch.ops.aten


def _filled(b, value) -> Tensor:
    return b.tensor(b.spec.shape, constant(value, b.spec.dtype))


def _constant(value):
    return lambda b, *args, **kwargs: _filled(b, value)


register(aten.zeros.default, aten._efficientzerotensor.default, aten.zero.default, *every("zeros_like", "new_zeros"))(_constant(0))
register(aten.ones.default, *every("ones_like", "new_ones"))(_constant(1))


@register(aten.empty.memory_format, aten.empty_permuted.default, aten.empty_strided.default, *every("empty_like", "new_empty", "new_empty_strided"))
def empty(b, *args, **kwargs) -> Tensor:
    """It may hold anything: zeros need no memory. Where torch is asked for deterministic algorithms what it fills it with, NaN or the greatest
    number (`torch.utils.deterministic.fill_uninitialized_memory`); that it was asked is among what Dynamo guards."""
    d = b.spec.dtype
    if not torch.are_deterministic_algorithms_enabled() or not torch.utils.deterministic.fill_uninitialized_memory:
        return _filled(b, 0)
    return _filled(b, math.nan if d.is_float else 1 if d is BOOL else 2 ** (8 * d.bytes - (d.kind == "i")) - 1)


@register(aten.full.default, *every("full_like", "new_full"), aten.fill.Scalar)
def full(b, shape_or_like, *args, fill_value=None, **kwargs) -> Tensor:
    """The number is the last positional argument."""
    return _filled(b, args[-1] if args else fill_value)


@register(aten.fill.Tensor)
def fill(b, x: Tensor, value: Tensor) -> Tensor:
    return value.expand(b.spec.shape).cast(b.spec.dtype)


@register(aten.scalar_tensor.default)
def scalar_tensor(b, value, **kwargs) -> Tensor:
    return _filled(b, value)


# -- sequences -------------------------------------------------------------------------------------------------------
def _whole(x, d: DType) -> Index | None:
    """A number that a sequence of type `d` starts or steps with as an Index, so that it joins the coordinate; None for a fraction (an integer
    sequence truncates its numbers first) and for a number that only the host knows."""
    if isinstance(x, (int, Index)):
        return as_index(x)
    return as_index(int(x)) if isinstance(x, float) and (d.is_int or x.is_integer() and abs(x) < 2**24) else None


@register(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(b, *args, **kwargs) -> Tensor:
    """start + i * step: exact where both are whole, else carried in f64 as torch's own kernel does."""
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else kwargs.get("step", 1))
    i = axis(0, b.spec.shape[0])
    first, stride = _whole(start, b.spec.dtype), _whole(step, b.spec.dtype)
    if first is not None and stride is not None:
        return b.tensor(b.spec.shape, cast(Coord(first + i * stride), b.spec.dtype))
    value = Op("add", constant(start, F64), Op("mul", constant(step, F64), cast(Coord(i), F64)))
    return b.tensor(b.spec.shape, cast(value, b.spec.dtype))


def _spaced(b, start, end) -> Term:
    """linspace's element, in the type it is computed in; each half counts from its own end, as torch does."""
    steps = b.spec.shape[0]
    d = compute_type(b.spec.dtype) if b.spec.dtype.is_float else F64
    first, last = (Term(cast(_number(x, b.spec.dtype), d)) for x in (start, end))
    if steps == 1:
        return first
    i, step = axis(0, steps), (last - first) / Term(size_value(steps - 1, d))
    lower = Op("lt", Coord(i), Coord(steps // 2))
    return where(Term(lower), first + step * Term(cast(Coord(i), d)), last - step * Term(cast(Coord(steps - 1 - i), d)))


def _number(x, d: DType) -> Expr:
    return cast(x.expr, d) if isinstance(x, Tensor) else constant(x, d)


_VARIANTS = "default Tensor_Tensor Tensor_Scalar Scalar_Tensor".split()


@register(*(getattr(aten.linspace, v) for v in _VARIANTS))
def linspace(b, start, end, steps, **kwargs) -> Tensor:
    return b.tensor(b.spec.shape, _spaced(b, start, end).expr)


@register(*(getattr(aten.logspace, v) for v in _VARIANTS))
def logspace(b, start, end, steps, base=10.0, **kwargs) -> Tensor:
    exponent = _spaced(b, start, end)
    return b.tensor(b.spec.shape, call("pow", Term(constant(base, exponent.dtype)), exponent).expr)


# -- matrices of coordinates -----------------------------------------------------------------------------------------
@register(aten.eye.default, aten.eye.m)
def eye(b, *args, **kwargs) -> Tensor:
    row, column = (axis(i, n) for i, n in enumerate(b.spec.shape))
    if row is column:
        return _filled(b, 1)
    return b.tensor(b.spec.shape, cast(Op("eq", Coord(row), Coord(column)), b.spec.dtype))
