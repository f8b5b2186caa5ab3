"""Views, and what moves elements without changing them: index maps."""
from __future__ import annotations

from typing import Callable, Sequence

import torch

from ..ir.expr import Load
from ..ir.index import Index, as_index, axis, row_major
from ..ir.normal import floordiv, maximum, minimum, mod
from ..ir.ranges import nonnegative
from .registry import TABLE, NotCompiled, register
from .tensor import Tensor, strided

aten = torch.ops.aten


# -- shapes ----------------------------------------------------------------------------------------------------------
@register(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)
def view(b, x: Tensor, *shape) -> Tensor:
    return x.reshape(b.spec.shape)


@register(aten.view.dtype)
def view_dtype(b, x: Tensor, dtype) -> Tensor:
    if b.spec.dtype is not x.dtype:
        raise NotCompiled("the bits of one type read as another")
    return x


@register(aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.lift.default)
def same(b, x: Tensor) -> Tensor:
    return x


@register(aten.expand.default)
def expand(b, x: Tensor, shape, implicit=False) -> Tensor:
    return x.expand(b.spec.shape)


@register(aten.permute.default)
def permute(b, x: Tensor, dims) -> Tensor:
    return x.permute(dims) if x.rank else x


@register(aten.transpose.int, aten.t.default)
def transpose(b, x: Tensor, dim0: int = 0, dim1: int = 1) -> Tensor:
    if x.rank < 2:
        return x
    dims = list(range(x.rank))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return x.permute(dims)


@register(aten.unsqueeze.default)
def unsqueeze(b, x: Tensor, dim: int) -> Tensor:
    return x.unsqueeze(dim)


