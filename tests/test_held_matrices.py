"""Sums down the columns of several matrices that are written on the way (modulation's gradient): a program holds the rows of some columns where those
are few, whatever the words, and nothing is left to a second kernel. Right, whichever way."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu_plans
from benchmarks.gpu_cases import case
from benchmarks.gpu_sides import compiled, once, reference
from tokamak import backend
from tokamak.tools.record import recording

HELD, LIE = r"^tile\(i1:[\d+]+\??, i2:\d+\?\) warps", r"^tile\(i2:2048\?\) split\(i1"


@pytest.mark.parametrize("name", ["modulate_bwd_f16_5000x3x64", "modulate_bwd_f32_900x256x100", "modulate_bwd_bf16_64x256x1152"])
def test_one_kernel(name):
    kernel, = gpu_plans.planned(name)
    assert "split(" not in kernel["schedule"] and "i1:" in kernel["schedule"]


@pytest.mark.parametrize("name", ["modulate_bwd_f16_60x257x5569", "modulate_bwd_bf16_10x256x1152"])
def test_more_rows_or_fewer_columns_are_shared(name):
    first, *others = gpu_plans.planned(name)
    assert "split(i1 / " in first["schedule"] and others


@pytest.mark.parametrize("name, threads, found", [
    ("modulate_bwd_f32_41x6x823", 132, HELD), ("modulate_bwd_f16_33x7x1025", 132, HELD), ("modulate_bwd_bf16_40x26x823", 1, HELD),
    ("modulate_bwd_f32_2x6x4101", 1, LIE), ("modulate_bwd_f16_2x11x4101", 1, LIE), ("modulate_bwd_f32_2x300x4101", 1, "shifted"),
    ("modulate_bwd_f32_1x6x4101", 132, "shifted")])
def test_they_are_right(monkeypatch, name, threads, found):
    """Outputs and gradients against float64, planned for a GPU of so many multiprocessors."""
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "target", lambda *_: replace(gpu_plans.H200, threads=threads))
    made = case(name)
    inputs = made.inputs("cpu", seed=torch.seed() % 1000)
    with recording() as recorder:
        got = once(made, compiled("tokamak", made.fn, cached=True, target="interpret", strict=True), inputs, 0)
    schedules = [str(s) for _, s in recorder.graphs[-1].values["lower"].bodies.values()]
    assert any(re.search(found, s) for s in schedules), schedules
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[made.dtype]
    for a, b in zip(got, reference(made, inputs, 0), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().max()))
