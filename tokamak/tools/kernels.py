"""What each kernel of a compiled graph does: operations, the user's lines, bytes against the fewest possible, FLOPs, schedule, launch words.

Bytes are counted in the kernel's loops: a loop that reads a memory counts the elements that its addresses reach, once. A further loop over the same
elements within one parallel iteration counts again only if what an iteration touches exceeds the second-level cache. The fewest possible is each
memory once. For kernels on a GPU `traffic` counts by the same rule.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..codegen.host import host_text
from ..codegen.kernel import Kernel, Loop, Phase, Read, Refill, Write
from ..codegen.stages import Lowered
from ..codegen.tile_kernel import TileKernel, Workspace
from ..fuse.axes import Group
from ..fuse.contraction import held, product_type
from ..fuse.cost import Hints, node_bytes
from ..ir import ops
from ..ir.dtype import BF16, F16
from ..ir.expr import Expr, Op, Reduce, Scan, walk
from ..ir.graph import Graph, Input, Opaque, reads, Result, View
from ..ir.index import Index, Size
from ..runtime.gpu_build import GpuBuild
from ..runtime.program import RESIDENT, Launch
from ..schedule.beside import BesideSchedule
from ..schedule.body import Store, exprs_of
from ..schedule.matmul import MatmulSchedule, VectorSchedule
from ..schedule.schedule import Schedule
from ..schedule.tile_schedule import TileSchedule
from .names import kernel_names, module, operations
from .record import GraphRecord
from .sources import Source, source_of, sources_of
from .traffic import roots, stores, traffic


HALVES = {BF16: "bfloat16", F16: "float16"}


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
    """One kernel of a graph. `words`: what it is launched with, by the name in its text; `key` stands for its text; `how` it was built.
    `bytes`: what its loops move; `fewest`: each memory once; `dtype`: the type in which its FLOPs are made. Of a kernel on a GPU also the `device`,
    how many `programs` run, and once it is built `registers` and bytes of stack (`spilled`) a thread, and bytes of memory that a program's threads
    share (`shared`)."""
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
    device: str = ""
    programs: str = ""
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    dtype: str = "float32"


@dataclass(frozen=True, eq=False)
class Launched:
    """A kernel where its graph runs it: one of the kernels of `group`. `launch`: None when the compile stopped before there was a program."""
    name: str
    group: Group
    kernel: Kernel | TileKernel
    schedule: Schedule | TileSchedule
    launch: Launch | None


def launched(record: GraphRecord) -> list[Launched]:
    """The kernels of a graph in running order; none when the compile stopped before they were lowered, or torch runs the graph."""
    return list(record.once("launched", lambda: _launched(record)))


def _launched(record: GraphRecord) -> list[Launched]:
    lowered, program = record.values.get("lower"), record.values.get("program")
    if lowered is None or record.eager:
        return []
    names, found = kernel_names(record, lowered.plan), []
    for g in (s for s in lowered.plan.steps if isinstance(s, Group)):
        made = lowered.kernels[g]
        parts = [(k, k.schedule) for k in made] if isinstance(made, tuple) else [(made, lowered.bodies[g][1])]
        found += [(name, g, k, s) for name, (k, s) in zip(names[g], parts, strict=True)]
    steps = [s for s in program.steps if isinstance(s, Launch)] if program is not None else [None] * len(found)
    return [Launched(*x, step) for x, step in zip(found, steps, strict=True)]


def kernels(record: GraphRecord) -> list[KernelInfo]:
    """What each of them does, in the same order."""
    return list(record.once("kernels", lambda: [_info(record, x) for x in launched(record)]))


def _info(record: GraphRecord, x: Launched) -> KernelInfo:
    lowered: Lowered = record.values["lower"]
    graph, tiles = lowered.plan.graph, isinstance(x.kernel, TileKernel)
    hints, origins = Hints(graph.hints), operations(graph, x.group.nodes(), record.order)
    reads, writes = (tile_accesses if tiles else accesses)(record, x.kernel, hints)
    body = lowered.bodies[x.group][0]
    work = flops(roots(x.kernel), stores(x.kernel), hints) if tiles else flops(exprs_of(body), body.stores, hints)
    build = record.units.get(x.launch.kernel) if x.launch is not None else None
    binary = build.binary if isinstance(build, GpuBuild) else None
    return KernelInfo(
        name=x.name, key=x.launch.kernel if x.launch is not None else "", operations=tuple(o.op for o in origins),
        sources=sources_of(origins), module=module(origins), reads=reads, writes=writes, flops=work, schedule=str(x.schedule),
        words=tuple(zip((p.name for p in x.kernel.params), _words(record, x))),
        how=build.how if build is not None else "", compile_seconds=build.seconds if build is not None else 0.0,
        bytes=sum(a.bytes for a in (*reads, *writes)), fewest=sum(a.fewest for a in (*reads, *writes)),
        device=record.values["target"].name if tiles else "", programs=programs(x) if tiles else "",
        registers=binary and binary.registers, spilled=binary and binary.spilled, shared=binary and binary.shared,
        dtype=made_in(x))


def made_in(x: Launched) -> str:
    """The type in which a kernel makes its FLOPs: that of the factors where the machine multiplies tiles of them."""
    made = [s for _, s in x.schedule.parts] if isinstance(x.schedule, BesideSchedule) else [x.schedule]
    if not all(isinstance(s, MatmulSchedule) and not isinstance(s, VectorSchedule) for s in made):
        return "float32"
    return next((HALVES[product_type(c)] for c in held(x.group)), "float32")


def programs(x: Launched) -> str:
    """How many programs of a kernel on a GPU run: a number, or the host's text of it."""
    return x.launch.grid[0].replace(RESIDENT, "resident") if x.launch is not None else host_text(x.kernel.grid)


