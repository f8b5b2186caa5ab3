"""Device functions that combine values into memory which several programs, or several lanes of one, may be updating at once; front: `triton_lib`.

Memory that receives floating maxima holds its NaN with sign bit 0, memory that receives minima with sign bit 1 (`tiles.base_body` sees to it): as
integers such bits are beyond those of every number, so that NaN wins.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import any_lane


@triton.jit
def update_max(p, x, mask):
    """The memory at p becomes the greater of itself and x where `mask` holds; NaN if either is."""
    if x.dtype.is_floating():
        tl.atomic_max(p, tl.where(x != x, _nan(x, 0), x), mask=mask, sem="relaxed")
    else:
        tl.atomic_max(p, x, mask=mask, sem="relaxed")


@triton.jit
def update_min(p, x, mask):
    """The memory at p becomes the smaller of itself and x where `mask` holds; NaN if either is."""
    if x.dtype.is_floating():
        tl.atomic_min(p, tl.where(x != x, _nan(x, 1), x), mask=mask, sem="relaxed")
    else:
        tl.atomic_min(p, x, mask=mask, sem="relaxed")


@triton.jit
def _nan(x, sign: tl.constexpr):
    """The quiet NaN of x's type with this sign bit."""
    if x.dtype == tl.float64:
        return tl.full([], -0x8000000000000 if sign else 0x7FF8000000000000, tl.int64).to(tl.float64, bitcast=True)
    else:
        return tl.full([], -0x400000 if sign else 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def update_prod(p, x, mask):
    """The memory at p is multiplied by x where `mask` holds: swapped for the product until nothing else has changed it meanwhile. Elsewhere p points
    to memory all the same, which is left as it is."""
    if x.dtype.primitive_bitwidth == 64:
        word = tl.int64
    else:
        word = tl.int32
    q = p.to(tl.pointer_type(word), bitcast=True)
    old = tl.load(q)
    waiting = (old == old) & mask
    while any_lane(waiting):
        new = (old.to(x.dtype, bitcast=True) * x).to(word, bitcast=True)
        seen = tl.atomic_cas(q, old, tl.where(waiting, new, old), sem="relaxed")
        waiting = waiting & (seen != old)
        old = seen
