"""`tokamak.profile`: where the time of a step goes, eager and compiled side by side, and what could be gained.

Everything is measured, in this run, on this machine, but for what is counted in the plan (bytes, operations) and what the report calls an estimate.
How kernels are judged stands in `limits.py`.
"""
from __future__ import annotations

import contextlib
import copy
import datetime
import json
import math
import operator
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .. import __version__, backend as compiler
from ..errors import OptionError
from ..runtime.program import Launch
from . import footprint, limits
from .advice import following, for_recompile, mend
from .dynamo import uncompiled
from .explain import Edge, Explanation, explanation
from .kernels import least_bytes, memory_operations, plan_of
from .limits import Row
from .machine import BUSY, Peaks, peaks, Ran, others as other_work
from .record import GraphRecord, recording
from .sources import Source
from .spans import WATCHED, Span
from .structure import Drawing, Library, drawing
from .traced import CALLS, MemoryUse, Slice, Traced, memory_use, operators, traced, watched_timeline
from .watch import KERNEL, Looked, Step, Times, Watcher, interleaved

SECONDS = 1.0           # of steps, for each side
FEW, ENOUGH = 2, 0.15   # steps, and seconds of them, that torch's profiler sees at least where they take less than a second
LATE = ("torch's profiler was used in this process before: steps that wait for the host may take longer from then on, here too; "
        "a process of its own says what they take without")
MOST = 0.5              # of the cores: where other work takes more, the host of a GPU waits for one
UNSTEADY = 0.25         # of a step, between which half of the steps lie
FORMAT = "tokamak profile 1"        # of the JSON


@dataclass(frozen=True)
class Side:
    """One way of running the step: seconds of a step (the median; `middle`: between these lies half of the steps), of it the host's and those in
    which the device works (on a CPU: in which kernels and operators run), of each phase; how many kernels and operators; bytes that these read and
    write; bytes of memory at the peak, beyond what stood before; one step on a `timeline`, and memory over another one."""
    step: float
    host: float
    busy: float
    phases: dict[str, float]
    kernels: int
    bytes: int
    peak: int
    middle: tuple[float, float] = (0.0, 0.0)
    timeline: tuple[Slice, ...] = ()
    memory: MemoryUse = MemoryUse(0, ())

    @property
    def idle(self) -> float:
        return max(self.step - self.busy, 0.0)


@dataclass(frozen=True)
class Costly:
    """An edge that ends in two kernels. `seconds`: what the value's bytes take at copy speed, an estimate of what joining them would save."""
    edge: Edge
    seconds: float


@dataclass(frozen=True)
class Advice:
    """A graph break or a new capture: where, why, and what to do."""
    what: str
    place: str
    reason: str
    mend: str


@dataclass(frozen=True)
class Covered:
    """What CUDA graphs hold of a program: `held` of `total` kernels and calls, in `pieces` graphs; `left`: (what, why) of those that run by
    themselves; `calls`: what the calls so far came to, in words."""
    graph: str
    held: int
    total: int
    pieces: int
    left: tuple[tuple[str, str], ...]
    calls: str


@dataclass(frozen=True)
class Other:
    """What the device does in a step beyond the kernels and calls of programs (copies into mutated inputs, for one), by its name there."""
    name: str
    calls: float
    seconds: float


@dataclass(frozen=True)
class Line:
    """A line of the user's program, and the seconds a step (beyond their limits: `wasted`) of the `count` kernels and calls that compute it. One that
    computes several lines counts whole in each."""
    source: Source
    seconds: float
    wasted: float
    count: int


