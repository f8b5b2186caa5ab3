"""Timing on a GPU. `device`: the kernels, copies and sets of a call, summed, from the profiler; `wall`: events around the call. Before every call the
second-level cache is flushed by filling a large buffer of bytes; the profiler's events are cut into calls at those fills, which no case makes.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

FLUSH = 256 << 20               # bytes written before each call: several times the second-level cache of any GPU of today
NORM = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}          # tolerance for ||out - ref|| / ||ref||
TF32 = 2e-3, 1e-2              # both, where products round their factors to TF32
PEAK = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float64: 1e-11}          # and for max |out - ref| / max |ref|


@dataclass(frozen=True)
class Span:
    """Something that ran on the device: nanoseconds."""
    name: str
    start: int
    duration: int


@dataclass(frozen=True)
class Times:
    """Seconds a call, medians over calls. `kernels`: how many a call starts, copies and sets included; `names`: seconds by kernel name."""
    device: float
    wall: float
    kernels: int
    names: tuple[tuple[str, float], ...]


class Timer:
    """Measures calls on the current CUDA device: `calls` of them by each of the two methods, after `warm` that are not counted. `mark`: the name of
    the flush, where it is known."""

    def __init__(self, calls: int = 15, warm: int = 3, mark: str = ""):
        self.calls, self.warm = calls, warm
        # of a type that no case has: what fills it is known by its kernel's name
        self.buffer = torch.empty(FLUSH // torch.complex64.itemsize, dtype=torch.complex64, device="cuda")
        self.mark = mark or self._learn()

    def flush(self) -> None:
        self.buffer.fill_(1)

    def _learn(self) -> str:
        """The name under which the profiler shows the flush; a profiler's first session may show nothing."""
        for _ in range(3):
            spans = self._profile(lambda: None, 3)
            if spans:
                return max(spans, key=lambda s: s.duration).name
        raise RuntimeError("the profiler shows nothing of what runs on the device")

    def _profile(self, fn: Callable, calls: int) -> list[Span]:
        """Everything that ran on the device during `calls` calls, each after a flush, in order."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(calls):
                self.flush()
                fn()
            torch.cuda.synchronize()
        return sorted((s for e in profiler.events() if (s := span(e))), key=lambda s: s.start)

    def wall(self, fn: Callable) -> float:
        """Median seconds of a call between two events; the flush before it gives the host a head start of its length."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.calls)]
        for begin, end in pairs:
            self.flush()
            begin.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e-3

    def __call__(self, fn: Callable) -> Times:
        for _ in range(self.warm):
            fn()
        wall = self.wall(fn)
        for _ in range(3):          # the profiler may lose events at a session's edges: then the session is taken again
            calls = cut(self._profile(fn, self.calls), self.mark)
            if len(calls) == self.calls and any(calls):
                return summary(calls, wall)
        raise RuntimeError(f"the profiler shows {len(calls)} of {self.calls} calls")


def span(event) -> Span | None:
    """A profiler event as a Span, or None when it did not run on the device."""
    if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation or event.name.endswith(" Sync"):
        return None
    return Span(event.name, int(event.time_range.start * 1000), int(event.time_range.elapsed_us() * 1000))


def cut(spans: list[Span], mark: str) -> list[list[Span]]:
    """The spans of each call: what lies between two marks, or after the last. What lies before the first mark belongs to no call."""
    calls: list[list[Span]] = []
    for s in spans:
        if s.name == mark:
            calls.append([])
        elif calls:
            calls[-1].append(s)
    return calls


def summary(calls: list[list[Span]], wall: float) -> Times:
    """Medians over the calls; the names are those of the median call."""
    totals = [sum(s.duration for s in c) for c in calls]
    middle = calls[totals.index(statistics.median_low(totals))]
    names: dict[str, float] = {}
    for s in middle:
        names[s.name] = names.get(s.name, 0.0) + s.duration * 1e-9
    return Times(statistics.median(totals) * 1e-9, wall, len(middle), tuple(sorted(names.items(), key=lambda n: -n[1])))


# -- what the machine can do -------------------------------------------------------------------------------------------------
def rates(timer: Timer) -> dict[str, float]:
    """Bytes a second (read and written) of a large copy, and FLOPs a second of a large bf16 product, on random data."""
    return {"copy": _copy_rate(timer, 1 << 29), "matmul": _matmul_rate(timer, 8192)}


def _copy_rate(timer: Timer, n: int) -> float:
    source = torch.randn(n, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / timer(lambda: target.copy_(source)).device


def _matmul_rate(timer: Timer, n: int) -> float:
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n ** 3 / timer(lambda: a @ b).device


def machine() -> dict[str, str]:
    """Device and versions."""
    import triton
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


# -- right or wrong ----------------------------------------------------------------------------------------------------------
def errors(got, reference) -> tuple[float, float]:
    """(||got - ref|| / ||ref||, max |got - ref| / max |ref|), the worst over all tensors. Integers have to be equal: infinite if one is not."""
    got, reference = tree_leaves(got), tree_leaves(reference)
    if len(got) != len(reference) or any(g.shape != r.shape for g, r in zip(got, reference)):
        return float("inf"), float("inf")
    pairs = [_error(g.detach(), r) for g, r in zip(got, reference)]
    return worst(p[0] for p in pairs), worst(p[1] for p in pairs)


def worst(values) -> float:
    """The largest; infinite where one is NaN, which max would lose."""
    return max((v if v == v else float("inf") for v in values), default=0.0)


def _error(got, reference) -> tuple[float, float]:
    if not reference.is_floating_point():
        return (0.0, 0.0) if torch.equal(got, reference) else (float("inf"), float("inf"))
    difference = got.double() - reference
    tiny = torch.finfo(torch.float64).tiny
    return (float(difference.norm() / reference.norm().clamp_min(tiny)), float(difference.abs().max() / reference.abs().max().clamp_min(tiny)))


def right(found: tuple[float, float], dtype: torch.dtype, tf32: bool = False) -> bool:
    """Whether both errors are within the tolerance of the case's dtype, of which products may be made in TF32."""
    norm, peak = TF32 if tf32 else (NORM[dtype], PEAK[dtype])
    return found[0] <= norm and found[1] <= peak
