"""What each operation means, on NumPy arrays: the table OPS -> function, conversions between types, folds, random numbers.

A value of type bf16 is a float32 array whose elements are bf16 numbers (`bf16_bits`, `bf16_from_bits` convert to and from storage);
every other type is its NumPy type. Functions compute element by element in the arguments' type: sums, differences, products, quotients and roots are
the correctly rounded ones, transcendental functions of f32 are computed in f64 and rounded once. Sums and products of f32 fold in f64 and round once:
no kernel can be more exact. Integers wrap. Callers hold `np.errstate(all='ignore')`.
"""
from __future__ import annotations

import math
from typing import Callable

import numpy as np

from .dtype import BF16, BOOL, DType

# -- types ---------------------------------------------------------------------------------------------------------
def array_type(d: DType) -> np.dtype:
    """The NumPy type of arrays that hold values of type `d` (float32 for bf16)."""
    return np.dtype("float32") if d is BF16 else np.dtype(d.numpy)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> the nearest bf16 number, ties to even, as float32."""
    x = np.ascontiguousarray(x, dtype=np.float32).reshape(np.shape(x))
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32("nan"), rounded)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """bf16 values (as float32) -> their storage, uint16."""
    return (round_bf16(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def bf16_from_bits(bits: np.ndarray) -> np.ndarray:
    """bf16 storage (uint16) -> values as float32."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def convert(x, to: DType, source: DType) -> np.ndarray:
    """`x` of type `source` as torch converts it to `to`: floats to 16 bits by way of f32, to nearest even; to integers towards zero (a value that the
    integer cannot hold, NaN and infinities: undefined); to bool: x != 0."""
    x = np.asarray(x)
    if to is source:
        return x
    if to is BOOL:
        return x != 0
    if to.is_half:
        single = x.astype(np.float32)
        return round_bf16(single) if to is BF16 else single.astype(np.float16)
    if to.is_int and source.is_float:
        return x.astype(np.int64).astype(array_type(to))
    return x.astype(array_type(to))


# -- operations ----------------------------------------------------------------------------------------------------
def _wide(fn: Callable) -> Callable:
    """`fn` computed in f64 and rounded to the arguments' type."""
    def call(*args):
        return np.asarray(fn(*(np.asarray(a, dtype=np.float64) for a in args))).astype(np.asarray(args[0]).dtype)
    return call


def _each(fn: Callable[[float], float]) -> Callable:
    """A function of one Python float, element by element in f64."""
    return _wide(lambda x: np.vectorize(fn, otypes=[np.float64])(x))


def _no_zero(b: np.ndarray) -> None:
    if b.dtype.kind in "iu" and np.any(b == 0):
        raise ZeroDivisionError("integer division by zero")


def _fmod(a, b):
    _no_zero(b)
    return np.fmod(a, b)


def _mod(a, b):
    _no_zero(b)
    if b.dtype.kind in "iu":
        return np.mod(a, b)
    rest = np.fmod(a, b)
    return np.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


def _floordiv(a, b):
    _no_zero(b)
    if b.dtype.kind in "iu":
        return np.floor_divide(a, b)
    rest = np.fmod(a, b)
    quotient = (a - rest) / b
    quotient = np.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - quotient.dtype.type(1), quotient)
    whole = np.floor(quotient)
    whole = np.where(quotient - whole > 0.5, whole + whole.dtype.type(1), whole)
    return np.where(b == 0, a / b, np.where(quotient != 0, whole, np.copysign(quotient.dtype.type(0), a / b)))


def _truncdiv(a, b):
    _no_zero(b)
    whole = np.floor_divide(a, b)
    return whole + ((np.fmod(a, b) != 0) & ((a < 0) != (b < 0))).astype(whole.dtype)


def _pow(a, b):
    if a.dtype.kind not in "iu":
        return _wide(np.power)(a, b)
    a, b = np.broadcast_arrays(a, b)
    out, base, left = np.ones_like(a), a.copy(), np.maximum(b, 0)
    while np.any(left):
        out = np.where(left & 1, out * base, out)
        base, left = base * base, left >> 1
    odd = (b & 1).astype(bool)
    inverse = np.where(a == 1, 1, np.where((a == -1) if a.dtype.kind == "i" else False, np.where(odd, -1, 1), 0)).astype(a.dtype)
    return np.where(b < 0, inverse, out)


