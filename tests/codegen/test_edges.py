"""Loops along lanes whose inside knows nothing of the ends: borders, windows that reach past an image, what lies side by side."""
import pytest
import torch
import torch.nn.functional as F

from tests.codegen.test_pieces import compiled

PADS = {"reflect": 3, "circular": 5, "replicate": 2, "constant": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("columns", [17, 50, 131])
@pytest.mark.parametrize("mode", PADS)
def test_the_inside_of_a_border_is_copied(mode, columns, dtype):
    n = PADS[mode]
    x = torch.arange(2 * 9 * 11 * columns).view(2, 9, 11, columns).remainder(251).to(dtype)
    text = compiled(lambda x: F.pad(x, (n, n - 1, 1, 2), mode=mode) * 2, x)
    assert columns == 17 or "loadgu" not in text and "loadw" not in text and "loadgi" not in text


POOLS = {"maximum": lambda x: F.max_pool2d(x, 3, 2, 1), "mean": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
         "dilated": lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2), "past the end": lambda x: F.max_pool2d(x, 4, 3, 1, ceil_mode=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [56, 61, 200])
@pytest.mark.parametrize("pool", POOLS)
def test_windows_inside_an_image_ask_for_no_border(pool, columns, dtype):
    x = torch.randn(2, 16, 9, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 3, 4, 5] = float("nan")
    text = compiled(POOLS[pool], x)
    assert "loadg_" not in text and "loadgu" not in text


def test_what_is_the_same_in_all_lanes_is_read_or_not():
    """Channels behind channels: which of both an iteration reads is one question for all its lanes."""
    x, y = torch.randn(4, 19, 7, 9), torch.randn(4, 6, 7, 9)
    text = compiled(lambda x, y: torch.cat([x, y.exp()], 1) + 1, x, y)
    assert "loadgu" not in text and "[0] ? load_f32" in text


def joined(x, y):
    return torch.cat([x[:, 1:] - 0.5 * x[:, :-1], y.flip(1), x[:, :3], torch.roll(x, 5, 1)], 1)


def shifted(x, y):
    return x + F.pad(x, (2, -2)) * 0.5 - F.pad(x, (-1, 1)) + F.pad(y, (0, x.shape[1] - y.shape[1]))


def stencil(x, y):
    p = F.pad(x[None], (2, 2), mode="reflect")[0]
    return sum(p[:, k:k + x.shape[1]] * (k + 1.0) for k in range(5)) * y[:, :1]


@pytest.mark.parametrize("rows, columns", [(3, 5), (7, 33), (40, 100), (300, 129), (2, 70000)])
@pytest.mark.parametrize("fn", [joined, shifted, stencil])
def test_pieces_of_any_lengths(fn, rows, columns):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, columns, generator=g), torch.randn(rows, columns - 2, generator=g)
    compiled(fn, x, y)


def layers(seed: int):
    """A function of borders, shifts, slices and pools, one upon the other."""
    g = torch.Generator().manual_seed(seed)
    pick = lambda n: int(torch.randint(0, n, (1,), generator=g))
    steps = [(pick(6), pick(3) + 1, pick(3)) for _ in range(3)]

    def fn(x):
        for kind, a, b in steps:
            if kind == 0:
                x = F.pad(x, (a, b, b, a), mode=("reflect", "replicate", "circular")[b])
            elif kind == 1:
                x = F.pad(x, (a, -b, 0, b), value=0.5)
            elif kind == 2:
                x = torch.roll(x, (a, -b), (2, 3)) * 2
            elif kind == 3:
                x = F.max_pool2d(x, a + 1, b + 1, min(b, (a + 1) // 2))
            elif kind == 4:
                x = torch.cat([x[..., b:].flip(-1), x[..., :a]], -1) + 1
            else:
                x = F.avg_pool2d(x, 3, 1, 1) - x
        return x
    return fn


@pytest.mark.parametrize("seed", range(24))
def test_layers_of_borders(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 8, 20, int(torch.randint(30, 90, (1,), generator=g)), generator=g)
    compiled(layers(seed), x)
