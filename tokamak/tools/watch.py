"""Running a step and looking at it: what each phase takes, what each kernel takes, and what memory it needs.

A Step is a list of phases, run one after the other: `forward`; `backward`, where a result requires gradients; `optimizer`, where one was given. A
Watcher is a Recorder whose compiled programs tell of every kernel and call of torch that they make, while they are asked to.
"""
from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import TokamakError
from .explain import gradients, leaves_of
from .record import Recorder

KERNEL, PHASE = "tokamak:", "phase:"            # how the ranges begin that torch's profiler is given
TURN = 0.1                                      # seconds in which steps of one side follow each other, before it is another's turn
ALONE, TOGETHER = 0.4, 2                        # seconds from which a step is a turn by itself; so many steps count of any other turn, or more
LONG, FEWEST = 2.0, 3                           # seconds beyond those asked for, after which so few steps of each side will do


class Watcher(Recorder):
    """`mode`: '' (programs run as ever, but for a look at it), 'time' (`events` gets (graph, position, start, duration in nanoseconds) of each kernel
    and call) or 'ranges' (each is a range for torch's profiler). `called`: Dynamo's graphs with what they were compiled to, both under the modes
    (gradients, autocast) of their last call, that call's arguments, and whether gradients were recorded."""

    def __init__(self, keep_arguments: bool = False):
        super().__init__()
        self.mode, self.keep_arguments = "", keep_arguments
        self.events: list[tuple[str, int, int, int]] = []
        self.called: dict[int, tuple[Callable, Callable, tuple, bool]] = {}

    def watch(self, graph: str) -> Callable:
        def watched(position: int, function: Callable) -> Callable:
            label = f"{KERNEL}{graph}:{position}"

            def run(*args, **kwargs):
                if not self.mode:
                    return function(*args, **kwargs)
                if self.mode == "ranges":
                    with record_function(label):
                        return function(*args, **kwargs)
                start = time.perf_counter_ns()
                out = function(*args, **kwargs)
                self.events.append((graph, position, start, time.perf_counter_ns() - start))
                return out
            return run
        return watched

    def looking(self) -> bool:
        return bool(self.mode)

    def calls(self) -> tuple[list[tuple], list[tuple]]:
        """What was called, in two parts: what gradients run through; and what comes behind these, as an optimizer's step does. Where no gradients
        were recorded, all is in the first."""
        trained = [c for c in self.called.values() if c[3] and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves(c[2]))]
        return (trained, [c for c in self.called.values() if not c[3]]) if trained else (list(self.called.values()), [])

    def function(self, gm, made: Callable) -> Callable:
        if not self.keep_arguments:
            return made

        def run(*args):
            grad, casts = torch.is_grad_enabled(), [(k, torch.get_autocast_dtype(k)) for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
            call = under(gm, grad, casts), under(made, grad, casts), tree_map(_apart, args), grad
            out = made(*args)
            self.called[id(gm)] = call          # one that raises is none to measure
            return out
        return torch._dynamo.disable(run, reason="code of the compiler")


class Unrepeatable(TokamakError):
    """A call that the program made raises when it is made again: it changes what it is given (a position that counts up, behind its end)."""


def under(fn: Callable, grad: bool, casts: Sequence[tuple[str, torch.dtype]]) -> Callable:
    """`fn`, called with gradients recorded or not, and under autocast on some kinds of device."""
    def run(*args):
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                modes.enter_context(torch.autocast(kind, dtype))
            try:
                return fn(*args)
            except Exception as error:
                raise Unrepeatable(f"a call cannot be made again with its arguments as they are now: {type(error).__name__}: {error}") from error
    run.graph = fn          # keeps it, so that no other graph can have its number
    return run


def _apart(x):
    """An argument without the graph of gradients behind it."""
    if isinstance(x, torch.Tensor) and x.grad_fn is not None:
        return x.detach().requires_grad_(x.requires_grad)
    return x


class Step:
    """`calls`: (function, arguments, keyword arguments), made in order; then their gradients, and `optimizer`, a function without arguments that
    steps `parameters` by their `grad`."""

    def __init__(self, calls: Sequence[tuple[Callable, tuple, dict]], optimizer: Callable[[], object] | None = None, parameters: Sequence = ()):
        self.calls, self.optimizer, self.parameters = tuple(calls), optimizer, tuple(parameters)
        self.leaves: list[torch.Tensor] | None = None
        self.directions: list[torch.Tensor] = []
        self.roots: list[torch.Tensor] = []

    def phases(self) -> dict[str, Callable[[], None]]:
        found = {"forward": self.forward}
        if self.leaves is None:
            self.forward()
            self.leaves = list(dict.fromkeys(leaves_of(self.roots)))
            self.directions = [torch.ones_like(r) for r in self.roots]
        if self.leaves:
            found["backward"] = self.backward
            if self.optimizer is not None:
                found["optimizer"] = self.step
        return found

    def let_go(self) -> None:
        """What the last step held is free, gradients too."""
        self.roots = []
        for p in self.parameters:
            p.grad = None

    def forward(self) -> None:
        self.let_go()
        out = [fn(*args, **kwargs) for fn, args, kwargs in self.calls]
        if self.leaves == []:               # nothing has gradients: not looked for in the time that a step takes
            return
        found = out if all(isinstance(t, torch.Tensor) for t in out) else tree_leaves(out)
        self.roots = [t for t in found if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn is not None]

    def backward(self) -> None:
        """Results go with their gradients: what lets go of them later finds them in no cache any more."""
        roots, self.roots = self.roots, []
        grads = gradients(roots, self.leaves, self.directions)
        del roots
        if grads is None:               # the function runs backward itself: there is nothing behind it
            self.leaves = []
        elif self.optimizer is not None:
            by_leaf = dict(zip(map(id, self.leaves), grads))
            for p in self.parameters:
                p.grad = by_leaf.get(id(p))

    def step(self) -> None:
        self.optimizer()

    def __call__(self) -> None:
        for phase in self.phases().values():
            phase()


# -- time ------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Took:
    """One step by the host's clock. `start` in nanoseconds; seconds of the `step`, until the `host` was done, and of the host's part of each
    phase."""
    start: int
    step: float
    host: float
    phases: dict[str, float]


@dataclass
class Times:
    """Seconds of a step: medians. `step`: by itself; `host`: until the host is done with it; `phases`: the host's part of each; `least`: the
    shortest step, which other work on the machine has met least; `middle`: between these lies half of the steps; `typical`: the number of the step
    nearest to the median, and `took` what it took."""
    step: float
    host: float
    phases: dict[str, float] = field(default_factory=dict)
    least: float = 0.0
    middle: tuple[float, float] = (0.0, 0.0)
    typical: int = 0
    took: Took | None = None


def interleaved(steps: dict[str, Step], device: str, seconds: float, least: int = 5, looked: Looked | None = None) -> dict[str, Times]:
    """Times of several ways of making a step, taken in turns, so that other work on the machine meets all of them alike. `looked` at one of them: its
    kernels are timed in the same steps."""
    taken: dict[str, list[Took]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds * len(steps)
    while (now := time.perf_counter()) < end or min(map(len, taken.values())) < (least if now < end + LONG else FEWEST):
        for name, step in steps.items():
            taken[name] += _turn(step, device, min(TURN, seconds / 5), looked if looked is not None and looked.name == name else None)
    if looked is not None and looked.name in taken:
        looked.took = tuple(t.step for t in taken[looked.name])
    return {name: _medians(found) for name, found in taken.items()}


class Looked:
    """Looks at the kernels of the steps called `name`, whose programs tell `watcher`, by the host's clock: what runs on the CPU runs while the host
    waits for it. `steps`: the events of each step; `took`: its seconds."""

    def __init__(self, name: str, watcher: Watcher):
        self.name, self.watcher = name, watcher
        self.steps: list[list[tuple[str, int, int, int]]] = []
        self.took: tuple[float, ...] = ()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.watcher.events, self.watcher.mode = [], "time"
        try:
            yield
        finally:
            self.watcher.mode = ""
        self.steps.append(self.watcher.events)

    def seconds(self) -> dict[tuple[str, int], float]:
        """(graph, position) -> seconds a step, medians."""
        taken: dict[tuple[str, int], list[float]] = {}
        for events in self.steps:
            sums: dict[tuple[str, int], int] = {}
            for graph, position, _, took in events:
                sums[graph, position] = sums.get((graph, position), 0) + took
            for key, took in sums.items():
                taken.setdefault(key, []).append(took * 1e-9)
        return {key: statistics.median(found) for key, found in taken.items()}

    def busy(self, step: float) -> float:
        """Seconds in which kernels run, of a step of `step`: what they take each, together; where other work stretched steps, here one kernel and
        there another, the part of the steps that they took."""
        shares = [sum(took for *_, took in events) * 1e-9 / whole for events, whole in zip(self.steps, self.took) if whole]
        return min(step, max(sum(self.seconds().values()), step * statistics.median(shares or [0.0])))


def _turn(step: Step, device: str, seconds: float, looked: Looked | None) -> list[Took]:
    """Steps in a row, for `seconds`. The first finds caches and allocators as another way has left them, which costs a short step up to as much
    again, so it does not count; that of a very long step does."""
    def one() -> Took:
        with looked.step() if looked is not None else contextlib.nullcontext():
            return _one(step, device)
    start, first = time.perf_counter(), one()
    if first.step > ALONE:
        return [first]
    if looked is not None:
        looked.steps.pop()
    found = [one()]
    while len(found) < TOGETHER or time.perf_counter() - start < seconds:
        found.append(one())
    return found


def _one(step: Step, device: str) -> Took:
    """One step by the host's clock, the device idle before it; on a GPU the whole of it between two events there."""
    phases, found = step.phases(), {}
    gpu = torch.device(device).type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
    synchronize(device)
    if gpu:
        events[0].record(torch.cuda.current_stream(device))
    start = last = time.perf_counter_ns()
    for name, phase in phases.items():
        phase()
        now = time.perf_counter_ns()
        found[name], last = (now - last) * 1e-9, now
    host = whole = (last - start) * 1e-9
    if gpu:
        events[1].record(torch.cuda.current_stream(device))
        synchronize(device)
        whole = events[0].elapsed_time(events[1]) * 1e-3
    return Took(start, whole, host, found)


def _medians(found: list[Took]) -> Times:
    steps = sorted(t.step for t in found)
    middle, n = statistics.median_low(steps), len(steps)            # a step that was made, whose phases add up to it
    typical = min(range(n), key=lambda i: abs(found[i].step - middle))
    phases = {name: statistics.median(t.phases[name] for t in found) for name in found[0].phases}
    return Times(middle, statistics.median(t.host for t in found), phases, steps[0], (steps[n // 4], steps[(3 * n) // 4]), typical, found[typical])


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
