"""The command `tokamak`.

    tokamak explain [--target TARGET] [--json] SCRIPT [ARGUMENT ...]
    tokamak compile [--target TARGET] [--until STAGE] [--exact] SCRIPT [ARGUMENT ...]
    tokamak verify [--target TARGET] [--json] [--extract KERNEL] [--output FILE] SCRIPT [ARGUMENT ...]
    tokamak profile [--target TARGET] [--html FILE] [--trace FILE] [--json FILE] [--fail-if CONDITIONS] [--seconds SECONDS]
                    SCRIPT [ARGUMENT ...]
    tokamak diff [--json] [--fail-if CONDITIONS] BEFORE.json AFTER.json
    tokamak optimize [--target TARGET] [--json FILE] [--allow RUNGS] [--seconds SECONDS] SCRIPT [ARGUMENT ...]
    tokamak tune SCRIPT [ARGUMENT ...]
    tokamak doctor [--json] [--measure]

All with a script run it as `python SCRIPT ARGUMENT ...` would and record what it compiles with tokamak. What the script prints goes to standard
error, until the process ends and whoever prints it (a process that it starts, a library in C); the answer, and nothing else, to standard output. With
`--json -` that is JSON. A process that the script forks and that comes to its end has no answer. Exit status: 0; the script's own
where that is another; 1 when the script failed, compiled nothing or made calls that cannot be made again, a kernel is wrong, a condition of
--fail-if holds, nothing can be tuned, a file cannot be written or the doctor misses something; 2 for a wrong command line.
"""
from __future__ import annotations

import argparse
import contextlib
import math
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

import torch
from rich.console import Console

from .. import __version__
from ..errors import OptionError, TokamakError
from ..options import everywhere, STAGES
from .diff import condition as growth, diff, load
from .doctor import examine
from .explain import explanation
from .names import EXAMPLE, is_name
from .optimize import allowed, CASTS, optimize_called, WEIGHTS
from .profile import METRICS, SECONDS, condition, profile_called
from .record import GraphRecord, Recorder, recording
from .show import STAGE_TEXTS, exact_text
from .tune import tuning
from .verify import examined, group_of
from .watch import Unrepeatable, Watcher


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        return run(arguments)
    except TokamakError as error:        # an option in the environment that cannot be
        print(f"tokamak: {error}", file=sys.stderr)
        return 2
    except Unwritten as error:
        if not isinstance(error.__cause__, BrokenPipeError):        # else whoever read the answer has had enough
            print(f"tokamak: {error}", file=sys.stderr)
        return 1


class Unwritten(Exception):
    """The answer, or a file of it, could not be written."""


@contextlib.contextmanager
def writing(what: str):
    try:
        yield
    except OSError as error:
        raise Unwritten(f"{what} cannot be written: {error}") from error


@contextlib.contextmanager
def answering(ends: bool) -> Iterator[TextIO]:
    """Standard output, for the answer alone: whatever else is written there meanwhile goes to standard error, from below Python, too; also behind it
    where the process `ends` then."""
    if sys.stdout is None:
        raise Unwritten("the answer cannot be written: there is no standard output")
    mine, sys.stdout = sys.stdout, sys.stderr
    real = descriptor(mine) == 1
    said = "backslashreplace" if mine.errors == "strict" else mine.errors       # a source may hold what the terminal cannot show
    out = open(os.dup(1), "w", encoding=mine.encoding, errors=said) if real else mine
    try:
        if real:
            mine.flush()
            with contextlib.suppress(OSError):          # there is no standard error
                os.dup2(2, 1)
        yield out
    finally:
        if real:
            if not ends:
                mine.flush()
                os.dup2(out.fileno(), 1)
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), out.fileno())         # for what could not be written
            out.close()
        if not ends:
            sys.stdout = mine


def descriptor(file: TextIO) -> int:
    """The number of a file that the system knows, or -1."""
    try:
        return file.fileno()
    except (AttributeError, OSError, ValueError):
        return -1


def run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command not in WITHOUT_SCRIPT and not os.path.isfile(given.script):
        parser.exit(2, f"tokamak: there is no file '{given.script}'\n")
    refuse(given)
    place(given)
    with answering(ends=arguments is None) as out:
        return WITHOUT_SCRIPT[given.command](given, out) if given.command in WITHOUT_SCRIPT else recorded(given, out)


