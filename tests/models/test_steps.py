"""The judge of training steps: what it lets pass, and what not."""
from __future__ import annotations

import torch
from torch import nn

from .steps import Outcome, _rounded, compare

UNIT = 2.0 ** -8
TRUE = {f"g{i}": torch.ones(64, dtype=torch.float64) for i in range(9)}


def outcome(**errors: float) -> Outcome:
    """A step whose gradients are off by `errors`, `others` where none is given."""
    others = errors.get("others", 0.0)
    return Outcome(torch.tensor(1.0).double(), {n: t + errors.get(n, others) for n, t in TRUE.items()}, {}, {})


def test_an_error_is_judged_beside_several_of_eagers():
    lucky, unlucky = outcome(others=0.1, g3=0.02), outcome(others=0.1, g3=0.4)
    got = outcome(others=0.1, g3=0.5)
    assert compare(got, [lucky], outcome(), UNIT).wrong
    assert not compare(got, [lucky, unlucky], outcome(), UNIT).wrong
    assert compare(outcome(others=0.1, g3=4.0), [lucky, unlucky], outcome(), UNIT).wrong


def test_errors_that_are_all_too_large_are_seen_though_each_is_allowed():
    report = compare(outcome(others=0.3), [outcome(others=0.1)], outcome(), UNIT)
    assert report.worst < 1 and len(report.wrong) == 1 and "half of them" in report.wrong[0]
    assert not compare(outcome(others=0.15), [outcome(others=0.1)], outcome(), UNIT).wrong


def test_what_is_no_number_is_wrong():
    assert compare(outcome(others=0.1, g3=float("nan")), [outcome(others=0.1)], outcome(), UNIT).wrong


def test_a_rounding_is_at_most_half_a_unit():
    model = nn.Linear(64, 64)
    copied, inputs = _rounded(model, {"x": torch.ones(64), "at": torch.arange(3)}, UNIT, 1)
    off = (copied.weight / model.weight - 1).abs().max()
    assert 0 < float(off) <= UNIT / 2 + 1e-6 and 0 < float((inputs["x"] - 1).abs().max()) <= UNIT / 2 and inputs["at"].tolist() == [0, 1, 2]
