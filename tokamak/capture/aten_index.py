"""Gathers: operators whose result reads one tensor at positions that other tensors hold.

A gathered position is `as_index(Fetch(expression, bound))`: it checks itself against the bound (see `ir.index.Fetch`). Where torch counts negative
positions from the end, the expression wraps them first. The guard helpers at the top are what pooling, padding and scatters read through as well.
"""
from __future__ import annotations

from functools import reduce
from typing import Iterable, Sequence

import torch

from ..ir.dtype import BOOL, I64, U8, compute_type
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Rewriter, walk
from ..ir.index import Axis, Fetch, Index, as_index, axis
from ..ir.ranges import bounds, nonnegative
from .positions import closed_form
from .registry import NotCompiled, register
from .tensor import Tensor, cast, compute, constant, reshape_index, size_value

aten = torch.ops.aten


# -- guards --------------------------------------------------------------------------------------------------------
def every(conditions: Iterable[Expr]) -> Expr | None:
    """All of the bool `conditions`; None when there are none."""
    conditions = tuple(conditions)
    return reduce(lambda a, b: Op("and", a, b), conditions) if conditions else None


def inside(index: Index | int, extent: Index | int) -> list[Expr]:
    """The conditions of 0 <= index < extent that cannot be proved."""
    index, extent = as_index(index), as_index(extent)
    low, high = bounds(index)
    found = []
    if low is None or not nonnegative(low):
        found.append(Op("ge", Coord(index), Const(0, I64)))
    if high is None or not nonnegative(extent - 1 - high):
        found.append(Op("lt", Coord(index), Coord(extent)))
    return found


def guarded(t: Tensor, index: Sequence[Index | int], guard: Expr | None, other=0) -> Expr:
    """The element of `t` at `index`; where `guard` is false the number `other`, and nothing is read there. A plain Load keeps its own type;
    anything else comes in the compute type."""
    value = t.at(index)
    if guard is None:
        return value

    def leaf(e: Expr) -> Expr | None:
        if not isinstance(e, Load):
            return None
        if e.guard is None:
            return Load(e.node, e.index, guard, Const(0, e.dtype))
        return Load(e.node, e.index, Op("and", guard, e.guard), e.other)
    rewrite = Rewriter(leaf=leaf)
    if isinstance(value, Load) and value.guard is None:
        return Load(value.node, tuple(rewrite.index(i) for i in value.index), guard, Const(other, value.dtype))
    if isinstance(value, Cast) and isinstance(value.arg, Load) and value.arg.guard is None and value.dtype.is_float and value.arg.dtype.is_float:
        load = value.arg
        return cast(Load(load.node, tuple(rewrite.index(i) for i in load.index), guard, Const(other, load.dtype)), value.dtype, value.implicit)
    value = compute(rewrite(value))
    return Op("where", guard, value, Const(other, value.dtype))


# -- gathered positions --------------------------------------------------------------------------------------------
def empty(shape: Sequence[Index | int]) -> bool:
    """Known to have no element."""
    return any(as_index(s) == 0 for s in shape)


def position(expr: Expr, extent: Index | int, wrap: bool = False) -> Index:
    """The value of `expr` as a position below `extent`, checked when it is read; with `wrap` negative values count from the end. A value that depends
    on one coordinate alone may be known to be in range now: then it is a plain index."""
    expr, extent = cast(expr, I64), as_index(extent)
    if extent == 0:
        raise NotCompiled("a position among no elements")
    if wrap:
        expr = Op("where", Op("lt", expr, Const(0, I64)), Op("add", expr, size_value(extent, I64)), expr)
    known = None if any(e.dtype.is_float for e in walk(expr)) else closed_form(expr, extent)
    return as_index(Fetch(expr, extent)) if known is None else known


def fetched(b, t: Tensor, index: Sequence[Index | int], guard: Expr | None = None, other=0) -> Expr:
    """`t` at `index`, some of which are gathered positions. Every position stays in the expression, so that each is checked: along dimensions
    that `t` does not depend on (extent 1, expanded) it is read through a node of its own."""
    blind = any(_gathered(i) and Axis(d, s) not in t.expr.free for d, (s, i) in enumerate(zip(t.shape, map(as_index, index))))
    if not blind:
        return guarded(t, index, guard, other)
    spot = t.expr
    if not (isinstance(spot, Load) and spot.guard is None and spot.index == t.axes and spot.node.shape == t.shape):
        spot = b.realize(t).expr
    if guard is None:
        return Load(spot.node, tuple(index))
    inner = Rewriter(leaf=lambda e: Load(e.node, e.index, guard, Const(0, e.dtype)) if isinstance(e, Load) and e.guard is None else None)
    return Load(spot.node, tuple(inner.index(as_index(i)) for i in index), guard, Const(other, spot.dtype))


def _gathered(index: Index) -> bool:
    return any(isinstance(a, Fetch) for a in index.atoms())


