"""Sums of a row that several warps of a program hold, made at once: the warps wait for each other once for all of them, and what is summed of an
element is gone with it."""
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


def _sums(e: Reduce) -> bool:
    """Is `e` a sum of f32?"""
    return e.monoid == "sum" and e.args[0].dtype is F32


class TileSums(TileFolds):
    """Values and folds of one kernel; sums of the same row together."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.depths: dict = {}          # expression -> how many folds of held axes it needs

    def _emit_reduce(self, e: Reduce) -> Value:
        folds = self._beside(e)
        if len(folds) == 1:
            return super()._emit_reduce(e)
        for part, value in self._held_sums(folds):
            self._remember(value.scope, part, (value,))
        return self._known(e)

    def _beside(self, e: Reduce) -> list[Reduce]:
        """`e`, and what else the warps of a program fold along the same axes of what they hold of a row, while they wait for each other: sums that
        need nothing of one another."""
        if self.rank > 1 or self.s.warps == 1 or set(e.over) & (self.s.looped | set(self.s.split)) or not _sums(e) \
                or self._fold_dims(e) != frozenset(self.s.dims):
            return [e]
        depth, found = self._folds_deep(e), {e.args: e}
        for f in walk(*(s.expr for s in self.stores)):
            if isinstance(f, Reduce) and _sums(f) and set(f.over) == set(e.over) and f.free == e.free and self._fold_dims(f) == self._fold_dims(e) \
                    and self._folds_deep(f) == depth and self._known(f) is None and len(found) < SUMS[1]:
                found.setdefault(f.args, f)
        return list(found.values()) if len(found) >= SUMS[0] and self._words_held(found.values()) <= WORDS_HELD else [e]

    def _folds_deep(self, e: Expr) -> int:
        """How many folds of held axes, one behind the other, `e` needs, itself among them."""
        if e not in self.depths:
            inside = max(map(self._folds_deep, e.children()), default=0)
            self.depths[e] = inside + (isinstance(e, Reduce) and bool(set(e.over) & set(self.held)))
        return self.depths[e]

    def _shared_first(self, folds: list[Reduce]) -> None:
        """Computes what all elements of `folds` share before anything is read of the row: a division branches, and what is known of the elements
        by then stands in registers."""
        over = set(folds[0].over)
        for x in walk(*(x for e in folds for x in e.args)):
            for arg in (c for c in x.children() if over & x.free and not over & c.free and not isinstance(c, Const)):
                shared = self.emit(arg)
                if isinstance(x, Op) and x.name == "div" and x.dtype is F32 and arg is x.args[1] and not self.fast:
                    self._rounded_inverse(shared)

    def _words_held(self, folds) -> int:
        """Registers of a thread that hold what `folds` read of a row."""
        read = {(x.node, x.index): x.dtype.bytes for e in folds for x in walk(*e.args) if isinstance(x, Load) and set(e.over) & x.free}
        return sum(read.values()) * math.prod(sum(self.s.sizes(a)) for a in self.s.dims) // (4 * 32 * self.s.warps)

    def _held_sums(self, folds: list[Reduce]) -> list[tuple[Reduce, Value]]:
        """(sum, its value) of each of `folds`, over the same held axes: all that they read of the row is asked for first."""
        self._shared_first(folds)
        saved, pieces, whole = dict(self.piece), {}, []          # pieces: length -> the choices that have it
        for choice in self._choices([a for a in self.held if a in folds[0].over]):
            self.piece.update(choice)
            pieces.setdefault(tuple(self.s.sizes(a)[n] for a, n in choice.items()), []).append(choice)
            for x in walk(*(x for e in folds for x in e.args)):
                if isinstance(x, Load) and set(folds[0].over) & x.free and x.guard is None:
                    self.emit(x)
        for choices in pieces.values():
            lanes: list = []
            for choice in choices:
                self.piece.update(choice)
                values = [self._arguments(e) for e in folds]
                scope = self._home(folds[0].free, [v for value in values for v in value])
                taken = [(self._masked(scope, v, self._type(e, 0), e, 0).var,) for e, (v,) in zip(folds, values)]
                lanes = [self._combined(scope, e, x, y) for e, x, y in zip(folds, lanes, taken)] if lanes else taken
            made = [(self.fresh(),) for _ in folds]
            scope.lines.append(f"{', '.join(m for m, in made)} = {words.sums([x for x, in lanes], 0)}")
            whole = [self._combined(scope, e, x, y) for e, x, y in zip(folds, whole, made)] if whole else made
        self.piece.update(saved)
        return [(e, Value(x, frozenset(), scope, False)) for e, (x,) in zip(folds, whole)]
