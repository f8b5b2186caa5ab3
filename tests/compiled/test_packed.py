"""Projections that are read in parts alone, in Triton's interpreter, against float64: which become products apart that one kernel makes, and which
stay one call of the vendor's."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokamak.ir.graph import Opaque
from tokamak.schedule.matmul import MatmulSchedule
from tokamak.schedule.persistent import PersistentSchedule

from .linear import TOLERANCE, calls, error, run, schedules, values, wide
from .test_products import left, stages  # noqa: F401 (a fixture)


def halves(gate):
    def fn(x, w, b=None):
        a, c = F.linear(x, w, b).chunk(2, -1)
        return gate(a) * c
    return fn


def every_second(x, w, b=None):
    made = F.linear(x, w, b)
    return F.silu(made[..., ::2]) * made[..., 1::2]


@pytest.mark.parametrize("fn, dtype, rows, inner, columns", [
    (halves(F.gelu), torch.bfloat16, (140,), 72, 152), (halves(F.silu), torch.float16, (70,), 64, 136),
    (every_second, torch.bfloat16, (140,), 72, 152), (halves(F.gelu), torch.float16, (3, 70), 72, 150),
    (every_second, torch.float16, (3, 70), 64, 134)])
def test_both_parts_are_one_product_of_one_kernel(fn, dtype, rows, inner, columns):
    inputs = [values(*s, dtype=dtype) for s in ((*rows, inner), (2 * columns, inner), (2 * columns,))]
    got, (record,) = run(fn, *inputs)
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[dtype] and not calls(record)
    made, = schedules(record)
    assert isinstance(made, PersistentSchedule) and made.paired


def test_in_tf32():
    torch.set_float32_matmul_precision("high")
    try:
        inputs = [values(*s, dtype=torch.float32) for s in ((2, 70, 72), (304, 72))]
        got, (record,) = run(halves(F.silu), *inputs)
        made, = schedules(record)
        assert error(got, halves(F.silu)(*map(wide, inputs))) <= 1e-3 and made.paired
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("fn", [halves(F.gelu), every_second], ids=["halves", "every second"])
def test_few_rows(fn, rows):
    inputs = [values(*s) for s in ((rows, 72), (2 * 56, 72), (2 * 56,))]
    got, (record,) = run(fn, *inputs)
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16] and not calls(record)
    assert rows == 1 or isinstance(schedules(record)[0], MatmulSchedule)


def test_weights_along_the_columns_and_rows_in_parts():
    fn = lambda x, w: (lambda a, b: F.silu(a) * b)(*(x @ w).chunk(2, -1))
    inputs = [values(140, 72), values(72, 304)]
    assert error(persistent_result(fn, *inputs), fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]
    fn = lambda x, w: (lambda a, b: F.silu(a) * b)(*F.linear(x, w).chunk(2, 0))
    inputs = [values(280, 72), values(152, 72)]
    assert error(persistent_result(fn, *inputs), fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]


def persistent_result(fn, *inputs):
    """What `fn` gives, of which one kernel by programs that stay makes all."""
    got, (record,) = run(fn, *inputs)
    made, = schedules(record)
    assert isinstance(made, PersistentSchedule)
    return got


WHOLE = {           # what reads a projection otherwise than in parts that do not overlap
    "all of it": lambda x, w: (lambda y: F.silu(y[:, :152]) * y[:, 152:] + y.sum(1, keepdim=True))(F.linear(x, w)),
    "parts that overlap": lambda x, w: (lambda y: F.silu(y[:, :152]) * y[:, 100:252])(F.linear(x, w)),
    "a result": lambda x, w: (lambda y: (F.silu(y[:, :152]) * y[:, 152:], y))(F.linear(x, w)),
    "each with itself turned round": lambda x, w: (lambda y: y[:, :152] * y[:, 152:].flip(1))(F.linear(x, w)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_read_otherwise_stays_whole(name):
    fn, inputs = WHOLE[name], [values(140, 72), values(304, 72)]
    got, (record,) = run(fn, *inputs)
    first = lambda made: made[0] if isinstance(made, tuple) else made
    assert error(first(got), first(fn(*map(wide, inputs)))) <= TOLERANCE[torch.bfloat16]
    assert not any(getattr(s, "paired", False) for s in schedules(record))


def test_gradients():
    """What a training step keeps of the projection lies as it did, so that it stays whole."""
    inputs = [values(140, 72).requires_grad_(), values(304, 72).requires_grad_(), values(304).requires_grad_()]
    others = [wide(x) for x in inputs]
    got, want = run(halves(F.gelu), *inputs)[0], halves(F.gelu)(*others)
    weight = values(*got.shape)
    (got * weight).sum().backward()
    (want * weight.double()).sum().backward()
    assert error(got, want) <= 8e-3 and all(error(x.grad, y.grad) <= 1e-2 for x, y in zip(inputs, others))


# -- by price --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows, inner, columns", [((4096,), 4096, 14336), ((8, 1024), 1024, 4096), ((16,), 4096, 14336)])
def test_a_packed_gate_is_a_kernel_where_one_apart_is(stages, rows, inner, columns):  # noqa: F811
    packed, = stages(halves(F.silu), (*rows, inner), (2 * columns, inner))
    apart, = stages(lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), (*rows, inner), (columns, inner), (columns, inner))
    assert not left(packed) and not left(apart)


def test_a_packed_gate_that_is_better_left_is_one_call(stages):  # noqa: F811
    """Few tiles of a long depth, which the vendor shares out."""
    seen, = stages(halves(F.silu), (512, 14336), (2048, 14336))
    call, = (n for n in seen["contract"].nodes if isinstance(n, Opaque))
    assert call.reason.startswith("contraction 512x14336x2048")
