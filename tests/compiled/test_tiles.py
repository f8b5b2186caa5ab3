"""Kernels over tiles, as a GPU runs them, in Triton's interpreter: schedules at their edges, against eager and float64."""
from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.harness import agree
from tests.compiled.interpreted import check, flat, indices, schedules, values
from tokamak.codegen import stages
from tokamak.codegen.scope import Unschedulable
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import Target
from tokamak.tools.record import Recorder

pytest.importorskip("triton")


@pytest.mark.parametrize("rows,columns", [(7, 1025), (64, 1000), (3, 17), (2, 40000), (5, 1), (1, 4097)])
def test_softmax(rows, columns):
    check(lambda x: torch.softmax(x, -1), values(rows, columns, grad=True))


@pytest.mark.parametrize("columns", [900, 40000])
def test_rows_of_an_ordered_target(columns):
    x = values(5, columns)
    got = tokamak.compile(lambda x: torch.softmax(x, -1), target="interpret", policy="strict", strict=True, dynamic=False, cache_dir="")(x)
    torch.testing.assert_close(got, torch.softmax(x, -1))


@pytest.mark.parametrize("rows,columns", [(512, 77), (33, 1500), (4099, 3)])
@pytest.mark.parametrize("axes", [0, 1, (0, 1)])
def test_sums(rows, columns, axes):
    check(lambda x: x.sum(axes), values(rows, columns))


@pytest.mark.parametrize("rows,columns", [(32, 768), (9, 257), (600, 33)])
def test_layer_norm(rows, columns):
    check(lambda x, w, b: F.layer_norm(x, (columns,), w, b), values(rows, columns, grad=True), values(columns, grad=True), values(columns, grad=True))


def test_extremes():
    x = values(16, 3000)
    x[3, 70] = float("nan")
    x[4, 5] = x[4, 9] = float("inf")
    check(lambda x: (x.amax(-1), x.argmax(-1), x.amin(0), x.argmin(0)), x)


def test_group_norm():
    check(lambda x, w, b: F.group_norm(x, 2, w, b), values(4, 6, 5, 7, grad=True), values(6, grad=True), values(6, grad=True))


@pytest.mark.parametrize("n, plane, each", [(16, 303, 33), (16, 301, 32), (40, 20, 300)])
def test_runs_of_looped_rows(n, plane, each):
    """Sums over planes and channels of a group, the channels contiguous: the last tile of a plane is not full, nor are runs of 33 and 300."""
    x = values(n, plane, 3, each)
    assert all(re.match(r"tile\(i1:\d+\?, i3:\d+\??\) looped\(i1(, i3)?\)", s) for s in schedules(lambda x: x.sum((1, 3)), x))
    check(lambda x: (x.sum((1, 3)), x.amax((1, 3)), x.var((1, 3))), x)


@pytest.mark.parametrize("dim", [0, 1])
def test_scans(dim):
    check(lambda x: x.cumsum(dim), values(70, 700))


def test_cross_entropy():
    check(lambda x, t: F.cross_entropy(x, t), values(64, 1000, grad=True), indices(1000, 64))


def test_embedding():
    check(lambda w, t: F.embedding(t, w) * 2, values(100, 33, grad=True), indices(100, 5, 9))


def test_index_out_of_range():
    fn = tokamak.compile(lambda w, t: F.embedding(t, w) * 2, target="interpret", strict=True, cache_dir="")
    with pytest.raises(IndexError, match="index out of range"):
        fn(values(10, 4), torch.tensor([3, 10]))


def test_sixteen_bits():
    check(lambda x, y: F.gelu(x + y), values(64, 100, dtype=torch.bfloat16), values(100, dtype=torch.bfloat16))


def test_views():
    check(lambda x: F.pad(x, (1, 2), value=3.0).roll(2, -1), values(33, 50))
    check(lambda x, y: torch.cat([x, y], 1).relu(), values(33, 50), values(33, 20))
    check(lambda x: x.t().contiguous() * 2, values(100, 77))


