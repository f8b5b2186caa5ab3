"""Kernels over tiles, as a GPU runs them, in Triton's interpreter: schedules at their edges, against eager and float64."""
from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.harness import agree
from tokamak.codegen import stages
from tokamak.codegen.scope import Unschedulable
from tokamak.fuse import widen
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.ir.rewrite import replaced
from tokamak.schedule import tile_flat, tile_sequence, tile_statistics, tiles
from tokamak.target import Target
from tokamak.tools.record import Recorder

pytest.importorskip("triton")


def values(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def indices(below, *shape):
    return torch.randint(0, below, shape)


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


def check(fn, *inputs, tolerance=1e-4):
    """`fn` compiled for tiles equals eager, and its gradients do."""
    torch._dynamo.reset()
    mine = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    want, got = flat(fn(*inputs)), flat(tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")(*mine))
    for w, g in zip(want, got, strict=True):
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance, equal_nan=True)
    if any(x.requires_grad for x in inputs):
        seed = torch.randn_like(want[0])
        want[0].backward(seed)
        got[0].backward(seed)
        for x, m in zip(inputs, mine):
            if x.requires_grad:
                torch.testing.assert_close(m.grad, x.grad, rtol=tolerance, atol=tolerance, equal_nan=True)


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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batch_norm(layout):
    x = torch.randn(8, 6, 5, 7).contiguous(memory_format=layout).requires_grad_()
    check(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, values(6, grad=True), values(6, grad=True))


def test_group_norm():
    check(lambda x, w, b: F.group_norm(x, 2, w, b), values(4, 6, 5, 7, grad=True), values(6, grad=True), values(6, grad=True))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_lanes_taken_together(layout, monkeypatch):
    """Sums over pixels and images, of pixels that a program holds: they are folded in each image before they are carried across images."""
    lower, found = stages.lower_tiles, []
    monkeypatch.setattr(stages, "lower_tiles", lambda body, schedule, *rest: found.append(schedule.together) or lower(body, schedule, *rest))
    shares = lambda x: torch.softmax(x.reshape(6, 2, -1), -1).view(x.shape)
    check(lambda x: (shares(x), x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))), values(6, 16, 56, 56).contiguous(memory_format=layout), tolerance=1e-3)
    assert any(found)


@pytest.mark.parametrize("dim", [0, 1])
def test_scans(dim):
    check(lambda x: x.cumsum(dim), values(70, 700))


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
    check(fn, (values(2 if name == "logarithms" else 5, 519) * 9).to(dtype), values(519), tolerance=0.5 if dtype is torch.bfloat16 else 5e-4)
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
    check(FLAT[name], x, y, values(columns, dtype=torch.bfloat16), tolerance=5e-2)
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
    check(lambda x: x[:, :17].sum(1), x, tolerance=5e-2)
    check(lambda x: x[:, 1::2].sum(1), x, tolerance=5e-2)
    check(lambda x: torch.softmax(x[:100].view(-1, 17), 1), x, tolerance=5e-2)
    check(lambda x: x.view(-1, 24)[:, :].sum(1), x[:240].contiguous(), tolerance=5e-2)
    check(lambda x: x.view(-1, 17).sum(1), x.float())
    assert found and not any(s.flat for s in found)


def test_cross_entropy():
    check(lambda x, t: F.cross_entropy(x, t), values(64, 1000, grad=True), indices(1000, 64))


def test_embedding():
    check(lambda w, t: F.embedding(t, w) * 2, values(100, 33, grad=True), indices(100, 5, 9))


def test_index_out_of_range():
    fn = tokamak.compile(lambda w, t: F.embedding(t, w) * 2, target="interpret", strict=True, cache_dir="")
    with pytest.raises(IndexError, match="index out of range"):
        fn(values(10, 4), torch.tensor([3, 10]))


