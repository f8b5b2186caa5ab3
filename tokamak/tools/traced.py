"""What torch's profiler sees of a Step: what runs on the device and when, eager's operators on the CPU, and memory over time.

Steps run one after the other, each phase in a range `phase:NAME#STEP`; a watched program's kernels stand in ranges `tokamak:GRAPH:POSITION`. The
profiler slows the host, so gaps on a timeline that it drew are longer than in a step by itself.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, record_function

from .spans import WATCHED, Mark, Span, marks_of, spans_under
from .watch import KERNEL, PHASE, Looked, Step, Times, Watcher, synchronize

CALLS = 5                                       # steps under the profiler
POINTS = 2000                                   # of memory over time that are kept


@dataclass(frozen=True)
class Slice:
    """Something on a timeline: seconds from the step's start. `lane`: phase, host, kernel (or a call of torch) or operator (of eager's);
    `graph`, `position`: of the program's step that it is or has started, '' and -1 of anything else."""
    lane: str
    name: str
    start: float
    seconds: float
    graph: str = ""
    position: int = -1


@dataclass
class Traced:
    """What the device did in `steps` steps: `by_phase` and `by_kernel` hold the same spans under the ranges that started them; `marks`: those ranges,
    on the host."""
    by_phase: list[Span]
    by_kernel: list[Span]
    steps: int
    marks: tuple[Mark, ...] = ()

    @property
    def busy(self) -> float:
        """Seconds a step in which the device does something."""
        total, until = 0, 0
        for s in self.by_phase:
            total += max(0, s.end - max(s.start, until))
            until = max(until, s.end)
        return total * 1e-9 / self.steps

    @property
    def kernels(self) -> int:
        return round(len(self.by_phase) / self.steps)

    def phases(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for s in self.by_phase:
            name = s.under.removeprefix(PHASE).partition("#")[0]
            found[name] = found.get(name, 0.0) + s.seconds / self.steps
        return found

    def timeline(self, step: int = 0) -> tuple[Slice, ...]:
        """What happened in one of the steps."""
        phases = [m for m in self.marks if m.name.startswith(PHASE) and m.name.endswith(f"#{step}")]
        if not phases:
            return ()
        zero, end = phases[0].start, phases[-1].end
        second = lambda t: (t - zero) * 1e-9
        out = [Slice("phase", m.name.removeprefix(PHASE).partition("#")[0], second(m.start), m.duration * 1e-9) for m in phases]
        out += [Slice("host", f"starts {m.name.removeprefix(KERNEL)}", second(m.start), m.duration * 1e-9, *_step(m.name))
                for m in self.marks if m.name.startswith(KERNEL) and zero <= m.start <= end]
        ran = [k for p, k in zip(self.by_phase, self.by_kernel, strict=True) if p.under.endswith(f"#{step}")]
        return (*out, *(Slice("kernel", s.name, second(s.start), s.seconds, *_step(s.under)) for s in ran))


def _step(label: str) -> tuple[str, int]:
    """(graph, position) of a range around a program's step."""
    graph, _, position = label.removeprefix(KERNEL).rpartition(":")
    return (graph, int(position)) if label.startswith(KERNEL) and graph else ("", -1)


@contextlib.contextmanager
def ranged(watcher: Watcher | None) -> Iterator[None]:
    """Within it, the programs that tell `watcher` open a range for each of their kernels and calls."""
    if watcher is None:
        yield
        return
    watcher.mode = "ranges"
    try:
        yield
    finally:
        watcher.mode = ""


def events_of(step: Step, device: str, watcher: Watcher | None = None, calls: int = CALLS, memory: bool = False) -> list:
    """The profiler's events of some steps."""
    phases, gpu = step.phases(), torch.device(device).type == "cuda"
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu and not memory else [])]
    if len(activities) > 1:
        WATCHED.set()
    with torch.profiler.profile(activities=activities, profile_memory=memory) as profiler, ranged(watcher):
        for n in range(calls):
            for name, phase in phases.items():
                with record_function(f"{PHASE}{name}#{n}"):
                    phase()
        synchronize(device)
    return list(profiler.profiler.kineto_results.events())


def traced(step: Step, device: str, watcher: Watcher | None = None, calls: int = CALLS) -> Traced:
    """Some steps under torch's profiler, on a GPU."""
    events = events_of(step, device, watcher, calls)
    return Traced(*spans_under(events, PHASE, KERNEL), calls, marks_of(events, (PHASE, KERNEL)))


# -- on a CPU ------------------------------------------------------------------------------------------------------------------
def watched_timeline(looked: Looked, times: Times) -> tuple[Slice, ...]:
    """The typical step of those that `looked` has seen, as the host's clock had it."""
    took, start, out = times.took, 0.0, []
    for name, seconds in took.phases.items():
        out.append(Slice("phase", name, start, seconds))
        start += seconds
    return (*out, *(Slice("kernel", "", (at - took.start) * 1e-9, seconds * 1e-9, graph, position)
                    for graph, position, at, seconds in looked.steps[times.typical]))


