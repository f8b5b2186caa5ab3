"""CPU benchmark: every case under eager, Inductor and tokamak, side by side in one run.

    python -m benchmarks.cpu [--cases SUBSTRING ...] [--seconds S] [--json FILE] [--write]

Two runs of the whole table, each in a process of its own: 'as users call them' and 'kept' (freed memory kept by the allocator for all: glibc
MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_). First calls are cold: caches off, static sizes, after an unrelated warm-up compile. Refuses to run
on a busy machine. `--write` puts the tables into BENCHMARKS.md.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import tokamak
from tokamak.backend import backend

from .cases import CASES, Case
from .measure import geomean, interleaved, machine, require_quiet

KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_TOP_PAD_": str(1 << 28)}
START, END = "<!-- cpu: begin -->", "<!-- cpu: end -->"


def inductor(fn):
    """`fn` under Inductor, caches off."""
    import torch._inductor.config as config
    config.force_disable_caches = True
    return torch.compile(fn, dynamic=False)


def ours(fn):
    """`fn` under tokamak, disk cache off."""
    return torch.compile(fn, dynamic=False, backend=lambda gm, inputs: backend(gm, inputs, options={"cache_dir": "", "strict": True}))


COMPILERS = {"inductor": inductor, "tokamak": ours}


def runner(case: Case, fn, inputs):
    """What is timed: a call under no_grad, or a backward pass."""
    if case.mode == "forward":
        def call():
            with torch.no_grad():
                return fn(*inputs)
        return call
    out = fn(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    grad = torch.ones_like(out) if out.dim() == 0 else torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def check(case: Case, value, reference) -> float:
    """Largest error against the float64 run, relative to its largest magnitude; exits when it is beyond the case's tolerance."""
    worst = 0.0
    for v, r in zip(torch.utils._pytree.tree_leaves(value), torch.utils._pytree.tree_leaves(reference)):
        worst = max(worst, float((v.double() - r).abs().max() / r.abs().max().clamp_min(1e-30)))
    if not worst <= case.tolerance:
        sys.exit(f"{case.name}: wrong, relative error {worst:.2e}")
    return worst


def double(x):
    return x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def measure(case: Case, seconds: float) -> dict:
    """Times of one case: {'eager': (median, p10), ..., 'first_inductor': s, ...}."""
    import copy
    torch.manual_seed(0)
    fn, inputs = case.make()
    wide = copy.deepcopy(fn).double() if isinstance(fn, torch.nn.Module) else fn
    reference = runner(case, wide, [double(x) for x in inputs])()
    row: dict = {"name": case.name, "bound": case.bound, "bytes": case.bytes}
    calls = {"eager": runner(case, fn, inputs)}
    for name, compiler in COMPILERS.items():
        torch._dynamo.reset()
        compiled = compiler(copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn)
        start = time.perf_counter()
        calls[name] = runner(case, compiled, inputs)
        value = calls[name]()
        row[f"first_{name}"] = time.perf_counter() - start
        row[f"error_{name}"] = check(case, value, reference)
    row["error_eager"] = check(case, calls["eager"](), reference)
    row.update(interleaved(calls, seconds))
    return row


def copy_time(seconds: float) -> float:
    """Median seconds of copying 64 MiB into a buffer that exists."""
    source, target = torch.randn(16 << 20), torch.empty(16 << 20)
    return interleaved({"copy": lambda: target.copy_(source)}, seconds)["copy"][0]


def call_overhead() -> dict[str, float]:
    """Microseconds a call of a tiny one-kernel, one-output graph, under a back end that does nothing and under tokamak."""
    from torch._dynamo.backends.common import aot_autograd
    from functorch.compile import make_boxed_func

    def nothing(gm, inputs):
        held = [torch.empty(16)]
        return make_boxed_func(lambda *args: held)
    x = torch.randn(16)
    out = {}
    calls = {}
    for name, be in (("nothing", aot_autograd(fw_compiler=nothing, inference_compiler=nothing)), ("tokamak", backend)):
        torch._dynamo.reset()
        calls[name] = torch.compile(lambda x: x.relu() * 2, backend=be)
        calls[name](x)

    def many(fn):
        def run():
            for _ in range(1000):
                fn(x)
        return run
    for name, (median, _) in interleaved({k: many(v) for k, v in calls.items()}, 1.0).items():
        out[name] = median * 1e3
    return out


