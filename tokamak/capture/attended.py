"""Attention written out in a training step, as the library's own, forward and backward.

    s = q k    x = a s    p = softmax(x)    y = p v
    dp = dy v'    dv = p' dy    dx = p (dp - sum(p dp))    ds = a dx    dq = ds k'    dk = q' ds         (': transposed)

Where the joint graph has all of these, products of batches of matrices with nothing but a number a, views and changes of type between them, y and the
gradients are what the library's attention and its gradient give: p, which backward would need, is neither kept nor made. Of inference graphs
`fuse.weighted` sees to that, with anything between the products.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend

from .regions import MARK
from .replaced import Written, plain

_aten = torch.ops.aten
VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim}
SCALES = {_aten.mul.Tensor: lambda a: a, _aten.div.Tensor: lambda a: 1 / a}
TURNED = {_aten.transpose.int, _aten.permute.default}
WIDEST = 256            # columns of a head that the library takes
LEAST = 1 << 21         # elements of p from which on it was measured to pay: backward of heads of 256 x 64 f16, us, by cuDNN and as written, of 32
                        # 18.2, 20.9, of 64 22.0, 28.2; of 160 of 512 x 64 106, 202 (by FlashAttention 139); of 32 of 2048 x 128 346, 578 (614)


@dataclass(frozen=True)
class Attention:
    """The nodes of one: factors, the number a, the result and its gradient, and the factors' gradients: of `right` as it is multiplied, k'."""
    left: fx.Node
    right: fx.Node
    values: fx.Node
    scale: float
    made: fx.Node
    gradient: fx.Node
    d_left: fx.Node
    d_right: fx.Node
    d_values: fx.Node


def attended(joint: fx.GraphModule, least: int = LEAST) -> int:
    """Puts the library's calls in the place of all attention of `joint` with `least` elements of p, where it has some; how many."""
    gradients = [n for n in joint.graph.nodes if n.target is _aten._softmax_backward_data.default]
    found = [a for n in gradients if (a := attention(n)) is not None and _taken(a, least)]
    count = sum(_replace(joint.graph, a) for a in found)
    if count:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return count


def _taken(a: Attention, least: int) -> bool:
    """Does the library's attention take these types and sizes?"""
    values = [n.meta["val"] for n in (a.left, a.right, a.values)]
    kinds = (torch.float16, torch.bfloat16) if values[0].device.type == "cuda" else (torch.float16, torch.bfloat16, torch.float32)
    widths = [values[0].shape[2], values[2].shape[2]]
    if any(MARK in (n.meta.get("custom") or {}) for n in (a.made, a.d_left)):         # a region with a policy of its own
        return False
    same = all(v.dtype is values[0].dtype and v.dtype in kinds for v in values) and widths[0] == widths[1] <= WIDEST and widths[0] % 8 == 0
    rows, columns = values[0].shape[:2], values[1].shape[2]
    return same and rows.numel() * columns >= least


def attention(behind: fx.Node) -> Attention | None:
    """The attention whose softmax has its gradient in `behind`; None where it is none, or something else is made of what lies within."""
    softmax, dim = behind.args[1:3]
    while _passes(softmax):
        softmax = softmax.args[0]
    if not plain(softmax) or dim % behind.meta["val"].dim() != behind.meta["val"].dim() - 1:
        return None
    x = _exponents(softmax)
    if x is None:
        return None
    scale, first = _scaled_from(x)
    if first is None:
        return None
    last = turned = None
    for reader, place, factor in _readers(softmax):
        if factor != 1:
            return None
        if reader.target is _aten.bmm.default and place == 0 and last is None:
            last = reader
        elif reader is behind and place == 1:
            pass
        elif _turns(reader) and turned is None:
            turned = reader
        else:
            return None
    read = list(_readers(turned)) if last is not None and turned is not None else []
    if len(read) != 1 or read[0][0].target is not _aten.bmm.default or read[0][1:] != (0, 1):
        return None
    d_values, (number, d_weights) = read[0][0], _scaled_from(behind.args[0])
    if d_weights is None or number != 1:
        return None
    shape = first.meta["val"].shape
    if last.args[0].meta["val"].shape != shape or d_weights.meta["val"].shape != shape or softmax.meta["val"].shape[-1] != shape[-1]:
        return None
    gradient, values = d_values.args[1], last.args[1]
    if d_weights.args[0] is not gradient or not _is_turned(d_weights.args[1], values):
        return None
    left, right = first.args
    found = {}
    for reader, place, factor in _readers(behind):
        if reader.target is not _aten.bmm.default or abs(factor - scale) > 1e-6 * scale or place in found:
            return None
        found[place] = reader
    if set(found) != {0, 1} or not _is_turned(found[0].args[1], right) or not _is_turned(found[1].args[0], left):
        return None
    return Attention(left, right, values, scale, last, gradient, found[0], found[1], d_values)


