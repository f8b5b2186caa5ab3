"""`tokamak diff a.json b.json`: what changed from one profile to another.

Kernels are matched by what they compute and not by their names, in three passes, each over what the one before left:

    same        the graph that the kernel computes, with its types and sizes, without any name; of a call of torch its operator and the types
    operations  the same operations of eager's, reading and writing as many values: other sizes or types
    regrouped   the rest, joined where kernels of both sides compute operations of the same lines: what was cut otherwise

Equal kernels of a phase count as one row, with all their calls. A row is faster or slower where its time changed by more than NOISE of it and by more
than LEAST; times of two runs differ by what else the machine did.
"""
from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..errors import OptionError
from .names import size_text
from .notebook import terminal_html
from .profile import compared, FORMAT, METRICS, spread, UNSTEADY
from .profile_report import took

NOISE, LEAST = 0.10, 2e-6           # of a row's time; seconds
SHOWN, WIDTH = 30, 150
SIZES = {"bytes", "fewest", "peak_bytes", "predicted_bytes"}


@dataclass(frozen=True)
class Kind:
    """Kernels of a phase that compute the same: `calls` of them a step, their seconds, bytes and FLOPs together. `operations`: of eager's, with
    their lines; `structure`: what stands for what they compute."""
    name: str
    phase: str
    module: str
    structure: str
    operations: tuple[tuple[str, str], ...]
    values: int
    calls: int
    seconds: float
    bytes: int
    flops: int
    schedule: str
    torch: bool


@dataclass(frozen=True)
class Change:
    """What became of kernels of the first profile in the second. `what`: slower, faster, same, new, gone or regrouped; `matched`: same or
    operations."""
    what: str
    matched: str
    before: tuple[Kind, ...]
    after: tuple[Kind, ...]

    @property
    def seconds(self) -> float:
        """By how much longer it takes."""
        return _sum(self.after, "seconds") - _sum(self.before, "seconds")

    @property
    def bytes(self) -> int:
        return _sum(self.after, "bytes") - _sum(self.before, "bytes")


@dataclass(frozen=True)
class Diff:
    """From the profile `names[0]` to `names[1]`: `totals` by metric, and what changed, that which costs most first."""
    names: tuple[str, str]
    totals: dict[str, tuple[float, float]]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    def failures(self, conditions: str) -> list[str]:
        """Those of `conditions` that hold: "step_ms>5%" (grew by more than that), "kernels>0" (by more than so many). Raises OptionError."""
        found = []
        for text in filter(str.strip, conditions.split(",")):
            name, compare, limit, relative = condition(text)
            before, after = self.totals[name]
            grown = after - before if not relative else (after / before - 1) * 100 if before else float("inf") if after else 0.0
            if compare(grown, limit):
                found.append(f"{text.strip()}: {name} went from {before:.6g} to {after:.6g}")
        return found

    def to_json(self, indent: int | None = None) -> str:
        changes = [{**asdict(c), "seconds": c.seconds, "bytes": c.bytes} for c in self.changes]
        return json.dumps({**asdict(self), "changes": changes}, indent=indent)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
        console.print(report(self))
        return console.file.getvalue()

    def __rich__(self):
        return report(self)

    def _repr_html_(self) -> str:
        return terminal_html(self)


def condition(text: str) -> tuple[str, Callable, float, bool]:
    """(metric, comparison, number, in percent?) of 'step_ms>5%'. Raises OptionError."""
    name, compare, found = compared(text, r"-?[\d.]+\s*%?", "how much it grew by, as a number or in percent")
    return name, compare, float(found.rstrip("% ")), found.endswith("%")


