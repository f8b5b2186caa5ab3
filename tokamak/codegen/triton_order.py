"""Device functions of an ordered target: prefixes whose bits do not depend on threads. Triton's own scans begin with what a thread has, and which
elements that are depends on the number of warps and on where memory begins. (Folds in order are statements of the kernel: `tile_folds`.)"""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_fold import _mul, logaddexp


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def ordered_scan_sum(x, before: tl.constexpr, log: tl.constexpr, after: tl.constexpr):
    """Running sums along the middle one of `before` x 2^`log` x `after` elements."""
    return _by_halves(x, before, log, after, _add)


@triton.jit
def ordered_scan_prod(x, before: tl.constexpr, log: tl.constexpr, after: tl.constexpr):
    """Running products, likewise."""
    return _by_halves(x, before, log, after, _mul)


@triton.jit
def ordered_scan_logsumexp(x, before: tl.constexpr, log: tl.constexpr, after: tl.constexpr):
    """log of the running sum of e^x, likewise."""
    return _by_halves(x, before, log, after, logaddexp)


@triton.jit
def _by_halves(x, before: tl.constexpr, log: tl.constexpr, after: tl.constexpr, combine: tl.constexpr):
    """Prefixes of pieces of 1, 2, 4 ... elements: two of them are one when what the first comes to is combined into each of the second."""
    whole: tl.constexpr = tl.int64 if x.dtype.primitive_bitwidth == 64 else tl.int32
    y = x
    for k in tl.static_range(log):
        pieces = tl.reshape(y, [before * (1 << (log - 1 - k)), 2, 1 << k, after])
        half = tl.arange(0, 2)[None, :, None, None]
        place = tl.arange(0, 1 << k)[None, None, :, None]
        bits = tl.where((half == 0) & (place == (1 << k) - 1), pieces.to(whole, bitcast=True), 0)         # a sum of one number and zeros
        total = tl.sum(tl.sum(bits, 2), 1).to(whole).to(y.dtype, bitcast=True)[:, None, None, :]
        y = tl.reshape(tl.where(half == 0, pieces, combine(tl.broadcast_to(total, pieces.shape), pieces)), x.shape)
    return y
