"""Triton kernels on CPU tensors by the interpreter, alone and in programs."""
from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from tokamak.codegen import triton_lib
from tokamak.errors import InternalError
from tokamak.runtime.gpu_build import GpuUnit, build
from tokamak.runtime.gpu_interpret import interpreted
from tokamak.runtime.program import RESIDENT, Alloc, Launch, Let, Program, Ref, Return, TensorSpec, assemble

HEAD = """import triton
import triton.language as tl
@triton.jit
"""
SOFTMAX = GpuUnit("softmax", HEAD + """def softmax(p0, p1, n0, n1, k0):
    row = tl.program_id(0)
    i = tl.arange(0, 64)
    x = tl.load(p0 + row * n1 + i, mask=i < n0, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0) * k0.to(tl.float32)
    tl.store(p1 + row * n1 + i, y.to(tl.bfloat16), mask=i < n0)
""", ("*bf16", "*bf16", "i32", "i64", "fp64"))
CHECKED = GpuUnit("checked", HEAD + """def checked(p0, p1, p2, n0, err):
    i = tl.program_id(0) * 16 + tl.arange(0, 16)
    at = tl.load(p1 + i, mask=i < n0, other=0)
    bad = (at < 0) | (at >= n0)
    tl.store(err + tl.zeros_like(at).to(tl.int32), 1, mask=bad)
    tl.store(p2 + i, tl.load(p0 + tl.where(bad, 0, at), mask=i < n0, other=0), mask=i < n0)
""", ("*fp32", "*i64", "*fp32", "i32", "*i32"))


def test_right_and_in_place():
    x = torch.randn(5, 50).bfloat16()
    y = torch.full((5, 50), 7.0).bfloat16()
    interpreted(SOFTMAX).run((5,), (x, y, 50, 50, 0.5))
    torch.testing.assert_close(y, (torch.softmax(x.double(), -1) / 2).bfloat16())


def test_words_have_the_types_of_the_signature():
    seen = GpuUnit("seen", HEAD + """def seen(p0, n0, n1, k0):
    tl.store(p0, n0)
    tl.store(p0 + 1, n1)
    tl.store(p0 + 2, (k0 * 3).to(tl.int64))
    tl.store(p0 + 3, n0 + 1)
""", ("*i64", "i32", "i64", "fp64"))
    out = torch.zeros(4, dtype=torch.int64)
    interpreted(seen).run((1,), (out, 2**31 - 1, 2**40, 2.0**40 / 3 + 2.0**-12))
    assert out.tolist() == [2**31 - 1, 2**40, int((2.0**40 / 3 + 2.0**-12) * 3), -2**31]        # i32 wraps, fp64 keeps its bits


def test_bool_memory():
    unit = GpuUnit("flip", HEAD + """def flip(p0, p1):
    i = tl.arange(0, 8)
    tl.store(p1 + i, ~tl.load(p0 + i))
""", ("*i1", "*i1"))
    x = torch.tensor([True, False] * 4)
    y = torch.empty_like(x)
    interpreted(unit).run((1,), (x, y))
    assert torch.equal(y, ~x)


def program(**launch) -> Program:
    spec = TensorSpec(("n",), ("1",), torch.float32)
    words = (("ptr", "x"), ("ptr", "at"), ("ptr", "y"), ("int", "n"), ("error", ""))
    checked = Launch("checked", words, grid=("(n + 15)//16", "1", "1"), **launch)
    steps = (Let("n", "x.shape[0]"), Alloc("y", spec, "n*4"), checked, Return((Ref("y"),)))
    return Program("p", ("x", "at"), steps, errors=((IndexError, "index out of range"),))


def test_in_a_program_errors_are_raised_at_once():
    fn = assemble(program(), {"checked": interpreted(CHECKED)})
    x, at = torch.randn(37), torch.randint(37, (37,))
    assert torch.equal(fn([x, at])[0], x[at])
    for wrong in (-1, 37):
        at[20] = wrong
        with pytest.raises(IndexError, match="index out of range"):
            fn([x, at])
    at[20] = 3
    assert torch.equal(fn([x, at])[0], x[at])


def test_a_grid_of_what_is_resident_is_one_program():
    counted = GpuUnit("counted", HEAD + "def counted(p0):\n    tl.store(p0 + tl.program_id(0), tl.num_programs(0))\n", ("*i32",), cooperative=True)
    launch = Launch("k", (("ptr", "x"),), grid=(f"min({RESIDENT}, 9)", "1", "1"))
    fn = assemble(Program("p", ("x",), (launch, Return(()))), {"k": interpreted(counted)})
    x = torch.zeros(9, dtype=torch.int32)
    fn([x])
    assert x.tolist() == [1] + [0] * 8
    with pytest.raises(InternalError, match="waits"):
        interpreted(counted).run((2,), (x,))


