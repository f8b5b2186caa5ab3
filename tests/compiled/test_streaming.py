"""Chains of folds as one fold (`fuse.stream`): graphs by the reference, kernels in Triton's interpreter against float64, how many they are."""
from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.codegen.stages import lower_plan, schedule_plan
from tokamak.errors import InternalError
from tokamak.fuse.plan import plan
from tokamak.fuse.stream import stream
from tokamak.ir.check import check_graph
from tokamak.ir.graph import Compute, fold
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.ir.text import print_graph
from tokamak.target import Target

pytest.importorskip("triton")
GPU = Target("cuda", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32))
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No clusters, whose programs hold longer rows together (`test_stages`)."""
    monkeypatch.setattr("tokamak.target.CLUSTER", 1)


def carriers(graph) -> list[str]:
    return [fold(n).monoid for n in graph.nodes if isinstance(n, Compute) and fold(n) is not None and fold(n).monoid in ("moments", "expsum")]


# -- the rewrite ---------------------------------------------------------------------------------------------------
VARIANCE = """graph variance {{
  input %x: {dtype}[{rows}, {columns}]({columns}, 1)
  %total: {dtype}[{rows}](1) for i2<{columns} = sum[i2](%x[i0, i2])
  %mean: {dtype}[{rows}](1) = div(%total[i0], {columns}.0:{dtype})
  %away: {dtype}[{rows}, {columns}]({columns}, 1) = sub(%x[i0, i1], {h})
  %squares: {dtype}[{rows}](1) for i5<{columns} = sum[i5](mul(%away[i0, i5], %away[i0, i5]))
  return %total, %squares
}}"""
POWERS = """graph powers {{
  input %x: f32[{rows}, {columns}]({columns}, 1)
  %top: f32[{rows}](1) for i2<{columns} = max[i2](%x[i0, i2])
  %powers: f32[{rows}](1) for i2<{columns} = sum[i2](exp(sub(%x[i0, i2], {h})))
  return %top, %powers
}}"""
FINITE_TOP = "where(eq(abs(%top[i0]), inf:f32), 0.0:f32, %top[i0])"


def variance(rows=3, columns=40000, dtype="f32", h="%mean[i0]"):
    return parse_graph(VARIANCE.format(rows=rows, columns=columns, dtype=dtype, h=h))


def powers(rows=5, columns=40000, h="%top[i0]"):
    return parse_graph(POWERS.format(rows=rows, columns=columns, h=h))


def values(graph, x):
    return evaluate(graph, [x]).outputs


@pytest.mark.parametrize("graph, monoid", [(variance(), "moments"), (variance(dtype="f64"), "moments"),
                                           (variance(h="sub(%mean[i0], 3.0:f32)"), "moments"),
                                           (powers(), "expsum"), (powers(h=FINITE_TOP), "expsum"), (powers(h="mul(%top[i0], 0.5:f32)"), "expsum")])
def test_the_rewritten_graph_means_the_same(graph, monoid):
    streamed = stream(graph, GPU)
    check_graph(streamed)
    assert carriers(streamed) == [monoid] * (1 if monoid == "moments" else 2)
    assert print_graph(parse_graph(print_graph(streamed))) == print_graph(streamed)
    source = graph.inputs[0]
    rows, columns = (int(s.constant) for s in source.shape)
    x = np.random.default_rng(0).normal(2, 1, (rows, columns)).astype("float64" if source.dtype.name == "f64" else "float32")
    x[1, 7], x[2, 9] = INF, NAN
    if rows > 3:
        x[3], x[4, :30000] = -INF, -INF
    for before, after in zip(values(graph, x), values(streamed, x), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5)


@pytest.mark.parametrize("graph", [
    variance(300, 1024), variance(3, 1024), powers(300, 4096),                 # held between the folds
    variance(h="7.0:f32"),                                                      # the second does not wait for the first
])
def test_what_stays_two_folds(graph):
    assert stream(graph, GPU) is graph


def test_where_it_pays():
    assert carriers(stream(variance(300, 32769), GPU)) and carriers(stream(variance(200, 20000), GPU))          # too long; too few rows
    assert carriers(stream(powers(300, 32768), GPU))                                                            # only folded, in pieces
    for other in (Target(), Target("cuda", 16, 132, kind="gpu", ordered=True)):       # C kernels; a fixed order of elements
        graph = variance()
        assert stream(graph, other) is graph


@pytest.mark.parametrize("rows, columns, pays", [(700, 30, True), (700, 1 << 16, False), (1500, 1 << 16, True), (100, 30, False)])
def test_where_it_pays_across(rows, columns, pays):
    """Columns: held where there are programs enough for blocks of them, or so few elements that one will do."""
    across = parse_graph(f"""graph across {{
      input %x: f32[{rows}, {columns}]({columns}, 1)
      %top: f32[{columns}](1) for i2<{rows} = max[i2](%x[i2, i0])
      %powers: f32[{columns}](1) for i2<{rows} = sum[i2](exp(sub(%x[i2, i0], %top[i0])))
      return %powers
    }}""")
    assert bool(carriers(stream(across, GPU))) == pays


def test_another_row():
    """The equations hold for every h: a row's sum of exponentials less another row's maximum."""
    graph = powers(h="%top[4 + -1*i0]")
    streamed = stream(graph, GPU)
    x = np.random.default_rng(1).normal(0, 1, (5, 40000)).astype("float32")
    assert carriers(streamed)
    for before, after in zip(values(graph, x), values(streamed, x), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5)


def test_kernels_in_c_refuse():
    carried = stream(variance(), GPU)
    with pytest.raises(InternalError, match="kernels in C carry no 'moments'"):
        lower_plan(schedule_plan(plan(carried, Target()), Target()), Target())


def test_one_group():
    """Both components and what follows share a kernel: the input is read once."""
    assert len(plan(stream(variance(), GPU), GPU).steps) == 1


# -- kernels -------------------------------------------------------------------------------------------------------
def kernels(fn, *inputs, **options) -> int:
    """How many kernels `fn`'s graph becomes."""
    seen = {}

    def one(graph, inputs, kind):
        return compile_graph(graph, inputs, tokamak.Options(target="interpret", strict=True, cache_dir="", **options),
                             lambda stage, value: seen.setdefault(stage, value), kind)
    torch._dynamo.reset()
    torch.compile(fn, backend=lambda gm, xs: aot.autograd(gm, xs, one), dynamic=False)(*inputs)
    return sum(len(k) for k in seen["lower"].kernels.values())


