"""Compiled code on a GPU, against eager there; skipped where there is none. Everything that runs on one:

    TOKAMAK_TEST_INTERPRETED= python -m pytest -n 8 tests/compiled tests/runtime/test_gpu_device.py tests/codegen/test_triton_device.py -k "gpu or
    cuda or device"
"""
from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.harness import Seen, agree, cache, compiled
from tests.compiled.op_cases import cases, examine
from tests.models.steps import compare, eager, exact, train
from tests.threads import in_threads
from tests.models.test_models import UNIT
from tests.models.zoo import CONVOLUTIONS, SMALL, STEPS
from tokamak.codegen import ways
from tokamak.codegen.stages import render_plan
from tokamak.schedule.neighbours import changed, feasible
from tokamak.tools.record import recording
from tokamak.tools.trial import Bench
from tokamak.tools.tune import right, tasks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def kernel(fn, **options):
    return tokamak.compile(fn, **({"strict": True, "cache_dir": cache()} | options))


def values(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(grad)


# -- operators and models ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", cases(most=2, part=0.12, seed=3, target="cuda"), ids=lambda c: f"{c.name}-{c.dtype}")
def test_operator(case):
    found = examine(case)
    assert not found.failed
    if found.skipped:
        pytest.skip(found.skipped)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("autocast", [False, True], ids=["f32", "bf16"])
def test_training_step(name, autocast):
    """True f32: convolutions in TF32 put gradients of a ReLU on either side of its edge (ResNet-50: eager itself 9e-2 from float64, 3e-6 without)."""
    step = STEPS[name]
    model, inputs = step.build(SMALL), step.inputs(SMALL)
    how = {"autocast": autocast, "device": "cuda", "channels_last": name in CONVOLUTIONS}
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        report = compare(train(model, inputs, compiled=True, strict=True, cache_dir=cache(), **how), eager(model, inputs, UNIT[autocast], **how),
                         exact(model, inputs), UNIT[autocast])
    assert not report.wrong, "\n".join(report.wrong)


def test_without_gradients():
    model = torch.nn.Sequential(torch.nn.Linear(70, 130), torch.nn.GELU(), torch.nn.LayerNorm(130)).cuda()
    x = values(33, 70)
    with torch.no_grad():
        torch.testing.assert_close(kernel(copy.deepcopy(model))(x), model(x), rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(kernel(copy.deepcopy(model))(x), model(x), rtol=1e-4, atol=1e-5)


# -- how calls are made --------------------------------------------------------------------------------------------------------
def fold(x, w):
    return torch.softmax(x * w, -1), x.sum(0), (x + 1).relu()


def alike(got, want):
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_the_current_stream():
    run, x, w = kernel(fold), torch.zeros(512, 1025, device="cuda"), values(1025)
    run(x, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)           # what reads x without waiting for this stream reads zeros
        x.normal_()
        got = run(x, w)
    side.synchronize()
    alike(got, fold(x, w))


def test_threads_with_streams_of_their_own():
    run, w, wrong = kernel(fold, strict=False), values(300), []
    run(values(200, 300), w)
    torch.cuda.synchronize()

    def work(seed: int):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.full((200, 300), float(seed), device="cuda") * torch.arange(300, device="cuda") / 300
            for _ in range(20):
                for g, e in zip(run(x, w), fold(x, w)):
                    if not torch.allclose(g, e, rtol=1e-4, atol=1e-4):
                        wrong.append(seed)
    in_threads(work, [(i,) for i in range(6)])
    assert not wrong


@pytest.mark.parametrize("strict", [True, False])
def test_captured_in_a_graph(strict):
    run, x, w = kernel(fold, strict=strict), values(300, 1025), values(1025)
    run(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x, w)
    for _ in range(3):
        x.normal_()
        graph.replay()
        alike(got, fold(x, w))


def test_two_shapes_share_kernels():
    """Another number of rows of the same length is the same kernel."""
    fn = lambda x, w: torch.softmax(x * w, -1)
    w, names = values(1024), []
    for rows in (8192, 16384):
        torch._dynamo.reset()
        x = values(rows, 1024)
        with recording(strict=True, cache_dir=cache()) as seen:
            torch.testing.assert_close(tokamak.compile(fn, dynamic=False)(x, w), fn(x, w), rtol=1e-4, atol=1e-5)
        graph, = seen.graphs
        names.append([p.unit.name for b in render_plan(graph.values["lower"]).values() for p in b.parts])
    assert names[0] == names[1] and len(names[0]) == 1


@pytest.mark.parametrize("columns", [40000, 34185])
@pytest.mark.parametrize("backward", [False, True])
def test_rows_held_in_stages_in_every_other_way(columns, backward):
    """By more and fewer programs and threads, in other pieces, run through: the same values as the heuristic's schedule."""
    fn = lambda x, w: F.layer_norm(x * w, (columns,), w)
    x, w = values(300, columns, dtype=torch.bfloat16, grad=backward), values(columns, dtype=torch.bfloat16, grad=backward)
    with recording(strict=True, cache_dir=cache(), tuned=False) as seen:
        out = tokamak.compile(fn, dynamic=False)(x, w)
        if backward:
            out.backward(torch.randn_like(out))
    held = [t for t in tasks(seen.graphs) if t.schedule.staged is not None]
    assert held
    for task in held:
        found = {changed(task.body, task.schedule, way, task.hints) for way in ways.held_in_stages(task.schedule)} - {None}
        bench = Bench(task, "")
        built = bench.build([task.schedule, *(s for s in found if feasible(task.body, s))])
        want = bench.results(built.pop(task.schedule))
        wrong = [str(s) for s, trial in built.items() if not right(bench, trial, want)]
        assert len(built) > 4 and not wrong


def test_unknown_sizes():
    run = kernel(fold, dynamic=True)
    for rows, columns in ((4, 33), (7, 1025), (3, 64), (1000, 40), (64, 20000)):
        x, w = values(rows, columns), values(columns)
        alike(run(x, w), fold(x, w))
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(fold.__code__)) == 1


# -- errors ----------------------------------------------------------------------------------------------------------------------
def test_an_index_out_of_range_is_told_at_the_next_call():
    run = kernel(lambda w, i: F.embedding(i, w) * 2, strict=False)
    w, good, bad = values(9, 4), torch.tensor([0, 8], device="cuda"), torch.tensor([0, 9], device="cuda")
    run(w, good)
    run(w, bad)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="test_gpu.py"):
        run(w, good)
    torch.testing.assert_close(run(w, good), w[good] * 2)
    torch.cuda.synchronize()
    torch.testing.assert_close(run(w, good), w[good] * 2)


