"""Which tiles bodies of a fold or two get on a large GPU: a case on either side of each rung."""
from __future__ import annotations

import pytest

from tests.large_gpu import ALONG_ROWS, LARGE, SOFTMAX, alike
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.fuse.plan import plan
from tokamak.fuse.widen import widened
from tokamak.ir.graph import Compute
from tokamak.ir.parse import parse_graph
from tokamak.runtime import gpu_build

ALONG = """graph along {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %total: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%x[i0, i1]))
  return %total
}}"""
DOWN = """graph down {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %total: f32[{columns}](1) for i1<{rows} = sum[i1](f32(%x[i1, i0]))
  return %total
}}"""
WEIGHTED = """graph weighted {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %w: {type}[{columns}](1)
  %squares: f32[{rows}](1) for i1<{columns} = sum[i1](mul(f32(%x[i0, i1]), f32(%x[i0, i1])))
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(mul(mul(f32(%x[i0, i1]), rsqrt(%squares[i0])), f32(%w[i1])))
  return %out
}}"""
VARIANCE = """graph variance {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %squares: f32[{rows}](1) for i1<{columns} = moments.1[i1](f32(%x[i0, i1]), 0.0:f32, 1.0:f32)
  return %squares
}}"""
BACKWARD = """graph backward {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %dy: {type}[{rows}, {columns}]({columns}, 1)
  %rows: f32[{rows}](1) for i1<{columns} = sum[i1](mul(f32(%dy[i0, i1]), f32(%x[i0, i1])))
  %columns: f32[{columns}](1) for i1<{rows} = sum[i1](mul(f32(%dy[i1, i0]), f32(%x[i1, i0])))
  return %rows, %columns
}}"""

GRADIENT = """graph gradient {{
  input %dy: {type}[{rows}, {columns}]({columns}, 1)
  input %y: {type}[{rows}, {columns}]({columns}, 1)
  %sum: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%dy[i0, i1]))
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(sub(f32(%dy[i0, i1]), mul(exp(f32(%y[i0, i1])), %sum[i0])))
  return %out
}}"""
GROUPS = """graph groups {{
  input %a: {type}[128, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  input %b: {type}[128, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  input %c: {type}[128, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  %rows: f32[{rows}](1) for i1<128, i2<{columns} = sum[i1, i2](f32(%a[i1, i0, i2]))
  %out: {type}[128, {rows}, {columns}]({rows} * {columns}, {columns}, 1) = {type}(mul(f32(%a[i0, i1, i2]), %rows[i1]))
  %sum: f32[128](1) for i1<{rows}, i2<{columns} = sum[i1, i2](mul(mul(f32(%out[i0, i1, i2]), f32(%b[i0, i1, i2])), f32(%c[i0, i1, i2])))
  return %out, %sum
}}"""


SPREAD = """graph spread {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %total: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%x[i0, i1]))
  %squares: f32[{rows}](1) for i1<{columns} = sum[i1](mul(sub(f32(%x[i0, i1]), %total[i0]), sub(f32(%x[i0, i1]), %total[i0])))
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(mul(sub(f32(%x[i0, i1]), %total[i0]), rsqrt(%squares[i0])))
  return %out
}}"""
SCALED_ROWS = """graph scaled {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %total: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%x[i0, i1]))
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(sub(f32(%x[i0, i1]), %total[i0]))
  return %out
}}"""
WRITTEN = """graph written {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %dy: {type}[{rows}, {columns}]({columns}, 1)
  input %scale: f32[{rows}](1)
  %columns: f32[{columns}](1) for i1<{rows} = sum[i1](mul(mul(f32(%dy[i1, i0]), f32(%x[i1, i0])), %scale[i1]))
  %dx: {type}[{rows}, {columns}]({columns}, 1) = {type}(mul(f32(%dy[i0, i1]), add(f32(%x[i0, i1]), %scale[i0])))
  return %columns, %dx
}}"""


def first(text: str, type: str, rows: int, columns: int) -> str:
    """The schedule of the first kernel of a graph, at these sizes."""
    text = text.format(type=type, rows=rows, columns=columns)
    schedules = schedule_plan(plan(parse_graph(text), LARGE), LARGE).bodies.values()
    return str(next(iter(schedules))[1])


@pytest.mark.parametrize("rows, columns, type, found", [
    (65536, 257, "f16", "i0:4, i1:256+16?) shifted(i1 % 8) warps(2)"), (16384, 513, "f16", "i0:4, i1:512+16?) shifted(i1 % 8) warps(2)"),
    (65536, 1025, "f16", "i1:1024+16?) shifted(i1 % 8) warps(1)"), (65536, 513, "f32", "i1:512+8?) shifted(i1 % 4) warps(1)"),
    (4096, 257, "f16", "i1:256+16?) shifted(i1 % 8) warps(1)"), (128, 8192, "f16", "i1:8192) warps(16)"), (1024, 8192, "f16", "i1:8192) warps(8)"),
    (65536, 511, "f32", "i1:512+8?) shifted(i1 % 4) warps(1)"), (65536, 257, "f32", "i0:2, i1:256+1) warps(1)"),
    (65536, 383, "f32", "i0:2, i1:256+128?) warps(1)"), (65536, 385, "f32", "i1:256+128+8?) shifted(i1 % 4) warps(1)"),
    (131072, 127, "f32", f"i0:4, i1:{alike(16, 8)}?) warps(2)"), (16384, 129, "f32", f"i0:4, i1:{alike(16, 9)}?) warps(2)"),
    (131072, 96, "f16", "i0:8, i1:32+32+32) warps(1)"), (131072, 112, "f16", "i0:8, i1:64+64?) warps(2)"),
    (30000, 144, "f16", "i0:4, i1:32+32+32+32+32?) warps(1)"), (30000, 48, "f32", "i0:16, i1:16+16+16) warps(4)"),
    (131072, 80, "f16", "i0:32, i1:64+16) warps(2)"),
    (8192, 128, "f16", "i0:8, i1:128) warps(4)"), (32768, 128, "f16", "i0:8, i1:128) warps(2)"), (8192, 256, "f16", "i0:4, i1:256) warps(2)"),
    (8192, 512, "f16", "i0:2, i1:512) warps(1)"), (8192, 64, "f16", "i0:64, i1:16+16+16+16) warps(8)"),
    (32768, 31, "f16", "i0:16, i1:8+8+8+8?) warps(4)"),
    (32768, 65, "f16", "i0:8, i1:16+16+16+16+16?) warps(4)"), (100000, 100, "f16", "i0:8, i1:128?) warps(1)"),
    (80000, 190, "f16", "i0:4, i1:64+64+64?) warps(4)"), (100000, 24, "f16", "i0:32, i1:32?) warps(4)"),
    (100000, 160, "f16", f"i0:4, i1:{alike(32, 5)}) warps(1)"),
    (1000, 100, "f16", "i0:8, i1:64+32+4) warps(1)"),
    (32768, 33, "f16", "i0:32, i1:32+1) warps(1)"), (4096, 512, "f32", "i1:512) warps(1)"), (4096, 128, "f32", "i0:4, i1:128) warps(1)"),
    (65536, 512, "f32", "i0:2, i1:512) warps(1)")])
