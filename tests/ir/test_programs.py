"""Random programs: captured, checked, evaluated by the reference, simplified; compared with eager."""
from __future__ import annotations

import numpy as np
import torch
from functorch.compile import aot_function, default_partition
from hypothesis import HealthCheck, given, settings

from tests.graphs import programs
from tokamak.capture import tables  # noqa: F401  (fills the registry)
from tokamak.capture.dtypes import TORCH_DTYPES
from tokamak.capture.fx import Capture
from tokamak.ir.check import check_graph
from tokamak.ir.graph import View
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.ir.rewrite import simplify
from tokamak.ir.text import print_graph


def array(t: torch.Tensor) -> np.ndarray:
    """A tensor as the reference holds it."""
    t = t.detach()
    return t.float().numpy() if t.dtype is torch.bfloat16 else t.numpy()


def call(node, args, kwargs):
    """An opaque call, made by torch."""
    def back(spec, made):
        if isinstance(spec, View):
            return torch.from_numpy(np.array(made)).to(TORCH_DTYPES[spec.node.dtype])
        if isinstance(spec, (tuple, list)):
            return type(spec)(back(s, m) for s, m in zip(spec, made))
        return made
    made = node.target(*back(node.args, args), **{k: back(node.kwargs[k], v) for k, v in kwargs.items()})
    made = (made,) if node.single else made
    return tuple(array(m) if isinstance(m, torch.Tensor) else None for m in made)


class Captures:
    """A compiler for AOTAutograd: runs each graph as it is, and keeps (capture, graph, the tensors it took, the tensors it gave,
    the strides that torch traced for these)."""

    def __init__(self):
        self.found = []

    def __call__(self, gm, _):
        capture = Capture(gm)
        graph = check_graph(capture.graph())
        given = next(n for n in gm.graph.nodes if n.op == "output").args[0]
        traced = [n.meta["val"].stride() if isinstance(getattr(n, "meta", {}).get("val"), torch.Tensor) else None for n in given]

        def run(*args):
            before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            made = gm(*args)
            self.found.append((capture, graph, before, made, traced))
            return made
        return run


def meaning(capture, graph, args):
    """What the reference makes of `graph`; its text is read back, and its simplified form gives the same."""
    data = [array(a) if isinstance(a, torch.Tensor) else a for a in args]
    constants = {node: array(t) for node, t in capture.constants.items()}
    found = evaluate(graph, data, constants=constants, opaque=call).outputs
    simple = evaluate(check_graph(simplify(graph, "eager")), data, constants=constants, opaque=call).outputs
    for one, two in zip(found, simple):
        np.testing.assert_array_equal(one, two)
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text
    return found


def compare(found, graph, wanted, tolerance, traced):
    """Values, types and strides of the outputs against torch's; `tolerance(i, tensor)` gives rtol and atol. Strides where what torch has `traced` is
    what it makes: of a roll it traces a contiguous result, where rolled images stay channels-last, and sums of windows that overlap lie otherwise."""
    for i, (value, spec, want, own) in enumerate(zip(found, graph.outputs, wanted, traced, strict=True)):
        if isinstance(spec, View):
            tensor = torch.from_numpy(np.array(value)).to(TORCH_DTYPES[spec.node.dtype])
            torch.testing.assert_close(tensor, want.detach(), equal_nan=True, **tolerance(i, want))
            if want.numel() and own == want.stride():
                strides = [s.constant for s in spec.strides]
                kept = all(e == 1 or one == two for one, two, e in zip(strides, want.stride(), want.shape))
                assert kept, f"strides {strides}, torch {want.stride()}"


SETTINGS = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)


@SETTINGS
@given(programs())
def test_reference_is_eager(program):
    captures = Captures()
    wanted = program.fn(*program.inputs)
    aot_function(program.fn, captures)(*program.inputs)
    (capture, graph, args, _, traced), = captures.found
    compare(meaning(capture, graph, args), graph, wanted, program.tolerance, traced)


@SETTINGS
@given(programs(dtypes=(torch.float64,), special=False))
def test_gradients(program):
    captures = Captures()
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in (x.detach().clone() for x in program.inputs)]
    outs = aot_function(program.fn, captures, partition_fn=default_partition)(*inputs)
    total = sum((o.square().sum() for o in outs if o.requires_grad), torch.zeros(()))
    if total.requires_grad:
        total.backward()
    for capture, graph, args, made, traced in captures.found:
        compare(meaning(capture, graph, args), graph, made, lambda i, t: {"rtol": 1e-9, "atol": 1e-9 * program.scale**2}, traced)
