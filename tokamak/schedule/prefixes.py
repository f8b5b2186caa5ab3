"""A PrefixSchedule: prefixes of few long rows, or down few long columns, in blocks, so that a row has many programs. Kernels one behind the other: what
blocks fold to; the prefixes of that; each block's own prefixes, behind those of the blocks before it. What lies behind the last whole block comes
beside the blocks. What else is folded along the row (softmax's maximum and sum) is known first.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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

COMBINED = {"sum": "add", "prod": "mul", "max": "max", "min": "min", "any": "or", "all": "and"}         # monoid -> the operation
ROWS = 1.5              # contiguous rows to a multiprocessor at most
LONG = 32768            # elements of such a row at least
BLOCK = 8192            # bytes of a block of it at most
PROGRAMS = 4            # blocks to a multiprocessor at least, where they have LEAST elements then
LEAST = 1024
COLUMNS = 256           # bytes of a line of columns to a multiprocessor at most
DEEP = 512              # rows of columns at least
COLUMN_BLOCKS = 448     # columns of blocks to a multiprocessor, where the blocks have DEEP_LEAST rows then
DEEP_LEAST = 64
BLOCKS = 16384          # of a row at most: one program makes their prefixes


@dataclass(frozen=True)
class PrefixSchedule(TileSchedule):
    """Prefixes along the axis `along`, in blocks of `block` elements."""
    along: Axis | None = None
    block: int = 0

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
    block = _block(b, along, hints, target) if along is not None else 0
    return PrefixSchedule(b.axes, (), (), frozenset(), (), 1, frozenset(), 1, along=along, block=block) if block else None


def _along(b: Body) -> Axis | None:
    """The one axis that is not parallel, where prefixes are made along it, by monoids that are operations, of what needs no prefixes."""
    rows, found = [a for a in b.axes if a not in b.parallel], walk(*exprs_of(b))
    if len(rows) != 1 or b.base is not None or any(s.monoid is not None or s.guard is not None for s in b.stores):
        return None
    along, = rows
    scans, below = [e for e in found if isinstance(e, Scan)], [x for e in found if isinstance(e, (Reduce, Scan)) for x in walk(*e.args)]
    if not scans or any(isinstance(x, Scan) for x in below) or any(e.along is not along or e.monoid not in COMBINED for e in scans):
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


def _block(b: Body, along: Axis, hints: Hints, target) -> int:
    """Elements of a block; 0 where one program a row is faster."""
    facts = TileFacts(b, hints, target)
    n, rows, size = hints(along.extent), hints.count(b.parallel), facts.narrowest()
    if facts.line is along:
        wanted = min(max(n * rows // (PROGRAMS * target.threads), LEAST), BLOCK // size) if rows < ROWS * target.threads and n >= LONG else 0
    else:
        wanted = max(n * rows // (COLUMN_BLOCKS * target.threads), DEEP_LEAST) if rows * size < COLUMNS * target.threads and n >= DEEP else 0
    block = power(max(wanted, n // BLOCKS) + 1) // 2 if wanted else 0
    return block if hints.least(along.extent) >= 2 * block else 0


# -- phases ------------------------------------------------------------------------------------------------------------
def phases(b: Body, s: PrefixSchedule, hints: Hints, memory: Callable[[Index, DType], Memory]) -> tuple[list[Phase], list[Body]]:
    """The kernels before the last, in running order, and the last one's bodies: the blocks, and what lies behind them. `memory(elements, dtype)` makes
    one that they leave each other something in."""
    first, b = _folds_first(b, s.along, memory)
    top = max(a.id for a in b.axes)
    within = Axis(top + 900000, as_index(s.block))
    block = Axis(top + 900001, floordiv(s.along.extent, s.block))
    behind = Axis(top + 900002, s.along.extent - block.extent * s.block)
    at = as_index(block) * s.block + within
    scans = list(dict.fromkeys(e for e in walk(*exprs_of(b)) if isinstance(e, Scan)))
    totals, before, known = {}, {}, {}
    moved = Rewriter({s.along: at})
    for e in scans:
        free = (*(a for a in b.axes if a in e.free and a is not s.along), block)
        terms, total = tuple(map(moved, e.args)), memory(_count(free), e.dtype)
        folded = Scan(e.monoid, block, (Load(total, (_place(free),)),))
        totals.setdefault(free, []).append((total, Reduce(e.monoid, (within,), terms)))
        before.setdefault(free, []).append((known.setdefault(e, memory(_count(free), e.dtype)), folded))
    made = [*first, *(_phase(free, within, fills) for free, fills in totals.items()), *(_phase(free[:-1], block, fills) for free, fills in before.items())]

    def last(mapping: dict, axes: tuple[Axis, ...], row: Axis, places: dict, guard: Expr | None) -> Body:
        rewrite = Rewriter(mapping)
        for e in scans:
            free = tuple(a for a in b.axes if a in e.free and a is not s.along)
            other = Const(ops.identity(e.monoid, e.dtype), e.dtype) if guard is not None else None
            earlier = Load(known[e], (Rewriter(places).index(_place((*free, block))),), guard, other)
            rewrite.memo[e] = Op(COMBINED[e.monoid], earlier, Scan(e.monoid, row, tuple(map(rewrite, e.args))))
        stores = tuple(Store(x.memory, rewrite.index(x.address), rewrite(x.expr), x.axes - {s.along} | set(axes)) for x in b.stores)
        others = tuple(a for a in b.axes if a is not s.along)
        return coalesce(Body((*others, *axes), stores, (b.parallel | set(axes)) - {row}))
    blocks = last({s.along: at}, (block, within), within, {block: as_index(block) - 1}, Op("gt", Coord(as_index(block)), Const(0, I64)))
    if hints.divides(s.block, s.along.extent):
        return made, [blocks]
    return made, [blocks, last({s.along: block.extent * s.block + behind}, (behind,), behind, {block: block.extent - 1}, None)]


def _folds_first(b: Body, along: Axis, memory: Callable) -> tuple[list[Phase], Body]:
    """What is folded along the whole row as phases of their own, and `b` as it reads what they leave."""
    stored = {s.expr: s for s in b.stores if along not in s.axes}
    left, known = {}, {}
    for e in _outermost([s.expr for s in b.stores if along in s.axes]):
        free = tuple(a for a in b.axes if a in e.free)
        node = memory(_count(free), e.dtype)
        known[e] = Load(node, (_place(free),))
        left.setdefault(free, []).append((node, e))
    for expr, s in stored.items():
        left.setdefault(tuple(a for a in b.axes if a in s.axes), [])
    rewrite, made = Rewriter(), []
    rewrite.memo.update(known)
    for free, fills in left.items():
        beside = tuple(s for s in stored.values() if s.axes == frozenset(free))
        made.append(_phase(free, along, fills, beside))
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


def _phase(free: tuple[Axis, ...], row: Axis, fills: list[tuple[Memory, Expr]], beside: tuple[Store, ...] = ()) -> Phase:
    """The kernel that fills memories over the axes `free` with what is made along `row`, and stores what is known `beside` that."""
    kept = lambda e: (*free, row) if row in e.free else free
    stores = tuple(Store(memory, _place(kept(e)), e, frozenset(kept(e))) for memory, e in fills)
    return Phase(coalesce(Body((*free, row), (*stores, *beside), frozenset(free))), tuple(fills))


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
