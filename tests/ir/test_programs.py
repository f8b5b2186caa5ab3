"""Random programs: captured, checked, evaluated by the reference, simplified; compared with eager."""
from __future__ import annotations

import numpy as np
import torch
from functorch.compile import aot_function
from hypothesis import HealthCheck, given, settings

from tests.graphs import Program, programs
from tokamak.capture import tables  # noqa: F401  (fills the registry)
from tokamak.capture.fx import TORCH_DTYPES, Capture
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


def captured(program: Program):
    """The program's Capture, its graph, and the tensors that the graph takes."""
    found = []

    def compiler(gm, _):
        capture = Capture(gm)
        graph = capture.graph()

        def run(*args):
            found.append((capture, graph, args))
            return gm(*args)
        return run
    aot_function(program.fn, compiler)(*program.inputs)
    return found[0]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(programs())
def test_reference_is_eager(program):
    wanted = program.fn(*program.inputs)
    capture, graph, args = captured(program)
    check_graph(graph)
    constants = {node: array(t) for node, t in capture.constants.items()}
    data = [array(a) for a in args]
    found = evaluate(graph, data, constants=constants, opaque=call).outputs
    for i, (value, spec, want) in enumerate(zip(found, graph.outputs, wanted)):
        if isinstance(spec, View):
            tensor = torch.from_numpy(np.array(value)).to(TORCH_DTYPES[spec.node.dtype])
            torch.testing.assert_close(tensor, want, equal_nan=True, **program.tolerance(i, want))
            assert [n for n, e in zip((s.constant for s in spec.strides), want.shape) if e > 1] == [n for n, e in zip(want.stride(), want.shape) if e > 1] or not want.numel()
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text
    simple = evaluate(check_graph(simplify(graph, "eager")), data, constants=constants, opaque=call).outputs
    for one, two in zip(found, simple):
        np.testing.assert_array_equal(one, two)
