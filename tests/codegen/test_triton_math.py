"""Accuracy of the Triton vocabulary's functions against float64: the largest error in units of the last place in Triton's interpreter, special
values included.

The interpreter computes Triton's own exp, log, sin, ... with NumPy, and rounds a * b + c twice: test_triton_device judges the same rows on a GPU.
"""
import numpy as np
import pytest
import torch

from tests.codegen.test_c_math import SPECIAL, TRUTH, errors, samples
from tests.codegen.triton_harness import elements, interpret, operation
from tokamak.codegen.triton_ops import FAST
from tokamak.ir.dtype import F32, F64
from tokamak.ir.ops import OPS

pytest.importorskip("triton")

ULP32 = {
    "exp": 2, "exp2": 2.5, "expm1": 2, "log": 1.5, "log2": 2, "log10": 3, "log1p": 1.5, "sin": 2, "cos": 2, "tan": 4, "asin": 2.5, "acos": 1.5,
    "atan": 2.5, "sinh": 4, "cosh": 4, "tanh": 2, "asinh": 2.5, "acosh": 2.5, "atanh": 2.5, "erf": 1.5, "erfc": 5, "erfinv": 4, "lgamma": 1,
    "digamma": 1, "sigmoid": 3, "rsqrt": 1.5, "recip": 0.6, "div": 0.6, "sqrt": 0.6, "pow": 2, "atan2": 2, "hypot": 0.6,
}
ULP64 = {name: 2 for name in ULP32} | {"tan": 4, "sigmoid": 4, "lgamma": 6, "digamma": 20, "erfinv": 6, "erfc": 8, "tanh": 3, "sinh": 3, "cosh": 3,
                                       "asinh": 3, "acosh": 3, "atanh": 3}
"""For f64 the truth is torch's f64, itself good to a few units."""
ROWS = [(name, d) for name in ULP32 for d in (F32, F64)]


def arguments(name: str, count: int) -> list[np.ndarray]:
    """Special values (of two arguments: every pair of them), then about 2.5 `count` random ones."""
    if OPS[name].arity == 1:
        return [np.concatenate([SPECIAL, samples(0, count)])]
    a, b = np.meshgrid(SPECIAL, SPECIAL)
    return [np.concatenate([a.ravel(), samples(1, count)]), np.concatenate([b.ravel(), samples(2, count)])]


def judge(name: str, d, args: list[np.ndarray], found: np.ndarray, bound: float) -> None:
    """Assert that `found` is within `bound` units of the last place, and that zeros have the right sign."""
    truth = (TRUTH | {"div": torch.div}).get(name, getattr(torch, name, None))(*(torch.from_numpy(a.astype(np.float64)) for a in args)).numpy()
    wrong = errors(found, truth)
    if name in ("lgamma", "digamma"):      # around their zeros below 0 both lose what the argument's rounding loses: judged against 1 there
        with np.errstate(all="ignore"):
            wrong = np.where(np.abs(truth) < 1, np.abs(found - truth) / np.finfo(found.dtype).eps, wrong)
    if name == "sigmoid":      # 1 / (1 + e^-x), as torch has it: below -88.7 in f32 (-709 in f64) e^-x overflows and the result is 0
        wrong[args[0] < (-87 if d is F32 else -708)] = 0
    worst = int(np.argmax(wrong))
    shown = [float(a[worst]) for a in args]
    assert wrong[worst] <= bound, f"{name}{shown} of {d}: {found[worst]!r}, not {truth[worst]!r}: {wrong[worst]:.3g} ulp"
    zero = (truth == 0) & (found == 0)
    assert (np.signbit(found[zero]) == np.signbit(truth[zero])).all(), f"{name}: sign of zero"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(row, type) -> (arguments, found)."""
    given = [[a.astype(d.numpy) for a in arguments(name, 4000)] for name, d in ROWS]
    calls = [elements(f"{name}_{d}", [torch.from_numpy(a) for a in args], torch.from_numpy(args[0]).dtype) for (name, d), args in zip(ROWS, given)]
    found = interpret("".join(operation(OPS[name], d) for name, d in ROWS), calls, tmp_path_factory.mktemp("math"))
    return {row: (args, out[0].numpy()) for row, args, (out, _) in zip(ROWS, given, found)}


@pytest.mark.parametrize("name,d", ROWS, ids=str)
def test_accuracy(results, name, d):
    judge(name, d, *results[name, d], (ULP32 if d is F32 else ULP64)[name])


def test_every_heavy_row_is_here():
    assert {info.name for info in OPS.values() if info.heavy} | set(FAST) <= set(ULP32)


def fast_arguments(name: str) -> list[np.ndarray]:
    """Arguments whose results are usual numbers."""
    x = np.concatenate([np.random.default_rng(0).uniform(-60, 60, 2000), np.random.default_rng(1).uniform(-1, 1, 500),
                        np.random.default_rng(2).uniform(-0.03, 0.03, 300)]).astype(np.float32)
    return [x, x[::-1].copy()][:OPS[name].arity]


def judge_fast(name: str, found: np.ndarray) -> None:
    """Assert 3 units of the last place, for exp and sigmoid what the rounding of x log2(e) makes of them, for erf and tanh a twelfth of what f16
    holds."""
    args = fast_arguments(name)
    truth = (TRUTH | {"div": torch.div}).get(name, getattr(torch, name, None))(*(torch.from_numpy(a.astype(np.float64)) for a in args)).numpy()
    room = np.abs(args[0]) * 1.3 + 4 if name in ("exp", "sigmoid") else 700 if name in ("erf", "tanh") else 3
    assert (errors(found, truth) <= room).all(), name


def test_fast_forms(tmp_path):
    calls = [elements(f"{n}_f32_fast", [torch.from_numpy(a) for a in fast_arguments(n)], torch.float32) for n in FAST]
    for name, (out, _) in zip(FAST, interpret("".join(operation(OPS[n], F32, fast=True) for n in FAST), calls, tmp_path)):
        judge_fast(name, out[0].numpy())
