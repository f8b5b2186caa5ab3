"""What this machine's memory and arithmetic do at most: measured once, kept in the cache folder, never read from a data sheet.

    copy      (bytes read and written, seconds) by size: the shortest time in which a kernel moved so many bytes. On a CPU the best of torch's copy
              on all threads and on one and of a kernel of ours, in buffers that exist; on a GPU torch's copy, through buffers that
              together exceed its second-level cache
    matmul    type -> FLOPs a second of a large product; float32 without TF32, which stands as tf32
    launch    seconds of the shortest kernel: what no kernel can be faster than

Each is the best of many, since other work of the machine takes from it. Where that took much of the cores of a CPU meanwhile (a copy on two cores
that eight processes shared reached a ninth of what it does alone), the figures say so, and the next process takes them again and keeps the better of
both.
"""
from __future__ import annotations

import datetime
import functools
import hashlib
import importlib
import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..options import current
from ..runtime.cache import open_cache
from .spans import device_spans

VERSION = 3
MIB = 1 << 20
CPU_SIZES = tuple(1 << n for n in range(12, 29, 2))             # bytes of the source: 4 KiB ... 256 MiB
GPU_SIZES = tuple(1 << n for n in range(12, 31, 2))             # 4 KiB ... 1 GiB
SECONDS = 0.1          # of calls a figure on a CPU
CALLS = 15              # a figure on a GPU
SIDE = 8192              # of the squares whose product is the rate of products of a GPU
BUSY = 0.1              # of the cores: where other work took more, figures of a CPU are too low


@dataclass(frozen=True)
class Peaks:
    """What `device` (its name) was measured to do, on the day `measured`; `others`: the share of the CPU's cores that other work took meanwhile."""
    device: str
    copy: tuple[tuple[int, float], ...]
    matmul: dict[str, float]
    launch: float
    measured: str
    others: float = 0.0

    @property
    def when(self) -> str:
        return self.measured + (f" while other work took {self.others:.0%} of the cores: too low" if self.others > BUSY else "")

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the largest copy."""
        nbytes, seconds = self.copy[-1]
        return nbytes / seconds

    def memory_seconds(self, nbytes: float) -> float:
        """The shortest time in which so many bytes move: between two sizes of the curve by the line through both, on logarithmic scales."""
        if nbytes <= self.copy[0][0]:
            return self.copy[0][1] if nbytes else 0.0
        for (a, s), (b, t) in itertools.pairwise(self.copy):
            if nbytes <= b:
                return s * (t / s) ** (math.log(nbytes / a) / math.log(b / a))
        return nbytes / self.bandwidth

    def arithmetic_seconds(self, flops: float, dtype: str = "float32") -> float:
        """The shortest time for so many operations in `dtype`; of a type without a figure, in float32."""
        return flops / self.matmul.get(dtype, self.matmul["float32"])


def device_name(device: str) -> str:
    """The model of a processor or GPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor() or platform.machine())


def known(device: str) -> Peaks | None:
    """What was measured of `device` before and kept in the cache folder; None when nothing was, or nothing is kept."""
    where = current().cache_dir
    found = open_cache(where).get(_key(device)) if where else None
    return _parsed(found) if found is not None else None


def peaks(device: str = "cpu", again: bool = False) -> Peaks:
    """What `device` does at most: from the cache folder, else measured now (about two seconds); once more in a process where other work was in the
    way then. `again` measures in any case, and beside other work keeps what was better before."""
    kept, mine = known(device), _MEASURED.get(_key(device))
    found = mine or kept
    if again or found is None or (mine is None and found.others > BUSY):
        new = (_gpu if torch.device(device).type == "cuda" else _cpu)(device)
        found = better(found, new) if found is not None and (not again or new.others > BUSY) else new
        if current().cache_dir:
            open_cache(current().cache_dir).put(_key(device), json.dumps(asdict(found)).encode())
        _MEASURED[_key(device)] = found
    return found


def better(a: Peaks, b: Peaks) -> Peaks:
    """Of each figure the better one; `others` as where it took least."""
    seconds = dict(a.copy)
    seconds.update((n, min(s, seconds.get(n, s))) for n, s in b.copy)
    rates = {k: max(a.matmul.get(k, 0.0), b.matmul.get(k, 0.0)) for k in {**a.matmul, **b.matmul}}
    return Peaks(b.device, tuple(sorted(seconds.items())), rates, min(a.launch, b.launch), b.measured, min(a.others, b.others))


_MEASURED: dict[str, Peaks] = {}            # of this process, for when nothing is kept on disk


def _key(device: str) -> str:
    """The name under which figures are kept: they hold for a processor, a number of threads and a version of torch."""
    facts = (VERSION, device_name(device), torch.get_num_threads() if torch.device(device).type == "cpu" else 0, torch.__version__)
    return "peaks-" + hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _parsed(content: bytes) -> Peaks | None:
    try:
        d = json.loads(content)
        return Peaks(d["device"], tuple((int(n), float(s)) for n, s in d["copy"]), {k: float(v) for k, v in d["matmul"].items()}, float(d["launch"]),
                     str(d["measured"]), float(d["others"]))
    except (ValueError, KeyError, TypeError):
        return None


