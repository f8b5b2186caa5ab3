"""Products and kernels between them that run in blocks of rows: the numbers that float64 gives, whatever the sizes, and the runs that there must and
must not be."""
from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tokamak
from tokamak.codegen import row_blocks
from tokamak.codegen.row_blocks import Between, Product
from tokamak.runtime.program import source
from tokamak.runtime.steps import Call, in_blocks
from tokamak.tools.record import Recorder

MARGIN = row_blocks.MARGIN


def compiled(fn, *inputs, dynamic=False, **options):
    """What the compiled `fn` gives without gradients, and the programs."""
    torch._dynamo.reset()
    recorder = Recorder()
    with torch.no_grad():
        made = tokamak.compile(fn, strict=True, recorder=recorder, dynamic=dynamic, **options)
        out = [made(*inputs) for _ in range(2)][-1]
    return out, [g.values["program"] for g in recorder.graphs]


def blocked(fn, *inputs, tolerance=1e-5, runs=1, **options):
    """`fn` runs in blocks, and is right."""
    out, programs = compiled(fn, *inputs, **options)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    torch.testing.assert_close(out.double(), fn(*exact), rtol=tolerance, atol=tolerance, equal_nan=True)
    assert sum(len(p.blocked) for p in programs) == runs
    return programs


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v


def mlp(x, v, b, w, c):
    return F.linear(F.gelu(F.linear(x, v, b)), w, c)


def weights(k, h, n):
    return torch.randn(h, k) / k ** 0.5, torch.randn(h), torch.randn(n, h) / h ** 0.5, torch.randn(n)


@pytest.fixture(autouse=True)
def seeded(monkeypatch):
    """Runs that save anything are made, whatever they cost."""
    torch.manual_seed(0)
    monkeypatch.setattr(row_blocks, "MARGIN", 0)


# rows: of a block and a few more or fewer, less than registers hold, none; columns: of a panel, one more, fewer than a register holds
@pytest.mark.parametrize("rows,k,h,n", [(4096, 64, 64, 64), (4099, 33, 65, 31), (1201, 1, 7, 1), (2500, 130, 48, 96), (24011, 16, 40, 5)])
@pytest.mark.parametrize("activation", [torch.relu, F.gelu, lambda x: x, lambda x: torch.softmax(x, -1), lambda x: F.layer_norm(x, x.shape[-1:]) + 1])
def test_narrow_layers(rows, k, h, n, activation):
    def fn(x, v, b, w, c):
        return F.linear(activation(F.linear(x, v, b)), w, c)
    blocked(fn, torch.randn(rows, k), *weights(k, h, n))


@pytest.mark.parametrize("shape", [(2, 3, 257, 64), (1, 1, 1030, 17), (5, 64, 64), (2, 2, 130, 600)])
def test_attention(shape):
    blocked(attention, *(torch.randn(shape) for _ in range(3)))


@pytest.mark.parametrize("mask", [(1, 1, 200, 200), (2, 1, 200, 200), (2, 4, 1, 200), (200,), (4, 200, 1)])
def test_masks_and_rows_of_nothing_but_minus_infinity(mask):
    def fn(q, k, v, m):
        return torch.softmax((q @ k.mT * 0.3).masked_fill(m < 0, float("-inf")), -1) @ v
    blocked(fn, *(torch.randn(2, 4, 200, 32) for _ in range(3)), torch.randn(mask))


def test_numbers_that_are_none_stay_in_their_rows():
    def fn(x, v, w):
        return torch.relu(x @ v) @ w

    def with_bias(x, v, b, w, c):
        return F.linear(torch.relu(F.linear(x, v, b)), w, c)
    x = torch.randn(3001, 32)
    x[5, 3], x[1000, 0], x[3000, 31] = float("nan"), float("inf"), -float("inf")
    v, b, w, c = weights(32, 48, 32)
    for f, given in ((fn, (v.mT.contiguous(), w.mT.contiguous())), (with_bias, (v, b, w, c))):
        out, programs = compiled(f, x, *given)
        assert sum(len(p.blocked) for p in programs) == 1
        torch.testing.assert_close(out, f(x, *given), equal_nan=True, rtol=1e-4, atol=1e-5)
        assert out[5].isnan().all() and not out[[4, 6, 7]].isnan().any()


def test_more_than_two_products():
    def fn(x, a, b, c):
        return torch.tanh(torch.sigmoid(x @ a) @ b) @ c
    program, = blocked(fn, torch.randn(5003, 32), torch.randn(32, 40), torch.randn(40, 24), torch.randn(24, 50))
    text = source(in_blocks(program))
    assert len([s for s in program.steps if isinstance(s, Call)]) == 3 and text.count("tk_e = ") == 1 and "tk_c" not in text


