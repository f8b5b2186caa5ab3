"""Calls of torch that are contractions: their meaning, which the reference evaluates as nodes, is what torch gives."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function

import tokamak
from tests.capture.through_reference import TOLERANCE, array
from tokamak.capture import tables  # noqa: F401
from tokamak.capture.fx import Capture
from tokamak.fuse.contract import decided
from tokamak.fuse.contraction import contractions
from tokamak.fuse.cost import Hints
from tokamak.ir.check import check_graph
from tokamak.ir.graph import Opaque
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.ir.text import print_graph


def values(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def seen(fn, *inputs):
    """The captured graph of `fn`."""
    found = []

    def compiler(gm, _):
        found.append(check_graph(Capture(gm).graph()))
        return gm
    aot_function(fn, fw_compiler=compiler)(*inputs)
    return found[0]


CASES = {
    "mm": (lambda x, y: x @ y, (5, 7), (7, 3)),
    "mm of transposed": (lambda x, y: x.t() @ y.t(), (7, 5), (3, 7)),
    "mm of windows": (lambda x, y: x[::2, 1:] @ y[:, ::3], (9, 8), (7, 9)),
    "mm of expanded": (lambda x, y: x.expand(5, 7) @ y, (1, 7), (7, 3)),
    "one row": (lambda x, y: x @ y, (1, 7), (7, 3)),
    "bmm": (lambda x, y: torch.bmm(x, y), (2, 5, 7), (2, 7, 3)),
    "matmul of broadcast batches": (lambda x, y: torch.matmul(x, y), (4, 1, 5, 7), (3, 7, 2)),
    "einsum": (lambda x, y: torch.einsum("bhid,bjhd->bhij", x, y), (2, 3, 5, 7), (2, 4, 3, 7)),
    "mv": (lambda x, y: x @ y, (5, 7), (7,)),
    "linear": (lambda x, y, b: F.linear(x, y, b), (2, 5, 7), (3, 7), (3,)),
    "addmm": (lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2), (5, 1), (5, 7), (7, 3)),
    "addmm without what is added": (lambda c, x, y: torch.addmm(c * float("nan"), x, y, beta=0), (5, 3), (5, 7), (7, 3)),
    "baddbmm": (lambda c, x, y: torch.baddbmm(c, x, y, beta=3, alpha=-1), (2, 5, 1), (2, 5, 7), (2, 7, 3)),
    "addmv": (lambda c, x, y: torch.addmv(c, x, y, alpha=0.5), (5,), (5, 7), (7,)),
    "convolution of one element": (lambda x, w, b: F.conv2d(x, w, b), (2, 7, 4, 5), (3, 7, 1, 1), (3,)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_meaning_of_a_contraction(name):
    fn, *shapes = CASES[name]
    inputs = [values(*s) for s in shapes]
    if name.startswith("convolution"):
        inputs[0] = inputs[0].to(memory_format=torch.channels_last)
    graph = seen(fn, *inputs)
    assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)
    found = contractions(graph)
    assert len(found) == 1
    nodes = check_graph(decided(graph, dict.fromkeys(found), Hints({})))
    assert not any(isinstance(n, Opaque) for n in nodes.nodes)
    got = evaluate(nodes, [array(x) for x in inputs]).outputs[0]
    torch.testing.assert_close(torch.from_numpy(got), fn(*inputs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_meaning_is_carried_in_the_compute_type_and_rounded_once(dtype):
    x, w, b = values(5, 64, dtype=dtype), values(6, 64, dtype=dtype), values(6, dtype=dtype)
    graph = seen(F.linear, x, w, b)
    got = evaluate(decided(graph, dict.fromkeys(contractions(graph)), Hints({})), [array(v) for v in (x, w, b)]).outputs[0]
    want = F.linear(x.double(), w.double(), b.double())
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(torch.from_numpy(got).double(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("fn, shapes", [(torch.mm, ((3, 0), (0, 4))), (torch.mm, ((3, 1), (1, 4))), (F.conv2d, ((1, 4, 5, 5), (2, 4, 3, 3))),
                                        (lambda x, w: F.conv2d(x, w, stride=2), ((1, 4, 5, 5), (2, 4, 1, 1))),
                                        (lambda x, w: F.conv2d(x, w, groups=2), ((1, 4, 5, 5), (2, 2, 1, 1)))])
def test_what_is_no_contraction_has_no_meaning(fn, shapes):
    assert not contractions(seen(fn, *(values(*s) for s in shapes)))


def test_explain_shows_a_contraction_with_its_reason():
    torch._dynamo.reset()
    found = tokamak.explain(lambda x, w: torch.relu(x @ w), values(8, 16, dtype=torch.float32), values(16, 4, dtype=torch.float32))
    assert [o.reason for o in found.opaque] == ["contraction 8x16x4 f32: left to the vendor's library (no kernels for it on a CPU)"]


def test_factors_of_no_elements():
    """The product behind an empty one has a factor that is zero all along."""
    inputs = [values(*shape, dtype=torch.float32).requires_grad_() for shape in ((5, 4), (4, 0), (0, 2))]
    fn = lambda *inputs: torch.linalg.multi_dot(inputs)
    torch._dynamo.reset()
    out = tokamak.compile(fn, strict=True)(*inputs)
    for got, want in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(fn(*inputs).sum(), inputs), strict=True):
        torch.testing.assert_close(got, want)
