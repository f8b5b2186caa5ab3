"""What a file written by `tokamak verify --extract` runs: it builds the kernel, runs it on the values that it had, checks and times it."""
from __future__ import annotations

import argparse
import ast
import base64
import builtins
import math
import os
import time
import zlib
from dataclasses import replace

import numpy as np
import torch

from .. import errors as raised
from ..capture.dtypes import TORCH_DTYPES
from ..check import differences
from ..ir.dtype import dtype
from ..ir.graph import Graph
from ..ir.meaning import array_type, bf16_from_bits
from ..ir.parse import parse_graph
from ..ir.reference import evaluate
from ..options import current
from ..runtime import gpu
from ..runtime.build import Unit, build
from ..runtime.gpu_build import GpuUnit
from ..runtime.program import Program, assemble
from .kernel_graph import exact
from .names import time_text


def main(file: str, text: str, units: list[Unit | GpuUnit], program: Program, errors: list, sizes: dict, values, device: str) -> int:
    """Runs the kernel of an extracted `file`; the exit status: 1 when a result is outside its policy. `device`: "C", "cpu" for Triton's interpreter,
    or a GPU. `values`: as `extract.packed` wrote them."""
    parser = argparse.ArgumentParser(description="reproduces, checks and times one kernel")
    parser.add_argument("--seconds", type=float, default=0.5, help="of calls to time")
    given = parser.parse_args()
    if isinstance(values, str):
        with open(os.path.join(os.path.dirname(os.path.abspath(file)), values)) as beside:
            values = ast.literal_eval(beside.read())
    graph = parse_graph(text)
    raising = tuple((getattr(builtins, kind, None) or getattr(raised, kind), words) for kind, words in errors)
    call = assemble(replace(program, errors=raising), built(units, device))
    where = "cpu" if device == "C" else device
    arrays, tensors = zip(*(unpacked(v, where) for v in values)) if values else ((), ())
    status = check(graph, list(arrays), [as_array(t) for t in call([fresh(t) for t in tensors])], sizes)
    print(f"time: {time_text(shortest(call, tensors, given.seconds, device))}, the shortest of many calls with what the host does for them")
    return status


def built(units: list[Unit | GpuUnit], device: str) -> dict:
    options = current()
    if device == "C":
        return build(units, cache_dir=options.cache_dir, cc=options.cc)
    if device == "cpu":
        from ..runtime.gpu_interpret import interpreted
        return {u.name: interpreted(u) for u in units}
    return gpu.kernels(units, gpu.arch(device), cache_dir=options.cache_dir, cc=options.cc)


def unpacked(value, device: str) -> tuple:
    """(as the reference wants it, as the kernel does): an array and a tensor, or a number twice."""
    if not isinstance(value, tuple):
        return value, value
    name, shape, strides, text = value
    kind = dtype(name)
    bits = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint16 if name == "bf16" else array_type(kind)).reshape(shape)
    array = bf16_from_bits(bits) if name == "bf16" else bits.copy()
    tensor = torch.from_numpy(array).to(device, TORCH_DTYPES[kind])
    if strides is not None and tensor.numel():
        window = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        made[window].copy_(tensor[window])
        tensor = made
    return array, tensor


def fresh(x):
    """A copy that may be written to, with the same strides."""
    if not isinstance(x, torch.Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    window = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
    made[window].copy_(x[window])
    return made


def as_array(t: torch.Tensor) -> np.ndarray:
    t = t.detach().cpu()
    return (t.float() if t.dtype is torch.bfloat16 else t).numpy()


def check(graph: Graph, args: list, got: list[np.ndarray], sizes: dict) -> int:
    """Compares what the kernel stored with what the graph means, and prints it."""
    nodes = [v.node for v in graph.outputs]
    wrong: dict = {}
    differences(graph, args, {}, dict(zip(nodes, got)), wrong.setdefault)
    wide, new = exact(graph)
    sharp = evaluate(wide, args, sizes=sizes).values
    for n, (node, found) in enumerate(zip(nodes, got)):
        want = np.asarray(sharp[new[node]])
        both = np.isfinite(want.astype(np.float64)) & np.isfinite(found.astype(np.float64))
        error = np.linalg.norm((found.astype(np.float64) - want)[both]) / (np.linalg.norm(want.astype(np.float64)[both]) or 1.0)
        print(f"result {n}: {node.dtype}{list(found.shape)}, {error:.3g} from float64, {wrong.get(node) or 'within its policy'}")
    return int(bool(wrong))


def shortest(call, tensors, seconds: float, device: str) -> float:
    """The shortest time of a call, and of waiting for it on a GPU."""
    wait = torch.cuda.synchronize if device not in ("C", "cpu") else lambda: None
    ready, best, end = [fresh(t) for t in tensors], math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < end:
        args = list(ready)
        wait()
        start = time.perf_counter()
        call(args)
        wait()
        best = min(best, time.perf_counter() - start)
    return best
