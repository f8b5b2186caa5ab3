"""Shares of a kernel's iterations that begin and end anywhere: within a row of the innermost parallel axis, and within its blocks."""
import pytest
import torch

import tokamak

CASES = {"rows": (lambda x: x.permute(0, 2, 1, 3) * 2, (7, 11, 13, 40)), "blocks": (lambda x: x.permute(0, 2, 1, 3) + 1, (3, 5, 2, 9000)),
         "a row of blocks": (lambda x: x.sin() + x[:, :1], (2, 50_000)), "pieces of images": (lambda x: x.unfold(1, 8, 8).permute(0, 2, 1, 3) * 1.0,
                                                                                           (30, 40, 48))}


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("name", CASES)
def test_every_iteration_is_done_once(name, threads):
    fn, shape = CASES[name]
    x, before = torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch._dynamo.reset()
        torch.testing.assert_close(tokamak.compile(lambda x: fn(x).contiguous(), strict=True)(x), fn(x).contiguous())
    finally:
        torch.set_num_threads(before)
