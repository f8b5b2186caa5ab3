"""Numbers that torch refuses: most of those beside tensors (a fill's value, a bound, a factor) are converted to the result's type under a check, and
the call raises where they do not fit. Operands are wrapped instead: `x + 300` of int8.
"""
from __future__ import annotations

import functools
import math

import torch

_WRAPPED = ("self", "other", "start", "end", "step")
_PLAIN = (torch.ops.aten.clamp, torch.ops.aten.clamp_min, torch.ops.aten.clamp_max, torch.ops.aten.constant_pad_nd)
"""Calls in which what a negative number is for an unsigned type depends on torch's version; elsewhere it is wrapped."""


def refused(target: torch._ops.OpOverload, args: tuple, kwargs: dict, dtype: torch.dtype) -> bool:
    """May torch refuse to convert a number of this call, whose result is of `dtype`? Only a call of torch's own can tell."""
    names = _checked(target)
    given = [v for n, v in zip(names, args) if n] + [kwargs[n] for n in names if n in kwargs]
    lowest = 0 if target.overloadpacket in _PLAIN else -math.inf
    return any(isinstance(v, (int, float)) and not _fits(v, dtype, lowest) for v in given)


@functools.cache
def _checked(target: torch._ops.OpOverload) -> tuple[str, ...]:
    """The name of each argument that is a number converted under a check; "" for the others."""
    return tuple(a.name if a.name not in _WRAPPED and str(a.type) in ("number", "Optional[number]") else "" for a in target._schema.arguments)


def _fits(value: int | float, dtype: torch.dtype, lowest: float) -> bool:
    if dtype is torch.bool or dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return math.isinf(value) or not abs(value) > torch.finfo(dtype).max
    most = torch.iinfo(dtype).max
    return (torch.iinfo(dtype).min if dtype.is_signed else max(-most, lowest)) <= value <= most
