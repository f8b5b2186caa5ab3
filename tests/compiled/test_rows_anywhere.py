"""Rows that begin at any element, short and long, in Triton's interpreter: read in whole words, and what lies beside those."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.interpreted import check, values
from tokamak.codegen import stages
from tokamak.fuse import widen
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.ir.rewrite import replaced
from tokamak.schedule import tile_flat
from tokamak.target import Target

pytest.importorskip("triton")


PREFIXES = {
    "sum": (lambda x, w: x.cumsum(1) * w, torch.float32), "carried": (lambda x, w: x.cumsum(1).sum(0), torch.float32),
    "behind": (lambda x, w: torch.softmax(x, -1).cumsum(1), torch.float32), "logarithms": (lambda x, w: x.logcumsumexp(1), torch.float32),
    "products": (lambda x, w: (1 + x * 0.01).cumprod(1), torch.float32), "offset": (lambda x, w: x[1:, 3:].cumsum(1), torch.bfloat16),
    "integers": (lambda x, w: (x.cumsum(1, dtype=torch.int32), x.cummax(1)), torch.int32)}


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_of_rows_that_begin_anywhere(name, monkeypatch):
    """They are read in whole words; the elements before and behind those have prefixes of their own, and each goes on from the last."""
    choose, found = stages.tuned.choose, []
    monkeypatch.setattr(stages.tuned, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    fn, dtype = PREFIXES[name]
    check(fn, (values(2 if name == "logarithms" else 5, 519) * 9).to(dtype), values(519), tolerance=5e-4)
    assert any(s.shift is not None for s in found)


FLAT = {
    "sums": lambda x, y, w: x.sum(1), "weighed": lambda x, y, w: (x * y * w).sum(1) + 1, "places": lambda x, y, w: (x.argmax(1), y.amax(1)),
    "spread": lambda x, y, w: x.float().var(1)}


@pytest.mark.parametrize("columns", [9, 17, 31])
@pytest.mark.parametrize("name", FLAT)
def test_short_rows_as_one_run(name, columns, monkeypatch):
    """Folds of short rows of 16 bits that begin anywhere: a program reads all of its rows in whole words."""
    monkeypatch.setattr(tile_flat, "LEAST", 0)
    choose, found = stages.tuned.choose, []
    monkeypatch.setattr(stages.tuned, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    x, y = (values(2801, columns, dtype=torch.bfloat16) for _ in range(2))
    check(FLAT[name], x, y, values(columns, dtype=torch.bfloat16))
    assert any(s.flat for s in found)


def test_short_rows_of_a_class_of_sizes(monkeypatch):
    """One kernel is right for every length of the class."""
    monkeypatch.setattr(tile_flat, "LEAST", 0)
    choose, found = stages.tuned.choose, []
    monkeypatch.setattr(stages.tuned, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    fn = tokamak.compile(lambda x: (x.sum(1), x.amax(1)), target="interpret", strict=True, dynamic=True, cache_dir="")
    for rows, columns in ((701, 17), (303, 18), (511, 31), (299, 27)):
        x = values(rows, columns, dtype=torch.float16)
        for got, want in zip(fn(x), (x.sum(1), x.amax(1))):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert any(s.flat for s in found) and len(found) <= 3


def test_short_rows_that_need_wide_addresses_are_no_run():
    """A run counts its elements in 32 bits."""
    text = """graph sums {
  input %%x: f16[%d, 17](17, 1)
  %%y: f16[%d](1) for i1<17 = f16(sum[i1](f32(%%x[i0, i1])))
  return %%y
}"""
    gpu, found = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32)), []
    for rows in (1 << 20, 1 << 28):
        (_, schedule), = stages.schedule_plan(plan(parse_graph(text % (rows, rows)), gpu), gpu).bodies.values()
        found.append(bool(schedule.flat))
    assert found == [True, False]


def test_short_rows_that_are_not_one_run(monkeypatch):
    """Rows of a wider matrix, rows that are written too, and rows of words are read as any."""
    monkeypatch.setattr(tile_flat, "LEAST", 0)
    choose, found = stages.tuned.choose, []
    monkeypatch.setattr(stages.tuned, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    x = values(300, 34, dtype=torch.bfloat16)
    check(lambda x: x[:, :17].sum(1), x)
    check(lambda x: x[:, 1::2].sum(1), x)
    check(lambda x: torch.softmax(x[:100].view(-1, 17), 1), x)
    check(lambda x: x.view(-1, 24)[:, :].sum(1), x[:240].contiguous())
    check(lambda x: x.view(-1, 17).sum(1), x.float())
    assert found and not any(s.flat for s in found)


@pytest.mark.parametrize("columns", [257, 1023])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_anywhere(columns, dtype):
    check(lambda x: torch.softmax(x, -1), values(11, columns, dtype=dtype))
    check(lambda x, w, b: F.layer_norm(x, (columns,), w, b), values(19, columns, dtype=dtype), values(columns, dtype=dtype),
          values(columns, dtype=dtype))
    wide = values(9, columns + 3, dtype=dtype)
    check(lambda x: (x[:, 1:columns].amax(-1), x[:, 2:columns] - x[:, 2:columns].amin(-1, keepdim=True)), wide)


def test_gradients_of_rows_that_begin_anywhere():
    check(lambda x, w, b: F.layer_norm(x, (259,), w, b), values(70, 259, grad=True), values(259, grad=True), values(259, grad=True))


@pytest.mark.parametrize("rows, columns, dtype", [(128, 65, torch.float16), (64, 131, torch.float32), (96, 130, torch.bfloat16),
                                                  (70, 65, torch.float16), (71, 130, torch.float32), (9, 1025, torch.float16)])
def test_sums_of_columns_whose_rows_begin_anywhere(monkeypatch, rows, columns, dtype):
    monkeypatch.setattr(widen, "LEAST", 0)
    monkeypatch.setattr(widen, "PARTS", 4.0)
    x = values(rows, columns, dtype=dtype)
    check(lambda x: (x.float() * 2 + 1).sum(0), x, tolerance=1e-4)
    check(lambda x: x.amax(0), x)
    check(lambda x: x.float().log().logsumexp(0), x.abs() + 1, tolerance=1e-4)


@pytest.mark.parametrize("rows, columns, type, others, parts", [
    (65536, 1025, "f16", "", 64), (65536, 1028, "f16", "", 64), (65536, 1024, "f16", "", 0), (2048, 1025, "f16", "", 64),
    (2049, 1025, "f16", "", 64), (777, 86021, "f16", "", 8), (777, 86021, "f32", "", 4), (64, 65537, "f16", "", 0),
    (65536, 1025, "f32", ", %rows", 0)])
def test_rows_count_as_one_where_they_begin_anywhere(rows, columns, type, others, parts):
    """Where so many begin alike, their sums are few beside them, and nothing else reads them."""
    graph = parse_graph(f"""graph columns {{
      input %x: {type}[{rows}, {columns}]({columns}, 1)
      %total: f32[{columns}](1) for i1<{rows} = sum[i1]({"%x[i1, i0]" if type == "f32" else "f32(%x[i1, i0])"})
      %rows: f32[{rows}](1) for i1<{columns} = sum[i1]({"%x[i0, i1]" if type == "f32" else "f32(%x[i0, i1])"})
      return %total{others}
    }}""")
    if not others:
        graph = replaced(graph, lambda n: None)          # without the sums along rows, which nobody asks for
    made = widen.widened(graph, Target("cpu", 16, 132, kind="gpu"))
    assert [n.shape[0].constant for n in made.nodes if len(n.shape) == 2 and n not in graph.nodes] == ([parts] if parts else [])
