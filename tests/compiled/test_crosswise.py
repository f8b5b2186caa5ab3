"""What is folded along its rows and along its columns, in Triton's interpreter: programs hold one row at a time and carry the sums of columns, and
where a program has all of a matrix's rows it stores what is made of those sums itself."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compiled.interpreted import check, values
from tokamak.fuse import held_rows
from tokamak.tools.record import recording

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(held_rows, "CROSSED_LEAST", 0)


def adaptive(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


def gated(x, scale, shift):
    """Both sums are used again: a product of one, a square of the other."""
    return F.rms_norm(x, x.shape[-1:]) * torch.tanh(scale)[:, None] + (shift * shift)[:, None]


@pytest.mark.parametrize("matrices, rows, columns, dtype, programs", [
    (3, 20, 1000, torch.float16, 5), (6, 17, 516, torch.bfloat16, 5), (6, 12, 772, torch.float32, 3),       # shared, combined by a second kernel
    (140, 17, 516, torch.bfloat16, 1), (135, 17, 515, torch.float16, 1), (133, 9, 1001, torch.float32, 1)])
def test_programs_hold_a_row_and_carry_sums_of_columns(matrices, rows, columns, dtype, programs):
    with recording() as record:
        check(adaptive, *_inputs(matrices, rows, columns, dtype))
    kernels, = record.graphs[-1].values["lower"].kernels.values()
    first, *combined = [str(k.schedule) for k in kernels]
    assert f"split(i1 / {programs})" in first and "i1:" not in first and "shifted" not in first
    assert len(combined) == (programs > 1)


@pytest.mark.parametrize("matrices, rows, columns, dtype, at_once", [
    (140, 60, 40, torch.bfloat16, 64), (133, 100, 33, torch.float16, 16), (150, 30, 65, torch.bfloat16, 8), (140, 21, 96, torch.float32, 32)])
def test_programs_hold_several_rows_and_carry_sums_of_columns(matrices, rows, columns, dtype, at_once):
    with recording() as record:
        check(adaptive, *_inputs(matrices, rows, columns, dtype))
    first, = [str(k.schedule) for k in next(iter(record.graphs[-1].values["lower"].kernels.values()))]
    assert first.startswith(f"tile(i1:{at_once}?") and "split(i1 / 1)" in first


@pytest.mark.parametrize("matrices, rows, columns, dtype", [(6, 17, 516, torch.bfloat16), (135, 9, 515, torch.float16), (5, 300, 40, torch.float32)])
def test_what_is_made_of_the_sums(matrices, rows, columns, dtype):
    check(gated, *_inputs(matrices, rows, columns, dtype))


def _inputs(matrices: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(values(*shape, dtype=dtype, grad=True) for shape in ((matrices, rows, columns), (matrices, columns), (matrices, columns)))
