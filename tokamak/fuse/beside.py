"""Kernels side by side: contractions that read the same few rows (queries, keys and values; a gate and what it gates) become one launch, each program
with a tile of one of them. Each would take little longer than a launch, and the machine is fuller with all of them.
"""
from __future__ import annotations

from collections.abc import Iterable

from ..ir.expr import loads
from .axes import Group, fold_of
from .contraction import LITTLE, Contraction, contraction, held, of_vector, shared_roles
from .cost import Hints

MOST = 4            # contractions side by side


def families(groups: Iterable, hints: Hints) -> list[list[Group]]:
    """Groups of contractions by the few rows that they read, where several read the same ones."""
    found: dict = {}
    for g in groups:
        key = _rows_of(g, hints) if isinstance(g, Group) else None
        if key is not None:
            found.setdefault(key, []).append(g)
    return [f for f in found.values() if len(f) > 1]


def _rows_of(g: Group, hints: Hints) -> tuple | None:
    """What tells the few rows of a group of contractions from others, and along what they are folded; None of any other group."""
    products = held(g) or [c for m in g.members if (c := contraction(fold_of(m.expr))) is not None and of_vector(c)]
    if not products or shared_roles(g, products, hints) is None:
        return None
    rows = {few_rows(c, hints) for c in products}
    return rows.pop() if len(rows) == 1 else None


def few_rows(c: Contraction, hints: Hints) -> tuple | None:
    """(what a factor of few rows reads, how many rows, their depth), or None where both factors have many or there are batches."""
    few, many = sorted(((hints.count(a), e) for a, e in ((c.rows, c.left), (c.columns, c.right))), key=lambda x: x[0])
    return (frozenset(e.node for e in loads(few[1])), few[0], hints.count(c.fold.over)) if few[0] <= LITTLE < many[0] and not c.batch else None
