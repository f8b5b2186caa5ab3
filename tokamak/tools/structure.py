"""A compiled graph as plain data, for what draws and compares it: what eager runs, what runs now, how values pass between these, and their texts.

    Drawing    ::= Operation in order (what eager calls, views aside); Node in order (the program's kernels and calls of torch); Link (a value that
                   one Node writes and another reads: with the reason, where it was asked whether both could be one kernel)

Lines of the user's program, and the texts of kernels, stand once in a Library: equal kernels have one text, with the names of the first of them.
"""
from __future__ import annotations

import hashlib
import linecache
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..fuse.axes import Group
from ..fuse.cost import Hints, node_bytes
from ..ir.graph import Opaque, Result, reads
from ..ir.text import node_names, print_graph
from ..runtime.program import Call, Launch
from . import limits
from .annotate import kernel_text
from .dynamo import user_name
from .kernel_graph import part
from .kernels import KernelInfo, Launched, Opaqued, kernels, launched, opaques, plan_of, type_text
from .machine import Peaks
from .record import GraphRecord
from .sources import Source

AROUND = 3          # lines of a file that are kept before and behind one that matters


@dataclass(frozen=True)
class Operation:
    """A call of eager's that is no view. `reads`: positions of those whose results it reads; `source`: a position in the library's, -1 for none;
    `bytes`: read and written."""
    name: str
    op: str
    module: str
    source: int
    bytes: int
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A kernel, or a call of torch (`reason`: why), at `position` in its program. `text`: its key among the library's texts; `structure` stands for
    what it computes, whatever its names; `operations`: positions among the graph's; `reads`, `writes`: (name, type, fewest bytes, bytes moved);
    `seconds` a step: None where it was not timed; `limit`: the shortest that its bytes and FLOPs allow (`limits`)."""
    position: int
    name: str
    module: str
    text: str
    structure: str
    operations: tuple[int, ...]
    sources: tuple[int, ...]
    reads: tuple[tuple[str, str, int, int], ...]
    writes: tuple[tuple[str, str, int, int], ...]
    bytes: int
    fewest: int
    flops: int
    seconds: float | None = None
    limit: float | None = None
    kind: str = ""
    reason: str = ""
    schedule: str = ""
    programs: str = ""
    registers: int | None = None
    spilled: int | None = None
    shared: int | None = None
    how: str = ""
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Link:
    """`value` passes through memory from node `made` to node `used` (positions in `Drawing.nodes`). `code`, `kind`, `reason`: of the decision not to
    make them one kernel, '' where none was asked for."""
    made: int
    used: int
    value: str
    bytes: int
    code: str = ""
    kind: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Drawing:
    """One graph. `phase`: forward, backward, inference or optimizer; `eager`: why torch runs it, if it does."""
    name: str
    phase: str
    capture: str
    eager: str
    operations: tuple[Operation, ...]
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]


@dataclass
class Library:
    """What drawings refer to: lines of the user's program by number; key of a kernel -> its text (`ir`, `code`, and `of`: the graph and kernel whose
    names stand in it)."""
    sources: list[Source] = field(default_factory=list)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)
    _numbers: dict[Source, int] = field(default_factory=dict)
    _structures: dict[tuple, str] = field(default_factory=dict)

    def source(self, s: Source | None) -> int:
        if s is None:
            return -1
        if s not in self._numbers:
            self._numbers[s] = len(self.sources)
            self.sources.append(s)
        return self._numbers[s]

    def kernel(self, record: GraphRecord, x: Launched, info: KernelInfo, part_number: int) -> str:
        """What stands for what a kernel computes; keeps its texts."""
        key = info.key, part_number, tuple(a.type for a in (*info.reads, *info.writes))
        found = self._structures.get(key)
        if found is None:
            graph = plan_of(record).graph
            names = record.once("names of nodes", lambda: node_names(graph))
            cut, _, _ = part(graph, x.group.nodes(), plan_of(record).stores[x.group], names)
            found = self._structures[key] = structure(print_graph(cut), part_number)
            if info.key not in self.texts:
                self.texts[info.key] = {"ir": print_graph(cut, sources=True), "code": kernel_text(record, x, info), "of": f"{record.name}: {x.name}"}
        return found

    def files(self) -> dict[str, dict[int, str]]:
        """File -> number -> text of the lines that matter and those around them."""
        found: dict[str, dict[int, str]] = {}
        for s in self.sources:
            lines = linecache.getlines(s.file)
            for n in range(max(1, s.line - AROUND), min(len(lines), s.line + AROUND) + 1):
                found.setdefault(s.file, {})[n] = lines[n - 1].rstrip("\n")
            if not lines and s.code:
                found.setdefault(s.file, {})[s.line] = s.code
        return found


def structure(text: str, number: int = 0) -> str:
    """What stands for what a graph computes: of its text without the names of values, sizes and axes, and without what the host knows of these."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(graph|hint|size|number) ", line)]
    names: dict[str, str] = {}
    plain = re.sub(r"%\w+|\$\w+|\bi\d+\b|\bs\d+\b", lambda m: names.setdefault(m[0], f"{m[0][0]}{len(names)}"), "\n".join(lines))
    return _digest(plain, number)


