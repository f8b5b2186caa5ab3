"""C fragments: functions of f64."""
from __future__ import annotations

from .c_math import by_lanes


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
    one = "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc".split()
    out = {f"{n}_f64": by_lanes(n, n, "f64") for n in one}
    out |= {f"{n}_f64": by_lanes(n, n, "f64", 2) for n in ("pow", "atan2", "hypot")}
    out["sigmoid_f64"] = "TK v_f64 sigmoid_f64(v_f64 x) { return 1.0 / (1.0 + exp_f64(-x)); }"
    out["lgamma_f64"] = by_lanes("lgamma", "lgamma", "f64")
    out["digamma_f64"] = by_lanes("digamma", "digamma_lane", "f64", declare="")
    out["erfinv_f64"] = by_lanes("erfinv", "erfinv_lane", "f64", declare="")
    out |= _LANES
    return out
