"""The C vocabulary of generated CPU kernels: text fragments over explicit vectors of W lanes.

`prelude(names, lanes)` gives the text that defines the fragments called `names` and whatever they use, and nothing else, in an order that only
depends on the set. A fragment's text names what it uses; there is no list of dependencies to keep. No file is included: headers cost more to
compile than all of this. The text compiles with gcc (12 on) and clang for any width of vectors that the target has.
"""
from __future__ import annotations

import re
from functools import cache
from typing import Iterable

from . import c_cast, c_fold, c_guard, c_math, c_math64, c_memory, c_ops, c_random

_HEAD = """\
#define W {lanes}
#define TK static inline __attribute__((always_inline))
typedef __INT8_TYPE__ int8_t; typedef __INT16_TYPE__ int16_t; typedef __INT32_TYPE__ int32_t; typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t; typedef __UINT16_TYPE__ uint16_t; typedef __UINT32_TYPE__ uint32_t; typedef __UINT64_TYPE__ uint64_t;
#if defined(__AVX512F__)
#define NATIVE 64
#elif defined(__AVX__)
#define NATIVE 32
#else
#define NATIVE 16
#endif
"""

_TYPES = {"u8": "uint8_t", "i8": "int8_t", "u16": "uint16_t", "i16": "int16_t", "u32": "uint32_t", "i32": "int32_t", "u64": "uint64_t",
          "i64": "int64_t", "f32": "float", "f64": "double"}

_WORD = re.compile(r"[A-Za-z_]\w*")


def _head(lanes: int) -> str:
    """Widths and register types: v_D, u_D (the same at any address), and h_f64, half of a v_f64: as wide as a v_f32."""
    lines = [_HEAD.format(lanes=lanes)]
    for name, ctype in _TYPES.items():
        lines.append(f"typedef {ctype} v_{name} __attribute__((vector_size(W * sizeof({ctype}))));\n"
                     f"typedef {ctype} u_{name} __attribute__((vector_size(W * sizeof({ctype})), aligned(sizeof({ctype})), may_alias));\n")
    lines.append("typedef v_i32 v_bool;\ntypedef double h_f64 __attribute__((vector_size(W * 4)));\n"
                 "typedef double u_h __attribute__((vector_size(W * 4), aligned(8), may_alias));\n")
    return "".join(lines)


@cache
def fragments(lanes: int) -> dict[str, str]:
    """Every fragment: name -> C text."""
    out: dict[str, str] = {}
    for module in (c_memory, c_cast, c_ops, c_math, c_math64, c_fold, c_random, c_guard):
        out.update(module.fragments(lanes))
    return out


@cache
def _uses(name: str, lanes: int) -> tuple[str, ...]:
    table = fragments(lanes)
    return tuple(sorted(w for w in set(_WORD.findall(table[name])) if w in table and w != name))


def fragments_in(text: str, lanes: int) -> set[str]:
    """The names of the fragments that C text mentions."""
    table = fragments(lanes)
    return {w for w in _WORD.findall(text) if w in table}


def pieces(names: Iterable[str], lanes: int) -> tuple[str, ...]:
    """C texts that define the fragments `names` for registers of `lanes` lanes: the common head, then each fragment behind those that it uses.
    KeyError for a name that is no fragment."""
    table, done = fragments(lanes), {}

    def visit(name: str) -> None:
        if name not in done:
            for used in _uses(name, lanes):
                visit(used)
            done[name] = table[name] + "\n"
    for name in sorted(set(names)):
        visit(name)
    return (_head(lanes), *done.values())


def prelude(names: Iterable[str], lanes: int) -> str:
    """The pieces as one text."""
    return "".join(pieces(names, lanes))
