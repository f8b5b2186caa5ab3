"""Floats of a program that torch hands to a graph as tensors without dimensions on the CPU, where the graph computes on another device."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tokamak.capture import tables  # noqa: F401 (fills the registry)
from tokamak.capture.fx import Capture
from tokamak.codegen.host import host_program
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.fuse.plan import plan
from tokamak.ir.graph import Compute
from tokamak.ir.reference import evaluate
from tokamak.ir.rewrite import simplify
from tokamak.runtime.program import source
from tokamak.target import target


def scaled(x, s, n):
    t = torch.true_divide(torch.scalar_tensor(2.0, dtype=torch.float64), torch.sqrt(s))
    return x * t.to(torch.float32) + n, torch.where(x > s, x, t)


def captured(fn, *inputs):
    return simplify(Capture(make_fx(fn)(*inputs)).graph())


NUMBERS = torch.tensor(3.0, dtype=torch.float64), torch.tensor(4)


def test_they_become_numbers_of_the_host():
    graph = captured(scaled, torch.empty(4, 5, device="meta"), *NUMBERS)
    assert {n.device for n in graph.nodes if isinstance(n, Compute)} == {"meta"}
    x = torch.randn(4, 5)
    found = evaluate(graph, [x.numpy(), np.float64(3.0), np.int64(4)]).outputs
    for got, want in zip(found, scaled(x, *NUMBERS), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want)


def test_the_program_passes_them_at_each_call():
    machine = replace(target("cpu", interpret=True), name="meta")
    lowered = lower_plan(schedule_plan(plan(captured(scaled, torch.empty(4, 5, device="meta"), *NUMBERS), machine), machine), machine)
    program = host_program(lowered.plan, render_plan(lowered), {})
    words = [text for s in program.steps for kind, text in getattr(s, "words", ()) if kind in ("float", "int")]
    assert {"s_1.item()", "n_1.item()"} <= set(words)
    text = source(program)
    assert "s_1.item()" in text and "del s_1" not in text and "del n_1" not in text


def test_on_the_cpu_they_stay_tensors():
    graph = captured(scaled, torch.empty(4, 5), *NUMBERS)
    assert ".item()" not in str([n.expr for n in graph.nodes if isinstance(n, Compute)])


def test_a_result_on_the_cpu_stays_there():
    graph = captured(lambda x, s, n: (x * s, s * 2 + n), torch.empty(4, 5, device="meta"), *NUMBERS)
    assert {n.device for n in graph.nodes if isinstance(n, Compute)} == {"meta", "cpu"}
