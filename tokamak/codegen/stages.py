"""The last stages over a whole plan: schedule, lower, render. A group that fits no loop tree is taken apart and its members become kernels of their
own."""
from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType

from ..errors import InternalError
from ..fuse.alike import correspondence, renaming
from ..fuse.axes import Group, singleton
from ..fuse.cost import Hints, estimates, rounded_sums
from ..fuse.legal import Roles
from ..fuse.plan import Plan
from ..fuse.reason import Decision, Reason
from ..fuse.roles import best_roles, plainest_roles
from ..ir.expr import Expr
from ..schedule.body import Body, Memory, body, coalesce, renamed, shared_extremes, sought_places, unfolded, whole_words
from ..schedule import beside, matmul, means, persistent, prefixes, row_moments, rows, tile_sequence, tiles
from ..schedule.edges import with_edges
from ..schedule.either import joined
from ..schedule.flattened import flattened
from ..schedule.pieces import in_pieces, lanes_in_pieces
from ..schedule.schedule import BLOCK, Schedule, choose, in_buffers, vector_axis
from ..schedule.tile_schedule import TileSchedule
from . import triton, tuned
from ..runtime.gpu_build import GpuUnit
from .beside import lower_beside
from .c import render
from .host import Built, BuiltTiles, Part
from .kernel import Kernel
from .lower import lower
from .matmul import lower_matmul
from .means import lower_means
from .persistent import lower_persistent
from .prefixes import lower_prefixes
from .rows import lower_rows
from .scope import Unschedulable
from .tile_kernel import TileKernel
from .tile_parts import lower_tiles
from .tuned import Table
from .vector import lower_vector

_NONE: Table = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A plan with the Body and Schedule of each group. `copies`: group -> (the first of its kind, what its body has in the place of which memory of
    that)."""
    plan: Plan
    bodies: dict[Group, tuple[Body, Schedule | TileSchedule]]
    copies: dict[Group, tuple[Group, dict]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Lowered:
    """A plan (members of groups that did not fit stand alone) with the Kernel of each group, or the TileKernels."""
    plan: Plan
    bodies: dict[Group, tuple[Body, Schedule | TileSchedule]]
    kernels: dict[Group, Kernel | tuple[TileKernel, ...]]


def schedule_plan(plan: Plan, target, table: Table = _NONE) -> Scheduled:
    """Body and schedule for every group of `plan`. `table`: schedules for GPUs that were found by trying."""
    hints, memories = estimates(plan.graph, target), {}
    for node, into in plan.inplace.items():
        memories[node] = memories[into] = Memory(into, into.dtype)
    bodies, copies, kinds, before, last = {}, {}, {}, None, None
    shared, rounding = frozenset(memories), rounded_sums(plan.graph) if target.kind == "gpu" and target.fast else frozenset()
    memories.update((n, Memory(n, n.dtype, rounds=True)) for n in rounding if n not in memories)
    for g in plan.steps:
        made = None
        if isinstance(g, Group):
            kind = g.kind or g, tuple((n in plan.stores[g], n in rounding) for n in g.nodes())
            first, b, s = kinds.get(kind, (None, None, None))
            alone = not shared.intersection((*g.reads, *g.nodes()))
            if first is not None and alone:
                copies[g] = first, _memories(correspondence(first, g), memories)
                made = renamed(b, renaming(copies[g][1]), copies[g][1]), s
            else:
                made = _schedule(g, plan, target, hints, memories, table)
                if alone:
                    kinds[kind] = g, *made
        if made is not None:
            bodies[g] = made if target.kind != "gpu" else (made[0], tile_sequence.after(made, before, hints))
            if getattr(bodies[g][1], "backward", False):
                bodies[last] = before[0], tile_sequence.leaving(before, hints)
            elif target.kind == "gpu" and (found := tile_sequence.rows_last(made, before, hints)) is not None:
                bodies[last] = before[0], found
        if made is None or target.kind != "gpu" or not tile_sequence.small(made[0], hints):
            before, last = made, g
    return Scheduled(plan, bodies, copies)


def _memories(names: dict, memories: dict) -> dict:
    """`names` (see `correspondence`) with the nodes' memories in their place, which are made where there are none."""
    def memory(x):
        if isinstance(x, Expr):
            return x
        if x not in memories:
            memories[x] = Memory(x, x.dtype)
        return memories[x]
    return {memory(x): memory(y) for x, y in names.items()}


