"""Kernels of the Triton vocabulary for tests: text to a module; calls in Triton's interpreter, which wants a process of its own; or on a GPU."""
from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tokamak.codegen import triton_ops as vocabulary
from tokamak.ir.dtype import BOOL, DType
from tokamak.ir.ops import can_fail

HEAD = "import triton\nimport triton.language as tl\nfrom tokamak.codegen import triton_lib as tk\n\n\n"
BLOCK = 1024


@dataclass(frozen=True)
class Call:
    """One run of `kernel(*inputs, *outputs, err, n)` on `programs` programs; outputs are given as (shape, torch dtype)."""
    kernel: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    n: int = 0
    programs: int = 1


def torch_type(d: DType) -> torch.dtype:
    """The torch dtype of memory of type `d`."""
    return getattr(torch, {"bool": "bool", "u8": "uint8", "f16": "float16", "bf16": "bfloat16"}.get(
        d.name, d.name.replace("i", "int").replace("f", "float")))


def load(text: str, folder: Path):
    """The module of kernels `text`, written to `folder` (Triton reads the source of kernels back from their files)."""
    name = "kernels_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    path = folder / f"{name}.py"
    path.write_text(HEAD + text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(module, calls: list[Call], device: str) -> list[tuple[tuple[torch.Tensor, ...], int]]:
    """The outputs and the error word of each call."""
    out = []
    for c in calls:
        outputs = tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in c.outputs)
        error = torch.zeros(1, dtype=torch.int32, device=device)
        getattr(module, c.kernel)[(c.programs,)](*(x.to(device) for x in c.inputs), *outputs, error, c.n)
        out.append((tuple(x.cpu() for x in outputs), int(error.item())))
    return out


def interpret(text: str, calls: list[Call], folder: Path) -> list[tuple[tuple[torch.Tensor, ...], int]]:
    """`run` in Triton's interpreter."""
    torch.save((text, calls), folder / "calls.pt")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.codegen.triton_harness", str(folder)], cwd=root,
                          capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root)})
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt", weights_only=False)


def elementwise(name: str, takes: list[DType], expression: str) -> str:
    """A kernel that stores `expression` of registers x0, x1, ... of the types `takes`; `ok` is the mask of its lanes."""
    lines = [f"    x{k} = tl.load(p{k} + at, mask=ok, other=1)" + (".to(tl.int1)" if d is BOOL else "") for k, d in enumerate(takes)]
    return (f"@triton.jit\ndef {name}({', '.join(f'p{k}' for k in range(len(takes)))}, out, err, n):\n"
            f"    at = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})\n    ok = at < n\n"
            + "\n".join(lines) + f"\n    tl.store(out + at, {expression}, mask=ok)\n\n\n")


def operation(info, d: DType, fast: bool = False) -> str:
    """The elementwise kernel NAME_D of one row of the table on one type; integer divisions report code 7."""
    takes = [BOOL, d, d] if info.name == "where" else [d] * info.arity
    if can_fail(info.name, d):
        text = vocabulary.division(info.name, d, "x0", "x1", "ok", "err", 7)
    else:
        text = vocabulary.op(info.name, d, tuple(f"x{k}" for k in range(info.arity)), fast=fast)
    return elementwise(f"{info.name}_{d}{'_fast' * fast}", takes, text)


def elements(kernel: str, inputs: list[torch.Tensor], gives: torch.dtype) -> Call:
    """The call of an elementwise kernel."""
    n = len(inputs[0])
    return Call(kernel, tuple(inputs), (((n,), gives),), n, (n + BLOCK - 1) // BLOCK)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    kernels, wanted = torch.load(place / "calls.pt", weights_only=False)
    sys.modules["tests.codegen.triton_harness"] = sys.modules["__main__"]
    torch.save(run(load(kernels, place), wanted, "cpu"), place / "results.pt")
