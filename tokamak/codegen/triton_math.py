"""Device functions of f32, `tk.NAME`. The largest error of each, in units of the last place, stands in tests/codegen/test_triton_math.py.

Polynomials are those of `c_math`, in Horner's scheme; a * b + c becomes one rounding on GPUs. Functions of whole range use no branch.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import INTERPRETED, bits, copysign, for_nvidia


# -- rounding ------------------------------------------------------------------------------------------------------
@triton.jit
def floor(x):
    """Rounded down."""
    r = tl.floor(x)
    return tl.where(r > x, r - 1, r)


@triton.jit
def ceil(x):
    """Rounded up."""
    r = tl.ceil(x)
    return tl.where(r < x, r + 1, r)


@triton.jit
def trunc(x):
    """Rounded towards zero."""
    return copysign(tl.floor(tl.abs(x)), x)


@triton.jit
def round(x):
    """Rounded to the nearest whole number, half to even: 2^23 (2^52) pushes the fraction out."""
    m = tl.abs(x)
    if x.dtype == tl.float64:
        r = tl.where(m < 4503599627370496.0, (m + 4503599627370496.0) - 4503599627370496.0, m)
    else:
        r = tl.where(m < 8388608.0, (m + 8388608.0) - 8388608.0, m)
    return copysign(r, x)


# -- roots ---------------------------------------------------------------------------------------------------------
@triton.jit
def rsqrt(x):
    """1 / sqrt(x)."""
    tiny = x < 1.1754943508222875e-38
    y = tl.rsqrt(tl.where(tiny, x * 16777216.0, x))
    return tl.where(tiny, y * 4096.0, y)


@triton.jit
def hypot(a, b):
    """sqrt(a^2 + b^2) without overflow; infinite if either is."""
    x, y = a.to(tl.float64), b.to(tl.float64)
    r = tl.sqrt(x * x + y * y).to(tl.float32)
    return tl.where((tl.abs(a) == float("inf")) | (tl.abs(b) == float("inf")), float("inf"), r)


# -- exponentials --------------------------------------------------------------------------------------------------
@triton.jit
def exp2_short(x):
    """2^x within 2 units of the last place; subnormal numbers are 0: one instruction, where keeping them takes four."""
    if INTERPRETED:
        return tl.exp2(x)
    elif for_nvidia():
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def exp_short(x):
    """e^x within |x| + 4 or so units of the last place; subnormal numbers are 0."""
    return exp2_short(x * 1.4426950408889634)


@triton.jit
def inverse_short(x):
    """1 / x within 1 unit of the last place; subnormal numbers are 0: one instruction, where keeping them takes five."""
    if INTERPRETED:
        return 1.0 / x
    elif for_nvidia():
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def sigmoid_short(x):
    """1 / (1 + e^-x), as exact as `exp_short`."""
    return inverse_short(1.0 + exp2_short(x * -1.4426950408889634))


@triton.jit
def exp(x):
    """e^x: x = 2 m ln 2 + r with |r| <= ln 2; 2^m is applied twice, which rounds subnormals once and overflows right."""
    x = tl.clamp(x, -104.0, 89.0, propagate_nan=tl.PropagateNan.ALL)
    t = x * 0.7213475204444817 + 12583039.0
    m = t - 12583039.0
    r = m * -1.38629150390625 + x
    r = m * -2.8572201728820e-06 + r
    s = (bits(t) << 23).to(tl.float32, bitcast=True)
    return exp2_short(r * 1.4426950408889634) * s * s


@triton.jit
def exp2(x):
    """2^x."""
    x = tl.clamp(x, -152.0, 129.0, propagate_nan=tl.PropagateNan.ALL)
    t = x * 0.5 + 12583039.0
    s = (bits(t) << 23).to(tl.float32, bitcast=True)
    return exp2_short((t - 12583039.0) * -2.0 + x) * s * s


@triton.jit
def expm1(x):
    """e^x - 1; half of 2^m is carried so that m may be one more than the largest exponent."""
    t = x * 1.4426950408889634 + 12583038.0
    m = t - 12583038.0
    r = m * -0.693145751953125 + x
    r = m * -1.42860677e-06 + r
    s = (bits(t) << 23).to(tl.float32, bitcast=True)
    p = ((0.0013947587 * r + 0.00836724695) * r + 0.0416662656) * r + 0.166665375
    e = (p * r + 0.5) * (r * r) + r
    e = s * e + (s - 0.5)
    e = tl.where(x > 89.0, float("inf"), e + e)
    return copysign(tl.where(x < -18.0, -1.0, e), x)


@triton.jit
def near(b):
    """What brings b to where 1 / b is a usual number."""
    a = tl.abs(b)
    return tl.where(a < 1e-30, 1e30, tl.where(a > 8.507059173023462e+37, 2.3283064365386963e-10, 1.0))


@triton.jit
def within(b):
    """For `quotient`: 2^32 where b is subnormal or 0, 2^-32 where it is so large that 1 / b is, else 1, with the sign of b. No quotient by
    b * within(b) is subnormal unless the one by b is."""
    a = tl.abs(b)
    return copysign(tl.where(a < 1.1754943508222875e-38, 4294967296.0, tl.where(a > 8.507059173023462e+37, 2.3283064365386963e-10, 1.0)), b)


@triton.jit
def quotient(a, b, inverse, near):
    """a / (b / near), where many a share b >= 0, near = within(b / near) and inverse = 1 / b: rounded once, unless a or the quotient is nearly
    subnormal (1.4 units of the last place). What q is too large by, if anything, is taken from it; infinities and NaN say that q is the quotient."""
    if INTERPRETED:
        return a / b * near
    elif for_nvidia():
        return tl.inline_asm_elementwise("""{
    .reg .pred finite; .reg .f32 q, r, m;
    mul.rn.f32 q, $1, $3; neg.f32 m, $1; fma.rn.f32 r, q, $2, m; abs.f32 m, r; setp.lt.f32 finite, m, 0f7f800000;
    neg.f32 m, $3; @finite fma.rn.f32 q, r, m, q; mov.f32 $0, q;
}""", "=f,f,f,f", [a, b, inverse], dtype=tl.float32, is_pure=True, pack=1) * near
    else:
        q = a * inverse
        r = tl.fma(-q, b, a)
        return tl.where((r != 0) & (tl.abs(r) < float("inf")), tl.fma(r, inverse, q), q) * near


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x): e^-x = 2^p (1 + e ln 2) with p + e = -x log2(e), and as a quotient of quarters, which is no subnormal number."""
    if INTERPRETED:
        return 1.0 / (1.0 + exp(x * -1.0))
    else:
        x = tl.clamp(x, -104.0, 104.0, propagate_nan=tl.PropagateNan.ALL)
        p = x * -1.4426950408889634
        e = tl.fma(x, -1.925963033500774e-08, tl.fma(x, -1.4426950216293335, p * -1.0))
        return inverse_short(tl.fma(exp2_short(p), tl.fma(e, 0.17328679513998632, 0.25), 0.25)) * 0.25


