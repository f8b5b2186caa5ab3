"""What lowering shares: levels of the loop tree with what is known there, and small questions about expressions and indices."""
from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ..ir.dtype import BOOL
from ..ir.expr import Expr, Reduce, Scan
from ..ir.index import Axis, Fetch, FloorDiv, Index, Max, Min, Mod, Size
from .kernel import Loop


class Unschedulable(Exception):
    """This body does not fit one loop tree (the message says why); the planner falls back to smaller groups."""


@dataclass
class Entry:
    var: str
    home: "Block"
    after: int                    # how many loops of `home` stand before it


@dataclass
class FoldRecord:
    home: "Block"
    nest: Loop | None             # the loop of `home` that must be over before the result is known


@dataclass
class Block:
    """Statements at one level of the loop tree. `slot`: number of the loop in the parent that this block is the body of."""
    items: list
    open: frozenset
    parent: "Block | None" = None
    slot: int = 0
    memo: dict = field(default_factory=dict)
    loops: list = field(default_factory=list)       # (Loop, Block)

    def chain(self):
        """(block, how many of its loops are over) from here outwards."""
        block, slot = self, len(self.loops)
        while block is not None:
            yield block, slot
            block, slot = block.parent, block.slot


def inner_walk(e: Expr) -> list[Expr]:
    """Sub-expressions of `e`, not entering folds: those are available as values."""
    seen: dict = {}
    stack = [e]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen[x] = None
            if not isinstance(x, (Reduce, Scan)):
                stack.extend(x.children())
    return list(seen)


def folds_in(e: Expr) -> list[Expr]:
    return [x for x in inner_walk(e) if isinstance(x, (Reduce, Scan))]


def varies(a) -> bool:
    """Depends on coordinates (or on memory), so that the host cannot compute it."""
    if isinstance(a, (Axis, Fetch, Named)):
        return True
    if isinstance(a, (FloorDiv, Mod, Min, Max)):
        return any(varies(x) for i in (a.a, a.b) for x in i.atoms())
    return False


_LEVELS: WeakKeyDictionary = WeakKeyDictionary()        # a value's level, as long as somebody else holds the value


def level(e: Expr) -> int:
    """How many folds deep a value is."""
    found = _LEVELS.get(e)
    if found is None:
        folds = [e] if isinstance(e, (Reduce, Scan)) else folds_in(e)
        found = _LEVELS[e] = max((1 + max((level(a) for a in f.args), default=0) for f in folds), default=0)
    return found


class Named(Size):
    """An integer that the kernel itself has computed (a fetched index): varies, unlike a Size."""
    __slots__ = ()

    def __new__(cls, name: str):
        return cls._make(0, name, 0)


def all_atoms(i: Index) -> list:
    found: list = []
    for a in i.atoms():
        found.append(a)
        if isinstance(a, (FloorDiv, Mod, Min, Max)):
            found += all_atoms(a.a) + all_atoms(a.b)
    return found


def literal(value, d) -> str:
    """Text of a number, the same for every target: 'true', 'inf', '-inf', 'nan', or digits."""
    if d is BOOL:
        return "1" if value else "0"
    if d.is_float:
        if value != value:
            return "nan"
        if value in (float("inf"), float("-inf")):
            return "inf" if value > 0 else "-inf"
        return repr(float(value))
    return str(int(value))
