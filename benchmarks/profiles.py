"""What `tokamak.profile` says of a step beside what other instruments say of the same step, and what profiling costs beyond compiling.

    python -m benchmarks.profiles [--device cuda | cpu] [--cases NAME ...] [--layers N] [--seconds S] [--rounds N]
                                  [--ahead N [--build]] [--html FOLDER] [--json FILE [--report]] [--write]

Cases on a GPU: BERT-large, GPT-2 medium and ResNet-50, inference and training (forward, loss, backward; float32 parameters under bfloat16
autocast); Llama 3.2 1B: a prompt, and one token against a cache (all in bfloat16), with CUDA graphs and without. On a CPU: the programs of
`examples/demo.py`; BERT and GPT-2 of two layers and a ResNet, in training.

Beside a profile stands the same step under eager and under `torch.compile(..., backend="tokamak")` without any of tokamak's tools, in the same
process and on the same arguments: a second compiled function, which nothing watches. Beside each step that the profile times stands one of these,
behind it and before it by turns. Step: on a GPU CUDA events around one, the device idle before it; on a CPU the clock. Shown are both medians; `off`
is the median of what the steps of a pair differ by, since the host is faster in one second than in the next, with its standard error and between
which differences half of the pairs lie. Busy: on a GPU the device's time by the averages of torch's profiler, which watches nothing but the device,
before and behind each look that the profile takes; on a CPU that of eager's operators, by the same as a part of the step. Peak: torch's allocator's,
beyond what stands before a step; what recordings of CUDA graphs keep stands always, as `pools`: each function's own and the one that all share.
`cost`: seconds of the whole call of `tokamak.profile`, less those of its first compiled step and of what is measured beside it; the first of all
pays for the machine's peaks. `--rounds`: so many profiles of a case, each in a process of its own; the one of the median difference is shown.
`--ahead N`: so many processes make their models at once; they are profiled one by one, alone, when all of them stand ready. `--build`: they compile
at once and measure nothing, so that a later run finds kernels in the cache. Exit status 1 where a step or busy time is off by over 3% or a cost is
over 10 s.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

import tokamak
from tokamak.runtime.cuda_graphs import recorder
from tokamak.tools import profile, watch
from tokamak.tools.profile import Profile
from tokamak.tools.traced import recording_pools

from .gpu import write
from .profile_cases import CASES, Case, Made

WITHIN, MOST = 0.03, 10.0           # of totals; seconds of profiling
JUDGED = ("step", "busy")
SIDES = ("eager", "compiled")
PROFILED, STEP = 5, "step "         # steps under torch's profiler; how the ranges begin that each stands in


# -- by other instruments --------------------------------------------------------------------------------------------------------
def plain(case: Case, made: Made) -> dict[str, Callable[[], object]]:
    """The steps of both sides without tokamak's tools, run before."""
    whole = torch.compile(made.fn, backend=partial(tokamak.backend.backend, options=case.options))
    steps = {"eager": made.step(made.fn), "compiled": made.step(whole)}
    for step in (*steps.values(), *steps.values(), *steps.values()):
        step()
    return steps


def off(said: float, found: float) -> float:
    return said / found - 1 if found else math.inf if said else 0.0


def by_events(step: Callable) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e-3


def by_clock(step: Callable) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def device_time(step: Callable) -> float:
    """Seconds of everything that a step runs on the device. A profiler's first session may show nothing."""
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
        ran = [e for e in profiler.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA and not e.key.endswith(" Sync")]
        total = sum(e.self_device_time_total for e in ran)
        if total:
            return total * 1e-6 / PROFILED
    raise RuntimeError("torch's profiler shows nothing of what runs on the GPU")


