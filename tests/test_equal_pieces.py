"""Held rows in equal pieces: how they cover a row, which kernels have them (a case on either side of each rung), and that they are right."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu_plans
from tests.large_gpu import alike, right_on_one
from tokamak.fuse import held_rows, sharing
from tokamak.schedule.equal_pieces import FEW, IDLE, LEAST, equal
from tokamak.schedule.tile_stages import power


@given(st.integers(1, 5000))
def test_equal_pieces_cover_a_row(n):
    pieces = equal(n)
    wasted = lambda size: -n % size
    if pieces:
        size, = set(pieces)
        assert power(size) == size >= LEAST and len(pieces) == -(-n // size) > 1 and wasted(size) * FEW[-1][1] <= n
        assert wasted(size) * IDLE[0] <= n or not any(wasted(s) * IDLE[0] <= n for s in (16, 32, 64, 128, 256) if 5 * s <= n)
    else:
        assert all(wasted(size) * FEW[-1][1] > n for size in (8, 16, 32, 64) if size < n)


@pytest.mark.parametrize("n, size, count", [(15, 8, 2), (25, 8, 4), (31, 8, 4), (33, 8, 5), (49, 8, 7), (63, 16, 4), (65, 16, 5), (129, 16, 9),
                                            (255, 32, 8), (400, 64, 7), (2112, 256, 9)])
def test_they_are_as_long_as_few_idle_lanes_allow(n, size, count):
    assert equal(n) == (size,) * count


@pytest.mark.parametrize("name, found", [
    ("softmax_f32_251343x33", f"i0:16?, i1:{alike(8, 5)}?) warps(4)"), ("softmax_bf16_2405381x33", "i0:32?, i1:32+1) warps(1)"),      # a row a thread
    ("log_softmax_bf16_1086144x31", f"i0:64, i1:{alike(8, 4)}?) warps(8)"),                                           # two elements to a thread
    ("softmax_f16_65536x96", "i0:8, i1:32+32+32)"),                                                                   # at words: as they were
    ("softmax_f32_65536x257", "i0:2, i1:256+1) warps(1)"), ("layernorm_bwd_f32_146542x257", f"i0:8?, i1:{alike(32, 9)}?) split(i0 / 528) warps(4)"),
    ("layernorm_f32_16384x129", "i0:4, i1:128+1) warps(1)"), ("softmax_f32_16384x129", f"i0:4, i1:{alike(16, 9)}?) warps(2)"),
    ("rmsnorm_add_f32_179898x129", "i0:4?, i1:128+1) warps(1)"), ("weightnorm_bwd_f32_2014443x33", f"i0:16?, i1:{alike(8, 5)}?) warps(4)"),
    ("gated_rmsnorm_bf16_131071x70", "i0:8?, i1:64+8?) warps(1)"), ("gated_rmsnorm_bf16_481399x79", f"i0:8?, i1:{alike(16, 5)}?) warps(2)"),
    ("log_softmax_bwd_f16_279787x15", "i0:64?, i1:16?) warps(2)"), ("power_norm_f16_396429x29", f"i0:16?, i1:{alike(8, 4)}?) warps(4)"),
    ("ada_layernorm_f32_4047x64x127", "i1:4, i2:128?) warps(1)"), ("bias_dropout_add_ln_f32_41480x65", f"i0:8, i1:{alike(16, 5)}?) warps(4)"),
    ("sum_inner_f32_262144x31", "i0:16, i1:32?) warps(1)"), ("l1norm_f32_332178x35", f"i0:32?, i1:{alike(8, 5)}?)"),
    ("sum_inner_f32_264265x44", "i0:16?, i1:32+16?) warps(2)"), ("preference_f32_153012x56", f"i0:16?, i1:{alike(16, 4)}?) warps(2)"),
    ("ada_layernorm_bwd_bf16_1335x40x166", f"i1:8, i2:{alike(32, 6)}?) split(i1 / 1) warps(4)"),
    ("ada_layernorm_bwd_f16_2333x127x33", f"i1:16?, i2:{alike(8, 5)}?) split(i1 / 1) warps(4)"),
    ("ada_layernorm_f16_2670x32x160", f"i1:4, i2:{alike(32, 5)}) warps(1)"), ("cumsum_bf16_901385x33", "i0:16?, i1:32+1)"),
    ("rmsnorm_bwd_f32_262222x65", f"i0:8?, i1:{alike(16, 5)}?) split(i0 / 1056) warps(4)"),
    ("layernorm_bwd_bf16_47120x49", "i0:8, i1:32+32?)"),
    ("rmsnorm_middle_bwd_bf16_65x378x513", f"i1:{alike(64, 6)}?, i2:8?)"), ("rmsnorm_middle_bwd_f16_296x257x552", "i1:256+1, i2:16?)"),
    ("evonorm_f32_nchw_41x256x40x40", f"i2:4+4, i3:{alike(128, 13)}?) staged(i3)"), ("evonorm_f16_nhwc_268x1280x8x8", f"i2:2, i1:{alike(8, 8)}, i3:"),
    ("batchnorm_f32_nchw_40x480x20x20", f"i0:16+16+8, i2:{alike(64, 7)}?) staged(i0)"),
    ("groupnorm_f32_nhwc_1188x512x7x7", "i2:2, i1:32+16+1, i3:16) staged(i1)"),
    ("groupnorm_bwd_bf16_nchw_452x192x7x7", f"i1:2, i2:8?, i3:{alike(8, 7)}?)"),
    ("softmax_middle_f32_183x18x2774", "i1:16+2, i2:128?) warps(4)"), ("softmax_middle_f32_183x24x2774", "i1:8+8+8, i2:64?) warps(16)")])
def test_the_first_kernel(name, found):
    first, *_ = gpu_plans.planned(name)
    assert first["schedule"].startswith(f"tile({found}"), first["schedule"]


@pytest.mark.parametrize("name, found", [
    ("ada_layernorm_bwd_bf16_1335x40x166", f"i1:{alike(8, 5)}, i2:{alike(16, 11)}?) staged(i1)"),
    ("ada_layernorm_bwd_f16_2333x127x33", "i1:128?, i2:32+1) staged(i1)")])
def test_matrices_that_are_held_along_both_axes(name, found, monkeypatch):
    monkeypatch.setattr(held_rows, "CROSSED_HELD", sharing.HELD)             # though programs that carry the sums of columns do better
    first, *_ = gpu_plans.planned(name)
    assert first["schedule"].startswith(f"tile({found}"), first["schedule"]


@pytest.mark.parametrize("name, found", [("bias_dropout_add_ln_bwd_bf16_105855x160", f"i0:{alike(64, 9)}?, i1:4) warps(8)"),
                                         ("rmsnorm_bwd_f32_1376x8192", "i0:128+4, i1:64) warps(16)")])
def test_what_folds_partial_results(name, found):
    assert gpu_plans.planned(name)[1]["schedule"].startswith(f"tile({found}")


@pytest.mark.parametrize("name", [
    "softmax_f32_131x33", "softmax_bf16_70x65", "log_softmax_f16_257x31", "layernorm_bwd_f32_66x77", "rmsnorm_bwd_bf16_65x45", "cosine_bwd_f32_67x67",
    "var_mean_f32_140x33", "amax_argmax_bf16_101x55", "smooth_cross_entropy_bwd_bf16_66x42", "weightnorm_bwd_f32_130x33",
    "rmsnorm_middle_bwd_f32_5x290x70", "groupnorm_bwd_f32_nchw_4x64x7x7", "ada_layernorm_bwd_f32_5x40x333", "block_norm_f32_131x15",
    "cosine_loss_bf16_66x416", "layernorm_2d_bwd_f32_nchw_2x640x6x5"])
def test_they_are_right(monkeypatch, name):
    """Outputs and gradients against float64, planned for a GPU of one multiprocessor, on which a tile has several rows."""
    schedules = right_on_one(monkeypatch, name)
    assert any(len(set(p)) == 1 < len(p) for s in schedules for p in dict(s.pieces).values()), schedules
