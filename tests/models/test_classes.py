"""The sweep over classes of models says what became of each."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.models import classes


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("target", ["", "interpret"])
@pytest.mark.parametrize("name", ["DistilBertForMaskedLM", "Qwen2ForCausalLM"])
def test_a_step_is_right(name, target):
    if target:
        pytest.importorskip("triton")
    assert classes.step(name, target).startswith("right")


def test_what_is_wrong_or_fails_is_said(monkeypatch):
    train = classes.train

    def off(*args, compiled, strict=None, target=None, **how):
        made = train(*args, compiled=False, **how)
        return replace(made, loss=made.loss * 1.01) if compiled else made

    def fails(*args, compiled, **how):
        if compiled:
            raise RuntimeError("no kernel\nof ours")
        return train(*args, compiled=False, **how)
    monkeypatch.setattr(classes, "train", off)
    assert classes.step("DistilBertForMaskedLM").startswith("WRONG: 1, loss")
    monkeypatch.setattr(classes, "train", fails)
    assert classes.step("DistilBertForMaskedLM") == "FAILED: RuntimeError no kernel"


def test_what_is_too_large_is_left_out(monkeypatch):
    monkeypatch.setattr(classes, "LARGEST", 1000)
    assert classes.step("DistilBertForMaskedLM").startswith("left out: ValueError")
