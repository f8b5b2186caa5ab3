"""Steps that are bound by launches, with CUDA graphs and without: a decode of one token, a layer at batch 1, small MLPs, in training too.

    python -m benchmarks.gpu_graphs [--cases NAME ...] [--sides eager,inductor+graphs,tokamak,tokamak+graphs] [--layers N] [--kept] [--json FILE]
                                    [--report] [--write]

Wall: microseconds a step, many in a row, the device waited for at the end. Host: until the host is done with a step, the device idle before it. Both
the least of several runs, in which the sides of a case take turns: what the host needs for a step changes by half within seconds. `error`: of the
result, against float64 (decode: against eager in float32), relative; steps that drop out at random have none.
`--kept`: compilers find what they kept of an earlier run; then first calls have no figure. `--json` adds every case to a file as soon as it is there;
`--report` measures nothing and shows what the file has.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tokamak import Options

from .gpu import write
from .gpu_host import WARM, under
from .gpu_measure import machine
from .gpu_sides import cold, kept

SIDES = ("eager", "inductor+graphs", "tokamak", "tokamak+graphs")
START, END = "<!-- gpu graphs: begin -->", "<!-- gpu graphs: end -->"
RUNS, STEPS = 6, 40


class Attention(nn.Module):
    """One token against a cache of `length` tokens, `kv` of `heads` heads hold keys; rotary positions."""

    def __init__(self, width: int, heads: int, kv: int, length: int):
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, kv * self.size, kv * self.size, width))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, kv, length, self.size))

    def turned(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def forward(self, x, at, mask, cos, sin):
        q, k, v = (f(x).view(1, 1, n, self.size).transpose(1, 2) for f, n in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv)))
        self.keys.index_copy_(2, at, self.turned(k, cos, sin))
        self.values.index_copy_(2, at, v)
        out = F.scaled_dot_product_attention(self.turned(q, cos, sin), self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(1, 1, -1))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, hidden: int, length: int):
        super().__init__()
        self.attention = Attention(width, heads, kv, length)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x, *where):
        x = x + self.attention(self.before(x), *where)
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """The next token's logits, of one token and its position: by default of Llama 3.2 1B's sizes."""

    def __init__(self, layers: int = 16, width: int = 2048, heads: int = 32, kv: int = 8, hidden: int = 8192, words: int = 128256, length: int = 512):
        super().__init__()
        self.words, self.norm = nn.Embedding(words, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, kv, hidden, length) for _ in range(layers))
        self.register_buffer("places", torch.arange(length))
        self.register_buffer("turns", 500000 ** (torch.arange(0, width // heads, 2).double() / -(width // heads)))

    def forward(self, token, at):
        x, angle = self.words(token), (at * self.turns).repeat(2)
        mask = (self.places <= at).view(1, 1, 1, -1)
        for layer in self.layers:
            x = layer(x, at, mask, angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        return F.linear(self.norm(x), self.words.weight)


@dataclass(frozen=True)
class Case:
    """`make(layers)`: a module and its inputs, on the CPU's default device at the time; `layers` None: as named. `train`: backward too."""
    make: Callable[[int | None], tuple[nn.Module, tuple]]
    dtype: torch.dtype
    train: bool = False
    drops: bool = False


def _decode(layers):
    return Decoder(layers or 16), (torch.tensor([[5]]), torch.tensor([7]))


def _encoder(dropout: float):
    def make(layers):
        made = [nn.TransformerEncoderLayer(1024, 16, 4096, dropout, "gelu", batch_first=True) for _ in range(layers or 1)]
        return nn.Sequential(*made), (torch.randn(1, 128, 1024),)
    return make


def _mlp(layers):
    made = [m for _ in range(layers or 4) for m in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())]
    return nn.Sequential(*made), (torch.randn(16, 512),)


CASES = {"llama_1b_decode": Case(_decode, torch.bfloat16), "bert_layer": Case(_encoder(0.0), torch.bfloat16),
         "bert_layer_train": Case(_encoder(0.1), torch.bfloat16, True, True), "mlp": Case(_mlp, torch.float32),
         "mlp_train": Case(_mlp, torch.float32, True)}


# -- one side of a case ----------------------------------------------------------------------------------------------------------
def built(case: Case, device: str, dtype: torch.dtype, layers: int | None) -> tuple[nn.Module, tuple]:
    """The same weights and inputs in any type."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with torch.device(device):
            model, inputs = case.make(layers)
    finally:
        torch.set_default_dtype(default)
    floating = lambda t: t.to(dtype) if t.is_floating_point() else t
    return model.to(dtype).train(case.train), tuple(map(floating, inputs))


def step(case: Case, fn: Callable, inputs: tuple, parameters: list) -> torch.Tensor:
    if not case.train:
        with torch.no_grad():
            return fn(*inputs)
    out = fn(*inputs)
    out.float().square().mean().backward()
    for p in parameters:
        p.grad = None
    return out.detach()


def measure(case: Case, sides: Sequence[str], device: str, layers: int | None, expected: torch.Tensor | None, keep: bool = False) -> dict[str, dict]:
    """Figures of each side; no first call where caches are kept."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    with kept() if keep else cold():
        made = {side: prepared(case, side, device, layers, expected, keep, wait) for side in sides}
        timed = times({side: call for side, (call, _) in made.items()}, wait)
    return {side: {**row, **timed[side]} for side, (_, row) in made.items()}


