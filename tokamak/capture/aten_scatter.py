"""Scatters: operators that combine values into positions of one tensor that other tensors hold.

Each is one `Scatter` node. Sums and products of 16-bit floats are carried in f32 (torch rounds at every step), folds of 8- and 16-bit integers in
i32: no machine updates fewer bits by many programs at once. Bool adds as `or` and multiplies as `and`. Where torch leaves the elements' old values
out (`include_self=False`), the touched elements start from the monoid's identity.
"""
from __future__ import annotations

import math
from itertools import product
from typing import Sequence

import torch

from ..ir import ops
from ..ir.dtype import BOOL, I32, I64, compute_type
from ..ir.expr import Const, Coord, Expr, Op, Rewriter
from ..ir.index import Axis, FloorDiv, Index, as_index
from .aten_index import (advanced, along, at_least_1d, coordinates, elements, empty, every, fetched, guarded, inside, position,
                         unflatten)
from .registry import NotCompiled, register
from .tensor import Tensor, cast, compute, constant

aten = torch.ops.aten

FEW = 8                 # values at most among which an element of a scatter finds its own: what a gather of so many from each row leaves its backward
FEW_ON_CPU = 2          # the same there: of a softmax of 65536 x 64 f32 two from each row 5.3 ms, 8.0 as a scatter, of 8192 x 64 eight 0.8, 0.4
_ON_BOOL = {"sum": "any", "prod": "all", "max": "any", "min": "all"}
_REDUCTIONS = {"sum": "sum", "add": "sum", "prod": "prod", "multiply": "prod", "amax": "max", "amin": "min", "mean": "sum"}


def same_shape(b, source: Tensor, shape: Sequence, broadcast: bool = False) -> None:
    """NotCompiled when `source` is not of `shape` (or with `broadcast` none that fits it): torch raises, where its fake tensors did not."""
    ahead = len(shape) - source.rank
    fits = ahead >= 0 and all(broadcast and n == 1 or b.sizes.equal(as_index(n), as_index(m)) for n, m in zip(source.shape, shape[ahead:]))
    if not fits or ahead and not broadcast:
        raise NotCompiled("a source of another shape than what it is written to")


def combine(b, base: "Tensor | Const", shape, domain, index: Sequence[Index], value: Expr, monoid: str, guard: Expr | None = None) -> Tensor:
    """`b.scatter` with `value` and `base` (any types) brought to the type the fold is carried in: that of `base`, f32 for a fold of 16-bit floats."""
    d = base.dtype
    carried = d if monoid == "last" else compute_type(d)
    monoid = _ON_BOOL.get(monoid, monoid) if d is BOOL else monoid
    if isinstance(base, Tensor):
        base = cast(base.expr, carried) if isinstance(base.expr, Const) else base.cast(carried)
    else:
        base = cast(base, carried)
    value = cast(value, carried)
    if guard is None:
        known = _without_scatter(b, base, shape, domain, index, value, monoid) or _compared(b, base, shape, domain, index, value, monoid)
    elif monoid in ("sum", "any"):
        known = _without_scatter(b, base, shape, domain, index, Op("where", guard, value, Const(0, carried)), monoid)
    else:
        known = None
    if known is not None:
        return known
    wide = I32 if d.is_int and d.bytes < 4 and monoid != "last" else carried
    base = base.cast(wide) if isinstance(base, Tensor) else cast(base, wide)
    out = b.scatter(base, shape, domain, index, cast(value, wide), monoid, guard)
    return out.cast(carried)


def _inverse(index: Index, axis: Axis) -> tuple[int, int, int] | None:
    """(q, c, e) where `index` is (axis + c) // q + e, or None."""
    offset = index - as_index(axis)
    if offset.constant is not None:
        return 1, offset.constant, 0
    for part in index.atoms():
        if isinstance(part, FloorDiv) and part.b.constant is not None:
            outer, inner = index - as_index(part), part.a - as_index(axis)
            if outer.constant is not None and inner.constant is not None:
                return part.b.constant, inner.constant, outer.constant
    return None


