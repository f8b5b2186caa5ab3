"""Bar charts as SVG, drawn by the pages of this folder."""
from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "plots"
ROW, LEFT, WIDE = 26, 210, 420           # pixels: height of a bar with its gap, room for names, length of the longest bar
COLOURS = ("#9aa5b1", "#2f6fde", "#d9822b")


def bars(name: str, title: str, unit: str, values: Mapping[str, float], limit: float | None = None) -> None:
    """Draws plots/NAME.svg: a bar for each of `values` (eager's in another colour), with its number in `unit`, and a line at `limit`, what no way of
    doing it can be below."""
    most = max((*values.values(), limit or 0.0)) or 1.0
    height = 44 + ROW * len(values) + (18 if limit is not None else 0)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDE + 130}" height="{height}" font-family="sans-serif" font-size="13">',
             '<rect width="100%" height="100%" fill="white"/>', text(10, 22, f"{title} ({unit})", "bold")]
    for i, (label, value) in enumerate(values.items()):
        top, length, colour = 36 + i * ROW, max(1.0, WIDE * value / most), COLOURS[0 if "eager" in label else 1]
        parts += [text(10, top + 15, label), f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{ROW - 7}" fill="{colour}"/>',
                  text(LEFT + length + 6, top + 15, f"{value:.3g}", "number")]
    if limit is not None:
        at, bottom = LEFT + WIDE * limit / most, 36 + ROW * len(values)
        parts += [f'<line x1="{at:.1f}" x2="{at:.1f}" y1="32" y2="{bottom}" stroke="{COLOURS[2]}" stroke-width="2"/>',
                  text(LEFT, bottom + 12, f"line: the fewest possible, {limit:.3g}", "number")]
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text("\n".join((*parts, "</svg>", "")))


def text(x: float, y: float, words: str, kind: str = "") -> str:
    weight = ' font-weight="bold"' if kind == "bold" else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{weight} class="{kind or "name"}">{escape(words)}</text>'
