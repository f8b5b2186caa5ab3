"""Contractions of few rows of float32 where TF32 is allowed, in Triton's interpreter: extents, what stands in front and behind, several side by side,
against float64; what of them stays with the vendor's library."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak import backend
from tokamak.capture import aot
from tokamak.codegen.stages import parts
from tokamak.ir.graph import Opaque
from tokamak.runtime import gpu_build
from tokamak.schedule.beside import BesideSchedule
from tokamak.schedule.matmul import MatmulSchedule, VectorSchedule
from tokamak.schedule.persistent import PersistentSchedule
from tokamak.target import Target
from tokamak.trace import Stopped

from .test_contractions import calls, error, run, schedules, values, wide
from .test_persistent import kernels

ROUNDED = 1e-3          # an element of TF32 is off by up to 2**-11


@pytest.fixture(autouse=True)
def tf32():
    """TF32 is allowed."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def floats(*shape):
    return values(*shape, dtype=torch.float32)


def check(fn, *inputs, least=1e-6, **options):
    """The record of `fn`, all of whose products are kernels, and which gives what float64 gives but for factors that are rounded: by `least` at
    least, as no product of float32 would be."""
    got, (record,) = run(fn, *inputs, **options)
    want = fn(*map(wide, inputs))
    assert not calls(record) and all(isinstance(s, (MatmulSchedule, BesideSchedule)) for s in schedules(record))
    for mine, exact in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want))):
        assert mine.shape == exact.shape and mine.dtype is torch.float32 and least < error(mine, exact) < ROUNDED
    return record


@pytest.mark.parametrize("rows, inner, columns", [(2, 256, 128), (3, 250, 100), (16, 64, 33), (17, 520, 70), (33, 72, 200), (64, 130, 96),
                                                  (200, 72, 10),
                                                   (40, 200, 300)])
def test_extents(rows, inner, columns):
    record = check(lambda x, w, b: F.gelu(F.linear(x, w, b)), floats(rows, inner), floats(columns, inner), floats(columns))
    assert not any(isinstance(s, PersistentSchedule) for s in schedules(record))


BEHIND = {
    "relu": lambda x, w, b, r: F.relu(F.linear(x, w, b)),
    "residual": lambda x, w, b, r: F.linear(x, w) + r,
    "scale": lambda x, w, b, r: F.linear(x, w) * b,
    "transposed": lambda x, w, b, r: F.linear(x, w).t().contiguous(),
    "alpha and beta": lambda x, w, b, r: torch.addmm(r, x, w.t(), beta=0.5, alpha=2),
}


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("rows", [5, 40])
def test_what_stands_behind(name, rows):
    check(BEHIND[name], floats(rows, 72), floats(56, 72), floats(56), floats(rows, 56))


@pytest.mark.parametrize("rows", [2, 24, 64])
def test_a_gate(rows):
    check(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), floats(rows, 72), floats(56, 72), floats(56, 72))


@pytest.mark.parametrize("columns, depth", [(40, 3000), (1100, 96)])
def test_one_row_is_not_rounded(columns, depth):
    """Its products are made in float32, as eager's are."""
    record = check(lambda x, w, b: F.gelu(F.linear(x, w, b)), floats(1, depth), floats(columns, depth), floats(columns), least=-1.0)
    assert [type(s) for s in schedules(record)] == [VectorSchedule]
    got, _ = run(lambda x, w: F.linear(x, w), x := floats(1, depth), w := floats(columns, depth))
    assert error(got, F.linear(wide(x), wide(w))) < 1e-6


def test_one_column_is_not_rounded():
    got, (record,) = run(lambda x, w: F.linear(x, w).sigmoid(), x := floats(150, 96), w := floats(1, 96))
    assert error(got, F.linear(wide(x), wide(w)).sigmoid()) < 1e-6 and not calls(record)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_products_of_the_same_rows_are_one_launch(rows):
    fn = lambda x, q, k, v, b: (F.relu(F.linear(x, q, b)), F.linear(x, k) * 2, F.linear(x, v).t().contiguous())
    record = check(fn, floats(rows, 72), floats(70, 72), floats(40, 72), floats(48, 72), floats(70), least=-1.0)
    assert any(isinstance(s, BesideSchedule) for s in schedules(record))


