"""Parts of a graph that are planned on their own, and which of them say the same: of a model's equal layers one is planned, and the others copy it.

A part holds nodes that could come to share a kernel: those that read one another, and those that read a common value while neither needs what torch
makes of the other; where a kernel makes that value, either all before torch made anything of it or all behind that (what backward keeps of each
layer's norm would tie all layers together: the next one reads the same sums). Two parts say the same when their nodes do, in order, up to which
nodes they read from outside and how these depend on the part.
"""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from ..ir.expr import Const, Expr, Load, Random, Rewriter, walk
from ..ir.graph import Compute, Graph, Opaque, Scatter, is_pointwise
from ..ir.index import Index
from .axes import Group, Member
from .legal import Roles


@dataclass(frozen=True, eq=False)
class Part:
    """`nodes` in the graph's order. `names`: what differs between parts that say the same, in order: the nodes, what else they read, and where
    streams of random numbers begin (a Const). `says`: equal for parts that are planned alike; None for one that no other can equal."""
    nodes: tuple
    names: tuple
    says: Hashable


@dataclass(frozen=True, eq=False)
class Planned:
    """How a part was planned: its groups with their roles, and why two nodes' groups are not one."""
    part: Part
    groups: tuple[tuple[Group, Roles], ...]
    refused: tuple[tuple, ...]

    def copied(self, part: Part) -> "Planned":
        """The same for `part`, which says the same."""
        names = dict(zip(self.part.names, part.names))
        rename = renaming(names)
        return Planned(part, tuple(_copied(g, r, names, rename) for g, r in self.groups),
                       tuple((names[a], names[b], why) for a, b, why in self.refused))


def _copied(group: Group, roles: Roles, names: dict, rename: Rewriter) -> tuple[Group, Roles]:
    made = {m: Member(names[m.node], m.dims, rename(m.expr), m.index, rename(m.guard) if m.guard is not None else None) for m in group.members}
    new = Group(group.axes, tuple(made.values()), group.kind or group)
    pick = lambda members: tuple(made[m] for m in members)
    return new, replace(roles, local=pick(roles.local), accumulating=pick(roles.accumulating), final=pick(roles.final))


def renaming(names: dict) -> Rewriter:
    """Expressions with other nodes in the place of those that they load, and other beginnings of random numbers, where `names` has them."""
    def leaf(e: Expr):
        if isinstance(e, Load) and e.node in names:
            return Load(names[e.node], e.index, e.guard, e.other)
        return Random(e.kind, e.seed, names[e.offset], e.index) if isinstance(e, Random) and e.offset in names else None
    return Rewriter(leaf=leaf)


def parts(graph: Graph, sources: dict, readers: dict, pinned: set) -> list[Part]:
    """The parts of `graph`, by their first nodes. `sources`, `readers`: what each node reads, and what reads it."""
    own = [n for n in graph.nodes if isinstance(n, (Compute, Scatter))]
    place = {n: i for i, n in enumerate(own)}
    below, behind = _needs(graph, sources, place)
    found: list[list] = [[] for _ in own]
    for i, root in enumerate(_joined(own, place, sources, behind)):
        found[root].append(own[i])
    return [_part(tuple(nodes), sources, readers, pinned, below, place) for nodes in found if nodes]


def _needs(graph: Graph, sources: dict, place: dict) -> tuple[dict, dict]:
    """For every node the numbers, as bits, of the nodes of kernels that it needs: all, and those behind a call of torch, which no kernel holds beside
    it."""
    below, behind = {}, {}
    for n in graph.nodes:
        below[n] = reduce(or_, (below.get(s, 0) | (1 << place[s] if s in place else 0) for s in sources[n]), 0)
        behind[n] = below[n] if isinstance(n, Opaque) else reduce(or_, (behind.get(s, 0) for s in sources[n]), 0)
    return below, behind