def refuse(given: argparse.Namespace) -> None:
    """Raises OptionError for what no run of the script could make possible, before it runs."""
    for text in filter(str.strip, getattr(given, "fail_if", "").split(",")):
        (growth if given.command == "diff" else condition)(text)
    for name in rungs_of(given):
        allowed(name)
        if name in WEIGHTS:
            raise OptionError(f"--allow {name}: weights are changed in a module, and a script shows graphs alone; "
                              f"tokamak.optimize(model, *inputs, allow=\"{name}\") does it")
    if given.command == "tune" and not torch.cuda.is_available():
        raise OptionError("tuning is for GPUs, and torch finds none here (`tokamak doctor` says more)")
    if getattr(given, "extract", None) is not None and not is_name(given.extract):
        raise OptionError(f"--extract {given.extract}: no kernel has such a name; `tokamak explain` shows those of a script, as {EXAMPLE}")
    if getattr(given, "output", "") and given.extract is None:
        raise OptionError(f"--output {given.output}: the file of a kernel, which --extract names")
    if getattr(given, "exact", False) and given.until != "render":
        raise OptionError("--exact: the text of kernels as it is built, which --until render shows")


def rungs_of(given: argparse.Namespace) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, getattr(given, "allow", "").split(","))))


def recorded(given: argparse.Namespace, out: TextIO) -> int:
    """Runs the script and answers of what it compiled."""
    chosen = {name: value for name in ("until", "target") if (value := getattr(given, name, None))}
    if given.command == "verify":
        chosen["check"] = "report"
    if given.command == "tune":
        chosen["tuned"] = False         # neighbours are the heuristic's
    here = os.getpid()
    with recording(Watcher(keep_arguments=True) if given.command in ("profile", "optimize") else None, **chosen) as recorder, everywhere():
        status, values = run_script(given.script, given.arguments)
    if os.getpid() != here:
        return status
    if not recorder.graphs and status:
        return status
    if not recorder.graphs:
        print(f"tokamak: {given.script} compiled nothing with tokamak: no call of a function that torch.compile(..., backend=\"tokamak\") "
              "or tokamak.compile(...) returned", file=sys.stderr)
        return 1
    if isinstance(recorder, Watcher) and not recorder.called:
        print(f"tokamak: {given.script} called nothing that it compiled, or no call came to its end", file=sys.stderr)
        return status or 1
    try:
        answer = ANSWERS[given.command](recorder, given, out)
    except Unrepeatable as why:
        print(f"tokamak: {why}", file=sys.stderr)
        return status or 1
    values.clear()
    return status or answer


def place(given: argparse.Namespace) -> None:
    """The files that are asked for are known by their whole names, whatever folder the script changes to. OptionError for one that cannot be made."""
    taken: set[str] = set()
    for name in ("json", "output", "html", "trace"):
        path = getattr(given, name, None)
        if isinstance(path, str) and path and (name, path) != ("json", "-"):
            folder = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path) or not os.access(folder, os.W_OK):
                raise OptionError(f"--{name} {path}: no file can be made there")
            whole = os.path.join(folder, os.path.basename(path))
            if whole in taken:
                raise OptionError(f"--{name} {path}: that file is to hold something else")
            taken.add(whole)
            setattr(given, name, whole)