def test_rows_that_are_held(rows, columns, type, found):
    assert first(SOFTMAX, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, found", [
    (65536, 1025, "f16", "i0:2, i1:1024+16?) shifted(i1 % 8) warps(1)"), (16384, 2049, "f16", "i1:2048+16?) shifted(i1 % 8) warps(2)"),
    (2048, 513, "f16", f"i0:2, i1:{alike(64, 9)}?) warps(4)"), (32768, 513, "f16", "i0:2, i1:512+16?) shifted(i1 % 8) warps(1)"),
    (32768, 385, "f16", f"i0:4, i1:{alike(32, 13)}?) warps(4)"), (8192, 1023, "f16", "i1:1024+16?) shifted(i1 % 8) warps(1)"),
    (4608, 700, "f16", f"i0:4, i1:{alike(64, 11)}?) warps(4)"), (3000, 700, "f16", "i0:2, i1:512+256?) "),
    (400000, 40, "f16", "i0:32, i1:32+8) warps(1)"), (160000, 100, "f32", "i0:8, i1:32+32+32+32?) warps(4)"),
    (117647, 136, "f16", "i0:16?, i1:32+32+32+32+32?) warps(4)"), (83333, 192, "f16", "i0:32?, i1:64+64+64) warps(8)"),
    (16384, 4095, "f32", "i1:4096+8?) shifted(i1 % 4) warps(16)"), (4096, 3501, "f32", "i1:2048+1024+512+8?) shifted(i1 % 4) warps(4)"),
    (512, 65535, "f16", "i1:16384+16?) shifted(i1 % 8) looped(i1) warps(16)"),
    (1024, 32768, "f32", "i1:4096) looped(i1) warps(32) stages(1)"), (1024, 16384, "f16", "i1:8192) looped(i1) warps(16) stages(1)"),
    (4096, 8193, "f32", "i1:4096+8?) shifted(i1 % 4) looped(i1) warps(32)"), (32768, 4097, "f16", "i1:8192+16?) shifted(i1 % 8) looped(i1) warps(4)"),
    (64, 262143, "f32", "i1:4096+8?) shifted(i1 % 4) split(i1 / 16) warps(8)"),
    (64, 262144, "f32", "i1:4096) split(i1 / 16) warps(4) stages(1) once"),
    (256, 65536, "f32", "i1:4096) looped(i1) warps(32) stages(1) once"), (192, 65536, "f32", "i1:4096) looped(i1) warps(32)"),
    (3604, 7610, "f32", "i1:4096+8?) shifted(i1 % 4) looped(i1) warps(32)"), (8192, 4097, "f32", "i1:4096+8?) shifted(i1 % 4) looped(i1) warps(16)"),
    (160, 65536, "f32", "i1:4096) split(i1 / 6)"),
    (256, 131071, "f16", "i1:8192+16?) shifted(i1 % 8) split(i1 / 4)"),
    (262144, 31, "f32", "i0:16, i1:32?) warps(1)"), (131072, 127, "f32", "i0:8, i1:128?) warps(1)"),
    (32768, 127, "f16", f"i0:16, i1:{alike(16, 8)}?) warps(4)"), (262144, 17, "f32", "i0:64, i1:16+1) warps(1)")])
def test_rows_that_are_only_summed(rows, columns, type, found):
    assert first(ALONG, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, once", [
    (1024, 8192, "f32", True), (128, 131072, "f16", True), (128, 16384, "f16", False), (8192, 1024, "f32", True), (4096, 1024, "f32", False)])
def test_what_is_only_folded_leaves_the_cache_first(rows, columns, type, once):
    """From a quarter of the cache on in loops, from a half of it on where it is held."""
    assert first(ALONG, type, rows, columns).endswith(" once") == once


@pytest.mark.parametrize("rows, columns, type, found", [
    (65536, 257, "f16", "i1:256+16?) shifted(i1 % 8) split(i0 / 4224) warps(1) stages(3)"),
    (65536, 1025, "f16", "i1:1024+16?) shifted(i1 % 8) split(i0 / 4224) warps(1) stages(1)"),
    (16384, 1025, "f16", "i1:1024+16?) shifted(i1 % 8) split(i0 / 2112) warps(1) stages(3)"),
    (4096, 257, "f16", "i1:256+16?) shifted(i1 % 8) split(i0 / 2112) warps(1) stages(3)"),
    (2048, 511, "f16", "i1:512+16?) shifted(i1 % 8) split(i0 / 2048) warps(1) stages(1)"),
    (65536, 511, "f32", "i1:512+8?) shifted(i1 % 4) warps(1)"),
    (65536, 1023, "f32", "i1:1024+8?) shifted(i1 % 4) split(i0 / 4224) warps(1) stages(1)")])
