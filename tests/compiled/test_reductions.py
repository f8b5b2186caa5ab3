"""Folds of long rows in tiles, in Triton's interpreter: what few lanes carry, what idle lanes hold, infinities, coordinates in 32 bits; and which
schedules such kernels get."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.interpreted import schedules
from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.codegen import stages
from tokamak.codegen.stages import schedule_plan
from tokamak.codegen.tile_parts import lower_tiles
from tokamak.codegen.triton import render
from tokamak.fuse import column_folds, gpu, sharing, widen
from tokamak.fuse.cost import Hints
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.schedule import column_words, tile_alike, tile_blocks, tile_facts, tile_threads, tiles
from tokamak.target import Target
from tokamak.tools.record import Recorder, recording

pytest.importorskip("triton")

INF, NAN = math.inf, math.nan
GPU = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32))


def ours(fn):
    torch._dynamo.reset()
    return tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir="")


def same(fn, *inputs, tolerance=1e-6):
    """`fn` compiled for tiles gives what eager gives in float64, NaN and infinities in the same places."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (ours(fn)(*inputs), fn(*wide))), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got.to(want.dtype), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("shape,dim", [((3, 9001), 1), ((3, 8192), 1), ((700, 40), 0), ((20000,), 0), ((3, 700, 40), 1), ((5, 40), 1)])
def test_places_of_extremes_where_all_are_infinite(shape, dim):
    x = torch.full(shape, -INF)
    same(lambda x: (x.argmax(dim), (-x).argmin(dim), x.amax(dim)), x)
    x.view(-1)[-1] = 3
    same(lambda x: (x.argmax(dim), (-x).argmin(dim)), x)


@pytest.mark.parametrize("shape,dim", [((3, 9001), 1), ((700, 40), 0), ((20000,), 0), ((3, 700, 40), 1), ((5, 40), 1), ((40, 33, 7), (0, 2)),
                                       ((6, 70000), 1), ((4001, 33), 0)])
def test_how_many_are_so(shape, dim):
    """Counted in 32 bits, and in i64 from there on: with what is made of the count, beside other sums, and of comparisons that are negated."""
    x = torch.randn(shape)
    same(lambda x: ((x > 0).sum(dim), (x > 0).sum(dim) * 3000000000, ~(x > 1).any(dim), (x <= 0).sum(dim) - (x > 1).sum(dim), x.abs().sum(dim)),
         x, tolerance=2e-5)
    same(lambda x: (x == x.amax(dim, keepdim=True)).sum(dim) + (x > 0).sum(), x)
    text = counted(2 ** 20)
    assert ".to(tl.int32)" in text and ".to(tl.int64)" in text and ".to(tl.int32)" not in counted(2 ** 31)


def counted(columns: int) -> str:
    """The text of a kernel that counts what is greater than 0 along rows of so many columns."""
    graph = parse_graph(f"""graph counted {{
  input %x: f32[64, {columns}]({columns}, 1)
  %n: i64[64](1) for i1<{columns} = sum[i1](i64(gt(%x[i0, i1], 0.0:f32)))
  return %n
}}""")
    (b, s), = schedule_plan(plan(graph, GPU), GPU).bodies.values()
    return "\n".join(render(k, "kernel") for k in lower_tiles(b, s, Hints({}), "cuda", lambda b: tiles.choose(b, Hints({}), GPU), True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [8191, 20000, 24577])
def test_idle_lanes_change_nothing(dtype, columns):
    """Sums, products and extremes of the same elements: no number is neutral in all of them."""
    x = (-1 - torch.rand(3, columns)).to(dtype)
    near = lambda x: x.double()
    same(lambda x: near(x).sum(1), x)
    same(lambda x: near(x).amax(1), x)
    same(lambda x: near(x).amin(1), -x)
    same(lambda x: (near(x).sum(1), near(x).amax(1), (-near(x)).amin(1)), x)
    same(lambda x: (near(x).mul(-1 / 1.5).prod(1), near(x).sum()), x[:, :4500])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.bool])