def operator_part(step: Callable) -> float:
    """The part of a step that torch's operators take on the CPU, the median of some steps. The first that a profiler sees is slower."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for n in range(PROFILED + 1):
            with torch.profiler.record_function(f"{STEP}{n}"):
                step()
    events = profiler.events()
    ranges = [e.time_range for e in events if e.name.startswith(STEP) and e.name != f"{STEP}0"]
    found = [(e.time_range.start, e.self_cpu_time_total) for e in events if e.name.startswith("aten::")]
    return min(1.0, statistics.median(sum(t for start, t in found if r.start <= start <= r.end) / (r.end - r.start) for r in ranges))


def peak(step: Callable) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


# -- side by side ----------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Pairs:
    """Steps of a `side` in pairs, the profile's and one beside it: how many; how far the profile's lie above the other, the median, and half of them
    from `low` to `high`; half of the others take `least` to `most` seconds."""
    side: str
    count: int
    off: float
    low: float
    high: float
    least: float
    most: float

    @property
    def chance(self) -> float:
        """The standard error of the median."""
        return 0.93 * (self.high - self.low) / math.sqrt(self.count)


def paired(side: str, found: Sequence[tuple[float, float]]) -> Pairs:
    quarter, differ, other = len(found) // 4, sorted(off(*pair) for pair in found), sorted(one for _, one in found)
    middle = statistics.median(differ)
    return Pairs(side, len(found), middle, differ[quarter], differ[-quarter - 1], other[quarter], other[-quarter - 1])


@dataclass(frozen=True)
class Compared:
    """`first`: seconds of the first compiled step; `cost`: of profiling besides; `totals`: (side, quantity, said, found) in seconds or bytes;
    `named`: the share of the device's time that the profile's rows, and what it lists beside them, make up; `bound`: its verdict; `pairs`: of steps;
    `rounds`: profiles that were made."""
    case: str
    device: str
    torch: str
    first: float
    cost: float
    totals: tuple[tuple[str, str, float, float], ...]
    named: float
    bound: str
    pairs: tuple[Pairs, ...] = ()
    rounds: int = 1

    def off(self, side: str, what: str) -> float:
        """How far what is said lies above what was found; of steps by pairs."""
        if what == "step" and (pairs := self.of(side)):
            return pairs.off
        return next(off(said, found) for s, w, said, found in self.totals if (s, w) == (side, what))

    def of(self, side: str) -> Pairs | None:
        return next((p for p in self.pairs if p.side == side), None)

    def far(self) -> list[str]:
        """What should not be."""
        judged = [(side, what, self.off(side, what)) for side, what, *_ in self.totals if what in JUDGED]
        far = [f"{side} {what} {by:+.1%}" for side, what, by in judged if abs(by) > WITHIN]
        return far + ([f"cost {self.cost:.1f} s"] if self.cost > MOST else [])


@dataclass(frozen=True)
class Round:
    """What a profile `said`; of each side, seconds of its steps with those of the step beside each (`pairs`); and the `rest` of what was found."""
    said: dict
    pairs: dict[str, list[tuple[float, float]]]
    rest: dict[str, dict[str, float]]


class Beside:
    """Within it, a profile's sides have company: `make()` gives the same steps without tools, once the profile's own have run, and `ready()` returns
    when they may be measured. Each step that the profile times has one of theirs beside it, behind it or, every second time, before it; each look by
    torch's profiler stands between two at theirs. `pairs`: seconds of both; `busy` (on a CPU parts of a step) and `peaks`: of theirs; `pools`: bytes
    that their recordings keep, `own` of it in pools of their own; `waited`: seconds that this took."""

    def __init__(self, make: Callable[[], dict[str, Callable[[], object]]], ready: Callable[[], object], gpu: bool):
        self.make, self.ready, self.gpu, self.waited, self.pools, self.own = make, ready, gpu, 0.0, 0, 0
        self.names: dict[int, str] = {}
        self.plain: dict[str, Callable[[], object]] = {}
        self.behind = False                                 # did the last step stand behind the profile's?
        self.peaks: dict[str, int] = {}
        self.busy: dict[str, list[float]] = {side: [] for side in SIDES}
        self.pairs: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    def named(self, interleaved: Callable) -> Callable:
        def run(steps, *args, **kwargs):
            self.names.update((id(steps[side]), side) for side in SIDES)
            with self.aside():
                before = recording_pools() if self.gpu else {}
                self.plain = self.make()
                if self.gpu:
                    self.kept(before, recording_pools())
                self.ready()
            return interleaved(steps, *args, **kwargs)
        return run

    def kept(self, before: Mapping[tuple, int], after: Mapping[tuple, int]) -> None:
        self.own = sum(size for pool, size in after.items() if pool not in before)
        self.pools = self.own and self.own + before.get(recorder("cuda").shared, 0)

    def turned(self, turns: Callable) -> Callable:
        def run(step, device, seconds, looked):
            if looked is not None:
                return turns(step, device, seconds, looked)
            side, made = self.names[id(step)], []
            with mock.patch.object(watch, "_one", partial(self.pair, watch._one, made, self.plain[side])):
                found = turns(step, device, 2 * seconds, looked)
            self.pairs[side] += made[-len(found):]          # a turn's first step may count for nothing
            return found
        return run

    def pair(self, one: Callable, made: list[tuple[float, float]], plain: Callable, step: Callable, device: str) -> watch.Took:
        def beside() -> float:
            with self.aside():
                return (by_events if self.gpu else by_clock)(plain)
        self.behind = not self.behind
        other = None if self.behind else beside()
        took = one(step, device)
        made.append((took.step, beside() if other is None else other))
        return took

    def between(self, look: Callable) -> Callable:
        def again(side: str) -> None:
            with self.aside():
                self.busy[side].append((device_time if self.gpu else operator_part)(self.plain[side]))

        def run(step, *args, **kwargs):
            side = self.names[id(step)]
            again(side)
            found = look(step, *args, **kwargs)
            again(side)
            return found
        return run

    def remembered(self, use: Callable) -> Callable:
        def run(step, *args, **kwargs):
            if self.gpu:
                with self.aside():
                    self.peaks[self.names[id(step)]] = peak(self.plain[self.names[id(step)]])
            return use(step, *args, **kwargs)
        return run

    def rest(self) -> dict[str, dict[str, float]]:
        """What was found but steps. On a CPU the operators' part is one of the steps beside the profile's."""
        whole = {side: 1.0 if self.gpu else statistics.median(other for _, other in self.pairs[side]) for side in SIDES}
        found = {side: {"busy": statistics.mean(self.busy[side]) * whole[side]} if self.busy[side] else {} for side in SIDES}
        for side, bytes in self.peaks.items():
            found[side]["peak"] = bytes
        if self.pools:
            found["compiled"]["pools"] = self.pools
        return found

    def __enter__(self) -> Beside:
        self.patches = contextlib.ExitStack()
        for module, name, around in ((watch, "_turn", self.turned), (profile, "interleaved", self.named), (profile, "traced", self.between),
                                     (profile, "operators", self.between), (profile, "memory_use", self.remembered)):
            self.patches.enter_context(mock.patch.object(module, name, around(getattr(module, name))))
        return self

    def __exit__(self, *_) -> None:
        self.patches.close()


def said(case: Case, made: Made, seconds: float, ready: Callable[[], object] = lambda: None) -> tuple[Round, Profile]:
    """What the profile says of both sides, and of itself, beside what was found in this process; and the profile. `ready`: as `Beside` has it."""
    gpu = profile.device_of((made.fn, made.args, made.kwargs)) != "cpu"
    start = time.perf_counter()
    with torch.set_grad_enabled(made.train), Beside(partial(plain, case, made), ready, gpu) as other:
        p = tokamak.profile(made.fn, *made.args, options=case.options, seconds=2 * seconds, **made.kwargs)
    took = time.perf_counter() - start - other.waited
    sides = {name: {**{k: getattr(side, k) for k in ("step", "busy", "peak")}, "pools": side.memory.pools - other.own}
             for name, side in (("eager", p.eager), ("compiled", p.compiled))}
    named = (sum(r.seconds for r in p.rows) + sum(o.seconds for o in p.others)) / p.compiled.busy
    words = {**sides, "device": p.peaks.device, "first": p.first, "cost": took - p.first, "named": named, "bound": f"{p.bound}: {p.why}"}
    return Round(words, other.pairs, other.rest()), p


def compared(name: str, rounds: list[Round]) -> Compared:
    """Both side by side, by the round of the median difference. On a CPU nothing but eager's operators is seen by torch's profiler."""
    middle = lambda by: sorted(rounds, key=by)[len(rounds) // 2]
    totals, pairs = [], []
    for side in SIDES:
        shown = middle(lambda r: paired(side, r.pairs[side]).off)
        pairs.append(paired(side, shown.pairs[side]))
        totals.append((side, "step", shown.said[side]["step"], statistics.median(other for _, other in shown.pairs[side])))
        for what in rounds[0].rest[side]:
            both = lambda r: (r.said[side][what], r.rest[side][what])
            totals.append((side, what, *both(middle(lambda r: off(*both(r))))))
    first, cost = rounds[0].said, statistics.median(r.said["cost"] for r in rounds)
    return Compared(name, first["device"], torch.__version__, first["first"], cost, tuple(totals), first["named"], first["bound"], tuple(pairs),
                    len(rounds))


# -- processes -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """A process that makes one profile: it tells when it is ready, and waits until it is asked."""
    process: multiprocessing.Process
    pipe: Connection

    def hear(self):
        """What it has to say next. Raises EOFError where the process has ended."""
        return self.pipe.recv()

    def go(self) -> Round:
        self.pipe.send(None)
        found = self.hear()
        self.process.join()
        return found


@contextlib.contextmanager
def part(case: str, args: argparse.Namespace) -> Iterator[Part]:
    """A profile of a case in a process of its own: where memory happens to lie makes one slower than another, and a use of torch's profiler does."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, case, args))
    process.start()
    there.close()
    try:
        yield Part(process, here)
    finally:
        here.close()
        process.join()


