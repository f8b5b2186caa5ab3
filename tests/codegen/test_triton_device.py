"""The Triton vocabulary on a GPU: what test_triton_ops and test_triton_math ask of the interpreter, with more samples. Skipped without one."""
import numpy as np
import pytest
import torch

from tests.codegen import test_triton_math as math_rows
from tests.codegen import test_triton_ops as rows
from tests.codegen.triton_harness import elements, load, operation, run
from tokamak.codegen import triton_ops
from tokamak.codegen.triton_ops import FAST
from tokamak.ir.dtype import F32
from tokamak.ir.ops import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

ULP32 = math_rows.ULP32 | {"sigmoid": 5, "tanh": 3, "rsqrt": 2}
"""Where a quotient or a root of two units' error is part of the result; the interpreter's are correctly rounded."""


def test_operations(tmp_path):
    given = [rows.arguments(info, d) for info, d in rows.EXACT]
    found = run(load("".join(operation(info, d) for info, d in rows.EXACT), tmp_path), rows.operation_calls(given), "cuda")
    wrong = []
    for (info, d), args, (out, error) in zip(rows.EXACT, given, found):
        try:
            rows.judge(info, d, args, out[0].numpy(), error)
        except AssertionError as e:
            wrong.append(str(e))
    assert not wrong, "\n".join(wrong)


def test_casts(tmp_path):
    rows.judge_casts(run(load(rows.CAST_TEXT, tmp_path), rows.cast_calls(), "cuda"))


def test_folds(tmp_path):
    rows.judge_folds(run(load(rows.FOLD_TEXT, tmp_path), [rows.fold_call(m, d) for m, d in rows.FOLDS], "cuda"))


def test_random_numbers(tmp_path):
    rows.judge_random(run(load(rows.RANDOM_TEXT, tmp_path), rows.random_calls(), "cuda"))


def test_functions(tmp_path):
    given = [[a.astype(d.numpy) for a in math_rows.arguments(name, 400_000)] for name, d in math_rows.ROWS]
    calls = [elements(f"{name}_{d}", [torch.from_numpy(a) for a in args], torch.from_numpy(args[0]).dtype)
             for (name, d), args in zip(math_rows.ROWS, given)]
    found = run(load("".join(operation(OPS[name], d) for name, d in math_rows.ROWS), tmp_path), calls, "cuda")
    wrong = []
    for (name, d), args, (out, _) in zip(math_rows.ROWS, given, found):
        try:
            math_rows.judge(name, d, args, out[0].numpy(), (ULP32 if d is F32 else math_rows.ULP64)[name])
        except AssertionError as e:
            wrong.append(str(e))
    assert not wrong, "\n".join(wrong)


def test_fast_forms(tmp_path):
    calls = [elements(f"{n}_f32_fast", [torch.from_numpy(a) for a in math_rows.fast_arguments(n)], torch.float32) for n in FAST]
    for name, (out, _) in zip(FAST, run(load("".join(operation(OPS[n], F32, fast=True) for n in FAST), tmp_path), calls, "cuda")):
        math_rows.judge_fast(name, out[0].numpy())


@pytest.mark.parametrize("height, columns", [(3, 8192), (64, 1024)])
@pytest.mark.parametrize("monoid", ["max", "min", "sum", "argmax", "argmin"])
def test_folds_across_warps(tmp_path, monoid, height, columns):
    """Folds of long rows, which several warps share; NaN and ties in some."""
    args = ("x", "i")[:2 if monoid.startswith("arg") else 1]
    outs = [f"o{k}" for k in range(len(args))]
    text = (f"@triton.jit\ndef fold(p, {', '.join(outs)}, err, n):\n    row = tl.program_id(0)\n    i = tl.arange(0, {columns}).to(tl.int64)\n"
            f"    x = tl.load(p + row * {columns} + i)\n    {', '.join('r' + o for o in outs)} = {triton_ops.reduce(monoid, F32, args, 0)}\n"
            + "".join(f"    tl.store({o} + row, r{o})\n" for o in outs))
    x = torch.randn(height, columns).mul(4).round()
    x[1, 77], x[2, 5:9], x[0, 3] = float("nan"), float("inf"), float("-inf")
    kinds = [torch.float32, torch.int64][:len(args)]
    (out, _), = run(load(text, tmp_path), [rows.Call("fold", (x,), tuple(((height,), k) for k in kinds), 0, height)], "cuda")
    if monoid == "sum":
        torch.testing.assert_close(out[0], x.double().sum(1).float(), equal_nan=True)
    elif len(out) == 1:
        torch.testing.assert_close(out[0], getattr(torch, "a" + monoid)(x, 1), rtol=0, atol=0, equal_nan=True)
    else:
        pick = np.argmax if monoid == "argmax" else np.argmin
        assert (out[1].numpy() == pick(x.numpy(), 1)).all()
        torch.testing.assert_close(out[0], x.gather(1, out[1][:, None])[:, 0], rtol=0, atol=0, equal_nan=True)
