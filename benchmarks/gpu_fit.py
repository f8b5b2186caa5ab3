"""Factors of `tokamak.runtime.gpu_estimate`, fitted to what sweeps have measured, and what schedules picked by them gain.

    python -m benchmarks.gpu_fit FILE ...

FILE: what `benchmarks.gpu_sweep --json` keeps. Printed are the factors as they are and as fitted to all kernels, how far off the estimates are, and
the gain of taking each kernel's schedule that has GAIN times less than the heuristic's; then the same for either half of the kernels, by factors
fitted on the other. Needs no GPU.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokamak.codegen import quicker
from tokamak.runtime.gpu_estimate import FACTORS

from .gpu_sweep import CYCLES, picked, said

TURNS = 100             # of the fit
SMALL = 1e-3            # errors below which all count the same
LEAST = 1e-3            # of a time that an estimate may be


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
    a, y, w = np.array(lines), np.array(times), np.array(weights)
    factors = _squares(a / y[:, None], np.sqrt(w))
    for _ in range(TURNS):              # squares, each by its last error: these become the errors themselves
        made = np.maximum(a @ factors, LEAST * y)
        error = np.abs(np.log(made / y)).clip(SMALL) / np.square(made / y - 1).clip(SMALL ** 2)
        factors = _squares(a / y[:, None], np.sqrt(w * error))
    return tuple(map(float, factors))


def _squares(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What times `a` comes nearest to 1, weighed by `w`. What would be negative is left out, the most negative first."""
    used = list(range(a.shape[1]))
    while True:
        scale = np.abs(a[:, used]).max(0) + 1e-300
        found = np.linalg.lstsq(a[:, used] / scale * w[:, None], w, rcond=None)[0]
        if found.min(initial=0.0) >= 0:
            break
        used.pop(int(found.argmin()))
    out = np.zeros(a.shape[1])
    out[used] = found / scale
    return out


def off(rows: Sequence[dict], factors: Sequence[float]) -> float:
    """How far the estimates of the heuristic's schedules are off, in the mean of the logarithms."""
    firsts = [row["tried"][0] for row in rows if row["tried"][0][3]]
    return sum(abs(math.log(said(terms, factors) / us)) for _, us, _, terms in firsts) / max(1, len(firsts))


def gained(rows: Sequence[dict], factors: Sequence[float]) -> str:
    gains = picked(rows, quicker.GAIN, factors)
    mean = math.exp(sum(map(math.log, gains)) / len(rows))
    best = math.exp(sum(math.log(row["tried"][0][1] / min(t[1] for t in row["tried"])) for row in rows) / len(rows))
    slower = sum(g < 0.97 for g in gains)
    picks = f"{len(gains)} picks ({slower} slower by 3%, the worst {min(gains, default=1):.2f})"
    return f"{100 * off(rows, factors):.1f}% off, {picks}: all {mean:.3f} times as fast, of {best:.3f}"


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="FILE")
    rows = [row for f in p.parse_args(argv).files for row in json.loads(Path(f).read_text())]
    print(f"{len(rows)} kernels, {sum(len(row['tried']) for row in rows)} schedules; factors: launch, bytes, alone, whole, issued, stack")
    show = lambda name, factors, of: print(f"{name}  {' '.join(f'{x:.4g}' for x in factors)}  {gained(of, factors)}")
    show("as they are ", FACTORS, rows)
    show("fitted      ", fitted(rows), rows)
    if len(rows) > 1:
        show("on the one half, of the other", fitted(rows[::2]), rows[1::2])
        show("on the other, of the one     ", fitted(rows[1::2]), rows[::2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
