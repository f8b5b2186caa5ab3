"""Joint sweeps: kernels of the GPU cases under many schedules at once, from which the rungs of the heuristics are taken.

    python -m benchmarks.gpu_sweep --cases NAME ... [--most N] [--budget SECONDS] [--workers N] [--json FILE] [--seed N]
        [--only PATTERN] [--vary pieces warps ...]

Where `tokamak tune` walks from the heuristic's schedule step by step, this tries the product of what pieces, warps, rows under way, programs and
registers may be, nearest first and the rest drawn at random, at most `--most` of a kernel. Device time of a kernel by itself in microseconds, the
second-level cache flushed before every call; what computes something else than the heuristic's schedule is left out. `--only`: kernels whose
heuristic's schedule, as text, has the regular expression somewhere. Beside each time what `tokamak.runtime.gpu_estimate` says of the machine code,
and in the end what came of taking the schedule that it has so much quicker than the heuristic's as `tokamak.codegen.quicker` asks.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from tokamak.codegen import quicker
from tokamak.fuse.cost import Hints
from tokamak.runtime import gpu_build, gpu_estimate
from tokamak.schedule.body import Body
from tokamak.schedule.neighbours import changed, feasible, PASSED, settled
from tokamak.schedule.tile_schedule import cover, TileSchedule
from tokamak.schedule.tile_stages import power
from tokamak.tools.record import recording
from tokamak.tools.trial import Bench, Task
from tokamak.tools.tune import device_timer, right, tasks

from .gpu_batch import Turn
from .gpu_cases import case, chosen
from .gpu_sides import compiled, multiplying, once, own, timed_graphs, warm

WARPS = 1, 2, 4, 8, 16
PIECES = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192
WIDER = 8               # times longer or shorter than the heuristic's that a piece is tried
EQUAL = 8, 16           # elements at least of each of the equal pieces of a held row that are tried, and so many pieces at most
PROGRAMS = 0.25, 0.5, 2, 4
CYCLES = 1900           # a microsecond
TURNED = "turned"       # the first two of three dimensions of a tile change places
VARIED = "warps", "registers", "order", "stages", "programs", "rows", "pieces", "shares"        # what may be changed
SHARES = 1, 2, 4, 8     # programs of a cluster that share rows held in stages


# -- schedules -----------------------------------------------------------------------------------------------------------------
def variants(task: Task, most: int, seed: int, varied: Sequence[str] = VARIED) -> list[TileSchedule]:
    """The heuristic's schedule and up to `most` others that a multiprocessor might hold: all that differ in one thing, then any, at random. `varied`:
    what differs (VARIED)."""
    s, r = task.schedule, random.Random(seed)
    choices = [own for kind, own in options(task.body, s, task.hints) if kind in varied]
    ways = list(itertools.islice(itertools.product(*choices), 1 << 20))
    r.shuffle(ways)
    ways.sort(key=lambda w: min(sum(c is not None for c in w), 2))
    found: dict[TileSchedule, None] = {s: None}
    for way in ways:
        if len(found) > most:
            break
        made = applied(task.body, s, way, task.hints)
        if made is not None and feasible(task.body, made):
            found.setdefault(made)
    return list(found)


def options(b: Body, s: TileSchedule, hints: Hints) -> Iterator[tuple[str, list]]:
    """What may be changed: of VARIED, and a list of ways, None for no change: texts of `schedule.neighbours`, or (axis, pieces) of a held row."""
    yield "warps", [None, *(f"warps({w})" for w in WARPS if w != s.warps)]
    yield "registers", [None, *(["registers(0)"] if s.registers else [])]
    yield "order", [None, *([TURNED] if len(s.dims) == 3 else [])]
    if s.staged in s.dims:
        row, most = f"i{s.order.index(s.staged)}", max(s.sizes(s.staged))
        yield "shares", [None, *(f"staged({row} / {n})" for n in SHARES if n != s.sharers), *(f"looped({row}:{n})" for n in PASSED)]
        yield "pieces", [None, *(f"lanes({row}:{n})" for n in PIECES if most / 4 <= n <= 4 * most and n != most)]
    yield "stages", [None, *([f"stages({n})" for n in (1, 2, 3, 4) if n != s.stages] if s.looped or s.split else [])]
    yield "programs", [None, *([f"programs({max(1, round(s.programs * f))})" for f in PROGRAMS] if s.split else [])]
    for i, a in enumerate(s.order):
        own = s.sizes(a) if a in s.dims else (1,)
        if a in b.parallel or a in s.looped:
            near = [n for n in PIECES if own[0] / WIDER <= n <= own[0] * WIDER and n <= 2 * power(hints(a.extent))]
            yield "rows", [None, *(f"tile(i{i}:{n})" for n in near if (n,) != own)]
        elif a in s.dims and s.shift is None and s.staged is None:
            yield "pieces", [None, *((a, p) for p in _pieces(hints(a.extent)) if p != own)]


def _pieces(n: int) -> list[tuple[int, ...]]:
    """Ways to hold a row of `n` elements: pieces of several lengths, one, or equal ones, of which few lanes are idle."""
    least, most = EQUAL
    equal = [(size,) * -(-n // size) for size in PIECES if least <= size < n <= size * most]
    return list(dict.fromkeys((cover(n), (power(n),), *(p for p in equal if sum(p) < 1.5 * n))))


def applied(b: Body, s: TileSchedule, way, hints: Hints) -> TileSchedule | None:
    texts = tuple(c for c in way if isinstance(c, str) and c != TURNED)
    for a, pieces in (c for c in way if isinstance(c, tuple)):
        s = settled(b, replace(s, pieces=tuple((x, pieces if x is a else p) for x, p in s.pieces)), hints)
    made = changed(b, s, tuple(sorted(texts, key=lambda t: t.startswith("registers"))), hints)
    if made is None or len(made.dims) != 3 or TURNED not in way:
        return made
    dims = (made.dims[1], made.dims[0], *made.dims[2:])
    return replace(made, dims=dims, pieces=tuple((a, made.sizes(a)) for a in dims))


# -- measuring -----------------------------------------------------------------------------------------------------------------
def swept(name: str, most: int, seed: int, until: float, lock: str, only: str, varied: Sequence[str]) -> list[dict]:
    """The kernels of a case: 'case', 'kernel', 'gain' (`quicker.gain_of`), 'tried' [(schedule, us, spilled bytes, terms of its estimate)], the
    heuristic's first, the others by their time."""
    one, gpu = case(name), Turn(lock)
    with warm(), multiplying(one), recording(tuned=False) as recorder:
        inputs = one.inputs("cuda")
        once(one, compiled("tokamak", one.fn, cached=True), own(one, inputs), 0)
        del inputs
    found = []
    for task in tasks(timed_graphs(one, recorder.graphs)):
        if not re.search(only, str(task.schedule)):
            continue
        ways = variants(task, most, seed, varied)
        bench = Bench(task, "")
        tried, timer, first = [], device_timer("cuda"), None
        for at in range(0, len(ways), 8):
            if time.time() > until:
                break
            built = bench.build(ways[at:at + 8])
            with gpu:
                for s, trial in built.items():
                    if first is None:
                        first, want = trial, bench.results(trial)
                    if trial is first or right(bench, trial, want):
                        tried.append((str(s), timer(lambda: bench.run(trial), s) * 1e6, trial.spilled, terms(task, s)))
        if tried:
            found.append({"case": name, "kernel": task.name, "gain": quicker.gain_of(task.body, task.schedule, task.hints),
                          "tried": [tried[0], *sorted(tried[1:], key=lambda t: t[1])]})
        torch.cuda.empty_cache()
    return found


