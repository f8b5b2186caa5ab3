"""Index expressions: integers over coordinates and sizes, always in normal form.

    index ::= sum of  integer * atom * atom * ...
    atom  ::= Axis(id, extent) | Size(name) | FloorDiv(index, index) | Mod(index, index) | Min | Max | Fetch(expr)

An Index is a polynomial with integer coefficients; equal functions of axes usually have one normal form, and nodes are hash-consed, so `is`
compares. Axis atoms carry their extent, so simplification needs no context: `Axis(0, 12) // 12` is 0 at birth. Sizes are host integers
(symbolic dimensions), at least `lower`. Fetch is a gather: a value expression used as an index; its range is that of the guard around it.

Sums and products are here. What becomes of two indices under `//`, `%`, min and max takes facts about their ranges (`ranges`): `normal` enters it
into `NORMAL`, by the atom that stands where nothing simpler is equal. `substitution` puts other values in the place of atoms.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Callable, Iterable
from weakref import ref

from .table import Table


class Atom:
    """A factor of a monomial. Interned: equal atoms are one object."""
    __slots__ = ("rank", "_order", "_alone", "__weakref__")
    _table = Table()

    @classmethod
    def _make(cls, rank: int, *fields):
        key = (cls, *fields)
        known = _ATOMS.get(key)
        found = known() if known is not None else None
        if found is None:
            found = object.__new__(cls)
            found.rank = rank
            found._order = found._alone = None
            for name, value in zip(cls.fields, fields):
                object.__setattr__(found, name, value)
            Atom._table.put(key, found)
        return found

    fields: tuple[str, ...] = ()

    def sort_key(self) -> str:
        if self._order is None:
            self._order = self._sort_key()
        return self._order

    def _sort_key(self) -> str:
        return f"{self.rank}{self!r}"


_ATOMS = Atom._table.known


class Axis(Atom):
    """Coordinate `id`, running over 0 .. extent - 1."""
    __slots__ = ("id", "extent")
    fields = ("id", "extent")

    def __new__(cls, id: int, extent: "Index | int"):
        known = _ATOMS.get((cls, id, extent)) if extent.__class__ is Index else None
        found = known() if known is not None else None
        return found if found is not None else cls._make(1, id, as_index(extent))

    def __repr__(self) -> str:
        return f"i{self.id}"

    def _sort_key(self) -> str:
        return f"1i{self.id:06d}"


class Size(Atom):
    """A size known on the host at each call, at least `lower`."""
    __slots__ = ("name", "lower")
    fields = ("name", "lower")

    def __new__(cls, name: str, lower: int = 0):
        return cls._make(0, name, lower)

    def __repr__(self) -> str:
        return self.name


class Binary(Atom):
    """Of two indices, and no polynomial."""
    __slots__ = ("a", "b")
    fields = ("a", "b")
    sign = "?"

    def __new__(cls, a: "Index", b: "Index"):
        return cls._make(2, a, b)

    def __repr__(self) -> str:
        return f"({self.a} {self.sign} {self.b})"


class FloorDiv(Binary):
    __slots__ = ()
    sign = "//"


class Mod(Binary):
    __slots__ = ()
    sign = "%"


class Min(Binary):
    __slots__ = ()
    sign = "min"


class Max(Binary):
    __slots__ = ()
    sign = "max"


class Fetch(Atom):
    """A gather: the value of an i64 expression used as an index. Evaluating it checks it: where it is not in 0 .. bound - 1 the program's error word
    is set (the call raises IndexError) and the value is clamped, so that no kernel reads outside its buffers. Negative indices that the user may
    write are wrapped by the expression itself. Inside a guarded Load the check counts only where the guard holds."""
    __slots__ = ("expr", "bound")
    fields = ("expr", "bound")

    def __new__(cls, expr, bound: "Index"):
        return cls._make(3, expr, as_index(bound))

    def __repr__(self) -> str:
        return f"[{self.expr!r}]"


class Index:
    """A polynomial over atoms: `terms` maps a sorted tuple of atoms to a non-zero integer; `constant`: the integer this is, or None. Interned and
    immutable."""
    __slots__ = ("terms", "constant", "_bounds", "_axes", "_fetched", "__weakref__")
    _table = Table()

    def __new__(cls, terms: dict[tuple[Atom, ...], int]):
        items = frozenset(terms.items())
        known = _INDICES.get(items)
        found = known() if known is not None else None
        if found is None:
            found = object.__new__(cls)
            found.terms = dict(sorted(terms.items(), key=_order)) if len(terms) > 1 else dict(terms)
            found.constant = 0 if not terms else terms.get(()) if len(terms) == 1 else None
            found._bounds = found._axes = found._fetched = None
            cls._table.put(items, found)
        return found

    __hash__ = object.__hash__          # equal ones are one object

    def __eq__(self, other) -> bool:
        return self is other or (isinstance(other, int) and self.constant == other)

    # -- arithmetic ------------------------------------------------------------------------------------------------
    def __add__(self, other):
        other = as_index(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        terms = dict(self.terms)
        _add(terms, other, 1)
        return Index(terms)

    __radd__ = __add__

    def __neg__(self):
        return Index({k: -v for k, v in self.terms.items()})

    def __sub__(self, other):
        return self + (-as_index(other))

    def __rsub__(self, other):
        return as_index(other) - self

    def __mul__(self, other):
        other = as_index(other)
        if other.constant is not None:
            return self._times(other.constant)
        if self.constant is not None:
            return other._times(self.constant)
        terms: dict = {}
        for ka, va in self.terms.items():
            for kb, vb in other.terms.items():
                k = ka + kb if not (ka and kb) else tuple(sorted(ka + kb, key=Atom.sort_key))
                total = terms.get(k, 0) + va * vb
                if total:
                    terms[k] = total
                else:
                    terms.pop(k, None)
        return Index(terms)

    __rmul__ = __mul__

    def _times(self, factor: int):
        return self if factor == 1 else Index({k: v * factor for k, v in self.terms.items()} if factor else {})

    def __floordiv__(self, other):
        return NORMAL[FloorDiv](self, as_index(other))

    def __mod__(self, other):
        return NORMAL[Mod](self, as_index(other))

    # -- questions -------------------------------------------------------------------------------------------------
    def atoms(self) -> list[Atom]:
        """The factors that occur, each once, outermost only."""
        return list(dict.fromkeys([a for k in self.terms for a in k]))

    def axes(self) -> frozenset[Axis]:
        """Every axis this depends on, inside atoms too (a Fetch's expression included)."""
        if self._axes is None:
            self._axes = frozenset().union(*(atom_axes(a) for k in self.terms for a in k))
        return self._axes

    def fetched(self) -> tuple:
        """The expressions inside Fetch atoms, at any depth of // and %, in order."""
        if self._fetched is None:
            self._fetched = tuple([e for a in self.atoms() for e in _fetched(a)])
        return self._fetched

    def coefficient(self, atom: Atom) -> "Index":
        """The polynomial that multiplies `atom` (terms of degree one in it)."""
        if not any([len(k) > 1 and atom in k for k in self.terms]):
            return _const(self.terms.get((atom,), 0))
        return Index({tuple([x for x in k if x is not atom]): v for k, v in self.terms.items() if k.count(atom) == 1})

    def steps_by_one(self, atom: Atom) -> bool:
        """Is `coefficient(atom)` 1?"""
        return self.terms.get((atom,)) == 1 and (len(self.terms) == 1 or sum([k.count(atom) == 1 for k in self.terms]) == 1)

    def without(self, atom: Atom) -> "Index":
        """The terms in which `atom` is no factor."""
        return Index({k: v for k, v in self.terms.items() if atom not in k})

    def __repr__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for k, v in self.terms.items():
            factors = [repr(a) for a in k]
            if v != 1 or not factors:
                factors.append(str(v))
            parts.append("*".join(factors))
        return " + ".join(parts)


_INDICES = Index._table.known


def _add(terms: dict, index: Index, factor: int) -> None:
    """Adds `factor` (not 0) times `index` to the polynomial `terms`."""
    for k, v in index.terms.items():
        total = terms.get(k, 0) + v * factor
        if total:
            terms[k] = total
        else:
            terms.pop(k, None)


def dot(indices: Iterable[Index], strides: Iterable[Index]) -> Index:
    """The sum of the products of `indices` and `strides`."""
    terms: dict = {}
    for i, s in zip(indices, strides):
        if s.constant is None and i.constant is None:
            _add(terms, i * s, 1)
        elif s.constant is not None and s.constant:
            _add(terms, i, s.constant)
        elif s.constant is None and i.constant:
            _add(terms, s, i.constant)
    return Index(terms)
NORMAL: dict[type[Binary], Callable[[Index, Index], Index]] = {}        # the simplest index that is equal to such an atom of two


def _order(term: tuple[tuple[Atom, ...], int]) -> list[str]:
    return [a.sort_key() for a in term[0]]


def as_index(value) -> Index:
    """An Index from an Index, an Atom or an int."""
    if value.__class__ is Index:
        return value
    if isinstance(value, Atom):
        known = value._alone() if value._alone is not None else None
        if known is None:
            known = Index({(value,): 1})
            value._alone = ref(known)
        return known
    return _const(int(value))


@lru_cache(maxsize=4096)
def _const(value: int) -> Index:
    return Index({(): value} if value else {})


def axis(id: int, extent) -> Index:
    """Coordinate `id` as an Index; 0 when the extent is 1."""
    return _coordinate(id, as_index(extent))


@lru_cache(maxsize=4096)
def _coordinate(id: int, extent: Index) -> Index:
    return as_index(0) if extent == 1 else as_index(Axis(id, extent))


def _fetched(a: Atom) -> tuple:
    if isinstance(a, Fetch):
        return (a.expr,)
    return (*a.a.fetched(), *a.b.fetched()) if isinstance(a, Binary) else ()


@lru_cache(maxsize=65536)
def atom_axes(a: Atom) -> frozenset:
    if isinstance(a, Axis):
        return frozenset((a,))
    if isinstance(a, Binary):
        return frozenset(a.a.axes() | a.b.axes())
    if isinstance(a, Fetch):
        return frozenset(a.expr.axes())
    return frozenset()


def row_major(shape) -> tuple[Index, ...]:
    """Contiguous strides of `shape`, in elements."""
    strides, step = [], as_index(1)
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))
