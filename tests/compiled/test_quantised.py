"""Products with weights of few bits as kernels, in Triton's interpreter: packed, and scaled by columns or groups of the depth."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.compiled.linear import calls, error, run, schedules, values, wide
from tokamak.fuse.cost import Hints
from tokamak.schedule import matmul
from tokamak.schedule.matmul import MatmulSchedule
from tokamak.target import target

pytest.importorskip("triton")


def quantised(rows, inner, columns):
    return values(rows, inner), torch.randint(-128, 128, (columns, inner), dtype=torch.int8), torch.rand(columns).to(torch.bfloat16)


def packed(rows, inner, columns):
    return values(rows, inner), torch.randint(0, 256, (columns, inner // 2), dtype=torch.uint8), torch.rand(columns).to(torch.bfloat16)


def from_int8(x, q, s):
    return F.linear(x, q.to(x.dtype) * s[:, None])


def from_int4(x, p, s):
    w = torch.stack([p & 15, p >> 4], -1).reshape(p.shape[0], -1)
    return F.linear(x, (w.to(x.dtype) - 8) * s[:, None])


def exact(fn, inputs):
    return fn(*(wide(x) if x.is_floating_point() else x for x in inputs))


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("fn, make", [(from_int8, quantised), (from_int4, packed)], ids=["int8", "int4"])
@pytest.mark.parametrize("policy", ["fast", "eager"])
def test_quantised_weights_are_read_once_packed(rows, fn, make, policy):
    torch.manual_seed(rows)
    inputs = make(rows, 132, 40)
    got, (record,) = run(fn, *inputs, policy=policy)
    assert error(got, exact(fn, inputs)) <= 1e-2 and len(schedules(record)) == 1 and not calls(record)


WIDER = {       # what is unpacked, its scales in groups of 128 or not
    "int8": (from_int8, quantised, False), "int4": (from_int4, packed, False),
    "int8 in groups": (lambda x, q, s: F.linear(x, grouped(q.to(x.dtype), s, 128)), quantised, True),
    "int4 in groups": (lambda x, p, s: F.linear(x, grouped(nibbles(p).to(x.dtype) - 8, s, 128)), packed, True),
}


@pytest.mark.parametrize("columns, side", [(100, 16), (150, 32), (270, 64)])
@pytest.mark.parametrize("name", WIDER)
def test_more_columns_are_unpacked_in_wider_tiles(name, columns, side):
    """Of four multiprocessors: every tile reads all rows."""
    fn, make, scaled = WIDER[name]
    x, q, s = make(5, 1024, columns)
    s = torch.rand(columns, 8).to(torch.bfloat16) if scaled else s
    got, (record,) = run(fn, x, q, s)
    made, = schedules(record)
    assert made.sizes(made.dims[0]) == (side,) and made.outer is not None
    assert error(got, exact(fn, (x, q, s))) <= 1e-2 and not calls(record)


@pytest.mark.parametrize("fn, make", [(from_int8, quantised), (from_int4, packed)], ids=["int8", "int4"])
@pytest.mark.parametrize("rows, depth, tile", [(5, 8448, 8), (9, 8448, 16), (5, 4096, 16)])
def test_up_to_eight_rows_of_a_long_depth_are_a_tile_of_eight(fn, make, rows, depth, tile):
    inputs = make(rows, depth, 20)
    got, (record,) = run(fn, *inputs)
    (body, made), = record.values["lower"].bodies.values()
    assert made.sizes(made.dims[1]) == (tile,) and error(got, exact(fn, inputs)) <= 1e-2 and not calls(record)
    other = replace(target("cpu", interpret=True), arch=("hip", "gfx942", 64))
    assert matmul.tile_of_rows(*made.dims, matmul.folds_of(body)[0], Hints({}), other) == 16


def test_scales_along_the_depth_stay_in_front():
    x, q, s = values(4, 64), torch.randint(-128, 128, (40, 64), dtype=torch.int8), torch.rand(64).to(torch.bfloat16)
    fn = lambda x, q, s: F.linear(x, q.to(x.dtype) * s)
    got, (record,) = run(fn, x, q, s)
    assert error(got, exact(fn, (x, q, s))) <= 1e-2 and not calls(record)


def grouped(q, s, size):
    """Quantised weights times a scale for each `size` of their columns."""
    n, k = q.shape
    return (q.reshape(n, k // size, size) * s[:, :, None]).reshape(n, k)


def nibbles(p):
    return torch.stack([p & 15, p >> 4], -1).reshape(p.shape[0], -1)


GROUPED = {
    "int8": lambda x, q, p, s, z: F.linear(x, grouped(q.to(x.dtype), s, 32)),
    "int4": lambda x, q, p, s, z: F.linear(x, grouped(nibbles(p).to(x.dtype) - 8, s, 32)),
    "int4 with zero points": lambda x, q, p, s, z: F.linear(
        x, (grouped_minus(nibbles(p).to(x.dtype), z, 32) * s[:, :, None]).reshape(p.shape[0], -1)),
    "int8 with a zero point a column": lambda x, q, p, s, z: F.linear(x, (q.to(x.dtype) - z[:, :1]) * s[:, :1]),
    "repeated scales": lambda x, q, p, s, z: F.linear(x, q.to(x.dtype) * s.repeat_interleave(32, 1)),
}


def grouped_minus(q, z, size):
    return q.reshape(q.shape[0], -1, size) - z[:, :, None]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("policy", ["fast", "eager"])
@pytest.mark.parametrize("rows, groups", [(1, 4), (3, 6), (20, 5)])
def test_scales_of_groups(name, policy, rows, groups):
    torch.manual_seed(rows)
    k = 32 * groups
    x, q, p = values(rows, k), torch.randint(-128, 128, (40, k), dtype=torch.int8), torch.randint(0, 256, (40, k // 2), dtype=torch.uint8)
    s, z = torch.rand(40, groups).to(torch.bfloat16), torch.randint(0, 16, (40, groups)).to(torch.bfloat16)
    got, (record,) = run(GROUPED[name], x, q, p, s, z, policy=policy)
    assert error(got, exact(GROUPED[name], (x, q, p, s, z))) <= 1e-2 and not calls(record)
    assert any(isinstance(n, MatmulSchedule) for n in schedules(record)) or rows == 1


@pytest.mark.parametrize("rows, groups", [(1, 5), (3, 3), (20, 5)])
def test_scales_that_are_no_numbers_where_the_slices_are_over(rows, groups):
    x, q = values(rows, 32 * groups), torch.randint(-128, 128, (40, 32 * groups), dtype=torch.int8)
    s = torch.rand(40, groups).to(torch.bfloat16) + 0.5
    fn = lambda x, q, s: F.linear(x, grouped(q.to(x.dtype), 1 / s, 32))
    got, (record,) = run(fn, x, q, s)
    assert error(got, exact(fn, (x, q, s))) <= 1e-2 and not calls(record)


def test_integers_that_16_bits_do_not_hold_are_no_factors():
    x, q = torch.eye(16, 256, dtype=torch.bfloat16), torch.randint(0, 256, (64, 256), dtype=torch.uint8)
    fn = lambda x, q: (x.float()[:, None] * (q.to(torch.int16) + 100).float()).sum(-1)
    got, _ = run(fn, x, q)
    assert torch.equal(got, fn(x, q))


def test_weights_whose_depth_is_divided_by_much_are_made_before_their_product():
    x, q, s = values(4, 2048), torch.randint(-128, 128, (40, 2048), dtype=torch.int8), torch.rand(40, 2).to(torch.bfloat16)
    fn = lambda x, q, s: F.linear(x, grouped(q.to(x.dtype), s, 1024))
    got, (record,) = run(fn, x, q, s)
    assert error(got, exact(fn, (x, q, s))) <= 1e-2
    assert not calls(record) and len(schedules(record)) == 2
