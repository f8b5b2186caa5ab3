"""Which mutated inputs a kernel may write itself, while it computes the new value (an optimizer's step), instead of a copy at the end.

An input receives `n` (a Write). The kernel of n's group may store n straight into the input's memory when nobody can see the difference:

    each element of n is stored once: the group is pointwise and all that it stores has n's axes, or n is made of a fold with n's axes (running
    statistics of what the fold gives); only values with n's axes, and no fold, are made of the input, read at n's own coordinates before n is stored
    nobody outside the group reads n, no later step reads the input, and n is no result of the program and written nowhere else;
    no opaque call is handed the input: what it returns may be a view of it
"""
from __future__ import annotations

from collections import Counter

from ..ir.expr import Load, walk
from ..ir.graph import Compute, Graph, Input, View, Write, reads
from .axes import Group, Member, fold_of


def written_in_place(graph: Graph, steps: tuple, stores: dict) -> dict[Compute, Input]:
    """Stored node -> the input in whose memory it is stored. `steps` in running order."""
    position = {n: i for i, s in enumerate(steps) for n in (s.nodes() if isinstance(s, Group) else (s,))}
    last_read: dict = {}
    for i, s in enumerate(steps):
        for n in s.nodes() if isinstance(s, Group) else (s,):
            last_read.update((r, i) for r in reads(n))
    handed = {r for s in steps if not isinstance(s, Group) for r in reads(s)}
    results = {o.node for o in graph.outputs if isinstance(o, View)}
    sources = Counter(w.source.node for w in graph.writes)
    targets = Counter(w.target for w in graph.writes)
    found: dict[Compute, Input] = {}
    for w in graph.writes:
        n, at = w.source.node, position.get(w.source.node)
        if at is None or not isinstance(steps[at], Group) or not _same_memory(w):
            continue
        if n in results or w.target in handed or sources[n] > 1 or targets[w.target] > 1:
            continue
        if max(last_read.get(w.target, at), last_read.get(n, at)) <= at and _in_step(steps[at], stores[steps[at]], n, w.target):
            found[n] = w.target
    return found


def _same_memory(w: Write) -> bool:
    """The new value has the input's elements in the input's order, each once."""
    n, target = w.source.node, w.target
    layout = all(a is b and a is c or e == 1 for a, b, c, e in zip(w.source.strides, n.strides, target.strides, n.shape))
    return (w.source.shape == n.shape == target.shape and w.source.offset == 0 and layout and n.dtype is target.dtype and n.device == target.device
            and not any(s == 0 and e != 1 for s, e in zip(target.strides, target.shape)))


def _in_step(group: Group, stored: tuple, node: Compute, target: Input) -> bool:
    """Every element of `target` that an iteration of the group reads is the one that it then writes, and it reads it before."""
    own = next(m for m in group.members if m.node is node)
    if any(not isinstance(m.node, Compute) for m in group.members):
        return False
    needing = [m for m in group.members if any(target in reads(x.node) for x in _made_of(group, m))]
    if any(fold_of(m.expr) is not None or m.free != own.free for m in needing):
        return False
    loads = [e for m in needing for e in walk(*m.roots()) if isinstance(e, Load) and e.node is target]
    if any(e.index != own.dims or e.guard is not None for e in loads):
        return False
    if any(fold_of(m.expr) is not None or m.free != own.free for m in group.members):
        return _after_a_fold(group, own) and (not needing or own in needing)
    readers = [m in needing and m.node in stored for m in group.members]
    return not any(readers[group.members.index(own) + 1:]) or any(readers[:group.members.index(own) + 1])


def _after_a_fold(group: Group, own: Member) -> bool:
    """Is `own` made of a fold over the same axes? Then each element is stored by one iteration alone."""
    return fold_of(own.expr) is None and any(fold_of(m.expr) is not None and m.free == own.free for m in _made_of(group, own))


def _made_of(group: Group, member: Member) -> list[Member]:
    """`member` and the members that it is made of, directly or through others."""
    owner, found = {m.node: m for m in group.members}, [member]
    for m in found:
        found += [owner[n] for n in reads(m.node) if n in owner and owner[n] not in found]
    return found
