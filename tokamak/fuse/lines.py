"""Folds of short pieces of many lines: the groups of channels of images in channels-last. What folds each with a program of its own reads a piece of
every line; so where much is read, columns are folded first, whole lines at once, and then what a group's columns have given.

Where programs of a cluster hold groups side by side, whole lines of them, and need them again, they stay one fold (`held`).

    out[n, g] = sum[p, c](f(n, p, g, c))    becomes    part[n, g, c] = sum[p](f(n, p, g, c)),  out[n, g] = sum[c](part[n, g, c])

Likewise folds of one memory along different axes that have runs in common, a group's sums beside the channels' in channels-first: one kernel folds
the runs for all of them (`runs_in_common`).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterable

from ..ir.expr import Cast, Expr, Load, Reduce, Rewriter, loads
from ..ir.graph import Compute, Graph, Input, fold, reads, readers_of
from ..ir.index import Axis, Index, as_index, axis
from ..ir.ops import CARRIERS
from ..ir.rewrite import GraphRewrite
from .cost import Hints, estimates, is_heavy, pinned_nodes
from .factors import factored, product

LINE = 128              # bytes of memory that are fetched together: of longer pieces nothing is gained
HELD = 32768            # elements of a group that one program holds
SHARE = 40 << 10        # bytes of groups side by side that each of the programs of a cluster holds: EvoNorm of 32 x 256 x 56 x 56 in bf16 46.6 us,
                        # 50.0 with twice as many and twice the warps, 53.6 by columns; GroupNorm of 16 x 512 x 64 x 64 from NHWC in f16 49.9, 55.6,
                        # 66.7. Of 24 x 256 x 57 x 41, which have whole lines so, 24.3, 27 with 32 KB and half lines
SHARE_OF_TWO = 72 << 10         # the same of two values, by twice the warps: GroupNorm backward, us with 64 KB and so, of f32 43 x 512 x 48 x 47
                        # 331, 268, of bf16 16 x 512 x 66 x 66 122, 91, 12 x 1024 x 64 x 65 146, 123
MOST_SHARE = 64 << 10   # the same of one where that is not enough, by twice the warps, of a SECTOR of each line at least: GroupNorm from NHWC of
                        # 16 x 256 x 112 x 112 bf16 80 us, 90 by columns, of 2 x 512 x 100 x 101 25, 28, f32 of 64 x 96 x 64 x 64 73, 142;
                        # of 4 x 512 x 128 x 128 62, 60
MOST_BESIDE = 2         # values that the programs of a cluster hold side by side: GroupNorm backward, input and gradient in NHWC, of
                        # 32 x 256 x 56 x 56 in bf16 70 us, 82 in four kernels, in f32 117 and 143; with the gradient in NCHW 72 and 90 in bf16
ALONE = 64 << 10        # bytes of a group that one program holds instead, where little is computed and its pieces are whole sectors: GroupNorm of
                        # 64 x 512 x 31 x 31 from NHWC in bf16 49.8 us, 63 by clusters
TINY = 8 << 10          # the same of shorter pieces, whose sectors two programs read: of 256 x 256 x 14 x 14 25 us, 31 by clusters, but of
                        # 128 x 256 x 28 x 28 53, 41, of 32 x 256 x 56 x 56 42.7, 37.7. Pieces that are no whole words lie side by side in any case:
                        # f32 of 200 x 288 x 14 x 14 38.6 us, 149, of 24 x 320 x 33 x 33 33.6, 55.9, of 64 x 320 x 17 x 17 23.0, 32.7
HALF = 64               # of a line at least
SECTOR = 32             # bytes that are read together
WRITTEN_ABREAST = 16384 # elements at most of groups that a program holds, as many as make whole sectors of what is written across them (tokens)
ACROSS = 8              # elements at least of rows, and of what lies across them
PIECES = 2              # powers of two at most that make up the channels of such a group; one where they are no whole words of 16 bits: with two
                        # Triton makes a kernel of 58000 instructions of ten channels
WORD = 16               # bytes of the widest access of a thread
RUN = 256               # elements at least of runs that folds along more axes have in common
PLANE = 64 << 10        # bytes of a plane that each program of a cluster holds as its own: SiLU behind a GroupNorm, backward, of 64 x 64 x 128 x 128
                        # in bf16, two planes a group, 170 us, 246 in two kernels
LEAST_RUN = 2048        # elements of it at least: GroupNorm backward of 64 x 256 x 32 x 32 in f16 50 us, 44 by programs that hold a group
SHARERS = 2, 4, 8       # planes of a group that the programs of a cluster hold
MONOIDS = ("sum", "max", "min", *CARRIERS)
LEAST = 16 << 20        # bytes that are folded, from which on two kernels more cost less,
LEAST_BROKEN = 7 << 20  # of 16-bit numbers whose pieces are shorter than a SECTOR and no whole words: of 16 x 96 x 56 x 56 f16 GroupNorm from NHWC
                        # 18.8 us, 32.1 as they are, EvoNorm 16.9, 52.7, of 8 x 320 x 40 x 40 bf16 14.3, 24.9, of 104 x 192 x 20 x 20 23.5, 31.0,
                        # backward of 106 x 96 x 28 x 28 48.6, 198, of 56 x 352 x 20 x 20 53.7, 58.5, of 77 x 320 x 14 x 14 f16 33.0, 31.9, GroupNorm
                        # backward of 78 x 160 x 20 x 20 30.2, 38.7; but GroupNorm of 4 x 192 x 64 x 64 f16 15.7, 13.1, of 19 x 640 x 20 x 20, whose
                        # pieces are 40 bytes, 13.6, 10.6 (H200)
LEAST_HELD = 2 << 20    # the same that the programs of a cluster hold, of channels that are one power of two, or 32-bit numbers in less than a SECTOR
                        # (GroupNorm of 8 x 96 x 56 x 56 f32 10.3 us, 18.2 by programs that hold a group, of 4 x 320 x 33 x 33 9.2, 8.0; EvoNorm of
                        # 6 x 160 x 48 x 48 15.8, 17.9): GroupNorm from NHWC of
                        # 8 x 256 x 56 x 56 bf16 11.8 us, 18.3 in three kernels, backward 23.3, 28.9 in six, of 2 x 256 x 56 x 56 8.9, 14.3; EvoNorm
                        # 12.1, 18.7; but of 4 x 256 x 28 x 28 7.4, 6.3
LEAST_COMMON = 2 << 20  # the same of runs in common: EvoNorm backward in NCHW of 4 x 640 x 56 x 56 bf16 31.2 us, 112.8 as two folds, of
                        # 2 x 320 x 56 x 56 12.3, 29.8, in f32 17.8, 53.5


def piece(read, over, hints: Hints, least: int | None = None) -> Axis | None:
    """Of the axes `over`, along which the loads `read` are folded, the contiguous one where it is a short piece of their lines, and the rest lies in
    other lines; `least`: bytes of what is read at least, LEAST or LEAST_BROKEN unless told."""
    found = {}
    for e in read:
        at = e.offset()
        inside = [a for a in over if a in at.axes()]
        short = [a for a in inside if at.coefficient(a) == 1]
        if len(inside) < 2 or not short:
            continue
        c = short[0]
        beside = [g for g in at.axes() if g not in over and hints(g.extent) > 1 and at.coefficient(g) is as_index(c.extent)]
        if not beside or hints.exactly(c.extent) is None or hints(c.extent) * e.dtype.bytes >= LINE:
            return None
        far = hints(c.extent) * hints(beside[0].extent)
        if any(hints(at.coefficient(a)) < far for a in inside if a is not c):
            return None
        enough = least if least is not None else LEAST_BROKEN if _broken(e, c, hints) and hints(c.extent) * e.dtype.bytes < SECTOR else LEAST
        found[c] = found.get(c, False) or hints.count(at.axes()) * e.dtype.bytes >= enough
    return next(iter(found)) if len(found) == 1 and any(found.values()) else None


def strides(at: Index, a: Axis) -> bool:
    """Are neighbours along `a` no neighbours at `at`?"""
    return bool(at.coefficient(a).terms) and at.coefficient(a) != 1


def across(addresses: Iterable[Index], row: Axis, parallel: frozenset[Axis], hints: Hints) -> frozenset[Axis]:
    """The axes in `parallel` along which one of `addresses` runs contiguously that strides along `row`, while another one runs along `row` and
    strides along them."""
    found = {at for at in addresses if row in at.axes()}
    return frozenset(a for at in found for a in at.axes() & parallel
                     if min(hints(a.extent), hints(row.extent)) >= ACROSS and at.coefficient(a) == 1 and strides(at, row)
                     and any(x.coefficient(row) == 1 and strides(x, a) for x in found))


def whole_sectors(run: int, groups: int) -> int:
    """How many of so many groups beside each other, to the power of two, make up a sector where each has `run` bytes of it."""
    return 1 << max(min(groups, -(-SECTOR // max(run, 1))) - 1, 0).bit_length()


def _broken(e: Load, c: Axis, hints: Hints) -> bool:
    """Are pieces along `c`, of what `e` reads, 16-bit numbers that make no whole words?"""
    return e.dtype.is_half and hints(c.extent) * e.dtype.bytes % WORD != 0


def abreast(read, over, hints: Hints, target, most: int = 1) -> tuple[Axis, Axis, int, int] | None:
    """(the contiguous axis of the pieces, the axis of groups, how many side by side make whole lines, how many programs of a cluster share them)
    where one of the loads `read` is of short pieces of lines, at most so many are along all axes `over`, and programs hold all that is folded of
    them; else None. With the incoming gradient beside it EvoNorm backward in bf16 takes 159 us, 134 by columns."""
    much = own_piece(read, over, hints)
    c = much if much is not None else own_piece(read, over, hints, LEAST_HELD)
    if c is None:
        return None
    whole = _along_all(read, over)
    e = next((e for e in whole if e.offset().coefficient(c) == 1), None)
    if e is None or len(whole) > most or target.ordered or target.arch[:1] != ("cuda",) or any(hints.exactly(a.extent) is None for a in over):
        return None
    if _of_two(whole, c, hints):
        return None
    at, size = e.offset(), hints(c.extent) * e.dtype.bytes
    first, *rest = sorted((a for a in over if a is not c), key=lambda a: hints(at.coefficient(a)))
    one = _broken(e, c, hints) or much is None and size >= SECTOR
    if hints(c.extent).bit_count() > (1 if one else PIECES):
        return None
    if any(at.coefficient(b) is not at.coefficient(a) * a.extent for a, b in zip((first, *rest), rest)):
        return None
    g, count = next(g for g in at.axes() if g not in over and at.coefficient(g) is as_index(c.extent)), 1
    while count * size < LINE and hints.divides(2 * count, g.extent):
        count *= 2
    group = hints.count(over) * sum(e.dtype.bytes for e in whole)
    for share, least in ((SHARE, HALF), (MOST_SHARE, SECTOR)) if len(whole) == 1 else ((SHARE_OF_TWO, HALF),):
        n = count
        while n * size >= least:
            sharers = 1 << (-(-n * group // share) - 1).bit_length()
            if sharers <= target.cluster:
                return c, g, n, sharers
            n //= 2
    return None


def _of_two(whole, c: Axis, hints: Hints) -> bool:
    """Are `whole` two values of 32 bits of channels that are no one power of two?"""
    return len(whole) > 1 and hints(c.extent).bit_count() > 1 and all(e.dtype.bytes >= 4 for e in whole)


def in_columns(read, over, hints: Hints) -> bool:
    """Are the loads `read` of pieces of two values that are better folded by columns however few a program could hold? GroupNorm backward from NHWC
    of f32 of 24 x 320 x 33 x 33 59.8 us, 98.8 by clusters, of 32 x 384 x 35 x 33 95.3, 145.4, of 128 x 160 x 35 x 37 197, 261; but bf16 of
    16 x 768 x 35 x 37 98.4, 85.9."""
    c = own_piece(read, over, hints)
    return c is not None and _of_two(_along_all(read, over), c, hints)


def _along_all(read, over) -> list[Load]:
    """Those of the loads `read` that are along all axes `over`, each once."""
    return _along(read, over, len(over))


def _along(read, over, least: int) -> list[Load]:
    """Those of the loads `read` that are along so many of the axes `over` at least, each once."""
    axes = frozenset(over)
    return list({(e.node, e.index): e for e in read if len(axes & e.offset().axes()) >= least}.values())


def own_piece(read, over, hints: Hints, least: int | None = None) -> Axis | None:
    """`piece` of those of `read` that do not read whole lines along other axes."""
    if len(over) < 2:
        return None
    return piece([e for e in _along(read, over, 2) if not _in_runs(e, over, hints)], over, hints, least)


def _in_runs(e: Load, over, hints: Hints) -> bool:
    """Does a load read whole lines along axes of `over`, one behind the other?"""
    return hints.count(one_run(e.offset(), over, hints)) * e.dtype.bytes >= LINE


def one_run(at: Index, over, hints: Hints) -> frozenset[Axis]:
    """Those of the axes `over` along which `at` goes through one run of memory."""
    found: frozenset[Axis] = frozenset()
    while (a := next((a for a in over if hints(a.extent) > 1 and at.coefficient(a) == hints.count(found)), None)) is not None:
        found |= {a}
    return found


def apart(rows: frozenset, folds, read, hints: Hints, target) -> Axis | None:
    """The one of the axes `rows` of which each program of a cluster may have one coordinate, a run of memory in its registers: all that is folded
    along the other axes is its own then, and of all else programs tell each other single numbers. None where nothing is folded so. `folds`: (the
    axes of a fold, which of `rows` it leaves); `read`: (offset, bytes of an element) of what is read of the rows."""
    if target.ordered or target.arch[:1] != ("cuda",) or any(hints.exactly(a.extent) is None for a in rows):
        return None
    for a in (a for a in rows if hints.count((a,)) in SHARERS and hints.count((a,)) <= target.cluster):
        runs = rows - {a}
        if not any(over & rows == runs and a in left for over, left in folds) or \
                any(over & rows and not (a in over and not left or over & rows == runs and left <= {a}) for over, left in folds):
            continue
        found = [(at, size) for at, size in read if runs & at.axes()]
        size = hints.count(runs)
        if size >= LEAST_RUN and size * sum(size for _, size in found) <= PLANE \
                and all(any(at.coefficient(x) == 1 for x in runs) for at, _ in found if runs <= at.axes()):
            return a
    return None


def alone(read, over, heavy: bool, hints: Hints) -> bool:
    """Is what a program by itself holds of a group so little, and so little computed of it, that it is faster so?"""
    whole = [e for e in read if set(over) <= e.offset().axes()]
    pieces = [hints(a.extent) * e.dtype.bytes for e in whole for a in over if e.offset().coefficient(a) == 1]
    if any(size % WORD for size in pieces):
        return False
    most = ALONE if min(pieces, default=0) >= SECTOR else TINY
    return not heavy and hints.count(over) * sum(e.dtype.bytes for e in whole) <= most


def held(n: Compute, part: Reduce, readers: dict, hints: Hints, target) -> bool:
    """Do the programs of clusters hold what `n` folds, side by side, as all folds of groups of the same memory, and is it needed again behind it?"""
    read = loads(*part.args)
    if part.monoid not in MONOIDS or abreast(read, part.over, hints, target) is None:
        return False
    beside = _beside([e.node for e in read], readers, hints)
    if alone(read, part.over, _heavy(beside), hints):
        return False
    folds = [f for x in beside for r in readers.get(x, ()) if isinstance(r, Compute) and isinstance(f := fold(r), Reduce)]
    if any(piece(x, f.over, hints) is not None and abreast(x, f.over, hints, target) is None for f in folds for x in (loads(*f.args),)):
        return False
    behind, stack = {n}, [n]
    while stack:
        found = [x for x in readers.get(stack.pop(), ()) if x not in behind]
        if any(x in beside or isinstance(x, Compute) and fold(x) is not None and beside & set(reads(x)) for x in found):
            return True
        behind.update(found)
        stack += found
    return False


def pays(n: Compute, part: Reduce, readers: dict, hints: Hints, target) -> bool:
    """Are columns of `n`, the fold `part`, better folded first? Where no program holds what is folded, or much is computed of it beside: EvoNorm of
    32 x 256 x 56 x 56 bf16 46%, 28 by programs that hold a group, in f32 backward 29, 22; where little is, GroupNorm 44, 53 by programs that hold a
    group."""
    read = loads(*part.args)
    if part.monoid not in MONOIDS or own_piece(read, part.over, hints) is None or held(n, part, readers, hints, target):
        return False
    return by_columns(read, part.over, hints) or _heavy(_beside([e.node for e in read], readers, hints))


def by_columns(read, over, hints: Hints) -> bool:
    """Are the loads `read` of pieces of lines better folded by columns than by programs that hold a group each? What is no whole words such a
    program reads element by element."""
    c = own_piece(read, over, hints)
    if c is None:
        return False
    return hints.count(over) > HELD or any(hints(c.extent) * e.dtype.bytes % WORD for e in read if e.offset().coefficient(c) == 1) \
        or in_columns(read, over, hints)


def _heavy(values) -> bool:
    """Is there a heavy operation among the pointwise ones that make `values`?"""
    return any(isinstance(x, Compute) and is_heavy(x.expr) for x in values)


def _beside(sources, readers: dict, hints: Hints) -> set:
    """The large values among `sources`, and those that pointwise operations make them of, or make of them."""
    large = lambda n: hints.extents(n.shape) * n.dtype.bytes >= LEAST
    stack = [n for n in sources if large(n)]
    seen = set(stack)
    while stack:
        n = stack.pop()
        around = (*readers.get(n, ()), *(reads(n) if isinstance(n, Compute) else ()))
        found = [x for x in around if x not in seen and isinstance(x, (Compute, Input)) and large(x)
                 and not (isinstance(x, Compute) and fold(x) is not None)]
        seen.update(found)
        stack += found
    return seen


def whole_lines(graph: Graph, target) -> Graph:
    """`graph` with every fold of pieces of lines as one of columns first, on a GPU; and what else folds the same columns, along more axes,
    likewise. And with runs that several folds have in common folded first."""
    if target.kind != "gpu" or target.ordered:
        return graph
    hints = estimates(graph, target)
    runs = runs_in_common(graph, hints, target)
    graph = _changed(graph, lambda n, old, parts: _runs_first(n, runs[old], hints, parts), set(runs)) if runs else graph
    readers = readers_of(graph)
    whole = {n for n in graph.nodes if isinstance(n, Compute) and isinstance(part := fold(n), Reduce) and part.monoid in MONOIDS
             and pays(n, part, readers, hints, target)}
    if not whole:
        return graph
    stored = lambda graph: pinned_nodes(graph) if target.fast else None
    pinned = stored(graph)
    found = _changed(graph, lambda n, _, parts: columns_first(n, hints, parts, pinned), whole)
    done = {x for n in found.nodes if isinstance(n, Compute) for x in of_columns(n, hints)}
    pinned = stored(found)
    return _changed(found, lambda n, _, parts: rows_first(n, done, hints, parts, pinned), set(found.nodes))


def runs_in_common(graph: Graph, hints: Hints, target) -> dict:
    """Node -> steps of the axes to fold first, of nodes that fold much of memory of one layout along different axes, where the contiguous ones are
    common to all and no program holds what the others fold beside them. What the programs of a cluster hold is folded as it is."""
    along: dict = {}            # layout -> {node: steps}
    readers = readers_of(graph)
    for n in graph.nodes:
        part = fold(n) if isinstance(n, Compute) else None
        for e in _large(part, hints, LEAST_COMMON) if isinstance(part, Reduce) and part.monoid == "sum" else ():
            along.setdefault((e.node.shape, e.node.strides), {})[n] = frozenset(e.offset().coefficient(a) for a in part.over)
    found: dict = {}
    for folds in along.values():
        common = frozenset.intersection(*folds.values())
        if not any(step == 1 for step in common) or any(steps == common for steps in folds.values()):
            continue
        if _long(folds, common, hints) and any(2 * hints.count(fold(n).over) > HELD for n in folds):
            size = sum(x.dtype.bytes for x in _sources(folds, hints))
            found.update((n, common) for n in folds if not _in_cluster(n, common, size, readers, hints, target))
    return found


def _in_cluster(n: Compute, common: frozenset, size: int, readers: dict, hints: Hints, target) -> bool:
    """Do the programs of a cluster hold what `n` folds, `size` bytes for each of its elements, each what lies along the `common` steps, and is it
    needed again behind the fold?"""
    part = fold(n)
    at = _large(part, hints, LEAST_COMMON)[0].offset()
    runs = frozenset(a for a in part.over if at.coefficient(a) in common)
    rest = frozenset(part.over) - runs
    if len(rest) != 1 or apart(frozenset(part.over), [(runs, rest)], [(at, size)], hints, target) is None:
        return False
    behind, stack = {n}, [n]
    while stack:
        found = [x for x in readers.get(stack.pop(), ()) if x not in behind and isinstance(x, Compute)]
        if any(fold(x) is None and hints.extents(x.shape) >= hints.count(at.axes()) for x in found):
            return True
        behind.update(found)
        stack += found
    return False


def _sources(folds, hints: Hints) -> set:
    """The large values that `folds` read, those they are made of by pointwise operations where they are so made."""
    found, stack = set(), [e.node for n in folds for e in _large(fold(n), hints, LEAST_COMMON)]
    while stack:
        x = stack.pop()
        if isinstance(x, Compute) and fold(x) is None:
            stack += [y for y in reads(x) if hints.extents(y.shape) >= hints.extents(x.shape)]
        else:
            found.add(x)
    return found


def _long(folds, common: frozenset, hints: Hints) -> bool:
    """Are the runs of `folds` along the `common` steps long?"""
    parts = [(part := fold(n), _large(part, hints, LEAST_COMMON)[0].offset()) for n in folds]
    return all(hints.count(a for a in part.over if at.coefficient(a) in common) >= RUN for part, at in parts)


def _runs_first(n: Compute, steps: frozenset, hints: Hints, parts: dict) -> Compute:
    """`n` as a fold of what it gives along the axes of these steps; what is left of it stands where it stands in memory."""
    part = fold(n)
    at = _large(part, hints, LEAST_COMMON)[0].offset()
    first = tuple(a for a in part.over if at.coefficient(a) in steps)
    outer = max(hints(at.coefficient(a)) for a in part.over if a not in first) > max((hints(at.coefficient(a)) for a in part.free), default=0)
    return in_two(n, part, first, parts, leading=outer)


def _changed(graph: Graph, change: Callable[[Compute, Compute, dict], Compute | None], which: set) -> Graph:
    """`graph` with what `change` makes of its nodes `which`, given each as it reads what was changed, as it was, and what was made for other
    components of the same folds; parts have the origins of the whole."""
    rewrite = _Changes(graph, change, which)
    out = rewrite.result()
    return replace(out, origins={**{part: out.origins[n] for part, n in rewrite.wholes.items() if n in out.origins}, **out.origins})


class _Changes(GraphRewrite):
    """Some nodes of a graph changed, once what they read is."""

    def __init__(self, graph: Graph, change: Callable[[Compute, Compute, dict], Compute | None], which: set):
        super().__init__(graph, "eager")
        self.make, self.which, self.parts, self.wholes = change, which, {}, {}

    def compute(self, node: Compute) -> Compute:
        new = super().compute(node)
        made = self.make(new, node, self.parts) if node in self.which else None
        if made is None:
            return new
        self.wholes.update((part, made) for part in reads(made) if isinstance(part, Compute) and fold(part) is not None)
        return made


def columns_first(n: Compute, hints: Hints, parts: dict, pinned: frozenset | None = None) -> Compute | None:
    """`n`, a fold of pieces of lines, as a fold of what its columns give; None where it is none. `parts`: what was made for other components of
    it."""
    part = fold(n)
    c = own_piece(loads(*part.args), part.over, hints)
    return in_two(n, part, tuple(a for a in part.over if a is not c), parts, pinned=pinned) if c is not None else None


def rows_first(n: Compute, done: set, hints: Hints, parts: dict, pinned: frozenset | None = None) -> Compute | None:
    """`n`, a fold along more axes than other folds of columns, `done`, of memory laid out as what it reads, as a fold along theirs first: one kernel
    reads it for all; None where it is none."""
    part = fold(n)
    if not isinstance(part, Reduce) or part.monoid != "sum":
        return None
    for e in _large(part, hints):
        at = e.offset()
        for layout, steps in done:
            first = tuple(a for a in part.over if at.coefficient(a) in steps)
            if layout == (e.node.shape, e.node.strides) and len(first) == len(steps) < len(part.over):
                return in_two(n, part, first, parts, leading=True, pinned=pinned)
    return None


def of_columns(n: Compute, hints: Hints) -> set:
    """(shape and strides, steps) of what `n` reads much of and folds along axes of these steps, where it folds columns."""
    part = fold(n)
    if not isinstance(part, Reduce):
        return set()
    found = {((e.node.shape, e.node.strides), frozenset(e.offset().coefficient(a) for a in part.over)) for e in _large(part, hints)}
    return {(layout, steps) for layout, steps in found if not any(step == 1 for step in steps)}


def _large(part: Reduce, hints: Hints, least: int | None = None) -> list[Load]:
    """The loads of `part` of which each reads much, along all axes that are folded."""
    read = [(e, e.offset().axes()) for e in loads(*part.args)]
    return [e for e, axes in read if set(part.over) <= axes and hints.count(axes) * e.dtype.bytes >= (LEAST if least is None else least)]


def in_two(n: Compute, part: Reduce, first: tuple[Axis, ...], parts: dict, leading: bool = False, pinned: frozenset | None = None) -> Compute:
    """`n`, the fold `part`, as a fold along its other axes of what folds along `first` give, in whose memory those stand behind the others, or
    `leading`. `pinned`: values that are stored, where factors may be taken out of sums along `first`."""
    rank, rest = len(n.shape), tuple(a for a in part.over if a not in first)
    factors: list = []
    if pinned is not None and part.monoid == "sum" and part.args[0].dtype.is_float:
        left, factors = factored(part.args[0], frozenset(first), pinned)
        part = Reduce("sum", part.over, (left,))
    key = part.monoid, part.over, part.args, first, n.shape, n.device
    if key not in parts:
        many, at = len(rest), 0 if leading else rank
        names = {a: as_index(Axis(rank + many + k, a.extent)) for k, a in enumerate(first)}
        names |= {a: as_index(Axis(at + k, a.extent)) for k, a in enumerate(rest)}
        if leading:
            names |= {a: as_index(Axis(a.id + many, a.extent)) for a in part.free if a.id < rank}
        args, over = tuple(map(Rewriter(names), part.args)), tuple(Axis(rank + many + k, a.extent) for k, a in enumerate(first))
        extents = tuple(as_index(a.extent) for a in rest)
        shape = (*extents, *n.shape) if leading else (*n.shape, *extents)
        parts[key] = [Compute(shape, None, Reduce(part.monoid, over, args, k), n.device) for k in range(len(args))]
    every = tuple(Axis(rank + k, a.extent) for k, a in enumerate(rest))
    own, others = tuple(axis(d, s) for d, s in enumerate(n.shape)), tuple(map(as_index, every))
    names = {a: as_index(b) for a, b in zip(rest, every)}
    factors = [(Rewriter(names)(x), divides) for x, divides in factors]
    made = tuple(product(Load(x, (*others, *own) if leading else (*own, *others)), factors) for x in parts[key])
    out: Expr = Reduce(part.monoid, every, made, part.component)
    return Compute(n.shape, n.strides, _cast(n.expr, out), n.device, n.tag)


def _cast(e: Expr, value: Expr) -> Expr:
    """`e`, a fold under casts, with `value` in the fold's place."""
    return Cast(e.dtype, _cast(e.arg, value), e.implicit) if isinstance(e, Cast) else value
