"""The operations of the language in C: `c_op` gives the text of one operation on registers; the rows of `ir.ops.OPS` that are no plain
C operator are functions NAME_D defined here, in `c_math` (f32) and in `c_math64` (f64).

Integer division reports a zero divisor: `floordiv_D(a, b, active, error, code)` ORs `code` into `*error` when a lane that is set in `active`
divides by zero (the result there is 0); it never traps. `truncdiv`, `mod` and `rem` on integers alike.
"""
from __future__ import annotations

from ..ir.dtype import ALL, BOOL, DType
from ..ir.ops import can_fail
from .c_memory import lane_list, register

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}

SIGN = {"f32": "0x80000000u", "f64": "0x8000000000000000u"}


def c_op(name: str, d: DType, args: list[str], active: str = "", error: str = "error", code: str = "1") -> str:
    """C text of operation `name` whose arguments (the condition of `where` aside) have type `d`. `args` are C text of registers.

    Where `can_fail(name, d)`, `active` is a mask of the lanes that count, `error` an int64_t pointer and `code` what is ORed into it."""
    if name in _INFIX and (d is not BOOL or name in ("and", "or", "xor")):
        return f"({args[0]} {_INFIX[name]} {args[1]})"
    if name == "neg":
        return f"(-{args[0]})"
    if name == "not":
        return f"(~{args[0]})"
    if name in COMPARE and d.bytes == 4 and d is not BOOL:
        return f"({args[0]} {COMPARE[name]} {args[1]})"
    if can_fail(name, d):
        return f"{name}_{d}({', '.join(args)}, {active}, {error}, {code})"
    if name == "where":
        return f"select_{d}({', '.join(args)})"
    return f"{name}_{d}({', '.join(args)})"


def _compare(name: str, sign: str, d: str, lanes: int) -> str:
    """A comparison as 32-bit masks. Masks of 64-bit lanes are made a machine register at a time: compilers compare wider ones lane by lane."""
    head = f"TK v_bool {name}_{d}(v_{d} a, v_{d} b) {{"
    if d in ("f32", "i32"):
        return f"{head} return a {sign} b; }}"
    if d not in ("f64", "i64"):
        return f"{head} return cast_{d}_i32(a) {sign} cast_{d}_i32(b); }}"
    ctype = {"f64": "double", "i64": "int64_t"}[d]
    parts = f"""\
  typedef {ctype} part __attribute__((vector_size(NATIVE)));
  typedef int64_t wide __attribute__((vector_size(NATIVE)));
  typedef int32_t half __attribute__((vector_size(NATIVE / 2)));
  union {{ v_{d} v; part p[W * 8 / NATIVE]; }} x = {{a}}, y = {{b}};"""
    made = lambda k: f"__builtin_convertvector((wide)(x.p[{k}] {sign} y.p[{k}]), half)"
    # two halves become one register in registers: stored one by one and loaded as a whole they wait for memory
    return f"""\
{head}
#if W * 8 == 2 * NATIVE
{parts}
  return __builtin_shufflevector({made(0)}, {made(1)}, {lane_list(lanes, "@")});
#elif W * 8 > NATIVE
{parts}
  union {{ v_bool v; half p[W * 8 / NATIVE]; }} r;
#pragma GCC unroll 16
  for (int k = 0; k < W * 8 / NATIVE; k++) r.p[k] = {made("k")};
  return r.v;
#else
  return __builtin_convertvector(a {sign} b, v_bool);
#endif
}}"""


def _splat(d: DType) -> str:
    """One number in all lanes. Registers of 64-bit lanes are filled a machine register at a time: compilers fill wider ones lane by lane."""
    v, c = register(d), {"bool": "int", "f16": "float", "bf16": "float"}.get(d.name, d.c)
    s = "-(s != 0)" if d is BOOL else "s"
    whole = f"return ({c})({s}) - ({v}){{0}}; }}"
    if d.bytes < 8:
        return f"TK {v} splat_{d}({c} s) {{ {whole}"
    return f"""\
TK {v} splat_{d}({c} s) {{
#if W * 8 > NATIVE
  typedef {c} part __attribute__((vector_size(NATIVE)));
  union {{ {v} v; part p[W * 8 / NATIVE]; }} r;
#pragma GCC unroll 16
  for (int k = 0; k < W * 8 / NATIVE; k++) r.p[k] = s - (part){{0}};
  return r.v; }}
#else
  {whole}
#endif"""


