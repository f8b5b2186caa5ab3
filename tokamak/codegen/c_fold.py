"""C fragments: folds across the lanes of a register, prefixes within it, and transposing W registers.

    hsum_D hprod_D hmax_D hmin_D -> a scalar of D's register element      hany hall -> 1 or 0      mask_of(v_bool) -> a bit for each lane
    scansum_D scanprod_D scanmax_D scanmin_D -> inclusive prefixes
    hlogsumexp_D scanlogsumexp_D logaddexp_D for floating types      logaddexp -> double
    lower_half upper_half -> the halves of a v_f32 as h_f64      hsum_halves -> double      join_halves -> v_f32
    transpose_32(v_f32 *rows) transpose_64(v_f64 *rows) -> W rows of W lanes in place
    hargmax_D(value, index) -> int64_t      argmax_take_D(va, ia, vb, ib) -> lanes where b replaces a    (argmin alike)

Lanes meet in a fixed order: lane k with lane k + W/2, then W/4 and so on. Maximum and minimum are NaN if any lane is.
"""
from __future__ import annotations

from ..ir.dtype import ALL, DType
from .c_memory import lane_list

_TYPES = {"i32": "int32_t", "i64": "int64_t", "u8": "uint8_t", "i8": "int8_t", "i16": "int16_t", "f32": "float", "f64": "double"}


def _halving(combine: str, lanes: int) -> str:
    """Statements that fold register v into its lane 0; `combine` is C text of @a and @b."""
    out, step = [], lanes // 2
    while step:
        order = ", ".join(str((k + step) % lanes) for k in range(lanes))
        out.append("v = " + combine.replace("@b", f"__builtin_shufflevector(v, v, {order})").replace("@a", "v") + ";")
        step //= 2
    return " ".join(out)


def _shrinking(ctype: str, sign: str, lanes: int) -> str:
    """Statements that fold register `v` by an operator of C, in registers half as wide each time; ends in the return."""
    out, at, width = [], "v", lanes // 2
    while width > 1:
        low, high = (", ".join(map(str, range(first, first + width))) for first in (0, width))
        out.append(f"typedef {ctype} q{width} __attribute__((vector_size({width} * sizeof({ctype})))); "
                   f"q{width} h{width} = __builtin_shufflevector({at}, {at}, {low}) {sign} __builtin_shufflevector({at}, {at}, {high});")
        at, width = f"h{width}", width // 2
    return "\n  ".join([*out, f"return {at}[0] {sign} {at}[1];"])


def _prefix(n: str, combine: str, neutral: str, lanes: int) -> str:
    """Statements that make register `v` its inclusive prefixes."""
    out, step = [f"v_{n} e = (v_{n}){{0}} + {neutral};"], 1
    while step < lanes:
        order = ", ".join(str(k - step if k >= step else lanes) for k in range(lanes))
        out.append(f"v = {combine.replace('@a', f'__builtin_shufflevector(v, e, {order})').replace('@b', 'v')};")
        step *= 2
    return " ".join(out)


# equal infinities: their difference is NaN, their maximum is the answer
_LOGADDEXP = """\
TK v_D logaddexp_D(v_D a, v_D b) {
  v_D m = max_D(a, b), y = m + log1p_D(exp_D(-abs_D(a - b)));
  return select_D(isinf_D(m) | isnan_D(m), m, y); }"""


# the same of two numbers: infinities may be equal, NaN stays
_LOGADDEXP_ONE = """\
extern double exp(double), log1p(double);
TK double logaddexp(double a, double b) {
  double m = a > b ? a : b, n = a > b ? b : a, d = n - m;
  if (a != a || b != b) return a + b;
  return d != d ? m : m + log1p(exp(d)); }"""


def _limits(d: DType, largest: bool) -> str:
    if d.is_float:
        return "__builtin_inf()" if largest else "-__builtin_inf()"
    bits = d.bytes * 8
    if d.kind == "u":
        return str(2**bits - 1) if largest else "0"
    top = 2 ** (bits - 1) - 1
    return f"{top}" if largest else f"(-{top} - 1)"


def _folds(d: DType, lanes: int) -> dict[str, str]:
    n, ctype = d.name, _TYPES[d.name]
    f = "f" if n == "f32" else ""
    neutral = {"sum": "0", "prod": "1", "max": _limits(d, False).replace("inf()", f"inf{f}()"), "min": _limits(d, True).replace("inf()", f"inf{f}()")}
    combine = {"sum": "@a + @b", "prod": "@a * @b", "max": f"max_{n}(@b, @a)", "min": f"min_{n}(@b, @a)"}
    out = {}
    if d.is_float:
        neutral["logsumexp"], combine["logsumexp"] = neutral["max"], f"logaddexp_{n}(@a, @b)"
        out[f"logaddexp_{n}"] = _LOGADDEXP.replace("D", n)
    for m, text in combine.items():
        sign = {"sum": "+", "prod": "*"}.get(m, "") if d.is_float else ""
        fold = _shrinking(ctype, sign, lanes) if sign else f"{_halving(text, lanes)} return v[0];"
        out[f"h{m}_{n}"] = f"TK {ctype} h{m}_{n}(v_{n} v) {{\n  {fold} }}"
        out[f"scan{m}_{n}"] = f"TK v_{n} scan{m}_{n}(v_{n} v) {{ {_prefix(n, text, neutral[m], lanes)} return v; }}"
    for m, better in (("argmax", "gt"), ("argmin", "lt")):
        nan = f" | (ne_{n}(vb, vb) & eq_{n}(va, va))" if d.is_float else ""
        same = f"(eq_{n}(va, vb) | (ne_{n}(va, va) & ne_{n}(vb, vb)))" if d.is_float else f"eq_{n}(va, vb)"
        take = f"{m}_take_{n}"
        out[take] = (f"TK v_bool {take}(v_{n} va, v_i64 ia, v_{n} vb, v_i64 ib) {{\n"
                     f"  return {better}_{n}(vb, va){nan} | ({same} & lt_i64(ib, ia)); }}")
        nans = f" | (ne_{n}(v, v) & ne_{n}(top, top))" if d.is_float else ""
        out[f"h{m}_{n}"] = (f"TK int64_t h{m}_{n}(v_{n} v, v_i64 i) {{\n  v_{n} top = splat_{n}(h{m[3:]}_{n}(v));\n"
                            f"  return hmin_i64(select_i64(eq_{n}(v, top){nans}, i, splat_i64(9223372036854775807))); }}")
    return out


