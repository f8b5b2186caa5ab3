"""Kernels whose warps would wait for each other, or idle, have few of them on a large GPU; those that read little at once read ahead. A case on
either side of each rung."""
from __future__ import annotations

import pytest

from benchmarks import gpu_plans
from tests.large_gpu import ALONG_ROWS, LARGE, PLANES, SOFTMAX, spills
from tokamak.codegen.stages import schedule_plan
from tokamak.fuse import lines
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph

MOMENTS = """graph moments {{
  input %x: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %mean: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = moments[i2](f32(%x[i0, i2, i1]), 0.0:f32, 1.0:f32)
  %square: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = moments.1[i2](f32(%x[i0, i2, i1]), 0.0:f32, 1.0:f32)
  return %mean, %square
}}"""
SUMS = """graph sums {{
  input %x: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  input %dy: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %a: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = sum[i2](mul(f32(%dy[i0, i2, i1]), {heavy}(f32(%x[i0, i2, i1]))))
  %b: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = sum[i2](f32(%dy[i0, i2, i1]))
  return %a, %b
}}"""
NORM = """graph norm {{
  input %x: {d}[{n}, {columns}]({columns}, 1)
  input %w: {d}[{columns}](1)
  input %v: {d}[{columns}](1)
  %sum: f32[{n}](1) for i1<{columns} = sum[i1](f32(%x[i0, i1]))
  %squares: f32[{n}](1) for i1<{columns} = sum[i1](mul(sub(f32(%x[i0, i1]), %sum[i0]), sub(f32(%x[i0, i1]), %sum[i0])))
  %out: {d}[{n}, {columns}]({columns}, 1) = {d}(add(mul(mul(f32(%x[i0, i1]), %squares[i0]), f32(%w[i1])), f32(%v[i1])))
  return %out
}}"""
MIDDLE = """graph middle {{
  input %x: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %out: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = sum[i2](f32(%x[i0, i2, i1]))
  return %out
}}"""
TURNED = """graph turned {{
  input %x: {d}[{n}, {rows}, 32, {columns}]({rows}*32*{columns}, 32*{columns}, {columns}, 1)
  input %sum: f32[{n}, 32](32, 1)
  %out: {d}[{n}, {rows}, 32, {columns}]({rows}*32*{columns}, 1, {columns}*{rows}, {rows}) = {d}(mul(f32(%x[i0, i1, i2, i3]), %sum[i0, i2]))
  return %out
}}"""
# sums over the first axis, and over it and the second, beside a norm's gradient of rows
CARRIED = """graph carried {{
  input %x: f32[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  input %dy: f32[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %inner: f32[{n}, {rows}]({rows}, 1) for i2<{columns} = sum[i2](mul(%dy[i0, i1, i2], %x[i0, i1, i2]))
  %dx: f32[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1) = mul(%x[i0, i1, i2], %inner[i0, i1])
  %a: f32[{rows}, {columns}]({columns}, 1) for i2<{n} = sum[i2](mul(%x[i2, i0, i1], %inner[i2, i0]))
  %b: f32[{columns}](1) for i1<{n}, i2<{rows} = sum[i1, i2](mul(%dy[i1, i2, i0], %x[i1, i2, i0]))
  %c: f32[{columns}](1) for i1<{n}, i2<{rows} = sum[i1, i2](%dy[i1, i2, i0])
  return %dx, %a, %b, %c
}}"""
DOWN = """graph prefixes {{
  input %x: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %out: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1) = {d}(scan_sum[i1](f32(%x[i0, i1, i2])))
  return %out
}}"""


def scheduled(text: str, **sizes):
    """The plan with schedules, and the first kernel's schedule."""
    made = schedule_plan(plan(lines.whole_lines(parse_graph(text.format(**sizes)), LARGE), LARGE), LARGE)
    return made, next(iter(made.bodies.values()))[1]


