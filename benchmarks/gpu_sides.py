"""One case under one side: compile, first call, right or wrong, peak memory, times."""
from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .gpu_case import Case
from .gpu_measure import Times, errors, right, worst as _worst

SIDES = ("eager", "inductor", "tokamak")
AUTOTUNED = "autotune"          # Inductor with max-autotune
WAYS = ("kernels", "vendor")    # tokamak, with all contractions as kernels that can be, and with none
SYMBOLIC = "symbolic"           # tokamak, with every size of the inputs symbolic


def compiled(side: str, fn: Callable, cached: bool = False, **options) -> Callable:
    """`fn` under a side: itself, or compiled with caches off (see `cold`) unless `cached`, as users call it, for static sizes but on the side
    SYMBOLIC. `options` are tokamak's. The sides WAYS say what makes contractions."""
    if side in WAYS:
        return compiled("tokamak", fn, cached, contractions=side, **options)
    if side == "eager":
        return fn
    if side in ("inductor", AUTOTUNED):
        return torch.compile(fn, dynamic=False, mode="max-autotune-no-cudagraphs" if side == AUTOTUNED else None)
    from tokamak.backend import backend
    return torch.compile(fn, dynamic=side == SYMBOLIC,
                         backend=functools.partial(backend, options={**({} if cached else {"cache_dir": ""}), **options}))


@contextlib.contextmanager
def multiplying(case: Case):
    """The precision of float32 products that the case allows."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def warm():
    """As `cold`, with what the caches hold."""
    import torch._functorch.config as functorch
    torch._dynamo.reset()
    with functorch.patch(donated_buffer=False), warnings.catch_warnings():
        warnings.filterwarnings("error", message="tokamak: ")
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def cold():
    """Nothing that was compiled before is known: fresh folders for Inductor's and Triton's caches, Dynamo's code forgotten. Backward graphs may be
    walked many times (no donated buffers), since that is what times them. A graph that falls back to eager raises."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache
    torch._dynamo.reset()
    off = inductor.patch(force_disable_caches=True, fx_graph_cache=False), functorch.patch(donated_buffer=False, enable_autograd_cache=False)
    with off[0], off[1], dynamo.patch(automatic_dynamic_local_pgo=False,
                                      automatic_dynamic_remote_pgo=False), fresh_cache(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="tokamak: ")
        yield
    torch._dynamo.reset()