@register(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(b, x: Tensor, dims=None) -> Tensor:
    dims = range(x.rank) if dims is None else (dims,) if isinstance(dims, int) else dims
    return x.squeeze(dims)


# -- windows ---------------------------------------------------------------------------------------------------------
def along(x: Tensor, dim: int, extent, at: Callable[[Index], Index]) -> Tensor:
    """`x` with dimension `dim` of `extent`, whose coordinate c reads x's at(c)."""
    dim = dim % x.rank
    shape = [*x.shape[:dim], extent, *x.shape[dim + 1:]]
    return x.view(shape, lambda c: [*c[:dim], at(c[dim]), *c[dim + 1:]])


def wrap(place, extent: Index) -> Index:
    """A Python index (negative counts from the end) as a plain one."""
    place = as_index(place)
    if nonnegative(place):
        return place
    if nonnegative(-place - 1):
        return place + extent
    raise NotCompiled(f"the sign of index {place!r} is not known")


def first_of(start, extent: Index) -> Index:
    """The first element of a slice, clamped as Python clamps."""
    return minimum(maximum(wrap(0 if start is None else start, extent), 0), extent)


@register(aten.slice.Tensor)
def slice_(b, x: Tensor, dim: int = 0, start=None, end=None, step=1) -> Tensor:
    dim = dim % x.rank
    first = first_of(start, x.shape[dim])
    return along(x, dim, b.spec.shape[dim], lambda c: first + c * step)


@register(aten.narrow.default)
def narrow(b, x: Tensor, dim: int, start, length) -> Tensor:
    return slice_(b, x, dim, start)


@register(aten.select.int)
def select(b, x: Tensor, dim: int, index) -> Tensor:
    dim = dim % x.rank
    place = wrap(index, x.shape[dim])
    return x.view([*x.shape[:dim], *x.shape[dim + 1:]], lambda c: [*c[:dim], place, *c[dim:]])


@register(aten.unbind.int)
def unbind(b, x: Tensor, dim: int = 0):
    return tuple(select(b, x, dim, i) for i in range(len(b.specs)))


@register(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def split(b, x: Tensor, sizes, dim: int = 0):
    out, offset = [], as_index(0)
    for s in b.specs:
        extent = s.shape[dim % x.rank]
        out.append(along(x, dim, extent, lambda c, offset=offset: c + offset))
        offset = offset + extent
    return tuple(out)


@register(aten.flip.default)
def flip(b, x: Tensor, dims) -> Tensor:
    for d in dims:
        n = x.shape[d % x.rank] if x.rank else None
        x = along(x, d, n, lambda c, n=n: n - 1 - c) if x.rank else x
    return x


@register(aten.roll.default)
def roll(b, x: Tensor, shifts, dims=()) -> Tensor:
    if not x.rank:
        return x
    shifts = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
    if not dims:
        return rolled(x.reshape([count(x.shape)]), 0, shifts[0]).reshape(x.shape)
    for s, d in zip(shifts, dims):
        x = rolled(x, d, s)
    return x


def rolled(x: Tensor, dim: int, shift) -> Tensor:
    """`x` with element c - shift at c along `dim`."""
    n = x.shape[dim % x.rank]
    return along(x, dim, n, lambda c: mod(c - shift, n)) if n != 0 else x


def count(shape: Sequence[Index]) -> Index:
    total = as_index(1)
    for s in shape:
        total = total * s
    return total


@register(aten.rot90.default)
def rot90(b, x: Tensor, k: int = 1, dims=(0, 1)) -> Tensor:
    k, (p, q) = k % 4, dims
    if k % 2:
        x = transpose(b, x, p, q)
    return flip(b, x, {0: (), 1: (p,), 2: (p, q), 3: (q,)}[k])


@register(aten.unfold.default)
def unfold(b, x: Tensor, dim: int, size, step) -> Tensor:
    if not x.rank:
        return x.view(b.spec.shape, lambda c: [])
    dim = dim % x.rank
    return x.view(b.spec.shape, lambda c: [*c[:dim], c[dim] * step + c[-1], *c[dim + 1:-1]])


@register(aten.repeat.default)
def repeat(b, x: Tensor, repeats) -> Tensor:
    lead = len(repeats) - x.rank
    return x.view(b.spec.shape, lambda c: [mod(i, n) if n != 0 else i for i, n in zip(c[lead:], x.shape)])


@register(aten.pixel_shuffle.default)
def pixel_shuffle(b, x: Tensor, factor: int) -> Tensor:
    def at(c):
        *lead, ch, h, w = c
        return [*lead, (ch * factor + mod(h, factor)) * factor + mod(w, factor), floordiv(h, factor), floordiv(w, factor)]
    return x.view(b.spec.shape, at)


@register(aten.pixel_unshuffle.default)
def pixel_unshuffle(b, x: Tensor, factor: int) -> Tensor:
    def at(c):
        *lead, ch, h, w = c
        return [*lead, floordiv(ch, factor * factor), h * factor + mod(floordiv(ch, factor), factor), w * factor + mod(ch, factor)]
    return x.view(b.spec.shape, at)


@register(aten.channel_shuffle.default)
def channel_shuffle(b, x: Tensor, groups: int) -> Tensor:
    deep = floordiv(x.shape[1], groups)
    return along(x, 1, x.shape[1], lambda c: mod(c, groups) * deep + floordiv(c, groups))


@register(aten.as_strided.default)
def as_strided(b, x: Tensor, shape, strides, offset=None) -> Tensor:
    """A window on the memory under `x`, as an index map: the memory must be one dense node, so that a place in it has coordinates."""
    base = strided(x)
    if base is None:
        raise NotCompiled("as_strided of a value that is no window on one buffer")
    node = base.node
    order = sorted((i for i, n in enumerate(node.shape) if n != 1), key=lambda i: node.strides[i].constant or 0, reverse=True)
    if tuple(node.strides[i] for i in order) != row_major([node.shape[i] for i in order]):
        raise NotCompiled("as_strided over memory with gaps")
    flat = base.offset
    if offset is not None:
        flat = flat + offset - b.sizes.index(b.fx.args[0].meta["val"].storage_offset())
    for i, (n, s) in enumerate(zip(b.spec.shape, strides)):
        flat = flat + axis(i, n) * s
    if not (nonnegative(flat) and nonnegative(count(node.shape) - flat - 1)) and all(n != 0 for n in b.spec.shape):
        raise NotCompiled("as_strided beyond what its node holds")
    place = dict.fromkeys(range(len(node.shape)), as_index(0))
    for k, i in enumerate(order):
        whole = floordiv(flat, node.strides[i])
        place[i] = mod(whole, node.shape[i]) if k else whole
    return b.tensor(b.spec.shape, Load(node, tuple(place.values())))


# -- diagonals -------------------------------------------------------------------------------------------------------
def diagonal_index(coords: Sequence, dim1: int, dim2: int, row, column) -> list:
    """`coords` (without the two dimensions) with `row` at dim1 and `column` at dim2."""
    rest, out = list(coords), []
    for d in range(len(rest) + 2):
        out.append(row if d == dim1 else column if d == dim2 else rest.pop(0))
    return out


def offsets(offset: int) -> tuple[int, int]:
    return max(-offset, 0), max(offset, 0)


@register(aten.diagonal.default)
def diagonal(b, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    down, right = offsets(offset)
    return x.view(b.spec.shape, lambda c: diagonal_index(c[:-1], dim1 % x.rank, dim2 % x.rank, c[-1] + down, c[-1] + right))


def _copies() -> None:
    """Each view's out-of-place twin (aten.permute_copy, ...) is the same index map."""
    for target, build in [(t, f) for t, f in TABLE.items() if f.__module__ == __name__]:
        name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
        twin = getattr(aten, f"{name}_copy", None) if any(r.alias_info is not None for r in target._schema.returns) else None
        if twin is not None and overload in twin.overloads():
            register(getattr(twin, overload))(build)


_copies()
