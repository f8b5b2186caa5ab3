"""Scalar expressions: what one element of a value is.

    expr ::= Load(node, index, guard?, other?) | Const | Scalar(argument) | Coord(index) | Op(name, expr, ...) | Cast(dtype, expr)
           | Reduce(monoid, axes, (expr, ...)) | Scan(monoid, axis, (expr, ...)) | Random(kind, seed, offset, index)

Expressions are immutable, interned (equal ones are one object: `is` compares, memo tables key on the object) and checked when they are born.
`free` is the set of Axis atoms an expression depends on, with those bound by a Reduce taken out. `below` and `settled` are kept with it by those who
ask for them: what stands under it, and that the rewrite rules leave it as it is.

Numbers: a Cast with `implicit=True` is the rounding of an operation's own 16-bit result: policy `fast` may drop it when the value is not stored;
a Cast that the user wrote always rounds.
"""
from __future__ import annotations

import ctypes
import struct
from operator import is_
from typing import Callable, Iterable

from . import ops
from .dtype import BOOL, I64, DType
from .index import Axis, Index, as_index, dot
from .substitution import substitute
from .table import Table

_TABLE = Table()
_KNOWN = _TABLE.known


class Expr:
    __slots__ = ("dtype", "free", "below", "settled", "__weakref__")
    fields: tuple[str, ...] = ()

    @classmethod
    def _intern(cls, dtype: DType, free: Callable[[], frozenset], *values):
        """The expression of `values`, its fields; what follows these tells expressions of equal fields apart."""
        key = (cls, *values)
        known = _KNOWN.get(key)
        found = known() if known is not None else None
        if found is None:
            found = object.__new__(cls)
            for name, value in zip(cls.fields, values):
                object.__setattr__(found, name, value)
            found.dtype = dtype
            found.free = free()
            found.below = found.settled = None
            _TABLE.put(key, found)
        return found

    def axes(self) -> frozenset:
        return self.free

    def children(self) -> tuple["Expr", ...]:
        """Direct sub-expressions, a guard and gathered indices included."""
        return ()

    def __repr__(self) -> str:
        from .text import print_expr
        return print_expr(self)


def _index_axes(indices: Iterable[Index]) -> frozenset:
    out: frozenset = frozenset()
    for i in indices:
        out |= i.axes()
    return out


def _fetches(indices: Iterable[Index]) -> list[Expr]:
    """Expressions inside Fetch atoms of `indices`, at any depth of // and %."""
    return [e for i in indices for e in i.fetched()]


class Load(Expr):
    """Element `index` of `node`; where `guard` is given and false, `other` (a Const) instead and nothing is read."""
    __slots__ = ("node", "index", "guard", "other", "_offset", "_windows")
    fields = ("node", "index", "guard", "other")

    def __new__(cls, node, index: tuple[Index, ...], guard: Expr | None = None, other: "Const | None" = None):
        known = _KNOWN.get((cls, node, index, guard, other)) if index.__class__ is tuple else None
        found = known() if known is not None else None
        if found is not None:
            return found
        index = tuple([as_index(i) for i in index])
        if len(index) != len(node.shape):
            raise TypeError(f"load of a {len(node.shape)}-dimensional value with {len(index)} indices")
        if guard is not None:
            if guard.dtype is not BOOL:
                raise TypeError(f"a guard is bool, not {guard.dtype}")
            if isinstance(guard, Const):
                if guard.value:
                    guard = other = None
                else:
                    return other
            elif other is None or other.dtype is not node.dtype:
                raise TypeError("a guarded load names the value it has where the guard is false, of the loaded type")
        return cls._intern(node.dtype, lambda: _index_axes(index) | (guard.free if guard else frozenset()), node, index, guard, other)

    def offset(self) -> Index:
        """Elements from the beginning of the node's memory to what is read; of a node that has strides."""
        found = getattr(self, "_offset", None)
        if found is None:
            found = self._offset = dot(self.index, self.node.strides)
        return found

    def windows(self) -> dict:
        """Shape -> the window on the node's memory that this is as the value of a tensor of that shape, as far as somebody asked."""
        found = getattr(self, "_windows", None)
        if found is None:
            found = self._windows = {}
        return found

    def children(self):
        return (*_fetches(self.index), *((self.guard,) if self.guard is not None else ()))


