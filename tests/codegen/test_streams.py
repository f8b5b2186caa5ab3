"""Results that go around the caches, as large ones do, however their rows lie in lines of memory; folds in several accumulators;
rows asked for ahead."""
from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest
import torch

import tokamak
import tokamak.schedule.schedule as schedule
from tokamak.codegen import c, kernel, tree
from tokamak.runtime import build as building
from tokamak.tools.record import Recorder

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.bool)


def compiled(fn, *inputs):
    """What the compiled `fn` gives, and the text of its kernels."""
    torch._dynamo.reset()
    recorder = Recorder()
    out = tokamak.compile(fn, strict=True, cache_dir="", recorder=recorder, dynamic=False)(*inputs)
    return out, "".join(b.text for g in recorder.graphs for b in g.values["render"].values())


def test_large_results_only():
    fn = lambda x: x * 2 + 1
    _, text = compiled(fn, torch.randn(100))
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert f">= {schedule.STREAM // 4};" in text and "stream_f32" in text


def test_memory_that_was_read_is_written_through_the_caches():
    x = torch.randn(3000)
    want = x + 1

    def fn(x):
        x.add_(1)
    _, text = compiled(fn, x)
    assert torch.equal(x, want) and "stream_" not in text


def test_every_share_ends_after_its_stores_are_in_memory():
    """Stores around the caches are weakly ordered: a fence stands behind the last of them in every share of work that a thread reports as done."""
    _, text = compiled(lambda x: (x * 2 + 1, torch.softmax(x, 1), x.sum(0)), torch.randn(300, 500))
    phases = re.findall(r"static void \w+_\d+\(void \*data\) \{\n.*?\n\}\n", text, re.S)
    streaming = [p for p in phases if " stream_f32(" in p]
    assert phases and (streaming or torch.backends.cpu.get_cpu_capability() != "AVX512")
    for p in streaming:
        assert p.endswith("    settle();\n  }\n}\n") and "return" not in p[p.index(" stream_f32("):]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, columns", [(5, 1025), (7, 256), (2, 17)])
def test_rows_anywhere_in_a_line(monkeypatch, dtype, rows, columns):
    monkeypatch.setattr(schedule, "STREAM", 8)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul(9).round().to(dtype)       # sums are exact
    total = lambda x: x.sum(1, keepdim=True).to(x.dtype)
    fn = lambda x: (torch.where(x > 3, x, total(x)), x[:, 1:] != 0)
    ours, text = compiled(fn, x)
    if dtype.itemsize >= 4 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert "stream_" in text
    for a, b in zip(ours, fn(x)):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("rows, columns", [(64, 64), (37, 129), (300, 40)])
def test_transposed(monkeypatch, rows, columns):
    monkeypatch.setattr(schedule, "STREAM", 8)
    x, y = torch.randn(3, columns, rows), torch.randn(3, rows, columns)
    fn = lambda x, y: x.transpose(1, 2) + y
    ours, text = compiled(fn, x, y)
    assert torch.equal(ours, fn(x, y))
    assert "stream_" in text or torch.backends.cpu.get_cpu_capability() != "AVX512"


@pytest.mark.parametrize("columns", [1, 16, 63, 65, 80, 127, 2049, 5000])
def test_folds_of_any_length(columns):
    x = torch.rand(5, columns, generator=torch.Generator().manual_seed(0)) + 0.5
    ours, _ = compiled(lambda x: (x.sum(1), x.amax(1), x.amin(1), (x * x).mean(1), (x > 1).sum(1), x.prod(1)), x)
    wide = x.double()
    for a, b in zip(ours, (wide.sum(1), wide.amax(1), wide.amin(1), (wide * wide).mean(1), (wide > 1).sum(1), wide.prod(1))):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-6 if a is not ours[-1] else 1e-7 * columns + 1e-6, atol=1e-30)


@pytest.mark.parametrize("place", range(0, 200, 33))
def test_a_number_that_is_none_anywhere(place):
    x = torch.randn(2, 200)
    x[1, place] = float("nan")
    (top, low), _ = compiled(lambda x: (x.amax(1), x.amin(1)), x)
    assert top.isnan().tolist() == low.isnan().tolist() == [False, True]


@pytest.mark.parametrize("rows, columns", [(1, 40), (127, 33), (128, 64), (129, 64), (1000, 40), (5000, 16)])
def test_column_sums_in_runs(rows, columns):
    """The error is that of sums of 128 numbers, whatever the number of rows: with numbers of one sign it would grow."""
    x = torch.rand(rows, columns) + 1
    (column, row), _ = compiled(lambda x: ((x * 3).sum(0), x.sum(1)), x)
    np.testing.assert_allclose(column.double().numpy(), (x * 3).double().sum(0).numpy(), rtol=3e-6)
    np.testing.assert_allclose(row.double().numpy(), x.double().sum(1).numpy(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(5, 3000), (3, 2, 5000), (4, 70)])
