"""Pooling, windows and padding gradients.

A pooling operator is a fold over window axes of a guarded load. Each spatial dimension is a `Window`: where element j of output o's window
lies in the input, and when it counts. Seen from the input, the outputs whose windows hold a position are a window of the same kind, so backward is a
fold of guarded loads as well: no scatter, no order to fix. Windows have constant extents.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Sequence

import torch

from ..ir import ops
from ..ir.dtype import I32, I64
from ..ir.expr import Const, Coord, Expr, Op, walk
from ..ir.index import Index, as_index
from ..ir.normal import divide_exact, maximum, minimum
from ..ir.ranges import bounds, nonnegative
from .aten_index import coordinates, elements, empty, every, guarded, inside, position, unflatten
from .aten_scatter import combine
from .registry import NotCompiled, register
from .tensor import Tensor, cast, compute, size_value
from .windows import max_pool_backward as _ours  # noqa: F401 (an operator of torch from here on)

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """One dimension: element j < `count` of output o's window is input position `at(o, j)`; it counts where all of `holds(o, j)` do."""
    count: int
    at: Callable[[Index, Index], Index]
    holds: Callable[[Index, Index], list[Expr]]


def less(a: Index, b: Index) -> list[Expr]:
    """The condition a < b, unless it can be proved."""
    high = bounds(a - b)[1]
    return [] if high is not None and nonnegative(-1 - high) else [Op("lt", Coord(a), Coord(b))]


def windowed(t: Tensor, outputs: Sequence[Index], windows: Sequence[Window], other=0) -> Tensor:
    """`t` (lead dimensions, then one for each window) seen through windows: shape (lead..., outputs..., counts...), `other` where an element does not
    count."""
    lead = t.rank - len(windows)
    shape = [*t.shape[:lead], *map(as_index, outputs), *(as_index(w.count) for w in windows)]
    c = coordinates(shape)
    at, conditions = list(c[:lead]), []
    for w, o, j in zip(windows, c[lead:], c[lead + len(windows):]):
        at.append(w.at(o, j))
        conditions += w.holds(o, j)
    return Tensor(tuple(shape), guarded(t, at, every(conditions), other), t.device)


def _fold_dims(t: Tensor, windows) -> range:
    return range(t.rank - len(windows), t.rank)