def _copied(kernels: tuple[TileKernel, ...], names: dict) -> tuple[TileKernel, ...]:
    """`kernels` of a group for another of its kind."""
    rename = renaming(names)

    def copied(k: TileKernel) -> TileKernel:
        place = lambda at: (names.get(at[0], at[0]), at[1])
        params = tuple(replace(p, source=names.get(p.source, p.source)) if p.kind in ("memory", "value") else
                       replace(p, source=tuple(map(place, p.source))) if p.kind == "order" else p for p in k.params)
        return replace(k, params=params, body=renamed(k.body, rename, names), sources={v: rename(e) for v, e in k.sources.items()},
                       boxes=tuple(replace(b, memory=names.get(b.memory, b.memory), beside=b.beside and place(b.beside)) for b in k.boxes),
                       otherwise=copied(k.otherwise) if k.otherwise is not None else None)
    return tuple(map(copied, kernels))


def _schedule(g: Group, plan: Plan, target, hints: Hints, memories: dict, table: Table = _NONE) -> tuple[Body, Schedule]:
    b = coalesce(body(g, plan.stores[g], plan.roles[g].parallel, memories))
    if target.kind == "gpu":
        b = joined(shared_extremes(b))
        if (stays := persistent.choose(b, hints, target)) is not None:
            return b, stays
        if (mean := means.choose(b, hints, target)) is not None:
            return mean
        if (product := matmul.choose(b, hints, target)) is not None:
            return rows.whole(*product, hints, target) or product
        if (together := beside.choose(b, hints, target)) is not None:
            return together
        if (stepped := rows.choose(b, hints, target)) is not None:
            return b, stepped
        if (blocks := prefixes.choose(b, hints, target)) is not None:
            return b, blocks
        b, chosen = whole_words(flattened(b)), lambda b: tuned.choose(b, hints, target, table)
        if (moments := row_moments.choose(b, hints, target, chosen)) is not None:
            return moments
        s, plain = chosen(b), flattened(unfolded(b))
        return (b, s) if plain is b or s.shift is not None else (plain, chosen(plain))
    b = sought_places(b, hints, target)
    b = in_pieces(b, vector_axis(b, hints, target), hints, target.threads)
    b = lanes_in_pieces(b, vector_axis(b, hints, target))
    s = choose(b, hints, target)
    inside = with_edges(b, s.vector if s.block == BLOCK and not s.reused else None, s.lanes, hints, target)
    return (b, s) if inside is b else (inside, choose(inside, hints, target))


def lower_body(b: Body, s: Schedule | TileSchedule, hints: Hints, target, table: Table = _NONE) -> Kernel | tuple[TileKernel, ...]:
    """The kernel of `b` as `s` says; for a GPU its kernels, in running order. Raises Unschedulable."""
    if isinstance(s, persistent.PersistentSchedule):
        return lower_persistent(b, s, hints, target.name, target.fast)
    if isinstance(s, beside.BesideSchedule):
        return lower_beside(b, s, hints, target.name, target.fast)
    if target.kind == "gpu":
        kinds = ((rows.RowsSchedule, lower_rows), (matmul.VectorSchedule, lower_vector), (means.MeansSchedule, lower_means),
                 (matmul.MatmulSchedule, lower_matmul), (prefixes.PrefixSchedule, lower_prefixes), (TileSchedule, lower_tiles))
        lowered = next(how for kind, how in kinds if isinstance(s, kind))
        return lowered(b, s, hints, target.name, lambda again: tuned.choose(again, hints, target, table), target.fast)
    return lower(b, s, hints)


def _lowered(made: tuple, hints: Hints, target, table: Table = _NONE) -> tuple[tuple, Kernel | tuple[TileKernel, ...]]:
    """((body, schedule), kernel): the schedule that was chosen, or, where that one's loops do not nest, the one with partial results in a buffer, or
    in which folds that need no other one stand first, too, or in which what is made of a fold stands right behind it."""
    b, s = made
    if not isinstance(s, Schedule):
        return made, lower_body(b, s, hints, target, table)
    plain = in_buffers(s) if not target.ordered else s
    for chosen, how in (*((x, {}) for x in dict.fromkeys((s, plain))), (plain, {"early": True})):
        try:
            return (b, chosen), lower(b, chosen, hints, **how)
        except Unschedulable:
            pass
    return (b, plain), lower(b, plain, hints, apart=True)