def _bits(a) -> int:
    return a.dtype.itemsize * 8


def _shl(a, b):
    outside = (b < 0) | (b >= _bits(a))
    return np.where(outside, a.dtype.type(0), np.left_shift(a, np.where(outside, b.dtype.type(0), b)))


def _shr(a, b):
    outside = (b < 0) | (b >= _bits(a))
    fill = np.where(a < 0, -1, 0).astype(a.dtype) if a.dtype.kind == "i" else a.dtype.type(0)
    return np.where(outside, fill, np.right_shift(a, np.where(outside, b.dtype.type(0), b)))


def _sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))


def _lgamma(x: float) -> float:
    if x != x:
        return x
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.inf
    return math.lgamma(x)


def _digamma(x: float) -> float:
    """psi(x): recurrence up to 10, then the asymptotic series; reflection below 0. -inf at +0, inf at -0, NaN at the negative integers."""
    if x == 0:
        return math.copysign(math.inf, -x)
    if x != x or x == -math.inf or (x < 0 and x == math.floor(x)):
        return math.nan
    if x < 0:
        return _digamma(1 - x) - math.pi / math.tan(math.pi * math.fmod(x, 1.0))
    total = 0.0
    while x < 10:
        total -= 1 / x
        x += 1
    z = 1 / (x * x)
    series = z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z * (1 / 132 - z * (691 / 32760 - z / 12))))))
    return total + math.log(x) - 0.5 / x - series if x < 1e17 else total + math.log(x)


def _erfinv(y: float) -> float:
    """The inverse of erf: Giles' approximation, then Newton steps on erfc of the nearer tail."""
    if y != y or abs(y) > 1:
        return math.nan
    if abs(y) == 1 or y == 0:
        return y * math.inf if y else y
    tail = 1 - abs(y)
    w = -math.log(tail * (1 + abs(y)))
    s = math.sqrt(w)
    x = math.sqrt(max(0.0, math.sqrt((4.330746750799873 + w / -2) ** 2 + w * 6.802721088435375) - (4.330746750799873 + w / -2)))
    x = x if x > 0 else s
    for _ in range(60):
        error = math.erfc(x) - tail if abs(y) > 0.5 else abs(y) - math.erf(x)
        step = error / (2 / math.sqrt(math.pi) * math.exp(-x * x))
        step = step / (1 + x * step) if abs(x * step) < 0.5 else step * 0.5
        x += step
        if abs(step) <= 1e-16 * abs(x):
            break
    return math.copysign(x, y)


def _logical(test: Callable) -> Callable:
    """A question about floats that is False of integers."""
    return lambda x: test(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


def _tf32(x: np.ndarray) -> np.ndarray:
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    nearest = ((bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), nearest, x)


def _sign(x):
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


MEANING: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "div": np.divide,
    "floordiv": _floordiv, "truncdiv": _truncdiv, "mod": _mod, "rem": _fmod,
    "min": np.minimum, "max": np.maximum, "fmin": np.fmin, "fmax": np.fmax,
    "sqrt": np.sqrt, "rsqrt": _wide(lambda x: 1 / np.sqrt(x)), "recip": np.reciprocal,
    "exp": _wide(np.exp), "exp2": _wide(np.exp2), "expm1": _wide(np.expm1),
    "log": _wide(np.log), "log2": _wide(np.log2), "log10": _wide(np.log10), "log1p": _wide(np.log1p),
    "sin": _wide(np.sin), "cos": _wide(np.cos), "tan": _wide(np.tan), "asin": _wide(np.arcsin), "acos": _wide(np.arccos), "atan": _wide(np.arctan),
    "sinh": _wide(np.sinh), "cosh": _wide(np.cosh), "tanh": _wide(np.tanh), "asinh": _wide(np.arcsinh), "acosh": _wide(np.arccosh),
    "atanh": _wide(np.arctanh), "erf": _each(math.erf), "erfc": _each(math.erfc), "erfinv": _each(_erfinv), "lgamma": _each(_lgamma),
    "digamma": _each(_digamma), "sigmoid": _wide(_sigmoid), "pow": _pow, "atan2": _wide(np.arctan2), "hypot": _wide(np.hypot),
    "copysign": np.copysign, "nextafter": np.nextafter,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round": np.rint, "tf32": _tf32, "sign": _sign,
    "isnan": _logical(np.isnan), "isinf": _logical(np.isinf), "signbit": lambda x: np.signbit(x) if x.dtype.kind == "f" else x < 0,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": _shl, "shr": _shr,
    "where": np.where,
}


