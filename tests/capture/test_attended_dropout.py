"""Attention written out whose weights are dropped at random in a training step (`capture.attended`). The values are a matrix of ones on the diagonal,
so that the result shows what was dropped; with that, results and gradients are compared with float64."""
from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.linear import error, wide
from tokamak.capture import attended, partition
from tokamak.tools.record import recording

SHARE = 0.25
aten = torch.ops.aten


def scores(q, k):
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def below(x):
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()


# -> weights before the dropout, given it as a function
FORMS = {
    "plain": lambda q, k, drop: drop(torch.softmax(scores(q, k), -1)),
    "masked": lambda q, k, drop: drop(torch.softmax((x := scores(q, k)).masked_fill(~below(x), -math.inf), -1)),
    "in float32, rounded before": lambda q, k, drop: drop(torch.softmax(scores(q, k), -1, dtype=torch.float32).to(q.dtype)),
    "in float32, rounded behind": lambda q, k, drop: drop(torch.softmax(scores(q, k).float(), -1)).to(q.dtype),
    "by bmm": lambda q, k, drop: drop(torch.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 0.1, -1)).unflatten(0, q.shape[:2]),
    "heads apart behind": lambda q, k, drop: drop(torch.softmax(scores(q.flatten(0, 1), k.flatten(0, 1)), -1).unflatten(0, q.shape[:2])),
}
APART = {
    "dropped twice": lambda q, k, v: F.dropout(F.dropout(torch.softmax(scores(q, k), -1), SHARE), SHARE) @ v,
    "the weights are returned": lambda q, k, v: (p := F.dropout(torch.softmax(scores(q, k), -1), SHARE), p @ v)[1] + p.sum(-1, True),
    "all are dropped": lambda q, k, v: F.dropout(torch.softmax(scores(q, k), -1), 1.0) @ v,
    "scores are dropped": lambda q, k, v: torch.softmax(F.dropout(scores(q, k), SHARE), -1) @ v,
}


def attention(form):
    return lambda q, k, v: FORMS[form](q, k, lambda p: F.dropout(p, SHARE)) @ v


def step(fn, inputs):
    """[result, gradients] of a step: the sum of squares."""
    made = fn(*inputs)
    made.to(torch.float64).square().sum().backward()
    return [made, *(x.grad for x in inputs)]


def operands(device, dtype, batch, heads, rows, width):
    ones = torch.eye(width, device=device).expand(batch, heads, width, width)
    q, k = (torch.randn(batch, heads, n, width, device=device) for n in (rows, width))
    return [x.to(dtype).contiguous().requires_grad_() for x in (q, k, ones)]


def compiled(fn, inputs, **options) -> tuple[list, list]:
    """(result and gradients of a compiled step, the functions that torch is to call)."""
    torch._dynamo.reset()
    with recording() as recorder:
        made = step(tokamak.compile(fn, strict=True, dynamic=False, cache_dir="", **options), inputs)
    return made, [n.target for r in recorder.graphs for n in r.values["aten"].graph.nodes if n.op == "call_function"]


def right(form, inputs, got):
    """Are results and gradients what is right for what was left out, and was about a share of it, each time another?"""
    mask = got[0].detach() != 0
    with torch.no_grad():
        counted = FORMS[form](inputs[0], inputs[1], lambda p: p) > 1e-3
    left = (mask & counted).double().sum() / counted.sum()
    assert abs(left - (1 - SHARE)) < 4 * math.sqrt(SHARE * (1 - SHARE) / counted.sum())
    assert not torch.equal(mask[0, 0] & counted[0, 0] & counted[1, 1], mask[1, 1] & counted[0, 0] & counted[1, 1])
    fixed = lambda q, k, v: FORMS[form](q, k, lambda p: p * mask.view(p.shape).to(p.dtype) / (1 - SHARE)) @ v
    want = step(fixed, [wide(x) for x in inputs])
    usual = step(fixed, [x.detach().clone().requires_grad_() for x in inputs])
    for g, u, w in zip(got, usual, want, strict=True):
        assert g.dtype is u.dtype and g.stride() == u.stride() and error(g, w) <= max(1e-6, 1.5 * error(u, w))


def _forward(q, k, v, bias, causal, scale, dropped):
    x = q @ k.mT * scale
    p = torch.softmax(x.masked_fill(~below(x), -math.inf) if causal else x, -1)
    left, mask = aten.native_dropout.default(p, dropped, True)
    return left @ v, (p, mask)


def _backward(dy, q, k, v, out, kept, bias, causal, scale, dropped):
    p, mask = kept
    left = p * mask / (1 - dropped)
    dp = dy @ v.mT * mask / (1 - dropped)
    dx = p * (dp - (p * dp).sum(-1, True)) * scale
    return (dx @ k).contiguous(), (dx.mT @ q).contiguous(), (left.mT @ dy).contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_forms(form, monkeypatch):
    """With attention in the place of the library's, which leaves out nothing on a CPU."""
    pytest.importorskip("triton")
    asked = []
    monkeypatch.setattr(attended, "chosen", lambda given, bias, causal, scale, dropped: asked.append((causal, dropped)) or (_forward, _backward))
    monkeypatch.setattr(partition, "attended", lambda joint, results: attended.attended(joint, 1, results=results))
    torch.manual_seed(1)
    inputs = operands("cpu", torch.float32, 2, 3, 20, 16) if form != "masked" else operands("cpu", torch.float32, 2, 3, 16, 16)
    got, _ = compiled(attention(form), inputs, target="interpret")
    assert asked == [(form == "masked", SHARE)]
    right(form, inputs, got)


@pytest.mark.parametrize("name", APART)
def test_what_is_none(name, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(attended, "chosen", lambda *_: pytest.fail("the library was asked"))
    monkeypatch.setattr(partition, "attended", lambda joint, results: attended.attended(joint, 1, results=results))
    compiled(APART[name], operands("cpu", torch.float32, 2, 3, 20, 16), target="interpret")


def test_on_a_cpu_it_stays(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(partition, "attended", lambda joint, results: attended.attended(joint, 1, results=results))
    inputs = operands("cpu", torch.float32, 2, 3, 20, 16)
    got, called = compiled(attention("plain"), inputs, target="interpret")
    assert not any("attention" in str(c) for c in called)
    right("plain", inputs, got)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_on_the_gpu(form, dtype):
    torch.manual_seed(2)
    rows, width = (128, 128) if form == "masked" else (512, 64)
    inputs = operands("cuda", dtype, 8, 16, rows, width)
    got, called = compiled(attention(form), inputs)
    assert sum("attention" in str(c) and "backward" in str(c) for c in called) == 1 and aten.native_dropout.default not in called
    right(form, inputs, got)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_seed_makes_a_step_again():
    inputs = operands("cuda", torch.bfloat16, 8, 16, 512, 64)
    fn = tokamak.compile(attention("plain"), strict=True, dynamic=False)
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(step(fn, [x.detach().clone().requires_grad_() for x in inputs])[0])
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
