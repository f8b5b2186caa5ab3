"""Calls that torch refuses though it traces them. Numbers: most of those beside tensors (a fill's value, a bound, a factor) are converted to the
result's type under a check, and the call raises where they do not fit. Operands are wrapped instead: `x + 300` of int8. Types: of some calls there
is no kernel, and only a call of torch's own raises (`mask - 1`).
"""
from __future__ import annotations

import functools
import math

import torch

_WRAPPED = ("self", "other", "start", "end", "step")
_PLAIN = (torch.ops.aten.clamp, torch.ops.aten.clamp_min, torch.ops.aten.clamp_max, torch.ops.aten.constant_pad_nd)
"""Calls in which what a negative number is for an unsigned type depends on torch's version; elsewhere it is wrapped."""


def _flag(t: torch.Tensor) -> bool:
    return t.dtype is torch.bool


def _whole(t: torch.Tensor) -> bool:
    return not (t.dtype.is_floating_point or t.dtype.is_complex)


def _half_on_cpu(t: torch.Tensor) -> bool:
    return t.dtype in (torch.float16, torch.bfloat16) and t.device.type == "cpu"


_a = torch.ops.aten
_KERNELLESS = {**dict.fromkeys((_a.sub, _a.rsub, _a.abs, _a.floor, _a.ceil, _a.round, _a.trunc, _a.threshold, _a.clamp, _a.trace,
                                _a.reflection_pad1d, _a.relu, _a.argmax, _a.argmin, _a.max_pool2d_with_indices), _flag),
               **dict.fromkeys((_a.lerp, _a.avg_pool2d, _a._adaptive_avg_pool2d, _a._prelu_kernel, _a.col2im), _whole),
               _a.avg_pool3d: _half_on_cpu}
"""Of which types of its tensors torch has no kernel on one device at least."""
_ALIKE = frozenset({_a.heaviside, _a.linalg_cross, _a.binary_cross_entropy, _a.binary_cross_entropy_backward})
"""Whose tensors have to be of one type."""


def kernelless(target: torch._ops.OpOverload, args: tuple, dtype: torch.dtype) -> bool:
    """May torch have no kernel of this call, whose result is of `dtype`, for the types of its tensors?"""
    packet = target.overloadpacket
    if packet in (_a.cumsum, _a.cumprod) and dtype is torch.bool:
        return True
    lacks = _KERNELLESS.get(packet)
    values = [a.meta.get("val") for a in args if isinstance(a, torch.fx.Node)] if lacks is not None or packet in _ALIKE else ()
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return len({t.dtype for t in tensors}) > 1 if lacks is None else any(map(lacks, tensors))


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
