"""The place of a row's extreme, found behind the extreme itself."""
import pytest
import torch

from tests.codegen.test_pieces import compiled


def places(x):
    return x.argmax(-1), x.argmin(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("columns", [64, 100, 1000, 4099])
def test_places_of_extremes(columns, dtype):
    """The first of equals, the first NaN above all; of nothing but the lowest value the first."""
    x = (torch.randn(9, columns, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    x[1], x[2, 7:], x[3, -1] = x[1, 0], x[2].amax(), x[3].amax() + 1
    if dtype.is_floating_point:
        x[4, columns // 2], x[4, -1], x[5], x[6], x[7, 1::2] = float("nan"), float("nan"), -float("inf"), float("inf"), float("nan")
    for fn in (lambda x: torch.stack(places(x)), lambda x: x.argmax(-1, keepdim=True) + x.amin(-1, keepdim=True).isnan()):
        assert "hany(" in compiled(fn, x)


def test_values_beside_places():
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))
    assert "hany(" in compiled(lambda x: x.max(-1).values * 2 + x.max(-1).indices, x)
