"""Factors of `tokamak.runtime.gpu_estimate`, fitted to what sweeps have measured, and what schedules picked by them gain.

    python -m benchmarks.gpu_fit FILE ...

FILE: what `benchmarks.gpu_sweep --json` keeps. Printed are the factors as they are and as fitted to all kernels, how far off the estimates are, and
the gain of taking each kernel's schedule that has so much less than the heuristic's as `tokamak.codegen.quicker` asks; then the same for either half
of the kernels, by factors fitted on the other. Needs no GPU.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tokamak.runtime.gpu_estimate import FACTORS

from .gpu_sweep import CYCLES, picked, said

NAMES = "launch", "bytes", "way", "issued", "stack", "shared", "lines", "programs", "beside", "rounds", "copies"
TURNS = 600             # of the fit
STEP = 0.05
LEAST = 1.0             # cycles of either part


def fitted(rows: Sequence[dict]) -> tuple[float, ...]:
    """Factors, none below 0, for which the logarithms of errors are least: of each kernel all schedules together count once, and each by how near it
    is to the quickest."""
    lines, times, weights = [], [], []
    for row in rows:
        known = [(us, terms) for _, us, _, terms in row["tried"] if terms]
        least = min((us for us, _ in known), default=0.0)
        lines += [terms for _, terms in known]
        times += [us * CYCLES for us, _ in known]
        weights += [least / us / len(known) for us, _ in known]
    of = torch.tensor(lines, dtype=torch.float64).T
    took, weights = torch.tensor(times, dtype=torch.float64).log(), torch.tensor(weights, dtype=torch.float64)
    logs = torch.tensor(FACTORS, dtype=torch.float64).log().requires_grad_()
    steps = torch.optim.Adam([logs], lr=STEP)
    for n in range(TURNS):
        steps.param_groups[0]["lr"] = STEP * (1 - n / TURNS)
        steps.zero_grad()
        launch, memory, *work, beside, rounds, copies = (factor * term for factor, term in zip(logs.exp(), of))
        hidden = 1 + beside + rounds + copies
        both = torch.logaddexp(hidden * memory.clamp_min(LEAST).log(), hidden * sum(work).clamp_min(LEAST).log()) / hidden
        made = launch + both.exp()
        ((made.log() - took).abs() @ weights).backward()
        steps.step()
    return tuple(map(float, logs.detach().exp()))


def off(rows: Sequence[dict], factors: Sequence[float]) -> float:
    """How far the estimates of the heuristic's schedules are off, in the mean of the logarithms."""
    firsts = [row["tried"][0] for row in rows if row["tried"][0][3]]
    return sum(abs(math.log(said(terms, factors) / us)) for _, us, _, terms in firsts) / max(1, len(firsts))


def gained(rows: Sequence[dict], factors: Sequence[float]) -> str:
    gains = picked(rows, factors=factors)
    mean = math.exp(sum(map(math.log, gains)) / len(rows))
    best = math.exp(sum(math.log(row["tried"][0][1] / min(t[1] for t in row["tried"])) for row in rows) / len(rows))
    slower = sum(g < 0.97 for g in gains)
    picks = f"{len(gains)} picks ({slower} slower by 3%, the worst {min(gains, default=1):.2f})"
    return f"{100 * off(rows, factors):.1f}% off, {picks}: all {mean:.3f} times as fast, of {best:.3f}"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="FILE")
    rows = [row for f in p.parse_args(argv).files for row in json.loads(Path(f).read_text())]
    print(f"{len(rows)} kernels, {sum(len(row['tried']) for row in rows)} schedules; factors: {', '.join(NAMES)}")
    show = lambda name, factors, of: print(f"{name}  {' '.join(f'{x:.4g}' for x in factors)}  {gained(of, factors)}")
    show("as they are ", FACTORS, rows)
    show("fitted      ", fitted(rows), rows)
    if len(rows) > 1:
        show("on the one half, of the other", fitted(rows[::2]), rows[1::2])
        show("on the other, of the one     ", fitted(rows[1::2]), rows[::2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
