"""Long rows that programs share and only fold, wherever they begin: in Triton's interpreter, against eager."""
from __future__ import annotations

import pytest
import torch

from tests.compiled.interpreted import check, values
from tokamak.codegen import stages
from tokamak.codegen.tile_parts import lower_tiles
from tokamak.schedule import tile_blocks

pytest.importorskip("triton")

FOLDS = {"sum": lambda x: x.float().sum(1), "amax": lambda x: x.amax(1), "norms": lambda x: (x.float().norm(p=1, dim=1), x.float().norm(dim=1)),
         "logsumexp": lambda x: x.float().logsumexp(1), "var_mean": lambda x: torch.var_mean(x.float(), 1), "any": lambda x: (x > 4).any(1)}


@pytest.fixture
def shared(monkeypatch):
    """The schedules of the kernels whose programs share the whole words of rows."""
    found: list = []

    def watched(body, schedule, *rest):
        found.extend([schedule] if schedule.shift is not None and schedule.shift.axis in schedule.split else [])
        return lower_tiles(body, schedule, *rest)
    monkeypatch.setattr(stages, "lower_tiles", watched)
    return found


@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_that_begin_anywhere(shared, dtype, fold):
    """What lies before the first whole word, and behind the last, is folded once."""
    x = values(3, 33001, dtype=dtype)
    x[:, 0], x[:, -1], x[1, 5] = 5, -7, 9
    check(fold, x, tolerance=1e-4 if dtype is torch.float32 else 2e-3)
    check(fold, torch.cat([x, x[:, :2]], 1)[:, 1:-1], tolerance=1e-4 if dtype is torch.float32 else 2e-3)
    assert len(shared) == 2


def test_rows_of_whole_words(shared):
    check(FOLDS["sum"], values(3, 33000, dtype=torch.float16), tolerance=2e-3)
    assert not shared


def test_places_are_not_told_apart_by_words(shared):
    x = values(3, 33001)
    x[:, -1] = 9
    check(lambda x: x.argmax(1), x)
    assert not shared


BESIDE = {"softmax": lambda x: torch.softmax(x, 1), "log_softmax": lambda x: torch.log_softmax(x.float(), 1),
          "sums": lambda x: (x.float().sum(1), x - x.amax(1, keepdim=True)),
          "norm": lambda x: torch.nn.functional.layer_norm(x.float(), x.shape[-1:])}


@pytest.mark.parametrize("fn", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("columns, dtype", [(257, torch.float16), (519, torch.bfloat16)])
def test_several_rows_that_begin_anywhere(monkeypatch, fn, columns, dtype):
    """A program holds several, the last one fewer."""
    found = []

    def watched(body, schedule, *rest):
        found.extend([schedule] if schedule.shift is not None and len(schedule.dims) > 1 else [])
        return lower_tiles(body, schedule, *rest)
    monkeypatch.setattr(stages, "lower_tiles", watched)
    monkeypatch.setattr(tile_blocks, "RESIDENT", 1)
    check(fn, values(41, columns, dtype=dtype) * 3, tolerance=4e-3 if dtype is torch.float16 else 4e-2)
    assert found
