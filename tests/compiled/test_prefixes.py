"""Prefixes of few long rows, and down few long columns, in blocks that programs share: in the interpreter against eager, and how many kernels."""
from __future__ import annotations

import pytest
import torch

import tokamak
from tests.compiled.interpreted import check, values
from tests.test_rungs_gpu import LARGE
from tokamak.codegen import stages
from tokamak.codegen.stages import lower_plan, schedule_plan
from tokamak.fuse import prefixes as rows
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.schedule import prefixes
from tokamak.tools.kernels import kernels
from tokamak.tools.record import recording

pytest.importorskip("triton")


@pytest.fixture
def found(monkeypatch) -> list:
    """The schedules that are chosen from here on, in blocks though rows are short."""
    choose, found = prefixes.choose, []
    monkeypatch.setattr(stages.prefixes, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    monkeypatch.setattr(rows, "LONG", 64)
    for name, small in (("BLOCK", 128), ("LEAST", 16), ("DEEP", 16), ("DEEP_LEAST", 8), ("COLUMN_BLOCKS", 8)):
        monkeypatch.setattr(prefixes, name, small)
    return found


@pytest.mark.parametrize("shape", [(1, 512), (3, 1000), (2, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_along_rows(shape, dtype, found):
    check(lambda x: x.cumsum(-1), values(*shape).to(dtype), tolerance=5e-4)
    assert found[0] is not None and found[0].along.extent == shape[-1]


@pytest.mark.parametrize("shape", [(256, 3), (301, 7), (2, 100, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_down_columns(shape, dtype, found):
    check(lambda x: x.cumsum(-2), values(*shape).to(dtype), tolerance=5e-4)
    assert found[0] is not None


MONOIDS = {
    "products": lambda x: (x * 0.1 + 1).cumprod(-1), "logarithms": lambda x: (x * 30).logcumsumexp(-1),
    "greatest": lambda x: torch.cummax(x, -1)[0] + 1, "places": lambda x: torch.cummax(x, -1), "integers": lambda x: (x * 10).long().cumsum(-1),
    "bytes": lambda x: (x > 0).cumsum(-1), "turned": lambda x: x.flip(-1).cumsum(-1).flip(-1), "two": lambda x: x.cumsum(-1) * (x * x).cumsum(-1)}


@pytest.mark.parametrize("name", MONOIDS)
def test_what_is_carried(name, found):
    x = values(2, 333)
    x[0, 7], x[1, 200] = float("nan") if name in ("greatest", "places") else 0, 3
    check(MONOIDS[name], x, tolerance=1e-3)
    assert any(found)


@pytest.mark.parametrize("name, fn", {
    "softmax": lambda x: x.softmax(-1).cumsum(-1), "centred": lambda x: ((x - x.mean(-1, keepdim=True)).cumsum(-1), x.sum(-1)),
    "kept": lambda x: (lambda p: (p, p.cumsum(-1), p.cumsum(-1) > 0.5))(x.softmax(-1))}.items())
def test_folds_of_the_row_beside_them(name, fn, found):
    """They are known before the first block."""
    check(fn, values(3, 500), tolerance=5e-4)
    assert any(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_alone(dtype, found):
    """The cast behind the prefixes takes no kernel of its own, though no axis is left to run through in parallel."""
    torch._dynamo.reset()
    x = values(1000).to(dtype)
    with recording(strict=True, target="interpret", cache_dir="") as seen:
        got = tokamak.compile(lambda x: x.cumsum(0), dynamic=False)(x)
    torch.testing.assert_close(got, x.cumsum(0), rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
    assert found[0] is not None and len(list(kernels(seen.graphs[0]))) == 3


def test_gradients(found):
    check(lambda x: x.cumsum(-1), values(2, 400, grad=True), tolerance=5e-4)
    assert len(found) > 1 and all(found)


def test_rows_from_their_ends_are_read_whole():
    """Not as columns are."""
    text = """graph prefixes {
  input %x: f32[64, 262144](262144, 1)
  %out: f32[64, 262144](262144, 1) = scan_sum[i1 reverse](f32(%x[i0, i1]))
  return %out
}"""
    low = lower_plan(schedule_plan(plan(parse_graph(text), LARGE), LARGE), LARGE)
    (first, _, last), = low.kernels.values()
    assert all(len(k.schedule.order) == 3 and str(k.schedule).startswith(f"tile(i2:{prefixes.BLOCK // 4})") for k in (first, last))


def test_sizes_that_are_symbolic(found):
    torch._dynamo.reset()
    fn = tokamak.compile(lambda x: x.cumsum(-1), target="interpret", strict=True, dynamic=True, cache_dir="")
    for count in (300, 256, 411, 1000, 1024):
        x = values(2, count)
        torch.testing.assert_close(fn(x), x.cumsum(-1), rtol=1e-4, atol=1e-4)
    assert any(found)


def test_in_place(found):
    def fn(x):
        x.copy_(x.cumsum(-1) + x)
        return x
    check(lambda x: fn(x.clone()), values(2, 400), tolerance=5e-4)


TURNED = {
    "back": lambda x: x.flip(-1).cumsum(-1).flip(-1), "once": lambda x: x.cumsum(-1).flip(-1),
    "both": lambda x: (x * 2).flip(0, 1).cumsum(0).flip(0, 1),
    "other": lambda x: x.cumsum(0).flip(1) + x, "halves": lambda x: x.bfloat16().flip(-1).cumsum(-1).flip(-1),
    "twice": lambda x: x.cumsum(0) + x.cumsum(0).flip(0)}


@pytest.mark.parametrize("name", TURNED)
@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_prefixes_that_are_read_from_the_end(name, target):
    """They are made from there, in the kernel that reads them."""
    torch._dynamo.reset()
    x = values(5, 33)
    options = {"target": target} if target != "cpu" else {}
    with recording(strict=True, cache_dir="", **options) as seen:
        got = tokamak.compile(TURNED[name], dynamic=False)(x)
    torch.testing.assert_close(got, TURNED[name](x), rtol=2e-2 if name == "halves" else 1e-4, atol=1e-1 if name == "halves" else 1e-4)
    assert len(list(kernels(seen.graphs[0]))) == (2 if name == "twice" else 1)


def test_gradients_of_prefixes_are_one_kernel():
    torch._dynamo.reset()
    x = values(5, 33, grad=True)
    with recording(strict=True, target="interpret", cache_dir="") as seen:
        tokamak.compile(lambda x: (x * 2).cumsum(-1), dynamic=False)(x).backward(torch.ones(5, 33))
    torch.testing.assert_close(x.grad, torch.arange(33, 0, -1.0).expand(5, 33) * 2)
    assert len(list(kernels(seen.graphs[1]))) == 1