@dataclass(frozen=True, repr=False)
class Profile:
    """Everything that was measured of `title`. `first`: seconds of the first call, compiling included (of a script: that Dynamo and the
    compiler behind it worked); `stages`: seconds of each stage over all graphs; `cached`: kernels that were there already; `took`: seconds of
    profiling itself. `fewest`: bytes that any way of running the graphs moves; `predicted`: bytes of memory at the peak, and `held` over a step, read
    off the programs. `drawings`: the graphs, which refer to `sources` (lines, shown by `files`) and `texts`. `coverage`: by CUDA graphs, where these
    are on. `step`: what a step is, where that is no call of a function; `next`: what to do first; `beside`: the share of the cores that other work
    took while steps were timed."""
    title: str
    device: str
    peaks: Peaks
    eager: Side
    compiled: Side
    bound: str
    why: str
    fewest: int
    first: float
    stages: dict[str, float]
    cached: int
    built: int
    rows: tuple[Row, ...]
    edges: tuple[Costly, ...]
    advice: tuple[Advice, ...]
    opaque: int
    graphs: int
    notes: tuple[str, ...]
    predicted: int = 0
    held: tuple[footprint.Held, ...] = ()
    drawings: tuple[Drawing, ...] = ()
    sources: tuple[Source, ...] = ()
    files: dict[str, dict[int, str]] = field(default_factory=dict)
    texts: dict[str, dict[str, str]] = field(default_factory=dict)
    coverage: tuple[Covered, ...] = ()
    others: tuple[Other, ...] = ()
    took: float = 0.0
    about: dict[str, str] = field(default_factory=dict)
    step: str = ""
    next: str = ""
    beside: float = 0.0

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of the user's program by the seconds of what they are computed by, the longest first."""
        found: dict[int, tuple[float, float, int]] = {}
        for node in (n for d in self.drawings for n in d.nodes if n.seconds is not None):
            for s in node.sources:
                seconds, wasted, count = found.get(s, (0.0, 0.0, 0))
                found[s] = seconds + node.seconds, wasted + max(0.0, node.seconds - node.limit), count + 1
        return tuple(Line(self.sources[s], *x) for s, x in sorted(found.items(), key=lambda kv: -kv[1][0]))

    @property
    def metrics(self) -> dict[str, float]:
        """What `failures` may be asked about."""
        return {"kernels": sum(r.calls for r in self.rows if not r.opaque), "opaque": self.opaque, "graphs": self.graphs,
                "breaks": sum(a.what == "graph break" for a in self.advice), "recompiles": sum(a.what == "captured again" for a in self.advice),
                "step_ms": self.compiled.step * 1e3, "eager_ms": self.eager.step * 1e3, "speedup": self.eager.step / self.compiled.step,
                "busy_ms": self.compiled.busy * 1e3, "host_ms": self.compiled.host * 1e3, "bytes": self.compiled.bytes, "fewest": self.fewest,
                "peak_bytes": self.compiled.peak, "predicted_bytes": self.predicted, "compile_s": self.first}

    def failures(self, conditions: str) -> list[str]:
        """Those of `conditions` ("kernels>60, step_ms>2") that hold, with what was found. Raises OptionError for one that cannot be read."""
        found = []
        for text in filter(str.strip, conditions.split(",")):
            name, compare, limit = condition(text)
            value = self.metrics[name]
            if compare(value, limit):
                found.append(f"{text.strip()}: {name} is {value:.6g}")
        return found

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.data(), indent=indent)

    def data(self) -> dict[str, Any]:
        """Everything as plain values: what `to_json` writes."""
        more = {"metrics": self.metrics, "rows": [{**asdict(r), "fraction": r.fraction, "wasted": r.wasted} for r in self.rows],
                "lines": [asdict(x) for x in self.lines]}
        return {"format": FORMAT, **asdict(self), **more}

    def html(self, path: str | os.PathLike) -> str:
        """Writes the report, one file that opens without a network, to `path`, and returns that."""
        from .html import page
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.data()))
        return os.fspath(path)

    def trace(self, path: str | os.PathLike) -> str:
        """Writes the timelines in Chrome's trace format (Perfetto, TensorBoard) to `path`, and returns that."""
        from .chrome import trace_events
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace_events(self.data()), file)
        return os.fspath(path)

    def __str__(self) -> str:
        from .profile_report import text
        return text(self)

    def __rich__(self):
        from .profile_report import report
        return report(self)

    def __repr__(self) -> str:
        return (f"<profile of {self.title or 'a step'}: {self.eager.step / self.compiled.step:.2f} times as fast as eager, bound by {self.bound}; "
                "it prints, and .html(path) and .trace(path) write it>")

    def _repr_html_(self) -> str:
        from .notebook import profile_html
        return profile_html(self)


COMPARE = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
METRICS = ("kernels", "opaque", "graphs", "breaks", "recompiles", "step_ms", "eager_ms", "speedup", "busy_ms", "host_ms", "bytes", "fewest",
           "peak_bytes", "predicted_bytes", "compile_s")


def condition(text: str) -> tuple[str, Callable, float]:
    """(metric, comparison, number) of 'kernels>60'. Raises OptionError."""
    name, compare, found = compared(text, r"[\d.]+(?:[eE][+-]?\d+)?", "a number")
    return name, compare, float(found)