def _made(device: str, copy: list[tuple[int, float]], matmul: dict[str, float], launch: float) -> Peaks:
    least, curve = math.inf, []
    for nbytes, seconds in reversed(copy):      # what moves more bytes in less time shows that fewer can be moved in it
        least = min(least, seconds)
        curve.append((nbytes, least))
    return Peaks(device_name(device), tuple(reversed(curve)), matmul, min(launch, least), datetime.date.today().isoformat())


# -- on a CPU ------------------------------------------------------------------------------------------------------------
def shortest(fn: Callable[[], object], seconds: float = SECONDS, least: int = 3) -> float:
    """The shortest time of a call, over `seconds` of calls and at least `least`."""
    fn()
    best, count, end = math.inf, 0, time.perf_counter() + seconds
    while count < least or time.perf_counter() < end:
        start = time.perf_counter()
        fn()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def alone(fn: Callable[[], object]) -> float:
    """The same on one thread, which waits for no other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return shortest(fn, SECONDS / 4)
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Ran:
    """Seconds by the clock, of all cores' work together, and of this process and those that it started, since the machine did."""
    clock: float
    all: float
    own: float

    @staticmethod
    def now() -> Ran | None:
        """None where the system does not say it."""
        try:
            user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        except (OSError, ValueError):
            return None
        t = os.times()
        return Ran(t.elapsed, (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), sum(t[:4]))


def others(start: Ran | None, end: Ran | None) -> float:
    """The share of the cores that other work took in between."""
    if start is None or end is None or end.clock <= start.clock:
        return 0.0
    beside = (end.all - start.all) - (end.own - start.own)
    return min(1.0, max(0.0, beside / ((end.clock - start.clock) * (os.cpu_count() or 1))))


def _cpu(device: str) -> Peaks:
    start = Ran.now()
    found = _quiet_cpu(device)
    return replace(found, others=others(start, Ran.now()))


def _quiet_cpu(device: str) -> Peaks:
    """The figures as if nothing else ran."""
    ours = importlib.import_module("..backend", __package__).compile(torch.neg, dynamic=True)
    copy = []
    with torch.no_grad():
        for size in CPU_SIZES:
            source = torch.randn(size // 4)
            target = torch.empty_like(source)
            found = [shortest(functools.partial(target.copy_, source)), alone(functools.partial(target.copy_, source))]
            if size >= MIB:                     # below, what a call costs the host would hide the kernel
                found.append(shortest(functools.partial(ours, source)))
            copy.append((2 * size, min(found)))
        rates = {str(d).removeprefix("torch."): _product(1024, d) for d in (torch.float32, torch.bfloat16, torch.float64)}
    return _made(device, copy, rates, copy[0][1])


def _product(n: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(n, n, dtype=dtype), torch.randn(n, n, dtype=dtype)
    return 2 * n ** 3 / shortest(lambda: a @ b)


# -- on a GPU ------------------------------------------------------------------------------------------------------------
def _gpu(device: str) -> Peaks:
    with torch.cuda.device(device), torch.no_grad():
        room = torch.cuda.get_device_properties(device).L2_cache_size * 4
        free = torch.cuda.mem_get_info()[0]
        copy = [(2 * size, _gpu_copy(size, room)) for size in GPU_SIZES if 3 * size < free]
        rates = {name: _gpu_product(dtype, tf32) for name, dtype, tf32 in (
            ("float32", torch.float32, False), ("tf32", torch.float32, True), ("bfloat16", torch.bfloat16, False), ("float16", torch.float16, False))}
    return _made(device, copy, rates, copy[0][1])


def _gpu_copy(size: int, room: int) -> float:
    count = max(2, min(-(-room // size), 4096))
    many = torch.randn(count, size // 4, device="cuda")
    turn = itertools.count()

    def once():
        n = next(turn)
        many[(2 * n + 1) % count].copy_(many[2 * n % count])
    return _median(once)


def _gpu_product(dtype: torch.dtype, tf32: bool) -> float:
    """FLOP/s of a product of squares of `SIDE`."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=dtype) for _ in range(2))
        return 2 * SIDE ** 3 / _median(lambda: a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _median(fn: Callable[[], object]) -> float:
    """Median seconds of what a call runs on the device: one kernel, or one and its helpers."""
    for _ in range(3):
        fn()
    for _ in range(3):          # a profiler's first session may show nothing
        spans = device_spans(fn, CALLS)
        if spans and len(spans) % CALLS == 0:
            each = len(spans) // CALLS
            return statistics.median(sum(s.seconds for s in spans[i:i + each]) for i in range(0, len(spans), each))
    raise RuntimeError("torch's profiler shows nothing of what runs on the GPU: its peaks cannot be measured")
