"""Kernels over short rows that are read as one run of words: each lane takes its element from what the program's threads have read."""
from __future__ import annotations

from ..ir.expr import Load
from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv
from ..schedule.tile_flat import WORDS, lies_flat
from ..schedule.tile_stages import power
from .tile_kernel import Scope, Value
from .tiles import TileLowering


class FlatLowering(TileLowering):
    """The kernel of a body whose tiles are `s.flat` rows of `s.dims[1]`. A thread has a whole row of a piece, so that rows are folded without
    exchange."""

    @property
    def along(self) -> tuple[Axis, Axis]:
        """The axis of the rows, and the one along them."""
        return next(a for a in self.s.dims if a in self.body_.parallel), next(a for a in self.s.dims if a not in self.body_.parallel)

    def blocks(self, a: Axis) -> Index:
        return floordiv(a.extent + (self.s.flat - 1), as_index(self.s.flat))

    def _decode(self, scope: Scope, axes, number: str, prefix: str) -> None:
        row, _ = self.along
        self.number = number
        lanes = self._placed(f"tl.arange(0, {self.s.sizes(row)[0]})", row)
        at = self.assign(scope, f"{number} * {self.s.flat} + {lanes}", "i")
        mask = self.assign(scope, f"({lanes} < {self.s.flat}) & ({at} < {self._number(self.extent(row))})", "m")
        self.coords[row, 0] = (Value(at, frozenset((row,)), scope, True), mask)

    def _emit_load(self, e: Load) -> Value:
        row, line = self.along
        if not lies_flat(e, row, line):
            return super()._emit_load(e)
        n, sizes, piece = self._number(self.extent(line)), self.s.sizes(line), self.piece[line]
        height, width = self.s.sizes(row)[0], sizes[piece]
        run, last = self._run_of(e, n)
        at = self.assign(self.program, f"tl.arange(0, {height * width})", "j")
        element = self.assign(self.program, f"tl.minimum({at} % {height} * {n} + ({sum(sizes[:piece])} + {at} // {height}), {last})", "i")
        text = f"tl.trans(tl.reshape(tl.gather({run}, {element}, 0), [{width}, {height}]))"
        return self._put(e, text, (row, line), (), frozenset((row, line)), True)

    def _run_of(self, e: Load, n: str) -> tuple[str, int]:
        """The register of all that this program's rows have in the memory of `e`, and its last lane."""
        row, line = self.along
        size = power(self.s.flat * self.hints.most(line.extent))
        key = ("run", e.node), ()
        if key not in self.program.memo:
            lanes = self.assign(self.program, f"tl.arange(0, {size})", "j")
            first = self.assign(self.program, f"{self.number} * ({n} * {self.s.flat})", "w")
            inside = f"{lanes} < tl.minimum({n} * {self.s.flat}, {self._number(self.extent(row))} * {n} - {first})"
            word = f"{self.memory(e.node)} + tl.multiple_of({first}, {WORDS}) + {lanes}"
            self.program.memo[key] = self.assign(self.program, f"tl.load({word}, mask={inside}, other=0.0)")
        return self.program.memo[key], size - 1
