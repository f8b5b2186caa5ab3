"""C fragments: `cast_FROM_TO(v)` for every pair of types, as torch converts on the CPU.

Floating to integer truncates; to u8, i8 and i16 it goes through i32 (u8 of f64 and of f32 too: values outside i32 are undefined in torch as well);
to bool is `!= 0`, so NaN is true. f64 and i64 reach f16 and bf16 by way of f32, as in torch. The 16-bit floats stay in v_f32, rounded.
"""
from __future__ import annotations

from ..ir.dtype import ALL, DType
from .c_memory import register

_INTS = ("i8", "i16", "i32", "i64")


def _steps(a: str, b: str) -> str:
    """Text that converts the integer register `x` of type a to type b, halving or doubling the lanes one step at a time (compilers do a
    conversion by four or eight lane by lane)."""
    ladder = {"u8": 0, "i8": 0, "i16": 1, "i32": 2, "i64": 3}
    at, end = ladder[a], ladder[b]
    if at == end:
        return f"(v_{b})x"
    text = "x"
    while at != end:
        at += 1 if at < end else -1
        # an unsigned byte widens to a signed type that holds it, so only its first step is unsigned
        name = b if at == end else _INTS[at]
        text = f"__builtin_convertvector({text}, v_{name})"
    return text


def _body(a: DType, b: DType) -> str:
    """C expression: register `x` holding an `a`, as a `b`."""
    if b.is_half:
        return f"round_{b}({'x' if register(a) == 'v_f32' else f'cast_{a}_f32(x)'})"
    if a.is_half:
        return "x" if b.name == "f32" else f"cast_f32_{b}(x)"
    if b.name == "bool":
        return f"ne_{a}(x, (v_{a}){{0}})"
    if a.name == "bool":
        if b.name == "f32":
            return "(v_f32)(x & 0x3f800000)"
        return "-x" if b.name == "i32" else f"cast_i32_{b}(-x)"
    if a.is_float and b.is_float:
        return f"__builtin_convertvector(x, v_{b})"
    if a.is_float:
        return f"__builtin_convertvector(x, v_{b})" if b.bytes >= 4 else f"cast_i32_{b}(cast_{a}_i32(x))"
    if b.is_float:
        return f"__builtin_convertvector(x, v_{b})" if a.bytes >= 4 else f"cast_i32_{b}(cast_{a}_i32(x))"
    return _steps(a.name, b.name)


def cast(source: DType, target: DType, text: str) -> str:
    """C text of the register `text` of type `source` converted to `target`."""
    return text if source is target else f"cast_{source}_{target}({text})"


def fragments(lanes: int) -> dict[str, str]:
    """Fragment name -> C text."""
    return {f"cast_{a}_{b}": f"TK {register(b)} cast_{a}_{b}({register(a)} x) {{ return {_body(a, b)}; }}" for a in ALL for b in ALL if a is not b}
