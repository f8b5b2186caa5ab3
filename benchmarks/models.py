"""Training steps of whole models under eager and tokamak: right, in how many kernels, how fast, in how much memory.

    python -m benchmarks.models [--models bert gpt2 ...] [--size small | medium] [--width N] [--layers N] [--batch N] [--length N] [--image N]
                                [--channels X] [--depth X] [--attention sdpa | eager] [--bf16] [--channels-last] [--steps N]
                                [--no-times] [--no-memory | --only-memory] [--processes N] [--json FILE]

Sizes are of `tests/models/zoo.py`: `small` is what the tests run, `medium` large enough that activations outweigh everything else. Errors are
against the same step in float64, in units of what the tests allow (1: as far as allowed). Peak memory: each side in processes of its own; after
the steps that capture and build (transformers' classifiers note the kind of problem in the first, so that Dynamo captures the second again)
everything idle is given back, and over the next steps the highest resident size is taken, less the resident size before them; the median over the
processes.
"""
from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch

import tokamak
from tests.models.steps import UNIT, compare, exact, train
from tests.models.zoo import STEPS, Size
from tokamak.backend import _POOL
from tokamak.tools.kernels import kernels, opaques
from tokamak.tools.record import Recorder

from .measure import interleaved

SIZES = {"small": Size(), "medium": Size(batch=8, layers=4, width=256, length=128, vocabulary=4096, image=128, channels=0.5, depth=0.5)}
STATUS = Path("/proc/self/status")


# -- one process ---------------------------------------------------------------------------------------------------------
def prepared(args, name: str, compiled: bool, **options):
    """(model, step): `step()` runs forward, loss, backward and the optimizer's step."""
    spec = STEPS[name]
    model, inputs = spec.build(args.sizes, args.attention), spec.inputs(args.sizes)
    if args.channels_last and spec.images:
        model = model.to(memory_format=torch.channels_last)
        inputs["pixel_values"] = inputs["pixel_values"].to(memory_format=torch.channels_last)
    run = tokamak.compile(model, **options) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        with torch.autocast("cpu", torch.bfloat16) if args.bf16 else nullcontext():
            loss = run(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return model, step


def status(field: str) -> int:
    """A size in this process's status, in bytes."""
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """The highest resident size starts again from the present one."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_memory(args, name: str, compiled: bool) -> dict:
    """`peak`: bytes above the start, over some steps after those that capture; `idle`: bytes of the pool's idle blocks at the end."""
    _, step = prepared(args, name, compiled)
    until_captured(step)
    settle()
    before = status("VmRSS")
    reset_peak()
    for _ in range(args.steps):
        step()
    return {"peak": status("VmHWM") - before, "idle": _POOL.held()[1]}


def until_captured(step) -> None:
    """Runs `step` until Dynamo captures nothing more in it."""
    stats, before = torch._dynamo.utils.counters["stats"], -1
    while stats["unique_graphs"] != before:
        before = stats["unique_graphs"]
        step()


def settle() -> None:
    """Gives back what the first steps and their captures left behind, idle blocks of the pool included, so that only later steps' memory is seen."""
    gc.collect()
    _POOL.trim()
    ctypes.CDLL(None).malloc_trim(0)


# -- one model -------------------------------------------------------------------------------------------------------------
def measure(args, name: str) -> dict:
    """Everything but memory, of one model, in this process."""
    spec = STEPS[name]
    model, inputs = spec.build(args.sizes, args.attention), spec.inputs(args.sizes)
    how = {"autocast": args.bf16, "channels_last": args.channels_last and spec.images}
    torch._dynamo.reset()
    report = compare(train(model, inputs, compiled=True, strict=True, **how), [train(model, inputs, compiled=False, **how)], exact(model, inputs),
                     UNIT[args.bf16])
    torch._dynamo.reset()
    recorder = Recorder()
    _, mine = prepared(args, name, True, strict=True, recorder=recorder, cache_dir="")
    begin = time.perf_counter()
    mine()
    seconds = time.perf_counter() - begin
    made = [k for r in recorder.graphs for k in kernels(r)]
    calls = Counter(o.op for r in recorder.graphs for o in opaques(r))
    row = {"model": name, "error": report.worst, "wrong": report.wrong, "kernels": len(made), "bytes": sum(k.bytes for k in made),
           "opaque": dict(calls.most_common())}
    if args.no_times:
        return row
    _, theirs = prepared(args, name, False)
    times = interleaved({"eager": theirs, "tokamak": mine}, seconds=0.0, least=args.steps)
    return {**row, "eager_ms": times["eager"][0] * 1e3, "tokamak_ms": times["tokamak"][0] * 1e3, "compile_s": seconds}


def in_process(argv: list[str], what: str, name: str) -> dict:
    """`what` of one model, measured by a process of its own."""
    out = subprocess.run([sys.executable, "-m", "benchmarks.models", *argv, "--models", name, "--part", what], capture_output=True, text=True)
    if out.returncode:
        return {"failed": out.stderr.strip().splitlines()[-1] if out.stderr.strip() else f"exit {out.returncode}"}
    return json.loads(out.stdout.strip().splitlines()[-1])


# -- all -------------------------------------------------------------------------------------------------------------------
def main(argv: list[str]) -> None:
    args = arguments(argv)
    if args.part:
        made = measure(args, args.models[0]) if args.part == "all" else measure_memory(args, args.models[0], args.part == "tokamak")
        print(json.dumps(made))
        return
    rows = []
    for name in args.models:
        row = in_process(argv, "all", name) if not args.only_memory else {}
        if "failed" not in row and not args.no_memory:
            found = [{side: in_process(argv, side, name) for side in ("eager", "tokamak")} for _ in range(args.processes)]
            row["memory"] = {side: middle([f[side] for f in found]) for side in ("eager", "tokamak")}
        rows.append({"model": name, **row})
        print(line(rows[-1]), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"sizes": dataclasses.asdict(args.sizes), "rows": rows}, indent=1))


