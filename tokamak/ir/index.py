"""Index expressions: integers over coordinates and sizes, always in normal form.

    index ::= sum of  integer * atom * atom * ...
    atom  ::= Axis(id, extent) | Size(name) | FloorDiv(index, index) | Mod(index, index) | Min | Max | Fetch(expr)

An Index is a polynomial with integer coefficients; equal functions of axes usually have one normal form, and nodes are hash-consed, so `is`
compares. Axis atoms carry their extent, so simplification needs no context: `Axis(0, 12) // 12` is 0 at birth. Sizes are host integers
(symbolic dimensions), at least `lower`. Fetch is a gather: a value expression used as an index; its range is that of the guard around it.

The facts used: 0 <= Axis < extent; Size >= lower; a polynomial whose coefficients are all non-negative after shifting each size to its
lower bound is non-negative. Nothing is ever taken from a size hint.
"""
from __future__ import annotations

import math
from functools import lru_cache
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
        return cls._make(1, id, as_index(extent))

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


class _Binary(Atom):
    __slots__ = ("a", "b")
    fields = ("a", "b")
    sign = "?"

    def __new__(cls, a: "Index", b: "Index"):
        return cls._make(2, a, b)

    def __repr__(self) -> str:
        return f"({self.a} {self.sign} {self.b})"


class FloorDiv(_Binary):
    __slots__ = ()
    sign = "//"


class Mod(_Binary):
    __slots__ = ()
    sign = "%"


class Min(_Binary):
    __slots__ = ()
    sign = "min"


class Max(_Binary):
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
    __slots__ = ("terms", "constant", "_hash", "_bounds", "_axes", "_fetched", "__weakref__")
    _table = Table()

    def __new__(cls, terms: dict[tuple[Atom, ...], int]):
        items = frozenset(terms.items())
        known = _INDICES.get(items)
        found = known() if known is not None else None
        if found is None:
            found = object.__new__(cls)
            found.terms = dict(sorted(terms.items(), key=_order)) if len(terms) > 1 else dict(terms)
            found.constant = 0 if not terms else terms.get(()) if len(terms) == 1 else None
            found._hash = hash(items)
            found._bounds = found._axes = found._fetched = None
            cls._table.put(items, found)
        return found

    def __hash__(self) -> int:
        return self._hash

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
        for k, v in other.terms.items():
            total = terms.get(k, 0) + v
            if total:
                terms[k] = total
            else:
                terms.pop(k, None)
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
        return floordiv(self, as_index(other))

    def __mod__(self, other):
        return mod(self, as_index(other))

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
    extent = as_index(extent)
    return as_index(0) if extent == 1 else as_index(Axis(id, extent))


def _fetched(a: Atom) -> tuple:
    if isinstance(a, Fetch):
        return (a.expr,)
    return (*a.a.fetched(), *a.b.fetched()) if isinstance(a, _Binary) else ()


@lru_cache(maxsize=65536)
def atom_axes(a: Atom) -> frozenset:
    if isinstance(a, Axis):
        return frozenset((a,))
    if isinstance(a, _Binary):
        return frozenset(a.a.axes() | a.b.axes())
    if isinstance(a, Fetch):
        return frozenset(a.expr.axes())
    return frozenset()


# -- ranges --------------------------------------------------------------------------------------------------------
def bounds(index: Index) -> tuple[Index | None, Index | None]:
    """(lowest, highest) value as polynomials of sizes; None where unknown."""
    if index._bounds is None:
        low: Index | None = as_index(0)
        high: Index | None = as_index(0)
        for k, v in index.terms.items():
            lo, hi = _monomial_bounds(k)
            if v < 0:
                lo, hi = hi, lo
            low = None if low is None or lo is None else low + lo * v
            high = None if high is None or hi is None else high + hi * v
        index._bounds = (low, high)
    return index._bounds


def _monomial_bounds(k: tuple[Atom, ...]):
    low, high = as_index(1), as_index(1)
    for a in k:
        lo, hi = _atom_bounds(a)
        if lo is None or not (_never_negative(a) if lo is as_index(a) else nonnegative(lo)):
            return None, None      # a factor that may be negative: give up
        low = low * lo
        high = None if high is None or hi is None else high * hi
    return low, high


def _never_negative(a: Atom) -> bool:
    """For an atom over sizes alone, which is its own bound."""
    if isinstance(a, FloorDiv):
        return nonnegative(a.a)
    if isinstance(a, Min):
        return nonnegative(a.a) and nonnegative(a.b)
    if isinstance(a, Max):
        return nonnegative(a.a) or nonnegative(a.b)
    return True