@contextlib.contextmanager
def kept():
    """As `cold`, with the caches as they are."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="tokamak: ")
        yield
    torch._dynamo.reset()


# -- calls -------------------------------------------------------------------------------------------------------------------
def leaves(inputs) -> list[torch.Tensor]:
    return [x for x in inputs if x.requires_grad]


def forward(case: Case, fn: Callable, inputs):
    """The output, with the graph that its backward pass needs if the case has one."""
    with torch.no_grad() if case.mode == "forward" else contextlib.nullcontext():
        return fn(*inputs)


def gradient(out: torch.Tensor, seed: int) -> torch.Tensor:
    """The incoming gradient of a backward case, laid out as the output: one for a loss, else random, the same values for every layout."""
    if out.dim() == 0:
        return torch.ones_like(out)
    values = torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=torch.Generator(out.device).manual_seed(seed + 1))
    return torch.empty_like(out, requires_grad=False).copy_(values)


def once(case: Case, fn: Callable, inputs, seed: int):
    """What is compared: outputs and changed buffers, or, of a case with a backward pass, the output and every gradient."""
    out = forward(case, fn, inputs)
    if case.mode != "forward":
        return [out.detach(), *torch.autograd.grad(out, leaves(inputs), gradient(out, seed))]
    return [out, [x for x, s in zip(inputs, case.specs) if s.role == "buffer"]]


def repeated(case: Case, fn: Callable, inputs, seed: int) -> Callable:
    """What is timed: a call under no_grad, a backward pass alone, or both passes of a step."""
    if case.mode == "forward":
        return lambda: forward(case, fn, inputs)
    out = forward(case, fn, inputs)
    dy, wanted = gradient(out, seed), leaves(inputs)
    if case.mode == "step":
        return lambda: torch.autograd.grad(forward(case, fn, inputs), wanted, dy)
    return lambda: torch.autograd.grad(out, wanted, dy, retain_graph=True)


def timed_graphs(case: Case, graphs) -> list:
    """Of the graphs that a recorder has of a case, those that are timed."""
    return [g for g in graphs if not (case.mode == "backward" and g.kind == "forward")]


def own(case: Case, inputs) -> list[torch.Tensor]:
    """The inputs with buffers of their own, which calls change."""
    return [x.clone() if s.role == "buffer" else x for x, s in zip(inputs, case.specs)]


def steady(case: Case) -> Callable:
    return case.recipe.steady or case.fn


def reference(case: Case, inputs, seed: int):
    """The case in float64, eagerly, on the same values and the same incoming gradient."""
    doubles = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in own(case, inputs)]
    out = forward(case, steady(case), doubles)
    if case.mode == "forward":
        return [out, [x for x, s in zip(doubles, case.specs) if s.role == "buffer"]]
    shape = torch.empty_like(out, dtype=_out_dtype(case))
    return [out.detach(), *torch.autograd.grad(out, leaves(doubles), gradient(shape, seed).double())]


def _out_dtype(case: Case) -> torch.dtype:
    meta = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in case.specs]
    return tree_leaves(case.fn(*meta))[0].dtype


def dropped(case: Case, fn: Callable, inputs) -> float:
    """The share of the first stream that `fn` sets to zero, read off a run on ones with everything else neutral: far below their row's mean after
    the norm. In a backward case no gradient may reach what was dropped, and nearly all else must have one (16-bit gradients underflow); -1 if not."""
    plain = [(torch.ones_like(x) if i == 0 or s.mean == 1.0 else torch.zeros_like(x)).requires_grad_(x.requires_grad)
             for i, (x, s) in enumerate(zip(inputs, case.specs))]
    out = forward(case, fn, plain)
    lost = out.detach() < -0.5
    if case.mode != "forward":
        found, = torch.autograd.grad(out, plain[:1], gradient(out, 0))
        if bool(found[lost].any()) or float(((found == 0) & ~lost).float().mean()) > 0.01:
            return -1.0
    return float(lost.float().mean())


def honest(case: Case, share: float) -> bool:
    """Whether so large a share of the first stream set to zero is what the case asks for, give or take five standard deviations."""
    wanted = case.recipe.dropped
    return abs(share - wanted) <= 5 * (wanted / max(math.prod(case.specs[0].shape), 1)) ** 0.5


# -- one side ----------------------------------------------------------------------------------------------------------------
def measure(case: Case, side: str, inputs, expected, timer: Callable[[Callable], Times], seed: int = 0, cached: bool = False) -> dict:
    """Figures of one side. Times in seconds, `peak` in bytes above the inputs, `error` and `peak_error` against float64 (see `gpu_measure.errors`),
    `right`; of tokamak `left`: why contractions stayed with the vendor's library. `cached`: compiled with what the caches hold, so that nothing is
    said of first calls. Raises whatever the side raises."""
    inputs = own(case, inputs)
    with warm() if cached else cold(), multiplying(case):
        fn = compiled(side, case.fn, cached=cached)
        with reasons(case, side) as left:
            first, value = _timed(inputs, lambda: once(case, fn, inputs, seed))
        found = [errors(_steady_value(case, side, inputs, seed) if case.recipe.steady else value, expected)]
        value = None
        share = dropped(case, fn, inputs) if case.recipe.dropped else 0.0
        peak = _peak(lambda: once(case, fn, inputs, seed), inputs)
        times, late = _repeat(case, fn, inputs, expected, timer, seed)
    worst = _worst(e[0] for e in (*found, late)), _worst(e[1] for e in (*found, late))
    good = right(worst, case.dtype, case.tf32) and honest(case, share)
    return {"device": times.device, "wall": times.wall, "kernels": times.kernels, "first": first, "peak": peak,
            "error": worst[0], "peak_error": worst[1], "right": bool(good), "names": [[n[:120], t] for n, t in times.names[:4]], "left": left}


@contextlib.contextmanager
def reasons(case: Case, side: str):
    """Filled with why each contraction of a forward pass under tokamak stays with the vendor's library."""
    found: list[str] = []
    if side != "tokamak" or case.group not in ("gemm", "mlp"):
        yield found
        return
    from tokamak.tools.record import recording
    with recording() as recorder:
        yield found
    graphs = (r.values["contract"] for r in recorder.graphs if "contract" in r.values)
    found += [n.reason for g in graphs for n in g.nodes if getattr(n, "reason", "").startswith("contraction ")]


def _repeat(case: Case, fn: Callable, inputs, expected, timer, seed: int) -> tuple[Times, tuple[float, float]]:
    """Times, and the errors of a call after the timed ones: what a kernel leaves behind must not reach the next call."""
    call = repeated(case, fn, inputs, seed)
    times = timer(call)
    if case.recipe.steady:
        return times, (0.0, 0.0)
    return times, errors(call(), expected[:1] if case.mode == "forward" else expected[1:])


def _timed(inputs, fn: Callable) -> tuple[float, Any]:
    """(seconds, value) of one call."""
    _wait(inputs)
    start = time.perf_counter()
    value = fn()
    _wait(inputs)
    return time.perf_counter() - start, value


def _steady_value(case: Case, side: str, inputs, seed: int):
    """The value of the function without its random numbers, compiled for itself."""
    return once(case, compiled(side, steady(case)), inputs, seed)


def _wait(inputs) -> None:
    if inputs[0].is_cuda:
        torch.cuda.synchronize()


def _peak(fn: Callable, inputs) -> int:
    """Bytes that a call takes at its worst, above what is held before it; 0 on a device that does not count."""
    if not inputs[0].is_cuda:
        return 0
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
