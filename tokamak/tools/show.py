"""Text of what a stage made, for people: the topics of TOKAMAK_LOGS and the values that `tokamak compile --until STAGE` prints."""
from __future__ import annotations

from collections.abc import Callable

from ..codegen.stages import Lowered
from ..fuse.axes import Group
from ..fuse.cost import Hints, node_bytes
from ..fuse.plan import Plan
from ..fuse.reason import Decision
from ..ir.graph import Opaque
from ..ir.text import print_graph
from ..runtime.program import source
from . import annotate
from .kernels import kernels, launch_steps, plan_of
from .names import group_names, size_text
from .record import GraphRecord


def graph_text(record: GraphRecord) -> str:
    """The captured graph, or why there is none."""
    return record.eager or print_graph(record.values["capture"], sources=True)


def fusion_text(record: GraphRecord) -> str:
    """The groups with their members, then every edge with what was decided, the most expensive first."""
    plan = plan_of(record)
    names = group_names(record, plan)
    lines = [line for step in plan.steps for line in _step(record, plan, step, names)]
    split = sorted((d for d in plan.decisions if d.reason is not None), key=lambda d: -d.bytes)
    joined = [d for d in plan.decisions if d.reason is None]
    if joined:
        lines.append(f"{len(joined)} edges within kernels: {size_text(sum(d.bytes for d in joined))} are not read back from memory")
    return "\n".join([*lines, *(edge_text(record, plan, d) for d in split)])


def _step(record: GraphRecord, plan: Plan, step, names: dict[Group, str]) -> list[str]:
    graph, hints = plan.graph, Hints(plan.graph.hints)
    if isinstance(step, Opaque):
        return [f"torch runs {graph.origin(step).op}: {step.reason}"]
    lines = [names[step]]
    for m in step.members:
        ops = dict.fromkeys(o.op for o in reversed(graph.origins.get(m.node, ())))
        kept = f", stored, {size_text(node_bytes(m.node, hints))}" if m.node in plan.stores[step] else ""
        lines.append(f"    {record.label(graph, m.node)} = {' '.join(ops)}{kept}")
    return lines


def edge_text(record: GraphRecord, plan: Plan, d: Decision) -> str:
    producer, consumer = (record.label(plan.graph, n) for n in (d.producer, d.consumer))
    return f"{producer} -> {consumer}: {size_text(d.bytes)}, {d.reason.kind}: {d.reason}"


def schedule_text(record: GraphRecord) -> str:
    """The schedule of each kernel, with what its axes are."""
    value = record.values.get("lower") or record.values["schedule"]
    names, lines = group_names(record, value.plan), []
    for g in value.plan.steps:
        if isinstance(g, Group):
            schedule = value.bodies[g][1]
            axes = ", ".join(f"i{n} < {a.extent!r}" for n, a in enumerate(schedule.order))
            lines.append(f"{names[g]}: {schedule}  over {axes or 'one element'}")
    return "\n".join(lines)


def code_text(record: GraphRecord) -> str:
    """The C of each kernel with the user's names and lines merged in, then the function that calls them."""
    return "\n".join([*kernel_texts(record), source(record.values["program"])])


def kernel_texts(record: GraphRecord) -> list[str]:
    lowered: Lowered = record.values["lower"]
    groups = [s for s in lowered.plan.steps if isinstance(s, Group)]
    return [annotate.kernel_text(record, g, info) for g, info in zip(groups, kernels(record), strict=True)]


def _build_text(record: GraphRecord) -> str:
    names = {step.kernel: info.name for step, info in zip(launch_steps(record).values(), kernels(record))}
    how = {"process": "was loaded already", "cache": "loaded from the cache", "compiled": "compiled"}
    return "\n".join(f"{names.get(u.name, u.name)} ({u.name}): {how[u.how]}" + (f" in {u.seconds * 1e3:.0f} ms" if u.seconds else "")
                     for u in record.units.values()) or "no kernel"


# topic of TOKAMAK_LOGS -> its text
TOPICS: dict[str, Callable[[GraphRecord], str]] = {"graph": graph_text, "fusion": fusion_text, "schedule": schedule_text, "output_code": code_text}

# stage -> the text of what it made
STAGE_TEXTS: dict[str, Callable[[GraphRecord], str]] = {
    "aten": lambda r: str(r.values["aten"].graph).strip(),
    "capture": graph_text,
    "simplify": lambda r: print_graph(r.values["simplify"], sources=True),
    "inline": lambda r: print_graph(r.values["inline"], sources=True),
    "fuse": fusion_text,
    "schedule": schedule_text,
    "lower": lambda r: "\n".join((fusion_text(r), schedule_text(r))),
    "render": lambda r: "\n".join(kernel_texts(r)),
    "program": lambda r: source(r.values["program"]),
    "build": _build_text,
}


def exact_text(record: GraphRecord) -> str:
    """The C of each kernel as it is built, vocabulary and all."""
    return "\n".join("".join((*b.prelude, b.text)) for b in record.values["render"].values())
