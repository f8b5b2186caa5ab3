"""What a loop does not change is prepared outside: divisors become reciprocals, a coordinate's comparison becomes one of lane numbers."""
from __future__ import annotations

import numpy as np
import pytest
import torch

import tokamak

INF = float("inf")
EXTREMES = [1.0, 3.0, -7.5, 1e-20, -1e30, 3.4e38, 1.5e-38, 1e-40, 1e-45, 0.0, -0.0, INF, -INF, float("nan")]


def compiled(fn, *inputs):
    torch._dynamo.reset()
    return tokamak.compile(fn, strict=True, cache_dir="", dynamic=False)(*inputs)


def test_division_by_a_number_of_each_row():
    """Within 1.5 units in the last place for numbers of every size; infinities, zeros and NaN as in eager."""
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2**32, 5000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = torch.from_numpy(np.concatenate([wide, rng.normal(size=1000).astype(np.float32), np.array(EXTREMES, np.float32)]))
    d = torch.from_numpy(np.concatenate([np.array(EXTREMES, np.float32), wide[:50]]))
    ours = compiled(lambda x, d: x[None, :] / d[:, None], x, d).double().numpy()
    with np.errstate(all="ignore"):
        truth = x.double().numpy()[None, :] / d.double().numpy()[:, None]
        near = truth.astype(np.float32)
        unit = np.maximum(np.spacing(np.abs(near)), np.float32(1e-45)).astype(np.float64)
        finite = np.isfinite(near) & np.isfinite(ours)
        assert np.array_equal(np.isnan(near), np.isnan(ours))
        assert (np.abs(ours - truth)[finite] <= 1.51 * unit[finite]).all()
    edge = ~finite & ~np.isnan(near)      # one of them is infinite: the truth lies at the end of the range
    assert (np.abs(truth[edge]) > 3.4028e38).all() and (np.sign(ours[edge]) == np.sign(near[edge])).all()
    zero = (near == 0) & (ours == 0)
    assert np.array_equal(np.signbit(near[zero]), np.signbit(ours[zero]))


@pytest.mark.parametrize("compare", [torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge])
def test_a_coordinate_against_a_number_of_each_row(compare):
    bounds = torch.tensor([0, 5, 16, 37, 99, 100, 101, -1, -2, 2**31, -2**31, 2**32 + 5, 2**63 - 1, -2**63])
    for fn in (lambda b: compare(torch.arange(100)[None, :], b[:, None]), lambda b: compare(b[:, None], torch.arange(100)[None, :] + 3),
               lambda b: torch.where(compare(torch.arange(100)[None, :] - 7, b[:, None]), 1.0, torch.arange(100)[None, :] * 0.5)):
        assert torch.equal(compiled(fn, bounds), fn(bounds))


def test_a_quotient_that_is_rounded_to_integers_is_exact():
    """Quantising by a scale: halves of a step lie where eager has them."""
    scale = torch.tensor(0.02)
    x = torch.arange(-4000, 4001).float() * 0.01
    for fn in (lambda x, s: (x / s).round().clamp(-128, 127) * s, lambda x, s: (x / s).floor(), lambda x, s: (x / s).to(torch.int32),
               lambda x, s: x / s - (x / s).floor()):
        torch._dynamo.reset()
        assert torch.equal(tokamak.compile(fn, strict=True)(x, scale), fn(x, scale))
