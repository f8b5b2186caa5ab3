"""Which stored values are cheaper computed again by the kernels that read them.

A pointwise value that a kernel stores only for other kernels costs a write and a read of each of those. Computing it again costs what its own
operands cost to read there (nothing where the reader reads them anyway, little where it only gathers), memory for operands that had none,
and arithmetic.
"""
from __future__ import annotations

from ..ir import ops
from ..ir.expr import Load, Op, Reduce, walk, loads
from ..ir.graph import Compute, Input, Opaque, Result, is_pointwise
from .axes import Group
from .cost import Hints, node_bytes, pinned_nodes

FLOPS_A_BYTE = 4        # arithmetic that takes as long as moving a byte, a core's share of the memory bandwidth taken
LARGEST_DOMAIN = 1.01   # readers that use an element more than once compute it more than once: not worth it


def recomputed(plan, hints: Hints) -> frozenset:
    """Pairs (producer, reader) for which computing again moves fewer bytes. What a moved value is computed from stays stored: each sum of a chain (a
    residual stream) read in the place of the one before would make the last kernel read every term."""
    graph = plan.graph
    pinned = pinned_nodes(graph)
    owner = {n: g for g in plan.steps if isinstance(g, Group) for n in g.nodes()}
    stored = {n for nodes in plan.stores.values() for n in nodes}
    readers: dict = {}
    for g in plan.steps:
        for m in g.members if isinstance(g, Group) else ():
            for e in _loads(m.node):
                readers.setdefault(e.node, []).append((m.node, e))
    found, moved, kept = set(), set(), set()
    for p, g in owner.items():
        if p in pinned or p in kept or p not in stored or not is_pointwise(p):
            continue
        operands = {e.node for e in _loads(p)}
        outside = [(n, e) for n, e in readers.get(p, ()) if owner[n] is not g]
        if outside and not operands & moved and _cheaper(p, outside, owner, stored, hints):
            found.update((p, n) for n, _ in outside)
            moved.add(p)
            kept |= operands
    return frozenset(found)


def _loads(node) -> list[Load]:
    roots = (node.expr,) if isinstance(node, Compute) else (node.value,)
    return loads(*roots)


def _accessed(e: Load, hints: Hints) -> int:
    """How many elements a load touches, each coordinate of the axes it depends on counted once."""
    return hints.count(e.free)


def _cheaper(p: Compute, outside, owner, stored, hints: Hints) -> bool:
    keep = node_bytes(p, hints)
    again = 0.0
    flops = sum(ops.OPS[x.name].flops for x in walk(p.expr) if isinstance(x, Op))
    operands = loads(p.expr)
    for n, e in outside:
        touched = _accessed(e, hints)
        keep += touched * p.dtype.bytes
        if isinstance(n, Compute) and _domain(n, hints) > touched * LARGEST_DOMAIN and flops:
            return False
        have = {x.node for m in owner[n].members for x in _loads(m.node)}
        again += touched * flops / FLOPS_A_BYTE
        for x in operands:
            if x.node not in have:
                again += min(touched, hints.count(x.free)) * x.dtype.bytes
    for x in operands:
        if x.node not in stored and not isinstance(x.node, (Input, Result, Opaque)):
            again += node_bytes(x.node, hints)
    return again < keep


def _domain(n: Compute, hints: Hints) -> int:
    bound = {a for e in walk(n.expr) if isinstance(e, Reduce) for a in e.over}
    return hints.count((*n.axes, *bound))
