"""What lies along one axis and is read or written along another (`benchmarks.gpu_layouts`): right, and in whole sectors of memory."""
from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_drawn
from benchmarks.gpu_cases import case
from benchmarks.gpu_sides import compiled, forward, gradient, leaves

SIZES = {**dict.fromkeys(gpu_drawn.LAYOUT_STACKS, ("3x40x37", "2x24x700")), **dict.fromkeys(gpu_drawn.LAYOUT_IMAGES, ("2x64x9x10", "2x96x7x7")),
         "heads_apart": ("3x17x4x24",), "heads_joined": ("3x4x17x24",), "position_softmax": ("3x9x21", "2x16x33"), "window_norm": ("2x2x96",)}


@pytest.mark.parametrize("dtype, rtol", [("f32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("family, sizes", [(f, s) for f in gpu_drawn.OF["layouts"] for s in SIZES[f.removesuffix("_bwd")]])
def test_every_family_in_the_interpreter(family, sizes, dtype, rtol):
    """Outputs and gradients against float64."""
    torch._dynamo.reset()
    made = case(f"{family}_{dtype}_{sizes}")
    inputs = made.inputs("cpu", seed=torch.seed() % 1000)
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    got, want = forward(made, compiled("tokamak", made.fn, cached=True, target="interpret", strict=True), inputs), forward(made, made.fn, wide)
    assert got.stride() == want.stride()
    pairs = [(got, want)]
    if made.mode == "backward":
        dy = gradient(got, 0)
        pairs += zip(torch.autograd.grad(got, leaves(inputs), dy), torch.autograd.grad(want, leaves(wide), dy.double()), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol * float(b.detach().abs().max()) + 1e-7)