def _digest(*parts) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# -- what eager runs -----------------------------------------------------------------------------------------------------
def operations(record: GraphRecord, library: Library) -> tuple[Operation, ...]:
    """The calls of a graph that eager makes, views aside, each with those whose results it reads, through views or not."""
    calls = {c.name: c for c in record.calls}
    kept = {c.name: n for n, c in enumerate(c for c in record.calls if not c.view)}
    behind: dict[fx.Node, tuple[int, ...]] = {}
    out = []
    for node in record.values["aten"].graph.nodes if "aten" in record.values else ():
        read = tuple(dict.fromkeys(p for n in node.all_input_nodes for p in behind.get(n, ())))
        behind[node] = (kept[node.name],) if node.name in kept else read
        if node.name in kept:
            c = calls[node.name]
            out.append(Operation(c.name, c.op, user_name(c.origin.module), library.source(c.source), c.bytes_read + c.bytes_written, read))
    return tuple(out)


# -- what runs now -------------------------------------------------------------------------------------------------------
def drawing(record: GraphRecord, library: Library, seconds: Mapping[tuple[str, int], float], peaks: Peaks) -> Drawing:
    """The graph of `record` with what each of its kernels and calls took: (graph, position) -> seconds a step."""
    before = operations(record, library)
    nodes, found = (), ()
    if "program" in record.values and not record.eager:
        made = _Made(record, library, {o.name: n for n, o in enumerate(before)}, seconds, peaks)
        nodes, found = tuple(made.nodes()), tuple(made.links())
    return Drawing(record.name, limits.phase_of(record), record.frame.id if record.frame else "", record.eager, before, nodes, found)