def _select(d: DType) -> str:
    """Lanes of a where the mask is set, else of b."""
    v = register(d)
    mask = {8: "v_u64", 4: "v_u32", 2: "v_u32", 1: "v_u8"}[d.bytes]
    if d is BOOL or d.bytes == 4 or d.is_half:
        mask, m = "v_u32", "(v_u32)c"
    elif d.name == "i16":
        mask, m = "v_u16", "(v_u16)cast_i32_i16(c)"
    elif d.bytes == 1:
        m = "(v_u8)cast_i32_i8(c)"
    else:
        m = "(v_u64)cast_i32_i64(c)"
    return f"TK {v} select_{d}(v_bool c, {v} a, {v} b) {{ {mask} m = {m}; return ({v})(m & ({mask})a | ~m & ({mask})b); }}"


def _basics(lanes: int) -> dict[str, str]:
    """Lane numbers, masks, broadcasts, selects, comparisons, minimum and maximum: for every type."""
    lane = lane_list(lanes, "@")
    out = {"iota": f"TK v_i64 iota(void) {{ return (v_i64){{{lane}}}; }}",
           "lanes": f"TK v_i32 lanes(void) {{ return (v_i32){{{lane}}}; }}",
           # x - base in every lane, at least -1 and at most end
           "lane_of": "TK v_i32 lane_of(int64_t x, int64_t base, int32_t end) {\n"
                      "  return (v_i32){0} + (int32_t)(x > base + end ? end : x < base - 1 ? -1 : x - base); }",
           # the power of two that brings a divisor of any size into the middle of the range
           "scale_f32": "TK v_f32 scale_f32(v_f32 x) { v_f32 a = abs_f32(x), one = (v_f32){0} + 1.0f;\n"
                        "  return select_f32(a < 0x1p-64f, one * 0x1p64f, select_f32(a > 0x1p64f, one * 0x1p-64f, one)); }",
           "lanes_below": f"TK v_bool lanes_below(int64_t n) {{ return (v_i32){{{lane}}} < (int32_t)n; }}"}
    for d in ALL:
        v = register(d)
        out[f"splat_{d}"] = _splat(d)
        out[f"select_{d}"] = _select(d)
        if d.is_half:
            continue
        for name, sign in COMPARE.items():
            if d is BOOL:      # true is -1: the order of masks is the other way round
                out[f"{name}_{d}"] = f"TK v_bool {name}_bool(v_bool a, v_bool b) {{ return b {sign} a; }}"
            else:
                out[f"{name}_{d}"] = _compare(name, sign, d.name, lanes)
        for name, sign, bits in (("min", "lt", "&"), ("max", "gt", "|")):
            if d is BOOL:
                body = f"a {bits} b"
            elif d.is_float:       # of two zeros the first, as torch's relu and clamp keep the sign of what they are given
                body = f"select_{d}({sign}_{d}(b, a) | ne_{d}(b, b), b, a)"
            else:
                body = f"select_{d}({sign}_{d}(a, b), a, b)"
            out[f"{name}_{d}"] = f"TK {v} {name}_{d}({v} a, {v} b) {{ return {body}; }}"
    return out


