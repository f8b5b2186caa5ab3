"""C fragments: functions of f32 in vectors. The largest error of each, in units of the last place, stands in tests/codegen/test_c_math.py.

exp, exp2: x = 2 m ln 2 + r with |r| <= ln 2, a polynomial of r, scaled twice by 2^m: the second multiplication rounds denormals right and overflows
right. m is read from the low bits of x / (2 ln 2) + 1.5 * 2^23. expm1 and tanh use n ln 2 + r with |r| <= ln 2 / 2 and keep e^r - 1.
Coefficients are least-maximum fits of the relative error, in ascending order of the power. a * b + c is one rounding where the target has FMA.
"""
from __future__ import annotations

from dataclasses import dataclass


def polynomial(variable: str, coefficients: tuple[float, ...], suffix: str = "f") -> str:
    """Horner's scheme, ascending coefficients, as C text."""
    text = f"{coefficients[-1]!r}{suffix}"
    for c in reversed(coefficients[:-1]):
        text = f"({text} * {variable} + {c!r}{suffix})"
    return text.replace("+ -", "- ")


_EXP = (1.0, 1.0, 0.500000358, 0.16666615, 0.0416612774, 0.00833609793, 0.00141042704, 0.00019611865)   # |r| <= ln 2, 1.4e-8
_EXPM1 = (0.5, 0.166665375, 0.0416662656, 0.00836724695, 0.0013947587)                                  # (e^r - 1 - r) / r^2, |r| <= ln 2 / 2
_LOG_NEAR = (0.333334491, -0.250000959, 0.199908603, -0.166473107, 0.144784052, -0.131612157, 0.104630085, -0.0450744078)   # -0.25 .. 0.5
_LOG = (0.333333164, -0.250008106, 0.200022861, -0.166245505, 0.141812101, -0.131288096, 0.128815413, -0.0785933286)
# erf(x) / x and tanh(x) / x as quotients of polynomials of x^2, for |x| up to 3.925 and 9.02: 1.9e-8 and 2.1e-8
_ERF = (1.1470288, 0.193725497, 0.053639058, 0.00383414025, 0.00028953806, 2.08002689e-06)
_ERF_UNDER = (1.01652789, 0.510526717, 0.116062351, 0.0152292904, 0.00118291704, 3.86778374e-05)
_TANH = (1.99721003, 0.26722151, 0.00697837211, 4.11103101e-05, 2.66019136e-08)
_TANH_UNDER = (1.99720991, 0.932957888, 0.0516701601, 0.000655710755, 1.55027988e-06)
_EXP_SHORT = (1.0, 1.0, 0.499999921, 0.166664201, 0.0416682263, 0.00837482401, 0.00138368271)          # |r| <= ln 2 / 2, 1.9e-9

@dataclass(frozen=True)
class Width:
    """What the exponentials need to know of a floating type. ln 2 is `high + low`, `high` short enough that its product with an exponent is exact."""
    name: str
    lanes: str           # register of integers as wide
    suffix: str          # of constants
    magic: str           # 1.5 * 2^(bits of the significand)
    bias: int
    shift: int
    high: str
    low: str
    exp: tuple[float, ...]
    expm1: tuple[float, ...]
    top: str             # e^x overflows above
    bottom: str          # e^x is 0 below
    one: str             # tanh is 1 above
    minus: str           # expm1 is -1 below


F32 = Width("f32", "v_i32", "f", "12582912.0f", 127, 23, "0x1.62e4p-1f", "0x1.7f7d1cp-20f", _EXP, _EXPM1, "89.0f", "-104.0f", "9.1f", "-18.0f")


