"""C fragments: accesses under a mask, checked indices, integer helpers of addresses.

    loadg_D(p, stride, guard, other)  loadgu_D(p, guard, other)  loadgi_D(p, index, guard, other): lanes where guard is false are not read and are
    `other`
    storeg_D(p, stride, value, guard)  storegi_D(p, index, value, guard): only lanes where guard holds are written
    tk_index(i, bound, active, error, code)  tk_indices(...): i, clamped to 0 .. bound - 1; `code` is ORed into *error where an active one was outside
    tk_div tk_mod: rounding down, divisor positive      tk_min tk_max
    lanes_div lanes_mod: the same of i64 lanes, by a quotient in f64 and what it is off by      tk_lines: elements of whole cache lines
"""
from __future__ import annotations

from ..ir.dtype import ALL, DType
from .c_memory import GATHERS, MASKED, STORED, gathered, gathers, masks, register

_INTEGERS = {
    "tk_div": "TK int64_t tk_div(int64_t a, int64_t b) { int64_t q = a / b; return q - (a - q * b < 0); }",
    "tk_mod": "TK int64_t tk_mod(int64_t a, int64_t b) { int64_t r = a % b; return r < 0 ? r + b : r; }",
    "tk_min": "TK int64_t tk_min(int64_t a, int64_t b) { return a < b ? a : b; }",
    "tk_lines": "TK int64_t tk_lines(int64_t n) { return (n + 63) / 64 * 64; }",
    "tk_max": "TK int64_t tk_max(int64_t a, int64_t b) { return a > b ? a : b; }",
    "lanes_div": """\
TK v_i64 lanes_div(v_i64 a, int64_t b) {
  v_i64 q = __builtin_convertvector(__builtin_convertvector(a, v_f64) * (1.0 / b), v_i64), r = a - q * b;
  return q + (r < 0) - (r >= b); }""",
    "lanes_mod": "TK v_i64 lanes_mod(v_i64 a, int64_t b) { return a - lanes_div(a, b) * b; }",
    "tk_index": """\
TK int64_t tk_index(int64_t i, int64_t bound, int active, int64_t *error, int64_t code) {
  if (i >= 0 && i < bound) return i;
  if (active) *error |= code;
  return 0; }""",
    "tk_indices": """\
TK v_i64 tk_indices(v_i64 i, int64_t bound, v_bool active, int64_t *error, int64_t code) {
  v_i64 zero = {0};
  v_bool inside = ge_i64(i, zero) & lt_i64(i, splat_i64(bound));
  if (hany(active & ~inside)) *error |= code;
  return select_i64(inside, i, zero); }""",
}


def _unit(d: DType, raw: str) -> str:
    """The fragment for lanes that lie one behind the other: the machine's load under a mask where it has one."""
    v, head = register(d), f"TK {register(d)} loadgu_{d}(const {d.c} *p, v_bool guard, {register(d)} other) {{"
    slow = f"{head} return hall(guard) ? load_{d}(p) : loadg_{d}(p, 1, guard, other); }}"
    if raw not in MASKED:
        return slow
    call, size, element, feature = MASKED[raw]
    wide = f"typedef {element} q __attribute__((vector_size({size})));"
    load = f"__builtin_ia32_load{call}_mask((const void *)p, (q){'{0}' if d.name in STORED else 'other'}, (unsigned short)mask_of(guard))"
    value = f"select_{d}(guard, widen_{d}((v_{raw}){load}), other)" if d.name in STORED else f"({v}){load}"
    return f"{masks(feature)}{head}\n  {wide}\n  return {value}; }}\n#else\n{slow}\n#endif"


