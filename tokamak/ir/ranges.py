"""What is proved of an index for all coordinates and sizes: between which polynomials of sizes it lies, whether it is at least 0, or below a limit.

The facts used: 0 <= Axis < extent; Size >= lower; a polynomial whose coefficients are all non-negative after shifting each size to its
lower bound is non-negative. Nothing is ever taken from a size hint.
"""
from __future__ import annotations

from functools import lru_cache

from .index import Atom, Axis, Fetch, FloorDiv, Index, Max, Min, Mod, Size, as_index


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
