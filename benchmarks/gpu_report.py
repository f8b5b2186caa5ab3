"""What was measured, as text: a line a case, a summary by group beside its targets, and the tables of BENCHMARKS.md."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from .gpu_cases import NAMES, case
from .gpu_sides import SYMBOLIC
from .measure import geomean

SIDES = ("eager", "inductor", "tokamak")
TITLES = {"eager": "eager", "inductor": "Inductor", "tokamak": "tokamak"}
TARGETS = {"pointwise": (94, None), "pointwise-bwd": (80, None), "reduction": (84, 45), "norm": (80, 55), "norm-bwd": (70, None), "bert": (65, None),
           "loss": (78, None)}                      # percent of the limit: geometric mean of a group, worst case
SLOWER = 0.95                                       # no case may reach less of the best of the others
FEW = 64                                            # rows of a product that its weights bound
WEIGHTS = 64 << 20                                  # bytes of weights that hide what else a kernel takes
Rows = dict[str, dict[str, dict]]


def asked(name: str) -> tuple[str, float] | None:
    """What a contraction is asked for by itself: ("percent", of the limit) or ("inductor", times as fast as it); None where it is not."""
    one = case(name)
    if one.family in ("mlp_small", "swiglu_mlp") or one.family == "mlp" and one.sizes[0] > FEW:
        return "inductor", 2.5 if one.family == "mlp_small" else 1.05
    if one.family.startswith(("linear_int8", "linear_int4")):
        return "percent", 50
    if one.family == "linear_bias_relu" and one.sizes[0] <= FEW and not one.tf32:
        return "percent", 80 if max(s.bytes for s in one.specs) > WEIGHTS else 65
    return None


def percent(result: dict | None) -> float | None:
    """Percent of the limit by device time; None when the side failed, was wrong or did not run."""
    return result["percent"] if result and result.get("right") else None


def ratio(row: dict[str, dict]) -> float | None:
    """The best device time of eager and Inductor over tokamak's; None without both."""
    mine, others = percent(row.get("tokamak")), [p for s in ("eager", "inductor") if (p := percent(row.get(s))) is not None]
    return mine / max(others) if mine is not None and others else None


# -- terminal ----------------------------------------------------------------------------------------------------------------
def line(name: str, row: dict[str, dict]) -> str:
    """One case: limit, percent of it by side, then kernels, wall time, first call and error of the last side."""
    good = [r for r in row.values() if "device" in r]
    limit = f"{good[0]['limit'] * 1e6:.1f}us" if good else ""
    sides = [s for s in (*SIDES, SYMBOLIC) if s in row]
    parts = [f"{s[0]}{_mark(row[s])}" for s in sides]
    last = next((row[s] for s in reversed(sides) if "device" in row[s]), None)
    tail = f"k{last['kernels']} {_host(last)}{last['error']:.0e}" if last else ""
    failed = "".join(f"\n  {s}: {row[s]['failed'][:160]} {row[s].get('at', '')}" for s in sides if "device" not in row[s])
    return f"{name} {limit} {' '.join(parts)} {tail}{failed}"


def _host(result: dict) -> str:
    """Wall time and first call, where they were measured."""
    return f"w{result['wall'] * 1e6:.0f} c{result['first']:.1f}s " if "wall" in result else ""


def _mark(result: dict) -> str:
    if "device" not in result:
        return "ERR"
    return f"{result['percent']:.0f}" + ("" if result["right"] else "WRONG")


def symbolic(rows: Rows) -> str:
    """Device time with static sizes over that with symbolic ones, by case, and their geometric mean; what lost more than 5%."""
    both = {n: (percent(row.get("tokamak")), percent(row.get(SYMBOLIC))) for n, row in rows.items()}
    found = {n: s / t for n, (t, s) in both.items() if None not in (t, s)}
    out = [f"{n:40}{r:6.2f}" for n, r in found.items()]
    if found:
        out.append(f"static over symbolic: geomean {geomean(list(found.values())):.3f}, worst {min(found.values()):.2f}")
    lost = [n for n in rows if n not in found]
    low = [n for n, r in found.items() if r < SLOWER]
    return "\n".join([*out, *([f"slower than {SLOWER}: {', '.join(low)}"] if low else []),
                      *([f"wrong or failed: {', '.join(lost)}"] if lost else [])])


def summary(rows: Rows, sides: Sequence[str] = SIDES) -> str:
    """Geometric mean (worst) of the limit by group and side, the targets, and what needs a look."""
    sides = [s for s in sides if s in TITLES]
    out = [f"{'group':14}{'cases':>6}" + "".join(f"{TITLES[s]:>13}" for s in sides) + "  target"]
    groups: dict[str, list[str]] = {}
    for name in rows:
        groups.setdefault(case(name).group, []).append(name)
    for group, names in groups.items():
        cells = "".join(f"{_cell(_values(rows, names, s)):>13}" for s in sides)
        out.append(f"{group:14}{len(names):6}{cells}  {_verdict(group, _values(rows, names, 'tokamak'), len(names))}")
    out += _reached(rows)
    for title, found in (("slower than 0.95 of the best", _slower(rows)), ("wrong", _where(rows, lambda r: "device" in r and not r["right"])),
                         ("failed", _where(rows, lambda r: "device" not in r))):
        if found:
            out.append(f"{title} ({len(found)}): " + ", ".join(found))
    return "\n".join(out)


