"""One table: what eager does with a program, and what tokamak makes of it.

    python examples/demo.py [DEVICE]          # "cuda" where there is a GPU, else "cpu"

Nothing in the table is written down beforehand. Eager's operations and memory accesses are counted while eager runs; tokamak's come from its plan;
times are medians of this run, on a GPU its own; errors are against the same program in float64.
"""
from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accounting import eager_memory
from programs import EXAMPLES, Example
from rich.console import Console
from rich.table import Table
from torch import nn

from tokamak.tools.kernels import Memory, least_bytes, memory_operations, opaques, plan_of
from tokamak.tools.record import recording

SECONDS = 0.5          # of calls to time, for each column of a row
FLUSH = 256 << 20      # bytes written on a GPU before each call: more than its cache holds, and a head start for the host
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
    seed = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(args[0])

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


def device() -> str:
    """Where the table is made when nobody says: on NVIDIA's GPU if there is one."""
    return "cuda" if torch.cuda.is_available() and torch.version.hip is None else "cpu"


def placed(program: Callable, args: tuple[torch.Tensor, ...], where: str) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """A program and its arguments on the device `where`."""
    return program.to(where) if isinstance(program, nn.Module) else program, tuple(a.to(where) for a in args)


def gpu_ms(fn: Callable[[], object]) -> float:
    """Median milliseconds that a call takes the GPU, between two events, its cache cold before."""
    fn()
    other = torch.empty(FLUSH, dtype=torch.int8, device="cuda")
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    start = time.perf_counter()
    while len(pairs) < 5 or time.perf_counter() - start < SECONDS and len(pairs) < 200:
        pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        other.fill_(1)
        pairs[-1][0].record()
        result = fn()
        pairs[-1][1].record()
        del result
        torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in pairs)
    return times[len(times) // 2]


def median_ms(fn: Callable[[], object]) -> float:
    """Median milliseconds of a call on the CPU."""
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


def measure(example: Example, where: str) -> Row:
    torch.manual_seed(0)
    torch._dynamo.reset()
    program, args = placed(*example.make(), where)
    time_of = median_ms if where == "cpu" else gpu_ms
    eager = runner(program, args, example.backward)
    fused = runner(program, args, example.backward, lambda f: torch.compile(f, backend="tokamak"))
    counts = count(eager, fused)
    wanted = exact(program, args, example.backward)
    errors = error(eager(), wanted), error(fused(), wanted)
    del wanted
    return Row(example.name, *counts, time_of(eager), time_of(fused), *errors)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def milliseconds(time: float) -> str:
    return f"{time:.2f}" if time >= 1 else f"{time:.3f}"


def table(rows: list[Row], where: str) -> Table:
    out = Table(title=f"tokamak on {where}: what eager runs → what is left", title_justify="left", header_style="bold")
    out.add_column("program", no_wrap=True)
    for head in ("eager\noperations", "kernels\n(+ calls of torch)", "memory\noperations", "MiB moved", "fewest\npossible",
                 "ms eager →\ntokamak", "eager /\ntokamak", "largest error\neager → tokamak"):
        out.add_column(head, justify="right")
    for r in rows:
        kernels = f"{r.fused.operations - r.opaque}" + (f" + {r.opaque}" if r.opaque else "")
        out.add_row(r.name, str(r.eager.operations), kernels, f"{r.eager.accesses} → {r.fused.accesses}",
                    f"{mebibytes(r.eager.bytes)} → {mebibytes(r.fused.bytes)}", mebibytes(r.least),
                    f"{milliseconds(r.eager_ms)} → {milliseconds(r.fused_ms)}", f"{r.eager_ms / r.fused_ms:.1f}",
                    f"{r.eager_error:.0e} → {r.fused_error:.0e}")
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
Times: medians of this run {how}; other work on the machine shows in them."""


def how_timed(where: str) -> str:
    if where == "cpu":
        return f"on {torch.get_num_threads()} threads"
    return f"on {torch.cuda.get_device_name(where)}, between events on the device, with nothing of the call in its cache"


def main(arguments: list[str]) -> None:
    where = arguments[0] if arguments else device()
    rows = [measure(e, where) for e in EXAMPLES]
    console = Console(width=max(Console().width, 160), highlight=False)
    console.print(table(rows, where))
    console.print(sentence(rows[0]))
    console.print(CAPTION.format(how=how_timed(where)))


if __name__ == "__main__":
    main(sys.argv[1:])