def test_into_nothing():
    with pytest.raises(IndexError):
        kernel(lambda x, i: x[i] * 2)(values(0, 4), torch.tensor([0, 0], device="cuda"))
    assert values(3).sum().isfinite()           # the device lives


# -- memory ----------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [1, 3, 7, 8])
def test_views_that_are_not_aligned(dtype, offset):
    base = (torch.randn(70000) * 5).to(dtype)
    x = base[offset:offset + 64 * 1024].view(64, 1024)
    agree(lambda x: (x * 2, x.sum(0), x.amax(1), x.t().contiguous()), [x], target="cuda")
    rows = base.as_strided((30, 1024), (1025, 1), offset)
    agree(lambda x: (x + x, x.sum(1), x.float().softmax(1)), [rows], target="cuda")


def test_one_function_for_aligned_and_not():
    run, base = compiled(lambda x: x * 2 + 1, Seen(), target="cuda"), values(9000)
    for start in (0, 1, 4, 3, 0, 2):
        x = base[start:start + 8192]
        torch.testing.assert_close(run(x), x * 2 + 1)


@pytest.mark.parametrize("dtype, extra", [(torch.int8, 37), (torch.bfloat16, 1)], ids=str)
def test_more_elements_than_31_bits_count(dtype, extra):
    if torch.cuda.mem_get_info()[0] < 30 * GIB:
        pytest.skip("not enough memory")
    size = 2**31 + extra
    x = torch.zeros(size, dtype=dtype, device="cuda")
    x[-1], x[2**31 - 3], x[17] = 5, -2, 3
    run = compiled(lambda x: (x.amax(), x.amin(), x.argmax(), x[-40:] * 2, (x != 0).sum()), Seen(), target="cuda")
    top, low, where, end, count = run(x)
    assert (top.item(), low.item(), where.item(), count.item()) == (5, -2, size - 1, 3) and end[-1].item() == 10
    y = compiled(lambda x: x + 1, Seen(), target="cuda")(x)
    assert (y[-1].item(), y[2**31 - 3].item(), y[17].item(), y[2**31 - 4].item()) == (6, -1, 4, 1)
    assert bool((y[-10**6:] == x[-10**6:] + 1).all())