@pytest.mark.parametrize("d, n, rows, columns, found", [
    ("bf16", 500, 196, 96, "i1:32+32+32+32?, i2:32) split(i1 / 1) warps(2) stages(3)"),
    ("bf16", 3000, 49, 320, "i1:16+16?, i2:64) split(i1 / 1) warps(2) stages(3)"),
    ("bf16", 60, 196, 96, "i1:128?, i2:32) split(i1 / 2) warps(16)"), ("f32", 500, 196, 96, "i1:128?, i2:32) split(i1 / 1) warps(16)")])
def test_statistics_of_many_blocks_of_columns(d, n, rows, columns, found):
    assert str(scheduled(MOMENTS, d=d, n=n, rows=rows, columns=columns)[1]).startswith(f"tile({found}")


@pytest.mark.parametrize("d, n, heavy, found", [
    ("f16", 700, "exp", "i1:16?, i2:64) split(i1 / 1) warps(2) stages(3)"), ("f32", 700, "exp", "i1:8?, i2:64) split(i1 / 1) warps(2) stages(3)"),
    ("f16", 700, "neg", "i1:32+32?, i2:64) split(i1 / 1) warps(8)"), ("f16", 450, "exp", "i1:32+32?, i2:64) split(i1 / 1) warps(8)")])
def test_sums_of_heavy_functions_of_many_blocks_of_columns(d, n, heavy, found):
    assert str(scheduled(SUMS, d=d, n=n, rows=196, columns=64, heavy=heavy)[1]).startswith(f"tile({found}")


@pytest.mark.parametrize("d, n, columns, rows, warps, registers", [
    ("bf16", 2496, 64, 49, 2, 255),             # threads would hold few elements, and idle in pieces of 64 x 1
    ("f32", 2496, 64, 49, 8, 128),
    ("f16", 640, 20, 400, 8, 128),              # equal pieces of a short plane
    ("f16", 320, 20, 3136, 8, 255),             # threads would hold too many
    ("f16", 1280, 37, 1600, 8, 255), ("f16", 1280, 24, 1600, 16, 128),
    ("bf16", 640, 8, 3136, 8, 128)])
def test_warps_of_planes_held_in_pieces(d, n, columns, rows, warps, registers):
    schedule = scheduled(PLANES, d=d, n=n, c=columns, p=rows)[1]
    assert schedule.staged is not None and (schedule.warps, schedule.registers) == (warps, registers)


@pytest.mark.parametrize("d, n, columns, stages", [
    ("bf16", 2000, 3001, 3), ("bf16", 600, 3001, 1), ("bf16", 16388, 4095, 1), ("bf16", 1500, 6001, 3), ("f32", 900, 4097, 3)])
def test_rows_that_begin_anywhere_are_under_way_where_programs_have_a_few(d, n, columns, stages):
    schedule = scheduled(NORM, d=d, n=n, columns=columns)[1]
    assert schedule.shift is not None and schedule.split and schedule.stages == stages


@pytest.mark.parametrize("d, n, rows, columns, found", [
    ("bf16", 300, 1500, 24, "i1:256?, i2:8) looped(i1) warps(4)"), ("bf16", 267, 3302, 40, "i1:256?, i2:8) looped(i1) warps(4)"),
    ("bf16", 300, 1500, 48, "i1:256?, i2:16) looped(i1) warps(8)"),
    ("bf16", 300, 1500, 56, "i1:128?, i2:64?) looped(i1)"), ("bf16", 300, 100, 24, "i1:128?, i2:32?)"),
    ("f32", 300, 1500, 24, "i1:256?, i2:32?) looped(i1)"),
    ("bf16", 59, 752, 578, "i1:64?, i2:64?) looped(i1) warps(4)"), ("bf16", 59, 752, 579, "i1:32?, i2:64?) looped(i1) warps(8)")])
def test_sums_along_the_middle(d, n, rows, columns, found):
    assert str(scheduled(MIDDLE, d=d, n=n, rows=rows, columns=columns)[1]).startswith(f"tile({found}")


@pytest.mark.parametrize("d, n, rows, columns, stages", [
    ("f32", 3, 1792, 6072, 2), ("f32", 20, 1792, 6072, 1), ("f32", 3, 1792, 6071, 1), ("bf16", 43, 2048, 1504, 2), ("bf16", 43, 2048, 1503, 1)])
