"""Random numbers of policy `fast`: reproducible, new at each call, alike in forward and backward, and distributed as they should be."""
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tokamak

F = nn.functional
MANY = 200_000


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(fn, **options):
    return tokamak.compile(fn, strict=True, cache_dir="", **options)


DRAWS = {
    "rand": lambda x: torch.rand_like(x), "randn": lambda x: torch.randn(x.shape), "dropout": lambda x: F.dropout(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()), "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(2, 0.5), "dropout2d": lambda x: F.dropout2d(x.view(1, -1, 5, 5), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_reproducible_and_new_at_each_call(name):
    fn = compiled(DRAWS[name])
    x = torch.randn(50, 50)
    torch.manual_seed(7)
    first = [fn(x) for _ in range(3)]
    torch.manual_seed(7)
    again = [fn(x) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    torch.manual_seed(8)
    assert not torch.equal(fn(x), first[0])


def test_two_draws_of_one_program_differ():
    a, b, c = compiled(lambda x: (torch.rand_like(x), torch.rand_like(x), x.new_empty(9, 9).uniform_()))(torch.empty(9, 9))
    assert not torch.equal(a, b) and not torch.equal(a, c)


def kolmogorov(sample: torch.Tensor, distribution) -> float:
    """The largest distance of the sample's distribution from the function `distribution`, in units that are 1.95 in one of a thousand samples."""
    x = sample.double().flatten().sort()[0]
    at = torch.arange(1, len(x) + 1) / len(x)
    found = distribution(x)
    return float(torch.maximum((at - found).abs(), (at - 1 / len(x) - found).abs()).max()) * math.sqrt(len(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform(dtype):
    x = compiled(lambda: torch.rand(MANY, dtype=dtype))()
    assert 0 <= float(x.min()) and float(x.max()) < 1
    assert abs(float(x.mean()) - 0.5) < 5 / math.sqrt(12 * MANY) and abs(float(x.var()) - 1 / 12) < 2e-3
    assert kolmogorov(x, lambda v: v) < 1.95
    neighbours = torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]
    assert abs(float(neighbours)) < 5 / math.sqrt(MANY)


def test_normal_numbers_are_normal():
    x = compiled(lambda: torch.randn(MANY))()
    assert abs(float(x.mean())) < 5 / math.sqrt(MANY) and abs(float(x.var()) - 1) < 0.02
    assert kolmogorov(x, lambda v: 0.5 * (1 + torch.erf(v / math.sqrt(2)))) < 1.95


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_uniform_numbers_stay_below_one(dtype):
    x = compiled(lambda: torch.rand(MANY, dtype=dtype))()
    assert float(x.min()) >= 0 and float(x.max()) < 1 and abs(float(x.float().mean()) - 0.5) < 6e-3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_it_says(p):
    kept = compiled(lambda x: F.dropout(x, p))(torch.ones(MANY))
    assert abs(float((kept != 0).double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / MANY)
    assert torch.allclose(kept[kept != 0], torch.tensor(1 / (1 - p)))


def test_dropout_with_all_or_nothing():
    assert torch.equal(compiled(lambda x: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False))(torch.ones(9)), torch.full((9,), 2.0))
    assert torch.equal(compiled(lambda x: F.dropout(x, 1.0))(torch.ones(9)), torch.zeros(9))


@pytest.mark.parametrize("dynamic", [False, True])
def test_backward_has_the_mask_of_forward(dynamic):
    fn = compiled(lambda x: F.dropout(x.sin(), 0.4).square(), dynamic=dynamic)
    for rows in (30, 31):
        x = torch.randn(rows, 40, requires_grad=True)
        out = fn(x)
        out.sum().backward()
        kept = out.detach() != 0
        assert 0.3 < kept.double().mean() < 0.9
        torch.testing.assert_close(x.grad, torch.where(kept, 2 * x.sin() * x.cos() / 0.36, 0).detach(), rtol=1e-5, atol=1e-5)


def test_checkpointed_dropout_draws_the_same_again():
    class Block(nn.Module):
        def forward(self, x):
            return checkpoint(lambda y: F.dropout(y.sin(), 0.5).exp() + torch.rand_like(y), x, use_reentrant=False)
    block = compiled(Block())
    for _ in range(2):
        x = torch.randn(64, 33, requires_grad=True)
        out = block(x)
        out.sum().backward()
        kept = x.grad != 0
        wide = torch.where(kept, 2 * x.sin(), 0).exp()
        torch.testing.assert_close(x.grad, torch.where(kept, 2 * x.cos() * wide, 0).detach(), rtol=1e-5, atol=1e-5)
        noise = (out - wide).detach()
        assert 0.4 < kept.double().mean() < 0.6 and noise.min() > -1e-5 and noise.max() < 1 + 1e-5


def test_a_generators_own_numbers_stay_its():
    one, two = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    fn = compiled(lambda g: torch.rand(5, generator=g))
    assert torch.equal(fn(one), torch.rand(5, generator=two))
