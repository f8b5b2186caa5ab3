"""(Body, MeansSchedule) -> TileKernels: weighted means. A step makes exponents, weights of them, and multiplies these; what has been carried is
rescaled to the greatest exponent so far."""
from __future__ import annotations

import math

from ..fuse.contraction import Contraction, product_type
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
        carried = super()._products(share)[c.fold]
        return {c.fold: self.assign(self.tile, f"{carried} * (1.0 / {self.weights[1]})[:, None]", "a")}

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
