"""The process that measures many small cases quickly, one of several on the same GPU: what the host does (tracing, compiling) runs beside that of the
others, what the device does in turn. Told and answering as `gpu_worker.py`, in batches: the sides of a batch are compiled and called once on memory
that holds anything; then, with the GPU to itself, each case gets its values, is compared with float64 and timed, all in one session of the profiler.

Every case of a batch lies in the same memory, so that a batch takes what its largest takes. First calls and peaks of memory are not measured.
"""
from __future__ import annotations

import fcntl
import functools
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch._inductor.config as inductor

from .gpu_case import Case, strides
from .gpu_cases import case
from .gpu_measure import Span, Times, Timer, cut, errors, machine, rates, right, span, summary, worst
from .gpu_sides import compiled, dropped, honest, multiplying, once, own, reasons, reference, repeated, steady, warm
from .gpu_worker import alive, failure, told, warm_up

BATCH = 5               # cases a turn
KEPT = 4 << 30          # bytes that a process keeps of the device's memory between its turns


class Memory:
    """Blocks that the inputs of case after case lie in: one for each place in the list of inputs and each type, as large as the largest so far."""

    def __init__(self, device: str):
        self.device, self.blocks = device, {}

    def inputs(self, one: Case) -> list[torch.Tensor]:
        """Tensors for a case, laid out and requiring gradients as its own; what an earlier case holds is theirs too. Numbers are any, indices 0."""
        made = [self._take(i, s.shape, s.dtype, strides(s)) for i, s in enumerate(one.specs)]
        for x, s in zip(made, one.specs):
            if s.role == "index":
                x.zero_()
            else:
                x.requires_grad_(one.differentiates(s))
        return made

    def leave(self) -> None:
        """The device has done everything, and other processes have most of what is not in use."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            if torch.cuda.memory_reserved() > KEPT:
                torch.cuda.empty_cache()

    def _take(self, place: int, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel()
        if (place, dtype) not in self.blocks or self.blocks[place, dtype].numel() < size:
            self.blocks[place, dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return torch.empty(0, dtype=dtype, device=self.device).set_(self.blocks[place, dtype].untyped_storage(), 0, shape, strides)


@dataclass
class Ready:
    """A side of a case that was compiled: its function, the same without random numbers, why contractions stayed with the vendor, the seconds that
    its first calls took; or the error that it raised."""
    side: str
    fn: Callable | None = None
    steady: Callable | None = None
    left: Sequence[str] = ()
    failed: dict | None = None
    seconds: float = 0.0


def prepared(one: Case, side: str, inputs, seed: int, clock: Callable[[], float] = time.perf_counter) -> Ready:
    """Compiles a side, backward pass included, by a call on `inputs`, which must lie where later ones do."""
    start = clock()
    try:
        with multiplying(one), reasons(one, side) as left:
            fns = [compiled(side, own_code(f), cached=True) for f in dict.fromkeys((one.fn, steady(one)))]
            for fn in fns:
                once(one, fn, own(one, inputs), seed)
        return Ready(side, fns[0], fns[-1], left, seconds=clock() - start)
    except Exception as error:
        return Ready(side, failed=failure(error))


def own_code(fn: types.FunctionType) -> types.FunctionType:
    """The same function with a code object of its own: what Dynamo compiles of it is not counted as another form of somebody else's."""
    return types.FunctionType(fn.__code__.replace(co_name=fn.__code__.co_name), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def filled(one: Case, inputs, generator: torch.Generator) -> None:
    """Random values as `Spec.make` draws them."""
    with torch.no_grad():
        for x, s in zip(inputs, one.specs):
            if s.role == "index":
                x.random_(s.least, s.below, generator=generator)
            else:
                x.normal_(s.mean, s.scale, generator=generator)


# -- times -------------------------------------------------------------------------------------------------------------------
class Session:
    """One session of the profiler. `calls` flushes the second-level cache before each of its calls and behind the last one; `times`, when the session
    is over, gives what each function of each use of `calls` took, in order."""

    def __init__(self, timer: Timer):
        self.timer, self.uses, self.spans = timer, [], []

    def __enter__(self) -> "Session":
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profiler.__enter__()
        return self

    def __exit__(self, *error) -> None:
        torch.cuda.synchronize()
        self.profiler.__exit__(*error)

    def calls(self, fns: Sequence[Callable]) -> None:
        """Calls each of some functions in turn, again and again, every second time the last first: what a call leaves behind, a warm machine above
        all, is every other's alike. (Always in one order the last of three that ran the same product of 3.6 ms was 5% slower than the first.)"""
        for n in range(self.timer.calls):
            for fn in turned(list(fns), n):
                self.timer.flush()
                fn()
        self.timer.flush()
        self.uses.append(len(fns))

    def times(self) -> list[Times]:
        """Raises RuntimeError when the profiler lost a flush."""
        spans: list[Span] = sorted((s for e in self.profiler.events() if (s := span(e))), key=lambda s: s.start)
        return divided(cut(spans, self.timer.mark), self.uses, self.timer.calls)


def turned(one: list, n: int) -> list:
    """What is called in turn `n`, in its order; or what was, in the order of the functions."""
    return one[::-1] if n % 2 else one


def divided(calls: list[list[Span]], uses: Sequence[int], each: int) -> list[Times]:
    """The times of the functions of each use, `each` calls of every one, in turns as `Session.calls` takes them: what lies between two flushes is a
    call, behind the last of a use whatever else ran. Raises RuntimeError where there are not so many."""
    wanted = sum(n * each + 1 for n in uses)
    if len(calls) != wanted:
        raise RuntimeError(f"the profiler shows {len(calls)} of {wanted} flushes")
    found, at = [], 0
    for n in uses:
        turns = [turned(calls[at + n * t:at + n * (t + 1)], t) for t in range(each)]
        for mine in map(list, zip(*turns)):
            found.append(summary(mine, statistics.median(sum(s.duration for s in c) for c in mine) * 1e-9))
        at += n * each + 1
    return found


# -- batches -----------------------------------------------------------------------------------------------------------------
class Turn:
    """Held, only one of the processes that share the file at `path` goes on. May be held again by who holds it. `waited`: seconds for it so far."""

    def __init__(self, path: str):
        self.path, self.depth, self.file, self.waited = path, 0, None, 0.0

    def __enter__(self) -> "Turn":
        if self.depth == 0:
            start = time.perf_counter()
            self.file = open(self.path, "r+")
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.waited += time.perf_counter() - start
        self.depth += 1
        return self

    def __exit__(self, *error) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.file.close()


def tuned_in_turn(turn: Turn) -> None:
    """What Inductor's autotuning measures is measured in turn, too."""
    from torch._inductor.runtime import benchmarking
    for kind in (benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker):
        if "benchmark_gpu" in vars(kind):
            kind.benchmark_gpu = _held(turn, kind.benchmark_gpu)


def _held(turn: Turn, fn: Callable) -> Callable:
    @functools.wraps(fn)
    def held(*args, **kwargs):
        with turn:
            return fn(*args, **kwargs)
    return held


def checked(one: Case, sides: Sequence[Ready], inputs, expected, session, seed: int) -> list[dict]:
    """The result of each side, without times, which the session has: compared with float64 before the timed calls and behind them. What raises is
    out."""
    found = [r.failed or _compared(one, r, inputs, expected, seed) for r in sides]
    well = [n for n, result in enumerate(found) if "failed" not in result]
    if well:
        with multiplying(one):
            session.calls([repeated(one, sides[n].fn, own(one, inputs), seed) for n in well])
    for n in well:
        again = _compared(one, sides[n], inputs, expected, seed)
        late = {"error": worst((found[n]["error"], again["error"])), "right": found[n]["right"] and again["right"]} if "failed" not in again else \
            {"error": float("inf"), "right": False}
        found[n].update(late)
    return found


def _compared(one: Case, ready: Ready, inputs, expected, seed: int) -> dict:
    try:
        with multiplying(one):
            found = errors(once(one, ready.steady, own(one, inputs), seed), expected)
            share = dropped(one, ready.fn, own(one, inputs)) if one.recipe.dropped else 0.0
        good = right(found, one.dtype, one.tf32) and honest(one, share)
        return {"error": found[0], "peak_error": found[1], "right": bool(good), "left": list(ready.left), "compiled": ready.seconds}
    except Exception as error:
        return failure(error)


def batch(cases: Sequence[tuple[Case, Sequence[str]]], memory: Memory, session: Callable, gpu: Turn, generator: torch.Generator, seed: int) -> list:
    """(case, side, result) of every side of some cases. `session`: makes one (see Session)."""
    busy = lambda: time.perf_counter() - gpu.waited
    ready = [(one, [prepared(one, side, memory.inputs(one), seed, busy) for side in sides]) for one, sides in cases]
    found, timed = [], []
    with session() as now, gpu:
        for one, sides in ready:
            inputs = memory.inputs(one)
            filled(one, inputs, generator)
            expected = reference(one, inputs, seed)
            results = checked(one, sides, inputs, expected, now, seed)
            found += [(one, r.side, result) for r, result in zip(sides, results)]
            timed += [result for result in results if "failed" not in result]
            del expected
        memory.leave()
    for result, times in zip(timed, now.times(), strict=True):
        result.update(device=times.device, kernels=times.kernels, names=[[n[:120], t] for n, t in times.names[:4]])
    return found


def work(todo, say: Callable[[dict], None], session: Callable, device: str, gpu: Turn, seed: int = 0, size: int = BATCH) -> None:
    """Measures every side of every case, some cases at a time; what goes wrong with a whole batch is the result of each of its sides."""
    generator = torch.Generator(device).manual_seed(seed)
    waiting = [todo[at:at + size] for at in range(0, len(todo), size)]
    while waiting:
        part = waiting.pop(0)
        say({"begin": part[0][0], "side": "reference"})
        try:
            with warm():
                found = batch([(case(n), sides) for n, sides in part], Memory(device), session, gpu, generator, seed)
            results = [(one.name, side, result) for one, side, result in found]
        except Exception as error:
            if len(part) > 1 and (device != "cuda" or alive()):
                waiting[:0] = [[x] for x in part]
                continue
            results = [(n, side, failure(error)) for n, sides in part for side in sides]
        for name, side, result in results:
            say({"case": name, "side": side, "result": result})
        if any("failed" in result for _, _, result in results) and device == "cuda" and not alive():
            sys.exit(3)


def known(gpu: Turn, job: dict) -> tuple[Timer, dict]:
    """A timer, and what the machine can do: as the first process to come here has measured it, who leaves it in the file."""
    with gpu:
        text = gpu.file.read()
        found = json.loads(text) if text else {}
        timer = Timer(job["calls"], mark=found.get("mark", ""))
        if not found:
            found = {"mark": timer.mark, "rates": job["rates"] or rates(timer)}
            json.dump(found, gpu.file)
            torch.cuda.empty_cache()
    return timer, found["rates"]


def serve(job: dict, say: Callable[[dict], None]) -> None:
    """Runs a job as `gpu_worker.serve` does; 'lock' names the file that stands for the GPU, 'cores' the processors to stay on."""
    inductor.compile_threads = len(job["cores"])
    os.sched_setaffinity(0, job["cores"])
    torch.set_num_threads(1)
    gpu = Turn(job["lock"])
    tuned_in_turn(gpu)
    timer, found = known(gpu, job)
    say({"ready": {**machine(), **found}})
    warm_up(job["sides"])
    with Session(timer) as first:               # a profiler's first session may show nothing
        first.calls([lambda: None])
    work(job["todo"], say, lambda: Session(timer), "cuda", gpu, job["seed"])
    say({"end": True})


if __name__ == "__main__":
    told(serve)
