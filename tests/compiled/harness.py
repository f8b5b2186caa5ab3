"""Compiled code against eager, without Dynamo: AOTAutograd traces a function and the compiler takes each graph.

    seen = agree(fn, tensors)               # AssertionError where type, shape, strides, values or mutated arguments differ
    seen = agree(fn, tensors, grad=True)    # the gradients too
    seen = agree(fn, tensors, target="interpret")

`target`: "" is C on the CPU, "interpret" tiles through Triton's interpreter, "cuda" tiles on the GPU, where eager runs too.
Integers and bools must be equal. A float may differ from eager by a few roundings, or be no further from what float64 gives than a few times
eager's own error.
"""
from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field

import torch
from functorch.compile import aot_function, make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.capture.through_reference import seeded, tangent_format
from tokamak.backend import compile_graph
from tokamak.capture import aot, decompose
from tokamak.capture.fx import Unsupported
from tokamak.ir.graph import Opaque
from tokamak.options import Options

TOLERANCE = {torch.float64: (1e-7, 1e-7), torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 8e-3)}
SEED = 42            # what torch's operator database seeds eager calls with
FURTHER = 4          # times eager's largest error that a result may be from float64's


@functools.cache
def cache() -> str:
    """Where the tests of one process keep built kernels."""
    found = tempfile.TemporaryDirectory(prefix="tokamak-test-")
    cache.keep = found
    return found.name


class CompilerFailed(Exception):
    """The compiler raised (the cause says what)."""


@dataclass
class Seen:
    """What the compiler met. `opaque`: operator -> reason; `graphs`, `kernels`: how many."""
    opaque: dict[str, str] = field(default_factory=dict)
    graphs: int = 0
    kernels: int = 0


def compiler(seen: Seen, policy: str = "fast", cache_dir: str | None = None, target: str = ""):
    """A compiler for AOTAutograd that notes in `seen` what it met."""
    options = Options(policy=policy, strict=True, cache_dir=cache() if cache_dir is None else cache_dir,
                      target="interpret" if target == "interpret" else "")

    def trace(stage, value):
        if stage == "capture":
            seen.graphs += 1
            seen.opaque.update({str(n.target): n.reason for n in value.nodes if isinstance(n, Opaque)})
        elif stage == "lower":
            seen.kernels += len(value.kernels)
        return value

    def compile(gm, inputs):
        try:
            made = compile_graph(gm, inputs, options, trace)
        except Unsupported as why:
            seen.opaque["the whole graph"] = str(why)
            return aot.eager(gm)
        except Exception as error:
            raise CompilerFailed(f"{type(error).__name__}: {error}") from error
        return made if getattr(made, "_boxed_call", False) else make_boxed_func(made)
    return compile


def compiled(fn, seen: Seen, policy: str = "fast", cache_dir: str | None = None, target: str = "", dynamic: bool = False):
    """`fn` (tensors in, a pytree of tensors out) compiled; `dynamic`: for symbolic sizes."""
    one = compiler(seen, policy, cache_dir, target)
    return aot_function(fn, fw_compiler=one, bw_compiler=one, inference_compiler=one, keep_inference_input_mutations=True,
                        decompositions=decompose.TRAINING if target else decompose.ALWAYS, dynamic=dynamic)


def agree(fn, tensors, grad: bool = False, policy: str = "fast", cache_dir: str | None = None, calls: int = 1,
          target: str = "") -> Seen:
    """Compares compiled `fn(*tensors)` with eager, and with `grad` its gradients; what the compiler met."""
    seen = Seen()
    run = compiled(fn, seen, policy, cache_dir, target)
    device = "cuda" if target == "cuda" else None
    for _ in range(calls):
        want, got, exact = twins(tensors, device=device), twins(tensors, device=device), twins(tensors, torch.float64, device)
        with torch.set_grad_enabled(grad):
            results = []
            for one, args in ((fn, want), (run, got)):
                seeded(SEED)
                made = leaves(one(*args))
                results.append((made, gradients(made, args) if grad else []))
            (outs, grads), (mine, mine_grads) = results
            precise = functools.cache(lambda: plain_run(fn, exact, grad))
            traced = functools.cache(lambda: traced_run(fn, want, grad))
            same("result", mine, outs, lambda i: precise()[0][i], lambda i: traced()[0][i])
            same("gradient", mine_grads, grads, lambda i: precise()[1][i], lambda i: traced()[1][i])
            same("argument", [t.detach() for t in got], [t.detach() for t in want], lambda i: exact[i].detach(), lambda i: want[i])
    return seen


