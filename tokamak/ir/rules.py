"""The rewrite rules, as data: each says at which heads it is tried and what it makes of an expression (None where it does not apply).

Every rule keeps the value of its expression exactly, NaN, infinities and signed zeros included; two exceptions: `x ** small` follows torch, and the
`FAST` rules, of that policy only, drop an implicit rounding. A head is the name of an operation, or the class of an expression. Constants stand on
the right of a commutative operation (a rule puts them there). The driver is in `rewrite`; children are simplified before their parent is looked at.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import numpy as np

from .dtype import BOOL, I64, DType
from .expr import Cast, Const, Coord, Expr, Load, Op, Reduce, Scan, _fetches, round_to
from .index import as_index
from .ranges import nonnegative, positive
from .ops import CARRIERS, MEANS
from .meaning import MEANING, array_type, convert


@dataclass(frozen=True)
class Rule:
    """`apply(e)` -> the better expression or None; tried where `heads` (separated by spaces) names the expression's head."""
    name: str
    heads: str
    apply: Callable[[Expr], Expr | None]


# -- questions about expressions -----------------------------------------------------------------------------------
def is_const(e: Expr, value=None) -> bool:
    """A Const; of this number (and this sign of zero) when `value` is given."""
    if not isinstance(e, Const) or value is None:
        return isinstance(e, Const)
    return e.value == value and (not e.dtype.is_float or math.copysign(1, e.value) == math.copysign(1, value))


_MANTISSA = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}
_EXACT_FLOATS = {("f16", "f32"), ("f16", "f64"), ("bf16", "f32"), ("bf16", "f64"), ("f32", "f64")}


def widens(source: DType, to: DType) -> bool:
    """Every value of `source` is one of `to`."""
    if source is to or source is BOOL:
        return to.kind != "x"
    if to is BOOL or source.kind == "x" or to.kind == "x":
        return False
    if source.is_float:
        return (source.name, to.name) in _EXACT_FLOATS
    bits = source.bytes * 8
    if to.is_float:
        return bits <= _MANTISSA[to.name]
    return source.kind == to.kind and bits <= to.bytes * 8 or source.kind == "u" and to.kind == "i" and bits < to.bytes * 8


_KEEPERS = ("neg", "abs", "min", "max", "fmin", "fmax", "where", "copysign")


def fits(e: Expr, d: DType, depth: int = 6) -> bool:
    """Proved: every value of `e` is one of the floating type `d`, so that rounding it to `d` changes nothing."""
    if isinstance(e, Const):
        return e.dtype.is_float and (e.value != e.value or round_to(e.value, d) == e.value)
    if isinstance(e, Cast):
        return widens(e.arg.dtype, d) or depth > 0 and e.arg.dtype.is_float and e.dtype.bytes > e.arg.dtype.bytes and fits(e.arg, d, depth - 1)
    if isinstance(e, Op) and e.name in _KEEPERS and depth > 0:
        return all(fits(a, d, depth - 1) for a in (e.args[1:] if e.name == "where" else e.args))
    return False


# -- constants -----------------------------------------------------------------------------------------------------
_CORRECTLY_ROUNDED = frozenset("add sub mul div neg abs min max fmin fmax sqrt floor ceil trunc round sign isnan isinf signbit eq ne lt le gt ge "
                               "copysign where recip".split())


def _fold_op(e: Op) -> Expr | None:
    if not all(isinstance(a, Const) for a in e.args):
        return None
    if e.args[-1].dtype.is_float and e.name not in _CORRECTLY_ROUNDED:
        return None                         # a kernel's own polynomial may round otherwise
    if e.name in ("floordiv", "truncdiv", "mod", "rem") and e.args[1].value == 0:
        return None                         # it raises when it runs
    with np.errstate(all="ignore"):
        value = MEANING[e.name](*(np.asarray(a.value, array_type(a.dtype)) for a in e.args))
    return Const(np.asarray(value).item(), e.dtype)


