"""Contractions: what the price of `tokamak.fuse.products` predicts beside what was measured, and what its choices lose.

    python -m benchmarks.gpu_choice [--rows N ...] [--widths N ...] [--behind NAME ...] [--dtype bf16] [--seed N] [--budget SECONDS]

Sizes are drawn at random, from rows and widths that the price was not fitted on unless others are given. A line a size: predicted and measured
microseconds, by one kernel (k) and by the vendor with what runs behind (v), what was chosen, and what that loses against the faster of the two.
"""
from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import tokamak
from tokamak.fuse.contraction import contractions
from tokamak.fuse.cost import estimates
from tokamak.fuse.products import Choice, choices, prices
from tokamak.ir.dtype import BF16, F32, DType
from tokamak.target import target
from tokamak.tools.record import recording

from .gpu_cases import case
from .gpu_measure import Timer
from .gpu_sides import multiplying

ROWS = (256, 512, 768, 1536, 3072, 6144)
WIDTHS = (768, 1536, 2048, 2560, 3584, 5120, 8192, 12288)
BEHIND = ("bias_gelu", "scale", "res", "silu_gate")


@dataclass(frozen=True)
class Line:
    """Seconds by way ('kernels', 'vendor'), predicted and measured; the way that was `chosen`."""
    name: str
    predicted: dict[str, float]
    measured: dict[str, float]
    chosen: str

    @property
    def loss(self) -> float:
        """The share by which the choice is slower than the other one would have been."""
        return self.measured[self.chosen] / min(self.measured.values()) - 1

    def __str__(self) -> str:
        both = lambda t: f"k {1e6 * t['kernels']:.0f} v {1e6 * t['vendor']:.0f}"
        return f"{self.name}: predicted {both(self.predicted)}, measured {both(self.measured)}, {self.chosen}, loses {self.loss:.1%}"


def names(rows, widths, behind, dtype: str, seed: int) -> list[str]:
    """Every case of these, in an order that `seed` gives."""
    found = [f"linear_{b}_{dtype}_{m}x{k}x{n}" for b, m, k, n in itertools.product(behind, rows, widths, widths)]
    random.Random(seed).shuffle(found)
    return found


def price(record, kind: DType) -> Choice | None:
    """What the price of products of a type says of the one product, or pair of them, of a compiled graph."""
    graph, machine = record.values["inline"], target("cuda")
    found = choices(prices(machine, kind), machine.threads, graph, contractions(graph), {}, estimates(graph, machine))
    return found[0] if len(found) == 1 else None


def way(fn: Callable, inputs, how: str):
    """(the compiled function, the record of its graph)."""
    torch._dynamo.reset()
    with recording() as recorder:
        made = tokamak.compile(fn, dynamic=False, contractions=how)
        made(*inputs)
    return made, recorder.graphs[0]


def line(name: str, timer: Timer) -> Line | None:
    """The figures of one case; None where nothing is to be chosen."""
    c = case(name)
    inputs = c.inputs("cuda")
    ways = {how: way(c.fn, inputs, how) for how in ("kernels", "vendor")}
    _, record = way(c.fn, inputs, "")
    said = price(record, F32 if c.tf32 else BF16)
    if said is None:
        return None
    measured = {how: timer(lambda: made(*inputs)).device for how, (made, _) in ways.items()}
    chosen = "kernels" if not contractions(record.values["contract"]) else "vendor"
    return Line(name, {"kernels": said.kernel, "vendor": said.vendor + said.passed}, measured, chosen)


def summary(lines: list[Line]) -> str:
    """Mean and worst loss, and how far predictions are off."""
    if not lines:
        return "nothing was measured"
    off = [abs(math.log(x.predicted[how] / x.measured[how])) for x in lines for how in x.measured]
    gain = math.exp(sum(math.log(x.measured["vendor"] / x.measured[x.chosen]) for x in lines) / len(lines))
    best = math.exp(sum(math.log(x.measured["vendor"] / min(x.measured.values())) for x in lines) / len(lines))
    loss = sum(x.loss for x in lines) / len(lines)
    return (f"{len(lines)} sizes: choices lose {loss:.2%}, at most {max(x.loss for x in lines):.1%}; "
            f"predictions are off by {sum(off) / len(off):.1%}; "
            f"{gain:.3f} of the vendor's speed, {best:.3f} by the best choices")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_choice", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", nargs="+", type=int, default=ROWS)
    p.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    p.add_argument("--behind", nargs="+", default=BEHIND)
    p.add_argument("--dtype", default="bf16")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--budget", type=float, default=60.0)
    a = p.parse_args(argv)
    timer, end, lines = Timer(calls=5, warm=1), time.monotonic() + a.budget, []
    for name in names(a.rows, a.widths, a.behind, a.dtype, a.seed):
        if time.monotonic() > end:
            break
        with multiplying(case(name)):
            found = line(name, timer)
        if found is not None:
            lines.append(found)
            print(found, flush=True)
    print(summary(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
