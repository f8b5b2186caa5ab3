"""When do programs share a row's prefixes (scans), block by block (`schedule.prefixes`)?"""
from __future__ import annotations

from ..ir import ops
from ..ir.expr import Reduce, Scan, walk
from ..ir.graph import Compute
from .axes import Group

COMBINED = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and", "logsumexp": ""}      # monoid -> its operation
ROWS = 1.5              # contiguous rows to a multiprocessor at most: in blocks and by one program a row, H100, bf16 of 264 x 65536 35.2 and 28.6 us
LONG = 32768            # elements of such a row at least: f32 of 64 x 16384 8.2 and 6.2


def few_long(rows: int, elements: int, target) -> bool:
    """Are there so few contiguous rows, of so many elements each, that one program a row would leave most of a GPU idle?"""
    return rows < ROWS * target.threads and elements >= LONG


def in_blocks(group: Group, hints, target) -> bool:
    """Is `group` prefixes along its one axis, and what is made of them, of so many elements that programs share them? `group.members` in the order
    of the graph."""
    axes = frozenset().union(*(m.free | m.bound for m in group.members))
    if target.kind != "gpu" or target.ordered or len(axes) != 1 or not few_long(1, hints.count(axes), target):
        return False
    behind: set = set()
    for m in group.members:
        folds = [e for x in m.roots() for e in walk(x) if isinstance(e, (Reduce, Scan))]
        scans = [e for e in folds if isinstance(e, Scan)]
        after = any(e.node in behind for e in m.loads)
        if not isinstance(m.node, Compute) or any(e.monoid not in COMBINED for e in scans):
            return False
        if len(folds) > len(scans) and (after or any(isinstance(e, Reduce) and e.monoid in ops.MEANS for e in folds)):
            return False
        if scans or after:
            behind.add(m.node)
    return bool(behind)
