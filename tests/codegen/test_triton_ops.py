"""Every operation, cast, constant and fold of the Triton vocabulary against the meaning in NumPy, in Triton's interpreter."""
import itertools

import numpy as np
import pytest
import torch

from tests.codegen.test_c_ops import TYPES, argument_types, equal, in_range, pairs, storage, tensor, values
from tests.codegen.triton_harness import BLOCK, Call, elements, elementwise, interpret, operation, torch_type
from tokamak.codegen import triton_ops
from tokamak.ir.dtype import ALL, BF16, BOOL, F16, F32, F64, I8, I64, U8
from tokamak.ir.meaning import MEANING, PAIRWISE, array_type, convert, fold_type, random
from tokamak.ir.ops import MONOIDS, OPS, can_fail

pytest.importorskip("triton")

ROWS = [(info, d) for info in OPS.values() for d in (d for kind in info.takes for d in TYPES[kind])]
INEXACT = {info.name for info in OPS.values() if info.heavy} | {"rsqrt"}
"""Judged in test_triton_math; pow of integers is exact."""
EXACT = [(info, d) for info, d in ROWS if info.name not in INEXACT or (info.name == "pow" and d.is_int)]


def test_every_row_has_triton():
    for info, d in ROWS:
        text = triton_ops.op(info.name, d, ("x0", "x1", "x2")[:info.arity])
        assert all(f"x{k}" in text for k in range(info.arity)), text


def test_what_a_row_does_not_take_is_refused():
    for name, d, args in (("div", I64, ("a", "b")), ("add", BOOL, ("a", "b")), ("add", F16, ("a", "b")), ("add", F32, ("a",))):
        with pytest.raises(TypeError):
            triton_ops.op(name, d, args)


def arguments(info, d) -> list[np.ndarray]:
    """At most 1500 lanes of special and random values."""
    args = pairs(d, len([t for t in argument_types(info, d) if t is d])) if info.name != "where" else pairs(d, 2)
    pick = np.random.default_rng(5).permutation(len(args[0]))[:1500]
    args = [np.ascontiguousarray(a[pick]) for a in args]
    return [values(BOOL, len(pick), 3)[:len(pick)], *args] if info.name == "where" else args


