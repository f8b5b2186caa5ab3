"""Whole models on a GPU under eager, Inductor and tokamak: right, cold first call, step time, peak memory, kernels and opaque calls.

    python -m benchmarks.gpu_models [--models NAME ...] [--modes infer,train] [--sides floor,eager,inductor,tokamak] [--parts first,step,right,plan]
                                    [--json FILE] [--redo SIDES] [--budget SECONDS] [--jobs N] [--kept FOLDER]

Random weights, float32 parameters under bfloat16 autocast, TF32 on; training is forward, loss, backward and a fused AdamW step. `floor`: the first
call under `aot_eager`, what capturing alone costs any compiler. Right: loss and every gradient (inference: the output) as near to float64 as eager's
own, give or take a few roundings; models that drop out at random are compared with dropout off, at two layers.

Parts: `first` (cold, after an unrelated compile of the same side), `step` (times and peak memory), `right` and `plan` (tokamak: kernels, and how the
seconds of a compile divide, cold ones without `--kept`); each is done once and kept in the JSON file. A process a side of a model and mode; `--jobs`
of them compile at once, but what is timed has the machine to itself. Where first calls are timed, one under `floor` comes first that counts for
nothing, since it reads the libraries from disk; no process starts while another makes its first call. `--kept`: a folder in which the
compilers keep what they build for all parts but `first`; part `build` fills it. Where `first` and `step` are asked for together, the steps are of
what the first call compiled.
"""
from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from .gpu import write
from .gpu_measure import machine
from .gpu_run import Results, spoken
from .gpu_zoo import MODELS

SIDES = ("floor", "eager", "inductor", "tokamak")
PARTS = {"build": "built", "first": "first", "step": "wall", "right": "right", "plan": "planned"}         # part -> a figure that it gives
WANTED = {"floor": ("first",), "eager": ("step",), "inductor": ("build", "first", "step"), "tokamak": tuple(PARTS)}
START, END = "<!-- gpu models: begin -->", "<!-- gpu models: end -->"
COMMAND = (sys.executable, "-m", "benchmarks.gpu_models_worker")


# -- all -----------------------------------------------------------------------------------------------------------------------
def line(name: str, mode: str, row: dict[str, dict]) -> str:
    """One model and mode, a line a side."""
    out = [f"{name} {mode}"]
    for side in (s for s in SIDES if s in row):
        r = row[side]
        text = f"  {side:9}"
        if "first" in r:
            text += f" first {r['first']:6.1f} s"
        if "wall" in r:
            text += f"  step {r['wall'] * 1e3:7.2f} ms  device {r['device'] * 1e3:7.2f} ms  peak {r['peak'] / 1e6:6.0f} MB  {r['kernels']:5} kernels"
        if "right" in r:
            text += f"  error {r['error']:.2f}" + ("" if r["right"] else f" WRONG {r['wrong'][0]}")
        if "planned" in r:
            text += f"  planned {r['planned']}, {sum(r['opaque'].values())} opaque" + _divided(r)
        out.append(text + "".join(f"  {part} FAILED {what['failed'][:200]} {what.get('at', '')}" for part, what in r.get("failures", {}).items()))
    return "\n".join(out)


def _divided(row: dict) -> str:
    """The stages that took longest, and the kernel that took longest to build."""
    stages = sorted(row.get("stages", {}).items(), key=lambda x: -x[1])[:4]
    text = "".join(f"  {stage} {seconds:.1f} s" for stage, seconds in stages)
    return text + "".join(f"  slowest {name} {seconds:.1f} s" for seconds, name, _ in row.get("slowest", [])[:1])


def table(runs: list[dict], rows: dict[str, dict[str, dict]]) -> str:
    """What was measured as Markdown. Raises ValueError when there is nothing."""
    if not rows:
        raise ValueError("no model was measured")
    columns = [("first", 1.0, "{:.1f}", SIDES[:1] + SIDES[2:], "first call s"), ("wall", 1e3, "{:.2f}", SIDES[1:], "step ms"),
               ("device", 1e3, "{:.2f}", SIDES[1:], "device ms"), ("peak", 1e-6, "{:.0f}", SIDES[1:], "peak MB"),
               ("kernels", 1, "{:.0f}", SIDES[1:], "kernels"), ("error", 1.0, "{:.2f}", SIDES[3:], "error / allowed")]
    heads = [f"{title} {side}" for _, _, _, sides, title in columns for side in sides]
    run = runs[-1]
    out = [f"Machine: {run['device']}, torch {run['torch']}, Triton {run['triton']}. Command: `python -m benchmarks.gpu_models --write`.", "",
           "| model | " + " | ".join(heads) + " | opaque calls tokamak |", "|" + "---|" * (len(heads) + 2)]
    for key, row in rows.items():
        cells = [form.format(row[s][k] * factor) if k in row.get(s, {}) else "" for k, factor, form, sides, _ in columns for s in sides]
        mine = row.get("tokamak", {})
        opaque = sum(mine["opaque"].values()) if "opaque" in mine else ""
        wrong = [s for s in SIDES if row.get(s, {}).get("right") is False]
        out.append(f"| {key}{' WRONG: ' + ', '.join(wrong) if wrong else ''} | " + " | ".join(cells) + f" | {opaque} |")
    return "\n".join(out)


