"""The process that measures a side of a model in a mode: told on standard input, it says on a pipe, a line of JSON each, what came out for every
part."""
from __future__ import annotations

import contextlib
import fcntl
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tests.models.steps import Outcome, compare

from .gpu_measure import Timer
from .gpu_sides import compiled
from .gpu_worker import failure, free, told
from .gpu_zoo import MODELS, Model

UNIT = 2.0 ** -8                # relative rounding of bfloat16
SLOWEST = 5                     # kernels whose building is told of


# -- what is known before, and who else uses the machine ------------------------------------------------------------------------
@contextlib.contextmanager
def caches(folder: str) -> Iterator[dict]:
    """Yields tokamak's options. `folder`: where all compilers keep what they make; '': nothing that was compiled before is known, nothing is kept. A
    graph that falls back to eager raises."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(dynamo.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False))
        if folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
        else:
            stack.enter_context(inductor.patch(force_disable_caches=True, fx_graph_cache=False))
            stack.enter_context(functorch.patch(enable_autograd_cache=False))
            stack.enter_context(fresh_cache())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", message="tokamak: ")
        yield {"cache_dir": os.path.join(folder, "tokamak") if folder else ""}
    torch._dynamo.reset()


@contextlib.contextmanager
def machine_of(lock: str, alone: bool) -> Iterator[None]:
    """Within it no other process that knows `lock` times anything, or (`alone`) does anything at all. '': there are no others."""
    with open(lock or os.devnull, "a") as file:
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


# -- one side of one model ---------------------------------------------------------------------------------------------------
class Session:
    """A model with its inputs on a device, and what one step of a mode is."""

    def __init__(self, spec: Model, mode: str, side: str, device: str, dropout: bool = True, layers: int | None = None, **options):
        torch.manual_seed(0)
        self.mode, self.device = mode, device
        with torch.device(device):
            self.model = spec.make(dropout, layers).train(mode == "train")
        self.inputs = spec.inputs(device)
        if spec.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
            self.inputs = {k: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v for k, v in self.inputs.items()}
        function = spec.loss if mode == "train" else spec.output
        self.run = _under(side, lambda **inputs: function(self.model, inputs), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True) if mode == "train" else None

    def backward(self) -> torch.Tensor:
        """Loss, with gradients taken, or the output of an inference."""
        with torch.autocast(self.device, torch.bfloat16), torch.set_grad_enabled(self.mode == "train"):
            out = self.run(**self.inputs)
        if self.mode == "train":
            out.backward()
        return out.detach()

    def step(self) -> torch.Tensor:
        out = self.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return out

    def outcome(self, out: torch.Tensor) -> Outcome:
        """What is compared: loss and gradients, or an output; float64, on the host."""
        grads = {n: p.grad.double().cpu() for n, p in self.model.named_parameters() if p.grad is not None}
        return Outcome(out.double().cpu(), grads, {}, {})


def _under(side: str, fn: Callable, **options) -> Callable:
    """`options` are tokamak's, and nothing to the others."""
    return torch.compile(fn, dynamic=False, backend="aot_eager") if side == "floor" else compiled(side, fn, **options)


def exact(spec: Model, mode: str, device: str, layers: int | None) -> Outcome:
    """The same step in float64, without dropout."""
    session = Session(spec, mode, "eager", device, False, layers)
    session.model.double()
    session.inputs = {k: v.double() if v.is_floating_point() else v for k, v in session.inputs.items()}
    with torch.set_grad_enabled(mode == "train"):
        out = session.run(**session.inputs)
    if mode == "train":
        out.backward()
    return session.outcome(out.detach())


def check(spec: Model, mode: str, device: str, first: Callable[[str, int | None], Outcome]) -> dict:
    """`error`: as a part of what is allowed; `wrong`: what is beyond it. `first(side, layers)`: what a side's first step leaves, without dropout.
    Models that drop out at random are compared without, at two layers."""
    layers = 2 if spec.drops(mode) else None
    report = compare(first("tokamak", layers), [first("eager", layers)], exact(spec, mode, device, layers), UNIT)
    return {"error": report.worst, "wrong": report.wrong[:5], "right": not report.wrong}


def first_call(spec: Model, mode: str, side: str, device: str, options: dict) -> tuple[dict, Session]:
    """Seconds of the first call, a training step's with its backward pass, and the session that made it. Nothing may have been compiled before."""
    _under(side, nn.Linear(8, 8).to(device), **options)(torch.randn(8, 8, device=device))     # imports, processes
    session = Session(spec, mode, side, device, **options)
    _wait(device)
    start = time.perf_counter()
    session.backward()
    _wait(device)
    return {"first": time.perf_counter() - start}, session


def warm(session: Session) -> Session:
    """The session behind its first steps, with what they left free again."""
    for _ in range(3):
        session.step()
    free()
    return session