def test_rows_that_are_read_again_ask_for_the_next(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, text = compiled(lambda x: torch.softmax(x, -1), x)
    torch.testing.assert_close(ours.double(), torch.softmax(x.double(), -1), rtol=1e-6, atol=1e-9)
    assert "__builtin_prefetch" in text


def test_what_is_read_once_is_not_asked_for():
    _, text = compiled(lambda x: x.sum(1), torch.randn(5, 3000))
    assert "__builtin_prefetch" not in text


def test_a_store_in_a_loop_within_a_streamed_one():
    """The backward of a product's prefixes stores in an inner loop, beside a result that may go around the caches."""
    import tokamak
    x = torch.randn(5, 5, 5, requires_grad=True)
    tokamak.compile(lambda x: x.cumprod(0), strict=True, dynamic=False, cache_dir="")(x).sum().backward()
    want, = torch.autograd.grad(x.cumprod(0).sum(), x)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("rows,columns", [(1001, 33), (258, 1029), (5, 70000), (4, 16), (3, 5000)])
def test_several_rows_folded_at_a_time_are_folded_as_one_is(rows, columns, dtype):
    """Whichever rows are taken together, each is folded in the order in which it is alone: rows at the end of a share, too."""
    x = (torch.randn(rows, columns) * 10).to(dtype)
    if dtype.is_floating_point:
        x[2, 3], x[1] = float("nan"), float("-inf")
    fn = lambda x: ((x * 3 + 1).sum(1), x.amax(1), (x > 0).all(1))
    out, text = compiled(fn, x)
    alone, _ = compiled(fn, x[:1].clone())
    assert "_q3" in text or rows < 16
    assert all(torch.equal(a[:1], b) for a, b in zip(out, alone))
    exact = (x.double() * 3 + 1).sum(1)
    torch.testing.assert_close(out[0].double(), exact, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2, equal_nan=True)
    torch.testing.assert_close(out[1], x.amax(1), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out[2], (x > 0).all(1))


def test_what_lies_far_behind_is_asked_for_once_and_in_long_reads_alone():
    """The first of several loops over a row asks; what a thread keeps itself and what few elements are read from does not."""
    x, b = torch.randn(2000, 600), torch.randn(600)
    fn = lambda x, b: torch.softmax(x + b, 1)
    out, text = compiled(fn, x, b)
    first, rest = text.split("isnan_f32(a", 1) if "isnan_f32(a" in text else text.split("exp_f32(", 1)
    assert torch.allclose(out, fn(x, b), atol=1e-6)
    assert set(re.findall(r"if \(far(\w+)\)", first)) == {"p0", "p1"} and "if (far" not in rest
    least = {p: re.search(rf"const int far{p} = (.*) >= (\d+);", text) for p in ("p0", "p1")}
    assert all(int(found[2]) * 4 == kernel.FAR_FROM for found in least.values()) and least["p0"][1].count("*") == 1 and "*" not in least["p1"][1]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_long_reads_are_right_to_their_end(monkeypatch, dtype):
    """Memory behind what is read is asked for, too, never read."""
    monkeypatch.setattr(c, "FAR_FROM", 1)
    monkeypatch.setattr(tree, "FAR_WORK", 0)
    x = torch.randn(3, 1031).mul(9).round().to(dtype)
    fn = lambda x: (torch.where(x > 3, x, x.sum(1, keepdim=True).to(x.dtype)), x.t() != 0, x.amax(1) if dtype != torch.bool else x.any(1))
    ours, text = compiled(fn, x)
    assert "if (far" in text
    for got, want in zip(ours, fn(x), strict=True):
        assert torch.equal(got, want)


def test_largest_of_a_row_is_found_in_whole_registers():
    """gcc writes loops over lanes for some processors as two halves, which meet in memory."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not building.compiler().gnu:
        pytest.skip("registers of 16 lanes and gcc")
    recorder = Recorder()
    tokamak.compile(lambda x: x.amax(1), strict=True, cache_dir="", recorder=recorder, dynamic=False)(torch.randn(64, 512))
    made, = (b for g in recorder.graphs for b in g.values["render"].values())
    line = [x for x in building.compiler().line("-") if x != "-pipe"]
    line[line.index("-x"):0] = ["-march=sapphirerapids", "-S"]
    made = subprocess.run(line, input="".join((*made.prelude, made.text)), capture_output=True, text=True, check=True).stdout
    found = re.findall(r"vmaxps\s.*", made)
    assert any("zmm" in x for x in found) and not any("ymm" in x for x in found)


@pytest.mark.parametrize("shape", [(2, 96, 14, 14), (3, 21, 9, 11)])
def test_what_is_read_across_a_result_goes_through_tiles(shape):
    """Both axes are contiguous, one in what is read and one in the result: lanes run along the result."""
    x = torch.randn(shape)
    ours, text = compiled(lambda x: (x * 2).permute(0, 2, 3, 1).contiguous(), x)
    assert torch.equal(ours, (x * 2).permute(0, 2, 3, 1)) and ours.is_contiguous()
    assert "transpose_32((void *)r)" in text and not re.search(r"\bstores_f32\(p", text)
