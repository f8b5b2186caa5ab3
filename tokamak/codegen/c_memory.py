"""C fragments: reading and writing memory, whole vectors, first lanes, strided, gathered; conversion between storage and registers.

A value of the language lives in a register of W lanes: `v_f32` and so on; bool as 32-bit masks (0 or -1); f16 and bf16 as the f32 that they are.
In memory bool is a byte 0 or 1, f16 and bf16 are uint16_t. Fragments (D is a type's name, p points to storage, n with 0 < n < W counts lanes):

    load_D(p)  loadn_D(p, n)  loads_D(p, stride)  loadsn_D(p, stride, n)  loadi_D(p, index)  loadin_D(p, index, n)  loadb_D(p)
    loada_D(p, start, turn)  loadan_D(p, start, turn, n)  loadw_D(p, index)  loadwn_D(p, index, n)
    store_D(p, v)  storen_D(p, v, n)  stores_D(p, stride, v)  storesn_D(p, stride, v, n)  storei_D(p, index, v)
    storein_D(p, index, v, n)  store1_D(p, v)

Strides and indices count elements. `loada` reads from p[start] on, and from p[0] again behind `turn` elements; `loadw` reads what `loadi` does,
faster where lanes are near each other. Lanes from n on are neither read nor written, and are 0 when loaded (by `loadwn`: anything). A scatter
writes its lanes in order.
"""
from __future__ import annotations

from ..ir.dtype import ALL, DType

RAW = {"u8": "uint8_t", "i8": "int8_t", "u16": "uint16_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t", "f32": "float", "f64": "double"}
"""What memory holds: name of the raw register -> element type."""

RAW_BYTES = {"u8": 1, "i8": 1, "u16": 2, "i16": 2, "i32": 4, "i64": 8, "f32": 4, "f64": 8}

STORED = {"bool": "u8", "f16": "u16", "bf16": "u16"}
"""Types whose memory and register forms differ -> the raw form. `widen_D` and `narrow_D` convert."""


def register(d: DType | str) -> str:
    """The C type of a register that holds `d`."""
    name = str(d)
    return "v_f32" if name in ("f16", "bf16") else f"v_{name}"


def number(text: str) -> str:
    """C text of a literal (`scope.literal`): those that are no token of C are written out."""
    named = {"inf": "__builtin_inf()", "-inf": "-__builtin_inf()", "nan": "__builtin_nan(\"\")", str(-(2**63)): "(-9223372036854775807 - 1)"}
    return named.get(text, text)


def lane_list(lanes: int, text: str) -> str:
    """`text` for every lane, `@` standing for the lane's number."""
    return ", ".join(text.replace("@", str(k)) for k in range(lanes))


# raw register -> what the mask instructions of gcc call it, bytes of the register, what they take for elements, the feature they belong to
MASKED = {"u8": ("dquqi128", 16, "char", "__AVX512VL__"), "i8": ("dquqi128", 16, "char", "__AVX512VL__"),
           "u16": ("dquhi256", 32, "short", "__AVX512VL__"), "i16": ("dquhi256", 32, "short", "__AVX512VL__"),
           "i32": ("dqusi512", 64, "int", "__AVX512F__"), "f32": ("ups512", 64, "float", "__AVX512F__")}


# raw register -> what the instruction that gathers eight elements is called (gcc), bytes of what it gathers, what it takes for elements
GATHERED = {"f32": ("gatherdiv16sf", 32, "float"), "i32": ("gatherdiv16si", 32, "int"),
            "f64": ("gatherdiv8df", 64, "double"), "i64": ("gatherdiv8di", 64, "long long")}
GATHERS = "#if !defined(__clang__) && defined(__AVX512F__)\n"       # where it is


def gathers(name: str, lanes: int) -> bool:
    """Are registers of `name` whole numbers of what the machine gathers at once?"""
    return name in GATHERED and lanes in (8, 16)


