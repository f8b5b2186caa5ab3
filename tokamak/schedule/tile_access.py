"""What the memory accesses of a Body are like, as far as its schedule on a GPU asks: how wide, how far, where rows begin, what is read but once."""
from __future__ import annotations

import functools
import math

from ..fuse.cost import Hints
from ..fuse.sizes import sizes_of
from ..ir.expr import Coord, Expr, Load, Reduce, walk
from ..ir.index import Axis, Index
from ..ir.ranges import bounds
from .body import Body, exprs_of
from .schedule import strides_of

FAR = 2**31 - 2**17     # offsets from here on need 64 bits: a tile, and a loop's last step, go beyond the last element
LITTLE = 16             # times as much is read as written where that leaves the cache first: sums of 134 MB of f16 71 to 80%, 76 to 79%; but
                        # LayerNorm forward 93 to 88, bias + GELU 80 to 77
ONCE = 4                # of so many parts of the second-level cache more than one is read of one value in a loop, for folds: that leaves it first. 33
                        # MB: sums of 1024 and 512 rows of 8191 and 16383 f32 11.4 and 12.0 us, 13.3 and 14.4 without; of 256, 128 and 32 rows of bf16
                        # of words 12.4 to 12.6, 13.7 to 14.3; columns of 8192 rows of 2047 bf16 12.4, 14.0. 4 MB the same either way. Half as many
                        # parts where rows are held: 33 MB in rows of 256 and 1024 bf16 11.1 and 11.2, 13.4 and 12.7; 17 MB of 1023 9.6, 9.4
LINE = 128              # bytes of a line of the caches
SHARED = 200 << 10      # bytes of shared memory that hold what turns of a loop read ahead, at most: the rest is for what folds exchange


def wide(b: Body, hints: Hints, counted: bool = False) -> bool:
    """Does an access in `b`, a number made of sizes, or (`counted`) the count of all coordinates, reach behind 2^31? Sizes are as they were when the
    graph was traced (`capture.sizes.narrow` has torch trace it anew where they grow beyond); those that only the run shows do."""
    far = any(_reach(address, hints) >= FAR for _, address, _ in strides_of(b)) or any(_great(i, hints) for i in _numbers(b))
    return far or counted and math.prod(_traced(a.extent, hints) for a in b.axes) >= FAR


def _numbers(b: Body) -> set[Index]:
    """The coordinates of which `b` computes whose sizes, numbers of the user's among them, say how large they are."""
    return {e.index for e in walk(*exprs_of(b)) if isinstance(e, Coord) and sizes_of(e.index) and not e.index.fetched()}


def _great(number: Index, hints: Hints) -> bool:
    """May `number` be one that 32 bits do not hold?"""
    return any(_reach(i, hints) >= FAR // 2 for i in (number, -number))


def _reach(address: Index, hints: Hints) -> int:
    """An element offset that `address` stays below."""
    far = bounds(address)[1]
    return _traced(far, hints) if far is not None and not far.axes() else FAR


def _traced(i: Index, hints: Hints) -> int:
    """`i` as it was traced, whatever the estimates say."""
    return hints.traced(i) if all(s.name in hints.hints for s in sizes_of(i)) else FAR


def fits(stages: int, b: Body, pieces: dict[Axis, tuple[int, ...]], turned) -> bool:
    """Does shared memory hold what `stages` turns of a loop over the axes `turned` read, whose tiles are of `pieces`? The turn that is worked on has
    its elements in registers."""
    loads = {(e.node, e.index[0], e.dtype.bytes) for e in walk(*exprs_of(b)) if isinstance(e, Load) and e.index[0].axes() & set(turned)}
    turn = sum(size * math.prod(sum(pieces[a]) for a in index.axes() if a in pieces) for _, index, size in loads)
    return (stages - 1) * turn <= SHARED


def narrowest(b: Body, line: Axis | None) -> int:
    """Bytes of an element of the narrowest that is read along `line`."""
    return min((size for _, address, size in strides_of(b) if line in address.axes()), default=4)


def begin_anywhere(b: Body, line: Axis, hints: Hints, word: int = 16, written: bool = False) -> bool:
    """Do rows along `line` begin at any element, not at words of 16 bytes, or so many? `written`: those that are, alone."""
    return any(not hints.divides(max(word // size, 1), address.coefficient(x)) for e, address, size in strides_of(b)
               if address.coefficient(line) == 1 and not (written and isinstance(e, Load)) for x in address.axes() - {line})


def loops_behind(e: Expr, looped) -> int:
    """How many loops over the axes `looped`, one after the other, must be over before `e` is known."""
    along = set(looped)
    return max((max(loops_behind(a, along) for a in f.args) + bool(along & set(f.over)) for f in walk(e) if isinstance(f, Reduce)),
               default=0) if along else 0


def loops_read_in(b: Body, looped) -> list[tuple[Load, int]]:
    """What `b` reads along the axes `looped`, each address once, and in how many of the loops over them that come one after the other: a fold's loop
    stands behind those of all that its elements are made of."""
    along = set(looped)
    folds = lambda e: isinstance(e, Reduce) and bool(along & set(e.over))
    behind = functools.cache(lambda e: loops_behind(e, along))
    found: dict[tuple, tuple[Load, set[int]]] = {}
    roots = [(e, behind(e)) for e in exprs_of(b)]
    roots += [(a, max(map(behind, e.args))) for e in walk(*exprs_of(b)) if folds(e) for a in e.args]
    for root, loop in roots:
        stack, seen = [root], {root}
        while stack:
            e = stack.pop()
            if isinstance(e, Load) and e.index[0].axes() & along:
                found.setdefault((e.node, e.index), (e, set()))[1].add(loop)
            new = [] if folds(e) else [x for x in e.children() if x not in seen]
            seen.update(new)
            stack.extend(new)
    return [(e, len(loops)) for e, loops in found.values()]


def once(b: Body, line: Axis | None, looped, hints: Hints, target) -> bool:
    """Is more read than the second-level cache holds (of one value that is folded, a part of it), each element once, and little written? What others
    have left there then stays. Lines that several rows share are read more than once: f32 sums of 17 columns 81%, 58 without them in the cache.
    `looped`: the axes of loops over rows."""
    if line is None or hints(line.extent) * narrowest(b, line) < LINE:
        return False
    count = hints.count
    loads = {(e.node, e.index[0], e.dtype.bytes) for e in walk(*exprs_of(b)) if isinstance(e, Load)}
    along = [index for _, index, _ in loads if line in index.axes()]
    read = sum(size * count(index.axes()) for index, size in {(index, size) for _, index, size in loads})
    written = sum(s.memory.dtype.bytes * count(s.axes) for s in b.stores)
    reduced = [e for e in walk(*exprs_of(b)) if isinstance(e, Reduce)]
    folds = [e for e in reduced if set(e.over) & set(looped)]
    again = any(x in folds for e in folds for x in walk(*e.args))
    parts = 1 if len(along) != 1 or not reduced else ONCE if folds or any(set(e.over) & b.parallel for e in reduced) else ONCE // 2
    return parts * read > target.l2 and written * LITTLE <= read and not again
