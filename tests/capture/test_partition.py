"""What is kept for backward, against eager: how many tensors and bytes."""
import pytest
import torch
from torch import nn

import tokamak

ROWS, WIDE = 64, 48


class LayerNorm(nn.Module):
    """The norm as nine operations of Python."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDE)), nn.Parameter(torch.zeros(WIDE))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        deviation = torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return centred / deviation * self.weight + self.bias


def saved(fn, *args):
    """Of one call: (how many tensors are kept for backward, their bytes, each memory once). Parameters are among them, though they stay anyway."""
    kept = []

    def pack(t):
        kept.append(t)
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*args)
    found = len(kept), sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
    del out
    return found


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_layer_norm_keeps_its_input_and_row_statistics():
    """With the weight, which stays anyway, four tensors and 1 + 2 / WIDE inputs' bytes; eager keeps six and more than two inputs' bytes."""
    module, x = LayerNorm(), torch.randn(ROWS, WIDE, requires_grad=True)
    assert saved(module, x) == (6, 4 * (2 * ROWS * WIDE + ROWS + WIDE))
    count, size = saved(tokamak.compile(module, strict=True), x)
    assert count <= 4
    assert size <= 4 * (ROWS * WIDE + 2 * ROWS + WIDE)


def test_cross_entropy_keeps_its_input():
    """The logits and a number or two a row; eager keeps all logarithms beside what it was given."""
    fn = lambda x, y: nn.functional.cross_entropy(x * 2, y)
    x, y = torch.randn(ROWS, WIDE, requires_grad=True), torch.randint(0, WIDE, (ROWS,))
    _, size = saved(tokamak.compile(fn, strict=True), x, y)
    assert size <= 4 * (ROWS * WIDE + 2 * ROWS + 1) + 8 * ROWS


def test_a_chain_of_pointwise_operations_keeps_its_input():
    fn = lambda x: torch.tanh(torch.sigmoid(x * 3).exp() + x) * x.sin()
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    assert saved(fn, x)[1] > 4 * 4 * ROWS * WIDE
    assert saved(tokamak.compile(fn, strict=True), x)[1] <= 4 * ROWS * WIDE
