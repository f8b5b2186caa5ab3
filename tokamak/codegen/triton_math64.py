"""Device functions of f64, `tk.NAME64`. The largest error of each, in units of the last place, stands in tests/codegen/test_triton_math.py.

exp, exp2, log, log2, sin, cos, erf, sqrt, floor and ceil are Triton's own: libdevice's on NVIDIA, OCML's on AMD, NumPy's in the interpreter.
Coefficients are those of `c_math64`, of fdlibm (Sun) and of W. J. Cody's rational approximations to erfc.
"""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import bits, copysign
from .triton_math import pow_edges, round


@triton.jit
def scale(x, e):
    """x 2^e in two steps, rounded once; e is an i64 in -2040 .. 2040."""
    half = e >> 1
    return x * ((half + 1023) << 52).to(tl.float64, bitcast=True) * ((e - half + 1023) << 52).to(tl.float64, bitcast=True)


# -- roots ---------------------------------------------------------------------------------------------------------
@triton.jit
def hypot64(a, b):
    """sqrt(a^2 + b^2): both are scaled by the power of two of the greater."""
    x, y = tl.abs(a), tl.abs(b)
    top = tl.where(x > y, x, y)
    k = (bits(top) >> 52) - 1023
    k = tl.where(k < -1000, -1000, tl.where(k > 1000, 1000, k))
    down = ((1023 - k) << 52).to(tl.float64, bitcast=True)
    up = ((1023 + k) << 52).to(tl.float64, bitcast=True)
    x, y = x * down, y * down
    return tl.where((tl.abs(a) == float("inf")) | (tl.abs(b) == float("inf")), float("inf"), tl.sqrt(x * x + y * y) * up)


# -- exponentials --------------------------------------------------------------------------------------------------
@triton.jit
def _expm1_parts(x):
    """(2^m / 2, e^r - 1) where x = m ln 2 + r, |r| <= ln 2 / 2."""
    t = x * 1.4426950408889634 + 6755399441056766.0
    m = t - 6755399441056766.0
    r = m * -0.6931471805598903 + x
    r = m * -5.497923018708371e-14 + r
    s = (bits(t) << 52).to(tl.float64, bitcast=True)
    p = ((2.09147553258932e-09 * r + 2.5105312729622103e-08) * r + 2.755727347871858e-07) * r + 2.755725517000089e-06
    p = (((p * r + 2.480158732567746e-05) * r + 0.0001984126987500228) * r + 0.0013888888888883711) * r + 0.008333333333326084
    p = ((p * r + 0.0416666666666667) * r + 0.1666666666666667) * r + 0.5
    return s, p * (r * r) + r


@triton.jit
def expm1_64(x):
    """e^x - 1."""
    s, e = _expm1_parts(x)
    e = s * e + (s - 0.5)
    e = tl.where(x > 710.0, float("inf"), e + e)
    return copysign(tl.where(x < -40.0, -1.0, e), x)


@triton.jit
def tanh64(x):
    """-e / (e + 2) with e = expm1(-2 |x|)."""
    y = tl.abs(x)
    e = expm1_64(tl.where(y > 20.0, 20.0, y) * -2.0)
    return copysign(tl.where(y > 20.0, 1.0, e / (e + 2.0)), x)


@triton.jit
def sigmoid64(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(x * -1.0))


# -- logarithms ----------------------------------------------------------------------------------------------------
@triton.jit
def log10_64(x):
    """log to base 10; log10(e) in two parts."""
    y = tl.log(x)
    return y * 0.4342944819032518 + y * 1.098319650216765e-17


@triton.jit
def log1p64(x):
    """log(1 + x): what 1 + x loses of x, divided by 1 + x, comes back."""
    u = x + 1.0
    y = tl.log(u) + (x - (u - 1.0)) / u
    y = tl.where(tl.abs(x) < 7.450580596923828e-09, x * x * -0.5 + x, y)
    return tl.where((u > 0.0) & (u < float("inf")), y, tl.log(u))


# -- circular functions --------------------------------------------------------------------------------------------
@triton.jit
def tan64(x):
    """Tangent."""
    return tl.sin(x) / tl.cos(x)