def _integers(d: DType) -> dict[str, str]:
    """What integers have beyond operators."""
    n, v, bits = d.name, f"v_{d}", d.bytes * 8
    signed = d.kind == "i"
    top = bits - 1 if signed else bits
    u = f"v_u{bits}"
    inside = f"a >> select_{n}(ok, k, ({v}){{0}} + {top})" if signed else f"select_{n}(ok, a >> select_{n}(ok, k, ({v}){{0}}), ({v}){{0}})"
    out = {
        "abs": f"TK {v} abs_{n}({v} a) {{ return {'select_' + n + '(lt_' + n + '(a, (' + v + '){0}), -a, a)' if signed else 'a'}; }}",
        "sign": f"TK {v} sign_{n}({v} a) {{ {v} zero = {{0}}; return cast_i32_{n}(gt_{n}(zero, a) - gt_{n}(a, zero)); }}".replace("cast_i32_i32", ""),
        "isnan": f"TK v_bool isnan_{n}({v} a) {{ return (v_bool){{0}}; }}",
        "isinf": f"TK v_bool isinf_{n}({v} a) {{ return (v_bool){{0}}; }}",
        "signbit": f"TK v_bool signbit_{n}({v} a) {{ return lt_{n}(a, ({v}){{0}}); }}",
        # counts are taken out of range before the shift, as C leaves that undefined
        "shl": f"TK {v} shl_{n}({v} a, {v} k) {{ v_bool ok = ge_{n}(k, ({v}){{0}}) & lt_{n}(k, ({v}){{0}} + {min(bits, 127)});\n"
               f"  return select_{n}(ok, ({v})(({u})a << ({u})select_{n}(ok, k, ({v}){{0}})), ({v}){{0}}); }}",
        "shr": f"TK {v} shr_{n}({v} a, {v} k) {{ v_bool ok = ge_{n}(k, ({v}){{0}}) & lt_{n}(k, ({v}){{0}} + {top});\n"
               f"  return {inside}; }}",
        "pow": f"""\
TK {v} pow_{n}({v} base, {v} e) {{
  {v} one = ({v}){{0}} + 1, r = one, square = base, left = e;
  while (hany(gt_{n}(left, ({v}){{0}}))) {{
    r *= select_{n}(eq_{n}(left & 1, one), square, one);
    square *= square; left = select_{n}(gt_{n}(left, ({v}){{0}}), left >> 1, ({v}){{0}}); }}
  {v} odd = e & 1, inverse = select_{n}(eq_{n}(base, one), one, select_{n}(eq_{n}(base, -one), one - 2 * odd, ({v}){{0}}));
  return select_{n}(lt_{n}(e, ({v}){{0}}), inverse, r); }}""",
    }
    return {f"{k}_{n}": text for k, text in out.items()} | _division(n)


def _division(n: str) -> dict[str, str]:
    """Integer division without traps. Up to 32 bits the quotient of doubles, truncated, is exact; 64 bits divide lane by lane."""
    v, parameters, rest = f"v_{n}", "v_bool active, int64_t *error, int64_t code", "active, error, code"
    if n == "i64":
        quotient = "TK v_i64 quotient_i64(v_i64 a, v_i64 b) { return a / b; }"
    elif n == "i32":
        quotient = "TK v_i32 quotient_i32(v_i32 a, v_i32 b) { return cast_f64_i32(cast_i32_f64(a) / cast_i32_f64(b)); }"
    else:
        quotient = f"TK {v} quotient_{n}({v} a, {v} b) {{ return cast_f32_{n}(cast_{n}_f32(a) / cast_{n}_f32(b)); }}"
    minus = f"v_bool minus = eq_{n}(b, ({v}){{0}} - 1);" if n != "u8" else "v_bool minus = {0};"
    out = {
        f"quotient_{n}": quotient,
        # a / -1 is -a, which wraps where the division would trap
        f"truncdiv_{n}": f"""\
TK {v} truncdiv_{n}({v} a, {v} b, {parameters}) {{
  {v} zero = {{0}}; v_bool bad = eq_{n}(b, zero); {minus}
  if (hany(bad & active)) *error |= code;
  {v} q = quotient_{n}(a, select_{n}(bad | minus, zero + 1, b));
  return select_{n}(bad, zero, select_{n}(minus, -a, q)); }}""",
        f"rem_{n}": f"TK {v} rem_{n}({v} a, {v} b, {parameters}) {{\n  {v} r = a - truncdiv_{n}(a, b, {rest}) * b;\n"
                    f"  return select_{n}(eq_{n}(b, ({v}){{0}}), ({v}){{0}}, r); }}",
        f"mod_{n}": f"TK {v} mod_{n}({v} a, {v} b, {parameters}) {{\n  {v} zero = {{0}}, r = rem_{n}(a, b, {rest});\n"
                    f"  return select_{n}(ne_{n}(r, zero) & (lt_{n}(r, zero) ^ lt_{n}(b, zero)), r + b, r); }}",
        f"floordiv_{n}": f"TK {v} floordiv_{n}({v} a, {v} b, {parameters}) {{\n  {v} zero = {{0}}, q = truncdiv_{n}(a, b, {rest}), r = a - q * b;\n"
                         f"  return select_{n}(ne_{n}(b, zero) & ne_{n}(r, zero) & (lt_{n}(r, zero) ^ lt_{n}(b, zero)), q - 1, q); }}",
    }
    return out


