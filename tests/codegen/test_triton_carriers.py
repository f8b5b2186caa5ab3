"""The rescaled carriers of `ir.ops.CARRIERS` in Triton: taken in lane by lane, combined, folded across lanes; against their meaning in NumPy."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.codegen.test_triton_compile import TARGETS, compiler, targets
from tests.codegen.triton_harness import Call, interpret, load, torch_type
from tokamak.codegen import triton_ops
from tokamak.ir.dtype import F32, F64
from tokamak.ir.meaning import CARRIED
from tokamak.ir.ops import CARRIERS

pytest.importorskip("triton")

KINDS = [(m, d) for m in CARRIERS for d in (F32, F64)]
STEPS, ROWS, LANES = 37, 8, 16


def kernel(monoid: str, d) -> str:
    """Rows of 16 lanes take in 37 tiles of elements, of which the last lanes are idle in every third; pairs of lanes, then all, are folded to one."""
    names = [f"c{k}" for k in range(len(CARRIERS[monoid]))]
    both = triton_ops.combine(monoid, tuple(f"a{k}" for k in range(len(names))), tuple(f"b{k}" for k in range(len(names))))
    idle = triton_ops.neutral(monoid, d)
    lines = ["at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]", "row = tl.arange(0, 8)"]
    lines += [f"{c} = {triton_ops.full('[8, 16]', v, d)}" for c, v in zip(names, CARRIERS[monoid])]
    lines += [f"for s in range({STEPS}):", "    live = (tl.arange(0, 16)[None, :] < 11) | (s % 3 > 0)",
              f"    x = tl.where(live, tl.load(p + s * 128 + at), {idle})",
              f"    {', '.join(names)} = {triton_ops.step(monoid, tuple(names), 'x', 'tl.where(live, 1.0, 0.0)')}"]
    lines += [f"a{k}, b{k} = tl.split(tl.reshape({c}, [8, 8, 2]))" for k, c in enumerate(names)]
    lines += [f"{', '.join(names)} = {', '.join(both)}", f"{', '.join(names)} = {triton_ops.reduce(monoid, d, tuple(names), 1)}"]
    lines += [f"tl.store(o{k} + row, {c})" for k, c in enumerate(names)]
    outs = ", ".join(f"o{k}" for k in range(len(names)))
    return f"@triton.jit\ndef {monoid}_{d}(p, {outs}, err, n):\n    " + "\n    ".join(lines) + "\n\n\n"


TEXT = "".join(kernel(m, d) for m, d in KINDS)


def elements(monoid: str, d) -> np.ndarray:
    """Rows: plain, far from 0, constant, -inf alone, with -inf, with +inf twice, with NaN, with one far element."""
    x = np.random.default_rng(3).normal(0, 1, (STEPS, ROWS, LANES))
    x[:, 1] = 1000 + 0.1 * x[:, 1]
    x[:, 2] = 3.3
    x[5, 7, 4] = 300
    if monoid == "expsum":
        x[:, 3], x[2, 4, 2:9], x[1, 5, 1], x[30, 5, 8], x[8, 6, 3] = -np.inf, -np.inf, np.inf, np.inf, np.nan
    return x.astype("float64" if d is F64 else "float32")


def wanted(monoid: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    live = (np.arange(LANES) < 11) | (np.arange(STEPS)[:, None] % 3 > 0)
    live = np.broadcast_to(live[:, None], x.shape)
    wide = np.where(live, x.astype(np.float64), CARRIERS[monoid][0])
    rest = [np.zeros(x.shape)] * (len(CARRIERS[monoid]) - 2)
    with np.errstate(all="ignore"):
        return tuple(v.reshape(ROWS) for v in CARRIED[monoid](wide, *rest, live.astype(float), (0, 2)))


def test_carriers(tmp_path):
    calls = [Call(f"{m}_{d}", (torch.from_numpy(elements(m, d)),), (((ROWS,), torch_type(d)),) * len(CARRIERS[m])) for m, d in KINDS]
    for (m, d), (outs, _) in zip(KINDS, interpret(TEXT, calls, tmp_path)):
        for got, want in zip(outs, wanted(m, elements(m, d)), strict=True):
            tolerance = 1e-5 if d is F32 else 1e-11
            np.testing.assert_allclose(got.numpy(), want, rtol=tolerance, atol=tolerance, err_msg=f"{m} {d}")


def test_neutral_elements_change_nothing(tmp_path):
    """Combined with a carrier on either side, NaN and infinities included."""
    def text(m: str, d) -> str:
        k = range(len(CARRIERS[m]))
        loads = [f"x{i} = tl.load(p{i} + tl.arange(0, 8))" for i in k] + [f"n{i} = {triton_ops.full('[8]', v, d)}" for i, v in enumerate(CARRIERS[m])]
        pair = (tuple(f"x{i}" for i in k), tuple(f"n{i}" for i in k))
        lines = loads + [f"{', '.join(f'{s}{i}' for i in k)} = {triton_ops.combine(m, *order)[0]}"
                         for s, order in (("l", pair), ("r", pair[::-1]))]
        lines += [f"tl.store({s}{i}p + tl.arange(0, 8), {s}{i})" for s in "lr" for i in k]
        args = [*(f"p{i}" for i in k), *(f"{s}{i}p" for s in "lr" for i in k)]
        return f"@triton.jit\ndef {m}_{d}({', '.join(args)}, err, n):\n    " + "\n    ".join(lines) + "\n\n\n"
    sets = {"moments": ([1, -3, np.nan, 1e6, 0, 7, 2, 0], [0, 2, np.nan, 4, 0, np.nan, 3, 5], [1, 2, 3, 4, 0, 6, 7, 8]),
            "expsum": ([1, -3, np.nan, np.inf, -np.inf, 7, 2, 0], [1, 2, np.nan, 2, 0, 1e6, 3, 5])}
    given = {(m, d): [torch.tensor(c, dtype=torch_type(d)) for c in sets[m]] for m, d in KINDS}
    calls = [Call(f"{m}_{d}", tuple(given[m, d]), (((8,), torch_type(d)),) * (2 * len(CARRIERS[m]))) for m, d in KINDS]
    for (m, d), (outs, _) in zip(KINDS, interpret("".join(text(m, d) for m, d in KINDS), calls, tmp_path)):
        for got, want in zip(outs, given[m, d] * 2, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", TARGETS)
def test_carriers_compile(name, tmp_path):
    module, (target, assembly) = load(TEXT, tmp_path), TARGETS[name]
    for m, d in KINDS:
        signature = ({"p": triton_ops.pointer_type(d)} | {f"o{k}": triton_ops.pointer_type(d) for k in range(len(CARRIERS[m]))}
                     | {"err": "*i32", "n": "i32"})
        made = compiler.compile(compiler.ASTSource(getattr(module, f"{m}_{d}"), signature, {}), target=targets.GPUTarget(*target))
        assert f"{m}_{d}" in made.asm[assembly]
