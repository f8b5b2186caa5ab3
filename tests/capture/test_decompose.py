"""What stands in the place of operators of a training step, against eager."""
import pytest
import torch

import tokamak


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax_of_a_transposed_tensor_is_contiguous(fn, dim):
    """What follows may view it: eager's is contiguous."""
    def viewed(x):
        out = fn(x.transpose(1, 2), dim)
        return out, out.view(3, -1).sin()
    x = torch.randn(3, 5, 7)
    results = []
    for run in (viewed, tokamak.compile(viewed, strict=True)):
        leaf = x.clone().requires_grad_()
        out, sines = run(leaf)
        (out.exp() * sines.view(out.shape)).sum().backward()
        results.append((out, sines, leaf.grad))
    for mine, theirs in zip(*reversed(results)):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs)
