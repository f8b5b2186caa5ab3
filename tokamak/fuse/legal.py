"""May these nodes share a kernel? Answers are None (yes) or a Reason; asking changes nothing.

A kernel runs in parallel over some axes P of its group. Seen from P every member has a role:

    local         P is among its dimensions: made and used within one iteration
    accumulating  a fold over some of P: partial results per thread, complete only when the kernel ends
    final         computed from accumulating results once those are complete (a mean from its sum)

A local member may read local ones only; a final one reads accumulating and final ones.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.expr import Reduce, Scan
from ..ir.graph import Compute, Scatter
from ..ir.index import Axis, as_index
from .axes import Group, Member, fold_of
from .reason import Reason


@dataclass(frozen=True, eq=False)
class Roles:
    """Role of each member for parallel axes `parallel`."""
    parallel: frozenset[Axis]
    local: tuple[Member, ...]
    accumulating: tuple[Member, ...]
    final: tuple[Member, ...]

    def rows(self, group: Group) -> frozenset[Axis]:
        """The other axes of `group`, which has these roles."""
        return frozenset(a for m in group.members for a in m.free | m.bound) - self.parallel


def inner_reads(group: Group) -> dict[Member, list[Member]]:
    """For each member the members it reads."""
    owner = {m.node: m for m in group.members}
    return {m: [owner[n] for n in dict.fromkeys(e.node for e in m.loads) if n in owner and n is not m.node]
            for m in group.members}


def roles(group: Group, parallel: frozenset[Axis], deps: dict | None = None, atomic: bool = False) -> Roles | Reason:
    """The members' roles when the kernel runs in parallel over `parallel`, or why it cannot. `atomic`: several iterations may update one element of a
    scatter at once; else each element must belong to one of them."""
    deps = inner_reads(group) if deps is None else deps
    kind: dict[Member, str] = {}
    ends: dict[Axis, bool] = {}
    for m in group.members:
        fold = fold_of(m.expr)
        sources = [kind[d] for d in deps[m]]
        if isinstance(fold, Scan) and fold.along in parallel:
            return Reason("scan_order", "illegal")
        if isinstance(fold, Scan) and ends.setdefault(fold.along, fold.reverse) != fold.reverse:
            return Reason("scan_order", "illegal", "two run from different ends")
        if isinstance(m.node, Scatter) and not atomic:
            if any(as_index(a) not in m.index for a in parallel):
                return Reason("scatter", "illegal")
        if parallel <= m.free:
            kind[m] = "local"
        elif isinstance(fold, Reduce) and parallel <= m.free | m.bound:
            kind[m] = "accumulating"
        elif fold is None and sources and not isinstance(m.node, Scatter):
            kind[m] = "final"
        else:
            return Reason("no_common_axes", "illegal")
        allowed = ("accumulating", "final") if kind[m] == "final" else ("local",)
        if any(s not in allowed for s in sources):
            return Reason("fold_incomplete", "illegal")
        if any(isinstance(d.node, Scatter) for d in deps[m]):
            return Reason("scatter", "illegal")
    pick = lambda role: tuple(m for m in group.members if kind[m] == role)
    return Roles(parallel, pick("local"), pick("accumulating"), pick("final"))


def candidates(group: Group, atomic: bool = False) -> list[Roles]:
    """Every legal choice of parallel axes among the members' dimensions, folded axes and intersections of these."""
    free = group.members[0].free
    if all(m.free == free and isinstance(m.node, Compute) and fold_of(m.expr) is None for m in group.members):
        return [Roles(free, group.members, (), ())]
    sets: dict[frozenset, None] = {}
    for m in group.members:
        sets[m.free] = None
        if m.bound:
            sets[m.free | m.bound] = None
            sets[m.bound] = None
        if isinstance(m.node, Scatter):
            sets[frozenset(a for i in m.index for a in i.atoms() if isinstance(a, Axis) and as_index(a) is i and m.index.count(i) == 1)] = None
    scans = frozenset(f.along for m in group.members if isinstance(f := fold_of(m.expr), Scan))
    for s in list(sets):
        if s & scans:
            sets[s - scans] = None
    for a in list(sets):
        for b in list(sets):
            if len(sets) < 48:
                sets[a & b] = None
    deps = inner_reads(group)
    found = []
    for s in sets:
        r = roles(group, s, deps, atomic)
        if isinstance(r, Roles):
            found.append(r)
    return found
