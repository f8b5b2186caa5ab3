"""What was measured of grid "gemm", as text: tokamak's speed over that of eager and of Inductor, by type, by what stands behind the products and by
their rows; the worst cases; which contractions stayed with the vendor's library, and why.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from .gpu_cases import case
from .gpu_sides import AUTOTUNED
from .measure import geomean

START, END = "<!-- products: begin -->", "<!-- products: end -->"
OTHERS = {"inductor": ("Inductor", 0.97), "eager": ("eager", 0.97), AUTOTUNED: ("max-autotune", 0.92)}          # title, the least ratio asked for
WORST = 8

Rows = dict[str, dict[str, dict]]


def ratio(row: dict[str, dict], other: str) -> float | None:
    """The device time of another side over tokamak's; None where one failed, was wrong or did not run."""
    found = [row.get(s, {}) for s in (other, "tokamak")]
    return found[0]["device"] / found[1]["device"] if all(r.get("right") for r in found) else None


def dtype(name: str) -> str:
    return re.search(r"_(tf32|bf16|f\d\d)_", name)[1]


def rows_class(name: str) -> str:
    """Of how many rows: decoding, a few tiles, many."""
    rows = case(name).sizes[0]
    return "1 to 64" if rows <= 64 else "65 to 512" if rows <= 512 else "513 and more"


CUTS: tuple[tuple[str, Callable[[str], str]], ...] = (("type", dtype), ("behind", lambda n: case(n).family.removeprefix("linear_")),
                                                      ("rows", rows_class))


def lines(rows: Rows) -> list[tuple[str, ...]]:
    """(what, cases, then for each other side the geometric mean and the worst) of all, and of each part of each cut."""
    parts = [("all", list(rows))]
    for title, key in CUTS:
        for value in dict.fromkeys(map(key, rows)):
            parts.append((f"{title} {value}", [n for n in rows if key(n) == value]))
    return [(title, str(len(names)), *(_cell([r for n in names if (r := ratio(rows[n], s)) is not None]) for s in OTHERS)) for title, names in parts]


def _cell(found: list[float]) -> str:
    return f"{geomean(found):.3f} ({min(found):.2f})" if found else ""


def worst(rows: Rows, other: str) -> list[tuple[float, str]]:
    """The cases that lose most against a side, those that lose more than is asked first."""
    return sorted((r, n) for n, row in rows.items() if (r := ratio(row, other)) is not None)[:WORST]


def reasons(rows: Rows) -> dict[str, list[str]]:
    """Why contractions stayed with the vendor, without the sizes and times -> the cases."""
    found: dict[str, list[str]] = {}
    for n, row in rows.items():
        for text in dict.fromkeys(row.get("tokamak", {}).get("left", ())):
            found.setdefault(_plain(text), []).append(n)
    return found


def _plain(text: str) -> str:
    """A reason without its numbers."""
    return re.sub(r"\d+(\.\d+)? us", "x us", text.partition(": ")[2] or text)


def left(rows: Rows) -> Iterable[str]:
    """A line a reason: in how many cases, and one of them."""
    for why, names in sorted(reasons(rows).items(), key=lambda x: -len(x[1])):
        yield f"{why}: {len(names)} cases, as {names[0]}"


def compiling(rows: Rows) -> str:
    """What the first calls of each side took, in seconds, where max-autotune is among them: the processes of a run compile side by side, and their
    waiting for each other is left out."""
    sides = [s for s in (*OTHERS, "tokamak") if s != "eager"]
    found = {s: [r[s]["compiled"] for r in rows.values() if AUTOTUNED in r and r.get(s, {}).get("right") and "compiled" in r[s]] for s in sides}
    if not found[AUTOTUNED]:
        return ""
    return "first calls: " + "; ".join(f"{OTHERS[s][0] if s in OTHERS else s} {sum(t) / len(t):.1f} s on average, {max(t):.0f} at most"
                                       for s, t in found.items() if t)


def failed(rows: Rows) -> list[str]:
    return [f"{n}/{s}" for n, row in rows.items() for s, r in row.items() if not r.get("right")]


def summary(rows: Rows) -> str:
    """For a terminal."""
    out = [f"{'':24}{'cases':>6}" + "".join(f"{'over ' + t:>20}" for t, _ in OTHERS.values())]
    out += [f"{x[0]:24}{x[1]:>6}" + "".join(f"{c:>20}" for c in x[2:]) for x in lines(rows)]
    for side, (title, least) in OTHERS.items():
        low = [f"{n} {r:.2f}" for r, n in worst(rows, side) if r < least]
        out += [f"under {least} of {title}: {', '.join(low)}"] if low else []
    out += [line] if (line := compiling(rows)) else []
    return "\n".join([*out, *(f"left to the vendor: {x}" for x in left(rows)),
                      *([f"wrong or failed: {', '.join(bad)}"] if (bad := failed(rows)) else [])])


def table(runs: list[dict], rows: Rows) -> str:
    """Markdown, from measured results alone. Raises ValueError when there are none."""
    if not rows:
        raise ValueError("no case of the grid was measured")
    run = runs[-1]
    out = [f"Machine: {run['device']}, torch {run['torch']}, Triton {run['triton']}. Device time of the others over tokamak's: geometric mean "
           "(worst). Command: `python -m benchmarks.gpu --grid gemm --dtypes bf16 f16 tf32 --json FILE --write`.", "",
           "| | cases | " + " | ".join(f"over {t}" for t, _ in OTHERS.values()) + " |", "|" + "---|" * (2 + len(OTHERS))]
    out += ["| " + " | ".join(x) + " |" for x in lines(rows)]
    out += ["", f"F{line[1:]}."] if (line := compiling(rows)) else []
    out += ["", "| slowest against Inductor | Inductor us | tokamak us | Inductor / tokamak | eager / tokamak | left to the vendor |",
            "|" + "---|" * 6]
    out += [_row(n, rows[n]) for _, n in worst(rows, "inductor")]
    out += ["", "Left to the vendor's library:", "", *(f"- {x}" for x in left(rows))]
    return "\n".join([*out, *(["", f"Wrong or failed: {', '.join(bad)}."] if (bad := failed(rows)) else [])])


def _row(name: str, row: dict[str, dict]) -> str:
    over = lambda s: f"{r:.2f}" if (r := ratio(row, s)) is not None else ""
    micro = lambda s: f"{1e6 * row[s]['device']:.1f}"
    vendor = "; ".join(row["tokamak"].get("left", ()))
    return f"| {name} | {micro('inductor')} | {micro('tokamak')} | {over('inductor')} | {over('eager')} | {vendor} |"
