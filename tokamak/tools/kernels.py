"""What each kernel of a compiled graph does: operations, the user's lines, bytes against the fewest possible, FLOPs, schedule, launch words.

Bytes are counted in the kernel's loops: a loop that reads a memory counts the elements that its addresses reach, once. A further loop over the same
elements within one parallel iteration counts again only if what an iteration touches exceeds the second-level cache. The fewest possible is each
memory once.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..codegen.kernel import Kernel, Loop, Phase, Read, Write
from ..fuse.axes import Group
from ..fuse.cost import Hints, node_bytes
from ..ir import ops
from ..ir.expr import Op, Reduce, Scan, walk
from ..ir.graph import Opaque, Result
from ..ir.index import Index, Size
from ..runtime.program import Launch
from ..schedule.body import Body, exprs_of
from .names import group_names, module, operations
from .record import GraphRecord
from .sources import Source, source_of, sources_of


@dataclass(frozen=True)
class Access:
    """A memory that a kernel reads or writes. `fewest`: the bytes it touches, each once; `bytes`: what its loops move."""
    name: str
    type: str
    fewest: int
    bytes: int


@dataclass(frozen=True)
class Opaqued:
    """An operation that torch runs, and why."""
    name: str
    op: str
    reason: str
    reads: int
    writes: int
    bytes: int
    source: Source | None
    module: str


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a graph. `words`: what it is launched with, by the name in the C text; `key` stands for its text; `how` it was built.
    `bytes`: what its loops move; `fewest`: each memory once."""
    name: str
    key: str
    operations: tuple[str, ...]
    sources: tuple[Source, ...]
    module: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    flops: int
    schedule: str
    words: tuple[tuple[str, str], ...]
    how: str
    compile_seconds: float
    bytes: int
    fewest: int


def kernels(record: GraphRecord) -> list[KernelInfo]:
    """The kernels of a graph in running order; none when the compile stopped before they were lowered."""
    lowered = record.values.get("lower")
    groups = [s for s in lowered.plan.steps if isinstance(s, Group)] if lowered is not None else []
    names, launches = group_names(record, lowered.plan) if groups else {}, launch_steps(record)
    return [_info(record, g, names[g], launches.get(g)) for g in groups]


def launch_steps(record: GraphRecord) -> dict[Group, Launch]:
    """The step that launches each group's kernel."""
    program = record.values.get("program")
    if program is None:
        return {}
    groups = [s for s in record.values["lower"].plan.steps if isinstance(s, Group)]
    return dict(zip(groups, (s for s in program.steps if isinstance(s, Launch)), strict=True))


def _info(record: GraphRecord, g: Group, name: str, launch: Launch | None) -> KernelInfo:
    lowered = record.values["lower"]
    graph, (body, schedule), kernel = lowered.plan.graph, lowered.bodies[g], lowered.kernels[g]
    hints, origins = Hints(graph.hints), operations(graph, g.nodes(), record.calls)
    reads, writes = accesses(record, graph, kernel, hints, record.values["target"].l2)
    build = record.units.get(launch.kernel) if launch is not None else None
    return KernelInfo(
        name=name, key=launch.kernel if launch is not None else "", operations=tuple(o.op for o in origins),
        sources=sources_of(origins), module=module(origins), reads=reads, writes=writes, flops=flops(body, hints), schedule=str(schedule),
        words=tuple(zip((p.name for p in kernel.params), _words(record, graph, kernel, launch))),
        how=build.how if build is not None else "", compile_seconds=build.seconds if build is not None else 0.0,
        bytes=sum(a.bytes for a in (*reads, *writes)), fewest=sum(a.fewest for a in (*reads, *writes)))


def _words(record: GraphRecord, graph, kernel: Kernel, launch: Launch | None) -> Iterator[str]:
    """What each parameter is: the user's name of a tensor, the text of a number."""
    for n, p in enumerate(kernel.params):
        if p.kind == "memory":
            yield record.label(graph, p.source.node)
        else:
            yield launch.words[n][1] if launch is not None else str(p.source)


def flops(body: Body, hints: Hints) -> int:
    """Arithmetic operations: each distinct sub-expression once for all coordinates it depends on, each fold and update once an element."""
    total = 0
    for e in walk(*exprs_of(body)):
        if isinstance(e, Op):
            total += ops.OPS[e.name].flops * hints.count(e.free)
        elif isinstance(e, Reduce):
            total += hints.count(e.free | frozenset(e.over))
        elif isinstance(e, Scan):
            total += hints.count(e.free)
    return total + sum(hints.count(s.axes) for s in body.stores if s.monoid not in (None, "last"))


# -- bytes ---------------------------------------------------------------------------------------------------------------
def type_text(node) -> str:
    return f"{node.dtype}[{', '.join(map(repr, node.shape))}]"


