"""Columns held down a middle axis, beside sums of their rows that programs carry over matrices: how many, by how many warps, and that they compile to
programs that keep them in registers."""
from __future__ import annotations

import pytest

from tests.large_gpu import LARGE, alike, spills
from tokamak.codegen.stages import schedule_plan
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph

# the gradient of x * scale * w, where scale is the inverse root of a mean down the rows: of x, and of w
BACKWARD = """graph backward {{
  input %x: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  input %w: {d}[{rows}](1)
  input %scale: f32[{n}, {columns}]({columns}, 1)
  input %dy: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %sums: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = sum[i2](mul(mul(f32(%dy[i0, i2, i1]), f32(%w[i2])), f32(%x[i0, i2, i1])))
  %dx: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1) = {made}
  %dw: f32[{rows}](1) for i1<{n}, i2<{columns} = sum[i1, i2](mul(f32(%dy[i1, i0, i2]), mul(f32(%x[i1, i0, i2]), %scale[i1, i2])))
  return %dx, %dw
}}"""
MADE = "{d}(add(mul(mul(f32(%dy[i0, i1, i2]), f32(%w[i1])), %scale[i0, i2]), mul(f32(%x[i0, i1, i2]), %sums[i0, i2])))"


def scheduled(d: str, n: int, rows: int, columns: int):
    """The plan with schedules, and the schedule of the kernel that holds columns."""
    text = BACKWARD.format(d=d, n=n, rows=rows, columns=columns, made=MADE.format(d=d))
    made = schedule_plan(plan(parse_graph(text), LARGE), LARGE)
    return made, next(iter(made.bodies.values()))[1]


@pytest.mark.parametrize("d, n, rows, columns, found", [
    ("bf16", 45776, 6, 56, "i1:8?, i2:64?) split(i0, i2 / 2112) together(i2) warps(1) stages(3)"),
    ("f16", 1318, 8, 4097, "i1:8, i2:64?) split(i0, i2 / 2112) together(i2) warps(1) stages(1)"),
    ("bf16", 14221, 33, 168, "i1:32+1, i2:64?) split(i0, i2 / 2112) together(i2) warps(1) stages(1)"),
    ("bf16", 332, 49, 4264, "i1:8+8+8+8+8+8+8?, i2:64?) split(i0, i2 / 528) together(i2) warps(4) stages(3)"),
    ("bf16", 1703, 55, 202, "i1:8+8+8+8+8+8+8?, i2:32?) split(i0, i2 / 528) together(i2) warps(4) stages(1)"),
    ("f16", 751, 82, 53, "i1:64+16+2, i2:8?) split(i0, i2 / 2112) together(i2) warps(1) stages(1)"),
    ("bf16", 41, 381, 511, f"i1:{alike(64, 6)}?, i2:8?) split(i0, i2 / 264) together(i2) warps(8) stages(1)"),
    ("bf16", 149, 288, 272, f"i1:{alike(32, 9)}, i2:16) split(i0, i2 / 528) together(i2) warps(4) stages(1)"),
    ("f16", 80, 733, 512, f"i1:{alike(128, 6)}?, i2:16) split(i0, i2 / 132) together(i2) warps(16) stages(1) registers(128)"),
    ("f32", 41, 1005, 512, "i1:512+512?, i2:16) split(i0, i2 / 132) together(i2) warps(16) stages(1) registers(128)"),
    ("f32", 49, 127, 511, "i1:128?, i2:8?) split(i0, i2 / 528) together(i2) warps(4) stages(1)")])
def test_columns_of_a_program(d, n, rows, columns, found):
    assert str(scheduled(d, n, rows, columns)[1]).startswith(f"tile({found}")


@pytest.mark.parametrize("d, n, rows, columns", [("bf16", 13, 1023, 1826), ("bf16", 10, 700, 2002), ("bf16", 10, 700, 2001),
                                                 ("bf16", 114, 2452, 256), ("f16", 41, 405, 511), ("f32", 41, 1205, 511)])
def test_longer_columns_are_held_by_no_program(d, n, rows, columns):
    """What is folded down them is a kernel of its own, and they are read again by one that carries the sums of their rows."""
    made, _ = scheduled(d, n, rows, columns)
    schedules = [s for _, s in made.bodies.values()]
    assert len(schedules) == 2 and not any(s.together for s in schedules)
    assert all(s.looped or s.split and not any(sum(s.sizes(a)) >= rows for a in s.dims if str(a.extent) == str(rows)) for s in schedules)


@pytest.mark.parametrize("d, rows, columns", [
    ("bf16", 8, 1024), ("f32", 16, 1024), ("f32", 24, 1024), ("f32", 33, 1024), ("bf16", 48, 1024), ("f32", 128, 1023), ("f32", 300, 1023),
    ("f32", 1200, 1024), ("bf16", 2500, 1024), ("bf16", 1023, 1826)])
def test_columns_stay_in_registers(d, rows, columns):
    made, _ = scheduled(d, 40000 // rows + 40, rows, columns)
    assert not spills(made)
