"""Values that are compared with what was picked out of them: a gradient of an extreme is shared among the elements that are equal to it.

Computed again, in another kernel, such a value may differ in its last bit (what rounds on the way is a choice of each kernel): then no element is
the extreme, and the gradient is divided by their number, none. So backward does not compute it again: it keeps the value, or what the comparison gave
(`keep_compared`). Within one graph each operation of its kernels is rounded by itself (`compares_with_folds`): what is computed twice has the same
bits.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..ir.expr import Op, Reduce, Scan, loads, walk
from ..ir.graph import Compute, Graph, Input, reads
from .equal import equal_calls_once
from .regions import aliases

_aten = torch.ops.aten
_COMPARISONS = frozenset(getattr(_aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_EXACT = frozenset({_aten.clone.default, _aten._to_copy.default, _aten.abs.default, _aten.neg.default})        # the same bits from the same bits
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def keep_compared(joint: fx.GraphModule) -> None:
    """Marks the values of `joint` that its partitioner must not compute again. Equal calls are first made one: it keeps one, marked or not."""
    if _found(joint):
        joint.graph.eliminate_dead_code()
        joint.graph = equal_calls_once(joint.graph)
        for node in _found(joint):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        joint.recompile()


def _found(joint: fx.GraphModule) -> list[fx.Node]:
    """The calls whose results are compared with what is picked from them. What a checkpoint makes again together with what is picked is made in one
    graph, by the same rule."""
    found = []
    for node in joint.graph.nodes:
        for one, other in (node.args, node.args[::-1]) if node.target in _COMPARISONS else ():
            computed = _picked_from(one, other)
            if computed is not None and not (_again(computed) and _again(other)):
                found += [computed, *(computed.args[:1] if computed.target is getitem else ())]
    return found


def _again(node: fx.Node) -> bool:
    return node.meta.get("recompute") in _AGAIN


def _picked_from(one: fx.Node, other: fx.Node) -> fx.Node | None:
    """What `one` shows, as it is or its magnitude, if `other` is made of it by more than operations on single elements."""
    behind, shown = _folded(other), list(_shown(one))
    if not any(n in behind for n in shown):
        return None
    computed = shown[-1]
    return computed if computed.op == "call_function" else None


def _shown(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, and what it is a view, copy or magnitude of."""
    while True:
        yield node
        if not _moves(node) and node.target not in _EXACT or not node.args or not isinstance(node.args[0], fx.Node):
            return
        node = node.args[0]


def _moves(node: fx.Node) -> bool:
    return node.op == "call_function" and aliases(node.target)


def _folded(node: fx.Node) -> set[fx.Node]:
    """All that reaches `node` by way of a call that reads more than the element itself: a reduction, a sort."""
    seen: set[tuple[fx.Node, bool]] = set()
    stack = [(node, False)]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        n, folded = at
        alone = n.op != "call_function" or _moves(n) or n.target in _EXACT or torch.Tag.pointwise in getattr(n.target, "tags", ())
        stack.extend((a, folded or not alone) for a in n.all_input_nodes)
    return {n for n, folded in seen if folded}


# -- within one graph ------------------------------------------------------------------------------------------------------
_COMPARED = frozenset("eq ne lt le gt ge".split())


def compares_with_folds(graph: Graph) -> bool:
    """Are elements that `graph` computes compared with what was folded or picked out of them?"""
    for n in graph.nodes:
        for e in walk(n.expr) if isinstance(n, Compute) else ():
            if isinstance(e, Op) and e.name in _COMPARED and e.args[0].dtype.is_float:
                one, other = ({x.node for x in loads(a) if not isinstance(x.node, Input)} for a in e.args)
                if one and other and (one & _behind_folds(other) or other & _behind_folds(one)):
                    return True
    return False


def _behind_folds(nodes: Iterable) -> set:
    """What `nodes` are made of by way of a fold, a scatter or a call."""
    seen, stack = set(), [(n, False) for n in nodes]
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            n, folded = at
            folded = folded or not isinstance(n, Compute) or any(isinstance(e, (Reduce, Scan)) for e in walk(n.expr))
            stack.extend((r, folded) for r in reads(n))
    return {n for n, folded in seen if folded}
