"""Normal form of `//`, `%`, min and max of indices: multiples of a divisor are taken out, common factors cancelled, and an atom is made of what is
left where its range (`ranges`) does not say what it is."""
from __future__ import annotations

import math
from functools import lru_cache

from .index import NORMAL, Atom, FloorDiv, Index, Max, Min, Mod, as_index
from .ranges import below, nonnegative


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
    return _floordiv(a, b) if a.fetched() else _floordiv_known(a, b)


def _floordiv(a: Index, b: Index) -> Index:
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
    rest = [(k, v) for k, v in r.terms.items() if k]
    if len(rest) == 1:                         # (n + x // c) // b == (n*c + x) // (c*b)
        (k, v), = rest
        if v == 1 and len(k) == 1 and isinstance(k[0], FloorDiv):
            return floordiv(k[0].a + k[0].b * r.terms.get((), 0), k[0].b * b)
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
    return _mod(a, b) if a.fetched() else _mod_known(a, b)


def _mod(a: Index, b: Index) -> Index:
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


# Those of indices that fetch nothing, and so hold no node, are remembered: layers of a model reshape alike.
_floordiv_known, _mod_known = lru_cache(maxsize=4096)(_floordiv), lru_cache(maxsize=4096)(_mod)


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


NORMAL.update({FloorDiv: floordiv, Mod: mod, Min: minimum, Max: maximum})