def terms(task: Task, s: TileSchedule) -> tuple[float, ...]:
    """Of the estimate (`gpu_estimate.terms`) for a task's kernel under `s`; () where its machine code does not say."""
    of_all = task.parts(s)
    part = next((p for p in of_all if p.kernel.schedule == s), of_all[0])
    made = gpu_build.build([part.unit], task.target.arch)[part.unit.name]
    return gpu_estimate.terms(*quicker.estimated(task.body, part.kernel, made, task.hints, task.target))


def said(terms: Sequence[float], factors: Sequence[float] = gpu_estimate.FACTORS) -> float:
    """Estimated microseconds; 0 where there are no terms."""
    return gpu_estimate.combined(terms, factors) / CYCLES if terms else 0.0


def picked(rows: Sequence[dict], factors: Sequence[float] = gpu_estimate.FACTORS) -> list[float]:
    """How many times as fast as the heuristic's schedule the one is that the estimates have so many times as quick, and that spills no more; of the
    kernels that have one; little is asked of what spills much less."""
    found = []
    for row in rows:
        first, *others = row["tried"]
        asked = lambda t: quicker.asked(row["gain"], first[2], t[2])
        possible = (t for t in others if t[3] and t[2] <= first[2] and first[3] and said(t[3], factors) * asked(t) <= said(first[3], factors))
        best = min(possible, key=lambda t: said(t[3], factors), default=None)
        if best is not None:
            found.append(first[1] / best[1])
    return found


