"""What `tokamak.profile` says of a step beside what other instruments say of the same step, and what profiling costs beyond compiling.

    python -m benchmarks.profiles [--device cuda | cpu] [--cases NAME ...] [--layers N] [--seconds S] [--rounds N]
                                  [--html FOLDER] [--json FILE [--report]] [--write]

Cases on a GPU: BERT-large, GPT-2 medium and ResNet-50, inference and training (forward, loss, backward; float32 parameters under bfloat16
autocast); Llama 3.2 1B: a prompt, and one token against a cache (all in bfloat16), with CUDA graphs and without. On a CPU: the programs of
`examples/demo.py`; BERT and GPT-2 of two layers and a ResNet, in training.

Beside a profile stands the same step under eager and under `torch.compile(..., backend="tokamak")` without any of tokamak's tools, in the same
process and on the same arguments: a second compiled function, which nothing watches. Beside each turn of steps that the profile times stands a turn
of these, behind it and before it by turns, since the first of two finds the host idle. Step: on a GPU CUDA events around one, the device idle before it; on a CPU the clock. Busy: on a GPU the device's time by the averages of
torch's profiler, which watches nothing but the device, before and behind each look that the profile takes; on a CPU that of eager's operators, by the
same, at most the step. Medians; beside them between which times half of the steps lie. Peak: torch's allocator's, beyond what stands before a step;
what recordings of CUDA graphs keep stands always, as `pools`: both in a second process, which knows no tool at all. That one takes its turns of
steps, too: `elsewhere` is its median, which says how far two processes are apart and is not judged, since it differs as much between two processes
without tools. `cost`: seconds of the whole call of `tokamak.profile`, less those of its first compiled step and of what is measured beside it; the
first of all pays for the machine's peaks. `--rounds`: so many profiles of a case; the one of the median ratio is shown. Exit status 1 where a step or
busy time is off by over 3% or a cost is over 10 s.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import torch

import tokamak
from tokamak.tools import profile, watch
from tokamak.tools.profile import Profile
from tokamak.tools.traced import pool_bytes

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


def totals(steps: dict[str, Callable], gpu: bool) -> dict[str, dict[str, float]]:
    """What else is compared: memory."""
    found = {side: {"peak": peak(step)} for side, step in steps.items()} if gpu else {side: {} for side in steps}
    if gpu and (pools := pool_bytes()):
        found["compiled"]["pools"] = pools
    return found


def off(said: float, found: float) -> float:
    return said / found - 1 if found else math.inf if said else 0.0


def turn(step: Callable, gpu: bool) -> list[float]:
    """Seconds of steps, each by itself, about as many as a turn of the profile's has; the first counts where it is a long one, as there."""
    one, end = by_events if gpu else by_clock, time.perf_counter() + watch.TURN
    taken = [one(step)]
    if taken[0] <= watch.ALONE:
        taken = [one(step) for _ in range(watch.TOGETHER)]
        while time.perf_counter() < end:
            taken.append(one(step))
    return taken


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


