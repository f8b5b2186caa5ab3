"""Prefix folds along one dimension."""
from __future__ import annotations

import torch

from ..ir.dtype import BOOL, U8
from ..ir.index import as_index
from .arith import compute, coordinate, either, eq, isnan, where
from .registry import register
from .tensor import Tensor

aten = torch.ops.aten


@register(aten.cumsum.default)
def cumsum(b, x, dim, *, dtype=None):
    return b.scan("sum", compute(x.cast(b.spec.dtype)), dim)


@register(aten.cumprod.default)
def cumprod(b, x, dim, *, dtype=None):
    return b.scan("prod", compute(x.cast(b.spec.dtype)), dim)


@register(aten.logcumsumexp.default)
def logcumsumexp(b, x, dim):
    return b.scan("logsumexp", compute(x), dim)


def _running_extreme(b, which: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """(values, indices) of the running extreme. A tie moves the index on, as torch has it, and so does every NaN: the index is that of the last
    element that equals the running value, which is a running maximum over the positions of such elements. Both are rounded to the type of `x`."""
    dtype, x = x.dtype, x.cast(U8) if x.dtype is BOOL else compute(x)
    values = b.scan(which, x, dim)
    place = coordinate(x, x.axes[dim % x.rank] if x.rank else as_index(0))
    record = eq(x, compute(values.cast(dtype)) if dtype.is_half else values)
    if x.dtype.is_float:
        record = either(record, isnan(x))
    return values, b.scan("max", where(record, place, 0), dim)


@register(aten.cummax.default)
def cummax(b, x, dim):
    return _running_extreme(b, "max", x, dim)


@register(aten.cummin.default)
def cummin(b, x, dim):
    return _running_extreme(b, "min", x, dim)
