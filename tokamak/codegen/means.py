"""(Body, MeansSchedule) -> TileKernels: weighted means. A step makes exponents, weights of them, and multiplies these; what has been carried is
rescaled to the greatest exponent so far."""
from __future__ import annotations

import math

from ..fuse.contraction import Contraction, contraction, product_type
from ..fuse.weighted import scaled
from ..ir.dtype import F32
from ..ir.expr import Const, Reduce
from ..schedule.body import Body
from ..schedule.matmul import folds_of
from ..schedule.means import MeansSchedule
from . import tile_words as words
from .matmul import MatmulLowering
from .tile_kernel import Scope, TileKernel
from .tile_parts import lower_by


class MeansLowering(MatmulLowering):
    """The kernel of a body with a weighted mean."""

    def _products(self, share: str | None) -> dict[Reduce, str]:
        c, = folds_of(self.body_)
        self.weights = self._no_weights()
        carried, (_, total) = super()._products(share)[c.fold], self.weights
        if share is None:
            return {c.fold: self.assign(self.tile, f"{carried} * (1.0 / {total})[:, None]", "a")}
        # keys of which none counts leave 0 (NaN where a value is none): of weight 0 beside others
        some = self.assign(self.tile, f"tl.where({total} == 0.0, 0.0, 1.0 / {total})", "w")
        return {c.fold: self.assign(self.tile, f"{carried} * {some}[:, None]", "a")}

    def _left(self, fold: Reduce, name: str) -> tuple[str, ...]:
        """A share's own mean, and the logarithm of the sum of its weights."""
        top, total = self.weights
        self.scope = self.tile
        scale = self.emit(Const(scaled(contraction(fold).exponents)[1], F32))
        level = self.assign(self.tile, f"{top} * {scale.var} + tl.log({total})", "w")
        return self.assign(self.tile, f"tl.broadcast_to({level}[:, None], {self.shape(self.s.dims)})", "w"), name

    def _leaves_first(self, dims: frozenset) -> bool:
        """Keys and values: what all rows have, along the depth."""
        return self.schedule.depth in dims and self.schedule.dims[0] not in dims

    def _no_weights(self) -> tuple[str, str]:
        """What is carried beside the means for each row, before anything is added: the greatest exponent, and the sum of the weights."""
        rows = f"[{self.schedule.sizes(self.schedule.dims[0])[0]}]"
        return tuple(self.assign(self.tile, words.full(rows, value, F32), "w") for value in (float("-inf"), 0.0))

    def _step(self, scope: Scope, c: Contraction, carried: str) -> None:
        kept, made = self._weights_of(scope, c)
        values = self._tile_of(scope, "right", self._sides(c)[1], product_type(c))
        scope.lines.append(f"{carried} = tk.dot({made}, {values}, {carried} * {kept}[:, None])")

    def _weights_of(self, scope: Scope, c: Contraction) -> tuple[str, str]:
        """(what carried values are multiplied by, a step's weights in the type that is multiplied)."""
        exponents, scale = scaled(c.exponents)
        self.scope = scope
        scale = self.emit(Const(scale * math.log2(math.e), F32))
        self._show("left")
        x = self._cut(self.emit(exponents), frozenset((self.schedule.depth,)), "float('-inf')")
        if x.dims != frozenset(self.s.dims):
            x = self._put(None, f"tl.broadcast_to({x.var}, {self.shape(self.s.dims)})", (), (x,), frozenset(self.s.dims), True)
        (top, total), kept, made = self.weights, self.fresh("w"), self.fresh("w")
        scope.lines.append(f"{top}, {total}, {kept}, {made} = tk.weights({x.var}, {top}, {total}, {scale.var})")
        return kept, f"tk.in_pairs({made}, {words.triton_type(product_type(c))})"


def lower_means(body: Body, schedule: MeansSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order; as `tiles.lower_tiles`."""
    return lower_by(MeansLowering, body, schedule, hints, device, choose_again, fast)
