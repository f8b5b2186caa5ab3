"""Training steps of whole models against eager and float64. Larger sizes: `python -m benchmarks.models --help`."""
from __future__ import annotations

import pytest
import torch

import tokamak

from .steps import UNIT, compare, eager, exact, train
from .zoo import CONVOLUTIONS, SMALL, STEPS


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def check(name: str, attention: str = "sdpa", autocast: bool = False, channels_last: bool = False, **options) -> None:
    step = STEPS[name]
    model, inputs = step.build(SMALL, attention), step.inputs(SMALL)
    how = {"autocast": autocast, "channels_last": channels_last}
    report = compare(train(model, inputs, compiled=True, strict=True, **how, **options), eager(model, inputs, UNIT[autocast], **how),
                     exact(model, inputs), UNIT[autocast])
    assert not report.wrong, "\n".join(report.wrong)


@pytest.mark.parametrize("name", STEPS)
def test_training_step(name):
    check(name)


@pytest.mark.parametrize("name", [n for n in STEPS if n not in CONVOLUTIONS])
def test_eager_attention_in_bfloat16(name):
    check(name, attention="eager", autocast=True)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("autocast", [False, True], ids=["f32", "bf16"])
def test_channels_last(name, autocast):
    check(name, channels_last=True, autocast=autocast)


@pytest.mark.parametrize("name", ["bert"])
def test_dropout_keeps_the_distribution(name):
    """With dropout the loss of a step is random: over some steps its mean is eager's within their spread."""
    step = STEPS[name]
    inputs = step.inputs(SMALL)

    def losses(compiled: bool) -> torch.Tensor:
        model = step.build(SMALL, dropout=0.2)
        run = tokamak.compile(model, strict=True) if compiled else model
        made = []
        for _ in range(24):
            loss = run(**inputs).loss
            loss.backward()
            made.append(loss.detach())
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        return torch.stack(made)
    mine, theirs = losses(True), losses(False)
    spread = float((mine.var() / len(mine) + theirs.var() / len(theirs)).sqrt())
    assert len(set(mine.tolist())) > 1
    assert abs(float(mine.mean() - theirs.mean())) < 4 * spread
