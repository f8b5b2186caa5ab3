"""Kernels over tiles, as a GPU runs them, in Triton's interpreter: schedules at their edges, against eager and float64."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tokamak

pytest.importorskip("triton")


def values(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def indices(below, *shape):
    return torch.randint(0, below, shape)


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def check(fn, *inputs, tolerance=1e-4):
    """`fn` compiled for tiles equals eager, and its gradients do."""
    torch._dynamo.reset()
    mine = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    want, got = flat(fn(*inputs)), flat(tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")(*mine))
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
    if any(x.requires_grad for x in inputs):
        seed = torch.randn_like(want[0])
        want[0].backward(seed)
        got[0].backward(seed)
        for x, m in zip(inputs, mine):
            if x.requires_grad:
                torch.testing.assert_close(m.grad, x.grad, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("rows,columns", [(7, 1025), (64, 1000), (3, 17), (2, 40000), (5, 1), (1, 4097)])
def test_softmax(rows, columns):
    check(lambda x: torch.softmax(x, -1), values(rows, columns, grad=True))


@pytest.mark.parametrize("rows,columns", [(512, 77), (33, 1500), (4099, 3)])
@pytest.mark.parametrize("axes", [0, 1, (0, 1)])
def test_sums(rows, columns, axes):
    check(lambda x: x.sum(axes), values(rows, columns))


@pytest.mark.parametrize("rows,columns", [(32, 768), (9, 257), (600, 33)])
def test_layer_norm(rows, columns):
    check(lambda x, w, b: F.layer_norm(x, (columns,), w, b), values(rows, columns, grad=True), values(columns, grad=True), values(columns, grad=True))


def test_extremes():
    x = values(16, 3000)
    x[3, 70] = float("nan")
    x[4, 5] = x[4, 9] = float("inf")
    check(lambda x: (x.amax(-1), x.argmax(-1), x.amin(0), x.argmin(0)), x)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm(layout):
    x = torch.randn(8, 6, 5, 7).contiguous(memory_format=layout).requires_grad_()
    check(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, values(6, grad=True), values(6, grad=True))


def test_group_norm():
    check(lambda x, w, b: F.group_norm(x, 2, w, b), values(4, 6, 5, 7, grad=True), values(6, grad=True), values(6, grad=True))


@pytest.mark.parametrize("dim", [0, 1])
def test_scans(dim):
    check(lambda x: x.cumsum(dim), values(70, 700))


def test_cross_entropy():
    check(lambda x, t: F.cross_entropy(x, t), values(64, 1000, grad=True), indices(1000, 64))


def test_embedding():
    check(lambda w, t: F.embedding(t, w) * 2, values(100, 33, grad=True), indices(100, 5, 9))


def test_index_out_of_range():
    fn = tokamak.compile(lambda w, t: F.embedding(t, w) * 2, target="interpret", strict=True, cache_dir="")
    with pytest.raises(IndexError, match="index out of range"):
        fn(values(10, 4), torch.tensor([3, 10]))


def test_sixteen_bits():
    check(lambda x, y: F.gelu(x + y), values(64, 100, dtype=torch.bfloat16), values(100, dtype=torch.bfloat16), tolerance=2e-2)


def test_views():
    check(lambda x: F.pad(x, (1, 2), value=3.0).roll(2, -1), values(33, 50))
    check(lambda x, y: torch.cat([x, y], 1).relu(), values(33, 50), values(33, 20))
    check(lambda x: x.t().contiguous() * 2, values(100, 77))


def test_pooling():
    check(lambda x: F.max_pool2d(x, 2), values(2, 3, 8, 8, grad=True))


def test_middle_norm():
    check(lambda x: x / x.pow(2).mean(1, keepdim=True).sqrt(), values(4, 40, 30, grad=True))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_empty(shape):
    check(lambda x: (x.sum(-1), x + 1), values(*shape))


def test_unknown_sizes():
    fn = tokamak.compile(lambda x: torch.softmax(x, -1), target="interpret", strict=True, dynamic=True, cache_dir="")
    for shape in ((4, 33), (7, 1025), (3, 64)):
        x = values(*shape)
        torch.testing.assert_close(fn(x), torch.softmax(x, -1))