# -- folds ---------------------------------------------------------------------------------------------------------
PAIRWISE: dict[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "any": np.logical_or,
                                 "all": np.logical_and, "logsumexp": np.logaddexp}
"""One-component monoids as NumPy functions of two arguments."""


def _moments(s, q, w, dims: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """`ops.CARRIERS['moments']` over the dimensions `dims`, which stay with extent 1."""
    total, count = s.sum(dims, keepdims=True), w.sum(dims, keepdims=True)
    away = np.where(w > 0, s / np.where(w > 0, w, 1) - total / np.where(count > 0, count, 1), 0)
    return total, (q + w * away * away).sum(dims, keepdims=True), count


def _expsum(m, t, dims: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """`ops.CARRIERS['expsum']` over the dimensions `dims`, which stay with extent 1."""
    top = m.max(dims, keepdims=True, initial=-math.inf)
    scale = np.where(m == -math.inf, 0, np.where(m == top, 1, np.exp(m - top)))
    return top, (t * scale).sum(dims, keepdims=True)


def _expmean(x, v, dims: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """`ops.MEANS['expmean']` over the dimensions `dims`, which stay with extent 1."""
    top = x.max(dims, keepdims=True, initial=-math.inf)
    top = np.where(top == -math.inf, 0, top)
    weights = np.exp(x - top)
    total = weights.sum(dims, keepdims=True)
    return top + np.log(total), (weights * v).sum(dims, keepdims=True) / total


CARRIED: dict[str, Callable] = {"moments": _moments, "expsum": _expsum, "expmean": _expmean}


def fold_type(d: DType) -> np.dtype:
    """The type in which the reference folds values of type `d`: f64 for floats."""
    return np.dtype(np.float64) if d.is_float else array_type(d)


# -- random numbers ------------------------------------------------------------------------------------------------
def philox(seed, counter) -> tuple[np.ndarray, ...]:
    """Philox4x32-10: four uint32 arrays. Key words: low and high half of the 64-bit `seed`; counter words: low and high half of the 64-bit
    `counter`, then 0, 0. `seed` and `counter` are int64 or uint64 and broadcast."""
    seed, counter = np.broadcast_arrays(np.asarray(seed).astype(np.uint64), np.asarray(counter).astype(np.uint64))
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    k0, k1 = seed & low, seed >> half
    c0, c1, c2, c3 = counter & low, counter >> half, np.zeros_like(counter), np.zeros_like(counter)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & low, (p0 >> half) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return tuple(c.astype(np.uint32) for c in (c0, c1, c2, c3))


def random(kind: str, seed, number) -> np.ndarray:
    """float32 of `kind`: those that stand at `number` (i64, read as unsigned) under `seed`. uniform: (x >> 8) * 2^-24, exact, x being word number % 4
    at counter number // 4. normal: Box-Muller of the first two words at counter `number`, sqrt(-2 ln u1) cos(2 pi u2) with
    u1 = ((x0 >> 8) + 1) * 2^-24 in (0, 1] and u2 = (x1 >> 8) * 2^-24, computed in f64 and rounded once (a kernel may differ in the last places)."""
    if kind == "uniform":
        number = np.asarray(number).astype(np.uint64)
        word = np.choose((number & np.uint64(3)).astype(np.int64), philox(seed, number >> np.uint64(2)))
        return ((word >> np.uint32(8)).astype(np.float64) * 2.0**-24).astype(np.float32)
    x0, x1, _, _ = philox(seed, number)
    first = (x0 >> np.uint32(8)).astype(np.float64)
    second = (x1 >> np.uint32(8)).astype(np.float64) * 2.0**-24
    return (np.sqrt(-2 * np.log((first + 1) * 2.0**-24)) * np.cos(2 * math.pi * second)).astype(np.float32)