def gathered(name: str, index: str, other: str, mask: str, lanes: int) -> str:
    """Statements that return the elements of `p` at the lanes of register `index`, those of `other` where `mask`, a number, has no bit."""
    call, size, element = GATHERED[name]
    part = lambda k: f"__builtin_ia32_{call}(r.p[{k}], (void *)p, i.p[{k}], (char)(m >> {8 * k}), {8 if size == 64 else 4})"
    made = part(0) if lanes == 8 else f"__builtin_shufflevector({part(0)}, {part(1)}, {lane_list(lanes, '@')})"
    if size == 64 and lanes == 16:
        made = "r.v"
    sets = " ".join(f"r.p[{k}] = {part(k)};" for k in range(2)) if made == "r.v" else ""
    return (f"typedef {element} q __attribute__((vector_size({size}))); typedef long long at __attribute__((vector_size(64)));\n"
            f"  union {{ v_i64 v; at p[W / 8]; }} i = {{{index}}}; union {{ v_{name} v; q p[W / 8]; }} r = {{{other}}}; const unsigned m = {mask};\n"
            f"  {sets} return (v_{name}){made};")


def masks(feature: str) -> str:
    """Where accesses under a mask of one bit a lane are."""
    return f"#if !defined(__clang__) && defined({feature}) && defined(__AVX512BW__) && W == 16\n"


def _masked(name: str, ctype: str, load: str, store: str) -> dict[str, str]:
    """The fragments for the first lanes: the machine's accesses under a mask where it has them, else `load` and `store`."""
    v = f"v_{name}"
    if name not in MASKED:
        return {f"loadn_{name}": load, f"storen_{name}": store}
    call, size, element, feature = MASKED[name]
    wide = f"typedef {element} q __attribute__((vector_size({size})));"
    test = masks(feature)
    mask = "(unsigned short)((1u << n) - 1)"
    return {f"loadn_{name}": f"{test}TK {v} loadn_{name}(const {ctype} *p, int64_t n) {{\n"
                             f"  {wide}\n  return ({v})__builtin_ia32_load{call}_mask((const void *)p, (q){{0}}, {mask}); }}\n#else\n{load}\n#endif",
            f"storen_{name}": f"{test}TK void storen_{name}({ctype} *p, {v} v, int64_t n) {{\n"
                              f"  {wide}\n  __builtin_ia32_store{call}_mask((void *)p, (q)v, {mask}); }}\n#else\n{store}\n#endif"}


def _gather(name: str, head: str, mask: str, otherwise: str, lanes: int) -> str:
    """The fragment that begins with `head`: the machine's gather of the lanes in `mask` where it has one, else the statements `otherwise`."""
    slow = f"{head} {{\n  {otherwise} }}"
    if not gathers(name, lanes):
        return slow
    return f"{GATHERS}{head} {{\n  {gathered(name, 'index', f'(v_{name}){{0}}', mask, lanes)} }}\n#else\n{slow}\n#endif"


def _window(name: str, ctype: str, first: bool) -> str:
    """The fragment for gathered lanes that mostly lie within two registers (a picture resized, a border reflected): where they do, loads and a
    permutation. `first`: of the first n lanes. 16 lanes from L1: gathered 6.4 ns, so 2.5."""
    v, n, tail = f"v_{name}", ", int64_t n" if first else "", ", n" if first else ""
    head = f"TK {v} loadw{'n' if first else ''}_{name}(const {ctype} *p, v_i64 index{n}) {{"
    slow = f"return loadi{'n' if first else ''}_{name}(p, index{tail});"
    if name not in MASKED or RAW_BYTES[name] != 4:
        return f"{head} {slow} }}"
    call, size, element, feature = MASKED[name]
    load = lambda at, mask: f"({v})__builtin_ia32_load{call}_mask((const void *)({at}), (q){{0}}, (unsigned short)({mask}))"
    outside = " | ".join(f"(unsigned char)__builtin_ia32_ucmpq512_mask(i.p[{k}], (at){{0}} + far, 6, -1) << {8 * k}" for k in range(2))
    return (f"{masks(feature)}{head}\n  typedef {element} q __attribute__((vector_size({size}))); "
            f"typedef long long at __attribute__((vector_size(64)));\n"
            f"  int64_t a = index[0], b = index[{'n - 1' if first else 'W - 1'}], low = a < b ? a : b, far = (a < b ? b : a) - low;\n"
            f"  union {{ v_i64 v; at p[2]; }} i = {{index - low}};\n"
            f"  unsigned out = ({outside}) & {'(1u << n) - 1' if first else '0xffff'};\n"
            f"  if (far >= 2 * W || out) {slow}\n"
            f"  {v} x = {load('p + low', '(2ull << far) - 1')};\n"
            f"  v_i32 d = __builtin_convertvector(i.v, v_i32);\n"
            f"  return far < W ? __builtin_shuffle(x, d) : __builtin_shuffle(x, {load('p + low + W', '(2ull << (far - W)) - 1')}, d); }}\n"
            f"#else\n{head} {slow} }}\n#endif")


