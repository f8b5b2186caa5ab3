"""What the stages made: one GraphRecord a compiled graph, filled by the hook between stages (`tokamak.trace`). The tools read these records and
never derive a decision again.

    Recorder ::= Frame (a graph that Dynamo captured) in order; GraphRecord (a graph that was compiled: forward, backward, inference) in order
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ir.graph import Graph, View
from ..options import STAGES, scope
from ..runtime.build import Build
from ..runtime.gpu_build import GpuBuild
from .aten import AtenCall, aten_calls, labels, output_labels
from .dynamo import Break, Frame, Recompile, graph_breaks, recompiles

_CAPTURES = 1 << 14         # whose metrics are kept while they are recorded


@dataclass
class GraphRecord:
    """One compiled graph. `values`: stage -> what it made; `seconds`: stage -> what it took. `calls`: the aten calls; `labels`: value -> the user's
    name of it ('x', 'gradient of fc.weight'); `outputs`: those of the outputs, in order. `units`: kernel key -> how it was built,
    and for a GPU what came of it. `eager`: why torch runs the graph, if it does. `seen`: the values of its first call, if `check="report"` asked
    for them. `worked_out`: what tools have found out of all this so far."""
    name: str
    kind: str
    frame: Frame | None = None
    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: tuple[AtenCall, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    units: dict[str, Build | GpuBuild] = field(default_factory=dict)
    eager: str = ""
    seen: Any = None
    worked_out: dict[str, Any] = field(default_factory=dict, repr=False)
    _since: float = field(default_factory=time.perf_counter, repr=False)
    _named: Graph | None = field(default=None, repr=False)             # the graph whose outputs `_by_node` holds
    _by_node: dict[Any, str] = field(default_factory=dict, repr=False)

    def add(self, stage: str, value) -> None:
        """Keeps the value of `stage`, which ends now; also what is no stage: the `target`, each `unit` that was built, why torch runs the graph, what
        a call was seen to make."""
        self.worked_out = {}
        if stage == "check":
            self.seen = value
            return
        if stage == "unit":
            self.units[value.name] = value
            return
        if stage == "eager":
            self.eager = value
            return
        self.values[stage] = value
        if stage in STAGES:
            self.seconds[stage] = time.perf_counter() - self._since
        if stage == "aten":
            self.calls = tuple(aten_calls(value))
            inputs = self.frame.inputs if self.frame else ()
            self.labels, self.outputs = labels(value, inputs), output_labels(value, inputs)

    def once(self, what: str, work_out: Callable[[], Any]) -> Any:
        """What `work_out` gives: called once for each `what`, and again when something was added."""
        if what not in self.worked_out:
            self.worked_out[what] = work_out()
        return self.worked_out[what]

    @property
    def order(self) -> dict[str, int]:
        """Name of an aten call -> its place among `calls`."""
        return self.once("order", lambda: {c.name: i for i, c in enumerate(self.calls)})

    def resume(self) -> None:
        """The next stage begins now: what recording and printing took is no stage's."""
        self._since = time.perf_counter()

    def label(self, graph: Graph, node) -> str:
        """The user's name of a node's value in one of the stages' graphs, else its name in the captured graph."""
        if self._named is not graph:
            pairs = [(o.node, text) for o, text in zip(graph.outputs, self.outputs) if isinstance(o, View) and text]
            self._named, self._by_node = graph, dict(reversed(pairs))
        name = getattr(node, "name", "") or graph.origin(node).name or "constant"
        return self.labels.get(name) or self._by_node.get(node) or name


class Recorder:
    """Given as `Options.recorder`, it receives what every compile did, in order."""

    def __init__(self):
        self.frames: list[Frame] = []
        self.graphs: list[GraphRecord] = []
        self.breaks: list[Break] = []
        self.recompiles: list[Recompile] = []
        self.compiling = 0.0            # seconds that Dynamo, and what it calls, took for its captures

    def function(self, gm: fx.GraphModule, made: Callable) -> Callable:
        """What is called in place of `made`, which Dynamo's graph `gm` was compiled to."""
        return made

    def watch(self, graph: str) -> Callable | None:
        """What `runtime.program.assemble` is given as `watch` for the program of `graph`."""
        return None

    def looking(self) -> bool:
        """Is every kernel and call to be made one by one, so that `watch` sees it?"""
        return False

    def finish(self, metrics: list) -> None:
        """Takes in what Dynamo says of its captures when they are over."""
        self.breaks += graph_breaks(metrics, {f.id: f for f in self.frames})
        self.recompiles += recompiles(metrics)
        self.compiling += sum(m.entire_frame_compile_time_s or 0.0 for m in metrics)


@contextlib.contextmanager
def recording(into: Recorder | None = None, **options) -> Iterator[Recorder]:
    """Within it, every compile is recorded, in `into` or a new Recorder; `options` as for `tokamak.scope`."""
    recorder = into or Recorder()
    with _captures() as metrics, scope(recorder=recorder, **options):
        try:
            yield recorder
        finally:
            recorder.finish(metrics())


@contextlib.contextmanager
def _captures() -> Iterator[Callable[[], list]]:
    """Within it: a function that returns the metrics of Dynamo's captures since it was entered, of which torch keeps the last 64 elsewhere."""
    dynamo = torch._dynamo.utils
    before, most = dynamo.get_compilation_metrics(), dynamo._compilation_metrics.maxlen
    known = {id(m) for m in before}         # of none but these: `before` keeps them
    dynamo.set_compilation_metrics_limit(max(most, _CAPTURES))
    try:
        yield lambda: [m for m in dynamo.get_compilation_metrics() if id(m) not in known]
    finally:
        dynamo.set_compilation_metrics_limit(most)
