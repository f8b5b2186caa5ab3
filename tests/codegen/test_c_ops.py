"""Every operation and cast of the C vocabulary against torch, on all types, special values and ragged ends included."""
import numpy as np
import pytest
import torch

from tests.codegen.c_harness import build, call, elementwise
from tests.ir.test_meaning import tf32
from tokamak.codegen.c_cast import cast
from tokamak.codegen.c_ops import c_op
from tokamak.codegen.c_prelude import fragments
from tokamak.ir.dtype import ALL, BF16, BOOL, F32, F64
from tokamak.ir.ops import OPS, can_fail

TORCH = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "neg": torch.neg, "abs": torch.abs, "div": torch.div, "floordiv": torch.floor_divide,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.remainder, "rem": torch.fmod,
    "min": lambda a, b: torch.minimum(b, a), "max": lambda a, b: torch.maximum(b, a),           # torch's give the second of two zeros
    "fmin": torch.fmin, "fmax": torch.fmax, "sqrt": torch.sqrt, "copysign": torch.copysign, "nextafter": torch.nextafter,
    "recip": torch.reciprocal, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round, "tf32": tf32, "sign": torch.sign,
    "isnan": torch.isnan, "isinf": torch.isinf, "signbit": torch.signbit, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le,
    "gt": torch.gt, "ge": torch.ge, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "where": torch.where, "pow": torch.pow,
}
"""Operations whose result is exact; the others are in test_c_math."""

NUMPY = {"sqrt": np.sqrt, "rem": np.fmod, "mod": lambda a, b: np.where(((r := np.fmod(a, b)) != 0) & ((r < 0) != (b < 0)), r + b, r)}
"""References for floating types where torch's own vector code is not exact (its fmod gives NaN for quotients beyond 2^53)."""

TYPES = {"b": [BOOL], "u": [d for d in ALL if d.kind == "u"], "i": [d for d in ALL if d.kind == "i"], "f": [F32, F64]}


def cases():
    """(operation, type) for every exact row of the table."""
    for info in OPS.values():
        for d in (d for kind in info.takes for d in TYPES[kind]):
            if info.name in TORCH and not (info.name == "pow" and d.is_float):
                yield info, d


def argument_types(info, d):
    return [BOOL, d, d] if info.name == "where" else [d] * info.arity


def tensor(array: np.ndarray, d) -> torch.Tensor:
    t = torch.from_numpy(array)
    return t.view(torch.bfloat16) if d is BF16 else t


def storage(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint16).numpy() if t.dtype is torch.bfloat16 else t.numpy()


