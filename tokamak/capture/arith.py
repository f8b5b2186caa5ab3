"""Arithmetic on lazy Tensors, so that the operator tables read like formulas.

Arguments are Tensors or numbers (int, float, Index, Scalar expressions). They broadcast; 16-bit floats are taken to f32; Tensors of different types
meet in the highest of them (bool < integers < floats); numbers take the Tensors' type. Every function returns a lazy Tensor in that type
(comparisons: bool).
"""
from __future__ import annotations

from typing import Sequence

from ..ir import dtype as dt
from ..ir.dtype import BOOL, DType
from ..ir.expr import Op
from ..ir.index import Index, as_index
from .tensor import Tensor, broadcast, cast, constant, size_value


def as_tensor(value, d: DType) -> Tensor:
    """`value` (a Tensor or a number) in type `d`."""
    return value.cast(d) if isinstance(value, Tensor) else Tensor((), constant(value, d))


def common_type(*values) -> DType:
    """The type in which arithmetic on the Tensors among `values` is carried."""
    return max((dt.compute_type(v.dtype) for v in values if isinstance(v, Tensor)), key=lambda d: d.rank)


def apply(name: str, *values, d: DType | None = None) -> Tensor:
    """Row `name` of `ops.OPS` on `values`, in type `d` (their common type unless given)."""
    d = d or common_type(*values)
    return _build(name, [as_tensor(v, d) for v in values], values)


def _build(name: str, tensors: Sequence[Tensor], values) -> Tensor:
    shape, exprs = broadcast(*tensors)
    given = [v for v in values if isinstance(v, Tensor)]
    device = next((v.device for v in given if v.rank), given[0].device)
    return Tensor(shape, Op(name, *exprs), device)


def add(a, b) -> Tensor:
    return apply("add", a, b)


def sub(a, b) -> Tensor:
    return apply("sub", a, b)


def mul(a, *rest) -> Tensor:
    for b in rest:
        a = apply("mul", a, b)
    return a


def div(a, b) -> Tensor:
    return apply("div", a, b)


def square(a: Tensor) -> Tensor:
    return apply("mul", a, a)


def power(a, b) -> Tensor:
    return apply("pow", a, b)


def minimum(a, b) -> Tensor:
    return apply("min", a, b)


def maximum(a, b) -> Tensor:
    return apply("max", a, b)


def eq(a, b) -> Tensor:
    return apply("eq", a, b)


def ne(a, b) -> Tensor:
    return apply("ne", a, b)


def lt(a, b) -> Tensor:
    return apply("lt", a, b)


def le(a, b) -> Tensor:
    return apply("le", a, b)


def gt(a, b) -> Tensor:
    return apply("gt", a, b)


def neg(a: Tensor) -> Tensor:
    return apply("neg", a)


def absolute(a: Tensor) -> Tensor:
    """|a|; an unsigned or bool value is its own."""
    return apply("abs", a) if a.dtype.kind in "if" else a


def exp(a: Tensor) -> Tensor:
    return apply("exp", a)


def log(a: Tensor) -> Tensor:
    return apply("log", a)


def log1p(a: Tensor) -> Tensor:
    return apply("log1p", a)


def sqrt(a: Tensor) -> Tensor:
    return apply("sqrt", a)


def rsqrt(a: Tensor) -> Tensor:
    return apply("rsqrt", a)


def sign(a: Tensor) -> Tensor:
    return apply("sign", a)


def isnan(a: Tensor) -> Tensor:
    return apply("isnan", a)


def both(a: Tensor, b: Tensor) -> Tensor:
    """a and b, of bools."""
    return apply("and", a, b, d=BOOL)


def either(a: Tensor, b: Tensor) -> Tensor:
    """a or b, of bools."""
    return apply("or", a, b, d=BOOL)


def where(condition: Tensor, a, b) -> Tensor:
    """`a` where `condition` (bool) holds, else `b`; the branches meet in their common type."""
    d = common_type(a, b)
    return _build("where", [condition, as_tensor(a, d), as_tensor(b, d)], (condition, a, b))


def compute(a: Tensor) -> Tensor:
    """`a` in the type arithmetic on it is carried in (f32 for the 16-bit floats)."""
    return a.cast(dt.compute_type(a.dtype))


def count(t: Tensor, dims) -> Index:
    """How many elements a fold of `t` over `dims` (non-negative) takes in."""
    total = as_index(1)
    for d in dims:
        total = total * t.shape[d]
    return total


def size(index, d: DType, device: str = "cpu") -> Tensor:
    """A size as a number of type `d`, a 0-d Tensor."""
    return Tensor((), size_value(index, d), device)


def all_dims(t: Tensor, dim=None) -> list[int]:
    """The dimensions that `dim` (None, an int or a list; None and [] are all) names, non-negative, each once; none of a 0-d tensor."""
    if t.rank == 0:
        return []
    if dim is None or dim == [] or dim == ():
        return list(range(t.rank))
    return sorted({d % t.rank for d in ([dim] if isinstance(dim, int) else dim)})


def coordinate(t: Tensor, index, d: DType = dt.I64) -> Tensor:
    """The value of `index`, a polynomial of `t`'s coordinates, at each element of `t`."""
    return t.with_expr(cast(size_value(index, dt.I64), d))
