"""What the tables' builders are handed: the traced results of the call being built, and the means to make nodes of the language."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..errors import InternalError
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Cast, Const, Expr, Load, Op, Random, Reduce, Rewriter, Scan
from ..ir.graph import Compute, Opaque, Result, Scatter
from ..ir.index import Axis, Index, as_index, axis, row_major
from .sizes import Sizes
from .tensor import Tensor

_DRAW_BITS = 40        # numbers that one random operation may use: 2^40 elements
_NORMAL = 1 << 62      # where normal numbers begin: four uniform ones share a counter, so theirs lie below, and no two kinds meet


@dataclass(frozen=True)
class Spec:
    """A traced tensor: what torch says of an operator's result."""
    shape: tuple[Index, ...]
    strides: tuple[Index, ...]
    dtype: DType
    device: str


class Builder:
    """State of one capture, handed to the tables' builders as `b`.

    `b.specs`: Spec of each result of the call being built (None for results that are no tensors); `b.spec` the first.
    `b.fx`: the FX node (its `args` carry `meta['val']`, torch's fake values, for those who need torch's own rules).
    """

    def __init__(self, sizes: Sizes, policy: str):
        self.sizes = sizes
        self.policy = policy                            # of the call being built
        self.rounds = policy != "fast"                  # are the roundings in it there to stay?
        self.specs: tuple[Spec | None, ...] = ()
        self.fx: fx.Node | None = None
        self.opaques: list[Opaque] = []                 # every opaque call, in program order
        self._seeds: dict[str, Expr] = {}               # device -> this call's seed
        self._draws = 0

    @property
    def spec(self) -> Spec:
        if not self.specs or self.specs[0] is None:
            raise InternalError("this call has no tensor result")
        return self.specs[0]

    # -- what builders use ------------------------------------------------------------------------------------------
    def tensor(self, shape, expr: Expr, device: str | None = None) -> Tensor:
        """A lazy tensor; `expr` is over Axis(i, shape[i])."""
        return Tensor(tuple(as_index(s) for s in shape), expr, device or self.spec.device)

    def realize(self, t: Tensor, strides=None, tag: int = 0) -> Tensor:
        """`t` as a node of its own (row-major unless `strides` are given), read back at its own coordinates."""
        node = Compute(t.shape, strides, self.rounded(t.expr), t.device, tag)
        return Tensor(t.shape, Load(node, t.axes), t.device)

    def reduce(self, monoid: str, ts: "Tensor | tuple[Tensor, ...]", dims, keepdim: bool = False, component: int = 0) -> Tensor:
        """`ts` (tensors of one shape, in the compute type) folded over `dims`; realized at once. Empty `dims` folds nothing away
        but still applies (a fold over no axes is its argument)."""
        ts = (ts,) if isinstance(ts, Tensor) else tuple(ts)
        first = ts[0]
        gone = sorted({d % first.rank for d in dims}) if first.rank else []
        keep = [i for i in range(first.rank) if i not in gone]
        bound = tuple(Axis(first.rank + n, first.shape[d]) for n, d in enumerate(gone))
        coords: list = [None] * first.rank
        for new, old in enumerate(keep):
            coords[old] = as_index(Axis(new, first.shape[old])) if first.shape[old] != 1 else 0
        for a, d in zip(bound, gone):
            coords[d] = as_index(a) if a.extent != 1 else 0
        args = tuple(t.at(coords) for t in ts)
        over = tuple(a for a in bound if a.extent != 1)
        shape = tuple(first.shape[i] for i in keep)
        expr = Reduce(monoid, over, args, component) if over or any(s == 0 for s in first.shape) else self._alone(monoid, args[component])
        out = self.realize(Tensor(shape, expr, first.device))
        if keepdim:
            for d in gone:
                out = out.unsqueeze(d)
        return out

    def _alone(self, monoid: str, e: Expr) -> Expr:
        """The fold of one element. A sum begins at 0.0, which only -0.0 shows: where nothing is asked of a GPU's last bits, it is left out there."""
        begins = monoid == "sum" and e.dtype.is_float and (self.spec.device == "cpu" or self.rounds)
        return Op("add", e, Const(0.0, e.dtype)) if begins else e

    def scan(self, monoid: str, ts: "Tensor | tuple[Tensor, ...]", dim: int, component: int = 0, reverse: bool = False) -> Tensor:
        """Inclusive prefix fold of `ts` along `dim`; realized at once."""
        ts = (ts,) if isinstance(ts, Tensor) else tuple(ts)
        first = ts[0]
        if first.rank == 0 or first.shape[dim % first.rank] == 1:
            return ts[component].with_expr(self._alone(monoid, ts[component].expr))
        along = Axis(dim % first.rank, first.shape[dim % first.rank])
        return self.realize(first.with_expr(Scan(monoid, along, tuple(t.expr for t in ts), component, reverse)))

    def scatter(self, base: "Tensor | Const", shape, domain, index, value: Expr, monoid: str, guard: Expr | None = None) -> Tensor:
        """A Scatter node (see ir.graph): `base` a Tensor of the result's shape or a Const, `index` and `value` over Axis(i, domain[i])."""
        shape, domain = tuple(as_index(s) for s in shape), tuple(as_index(s) for s in domain)
        if isinstance(base, Tensor):
            spot = base.expr
            if not (isinstance(spot, Load) and spot.guard is None and spot.index == base.axes and spot.node.shape == shape):
                base = self.realize(base)
            base = base.expr.node
        node = Scatter(base, shape, row_major(shape), domain, tuple(as_index(i) for i in index), self.rounded(value), monoid, guard, self.spec.device)
        return Tensor(shape, Load(node, tuple(axis(i, s) for i, s in enumerate(shape))), self.spec.device)

    def rounded(self, e: Expr) -> Expr:
        """`e` with every rounding of an operation's own result one that stays, unless this call may leave them out."""
        if not self.rounds:
            return e
        return Rewriter(leaf=lambda x: Cast(x.dtype, x.arg) if isinstance(x, Cast) and x.implicit else None)(e)

    def random(self, kind: str, shape) -> Expr:
        """Fresh random numbers ('uniform' in [0, 1) or 'normal', f32) over the coordinates of `shape`: each call of this has counters of its own,
        from a multiple of 4 on."""
        flat = as_index(0)
        for i, s in enumerate(shape):
            flat = flat * s + axis(i, s)
        self._draws += 1
        return Random(kind, self.seed(self.spec.device), Const((self._draws << _DRAW_BITS) + (_NORMAL if kind == "normal" else 0), dt.I64), flat)

    def seed(self, device: str) -> Expr:
        """The i64 that a call's random numbers on `device` start from: one number from torch's default generator, drawn at each call of the graph."""
        if device not in self._seeds:
            one = (as_index(1),)
            call = Opaque(torch.ops.aten.randint.low, (-2**62, 2**62, (1,)), {"dtype": torch.int64, "device": torch.device(device)},
                          (Spec(one, one, dt.I64, device),), True, "the seed of this call's random numbers")
            self.opaques.append(call)
            self._seeds[device] = Load(Result(call, 0, one, one, dt.I64, device), (as_index(0),))
        return self._seeds[device]