def values(d, count: int, seed: int) -> np.ndarray:
    """Special values of a type, then random ones; every special value meets every other in `pairs`."""
    rng = np.random.default_rng(seed)
    if d is BOOL:
        return rng.integers(0, 2, count).astype(bool)
    if d.is_int:
        info = np.iinfo(d.numpy)
        edge = np.array([0, 1, 2, 3, 7, 8, 15, 31, 63, info.max, info.max - 1, info.min, info.min + 1, info.max // 2], np.int64)
        edge = np.concatenate([edge, -edge[:9]]) if d.kind == "i" else edge
        wide = rng.integers(info.min, info.max, count, dtype=np.int64)
        return np.concatenate([edge, np.where(rng.random(count) < 0.5, wide, wide % 17 - (8 if d.kind == "i" else 0))]).astype(d.numpy)
    edge = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-40, -1e-40, 1e-320, 0.49999997, 8388609.0,
            -8388607.5, 1e30, -1e30]
    return np.concatenate([edge, rng.normal(size=count) * 10.0 ** rng.integers(-3, 9, count)]).astype(np.float32 if d is not F64 else np.float64)


def pairs(d, arity: int) -> list[np.ndarray]:
    base = [values(d, 40, k) for k in range(arity)]
    grid = np.meshgrid(*base, indexing="ij") if arity > 1 else [np.concatenate([base[0], values(d, 3000, 9)])]
    return [np.ascontiguousarray(g.ravel()) for g in grid]


def equal(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where two arrays agree: NaN equals NaN, zeros agree in sign."""
    same = found == wanted
    if found.dtype.kind == "f":
        return (same & (np.signbit(found) == np.signbit(wanted))) | (np.isnan(found) & np.isnan(wanted))
    return same


@pytest.fixture(scope="module", params=[16, 4])
def library(request, tmp_path_factory):
    text = []
    for info, d in cases():
        takes = argument_types(info, d)
        op = c_op(info.name, d, [f"x{k}" for k in range(info.arity)], active="active", code="64")
        text.append(elementwise(f"{info.name}_of_{d}", takes, BOOL if info.result == "bool" else d, op))
    for a in ALL:
        for b in ALL:
            text.append(elementwise(f"cast_of_{a}_{b}", [a], b, cast(a, b, "x0")))
    return build("".join(text), tmp_path_factory.mktemp("ops"), request.param)


def test_every_row_has_c():
    table = fragments(8)
    for info in OPS.values():
        for d in (d for kind in info.takes for d in TYPES[kind]):
            text = c_op(info.name, d, ["x", "y", "z"][:info.arity], active="m")
            name = text.split("(")[0]
            assert not name or name in table, f"{info.name} on {d}: no fragment {name}"


@pytest.mark.parametrize("info,d", list(cases()), ids=lambda v: getattr(v, "name", str(v)))
def test_operation(library, info, d):
    args = pairs(d, len([t for t in argument_types(info, d) if t is d])) if info.name != "where" else pairs(d, 2)
    if info.name == "where":
        args = [values(BOOL, len(args[0]), 3), *args]
    gives = BOOL if info.result == "bool" else d
    failing = np.zeros(len(args[0]), bool)
    if can_fail(info.name, d):
        failing = args[1] == 0
        overflow = (args[0] == np.iinfo(d.numpy).min) & (args[1] == args[1].dtype.type(-1)) if d.kind == "i" else failing
        _, error = call(library, f"{info.name}_of_{d}", args, gives)
        assert error == 64
        args = [a[~failing & ~overflow] for a in args]
    found, error = call(library, f"{info.name}_of_{d}", args, gives)
    assert error == 0
    if d.is_float and info.name in NUMPY:
        with np.errstate(all="ignore"):
            wanted = NUMPY[info.name](*args)
    else:
        wanted = TORCH[info.name](*(tensor(a, t) for a, t in zip(args, argument_types(info, d)))).numpy()
    bad = ~equal(found, wanted)
    shown = [tuple(a[k] for a in args) + (found[k], wanted[k]) for k in np.flatnonzero(bad)[:6]]
    assert not bad.any(), f"{bad.sum()} of {len(bad)} differ: (arguments..., found, wanted) {shown}"


def in_range(a, b, x: np.ndarray) -> np.ndarray:
    """The values whose cast torch defines: floats that, truncated, fit the integer type."""
    if not (a.is_float and b.is_int):
        return x
    limit, wide = 2.0**31 if b.bytes <= 4 else 2.0**62, tensor(x, a).double().numpy()
    return x[np.abs(wide) < limit]


@pytest.mark.parametrize("a", ALL, ids=str)
def test_casts(library, a):
    if a.is_half:
        x = np.arange(2**16, dtype=np.uint16).view(a.numpy)
    else:
        x = values(a, 5000, 1)
    for b in ALL:
        given = in_range(a, b, x)
        found, _ = call(library, f"cast_of_{a}_{b}", [given], b)
        wanted = tensor(given, a).to(getattr(torch, {"bool": "bool", "u8": "uint8", "f16": "float16", "bf16": "bfloat16"}.get(
            b.name, b.name.replace("i", "int").replace("f", "float"))))
        bad = ~equal(tensor(found, b).double().numpy(), wanted.double().numpy())
        shown = [(given[k], found[k], storage(wanted)[k]) for k in np.flatnonzero(bad)[:6]]
        assert not bad.any(), f"{a} to {b}: {bad.sum()} differ (given, found, wanted): {shown}"