def compared(text: str, number: str, words: str) -> tuple[str, Callable, str]:
    """(metric, comparison, what it is compared with) of a condition; `number`: the pattern of the last, `words` what it is called."""
    found = re.fullmatch(rf"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*({number})\s*", text)
    if found is None or found[1] not in METRICS:
        raise OptionError(f"'{text.strip()}' is no condition: one of {', '.join(METRICS)}, then > < >= <= == or !=, then {words}")
    return found[1], COMPARE[found[2]], found[3]


# -- the ways in ---------------------------------------------------------------------------------------------------------
def check_seconds(seconds: float) -> None:
    """Raises OptionError for what is no time to measure for."""
    if not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
        raise OptionError(f"seconds={seconds!r}: a number of seconds that is not negative")


def profile(fn: Callable, *inputs, optimizer: torch.optim.Optimizer | None = None, options: Mapping[str, Any] | None = None,
            seconds: float = SECONDS, **kwargs) -> Profile:
    """Runs steps of `fn` (a module or function) on `inputs` in eager and compiled with `options`, about `seconds` each: forward, backward where a
    result requires gradients, and `optimizer.step()`. The model really runs: buffers and random state change; parameters and the optimizer's state
    are put back. Compiled functions of the process are compiled again at their next call. All times in the Profile are seconds, all sizes bytes.
    Raises OptionError for what an argument cannot be, and what the function raises in eager."""
    original = uncompiled(fn)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer={optimizer!r}: a torch.optim.Optimizer, whose step() is called, or None")
    check_seconds(seconds)
    found, began = device_of((original, inputs, kwargs)), time.perf_counter()
    parameters = [p for g in optimizer.param_groups for p in g["params"]] if optimizer is not None else []
    torch._dynamo.reset()
    watcher = Watcher()
    with restored(optimizer, parameters):
        eager = Step([(original, inputs, kwargs)], optimizer and optimizer.step, parameters)
        eager()
        with recording(watcher):
            choose = partial(compiler.backend, options=dict(options or {}))
            made = Step([(torch.compile(original, backend=choose), inputs, kwargs)],
                        optimizer and torch.compile(optimizer.step, backend=choose), parameters)
            first = timed(made)
            timed(made)
        try:
            made = examined(watcher, eager, made, found, first, seconds, name_of(original))
            return replace(made, took=time.perf_counter() - began - first)
        finally:
            torch._dynamo.reset()


def name_of(fn: Callable) -> str:
    return type(fn).__name__ if isinstance(fn, torch.nn.Module) else getattr(fn, "__qualname__", type(fn).__name__).split("<locals>.")[-1]


def profile_called(watcher: Watcher, seconds: float = SECONDS, title: str = "") -> Profile:
    """The graphs that a program has called, each with the arguments of its last call, as one step. `watcher` kept these."""
    began = time.perf_counter()
    calls, behind = watcher.calls()
    found = device_of([c[2] for c in calls])
    after = (lambda side: partial(each, [(c[side], c[2]) for c in behind])) if behind else (lambda side: None)
    eager, made = (Step([(c[side], c[2], {}) for c in calls], after(side)) for side in (0, 1))
    watcher.keep_arguments = False
    for step in (eager, made, made):
        step()
    step = f"the {len(calls)} captured functions that {title or 'the program'} called" if len(calls) > 1 else "the captured function that was called"
    words = f"a step: {step}, with the arguments of the last call" + (" of each" if len(calls) > 1 else "") + (
        f", and the {len(behind)} behind gradients (the optimizer's)" if behind else "")
    return replace(examined(watcher, eager, made, found, watcher.compiling, seconds, title, words), took=time.perf_counter() - began)


def each(calls: Sequence[tuple[Callable, tuple]]) -> None:
    for fn, args in calls:
        fn(*args)


def timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def device_of(tree) -> str:
    """Where the tensors of `tree` are, modules' parameters included: the GPU, if any is there."""
    leaves = [x for t in tree_leaves(tree) for x in ((*t.parameters(), *t.buffers()) if isinstance(t, torch.nn.Module) else (t,))]
    found = {str(t.device) for t in leaves if isinstance(t, torch.Tensor)}
    return next((d for d in sorted(found) if d.startswith("cuda")), "cpu")


