"""The axis along lanes in pieces: an inside, where all that asks for its coordinate is known, and short ends, where it is not.

A border, a window that reaches past an image's end, or the end of a tensor in a row of several makes guards, or an index that turns round, of which
every register computes all. Inside none of it is left. Unlike the pieces of `pieces`, these may be of any lengths: each is a loop of its own in an
iteration of the others.
"""
from __future__ import annotations

from itertools import count

from ..fuse.cost import GRAIN, Hints
from ..ir.expr import Load, Op, Reduce, Scan, walk
from ..ir.index import Axis, FloorDiv, Index, Max, Min, Mod, as_index
from ..ir.ranges import bounds
from .body import Body, coalesce, exprs_of, indices_of
from .pieces import COMPARISONS, difference, part

# In ms, 8 x 64 x 56 x 56 on one core (AMD EPYC, AVX-512), before / so: 3 columns more on each side, reflected 2.17 / 0.43, in a circle 5.3 / 1.6,
# zeros 0.96 / 0.33; the maximum of windows of 3 in steps of 2 1.96 / 0.64; means of 3 x 3 4.1 / 1.17. Five points of 1024 x 1024 rolled 0.43 / 0.22
MOST = 5                # pieces; in each of them those that know more are looked for TURNS times
TURNS = 3
ENDS = 4                # the part of the axis that pieces shorter than a register may make up: they are computed one by one
ROWS = 8                # iterations of the other axes for each thread from which on they are enough to share out
WINDOW = 8              # longest folded axis


def with_edges(b: Body, vector: Axis | None, lanes: int, hints: Hints, target) -> Body:
    """`b` with its stores in pieces of `vector`, where all that is folded are small windows. (On an ordered target nothing is folded in pieces: lanes
    may run along what a fold reads inside, and do not for sizes that are not known, in which there are no pieces.)"""
    if vector is None or vector not in b.parallel or vector.extent.constant is None or b.base is not None:
        return b
    exprs, rows = list(walk(*exprs_of(b))), b.parallel - {vector}
    read, folds = {e.node for e in exprs if isinstance(e, Load)}, [e for e in exprs if isinstance(e, Reduce)]
    if any(s.monoid is not None or vector not in s.axes or s.memory in read for s in b.stores) or any(isinstance(e, Scan) for e in exprs):
        return b
    if folds and target.ordered or any(a in b.parallel or a.extent.constant is None or a.extent.constant > WINDOW for f in folds for a in f.over):
        return b
    if any(a in s.axes for s in b.stores for f in folds for a in f.over):         # another store's loop, whose name would be the fold's
        return b
    if hints.count(rows) < ROWS * target.threads and hints.count(b.parallel) >= GRAIN:
        return b
    at = _ends(b, vector)
    lengths = [high - low for low, high in zip(at, at[1:])]
    short = sum(n for n in lengths if n < lanes)
    if not 1 < len(lengths) <= MOST or short * ENDS > vector.extent.constant or short == vector.extent.constant:
        return b
    fresh, axes, stores = count(max(a.id for a in b.axes) + 1), [a for a in b.axes if a in rows], []
    for low, n in zip(at, lengths):         # what a piece folds has axes of its own, too: nothing joins its loops with another's
        own = as_index(0) if n == 1 else as_index(Axis(next(fresh), as_index(n)))
        folded = {a: as_index(Axis(next(fresh), a.extent)) for f in folds for a in f.over}
        stores += [part(s, vector, low, own, folded) for s in b.stores]
        axes += [a for i in (*folded.values(), own) for a in i.axes()]
    return coalesce(Body(tuple(axes), tuple(stores), rows))


def _ends(b: Body, a: Axis) -> list[int]:
    """0, ..., the extent of `a`: the ends of its pieces; [] where they are too many."""
    at = _cuts(b, a)
    for _ in range(TURNS):
        found = {0, a.extent.constant}
        for low, high in zip(at, at[1:]):
            own = Axis(a.id, as_index(high - low))
            piece = Body((own,), tuple(part(s, a, low, own) for s in b.stores), frozenset((own,)))
            found.update(low + n for n in _cuts(piece, own))
        if len(found) > MOST + 1:
            return []
        if len(found) == len(at):
            return at
        at = sorted(found)
    return at


def _cuts(b: Body, a: Axis) -> list[int]:
    """The coordinates of `a` at which something about it is decided, and its ends."""
    extent, found = a.extent.constant, set()
    for e in walk(*exprs_of(b)):
        if isinstance(e, Op) and (d := difference(e)) is not None:
            for n in COMPARISONS[e.name]:
                found.update(_changes(d - n, a))
    for i in indices_of(b):
        for x in _inner(i):
            if isinstance(x, (Min, Max)):
                found.update(_changes(x.a - x.b, a))
            elif x.b.constant is not None and a in x.a.axes():
                found.update(_turns(x.a, x.b.constant, a))
    return sorted({0, extent, *(n for n in found if 0 < n < extent)})


def _changes(d: Index, a: Axis) -> list[int]:
    """Where `d` >= 0 is decided: from the first coordinate of `a` on at which it may hold, or must (fail, where `d` falls)."""
    step, rest = d.coefficient(a).constant, d.without(a)
    low, high = (None if x is None else x.constant for x in bounds(rest))
    if not step or low is None or high is None or a in rest.axes():
        return []
    return [-(-r // step) if step > 0 else -r // -step + 1 for r in (-low, -high)]


def _turns(x: Index, n: int, a: Axis) -> list[int]:
    """Where `x` // `n` steps, if it does so a few times."""
    low, high = (None if i is None else i.constant for i in bounds(x))
    if low is None or high is None or high // n - low // n > TURNS:
        return []
    return [at for k in range(low // n + 1, high // n + 1) for at in _changes(x - k * n, a)]


def _inner(i: Index) -> list:
    """The quotients, remainders, minima and maxima in `i`."""
    found: list = []
    for x in i.atoms():
        if isinstance(x, (Min, Max, FloorDiv, Mod)):
            found += [x, *_inner(x.a), *_inner(x.b)]
    return found
