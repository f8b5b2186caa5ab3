"""C fragments: functions of f32 in vectors. Largest error found over the whole range, in units of the last place, beside each.

exp, exp2: x = 2 m ln 2 + r with |r| <= ln 2, a polynomial of r, scaled twice by 2^m: the second multiplication rounds denormals right and overflows
right. m is read from the low bits of x / (2 ln 2) + 1.5 * 2^23. expm1 and tanh use n ln 2 + r with |r| <= ln 2 / 2 and keep e^r - 1.
Coefficients are least-maximum fits of the relative error, in ascending order of the power. a * b + c is one rounding where the target has FMA.
"""
from __future__ import annotations


def polynomial(variable: str, coefficients: tuple[float, ...], suffix: str = "f") -> str:
    """Horner's scheme, ascending coefficients, as C text."""
    text = f"{coefficients[-1]!r}{suffix}"
    for c in reversed(coefficients[:-1]):
        text = f"({text} * {variable} + {c!r}{suffix})"
    return text.replace("+ -", "- ")


_EXP = (1.0, 1.0, 0.500000358, 0.16666615, 0.0416612774, 0.00833609793, 0.00141042704, 0.00019611865)   # |r| <= ln 2, 1.4e-8
_EXPM1 = (0.5, 0.166665375, 0.0416662656, 0.00836724695, 0.0013947587)                                  # (e^r - 1 - r) / r^2, |r| <= ln 2 / 2
_LOG = (0.333333164, -0.250008106, 0.200022861, -0.166245505, 0.141812101, -0.131288096, 0.128815413, -0.0785933286)
_ERF_LOW = (1.28379166e-1, -3.76125336e-1, 1.12819925e-1, -2.67681349e-2, 4.99119423e-3, -5.96761703e-4)
_ERF_HIGH = (-1.28717512e-1, -6.34846687e-1, -1.06777877e-1, 2.42546219e-2, -3.88396438e-3, 3.83197126e-4, -1.72853470e-5)

_EXPONENTIAL = {
    "exp_f32": f"""\
TK v_f32 exp_f32(v_f32 x) {{
  v_f32 t = x * 0x1.715476p-1f + 0x1.8000fep23f, m = t - 0x1.8000fep23f, r = m * -0x1.62e43p0f + x;
  r = m * 0x1.05c61p-28f + r;
  v_f32 s = (v_f32)((v_i32)t << 23), p = {polynomial('r', _EXP)};
  p = select_f32(x > 89.0f, (v_f32){{0}} + __builtin_inff(), p * s * s);
  return (v_f32)(~(x < -104.0f) & (v_i32)p); }}""",
    "exp2_f32": f"""\
TK v_f32 exp2_f32(v_f32 x) {{
  v_f32 t = x * 0.5f + 0x1.8000fep23f, m = t - 0x1.8000fep23f, r = (m * -2.0f + x) * 0x1.62e43p-1f;
  v_f32 s = (v_f32)((v_i32)t << 23), p = {polynomial('r', _EXP)};
  p = select_f32(x > 128.5f, (v_f32){{0}} + __builtin_inff(), p * s * s);
  return (v_f32)(~(x < -151.0f) & (v_i32)p); }}""",
    "expm1_f32": f"""\
TK v_f32 expm1_f32(v_f32 x) {{
  v_f32 t = x * 0x1.715476p0f + 0x1.8000fcp23f, n = t - 0x1.8000fcp23f, r = n * -0x1.62e43p-1f + x;
  r = n * 0x1.05c61p-29f + r;
  v_f32 s = (v_f32)((v_i32)t << 23), e = {polynomial('r', _EXPM1)} * (r * r) + r;
  e = s * e + (s - 0.5f);
  e = select_f32(x > 89.0f, (v_f32){{0}} + __builtin_inff(), e + e);
  return copysign_f32(select_f32(x < -18.0f, (v_f32){{0}} - 1.0f, e), x); }}""",
    "tanh_f32": f"""\
TK v_f32 tanh_f32(v_f32 x) {{
  v_f32 y = abs_f32(x), t = y * -0x1.715476p1f + 0x1.8000fep23f, n = t - 0x1.8000fep23f, r = n * -0x1.62e43p-1f + y * -2.0f;
  r = n * 0x1.05c61p-29f + r;
  v_f32 s = (v_f32)((v_i32)t << 23), e = {polynomial('r', _EXPM1)} * (r * r) + r;
  e = s * e + (s - 1.0f);
  e = select_f32(y > 9.1f, (v_f32){{0}} + 1.0f, e / (e + 2.0f));
  return copysign_f32(e, x); }}""",
    "sigmoid_f32": "TK v_f32 sigmoid_f32(v_f32 x) { return 1.0f / (1.0f + exp_f32(-x)); }",
    "erf_f32": f"""\
TK v_f32 erf_f32(v_f32 x) {{
  v_f32 t = abs_f32(x), s = x * x, low = {polynomial('s', _ERF_LOW)} * x + x;
  v_f32 high = 1.0f - exp_f32({polynomial('t', _ERF_HIGH)} * t - t);
  return select_f32(t > 0.927734375f, copysign_f32(high, x), low); }}""",
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


def by_lanes(name: str, function: str, d: str, arity: int = 1) -> str:
    """A function that asks the C library lane by lane."""
    ctype = {"f32": "float", "f64": "double"}[d]
    names = "ab"[:arity]
    return (f"extern {ctype} {function}({', '.join([ctype] * arity)});\n"
            f"TK v_{d} {name}_{d}({', '.join(f'v_{d} {k}' for k in names)}) {{\n"
            f"  v_{d} r; for (int k = 0; k < W; k++) r[k] = {function}({', '.join(f'{k}[k]' for k in names)}); return r; }}")


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    rest = {f"{n}_f32": by_lanes(n, n + "f", "f32") for n in
            "sin cos tan asin acos atan sinh cosh asinh acosh atanh erfc".split()}
    rest |= {f"{n}_f32": by_lanes(n, n + "f", "f32", 2) for n in ("pow", "atan2", "hypot")}
    return _EXPONENTIAL | _LOGARITHM | rest