def round_to(value: float, d: DType) -> float:
    """`value` rounded to the floating type `d`, to nearest even; too large becomes infinite."""
    if d.bytes == 8 or value != value or value in (float("inf"), float("-inf")):
        return value
    if d.name == "bf16":
        bits = struct.unpack("I", struct.pack("f", ctypes.c_float(value).value))[0]
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return struct.unpack("f", struct.pack("I", bits))[0]
    if d.bytes == 4:
        return ctypes.c_float(value).value
    try:
        return struct.unpack("e", struct.pack("e", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


class Const(Expr):
    """A number of the program. `value` is bool, int or float as `dtype` is; -0.0, inf and nan are themselves."""
    __slots__ = ("value", "bits")
    fields = ("value", "bits")

    def __new__(cls, value, dtype: DType):
        if dtype.is_float:
            value = round_to(float(value), dtype)
            key = (struct.pack("d", value), dtype)
        elif dtype is BOOL:
            value = bool(value)
            key = (value, dtype)
        else:
            bits = dtype.bytes * 8
            value = int(value) & (2**bits - 1)
            if dtype.kind == "i" and value >= 2 ** (bits - 1):
                value -= 2**bits
            key = (value, dtype)
        known = _KNOWN.get((cls, key))
        found = known() if known is not None else None
        if found is None:
            found = object.__new__(cls)
            found.value, found.bits, found.dtype, found.free, found.below, found.settled = value, key, dtype, frozenset(), (), None
            _TABLE.put((cls, key), found)
        return found


class Scalar(Expr):
    """A number that the host passes at each call: a Python float or int of the program (`argument` is its input's name)."""
    __slots__ = ("argument",)
    fields = ("argument",)

    def __new__(cls, argument: str, dtype: DType):
        return cls._intern(dtype, frozenset, argument, dtype)


class Coord(Expr):
    """The value of an index expression, as i64."""
    __slots__ = ("index",)
    fields = ("index",)

    def __new__(cls, index: Index):
        index = as_index(index)
        return cls._intern(I64, index.axes, index)

    def children(self):
        return tuple(_fetches((self.index,)))


class Op(Expr):
    """`name` (a row of `ops.OPS`) of arguments of one type."""
    __slots__ = ("name", "args")
    fields = ("name", "args")

    def __new__(cls, name: str, *args: Expr):
        known = _KNOWN.get((cls, name, args))
        found = known() if known is not None else None
        if found is not None:
            return found
        dtype = ops.result_type(name, tuple([a.dtype for a in args]))
        return cls._intern(dtype, lambda: frozenset().union(*(a.free for a in args)), name, args)

    def children(self):
        return self.args


class Cast(Expr):
    """`arg` converted to `dtype` as torch converts. `implicit`: an operation's own rounding, see the top."""
    __slots__ = ("arg", "implicit", "to")
    fields = ("arg", "implicit", "to")

    def __new__(cls, dtype: DType, arg: Expr, implicit: bool = False):
        if arg.dtype is dtype:
            return arg
        return cls._intern(dtype, lambda: arg.free, arg, implicit, dtype)

    def children(self):
        return (self.arg,)


class Reduce(Expr):
    """`args` folded by `monoid` over `axes` (Axis atoms, bound here); `component` of the carried tuple."""
    __slots__ = ("monoid", "over", "args", "component")
    fields = ("monoid", "over", "args", "component")

    def __new__(cls, monoid: str, over: tuple[Axis, ...], args: tuple[Expr, ...], component: int = 0):
        over, args = tuple(over), tuple(args)
        width = ops.WIDTHS.get(monoid)
        if width is None or len(args) != width or not 0 <= component < width:
            raise TypeError(f"'{monoid}' carries {width} components, not {len(args)} (component {component})")
        if monoid in (*ops.CARRIERS, *ops.MEANS) and (not args[0].dtype.is_float or any(a.dtype is not args[0].dtype for a in args)):
            raise TypeError(f"'{monoid}' folds floating numbers of one type, not {', '.join(str(a.dtype) for a in args)}")
        if monoid in ("any", "all") and args[0].dtype is not BOOL:
            raise TypeError(f"'{monoid}' folds bool, not {args[0].dtype}")
        if args[0].dtype.is_half:
            raise TypeError(f"'{monoid}' over {args[0].dtype}: 16-bit floats are carried in f32, cast first")
        if monoid.startswith("arg") and args[1].dtype is not I64:
            raise TypeError(f"'{monoid}' wants an i64 index, not {args[1].dtype}")
        return cls._intern(args[component].dtype, lambda: frozenset().union(*(a.free for a in args)) - frozenset(over), monoid, over, args, component)

    @property
    def key(self) -> tuple[str, tuple[Axis, ...], tuple[Expr, ...]]:
        """What all components of one fold have in common."""
        return self.monoid, self.over, self.args

    def children(self):
        return self.args


class Scan(Expr):
    """Inclusive prefix fold along `along`, which stays free: at coordinate i the fold of 0..i (of i..end when `reverse`)."""
    __slots__ = ("monoid", "along", "args", "component", "reverse")
    fields = ("monoid", "along", "args", "component", "reverse")

    def __new__(cls, monoid: str, along: Axis, args: tuple[Expr, ...], component: int = 0, reverse: bool = False):
        args = tuple(args)
        width = ops.MONOIDS.get(monoid)
        if width is None or len(args) != width or not 0 <= component < width:
            raise TypeError(f"'{monoid}' carries {width} components, not {len(args)} (component {component})")
        if args[0].dtype.is_half:
            raise TypeError(f"'{monoid}' over {args[0].dtype}: 16-bit floats are carried in f32, cast first")
        free = lambda: frozenset().union(*(a.free for a in args)) | {along}
        return cls._intern(args[component].dtype, free, monoid, along, args, component, reverse)

    def children(self):
        return self.args


class Random(Expr):
    """Random number n = offset + index (unsigned, 64 bits) under `seed`, f32: 'uniform' in [0, 1), of word n % 4 of Philox4x32-10 at counter n // 4;
    'normal', of the first two words at counter n (see `ir.meaning.random`). `seed` and `offset` are i64 expressions, and `offset` is always a
    multiple of 4, so that four uniform numbers are one call of Philox wherever the index begins at one. TypeError for a Const that is none."""
    __slots__ = ("kind", "seed", "offset", "index")
    fields = ("kind", "seed", "offset", "index")

    def __new__(cls, kind: str, seed: Expr, offset: Expr, index: Index):
        from .dtype import F32
        if kind not in ("uniform", "normal"):
            raise TypeError(f"there is no random kind '{kind}'")
        if isinstance(offset, Const) and offset.value % 4:
            raise TypeError(f"the offset of random numbers is {offset.value}, which is no multiple of 4")
        index = as_index(index)
        return cls._intern(F32, lambda: seed.free | offset.free | index.axes(), kind, seed, offset, index)

    def children(self):
        return (self.seed, self.offset, *_fetches((self.index,)))


# -- walking and rewriting -----------------------------------------------------------------------------------------
def walk(*roots: Expr) -> list[Expr]:
    """Every sub-expression of `roots`, each once, children before parents."""
    if len(roots) == 1:
        return [*_below(roots[0]), roots[0]]
    seen: dict[Expr, None] = {}
    for r in roots:
        if r not in seen:
            seen.update(dict.fromkeys(_below(r)))
            seen[r] = None
    return list(seen)


def _below(root: Expr) -> tuple[Expr, ...]:
    """What stands under `root`, children before parents; kept with it, since the planner asks for the same roots again and again."""
    found = root.below
    if found is None:
        seen: dict[Expr, None] = {}
        stack = [(c, False) for c in reversed(root.children())]
        while stack:
            e, ready = stack.pop()
            if e in seen:
                continue
            if ready:
                seen[e] = None
            else:
                stack.append((e, True))
                stack.extend((c, False) for c in e.children() if c not in seen)
        found = root.below = tuple(seen)
    return found


def loads(*roots: Expr) -> list[Load]:
    return [e for e in walk(*roots) if isinstance(e, Load)]


class Rewriter:
    """Rebuilds expressions bottom-up. `mapping` replaces axes and sizes in indices; `leaf(expr)` may replace a Load, Scalar or whole expression
    after its parts are rewritten (return None to keep it). One object memoises one substitution."""

    def __init__(self, mapping=None, leaf: Callable[[Expr], Expr | None] | None = None):
        self.mapping = mapping or {}
        self.leaf = leaf
        self.memo: dict[Expr, Expr] = {}
        self.indices: dict[Index, Index] = {}

    def index(self, i: Index) -> Index:
        found = self.indices.get(i)
        if found is None:
            found = self.indices[i] = substitute(i, self.mapping, self)
        return found

    def __call__(self, e: Expr) -> Expr:
        found = self.memo.get(e)
        if found is None:
            new = rebuild(e, self, self.index, self.mapping)
            if self.leaf is not None:
                replaced = self.leaf(new)
                new = new if replaced is None else replaced
            found = self.memo[e] = new
        return found


def _bound_axes(a: Axis, mapping) -> tuple[Axis, ...]:
    """The axes that take the place of bound axis `a`: itself, one it is renamed to, or the digits it is split into."""
    new = mapping.get(a)
    if new is None:
        return (a,)
    left, weight, found = as_index(new), as_index(1), []
    while left.terms:
        digit = next((x for x in left.atoms() if isinstance(x, Axis) and left.coefficient(x) is weight), None)
        if digit is None:
            raise TypeError(f"a bound axis can be renamed or split, not replaced by {new!r}")
        found.append(digit)
        left, weight = left.without(digit), weight * digit.extent
    return tuple(reversed(found))


def rebuild(e: Expr, child: Callable[[Expr], Expr], index: Callable[[Index], Index], mapping=()) -> Expr:
    """`e` with its children and indices mapped (its own class's constructor checks the result): itself when they are what they were."""
    kind = e.__class__
    if kind is Op:
        args = tuple([child(a) for a in e.args])
        return e if _same(args, e.args) else Op(e.name, *args)
    if kind is Load:
        new, guard = tuple([index(i) for i in e.index]), child(e.guard) if e.guard is not None else None
        return e if guard is e.guard and _same(new, e.index) else Load(e.node, new, guard, e.other)
    if kind is Const or kind is Scalar:
        return e
    if kind is Cast:
        arg = child(e.arg)
        return e if arg is e.arg else Cast(e.dtype, arg, e.implicit)
    if kind is Coord:
        return Coord(index(e.index))
    if kind is Reduce:
        over = tuple([x for a in e.over for x in _bound_axes(a, mapping)]) if mapping else e.over
        return Reduce(e.monoid, over, tuple([child(a) for a in e.args]), e.component)
    if kind is Scan:
        along, = _bound_axes(e.along, mapping) if mapping else (e.along,)
        return Scan(e.monoid, along, tuple([child(a) for a in e.args]), e.component, e.reverse)
    return Random(e.kind, child(e.seed), child(e.offset), index(e.index))


def _same(new: Iterable, old: Iterable) -> bool:
    return all(map(is_, new, old))
