"""Products between narrow layers that backward makes again.

    h = f(x u)    y = h v    and in backward    dh = dy v'    du = x' (f'(..) dh)    dv = h' dy

torch's partitioner keeps what a product gives, since it takes products to be dear. Where a kernel of the gradients has x and all weights anyway, one
more product takes less than h does on its way through memory, written once and read once: so it is told that such products fuse like anything
else. Of layers one behind the other every second is made again, of what the one before has left in memory.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx
from torch._functorch.partitioners import _is_tangent

from .regions import aliases, viewed
from .registry import TABLE

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1}         # -> where the left factor stands
TAKEN_IN, AGAIN = "tokamak_taken_in", "tokamak_again"            # marks: it fuses; it may be made again
HALVES = (torch.float16, torch.bfloat16)

# (device, rows, columns of x, of h, of y, values of those columns that backward needs) -> are they better made again?
Pays = Callable[[torch.device, int, int, int, int, int], bool]


def mark(joint: fx.GraphModule, pays: Pays) -> None:
    """Marks in a joint graph the products that backward may make again, and what reads them."""
    behind = _behind_tangents(joint.graph)
    made: set[fx.Node] = set()          # what is pointwise made of marked products
    for n in joint.graph.nodes:
        if n.target not in PRODUCTS or n in behind or not _plain(n):
            continue
        values, readers = _reach(n, behind)
        forward = [r for r in readers if r not in behind]
        if len(forward) != 1 or not set(readers) - set(forward) or _given_out(values) or made.intersection(viewed(_factor(n))):
            continue
        (rows, hidden), inner, columns = n.meta["val"].shape, _factor(n).meta["val"].shape[1], forward[0].meta["val"].shape[-1]
        needed = len({[*viewed(v)][-1] for v in values if any(u in behind for u in v.users)})
        if _factor(forward[0]) in values and pays(n.meta["val"].device, rows, inner, hidden, columns, needed):
            beside = [r for x in viewed(_factor(n)) for r in _reach(x, behind)[1] if r in behind]
            n.meta[AGAIN] = n.meta[TAKEN_IN] = True
            for r in (*readers, *beside):
                r.meta[TAKEN_IN] = True
            made |= values


def _behind_tangents(graph: fx.Graph) -> set[fx.Node]:
    """What needs an incoming gradient."""
    found: set[fx.Node] = set()
    for n in graph.nodes:
        if _is_tangent(n) or found & set(n.all_input_nodes):
            found.add(n)
    return found


def _plain(n: fx.Node) -> bool:
    """Is `n` a product of 16-bit values of known extents, to which nothing but a bias is added as it stands?"""
    value = n.meta["val"]
    return value.dtype in HALVES and all(isinstance(s, int) for s in value.shape) and not n.kwargs


def _factor(n: fx.Node) -> fx.Node:
    return n.args[PRODUCTS[n.target]]


def _reach(n: fx.Node, behind: set[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
    """(`n` and what is pointwise made of it without what lies `behind` incoming gradients, its views among that; the products that read any of
    these)."""
    values, readers, waiting = {n}, [], [n]
    while waiting:
        for u in waiting.pop().users:
            if u.target in PRODUCTS:
                readers.append(u)
            elif u not in values and u not in behind and _fuses(u):
                values.add(u)
                waiting.append(u)
    return values, list(dict.fromkeys(readers))


def _fuses(n: fx.Node) -> bool:
    """Is `n` a view, or made element by element?"""
    value = n.meta.get("val")
    if n.op != "call_function" or not isinstance(value, torch.Tensor):
        return False
    sizes = [a.meta["val"].numel() for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    return aliases(n.target) or n.target in TABLE and value.numel() == max(sizes, default=0)


def _given_out(values: set[fx.Node]) -> bool:
    return any(u.op == "output" for v in values for u in v.users)
