"""Gathered rows as C: a row's number is one for all its columns."""
import pytest
import torch

import tokamak
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


@pytest.mark.parametrize("columns", [16, 33])
def test_a_gather_behind_a_guard_on_columns_fetches_its_row_once(columns):
    """Edges of a graph: what both ends have, side by side."""
    def scores(x, w, a, b):
        return (torch.cat([x[a], x[b]], -1) * w).sum(-1)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(20, columns, generator=g), torch.randn(2 * columns, generator=g)
    a, b = (torch.randint(-20, 20, (50,), generator=g) for _ in range(2))
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        compiled = torch.compile(scores, backend="tokamak")
        torch.testing.assert_close(compiled(x, w, a, b), scores(x, w, a, b))
    text = "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)
    assert "tk_index(" in text and "tk_indices(" not in text and "loadgu_f32" in text
    for bad in (20, -21):
        with pytest.raises(IndexError):
            compiled(x, w, a, torch.full_like(b, bad))
