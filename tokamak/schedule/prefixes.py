"""A PrefixSchedule: prefixes of few long rows, or down few long columns, in blocks, so that a row has many programs. Kernels one behind the other:
what blocks fold to; the prefixes of that; each block's own, behind those of the blocks before it. What lies behind the last whole block comes
beside the blocks. What else is folded along the row (softmax's maximum and sum) is known first.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..fuse import prefixes
from ..fuse.cost import Hints
from ..ir import ops
from ..ir.dtype import DType, I64
from ..ir.expr import Const, Coord, Expr, Load, Op, Reduce, Rewriter, Scan, walk
from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv
from .body import Body, Memory, Store, coalesce, exprs_of
from .tile_facts import TileFacts
from .tile_schedule import TileSchedule
from .tile_stages import power

BLOCK = 8192            # bytes of a block of it at most: f32 prefixes of 1 x 10000000 33 us, of 8 x 1000000 27, bf16 of 100 x 262144 40; H100, by
                        # one program a row, 8 x 1000000 342, 8 x 131072 24.9, 100 x 262144 66.5, 64 x 32768 9.0
PROGRAMS = 4            # blocks to a multiprocessor at least, where they have LEAST elements then: bf16 of 1 x 65536 3.2 us, of 8 x 32768 3.6
LEAST = 1024
COLUMNS = 256           # bytes of a line of columns to a multiprocessor at most: bf16 of 16 x 1024 x 1024 along the middle 34 us; with more a warp
                        # for each few columns fills the machine, 10 x 1368 x 2310 59
DEEP = 512              # rows of columns at least: bf16 of 910 x 1347 7.1 us, f32 of 512 x 1024 5.5
COLUMN_BLOCKS = 448     # columns of blocks to a multiprocessor, where the blocks have DEEP_LEAST rows then: f32 of 4096 x 4096 57 us, of 141308 x 63
DEEP_LEAST = 64         # 37, bf16 of 19041 x 138 10.8
BLOCKS = 16384          # of a row at most: one program makes their prefixes


@dataclass(frozen=True)
class PrefixSchedule(TileSchedule):
    """Prefixes along the axis `along`, in blocks of `block` elements; `columns`: the axis that lies contiguously, where that is another one."""
    along: Axis | None = None
    block: int = 0
    columns: Axis | None = None

    def __str__(self) -> str:
        return f"prefixes(i{self.order.index(self.along)} / {self.block})"


@dataclass(frozen=True)
class Phase:
    """A kernel's body, and the memories that it fills for the next with what each element of them is."""
    body: Body
    fills: tuple[tuple[Memory, Expr], ...] = ()


def choose(b: Body, hints: Hints, target) -> PrefixSchedule | None:
    """A schedule in blocks; None where `b` is no body of prefixes along one axis, or is faster by one program a row."""
    along = None if target.ordered else _along(b)
    if along is None:
        return None
    facts = TileFacts(b, hints, target)
    block = _block(facts, along)
    columns = facts.line if facts.line is not along else None
    return PrefixSchedule(b.axes, (), (), frozenset(), (), 1, frozenset(), 1, along=along, block=block, columns=columns) if block else None


def _along(b: Body) -> Axis | None:
    """The one axis that is not parallel, where prefixes are made along it, by monoids that are operations."""
    rows, found = [a for a in b.axes if a not in b.parallel], walk(*exprs_of(b))
    if len(rows) != 1 or b.base is not None or any(s.monoid is not None or s.guard is not None for s in b.stores):
        return None
    along, = rows
    scans, below = [e for e in found if isinstance(e, Scan)], [x for e in found if isinstance(e, Reduce) for x in walk(*e.args)]
    if not scans or any(isinstance(x, Scan) for x in below) or any(e.along is not along or e.monoid not in prefixes.COMBINED for e in scans):
        return None
    if any(isinstance(e, Reduce) and (e.over != (along,) or e.monoid in ops.MEANS) for e in found):
        return None
    if any(along not in s.axes and any(isinstance(e, Scan) for e in walk(s.expr)) for s in b.stores):
        return None
    written = {s.memory: s for s in b.stores}
    apart = [e for e in found if isinstance(e, Load) and e.node in written]
    if any(e.index[0] is not written[e.node].address or along not in written[e.node].axes for e in apart):
        return None
    return along