def exponentials(t: Width) -> dict[str, str]:
    """exp, expm1, tanh and sigmoid of a type."""
    n, v, f = t.name, f"v_{t.name}", t.suffix
    zero = f"({v}){{0}}"

    def reduce(scaled: str, x: str, parts: int, bias: int) -> str:
        """Statements: r = x - m ln 2 * parts, s = 2^m; `scaled` is log2(e) x / parts as C text, `bias` the exponent of s where m is 0."""
        two = f"{parts}.0{f} * "
        return (f"{v} t = {scaled} + ({t.magic} + {bias}.0{f}), m = t - ({t.magic} + {bias}.0{f});\n"
                f"  {v} r = m * ({two}-{t.high}) + {x}; r = m * ({two}-{t.low}) + r;\n"
                f"  {v} s = ({v})(({t.lanes})t << {t.shift})")
    return {
        f"exp_{n}": f"""\
TK {v} exp_{n}({v} x) {{
  {reduce(f'x * 0x1.71547652b82fep-1{f}', 'x', 2, t.bias)}, p = {polynomial('r', t.exp, f)};
  p = select_{n}(gt_{n}(x, {zero} + {t.top}), {zero} + __builtin_inf{f}(), p * s * s);
  return select_{n}(lt_{n}(x, {zero} + {t.bottom}), {zero}, p); }}""",
        # s is half of 2^m, so that m may be one more than the largest exponent
        f"expm1_{n}": f"""\
TK {v} expm1_{n}({v} x) {{
  {reduce(f'x * 0x1.71547652b82fep0{f}', 'x', 1, t.bias - 1)}, e = {polynomial('r', t.expm1, f)} * (r * r) + r;
  e = s * e + (s - 0.5{f});
  e = select_{n}(gt_{n}(x, {zero} + {t.top}), {zero} + __builtin_inf{f}(), e + e);
  return copysign_{n}(select_{n}(lt_{n}(x, {zero} + {t.minus}), {zero} - 1.0{f}, e), x); }}""",
        # -e / (e + 2) with e = expm1(-2 |x|)
        f"tanh_{n}": f"""\
TK {v} tanh_{n}({v} x) {{
  {v} y = abs_{n}(x);
  {reduce(f'y * -0x1.71547652b82fep1{f}', f'y * -2.0{f}', 1, t.bias)}, e = {polynomial('r', t.expm1, f)} * (r * r) + r;
  e = s * e + (s - 1.0{f});
  e = select_{n}(gt_{n}(y, {zero} + {t.one}), {zero} + 1.0{f}, e / (e + 2.0{f}));
  return copysign_{n}(e, x); }}""",
        f"sigmoid_{n}": f"TK {v} sigmoid_{n}({v} x) {{ return 1.0{f} / (1.0{f} + exp_{n}(-x)); }}",
    }


_EXP2 = {
    "exp2_f32": f"""\
TK v_f32 exp2_f32(v_f32 x) {{
  v_f32 t = x * 0.5f + 0x1.8000fep23f, m = t - 0x1.8000fep23f, r = (m * -2.0f + x) * 0x1.62e43p-1f;
  v_f32 s = (v_f32)((v_i32)t << 23), p = {polynomial('r', _EXP)};
  p = select_f32(x > 128.5f, (v_f32){{0}} + __builtin_inff(), p * s * s);
  return (v_f32)(~(x < -151.0f) & (v_i32)p); }}""",
}


def _saturating(name: str, last: float, over: tuple[float, ...], under: tuple[float, ...]) -> str:
    """An odd function that is +-1 from `last` on: x P(x^2) / Q(x^2) of the clipped argument, rounding kept from leaving -1 .. 1. At `last` the
    quotient is 3e-7 too large, so that it is exactly 1 however it is rounded: derivatives multiply 1 - f(x)^2 by powers of x."""
    return f"""\
TK v_f32 {name}_f32(v_f32 x) {{
  v_f32 y = clip_f32(x, -{last}f, {last}f), z = y * y;
  return clip_f32({polynomial('z', over)} * y / {polynomial('z', under)}, -1.0f, 1.0f); }}"""


_RATIONAL = {
    # NaN stays: the machine's minimum gives its second operand
    "clip_f32": """\
#if !defined(__clang__) && defined(__AVX512F__) && W == 16
TK v_f32 clip_f32(v_f32 x, float low, float high) {
  x = __builtin_ia32_minps512_mask((v_f32){0} + high, x, x, -1, 4);
  return __builtin_ia32_maxps512_mask((v_f32){0} + low, x, x, -1, 4); }
#elif !defined(__clang__) && defined(__AVX__) && W == 8
TK v_f32 clip_f32(v_f32 x, float low, float high) {
  return __builtin_ia32_maxps256((v_f32){0} + low, __builtin_ia32_minps256((v_f32){0} + high, x)); }
#else
TK v_f32 clip_f32(v_f32 x, float low, float high) {
  x = select_f32(x > high, (v_f32){0} + high, x);
  return select_f32(x < low, (v_f32){0} + low, x); }
#endif""",
    "erf_f32": _saturating("erf", 4.05, _ERF, _ERF_UNDER),
    "tanh_f32": _saturating("tanh", 9.5, _TANH, _TANH_UNDER),
}

