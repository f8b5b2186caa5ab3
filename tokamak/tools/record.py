"""What the stages made: one GraphRecord a compiled graph, filled by the hook between stages (`tokamak.trace`). The tools read these records and
never derive a decision again.

    Recorder ::= Frame (a graph that Dynamo captured) in order; GraphRecord (a graph that was compiled: forward, backward, inference) in order
"""
from __future__ import annotations

import contextlib
import operator
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..capture.fx import origin
from ..ir.graph import Graph, Origin, View
from ..options import STAGES, scope
from ..runtime.build import Build


@dataclass(frozen=True)
class Source:
    """A line of the user's program."""
    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f"  {self.code}" if self.code else "")


@dataclass(frozen=True)
class Frame:
    """A graph that Dynamo captured. `id` is Dynamo's: '1/2' is the third capture of the second piece of code. `inputs`: the user's names, in calling
    order. `ended`: why the graph ends; `broken`: it is a graph break, at `place`."""
    id: str
    inputs: tuple[str, ...] = ()
    ended: str = ""
    broken: bool = False
    place: Source | None = None


@dataclass(frozen=True)
class Break:
    """Dynamo could not go on in `code` (a function), at `place`: the graph before it, if there is any, is the capture `id`."""
    id: str
    code: str
    place: Source
    reason: str


@dataclass(frozen=True)
class AtenCall:
    """A call that eager makes. `reads`, `writes`: how many tensors (none for a view); bytes count each element that a tensor shows once."""
    name: str
    op: str
    origin: Origin
    view: bool
    reads: int
    writes: int
    bytes_read: int
    bytes_written: int

    @property
    def source(self) -> Source | None:
        return source_of(self.origin)


@dataclass(frozen=True)
class Recompile:
    """Dynamo captured `code` (a function, at `place`) again, because `reason`."""
    id: str
    code: str
    place: Source
    reason: str