def at_least_1d(t: Tensor) -> Tensor:
    """`t`, a scalar as one element along a new dimension."""
    return t if t.rank else t.unsqueeze(0)


def coordinates(shape: Sequence[Index]) -> tuple[Index, ...]:
    """The coordinates of a tensor of `shape` (0 along extents of 1)."""
    return tuple(axis(i, s) for i, s in enumerate(shape))


def along(t: Tensor, dim: int, index: Tensor) -> list[Index]:
    """The coordinates of `index`, a tensor of t's rank, with dimension `dim` replaced by the position in `t` that it holds."""
    at = list(index.axes)
    at[dim] = position(index.expr, t.shape[dim])
    return at


# -- operators -----------------------------------------------------------------------------------------------------
@register(aten.gather.default)
def gather(b, self, dim, index, sparse_grad=False):
    shape = b.spec.shape
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    self, index = at_least_1d(self), at_least_1d(index)
    found = index.with_expr(fetched(b, self, along(self, dim % self.rank, index)))
    return found if shape else found.squeeze([0])


def _nothing_is_checked(index: Tensor) -> None:
    """NotCompiled where a result without elements has rows: torch looks at their positions, and no kernel runs."""
    if not empty(index.shape):
        raise NotCompiled("rows without elements, whose positions are checked")


@register(aten.index_select.default)
def index_select(b, self, dim, index):
    shape = b.spec.shape
    if empty(shape):
        _nothing_is_checked(index)
        return b.tensor(shape, Const(0, self.dtype))
    self, index = at_least_1d(self), at_least_1d(index)
    dim = dim % self.rank
    out = b.tensor([index.shape[0] if i == dim else s for i, s in enumerate(self.shape)], self.expr)
    at = list(out.axes)
    at[dim] = position(index.at([at[dim]]), self.shape[dim])
    found = out.with_expr(fetched(b, self, at))
    return found if shape else found.squeeze([0])


@register(aten.embedding.default)
def embedding(b, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    shape = b.spec.shape
    if empty(shape):
        _nothing_is_checked(indices)
    row = indices.at(coordinates(shape)[:indices.rank])
    return b.tensor(shape, fetched(b, weight, [position(row, weight.shape[0]), *coordinates(shape)[indices.rank:]]))


@register(aten.take.default)
def take(b, self, index):
    shape = b.spec.shape
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    flat = self.reshape([elements(self.shape)])
    return b.tensor(shape, fetched(b, flat, [position(index.expr, flat.shape[0], wrap=True)]))


def elements(shape: Sequence[Index]) -> Index:
    """How many elements a tensor of `shape` has."""
    total = as_index(1)
    for s in shape:
        total = total * s
    return total


def unflatten(flat: Index, shape: Sequence[Index]) -> list[Index]:
    """The coordinates of row-major position `flat` in a tensor of `shape`."""
    return reshape_index([elements(shape)], [flat], shape) if shape else []


def advanced(self: Tensor, indices: Sequence[Tensor | None], shape: Sequence[Index]) -> list[Index]:
    """Where element `coordinates(shape)` of `self[indices]` lies in `self`. Adjacent index tensors put their common dimensions in their place,
    others in front."""
    if any(i is not None and i.dtype in (BOOL, U8) for i in indices):
        raise NotCompiled("a mask as an index: the size of the result depends on data")
    indices = [*indices, *[None] * (self.rank - len(indices))]
    used = [d for d, i in enumerate(indices) if i is not None]
    if not used:
        return list(coordinates(shape))
    common = max(indices[d].rank for d in used)
    adjacent = used[-1] - used[0] == len(used) - 1
    lead = used[0] if adjacent else 0
    coords = coordinates(shape)
    inner, rest = coords[lead:lead + common], iter((*coords[:lead], *coords[lead + common:]))
    at = []
    for d, t in enumerate(indices):
        if t is None:
            at.append(next(rest))
        else:
            mine = inner[common - t.rank:]
            value = t.at([0 if s == 1 else c for s, c in zip(t.shape, mine)])
            at.append(position(value, self.shape[d], wrap=True))
    return at


@register(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(b, self, indices):
    shape = b.spec.shape
    at = advanced(self, indices, shape)
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    return b.tensor(shape, fetched(b, self, at))


@register(aten._unsafe_masked_index.default)
def masked_index(b, self, mask, indices, fill):
    """self[indices] where `mask` holds, else `fill`; a position under a false mask may be anything."""
    shape = b.spec.shape
    at = advanced(self, indices, shape)
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    guard = mask.expand(shape).expr
    if guard.dtype is not BOOL:
        raise NotCompiled(f"a mask of type {guard.dtype}")
    if not isinstance(fill, Expr):
        return b.tensor(shape, fetched(b, self, at, guard, fill))
    found = compute(fetched(b, self, at, guard))
    return b.tensor(shape, Op("where", guard, found, constant(fill, compute_type(self.dtype))))
