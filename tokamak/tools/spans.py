"""What torch's profiler saw, as plain values: what ran on the GPU, and by which range of the host's time it was started."""
from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

WATCHED = threading.Event()         # set: torch's profiler has watched a GPU in this process, for one of the tools


@dataclass(frozen=True)
class Span:
    """Something that ran on a device, in nanoseconds. `under`: the innermost of the caller's ranges (`record_function`) that started it, or ''."""
    name: str
    start: int
    duration: int
    under: str = ""

    @property
    def seconds(self) -> float:
        return self.duration * 1e-9

    @property
    def end(self) -> int:
        return self.start + self.duration


@dataclass(frozen=True)
class Mark:
    """A range of the host's time, in nanoseconds."""
    name: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        return self.start + self.duration


def marks_of(events, ranges: tuple[str, ...]) -> tuple[Mark, ...]:
    """The caller's ranges (`record_function`) whose names begin with one of `ranges`, in order."""
    found = [Mark(e.name(), e.start_ns(), e.duration_ns()) for e in events if e.device_type() == DeviceType.CPU and e.name().startswith(ranges)]
    return tuple(sorted(found, key=lambda m: m.start))


def device_spans(fn: Callable[[], object], calls: int) -> list[Span]:
    """What `calls` calls of `fn` ran on the GPU, in order. Only the device is watched, which costs the host least."""
    torch.cuda.synchronize()
    WATCHED.set()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    return spans_of(profiler.profiler.kineto_results.events(), "")


def spans_of(events, ranges: str) -> list[Span]:
    """The spans among the events of the profiler. `ranges`: the beginning of the names of the `record_function` ranges that they are attributed to,
    '' for none."""
    found, = spans_under(events, ranges)
    return found


def spans_under(events, *ranges: str) -> tuple[list[Span], ...]:
    """The same for several beginnings of names. Each event is asked once: a training step has tens of thousands."""
    ran: list[tuple[int, int, str, int, int]] = []             # start, duration, name, its launch, the operator behind that
    launches, operators, marks, named = {}, {}, {r: [] for r in ranges}, any(ranges)
    for e in events:
        at, which, linked = e.start_ns(), e.correlation_id(), e.linked_correlation_id()
        if e.device_type() == DeviceType.CPU:
            (launches if linked else operators)[which] = at                             # calls of the driver and of the runtime; what made them
            if named and (name := e.name()).startswith(ranges):
                for r in ranges:
                    marks[r] += [(at, at + e.duration_ns(), name)] if r and name.startswith(r) else []
        elif e.device_type() == DeviceType.CUDA and not e.is_user_annotation() and not (name := e.name()).endswith(" Sync"):
            ran.append((at, e.duration_ns(), name, which, linked))
    ran.sort(key=lambda x: x[0])
    started = [launches.get(which, operators.get(linked)) for *_, which, linked in ran]
    return tuple([Span(name, at, took, under) for (at, took, name, *_), under in zip(ran, innermost(sorted(marks[r]), started), strict=True)]
                 for r in ranges)


def innermost(marks: Sequence[tuple[int, int, str]], times: Sequence[int | None]) -> Iterator[str]:
    """Of each time the range (start, end, name) that began last, where it has not ended yet, or ''."""
    starts = [m[0] for m in marks]
    for at in times:
        inner = marks[bisect.bisect_right(starts, at) - 1] if at is not None and starts and at >= starts[0] else None
        yield inner[2] if inner is not None and at <= inner[1] else ""
