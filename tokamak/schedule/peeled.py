"""Where the last block of the one axis of a tile is a branch of its own, so that all others need no mask. Without, nothing is read or written in
words where the axis ends at no word: SiLU times a gate, f16 and bf16, of 12755 x 6222 backward 363 us, of 133 x 156851 87.5; and of moments each
element is weighed, which programs of 64 registers a thread have no room for: 212 rows of 120440 97 us (H100), 24 so.
"""
from __future__ import annotations

from ..ir.index import Axis
from .tile_facts import TileFacts
from .tile_statistics import WORD


def last_block(of: TileFacts, pieces: dict[Axis, tuple[int, ...]], by_thread: bool) -> bool:
    """Is it worth a branch in tiles of `pieces`, of an axis that they do not cover exactly? `by_thread`: see `TileSchedule`."""
    a, b = of.line, of.b
    if a is None or tuple(pieces) != (a,) or any(s.monoid is not None for s in b.stores):
        return False
    if not of.rows and not of.crossed and b.parallel == {a}:
        most = of.hints.most(a.extent)
        return not of.hints.divides(WORD // of.narrowest(), a.extent) and (most is None or most >= sum(pieces[a]))
    return by_thread and a in of.crossed and any(e.monoid == "moments" for e in of.crossing)
