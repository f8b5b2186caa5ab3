"""`TOKAMAK_CHECK=1`: every call of a compiled graph is compared with the language's meaning in NumPy (`ir.reference`).

    watched(plan)                            the plan whose program also returns every value that a kernel or an opaque call made
    checked(call, captured, plan, constants) the function that makes the call, compares, and returns what the call returned
    differences(graph, args, ...)            the same comparison, for who wants to know of every difference (`tokamak.verify`)

Each stored value is compared with the reference's value of the same node *from the stored values that it was computed from*, so errors do not
add up and the first difference is where the bug is. What must agree, n being how many elements a fold takes in:

    integers, bool   exactly; computed from floats within the kernel, all but one in a hundred (and three): a rounding may fall on either side
    floats           |a - b| <= STEPS eps (|b| + sqrt(n) * the largest magnitude read or made): any order of a sum, and polynomials for functions
                     eps is that of the coarsest type met since the last stored value, a 16-bit one counted twice (rounded, or not, on the way)
    inf, nan         at the same elements

The graph as it was captured is evaluated as well, and its outputs are compared by norm: this shows a wrong rewrite. Opaque calls are made again
by torch, but for those that draw random numbers or leave memory as it is: their results, the seeds of our own random numbers among them, are
given to the reference. Slow: for finding bugs.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .capture.dtypes import TORCH_DTYPES
from .errors import CheckFailed
from .fuse.axes import Group
from .fuse.plan import Plan
from .ir.dtype import F64, DType
from .ir.expr import Expr, Load, Op, Reduce, Scan, walk
from .ir.graph import Compute, Graph, Input, Opaque, Result, Scatter, View, reads
from .ir.index import as_index
from .ir.reference import Evaluation, evaluate
from .nesting import deep

STEPS = 256
EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}
NORM = {"f64": 1e-8, "f32": 1e-3, "f16": 3e-2, "bf16": 1e-1}
_MEMORY_AS_IT_IS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


def watched(plan: Plan) -> Plan:
    """`plan` with every stored value among the outputs, behind the program's own."""
    shown = tuple(View(n, n.shape, n.strides, as_index(0)) for n in _stored(plan))
    return replace(plan, graph=replace(plan.graph, outputs=plan.graph.outputs + shown))


def _stored(plan: Plan) -> list:
    kept = {n for s in plan.steps if isinstance(s, Group) for n in plan.stores[s]}
    return [n for n in plan.graph.nodes if n in kept or isinstance(n, Result) and _dense(n)]


def _dense(n: Result) -> bool:
    return n.dtype in TORCH_DTYPES or n.dtype.name.startswith("complex")


@dataclass(frozen=True, eq=False)
class Seen:
    """What one call got and made: `args` before it ran, `constants`, and the `values` that were stored, all as the reference has them."""
    args: list
    constants: Mapping
    values: Mapping


def checked(call: Callable[[list], list], captured: Graph, plan: Plan, constants: Mapping[Input, torch.Tensor],
            report: Callable[[Seen], object] | None = None) -> Callable[[list], list]:
    """`call` runs the program of `watched(plan)`. The result raises CheckFailed where a value differs from the reference's; given `report`, it tells
    that of the first call instead, and compares nothing."""
    stored = _stored(plan)
    known: dict = {}            # filled at the first call: torch's fake tensors are about while a graph is compiled
    told = []

    def run(args: list) -> list:
        kept = list(args)
        if not known:
            known.update((n, _array(t)) for n, t in constants.items())
        before = [_array(a) for a in args] if report is None or not told else []
        found = call(args)
        cut = len(found) - len(stored)
        outputs, values = found[:cut], dict(zip(stored, found[cut:]))
        if report is not None:
            if not told:
                told.append(report(Seen(before, known, {n: _array(t) for n, t in values.items()})))
            return outputs
        _compare(plan, before, known, outputs, values, kept)
        _compare_captured(captured, before, known, outputs, {n: v for n, v in values.items() if isinstance(n, Result)})
        return outputs
    run._boxed_call = True
    return run


# -- comparing -----------------------------------------------------------------------------------------------------------
def differences(graph: Graph, args: list, constants: Mapping, made: Mapping, found: Callable[[Any, str], object]) -> Evaluation:
    """The reference's evaluation of `graph`, in which every value of `made` (node -> array) takes the place of the reference's for its readers.
    `found(node, words)` is told of those that differ by more than is allowed."""
    eps: dict = {}
    cancelled: dict = {}            # node -> the largest of the terms that sums took in since the last stored values: what they gave may be nothing

    def observe(node, value: np.ndarray, seen: Mapping) -> np.ndarray:
        eps[node] = _coarsest(node, eps)
        terms = max((cancelled.get(r, 0.0) for r in reads(node)), default=0.0)
        if node not in made:
            cancelled[node] = max([terms, *(_magnitude(seen[r]) for r in reads(node) if r in seen)]) if _folds(node) else terms
            return value
        wrong = _difference(node, made[node], value, seen, eps[node], terms)
        if wrong:
            found(node, wrong)
        eps[node] = 0.0
        return made[node]
    with deep():
        return evaluate(graph, args, constants=constants, opaque=_opaque(made), observe=observe)


