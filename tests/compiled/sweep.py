"""The whole operator database through the compiler, against eager.

    python -m tests.compiled.sweep                      every operator and type, four samples each, forward and backward
    python -m tests.compiled.sweep --all                every sample
    python -m tests.compiled.sweep --ops softmax var --dtypes float32 bfloat16
    python -m tests.compiled.sweep --target interpret   as a GPU runs it, in Triton's interpreter (or on it: cuda)
    python -m tests.compiled.sweep --table docs/operators.md --shards 2
    python -m tests.compiled.sweep --rows FILE          goes on where a run that wrote FILE stopped

Workers run the cases one after another and report each; a worker that dies is a failed case, and another goes on behind it.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokamak.capture.registry import NO_KERNEL

MEANS = """\
*Compiled*: all that it computes becomes part of kernels. *Opaque*: torch's own operator runs, as a call between kernels. *Partly opaque*: so do some
of its types, its variants or its gradient; the last column says which of torch's operators are called and why, and names alone those that have no
kernel. A call gives what it gives in eager, in the same time; it is not fused with what stands around it. `tokamak explain` lists a program's calls,
`tokamak profile` what they take. Where one takes long, write it in compiled operators, or give it an entry (ARCHITECTURE.md, "An operator")."""


def main() -> int:
    args = arguments()
    from tests.compiled.op_cases import Case, cases
    chosen = cases(args.ops, args.dtypes, 10**6 if args.all else args.samples, args.part, target=args.target)
    chosen = [c for c in chosen if c.name >= args.start]
    if args.worker is not None:
        return work([Case(*c) for c in json.loads(Path(args.worker).read_text())])
    found = kept(args.rows, chosen)
    known = {(r["name"], r["dtype"]) for r in found}
    left = [c for c in chosen if (c.name, c.dtype) not in known]
    with ThreadPoolExecutor(args.shards) as pool:
        for rows in pool.map(lambda i: shard(left[i::args.shards], args.rows), range(args.shards)):
            found += rows
    found.sort(key=lambda r: (r["name"], r["dtype"]))
    text = table(found, asked(sys.argv[1:]))
    failed = [r for r in found if r["failed"]]
    if args.table:
        Path(args.table).write_text(text)
    else:
        print(text)
    print(f"{len(found)} cases, {sum(r['runs'] for r in found)} samples compared ({sum(r['backward'] for r in found)} with gradients), "
          f"{len(failed)} cases failed")
    for r in failed:
        print(f"  {r['name']} {r['dtype']}: " + "; ".join(f"{a}: {b}" for a, b in r["failed"][:2]))
    return bool(failed)


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.compiled.sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", help="operators by name; all without it")
    parser.add_argument("--dtypes", nargs="*", help="float32 float64 bfloat16 float16 int64 bool; all without it")
    parser.add_argument("--samples", type=int, default=4, help="samples of each operator and type")
    parser.add_argument("--all", action="store_true", help="every sample")
    parser.add_argument("--part", type=float, default=1.0, help="share of the cases, a fixed stratified sample")
    parser.add_argument("--start", default="", help="the first operator, in alphabetical order")
    parser.add_argument("--target", default="", choices=("", "interpret", "cuda"), help="C on the CPU, Triton's interpreter, or the GPU")
    parser.add_argument("--shards", type=int, default=1, help="workers at once")
    parser.add_argument("--table", help="file to write the table to")
    parser.add_argument("--rows", help="file to which each case's outcome is added; cases whose outcome it holds are not run again")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(chosen) -> int:
    """Runs `chosen`, one line of JSON a case, on standard output."""
    import torch
    from tests.compiled.op_cases import examine
    torch.set_num_threads(2)
    for case in chosen:
        print(json.dumps(examine(case).row()), flush=True)
    return 0


def kept(file: str | None, chosen) -> list[dict]:
    """The outcomes of `chosen` that `file` holds, the last one of each case."""
    if file is None or not Path(file).exists():
        return []
    wanted = {(c.name, c.dtype) for c in chosen}
    rows = {(r["name"], r["dtype"]): r for r in map(json.loads, Path(file).read_text().splitlines())}
    return [r for case, r in rows.items() if case in wanted]


def asked(argv: list[str]) -> str:
    """The arguments that say what was run, without those that say how."""
    out, rest = [], iter(argv)
    for a in rest:
        if a in ("--rows", "--shards"):
            next(rest, None)
        else:
            out.append(a)
    return " ".join(out)


def shard(chosen, file: str | None = None) -> list[dict]:
    """The outcomes of `chosen`, from worker processes; each is added to `file` as it comes."""
    rows: list[dict] = []

    def report(row: dict) -> None:
        rows.append(row)
        show(row)
        if file is not None:
            with open(file, "a") as out:
                out.write(json.dumps(row) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        todo = Path(folder) / "cases.json"
        while len(rows) < len(chosen):
            left = chosen[len(rows):]
            todo.write_text(json.dumps([(c.name, c.dtype, c.most, c.target) for c in left]))
            worker = subprocess.Popen([sys.executable, "-m", "tests.compiled.sweep", "--worker", str(todo)], stdout=subprocess.PIPE, text=True,
                                      stderr=subprocess.DEVNULL)
            for line in worker.stdout:
                if line.startswith("{"):
                    report(json.loads(line))
            worker.wait()
            if worker.returncode and len(rows) < len(chosen):
                c = chosen[len(rows)]
                report({"name": c.name, "dtype": c.dtype, "runs": 0, "graphs": 0, "kernels": 0, "backward": 0, "opaque": {}, "untraced": {},
                        "skipped": "", "failed": [["?", f"crash: the process died with {worker.returncode}"]]})
    return rows


def show(row: dict) -> None:
    for sample, what in row["failed"][:3]:
        print(f"FAILED {row['name']} {row['dtype']} {sample}: {what}", flush=True)


def table(rows: list[dict], arguments: str) -> str:
    """The outcomes by operator, as Markdown."""
    by_op: dict[str, list[dict]] = defaultdict(list)
    for r in rows:
        by_op[r["name"]].append(r)
    kinds: dict[str, list] = {"failed": [], "compiled": [], "partly opaque": [], "opaque": [], "not run": []}
    for name, found in sorted(by_op.items()):
        kinds[kind(found)].append((name, found))
    out = ["# Operators", "",
           f"Made by `python -m tests.compiled.sweep {arguments}`: torch's operator database through the compiler, against eager.", ""]
    out += [f"Torch {torch_version()}: {len(rows)} cases (an operator in a type), {sum(r['runs'] for r in rows)} samples compared, "
            f"{sum(r['backward'] for r in rows)} of them with gradients.", ""]
    out += ["| | operators |", "|---|---|", *(f"| {k} | {len(v)} |" for k, v in kinds.items()), "", MEANS]
    for k, found in kinds.items():
        if not found:
            continue
        out += ["", f"## {k[0].upper()}{k[1:]}", ""]
        if k == "compiled":
            out.append(", ".join(f"`{n}`" for n, _ in found))
            continue
        out += ["| operator | types | why |", "|---|---|---|"]
        out += [f"| `{n}` | {', '.join(r['dtype'] for r in rs)} | {why(k, rs)} |" for n, rs in found]
    return "\n".join(out) + "\n"


def torch_version() -> str:
    return importlib.metadata.version("torch")


def kind(rows: list[dict]) -> str:
    if any(r["failed"] for r in rows):
        return "failed"
    if not any(r["runs"] for r in rows):
        return "not run"
    if not any(r["opaque"] for r in rows):
        return "compiled"
    return "partly opaque" if any(r["kernels"] for r in rows) else "opaque"


def why(k: str, rows: list[dict]) -> str:
    if k == "failed":
        return "; ".join(dict.fromkeys(f"{r['dtype']}: {w}" for r in rows for _, w in r["failed"][:1])).replace("|", "\\|")
    if k == "not run":
        return "; ".join(dict.fromkeys(r["skipped"] for r in rows)).replace("|", "\\|")
    said = dict.fromkeys(op if reason == NO_KERNEL else f"{op}: {reason}" for r in rows for op, reason in r["opaque"].items())
    return "; ".join(said).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
