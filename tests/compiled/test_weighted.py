"""Weighted means (`fuse.weighted`): attention as it is written in plain PyTorch becomes one kernel, in Triton's interpreter against float64; and what
must not."""
from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.linear import TOLERANCE, calls, error, run, schedules, values, wide
from tokamak.backend import ACTIVATED, ADDED, ALONE, ATTENDED
from tokamak.capture.aten_matmul import attended
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.fuse.contract import contract
from tokamak.fuse.inline import inline
from tokamak.fuse.plan import plan
from tokamak.fuse.weighted import weighted
from tokamak.ir.graph import Compute, Opaque, fold
from tokamak.runtime.gpu_worker import compile_job
from tokamak.schedule.matmul import MatmulSchedule
from tokamak.target import Target
from tokamak.tools.record import recording

pytest.importorskip("triton")
INF = float("inf")
LARGE = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8, fast=True)


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def operands(batch=2, heads=3, rows=70, columns=53, depth=48, width=40, dtype=torch.float16):
    return tuple(values(batch, heads, n, d, dtype=dtype) for n, d in ((rows, depth), (columns, depth), (columns, width)))


def one_kernel(fn, *inputs, opaque=0, kernels=1, **options):
    """`fn` by one kernel of a weighted mean, and `opaque` calls; its result."""
    got, (record, *_) = run(fn, *inputs, **options)
    made = [s for s in schedules(record) if isinstance(s, MatmulSchedule) and s.inner is not None]
    assert len(made) == 1 and len(schedules(record)) == kernels and len(calls(record)) == opaque
    return got


def by_hand(x):
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def causal(x):
    i, j = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])
    return x.masked_fill(j > i, -INF)


FORMS = {
    "scaled": lambda q, k, v: torch.softmax(scores(q, k), -1) @ v,
    "plain": lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
    "the scale in front": lambda q, k, v: torch.softmax((q * 0.125) @ k.mT, -1) @ v,
    "softmax by hand": lambda q, k, v: by_hand(scores(q, k)) @ v,
    "in float32": lambda q, k, v: torch.softmax(scores(q, k), -1, dtype=torch.float32).to(q.dtype) @ v,
    "causal": lambda q, k, v: torch.softmax(causal(scores(q, k)), -1) @ v,
    "capped": lambda q, k, v: torch.softmax(5 * torch.tanh(scores(q, k) / 5), -1) @ v,
    "by einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1), v),
    "something behind": lambda q, k, v: F.gelu(torch.softmax(scores(q, k), -1) @ v) * 2,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, dtype):
    torch.manual_seed(0)
    inputs = operands(dtype=dtype)
    got = one_kernel(FORMS[name], *inputs, kernels=2 if name == "the scale in front" else 1)
    want = FORMS[name](*map(wide, inputs))
    assert error(got, want) <= max(TOLERANCE[dtype], 1.2 * error(FORMS[name](*inputs), want))


@pytest.mark.parametrize("rows, columns, depth, width",
                         [(16, 16, 16, 16), (17, 129, 64, 64), (300, 200, 128, 128), (64, 1, 32, 32), (130, 64, 99, 24)])
def test_extents(rows, columns, depth, width):
    torch.manual_seed(rows)
    inputs = operands(1, 2, rows, columns, depth, width)
    fn = FORMS["scaled"]
    got = one_kernel(fn, *inputs) if columns > 1 else run(fn, *inputs)[0]
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.float16]


def test_masks_biases_and_strides():
    """A bias of each head, a mask of each batch with rows that lose whole steps, heads side by side in memory, two heads to a key."""
    torch.manual_seed(1)
    q, k, v = (values(2, n, h, 64).transpose(1, 2) for n, h in ((90, 4), (150, 2), (150, 2)))
    bias, keep = values(4, 90, 150), torch.rand(2, 1, 90, 150) < 0.5
    keep[:, :, :, :70] = False
    keep[..., -1] = True

    def fn(q, k, v, bias, keep):
        k, v = (x[:, :, None].expand(2, 2, 2, 150, 64).reshape(2, 4, 150, 64) for x in (k, v))
        return torch.softmax((scores(q, k) + bias).masked_fill(~keep, -INF), -1) @ v
    got, records = run(fn, q, k, v, bias, keep)
    want = fn(*map(wide, (q, k, v, bias)), keep)
    assert not calls(records[0]) and error(got, want) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("contractions", ["kernels", ""])
