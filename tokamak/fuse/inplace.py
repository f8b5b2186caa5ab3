"""Which mutated inputs a kernel may write itself, while it computes the new value (an optimizer's step), instead of a copy at the end.

An input receives `n` (a Write). The kernel of n's group may store n straight into the input's memory when nobody can see the difference:

    each element of n is stored once: the group is pointwise and all that it stores has n's axes, or n is made of a fold with n's axes (running
    statistics of what the fold gives); only values with n's axes, and no fold, are made of the input, read at n's own coordinates before n is stored
    nobody outside the group reads n, no later step reads the input, and n is no result of the program and written nowhere else;
    no opaque call is handed the input: what it returns may be a view of it

A scatter into the input (a row of a cache) then stores its updates alone. Its result is what later steps read, so they may: kernels, and those calls
of torch that are known to return memory of their own.
"""
from __future__ import annotations

from collections import Counter

from ..ir.expr import Expr, Load, walk
from ..ir.graph import Compute, Graph, Input, Scatter, View, Write, reads
from ..ir.index import Fetch
from .axes import Group, Member, fold_of

# calls of torch whose results have memory of their own, whatever they are given
FRESH = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"}


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
        if isinstance(n, Scatter):
            if last_read.get(w.target, at) <= at and _updates(steps[at], n, w.target) \
                    and all(map(_fresh, (s for s in steps[at + 1:] if n in reads_of(s)))):
                found[n] = w.target
            continue
        if max(last_read.get(w.target, at), last_read.get(n, at)) <= at and _in_step(steps[at], stores[steps[at]], n, w.target):
            found[n] = w.target
    return found


def reads_of(step) -> set:
    """What a step reads."""
    return {r for n in (step.nodes() if isinstance(step, Group) else (step,)) for r in reads(n)}


def _fresh(step) -> bool:
    """Is nothing that `step` makes a view of what it reads?"""
    return isinstance(step, Group) or str(getattr(step.target, "_schema", "")).split("(")[0].split(".")[0].removeprefix("aten::") in FRESH


def _updates(group: Group, node: Scatter, target: Input) -> bool:
    """Does the kernel of `group` read `target` as the base of `node` alone? (Maxima and minima look at how the base was stored.)"""
    own = (node.value, *node.index, *((node.guard,) if node.guard is not None else ()))
    others = [m for m in group.members if m.node is not node]
    if node.base is not target or node.monoid in ("max", "min") or any(target in reads(m.node) or not isinstance(m.node, Compute) for m in others):
        return False
    loads = walk(*(e for e in own if isinstance(e, Expr)), *(x.expr for i in node.index for x in i.atoms() if isinstance(x, Fetch)))
    return not any(isinstance(e, Load) and e.node is target for e in loads)


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