def test_rows_with_weights_that_begin_anywhere(rows, columns, type, found):
    """Programs keep the weights of rows of 16 bits, two of which they have at least, the next ones under way; of 32 bits only where rows are long."""
    assert first(WEIGHTED, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, kernels", [(256, 32767, 1), (256, 16383, 2), (1024, 32767, 2)])
def test_columns_of_32_bits_are_summed_as_they_are_where_they_are_many(rows, columns, kernels):
    """And the cache holds them; else rows that begin alike count as one."""
    graph = widened(parse_graph(DOWN.format(type="f32", rows=rows, columns=columns)), LARGE)
    assert len(plan(graph, LARGE).steps) == kernels


@pytest.mark.parametrize("rows, columns, type, found", [
    (4, 262144, "f16", "i0:4, i1:256) warps(1)"), (4, 131072, "f16", "i0:4, i1:64) warps(1)"), (4, 262145, "f32", "i0:4, i1:256?) warps(4)"),
    (256, 4096, "f16", "i0:256, i1:32) warps(8)"), (64, 32768, "f16", "i0:64, i1:64)"),
    (64, 65535, "f16", "i0:64, i1:32?) warps(4)"), (8, 524289, "f16", "i0:8, i1:256?) warps(4)"), (64, 32767, "f32", "i0:64, i1:32?) warps(4)"),
    (64, 1048577, "f32", "i0:64, i1:64?) warps(16)"), (16, 4097, "f16", "i0:16, i1:32?) warps(1)"),
    (256, 524289, "f16", "i0:16, i1:128?) looped(i0) warps(4)"),
    (128, 65535, "f16", "i0:128, i1:64?) warps(8)"), (128, 262145, "f16", "i0:128, i1:64?) warps(8)"),
    (400, 30000, "f16", "i0:128?, i1:64?) looped(i0) warps(8)"),
    (128, 32768, "f16", "i0:128, i1:32) warps(2)"), (128, 131072, "f16", "i0:32, i1:64) looped(i0) warps(2)")])
def test_columns_of_few_rows(rows, columns, type, found):
    assert first(DOWN, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, found", [
    (257, 511, "f16", "i1:32?, i2:64?) looped(i1) warps(8)"), (96, 512, "f16", "i1:16, i2:64) looped(i1) warps(1)"),
    (33, 8191, "f16", "i1:32+1, i2:64?) warps(2)"), (257, 511, "f32", "i1:32?, i2:64?) looped(i1) warps(8)"),
    (375, 511, "f32", "i1:64?, i2:64?) looped(i1) warps(16)")])
def test_columns_of_many_matrices(rows, columns, type, found):
    """Each of few columns: what was measured on one long line does not hold for them. Shorter tiles where they begin anywhere, of 32 bits where
    longer ones have many idle lanes."""
    text = """graph middle {{
  input %x: {type}[512, {rows}, {columns}]({size}, {columns}, 1)
  %total: f32[512, {columns}]({columns}, 1) for i2<{rows} = sum[i2](f32(%x[i0, i2, i1]))
  return %total
}}"""
    assert first(text.replace("{size}", str(rows * columns)), type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, part", [
    (512, 8191, 32), (1024, 4097, 64), (128, 8191, 0), (1024, 65537, 8), (512, 65536, 0), (1024, 65536, 4), (8192, 513, 64), (8192, 129, 64),
    (1024, 513, 0), (512, 2049, 0)])
def test_rows_that_count_as_one(rows, columns, part):
    """So many that there are tiles for the machine, where that leaves few partial results; none of few rows that begin at whole words."""
    graph = widened(parse_graph(DOWN.format(type="f16", rows=rows, columns=columns)), LARGE)
    assert [n.shape[0].constant for n in graph.nodes if isinstance(n, Compute) and len(n.shape) == 2] == ([part] if part else [])


@pytest.mark.parametrize("rows, columns, registers", [(512, 8192, 64), (1024, 4096, 64), (1024, 8192, 0), (264, 8192, 0), (512, 8191, 0)])
def test_programs_that_hold_rows_of_32_bits_all_run_at_once(rows, columns, registers):
    """Of nested sums: one sum is made while weights are held, too."""
    assert f" registers({registers})" in first(SPREAD, "f32", rows, columns) + " registers(0)"
    assert " registers(" not in first(WEIGHTED, "f32", rows, columns) or (rows, columns) == (512, 8191)


@pytest.mark.parametrize("rows, columns, type, kernels", [
    (16, 131072, "f16", 1), (16, 65537, "f32", 1), (64, 131072, "f16", 2), (16, 16384, "f16", 2)])
def test_columns_of_few_rows_are_summed_where_they_are_written(rows, columns, type, kernels):
    """Without partial results: by programs that hold all rows of some columns."""
    graph = parse_graph(WRITTEN.format(type=type, rows=rows, columns=columns))
    made = schedule_plan(plan(graph, LARGE), LARGE).bodies.values()
    assert len(made) == 1 and [bool(s.split) for _, s in made] == [kernels == 2]


@pytest.mark.parametrize("text, rows, columns, type, found", [
    ("softmax", 572813, 99, "bf16", f"i0:8?, i1:{alike(16, 7)}?) warps(2)"), ("softmax", 365404, 63, "f16", "i0:16?, i1:32+32?) warps(2)"),
    ("softmax", 365404, 55, "f16", "i0:16?, i1:16+16+16+16?) warps(4)"),
    ("softmax", 524289, 25, "bf16", "i0:16?, i1:8+8+8+8?) warps(4)"), ("softmax", 552509, 31, "f32", "i0:16?, i1:8+8+8+8?) warps(4)"),
    ("softmax", 4194303, 15, "f16", "i0:64?, i1:8+8?) warps(8)"), ("softmax", 2405381, 33, "bf16", "i0:32?, i1:32+1) warps(1)"),
    ("softmax", 62080, 108, "bf16", "i0:8, i1:128?) warps(1)"), ("scaled", 663629, 45, "bf16", "i0:16?, i1:64?) warps(1)"),
    ("scaled", 294457, 111, "f16", "i0:8?, i1:128?) warps(1)"), ("backward", 524289, 61, "f16", "i0:4?, i1:16+16+16+16?) split(i0 / 2112) warps(2)"),
    ("backward", 524287, 62, "f16", "i0:16?, i1:16+16+16+16?) split(i0 / 1056)"),
    ("backward", 142407, 115, "f16", f"i0:4?, i1:{alike(16, 8)}?) split(i0 / 2112)"),
    ("backward", 262145, 33, "bf16", "i0:16?, i1:8+8+8+8+8?) split(i0 / 1056) warps(4)"),
    ("backward", 47120, 49, "bf16", "i0:8, i1:32+32?) split(i0")])
