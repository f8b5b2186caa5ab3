"""What the tests of measuring tools share: a machine whose peaks are known, so that nothing is measured for them."""
import pytest
import torch

import tokamak
from tokamak.tools import optimize as climbing
from tokamak.tools import profile as profiling
from tokamak.tools.machine import Peaks

from .programs import Block

PEAKS = Peaks("some CPU", ((8192, 1e-6), (1 << 20, 1e-4)), {"float32": 1e11}, 1e-6, "2026-01-01")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fresh captures, the peaks above, and bugs that raise."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    for tool in (climbing, profiling):
        monkeypatch.setattr(tool, "peaks", lambda device: PEAKS)
    with tokamak.scope(strict=True):
        yield


@pytest.fixture
def measured(monkeypatch):
    """The profile of a Block."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(profiling, "peaks", lambda device: PEAKS)
    with tokamak.scope(strict=True):
        return tokamak.profile(Block(), torch.randn(64, 16), seconds=0.0)
