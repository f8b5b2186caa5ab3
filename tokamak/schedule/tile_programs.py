"""More short rows to a program, where programs are so many that beginning them takes longer than moving what they read and write. An H200's
multiprocessor begins one in about 84 ns, so all of them one in 0.64, in which memory moves 2.7 KB: kernels of 900000 rows, eight a program, took 72
us whatever else was tried. us, as they were and so: softmax of 900000 x 42 bf16 72.3, 45.5 (8 rows, 16), of 900000 x 66 77.4, 62.3, of 600000 x 90
94.8, 56.9 (4, 8), of 500000 x 110 80.0, 59.2, its gradient of 400000 x 46 f32 65.0, 56.9, dropout and LayerNorm of 38891 x 78 f32 28.0, 17.5; but of
600000 x 37 f32, 2368 bytes a program, 49.8, 55.7.
"""
from __future__ import annotations

import math
from dataclasses import replace

from ..fuse.lines import SECTOR
from ..ir.expr import Load
from ..ir.index import Axis
from .schedule import strides_of
from .tile_facts import TileFacts
from .tile_schedule import TileSchedule
from .tile_stages import power

BYTES = 2304            # that a program reads and writes at least
MANY = 128              # programs to a multiprocessor from which on: softmax of 45067 x 127 bf16, 85 of them, 9.3 us, 11.4 so


def filled(of: TileFacts, s: TileSchedule) -> TileSchedule:
    """`s`, with as many rows to a program as BYTES are, where each program holds some that it writes; `s` itself where they are enough."""
    pieces = dict(s.pieces)
    beside = next((a for a in reversed(s.order) if a in pieces and a in of.b.parallel), None)
    plain = not s.looped and not s.split and not s.flat and s.staged is None and s.shift is None and of.b.base is None
    if not plain or beside is None or len(pieces[beside]) > 1 or not of.stored_along() or of.scans():
        return s
    if min(pieces.get(of.line, (1,))) * of.narrowest() < SECTOR:        # log-softmax of 262143 x 51 bf16 in pieces of 8 33.8 us
        return s
    size, programs = _bytes(of, pieces), of.blocks(of.b.parallel, pieces)
    most = power(of.hints(beside.extent))
    while size < BYTES and programs >= MANY * of.target.threads and 2 * pieces[beside][0] <= most:
        pieces[beside] = (2 * pieces[beside][0],)
        size, programs = 2 * size, programs // 2
    if pieces == dict(s.pieces):
        return s
    exact = s.exact - {beside} | ({beside} if of.hints.divides(pieces[beside][0], beside.extent) else set())
    return replace(s, pieces=tuple((a, pieces[a]) for a, _ in s.pieces), exact=exact)


def _bytes(of: TileFacts, pieces: dict[Axis, tuple[int, ...]]) -> int:
    """Bytes that a program of tiles of `pieces` reads and writes of what differs from program to program."""
    lanes = lambda a: min(sum(pieces.get(a, (1,))), of.hints(a.extent)) if a in of.b.parallel else of.hints(a.extent)
    moved = {(e.node if isinstance(e, Load) else e.memory, address): size for e, address, size in strides_of(of.b)}
    return sum(size * math.prod(map(lanes, address.axes())) for (_, address), size in moved.items() if of.b.parallel <= address.axes())
