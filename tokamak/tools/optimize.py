"""`tokamak.optimize`: the ladder. Each rung is tried on top of those that paid, measured beside them in turn, and held against float64.

    eager        the function as it is
    fuse         torch.compile with this backend
    tf32         float32 contractions on tensor cores (NVIDIA's GPUs): torch's own switch
    launches     mode="reduce-overhead": the program is recorded once and replayed (GPUs)
    bf16, fp16   autocast
    int8, int4   weights of linear layers in few bits, for inference (`quantize.py`)

The last four change numbers, so they are tried only where `allow` names them. A rung is left out, with the reason, where it could not help: where
what it makes faster is not SHARE of the step, as measured. It is kept where the step takes at most PAYS of what it took, and, for `fuse`, where its
results are no further from float64 than a few times those of the way before. Fusion that did not pay is tried again on top of what did.
"""
from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..backend import backend
from ..errors import OptionError
from . import limits
from .dynamo import uncompiled
from .machine import BUSY as CROWDED, peaks, Ran, others as other_work
from .profile import SECONDS, by_position, check_seconds, device_of, give_back
from .record import Recorder, recording
from .traced import peak_bytes, traced
from .names import size_text
from .quantize import apart, quantizer, weight_bytes
from .verify import as_array, distance, draws, FURTHER, results, ROUNDINGS, twin
from .watch import Looked, Step, Times, Watcher, interleaved

PAYS = 0.97             # of the step before that a rung's may take
SHARE = 0.03            # of the step that a rung has to be able to make faster
BUSY, TRIES = 1.5, 3    # times what a way took before, after which it is measured again beside the next; how often
FLOOR = 1e-4            # of the largest result's norm: what is smaller is measured against that
AGAIN = "fuse again"    # on top of rungs that made the rest faster
COMPILES = ("fuse", AGAIN, "launches")      # rungs that call torch.compile, each in place of those before
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "matmul", "linear")
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = ("int8", "int4")
CONSENT = (*CASTS, *WEIGHTS)


@dataclass(frozen=True)
class Rung:
    """`step`: seconds, the shortest of all that were taken, in turn with those of the rung below; `peak`: bytes beyond what stood before;
    `error`: of the worst result, relative by norm, from float64 (None: it does not run in it, or random numbers forbid to compare). `kept`: it is
    part of the best way found; `why`; `code`: the line that makes it so. `speedup`: times as fast as eager: what was measured beside the rung
    below, times that one's, so that other work on the machine meets both alike."""
    name: str
    step: float | None
    peak: int | None
    error: float | None
    kept: bool
    why: str
    code: str
    speedup: float | None = None


@dataclass(frozen=True)
class Staircase:
    """The rungs in the order in which they were tried. Prints as a table; `code` reproduces the best. `beside`: the share of the CPU's cores that
    other work took meanwhile."""
    device: str
    rungs: tuple[Rung, ...]
    stopped: str
    beside: float = 0.0

    @property
    def note(self) -> str:
        """What is to be said where that was much."""
        return (f"other work took {self.beside:.0%} of the cores meanwhile: rungs that differ little may change places on a quiet machine"
                if self.beside > CROWDED else "")

    @property
    def best(self) -> Rung:
        return [r for r in self.rungs if r.kept][-1]

    @property
    def code(self) -> str:
        """Weights are changed before anything is compiled; what compiles stands once; the rest in the order in which it was tried."""
        kept = {r.name: r.code for r in self.rungs if r.kept and r.code}
        compiled = [kept.pop(name) for name in COMPILES if name in kept]
        weights = [kept.pop(name) for name in WEIGHTS if name in kept]
        return "\n".join((*weights[-1:], *compiled[-1:], *kept.values()))

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({**asdict(self), "code": self.code}, indent=indent)

    def __str__(self) -> str:
        from .optimize_report import text
        return text(self)

    def __rich__(self):
        from .optimize_report import report
        return report(self)

    def _repr_html_(self) -> str:
        from .notebook import terminal_html
        return terminal_html(self)