@triton.jit
def tanh(x):
    """1 - 2 / (e^2|x| + 1) from 0.55 on, where it loses nothing; an odd polynomial below."""
    y = tl.abs(x)
    z = y * y
    high = 1.0 - 2.0 / (exp2_short(y * 2.8853900817779268) + 1.0)
    p = ((0.0164376106 * z - 0.0526718311) * z + 0.133207247) * z - 0.333329469
    return copysign(tl.where(y < 0.55, p * z * y + y, high), x)


# -- logarithms ----------------------------------------------------------------------------------------------------
@triton.jit
def _log_unit(r):
    """log(1 + r) for r within -1/4 .. 1/2."""
    z = r * r
    p = ((-0.0450744078 * r + 0.104630085) * r - 0.131612157) * r + 0.144784052
    p = (((p * r - 0.166473107) * r + 0.199908603) * r - 0.250000959) * r + 0.333334491
    return p * (r * z) + (z * -0.5 + r)


@triton.jit
def _log_parts(x):
    """x > 0 as 2^e (1 + r): (log(1 + r), e)."""
    tiny = x < 1.1754943508222875e-38
    b = bits(tl.where(tiny, x * 8388608.0, x))
    k = (b - 0x3F400000) >> 23
    r = (b - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    return _log_unit(r), (k - tl.where(tiny, 23, 0)).to(tl.float32)


@triton.jit
def _log_edges(x, y):
    """y where x is a positive number; -inf at 0, NaN below."""
    return tl.where(x > 0.0, tl.where(x < float("inf"), y, x), tl.where(x == 0.0, float("-inf"), float("nan")))


@triton.jit
def log(x):
    """Natural logarithm: e ln 2 + log(1 + r), ln 2 in two parts."""
    y, e = _log_parts(x)
    return _log_edges(x, e * 0.693145751953125 + (e * 1.42860677e-06 + y))


@triton.jit
def log10(x):
    """Logarithm to base 10."""
    y, e = _log_parts(x)
    return _log_edges(x, e * 0.301025390625 + (e * 4.6050389811980175e-06 + y * 0.4342944920063019))


@triton.jit
def log1p(x):
    """log(1 + x) = k ln 2 + log(1 + r): r = x 2^-k + (2^-k - 1) keeps what 1 + x would lose of x."""
    b = bits(x + 1.0)
    k = (b - 0x3F400000) >> 23
    s = ((127 - k) << 23).to(tl.float32, bitcast=True)
    r = tl.where(x > 16777216.0, (b - (k << 23)).to(tl.float32, bitcast=True) - 1.0, x * s + (s - 1.0))
    e = k.to(tl.float32)
    y = e * 0.693145751953125 + (e * 1.42860677e-06 + _log_unit(r))
    y = tl.where(x == 0.0, x, tl.where(x < float("inf"), y, x))
    return tl.where(x > -1.0, y, tl.where(x == -1.0, float("-inf"), float("nan")))


# -- circular functions --------------------------------------------------------------------------------------------
@triton.jit
def _atan_unit(r):
    """atan of |r| <= 1."""
    z = r * r
    p = ((0.00292050838 * z - 0.0163671952) * z + 0.0432106778) * z - 0.0755211487
    p = (((p * z + 0.106659584) * z - 0.142110437) * z + 0.199937716) * z - 0.333331525
    return p * z * r + r


@triton.jit
def atan(x):
    """Above 1 the angle of 1 / x is taken from pi/2."""
    a = tl.abs(x)
    big = a > 1.0
    y = _atan_unit(tl.where(big, tl.div_rn(1.0, a), a))
    return copysign(tl.where(big, 1.5707963267948966 - y, y), x)


@triton.jit
def atan2(y, x):
    """The angle of (x, y)."""
    a, b = tl.abs(y), tl.abs(x)
    steep = a > b
    r = tl.div_rn(tl.where(steep, b, a), tl.where(steep, a, b))
    r = tl.where((a == float("inf")) & (b == float("inf")), 1.0, tl.where((a == 0.0) & (b == 0.0), 0.0, r))
    t = _atan_unit(r)
    t = tl.where(steep, 1.5707963267948966 - t, t)
    t = tl.where(bits(x) < 0, (3.1415927410125732 - t) - 8.742277657347586e-08, t)
    return copysign(tl.where((x != x) | (y != y), x + y, t), y)


@triton.jit
def _asin_parts(a, big):
    """asin of a up to 1/2; where `big`, asin(sqrt((1 - a) / 2))."""
    z = tl.where(big, 0.5 - 0.5 * a, a * a)
    r = tl.where(big, tl.sqrt_rn(z), a)
    p = (((0.0422304645 * z + 0.0241410341) * z + 0.0454783365) * z + 0.0749523267) * z + 0.166667536
    return p * z * r + r


@triton.jit
def asin(x):
    """Above 1/2: pi/2 - 2 asin(sqrt((1 - x) / 2))."""
    a = tl.abs(x)
    p = _asin_parts(a, a > 0.5)
    return copysign(tl.where(a > 0.5, 1.5707963267948966 - 2.0 * p, p), x)


@triton.jit
def acos(x):
    """As asin."""
    a = tl.abs(x)
    p = _asin_parts(a, a > 0.5)
    high = tl.where(bits(x) < 0, 3.1415926535897931 - 2.0 * p, 2.0 * p)
    return tl.where(a > 0.5, high, 1.5707963705062866 - (copysign(p, x) + 4.371138828673793e-08))


# -- hyperbolic functions ------------------------------------------------------------------------------------------
@triton.jit
def sinh(x):
    """(e^x - e^-x) / 2 by way of e^x - 1; e^(x - 1) e / 2 beyond 20."""
    a = tl.abs(x)
    e = expm1(a)
    return copysign(tl.where(a > 20.0, exp(a - 1.0) * 1.3591409142295225, (e + tl.div_rn(e, e + 1.0)) * 0.5), x)


@triton.jit
def cosh(x):
    """(e^x + e^-x) / 2."""
    a = tl.abs(x)
    e = exp(a)
    return tl.where(a > 20.0, exp(a - 1.0) * 1.3591409142295225, 0.5 * e + tl.div_rn(0.5, e))


@triton.jit
def asinh(x):
    """log(|x| + sqrt(x^2 + 1)) by way of log1p."""
    a = tl.abs(x)
    s = a * a
    y = log1p(tl.div_rn(s, 1.0 + tl.sqrt_rn(s + 1.0)) + a)
    return copysign(tl.where(a > 1048576.0, log(a) + 0.6931471805599453, y), x)


@triton.jit
def acosh(x):
    """log(x + sqrt(x^2 - 1)) by way of log1p; NaN below 1."""
    t = x - 1.0
    y = log1p(t + tl.sqrt_rn(t * (x + 1.0)))
    y = tl.where(x > 1048576.0, log(x) + 0.6931471805599453, y)
    return tl.where(x < 1.0, float("nan"), y)


@triton.jit
def atanh(x):
    """log((1 + x) / (1 - x)) / 2."""
    a = tl.abs(x)
    return copysign(0.5 * log1p(tl.div_rn(a + a, 1.0 - a)), x)


@triton.jit
def tanh_short(x):
    """1 - 2 / (e^2|x| + 1); x itself up to 0.01, where the difference has too few bits left."""
    a = tl.abs(x)
    return copysign(tl.where(a < 0.01, a, 1.0 - 2.0 / (exp2_short(a * 2.88539008) + 1.0)), x)


# -- error functions -----------------------------------------------------------------------------------------------
@triton.jit
def erf(x):
    """An odd polynomial up to 0.9; above, 1 - 2^q with q a polynomial of |x|."""
    a = tl.abs(x)
    z = a * a
    p = (-0.000609037466 * z + 0.00501196552) * z - 0.0267789103
    p = ((p * z + 0.112821408) * z - 0.376125246) * z + 0.128379151
    b = tl.minimum(a, 4.0, propagate_nan=tl.PropagateNan.ALL)
    q = (0.000285963615 * b - 0.0044225035) * b + 0.032193806
    q = (((q * b - 0.150203809) * b - 0.918962777) * b - 1.62706721) * b - 0.000240197609
    return copysign(tl.where(a < 0.9, a * p + a, 1.0 - tl.exp2(q)), x)


@triton.jit
def erf_short(x):
    """1 - 2^q with q a polynomial of |x|, fitted to log2 of erfc; x by its slope up to 0.01, where the difference has too few bits left."""
    a = tl.abs(x)
    q = (((-0.00299616 * a + 0.02979743) * a - 0.14893709) * a - 0.91837645) * a - 1.62790821
    return copysign(tl.where(a < 0.01, 1.12837917 * a, 1.0 - exp2_short(q * a)), x)


@triton.jit
def erfc(x):
    """1 - erf(x). x^2 = h^2 + (x - h)(x + h) with h^2 exact: e^-x^2 keeps its relative accuracy."""
    a = tl.abs(x)
    h = (bits(a) & -4096).to(tl.float32, bitcast=True)
    q = tl.div_rn(a - 2.0, a + 2.0)
    p = ((-0.000251692807 * q - 0.00124652614) * q + 0.00116410258) * q + 0.00864628796
    p = (((p * q - 0.00800936669) * q - 0.0542085841) * q + 0.164049) * q - 0.166031003
    p = (p * q - 0.0927637666) * q + 1.27697837
    y = exp((h * -1.0) * h) * exp((h - a) * (h + a)) * tl.div_rn(p, 2.0 * a + 1.0)
    y = tl.where(a > 10.5, 0.0, y)
    y = tl.where(bits(x) < 0, 2.0 - y, y)
    return tl.where(a < 0.5, 1.0 - erf(x), y)


@triton.jit
def erfinv(x):
    """The inverse of erf: Giles' two polynomials of -log(1 - x^2)."""
    w = log((1.0 - x) * (1.0 + x)) * -1.0
    a, b = w - 2.5, tl.sqrt_rn(w) - 3.0
    low = ((2.81022636e-08 * a + 3.43273939e-07) * a - 3.5233877e-06) * a - 4.39150654e-06
    low = (((low * a + 0.00021858087) * a - 0.00125372503) * a - 0.00417768164) * a + 0.246640727
    high = ((-0.000200214257 * b + 0.000100950558) * b + 0.00134934322) * b - 0.00367342844
    high = (((high * b + 0.00573950773) * b - 0.0076224613) * b + 0.00943887047) * b + 1.00167406
    y = tl.where(w < 5.0, low * a + 1.50140941, high * b + 2.83297682) * x
    return tl.where(tl.abs(x) == 1.0, x * float("inf"), y)


# -- power ---------------------------------------------------------------------------------------------------------
@triton.jit
def pow(x, y):
    """x^y: log2|x| and its product with y in f64, what is left of 2^t without its whole part in f32."""
    a, b = tl.abs(x), tl.abs(y)
    wide = bits(a.to(tl.float64))
    k = (wide - 0x3FE6A09E667F3BCD) >> 52
    m = (wide - (k << 52)).to(tl.float64, bitcast=True)
    d = m + 1.0
    v = (1.0 / d.to(tl.float32)).to(tl.float64)
    q = (m - 1.0) * (v * (2.0 - d * v))
    z = q * q
    p = (((0.3407211149549295 * z + 0.41167329914115813) * z + 0.5770835733636933) * z + 0.9617966734154973) * z + 2.8853900817900136
    t = y.to(tl.float64) * (p * q + k.to(tl.int32).to(tl.float64))
    h = tl.clamp(t.to(tl.float32), -152.0, 129.0, propagate_nan=tl.PropagateNan.ALL)
    j = h * 0.5 + 12583039.0
    n = (j - 12583039.0) * 2.0
    s = (bits(j) << 23).to(tl.float32, bitcast=True)
    r = (t - n.to(tl.float64)).to(tl.float32)
    out = exp2_short(tl.clamp(r, -2.0, 2.0, propagate_nan=tl.PropagateNan.ALL)) * s * s
    return pow_edges(x, y, a, b, out)


@triton.jit
def pow_edges(x, y, a, b, out):
    """The signs and the special values of |x|^y = `out`, where a = |x| and b = |y|."""
    whole, half = round(y) == y, y * 0.5
    odd = whole & (round(half) != half)
    up = (a == float("inf")) ^ (y < 0.0)
    out = tl.where((a == 0.0) | (a == float("inf")), tl.where(up, float("inf"), 0.0), out)
    out = tl.where(b == float("inf"), tl.where((a > 1.0) ^ (y < 0.0), float("inf"), 0.0), out)
    out = tl.where((a == 1.0) & (b == float("inf")), 1.0, out)
    out = tl.where(odd, copysign(out, x), out)
    out = tl.where(((x < 0.0) & ~whole & (a < float("inf"))) | (x != x) | (y != y), float("nan"), out)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, out)


# -- random numbers --------------------------------------------------------------------------------------
@triton.jit
def normal_of(a, b):
    """Box-Muller on two words of uint32: sqrt(-2 ln u) cos(2 pi v). v is cut into quarter turns, which is exact."""
    u = ((a >> 8).to(tl.int32) + 1).to(tl.float32) * 5.9604644775390625e-08
    v = (b >> 8).to(tl.int32)
    quarter = (v + 2097152) >> 22
    r = (v - (quarter << 22)).to(tl.float32) * 3.745070282923929e-07
    z = r * r
    s = ((-0.000195172121 * z + 0.00833217707) * z - 0.166666552) * z * r + r
    c = ((2.443835e-05 * z - 0.00138873665) * z + 0.0416666456) * (z * z) + (z * -0.5 + 1.0)
    y = tl.where((quarter & 1) == 1, s, c)
    y = tl.where(((quarter + 1) & 2) == 2, y * -1.0, y)
    return tl.sqrt_rn(-2.0 * log(u)) * y