def _atom_bounds(a: Atom):
    if isinstance(a, Axis):
        return as_index(0), a.extent - 1
    if isinstance(a, Size):
        return as_index(a), as_index(a)
    if isinstance(a, Fetch):
        return as_index(0), a.bound - 1
    if isinstance(a, Mod):
        return as_index(0), a.b - 1
    if isinstance(a, FloorDiv):
        lo, hi = bounds(a.a)
        if not positive(a.b):
            return None, None
        return (None if lo is None else lo // a.b), (None if hi is None else hi // a.b)
    (alo, ahi), (blo, bhi) = bounds(a.a), bounds(a.b)
    if isinstance(a, Min):
        low = as_index(0) if alo is not None and blo is not None and nonnegative(alo) and nonnegative(blo) else None
        return low, ahi if ahi is not None else bhi
    low = alo if alo is not None else blo
    return low, (ahi if ahi is not None and bhi is not None and nonnegative(ahi - bhi) else bhi
                 if ahi is not None and bhi is not None and nonnegative(bhi - ahi) else None)


def nonnegative(index: Index) -> bool:
    """Proved to be at least 0 for all coordinates and sizes."""
    c = index.constant
    if c is not None:
        return c >= 0
    return _nonnegative(index)


@lru_cache(maxsize=65536)
def _nonnegative(index: Index) -> bool:
    if any(not isinstance(a, Size) for a in index.atoms()):
        low = bounds(index)[0]
        if low is not index:
            return low is not None and nonnegative(low)
    shifted = as_index(0)       # each size s becomes lower + s', s' >= 0: non-negative when no coefficient is negative
    for k, v in index.terms.items():
        term = as_index(v)
        for a in k:
            term = term * (as_index(a) + (a.lower if isinstance(a, Size) else 0))
        shifted = shifted + term
    return all(v >= 0 for v in shifted.terms.values())


def positive(index: Index) -> bool:
    """Proved to be at least 1."""
    return nonnegative(index - 1)


def below(index: Index, limit: Index) -> bool:
    """Proved: 0 <= index < limit."""
    lo, hi = bounds(index)
    if lo is None or hi is None:
        return False
    if hi.constant is not None and limit.constant is not None:
        return hi.constant < limit.constant and nonnegative(lo)
    return nonnegative(lo) and nonnegative(limit - hi - 1)


# -- division ------------------------------------------------------------------------------------------------------
def _divide_monomial(k: tuple[Atom, ...], v: int, dk: tuple[Atom, ...], dv: int):
    """(k, v) / (dk, dv) when it divides exactly, else None."""
    if v % dv:
        return None
    rest = list(k)
    for a in dk:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest), v // dv


def divide_exact(a: Index, b: Index) -> Index | None:
    """a / b when every term divides (b a single monomial) or when a is a constant multiple of b; else None."""
    if a is b:
        return as_index(1)
    if not a.terms:
        return a
    if not b.terms:
        return None
    if len(b.terms) != 1:
        (k, v), (bk, bv) = next(iter(a.terms.items())), next(iter(b.terms.items()))
        q = _divide_monomial(k, v, bk, bv)
        if q is not None and Index({q[0]: q[1]}) * b is a:
            return Index({q[0]: q[1]})
        return None
    (bk, bv), = b.terms.items()
    terms = {}
    for k, v in a.terms.items():
        q = _divide_monomial(k, v, bk, bv)
        if q is None:
            return None
        terms[q[0]] = q[1]
    return Index(terms)


def _split(a: Index, b: Index) -> tuple[Index, Index]:
    """a = q*b + r, with the multiples of b taken out term by term; the rest r keeps a proved range where one shows."""
    if len(b.terms) != 1:
        q = divide_exact(a, b)
        return (q, as_index(0)) if q is not None else (as_index(0), a)
    (bk, bv), = b.terms.items()
    quotient, rest = {}, {}
    for k, v in a.terms.items():
        q = _divide_monomial(k, v, bk, bv)
        if q is not None:
            quotient[q[0]] = q[1]
        elif not bk and not k and bv:          # constants: take out what floor division takes
            if v // bv:
                quotient[()] = v // bv
            if v % bv:
                rest[()] = v % bv
        else:
            rest[k] = v
    return Index(quotient), Index(rest)