class _Made:
    """What became of a graph. `homes`: the Group or Opaque of each node, in running order."""

    def __init__(self, record: GraphRecord, library: Library, numbers: Mapping[str, int], seconds: Mapping[tuple[str, int], float], peaks: Peaks):
        self.record, self.library, self.numbers, self.seconds, self.peaks = record, library, numbers, seconds, peaks
        self.plan, self.homes = plan_of(record), []
        self.graph = self.plan.graph
        self.hints = Hints(self.graph.hints)
        self.results: dict[Opaque, list[Result]] = {}
        for n in self.graph.nodes:
            if isinstance(n, Result):
                self.results.setdefault(n.opaque, []).append(n)

    def nodes(self) -> Iterator[Node]:
        """A Node for each kernel and each call of torch that moves something."""
        infos = iter(zip(launched(self.record), kernels(self.record), strict=True))
        calls = iter(zip(opaques(self.record), [s for s in self.plan.steps if isinstance(s, Opaque)], strict=True))
        for position, step in enumerate(self.record.values["program"].steps):
            at = self.record.name, position
            if isinstance(step, Launch):
                x, info = next(infos)
                row = limits.kernel_row(info, "", at, self.seconds.get(at, 0.0), self.peaks)
                yield self._judged(self.kernel(x, info, position), row)
            elif isinstance(step, Call) and step.target is not torch.autograd.graph.increment_version:
                call, home = next(calls)
                if call.reads + call.writes:
                    row = limits.call_row(self.record, call, "", at, self.seconds.get(at, 0.0), self.peaks)
                    yield self._judged(self.call(home, call, position, row.flops), row)

    def _judged(self, node: Node, row: limits.Row) -> Node:
        at = self.record.name, node.position
        return replace(node, limit=row.limit, seconds=self.seconds.get(at), kind=limits.kind_of(row, self.peaks) if at in self.seconds else "")

    def kernel(self, x: Launched, k: KernelInfo, position: int) -> Node:
        number = sum(home is x.group for home in self.homes[-8:])           # a group's kernels follow each other
        self.homes.append(x.group)
        made = {o.name for n in x.group.nodes() for o in self.graph.origins.get(n, ())}
        accesses = (tuple((a.name, a.type, a.fewest, a.bytes) for a in found) for found in (k.reads, k.writes))
        return Node(position, k.name, k.module, k.key, self.library.kernel(self.record, x, k, number),
                    tuple(sorted(self.numbers[n] for n in made if n in self.numbers)), tuple(self.library.source(s) for s in k.sources), *accesses,
                    k.bytes, k.fewest, k.flops, schedule=k.schedule, programs=k.programs, registers=k.registers, spilled=k.spilled, shared=k.shared,
                    how=k.how, compile_seconds=k.compile_seconds)

    def call(self, home: Opaque, call: Opaqued, position: int, flops: int) -> Node:
        self.homes.append(home)
        read, written = (tuple((self.record.label(self.graph, n), type_text(n), self._bytes(n), self._bytes(n)) for n in found)
                         for found in (home.reads, self.results.get(home, ())))
        return Node(position, call.op, call.module, "", _digest(call.op, [t for _, t, *_ in (*read, *written)]),
                    tuple(self.numbers[n] for n in (call.name,) if n in self.numbers),
                    (self.library.source(call.source),) if call.source is not None else (), read, written, call.bytes, call.bytes, flops,
                    reason=call.reason)

    def _bytes(self, node) -> int:
        return node_bytes(node, self.hints)

    # -- how values pass
    def links(self) -> Iterator[Link]:
        """The values that one node writes and a later one reads, and what the kernels of one group leave each other."""
        home_of = {n: home for home in self.homes for n in _nodes(home)}
        asked = {(home_of.get(d.producer, getattr(d.producer, "opaque", None)), home_of.get(d.consumer)): d.reason
                 for d in reversed(self.plan.decisions) if d.reason is not None}
        self.moving, makers = set(self.homes), {}
        for n, home in enumerate(self.homes):
            if n and self.homes[n - 1] is home:
                yield Link(n - 1, n, "partial results", 0)
            for node in dict.fromkeys(r for m in _nodes(home) for r in self._through(m)):
                at = makers.get(node)
                if at is not None and self.homes[at] is not home:
                    why = asked.get((self.homes[at], home))
                    words = (why.code, why.kind, str(why)) if why is not None else ()
                    yield Link(at, n, self.record.label(self.graph, node), self._bytes(node), *words)
            for node in self.plan.stores.get(home, ()) if isinstance(home, Group) else self.results.get(home, ()):
                makers[node] = n

    def _through(self, node) -> Iterator:
        """What `node` reads, through views that torch makes."""
        for r in reads(node):
            while isinstance(r, Result) and r.opaque not in self.moving and r.opaque.reads:
                r = r.opaque.reads[0]
            yield r


def _nodes(home) -> tuple:
    return home.nodes() if isinstance(home, Group) else (home,)