def _stream(name: str, ctype: str) -> str:
    """A whole register to aligned memory around the cache, where the machine can."""
    v = f"v_{name}"
    parts = "\n".join(f"""\
#elif defined({feature}) && W * {size} % {width} == 0
TK void stream_{name}({ctype} *p, {v} v) {{
  typedef {element} part __attribute__((vector_size({width}), may_alias)); union {{ {v} v; part p[W * {size} / {width}]; }} x = {{v}};
  for (int k = 0; k < W * {size} / {width}; k++) __builtin_ia32_{call}((void *)((char *)p + k * {width}), x.p[k]); }}"""
                      for feature, width, element, call in (("__AVX512F__", 64, "float", "movntps512"), ("__AVX__", 32, "float", "movntps256"),
                                                            ("__SSE__", 16, "float", "movntps"))
                      for size in (RAW_BYTES[name],))
    return f"#if defined(__clang__)\nTK void stream_{name}({ctype} *p, {v} v) {{ __builtin_nontemporal_store(v, ({v} *)p); }}\n{parts}\n" \
           f"#else\nTK void stream_{name}({ctype} *p, {v} v) {{ *(u_{name} *)p = v; }}\n#endif"


NEAR = (2, 3, 4)        # distances at which elements come out of whole registers: 65536 points of 3 coordinates divided by their norms 237 us on one
                        # core with each element by itself, 116 so; eager 544


