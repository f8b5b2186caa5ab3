"""Gradients of cuDNN's attention: which calls are made in the place of those that were asked for; without a GPU."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tokamak
from tokamak.capture import aot
from tokamak.capture.cudnn_plans import DROPPED, GIVEN, GRADIENT, RESULT, plans_apart, same_share

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 32, 64


def memory(*order, device="cuda"):
    """[BATCH, HEADS, LENGTH, WIDTH] whose dimensions lie in memory in that order."""
    sizes = BATCH, HEADS, LENGTH, WIDTH
    made = torch.empty([sizes[d] for d in order], device=device, dtype=torch.bfloat16)
    return made.permute([order.index(d) for d in range(4)])


def gradient(dropped=0.0):
    def call(dy, q, k, v, out, lse, seed, offset):
        return GRADIENT(dy, q, k, v, out, lse, seed, offset, None, None, None, q.shape[2], k.shape[2], dropped, False, scale=0.125)
    return call


def kept(device="cuda"):
    """What forward keeps beside the result: logarithms of sums, and where the random numbers begin."""
    seed = torch.zeros((), dtype=torch.int64, device=device)
    return torch.zeros(BATCH, HEADS, LENGTH, 1, device=device), seed, seed.clone()


def calls_seen(run, *inputs) -> list[tuple]:
    """(kind of graph, the share's sign, is what comes in laid out as the result) of the calls in what is compiled of `run`, which `run` runs."""
    seen = []

    def keep(graph, given, kind):
        seen.extend((kind, math.copysign(1.0, n.args[DROPPED]), n.args[GIVEN].meta["val"].stride() == n.args[RESULT].meta["val"].stride())
                    for n in graph.graph.find_nodes(op="call_function", target=GRADIENT))
        return aot.eager(graph)
    torch._dynamo.reset()
    out = torch.compile(run, backend=lambda gm, given: aot.autograd(gm, given, keep))(*inputs)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    return seen


def traced(given, result, dropped=0.0, mode="fake"):
    """The graph of a gradient's call, and that node, with what is incoming and attention's result laid out so."""
    with FakeTensorMode(shape_env=ShapeEnv() if mode == "symbolic" else None):
        q = memory(0, 2, 1, 3)
        gm = make_fx(gradient(dropped), tracing_mode=mode)(memory(*given), q, q.clone(), q.clone(), memory(*result), *kept())
    plans_apart(gm)
    node, = gm.graph.find_nodes(op="call_function", target=GRADIENT)
    return gm, node


LAYOUTS = (0, 2, 1, 3), (0, 1, 2, 3), (2, 0, 1, 3)


@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("result", LAYOUTS)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_is_incoming_is_laid_out_as_the_result(given, result, mode):
    """Copied only where it is not."""
    gm, node = traced(given, result, mode=mode)
    got, like = node.args[GIVEN].meta["val"], node.args[RESULT].meta["val"]
    assert got.shape == like.shape and got.stride() == like.stride()
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert len(copies) == (given != result)


def test_a_copy_holds_the_same_values():
    _, node = traced((0, 1, 2, 3), (0, 2, 1, 3))
    n, chain = node.args[GIVEN], []
    while n.op != "placeholder":
        chain.append(n)
        n = n.args[0]
    x = copy = torch.randn(BATCH, HEADS, LENGTH, WIDTH)
    for n in reversed(chain):
        copy = n.target(copy, *n.args[1:], **n.kwargs)
    assert chain and torch.equal(copy, x) and copy.stride() == node.args[RESULT].meta["val"].stride()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1 / 3, 0.999])
def test_the_share_is_another_number_of_the_same_value(share):
    other = same_share(share)
    assert np.float64(other).tobytes() != np.float64(share).tobytes() and np.float32(other) == np.float32(share)
    _, node = traced((0, 2, 1, 3), (0, 2, 1, 3), share)
    assert np.float64(node.args[DROPPED]).tobytes() == np.float64(other).tobytes()


def test_a_share_whose_next_number_is_another_one_in_float32_stays():
    between = float(np.float64(np.float32(0.3)) / 2 + np.float64(np.nextafter(np.float32(0.3), np.float32(1))) / 2)
    assert same_share(between) == between


def test_zeros_of_both_signs_reach_calls_of_torch():
    """Whatever else is the same."""
    with torch.library._scoped_library("tokamak_plans", "FRAGMENT") as lib:
        lib.define("signed(Tensor x, float share) -> Tensor")
        lib.impl("signed", lambda x, share: x * math.copysign(1.0, share), "CompositeExplicitAutograd")
        lib.impl("signed", lambda x, share: torch.empty_like(x), "Meta")
        signed = torch.ops.tokamak_plans.signed.default
        torch._dynamo.reset()

        def apart(gm, inputs):
            def one(graph, given, kind):
                for n in graph.graph.find_nodes(op="call_function", target=signed):
                    n.update_arg(1, -n.args[1])
                graph.recompile()
                return tokamak.backend.compile_graph(graph, given, tokamak.Options(), lambda stage, value: value, kind)
            return aot.autograd(gm, inputs, one)
        x = torch.ones(3)
        assert torch.equal(torch.compile(lambda x: signed(x + 1, 0.0), backend=apart)(x), torch.full((3,), -2.0))


def test_gradients_within_any_graph_are_found():
    """In a function that asks for gradients itself, too."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        q = memory(0, 2, 1, 3)
        assert calls_seen(gradient(), q, *(q.clone() for _ in range(4)), *kept()) == [("inference", -1.0, True)]


class Attention(torch.autograd.Function):
    """Whose gradient alone is cuDNN's."""

    @staticmethod
    def forward(ctx, q):
        ctx.save_for_backward(q)
        return q * 2

    @staticmethod
    def backward(ctx, dy):
        q, = ctx.saved_tensors
        return gradient()(dy, q, q, q, q, *kept(q.device))[0]


def test_gradients_of_training_steps_are_found():
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = memory(0, 2, 1, 3, device="cpu").requires_grad_()
        assert calls_seen(lambda q: Attention.apply(q).contiguous(), q) == [("backward", -1.0, True)]
