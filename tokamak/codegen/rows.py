"""(Body, RowsSchedule) -> TileKernels: narrow layers, a block of rows after the other.

A program has a view of its tile for each pair of axes that a value has: rows and a narrow axis, or two narrow axes for weights and for what is summed
over the rows. A row's value is made once, in its view, whatever reads it; a sum over rows is the product of its tile, turned, with another one's, or
with ones. Tiles may lie turned, weights first: what is made within a row is then multiplied as it stands in registers. Two programs that have half of
an axis each run through the same rows.
"""
from __future__ import annotations

from dataclasses import replace

from ..fuse import narrow
from ..fuse.contraction import ONES, halves
from ..ir.dtype import F32
from ..ir.expr import Expr, Load, Reduce
from ..ir.index import Axis, as_index
from ..ir.normal import floordiv
from ..schedule.body import Body
from ..schedule.matmul import outermost
from ..schedule.rows import RowsSchedule, crossing, local
from . import tile_words as words
from .matmul import MatmulLowering
from .scope import Unschedulable
from .tile_ahead import Turns
from .tile_kernel import For, Scope, TileKernel, Value
from .tile_parts import lower_by


class RowsLowering(MatmulLowering):
    """The kernel of a body of narrow layers."""

    def kernel(self) -> TileKernel:
        s = self.schedule = self.s
        self.partial: dict[Reduce, Value] = {}              # a row's products with weights, in the block at hand
        rows, program, self.held = s.depth, self.program, []
        self.piece.update({a: 0 for a, _ in s.pieces})
        self.reused = narrow.reused([st.expr for st in self.stores], frozenset((rows,)))
        self.factors: dict[tuple, Value] = {}               # what of it products read, in the block at hand
        self.made = narrow.factors([st.expr for st in self.stores], frozenset((rows,)))
        waiting = [*self._beside_products(), *self.reused]
        ahead = [("ahead", self._along(self._other(e.free))) for e in waiting]
        self.views = {view: (replace(s, dims=view[1] if view in ahead else view), {}) for view in (*self._pairs(), *ahead)}
        self._show(next(iter(self.views)))
        number, member = self._place(self.assign(program, self._program() + (".to(tl.int64)" if s.wide else ""), "b"))
        for a in s.widths:
            self._put_everywhere(program, a, f"{member} * {s.sizes(a)[0]}" if a is s.half else "")
        program.open = frozenset(s.widths)
        carried = {e: self.assign(program, self._nothing_across(e), "a") for e in crossing(self.body_)}
        step, count = self.fresh("b"), self.param("int", ("blocks", rows), self.blocks(rows))
        loop = For(f"for {step} in {self._range(number, count, s.programs)}", [])
        scope = self.tile = Scope(loop.lines, program.open, program)
        inside = program.open | {rows}
        turns = Turns(scope, Scope(program.lines, inside, program), number, Scope(scope.lines, inside, scope),
                      f"tl.minimum({step} + {s.programs}, {count} - 1)")
        # By the pipeline what no product reads would come at the end of a block, with nothing left to do meanwhile; and of what products read as well
        # it keeps a slot too few: the next block would be read over what a product still reads.
        for e in waiting:
            self._show(self._along(self._other(e.free)))
            self._read_ahead(e, turns)
        self._put_everywhere(scope, rows, f"{step} * {s.sizes(rows)[0]}", self._pairs())
        scope.open = program.open | {rows}
        self._block(scope, carried)
        program.lines.append(loop)
        for e, name in carried.items():
            self._leave_sum(e, name, number)
        aligned = frozenset(p.name for p in self.params if p.kind == "int" and self.hints.divides(16, p.source))
        programs = as_index(s.programs * (1 if s.half is None else 2))
        return TileKernel(tuple(self.params), tuple(program.lines), programs, s, self.body_, tuple(self.errors), self.sources,
                          tuple(self.spaces.values()), aligned)

    def _place(self, number: str) -> tuple[str, str]:
        """(which rows the program of that number runs through, which half of an axis is its own)."""
        if self.schedule.half is None:
            return number, ""
        return self.assign(self.program, f"{number} // 2", "b"), self.assign(self.program, f"{number} % 2", "b")

    def _beside_products(self) -> list[Load]:
        """What turned tiles read of the rows, and multiply by nothing."""
        s = self.schedule
        return narrow.beside([st.expr for st in self.stores], frozenset((s.depth,))) if s.turned and s.half is None else []

    def _load_at(self, e: Load, scope: Scope, turn: str) -> Value:
        """`e` as it is read in `scope` for the block of that number."""
        here, shown, rows = self.scope, self.view, self.schedule.depth
        self.scope, view = scope, ("ahead", shown)
        self._put_everywhere(scope, rows, f"{self.assign(scope, turn, 'b')} * {self.schedule.sizes(rows)[0]}", (view,))
        self._show(view)
        value = self._emit_load(e)
        self._show(shown)
        self.scope = here
        return value

    def blocks(self, a: Axis):
        return floordiv(a.extent + (narrow.ROWS - 1), as_index(narrow.ROWS))

    def _pairs(self) -> list[tuple[Axis, Axis]]:
        """The pairs of axes that values have, in the order in which they are met."""
        found: dict = {}
        every = frozenset((self.schedule.depth,))
        for st in local(self.body_):
            found[self._along(self._other(st.axes))] = None
        for e in narrow.folds([s.expr for s in self.stores]):
            if (c := narrow.within(e, every)) is not None:
                found |= dict.fromkeys((self._along(c.first), self._weights(c), self._along(c.second)))
            else:
                found |= dict.fromkeys((*(self._along(a) for a in sorted(e.free, key=lambda a: a.id)), self._sum_view(e)))
        return list(found)

    def _along(self, a: Axis) -> tuple[Axis, Axis]:
        """The view of a row's values along `a`."""
        rows = self.schedule.depth
        return (a, rows) if self.schedule.turned else (rows, a)

    def _weights(self, c: narrow.Product) -> tuple[Axis, Axis]:
        """The view of the weights that a row is multiplied by."""
        return (c.second, c.first) if self.schedule.turned else (c.first, c.second)

    def _other(self, axes) -> Axis:
        return next(a for a in axes if a is not self.schedule.depth)

    def _sum_view(self, e: Reduce) -> tuple[Axis, Axis]:
        """The view of what is summed over rows: weights as they lie, but turned tiles that are made come first; of a sum of one
        axis any with that first."""
        if (c := self._across_rows(e)) is not None:
            made = [a for a, x in ((c.first, c.left), (c.second, c.right)) if not isinstance(x.arg, Load)] if self.schedule.turned else []
            return tuple(sorted(self._space_axes(e), key=lambda a: a not in made))
        a, = e.free
        return a, next(x for x in self.schedule.widths if x is not a)

    def _across_rows(self, e: Reduce) -> narrow.Product | None:
        return narrow.across(e, frozenset((self.schedule.depth,)))

    # -- a block of rows -------------------------------------------------------------------------------------------------------
    def _block(self, scope: Scope, carried: dict[Reduce, str]) -> None:
        """What one block of rows stores, and adds to what is carried. Turned tiles are all multiplied before any is stored. No product is under way
        when the block ends (`tk.settled`): a step's gradients of 131072 rows of 128, 256 and 128 79 us where some were, 70 so (H100)."""
        self.scope = scope
        for e in outermost([st.expr for st in local(self.body_)]) if self.schedule.turned else ():
            self._product(e)
            self.scope = scope
        for st in local(self.body_):
            self._show(self._along(self._other(st.axes)))
            self._store_all(scope, [st])
        for e, name in carried.items():
            self._add(scope, e, name)
        scope.lines += [f"{name} = tk.settled({name})" for name in carried.values()]

    def _add(self, scope: Scope, e: Reduce, name: str) -> None:
        """Adds a block of rows to a sum over them."""
        self.scope, rows, c, turned = scope, self.schedule.depth, self._across_rows(e), self.schedule.turned
        lying = (lambda x: x) if turned else (lambda x: f"tl.trans({x})")
        if c is not None:
            first, second = self._sum_view(e)
            left, right = (c.left, c.right) if first in c.left.free else (c.right, c.left)
            x, y = self._multiplied(scope, self._along(first), left, rows), self._multiplied(scope, self._along(second), right, rows)
            scope.lines.append(f"{name} = tk.dot({lying(x)}, {f'tl.trans({y})' if turned else y}, {name})")
        elif halves(e.args[0]) is not None:
            x = self._multiplied(scope, self._along(*e.free), e.args[0], rows)
            scope.lines.append(f"{name} = tk.dot({lying(x)}, {self._ones(narrow.ROWS, halves(e.args[0]))}, {name})")
        else:
            self._show(self._along(*e.free))
            value = self._cut(self.emit(e.args[0]), frozenset((rows,)))
            scope.lines.append(f"{name} += {lying(f'tl.sum({value.var}, {1 if turned else 0}, keep_dims=True)')}")

    def _nothing_across(self, e: Reduce) -> str:
        """The text of a sum before any row."""
        sizes = [self.schedule.sizes(a)[0] for a in self._sum_view(e)]
        if self._across_rows(e) is None:
            sizes[1] = ONES if halves(e.args[0]) is not None else 1
        return words.full(str(sizes), 0.0, F32)

    def _leave_sum(self, e: Reduce, name: str, share: str) -> None:
        """Stores what this program has carried."""
        self._show(self._sum_view(e))
        if self._across_rows(e) is None and halves(e.args[0]) is not None:
            name = self.assign(self.program, f"tl.sum({name}, 1, keep_dims=True) * {1 / ONES}", "a")
        self.scope = self.program
        self._leave(e, {self._key(e.free): (name,)}, share)

    # -- values ----------------------------------------------------------------------------------------------------------------
    def _multiplied(self, scope: Scope, view: tuple[Axis, Axis], e: Expr, folded: Axis) -> str:
        """A register with a factor's tile of 16 bits, 0 where the axis `folded` is over."""
        shown, self.scope = self.view, scope
        self._show(view)
        turned = self._turned_weights(e, view)
        if turned is not None:
            self._show(shown)
            return f"tl.trans({turned})"
        value = self._plain_tile(e.arg, frozenset((folded,))) if e.arg not in self.reused else self._factor_read(e.arg)
        var = value.var
        if value.dims != frozenset(view):
            var = self._put(None, f"tl.broadcast_to({var}, {self.shape(view)})", (), (value,)).var
        self._show(shown)
        return var

    def _turned_weights(self, e: Expr, view: tuple[Axis, Axis]) -> str | None:
        """The register that has the weights `e`, all of them, the other way round."""
        found = self.program.memo.get((e.arg, (view[::-1],))) if not isinstance(e, Load) and isinstance(e.arg, Load) else None
        return found.var if found is not None and self.schedule.depth not in view and all(a in self.s.exact for a in view) else None

    def _factor_read(self, e: Load) -> Value:
        """What products read of `e`, which is in registers too."""
        if (e, self.view) not in self.factors:
            self.factors[e, self.view] = self._put(None, *self._reading(e))
        return self.factors[e, self.view]

    def _emit_load(self, e: Load) -> Value:
        """Idle lanes are 0: a value that is multiplied is read as any other."""
        _, dims = self.text(e.index[0], ("address", e.node))
        return self._loaded(e, frozenset()) if e.guard is None and dims else super()._emit_load(e)

    def _emit_reduce(self, e: Reduce) -> Value:
        """A row's product with weights."""
        return self._product(e)

    def _product(self, e: Reduce) -> Value:
        """The same, made once."""
        if e in self.partial:
            return self.partial[e]
        rows, turned = self.schedule.depth, self.schedule.turned
        c = narrow.within(e, frozenset((rows,)))
        if c is None:
            raise Unschedulable("a fold that is neither within rows nor across them")
        shown, scope = self.view, self.scope
        left, right = self._multiplied(scope, self._along(c.first), c.left, c.first), self._multiplied(scope, self._weights(c), c.right, c.first)
        self._show(self._along(c.second))
        self.scope = scope
        shape = str([self.schedule.sizes(a)[0] for a in self._along(c.second)])
        factors = f"{right}, {left}" if turned else f"{left}, {right}"
        value = self._put(e, f"tk.dot({factors}, {words.full(shape, 0.0, F32)})", e.free | {rows}, (), frozenset((rows, c.second)), True)
        self._show(shown)
        self.partial[e] = value
        return value


def lower_rows(body: Body, schedule: RowsSchedule, hints, device: str, choose_again, fast: bool = False) -> tuple[TileKernel, ...]:
    """The kernels of `body` in running order; as `tiles.lower_tiles`."""
    return lower_by(RowsLowering, body, schedule, hints, device, choose_again, fast)