class Way:
    """A way of running the function: compiled or not, its launches recorded or not, `precision` of float32 contractions, autocast to `cast`,
    `weights` changed by a function of the module."""

    def __init__(self, compiled: bool = False, precision: str = "", cast: torch.dtype | None = None, launches: bool = False,
                 weights: Callable | None = None):
        self.compiled, self.precision, self.cast, self.launches, self.weights = compiled, precision, cast, launches, weights

    def function(self, fn: Callable, device: str, options: Mapping[str, Any]) -> Callable:
        """`fn` run this way. What holds for all of a step stands in `around`."""
        fn = fn if self.weights is None else self.weights(apart(fn))
        chosen = {**options, "cudagraphs": True} if self.launches else dict(options)
        made = torch.compile(fn, backend=partial(backend, options=chosen)) if self.compiled else fn
        if self.cast is None:
            return made

        def run(*args, **kwargs):
            with torch.autocast(torch.device(device).type, self.cast):
                return made(*args, **kwargs)
        return run

    @contextlib.contextmanager
    def around(self):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision or before)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class Within(Step):
    """A Step whose phases run within `way.around`."""

    def __init__(self, way: Way, calls: Sequence):
        super().__init__(calls)
        self.way = way

    def forward(self) -> None:
        with self.way.around():
            super().forward()

    def backward(self) -> None:
        with self.way.around():
            super().backward()


def optimize(fn: Callable, *inputs, allow: Sequence[str] | str = (), options: Mapping[str, Any] | None = None, seconds: float = SECONDS,
             **kwargs) -> Staircase:
    """Climbs the ladder with `fn` (a module or function) on `inputs`, forward, and backward where a result requires gradients. `allow`: rungs that
    change numbers and may be tried, of bf16, fp16, int8 and int4, or one of them. `options`: as for `tokamak.compile`; `seconds`: how long each side
    of a rung is measured. The model really runs: buffers and random state change. Raises OptionError for what an argument cannot be, and what the
    function raises in eager."""
    check_seconds(seconds)
    allow = (allow,) if isinstance(allow, str) else allow
    for name in allow:
        allowed(name)
    original = uncompiled(fn)
    before = Ran.now()
    climb = _Climb(original, inputs, kwargs, dict(options or {}), seconds)
    torch._dynamo.reset()
    try:
        climb.first()
        for name, way, code in rungs(climb.device, allow):
            climb.rung(name, way, code)
        if climb.changes and "compiled" not in climb.changes and "worth" in climb.found[1].why:
            again = {name: (way, code) for name, way, code in rungs(climb.device, ())}
            climb.rung(AGAIN, *again["fuse"])
            if climb.changes.get("compiled") and climb.device != "cpu":
                climb.found = [r for r in climb.found if r.name != "launches"]
                climb.rung("launches", *again["launches"])
        return Staircase(climb.device, tuple(climb.found), climb.stopped(allow), other_work(before, Ran.now()))
    finally:
        torch._dynamo.reset()


def allowed(name: str) -> None:
    """Raises OptionError for what is no rung that changes numbers."""
    if name not in CONSENT:
        raise OptionError(f"allow={name!r}: one of {', '.join(CONSENT)}")


def optimize_called(watcher: Watcher, allow: Sequence[str] = (), seconds: float = SECONDS) -> Staircase:
    """The same with the graphs that a program has called, each with the arguments of its last call, as one function; in training those that gradients
    run through. `watcher` kept these."""
    calls, _ = watcher.calls()
    graphs, inputs = [c[0] for c in calls], [c[2] for c in calls]
    return optimize(lambda *groups: [graph(*args) for graph, args in zip(graphs, groups)], *inputs, allow=allow, seconds=seconds)


def rungs(device: str, allow: Sequence[str]):
    """(name, how the way before changes, code) of the rungs behind eager."""
    kind = torch.device(device).type
    yield "fuse", {"compiled": True}, 'fn = torch.compile(fn, backend="tokamak")'
    yield "tf32", {"precision": "high"}, 'torch.set_float32_matmul_precision("high")'
    yield "launches", {"launches": True}, 'fn = torch.compile(fn, backend="tokamak", mode="reduce-overhead")'
    for name in (n for n in CASTS if n in allow):
        yield name, {"cast": CASTS[name]}, f'fn = torch.autocast("{kind}", {CASTS[name]})(fn)'
    for name in (n for n in WEIGHTS if n in allow):
        yield name, {}, ""