def test_of_one_projection(contractions):
    """Queries, keys and values side by side in one matrix: an axis of columns is the depth of the scores and what the means have."""
    torch.manual_seed(7)
    x, w = values(2, 50, 64, dtype=torch.float16), values(64, 192, dtype=torch.float16) / 8

    def fn(x, w):
        q, k, v = ((x @ w)[..., 64 * n:64 * n + 64].unflatten(-1, (2, 32)).transpose(1, 2) for n in range(3))
        return torch.softmax(causal(scores(q, k)), -1) @ v
    _, (record, *_) = run(fn, x, w, contractions="vendor")
    graph = contract(weighted(record.values["simplify"], LARGE), LARGE, contractions, ACTIVATED, ADDED, ALONE, ATTENDED)
    lowered = lower_plan(schedule_plan(plan(inline(graph, LARGE), LARGE), LARGE), LARGE)
    assert sum(getattr(s, "inner", None) is not None for _, s in lowered.bodies.values()) == 1
    got, _ = run(fn, x, w)
    assert error(got, fn(wide(x), wide(w))) <= 2 * TOLERANCE[torch.float16]


def test_rows_without_numbers():
    """As eager: NaN where every score is -inf, where one is inf or NaN, and where a value is not finite."""
    torch.manual_seed(2)
    q, k, v = operands(1, 1, 32, 130)
    bias = torch.zeros(32, 130, dtype=torch.float16)
    bias[0], bias[1, 3], bias[2, 7], bias[3, :128] = -INF, INF, math.nan, -INF
    fn = lambda q, k, v, bias: torch.softmax(scores(q, k) + bias, -1) @ v
    got = one_kernel(fn, q, k, v, bias)
    want = fn(*map(wide, (q, k, v, bias)))
    torch.testing.assert_close(got.double(), want, rtol=5e-3, atol=5e-3, equal_nan=True)
    assert got[0, 0, :3].isnan().all() and got[0, 0, 3:].isfinite().all()
    v[0, 0, 5, 2] = INF
    got, want = one_kernel(fn, q, k, v, bias), fn(*map(wide, (q, k, v, bias)))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


def below_all(low: float, device: str = "cpu"):
    """Attention, and what it is given: rows that hold nothing but a low number, and some that end so or begin so."""
    torch.manual_seed(8)
    q, k, v = (x.to(device) for x in operands(2, 4, 70, 300))
    bias = torch.zeros(70, 300, device=device)
    bias[::3], bias[1, :200], bias[2, 100:] = low, low, low
    return (lambda q, k, v, bias: torch.softmax((q @ k.mT).float() + bias, -1).to(q.dtype) @ v), (q, k, v, bias)


LOW = [-1e4, -1e9, -1e12, -1e25, -1e35, torch.finfo(torch.float32).min]