def test_a_norm_in_front():
    fn = lambda x, g, w: F.linear(F.rms_norm(x, x.shape[-1:], g), w)
    got, (record,) = run(fn, *(inputs := (floats(6, 96), floats(96), floats(300, 96))))
    assert error(got, fn(*map(wide, inputs))) < ROUNDED and not calls(record)


def test_numbers_without_end_stay():
    """Infinities and what is no number reach the results that they reach in eager."""
    x, w = floats(4, 40), floats(24, 40)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    got, (record,) = run(lambda x, w: F.linear(x, w), x, w)
    want = F.linear(x, w)
    assert not calls(record) and torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert error(got[[0, 3]], F.linear(wide(x[[0, 3]]), wide(w))) < ROUNDED


@pytest.mark.parametrize("left, right", [((16, 72), (72, 152)), ((2, 16, 72), (2, 72, 152))], ids=["columns first", "batches"])
def test_what_stays_with_the_vendor(left, right):
    x, w = floats(*left), floats(*right) if len(left) == 2 else floats(2, 152, 72).mT
    got, (record,) = run(lambda x, w: x @ w, x, w)
    assert len(calls(record)) == 1 and error(got, wide(x) @ wide(w)) < 1e-5


def test_sums_that_are_no_calls_stay_float32():
    got, _ = run(lambda x, y: (x[:, None] * y[None]).sum(-1), x := floats(10, 24), y := floats(140, 24))
    assert error(got, (wide(x)[:, None] * wide(y)[None]).sum(-1)) < 1e-6


@pytest.mark.parametrize("rows, depth, step", [(5, 2100, 128), (5, 1000, 64), (40, 2100, 64)])
def test_longer_steps_where_tiles_fill_the_machine(rows, depth, step):
    """Of four multiprocessors."""
    made, = schedules(check(lambda x, w: F.relu(F.linear(x, w)), floats(rows, depth), floats(300, depth)))
    assert made.sizes(made.depth) == (step,)


@pytest.mark.parametrize("rows, kernels", [(4, 1), (16, 1), (64, 0)])
def test_weights_of_hundreds_of_megabytes(rows, kernels, monkeypatch):
    """By prices: 14336 to 11008 with a bias, 16 rows 157 us, 32 rows 165; the vendor's call 192 at 32."""
    monkeypatch.setattr(backend, "target", lambda *_, **__: Target("cpu", 16, 132, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32)))
    seen = []

    def stop(stage, value):
        if stage == "contract":
            seen.extend(n for n in value.nodes if isinstance(n, Opaque))
            raise Stopped
        return value

    def one(graph, inputs, kind):
        with pytest.raises(Stopped):
            backend.compile_graph(graph, inputs, tokamak.Options(target="interpret"), stop, kind)
        return aot.eager(graph)
    torch._dynamo.reset()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        inputs = [torch.empty(s) for s in ((rows, 14336), (11008, 14336), (11008,))]
        torch.compile(F.linear, backend=lambda gm, i: aot.autograd(gm, i, one), dynamic=False)(*inputs)
    assert len(seen) == 1 - kernels


@pytest.mark.parametrize("rows", [8, 64])
def test_factors_are_rounded_by_one_instruction(rows):
    """Both, and multiplied as TF32; built for the machine the kernels are measured on."""
    _, (record,) = run(lambda x, w: F.relu(F.linear(x, w)), floats(rows, 256), floats(512, 256))
    made, = kernels(record)
    unit = parts((made,))[0].unit
    built = gpu_build.build([unit], ("cuda", 90, 32))[unit.name]
    assert "cvt.rn.tf32.f32" in built.listing and "f32.tf32.tf32" in built.listing and built.spilled == 0