# log_parts: x = 2^e * (1 + r) with 1 + r within sqrt(1/2) .. sqrt(2); returns log(1 + r) and sets *e
_LOGARITHM = {
    "log_parts_f32": f"""\
TK v_f32 log_parts_f32(v_f32 x, v_f32 *e) {{
  v_i32 tiny = x < 0x1p-126f, b = (v_i32)select_f32(tiny, x * 0x1p23f, x), k = b - 0x3f3504f3 >> 23;
  v_f32 r = (v_f32)(b - (k << 23)) - 1.0f, z = r * r;
  *e = __builtin_convertvector(k - (tiny & 23), v_f32);
  return {polynomial('r', _LOG)} * (r * z) + (z * -0.5f + r); }}""",
    "log_edges_f32": """\
TK v_f32 log_edges_f32(v_f32 x, v_f32 y) {
  y = select_f32(x < __builtin_inff(), y, x);
  y = select_f32(x == 0.0f, (v_f32){0} - __builtin_inff(), y);
  return select_f32(x < 0.0f, (v_f32){0} + __builtin_nanf(""), y); }""",
    "log_f32": "TK v_f32 log_f32(v_f32 x) {\n  v_f32 e, y = log_parts_f32(x, &e);\n"
               "  return log_edges_f32(x, e * 0x1.62e4p-1f + (e * 0x1.7f7d1cp-20f + y)); }",
    "log2_f32": "TK v_f32 log2_f32(v_f32 x) {\n  v_f32 e, y = log_parts_f32(x, &e);\n"
                "  return log_edges_f32(x, y * 0x1.715476p0f + (y * 0x1.4ae0cp-26f + e)); }",
    "log10_f32": "TK v_f32 log10_f32(v_f32 x) {\n  v_f32 e, y = log_parts_f32(x, &e);\n"
                 "  return log_edges_f32(x, e * 0x1.344p-2f + (e * 0x1.3509f8p-18f + y * 0x1.bcb7b2p-2f)); }",
    # 1 + x loses low bits of x: what it lost, divided by 1 + x, comes back
    "log1p_f32": "TK v_f32 log1p_f32(v_f32 x) {\n  v_f32 u = x + 1.0f, lost = x - (u - 1.0f), big = abs_f32(x);\n"
                 "  v_f32 y = log_f32(u) + lost / u;\n  y = select_f32(big < 0x1p-12f, x * x * -0.5f + x, y);\n"
                 "  return select_f32((u > 0.0f) & (u < __builtin_inff()), y, log_f32(u)); }",
}

# The machine's own scaling by 2^m rounds denormals right and overflows right: one rounding, r half as long. Lanes in which 0 is all that is left
# are not scaled: a result that underflows takes some processors 16 times as long (e^-inf of 100000 elements on a Xeon 497 us, 31 so)
_SCALED = {"exp_f32": f"""\
#if defined(__AVX512F__) && W == 16
TK v_f32 exp_f32(v_f32 x) {{
  const unsigned short some = __builtin_ia32_cmpps512_mask(x, (v_f32){{0}} + {F32.bottom}, 5, -1, 4);
  x = clip_f32(x, {F32.bottom}, {F32.top});
  v_f32 m = (x * 0x1.715476p0f + {F32.magic}) - {F32.magic}, r = m * -{F32.high} + x; r = m * -{F32.low} + r;
  return (v_f32)__builtin_ia32_scalefps512_mask({polynomial('r', _EXP_SHORT)}, m, (v_f32){{0}}, some, 4); }}
#else
{exponentials(F32)["exp_f32"]}
#endif""",
    # mantissa in 0.75 .. 1.5, denormals too; 0, infinity and numbers below 0 come out right by themselves
    "log_f32": f"""\
#if defined(__AVX512F__) && W == 16
TK v_f32 log_f32(v_f32 x) {{
  v_f32 h = __builtin_ia32_getmantps512_mask(x, 11, x, -1, 4), r = h - 1.0f, z = r * r;
  v_f32 e = (v_f32)__builtin_ia32_getexpps512_mask(x, x, -1, 4) - (v_f32)__builtin_ia32_getexpps512_mask(h, h, -1, 4);
  return e * 0x1.62e4p-1f + (e * 0x1.7f7d1cp-20f + ({polynomial('r', _LOG_NEAR)} * (r * z) + (z * -0.5f + r))); }}
#else
{_LOGARITHM["log_f32"]}
#endif""",
}


