"""(Body, BesideSchedule) -> TileKernel: contractions side by side."""
from __future__ import annotations

from ..schedule.beside import BesideSchedule
from ..schedule.body import Body
from ..schedule.matmul import VectorSchedule
from .matmul import MatmulLowering
from .tile_kernel import TileKernel
from .tile_parts import Beside, side_by_side
from .vector import VectorLowering


class MatmulPart(Beside, MatmulLowering):
    """Products of tiles."""


class VectorPart(Beside, VectorLowering):
    """A product with a vector."""


def lower_beside(body: Body, schedule: BesideSchedule, hints, device: str, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernel of `body`. Raises Unschedulable."""
    kinds = [VectorPart if isinstance(s, VectorSchedule) else MatmulPart for _, s in schedule.parts]
    return (side_by_side(body, schedule, kinds, hints, device, fast),)