@triton.jit
def _atan_positive(a):
    """atan of a >= 0: the angle from that of 1/2, 1, 3/2 or infinity is an odd polynomial (fdlibm)."""
    r = tl.where(a < 0.6875, (2.0 * a - 1.0) / (2.0 + a), tl.where(a < 1.1875, (a - 1.0) / (a + 1.0), (a - 1.5) / (1.0 + 1.5 * a)))
    r = tl.where(a < 0.4375, a, tl.where(a < 2.4375, r, -1.0 / a))
    high = tl.where(a < 0.6875, 4.63647609000806093515e-01, tl.where(a < 1.1875, 7.85398163397448278999e-01, a * 0.0 + 9.82793723247329054082e-01))
    low = tl.where(a < 0.6875, 2.26987774529616870924e-17, tl.where(a < 1.1875, 3.06161699786838301793e-17, a * 0.0 + 1.39033110312309984516e-17))
    high = tl.where(a < 0.4375, 0.0, tl.where(a < 2.4375, high, 1.57079632679489655800e+00))
    low = tl.where(a < 0.4375, 0.0, tl.where(a < 2.4375, low, 6.12323399573676603587e-17))
    z = r * r
    w = z * z
    even = ((1.62858201153657823623e-02 * w + 4.97687799461593236017e-02) * w + 6.66107313738753120669e-02) * w + 9.09088713343650656196e-02
    even = ((even * w + 1.42857142725034663711e-01) * w + 3.33333333333329318027e-01) * z
    odd = ((-3.65315727442169155270e-02 * w - 5.83357013379057348645e-02) * w - 7.69187620504482999495e-02) * w - 1.11111104054623557880e-01
    odd = (odd * w - 1.99999999998764832476e-01) * w
    return high - ((r * (even + odd) - low) - r)


@triton.jit
def atan64(x):
    """Arc tangent."""
    return copysign(tl.where(tl.abs(x) == float("inf"), 1.5707963267948966, _atan_positive(tl.abs(x))), x)


@triton.jit
def atan2_64(y, x):
    """The angle of (x, y)."""
    a, b = tl.abs(y), tl.abs(x)
    r = tl.where(a == b, 1.0, a / b)
    r = tl.where((a == 0.0) & (b == 0.0), 0.0, r)
    t = tl.where(r == float("inf"), 1.5707963267948966, _atan_positive(r))
    t = tl.where(bits(x) < 0, 3.1415926535897931 - (t - 1.2246467991473532e-16), t)
    return copysign(tl.where((x != x) | (y != y), x + y, t), y)


@triton.jit
def _asin_ratio(z):
    """(asin(x) - x) / x of z = x^2 up to 1/4 (fdlibm)."""
    p = ((3.47933107596021167570e-05 * z + 7.91534994289814532176e-04) * z - 4.00555345006794114027e-02) * z + 2.01212532134862925881e-01
    p = ((p * z - 3.25565818622400915405e-01) * z + 1.66666666666666657415e-01) * z
    q = ((7.70381505559019352791e-02 * z - 6.88283971605453293030e-01) * z + 2.02094576023350569471e+00) * z - 2.40339491173441421878e+00
    return p / (q * z + 1.0)


@triton.jit
def _root_parts(z):
    """sqrt(z) as a short number and the rest."""
    s = tl.sqrt(z)
    f = (bits(s) & -0x100000000).to(tl.float64, bitcast=True)
    return s, f, tl.where(z > 0, (z - f * f) / (s + f), 0.0)


@triton.jit
def asin64(x):
    """Above 1/2: pi/2 - 2 asin(sqrt((1 - x) / 2)), the root in two parts."""
    a = tl.abs(x)
    big = a > 0.5
    z = tl.where(big, (1.0 - a) * 0.5, a * a)
    w = _asin_ratio(z)
    s, f, c = _root_parts(tl.where(big, z, 0.25))
    p = 2.0 * s * w - (6.12323399573676603587e-17 - 2.0 * c)
    high = 7.85398163397448278999e-01 - (p - (7.85398163397448278999e-01 - 2.0 * f))
    return copysign(tl.where(big, high, a + a * w), x)


@triton.jit
def acos64(x):
    """As asin."""
    a = tl.abs(x)
    big = a > 0.5
    z = tl.where(big, (1.0 - a) * 0.5, a * a)
    w = _asin_ratio(z)
    s, f, c = _root_parts(tl.where(big, z, 0.25))
    near = 2.0 * (f + (w * s + c))
    far = 3.1415926535897931 - 2.0 * (s + (w * s - 6.12323399573676603587e-17))
    mid = 1.5707963267948966 - (x - (6.12323399573676603587e-17 - x * w))
    return tl.where(big, tl.where(x < 0, far, near), mid)


# -- hyperbolic functions ------------------------------------------------------------------------------------------
@triton.jit
def sinh64(x):
    """(e^x - e^-x) / 2 by way of e^x - 1; e^(x - 1) e / 2 beyond 40."""
    a = tl.abs(x)
    e = expm1_64(a)
    return copysign(tl.where(a > 40.0, tl.exp(a * 0.5) * 0.5 * tl.exp(a * 0.5), (e + e / (e + 1.0)) * 0.5), x)


