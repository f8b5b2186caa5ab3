"""Elementwise operators: arithmetic, functions, comparisons, copies and casts.

The tables hold aten's name and its formula. Formulas are ATen's own (the same comparisons at the same borders), so that NaN, infinities and ties come
out as in eager.
"""
from __future__ import annotations

import math

import torch

from ..ir.dtype import BOOL, F16
from ..ir.expr import Const, Coord
from .aten_create import full
from .aten_views import rolled
from .dtypes import TORCH_DTYPES
from .positions import whole_numbers
from .promote import Term, call, clip, every, formulas, like, op, operand, pointwise, result_type, where
from .registry import NotCompiled, register
from .tensor import Tensor, cast

aten = torch.ops.aten


# -- one argument ----------------------------------------------------------------------------------------------------
def _on_floats(name: str):
    """The operation on floating values; integers and bool are themselves."""
    def build(x: Term) -> Term:
        made = call(name, x) if x.is_float else x
        known = whole_numbers(made.expr) if x.is_float else None
        return made if known is None else Term(cast(Coord(known), made.dtype))
    return build


def _sinc(x: Term) -> Term:
    y = x * math.pi
    return where(x.eq(0), 1, call("sin", y) / y)


def _round(x: Term, decimals=0) -> Term:
    if not x.is_float:
        return x
    n = decimals if isinstance(decimals, int) else decimals.expr.value
    if n == 0:
        return call("round", x)
    return call("round", x * 10.0**n) / 10.0**n if n > 0 else call("round", x / 10.0**-n) * 10.0**-n


def _sign(x: Term) -> Term:
    return x if x.dtype is BOOL else call("sign", x)


def _angle(x: Term) -> Term:
    return where(call("isnan", x), x, where(x < 0, like(x, math.pi), 0))


def _logit(x: Term, eps=None) -> Term:
    if eps is not None:
        x = where(x < eps, eps, where(x > 1 - eps, 1 - eps, x))
    return call("log", x / (1 - x))


_SAME_NAME = """acos acosh asin asinh atan atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 rsqrt sigmoid sin sinh
sqrt tan tanh""".split()

formulas({name: op(name) for name in _SAME_NAME})
formulas({
    "reciprocal": op("recip"),
    "sinc": _sinc,
    "deg2rad": lambda x: x * (math.pi / 180),
    "rad2deg": lambda x: x * (180 / math.pi),
    "special_entr": lambda x: where(call("isnan", x), x, where(x > 0, -x * call("log", x), where(x.eq(0), like(x, 0), -math.inf))),
    "angle": _angle,
    "logit": _logit,
    "neg": op("neg"),
    "positive": lambda x: x,
    "abs": lambda x: x if x.dtype.kind in "bu" else abs(x),
    "sign": _sign,
    "sgn": _sign,
    "floor": _on_floats("floor"),
    "ceil": _on_floats("ceil"),
    "trunc": _on_floats("trunc"),
    "round": _round,
    "frac": lambda x: x - call("trunc", x),
    "square": lambda x: x * x,
    "bitwise_not": lambda x: ~x,
})


def _predicate(name: str, of_float, of_int=lambda x: Term(Const(False, BOOL))) -> None:
    """A question about each element, asked in the argument's own type."""
    @register(*every(name))
    def build(b, x: Tensor) -> Tensor:
        return pointwise(b, of_float if x.dtype.is_float else of_int, x, common=x.dtype)


_predicate("isnan", op("isnan"))
_predicate("isinf", op("isinf"))
_predicate("isposinf", lambda x: x.eq(math.inf))
_predicate("isneginf", lambda x: x.eq(-math.inf))
_predicate("signbit", op("signbit"), lambda x: x < 0)
_predicate("logical_not", lambda x: x.eq(0), lambda x: x.eq(0))


@register(aten.nan_to_num.default)
def nan_to_num(b, x: Tensor, nan=None, posinf=None, neginf=None) -> Tensor:
    if not x.dtype.is_float:
        return x
    limit = torch.finfo(TORCH_DTYPES[x.dtype]).max
    high, low = limit if posinf is None else posinf, -limit if neginf is None else neginf
    return pointwise(b, lambda v: where(call("isnan", v), 0 if nan is None else nan, where(v.eq(math.inf), high, where(v.eq(-math.inf), low, v))), x)


# -- arithmetic of two and three arguments ---------------------------------------------------------------------------
def _is_one(x) -> bool:
    return (isinstance(x, Term) and isinstance(x.expr, Const) and x.expr.value == 1) or (not isinstance(x, Term) and x == 1)


