"""Tiles of rows beside which something lies along another axis: what is read or written contiguously along the rows, and something else along an axis
that programs run in parallel over (the result of a norm that is transposed, biases of positions whose heads are innermost, tokens of an image). A row
a program would take of each memory sector one element; so programs have several rows, whole sectors of what lies across, and Triton lays each access
out for itself, through shared memory. Long rows are run through, a square at a time.
"""
from __future__ import annotations

from ..fuse.lines import WRITTEN_ABREAST, SECTOR
from ..ir.index import Axis
from .schedule import strides_of
from .tile_facts import TileFacts
from .tile_schedule import cover
from .tile_stages import power

SHORTEST = 8            # elements along either axis at least
HELD = 16384            # lanes of a tile that holds its rows at most
RUN = 64                # bytes that lie across rows of a tile where there are programs enough, SECTOR at least
PIECES = 2              # pieces of a row at most; one with idle lanes where it would have more
SQUARE = 64, 64         # lanes of a tile along the rows and across them where they are run through
EACH = 16               # lanes to a thread, about
MOST_WARPS = 16
FILL = 2                # programs for each multiprocessor at least, where rows across can be fewer


def choose(of: TileFacts) -> tuple[dict[Axis, tuple[int, ...]], frozenset[Axis], int] | None:
    """(the pieces of the row and of the axis across, what is run through, warps); None where nothing lies across."""
    if of.crossed or not 1 <= len(of.rows) <= 2 or of.target.ordered or not of.folds or of.scans() or of.b.base is not None \
            or any(s.monoid is not None or s.guard is not None for s in of.b.stores):
        return None
    if len(of.rows) == 2:
        return _groups(of)
    row, = of.rows
    found = across(of, row)
    n = of.hints.most(row.extent)
    if found is None or of.line not in (row, found[0]):
        return None
    axis, size = found
    length = power(of.hints(axis.extent))
    pieces = cover(n) if n is not None else ()
    pieces = pieces if len(pieces) <= PIECES else (power(n),)
    least = min(length, SECTOR // size)
    if not pieces or sum(pieces) * least > HELD:
        along, beside = (min(s, power(of.hints(a.extent))) for s, a in zip(SQUARE, (row, axis)))
        return {row: (along,), axis: (beside,)}, frozenset((row,)), _warps(along * beside)
    count = min(length, RUN // size, HELD // power(sum(pieces)))
    while count > least and of.blocks(of.b.parallel, {axis: (count,)}) < FILL * of.target.threads:
        count //= 2
    return {row: pieces, axis: (count,)}, frozenset(), _warps(sum(pieces) * count)


def _groups(of: TileFacts) -> tuple[dict[Axis, tuple[int, ...]], frozenset[Axis], int] | None:
    """The same of rows along two axes, one of which is a short piece of the lines of what lies across: whole sectors of several rows."""
    both = {(address, size) for _, address, size in strides_of(of.b) if set(of.rows) <= address.axes()}
    for c, h in (of.rows, reversed(of.rows)):
        turned = {(address, size) for address, size in both if address.coefficient(c) == 1 and address.coefficient(h) != 1}
        if not turned or not any(address.coefficient(h) == 1 for address, _ in both) or any(of.hints.most(a.extent) is None for a in (c, h)):
            continue
        groups = {a for address, _ in turned for a in of.b.parallel if address.coefficient(a) is c.extent}
        if len(groups) != 1:
            continue
        (g,), run = groups, of.hints(c.extent) * min(size for _, size in turned)
        row = (power(of.hints.most(c.extent)),), cover(of.hints.most(h.extent))
        count = min(power(of.hints(g.extent)), power(-(-SECTOR // run)))
        lanes = row[0][0] * sum(row[1]) * count
        if count > 1 and lanes <= WRITTEN_ABREAST:
            return {g: (count,), c: row[0], h: row[1]}, frozenset(), _warps(lanes)
    return None


def across(of: TileFacts, row: Axis) -> tuple[Axis, int] | None:
    """(the parallel axis along which something lies contiguously that strides along `row`, bytes of its elements), where something else lies along
    `row` and strides along that axis."""
    both = {(address, size) for _, address, size in strides_of(of.b) if row in address.axes() and len(address.axes()) > 1}
    strides = lambda address, a: bool(address.coefficient(a).terms) and address.coefficient(a) != 1
    for a in reversed(of.order):
        if a in of.b.parallel and min(of.hints(a.extent), of.hints(row.extent)) >= SHORTEST:
            turned = [size for address, size in both if address.coefficient(a) == 1 and strides(address, row)]
            if turned and any(address.coefficient(row) == 1 and strides(address, a) for address, _ in both):
                return a, min(turned)
    return None


def _warps(lanes: int) -> int:
    return max(1, min(MOST_WARPS, power(lanes // (32 * EACH) + 1) // 2))