def floordiv(a, b) -> Index:
    """a // b, rounding down; b is positive (0 for a divisor of 0: an extent of a value that has no elements)."""
    a, b = as_index(a), as_index(b)
    if b == 1:
        return a
    if b == 0:
        return b
    if a.constant is not None and b.constant is not None:
        return as_index(a.constant // b.constant)
    q, r = _split(a, b)
    if below(r, b):
        return q
    inner = _floordiv_rest(r, b)
    return q + inner


def _floordiv_rest(r: Index, b: Index) -> Index:
    r, b = _cancel_common(r, b)
    if b == 1:
        return r
    if below(r, b):
        return as_index(0)
    if len(r.terms) == 1:                      # (x // c) // b == x // (c*b)
        (k, v), = r.terms.items()
        if v == 1 and len(k) == 1 and isinstance(k[0], FloorDiv):
            return floordiv(k[0].a, k[0].b * b)
    return as_index(FloorDiv(r, b))


def _cancel_common(r: Index, b: Index) -> tuple[Index, Index]:
    """Divide both by a common factor; terms of r that are smaller than the factor drop out: (6x + y) // 12, y < 6 is x // 2."""
    if len(b.terms) != 1 or not r.terms:
        return r, b
    (bk, bv), = b.terms.items()
    candidates = {}
    for k, v in r.terms.items():
        if not k:
            continue
        common = tuple(a for a in bk if a in k)
        g = math.gcd(abs(v), bv)
        if common or g > 1:
            candidates[(common, g)] = None
    for common, g in candidates:
        factor = Index({common: g})
        q, rest = _split(r, factor)
        reduced = divide_exact(b, factor)
        if reduced is not None and reduced is not b and q.terms and below(rest, factor):
            return _cancel_common(q, reduced)
    return r, b


def mod(a, b) -> Index:
    """a % b, with the sign of b (b positive; 0 for a divisor of 0, see floordiv)."""
    a, b = as_index(a), as_index(b)
    if b == 1 or b == 0:
        return as_index(0)
    if a.constant is not None and b.constant is not None:
        return as_index(a.constant % b.constant)
    _, r = _split(a, b)
    if below(r, b):
        return r
    if len(r.terms) == 1:                      # (x % (b*c)) % b == x % b
        (k, v), = r.terms.items()
        if v == 1 and len(k) == 1 and isinstance(k[0], Mod) and divide_exact(k[0].b, b) is not None:
            return mod(k[0].a, b)
    q = floordiv(r, b)
    if any(isinstance(x, FloorDiv) for x in q.atoms()):
        return as_index(Mod(r, b))
    return r - q * b


def minimum(a, b) -> Index:
    a, b = as_index(a), as_index(b)
    if nonnegative(b - a):
        return a
    if nonnegative(a - b):
        return b
    return as_index(Min(a, b))


def maximum(a, b) -> Index:
    a, b = as_index(a), as_index(b)
    if nonnegative(a - b):
        return a
    if nonnegative(b - a):
        return b
    return as_index(Max(a, b))


# -- substitution --------------------------------------------------------------------------------------------------
def substitute(index: Index, mapping, subst_expr=None) -> Index:
    """Replace atoms by Index values: `mapping` is keyed by Atom (Axis or Size). `subst_expr(expr)` rewrites what a Fetch holds."""
    if not index.terms or (len(index.terms) == 1 and () in index.terms):
        return index
    terms: dict = {}
    changed = False
    for k, v in index.terms.items():
        term = None
        for a in k:
            new = _substitute_atom(a, mapping, subst_expr)
            changed = changed or len(new.terms) != 1 or next(iter(new.terms)) != (a,)
            term = new if term is None else term * new
        for key, factor in term.terms.items() if term is not None else (((), 1),):
            total = terms.get(key, 0) + v * factor
            if total:
                terms[key] = total
            else:
                terms.pop(key, None)
    return recombine(Index(terms)) if changed else index


def _substitute_atom(a: Atom, mapping, subst_expr) -> Index:
    found = mapping.get(a) if mapping else None
    if found is not None:
        return as_index(found)
    if isinstance(a, (Axis, Size)):
        return as_index(a)
    if isinstance(a, Fetch):
        bound = substitute(a.bound, mapping, subst_expr)
        return as_index(Fetch(subst_expr(a.expr), bound)) if subst_expr else as_index(a)
    left, right = substitute(a.a, mapping, subst_expr), substitute(a.b, mapping, subst_expr)
    return {FloorDiv: floordiv, Mod: mod, Min: minimum, Max: maximum}[type(a)](left, right)


def recombine(index: Index) -> Index:
    """b*(x // b) + x % b is x."""
    for k, v in index.terms.items():
        for a in k:
            if isinstance(a, Mod):
                rest = tuple(x for x in k if x is not a)
                partner = Index({rest: v}) * a.b * floordiv(a.a, a.b)
                if partner.terms and all(index.terms.get(pk) == pv for pk, pv in partner.terms.items()):
                    return recombine(index - Index({k: v}) - partner + Index({rest: v}) * a.a)
    return index


def evaluate(index: Index, env, fetch=None):
    """The value under `env` (Atom -> int or array); `fetch(expr)` gives a Fetch's value. Works on numpy arrays as on ints."""
    total = 0
    for k, v in index.terms.items():
        term = v
        for a in k:
            term = term * _evaluate_atom(a, env, fetch)
        total = total + term
    return total


def _evaluate_atom(a: Atom, env, fetch):
    if a in env:
        return env[a]
    if isinstance(a, Fetch):
        return fetch(a.expr)
    if not isinstance(a, _Binary):
        raise KeyError(f"no value for {a!r}")
    left, right = evaluate(a.a, env, fetch), evaluate(a.b, env, fetch)
    if isinstance(a, FloorDiv):
        return left // right
    if isinstance(a, Mod):
        return left % right
    import numpy
    pick = numpy.minimum if isinstance(a, Min) else numpy.maximum
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right) if isinstance(a, Min) else max(left, right)
    return pick(left, right)


def row_major(shape) -> tuple[Index, ...]:
    """Contiguous strides of `shape`, in elements."""
    strides, step = [], as_index(1)
    for extent in reversed(shape):
        strides.append(step)
        step = step * extent
    return tuple(reversed(strides))