def test_tiles_of_columns_that_are_only_folded_are_under_way(d, n, rows, columns, stages):
    made, schedule = scheduled(MIDDLE, d=d, n=n, rows=rows, columns=columns)
    assert schedule.looped and schedule.stages == stages and not spills(made)


@pytest.mark.parametrize("d, rows, columns, warps", [("bf16", 196, 3, 2), ("bf16", 3136, 15, 2), ("bf16", 3136, 16, 8), ("f32", 3136, 15, 4)])
def test_tiles_that_turn_rows_which_begin_anywhere(d, rows, columns, warps):
    schedule = scheduled(TURNED, d=d, n=200, rows=rows, columns=columns)[1]
    assert len(schedule.dims) == 3 and schedule.warps == warps


@pytest.mark.parametrize("columns, stages", [(63, 1), (64, 3)])
def test_sums_beside_short_rows_along_two_axes(columns, stages):
    schedule = scheduled(CARRIED, n=3125, rows=64, columns=columns)[1]
    assert schedule.warps == 16 and schedule.stages == stages


@pytest.mark.parametrize("d, n, columns, shifted", [("bf16", 204331, 257, False), ("bf16", 32769, 369, True)])
def test_prefixes_of_short_rows_are_made_element_by_element(d, n, columns, shifted):
    assert (scheduled(ALONG_ROWS, type=d, rows=n, columns=columns)[1].shift is not None) == shifted


@pytest.mark.parametrize("d, n, columns, found", [
    ("f32", 100, 999, "i1:16?, i2:128?)"), ("f32", 60, 1001, "i1:16?, i2:64?)"), ("bf16", 200, 1001, "i1:16?, i2:256?)"),
    ("bf16", 150, 1001, "i1:16?, i2:128?)"), ("bf16", 100, 1001, "i1:16?, i2:64?)")])
def test_prefixes_down_many_columns(d, n, columns, found):
    schedule = scheduled(DOWN, d=d, n=n, rows=300, columns=columns)[1]
    assert str(schedule).startswith(f"tile({found}") and schedule.warps == 1


# a norm along the middle: the squares of a column, and each element beside their sum
HELD = """graph held {{
  input %x: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1)
  %sum: f32[{n}, {columns}]({columns}, 1) for i2<{rows} = sum[i2](mul(f32(%x[i0, i2, i1]), f32(%x[i0, i2, i1])))
  %out: {d}[{n}, {rows}, {columns}]({rows}*{columns}, {columns}, 1) = {d}(mul(f32(%x[i0, i1, i2]), %sum[i0, i2]))
  return %out
}}"""


@pytest.mark.parametrize("d, n, rows, columns, found", [
    ("bf16", 1691, 9, 2049, "i1:16?, i2:128?) warps(2)"), ("f16", 700, 12, 1500, "i1:16?, i2:128?) warps(2)"),
    ("bf16", 900, 20, 901, "i1:16+4, i2:128?) warps(2)"), ("bf16", 1500, 25, 501, "i1:16+16?, i2:128?) warps(4)"),
    ("f32", 500, 10, 2047, "i1:16?, i2:128?) warps(4)"), ("f16", 2000, 7, 777, "i1:8?, i2:128?) warps(2)"),
    ("bf16", 23653, 9, 70, "i1:16?, i2:128?) warps(2)"), ("bf16", 1500, 33, 501, "i1:32+1, i2:64?) warps(2)")])
def test_short_columns_that_are_held_and_written(d, n, rows, columns, found):
    made, schedule = scheduled(HELD, d=d, n=n, rows=rows, columns=columns)
    assert str(schedule).startswith(f"tile({found}") and not spills(made)


FOLDED = """graph folded {{
  input %x: {d}[{n}, {columns}]({columns}, 1)
  %mean: f32[{n}](1) for i1<{columns} = moments[i1](f32(%x[i0, i1]), 0.0:f32, 1.0:f32)
  %square: f32[{n}](1) for i1<{columns} = moments.1[i1](f32(%x[i0, i1]), 0.0:f32, 1.0:f32)
  return %mean, %square
}}"""