def _reached(rows: Rows) -> list[str]:
    """A line for each case that is `asked` for something and was measured."""
    out = []
    for name in rows:
        found, (what, least) = rows[name], asked(name) or ("", 0.0)
        if what == "percent" and (p := percent(found.get("tokamak"))) is not None:
            out.append(f"{name} {p:.0f}% of {least:.0f}: {'met' if p >= least else 'not met'}")
        elif what == "inductor" and (r := over_inductor(found)) is not None:
            out.append(f"{name} {r:.2f} times Inductor's of {least}: {'met' if r >= least else 'not met'}")
    return out


def over_inductor(row: dict[str, dict]) -> float | None:
    """How many times as fast as Inductor's tokamak's is, by device time; None without both."""
    mine, theirs = percent(row.get("tokamak")), percent(row.get("inductor"))
    return mine / theirs if mine is not None and theirs is not None else None


def _values(rows: Rows, names: Iterable[str], side: str) -> list[float]:
    return [p for n in names if (p := percent(rows[n].get(side))) is not None]


def _cell(values: list[float]) -> str:
    return f"{geomean(values):.0f} ({min(values):.0f})" if values else "-"


def _verdict(group: str, values: list[float], cases: int) -> str:
    """The target, and whether all cases together reach it."""
    if group not in TARGETS:
        return ""
    mean, least = TARGETS[group]
    text = f"{mean}" + (f" (least {least})" if least else "")
    if not values:
        return text
    met = len(values) == cases and geomean(values) >= mean and (least is None or min(values) >= least)
    return text + (": met" if met else ": not met")


def _slower(rows: Rows) -> list[str]:
    found = sorted((r, n) for n, row in rows.items() if (r := ratio(row)) is not None and r < SLOWER)
    return [f"{n} {r:.2f}" for r, n in found]


def _where(rows: Rows, true) -> list[str]:
    return [f"{n}/{s}" for n, row in rows.items() for s, r in row.items() if true(r)]


# -- Markdown ----------------------------------------------------------------------------------------------------------------
def table(runs: list[dict], rows: Rows) -> str:
    """The listed cases as Markdown, from measured results alone. Raises ValueError when there are none."""
    names = [n for n in NAMES if n in rows]
    if not names:
        raise ValueError("no listed case was measured")
    run = runs[-1]
    rates = f"copy {run['copy'] / 1e12:.2f} TB/s (read and written), bf16 8192-cubed product {run['matmul'] / 1e12:.0f} TFLOP/s"
    out = [f"Machine: {run['device']}, torch {run['torch']}, Triton {run['triton']}; {rates}. Command: `python -m benchmarks.gpu --write`.", "",
           "| group | cases | eager | Inductor | tokamak | target |", "|" + "---|" * 6]
    for group in dict.fromkeys(case(n).group for n in names):
        members = [n for n in names if case(n).group == group]
        cells = " | ".join(_cell(_values(rows, members, s)) for s in SIDES)
        out.append(f"| {group} | {len(members)} | {cells} | {_verdict(group, _values(rows, members, 'tokamak'), len(members))} |")
    out += ["", "| case | limit us | eager % | Inductor % | tokamak % | against the best | kernels | wall us Inductor | wall us tokamak "
            "| first call s Inductor | first call s tokamak | peak MB Inductor | peak MB tokamak | error tokamak |", "|" + "---|" * 14]
    return "\n".join(out + [_row(n, rows[n]) for n in names])


def _row(name: str, row: dict[str, dict]) -> str:
    limit = next((f"{r['limit'] * 1e6:.1f}" for r in row.values() if "limit" in r), "")
    share = ratio(row)
    cells = [name, limit, *(_mark(row[s]) if s in row else "" for s in SIDES), f"{share:.2f}" if share is not None else "",
             _figure(row, "tokamak", "kernels", "{:.0f}")]
    for key, form in (("wall", "{:.1f}"), ("first", "{:.2f}"), ("peak", "{:.0f}")):
        factor = {"wall": 1e6, "first": 1.0, "peak": 1e-6}[key]
        cells += [_figure(row, s, key, form, factor) for s in ("inductor", "tokamak")]
    return "| " + " | ".join([*cells, _figure(row, "tokamak", "error", "{:.1e}")]) + " |"


def _figure(row: dict[str, dict], side: str, key: str, form: str, factor: float = 1.0) -> str:
    found = row.get(side, {})
    return form.format(found[key] * factor) if "device" in found and key in found else ""          # --workers measures the device alone
