"""Type promotion, and formulas: what the tables of elementwise operators are written with.

A `Term` is an expression with Python's operators on it, so that a table row reads as the formula it is:

    "hardsigmoid": lambda x: clip(x + 3, 0, 6) / 6

Numbers beside a Term take its type. Terms of one formula all have one type, the compute type of the operator's common type (f32 for the 16-bit
floats).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch

from ..ir import dtype as dt
from ..ir.dtype import BOOL, DType
from ..ir.expr import Expr, Op
from ..ir.index import Index
from .dtypes import TORCH_DTYPES, to_dtype
from .registry import NotCompiled, register
from .tensor import Tensor, cast, compute, constant

NUMBERS = (bool, int, float, Index, Expr)
"""What stands for a Python number among a builder's arguments."""


# -- promotion -----------------------------------------------------------------------------------------------------
def _number_type(value) -> DType:
    if isinstance(value, Expr):
        value = 1.0 if value.dtype.is_float else False if value.dtype is BOOL else 1
    if isinstance(value, bool):
        return BOOL
    return to_dtype(torch.get_default_dtype()) if isinstance(value, float) else dt.I64


def _promote(a: DType | None, b: DType | None) -> DType | None:
    if a is None or b is None:
        return a or b
    return to_dtype(torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b]))


def _category(d: DType) -> int:
    return 2 if d.is_float else 0 if d is BOOL else 1


def result_type(*operands) -> DType:
    """torch's common type of tensors and numbers: tensors with dimensions first, then 0-d tensors, then numbers; a later class counts only when it is
    of a higher kind (bool < integer < floating)."""
    found: list[DType | None] = [None, None, None]
    for x in operands:
        if isinstance(x, Tensor):
            k, d = (0 if x.rank else 1), x.dtype
        else:
            k, d = 2, _number_type(x)
        found[k] = _promote(found[k], d)
    common = found[0]
    for lower in found[1:]:
        if lower is not None and (common is None or _category(lower) > _category(common)):
            common = _promote(common, lower)
    if common is None:
        raise NotCompiled("no operand has a type")
    return common


# -- formulas ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Term:
    """An expression in a formula. Comparisons give bool Terms; `eq` and `ne` are methods, since `==` compares objects."""
    expr: Expr

    @property
    def dtype(self) -> DType:
        return self.expr.dtype

    @property
    def is_float(self) -> bool:
        return self.expr.dtype.is_float

    def to(self, d: DType) -> "Term":
        return Term(cast(self.expr, d))

    def __add__(self, other): return call("add", self, other)
    def __radd__(self, other): return call("add", like(self, other), self)
    def __sub__(self, other): return call("sub", self, other)
    def __rsub__(self, other): return call("sub", like(self, other), self)
    def __mul__(self, other): return call("mul", self, other)
    def __rmul__(self, other): return call("mul", like(self, other), self)
    def __truediv__(self, other): return call("div", self, other)
    def __rtruediv__(self, other): return call("div", like(self, other), self)
    def __neg__(self): return call("neg", self)
    def __abs__(self): return call("abs", self)
    def __lt__(self, other): return call("lt", self, other)
    def __le__(self, other): return call("le", self, other)
    def __gt__(self, other): return call("gt", self, other)
    def __ge__(self, other): return call("ge", self, other)
    def __and__(self, other): return call("and", self, other)
    def __or__(self, other): return call("or", self, other)
    def __xor__(self, other): return call("xor", self, other)
    def __invert__(self): return call("not", self)
    def eq(self, other): return call("eq", self, other)
    def ne(self, other): return call("ne", self, other)


def like(term: Term, x) -> Term:
    """`x` as a Term of `term`'s type."""
    return x if isinstance(x, Term) else Term(constant(x, term.dtype))


def call(name: str, *args) -> Term:
    """The language's operation `name`; numbers take the type of the first Term."""
    first = next(a for a in args if isinstance(a, Term))
    return Term(Op(name, *(like(first, a).expr for a in args)))


def op(name: str) -> Callable[..., Term]:
    """The operation `name` as a formula."""
    return lambda *args: call(name, *args)


def where(condition: Term, a, b) -> Term:
    """`a` where `condition` holds, else `b`; one of them is a Term."""
    typed = a if isinstance(a, Term) else b
    return Term(Op("where", condition.expr, like(typed, a).expr, like(typed, b).expr))


def clip(x: Term, low, high) -> Term:
    """min(max(x, low), high): NaN stays NaN."""
    return call("min", call("max", x, low), high)


# -- builders ------------------------------------------------------------------------------------------------------
def operand(x, common: DType, shape: Sequence[Index], wide: bool = False) -> Term:
    """A tensor or number broadcast to `shape`, in the compute type of `common`. torch first converts it to `common`; where `wide`, numbers and 0-d
    tensors are not rounded to a 16-bit `common` on the way, and other tensors' rounding is implicit."""
    target = dt.compute_type(common)
    if not isinstance(x, Tensor):
        return Term(constant(x, target) if wide else compute(constant(x, common)))
    expr = x.expand(shape).expr if x.shape != tuple(shape) else x.expr
    if wide and x.rank == 0:
        return Term(cast(expr, target))
    return Term(cast(cast(expr, common, implicit=wide), target))


def pointwise(b, fn: Callable[..., Term], *args, common: DType | None = None, wide: bool = True, shape: Sequence[Index] | None = None,
              **kwargs) -> Tensor:
    """`fn` of the arguments: tensors and numbers become Terms of type `common` over `shape` (both as traced unless given), anything else is passed
    as it is. `wide` as in `operand`."""
    shape, d = shape or b.spec.shape, common or b.spec.dtype

    def term(x: Any):
        return operand(x, d, shape, wide) if isinstance(x, Tensor) or (isinstance(x, NUMBERS) and not isinstance(x, bool)) else x
    made = fn(*(term(a) for a in args), **{k: term(v) for k, v in kwargs.items()})
    if not isinstance(made, Term):
        made = Term(constant(made, b.spec.dtype))
    return b.tensor(shape, made.expr)


def every(*names: str) -> list:
    """All functional overloads of the aten operators `names` that take and return tensors."""
    found = []
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for o in packet.overloads():
            schema = getattr(packet, o)._schema if o not in _SCRIPT else None
            if schema is None or schema.is_mutable or any(a.is_out for a in schema.arguments):
                continue
            takes = any("Tensor" in str(a.type) for a in schema.arguments)
            if takes and schema.returns and all("Tensor" in str(r.type) for r in schema.returns):
                found.append(getattr(packet, o))
    return found


_SCRIPT = frozenset({"bool", "str", "complex", "t", "int", "float", "int_int", "float_int", "int_float", "float_complex"})
"""Overloads that torch keeps for TorchScript's own values."""


def formulas(table: dict[str, Callable[..., Term]], wide: bool = True) -> None:
    """Registers a table of elementwise operators: aten name -> formula."""
    for name, fn in table.items():
        register(*every(name))(_builder(fn, wide))


def _builder(fn, wide: bool):
    return lambda b, *args, **kwargs: pointwise(b, fn, *args, wide=wide, **kwargs)