def serve(pipe: Connection, name: str, args: argparse.Namespace) -> None:
    """Ends where nobody asks: a model stands, or, to build, what is compiled."""
    torch.set_float32_matmul_precision("high")
    case = next(cases[name] for cases in CASES.values() if name in cases)

    def ready() -> None:
        pipe.send("ready")
        pipe.recv()
    with contextlib.suppress(EOFError):
        made = case.make(args.device, args.layers)
        if not args.build:
            ready()
        found, p = said(case, made, args.seconds, ready if args.build else lambda: None)
        if args.html:
            file = "".join(c if c.isalnum() else "_" for c in name)
            p.html(args.html / f"{file}.html")
            (args.html / f"{file}.txt").write_text(str(p))
        pipe.send(found)


def measured(names: Sequence[str], args: argparse.Namespace) -> Iterator[Compared]:
    """Of each case, one after the other; `args.ahead` processes are there at once."""
    jobs = [name for name in names for _ in range(args.rounds)]
    found: dict[str, list[Round]] = {}
    for at in range(0, len(jobs), args.ahead):
        with contextlib.ExitStack() as stack:
            parts = [(name, stack.enter_context(part(name, args))) for name in jobs[at:at + args.ahead]]
            for _, one in parts:
                one.hear()
            for name, one in parts if not args.build else ():
                rounds = found.setdefault(name, [])
                rounds.append(one.go())
                if len(rounds) == args.rounds:
                    yield compared(name, rounds)


