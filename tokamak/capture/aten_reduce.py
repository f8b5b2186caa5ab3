"""Reductions: sums, products, extremes, logical folds, moments, vector norms.

Each is a formula over `arith` and `b.reduce`. A fold is carried in the compute type (f32 for 16-bit floats); the divisor of a mean is a size, which
kernels take as an argument. Variance is two-pass: the mean, then the mean of squared differences.
"""
from __future__ import annotations

import torch

from ..ir.dtype import BOOL, I64, U8
from ..ir.index import as_index
from ..ir.normal import minimum as smaller
from .arith import (absolute, add, all_dims, compute, coordinate, count, div, eq, exp, gt, isnan, log, maximum, mul, ne, power, size, sqrt,
                    square, sub, where)
from .registry import NotCompiled, register
from .tensor import Tensor

aten = torch.ops.aten


def _as_result(b, x: Tensor) -> Tensor:
    """`x` converted to the result's type as torch converts before it folds (ints to int64, an explicit `dtype=`), then to the compute type."""
    return compute(x.cast(b.spec.dtype))


# -- sums and products ---------------------------------------------------------------------------------------------
@register(aten.sum.default, aten.sum.dim_IntList)
def sum_(b, x, dim=None, keepdim=False, *, dtype=None):
    return b.reduce("sum", _as_result(b, x), all_dims(x, dim), keepdim)


@register(aten.nansum.default)
def nansum(b, x, dim=None, keepdim=False, *, dtype=None):
    x = _as_result(b, x)
    return b.reduce("sum", where(isnan(x), 0, x) if x.dtype.is_float else x, all_dims(x, dim), keepdim)


def mean_of(b, x: Tensor, dims, keepdim: bool = False) -> Tensor:
    """sum / number of elements; `x` in its compute type, `dims` non-negative."""
    return div(b.reduce("sum", x, dims, keepdim), size(count(x, dims), x.dtype))


@register(aten.mean.default, aten.mean.dim)
def mean(b, x, dim=None, keepdim=False, *, dtype=None):
    return mean_of(b, _as_result(b, x), all_dims(x, dim), keepdim)


@register(aten.prod.default, aten.prod.dim_int)
def prod(b, x, dim=None, keepdim=False, *, dtype=None):
    return b.reduce("prod", _as_result(b, x), all_dims(x, dim), keepdim)


