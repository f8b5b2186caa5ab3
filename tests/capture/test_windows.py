"""What a maximum pooling keeps for backward on a GPU, and what backward makes of it; in Triton's interpreter, against eager."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tokamak
from tests.capture.test_partition import saved
from tokamak.capture.windows import max_pool_backward
from tokamak.tools.record import Recorder


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def image(*shape, layout=torch.contiguous_format):
    """Few different values, so that windows have several maxima."""
    return torch.randint(-3, 4, shape).float().to(memory_format=layout).requires_grad_(True)


def gradients(fn, x):
    out = fn(x)
    return out.detach(), *torch.autograd.grad(out, x, torch.arange(out.numel()).view_as(out).float())


@pytest.mark.parametrize("arguments", [(3, 2, 1), (2,), (3, 1), (3, 2, 1, 2), ((2, 3), (1, 2), (0, 1)), (4, 3, 2, 1, True)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels"])
def test_two_dimensions(arguments, layout):
    fn, x = lambda x: F.max_pool2d(torch.relu(x), *arguments) * 2, image(2, 3, 9, 11, layout=layout)
    mine = gradients(tokamak.compile(fn, target="interpret", strict=True), x)
    for a, b in zip(mine, gradients(fn, x)):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_three_dimensions_and_no_number():
    x = image(1, 2, 5, 4, 6)
    with torch.no_grad():
        x[0, 0, 1, 2, 3], x[0, 1, 4] = float("nan"), float("-inf")
    fn = lambda x: F.max_pool3d(x, (2, 2, 2), 1)
    for a, b in zip(gradients(tokamak.compile(fn, target="interpret", strict=True), x), gradients(fn, x)):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)


def test_a_byte_an_output_is_kept_and_not_the_input():
    """Of a norm, ReLU and pooling: what the norm was given and its statistics, and the places of the maxima; eager keeps the ReLU's result, too."""
    module = nn.BatchNorm2d(8)
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    _, size = saved(tokamak.compile(lambda x: F.max_pool2d(torch.relu(module(x)), 3, 2, 1), target="interpret", strict=True), x)
    assert size <= 4 * x.numel() + 2 * 8 * 8 * 8 + 8 * 4 * 8


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels"])
def test_torch_runs_the_operator(layout):
    x = image(2, 3, 9, 11, layout=layout)
    _, places = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    rows, columns = (torch.arange(n).view(-1, *[1] * (1 - k)) * 2 - 1 for k, n in enumerate(places.shape[2:]))
    numbers = ((places // 11 - rows) * 3 + places % 11 - columns).to(torch.int8)
    grad = torch.randn(places.shape)
    want, = torch.autograd.grad(F.max_pool2d(x, 3, 2, 1), x, grad)
    got = max_pool_backward(grad, numbers, x.shape, x.stride(), [3, 3], [2, 2], [1, 1])
    assert torch.equal(got, want) and got.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_windows_with_padding_on_a_cpu(stride, dtype):
    """Coordinates grow by the stride from lane to lane; whole registers, some lanes and edges. Places nobody asks for are not carried."""
    x = torch.randint(-3, 4, (2, 3, 11, 71)).to(dtype)
    x[0, 0, 1, 2], x[1, 2, 5] = float("nan"), float("-inf")
    fn = lambda x: (F.max_pool2d(x, 3, stride, 1), F.avg_pool2d(x, 3, stride, 1, count_include_pad=False))
    recorder = Recorder()
    for got, want in zip(tokamak.compile(fn, strict=True, cache_dir="", recorder=recorder)(x), fn(x)):
        torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0, equal_nan=True)
    text = "".join(b.text for g in recorder.graphs for b in g.values["render"].values())
    assert "argmax" not in text and "lane_of(" in text and ("lanes() * " in text) == (stride > 1)