@pytest.mark.parametrize("low", LOW)
def test_rows_of_low_numbers(low):
    """Equal ones have equal weights, as far as scores vanish beside them."""
    fn, inputs = below_all(low)
    assert error(one_kernel(fn, *inputs), fn(*map(wide, inputs[:3]), inputs[3])) <= TOLERANCE[torch.float16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("low", LOW)
def test_rows_of_low_numbers_on_the_gpu(low):
    fn, inputs = below_all(low, "cuda")
    torch._dynamo.reset()
    got = tokamak.compile(fn, strict=True, dynamic=False)(*inputs)
    want = fn(*map(wide, inputs[:3]), inputs[3])
    assert error(got, want) <= max(TOLERANCE[torch.float16], 1.5 * error(fn(*inputs), want))


def test_large_scores():
    """Scores that grow from step to step, so that what is carried is rescaled by factors that vanish."""
    q, k, v = torch.full((1, 1, 16, 16), 4.0), torch.linspace(-30, 30, 256)[:, None].expand(1, 1, 256, 16), torch.randn(1, 1, 256, 16)
    inputs = tuple(x.to(torch.float16) for x in (q, k, v))
    fn = lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v
    assert error(one_kernel(fn, *inputs), fn(*map(wide, inputs))) <= TOLERANCE[torch.float16]


APART = {
    "the weights are returned": lambda q, k, v: (p := torch.softmax(scores(q, k), -1), p @ v)[::-1],
    "the scores are returned": lambda q, k, v: (s := scores(q, k), torch.softmax(s, -1) @ v)[::-1],
    "along the other axis": lambda q, k, v: torch.softmax(scores(q, k), -2) @ v,
    "another maximum": lambda q, k, v: (torch.exp(s := scores(q, k) - 1) / torch.exp(s).sum(-1, keepdim=True)) @ v,
    "another sum": lambda q, k, v: (w := torch.exp((s := scores(q, k)) - s.amax(-1, keepdim=True)), (w / (w * w).sum(-1, keepdim=True)) @ v)[1],
    "scores as values": lambda q, k, v: torch.softmax(s := scores(q, k), -1) @ s.mT,
}


@pytest.mark.parametrize("name", APART)
def test_what_is_none(name):
    torch.manual_seed(3)
    inputs = operands(depth=32, width=32)
    got, (record, *_) = run(APART[name], *inputs)
    first = lambda x: x[0] if isinstance(x, tuple) else x
    assert "expmean" not in str(record.values["contract"].nodes[-1]) and not any(getattr(s, "inner", None) is not None for s in schedules(record))
    assert error(first(got), first(APART[name](*map(wide, inputs)))) <= 2 * TOLERANCE[torch.float16]


@pytest.mark.parametrize("options", [{"policy": "eager"}, {"policy": "strict"}, {"streaming": False}, {"contractions": "vendor"}], ids=str)
def test_left_as_written(options):
    inputs = operands()
    got, (record, *_) = run(FORMS["scaled"], *inputs, **options)
    assert not any(getattr(s, "inner", None) is not None for s in schedules(record))
    assert error(got, FORMS["scaled"](*map(wide, inputs))) <= TOLERANCE[torch.float16]


def test_any_length():
    """One kernel for every length of keys and of queries."""
    torch.manual_seed(4)
    fn = FORMS["causal"]
    for n, m in ((70, 53), (90, 200)):
        inputs = operands(rows=n, columns=m)
        for x, d in zip(inputs, (2, 2, 2)):
            torch._dynamo.mark_dynamic(x, d)
        got = one_kernel(fn, *inputs, dynamic=None)
        assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.float16]


def decided(fn, *inputs):
    """The graph of `fn` as a large GPU would have it behind the choice of contractions."""
    _, (record, *_) = run(fn, *inputs, target="", opaque_only=False)
    return contract(weighted(record.values["simplify"], LARGE), LARGE, "", ACTIVATED, ADDED, ALONE, ATTENDED)


def made_of(graph) -> tuple[list, list]:
    """(the calls, the folds) of a graph."""
    folds = [fold(n) for n in graph.nodes if isinstance(n, Compute)]
    return [n.target for n in graph.nodes if isinstance(n, Opaque)], [f.monoid for f in folds if f is not None]


