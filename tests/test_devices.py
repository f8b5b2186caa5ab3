"""Kernels run on CPUs; what computes elsewhere runs through torch. The device `meta`, whose memory is nowhere, stands for all others."""
from __future__ import annotations

import pytest
import torch

from tokamak.backend import backend


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, options={"strict": True})


@pytest.mark.parametrize("training", (False, True))
def test_another_device_runs_through_torch(training):
    x = torch.empty(8, 9, device="meta", requires_grad=training)
    out = compiled(lambda x: (torch.relu(x) * 2).sum(0))(x)
    assert out.device.type == "meta" and out.shape == (9,)
    if training:
        out.sum().backward()
        assert x.grad.shape == x.shape


def test_two_devices_in_one_graph():
    a, b = torch.randn(8, 9), torch.empty(8, 9, device="meta")
    there, here = compiled(lambda a, b: (b.exp() + a.sum().to("meta"), a.relu()))(a, b)
    assert there.device.type == "meta" and torch.equal(here, a.relu())
