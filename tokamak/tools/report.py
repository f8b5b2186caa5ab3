"""An Explanation as tables in a terminal."""
from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ..fuse.reason import CODES
from .advice import for_recompile, mend
from .dynamo import Break
from .explain import Explanation, GraphInfo
from .kernels import KernelInfo
from .names import count_text, resources_text, size_text, time_text
from .show import BUILT, built_text
from .sources import Source

LONGEST = 20         # rows of the tables of edges and opaque calls: the most expensive; the JSON has all
WIDTH = 140


def text(e: Explanation) -> str:
    """The report without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(report(e))
    return console.file.getvalue()


def report(e: Explanation) -> Group:
    """The report for a rich console."""
    parts: list = [*summary(e), *captures(e)]
    parts += [part for g in e.graphs for part in graph(g)]
    return Group(*parts, *edge_table(e), *opaque_table(e))


def plural(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def summary(e: Explanation) -> Iterator[Text]:
    calls, before, after = sum(g.calls for g in e.graphs), e.before, e.after
    yield Text(f"{plural(len(e.frames), 'capture')} by Dynamo, {plural(len(e.breaks), 'graph break')}, {len(e.recompiles)} captured again", "bold")
    yield Text(f"{plural(calls, 'operation')} became {plural(len(e.kernels), 'kernel')} and {plural(len(e.opaque), 'call')} of torch", "bold")
    moved = f"bytes: {size_text(before.bytes)} -> {size_text(after.bytes)}"
    yield Text(f"tensors read or written: {before.accesses} -> {after.accesses}; {moved}", "bold")
    stages = sum(s for g in e.graphs for s in g.seconds.values())
    building = sum(g.seconds.get("build", 0.0) for g in e.graphs)
    within = sum(s for g in e.graphs if g.kind != "backward" for s in g.seconds.values())       # backward graphs are planned when they first run
    yield Text(f"first call: {time_text(max(e.compiling - within, 0.0))} to capture it, {time_text(stages - building)} to plan it, "
               f"{time_text(building)} to have its kernels: {built_text(sum((Counter(g.built) for g in e.graphs), Counter()))}")


def place(s: Source | None) -> str:
    return f"{os.path.basename(s.file)}:{s.line}" if s is not None else ""


def captures(e: Explanation) -> Iterator[Text]:
    alike: dict[tuple, list[Break]] = {}
    for b in e.breaks:
        alike.setdefault((b.code, b.place, b.reason), []).append(b)
    for b, *more in alike.values():
        behind = ", ".join(x.id for x in (b, *more))
        yield Text(f"\ngraph break behind {'captures' if more else 'capture'} {behind}, in {b.code} at {b.place}", "yellow")
        yield from told(b.reason, mend(b))
    for r in e.recompiles:
        yield Text(f"\ncaptured again as {r.id}: {r.code} at {place(r.place)}", "yellow")
        yield from told(r.reason, for_recompile(r.reason))


def told(reason: str, advised: str) -> Iterator[Text]:
    """Dynamo's words, but for its advice to report its own bugs; and what to do."""
    lines = [line for line in reason.splitlines() if "report an issue to PyTorch" not in line]
    yield Text("\n".join(f"    {line}" for line in lines))
    yield Text(f"    mend: {advised}")


def graph(g: GraphInfo) -> Iterator:
    took = sum(g.seconds.values())
    compiler = max((k.compile_seconds for k in g.kernels), default=0)
    by = "Triton" if any(k.device for k in g.kernels) else "the C compiler"
    done = "left to torch after" if g.eager else "compiled in"
    yield Text(f"\n{g.name} (capture {g.capture}): {g.before.accesses} -> {g.after.accesses} tensors read or written, {done} {time_text(took)}"
               + (f", {time_text(compiler)} of it in {by}" if compiler else ""), "bold")
    yield Text("    " + "  ".join(f"{stage} {time_text(s)}" for stage, s in g.seconds.items()), "dim")
    if g.eager:
        yield Text(g.eager, "yellow")
    if g.recorded:
        yield Text(f"CUDA graphs: {g.recorded}")
    if g.kernels:
        table = Table("kernel", "reads", "writes", "over fewest", "FLOPs", "built", box=None, pad_edge=False)
        for k in g.kernels:
            table.add_row(*kernel_row(k))
        yield table


def kernel_row(k: KernelInfo) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for op in k.operations:
        counts[op.split(".")[0]] = counts.get(op.split(".")[0], 0) + 1
    called = " ".join(op if n == 1 else f"{op}*{n}" for op, n in counts.items())
    about = "  ".join(filter(None, (k.module, called, places(k.sources))))
    tiles = f"\n    {k.schedule}  programs({k.programs})" if k.device else ""
    used = f"\n    {text}" if (text := resources_text(k)) else ""
    return (f"{k.name}\n    {about}{tiles}{used}", size_text(sum(a.bytes for a in k.reads)), size_text(sum(a.bytes for a in k.writes)),
            f"{k.bytes / k.fewest:.2f}" if k.fewest else "", count_text(k.flops), BUILT.get(k.how, ""))


def places(sources: tuple[Source, ...]) -> str:
    """Lines by file: model.py:3,5."""
    files: dict[str, list[str]] = {}
    for s in sources:
        files.setdefault(os.path.basename(s.file), []).append(str(s.line))
    return " ".join(f"{file}:{','.join(lines)}" for file, lines in files.items())


def edge_table(e: Explanation) -> Iterator:
    if e.edges:
        shown = e.edges[:LONGEST]
        yield Text(f"\nvalues that pass through memory: {plural(len(e.edges), 'edge')}, {size_text(sum(x.bytes for x in e.edges))}", "bold")
        yield from totals(e.edges, lambda x: f"{x.code}: {CODES[x.code]}")
        table = Table("bytes", "made by", "at", "read by", "at", "why not one kernel", box=None, pad_edge=False)
        for x in shown:
            table.add_row(size_text(x.bytes), x.producer, place(x.made), x.consumer, place(x.used), f"{x.kind}: {x.reason}")
        yield table
        yield from more(len(e.edges) - len(shown))


def opaque_table(e: Explanation) -> Iterator:
    if e.opaque:
        found = sorted(e.opaque, key=lambda o: -o.bytes)
        yield Text(f"\ncalls of torch: {len(found)}, {size_text(sum(o.bytes for o in found))}", "bold")
        yield from totals(found, lambda o: f"{o.op}: {o.reason}")
        table = Table("bytes", "operation", "at", "module", "reason", box=None, pad_edge=False)
        for o in found[:LONGEST]:
            table.add_row(size_text(o.bytes), o.op, place(o.source), o.module, o.reason)
        yield table
        yield from more(len(found) - LONGEST)


def totals(items: Sequence, key: Callable[[Any], str]) -> Iterator[Text]:
    """How many of `items`, and how many bytes, have each key; the most expensive first."""
    found: dict[str, list[int]] = {}
    for x in items:
        found.setdefault(key(x), []).append(x.bytes)
    for text, sizes in sorted(found.items(), key=lambda kv: -sum(kv[1])):
        yield Text(f"    {size_text(sum(sizes)):>8} in {len(sizes)}  {text}")


def more(count: int) -> Iterator[Text]:
    if count > 0:
        yield Text(f"... and {count} more")
