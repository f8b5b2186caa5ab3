"""`tokamak tune` and `tokamak.tune`: schedules near the heuristic's, tried on the device, for the kernels of a program at its sizes.

    Tuning ::= Tuned (one kernel: the heuristic's schedule and time, the best and its) in order

A kernel is tried by itself on numbers made up. What is faster than the heuristic's by more than two measurements of one differ, and computes the
same, is kept in the cache folder, by the GPU's name and the kernel's structure and size class; later compiles take it up (option `tuned`).
Products of tiles keep the schedule that was chosen.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..backend import backend
from ..codegen.tuned import structure
from ..errors import TokamakError
from ..fuse.cost import estimates
from ..options import current
from ..runtime import tuned as kept
from ..schedule.beside import BesideSchedule
from ..schedule.matmul import MatmulSchedule
from ..schedule.neighbours import neighbours
from ..schedule.tile_schedule import TileSchedule
from .dynamo import uncompiled
from .explain import differentiate
from .kernels import launched
from .record import GraphRecord, Recorder, recording
from .trial import Bench, Task, Trial, equal

ROUNDS = 4              # steps away from the heuristic's schedule
LEAST = 0.02            # what a gain has to be, where measurements do not differ by more
AGAIN = 5               # measurements of the two that are compared in the end
CALLS = 11              # a measurement
FLUSH = 256 << 20       # bytes written before a call: several times the second-level cache

Timer = Callable[[Callable[[], object], TileSchedule], float]           # seconds of a call of a kernel that runs under that schedule


@dataclass(frozen=True)
class Tuned:
    """What came of one kernel. Times in seconds; `changes`: what the best schedule differs by; `tried`: how many schedules were timed."""
    name: str
    structure: str
    heuristic: str
    before: float
    best: str
    after: float
    changes: tuple[str, ...]
    tried: int

    @property
    def gain(self) -> float:
        """How many times as fast."""
        return self.before / self.after


@dataclass(frozen=True)
class Tuning:
    """Prints as a table. `device`: the GPU's name; `where`: the folder in which the schedules are kept, "" for nowhere."""
    device: str
    where: str
    kernels: tuple[Tuned, ...]

    def __str__(self) -> str:
        rows = [("kernel", "heuristic", "us", "best", "us", "gain")]
        rows += [(k.name, k.heuristic, f"{k.before * 1e6:.1f}", k.best if k.changes else "the same", f"{k.after * 1e6:.1f}" if k.changes else "",
                  f"{k.gain:.2f}" if k.changes else "") for k in self.kernels]
        widths = [max(map(len, column)) for column in zip(*rows)]
        right = (2, 4, 5)
        lines = ["  ".join(x.rjust(w) if n in right else x.ljust(w) for n, (x, w) in enumerate(zip(row, widths))).rstrip() for row in rows]
        better = sum(bool(k.changes) for k in self.kernels)
        said = f"kept in {self.where}" if self.where else "cache_dir is empty, so nothing is kept"
        last = f"{better} of {len(self.kernels)} kernels are faster under another schedule on {self.device}"
        return "\n".join([*lines, last + (f"; {said}" if better else "")])


# -- running the program -------------------------------------------------------------------------------------------------
def tune(fn: Callable, *inputs, timer: Timer | None = None, **kwargs) -> Tuning:
    """Compiles `fn` (a module or function) for `inputs`, runs it once, backward too where a result requires gradients, and tunes its kernels. The
    model really runs, as under `tokamak.explain`. `timer`: in place of the device's clock. Raises TokamakError where nothing was compiled or nothing
    runs on a GPU."""
    torch._dynamo.reset()
    original = uncompiled(fn)
    try:
        with recording(tuned=False) as recorder:
            differentiate(torch.compile(original, backend=backend)(*inputs, **kwargs))
    finally:
        torch._dynamo.reset()
    if not recorder.graphs:
        raise TokamakError("nothing was compiled, so there is nothing to tune")
    return tuning(recorder, timer)


