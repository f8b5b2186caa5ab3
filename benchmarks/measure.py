"""Timing that can be trusted: a quiet machine or none, competitors side by side in one run, medians and tenth percentiles."""
from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

BUSY = 0.12         # share of the cores' time that others may take


def others_busy(seconds: float = 1.0) -> float:
    """The share of all cores' time that was used while this process slept."""
    def read():
        fields = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        return sum(fields), fields[3] + fields[4]
    total, idle = read()
    time.sleep(seconds)
    total2, idle2 = read()
    return 1 - (idle2 - idle) / max(total2 - total, 1)


def require_quiet(patience: float = 60.0) -> None:
    """Waits up to `patience` seconds for the machine to be quiet; exits with a message when it is not: figures beside other work mean nothing."""
    end = time.monotonic() + patience
    while (busy := others_busy()) > BUSY:
        if time.monotonic() > end:
            sys.exit(f"refused: {busy:.0%} of the machine is busy with other work; a benchmark beside it would mean nothing")


def interleaved(functions: dict, seconds: float = 2.0, least: int = 9) -> dict[str, tuple[float, float]]:
    """(median, tenth percentile) in seconds of each function, called in turn."""
    for fn in functions.values():
        fn()
        fn()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end or min(map(len, times.values())) < least:
        for name, fn in functions.items():
            start = time.perf_counter()
            fn()
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(t), sorted(t)[len(t) // 10]) for name, t in times.items()}


def geomean(values) -> float:
    """Geometric mean."""
    values = list(values)
    return statistics.geometric_mean(values) if values else float("nan")


def machine() -> str:
    """One line on what this was measured on."""
    model = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")),
                 platform.processor())
    gcc = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    return (f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, gcc {gcc}, "
            f"Python {platform.python_version()}, {torch.get_num_threads()} threads")