SHARE = GpuUnit("share", HEAD.replace("@", "from tokamak.codegen import triton_lib as tk\n@") + """def share(p0, p1, p2):
    tk.arrive()
    b0 = tl.program_id(0)
    i, lanes = tl.arange(0, 4), tl.arange(0, 4)
    x = tl.load(p0 + b0 * 4 + i)
    total, most = tk.exchange2(tl.sum(x, 0), tl.max(x, 0).to(tl.int64), lanes, 3, True)
    whole = tl.sum(tl.where(lanes < 3, total, 0.0), 0)
    again = tk.exchange1(tl.sum(x - whole, 0), lanes, 3, False)
    tl.store(p1 + b0 * 4 + lanes, again, mask=lanes < 3)
    tl.store(p2 + b0 * 4 + lanes, most, mask=lanes < 3)
""", ("*fp32", "*fp32", "*i64"), cluster=3)


def test_programs_of_a_cluster_exchange_values():
    x, y, most = torch.randn(6, 4), torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.int64)
    interpreted(SHARE).run((6,), (x, y, most))
    rows = x.reshape(2, 3, 4)
    said = (rows - rows.sum((1, 2), keepdim=True)).sum(2)
    torch.testing.assert_close(y.reshape(2, 3, 4)[..., :3], said[:, None].expand(2, 3, 3))
    assert torch.equal(most.reshape(2, 3, 4)[..., :3], rows.amax(2).long()[:, None].expand(2, 3, 3))


@pytest.mark.parametrize("ends", ["raise", "return"])
def test_what_one_program_of_a_cluster_raises_is_raised(ends):
    other = {"raise": "tl.store(p1, tl.load(p0 + q9))", "return": "tl.store(p1, 0.0)"}[ends]
    text = SHARE.text.replace("    total, most", f"    if b0 == 4:\n        {other}\n        return\n    total, most")
    with pytest.raises(Exception, match="q9|others wait for"):
        interpreted(replace(SHARE, name="share", text=text)).run((6,), (torch.randn(6, 4), torch.zeros(6, 4), torch.zeros(6, 4, dtype=torch.int64)))


TWICE = HEAD + "def twice(p0):\n    i = tl.arange(0, 4)\n    tl.store(p0 + i, tl.load(p0 + i) * 2)\n"


def test_another_kernel_of_the_same_name():
    """As one by addresses stands in for one by descriptors: each runs by its own text, whichever was loaded last."""
    first, second = interpreted(GpuUnit("twice", TWICE, ("*fp32",))), interpreted(GpuUnit("twice", TWICE.replace("* 2", "* 3"), ("*fp32",)))
    x = torch.ones(4)
    for kernel, want in ((second, 3.0), (first, 6.0)):
        kernel.run((1,), (x,))
        assert torch.equal(x, torch.full((4,), want))


def test_not_on_another_device():
    with pytest.raises(InternalError, match="cuda"):
        assemble(program(device="cuda:0"), {"checked": interpreted(CHECKED)})


def test_the_ordinary_triton_stays_what_it_is():
    interpreted(SOFTMAX)
    assert sys.modules["triton"] is triton and sys.modules["triton.language"] is triton.language
    assert type(triton.jit(test_not_on_another_device)).__name__ == "JITFunction" and not triton.knobs.runtime.interpret
    assert build([SOFTMAX], ("cuda", 90, 32))["softmax"].entry == "softmax"


def test_the_library_of_kernels_is_interpreted_too():
    unit = GpuUnit("folded", HEAD.replace("@", "from tokamak.codegen import triton_lib as tk\n@") + """def folded(p0, p1, n0):
    i = tl.arange(0, 16)
    x = tl.load(p0 + i, mask=i < n0, other=float("-inf"))
    tl.store(p1 + i, tk.tanh(x - tk.reduce_max(x, 0)), mask=i < n0)
""", ("*fp32", "*fp32", "i32"))
    x, y = torch.randn(13), torch.empty(13)
    for _ in range(2):
        interpreted(unit).run((1,), (x, y, 13))
        torch.testing.assert_close(y, torch.tanh(x - x.max()))
    assert type(triton_lib.tanh).__name__ == "JITFunction" and sys.modules["tokamak.codegen.triton_lib"] is triton_lib
    x[5] = float("nan")
    interpreted(unit).run((1,), (x, y, 13))
    assert bool(y.isnan().all())
