"""What torch's profiler saw, as plain values: what ran on the GPU, and by which range of the host's time it was started."""
from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity


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


def device_spans(fn: Callable[[], object], calls: int = 1, ranges: str = "") -> list[Span]:
    """What `calls` calls of `fn` ran on the GPU, in order. `ranges`: the beginning of the names of `record_function` ranges to attribute it to; with ''
    only the device is watched, which costs the host least."""
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if ranges else [])]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    return spans_of(profiler.profiler.kineto_results.events(), ranges)


def spans_of(events, ranges: str = "") -> list[Span]:
    """The spans among the events of the profiler."""
    host = [e for e in events if e.device_type() == DeviceType.CPU]
    marks = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in host if ranges and e.name().startswith(ranges))
    starts = [m[0] for m in marks]
    launches = {e.correlation_id(): e.start_ns() for e in host if e.linked_correlation_id()}            # calls of the driver, of the runtime
    operators = {e.correlation_id(): e.start_ns() for e in host if not e.linked_correlation_id()}

    def under(e) -> str:
        at = launches.get(e.correlation_id(), operators.get(e.linked_correlation_id()))
        inner = marks[bisect.bisect_right(starts, at) - 1] if at is not None and starts and at >= starts[0] else None
        return inner[2] if inner is not None and at <= inner[1] else ""
    found = [Span(e.name(), e.start_ns(), e.duration_ns(), under(e)) for e in events
             if e.device_type() == DeviceType.CUDA and not e.is_user_annotation() and not e.name().endswith(" Sync")]
    return sorted(found, key=lambda s: s.start)