def test_short_rows_that_begin_anywhere_and_are_written(text, rows, columns, type, found):
    """One warp has few of them, two where they are its width; more of one value that is folded once, or that begins at words of 8 bytes."""
    made = first({"softmax": SOFTMAX, "scaled": SCALED_ROWS, "backward": BACKWARD}[text], type, rows, columns)
    assert made.startswith(f"tile({found}"), made


@pytest.mark.parametrize("columns, found", [(65535, "i0:64, i1:32?) split(i1"),
                                            (65536, "i0:64, i1:64) split(i1")])
def test_sums_of_columns_and_of_rows_that_programs_share(columns, found):
    """Rows that begin anywhere are read by as many registers as elements."""
    assert first(BACKWARD, "f32", 64, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("text, rows, columns, type, stages", [
    (SOFTMAX, 264, 131072, "f32", 3), (GRADIENT, 264, 131072, "f32", 1), (GRADIENT, 264, 262144, "f16", 1),
    (GROUPS, 31, 64, "f64", 1), (GROUPS, 31, 64, "f16", 3)])
def test_what_is_read_ahead_fits_shared_memory(text, rows, columns, type, stages):
    """All that a turn of the loop reads counts: what is folded, what is read behind the folds, every axis of a tile."""
    assert f" stages({stages})" in first(text, type, rows, columns)


@pytest.mark.parametrize("columns, wide", [(2**31 - 8, True), (2**31 - 2**18, False)])
def test_what_a_tile_has_behind_the_last_element_counts(columns, wide):
    """A number that a loop adds its step to, or words beside a row's end, would be negative, and no mask would tell."""
    assert (" wide" in first(ALONG, "f16", 1, columns)) == wide


def test_no_tile_that_is_scanned_along_another_axis_has_fewer_elements_than_threads():
    """Triton cannot scan 16 x 1 elements by two warps: rows of 257 are one piece of 512 there, not 256 and 1."""
    text = """graph prefixes {{
  input %x: {type}[{rows}, 16, {columns}](16 * {columns}, {columns}, 1)
  %least: f32[{rows}, 16, {columns}](16 * {columns}, {columns}, 1) = scan_min[i1](%x[i0, i1, i2])
  %sum: f32[{rows}, 16](16, 1) for i2<{columns} = sum[i2](%least[i0, i1, i2])
  %out: f32[{rows}, 16, {columns}](16 * {columns}, {columns}, 1) = sub(%least[i0, i1, i2], %sum[i0, i1])
  return %out
}}"""
    assert first(text, "f32", 16, 257).startswith("tile(i1:16, i2:512?)")


PREFIXES = """graph prefixes {{
  input %x: {type}[{rows}, 1024, {columns}]({all}, {columns}, 1)
  %sums: f32[{rows}, 1024, {columns}]({all}, {columns}, 1) = scan_sum[i1](f32(%x[i0, i1, i2]))
  return %sums
}}"""


@pytest.mark.parametrize("rows, columns, found", [(64, 1024, "i1:16, i2:128) looped(i1) warps(1) stages(3)"),
                                                  (32, 1024, "i1:32, i2:64) looped(i1) warps(1) stages(3)"),
                                                  (20, 1024, "i1:64, i2:64) looped(i1) warps(4) stages(3)")])
def test_prefixes_down_columns(rows, columns, found):
    """A warp makes those of few rows at a time where there are columns for many warps."""
    text = PREFIXES.format(type="bf16", rows=rows, columns=columns, all=1024 * columns)
    (_, schedule), = schedule_plan(plan(parse_graph(text), LARGE), LARGE).bodies.values()
    assert str(schedule).startswith(f"tile({found}")


SUMMED = """graph summed {{
  input %x: bf16[{rows}, {columns}]({columns}, 1)
  input %dy: bf16[{rows}, {columns}]({columns}, 1)
  %dx: bf16[{rows}, {columns}]({columns}, 1) = bf16(mul(f32(%dy[i0, i1]), exp(f32(%x[i0, i1]))))
  %db: f32[{columns}](1) for i1<{rows} = sum[i1](f32(%dx[i1, i0]))
  return %dx, %db
}}"""


@pytest.mark.parametrize("rows, columns, kernels, found", [
    (16383, 4095, 1, "i1:4096+16?) shifted(i1 % 8) split(i0 / 264) warps(8)"),
    (65535, 1025, 1, "i1:1024+16?) shifted(i1 % 8) split(i0 / 1056) warps(2)"),
    (32767, 1537, 1, "i1:1024+512+16?) shifted(i1 % 8) split(i0 / 528) warps(4)"), (65536, 1024, 1, "i1:1024) split(i0 / 1056) warps(2)"),
    (43690, 1536, 1, "i0:16+16?, i1:64) split(i0 / 16)"), (65535, 513, 3, "i1:512?)"), (4095, 1025, 3, "i1:512?)")])
def test_columns_that_are_summed_beside_what_is_written(rows, columns, kernels, found):
    """Long blocks of columns, a row at a time, wherever rows begin; not where lanes would be idle, and not of few rows."""
    graph = widened(parse_graph(SUMMED.format(rows=rows, columns=columns)), LARGE)
    schedules = [str(s) for _, s in schedule_plan(plan(graph, LARGE), LARGE).bodies.values()]
    assert len(schedules) == kernels and (kernels > 1 or schedules[0].startswith(f"tile({found}")), schedules


NORMED = """graph normed {{
  input %x: bf16[{rows}, 256](256, 1)
  input %mean: f32[256](1)
  input %inverse: f32[256](1)
  input %w: f32[256](1)
  %out: bf16[{rows}, 256](256, 1) = bf16(mul(mul(sub(f32(%x[i0, i1]), %mean[i1]), {inverse}), %w[i1]))
  return %out
}}"""


@pytest.mark.parametrize("inverse, found", [("%inverse[i1]", "i0:8, i1:256) warps(4)"), ("%mean[i1]", "i0:128, i1:8) warps(2)")])
def test_pointwise_tiles_beside_values_of_the_columns(inverse, found):
    """A tile has rows, and twice as many elements, where three such values are read for each of its columns; words, whose rows are not told apart,
    where two are."""
    graph = parse_graph(NORMED.format(rows=100352, inverse=inverse))
    (_, schedule), = schedule_plan(plan(graph, LARGE), LARGE).bodies.values()
    assert str(schedule).startswith(f"tile({found}")


SIXTEENS = "+".join(["16"] * 9)


@pytest.mark.parametrize("rows, columns, values, found", [
    (132, 96, "%x[i1, i0]", f"i0:{SIXTEENS}?, i1:4) warps(2)"),
    (132, 96, "%x[i1, i0], %y[i1, i0], %z[i1, i0]", f"i0:{SIXTEENS}?, i1:4) warps(2)"),
    (32, 8192, "%x[i1, i0], %y[i1, i0], %z[i1, i0]", "i0:32, i1:64) warps(8)")])
def test_few_columns_of_several_values(rows, columns, values, found):
    """Partial results, mostly: few columns to a program, all rows at once where registers hold them."""
    folded = f"moments[i1]({values})" if "%z" in values else f"sum[i1](mul({values}, %y[i1, i0]))"
    graph = parse_graph(f"""graph late {{{{
  input %x: f32[{rows}, {columns}]({columns}, 1)
  input %y: f32[{rows}, {columns}]({columns}, 1)
  input %z: f32[{rows}, {columns}]({columns}, 1)
  %total: f32[{columns}](1) for i1<{rows} = {folded}
  return %total
}}}}""".replace("{{", "{").replace("}}", "}"))
    assert str(next(iter(schedule_plan(plan(graph, LARGE), LARGE).bodies.values()))[1]).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, found", [(1024, 8, "i0:32, i1:8) warps(1)"), (65536, 8, "i0:256, i1:8) warps(4)")])