def operators(step: Step, calls: int = CALLS) -> tuple[float, tuple[Slice, ...]]:
    """(seconds that torch's operators take on the CPU, those that no other one calls, with what the profiler costs them: the median of some steps;
    the step of that). The first step that the profiler sees is slower, and does not count."""
    events = events_of(step, "cpu", None, calls + 1)
    outer, marks = outermost(events), marks_of(events, (PHASE,))
    taken: list[tuple[float, list[Mark], list[tuple[int, int, str]]]] = []
    for n in range(1, calls + 1):
        mine = [m for m in marks if m.name.endswith(f"#{n}")]
        inside = [o for o in outer if mine and mine[0].start <= o[0] <= mine[-1].end]
        taken.append((sum(took for _, took, _ in inside) * 1e-9, mine, inside))
    total, marks, inside = sorted(taken, key=lambda x: x[0])[calls // 2]
    if not marks:
        return total, ()
    zero = marks[0].start
    phases = [Slice("phase", m.name.removeprefix(PHASE).partition("#")[0], (m.start - zero) * 1e-9, m.duration * 1e-9) for m in marks]
    return total, (*phases, *(Slice("operator", name.removeprefix("aten::"), (start - zero) * 1e-9, took * 1e-9) for start, took, name in inside))


def outermost(events: Sequence) -> list[tuple[int, int, str]]:
    """(start, duration, name) of those of torch's operators that no other one calls, in order."""
    found = sorted((e.start_thread_id(), e.start_ns(), e.duration_ns(), name) for e in events if (name := e.name()).startswith("aten::"))
    outer: list[tuple[int, int, str]] = []
    thread, until = None, 0
    for which, start, took, name in found:
        if which != thread:
            thread, until = which, 0
        if start >= until:
            outer.append((start, took, name))
        until = max(until, start + took)
    return sorted(outer)


# -- memory ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a step holds beyond what stood before it: at its `peak`, and over time as (seconds, bytes); `phases` of that step; `pools`: bytes
    that the process's recordings of CUDA graphs keep for themselves."""
    peak: int
    curve: tuple[tuple[float, int], ...]
    phases: tuple[Slice, ...] = ()
    pools: int = 0


def memory_use(step: Step, device: str, before: Callable[[], object] = lambda: None) -> MemoryUse:
    """Memory over one step. `before`: gives back what is only kept for the next step."""
    base, gpu = settled(step, device, before), torch.device(device).type == "cuda"
    events = events_of(step, device, None, 1, memory=True)
    kind = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type() == kind)
    marks = marks_of(events, (PHASE,))
    zero = marks[0].start if marks else changes[0][0] if changes else 0
    held, curve = 0, [(0.0, 0)]
    for at, nbytes in changes:
        held += nbytes
        curve.append(((at - zero) * 1e-9, held))
    most = torch.cuda.max_memory_allocated(device) - base if gpu else max(b for _, b in curve)
    phases = tuple(Slice("phase", m.name.removeprefix(PHASE).partition("#")[0], (m.start - zero) * 1e-9, m.duration * 1e-9) for m in marks)
    return MemoryUse(most, thinned(curve), phases, sum(recording_pools().values()) if gpu else 0)


def settled(step: Step, device: str, before: Callable[[], object]) -> int:
    """Bytes that stand on a GPU when nothing of earlier steps is held, from where its peak is counted; on a CPU 0."""
    step.phases()
    step.let_go()
    before()
    if torch.device(device).type != "cuda":
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def recording_pools() -> dict[tuple, int]:
    """Bytes of each pool of memory on GPUs that is not the allocator's own: those of recordings."""
    held: dict[tuple, int] = {}
    for segment in torch.cuda.memory_snapshot():
        if (pool := tuple(segment.get("segment_pool_id", (0, 0)))) != (0, 0):
            held[pool] = held.get(pool, 0) + segment["total_size"]
    return held


def thinned(curve: Sequence[tuple[float, int]], most: int = POINTS) -> tuple[tuple[float, int], ...]:
    """At most about `most` points of a curve: of each stretch the highest and the last."""
    if len(curve) <= most:
        return tuple(curve)
    each = -(-2 * len(curve) // most)
    out: list[tuple[float, int]] = []
    for i in range(0, len(curve), each):
        piece = curve[i:i + each]
        high = max(piece, key=lambda p: p[1])
        out += [high] if high is piece[-1] else [high, piece[-1]]
    return tuple(out)


def peak_bytes(step: Step, device: str, before: Callable[[], object] = lambda: None) -> int:
    """Bytes that a step holds at most, beyond what stood before it. A GPU's allocator knows it without torch's profiler, behind which a process was
    seen to be slower."""
    if torch.device(device).type != "cuda":
        return memory_use(step, device, before).peak
    base = settled(step, device, before)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - base
