"""One training step under eager, float64 and tokamak, and how far apart they are."""
from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

import tokamak

LR = 0.05


@dataclass(frozen=True)
class Outcome:
    """What a training step leaves: the loss, each gradient by name, each parameter after the optimizer's step, each floating buffer; all float64."""
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def train(model: nn.Module, inputs: dict, *, compiled: bool, autocast: bool = False, channels_last: bool = False, device: str = "cpu",
          **options) -> Outcome:
    """Forward, loss, backward and one step of SGD on a copy of `model` on `device`."""
    model, inputs = copy.deepcopy(model).to(device), {k: v.to(device) for k, v in inputs.items()}
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        inputs = {k: v.to(memory_format=torch.channels_last) if v.ndim == 4 else v for k, v in inputs.items()}
    run = tokamak.compile(model, **options) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        loss = run(**inputs).loss
    loss.backward()
    grads = {n: p.grad.double().cpu() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return Outcome(loss.detach().double().cpu(), grads, {n: p.detach().double().cpu() for n, p in model.named_parameters()},
                   {n: b.double().cpu() for n, b in model.named_buffers() if b.is_floating_point()})


def exact(model: nn.Module, inputs: dict) -> Outcome:
    """The step in float64. (Experts run one by one: torch has no grouped product in float64.)"""
    model = copy.deepcopy(model).double()
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    return train(model, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}, compiled=False)


@dataclass
class Report:
    """`wrong`: what is further from float64 than `times` eager's own error allows, with both errors (relative norms); `worst`: the largest error
    relative to its bound (at most 1 when nothing is wrong)."""
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0


def compare(got: Outcome, want: Outcome, true: Outcome, unit: float, times: float = 4.0) -> Report:
    """Is every result of `got` as near to `true` as eager's `want` is, give or take `times` and a few roundings of relative size `unit`?
    Gradients that cancel to nothing are measured against the size of the others."""
    report = Report()
    _judge(report, "loss", got.loss, want.loss, true.loss, unit, times, 0.0)
    for what in ("grads", "parameters", "buffers"):
        g, w, t = getattr(got, what), getattr(want, what), getattr(true, what)
        if not g.keys() == w.keys() == t.keys():
            report.wrong.append(f"{what}: other names than eager's: {sorted(g.keys() ^ w.keys())}")
            continue
        scale = max((float(x.norm()) / x.numel() ** 0.5 for x in t.values() if x.numel()), default=0.0)
        for name in t:
            _judge(report, f"{what}.{name}", g[name], w[name], t[name], unit, times, scale)
    return report


def _judge(report: Report, name: str, got, want, true, unit: float, times: float, scale: float) -> None:
    mine, theirs = float((got - true).norm()), float((want - true).norm())
    bound = times * theirs + 8 * unit * float(true.norm()) + 0.25 * unit * scale * true.numel() ** 0.5
    if not mine <= bound:
        size = float(true.norm()) or 1.0
        report.wrong.append(f"{name}: {mine / size:.2g} from float64, eager {theirs / size:.2g}")
    report.worst = max(report.worst, mine / bound if bound else 0.0)
