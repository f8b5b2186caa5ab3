"""Which products backward makes again, and that gradients are the same whichever are."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokamak.capture import aot

ROWS, INNER, HIDDEN, COLUMNS = 40, 24, 32, 16


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def layers(*widths, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Rows, and a weight and a bias of each layer."""
    torch.manual_seed(sum(widths))
    made = [torch.randn(ROWS, widths[0])]
    for n, m in zip(widths, widths[1:]):
        made += [torch.randn(m, n) / n ** 0.5, torch.randn(m) * 0.1]
    return [t.to(dtype).requires_grad_() for t in made]


def training(fn, inputs, pays=lambda *extents: True):
    """(columns of what is kept of the rows and is no input, output and gradients, extents that were asked about) of a training step with what `pays`
    made again."""
    asked, kept = [], []

    def again(device, *extents):
        asked.append(extents)
        return pays(*extents)

    def pack(t):
        kept.append(t)
        return t
    compiled = torch.compile(fn, backend=lambda gm, given: aot.autograd(gm, given, lambda graph, *_: aot.eager(graph), again=again), dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = compiled(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    own = {t.untyped_storage().data_ptr() for t in inputs}
    widths = {t.shape[-1] for t in kept if t.dim() > 1 and t.numel() == ROWS * t.shape[-1] and t.untyped_storage().data_ptr() not in own}
    torch.manual_seed(1)
    dy = torch.randn_like(out)
    return widths, [out.detach(), *torch.autograd.grad(out, [t for t in inputs if t.requires_grad], dy)], asked


TWO = {
    "relu": (1, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b)), v, c)),
    "no biases": (1, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w)), v) + b.sum() * c),
    "silu": (2, lambda x, w, b, v, c: F.linear(F.silu(F.linear(x, w, b)), v, c)),
    "gelu": (2, lambda x, w, b, v, c: F.linear(F.gelu(F.linear(x, w, b)), v, c)),
    "rows in two dimensions": (1, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x.view(5, -1, INNER), w, b)), v, c)),
    "a scale between": (1, lambda x, w, b, v, c: F.linear(F.relu(F.linear(x, w, b) * 2), v, c)),
}


@pytest.mark.parametrize("name", TWO)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_between_two_layers_are_not_kept(name, dtype):
    needed, fn = TWO[name]
    inputs = layers(INNER, HIDDEN, COLUMNS, dtype=dtype)
    kept, made, asked = training(fn, inputs)
    assert asked == [(ROWS, INNER, HIDDEN, COLUMNS, needed)] and HIDDEN not in kept
    torch._dynamo.reset()
    before, usual, _ = training(fn, inputs, lambda *extents: False)
    assert HIDDEN in before
    for a, b in zip(made, usual, strict=True):
        assert torch.equal(a, b)


def test_of_layers_in_a_row_every_second_is_made_again():
    """Of what the one before has left."""
    def fn(x, w, b, v, c, u, d, t, e):
        return F.linear(F.relu(F.linear(F.relu(F.linear(F.relu(F.linear(x, w, b)), v, c)), u, d)), t, e)
    inputs = layers(INNER, 32, 48, 56, COLUMNS)
    kept, made, asked = training(fn, inputs)
    assert asked == [(ROWS, INNER, 32, 48, 1), (ROWS, 48, 56, COLUMNS, 1)]
    assert kept == {48}
    torch._dynamo.reset()
    for a, b in zip(made, training(fn, inputs, lambda *extents: False)[1], strict=True):
        assert torch.equal(a, b)


KEPT = {
    "given out": lambda x, w, b, v, c: (lambda h: F.linear(h, v, c) + h[:, :COLUMNS])(F.relu(F.linear(x, w, b))),
    "given out as it is": lambda x, w, b, v, c: (lambda h: (F.linear(h, v, c), h))(F.relu(F.linear(x, w, b))),
    "a norm between": lambda x, w, b, v, c: F.linear(F.layer_norm(F.linear(x, w, b), (HIDDEN,)), v, c),
    "dropped at random": lambda x, w, b, v, c: F.linear(F.dropout(F.relu(F.linear(x, w, b)), 0.5), v, c),
    "read by two layers": lambda x, w, b, v, c: (lambda h: F.linear(h, v, c) * F.linear(h, v))(F.relu(F.linear(x, w, b))),
    "one layer": lambda x, w, b, v, c: F.relu(F.linear(x, w, b)) * v.sum() * c.sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_others_read_or_no_kernel_makes_is_kept(name):
    _, _, asked = training(KEPT[name], layers(INNER, HIDDEN, COLUMNS))
    assert not asked


def test_values_of_32_bits_are_kept():
    assert not training(TWO["relu"][1], layers(INNER, HIDDEN, COLUMNS, dtype=torch.float32))[2]


def test_frozen_weights():
    """No gradient of the second layer's weights is asked for: nothing but a mask is needed of what lies between."""
    x, w, b, v, c = layers(INNER, HIDDEN, COLUMNS)
    inputs = [x, w, b, v.detach(), c.detach()]
    made = training(TWO["relu"][1], inputs)[1]
    torch._dynamo.reset()
    for a, b in zip(made, training(TWO["relu"][1], inputs, lambda *extents: False)[1], strict=True):
        assert torch.equal(a, b)
