"""The operations of the language, one row each, keyed by name.

    name -> arity, result rule, the types it takes, FLOPs a lane (0 for moves and logic), pure text for people

Further questions (meaning in NumPy, C text, Triton text) are tables keyed by the same names in `reference`, `codegen/c_ops` and `codegen/triton_ops`;
a test walks this table and finds what is missing. Arguments of one operation all have one type (a shift count and a `where` condition aside):
promotion is the border's business, and 16-bit floats are cast to f32 before any arithmetic.
"""
from __future__ import annotations

from dataclasses import dataclass

from .dtype import BOOL, DType


@dataclass(frozen=True)
class OpInfo:
    name: str
    arity: int
    result: str        # 'same', 'bool'
    takes: str         # letters of DType.kind it accepts
    flops: int
    heavy: bool = False   # a transcendental: worth a row buffer rather than a recompute


def _rows(spec: str, arity: int, result: str, takes: str, flops: int, heavy: bool = False):
    return {name: OpInfo(name, arity, result, takes, flops, heavy) for name in spec.split()}


def can_fail(name: str, d: DType) -> bool:
    """True for operations that report an error: integer division by 0."""
    return name in ("floordiv", "truncdiv", "mod", "rem") and d.is_int


OPS: dict[str, OpInfo] = {
    **_rows("add sub mul", 2, "same", "iuf", 1),
    **_rows("neg abs", 1, "same", "iuf", 1),
    **_rows("div", 2, "same", "f", 1),
    **_rows("floordiv", 2, "same", "iuf", 4),            # rounds down; integer division by zero raises the error word
    **_rows("truncdiv", 2, "same", "iu", 4),             # rounds towards zero
    **_rows("mod", 2, "same", "iuf", 4),                 # sign of the divisor (torch.remainder)
    **_rows("rem", 2, "same", "iuf", 4),                 # sign of the dividend (torch.fmod)
    **_rows("min max", 2, "same", "biuf", 1),            # NaN if either is NaN
    **_rows("fmin fmax", 2, "same", "f", 1),             # the other if one is NaN
    **_rows("sqrt", 1, "same", "f", 1),
    **_rows("rsqrt recip", 1, "same", "f", 2),
    **_rows("exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma digamma sigmoid",
            1, "same", "f", 12, True),
    **_rows("pow", 2, "same", "iuf", 24, True),
    **_rows("atan2 hypot", 2, "same", "f", 16, True),
    **_rows("copysign nextafter", 2, "same", "f", 1),
    **_rows("floor ceil trunc round", 1, "same", "f", 1),   # round: half to even
    **_rows("tf32", 1, "same", "f", 0),                  # f32 to the nearest of ten bits behind the point, ties to even; f64 as it is
    **_rows("sign", 1, "same", "iuf", 1),                # 0 for NaN, as torch
    **_rows("isnan isinf signbit", 1, "bool", "iuf", 0),
    **_rows("eq ne lt le gt ge", 2, "bool", "biuf", 1),
    **_rows("and or xor", 2, "same", "biu", 1),
    **_rows("not", 1, "same", "biu", 1),
    **_rows("shl shr", 2, "same", "iu", 1),              # shr is arithmetic on signed; counts outside 0..bits-1 as torch defines them
    **_rows("where", 3, "same", "biuf", 0),              # first argument bool
}

# monoid -> (identity by kind is in `identity`), how many components it carries
MONOIDS: dict[str, int] = {"sum": 1, "prod": 1, "max": 1, "min": 1, "any": 1, "all": 1, "argmax": 2, "argmin": 2, "logsumexp": 1}
"""argmax / argmin carry (value, index): the first occurrence wins, NaN wins over everything. max and min are NaN if any element is.
logsumexp exists for scans (torch.logcumsumexp)."""

CARRIERS: dict[str, tuple[float, ...]] = {"moments": (0.0, 0.0, 0.0), "expsum": (float("-inf"), 0.0)}
"""Tuples of floating numbers of one type that folds carry and rescale, with the neutral element of each. No scan takes them.

    moments  (s, q, w) of a set: its sum, its squared differences from its mean s/w, how many it has. One element x is (x, 0, 1). Two sets:
             s = s1 + s2, w = w1 + w2, q = q1 + q2 + (s1/w1 - s2/w2)^2 w1 w2 / w. Where s is not finite, q is infinite or NaN
    expsum   (m, t): the maximum, and the sum of e^(x - m), in which -inf counts 0 and an infinite x = m counts 1. One element x is (x, 1). Two sets:
             m = max(m1, m2), t = t1 e^(m1 - m) + t2 e^(m2 - m)
"""

MEANS: dict[str, int] = {"expmean": 2}
"""Pairs of floating numbers of one type that contractions carry and rescale. No scan takes them, and no other kernel.

    expmean  (l, y): the logarithm of the sum of e^x, and the mean of v weighted by e^x. One element is (x, v). Two sets: l = log(e^l1 + e^l2),
             y = y1 e^(l1 - l) + y2 e^(l2 - l). NaN where an x is NaN or infinite, where v is NaN, and (y) where all x are -inf
"""

WIDTHS: dict[str, int] = MONOIDS | {name: len(neutral) for name, neutral in CARRIERS.items()} | MEANS


class NotTaken(TypeError):
    """An operation has no meaning for the kind of its arguments."""


def result_type(name: str, args: tuple[DType, ...]) -> DType:
    """The type of `name(*args)`; TypeError names what is wrong, NotTaken where the operation has no meaning for such a type."""
    info = OPS.get(name)
    if info is None:
        raise TypeError(f"there is no operation '{name}'")
    if len(args) != info.arity:
        raise TypeError(f"'{name}' takes {info.arity} arguments, not {len(args)}")
    rest = args
    if name == "where":
        if args[0] is not BOOL:
            raise TypeError(f"'where' wants a bool condition, not {args[0]}")
        rest = args[1:]
    for a in rest:
        if a is not rest[0]:
            raise TypeError(f"'{name}' on different types {', '.join(map(str, args))}: cast first")
        if a.kind not in info.takes:
            raise NotTaken(f"'{name}' does not take {a}")
        if a.is_half:
            raise TypeError(f"'{name}' on {a}: 16-bit floats compute in f32, cast first")
    return BOOL if info.result == "bool" else rest[0]


def identity(monoid: str, d: DType):
    """The neutral element of a one-component monoid (and of the value component of argmax / argmin) on type `d`, as a Python number."""
    if monoid in CARRIERS:
        raise KeyError(f"'{monoid}' carries {WIDTHS[monoid]} components")
    if monoid == "sum":
        return 0
    if monoid == "prod":
        return 1
    if monoid == "any":
        return False
    if monoid == "all":
        return True
    lowest = monoid in ("max", "argmax", "logsumexp")
    if d.is_float:
        return float("-inf") if lowest else float("inf")
    if d is BOOL:
        return not lowest
    bits = d.bytes * 8
    low, high = (0, 2**bits - 1) if d.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return low if lowest else high
