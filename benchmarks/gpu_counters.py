"""The bytes that tokamak says its kernels move, against the hardware's counters.

    python -m benchmarks.gpu_counters [CASE ...] [--json FILE [--report]] [--write]

Each case runs once, compiled, under Nsight Compute (`ncu`, https://docs.nvidia.com/nsight-compute), which empties the caches before every kernel and
counts the bytes that DRAM reads and writes. `counted` is what `tokamak.explain` reports of the kernel. At its end some of what a kernel has written
is still in the second-level cache, so that counters are below by at most that cache: the cases are large. --report measures nothing and shows the
FILE;
--write puts the table into BENCHMARKS.md. Exit status 1 if a kernel is off by over 10%.
"""
from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .gpu import write

START, END = "<!-- gpu counters: begin -->", "<!-- gpu counters: end -->"
CASES = ("gelu_chain_f32_256Mi", "swiglu_bf16_16384x16384", "sum_inner_f32_16384x16384", "sum_outer_f32_16384x16384", "softmax_f32_16384x8191",
         "layernorm_bf16_16384x16384", "layernorm_bwd_bf16_16384x8192", "rmsnorm_bwd_bf16_16384x8192", "batchnorm_f32_nchw_64x256x112x112",
         "cross_entropy_bf16_8192x50257")
METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"
WITHIN = 0.1
LEAST = 256 << 20           # bytes of a kernel that is judged: smaller ones stay in the caches


@dataclass(frozen=True)
class Counted:
    """One kernel. Bytes: `said` by tokamak, `fewest` any kernel moves for it, `read` and `written` by DRAM."""
    case: str
    kernel: str
    operations: str
    said: int
    fewest: int
    read: int
    written: int

    @property
    def off(self) -> float:
        """By how much what is said differs from what is counted, as a share of the latter."""
        return self.said / (self.read + self.written) - 1

    @property
    def judged(self) -> bool:
        return self.said >= LEAST


# -- in the process that ncu watches -------------------------------------------------------------------------------------------
def run(names: list[str]) -> list[dict]:
    """Runs each case once between the profiler's marks; what tokamak says of its kernels, in the order in which they run."""
    from tokamak.tools.explain import explanation
    from tokamak.tools.record import recording

    from . import gpu_cases, gpu_sides
    said = []
    for name in names:
        case = gpu_cases.case(name)
        inputs = gpu_sides.own(case, case.inputs("cuda"))
        with gpu_sides.cold(), recording() as recorder:
            fn = gpu_sides.compiled("tokamak", case.fn)
            for marked in (False, True):
                torch.cuda.synchronize()
                if marked:
                    torch.cuda.cudart().cudaProfilerStart()
                gpu_sides.once(case, fn, inputs, 0)
                torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        said += [{"case": name, "kernel": k.key, "operations": " ".join(k.operations), "said": k.bytes, "fewest": k.fewest}
                 for k in explanation(recorder).kernels]
    return said


# -- around it -------------------------------------------------------------------------------------------------------------------
def counted(names: list[str], ncu: str) -> tuple[Counted, ...]:
    """Runs the cases under ncu. Raises RuntimeError with its words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said.json")
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base",
                   "--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.gpu_counters", "--said", str(said), *names]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not said.exists():
            raise RuntimeError(f"{ncu} failed:\n{(done.stderr + done.stdout)[-2000:]}")
        return tuple(paired(json.loads(said.read_text()), list(rows(done.stdout))))


def rows(text: str) -> Iterator[dict[str, str]]:
    """The kernels of what ncu printed: column -> text. The row of units has no number."""
    table = [line for line in text.splitlines() if line.startswith('"')]
    return (r for r in csv.DictReader(table) if r["ID"])


def paired(said: list[dict], seen: list[dict[str, str]]) -> Iterator[Counted]:
    """What was said beside what was counted: kernels are known by name, equal names in order. Kernels of torch's own are left aside."""
    waiting = list(seen)
    for k in said:
        found = next((r for r in waiting if r["Kernel Name"] == k["kernel"]), None)
        if found is not None:
            waiting.remove(found)
            yield Counted(**k, **{field: round(float(found[m].replace(",", ""))) for field, m in zip(("read", "written"), METRICS)})


def table(found: tuple[Counted, ...]) -> str:
    """For BENCHMARKS.md."""
    mib = lambda n: f"{n / (1 << 20):.0f}"
    lines = [f"| {c.case} | {c.operations.split()[-1]} | {mib(c.said)} | {mib(c.read)} | {mib(c.written)} | {c.off:+.1%} |"
             for c in found if c.judged]
    return "\n".join(("| case | the kernel's last operation | counted, MiB | read | written | off |", "|---|---|---|---|---|---|", *lines))


def arguments(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_counters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*", default=list(CASES))
    p.add_argument("--json", type=Path)
    p.add_argument("--report", action="store_true")
    p.add_argument("--write", action="store_true")
    p.add_argument("--said", type=Path, help=argparse.SUPPRESS)
    return p.parse_args(argv)


def main(argv=None) -> int:
    args = arguments(argv)
    if args.said:
        args.said.write_text(json.dumps(run(args.cases)))
        return 0
    if args.report:
        found = tuple(Counted(**c) for c in json.loads(args.json.read_text()))
    else:
        ncu = shutil.which("ncu")
        if ncu is None or not torch.cuda.is_available():
            sys.exit("needs a CUDA device and Nsight Compute (`ncu`) on the PATH")
        found = counted(args.cases, ncu)
        if args.json:
            args.json.write_text(json.dumps([asdict(c) for c in found], indent=1))
    print(f"{'case':34} {'kernel':20} {'said MB':>9} {'fewest':>9} {'read':>9} {'written':>9} {'off':>6}")
    for c in found:
        print(f"{c.case:34} {c.kernel[:20]:20} {c.said / 1e6:9.1f} {c.fewest / 1e6:9.1f} {c.read / 1e6:9.1f} {c.written / 1e6:9.1f} "
              f"{f'{c.off:+.1%}' if c.judged else 'small':>6}  {c.operations[:60]}")
    if args.write:
        write(table(found), START, END)
    judged = [c for c in found if c.judged]
    far = [c for c in judged if abs(c.off) > WITHIN]
    print(f"{len(judged)} kernels of at least {LEAST >> 20} MiB, {len(far)} off by more than {WITHIN:.0%}")
    return 1 if far or not judged else 0


if __name__ == "__main__":
    sys.exit(main())
