"""Kernels of whole graphs become machine code for NVIDIA's and AMD's GPUs, without one: every schedule, every update."""
from __future__ import annotations

import contextlib
import os
import re

import pytest
import torch
import torch.nn.functional as F

from functorch.compile import aot_function
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException

from tests.compiled.harness import gradients, leaves
from tests.compiled.op_cases import cases, samples
from tokamak.backend import compile_graph
from tokamak.capture import aot, decompose
from tokamak.capture.fx import Unsupported
from tokamak.options import Options
from tokamak.runtime import gpu_build
from tokamak.trace import Stopped

pytest.importorskip("triton")

ARCHITECTURES = {"sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32), "gfx942": ("hip", "gfx942", 64)}
PART = 0.02 if os.environ.get("TOKAMAK_TEST_INTERPRETED") == "all" else 0.005        # of the operator database
AT = torch.tensor([3, 1, 3, 3, 0, 1])


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(dtype.is_floating_point)


def updates(x, v, at):
    """Scatters of every kind."""
    spread = at[:, None].expand(6, 7)
    return [x.scatter_reduce(0, spread, v, how) for how in ("sum", "prod", "amax", "amin", "mean")] + [x.index_put((at,), v), x.index_add(0, at, v)]


PROGRAMS = {
    "held": (lambda x, w: F.layer_norm(torch.softmax(x, -1), (1025,), w),
             [values(4, 1025, dtype=torch.bfloat16), values(1025, dtype=torch.bfloat16)]),
    "staged": (lambda x, w: F.layer_norm(x, (25600,), w), [values(16, 25600, dtype=torch.bfloat16), values(25600, dtype=torch.bfloat16)]),
    "swapped": (lambda x, w: F.layer_norm(x, (65536,), w), [values(64, 65536, dtype=torch.bfloat16), values(65536, dtype=torch.bfloat16)]),
    "shared": (lambda x: torch.softmax(x, -1), [values(9, 99991)]),
    "looped": (lambda x: torch.log_softmax(x, -1), [values(2, 40000)]),
    "split": (lambda x: (x.sum(0), x.argmax(0), x.double().var(0)), [values(4000, 33)]),
    "scanned": (lambda x: (x.cumsum(0), x.cumprod(1), x.logcumsumexp(1), x.cummax(1)), [values(33, 70)]),
    "scanned along fewer axes": (lambda x, y: ((x.new_ones(12, 3, 2, 2) * 0.3).cumsum(1) - 0.7, (x.new_ones(300, 300) * 0.3).cumsum(0),
                                               x.cumsum(1)[None] * y),
                                 [values(40, 5), values(3, 40, 5)]),
    "turned": (lambda x: x.t().contiguous() * 2 + x.flip(0, 1).t(), [values(100, 70)]),
    "gathered": (lambda x, at: F.embedding(at, x).cos() + x[at.flip(0)], [values(5, 40), AT]),
    "random": (lambda x: F.dropout(x, 0.3), [values(500)]),
    "scattered f32": (updates, [values(5, 7), values(6, 7), AT]),
    "scattered f64": (updates, [values(5, 7, dtype=torch.float64), values(6, 7, dtype=torch.float64), AT]),
    "scattered bf16": (updates, [values(5, 7, dtype=torch.bfloat16), values(6, 7, dtype=torch.bfloat16), AT]),
    "scattered i64": (updates, [values(5, 7, dtype=torch.int64), values(6, 7, dtype=torch.int64), AT]),
    "scattered u8": (updates, [values(5, 7, dtype=torch.uint8), values(6, 7, dtype=torch.uint8), AT]),
    "scattered bool": (lambda x, v, at: (x.index_put((at,), v, accumulate=True), x.scatter_reduce(0, at[:, None].expand(6, 7), v, "prod")),
                       [values(5, 7, dtype=torch.bool), values(6, 7, dtype=torch.bool), AT]),
}


def units(fn, tensors, policy: str = "fast") -> dict:
    """The units of `fn`, forward and backward, by name; nothing of it runs."""
    found: dict = {}

    def trace(stage, value):
        if stage == "render":
            found.update({p.unit.name: p.unit for b in value.values() for p in b.parts})
            raise Stopped
        return value

    def one(gm, inputs):
        try:
            compile_graph(gm, inputs, Options(policy=policy, target="interpret"), trace)
        except (Stopped, Unsupported):
            pass
        return aot.eager(gm)
    outs = leaves(aot_function(fn, fw_compiler=one, bw_compiler=one, inference_compiler=one, decompositions=decompose.TRAINING)(*tensors))
    gradients(outs, tensors)
    return found


@pytest.fixture(scope="module")
def everything() -> dict:
    """The units of all PROGRAMS and of a sample of the operator database."""
    found: dict = {}
    for fn, tensors in PROGRAMS.values():
        found |= units(fn, tensors)
    for name in ("held", "split", "scanned", "scattered f32"):
        found |= units(*PROGRAMS[name], "strict")
    for case in cases(most=1, part=PART, seed=7):
        for fn, tensors in samples(case, False):
            with contextlib.suppress(UnsupportedFakeTensorException, DataDependentOutputException, DynamicOutputShapeException):
                found |= units(fn, tensors)
    words = "tk.swap", "tk.ordered_scan_logsumexp", "tl.debug_barrier"
    assert len(found) > 50 and all(any(word in u.text for u in found.values()) for word in words)
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_everything_compiles(name, everything, tmp_path):
    wanted = {n: u for n, u in everything.items() if name.startswith("sm") or not u.registers}         # rows in stages are NVIDIA's
    made = gpu_build.build(list(wanted.values()), ARCHITECTURES[name], cache_dir=str(tmp_path))
    assert made.keys() == wanted.keys() and all(b.code for b in made.values())


@pytest.mark.parametrize("columns, dtype, wide", [(1000, torch.bfloat16, True), (1004, torch.float32, True), (250, torch.bfloat16, False)])
def test_rows_of_whole_words(columns, dtype, wide, tmp_path):
    """What strides and extents are multiples of is known where they are used: rows of so many words are read in words, masked elements too. What is
    not folded is one run, however long its rows are."""
    found = units(lambda x: x.float().square().sum(-1), [values(64, columns, dtype=dtype)])
    made = gpu_build.build(list(found.values()), ("cuda", 90, 32), cache_dir=str(tmp_path))
    words = {("tl.sum(" in found[n].text): re.search(r"ld\.global\S*\.v4", b.listing) is not None for n, b in made.items()}
    assert words == {True: wide, False: True}


@pytest.mark.parametrize("fn", [lambda x, w: torch.nn.functional.silu(x) * x, lambda x, w: x + w])
def test_what_ends_at_no_word_is_read_in_words(fn, tmp_path):
    """Whole blocks are; the last one is read element by element."""
    found = units(fn, [values(63, 129, dtype=torch.bfloat16), values(129, dtype=torch.bfloat16)])
    made = gpu_build.build(list(found.values()), ("cuda", 90, 32), cache_dir=str(tmp_path))
    listings = [b.listing for n, b in made.items() if "tl.sum(" not in found[n].text]
    assert listings
    for word in ("ld", "st"):
        assert all(re.search(rf"{word}\.global\S*\.v4", x) and re.search(rf"{word}\.global\S*\.b16", x) for x in listings)
