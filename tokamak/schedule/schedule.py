"""A Schedule: how one Body runs. A small frozen value that prints and parses.

    parallel    axes whose iterations are shared out among threads, outermost first (without the vector axis)
    vector      the axis that runs along vector lanes, or None
    also        further axes that do, each in loops where no other does
    block       elements of the vector axis in one parallel iteration; None: the vector axis lies inside an iteration
    unrolled    folded axes of small constant extent: their extents are part of the text
    lanes       vector lanes of every register
    columns     where the partial results of a long fold lie that leaves the vector axis free: a whole block's in a 'buffer' while the input is read
                in its own order, or one register's at a time in 'registers'; a vector axis that is the first of `order` then runs around other loops
    divide      what a loop does not change is divided by through its 'reciprocal', or all quotients are 'exact': rounded once
    stream      bytes from which a result goes around the caches
    reused      parallel axes, the last ones, along which what strides along the vector axis is the same: it is packed once for all of them (inside of
                a block, where there are blocks), or slow arithmetic that is the same for all of them is done once
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..fuse.cost import GRAIN, Hints
from ..ir.dtype import F64
from ..ir.expr import Expr, Load, Op, Reduce, Scan, walk
from ..ir.index import Axis, Fetch, Index, Size
from ..ir.ops import OPS
from .body import Body, Store, exprs_of
from .pieces import cuts, values


@dataclass(frozen=True)
class Schedule:
    parallel: tuple[Axis, ...]
    vector: Axis | None
    block: int | None
    order: tuple[Axis, ...]           # every axis, outermost first
    unrolled: frozenset[Axis]
    lanes: int
    grain: int = GRAIN                # elements below which one thread runs all
    columns: str = "buffer"
    divide: str = "reciprocal"
    stream: int = 16 << 20            # bytes from which a result goes around the caches
    also: tuple[Axis, ...] = ()
    reused: tuple[Axis, ...] = ()     # parallel axes along which packed blocks are used again

    def __str__(self) -> str:
        name = lambda a: f"i{self.order.index(a)}"
        vector = "none" if self.vector is None else ", ".join(map(name, (self.vector, *self.also))) + (f"/{self.block}" if self.block else "")
        return (f"parallel({', '.join(map(name, self.parallel))}) vector({vector}) unrolled({', '.join(sorted(map(name, self.unrolled)))}) "
                f"lanes({self.lanes}) grain({self.grain}) columns({self.columns}) divide({self.divide}) stream({self.stream})"
                + (f" reused({', '.join(map(name, self.reused))})" if self.reused else ""))


def parse(text: str, order: tuple[Axis, ...]) -> Schedule:
    """The Schedule that prints as `text`, on axes `order`."""
    fields = dict(part.rstrip(")").split("(") for part in text.replace(") ", ")|").split("|"))
    axes = lambda s: tuple(order[int(x.strip()[1:])] for x in s.split(",") if x.strip())
    vector, block = fields["vector"], None
    if "/" in vector:
        vector, size = vector.split("/")
        block = int(size)
    along = () if vector == "none" else axes(vector)
    return Schedule(axes(fields["parallel"]), along[0] if along else None, block, tuple(order), frozenset(axes(fields["unrolled"])),
                    int(fields["lanes"]), int(fields["grain"]), fields["columns"], fields["divide"], int(fields["stream"]), along[1:],
                    axes(fields.get("reused", "")))


def choose(b: Body, hints: Hints, target) -> Schedule:
    """The schedule for `b` on the CPU."""
    order = loop_order(b, hints)
    vector = vector_axis(b, hints, target)
    if vector is not None:
        order = tuple(a for a in order if a is not vector) + (vector,)
    folded = _folded(b)
    unrolled = frozenset(a for a in folded if a is not vector and a not in b.parallel
                         and a.extent.constant is not None and a.extent.constant <= UNROLL)
    block = None
    if vector is not None and vector in b.parallel:
        block = block_size(vector, folded - b.parallel - unrolled, hints, target)
    parallel = tuple(a for a in order if a in b.parallel and a is not vector)
    across = across_axis(b, vector, parallel, hints) if block else None
    if across is not None:
        parallel, block = tuple(a for a in parallel if a is not across), TILE
    reused: tuple[Axis, ...] = ()
    if vector is not None and across is None and not target.ordered and b.base is None:
        reused, block = reused_axes(b, vector, parallel, block, hints, target)
        parallel = tuple(a for a in parallel if a not in reused) + reused
    plain = vector is None or across is not None or reused or target.ordered or any(s.monoid is not None for s in b.stores)
    short = frozenset() if plain else interleaved(b, vector, hints, target.vector_bytes // 4)
    parallel, unrolled = tuple(a for a in parallel if a not in short), unrolled | short
    wide = any(e.dtype is F64 for e in walk(*exprs_of(b)) if isinstance(e, (Op, Reduce)))
    lanes = target.vector_bytes // (8 if wide else 4)
    long = folded - b.parallel - unrolled - {vector}
    around = block is None and not reused and vector is not None and around_folds(b, vector, hints)
    kept = (block is not None or bool(reused) or around) and bool(long) and hints.count(long) * LINE <= target.l2 // 2
    columns, divide = "registers" if target.ordered or kept else "buffer", "exact" if target.ordered or target.exact else "reciprocal"
    also = () if block or vector is None or target.ordered else also_vectors(b, vector, lanes, hints)
    order = (*(a for a in order if a not in (vector, *also)), *also, vector) if also else order
    # what depends on columns' folds stands in the loop over their registers, except where rows lie pages apart: BatchNorm of 8 x 256 x 14 x 14 in
    # channels-last, forward and backward, 2.07 / 1.11 ms on one core
    within = block is not None and kept and any(long & s.axes for s in b.stores) and not any(_by_pages(b, a, hints) for a in long)
    order = (vector, *(a for a in order if a is not vector)) if (around and kept or within or short) and not also else order
    return Schedule(parallel, vector, block, order, unrolled - set(also), lanes, columns=columns, divide=divide, stream=STREAM, also=also,
                    reused=reused)


def in_buffers(s: Schedule) -> Schedule:
    """`s` with the partial results of long folds in a buffer, and the vector axis inside of other loops."""
    first = s.vector is not None and s.order[0] is s.vector
    return replace(s, columns="buffer", order=(*s.order[1:], s.vector) if first else s.order)


LINE = 64               # bytes of a column of registers in each row that it folds: up to half of the second-level cache a later loop over the same
                        # rows finds them there, and what depends on the folds alone is computed once a register, not once a row. In ms, buffer /
                        # registers, one core: variance of 256 x 1000 columns 0.14 / 0.04, of 1024 x 1023 0.68 / 0.46; a norm over the middle of 8 x
                        # 192 x 1000 3.4 / 1.7, of 2048 x 4096 22.7 / 12.1; one sum of 2048 x 4096 the same
STREAM = 16 << 20       # bytes of a result that no cache keeps until it is read: around them its lines are not read first. x * 2 + 1 and its sum
                        # through / around a last level of 32 MiB: 8 MiB 0.54 / 0.65 ms, 16 MiB 1.64 / 1.42, 64 MiB 8.1 / 6.6
LANE_SCANS = ("sum", "prod", "max", "min")      # what a register's lanes can be scanned with
UNROLL = 8              # a window's extent up to which its loop is written with a constant trip count
TILE = 1024             # elements of the vector axis that a piece of a transposed read sweeps over: stretches of whole pages
BLOCK = 4096            # elements of a pointwise block: long enough to hide loop overhead, short enough to share out evenly

BLOCKS = (1024, 256, 64)        # elements of a block of columns: few sizes, since each is a kernel of its own


def block_size(vector: Axis, long_folds, hints: Hints, target) -> int:
    """Elements of the vector axis per iteration. With a long fold inside, a block's partial results stay in the first-level cache
    and the block spans whole cache lines; otherwise one block is a plain stretch of a loop."""
    if long_folds:
        share = max(hints(vector.extent) // (2 * target.threads), 1)
        return next((n for n in BLOCKS if n <= share), BLOCKS[-1])
    return BLOCK


def also_vectors(b: Body, vector: Axis, lanes: int, hints: Hints) -> tuple[Axis, ...]:
    """Axes inside an iteration that are contiguous somewhere, long enough to fill a register, and never in one fold or store with each other or with
    `vector`: statistics of another tensor, in loops of their own. An image's in the place of another's (AdaIN), 256 planes of 4096: 3.0 ms without
    them, 1.4 with, one core."""
    exprs = exprs_of(b)
    if b.base is not None or any(s.monoid is not None for s in b.stores):
        return ()
    nests = [s.axes for s in b.stores] + [e.free | set(e.over) for e in walk(*exprs) if isinstance(e, Reduce)]
    scans = {e.along for e in walk(*exprs) if isinstance(e, Scan)}
    found: list[Axis] = [vector]
    for a in b.axes:
        inside = a not in found and a not in b.parallel and a not in scans and hints(a.extent) >= lanes
        if inside and not any(a in n and n.intersection(found) for n in nests) and any(i.coefficient(a) == 1 for _, i, _ in strides_of(b)):
            found.append(a)
    return tuple(found[1:])


NEAR = 8                # elements from lane to lane up to which lines that are read for one of several numbers side by side are there for the others
SHORT = 16              # the same where there are folds, and how long a folded row may be for the axis around it to run along lanes: nothing is
                        # folded across a register's lanes then. 20000 rows of 5, 10, 16 in ms on one core, along / across: softmax 0.69 / 0.13,
                        # 0.70 / 0.23, 0.61 / 0.34; LayerNorm 0.48 / 0.12, 0.48 / 0.21, 0.41 / 0.29; argmax 0.08 / 0.08, 1.9 / 0.17, 1.9 / 0.27


def interleaved(b: Body, vector: Axis, hints: Hints, lanes: int) -> frozenset[Axis]:
    """The axes of a few numbers side by side (coordinates, channels of a picture) past which the vector axis strides."""
    found, folded = set(), _folded(b)
    for _, address, _ in strides_of(b):
        if 1 < (address.coefficient(vector).constant or 0) <= (SHORT if folded else NEAR):
            found.update(a for a in b.axes if a is not vector and _few(a, lanes, folded) and address.coefficient(a) == 1)
    return frozenset(found)


def _folded(b: Body) -> frozenset[Axis]:
    return frozenset(a for e in walk(*exprs_of(b)) if isinstance(e, Reduce) for a in e.over)


def _few(a: Axis, lanes: int, folded: frozenset[Axis]) -> bool:
    """Would it leave most lanes idle, or take longer to fold across the lanes than to read?"""
    return a.extent.constant is not None and 1 < a.extent.constant <= (SHORT if a in folded else min(4, (lanes - 1) // 2))


def _beside(b: Body, few: Axis, hints: Hints, lanes: int) -> Axis | None:
    """The long axis in whose steps the numbers along `few` follow each other, if nothing strides further along it."""
    far = SHORT if _folded(b) else NEAR

    def near(a: Axis) -> bool:
        steps = [address.coefficient(a) for _, address, _ in strides_of(b)]
        return all(not s.terms or s.constant is not None and 0 < s.constant <= far for s in steps)
    found = [a for a in b.axes if hints(a.extent) >= lanes and few in interleaved(b, a, hints, lanes) and near(a)]
    return max(found, key=lambda a: hints(a.extent), default=None)


def around_folds(b: Body, vector: Axis, hints: Hints) -> bool:
    """May the vector axis, inside an iteration, run around all loops of it? It is short, and nothing is folded or done in order along it. Gradients
    of sums of exp(-distance), of 512 points to 512 with 64 coordinates, took 21 ms on one core with results of 64 in a buffer, so 4.4."""
    exprs = exprs_of(b)
    along = any(isinstance(e, Reduce) and vector in e.over or isinstance(e, Scan) for e in walk(*exprs))
    return hints(vector.extent) <= BLOCKS[0] and b.base is None and not along and all(s.monoid is None for s in b.stores)


REUSE = 8               # times that a packed block is used from which on packing it pays
PACKED = 24 << 10       # bytes of packed blocks that stay in the first-level cache beside what runs past them


def reused_axes(b: Body, vector: Axis, parallel, block: int | None, hints: Hints, target) -> tuple[tuple[Axis, ...], int | None]:
    """(the parallel axes along which what strides along the vector axis is the same, elements of a block of it): each pair of x and y, where rows of
    y are columns of the result, or are folded once more (without blocks then). Distances of 512 points to 512 with 64 coordinates took 17.7 ms on one
    core, packed 0.48; sums of exp(-distance) of 1024 to 1024 with 8 took 15.9, packed 0.54. Where nothing strides: those along which slow arithmetic
    is the same, a channel's roots and quotients for all pixels."""
    roots = [s.expr for s in b.stores]
    found = packable(roots, vector, ())
    if block is None and not found or any(s.monoid is not None for s in b.stores) or any(isinstance(e, Scan) for e in walk(*exprs_of(b))):
        return (), block
    if found:
        fixed = max((e.free & set(parallel) for e in found), key=len)
    else:
        fixed = min((e.free & set(parallel) for e in _slow(roots, vector)), key=len, default=set(parallel))
    reused = tuple(a for a in parallel if a not in fixed)
    if not reused or hints.count(reused) < REUSE or not found and reused != parallel[len(fixed):]:
        return (), block
    packed = [*packable(roots, vector, reused), *invariant(roots, vector, reused)]
    size = 4 * sum(hints.count(e.free - set(parallel) - {vector}) for e in packed)
    if block is None:
        return (reused, None) if size * hints(vector.extent) <= target.l2 // 2 else ((), None)
    fits = [n for n in (BLOCK, *BLOCKS) if n <= block and (n * size <= PACKED or n == BLOCKS[-1] and n * size <= target.l2 // 4)]
    return (reused, fits[0]) if fits else ((), block)


def packable(roots, vector: Axis, reused) -> list[Load]:
    """Loads that stride along the vector axis, by a number that is the same everywhere, and do not depend on the axes `reused`."""
    found = []
    for e in walk(*roots):
        if isinstance(e, Load) and e.guard is None and vector in e.index[0].axes() and not e.free & set(reused):
            index = e.index[0]
            linear = all(isinstance(a, Axis) or isinstance(a, Size) for a in index.atoms())
            if linear and index.coefficient(vector) != 1 and not index.coefficient(vector).axes():
                found.append(e)
    return found


SLOW = frozenset({"div", "sqrt", "rsqrt", "recip"})        # beside what is heavy


def _slow(roots, vector: Axis) -> list[Op]:
    """Slow operations on floats that differ along the vector axis and do not depend on folds."""
    return [e for e in walk(*roots) if isinstance(e, Op) and (e.name in SLOW or OPS[e.name].heavy) and e.dtype.is_float and vector in e.free
            and not any(isinstance(x, (Reduce, Scan)) for x in walk(e))]


def invariant(roots, vector: Axis, reused) -> list[Expr]:
    """The largest expressions with slow operations in them that differ along the vector axis and do not depend on the axes `reused`."""
    slow, found, stack, seen = set(_slow(roots, vector)), [], list(roots), set()
    while stack:
        e = stack.pop()
        if e in seen:
            continue
        seen.add(e)
        same = e.dtype.is_float and vector in e.free and not e.free & set(reused) and not isinstance(e, (Reduce, Load))
        if same and any(x in slow for x in walk(e)) and not any(isinstance(x, (Reduce, Scan)) for x in walk(e)):
            found.append(e)
        else:
            stack.extend(e.children())
    return found


def across_axis(b: Body, vector: Axis, parallel, hints: Hints) -> Axis | None:
    """The axis along which an access lies contiguously that strides along the vector axis (a transpose): it runs inside an iteration, over a
    narrow block of the vector axis, so that every cache line is used up while it is there."""
    best = None
    for _, address, _ in strides_of(b):
        step = address.coefficient(vector)
        if not step.terms or step == 1 or _magnitude(step, hints) < 16:
            continue
        for a in parallel:
            if address.coefficient(a) == 1 and hints(a.extent) >= 16 and (best is None or hints(a.extent) > hints(best.extent)):
                best = a
    return best


def strides_of(b: Body) -> list[tuple[Store | Load, Index, int]]:
    """(access, address, element bytes) of every load and store."""
    found = [(s, s.address, s.memory.dtype.bytes) for s in b.stores]
    for e in walk(*exprs_of(b)):
        if isinstance(e, Load):
            found.append((e, e.index[0], e.dtype.bytes))
    return found


def _magnitude(i: Index, hints: Hints) -> int:
    c = i.constant
    if c is not None:
        return abs(c)
    if any(isinstance(a, Axis) for a in i.atoms()):
        return 1
    return max(1, hints(i))


def loop_order(b: Body, hints: Hints) -> tuple[Axis, ...]:
    """Axes by the step they take through the largest accesses, longest step first."""
    weight: dict[Axis, float] = {a: 0.0 for a in b.axes}
    total = {a: 0 for a in b.axes}
    for _, address, size in strides_of(b):
        elements = hints.count(address.axes())
        for a in b.axes:
            c = address.coefficient(a)
            if c.terms:
                weight[a] += _magnitude(c, hints) * elements * size
                total[a] += elements * size
    return tuple(sorted(b.axes, key=lambda a: -(weight[a] / total[a] if total[a] else 0)))


def vector_axis(b: Body, hints: Hints, target) -> Axis | None:
    """The axis to run along lanes: the one along which most bytes are contiguous, if it is long enough to fill a register, of equals the one along
    which results are (what is read across them goes through tiles: 8 x 96 x 56 x 56 to channels last 4.5 -> 1.6 ms on one core); scans along the
    only long axis are vectorised too. On an ordered target a folded axis runs along lanes exactly where it is contiguous."""
    scans = {e.along for e in walk(*exprs_of(b)) if isinstance(e, Scan)}
    serial = {e.along for e in walk(*exprs_of(b)) if isinstance(e, Scan) and e.monoid not in LANE_SCANS}
    updates = [s for s in b.stores if s.monoid is not None]     # lanes may not meet in one element: only along axes of the result
    fetched = {a for s in updates for x in s.address.atoms() if not isinstance(x, Axis) for a in Index({(x,): 1}).axes()}
    score: dict[Axis, int] = {a: 0 for a in b.axes if a not in serial and (not updates or a in b.parallel and a not in fetched)}
    written, across = dict.fromkeys(score, 0), set()
    for access, address, size in strides_of(b):
        elements = hints.count(address.axes())
        for a in score:
            if address.coefficient(a) == 1:
                score[a] += elements * size
                written[a] += elements * size * isinstance(access, Store)
            elif isinstance(access, Load) and a in address.axes():
                across.add(a)
    every = _folded(b)
    folded = every if target.ordered else set()
    score = {a: n for a, n in score.items() if n or a not in folded}
    lanes = target.vector_bytes // 4
    crowded = all(not n and _by_pages(b, a, hints) for a, n in score.items())
    if updates and crowded and not target.ordered and (turns := _in_turn(b, updates, serial, hints)) is not None:
        return turns
    if not score:
        return None

    def rank(a: Axis):
        n = hints(a.extent)
        fills = min(n, lanes) / lanes
        return a in folded, (score[a] + 1) * fills * fills * (0.5 if a in scans else 1.0), written[a] if a in across else 0
    best = max(score, key=rank)
    if target.ordered or scans or updates:
        return best
    beside = _beside(b, best, hints, lanes) if _few(best, lanes, every) else None
    if not every:
        return beside or _past_pieces(b, best, hints, lanes) or _near_results(b, best, hints, lanes) or best
    # along some axes a nest of loops strides at each of its steps. Over channels that are side by side in the result alone, in ms on one core, along
    # channels / pixels: LayerNorm of 4 x 256 x 28 x 28 1.08 / 0.44, softmax of 4 x 64 x 64 x 64 6.6 / 1.3, norms of 16 x 128 x 200 0.31 / 0.18
    strides = {a: _strided(b, a, hints) for a in score}
    free = [a for a in score if score[a] and a not in every and hints(a.extent) >= lanes]
    better = [a for a in free if 2 * strides[a] <= strides[best]]
    if better and 2 * strides[best] >= max(hints.count(axes) for _, _, axes in accesses(b)):
        return max(better, key=rank)
    if best in every and not strides[best]:
        exprs = [s.expr for s in b.stores]
        inner = [e for e in walk(*exprs) if isinstance(e, Reduce) and best in e.over]
        outer = [a for a in score if a in every - b.parallel and hints(a.extent) >= lanes and all(a in e.free for e in inner)]
        packed = [a for a in (*(a for a in free if a in b.parallel), *outer) if packable(exprs, a, ())
                  and all(s.address.coefficient(a) == 1 for s in b.stores if a in s.axes) and _packs(b, a, hints, target)]
        if packed:
            return max(packed, key=rank)
    return beside or best


def _past_pieces(b: Body, best: Axis, hints: Hints, lanes: int) -> Axis | None:
    """The longest other axis where `best` is cut into pieces shorter than a register, of which each has values of its own (not a constant, as a pad
    has), or is such a piece itself and slow to compute. Sines and cosines of ten multiples of 65536 x 3 coordinates, side by side (NeRF), took 376 ms
    on one core (AVX2), so 8.6; images padded by a column, with lanes across images, 1.86 and 0.23."""
    short = 2 * hints(best.extent) < lanes and any(isinstance(e, Op) and OPS[e.name].heavy for e in walk(*exprs_of(b)))
    if not short and not _in_short_pieces(b, best, lanes):
        return None
    return max((a for a in b.parallel if a is not best and hints(a.extent) >= lanes), key=lambda a: hints(a.extent), default=None)


def _in_short_pieces(b: Body, a: Axis, lanes: int) -> bool:
    short = lambda pieces: pieces > 2 and a.extent.constant < lanes * pieces
    return any(short(len(cuts(s.expr, a)) - 1) and short(len(values(s, a))) for s in b.stores)


def _near_results(b: Body, best: Axis, hints: Hints, lanes: int) -> Axis | None:
    """The longest axis along which all results lie a few elements apart, where none lies contiguously along `best`. Sines and cosines of 4096 x 256
    angles in turn took 9.0 ms on one core with AVX2, 3.1 so."""
    steps = {a: [s.address.coefficient(a).constant or 0 for s in b.stores] for a in b.axes}
    near = [a for a, at in steps.items() if hints(a.extent) >= lanes and all(0 < n <= NEAR for n in at) and not _in_short_pieces(b, a, lanes)]
    return max(near, key=lambda a: hints(a.extent), default=None) if 1 not in steps[best] and best not in near else None


PAGE = 4096             # bytes; lines so far apart, or a multiple of it, crowd the same places of the first-level cache
TURNS = 4               # elements along an axis from which on what is added to them is computed in lanes, which then add in turn


def _in_turn(b: Body, updates: list[Store], serial, hints: Hints) -> Axis | None:
    """The axis of which updates are made lane by lane where no axis is free of meetings, or steps of whole pages along it: the innermost one that is
    long enough, if each update's place differs along it; where the last update counts, the innermost of all. Probabilities of 51 values moved to
    their neighbours (C51), 1024 rows: 1.30 ms on one core with each element by itself, 0.30 so; gradients of 256 images of 64 x 64 resampled from 32
    x 32, where lanes had run across images, 23.8 and 11.3."""
    for n, a in enumerate(reversed(loop_order(b, hints))):
        if n and any(s.monoid == "last" for s in updates):
            break
        if a not in serial and hints(a.extent) >= TURNS and all(a in s.axes and a in _every_axis(s.address) for s in updates):
            return a
    return None


def _by_pages(b: Body, a: Axis, hints: Hints) -> bool:
    """Does something step by whole pages along `a`?"""
    steps = ((address.coefficient(a), size) for _, address, size in strides_of(b))
    return any(c.terms and _magnitude(c, hints) * size % PAGE == 0 for c, size in steps)


def _every_axis(i: Index) -> set[Axis]:
    """The axes of `i`, those of fetched indices too."""
    return {a for x in i.atoms() for a in (x.expr.free if isinstance(x, Fetch) else Index({(x,): 1}).axes())}


def _packs(b: Body, vector: Axis, hints: Hints, target) -> bool:
    """Is all that strides along `vector` packed once for several rows?"""
    parallel = tuple(a for a in b.axes if a in b.parallel and a is not vector)
    reused, _ = reused_axes(b, vector, parallel, BLOCKS[-1] if vector in b.parallel else None, hints, target)
    exprs = [s.expr for s in b.stores]
    strided = [e for e in walk(*exprs) if isinstance(e, Load) and _strides(e.index[0], vector)]
    return bool(reused) and len(packable(exprs, vector, reused)) == len(strided)


def accesses(b: Body) -> Iterator[tuple[Store | Load, Index, frozenset[Axis]]]:
    """(access, address, axes of the nest of loops in which it stands) of every load and store; a load in several folds once for each."""
    seen, stack = set(), [(s.expr, s.axes, None) for s in b.stores]
    for s in b.stores:
        yield s, s.address, s.axes
    while stack:
        e, axes, fold = stack.pop()
        if (e, axes, fold) not in seen:
            seen.add((e, axes, fold))
            if isinstance(e, Load):
                yield e, e.index[0], axes
            inner, fold = (e.free | frozenset(e.over), (e.over, e.args)) if isinstance(e, Reduce) else (axes, fold)
            stack.extend((x, inner, fold) for x in e.children())


def _strides(address: Index, a: Axis) -> bool:
    step = address.coefficient(a)
    return bool(step.terms) and step != 1


def _strided(b: Body, a: Axis, hints: Hints) -> int:
    """How many steps of loops stride along `a`."""
    return sum(hints.count(axes) for _, address, axes in accesses(b) if _strides(address, a))
