"""Contractions: what torch's matrix products compute, as sums of products over a common axis. They stay calls of torch, with this as their meaning;
`fuse.contract` decides which of them become kernels."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir.expr import Expr, Op, Reduce
from ..ir.index import Axis, Index, as_index, axis
from .aten_activation import gelu
from .attended import contiguous_rows
from .promote import Term
from .registry import ACTIVATED, ACTIVATED_ON_CPU, ADDED, ALONE, ATTENDED, INTO, MATRICES, means
from .tensor import Tensor, broadcast_shapes, cast, compute, constant

aten = torch.ops.aten
MATRICES.update(dict.fromkeys((aten.mm.default, aten.bmm.default), (None, (0, 1))))
MATRICES.update(dict.fromkeys((aten.addmm.default, aten.baddbmm.default), (0, (1, 2))))
ALONE[aten.addmm.default] = (aten.mm.default, (1, 2))


def activated(bias, left, right, shape, **how):
    """The library's product with a bias and an activation behind, as `shape`."""
    return aten._addmm_activation.default(bias, left, right, **how).view(shape)


# not its ReLU: nothing says that it keeps what is no number, as torch's does
ACTIVATED[aten.addmm.default] = (aten._addmm_activation.default, activated, ((lambda e: gelu(Term(e), "tanh").expr, {"use_gelu": True}, True),))


def biased(bias, left, right, shape=None, **how):
    """The library's product with a bias that was added behind it, and perhaps an activation behind that, as `shape`."""
    made = aten._addmm_activation.default(bias, left, right, **how) if how else torch.addmm(bias, left, right)
    return made if shape is None else made.view(shape)


ACTIVATED[aten.mm.default] = (biased, biased, ((lambda e: e, {}, True), *ACTIVATED[aten.addmm.default][2]))


def activated_on_cpu(bias, left, right, shape=None):
    """The same with a ReLU on a CPU, by oneDNN where it takes the operands as they lie (the weights of a linear layer). The
    ReLU is torch's: oneDNN's own makes 0 of what is no number."""
    weight = right.t()
    whole = left.numel() > 0 and weight.is_contiguous() and left.is_contiguous() and bias.is_contiguous()
    made = aten._addmm_activation.default(bias, left, right) if not whole or not _in_onednn(left.dtype) else \
        torch.ops.mkldnn._linear_pointwise.default(left, weight, bias, "none", [], "").relu_()
    return made if shape is None else made.view(shape)


def _in_onednn(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply this type on the CPU, as exactly as torch would?"""
    if not torch.backends.mkldnn.enabled or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return torch.get_float32_matmul_precision() == "highest" if dtype is torch.float32 else \
        dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


ACTIVATED_ON_CPU[aten.addmm.default] = (activated_on_cpu, activated_on_cpu, ((lambda e: Op("max", e, constant(0.0, e.dtype)), {}, False),))


def added(value, left, right):
    """value + left @ right, in the shape of `value`."""
    return torch.addmm(value.view(left.shape[0], right.shape[1]), left, right).view(value.shape)


def added_into(value, left, right):
    """The same, in the memory of `value`."""
    value.view(left.shape[0], right.shape[1]).addmm_(left, right)
    return value


ADDED[aten.mm.default] = added
INTO[added] = added_into


def contracted(b, left: Tensor, right: Tensor, letters: str) -> Tensor | None:
    """The sum over the one letter that the result lacks: `letters` as in 'mk,kn->mn', a letter a dimension. None where there is nothing to sum."""
    inputs, result = letters.split("->")
    first, second = inputs.split(",")
    extents = {**dict(zip(second, right.shape)), **dict(zip(first, left.shape))}
    gone, = (set(first) | set(second)) - set(result)
    if not left.dtype.is_float or left.dtype is not right.dtype or extents[gone].constant in (0, 1):
        return None
    shape = tuple(extents[c] for c in result)
    places: dict[str, Index] = {c: axis(i, extents[c]) for i, c in enumerate(result)}
    bound = Axis(len(result), extents[gone])
    places[gone] = as_index(bound)
    product = Op("mul", compute(left.at([places[c] for c in first])), compute(right.at([places[c] for c in second])))
    return b.tensor(shape, Reduce("sum", (bound,), (product,)))


def scaled(e: Expr, by) -> Expr:
    return e if isinstance(by, (int, float)) and by == 1 else Op("mul", e, constant(by, e.dtype))


def plus(product: Tensor | None, added: Tensor, beta=1, alpha=1) -> Tensor | None:
    """alpha * product + beta * added, which is broadcast; an `added` times 0 is not looked at, whatever it holds."""
    if product is None or broadcast_shapes(product.shape, added.shape) != product.shape:
        return None
    total = scaled(product.expr, alpha)
    if not (isinstance(beta, (int, float)) and beta == 0):
        total = Op("add", total, scaled(cast(added.expand(product.shape).expr, total.dtype), beta))
    return product.with_expr(total)


def attended(left, right, values, scale):
    """softmax(scale * left @ right) @ values of batches of matrices, by the library's attention."""
    q, k, v = (contiguous_rows(x).unsqueeze(1) for x in (left, right.mT, values))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).squeeze(1).contiguous()


ATTENDED[aten.bmm.default] = attended


@means(aten.mm.default)
def _mm(b, x, y):
    return contracted(b, x, y, "mk,kn->mn")


@means(aten.bmm.default)
def _bmm(b, x, y):
    return contracted(b, x, y, "bmk,bkn->bmn")


@means(aten.mv.default)
def _mv(b, x, y):
    return contracted(b, x, y, "mk,k->m")


@means(aten.addmm.default)
def _addmm(b, c, x, y, *, beta=1, alpha=1):
    return plus(contracted(b, x, y, "mk,kn->mn"), c, beta, alpha)


@means(aten.baddbmm.default)
def _baddbmm(b, c, x, y, *, beta=1, alpha=1):
    return plus(contracted(b, x, y, "bmk,bkn->bmn"), c, beta, alpha)


@means(aten.addmv.default)
def _addmv(b, c, x, y, *, beta=1, alpha=1):
    return plus(contracted(b, x, y, "mk,k->m"), c, beta, alpha)


@means(aten.linear.default)
def _linear(b, x, w, bias=None):
    rows = "abcdefgh"[:x.rank - 1]
    product = contracted(b, x, w, f"{rows}k,nk->{rows}n") if x.rank <= 8 and w.rank == 2 else None
    return product if bias is None else plus(product, bias)


@means(aten.convolution.default)
def _convolution(b, x, w, bias, stride: Sequence, padding: Sequence, dilation: Sequence, transposed: bool, output_padding: Sequence, groups: int):
    """One whose window is a single element."""
    n = w.rank - 2
    if x.rank != w.rank or n > 3 or transposed or groups != 1 or any(s != 1 for s in (*w.shape[2:], *stride)) or any(p != 0 for p in padding):
        return None
    at = "xyz"[:n]
    product = contracted(b, x, w.squeeze(range(2, w.rank)) if n else w, f"bk{at},nk->bn{at}")
    return product if bias is None else plus(product, bias.view((bias.shape[0], *[1] * n), lambda c: [c[0]]))
