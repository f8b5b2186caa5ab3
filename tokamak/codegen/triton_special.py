"""Device functions of both floating types that are computed in f64: the gamma and the error functions; front: `triton_lib`."""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import bits, copysign
from .triton_math64 import log1p64


@triton.jit
def _stirling(x):
    """log gamma of x >= 8.5."""
    z = 1.0 / (x * x)
    s = ((0.00641025641025641 * z - 0.0019175269175269176) * z + 0.0008417508417508417) * z - 0.0005952380952380953
    s = (((s * z + 0.0007936507936507937) * z - 0.002777777777777778) * z + 0.08333333333333333) / x
    return (x - 0.5) * (tl.log(x) - 1.0) + (0.4189385332046727 + s)


@triton.jit
def _near_two(d):
    """log gamma(2 + d) for |d| <= 1/2."""
    p = (((6.379047507619774e-08 * d - 1.3412819758517287e-07) * d + 2.0304806751615227e-07) * d - 4.303558760359961e-07) * d + 9.578663334114758e-07
    p = (((p * d - 2.0449201467015115e-06) * d + 4.374374916915131e-06) * d - 9.438458716242811e-06) * d + 2.050726741605779e-05
    p = (((p * d - 4.4926351103833334e-05) * d + 9.945750909889392e-05) * d - 0.00022315475074520367) * d + 0.0005096695248853096
    p = (((p * d - 0.0011927539120010226) * d + 0.002890510330738737) * d - 0.0073855510286681535) * d + 0.02058080842778457
    p = ((p * d - 0.06735230105319814) * d + 0.3224670334241132) * d + 0.42278433509846713
    return p * d


@triton.jit
def _lgamma_positive(x):
    """log gamma of x > 0: a polynomial around 2, to which arguments up to 8.5 are brought by factors; above, Stirling's series."""
    p, d = x * 0.0 + 1.0, x - 2.0
    for _ in tl.static_range(6):
        down = d >= 0.5
        p, d = tl.where(down, p * (d + 1.0), p), tl.where(down, d - 1.0, d)
    d = tl.where(x < 1.5, tl.where(x <= 0.5, x, x - 1.0), d)
    y = _near_two(d) + tl.log(tl.where(x <= 0.5, 1.0 / x, p))
    y = tl.where(x < 1.5, y - log1p64(d), y)
    return tl.where(x < 8.5, y, _stirling(tl.where(x < 8.5, 8.5, x)))


@triton.jit
def _sin_pi(x):
    """sin(pi x) without its sign, for x >= 0."""
    f = x - tl.floor(x)
    return tl.sin(tl.where(f > 0.5, 1.0 - f, f) * 3.141592653589793)


@triton.jit
def lgamma64(x):
    """log |gamma(x)|; reflected below 0; infinite at 0, -1, -2, ..."""
    a = tl.abs(x)
    y = _lgamma_positive(tl.where(a < 1e15, a, 1e15))
    y = tl.where(a < 1e15, y, a * (tl.log(a) - 1.0))
    below = tl.log(3.141592653589793 / (_sin_pi(a) * a)) - y
    y = tl.where(x < 0, below, y)
    y = tl.where((x <= 0) & (tl.floor(x) == x), float("inf"), y)
    return tl.where(a == float("inf"), float("inf"), tl.where(x != x, x, y))


@triton.jit
def lgamma(x):
    """log |gamma(x)| of f32."""
    return lgamma64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def digamma64(x):
    """Derivative of log gamma: reflection below 0, recurrence up to 10 as one fraction, then the asymptotic series."""
    y = tl.where(x < 0, 1.0 - x, x)
    p, q = x * 0.0, x * 0.0 + 1.0
    for _ in tl.static_range(10):
        low = y < 10.0
        p, q, y = tl.where(low, p * y + q, p), tl.where(low, q * y, q), tl.where(low, y + 1.0, y)
    z = 1.0 / (y * y)
    s = ((0.08333333333333333 * z - 0.021092796092796094) * z + 0.007575757575757576) * z - 0.004166666666666667
    s = (((s * z + 0.003968253968253968) * z - 0.008333333333333333) * z + 0.08333333333333333) * z
    r = tl.log(y) - 0.5 / y - s - p / q
    f = (x - copysign(tl.floor(tl.abs(x)), x)) * 3.141592653589793
    r = tl.where(x < 0, r - 3.141592653589793 * tl.cos(f) / tl.sin(f), r)
    r = tl.where(((x < 0) & (tl.floor(x) == x)) | (x == float("-inf")), float("nan"), r)
    return tl.where(x == 0, copysign(x * 0.0 + float("inf"), x * -1.0), tl.where(x == float("inf"), x, r))


