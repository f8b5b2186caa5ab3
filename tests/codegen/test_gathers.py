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


def test_a_computed_row_is_taken_apart_beside_an_axis_that_it_does_not_know():
    """The gradient of rows added to every second row: the number of a gathered row is halved in a loop whose lanes run along columns."""
    def every_second(x, rows):
        return x.index_put((rows,), x[:1].expand(5, 2, 2) * 2, accumulate=True)[::2] * 1.5
    g = torch.Generator().manual_seed(0)
    x, rows = torch.randn(64, 2, 2, generator=g), torch.randint(0, 64, (5,), generator=g)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch._dynamo.reset()
    tokamak.compile(every_second, strict=True)(mine, rows).sum().backward()
    every_second(theirs, rows).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
