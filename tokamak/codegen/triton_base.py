"""Device functions of bits, casts, integers and extremes; front: `triton_lib`.

The same text runs on NVIDIA, on AMD and in Triton's interpreter, which differs in three points that are dealt with here and in
`triton_fold`: it cuts f32 to bf16 instead of rounding, its fused multiply-add rounds twice (so nothing here counts on one rounding), and
folds with a function of one's own are slow. `INTERPRETED` is known when a kernel is compiled.
"""
from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@tl.core.builtin
def for_nvidia(least=0, _semantic=None):
    """Whether the kernel is being compiled for a GPU of NVIDIA's, of that compute capability (90 is 9.0) or later; not to be asked in the
    interpreter."""
    options = _semantic.builder.options
    least = getattr(least, "value", least)
    return tl.constexpr(options.backend_name == "cuda" and (least == 0 or int(options.arch[2:].rstrip("af")) >= least))


# -- bits ----------------------------------------------------------------------------------------------------------
@triton.jit
def bits(x):
    """The bits of a floating x, as a signed integer of its width."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def copysign(a, b):
    """|a| with the sign of b."""
    if a.dtype == tl.float64:
        return ((bits(a) & 0x7FFFFFFFFFFFFFFF) | (bits(b) & -0x8000000000000000)).to(tl.float64, bitcast=True)
    else:
        return ((bits(a) & 0x7FFFFFFF) | (bits(b) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def nextafter(a, b):
    """The number next to a towards b."""
    zero = bits(a) & 0
    down = ((a < b) ^ (a > 0)) & (a != 0)
    step = (bits(a) + tl.where(down, zero - 1, zero + 1)).to(a.dtype, bitcast=True)
    step = tl.where(a == 0, copysign((zero + 1).to(a.dtype, bitcast=True), b), step)
    return tl.where((a != a) | (b != b), a + b, tl.where(a == b, b, step))


@triton.jit
def any_lane(c):
    """One bool: whether `c` holds anywhere in the block."""
    if len(c.shape) == 0:
        return c
    else:
        return tl.max(c.to(tl.int32), axis=None) != 0


# -- casts ---------------------------------------------------------------------------------------------------------
@triton.jit
def to_bf16(x):
    """f32 to bf16, to nearest even."""
    if INTERPRETED:
        b = x.to(tl.uint32, bitcast=True)
        b = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, b).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def from_bf16(x):
    """bf16 to f32."""
    if INTERPRETED:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# -- integers ------------------------------------------------------------------------------------------------------
@triton.jit
def _quotient(a, b):
    """a / b towards zero; 0 where b is 0; wraps where the quotient is one too large for the type. b may be a Python
    integer."""
    if a.dtype.is_int_signed():
        minus = b == -1
        q = a // tl.where((b == 0) | minus, 1, b)
        return tl.where(b == 0, 0, tl.where(minus, 0 - a, q))
    else:
        return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b))


@triton.jit
def truncdiv(a, b):
    """Integer a / b rounded towards zero; 0 where b is 0."""
    return _quotient(a, b)


@triton.jit
def rem(a, b):
    """a - truncdiv(a, b) * b, which has the sign of a; 0 where b is 0."""
    return tl.where(b == 0, 0, a - _quotient(a, b) * b)


@triton.jit
def mod(a, b):
    """Remainder of integers with the sign of b; 0 where b is 0."""
    r = rem(a, b)
    return tl.where((r != 0) & ((r < 0) ^ (b < 0)), r + b, r)


@triton.jit
def floordiv(a, b):
    """Integer a / b rounded down; 0 where b is 0."""
    q = _quotient(a, b)
    r = a - q * b
    return tl.where((b != 0) & (r != 0) & ((r < 0) ^ (b < 0)), q - 1, q)


@triton.jit
def divisor(b, mask, err, code):
    """b; stores `code` into the error word `err` (pointer to i32) when b is 0 in a lane of `mask` (a bool tensor, or True)."""
    bad = (b == 0) & mask
    tl.store(err + bad.to(tl.int32) * 0, code, mask=bad)
    return b


@triton.jit
def pow_int(a, e):
    """Integer a to the power e by squaring, wrapping; a power below 0 is 1 or -1 for a = 1 and a = -1, else 0."""
    r, square, left = a * 0 + e * 0 + 1, a + e * 0, tl.where(e > 0, e, 0) + a * 0          # of one shape: a loop carries them
    for _ in range(a.dtype.primitive_bitwidth):
        r = tl.where((left & 1) == 1, r * square, r)
        square = square * square
        left = left >> 1
    if a.dtype.is_int_signed():
        inverse = tl.where(a == 1, 1, tl.where(a == -1, 1 - 2 * (e & 1), 0))
        r = tl.where(e < 0, inverse, r)
    return r


@triton.jit
def shl(a, k):
    """a << k; 0 for counts outside 0 .. bits - 1."""
    ok = (k >= 0) & (k < a.dtype.primitive_bitwidth)
    return tl.where(ok, a << tl.where(ok, k, 0), 0)


@triton.jit
def shr(a, k):
    """a >> k, arithmetic where a is signed; counts outside 0 .. bits - 1 leave the sign alone (0 or -1), or 0 for unsigned."""
    ok = (k >= 0) & (k < a.dtype.primitive_bitwidth)
    if a.dtype.is_int_signed():
        return a >> tl.where(ok, k, a.dtype.primitive_bitwidth - 1)
    else:
        return tl.where(ok, a >> tl.where(ok, k, 0), 0)


@triton.jit
def sign(x):
    """-1, 0 or 1 in the type of x; 0 for NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


# -- extremes ------------------------------------------------------------------------------------------------------
@triton.jit
def maximum(a, b):
    """The greater; NaN if either is."""
    if a.dtype == tl.int1:
        return a | b
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """The smaller; NaN if either is."""
    if a.dtype == tl.int1:
        return a & b
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fmax(a, b):
    """The greater; the other one if one is NaN."""
    return tl.where((a >= b) | (b != b), a, b)


@triton.jit
def fmin(a, b):
    """The smaller; the other one if one is NaN."""
    return tl.where((a <= b) | (b != b), a, b)