def test_few_short_rows_are_shared_out(rows, columns, found):
    assert first(ALONG, "f32", rows, columns).startswith(f"tile({found}")


def both(text: str, type: str, rows: int, columns: int) -> list[str]:
    """The schedules of the kernels of a graph, at these sizes."""
    scheduled = schedule_plan(plan(parse_graph(text.format(type=type, rows=rows, columns=columns)), LARGE), LARGE)
    return [str(scheduled.bodies[step][1]) for step in scheduled.plan.steps if step in scheduled.bodies]


WALKED = """graph walked {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %dy: {type}[{rows}, {columns}]({columns}, 1)
  %one: f32[{rows}](1) for i1<{columns} = sum[i1](mul(f32(%dy[i0, i1]), f32(%x[i0, i1])))
  %two: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%dy[i0, i1]))
  %columns: f32[{columns}](1) for i1<{rows} = sum[i1](mul(f32(%dy[i1, i0]), f32(%x[i1, i0])))
  %dx: {type}[{rows}, {columns}]({columns}, 1) = {type}(sub(sub(f32(%dy[i0, i1]), %two[i0]), mul(f32(%x[i0, i1]), %one[i0])))
  return %columns, %dx
}}"""


@pytest.mark.parametrize("rows, columns, type, found", [(256, 262144, "f16", True), (64, 262144, "f32", True), (32, 131072, "f32", False)])
def test_rows_that_are_walked_down_next_are_summed_last_to_first(rows, columns, type, found):
    """Where more is read than stays in the cache: a block of a row to a program."""
    first, second = both(WALKED, type, rows, columns)
    assert first.endswith("descending") == found and " descending" not in second
    assert not found or f"split(i1 / {columns // 4096}) by_thread" in first


def test_what_a_small_kernel_reads_is_asked_for_first():
    """Of three values that a second kernel folds, no load waits for what is written of another."""
    graph = parse_graph("""graph late {
  input %x: f32[132, 96](96, 1)
  input %y: f32[132, 96](96, 1)
  %one: f32[96](1) for i1<132 = sum[i1](%x[i1, i0])
  %two: f32[96](1) for i1<132 = sum[i1](mul(%x[i1, i0], %y[i1, i0]))
  return %one, %two
}""")
    (built,) = render_plan(lower_plan(schedule_plan(plan(graph, LARGE), LARGE), LARGE)).values()
    text = built.parts[-1].unit.text
    assert text.count("tl.load(") == 2 * 9 and text.rindex("tl.load(") < text.index("tl.sum(")


@pytest.mark.parametrize("columns, whole", [(160, True), (128, False)])
def test_what_rows_in_pieces_share_is_read_as_they_lie_in_threads(columns, whole):
    planned = plan(parse_graph(WEIGHTED.format(type="bf16", rows=65536, columns=columns)), LARGE)
    group, = planned.steps
    part, = render_plan(lower_plan(schedule_plan(planned, LARGE), LARGE))[group].parts
    read = [line for line in part.unit.text.splitlines() if "tl.load(p1" in line]
    assert read and all(("tl.zeros([" in line) == whole for line in read)


@pytest.mark.parametrize("rows, columns, type, found", [
    (1827, 9184, "bf16", "i1:4096?) looped(i1) warps(8)"), (537, 7816, "f16", "i1:4096?) looped(i1) warps(8)"),
    (2048, 16384, "f16", "i1:8192) looped(i1) warps(16)")])
def test_rows_of_sums_that_are_not_long(rows, columns, type, found):
    assert first(ALONG, type, rows, columns).startswith(f"tile({found}")


NARROW_ROWS = """graph narrow {{
  input %x: bf16[{rows}, {columns}]({columns}, 1)
  %sum: f32[{columns}](1) for i1<{rows} = sum[i1](f32(%x[i1, i0]))
  {beside}
  return %sum, %other
}}"""


@pytest.mark.parametrize("beside, parts", [("%other: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%x[i0, i1]))", 0),
                                           ("%other: f32[]() for i0<{rows}, i1<{columns} = sum[i0, i1](f32(%x[i0, i1]))", 1)])