_SIN = (-0.166666552, 0.00833217707, -0.000195172121)
_COS = (0.0416666456, -0.00138873665, 2.443835e-05)
_ATAN = (-0.333331525, 0.199937716, -0.142110437, 0.106659584, -0.0755211487, 0.0432106778, -0.0163671952, 0.00292050838)
_ASIN = (0.166667536, 0.0749523267, 0.0454783365, 0.0241410341, 0.0422304645)
_ERFCX = (1.27697837, -0.0927637666, -0.166031003, 0.164049, -0.0542085841, -0.00800936669, 0.00864628796, 0.00116410258, -0.00124652614,
          -0.000251692807)                                        # e^(x^2) erfc(x) (1 + 2 x) over q = (x - 2) / (x + 2), 5.0e-9
_ERFINV_LOW = (1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06, -3.5233877e-06,
               3.43273939e-07, 2.81022636e-08)
_ERFINV_HIGH = (2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322, 0.000100950558, -0.000200214257)


_FAR = "7e4f"           # from here on j has too many bits for pi/2 in three parts of f32


def _circular(name: str, result: str) -> str:
    """sin, cos or tan: x = j pi/2 + r with |r| <= pi/4, pi/2 in three parts; `s`, `c` are the sine and cosine of r, `q` has the low bits of j. Beyond
    7e4 x and pi/2 in four parts are f64, whose products with j are exact with FMA and without; beyond 2^31 lanes ask the C library. A million
    arguments around 1e8 took 57.7 ms on one core with AVX2 by the C library, 4.8 so."""
    near = f"""\
v_f32 z = r * r, s = {polynomial('z', _SIN)} * z * r + r, c = {polynomial('z', _COS)} * (z * z) + (z * -0.5f + 1.0f);
  v_bool odd = (v_bool)-(q & 1);
  v_f32 y = {result};"""
    return f"""\
extern double {name}(double);
static __attribute__((noinline)) void far_{name}_f32(const v_f32 *far, v_f32 *all) {{
  v_f32 x = *far, a = abs_f32(x); v_f64 w = cast_f32_f64(a), t = w * 0x1.45f306dc9c883p-1 + 0x1.8p52, j = t - 0x1.8p52;
  w = w - j * 0x1.921fbp0; w = w - j * 0x1.5110bp-22; w = w - j * 0x1.184698p-44; w = w - j * 0x1.3198a2e037073p-69;
  v_f32 r = cast_f64_f32(w); v_u32 q = __builtin_convertvector((v_u64)t, v_u32);
  {near}
  *all = select_f32(a > {_FAR}, y, *all);
  for (int k = 0; k < W; k++) if (!(a[k] <= 0x1p31f)) (*all)[k] = (float){name}(x[k]); }}
TK v_f32 {name}_f32(v_f32 x) {{
  v_f32 a = abs_f32(x), t = a * 0x1.45f306p-1f + 0x1.8p23f, j = t - 0x1.8p23f;
#ifdef __FP_FAST_FMAF
  v_f32 zero = {{0}}, r = fma_f32(j, zero - 0x1.921fb6p0f, a); r = fma_f32(j, zero + 0x1.777a5cp-25f, r); r = fma_f32(j, zero + 0x1.ee59dap-50f, r);
#else
  v_f64 w = cast_f32_f64(j); v_f32 r = cast_f64_f32((cast_f32_f64(a) - w * 0x1.921fb544p0) - w * 0x1.0b4611a626331p-34);
#endif
  v_u32 q = (v_u32)t;
  {near}
  if (hany(a > {_FAR})) {{ v_f32 far = x, all = y; far_{name}_f32(&far, &all); y = all; }}
  return y; }}"""


