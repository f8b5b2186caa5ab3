"""A Staircase in a terminal."""
from __future__ import annotations

import io

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .names import size_text
from .optimize import Staircase
from .profile_report import took
from .report import WIDTH
from .verify_report import number


def text(s: Staircase) -> str:
    """The report without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(report(s))
    return console.file.getvalue()


def report(s: Staircase) -> Group:
    table = Table("rung", "step", "eager / this", "peak memory", "from float64", "", "why", box=None, pad_edge=False)
    for r in s.rungs:
        measured = (took(r.step), f"{r.speedup:.2f}", size_text(r.peak)) if r.step is not None else ("", "", "")
        table.add_row(r.name, *measured, number(r.error), "kept" if r.kept else "", r.why)
    code = s.code or "the function as it is"
    title = f"{took(s.best.step)} a step, {s.best.speedup:.2f} times as fast as eager, on {s.device}"
    return Group(Text(title, "bold"), table, Text(f"\n{s.stopped}"), *([Text(s.note, "yellow")] if s.note else []), Text(f"\n{code}", "bold"))
