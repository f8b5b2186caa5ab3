"""Which stored values take over memory that nobody needs any more: on a GPU a pointwise kernel writes its result where it has read an operand, and a
product where it has read what is added to it (a residual).

    every element of the operand is read by the iteration that writes the same place, in the expression of that store alone: no other iteration, and
    no other store, can see the difference
    the operand is a stored value, or what a call of torch returned, of the same shape, strides and type, read by no later step; it is neither an
    input nor a result nor written somewhere, and no call that may return a view, or go on reading behind its end (a collective), has been handed it
"""
from __future__ import annotations

from collections.abc import Callable

from ..fuse.axes import Group
from ..fuse.plan import Plan
from ..ir.expr import Expr, Load, Reduce, Scan, walk
from ..ir.graph import Compute, Opaque, Result, View, reads
from ..schedule.body import Body, Store
from ..schedule.matmul import MatmulSchedule, VectorSchedule, sums_beside
from .tile_kernel import TileKernel


def reused(plan: Plan, built: dict) -> dict:
    """Stored node -> the node whose memory it takes over, in running order."""
    last: dict = {}
    for i, s in enumerate(plan.steps):
        for n in s.nodes() if isinstance(s, Group) else (s,):
            last.update((r, i) for r in reads(n))
    kept = _kept(plan)
    found: dict = {}
    for i, s in enumerate(plan.steps):
        parts = getattr(built.get(s), "parts", ()) if isinstance(s, Group) else ()
        kernel = parts[0].kernel if len(parts) == 1 else None
        if kernel is None or not (_pointwise(kernel.body) or _products(kernel)):
            continue
        taken: set = set()
        for store in kernel.body.stores:
            found_here = _operands(store, kernel.body) if _pointwise(kernel.body) else _added(store, kernel)
            gone = next((m for m in found_here if m not in taken and m not in kept and last.get(m) == i
                         and _alike(m, store.memory.node)), None)
            if gone is not None and isinstance(store.memory.node, Compute):        # what is written into an input has its memory
                found[store.memory.node] = gone
                taken.add(gone)
    return found


def _kept(plan: Plan) -> set:
    """Nodes whose memory is no temporary's."""
    shown = {o.node for o in plan.graph.outputs if isinstance(o, View)} | {w.source.node for w in plan.graph.writes}
    calls = [s for s in plan.steps if isinstance(s, Opaque)]
    views = {n for c in calls if _may_alias(c.target) for n in c.reads}
    returned = {n for n in plan.graph.nodes if isinstance(n, Result) and _may_alias(n.opaque.target)}
    return shown | views | returned | set(plan.inplace)


def _may_alias(target) -> bool:
    """May what a call returns share memory with what it is handed, or the call still read that when it has returned? Others than torch's own may."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::"):
        return True
    return any(x.alias_info is not None for x in (*schema.returns, *schema.arguments))


def _pointwise(body: Body) -> bool:
    exprs = [s.expr for s in body.stores]
    return body.base is None and not any(s.monoid is not None or s.guard is not None for s in body.stores) and \
        not any(isinstance(e, (Reduce, Scan)) for e in walk(*exprs))


def _products(kernel: TileKernel) -> bool:
    """Does each program make tiles of contractions, or of one behind another, to their ends?"""
    s, body = kernel.schedule, kernel.body
    return (isinstance(s, MatmulSchedule) and not isinstance(s, VectorSchedule) and s.programs == 1 and not kernel.spaces and not sums_beside(body)
            and body.base is None and not any(x.monoid is not None or x.guard is not None for x in body.stores))


def _added(store: Store, kernel: TileKernel) -> list:
    """Nodes that the store's expression reads behind its contractions, at the very place that it writes, and nothing else does: another store only as
    a part of what this one writes (the tile lies in registers then)."""
    body, whole = kernel.body, {a for a, n in kernel.schedule.pieces if a.extent.constant is not None and sum(n) >= a.extent.constant}
    if not body.parallel - store.axes <= whole:
        return []                       # several programs make it
    behind, inside = _above(store.expr, lambda e: isinstance(e, Reduce))
    others = [e for x in body.stores if x is not store for e in _above(x.expr, lambda e: e is store.expr)[0]]
    others += [e for fold in inside for e in walk(fold)]
    barred = {e.node for e in others if isinstance(e, Load)}
    read: dict = {}
    for e in behind:
        if isinstance(e, Load):
            read.setdefault(e.node, []).append(e)
    here = [m for m, loads in read.items() if m not in barred and all(e.guard is None and e.index[0] is store.address for e in loads)]
    return [m.node for m in here if isinstance(m.node, (Compute, Result))]


def _above(root: Expr, stops: Callable[[Expr], bool]) -> tuple[list[Expr], list[Expr]]:
    """The parts of `root` that are reached without passing one that `stops`, and those that stop."""
    found, ends, left = {}, {}, [root]
    while left:
        e = left.pop()
        if e in found or e in ends:
            continue
        if stops(e):
            ends[e] = None
        else:
            found[e] = None
            left += e.children()
    return list(found), list(ends)


def _operands(store: Store, body: Body) -> list:
    """Nodes that the store's expression reads at the very place that it writes, and nothing else in the body reads."""
    read: dict = {}
    for e in walk(store.expr):
        if isinstance(e, Load):
            read.setdefault(e.node, []).append(e)
    others = {e.node for s in body.stores if s is not store for e in walk(s.expr) if isinstance(e, Load)}
    here = [m for m, loads in read.items() if m not in others and all(e.guard is None and e.index[0] is store.address for e in loads)]
    return [m.node for m in here if isinstance(m.node, (Compute, Result)) and store.axes == frozenset(body.axes)]


def _alike(gone, node) -> bool:
    """The same elements at the same places, none of them twice."""
    return (gone.shape == node.shape and gone.strides == node.strides and gone.dtype is node.dtype and gone.device == node.device
            and not any(s == 0 and e != 1 for s, e in zip(node.strides, node.shape)))
