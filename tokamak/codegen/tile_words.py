"""Lines of Triton that lowering to tiles writes: the vocabulary of `triton_ops`, and what needs more than one expression."""
from __future__ import annotations

from ..ir.dtype import BOOL, DType
from ..ir.ops import identity
from .scope import Unschedulable
from .triton_ops import cast, combine, full, literal, op, pointer_type, random, reduce, scan, triton_type

__all__ = ["cast", "combine_lines", "full", "literal", "number", "neutral", "op", "pointer_type", "random", "reduce", "scan", "triton_type", "update"]

ATOMIC = {"sum": "add", "max": "max", "min": "min"}      # updates that several programs may make to one element


def neutral(monoid: str, d: DType, component: int):
    """The number that changes nothing when it is combined in; the index of an argmax or argmin is greater than any."""
    return 2**63 - 1 if component else identity(monoid, d)


def number(name: str, d: DType) -> str:
    """A parameter (f64 for floating numbers, i64 for others) as `d`."""
    return f"{name} != 0" if d is BOOL else f"{name}.to({triton_type(d)})"


def combine_lines(monoid: str, d: DType, made: tuple, a: tuple, b: tuple) -> list[str]:
    """made = a (+) b, component by component."""
    texts = combine(monoid, d, a, b)
    return [f"{', '.join(made)} = {', '.join(texts)}"]


def update(monoid: str, d: DType, target: str, value: str, mask: str) -> str:
    """memory[target] combined with `value` where `mask` ('' is everywhere); the order of updates is open."""
    where = f", mask={mask}" if mask else ""
    if monoid == "last":
        return f"tl.store({target}, {value}{where})"
    if monoid not in ATOMIC or d is BOOL or d.bytes < 4 or d.is_float and monoid != "sum":
        raise Unschedulable(f"'{monoid}' on {d} has no atomic update")
    return f"tl.atomic_{ATOMIC[monoid]}({target}, {value}{where}, sem='relaxed')"