def middle(found: list[dict]) -> dict:
    """The process with the median peak; one that failed, if any did."""
    return next((f for f in found if "failed" in f), None) or sorted(found, key=lambda f: f["peak"])[len(found) // 2]


def line(row: dict) -> str:
    """One model as text."""
    if "failed" in row:
        return f"{row['model']}: FAILED: {row['failed']}"
    text = row["model"]
    if "wrong" in row:
        verdict = "right" if not row["wrong"] else f"WRONG ({len(row['wrong'])}: {row['wrong'][0]})"
        text += (f": {verdict}, error {row['error']:.2f} of the allowed; {row['kernels']} kernels moving {row['bytes'] / 2**20:.1f} MiB, "
                 f"{sum(row['opaque'].values())} opaque calls")
    if "eager_ms" in row:
        text += (f"; eager {row['eager_ms']:.1f} ms, tokamak {row['tokamak_ms']:.1f} ms ({row['eager_ms'] / row['tokamak_ms']:.2f}x); "
                 f"compile {row['compile_s']:.1f} s")
    for side, found in row.get("memory", {}).items():
        text += f"; {side} peak " + (f"{found['peak'] / 2**20:.1f} MiB" if "peak" in found else f"FAILED {found['failed']}")
    sides = row.get("memory", {})
    if all("peak" in s for s in sides.values()) and sides:
        text += f" ({sides['tokamak']['peak'] / max(sides['eager']['peak'], 1):.2f}x)"
    return text + ("\n    opaque: " + ", ".join(f"{op} {n}" for op, n in row["opaque"].items()) if "opaque" in row else "")


def arguments(argv: list[str]):
    p = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", choices=STEPS, default=list(STEPS))
    p.add_argument("--size", choices=SIZES, default="small")
    for f in dataclasses.fields(Size):
        p.add_argument(f"--{f.name}", type=float if f.type == "float" else int)
    p.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    p.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    p.add_argument("--channels-last", action="store_true")
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--no-times", action="store_true", help="on a busy machine: neither ours nor eager's")
    p.add_argument("--no-memory", action="store_true")
    p.add_argument("--only-memory", action="store_true")
    p.add_argument("--processes", type=int, default=3, help="how many measure each side's memory")
    p.add_argument("--json")
    p.add_argument("--part", choices=("all", "eager", "tokamak"), help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Size) if getattr(args, f.name) is not None}
    args.sizes = dataclasses.replace(SIZES[args.size], **given)
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
