"""How long a report takes that a profile writes: making the page, and opening it in a headless Chromium.

    python -m benchmarks.page [--kernels N] [--times N] [--screenshot FILE]

The profile is made up: kernels of two graphs, with edges, texts, lines and a timeline. Opening ends when the page's script has run and it was
painted; each time in a browser of its own, whose start does not count. Medians of several.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.tools import browser, samples
from tokamak.tools import html


def measured(kernels: int, times: int, screenshot: Path | None = None) -> tuple[float, float, int]:
    """Seconds until the page is made, and until it is open; its bytes."""
    data, made, opened = samples.profile(kernels), [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        for _ in range(times):
            start = time.perf_counter()
            path.write_text(html.page(data), encoding="utf-8")
            made.append(time.perf_counter() - start)
            with browser.Browser() as b:
                opened.append(b.open(path))
                if screenshot is not None:
                    b.screenshot(screenshot)
                if b.errors:
                    raise RuntimeError(b.errors[0])
        return statistics.median(made), statistics.median(opened), path.stat().st_size


def main(argv=None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kernels", type=int, default=5000)
    p.add_argument("--times", type=int, default=5)
    p.add_argument("--screenshot", type=Path, help="what is seen when it is open")
    args = p.parse_args(argv)
    if browser.found() is None:
        sys.exit(browser.MISSING)
    made, opened, size = measured(args.kernels, args.times, args.screenshot)
    print(f"{args.kernels:,} kernels: made in {made:.2f} s, {size / 1e6:.1f} MB, opened in {opened:.2f} s (medians of {args.times})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
