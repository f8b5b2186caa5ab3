"""GPU benchmark: every case under eager, Inductor and tokamak in one run, by device time against the limit of the machine.

    python -m benchmarks.gpu [--cases GLOB ...] [--group NAME ...] [--grid NAME ...] [--dtypes D ...] [--near -1 0 1]
                             [--symbolic] [--sample N] [--drawn N] [--cached]
                             [--rows LOW:HIGH] [--columns LOW:HIGH] [--elements LOW:HIGH] [--sides eager,inductor,tokamak]
                             [--json FILE] [--redo SIDES] [--plot FILE] [--write] [--quick] [--workers N] [--budget SECONDS] [--report] [--list]

--grid gemm: products with what stands behind them; its summary, and what --write puts into BENCHMARKS.md, are of `gpu_products.py`. Without
--cases, --group and --grid: the list of `benchmarks/gpu_cases.py`. `--json` keeps every result as soon as it is there; what is in it is not
measured again, except the sides of `--redo`. A line a case: the limit, percent of it by side (e, i, t), then of the last side kernels (k), wall
time in microseconds (w), first call (c) and relative error. First calls: caches off, after an unrelated compile; kernels that the
process still holds are not built again, so for a first call of a process of its own add --isolate.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import gpu_drawn, gpu_grid, gpu_many, gpu_plot, gpu_products, gpu_report, gpu_sides
from .gpu_cases import SYMBOLIC, case, chosen
from .gpu_run import Results, process, run
from .gpu_sides import SIDES

START, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
BENCHMARKS = Path(__file__).parent.parent / "BENCHMARKS.md"


def bounds(text: str) -> tuple[int, int]:
    """LOW:HIGH, or one number for both."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def sides(text: str) -> tuple[str, ...]:
    found, every = tuple(t for t in text.split(",") if t), ("eager", "inductor", gpu_sides.AUTOTUNED, "tokamak", *gpu_sides.WAYS)
    if not set(found) <= set(every):
        raise argparse.ArgumentTypeError(f"sides are {', '.join(every)}")
    return tuple(s for s in every if s in found)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", default=[], metavar="GLOB", help="cases by name, with * and ?; also names of any other size")
    p.add_argument("--group", nargs="+", default=[], help="cases of these groups; 'more': norms and sizes beyond the list; "
                   "'contractions': few rows, weights of few bits, narrow layers")
    p.add_argument("--grid", nargs="+", default=[], choices=gpu_grid.GRIDS)
    p.add_argument("--dtypes", nargs="+", default=["bf16"], help="of a grid: f16 bf16 f32 tf32 (or fp16, fp32)")
    p.add_argument("--near", nargs="+", type=int, default=[0], help="of a grid: what is added to the columns, as -1 0 1")
    p.add_argument("--rows", type=bounds, help="of a grid: least and most rows, LOW:HIGH")
    p.add_argument("--columns", type=bounds, help="of a grid: least and most columns, LOW:HIGH")
    p.add_argument("--elements", type=bounds, help="of a grid: least and most elements of the input, LOW:HIGH")
    p.add_argument("--sample", type=int, help="so many of a grid's cases, the same ones in every run of one --seed")
    p.add_argument("--drawn", type=int, metavar="N", help="N cases of other families and sizes, drawn at random, the same ones for a --seed")
    p.add_argument("--of", choices=tuple(gpu_drawn.OF), default="layers", help="of --drawn: libraries' layers, what researchers write beside them, "
                   "or what lies one way and is read another")
    p.add_argument("--cached", action="store_true", help="compile with what the caches hold: quicker, and first calls say nothing")
    p.add_argument("--sides", type=sides, default=SIDES, help="of eager,inductor,autotune,tokamak,kernels,vendor; autotune is Inductor with "
                   "max-autotune, the last two tokamak with contractions as kernels wherever possible, and by the vendor")
    p.add_argument("--symbolic", action="store_true", help="static and symbolic sizes under tokamak beside each other, on a sample of the cases or "
                   "those chosen, in place of --sides")
    p.add_argument("--redo", type=sides, default=(), help="sides that are measured again though --json has them")
    p.add_argument("--json", default="", help="results are kept here; a run goes on where the last one stopped")
    p.add_argument("--plot", help="draw percent of the limit against size into this PNG")
    p.add_argument("--write", action="store_true", help="put the tables into BENCHMARKS.md")
    p.add_argument("--quick", action="store_true", help="7 timed calls instead of 15")
    p.add_argument("--budget", type=float, help="stop before the case that these seconds would not hold")
    p.add_argument("--patience", type=float, default=180, help="seconds after which a case without an answer counts as failed")
    p.add_argument("--workers", type=int, default=1, metavar="N", help="so many processes compile, one at a time has the GPU: quicker for many "
                   "cases; compiled with what the caches hold, and nothing is said of first calls, memory and wall time")
    p.add_argument("--isolate", action="store_true", help="a process for every case")
    p.add_argument("--seed", type=int, default=0, help="of the data, of --sample and of --drawn")
    p.add_argument("--report", action="store_true", help="measure nothing: summary, plot and tables of what --json has; needs no GPU")
    p.add_argument("--list", action="store_true", help="print the chosen cases with their fewest bytes and FLOPs, and stop")
    args = p.parse_args(argv)
    if args.symbolic:
        args.sides = ("tokamak", gpu_sides.SYMBOLIC)
    return args