def _exponents(p: fx.Node) -> fx.Node | None:
    """x where `p` is its softmax along the last dimension, whole or in parts; or None."""
    last = p.meta["val"].dim() - 1
    along = lambda n, target, of: n.target is target and n.args[0] is of and [d % (last + 1) for d in n.args[1]] == [last] and n.args[2:3] == (True,)
    if p.target is _aten._softmax.default:
        return p.args[0] if p.args[1] % (last + 1) == last else None
    two = lambda n, target: n.target is target and all(isinstance(a, fx.Node) for a in n.args[:2])
    if not two(p, _aten.div.Tensor) or p.args[0].target is not _aten.exp.default or not along(p.args[1], _aten.sum.dim_IntList, p.args[0]):
        return None
    away = p.args[0].args[0]
    return away.args[0] if two(away, _aten.sub.Tensor) and along(away.args[1], _aten.amax.default, away.args[0]) else None


def _passes(n: fx.Node) -> bool:
    """Does `n` hand on what it reads, element by element in their order: a view, or another floating type?"""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], fx.Node) or not plain(n) or not plain(n.args[0]):
        return False
    before, after = n.args[0].meta["val"], n.meta["val"]
    if n.target is _aten._to_copy.default:
        moved = n.kwargs.get("device", before.device) != before.device or not set(n.kwargs) <= {"dtype", "layout", "device"}
        return not moved and before.is_floating_point() and after.is_floating_point()
    if n.target in TURNED:
        order = [d for d in _order(n) if before.shape[d] != 1]
        return order == sorted(order)
    return n.target in VIEWS and before.numel() == after.numel()


def _factor(n: fx.Node) -> float | None:
    """The positive number that `n` multiplies by; None where it does something else."""
    by = n.args[1] if n.target in SCALES and isinstance(n.args[0], fx.Node) else None
    return SCALES[n.target](by) if isinstance(by, (int, float)) and by > 0 else None


def _scaled_from(n: fx.Node) -> tuple[float, fx.Node | None]:
    """(number, product of batches) that `n` is, views and types aside."""
    scale = 1.0
    while _passes(n) or _factor(n) is not None:
        scale *= _factor(n) or 1.0
        n = n.args[0]
    return scale, n if n.target is _aten.bmm.default else None


def _readers(n: fx.Node, factor: float = 1.0) -> Iterator[tuple[fx.Node, int, float]]:
    """(node, the place where it reads, the number it reads times) of all that reads `n`, behind views, changes of type and products with numbers."""
    for u in n.users:
        if _passes(u):
            yield from _readers(u, factor)
        elif _factor(u) is not None:
            yield from _readers(u, factor * _factor(u))
        else:
            yield from ((u, i, factor) for i, a in enumerate(u.args) if a is n)


def _order(n: fx.Node) -> list[int]:
    """The dimensions of what `n`, one of TURNED, reads in the order in which it has them."""
    order = list(range(n.args[0].meta["val"].dim()))
    if n.target is _aten.permute.default:
        return [order[d] for d in n.args[1]]
    i, j = n.args[1:]
    order[i], order[j] = order[j], order[i]
    return order


