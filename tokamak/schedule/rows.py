"""A RowsSchedule: how narrow layers whose gradients are summed over the rows run on a GPU. Programs share the rows; each holds all weights, runs
through its blocks of rows, and carries what is summed over them.

    depth       the axis of rows, which is the one that is split
    widths      the narrow axes, all of which a tile holds
    half        the one of which each of two neighbours, which run through the same rows, has one half
    turned      tiles lie along a narrow axis and the rows, so that products have the narrow axes' elements in their rows: eight warps multiply 128
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..fuse import narrow
from ..fuse.cost import Hints
from ..ir.expr import Reduce, walk
from ..ir.index import Axis
from .body import Body, Store, exprs_of
from .matmul import MatmulSchedule
from .tile_access import wide

PER = 2                 # programs of four warps to a multiprocessor; one of eight
TURNED_SHARED = 226 << 10       # bytes of shared memory of turned tiles without sums across the rows
FEW = 10240             # elements that are carried by four warps; more by eight


@dataclass(frozen=True)
class RowsSchedule(MatmulSchedule):
    """The schedule of narrow layers, row by row."""
    widths: tuple[Axis, ...] = ()
    turned: bool = False
    half: Axis | None = None

    def __str__(self) -> str:
        shared = f" half(i{self.order.index(self.half)})" if self.half is not None else ""
        return f"narrow layers, {super().__str__()}" + (" turned" if self.turned else "") + shared


def crossing(b: Body) -> list[Reduce]:
    """What is summed over rows, each once."""
    return [e for e in narrow.folds([s.expr for s in b.stores]) if set(e.over) & b.parallel]


def local(b: Body) -> tuple[Store, ...]:
    """The stores along the rows."""
    return tuple(s for s in b.stores if b.parallel <= s.axes)


def choose(b: Body, hints: Hints, target) -> RowsSchedule | None:
    """The schedule of a body whose folds are all within its rows or across them; None for any other."""
    exprs = exprs_of(b)
    found = narrow.rows_of(b.axes, exprs) if narrow.multiplied(exprs) else None
    updates = b.base is not None or any(s.monoid is not None or s.guard is not None for s in b.stores)
    if target.ordered or found != b.parallel or len(found) != 1 or updates:
        return None
    if not narrow.expressed(exprs, found) or narrow.infeasible(exprs, found) is not None:
        return None
    if any(len(s.axes) != 2 for s in local(b)) or any(found <= s.axes and any(e in crossing(b) for e in walk(s.expr)) for s in b.stores):
        return None
    rows, = found
    widths = tuple(a for a in b.axes if a is not rows)
    half = narrow.halved(exprs, found)
    warps, stages = 4 if narrow.carried(exprs, found) <= FEW else 8, narrow.stages(exprs, found, half=half)
    blocks = -(-hints(rows.extent) // narrow.ROWS)
    programs = max(1, min((PER if warps == 4 else 1) * target.threads // (1 if half is None else 2), blocks))
    return _schedule(rows, widths, programs, warps, stages, wide(b, hints), half is not None, half)


def whole(b: Body, s: MatmulSchedule, hints: Hints, target) -> tuple[Body, RowsSchedule] | None:
    """Two layers back to back, whose weights the schedule `s` holds in blocks or reads step by step, with all of them held in turned tiles: eight
    warps multiply 128 rows of weights at a time, and no row of hidden values is in the registers of one warp. 131072 rows, 128 to 256 to 128: 39.9
    us, 48 in blocks; with the hidden values kept 50, 58; where something is read beside the products (a gradient's mask) 67.6, but 133 with what lies
    between them stored, 100 in steps. None for that, where they are fewer (then four warps have registers for a row's, not measured so), where
    something has no room, and for tall blocks, which are faster."""
    if s.inner is None or len(s.order) != 4 or b.base is not None or s.stages == 1:
        return None
    rows = s.dims[0]
    found, exprs, widths = frozenset((rows,)), exprs_of(b), tuple(a for a in b.axes if a is not s.dims[0])
    b = replace(b, parallel=found)
    fits = narrow.fill_two(s.depth.extent, *(a.extent for a in widths if a is not s.depth))
    fits = fits and narrow.expressed(exprs, found) and not (narrow.beside(exprs, found) and any(s.depth in x.axes for x in b.stores))
    stages = narrow.stages(exprs, found, shared=TURNED_SHARED, turned=True) if fits else 0
    if stages < 2 or len(local(b)) != len(b.stores) or any(len(x.axes) != 2 or x.monoid is not None or x.guard is not None for x in b.stores):
        return None
    programs = max(1, min(target.threads, -(-hints(rows.extent) // narrow.ROWS)))
    return b, _schedule(rows, widths, programs, 8, stages, s.wide, turned=True)


def _schedule(rows: Axis, widths: tuple[Axis, ...], programs: int, warps: int, stages: int, far: bool, turned: bool = False,
              half: Axis | None = None) -> RowsSchedule:
    """Tiles of `narrow.ROWS` rows by all of the narrow axes, or one half of one. `far`: are offsets of 64 bits?"""
    pieces = ((rows, (narrow.ROWS,)), *((a, (narrow.held(a, half),)) for a in widths))
    exact = frozenset(a for a, (n,) in pieces if a.extent.constant is not None and a.extent.constant % n == 0)
    return RowsSchedule((rows, *widths), (rows, widths[0]), pieces, frozenset(), (rows,), programs, exact, warps, stages, wide=far,
                        depth=rows, group=1, widths=widths, turned=turned, half=half)
