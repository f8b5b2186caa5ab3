"""Host time a call on a GPU: eager, Inductor and tokamak, each as it is and with CUDA graphs (`+graphs`); and what Dynamo and AOTAutograd take alone.

    python -m benchmarks.gpu_host [--programs NAME ...] [--sides eager,floor,inductor,tokamak,inductor+graphs,tokamak+graphs] [--calls N] [--runs N]
                                  [--kept] [--profile] [--write]

Microseconds of the host a call, the least and the median of many short runs of calls in a row, in which the sides of a program take turns, another
one first each time. `floor`: graphs that give again what they gave first, so that a call is Dynamo's guards, AOTAutograd and, of a training step,
torch's own sum and walk backward; `beyond` is what a side takes more, the compiler's own. `chain` is many small
kernels one after the other that no compiler joins. A run has so few launches that they find room in the device's queue, and starts when the device is
idle, so that the host never waits for it: what the device takes is the column `device`, of the same calls until it is done. `launches`: kernels,
copies and sets of a call, counted behind all runs, since a process that torch's profiler has watched is slower. --kept: compilers find what they kept
of an earlier run. --profile: where tokamak's calls spend theirs.
"""
from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from tokamak import Options
from tokamak.capture.aot import autograd, eager

from .gpu import write
from .gpu_measure import machine, span
from .gpu_sides import cold, compiled, kept

SIDES = ("eager", "floor", "inductor", "tokamak", "inductor+graphs", "tokamak+graphs")
START, END = "<!-- gpu host: begin -->", "<!-- gpu host: end -->"
RUNS = 60
WARM = 6                        # calls until what records has recorded
QUEUE = 400                     # launches of a run: well under the 1024 that a device's queue holds
RUN = 20                        # calls of a run at most
LINKS = 100


@dataclass(frozen=True)
class Program:
    """`fn(*inputs)`; `shapes` of float32 inputs. `train`: forward, sum and backward."""
    fn: Callable
    shapes: tuple[tuple[int, ...], ...]
    train: bool = False

    def inputs(self, device: str) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(1)
        return [torch.rand(s, generator=g).to(device).requires_grad_(self.train) for s in self.shapes]


@dataclass(frozen=True)
class Times:
    """Seconds a call: of the host (least and median), and until the device is done (least); and how many launches it makes (0: not known)."""
    host: float
    median: float
    device: float
    launches: int


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x ** 3)))


def _two(x, w):
    return F.layer_norm(x, (x.shape[-1],), w), (x * 2).sum(0)


def _products(x, w):
    for _ in range(8):
        x = F.gelu(x @ w)
    return x


def _mlp(x, a, b, w):
    return F.linear(F.gelu(F.linear(F.layer_norm(x, (x.shape[-1],), w), a)), b)


def chain(links: int) -> Callable:
    """Sums that run along the rows and the columns in turn: each link needs all of the one before, and leaves all to the next."""
    def run(x):
        for i in range(links):
            x = torch.cumsum(x * 0.25, i % 2)
        return x
    return run


PROGRAMS = {
    "gelu": Program(_gelu, ((1024,),)),
    "two": Program(_two, ((64, 64), (64,))),
    "products": Program(_products, ((64, 64), (64, 64))),
    "gelu_train": Program(_gelu, ((64, 64),), train=True),
    "mlp_train": Program(_mlp, ((64, 64), (256, 64), (64, 256), (64,)), train=True),
    "chain": Program(chain(LINKS), ((64, 64),)),
}


def step(fn: Callable, program: Program, inputs: list[torch.Tensor]) -> None:
    """One call, and its backward pass."""
    if program.train:
        fn(*inputs).sum().backward()
        for x in inputs:
            x.grad = None
    else:
        with torch.no_grad():
            fn(*inputs)


def under(side: str, fn: Callable, **options) -> Callable:
    """`fn` compiled; with CUDA graphs under `+graphs`. `options` are tokamak's."""
    name, _, graphs = side.partition("+")
    if name == "floor":
        return torch.compile(fn, dynamic=False, backend=lambda gm, inputs: autograd(gm, inputs, given_again))
    if graphs and name == "inductor":
        return torch.compile(fn, dynamic=False, mode="reduce-overhead")
    return compiled(name, fn, **({"cudagraphs": True} if graphs else {}), **options)


def given_again(graph: fx.GraphModule, inputs: Sequence, kind: str) -> Callable[[list], list]:
    """The boxed function of `graph` that computes at its first call, and gives those results from then on."""
    first, results = eager(graph), []

    def run(args: list) -> list:
        if not results:
            results.extend(first(args))
        args.clear()
        return [x.detach() if isinstance(x, torch.Tensor) else x for x in results]
    run._boxed_call = True
    return run