@pytest.mark.parametrize("d, n, columns, found", [
    ("bf16", 500000, 40, "i0:32, i1:32+8) warps(1)"), ("f32", 577896, 55, "i0:16?, i1:16+16+16+16?) warps(4)"),
    ("f32", 793447, 33, "i0:128?, i1:8+8+8+8+8?) warps(16)"), ("bf16", 1938117, 40, "i0:128?, i1:32+8) warps(4)"),
    ("f16", 8193, 256, "i0:8?, i1:256)"), ("f16", 65536, 256, "i0:32, i1:256)")])
def test_short_rows_that_are_folded(d, n, columns, found):
    made, schedule = scheduled(FOLDED, d=d, n=n, columns=columns)
    assert str(schedule).startswith(f"tile({found}") and not spills(made)


@pytest.mark.parametrize("n, columns, tile", [(16, 180204, 2048), (53, 255216, 2048), (16, 180224, 4096), (1010, 32767, 4096)])
def test_moments_of_long_rows(n, columns, tile):
    made, schedule = scheduled(FOLDED, d="f32", n=n, columns=columns)
    assert schedule.by_thread and schedule.sizes(schedule.split[0])[0] == tile


@pytest.mark.parametrize("d, n, columns, warps", [
    ("bf16", 4000, 12000, 8), ("f16", 4000, 12001, 8), ("bf16", 2000, 20000, 16), ("f32", 1562, 9994, 8), ("f32", 3059, 11880, 16)])
def test_a_row_in_stages_has_a_multiprocessors_threads_or_half(d, n, columns, warps):
    made, schedule = scheduled(SOFTMAX, type=d, rows=n, columns=columns)
    assert schedule.staged is not None and (schedule.sharers, schedule.warps) == (1, warps) and not spills(made)


DROPPED = """graph dropped {{
  input %x: {d}[{n}, {columns}]({columns}, 1)
  input %seed: i64[]()
  %out: {d}[{n}, {columns}]({columns}, 1) = {d}(mul(f32(%x[i0, i1]), {number}))
  %sum: f32[{n}](1) for i1<{columns} = sum[i1](f32(%out[i0, i1]))
  return %out, %sum
}}"""


@pytest.mark.parametrize("n, number, warps", [(529, "uniform(%seed[], 0:i64, i0*{columns} + i1)", 8), (529, "2.0:f32", 4),
                                              (5290, "uniform(%seed[], 0:i64, i0*{columns} + i1)", 4)])
def test_few_rows_that_draw_random_numbers_have_more_warps(n, number, warps):
    text = DROPPED.replace("{number}", number)
    schedule = scheduled(text, d="bf16", n=n, columns=131073)[1]
    assert schedule.looped and schedule.warps == warps


NORMED = """graph normed {{
  input %x: {d}[{n}, {columns}]({columns}, 1)
  input %w: {d}[{columns}](1)
  input %seed: i64[]()
  %y: {d}[{n}, {columns}]({columns}, 1) = {d}(mul(f32(%x[i0, i1]), {number}))
  %sum: f32[{n}](1) for i1<{columns} = sum[i1](f32(%y[i0, i1]))
  %out: {d}[{n}, {columns}]({columns}, 1) = {d}(mul(mul(f32(%y[i0, i1]), %sum[i0]), f32(%w[i1])))
  return %out
}}"""


@pytest.mark.parametrize("d, columns, draws, warps", [
    ("f16", 1023, True, 4), ("f16", 1023, False, 1), ("bf16", 513, True, 2), ("bf16", 4001, True, 4), ("f32", 2049, True, 8)])
def test_rows_that_draw_random_numbers_have_a_program_each(d, columns, draws, warps):
    text = NORMED.replace("{number}", "uniform(%seed[], 0:i64, i0*{columns} + i1)" if draws else "2.0:f32")
    made, schedule = scheduled(text, d=d, n=9000, columns=columns)
    assert schedule.shift is not None and (not schedule.split) == draws and schedule.warps == warps and not spills(made)


