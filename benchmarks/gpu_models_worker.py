"""The process that measures a model in a mode: told on standard input, it says on a pipe, a line of JSON each, what came out for every side."""
from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from tests.models.steps import Outcome, compare

from .gpu_measure import Timer
from .gpu_sides import cold, compiled
from .gpu_worker import failure, free
from .gpu_zoo import MODELS, Model

UNIT = 2.0 ** -8                # relative rounding of bfloat16


# -- one side of one model -----------------------------------------------------------------------------------------------------
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


def check(spec: Model, mode: str, side: str, device: str, true: Outcome, layers: int | None, first: Outcome | None = None) -> dict:
    """`error`: as a part of what is allowed; `wrong`: what is beyond it. `first`: what the timed session's first step gave, if that can be used."""
    def outcome(side: str) -> Outcome:
        with cold():
            session = Session(spec, mode, side, device, False, layers)
            return session.outcome(session.backward())
    report = compare(first or outcome(side), outcome("eager"), true, UNIT)
    return {"error": report.worst, "wrong": report.wrong[:5], "right": not report.wrong}


def measure(spec: Model, mode: str, side: str, device: str, true: Outcome | None, calls: int) -> dict:
    """Figures of one side: seconds; `peak` is all memory at its highest during later steps."""
    layers = 2 if spec.drops(mode) else None
    with cold():
        session = Session(spec, mode, side, device)
        _wait(device)
        start = time.perf_counter()
        out = session.backward()
        _wait(device)
        made = {"first": time.perf_counter() - start}
        if side == "floor":
            return made
        first = None if spec.drops(mode) or side == "eager" else session.outcome(out)
        del out
        made |= _steps(session, device, calls)
    del session
    free()
    return made | (check(spec, mode, side, device, true, layers, first) if true is not None else {})


def _steps(session: Session, device: str, calls: int) -> dict:
    """Peak memory and times of steps after the first, and the kernels that take most of them."""
    session.step()
    session.step()
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    session.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    times = Timer(calls, 2)(session.step)
    return {"peak": peak, "device": times.device, "wall": times.wall, "kernels": times.kernels, "names": [[n[:120], t] for n, t in times.names[:12]]}


def recorded(spec: Model, mode: str, device: str) -> dict:
    """Kernels and opaque calls that tokamak plans, from a compile of its own, so that recording delays nothing that is timed."""
    from tokamak.tools.kernels import kernels, opaques
    from tokamak.tools.record import Recorder
    recorder = Recorder()
    with cold():
        Session(spec, mode, "tokamak", device, recorder=recorder).backward()
    graphs = [g for g in recorder.graphs if not g.eager]
    calls = Counter(o.op for g in graphs for o in opaques(g))
    return {"planned": sum(len(kernels(g)) for g in graphs), "opaque": dict(calls.most_common()),
            "eager_graphs": [g.eager for g in recorder.graphs if g.eager]}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# -- a model in its process ----------------------------------------------------------------------------------------------------
def serve(name: str, mode: str, sides, device: str, calls: int, record: bool, say: Callable[[dict], None]) -> None:
    """Says {'side', 'result'} for each side of a model; a side that raises is a result, too."""
    torch.set_float32_matmul_precision("high")
    spec = MODELS[name]
    true = exact(spec, mode, device, 2 if spec.drops(mode) else None) if set(sides) - {"floor"} else None
    free()
    _under("inductor" if "inductor" in sides else "floor", nn.Linear(8, 8).to(device))(torch.randn(8, 8, device=device))
    for side in sides:
        try:
            result = measure(spec, mode, side, device, true, calls)
            if side == "tokamak" and record:
                result |= _or_failed(lambda: recorded(spec, mode, device))
        except Exception as error:
            result = failure(error)
        say({"side": side, "result": result})
        free()
    say({"end": True})


def _or_failed(fn: Callable[[], dict]) -> dict:
    try:
        return fn()
    except Exception as error:
        return {"record": failure(error)["failed"]}


if __name__ == "__main__":
    with open(int(sys.argv[1]), "w", buffering=1) as pipe:
        serve(**json.loads(sys.stdin.readline()), say=lambda m: print(json.dumps(m), file=pipe))
