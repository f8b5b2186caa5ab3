"""The rings of slots in shared memory that Triton's pipeline makes of the loops of products, without a GPU: no step is read into a slot that a
product in flight still reads. (Products on an H200 run on while the next step is read; Triton keeps the slot that takes only where a read has no
other use.)"""
from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from functorch.compile import aot_function
from tests.compiled.harness import gradients, leaves
from tokamak.backend import compile_graph
from tokamak.capture import aot, decompose
from tokamak.capture.partition import partition
from tokamak.options import Options
from tokamak.runtime import gpu_worker
from tokamak.trace import Stopped

compiler = pytest.importorskip("triton.compiler")
NAME = r"%[\w#]+"
COPIES = ("async_copy_global_to_local", "async_tma_copy_global_to_local")


def values(*shape, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).requires_grad_(grad)


def units(fn, tensors) -> dict:
    """The kernels of `fn`, forward and backward, for a GPU of 132 multiprocessors, contractions among them; also the ones by addresses."""
    found: dict = {}

    def trace(stage, value):
        if stage == "target":
            return replace(value, threads=132)
        if stage == "render":
            every = [p.unit for b in value.values() for p in b.parts]
            found.update({(u.name, v.text): v for u in every for v in (u, u.relying(u.divisible)) if "tk.dot" in v.text})
            raise Stopped
        return value

    def one(gm, inputs):
        try:
            compile_graph(gm, inputs, Options(target="interpret", contractions="kernels"), trace)
        except Stopped:
            pass
        return aot.eager(gm)
    outs = leaves(aot_function(fn, fw_compiler=one, bw_compiler=one, inference_compiler=one, partition_fn=partition,
                               decompositions=decompose.TRAINING)(*tensors))
    if any(t.requires_grad for t in tensors):
        gradients(outs, tensors)
    return found


def pipelined(unit, folder, monkeypatch) -> list[str]:
    """The lines of a kernel as the pipeline leaves it, for sm_90."""
    made, usual = [], compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda *a, **k: made.append(usual(*a, **k)) or made[-1])
    gpu_worker.compile_job({**asdict(unit), "divisible": sorted(unit.divisible), "arch": ("cuda", 90, 32)}, str(folder))
    monkeypatch.undo()
    return made[-1].asm["ttgir"].splitlines()


def rings(lines: list[str]) -> list[tuple[int, int, int]]:
    """(slots, steps read before the loop begins, products that may run on behind one) of each ring that a product in a loop reads."""
    slots, views, loop, stack, found = {}, {}, {}, [], []
    for n, line in enumerate(lines):
        if m := re.match(rf"\s*({NAME}) = ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x", line):
            slots[m[1]] = int(m[2])
        if m := re.match(rf"\s*({NAME}) = ttg\.memdesc_\w+ ({NAME})", line):
            views[m[1]] = m[2]
        indent = len(line) - len(line.lstrip())
        stack += [(n, indent)] if "scf.for" in line else []
        loop[n] = stack[-1][0] if stack else None
        if stack and line.strip().startswith("}") and indent == stack[-1][1]:
            stack.pop()

    def root(view: str) -> str:
        while view in views:
            view = views[view]
        return view
    copies = [(n, {root(v) for v in re.findall(NAME, line)}) for n, line in enumerate(lines) if any(c in line for c in COPIES)]
    for n, line in enumerate(lines):
        if "warp_group_dot " not in line or loop[n] is None:
            continue
        behind = next(x for x in lines[n:] if "warp_group_dot_wait" in x)
        for ring in map(root, re.findall(NAME, line.split("warp_group_dot ")[1])[:2]):
            before = sum(ring in read and k < loop[n] for k, read in copies)
            if ring in slots and any(ring in read and loop[k] == loop[n] for k, read in copies):
                found.append((slots[ring], before, int(re.search(r"pendings = (\d+)", behind)[1])))
    return found


wide, few = (lambda: values(512, 512)), (lambda: values(16, 256))
narrow = lambda: [values(300, 64, grad=True), *(values(*s, grad=True) for s in ((128, 64), (128,), (64, 128), (64,)))]
PROGRAMS = {
    "a gate": (lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), lambda: [wide() for _ in range(3)]),
    "a gate of what is transposed": (lambda x, a, b: F.silu(x.t() @ a) * (x.t() @ b), lambda: [wide() for _ in range(3)]),
    "two rows by one weight": (lambda x, y, a: (F.linear(x, a) - F.linear(y, a)).abs(), lambda: [wide() for _ in range(3)]),
    "a sum of rows beside": (lambda x, g: (g.t() @ x, g.sum(0), x.sum(0)), lambda: [values(4096, 256), values(4096, 192)]),
    "few rows": (lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), lambda: [few(), values(8704, 256), values(8704, 256)]),
    "weights, and what is computed from them": (lambda x, a, d: F.linear(x, a) * F.linear(x, a + d),
                                                lambda: [few(), values(8704, 256), values(8704, 256)]),
    "weights, and scaled ones": (lambda x, a, s: F.linear(x, a) + F.linear(x, a * s),
                                 lambda: [few(), values(8704, 256), values(8704, 1)]),
    "narrow layers": (lambda x, w, b, v, c: F.linear(F.silu(F.linear(x, w, b)), v, c), narrow),
    "narrow layers in two halves": (lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c),
                                    lambda: [values(*s, grad=True) for s in ((600, 128), (256, 128), (256,), (128, 256), (128,))]),
    "narrow layers with a residual": (lambda x, w, b, v, c: x + F.linear(F.silu(F.linear(x, w, b)), v, c), narrow),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_step_is_read_into_a_slot_in_use(name, tmp_path, monkeypatch):
    fn, make = PROGRAMS[name]
    found = [ring for unit in units(fn, make()).values() for ring in rings(pipelined(unit, tmp_path, monkeypatch))]
    assert found and all(pending == 0 or slots > ahead for slots, ahead, pending in found)
