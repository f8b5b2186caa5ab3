"""Rows held in stages, by one program and by several of a cluster: in Triton's interpreter, with thresholds that small rows reach."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import tokamak
from tests.compiled.harness import agree
from tests.compiled.interpreted import check, values
from tokamak.codegen import stages as pipeline
from tokamak.fuse import sharing
from tokamak.schedule import tile_blocks, tile_rows, tile_stages, tiles

pytest.importorskip("triton")


@pytest.fixture
def chosen(monkeypatch):
    """Rows of 129 elements are staged in pieces of 64 lanes, those of more than 256 bytes shared; the schedules that were lowered."""
    found: list = []
    choose = tiles.choose

    def watched(body, hints, target):
        found.append(choose(body, hints, target))
        return found[-1]
    monkeypatch.setattr(tiles, "choose", watched)
    monkeypatch.setattr(pipeline.tiles, "choose", watched)
    small(monkeypatch)
    return found


def held(patch, most: int) -> None:
    for module in (tiles, tile_rows, tile_blocks):
        patch.setattr(module, "HELD", most)


def small(patch) -> None:
    for name, value in (("FROM", 256), ("FROM_WIDE", 256), ("WARPS", 1), ("LANES", 2)):
        patch.setattr(tile_stages, name, value)
    held(patch, 128)
    patch.setattr(sharing, "STAGED", 1024)
    patch.setattr(sharing, "SHARE", 512)
    patch.setattr(sharing, "RUN", 4)


def staged(found) -> list[int]:
    """How many programs share each staged row."""
    return [s.sharers for s in found if s.staged is not None]


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b)


@pytest.mark.parametrize("rows, columns, programs", [(3, 256, 1), (5, 100, 1), (3, 512, 4), (2, 1000, 8), (4, 515, 4), (2, 1023, 8), (3, 385, 4)])
def test_softmax(chosen, rows, columns, programs):
    check(lambda x: torch.softmax(x, -1), values(rows, columns, grad=True))
    assert staged(chosen)[0] == programs


@pytest.mark.parametrize("rows, columns", [(3, 250), (9, 512), (5, 1021), (2, 300)])
def test_layer_norm(chosen, rows, columns):
    check(layer_norm, values(rows, columns, grad=True), values(columns, grad=True), values(columns, grad=True))
    assert staged(chosen)


@pytest.mark.parametrize("columns", [640, 641, 2000, 2047])
def test_16_bits(chosen, columns):
    agree(layer_norm, [values(*s, dtype=torch.bfloat16, grad=True) for s in ((5, columns), (columns,), (columns,))], grad=True, target="interpret")
    check(lambda x, y: torch.softmax(x + y, -1), values(3, columns, dtype=torch.float16), values(3, columns, dtype=torch.float16))
    assert staged(chosen)


@pytest.mark.parametrize("rows, columns, dtype, programs", [(3, 256, torch.float32, 2), (2, 301, torch.bfloat16, 2), (1, 515, torch.float32, 4),
                                                            (2, 200, torch.float16, 2), (4, 256, torch.float32, 1)])
def test_few_rows_are_shared_by_more_programs(chosen, monkeypatch, rows, columns, dtype, programs):
    """Rows that one program could hold, too few for the multiprocessors."""
    monkeypatch.setattr(sharing, "LEAST_SHARE", 64)
    check(lambda x: torch.softmax(x, -1), values(2, rows, columns, dtype=dtype)[0], tolerance=1e-5)
    assert rows == 1 or staged(chosen)[0] == programs
    check(layer_norm, values(rows, columns, dtype=dtype), values(columns, dtype=dtype), values(columns, dtype=dtype), tolerance=1e-5)
    assert rows == 1 or staged(chosen)[-1] == programs


@pytest.mark.parametrize("columns, programs", [(513, 1), (2049, 8)])
def test_what_lies_beside_whole_words_does_not_count(chosen, columns, programs):
    """A row one element longer than what programs hold in whole words is held by them, in pieces that are whole words."""
    check(layer_norm, *(values(*s, dtype=torch.float16) for s in ((3, columns), (columns,), (columns,))))
    schedule, = chosen
    assert schedule.sharers == programs and all(size % 8 == 0 for size in schedule.sizes(schedule.staged))


def test_every_kind_of_result(chosen):
    """Indices, 64-bit numbers, bools and not-a-numbers travel between programs; values of a row are stored once."""
    x = values(4, 600)
    x[1, 300] = float("nan")
    x[2, 599] = float("inf")
    check(lambda x: (x - x.amax(-1, keepdim=True), x.argmax(-1), (x > 0).sum(-1, keepdim=True) + x, (x > 3).any(-1, keepdim=True) & (x < 0)), x)
    check(lambda x: (x.double() - x.double().mean(-1, keepdim=True), x.double().mean(-1)), values(4, 600))
    check(lambda x: (x.argmin(-1, keepdim=True) + x, x.argmin(-1)), torch.zeros(3, 700))
    assert len(staged(chosen)) >= 3


def test_infinite_rows(chosen):
    x = values(4, 600)
    x[0] = float("-inf")
    x[1, 3] = float("inf")
    check(lambda x: (torch.softmax(x, -1), torch.log_softmax(x, -1)), x)
    assert staged(chosen)


def test_rows_of_one_program_are_read_once(chosen):
    """What a stage needs again it has in registers: a load a piece."""
    check(lambda x: torch.softmax(x, -1), values(3, 250))
    schedule, = chosen
    assert str(schedule).startswith("tile(i1:64+64+64+64?) staged(i1)") and schedule.registers


def test_in_place(chosen):
    x = values(5, 600)
    got = tokamak.compile(lambda x: x.sub_(x.mean(-1, keepdim=True)), target="interpret", strict=True, dynamic=False, cache_dir="")(x.clone())
    torch.testing.assert_close(got, x - x.mean(-1, keepdim=True))


def test_a_row_that_is_only_folded_is_not_held(chosen):
    check(lambda x: (x.sum(-1), x.amax(-1)), values(5, 900))
    assert chosen and not staged(chosen)


def test_a_row_that_is_folded_again_is_held(chosen):
    check(lambda x: torch.logsumexp(x, -1), values(5, 900))
    assert staged(chosen) == [8]


def test_an_ordered_target_holds_nothing_in_stages(chosen):
    x = values(5, 900)
    got = tokamak.compile(lambda x: torch.softmax(x, -1), target="interpret", policy="strict", strict=True, dynamic=False, cache_dir="")(x)
    torch.testing.assert_close(got, torch.softmax(x, -1))
    assert chosen and not staged(chosen)


@pytest.mark.parametrize("policy", ["fast", "eager"])
def test_dropout_before_a_norm(chosen, policy):
    """Random numbers are the same in every stage."""
    x, w, b = values(4, 600), values(600), values(600)

    def both(x, w, b):
        d = F.dropout(x, 0.4)
        return d, layer_norm(d + x, w, b)
    torch.manual_seed(5)
    d, got = tokamak.compile(both, target="interpret", policy=policy, strict=policy == "fast", dynamic=False, cache_dir="")(x, w, b)
    torch.testing.assert_close(got, layer_norm(d + x, w, b), rtol=1e-4, atol=1e-4)


def test_channels_that_are_rows(chosen):
    check(lambda x: F.instance_norm(x), values(2, 3, 17, 30, grad=True))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.integers(130, 1500), st.integers(0, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_views_that_begin_anywhere(rows, columns, offset, dtype):
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        whole = torch.randn(rows * columns + 16).to(dtype)
        x = whole[offset:offset + rows * columns].view(rows, columns)
        check(lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype), x)


@pytest.mark.parametrize("shape, groups, programs", [((2, 6, 8, 25), 3, 4), ((2, 32, 3, 5), 2, 1), ((3, 16, 4, 24), 2, 8)])
def test_groups_of_channels(chosen, shape, groups, programs):
    """Rows of two axes: shared along the longer contiguous one, or along channels."""
    check(lambda x, w, b: F.group_norm(x, groups, w, b), values(*shape), values(shape[1]), values(shape[1]))
    assert staged(chosen) == [programs] and len(next(s for s in chosen if s.staged is not None).dims) == 2


def test_statistics_of_channels(chosen):
    """Images are shared out; running statistics are updated once."""
    def trained(x, mean, var, w, b):
        mean, var = mean * 1, var * 1
        return F.batch_norm(x, mean, var, w, b, True), mean, var
    check(trained, values(8, 3, 8, 14), values(3), values(3).abs(), values(3), values(3))
    assert 8 in staged(chosen)


def test_rows_of_three_axes(chosen):
    check(lambda x, w, v: F.layer_norm(x, (4, 8, 15)) * w + v, values(3, 4, 8, 15), values(4, 1, 1), values(8, 1))
    assert staged(chosen) == [4]


@pytest.mark.parametrize("rows, columns, dtype", [(40, 1001, torch.bfloat16), (17, 515, torch.float16), (9, 1023, torch.bfloat16)])
def test_weights_beside_rows_that_begin_anywhere(chosen, monkeypatch, rows, columns, dtype):
    """Programs take every so many rows and keep the weights, two to a register."""
    held(monkeypatch, 4096)
    monkeypatch.setattr(tile_stages, "WARPS", 2)
    monkeypatch.setattr(sharing, "STAGED", 1 << 14)
    check(lambda x, w: F.rms_norm(x, (columns,), w), values(rows, columns, dtype=dtype), values(columns, dtype=dtype))
    schedule, = chosen
    assert schedule.staged is not None and schedule.split and schedule.shift is not None


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "turned"])
@pytest.mark.parametrize("shape, groups, dtype", [((2, 16, 9, 25), 2, torch.float32), ((2, 32, 8, 8), 4, torch.bfloat16),
                                                  ((3, 12, 5, 7), 1, torch.float32)])
def test_gradients_of_groups_of_channels(chosen, monkeypatch, shape, groups, dtype, layout):
    """Sums of each channel and of those sums, of rows that one program holds; read along channels and written along pixels too."""
    held(monkeypatch, 4096)
    monkeypatch.setattr(sharing, "STAGED", 1 << 16)
    norm = (lambda x, w, b: F.group_norm(x.contiguous(), groups, w, b)) if layout == "turned" else lambda x, w, b: F.group_norm(x, groups, w, b)
    x = values(*shape, dtype=dtype).contiguous(memory_format=torch.contiguous_format if layout == "contiguous" else torch.channels_last)
    check(norm, x.requires_grad_(), *(values(shape[1], dtype=dtype, grad=True) for _ in range(2)))
    assert staged(chosen) == [1, 1]


@pytest.mark.parametrize("norm, rows, columns, dtype", [(layer_norm, 40, 512, torch.float32), (layer_norm, 40, 1001, torch.bfloat16),
                                                        (lambda x, w, b: F.rms_norm(x, x.shape[-1:], w) + b, 33, 1000, torch.float16)])
def test_column_sums_beside_shared_rows(chosen, monkeypatch, norm, rows, columns, dtype):
    """Programs of a cluster take row after row, exchange by turns what they fold of each, and carry the sums of their columns."""
    for name, value in (("SHARED_CARRIED", 4096), ("SHARED_COLUMNS", 256), ("CARRIED", 256), ("FEW_SHARERS", 8)):
        monkeypatch.setattr(sharing, name, value)
    inputs = [values(*s, dtype=dtype) for s in ((rows, columns), (columns,), (columns,), (rows, columns))]

    def gradients(fn, *inputs):
        *read, incoming = (x.clone().requires_grad_() for x in inputs)
        return torch.autograd.grad(fn(*read), read, incoming)
    got = gradients(tokamak.compile(norm, target="interpret", strict=True, dynamic=False, cache_dir=""), *inputs)
    for mine, exact in zip(got, gradients(norm, *(x.double() for x in inputs))):
        assert (mine - exact).norm() <= (1e-6 if dtype is torch.float32 else 4e-3) * exact.norm()
    assert any(s.staged is not None and s.sharers > 1 and s.split for s in chosen)


@pytest.mark.parametrize("fn, columns, dtype", [(lambda x: torch.softmax(x, -1), 500, torch.float32),
                                                (lambda x: torch.softmax(x, -1), 600, torch.float32),
                                                (lambda x: F.layer_norm(x, x.shape[-1:]), 800, torch.bfloat16)])
def test_long_rows_one_after_the_other(chosen, fn, columns, dtype):
    """Clusters take many rows in a loop, the next under way; few rows have a cluster each."""
    check(fn, values(19, columns, dtype=dtype))
    check(fn, values(3, columns, dtype=dtype))
    many, few = chosen
    assert many.sharers == few.sharers > 1 and many.split and many.stages == 3 and not few.split and few.stages == 1
