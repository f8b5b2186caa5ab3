"""Sums of one row that several warps hold, made at once on a GPU; planes of a group that the programs of a cluster hold, each its own."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak import backend
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.fuse import lines
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.runtime import gpu_build
from tokamak.target import Target
from tokamak.tools.record import recording

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


def test_sums_that_need_nothing_of_each_other_are_made_at_once():
    unit, = kernels(sums(X, f"mul({X}, {Y})", Y))
    lines = unit.text.splitlines()
    summed = [line.split(" = ")[0] for line in lines if "tk.sums3(" in line]
    assert [len(re.findall(r"\w+", names)) for names in summed] == [3, 3]          # 2048 and 1024, of each thread first; 64
    assert max(n for n, line in enumerate(lines) if "tl.load" in line) < min(n for n, line in enumerate(lines) if "tk.sums3(" in line)
    assert "tl.sum(" not in unit.text


def test_a_warp_sums_all_pieces_of_a_row_at_once():
    """Each thread its own of each piece first: one sum across the lanes in the place of one a piece."""
    unit, = kernels(sums(X, columns=800))
    assert unit.warps == 1 and unit.text.count("tl.sum(") == 1 and unit.text.count("tk.of_threads(") > 1
    unit, = kernels(sums(X, f"mul({X}, {Y})", columns=800))
    assert "tl.sum(" not in unit.text and unit.text.count("tk.sums2(") == 1


def test_a_sum_that_needs_another_waits_for_it():
    unit, = kernels(sums(X, Y, f"mul({X}, {Y})", f"mul({Y}, sub({X}, %sum0[i0]))"))
    assert unit.text.count("tk.sums3(") == 2 and unit.text.count("tl.sum(") == 3


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


def evonorm(x, v, g, b):
    n, c, h, w = x.shape
    std = torch.sqrt(x.reshape(n, 4, c // 4, h, w).var((2, 3, 4), keepdim=True, unbiased=False) + 1e-5)
    return x * torch.sigmoid(v * x) / std.expand(n, 4, c // 4, h, w).reshape(n, c, h, w) * g + b


NORMS = {"evonorm": evonorm, "silu": lambda x, v, g, b: F.silu(F.group_norm(x, 4, g.flatten(), b.flatten())) * v}


@pytest.mark.parametrize("norm, dtype, channels, height, width", [
    ("evonorm", torch.float32, 8, 41, 29), ("evonorm", torch.bfloat16, 8, 41, 29), ("evonorm", torch.bfloat16, 32, 32, 32),
    ("silu", torch.float32, 8, 33, 40)])
def test_planes_that_the_programs_of_a_cluster_hold_agree_with_float64(monkeypatch, dtype, norm, channels, height, width):
    """Two and eight planes of a group, gradients of weights too."""
    for name in ("LEAST", "LEAST_HELD", "LEAST_COMMON", "HELD"):
        monkeypatch.setattr(lines, name, 1)
    monkeypatch.setattr(lines, "LEAST_RUN", 1024)
    monkeypatch.setattr(backend, "target", lambda *_: replace(H200, threads=4))
    shapes = ((8, channels, height, width), *[(1, channels, 1, 1)] * 3)
    inputs = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
    weight = torch.randn(shapes[0]).to(dtype)
    with recording() as recorder:
        out = tokamak.compile(NORMS[norm], target="interpret", strict=True, dynamic=False)(*inputs)
        got = torch.autograd.grad(out, inputs, weight)
    texts = [str(part.kernel.schedule) for r in recorder.graphs for built in r.values.get("render", {}).values() for part in built.parts]
    assert any(f"/ {channels // 4})" in text for text in texts), texts
    exact = [x.detach().double().requires_grad_() for x in inputs]
    for a, b in zip(got, torch.autograd.grad(NORMS[norm](*exact), exact, weight.double())):
        assert float((a.double() - b).norm() / b.norm()) < (2e-5 if dtype is torch.float32 else 2e-2)


def planes(columns: int = 3136, count: int = 8, folded: str = "sum[i2, i3]", at: str = "[i0, i1]", free: str = "[64, 32](32, 1)") -> str:
    """The text of a graph that folds planes and groups of them, which all elements need again."""
    size = count * columns
    return f"""graph planes {{
  input %x: bf16[64, 32, {count}, {columns}]({32 * size}, {size}, {columns}, 1)
  %plane: f32[64, 32, {count}]({32 * count}, {count}, 1) for i3<{columns} = sum[i3](exp(f32(%x[i0, i1, i2, i3])))
  %group: f32{free} for i2<{count}, i3<{columns} = {folded}(f32(%x[i0, i1, i2, i3]))
  %out: bf16[64, 32, {count}, {columns}]({32 * size}, {size}, {columns}, 1) = bf16(mul(f32(%x[i0, i1, i2, i3]), mul(%group{at}, %plane[i0, i1, i2])))
  return %out, %plane
}}"""


def test_each_program_of_a_cluster_has_a_plane_of_a_group_and_tells_the_others_what_the_group_is_folded_from():
    unit, = kernels(planes())
    assert unit.cluster == 8 and unit.text.count("tk.exchange") == 1 and "tk.exchange1(" in unit.text
    made = gpu_build.build([unit], H200.arch)[unit.name]
    assert made.registers <= 64 and not made.spilled


@pytest.mark.parametrize("columns, count", [(784, 8), (3136, 6), (3136, 16), (65536, 8)])
def test_short_planes_other_counts_of_them_and_long_ones_are_held_otherwise(columns, count):
    assert not any(unit.cluster == count for unit in kernels(planes(columns, count)))
