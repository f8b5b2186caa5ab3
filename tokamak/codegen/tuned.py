"""What `tokamak tune` found, taken up: schedules of kernels that have been tried on this device.

A kernel is known by its structure, the text that the heuristic's schedule gives, and by the octave of each of its extents. The table maps that to
changes of the schedule (`schedule.neighbours`), none where the heuristic's was the fastest, and the schedule then stays; a kernel that is not in it
keeps the heuristic's until its machine code has a quicker one (`quicker`), and an empty table costs nothing.
"""
from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from ..fuse.cost import Hints
from ..fuse.sizes import octave
from ..schedule import sizeless, tiles
from ..schedule.body import Body
from ..schedule.neighbours import changed
from ..schedule.tile_schedule import TileSchedule
from . import triton
from .scope import Unschedulable
from .tile_kernel import TileKernel
from .tiles import TileLowering

Table = Mapping[str, tuple[str, ...]]           # structure -> changes


def structure(k: TileKernel, hints: Hints) -> str:
    """What a kernel of a heuristic's schedule is known by."""
    extents = tuple(octave(hints(a.extent)).like for a in k.schedule.order)
    s, text = k.schedule, (triton.render(k, "kernel"), triton.signature(k), sorted(triton.divisible(k)))
    return hashlib.sha256(repr((text, s.warps, s.stages, s.registers, extents)).encode()).hexdigest()[:32]


def choose(b: Body, hints: Hints, target, table: Table) -> TileSchedule:
    """The schedule for `b` on a GPU: the heuristic's, with the changes that `table` has for it."""
    if target.ordered:
        return sizeless.choose(b, hints, target)
    s = tiles.choose(b, hints, target)
    if not table or s.staged is not None:          # rows in stages have one way to be held
        return s
    try:
        plain = TileLowering(b, s, hints, target.name, fast=target.fast).kernel()
        known = table.get(structure(plain, hints))
        made = changed(b, s, known, hints) if known is not None else None
        if made is None:
            return s
        if made != s:
            TileLowering(b, made, hints, target.name, fast=target.fast).kernel()
        return replace(made, measured=True)
    except Unschedulable:
        pass
    return s
