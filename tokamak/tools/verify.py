"""`tokamak.verify`: is what was compiled right? First the whole function against eager and float64, then kernel by kernel on the real values.

A kernel's results are held against three things: the language's meaning on the values that the kernel read (the policy: `tokamak.check` says what
must agree), the same in float64, and the values that eager had there, errors of everything before included. The first kernel outside its policy is
where a bug is; `extract` writes it with its values into a file of its own.
"""
from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..backend import backend
from ..check import Seen, differences
from ..errors import OptionError
from ..fuse.axes import Group
from ..ir.expr import Random, walk
from ..ir.graph import Compute
from ..ir.reference import evaluate
from . import annotate
from .dynamo import uncompiled
from .eager_values import eager_values, random_values
from .extract import write
from .kernel_graph import arguments, exact, part, sizes_of
from .kernels import KernelInfo, Launched, kernels, launched
from .record import GraphRecord, Recorder, recording
from .sources import Source, source_of

SEED = 0                    # of the random numbers that the compared runs draw
FURTHER = 4.0               # times eager's error from float64 that the whole function's may be
ROUNDINGS = 16              # or so many roundings of the result's type


@dataclass(frozen=True)
class Whole:
    """One result or gradient of the function: relative errors by norm (of integers: the share that differs). `exact`, `eager_exact`: from float64, of
    what was compiled and of eager; None where it cannot run. `right`: None where random numbers forbid to say."""
    name: str
    eager: float
    exact: float | None
    eager_exact: float | None
    right: bool | None


@dataclass(frozen=True)
class Value:
    """A value that a kernel stored, with its relative errors by norm; `eager`: None where eager has no such value, or where that follows
    from random numbers, which eager draws otherwise (`random`). `wrong`: how it leaves the policy."""
    name: str
    line: Source | None
    eager: float | None
    exact: float | None
    wrong: str
    random: bool = False


@dataclass(frozen=True)
class KernelCheck:
    """A kernel (or the kernels of one group on a GPU) of `graph`. `text`: of the first one that is wrong, the listing."""
    name: str
    graph: str
    module: str
    sources: tuple[Source, ...]
    values: tuple[Value, ...]
    text: str = ""

    @property
    def wrong(self) -> str:
        return next((f"{v.name}: {v.wrong}" for v in self.values if v.wrong), "")


@dataclass(frozen=True)
class Verification:
    """Everything that was compared. `notes`: what could not be."""
    whole: tuple[Whole, ...]
    kernels: tuple[KernelCheck, ...]
    notes: tuple[str, ...]
    records: tuple[GraphRecord, ...] = field(default=(), repr=False, compare=False)

    @property
    def first(self) -> KernelCheck | None:
        """The first kernel outside its policy."""
        return next((k for k in self.kernels if k.wrong), None)

    @property
    def right(self) -> bool:
        return self.first is None and all(w.right is not False for w in self.whole)

    def extract(self, name: str, path: str = "") -> str:
        """Writes the kernel `name` into a file that reproduces, checks and times it; returns the file's name. OptionError for an unknown one."""
        return write(*group_of(self.records, name), path or f"{name}.py")

    def to_json(self, indent: int | None = None) -> str:
        found = {"right": self.right, "whole": [asdict(w) for w in self.whole], "kernels": [asdict(k) for k in self.kernels], "notes": self.notes}
        return json.dumps(found, indent=indent)

    def __str__(self) -> str:
        from .verify_report import text
        return text(self)

    def __rich__(self):
        from .verify_report import report
        return report(self)

    def _repr_html_(self) -> str:
        from .notebook import terminal_html
        return terminal_html(self)


