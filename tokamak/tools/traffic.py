"""What a kernel on a GPU reads and writes, counted from its body and its schedule.

A program keeps what it has loaded for as long as it has the coordinates, so a load counts the elements that its addresses reach, once: rows held in
registers are read once. Rows that are run through in loops are read in several passes, one for each level of folds: a fold's result is known when its
loop is over. A further pass over the same elements counts again, unless what the programs in flight touch fits the second-level cache.
Partial results that one kernel of a group leaves to the next are memory like any other: written here, read there.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..codegen.scope import all_atoms
from ..codegen.tile_kernel import TileKernel
from ..fuse.cost import Hints, node_bytes
from ..ir.expr import Expr, Load, Reduce, walk
from ..ir.index import Fetch, Index
from ..schedule.body import Store
from ..target import Target

WARPS = 32          # that a multiprocessor has in flight, as a rule


@dataclass(frozen=True)
class Traffic:
    """Bytes of a kernel from the memory of `node`, or to it when `written`. `fewest`: the elements it reaches, each once; `moved`: every pass counted
    that has to fetch them again."""
    node: object
    written: bool
    fewest: int
    moved: int


def stores(k: TileKernel) -> list[Store]:
    """The stores of its body that the kernel makes: the others wait for the partial results that it leaves, if any."""
    split = set(k.schedule.split) if k.spaces else set()
    return [s for s in k.body.stores if not any(isinstance(e, Reduce) and split & set(e.over) for e in walk(s.expr))]


def roots(k: TileKernel) -> list[Expr]:
    """Everything that the kernel computes."""
    found: list[Expr] = []
    for s in stores(k):
        found += [s.expr, *([s.guard] if s.guard is not None else []), *(a.expr for a in all_atoms(s.address) if isinstance(a, Fetch))]
    return found + [e for e, _, _ in k.spaces]


def traffic(k: TileKernel, hints: Hints, target: Target) -> list[Traffic]:
    """What moves between the kernel and each memory, in the order of its parameters."""
    found: dict[tuple, dict[int, list[Index]]] = {}             # (node, written?) -> pass -> addresses
    for n, loads in passes(k).items():
        for e in loads:
            found.setdefault((e.node.node, False), {}).setdefault(n, []).append(e.index[0])
    for s in stores(k):
        for written in (True, False) if s.monoid not in (None, "last") else (True,):
            found.setdefault((s.memory.node, written), {}).setdefault(-1, []).append(s.address)
    again = _in_flight(k, found, hints, target) > target.l2
    out = [Traffic(node, True, node_bytes(node, hints), node_bytes(node, hints)) for _, _, nodes in k.spaces for node in nodes]
    for (node, written), by_pass in found.items():
        each = [max(reach(node, i, hints) for i in addresses) for addresses in by_pass.values()]
        out.append(Traffic(node, written, max(each), sum(each) if again else max(each)))
    order = {p.source.node: n for n, p in enumerate(k.params) if p.kind == "memory"}
    return sorted(out, key=lambda t: order.get(t.node, len(order)))


def passes(k: TileKernel) -> dict[int, dict[Load, None]]:
    """The loads of each pass over the looped rows; under -1 those that stand in no such loop."""
    looped, computed = k.schedule.looped, roots(k)
    level: dict[Expr, int] = {}
    for e in walk(*computed):
        level[e] = max((level[c] for c in e.children()), default=0) + (isinstance(e, Reduce) and bool(looped & set(e.over)))
    found: dict[int, dict[Load, None]] = {}
    for root in (*computed, *(a for e in level if isinstance(e, Reduce) and looped & set(e.over) for a in e.args)):
        for e in within(root, looped):
            if isinstance(e, Load):
                found.setdefault(level[root] if e.free & looped else -1, {})[e] = None
    return found


def within(root: Expr, looped: frozenset) -> Iterable[Expr]:
    """Sub-expressions of `root`, not entering folds over looped axes: their results are known."""
    seen: dict[Expr, None] = {}
    waiting = [root]
    while waiting:
        e = waiting.pop()
        if e not in seen:
            seen[e] = None
            if not (isinstance(e, Reduce) and looped & set(e.over)):
                waiting.extend(e.children())
    return seen


def reach(node, address: Index, hints: Hints) -> int:
    """Bytes of the elements of `node` that `address` goes through, each once."""
    return min(hints.count(address.axes()) * node.dtype.bytes, node_bytes(node, hints))


def _in_flight(k: TileKernel, found: dict[tuple, dict[int, list[Index]]], hints: Hints, target: Target) -> int:
    """Bytes that the programs which run at the same time touch, each with its tile of the parallel axes and all of its rows."""
    s, total = k.schedule, 0
    programs = min(hints(k.grid), target.threads * max(1, WARPS // s.warps))
    for (node, _), by_pass in found.items():
        largest = 0
        for address in (i for addresses in by_pass.values() for i in addresses):
            part = node.dtype.bytes
            for a in address.axes():
                part *= hints(a.extent) if a not in k.body.parallel else min(sum(s.sizes(a)) if a in s.dims else 1, hints(a.extent))
            largest = max(largest, min(programs * part, reach(node, address, hints)))
        total += largest
    return total
