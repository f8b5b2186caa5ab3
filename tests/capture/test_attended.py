"""Attention written out in a training step (`capture.attended`): which joint graphs have it, and that results and gradients stay what they were."""
from __future__ import annotations

import math

import pytest
import torch

import tokamak
from tests.compiled.linear import error, wide
from tokamak.capture import attended, partition
from tokamak.tools.record import recording

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


FORMS = {
    "divided": lambda q, k, v: torch.softmax(scores(q, k), -1) @ v,
    "multiplied": lambda q, k, v: torch.softmax(q @ k.mT * 0.3, 3) @ v,
    "plain": lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
    "in float32": lambda q, k, v: torch.softmax((q @ k.mT * 0.2).float(), -1).to(q.dtype) @ v,
    "softmax in float32": lambda q, k, v: torch.softmax(q @ k.mT * 0.2, -1, dtype=torch.float32).to(q.dtype) @ v,
    "by einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * 0.1, -1), v),
    "heads behind positions": lambda q, k, v: torch.softmax(q.transpose(1, 2) @ k.transpose(1, 2).mT * 0.1, -1) @ v.transpose(1, 2),
    "by bmm": lambda q, k, v: torch.bmm(torch.softmax(torch.bmm(q[0], k[0].mT) * 0.1, -1), v[0]),
    "twice": lambda q, k, v: torch.softmax(q @ k.mT * 0.1, -1) @ (torch.softmax(k @ q.mT * 0.1, -1) @ v),
}
APART = {
    "the weights are returned": lambda q, k, v: (p := torch.softmax(scores(q, k), -1), p @ v),
    "the scores are returned": lambda q, k, v: (s := scores(q, k), torch.softmax(s, -1) @ v),
    "masked": lambda q, k, v: torch.softmax(scores(q, k).masked_fill(torch.ones(q.shape[-2], k.shape[-2]).tril() == 0, -1e9), -1) @ v,
    "along the other axis": lambda q, k, v: torch.softmax(scores(q, k), -2) @ v,
    "a negative scale": lambda q, k, v: torch.softmax(q @ k.mT * -0.1, -1) @ v,
    "a scale that is learnt": lambda q, k, v: torch.softmax(q @ k.mT * v.mean(), -1) @ v,
    "weights of more": lambda q, k, v: (torch.softmax(scores(q, k), -1) + 0.1) @ v,
    "values of other widths": lambda q, k, v: torch.softmax(scores(q, k), -1) @ v[..., :8],
}


def step(fn, inputs):
    """(results, gradients) of a step: the sum of squares of all results."""
    made = fn(*inputs)
    made = made if isinstance(made, tuple) else (made,)
    sum(x.to(torch.float64).square().sum() for x in made).backward()
    return [*made, *(x.grad for x in inputs)]


def trained(fn, inputs, monkeypatch) -> tuple[list, int]:
    """(results and gradients of a compiled step, the library's attentions in its forward graph)."""
    monkeypatch.setattr(partition, "attended", lambda joint: attended.attended(joint, 1))
    torch._dynamo.reset()
    with recording() as recorder:
        made = step(tokamak.compile(fn, target="interpret", strict=True, dynamic=False, cache_dir=""), inputs)
    graphs = [r.values["aten"].graph for r in recorder.graphs]
    return made, sum(n.target is FLASH for g in graphs for n in g.nodes)


def operands(dtype, rows=32, columns=32):
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, 16).to(dtype).requires_grad_() for n in (rows, columns, columns)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, dtype, monkeypatch):
    pytest.importorskip("triton")
    inputs = operands(dtype)
    want = step(FORMS[name], [wide(x) for x in inputs])
    usual = step(FORMS[name], [x.detach().clone().requires_grad_() for x in inputs])
    got, calls = trained(FORMS[name], inputs, monkeypatch)
    assert calls == (2 if name == "twice" else 1)
    for g, u, w in zip(got, usual, want, strict=True):
        assert g.shape == u.shape and g.dtype is u.dtype and error(g, w) <= max(1e-6, 1.5 * error(u, w))
    assert all(g.stride() == u.stride() for g, u in zip(got[:1], usual[:1]))


@pytest.mark.parametrize("rows, columns", [(32, 48), (1, 32), (33, 7)])
def test_lengths(rows, columns, monkeypatch):
    pytest.importorskip("triton")
    inputs = operands(torch.float32, rows, columns)
    want = step(FORMS["divided"], [wide(x) for x in inputs])
    got, _ = trained(FORMS["divided"], inputs, monkeypatch)
    assert all(error(g, w) <= 2e-6 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", APART)
def test_what_is_none(name, monkeypatch):
    pytest.importorskip("triton")
    inputs = operands(torch.float32)
    want = step(APART[name], [wide(x) for x in inputs])
    got, calls = trained(APART[name], inputs, monkeypatch)
    assert not calls and all(error(g, w) <= 2e-6 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("options", [{"policy": "eager"}, {"policy": "strict"}, {"streaming": False}, {"contractions": "vendor"}], ids=str)
def test_left_as_written(options, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(partition, "attended", lambda joint: pytest.fail("asked for"))
    inputs = operands(torch.float32)
    step(tokamak.compile(FORMS["divided"], **{"target": "interpret", "strict": True, "dynamic": False, "cache_dir": "", **options}), inputs)


def test_small_ones_stay(monkeypatch):
    """The library's calls take longer than products of small matrices."""
    counts = []
    real = attended.attended
    monkeypatch.setattr(partition, "attended", lambda joint: counts.append(real(joint)))
    step(tokamak.compile(FORMS["divided"], target="interpret", strict=True, dynamic=False, cache_dir=""), operands(torch.float32))
    assert counts == [0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_on_the_gpu(name, dtype):
    torch.manual_seed(1)
    inputs = [torch.randn(4, 16, 256, 64, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    if name in ("by bmm", "heads behind positions"):
        shape = (1, 64, 256, 64) if name == "by bmm" else (1, 256, 64, 64)
        inputs = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3)]
    want = step(FORMS[name], [wide(x) for x in inputs])
    usual = step(FORMS[name], [x.detach().clone().requires_grad_() for x in inputs])
    torch._dynamo.reset()
    with recording() as recorder:
        got = step(tokamak.compile(FORMS[name], strict=True, dynamic=False), inputs)
    called = [str(n.target) for r in recorder.graphs for n in r.values["aten"].graph.nodes]
    assert sum("attention" in c and "backward" in c for c in called) == (2 if name == "twice" else 1)
    for g, u, w in zip(got, usual, want, strict=True):
        assert g.shape == u.shape and g.dtype is u.dtype and error(g, w) <= max(1e-4, 1.5 * error(u, w))