def times(session: Session, device: str, calls: int) -> dict:
    """Peak memory (all of it, at its highest during a step) and times of steps, seconds, and the kernels that take most of them."""
    if device != "cuda":
        session.step()
        return {"peak": 0, "device": 0.0, "wall": 0.0, "kernels": 0, "names": []}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    session.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    found = Timer(calls, 2)(session.step)
    return {"peak": peak, "device": found.device, "wall": found.wall, "kernels": found.kernels, "names": [[n[:120], t] for n, t in found.names[:60]]}


def planned(spec: Model, mode: str, device: str, options: dict) -> dict:
    """Kernels and opaque calls that tokamak plans, and how a compile's seconds divide, from a compile of its own, so that recording delays nothing
    that is timed. `stages`: seconds of each stage of all graphs; `slowest`: [seconds, kernel, its schedule] of those that took longest to build, if
    any were."""
    from tokamak.tools.kernels import kernels, opaques
    from tokamak.tools.record import Recorder
    recorder = Recorder()
    Session(spec, mode, "tokamak", device, recorder=recorder, **options).backward()
    graphs = [g for g in recorder.graphs if not g.eager]
    calls = Counter(o.op for g in graphs for o in opaques(g))
    return {"planned": sum(len(kernels(g)) for g in graphs), "opaque": dict(calls.most_common()),
            "eager_graphs": [g.eager for g in recorder.graphs if g.eager], **divided(graphs)}


def divided(graphs: list) -> dict:
    """Of recorded graphs the seconds by stage, and the kernels that took longest to build."""
    stages: Counter = Counter()
    for g in graphs:
        stages.update(g.seconds)
    schedules = {p.unit.name: str(p.kernel.schedule) for g in graphs for b in g.values.get("render", {}).values() for p in getattr(b, "parts", ())}
    built = sorted(((b.seconds, b.name) for g in graphs for b in g.units.values() if b.how == "compiled"), reverse=True)
    return {"stages": dict(stages), "slowest": [[seconds, name, schedules.get(name, "")] for seconds, name in built[:SLOWEST]]}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- a side in its process -----------------------------------------------------------------------------------------------------
def serve(name: str, mode: str, side: str, parts, device: str, calls: int, kept: str, lock: str, say: Callable[[dict], None]) -> None:
    """Says {'part', 'result'} for each part; one that raises is a result, too. `kept`, `lock`: see `caches` and `machine_of`."""
    torch.set_float32_matmul_precision("high")
    process = Process(MODELS[name], mode, side, tuple(parts), device, calls, kept, lock)
    for part in parts:
        try:
            result = process.part(part)
        except Exception as error:
            result = failure(error)
        say({"part": part, "result": result})
        free()
    say({"end": True})


class Process:
    """A side of a model in a mode: its parts, one after another. Steps are those of the session whose first call was timed, if that is a part."""

    def __init__(self, spec: Model, mode: str, side: str, parts: tuple[str, ...], device: str, calls: int, kept: str, lock: str):
        self.spec, self.mode, self.side, self.parts = spec, mode, side, parts
        self.device, self.calls, self.kept, self.lock = device, calls, kept, lock
        self.session: Session | None = None
        self.caches = contextlib.ExitStack()

    def part(self, part: str) -> dict:
        """Figures of one part. A part that fails leaves nothing to the next."""
        try:
            return getattr(self, part)()
        except Exception:
            self._end()
            raise

    def first(self) -> dict:
        options = self.caches.enter_context(caches(""))
        with machine_of(self.lock, True):
            result, self.session = first_call(self.spec, self.mode, self.side, self.device, options)
        if "step" not in self.parts:
            self._end()
        return result

    def build(self) -> dict:
        start = time.perf_counter()
        with caches(self.kept) as options, machine_of(self.lock, False):
            warm(self._session(options))
        return {"built": time.perf_counter() - start}

    def step(self) -> dict:
        if self.session is None:
            self.session = self._session(self.caches.enter_context(caches(self.kept)))
        with machine_of(self.lock, False):
            warm(self.session)
        with machine_of(self.lock, True):
            result = times(self.session, self.device, self.calls)
        self._end()
        return result

    def right(self) -> dict:
        with caches(self.kept) as options, machine_of(self.lock, False):
            def first(side: str, layers: int | None) -> Outcome:
                session = Session(self.spec, self.mode, side, self.device, False, layers, **options)
                return session.outcome(session.backward())
            return check(self.spec, self.mode, self.device, first)

    def plan(self) -> dict:
        with caches(self.kept) as options, machine_of(self.lock, False):
            return planned(self.spec, self.mode, self.device, options)

    def _session(self, options: dict) -> Session:
        return Session(self.spec, self.mode, self.side, self.device, **options)

    def _end(self) -> None:
        self.session = None
        self.caches.close()


if __name__ == "__main__":
    told(lambda job, say: serve(**job, say=say))
