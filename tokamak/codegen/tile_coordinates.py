"""Coordinates and masks of tiles as Triton text, in pieces and blocks, and indices made of them."""
from __future__ import annotations

import itertools

from ..ir.index import Axis, FloorDiv, Index, Max, Min, Size, as_index
from ..ir.normal import floordiv
from ..schedule.body import Body
from ..schedule.tile_schedule import TileSchedule
from .lower import Lowering
from .scope import Named
from .tile_kernel import Scope, Value

KNOWN = (16, 8, 4, 2)       # multiples of which kernels know factors and extents to be; the first one by what parameters say of themselves. bf16
                            # LayerNorm over 1000 columns 95%, GroupNorm of 8 channels in NHWC 53; 58 and 38 with 16 alone, where they were read
                            # element by element


class TileCoordinates(Lowering):
    """Coordinates and names of one kernel. What an index gathers is a name by then (`TileValues._fetched`)."""
    named: dict = {}                         # what stands for a gathered index -> Value

    def __init__(self, body: Body, schedule: TileSchedule, hints):
        super().__init__(body, schedule, hints)
        self.program = Scope([], frozenset())
        self.scope = self.program
        self.rank = len(schedule.dims)
        self.piece: dict[Axis, int] = {a: 0 for a in schedule.dims}
        self.coords: dict = {}               # (axis, piece) -> (Value, mask text or None)
        self.fours: dict = {}                # (axis, piece) -> where it begins, text, for pieces of fours: all begin at multiples of 4
        self.held: list = []                 # tiled row axes that are held in registers
        self.block: str | None = None        # of a shifted parallel axis: the number of its block

    # -- texts -----------------------------------------------------------------------------------------------------------
    def shape(self, dims) -> str:
        return f"[{', '.join(map(str, self.lengths(dims)))}]"

    def lengths(self, dims) -> list[int]:
        """Elements of a block along each dimension of the tile, at the current pieces: one where it does not differ along `dims`."""
        return [self.s.sizes(a)[self.piece[a]] if a in dims else 1 for a in self.s.dims]

    def _placed(self, text: str, a: Axis) -> str:
        """A one-dimensional register as dimension `a` of a block."""
        if self.rank == 1:
            return text
        return f"{text}[{', '.join(':' if x is a else 'None' for x in self.s.dims)}]"

    def assign(self, scope: Scope, text: str, prefix: str = "t") -> str:
        var = self.fresh(prefix)
        scope.lines.append(f"{var} = {text}")
        return var

    def _atom_text(self, a) -> tuple[str, frozenset]:
        if isinstance(a, Axis):
            return self.coordinate(a)
        if isinstance(a, Named):
            value = self.named[a]
            return value.var, value.dims
        if isinstance(a, Size):
            return a.name, frozenset()
        (x, dx), (y, dy) = self._plain(a.a), self._plain(a.b)
        if isinstance(a, (Min, Max)):
            return f"tl.{'minimum' if isinstance(a, Min) else 'maximum'}({x}, {y})", dx | dy
        if isinstance(a, FloorDiv):
            return (f"(({x}) // ({y}))" if a in self.natural else f"tk.floordiv({x}, {y})"), dx | dy
        return (f"(({x}) % ({y}))" if a in self.natural else f"tk.mod({x}, {y})"), dx | dy

    def _plain(self, whole: Index) -> tuple[str, frozenset]:
        """Text of an index whose factors are parameters already."""
        parts, dims = [], frozenset()
        for k, v in whole.terms.items():
            factors = [self._atom_text(a) for a in k]
            dims = dims.union(*(d for _, d in factors))
            texts = [t for t, _ in factors]
            parts.append(" * ".join(texts + ([str(v)] if v != 1 or not texts else [])))
        return " + ".join(parts) or "0", dims

    def _factor(self, factor: Index, key) -> Index:
        """Of a factor that is a multiple of 8, 4 or 2, but not of 16, that is written out: accesses are as wide."""
        known = self._known_factor(factor)
        return super()._factor(floordiv(factor, as_index(known)), (key, known)) * known if known > 1 else super()._factor(factor, key)

    def _divisor(self, b: Index, block, key) -> Index:
        """A number is written out: divided by it is one multiplication, where by a parameter it is twenty operations."""
        return b if b.constant is not None else super()._divisor(b, block, key)

    def _known_factor(self, i: Index) -> int:
        known = next((n for n in KNOWN if self.hints.divides(n, i)), 1)
        return known if known < 16 and i.constant != 0 else 1

    def extent(self, a: Axis) -> Index:
        known = self._known_factor(a.extent) if a not in self.s.unrolled else 1
        if known == 1:
            return super().extent(a)
        self.names.setdefault(a, f"i{len(self.names)}")
        return as_index(Size(self.param("int", ("extent", a), floordiv(a.extent, as_index(known))))) * known

    # -- coordinates and masks ---------------------------------------------------------------------------------------------
    def coordinate(self, a: Axis) -> tuple[str, frozenset]:
        value, _ = self.coords[a, self.piece.get(a, 0)]
        return value.var, value.dims

    def mask(self, axes) -> list[str]:
        """Masks of those of `axes` whose current piece may reach past the extent."""
        found = [self.coords[a, self.piece[a]][1] for a in self.s.dims if a in axes]
        return [m for m in found if m is not None]

    def _tile_coordinate(self, scope: Scope, a: Axis, base: str, piece: int, ragged: bool) -> None:
        size = self.s.sizes(a)[piece]
        if size % 4 == 0:       # every base is a number of whole pieces of this length, or of longer ones
            self.fours[a, piece] = base
        lanes = self._placed(f"tl.arange(0, {size})", a)
        var = self.assign(scope, f"{base} + {lanes}" if base else lanes, "i")
        mask = self.assign(scope, f"{var} < {self._number(self.extent(a))}", "m") if ragged else None
        self.coords[a, piece] = (Value(var, frozenset((a,)), scope, True), mask)

    def _number(self, i: Index) -> str:      # an extent: a parameter or a literal
        text = self._plain(i)[0]
        return text if text.isalnum() else f"({text})"

    def _scalar_coordinate(self, scope: Scope, a: Axis, var: str) -> None:
        self.coords[a, 0] = (Value(var, frozenset(), scope, False), None)

    def blocks(self, a: Axis) -> Index:
        """How many blocks a parallel axis has, for the host."""
        shift, block = self.s.shift, sum(self.s.sizes(a)) if a in self.s.dims else 1
        if shift is not None and a is shift.axis:
            return floordiv(shift.words + (self.s.sizes(a)[0] - 1), as_index(self.s.sizes(a)[0]))
        return floordiv(a.extent + (block - 1), as_index(block)) if block > 1 else a.extent

    def _shifted_dims(self) -> frozenset:
        """The tiled axes along which the elements of shifted rows differ: theirs, and that of rows side by side, each of which begins anywhere."""
        return frozenset(a for a in self.s.dims if a is self.s.shift.axis or a in self.s.shift.origin.axes())

    def _words_shared(self, a: Axis) -> bool:
        """Do programs share the whole words of a row along `a`, which begins anywhere?"""
        return self.s.shift is not None and a is self.s.shift.axis and a in self.s.split

    def _decode(self, scope: Scope, axes, number: str, prefix: str) -> None:
        """Coordinates of `axes` from the running `number` of a block, the last axis fastest."""
        rest = number
        for n, a in reversed(list(enumerate(axes))):
            whole = a in self.s.dims and self.s.shift is None and self.blocks(a) == 1         # one block: nothing to divide by
            if whole:
                block = ""
            elif n == 0:
                block = rest
            else:
                count = self.param("int", ("blocks", a), self.blocks(a))
                block = self.assign(scope, f"{rest} % {count}", prefix)
                rest = self.assign(scope, f"{rest} // {count}", prefix)
            if self._words_shared(a):
                self._whole_words(scope, a, 0, f"{block} * {self.s.sizes(a)[0]} + ", a not in self.s.exact)
            elif self.s.shift is not None and a is self.s.shift.axis:
                self.block = block
            elif a in self.s.dims:
                sizes, start, n = self.s.sizes(a), f"{block} * {sum(self.s.sizes(a))}" if block else "", self.hints.exactly(a.extent)
                last = n % sum(sizes) if n is not None else 0          # elements of the last block
                for piece, size in enumerate(sizes):
                    behind = f"{' + ' if start else ''}{sum(sizes[:piece])}" if piece else ""
                    self._tile_coordinate(scope, a, start + behind, piece, a not in self.s.exact and sum(sizes[:piece + 1]) > last)
            else:
                self._scalar_coordinate(scope, a, block)

    def _choices(self, axes):
        """Every choice of pieces of the held axes among `axes`; the other axes stay at their first piece."""
        held = [a for a in self.held if a in axes]
        for combination in itertools.product(*(range(len(self.s.sizes(a))) for a in held)):
            yield dict(zip(held, combination))

    def _first_pieces(self) -> None:
        for a in self.piece:
            self.piece[a] = 0