def _transpose(name: str, v: str, bits: int, lanes: int) -> str:
    """Rows at distance 1, 2, 4 ... exchange the lanes that differ in that bit of row and lane. Registers that compilers do not shuffle in one
    piece (beyond 512 bits) go through memory."""
    group = 128 // bits
    if lanes < group or lanes * bits > 512:
        ctype = v.replace("v_f32", "float").replace("v_f64", "double")
        cells = lane_list(lanes, "cell[@][k]")
        return (f"TK void {name}({v} *r) {{\n  {ctype} cell[W][W]; __builtin_memcpy(cell, r, sizeof cell);\n"
                f"  for (int k = 0; k < W; k++) r[k] = ({v}){{{cells}}}; }}")
    out = [f"TK void {name}({v} *r) {{\n  {v} a, b;"]

    def exchange(i: int, j: int, low: list[int], high: list[int]) -> None:
        out.append(f"a = r[{i}]; b = r[{j}]; r[{i}] = __builtin_shufflevector(a, b, {', '.join(map(str, low))}); "
                   f"r[{j}] = __builtin_shufflevector(a, b, {', '.join(map(str, high))});")
    step = 1
    while step < lanes:
        for i in range(lanes):
            if not i & step:
                lane = range(lanes)
                exchange(i, i | step, [k if not k & step else k - step + lanes for k in lane],
                         [k + step if not k & step else k + lanes for k in lane])
        step *= 2
    return "\n  ".join(out) + " }"


def _wide_sums(lanes: int) -> dict[str, str]:
    """Sums of f32 registers in f64, in two halves: a register wider than the machine's lives in memory."""
    half = lanes // 2
    low, high, both = (", ".join(map(str, lane)) for lane in (range(half), range(half, lanes), range(lanes)))
    narrow = "typedef float q __attribute__((vector_size(W * 2)));"
    fold = _shrinking("double", "+", half) if half > 1 else "return v[0];"
    return {"lower_half": f"TK h_f64 lower_half(v_f32 v) {{ return __builtin_convertvector(__builtin_shufflevector(v, v, {low}), h_f64); }}",
            "upper_half": f"TK h_f64 upper_half(v_f32 v) {{ return __builtin_convertvector(__builtin_shufflevector(v, v, {high}), h_f64); }}",
            "hsum_halves": f"TK double hsum_halves(h_f64 a, h_f64 b) {{ h_f64 v = a + b;\n  {fold} }}",
            "join_halves": f"TK v_f32 join_halves(h_f64 a, h_f64 b) {{ {narrow}\n"
                           f"  return __builtin_shufflevector(__builtin_convertvector(a, q), __builtin_convertvector(b, q), {both}); }}"}


_TESTED = "!defined(__clang__) && defined(__AVX512F__) && W == 16"         # where one instruction tests all lanes


def _lanes_meet(name: str, tested: str, halving: str) -> str:
    """The fragment that says whether any lane, or every one, is set."""
    return f"#if {_TESTED}\nTK int {name}(v_bool v) {{ return {tested}; }}\n#else\nTK int {name}(v_bool v) {{ {halving} return v[0] != 0; }}\n#endif"


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    out = _wide_sums(lanes) | {
        "logaddexp": _LOGADDEXP_ONE,
        "transpose_32": _transpose("transpose_32", "v_f32", 32, lanes), "transpose_64": _transpose("transpose_64", "v_f64", 64, lanes),
        # a number with a bit for each lane that is set
        "mask_of": f"#if {_TESTED}\nTK unsigned mask_of(v_bool v) {{ return (unsigned short)__builtin_ia32_ptestmd512(v, v, -1); }}\n#else\n"
                   f"TK unsigned mask_of(v_bool v) {{ unsigned m = 0; for (int k = 0; k < W; k++) m |= (v[k] & 1u) << k; return m; }}\n#endif",
        "hany": _lanes_meet("hany", "mask_of(v) != 0", _halving('@a | @b', lanes)),
        "hall": _lanes_meet("hall", "mask_of(v) == 0xffff", _halving('@a & @b', lanes))}
    for d in ALL:
        if d.name in _TYPES:
            out.update(_folds(d, lanes))
    return out
