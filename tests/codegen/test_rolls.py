"""Reads that run over the end of a row and go on at its beginning: whole registers of memory, not element by element."""
import pytest
import torch

import tokamak
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 15, 16, 17, 100, 1024])
def test_rolls_of_rows(dtype, columns):
    x = (torch.randn(5, columns) * 100).to(dtype)
    fn = lambda x: tuple(x.roll(k, 1) for k in (1, -1, 3, columns // 2)) + (x.roll((1, -1), (0, 1)), x[:, ::2].roll(1, 1), x.roll(1, 0))
    torch._dynamo.reset()
    for got, wanted in zip(tokamak.compile(fn, strict=True)(x), fn(x)):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()


@pytest.mark.parametrize("columns", [1, 33, 1000])
def test_a_stencil_reads_whole_registers_and_is_right_with_backward(columns):
    def heat(u):
        return u + 0.1 * (u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1) - 4 * u)
    x, y = (torch.randn(20, columns, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(heat, backend="tokamak")(x)
        got.square().sum().backward()
    wanted = heat(y)
    wanted.square().sum().backward()
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(x.grad, y.grad)
    text = "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)
    assert "load_f32" in text and "loada" not in text and "loadi" not in text


def test_sizes_that_are_not_known():
    fn = lambda x: x.roll(2, 1) * x + x.roll(-1, 1)
    ours = tokamak.compile(fn, strict=True, dynamic=True)
    torch._dynamo.reset()
    for columns in (40, 17, 3, 2):
        x = torch.randn(3, columns)
        torch.testing.assert_close(ours(x), fn(x))
