"""A VectorSchedule: how products of a matrix and a vector run. Each program folds a few rows of the matrix, in f32: a tile of a few rows by many
elements of the depth is multiplied element by element, and what each lane has carried is added up behind the loop.

    dims        the axis of the result
"""
from __future__ import annotations

import math

from ..fuse.contraction import Contraction
from ..fuse.cost import Hints
from ..fuse.sizes import runs_along
from ..ir.expr import loads
from ..ir.index import Axis
from .tile_stages import power

ALONG = 1024            # elements of a step along the depth, for four rows of 16 bits: 4096 to 4096 11.9 us, 12.9 one row of 4096, 13.9 in stages
ROWS = 4                # of the matrix that a program takes at a time at most, of elements of 16 bits and more
PACKED_ROWS = 8         # of elements of 8 bits or fewer: int8 8.2 us, 9.0 four rows of 2048; int4 8.2, 9.3
FILL = 512              # programs that there should be before one takes several rows: 4096 to 1024 5.0 us a row, 5.4 two, 5.9 four


def sizes(c: Contraction, hints: Hints) -> tuple[Axis, dict[Axis, int]] | None:
    """(the axis of the result, the lengths of a tile along it and along the depth), or None where the matrix does not lie along the depth, or where
    the depth is in slices: each element would be scaled."""
    many = max((*c.rows, *c.columns), key=lambda a: hints(a.extent))
    matrix = [e for e in loads(c.left if many in c.left.free else c.right) if many in e.free and c.depth in e.free]
    if not all(runs_along(e, c.depth) for e in matrix) or c.outer:
        return None
    most = PACKED_ROWS if min((e.dtype.bytes for e in matrix), default=2) == 1 else ROWS
    rows = next((n for n in (most, most // 2, most // 4) if hints.count(c.fold.free) >= n * FILL), 1)
    along = ALONG * most // rows // math.prod(a.extent.constant for a in c.digits)
    return many, {many: rows, c.depth: min(along, power(hints(c.depth.extent)))}