def _times(x: Term, factor) -> Term:
    """x * factor; of bools, and."""
    if _is_one(factor):
        return x
    return x & factor if x.dtype is BOOL else x * factor


def _add(x: Term, y: Term, alpha=1) -> Term:
    y = _times(y, alpha)
    return x | y if x.dtype is BOOL else x + y


def _lerp(start: Term, end: Term, weight: Term) -> Term:
    low = start + weight * (end - start)
    high = end - (end - start) * (1 - weight)
    if isinstance(weight.expr, Const):
        return low if abs(weight.expr.value) < 0.5 else high
    return where(abs(weight) < 0.5, low, high)


def _nan_free(name: str):
    """fmin or fmax; integers have no NaN."""
    return lambda x, y: call(name if x.is_float else name[1:], x, y)


def _clamp(x: Term, min=None, max=None) -> Term:
    x = x if min is None else call("max", x, min)
    return x if max is None else call("min", x, max)


formulas({
    "add": _add,
    "sub": lambda x, y, alpha=1: x - _times(y, alpha),
    "rsub": lambda x, y, alpha=1: y - _times(x, alpha),
    "mul": _times,
    "addcmul": lambda x, a, c, value=1: x + _times(a, value) * c,
    "addcdiv": lambda x, a, c, value=1: x + _times(a, value) / c,
    "lerp": _lerp,
    "clamp": _clamp,
    "clamp_min": lambda x, low: call("max", x, low),
    "clamp_max": lambda x, high: call("min", x, high),
    "relu": lambda x: call("max", x, 0),
    "relu6": lambda x: clip(x, 0, 6),
    "hardtanh": lambda x, low=-1, high=1: clip(x, low, high),
})


@register(*every("div", "divide", "true_divide"))
def divide(b, x, y, rounding_mode=None) -> Tensor:
    """A quotient that is rounded to an integer is first rounded to its own type, as torch does."""
    def quotient(p: Term, q: Term) -> Term:
        if rounding_mode is None:
            return p / q
        if rounding_mode == "floor":
            return call("floordiv", p, q)
        if not p.is_float:
            return call("truncdiv", p, q)
        return call("trunc", (p / q).to(b.spec.dtype).to(p.dtype))
    return pointwise(b, quotient, x, y)


def _xlog(log: str):
    return lambda x, y: where(call("isnan", y), y, where(x.eq(0), 0, x * call(log, y)))


def _log_add(exp: str, log):
    def formula(x: Term, y: Term) -> Term:
        same_infinity = call("isinf", x) & x.eq(y)
        return where(same_infinity, x, call("max", x, y) + log(call(exp, -abs(x - y))))
    return formula


def _heaviside(x: Term, at_zero: Term) -> Term:
    return where(x.eq(0), at_zero, (x > like(x, 0)).to(x.dtype))


formulas({
    "maximum": lambda x, y: call("max", y, x),       # of two zeros the second, as in torch's loops over registers
    "minimum": lambda x, y: call("min", y, x),
    "fmax": _nan_free("fmax"),
    "fmin": _nan_free("fmin"),
    "fmod": op("rem"),
    "remainder": op("mod"),
    "floor_divide": op("floordiv"),
    "atan2": op("atan2"),
    "hypot": op("hypot"),
    "copysign": op("copysign"),
    "logaddexp": _log_add("exp", op("log1p")),
    "logaddexp2": _log_add("exp2", lambda e: call("log1p", e) * (1 / math.log(2))),
    "xlogy": _xlog("log"),
    "special_xlog1py": _xlog("log1p"),
    "heaviside": _heaviside,
    "bitwise_and": op("and"),
    "bitwise_or": op("or"),
    "bitwise_xor": op("xor"),
}, wide=False)


