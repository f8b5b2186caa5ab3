"""Contractions of few rows: the prices of `tokamak.fuse.price` beside what was measured, fitted on one half of the cases and scored on the other.

    python -m benchmarks.gpu --grid gemm --dtypes bf16 f16 tf32 --rows 1:64 --sides tokamak,kernels,vendor --workers 15 --quick --json FILE
    python -m benchmarks.gpu_few FILE

The second needs no GPU. Cases are parted by chance; each half is scored by prices that were fitted on the other: what the choices lose against the
faster of both ways, and how far the prices are off. The same of the prices as they stand.
"""
from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.capture.registry import ACTIVATED, ADDED
from tokamak.fuse import price
from tokamak.fuse.contract import possible
from tokamak.fuse.cost import Hints, estimates
from tokamak.fuse.price import LEAST, RATES, RATES_TF32, Rates, Site
from tokamak.ir.graph import Graph
from tokamak.options import Options
from tokamak.target import Target
from tokamak.trace import Stopped

from .gpu_case import Case
from .gpu_cases import case
from .gpu_run import Results
from .gpu_sides import WAYS, multiplying

H200 = Target("cuda", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), fast=True, model="NVIDIA H200", cluster=8)
ROWS = 64               # of a case at most
STEPS = (0.1, 0.04, 0.015)      # by which a rate is changed at most, at first and at last
FITTED = ("vendor_rows", "few_rows", "one_row", "wide", "more_rows", "few_tiles", "vendor_more", "more", "narrow_more")


@dataclass(frozen=True)
class Known:
    """A case: its contractions and the seconds of both ways."""
    name: str
    site: Site
    hints: Hints
    measured: dict[str, float]

    @property
    def tf32(self) -> bool:
        return case(self.name).tf32

    def predicted(self, rates: Rates) -> dict[str, float]:
        ours, vendor = price.few(self.site, {n: replace(rates, processors=H200.threads) for n in self.site.found}, self.hints)
        return {"kernels": ours, "vendor": vendor}

    def loss(self, rates: Rates) -> float:
        """The share by which the way that these rates choose is slower than the other one."""
        said = self.predicted(rates)
        return self.measured["kernels" if said["kernels"] < LEAST * said["vendor"] else "vendor"] / min(self.measured.values()) - 1

    def off(self, rates: Rates) -> float:
        said = self.predicted(rates)
        return sum(abs(math.log(said[w] / self.measured[w])) for w in WAYS) / len(WAYS)


def inlined(one: Case) -> Graph:
    """The graph of a case as the stage `contract` gets it; nothing runs."""
    seen: list[Graph] = []

    def keep(graph, inputs, kind):
        def stop(stage, value):
            if stage == "inline":
                seen.append(value)
                raise Stopped
            return value
        try:
            compile_graph(graph, inputs, Options(target="interpret"), stop, kind)
        except Stopped:
            pass
        return aot.eager(graph)
    torch._dynamo.reset()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = [torch.empty(s.shape, dtype=s.dtype) for s in one.specs]
        torch.compile(one.fn, backend=lambda gm, inputs: aot.autograd(gm, inputs, keep), dynamic=False)(*tensors)
    return seen[0]


def known(name: str, measured: Mapping[str, float]) -> Known | None:
    """None where nothing is to be chosen by these prices."""
    one = case(name)
    with multiplying(one):
        machine = replace(H200, tf32=one.tf32)
        site, _ = possible(inlined(one), machine, ACTIVATED, ADDED)
    hints = estimates(site.graph, machine)
    few = site.found and all(min(c.sizes(hints)[1:3]) <= ROWS and not c.batch for c in site.found.values())
    return Known(name, site, hints, dict(measured)) if few else None


def fitted(cases: Sequence[Known], rates: Rates) -> Rates:
    """Rates near those given whose prices are off least: each by itself a little up or down, as long as that helps."""
    off = lambda r: sum(x.off(r) for x in cases)
    best = off(rates)
    for step in STEPS:
        better = True
        while better:
            better = False
            for made in _near(rates, step):
                if (found := off(made)) < best * (1 - 1e-4):
                    rates, best, better = made, found, True
    return rates


def _near(rates: Rates, step: float):
    for name in FITTED:
        for factor in (1 + step, 1 / (1 + step)):
            yield from (replace(rates, **{name: value}) for value in _scaled(getattr(rates, name), factor))


def _scaled(value, factor: float) -> list:
    """A number, or tuples of such, each of them by itself times a factor."""
    if not isinstance(value, tuple):
        return [value * factor]
    return [tuple(made if i == n else x for n, x in enumerate(value)) for i, part in enumerate(value) for made in _scaled(part, factor)]


def score(found: Sequence[tuple[Known, Rates]]) -> str:
    """What the choices of prices lose on cases, and how far these are off."""
    losses = sorted(((x.loss(r), x.name) for x, r in found), reverse=True)
    worst = ", ".join(f"{n} {v:.1%}" for v, n in losses[:4])
    off = sum(x.off(r) for x, r in found) / len(found)
    return f"{len(found)} cases: choices lose {sum(v for v, _ in losses) / len(found):.2%}, most {worst}; prices are off by {off:.1%}"


def report(cases: Sequence[Known], seed: int = 0) -> str:
    """Both scores, for 16-bit types and for TF32."""
    out = []
    for title, wide, table in (("16 bits", False, RATES), ("TF32", True, RATES_TF32)):
        mine = [x for x in cases if x.tf32 == wide]
        if len(mine) < 2:
            continue
        rates = table[H200.arch[:2]]
        random.Random(seed).shuffle(mine)
        halves = mine[::2], mine[1::2]
        held_out = [(x, r) for half, other in (halves, halves[::-1]) for r in (fitted(half, rates),) for x in other]
        out += [f"{title}, fitted on the other half: {score(held_out)}", f"{title}, as they stand: {score([(x, rates) for x in mine])}"]
    return "\n".join(out)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_few", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args(argv)
    rows = Results.open(a.file).rows
    times = {n: {w: r[w]["device"] for w in WAYS} for n, r in rows.items() if all(r.get(w, {}).get("right") for w in WAYS)}
    cases = [x for n, t in times.items() if case(n).sizes[0] <= ROWS and (x := known(n, t)) is not None]
    print(report(cases, a.seed) or "nothing was measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