_CIRCULAR = {
    "sin_f32": _circular("sin", "(v_f32)((v_u32)select_f32(odd, c, s) ^ (q & 2) << 30 ^ (v_u32)x & 0x80000000u)"),
    "cos_f32": _circular("cos", "(v_f32)((v_u32)select_f32(odd, s, c) ^ (q + 1 & 2) << 30)"),
    "tan_f32": _circular("tan", "(v_f32)((v_u32)(select_f32(odd, c, s) / select_f32(odd, s, c)) ^ (q & 1) << 31 ^ (v_u32)x & 0x80000000u)"),
    # above 1 the angle of 1 / x is taken from pi/2
    "atan_f32": f"""\
TK v_f32 atan_f32(v_f32 x) {{
  v_f32 a = abs_f32(x); v_bool big = a > 1.0f;
  v_f32 r = select_f32(big, 1.0f / a, a), z = r * r, y = {polynomial('z', _ATAN)} * z * r + r;
  return copysign_f32(select_f32(big, 0x1.921fb6p0f - y, y), x); }}""",
    "atan2_f32": f"""\
TK v_f32 atan2_f32(v_f32 y, v_f32 x) {{
  v_f32 a = abs_f32(y), b = abs_f32(x), inf = (v_f32){{0}} + __builtin_inff(); v_bool steep = a > b;
  v_f32 r = select_f32(steep, b, a) / select_f32(steep, a, b);
  r = select_f32((a == inf) & (b == inf), (v_f32){{0}} + 1.0f, select_f32((a == 0.0f) & (b == 0.0f), (v_f32){{0}}, r));
  v_f32 z = r * r, t = {polynomial('z', _ATAN)} * z * r + r;
  t = select_f32(steep, 0x1.921fb6p0f - t, t);
  t = select_f32((v_i32)x < 0, (0x1.921fb6p1f - t) - 0x1.777a5cp-24f, t);
  return copysign_f32(select_f32((x != x) | (y != y), x + y, t), y); }}""",
    # above 1/2: asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2))
    "asin_parts_f32": f"""\
TK v_f32 asin_parts_f32(v_f32 a, v_bool big) {{
  v_f32 z = select_f32(big, 0.5f - 0.5f * a, a * a), r = select_f32(big, sqrt_f32(z), a);
  return {polynomial('z', _ASIN)} * z * r + r; }}""",
    "asin_f32": "TK v_f32 asin_f32(v_f32 x) {\n  v_f32 a = abs_f32(x); v_bool big = a > 0.5f; v_f32 p = asin_parts_f32(a, big);\n"
                "  return copysign_f32(select_f32(big, 0x1.921fb6p0f - 2.0f * p, p), x); }",
    "acos_f32": "TK v_f32 acos_f32(v_f32 x) {\n  v_f32 a = abs_f32(x); v_bool big = a > 0.5f; v_f32 p = asin_parts_f32(a, big);\n"
                "  v_f32 high = select_f32((v_i32)x < 0, 0x1.921fb6p1f - 2.0f * p, 2.0f * p);\n"
                "  return select_f32(big, high, 0x1.921fb6p0f - (copysign_f32(p, x) + 0x1.777a5cp-25f)); }",
}

_HYPERBOLIC = {
    "sinh_f32": "TK v_f32 sinh_f32(v_f32 x) {\n  v_f32 a = abs_f32(x), e = expm1_f32(a), h = exp_f32(a - 1.0f) * 0x1.5bf0a8p0f;\n"
                "  return copysign_f32(select_f32(a > 20.0f, h, (e + e / (e + 1.0f)) * 0.5f), x); }",
    "cosh_f32": "TK v_f32 cosh_f32(v_f32 x) {\n  v_f32 a = abs_f32(x), e = exp_f32(a), h = exp_f32(a - 1.0f) * 0x1.5bf0a8p0f;\n"
                "  return select_f32(a > 20.0f, h, 0.5f * e + 0.5f / e); }",
    "asinh_f32": "TK v_f32 asinh_f32(v_f32 x) {\n  v_f32 a = abs_f32(x), s = a * a, y = log1p_f32(s / (1.0f + sqrt_f32(s + 1.0f)) + a);\n"
                 "  return copysign_f32(select_f32(a > 0x1p20f, log_f32(a) + 0x1.62e43p-1f, y), x); }",
    "acosh_f32": "TK v_f32 acosh_f32(v_f32 x) {\n  v_f32 t = x - 1.0f, y = log1p_f32(t + sqrt_f32(t * (x + 1.0f)));\n"
                 "  y = select_f32(x > 0x1p20f, log_f32(x) + 0x1.62e43p-1f, y);\n"
                 "  return select_f32(x < 1.0f, (v_f32){0} + __builtin_nanf(\"\"), y); }",
    "atanh_f32": "TK v_f32 atanh_f32(v_f32 x) { v_f32 a = abs_f32(x); return copysign_f32(0.5f * log1p_f32((a + a) / (1.0f - a)), x); }",
}

