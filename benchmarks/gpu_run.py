"""Runs workers until everything is measured: a crash, a hang or a device that no longer answers costs one side of one case, and the run goes on.

Results are kept in one JSON file, written after each: {'runs': [machine and rates], 'rows': {case: {side: result}}}. Each result names its run.
"""
from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .gpu_cases import case

Todo = list[tuple[str, tuple[str, ...]]]
Worker = Callable[[Todo, dict | None], Iterator[dict]]       # what is to be done, rates if known -> messages


@dataclass
class Results:
    """What was measured so far, and where it is kept ("" nowhere)."""
    path: str
    runs: list[dict]
    rows: dict[str, dict[str, dict]]

    @classmethod
    def open(cls, path: str) -> "Results":
        """Those of the file, if it exists."""
        data = json.loads(Path(path).read_text()) if path and Path(path).exists() else {"runs": [], "rows": {}}
        return cls(path, data["runs"], data["rows"])

    def save(self) -> None:
        """The file is replaced at once: a run that is stopped leaves the old one or the new one."""
        if not self.path:
            return
        target = Path(self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            json.dump({"runs": self.runs, "rows": self.rows}, file, indent=0)
        os.replace(file.name, target)

    def started(self, machine: dict) -> None:
        """Further results are of a new run on this machine, at its rates."""
        self.runs.append(machine)

    def add(self, name: str, side: str, result: dict, group: str = "") -> None:
        """Enters a result under the newest run, with the limit at that run's rates, and saves."""
        if "failed" not in result:
            run = self.runs[-1]
            limit = case(name).limit(run["copy"], run["matmul"])
            result = {**result, "limit": limit, "percent": 100 * limit / result["device"]}
        self.rows.setdefault(name, {})[side] = {**result, "run": len(self.runs) - 1}
        self.save()

    def missing(self, names: Iterable[str], sides: Sequence[str], redo: Sequence[str] = ()) -> Todo:
        """What there is no result for, failures included; `redo`: sides that are measured again."""
        todo = [(n, tuple(s for s in sides if s in redo or s not in self.rows.get(n, {}))) for n in names]
        return [(n, s) for n, s in todo if s]


@dataclass
class Progress:
    """Where a run is: what is left, what the worker was last heard of, the slowest side of a case so far."""
    left: set[tuple[str, str]]
    at: tuple[str, str] | None = None
    began: float = 0.0
    slowest: float = 0.0
    rates: dict | None = None
    words: Sequence[str] = ()


def run(results: Results, todo: Todo, worker: Worker, said: Callable[[str, str, dict], None] = lambda *_: None, budget: float | None = None,
        clock: Callable[[], float] = time.monotonic, slack: float = 2.0) -> bool:
    """Measures `todo`, entering each result as it comes; `said(case, side, result)` after each. A worker that ends early is started again behind
    what it was doing. Stops before a case that `budget` seconds would probably not hold, if it takes `slack` times as long as the slowest so far.
    True when everything was done. Raises RuntimeError, with the worker's last words, when one ends that has measured nothing."""
    start, now = clock(), Progress({(n, s) for n, sides in todo for s in sides})
    while now.left:
        rest = [(n, tuple(s for s in sides if (n, s) in now.left)) for n, sides in todo]
        now.at, before = None, len(now.left)
        with contextlib.closing(worker([(n, s) for n, s in rest if s], now.rates)) as messages:
            for m in messages:
                for name, side, result in _heard(m, now, results, clock()):
                    now.left.discard((name, side))
                    results.add(name, side, result)
                    said(name, side, result)
                if budget is not None and m.get("side") == "reference" and clock() - start + slack * now.slowest > budget:
                    return False
        if len(now.left) == before:
            raise RuntimeError("a worker ended that had measured nothing:\n" + "\n".join(now.words))
    return True


def _heard(m: dict, now: Progress, results: Results, time_now: float) -> list[tuple[str, str, dict]]:
    """The results in one message of a worker; notes in `now` what else it says."""
    if "ready" in m:
        results.started(m["ready"])
        now.rates = {k: m["ready"][k] for k in ("copy", "matmul")}
    elif "begin" in m:
        now.at = m["begin"], m["side"]
        now.began = time_now if m["side"] == "reference" else now.began
    elif "case" in m:
        now.slowest = max(now.slowest, time_now - now.began)
        return [(m["case"], m["side"], m["result"])]
    elif "failed" in m:
        now.words = m.get("words", ())
        return [(n, s, {"failed": m["failed"]}) for n, s in _lost(now.at, now.left)]
    return []


def _lost(at: tuple[str, str] | None, left: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """What a worker that ended early was doing: one side, or every side of a case whose float64 run it was at."""
    return sorted((n, s) for n, s in left if at and n == at[0] and at[1] in (s, "reference"))


# -- workers -----------------------------------------------------------------------------------------------------------------
COMMAND = (sys.executable, "-m", "benchmarks.gpu_worker")


def process(sides: Sequence[str], calls: int, seed: int, patience: float, isolate: bool = False, command: Sequence[str] = COMMAND,
            cached: bool = False) -> Worker:
    """A worker that is a process of its own, see `spoken`. `isolate`: a process a case."""
    def worker(todo: Todo, rates: dict | None) -> Iterator[dict]:
        job = {"todo": todo[:1] if isolate else todo, "sides": list(sides), "calls": calls, "seed": seed, "rates": rates, "cached": cached}
        return spoken(command, job, patience)
    return worker


def spoken(command: Sequence[str], job: dict, patience: float) -> Iterator[dict]:
    """Messages of a process: `command` and the descriptor it writes to; its job comes on its standard input, and {'end': true} is its last word. One
    that ends early, or says nothing for `patience` seconds, gives {'failed': why, 'words': the end of what it printed}."""
    end, start = os.pipe()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen([*command, str(start)], stdin=subprocess.PIPE, pass_fds=(start,), text=True, stdout=output, stderr=output,
                                 cwd=Path(__file__).parent.parent, start_new_session=True)
        os.close(start)
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(json.dumps(job) + "\n")
            finished = False
            for message in lines(end, patience, lambda: child.poll() is not None):
                finished = "end" in message
                yield message
            if not finished:
                why, words = _why(child), _printed(output)
                yield {"failed": f"{why}: {words[-1][:300]}" if words else why, "words": words}
        finally:
            with contextlib.suppress(ProcessLookupError):       # with the processes that it started to compile
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            os.close(end)


def _printed(output: IO[str]) -> list[str]:
    """The last lines of a file."""
    output.seek(0)
    return output.read().strip().splitlines()[-30:]


def _why(child: subprocess.Popen) -> str:
    """Why a worker stopped before its end."""
    try:
        code = child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return "no answer: killed"
    return f"the process ended with {'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}"


def lines(descriptor: int, patience: float, over: Callable[[], bool] = lambda: False) -> Iterator[dict]:
    """The JSON lines of a pipe, until its end, until nothing has come for `patience` seconds, or until `over` and nothing is left to read (somebody
    else may hold the other end open)."""
    held, since = b"", time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while time.monotonic() - since < patience:
            ended = over()
            if not selector.select(0 if ended else min(0.5, patience)):
                if ended:
                    return
                continue
            part = os.read(descriptor, 1 << 16)
            if not part:
                return
            since = time.monotonic()
            *whole, held = (held + part).split(b"\n")
            yield from (json.loads(x) for x in whole if x)
