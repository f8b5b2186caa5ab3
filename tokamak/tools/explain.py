"""`tokamak.explain`: what became of a program, as frozen data that prints.

    Explanation ::= Frame (a capture by Dynamo), Break, Recompile, GraphInfo
    GraphInfo   ::= KernelInfo in order, Opaqued (calls of torch), Edge (values that pass through memory, and why); memory operations before and after
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch.utils._pytree import tree_leaves

from ..backend import backend
from ..ir.graph import Opaque, Result
from .dynamo import Break, Frame, Recompile, uncompiled
from .kernels import KernelInfo, Memory, Opaqued, kernels, memory_operations, opaques, plan_of, recomputed_calls
from .record import GraphRecord, Recorder, recording
from .show import recorded_text
from .sources import Source, source_of


@dataclass(frozen=True)
class Edge:
    """A value that one kernel (or call of torch) writes and another reads. `code`: a key of `fuse.reason.CODES`; `kind`: illegal, infeasible,
    unprofitable or not attempted; `reason` in words; `bytes`: the value's; `graph`: which."""
    producer: str
    consumer: str
    code: str
    kind: str
    reason: str
    bytes: int
    made: Source | None
    used: Source | None
    graph: str = ""


@dataclass(frozen=True)
class GraphInfo:
    """One compiled graph. `kind`: forward, backward or inference; `capture`: the id of its Frame; `eager`: why torch runs it, if it does; `calls`:
    how many operations eager runs, views aside; `seconds`: stage -> what it took, `build` with that of the compiler of kernels; `built`: how its
    kernels came to be ('compiled', 'cache', 'process', 'interpreted') -> how many; `recorded`: what of it CUDA graphs hold, in words, if it was to be
    recorded."""
    name: str
    kind: str
    capture: str
    eager: str
    calls: int
    kernels: tuple[KernelInfo, ...]
    opaque: tuple[Opaqued, ...]
    edges: tuple[Edge, ...]
    before: Memory
    after: Memory
    seconds: dict[str, float]
    built: dict[str, int] = field(default_factory=dict)
    recorded: str = ""


@dataclass(frozen=True)
class Explanation:
    """Everything that was recorded. Prints as tables; `to_json` gives all of it."""
    frames: tuple[Frame, ...]
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    graphs: tuple[GraphInfo, ...]
    compiling: float = 0.0          # seconds of Dynamo's captures, all that they call within

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        return tuple(k for g in self.graphs for k in g.kernels)

    @property
    def opaque(self) -> tuple[Opaqued, ...]:
        return tuple(o for g in self.graphs for o in g.opaque)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The unfused edges of all graphs, the most expensive first."""
        return tuple(sorted((e for g in self.graphs for e in g.edges), key=lambda e: -e.bytes))

    @property
    def before(self) -> Memory:
        return sum((g.before for g in self.graphs), Memory())

    @property
    def after(self) -> Memory:
        return sum((g.after for g in self.graphs), Memory())

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)

    def __str__(self) -> str:
        from .report import text          # rich is loaded only when something is printed
        return text(self)

    def __rich__(self):
        from .report import report
        return report(self)

    def _repr_html_(self) -> str:
        from .notebook import explanation_html
        return explanation_html(self)


def explanation(recorder: Recorder) -> Explanation:
    """What `recorder` has seen."""
    graphs = tuple(graph_info(r, recorder.graphs) for r in recorder.graphs)
    return Explanation(tuple(recorder.frames), tuple(recorder.breaks), tuple(recorder.recompiles), graphs, recorder.compiling)


def graph_info(record: GraphRecord, others: Iterable[GraphRecord] = ()) -> GraphInfo:
    again = recomputed_calls(record, others)
    before, after = memory_operations(record, again)
    return GraphInfo(record.name, record.kind, record.frame.id if record.frame else "", record.eager, before.operations, tuple(kernels(record)),
                     tuple(opaques(record)), tuple(sorted(edges(record), key=lambda e: -e.bytes)), before, after, dict(record.seconds),
                     dict(Counter(u.how for u in record.units.values())), recorded_text(record))


def edges(record: GraphRecord) -> Iterator[Edge]:
    """The producer -> consumer edges of a graph that end in two kernels."""
    plan = plan_of(record)
    if plan is None:
        return
    graph = plan.graph
    for d in plan.decisions:
        if d.reason is not None:
            ends = (d.producer, d.consumer)
            (producer, made), (consumer, used) = ((_end(record, graph, n), source_of(graph.origin(n))) for n in ends)
            yield Edge(producer, consumer, d.reason.code, d.reason.kind, str(d.reason), d.bytes, made, used, record.name)


def _end(record: GraphRecord, graph, node) -> str:
    """A value with the operation that makes it."""
    op = graph.origin(node.opaque if isinstance(node, Result) else node).op
    name = record.label(graph, node)
    return f"{name} ({op})" if op and (isinstance(node, Opaque) or op.split(".")[0] not in name) else name


# -- running the program -------------------------------------------------------------------------------------------------
def explain(model: Callable, *inputs, also: Sequence[tuple] = (), **kwargs) -> Explanation:
    """Compiles `model` (a module or function) for `inputs`, runs it once, backward too where a result requires gradients, and says what became of it.
    `also`: further argument tuples to call it with, to see what Dynamo captures again and why. The model really runs: buffers and random state
    change; gradients are computed but not accumulated. Compiled functions of the process are compiled again at their next call. Raises OptionError
    where `model` cannot be called, and what the call raises. What is not compiled is no error: it stands in the Explanation with its reason."""
    torch._dynamo.reset()
    original = uncompiled(model)
    try:
        with recording() as recorder:
            compiled = torch.compile(original, backend=backend)
            for args in (inputs, *also):
                differentiate(compiled(*args, **kwargs))
    finally:
        torch._dynamo.reset()
    return explanation(recorder)


def differentiate(result) -> None:
    """Runs backward from every floating result that requires it, leaving `.grad` alone."""
    roots = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None]
    leaves = list(leaves_of(roots))
    if leaves:
        gradients(roots, leaves, [torch.ones_like(t) for t in roots])


def gradients(roots: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> tuple | None:
    """The gradients of `roots` along `directions`; None where backward was run from these before, as a training step does that returns its loss."""
    try:
        return torch.autograd.grad(roots, leaves, directions, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        return None


def leaves_of(roots: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that gradients of `roots` would be accumulated into."""
    seen: set = set()
    stack = [t.grad_fn for t in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        stack.extend(n for n, _ in node.next_functions)
