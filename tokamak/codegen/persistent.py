"""(Body, PersistentSchedule) -> TileKernel: products of tiles by programs that stay, whose factors come through descriptors.

A descriptor, which the launcher makes of an address, says where a tensor lies (`fuse.boxes.Box`); a read or a write of a tile then names only where
the tile begins. What lies outside is 0 when it is read, and left when it is written, so that there are no masks. The result's tile is finished in
parts: `out 0`, `out 1` are views like any other, each of a range of the tile's columns.
"""
from __future__ import annotations

from dataclasses import replace

from ..fuse.boxes import Box
from ..fuse.contraction import product_type
from ..ir.dtype import F32, DType
from ..ir.expr import Expr, Reduce
from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv
from ..schedule.body import Body, Store
from ..schedule.matmul import folds_of
from ..schedule.persistent import PersistentSchedule, factor_box, pair, smaller, store_box
from . import tile_words as words
from .matmul import MatmulLowering
from .tile_kernel import Boxed, Scope, TileKernel, Value


class PersistentLowering(MatmulLowering):
    """The kernel of a body of contractions, see above."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.descriptors: dict = {}

    def kernel(self) -> TileKernel:
        grid, lines = self._tiles()
        if self.s.last > 1:
            lines += LastRound(self)._tiles()[1]
        aligned = frozenset(p.name for p in self.params if p.kind == "order" or p.kind == "int" and self.hints.divides(16, p.source))
        return TileKernel(tuple(self.params), lines, grid, self.schedule, self.body_, tuple(self.errors), self.sources, (), aligned,
                          tuple(self.descriptors.values()))

    def _tiles(self) -> tuple[Index, tuple]:
        """(how many programs, what each does): the loop over its tiles."""
        s = self.schedule = self.s
        first, second = s.dims
        self.held, self.view, self.after, self.begins = [], "out 0", [], {}
        self.piece.update({a: 0 for a, _ in s.pieces})
        width = s.sizes(second)[0] // s.parts
        narrow = replace(s, pieces=tuple((a, (width,)) if a is second else (a, n) for a, n in s.pieces))
        self.outs = {f"out {n}": n * width for n in range(s.parts)}
        factors = {"left": replace(s, dims=(first, s.depth)), "right": replace(s, dims=(s.depth, second))}
        addressed = ((n, v) for n, v in factors.items() if self._addressed(n, v))
        self.views = {name: (v, {}) for name, v in (*((o, narrow) for o in self.outs), *addressed)}
        self.tile, grid, _ = self._place_program()
        for out, accumulators in zip(self.outs, self._cut_up(self._products(None))):
            self._show(out)
            for fold, name in accumulators.items():
                self._remember(self.tile, fold, (Value(name, frozenset(s.dims), self.tile, True),))
            self._store_all(self.tile, self.stores)
        return grid, (*self.program.lines, *self.after)

    def _addressed(self, view: str, v: PersistentSchedule) -> bool:
        """Is any factor of this view computed, or read by address?"""
        return any(self._factor_box(e, v.dims) is None for c in folds_of(self.body_) for e in (c.left, c.right)
                   if (v.dims[view == "right"] in e.free))

    def _factor_box(self, e: Expr, dims) -> Box | None:
        return factor_box(e, dims, self.schedule.depth, self.hints) if self.schedule.boxes else None

    # -- places ----------------------------------------------------------------------------------------------------------------
    def _put_everywhere(self, scope: Scope, a: Axis, base: str) -> None:
        """As for any contraction; the parts of a tile begin one behind the other."""
        shown, self.begins[a] = self.view, base
        for view, (s, _) in self.views.items():
            if a in s.dims:
                self._show(view)
                start = self.outs.get(view, 0) if a is self.schedule.dims[1] else 0
                self._tile_coordinate(scope, a, " + ".join(filter(None, (base, str(start) if start else ""))), 0, a not in s.exact)
        self._show(shown)

    def _over_tiles(self, step: str, first: str, count: str, programs: str) -> str:
        end = self._whole_rounds() if self.schedule.last > 1 else count
        return f"for {step} in tl.range({first}, {end}, {programs}{', flatten=True' if self.schedule.flat else ''})"

    def _whole_rounds(self) -> str:
        """How many tiles are made before some programs would have none."""
        tiles, programs = as_index(1), as_index(self.schedule.resident)
        for a in (x for x in self.schedule.order if x in self.body_.parallel):
            tiles = tiles * self.blocks(a)
        return self.param("int", ("whole",), floordiv(tiles, programs) * programs)

    def _range(self, low, high, step) -> str:
        return f"range({low}, {high}, {step})"

    def _along_depth(self, share: str | None):
        """As for any contraction. Where Triton makes one loop of two it is told that the inner one is not empty, if that is known: for empty ones it
        would make a second kernel beside the first, all but the products."""
        walked = self.schedule.outer or self.schedule.depth
        if self.schedule.flat and share is None and not self._single(walked) and self.hints.least(walked.extent) > 0:
            self.program.lines[:0] = [f"tl.assume({self._depth_of(share)[1]} > 0)"]
        return super()._along_depth(share)

    def _cut_up(self, accumulators: dict[Reduce, str]) -> list[dict[Reduce, str]]:
        """The accumulators' columns, part by part."""
        made = [accumulators]
        while len(made) < self.schedule.parts:
            halves = [{fold: (self.fresh("a"), self.fresh("a")) for fold in part} for part in made]
            for part, names in zip(made, halves):
                self.tile.lines += [f"{', '.join(names[fold])} = tk.halves({name})" for fold, name in part.items()]
            made = [{fold: pair[n] for fold, pair in names.items()} for names in halves for n in (0, 1)]
        return made

    def _products(self, share: str | None) -> dict[Reduce, str]:
        """As for any contraction; of a pair as one product, whose halves are theirs in the order in which the factors lie in memory."""
        s, found = self.schedule, folds_of(self.body_)
        if not (s.paired and s.boxes):
            return super()._products(share)
        (rows, columns), both = (s.sizes(a)[0] for a in s.dims), pair(found, s.dims, self.hints)
        total = self.assign(self.tile, words.full(f"[{rows}, {2 * columns}]", 0.0, F32), "a")
        scope, loops = self._along_depth(share)
        left = self._tile_of(scope, "left", self._sides(found[0])[0], product_type(found[0]))
        right = self.assign(scope, f"{self._both(both)}.load([0, {self._corner(both[0])}]).reshape([{2 * columns}, {s.sizes(s.depth)[0]}]).T")
        scope.lines.append(f"{total} = tk.dot({left}, {right}, {total})")
        self.tile.lines += loops
        halves, order = [self.fresh("a"), self.fresh("a")], self.param("order", both, tuple((b.memory, b.offset) for b in both))
        self.tile.lines.append(f"{', '.join(halves)} = tk.halves({total})")
        pick = lambda a, b: self.assign(self.tile, f"tl.where({order} == 0, {a}, {b})", "a")
        return {found[0].fold: pick(*halves), found[1].fold: pick(*reversed(halves))}

    # -- descriptors -----------------------------------------------------------------------------------------------------------
    def _descriptor(self, b: Box, block: tuple[int, ...], rounds: bool = False) -> str:
        """The register of a descriptor of `b` for tiles of `block` elements."""
        found = self.descriptors.get((b, block, rounds))
        if found is None:
            name, extents = f"d{len(self.descriptors)}", tuple(a.extent for a in b.axes)
            found = self.descriptors[b, block, rounds] = Boxed(name, b.memory, b.offset, extents, b.strides, block, rounds=rounds)
        return found.name

    def _both(self, both: tuple[Box, Box]) -> str:
        """The register of a descriptor of two factors."""
        one, other = both
        name, block = f"d{len(self.descriptors)}", (2, *self._block(one, replace(self.schedule, dims=one.axes)))
        self.descriptors[both, block] = Boxed(name, one.memory, one.offset, (as_index(2), *(a.extent for a in one.axes)),
                                               (as_index(0), *one.strides), block, (other.memory, other.offset), one.memory.dtype is F32)
        return name

    def _corner(self, b: Box, second: int = 0) -> str:
        """Where the tile begins in `b`; `second`: elements further along the accumulator's second axis."""
        def at(a: Axis) -> str:
            if a not in self.begins:
                return self.coordinate(a)[0]
            parts = [self.begins[a], str(second) if second and a is self.schedule.dims[1] else ""]
            return " + ".join(filter(None, parts)) or "0"
        narrow = (lambda t: f"({t}).to(tl.int32)" if not t.isdigit() else t) if self.schedule.wide else lambda t: t
        return ", ".join(narrow(at(a)) for a in b.axes)

    def _block(self, b: Box, s: PersistentSchedule) -> tuple[int, ...]:
        sizes = dict(s.pieces)
        return tuple(sizes[a][0] if a in s.dims else 1 for a in b.axes)

    def _tile_of(self, scope: Scope, view: str, e: Expr, wanted: DType) -> str:
        """As for any contraction; what the engine can copy comes through a descriptor."""
        first, second = self.schedule.dims
        dims = (first, self.schedule.depth) if view == "left" else (self.schedule.depth, second)
        b = self._factor_box(e, dims)
        if b is None:
            return super()._tile_of(scope, view, e, wanted)
        self.scope, key = scope, ("box", e)
        found = scope.memo.get(key)
        if found is None:
            block = self._block(b, replace(self.schedule, dims=dims))
            text = f"{self._descriptor(b, block, b.memory.dtype is F32)}.load([{self._corner(b)}])"
            text += f".reshape({list(block[-2:])})" if len(block) > 2 else ""
            found = scope.memo[key] = self.assign(scope, f"{text}.T" if b.axes[-2:] != dims else text)
        return found

    def _store(self, scope: Scope, s: Store, address: str, dims, value: Value, guard, pieces) -> None:
        b = store_box(s, self.schedule.dims, self.hints) if self.schedule.boxes and guard is None else None
        if b is None:
            super()._store(scope, s, address, dims, value, guard, pieces)
            return
        block, text = self._block(b, self.s), value.var
        if value.dims != frozenset(self.s.dims):
            text = f"tl.broadcast_to({text}, {self.shape(self.s.dims)})"
        text = f"tl.trans({text})" if b.axes[-2:] != self.s.dims else text
        text = f"tl.reshape({text}, {list(block)})" if len(block) > 2 else text
        scope.lines.append(f"{self._descriptor(b, block)}.store([{self._corner(b, self.outs[self.view])}], {text})")