@triton.jit
def cosh64(x):
    """(e^x + e^-x) / 2."""
    a = tl.abs(x)
    e = tl.exp(a)
    return tl.where(a > 40.0, tl.exp(a * 0.5) * 0.5 * tl.exp(a * 0.5), 0.5 * e + 0.5 / e)


@triton.jit
def asinh64(x):
    """log(|x| + sqrt(x^2 + 1)) by way of log1p."""
    a = tl.abs(x)
    s = a * a
    y = log1p64(s / (1.0 + tl.sqrt(s + 1.0)) + a)
    return copysign(tl.where(a > 1152921504606846976.0, tl.log(a) + 0.6931471805599453, y), x)


@triton.jit
def acosh64(x):
    """log(x + sqrt(x^2 - 1)) by way of log1p; NaN below 1."""
    t = x - 1.0
    y = log1p64(t + tl.sqrt(t * (x + 1.0)))
    y = tl.where(x > 1152921504606846976.0, tl.log(x) + 0.6931471805599453, y)
    return tl.where(x < 1.0, float("nan"), y)


@triton.jit
def atanh64(x):
    """log((1 + x) / (1 - x)) / 2."""
    a = tl.abs(x)
    return copysign(0.5 * log1p64((a + a) / (1.0 - a)), x)


# -- power ---------------------------------------------------------------------------------------------------------
@triton.jit
def _short(x):
    """x with the low half of its bits cleared: products of two such numbers are exact."""
    return (bits(x) & -0x100000000).to(tl.float64, bitcast=True)


@triton.jit
def _log2_parts(a):
    """log2 of a > 0 as a short number and the rest, together good to 2^-70 or so (fdlibm)."""
    tiny = a < 2.2250738585072014e-308
    b = bits(tl.where(tiny, a * 18014398509481984.0, a))
    k = b >> 52
    m = (b - ((k - 1023) << 52)).to(tl.float64, bitcast=True)
    top, mid = m >= 1.7320508075688772, (m >= 1.224744871391589) & (m < 1.7320508075688772)
    k = k - tl.where(tiny, 54 + 1023, 1023) + tl.where(top, 1, 0)
    m = tl.where(top, m * 0.5, m)
    c = tl.where(mid, 1.5, m * 0.0 + 1.0)
    u, v = m - c, 1.0 / (m + c)
    s = u * v
    sh = _short(s)
    th = _short(m + c)
    tl_ = m - (th - c)
    sl = v * ((u - sh * th) - sh * tl_)
    z = s * s
    r = ((2.06975017800338417784e-01 * z + 2.30660745775561754067e-01) * z + 2.72728123808534006489e-01) * z + 3.33333329818377432918e-01
    r = ((r * z + 4.28571428578550184252e-01) * z + 5.99999999999994648725e-01) * (z * z) + sl * (sh + s)
    z = sh * sh
    th = _short(3.0 + z + r)
    tl_ = r - ((th - 3.0) - z)
    u = sh * th
    v = sl * th + tl_ * s
    ph = _short(u + v)
    pl = v - (ph - u)
    zh = 9.61796700954437255859e-01 * ph
    zl = -7.02846165095275826516e-09 * ph + pl * 9.61796693925975554329e-01 + tl.where(mid, 1.35003920212974897128e-08, m * 0.0)
    dh = tl.where(mid, 5.84962487220764160156e-01, m * 0.0)
    n = k.to(tl.float64)
    high = _short(((zh + zl) + dh) + n)
    return high, zl - (((high - n) - dh) - zh)


@triton.jit
def pow64(x, y):
    """x^y: log2|x| in two parts times y in two parts, then 2^t."""
    a, b = tl.abs(x), tl.abs(y)
    good = (a > 0) & (a < float("inf")) & (b < float("inf"))
    high, low = _log2_parts(tl.where(good, a, 1.0))
    y1 = _short(tl.where(good, y, 1.0))
    pl = (tl.where(good, y, 1.0) - y1) * high + tl.where(good, y, 1.0) * low
    ph = y1 * high
    t = ph + pl
    far = tl.abs(t) > 1100.0
    i = round(tl.where(far, 0.0, t))
    e = scale(tl.exp2(tl.where(far, 0.0, (ph - i) + pl)), i.to(tl.int64))
    return pow_edges(x, y, a, b, tl.where(far, tl.where(t > 0, float("inf"), 0.0), e))
