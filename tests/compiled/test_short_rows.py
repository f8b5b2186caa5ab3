"""Short rows of no power of two's length, matrices of few rows, rows that end at no word: in Triton's interpreter against eager, and which tiles they
have."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.interpreted import check, values
from tokamak.codegen import stages
from tokamak.fuse import gpu
from tokamak.schedule import column_words, row_moments, short_rows

pytest.importorskip("triton")


@pytest.fixture
def found(monkeypatch) -> list:
    """The schedules that are chosen from here on, though rows and matrices are few."""
    choose, found = stages.tuned.choose, []
    monkeypatch.setattr(stages.tuned, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    monkeypatch.setattr(short_rows, "PROGRAMS", 0)
    monkeypatch.setattr(column_words, "FULL", 0)
    return found


FOLDED = {
    "logsumexp": lambda x, w: x.logsumexp(-1), "places": lambda x, w: (x.argmax(-1), x.amax(-1)), "variance": lambda x, w: x.float().var(-1),
    "norm": lambda x, w: (x.abs() + w).sum(-1), "least": lambda x, w: x.amin(-1) + x.float().square().mean(-1)}
WRITTEN = {
    "softmax": lambda x, w: x.softmax(-1), "norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w),
    "away": lambda x, w: x - x.mean(-1, keepdim=True)}
LENGTHS = [(40, torch.float32), (77, torch.bfloat16), (100, torch.float16), (421, torch.float32), (815, torch.bfloat16)]


@pytest.mark.parametrize("columns, dtype", [(33, torch.float32), (40, torch.bfloat16), *LENGTHS])
@pytest.mark.parametrize("name", FOLDED)
def test_rows_that_are_folded(name, columns, dtype, found):
    """They lie in pieces of one length where they are longer than two warps are wide; the last rows of a program and the last lanes are idle."""
    check(FOLDED[name], (values(67, columns) + 2).to(dtype), values(columns).to(dtype), tolerance=5e-4)
    pieces = found[0].sizes(found[0].order[-1])
    short = short_rows.FOLDED_WARPS if dtype is torch.float32 else 1
    assert found[0].warps == (short if columns == 40 else short_rows.WARPS) and (columns <= short_rows.WHOLE or len(set(pieces)) == 1 < len(pieces))


@pytest.mark.parametrize("columns, dtype", [(24, torch.bfloat16), (51, torch.float32), (100, torch.float16), (190, torch.bfloat16)])
@pytest.mark.parametrize("name", WRITTEN)
def test_rows_that_are_written(name, columns, dtype, found):
    """They are one piece, or several that are alike where a warp would have too much of one."""
    check(WRITTEN[name], (values(67, columns) + 2).to(dtype), values(columns).to(dtype), tolerance=5e-4)
    pieces = found[0].sizes(found[0].order[-1])
    whole = (1 << (columns - 1).bit_length(),) if columns <= short_rows.HALF_WIDE else (64, 64, 64)
    assert pieces == ((8,) * 7 if columns == 51 and name != "away" else whole) and len(found[0].dims) == 2          # at no words: `equal_pieces`


@pytest.mark.parametrize("columns, dtype", [(51, torch.float32), (160, torch.float16)])
def test_gradients_of_rows(columns, dtype, found):
    """Two values are read along a row: rows that begin at words are one piece, too."""
    check(lambda x: x.log_softmax(-1), values(70, columns, dtype=dtype, grad=True))
    assert found[-1].dims and len(found[-1].sizes(found[-1].order[-1])) == 1


@pytest.mark.parametrize("rows, columns", [(8, 32), (16, 24), (11, 32)])
def test_small_matrices(rows, columns, found):
    """A program of one warp holds the columns of several."""
    check(lambda x: (x.sum(1), ), values(37, rows, columns).bfloat16())
    assert len(found[0].dims) == 3 and found[0].warps == 1


@pytest.mark.parametrize("rows", [8, 31, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_along_a_short_middle_axis(rows, dtype):
    check(lambda x: x / (x.float().square().mean(1, keepdim=True) + 1e-5).sqrt().to(x.dtype), values(5, rows, 77).to(dtype))


@pytest.mark.parametrize("shape", [(300, 5), (70, 130), (7, 3, 33)])
def test_prefixes_down_few_columns(shape):
    check(lambda x: x.cumsum(-2), values(*shape), tolerance=5e-4)


# -- the last block ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [257, 1023, 1025, 2054, 2064])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_ends_at_no_word(count, dtype, found):
    """All blocks but the last one need no mask."""
    check(lambda x, y: (F.silu(x) * y, x > y), *(values(count).to(dtype) for _ in range(2)), tolerance=5e-4)
    assert any(s.peeled for s in found) == (count % 16 != 0)         # a bool is a byte


def test_the_last_block_of_a_class_of_sizes(found):
    """A kernel is right whether there is a whole block, only whole ones, or none."""
    torch._dynamo.reset()
    fn = tokamak.compile(lambda x: torch.sigmoid(x) + 1, target="interpret", strict=True, dynamic=True, cache_dir="")
    for count in (1023, 1024, 3000, 5, 2049):
        x = values(count)
        torch.testing.assert_close(fn(x), torch.sigmoid(x) + 1)
    assert any(s.peeled for s in found)


@pytest.mark.parametrize("columns, dtype", [(9000, torch.bfloat16), (9001, torch.float16), (8195, torch.float32), (8192, torch.bfloat16)])
def test_moments_of_a_row_whose_last_block_is_not_full(columns, dtype, found, monkeypatch):
    """Only there are elements weighed. What lies beside whole words enters once."""
    for module in (gpu, row_moments):
        monkeypatch.setattr(module, "MOMENTS", 4096)
    x = (values(3, columns) * 3 + 50).to(dtype)
    check(lambda x: x.float().var(-1), x, tolerance=1e-4)
    whole = columns % 4096 == 0
    assert any(s.by_thread for s in found) and any(s.peeled for s in found) != whole


@pytest.mark.parametrize("columns, dtype", [(9000, torch.bfloat16), (9001, torch.float32)])
def test_sums_of_what_moments_give(columns, dtype, found, monkeypatch):
    """They need all of the row first: it is one kernel that holds the row, or runs through it twice."""
    for module in (gpu, row_moments):
        monkeypatch.setattr(module, "MOMENTS", 4096)
    away = lambda x: x.float() - x.float().mean(-1, keepdim=True)
    check(lambda x: away(x).pow(4).mean(-1) / away(x).pow(2).mean(-1).pow(2), (values(5, columns) * 3 + 2).to(dtype), tolerance=1e-3)
    assert len(found) == 1 and not found[0].by_thread


MUCH = {
    "softmax": lambda x, y: x.softmax(-1), "range": lambda x, y: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) + 4),
    "norm": lambda x, y: F.layer_norm(x, x.shape[-1:]), "similarity": lambda x, y: x * F.cosine_similarity(x, y, -1)[:, None]}


@pytest.mark.parametrize("columns, dtype", [(32, torch.float32), (64, torch.bfloat16), (32, torch.float16)])
@pytest.mark.parametrize("name", MUCH)
def test_short_rows_in_pieces(name, columns, dtype, found):
    """Of a whole tile and one that is not full, values that are not finite among them."""
    x, y = (values(1000, columns).to(dtype) for _ in range(2))
    x[3, 5], x[7, 0], x[9] = float("nan"), float("inf"), float("-inf")
    check(MUCH[name], x, y, tolerance=5e-3 if dtype != torch.float32 else 1e-4)
    pieces = found[0].sizes(found[0].order[-1])
    assert pieces == ((columns,) if name == "norm" else (16,) * (columns // 16))


@pytest.mark.parametrize("shape", [(3, 400, 24), (2, 513, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_softmax_down_long_columns(shape, dtype, found):
    x = values(*shape).to(dtype)
    x[0, 5, 3], x[1, :, 2] = float("inf"), float("-inf")
    check(lambda x: x.softmax(1), x, tolerance=1e-3)
    pieces = found[0].sizes(found[0].order[1])
    assert len(pieces) > 1 == len(set(pieces)) and pieces[0] <= 128


@pytest.mark.parametrize("columns", [40, 65, 72])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_standardized_columns(columns, dtype):
    """Three sums beside each other, of few columns to a program."""
    tolerance = 3e-2 if dtype != torch.float32 else 1e-3
    check(lambda x: (x - x.mean(0)) / (x.std(0) + 1e-3), values(777, columns, dtype=dtype, grad=True), tolerance=tolerance)


# -- rows as one run -----------------------------------------------------------------------------------------------------
BESIDE = {
    "bias": lambda x, row, column: x + column, "scale": lambda x, row, column: F.gelu(x * row[:, None]),
    "both": lambda x, row, column: x * row[:, None] - column, "turned": lambda x, row, column: x.t() + row,
    "first": lambda x, row, column: x[:, 1:] + column[1:], "across": lambda x, row, column: (x + column).t().contiguous()}


@pytest.mark.parametrize("columns", [31, 77, 4095])
@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_rows_that_begin_anywhere(name, columns, found):
    """Where nothing is folded, rows that lie one behind the other are one run, and what is read beside them is found by dividing."""
    check(BESIDE[name], values(9, columns), values(9), values(columns))
    assert (len(found[0].order) == 1) == (name in ("bias", "scale", "both", "turned"))
