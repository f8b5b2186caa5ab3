"""Joining and padding, diagonals and slices written into a tensor: guarded loads. Outside its window an operand is not read."""
from __future__ import annotations

from typing import Callable, Sequence

import torch

from ..ir.dtype import DType
from ..ir.expr import Expr, Op
from ..ir.index import Index, as_index, axis
from ..ir.normal import floordiv, maximum, minimum, mod
from .aten_scatter import combine, same_shape
from .aten_views import along, offsets, wrap, first_of
from .guards import both, choose, coord, equal, inside, within, zero
from .registry import register
from .tensor import Tensor, cast, compute, constant

aten = torch.ops.aten


# -- joining and padding ---------------------------------------------------------------------------------------------
def join(b, parts: Sequence[Tensor], dim: int, shape: Sequence[Index], common: DType) -> Tensor:
    """The parts one after another along `dim`, as `common` in its compute type."""
    ends, total = [], as_index(0)
    for t in parts:
        ends.append((total, total + t.shape[dim]))
        total = total + t.shape[dim]
    coords = [axis(i, n) for i, n in enumerate(shape)]
    here = coords[dim]
    expr: Expr | None = None
    for t, (low, high) in reversed(list(zip(parts, ends))):
        if t.shape[dim] == 0:
            continue
        part = inside(t, [*coords[:dim], here - low, *coords[dim + 1:]], within(here, low, high), zero(t.dtype))
        part = compute(cast(part, common))
        expr = part if expr is None else choose(Op("lt", coord(here), coord(high)), part, expr)
    return b.tensor(shape, expr if expr is not None else zero(common))