def test_sixteen_bits():
    check(lambda x, y: F.gelu(x + y), values(64, 100, dtype=torch.bfloat16), values(100, dtype=torch.bfloat16), tolerance=2e-2)


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
            agree(lambda x, v, i: x.scatter_reduce(0, i[:, None].expand(6, 7), v, how, include_self=old), [into, given, at], target="interpret", policy=policy)
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
            agree(lambda x, v, i: x.scatter_reduce(0, i[:, None].expand(6, 7), v, how), [x, given, torch.tensor([3, 1, 3, 4, 0, 1])], target="interpret")


def test_into_nothing():
    """Indices into an empty table are reported, and nothing is touched."""
    fn = tokamak.compile(lambda x, i: x[i] * 2, target="interpret", strict=True, cache_dir="")
    with pytest.raises(IndexError):
        fn(torch.randn(0, 4), torch.tensor([0, 0]))


@pytest.mark.parametrize("fn", [lambda x: (x.softmax(-1), x.sum(0), x.var(1)), lambda x: x.cumsum(0).argmax(1), lambda x: x.amax((0, 1)) + x.cumsum(1),
                                lambda x: F.layer_norm(x, (70,)).sum()])
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


@pytest.mark.parametrize("columns", [257, 1023])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_anywhere(columns, dtype):
    tolerance = 1e-4 if dtype is torch.float32 else 4e-2
    check(lambda x: torch.softmax(x, -1), values(11, columns, dtype=dtype), tolerance=tolerance)
    check(lambda x, w, b: F.layer_norm(x, (columns,), w, b), values(19, columns, dtype=dtype), values(columns, dtype=dtype),
          values(columns, dtype=dtype), tolerance=tolerance)
    wide = values(9, columns + 3, dtype=dtype)
    check(lambda x: (x[:, 1:columns].amax(-1), x[:, 2:columns] - x[:, 2:columns].amin(-1, keepdim=True)), wide, tolerance=tolerance)


def test_gradients_of_rows_that_begin_anywhere():
    check(lambda x, w, b: F.layer_norm(x, (259,), w, b), values(70, 259, grad=True), values(259, grad=True), values(259, grad=True))


@pytest.mark.parametrize("columns,dtype", [(16384, torch.bfloat16), (17001, torch.bfloat16), (20480, torch.float32), (40004, torch.float32)])
def test_gradients_of_long_rows(columns, dtype):
    """Rows whose column sums no program carries whole: those are folded beside the gradient, in blocks of columns."""
    for fn, rows, weights in ((lambda x, w, b: F.layer_norm(x, (columns,), w, b), 37, 2), (lambda x, w: F.rms_norm(x, (columns,), w), 5, 1)):
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
    check(loss, values(300, 5000), indices(5000, 300), tolerance=1e-3)
    check(lambda x: torch.logsumexp(x, -1).sum(), values(600, 4500), tolerance=1e-3)


@pytest.mark.parametrize("columns", [17, 3, 64])
def test_sums_of_narrow_columns(columns):
    x = torch.randn(1 << 16, columns)
    check(lambda x: (x.double().sum(0), x.amax(0)), x)


@pytest.mark.parametrize("rows, columns, dtype", [(128, 65, torch.float16), (64, 131, torch.float32), (96, 130, torch.bfloat16), (70, 65, torch.float16),
                                                  (71, 130, torch.float32), (9, 1025, torch.float16)])
def test_sums_of_columns_whose_rows_begin_anywhere(monkeypatch, rows, columns, dtype):
    monkeypatch.setattr(widen, "LEAST", 0)
    monkeypatch.setattr(widen, "PARTS", 4.0)
    x = values(rows, columns, dtype=dtype)
    check(lambda x: (x.float() * 2 + 1).sum(0), x, tolerance=1e-4)
    check(lambda x: x.amax(0), x)
    check(lambda x: x.float().log().logsumexp(0), x.abs() + 1, tolerance=1e-4)


