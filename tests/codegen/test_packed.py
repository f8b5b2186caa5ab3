"""Pairs of rows: what strides along the vector axis is laid out by registers once for all rows that read it, and rows run in step."""
import pytest
import torch

import tokamak
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


def distances(x, y):
    return ((x.unsqueeze(-2) - y.unsqueeze(-3)) ** 2).sum(-1).sqrt()


def text_of(fn, *inputs) -> tuple[torch.Tensor, str]:
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(fn, backend="tokamak")(*inputs)
    return got, "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, columns, depth", [(8, 16, 3), (13, 70, 5), (37, 300, 33), (9, 64, 200), (64, 17, 16)])
def test_distances_agree_with_float64(rows, columns, depth, dtype):
    g = torch.Generator().manual_seed(rows)
    x, y = torch.randn(rows, depth, generator=g).to(dtype), torch.randn(columns, depth, generator=g).to(dtype)
    got, text = text_of(distances, x, y)
    torch.testing.assert_close(got.double(), distances(x.double(), y.double()), atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)
    assert "reused(" in text and "loads_" not in text


def test_batches_and_sizes_that_are_not_known():
    ours = tokamak.compile(distances, strict=True, dynamic=True)
    torch._dynamo.reset()
    for batch, rows, columns, depth in ((3, 11, 40, 7), (2, 30, 100, 20), (5, 9, 15, 2)):
        x, y = torch.randn(batch, rows, depth), torch.randn(batch, columns, depth)
        torch.testing.assert_close(ours(x, y), distances(x, y))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_share_fills_its_own_blocks(threads):
    """Shares begin in the middle of a block's rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, y = torch.randn(203, 31), torch.randn(331, 31)
        torch.testing.assert_close(text_of(distances, x, y)[0], distances(x, y))
    finally:
        torch.set_num_threads(before)


def test_what_changes_with_every_row_is_not_packed():
    x = torch.randn(40, 50, 30)
    got, text = text_of(lambda x: (x * x).sum(-1), x)
    torch.testing.assert_close(got, (x * x).sum(-1))
    assert "reused(" not in text


@pytest.mark.parametrize("rows, columns, depth", [(20, 30, 16), (33, 65, 40)])
def test_gradients_run_along_the_coordinates(rows, columns, depth):
    """Along the axis that no gradient sums over nothing strides; one of the sums is complete within an iteration, the other's f64 is in halves."""
    g = torch.Generator().manual_seed(0)
    x, y, w = (torch.randn(*s, generator=g) for s in ((rows, depth), (columns, depth), (rows, columns)))
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        compiled = torch.compile(distances, backend="tokamak")
        mine = [t.clone().requires_grad_() for t in (x, y)]
        got = torch.autograd.grad(compiled(*mine), mine, w)
    double = [t.double().requires_grad_() for t in (x, y)]
    for a, b in zip(got, torch.autograd.grad(distances(*double), double, w.double())):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)
    text = STAGE_TEXTS["render"](recorder.graphs[-1])
    assert "loads_" not in text and "strided" not in text and text.count("copies that threads fill") == 1 and "cast_f32_f64" not in text