def test_long_sums_over_several_registers_worth_of_depth():
    blocked(mlp, torch.randn(6000, 1100), *weights(1100, 40, 1100 // 4))


def test_factors_as_they_lie():
    """Windows of larger tensors with steps between rows, weights in either order, a weight that all batches share."""
    def fn(x, a, b):
        return torch.exp(x[:, 3:35] @ a[2:, ::2]) @ b.mT[:, 1:]
    blocked(fn, torch.rand(3000, 50), torch.rand(34, 80) / 32, torch.randn(30, 40), tolerance=1e-4)

    def shared(x, a, b):
        return torch.relu(x @ a.expand(4, 32, 64)) @ b
    blocked(shared, torch.randn(4, 700, 32), torch.randn(32, 64), torch.randn(4, 64, 16), tolerance=1e-4)


def test_what_the_kernel_reads_beside_the_product():
    """A number a row, a vector a column, a matrix, a residual of batches."""
    def fn(x, a, b, scale, shift, more):
        return ((x @ a) * scale + shift + more.float()) @ b
    blocked(fn, torch.randn(4100, 32), torch.randn(32, 48), torch.randn(48, 16), torch.randn(4100, 1), torch.randn(48),
            torch.randint(0, 9, (4100, 48)), tolerance=1e-4)


def test_sizes_that_change_are_one_program():
    torch._dynamo.reset()
    recorder = Recorder()
    fn = tokamak.compile(mlp, strict=True, recorder=recorder)
    given = weights(32, 64, 24)
    with torch.no_grad():
        for rows in (5000, 4097, 13, 2):
            x = torch.randn(rows, 32)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch.testing.assert_close(fn(x, *given).double(), mlp(x.double(), *(w.double() for w in given)), rtol=1e-5, atol=1e-5)
    program, = [g.values["program"] for g in recorder.graphs]
    assert len(program.blocked) == 1


def test_nothing_in_blocks_where_it_must_not():
    x, (v, b, w, c) = torch.randn(4096, 64), weights(64, 64, 64)
    refused = {
        "the value between is a result": lambda x, v, b, w, c: (h := F.gelu(F.linear(x, v, b)), F.linear(h, w, c)),
        "the first product is read again": lambda x, v, b, w, c: F.linear(F.gelu(h := F.linear(x, v, b)), w, c) + h,
        "coordinates of rows": lambda x, v, b, w, c: F.linear(F.linear(x, v, b) * torch.arange(4096)[:, None], w, c),
        "other rows": lambda x, v, b, w, c: F.linear(F.linear(x, v, b).roll(1, 0).exp(), w, c),
        "all rows": lambda x, v, b, w, c: F.linear(torch.softmax(F.linear(x, v, b), 0), w, c),
        "another order of rows": lambda x, v, b, w, c: F.linear(F.gelu(F.linear(x, v, b).mT), x.mT[:, :4096], None),
        "dropout": lambda x, v, b, w, c: F.linear(F.dropout(F.linear(x, v, b), 0.5), w, c)}
    for why, fn in refused.items():
        _, programs = compiled(fn, x, v, b, w, c)
        assert not any(p.blocked for p in programs), why
    for other in (x.double(), x.bfloat16()):
        _, programs = compiled(mlp, other, *(t.to(other.dtype) for t in (v, b, w, c)))
        assert not any(p.blocked for p in programs)
    for options in ({"policy": "strict"}, {"contractions": "vendor"}):
        _, programs = compiled(mlp, x, v, b, w, c, **options)
        assert not any(p.blocked for p in programs), options


@pytest.mark.parametrize("rows,k,h,worth", [(4096, 64, 64, True), (65536, 128, 256, True), (8, 64, 64, False), (128, 256, 1024, False),
                                            (512, 768, 3072, False), (512, 256, 1024, False)])
def test_what_is_worth_it(rows, k, h, worth, monkeypatch):
    """By two threads."""
    monkeypatch.setattr(row_blocks, "MARGIN", MARGIN)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch._dynamo.reset()
    _, programs = compiled(mlp, torch.randn(rows, k), *weights(k, h, k))
    assert any(p.blocked for p in programs) == worth


def test_rows_that_are_gone_and_no_rows():
    out, _ = compiled(mlp, torch.randn(0, 32), *weights(32, 64, 16))
    assert out.shape == (0, 16)


def test_a_run_says_what_moves_with_a_block():
    seen = []
    old = row_blocks._worth

    def worth(steps, hints, target):
        seen.append(steps)
        return old(steps, hints, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "_worth", worth)
        blocked(lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, *(torch.randn(2, 4, 200, 32) for _ in range(3)), torch.randn(200, 200))
    first, between, second = seen[0]
    assert isinstance(first, Product) and isinstance(second, Product) and isinstance(between, Between)
    assert [e.constant for e in between.outer] in ([8], [2, 4]) and between.unit == 1
    assert [w for w in between.words if w in ("read", "made", "one", "rows")].count("rows") == 1
    moving, = [tuple(n.constant for n in w) for w in between.words if isinstance(w, tuple)]
    assert moving[0] == 800 and not any(moving[1:])