@pytest.mark.parametrize("d, rows, columns, warps", [("bf16", 49, 2128, 1), ("f32", 50, 80, 1), ("bf16", 49, 2129, 4), ("bf16", 64, 2128, 4)])
def test_prefixes_down_columns_held_in_equal_pieces(d, rows, columns, warps):
    made, schedule = scheduled(DOWN, d=d, n=60, rows=rows, columns=columns)
    assert not schedule.looped and schedule.warps == warps and not spills(made)


BACKWARD = """graph backward {{
  input %x: {d}[{n}, {columns}]({columns}, 1)
  input %dy: {d}[{n}, {columns}]({columns}, 1)
  %inner: f32[{n}](1) for i1<{columns} = sum[i1](mul(f32(%dy[i0, i1]), f32(%x[i0, i1])))
  %dx: {d}[{n}, {columns}]({columns}, 1) = {d}(mul(f32(%x[i0, i1]), %inner[i0]))
  %dw: f32[{columns}](1) for i1<{n} = sum[i1](mul(f32(%dy[i1, i0]), mul(f32(%x[i1, i0]), %inner[i1])))
  return %dx, %dw
}}"""


@pytest.mark.parametrize("d, n, columns, programs, stages", [
    ("bf16", 2100, 1000, 528, 3), ("bf16", 3500, 1000, 1056, 3),        # fuller turns where programs would have few; more rows
    ("f32", 1377, 1691, 528, 1),                                        # a row at a time
    ("bf16", 300, 4000, 132, 3)])                                       # no fewer than multiprocessors
def test_programs_of_few_turns(d, n, columns, programs, stages):
    schedule = scheduled(BACKWARD, d=d, n=n, columns=columns)[1]
    assert (schedule.programs, schedule.stages) == (programs, stages)


@pytest.mark.parametrize("text, sizes", [
    (MOMENTS, {"d": "bf16", "n": 300, "rows": 196, "columns": 96}), (SUMS, {"d": "f16", "n": 700, "rows": 196, "columns": 64, "heavy": "exp"}),
    (PLANES, {"d": "bf16", "n": 2496, "p": 49, "c": 64}), (TURNED, {"d": "bf16", "n": 200, "rows": 49, "columns": 10})])
def test_they_stay_in_registers(text, sizes):
    assert not spills(scheduled(text, **sizes)[0])


@pytest.mark.parametrize("name, kernel, found", [
    ("pooled_statistics_f32_2525x128x104", 0, "tile(i1:128, i2:64?) warps(2)"), ("sum_outer_bf16_16x256380", 0, "tile(i0:16, i1:128?) warps(1)"),
    ("pooled_statistics_bf16_65x112x2288", 0, "tile(i1:64+64?, i2:64?) warps(2)"),
    ("masked_mean_bf16_1422x4x1708", 1, "tile(i1:4, i2:256?) warps(1)"),
    ("layernorm_2d_f16_nchw_207x192x40x40", 0, "tile(i1:64+64+64, i2:64) warps(4)"),
    ("rmsnorm_middle_f16_265x127x846", 0, "tile(i1:128?, i2:64?) warps(4)"),
    ("response_norm_bf16_nchw_6161x96x8x8", 0, "tile(i1:128?, i2:64) warps(8)"),
    ("softmax_middle_bwd_f16_66x255x4400", 0, "tile(i1:256?, i2:64?) warps(16)")])
def test_columns_of_which_a_thread_folds_much(name, kernel, found):
    """Few warps down sums of one value; of columns that are written, too, only where few lanes are idle."""
    assert gpu_plans.planned(name)[kernel]["schedule"].startswith(found)


@pytest.mark.parametrize("name, found", [
    ("snake_bwd_bf16_nchw_100x128x56x56", "by_thread warps(8) stages(1)"), ("snake_bwd_f32_nchw_32x64x56x56", "by_thread warps(4) stages(1)"),
    ("power_norm_f32_367x150991", "looped(i1) warps(16) stages(1)"), ("power_norm_f32_2000x150991", "looped(i1) warps(4) stages(1)")])
def test_more_warps(name, found):
    """For functions of angles, each with a long way of its own for every element of a thread, and for few rows that are run through twice."""
    assert gpu_plans.planned(name)[0]["schedule"].endswith(found)