def _compare(plan: Plan, before: list, known: dict, outputs: list, values: dict, kept: list) -> None:
    graph = plan.graph

    def fail(node, wrong: str):
        raise CheckFailed(f"{_place(graph, node)} differs from the reference: {wrong}")
    expected = differences(graph, before, known, {n: _array(t) for n, t in values.items()}, fail)
    for i, (got, want) in enumerate(zip(outputs, expected.outputs)):
        if isinstance(want, np.ndarray) and not np.array_equal(_array(got), want, equal_nan=want.dtype.kind == "f"):
            raise CheckFailed(f"output {i} is not the value that it is a view of, {_place(graph, graph.outputs[i].node)}")
    for target, want in expected.writes.items():
        got = _array(kept[graph.inputs.index(target)])
        if not np.array_equal(got, want, equal_nan=want.dtype.kind == "f"):
            raise CheckFailed(f"the input {target.name} did not receive its new value, {_place(graph, target)}")


def _coarsest(node, eps: Mapping) -> float:
    """eps of the coarsest floating type that `node` is computed in since the last stored values."""
    inner = [eps.get(r, 0.0) for r in reads(node)]
    types = [e.dtype for r in _roots(node) for e in walk(r) if not isinstance(e, Load)] + [node.dtype] if hasattr(node, "dtype") else []
    return max([*inner, *(_step(d) for d in types)], default=0.0)


def _step(d: DType) -> float:
    """A 16-bit type's step is counted whole, other types' STEPS times: an order of summation moves an f32 sum, not a rounding to 16 bits."""
    return 0.0 if not d.is_float else 4 * EPS[d.name] if d.is_half else STEPS * EPS[d.name]


def _roots(node) -> tuple[Expr, ...]:
    if isinstance(node, Compute):
        return (node.expr,)
    return (node.value,) if isinstance(node, Scatter) else ()