def test_rows_that_are_folded_by_themselves_do_not_count_as_one(beside, parts):
    """Sums of their columns stand in the kernel that has each row."""
    text = NARROW_ROWS.format(rows=131072, columns=32, beside=beside.format(rows=131072, columns=32))
    graph = parse_graph(text)
    assert len(widened(graph, LARGE).nodes) - len(graph.nodes) == parts


ALONG_THE_MIDDLE = """graph prefixes {{
  input %x: {type}[6, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  %out: f32[6, {rows}, {columns}]({rows} * {columns}, {columns}, 1) = scan_sum[i1](f32(%x[i0, i1, i2]))
  return %out
}}"""


@pytest.mark.parametrize("rows, columns, found", [
    (1249, 3279, "i1:64?, i2:64?) looped(i1) warps(2) stages(1)"), (1249, 3278, "i1:64?, i2:64?) looped(i1) warps(1) stages(1)"),
    (500, 1279, "i1:64?, i2:8?) looped(i1) warps(1) stages(1)"), (500, 401, "i1:128?, i2:4?) looped(i1) warps(1) stages(1)"),
    (1249, 3280, "i1:64?, i2:64?) looped(i1) warps(4) stages(3)"),
    (1249, 10001, "i1:16?, i2:64?) looped(i1) warps(1) stages(1)")])
def test_columns_of_prefixes_that_begin_anywhere(rows, columns, found):
    assert first(ALONG_THE_MIDDLE, "bf16", rows, columns).startswith(f"tile({found}")


DOWN_COLUMNS = """graph prefixes {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(scan_sum[i0](f32(%x[i0, i1])))
  return %out
}}"""


@pytest.mark.parametrize("rows, columns, type, found", [
    (216, 65535, "f32", "i1:4096?) looped(i1) warps(4) stages(1)"),
    (300, 20001, "bf16", "i1:16384+4096+16?) shifted(i1 % 8) warps(16)"), (1000, 10001, "bf16", "i1:2048?) looped(i1) warps(2) stages(1)")])
def test_rows_of_prefixes(rows, columns, type, found):
    assert first(ALONG_ROWS, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("text, rows, columns, type, found", [
    (ALONG_ROWS, 64, 131071, "f16", "i1 / 4096"), (ALONG_ROWS, 197, 32768, "f16", "i1 / 4096"), (ALONG_ROWS, 64, 131072, "f32", "i1 / 2048"),
    (ALONG_ROWS, 2, 65536, "f16", "i1 / 1024"), (ALONG_ROWS, 197, 32767, "f16", ""), (ALONG_ROWS, 198, 32768, "f16", ""),
    (DOWN_COLUMNS, 19041, 138, "bf16", "i0 / 64"), (DOWN_COLUMNS, 141308, 63, "f32", "i0 / 128"), (DOWN_COLUMNS, 512, 8000, "f32", "i0 / 64"),
    (DOWN_COLUMNS, 512, 8448, "f32", ""), (DOWN_COLUMNS, 511, 8000, "f32", ""), (DOWN_COLUMNS, 100_000_000, 2, "bf16", "i0 / 4096")])
def test_few_long_rows_and_columns_of_prefixes_in_blocks(text, rows, columns, type, found):
    """Blocks are long enough for one program to make the prefixes of what they fold to."""
    schedule = first(text, type, rows, columns)
    assert schedule == f"prefixes({found})" if found else schedule.startswith("tile(")


MIDDLE_NORM = """graph middle {{
  input %x: {type}[485, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  %squares: f32[485, {columns}]({columns}, 1) for i2<{rows} = sum[i2](mul(f32(%x[i0, i2, i1]), f32(%x[i0, i2, i1])))
  %out: {type}[485, {rows}, {columns}]({rows} * {columns}, {columns}, 1) = {type}(mul(f32(%x[i0, i1, i2]), rsqrt(%squares[i0, i2])))
  return %out
}}"""


@pytest.mark.parametrize("rows, found", [(80, "i1:16+16+16+16+16, i2:64?)"), (96, "i1:32+32+32, i2:64?)"), (64, "i1:64, i2:64?)")])
def test_rows_along_the_middle_are_held_in_equal_pieces(rows, found):
    assert first(MIDDLE_NORM, "bf16", rows, 648).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, found", [
    (8, 651, "bf16", "i1:8, i2:128?) warps(2)"), (32, 651, "bf16", "i1:32, i2:128?) warps(4)"), (16, 651, "f32", "i1:16, i2:64?) warps(8)"),
    (100, 650, "bf16", f"i1:{alike(16, 7)}?, i2:64?) warps(4)"), (80, 648, "f32", f"i1:{alike(16, 5)}, i2:64?) warps(4)")])
def test_threads_of_columns_that_are_held_and_written(rows, columns, type, found):
    assert first(MIDDLE_NORM, type, rows, columns).startswith(f"tile({found}")


SMALL_SUMS = """graph small {{
  input %x: {type}[60001, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  %out: f32[60001, {columns}]({columns}, 1) for i2<{rows} = sum[i2](f32(%x[i0, i2, i1]))
  return %out
}}"""


@pytest.mark.parametrize("rows, columns, found", [
    (8, 32, "i0:4?, i1:8, i2:32) warps(1)"), (16, 24, "i0:2?, i1:16, i2:32?) warps(1)"), (16, 64, "i1:16, i2:64) warps(1)")])
def test_programs_hold_several_small_matrices(rows, columns, found):
    assert first(SMALL_SUMS, "bf16", rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("columns, type, found", [
    (320, "bf16", "i0:8, i1:512?)"), (384, "bf16", "i0:8, i1:256+128)"), (300, "f32", "i0:4, i1:512?)")])
def test_rows_with_a_little_piece_whose_column_sums_are_carried_are_one_piece(columns, type, found):
    assert first(BACKWARD, type, 300000, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, found", [
    (300000, 100, "bf16", "i0:8, i1:32+32+32+32?) split(i0 / 1056) warps(4) stages(1)"),
    (300000, 51, "f32", "i0:16, i1:32+32?) split(i0 / 1056) warps(4) stages(1)"),
    (131072, 150, "bf16", "i0:8, i1:32+32+32+32+32?) split(i0 / 528) warps(4) stages(1)"),
    (300000, 64, "bf16", "i0:64?, i1:64)"), (10000, 100, "bf16", "i0:32?, i1:128?)"), (300000, 250, "bf16", f"i0:8, i1:{alike(32, 8)}?)")])
