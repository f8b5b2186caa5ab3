"""A Profile in a terminal: one screen, then the tables."""
from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .limits import Row
from .names import count_text, rate_text, size_text
from .profile import Costly, Profile, Side
from .report import place, plural

WIDTH = 160
WHAT = 70           # columns for the words on a kernel
NEAR = 0.97         # of its limit: what takes less was faster than that
KERNELS, LINES, EDGES, OPAQUE = 25, 8, 10, 8            # rows of each table: those that cost most; the JSON has all


def text(p: Profile) -> str:
    """The report without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(report(p))
    return console.file.getvalue()


def report(p: Profile) -> Group:
    return Group(*head(p), sides(p), *compiling(p), *advice(p), *kernel_table(p), *line_table(p), *edge_table(p), *opaque_table(p),
                 *(Text(n, "yellow") for n in p.notes))


def took(seconds: float) -> str:
    """A time in the unit that leaves one to three digits before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError


def head(p: Profile) -> Iterator[Text]:
    faster = p.eager.step / p.compiled.step
    yield Text(f"bound by {p.bound}: {p.why}", "bold")
    if p.next:
        yield Text(f"next: {p.next}", "bold")
    yield Text(f"{took(p.eager.step)} in eager, {took(p.compiled.step)} compiled: {faster:.2f} times as fast, on {p.device} ({p.peaks.device})",
               "bold")
    if p.step:
        yield Text(p.step, "dim")
    rates = ", ".join(f"{name} {rate_text(rate)}" for name, rate in p.peaks.matmul.items())
    yield Text(f"peaks, measured {p.peaks.when}: copy {size_text(p.peaks.bandwidth)}/s, {rates}, shortest kernel {took(p.peaks.launch)}", "dim")


def share(s: Side) -> str:
    """Of a step, in which nothing works."""
    return f"{s.idle / s.step:.0%}"


@dataclass(frozen=True)
class Bar:
    """A quantity of both sides, as text."""
    name: str
    eager: str
    compiled: str
    note: str = ""


def bars(p: Profile) -> Iterator[Bar]:
    """What both sides are compared by."""
    gpu = p.device != "cpu"

    def bar(name, value, note=""):
        return Bar(name, value(p.eager), value(p.compiled), note)
    yield bar("step", lambda s: took(s.step), "by itself: the device is idle before" if gpu else "")
    if p.eager.middle[1] and p.compiled.middle[1]:
        yield bar("  half of them", lambda s: " to ".join(map(took, s.middle)), "the others took less or more; the step above is the median")
    yield bar("device busy" if gpu else "in kernels and operators", lambda s: took(s.busy),
              "" if gpu else "eager's: its part of steps under torch's profiler (estimate)")
    yield bar("idle, gaps" if gpu else "the rest: host", lambda s: f"{took(s.idle)}  {share(s)}")
    if gpu:
        yield bar("host", lambda s: took(s.host), "until it is done with a step, device idle before")
    for phase in dict.fromkeys((*p.eager.phases, *p.compiled.phases)):
        yield bar(f"  {phase or 'other'}", lambda s: took(s.phases.get(phase, 0.0)), "time on the device" if gpu else "")
    yield bar("kernels" if gpu else "kernels and calls", lambda s: str(s.kernels), "" if gpu else "eager's: its operators, without views")
    yield bar("bytes read and written", lambda s: size_text(s.bytes), f"counted; fewest possible {size_text(p.fewest)}")
    yield bar("peak memory", lambda s: size_text(s.peak), f"beyond what stands before the step; predicted {size_text(p.predicted)} (estimate)")
    if p.compiled.memory.pools:
        yield Bar("memory of recordings", "", size_text(p.compiled.memory.pools),
                  "that the CUDA graphs of this process keep from step to step, besides")


def sides(p: Profile) -> Table:
    table = Table("", "eager", "compiled", "", box=None, pad_edge=False)
    for b in bars(p):
        table.add_row(b.name, b.eager, b.compiled, b.note)
    return table


def compiling(p: Profile) -> Iterator[Text]:
    ours = sum(p.stages.values())
    longest = sorted(p.stages.items(), key=lambda s: -s[1])
    yield Text(f"\nfirst call {took(p.first)}: Dynamo, AOTAutograd and the step itself {took(max(p.first - ours, 0))}; "
               + ", ".join(f"{name} {took(t)}" for name, t in longest if t >= 0.01 * p.first)
               + f"; {plural(p.graphs, 'graph')}, {plural(p.built, 'kernel')} of which {p.cached} were there already")
    yield from coverage(p)
    yield Text(f"profiling took {took(p.took)} besides", "dim")


def coverage(p: Profile) -> Iterator[Text]:
    """What CUDA graphs hold of the programs; on a CPU there are none."""
    if p.device == "cpu":
        return
    if not p.coverage:
        yield Text('CUDA graphs: off; mode="reduce-overhead" records what programs launch and replays it; '
                   f"the device is idle in {share(p.compiled)} of a step")
    for c in p.coverage:
        yield Text(f"CUDA graphs: {c.graph}: {c.held} of {c.total} kernels and calls in {plural(c.pieces, 'graph')}; {c.calls}")
        for why, found in by_reason(c.left).items():
            yield Text(f"    left out: {', '.join(found)}: {why}")


