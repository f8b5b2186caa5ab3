"""Percent of the limit against size, a panel a family and dtype: what a grid is for."""
from __future__ import annotations

from .gpu_case import MODES
from .gpu_cases import case
from .gpu_report import SIDES, TITLES, Rows, percent

SUFFIXES = {mode: suffix for suffix, mode in MODES.items()}
COLOURS = {"eager": "#999999", "inductor": "#d95f02", "tokamak": "#1b9e77"}


def series(rows: Rows) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """panel -> side -> (size, percent) in order. The size is the columns of a case of rows and columns, else the fewest bytes."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name, row in rows.items():
        one = case(name)
        panel = f"{one.family}{SUFFIXES[one.mode]} {str(one.dtype).removeprefix('torch.')}"
        size = one.sizes[1] if len(one.sizes) == 2 else one.bytes
        for side in SIDES:
            if (p := percent(row.get(side))) is not None:
                panels.setdefault(panel, {}).setdefault(side, []).append((size, p))
    return {panel: {s: sorted(v) for s, v in sides.items()} for panel, sides in panels.items()}


def plot(rows: Rows, path: str) -> str | None:
    """Draws the results into a PNG; a message instead when matplotlib is missing or nothing was measured."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    panels = series(rows)
    if not panels:
        return "no plot: nothing was measured"
    matplotlib.use("Agg")
    from matplotlib import pyplot
    wide = min(4, len(panels))
    high = -(-len(panels) // wide)
    figure, axes = pyplot.subplots(high, wide, figsize=(4.2 * wide, 3 * high), squeeze=False, sharey=True)
    for axis in axes.flat[len(panels):]:
        axis.set_visible(False)
    for axis, (title, sides) in zip(axes.flat, panels.items()):
        for side, points in sides.items():
            axis.plot([x for x, _ in points], [y for _, y in points], ".", color=COLOURS[side], label=TITLES[side], markersize=4, alpha=0.7)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 110)
        axis.axhline(100, color="black", linewidth=0.5)
        axis.set_title(title, fontsize=9)
    axes.flat[0].legend(fontsize=7)
    figure.supylabel("percent of the limit, device time", fontsize=9)
    figure.supxlabel("columns; bytes where a case has other sizes", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None