def test_many_short_rows_whose_column_sums_are_carried_are_equal_pieces(rows, columns, type, found):
    assert first(BACKWARD, type, rows, columns).startswith(f"tile({found}")


MIDDLE_SUM = """graph middle {{
  input %x: {type}[107, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  %out: {type}[107, {columns}]({columns}, 1) for i2<{rows} = sum[i2](%x[i0, i2, i1])
  return %out
}}"""


@pytest.mark.parametrize("rows, found", [
    (55, "i1:8+8+8+8+8+8+8?, i2:64?) warps(16)"), (75, "i1:32?, i2:64?) looped(i1) warps(8)"), (1024, "i1:64, i2:64?) looped(i1) warps(16)")])
def test_matrices_of_few_rows_of_32_bits_are_summed_in_one_turn(rows, found):
    assert first(MIDDLE_SUM, "f32", rows, 8790).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, kernels", [(64, 501, "bf16", 1), (512, 502, "bf16", 1), (130, 402, "f32", 1), (1024, 501, "bf16", 2)])
def test_norms_along_a_short_middle_axis_are_one_kernel(rows, columns, type, kernels):
    """Whatever words their lines are read in: what a program holds is read once."""
    graph = parse_graph(MIDDLE_NORM.format(type=type, rows=rows, columns=columns))
    assert len(plan(graph, LARGE).steps) == kernels


ONE_PASS = """graph statistics {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %mean: f32[{columns}](1) for i1<{rows} = moments[i1](f32(%x[i1, i0]), 0.0:f32, 1.0:f32)
  %square: f32[{columns}](1) for i1<{rows} = moments.1[i1](f32(%x[i1, i0]), 0.0:f32, 1.0:f32)
  return %mean, %square
}}"""


@pytest.mark.parametrize("rows, columns, count, programs", [(12096, 768, 6, 22), (103968, 96, 5, 88), (200704, 256, 8, 66)])
def test_statistics_are_read_in_full_turns(rows, columns, count, programs):
    schedule, *_ = schedule_plan(plan(parse_graph(ONE_PASS.format(type="bf16", rows=rows, columns=columns)), LARGE), LARGE).bodies.values()
    assert schedule[1].programs == programs and len(schedule[1].sizes(schedule[1].split[0])) == count


@pytest.mark.parametrize("rows, columns, type, found", [
    (487, 103168, "bf16", "i1:2048+1024+256) split(i1 / 4) by_thread"), (8000, 20000, "bf16", "i1:4096?) split(i1 / 1) by_thread"),
    (300, 50001, "f16", "i1:4096+16?) shifted(i1 % 8) split(i1 / 3) by_thread"),
    (576, 87352, "f16", "i1:4096?) split(i1 / 2) by_thread warps(4) stages(1) registers(64) once peeled"),
    (4000, 20000, "f32", "i1:2048?) split(i1 / 1) by_thread warps(4) stages(1) registers(128)"), (8000, 16000, "bf16", "i1:4096?) looped(i1)"),
    (300, 60000, "f32", "i1:2048?) split(i1 / 3) by_thread warps(4) stages(1) registers(128)")])
def test_moments_of_long_rows(rows, columns, type, found):
    assert first(VARIANCE, type, rows, columns).startswith(f"tile({found}")


def test_a_row_that_is_folded_alike_for_all_rows_is_read_as_one(tmp_path):
    """Its sum is needed by each program: beside the rows of a tile it would be folded as often as the tile has rows."""
    pytest.importorskip("triton")
    graph = parse_graph("""graph apart {
  input %p: f32[2000, 9](9, 1)
  input %x: f32[391, 9](9, 1)
  %top: f32[]() for i0<2000, i1<9 = max[i0, i1](%p[i0, i1])
  %sum: f32[]() for i0<2000, i1<9 = sum[i0, i1](mul(%p[i0, i1], %p[i0, i1]))
  %big: f32[]() = tanh(%top[])
  %out: f32[391, 5](5, 1) = div(%x[i0, 2 * i1], %sum[])
  return %big, %out
}""")
    built = render_plan(lower_plan(schedule_plan(plan(graph, LARGE), LARGE), LARGE)).values()
    units = [p.unit for b in built for p in b.parts]
    assert len(gpu_build.build(units, LARGE.arch, cache_dir=str(tmp_path))) == len(units)


SEVERAL_SUMS = """graph several {{
  input %x: {type}[3001, 6, {rows}, {columns}]({rows} * 6 * {columns}, {columns}, 6 * {columns}, 1)
  input %y: {type}[3001, 6, {rows}, {columns}]({rows} * 6 * {columns}, {columns}, 6 * {columns}, 1)
  %inner: f32[3001, 6](6, 1) for i2<{rows}, i3<{columns} = sum[i2, i3](mul(f32(%x[i0, i1, i2, i3]), f32(%y[i0, i1, i2, i3])))
  %a: f32[6, {columns}]({columns}, 1) for i2<3001, i3<{rows} = sum[i2, i3](mul(f32(%x[i2, i0, i3, i1]), %inner[i2, i0]))
  %b: f32[6, {columns}]({columns}, 1) for i2<3001, i3<{rows} = sum[i2, i3](mul(f32(%y[i2, i0, i3, i1]), %inner[i2, i0]))
  %c: f32[6, {columns}]({columns}, 1) for i2<3001, i3<{rows} = sum[i2, i3](sub(f32(%y[i2, i0, i3, i1]), %inner[i2, i0]))
  return %a, %b, %c
}}"""


@pytest.mark.parametrize("rows, columns, type, found", [
    (49, 15, "bf16", f"i1:{alike(8, 7)}?, i3:16?)"), (400, 15, "f32", f"i1:{alike(32, 13)}?, i3:16?)"), (64, 15, "bf16", "i1:64, i3:16?)")])
def test_columns_beside_which_several_sums_are_carried(rows, columns, type, found):
    assert found in first(SEVERAL_SUMS, type, rows, columns)


