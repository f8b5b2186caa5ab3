"""Many cases measured by several processes at once, of which one at a time has the GPU: see `gpu_batch.py`."""
from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .gpu_run import Results, Todo, Worker, run, spoken

COMMAND = (sys.executable, "-m", "benchmarks.gpu_batch")
OFTEN = 8.0             # seconds between two writings of the file


@dataclass
class Shared(Results):
    """Results that several threads add to, of one run. The file is written now and then; `save` writes it."""
    began: bool = False
    written: float = 0.0
    alone: threading.RLock = field(default_factory=threading.RLock)

    def started(self, machine: dict) -> None:
        with self.alone:
            if not self.began:
                super().started(machine)
            self.began = True

    def add(self, name: str, side: str, result: dict, group: str = "") -> None:
        with self.alone:
            super().add(name, side, result, group)

    def save(self, now: bool = False) -> None:
        with self.alone:
            if now or time.monotonic() - self.written > OFTEN:
                super().save()
                self.written = time.monotonic()


def measure(results: Results, todo: Todo, workers: int, calls: int, seed: int, patience: float, said: Callable = lambda *_: None,
            budget: float | None = None, command: Sequence[str] = COMMAND) -> bool:
    """Measures `todo` by so many processes, each every so manieth case. True when everything was done."""
    shared = Shared(results.path, results.runs, results.rows)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as threads:
        lock = Path(folder, "gpu")
        lock.touch()
        one = lambda i: run(shared, todo[i::workers], _process(i, workers, calls, seed, patience, str(lock), command), said, budget, slack=1.0)
        done = list(threads.map(one, range(min(workers, len(todo)))))
        shared.save(True)
    return all(done)


def _process(index: int, workers: int, calls: int, seed: int, patience: float, lock: str, command: Sequence[str]) -> Worker:
    """A worker of `gpu_run.run`: the process of that index among so many, on its share of the processors."""
    cores = sorted(os.sched_getaffinity(0))

    def worker(todo: Todo, rates: dict | None) -> Iterator[dict]:
        sides = list(dict.fromkeys(s for _, sides in todo for s in sides))
        mine = cores[index::workers] or [cores[index % len(cores)]]
        job = {"todo": todo, "sides": sides, "calls": calls, "seed": seed, "rates": rates, "cores": mine, "lock": lock}
        return spoken(command, job, patience)
    return worker