_METRICS = f"{', '.join(METRICS)} (opaque: calls of torch)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokamak", description="a fusing compiler for PyTorch: see what it does with a program")
    parser.add_argument("--version", action="version", version=f"tokamak {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    explain = commands.add_parser("explain", help="graphs, graph breaks, kernels, memory operations, and why what was not fused")
    explain.add_argument("--json", action="store_true", help="everything that was recorded, as JSON")
    width = max(map(len, STAGES))
    stages = "stages, in order:\n" + "\n".join(f"  {name:{width}}  {what}" for name, what in STAGES.items())
    compile = commands.add_parser("compile", help="what a stage of the compiler made of each graph", epilog=stages,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    compile.add_argument("--until", metavar="STAGE", choices=tuple(STAGES), default="build",
                         help="stop behind this stage, one of those below, and print what it made (build)")
    compile.add_argument("--exact", action="store_true", help="the text as it is built instead of a listing for people (stage render)")
    verify = commands.add_parser("verify", help="every kernel against eager, float64 and its policy, on the values that it has")
    verify.add_argument("--json", action="store_true", help="everything that was compared, as JSON")
    verify.add_argument("--extract", metavar="KERNEL", help="write this kernel and its values into a file that reproduces, checks and times it")
    verify.add_argument("--output", metavar="FILE", default="", help="the name of that file (KERNEL.py)")
    profile = commands.add_parser("profile", help="where the time goes: the graphs that the script called, in eager and compiled, side by side")
    profile.add_argument("--json", metavar="FILE", default="",
                         help="write everything that was measured into FILE, as JSON; -: to standard output, in place of the text")
    profile.add_argument("--html", metavar="FILE", default="", help="write the report into FILE: one page that opens without a network")
    profile.add_argument("--trace", metavar="FILE", default="", help="write the timelines into FILE, for Perfetto, chrome://tracing or TensorBoard")
    profile.add_argument("--fail-if", metavar="CONDITIONS", default="",
                         help=f"exit with 1 when one holds: \"kernels>60, step_ms>2\"; of {_METRICS}")
    profile.add_argument("--seconds", type=duration, default=SECONDS, help=f"how long steps are measured, for each side ({SECONDS:g})")
    diff = commands.add_parser("diff", help="what changed from one profile to another: kernels by what they compute, bytes, totals")
    diff.add_argument("--json", action="store_true", help="all of it, as JSON")
    diff.add_argument("--fail-if", metavar="CONDITIONS", default="",
                      help=f"exit with 1 when one holds: \"step_ms>5%%, kernels>0\" (grew by more than that); of {_METRICS}")
    diff.add_argument("before", metavar="BEFORE.json", help="what `tokamak profile --json` wrote")
    diff.add_argument("after", metavar="AFTER.json", help="what it wrote later")
    optimize = commands.add_parser("optimize", help="the ladder: what each step towards speed brings, costs in memory and does to the numbers")
    optimize.add_argument("--json", metavar="FILE", default="", help="write it into FILE, as JSON; -: to standard output, in place of the text")
    optimize.add_argument("--allow", metavar="RUNGS", default="", help=f"rungs that change numbers and may be tried: {','.join(CASTS)}")
    optimize.add_argument("--seconds", type=duration, default=SECONDS, help=f"how long steps are measured, for each side of each rung ({SECONDS:g})")
    tune = commands.add_parser("tune", help="try schedules near the heuristic's on the GPU, for the script's kernels, and keep what is faster")
    doctor = commands.add_parser("doctor", help="what this machine offers, and what is missing")
    doctor.add_argument("--json", action="store_true", help="the same as JSON")
    doctor.add_argument("--measure", action="store_true",
                        help="measure what memory and arithmetic do at most (seconds), and keep it in the cache folder")
    for command in (explain, compile, verify, profile, optimize, tune):
        if command is not tune:
            command.add_argument("--target", metavar="TARGET", choices=("interpret",),
                                 help="interpret: tensors of the CPU as if they were a GPU's, with kernels in Triton, which its interpreter runs")
        command.add_argument("script", metavar="SCRIPT", help="a program that calls what torch.compile(..., backend=\"tokamak\") made; it is run")
        rest = command.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own arguments")
        rest.required = False                   # Python 3.11 says it were
    return parser


def duration(text: str) -> float:
    """Seconds to measure for (0: as few steps as possible); ValueError for what is none."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(text)
    return seconds


def doctor(given: argparse.Namespace, out: TextIO) -> int:
    found = examine(given.measure)
    show(found, given.json, out)
    return found.status


def difference(given: argparse.Namespace, out: TextIO) -> int:
    found = diff(load(given.before), load(given.after), (given.before, given.after))
    show(found, given.json, out)
    failed = found.failures(given.fail_if)
    for text in failed:
        print(f"tokamak: {text}", file=sys.stderr)
    return int(bool(failed))


WITHOUT_SCRIPT: dict[str, Callable[[argparse.Namespace, TextIO], int]] = {"doctor": doctor, "diff": difference}


def run_script(path: str, arguments: list[str]) -> tuple[int, dict]:
    """Runs a script as the main program. Returns its exit status (1 when it raised, with its traceback printed) and its
    globals: what it compiled may hold them by weak references (parameters of an optimizer)."""
    saved, sys.argv = (sys.argv, list(sys.path)), [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        with last_words(path):
            return 0, runpy.run_path(path, run_name="__main__")
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None), {}
    except KeyboardInterrupt:
        print(f"tokamak: {path} was interrupted", file=sys.stderr)
        return 128 + signal.SIGINT, {}
    except Exception as error:
        inner = getattr(error, "inner_exception", error)        # torch wraps what a backend raises
        if isinstance(inner, TokamakError):
            print(f"tokamak: {inner}", file=sys.stderr)
        else:
            traceback.print_exception(error.with_traceback(_from(error.__traceback__, path)))
        return 1, {}
    finally:
        sys.argv, sys.path[:] = saved


def _from(trace, path: str):
    """A traceback without the frames above the script's own; None for a script that does not even begin."""
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


@contextlib.contextmanager
def last_words(path: str):
    """Within it a script that ends this process by os._exit, behind which nothing can be shown, says so; those that it has forked end as ever."""
    leave, here = os._exit, os.getpid()

    def exit(status):
        if os.getpid() == here:
            print(f"tokamak: {path} ended by os._exit({status}): there is nobody left to show what it did", file=sys.stderr, flush=True)
        leave(status)
    os._exit = exit
    try:
        yield
    finally:
        os._exit = leave


# -- answers -------------------------------------------------------------------------------------------------------------
def show(found, as_json: bool, out: TextIO) -> None:
    """Prints something that has a text, a form for terminals and JSON."""
    if not as_json and out.isatty() and hasattr(found, "__rich__"):
        with writing("the answer"):
            Console(file=out).print(found)
    else:
        tell(found.to_json(indent=2) + "\n" if as_json else str(found), out)


def tell(text: str, out: TextIO) -> None:
    with writing("the answer"):
        print(text, end="", file=out, flush=True)


def answer_tune(recorder: Recorder, given: argparse.Namespace, out: TextIO) -> int:
    try:
        found = tuning(recorder, report=lambda k: print(f"{k.name}: {k.tried} schedules, {k.gain:.2f} times as fast", file=sys.stderr))
    except TokamakError as why:
        print(f"tokamak: {why}", file=sys.stderr)
        return 1
    tell(f"{found}\n", out)
    return 0


def answer_explain(recorder: Recorder, given: argparse.Namespace, out: TextIO) -> int:
    show(explanation(recorder), given.json, out)
    return 0


def answer_compile(recorder: Recorder, given: argparse.Namespace, out: TextIO) -> int:
    for record in recorder.graphs:
        tell(stage_text(record, given.until, given.exact) + "\n", out)
    return 0


def answer_verify(recorder: Recorder, given: argparse.Namespace, out: TextIO) -> int:
    if given.extract is not None:
        group_of(recorder.graphs, given.extract)            # an unknown one is known before anything is compared
    found = examined(recorder)
    show(found, given.json, out)
    if given.extract is not None:
        with writing(given.output or f"{given.extract}.py"):
            print(f"tokamak: wrote {found.extract(given.extract, given.output)}", file=sys.stderr)
    return int(not found.right)


def answer_profile(recorder: Recorder, given: argparse.Namespace, out: TextIO) -> int:
    found = profile_called(recorder, given.seconds, given.script)
    keep(found, given.json, out)
    for path, write in ((given.html, found.html), (given.trace, found.trace)):
        if path:
            with writing(path):
                print(f"tokamak: wrote {write(path)}", file=sys.stderr)
    failed = found.failures(given.fail_if)
    for text in failed:
        print(f"tokamak: {text}", file=sys.stderr)
    return int(bool(failed))


def answer_optimize(recorder: Recorder, given: argparse.Namespace, out: TextIO) -> int:
    keep(optimize_called(recorder, rungs_of(given), given.seconds), given.json, out)
    return 0


def keep(found, path: str, out: TextIO) -> None:
    """Shows something, and writes its JSON into the file `path`, if there is to be one."""
    show(found, path == "-", out)
    if path and path != "-":
        with writing(path), open(path, "w") as file:
            file.write(found.to_json(indent=1))
        print(f"tokamak: wrote {path}", file=sys.stderr)


ANSWERS: dict[str, Callable[[Recorder, argparse.Namespace, TextIO], int]] = {
    "explain": answer_explain, "compile": answer_compile, "verify": answer_verify, "profile": answer_profile, "optimize": answer_optimize,
    "tune": answer_tune}


def stage_text(record: GraphRecord, stage: str, exact: bool) -> str:
    """What `stage` made of a graph, under the graph's name; why there is nothing, if torch runs the graph."""
    if stage not in record.values:
        return f"-- {record.name}: {record.eager or 'stopped before'}"
    return f"-- {record.name}\n{exact_text(record) if exact and stage == 'render' else STAGE_TEXTS[stage](record)}"
