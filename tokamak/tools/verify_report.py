"""A Verification in a terminal."""
from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from .report import WIDTH, place, places, plural
from .verify import Verification


def text(v: Verification) -> str:
    """The report without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(report(v))
    return console.file.getvalue()


def report(v: Verification) -> Group:
    return Group(*summary(v), *whole(v), *kernel_table(v), *first(v), *(Text(f"not compared: {note}", "yellow") for note in v.notes))


def summary(v: Verification) -> Iterator[Text]:
    wrong = [w for w in v.whole if w.right is False]
    bad = [k for k in v.kernels if k.wrong]
    yield Text("right" if v.right else "WRONG", "bold green" if v.right else "bold red")
    if v.whole:
        unsaid = sum(w.right is None for w in v.whole)
        yield Text(f"whole function: {plural(len(v.whole), 'result')}, {len(wrong)} further from float64 than eager allows"
                   + (f", {unsaid} that random numbers forbid to compare" if unsaid else ""))
    yield Text(f"kernels: {len(v.kernels)}, {len(bad)} outside their policy")


def whole(v: Verification) -> Iterator:
    if not v.whole:
        return
    table = Table("whole function", "from eager", "from float64", "eager from float64", "", box=None, pad_edge=False)
    for w in v.whole:
        table.add_row(w.name, number(w.eager), number(w.exact), number(w.eager_exact), {True: "", False: "WRONG", None: "random"}[w.right])
    yield from (Text(""), table)


def kernel_table(v: Verification) -> Iterator:
    if not v.kernels:
        return
    whole_names = (Column(head, overflow="fold") for head in ("kernel, on the values that it had", "result"))
    table = Table(*whole_names, "from float64", "from eager", "at", "policy", box=None, pad_edge=False)
    for k in v.kernels:
        for n, value in enumerate(k.values):
            about = "" if n else "  ".join(filter(None, (k.name, k.module)))
            eager, at = "random" if value.random else number(value.eager), place(value.line) or places(k.sources)
            table.add_row(about, value.name, number(value.exact), eager, at, value.wrong or "within")
    yield from (Text(""), table)
    if any(value.eager is None and not value.random for k in v.kernels for value in k.values):
        yield Text("without a figure from eager: no operation of its gives that value by itself", "dim")


def first(v: Verification) -> Iterator[Text]:
    k = v.first
    if k is not None:
        yield Text(f"\nthe first kernel outside its policy: {k.name} of {k.graph}: {k.wrong}", "bold red")
        yield Text(k.text)


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}" if x else "0"