def operation_calls(given: list[list[np.ndarray]]) -> list[Call]:
    return [elements(f"{info.name}_{d}", [tensor(a, t) for a, t in zip(args, argument_types(info, d))],
                     torch_type(BOOL if info.result == "bool" else d))
            for (info, d), args in zip(EXACT, given)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Row -> (arguments, found, error word), all in one process of the interpreter."""
    given = [arguments(info, d) for info, d in EXACT]
    found = interpret("".join(operation(info, d) for info, d in EXACT), operation_calls(given), tmp_path_factory.mktemp("ops"))
    return {(info.name, d): (args, out[0].numpy(), error) for (info, d), args, (out, error) in zip(EXACT, given, found)}


def judge(info, d, args: list[np.ndarray], found: np.ndarray, error: int) -> None:
    """Assert that one row's results are what it means."""
    if can_fail(info.name, d):
        bad = args[1] == 0
        assert error == 7 and bad.any() and not found[bad].any()
        args, found = [a[~bad] for a in args], found[~bad]
    else:
        assert error == 0
    with np.errstate(all="ignore"):
        wanted = MEANING[info.name](*args)
    assert found.dtype == wanted.dtype
    same = equal(found, wanted)
    if info.name in ("min", "max", "fmin", "fmax"):      # of two zeros either may come
        same |= (found == 0) & (wanted == 0)
    shown = [tuple(a[k] for a in args) + (found[k], wanted[k]) for k in np.flatnonzero(~same)[:6]]
    assert same.all(), f"{info.name} on {d}: {(~same).sum()} of {len(same)} differ: (arguments..., found, wanted) {shown}"


@pytest.mark.parametrize("info,d", EXACT, ids=lambda v: getattr(v, "name", str(v)))
def test_operation(results, info, d):
    judge(info, d, *results[info.name, d])


def test_a_lane_that_does_not_count_reports_nothing(tmp_path):
    text = elementwise("f", [I64, I64], triton_ops.division("mod", I64, "x0", "x1", "ok & (x1 != 0)", "err", 3))
    text += elementwise("g", [I64, I64], triton_ops.division("mod", I64, "x0", "x1", None, "err", 3))
    a, b = torch.tensor([7, -7, 5]), torch.tensor([0, 2, -3])
    masked, every = interpret(text, [elements("f", [a, b], torch.int64), elements("g", [a, b], torch.int64)], tmp_path)
    assert masked[1] == 0 and every[1] == 3 and masked[0][0].tolist() == every[0][0].tolist() == [0, 1, -1]


# -- casts and constants -------------------------------------------------------------------------------------------
def cast_values(a, b) -> np.ndarray:
    """Values of type `a` whose cast to `b` torch defines."""
    if a.is_half:
        return in_range(a, b, np.arange(0, 2**16, 37, dtype=np.uint16).view(a.numpy))
    return in_range(a, b, values(a, 1000, 1))


def as_meant(x: np.ndarray, a) -> np.ndarray:
    return tensor(x, a).float().numpy() if a is BF16 else x


CASTS = list(itertools.product(ALL, ALL))
CAST_TEXT = "".join(elementwise(f"cast_{a}_{b}", [a], triton_ops.cast(b, a, "x0")) for a, b in CASTS)


def cast_calls() -> list[Call]:
    return [elements(f"cast_{a}_{b}", [tensor(cast_values(a, b), a)], torch_type(b)) for a, b in CASTS]


def judge_casts(found) -> None:
    """Assert that every cast gives what the language means."""
    for (a, b), ((out,), _) in zip(CASTS, found):
        x = cast_values(a, b)
        with np.errstate(all="ignore"):
            wanted = convert(as_meant(x, a), b, a)
        out = as_meant(storage(out), b)
        bad = ~equal(out, wanted)
        assert not bad.any(), f"{a} to {b}: (given, found, wanted) {[(x[k], out[k], wanted[k]) for k in np.flatnonzero(bad)[:6]]}"


def test_casts(tmp_path):
    judge_casts(interpret(CAST_TEXT, cast_calls(), tmp_path))


CONSTANTS = {BOOL: [True, False], U8: [0, 255], I8: [-128, 127], I64: [-2**63, 2**63 - 1, 0, -1],
             F32: [0.0, -0.0, 0.1, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38], F16: [0.1, -0.0, 65504.0], BF16: [0.1, -0.0, 1e30],
             F64: [0.1, -0.0, 1e-310, 1.7e308, float("nan"), float("-inf")]}


def test_constants(tmp_path):
    cases = [(d, v) for d, vs in CONSTANTS.items() for v in vs]
    text = "".join(f"@triton.jit\ndef k{k}(one, block, err, n):\n    tl.store(one, {triton_ops.literal(v, d)})\n"
                   f"    tl.store(block + tl.arange(0, 4), {triton_ops.full('[4]', v, d)})\n\n\n" for k, (d, v) in enumerate(cases))
    calls = [Call(f"k{k}", (), (((1,), torch_type(d)), ((4,), torch_type(d)))) for k, (d, _) in enumerate(cases)]
    for (d, v), (out, _) in zip(cases, interpret(text, calls, tmp_path)):
        wanted = torch.tensor([v] * 5, dtype=torch_type(d))
        assert equal(torch.cat(out).double().numpy(), wanted.double().numpy()).all(), (d, v, out)


# -- folds ---------------------------------------------------------------------------------------------------------
SHAPE = (4, 8, 2)
FOLDS = [(m, d) for m in MONOIDS for d in ALL
         if not d.is_half and (d is BOOL) == (m in ("any", "all")) and (d.is_float or m != "logsumexp")]


def fold_values(d, seed: int = 0) -> np.ndarray:
    """Blocks with ties, and among floats NaN and infinities in some rows."""
    x = values(d, 80, seed)[-64:].reshape(SHAPE) if d is not BOOL else np.random.default_rng(seed).random(SHAPE) < 0.2
    x = x.copy()
    if d.is_float:
        x = np.clip(x, -50, 50).astype(x.dtype)
        x[1, 2:4], x[2, 1, 0], x[3, 5, 0], x[3, :, 1] = np.nan, -np.inf, np.inf, -np.inf
    x[0, 6] = x[0, 1]
    return x


def fold_kernel(monoid: str, d) -> str:
    """The fold and the prefixes along axis 1 of a block, the suffixes too, and the two halves of axis 0 combined element by element."""
    args = ("x", "i")[:MONOIDS[monoid]]
    mixed = triton_ops.combine(monoid, ("x", "i")[:len(args)], ("y", "j")[:len(args)])
    lines = ["at = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 8)[None, :, None] * 2 + tl.arange(0, 2)[None, None, :]",
             "flat = tl.arange(0, 4)[:, None] * 2 + tl.arange(0, 2)[None, :]",
             f"x = tl.load(p + at){'.to(tl.int1)' if d is BOOL else ''}", "i = (tl.arange(0, 8)[None, :, None] + at * 0).to(tl.int64)",
             f"y = tl.load(p + 63 - at){'.to(tl.int1)' if d is BOOL else ''}", "j = 7 - i"]
    for name, text, index in (("r", triton_ops.reduce(monoid, d, args, 1), "flat"), ("s", triton_ops.scan(monoid, args, 1), "at"),
                              ("t", triton_ops.scan(monoid, args, 1, True), "at")):
        names = [name + str(k) for k in range(len(args))]
        lines.append(f"{', '.join(names)} = {text}")
        lines += [f"tl.store({n}p + {index}, {n})" for n in names]
    lines += [f"tl.store(c{k}p + at, {text})" for k, text in enumerate(mixed)]
    lines += [f"tl.store(n{k}p, {triton_ops.neutral(monoid, d, k)})" for k in range(len(args))]
    outs = [f"{n}{k}p" for n in "rstcn" for k in range(len(args))]
    return f"@triton.jit\ndef {monoid}_{d}(p, {', '.join(outs)}, err, n):\n    " + "\n    ".join(lines) + "\n\n\n"


def fold_call(monoid: str, d) -> Call:
    kinds = [torch_type(d), torch.int64][:MONOIDS[monoid]]
    shapes = [(4, 2), SHAPE, SHAPE, SHAPE, (1,)]
    return Call(f"{monoid}_{d}", (tensor(fold_values(d), d),), tuple((s, k) for s in shapes for k in kinds))


def better(monoid: str, a, i, b, j):
    """The winner of pairs, elementwise: NaN over all, then the extreme, then the smaller index."""
    with np.errstate(all="ignore"):
        beats = (b > a) if monoid == "argmax" else (b < a)
        nan_a, nan_b = (a != a), (b != b)
        take = (beats & ~nan_a) | (nan_b & ~nan_a) | (((a == b) | (nan_a & nan_b)) & (j < i))
    return np.where(take, b, a), np.where(take, j, i)


def fold_wanted(monoid: str, d, x: np.ndarray) -> list[np.ndarray]:
    """What `fold_kernel` stores, neutral elements aside."""
    i = np.broadcast_to(np.arange(8)[None, :, None], SHAPE)
    y, j = x.reshape(-1)[::-1].reshape(SHAPE), 7 - i
    if MONOIDS[monoid] == 2:
        def running(order):
            out, state = {}, None
            for k in order:
                state = (x[:, k], i[:, k]) if state is None else better(monoid, *state, x[:, k], i[:, k])
                out[k] = state
            return [np.stack([out[k][c] for k in range(8)], 1) for c in range(2)]
        s, t = running(range(8)), running(range(7, -1, -1))
        return [s[0][:, 7], s[1][:, 7], *s, *t, *better(monoid, x, i, y, j)]
    wide, fn = x.astype(fold_type(d)), PAIRWISE[monoid]
    forward = fn.accumulate(wide, axis=1, dtype=wide.dtype)
    back = np.flip(fn.accumulate(np.flip(wide, 1), axis=1, dtype=wide.dtype), 1)
    return [a.astype(array_type(d)) for a in (forward[:, 7], forward, back, fn(wide, y.astype(wide.dtype)))]


def close(found: np.ndarray, wanted: np.ndarray, exact: bool) -> bool:
    if exact or found.dtype.kind != "f":
        return bool((equal(found, wanted) | ((found == 0) & (wanted == 0))).all())
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(wanted), 50)
        return bool((equal(found, wanted) | (np.abs(found - wanted) <= 16 * np.finfo(found.dtype).eps * scale)).all())