def test_the_librarys_attention_where_it_is_faster():
    """By price: of many wide heads without more than a scale the library's; of narrow ones, or with a mask, or of few rows, a kernel."""
    wide_heads, narrow_heads = operands(8, 8, 512, 512, 128, 128), operands(8, 8, 256, 256, 32, 32)
    assert made_of(decided(FORMS["scaled"], *wide_heads)) == ([attended], [])
    assert made_of(decided(FORMS["scaled"], *narrow_heads)) == ([], ["sum", "expmean"])
    assert made_of(decided(FORMS["causal"], *wide_heads)) == ([], ["sum", "expmean"])
    assert "its own attention" in next(n for n in decided(FORMS["scaled"], *wide_heads).nodes if isinstance(n, Opaque)).reason
    assert made_of(decided(FORMS["scaled"], *operands(1, 2, 16, 8192, 64, 64))) == ([], ["sum", "expmean"])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("arch", [("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)], ids=str)
def test_kernels_become_machine_code(arch, width, tmp_path):
    """Without a GPU; on sm_90 by products of whole warpgroups, nothing of a thread's in memory of its own."""
    made = decided(FORMS["causal"], *operands(2, 4, 300, 200, width, width))
    target = replace(LARGE, arch=arch)
    lowered = lower_plan(schedule_plan(plan(made, target), target), target)
    (unit,) = (part.unit for built in render_plan(lowered).values() for part in built.parts)
    listing = compile_job({**asdict(unit), "arch": arch}, str(tmp_path))["listing"]
    assert unit.name in listing and ("wgmma" in listing) == (arch[1] == 90) and ".local" not in listing


def test_what_the_library_is_asked_for():
    torch.manual_seed(5)
    q, k, v = (x[0] for x in operands(1, 3, 40, 50, 32, 32, dtype=torch.bfloat16))
    got = attended(q, k.mT, v, 0.25)
    want = torch.softmax(wide(q) @ wide(k).mT * 0.25, -1) @ wide(v)
    assert got.is_contiguous() and got.shape == want.shape and error(got, want) <= TOLERANCE[torch.bfloat16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_on_the_gpu(name, dtype):
    torch.manual_seed(6)
    for sizes in ((2, 3, 70, 53, 48, 40), (4, 8, 300, 513, 64, 64), (2, 4, 257, 1000, 128, 128), (8, 16, 256, 256, 32, 32)):
        inputs = tuple(x.cuda() for x in operands(*sizes, dtype=dtype))
        torch._dynamo.reset()
        fn = FORMS[name] if name != "causal" else lambda q, k, v: torch.softmax(scores(q, k).masked_fill(
            torch.arange(k.shape[-2], device="cuda") > torch.arange(q.shape[-2], device="cuda")[:, None], -INF), -1) @ v
        with recording() as recorder:
            got = tokamak.compile(fn, strict=True, dynamic=False)(*inputs)
        left = calls(recorder.graphs[0])
        assert not any("bmm" in call for call in left) or sizes[0] == 2 and sizes[1] == 3, left
        assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[dtype]


# -- few queries, many keys ---------------------------------------------------------------------------------------------------------------------
def decoding(q, k, v, keep=None):
    """Attention of few queries to a cache; several heads share its keys, whose copies are written out."""
    heads = q.shape[1] // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, heads, -1, -1).flatten(1, 2) for x in (k, v)) if heads > 1 else (k, v)
    x = scores(q, k)
    return torch.softmax(x if keep is None else x.masked_fill(~keep, -INF), -1) @ v


def cache(rows, heads, kept, length, width, batch=2, dtype=torch.bfloat16):
    return tuple(values(batch, h, n, width, dtype=dtype) for h, n in ((heads, rows), (kept, length), (kept, length)))


CACHES = {"a row, four heads to a key": (1, 8, 2, 600, 64), "a row to a key": (1, 2, 2, 600, 64), "rows and heads": (3, 6, 2, 700, 48),
          "rows alone": (16, 2, 2, 520, 128), "no whole steps": (5, 4, 1, 601, 40)}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", CACHES)
def test_few_queries_share_the_keys_among_programs(name, masked):
    """All heads of a key in one tile; whole shares that a mask leaves out count for nothing, and a row of which it leaves nothing is NaN."""
    torch.manual_seed(3)
    rows, heads, kept, length, width = CACHES[name]
    q, k, v = cache(rows, heads, kept, length, width, 1)
    keep = torch.rand(1, 1, rows, length) < 0.5
    keep[..., :length // 2 + 64] = False
    keep[..., 0, -1] = True
    keep[..., 1:2, :] = False
    got, (record, *_) = run(decoding, q, k, v, *([keep] if masked else []))
    made = [s for s in schedules(record) if isinstance(s, MatmulSchedule)]
    assert len(made) == 1 and made[0].inner is not None and made[0].programs > 1 and made[0].once and not calls(record)
    assert made[0].sizes(made[0].dims[0])[0] >= rows * heads // kept
    want = decoding(*map(wide, (q, k, v)), *([keep] if masked else []))
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().any() == (masked and rows > 1)
    assert error(got.nan_to_num(), want.nan_to_num()) <= TOLERANCE[torch.bfloat16]


def test_few_queries_without_numbers():
    """As eager, whichever share they are in: scores that are inf or NaN, and values that are none; of -inf alone there is nothing left."""
    torch.manual_seed(4)
    q, k, v = cache(4, 1, 1, 600, 64, 1)
    bias = torch.zeros(4, 600, dtype=torch.bfloat16)
    bias[0], bias[1, 3], bias[2, 507], bias[3, :599] = -INF, INF, math.nan, -INF
    fn = lambda q, k, v, bias: torch.softmax(scores(q, k) + bias, -1) @ v
    got, want = run(fn, q, k, v, bias)[0], fn(*map(wide, (q, k, v, bias)))
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2, equal_nan=True)
    assert got[0, 0, :3].isnan().all() and got[0, 0, 3].isfinite().all()
    v[0, 0, 5, 2] = INF
    got, want = run(fn, q, k, v, bias)[0], fn(*map(wide, (q, k, v, bias)))
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


def test_heads_behind_positions_are_one_axis_of_rows():
    torch.manual_seed(5)
    q, k, v = cache(4, 8, 2, 600, 32)
    fn = lambda q, k, v: decoding(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)
    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    got, (record, *_) = run(fn, *given)
    assert [s.sizes(s.dims[0])[0] for s in schedules(record) if isinstance(s, MatmulSchedule)] == [16] and not calls(record)
    assert error(got, fn(*map(wide, given))) <= TOLERANCE[torch.bfloat16]


def by_price(*inputs, target=LARGE):
    """The reasons why calls of `decoding` are left to the vendor, and the schedules of its kernels that multiply."""
    made = decided(decoding, *inputs)
    lowered = lower_plan(schedule_plan(plan(made, target), target), target)
    reasons = [n.reason for n in made.nodes if isinstance(n, Opaque) and n.reason]
    return reasons, [s for _, s in lowered.bodies.values() if isinstance(s, MatmulSchedule)]


def test_few_queries_by_price():
    """A kernel wherever keys are many, with a program to a multiprocessor; few keys as they are written."""
    reasons, (made,) = by_price(*cache(1, 32, 8, 8192, 128, 1))
    assert not reasons and made.programs == 16 and (made.sizes(made.depth), made.stages) == ((64,), 4)
    reasons, (made,) = by_price(*cache(1, 32, 8, 1024, 64, 1))
    assert not reasons and made.programs == 8 and (made.sizes(made.depth), made.stages) == ((128,), 3)
    reasons, (made,) = by_price(*cache(1, 32, 8, 1024, 64, 1), torch.rand(1, 1, 1, 1024) < 0.5)
    assert not reasons and made.programs == 16 and (made.sizes(made.depth), made.stages) == ((64,), 3)
    reasons, (made,) = by_price(*cache(16, 32, 8, 8192, 64, 1))
    assert not reasons and made.programs == 16 and (made.sizes(made.depth), made.stages) == ((64,), 3)
    reasons, (made,) = by_price(*cache(1, 32, 8, 1024, 128, 16))
    assert not reasons and made.programs == 1
    reasons, made = by_price(*cache(1, 32, 8, 128, 128, 1))
    assert len(reasons) == 2 and not made


def test_kernels_of_few_queries_become_machine_code(tmp_path):
    """Copies that leave the cache first, nothing of a thread's in memory of its own."""
    arch = ("cuda", 90, 32)
    lowered = lower_plan(schedule_plan(plan(decided(decoding, *cache(1, 32, 8, 8192, 128, 1)), LARGE), LARGE), LARGE)
    units = [part.unit for built in render_plan(lowered).values() for part in built.parts]
    listings = [compile_job({**asdict(unit), "arch": arch}, str(tmp_path))["listing"] for unit in units]
    assert len(units) == 2 and "L2::cache_hint" in listings[0] and not any(".local" in x for x in listings)
