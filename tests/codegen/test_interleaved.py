"""A few numbers side by side (coordinates, a picture's channels): the axis around them runs along lanes, and they are a loop inside."""
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


def agree(fn, *inputs, atol=1e-5, rtol=1e-5, dynamic=None) -> str:
    """Compares with float64; the schedules' text."""
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(fn, backend="tokamak", dynamic=dynamic)(*inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    torch.testing.assert_close(got.double(), fn(*wide).double(), atol=atol, rtol=rtol)
    return "\n".join(STAGE_TEXTS["schedule"](g) for g in recorder.graphs)


CASES = {"normalised": lambda x, w: x / x.norm(dim=-1, keepdim=True), "scaled": lambda x, w: (x - w) * w.exp(),
         "softmax": lambda x, w: torch.softmax(x, -1),
         "largest": lambda x, w: x.argmax(-1), "stacked": lambda x, w: torch.stack([x[..., 0] - x[..., 1], x[..., 1] * x[..., 0]], -1),
         "summed": lambda x, w: (x * w).sum(-2), "all": lambda x, w: (x * w).sum(), "over rows": lambda x, w: torch.softmax(x, -2),
         "prefixes": lambda x, w: x.cumsum(-2) + x.cumsum(-1), "picked": lambda x, w: x[..., x.argmax(-1).clamp(max=1).flatten()[:3]],
         "added in": lambda x, w: torch.zeros_like(x).index_add(-2, torch.arange(x.shape[-2]) // 2, x * w)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1000, 3), (33, 4), (5, 77, 2), (16, 4), (3, 9, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_few_numbers_side_by_side(name, shape, dtype):
    if dtype is torch.float64 and shape[-1] > 2 and shape[0] < 100:
        pytest.skip("as the others")
    g = torch.Generator().manual_seed(len(name))
    x, w = torch.randn(shape, generator=g).to(dtype), torch.randn(shape[-1], generator=g).to(dtype)
    tolerance = 4e-2 if dtype is torch.bfloat16 else 1e-4
    agree(CASES[name], x, w, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["normalised", "softmax"])
def test_points_run_along_lanes(name):
    x, w = torch.randn(4096, 3), torch.randn(3)
    assert "vector(i0/" in agree(CASES[name], x, w)
    assert "vector(i0/" not in agree(CASES[name], torch.randn(4096, 24), torch.randn(24))


SHORT = {"softmax": lambda x, w: torch.softmax(x, -1), "largest": lambda x, w: x.argmax(-1), "least": lambda x, w: x.argmin(-1),
         "summed": lambda x, w: (x * w).sum(-1), "matrices": lambda x, w: (x[:99].view(-1, 3, 3, x.shape[1]) * w).sum(-1)}


@pytest.mark.parametrize("columns", [5, 10, 16])
@pytest.mark.parametrize("name", SHORT)
def test_short_rows_are_not_folded_across_lanes(name, columns):
    x, w = torch.randn(1000, columns), torch.randn(columns)
    x[3, 2], x[5, 1:3], x[7] = torch.nan, torch.nan, -torch.inf
    x = x if name in ("largest", "least") else x.nan_to_num(neginf=0.0)
    text = agree(SHORT[name], x, w)
    assert "vector(i0/" in text or name == "matrices"


@pytest.mark.parametrize("columns", [17, 40])
def test_largest_across_lanes(columns):
    """Of equal values the first, and the first NaN, in whatever lane it lies."""
    x = torch.randint(0, 3, (500, columns)).float()
    x[3, 2], x[5, 1:3], x[7], x[8, -1] = torch.nan, torch.nan, -torch.inf, torch.nan
    assert "vector(i1)" in agree(lambda x: torch.stack([x.argmax(-1), x.argmin(-1)]), x)


def test_pads_of_pictures_run_along_rows():
    """Zeros on both sides are pieces of a row that have no values of their own."""
    text = agree(lambda x: F.pad(x, (1, 1, 1, 1)) * 2, torch.randn(40, 32, 32))
    assert "vector(i2)" in text and "over i0 < 40, i1 < 34, i2 < 32" in text


def test_results_in_turn_run_along_the_axis_that_they_follow():
    """Sine and cosine of each angle: along the angles of a row, which lie two apart, not along rows, whose positions lie side by side."""
    def turns(t, f):
        return torch.stack([(t[:, None] * f).sin(), (t[:, None] * f).cos()], -1).flatten(1)
    text = agree(turns, torch.rand(700), torch.rand(96))
    assert "vector(i1/" in text and "over i0 < 700, i1 < 96" in text


def test_heads_beside_a_mask():
    """Softmax over neighbours, a few heads side by side: one kernel, along the neighbours, which the mask has side by side."""
    g = torch.Generator().manual_seed(0)
    s, t, mask = torch.randn(50, 4, generator=g), torch.randn(70, 4, generator=g), torch.rand(50, 70, generator=g) < 0.5
    fn = lambda s, t, mask: torch.softmax(F.leaky_relu(s[:, None] + t[None]).masked_fill(~mask[..., None], float("-inf")), 1)
    assert agree(fn, s, t, mask).count("parallel(") == 1


@pytest.mark.parametrize("mode, size", [("bilinear", (26, 34)), ("nearest", (39, 51)), ("bicubic", (26, 34)), ("bilinear", (7, 5))])
def test_enlarged_pictures(mode, size):
    x = torch.randn(2, 3, 13, 17)
    agree(lambda x: F.interpolate(x, size=size, mode=mode), x, atol=1e-4)


def test_gradients_and_sizes_that_are_not_known():
    fn = lambda a, b: ((a - b) / (a * b).sum(-1, keepdim=True).exp()).square().sum(-1)
    ours = tokamak.compile(fn, strict=True, dynamic=True)
    torch._dynamo.reset()
    for n in (40, 77, 1000):
        a, b = (torch.randn(n, 3, requires_grad=True) for _ in range(2))
        got = torch.autograd.grad(ours(a, b), (a, b), torch.ones(n))
        for x, y in zip(got, torch.autograd.grad(fn(a, b), (a, b), torch.ones(n))):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
