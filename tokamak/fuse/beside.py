"""Kernels side by side: contractions that read the same few rows (queries, keys and values; a gate and what it gates) become one launch, each program
with a tile of one of them. Each would take little longer than a launch, and the machine is fuller with all of them. So do small ones of different
rows that do not need each other (experts, one after the other; both layers of a low rank beside others). And small folds of equal extents, of which
each program makes one of each: what is left of a norm's sums for several weights.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

from ..ir.expr import Reduce, loads
from ..ir.graph import Scatter
from ..ir.index import Axis, Index, as_index
from .axes import Group, fold_of
from .contraction import LITTLE, Contraction, contraction, held, of_vector, product_type, shared_roles
from .cost import Hints, node_bytes
from .legal import Roles

MOST = 4            # contractions side by side
SMALL = 8 << 20     # elements of the weights of each, up to which those of different rows stand side by side: as long as about two launches take
NEAR = 8            # others, in the order of the program, among which a contraction's neighbours are looked for
FOLDED = 1 << 20    # bytes that a small fold reads at most: no longer than a launch takes


def small_folds(groups: Iterable, roles: dict, hints: Hints) -> list[list[tuple[Group, tuple[Axis, ...]]]]:
    """Small groups that fold, none of it across programs, with their axes in order, the most first: lists of those whose axes do the same and have
    the same extents, or are runs of the axes of the first."""
    small = [(g, _in_order(g, roles[g])) for g in groups if isinstance(g, Group) and _folds_little(g, roles[g], hints)]
    found: list[list] = []
    for g, axes in sorted(small, key=lambda x: -len(x[1])):
        device = g.members[0].node.device
        family = next((f for f in found if f[0][0].members[0].node.device == device
                       and runs(axes, f[0][1], roles[g].parallel, roles[f[0][0]].parallel)), None)
        family.append((g, axes)) if family is not None else found.append([(g, axes)])
    return [f for f in found if len(f) > 1]


def runs(axes: tuple[Axis, ...], of: tuple[Axis, ...], parallel: frozenset, parallel_of: frozenset) -> dict[Axis, Index] | None:
    """Each of `axes` as a run of the axes `of`, which are parallel where it is; None where they are no such runs."""
    out, rest = {}, list(of)
    for a in axes:
        at = as_index(0)
        n = as_index(1)
        while rest and n is not a.extent and (rest[0] in parallel_of) == (a in parallel):
            x = rest.pop(0)
            at, n = at * x.extent + as_index(x), n * x.extent
        if n is not a.extent:
            return None
        out[a] = at
    return out if not rest else None


def _folds_little(g: Group, r: Roles, hints: Hints) -> bool:
    """Does a group fold little along axes that are not parallel, and nothing else?"""
    if r.accumulating or r.final or any(isinstance(m.node, Scatter) for m in g.members) or sum(node_bytes(n, hints) for n in g.reads) > FOLDED:
        return False
    folds = [f for m in g.members if (f := fold_of(m.expr)) is not None]
    return bool(folds) and all(isinstance(f, Reduce) and not _multiplied(f) for f in folds)


def _multiplied(f: Reduce) -> bool:
    """May a kernel of products make it? Of f32 none does."""
    c = contraction(f)
    return c is not None and (c.exponents is not None or product_type(c) is not None)


def _in_order(g: Group, r: Roles) -> tuple[Axis, ...]:
    """The axes of `g`: parallel ones as its first result has them, then the others."""
    first = [a for d in g.members[0].dims for a in d.atoms() if isinstance(a, Axis)]
    place = {a: n for n, a in enumerate(dict.fromkeys((*first, *g.axes)))}
    return tuple(sorted(g.axes, key=lambda a: (a not in r.parallel, place[a])))


def families(groups: Iterable, hints: Hints) -> list[list[Group]]:
    """Groups of contractions by the few rows that they read, where several read the same ones."""
    found: dict = {}
    for g in groups:
        key = _rows_of(g, hints) if isinstance(g, Group) else None
        if key is not None:
            found.setdefault(key, []).append(g)
    return [f for f in found.values() if len(f) > 1]


def small(groups: Iterable, hints: Hints) -> list[Group]:
    """Groups of contractions of few rows each and of little weight, in order; none of which makes another one's factor."""
    found = ((g, _products_of(g, hints)) for g in groups if isinstance(g, Group))
    return [g for g, products in found if products and len({c.fold.free for c in products}) == 1 and all(is_small(c, hints) for c in products)]


def is_small(c: Contraction, hints: Hints) -> bool:
    """Has it few rows, and little weight?"""
    return few_rows(c, hints) is not None and max(map(hints.count, (c.rows, c.columns))) * hints.count(c.fold.over) <= SMALL


def together(found: Iterable, independent: Callable[[list, object], bool]) -> list[list]:
    """`found`, in order, as lists of at most MOST that stand side by side: what is `independent` of those in a list so far, and near its first."""
    waiting, made = list(found), []
    while waiting:
        line, left = [waiting[0]], []
        for n, x in enumerate(waiting[1:]):
            (line if len(line) < MOST and n < NEAR and independent(line, x) else left).append(x)
        waiting = left
        made.append(line)
    return made


def _products_of(g: Group, hints: Hints) -> list[Contraction]:
    """The contractions of a group that holds nothing but those and what is made of them."""
    products = held(g) or [c for m in g.members if (c := contraction(fold_of(m.expr))) is not None and of_vector(c)]
    return products if products and shared_roles(g, products, hints) is not None else []


def _rows_of(g: Group, hints: Hints) -> tuple | None:
    """What tells the few rows of a group of contractions from others, and along what they are folded; None of any other group."""
    rows = {few_rows(c, hints) for c in _products_of(g, hints)}
    return rows.pop() if len(rows) == 1 else None


def few_rows(c: Contraction, hints: Hints) -> tuple | None:
    """(what a factor of few rows reads, how many rows, their depth), or None where both factors have many or there are batches."""
    (few, side), (many, _) = sorted(((hints.count(a), e) for a, e in ((c.rows, c.left), (c.columns, c.right))), key=lambda x: x[0])
    if few > LITTLE or few == many or c.batch:
        return None
    return frozenset(e.node for e in loads(side)), few, hints.count(c.fold.over)