def _without_scatter(b, base: "Tensor | Const", shape, domain, index: Sequence[Index], value: Expr, monoid: str) -> Tensor | None:
    """The scatter as a fold, where each result dimension's index is (an axis of its own + c) // q: element h gathers the q values
    that go to it, and sums over the domain's axes that no index has. None where it is no such map, or where the scatter may be the cheaper form."""
    shape, domain = tuple(map(as_index, shape)), tuple(map(as_index, domain))
    free = {i: Axis(i, s) for i, s in enumerate(domain) if s != 1}
    maps = []
    for i in map(as_index, index):
        axes = i.axes()
        axis = next(iter(axes)) if len(axes) == 1 else None
        found = _inverse(i, axis) if axis in free.values() else None
        if axis is None and i.constant is not None:
            maps.append(None)
        elif found is None or found[0] < 1:
            return None
        else:
            del free[axis.id]
            maps.append((axis, *found))
    folded = [m[1] for m in maps if m and m[1] > 1] + [domain[i] for i in free]
    fixed = any(m is None and s != 1 for m, s in zip(maps, shape))
    if monoid not in ("sum", "any", "last") or (folded and (fixed or monoid == "last")):
        return None
    return _gathered(b, base, shape, domain, index, value, monoid, maps, free, folded)


def _gathered(b, base, shape, domain, index, value: Expr, monoid: str, maps, free, folded) -> Tensor:
    """See `_without_scatter`: the result's element from the values that go to it, `folded` extents last."""
    c = coordinates([*shape, *folded])
    windows = iter(c[len(shape):])
    source, conditions = [as_index(0)] * len(domain), []
    for h, extent, i, m in zip(c, shape, index, maps):
        if m is None:
            if extent != 1:
                conditions.append(Op("eq", Coord(h), Coord(as_index(i))))
            continue
        axis, q, offset, outer = m
        source[axis.id] = (h - outer) * q - offset + (next(windows) if q > 1 else 0)
        conditions += inside(source[axis.id], domain[axis.id])
    for i in free:
        source[i] = next(windows)
    guard = every(conditions)
    whole = b.tensor([*shape, *folded], guarded(Tensor(domain, value), source, guard))
    if monoid == "last":
        if guard is None:
            return whole
        kept = compute(base if isinstance(base, Const) else base.expr)
        return whole.with_expr(cast(Op("where", guard, compute(whole.expr), kept), base.dtype))
    out = b.reduce(monoid, whole, range(len(shape), len(c))) if folded else whole
    if isinstance(base, Const) and not base.value:
        return out
    start = base if isinstance(base, Const) else base.expr
    return out.with_expr(Op("add" if monoid == "sum" else "or", start, out.expr))


def _compared(b, base: "Tensor | Const", shape, domain, index: Sequence[Index], value: Expr, monoid: str) -> Tensor | None:
    """The scatter as a comparison, where all elements start from one number, and each index is an axis of its own or a gathered position, so that an
    element can be one of few values only: it compares its place with theirs. None where it is no such scatter."""
    few = 1 if monoid == "last" else FEW_ON_CPU if b.spec.device == "cpu" else FEW
    shape, domain, index = tuple(map(as_index, shape)), tuple(map(as_index, domain)), tuple(map(as_index, index))
    axes = [Axis(i, s) for i, s in enumerate(domain)]
    own = {a: h for h, (i, extent) in enumerate(zip(index, shape)) for a in axes if i is as_index(a) and b.sizes.equal(a.extent, extent)}
    placed = [h for h in range(len(shape)) if h not in own.values() and (shape[h] != 1 or index[h].fetched())]
    rest = [a for a in axes if a not in own and a.extent != 1]
    counts = [a.extent.constant for a in rest]
    if not isinstance(base, Const) or monoid not in ("sum", "any", "last") or not any(index[h].fetched() for h in placed) \
            or any(shape[h] == 1 or not index[h].fetched() and index[h].constant is None for h in placed) \
            or None in counts or math.prod(counts) > few:
        return None
    c, found = coordinates(shape), compute(base) if monoid == "last" or base.value else None
    for spot in product(*map(range, counts)):
        place = Rewriter({**dict.fromkeys(axes, as_index(0)), **{a: c[h] for a, h in own.items()}, **dict(zip(rest, map(as_index, spot)))})
        here = every(Op("eq", Coord(c[h]), Coord(place.index(index[h]))) for h in placed)
        one = compute(place(value))
        one = Op("where", here, one, found if monoid == "last" else Const(0, one.dtype))
        found = one if found is None or monoid == "last" else Op("add" if monoid == "sum" else "or", found, one)
    return b.tensor(shape, cast(found, base.dtype))