@register(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(b, x, dim=None):
    return b.reduce("sum", x.cast(BOOL).cast(I64), all_dims(x, dim))


@register(aten.trace.default)
def trace(b, x):
    diagonal = x.view([smaller(x.shape[0], x.shape[1])], lambda c: [c[0], c[0]])
    return b.reduce("sum", _as_result(b, diagonal), [0])


# -- extremes ------------------------------------------------------------------------------------------------------
def _of_something(x: Tensor, dims) -> None:
    """NotCompiled when there is no element to choose: torch raises."""
    if any(x.shape[d].constant == 0 for d in dims):
        raise NotCompiled("the extreme of nothing")


def extreme(b, which: str, x: Tensor, dims, keepdim: bool = False) -> Tensor:
    """max or min over `dims`; NaN wins. Of bools: any or all."""
    _of_something(x, dims)
    if x.dtype is BOOL:
        which = "any" if which == "max" else "all"
    return b.reduce(which, compute(x), dims, keepdim)


def _ordered(x: Tensor) -> Tensor:
    """`x` in a type that arg-reductions compare: bools as integers."""
    return x.cast(U8) if x.dtype is BOOL else compute(x)


def _extreme_along(b, which: str, x: Tensor, dim: int, keepdim: bool):
    """(values, indices) along `dim`: the first occurrence, NaN before everything."""
    dims = all_dims(x, dim)
    _of_something(x, dims)
    where_at = coordinate(x, x.axes[dims[0]] if dims else as_index(0))
    pair = (_ordered(x), where_at)
    return tuple(b.reduce(f"arg{which}", pair, dims, keepdim, component) for component in (0, 1))


def _index_of(b, which: str, x: Tensor, dim, keepdim: bool) -> Tensor:
    """argmax or argmin; over all dimensions (dim None) the row-major position."""
    dims = all_dims(x, dim)
    _of_something(x, dims)
    position = as_index(0)
    for d in dims:
        position = position * x.shape[d] + x.axes[d]
    return b.reduce(f"arg{which}", (_ordered(x), coordinate(x, position)), dims, keepdim, 1)


@register(aten.amax.default)
def amax(b, x, dim=(), keepdim=False):
    return extreme(b, "max", x, all_dims(x, dim), keepdim)


@register(aten.amin.default)
def amin(b, x, dim=(), keepdim=False):
    return extreme(b, "min", x, all_dims(x, dim), keepdim)


@register(aten.max.default)
def max_all(b, x):
    return extreme(b, "max", x, all_dims(x))


@register(aten.min.default)
def min_all(b, x):
    return extreme(b, "min", x, all_dims(x))


@register(aten.aminmax.default)
def aminmax(b, x, *, dim=None, keepdim=False):
    return tuple(extreme(b, which, x, all_dims(x, dim), keepdim) for which in ("min", "max"))


@register(aten.max.dim)
def max_dim(b, x, dim, keepdim=False):
    return _extreme_along(b, "max", x, dim, keepdim)


@register(aten.min.dim)
def min_dim(b, x, dim, keepdim=False):
    return _extreme_along(b, "min", x, dim, keepdim)


@register(aten.argmax.default)
def argmax(b, x, dim=None, keepdim=False):
    return _index_of(b, "max", x, dim, keepdim)


@register(aten.argmin.default)
def argmin(b, x, dim=None, keepdim=False):
    return _index_of(b, "min", x, dim, keepdim)


# -- logical folds -------------------------------------------------------------------------------------------------
def _logical(b, which: str, x: Tensor, dim, keepdim: bool) -> Tensor:
    """any or all of x != 0. An empty list of dimensions folds nothing here (elsewhere it means all)."""
    dims = [] if dim is not None and dim in ([], ()) else all_dims(x, dim)
    return b.reduce(which, x.cast(BOOL), dims, keepdim)


@register(aten.any.default, aten.any.dim, aten.any.dims, aten._is_any_true.default)
def any_(b, x, dim=None, keepdim=False):
    return _logical(b, "any", x, dim, keepdim)


@register(aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default)
def all_(b, x, dim=None, keepdim=False):
    return _logical(b, "all", x, dim, keepdim)


# -- moments -------------------------------------------------------------------------------------------------------
def moments(b, x: Tensor, dims, correction=0) -> tuple[Tensor, Tensor]:
    """(variance, mean) over `dims`, kept as extents of 1. The variance divides by max(N - correction, 0), as torch: inf or NaN where that is 0."""
    x = compute(x)
    mean = mean_of(b, x, dims, keepdim=True)
    squares = b.reduce("sum", square(sub(x, mean)), dims, keepdim=True)
    total = size(count(x, dims), x.dtype)
    return div(squares, maximum(sub(total, correction), 0) if correction != 0 else total), mean


def _moments(b, x: Tensor, dim, correction, keepdim: bool) -> tuple[Tensor, Tensor]:
    dims = all_dims(x, dim)
    found = moments(b, x, dims, 1 if correction is None else correction)
    return found if keepdim else tuple(t.squeeze(dims) for t in found)


@register(aten.var.correction)
def var(b, x, dim=None, *, correction=None, keepdim=False):
    return _moments(b, x, dim, correction, keepdim)[0]


@register(aten.std.correction)
def std(b, x, dim=None, *, correction=None, keepdim=False):
    return sqrt(_moments(b, x, dim, correction, keepdim)[0])


@register(aten.var_mean.correction)
def var_mean(b, x, dim=None, *, correction=None, keepdim=False):
    return _moments(b, x, dim, correction, keepdim)


@register(aten.std_mean.correction)
def std_mean(b, x, dim=None, *, correction=None, keepdim=False):
    variance, average = _moments(b, x, dim, correction, keepdim)
    return sqrt(variance), average


# -- norms of vectors ----------------------------------------------------------------------------------------------
def vector_norm(b, x: Tensor, p, dims, keepdim: bool = False) -> Tensor:
    """(sum |x|^p)^(1/p) over `dims`; p = 0 counts what is not zero, +-inf is the largest or smallest |x|."""
    if not isinstance(p, (int, float)):
        raise NotCompiled("a norm whose order is known only at each call")
    x = compute(x)
    if p == 0:
        return b.reduce("sum", ne(x, 0).cast(x.dtype), dims, keepdim)
    if p == 2:
        return sqrt(b.reduce("sum", square(x), dims, keepdim))
    x = absolute(x)
    if p in (float("inf"), float("-inf")):
        return b.reduce("max" if p > 0 else "min", x, dims, keepdim)
    if p == 1:
        return b.reduce("sum", x, dims, keepdim)
    return power(b.reduce("sum", power(x, p), dims, keepdim), 1.0 / p)


@register(aten.linalg_vector_norm.default)
def linalg_vector_norm(b, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    return vector_norm(b, _as_result(b, x), ord, all_dims(x, dim), keepdim)


@register(aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.ScalarOpt_dtype)
def norm(b, x, p=2, dim=None, keepdim=False, *, dtype=None):
    return vector_norm(b, _as_result(b, x), 2 if p is None else p, all_dims(x, dim), keepdim)


@register(aten.dist.default)
def dist(b, x, y, p=2):
    difference = sub(x, y)
    return vector_norm(b, difference, p, all_dims(difference))


@register(aten.renorm.default)
def renorm(b, x, p, dim, maxnorm):
    """Slices along `dim` whose p-norm is above `maxnorm` are scaled down to it."""
    x = compute(x)
    kept = all_dims(x, dim)
    length = vector_norm(b, x, p, [d for d in range(x.rank) if d not in kept], keepdim=True)
    return mul(x, where(gt(length, maxnorm), div(maxnorm, add(length, 1e-7)), 1.0))


@register(aten.logsumexp.default)
def logsumexp(b, x, dim, keepdim=False):
    """log(sum(exp(x - m))) + m, m the maximum (0 where that is infinite: rows of -inf, +inf stay exact)."""
    x = _as_result(b, x)
    dims = all_dims(x, dim)
    top = b.reduce("max", x, dims, keepdim=True)
    top = where(eq(absolute(top), float("inf")), 0, top)
    found = add(log(b.reduce("sum", exp(sub(x, top)), dims, keepdim=True)), top)
    return found if keepdim else found.squeeze(dims)