# -- the windows of strided pooling ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Stride:
    """One dimension of a strided pooling: kernel size, stride, padding, dilation; `size` of the input, `outputs` of the result."""
    kernel: int
    stride: int
    padding: int
    dilation: int
    size: Index
    outputs: Index

    def forward(self) -> Window:
        """What a fold over an output's window goes through: padding stands for nothing."""
        alone = self._within() if self.outputs.constant == 1 else range(0)
        return Window(len(alone), lambda o, j: alone.start + j * self.dilation, lambda o, j: []) if alone else self.whole()

    def whole(self) -> Window:
        """Every position of an output's window, padding too."""
        def at(o, j):
            return o * self.stride - self.padding + j * self.dilation
        return Window(self.kernel, at, lambda o, j: inside(at(o, j), self.size))

    def _within(self) -> range:
        """The positions of the first window within the input, past which it may reach by far (`ceil_mode`); none if the input's size is symbolic."""
        end = (self.kernel - 1) * self.dilation + 1 - self.padding
        return range(0) if self.size.constant is None else range(self.first(as_index(0)).constant, min(self.size.constant, end), self.dilation)

    def backward(self) -> Window:
        """The outputs that may have input h in their window; with dilation some in between do not."""
        reach = (self.kernel - 1) * self.dilation + 1

        def at(h, j):
            return (h + self.padding) // self.stride - j

        def holds(h, j):
            return inside(at(h, j), self.outputs) + less((h + self.padding) % self.stride + j * self.stride, as_index(reach))
        return Window(-(-reach // self.stride), at, holds)

    def first(self, o: Index) -> Index:
        """The first position of output o's window within the input."""
        start = o * self.stride - self.padding
        return start + maximum(0, (self.dilation - 1 - start) // self.dilation) * self.dilation

    def covered(self, o: Index, include_pad: bool) -> Index:
        """How many positions output o's window has (dilation 1): padded ones too with `include_pad`."""
        start = o * self.stride - self.padding
        end = minimum(start + self.kernel, self.size + self.padding)
        return end - start if include_pad else minimum(end, self.size) - maximum(start, 0)


def _strides(n: int, size, outputs, kernel, stride, padding, dilation=(1,)) -> list[Stride]:
    """A Stride for each of the `n` dimensions; each of torch's lists has n elements, or one for all (an empty stride is the kernel's)."""
    def each(values):
        values = [values] if isinstance(values, int) else list(values)
        if not all(isinstance(v, int) for v in values):
            raise NotCompiled("a window whose extent or stride is symbolic")
        return values * n if len(values) == 1 else values
    kernel = each(kernel)
    stride = each(stride) if stride else kernel
    return [Stride(*v) for v in zip(kernel, stride, each(padding), each(dilation), size, outputs)]


# -- the windows of adaptive pooling ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Adaptive:
    """One dimension of an adaptive pooling: output o has positions floor(o * size / outputs) up to ceil((o + 1) * size / outputs)."""
    size: Index
    outputs: Index

    def start(self, o: Index) -> Index:
        return o * self.size // self.outputs

    def end(self, o: Index) -> Index:
        return ((o + 1) * self.size + self.outputs - 1) // self.outputs

    def forward(self) -> Window:
        even = divide_exact(self.size, self.outputs) if self.outputs.terms else None
        if even is not None and even.constant is not None:
            return Window(even.constant, lambda o, j: o * even + j, lambda o, j: [])
        size, outputs = self.size.constant, self.outputs.constant
        if size is None or outputs is None:
            raise NotCompiled("adaptive pooling between symbolic sizes that do not divide")
        count = max((-(-(o + 1) * size // outputs) - o * size // outputs for o in range(outputs)), default=1)
        return Window(count, lambda o, j: self.start(o) + j, lambda o, j: less(self.start(o) + j, self.end(o)))

    def backward(self) -> Window:
        """Input h is in the windows of outputs floor(h * outputs / size) up to ceil((h + 1) * outputs / size)."""
        return Adaptive(self.outputs, self.size).forward()

    def first(self, o: Index) -> Index:
        return self.start(o)

    def covered(self, o: Index, include_pad: bool) -> Index:
        return self.end(o) - self.start(o)


def _adaptive(n: int, size, outputs) -> list[Adaptive]:
    if any(as_index(s) == 0 for s in size[-n:]):
        raise NotCompiled("adaptive pooling of nothing")
    return [Adaptive(as_index(s), as_index(o)) for s, o in zip(size[-n:], outputs[-n:])]


# -- maximum ---------------------------------------------------------------------------------------------------------
def _maximum(b, self: Tensor, dims) -> tuple[Tensor, Tensor]:
    """The largest element of each window and its row-major position in the input: the first of equals, NaN above all (the first NaN:
    eager reports the last of several). Padding never wins: where a window has nothing above the lowest value, its first position does."""
    shape = b.spec.shape
    n = len(dims)
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype)), b.tensor(shape, Const(0, I64))
    windows = [d.forward() for d in dims]
    lowest = ops.identity("max", self.dtype)
    value = windowed(self, shape[-n:], windows, lowest)
    value = value.with_expr(compute(value.expr))
    c = coordinates(value.shape)
    flat = Const(0, I64)
    for d, w, o, j in zip(dims, windows, c[-2 * n:-n], c[-n:]):
        conditions = every(w.holds(o, j))
        here = Coord(w.at(o, j))
        here = here if conditions is None else Op("where", conditions, here, Coord(d.first(o)))
        flat = Op("add", Op("mul", flat, size_value(d.size, I64)), here) if d is not dims[0] else here
    place = value.with_expr(flat)
    fold = _fold_dims(value, windows)
    return tuple(b.reduce("argmax", (value, place), fold, component=k) for k in (0, 1))


def _maximum_backward(b, grad: Tensor, indices: Tensor, dims) -> Tensor:
    """Each input position sums the gradients of the windows that it won."""
    shape = b.spec.shape
    if empty(grad.shape) or empty(shape):
        return b.tensor(shape, Const(0, grad.dtype))
    mine = as_index(0)
    for size, h in zip(shape[-len(dims):], coordinates(shape)[-len(dims):]):
        mine = mine * size + h
    return _won(b, grad, indices, dims, lambda winner, places, counts: Op("eq", winner, Coord(mine)))


def _won(b, grad: Tensor, winners: Tensor, dims, here) -> Tensor:
    """The sum of `grad` over the windows that each position won: where `here(winner, coordinates of the position, numbers of the windows)` holds."""
    n, shape, windows = len(dims), b.spec.shape, [d.backward() for d in dims]
    value, winner = windowed(grad, shape[-n:], windows), windowed(winners, shape[-n:], windows, -1)
    c, value_here = coordinates(value.shape), compute(value.expr)
    won = value.with_expr(Op("where", here(winner.expr, c[-2 * n:-n], c[-n:]), value_here, Const(0, value_here.dtype)))
    return b.reduce("sum", won, _fold_dims(won, windows))


@register(torch.ops.tokamak.max_pool_backward.default)
def max_pool_backward(b, grad, numbers, shape, strides, kernel, stride, padding):
    """As `_maximum_backward`, of the numbers of the maxima within their windows."""
    n = len(kernel)
    dims = _strides(n, b.spec.shape[-n:], grad.shape[-n:], kernel, stride, padding)

    def here(winner: Expr, places, counts) -> Expr:
        mine = as_index(0)
        for d, h, j in zip(dims, places, counts):
            mine = mine * d.kernel + (h + d.padding) % d.stride + j * d.stride
        return Op("eq", cast(winner, I32), cast(Coord(mine), I32))
    return _won(b, grad, numbers, dims, here)


def _max_dims(n, self: Tensor, outputs, kernel_size, stride, padding, dilation) -> list[Stride]:
    return _strides(n, self.shape[-n:], outputs[-n:], kernel_size, stride, padding, dilation)


def _register_max(n: int, forward, backward) -> None:
    @register(forward)
    def max_pool(b, self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
        return _maximum(b, self, _max_dims(n, self, b.spec.shape, kernel_size, stride, padding, dilation))

    @register(backward)
    def max_pool_backward(b, grad_output, self, kernel_size, stride, padding, dilation, ceil_mode, indices):
        return _maximum_backward(b, grad_output, indices, _max_dims(n, self, grad_output.shape, kernel_size, stride, padding, dilation))


def _register_adaptive_max(n: int, forward, backward) -> None:
    @register(forward)
    def adaptive_max_pool(b, self, output_size):
        return _maximum(b, self, _adaptive(n, self.shape, b.spec.shape))

    @register(backward)
    def adaptive_max_pool_backward(b, grad_output, self, indices):
        return _maximum_backward(b, grad_output, indices, _adaptive(n, self.shape, grad_output.shape))


_register_max(2, aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
_register_max(3, aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default)
_register_adaptive_max(2, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default)
_register_adaptive_max(3, aten.adaptive_max_pool3d.default, aten.adaptive_max_pool3d_backward.default)


# -- average ---------------------------------------------------------------------------------------------------------
def _divide(t: Tensor, dims, include_pad: bool, divisor: int | None) -> Tensor:
    """`t`, whose last dimensions are the windows' outputs, over how many positions each window has."""
    value = compute(t.expr)
    if divisor is not None:
        count: Expr = size_value(divisor, I64)
    else:
        total = as_index(1)
        for d, o in zip(dims, coordinates(t.shape)[-len(dims):]):
            total = total * d.covered(o, include_pad)
        count = Coord(total)
    return t.with_expr(Op("div" if value.dtype.is_float else "truncdiv", value, cast(count, value.dtype)))


def _average(b, self: Tensor, dims, include_pad: bool = False, divisor: int | None = None) -> Tensor:
    shape = b.spec.shape
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    windows = [d.forward() for d in dims]
    value = windowed(self, shape[-len(dims):], windows)
    value = value.with_expr(compute(value.expr))
    return _divide(b.reduce("sum", value, _fold_dims(value, windows)), dims, include_pad, divisor)


def _average_backward(b, grad: Tensor, dims, include_pad: bool = False, divisor: int | None = None) -> Tensor:
    shape = b.spec.shape
    if empty(grad.shape) or empty(shape):
        return b.tensor(shape, Const(0, grad.dtype))
    windows = [d.backward() for d in dims]
    quotient = _divide(grad, dims, include_pad, divisor)
    if any(isinstance(e, Coord) and e.free for e in walk(quotient.expr)):
        quotient = b.realize(quotient)
    value = windowed(quotient, shape[-len(dims):], windows)
    return b.reduce("sum", value, _fold_dims(value, windows))


def _register_average(n: int, forward, backward) -> None:
    @register(forward)
    def avg_pool(b, self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None):
        dims = _strides(n, self.shape[-n:], b.spec.shape[-n:], kernel_size, stride, padding)
        return _average(b, self, dims, count_include_pad, divisor_override)

    @register(backward)
    def avg_pool_backward(b, grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
        dims = _strides(n, self.shape[-n:], grad_output.shape[-n:], kernel_size, stride, padding)
        return _average_backward(b, grad_output, dims, count_include_pad, divisor_override)


def _register_adaptive_average(n: int, forward, backward) -> None:
    @register(forward)
    def adaptive_avg_pool(b, self, output_size):
        return _average(b, self, _adaptive(n, self.shape, b.spec.shape))

    @register(backward)
    def adaptive_avg_pool_backward(b, grad_output, self):
        return _average_backward(b, grad_output, _adaptive(n, self.shape, grad_output.shape))


_register_average(2, aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
_register_average(3, aten.avg_pool3d.default, aten.avg_pool3d_backward.default)
_register_adaptive_average(2, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default)
_register_adaptive_average(3, aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default)


@register(aten.avg_pool1d.default)
def avg_pool1d(b, self, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True):
    return _average(b, self, _strides(1, self.shape[-1:], b.spec.shape[-1:], kernel_size, stride, padding), count_include_pad)


@register(aten.adaptive_avg_pool1d.default)
def adaptive_avg_pool1d(b, self, output_size):
    return _average(b, self, _adaptive(1, self.shape, b.spec.shape))


# -- windows as columns ----------------------------------------------------------------------------------------------
def _column_dims(size: Sequence[Index], kernel, dilation, padding, stride) -> list[Stride]:
    """The Strides of unfold and fold: `size` is the image's height and width."""
    dims = _strides(2, size, size, kernel, stride, padding, dilation)
    return [replace(d, outputs=(d.size + 2 * d.padding - d.dilation * (d.kernel - 1) - 1) // d.stride + 1) for d in dims]


@register(aten.im2col.default)
def im2col(b, self, kernel_size, dilation, padding, stride):
    """(N?, C, H, W) -> (N?, C * kernel, outputs): every window a column."""
    shape = b.spec.shape
    if empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    dims = _column_dims(self.shape[-2:], kernel_size, dilation, padding, stride)
    lead = self.rank - 3
    seen = windowed(self, [d.outputs for d in dims], [d.whole() for d in dims])
    seen = seen.permute([*range(lead + 1), lead + 3, lead + 4, lead + 1, lead + 2])
    return seen.reshape(shape)


@register(aten.col2im.default)
def col2im(b, self, output_size, kernel_size, dilation, padding, stride):
    """(N?, C * kernel, outputs) -> (N?, C, H, W): each pixel sums its entries in every column that has it."""
    shape = b.spec.shape
    if empty(shape) or empty(self.shape):
        return b.tensor(shape, Const(0, self.dtype))
    dims = _column_dims(shape[-2:], kernel_size, dilation, padding, stride)
    columns = self.reshape([*shape[:-2], *(d.kernel for d in dims), *(d.outputs for d in dims)])
    domain = [*shape, *(as_index(d.kernel) for d in dims)]
    c = coordinates(domain)
    outputs, conditions = [], []
    for d, h, j in zip(dims, c[-4:-2], c[-2:]):
        reached = h + d.padding - j * d.dilation
        output = reached // d.stride
        outputs.append(output)
        conditions += inside(output, d.outputs)
        if d.stride != 1:
            conditions.append(Op("eq", Coord(reached % d.stride), Const(0, I64)))
    value = compute(guarded(columns, [*c[:-4], *c[-2:], *outputs], every(conditions)))
    return b.reduce("sum", b.tensor(domain, value), (-2, -1))


# -- gradients of padding --------------------------------------------------------------------------------------------
def _pad_backward(b, grad: Tensor, padding, source: Callable[[Index, Index], Index]) -> Tensor:
    """Every element of the padded `grad` goes to the position that it was copied from: `source(position, size)`, of a position that may lie outside.
    torch lists `padding` as (before, after) of the last dimension, then of the one before."""
    shape = b.spec.shape
    if empty(grad.shape):
        return b.tensor(shape, Const(0, grad.dtype))
    at = list(coordinates(grad.shape))
    for k in range(len(padding) // 2):
        d = grad.rank - 1 - k
        at[d] = source(at[d] - padding[2 * k], shape[d])
    return combine(b, Const(0, grad.dtype), shape, grad.shape, at, grad.expr, "sum")


def _reflected(position: Index, size: Index) -> Index:
    inner = maximum(position, -position)
    return size - 1 - maximum(size - 1 - inner, inner - size + 1)


def _replicated(position: Index, size: Index) -> Index:
    return minimum(maximum(position, 0), size - 1)


@register(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default)
def reflection_pad_backward(b, grad_output, self, padding):
    return _pad_backward(b, grad_output, padding, _reflected)


@register(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default)
def replication_pad_backward(b, grad_output, self, padding):
    return _pad_backward(b, grad_output, padding, _replicated)


# -- unpooling -------------------------------------------------------------------------------------------------------
@register(aten.max_unpool2d.default, aten.max_unpool3d.default)
def max_unpool(b, self, indices, output_size, stride=(), padding=()):
    """Each element goes to the row-major position in its plane that `indices` holds; zero elsewhere."""
    shape = b.spec.shape
    if empty(self.shape) or empty(shape):
        return b.tensor(shape, Const(0, self.dtype))
    plane = shape[-len(output_size):]
    at = [*indices.axes[:-len(plane)], *unflatten(position(indices.expr, elements(plane)), plane)]
    return combine(b, Const(0, self.dtype), shape, indices.shape, at, self.expr, "last")
