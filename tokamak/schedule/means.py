"""A MeansSchedule: how weighted means (`fuse.weighted`) run on a GPU. Each program makes the means of a few rows, all columns of them, and runs along
the depth in steps; the product that the weights are made of is made within a step, of a depth that is held. Few rows, of all the heads that share
keys, are one tile, whose programs share the keys.

40 x 64 heads of 512 x 64 and 4 x 32 of 4096 x 128 f16, us, by rows, steps, stages and warps: 64 by 64, 3, 4 450 and 2386; 128 by 64, 3, 8 467 and
2235; 2, 8, with 128 registers a thread, so that two programs share a multiprocessor, 544 and 2099; 64 by 128, 3, 8 554 and 2549; 128 by 128, 3, 8 615
and 2218; the library's attention 422 and 1875. Through descriptors 520, 2413 and 569, 2222 where these took 450, 2386 and 544, 2099; with the next
step's exponents made while weights are 556 for 459, since ptxas runs such products one by one.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from ..fuse.contraction import SIDE, TURNED, WIDE, Contraction, chained
from ..fuse.cost import Hints
from ..fuse.weighted import scaled
from ..ir.expr import Cast, Load, Rewriter, loads
from ..ir.index import Axis, as_index
from ..ir.normal import floordiv, mod
from .body import Body, rewritten
from .matmul import MatmulSchedule, _schedule, _side, folds_of, inner_of
from .tile_stages import power

NARROW_WIDTH = 64       # of the columns, and of the depth within, up to which registers and shared memory hold several programs of 64 rows
STEP = 64               # along the depth; of up to 16 narrow rows twice as many, of wide ones by four stages: 8 heads of 8192 x 64 bf16, four rows
                        # each, us, 11.1 by 64, 10.1 by 128; 96 of 1024 x 64, a row each, 14.3, 11.6; but where a mask is read, too, 10.0 by 64, 14.5
                        # by 128; 8 of 2048 x 128 8.1 by three stages, 7.8 by four, 128 of 4096 x 128 75.3, 74.9, of 1024 x 128 22.5, 23.5
REGISTERS = 128         # a thread of two programs of 8 warps to a multiprocessor


@dataclass(frozen=True)
class MeansSchedule(MatmulSchedule):
    """A MatmulSchedule of weighted means."""


def choose(b: Body, hints: Hints, target) -> tuple[Body, MeansSchedule] | None:
    """A body whose folds are one weighted mean, and the product that its weights are made of, and its schedule; None for any other body."""
    found = folds_of(b)
    if found is None or len(found) != 1 or found[0].exponents is None:
        return None
    b = _apart(b, found[0], inner_of(found))
    c, within = _products(b)
    if len(within) > 1 or within and not chained(c, within[0]):
        return None
    if not c.rows and within:
        b = _with_a_row(b, c, within[0])
        c, within = _products(b)
    if len(c.rows) > 1 and hints.count(c.rows) <= TURNED:
        b = _as_one(b, c.rows)
        c, within = _products(b)
    rows, (columns,) = max(c.rows, key=lambda a: hints(a.extent)), c.columns
    inner = within[0].depth if within else None
    width = max(power(a.extent.constant or WIDE) for a in (columns, inner) if a is not None)
    few, least = hints(rows.extent) <= TURNED, hints(rows.extent) <= SIDE
    narrow = width <= NARROW_WIDTH or hints(rows.extent) <= NARROW_WIDTH
    step = 2 * STEP if least and width <= NARROW_WIDTH and within and _nothing_between(c, within[0]) else STEP
    sizes = {rows: _side(rows, 64 if narrow else 128, hints), columns: power(columns.extent.constant or WIDE), c.depth: _side(c.depth, step, hints)}
    programs = _shares(b, c, sizes, hints, target) if few else 1
    stages = 4 if least and width > NARROW_WIDTH else 3 if narrow else 2
    made = _schedule(b, c, sizes, hints, inner=inner, stages=stages, warps=4 if narrow else 8, programs=programs, once=few)
    plain = {f.name: getattr(made, f.name) for f in fields(made)}
    return b, MeansSchedule(**plain | {"registers": 0 if narrow or target.arch[:1] != ("cuda",) else REGISTERS})


def _products(b: Body) -> tuple[Contraction, list[Contraction | None]]:
    """The weighted mean of `b`, and what its weights are made of."""
    c, = folds_of(b)
    return c, inner_of([c])


def _nothing_between(c: Contraction, inner: Contraction) -> bool:
    """Are the exponents nothing but the product `inner` times a number?"""
    x = scaled(c.exponents)[0]
    while isinstance(x, Cast):
        x = x.arg
    return x is inner.fold


def _shares(b: Body, c: Contraction, sizes: dict[Axis, int], hints: Hints, target) -> int:
    """Programs that share the depth of a tile, where there are fewer tiles than multiprocessors: one for each of these, with a step at least. Four
    rows each, bf16, us: 8 heads of 8192 x 128 by 16, 33 and 66 programs 16.1, 17.2, 19.2 (16 x 4 rows 17.2, 20.3, 26.7), 64 of 4096 x 128 by 2, 4 and
    8 44.0, 43.6, 47.2 (by hand); 8 of 1024 x 64 by 4, 8 and 16 6.6, 5.5, 5.0; of 512 x 128 by 2, 4 and 8 7.8, 6.1, 5.1."""
    tiles = math.prod(-(-hints(a.extent) // sizes.get(a, 1)) for a in b.parallel)
    steps = -(-hints(c.depth.extent) // sizes[c.depth])
    shares = max(1, min(target.threads // tiles, steps))
    return -(-steps // -(-steps // shares))


def _with_a_row(b: Body, c: Contraction, inner: Contraction) -> Body:
    """`b`, of whose keys each is read for one row alone, with an axis of that row."""
    row, vector = Axis(max(a.id for a in b.axes) + 600000, as_index(1)), inner.left if c.depth in inner.right.free else inner.right
    read = {e: Load(e.node, (e.index[0] + as_index(row) * inner.depth.extent,), e.guard, e.other) for e in loads(vector) if inner.depth in e.free}
    rewrite = Rewriter(leaf=read.get)
    return Body((row, *b.axes), tuple(replace(s, expr=rewrite(s.expr), axes=s.axes | {row}) for s in b.stores), b.parallel | {row})


def _as_one(b: Body, rows: tuple[Axis, ...]) -> Body:
    """`b` with its few rows, of several axes (queries of the heads that share keys), as one."""
    axis = Axis(max(a.id for a in b.axes) + 800000, math.prod((a.extent for a in rows), start=as_index(1)))
    rest, places = as_index(axis), {}
    for n, a in reversed(list(enumerate(rows))):
        places[a] = mod(rest, a.extent) if n else rest
        rest = floordiv(rest, a.extent)
    axes = [x for a in b.axes for x in ((axis,) if a is rows[0] else () if a in rows else (a,))]
    return rewritten(b, places, axes, (b.parallel - set(rows)) | {axis})


def _apart(b: Body, c: Contraction, within: list[Contraction | None]) -> Body:
    """`b` with an axis of its own for the depth of the contraction `within`, where columns of one memory are both that (queries, keys) and what `c`
    has (values)."""
    if len(within) != 1 or within[0] is None or within[0].depth not in c.columns:
        return b
    inner, = within
    axis = Axis(max(a.id for a in b.axes) + 700000, inner.depth.extent)
    made = Rewriter({inner.depth: as_index(axis)})(inner.fold)
    rewrite = Rewriter(leaf=lambda e: made if e is inner.fold else None)
    return Body((*b.axes, axis), tuple(replace(s, expr=rewrite(s.expr)) for s in b.stores), b.parallel)