class _Climb:
    """The state of one climb: the way kept so far, its step, and what was found."""

    def __init__(self, fn: Callable, inputs: tuple, kwargs: dict, options: dict, seconds: float):
        self.fn, self.inputs, self.kwargs, self.options, self.seconds = fn, inputs, kwargs, options, seconds
        self.device = device_of((fn, inputs, kwargs))
        self.found: list[Rung] = []
        self.changes: dict[str, Any] = {}
        self.rows: list[limits.Row] = []
        self.busy = self.time = 0.0
        self.random = False
        try:
            self.precise = results(*twin(fn, inputs, kwargs, torch.float64))
        except Exception:               # whatever the user's function raises when its numbers are wide: errors are then not known
            self.precise = {}

    def step_of(self, way: Way) -> Within:
        made = Within(way, [(way.function(self.fn, self.device, self.options), self.inputs, self.kwargs)])
        made()
        made()
        return made

    def error(self, way: Way) -> float | None:
        """The worst result's, from float64, relative by norm; a norm that is nothing beside the largest counts as FLOOR of that."""
        copied, args, named = twin(self.fn, self.inputs, self.kwargs)
        with way.around():
            got = results(way.function(copied, self.device, self.options), args, named, copied)
        wanted = {name: as_array(t) for name, t in self.precise.items() if name in got and t.dtype is torch.float64}
        sizes = {name: float(np.linalg.norm(w)) for name, w in wanted.items()}
        least = FLOOR * max(sizes.values(), default=0.0)
        found = [d if not math.isfinite(d := distance(as_array(got[name]), w)) and sizes[name]
                 else float(np.linalg.norm(as_array(got[name]) - w)) / (max(sizes[name], least) or 1.0) for name, w in wanted.items()]
        return max(found) if found else None

    def first(self) -> None:
        way = Way()
        self.kept = self.step_of(way)
        self.time = interleaved({"eager": self.kept}, self.device, self.seconds)["eager"].least
        self.kept_error = self.error(way)
        self.found.append(Rung("eager", self.time, peak_bytes(self.kept, self.device, give_back), self.kept_error, True, "where it starts", "", 1.0))

    def rung(self, name: str, changes: dict, code: str) -> None:
        reason = self.useless(name)
        if reason:
            self.found.append(Rung(name, None, None, None, False, f"left out: {reason}", code))
            return
        note = ""
        if name in WEIGHTS:
            made_by = quantizer(name, self.fn)
            changes, code, note = {"weights": made_by.make}, made_by.code, f", {self.saved(made_by.make)}, {made_by.note}"
        if name == "launches":
            note = ", and holds its memory between steps"
        way = Way(**{**self.changes, **changes})
        watcher = Recorder() if way.launches else Watcher()         # what is watched is not recorded
        with recording(watcher):
            made, wide = self.step_of(way), self.error(way)
        self.random = self.random or draws(watcher)
        times = self.beside(made)
        self.found = [replace(r, step=min(r.step, times["before"].least)) if r is self.below else r for r in self.found]
        took, error = times["now"].least, None if self.random else wide
        faster, wrong = times["before"].least / took, self.wrong(name, error)
        speedup = faster * self.below.speedup
        kept = not wrong and faster * PAYS >= 1
        why = wrong or f"{faster:.2f} times as fast as the rung below" + ("" if kept else ": not worth it") + note
        self.found.append(Rung(name, took, peak_bytes(made, self.device, give_back), error, kept, why, code, speedup))
        if isinstance(watcher, Watcher) and name in COMPILES:
            self.look(watcher, made, times["now"].step)
        if kept:
            self.kept, self.changes, self.time, self.kept_error = made, {**self.changes, **changes}, took, wide

    def beside(self, made: Step) -> dict[str, Times]:
        """Times of the way kept so far and of `made`, in turn: again where all steps of the first were far slower than before, since it was other
        work on the machine that was measured then."""
        for _ in range(TRIES):
            times = interleaved({"before": self.kept, "now": made}, self.device, self.seconds)
            if times["before"].least <= BUSY * self.below.step:
                break
        return times

    @property
    def below(self) -> Rung:
        """The rung that the way kept so far ends with."""
        return [r for r in self.found if r.kept][-1]

    def wrong(self, name: str, error: float | None) -> str:
        """Why numbers forbid a rung, or ''."""
        if error is None:
            return ""
        if not math.isfinite(error):
            return "its results hold infinities or NaN that float64 does not"
        eps = torch.finfo(torch.float32).eps
        if name in COMPILES and error > max(FURTHER * (self.kept_error or 0.0), ROUNDINGS * eps):
            return f"further from float64 than before: {error:.1e} instead of {self.kept_error:.1e}; tokamak.verify says where"
        return ""

    # -- what is left to gain ------------------------------------------------------------------------------------------------
    def look(self, watcher: Watcher, made: Step, step: float) -> None:
        """What the kernels of the fused program take."""
        if self.device == "cpu":
            looked = Looked("fused", watcher)
            step = interleaved({"fused": made}, self.device, self.seconds / 2, looked=looked)["fused"].step
            each = looked.seconds()
            self.busy = looked.busy(step)
        else:
            seen = traced(made, self.device, watcher)
            each, self.busy = by_position(seen, watcher.graphs), seen.busy
        self.rows, self.fused = limits.rows(watcher.graphs, each, peaks(self.device)), step

    def products(self, dtype: str = "") -> list[limits.Row]:
        """Contractions among what was looked at: calls of torch, and kernels of ours, whose names say what they hold."""
        words = lambda r: (r.name.split(".")[0],) if r.opaque else r.name.split("_")
        return [r for r in self.rows if not set(PRODUCTS).isdisjoint(words(r)) and r.flops and (not dtype or dtype == r.dtype)]

    def useless(self, name: str) -> str:
        """Why a rung could not help, or ''."""
        if name == "launches":
            return self.no_launches()
        if name in WEIGHTS:
            return self.no_weights()
        if name != "tf32":
            return ""
        if self.device == "cpu":
            return "a CPU has no tensor cores"
        if torch.get_float32_matmul_precision() != "highest":
            return "it is on already"
        share = sum(r.seconds for r in self.products("float32")) / self.fused
        return f"float32 contractions are {share:.0%} of the step" if share < SHARE else ""

    def no_launches(self) -> str:
        if self.device == "cpu":
            return "on a CPU nothing is launched: kernels are called"
        if "compiled" not in self.changes:
            return "what was fused was not kept"
        idle = max(0.0, 1 - self.busy / self.fused)
        return f"the device works in {1 - idle:.0%} of the fused step" if idle < SHARE else ""

    def no_weights(self) -> str:
        if not isinstance(self.fn, torch.nn.Module):
            return "this is a function: weights are changed in a module, tokamak.optimize(model, ...)"
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.fn.parameters()):
            return "weights of few bits are not trained; under torch.no_grad() inference is measured"
        layers = [m for m in self.fn.modules() if type(m) is torch.nn.Linear]
        if not layers:
            return "there is no linear layer"
        share = sum(r.seconds for r in self.products()) / self.fused
        return f"contractions are {share:.0%} of the step" if share < SHARE else ""

    def saved(self, make: Callable) -> str:
        return f"weights {size_text(weight_bytes(self.fn))} -> {size_text(weight_bytes(make(apart(self.fn))))}"

    def stopped(self, allow: Sequence[str]) -> str:
        """What is left, and why no further rung of these would help."""
        products = self.products()
        taken, limit = sum(r.seconds for r in products), sum(min(r.limit, r.seconds) for r in products)
        idle, wasted = max(0.0, 1 - self.busy / self.fused), sum(r.wasted for r in self.rows)
        most = f"{taken / self.fused:.0%} of the fused step is contractions at {limit / (taken or 1):.0%} of their limit"
        said = [most if taken else "there are no contractions", f"{idle:.0%} of it is no work of a kernel",
                f"kernels spend {wasted / self.fused:.0%} of it beyond their limits"]
        if idle + wasted / self.fused < SHARE:
            said.append("nothing that keeps the numbers can gain more than that")
        possible = CONSENT if isinstance(self.fn, torch.nn.Module) else tuple(CASTS)
        others = [name for name in possible if name not in allow and (name != "fp16" or self.device != "cpu")]
        return "; ".join(said) + (f". Rungs that change numbers were not allowed: {', '.join(others)} (allow=)" if others else "")