def test_whole_numbers(dtype):
    x = torch.randint(-3, 3, (3, 20001)).to(dtype)
    same(lambda x: (x.sum(1), x.any(1), x.all(1)), x)
    same(lambda x: x.any(1), torch.zeros(2, 20001, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 9000), (4, 9001), (30000,)])
def test_sums_of_exponentials(dtype, shape):
    x = (torch.randn(shape) * 10 + 100).to(dtype)
    same(lambda x: torch.logsumexp(x, -1).float(), x, tolerance=1e-2 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("columns", [9000, 9001])
def test_sums_of_exponentials_at_the_edges_of_the_type(columns):
    x = torch.randn(7, columns)
    x[0] *= 3e37
    x[0, 5], x[1], x[2, :-1], x[3] = 3.3e38, -3.3e38, -INF, -INF
    x[4, 7], x[5, -1] = INF, NAN
    x[6, :4500] = -1e9
    same(lambda x: torch.logsumexp(x, -1), x)


def test_a_class_is_no_coordinate_of_32_bits():
    places = torch.tensor([3, 2**32 + 3, -1, -2**31, 2**31, 99, 2**33 - 1])
    same(lambda t: torch.where(torch.arange(100) == t[:, None], 1.0, 0.0), places)
    same(lambda t: (t[:, None] == torch.arange(100)).sum(1), places)


@pytest.mark.parametrize("classes", [8192, 9001])
def test_cross_entropy_with_classes_left_out(classes):
    x, target = 3 * torch.randn(9, classes), torch.randint(0, classes, (9,))
    target[2] = target[7] = -100
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    ours(lambda x, t: F.cross_entropy(x, t))(a, target).backward()
    F.cross_entropy(b, target).backward()
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("shape, dtype", [((300, 520), torch.bfloat16), ((91, 16400), torch.float16), ((16, 4096), torch.float16),
                                          ((99, 8448), torch.float32), ((3, 130, 264), torch.float16)])
@pytest.mark.parametrize("fold", ["sum", "amax"])
def test_columns_by_words(monkeypatch, shape, dtype, fold):
    """Where a thread folds its rows first: NaN and infinities too, rows that fill no tile, columns that fill none."""
    monkeypatch.setattr(column_words, "RESIDENT", 0)
    x = torch.randn(*shape).to(dtype)
    x[..., 1, 2], x[..., 3, 4], x[..., -1, -1] = NAN, INF, -INF
    recorder = Recorder()
    torch._dynamo.reset()
    run = tokamak.compile(lambda x: getattr(x.float(), fold)(-2), target="interpret", strict=True, dynamic=False, cache_dir="", recorder=recorder)
    torch.testing.assert_close(run(x).double(), getattr(x.double(), fold)(-2), rtol=1e-5, atol=1e-4, equal_nan=True)
    kernels = [k for g in recorder.graphs for made in g.values["lower"].kernels.values() for k in made]
    assert any(k.schedule.by_thread for k in kernels) or shape[0] == 16 and "tile(i0:16, i1:256) warps(1)" in str(kernels[0].schedule)


@pytest.mark.parametrize("shape, dtype", [
    ((4, 1001), torch.bfloat16), ((3, 515), torch.float16), ((2, 2048), torch.float16), ((2, 257), torch.float32), ((300, 15), torch.bfloat16),
    ((700, 127), torch.bfloat16), ((520, 65), torch.float32), ((40, 4097), torch.float16)])
def test_few_rows_and_few_columns(monkeypatch, shape, dtype):
    """Held or shared by programs, of rows that begin anywhere or at words."""
    monkeypatch.setattr(column_words, "RESIDENT", 0)
    x = torch.randn(*shape).to(dtype)
    x[1, 2], x[0, 4], x[-1, -1] = NAN, INF, -INF
    same(lambda x: (x.double().sum(0), x.amax(0)), x.clone())
    run = tokamak.compile(lambda x: x.float().sum(0), target="interpret", strict=True, dynamic=False, cache_dir="")
    torch.testing.assert_close(run(x).double(), x.double().sum(0), rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("shape, dtype, tile", [
    ((48, 1003), torch.bfloat16, "tile(i0:64?, i1:32?) warps(4)"), ((8, 3001), torch.float16, "tile(i0:8, i1:256?) warps(4)"),
    ((13, 2051), torch.float32, "tile(i0:16?, i1:128?) warps(4)"), ((77, 3001), torch.bfloat16, "tile(i0:16?, i1:128?) looped(i0) warps(4)"),
    ((100, 4096), torch.float16, "tile(i0:128?, i1:32) warps(2)")])
def test_columns_that_a_program_holds(monkeypatch, shape, dtype, tile):
    """Of rows that begin anywhere, the last tile masked along both; of more that begin at words; and those that are run through."""
    monkeypatch.setattr(column_words, "RESIDENT", 1000 if shape[0] == 100 else 0)
    monkeypatch.setattr(column_words, "FILL", 0)
    monkeypatch.setattr(column_words, "LATE", 0)
    monkeypatch.setattr(column_words, "MANY_ANYWHERE", 65)
    monkeypatch.setattr(widen, "LEAST", 1 << 40)
    found, choose = [], stages.tuned.choose
    monkeypatch.setattr(stages.tuned, "choose", lambda *args: found.append(choose(*args)) or found[-1])
    x = torch.randn(*shape).to(dtype)
    x[1, 2], x[0, 4], x[-1, -1] = NAN, INF, -INF
    run = tokamak.compile(lambda x: x.float().sum(0), target="interpret", strict=True, dynamic=False, cache_dir="")
    torch.testing.assert_close(run(x).double(), x.double().sum(0), rtol=1e-5, atol=1e-4, equal_nan=True)
    assert str(found[0]).startswith(tile)


@pytest.mark.parametrize("columns, dtype", [(515, torch.float32), (1030, torch.float16), (1024, torch.float32)])
def test_columns_that_are_summed_where_they_are_written(monkeypatch, columns, dtype):
    """Gradients of few rows and of their weights, by programs that hold all rows of some columns."""
    monkeypatch.setattr(column_folds, "WALKED_FROM", 256)
    x, w, s = torch.randn(13, columns, dtype=dtype), torch.randn(columns, dtype=dtype), torch.rand(13) + 1
    run = tokamak.compile(lambda x, w, s: ((x.float() * s[:, None]).sum(0), (x.float() * (w.float() + s[:, None])).to(dtype)),
                          target="interpret", strict=True, dynamic=False, cache_dir="")
    total, out = run(x, w, s)
    torch.testing.assert_close(total.double(), (x.double() * s[:, None].double()).sum(0), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.float(), (x.float() * (w.float() + s[:, None])), rtol=4e-3 if dtype is torch.float16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("rows, columns, dtype", [(5, 1030, torch.float32), (6, 2048, torch.float16)])
def test_gradients_of_few_long_rows_beside_sums_of_their_columns(monkeypatch, rows, columns, dtype):
    """Of a LayerNorm whose rows no program holds: the rows' sums by themselves, those of the columns where the gradient is written."""
    monkeypatch.setattr(sharing, "sharers", lambda *args: 0)
    monkeypatch.setattr(gpu, "SHORT", 64)
    monkeypatch.setattr(column_folds, "ALONE_EACH", 64)
    monkeypatch.setattr(column_folds, "WALKED_FROM", 256)
    x, w, b = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, dtype=dtype), torch.randn(columns, dtype=dtype)
    fn = lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)
    inputs = [v.requires_grad_() for v in (x, w, b)]
    dy = torch.randn(rows, columns, dtype=dtype)
    with recording() as recorder:
        got = torch.autograd.grad(ours(fn)(*inputs), inputs, dy)
    doubles = [v.detach().double().requires_grad_() for v in inputs]
    wanted = torch.autograd.grad(fn(*doubles), doubles, dy.double())
    for g, e in zip(got, wanted):
        torch.testing.assert_close(g.double(), e, rtol=4e-3 if dtype is torch.float16 else 1e-5, atol=4e-3 if dtype is torch.float16 else 1e-5)
    backward = next(r.values["fuse"] for r in recorder.graphs if r.kind == "backward")
    assert [len(backward.stores[g]) for g in backward.steps] == [2, 3]


@pytest.mark.parametrize("scan, shape", [("cumsum", (200, 70)), ("cumsum", (3, 129, 40)), ("cummax", (66, 2)), ("logcumsumexp", (66, 2))])
def test_prefixes_down_columns(scan, shape):
    """In a loop over so many rows at a time, the last of them not all there."""
    x = torch.randn(*shape)
    x[..., 7, 1], x[..., 3, 0] = NAN, -INF
    same(lambda x: tuple(getattr(x, scan)(-2)) if scan == "cummax" else getattr(x, scan)(-2), x, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scan", ["cumsum", "cumprod"])
def test_prefixes_down_many_columns(scan, dtype):
    """A warp makes those of 128 columns, 16 rows at a time, the last of them not all there."""
    x = (torch.randn(5, 70, 400) / 4 + 1).to(dtype)
    x[1, 7, 1], x[2, 3, 399] = NAN, -INF
    fn = lambda x: getattr(x.flip(1), scan)(1) + 1
    assert all(s.startswith("tile(i1:16?, i2:128?) looped(i1) warps(1)") for s in schedules(fn, x))
    same(fn, x, tolerance=1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("scan, shape, dim", [("cumsum", (2, 50001), 1), ("cumsum", (50001, 5), 0), ("cumsum", (2, 20001, 3), 1),
                                              ("cumprod", (20001, 5), 0)])
def test_long_prefixes_lose_no_digits(scan, shape, dim):
    """On a CPU eager carries them in float64."""
    x = torch.rand(shape) if scan == "cumsum" else 1 + (torch.rand(shape) - 0.5) / 100
    got = tokamak.compile(lambda x: getattr(x, scan)(dim), strict=True, dynamic=False)(x)
    torch.testing.assert_close(got.double(), getattr(x.double(), scan)(dim), rtol=3e-7, atol=0)


# -- schedules -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, columns, type, tile", [
    (97, 688168, "f16", "tile(i0:8?, i1:256?) looped(i0) by_thread warps(1)"),
    (194, 344084, "f32", "tile(i0:8?, i1:128?) looped(i0) by_thread warps(1)"),
    (16, 4194304, "f16", "tile(i0:16, i1:256) warps(1)"), (4, 4194304, "f16", "tile(i0:4, i1:512)"),
    (65536, 1024, "f16", "tile(i0:16, i1:64) split"), (1024, 65536, "f16", "tile(i0:64, i1:64) looped(i0) warps(4)"),
    (1024, 65536, "f32", "tile(i0:64, i1:64) looped"), (97, 688169, "f16", "tile(i0:8+8+8+8+8+8+8+8+8+8+8+8+8?, i1:64?) warps(8)"),
    (297, 688169, "f16", "tile(i0:16?, i1:128?) looped(i0) warps(4)")])
def test_columns_are_folded_by_words(rows, columns, type, tile):
    """Whole words of rows, as many bytes under way as the machine asks for; not of rows that begin anywhere, nor of few columns."""
    x = "%x[i1, i0]" if type == "f32" else "f32(%x[i1, i0])"
    _, schedule = scheduled(f"""graph columns {{
      input %x: {type}[{rows}, {columns}]({columns}, 1)
      %total: f32[{columns}](1) for i1<{rows} = sum[i1]({x})
      return %total
    }}""")
    assert str(schedule).startswith(tile)


def scheduled(text: str):
    """(body, schedule) of the only kernel of a graph, on a large GPU."""
    made, = schedule_plan(plan(parse_graph(text), GPU), GPU).bodies.values()
    return made


def first_kernel(text: str) -> str:
    body, schedule = scheduled(text)
    kernels = lower_tiles(body, schedule, Hints({}), GPU.name, lambda rest: tiles.choose(rest, Hints({}), GPU))
    return render(kernels[0], "kernel")


def total(rows: int, columns: int, dtype: str = "f16") -> str:
    return f"""graph total {{
  input %x: {dtype}[{rows}, {columns}]({columns}, 1)
  %total: f32[{rows}](1) for i1<{columns} = sum[i1](f32(%x[i0, i1]))
  return %total
}}"""


def test_what_is_read_once_leaves_the_cache_first():
    """Not what is less than a quarter of the cache, and not what is written as it is read."""
    assert scheduled(total(8192, 32768))[1].once and "evict_first" in first_kernel(total(8192, 32768))
    assert not scheduled(total(64, 32768))[1].once and "evict_first" not in first_kernel(total(64, 32768))
    scaled = """graph scaled {
  input %x: f16[8192, 32768](32768, 1)
  %scaled: f16[8192, 32768](32768, 1) = f16(mul(f32(%x[i0, i1]), 2.5:f32))
  return %scaled
}"""
    assert not scheduled(scaled)[1].once and "evict_first" not in first_kernel(scaled)


def test_chunks_of_rows_that_are_only_folded_count_bytes():
    chunks = {d: scheduled(total(8192, 60000, d))[1] for d in ("f16", "f32")}
    assert [s.pieces[0][1][0] for s in chunks.values()] == [8192, 4096] and [s.warps for s in chunks.values()] == [16, 32]


@pytest.mark.parametrize("columns, dtype, monoid, warps", [(65536, "f16", "sum", tile_threads.SUMMED_WARPS),
                                                           (65537, "f16", "sum", tile_threads.SUMMED_WARPS),
                                                           (65536, "f16", "max", tile_threads.PASSING_WARPS),
                                                           (65536, "f32", "sum", tile_threads.LONG_WARPS)])
def test_chunks_of_long_rows_that_are_summed(columns, dtype, monoid, warps):
    """Larger where they are of 16-bit elements."""
    schedule = scheduled(total(8192, columns, dtype).replace("sum[", f"{monoid}["))[1]
    assert schedule.warps == warps and schedule.pieces[0][1][0] == (16384 if warps == tile_threads.SUMMED_WARPS else 4096 if dtype == "f32" else 8192)


@pytest.mark.parametrize("shape", [(2, 65536), (3, 70008), (1, 400000)])
def test_sums_of_long_rows_of_halves(shape):
    same(lambda x: (x.double().sum(1), x.double().square().sum(1)), torch.rand(shape).half())
    same(lambda x: x.float().sum(1).double(), torch.rand(shape).bfloat16())


def test_short_rows_share_a_program():
    """As many as make 16 KB."""
    sizes = {d: dict(zip(s.dims, (s.sizes(a)[0] for a in s.dims))) for d in ("f16", "f32") for s in [scheduled(total(65536, 512, d))[1]]}
    assert [next(iter(v.values())) for v in sizes.values()] == [16, 8]


def test_idle_lanes_need_no_choice_where_loads_fill_them():
    ragged = first_kernel(total(8192, 100000))
    assert "other=0.0" in ragged and "tl.where" not in ragged
    both = first_kernel("""graph both {
  input %x: f16[8192, 100000](100000, 1)
  %total: f32[8192](1) for i1<100000 = sum[i1](f32(%x[i0, i1]))
  %top: f32[8192](1) for i1<100000 = max[i1](f32(%x[i0, i1]))
  return %total, %top
}""")
    assert "other" not in both and "tl.where" in both


def test_rows_that_nothing_folds_any_more_run_in_parallel():
    """The backward of a loss sums one term a row: simplified, its kernel is pointwise."""
    seen = {}

    def watched(gm, inputs):
        def one(graph, inputs, kind):
            options = tokamak.Options(target="interpret", cache_dir="")
            return compile_graph(graph, inputs, options, lambda stage, value: seen.setdefault((kind, stage), value), kind)
        return aot.autograd(gm, inputs, one)
    torch._dynamo.reset()
    x, target = torch.randn(9, 8192, requires_grad=True), torch.randint(0, 8192, (9,))
    torch.compile(lambda x, t: F.cross_entropy(x, t), backend=watched, dynamic=False)(x, target).backward()
    (body, schedule), = seen["backward", "schedule"].bodies.values()
    assert body.parallel == frozenset(body.axes) and not schedule.looped


def centred(rows: int, columns: int, dtype: str = "f32") -> str:
    wide, narrow = ("%x[i0, i1]", "%s") if dtype == "f32" else ("f32(%x[i0, i1])", f"{dtype}(%s)")
    return f"""graph centred {{
  input %x: {dtype}[{rows}, {columns}]({columns}, 1)
  %total: f32[{rows}](1) for i1<{columns} = sum[i1]({wide})
  %centred: {dtype}[{rows}, {columns}]({columns}, 1) = {narrow.replace("%s", f"sub({wide}, %total[i0])")}
  return %centred
}}"""


def test_short_rows_that_begin_anywhere():
    """Rows are read in whole words from 256 elements of 16 bits on where they are written, too, from 512 of 32 bits, and about 512 where many
    are only summed; shorter ones that are needed again in small tiles."""
    in_words = lambda text: scheduled(text)[1].shift is not None
    assert [in_words(centred(262144, n, "f16")) for n in (129, 257)] == [False, True]
    assert [in_words(centred(262144, n)) for n in (257, 513)] == [False, True]
    assert [in_words(total(262144, n)) for n in (257, 513, 2049)] == [False, True, True]
    lanes = [math.prod(sum(p) for _, p in scheduled(centred(1 << 20, n))[1].pieces) for n in (65, 64)]
    assert lanes[0] <= 2 * tile_blocks.RAGGED < lanes[1]


@pytest.mark.parametrize("dtype, monoid, stages", [("f16", "expsum", 1), ("f32", "expsum", tile_threads.PASSING_STAGES), ("f32", "sum", 1)])
def test_tiles_under_way_where_rows_are_only_folded(dtype, monoid, stages):
    text = total(8192, 1 << 16, dtype)
    if monoid == "expsum":
        text = text.replace("sum[i1](", "expsum[i1](").replace("i1])\n", "i1], 1:f32)\n").replace("i1]))\n", "i1]), 1:f32)\n")
    assert scheduled(text)[1].stages == stages > 0


@pytest.mark.parametrize("columns, each", [(65529, 32), (65537, 32)])
def test_columns_whose_rows_begin_anywhere_are_held(columns, each):
    schedule = scheduled(f"""graph total {{
  input %x: f16[128, {columns}]({columns}, 1)
  %total: f32[{columns}](1) for i1<128 = sum[i1](f32(%x[i1, i0]))
  return %total
}}""")[1]
    assert math.prod(sum(p) for _, p in schedule.pieces) == each * 32 * schedule.warps and not schedule.looped


@pytest.mark.parametrize("elements, tile", [(1 << 12, 256), (1 << 16, 256), (1 << 24, 1024)])
def test_pointwise_tiles_are_small_where_there_are_few(elements, tile):
    schedule = scheduled(f"""graph twice {{
  input %x: f32[{elements}](1)
  %y: f32[{elements}](1) = mul(%x[i0], 2:f32)
  return %y
}}""")[1]
    assert schedule.pieces[0][1] == (tile,)


@pytest.mark.parametrize("dim", [0, 1])
def test_long_logarithms_of_prefixes_lose_no_digits(dim):
    """f64 carries them: 20000 roundings would be 1e-5. Infinities and NaN go where eager has them."""
    x = torch.randn((20000, 7) if dim == 0 else (7, 20000), generator=torch.Generator().manual_seed(0)) * 3
    y = x.clone().movedim(dim, -1)
    y[0, :50], y[1, 70], y[2, 90], y[3, 100:], y[4, 3], y[4, 9] = float("-inf"), float("inf"), float("nan"), -200.0, float("inf"), float("-inf")
    y[5], y[6, :40], y[6, 40:] = float("-inf"), -500.0, 80.0
    torch._dynamo.reset()
    ours = tokamak.compile(lambda x: x.logcumsumexp(dim), strict=True)
    torch.testing.assert_close(ours(x).double(), x.double().logcumsumexp(dim), rtol=4e-7, atol=4e-7)
    special = y.movedim(-1, dim).contiguous()
    torch.testing.assert_close(ours(special).double(), special.double().logcumsumexp(dim), rtol=4e-7, atol=4e-7, equal_nan=True)


@pytest.mark.parametrize("columns", [112, 144, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_equal_pieces_are_right(columns, dtype):
    """Several to a tile, the last piece masked where there are 112 or 144, with weights beside them."""
    x, w, b = (torch.randn(s).to(dtype) for s in ((37, columns), (columns,), (columns,)))
    x[3, columns - 1] = float("inf")
    fn = lambda x, w, b: (torch.nn.functional.layer_norm(x, x.shape[-1:], w, b), torch.softmax(x, -1), x.amax(-1), x.float().sum(-1))
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for got, want in zip(tokamak.compile(fn, target="interpret", strict=True)(x, w, b), fn(*(t.double() for t in (x, w, b)))):
        torch.testing.assert_close(got.double(), want.double(), rtol=limit, atol=limit, equal_nan=True)


@pytest.mark.parametrize("rows", [80, 96])
def test_rows_along_the_middle_in_equal_pieces_are_right(rows):
    x = torch.randn(3, rows, 72)
    fn = lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(tokamak.compile(fn, target="interpret", strict=True)(x), fn(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("columns", [72, 100])
def test_rows_in_one_piece_with_column_sums_beside_are_right(columns):
    given = [torch.randn(s).requires_grad_() for s in ((700, columns), (columns,), (columns,))]
    weight = torch.randn(700, columns)
    fn = lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)
    got = torch.autograd.grad(tokamak.compile(fn, target="interpret", strict=True)(*given), given, weight)
    for a, b in zip(got, torch.autograd.grad(fn(*given), given, weight)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def near_gradients(fn, inputs, tolerance: float) -> list[str]:
    """The schedules of a training step of `fn` in tiles, whose gradients are no further off those in float64, by norm."""
    dy = torch.randn_like(inputs[0])
    with recording() as recorder:
        got = torch.autograd.grad(ours(fn)(*inputs), inputs, dy)
    doubles = [v.detach().double().requires_grad_() for v in inputs]
    for g, e in zip(got, torch.autograd.grad(fn(*doubles), doubles, dy.double())):
        assert float((g.double() - e).norm() / e.norm()) <= tolerance
    return [str(s) for g in recorder.graphs for _, s in g.values["lower"].bodies.values()]


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("rows, columns, dtype", [
    (2001, 50, torch.bfloat16), (1043, 77, torch.float16), (1033, 150, torch.float32), (1065, 192, torch.bfloat16)])
def test_gradients_of_many_short_rows(monkeypatch, norm, rows, columns, dtype):
    """In equal pieces, the last of which has idle lanes, of several rows to a tile, the last of which has fewer."""
    monkeypatch.setattr(tile_alike, "CARRY_FROM", 0)
    inputs = [torch.randn(rows, columns).to(dtype).requires_grad_(), torch.rand(columns).add(0.5).to(dtype).requires_grad_()]
    found = near_gradients(lambda x, w: getattr(F, norm)(x, x.shape[-1:], w), inputs, 1e-5 if dtype is torch.float32 else 5e-3)
    assert any(f"i0:8?, i1:{'+'.join(['32'] * -(-columns // 32))}" in s for s in found)


@pytest.mark.parametrize("shape, dtype, pieces, columns, warps", [
    ((40, 39, 135), torch.bfloat16, "8+8+8+8+8?", "32?", 4), ((41, 37, 77), torch.float32, "8+8+8+8+8?", "32?", 4),
    ((40, 60, 131), torch.float16, "64?", "8?", 1), ((300, 6, 136), torch.bfloat16, "8?", "64?", 1), ((5, 130, 64), torch.float32, "128+2", "32", 4),
    ((150, 20, 77), torch.float16, "16+4", "32?", 2), ((20, 290, 40), torch.bfloat16, "256+64?", "16?", 4),
    ((20, 1020, 24), torch.bfloat16, "512+512?", "16?", 16)])
def test_gradients_of_norms_along_a_short_middle_axis(shape, dtype, pieces, columns, warps):
    """Beside columns that begin anywhere: rows in equal pieces, or in one, held."""
    fn = lambda x, w: x * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6).to(x.dtype) * w[:, None]
    inputs = [torch.randn(*shape).to(dtype).requires_grad_(), torch.rand(shape[1]).add(0.5).to(dtype).requires_grad_()]
    found = near_gradients(fn, inputs, 1e-5 if dtype is torch.float32 else 1e-2)
    assert any(f"i1:{pieces}, i2:{columns})" in s and f"together(i2) warps({warps})" in s for s in found), found


@pytest.mark.parametrize("shape, dtype", [((20, 1100, 24), torch.bfloat16), ((9, 401, 37), torch.float16), ((3, 1205, 33), torch.float32)])
def test_gradients_of_norms_along_a_longer_middle_axis(shape, dtype):
    """No program holds columns beside sums along them: those are a kernel's of its own."""
    fn = lambda x, w: x * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6).to(x.dtype) * w[:, None]
    inputs = [torch.randn(*shape).to(dtype).requires_grad_(), torch.rand(shape[1]).add(0.5).to(dtype).requires_grad_()]
    found = near_gradients(fn, inputs, 1e-5 if dtype is torch.float32 else 1e-2)
    assert not any("together" in s for s in found), found


@pytest.mark.parametrize("target", ["interpret", ""])
@pytest.mark.parametrize("rows, columns", [(3, 5000), (2, 4099), (1, 70000), (71, 300)])
def test_gradients_of_cross_entropy_over_few_rows(rows, columns, target):
    """What the gradient of the one element of a row that was looked up sums to is known without a sum; a row without one has none. One kernel."""
    x, y = torch.randn(rows, columns, requires_grad=True), torch.randint(columns, (rows,))
    y[:rows - 1:2] = -100
    with recording() as recorder:
        got, = torch.autograd.grad(tokamak.compile(F.cross_entropy, target=target, strict=True)(x, y), [x])
    exact = x.detach().double().requires_grad_()
    torch.testing.assert_close(got.double(), *torch.autograd.grad(F.cross_entropy(exact, y), [exact]), rtol=1e-5, atol=1e-8)
    backward, = [g for g in recorder.graphs if g.kind == "backward"]
    assert target != "interpret" or len(backward.values["lower"].bodies) == 1


@pytest.mark.parametrize("shape, dtype", [((2, 150, 877), torch.bfloat16), ((3, 131, 1070), torch.float16), ((2, 65, 1067), torch.float32)])
def test_prefixes_down_columns_that_begin_anywhere(monkeypatch, shape, dtype):
    """In tiles of as many columns as rows, of which the last have idle lanes."""
    monkeypatch.setattr(tile_facts, "SCANNING", 1 << 20)
    x, fn = torch.randn(*shape).to(dtype), lambda x: x.float().cumsum(1)
    torch.testing.assert_close(ours(fn)(x).double(), x.double().cumsum(1), rtol=1e-5, atol=1e-4)
    made, = schedules(fn, x)
    assert f"i1:64?, i2:64?) looped(i1) warps({2 if shape[2] % 2 and dtype.itemsize == 2 else 1})" in made