@pytest.mark.parametrize("rows, columns, type, others, parts", [(65536, 1025, "f16", "", 64), (65536, 1028, "f16", "", 64), (65536, 1024, "f16", "", 0),
                                                              (2048, 1025, "f16", "", 32), (2049, 1025, "f16", "", 32), (777, 86021, "f16", "", 8),
                                                              (777, 86021, "f32", "", 4), (64, 65537, "f16", "", 0), (65536, 1025, "f32", ", %rows", 0)])
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


def test_random_numbers_are_those_of_the_other_target():
    def made(target):
        torch._dynamo.reset()
        x = torch.ones(37, 1033, requires_grad=True)
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
    "norm": (lambda x, w: F.layer_norm(x, (x.shape[-1],), w), [(4, 33), (70, 130), (300, 5)], lambda n, m: (values(n, m, grad=True), values(m, grad=True))),
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


def schedules(fn, *inputs) -> list[str]:
    """The schedules of the kernels of `fn`, compiled for tiles and run once."""
    torch._dynamo.reset()
    recorder = Recorder()
    tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="", recorder=recorder)(*inputs)
    return [str(k.schedule) for g in recorder.graphs for kernels in g.values["lower"].kernels.values() for k in kernels]


def statistics(x):
    return x.sum((0, 2)), ((x - x.mean((0, 2), keepdim=True)) ** 2).sum((0, 2))