def test_pooling():
    check(lambda x: F.max_pool2d(x, 2), values(2, 3, 8, 8, grad=True))


def test_middle_norm():
    check(lambda x: x / x.pow(2).mean(1, keepdim=True).sqrt(), values(4, 40, 30, grad=True))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_empty(shape):
    check(lambda x: (x.sum(-1), x + 1), values(*shape))


def test_unknown_sizes():
    fn = tokamak.compile(lambda x: torch.softmax(x, -1), target="interpret", strict=True, dynamic=True, cache_dir="")
    for shape in ((4, 33), (7, 1025), (3, 64)):
        x = values(*shape)
        torch.testing.assert_close(fn(x), torch.softmax(x, -1))


REDUCTIONS = ("sum", "prod", "amax", "amin", "mean")


@pytest.mark.parametrize("policy", ["fast", "strict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool], ids=str)
def test_scatters(dtype, policy):
    """Every fold of every type, with and without what stood there before, where several updates meet."""
    into, given = ((torch.randn(n, 7) * 5).to(dtype) for n in (5, 6))
    at = torch.tensor([3, 1, 3, 3, 0, 1])
    for how in REDUCTIONS[:4 if dtype is torch.bool else 5]:
        for old in (True, False):
            agree(lambda x, v, i: x.scatter_reduce(0, i[:, None].expand(6, 7), v, how, include_self=old), [into, given, at], target="interpret",
                  policy=policy)
    agree(lambda x, v, i: (x.index_put((i,), v, accumulate=True), x.index_put((i,), v)), [into, given, at], target="interpret", policy=policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scattered_extremes_keep_nan(dtype):
    """NaN of either sign, in the memory and among the updates, and both zeros."""
    into, given = torch.randn(5, 7, dtype=dtype), torch.randn(6, 7, dtype=dtype)
    nan = torch.tensor(float("nan"), dtype=dtype)
    into[0, 0], into[3, 1], into[2], into[4, 2], into[1, 6] = nan, -nan, nan, -0.0, float("inf")
    given[1, 3], given[2, 4], given[0, 5], given[3, 6] = nan, -nan, float("-inf"), float("inf")
    for how in ("amax", "amin"):
        for x in (into, -into):
            agree(lambda x, v, i: x.scatter_reduce(0, i[:, None].expand(6, 7), v, how), [x, given, torch.tensor([3, 1, 3, 4, 0, 1])],
                  target="interpret")


def test_into_nothing():
    """Indices into an empty table are reported, and nothing is touched."""
    fn = tokamak.compile(lambda x, i: x[i] * 2, target="interpret", strict=True, cache_dir="")
    with pytest.raises(IndexError):
        fn(torch.randn(0, 4), torch.tensor([0, 0]))


@pytest.mark.parametrize("fn", [lambda x: (x.softmax(-1), x.sum(0), x.var(1)), lambda x: x.cumsum(0).argmax(1),
                                lambda x: x.amax((0, 1)) + x.cumsum(1), lambda x: F.layer_norm(x, (70,)).sum()])
def test_plainest_schedule(fn, monkeypatch):
    """What no chosen schedule holds is taken apart, and runs through its rows one coordinate at a time."""
    lower, refused = stages.lower_tiles, []

    def picky(body, schedule, *rest):
        rows = set(body.axes) - body.parallel
        if schedule.split or rows - schedule.looped or rows & set(schedule.dims):
            refused.append(schedule)
            raise Unschedulable("for a test")
        return lower(body, schedule, *rest)
    monkeypatch.setattr(stages, "lower_tiles", picky)
    check(fn, values(6, 70))
    assert refused


@pytest.mark.parametrize("columns,dtype", [(16384, torch.bfloat16), (17001, torch.bfloat16), (20480, torch.float32), (40004, torch.float32)])
def test_gradients_of_long_rows(columns, dtype):
    """Rows whose column sums no program carries whole: those are folded beside the gradient, in blocks of columns."""
    for fn, rows, weights in ((lambda x, w, b: F.layer_norm(x, (columns,), w, b), 19, 2), (lambda x, w: F.rms_norm(x, (columns,), w), 5, 1)):
        torch._dynamo.reset()
        inputs = [values(rows, columns, dtype=dtype, grad=True), *(values(columns, dtype=dtype, grad=True) for _ in range(weights))]
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        got, want = tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")(*inputs), fn(*doubles)
        seed = torch.randn_like(got)
        for g, w in zip(torch.autograd.grad(got, inputs, seed), torch.autograd.grad(want, doubles, seed.double()), strict=True):
            assert float((g.double() - w).norm() / w.norm()) < (1e-6 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("columns, numbers", [(4096, 2), (4097, 4)])
def test_numbers_of_a_row_are_read_a_row_ahead(rows, columns, numbers):
    """Where programs take row after row: what no copy brings early, a row's mean for one, is there when its turn begins; the last turn reads nothing
    else."""
    torch._dynamo.reset()
    recorder, norm = Recorder(), lambda x, w, b: F.layer_norm(x, (columns,), w, b)
    inputs = values(rows, columns, grad=True), values(columns, grad=True), values(columns, grad=True)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    got, want = tokamak.compile(norm, target="interpret", strict=True, dynamic=False, cache_dir="", recorder=recorder)(*inputs), norm(*doubles)
    seed = torch.randn_like(got)
    for g, w in zip(torch.autograd.grad(got, inputs, seed), torch.autograd.grad(want, doubles, seed.double()), strict=True):
        torch.testing.assert_close(g, w.float(), rtol=1e-5, atol=1e-5)
    loops = [(x.lines, read(k.lines)) for g in recorder.graphs for kernels in g.values["lower"].kernels.values()
             for k in kernels if k.schedule.split for x in k.lines if not isinstance(x, str)]
    ahead = [{x.split(" = ")[1] for x in lines if re.fullmatch(r"t\d+ = t\d+", x)} & before for lines, before in loops]
    assert rows < 70 or max(map(len, ahead)) == numbers
    assert all(any(x.startswith(f"{a} = t") for x in lines) for (lines, _), found in zip(loops, ahead) for a in found)


def read(lines) -> set[str]:
    """The registers that straight lines load."""
    return {x.split(" = ")[0] for x in lines if isinstance(x, str) and " = tl.load(" in x}


@pytest.mark.parametrize("columns", [4096, 16385, 65536, 262144])
def test_long_rows_are_read_twice(columns):
    """Norm backward: one read where a program carries the column sums, else one for the sums along rows and one for gradients and column sums."""
    graph = parse_graph(f"""graph backward {{
      input %x: bf16[2048, {columns}]({columns}, 1)
      input %dy: bf16[2048, {columns}]({columns}, 1)
      input %w: bf16[{columns}](1)
      %s: f32[2048](1) for i2<{columns} = sum[i2](mul(mul(f32(%dy[i0, i2]), f32(%w[i2])), f32(%x[i0, i2])))
      %dx: bf16[2048, {columns}]({columns}, 1) = bf16~(sub(mul(f32(%dy[i0, i1]), f32(%w[i1])), mul(f32(%x[i0, i1]), %s[i0])))
      %dw: f32[{columns}](1) for i2<2048 = sum[i2](mul(f32(%dy[i2, i0]), f32(%x[i2, i0])))
      %db: f32[{columns}](1) for i2<2048 = sum[i2](f32(%dy[i2, i0]))
      return %dx, %dw, %db
    }}""")
    s, dx, dw, db = graph.nodes[-4:]
    found = [set(g.nodes()) for g in plan(graph, Target("cpu", 16, 132, kind="gpu")).steps]
    assert found == ([{s, dx, dw, db}] if columns <= 4096 else [{s}, {dx, dw, db}])


def test_sums_over_looped_rows_count_each_row_once():
    def loss(x, t):
        return F.cross_entropy(x, t, reduction="sum")
    check(loss, values(80, 5000), indices(5000, 80), tolerance=1e-3)
    check(lambda x: torch.logsumexp(x, -1).sum(), values(160, 4500), tolerance=1e-3)


@pytest.mark.parametrize("columns", [17, 3, 64])
def test_sums_of_narrow_columns(columns):
    x = torch.randn(1 << 14, columns)
    check(lambda x: (x.double().sum(0), x.amax(0)), x)


def test_random_numbers_are_those_of_the_other_target():
    def made(target):
        torch._dynamo.reset()
        x = torch.ones(7, 1033, requires_grad=True)
        run = tokamak.compile(lambda x: (F.dropout(x, 0.3) * 2, torch.rand_like(x), torch.randn_like(x)), target=target, strict=True, cache_dir="")
        torch.manual_seed(5)
        outs = run(x)
        return [*outs, *torch.autograd.grad(outs[0].sum(), x)]
    for one, other in zip(made(""), made("interpret"), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert torch.equal(made("")[1], made("interpret")[1])


def test_checked_against_the_reference():
    fn = lambda x, i: (torch.softmax(x, -1).sum(0), x.index_add(0, i, x[i]), x.cumsum(1), x.argmax(1))
    run = tokamak.compile(fn, target="interpret", strict=True, cache_dir="", check=True)
    x, i = values(20, 70, grad=True), indices(20, 6)
    for got, want in zip(run(x, i), fn(x, i), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    run(x, i)[1].sum().backward()


UNKNOWN = {
    "norm": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w), [(4, 33), (70, 130), (300, 5)],
             lambda n, m: (values(n, m, grad=True), values(m, grad=True))),
    "folds": (lambda x: (x.sum(0), x.sum(), x.argmax(0), x.var(1)), [(4, 33), (700, 10)], lambda n, m: (values(n, m),)),
    "scans": (lambda x: (x.cumsum(0), x.flip(1).cumsum(1)), [(4, 33), (70, 10)], lambda n, m: (values(n, m),)),
    "scatter": (lambda x, i, v: x.index_add(0, i, v), [(4, 33), (70, 10)],
                lambda n, m: (values(n, m, grad=True), indices(n, 5 + n), values(5 + n, m, grad=True))),
    "rows by index": (lambda w, i: F.embedding(i, w) * 2, [(4, 33), (70, 10)], lambda n, m: (values(n, m, grad=True), indices(n, 7 * n))),
    "moved": (lambda x: F.pad(x, (1, 2), value=3.0).roll(2, -1).t().contiguous(), [(4, 33), (70, 10)], lambda n, m: (values(n, m, grad=True),)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_sizes_that_only_the_call_shows(name):
    fn, sizes, make = UNKNOWN[name]
    torch._dynamo.reset()
    run = tokamak.compile(fn, target="interpret", strict=True, dynamic=True, cache_dir="")
    for size in sizes:
        inputs = make(*size)
        want, got = flat(fn(*inputs)), flat(run(*inputs))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
        wanted = [x for x in inputs if x.requires_grad]
        if wanted:
            seed = torch.randn_like(want[0])
            for g, w in zip(torch.autograd.grad(got[0], wanted, seed), torch.autograd.grad(want[0], wanted, seed), strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("divisor", [3.0, 0.0, float("inf"), float("nan"), 1e-40, 3e38, -7e-20, 2e-38])
def test_divisors_that_rows_share(divisor):
    x = values(4, 700) * 10.0 ** torch.randint(-30, 30, (4, 700))
    x[:, 0], x[:, 1], x[:, 2] = 0, float("inf"), float("nan")
    y = torch.full((4,), divisor)
    got = tokamak.compile(lambda x, y: x / y[:, None], target="interpret", strict=True, dynamic=False, cache_dir="")(x, y)
    torch.testing.assert_close(got, x / y[:, None], rtol=2e-7, atol=3e-45, equal_nan=True)
