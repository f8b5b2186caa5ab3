"""The planner: which nodes share a kernel.

First small pointwise producers move into their readers by index substitution (`inline`), then groups are joined greedily along edges by the
bytes that joining saves. Every producer -> consumer edge that ends in two kernels leaves a Decision with its Reason and price.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..ir.expr import Reduce, Scan, walk
from ..ir.graph import Compute, Graph, Input, Opaque, Result, Scatter, fold, is_pointwise, reads
from ..ir.index import Axis, as_index
from . import beside, gpu, lines, prefixes
from .alike import Part, Planned, parts
from .axes import Group, Unifier, fold_of, remap, singleton
from .column_folds import sums_rows_across
from .cost import GRAIN, Hints, contiguous_axis, estimates, idle_lanes, node_bytes, parallelism, pinned_nodes, row_bytes, scattered, weight
from .legal import Roles
from .inline import inline
from .inplace import written_in_place
from .reason import Decision, Reason
from .roles import best_roles
from .recompute import recomputed
from .running_order import running_order

LATE = 256          # elements made of a complete sum, by one thread and one by one, that are cheaper than a kernel of their own: about a microsecond.
                    # An optimiser's step of 3 million elements behind the norm of all gradients: 26.5 ms with them, 4.8 without
IDLE = 1 << 19      # operations of lanes that are all alike that take no longer than a kernel of their own,
IDLE_A_BYTE = 8     # and those that take no longer than moving a byte: softplus of 4 x 32 x 128 steps of a state space model, beside their products
                    # with 16 states, took 243 us of its forward's 1.17 ms
LARGEST = 24        # members of one group: beyond, kernels stop compiling quickly
FOLLOWED = 4        # reads of one value by each of two groups, of which a pair is looked for that runs along the same axes


@dataclass(frozen=True, eq=False)
class Plan:
    """`steps` in running order: Group or Opaque. `stores[group]`: the nodes of the group that get memory. `roles[group]`: its parallel axes.
    `inplace`: stored nodes whose memory is that of an input which receives them."""
    graph: Graph
    steps: tuple
    stores: dict
    roles: dict
    decisions: tuple[Decision, ...]
    inplace: dict = field(default_factory=dict)


ROUNDS = 3          # plans at most: each moves values into readers for which computing them again is cheaper, and plans anew


def plan(graph: Graph, target) -> Plan:
    """Groups for every Compute and Scatter of `graph` (already simplified and inlined)."""
    known: dict = {}            # what a part says, or the nodes of one that was copied -> how it was planned
    made = _Planner(graph, target, known).run()
    for _ in range(ROUNDS - 1):
        moves = recomputed(made, estimates(graph, target), target)
        if not moves:
            break
        made = _Planner(inline(made.graph, target, moves), target, known).run()
    return made


def _components(a: Group, b: Group) -> bool:
    """Do both have components of one fold? They read alike: what is read at two places is aligned by the one that says most of the axes."""
    folds = [{f.key for m in g.members if isinstance(m.node, Compute) and isinstance(f := fold(m.node), Reduce)}
             for g in (a, b)]
    return bool(folds[0] & folds[1])


class _Planner:
    def __init__(self, graph: Graph, target, known: dict):
        self.graph, self.target, self.known = graph, target, known
        self.hints = estimates(graph, target)
        self.fresh = count(1000)
        self.pinned = pinned_nodes(graph)
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.sources = {n: reads(n) for n in graph.nodes}
        self.readers: dict = {n: [] for n in graph.nodes}
        for n in graph.nodes:
            for r in self.sources[n]:
                self.readers.setdefault(r, []).append(n)
        self.group: dict = {}             # node -> its Group (or the Opaque itself)
        self.roles: dict = {}
        self.first: dict = {}             # Group -> the first position of its nodes
        self.depth: dict = {}             # node -> a level behind all that it needs, and right before the first that needs it if any does
        for n in graph.nodes:
            self.depth[n] = 1 + max((self.depth.get(r, 0) for r in self.sources[n]), default=0)
        for n in reversed(graph.nodes):
            self.depth[n] = min((self.depth[r] for r in self.readers[n]), default=self.depth[n] + 1) - 1
        self.least: dict = {}             # Group -> the least depth of its nodes
        self.deepest = dict(self.depth)         # node -> the greatest depth in its group and in all that this needs
        self.refused: dict = {}           # (node, node) -> Reason
        self.part: dict = {}              # node -> its Part

    def run(self) -> Plan:
        self.group.update((n, n) for n in self.graph.nodes if isinstance(n, Opaque))
        found = parts(self.graph, self.sources, self.readers, self.pinned)
        self.part.update((n, p) for p in found for n in p.nodes)
        for p in found:
            if p.says not in self.known or not self._copied(self._like(p)):
                self._plan(p)
        if self.target.kind == "gpu" and not self.target.ordered:
            self._put_beside()
        return self._finish()

    def _plan(self, part: Part) -> None:
        """Groups for the nodes of `part`."""
        for n in part.nodes:
            g = singleton(n, self.fresh)
            self._place(g, best_roles(g, self.hints, self.target))
            asked: dict = {}          # (Group, Group) -> why they are not one: many partners of a node share a group
            for partner in self._partners(n):
                self._try(n, partner, asked)
        if part.says is not None:
            groups = tuple((g, self.roles[g]) for g in dict.fromkeys(self.group[n] for n in part.nodes))
            self.known[part.says] = Planned(part, groups, tuple((*pair, why) for pair, why in self.refused.items() if self.part.get(pair[1]) is part))

    def _like(self, part: Part) -> Planned:
        """How `part` is planned, as one before that says the same. One of the same nodes, of the round before, is as it was."""
        made = self.known.get(part.nodes)
        if made is None or made.part.names != part.names or made.part.says != part.says:
            made = self.known[part.nodes] = self.known[part.says].copied(part)
        return made

    def _copied(self, made: Planned) -> bool:
        """Takes over groups that were made for a part that says the same. False, and nothing changed, where that would be a circle through other
        parts' groups."""
        for g, r in made.groups:
            self._place(g, r)
        if any(self._between(g, g) for g, _ in made.groups if len(g.members) > 1):
            for n in made.part.nodes:
                del self.group[n]
            return False
        self.refused.update(((a, b), why) for a, b, why in made.refused)
        return True

    def _put_beside(self) -> None:
        """Contractions that do not need each other's results, and read the same few rows or are small, are one launch; small folds of equal extents
        are one, too."""
        groups = lambda: list(dict.fromkeys(self.group.values()))
        for family in beside.families(groups(), self.hints):
            self._launch(family)
        self._launch(beside.small(groups(), self.hints))
        for family in beside.small_folds(groups(), self.roles, self.hints):
            self._fold_beside(family)

    def _launch(self, groups: list[Group]) -> None:
        """Groups side by side, a few to a launch."""
        wholes: dict = {}                   # first group of a launch -> all of it so far
        def joins(line: list[Group], g: Group) -> bool:
            whole = wholes.get(line[0], line[0])
            apart = not self._direct(whole, g) and not self._between(whole, g) and not self._between(g, whole)
            if apart:
                wholes[line[0]] = self._beside(whole, g)
            return apart
        beside.together(groups, joins)

    def _fold_beside(self, family: list) -> None:
        """Groups whose axes are those of the first, or runs of them, in order, as few groups over the axes of one."""
        while family:
            (whole, axes), *rest = family
            family = []
            for g, own in rest:
                apart = not self._direct(whole, g) and not self._between(whole, g) and not self._between(g, whole)
                roles = self.roles[whole]
                as_runs = beside.runs(own, axes, self.roles[g].parallel, roles.parallel)
                if not apart or as_runs is None or len(whole.members) + len(g.members) > LARGEST:
                    family.append((g, own))
                    continue
                other = remap(g, as_runs)
                members = tuple(sorted(whole.members + other.members, key=lambda m: self.position[m.node]))
                whole = Group(axes, members)
                self._place(whole, Roles(roles.parallel, members, (), ()))

    def _direct(self, a: Group, b: Group) -> bool:
        """Does one read what the other makes?"""
        return any(s in y.nodes() for x, y in ((a, b), (b, a)) for n in x.nodes() for s in self.sources[n])

    def _beside(self, whole: Group, g: Group) -> Group:
        own = {a: Axis(next(self.fresh), a.extent) for a in g.axes}         # equal groups may have their axes in common
        other = remap(g, {a: as_index(x) for a, x in own.items()})
        members = tuple(sorted(whole.members + other.members, key=lambda m: self.position[m.node]))
        made = Group(whole.axes + other.axes, members)
        self._place(made, Roles(self.roles[whole].parallel | {own[a] for a in self.roles[g].parallel}, members, (), ()))
        return made

    def _place(self, g: Group, r: Roles | None) -> None:
        for m in g.members:
            self.group[m.node] = g
        self.first[g] = min(self.position[n] for n in g.nodes())
        self.least[g] = min(self.depth[n] for n in g.nodes())
        self.roles[g] = r if r is not None else Roles(frozenset(), g.members, (), ())
        deepest, stack = max(self.deepest[n] for n in g.nodes()), list(g.nodes())
        while stack:
            n = stack.pop()
            if self.deepest[n] < deepest:
                found = self.group.get(n)
                for o in found.nodes() if isinstance(found, Group) else (n,):
                    self.deepest[o] = deepest
                    stack += self.readers[o]

    # -- candidates ----------------------------------------------------------------------------------------------------
    def _partners(self, n) -> list:
        """Nodes whose group might take `n`: its producers, and other readers of what it reads; most bytes first."""
        found: dict = {}
        for p in self.sources[n]:
            size = node_bytes(p, self.hints) if not isinstance(p, Opaque) else 0
            if isinstance(p, (Compute, Scatter)):
                found[p] = max(found.get(p, 0), 2 * size)
            if isinstance(p, (Opaque,)):
                continue
            for s in self.readers.get(p, ()):
                if s is not n and s in self.group and isinstance(s, (Compute, Scatter)):
                    found[s] = max(found.get(s, 0), size)
        found = {p: size for p, size in found.items() if self.part[p] is self.part[n]}
        return sorted(found, key=lambda p: -found[p])[:12]

    def _try(self, n, partner, asked: dict) -> None:
        a, b = self.group[partner], self.group[n]
        if a is b:
            return
        if (a, b) not in asked:
            reason = self._join(a, b)
            refused = isinstance(reason, Reason)
            asked[a, b] = None if refused and (self._traded(a, b, reason) or self._gathered(a, b, reason)) else reason
        if isinstance(asked[a, b], Reason):
            self.refused[(partner, n)] = asked[a, b]

    def _traded(self, a: Group, b: Group, reason: Reason) -> bool:
        """Of folds along rows and what is made of them along the same rows (`a`), the latter joins folds across those rows (`b`) that do not fit
        beside the former: about as many bytes move, but no program has to hold a row. Says whether it did."""
        if self.target.kind != "gpu" or self.target.ordered or reason.code not in gpu.UNHELD:
            return False
        rows = frozenset(x for m in a.members for x in m.bound & self._made_of(m, a))
        late = [m.node for m in a.members if rows & m.free and (fold_of(m.expr) is not None or any(s in a.nodes() for s in self.sources[m.node]))]
        early = [n for n in a.nodes() if n not in late]
        if not late or not early or any(s in late for n in early for s in self.sources[n]):
            return False
        made = [self._group(early), self._group([*late, *b.nodes()])]
        moved = lambda *parts: sum(self._moved(x) for x in parts)
        if None in made or moved(early, [*late, *b.nodes()]) > gpu.MORE * moved(a.nodes(), b.nodes()):
            return False
        roles = [best_roles(g, self.hints, self.target) for g in made]
        if any(r is None or gpu.infeasible(g, r, self.hints, self.target) is not None for g, r in zip(made, roles)):
            return False
        before = [(g, self.roles[g]) for g in (a, b)]
        for g, r in zip(made, roles):
            self._place(g, r)
        if any(self._between(g, g) for g in made):          # a circle, through the other one or through further groups
            for g, r in before:
                self._place(g, r)
            return False
        return True

    def _gathered(self, a: Group, b: Group, reason: Reason) -> bool:
        """Folds, what is made of them and of what they fold, and all groups between the two are one where the programs of clusters hold side by side
        what both read. Says whether they are."""
        if self.target.kind != "gpu" or self.target.ordered or reason.code != "cycle" \
                or not any(n in b.reads and node_bytes(n, self.hints) >= lines.LEAST_HELD for n in a.reads):
            return False
        found = {a, b} | self._all_between(a, b) | self._all_between(b, a)
        if any(not isinstance(g, Group) or isinstance(g.members[0].node, Scatter) for g in found) or sum(len(g.members) for g in found) > LARGEST \
                or len({id(self.part.get(n)) for g in found for n in g.nodes()}) > 1:
            return False
        made, *rest = sorted(found, key=self.first.__getitem__)
        for g in rest:
            made = self._unify(made, g) if not isinstance(made, Reason) else made
        roles = best_roles(made, self.hints, self.target) if not isinstance(made, Reason) else None
        if roles is None or not gpu.side_by_side(made, roles, self.hints, self.target) \
                or gpu.infeasible(made, roles, self.hints, self.target) is not None:
            return False
        self._place(made, roles)
        return True

    def _all_between(self, a: Group, b: Group) -> set:
        """What needs `a` and is needed by `b`: groups, and what runs by itself; both of them with it."""
        last = max(self.deepest[n] for n in b.nodes())

        def around(g: Group, towards: dict, within: Callable[[Any], bool]) -> set:
            found, stack = {g}, [g]
            while stack:
                x = stack.pop()
                for n in x.nodes() if isinstance(x, Group) else (x,):
                    for r in towards.get(n, ()):
                        y = self.group.get(r, r)
                        if y not in found and within(r):
                            found.add(y)
                            stack.append(y)
            return found
        behind = around(a, self.readers, lambda r: self.deepest.get(r, 0) <= last)        # what `b` needs is no deeper than it
        return behind & around(b, self.sources, lambda r: self.group.get(r, r) in behind)

    def _made_of(self, m, g: Group) -> frozenset:
        """The axes along which group `g` makes something of its member `m`."""
        reached, axes = {m.node}, frozenset()
        for q in g.members:
            if any(s in reached for s in self.sources[q.node]):
                reached.add(q.node)
                axes |= q.free
        return axes

    def _moved(self, nodes) -> int:
        """Bytes that a kernel of `nodes` reads and writes. What is cheap enough is computed again where it is read."""
        inside = set(nodes)
        kept = lambda n: n in self.pinned or not (isinstance(n, Compute) and is_pointwise(n))
        read = {s for n in nodes for s in self.sources[n] if s not in inside and not isinstance(s, Opaque) and kept(s)}
        written = [n for n in nodes if n in self.pinned or kept(n) and any(r not in inside for r in self.readers[n])]
        return sum(node_bytes(n, self.hints) for n in (*read, *written))

    def _group(self, nodes) -> Group | None:
        """The group of `nodes`, or None where they have no axes in common."""
        made = None
        for n in sorted(nodes, key=self.position.__getitem__):
            made = singleton(n, self.fresh) if made is None else self._unify(made, singleton(n, self.fresh))
            if isinstance(made, Reason):
                return None
        return made

    def _join(self, a: Group, b: Group) -> Reason | None:
        """Joins the two groups if that is legal and pays; else says why not."""
        if isinstance(a.members[0].node, Scatter) or isinstance(b.members[0].node, Scatter):
            return Reason("scatter", "not attempted")
        if a.members[0].node.device != b.members[0].node.device:
            return Reason("device", "illegal")
        if len(a.members) + len(b.members) > LARGEST:
            return Reason("too_large", "infeasible", f"more than {LARGEST} values")
        if self._apart(a, b):
            return Reason("no_common_axes", "unprofitable", "they share single numbers only")
        if self._between(a, b) or self._between(b, a):
            return Reason("cycle", "illegal")
        joined = self._unify(a, b)
        if isinstance(joined, Reason):
            return joined
        roles = best_roles(joined, self.hints, self.target)
        if roles is None:
            return Reason("no_common_axes", "illegal")
        reason = self._worth(a, b, joined, roles)
        if reason is None:
            self._place(joined, roles)
        return reason

    def _apart(self, a: Group, b: Group) -> bool:
        """Would no axis of one be an axis of the other, so that one thread would run all? They share nothing but single numbers (a seed, say)."""
        mine, other = a.reads, b.reads
        return (any(self.roles[g].parallel for g in (a, b)) and not any(n in other for n in a.nodes()) and not any(n in mine for n in b.nodes())
                and not any(mine[n] and other[n] for n in mine.keys() & other.keys()))

    def _between(self, a: Group, b: Group) -> bool:
        """True when some node outside both depends on `a` and `b` depends on it."""
        least = self.least[a]
        targets, others_of_b = set(a.nodes()), set(b.nodes()) - set(a.nodes())
        inside = targets | others_of_b
        stack = [r for n in b.nodes() for r in self.sources[n] if r not in inside]
        seen: set = set()
        while stack:
            n = stack.pop()
            if n in targets:
                return True
            if n in seen:
                continue
            seen.add(n)
            g = self.group.get(n)
            others = g.nodes() if isinstance(g, Group) else (n,)
            if self.deepest.get(n, -1) < least:
                continue
            for o in others:
                seen.add(o)
                stack.extend([r for r in self.sources[o] if r not in seen and r not in others_of_b])
        return False

    def _unify(self, a: Group, b: Group) -> Group | Reason:
        u = Unifier(a, b, self.fresh)
        for first, second, flip in ((a, b, False), (b, a, True)):
            made = {m.node: m for m in first.members}
            for e in (e for m in second.members for e in m.loads if e.node in made):
                if not all(u.equate(y, x) if flip else u.equate(x, y) for x, y in zip(made[e.node].dims, e.index)):
                    return Reason("misaligned", "illegal")
        shared: dict = {}
        for side, g in ((0, a), (1, b)):
            for m in g.members:
                for e in m.loads:
                    shared.setdefault(e.node, ([], []))[side].append(e)
        both = [(node, la, lb) for node, (la, lb) in shared.items() if la and lb]
        most = _components(a, b)
        axes = lambda e: -len(frozenset().union(*(i.axes() for i in e.index))) * most
        for _, la, lb in sorted(both, key=lambda x: -node_bytes(x[0], self.hints)):
            la, lb = sorted(la, key=axes), sorted(lb, key=axes)
            any(all(u.follow(x, y) for x, y in zip(ea.index, eb.index)) for ea in la[:FOLLOWED] for eb in lb[:FOLLOWED])
        joined = u.result(a, b)
        members = tuple(sorted(joined.members, key=lambda m: self.position[m.node]))
        return Group(joined.axes, members)

    # -- profit ----------------------------------------------------------------------------------------------------------
    def _saved(self, a: Group, b: Group) -> int:
        """Bytes that need not move when both are one kernel."""
        saved = 0
        inside = set(a.nodes()) | set(b.nodes())
        ra = {r for n in a.nodes() for r in self.sources[n]}
        rb = {r for n in b.nodes() for r in self.sources[n]}
        for made, used in ((a, rb), (b, ra)):
            for n in made.nodes():
                if n in used:
                    size = node_bytes(n, self.hints)
                    saved += size
                    if n not in self.pinned and all(r in inside for r in self.readers[n]):
                        saved += size
        for n in ra & rb:
            if n not in inside and not isinstance(n, Opaque):
                saved += node_bytes(n, self.hints)
        return saved

    def _worth(self, a: Group, b: Group, joined: Group, roles: Roles) -> Reason | None:
        hints, t = self.hints, self.target
        saved = self._saved(a, b)
        if saved <= 0:
            return Reason("no_saving", "unprofitable")
        if not roles.parallel and any(self.roles[g].parallel for g in (a, b)) and not prefixes.in_blocks(joined, hints, t):
            return Reason("no_common_axes", "unprofitable", "one thread would run all, at any size")
        if t.kind == "gpu":
            if sums_rows_across(joined, roles, hints, t) and self._written_of(roles, hints):
                return Reason("no_saving", "unprofitable", "columns are summed where what is made of the rows' sums is written")
            share = saved / max(1, self._moved(a.nodes()) + self._moved(b.nodes()))
            return gpu.unprofitable(a, b, joined, roles, (self.roles[a], self.roles[b]), hints, t, share) or self._too_large(joined)
        work = max(hints.count(m.free | m.bound) for m in joined.members)
        v = contiguous_axis(joined, hints)
        if work > GRAIN and parallelism(roles, v, hints) < 2 * t.threads:
            before = min(parallelism(self.roles[g], v, hints) for g in (a, b))
            if before >= 2 * t.threads:
                return Reason("no_parallelism", "unprofitable", f"{hints.count(roles.parallel)} rows")
        for made, used in ((a, b), (b, a)):
            apart = [n for n in used.nodes() if any(s in made.nodes() for s in self.sources[n])]
            if apart and (times := scattered(made.nodes(), apart, joined, roles, saved, hints)) is not None:
                return Reason("no_saving", "unprofitable", f"{saved} bytes for {times} loops in steps")
        idle = max(idle_lanes(g.nodes(), joined, hints, t.vector_bytes // 4) for g in (a, b))
        if idle > max(IDLE, IDLE_A_BYTE * saved):
            return Reason("no_saving", "unprofitable", f"{saved} bytes for {idle} operations in lanes that are all alike")
        after = self._after(roles)
        if after > LATE:
            return Reason("no_parallelism", "unprofitable", f"{after} elements by one thread, when the others are done")
        partial = sum(hints.count(m.free) * 8 for m in roles.accumulating)
        if partial > t.l2 // 2:
            return Reason("accumulators", "infeasible", f"{partial} bytes a thread")
        folds = any(isinstance(e, (Reduce, Scan)) for m in roles.local for e in walk(m.expr))
        if folds and work > GRAIN and row_bytes(joined, roles, hints) > 8 * t.l2:
            return Reason("no_cache", "unprofitable", f"{row_bytes(joined, roles, hints)} bytes a row")
        return self._too_large(joined)

    def _written_of(self, roles: Roles, hints: Hints) -> bool:
        """Is a value made, by another kernel, of the sums that programs leave of rows, as large as what these are summed of?"""
        most = max(hints.count(m.free | m.bound) for m in roles.accumulating)
        todo = [m.node for m in roles.accumulating]
        for n in todo:                      # grows
            if hints.extents(n.shape) >= most:
                return True
            todo += [r for r in self.readers[n] if isinstance(r, Compute) and r not in todo]
        return False

    def _after(self, roles: Roles) -> int:
        """Elements that are made of complete folds along axes that none of these folds has: the thread that completes them makes them, one by one."""
        own = frozenset(a for m in roles.accumulating for a in m.free)
        return max((self.hints.count(m.free) for m in roles.final if m.free - own), default=0)

    @staticmethod
    def _too_large(joined: Group) -> Reason | None:
        if sum(weight(m.expr) for m in joined.members) > 2000:
            return Reason("too_large", "infeasible", "more than 2000 operations an element")
        return None

    # -- result ------------------------------------------------------------------------------------------------------------
    def _finish(self) -> Plan:
        groups = list(dict.fromkeys(self.group.values()))
        stores = {}
        for g in groups:
            if isinstance(g, Group):
                inside = set(g.nodes())
                stores[g] = tuple(n for n in g.nodes() if n in self.pinned or any(r not in inside for r in self.readers[n]))
        steps = tuple(running_order(groups, self.group, self.sources, self.position))
        return Plan(self.graph, steps, stores, {g: self.roles[g] for g in groups if isinstance(g, Group)}, tuple(self._decisions()),
                    written_in_place(self.graph, steps, stores))

    def _decisions(self):
        for n in self.graph.nodes:
            if isinstance(n, (Input, Result)):
                continue
            for p in self.sources[n]:
                if isinstance(p, Input) or (isinstance(p, Opaque)):
                    continue
                source = self.group.get(p.opaque if isinstance(p, Result) else p)
                mine = self.group[n]
                size = node_bytes(p, self.hints)
                if source is mine:
                    yield Decision(p, n, None, size)
                elif isinstance(source, Opaque) or isinstance(mine, Opaque):
                    yield Decision(p, n, Reason("opaque", "illegal"), size)
                elif self.part[p] is not self.part[n]:
                    yield Decision(p, n, Reason("cycle", "illegal"), size)
                else:
                    yield Decision(p, n, self.refused.get((p, n)) or Reason("no_saving", "not attempted"), size)