def _fused(n: str, lane: str) -> str:
    """a * b + c in one rounding, whatever the compiler is told of products that are added to something. A v_f64 is two of the machine's registers."""
    v, single = f"v_{n}", n == "f32"

    def by(instruction: str) -> str:
        if single:
            return f"TK {v} fma_{n}({v} a, {v} b, {v} c) {{ return {instruction.format('a, b, c')}; }}"
        return (f"TK {v} fma_{n}({v} a, {v} b, {v} c) {{\n  union {{ {v} v; h_f64 h[2]; }} x = {{a}}, y = {{b}}, z = {{c}};\n"
                f"  for (int k = 0; k < 2; k++) z.h[k] = {instruction.format('x.h[k], y.h[k], z.h[k]')};\n  return z.v; }}")
    kind = "ps" if single else "pd"
    return f"""\
#if !defined(__clang__) && defined(__AVX512F__) && W == 16
{by(f'__builtin_ia32_vfmadd{kind}512_mask({{}}, -1, 4)')}
#elif !defined(__clang__) && defined(__FMA__) && W == 8
{by(f'__builtin_ia32_vfmadd{kind}256({{}})')}
#elif !defined(__clang__) && defined(__FMA__) && W == 4
{by(f'__builtin_ia32_vfmadd{kind}({{}})')}
#else
TK {v} fma_{n}({v} a, {v} b, {v} c) {{ {v} r; for (int k = 0; k < W; k++) r[k] = {lane}(a[k], b[k], c[k]); return r; }}
#endif"""


