"""A BesideSchedule: contractions side by side in one launch, or the sums of what programs have left of several results. The first programs make the
tiles of the first, the next those of the second."""
from __future__ import annotations

from dataclasses import dataclass, replace

from ..fuse.cost import Hints
from ..ir.expr import walk
from ..ir.index import Axis
from .body import Body, Store, coalesce, exprs_of, indices_of
from .matmul import choose as choose_matmul
from .tile_schedule import TileSchedule


@dataclass(frozen=True)
class BesideSchedule(TileSchedule):
    """`parts`: what stands side by side, a Body and its schedule each; the body that is scheduled has their stores in this order."""
    parts: tuple[tuple[Body, TileSchedule], ...] = ()

    def __str__(self) -> str:
        return f"beside({'; '.join(str(s) for _, s in self.parts)})"


def choose(b: Body, hints: Hints, target) -> tuple[Body, BesideSchedule] | None:
    """The contractions of a body over several sets of axes, each with a schedule of its own; None for any other body."""
    together: dict[frozenset, list[Store]] = {}
    for s in b.stores:
        together.setdefault(s.axes, []).append(s)
    if len(together) < 2 or b.base is not None:
        return None
    made = [choose_matmul(_part(b, axes, tuple(stores)), hints, target, alone=False) for axes, stores in together.items()]
    if any(m is None or m[1].inner is not None for m in made):
        return None
    return joined(made)


def joined(made: list[tuple[Body, TileSchedule]]) -> tuple[Body, BesideSchedule]:
    """Bodies with schedules, as one."""
    warps = max(s.warps for _, s in made)
    parts = tuple((x, replace(s, warps=warps)) for x, s in made)
    whole = Body(tuple(dict.fromkeys(a for x, _ in parts for a in x.axes)), tuple(s for x, _ in parts for s in x.stores),
                 frozenset(a for x, _ in parts for a in x.parallel))
    looped = frozenset(a for _, s in parts for a in s.looped)
    return whole, BesideSchedule(whole.axes, (), (), looped, (), 1, frozenset(), warps, max(s.stages for _, s in parts),
                                 wide=any(s.wide for _, s in parts), parts=parts)


def plain(s: TileSchedule) -> bool:
    """Is `s` of programs that have nothing to do with each other, one tile each?"""
    special = s.split or s.staged is not None or s.shift is not None or s.flat or s.registers or s.backward
    return type(s) is TileSchedule and not special and s.programs == s.sharers == 1


def _part(b: Body, axes: frozenset[Axis], stores: tuple[Store, ...]) -> Body:
    """What `b` stores over `axes`."""
    alone = Body(b.axes, stores, axes)
    used = axes | {a for i in indices_of(alone) for a in i.axes()} | {a for e in walk(*exprs_of(alone)) for a in getattr(e, "over", ())}
    return coalesce(Body(tuple(a for a in b.axes if a in used), stores, axes))
