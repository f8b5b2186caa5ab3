"""Hooks on what autograd saves give backward tensors that lie in another order."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks, save_on_cpu

import tokamak


def in_order():
    return saved_tensors_hooks(lambda t: t.detach().clone(memory_format=torch.contiguous_format), lambda t: t)


def turned():
    return saved_tensors_hooks(lambda t: t.detach(), lambda t: t.mT.contiguous().mT if t.ndim > 1 else t)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Sigmoid()).to(memory_format=torch.channels_last)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        x = x.flatten(2).mean(0)[:, :5]
        return ((x @ self.weight).relu().sin() @ self.weight.t()).exp().t().sigmoid() * x.t().cos()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def gradients(run, module, x, hooks) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with hooks():
        loss = run(x).square().sum()
    loss.backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("target", ["", "interpret"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("hooks", [save_on_cpu, in_order, turned])
@pytest.mark.parametrize("make", [convolutions, Turned])
def test_saved_tensors_that_lie_otherwise(make, hooks, dynamic, target):
    module = make()
    run = tokamak.compile(copy.deepcopy(module), strict=True, dynamic=dynamic, target=target)
    for size in (6, 7):
        x = torch.randn(2, 3, size, size).to(memory_format=torch.channels_last)
        for want, got in zip(gradients(module, module, x, hooks), gradients(run, run, x, hooks)):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_another_type_is_refused():
    """Kernels would read its bits as those of what was saved, and memory of another device not at all."""
    run = tokamak.compile(lambda x: (x.sin() * x.exp()).softmax(-1), strict=True)
    with saved_tensors_hooks(lambda t: t.detach(), lambda t: t.double()):
        loss = run(torch.randn(4, 6, requires_grad=True)).square().sum()
    with pytest.raises(RuntimeError, match="gave torch.float64 on cpu where torch.float32 on cpu was saved"):
        loss.backward()


def test_hooks_that_come_later():
    """The first calls had none; backward of a call before them runs behind it."""
    module = Turned()
    run = tokamak.compile(copy.deepcopy(module), strict=True)
    x = torch.randn(2, 3, 6, 6)
    before = run(x).square().sum()
    after = gradients(run, run, x, turned)
    run.zero_grad()
    before.backward()
    want = gradients(module, module, x, turned)
    for got in (after[1], run.weight.grad):
        torch.testing.assert_close(got, want[1], rtol=1e-4, atol=1e-5)