FOLD_TEXT = "".join(fold_kernel(m, d) for m, d in FOLDS)


def judge_folds(found) -> None:
    """Assert that every fold, scan, combination and neutral element is right."""
    for (m, d), (outs, _) in zip(FOLDS, found):
        x, count = fold_values(d), MONOIDS[m]
        with np.errstate(all="ignore"):
            wanted = fold_wanted(m, d, x)
        for k, w in enumerate(wanted):
            if m == "prod" and d.is_float:      # relative to the product
                with np.errstate(all="ignore"):
                    ok = equal(outs[k].numpy(), w) | (np.abs(outs[k].numpy() - w) <= 16 * np.finfo(w.dtype).eps * np.abs(w))
                assert ok.all(), (m, d, k)
                continue
            assert close(outs[k].numpy(), w, m not in ("sum", "logsumexp")), (m, d, k, outs[k], w)
        neutral = [o.numpy() for o in outs[-count:]]
        if count == 1:
            with np.errstate(all="ignore"):
                assert equal(PAIRWISE[m](x.astype(fold_type(d)), neutral[0].astype(fold_type(d))).astype(x.dtype), x).all() or m == "sum", (m, d)
        else:
            i = np.broadcast_to(np.arange(8)[None, :, None], SHAPE)
            assert all(equal(a, b).all() for a, b in zip(better(m, np.broadcast_to(neutral[0], SHAPE), neutral[1], x, i), (x, i))), (m, d)