def load(path: str) -> dict[str, Any]:
    """A profile that `--json` or `Profile.to_json` wrote. Raises OptionError for anything else."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as why:
        raise OptionError(f"'{path}' cannot be read as a profile ({why}): `tokamak profile --json FILE SCRIPT` writes one") from why
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OptionError(f"'{path}' is no profile of this version of tokamak: `tokamak profile --json {path} SCRIPT` writes one")
    return found


# -- comparing -----------------------------------------------------------------------------------------------------------
def diff(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str] = ("before", "after")) -> Diff:
    """What changed from profile `a` to profile `b`, as `Profile.data` gives them."""
    totals = {m: (a["metrics"][m], b["metrics"][m]) for m in METRICS}
    mine, theirs, found = kinds(a), kinds(b), []
    for matched, key in (("same", lambda k: (k.phase, k.structure)), ("operations", lambda k: (k.phase, k.torch, k.operations, k.values))):
        first, second = _by(mine, key), _by(theirs, key)
        for at in [k for k in first if k in second]:
            found.append(_matched(matched, first[at], second[at]))
        mine, theirs = ([k for k in side if key(k) not in first or key(k) not in second] for side in (mine, theirs))
    found += regrouped(mine, theirs)
    order = {"same": 1}
    return Diff(names, totals, tuple(sorted(found, key=lambda c: (order.get(c.what, 0), -abs(c.seconds)))), tuple(_notes(a, b)))


def kinds(profile: Mapping[str, Any]) -> list[Kind]:
    """The kernels and calls of a profile that were timed, equal ones together."""
    found: dict[tuple, list[tuple[Mapping, Mapping]]] = {}
    for d in profile["drawings"]:
        for n in d["nodes"]:
            if n["seconds"] is not None:
                found.setdefault((d["phase"], n["structure"]), []).append((d, n))
    out = []
    for (phase, form), all in found.items():
        d, n = all[0]
        operations = tuple(sorted((o["op"], _line(profile, o["source"])) for o in (d["operations"][i] for i in n["operations"])))
        total = lambda name: sum(x[name] for _, x in all)
        out.append(Kind(n["name"], phase, n["module"], form, operations, len(n["reads"]) + len(n["writes"]), len(all), total("seconds"),
                        total("bytes"), total("flops"), n["schedule"], bool(n["reason"])))
    return out


def _line(profile: Mapping, source: int) -> str:
    return profile["sources"][source]["code"] if source >= 0 else ""


def _by(found: Iterable[Kind], key: Callable) -> dict[Any, list[Kind]]:
    out: dict[Any, list[Kind]] = {}
    for k in found:
        out.setdefault(key(k), []).append(k)
    return out


def _matched(how: str, before: Sequence[Kind], after: Sequence[Kind]) -> Change:
    was, now = _sum(before, "seconds"), _sum(after, "seconds")
    changed = abs(now - was) > max(NOISE * was, LEAST)
    return Change(("slower" if now > was else "faster") if changed else "same", how, tuple(before), tuple(after))


def regrouped(before: Sequence[Kind], after: Sequence[Kind]) -> list[Change]:
    """The kernels that were matched with none: new and gone, but joined where both sides compute operations of the same lines."""
    sides = [(0, k) for k in before] + [(1, k) for k in after]
    group = list(range(len(sides)))

    def root(i: int) -> int:
        while group[i] != i:
            i = group[i]
        return i
    homes: dict[tuple, int] = {}
    for i, (_, k) in enumerate(sides):
        for operation in k.operations:
            at = homes.setdefault((k.phase, *operation), i)
            group[root(i)] = root(at)
    joined: dict[int, tuple[list[Kind], list[Kind]]] = {}
    for i, (side, k) in enumerate(sides):
        joined.setdefault(root(i), ([], []))[side].append(k)
    return [Change("regrouped" if a and b else "gone" if a else "new", "", tuple(a), tuple(b)) for a, b in joined.values()]


def _sum(found: Iterable[Kind], name: str):
    return sum(getattr(k, name) for k in found)


def _notes(a: Mapping, b: Mapping) -> Iterable[str]:
    if a["peaks"]["device"] != b["peaks"]["device"] or a["device"] != b["device"]:
        yield f"measured on different devices: {a['peaks']['device']} ({a['device']}) and {b['peaks']['device']} ({b['device']})"
    for name in ("tokamak", "torch", "threads"):
        if a["about"].get(name) != b["about"].get(name):
            yield f"{name}: {a['about'].get(name)} and {b['about'].get(name)}"
    widest = max(spread(p[s]["step"], p[s]["middle"]) for p in (a, b) for s in ("eager", "compiled"))
    if widest > UNSTEADY:
        yield f"half of the steps of one run lie {widest:.0%} of a step apart: the machine was busy, so times mean little"


# -- showing ---------------------------------------------------------------------------------------------------------------
STYLES = {"slower": "red", "faster": "green", "new": "yellow", "gone": "yellow", "regrouped": "cyan"}


def report(d: Diff) -> Group:
    parts: list = [Text(f"{d.names[0]} -> {d.names[1]}", "bold"), total_table(d)]
    counts = Counter(c.what for c in d.changes)
    parts.append(Text("\n" + (", ".join(f"{n} {what}" for what, n in counts.items()) or "no kernels") +
                      f"   (kernels that compute the same together; same: within {NOISE:.0%})", "bold"))
    changed = [c for c in d.changes if c.what != "same"]
    if changed:
        parts.append(change_table(changed[:SHOWN]))
    if len(changed) > SHOWN:
        parts.append(Text(f"... and {len(changed) - SHOWN} more"))
    return Group(*parts, *(Text(n, "yellow") for n in d.notes))


def total_table(d: Diff) -> Table:
    table = Table("", d.names[0], d.names[1], "", box=None, pad_edge=False)
    for name, (a, b) in d.totals.items():
        show = size_text if name in SIZES else lambda v: f"{v:.4g}"
        table.add_row(name, show(a), show(b), "" if a == b else f"{b / a - 1:+.1%}" if a else "new")
    return table


def change_table(changed: Sequence[Change]) -> Table:
    table = Table("what", "time", "was", "is", "bytes", "phase", "kernels", box=None, pad_edge=False)
    for c in changed:
        text = called(c.after if c.what != "gone" else c.before)
        if c.what == "regrouped":
            text = f"{called(c.before)}  ->  {text}"
        elif c.matched == "operations":
            text += "  (other sizes or types)"
        table.add_row(Text(c.what, STYLES.get(c.what, "")), f"{'+' if c.seconds >= 0 else '-'}{took(abs(c.seconds))}",
                      took(_sum(c.before, "seconds")) if c.before else "", took(_sum(c.after, "seconds")) if c.after else "",
                      f"{'+' if c.bytes > 0 else '-'}{size_text(abs(c.bytes))}" if c.bytes else "", (c.after or c.before)[0].phase, text)
    return table


def called(found: Iterable[Kind]) -> str:
    """Names of kernels, each with how often it runs."""
    times: Counter[str] = Counter()
    for k in found:
        times[k.name] += k.calls
    return ", ".join(name + (f" x{n}" if n > 1 else "") for name, n in times.items())
