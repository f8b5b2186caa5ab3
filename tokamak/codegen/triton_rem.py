"""Device functions: remainders of floating numbers, exact as the language wants them; front: `triton_lib`. (Triton's own % rounds the quotient.)"""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import any_lane, bits, copysign


@triton.jit
def divide(a, b):
    """a / b, correctly rounded."""
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def _parts(x):
    """A positive f64 as (significand, exponent field): x = significand * 2^(field - 1075)."""
    b = bits(x)
    field = b >> 52
    return tl.where(field > 0, (b & 0xFFFFFFFFFFFFF) | 0x10000000000000, b), tl.where(field > 0, field, 1)


@triton.jit
def _power(e):
    """2^e as f64 for e (i64) in -1022 .. 1023."""
    return ((e + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _long_rem(x, y):
    """x mod y for finite x >= 0, y > 0 (f64), by long division: ten bits of the quotient a step, as many steps as the farthest lane needs."""
    m, e = _parts(x)
    n, f = _parts(y)
    left = e - f
    r = tl.where(left >= 0, m % n, m)
    while any_lane(left > 0):
        step = tl.where(left > 10, 10, tl.where(left > 0, left, 0))
        r = tl.where(left > 0, (r << step) % n, r)
        left = left - step
    e = tl.minimum(e, f) - 1075
    half = e >> 1
    return r.to(tl.float64) * _power(half) * _power(e - half)


@triton.jit
def rem_float(a, b):
    """fmod(a, b): exact, with the sign of a. In f32 quotients below 2^28 come from one division in f64."""
    x, y = tl.abs(a).to(tl.float64), tl.abs(b).to(tl.float64)
    usual = (x < float("inf")) & (y > 0) & (y < float("inf"))
    u, v = tl.where(usual, x, 0.0), tl.where(usual, y, 1.0)
    if a.dtype == tl.float64:
        r = _long_rem(u, v)
    else:
        near = u < v * 268435456.0
        r = u - tl.floor(tl.where(near, u / v, 0.0)) * v
        r = tl.where(r < 0, r + v, r)
        if any_lane(~near):
            r = tl.where(near, r, _long_rem(u, v))
    r = copysign(r.to(a.dtype), a)
    r = tl.where((y == float("inf")) & (x < float("inf")), a, r)
    return tl.where((a != a) | (b != b) | (x == float("inf")) | (y == 0), float("nan"), r)


@triton.jit
def mod_float(a, b):
    """Remainder with the sign of b."""
    r = rem_float(a, b)
    return tl.where((r != 0) & ((r < 0) ^ (b < 0)), r + b, r)


@triton.jit
def floordiv_float(a, b):
    """a / b rounded down: what the remainder leaves divides exactly but for rounding, hence the correction by a half."""
    r = rem_float(a, b)
    q = divide(a - r, b)
    q = tl.where((r != 0) & ((r < 0) ^ (b < 0)), q - 1, q)
    f = tl.floor(q)
    f = tl.where(q - f > 0.5, f + 1, f)
    f = tl.where(q == 0, copysign(q * 0, divide(a, b)), f)
    return tl.where(b == 0, divide(a, b), f)
