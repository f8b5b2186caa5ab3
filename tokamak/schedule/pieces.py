"""A store whose value depends on where along an axis it lies, as one store a piece of that axis.

`stack` and `cat` are chains of `where` over a coordinate, and so are the gradients of slices with a step. In a loop over that coordinate each
iteration would compute all of the chain, to keep one of it: the work of T values stacked is T * T. In pieces between the constants that the
coordinate is compared with, each has its own value alone.
"""
from __future__ import annotations

from itertools import count

from ..fuse.cost import GRAIN, Hints
from ..ir.dtype import BOOL
from ..ir.expr import Const, Coord, Expr, Load, Op, Reduce, Rewriter, Scan, walk
from ..ir.index import Axis, Index, as_index
from ..ir.ranges import bounds
from ..ir.rewrite import Simplifier
from .body import Body, Store, coalesce, exprs_of

PIECES = 64             # of one store at most: each is text of its own
LENGTH = 8              # coordinates of a piece at most, on average: few long ones save little, and reads that they share would be apart. In ms,
                        # whole / in pieces, one core with AVX-512: a scan of 16 steps whose results are stacked (4 x 256 rows of 16) 5.0 / 0.41;
                        # pairs of 4 x 16 x 512 x 64 numbers rotated 3.8 / 2.6, with backward 29 / 7.4
FEW, LONG = 8, 16       # pieces of the axis along lanes at most, elements of each at least
PARTIAL = 12            # partial results of folds across threads that such pieces may make
SPREAD = 16             # extent up to which an axis that threads share out is given up for pieces
TURN = 1024             # elements along lanes that count as one iteration of the others
SHARES = 16             # iterations of the others for each thread, times its pieces, from which on a longer one is, too: a state space model's 32
                        # steps of 2 x 256 x 16 with backward 10.6 / 7.2; sines and cosines of ten multiples of 8192 x 3 coordinates, side by side
                        # with these, 8.5 / 0.42

COMPARISONS = {"lt": (0,), "ge": (0,), "le": (1,), "gt": (1,), "eq": (0, 1), "ne": (0, 1)}      # where a comparison changes, from its constant on


