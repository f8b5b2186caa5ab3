"""One table: what eager does with a program, and what tokamak makes of it.

    python examples/demo.py

Nothing in the table is written down beforehand. Eager's operations and memory accesses are counted while eager runs; tokamak's come from its plan;
times are medians of this run; errors are against the same program in float64.
"""
from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accounting import eager_memory, least_bytes
from programs import EXAMPLES, Example
from rich.console import Console
from rich.table import Table
from torch import nn

from tokamak.tools.kernels import Memory, memory_operations, opaques, plan_of
from tokamak.tools.record import recording

SECONDS = 0.5          # of calls to time, for each column of a row
NUMBERS = "no one two three four five six seven eight nine ten eleven twelve".split()


@dataclass(frozen=True)
class Row:
    """What was counted and measured of one example. `least`: bytes that any way of running the graphs moves."""
    name: str
    eager: Memory
    fused: Memory
    opaque: int
    least: int
    eager_ms: float
    fused_ms: float
    eager_error: float
    fused_error: float


def runner(program: Callable, args: tuple[torch.Tensor, ...], backward: bool, wrap: Callable = lambda f: f) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function without arguments that runs `wrap(program)` once and returns its output and, with `backward`, every gradient."""
    compiled = wrap(program)
    if not backward:
        def forward():
            with torch.no_grad():
                return (compiled(*args),)
        return forward
    parameters = tuple(program.parameters()) if isinstance(program, nn.Module) else ()
    wanted = tuple(a.detach().requires_grad_() for a in args)
    with torch.no_grad():
        shape = program(*args).shape
    seed = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(args[0].dtype)

    def step():
        out = compiled(*wanted)
        return (out, *torch.autograd.grad(out, (*wanted, *parameters), seed))
    return step


def exact(program: Callable, args: tuple[torch.Tensor, ...], backward: bool) -> tuple[torch.Tensor, ...]:
    """What the program gives in float64."""
    wide = copy.deepcopy(program).double() if isinstance(program, nn.Module) else program
    return runner(wide, tuple(a.double() for a in args), backward)()


def error(found, wanted) -> float:
    """The largest difference in any result, relative to that result's largest value."""
    with torch.no_grad():
        return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def median_ms(fn: Callable[[], object]) -> float:
    fn()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < SECONDS and len(times) < 200:
        before = time.perf_counter()
        result = fn()
        times.append(time.perf_counter() - before)
        del result
    return sorted(times)[len(times) // 2] * 1e3


def count(eager: Callable, fused: Callable) -> tuple[Memory, Memory, int, int]:
    """Runs both once: (eager's memory operations, tokamak's, calls of torch among these, fewest bytes possible)."""
    before = eager_memory(eager)
    with recording() as recorder:
        fused()
    graphs = recorder.graphs
    after = sum((memory_operations(r)[1] for r in graphs), Memory())
    return before, after, sum(len(opaques(r)) for r in graphs), sum(least_bytes(plan_of(r).graph) for r in graphs)


def measure(example: Example) -> Row:
    torch.manual_seed(0)
    torch._dynamo.reset()
    program, args = example.make()
    eager = runner(program, args, example.backward)
    fused = runner(program, args, example.backward, lambda f: torch.compile(f, backend="tokamak"))
    counts = count(eager, fused)
    wanted = exact(program, args, example.backward)
    errors = error(eager(), wanted), error(fused(), wanted)
    del wanted
    return Row(example.name, *counts, median_ms(eager), median_ms(fused), *errors)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def table(rows: list[Row]) -> Table:
    out = Table(title="tokamak: what eager runs → what is left", title_justify="left", header_style="bold")
    out.add_column("program", no_wrap=True)
    for head in ("eager\noperations", "kernels\n(+ calls of torch)", "memory\noperations", "MiB moved", "fewest\npossible",
                 "ms eager →\ntokamak", "eager /\ntokamak", "largest error\neager → tokamak"):
        out.add_column(head, justify="right")
    for r in rows:
        kernels = f"{r.fused.operations - r.opaque}" + (f" + {r.opaque}" if r.opaque else "")
        out.add_row(r.name, str(r.eager.operations), kernels, f"{r.eager.accesses} → {r.fused.accesses}",
                    f"{mebibytes(r.eager.bytes)} → {mebibytes(r.fused.bytes)}", mebibytes(r.least),
                    f"{r.eager_ms:.2f} → {r.fused_ms:.2f}", f"{r.eager_ms / r.fused_ms:.1f}", f"{r.eager_error:.0e} → {r.fused_error:.0e}")
    return out


def word(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def sentence(r: Row) -> str:
    """The row in the words in which fusion is usually explained."""
    kernels = "kernel" if r.eager.operations == 1 else "kernels"
    return (f"{r.name}: {word(r.eager.operations)} {kernels} and {word(r.eager.accesses)} memory operations become "
            f"{word(r.fused.operations)} and {word(r.fused.accesses)}.")


CAPTION = """\
A memory operation is one tensor read or written by one kernel or call. Fewest possible: what a graph has to read and write once, its inputs and
outputs; what forward saves for backward is among them. Error: the largest difference from float64, relative to a result's largest value.
Times: medians of this run on {threads} threads; other work on the machine shows in them."""


def main() -> None:
    rows = [measure(e) for e in EXAMPLES]
    console = Console(width=max(Console().width, 160), highlight=False)
    console.print(table(rows))
    console.print(sentence(rows[0]))
    console.print(CAPTION.format(threads=torch.get_num_threads()))


if __name__ == "__main__":
    main()