def prepared(case: Case, side: str, device: str, layers: int | None, expected: torch.Tensor | None, keep: bool,
             wait: Callable) -> tuple[Callable, dict]:
    """(what makes a step of `side`, warm; seconds of its first, its error, and bytes at its peak, the model among them)."""
    base = torch.cuda.memory_allocated() if device == "cuda" else 0
    model, inputs = built(case, device, case.dtype, layers)
    options = {"cache_dir": Options().cache_dir} if keep and side.startswith("tokamak") else {}
    fn, parameters = under(side, model, **options) if side != "eager" else model, list(model.parameters())
    start = time.perf_counter()
    call = lambda: step(case, fn, inputs, parameters)
    call()
    wait()
    made = {} if keep else {"first": time.perf_counter() - start}
    for _ in range(WARM):
        out = call()
    if expected is not None:
        made["error"] = float((out.double() - expected).norm() / expected.norm())
    del out
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        call()
        made["peak"] = torch.cuda.max_memory_allocated() - base
    return call, made


def times(calls: dict[str, Callable], wait: Callable) -> dict[str, dict]:
    """Seconds of each: a step among many, and the host's part of one by itself."""
    wall, host = {side: [] for side in calls}, {side: [] for side in calls}
    for _ in range(RUNS):
        for side, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                call()
            wait()
            wall[side].append((time.perf_counter() - start) / STEPS)
            for _ in range(4):
                wait()
                start = time.perf_counter()
                call()
                host[side].append(time.perf_counter() - start)
    wait()
    return {side: {"wall": min(wall[side]), "host": min(host[side])} for side in calls}


def expected(case: Case, device: str, layers: int | None) -> torch.Tensor | None:
    """What the result should be: in float64, or in float32 where float64 would not fit."""
    if case.drops:
        return None
    model, inputs = built(case, device, torch.float32 if case.dtype is torch.bfloat16 else torch.float64, layers)
    with torch.no_grad():
        return model(*inputs).double()


# -- all ---------------------------------------------------------------------------------------------------------------------------
def table(rows: dict[tuple[str, str], dict]) -> str:
    out = ["| step | side | wall us | host us | first call s | peak MB | error |", "|---|---|---:|---:|---:|---:|---:|"]
    for (case, side), r in rows.items():
        peak, error = (f"{r['peak'] / 1e6:.0f}" if "peak" in r else ""), (f"{r['error']:.1e}" if "error" in r else "")
        first = f"{r['first']:.1f}" if "first" in r else ""
        out.append(f"| {case} | {side} | {r['wall'] * 1e6:.1f} | {r['host'] * 1e6:.1f} | {first} | {peak} | {error} |")
    return "\n".join(out)


def arguments(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_graphs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--sides", type=lambda text: tuple(t for t in text.split(",") if t), default=SIDES)
    p.add_argument("--layers", type=int, help="instead of the case's own number")
    p.add_argument("--device", default="cuda", help="cpu: to try the command")
    p.add_argument("--kept", action="store_true", help="with the compilers' caches: first calls are not timed")
    p.add_argument("--json", type=pathlib.Path, help="results are added to this file")
    p.add_argument("--report", action="store_true", help="measure nothing: what --json has; needs no GPU")
    p.add_argument("--write", action="store_true", help="put the table into BENCHMARKS.md")
    return p.parse_args(argv)


def stored(path: pathlib.Path | None) -> dict:
    """What a file of results has: `run`, the machine; `rows`, by case and side."""
    kept = json.loads(path.read_text()) if path is not None and path.exists() else {"run": {}, "rows": []}
    return {"run": kept["run"], "rows": {(case, side): row for case, side, row in kept["rows"]}}


def store(path: pathlib.Path | None, found: dict) -> None:
    if path is not None:
        path.write_text(json.dumps({"run": found["run"], "rows": [[*key, row] for key, row in found["rows"].items()]}, indent=1))


def run(args: argparse.Namespace, found: dict) -> None:
    """Measures what is asked for into `found`, and prints and keeps each result."""
    torch.set_float32_matmul_precision("high")
    found["run"] = machine() if args.device == "cuda" else {}
    for name in args.cases:
        true = expected(CASES[name], args.device, args.layers)
        for side, row in measure(CASES[name], args.sides, args.device, args.layers, true, args.kept).items():
            found["rows"][name, side] = row
            print(table({(name, side): row}).splitlines()[-1], flush=True)
        store(args.json, found)


def main(argv=None) -> int:
    args = arguments(argv)
    if args.device == "cuda" and not args.report and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing can be measured here")
    found = stored(args.json)
    if args.report:
        print(table(found["rows"]))
    else:
        run(args, found)
    if args.write:
        made = "Machine: {device}, torch {torch}, Triton {triton}.".format(**found["run"])
        write(f"{made} Command: `python -m benchmarks.gpu_graphs`.\n\n{table(found['rows'])}", START, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