def _words(record: GraphRecord, x: Launched) -> Iterator[str]:
    """What each parameter is: the user's name of a tensor, the text of a number."""
    for n, p in enumerate(x.kernel.params):
        if p.kind == "memory":
            yield memory_name(record, p.source.node)
        else:
            yield x.launch.words[n][1] if x.launch is not None else str(p.source)


def memory_name(record: GraphRecord, node) -> str:
    """The user's name of a node's value; of a workspace what it holds."""
    lowered = record.values["lower"]
    return workspaces(lowered).get(node, "workspace") if isinstance(node, Workspace) else record.label(lowered.plan.graph, node)


def workspaces(lowered: Lowered) -> dict[Workspace, str]:
    """The memories in which the kernels of a group leave each other partial results, each by a name."""
    made = [k for found in lowered.kernels.values() if isinstance(found, tuple) for k in found]
    found = [(node, e.monoid) for k in made for e, _, nodes in k.spaces for node in nodes] + [(node, e.monoid) for k in made for node, e in k.fills]
    return {node: f"partial results {n} ({monoid})" for n, (node, monoid) in enumerate(found)}


def flops(computed: list[Expr], made: Iterable[Store], hints: Hints) -> int:
    """Arithmetic operations: each distinct sub-expression once for all coordinates it depends on, each fold and update once an element."""
    total = 0
    for e in walk(*computed):
        if isinstance(e, Op):
            total += ops.OPS[e.name].flops * hints.count(e.free)
        elif isinstance(e, Reduce):
            total += hints.count(e.free | frozenset(e.over)) * (2 if e.monoid in ops.MEANS else 1)
        elif isinstance(e, Scan):
            total += hints.count(e.free)
    return total + sum(hints.count(s.axes) for s in made if s.monoid not in (None, "last"))


# -- bytes ---------------------------------------------------------------------------------------------------------------
def type_text(node) -> str:
    return f"{node.dtype}[{', '.join(map(repr, node.shape))}]"


def tile_accesses(record: GraphRecord, kernel: TileKernel, hints: Hints) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """What a kernel on a GPU reads and what it writes."""
    found = traffic(kernel, hints, record.values["target"])
    made = [(t.written, Access(memory_name(record, t.node), type_text(t.node), t.fewest, t.moved)) for t in found]
    return tuple(a for written, a in made if not written), tuple(a for written, a in made if written)


def accesses(record: GraphRecord, kernel: Kernel, hints: Hints) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """What a kernel in C reads and what it writes."""
    cache = record.values["target"].l2
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
        return Access(memory_name(record, memories[name]), type_text(memories[name]), fewest, moved)
    made = [(written, access(m, p)) for (m, written), p in passes.items()]
    return tuple(a for written, a in made if not written), tuple(a for written, a in made if written)


def _statements(items, loops: tuple) -> Iterator[tuple[Any, tuple]]:
    """(statement, the loops around it) of a phase."""
    for s in items:
        if isinstance(s, Loop):
            yield from _statements(s.items, (*loops, s))
        elif isinstance(s, Refill):
            yield from _statements(s.items, loops)
        else:
            yield s, loops


def _footprint(s: Read | Write, phase: Phase, loops: tuple, node, hints: Hints) -> tuple[int, int]:
    """Bytes that all iterations of an access reach, each once, and those of one parallel iteration."""
    parallel = {a for a, _ in phase.parallel}
    around = {*parallel, *(loop.axis for loop in loops)}
    axes = around if s.at is not None or fetched(s.address) else s.address.axes() & around
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
    return list(record.once("opaques", lambda: _opaques(record)))


def _opaques(record: GraphRecord) -> list[Opaqued]:
    plan = plan_of(record)
    if record.eager:
        return [Opaqued(c.name, c.op, record.eager, c.reads, c.writes, c.bytes_read + c.bytes_written, c.source, module((c.origin,)))
                for c in record.calls if not c.view]
    if plan is None:
        return []
    hints, graph = Hints(plan.graph.hints), plan.graph
    views, out, results = {c.name for c in record.calls if c.view}, [], {}
    for n in graph.nodes:
        if isinstance(n, Result):
            results.setdefault(n.opaque, []).append(n)
    for s in plan.steps:
        if isinstance(s, Opaque):
            at = graph.origin(s)
            made = results.get(s, [])
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


def least_bytes(graph: Graph) -> int:
    """Bytes of the inputs that `graph` reads, of its outputs and of what it writes into inputs, each once."""
    hints = Hints(graph.hints)
    read = {r for n in graph.nodes for r in reads(n) if isinstance(r, Input)}
    made = {o.node for o in graph.outputs if isinstance(o, View) and not isinstance(o.node, Input)} | {w.source.node for w in graph.writes}
    total = 0
    for node in read | made:
        count = node.dtype.bytes
        for extent, stride in zip(node.shape, node.strides):
            count *= hints(extent) if stride.constant != 0 else 1
        total += count
    return total
