"""The kernels of the GPU cases as they are planned for an H200, without one: what a change of a heuristic changes, and what spills.

    python -m benchmarks.gpu_plans [--cases GLOB ...] [--drawn N --seed S ...] [--build] [--json FILE] [--against FILE] [--workers N]

A line a kernel: its case, schedule and, with `--build`, registers, bytes of stack (spilled) a thread and of shared memory a program, as ptxas says,
and the schedule that is taken in the place of one that takes long.
`--against`: only cases whose kernels are others than those that an earlier run kept by `--json`, its kernels first. Without --cases and --drawn: the
list of `benchmarks/gpu_cases.py`. Nothing is computed: forward and backward are planned and lowered, and their kernels do nothing when they are
called.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch

from tokamak import backend as backends
from tokamak.codegen import quicker
from tokamak.codegen.stages import render_plan
from tokamak.runtime import gpu_build, gpu_interpret
from tokamak.target import Target
from tokamak.tools.kernels import launched
from tokamak.tools.record import GraphRecord, Recorder, recording

from . import gpu_drawn
from .gpu_cases import case, chosen
from .gpu_sides import compiled, forward, leaves, multiplying, own, timed_graphs, warm

H200 = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8, model="H200")


class Idle:
    """A kernel that does nothing."""
    address, resident = 0, 1

    def on(self, device: str) -> "Idle":
        return self

    def launch(self, packed: bytes, stream: int) -> int:
        return 0


@contextlib.contextmanager
def planning() -> Iterator[Recorder]:
    """Within it what is compiled for the target 'interpret' is planned for an H200, and its kernels do nothing; gives what is recorded."""
    with mock.patch.object(backends, "target", lambda *a, **k: H200), mock.patch.object(gpu_interpret, "interpreted", lambda unit: Idle()), \
            recording() as recorder:
        yield recorder


def graphs(name: str) -> list[GraphRecord]:
    """What is recorded of a case's graphs."""
    one = case(name)
    inputs = [torch.empty(s.shape, dtype=s.dtype).contiguous(memory_format=s.layout).requires_grad_(one.differentiates(s)) for s in one.specs]
    with warm(), multiplying(one), planning() as recorder:
        inputs = own(one, inputs)
        out = forward(one, compiled("tokamak", one.fn, cached=True, target="interpret"), inputs)
        if one.mode != "forward":
            torch.autograd.grad(out, leaves(inputs), torch.empty_like(out, requires_grad=False))
    return timed_graphs(one, recorder.graphs)


def planned(name: str, build: bool = False) -> list[dict]:
    """The kernels of a case in running order: 'name', 'schedule', 'key' (which stands for its text) and, built, 'registers', 'spilled', 'shared'."""
    found = []
    for record in graphs(name):
        built = render_plan(record.values["lower"])
        units = {p.unit.name: p.unit for b in built.values() for p in b.parts}
        made = gpu_build.build(list(units.values()), H200.arch) if build else {}
        others = _others(record, built, made) if made else {}
        for x in launched(record):
            key = x.launch.kernel
            facts = {f: getattr(made[key], f) for f in ("registers", "spilled", "shared")} if made else {}
            facts.update({"quicker": others[str(x.schedule)]} if str(x.schedule) in others else {})
            found.append({"name": x.name, "schedule": str(x.schedule), "key": key, **facts})
    return found


def _others(record: GraphRecord, built: dict, made: dict[str, gpu_build.Binary]) -> dict[str, str]:
    """Schedules that `codegen.quicker` replaces -> its own."""
    lowered, machine = record.values["lower"], record.values["target"]
    found = quicker.others(lowered, built, made, machine, lambda units: gpu_build.build(units, H200.arch), {})
    return {str(s): str(found.bodies[g][1]) for g, (_, s) in lowered.bodies.items() if found.bodies[g][1] != s}


def _planned(name: str, build: bool) -> tuple[str, list[dict] | str]:
    torch.set_num_threads(1)
    try:
        return name, planned(name, build)
    except Exception as error:
        return name, f"{type(error).__name__}: {error}"


def every(names: Sequence[str], build: bool, workers: int) -> Iterator[tuple[str, list[dict] | str]]:
    """(case, its kernels, or what was raised) as they are ready."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_planned, n, build) for n in names]):
            yield done.result()


def text(name: str, kernels: list[dict] | str) -> str:
    if isinstance(kernels, str):
        return f"{name}  {kernels}"
    facts = lambda k: f"  {k['registers']} registers, {k['spilled']} spilled, {k['shared']} shared" \
        f"{' -> ' + k['quicker'] if 'quicker' in k else ''}" if "registers" in k else ""
    return "\n".join(f"{name}  {k['name']}: {k['schedule']}{facts(k)}" for k in kernels)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_plans", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", default=[], metavar="GLOB", help="cases by name, with * and ?; also names of any other size")
    p.add_argument("--drawn", type=int, metavar="N", help="N cases drawn at random for each --seed")
    p.add_argument("--of", choices=tuple(gpu_drawn.OF), default="layers", help="of --drawn: libraries' layers, what researchers write beside them, "
                   "or what lies one way and is read another")
    p.add_argument("--seed", type=int, nargs="+", default=[0])
    p.add_argument("--build", action="store_true", help="compile the kernels for sm_90, and say what they take")
    p.add_argument("--json", default="", help="kernels are kept here")
    p.add_argument("--against", default="", help="what an earlier run kept: print only cases whose kernels are others now")
    p.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N")
    args = p.parse_args(argv)
    names = [n for seed in args.seed for n in gpu_drawn.drawn(args.drawn, seed, args.of)] if args.drawn else []
    names += chosen(args.cases, []) if args.cases or not names else []
    before = json.loads(Path(args.against).read_text()) if args.against else {}
    kept, others = {}, 0
    for name, kernels in every(list(dict.fromkeys(names)), args.build, args.workers):
        kept[name] = kernels
        keys = lambda ks: [(k["key"], k["schedule"]) for k in ks] if isinstance(ks, list) else ks
        if not args.against:
            print(text(name, kernels), flush=True)
        elif name in before and keys(before[name]) != keys(kernels):
            others += 1
            print(text(name, before[name]), text(name, kernels).replace(name, " " * (len(name) - 4) + "now:"), sep="\n", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1))
    if args.against:
        print(f"{others} of {sum(n in before for n in kept)} cases have other kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
