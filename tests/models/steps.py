"""One training step under eager, float64 and tokamak, and how far apart they are."""
from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import mean, median

import torch
from torch import nn

import tokamak

LR = 0.05
UNIT = {False: 2.0 ** -20, True: 2.0 ** -8}         # of f32 sums in another order; under autocast, of a bf16 rounding


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


def eager(model: nn.Module, inputs: dict, unit: float, runs: int = 4, **how) -> list[Outcome]:
    """The step under eager, `runs` times: on the model and inputs as they are, then on copies whose parameters and floating inputs are off by a
    rounding each, at most `unit` / 2 of their size. Where roundings are many and cancel (batch norm over few images in 16 bits), the error of one run
    says little: that of another is 4 times as large for one gradient in 150, and was 17 times for one."""
    return [train(*(_rounded(model, inputs, unit, run) if run else (model, inputs)), compiled=False, **how) for run in range(runs)]


def _rounded(model: nn.Module, inputs: dict, unit: float, seed: int) -> tuple[nn.Module, dict]:
    """Copies of `model` and `inputs` with every parameter and floating input off by a rounding."""
    numbers = torch.Generator().manual_seed(seed)
    off = lambda x: x * (1 + unit * (torch.rand(x.shape, generator=numbers) - 0.5)) if x.is_floating_point() else x
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.copy_(off(p))
    return copied, {k: off(v) for k, v in inputs.items()}


def exact(model: nn.Module, inputs: dict) -> Outcome:
    """The step in float64. (Experts run one by one: torch has no grouped product in float64.)"""
    model = copy.deepcopy(model).double()
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    return train(model, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}, compiled=False)


@dataclass
class Report:
    """`wrong`: what is further from float64 than `times` eager's own error allows, with both errors (relative norms); `worst`: the largest error
    relative to its bound (at most 1 when nothing is wrong); `usual`: the median of these over the gradients."""
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0
    usual: float = 0.0


def compare(got: Outcome, want: list[Outcome], true: Outcome, unit: float, times: float = 4.0) -> Report:
    """Is every result of `got` as near to `true` as eager's, give or take `times` and a few roundings of relative size `unit`, and are the gradients
    usually within half of that? `want`: steps under eager whose errors' mean square is eager's error. Gradients that cancel to nothing are measured
    against the size of the others."""
    report, parts = Report(), {}
    _judge(report, "loss", got.loss, [w.loss for w in want], true.loss, unit, times, 0.0)
    for what in ("grads", "parameters", "buffers"):
        g, w, t = getattr(got, what), [getattr(w, what) for w in want], getattr(true, what)
        if not all(g.keys() == each.keys() == t.keys() for each in w):
            report.wrong.append(f"{what}: other names than eager's: {sorted(g.keys() ^ w[0].keys())}")
            continue
        scale = max((float(x.norm()) / x.numel() ** 0.5 for x in t.values() if x.numel()), default=0.0)
        parts[what] = [_judge(report, f"{what}.{name}", g[name], [each[name] for each in w], t[name], unit, times, scale) for name in t]
    report.usual = median(parts.get("grads") or [0.0])
    if not report.usual <= 0.5:
        report.wrong.append(f"grads: half of them further from float64 than {times * report.usual:.2g} of eager's error and roundings")
    return report


def _judge(report: Report, name: str, got, want: list, true, unit: float, times: float, scale: float) -> float:
    """Enters one result into `report`. Returns its error relative to its bound."""
    mine, theirs = float((got - true).norm()), mean(float((w - true).norm()) ** 2 for w in want) ** 0.5
    bound = times * theirs + 8 * unit * float(true.norm()) + 0.25 * unit * scale * true.numel() ** 0.5
    if not mine <= bound:
        size = float(true.norm()) or 1.0
        report.wrong.append(f"{name}: {mine / size:.2g} from float64, eager {theirs / size:.2g}")
    part = mine / bound if bound else 0.0
    report.worst = max(report.worst, part)
    return part