def _fold_cast(e: Cast) -> Expr | None:
    if not isinstance(e.arg, Const) or e.dtype.kind == "x":
        return None
    value, source = e.arg.value, e.arg.dtype
    low, high = (0.0 if e.dtype.kind == "u" else -(2.0 ** (8 * e.dtype.bytes - 1))), 2.0 ** (8 * e.dtype.bytes - 1)
    if e.dtype.is_int and source.is_float and not low <= value < high:
        return None                         # undefined, as of NaN: left to the machine
    with np.errstate(all="ignore"):
        return Const(convert(np.asarray(value, array_type(source)), e.dtype, source).item(), e.dtype)


def _const_right(e: Op) -> Expr | None:
    a, b = e.args
    return Op(e.name, b, a) if isinstance(a, Const) and not isinstance(b, Const) else None


_MIRROR = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def _const_right_order(e: Op) -> Expr | None:
    a, b = e.args
    return Op(_MIRROR[e.name], b, a) if isinstance(a, Const) and not isinstance(b, Const) else None


def _chained_constants(e: Op) -> Expr | None:
    """(x + c1) + c2 of integers, which wrap: x + (c1 + c2)."""
    a, b = e.args
    if e.dtype.is_float or not (isinstance(b, Const) and isinstance(a, Op) and a.name == e.name and isinstance(a.args[1], Const)):
        return None
    return Op(e.name, a.args[0], _fold_op(Op(e.name, a.args[1], b)))


# -- arithmetic ----------------------------------------------------------------------------------------------------
def _right(value, float_value=None) -> Callable[[Op], Expr | None]:
    """The left argument where the right one is `value` (`float_value` of floats)."""
    def apply(e: Op) -> Expr | None:
        wanted = value if not e.dtype.is_float or float_value is None else float_value
        return e.args[0] if is_const(e.args[1], wanted) else None
    return apply


def _multiply_by_zero(e: Op) -> Expr | None:
    return e.args[1] if e.dtype.is_int and is_const(e.args[1], 0) else None


def _divide_by_power(e: Op) -> Expr | None:
    if not isinstance(e.args[1], Const) or e.args[1].value in (0, 1) or not math.isfinite(e.args[1].value):
        return None
    inverse = 1 / e.args[1].value
    exact = abs(math.frexp(e.args[1].value)[0]) == 0.5 and abs(inverse) >= 2.0**-126 and math.isfinite(round_to(inverse, e.dtype))
    return Op("mul", e.args[0], Const(inverse, e.dtype)) if exact else None


def _inside(inner: str, build: Callable[[Expr], Expr]) -> Callable[[Op], Expr | None]:
    """`build(x)` of an operation on inner(x)."""
    return lambda e: build(e.args[0].args[0]) if isinstance(e.args[0], Op) and e.args[0].name == inner else None


def _add_negated(e: Op) -> Expr | None:
    a, b = e.args
    other = "sub" if e.name == "add" else "add"
    if isinstance(b, Op) and b.name == "neg":
        return Op(other, a, b.args[0])
    if e.name == "add" and isinstance(a, Op) and a.name == "neg":
        return Op("sub", b, a.args[0])
    return None


POWERS = 8              # exponents up to which a power is products: at most 7 roundings. Kurtosis of 256 x 4096 2.1 -> 0.2 ms on one core