def test_more_elements_than_31_bits_count_in_rows():
    if torch.cuda.mem_get_info()[0] < 30 * GIB:
        pytest.skip("not enough memory")
    x = torch.ones(2**20 + 3, 2050, dtype=torch.bfloat16, device="cuda")
    x[-1, -1], x[-2, 0] = 7, -5
    total, top, column = compiled(lambda x: (x.sum(1, dtype=torch.float32), x.amax(0), (x.float() * 2).sum(0)), Seen(), target="cuda")(x)
    assert total[-1].item() == 2056 and total[-2].item() == 2044 and total[:-2].eq(2050).all()
    assert top[-1].item() == 7 and top[:-1].eq(1).all() and column[0].item() == 2 * (2**20 - 3) and column[-1].item() == 2 * (2**20 + 9)


# -- the same twice ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["fast", "strict"])
def test_the_same_twice(policy):
    """Folds take their terms in one order whenever they run; updates of floats do where `strict` asks for it."""
    def fn(x, w, b):
        y = F.layer_norm(x, (x.shape[-1],), w, b)
        return y, y.sum(), y.sum(0), torch.softmax(y, -1).var()
    def steps():
        args = [t.detach().requires_grad_() for t in given]
        outs = run(*args)
        return [*outs, *torch.autograd.grad(sum(o.sum() for o in outs), args)]
    given, run = [values(5000, 257), values(257), values(257)], kernel(fn, policy=policy)
    for a, b in zip(steps(), steps(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [131072, 70001])
@pytest.mark.parametrize("between", [F.relu, torch.tanh])
def test_gradients_of_narrow_layers(rows, between):
    """Of 128 to 256 to 128, whose backward two programs share."""
    shapes = (rows, 128), (256, 128), (256,), (128, 256), (128,)
    inputs = [values(*s, dtype=torch.bfloat16).div(8 if n else 1).requires_grad_() for n, s in enumerate(shapes)]
    given, fn = values(rows, 128, dtype=torch.bfloat16), lambda x, w, b, v, c: F.linear(between(F.linear(x, w, b)), v, c)
    wide = [i.detach().double().requires_grad_() for i in inputs]
    exact, plain, got = (torch.autograd.grad(f(*x), x, given.to(x[0].dtype)) for f, x in ((fn, wide), (fn, inputs), (kernel(fn), inputs)))
    off = lambda a, b: float((a.double() - b).norm() / b.norm())
    for g, p, w in zip(got, plain, exact, strict=True):
        assert off(g, w) <= max(1.5 * off(p, w), 5e-3)


def test_gradients_of_narrow_layers_with_a_residual():
    """No row is left out of the sums: with ones as gradients each is the number of rows."""
    rows, shapes = 100003, ((100003, 64), (128, 64), (128,), (64, 128), (64,))
    inputs = [values(*s, dtype=torch.bfloat16).div(8 if n else 1).requires_grad_() for n, s in enumerate(shapes)]
    fn = kernel(lambda x, w, b, v, c: x + F.linear(F.silu(F.linear(x, w, b)), v, c))
    found, = torch.autograd.grad(fn(*inputs).sum(), inputs[4:])
    assert (found.double() - rows).abs().max() <= 2 ** -8 * rows


@pytest.mark.parametrize("length", [255, 3000, 20001])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("fn", [lambda x, w: F.layer_norm(x, (x.shape[-1],), w), lambda x, w: (x * w).sum(-1),
                                lambda x, w: torch.log_softmax(x, -1) * w, lambda x, w: (x * w).cumsum(-1)],
                         ids=["norm", "sum", "softmax", "prefixes"])
def test_rows_do_not_depend_on_how_many_there_are(fn, turned, length):
    """Under `strict`, and neither on how long a kernel takes by its machine code."""
    run, w = kernel(fn, policy="strict", dynamic=False), values(length)
    x, found = values(4099, length), []
    for rows in (5, 64, 1001, 4096, 4099):
        torch._dynamo.reset()
        some = x[:rows].t().contiguous().t() if turned else x[:rows]
        found.append(run(some, w)[:5])
        assert torch.equal(found[0], found[-1]), rows


def test_updates_the_same_twice():
    run = kernel(lambda x, i, v: x.index_add(0, i, v), policy="strict")
    x, i, v = values(50, 70), torch.randint(0, 50, (5000,), device="cuda"), values(5000, 70)
    assert torch.equal(run(x, i, v), run(x, i, v))
    torch.testing.assert_close(run(x, i, v), x.double().index_add(0, i, v.double()).float(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("how", ["sum", "prod", "amax", "amin", "mean"])
def test_updates_that_meet(dtype, how):
    """Thousands of updates of few elements."""
    if dtype is torch.bool and how == "mean":
        pytest.skip("torch has none")
    small = (torch.rand(3000, 5) * 0.2 + 0.9) if how == "prod" and dtype.is_floating_point else torch.randn(3000, 5) * (2 if how == "prod" else 50)
    given = small.to(dtype)
    if dtype.is_floating_point and how in ("amax", "amin"):
        given[17, 3], given[40, 4] = float("nan"), float("-inf")
    at = torch.randint(0, 4, (3000, 1)).expand(3000, 5)
    into = torch.randn(4, 5).to(dtype)
    want = into.double().scatter_reduce(0, at, given.double(), how) if dtype.is_floating_point else into.scatter_reduce(0, at, given, how)
    got = compiled(lambda x, i, v: x.scatter_reduce(0, i, v, how), Seen(), target="cuda")(into.cuda(), at.cuda(), given.cuda()).cpu()
    loose = {torch.float16: 2e-3, torch.float32: 2e-4, torch.float64: 1e-9}.get(dtype, 0)
    torch.testing.assert_close(got.to(want.dtype), want, rtol=loose, atol=10 * loose, equal_nan=True)


@pytest.mark.parametrize("divisor", [3.0, -3.0, 0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38, -7e-20, 1e-38])
def test_any_divisor_that_many_share(divisor):
    x = torch.randn(4, 700, device="cuda") * 10.0 ** torch.randint(-30, 30, (4, 700), device="cuda")
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 0, float("inf"), float("nan"), -0.0
    by = torch.full((4,), divisor, device="cuda")
    got, want = kernel(lambda x, by: x / by[:, None])(x, by), x / by[:, None]
    usual = (want.abs() > 1e-30) & (x.abs() > 1e-30) | want.isnan() | (want == 0) & ((x == 0) | by[:, None].isinf())
    torch.testing.assert_close(got[usual], want[usual], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got, want, rtol=2e-7, atol=3e-45, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def test_a_zero_keeps_its_sign_where_many_share_a_divisor():
    x = torch.tensor([-0.0, 0.0], device="cuda").repeat(500)
    for by in (torch.tensor(3.0, device="cuda"), torch.tensor(-3.0, device="cuda")):
        for fn in (lambda x, by: x / 3, lambda x, by: x / -3, lambda x, by: x / by):
            assert torch.equal(kernel(fn)(x, by).signbit(), fn(x, by).signbit())