@contextlib.contextmanager
def restored(optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Parameters, their gradients and the optimizer's state are afterwards what they were."""
    if optimizer is None:
        yield
        return
    kept = [(p, p.detach().clone(), p.grad) for p in parameters]
    state = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, grad in kept:
                p.copy_(value)
                p.grad = grad
        optimizer.load_state_dict(state)


# -- measuring -------------------------------------------------------------------------------------------------------------
def examined(watcher: Watcher, eager: Step, made: Step, device: str, first: float, seconds: float, title: str = "", step: str = "") -> Profile:
    """Measures both steps, which have run before, and puts together what is known of them. Steps are timed before anything else: behind a use of
    torch's profiler, by which peaks are measured too, a step of 519 launches was seen to take 9.0 ms that had taken 7.4 in the same process."""
    gpu, before = device != "cpu", Ran.now()
    looked, steps, late = Looked("looked at", watcher), {"eager": eager, "compiled": made}, behind_another(device)
    times = interleaved(steps if gpu else {**steps, looked.name: made}, device, seconds, looked=looked)      # to look at kernels takes time, too
    beside = other_work(before, Ran.now())
    here = peaks(device)
    e, records = explanation(watcher), watcher.graphs
    each, others, sides = (on_gpu if gpu else on_cpu)(eager, made, device, times, looked, records)
    found = limits.rows([r for r in records if any(name == r.name for name, _ in each)], each, here)
    word, why = limits.bound(found, times["compiled"].step, sides[1].busy)
    memory = [memory_use(step, device, give_back) for step in (eager, made)]
    moved = e.before.bytes, e.after.bytes
    sides = [replace(s, bytes=b, peak=m.peak, memory=m) for s, b, m in zip(sides, moved, memory)]
    if not gpu:
        sides = [replace(s, kernels=n) for s, n in zip(sides, (e.before.operations, e.after.operations))]
    how = [u.how for r in records for u in r.units.values()]
    library = Library()
    drawings = tuple(drawing(r, library, each, here) for r in records)
    held, covers = footprint.predicted(records), tuple(covered(records))
    return Profile(
        title, device, here, *sides, word, why, fewest_bytes(records), first, stages(records), sum(h in ("cache", "process") for h in how), len(how),
        tuple(found), costly(e, here), tuple(advice(e)), len(e.opaque), len(records),
        (*(f"{r.name} {r.eager}" for r in records if r.eager), *late, *crowded(beside, device),
         *unsteady({side: times[side] for side in ("eager", "compiled")})),
        footprint.peak(held), held, drawings, tuple(library.sources), library.files(), library.texts, covers,
        others, about=about(), step=step, next=following(word, sides[1], here, found, breaks=len(e.breaks), recompiles=len(e.recompiles),
                                                         recorded=bool(covers), device=device), beside=beside)


def behind_another(device: str) -> tuple[str, ...]:
    """What is to be said of steps timed from now on, where torch's profiler has watched the device before: from then on the process was seen to be
    slower."""
    return (LATE,) if device != "cpu" and WATCHED.is_set() else ()


def on_cpu(eager: Step, made: Step, device: str, times: Mapping[str, Times], looked: Looked, records) -> tuple:
    """((graph, position) -> seconds a step; Others; both sides, without what is counted): kernels by the host's clock, eager's operators by the part
    that they take of a step under the profiler; phases are those of the step nearest to the median, so that they add up."""
    each, calls = looked.seconds(), fitting(times["eager"])
    plain = operators(eager, calls)[1]
    ran = part_of(plain, "operator") * times["eager"].step, looked.busy(times["compiled"].step)
    return each, (), [Side(t.step, t.host, b, t.took.phases, 0, 0, 0, t.middle, line) for t, b, line in zip(
        (times["eager"], times["compiled"]), ran, (plain, watched_timeline(looked, times[looked.name])))]


def part_of(timeline: Sequence[Slice], lane: str) -> float:
    """The part of a step that what stands in a lane of its timeline takes."""
    whole = sum(s.seconds for s in timeline if s.lane == "phase")
    return min(1.0, sum(s.seconds for s in timeline if s.lane == lane) / whole) if whole else 0.0


def on_gpu(eager: Step, made: Step, device: str, times: Mapping[str, Times], looked: Looked, records: Sequence[GraphRecord]) -> tuple:
    """The same from what torch's profiler sees of the device."""
    seen, plain = (traced(step, device, watcher, fitting(times[name]))
                   for step, watcher, name in ((made, looked.watcher, "compiled"), (eager, None, "eager")))
    sides = [Side(t.step, t.host, s.busy, s.phases(), s.kernels, 0, 0, t.middle, s.timeline(s.steps // 2))
             for t, s in ((times["eager"], plain), (times["compiled"], seen))]
    return by_position(seen, records), beyond(seen, records), sides


def spread(step: float, middle: Sequence[float]) -> float:
    """How far half of the steps lie apart, as a part of one."""
    return (middle[1] - middle[0]) / step if step else 0.0


def unsteady(sides: Mapping[str, Times]) -> Iterator[str]:
    """What is to be said of sides whose steps differ much."""
    for name, t in sides.items():
        if spread(t.step, t.middle) > UNSTEADY:
            yield (f"half of the {name} steps lie {spread(t.step, t.middle):.0%} of a step apart, the shortest took {t.least * 1e3:.3g} ms: "
                   "the machine did other work meanwhile, so ratios, and what the step is bound by, mean little (more seconds: more steps)")


def crowded(beside: float, device: str) -> Iterator[str]:
    """What is to be said where other work took so much of the cores while steps were timed."""
    if device == "cpu" and beside > BUSY:
        yield (f"other work took {beside:.0%} of the cores while steps were timed: a kernel on several threads waits for the one that waits for "
               "a core (fewer threads, torch.set_num_threads, or a machine with less to do)")
    elif beside > MOST:
        yield f"other work took {beside:.0%} of the cores while steps were timed: what the host takes is too long"


def fitting(t: Times) -> int:
    """How many steps to make under the profiler: fewer of long ones, whose events are tens of thousands."""
    return max(1, min(CALLS, int(1 / max(t.step, 1e-9)), max(FEW, int(ENOUGH / max(t.step, 1e-9)))))


def covered(records: Sequence[GraphRecord]) -> Iterator[Covered]:
    """What of each program is recorded and replayed, where that was asked for."""
    for r in records:
        if "graphs" in r.values:
            c = r.values["graphs"].coverage
            yield Covered(r.name, c.held, c.total, len(c.pieces), tuple((x.name, x.reason) for x in c.left), c.calls())


def fewest_bytes(records: Sequence[GraphRecord]) -> int:
    """Bytes that any way of running the graphs moves: inputs and outputs, each once. Of a table of which rows are picked, or a cache that is written
    in one place, that counts too much, so it is at most what ours moves."""
    return sum(min(least_bytes(plan_of(r).graph), memory_operations(r)[1].bytes) for r in records if plan_of(r) is not None and not r.eager)


def about() -> dict[str, str]:
    """What a reader of a kept profile wants to know of where it was made."""
    return {"tokamak": __version__, "torch": torch.__version__, "python": platform.python_version(), "system": platform.platform(terse=True),
            "threads": str(torch.get_num_threads()), "made": datetime.datetime.now().isoformat(" ", "minutes")}


def give_back() -> None:
    """What memory the pool keeps for later goes back to the system."""
    compiler._POOL.trim()


def by_position(seen: Traced, records: Sequence[GraphRecord]) -> dict[tuple[str, int], float]:
    """(graph, position) -> seconds a step of everything that the step of a program started on the GPU. What no range has started is known by the
    kernel's name."""
    found: dict[tuple[str, int], float] = {}
    for s, at in placed(seen, records):
        if at is not None:
            found[at] = found.get(at, 0.0) + s.seconds / seen.steps
    return found


def beyond(seen: Traced, records: Sequence[GraphRecord]) -> tuple[Other, ...]:
    """What no step of a program has started, the longest first."""
    found: dict[str, list[float]] = {}
    for s, at in placed(seen, records):
        if at is None:
            found.setdefault(s.name, []).append(s.seconds)
    made = [Other(name, len(each) / seen.steps, sum(each) / seen.steps) for name, each in found.items()]
    return tuple(sorted(made, key=lambda o: -o.seconds))


def placed(seen: Traced, records: Sequence[GraphRecord]) -> Iterator[tuple[Span, tuple[str, int] | None]]:
    """What ran on the GPU, with the (graph, position) that it belongs to."""
    keys = {s.kernel: (r.name, n) for r in records if "program" in r.values for n, s in enumerate(r.values["program"].steps) if isinstance(s, Launch)}
    for s in seen.by_kernel:
        graph, _, position = s.under.removeprefix(KERNEL).rpartition(":")
        yield s, (graph, int(position)) if graph else keys.get(s.name)


def stages(records: Sequence[GraphRecord]) -> dict[str, float]:
    found: dict[str, float] = {}
    for r in records:
        for stage, took in r.seconds.items():
            found[stage] = found.get(stage, 0.0) + took
    return found


def costly(e: Explanation, here: Peaks) -> tuple[Costly, ...]:
    return tuple(Costly(edge, here.memory_seconds(edge.bytes)) for edge in e.edges)


def advice(e: Explanation) -> Iterator[Advice]:
    for b in e.breaks:
        yield Advice("graph break", str(b.place), b.reason, mend(b))
    for r in e.recompiles:
        yield Advice("captured again", f"{r.code} at {r.place}", r.reason, for_recompile(r.reason))
