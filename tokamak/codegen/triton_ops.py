"""The operations of the language in Triton: text of each operation, cast, literal, fold and random number. Pure text; kernels hold
`import triton.language as tl` and `from tokamak.codegen import triton_lib as tk`.

Arguments are names of registers (Triton tensors) of compute types: `tl.int1` for bool, integers as they are, f32, f64; f16 and bf16 only in `cast`.
Every text is an expression in parentheses or a call. Unsigned and signed integers wrap; integer division by 0 gives 0.

Math: `op` is within the bounds of tests/codegen/test_triton_math.py (2 units of the last place for most of f32; division, square root and
reciprocal are correctly rounded). With `fast`, rows of `FAST` take the machine's short forms, for values that are rounded to 16 bits anyway.
"""
from __future__ import annotations

import math

import numpy as np

from ..ir.dtype import BF16, BOOL, F16, F32, F64, I8, I16, I32, I64, U8, DType
from ..ir.ops import CARRIERS, MONOIDS, OPS, WIDTHS, identity

_TYPES = {BOOL: ("int1", "i1"), U8: ("uint8", "u8"), I8: ("int8", "i8"), I16: ("int16", "i16"), I32: ("int32", "i32"), I64: ("int64", "i64"),
          F16: ("float16", "fp16"), BF16: ("bfloat16", "bf16"), F32: ("float32", "fp32"), F64: ("float64", "fp64")}


def triton_type(d: DType) -> str:
    """'tl.float32' for f32."""
    return f"tl.{_TYPES[d][0]}"


def pointer_type(d: DType) -> str:
    """'*fp32' for memory of f32."""
    return f"*{_TYPES[d][1]}"


# -- operations ----------------------------------------------------------------------------------------------------
_ANY = {"eq": "(a == b)", "ne": "(a != b)", "lt": "(a < b)", "le": "(a <= b)", "gt": "(a > b)", "ge": "(a >= b)",
        "max": "tk.maximum(a, b)", "min": "tk.minimum(a, b)", "where": "tl.where(a, b, c)"}
_BITS = {"and": "(a & b)", "or": "(a | b)", "xor": "(a ^ b)", "not": "(~a)"}
_NUMBER = {"add": "(a + b)", "sub": "(a - b)", "mul": "(a * b)", "abs": "tl.abs(a)", "sign": "tk.sign(a)"}
_INTEGER = _NUMBER | _BITS | {
    "neg": "(0 - a)", "floordiv": "tk.floordiv(a, b)", "truncdiv": "tk.truncdiv(a, b)", "mod": "tk.mod(a, b)", "rem": "tk.rem(a, b)",
    "pow": "tk.pow_int(a, b)", "shl": "tk.shl(a, b)", "shr": "tk.shr(a, b)", "isnan": "(a != a)", "isinf": "(a != a)", "signbit": "(a < 0)"}
_FLOAT = _NUMBER | {      # 0 - x would lose the sign of 0
    "neg": "(a * -1.0)", "floordiv": "tk.floordiv_float(a, b)", "mod": "tk.mod_float(a, b)", "rem": "tk.rem_float(a, b)", "fmin": "tk.fmin(a, b)",
    "fmax": "tk.fmax(a, b)", "copysign": "tk.copysign(a, b)", "nextafter": "tk.nextafter(a, b)", "trunc": "tk.trunc(a)", "round": "tk.round(a)",
    "isnan": "(a != a)", "isinf": '(tl.abs(a) == float("inf"))', "signbit": "(tk.bits(a) < 0)"}
_F32 = _FLOAT | {
    "div": "tl.div_rn(a, b)", "recip": "tl.div_rn(1.0, a)", "sqrt": "tl.sqrt_rn(a)", "rsqrt": "tk.rsqrt(a)", "log2": "tl.log2(a)",
    "floor": "tk.floor(a)", "ceil": "tk.ceil(a)", "tf32": "tk.to_tf32(a)",
    "pow": "tk.pow(a, b)", "atan2": "tk.atan2(a, b)", "hypot": "tk.hypot(a, b)"} | {
    n: f"tk.{n}(a)" for n in ("exp exp2 expm1 log log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma "
                              "digamma sigmoid").split()}
_F64 = _FLOAT | {
    "div": "(a / b)", "recip": "(1.0 / a)", "sqrt": "tl.sqrt(a)", "rsqrt": "(1.0 / tl.sqrt(a))", "floor": "tl.floor(a)", "ceil": "tl.ceil(a)",
    "tf32": "a",
    "pow": "tk.pow64(a, b)", "atan2": "tk.atan2_64(a, b)", "hypot": "tk.hypot64(a, b)", "expm1": "tk.expm1_64(a)", "log10": "tk.log10_64(a)"} | {
    n: f"tl.{n}(a)" for n in "exp exp2 log log2 sin cos erf".split()} | {
    n: f"tk.{n}64(a)" for n in "log1p tan asin acos atan sinh cosh tanh asinh acosh atanh erfc erfinv lgamma digamma sigmoid".split()}