@triton.jit
def digamma(x):
    """Derivative of log gamma, of f32."""
    return digamma64(x.to(tl.float64)).to(tl.float32)


@triton.jit
def erfc64(x):
    """1 - erf(x): Cody's rational approximations to e^(x^2) erfc(x) up to 4 and above; x^2 in two parts."""
    a = tl.abs(x)
    y = tl.where(a > 28.0, 28.0, a)
    p = ((2.15311535474403846e-8 * y + 5.64188496988670089e-1) * y + 8.88314979438837594e0) * y + 6.61191906371416295e1
    p = ((p * y + 2.98635138197400131e2) * y + 8.81952221241769090e2) * y + 1.71204761263407058e3
    p = (p * y + 2.05107837782607147e3) * y + 1.23033935479799725e3
    q = ((y + 1.57449261107098347e1) * y + 1.17693950891312499e2) * y + 5.37181101862009858e2
    q = ((q * y + 1.62138957456669019e3) * y + 3.29079923573345963e3) * y + 4.36261909014324716e3
    q = (q * y + 3.43936767414372164e3) * y + 1.23033935480374942e3
    z = 1.0 / (tl.where(y < 4.0, 4.0, y) * tl.where(y < 4.0, 4.0, y))
    r = ((1.63153871373020978e-2 * z + 3.05326634961232344e-1) * z + 3.60344899949804439e-1) * z + 1.25781726111229246e-1
    r = ((r * z + 1.60837851487422766e-2) * z + 6.58749161529837803e-4) * z
    t = ((z + 2.56852019228982242e0) * z + 1.87295284992346725e0) * z + 5.27905102951428412e-1
    t = (t * z + 6.05183413124413191e-2) * z + 2.33520497626869185e-3
    far = (5.6418958354775628695e-1 - r / t) / tl.where(y < 4.0, 4.0, y)
    h = (bits(y) & -0x8000000).to(tl.float64, bitcast=True)
    tail = tl.exp(h * h * -1.0) * tl.exp((h - y) * (h + y)) * tl.where(y < 4.0, p / q, far)
    tail = tl.where(x < 0, 2.0 - tail, tail)
    return tl.where(x != x, x, tl.where(a < 0.46875, 1.0 - tl.erf(x), tail))


@triton.jit
def erfinv64(x):
    """The inverse of erf: a rational guess, then two steps of Newton's method on the nearer tail."""
    a = tl.abs(x)
    mid = a <= 0.7
    z = a * a
    p = ((-0.140543331 * z + 0.914624893) * z - 1.645349621) * z + 0.886226899
    q = (((0.012229801 * z - 0.329097515) * z + 1.442710462) * z - 2.118377725) * z + 1.0
    w = tl.sqrt(tl.log((1.0 - a) * 0.5) * -1.0)
    u = ((1.641345311 * w + 3.429567803) * w - 1.624906493) * w - 1.970840454
    v = (1.637067800 * w + 3.543889200) * w + 1.0
    y = tl.where(mid, a * p / q, u / v)
    for _ in tl.static_range(2):
        miss = tl.where(mid, tl.erf(y) - a, (1.0 - a) - erfc64(y))
        y = y - miss / (tl.exp(y * y * -1.0) * 1.1283791670955126)
    y = tl.where(a < 1e-300, a * 0.886226925452758, y)
    return tl.where(a == 1.0, x * float("inf"), tl.where(a > 1.0, float("nan"), copysign(y, x)))