def _power(e: Op) -> Expr | None:
    base, exponent = e.args
    if not isinstance(exponent, Const):
        return None
    if exponent.value in range(4, POWERS + 1):
        half = _power(Op("pow", base, Const(exponent.value // 2, exponent.dtype)))
        return Op("mul", Op("mul", half, half), base) if exponent.value % 2 else Op("mul", half, half)
    square = lambda: Op("mul", base, base)
    table = {0: lambda: Const(1, e.dtype), 1: lambda: base, 2: square, 3: lambda: Op("mul", square(), base)}
    if e.dtype.is_float:
        table |= {0.5: lambda: Op("sqrt", base), -0.5: lambda: Op("rsqrt", base), -1: lambda: Op("recip", base), -2: lambda: Op("recip", square())}
    made = table.get(exponent.value)
    return made() if made else None


def _same(e: Op) -> Expr | None:
    return e.args[0] if e.args[0] is e.args[1] else None


def _minus_itself(e: Op) -> Expr | None:
    """0.0, but of infinities and NaN. As it stands a product less itself is what was rounded off the product, where one of the two is not rounded
    before the subtraction (gradients of a LayerNorm over one column: 2e-5 on a GPU)."""
    x, other = e.args
    if x is not other:
        return None
    return Op("mul", Op("abs", x), Const(0.0, x.dtype)) if x.dtype.is_float else Const(0, x.dtype)


# -- choices and logic ---------------------------------------------------------------------------------------------
def _where(e: Op) -> Expr | None:
    c, a, b = e.args
    if isinstance(c, Const):
        return a if c.value else b
    if a is b:
        return a
    if isinstance(c, Op) and c.name == "not":
        return Op("where", c.args[0], b, a)
    if isinstance(a, Op) and a.name == "where" and a.args[0] is c:
        return Op("where", c, a.args[1], b)
    if isinstance(b, Op) and b.name == "where" and b.args[0] is c:
        return Op("where", c, a, b.args[2])
    if e.dtype is BOOL and is_const(a) and is_const(b):
        return c if a.value else Op("not", c)
    return None


def _logic(e: Op) -> Expr | None:
    a, b = e.args
    if a is b:
        return Const(0, e.dtype) if e.name == "xor" else a
    if not isinstance(b, Const):
        return None
    ones = Const(True if e.dtype is BOOL else -1, e.dtype)
    if b is ones:
        return {"and": a, "or": b, "xor": Op("not", a)}[e.name]
    if b.value == 0:
        return {"and": b, "or": a, "xor": a}[e.name]
    return None


_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def _not_compared(e: Op) -> Expr | None:
    """not (a < b) is a >= b, except where NaN compares false both ways."""
    a = e.args[0]
    if not isinstance(a, Op) or a.name not in _OPPOSITE or (a.args[0].dtype.is_float and a.name not in ("eq", "ne")):
        return None
    return Op(_OPPOSITE[a.name], *a.args)


def _compare_bools(e: Op) -> Expr | None:
    a, b = e.args
    if a.dtype is not BOOL or not isinstance(b, Const):
        return None
    return a if b.value == (e.name == "eq") else Op("not", a)


def _compare_itself(e: Op) -> Expr | None:
    a, b = e.args
    return Const(e.name in ("eq", "le", "ge"), BOOL) if a is b and not a.dtype.is_float else None


# -- integers of the host and of coordinates -----------------------------------------------------------------------
def _index(e: Expr):
    """An Index that is this i64 expression, or None. One that gathers is left alone: looking it up checks it."""
    if isinstance(e, Const):
        return as_index(e.value) if e.dtype is I64 else None
    return e.index if isinstance(e, Coord) and not _fetches((e.index,)) else None


def _compare_coordinates(e: Op) -> Expr | None:
    a, b = (_index(x) for x in e.args)
    if a is None or b is None:
        return None
    less, more = nonnegative(b - a - 1), nonnegative(a - b - 1)
    at_most, at_least = less or nonnegative(b - a), more or nonnegative(a - b)
    yes = {"lt": less, "gt": more, "le": at_most, "ge": at_least, "eq": a is b, "ne": less or more}[e.name]
    no = {"lt": at_least, "gt": at_most, "le": more, "ge": less, "eq": less or more, "ne": a is b}[e.name]
    return Const(bool(yes), BOOL) if yes or no else None


def _coordinate_arithmetic(e: Op) -> Expr | None:
    if e.dtype is not I64 or all(isinstance(x, Const) for x in e.args):
        return None
    found = [_index(x) for x in e.args]
    if None in found:
        return None
    a, b = found[0], found[-1]
    if e.name in ("floordiv", "mod"):
        return Coord(a // b if e.name == "floordiv" else a % b) if positive(b) else None
    return Coord({"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "neg": lambda: -a}[e.name]())


def _coordinate_constant(e: Coord) -> Expr | None:
    return Const(e.index.constant, I64) if e.index.constant is not None else None


def _load_of_nothing(e: Load) -> Expr | None:
    """A value without elements is read nowhere, but code that stands before the loop might reach for its memory."""
    if _fetches(e.index) or not any(s == 0 for s in e.node.shape):
        return None
    return e.other if e.guard is not None else Const(0, e.dtype) if e.dtype.kind != "x" else None


# -- conversions ---------------------------------------------------------------------------------------------------
def _cast_of_cast(e: Cast) -> Expr | None:
    inner = e.arg
    if not isinstance(inner, Cast):
        return None
    source = inner.arg.dtype
    if widens(source, inner.dtype):
        return Cast(e.dtype, inner.arg, e.implicit)
    if e.dtype.is_int and inner.dtype.is_int and source.is_int and e.dtype.bytes <= inner.dtype.bytes:
        return Cast(e.dtype, inner.arg, e.implicit)          # wrapping twice is wrapping once
    return None


def _exact_rounding(e: Cast) -> Expr | None:
    """f32(bf16(x)) is x where x is a bf16 number already: the value of a bf16 load, its negation, a choice between two, ..."""
    inner = e.arg
    if isinstance(inner, Cast) and inner.arg.dtype is e.dtype and e.dtype.is_float and inner.dtype.is_float and fits(inner.arg, inner.dtype):
        return inner.arg
    return None


def _conjuncts(e: Expr) -> list[Expr]:
    return [x for a in e.args for x in _conjuncts(a)] if isinstance(e, Op) and e.name == "and" and e.dtype is BOOL else [e]


def picked(e: Reduce) -> Expr | None:
    """sum over a of (a == k and c ? x : 0), with k, c and x free of a: x where c and k is a coordinate of a."""
    choice = e.args[0]
    if e.monoid != "sum" or not isinstance(choice, Op) or choice.name != "where" or not is_const(choice.args[2]) or choice.args[2].value != 0:
        return None
    conditions = _conjuncts(choice.args[0])
    for a in e.over:
        for picks in conditions:
            sides = picks.args if isinstance(picks, Op) and picks.name == "eq" else ()
            k = next((y for x, y in zip(sides, sides[::-1]) if isinstance(x, Coord) and x.index is as_index(a)), None)
            others = [c for c in conditions if c is not picks]
            if k is None or any(a in x.free for x in (k, choice.args[1], *others)):
                continue
            condition = Op("and", Op("ge", k, Const(0, k.dtype)), Op("lt", k, Coord(a.extent)))
            for c in others:
                condition = Op("and", condition, c)
            value, over = Op("where", condition, *choice.args[1:]), tuple(x for x in e.over if x is not a)
            return Reduce("sum", over, (value,)) if over else Op("add", value, choice.args[2])      # a sum is never -0.0
    return None


RULES: tuple[Rule, ...] = (
    # constants
    Rule("fold an operation on constants", "add sub mul div floordiv truncdiv mod rem neg abs min max fmin fmax sqrt recip pow floor ceil trunc "
         "round sign isnan isinf signbit eq ne lt le gt ge and or xor not shl shr where copysign", _fold_op),
    Rule("fold a cast of a constant", "Cast", _fold_cast),
    Rule("constants to the right", "add mul min max fmin fmax and or xor eq ne", _const_right),
    Rule("compared constants to the right", "lt le gt ge", _const_right_order),
    Rule("(x + c1) + c2", "add mul and or xor", _chained_constants),
    # arithmetic
    Rule("x + 0", "add", _right(0, -0.0)),                      # of floats x + -0.0: -0.0 + 0.0 is 0.0
    Rule("x - 0", "sub", _right(0, 0.0)),                       # -0.0 - 0.0 is -0.0
    Rule("x * 1", "mul", _right(1)),
    Rule("x / 1", "div", _right(1)),
    Rule("x // 1", "floordiv truncdiv", lambda e: None if e.dtype.is_float else _right(1)(e)),
    Rule("x * 0", "mul", _multiply_by_zero),                    # integers only: NaN * 0 is NaN
    Rule("x * -1", "mul", lambda e: Op("neg", e.args[0]) if e.dtype.kind in "if" and is_const(e.args[1], -1) else None),
    Rule("x / 2**k", "div", _divide_by_power),                  # both are the rounded value of one real number
    Rule("neg neg", "neg", _inside("neg", lambda x: x)),
    Rule("abs neg", "abs", _inside("neg", lambda x: Op("abs", x))),
    Rule("abs abs", "abs", _inside("abs", lambda x: Op("abs", x))),
    Rule("x + neg y", "add sub", _add_negated),
    Rule("x - x", "sub", _minus_itself),
    Rule("x ** small", "pow", _power),                          # up to 3 what torch computes, to the bit: sqrt(-0.0) is -0.0
    Rule("max(x, x)", "min max fmin fmax", _same),
    # choices and logic
    Rule("where", "where", _where),
    Rule("not not", "not", _inside("not", lambda x: x)),
    Rule("not compared", "not", _not_compared),
    Rule("logic", "and or xor", _logic),
    Rule("bool == constant", "eq ne", _compare_bools),
    Rule("x == x", "eq ne lt le gt ge", _compare_itself),       # integers and bool: NaN is not itself
    # coordinates
    Rule("compare coordinates", "eq ne lt le gt ge", _compare_coordinates),
    Rule("coordinate arithmetic", "add sub mul neg floordiv mod", _coordinate_arithmetic),
    Rule("constant coordinate", "Coord", _coordinate_constant),
    Rule("load of nothing", "Load", _load_of_nothing),
    Rule("sum of one picked element", "Reduce", picked),
    # conversions
    Rule("cast of an exact cast", "Cast", _cast_of_cast),
    Rule("rounding of a rounded value", "Cast", _exact_rounding),
)


# -- policy fast ---------------------------------------------------------------------------------------------------
# Readers that must see a rounded value: what compares, picks an index or quantises (the numeric contract).
ROUNDED_READERS = frozenset("eq ne lt le gt ge isnan isinf signbit sign floor ceil trunc round floordiv truncdiv mod rem nextafter".split())


def unrounded(e: Expr) -> Expr:
    """x of f32(bf16~(x)), x in f32; else `e`."""
    if isinstance(e, Cast) and isinstance(e.arg, Cast) and e.arg.implicit and e.arg.dtype.is_half and e.arg.arg.dtype is e.dtype:
        return e.arg.arg
    return e


def _unrounded_arguments(e: Expr) -> Expr | None:
    if isinstance(e, Op):
        if e.name in ROUNDED_READERS:
            return None
        new = Op(e.name, *map(unrounded, e.args))
    elif isinstance(e, Reduce):
        new = e if len(e.args) > 1 and e.monoid not in (*CARRIERS, *MEANS) else Reduce(e.monoid, e.over, tuple(map(unrounded, e.args)), e.component)
    else:
        new = e if len(e.args) > 1 else Scan(e.monoid, e.along, tuple(map(unrounded, e.args)), e.component, e.reverse)
    return None if new is e else new


FAST: tuple[Rule, ...] = (
    Rule("drop an implicit rounding that is read in the compute type", "Op Reduce Scan", _unrounded_arguments),
)
