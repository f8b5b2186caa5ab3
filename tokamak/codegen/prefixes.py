"""(Body, PrefixSchedule) -> TileKernels: prefixes in blocks. What a kernel leaves for the next is memory that it fills by stores like any other."""
from __future__ import annotations

from dataclasses import replace

from ..schedule import beside, tile_sequence
from ..schedule.body import Body, Memory
from ..schedule.prefixes import PrefixSchedule, phases
from .tile_kernel import TileKernel, Workspace
from .tile_parts import TilePart, lower_tiles, side_by_side


def lower_prefixes(body: Body, schedule: PrefixSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order; as `tile_parts.lower_tiles`. Blocks come in the order that finds in the cache what was last read."""
    def memory(elements, dtype) -> Memory:
        return Memory(Workspace((elements,), dtype, device), dtype)
    phased, last = phases(body, schedule, hints, memory)
    made = [(phase.body, choose_again(phase.body)) for phase in phased]
    chosen = [(x, choose_again(x)) for x in last]
    large = [n for n, x in enumerate(made) if not tile_sequence.small(x[0], hints)]
    if large:
        blocks = chosen[0][0], tile_sequence.after(chosen[0], made[large[-1]], hints)
        if blocks[1].backward:
            made[large[-1]] = made[large[-1]][0], tile_sequence.leaving(made[large[-1]], hints)
            chosen[0] = blocks
    kernels: tuple[TileKernel, ...] = ()
    for phase, one in zip(phased, made):
        first, *rest = lower_tiles(*one, hints, device, choose_again, fast)
        kernels += (replace(first, fills=tuple((m.node, e) for m, e in phase.fills)), *rest)
    if len(chosen) > 1 and all(beside.plain(s) for _, s in chosen):
        whole, joined = beside.joined(chosen)
        return (*kernels, side_by_side(whole, joined, [TilePart] * len(chosen), hints, device, fast))
    return (*kernels, *(k for one in chosen for k in lower_tiles(*one, hints, device, choose_again, fast)))