def verify(fn: Callable, *inputs, options: Mapping[str, Any] | None = None, **kwargs) -> Verification:
    """Runs copies of `fn` (a module or function) in eager, in float64 and compiled with `options`, backward too where a result requires gradients,
    and compares the whole and every kernel. The module itself and the inputs stay as they are; a function's own state (buffers it closes over) does
    not. `options`: as for `tokamak.compile`. A wrong kernel is no error: `right` is then False. Raises OptionError for a function that cannot be
    called or an option that there is not, and what eager raises."""
    original = uncompiled(fn)
    eager = results(*twin(original, inputs, kwargs))
    notes = [] if eager else ["the function returns no tensor: the kernels are compared, and nothing of what it returns"]
    try:
        precise = results(*twin(original, inputs, kwargs, torch.float64))
    except Exception as why:
        precise = {}
        notes.append(f"float64: the function does not run in it ({type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''})")
    torch._dynamo.reset()
    try:
        with recording(check="report") as recorder:
            copied, args, named = twin(original, inputs, kwargs)
            got = results(torch.compile(copied, backend=lambda gm, x: backend(gm, x, options=options)), args, named, copied)
    finally:
        torch._dynamo.reset()
    drawn = draws(recorder)
    if drawn:
        notes.append("the whole function draws random numbers of its own, which are not eager's: policy=\"eager\" among the options compares it")
    whole = tuple(compared(name, got[name], eager[name], precise.get(name), drawn) for name in eager if name in got)
    return examined(recorder, whole, notes)


def examined(recorder: Recorder, whole: tuple[Whole, ...] = (), notes: list[str] | None = None) -> Verification:
    """What `recorder`, made under `check="report"`, has seen, kernel by kernel."""
    found: list[KernelCheck] = []
    notes = list(notes or ())
    for record in recorder.graphs:
        if record.eager:
            notes.append(f"{record.name} {record.eager}")
        elif record.seen is None:
            notes.append(f"{record.name} was compiled but not called")
        else:
            found += kernel_checks(record, record.seen, with_text=not any(k.wrong for k in found))
    return Verification(whole, tuple(found), tuple(notes), tuple(r for r in recorder.graphs if r.seen is not None))


def group_of(records: Sequence[GraphRecord], name: str) -> tuple[GraphRecord, Group]:
    """Where the kernel `name` is, of graphs that were called. Raises OptionError for an unknown one."""
    there = [(record, x) for record in records if record.seen is not None for x in launched(record)]
    for record, x in there:
        if x.name == name:
            return record, x.group
    known = ", ".join(dict.fromkeys(x.name for _, x in there))
    raise OptionError(f"there is no kernel '{name}': {known or 'nothing was compiled'}")


# -- the whole function --------------------------------------------------------------------------------------------------
def twin(fn: Callable, inputs: tuple, kwargs: dict, dtype: torch.dtype | None = None) -> tuple[Callable, tuple, dict]:
    """Copies of a module and its inputs, floating ones in `dtype` if it is given."""
    wide = dtype is not None

    def copied(x):
        if not isinstance(x, torch.Tensor):
            return x
        made = x.detach().clone(memory_format=torch.preserve_format)
        return (made.to(dtype) if wide and x.is_floating_point() else made).requires_grad_(x.requires_grad)
    made = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
    if wide and isinstance(made, torch.nn.Module):
        made = made.to(dtype)
    return made, *pytree.tree_map(copied, (inputs, kwargs))


def results(fn: Callable, inputs: tuple, kwargs: dict, module: Any = None) -> dict[str, torch.Tensor]:
    """What one call gives: outputs, and gradients of parameters and inputs under the user's names. `module`: what `fn` was compiled from."""
    module = module or fn
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        torch.manual_seed(SEED)
        out = [t for t in pytree.tree_leaves(fn(*inputs, **kwargs)) if isinstance(t, torch.Tensor)]
        found = {f"output {i}": t.detach() for i, t in enumerate(out)}
        leaves = {f"argument {i}": t for i, t in enumerate(pytree.tree_leaves((inputs, kwargs))) if isinstance(t, torch.Tensor) and t.requires_grad}
        leaves |= dict(module.named_parameters()) if isinstance(module, torch.nn.Module) else {}
        leaves = {name: t for name, t in leaves.items() if t.requires_grad}
        roots = [t for t in out if t.requires_grad]
        if roots and leaves:
            chance = torch.Generator().manual_seed(SEED)        # of the gradients of results: plain ones would hide what sums to nothing
            given = [torch.randn(t.shape, generator=chance).to(t) for t in roots]
            grads = torch.autograd.grad(roots, list(leaves.values()), given, allow_unused=True)
            found |= {f"gradient of {name}": g for name, g in zip(leaves, grads) if g is not None}
    return found