def _block(facts: TileFacts, along: Axis) -> int:
    """Elements of a block; 0 where one program a row is faster."""
    hints, target = facts.hints, facts.target
    n, rows, size = hints(along.extent), hints.count(facts.b.parallel), facts.narrowest()
    if facts.line is along:
        wanted = min(max(n * rows // (PROGRAMS * target.threads), LEAST), BLOCK // size) if prefixes.few_long(rows, n, target) else 0
    else:
        wanted = max(n * rows // (COLUMN_BLOCKS * target.threads), DEEP_LEAST) if rows * size < COLUMNS * target.threads and n >= DEEP else 0
    block = power(max(wanted, n // BLOCKS) + 1) // 2 if wanted else 0
    return block if hints.least(along.extent) >= 2 * block else 0


# -- phases ------------------------------------------------------------------------------------------------------------
def phases(b: Body, s: PrefixSchedule, hints: Hints, memory: Callable[[Index, DType], Memory]) -> tuple[list[Phase], list[Body]]:
    """The kernels before the last, in running order, and the last one's bodies: the blocks, and what lies behind them. `memory(elements, dtype)`
    makes one that they leave each other something in."""
    made, b = _folds_first(b, s.along, memory)
    top = max(a.id for a in b.axes)
    within, block = Axis(top + 900000, as_index(s.block)), Axis(top + 900001, floordiv(s.along.extent, s.block))
    behind = Axis(top + 900002, s.along.extent - block.extent * s.block)
    scans = [e for e in walk(*exprs_of(b)) if isinstance(e, Scan)]          # those that others need come first
    known: dict[Scan, tuple[Memory, Index]] = {}

    def placed(rewrite: Rewriter, scan: Scan, row: Axis, before: Index, guard: Expr | None) -> None:
        """`rewrite` also says what `scan` is at an element of a row, behind the block `before` where `guard` holds."""
        node, place = known[scan]
        other = Const(ops.identity(scan.monoid, scan.dtype), scan.dtype) if guard is not None else None
        earlier = Load(node, (Rewriter({block: before}).index(place),), guard, other)
        rewrite.memo[scan] = _behind(scan.monoid, earlier, Scan(scan.monoid, row, tuple(map(rewrite, scan.args))))

    inside = Rewriter({s.along: as_index(block) * s.block + within})
    for level in _levels(scans):
        totals, before = {}, {}
        for e in level:
            free = tuple(sorted((a for a in b.axes if a in e.free and a is not s.along), key=lambda a: a is s.columns))
            axes, terms = (*free, block), tuple(map(inside, e.args))
            total, node = memory(_count(axes), e.dtype), memory(_count(axes), e.dtype)
            known[e] = node, _place((block, *free) if s.columns in free else axes)         # as the columns of a block are read
            totals.setdefault(free, []).append(Store(total, _place(axes), Reduce(e.monoid, (within,), terms), frozenset(axes)))
            folded = Scan(e.monoid, block, (Load(total, (_place(axes),)),))
            before.setdefault(free, []).append(Store(*known[e], folded, frozenset(axes)))
        made += [_phase((*free, block), within, fills) for free, fills in totals.items()]
        made += [_phase(free, block, fills) for free, fills in before.items()]
        for e in level:
            placed(inside, e, within, as_index(block) - 1, Op("gt", Coord(as_index(block)), Const(0, I64)))
    last = [_last(b, s.along, inside, (block, within))]
    if not hints.divides(s.block, s.along.extent):
        rest = Rewriter({s.along: block.extent * s.block + behind})
        for e in scans:
            placed(rest, e, behind, block.extent - 1, None)
        last.append(_last(b, s.along, rest, (behind,)))
    return made, last


def _last(b: Body, along: Axis, rewrite: Rewriter, axes: tuple[Axis, ...]) -> Body:
    """`b` with `axes`, the last of them a row, in the place of `along`."""
    stores = tuple(Store(x.memory, rewrite.index(x.address), rewrite(x.expr), x.axes - {along} | set(axes)) for x in b.stores)
    return coalesce(Body((*(a for a in b.axes if a is not along), *axes), stores, b.parallel | set(axes[:-1])))


def _levels(scans: list[Scan]) -> list[list[Scan]]:
    """The scans that need no other one, those that need these, and so on."""
    depth: dict[Scan, int] = {}
    for e in scans:
        depth[e] = max((depth[x] + 1 for x in walk(*e.args) if isinstance(x, Scan)), default=0)
    return [[e for e in scans if depth[e] == n] for n in range(max(depth.values()) + 1)]


def _folds_first(b: Body, along: Axis, memory: Callable) -> tuple[list[Phase], Body]:
    """What is folded along the whole row as phases of their own, and `b` as it reads what they leave."""
    left, known = {}, {}
    for e in _outermost([s.expr for s in b.stores if along in s.axes]):
        free = tuple(a for a in b.axes if a in e.free)
        node = memory(_count(free), e.dtype)
        known[e] = Load(node, (_place(free),))
        left.setdefault(free, []).append(Store(node, _place(free), e, frozenset(free)))
    beside = {free: [s for s in b.stores if s.axes == frozenset(free)] for free in dict.fromkeys(
        tuple(a for a in b.axes if a in s.axes) for s in b.stores if along not in s.axes)}
    rewrite = Rewriter()
    rewrite.memo.update(known)
    made = []
    for free in dict.fromkeys((*left, *beside)):
        stores = left.get(free, []), beside.get(free, [])
        folds = [e for e in walk(*(s.expr for some in stores for s in some)) if isinstance(e, Reduce)]
        made.append(_phase(free, along, *stores, shared=not any(isinstance(x, Reduce) for e in folds for x in walk(*e.args))))
    kept = tuple(Store(s.memory, s.address, rewrite(s.expr), s.axes) for s in b.stores if along in s.axes)
    return made, Body(b.axes, kept, b.parallel)


def _outermost(roots: Iterable[Expr]) -> list[Reduce]:
    """The folds of `roots` that stand in no other one."""
    found: dict[Reduce, None] = {}
    seen, waiting = set(), list(roots)
    while waiting:
        e = waiting.pop()
        if e not in seen:
            seen.add(e)
            if isinstance(e, Reduce):
                found[e] = None
            else:
                waiting.extend(e.children())
    return list(found)


def _phase(free: tuple[Axis, ...], row: Axis, fills: list[Store], beside: Iterable[Store] = (), shared: bool = False) -> Phase:
    """The kernel that makes what `fills` memories along `row`, which programs may have `shared`, for all `free` axes, and stores what is known
    `beside` that."""
    stores = (*fills, *beside)
    rows = (row,) if any(row in getattr(e, "over", ()) or row in e.free for s in stores for e in walk(s.expr)) else ()
    return Phase(coalesce(Body((*free, *rows), stores, frozenset((*free, *rows) if shared else free))), tuple((s.memory, s.expr) for s in fills))


def _behind(monoid: str, earlier: Expr, own: Expr) -> Expr:
    """What two neighbours fold to."""
    if monoid != "logsumexp":
        return Op(prefixes.COMBINED[monoid], earlier, own)
    top = Op("max", earlier, own)
    less = Op("exp", Op("sub", Op("min", earlier, own), top))
    return Op("where", Op("isinf", top), top, Op("add", top, Op("log1p", less)))


def _count(axes: Iterable[Axis]) -> Index:
    total = as_index(1)
    for a in axes:
        total = total * a.extent
    return total


def _place(axes: Iterable[Axis]) -> Index:
    """Where the element at `axes` lies, the last of them contiguous."""
    place = as_index(0)
    for a in axes:
        place = place * a.extent + a
    return place
