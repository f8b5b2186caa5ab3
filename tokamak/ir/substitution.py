"""Other values in the place of an index' atoms: indices (`substitute`), or numbers (`evaluate`)."""
from __future__ import annotations

import numpy as np

from .index import NORMAL, Atom, Axis, Binary, Fetch, FloorDiv, Index, Min, Mod, Size, as_index
from .normal import recombine


def substitute(index: Index, mapping, subst_expr=None) -> Index:
    """Replace atoms by Index values: `mapping` is keyed by Atom (Axis or Size). `subst_expr(expr)` rewrites what a Fetch holds."""
    if not index.terms or (len(index.terms) == 1 and () in index.terms):
        return index
    if len(index.terms) == 1:
        (k, v), = index.terms.items()
        if v == 1 and len(k) == 1:          # most are one coordinate
            new = _substitute_atom(k[0], mapping, subst_expr)
            return index if new is index else recombine(new)
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
    return NORMAL[type(a)](left, right)


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
    if not isinstance(a, Binary):
        raise KeyError(f"no value for {a!r}")
    left, right = evaluate(a.a, env, fetch), evaluate(a.b, env, fetch)
    if isinstance(a, FloorDiv):
        return left // right
    if isinstance(a, Mod):
        return left % right
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right) if isinstance(a, Min) else max(left, right)
    return (np.minimum if isinstance(a, Min) else np.maximum)(left, right)
