"""A fixed, stratified sample of torch's operator database, compiled, against eager; `python -m tests.compiled.sweep` runs all of it (with
`--target interpret` as a GPU does)."""
import importlib.util
import warnings

import pytest
import torch

import tokamak
from tests.compiled.harness import cache, leaves, same
from tests.compiled.op_cases import Case, cases, examine, samples

PART = 0.06           # of the cases of each type
TILES = 0.02          # in the interpreter, which is slow
THROUGH_DYNAMO = ("softmax", "nn.functional.layer_norm", "scatter_add", "cumsum", "argmax", "nn.functional.cross_entropy", "where", "cat", "var",
                  "roll")


@pytest.mark.parametrize("case", cases(most=2, part=PART), ids=lambda c: f"{c.name}-{c.dtype}")
def test_operator(case):
    found = examine(case)
    assert not found.failed
    if found.skipped:
        pytest.skip(found.skipped)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("case", cases(most=1, part=TILES, seed=1, target="interpret"), ids=lambda c: f"{c.name}-{c.dtype}")
def test_operator_in_tiles(case):
    """As a GPU runs it, in Triton's interpreter."""
    found = examine(case)
    assert not found.failed
    if found.skipped:
        pytest.skip(found.skipped)


@pytest.mark.parametrize("name", THROUGH_DYNAMO)
def test_through_torch_compile(name):
    """The same as users call it."""
    for fn, tensors in samples(Case(name, "float32", 1), False):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = leaves(tokamak.compile(fn, strict=True, cache_dir=cache())(*tensors))
        want = leaves(fn(*tensors))
        same("result", got, want, lambda i: leaves(fn(*(t.double() if t.is_floating_point() else t for t in tensors)))[i], lambda i: want[i])