@dataclass
class GraphRecord:
    """One compiled graph. `values`: stage -> what it made; `seconds`: stage -> what it took. `calls`: the aten calls; `labels`: value -> the user's
    name of it ('x', 'gradient of fc.weight'); `outputs`: those of the outputs, in order. `units`: kernel key -> how it was built.
    `eager`: why torch runs the graph, if it does."""
    name: str
    kind: str
    frame: Frame | None = None
    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: tuple[AtenCall, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    units: dict[str, Build] = field(default_factory=dict)
    eager: str = ""
    _since: float = field(default_factory=time.perf_counter, repr=False)
    _named: Graph | None = field(default=None, repr=False)             # the graph whose outputs `_by_node` holds
    _by_node: dict[Any, str] = field(default_factory=dict, repr=False)

    def add(self, stage: str, value) -> None:
        """Keeps the value of `stage`, which ends now; also what is no stage: the `target`, each `unit` that was built, why torch runs the graph."""
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

    def finish(self, metrics: list) -> None:
        """Takes in what Dynamo says of its captures when they are over."""
        self.breaks += graph_breaks(metrics, {f.id: f for f in self.frames})
        self.recompiles += recompiles(metrics)


@contextlib.contextmanager
def recording(**options) -> Iterator[Recorder]:
    """Within it, every compile is recorded; `options` as for `tokamak.scope`."""
    recorder, before = Recorder(), set(map(id, torch._dynamo.utils.get_compilation_metrics()))
    with scope(recorder=recorder, **options):
        try:
            yield recorder
        finally:
            recorder.finish([m for m in torch._dynamo.utils.get_compilation_metrics() if id(m) not in before])


def recompiles(metrics) -> list[Recompile]:
    """The captures among Dynamo's `metrics` that were not the first of their code."""
    place = lambda m: Source(m.co_filename or "", m.co_firstlineno or 0)
    return [Recompile(str(m.compile_id), code_name(m.co_name or ""), place(m), guard_text(m.recompile_reason))
            for m in metrics if getattr(m, "recompile_reason", None)]


def graph_breaks(metrics: list, frames: dict[str, Frame]) -> list[Break]:
    """Where captures ended early. A capture that found nothing before its break has no graph and no Frame: the function that Dynamo makes of the rest
    tells the line."""
    known, found = torch._dynamo.utils.counters["graph_break"], []
    rest = {m.co_name: m for m in metrics if m.co_name}
    for m in metrics:
        frame = frames.get(str(m.compile_id))
        code = code_name(m.co_name or "")
        if frame is not None and frame.broken and m.co_name:
            found.append(Break(frame.id, code, frame.place or Source(m.co_filename or "", 0), break_text(frame.ended)))
        elif frame is None and (reasons := [r for r in m.restart_reasons or () if r in known]):
            function = code.split(" ")[0]
            lines = [int(name.rpartition("_")[2]) for name in rest if re.fullmatch(rf"torch_dynamo_resume_in_{re.escape(function)}_at_\d+", name)]
            line = min((n for n in lines if n > _behind(m)), default=m.co_firstlineno or 0)
            found.append(Break(str(m.compile_id), code, Source(m.co_filename or "", line), break_text(reasons[0])))
    return found


def _behind(metric) -> int:
    """The line behind which a capture began: 0 for the start of a function."""
    line = (metric.co_name or "").rpartition("_at_")[2]
    return int(line) if line.isdigit() else 0


def break_text(reason: str) -> str:
    """Dynamo's words for a graph break, without what is for its developers."""
    said = reason.strip().split("\n\n")[0]
    return f"the program branches on a tensor's value ({said})" if said.startswith("generic_jump") else said


def code_name(name: str) -> str:
    """The name of a function; of the rest of one behind a graph break, for which Dynamo makes a function of its own, in words."""
    return re.sub(r"^torch_dynamo_resume_in_(.+)_at_(\d+)$", r"\1 behind line \2", name)


def guard_text(reason: str) -> str:
    """Dynamo's words for a guard that failed, without the capture's number."""
    return re.sub(r"^\d+/\d+: ", "", reason.strip())


# -- what Dynamo says ----------------------------------------------------------------------------------------------------
def frame_record(gm: fx.GraphModule) -> Frame:
    """The Frame of a graph that Dynamo hands to the backend."""
    names = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            names.append(user_name(getattr(source, "name", "")) or node.name)
    why = getattr(gm, "compile_subgraph_reason", None)
    stack = why.user_stack if why is not None else ()
    place = Source(stack[-1].filename, stack[-1].lineno, stack[-1].line or "") if stack else None
    current = torch._guards.CompileContext.current_compile_id()
    broken = why is not None and why.graph_break
    return Frame(str(current or ""), tuple(names), why.reason if broken else "", broken, place)


def user_name(source) -> str:
    """What the user would write for Dynamo's name of an argument: L['self']._modules['fc']._parameters['weight'] is fc.weight."""
    name = source() if callable(source) else str(source)
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name)
    name = re.sub(r"__import_\w+_dot_|___(?:from_numpy|as_tensor)\b", "", name)
    return name.removeprefix("self.")


# -- what eager does -----------------------------------------------------------------------------------------------------
def aten_calls(gm: fx.GraphModule) -> Iterator[AtenCall]:
    """The calls of a graph of aten operations. A view moves nothing; everything else reads its tensor arguments and writes its results."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
            continue
        target = node.args[0] if node.target is torch.ops.aten.copy_.default else None
        read = [v for n in node.all_input_nodes if n is not target for v in tensors(n)]
        wrote = tensors(node)
        storages = {storage(v) for v in read}
        view = bool(wrote) and target is None and all(storage(v) in storages for v in wrote) or not read and not wrote
        yield AtenCall(node.name, getattr(node.target, "__name__", str(node.target)), origin(node), view, 0 if view else len(read),
                       0 if view else len(wrote), 0 if view else sum(map(tensor_bytes, read)), 0 if view else sum(map(tensor_bytes, wrote)))


def storage(v: torch.Tensor) -> int:
    """What two tensors that share memory have in common; sparse tensors share none."""
    return v.untyped_storage()._cdata if v.layout is torch.strided else id(v)


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an FX node stands for."""
    val = node.meta.get("val")
    return [v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, torch.Tensor)]


