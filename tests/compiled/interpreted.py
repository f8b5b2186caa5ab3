"""Kernels over tiles in Triton's interpreter, as a GPU runs them: through torch.compile, against eager.

    check(fn, x, w)             # results, and gradients where an input asks for them
    schedules(fn, x)            # the schedules of its kernels
"""
from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

import tokamak
from tests.compiled.harness import differing, twins
from tokamak.tools.record import Recorder


def values(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def indices(below, *shape):
    return torch.randint(0, below, shape)


def flat(value):
    return pytree.tree_leaves(value)


def compiled(fn, **options):
    torch._dynamo.reset()
    return tokamak.compile(fn, **{"target": "interpret", "strict": True, "dynamic": False, "cache_dir": "", **options})


def check(fn, *inputs, tolerance=1e-4):
    """`fn` compiled for tiles equals eager, and its gradients do. What is rounded to 16 bits is judged by its and eager's distance from float64."""
    mine, exact = twins(inputs), twins(inputs, torch.float64)
    want, got = flat(fn(*inputs)), flat(compiled(fn)(*mine))
    precise = flat(fn(*exact)) if any(w.dtype.itemsize == 2 and w.is_floating_point() for w in want) else want
    for g, w, p in zip(got, want, precise, strict=True):
        assert_close(g, w, p, tolerance)
    if any(x.requires_grad for x in inputs):
        seed = torch.randn_like(want[0])
        for out in (want[0], got[0], *precise[:want[0].dtype.itemsize == 2]):
            out.backward(seed.to(out.dtype))
        for x, m, p in zip(inputs, mine, exact):
            if x.requires_grad:
                assert_close(m.grad, x.grad, p.grad, tolerance)


def assert_close(got, want, precise, tolerance: float) -> None:
    if want.is_floating_point() and want.dtype.itemsize == 2:
        assert got.dtype is want.dtype and got.shape == want.shape
        wrong = differing(got.detach(), want.detach(), lambda: precise)
        assert wrong is None, wrong
    else:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def schedules(fn, *inputs) -> list[str]:
    """The schedules of the kernels of `fn`, compiled for tiles and run once."""
    recorder = Recorder()
    compiled(fn, recorder=recorder)(*inputs)
    return [str(k.schedule) for g in recorder.graphs for kernels in g.values["lower"].kernels.values() for k in kernels]
