"""Text of what a stage made, for people: the topics of TOKAMAK_LOGS and the values that `tokamak compile --until STAGE` prints."""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

from ..codegen.host import BuiltTiles
from ..fuse.axes import Group
from ..fuse.cost import Hints, node_bytes
from ..fuse.plan import Plan
from ..fuse.reason import Decision
from ..ir.graph import Opaque
from ..ir.text import print_graph
from ..runtime.program import source
from ..runtime.steps import in_blocks
from . import annotate
from .kernels import kernels, launched, plan_of
from .names import kernel_names, resources_text, size_text, time_text
from .record import GraphRecord


def graph_text(record: GraphRecord) -> str:
    """The captured graph, or why there is none."""
    return record.eager or print_graph(record.values["capture"], sources=True)


def fusion_text(record: GraphRecord) -> str:
    """The groups with their members, then every edge with what was decided, the most expensive first."""
    plan = plan_of(record)
    names = kernel_names(record, plan)
    lines = [line for step in plan.steps for line in _step(record, plan, step, names)]
    split = sorted((d for d in plan.decisions if d.reason is not None), key=lambda d: -d.bytes)
    joined = [d for d in plan.decisions if d.reason is None]
    if joined:
        lines.append(f"{len(joined)} edges within kernels: {size_text(sum(d.bytes for d in joined))} are not read back from memory")
    return "\n".join([*lines, *(edge_text(record, plan, d) for d in split)])


def _step(record: GraphRecord, plan: Plan, step, names: dict[Group, tuple[str, ...]]) -> list[str]:
    graph, hints = plan.graph, Hints(plan.graph.hints)
    if isinstance(step, Opaque):
        return [f"torch runs {graph.origin(step).op}: {step.reason}"]
    lines = [", ".join(names[step])]
    for m in step.members:
        ops = dict.fromkeys(o.op for o in reversed(graph.origins.get(m.node, ())))
        kept = f", stored, {size_text(node_bytes(m.node, hints))}" if m.node in plan.stores[step] else ""
        lines.append(f"    {record.label(graph, m.node)} = {' '.join(ops)}{kept}")
    return lines


def edge_text(record: GraphRecord, plan: Plan, d: Decision) -> str:
    producer, consumer = (record.label(plan.graph, n) for n in (d.producer, d.consumer))
    return f"{producer} -> {consumer}: {size_text(d.bytes)}, {d.reason.kind}: {d.reason}"


def schedule_text(record: GraphRecord) -> str:
    """The schedule of each kernel, with what its axes are; and the heuristic's, where the machine code has another one quicker."""
    found = [(x.name, x.schedule) for x in launched(record)]
    if not found:
        value = record.values["schedule"]
        found = [(", ".join(names), value.bodies[g][1]) for g, names in kernel_names(record, value.plan).items()]
    before, after = record.values.get("heuristic"), record.values.get("lower")
    first = {after.bodies[g][1]: s for g, (_, s) in before.bodies.items() if after.bodies[g][1] != s} if before is not None else {}
    of = lambda s: f"  over {', '.join(f'i{n} < {a.extent!r}' for n, a in enumerate(s.order)) or 'one element'}"
    why = lambda s: f"\n    quicker by its machine code than {first[s]}" if s in first else ""
    return "\n".join(f"{name}: {s}{of(s)}{why(s)}" for name, s in found)


def code_text(record: GraphRecord) -> str:
    """The text of each kernel with the user's names and lines merged in, then the function that calls them."""
    return "\n".join([*kernel_texts(record), source(in_blocks(record.values["program"]))])


def kernel_texts(record: GraphRecord) -> list[str]:
    return [annotate.kernel_text(record, x, info) for x, info in zip(launched(record), kernels(record), strict=True)]


HOW = {"process": "was loaded already", "cache": "loaded from the cache", "compiled": "compiled", "interpreted": "is interpreted"}


def _build_text(record: GraphRecord) -> str:
    """How each kernel was built; of one for a GPU also what it takes of a multiprocessor."""
    found = {x.key: x for x in kernels(record)}
    lines = []
    for u in record.units.values():
        x = found.get(u.name)
        took, used = f" in {time_text(u.seconds)}" if u.seconds else "", resources_text(x) if x is not None else ""
        lines.append(f"{x.name if x is not None else u.name} ({u.name}): {HOW[u.how]}{took}" + (f"; {used}" if used else ""))
    return "\n".join(lines) or "no kernel"


BUILT = {"compiled": "compiled", "cache": "from the cache", "process": "known", "interpreted": "interpreted"}


def built_text(built: Mapping[str, int]) -> str:
    """How many kernels came to be in which way: `built` by the words of `Build.how`."""
    return ", ".join(f"{n} {BUILT[how]}" for how, n in built.items() if n) or "none"


def start_text(record: GraphRecord) -> str:
    """What a process pays for a graph before its first call, with kernels in the cache or without."""
    seconds = "  ".join(f"{stage} {time_text(s)}" for stage, s in record.seconds.items())
    return f"kernels: {built_text(Counter(u.how for u in record.units.values()))}; {time_text(sum(record.seconds.values()))}: {seconds}"


def recorded_text(record: GraphRecord) -> str:
    """What of a program CUDA graphs hold, and what its calls came to so far; "" when it is not recorded."""
    graphed = record.values.get("graphs")
    if graphed is None:
        return ""
    keys = {x.key: x.name for x in kernels(record)}
    said = f"{graphed.coverage}; {graphed.coverage.calls()}" if graphed.coverage.pieces else str(graphed.coverage)
    return re.sub(r"\b\w+\b", lambda m: keys.get(m[0], m[0]), said)


# topic of TOKAMAK_LOGS -> its text
TOPICS: dict[str, Callable[[GraphRecord], str]] = {"graph": graph_text, "fusion": fusion_text, "schedule": schedule_text, "output_code": code_text,
                                                     "cudagraphs": recorded_text, "start": start_text}

# stage -> the text of what it made
STAGE_TEXTS: dict[str, Callable[[GraphRecord], str]] = {
    "aten": lambda r: str(r.values["aten"].graph).strip(),
    "capture": graph_text,
    "simplify": lambda r: print_graph(r.values["simplify"], sources=True),
    "stream": lambda r: print_graph(r.values["stream"], sources=True),
    "contract": lambda r: print_graph(r.values["contract"], sources=True),
    "inline": lambda r: print_graph(r.values["inline"], sources=True),
    "fuse": fusion_text,
    "schedule": schedule_text,
    "lower": lambda r: "\n".join((fusion_text(r), schedule_text(r))),
    "render": lambda r: "\n".join(kernel_texts(r)),
    "program": lambda r: source(in_blocks(r.values["program"])),
    "build": _build_text,
}


def exact_text(record: GraphRecord) -> str:
    """The text of each kernel as it is built: C with its vocabulary, or a Python module of Triton."""
    return "\n".join(text for b in record.values["render"].values()
                     for text in ([p.unit.text for p in b.parts] if isinstance(b, BuiltTiles) else ["".join((*b.prelude, b.text))]))