def _fold(b, self: Tensor, domain, index, value: Expr, how: str, include_self: bool) -> Tensor:
    """torch's `reduce` of `value` into `self`: 'sum', 'prod', 'mean', 'amax' or 'amin', with or without the old value of the touched elements."""
    monoid = _REDUCTIONS.get(how)
    if monoid is None:
        raise NotCompiled(f"reduce='{how}'")
    if how == "mean" and self.dtype is BOOL:
        raise NotCompiled("the mean of bool")
    base = self
    if not include_self:
        touched = b.scatter(Const(False, BOOL), self.shape, domain, index, Const(True, BOOL), "any")
        start = Const(ops.identity(monoid, self.dtype), compute_type(self.dtype))
        base = self.with_expr(cast(Op("where", touched.expr, start, compute(self.expr)), self.dtype))
    out = combine(b, base, self.shape, domain, index, value, monoid)
    if how != "mean":
        return out
    count = b.scatter(Const(int(include_self), I64), self.shape, domain, index, Const(1, I64), "sum")
    divisor = cast(Op("max", count.expr, Const(1, I64)), out.dtype)
    return out.with_expr(Op("div" if out.dtype.is_float else "floordiv", out.expr, divisor))


def _along(b, self: Tensor, dim: int, index: Tensor, src: "Tensor | Expr", how: str = "last", include_self: bool = True) -> Tensor:
    """`src` (an expression: one number for all) put at `index` along `dim` of `self`."""
    shape = b.spec.shape
    if empty(index.shape):
        return self
    self, index = at_least_1d(self), at_least_1d(index)
    value = at_least_1d(src).at(index.axes) if isinstance(src, Tensor) else src
    at = along(self, dim % self.rank, index)
    if how == "last":
        out = combine(b, self, self.shape, index.shape, at, value, "last")
    else:
        out = _fold(b, self, index.shape, at, value, how, include_self)
    return out if shape else out.squeeze([0])


@register(aten.scatter.src)
def scatter_src(b, self, dim, index, src):
    return _along(b, self, dim, index, src)


@register(aten.scatter.value)
def scatter_value(b, self, dim, index, value):
    return _along(b, self, dim, index, constant(value, self.dtype))


@register(aten.scatter.reduce)
def scatter_reduce_src(b, self, dim, index, src, *, reduce):
    return _along(b, self, dim, index, src, reduce)


@register(aten.scatter.value_reduce)
def scatter_reduce_value(b, self, dim, index, value, *, reduce):
    return _along(b, self, dim, index, constant(value, self.dtype), reduce)


@register(aten.scatter_add.default)
def scatter_add(b, self, dim, index, src):
    return _along(b, self, dim, index, src, "sum")


@register(aten.scatter_reduce.two)
def scatter_reduce(b, self, dim, index, src, reduce, *, include_self=True):
    return _along(b, self, dim, index, src, reduce, include_self)


def _rows(self: Tensor, dim: int, index: Tensor, wrap: bool = False):
    """The domain self.shape with `dim` as long as the 1-d `index`, and each domain element's place in `self`."""
    index = at_least_1d(index)
    domain = [index.shape[0] if i == dim else s for i, s in enumerate(self.shape)]
    at = list(coordinates(domain))
    at[dim] = position(index.at([at[dim]]), self.shape[dim], wrap)
    return domain, at


def _by_row(b, self: Tensor, dim: int, index: Tensor, source: "Tensor | Expr", how: str, include_self: bool = True, wrap: bool = False) -> Tensor:
    """Slices of `source` (an expression: one number for all) put at positions `index` of dimension `dim`."""
    shape = b.spec.shape
    self = at_least_1d(self)
    domain, at = _rows(self, dim % self.rank, index, wrap)
    if isinstance(source, Tensor):
        same_shape(b, at_least_1d(source), domain)
    if empty(domain):
        return self if shape else self.squeeze([0])
    value = at_least_1d(source).at(coordinates(domain)) if isinstance(source, Tensor) else source
    if how == "last":
        out = combine(b, self, self.shape, domain, at, value, "last")
    else:
        out = _fold(b, self, domain, at, value, how, include_self)
    return out if shape else out.squeeze([0])


