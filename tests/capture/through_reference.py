"""Eager against the captured graph as the NumPy reference evaluates it, through AOTAutograd: what the tests of operator tables use.

    refused = agree(fn, tensors)               # raises AssertionError where type, shape, strides or values differ
    refused = agree(fn, tensors, grad=True)    # the gradients too
"""
import random

import numpy as np
import torch
import torch._functorch.config as functorch_config
from functorch.compile import aot_function
from torch.utils import _pytree as pytree

from tokamak.capture import tables  # noqa: F401
from tokamak.capture.dtypes import TORCH_DTYPES
from tokamak.capture.fx import Capture
from tokamak.ir.check import check_graph
from tokamak.ir.graph import View
from tokamak.ir.reference import evaluate

TOLERANCE = {torch.float64: (1e-7, 1e-7), torch.float32: (3e-5, 2e-5), torch.float16: (3e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2)}


def array(x):
    """A tensor as the reference wants it; anything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach()
    return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()


def _tensor(x, dtype) -> torch.Tensor:
    found = TORCH_DTYPES.get(dtype)
    return torch.from_numpy(np.array(x)).to(found) if found is not None else torch.from_numpy(np.array(x))


def _opaque(refused: dict):
    """Makes an opaque call with torch, and notes it."""
    def run(call, args, kwargs):
        refused[str(call.target)] = call.reason
        views = pytree.tree_leaves((call.args, call.kwargs), is_leaf=lambda x: isinstance(x, View))
        flat, spec = pytree.tree_flatten((args, kwargs))
        args, kwargs = pytree.tree_unflatten([_tensor(x, v.node.dtype) if isinstance(v, View) else x for v, x in zip(views, flat)], spec)
        made = call.target(*args, **kwargs)
        return [array(x) for x in (made if isinstance(made, (tuple, list)) else (made,))]
    return run


def _laid_out(value, view: View) -> torch.Tensor:
    """`value` as torch memory with the strides of `view`."""
    value, strides = _tensor(value, view.node.dtype), [s.constant for s in view.strides]
    out = torch.empty_strided(value.shape, strides, dtype=value.dtype)
    into = out
    for d, (n, s) in enumerate(zip(value.shape, strides)):
        if n > 1 and s == 0:               # an expanded dimension is one element in memory
            into, value = into.narrow(d, 0, 1), value.narrow(d, 0, 1)
    into.copy_(value)
    return out


def reference_compiler(refused: dict):
    """An AOTAutograd compiler that runs the captured graph through the reference; opaque calls are noted in `refused` with their reasons."""
    def compile(gm, _):
        capture = Capture(gm)
        graph = check_graph(capture.graph())
        constants = {node: array(value) for node, value in capture.constants.items()}

        def run(args):
            made = evaluate(graph, [array(a) for a in args], constants=constants, opaque=_opaque(refused))
            outputs = [_laid_out(o, v) if isinstance(v, View) else o for v, o in zip(graph.outputs, made.outputs)]
            for target, value in made.writes.items():
                args[graph.inputs.index(target)].detach().copy_(_tensor(value, target.dtype))
            return outputs
        run._boxed_call = True
        return run
    return compile


def _compare(want, got) -> None:
    want, got = ([x for x in pytree.tree_leaves(xs) if x is not None] for xs in (want, got))
    assert len(want) == len(got)
    for w, g in zip(want, got):
        if not isinstance(w, torch.Tensor):
            assert w == g
            continue
        assert g.dtype is w.dtype and g.shape == w.shape
        same = all(n == 1 or p == q for n, p, q in zip(w.shape, g.stride(), w.stride()))
        assert w.numel() == 0 or same, f"strides {g.stride()}, eager {w.stride()}"
        rtol, atol = TOLERANCE.get(w.dtype, (0, 0))
        torch.testing.assert_close(g.detach(), w.detach(), rtol=rtol, atol=atol, equal_nan=True)


def tangent_format(x: torch.Tensor) -> torch.memory_format:
    """How AOTAutograd expects the gradient of result `x` to be laid out, and copies it if it is not: as x, or (torch 2.11) contiguous or channels
    last."""
    as_results = getattr(functorch_config, "guess_tangent_strides_as_outputs", False)
    return torch.preserve_format if as_results else torch._prims_common.suggest_memory_format(x)


def seeded(number: int) -> None:
    """torch.manual_seed, which keeps the caller's stack for each kind of device that is not there."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def drawn(op, dtype: torch.dtype, grad: bool) -> list:
    """The samples of torch's OpInfo `op`, always the same: what `op.sample_inputs` gives, which reads the sources of all its callers for a test's
    name, a third of the time such a test took."""
    random.seed(1234)
    np.random.seed(1234)
    seeded(1234)
    return list(op.sample_inputs_func(op, "cpu", dtype, grad))


def _gradients(out, inputs):
    out = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    seeded(1)
    return torch.autograd.grad(out, inputs, [torch.rand_like(x, memory_format=tangent_format(x)) for x in out], allow_unused=True) if out else ()


def agree(fn, tensors, grad: bool = False) -> dict:
    """Compares `fn(*tensors)`, and with `grad` its gradients; returns the opaque calls (operator -> reason)."""
    refused: dict = {}
    wanted = [t for t in tensors if t.requires_grad]
    with torch.set_grad_enabled(grad):
        want = fn(*tensors)
        compiler = reference_compiler(refused)
        got = aot_function(fn, fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)(*tensors)
        _compare(want, got)
        if grad and wanted:
            _compare(_gradients(want, wanted), _gradients(got, wanted))
    return refused


def of_tensors(op, sample) -> tuple:
    """(`op` at `sample` as a function of the sample's tensors, those)."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def fn(*tensors):
        given = list(leaves)
        for i, t in zip(places, tensors):
            given[i] = t
        value, args, kwargs = pytree.tree_unflatten(given, spec)
        return op(value, *args, **kwargs)
    return fn, [leaves[i] for i in places]


def cases(op, dtype, most: int, grad: bool = False):
    """(fn, tensors) for up to `most` samples of torch's OpInfo `op`, evenly spread; those that eager refuses are left out."""
    found = drawn(op, dtype, grad)
    step = max(1.0, len(found) / most)
    for sample in (found[int(i * step)] for i in range(min(most, len(found)))):
        fn, given = of_tensors(op, sample)
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in given]
        if not grad or any(t.requires_grad for t in tensors):
            yield fn, tensors