class LastRound(PersistentLowering):
    """The loop of a kernel's programs over what its whole rounds of tiles leave: smaller ones, so that all programs have some. Parameters,
    descriptors and names are the kernel's."""

    def __init__(self, whole: PersistentLowering):
        super().__init__(whole.body_, smaller(whole.schedule), whole.hints, whole.device, fast=whole.relaxed)
        self.whole = whole
        self.params, self.keys, self.descriptors = whole.params, whole.keys, whole.descriptors
        self.counter, self.errors, self.sources = whole.counter, whole.errors, whole.sources

    def blocks(self, a: Axis) -> Index:
        return self.whole.blocks(a)

    def _over_tiles(self, step: str, first: str, count: str, programs: str) -> str:
        parts = self.whole.schedule.last
        return f"for {step} in tl.range({self.whole._whole_rounds()} * {parts} + {first}, {count} * {parts}, {programs})"

    def _range(self, low, high, step) -> str:
        return f"tl.range({low}, {high}, {step}, num_stages={self.schedule.stages})"

    def _decode_tile(self, tile: Scope, moving: list[Axis], number: str) -> None:
        parts = self.whole.schedule.last
        self.part = self.assign(tile, f"{number} % {parts}", "b")
        super()._decode_tile(tile, moving, self.assign(tile, f"{number} // {parts}", "b"))

    def _base(self, a: Axis, block: str) -> str:
        first, second = self.schedule.dims
        size, mine = self.whole.schedule.sizes(a)[0], self.schedule.sizes(a)[0]
        part = f"{self.part} % 2" if a is second else f"{self.part} // 2"
        return f"{block} * {size}" + (f" + {part} * {mine}" if mine < size else "")


def lower_persistent(body: Body, schedule: PersistentSchedule, hints, device: str, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernel of `body`; its `otherwise` is the same one by addresses, for calls whose memory the engine cannot copy."""
    plain = PersistentLowering(body, replace(schedule, boxes=False, flat=False, last=1), hints, device, fast=fast)
    addressed = plain.kernel()
    if not schedule.boxes or addressed.errors:
        return (addressed,)
    made = PersistentLowering(body, schedule, hints, device, fast=fast)
    made.params, made.keys = list(plain.params), dict(plain.keys)
    kernel = made.kernel()
    return (replace(kernel, otherwise=replace(addressed, params=kernel.params, aligned=kernel.aligned)),)
