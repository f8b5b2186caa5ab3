"""What the tools' results show of themselves in a notebook: tables in plain HTML, which take the notebook's colours and need no script."""
from __future__ import annotations

import html
import io
import os
from collections.abc import Iterable, Sequence

from rich.console import Console

from .explain import Explanation
from .limits import Row
from .names import count_text, size_text
from .profile import Profile
from .profile_report import bars, took
from .report import place, plural

ROWS = 15           # of a table: those that cost most
WIDTH = 140
LEFT = "text-align:left;padding:2px 14px 2px 0;vertical-align:top"
RIGHT = "text-align:right;padding:2px 14px 2px 0;vertical-align:top;white-space:nowrap;font-variant-numeric:tabular-nums"


def terminal_html(found) -> str:
    """The HTML of something that prints on a rich console, as it looks there."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    console.print(found)
    return console.export_html(inline_styles=True, code_format='<pre style="white-space:pre;overflow-x:auto;line-height:1.35">{code}</pre>')


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of texts; `numbers`: the columns that stand to the right."""
    style = lambda i: RIGHT if i in numbers else LEFT
    line = lambda tag, cells: "<tr>" + "".join(f'<{tag} style="{style(i)}">{html.escape(str(c))}</{tag}>' for i, c in enumerate(cells)) + "</tr>"
    return f'<table style="border-collapse:collapse">{line("th", heads)}{"".join(line("td", r) for r in rows)}</table>'


def section(title: str, body: str, more: int = 0) -> str:
    """Something that opens by a click."""
    rest = f"<div>... and {more:,} more</div>" if more > 0 else ""
    return f'<details style="margin-top:.5em"><summary style="cursor:pointer"><b>{html.escape(title)}</b></summary>{body}{rest}</details>'


def profile_html(p: Profile) -> str:
    gain = p.eager.step / p.compiled.step
    head = (f'<div style="font-size:1.25em"><b>{gain:.2f} times as fast as eager</b>: {took(p.eager.step)} &rarr; {took(p.compiled.step)}</div>'
            f"<div>bound by <b>{html.escape(p.bound)}</b>: {html.escape(p.why)}</div>"
            + "".join(f"<div>{html.escape(text)}</div>" for text in (p.next and f"next: {p.next}", p.step) if text))
    sides = table(("", "eager", "compiled", ""), [(b.name, b.eager, b.compiled, b.note) for b in bars(p)], (1, 2))
    heads = ("kernel", "wasted", "time", "calls", "% of limit", "class", "bytes", "phase", "where")
    rows = section(f"kernels and calls of torch by wasted time: {took(sum(r.wasted for r in p.rows))} of {took(sum(r.seconds for r in p.rows))}",
                   table(heads, map(_row, p.rows[:ROWS]), (1, 2, 3, 4, 6)), len(p.rows) - ROWS)
    found = [(place(x.source), x.source.code, took(x.seconds), x.count) for x in p.lines[:ROWS]]
    lines = section("your lines", table(("line", "", "time", "kernels"), found, (2, 3)), len(p.lines) - ROWS)
    advice = "".join(f"<div><b>{html.escape(a.what)}</b> {html.escape(a.place)}: {html.escape(a.mend)}</div>" for a in dict.fromkeys(p.advice))
    return f"<div>{head}{sides}{advice}{rows}{lines}</div>"


def _row(r: Row) -> tuple[str, ...]:
    where, _, code = r.source.partition("  ")
    return (r.name + (" (torch)" if r.opaque else ""), took(r.wasted), took(r.seconds), str(r.calls), f"{r.fraction:.0%}", r.kind,
            size_text(r.bytes), r.phase, "  ".join(filter(None, (r.module, os.path.basename(where), code.strip()))))


def explanation_html(e: Explanation) -> str:
    head = (f'<div style="font-size:1.25em"><b>{plural(sum(g.calls for g in e.graphs), "operation")} became {plural(len(e.kernels), "kernel")}</b> '
            f'and {plural(len(e.opaque), "call")} of torch</div><div>bytes {size_text(e.before.bytes)} &rarr; {size_text(e.after.bytes)}, '
            f'{plural(len(e.breaks), "graph break")}, {len(e.recompiles)} captured again</div>')
    parts = [head]
    for b in e.breaks:
        parts.append(f"<div>graph break in {html.escape(b.code)} at {html.escape(str(b.place))}: {html.escape(b.reason)}</div>")
    for r in e.recompiles:
        parts.append(f"<div>captured again: {html.escape(r.code)} at {html.escape(place(r.place))}: {html.escape(r.reason)}</div>")
    for g in e.graphs:
        moved = lambda found: size_text(sum(a.bytes for a in found))
        rows = [(k.name, k.module, " ".join(place(s) for s in k.sources), moved(k.reads), moved(k.writes), count_text(k.flops), k.schedule)
                for k in g.kernels]
        parts.append(section(f"{g.name}: {plural(len(g.kernels), 'kernel')}{', ' + g.eager if g.eager else ''}",
                             table(("kernel", "module", "lines", "reads", "writes", "FLOPs", "schedule"), rows, (3, 4, 5))))
    edges = [(size_text(x.bytes), x.producer, x.consumer, f"{x.kind}: {x.reason}") for x in e.edges[:ROWS]]
    if edges:
        parts.append(section(f"values that pass through memory: {plural(len(e.edges), 'edge')}",
                             table(("bytes", "made by", "read by", "why not one kernel"), edges, (0,)), len(e.edges) - ROWS))
    return f"<div>{''.join(parts)}</div>"
