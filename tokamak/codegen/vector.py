"""(Body, VectorSchedule) -> TileKernels: products of a matrix and a vector, element by element in f32. Both factors are values of one view, `left`:
(slices, axis of the result, depth)."""
from __future__ import annotations

from dataclasses import replace

from ..fuse.contraction import Contraction, in_tf32, product_type, small
from ..ir.dtype import F32
from ..ir.expr import Expr
from ..schedule.body import Body
from ..schedule.matmul import VectorSchedule
from . import tile_words as words
from .matmul import MatmulLowering
from .tile_kernel import Scope, TileKernel


class VectorLowering(MatmulLowering):
    """The kernel of a body of products with vectors."""

    def _make_views(self) -> None:
        s, slices = self.schedule, self._slices()
        many, = s.dims
        dims, whole = {"left": (*slices, many, s.depth), "out": (many,)}, self._with_flat()
        if self.flat is not None:
            dims["flat right"] = (*slices, many, self.flat)
        self.views = {name: (replace(whole, dims=d), {}) for name, d in dims.items()}

    def _nothing(self) -> str:
        dims = self.views["left"][0].dims
        return words.full(f"[{', '.join(str(self.schedule.sizes(a)[0]) for a in dims)}]", 0.0, F32)

    def _added_up(self, name: str) -> str:
        along = f"tl.sum({name}, {len(self._slices()) + 1})"
        return self.assign(self.tile, f"tl.sum({along}, 0)" if self._slices() else along, "a")

    def _step(self, scope: Scope, c: Contraction, carried: str) -> None:
        """The elements of one step, which are multiplied and added to what is carried."""
        digits, flat = self._digits(), None
        matrix, vector = self._sides(c)
        if len(digits) > 1:
            flat = self._flattened(vector)
        lefts = [self._number_tile(scope, "left", self._at(matrix, d), c) for d in digits]
        if flat is not None:
            rights = [self.fresh("t"), self.fresh("t")]
            scope.lines.append(f"{', '.join(rights)} = tk.in_turn({self._number_tile(scope, 'flat right', flat, c)})")
        else:
            rights = [self._number_tile(scope, "left", self._at(vector, d), c) for d in digits]
        self._show("left")
        self.scope = scope
        scales = [self.emit(e).var for e in c.scales]
        total = " + ".join(f"{x} * {y}" for x, y in zip(lefts, rights))
        scope.lines.append(f"{carried} += {' * '.join([f'({total})', *scales]) if scales else total}")

    def _number_tile(self, scope: Scope, view: str, e: Expr, c: Contraction) -> str:
        """A register with the tile of a factor in f32, 0 where the depth is over. Where TF32 would do, nothing is rounded: f32 takes no longer."""
        self._show(view)
        self.scope, whole, depth = scope, small(e), frozenset(self.s.dims) - set(self.schedule.dims)
        made = product_type(c)
        if (wide := in_tf32(e)) is not None:
            return self._plain_tile(wide, depth).var
        value = self._plain_tile(e.arg, depth) if whole is None else self._whole_tile(whole, depth, words.triton_type(made))
        return self._put(None, words.cast(F32, e.arg.dtype if whole is None else made, value.var), (), (value,)).var


def lower_vector(body: Body, schedule: VectorSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernel of `body`; as `tiles.lower_tiles`."""
    return (VectorLowering(body, schedule, hints, device, fast=fast).kernel(),)
