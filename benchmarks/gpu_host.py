"""Host time a call on a GPU: eager, AOTAutograd alone (`floor`), Inductor and tokamak, each as it is and with CUDA graphs (`+graphs`).

    python -m benchmarks.gpu_host [--programs NAME ...] [--sides eager,floor,inductor,tokamak,inductor+graphs,tokamak+graphs] [--calls N] [--profile]

Microseconds of the host, the least of several runs of calls in a row, too few to fill the device's queue. `chain` is many kernels one after the other that
no compiler joins: its line says microseconds a kernel, from a long and a short one. --profile: where tokamak's calls spend theirs.
"""
from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .gpu_measure import span
from .gpu_sides import cold, compiled

SIDES = ("eager", "floor", "inductor", "tokamak", "inductor+graphs", "tokamak+graphs")
RUNS = 5
WARM = 6                        # calls until what records has recorded
CHAIN = 8, 40                   # links of the short and the long chain


@dataclass(frozen=True)
class Program:
    """`fn(*inputs)`; `shapes` of float32 inputs. `train`: forward, sum and backward."""
    fn: Callable
    shapes: tuple[tuple[int, ...], ...]
    train: bool = False

    def inputs(self, device: str) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(1)
        return [torch.rand(s, generator=g).to(device).requires_grad_(self.train) for s in self.shapes]


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x ** 3)))


def _two(x, w):
    return F.layer_norm(x, (x.shape[-1],), w), (x * 2).sum(0)


def _products(x, w):
    for _ in range(8):
        x = F.gelu(x @ w)
    return x


def chain(links: int) -> Callable:
    """Each link divides by the sum of all: kernels that need each other's whole result."""
    def run(x):
        for _ in range(links):
            x = x / x.sum()
        return x
    return run


PROGRAMS = {
    "gelu": Program(_gelu, ((1024,),)),
    "two": Program(_two, ((64, 64), (64,))),
    "products": Program(_products, ((64, 64), (64, 64))),
    "gelu_train": Program(_gelu, ((64, 64),), train=True),
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


def under(side: str, fn: Callable) -> Callable:
    """`fn` compiled; with CUDA graphs under `+graphs`."""
    name, _, graphs = side.partition("+")
    if name == "floor":
        return torch.compile(fn, dynamic=False, backend="aot_eager")
    if graphs and name == "inductor":
        return torch.compile(fn, dynamic=False, mode="reduce-overhead")
    return compiled(name, fn, **({"cudagraphs": True} if graphs else {}))


def host_time(program: Program, side: str, device: str, calls: int) -> tuple[float, Callable]:
    """(seconds of the host a call, what makes one). The device is waited for between runs only."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with cold():
        inputs = program.inputs(device)
        fn = under(side, program.fn)
        call = lambda: step(fn, program, inputs)
        for _ in range(WARM):
            call()
        times = []
        for n in (min(calls, 20), *[calls] * RUNS):
            wait()
            start = time.perf_counter()
            for _ in range(n):
                call()
            times.append((time.perf_counter() - start) / n)
        wait()
        return min(times[1:]), call


def a_kernel(side: str, device: str, calls: int) -> float:
    """Seconds of the host a kernel (without a GPU: a link), from chains of two lengths."""
    times, kernels = [], []
    for links in CHAIN:
        took, call = host_time(Program(chain(links), ((1 << 20,),)), side, device, min(calls, 8))
        times.append(took)
        kernels.append(launched(call) if device == "cuda" else links)
    return (times[1] - times[0]) / (kernels[1] - kernels[0])


def launched(call: Callable) -> int:
    """How many kernels, copies and sets a call runs on the device."""
    for _ in range(3):              # a profiler's first session may show nothing
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        found = sum(span(e) is not None for e in profiler.events())
        if found:
            return found
    raise RuntimeError("the profiler shows nothing of what runs on the device")


def profile(call: Callable, calls: int) -> None:
    """Prints where the host's time goes."""
    with cProfile.Profile() as found:
        for _ in range(calls):
            call()
    pstats.Stats(found, stream=sys.stdout).sort_stats("tottime").print_stats(16)


def arguments(argv=None) -> argparse.Namespace:
    several = lambda text: tuple(t for t in text.split(",") if t)
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--programs", nargs="+", choices=(*PROGRAMS, "chain"), default=[*PROGRAMS, "chain"])
    p.add_argument("--sides", type=several, default=SIDES)
    p.add_argument("--calls", type=int, default=300)
    p.add_argument("--device", default="cuda", help="cpu: to try the command")
    p.add_argument("--profile", action="store_true")
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    for name in args.programs:
        for side in args.sides:
            if name == "chain":
                print(f"{name:12} {side:10} {a_kernel(side, args.device, args.calls) * 1e6:8.2f} us a kernel", flush=True)
                continue
            took, call = host_time(PROGRAMS[name], side, args.device, args.calls)
            print(f"{name:12} {side:10} {took * 1e6:8.2f} us a call", flush=True)
            if args.profile and side.startswith("tokamak"):
                profile(call, args.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
