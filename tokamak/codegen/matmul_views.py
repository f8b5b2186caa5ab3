"""Where a program of a contraction stands: its views of a tile, coordinates in each of them, and the tiles it makes (`matmul` says what a view is).
"""
from __future__ import annotations

import itertools
from dataclasses import replace

from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv, minimum
from ..schedule.matmul import MatmulSchedule
from .tile_kernel import For, Scope
from .tiles import TileLowering


class MatmulViews(TileLowering):
    """Of a kernel of contractions, whose `schedule` stands whichever view is shown."""
    flat: Axis | None = None            # depth and the axes that are written out, counted as one
    member = ""                         # register that numbers a program among those of its cluster

    def _make_views(self) -> None:
        s, slices = self.schedule, self._slices()
        first, second = s.dims
        pairs = {"left": (*slices, first, s.depth), "right": (*slices, s.depth, second), "sum": (*slices, first, second), "out": (first, second)}
        if s.inner is not None:
            pairs |= {"inner left": (first, s.inner), "inner right": (s.inner, s.depth)}
        whole = self._with_flat()
        if self.flat is not None:
            pairs["flat right"] = (*slices, self.flat, second)
        self.views = {name: (replace(whole, dims=dims), {}) for name, dims in pairs.items()}
        if s.sharers > 1:
            parts = tuple((a, (self._part(),) if a is first else sizes) for a, sizes in whole.pieces)
            self.views["out"] = replace(whole, dims=s.dims, pieces=parts), {}

    def _part(self) -> int:
        """Elements of the tile's first axis that are a program's own, where those of a cluster have added up their tiles."""
        return self.schedule.sizes(self.schedule.dims[0])[0] // self.schedule.sharers

    def _with_flat(self) -> MatmulSchedule:
        """The schedule with the depth and the axes that are written out as one axis too, where there are such."""
        s = self.schedule
        if not s.unrolled:
            return s
        self.flat = Axis(max(a.id for a in s.order) + 400000, s.depth.extent * len(self._digits()))
        pieces = (*s.pieces, (self.flat, (s.sizes(s.depth)[0] * len(self._digits()),)))
        return replace(s, pieces=pieces, exact=s.exact | ({self.flat} if s.depth in s.exact else set()))

    def _slices(self) -> tuple[Axis, ...]:
        """The axis of slices, where a step takes several."""
        outer = self.schedule.outer
        return (outer,) if outer is not None and self.schedule.sizes(outer)[0] > 1 else ()

    # -- views -----------------------------------------------------------------------------------------------------------------
    def _show(self, view: str) -> None:
        self.view = view
        self.s, self.coords = self.views[view]

    def _key(self, axes) -> tuple:
        """Values along tiled axes are laid out differently in each view, and a depth that is held has several pieces."""
        depth = self.schedule.depth
        piece = (self.piece[depth],) if depth in axes and len(self.schedule.sizes(depth)) > 1 else ()
        return (self.view, *piece) if any(a in axes for a, _ in self.s.pieces) else ()

    def _put_everywhere(self, scope: Scope, a: Axis, base: str, views: tuple[str, ...] = ()) -> None:
        """The coordinate of a tiled axis in every view that has it (or in those of `views`), from `base` (text, '' is 0) on; of all that is held the
        pieces begin at 0."""
        shown, sizes = self.view, self.s.sizes(a)
        for view, (s, _) in self.views.items():
            for piece in range(len(sizes)) if a in s.dims and (not views or view in views) else ():
                self._show(view)
                begins = str(sum(sizes[:piece])) if piece else self._own_part(a, base) if self.member and view == "out" else base
                self._tile_coordinate(scope, a, begins, piece, a not in s.exact and piece == len(sizes) - 1)
        self._show(shown)

    def _own_part(self, a: Axis, base: str) -> str:
        """Where a program's part of what begins at `base` along `a` begins."""
        return base if a is not self.schedule.dims[0] else f"{base}{' + ' if base else ''}{self.member} * {self._part()}"

    def _single(self, a: Axis) -> bool:
        """Is one block of a tiled axis all of it, whatever the sizes are?"""
        return a is not self.schedule.outer and a.extent.constant is not None and a.extent.constant <= sum(self.schedule.sizes(a))

    def _beside_rows(self, dims) -> bool:
        """Never: blocks of a depth that is held are no rows, and what the loop over tiles reads as a whole tile waits as one in shared memory."""
        return False

    def _home(self, axes, values=()) -> Scope:
        """Where weights are held, what stands behind the products is read again for each tile: registers would not hold it beside them."""
        found = super()._home(axes, values)
        again = len(self.schedule.sizes(self.schedule.depth)) > 1 and self.view in ("left", "out") and found is self.program
        return self.tile if again and any(s is self.tile for s in self.scope.chain()) else found

    def _placed(self, text: str, a: Axis) -> str:
        return text if len(self.s.dims) == 1 else f"{text}[{', '.join(':' if x is a else 'None' for x in self.s.dims)}]"

    def _digits(self) -> list[dict[Axis, int]]:
        """Every choice of coordinates of the axes that are written out, in order."""
        digits = sorted(self.schedule.unrolled, key=self.schedule.order.index)
        return [dict(zip(digits, at)) for at in itertools.product(*(range(a.extent.constant) for a in digits))]

    # -- where a program stands ------------------------------------------------------------------------------------------------
    def blocks(self, a: Axis) -> Index:
        """How many tiles there are along a parallel axis, whichever view is shown: one may have a part of each tile."""
        size = sum(self.schedule.sizes(a)) if a in self.schedule.dims else 1
        return floordiv(a.extent + (size - 1), as_index(size)) if size > 1 else a.extent

    def _place_program(self) -> tuple[Scope, object, str | None]:
        """(the scope of one tile, programs in all, this program's share of the depth or None): coordinates in every view that has them."""
        s, program = self.schedule, self.program
        parallel = [a for a in s.order if a in self.body_.parallel]
        whole = self._program() + (".to(tl.int64)" if s.wide else "")
        if s.sharers > 1:
            number = self.assign(program, whole, "b")
            self.member, whole = self.assign(program, f"{number} % {s.sharers}", "b"), f"{number} // {s.sharers}"
        fixed = [a for a in (*s.dims, *filter(None, (s.depth, s.inner))) if self._single(a)]
        fixed += [self.flat] if s.depth in fixed and self.flat is not None else []
        for a in fixed:
            self._put_everywhere(program, a, "")
        program.open = frozenset(fixed)
        moving = [a for a in parallel if a not in fixed]
        tiles = as_index(1)
        for a in moving:
            tiles = tiles * self.blocks(a)
        number = self.assign(program, whole, "b")
        tile, grid, share = program, tiles, None
        if s.sharers > 1:
            share, grid = self.member, tiles * s.sharers
        elif s.resident:
            count, programs = self.param("int", ("tiles",), tiles), self.param("int", ("programs",), minimum(tiles, as_index(s.resident)))
            step = self.fresh("b")
            loop = For(self._over_tiles(step, number, count, programs), [])
            self.after = [loop]                 # stands behind what is loaded once
            tile, grid, number = Scope(loop.lines, program.open, program), minimum(tiles, as_index(s.resident)), step
        elif s.programs > 1:
            count = self.param("int", ("tiles",), tiles)
            share, number = self.assign(program, f"{number} // {count}", "b"), self.assign(program, f"{number} % {count}", "b")
            grid = tiles * s.programs
        self._decode_tile(tile, moving, number)
        tile.open = program.open | frozenset(parallel)
        return tile, grid, share

    def _over_tiles(self, step: str, first: str, count: str, programs: str) -> str:
        """The head of the loop over the tiles that a program makes."""
        stages = f", num_stages={self.schedule.stages}" if self._single(self.schedule.depth) else ""
        return f"for {step} in tl.range({first}, {count}, {programs}{stages})"

    def _decode_tile(self, tile: Scope, moving: list[Axis], number: str) -> None:
        """Coordinates of the axes that differ from tile to tile: the accumulator's vary fastest."""
        count = lambda a: self.param("int", ("blocks", a), self.blocks(a))
        dims = [a for a in moving if a in self.schedule.dims]
        rest = number
        each: dict = {}
        if len(dims) == 2:
            inside = rest
            if len(moving) > 2:
                plane = self.assign(tile, f"{count(dims[0])} * {count(dims[1])}", "b")
                inside, rest = self.assign(tile, f"{rest} % {plane}", "b"), self.assign(tile, f"{rest} // {plane}", "b")
            each.update(zip(dims, self._grouped(tile, inside, *map(count, dims))))
        left = [a for a in moving if a not in each]
        for n, a in reversed(list(enumerate(left))):
            each[a] = self.assign(tile, f"{rest} % {count(a)}", "b") if n else rest
            rest = self.assign(tile, f"{rest} // {count(a)}", "b") if n else rest
        for a, block in each.items():
            if a in self.schedule.dims:
                self._put_everywhere(tile, a, self._base(a, block))
            else:
                self._everywhere(tile, a, block)

    def _base(self, a: Axis, block: str) -> str:
        """Where the block of that number begins."""
        return f"{block} * {self.schedule.sizes(a)[0]}"

    def _everywhere(self, scope: Scope, a: Axis, number: str) -> None:
        shown = self.view
        for view in self.views:
            self._show(view)
            self._scalar_coordinate(scope, a, number)
        self._show(shown)

    def _grouped(self, scope: Scope, number: str, rows: str, columns: str) -> tuple[str, str]:
        """The tile of a number: a few tiles along the first axis, for each along the second, then the next few."""
        few = self.schedule.group
        if few == 1:
            return self.assign(scope, f"{number} // {columns}", "b"), self.assign(scope, f"{number} % {columns}", "b")
        several = self.assign(scope, f"{number} // ({few} * {columns}) * {few}", "b")
        there = self.assign(scope, f"tl.minimum({rows} - {several}, {few})", "b")
        inside = self.assign(scope, f"{number} % ({few} * {columns})", "b")
        return self.assign(scope, f"{several} + {inside} % {there}", "b"), self.assign(scope, f"{inside} // {there}", "b")
