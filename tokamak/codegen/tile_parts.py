"""(Body, TileSchedule) -> TileKernels: the kernels of a group, in running order; and several bodies as one kernel, side by side."""
from __future__ import annotations

from collections.abc import Iterable

from ..ir.index import as_index
from ..schedule import beside
from ..schedule.body import Body
from ..schedule.tile_schedule import TileSchedule
from .tile_flat import FlatLowering
from .tile_kernel import For, TileKernel
from .tile_stages import StagedLowering
from .tiles import TileLowering, base_body, combining


def lower_tiles(body: Body, schedule: TileSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order. `choose_again(body)` gives the schedule of a further kernel. `fast`: by the policy of that name, f32
    functions may be a few units in the last place off where all that comes out is rounded to 16 bits, and what is summed is divided by reciprocals.
    Raises Unschedulable."""
    first: tuple = ()
    if body.base is not None:
        base = base_body(body)
        first = lower_tiles(base, choose_again(base), hints, device, choose_again, fast)
    lowering = StagedLowering if schedule.staged is not None else FlatLowering if schedule.flat else TileLowering
    return first + lower_by(lowering, body, schedule, hints, device, choose_again, fast)


def lower_by(lowering: type[TileLowering], body: Body, schedule: TileSchedule, hints, device: str, choose_again,
             fast: bool) -> tuple[TileKernel, ...]:
    """The kernel that `lowering` makes of `body`, and behind it those that combine what its programs leave; as `lower_tiles`."""
    made = lowering(body, schedule, hints, device, fast=fast)
    kernels = [made.kernel()]
    seconds = [(second, choose_again(second)) for second in combining(body, schedule, made.spaces)]
    if len(seconds) > 1 and all(beside.plain(s) for _, s in seconds):
        whole, joined = beside.joined(seconds)
        return (*kernels, side_by_side(whole, joined, [TilePart] * len(seconds), hints, device, fast))
    for second in seconds:
        kernels += lower_tiles(*second, hints, device, choose_again, fast)
    return tuple(kernels)


class Beside:
    """One of several kernels' lowerings that are one kernel: its programs' numbers begin at `first` (text)."""
    first = ""

    def _program(self) -> str:
        return f"({super()._program()} - {self.first})" if self.first else super()._program()


class TilePart(Beside, TileLowering):
    """Values of tiles."""


def side_by_side(body: Body, schedule: beside.BesideSchedule, kinds: Iterable[type[TileLowering]], hints, device: str,
                 fast: bool = False) -> TileKernel:
    """The kernel of `body`, whose stores are those of the parts of `schedule` in order, each lowered by one of `kinds`. A program's number says which
    part it works on; parameters and registers are counted on from one to the next. Raises Unschedulable."""
    made, before, last, stores = [], as_index(0), None, list(body.stores)
    # the memory is the body's: an equal group's schedule may be that of another one
    for kind, (was, s) in zip(kinds, schedule.parts, strict=True):
        part = Body(was.axes, tuple(stores[:len(was.stores)]), was.parallel)
        del stores[:len(was.stores)]
        one = kind(part, s, hints, device, fast=fast)
        if last is not None:
            one.params, one.errors, one.counter, one.sources = last.params, last.errors, last.counter, last.sources
            one.keys = {k: name for k, name in last.keys.items() if k[0] == "memory"}
            one.first = one.param("int", ("first",), before)
        kernel = one.kernel()
        made.append((one.first, kernel))
        before, last = before + kernel.grid, one
    lines, ends = [], [first for first, _ in made[1:]]
    # one after the other, not nested: what they hold of shared memory is never there at once
    for (first, kernel), end in zip(made, [*ends, ""]):
        here = [f"tl.program_id(0) >= {first}"] * bool(first) + [f"tl.program_id(0) < {end}"] * bool(end)
        lines.append(For(f"if {' and '.join(here)}", list(kernel.lines)))
    aligned = frozenset(p.name for p in last.params if p.kind == "int" and hints.divides(16, p.source))
    return TileKernel(tuple(last.params), tuple(lines), before, schedule, body, tuple(last.errors), last.sources, (), aligned)