def lines(c: Compared) -> str:
    out = [f"{c.case}: first step {c.first:.1f} s, profiling {c.cost:.1f} s besides; bound by {c.bound}; rows {c.named:.1%} of busy"]
    for side, what, said, found in c.totals:
        unit, factor = ("MB", 1e-6) if what in ("peak", "pools") else ("ms", 1e3)
        around = ""
        if what == "step" and (p := c.of(side)):
            around = (f" ± {p.chance:.1%} ({p.low:+.1%} to {p.high:+.1%} in half of {p.count} pairs; "
                      f"found {p.least * factor:.3f} to {p.most * factor:.3f})")
        out.append(f"    {side:9} {what:5} {said * factor:10.3f} {unit} said, {found * factor:10.3f} found {c.off(side, what):+7.1%}{around}")
    return "\n".join(out + [f"    FAR: {', '.join(c.far())}"] * bool(c.far()))


def table(rows: list[Compared]) -> str:
    """For BENCHMARKS.md."""
    out = [f"Machine: {rows[0].device}, torch {rows[0].torch}. Command: `python -m benchmarks.profiles --write`.", "",
           "| step | quantity | eager: said | found | off | compiled: said | found | off | profiling s |", "|---|---|" + "---:|" * 7]
    for c in rows:
        for what, unit, factor in (("step", "ms", 1e3), ("busy", "ms", 1e3), ("peak", "MB", 1e-6), ("pools", "MB", 1e-6)):
            half = {p.side: f" ± {p.chance:.1%} ({p.low:+.1%} to {p.high:+.1%})" for p in c.pairs if what == "step"}
            around = {p.side: f" ({p.least * factor:.2f} to {p.most * factor:.2f})" for p in c.pairs if what == "step"}
            cells = {side: f"{a * factor:.2f} | {b * factor:.2f}{around.get(side, '')} | {c.off(side, what):+.1%}{half.get(side, '')}"
                     for side, w, a, b in c.totals if w == what}
            if cells:
                first = what == "step"
                out.append(f"| {c.case if first else ''} | {what} {unit} | {cells.get('eager', ' | | ')} | {cells.get('compiled', ' | | ')} | "
                           f"{f'{c.cost:.1f}' if first else ''} |")
    return "\n".join(out)


