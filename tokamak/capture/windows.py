"""What backward keeps of a maximum pooling: where in its window each maximum stands, a byte, instead of where in the input, eight; and not the input,
of which torch's operator needs the shape alone. Backward is then an operator of our own, which the tables build; torch can run it, too.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem

import torch
from torch import fx

_aten = torch.ops.aten
BACKWARD = {_aten.max_pool2d_with_indices_backward.default: (_aten.max_pool2d_with_indices.default, 2),
            _aten.max_pool3d_with_indices_backward.default: (_aten.max_pool3d_with_indices.default, 3)}     # -> the forward operator, dimensions
LARGEST = 127           # elements of a window whose numbers are bytes


@torch.library.custom_op("tokamak::max_pool_backward", mutates_args=())
def max_pool_backward(grad: torch.Tensor, numbers: torch.Tensor, shape: Sequence[int], strides: Sequence[int], kernel: Sequence[int],
                      stride: Sequence[int], padding: Sequence[int]) -> torch.Tensor:
    """The gradient of what a maximum pooling was given, which has `shape` and `strides`; `numbers`: of the maxima within their windows, row-major."""
    rank = len(kernel)
    places, left = torch.zeros_like(numbers, dtype=torch.int64), numbers.long()
    for k in reversed(range(rank)):
        begins = torch.arange(numbers.shape[k - rank], device=numbers.device) * stride[k] - padding[k]
        places += (left % kernel[k] + begins.view([-1] + [1] * (rank - 1 - k))) * _behind(shape[-rank:], k)
        left = left // kernel[k]
    given = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
    made = next(b for b, (_, n) in BACKWARD.items() if n == rank)(grad, given, kernel, stride, padding, [1] * rank, False, places)
    return given.copy_(made)


@max_pool_backward.register_fake
def _(grad, numbers, shape, strides, kernel, stride, padding):
    return torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)


def places_in_windows(joint: fx.GraphModule) -> None:
    """In `joint`, the graph of forward and backward, the gradient of every maximum pooling of constant sizes reads numbers within windows."""
    for node in list(joint.graph.nodes):
        if node.target in BACKWARD:
            _numbered(joint.graph, node, *BACKWARD[node.target])
    joint.recompile()


class _Behind:
    """Puts calls into a graph, one behind the other, from `node` on; `fake` knows shapes."""

    def __init__(self, graph: fx.Graph, node: fx.Node):
        self.graph, self.at, self.fake = graph, node, node.meta["val"].fake_mode

    def __call__(self, target, *args, **kwargs) -> fx.Node:
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        with self.fake:
            value = target(*values, **kwargs)
        with self.graph.inserting_after(self.at):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {**self.at.meta, "val": value}
        self.at = made
        return made


def _numbered(graph: fx.Graph, backward: fx.Node, forward, rank: int) -> None:
    """Rewrites one pooling's gradient, if all sizes are numbers and its positions come from the pooling itself."""
    grad, source, kernel, stride, padding, dilation, ceil_mode, positions = backward.args
    if not isinstance(positions, fx.Node) or positions.target is not getitem or positions.args[0].target is not forward:
        return
    each = lambda values: [*values] * rank if len(values) == 1 else [*values]
    sizes, outputs = (n.meta["val"].shape[-rank:] for n in (source, positions))
    kernel, stride, padding = each(kernel), each(stride or kernel), each(padding)
    dims = list(zip(sizes, outputs, kernel, stride, padding))
    shape, strides = [*source.meta["val"].shape], [*source.meta["val"].stride()]
    if any(d != 1 for d in dilation) or not all(isinstance(x, int) for x in (*shape, *outputs, *kernel, *stride, *padding)):
        return
    if math.prod(kernel) > LARGEST or 0 in positions.meta["val"].shape or backward.meta["val"].stride() != tuple(strides):
        return
    numbers = _numbers(_Behind(graph, positions), positions, dims)
    with graph.inserting_before(backward):
        made = graph.call_function(torch.ops.tokamak.max_pool_backward.default, (grad, numbers, shape, strides, kernel, stride, padding))
    made.meta = dict(backward.meta)
    backward.replace_all_uses_with(made)
    graph.erase_node(backward)


def _behind(values: Sequence[int], k: int) -> int:
    return math.prod(values[k + 1:])


def _numbers(call: _Behind, positions: fx.Node, dims: list) -> fx.Node:
    """The number of each position within its window, row-major; int8."""
    sizes, kernel, total = [d[0] for d in dims], [d[2] for d in dims], None
    for k, (size, outputs, _, stride, padding) in enumerate(dims):
        begins = call(_aten.arange.default, outputs, device=positions.meta["val"].device)
        begins = call(_aten.sub.Tensor, call(_aten.mul.Tensor, begins, stride), padding)
        begins = call(_aten.view.default, begins, [outputs] + [1] * (len(dims) - 1 - k))
        at = call(_aten.div.Tensor_mode, positions, _behind(sizes, k), rounding_mode="floor")
        at = call(_aten.sub.Tensor, call(_aten.remainder.Scalar, at, size), begins)
        step = call(_aten.mul.Tensor, at, _behind(kernel, k))
        total = step if total is None else call(_aten.add.Tensor, total, step)
    return call(_aten._to_copy.default, total, dtype=torch.int8)
