"""(Body, PrefixSchedule) -> TileKernels: prefixes in blocks. What a kernel leaves for the next is memory that it fills by stores like any other."""
from __future__ import annotations

from dataclasses import replace

from ..schedule import beside, tile_sequence
from ..schedule.body import Body, Memory
from ..schedule.prefixes import PrefixSchedule, phases
from .tile_kernel import TileKernel, Workspace
from .tile_parts import TilePart, lower_tiles, side_by_side


def lower_prefixes(body: Body, schedule: PrefixSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order; as `tile_parts.lower_tiles`."""
    def memory(elements, dtype) -> Memory:
        return Memory(Workspace((elements,), dtype, device), dtype)
    before, last = phases(body, schedule, hints, memory)
    kernels: tuple[TileKernel, ...] = ()
    for phase in before:
        made = lower_tiles(phase.body, choose_again(phase.body), hints, device, choose_again, fast)
        kernels += (replace(made[0], fills=tuple((m.node, e) for m, e in phase.fills)), *made[1:])
    chosen = [(x, choose_again(x)) for x in last]
    if len(chosen) > 1 and all(beside.plain(s) for _, s in chosen):
        whole, joined = beside.joined(chosen)
        return (*kernels, side_by_side(whole, joined, [TilePart] * len(chosen), hints, device, fast))
    return (*kernels, *(k for x, s in chosen for k in lower_tiles(x, s, hints, device, choose_again, fast)))