def lower_plan(scheduled: Scheduled, target, table: Table = _NONE) -> Lowered:
    """A kernel for every group."""
    plan, bodies, kernels = scheduled.plan, dict(scheduled.bodies), {}
    alike = lambda g, first: isinstance(kernels.get(first), tuple) and bodies[g][1] == bodies[first][1]
    hints = estimates(plan.graph, target)
    for g in scheduled.plan.steps:
        if not isinstance(g, Group):
            continue
        if g in scheduled.copies and alike(g, scheduled.copies[g][0]):
            kernels[g] = _copied(kernels[scheduled.copies[g][0]], scheduled.copies[g][1])
            continue
        try:
            if len(g.members) > 1 and target.kind == "gpu" and matmul.left_over(*bodies[g]):
                raise Unschedulable("no tile holds a contraction and all that was put beside it")
            bodies[g], kernels[g] = _lowered(bodies[g], hints, target, table)
        except Unschedulable as why:
            del bodies[g]
            if len(g.members) == 1:
                parts = [g]
            else:
                plan, parts = taken_apart(plan, g, str(why), target)
            for part in parts:
                bodies[part], kernels[part] = _alone(part, plan, target, hints)
    return Lowered(plan, bodies, kernels)


def _alone(g: Group, plan: Plan, target, hints: Hints) -> tuple[tuple, Kernel | tuple[TileKernel, ...]]:
    """(body, schedule) and kernel of a group of one node; on a GPU by the plainest schedule where the chosen one does not fit."""
    memories = {n: Memory(plan.inplace[n], n.dtype) for n in g.nodes() if n in plan.inplace}
    memories.update((m.node, m) for m in list(memories.values()))
    made = _schedule(g, plan, target, hints, memories)
    try:
        return _lowered(made, hints, target)
    except Unschedulable as why:
        if target.kind != "gpu":
            raise InternalError(f"no loop tree for {plan.graph.origin(g.members[0].node)}: {why}") from why
    b = coalesce(body(g, plan.stores[g], plainest_roles(g, target).parallel, memories))
    made = b, tiles.plainest(b, hints, target)
    return made, lower_body(*made, hints, target)


def taken_apart(plan: Plan, g: Group, why: str, target) -> tuple[Plan, list[Group]]:
    """`plan` with the members of `g` as groups of their own, each with memory."""
    hints, fresh = estimates(plan.graph, target), count(1_000_000)
    parts = [singleton(m.node, fresh) for m in g.members]
    steps = []
    for s in plan.steps:
        steps += parts if s is g else [s]
    stores, roles = dict(plan.stores), dict(plan.roles)
    del stores[g], roles[g]
    for p in parts:
        stores[p] = p.nodes()
        found = best_roles(p, hints, target)
        roles[p] = found if found is not None else Roles(frozenset(), p.members, (), ())
    inside = set(g.nodes())
    decisions = tuple(Decision(d.producer, d.consumer, Reason("loop_tree", "infeasible", why), d.bytes)
                      if d.reason is None and d.consumer in inside and d.producer in inside else d for d in plan.decisions)
    inplace = {n: into for n, into in plan.inplace.items() if n not in inside}
    return Plan(plan.graph, tuple(steps), stores, roles, decisions, inplace), parts


_PLACEHOLDER = "tk_kernel"
MULTIPROCESSORS = 132       # of an H200; FEW programs of each are told from many
FEW = 1, 2, 4


def render_plan(lowered: Lowered) -> dict[Group, Built | BuiltTiles]:
    """Text of every kernel, named by what it says: equal kernels have equal text, whatever program they come from."""
    out: dict[Group, Built | BuiltTiles] = {}
    for g, k in lowered.kernels.items():
        if not isinstance(k, Kernel):
            out[g] = BuiltTiles(g, parts(k))
            continue
        prelude, text = render(k, _PLACEHOLDER)
        key = "k" + hashlib.sha256("".join((*prelude, text)).encode()).hexdigest()[:16]
        out[g] = Built(g, k, text.replace(_PLACEHOLDER, key), key, prelude)
    return out


def parts(kernels: tuple[TileKernel, ...]) -> tuple[Part, ...]:
    """Each of them with its text, named by what it says."""
    return tuple(_part(k) for k in kernels)


def _part(k: TileKernel) -> Part:
    text, s = triton.render(k, _PLACEHOLDER), k.schedule
    otherwise = triton.render(k.otherwise, _PLACEHOLDER) if k.otherwise is not None else ""
    signature, divisible = triton.signature(k), triton.divisible(k)
    boxes, few = triton.boxes(k), next((n for n in FEW if 0 < k.programs <= n * MULTIPROCESSORS), 0)
    fields = (text, signature, sorted(divisible), s.warps, s.stages, s.sharers, s.registers, *((otherwise, boxes) if boxes else ()),
              *([few] if few else []))
    key = "k" + hashlib.sha256(repr(fields).encode()).hexdigest()[:16]
    return Part(k, GpuUnit(key, text.replace(_PLACEHOLDER, key), signature, divisible, s.warps, s.stages, registers=s.registers, cluster=s.sharers,
                           otherwise=otherwise.replace(_PLACEHOLDER, key), boxes=boxes, few=few))