@register(aten.cat.default, aten.concat.default)
def cat(b, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = b.spec.shape
    parts = [t for t in tensors if not (t.rank == 1 and t.shape[0] == 0 and len(shape) != 1)]
    return join(b, parts, dim % len(shape), shape, b.spec.dtype)


@register(aten.stack.default)
def stack(b, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim = dim % len(b.spec.shape)
    return join(b, [t.unsqueeze(dim) for t in tensors], dim, b.spec.shape, b.spec.dtype)


@register(aten.constant_pad_nd.default)
def constant_pad(b, x: Tensor, pad, value=0) -> Tensor:
    before = [0] * x.rank
    for k in range(len(pad) // 2):
        before[x.rank - 1 - k] = pad[2 * k]
    place = [axis(i, n) - p for i, (n, p) in enumerate(zip(b.spec.shape, before))]
    guard = both(*(within(c, 0, n) for c, n in zip(place, x.shape)))
    return b.tensor(b.spec.shape, inside(x, place, guard, constant(value, x.dtype)))


def _padded(at: Callable[[Index, Index], Index]):
    """A pad of the last dimensions whose element reads x at at(coordinate - pad, extent)."""
    def build(b, x: Tensor, pad) -> Tensor:
        for k in range(len(pad) // 2):
            d = x.rank - 1 - k
            n, before = x.shape[d], pad[2 * k]
            x = along(x, d, b.spec.shape[d], lambda c, n=n, before=before: at(c - before, n))
        return x
    return build


def _reflect(i: Index, n: Index) -> Index:
    right = n - 1 - maximum(i, -i)
    return n - 1 - maximum(right, -right)


def _clamped(i: Index, n: Index) -> Index:
    return minimum(maximum(i, 0), n - 1)


register(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)(_padded(_reflect))
register(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)(_padded(_clamped))


@register(aten.block_diag.default)
def block_diag(b, tensors: Sequence[Tensor]) -> Tensor:
    row, column = (axis(i, n) for i, n in enumerate(b.spec.shape))
    down = right = as_index(0)
    expr: Expr = zero(b.spec.dtype)
    for t in tensors:
        t = t.expand((1,) * (2 - t.rank) + t.shape).cast(b.spec.dtype)
        guard = both(within(row - down, 0, t.shape[0]), within(column - right, 0, t.shape[1]))
        expr = inside(t, [row - down, column - right], guard, expr)
        down, right = down + t.shape[0], right + t.shape[1]
    return b.tensor(b.spec.shape, expr)


# -- diagonals -------------------------------------------------------------------------------------------------------
def _on_diagonal(b, value: Tensor, offset: int, dim1: int, dim2: int, other: Tensor | None) -> Tensor:
    """`value` written on a diagonal of `other` (zeros when None), in the traced shape."""
    shape = b.spec.shape
    rank = len(shape)
    dim1, dim2, (down, right) = dim1 % rank, dim2 % rank, offsets(offset)
    coords = [axis(i, n) for i, n in enumerate(shape)]
    row, column = coords[dim1] - down, coords[dim2] - right
    guard = both(equal(row, column), within(row, 0, value.shape[-1]))
    rest = [c for d, c in enumerate(coords) if d not in (dim1, dim2)]
    return b.tensor(shape, inside(value, [*rest, row], guard, other.expr if other is not None else zero(value.dtype)))


@register(aten.diag_embed.default)
def diag_embed(b, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    return _on_diagonal(b, x, offset, dim1, dim2, None)


@register(aten.diagonal_backward.default)
def diagonal_backward(b, g: Tensor, sizes, offset: int, dim1: int, dim2: int) -> Tensor:
    return _on_diagonal(b, g, offset, dim1, dim2, None)


@register(aten.diagonal_scatter.default)
def diagonal_scatter(b, x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    (down, right), sides = offsets(offset), (dim1 % x.rank, dim2 % x.rank)
    length = maximum(minimum(x.shape[sides[0]] - down, x.shape[sides[1]] - right), as_index(0))
    same_shape(b, source, [*(n for d, n in enumerate(x.shape) if d not in sides), length])
    return _on_diagonal(b, source.cast(x.dtype), offset, dim1, dim2, x)


def _triangle(keep: str):
    """tril or triu: column - row compared with `diagonal` by `keep`."""
    def build(b, x: Tensor, diagonal: int = 0) -> Tensor:
        row, column = (axis(i, x.shape[i]) for i in (x.rank - 2, x.rank - 1))
        return x.with_expr(choose(Op(keep, coord(column), coord(row + diagonal)), x.expr, zero(x.dtype)))
    return build


register(aten.tril.default)(_triangle("le"))
register(aten.triu.default)(_triangle("ge"))


# -- the scatters of views -------------------------------------------------------------------------------------------
def _into_slice(b, source: Tensor, other: Tensor | None, dim: int, start, step) -> Tensor:
    """`source` written into a slice of `other` (zeros when None), in the traced shape."""
    shape = b.spec.shape
    dim = dim % len(shape)
    coords = [axis(i, n) for i, n in enumerate(shape)]
    ahead = coords[dim] - first_of(start, shape[dim])
    place = floordiv(ahead, step)
    on_step = equal(mod(ahead, step), as_index(0))
    guard = both(on_step, within(place, 0, source.shape[dim]))
    return b.tensor(shape, inside(source, [*coords[:dim], place, *coords[dim + 1:]], guard, other.expr if other is not None else zero(source.dtype)))


@register(aten.slice_scatter.default)
def slice_scatter(b, x: Tensor, source: Tensor, dim: int = 0, start=None, end=None, step=1) -> Tensor:
    dim, first = dim % x.rank, first_of(start, x.shape[dim % x.rank])
    last = maximum(first_of(x.shape[dim] if end is None else end, x.shape[dim]), first)
    same_shape(b, source, [*x.shape[:dim], floordiv(last - first + step - 1, step), *x.shape[dim + 1:]])
    return _into_slice(b, source.cast(x.dtype), x, dim, start, step)


@register(aten.slice_backward.default)
def slice_backward(b, g: Tensor, sizes, dim: int, start, end, step) -> Tensor:
    return _into_slice(b, g, None, dim, start, step)


def _into_select(b, source: Tensor, other: Tensor | None, dim: int, index) -> Tensor:
    n = b.spec.shape[dim % len(b.spec.shape)]
    dim = dim % len(b.spec.shape)
    return _into_slice(b, source.unsqueeze(dim), other, dim, wrap(index, n), 1)


@register(aten.select_scatter.default)
def select_scatter(b, x: Tensor, source: Tensor, dim: int, index) -> Tensor:
    same_shape(b, source, [n for d, n in enumerate(x.shape) if d != dim % x.rank])
    return _into_select(b, source.cast(x.dtype), x, dim, index)


@register(aten.select_backward.default)
def select_backward(b, g: Tensor, sizes, dim: int, index) -> Tensor:
    return _into_select(b, g, None, dim, index)


@register(aten.unfold_backward.default)
def unfold_backward(b, g: Tensor, sizes, dim: int, size, step) -> Tensor:
    """Windows may overlap: the gradient of an element is the sum over the windows that show it. Torch broadcasts `g` along other axes than `dim`
    (istft folds its window for the whole batch)."""
    shape = b.spec.shape
    dim = dim % len(shape) if shape else 0
    if shape:
        g = g.expand((*shape[:dim], g.shape[dim], *shape[dim + 1:], g.shape[-1]))
    c = g.axes
    index = [*c[:dim], c[dim] * step + c[-1], *c[dim + 1:-1]] if shape else []
    return combine(b, zero(b.spec.dtype), shape, g.shape, index, g.expr, "sum")