FAST: dict[str, str] = {
    "div": "(a / b)", "recip": "(1.0 / a)", "sqrt": "tl.sqrt(a)", "rsqrt": "tl.rsqrt(a)", "exp": "tk.exp_short(a)",
    "exp2": "tk.exp2_short(a)", "sigmoid": "tk.sigmoid_short(a)", "erf": "tk.erf_short(a)",
    "tanh": "tk.tanh_short(a)"}
"""f32 rows with a short form: subnormal numbers may count as 0; division and roots are within 2 units of the last place, exp and sigmoid
within |x| + 4 or so: 6e-8 |x| relative, which is little for the arguments that 16-bit floats need; erf and tanh within 4e-5 of
themselves."""


def table(d: DType) -> dict[str, str]:
    """Row name -> text of `a`, `b`, `c` for operations on `d`."""
    if d is BOOL:
        return _ANY | _BITS
    if d is U8:      # ~ of unsigned is not in the interpreter
        return _ANY | _INTEGER | {"not": "(a ^ 255)"}
    return _ANY | (_INTEGER if d.is_int else {F32: _F32, F64: _F64}[d])


def fill(text: str, args: tuple[str, ...]) -> str:
    """`text` with the words a, b, c replaced by `args`."""
    names = dict(zip("abc", args))
    out, word = [], ""
    for ch in text + " ":
        if ch.isalnum() or ch in "_.\"":
            word += ch
            continue
        out.append(names.get(word, word) + ch)
        word = ""
    return "".join(out)[:-1]


def op(name: str, dtype: DType, args: tuple[str, ...], *, fast: bool = False) -> str:
    """Text of operation `name` on registers `args`, whose type (the condition of `where` aside) is `dtype`. KeyError: the row does not take it."""
    if len(args) != OPS[name].arity:
        raise TypeError(f"'{name}' takes {OPS[name].arity} arguments, not {len(args)}")
    if dtype.kind not in OPS[name].takes or dtype.is_half:
        raise TypeError(f"'{name}' does not take {dtype}")
    text = FAST.get(name) if fast and dtype is F32 else None
    return fill(text or table(dtype)[name], args)


def division(name: str, dtype: DType, a: str, b: str, mask: str | None, err: str, code: int) -> str:
    """Text of an integer division that stores `code` into the error word `err` (a pointer to i32) where b is 0 in a lane of `mask` (a bool register;
    None: every lane); its value is 0 there."""
    return op(name, dtype, (a, f"tk.divisor({b}, {mask or True}, {err}, {code})"))


# -- casts and constants -------------------------------------------------------------------------------------------
def cast(to: DType, source: DType, arg: str) -> str:
    """Text of register `arg` of type `source` as `to`. Floats to integers truncate: NaN is 0 as i32 and narrower; outside the type i32 and i64
    saturate on NVIDIA, u8 wraps (by way of i64), i8 and i16 wrap (by way of i32). To bool: x != 0. 16-bit floats are reached by way of f32, to
    nearest even."""
    if to is source:
        return arg
    if source is BF16:
        return cast(to, F32, f"tk.from_bf16({arg})")
    if source is F16:
        return cast(to, F32, f"{arg}.to(tl.float32)")
    if to is BOOL:
        return f"({arg} != 0)"
    if to.is_half:
        single = cast(F32, source, arg)
        return f"tk.to_bf16({single})" if to is BF16 else f"{single}.to(tl.float16)"
    if source.is_float and to.is_int and to.bytes < 4:
        return f"{arg}.to({'tl.int64' if to is U8 else 'tl.int32'}).to({triton_type(to)})"
    return f"{arg}.to({triton_type(to)})"


def _number(value, d: DType) -> tuple[str, bool]:
    """(Python text of `value` as a `d`, whether it is -0)."""
    if d is BOOL:
        return str(bool(value)), False
    if not d.is_float:
        return str(int(value)), False
    x = float(value) if d is F64 else float(np.float32(value))
    if math.isnan(x) or math.isinf(x):
        return f'float("{x}")', False
    return repr(abs(x) if x == 0 else x), x == 0 and math.copysign(1, x) < 0


def full(shape: str, value, dtype: DType) -> str:
    """Text of a block of one number; `shape` is text ('[1024]'; '[]' gives a scalar)."""
    if dtype.is_half:
        return cast(dtype, F32, full(shape, value, F32))
    text, minus_zero = _number(value, dtype)
    out = f"tl.full({shape}, {text}, {triton_type(dtype)})"
    return f"({out} * -1.0)" if minus_zero else out