def tensor_bytes(v: torch.Tensor) -> int:
    """Bytes of the elements that `v` shows, each once; symbolic sizes by their hints."""
    count = 1
    for extent, stride in zip(v.shape, v.stride() if v.layout is torch.strided else (1,) * v.dim()):
        count *= 1 if isinstance(stride, int) and stride == 0 else size_hint(extent)
    return count * v.element_size()


def size_hint(extent) -> int:
    """An extent as a number, for estimates: 64 where torch has seen none."""
    if isinstance(extent, int):
        return extent
    hint = extent.node.hint if extent.node.has_hint() else None
    return int(hint) if hint is not None else 64


def labels(gm: fx.GraphModule, inputs: tuple[str, ...]) -> dict[str, str]:
    """Value of the aten graph -> the user's name of it, for inputs and outputs. `inputs`: the names of Dynamo's inputs."""
    found = {n.name: described(n.meta.get("desc"), inputs) for n in gm.graph.nodes if n.op == "placeholder"}
    for node, text in zip(output_nodes(gm), output_labels(gm, inputs)):
        while isinstance(node, fx.Node) and not found.get(node.name):
            found[node.name] = text
            node = viewed(node)
    return {name: label for name, label in found.items() if label}


def output_nodes(gm: fx.GraphModule) -> tuple:
    """What the graph returns: FX nodes and plain values."""
    found = gm.graph.output_node().args[0]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def output_labels(gm: fx.GraphModule, inputs: tuple[str, ...]) -> tuple[str, ...]:
    """The user's name of each output, '' for what has none."""
    descriptions = gm.graph.output_node().meta.get("desc") or ()
    return tuple(described(d, inputs) or result_name(n) for n, d in zip(output_nodes(gm), descriptions))


def result_name(node) -> str:
    """A name for one result of a call that has several, by which a later graph calls it too."""
    taken = isinstance(node, fx.Node) and node.target is operator.getitem
    return f"{node.name} ({node.args[0].name})" if taken else ""


def viewed(node: fx.Node) -> fx.Node | None:
    """The value of which `node` is a view that shows all of it, in another shape perhaps; or None."""
    made, read = tensors(node), [t for n in node.all_input_nodes for t in tensors(n)]
    whole = len(made) == len(read) == 1 and storage(made[0]) == storage(read[0]) and tensor_bytes(made[0]) == tensor_bytes(read[0])
    return next(n for n in node.all_input_nodes if tensors(n)) if whole else None


def described(desc, inputs: tuple[str, ...]) -> str:
    """AOTAutograd's description of an input or output in the user's words; '' for what has none."""
    kind = type(desc).__name__
    if kind == "PlainAOTInput":
        return inputs[desc.idx] if desc.idx < len(inputs) else ""
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        return desc.target
    if kind == "PlainAOTOutput":
        return f"output {desc.idx}"
    about = getattr(desc, "output", None) or getattr(desc, "grad_of", None)
    inner = described(about, inputs) if kind in ("TangentAOTInput", "GradAOTOutput") else ""
    return f"gradient of {inner}" if inner else ""


def source_of(origin: Origin) -> Source | None:
    return Source(origin.file, origin.line, origin.code) if origin.file else None


def sources_of(origins) -> tuple[Source, ...]:
    """The user's lines of `origins`, each once, in order of file and line."""
    found = {s: None for o in origins if (s := source_of(o)) is not None}
    return tuple(sorted(found, key=lambda s: (s.file, s.line)))