def compared(name: str, got: torch.Tensor, eager: torch.Tensor, precise: torch.Tensor | None, drawn: bool) -> Whole:
    a, b = as_array(got), as_array(eager)
    from_eager = distance(a, b)
    if precise is None or not got.is_floating_point() or got.shape != precise.shape:
        allowed = ROUNDINGS * torch.finfo(got.dtype).eps * math.sqrt(max(got.numel(), 1)) if got.is_floating_point() else 0.0
        return Whole(name, from_eager, None, None, None if drawn else from_eager <= allowed)
    mine, theirs = distance(a, as_array(precise)), distance(b, as_array(precise))
    return Whole(name, from_eager, mine, theirs, None if drawn else mine <= max(FURTHER * theirs, ROUNDINGS * torch.finfo(got.dtype).eps))


def as_array(t: torch.Tensor) -> np.ndarray:
    t = (t.to_dense() if t.layout is not torch.strided else t).detach().cpu().resolve_conj().resolve_neg()
    return (t.double() if t.is_floating_point() else t).numpy()


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want|| over what is finite in both; infinite where shapes, NaN or infinities differ. Of other types the share that
    differs."""
    if got.shape != want.shape:
        return math.inf
    if not got.size:
        return 0.0
    if want.dtype.kind not in "fc":
        return float(np.mean(got != want))
    got, want = (x.astype(np.complex128 if want.dtype.kind == "c" else np.float64) for x in (got, want))
    finite = np.isfinite(want)
    if np.any((~finite | ~np.isfinite(got)) & ~((got == want) | np.isnan(got) & np.isnan(want))):
        return math.inf
    error, size = np.linalg.norm(got[finite] - want[finite]), np.linalg.norm(want[finite])
    return float(error / size) if size else float(error > 0) * math.inf if error else 0.0


def draws(recorder: Recorder) -> bool:
    """Does any kernel draw random numbers of our own?"""
    graphs = (r.values["capture"] for r in recorder.graphs if "capture" in r.values)
    return any(isinstance(e, Random) for g in graphs for n in g.nodes if isinstance(n, Compute) for e in walk(n.expr))


# -- kernel by kernel ----------------------------------------------------------------------------------------------------
def kernel_checks(record: GraphRecord, seen: Seen, with_text: bool = True) -> Iterator[KernelCheck]:
    """Every kernel of a graph against its values of one call, in running order; the first wrong one with its listing."""
    plan = record.values["lower"].plan
    wrong: dict[Any, str] = {}
    values = dict(differences(plan.graph, seen.args, seen.constants, seen.values, wrong.setdefault).values)
    eager, random = eager_values(record, seen), random_values(record)
    for g, made in by_group(record).items():
        sharp = in_float64(record, g, values, seen)
        found = []
        for n in plan.stores[g]:
            got = values[n]
            at = plan.graph.origin(n)
            found.append(Value(record.label(plan.graph, n), source_of(at), distance(got, as_array(eager[n])) if n in eager else None,
                               distance(got, sharp[n]) if n in sharp else None, wrong.get(n, ""), n in random))
        info = [i for _, i in made]
        check = KernelCheck(" + ".join(i.name for i in info), record.name, info[0].module, info[0].sources, tuple(found))
        if check.wrong and with_text:
            with_text = False
            check = KernelCheck(**{**vars(check), "text": "\n".join(annotate.kernel_text(record, x, i) for x, i in made)})
        yield check


def by_group(record: GraphRecord) -> dict[Group, list[tuple[Launched, KernelInfo]]]:
    found: dict[Group, list[tuple[Launched, KernelInfo]]] = {}
    for x, info in zip(launched(record), kernels(record), strict=True):
        found.setdefault(x.group, []).append((x, info))
    return found


def in_float64(record: GraphRecord, g: Group, values: dict, seen: Seen) -> dict:
    """Node -> what a group stores, computed in float64 from the values that its kernel read."""
    plan = record.values["lower"].plan
    cut, inputs, made = part(plan.graph, g.nodes(), plan.stores[g])
    wide, new = exact(cut)
    found = evaluate(wide, arguments(plan.graph, cut, inputs, values, seen.args), sizes=sizes_of(values)).values
    return {n: found[new[made[n]]] for n in plan.stores[g]}