def run(names: list[str], seconds: float) -> dict:
    """The whole table in this process."""
    require_quiet()
    torch.compile(lambda x: x.sin(), backend="inductor")(torch.randn(8))
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.randn(8))
    result = {"machine": machine(), "copy": copy_time(seconds), "rows": []}
    for case in CASES:
        if not names or any(n in case.name for n in names):
            require_quiet()
            result["rows"].append(measure(case, seconds))
            r = result["rows"][-1]
            print(f"  {case.name:34} eager {r['eager'][0]*1e3:8.2f}  inductor {r['inductor'][0]*1e3:8.2f}  tokamak {r['tokamak'][0]*1e3:8.2f} ms  "
                  f"first {r['first_inductor']:.2f} / {r['first_tokamak']:.2f} s", file=sys.stderr, flush=True)
    result["call"] = call_overhead()
    return result


def in_process(kept: bool, args) -> dict:
    """`run` in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.cpu", "--inner", file.name, "--seconds", str(args.seconds),
                   *(f"--cases={n}" for n in args.cases)]
        subprocess.run(command, check=True, env={**os.environ, **(KEPT if kept else {})})
        return json.loads(Path(file.name).read_text())


def table(users: dict, kept: dict) -> str:
    """The results as Markdown."""
    out = [f"Machine: {users['machine']}. Command: `python -m benchmarks.cpu --write`. Milliseconds are medians of calls in turn; `kept`: freed "
           f"memory kept by the allocator. Copy of 64 MiB into an existing buffer: {users['copy']*1e3:.2f} ms "
           f"(kept run: {kept['copy']*1e3:.2f} ms).", "",
           "| case | eager ms | Inductor ms | tokamak ms | Inductor / tokamak | eager / tokamak | kept: Inductor ms | kept: tokamak ms | kept ratio "
           "| first call Inductor s | first call tokamak s | error eager | error tokamak |", "|" + "---|" * 13]
    for u, k in zip(users["rows"], kept["rows"]):
        ms = lambda row, who: row[who][0] * 1e3
        of = lambda row, one, other: ms(row, one) / ms(row, other)
        out.append(f"| {u['name']} | {ms(u, 'eager'):.2f} | {ms(u, 'inductor'):.2f} | {ms(u, 'tokamak'):.2f} | {of(u, 'inductor', 'tokamak'):.2f} "
                   f"| {of(u, 'eager', 'tokamak'):.2f} | {ms(k, 'inductor'):.2f} | {ms(k, 'tokamak'):.2f} | {of(k, 'inductor', 'tokamak'):.2f} "
                   f"| {u['first_inductor']:.2f} | {u['first_tokamak']:.2f} | {u['error_eager']:.1e} | {u['error_tokamak']:.1e} |")
    memory = [(u, k) for u, k in zip(users["rows"], kept["rows"]) if u["bound"] == "memory"]
    ratios = [u["inductor"][0] / u["tokamak"][0] for u, _ in memory]
    kept_ratios = [k["inductor"][0] / k["tokamak"][0] for _, k in memory]
    first = [u["first_inductor"] / u["first_tokamak"] for u, _ in memory]
    chain = next((u for u in users["rows"] if u["name"] == "gelu_chain_f32_16Mi"), None)
    out += ["", f"Over the {len(memory)} memory-bound cases, Inductor / tokamak: as users call them geomean {geomean(ratios):.2f} "
            f"(least {min(ratios):.2f}); kept geomean {geomean(kept_ratios):.2f} (least {min(kept_ratios):.2f}); "
            f"first call geomean {geomean(first):.2f}."]
    if chain:
        out.append(f"gelu_chain_f32_16Mi takes {chain['tokamak'][0] / users['copy']:.2f} times a copy into an existing buffer.")
    out.append(f"One kernel, one output of 16 elements: {users['call']['nothing']:.1f} us a call under a back end that does nothing, "
               f"{users['call']['tokamak']:.1f} us under tokamak: {users['call']['tokamak'] - users['call']['nothing']:.1f} us of our own.")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", action="append", default=[], help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of timing for each competitor and case")
    parser.add_argument("--json", help="write the raw figures here")
    parser.add_argument("--write", action="store_true", help="put the tables into BENCHMARKS.md")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inner:
        Path(args.inner).write_text(json.dumps(run(args.cases, args.seconds)))
        return
    results = {"users": in_process(False, args), "kept": in_process(True, args), "tokamak": getattr(tokamak, "__version__", "")}
    text = table(results["users"], results["kept"])
    print(text)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))
    if args.write:
        file = Path(__file__).parent.parent / "BENCHMARKS.md"
        old = file.read_text() if file.exists() else f"# Benchmarks\n\n{START}\n{END}\n"
        head, rest = old.split(START)
        file.write_text(f"{head}{START}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