_ERROR = {
    # x^2 = h^2 + (x - h)(x + h) with h^2 exact: e^-x^2 keeps its relative accuracy
    "erfc_f32": f"""\
TK v_f32 erfc_f32(v_f32 x) {{
  v_f32 a = abs_f32(x), h = (v_f32)((v_u32)a & 0xfffff000u), q = (a - 2.0f) / (a + 2.0f), p = {polynomial('q', _ERFCX)};
  v_f32 y = exp_f32(-h * h) * exp_f32((h - a) * (h + a)) * (p / (2.0f * a + 1.0f));
  y = select_f32(a > 10.5f, (v_f32){{0}}, y);
  y = select_f32((v_i32)x < 0, 2.0f - y, y);
  return select_f32(a < 0.5f, 1.0f - erf_f32(x), y); }}""",
    "erfinv_f32": f"""\
TK v_f32 erfinv_f32(v_f32 x) {{
  v_f32 w = -log_f32((1.0f - x) * (1.0f + x)), a = w - 2.5f, b = sqrt_f32(w) - 3.0f; v_bool low = w < 5.0f;
  v_f32 y = select_f32(low, {polynomial('a', _ERFINV_LOW)}, {polynomial('b', _ERFINV_HIGH)}) * x;
  return select_f32(abs_f32(x) == 1.0f, x * __builtin_inff(), y); }}""",
}

_LOG2_WIDE = (2.8853900817900136, 0.9617966734154973, 0.5770835733636933, 0.41167329914115813, 0.3407211149549295)   # 2 log2(e) artanh(r) / r of r^2

_POWER = {
    # log2|x| and its product with y in f64, to 1e-11; what is left of 2^t once an even whole number is taken out needs only f32
    "pow_f32": f"""\
TK v_f32 pow_f32(v_f32 x, v_f32 y) {{
  v_f32 a = abs_f32(x), b = abs_f32(y), one = (v_f32){{0}} + 1.0f, inf = (v_f32){{0}} + __builtin_inff();
  v_i64 bits = (v_i64)cast_f32_f64(a), k = bits - 0x3fe6a09e667f3bcdl >> 52;
  v_f64 m = (v_f64)(bits - (k << 52)), q = (m - 1.0) / (m + 1.0), z = q * q;
  v_f64 l = {polynomial('z', _LOG2_WIDE, '')} * q + cast_i32_f64(cast_i64_i32(k)), t = cast_f32_f64(y) * l;
  v_f32 h = cast_f64_f32(t), j = h * 0.5f + 0x1.8000fep23f, n = (j - 0x1.8000fep23f) * 2.0f, s = (v_f32)((v_i32)j << 23);
  v_f32 r = cast_f64_f32(t - cast_f32_f64(n)) * 0x1.62e43p-1f, p = {polynomial('r', _EXP)} * s * s;
  p = select_f32(h > 128.5f, inf, p);
  p = (v_f32)(~(h < -151.0f) & (v_i32)p);
  v_bool edge = (a == 0.0f) | (a == inf), up = (a == inf) ^ (y < 0.0f), whole = (b >= 0x1p23f) | (round_f32(y) == y);
  p = select_f32(edge, (v_f32)(up & (v_i32)inf), p);
  p = select_f32((a == one) & (b == inf), one, p);
  v_i32 odd = -(__builtin_convertvector(select_f32(b < 0x1p24f, y, (v_f32){{0}}), v_i32) & 1) & whole;
  p = (v_f32)((v_u32)p ^ (v_u32)odd & (v_u32)x & 0x80000000u);
  p = select_f32((x < 0.0f) & ~whole & (a < inf) | (x != x) | (y != y), (v_f32){{0}} + __builtin_nanf(""), p);
  return select_f32((y == 0.0f) | (x == one), one, p); }}""",
}


def by_lanes(name: str, function: str, d: str, arity: int = 1, declare: str | None = None) -> str:
    """A function that asks a scalar one lane by lane: of the C library, unless `declare` replaces its declaration."""
    ctype = {"f32": "float", "f64": "double"}[d]
    names = "ab"[:arity]
    head = f"extern {ctype} {function}({', '.join([ctype] * arity)});\n" if declare is None else declare
    return (f"{head}TK v_{d} {name}_{d}({', '.join(f'v_{d} {k}' for k in names)}) {{\n"
            f"  v_{d} r; for (int k = 0; k < W; k++) r[k] = {function}({', '.join(f'{k}[k]' for k in names)}); return r; }}")


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    rest = {"lgamma_f32": by_lanes("lgamma", "lgammaf", "f32"), "digamma_f32": by_lanes("digamma", "digamma_lane", "f32", declare="")}
    rest |= {f"{n}_f32": by_lanes(n, n + "f", "f32", 2) for n in ("hypot",)}
    return exponentials(F32) | _EXP2 | _LOGARITHM | _RATIONAL | _SCALED | _POWER | _CIRCULAR | _HYPERBOLIC | _ERROR | rest
