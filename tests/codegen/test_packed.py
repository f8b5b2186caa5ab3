"""What is laid out by registers once for all rows that read it: pairs of rows, where it strides along the vector axis, and slow arithmetic."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [3, 24, 70, 5000])
def test_slow_arithmetic_of_channels_is_done_once_for_all_pixels(channels, dtype):
    g = torch.Generator().manual_seed(channels)
    x = torch.randn(2, channels, 5, 7, generator=g).to(dtype).to(memory_format=torch.channels_last)
    wide = torch.promote_types(dtype, torch.float32)
    mean, variance = torch.randn(channels, generator=g).to(wide), torch.rand(channels, generator=g).to(wide) + 0.1

    def normalised(x, mean, variance):
        along = lambda t: t.view(1, -1, 1, 1)
        return (x - along(mean)) / torch.sqrt(along(variance) + 1e-5)
    with torch.no_grad():
        got, text = text_of(normalised, x, mean, variance)
    torch.testing.assert_close(got, normalised(x, mean, variance))
    assert got.stride() == x.stride()
    assert "reused(" in text or channels in (3, 5000)


def test_slow_arithmetic_of_each_image_is_done_once_for_its_pixels():
    """What differs between images is computed anew at the first pixel of each, and where a share begins."""
    x = torch.randn(6, 48, 9, 11).to(memory_format=torch.channels_last)
    scale = torch.rand(6, 48, 1, 1) + 0.1
    fn = lambda x, s: torch.relu(x * torch.rsqrt(s) + torch.exp(s))
    got, text = text_of(fn, x, scale)
    torch.testing.assert_close(got, fn(x, scale))
    assert "reused(" in text and text.count("rsqrt_f32(") == 1


def test_slow_arithmetic_that_changes_with_every_row_stays_in_its_loop():
    x, s = torch.randn(500, 64), torch.rand(500, 64) + 0.1
    got, text = text_of(lambda x, s: x * torch.rsqrt(s), x, s)
    torch.testing.assert_close(got, x * torch.rsqrt(s))
    assert "reused(" not in text


def kernel_sums(x, y):
    return torch.exp(-0.1 * ((x.unsqueeze(-2) - y.unsqueeze(-3)) ** 2).sum(-1)).sum(-1)


@pytest.mark.parametrize("batch, rows, columns, depth", [((), 64, 64, 8), ((), 13, 70, 3), ((3,), 37, 300, 33), ((), 9, 130, 100),
                                                         ((2, 2), 16, 17, 1)])
def test_folds_of_pairs_that_are_folded_again(batch, rows, columns, depth):
    """The columns run along lanes, though they are folded as well: their coordinates are packed once for all rows."""
    g = torch.Generator().manual_seed(rows)
    x, y = torch.randn(*batch, rows, depth, generator=g), torch.randn(*batch, columns, depth, generator=g)
    got, text = text_of(kernel_sums, x, y)
    torch.testing.assert_close(got.double(), kernel_sums(x.double(), y.double()), atol=1e-5, rtol=1e-5)
    assert depth == 1 or "reused(" in text and "loads_" not in text


@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_of_sums_over_pairs_stay_in_registers(threads):
    g = torch.Generator().manual_seed(0)
    x, y, w = (torch.randn(*s, generator=g) for s in ((203, 40), (331, 40), (203,)))
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with recording(strict=True) as recorder:
            compiled = torch.compile(kernel_sums, backend="tokamak")
            mine = [t.clone().requires_grad_() for t in (x, y)]
            got = torch.autograd.grad(compiled(*mine), mine, w)
    finally:
        torch.set_num_threads(before)
    double = [t.double().requires_grad_() for t in (x, y)]
    for a, b in zip(got, torch.autograd.grad(kernel_sums(*double), double, w.double())):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)
    assert "columns(registers)" in STAGE_TEXTS["schedule"](recorder.graphs[-1])


@pytest.mark.parametrize("fn", [
    lambda v, i: ((v - v.mean(1, keepdim=True)) / 1)[i], lambda v, i: (v.mean(1, keepdim=True) + v)[i],
    lambda v, i: v * (v[:, :1] / (torch.arange(v.shape[0])[:, None, None] + 1.5)),
    lambda v, i: (v + v[:, :1] / v.shape[1]).index_select(0, i)], ids=["norm", "mean", "divisor", "rows"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_block_is_made_of_stands_before_it(fn, dynamic):
    """Rows' numbers from memory, and divisors that differ from row to row, were made behind the block that is laid out with them: no C."""
    torch._dynamo.reset()
    ours = tokamak.compile(fn, strict=True, dynamic=dynamic)
    for rows in (3, 8):
        v, i = torch.randn(rows, 65, 130), torch.arange(rows).flip(0)
        torch.testing.assert_close(ours(v, i), fn(v, i))