def _strided(d: DType, raw: str, lanes: int) -> str:
    """The fragment for lanes that lie a stride apart: every second element from two loads under a mask where the machine has them."""
    v = register(d)
    head = f"TK {v} loadg_{d}(const {d.c} *p, int64_t stride, v_bool guard, {v} other) {{"
    slow = f"{head} return loadgs_{d}(p, stride, guard, other); }}"
    if raw not in MASKED:
        return slow
    call, size, element, feature = MASKED[raw]
    part = lambda k: f"__builtin_ia32_load{call}_mask((const void *)(p + {k}), (q){{0}}, (unsigned short)(m >> {k}))"
    value = f"(v_{raw})__builtin_shufflevector({part(0)}, {part(lanes)}, {', '.join(str(2 * k) for k in range(lanes))})"
    value = f"widen_{d}({value})" if d.name in STORED else value
    return (f"{masks(feature)}{head}\n  typedef {element} q __attribute__((vector_size({size})));\n"
            f"  if (stride != 2) return loadgs_{d}(p, stride, guard, other);\n"
            f"  unsigned m = mask_of(guard) & 0xffff;\n"
            f"  m = (m | m << 8) & 0x00ff00ff; m = (m | m << 4) & 0x0f0f0f0f; m = (m | m << 2) & 0x33333333; m = (m | m << 1) & 0x55555555;\n"
            f"  return select_{d}(guard, {value}, other); }}\n#else\n{slow}\n#endif")


def _apart(v: str, name: str, head: str, vectors: dict[str, str], body: str) -> str:
    """A fragment whose body is a function of its own, called with pointers to its vectors (name -> type): what gcc 12 passes by value is read 64
    bytes off where a vector of 128 bytes follows one of 64 on the stack (16 lanes for AVX2). `v`: what it returns."""
    by_pointer = "".join(f", const {t} *{n}" for n, t in vectors.items())
    by_value = "".join(f", {t} {n}" for n, t in vectors.items())
    given = ", ".join((*(p.replace("*", " ").split()[-1] for p in head.split(", ")), *(f"&{n}" for n in vectors)))
    result, call = ("", f"{name}_apart({given});") if v == "void" else (f", {v} *r", f"{v} r; {name}_apart({given}, &r); return r;")
    return (f"static __attribute__((noinline)) void {name}_apart({head}{by_pointer}{result}) {{\n{body} }}\n"
            f"TK {v} {name}({head}{by_value}) {{ {call} }}")


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    out = dict(_INTEGERS)
    for d in ALL:
        raw = STORED.get(d.name, d.name)
        ctype, v = d.c, register(d)
        widen = f"widen_{d}(*(u_{raw} *)buf)" if d.name in STORED else f"*(u_{raw} *)buf"
        narrow = f"narrow_{d}(*v)" if d.name in STORED else "*v"
        read = lambda at: (f"  {ctype} buf[W] = {{0}};\n  for (int k = 0; k < W; k++) if ((*guard)[k]) buf[k] = p[{at}];\n"
                           f"  *r = select_{d}(*guard, {widen}, *other);")
        write = lambda at: (f"  {ctype} buf[W]; *(u_{raw} *)buf = {narrow};\n  for (int k = 0; k < W; k++) if ((*guard)[k]) p[{at}] = buf[k];")
        out[f"loadg_{d}"] = _strided(d, raw, lanes)
        out[f"loadgs_{d}"] = _apart(v, f"loadgs_{d}", f"const {ctype} *p, int64_t stride", {"guard": "v_bool", "other": v}, read("k * stride"))
        loop = _apart(v, f"loadgi_{d}", f"const {ctype} *p", {"index": "v_i64", "guard": "v_bool", "other": v}, read("(*index)[k]"))
        if gathers(d.name, lanes):
            loop = (f"{GATHERS}TK {v} loadgi_{d}(const {ctype} *p, v_i64 index, v_bool guard, {v} other) {{\n"
                    f"  {gathered(d.name, 'index', 'other', 'mask_of(guard)', lanes)} }}\n#else\n{loop}\n#endif")
        out[f"loadgi_{d}"] = loop
        out[f"loadgu_{d}"] = _unit(d, raw)
        out[f"storeg_{d}"] = _apart("void", f"storeg_{d}", f"{ctype} *p, int64_t stride", {"v": v, "guard": "v_bool"}, write("k * stride"))
        out[f"storegi_{d}"] = _apart("void", f"storegi_{d}", f"{ctype} *p", {"index": "v_i64", "v": v, "guard": "v_bool"}, write("(*index)[k]"))
    return out