def plain_run(fn, tensors, grad: bool):
    """Results and gradients of an eager run; empty where torch refuses it."""
    seeded(SEED)
    try:
        made = leaves(fn(*tensors))
        return made, gradients(made, tensors) if grad else []
    except (RuntimeError, ValueError, TypeError, IndexError):
        return [], []


def traced_run(fn, tensors, grad: bool):
    """The same with torch's fake tensors: what AOTAutograd is told of results. Now and then its strides are not those of a real run."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return plain_run(fn, [mode.from_tensor(t.detach()).requires_grad_(t.requires_grad) for t in tensors], grad)


def twins(tensors, floats: torch.dtype | None = None, device: str | None = None) -> list[torch.Tensor]:
    """Copies with memory, strides and offset of their own; floating ones in type `floats` when given, on `device` when given."""
    out = []
    for t in tensors:
        d = t.detach()
        wanted = floats if floats is not None and d.is_floating_point() else d.dtype
        memory = d.as_strided((d.untyped_storage().nbytes() // d.element_size(),), (1,), 0).clone()
        copy = memory.to(device=device, dtype=wanted).as_strided(d.shape, d.stride(), d.storage_offset())
        out.append(copy.requires_grad_(t.requires_grad))
    return out


def leaves(made) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(made) if x is not None]


def gradients(outs, inputs) -> list[torch.Tensor]:
    outs = [x for x in outs if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [t for t in inputs if t.requires_grad]
    g = torch.Generator().manual_seed(1)
    directions = [torch.empty_like(x, memory_format=tangent_format(x)).copy_(torch.rand(x.shape, generator=g)) for x in (o.detach() for o in outs)]
    return [x for x in torch.autograd.grad(outs, inputs, directions, allow_unused=True) if x is not None] if outs and inputs else []


def same(kind: str, got, want, precise, traced) -> None:
    """Every one like eager's; `precise(i)` gives number i in float64, `traced(i)` as torch's fake tensors see it (IndexError when there is none)."""
    assert len(got) == len(want), f"{len(got)} {kind}s, eager {len(want)}"
    for i, (g, w) in enumerate(zip(got, want)):
        if not isinstance(w, torch.Tensor):
            assert g == w, f"{kind} {i}: {g}, eager {w}"
            continue
        assert g.dtype is w.dtype and g.shape == w.shape, f"{kind} {i}: {g.dtype} {tuple(g.shape)}, eager {w.dtype} {tuple(w.shape)}"
        if w.layout is not torch.strided:
            continue
        fit = same_strides(g, w) or same_strides(g, traced(i))
        assert fit, f"{kind} {i}: strides {g.stride()}, eager {w.stride()} of shape {tuple(w.shape)}"
        wrong = differing(g.detach(), w.detach(), functools.partial(precise, i))
        if wrong is not None:
            raise AssertionError(f"{kind} {i}: {wrong}")


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == 0 or all(n == 1 or p == q for n, p, q in zip(a.shape, a.stride(), b.stride()))


def differing(got: torch.Tensor, want: torch.Tensor, precise) -> str | None:
    """Where `got` is wrong, or None."""
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        bad = got != want
    else:
        rtol, atol = TOLERANCE.get(want.dtype, (1e-5, 1e-5))
        bad = ~torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
        if bool(bad.any()):
            bad &= ~_as_good(got, want, precise)
    if not bool(bad.any()):
        return None
    spot = tuple(bad.nonzero()[0].tolist())
    return f"{int(bad.sum())} of {bad.numel()} elements differ, first at {spot}: {got[spot].item()!r}, eager {want[spot].item()!r}"


def _as_good(got: torch.Tensor, want: torch.Tensor, precise) -> torch.Tensor:
    """Where `got` is not much further from float64 than `want` is anywhere."""
    try:
        exact = precise()
    except IndexError:
        return torch.zeros((), dtype=torch.bool)
    if not isinstance(exact, torch.Tensor) or exact.shape != want.shape or exact.dtype is not torch.float64:
        return torch.zeros((), dtype=torch.bool)
    exact = exact.detach()
    both = exact.isfinite() & want.isfinite()
    eager = float((want.double() - exact)[both].abs().max()) if bool(both.any()) else 0.0
    eps = torch.finfo(want.dtype).eps
    bound = torch.maximum(torch.tensor(FURTHER * eager, dtype=torch.float64), 2 * eps * exact.abs())
    return exact.isfinite() & ((got.double() - exact).abs() <= bound) | exact.isnan() & got.isnan() | (exact == got.double())
