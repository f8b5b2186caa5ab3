"""C fragments: functions of f64. The hot ones are vectors, as in `c_math`; the others ask the C library lane by lane."""
from __future__ import annotations

from .c_math import Width, by_lanes, exponentials, polynomial

_EXP = (1.0, 1.0, 0.5, 0.16666666666666663, 0.041666666666666664, 0.008333333333335101, 0.0013888888888889993, 0.00019841269838333475,
        2.48015872997532e-05, 2.7557321314611623e-06, 2.7557320529867144e-07, 2.505138500093633e-08, 2.0876305108126373e-09,
        1.6179115596488387e-10, 1.1545760916766415e-11)                                         # |r| <= ln 2, 1.7e-18
_EXPM1 = (0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333326084, 0.0013888888888883711, 0.0001984126987500228, 2.480158732567746e-05,
          2.755725517000089e-06, 2.755727347871858e-07, 2.5105312729622103e-08, 2.09147553258932e-09)
_LOG = (0.6666666666666735, 0.3999999999940942, 0.2857142874366239, 0.22222198432149784, 0.1818357216161805, 0.15313837699209373, 0.14798198605116586)
_SIN = (-0.16666666666666632, 0.00833333333332249, -0.0001984126982985795, 2.7557313707070068e-06, -2.5050760253406863e-08, 1.58969099521155e-10)
_COS = (0.0416666666666666, -0.001388888888887411, 2.480158728947673e-05, -2.7557314351390663e-07, 2.087572321298175e-09, -1.1359647557788195e-11)

F64 = Width("f64", "v_i64", "", "6755399441055744.0", 1023, 52, "0x1.62e42feep-1", "0x1.a39ef35793c76p-33", _EXP, _EXPM1,
            "710.0", "-746.0", "20.0", "-40.0")

# log(1 + f) = f - (f^2/2 - q (f^2/2 + R(q^2))), q = f / (2 + f)
_VECTORS = {
    "log_f64": f"""\
TK v_f64 log_f64(v_f64 x) {{
  v_f64 zero = {{0}}, inf = zero + __builtin_inf(); v_bool tiny = lt_f64(x, zero + 0x1p-1022);
  v_i64 b = (v_i64)select_f64(tiny, x * 0x1p54, x), k = b - 0x3fe6a09e667f3bcdl >> 52;
  v_f64 f = (v_f64)(b - (k << 52)) - 1.0, q = f / (f + 2.0), z = q * q, h = f * f * 0.5;
  v_f64 e = cast_i32_f64(cast_i64_i32(k) - (tiny & 54)), y = f - (h - (q * (h + {polynomial('z', _LOG, '')} * z) + e * 0x1.a39ef35793c76p-33));
  y = select_f64(lt_f64(x, inf), e * 0x1.62e42feep-1 + y, x);
  y = select_f64(eq_f64(x, zero), -inf, y);
  return select_f64(lt_f64(x, zero), zero + __builtin_nan(""), y); }}""",
}


def _circular(name: str, result: str) -> str:
    """sin or cos: as in `c_math`, to 1e5."""
    return f"""\
extern double {name}(double);
static __attribute__((noinline)) void far_{name}_f64(const v_f64 *x, v_f64 *r) {{
  for (int k = 0; k < W; k++) (*r)[k] = {name}((*x)[k]); }}
TK v_f64 {name}_f64(v_f64 x) {{
  v_f64 a = abs_f64(x), t = a * 0x1.45f306dc9c883p-1 + 0x1.8p52, j = t - 0x1.8p52;
  v_f64 r = j * -0x1.921fb544p0 + a; r = j * -0x1.0b4611a6p-34 + r; r = j * -0x1.3198a2e037073p-69 + r;
  v_f64 z = r * r, s = {polynomial('z', _SIN, '')} * z * r + r, c = {polynomial('z', _COS, '')} * (z * z) + (z * -0.5 + 1.0);
  v_u64 q = (v_u64)t; v_bool odd = cast_i64_i32(-(v_i64)(q & 1));
  {result}
  if (!hall(le_f64(a, (v_f64){{0}} + 1e5))) far_{name}_f64(&x, &y);
  return y; }}"""


_VECTORS["sin_f64"] = _circular("sin", "v_f64 y = (v_f64)((v_u64)select_f64(odd, c, s) ^ (q & 2) << 62 ^ (v_u64)x & 0x8000000000000000ul);")
_VECTORS["cos_f64"] = _circular("cos", "v_f64 y = (v_f64)((v_u64)select_f64(odd, s, c) ^ (q + 1 & 2) << 62);")

_LANES = {
    # reflection below 0, recurrence up to 10, then the asymptotic series
    "digamma_lane": """\
extern double log(double), tan(double), trunc(double);
static double digamma_lane(double x) {
  double r = 0;
  if (x == 0) return x - __builtin_copysign(__builtin_inf(), x);
  if (x < 0) {
    if (x == trunc(x)) return __builtin_nan("");
    r = -0x1.921fb54442d18p1 / tan(0x1.921fb54442d18p1 * (x - trunc(x))); x = 1 - x; }
  for (; x < 10; x += 1) r -= 1 / x;
  double z = 1 / (x * x);
  double s = ((((((8.33333333333333333333E-2 * z - 2.10927960927960927961E-2) * z + 7.57575757575757575758E-3) * z - 4.16666666666666666667E-3) * z
              + 3.96825396825396825397E-3) * z - 8.33333333333333333333E-3) * z + 8.33333333333333333333E-2) * z;
  return r + log(x) - 0.5 / x - (x < 1e17 ? s : 0); }""",
    # a rational first guess, then two steps of Newton's method
    "erfinv_lane": """\
extern double erf(double), erfc(double), exp(double), log(double), sqrt(double);
static double erfinv_lane(double y) {
  double a = __builtin_fabs(y), x, z;
  if (!(a <= 1)) return __builtin_nan("");
  if (a == 1) return y * __builtin_inf();
  if (a <= 0.7) {
    z = a * a;
    x = a * (((-0.140543331 * z + 0.914624893) * z - 1.645349621) * z + 0.886226899)
          / ((((0.012229801 * z - 0.329097515) * z + 1.442710462) * z - 2.118377725) * z + 1); }
  else {
    z = sqrt(-log((1 - a) / 2));
    x = (((1.641345311 * z + 3.429567803) * z - 1.624906493) * z - 1.970840454) / ((1.637067800 * z + 3.543889200) * z + 1); }
  for (int k = 0; k < 2; k++) x -= (a <= 0.7 ? erf(x) - a : (1 - a) - erfc(x)) / (0x1.20dd750429b6dp0 * exp(-x * x));
  return __builtin_copysign(x, y); }""",
}


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    one = "exp2 log2 log10 log1p tan asin acos atan sinh cosh asinh acosh atanh erf erfc".split()
    out = exponentials(F64) | _VECTORS | {f"{n}_f64": by_lanes(n, n, "f64") for n in one}
    out |= {f"{n}_f64": by_lanes(n, n, "f64", 2) for n in ("pow", "atan2", "hypot")}
    out["lgamma_f64"] = by_lanes("lgamma", "lgamma", "f64")
    out["digamma_f64"] = by_lanes("digamma", "digamma_lane", "f64", declare="")
    out["erfinv_f64"] = by_lanes("erfinv", "erfinv_lane", "f64", declare="")
    out |= _LANES
    return out