def literal(value, dtype: DType) -> str:
    """Text of a typed scalar."""
    return full("[]", value, dtype)


# -- folds ---------------------------------------------------------------------------------------------------------
_COMBINE = {"sum": "(a + b)", "prod": "(a * b)", "max": "tk.maximum(a, b)", "min": "tk.minimum(a, b)", "any": "(a | b)", "all": "(a & b)",
            "logsumexp": "tk.logaddexp(a, b)"}


def neutral(monoid: str, dtype: DType, component: int = 0, index: DType = I64) -> str:
    """Text of the neutral element: of the values, or (component 1 of argmax and argmin) of the indices of type `index`: greater than any, so that it
    loses ties. Index registers may be i32 or i64 throughout."""
    if component >= WIDTHS[monoid]:
        raise IndexError(f"'{monoid}' carries {WIDTHS[monoid]} components")
    if monoid in CARRIERS:
        return literal(CARRIERS[monoid][component], dtype)
    return literal(2 ** (8 * index.bytes - 1) - 1, index) if component else literal(identity(monoid, dtype), dtype)


def combine(monoid: str, a: tuple[str, ...], b: tuple[str, ...], later: bool = False) -> tuple[str, ...]:
    """Texts of the carried components of a and b combined element by element. `later` (argmax, argmin): every index of b is greater than those of a,
    which saves comparing them. One text for all components of the `ir.ops.CARRIERS`."""
    if monoid in CARRIERS:
        return (f"tk.{monoid}_both({', '.join((*a, *b))})",)
    if MONOIDS[monoid] == 1:
        return (fill(_COMBINE[monoid], (a[0], b[0])),)
    take = f"tk.{monoid}_later({a[0]}, {b[0]})" if later else f"tk.{monoid}_take({a[0]}, {a[1]}, {b[0]}, {b[1]})"
    return tuple(f"tl.where({take}, {y}, {x})" for x, y in zip(a, b))


def step(monoid: str, carried: tuple[str, ...], element: str, weight: str) -> str:
    """Text of `carried` (of one of the `ir.ops.CARRIERS`) with one `element` taken in; idle lanes hold a `weight` of 0, others 1, and the component
    of the neutral element. A carried weight may have fewer lanes than the elements, as many as `weight`."""
    return f"tk.{monoid}_step({', '.join((*carried, element, weight))})"


def reduce(monoid: str, dtype: DType, args: tuple[str, ...], axis: int) -> str:
    """Text of the fold of `args` along a block's `axis`, in the type of `args`; a tuple (value, index) for argmax and argmin."""
    if monoid == "sum":
        total = f"tl.sum({args[0]}, {axis})"
        return f"{total}.to({triton_type(dtype)})" if dtype.is_int and dtype.bytes < 4 else total
    return f"tk.reduce_{monoid}({', '.join(args)}, {axis})"


def sums(args: list[str], axis: int) -> str:
    """Text of the sums of each of `args`, up to five blocks of one shape, along `axis`."""
    return f"tk.sums{len(args)}({', '.join(args)}, {axis})" if len(args) > 1 else f"tl.sum({args[0]}, {axis})"


def scan(monoid: str, args: tuple[str, ...], axis: int, reverse: bool = False) -> str:
    """Text of the inclusive prefixes of `args` along a block's `axis` (suffixes with `reverse`), in the type of `args`; a tuple for argmax
    and argmin."""
    return f"tk.scan_{monoid}({', '.join(args)}, {axis}, {reverse})"


def ordered_scan(monoid: str, args: tuple[str, ...], before: int, log: int, after: int) -> str:
    """The same of a float along the middle one of `before` x 2^`log` x `after` elements, in one order whatever threads there are."""
    return f"tk.ordered_scan_{monoid}({', '.join(args)}, {before}, {log}, {after})"


# -- random numbers ------------------------------------------------------------------------------------------------
def random(kind: str, seed: str, index: str) -> str:
    """Text of the f32 random numbers of `kind` ('uniform', 'normal') that stand at `index` under `seed` (i64 registers)."""
    return f"tk.{kind}({seed}, {index})"


def uniform_run(seed: str, first: str, axis: int = 0, rank: int = 1) -> str:
    """Text of the uniform numbers at first, first + 1, first + 2, first + 3 for each of `first` (i64, multiples of 4; a block of `rank` dimensions,
    whose `axis` grows fourfold)."""
    if axis == rank - 1:
        return f"tk.uniform_run({seed}, {first})"
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    return f"tl.permute(tk.uniform_run({seed}, tl.permute({first}, {order})), {order})"