def _floats(n: str) -> dict[str, str]:
    """What both floating types have: bits, rounding, division with remainder."""
    v, i, u = f"v_{n}", {"f32": "v_i32", "f64": "v_i64"}[n], {"f32": "v_u32", "f64": "v_u64"}[n]
    sign, whole, ctype, suffix = SIGN[n], {"f32": "0x1p23f", "f64": "0x1p52"}[n], {"f32": "float", "f64": "double"}[n], {"f32": "f", "f64": ""}[n]
    inf = {"f32": "0x7f800000", "f64": "0x7ff0000000000000"}[n]
    zero, one, near = f"({v}){{0}}", f"({v}){{0}} + 1", {"f32": "0x1p22f", "f64": "0x1p51"}[n]
    call = {k: f"{k}{suffix}" for k in ("fmod", "nextafter", "__builtin_fma")}
    out = {
        "fma": _fused(n, call["__builtin_fma"]),
        "neg": f"TK {v} neg_{n}({v} a) {{ return -a; }}",
        "abs": f"TK {v} abs_{n}({v} a) {{ return ({v})(({u})a & ~({u}){{0}} >> 1); }}",
        "copysign": f"TK {v} copysign_{n}({v} a, {v} b) {{ {u} s = ({u}){{0}} + {sign}; return ({v})(({u})a & ~s | ({u})b & s); }}",
        "fmin": f"TK {v} fmin_{n}({v} a, {v} b) {{ return select_{n}(le_{n}(a, b) | ne_{n}(b, b), a, b); }}",
        "fmax": f"TK {v} fmax_{n}({v} a, {v} b) {{ return select_{n}(ge_{n}(a, b) | ne_{n}(b, b), a, b); }}",
        # the machine's own extremes, which drop a NaN in a: folds that watch for NaN apart use them
        "top": f"TK {v} top_{n}({v} a, {v} b) {{ {v} r; for (int k = 0; k < W; k++) r[k] = a[k] > b[k] ? a[k] : b[k]; return r; }}",
        "low": f"TK {v} low_{n}({v} a, {v} b) {{ {v} r; for (int k = 0; k < W; k++) r[k] = a[k] < b[k] ? a[k] : b[k]; return r; }}",
        "tf32": f"TK {v} tf32_{n}({v} a) {{ return a; }}" if n == "f64" else
                f"TK {v} tf32_{n}({v} a) {{\n  {u} b = ({u})a, r = (b + 0xfff + (b >> 13 & 1)) & ~0x1fffu;\n"
                f"  {i} m = ({i})abs_{n}(a), x = ({i}){{0}} + {inf};\n  return select_{n}(lt_{i[2:]}(m, x), ({v})r, a); }}",
        "recip": f"TK {v} recip_{n}({v} a) {{ return 1 / a; }}",
        "rsqrt": f"TK {v} rsqrt_{n}({v} a) {{ return 1 / sqrt_{n}(a); }}",
        "sign": f"TK {v} sign_{n}({v} a) {{ return select_{n}(gt_{n}(a, {zero}), {one}, select_{n}(lt_{n}(a, {zero}), -({one}), {zero})); }}",
        "isnan": f"TK v_bool isnan_{n}({v} a) {{ return ne_{n}(a, a); }}",
        "isinf": f"TK v_bool isinf_{n}({v} a) {{ {i} m = ({i})abs_{n}(a), x = ({i}){{0}} + {inf}; return eq_{i[2:]}(m, x); }}",
        "signbit": f"TK v_bool signbit_{n}({v} a) {{ return lt_{i[2:]}(({i})a, ({i}){{0}}); }}",
        # adding and taking away 2^23 (2^52) rounds to a whole number, half to even; larger numbers are whole already
        "round": f"TK {v} round_{n}({v} a) {{\n  {v} m = abs_{n}(a), r = m + {whole}; r -= {whole};\n"
                 f"  return copysign_{n}(select_{n}(lt_{n}(m, {zero} + {whole}), r, m), a); }}",
        "trunc": f"TK {v} trunc_{n}({v} a) {{\n  {v} m = abs_{n}(a), r = abs_{n}(round_{n}(a));\n"
                 f"  return copysign_{n}(select_{n}(gt_{n}(r, m), r - 1, r), a); }}",
        "floor": f"TK {v} floor_{n}({v} a) {{ {v} r = round_{n}(a); return copysign_{n}(select_{n}(gt_{n}(r, a), r - 1, r), a); }}",
        "ceil": f"TK {v} ceil_{n}({v} a) {{ {v} r = round_{n}(a); return copysign_{n}(select_{n}(lt_{n}(r, a), r + 1, r), a); }}",
        # a quotient that rounds is at most one too large, which shows in the sign of a - q b, one rounding with FMA; others ask the C library
        "rem": f"""\
extern {ctype} {call['fmod']}({ctype}, {ctype});
static __attribute__((noinline)) void far_rem_{n}(const {v} *a, const {v} *b, {v} *r) {{
  for (int k = 0; k < W; k++) (*r)[k] = {call['fmod']}((*a)[k], (*b)[k]); }}
TK {v} rem_{n}({v} a, {v} b) {{
  {v} r, w = a / b, c = abs_{n}(b);
#ifdef __FP_FAST_FMA{suffix.upper()}
  v_bool near = lt_{n}(abs_{n}(w), {zero} + {near}) & lt_{n}(c, {zero} + __builtin_inf{suffix}());
  if (hall(near)) {{
    {v} q = trunc_{n}(w); r = fma_{n}(-q, b, a);
    return copysign_{n}(select_{n}(ne_{n}(r, {zero}) & (signbit_{n}(r) ^ signbit_{n}(a)), c - abs_{n}(r), r), a); }}
#endif
  far_rem_{n}(&a, &b, &r); return r; }}""",
        "mod": f"TK {v} mod_{n}({v} a, {v} b) {{\n  {v} zero = {{0}}, r = rem_{n}(a, b);\n"
               f"  return select_{n}(ne_{n}(r, zero) & (lt_{n}(r, zero) ^ lt_{n}(b, zero)), r + b, r); }}",
        # what is left after the remainder divides exactly but for rounding, hence the correction by a half
        "floordiv": f"""\
TK {v} floordiv_{n}({v} a, {v} b) {{
  {v} zero = {{0}}, m = rem_{n}(a, b), q = (a - m) / b;
  q = select_{n}(ne_{n}(m, zero) & (lt_{n}(b, zero) ^ lt_{n}(m, zero)), q - 1, q);
  {v} f = floor_{n}(q);
  f = select_{n}(gt_{n}(q - f, zero + 0.5), f + 1, f);
  f = select_{n}(eq_{n}(q, zero), copysign_{n}(zero, a / b), f);
  return select_{n}(eq_{n}(b, zero), a / b, f); }}""",
        "nextafter": f"extern {ctype} {call['nextafter']}({ctype}, {ctype});\n"
                     f"TK {v} nextafter_{n}({v} a, {v} b) {{ {v} r; for (int k = 0; k < W; k++) r[k] = {call['nextafter']}(a[k], b[k]); return r; }}",
    }
    return {f"{k}_{n}": text for k, text in out.items()}


def _square_root(lanes: int) -> dict[str, str]:
    """Compilers turn a square root in every lane into the machine's instruction."""
    return {f"sqrt_{n}": f"TK v_{n} sqrt_{n}(v_{n} a) {{ return (v_{n}){{{lane_list(lanes, f'{f}(a[@])')}}}; }}"
            for n, f in (("f32", "__builtin_sqrtf"), ("f64", "__builtin_sqrt"))}


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    out = _basics(lanes)
    for d in ALL:
        if d.is_int:
            out.update(_integers(d))
    for name in ("f32", "f64"):
        out.update(_floats(name))
    return out | _square_root(lanes)