def arguments(argv=None) -> argparse.Namespace:
    several = lambda text: tuple(t for t in text.split(",") if t)
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    p.add_argument("--modes", type=several, default=("infer", "train"))
    p.add_argument("--sides", type=several, default=SIDES)
    p.add_argument("--redo", type=several, default=())
    p.add_argument("--parts", type=several, default=("first", "step", "right", "plan"))
    p.add_argument("--json", default="")
    p.add_argument("--kept", default="", help="folder of what is compiled for all parts but `first`")
    p.add_argument("--jobs", type=int, default=1, help="processes at once")
    p.add_argument("--calls", type=int, default=6, help="timed steps by each of two methods")
    p.add_argument("--budget", type=float, help="start no process after these seconds")
    p.add_argument("--patience", type=float, default=300, help="seconds after which a side without an answer counts as failed")
    p.add_argument("--write", action="store_true", help="put the table of what --json has into BENCHMARKS.md")
    p.add_argument("--report", action="store_true", help="measure nothing; needs no GPU")
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    results = Results.open(args.json)
    done = args.report or measure(args, results)
    if args.write:
        write(table(results.runs, results.rows), START, END)
    return 0 if done else 2


def missing(args: argparse.Namespace, results: Results) -> list[tuple[str, str, str, list[str]]]:
    """(model, mode, side, parts) of what there is no figure for; what failed is tried again."""
    todo = []
    for name, mode in ((n, m) for n in args.models for m in args.modes if m in MODELS[n].modes):
        row = results.rows.get(f"{name} {mode}", {})
        for side in (s for s in SIDES if s in args.sides):
            parts = [p for p in PARTS if p in args.parts and p in WANTED[side] and (side in args.redo or PARTS[p] not in row.get(side, {}))]
            todo += [(name, mode, side, parts)] if parts else []
    return todo


def measure(args: argparse.Namespace, results: Results) -> bool:
    """Measures what is missing, a process a model, mode and side, `jobs` at once. True when nothing is left."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    results.runs.append(machine())
    return all(measured(args, results, missing(args, results)))


def measured(args: argparse.Namespace, results: Results, todo: list[tuple[str, str, str, list[str]]]) -> list[bool]:
    """Measures `todo`; whether each has had its turn."""
    start, entering, firsts = time.monotonic(), threading.Lock(), [job for job in todo if "first" in job[3]]
    starting = threading.Lock() if firsts else contextlib.nullcontext()
    with tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(args.jobs) as pool:
        def one(job: tuple[str, str, str, list[str]]) -> bool:
            if args.budget is not None and time.monotonic() - start > args.budget:
                return False
            _one(results, *job, args, lock.name, entering, starting)
            return True
        for name, mode, *_ in firsts[:1]:           # BERT-large's training under `floor` on a machine that had just started 18.4 s, 13.8 behind it
            list(spoken(COMMAND, _job(name, mode, "floor", ["first"], args, lock.name), args.patience))
        return list(pool.map(one, todo))


def _job(name: str, mode: str, side: str, parts: list[str], args: argparse.Namespace, lock: str) -> dict:
    return {"name": name, "mode": mode, "side": side, "parts": parts, "device": "cuda", "calls": args.calls, "kept": args.kept, "lock": lock}


def _one(results: Results, name: str, mode: str, side: str, todo: list[str], args: argparse.Namespace, lock: str, entering: threading.Lock,
         starting: contextlib.AbstractContextManager) -> None:
    """Measures parts of a side in a process; if it ends early, that costs the part it was at, and another does the rest. `starting`: held until the
    first part is done."""
    key = f"{name} {mode}"
    while todo:
        with contextlib.ExitStack() as turn:
            turn.enter_context(starting)
            for message in spoken(COMMAND, _job(name, mode, side, todo, args, lock), args.patience):
                turn.close()
                if "end" in message:
                    continue
                with entering:
                    todo = todo[1:]
                    enter(results.rows.setdefault(key, {}).setdefault(side, {}), message)
                    results.save()
                    print(line(key, "", {side: results.rows[key][side]}), flush=True)


def enter(row: dict, message: dict) -> None:
    """Puts what a process said of a part into the side's figures; one that ended early says no more than why."""
    part, result = message.get("part", "process"), message.get("result", message)
    if "failed" in result:
        row.setdefault("failures", {})[part] = {k: result[k] for k in ("failed", "at", "words") if k in result}
    else:
        row.get("failures", {}).pop(part, None)
        row.update(result)


if __name__ == "__main__":
    sys.exit(main())