def close(fn, *inputs, tolerance=1e-5, **options):
    """`fn` compiled for tiles is eager's result in float64."""
    torch._dynamo.reset()
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    want, got = fn(*wide), tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="", **options)(*inputs)
    for w, g in zip(*([v] if isinstance(v, torch.Tensor) else v for v in (want, got)), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance, equal_nan=True)


def hard(rows, columns):
    """Rows with a large mean and a small variance, constant, with one far element, and plain ones."""
    x = torch.randn(rows, columns)
    x[0] = 1000 + 0.1 * x[0]
    x[1] = 3.3
    x[2, 0] = 1e6
    return x


CASES = {
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (torch.randn(7, 5, 80, 81) + 3,), 3, 5),
    "channels_last": (lambda x: F.batch_norm(x, None, None, training=True),
                      (torch.randn(7, 24, 17, 17).to(memory_format=torch.channels_last),), 3, 5),
    "instance_norm": (F.instance_norm, (torch.randn(1, 3, 150, 251),), 3, 5),
    "group_norm": (lambda x: F.group_norm(x, 2), (torch.randn(2, 4, 130, 140),), 3, 5),
    "var_mean": (lambda x: torch.var_mean(x, -1), (hard(3, 50001),), 2, 4),
    "std_of_all": (torch.std, (torch.randn(3, 30000) + 10,), 2, 4),
    "softmax": (lambda x: torch.softmax(x, -1), (5 * torch.randn(3, 50001),), 3, 5),
    "narrow_columns": (lambda x: torch.var_mean(x, 0), (torch.randn(1 << 17, 3) + 3,), 2, 4),
    "softmax_across": (lambda x: torch.softmax(x, 0), (5 * torch.randn(700, 30),), 3, 5),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), (5 * torch.randn(2, 40000),), 3, 5),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (30 * torch.randn(2, 40000),), 2, 4),
    "cross_entropy": (F.cross_entropy, (torch.randn(9, 40000), torch.randint(0, 40000, (9,))), 2, 2),
    "layer_norm": (lambda x: F.layer_norm(x, (40000,)), (torch.randn(9, 40000) + 3,), 1, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    fn, inputs, one_pass, two_passes = CASES[name]
    close(fn, *inputs, tolerance=2e-5)
    assert (kernels(fn, *inputs), kernels(fn, *inputs, streaming=False)) == (one_pass, two_passes)


def test_softmax_of_infinities():
    x = torch.randn(6, 40000)
    x[0], x[1, :39999], x[2, 17], x[3, 39999], x[4, 4] = -INF, -INF, INF, NAN, -INF
    for fn in (torch.softmax, torch.log_softmax, torch.logsumexp):
        close(lambda x: fn(x, -1), x)


def test_variance_of_infinities():
    """Variance is NaN as in eager; the mean of a row with an infinity is that, as of a sum."""
    x = torch.randn(5, 40000)
    x[0, 0], x[1, 39999], x[2, 4096], x[3, 7] = INF, -INF, NAN, 1e30
    close(lambda x: torch.var(x, -1)[:3], x)
    got = tokamak.compile(lambda x: torch.var_mean(x, -1)[1], target="interpret", strict=True, dynamic=False, cache_dir="")(x)
    torch.testing.assert_close(got, x.mean(-1), equal_nan=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_types(dtype, tolerance):
    x = torch.randn(2, 40000).to(dtype)
    close(lambda x: (torch.var(x, -1), torch.logsumexp(x, -1)), x, tolerance=tolerance)


def test_backward():
    x = torch.randn(3, 2, 120, 150)
    one, two = (x.clone().requires_grad_() for _ in range(2))
    fn = lambda x: F.batch_norm(x, None, None, training=True).sin().sum()
    torch._dynamo.reset()
    tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")(one).backward()
    fn(two).backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5)


def test_large_means():
    """As exact as two passes are where the mean is large beside the deviations, and where a row begins with its outlier."""
    x = torch.randn(3, 200000)
    x[0] += 1e4
    x[1, 0] = 1e5
    close(lambda x: torch.var(x, -1), x, tolerance=2e-6)
    close(lambda x: torch.var(x, 0), x.t().contiguous(), tolerance=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_means_of_halves(dtype):
    """Elements of 16 bits are carried as they are: their deviations are large beside what f32 keeps of their mean."""
    x = torch.randn(4, 200000) * 30
    x[0] += 1e4
    x[1, 0] = 6e4
    x[2] = 1000
    x = x.to(dtype)
    wanted = x.double().var(-1), x.double().mean(-1)
    got = tokamak.compile(lambda x: torch.var_mean(x.float(), -1), target="interpret", strict=True, dynamic=False, cache_dir="")(x)
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-5)


def test_infinities_of_halves():
    x = torch.randn(4, 40000).half()
    x[0, 0], x[1, 39999], x[2, 4096] = INF, -INF, NAN
    got = tokamak.compile(lambda x: torch.var_mean(x.float(), -1), target="interpret", strict=True, dynamic=False, cache_dir="")(x)
    assert got[0][:3].isnan().all()
    torch.testing.assert_close(got[0][3], torch.var(x[3].float()))
    torch.testing.assert_close(got[1], x.float().mean(-1), equal_nan=True)


def test_unknown_sizes():
    fn = tokamak.compile(lambda x: (torch.var(x, -1), torch.softmax(x, -1)), target="interpret", strict=True, dynamic=True, cache_dir="")
    torch._dynamo.reset()
    for shape in ((4, 33), (7, 5000), (3, 64)):
        x = torch.randn(shape)
        for got, want in zip(fn(x), (torch.var(x, -1), torch.softmax(x, -1))):
            torch.testing.assert_close(got, want)