def _every(name: str, stride: int, lanes: int) -> str:
    """C text of a register of every `stride`-th element from p on, out of `stride` registers, each of which begins with the last element of the one
    before, so that nothing behind the last is read."""
    at = [max(0, -(-(k * stride - lanes + 1) // (lanes - 1))) for k in range(lanes)]         # the register that each lane comes from
    made = f"load_{name}(p)"
    for k in range(1, stride):
        order = (str(j if at[j] < k and k > 1 else j * stride if at[j] < k else lanes + j * stride - k * (lanes - 1) if at[j] == k else 0)
                 for j in range(lanes))
        made = f"__builtin_shufflevector({made}, load_{name}(p + {k} * (W - 1)), {', '.join(order)})"
    return made


def _near(name: str) -> tuple[int, ...]:
    """The distances at which elements of a type come out of whole registers."""
    return tuple(s for s in NEAR if s == 2 and RAW_BYTES[name] < 8 or RAW_BYTES[name] == 4)


def _every_first(name: str, ctype: str, one_by_one: str, lanes: int) -> str:
    """The fragment that reads the first n elements at a distance: at short ones in registers under masks, where the machine has them. A mean of 2 x 2
    of 8 x 64 x 56 x 56, rows of 28: 1.15 ms on one core with the last 12 of each one by one, so 0.3."""
    v = f"v_{name}"
    head = f"TK {v} loadsn_{name}(const {ctype} *p, int64_t stride, int64_t n) {{"
    slow = f"{head}\n  {one_by_one} }}"
    if name not in MASKED or RAW_BYTES[name] < 2 or lanes != 16:
        return slow
    call, size, element, feature = MASKED[name]
    part = lambda k: f"({v})__builtin_ia32_load{call}_mask((const void *)(p + {k} * W), (q){{0}}, (unsigned short)(m >> {k} * W))"
    near = []
    for s in _near(name):
        made = part(0)
        for k in range(1, s):
            lane = ", ".join(str(j if j * s < k * lanes and k > 1 else j * s if j * s < k * lanes else lanes + j * s - k * lanes
                                 if j * s < (k + 1) * lanes else 0) for j in range(lanes))
            made = f"__builtin_shufflevector({made}, {part(k)}, {lane})"
        near.append(f"  if (stride == {s}) {{ const uint64_t m = (2ull << (n - 1) * {s}) - 1; return {made}; }}")
    return (f"{masks(feature)}{head}\n  typedef {element} q __attribute__((vector_size({size})));\n" + "\n".join(near)
            + f"\n  {one_by_one} }}\n#else\n{slow}\n#endif")


def _spread(name: str, ctype: str, one_by_one: str, lanes: int, first: bool = False) -> str:
    """The fragment that stores a register's elements at a distance: at short ones in whole registers under masks, where the machine has them.
    `first`: its first n elements."""
    n, given = ("n", ", int64_t n") if first else ("", "")
    head = f"TK void stores{n}_{name}({ctype} *p, int64_t stride, v_{name} v{given}) {{"
    slow = f"{head} {one_by_one} }}"
    if name not in MASKED or RAW_BYTES[name] != 4 or lanes != 16:
        return slow
    call, _, element, feature = MASKED[name]
    near = []
    for s in NEAR:
        parts = [f"const uint64_t m = (2ull << (n - 1) * {s}) - 1;"] if first else []
        for k in range(s):
            places = [lanes * k + i for i in range(lanes)]
            order = ", ".join(str(n // s if n % s == 0 and n // s < lanes else 0) for n in places)
            mask = str(sum(1 << i for i, n in enumerate(places) if n % s == 0 and n // s < lanes)) + (f" & m >> {k} * W" if first else "")
            moved = f"(q)__builtin_shufflevector(v, v, {order})"
            parts.append(f"__builtin_ia32_store{call}_mask((void *)(p + {k} * W), {moved}, (unsigned short)({mask}));")
        near.append(f"  if (stride == {s}) {{ {' '.join(parts)} return; }}")
    return (f"{masks(feature)}{head}\n  typedef {element} q __attribute__((vector_size(64)));\n" + "\n".join(near)
            + f"\n  {one_by_one} }}\n#else\n{slow}\n#endif")


def _raw(name: str, ctype: str, lanes: int) -> dict[str, str]:
    v = f"v_{name}"
    each = lane_list(lanes, "p[index[@]]")
    strided = lane_list(lanes, "p[@ * stride]")
    broadcast = f"return splat_{name}(*p);" if RAW_BYTES[name] == 8 else f"{ctype} s = *p; return ({v}){{{lane_list(lanes, 's')}}};"
    scatter = " ".join(f"p[i[{k}]] = v[{k}];" for k in range(lanes))
    spread = " ".join(f"p[{k} * stride] = v[{k}];" for k in range(lanes))
    near = " ".join(f"if (stride == {s}) return {_every(name, s, lanes)};" for s in _near(name))
    halves = [k for k in (32, 16, 8, 4, 2, 1) if k < lanes]
    read = " ".join(f"if (n & {k}) {{ __builtin_memcpy(buf + at, p + at, {k} * sizeof *p); at += {k}; }}" for k in halves)
    write = " ".join(f"if (n & {k}) {{ __builtin_memcpy(p + at, buf + at, {k} * sizeof *p); at += {k}; }}" for k in halves)
    first = (f"TK {v} loadn_{name}(const {ctype} *p, int64_t n) {{\n  {ctype} buf[W] __attribute__((aligned(64))) = {{0}}; int64_t at = 0;\n"
             f"  {read}\n  return *(const u_{name} *)buf; }}")
    keep = (f"TK void storen_{name}({ctype} *p, {v} v, int64_t n) {{\n  {ctype} buf[W] __attribute__((aligned(64))); int64_t at = 0;\n"
            f"  *(u_{name} *)buf = v;\n  {write} }}")
    return _masked(name, ctype, first, keep) | {
        f"load_{name}": f"TK {v} load_{name}(const {ctype} *p) {{ return *(const u_{name} *)p; }}",
        f"loads_{name}": f"TK {v} loads_{name}(const {ctype} *p, int64_t stride) {{ {near} return ({v}){{{strided}}}; }}",
        f"loadsn_{name}": _every_first(name, ctype, f"{ctype} buf[W] = {{0}};\n  for (int64_t k = 0; k < n; k++) buf[k] = p[k * stride];\n"
                                       f"  return *(const u_{name} *)buf;", lanes),
        f"loadi_{name}": _gather(name, f"TK {v} loadi_{name}(const {ctype} *p, v_i64 index)", "-1", f"return ({v}){{{each}}};", lanes),
        f"loadin_{name}": _gather(name, f"TK {v} loadin_{name}(const {ctype} *p, v_i64 index, int64_t n)", "(1u << n) - 1",
                                  f"{ctype} buf[W] = {{0}};\n  for (int64_t k = 0; k < n; k++) buf[k] = p[index[k]];\n"
                                  f"  return *(const u_{name} *)buf;", lanes),
        f"loadw_{name}": _window(name, ctype, False),
        f"loadwn_{name}": _window(name, ctype, True),
        f"loada_{name}": f"TK {v} loada_{name}(const {ctype} *p, int64_t at, int64_t turn) {{\n"
                         f"  if (at + W <= turn) return load_{name}(p + at);\n  {ctype} buf[W];\n"
                         f"  for (int64_t k = 0; k < W; k++) {{ buf[k] = p[at]; at = at + 1 == turn ? 0 : at + 1; }}\n"
                         f"  return *(const u_{name} *)buf; }}",
        f"loadan_{name}": f"TK {v} loadan_{name}(const {ctype} *p, int64_t at, int64_t turn, int64_t n) {{\n  {ctype} buf[W] = {{0}};\n"
                          f"  for (int64_t k = 0; k < n; k++) {{ buf[k] = p[at]; at = at + 1 == turn ? 0 : at + 1; }}\n"
                          f"  return *(const u_{name} *)buf; }}",
        f"loadb_{name}": f"TK {v} loadb_{name}(const {ctype} *p) {{ {broadcast} }}",
        f"store_{name}": f"TK void store_{name}({ctype} *p, {v} v) {{ *(u_{name} *)p = v; }}",
        f"stream_{name}": _stream(name, ctype),
        f"stores_{name}": _spread(name, ctype, spread, lanes),
        f"storesn_{name}": _spread(name, ctype, f"{ctype} buf[W]; *(u_{name} *)buf = v; for (int64_t k = 0; k < n; k++) p[k * stride] = buf[k];",
                                   lanes, first=True),
        f"storei_{name}": f"TK void storei_{name}({ctype} *p, v_i64 i, {v} v) {{ {scatter} }}",
        f"storein_{name}": f"TK void storein_{name}({ctype} *p, v_i64 i, {v} v, int64_t n) {{\n"
                           f"  {ctype} buf[W]; *(u_{name} *)buf = v;\n  for (int64_t k = 0; k < n; k++) p[i[k]] = buf[k]; }}",
        f"store1_{name}": f"TK void store1_{name}({ctype} *p, {v} v) {{ *p = v[0]; }}",
    }


# (name, parameters after the pointer, arguments after the pointer)
_LOADS = (("load", "", ""), ("loadn", ", int64_t n", ", n"), ("loads", ", int64_t stride", ", stride"),
          ("loadsn", ", int64_t stride, int64_t n", ", stride, n"), ("loadi", ", v_i64 i", ", i"), ("loadin", ", v_i64 i, int64_t n", ", i, n"),
          ("loadw", ", v_i64 i", ", i"), ("loadwn", ", v_i64 i, int64_t n", ", i, n"),
          ("loada", ", int64_t at, int64_t turn", ", at, turn"), ("loadan", ", int64_t at, int64_t turn, int64_t n", ", at, turn, n"),
           ("loadb", "", ""))
_STORES = (("store", ", @", ", @"), ("stream", ", @", ", @"), ("storen", ", @, int64_t n", ", @, n"),
           ("stores", ", int64_t stride, @", ", stride, @"),
           ("storesn", ", int64_t stride, @, int64_t n", ", stride, @, n"), ("storei", ", v_i64 i, @", ", i, @"),
           ("storein", ", v_i64 i, @, int64_t n", ", i, @, n"), ("store1", ", @", ", @"))


def _converted(d: DType) -> dict[str, str]:
    """The fragments of a type whose register form differs, over those of its raw form."""
    raw, v, out = STORED[d.name], register(d), {}
    for name, parameters, arguments in _LOADS:
        out[f"{name}_{d}"] = f"TK {v} {name}_{d}(const {d.c} *p{parameters}) {{ return widen_{d}({name}_{raw}(p{arguments})); }}"
    for name, parameters, arguments in _STORES:
        parameters, arguments = parameters.replace("@", f"{v} v"), arguments.replace("@", f"narrow_{d}(v)")
        out[f"{name}_{d}"] = f"TK void {name}_{d}({d.c} *p{parameters}) {{ {name}_{raw}(p{arguments}); }}"
    return out


_CONVERT = {
    # what went around the cache is in memory before other threads are told that it is
    "settle": """\
#if defined(__SSE__)
TK void settle(void) { __builtin_ia32_sfence(); }
#else
TK void settle(void) { }
#endif""",
    "widen_bool": "TK v_bool widen_bool(v_u8 x) { return cast_u8_i32(x) != 0; }",
    "narrow_bool": "TK v_u8 narrow_bool(v_bool m) { return cast_i32_u8(-m); }",
    # one permutation of words in place of a conversion (which gcc makes in halves) and a shift
    "widen_bf16": f"""\
#if !defined(__clang__) && defined(__AVX512BW__) && W == 16
TK v_f32 widen_bf16(v_u16 x) {{
  typedef short q __attribute__((vector_size(64))); typedef int h __attribute__((vector_size(32)));
  const q at = {{{", ".join(str(k // 2) for k in range(32))}}};
  return (v_f32)__builtin_ia32_permvarhi512_mask((q)__builtin_ia32_si512_256si((h)x), at, (q){{0}}, 0xaaaaaaaa); }}
#else
TK v_f32 widen_bf16(v_u16 x) {{ return (v_f32)(__builtin_convertvector(x, v_u32) << 16); }}
#endif""",
    "narrow_bf16": f"""\
#if !defined(__clang__) && defined(__AVX512BW__) && W == 16
TK v_u16 narrow_bf16(v_f32 x) {{
  typedef short q __attribute__((vector_size(64)));
  const q at = {{{", ".join(str((2 * k + 1) % 32) for k in range(32))}}};
  q r = __builtin_ia32_permvarhi512_mask((q)x, at, (q){{0}}, -1);
  return (v_u16)__builtin_shufflevector(r, r, {lane_list(16, "@")}); }}
#else
TK v_u16 narrow_bf16(v_f32 x) {{ return __builtin_convertvector((v_u32)x >> 16, v_u16); }}
#endif""",
    "round_bf16": """\
#if !defined(__clang__) && defined(__AVX512F__) && W == 16
TK v_f32 round_bf16(v_f32 x) {
  v_i32 b = (v_i32)x, r = b + 0x7fff;
  r = __builtin_ia32_paddd512_mask(r, (v_i32){0} + 1, r, __builtin_ia32_ptestmd512(b, (v_i32){0} + 0x10000, -1));
  return (v_f32)__builtin_ia32_pandd512_mask(r, (v_i32){0} - 0x10000, (v_i32){0} + 0x7fc00000, __builtin_ia32_cmpps512_mask(x, x, 7, -1, 4)); }
#else
TK v_f32 round_bf16(v_f32 x) {
  v_u32 b = (v_u32)x, r = b + 0x7fff + (b >> 16 & 1) & 0xffff0000u, nan = (v_u32)(x != x);
  return (v_f32)((nan & 0x7fc00000u) | (~nan & r)); }
#endif""",
    # Exponent 0 (denormal or zero): the magnitude is read behind a 1.0-like exponent, which is subtracted again, exactly.
    "widen_f16": """\
#if defined(__clang__) && (defined(__F16C__) || defined(__aarch64__))
TK v_f32 widen_f16(v_u16 x) { typedef _Float16 h __attribute__((vector_size(2 * W))); return __builtin_convertvector((h)x, v_f32); }
#elif defined(__AVX512F__) && W == 16
TK v_f32 widen_f16(v_u16 x) {
  typedef short q __attribute__((vector_size(32)));
  return (v_f32)__builtin_ia32_vcvtph2ps512_mask((q)x, (v_f32){0}, -1, 4); }
#elif defined(__F16C__) && W == 8
TK v_f32 widen_f16(v_u16 x) {
  typedef short q __attribute__((vector_size(16)));
  return (v_f32)__builtin_ia32_vcvtph2ps256((q)x); }
#else
TK v_f32 widen_f16(v_u16 x) {
  v_u32 h = __builtin_convertvector(x, v_u32), m = (h & 0x7fff) << 13, e = m & 0x0f800000, r = m + 0x38000000;
  v_u32 top = (v_u32)(e == 0x0f800000), low = (v_u32)(e == 0);
  v_u32 small = (v_u32)((v_f32)(r + 0x00800000) - 0x1p-14f);
  r = (r + (top & 0x38000000)) & ~low | small & low;
  return (v_f32)(r | (h & 0x8000) << 16); }
#endif""",
    "narrow_f16": """\
#if defined(__clang__) && (defined(__F16C__) || defined(__aarch64__))
TK v_u16 narrow_f16(v_f32 x) { typedef _Float16 h __attribute__((vector_size(2 * W))); return (v_u16)__builtin_convertvector(x, h); }
#elif defined(__AVX512F__) && W == 16
TK v_u16 narrow_f16(v_f32 x) {
  typedef short q __attribute__((vector_size(32)));
  return (v_u16)__builtin_ia32_vcvtps2ph512_mask(x, 0, (q){0}, -1); }
#elif defined(__F16C__) && W == 8
TK v_u16 narrow_f16(v_f32 x) { return (v_u16)__builtin_ia32_vcvtps2ph256(x, 0); }
#else
TK v_u16 narrow_f16(v_f32 x) {
  v_u32 b = (v_u32)x, u = b & 0x7fffffff;
  v_u32 top = (v_u32)((v_i32)u >= 0x47800000), nan = (v_u32)(x != x), low = (v_u32)((v_i32)u < 0x38800000);
  v_u32 small = (v_u32)((v_f32)u + 0.5f) - 0x3f000000;
  v_u32 r = u + 0xc8000fffu + (u >> 13 & 1) >> 13;
  r = r & ~low | small & low;
  r = r & ~top | (0x7c00 | nan & 0x200) & top;
  return __builtin_convertvector(r | (b >> 16 & 0x8000), v_u16); }
#endif""",
    "round_f16": "TK v_f32 round_f16(v_f32 x) { return widen_f16(narrow_f16(x)); }",
}


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text, in an order in which each stands behind what it uses (casts of u8 and i32 excepted)."""
    out: dict[str, str] = {}
    for name, ctype in RAW.items():
        out.update(_raw(name, ctype, lanes))
    out.update(_CONVERT)
    for d in ALL:
        if d.name in STORED:
            out.update(_converted(d))
    return out