def in_pieces(b: Body, vector: Axis | None, hints: Hints, threads: int) -> Body:
    """`b` with such stores in pieces. What runs along lanes stays whole, so that one loop of the kernel serves all of it."""
    if b.base is not None or any(s.monoid is not None for s in b.stores):
        return b
    exprs = walk(*exprs_of(b))
    folds = [e for e in exprs if isinstance(e, (Reduce, Scan))]
    read = {e.node for e in exprs if isinstance(e, Load)}
    alone = len(b.stores) == 1 and not folds
    bound = {a for f in folds for a in ((f.along,) if isinstance(f, Scan) else f.over)}.union(*(f.free for f in folds))
    small = hints.count(b.parallel) < GRAIN             # one thread runs all
    turns = lambda a: hints.count(b.parallel - {a, vector}) * (1 if vector not in b.parallel else max(1, hints(vector.extent) // TURN))
    many = lambda a: threads <= turns(a) >= SHARES * threads // max(len(cuts(b.stores[0].expr, a)) - 1, 1)
    spared = lambda a: small or a.extent.constant <= SPREAD or many(a)
    short = lambda a: a.extent.constant is not None and (a not in b.parallel or alone and spared(a))
    open_axes = [a for a in b.axes if a is not vector and a not in bound and short(a)]
    fresh = count(max((a.id for a in b.axes), default=0) + 1)
    stores: list[Store] = []
    for s in b.stores:
        found = {a: cuts(s.expr, a) for a in open_axes if a in s.axes} if s.memory not in read else {}
        along = max(found, key=lambda a: len(found[a]), default=None)
        if along is None or len(found[along]) < 3 or along.extent.constant > LENGTH * (len(found[along]) - 1):
            stores.append(s)
        else:
            stores += [_piece(s, along, low, high, fresh) for low, high in zip(found[along], found[along][1:])]
    if len(stores) == len(b.stores):
        return b
    kept = bound.union(*(s.axes for s in stores))
    new = sorted(kept.difference(b.axes), key=lambda a: a.id)
    return coalesce(Body((*(a for a in b.axes if a in kept), *new), tuple(stores), b.parallel & kept))


def lanes_in_pieces(b: Body, vector: Axis | None) -> Body:
    """`b` with what differs between long pieces of the axis along lanes (gates side by side) as one store a piece: those of one length share a loop,
    so that what several of them read is read once, and nothing is read under a mask."""
    exprs = walk(*exprs_of(b))
    folds = [e for e in exprs if isinstance(e, (Reduce, Scan))]
    read = {e.node for e in exprs if isinstance(e, Load)}
    bound = {a for f in folds for a in ((f.along,) if isinstance(f, Scan) else f.over)}
    if vector is None or vector.extent.constant is None or vector in bound or b.base is not None or any(s.monoid is not None for s in b.stores):
        return b
    pieces = {s: cuts(s.expr, vector) for s in b.stores if vector in s.axes and s.memory not in read}
    pieces = {s: at for s, at in pieces.items() if 2 < len(at) <= FEW + 1 and all(high - low >= LONG for low, high in zip(at, at[1:]))}
    lengths = {high - low for at in pieces.values() for low, high in zip(at, at[1:])}
    partial = sum(len(pieces[s]) - 1 for s in pieces for e in walk(s.expr) if isinstance(e, Reduce) and set(e.over) & b.parallel)
    if not pieces or partial > PARTIAL or vector in b.parallel and (len(lengths) > 1 or any(s not in pieces for s in b.stores)):
        return b
    first = max(a.id for a in b.axes) + 1
    own = {n: Axis(first + k, as_index(n)) for k, n in enumerate(sorted(lengths))}
    stores: list[Store] = []
    for s in b.stores:
        stores += [part(s, vector, low, own[high - low]) for low, high in zip(pieces[s], pieces[s][1:])] if s in pieces else [s]
    kept = bound.union(*(s.axes for s in stores))
    parallel = b.parallel | set(own.values()) if vector in b.parallel else b.parallel
    return coalesce(Body((*(a for a in b.axes if a in kept), *own.values()), tuple(stores), parallel & kept))


def cuts(e: Expr, a: Axis) -> list[int]:
    """The ends of the pieces of `a` in each of which what `e` compares `a` with is known: 0, ..., its extent; none where they are too many."""
    extent, found = a.extent.constant, set()
    if extent is None:
        return []
    for x in walk(e):
        if not isinstance(x, Op) or x.name not in COMPARISONS or not isinstance(x.args[0], Coord) or not isinstance(x.args[1], Const):
            continue
        i = x.args[0].index
        if (i - a).constant is not None:
            found.update(x.args[1].value - (i - a).constant + n for n in COMPARISONS[x.name])
        elif i.axes() == {a} and extent <= LENGTH:
            found.update(range(extent))
    at = sorted({0, extent, *(n for n in found if 0 < n < extent)})
    return at if len(at) <= PIECES + 1 else []


def values(s: Store, a: Axis) -> list[Expr]:
    """What `s` stores in each piece of `a`, but for constants."""
    at = cuts(s.expr, a)
    found = (part(s, a, low, Axis(a.id, as_index(high - low))).expr for low, high in zip(at, at[1:]))
    return [e for e in found if not isinstance(e, Const)]


def _piece(s: Store, a: Axis, low: int, high: int, fresh) -> Store:
    """What `s` stores where `a` is from `low` on and below `high`."""
    return part(s, a, low, as_index(0) if high - low == 1 else as_index(Axis(next(fresh), as_index(high - low))))


def part(s: Store, a: Axis, low: int, own: Index | Axis, renamed: dict = {}) -> Store:
    """What `s` stores where `a` is `own` + `low`; `renamed`: other axes in the place of those that are folded."""
    own = as_index(own)
    rewrite = Rewriter({a: own + low, **renamed}, _known)
    return Store(s.memory, rewrite.index(s.address), Simplifier().root(rewrite(s.expr)), (s.axes - {a}) | own.axes())


def _known(e: Expr) -> Expr | None:
    """A comparison of a coordinate with a constant, or with another, as what it is for every coordinate, if it is the same for all."""
    d = difference(e)
    low, high = (None if x is None else x.constant for x in bounds(d)) if d is not None else (None, None)
    if low is None or high is None:
        return None
    always, never = {"lt": (high < 0, low >= 0), "ge": (low >= 0, high < 0), "le": (high <= 0, low > 0), "gt": (low > 0, high <= 0),
                     "eq": (low == high == 0, low > 0 or high < 0), "ne": (low > 0 or high < 0, low == high == 0)}[e.name]
    return Const(bool(always), BOOL) if always or never else None


def difference(e: Expr) -> Index | None:
    """What a comparison compares with 0: of a coordinate and a constant, or of two coordinates, the one less the other."""
    if not isinstance(e, Op) or e.name not in COMPARISONS or not isinstance(e.args[0], Coord) or not isinstance(e.args[1], (Const, Coord)):
        return None
    return e.args[0].index - (e.args[1].index if isinstance(e.args[1], Coord) else e.args[1].value)