def _difference(node, got: np.ndarray, want: np.ndarray, seen: Mapping, eps: float, terms: float) -> str:
    """What is wrong, or ''. `seen`: the values so far; `terms`: the largest of what sums before it took in."""
    if node.dtype.kind == "x":
        return ""                   # torch's own call made it
    if node.dtype.kind != "f":
        wrong = got != want
        allowed = max(3, wrong.size // 100) if _rounded(node) else 0
        return f"{int(wrong.sum())} of {wrong.size} elements" if int(wrong.sum()) > allowed else ""
    finite = np.isfinite(want)
    other = ~finite & ~((got == want) | np.isnan(got) & np.isnan(want))
    if np.any(other) or np.any(finite & ~np.isfinite(got) & (np.abs(want) < 0.9 * _largest(node.dtype))):
        return "an infinity or NaN at another element"
    with np.errstate(all="ignore"):
        error = np.where(finite & np.isfinite(got), np.abs(got.astype(np.float64) - want), 0)
        scale = max([_magnitude(want), terms, *(_magnitude(seen[r]) for r in reads(node) if r in seen)])
        bound = max(eps, _step(node.dtype)) * (np.abs(want.astype(np.float64)) + math.sqrt(_folded(node, seen)) * scale)
    if not np.any(error > bound):
        return ""
    worst = np.unravel_index(np.argmax(error - np.where(finite, bound, 0)), error.shape)
    return (f"largest error {error[worst]:.3g} at {tuple(map(int, worst))}: {got[worst]!s} for {want[worst]!s}, "
            f"allowed {bound[worst] if np.ndim(bound) else bound:.3g}")


def _rounded(node) -> bool:
    """Are integers made here from floats that were computed here?"""
    return any(isinstance(e, (Op, Reduce, Scan)) and e.dtype.is_float for r in _roots(node) for e in walk(r)) or \
        any(getattr(r, "dtype", F64).is_float and isinstance(r, (Compute, Scatter)) for r in reads(node))


def _folds(node) -> bool:
    return any(isinstance(e, (Reduce, Scan)) for r in _roots(node) for e in walk(r))


def _folded(node, seen: Mapping) -> float:
    """How many elements one result takes in, at most."""
    read = max((seen[r].size for r in reads(node) if r in seen), default=1)
    folds = _folds(node) or isinstance(node, Scatter)
    return max(1.0, read) if folds else 1.0


def _magnitude(x) -> float:
    x = np.asarray(x)
    if x.dtype.kind not in "fiu" or not x.size:
        return 0.0
    x = np.abs(x.astype(np.float64))
    return float(np.max(np.where(np.isfinite(x), x, 0)))


def _largest(d: DType) -> float:
    return torch.finfo(TORCH_DTYPES[d]).max


def _compare_captured(captured: Graph, before: list, known: dict, outputs: list, results: Mapping) -> None:
    """Outputs against the graph before any rewrite, by norm; opaque calls' results are the call's own. Calls that the program has not made, since
    kernels or other calls stand for them, torch makes here."""
    had = {(id(r.opaque.results), r.position): _array(t) for r, t in results.items()}      # rewrites keep a call's tuple of results
    absent = {n.opaque for n in captured.nodes if isinstance(n, Result) and (id(n.opaque.results), n.position) not in had}
    if not all(map(_repeatable, absent)):
        return                                   # a value that no array holds, or that nobody has
    by_torch = _opaque({})

    def opaque(call, args, kwargs):
        return by_torch(call, args, kwargs) if call in absent else [had.get((id(call.results), i)) for i in range(len(call.results))]
    with deep():
        expected = evaluate(captured, before, constants=known, opaque=opaque)
    for i, (got, want, view) in enumerate(zip(outputs, expected.outputs, captured.outputs)):
        if not isinstance(want, np.ndarray) or not view.node.dtype.is_float:
            continue
        got, want = _array(got).astype(np.float64), want.astype(np.float64)
        both = np.isfinite(got) & np.isfinite(want)
        error, size = float(np.linalg.norm(got[both] - want[both])), float(np.linalg.norm(want[both]))
        allowed = max(NORM[d.name] for d in _float_types(captured))
        if error > allowed * size + allowed * math.sqrt(max(both.sum(), 1)) * 1e-2:
            raise CheckFailed(f"output {i} differs from the captured program's: relative error {error / max(size, 1e-30):.3g} by norm, "
                              f"{_place(captured, view.node)}")


def _float_types(graph: Graph) -> set[DType]:
    return {n.dtype for n in graph.nodes if getattr(n, "dtype", None) is not None and n.dtype.is_float}


def _place(graph: Graph, node) -> str:
    o = graph.origin(node)
    where = f" ({o.file}:{o.line}: {o.code})" if o.file else ""
    return f"{o.op or type(node).__name__} '{o.name or getattr(node, 'name', '?')}'{where}"


# -- torch's side --------------------------------------------------------------------------------------------------------
def _array(x) -> Any:
    """A tensor as the reference wants it, in memory of its own; anything else as it is."""
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return x
    x = x.detach().cpu()
    return np.array(x.float().numpy() if x.dtype is torch.bfloat16 else x.resolve_neg().resolve_conj().numpy())


def _opaque(made: Mapping):
    """Makes an opaque call by torch; where torch promises no equal results twice, gives those that the call had."""
    results: dict[Opaque, dict[int, np.ndarray]] = {}
    for n, value in made.items():
        if isinstance(n, Result):
            results.setdefault(n.opaque, {})[n.position] = value

    def run(call: Opaque, args, kwargs):
        had = results.get(call, {})
        if not _repeatable(call):
            return [had.get(i) for i in range(len(call.results))]
        given, named = _tensors(call.args, args), _tensors(call.kwargs, kwargs)
        out = call.target(*given, **named)
        return [_array(x) if isinstance(x, torch.Tensor) else x for x in (out if isinstance(out, (tuple, list)) else (out,))]
    return run


def _repeatable(call: Opaque) -> bool:
    target = call.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags \
        and target._schema.name.split("::")[1] not in _MEMORY_AS_IT_IS and all(r is None or r.dtype in TORCH_DTYPES for r in call.results) \
        and all(n.dtype in TORCH_DTYPES for n in call.reads)


def _tensors(plan, value):
    """`value`, an opaque call's argument, with arrays as tensors; `plan`: the argument as the graph has it."""
    if isinstance(plan, View):
        return torch.from_numpy(np.asarray(value)).to(plan.node.device, TORCH_DTYPES[plan.node.dtype])
    if isinstance(plan, (tuple, list)):
        return type(value)(_tensors(p, v) for p, v in zip(plan, value))
    if isinstance(plan, dict):
        return {k: _tensors(p, value[k]) for k, p in plan.items()}
    return value
