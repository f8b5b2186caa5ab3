"""Single numbers on the CPU in a graph that computes on a GPU: torch hands floats of the program over as tensors without dimensions when sizes are
symbolic, and computes with them on the CPU until they meet a tensor of the GPU. There they become numbers that the host passes at each call."""
from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from ..ir.dtype import F32, F64, I64
from ..ir.expr import Expr, Load, Rewriter, Scalar
from ..ir.graph import Compute, Input, is_pointwise
from .tensor import Tensor


def hosted(args: Any, device: str) -> Any:
    """Arguments of a call whose result is on `device`, with what is made on the CPU of such tensors alone as numbers; `args` itself on the CPU."""
    return pytree.tree_map_only(Tensor, lambda t: _on(t, device), args) if device != "cpu" and _any_single(args) else args


def _any_single(value: Any) -> bool:
    """Does `value` hold a tensor without dimensions on the CPU? Few calls have one, and to look is cheaper than to rebuild all arguments."""
    if isinstance(value, (list, tuple)):
        return any(map(_any_single, value))
    if isinstance(value, dict):
        return any(map(_any_single, value.values()))
    return isinstance(value, Tensor) and value.device == "cpu" and not value.rank


def _on(t: Tensor, device: str) -> Tensor:
    if t.device != "cpu" or t.rank:
        return t
    expr = Rewriter(leaf=_number)(t.expr)
    return t if _reads(expr) else Tensor(t.shape, expr, device)


def _number(e: Expr) -> Expr | None:
    """A load of an input without dimensions as the host's number; one of what is computed of those, as its expression."""
    if not isinstance(e, Load) or e.node.device != "cpu" or e.node.shape or e.guard is not None:
        return None
    if isinstance(e.node, Input):
        return Scalar(f"{e.node.name}.item()", e.dtype) if e.dtype in (F32, F64, I64) else None
    return Rewriter(leaf=_number)(e.node.expr) if isinstance(e.node, Compute) and is_pointwise(e.node) else None


def _reads(e: Expr) -> bool:
    return isinstance(e, Load) or any(map(_reads, e.children()))
