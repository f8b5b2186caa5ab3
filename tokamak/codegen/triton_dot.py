"""Products of matrices of two 16-bit types; front: `triton_lib`."""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import INTERPRETED, from_bf16, to_bf16


@triton.jit
def dot(a, b, c):
    """c + a b, carried in f32: a [m, k] and b [k, n] of f16 or bf16, c [m, n] of f32. Triton's interpreter keeps bf16 as integers."""
    if INTERPRETED:
        if a.dtype == tl.bfloat16:
            return tl.dot(from_bf16(a), from_bf16(b), c, input_precision="ieee")
        else:
            return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        return tl.dot(a, b, c)


@triton.jit
def small_to_half(x, to: tl.constexpr):
    """An integer of 8 bits in the 16-bit type `to`, which holds each of them exactly."""
    if INTERPRETED:
        if to == tl.bfloat16:
            return to_bf16(x.to(tl.float32))
        else:
            return x.to(to)
    else:
        return x.to(to)
