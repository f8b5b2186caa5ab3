"""Random numbers of policy `fast`: reproducible, new at each call, alike in forward and backward, and distributed as they should be."""
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tokamak
from tokamak.tools.record import recording

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


# -- on tiles: the same numbers, four a call of Philox where they stand in runs of four --------------------------------------
def on_tiles(fn, *args, dynamic=False):
    """(results and gradients on the CPU, those on tiles, the tiles' kernels as text); every number of them from the same seed."""
    pytest.importorskip("triton")
    found = []
    for target in ("", "interpret"):
        torch._dynamo.reset()
        torch.manual_seed(11)
        inputs = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        with recording(strict=True, target=target, cache_dir="") as seen:
            out = tokamak.compile(fn, dynamic=dynamic)(*inputs)
            if out.requires_grad:
                out.sum().backward()
        found.append([out.detach(), *(a.grad for a in inputs if a.requires_grad)])
    return *found, "".join(p.unit.text for g in seen.graphs for k in g.values["render"].values() for p in k.parts)


SHAPES = [((64, 768), True), ((3, 1024), True), ((6, 5, 8), True), ((40, 100), True), ((4097,), True), ((2, 3000), True), ((3, 20000), True),
          ((7, 4), True), ((9, 2, 1), None), ((5, 17), False), ((8, 1023), False)]


@pytest.mark.parametrize("shape, fours", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [False, True])
def test_dropout_on_tiles_has_the_cpus_masks(shape, fours, rows):
    """`fours`: each number of a row stands in a run of four, or, rows being of an odd length, none does (None: there are no rows)."""
    def fn(x):
        return F.dropout(torch.softmax(x, -1) if rows else x, 0.4)
    cpu, tiles, text = on_tiles(fn, torch.ones(shape, requires_grad=not rows))
    for a, b in zip(cpu, tiles, strict=True):
        assert torch.equal(a == 0, b == 0)
        torch.testing.assert_close(a, b)
    if not rows:
        assert torch.equal(tiles[0] == 0, tiles[1] == 0)
    if rows and fours is not None:
        assert ("tk.uniform_run(" in text, "tk.uniform(" in text) == (fours, not fours)


def test_columns_on_tiles_have_the_cpus_numbers():
    def turned(x):
        return F.dropout(x.t() + torch.rand_like(x).t(), 0.5).contiguous() + torch.rand_like(x).sum(1)
    cpu, tiles, _ = on_tiles(turned, torch.ones(36, 68).t())
    torch.testing.assert_close(cpu, tiles)
    cpu, tiles, text = on_tiles(lambda x: torch.rand_like(x).sum(0), torch.ones(500, 64))
    torch.testing.assert_close(cpu, tiles)
    assert "tk.uniform_run(" in text


def test_rows_of_unknown_length_on_tiles_have_the_cpus_numbers():
    """Rows may begin at any number: each is looked up by itself."""
    cpu, tiles, text = on_tiles(lambda x: F.dropout(torch.softmax(x, -1), 0.4), torch.ones(9, 64), dynamic=True)
    assert "tk.uniform(" in text and "tk.uniform_run(" not in text
    torch.testing.assert_close(cpu, tiles)


def test_sixteen_bits_on_tiles_have_the_cpus_numbers():
    def fn(x):
        return F.layer_norm(F.dropout(x, 0.3) + 1, x.shape[-1:]) + torch.rand_like(x)
    cpu, tiles, text = on_tiles(fn, torch.ones(5, 768, dtype=torch.bfloat16))
    assert "tk.uniform_run(" in text and "tk.uniform(" not in text
    torch.testing.assert_close(cpu, tiles)
