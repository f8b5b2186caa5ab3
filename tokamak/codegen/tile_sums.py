"""Sums of a row that a program holds in pieces, each thread's first: several warps wait for each other once for all that is summed of the row, and
what is summed of an element is gone with it."""
from __future__ import annotations

import math

from ..ir.dtype import F32
from ..ir.expr import Const, Expr, Load, Op, Reduce, walk
from . import tile_words as words
from .tile_folds import TileFolds
from .tile_kernel import Value

SUMS = 3, 5             # that are made at once, at least and at most: five of planes of 3136, of EvoNorm backward in NCHW of 32 x 256 x 56 x 56,
                        # 49 us (bf16) and 85 (f32) on an H200, 78 and 136 one after the other
WORDS_HELD = 64         # registers of a thread at most that hold what such sums read of a row


class TileSums(TileFolds):
    """Values and folds of one kernel; sums of the same row together."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.depths: dict = {}          # expression -> how many folds of held axes it needs

    def _emit_reduce(self, e: Reduce) -> Value:
        folds = self._beside(e)
        if not folds:
            return super()._emit_reduce(e)
        for part, value in self._held_sums(folds):
            self._remember(value.scope, part, (value,))
        return self._known(e)

    def _beside(self, e: Reduce) -> list[Reduce]:
        """`e`, and what else is summed along the same axes of what a program holds of a row, and needs nothing of it; none where `e` is summed by
        itself, a piece behind the other."""
        if not self._at_once_with_others(e):
            return []
        depth, found = self._folds_deep(e), {e.args: e}
        for f in walk(*(s.expr for s in self.stores)):
            if isinstance(f, Reduce) and set(f.over) == set(e.over) and f.free == e.free and self._at_once_with_others(f) \
                    and self._folds_deep(f) == depth and self._known(f) is None and len(found) < SUMS[1]:
                found.setdefault(f.args, f)
        return list(found.values()) if self._worth(found.values()) else []

    def _at_once_with_others(self, e: Reduce) -> bool:
        """Is `e` a sum of f32 along all of a row that is held?"""
        return self.rank == 1 and e.monoid == "sum" and e.args[0].dtype is F32 and not self._in_order(e) \
            and set(self.s.dims) <= set(e.over) and not set(e.over) & (self.s.looped | set(self.s.split))

    def _worth(self, folds) -> bool:
        """Are `folds` as many, and is what they read as little, as is worth making them at once? Two will do in a plane that is a program's own, one
        where a warp's lanes would be summed piece by piece."""
        own = self.s.staged is not None and self.s.staged not in self.s.dims
        least = 2 if own else SUMS[0]
        if self.s.warps == 1 and sum(size >= 32 for size in self.s.sizes(self.s.dims[0])) > 1:
            least = 1
        return len(folds) >= least and self._words_held(folds) <= WORDS_HELD

    def _folds_deep(self, e: Expr) -> int:
        """How many folds of held axes, one behind the other, `e` needs, itself among them."""
        if e not in self.depths:
            inside = max(map(self._folds_deep, e.children()), default=0)
            self.depths[e] = inside + (isinstance(e, Reduce) and bool(set(e.over) & set(self.held)))
        return self.depths[e]

    def _shared_first(self, folds: list[Reduce]) -> None:
        """Computes what all elements of `folds` share before anything is read of the row: a division branches, and what is known of the elements
        by then stands in registers."""
        row = set(self.s.dims)
        for x in walk(*(x for e in folds for x in e.args)):
            for arg in (c for c in x.children() if row & x.free and not row & c.free and not isinstance(c, Const)):
                shared = self.emit(arg)
                if isinstance(x, Op) and x.name == "div" and x.dtype is F32 and arg is x.args[1] and not self.fast:
                    self._inverse(x, shared)

    def _words_held(self, folds) -> int:
        """Registers of a thread that hold what `folds` read of a row."""
        read = {(x.node, x.index): x.dtype.bytes for e in folds for x in walk(*e.args) if isinstance(x, Load) and set(self.s.dims) & x.free}
        return sum(read.values()) * math.prod(sum(self.s.sizes(a)) for a in self.s.dims) // (4 * 32 * self.s.warps)

    def _held_sums(self, folds: list[Reduce]) -> list[tuple[Reduce, Value]]:
        """(sum, its value) of each of `folds`, along all of a row: what they read of it is asked for first, and each thread sums its own of pieces in
        which all have some."""
        self._shared_first(folds)
        (line,), saved, lanes, whole = self.s.dims, dict(self.piece), 32 * self.s.warps, {}
        for choice in self._choices([line]):
            self.piece.update(choice)
            for x in walk(*(x for e in folds for x in e.args)):
                if isinstance(x, Load) and line in x.free and x.guard is None:
                    self.emit(x)
        free = frozenset().union(*(e.free for e in folds))
        for choice in self._choices([line]):
            self.piece.update(choice)
            size = self.s.sizes(line)[self.piece[line]]
            values = [self._arguments(e) for e in folds]
            scope = self._home(free, [v for value in values for v in value])
            taken = [(self._masked(scope, v, self._type(e, 0), e, 0).var,) for e, (v,) in zip(folds, values)]
            if size > lanes:
                taken = [(self.assign(scope, f"tk.of_threads({x}, {lanes}, {min(self._word(e), size // lanes)})"),) for e, (x,) in zip(folds, taken)]
            size = min(size, lanes)
            whole[size] = [self._combined(scope, e, x, y) for e, x, y in zip(folds, whole[size], taken)] if size in whole else taken
        self.piece.update(saved)
        total: list = []
        for lane in whole.values():
            made = [(self.fresh(),) for _ in folds]
            scope.lines.append(f"{', '.join(m for m, in made)} = {words.sums([x for x, in lane], 0)}")
            total = [self._combined(scope, e, x, y) for e, x, y in zip(folds, total, made)] if total else made
        return [(e, Value(x, frozenset(), scope, False)) for e, (x,) in zip(folds, total)]