def operator_time(step: Callable) -> float:
    """Seconds of torch's operators on the CPU, the median of some steps. The first that a profiler sees is slower."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for n in range(PROFILED + 1):
            with torch.profiler.record_function(f"{STEP}{n}"):
                step()
    events = profiler.events()
    ranges = [e.time_range for e in events if e.name.startswith(STEP) and e.name != f"{STEP}0"]
    found = [(e.time_range.start, e.self_cpu_time_total) for e in events if e.name.startswith("aten::")]
    return statistics.median(sum(t for start, t in found if r.start <= start <= r.end) for r in ranges) * 1e-6


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
class Compared:
    """A case. `first`: seconds of the first compiled step; `cost`: of profiling besides; `totals`: (side, quantity, said, found) in seconds or bytes;
    `named`: the share of the device's time that the profile's rows, and what it lists beside them, make up; `bound`: its verdict; `spread`: (side,
    from, to): half of the steps found are between these; `rounds`: profiles that were made; `elsewhere`: (side, seconds of a step in another
    process)."""
    case: str
    device: str
    torch: str
    first: float
    cost: float
    totals: tuple[tuple[str, str, float, float], ...]
    named: float
    bound: str
    spread: tuple[tuple[str, float, float], ...] = ()
    rounds: int = 1
    elsewhere: tuple[tuple[str, float], ...] = ()

    def far(self) -> list[str]:
        """What should not be."""
        judged = [(side, what, off(said, found)) for side, what, said, found in self.totals if what in JUDGED]
        far = [f"{side} {what} {by:+.1%}" for side, what, by in judged if abs(by) > WITHIN]
        return far + ([f"cost {self.cost:.1f} s"] if self.cost > MOST else [])


@dataclass(frozen=True)
class Round:
    """What a profile `said`, seconds of the `steps` of each side by other instruments meanwhile, in the same process and `elsewhere`, and their
    `rest`."""
    said: dict
    steps: dict[str, list[float]]
    elsewhere: dict[str, list[float]]
    rest: dict[str, dict[str, float]]

    def pair(self, side: str) -> tuple[float, float]:
        return self.said[side]["step"], statistics.median(self.steps[side])


class Beside:
    """Within it, a profile's sides have company: `make()` gives the same steps without tools, once the profile's own have run. Each turn of the
    profile's has one of theirs beside it, behind it or, every second time, before it, and then `turn(side)`, one elsewhere; each look by torch's profiler stands between two at theirs. `steps`,
    `elsewhere`, `busy`: seconds of all these; `pools`: bytes that their recordings keep; `waited`: seconds that this took."""

    def __init__(self, make: Callable[[], dict[str, Callable[[], object]]], turn: Callable[[str], list[float]], gpu: bool):
        self.make, self.turn, self.gpu, self.waited, self.pools = make, turn, gpu, 0.0, 0
        self.names: dict[int, str] = {}
        self.plain: dict[str, Callable[[], object]] = {}
        self.behind = dict.fromkeys(SIDES, False)           # did the last turn stand behind the profile's?
        self.steps, self.elsewhere, self.busy = ({side: [] for side in SIDES} for _ in range(3))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    def named(self, interleaved: Callable) -> Callable:
        def run(steps, *args, **kwargs):
            self.names.update((id(steps[side]), side) for side in SIDES)
            with self.aside():
                before = pool_bytes() if self.gpu else 0
                self.plain = self.make()
                self.pools = pool_bytes() - before if self.gpu else 0
            return interleaved(steps, *args, **kwargs)
        return run

    def beside(self, side: str) -> None:
        with self.aside():
            self.steps[side] += turn(self.plain[side], self.gpu)

    def turned(self, turns: Callable) -> Callable:
        def run(step, device, seconds, looked):
            if looked is not None:
                return turns(step, device, seconds, looked)
            side = self.names[id(step)]
            behind = self.behind[side] = not self.behind[side]
            if not behind:
                self.beside(side)
            found = turns(step, device, seconds, looked)
            if behind:
                self.beside(side)
            with self.aside():
                self.elsewhere[side] += self.turn(side)
            return found
        return run

    def between(self, look: Callable) -> Callable:
        def again(side: str) -> None:
            with self.aside():
                self.busy[side].append((device_time if self.gpu else operator_time)(self.plain[side]))

        def run(step, *args, **kwargs):
            side = self.names[id(step)]
            again(side)
            found = look(step, *args, **kwargs)
            again(side)
            return found
        return run

    def __enter__(self) -> Beside:
        self.patches = contextlib.ExitStack()
        for module, name, around in ((watch, "_turn", self.turned), (profile, "interleaved", self.named), (profile, "traced", self.between),
                                     (profile, "operators", self.between)):
            self.patches.enter_context(mock.patch.object(module, name, around(getattr(module, name))))
        return self

    def __exit__(self, *_) -> None:
        self.patches.close()


def said(case: Case, made: Made, seconds: float, turn: Callable[[str], list[float]]) -> tuple[Round, Profile]:
    """What the profile says of both sides, and of itself, beside what was found in this process and by `turn` elsewhere, memory not yet; and the
    profile."""
    gpu = profile.device_of((made.fn, made.args, made.kwargs)) != "cpu"
    start = time.perf_counter()
    with torch.set_grad_enabled(made.train), Beside(partial(plain, case, made), turn, gpu) as other:
        p = tokamak.profile(made.fn, *made.args, options=case.options, seconds=3 * seconds, **made.kwargs)
    took = time.perf_counter() - start - other.waited
    sides = {name: {**{k: getattr(side, k) for k in ("step", "busy", "peak")}, "pools": side.memory.pools - other.pools}
             for name, side in (("eager", p.eager), ("compiled", p.compiled))}
    named = (sum(r.seconds for r in p.rows) + sum(o.seconds for o in p.others)) / p.compiled.busy
    words = {**sides, "device": p.peaks.device, "first": p.first, "cost": took - p.first, "named": named, "bound": f"{p.bound}: {p.why}"}
    most = {side: math.inf if gpu else statistics.median(steps) for side, steps in other.steps.items()}      # so the profile has it
    busy = {side: {"busy": min(statistics.mean(found), most[side])} if found else {} for side, found in other.busy.items()}
    return Round(words, other.steps, other.elsewhere, busy), p


def compared(name: str, rounds: list[Round]) -> Compared:
    """Both side by side, by the round of the median ratio. On a CPU nothing but eager's operators is seen by torch's profiler."""
    middle = lambda pair: sorted(rounds, key=lambda r: off(*pair(r)))[len(rounds) // 2]
    totals, spread, elsewhere = [], [], []
    for side in SIDES:
        shown = middle(lambda r: r.pair(side))
        totals.append((side, "step", *shown.pair(side)))
        for what in rounds[0].rest[side]:
            pair = lambda r: (r.said[side][what], r.rest[side][what])
            totals.append((side, what, *pair(middle(pair))))
        steps = sorted(shown.steps[side])
        spread.append((side, steps[len(steps) // 4], steps[(3 * len(steps)) // 4]))
        elsewhere.append((side, statistics.median(shown.elsewhere[side])))
    first, cost = rounds[0].said, statistics.median(r.said["cost"] for r in rounds)
    return Compared(name, first["device"], torch.__version__, first["first"], cost, tuple(totals), first["named"], first["bound"], tuple(spread),
                    len(rounds), tuple(elsewhere))


# -- processes -------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """A process that answers what it is asked, one thing after the other."""
    process: multiprocessing.Process | None
    pipe: Connection

    def ask(self, what: str):
        """Raises EOFError where the process has ended."""
        self.pipe.send(what)
        return self.pipe.recv()


@contextlib.contextmanager
def part(name: str, case: str, args: argparse.Namespace) -> Iterator[Part]:
    """One part of a case in a process of its own: `plain` answers `totals`, and a side with a turn of it; `profile` answers `said`, and asks for
    turns before it does; both answer `ready`."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, name, case, args))
    process.start()
    there.close()
    try:
        yield Part(process, here)
    finally:
        here.close()
        process.join()


