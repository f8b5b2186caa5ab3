"""A second process with the same cache folder builds nothing, and says what it still pays."""
from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import tokamak
from tests.tools.programs import Block

SCRIPT = """
import json, sys
import torch
import tokamak
from tests.tools.programs import Block

torch.manual_seed(0)
model, x = Block(), torch.rand(8, 16)
with tokamak.recording(strict=True, target=sys.argv[1], cache_dir=sys.argv[2], logs="start") as recorder:
    out = torch.compile(model, backend="tokamak")(x)
    out.sum().backward()
grads = [p.grad.double().sum().item() for p in model.parameters()]
print(json.dumps({"how": [u.how for g in recorder.graphs for u in g.units.values()], "out": out.double().sum().item(), "grads": grads}))
"""


def process(target: str, folder) -> tuple[dict, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, target, str(folder)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.mark.parametrize("target", ["", pytest.param("interpret", marks=NEEDS_TRITON)])
def test_a_second_process_builds_no_kernel(target, tmp_path):
    (first, said), (second, said_again) = (process(target, tmp_path) for _ in range(2))
    assert set(first["how"]) == {"interpreted" if target else "compiled"} and len(first["how"]) == len(second["how"]) > 1
    assert set(second["how"]) == {"interpreted" if target else "cache"}
    assert second["out"] == first["out"] and second["grads"] == first["grads"]
    for words in ("-- tokamak start: forward_0", "-- tokamak start: backward_1", "interpreted" if target else "from the cache", "capture"):
        assert words in said_again
    assert "from the cache" not in said


def test_explain_says_what_the_first_call_took(tmp_path):
    with tokamak.scope(cache_dir=str(tmp_path), strict=True):
        seen = tokamak.explain(Block(), torch.randn(8, 16))
    assert seen.compiling > 0 and sum(sum(g.built.values()) for g in seen.graphs) >= 2
    assert "to capture it" in str(seen) and "to have its kernels" in str(seen) and not any(g.recorded for g in seen.graphs)


def test_explain_says_what_is_recorded():
    with tokamak.scope(cudagraphs=True, strict=True):
        seen = tokamak.explain(Block(), torch.randn(8, 16))
    assert all("in 0 graphs; left out:" in g.recorded and "it runs on cpu" in g.recorded for g in seen.graphs)
    assert seen.kernels[0].name in seen.graphs[0].recorded and "CUDA graphs: 0 of" in str(seen)
