"""A large GPU to plan for, texts of graphs and what is asked of kernels built for it, for tests of several files."""
from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks import gpu_plans
from benchmarks.gpu_cases import case
from benchmarks.gpu_sides import compiled, forward, gradient, leaves
from tokamak import backend
from tokamak.codegen.stages import Scheduled, lower_plan, render_plan
from tokamak.runtime import gpu_build
from tokamak.target import Target
from tokamak.tools.record import recording

LARGE = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8)

PLANES = """graph planes {{
  input %x: {d}[{n}, {c}, {p}]({c}*{p}, {p}, 1)
  input %w: {d}[{c}](1)
  %sum: f32[{n}](1) for i1<{c}, i2<{p} = sum[i1, i2](f32(%x[i0, i1, i2]))
  %out: {d}[{n}, {c}, {p}]({c}*{p}, {p}, 1) = {d}(mul(mul(f32(%x[i0, i1, i2]), %sum[i0]), f32(%w[i1])))
  return %out
}}"""
ALONG_ROWS = """graph prefixes {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(scan_sum[i1](f32(%x[i0, i1])))
  return %out
}}"""
SOFTMAX = """graph softmax {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %top: f32[{rows}](1) for i2<{columns} = max[i2](f32(%x[i0, i2]))
  %sum: f32[{rows}](1) for i2<{columns} = sum[i2](exp(sub(f32(%x[i0, i2]), %top[i0])))
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(div(exp(sub(f32(%x[i0, i1]), %top[i0])), %sum[i0]))
  return %out
}}"""


def spills(made: Scheduled) -> list:
    """Those of a plan's kernels that do not stay in registers, as they are built."""
    units = [part.unit for built in render_plan(lower_plan(made, LARGE)).values() for part in built.parts]
    return [found for found in gpu_build.build(units, LARGE.arch).values() if found.spilled]


def alike(size: int, count: int) -> str:
    """So many pieces of one size."""
    return "+".join([str(size)] * count)


def right_on_one(monkeypatch, name: str) -> list:
    """Schedules of the benchmarks' case `name`, planned for a GPU of one multiprocessor and interpreted, once its outputs and gradients are as those
    of float64."""
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "target", lambda *_: replace(gpu_plans.H200, threads=1))
    made = case(name)
    inputs = made.inputs("cpu", seed=torch.seed() % 1000)
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs]
    with recording() as recorder:
        got = forward(made, compiled("tokamak", made.fn, cached=True, target="interpret", strict=True), inputs)
        dy = gradient(got, 0) if made.mode == "backward" else None
        grads = torch.autograd.grad(got, leaves(inputs), dy) if dy is not None else ()
    want = forward(made, made.fn, wide)
    pairs = list(zip(got, want, strict=True)) if isinstance(got, tuple) else [(got, want)]
    pairs += zip(grads, torch.autograd.grad(want, leaves(wide), dy.double()), strict=True) if dy is not None else ()
    for a, b in pairs:
        if a.is_floating_point():
            tolerance = 1e-4 if a.dtype is torch.float32 else 2e-2
            torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * float(b.abs().max()) + 1e-6)
        else:
            assert torch.equal(a, b)
    return [s for r in recorder.graphs for _, s in r.values["lower"].bodies.values()]