def test_folds(tmp_path):
    judge_folds(interpret(FOLD_TEXT, [fold_call(m, d) for m, d in FOLDS], tmp_path))


LATER = [(m, d) for m, count in MONOIDS.items() if count == 2 for d in (F32, F64, I8, U8)]


def test_combination_with_later_indices(tmp_path):
    """As the general one, where the second's indices come after the first's; NaN included, in all pairs of special values."""
    text = "".join(elementwise(f"{m}_{d}", [d, d], triton_ops.combine(m, ("x0", "(at * 0)"), ("x1", "(at * 0 + 1)"), later=True)[1])
                   for m, d in LATER)
    found = interpret(text, [elements(f"{m}_{d}", [torch.from_numpy(a) for a in pairs(d, 2)], torch.int32) for m, d in LATER], tmp_path)
    for (m, d), (out, _) in zip(LATER, found):
        a, b = pairs(d, 2)
        assert (out[0].numpy() == better(m, a, np.zeros(len(a), int), b, np.ones(len(a), int))[1]).all(), (m, d)


# -- random numbers ------------------------------------------------------------------------------------------------
RANDOM_KERNELS = ("uniform", "normal", "uniform_run")
RUN = triton_ops.uniform_run("tl.load(p0)", f"tl.load(p1) + tl.arange(0, {BLOCK // 4}) * 4")
RANDOM_TEXT = "".join([*(elementwise(kind, [I64, I64], triton_ops.random(kind, "x0", "x1")) for kind in ("uniform", "normal")),
                       elementwise("uniform_run", [I64, I64], RUN)])


def random_arguments() -> tuple[np.ndarray, np.ndarray]:
    seeds = np.array([0, 1, -1, 2**40 + 3, -2**63, 12345] * 200, np.int64)
    at = np.concatenate([np.arange(600), 2**32 + np.arange(300), np.random.default_rng(0).integers(-2**63, 2**63 - 1, 300)]).astype(np.int64)
    return seeds, at


RUNS = ((7, 0), (-3, 2**34 - 64), (2**40 + 3, -64))         # (seed, first number): runs that cross where the words of a counter carry


def random_calls() -> list[Call]:
    calls = [elements(kind, [torch.from_numpy(a) for a in random_arguments()], torch.float32) for kind in ("uniform", "normal")]
    return calls + [elements("uniform_run", [torch.from_numpy(a) for a in (np.full(BLOCK, s), np.full(BLOCK, n))], torch.float32) for s, n in RUNS]


def judge_random(found) -> None:
    """Assert that uniform numbers are the CPU's, and normal ones near them."""
    seeds, at = random_arguments()
    uniform, normal, *runs = (out[0].numpy() for out, _ in found)
    for (seed, first), numbers in zip(RUNS, runs, strict=True):
        assert (numbers == random("uniform", np.int64(seed), first + np.arange(BLOCK))).all()
    assert (uniform == random("uniform", seeds, at)).all()
    wanted = random("normal", seeds, at)
    assert np.abs(normal - wanted).max() <= 2e-6


def test_random_numbers(tmp_path):
    judge_random(interpret(RANDOM_TEXT, random_calls(), tmp_path))