def _turns(n: fx.Node) -> bool:
    """Does `n` exchange the last two of three dimensions?"""
    return n.target in TURNED and _order(n) == [0, 2, 1]


def _is_turned(n: fx.Node, of: fx.Node) -> bool:
    return isinstance(n, fx.Node) and (_turns(n) and n.args[0] is of or _turns(of) and of.args[0] is n)


def _replace(graph: fx.Graph, a: Attention) -> bool:
    """Puts the library's calls in, and the same views behind them as before; False where it has none for these values."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    calls = _calls(*(n.meta["val"] for n in (a.left, a.right, a.values)), a.scale)
    if calls is None:
        return False
    forward, backward = calls
    written = Written(graph, a.made)
    value = written.value
    with torch.no_grad(), graph.inserting_before(a.made), written:
        q, k, v = (contiguous_rows(x).unsqueeze(1) for x in (value(a.left), value(a.right).transpose(1, 2), value(a.values)))
        out, *kept = forward(q, k, v, a.scale)
        made = out.squeeze(1)
    results = {a.made: made}
    first = min((a.d_left, a.d_right, a.d_values), key=order.__getitem__)
    written.within(first)
    with torch.no_grad(), graph.inserting_before(first), written:
        dq, dk, dv = backward(contiguous_rows(value(a.gradient)).unsqueeze(1), q, k, v, out, kept, a.scale)
        results |= {a.d_left: dq.squeeze(1), a.d_right: dk.squeeze(1).transpose(1, 2), a.d_values: dv.squeeze(1)}
    for old, new in results.items():
        node = written.made[id(new)]
        old.replace_all_uses_with(node)
        _lie_anew(node)
    return True


def _calls(left: torch.Tensor, right: torch.Tensor, values: torch.Tensor, scale: float) -> tuple[Callable, Callable] | None:
    """The library's attention and its gradient for such values, as torch chooses for one head of them: of fake tensors it cannot tell."""
    if left.device.type != "cuda":
        return _CALLS["cpu"]
    with unset_fake_temporarily(), torch.no_grad():
        given = (torch.empty((1, 1, *x.shape[1:]), dtype=x.dtype, device=x.device) for x in (left, right.mT, values))
        return _CALLS.get(torch._fused_sdp_choice(*given, None, 0.0, False, scale=scale))


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with contiguous rows: the library takes no others."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _lie_anew(n: fx.Node) -> None:
    """What views of `n` say of strides."""
    for u in n.users:
        if getattr(u.target, "is_view", False) and plain(u):
            u.meta = {**u.meta, "val": u.target(*fx.map_arg(u.args, lambda x: x.meta["val"]), **u.kwargs)}
            _lie_anew(u)


def _flash(q, k, v, scale):
    return _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, False, False, scale=scale)


def _flash_backward(dy, q, k, v, out, kept, scale):
    lse, *counts, seed, offset, _ = kept
    return _aten._scaled_dot_product_flash_attention_backward.default(dy, q, k, v, out, lse, *counts, 0.0, False, seed, offset, scale=scale)


def _cudnn(q, k, v, scale):
    return _aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, False, False, scale=scale)


def _cudnn_backward(dy, q, k, v, out, kept, scale):
    lse, *counts, seed, offset, _ = kept
    return _aten._scaled_dot_product_cudnn_attention_backward.default(dy, q, k, v, out, lse, seed, offset, None, *counts, 0.0, False, scale=scale)


def _flash_cpu(q, k, v, scale):
    return _aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, False, scale=scale)


def _flash_cpu_backward(dy, q, k, v, out, kept, scale):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(dy, q, k, v, out, *kept, 0.0, False, scale=scale)


# what torch chooses for a GPU, or the device -> the calls
_CALLS = {SDPBackend.FLASH_ATTENTION.value: (_flash, _flash_backward), SDPBackend.CUDNN_ATTENTION.value: (_cudnn, _cudnn_backward),
          "cpu": (_flash_cpu, _flash_cpu_backward)}