@pytest.mark.parametrize("plane,pieces", [(56 * 56, "2048+1024+64"), (57 * 57, "2048+1024+256?"), (112 * 112, "4096+2048+128"), (500, "512?"), (784, "512+256+16")])
def test_planes_that_programs_fold_across_are_covered_by_pieces(plane, pieces):
    x = values(40000 // plane + 5, 2, plane) + 100
    made = [s for s in schedules(statistics, x) if "split" in s]
    assert made and all(f":{pieces}" in s for s in made), made
    check(lambda x: statistics(x)[0], x)
    torch.testing.assert_close(tokamak.compile(statistics, target="interpret", strict=True, dynamic=False, cache_dir="")(x)[1], statistics(x.double())[1].float())


def test_what_is_read_again_is_read_from_its_end(monkeypatch):
    monkeypatch.setattr(tile_sequence, "AGAIN", 0)
    monkeypatch.setattr(tile_sequence, "SMALL", 0)
    norm = lambda x: F.batch_norm(x, None, None, training=True)
    x = values(15, 16, 56, 56).to(memory_format=torch.channels_last)
    assert schedules(norm, x)[-1].endswith("backward")
    check(norm, x)


@pytest.mark.parametrize("divisor", [3.0, 0.0, float("inf"), float("nan"), 1e-40, 3e38, -7e-20, 2e-38])
def test_divisors_that_rows_share(divisor):
    x = values(4, 700) * 10.0 ** torch.randint(-30, 30, (4, 700))
    x[:, 0], x[:, 1], x[:, 2] = 0, float("inf"), float("nan")
    y = torch.full((4,), divisor)
    got = tokamak.compile(lambda x, y: x / y[:, None], target="interpret", strict=True, dynamic=False, cache_dir="")(x, y)
    torch.testing.assert_close(got, x / y[:, None], rtol=2e-7, atol=3e-45, equal_nan=True)


def moments(x):
    """Variance and mean of each channel, the first with a large mean, the second beginning with an outlier."""
    return torch.var_mean(x, (0, 2, 3))


def uneven(*shape):
    x = values(*shape)
    x[:, 0] += 1e3
    x[0, 1, 0, 0] = 1e5
    return x


@pytest.mark.parametrize("shape", [(6, 3, 56, 56), (7, 3, 57, 57), (6, 4, 64, 64)])
def test_statistics_a_lane_a_thread(shape):
    x = uneven(*shape)
    assert "by_thread" in schedules(moments, x)[0]
    got = tokamak.compile(moments, target="interpret", strict=True, dynamic=False, cache_dir="")(x)
    for g, w in zip(got, moments(x.double())):
        torch.testing.assert_close(g.double(), w, rtol=2e-5, atol=2e-5)
    norm = lambda x, w: F.batch_norm(x, None, None, w, training=True)
    check(norm, values(*shape, grad=True), values(shape[1], grad=True), tolerance=1e-3)


@pytest.mark.parametrize("shape, at_once", [((8, 64, 16, 16), 4), ((32, 256, 8, 8), 4), ((8, 96, 16, 16), 4), ((9, 64, 15, 31), 4), ((7, 40, 17, 17), 4)])
def test_statistics_of_several_rows_at_once(shape, at_once):
    """Rows of channels enter the statistics as many at a time as divide them; those whose number nothing divides one at a time."""
    x = uneven(*shape).contiguous(memory_format=torch.channels_last)
    pieces = schedules(moments, x)[0].split(",")[0]
    assert pieces.count("+") == max(at_once - 1, 0)
    got = tokamak.compile(moments, target="interpret", strict=True, dynamic=False, cache_dir="")(x)
    for g, w in zip(got, moments(x.double())):
        torch.testing.assert_close(g.double(), w, rtol=2e-5, atol=2e-5)
    norm = lambda x, w: F.batch_norm(x, None, None, w, training=True)
    check(norm, x.requires_grad_(), values(shape[1], grad=True), tolerance=1e-2)


@pytest.mark.parametrize("shape, dtype", [((8, 64, 32, 16), torch.bfloat16), ((9, 64, 31, 31), torch.float16)])
def test_statistics_of_one_value(shape, dtype, monkeypatch):
    """More rows at once where moments alone are carried: of elements of 16 bits, which need no sum beside them."""
    monkeypatch.setattr(tile_statistics, "ALONE_ROUNDS", 0)
    x = (uneven(*shape) / 4).to(dtype).contiguous(memory_format=torch.channels_last)
    fn = lambda x: moments(x.float())
    assert schedules(fn, x)[0].split(",")[0].count("+") == tile_statistics.ALONE_AT_ONCE - 1
    got = tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")(x)
    for g, w in zip(got, moments(x.double())):
        torch.testing.assert_close(g.double(), w, rtol=2e-5, atol=2e-5)


def test_images_in_the_order_of_their_statistics(monkeypatch):
    """What follows the statistics of images goes through all of them at once, as those do: pixels last to first."""
    monkeypatch.setattr(tile_sequence, "AGAIN", 0)
    monkeypatch.setattr(tile_sequence, "SMALL", 0)
    monkeypatch.setattr(tile_sequence, "STAYING", 1 << 17)
    x = values(2, 8, 64, 128).contiguous(memory_format=torch.channels_last)
    assert any("split" in s for s in schedules(F.instance_norm, x)) and "backward" in schedules(F.instance_norm, x)[-1]
    check(F.instance_norm, x.requires_grad_(), tolerance=1e-3)


@pytest.mark.parametrize("shape, layout", [((45, 2, 56, 56), torch.contiguous_format), ((9, 8, 56, 56), torch.channels_last)])
def test_what_is_read_last_stays(shape, layout, monkeypatch):
    """The loop of the first kernel in two parts: what is read in the first leaves the cache before the rest."""
    monkeypatch.setattr(tile_sequence, "AGAIN", 0)
    monkeypatch.setattr(tile_sequence, "SMALL", 0)
    monkeypatch.setattr(tile_sequence, "STAYING", 1 << 17)
    norm = lambda x, w: F.batch_norm(x, None, None, w, training=True)
    x, w = values(*shape).contiguous(memory_format=layout), values(shape[1])
    assert "once kept(" in schedules(norm, x, w)[0]
    check(norm, x.requires_grad_(), w.requires_grad_(), tolerance=1e-3)
