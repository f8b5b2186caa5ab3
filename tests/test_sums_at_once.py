"""Sums of one row that several warps hold, made at once on a GPU."""
from __future__ import annotations

import re

import pytest
import torch

import tokamak
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.runtime import gpu_build
from tokamak.target import Target

H200 = Target("cpu", 16, 132, l1=1 << 18, l2=60 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8)


def kernels(text: str) -> list:
    """The units of a graph's kernels."""
    lowered = lower_plan(schedule_plan(plan(parse_graph(text), H200), H200), H200)
    return [part.unit for built in render_plan(lowered).values() for part in built.parts]


def sums(*values: str, columns: int = 3136, extra: str = "") -> str:
    """The text of a graph that sums each of `values` along rows."""
    names = [f"%sum{n}" for n in range(len(values))]
    made = "\n  ".join(f"{name}: f32[8192](1) for i1<{columns} = sum[i1]({value})" for name, value in zip(names, values))
    return f"""graph sums {{
  input %x: f32[8192, {columns}]({columns}, 1)
  input %y: f32[8192, {columns}]({columns}, 1)
  input %w: f32[8192](1)
  {made}
  {extra}
  return {', '.join(names)}{', %out' if extra else ''}
}}"""


X, Y, W = "%x[i0, i1]", "%y[i0, i1]", "%w[i0]"
HEAVY = f"mul({Y}, sigmoid(mul({W}, {X})))"


def test_sums_that_need_nothing_of_each_other_are_made_at_once_piece_by_piece():
    unit, = kernels(sums(X, f"mul({X}, {Y})", Y))
    lines = unit.text.splitlines()
    assert [len(re.findall(r"\w+", line.split(" = ")[0])) for line in lines if "tk.sums3(" in line] == [3, 3, 3]          # 2048 + 1024 + 64
    assert max(n for n, line in enumerate(lines) if "tl.load" in line) < min(n for n, line in enumerate(lines) if "tk.sums3(" in line)
    assert "tl.sum(" not in unit.text


def test_a_sum_that_needs_another_waits_for_it():
    unit, = kernels(sums(X, Y, f"mul({X}, {Y})", f"mul({Y}, sub({X}, %sum0[i0]))"))
    assert unit.text.count("tk.sums3(") == 3 and unit.text.count("tl.sum(") == 3


@pytest.mark.parametrize("text", [sums(X, Y, HEAVY, columns=64), sums(X, Y, HEAVY, columns=16384), sums(X, Y)])
def test_what_one_warp_holds_loops_read_or_are_two_are_summed_one_by_one(text):
    assert not any("tk.sums" in unit.text for unit in kernels(text))


def test_what_elements_share_is_computed_before_any_is_read():
    """With the division behind what is known of the elements by then the compiler takes 124 registers."""
    unit, = kernels(sums(X, f"div({HEAVY}, {W})", f"div(div({HEAVY}, {W}), {W})", f"mul({X}, {HEAVY})", Y))
    lines = unit.text.splitlines()
    reads = [n for n, line in enumerate(lines) if re.search(r"tl\.load\(.* i\d+[,)]", line)]
    assert len(reads) == 6 and max(n for n, line in enumerate(lines) if "tl.div_rn" in line) < reads[0]
    made = gpu_build.build([unit], H200.arch)[unit.name]
    assert made.registers <= 64 and not made.spilled


@pytest.mark.parametrize("columns", [3136, 1025, 3001])
def test_sums_made_at_once_are_right(columns):
    x, y = torch.randn(2, 3, columns)
    y[1, 5] = float("inf")
    x[2, 7] = float("nan")
    fn = lambda x, y: (x.sum(1), (x * y / 3).sum(1), y.sum(1), torch.sigmoid(x).sum(1), (x * x * y).sum(1), (x + y).sum(1))
    for got, want in zip(tokamak.compile(fn, target="interpret", strict=True)(x, y), fn(x.double(), y.double())):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3, equal_nan=True)