PLACE = """graph place {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  %place: i64[{rows}](1) for i1<{columns} = argmax.1[i1](f32(%x[i0, i1]), coord(i1))
  return %place
}}"""
RESIDUAL = """graph residual {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %y: {type}[{rows}, {columns}]({columns}, 1)
  input %bias: {type}[{columns}](1)
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(add(f32(%x[i0, i1]), add(f32(%y[i0, i1]), f32(%bias[i1]))))
  %sum: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%out[i0, i1]))
  return %out, %sum
}}"""


@pytest.mark.parametrize("text, rows, columns, type, found", [
    (ALONG, 64, 16383, "bf16", "i1:8192+16?) shifted(i1 % 8) looped(i1) warps(16)"),
    (ALONG, 600, 16383, "bf16", "i1:8192+16?) shifted(i1 % 8) looped(i1) warps(4)"),
    (PLACE, 285, 93565, "bf16", "i1:2048+16?) shifted(i1 % 8) looped(i1) warps(16)"),
    (PLACE, 2850, 93565, "bf16", "i1:2048+16?) shifted(i1 % 8) looped(i1) warps(4)")])
def test_few_rows_that_are_run_through_have_more_warps(text, rows, columns, type, found):
    assert first(text, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, programs", [(257, 264), (256, 256), (130, 136)])
def test_every_one_of_few_rows_that_begin_anywhere_has_a_program(rows, programs):
    """Though the rows of a program, of which there are a multiple of eight, would have to begin alike."""
    assert f" split(i0 / {programs}) " in first(WEIGHTED, "f16", rows, 5115)


@pytest.mark.parametrize("text, rows, found", [(SOFTMAX, 65536, f"i0:4, i1:{alike(32, 8)}?) warps(4)"), (GRADIENT, 42451, "i0:4?, i1:256?) warps(1)"),
                                               (WEIGHTED, 65536, "i0:8, i1:256?) warps(1)"), (WEIGHTED, 18224, "i0:4, i1:256?) warps(1)")])
def test_fewer_short_rows_that_begin_anywhere_where_much_is_made_of_them(text, rows, found):
    """Or where they are few."""
    assert first(text, "bf16", rows, 255).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, type, found", [(1378, 26899, "f16", "i1:1024?) looped(i1) warps(2)"),
                                                        (1136, 8755, "f32", "i1:1024?) looped(i1) warps(4)"),
                                                        (591, 16383, "f32", "i1:2048?) looped(i1) warps(2)")])
def test_prefixes_of_many_rows_are_made_fewer_at_a_step(rows, columns, type, found):
    assert first(ALONG_ROWS, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("type, columns, found", [("bf16", 154970, "i1:1024?) split(i1 / 61) by_thread warps(2) stages(1)"),
                                                  ("bf16", 154976, "i1:4096?)")])
def test_sums_beside_what_is_written_by_programs_that_share_rows_that_begin_anywhere(type, columns, found):
    """Shorter tiles, more programs, no cap on registers."""
    schedule = first(RESIDUAL, type, 138, columns)
    assert schedule.startswith(f"tile({found}") and (" registers(" in schedule) == (columns % 8 == 0)


NORM = """graph norm {{
  input %x: {type}[391, {rows}, {columns}]({rows} * {columns}, {columns}, 1)
  %squares: f32[391, {columns}]({columns}, 1) for i2<{rows} = sum[i2](mul(f32(%x[i0, i2, i1]), f32(%x[i0, i2, i1])))
  %out: {type}[391, {rows}, {columns}]({rows} * {columns}, {columns}, 1) = {type}(mul(f32(%x[i0, i1, i2]), rsqrt(%squares[i0, i2])))
  return %out
}}"""
STACK = """graph stack {{
  input %x: {type}[{rows}, 4, {columns}](4 * {columns}, {columns}, 1)
  %sums: {type}[{rows}, 4, {columns}](4 * {columns}, {columns}, 1) = {type}(scan_sum[i1](f32(%x[i0, i1, i2])))
  return %sums
}}"""
CLASSES = """graph classes {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %target: i64[{rows}](1)
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(sub(exp(f32(%x[i0, i1])), f32(eq(coord(i1), %target[i0]))))
  return %out
}}"""
SCALED = """graph scaled {{
  input %x: {type}[{rows}, {columns}]({columns}, 1)
  input %a: f32[{columns}](1)
  %out: {type}[{rows}, {columns}]({columns}, 1) = {type}(mul(f32(%x[i0, i1]), %a[i1]))
  return %out
}}"""


@pytest.mark.parametrize("text, rows, columns, type, found", [
    (ALONG, 2047, 4225, "f32", "i1:4096+128+8?) shifted(i1 % 4) warps(4)"), (ALONG, 2047, 7001, "f32", "i1:4096+8?) shifted(i1 % 4) looped(i1)"),
    (NORM, 1581, 43, "bf16", "i1:256+256+256+256+256+256+256?, i2:16?) warps(16)"), (NORM, 1581, 43, "f32", "i1:64?, i2:64?) looped(i1)"),
    (STACK, 111924, 18, "f16", "i0:8?, i1:4, i2:32?) warps(1)"), (DOWN, 440960, 36, "f32", "i0:64, i1:64?) split(i0 / 1056) warps(1)"),
    (SCALED, 3600, 768, "bf16", "i0:128, i1:8) warps(2)"), (CLASSES, 1 << 25, 129, "f32", "i0:4, i1:128+1) warps(1)"),
    (CLASSES, 1 << 25, 193, "f32", "i0:4, i1:256?) warps(2)")])
def test_lanes_and_turns_that_would_idle(text, rows, columns, type, found):
    """Rows just over a chunk and middle axes of up to 2048 elements of 16 bits are held; few columns and few rows are no reason for more warps; rows
    of three times a power of two, in which nothing is folded, are words."""
    assert first(text, type, rows, columns).startswith(f"tile({found}")


@pytest.mark.parametrize("rows, columns, found", [(903216, 30, "i0:64?, i1:32?) warps(4)"), (131072, 30, "i0:16, i1:32?) warps(4)")])
def test_very_many_short_rows_lie_more_to_a_program(rows, columns, found):
    assert first(WEIGHTED, "bf16", rows, columns).startswith(f"tile({found}")
