"""(Body, TileSchedule) -> TileKernels: the kernels of a group, in running order."""
from __future__ import annotations

from ..schedule.body import Body
from ..schedule.tile_schedule import TileSchedule
from .tile_flat import FlatLowering
from .tile_kernel import TileKernel
from .tile_stages import StagedLowering
from .tiles import TileLowering, base_body, combining, rounded


def lower_tiles(body: Body, schedule: TileSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order. `choose_again(body)` gives the schedule of a further kernel. `fast`: where all that comes out is
    rounded to 16 bits, f32 functions on the way may be a few units in the last place off. Raises Unschedulable."""
    first: tuple = ()
    if body.base is not None:
        base = base_body(body)
        first = lower_tiles(base, choose_again(base), hints, device, choose_again, fast)
    lowering = StagedLowering if schedule.staged is not None else FlatLowering if schedule.flat else TileLowering
    return first + lower_by(lowering, body, schedule, hints, device, choose_again, fast)


def lower_by(lowering: type[TileLowering], body: Body, schedule: TileSchedule, hints, device: str, choose_again,
             fast: bool) -> tuple[TileKernel, ...]:
    """The kernel that `lowering` makes of `body`, and behind it those that combine what its programs leave; as `lower_tiles`."""
    made = lowering(body, schedule, hints, device, fast=fast and rounded(body))
    kernels = [made.kernel()]
    for second in combining(body, schedule, made.spaces):
        kernels += lower_tiles(second, choose_again(second), hints, device, choose_again, fast)
    return tuple(kernels)