def accesses(record: GraphRecord, graph, kernel: Kernel, hints: Hints, cache: int) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """What `kernel` reads and what it writes; `cache` in bytes."""
    memories = {p.name: p.source.node for p in kernel.params if p.kind == "memory"}
    passes: dict[tuple[str, bool], dict] = {}              # (memory, written?) -> phase -> loop -> bytes of one pass
    touched: dict[int, dict[str, int]] = {}                # phase -> memory -> bytes of one parallel iteration
    for number, phase in enumerate(kernel.phases):
        for s, loops in _statements((*phase.once, *phase.body), ()):
            if not isinstance(s, (Read, Write)) or s.memory not in memories:
                continue
            whole, part = _footprint(s, phase, loops, memories[s.memory], hints)
            held = touched.setdefault(number, {})
            held[s.memory] = max(held.get(s.memory, 0), part)
            updates = isinstance(s, Write) and s.monoid not in (None, "last")
            for written in (True, False) if updates else (isinstance(s, Write),):
                found = passes.setdefault((s.memory, written), {}).setdefault(number, {})
                found[id(loops[-1]) if loops else 0] = max(found.get(id(loops[-1]) if loops else 0, 0), whole)

    def access(name: str, phases: dict) -> Access:
        moved = sum(sum(p.values()) if sum(touched[n].values()) > cache else max(p.values()) for n, p in phases.items())
        fewest = max(b for p in phases.values() for b in p.values())
        return Access(record.label(graph, memories[name]), type_text(memories[name]), fewest, moved)
    made = [(written, access(m, p)) for (m, written), p in passes.items()]
    return tuple(a for written, a in made if not written), tuple(a for written, a in made if written)


def _statements(items, loops: tuple) -> Iterator[tuple[Any, tuple]]:
    """(statement, the loops around it) of a phase."""
    for s in items:
        if isinstance(s, Loop):
            yield from _statements(s.items, (*loops, s))
        else:
            yield s, loops


def _footprint(s: Read | Write, phase: Phase, loops: tuple, node, hints: Hints) -> tuple[int, int]:
    """Bytes that all iterations of an access reach, each once, and those of one parallel iteration."""
    parallel = {a for a, _ in phase.parallel}
    around = {*parallel, *(loop.axis for loop in loops)}
    axes = around if s.mode == "gather" or fetched(s.address) else s.address.axes() & around
    size = node.dtype.bytes
    whole = min(hints.count(axes) * size, node_bytes(node, hints))
    part = hints.count(a for a in axes if a not in parallel and not (phase.block and a is phase.vector)) * size
    if phase.block and phase.vector in axes:
        part *= min(phase.block, hints(phase.vector.extent))
    return whole, min(part, whole)


def fetched(address: Index) -> bool:
    """Does an address hold an index that the kernel has read from memory (f0, ...)?"""
    return any(isinstance(a, Size) and a.name.startswith("f") for a in address.atoms())


# -- opaque calls and totals ---------------------------------------------------------------------------------------------
def opaques(record: GraphRecord) -> list[Opaqued]:
    """The calls of a graph that torch makes, in running order."""
    plan = plan_of(record)
    if plan is None:
        return []
    hints, graph = Hints(plan.graph.hints), plan.graph
    views = {c.name for c in record.calls if c.view}
    out = []
    for s in plan.steps:
        if isinstance(s, Opaque):
            at = graph.origin(s)
            made = [n for n in graph.nodes if isinstance(n, Result) and n.opaque is s]
            moved = () if at.name in views else (*s.reads, *made)
            out.append(Opaqued(at.name, at.op, s.reason, 0 if at.name in views else len(s.reads), 0 if at.name in views else len(made),
                               sum(node_bytes(n, hints) for n in moved), source_of(at), module((at,))))
    return out


def plan_of(record: GraphRecord):
    """The plan that ran, or the latest that there is; None before there is one."""
    later = record.values.get("lower") or record.values.get("schedule")
    return later.plan if later is not None else record.values.get("fuse")


@dataclass(frozen=True)
class Memory:
    """`operations`: kernels or calls of torch; `accesses`: tensors that these read or write; `bytes` of them."""
    operations: int = 0
    accesses: int = 0
    bytes: int = 0

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(self.operations + other.operations, self.accesses + other.accesses, self.bytes + other.bytes)


def memory_operations(record: GraphRecord, recomputed: frozenset[str] = frozenset()) -> tuple[Memory, Memory]:
    """(before, after): what eager does for the calls of a graph, and what its kernels, opaque calls and copies into mutated inputs do. `recomputed`:
    calls that a backward graph repeats and eager does not."""
    calls = [c for c in record.calls if not c.view and c.name not in recomputed]
    before = Memory(len(calls), sum(c.reads + c.writes for c in calls), sum(c.bytes_read + c.bytes_written for c in calls))
    if record.eager or "lower" not in record.values:
        return before, before
    after = sum((Memory(1, len(k.reads) + len(k.writes), k.bytes) for k in kernels(record)), Memory())
    after = sum((Memory(1, o.reads + o.writes, o.bytes) for o in opaques(record) if o.reads + o.writes), after)
    graph = plan_of(record).graph
    copied = [w for w in graph.writes if w.source.node not in plan_of(record).inplace]
    return before, sum((Memory(1, 2, 2 * node_bytes(w.target, Hints(graph.hints))) for w in copied), after)


def recomputed_calls(record: GraphRecord, others) -> frozenset[str]:
    """Calls of a backward graph that stand in the forward graph of the same capture too: the partitioner computes them twice."""
    if record.kind != "backward":
        return frozenset()
    return frozenset(c.name for r in others if r.kind == "forward" and r.frame is record.frame for c in r.calls)