def serve(pipe: Connection, name: str, case: str, args: argparse.Namespace) -> None:
    """Answers until nobody asks."""
    torch.set_float32_matmul_precision("high")
    answers = plain_answers(case, args) if name == "plain" else profile_answers(case, args, Part(None, pipe).ask)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(answers[pipe.recv()]())


def plain_answers(name: str, args: argparse.Namespace) -> dict[str, Callable]:
    case, gpu = case_of(name), args.device == "cuda"
    steps = plain(case, case.make(args.device, args.layers))
    return {"ready": lambda: True, "totals": lambda: totals(steps, gpu), **{side: partial(turn, step, gpu) for side, step in steps.items()}}


def profile_answers(name: str, args: argparse.Namespace, turn: Callable[[str], list[float]]) -> dict[str, Callable]:
    case = case_of(name)
    made = case.make(args.device, args.layers)

    def answer() -> Round:
        found, p = said(case, made, args.seconds, turn)
        if args.html:
            file = "".join(c if c.isalnum() else "_" for c in name)
            p.html(args.html / f"{file}.html")
            (args.html / f"{file}.txt").write_text(str(p))
        return found
    return {"ready": lambda: True, "said": answer}


def case_of(name: str) -> Case:
    return next(cases[name] for cases in CASES.values() if name in cases)


