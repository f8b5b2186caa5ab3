"""Schedules for an ordered target, where how elements are folded may depend on the fold alone: they are chosen for a body whose other sizes are not
known, and laid over the one whose sizes are. A batch of 64 columns begins at words, one of 65 does not: nothing may be decided by that."""
from __future__ import annotations

from dataclasses import fields, replace

from ..errors import InternalError
from ..fuse.cost import Hints
from ..ir.expr import Reduce, Rewriter, Scan, walk
from ..ir.index import Axis, Index, Size, as_index
from . import tiles
from .body import Body, exprs_of, rewritten
from .neighbours import settled
from .tile_access import wide
from .tile_schedule import TileSchedule


def choose(b: Body, hints: Hints, target) -> TileSchedule:
    """The schedule for `b` on an ordered GPU."""
    folded = {a for e in walk(*exprs_of(b)) for a in (e.over if isinstance(e, Reduce) else (e.along,) if isinstance(e, Scan) else ())}
    hidden = {a: Axis(a.id, Size(f"any{a.id}", 2)) for a in b.axes if a not in folded and a.extent.constant != 1}
    if not folded or not hidden:
        return tiles.choose(b, hints, target)
    rewriter = _Sizeless(hidden)
    unknown = rewritten(b, rewriter.mapping, [hidden.get(a, a) for a in b.axes], {hidden.get(a, a) for a in b.parallel}, rewriter)
    names = [a.name for i in rewriter.sizes for a in i.atoms() if isinstance(a, Size) and a.name not in hints.hints]
    s = tiles.choose(unknown, type(hints)(hints.hints | dict.fromkeys(names, hints.EXTENT), hints.classes), target)
    if s.shift is not None or s.staged is not None or folded & set(s.split):
        raise InternalError(f"the schedule {s} of an ordered target")
    return settled(b, replace(_of(s, {x: a for a, x in hidden.items()}), wide=wide(b, hints, counted=True)), hints)


class _Sizeless(Rewriter):
    """Writes `hidden` axes for others, and in the place of strides what is known of them: products of sizes, or a size of their own where they are no
    such product."""

    def __init__(self, hidden: dict[Axis, Axis]):
        super().__init__({a: as_index(x) for a, x in hidden.items()})
        self.hidden, self.strides = hidden, {}
        self.sizes = [x.extent for x in hidden.values()]

    def index(self, i: Index) -> Index:
        found = self.indices.get(i)
        if found is None:
            found = self.indices[i] = super().index(self._restrided(i))
        return found

    def _restrided(self, i: Index) -> Index:
        linear = [a for a in i.atoms() if isinstance(a, Axis) and i.coefficient(a).constant is not None]
        made, before, weight = i, 1, as_index(1)
        for a in sorted(linear, key=lambda a: (abs(i.coefficient(a).constant), a.id)):
            stride = i.coefficient(a).constant
            new = weight if stride == before else as_index(stride) if abs(stride) == 1 else self._own(stride)
            made = made - as_index(a) * stride + as_index(a) * new
            before, weight = (stride * a.extent.constant if a.extent.constant is not None else 0), new * self.hidden.get(a, a).extent
        return made

    def _own(self, stride: int) -> Index:
        made = self.strides.get(stride)
        if made is None:
            made = self.strides[stride] = as_index(Size(f"stride{stride}", 2))
            self.sizes.append(made)
        return made


def _of(s: TileSchedule, names: dict[Axis, Axis]) -> TileSchedule:
    """`s` with other axes in the place of those that `names` has."""
    def renamed(value):
        if isinstance(value, Axis):
            return names.get(value, value)
        return type(value)(map(renamed, value)) if isinstance(value, (tuple, frozenset)) else value
    return replace(s, **{f.name: renamed(getattr(s, f.name)) for f in fields(s)})
