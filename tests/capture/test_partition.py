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


def test_a_loss_of_16_bit_logits_keeps_no_copy_of_them():
    logits = torch.randn(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, WIDE, (ROWS,))

    def fn(logits, target):
        return torch.nn.functional.cross_entropy(logits.float(), target)
    assert saved(fn, logits, target)[1] > 4 * ROWS * WIDE
    _, size = saved(tokamak.compile(fn, strict=True), logits, target)
    assert size <= 2 * ROWS * WIDE + (4 + 4 + 8) * ROWS + 8        # logits as they came, a maximum, a logarithm and a target a row


def test_a_norm_of_16_bit_values_in_float32_keeps_no_copy_of_them():
    x = torch.randn(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)

    def fn(x):
        return torch.nn.functional.layer_norm(x.float() * 2, (WIDE,)).to(torch.bfloat16)
    _, size = saved(tokamak.compile(fn, strict=True), x)
    assert size <= 2 * ROWS * WIDE + 2 * 4 * ROWS


def test_the_partitioner_of_others_is_as_it_was():
    from torch._functorch import partitioners
    theirs = partitioners.get_default_op_list
    saved(tokamak.compile(lambda x: torch.softmax(x, -1), strict=True), torch.randn(4, 4, requires_grad=True))
    assert partitioners.get_default_op_list is theirs