def names(args: argparse.Namespace) -> list[str]:
    """The chosen cases, each once. Raises ValueError."""
    if args.symbolic and not (args.grid or args.cases or args.group or args.drawn):
        return list(SYMBOLIC)
    dtypes = [d.replace("fp", "f") for d in args.dtypes]
    found = [n for g in args.grid for n in gpu_grid.names(g, dtypes, args.near, args.rows, args.columns, args.elements)]
    found = gpu_grid.sample(found, args.sample, args.seed) if args.sample else found
    found += gpu_drawn.drawn(args.drawn, args.seed, args.of) if args.drawn else []
    if not (args.grid or args.drawn) or args.cases or args.group:
        found += chosen(args.cases, args.group)
    return list(dict.fromkeys(found))


def measure(args: argparse.Namespace, results: Results, todo) -> bool:
    """Runs what is to do behind a progress bar (on a terminal), a line a case. True when nothing is left."""
    last = {n: s[-1] for n, s in todo}
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=sum(len(s) for _, s in todo))

        def said(name: str, side: str, result: dict) -> None:
            progress.update(bar, advance=1, description=name)
            if side == last[name]:
                progress.console.print(gpu_report.line(name, results.rows[name]), highlight=False, markup=False, soft_wrap=True)
        if args.workers > 1:
            return gpu_many.measure(results, todo, args.workers, 7 if args.quick else 15, args.seed, args.patience, said, args.budget)
        worker = process(args.sides, 7 if args.quick else 15, args.seed, args.patience, args.isolate, cached=args.cached)
        return run(results, todo, worker, said, args.budget)


def write(text: str, start: str, end: str) -> None:
    """Puts tables between their marks in BENCHMARKS.md."""
    head, rest = BENCHMARKS.read_text().split(start)
    BENCHMARKS.write_text(f"{head}{start}\n{text}\n{end}{rest.split(end)[1]}")


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        wanted = names(args)
    except ValueError as error:
        sys.exit(str(error))
    if args.list:
        for n in wanted:
            print(f"{n} {case(n).group} {case(n).bytes} bytes {case(n).flops:.0f} FLOPs")
        return 0
    results = Results.open(args.json)
    todo = [] if args.report else results.missing(wanted, args.sides, args.redo)
    if todo and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    done = measure(args, results, todo) if todo else True
    rows = {n: results.rows[n] for n in wanted if n in results.rows}
    if rows:
        products = gpu_products.summary(rows) if args.grid == ["gemm"] else ""
        print(gpu_report.symbolic(rows) if args.symbolic else products or gpu_report.summary(rows, args.sides))
    if results.runs:
        print(f"copy {results.runs[-1]['copy'] / 1e12:.2f} TB/s, matmul {results.runs[-1]['matmul'] / 1e12:.0f} TFLOP/s")
    if args.plot and (message := gpu_plot.plot(rows, args.plot)):
        print(message)
    if args.write:
        if args.grid == ["gemm"]:
            write(gpu_products.table(results.runs, rows), gpu_products.START, gpu_products.END)
        else:
            write(gpu_report.table(results.runs, results.rows), START, END)
    if not done:
        print(f"stopped at the budget: {len(results.missing(wanted, args.sides))} cases left")
    return 0 if done else 2


if __name__ == "__main__":
    sys.exit(main())
