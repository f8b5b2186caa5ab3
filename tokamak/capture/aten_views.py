"""Views, and what moves elements without changing them: index maps, never nodes.

Padding, concatenation and the scatters of a slice are guarded loads: outside its window an operand is not read.
"""
from __future__ import annotations

from typing import Callable, Sequence

import torch

from ..ir.dtype import BOOL, DType
from ..ir.expr import Const, Coord, Expr, Load, Op, Rewriter
from ..ir.index import Index, as_index, axis, floordiv, maximum, minimum, mod, nonnegative, row_major
from .aten_scatter import combine
from .registry import TABLE, NotCompiled, register
from .tensor import Tensor, cast, compute, constant, strided

aten = torch.ops.aten


# -- guards ----------------------------------------------------------------------------------------------------------
def coord(index) -> Coord:
    return Coord(as_index(index))


def within(index, low, high) -> Expr:
    """low <= index < high, without the half that is proved."""
    index, low, high = as_index(index), as_index(low), as_index(high)
    parts = []
    if not nonnegative(index - low):
        parts.append(Op("ge", coord(index), coord(low)))
    if not nonnegative(high - index - 1):
        parts.append(Op("lt", coord(index), coord(high)))
    return both(*parts)


def both(*conditions: Expr) -> Expr:
    """All of the conditions; those that are constants are folded."""
    left = [c for c in conditions if not (isinstance(c, Const) and c.value)]
    if any(isinstance(c, Const) for c in left):
        return Const(False, BOOL)
    total = left[0] if left else Const(True, BOOL)
    for c in left[1:]:
        total = Op("and", total, c)
    return total


def guarded(expr: Expr, guard: Expr) -> Expr:
    """`expr` with every load under `guard`: where it is false nothing is read, and the value is of no use."""
    def leaf(e: Expr):
        if isinstance(e, Load):
            return Load(e.node, e.index, both(guard, *((e.guard,) if e.guard is not None else ())), e.other or Const(0, e.node.dtype))
        return None
    return Rewriter(leaf=leaf)(expr)


def inside(t: Tensor, index: Sequence, guard: Expr, other: Expr) -> Expr:
    """Element `index` of `t` where `guard` holds, else `other` (an expression of t's type)."""
    expr = t.at(index)
    if isinstance(guard, Const):
        return expr if guard.value else other
    if isinstance(expr, Load) and isinstance(other, Const) and expr.guard is None:
        return Load(expr.node, expr.index, guard, other)
    return choose(guard, guarded(expr, guard), other)


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    """`a` where `condition`, else `b`, both of one type; 16-bit floats pass through f32, which is exact."""
    if isinstance(condition, Const):
        return a if condition.value else b
    return cast(Op("where", condition, compute(a), compute(b)), a.dtype)


def zero(d: DType) -> Const:
    return Const(0, d)


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
def _along(x: Tensor, dim: int, extent, at: Callable[[Index], Index]) -> Tensor:
    """`x` with dimension `dim` of `extent`, whose coordinate c reads x's at(c)."""
    dim = dim % x.rank
    shape = [*x.shape[:dim], extent, *x.shape[dim + 1:]]
    return x.view(shape, lambda c: [*c[:dim], at(c[dim]), *c[dim + 1:]])


def _wrap(place, extent: Index) -> Index:
    """A Python index (negative counts from the end) as a plain one."""
    place = as_index(place)
    if nonnegative(place):
        return place
    if nonnegative(-place - 1):
        return place + extent
    raise NotCompiled(f"the sign of index {place!r} is not known")


def _start(start, extent: Index) -> Index:
    """The first element of a slice, clamped as Python clamps."""
    return minimum(maximum(_wrap(0 if start is None else start, extent), 0), extent)


@register(aten.slice.Tensor)
def slice_(b, x: Tensor, dim: int = 0, start=None, end=None, step=1) -> Tensor:
    dim = dim % x.rank
    first = _start(start, x.shape[dim])
    return _along(x, dim, b.spec.shape[dim], lambda c: first + c * step)


@register(aten.narrow.default)
def narrow(b, x: Tensor, dim: int, start, length) -> Tensor:
    return slice_(b, x, dim, start)


