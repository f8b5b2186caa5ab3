"""Kernels run on CPUs and NVIDIA's GPUs; what computes elsewhere runs through torch. The device `meta`, whose memory is nowhere, stands for all
others."""
from __future__ import annotations

import pytest
import torch

from tokamak.backend import _device, backend
from tokamak.capture.fx import Unsupported
from tokamak.ir.parse import parse_graph


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


def test_a_gpu_that_no_kernel_is_launched_on(monkeypatch):
    graph = parse_graph("""graph there {
  input %x: f32[8](1) @"cuda:0"
  %y: f32[8](1) @"cuda:0" = exp(%x[i0])
  return %y
}""")
    monkeypatch.setattr(torch.version, "hip", None)
    assert _device(graph) == "cuda:0"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(Unsupported, match="NVIDIA"):
        _device(graph)
