"""Folds and prefixes in tiles: carried through loops, or of what is held in registers, piece by piece."""
from __future__ import annotations

import math

from ..ir.dtype import BOOL, I32, I64, DType
from ..ir.expr import Cast, Const, Coord, Load, Reduce, Scan, walk
from ..ir.ops import CARRIERS
from ..schedule.column_words import DEEP
from . import tile_words as words
from .scope import Unschedulable
from .tile_kernel import Scope, Value
from .tile_values import TileValues


IN_ANY_ORDER = ("max", "min", "any", "all", "argmax", "argmin")        # monoids whose result has the same bits however terms are combined


def folds_elements(e: Reduce) -> bool:
    """Does `e` take single elements into a rescaled carrier, not carriers that other programs have left?"""
    return e.monoid in CARRIERS and all(isinstance(x, Const) for x in e.args[1:])


class TileFolds(TileValues):
    """Values and folds of one kernel."""

    # -- carried folds -------------------------------------------------------------------------------------------------------
    def _fold_dims(self, e: Reduce) -> frozenset:
        return frozenset(a for a in self.s.dims if a in e.over or any(a in x.free for x in e.args)) - self._together(e)

    def _together(self, e: Reduce) -> frozenset:
        """The held axes whose lanes are folded before they are carried across programs' rows."""
        return self.s.together & set(e.over) if set(e.over) & set(self.s.split) and not folds_elements(e) else frozenset()

    def _accumulators(self, scope: Scope, e: Reduce, first: Scope) -> dict:
        """Registers that carry `e`: one tile a choice of pieces of the held axes that it depends on or folds. `first`: a scope of the same lines that
        has the coordinates of what is folded first. Equal pieces of what programs share have
        one tile, and those that are folded by thread one for each count of lanes."""
        dims, made, alike = self._fold_dims(e), {}, {}
        for choice in self._choices(dims):
            self.piece.update(choice)
            same = self._few(e) if self._by_thread(e) else \
                tuple((a, self.s.sizes(a)[n]) if a in e.over and a in self.s.split else (a, -n) for a, n in choice.items())
            if same in alike:
                made[self._key(dims)] = alike[same]
                continue
            shapes = [self.shape(d) if d else "[]" for d in self._component_dims(e)] if not self._few(e) else self._few_shapes(e)
            shapes = [f"[{self._rows_carried(e)}, {self.shape(dims).split(', ')[1]}"] if self._rows_carried(e) else shapes
            texts = [words.full(shapes[n], self._neutral(e, n), self._type(e, n)) for n in range(len(e.args))]
            if self._later(e):      # no later element need be greater: all may be infinite
                index = self._masked(first, self._first_index(first, e), I32, e, 1)
                text = index.var
                for a in sorted(self._together(e) & index.dims, key=self.s.dims.index):
                    text = f"tl.min({text}, {self.s.dims.index(a)}, keep_dims=True)"
                texts[1] = f"tl.broadcast_to({text}, {shapes[1]})" if dims else text
            made[self._key(dims)] = alike[same] = tuple(self.assign(scope, text, "a") for text in texts)
        self._first_pieces()
        return made

    def _first_index(self, first: Scope, e: Reduce) -> Value:
        saved, self.scope = self.scope, first
        index = self._narrow_index(e)
        self.scope = saved
        return index

    def _later(self, e: Reduce) -> bool:
        """Is `e` an argmax or argmin whose coordinates grow, lane by lane, from one element to the next?"""
        return self._narrow(e, 1) and len(e.over) == 1

    def _narrow(self, e: Reduce, component: int) -> bool:
        """An index that counts coordinates, and how many of fewer than 2^31 elements are so, are carried in 32 bits."""
        if component == 0:
            return self._counts(e)
        return component == 1 and e.monoid.startswith("arg") and isinstance(e.args[1], Coord) and not self.s.wide

    def _counts(self, e: Reduce) -> bool:
        """Is it a sum of truth values in i64, of fewer elements than i32 counts?"""
        most = [self.hints.most(a.extent) for a in e.over]
        return e.monoid == "sum" and e.dtype is I64 and isinstance(e.args[0], Cast) and e.args[0].arg.dtype is BOOL \
            and None not in most and math.prod(most) < 2 ** 31

    def _type(self, e: Reduce, component: int) -> DType:
        return I32 if self._narrow(e, component) else e.args[component].dtype

    def _neutral(self, e: Reduce, component: int):
        return words.neutral(e.monoid, e.args[0].dtype, component, self._narrow(e, component))

    def _arguments(self, e: Reduce) -> list[Value]:
        """The registers that `e` folds, here."""
        found = []
        for n, x in enumerate(e.args):
            found.append(self.emit(x) if not self._narrow(e, n) else self._narrow_index(e) if n else self.emit(Cast(I32, x.arg)))
        return found

    def _narrow_index(self, e: Reduce) -> Value:
        x = e.args[1]
        text, dims = self.text(x.index, ("coord", x.index))
        return self._put(None, text if dims else f"{text} + tl.full([], 0, tl.int32)", x.free, (), dims, bool(dims))

    def _component_dims(self, e: Reduce) -> list[frozenset]:
        """The tiled axes along which each carried component differs: weights of single elements only where lanes may be idle."""
        dims = self._fold_dims(e)
        if not folds_elements(e):
            return [dims] * len(e.args)
        if e.monoid == "expsum":
            return [dims - set(e.over), dims]
        return [dims, dims, frozenset(a for a in dims if a in e.over and a not in self.s.exact)]

    def _few(self, e: Reduce) -> int:
        """How many lanes carry `e` through a loop where a tile is one-dimensional: so many that what each takes in of a tile is one thread's, 16
        bytes of the narrowest element after the other. 0 where every element of the tile has a lane, or one number stands for all of them."""
        if self.rank != 1 or self.s.dims[0] not in e.over or self._together(e) or not set(e.over) & (self.s.looped | set(self.s.split)) \
                or self._in_order(e):
            return 0
        size = self.s.sizes(self.s.dims[0])[self.piece[self.s.dims[0]]]
        if self._by_thread(e):
            return min(32 * self.s.warps, size)
        if len(e.args) > 1 and not (e.monoid == "expsum" and folds_elements(e)) or e.monoid == "logsumexp":
            return 0
        return min(self._word(e) * 32 * self.s.warps, size)

    def _by_thread(self, e: Reduce) -> bool:
        """Are the elements of a thread folded into one lane?"""
        return self.s.by_thread and self.rank == 1 and e.monoid in ("moments", "sum") and folds_elements(e) == (e.monoid == "moments") \
            and bool(set(e.over) & set(self.s.split)) and not self._in_order(e)

    def _rows_carried(self, e: Reduce) -> int:
        """How many rows carry `e`, a fold down the columns of a tile of which each thread folds its own rows first; 0 where every row does."""
        if not self.s.by_thread or self.rank != 2 or len(e.args) != 1 or not set(e.over) & (self.s.looped | set(self.s.split)) or self._in_order(e):
            return 0
        rows, columns = self.s.dims
        return max(1, self.s.sizes(rows)[0] // DEEP) if rows in e.over and columns not in e.over and columns in self._fold_dims(e) else 0

    def _in_order(self, e: Reduce | Scan) -> bool:
        """Is the order fixed in which `e` combines its elements? Triton's own depends on how many threads there are, and how memory is aligned."""
        return self.hints.ordered and e.monoid not in IN_ANY_ORDER and e.args[0].dtype.is_float

    def _word(self, e: Reduce) -> int:
        """Elements of 16 bytes of the narrowest that `e` reads."""
        return 16 // min((x.dtype.bytes for x in walk(*e.args) if isinstance(x, Load)), default=4)

    def _words_of(self, e: Reduce) -> int:
        """Elements side by side of the current piece that a lane of `_by_thread` takes in at once; 0 where it has one element, or is not that of a
        thread."""
        lanes = self._few(e)
        if not lanes or not self._by_thread(e):
            return 0
        line = self.s.dims[0]
        size = self.s.sizes(line)[self.piece[line]]
        if size == lanes:
            return 0
        addresses = [i for x in walk(*e.args) if isinstance(x, Load) for i in x.index if line in i.axes()]
        apart = [i.coefficient(a) for i in addresses for a in i.axes() if a is not line]
        whole = self._words_shared(line) or all(self.hints.divides(self._word(e), n) for n in apart)
        return min(self._word(e), size // lanes) if whole else 1

    def _few_shapes(self, e: Reduce) -> list[str]:
        """The shapes of what few lanes carry: of moments a single count where no lane is idle."""
        lanes = f"[{self._few(e)}]"
        return [lanes, lanes, "[]" if self._full(e) else lanes] if e.monoid == "moments" else [lanes] * len(e.args)

    def _full(self, e: Reduce) -> bool:
        """Is no lane of what `e` folds idle, in any piece?"""
        return all(a in self.s.exact for a in self.s.dims if a in e.over)

    def _key(self, axes) -> tuple:
        return tuple(sorted((self.places[a], self.piece[a]) for a in self.held if a in axes))

    def _carry(self, scope: Scope, e: Reduce, accumulators: dict) -> None:
        dims, together = self._fold_dims(e), self._together(e)
        for choice in self._choices(dims | together):
            self.piece.update(choice)
            carried = accumulators[self._key(dims)]
            if folds_elements(e) and self._at_once(e):
                continue
            if folds_elements(e):
                (self._sum_of_exponentials if e.monoid == "expsum" else self._tile_of_moments if self._words_of(e) else self._step)(scope, e, carried)
                continue
            whole = self._later(e)          # an idle lane's value is no greater than any: its index is never taken
            taken = tuple(self._masked(scope, v, self._type(e, n), e, n, n and whole).var for n, v in enumerate(self._arguments(e)))
            if together:
                taken, _, _ = self._across(scope, Reduce(e.monoid, tuple(together), e.args), taken, dims | together)
            if self._words_of(e):
                taken = (self.assign(scope, f"tk.of_lanes(tk.spread({taken[0]}, {carried[0]}, {self._words_of(e)}))"),)
            elif self._rows_carried(e):
                taken = (self.assign(scope, words.reduce(e.monoid, e.args[0].dtype, (f"tk.rows_of_threads({taken[0]}, {carried[0]})",), 0)),)
            elif self._few(e) and not self._by_thread(e):
                taken = (self.assign(scope, words.reduce(e.monoid, e.args[0].dtype, (f"tk.lanes({taken[0]}, {carried[0]})",), 0)),)
            scope.lines += words.combine_lines(e.monoid, carried, carried, taken, self._later(e))
        if folds_elements(e) and self._at_once(e):
            self._several_moments(scope, e, accumulators)
        self._first_pieces()

    def _at_once(self, e: Reduce) -> bool:
        """Do several elements go into each lane's moments at a step?"""
        return e.monoid == "moments" and self.s.abreast and bool(set(e.over) & set(self.s.split))

    def _several_moments(self, scope: Scope, e: Reduce, accumulators: dict) -> None:
        """Takes the elements of equal pieces into a lane's moments: theirs first, then both."""
        pieces: dict = {}
        for choice in self._choices(self._fold_dims(e)):
            self.piece.update(choice)
            element, masks = self._masked(scope, self.emit(e.args[0]), e.dtype, e, 0), self.mask([a for a in self.s.dims if a in e.over])
            weight = self.assign(scope, f"tl.where({' & '.join(masks)}, 1.0, 0.0)") if masks else "1.0"
            pieces.setdefault(accumulators[self._key(self._fold_dims(e))], []).append((element.var, weight))
        for carried, taken in pieces.items():
            scope.lines += words.moments_of(carried, taken, [self.fresh() for _ in range(4)])

    def _tile_of_moments(self, scope: Scope, e: Reduce, carried: tuple) -> None:
        """Takes a tile into the moments of a lane for each thread."""
        element = self._masked(scope, self.emit(e.args[0]), e.dtype, e, 0)
        masks = self.mask([a for a in self.s.dims if a in e.over])
        word = self._words_of(e)
        if self._full(e):
            text = f"tk.moments_tile({', '.join(carried)}, {element.var}, {word})"
        else:
            ones = words.full(self.shape(self._fold_dims(e)), 1.0, e.dtype)
            weight = self.assign(scope, f"tl.where({' & '.join(masks)}, 1.0, 0.0)" if masks else ones)
            text = f"tk.moments_masked({', '.join(carried)}, {element.var}, {weight}, {word})"
        scope.lines.append(f"{', '.join(carried)} = {text}")

    def _sum_of_exponentials(self, scope: Scope, e: Reduce, carried: tuple) -> None:
        """Takes a tile into (maximum, sum of exponentials): its maximum first, so that each element costs one exponential and the carried sum one a
        tile."""
        element = self._masked(scope, self.emit(e.args[0]), e.dtype, e, 0)
        if self._few(e):
            scope.lines.append(f"{', '.join(carried)} = tk.expsum_tile({', '.join(carried)}, {element.var})")
            return
        (top,), _, _ = self._across(scope, Reduce("max", e.over, e.args[:1]), (element.var,), self._fold_dims(e))
        made = self.assign(scope, f"tk.maximum({carried[0]}, {top})")
        scope.lines.append(f"{carried[1]} = {carried[1]} * tk.expsum_share({carried[0]}, {made}) + tk.expsum_share({element.var}, {made})")
        scope.lines.append(f"{carried[0]} = {made}")

    def _step(self, scope: Scope, e: Reduce, carried: tuple) -> None:
        """Takes an element a lane into a rescaled carrier."""
        element = self._masked(scope, self.emit(e.args[0]), e.dtype, e, 0)
        masks = self.mask([a for a in self.s.dims if a in e.over])
        weight = self.assign(scope, f"tl.where({' & '.join(masks)}, 1.0, 0.0)") if masks else "1.0"
        scope.lines.append(f"{', '.join(carried)} = {words.step(e.monoid, carried, element.var, weight)}")

    def _masked(self, scope: Scope, v: Value, d: DType, e: Reduce, component: int, whole: bool = False) -> Value:
        """`v` with idle lanes of the folded axes neutral, unless `whole`, along every tiled axis that `e` folds."""
        folded = [a for a in self.s.dims if a in e.over]
        masks = self.mask(folded) if not whole else []
        neutral = words.literal(self._neutral(e, component), d)
        dims = v.dims | frozenset(folded)
        ragged = {a for a in folded if self.coords[a, self.piece[a]][1] is not None}
        if masks and not (ragged <= v.dims and self.filled.get(v.var) == self._neutral(e, component)):
            var = self.assign(scope, f"tl.where({' & '.join(masks)}, {v.var}, {neutral})")
            v = Value(var, v.dims | ragged, scope, True)
        if v.dims != dims or not v.block and dims:
            v = Value(self.assign(scope, f"tl.broadcast_to({v.var}, {self.shape(dims)})"), dims, scope, True)
        return v

    def _finish(self, scope: Scope, e: Reduce, accumulators: dict) -> tuple[Value, ...]:
        """The folded value at the current pieces of its free axes: every piece of the folded axes combined."""
        dims = self._fold_dims(e)
        folded = [a for a in self.held if a in e.over and a not in self._together(e)]
        parts: dict = {}
        saved = dict(self.piece)
        for choice in self._choices(folded):
            self.piece.update(choice)
            sizes = tuple(self.s.sizes(a)[n] for a, n in choice.items())
            carried = accumulators[self._key(dims)]
            if carried in parts.values():         # pieces of what programs share have one
                continue
            if sizes in parts:      # equal pieces first combine lane by lane: one fold across lanes
                carried = self._combined(scope, e, parts[sizes], carried)
            parts[sizes] = carried
        self.piece.update(saved)
        return self._lanes(scope, e, parts)

    def _lanes(self, scope: Scope, e: Reduce, parts: dict) -> tuple[Value, ...]:
        """The folded value of pieces by their sizes: the lanes of each, then the pieces."""
        saved, dims, whole = dict(self.piece), self._fold_dims(e), None
        folded = [a for a in self.held if a in e.over]
        for sizes, carried in parts.items():
            for a, n in zip(folded, sizes):
                self.piece[a] = self.s.sizes(a).index(n)
            value, dims_left, block = self._across(scope, e, carried, dims, bool(self._few(e)))
            whole = value if whole is None else self._combined(scope, e, whole, value)
        self.piece.update(saved)
        whole = tuple(self.assign(scope, f"{v}.to(tl.int64)") if self._narrow(e, n) else v for n, v in enumerate(whole))
        return tuple(Value(v, dims_left, scope, block) for v in whole)

    def _combined(self, scope: Scope, e: Reduce, x: tuple, y: tuple) -> tuple:
        made = tuple(self.fresh() for _ in x)
        scope.lines += words.combine_lines(e.monoid, made, x, y)
        return made

    def _across(self, scope: Scope, e: Reduce, carried: tuple, dims: frozenset, lanes: bool = False):
        """Lanes of the folded dimensions folded together: (registers, dims left, are they blocks). `lanes`: a few lanes carry what is folded."""
        left = frozenset(a for a in dims if a not in e.over)
        if not dims:
            return carried, left, False
        over = [n for n, a in enumerate(self.s.dims) if a in e.over]
        if not over:
            return carried, left, True
        wide = e.monoid in CARRIERS and not lanes or e.monoid == "moments"
        shape = f"[{self._few(e)}]" if lanes else self.shape(dims)
        current = tuple(self.assign(scope, f"tl.broadcast_to({c}, {shape})") for c in carried) if wide else carried
        flatten, ordered = not left, self._in_order(e)
        if flatten and self.rank > 1 and len(current) == 1 and not ordered:      # in any order: the lanes of a thread first
            flat = math.prod(self.lengths(dims))
            current = tuple(self.assign(scope, f"tl.reshape({c}, [{flat}], can_reorder=True)") for c in current)
        # the contiguous one first: a thread's own
        positions = [0] if flatten and len(current) == 1 and not ordered else sorted(range(self.rank), reverse=True) if flatten else over[::-1]
        sizes = self.lengths(dims)
        for n in positions:
            if ordered:
                current = self._halved(scope, e, current, n, sizes)
            sizes[n:n + 1] = () if flatten else (1,)
            text = words.reduce(e.monoid, e.args[0].dtype, current, n)
            made = tuple(self.fresh() for _ in carried)
            scope.lines.append(f"{', '.join(made)} = {text}")
            if not flatten:
                scope.lines += [f"{m} = tl.expand_dims({m}, {n})" for m in made]
            current = made
        return current, left, not flatten

    def _halved(self, scope: Scope, e: Reduce, current: tuple, n: int, sizes: list[int]) -> tuple:
        """`current`, blocks of `sizes`, folded along dimension `n` down to one element, one half into the other: an order of their own."""
        half = sizes[n]
        while half > 1:
            half //= 2
            apart = f"[{', '.join(map(str, (*sizes[:n], 2, half, *sizes[n + 1:])))}]"
            current = tuple(self.assign(scope, f"tl.reshape({c}, {apart})") for c in current)
            made = tuple(self.fresh() for _ in current)
            scope.lines.append(f"{', '.join(made)} = {words.reduce(e.monoid, e.args[0].dtype, current, n)}")
            current = made
        return current

    def _remember(self, scope: Scope, e: Reduce, values) -> None:
        for n, v in enumerate(values):
            same = Reduce(e.monoid, e.over, e.args, n)
            scope.memo[same, self._key(e.free)] = v
            self.sources.setdefault(v.var, same)

    # -- folds of held values ------------------------------------------------------------------------------------------------
    def _emit_reduce(self, e: Reduce) -> Value:
        """A fold over held axes, where its arguments are known."""
        if set(e.over) & self.s.looped or set(e.over) & set(self.s.split):
            raise Unschedulable("a fold's result is needed in a loop that it does not reach")
        values = self._held_fold(e)
        self._remember(values[0].scope, e, values)
        return self._known(e)

    def _held_fold(self, e: Reduce) -> tuple[Value, ...]:
        """`e` over held axes, at the current pieces of its free axes."""
        saved = dict(self.piece)
        dims = self._fold_dims(e)
        accumulators, values = {}, []
        folded = [a for a in self.held if a in e.over]
        made: dict = {}
        for choice in self._choices(folded):
            self.piece.update(choice)
            made[self._key(dims)] = self._arguments(e)
            values += made[self._key(dims)]
        self.piece.update(saved)
        scope = self._home(e.free, values)
        for choice in self._choices(folded):
            self.piece.update(choice)
            key = self._key(dims)
            accumulators[key] = tuple(self._masked(scope, v, self._type(e, n), e, n).var for n, v in enumerate(made[key]))
        self.piece.update(saved)
        return self._finish(scope, e, accumulators)

    # -- scans -----------------------------------------------------------------------------------------------------------------
    def _carry_registers(self, scope: Scope, e: Scan) -> tuple:
        dims = frozenset(a for a in self.s.dims if a is not e.along and any(a in x.free for x in e.args))
        shape = self.shape(dims) if self.rank > 1 else "[]"
        return tuple(self.assign(scope, words.full(shape, words.neutral(e.monoid, e.args[0].dtype, n), x.dtype), "a") for n, x in enumerate(e.args))

    def _emit_scan(self, e: Scan) -> Value:
        scope = self.scope
        position = self.s.dims.index(e.along) if e.along in self.s.dims else None
        fold = Reduce(e.monoid, (e.along,), e.args)
        if position is None:
            return self._scan_by_step(scope, e)
        at = self.piece[e.along]
        saved = dict(self.piece)
        if e.along in self.s.looped:
            carry = self.carries[e.monoid, e.args]
            return self._scan_piece(scope, e, fold, position, carry, carry)
        shifted = self.s.shift is not None and self.s.shift.axis is e.along
        last = len(self.s.sizes(e.along)) - 1
        carry = self._before_words(scope, e, fold, last) if shifted else None
        for n in range(min(at, last - shifted) + 1):
            self.piece[e.along] = n
            found = self._known(e)
            if found is None:
                after = tuple(self.fresh("a") for _ in e.args) if n < last else None
                found = self._scan_piece(scope, e, fold, position, carry, after)
                scope.memo[("carry", e.monoid, e.args), self._key(e.free)] = after
            carry = self._carried_on(e) if n < last else None
        if shifted and at == last:
            self.piece[e.along] = last
            found = self._behind_words(scope, e, fold, position, carry)
        self.piece.update(saved)
        return found

    def _carried_on(self, e: Scan) -> tuple:
        """What the prefixes of the current piece carry on."""
        key = ("carry", e.monoid, e.args), self._key(e.free)
        return next((s.memo[key] for s in self.scope.chain() if key in s.memo), ())

    def _beside_words(self, scope: Scope, e: Scan, fold: Reduce, before: bool) -> str:
        """The elements before, or behind, the whole words of a shifted row, which are the current piece; neutral elsewhere."""
        value = self._masked(scope, self.emit(e.args[0]), e.args[0].dtype, fold, 0).var
        other = words.literal(words.neutral(e.monoid, e.args[0].dtype, 0), e.args[0].dtype)
        here = f"{self.ends} < {self.s.shift.group}"
        return self.assign(scope, f"tl.where({here}, {value}, {other})" if before else f"tl.where({here}, {other}, {value})")

    def _before_words(self, scope: Scope, e: Scan, fold: Reduce, last: int) -> tuple:
        """What the elements before the whole words fold to."""
        self.piece[e.along] = last
        if not self._carried_on(e):
            total, _, _ = self._across(scope, fold, (self._beside_words(scope, e, fold, True),), frozenset((e.along,)))
            scope.memo[("carry", e.monoid, e.args), self._key(e.free)] = total
        return self._carried_on(e)

    def _behind_words(self, scope: Scope, e: Scan, fold: Reduce, position: int, carry: tuple) -> Value:
        """The prefixes of the elements before the whole words, and of those behind them, which go on from `carry`."""
        dims = frozenset((e.along,))
        made = [self._prefixes(scope, e, (self._beside_words(scope, e, fold, before),), dims, position)[0] for before in (True, False)]
        behind = self.fresh()
        scope.lines += words.combine_lines(e.monoid, (behind,), carry, (made[1],))
        found = self.assign(scope, f"tl.where({self.ends} < {self.s.shift.group}, {made[0]}, {behind})")
        value = scope.memo[e, self._key(e.free)] = Value(found, frozenset((e.along,)), scope, True)
        return value

    def _scan_piece(self, scope: Scope, e: Scan, fold: Reduce, position: int, carry, after) -> Value:
        """The prefixes of the current piece behind `carry`; `after` receives what is carried on."""
        values = [self._masked(scope, self.emit(x), x.dtype, fold, n) for n, x in enumerate(e.args)]
        dims = frozenset().union(*(v.dims for v in values))
        made = self._prefixes(scope, e, tuple(v.var for v in values), dims, position)
        if carry is not None:
            scope.lines += words.combine_lines(e.monoid, made, carry, made)
        if after is not None:
            total, _, _ = self._across(scope, fold, tuple(v.var for v in values), dims)
            scope.lines += words.combine_lines(e.monoid, after, carry, total) if carry is not None else \
                [f"{a} = {t}" for a, t in zip(after, total)]
        for n, m in enumerate(made):
            same = Scan(e.monoid, e.along, e.args, n, e.reverse)
            scope.memo[same, self._key(e.free)] = Value(m, dims, scope, True)
        return scope.memo[e, self._key(e.free)]

    def _prefixes(self, scope: Scope, e: Scan, args: tuple[str, ...], dims: frozenset, position: int) -> tuple[str, ...]:
        """The prefixes of `args`, which differ along `dims`. Triton scans registers whose lanes repeat along another dimension wrongly (its shuffles
        step by lanes that hold the same element), so those are scanned as whole tiles, of which one line is kept."""
        short = [p for p, a in enumerate(self.s.dims) if a not in dims and self.s.sizes(a)[self.piece[a]] > 1]
        if short:
            args = tuple(self.assign(scope, f"tl.broadcast_to({x}, {self.shape(self.s.dims)})") for x in args)
        made = tuple(self.fresh() for _ in args)
        if self._in_order(e):
            sizes = self.lengths(self.s.dims if short else dims)
            before, n, after = math.prod(sizes[:position]), sizes[position], math.prod(sizes[position + 1:])
            text = words.ordered_scan(e.monoid, args, before, n.bit_length() - 1, after)
        else:
            text = words.scan(e.monoid, args, position)
        scope.lines.append(f"{', '.join(made)} = {text}")
        for p in short:
            made = tuple(self.assign(scope, f"tk.any_of({x}, {p})") for x in made)
        return made

    def _scan_by_step(self, scope: Scope, e: Scan) -> Value:
        """Along a looped axis that is no dimension: the carry itself."""
        carry = self.carries[e.monoid, e.args]
        values = [self.emit(x) for x in e.args]
        scope.lines += words.combine_lines(e.monoid, carry, carry, tuple(v.var for v in values))
        dims = frozenset().union(*(v.dims for v in values))
        for n, c in enumerate(carry):
            var = self.assign(scope, c)
            scope.memo[Scan(e.monoid, e.along, e.args, n, e.reverse), self._key(e.free)] = Value(var, dims, scope, self.rank > 1)
        return scope.memo[e, self._key(e.free)]