@register(aten.index_add.default)
def index_add(b, self, dim, index, source, *, alpha=1):
    if not (isinstance(alpha, (int, float)) and alpha == 1) and self.dtype is not BOOL:
        scaled = compute(source.expr)
        source = source.with_expr(Op("mul", scaled, constant(alpha, scaled.dtype)))
    return _by_row(b, self, dim, index, source, "sum")


@register(aten.index_copy.default)
def index_copy(b, self, dim, index, source):
    return _by_row(b, self, dim, index, source, "last")


@register(aten.index_fill.int_Scalar)
def index_fill(b, self, dim, index, value):
    return _by_row(b, self, dim, index, constant(value, self.dtype), "last", wrap=True)


@register(aten.index_fill.int_Tensor)
def index_fill_tensor(b, self, dim, index, value):
    return _by_row(b, self, dim, index, cast(value.at([0] * value.rank), self.dtype), "last", wrap=True)


@register(aten.index_reduce.default)
def index_reduce(b, self, dim, index, source, reduce, *, include_self=True):
    return _by_row(b, self, dim, index, source, reduce, include_self)


def _selection(self: Tensor, indices) -> tuple[list[Index], int]:
    """The shape of `self[indices]`; NotCompiled for masks (by `advanced`)."""
    used = [d for d, i in enumerate(indices) if i is not None]
    common = _common_shape([indices[d] for d in used])
    rest = [s for d, s in enumerate(self.shape) if d >= len(indices) or indices[d] is None]
    adjacent = used[-1] - used[0] == len(used) - 1
    lead = used[0] if adjacent else 0
    return [*rest[:lead], *common, *rest[lead:]]


def _common_shape(tensors: Sequence[Tensor]) -> list[Index]:
    rank = max(t.rank for t in tensors)
    out = [as_index(1)] * rank
    for t in tensors:
        for k, s in enumerate(t.shape):
            if s != 1:
                out[rank - t.rank + k] = s
    return out


def _put(b, self: Tensor, indices, values: Tensor, accumulate: bool, mask: Tensor | None = None) -> Tensor:
    if all(i is None for i in indices):
        raise NotCompiled("index_put without an index")
    domain = _selection(self, indices)
    same_shape(b, values, domain, broadcast=True)
    at = advanced(self, indices, domain)
    if empty(domain):
        return self
    guard = None if mask is None else mask.expand(domain).expr
    if guard is not None and guard.dtype is not BOOL:
        raise NotCompiled(f"a mask of type {guard.dtype}")
    return combine(b, self, self.shape, domain, at, values.expand(domain).expr, "sum" if accumulate else "last", guard)


@register(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(b, self, indices, values, accumulate=False):
    return _put(b, self, indices, values, accumulate)


@register(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(b, self, mask, indices, values):
    return _put(b, self, indices, values, True, mask)


@register(aten.put.default)
def put(b, self, index, source, accumulate=False):
    same_shape(b, source.reshape([elements(source.shape)]), [elements(index.shape)])
    if empty(index.shape):
        return self
    whole = at_least_1d(self)
    at = unflatten(position(index.expr, elements(self.shape), wrap=True), whole.shape)
    value = source.reshape(index.shape).expr
    out = combine(b, whole, whole.shape, index.shape, at, value, "sum" if accumulate else "last")
    return out if self.rank else out.squeeze([0])


@register(aten.embedding_dense_backward.default)
def embedding_dense_backward(b, grad_output, indices, num_weights, padding_idx, scale_grad_by_freq):
    shape, domain = b.spec.shape, grad_output.shape
    if empty(domain):
        return b.tensor(shape, Const(0, grad_output.dtype))
    place = indices.at(coordinates(domain)[:indices.rank])
    row = position(place, shape[0])
    value = grad_output.expr
    if scale_grad_by_freq:
        count = b.scatter(Const(0, I64), [shape[0]], indices.shape, [position(indices.expr, shape[0])], Const(1, I64), "sum")
        value = compute(value)
        value = Op("div", value, cast(fetched(b, count, [row]), value.dtype))
    negative = isinstance(padding_idx, int) and padding_idx < 0        # no row is padding
    guard = None if negative else Op("ne", cast(place, I64), constant(padding_idx, I64))
    return combine(b, Const(0, grad_output.dtype), shape, domain, [row, coordinates(domain)[-1]], value, "sum", guard)