def _joined(own: list, place: dict, sources: dict, behind: dict) -> list[int]:
    """For each node the number of the first one of its part."""
    root = list(range(len(own)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i
    earlier: dict = {}                  # what is read -> the nodes that read it
    for i, n in enumerate(own):
        for s in sources[n]:
            if isinstance(s, Opaque):
                continue
            at = place.get(s)
            late = at is not None and behind[n] >> at & 1
            near = [j for j in earlier.get(s, ()) if _many(s) or not (_many(n) or _many(own[j]))]
            if at is not None:      # with what makes the value, or among those that come too late for that
                near = [at, *[j for j in near if behind[own[j]] >> at & 1 == late]]
            for j in near:
                if not behind[n] >> j & 1 and find(i) != find(j):
                    root[max(find(i), find(j))] = min(find(i), find(j))
            earlier.setdefault(s, []).append(i)
    return [find(i) for i in range(len(own))]


def _many(node) -> bool:
    """Has it more than one element?"""
    return any(s != 1 for s in node.shape)


# -- what a part says ------------------------------------------------------------------------------------------------------
def _part(nodes: tuple, sources: dict, readers: dict, pinned: set, below: dict, place: dict) -> Part:
    inside = set(nodes)
    outside = tuple(dict.fromkeys(s for n in nodes for s in sources[n] if s not in inside))
    streams = tuple(dict.fromkeys(e.offset for n in nodes if isinstance(n, Compute) for e in walk(n.expr) if isinstance(e, Random)))
    names = (*nodes, *outside, *streams)
    number = {x: i for i, x in enumerate(names)}
    inner = sum(1 << place[n] for n in nodes)
    bits = {1 << place[n]: i for i, n in enumerate(nodes)}
    needs = tuple(_numbers(below[s] & inner, bits) for s in outside)
    said = tuple(_said(n, number) for n in nodes)
    used = tuple((n in pinned, any(r not in inside for r in readers[n])) for n in nodes)
    around = tuple(None if isinstance(s, Opaque) else (type(s), s.shape, s.strides, s.dtype, s.device, is_pointwise(s), s in pinned) for s in outside)
    single = None in said or None in around or not all(isinstance(s, Const) for s in streams)
    return Part(nodes, names, None if single else (said, used, around, needs))


def _numbers(mask: int, bits: dict[int, int]) -> tuple[int, ...]:
    found = []
    while mask:
        low = mask & -mask
        found.append(bits[low])
        mask ^= low
    return tuple(found)


def _said(node, number: dict) -> Hashable:
    """What a node says, names by their numbers; None for one that no other can equal (it fetches indices, updates in place, or computes with the
    number at which a stream begins)."""
    if not isinstance(node, Compute):
        return None
    seen: dict[Expr, object] = {}
    said = []
    for e in walk(node.expr):
        if e in number:
            seen[e] = None
            continue
        fields = [_field(getattr(e, name), name, seen, number) for name in e.fields]
        if None in (f for f, name in zip(fields, e.fields) if name != "guard" and name != "other"):
            return None
        seen[e] = len(seen)
        said.append((type(e), e.dtype, *fields))
    return node.shape, node.strides, node.dtype, node.device, tuple(said)


def _field(value, name: str, seen: dict, number: dict) -> Hashable:
    """A field of an expression whose parts are `seen`, as it is said; None where no other can equal it."""
    if name in ("node", "offset"):
        return number[value]
    if name == "other" or value is None:
        return value
    if isinstance(value, Expr):
        return seen[value]
    if isinstance(value, tuple) and value and isinstance(value[0], Expr):
        found = tuple([seen[x] for x in value])
        return None if None in found else found
    if any(i.fetched() for i in (value if isinstance(value, tuple) else (value,)) if isinstance(i, Index)):
        return None
    return value


# -- groups of one kind ------------------------------------------------------------------------------------------------------
def correspondence(group: Group, other: Group) -> dict:
    """For groups of one kind, what differs between them: names of the first -> names of the other."""
    found: dict = {}
    for m, o in zip(group.members, other.members):
        for e, x in zip(walk(*m.roots()), walk(*o.roots())):
            if isinstance(e, Load):
                found[e.node] = x.node
            elif isinstance(e, Random):
                found[e.offset] = x.offset
        found[m.node] = o.node
    return found
