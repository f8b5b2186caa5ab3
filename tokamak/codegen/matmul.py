"""(Body, MatmulSchedule) -> TileKernels: contractions as products of tiles, with what is read pointwise in front and what reads the result behind.

A program has several views of its tile, each with two dimensions: `left` (first axis, depth), `right` (depth, second axis), `out` (first, second). A
value is computed in the view that needs it; the accumulators are values of `out`, and everything behind the contraction is emitted as in any other
tile. Where the left factor holds a contraction itself (two linear layers, back to back), that one is made within a step, in views of its own: `inner
left` (first axis, inner depth) and `inner right` (inner depth, depth).

Where the depth is run through in slices, a step takes several of them at once: then `left`, `right` and the accumulator (`sum`) have the slices as
their first dimension, each slice is some warps' own, and what they have carried is added up behind the loop. Programs of a cluster that share the
depth add up their tiles, and the view `out` of each is a part of the tile. A factor that is the same along a slice
(the scale of a group of quantised weights) is multiplied to a step's products.

Coordinates that are the same for every tile stand in the program's scope, and so does all that depends on them alone: a program that makes many tiles
loads it once.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

from ..fuse.contraction import ONES, Contraction, contraction, halves, in_tf32, product_type, small
from ..fuse.scales import unpacking
from ..ir.dtype import F32, DType
from ..ir.expr import Cast, Const, Expr, Load, Random, Reduce, Rewriter, loads, walk
from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv
from ..ir.rewrite import Simplifier
from ..schedule.body import Body
from ..schedule.matmul import MatmulSchedule, folds_beside, folds_of, hidden_stores, PAD, part_sums
from . import tile_words as words
from .matmul_views import MatmulViews
from .scope import Unschedulable
from .tile_kernel import For, Scope, TileKernel, Value
from .tile_parts import lower_by


class MatmulLowering(MatmulViews):
    """The kernel of a body of contractions."""
    sums: Mapping[Reduce, str] = MappingProxyType({})       # of factors along the depth, beside the product -> what carries them
    made: frozenset[Expr] | set[Expr] = frozenset()         # what is rounded between two products

    def kernel(self) -> TileKernel:
        s = self.schedule = self.s
        self.held, self.view, self.after = [], "out", []
        self._make_views()
        self.piece.update({a: 0 for a, _ in self.views["out"][0].pieces})
        factors = [x for c in folds_of(self.body_) for x in (c.left, c.right)]
        self.made = {x.arg for x in factors if isinstance(x, Cast) and any(isinstance(e, Reduce) for e in walk(x))}
        self._show("out")
        self.tile, grid, share = self._place_program()
        self._early(share)
        self.sums = {e: self.assign(self.tile, self._nothing_beside(e), "a") for e in folds_beside(self.body_)}
        accumulators = self._joined(self._products(share))
        accumulators |= {e: self._added_ones(e, name) for e, name in self.sums.items()}
        self._show("out")
        for fold, name in accumulators.items():
            self.tile.memo[fold, self._key(fold.free)] = Value(name, fold.free & frozenset(s.dims), self.tile, True)
            self.sources.setdefault(name, fold)
        if share is None or self.member:
            self._store_all(self.tile, [st for st in self.stores if st not in hidden_stores(self.body_)])
        else:
            for fold, name in accumulators.items():
                self._leave(fold, {self._key(frozenset(s.dims)): self._left(fold, name)}, share)
        lines, spaces = (*self.program.lines, *self.after), tuple(self.spaces.values())
        aligned = frozenset(p.name for p in self.params if p.kind == "int" and self.hints.divides(16, p.source))
        return TileKernel(tuple(self.params), lines, grid, s, self.body_, tuple(self.errors), self.sources, spaces, aligned)

    def _joined(self, accumulators: dict[Reduce, str]) -> dict[Reduce, str]:
        """What the programs of a cluster have added up, of each its own part of the tile."""
        s, at, made = self.schedule, 0, {}
        if s.sharers == 1:
            return accumulators
        for n, (fold, name) in enumerate(accumulators.items()):
            first, second = (s.sizes(a)[0] for a in s.dims)
            made[fold] = self.assign(self.tile, f"tk.summed_part({name}, {s.sharers}, {at}, {second + PAD}, {n == 0})", "a")
            at += part_sums(first, second)
        self.program.lines[:0] = [f"tk.room({at})", "tk.arrive()"]
        return made

    def _left(self, fold: Reduce, name: str) -> tuple[str, ...]:
        """What a program that shares the depth leaves of what it has added up: a register for each component."""
        return (name,)

    # -- products --------------------------------------------------------------------------------------------------------------
    def _early(self, share: str | None) -> None:
        """What is read beside the products of few rows is read before them, and is there when they are."""
        if not self.schedule.early or share is not None and not self.member:
            return
        self._show("out")
        self.scope, folds = self.tile, {c.fold for c in folds_of(self.body_)}
        waiting = [st.expr for st in self.stores if st not in hidden_stores(self.body_)]
        while waiting:
            e = waiting.pop()
            if isinstance(e, Load) and e.guard is None and not e.free & (self.schedule.looped | self.schedule.unrolled):
                self.emit(e)
            waiting += e.children() if e not in folds else ()

    def _products(self, share: str | None) -> dict[Reduce, str]:
        """The loop over the depth: the register that carries each contraction."""
        s, found, tile = self.schedule, folds_of(self.body_), self.tile
        carried = {c.fold: self.assign(tile, self._nothing(), "a") for c in found}
        scope, loops = self._along_depth(share)
        for piece in range(len(s.sizes(s.depth))):
            self.piece[s.depth] = piece
            for c in found:
                self._step(scope, c, carried[c.fold])
            if hidden := hidden_stores(self.body_):
                self._show("left")
                self._store_all(scope, hidden)
        tile.lines += loops
        return {fold: self._added_up(name) for fold, name in carried.items()}

    def _along_depth(self, share: str | None) -> tuple[Scope, list[For]]:
        """(the scope of a step along the depth, the loop that it stands in, if any)."""
        s, tile = self.schedule, self.tile
        scope, loops, walked = tile, [], s.outer or s.depth
        if not self._single(walked):
            step = self.fresh("r")
            loop = For(f"for {step} in {self._range(*self._depth_of(share), s.sizes(walked)[0])}", [])
            loops = [loop]
            scope = Scope(loop.lines, tile.open, tile)
            self._open_step(scope, walked, step)
        scope.open = scope.open | {walked, s.depth} | ({self.flat} if self.flat is not None else set())
        return scope, loops

    @cached_property
    def worked_on(self) -> frozenset:
        """(view, read) of what factors are computed from within a step, where several products may read it."""
        found = folds_of(self.body_)
        sides = [x for c in found for x in zip(("left", "right"), self._sides(c))] if len(found) > 1 else []
        return frozenset((view, e) for view, x in sides for d in self._digits() for at in (self._at(x, d),) if not _as_read(at) for e in loads(at))

    def _sides(self, c: Contraction) -> tuple[Expr, Expr]:
        """The factors of a contraction: of the tile's first axis, of its second."""
        return (c.left, c.right) if self.schedule.dims[0] in c.left.free else (c.right, c.left)

    def _open_step(self, scope: Scope, walked: Axis, step: str) -> None:
        """Coordinates along the depth within a step."""
        if walked is self.schedule.outer and self.schedule.sizes(walked)[0] == 1:
            self._everywhere(scope, walked, step)
            return
        self._put_everywhere(scope, walked, step)
        if walked is self.schedule.depth and self.flat is not None:
            self._put_everywhere(scope, self.flat, f"{step} * {len(self._digits())}")

    def _added_up(self, name: str) -> str:
        """The sum of what the slices have carried."""
        return self.assign(self.tile, f"tl.sum({name}, 0)", "a") if self._slices() else name

    def _nothing(self) -> str:
        """The text of an accumulator before anything is added."""
        return words.full(f"[{', '.join(str(self.schedule.sizes(a)[0]) for a in (*self._slices(), *self.schedule.dims))}]", 0.0, F32)

    def _space_axes(self, e: Reduce) -> list[Axis]:
        """The axes of partial sums, as those of the result lie: what adds them up goes through both in order."""
        result = next((st.address for st in self.stores if e in walk(st.expr)), None)
        return sorted(super()._space_axes(e), key=lambda a: result is not None and result.coefficient(a) == 1)

    def _nothing_beside(self, e: Reduce) -> str:
        """The text of a sum of a factor before anything is added, a column for each of ones. Programs whose tiles lie along the other axis all make
        it, and write the same numbers."""
        first, second = self.schedule.dims
        return words.full(f"[{self.schedule.sizes(first if first in e.free else second)[0]}, {ONES}]", 0.0, F32)

    def _ones(self, rows: int, wanted: DType) -> str:
        """A register with ones, which add up a tile's rows where it is multiplied by them: folds across threads at every step would take longer."""
        found = self.program.memo.get(("ones", rows))
        if found is None:
            text = f"{words.full(f'[{rows}, {ONES}]', 1.0, F32)}.to({words.triton_type(wanted)})"
            found = self.program.memo["ones", rows] = self.assign(self.program, text, "o")
        return found

    def _added_ones(self, e: Reduce, name: str) -> str:
        """What was added up so, as a column or row of the result's tile."""
        total = f"tl.sum({name}, 1, keep_dims=True) * {1 / ONES}"
        return self.assign(self.tile, total if self.schedule.dims[0] in e.free else f"tl.trans({total})", "a")

    def _step(self, scope: Scope, c: Contraction, carried: str) -> None:
        """The products of one piece of the depth, which are added to what is carried."""
        digits, (left, right) = self._digits(), self._sides(c)
        flat = self._flattened(right) if len(digits) > 1 else None
        lefts = [self._tile_of(scope, "left", self._at(left, d), product_type(c)) for d in digits]
        if flat is not None:
            rights = [self._tile_of(scope, "flat right", flat, product_type(c))]
            lefts = [f"tk.interleaved({', '.join(lefts)})"]
        else:
            rights = [self._tile_of(scope, "right", self._at(right, d), product_type(c)) for d in digits]
        total = carried if not c.scales else self._nothing()
        for e, name in self.sums.items():
            tile = lefts[0] if e.args[0] is left else f"tl.trans({rights[0]})"
            scope.lines.append(f"{name} = tk.dot({tile}, {self._ones(self.schedule.sizes(c.depth)[0], product_type(c))}, {name})")
        for x, y in zip(lefts, rights):
            total = self.assign(scope, f"tk.dot({x}, {y}, {total})", "d") if c.scales else total
            scope.lines += [] if c.scales else [f"{carried} = tk.dot({x}, {y}, {carried})"]
        if c.scales:
            self._show("sum")
            self.scope = scope
            factors = [self._cut(self.emit(e), frozenset(self._slices())).var for e in c.scales]     # 1 / 0 behind the last slice is no number
            scope.lines.append(f"{carried} += {' * '.join([total, *factors])}")

    @staticmethod
    def _at(e: Expr, digits: dict[Axis, int]) -> Expr:
        """`e` at the coordinates of axes that are written out."""
        return Simplifier().root(Rewriter({a: as_index(n) for a, n in digits.items()})(e)) if digits else e

    def _flattened(self, e: Expr) -> Expr | None:
        """`e` over depth and digits as one axis, where they count through memory like one: two digits, the second along each place of the depth."""
        (digit, *others), depth = sorted(self.schedule.unrolled, key=self.schedule.order.index), self.schedule.depth
        plain = e.arg if isinstance(e, Cast) else e
        if others or digit.extent.constant != 2 or not isinstance(plain, Load) or plain.guard is not None:
            return None
        i = plain.index[0]
        if {depth, digit} & {x for a in i.atoms() if not isinstance(a, Axis) for x in Index({(a,): 1}).axes()} or \
                i.coefficient(depth) is not i.coefficient(digit) * 2 or digit not in i.axes():
            return None
        return Rewriter({depth: as_index(0), digit: as_index(self.flat)})(e)

    def _depth_of(self, share: str | None) -> tuple[str, str]:
        """Where this program's part of the depth begins and ends, in coordinates of what the loop walks along."""
        s = self.schedule
        walked = s.outer or s.depth
        end = self._number(self.extent(walked))
        if share is None:
            return "0", end
        size = s.sizes(walked)[0]
        length = floordiv(walked.extent + (s.programs * size - 1), as_index(s.programs * size)) * size
        part = self.param("int", ("share",), length)
        low = self.assign(self.tile, f"{share} * {part}", "b")
        return low, self.assign(self.tile, f"tl.minimum({low} + {part}, {end})", "b")

    def _tile_of(self, scope: Scope, view: str, e: Expr, wanted: DType) -> str:
        """A register with the tile of one factor, in the type that is multiplied, 0 where the depth is over."""
        shown, self.scope = self.view, scope
        self._show(view)
        depth = frozenset((self.schedule.inner,)) if view.startswith("inner") else frozenset(self.s.dims) - set(self.schedule.dims)
        if any(isinstance(x, Random) for x in walk(e)):
            raise Unschedulable("random numbers in front of a contraction")
        whole, wide = small(e), in_tf32(e)
        if wide is not None:
            value = self._plain_tile(wide, depth)
            value = self._put(None, f"tk.to_tf32({value.var})", (), (value,))
        elif _as_read(e) and (view, e.arg) in self.worked_on:
            value = self._plain_tile(e.arg, depth)
            value = self._put(None, f"tk.in_registers({value.var})", (), (value,))
        else:
            value = self._plain_tile(e.arg, depth) if whole is None else self._whole_tile(whole, depth, words.triton_type(wanted))
        var = value.var
        if value.dims != frozenset(self.s.dims):
            var = self._put(None, f"tl.broadcast_to({var}, {self.shape(self.s.dims)})", (), (value,)).var
        self._show(shown)
        return var

    def _plain_tile(self, e: Expr, depth: frozenset, zero: str = "0.0") -> Value:
        return self._loaded(e, depth, zero) if isinstance(e, Load) and e.guard is None else self._cut(self.emit(e), depth, zero)

    def _whole_tile(self, e: Expr, depth: frozenset, wanted: str) -> Value:
        """Integers of few bits in the type that is multiplied, without the way through f32, which takes longer than the product. Where the
        depth is over they may be anything: the other factor is 0 there."""
        bits = unpacking(e)
        if bits is None or bits.load.guard is not None:
            value = self._plain_tile(e, depth, "0")
            return self._put(None, f"tk.small_to_half({value.var}, {wanted})", (), (value,))
        value = self._plain_tile(bits.load, depth, "0")
        return self._put(None, f"tk.unpacked({value.var}, {bits.shift}, {bits.mask}, {bits.flip}, {bits.minus}, {wanted})", (), (value,))

    def _emit_cast(self, e: Cast) -> Value:
        """What is rounded for a product, so that nothing else stands between one product and the next. 131072 rows, 128 to 256 to 128, the weights'
        gradients: 67 us, 80 where LLVM chooses."""
        if e not in self.made or e.arg.dtype is not F32:
            return super()._emit_cast(e)
        arg = self.emit(e.arg)
        return self._put(e, f"tk.in_pairs({arg.var}, {words.triton_type(e.dtype)})", (), (arg,))

    def _first_pieces(self) -> None:
        """No axis has pieces that are gone through here, but a depth that is held."""

    def _loaded(self, e: Load, depth: frozenset, zero: str = "0.0") -> Value:
        """A plain read whose idle lanes are 0, which needs no register on its way to the product."""
        _, dims = self.text(e.index[0], ("address", e.node))
        if not dims:
            return self._cut(self.emit(e), depth, zero)
        known = self._known(e)
        return known if known is not None else self._put(e, *self._reading(e, zero))

    def _reading(self, e: Load, zero: str = "0.0") -> tuple:
        """The text of a plain read of a tile whose idle lanes are `zero`, and what `_put` asks besides."""
        address, dims = self.text(e.index[0], ("address", e.node))
        masks = self.mask(dims)
        where = f", mask={' & '.join(masks)}, other={zero}" if masks else ""
        where += ", eviction_policy='evict_first'" if self.schedule.once and self._leaves_first(dims) else ""
        return f"tl.load({self.memory(e.node)} + {address}{where})", e.index[0].axes() | dims, self._of(e.index[0]), dims, True

    def _leaves_first(self, dims: frozenset) -> bool:
        """Is what has these dimensions what is read once?"""
        return self.schedule.dims[0] in dims

    def _cut(self, value: Value, depth: frozenset, zero: str = "0.0") -> Value:
        """`value`, 0 where the depth is over."""
        masks = self.mask(depth)
        if not masks:
            return value
        return self._put(None, f"tl.where({' & '.join(masks)}, {value.var}, {zero})", depth, (value,), value.dims | depth, True)

    def _number_text(self, e: Const) -> str | None:
        """Numbers of few bits, which are no sizes, are text: shifts and masks of packed integers."""
        return words.literal(e.value, e.dtype) if e.dtype.is_int and e.dtype.bytes <= 2 else super()._number_text(e)

    def _emit_reduce(self, e: Reduce) -> Value:
        """The contraction within the left factor of another one: a product of whole tiles."""
        c = contraction(e)
        if self.view != "left" or c is None or self.schedule.inner is None:
            raise Unschedulable("a fold within a contraction")
        return self._put(e, self._product_within(self.scope, c), self.tile.open | {self.schedule.depth}, (), frozenset(self.s.dims), True)

    def _product_within(self, scope: Scope, c: Contraction) -> str:
        """The text of a contraction within the left factor."""
        left, right = self._sides(c)
        texts = [self._tile_of(scope, view, x, product_type(c)) for view, x in (("inner left", left), ("inner right", right))]
        size = f"[{self.schedule.sizes(self.schedule.dims[0])[0]}, {self.schedule.sizes(self.schedule.depth)[0]}]"
        return f"tk.dot({', '.join(texts)}, {words.full(size, 0.0, F32)})"


def _as_read(e: Expr) -> bool:
    """Is a factor multiplied as it lies in memory, in 16 bits?"""
    return halves(e) is not None and isinstance(e.arg, Load) and e.arg.guard is None


def lower_matmul(body: Body, schedule: MatmulSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order; as `tiles.lower_tiles`."""
    return lower_by(MatmulLowering, body, schedule, hints, device, choose_again, fast)