def tuning(recorder: Recorder, timer: Timer | None = None, report: Callable[[Tuned], object] = lambda _: None) -> Tuning:
    """Tunes the kernels in a record, and keeps what is faster. `report` is told of each. Raises TokamakError where none runs on a GPU, or none is
    searched."""
    found = list(tasks(recorder.graphs))
    if not found:
        if any(record.values["target"].kind == "gpu" for record in recorder.graphs if "lower" in record.values and launched(record)):
            raise TokamakError("nothing here is tuned: products of tiles keep the schedule that was chosen, and so do strict programs and open sizes")
        raise TokamakError("tuning is for GPUs: no kernel of this program runs on one (schedules for CPUs are not searched)")
    if timer is None and any(t.target.name == "cpu" for t in found):
        raise TokamakError("tuning is for GPUs: the interpreter's time says nothing of one")
    where, device, out = current().cache_dir, found[0].target.model, []
    for task in (t for t in found if t.target.model == device):
        k = searched(task, timer or device_timer(task.target.name), where)
        if where:               # one by one, so that a search that is stopped has not been for nothing
            kept.keep(where, device, {k.structure: {"changes": k.changes, "before": k.before, "after": k.after}})
        out.append(k)
        report(k)
    return Tuning(device, where, tuple(out))


def tasks(graphs: Iterable[GraphRecord]) -> Iterator[Task]:
    """Every distinct kernel for a GPU that was compiled at known sizes, in running order, but products of tiles."""
    seen: set[str] = set()
    for record in graphs:
        machine = record.values.get("target")
        if "lower" not in record.values or machine is None or machine.kind != "gpu" or machine.ordered:
            continue
        graph = record.values["lower"].plan.graph
        hints, sizes = estimates(graph, machine), {name: graph.hints.get(name) for name in graph.sizes}
        for x in launched(record) if None not in sizes.values() else ():
            if isinstance(x.kernel.schedule, (MatmulSchedule, BesideSchedule)):
                continue
            key = structure(x.kernel, hints)
            if key not in seen:
                seen.add(key)
                yield Task(x.name, key, x.kernel.body, x.kernel.schedule, hints, sizes, machine)


# -- searching -------------------------------------------------------------------------------------------------------------
def searched(task: Task, timer: Timer, cache_dir: str = "") -> Tuned:
    """Goes from the heuristic's schedule to the best of its neighbours as long as that helps; then measures the two against each other."""
    bench = Bench(task, cache_dir)
    start = bench.build([task.schedule])[task.schedule]
    want = bench.results(start)
    time = lambda trial: timer(lambda: bench.run(trial), trial.schedule)
    first = [time(start) for _ in range(3)]
    noise = max(LEAST, (max(first) - min(first)) / min(first))
    best, changes, least, known = start, (), min(first), {task.schedule}
    for _ in range(ROUNDS):
        near = {s: (*changes, c) for c, s in neighbours(task.body, best.schedule, task.hints, task.target) if s not in known}
        known.update(near)
        timed = [(time(t), t) for t in bench.build(list(near)).values() if t.spilled <= start.spilled and right(bench, t, want)]
        fastest = min(timed, key=lambda x: x[0], default=(least, best))
        if fastest[0] >= least * (1 - noise / 2):
            break
        (least, best), changes = fastest, near[fastest[1].schedule]
    pairs = [(time(start), time(best)) for _ in range(AGAIN)] if changes else [(least, least)]
    before, after = (statistics.median(x) for x in zip(*pairs))
    if not changes or after >= before * (1 - noise):
        best, changes, after = start, (), before
    return Tuned(task.name, task.structure, str(task.schedule), before, str(best.schedule), after, changes, len(known))


def right(bench: Bench, trial: Trial, want: list[torch.Tensor]) -> bool:
    """Can it be launched, and does it compute what the heuristic's does?"""
    try:
        return equal(bench.results(trial), want)
    except torch.AcceleratorError:  # a fault on the device, after which nothing runs there: no word on this schedule alone
        raise
    except RuntimeError:            # more shared memory or registers than a program may have
        return False


def device_timer(device: str) -> Timer:
    """Median seconds of a call between two events, each after a flush of the second-level cache."""
    room = torch.empty(FLUSH, dtype=torch.int8, device=device)

    def timer(call: Callable[[], object], _: TileSchedule) -> float:
        with torch.cuda.device(device):
            pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
            for begin, end in pairs:
                room.fill_(1)
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e-3
    return timer
