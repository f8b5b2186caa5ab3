"""Timelines in Chrome's trace format, which Perfetto (ui.perfetto.dev), chrome://tracing and TensorBoard's profiler open.

A process is a side, eager or compiled; a thread is a lane: phases, host, operators, kernels. A slice of a kernel carries what is known of it: lines,
module, bytes, FLOPs, part of the limit, class, schedule, registers. Memory is a counter of its own step, stretched to the side's.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SIDES = ("eager", "compiled")
LANES = {"phase": "phases", "host": "host", "operator": "operators", "kernel": "kernels and calls of torch"}
# "kernel" would let TensorBoard's profiler add both sides up to one GPU
CATEGORIES = {"phase": "user_annotation", "host": "cpu_op", "operator": "cpu_op", "kernel": "tokamak"}
CLOSE = 1e-9            # seconds: what follows at once does not overlap
MEMORY = "bytes beyond what stood before (measured in another step)"


def trace_events(profile: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of a profile, given as `Profile.data` gives it."""
    nodes = {(d["name"], n["position"]): (d, n) for d in profile["drawings"] for n in d["nodes"]}
    events = [e for pid, side in enumerate(SIDES, 1) for e in _side(profile, side, pid, nodes)]
    return {"schemaVersion": 1, "displayTimeUnit": "ns", "traceEvents": events, "deviceProperties": [],
            "otherData": {"title": str(profile["title"]), "device": profile["peaks"]["device"], **profile["about"]}}


def _side(profile: Mapping, side: str, pid: int, nodes: Mapping) -> Iterator[dict]:
    found, device = profile[side]["timeline"], profile["device"] != "cpu"
    yield _named("process_name", pid, 0, side)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, (lane, name) in enumerate(LANES.items(), 1):
        title = "device" if device and lane == "kernel" else name
        for track, slices in enumerate(apart([s for s in found if s["lane"] == lane])):
            thread = tid + track * len(LANES)
            yield _named("thread_name", pid, thread, title + (f" ({track + 1})" if track else ""))
            yield from (_slice(profile, s, pid, thread, *nodes.get((s["graph"], s["position"]), (None, None))) for s in slices)
    if (end := max((s["start"] + s["seconds"] for s in found), default=0.0)) > 0:
        yield {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": pid, "tid": 0, "ts": 0.0, "dur": end * 1e6, "args": {}}
    curve = profile[side]["memory"]["curve"]
    stretch = end / curve[-1][0] if curve and curve[-1][0] > 0 else 1.0
    for at, held in curve:
        yield {"ph": "C", "name": MEMORY, "pid": pid, "tid": 0, "ts": at * stretch * 1e6, "args": {"bytes": held}}


def apart(slices: Sequence[Mapping]) -> list[list[Mapping]]:
    """`slices` on as few tracks as they need for none to overlap another: what runs at the same time on several streams."""
    tracks: list[list[Mapping]] = []
    for s in sorted(slices, key=lambda s: s["start"]):
        free = next((t for t in tracks if t[-1]["start"] + t[-1]["seconds"] <= s["start"] + CLOSE), None)
        if free is None:
            tracks.append(free := [])
        free.append(s)
    return tracks


def _slice(profile: Mapping, s: Mapping, pid: int, tid: int, drawing: Mapping | None, node: Mapping | None) -> dict:
    return {"ph": "X", "cat": CATEGORIES[s["lane"]], "name": s["name"] or (node["name"] if node else "?"), "pid": pid, "tid": tid,
            "ts": s["start"] * 1e6, "dur": s["seconds"] * 1e6, "args": arguments(profile, drawing, node) if node else {}}


def _named(what: str, pid: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def arguments(profile: Mapping, drawing: Mapping, node: Mapping) -> dict[str, Any]:
    """What is known of a kernel or call, by words."""
    sources = [profile["sources"][i] for i in node["sources"]]
    seconds, limit = node["seconds"], node["limit"]
    found = {"kernel": node["name"], "graph": drawing["name"], "phase": drawing["phase"], "module": node["module"],
             "lines": [f"{s['file']}:{s['line']} {s['code']}".strip() for s in sources], "bytes": node["bytes"], "fewest bytes": node["fewest"],
             "FLOPs": node["flops"], "class": node["kind"], "percent of the limit": round(100 * min(1.0, limit / seconds), 2) if seconds else None,
             "limit in us (estimate)": limit and limit * 1e6, "median us": seconds and seconds * 1e6, "schedule": node["schedule"],
             "programs": node["programs"], "registers": node["registers"], "bytes spilled": node["spilled"], "run by torch because": node["reason"]}
    return {k: v for k, v in found.items() if v not in (None, "", [])}