def _alone(cores) -> None:
    """A process that stays on a processor of its own."""
    os.sched_setaffinity(0, [cores.get()])
    torch.set_num_threads(1)


def text(row: dict, shown: int) -> str:
    (s, us, spilled, own), *others = row["tried"]
    line = lambda t, us, spilled, terms: f"    {us:8.2f} ({said(terms):.2f})  {t}{f'  {spilled} spilled' if spilled else ''}"
    best = others[0][1] if others else us
    return "\n".join([f"{row['case']} {row['kernel']}: {us:.2f} us, {us / min(us, best):.2f} times the best of {len(others) + 1}",
                      line(s, us, spilled, own), *(line(*t) for t in others[:shown])])


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", required=True, metavar="NAME", help="cases by name, also of any size; with * and ?, those of the list")
    p.add_argument("--most", type=int, default=48, metavar="N", help="schedules of a kernel beside the heuristic's")
    p.add_argument("--shown", type=int, default=4, metavar="N", help="of the best ones, so many are printed")
    p.add_argument("--budget", type=float, default=1e9, metavar="SECONDS")
    p.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="so many processes compile, one at a time has the GPU")
    p.add_argument("--json", default="", help="everything that was measured is kept here")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--only", default="", metavar="PATTERN", help="a regular expression that schedules of kernels have")
    p.add_argument("--vary", nargs="+", default=VARIED, choices=VARIED, help="what is changed")
    args = p.parse_args(argv)
    names = chosen(args.cases, [])
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    until, context, rows = time.time() + args.budget, get_context("spawn"), []
    cores = context.Queue()
    for n in range(args.workers):
        cores.put(sorted(os.sched_getaffinity(0))[n % os.cpu_count()])
    with tempfile.NamedTemporaryFile() as lock, ProcessPoolExecutor(args.workers, context, _alone, (cores,)) as pool:
        jobs = {pool.submit(swept, n, args.most, args.seed, until, lock.name, args.only, args.vary): n for n in names}
        for done in as_completed(jobs):
            try:
                found = done.result()
            except Exception as error:
                print(f"{jobs[done]}: {type(error).__name__}: {error}", flush=True)
                continue
            rows += found
            for row in found:
                print(text(row, args.shown), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(rows))
    gains = picked(rows)
    print(f"by their estimates {len(gains)} of {len(rows)} kernels have another schedule" +
          (f": {statistics.geometric_mean(gains):.2f} times as fast, the worst {min(gains):.2f}" if gains else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
