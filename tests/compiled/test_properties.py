"""Random programs, compiled, against eager and against the reference. A failing example prints as a few lines of source that run as they are."""
from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function
from hypothesis import HealthCheck, Phase, given, reject, settings, strategies as st

from tests.compiled.harness import Seen, agree, compiled, compiler, gradients, leaves, same_strides, traced_run, twins
from tests.graphs import FAMILIES, programs, shared
from tests.ir.test_programs import array, call
from tokamak.capture.fx import Capture
from tokamak.ir.reference import evaluate

EXAMPLES = int(os.environ.get("TOKAMAK_TEST_EXAMPLES", "0"))       # for long hunts
FEW = settings(max_examples=EXAMPLES or 30, derandomize=not EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck),
               report_multiple_bugs=False, phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate])
EXACT = (torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


SETTINGS = {"": FEW, "interpret": settings(FEW, max_examples=EXAMPLES or 6), "cuda": FEW}


@pytest.fixture
def holds(target):
    """holds(programs, check): `check(program, target)` for many programs; few in the interpreter."""
    def run(strategy, check):
        def one(program):
            check(program, target)
        SETTINGS[target](given(strategy)(one))()
    return run


def close(got: torch.Tensor, want: torch.Tensor, tolerance: dict, traced=None) -> None:
    """Type, shape, strides and values; a float that need not be rough may still be off by a last place (a product and a sum that
    round once). `traced` gives the result as torch's fake tensors see it; without it strides are not looked at."""
    assert got.dtype is want.dtype and got.shape == want.shape
    assert traced is None or same_strides(got, want) or same_strides(got, traced()), f"strides {got.stride()}, eager {want.stride()}"
    if want.dtype.is_floating_point and not tolerance["rtol"]:
        tolerance = {"rtol": 2 * torch.finfo(want.dtype).eps, "atol": 2 * torch.finfo(want.dtype).tiny}
    torch.testing.assert_close(got.detach(), want.detach(), equal_nan=True, **tolerance)


def check(program, policy: str, target: str, dynamic: bool = False) -> Seen:
    """The compiled program, called twice, gives what eager gives, writes into its arguments what eager writes, and shows of them what eager shows."""
    seen = Seen()
    run = compiled(program.fn, seen, policy, target=target, dynamic=dynamic)
    given = twins(program.inputs, device="cuda" if target == "cuda" else None)
    written = twins(given)
    try:
        want = program.fn(*written)
    except NotImplementedError:         # torch lacks some operators of some types on GPUs (a scatter of bool)
        reject()
    for _ in range(2):
        args = twins(given)
        got = leaves(run(*args))
        assert len(got) == len(want)
        for i, (g, w) in enumerate(zip(got, want)):
            close(g, w, program.tolerance(i, w), lambda i=i: traced_run(program.fn, twins(given), False)[0][i])
            for a, b in zip(args, written):
                assert not w.numel() or shared(g, a) == shared(w, b) and (not shared(w, b) or g.storage_offset() == w.storage_offset())
        for i, (a, b) in enumerate(zip(args, written)):
            close(a, b, program.tolerance_after(i, b))
    return seen


def test_every_type_with_eagers_rounding(holds):
    holds(programs(), lambda program, target: check(program, "eager", target))


def test_types_without_rounding_between(holds):
    holds(programs(dtypes=EXACT), lambda program, target: check(program, "fast", target))


def test_movement_and_folds(holds):
    holds(programs(families=("view", "join", "fold", "scan", "gather", "scatter", "cast"), lines=6),
          lambda program, target: check(program, "eager", target))


def test_chains_of_folds(holds):
    holds(programs(families=("view", "pointwise", "binary", "fold"), dtypes=(torch.float32,), lines=12, special=False),
          lambda program, target: check(program, "fast", target))


def test_writes_in_place(holds):
    holds(programs(families=(*FAMILIES, "write", "write", "write")), lambda program, target: check(program, "fast", target))


def test_symbolic_sizes(holds):
    holds(programs(families=(*FAMILIES, "write")), lambda program, target: check(program, "fast", target, dynamic=True))


def test_gradients(holds):
    holds(programs(dtypes=(torch.float64,), special=False, lines=6), check_gradients)


def check_gradients(program, target: str) -> None:
    seen = Seen()
    want, got = (twins(program.inputs, device="cuda" if target == "cuda" else None) for _ in range(2))
    found = []
    for fn, args in ((program.fn, want), (compiled(program.fn, seen, target=target), got)):
        args = [t.requires_grad_() if t.is_floating_point() else t for t in twins(args)]
        outs = leaves(fn(*args))
        found.append([*outs, *gradients(outs, args)])
    assert len(found[0]) == len(found[1])
    for g, w in zip(found[1], found[0]):
        bound = 1e-9 if w.dtype.is_floating_point else 0
        close(g, w, {"rtol": bound, "atol": bound * program.scale**2})


WINDOWS = {             # pooling with dilation is left out: where a window lies in the padding alone, torch's own backward writes outside its memory
    "unfold": lambda x, k, s, p, d: F.unfold(x, k, d, p, s),
    "fold": lambda x, k, s, p, d: F.fold(F.unfold(x, k, d, p, s), x.shape[-2:], k, d, p, s),
    "average": lambda x, k, s, p, d: F.avg_pool2d(x, k, s, [min(a, b // 2) for a, b in zip(p, k)], ceil_mode=True),
    "largest": lambda x, k, s, p, d: F.max_pool2d(x, k, s, [min(a, b // 2) for a, b in zip(p, k)], ceil_mode=True),
}


@st.composite
def windows(draw):
    """(name, arguments, image): sizes and windows of either direction, images of one pixel too."""
    pair = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))
    size = draw(st.sampled_from([1, 2, 3, 7])), draw(st.sampled_from([1, 2, 5, 8]))
    return draw(st.sampled_from(sorted(WINDOWS))), (pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2)), (2, 3, *size)


def test_windows(holds):
    holds(windows(), check_windows)


def check_windows(drawn, target: str) -> None:
    name, arguments, shape = drawn
    fn = lambda x: WINDOWS[name](x * 2 + 1, *arguments)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), requires_grad=True)
    try:
        fn(x)
    except RuntimeError:                # no window fits
        reject()
    agree(fn, [x], grad=True, target=target)


@FEW
@given(programs(lines=6))
def test_reference_agrees(program):
    """The reference's values of the captured graph are the compiled program's, to the same tolerance as eager's."""
    graphs = []

    def both(gm, inputs):
        run = compiler(Seen(), "eager")(gm, inputs)
        capture = Capture(gm, "eager")
        graph = capture.graph()

        def step(args):
            data = [array(a) if isinstance(a, torch.Tensor) else a for a in args]
            constants = {node: array(t) for node, t in capture.constants.items()}
            graphs.append(evaluate(graph, data, constants=constants, opaque=call).outputs)
            made = run(args)
            graphs[-1] = list(zip(graphs[-1], made))
            return made
        step._boxed_call = True
        return step
    aot_function(program.fn, fw_compiler=both, inference_compiler=both)(*program.inputs)
    for i, (meant, made) in enumerate(graphs[0] if graphs else ()):
        if isinstance(made, torch.Tensor):
            close(made, torch.from_numpy(np.array(meant)).to(made.dtype).reshape(made.shape), program.tolerance(min(i, len(program.rough) - 1), made))
