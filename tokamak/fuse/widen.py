"""Folds of columns that several rows counted as one make quicker, on GPUs: sums of a few columns over very many rows then read whole lines, and rows
that begin anywhere (1025 columns) are read in 16-byte words, since every so many of them begin alike.

    out[c] = sum[r](f(r, c))    becomes    part[j, c] = sum[q](f(q * rows + j, c)),  out[c] = sum[j](part[j, c])

`part` walks through memory like a fold of rows * columns columns. Rows that are left over are folded beside its results.
"""
from __future__ import annotations

import math
from dataclasses import replace

from ..ir.dtype import I64
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Reduce, Rewriter, walk
from ..ir.graph import Compute, Graph, is_pointwise, reads
from ..ir.index import Axis, Fetch, Index, as_index, axis
from ..ir.normal import floordiv
from ..ir.ops import CARRIERS, can_fail
from ..ir.rewrite import replaced
from .column_folds import walks_down
from .contraction import contraction
from .cost import Hints, estimates

LINE = 128              # bytes of memory that are fetched together
WIDE = 512              # elements that rows counted as one have at most
WHOLE = 2048            # the same where they are then whole tiles of COLUMNS
COLUMNS = 64            # of a tile that folds down them
LONG = 1 << 16          # rows from which on it is worth a kernel more
WORD = 16               # bytes of the longest access
PARTS = 0.07            # of what is folded: bytes of partial results, written and read again, that whole words are worth: f16 sums of 65536 rows of
                        # 1025 columns 65%, 24 before
GROWN = 0.28            # the same up to which more rows of 16 bits that begin anywhere count as one, as long as there are too few tiles: f16 sums of
                        # 512 rows of 8191 and 1024 of 4097 6.1 and 6.2 us by 32 and 64 rows as one, 7.5 and 7.7 by 8 and 16
ALIGNED = 1024          # rows at least that begin at whole words: f16 sums of 128 rows of 32768 6.5 us, 8.6 by two rows as one, of 512 of 65536
                        # 20.5, 20.9 by four
LEAST = 1 << 22         # bytes that are folded. Statistics of fewer, too: beside an outlier in the first of 200000 rows of 3 columns a variance is
                        # off by 2e-7 so, 7e-6 by programs that share whole rows
LEAST_WORDS = 15 << 17  # the same of ALIGNED rows at least that begin anywhere: 8192 of 129, 4096 of 257 and 1024 of 1025 bf16 4.0, 4.1 and 3.9 us,
                        # 16384 of 63 f16 and 4096 of 129 f32 3.9; 4.4, 4.3, 4.3, 4.4 and 4.2 as they are
TILES = 32              # of COLUMNS that each multiprocessor should have: as many rows count as one as make so many, and no fold is left across
                        # programs
FILL = 2                # of them from which on no fold is left across programs anyway. 1024 x 65536 of f16, four rows as one, 35.7 us and 1.3 for
                        # what they give; 39.9 as they are
AS_THEY_ARE = 4         # bytes of an element from which on rows that begin anywhere stay as they are, where there are FILL tiles and the second-level
                        # cache holds them: f32 sums of 256 rows of 32767 11.7 us, 14.2 in two kernels, of 128 of 65537 12.3, 14.4
MOST = 64               # rows that count as one then at most, that one kernel folds what they give


def widened(graph: Graph, target) -> Graph:
    """`graph` with every fold of narrow or ragged columns in two steps, on a GPU."""
    if target.kind != "gpu" or target.ordered:
        return graph
    hints, parts, readers, along = estimates(graph, target), {}, {}, _folded_along(graph)
    for n in graph.nodes:
        for r in reads(n):
            readers[r] = readers.get(r, 0) + 1

    def change(n: Compute) -> Compute | None:
        made = _in_two_steps(n, hints, readers, along, target)
        if made is not None:
            parts.update((part, made) for part in reads(made))
        return made
    out = replaced(graph, change)
    origins = {part: out.origins[whole] for part, whole in parts.items() if whole in out.origins}
    return replace(out, origins={**out.origins, **origins}) if parts else graph


def _folded_along(graph: Graph) -> frozenset:
    """What folds along lines read, each line by itself, and what is multiplied: sums of its columns stand in their kernel."""
    folds = (e for n in graph.nodes if isinstance(n, Compute) for e in walk(n.expr) if isinstance(e, Reduce) and e.free)
    return frozenset(x.node for e in folds for multiplies in (contraction(e) is not None,) for x in walk(*e.args)
                     if isinstance(x, Load) and (multiplies or any(x.offset().coefficient(a) == 1 for a in e.over)))


def _in_two_steps(n: Compute, hints: Hints, readers: dict, along: frozenset, target) -> Compute | None:
    casts, fold = [], n.expr
    while isinstance(fold, Cast):
        casts.append(fold)
        fold = fold.arg
    if not isinstance(fold, Reduce) or len(fold.over) != 1 or fold.monoid not in ("sum", "max", "min", *CARRIERS):
        return None
    rows = _rows_as_one(fold, along, hints) or _rows_of_words(fold, hints, readers, target)
    if rows is None:
        return None
    a, rank = fold.over[0], len(n.shape)
    whole = floordiv(a.extent, as_index(rows))
    left = 0 if hints.divides(rows, a.extent) else hints.exactly(a.extent) % rows
    j, q = Axis(rank, as_index(rows)), Axis(rank + 1, whole)
    args = tuple(map(Rewriter({a: as_index(q) * rows + as_index(j)}), fold.args))
    parts = [Compute((as_index(rows), *n.shape), None, _moved(Reduce(fold.monoid, (q,), args, k), rank, j), n.device) for k in range(len(args))]
    at = tuple(axis(d, s) for d, s in enumerate(n.shape))
    every = Axis(rank, as_index(rows + left))
    again = _beside(fold, parts, at, every, whole * rows, rows) if left else tuple(Load(part, (as_index(j), *at)) for part in parts)
    out: Expr = Reduce(fold.monoid, (every,), again, fold.component)
    for c in reversed(casts):
        out = Cast(c.dtype, out, c.implicit)
    return Compute(n.shape, n.strides, out, n.device, n.tag)


