"""Whole models on a GPU under eager, Inductor and tokamak: right, cold first call, step time, peak memory, kernels and opaque calls.

    python -m benchmarks.gpu_models [--models NAME ...] [--modes infer,train] [--sides floor,eager,inductor,tokamak] [--json FILE] [--redo SIDES]
                                    [--budget SECONDS] [--no-record]

Random weights, float32 parameters under bfloat16 autocast, TF32 on; training is forward, loss, backward and a fused AdamW step. `floor`: the first
call under `aot_eager`, what capturing alone costs any compiler. Right: loss and every gradient (inference: the output) as near to float64 as eager's
own, give or take a few roundings; models that drop out at random are compared with dropout off, at two layers. A process a model and mode.
"""
from __future__ import annotations

import argparse
import sys
import time

import torch

from .gpu import write
from .gpu_measure import machine
from .gpu_run import Results, spoken
from .gpu_zoo import MODELS

SIDES = ("floor", "eager", "inductor", "tokamak")
START, END = "<!-- gpu models: begin -->", "<!-- gpu models: end -->"
COMMAND = (sys.executable, "-m", "benchmarks.gpu_models_worker")


# -- all -----------------------------------------------------------------------------------------------------------------------
def line(name: str, mode: str, row: dict[str, dict]) -> str:
    """One model and mode, a line a side."""
    out = [f"{name} {mode}"]
    for side in (s for s in SIDES if s in row):
        r = row[side]
        if "first" not in r:
            out.append(f"  {side:9} FAILED {r.get('failed', '')[:200]} {r.get('at', '')}")
            continue
        text = f"  {side:9} first {r['first']:6.1f} s"
        if "device" in r:
            text += f"  step {r['wall'] * 1e3:7.2f} ms  device {r['device'] * 1e3:7.2f} ms  peak {r['peak'] / 1e6:6.0f} MB  {r['kernels']:5} kernels"
        if "right" in r:
            text += f"  error {r['error']:.2f}" + ("" if r["right"] else f" WRONG {r['wrong'][0]}")
        if "planned" in r:
            text += f"  planned {r['planned']}, {sum(r['opaque'].values())} opaque"
        out.append(text)
    return "\n".join(out)


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
    p.add_argument("--json", default="")
    p.add_argument("--calls", type=int, default=6, help="timed steps by each of two methods")
    p.add_argument("--budget", type=float, help="start no model after these seconds")
    p.add_argument("--patience", type=float, default=300, help="seconds after which a side without an answer counts as failed")
    p.add_argument("--write", action="store_true", help="put the table of what --json has into BENCHMARKS.md")
    p.add_argument("--report", action="store_true", help="measure nothing; needs no GPU")
    p.add_argument("--no-record", action="store_true", help="do not count tokamak's planned kernels and opaque calls")
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    results = Results.open(args.json)
    done = args.report or measure(args, results)
    if args.write:
        write(table(results.runs, results.rows), START, END)
    return 0 if done else 2


def measure(args: argparse.Namespace, results: Results) -> bool:
    """Measures what is missing, a model and mode at a time. True when nothing is left."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    results.runs.append(machine())
    start = time.monotonic()
    for name, mode in ((n, m) for n in args.models for m in args.modes if m in MODELS[n].modes):
        key = f"{name} {mode}"
        left = [s for s in SIDES if s in args.sides and (s in args.redo or s not in results.rows.get(key, {}))]
        if args.budget is not None and left and time.monotonic() - start > args.budget:
            print("stopped at the budget")
            return False
        _one(results, key, name, mode, left, args)
        print(line(name, mode, results.rows.get(key, {})), flush=True)
    return True


def _one(results: Results, key: str, name: str, mode: str, todo: list[str], args: argparse.Namespace) -> None:
    """Measures the sides in a process; if it ends early, that costs the side it was at, and another does the rest."""
    while todo:
        job = {"name": name, "mode": mode, "sides": todo, "device": "cuda", "calls": args.calls, "record": not args.no_record}
        for message in spoken(COMMAND, job, args.patience):
            if "end" in message:
                continue
            side = message.get("side", todo[0])
            results.rows.setdefault(key, {})[side] = message.get("result") or {"failed": message["failed"], "words": message["words"]}
            results.save()
            todo = [s for s in todo if s != side]


if __name__ == "__main__":
    sys.exit(main())