def by_reason(left: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """What was left out, by the reason."""
    found: dict[str, list[str]] = {}
    for name, why in left:
        if name not in found.setdefault(why, []):
            found[why].append(name)
    return found


def advice(p: Profile) -> Iterator[Text]:
    for a, times in Counter(p.advice).items():
        yield Text(f"{a.what}: {a.place}" + (f" ({times} times)" if times > 1 else ""), "yellow")
        yield Text("    " + shortened(" ".join(a.reason.split()), WIDTH - 4))
        yield Text(f"    mend: {a.mend}")


def shortened(text: str, width: int) -> str:
    """So much of a text, up to the end of a word."""
    return text if len(text) <= width else text[:width - 2].rpartition(" ")[0] + " …"


def kernel_table(p: Profile) -> Iterator:
    if not p.rows:
        return
    total = sum(r.seconds for r in p.rows)
    yield Text(f"\nkernels and calls of torch by wasted time (time beyond what bytes or operations take at this machine's peaks): "
               f"{took(sum(r.wasted for r in p.rows))} of {took(total)}", "bold")
    table = Table(box=None, pad_edge=False)
    for title in ("wasted", "time", "calls", "% of limit", "class", "bytes", "FLOPs", "phase", "what"):
        table.add_column(title, no_wrap=True)
    for r in p.rows[:KERNELS]:
        over = f" ({r.bytes / r.fewest:.2f}x)" if r.fewest and r.bytes > 1.005 * r.fewest else ""
        table.add_row(took(r.wasted), took(r.seconds), str(r.calls), f"{r.fraction:.0%}", r.kind, size_text(r.bytes) + over, flops(r), r.phase,
                      Text("\n".join(line[:WHAT] for line in what(r))))
    yield table
    if any(r.seconds < NEAR * r.limit for r in p.rows[:KERNELS]):
        yield Text("100% and nothing wasted: faster than the limit, since what it read was still in a cache; or since the machine was busy when its "
                   "peaks were measured (tokamak doctor --measure takes them again)", "dim")
    if len(p.rows) > KERNELS:
        yield Text(f"... and {len(p.rows) - KERNELS} more")
    if p.others:
        names = "; ".join(f"{took(o.seconds)} {o.name[:WHAT]} x{o.calls:.3g}" for o in p.others[:3])
        yield Text(f"beyond these, {took(sum(o.seconds for o in p.others))} on the device: {names}" + ("; ..." if len(p.others) > 3 else ""), "dim")


def what(r: Row) -> Iterator[str]:
    """A kernel's name, its line and module, and its schedule: the line's number is shown whole."""
    where, _, code = short(r.source).partition(" ")
    name = r.name + (" (torch)" if r.opaque else "")
    about = "  ".join(filter(None, (where, r.module, code)))
    if len(name) + 2 + len(where) <= WHAT:
        name, about = f"{name}  {about}".rstrip(), ""
    yield name
    made = f"{resources(r)}{r.schedule}"
    if about or made:
        yield "    " + "  ".join(filter(None, (about if not made else where if about else "", made)))


def flops(r: Row) -> str:
    """Those of a call for which torch has no formula are not known."""
    return "–" if r.opaque and not r.flops else count_text(r.flops)


def line_table(p: Profile) -> Iterator:
    if not p.lines:
        return
    yield Text("\nyour lines by the time of the kernels that compute them (one of several lines counts whole in each)", "bold")
    table = Table("time", "wasted", "kernels", "line", "", box=None, pad_edge=False)
    for x in p.lines[:LINES]:
        table.add_row(took(x.seconds), took(x.wasted), str(x.count), place(x.source), Text(x.source.code.strip()[:WHAT]))
    yield table


def short(source: str) -> str:
    """A source line without its folder."""
    where, _, code = source.partition("  ")
    return f"{os.path.basename(where)} {code.strip()[:60]}".strip() if source else ""


def resources(r: Row) -> str:
    return f"{r.registers} registers{f', {r.spilled} bytes of stack' if r.spilled else ''}  " if r.registers is not None else ""


def edge_table(p: Profile) -> Iterator:
    if not p.edges:
        return
    yield Text(f"\nvalues that pass through memory between kernels: {took(sum(c.seconds for c in p.edges))} at copy speed (estimate)", "bold")
    table = Table("cost", "bytes", "values", "made by", "read by", "why not one kernel", box=None, pad_edge=False)
    found = alike(p.edges)
    for same in found[:EDGES]:
        e = same[0].edge
        table.add_row(took(sum(c.seconds for c in same)), size_text(sum(c.edge.bytes for c in same)), str(len(same)), f"{e.producer} {place(e.made)}",
                      f"{e.consumer} {place(e.used)}", f"{e.kind}: {e.reason}")
    yield table
    if len(found) > EDGES:
        yield Text(f"... and {sum(map(len, found[EDGES:]))} more")


def alike(edges: Iterable[Costly]) -> list[list[Costly]]:
    """Edges between the same lines with the same reason together, those that cost most first."""
    found: dict[tuple, list[Costly]] = {}
    for c in edges:
        e = c.edge
        key = (e.made, e.used, e.kind, e.reason) if e.made and e.used else (id(e),)
        found.setdefault(key, []).append(c)
    return sorted(found.values(), key=lambda same: -sum(c.seconds for c in same))


def opaque_table(p: Profile) -> Iterator[Text]:
    if not p.opaque:
        return
    reasons: dict[tuple[str, str], list[Row]] = {}
    for r in p.rows:
        if r.opaque:
            reasons.setdefault((r.name, r.opaque), []).append(r)
    yield Text(f"\ncalls that torch makes: {p.opaque}", "bold")
    for (name, why), found in sorted(reasons.items(), key=lambda kv: -sum(r.seconds for r in kv[1]))[:OPAQUE]:
        yield Text(f"    {took(sum(r.seconds for r in found)):>8} in {sum(r.calls for r in found)}  {name}: {why}")
