"""Contractions as kernels, in Triton's interpreter, against float64: what the tests of products share."""
from __future__ import annotations

import torch

import tokamak
from tokamak.ir.graph import Opaque
from tokamak.schedule.matmul import MatmulSchedule
from tokamak.tools.record import recording

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


def values(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=torch.float32).to(dtype)


def wide(x):
    return x.detach().double().requires_grad_(x.requires_grad)


def error(got, want) -> float:
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm().clamp_min(1e-30))


def run(fn, *inputs, **options):
    """(result, the records of its graphs): `fn` with its contractions as kernels, where they can be."""
    torch._dynamo.reset()
    options = {"target": "interpret", "strict": True, "dynamic": False, "cache_dir": "", "contractions": "kernels", **options}
    with recording() as recorder:
        return tokamak.compile(fn, **options)(*inputs), recorder.graphs


def schedules(record) -> list:
    return [s for _, s in record.values["lower"].bodies.values()]


def calls(record) -> list[str]:
    return [str(n.target) for n in record.values["contract"].nodes if isinstance(n, Opaque)]


def check(fn, *inputs, kernels=1, opaque=0, **options):
    """`fn` gives what float64 gives, by `kernels` groups of which at least one is a contraction, and `opaque` calls of torch."""
    got, (record, *_) = run(fn, *inputs, **options)
    want = fn(*map(wide, inputs))
    assert got.shape == want.shape and got.dtype is inputs[0].dtype
    assert error(got, want) <= TOLERANCE[got.dtype]
    made = schedules(record)
    assert len(made) == kernels and len(calls(record)) == opaque and any(isinstance(s, MatmulSchedule) for s in made)
    return made