@register(aten.select.int)
def select(b, x: Tensor, dim: int, index) -> Tensor:
    dim = dim % x.rank
    place = _wrap(index, x.shape[dim])
    return x.view([*x.shape[:dim], *x.shape[dim + 1:]], lambda c: [*c[:dim], place, *c[dim:]])


@register(aten.unbind.int)
def unbind(b, x: Tensor, dim: int = 0):
    return tuple(select(b, x, dim, i) for i in range(len(b.specs)))


@register(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def split(b, x: Tensor, sizes, dim: int = 0):
    out, offset = [], as_index(0)
    for s in b.specs:
        extent = s.shape[dim % x.rank]
        out.append(_along(x, dim, extent, lambda c, offset=offset: c + offset))
        offset = offset + extent
    return tuple(out)


@register(aten.flip.default)
def flip(b, x: Tensor, dims) -> Tensor:
    for d in dims:
        n = x.shape[d % x.rank] if x.rank else None
        x = _along(x, d, n, lambda c, n=n: n - 1 - c) if x.rank else x
    return x


@register(aten.roll.default)
def roll(b, x: Tensor, shifts, dims=()) -> Tensor:
    if not x.rank:
        return x
    shifts = shifts if isinstance(shifts, (tuple, list)) else (shifts,)
    if not dims:
        return _roll(x.reshape([_count(x.shape)]), 0, shifts[0]).reshape(x.shape)
    for s, d in zip(shifts, dims):
        x = _roll(x, d, s)
    return x


def _roll(x: Tensor, dim: int, shift) -> Tensor:
    n = x.shape[dim % x.rank]
    return _along(x, dim, n, lambda c: mod(c - shift, n)) if n != 0 else x


def _count(shape: Sequence[Index]) -> Index:
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
    return _along(x, 1, x.shape[1], lambda c: mod(c, groups) * deep + floordiv(c, groups))


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
    if not (nonnegative(flat) and nonnegative(_count(node.shape) - flat - 1)) and all(n != 0 for n in b.spec.shape):
        raise NotCompiled("as_strided beyond what its node holds")
    place = dict.fromkeys(range(len(node.shape)), as_index(0))
    for k, i in enumerate(order):
        whole = floordiv(flat, node.strides[i])
        place[i] = mod(whole, node.shape[i]) if k else whole
    return b.tensor(b.spec.shape, Load(node, tuple(place.values())))


# -- diagonals -------------------------------------------------------------------------------------------------------
def _diagonal_index(coords: Sequence, dim1: int, dim2: int, row, column) -> list:
    """`coords` (without the two dimensions) with `row` at dim1 and `column` at dim2."""
    rest, out = list(coords), []
    for d in range(len(rest) + 2):
        out.append(row if d == dim1 else column if d == dim2 else rest.pop(0))
    return out


def _offsets(offset: int) -> tuple[int, int]:
    return max(-offset, 0), max(offset, 0)


@register(aten.diagonal.default)
def diagonal(b, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    down, right = _offsets(offset)
    return x.view(b.spec.shape, lambda c: _diagonal_index(c[:-1], dim1 % x.rank, dim2 % x.rank, c[-1] + down, c[-1] + right))


def _on_diagonal(b, value: Tensor, offset: int, dim1: int, dim2: int, other: Tensor | None) -> Tensor:
    """`value` written on a diagonal of `other` (zeros when None), in the traced shape."""
    shape = b.spec.shape
    rank = len(shape)
    dim1, dim2, (down, right) = dim1 % rank, dim2 % rank, _offsets(offset)
    coords = [axis(i, n) for i, n in enumerate(shape)]
    row, column = coords[dim1] - down, coords[dim2] - right
    guard = both(_equal(row, column), within(row, 0, value.shape[-1]))
    rest = [c for d, c in enumerate(coords) if d not in (dim1, dim2)]
    return b.tensor(shape, inside(value, [*rest, row], guard, other.expr if other is not None else zero(value.dtype)))


def _equal(p: Index, q: Index) -> Expr:
    distance = (p - q).constant
    return Const(distance == 0, BOOL) if distance is not None else Op("eq", coord(p), coord(q))


@register(aten.diag_embed.default)
def diag_embed(b, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    return _on_diagonal(b, x, offset, dim1, dim2, None)


@register(aten.diagonal_backward.default)
def diagonal_backward(b, g: Tensor, sizes, offset: int, dim1: int, dim2: int) -> Tensor:
    return _on_diagonal(b, g, offset, dim1, dim2, None)


@register(aten.diagonal_scatter.default)
def diagonal_scatter(b, x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return _on_diagonal(b, source.cast(x.dtype), offset, dim1, dim2, x)


def _triangle(keep: str):
    """tril or triu: column - row compared with `diagonal` by `keep`."""
    def build(b, x: Tensor, diagonal: int = 0) -> Tensor:
        row, column = (axis(i, x.shape[i]) for i in (x.rank - 2, x.rank - 1))
        return x.with_expr(choose(Op(keep, coord(column), coord(row + diagonal)), x.expr, zero(x.dtype)))
    return build


register(aten.tril.default)(_triangle("le"))
register(aten.triu.default)(_triangle("ge"))


# -- joining and padding ---------------------------------------------------------------------------------------------
def join(b, parts: Sequence[Tensor], dim: int, shape: Sequence[Index], common: DType) -> Tensor:
    """The parts one after another along `dim`, as `common`."""
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
        part = cast(inside(t, [*coords[:dim], here - low, *coords[dim + 1:]], within(here, low, high), zero(t.dtype)), common)
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
            x = _along(x, d, b.spec.shape[d], lambda c, n=n, before=before: at(c - before, n))
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


# -- the scatters of views -------------------------------------------------------------------------------------------
def _into_slice(b, source: Tensor, other: Tensor | None, dim: int, start, step) -> Tensor:
    """`source` written into a slice of `other` (zeros when None), in the traced shape."""
    shape = b.spec.shape
    dim = dim % len(shape)
    coords = [axis(i, n) for i, n in enumerate(shape)]
    ahead = coords[dim] - _start(start, shape[dim])
    place = floordiv(ahead, step)
    on_step = _equal(mod(ahead, step), as_index(0))
    guard = both(on_step, within(place, 0, source.shape[dim]))
    return b.tensor(shape, inside(source, [*coords[:dim], place, *coords[dim + 1:]], guard, other.expr if other is not None else zero(source.dtype)))


@register(aten.slice_scatter.default)
def slice_scatter(b, x: Tensor, source: Tensor, dim: int = 0, start=None, end=None, step=1) -> Tensor:
    return _into_slice(b, source.cast(x.dtype), x, dim, start, step)


@register(aten.slice_backward.default)
def slice_backward(b, g: Tensor, sizes, dim: int, start, end, step) -> Tensor:
    return _into_slice(b, g, None, dim, start, step)


def _into_select(b, source: Tensor, other: Tensor | None, dim: int, index) -> Tensor:
    n = b.spec.shape[dim % len(b.spec.shape)]
    dim = dim % len(b.spec.shape)
    return _into_slice(b, source.unsqueeze(dim), other, dim, _wrap(index, n), 1)


@register(aten.select_scatter.default)
def select_scatter(b, x: Tensor, source: Tensor, dim: int, index) -> Tensor:
    return _into_select(b, source.cast(x.dtype), x, dim, index)


@register(aten.select_backward.default)
def select_backward(b, g: Tensor, sizes, dim: int, index) -> Tensor:
    return _into_select(b, g, None, dim, index)


@register(aten.unfold_backward.default)
def unfold_backward(b, g: Tensor, sizes, dim: int, size, step) -> Tensor:
    """Windows may overlap: the gradient of an element is the sum over the windows that show it."""
    shape, c = b.spec.shape, g.axes
    dim = dim % len(shape) if shape else 0
    index = [*c[:dim], c[dim] * step + c[-1], *c[dim + 1:-1]] if shape else []
    return combine(b, zero(b.spec.dtype), shape, g.shape, index, g.expr, "sum")


def _copies() -> None:
    """Each view's out-of-place twin (aten.permute_copy, ...) is the same index map."""
    for target, build in list(TABLE.items()):
        name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
        twin = getattr(aten, f"{name}_copy", None) if any(r.alias_info is not None for r in target._schema.returns) else None
        if twin is not None and overload in twin.overloads():
            register(getattr(twin, overload))(build)


_copies()
