"""So many rows to a program that beginning programs takes no longer than what they move (`schedule.tile_programs`): on either side of each rung, and
right."""
from __future__ import annotations

import pytest

from benchmarks import gpu_plans
from tests.large_gpu import alike, right_on_one
from tokamak.schedule import tile_programs


@pytest.mark.parametrize("name, found", [
    ("softmax_bf16_900000x42", f"i0:16, i1:{alike(16, 3)}?) warps(4)"), ("softmax_bf16_600000x90", f"i0:8, i1:{alike(16, 6)}?) warps(2)"),
    ("softmax_bf16_45067x127", f"i0:4?, i1:{alike(16, 8)}?) warps(2)"),                     # too few programs
    ("log_softmax_bf16_262143x51", f"i0:8?, i1:{alike(8, 7)}?) warps(2)"),                  # pieces shorter than a sector
    ("softmax_f32_600000x37", f"i0:8, i1:{alike(8, 5)}?) warps(2)"),                        # enough bytes
    ("softmax_bwd_f32_400000x46", "i0:8, i1:64?) warps(1)"), ("bias_dropout_add_ln_f32_38891x78", "i0:4?, i1:128?) warps(1)"),
    ("softmax_f32_1191755x46", f"i0:8?, i1:{alike(16, 3)}?) warps(1)"), ("cumsum_bf16_901385x33", "i0:16?, i1:32+1) warps(1)"),
    ("sum_inner_f32_262144x31", "i0:16, i1:32?) warps(1)")])                                # nothing is written along its rows
def test_the_first_kernel(name, found):
    first, *_ = gpu_plans.planned(name)
    assert first["schedule"].startswith(f"tile({found}"), first["schedule"]


@pytest.mark.parametrize("name, rows", [("softmax_bf16_413x42", 16), ("softmax_bwd_f32_201x46", 8), ("layernorm_bf16_7x1", 8),
                                        ("softmax_f16_5x33", 8)])
def test_they_are_right(monkeypatch, name, rows):
    """Also of fewer rows than a program has."""
    monkeypatch.setattr(tile_programs, "MANY", 0)
    schedules = right_on_one(monkeypatch, name)
    assert any(sum(dict(s.pieces).get(s.order[0], (1,))) == rows for s in schedules), schedules