@register(aten.ldexp.Tensor)
def ldexp(b, x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2**exponent; the power has a type of its own, as in torch's two steps."""
    between = result_type(1.0, exponent)
    power_of_two = pointwise(b, op("exp2"), exponent, common=between, shape=exponent.shape).cast(between, implicit=True)
    return pointwise(b, op("mul"), x, power_of_two)


def _shift(name: str):
    def build(b, x, count) -> Tensor:
        if not b.spec.dtype.is_int:
            raise NotCompiled(f"a shift of {b.spec.dtype}")
        return pointwise(b, op(name), x, count, wide=False)
    return build


register(*every("bitwise_left_shift", "__lshift__"))(_shift("shl"))
register(*every("bitwise_right_shift", "__rshift__"))(_shift("shr"))


@register(aten.nextafter.default)
def nextafter(b, x: Tensor, y: Tensor) -> Tensor:
    if b.spec.dtype.is_half:
        raise NotCompiled("nextafter steps in its own 16-bit type")
    return pointwise(b, op("nextafter"), x, y)


# exponents for which torch itself takes a shorter way
_POWERS = {0.0: lambda x: like(x, 1), 0.5: op("sqrt"), 1.0: lambda x: x, 2.0: lambda x: x * x, 3.0: lambda x: x * x * x,
           -0.5: op("rsqrt"), -1.0: op("recip"), -2.0: lambda x: call("recip", x * x)}


def _as_power(root: str) -> Callable[[Term], Term]:
    """A root as pow gives it, which says so of f16 alone, on a CPU: that of -inf is that of inf, that of -0.0 that of 0.0."""
    return lambda x: where((x < 0) & (x > -math.inf), math.nan, call(root, abs(x)))


_POWERS_OF_F16 = {0.5: _as_power("sqrt"), -0.5: _as_power("rsqrt")}


@register(*every("pow"))
def power(b, x, exponent) -> Tensor:
    common = b.spec.dtype
    if common is BOOL:
        raise NotCompiled("pow of bools")
    if isinstance(exponent, int) and exponent < 0 and not common.is_float:
        raise NotCompiled("torch refuses negative powers of integers")
    powers = _POWERS | _POWERS_OF_F16 if common is F16 and b.spec.device == "cpu" else _POWERS
    short = powers.get(float(exponent)) if isinstance(exponent, (int, float)) and (common.is_float or exponent >= 0) else None
    if short is not None and (common.is_float or exponent == int(exponent)):
        return pointwise(b, short, x)
    return pointwise(b, op("pow"), x, exponent, wide=False)


# -- comparisons and choices -----------------------------------------------------------------------------------------
def _compare(name: str) -> None:
    @register(*every(name))
    def build(b, x, y) -> Tensor:
        return pointwise(b, op(name), x, y, common=result_type(x, y), wide=False)


def _logical(name: str, operation: str) -> None:
    @register(*every(name))
    def build(b, x, y) -> Tensor:
        return pointwise(b, op(operation), x, y, common=BOOL)


for _name in "eq ne lt le gt ge".split():
    _compare(_name)
for _name in "and or xor".split():
    _logical(f"logical_{_name}", _name if _name != "xor" else "ne")


@register(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def choose(b, condition: Tensor, x, y) -> Tensor:
    holds = operand(condition, BOOL, b.spec.shape)
    return pointwise(b, lambda p, q: where(holds, p, q), x, y, wide=False)


@register(*every("masked_fill"))
def masked_fill(b, x: Tensor, mask: Tensor, value) -> Tensor:
    hidden = operand(mask, BOOL, b.spec.shape)
    return pointwise(b, lambda p, v: where(hidden, v, p), x, value, wide=False)


@register(torch.ops.prims.fma.default)
def fma(b, x, y, z) -> Tensor:
    return pointwise(b, lambda p, q, r: p * q + r, x, y, z)


@register(aten.linalg_cross.default)
def cross(b, x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    turned = lambda t, by: rolled(t.expand(b.spec.shape), dim, by)
    return pointwise(b, lambda p, q, r, s: p * q - r * s, turned(x, -1), turned(y, 1), turned(x, 1), turned(y, -1), wide=False)


# -- copies and casts --------------------------------------------------------------------------------------------------
@register(aten.clone.default)
def clone(b, x: Tensor, memory_format=None) -> Tensor:
    """The same value: whoever needs separate memory or another layout makes it."""
    return x


@register(aten._to_copy.default, aten.to.dtype, torch.ops.prims.convert_element_type.default)
def to_copy(b, x: Tensor, *args, **kwargs) -> Tensor:
    """A cast that the user wrote: it rounds. `vmap` casts numbers, too."""
    if not isinstance(x, Tensor):
        return pointwise(b, lambda v: v, x, wide=False)
    if b.spec.device != x.device:
        raise NotCompiled("a copy to another device")
    made = x.cast(b.spec.dtype)
    known = whole_numbers(made.expr) if x.dtype.is_float and made.dtype.is_int else None
    return made if known is None else made.with_expr(cast(Coord(known), made.dtype))


@register(aten.copy.default)
def copy(b, into: Tensor, source: Tensor, non_blocking=False) -> Tensor:
    """`x.copy_(1.5)` hands over the number."""
    if not isinstance(source, Tensor):
        return full(b, into, source)
    if b.spec.device != source.device:
        raise NotCompiled("a copy from another device")
    return source.expand(b.spec.shape).cast(b.spec.dtype)