def _beside(fold: Reduce, parts: list[Compute], at: tuple, j: Axis, first: Index, rows: int) -> tuple[Expr, ...]:
    """What is folded along `j`: the results of `parts`, then the rows from `first` on."""
    a, = fold.over
    inside = Op("lt", Coord(as_index(j)), Const(rows, I64))
    outside = Op("ge", Coord(as_index(j)), Const(rows, I64))
    row = first + as_index(j) - rows

    def guarded(e: Expr) -> Expr | None:
        return Load(e.node, e.index, outside, Const(0, e.dtype)) if isinstance(e, Load) and j in e.axes() else None
    rewrite = Rewriter({a: row}, leaf=guarded)
    return tuple(Op("where", inside, Load(part, (as_index(j), *at), inside, Const(0, part.dtype)), rewrite(x)) for part, x in zip(parts, fold.args))


def _moved(e: Expr, rank: int, j: Axis) -> Expr:
    """`e` over the axes of `part`: j is its first, the others stand one further."""
    return Rewriter({**{a: as_index(Axis(a.id + 1, a.extent)) for a in e.free if a is not j and a.id < rank}, j: as_index(Axis(0, j.extent))})(e)


def _rows_as_one(fold: Reduce, along: frozenset, hints: Hints) -> int | None:
    """How many rows count as one: a power of two that divides them; None where columns are no narrow lines, or something of `along`."""
    a, = fold.over
    if hints.least(a.extent) < LONG or any(isinstance(e, Load) and e.node in along for e in walk(*fold.args)):
        return None
    width = None
    for e in walk(*fold.args):
        if isinstance(e, Load) and a in e.axes():
            found = _line(e, a)
            if found is None or width is not None and found[0] is not width[0]:
                return None
            width = found
    if width is None or hints(width[0].extent) * width[1] >= LINE:
        return None
    if fold.monoid != "moments" and hints(a.extent) * hints(width[0].extent) * width[1] < LEAST:
        return None
    columns, rows = hints(width[0].extent), 1
    while rows * 2 * columns <= WIDE and hints.divides(rows * 2, a.extent):
        rows *= 2
    whole = COLUMNS // math.gcd(columns, COLUMNS)
    if rows < whole and whole * columns <= WHOLE and hints.divides(whole, a.extent):
        rows = whole
    return rows if rows * columns * width[1] >= LINE else None


def _rows_of_words(fold: Reduce, hints: Hints, readers: dict, target) -> int | None:
    """How many rows of a matrix that nothing else reads count as one, so that all begin at whole words and there are programs for the machine; None
    where they begin so anyway, or where the partial results would be too many."""
    a, = fold.over
    found = {(e.node, _line(e, a)) for e in walk(*fold.args) if isinstance(e, Load) and a in e.axes()}
    lines = {line for _, line in found}
    if len(lines) != 1 or None in lines or any(readers.get(node) != 1 for node, _ in found):
        return None
    (axis, size), = lines
    columns, count = hints.exactly(axis.extent), hints(a.extent)
    made = any(isinstance(node, Compute) and is_pointwise(node) for node, _ in found)
    if made and columns is not None and walks_down(axis.extent, count, hints, target):
        return None         # one kernel makes them and sums them
    aligned = columns is not None and columns * size % WORD == 0
    least = LEAST if aligned or count < ALIGNED else LEAST_WORDS
    if columns is None or count * columns * size < least or aligned and (size > 2 or count < ALIGNED or columns < FILL * COLUMNS * target.threads):
        return None
    if size >= AS_THEY_ARE and columns >= FILL * COLUMNS * target.threads and count * columns * size <= target.l2:
        return None
    word = WORD // size
    rows, most = word // math.gcd(columns, word), PARTS * size * count / (8 * len(fold.args))
    if rows > most or not (hints.divides(rows, a.extent) or hints.exactly(a.extent) is not None and _simple(fold)):
        return None
    most = max(most, GROWN / PARTS * most if size < AS_THEY_ARE and not aligned else 0)
    wanted, even = TILES * COLUMNS * target.threads, hints.divides(rows, a.extent)
    while 2 * rows <= min(most, MOST) and 2 * rows * columns <= wanted and hints.divides(2 * rows, a.extent) == even:
        rows *= 2
    return rows if rows > 1 else None


def _simple(fold: Reduce) -> bool:
    """Can what is folded be read under a guard: has nothing in it a guard, an index that is read, or errors of its own?"""
    found = list(walk(*fold.args))
    loads = [e for e in found if isinstance(e, Load)]
    return all(e.guard is None for e in loads) and not any(isinstance(x, Fetch) for e in loads for i in e.index for x in i.atoms()) \
        and not any(isinstance(e, Op) and can_fail(e.name, e.dtype) for e in found)


def _line(e: Load, a: Axis) -> tuple[Axis, int] | None:
    """(axis, bytes of an element) where `e` reads lines along an axis and the rows along `a` follow each other without gaps."""
    offset = e.offset()
    for x in offset.axes():
        if x is not a and offset.coefficient(x) == 1 and offset.coefficient(a) is as_index(x.extent):
            return x, e.dtype.bytes
    return None