def measure(program: Program, sides: Sequence[str], device: str, calls: int, keep: bool = False, look: Callable[[Callable], None] | None = None,
            runs: int = RUNS) -> dict[str, Times]:
    """The times of each side. `look` is handed what makes a call of each of tokamak's, last."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with kept() if keep else cold():
        inputs = program.inputs(device)
        ours = {"cache_dir": Options().cache_dir} if keep else {}
        made = {side: under(side, program.fn, **(ours if side.startswith("tokamak") else {})) for side in sides}
        several = max(1, min(calls, RUN, QUEUE // operators(program, inputs)))
        made = {side: partial(step, fn, program, inputs) for side, fn in made.items()}
        for call in made.values():
            for _ in range(WARM):
                call()
        timed = times(made, several, wait, runs)
        launches = {side: launched(call) if device == "cuda" else 0 for side, call in made.items()}
        for side, call in made.items() if look is not None else ():
            if side.startswith("tokamak"):
                look(call)
        return {side: Times(*timed[side], launches[side]) for side in sides}


def times(made: dict[str, Callable], several: int, wait: Callable, runs: int = RUNS) -> dict[str, tuple[float, float, float]]:
    """Seconds a call of each side: of the host, least and median, and until the device is done."""
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in made}
    order = list(made)
    for _ in range(runs):
        order.append(order.pop(0))
        for side in order:
            call = made[side]
            call()                      # finds what another side has left in the caches
            wait()
            start = time.perf_counter()
            for _ in range(several):
                call()
            host = time.perf_counter() - start
            wait()
            found[side].append((host / several, (time.perf_counter() - start) / several))
    hosts = {side: [host for host, _ in runs] for side, runs in found.items()}
    return {side: (min(hosts[side]), statistics.median(hosts[side]), min(whole for _, whole in runs)) for side, runs in found.items()}


class Counted(TorchDispatchMode):
    """Counts torch's operators; no compiler makes more launches of them."""
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(program: Program, inputs: list[torch.Tensor]) -> int:
    with Counted() as found:
        step(program.fn, program, inputs)
    return found.count


def launched(call: Callable) -> int:
    """How many kernels, copies and sets a call runs on the device; a graph's count as those that it holds. 0: the profiler has shown nothing."""
    for _ in range(3):              # a profiler's first session may show nothing
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        found = sum(span(e) is not None for e in profiler.events())
        if found:
            return found
    return 0


def profile(call: Callable, calls: int) -> None:
    """Prints where the host's time goes."""
    with cProfile.Profile() as found:
        for _ in range(calls):
            call()
    pstats.Stats(found, stream=sys.stdout).sort_stats("tottime").print_stats(16)


def table(rows: dict[tuple[str, str], Times]) -> str:
    names = ("host us", "median", "beyond floor", "launches", "host us a launch", "device us")
    out = [f"| program | side | {' | '.join(names)} |", "|---|---" + "|---:" * len(names) + "|"]
    for (program, side), t in rows.items():
        floor = rows.get((program, "floor"))
        beyond = f"{(t.host - floor.host) * 1e6:.1f}" if floor is not None and side not in ("eager", "floor") else ""
        each = f"{t.host * 1e6 / t.launches:.2f}" if t.launches and side != "floor" else ""
        values = (f"{t.host * 1e6:.1f}", f"{t.median * 1e6:.1f}", beyond, str(t.launches or ""), each, f"{t.device * 1e6:.1f}")
        out.append(f"| {program} | {side} | {' | '.join(values)} |")
    return "\n".join(out)


def arguments(argv=None) -> argparse.Namespace:
    several = lambda text: tuple(t for t in text.split(",") if t)
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    p.add_argument("--sides", type=several, default=SIDES)
    p.add_argument("--calls", type=int, default=100, help="at most so many in a run, and so many under --profile")
    p.add_argument("--runs", type=int, default=RUNS)
    p.add_argument("--device", default="cuda", help="cpu: to try the command")
    p.add_argument("--kept", action="store_true", help="with the compilers' caches")
    p.add_argument("--profile", action="store_true")
    p.add_argument("--write", action="store_true", help="put the table into BENCHMARKS.md")
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    rows: dict[tuple[str, str], Times] = {}
    for name in args.programs:
        look = partial(profile, calls=args.calls) if args.profile else None
        timed = measure(PROGRAMS[name], args.sides, args.device, args.calls, args.kept, look, args.runs)
        found = {(name, side): times for side, times in timed.items()}
        rows |= found
        print("\n".join(table(found).splitlines()[2 if len(rows) > len(found) else 0:]), flush=True)
    if args.write:
        run = machine()
        about = f"Machine: {run['device']}, torch {run['torch']}, Triton {run['triton']}. Command: `python -m benchmarks.gpu_host --write`."
        write(f"{about}\n\n{table(rows)}", START, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