# -- all ---------------------------------------------------------------------------------------------------------------------------
def read(path: str) -> dict[str, Compared]:
    """What was measured before, by device and case."""
    if not path or not Path(path).exists():
        return {}
    return {f"{kind} {row['case']}": Compared(**{**row, "totals": tuple(map(tuple, row["totals"])), "pairs": tuple(Pairs(**p) for p in row["pairs"])})
            for kind, rows in json.loads(Path(path).read_text()).items() for row in rows}


def kept(path: str, found: dict[str, Compared]) -> None:
    Path(path).write_text(json.dumps({d: [asdict(c) for k, c in found.items() if k.startswith(d)] for d in CASES}, indent=1))


def arguments(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.profiles", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", choices=CASES, default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--cases", nargs="+", help="by default all of the device's")
    p.add_argument("--layers", type=int, help="instead of each model's own number")
    p.add_argument("--seconds", type=float, default=1.0, help="of steps of each side, for its figure")
    p.add_argument("--rounds", type=int, default=1, help="profiles of each case, each in a process of its own")
    p.add_argument("--ahead", type=int, default=1, help="processes that stand ready before the first of them is profiled")
    p.add_argument("--build", action="store_true", help="measure nothing: what is built is in the cache for a later run")
    p.add_argument("--html", type=Path, help="folder for each case's report")
    p.add_argument("--json", default="", help="file that keeps what was measured; cases measured again are replaced")
    p.add_argument("--report", action="store_true", help="measure nothing")
    p.add_argument("--write", action="store_true", help="put the tables of what there is into BENCHMARKS.md")
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    rows = read(args.json)
    for made in measured([] if args.report else args.cases or list(CASES[args.device]), args):
        rows[f"{args.device} {made.case}"] = made
        print(lines(made), flush=True)
        if args.json:
            kept(args.json, rows)
    for device in CASES if args.write else ():
        of = [c for k, c in rows.items() if k.startswith(device)]
        if of:
            write(table(of), f"<!-- profiles {device}: begin -->", f"<!-- profiles {device}: end -->")
    return 1 if any(c.far() for c in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