def in_turns(name: str, args: argparse.Namespace) -> Compared:
    """A case, each round in processes of its own: where memory happens to lie makes one slower than another, and a use of torch's profiler does."""
    rounds = []
    for _ in range(args.rounds):
        with part("plain", name, args) as other, part("profile", name, args) as one:
            other.ask("ready"), one.ask("ready")
            answer = one.ask("said")
            while isinstance(answer, str):
                answer = one.ask(other.ask(answer))
            rest = other.ask("totals")
            rounds.append(replace(answer, rest={side: {**answer.rest[side], **rest[side]} for side in SIDES}))
    return compared(name, rounds)


def lines(c: Compared) -> str:
    out = [f"{c.case}: first step {c.first:.1f} s, profiling {c.cost:.1f} s besides; bound by {c.bound}; rows {c.named:.1%} of busy"]
    for side, what, said, found in c.totals:
        unit, factor = ("MB", 1e-6) if what in ("peak", "pools") else ("ms", 1e3)
        around = [f" ({low * factor:.3f} to {high * factor:.3f})" for of, low, high in c.spread if of == side and what == "step"]
        around += [f", elsewhere {median * factor:.3f}" for of, median in c.elsewhere if of == side and what == "step"]
        out.append(f"    {side:9} {what:5} {said * factor:10.3f} {unit} said, {found * factor:10.3f} found {off(said, found):+7.1%}{''.join(around)}")
    return "\n".join(out + [f"    FAR: {', '.join(c.far())}"] * bool(c.far()))


def table(rows: list[Compared]) -> str:
    """For BENCHMARKS.md."""
    out = [f"Machine: {rows[0].device}, torch {rows[0].torch}. Command: `python -m benchmarks.profiles --write`.", "",
           "| step | quantity | eager: said | found | off | elsewhere | compiled: said | found | off | elsewhere | profiling s |", "|---|---|" + "---:|" * 9]
    for c in rows:
        for what, unit, factor in (("step", "ms", 1e3), ("busy", "ms", 1e3), ("peak", "MB", 1e-6), ("pools", "MB", 1e-6)):
            around = {side: f" ({low * factor:.2f} to {high * factor:.2f})" for side, low, high in c.spread if what == "step"}
            far = {side: f"{median * factor:.2f}" for side, median in c.elsewhere if what == "step"}
            cells = {side: f"{a * factor:.2f} | {b * factor:.2f}{around.get(side, '')} | {off(a, b):+.1%} | {far.get(side, '')}"
                     for side, w, a, b in c.totals if w == what}
            if cells:
                first = what == "step"
                out.append(f"| {c.case if first else ''} | {what} {unit} | {cells.get('eager', ' | | | ')} | {cells.get('compiled', ' | | | ')} | "
                           f"{f'{c.cost:.1f}' if first else ''} |")
    return "\n".join(out)


# -- all ---------------------------------------------------------------------------------------------------------------------------
def read(path: str) -> dict[str, Compared]:
    """What was measured before, by device and case."""
    if not path or not Path(path).exists():
        return {}
    return {f"{kind} {row['case']}": Compared(**{**row, **{k: tuple(map(tuple, row.get(k, ()))) for k in ("totals", "spread", "elsewhere")}})
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
    p.add_argument("--html", type=Path, help="folder for each case's report")
    p.add_argument("--json", default="", help="file that keeps what was measured; cases measured again are replaced")
    p.add_argument("--report", action="store_true", help="measure nothing")
    p.add_argument("--write", action="store_true", help="put the tables of what there is into BENCHMARKS.md")
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    rows = read(args.json)
    for name in [] if args.report else args.cases or CASES[args.device]:
        made = rows[f"{args.device} {name}"] = in_turns(name, args)
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
