"""(Body, BesideSchedule) -> TileKernel: contractions side by side. A program's number says which one it works on; parameters and registers are
counted on from one to the next."""
from __future__ import annotations

from ..ir.index import as_index
from ..schedule.beside import BesideSchedule
from ..schedule.body import Body
from ..schedule.matmul import VectorSchedule
from .matmul import MatmulLowering
from .tile_kernel import For, TileKernel
from .tiles import rounded
from .vector import VectorLowering


class _Part:
    """One of them: its programs' numbers begin at `first` (text)."""
    first = ""

    def _program(self) -> str:
        return f"({super()._program()} - {self.first})" if self.first else super()._program()


class MatmulPart(_Part, MatmulLowering):
    """Products of tiles."""


class VectorPart(_Part, VectorLowering):
    """A product with a vector."""


def lower_beside(body: Body, schedule: BesideSchedule, hints, device: str, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernel of `body`. Raises Unschedulable."""
    made, before, last, stores = [], as_index(0), None, list(body.stores)
    for was, s in schedule.parts:           # the memory is the body's: an equal group's schedule may be that of another one
        part = Body(was.axes, tuple(stores[:len(was.stores)]), was.parallel)
        del stores[:len(was.stores)]
        one = (VectorPart if isinstance(s, VectorSchedule) else MatmulPart)(part, s, hints, device, fast=fast and rounded(part))
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
    return (TileKernel(tuple(last.params), tuple(lines), before, schedule, body, tuple(last.errors), last.sources, (), aligned),)
