"""Transposed reads: tiles turned in registers, whole and ragged, for every width of element."""
from __future__ import annotations

import pytest
import torch

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int8)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, columns", [(64, 64), (37, 129), (300, 17)])
def test_transposed_reads(dtype, rows, columns):
    torch._dynamo.reset()
    fn = lambda x, y: (x.transpose(1, 2) + y, x.transpose(1, 2).contiguous())
    x = (torch.randn(3, columns, rows) * 50).to(dtype)
    y = (torch.randn(3, rows, columns) * 50).to(dtype)
    for ours, eager in zip(torch.compile(fn, backend="tokamak")(x, y), fn(x, y)):
        assert torch.equal(ours, eager) and ours.stride() == eager.stride()
