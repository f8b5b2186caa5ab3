"""Weights of few bits: the rungs int8 and int4 of `tokamak.optimize`, for inference.

torchao's quantisation where it is installed and can do it on this machine; else a rewrite in plain PyTorch, whose arithmetic a compiler fuses
with the product. It is of the simplest kind: each row of a weight is integers and one scale,

    int8:  weight[n, k] = values[n, k] * scale[n]                                          -127..127
    int4:  weight[n, k] = (nibble(values[n, k // 2], k % 2) - 8) * scale[n]                -7..7, two in a byte

Inputs, bias and the arithmetic stay in the type that they have.
"""
from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

CONFIGS = {"int8": "Int8WeightOnlyConfig", "int4": "Int4WeightOnlyConfig"}
INSTALL = "pip install torchao"
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)       # of a row's largest value that the largest integer may stand for; what errs least is taken


class WeightOnly(nn.Module):
    """A linear layer, inputs (..., in) -> (..., out), whose weight is kept in `bits` (8 or 4) of an integer a value."""

    def __init__(self, linear: nn.Linear, bits: int):
        super().__init__()
        self.bits, self.in_features, self.out_features = bits, linear.in_features, linear.out_features
        values, scale = rounded(linear.weight.detach(), bits)
        self.register_buffer("values", packed(values) if bits == 4 else values)
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.values.to(x.dtype) if self.bits == 8 else unpacked(self.values).to(x.dtype) - 8
        return nn.functional.linear(x, whole * self.scale[:, None].to(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bits={self.bits}"


def rounded(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 values, float32 scale of each row) for a weight (out, in). A row's scale is the one of CLIPS that errs least; a row of zeros
    has scale 1."""
    most, wide = 2 ** (bits - 1) - 1, weight.float()
    largest = wide.abs().amax(1, keepdim=True) if weight.shape[1] else wide.new_zeros(len(weight), 1)
    best, best_error = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        scale = torch.where(largest > 0, largest * clip / most, 1.0)
        error = ((wide / scale).round().clamp(-most, most) * scale - wide).square().sum(1, keepdim=True)
        best, best_error = torch.where(error < best_error, scale, best), torch.minimum(error, best_error)
    return (wide / best).round().clamp(-most, most).to(torch.int8), best[:, 0]


def packed(values: torch.Tensor) -> torch.Tensor:
    """int8 values -7..7 (out, in) -> uint8 (out, in / 2): value 2k in the low half of byte k."""
    raised = (values + 8).to(torch.uint8)
    return raised[:, ::2] | raised[:, 1::2] << 4


def unpacked(values: torch.Tensor) -> torch.Tensor:
    """uint8 (out, in / 2) -> 0..15 (out, in)."""
    return torch.stack([values & 15, values >> 4], -1).reshape(values.shape[0], -1)


def weight_only(module: nn.Module, bits: int = 8) -> nn.Module:
    """`module` with each nn.Linear within it replaced by one of `bits` (8 or 4); a Linear itself is returned as a new module, everything else is
    changed in place. With 4 bits layers of an odd number of inputs stay."""
    if bits not in (8, 4):
        raise ValueError(f"bits={bits}: 8 or 4")
    if fits(module, bits):
        return WeightOnly(module, bits)
    for inner in list(module.modules()):
        for name, child in list(inner.named_children()):
            if fits(child, bits):
                setattr(inner, name, WeightOnly(child, bits))
    return module


def fits(module: nn.Module, bits: int) -> bool:
    return type(module) is nn.Linear and module.weight.is_floating_point() and (bits == 8 or module.in_features % 2 == 0)


# -- for the ladder ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Quantizer:
    """`make` changes a module, in place where it can, and returns it; `code`: the lines that do so; `note`: who does it, and why not torchao."""
    make: Callable[[nn.Module], nn.Module]
    code: str
    note: str


def quantizer(name: str, module: nn.Module) -> Quantizer:
    """For the rung `name` (int8, int4) on `module`, which stays as it is."""
    config, bits = CONFIGS[name], int(name[3:])
    if importlib.util.find_spec("torchao") is None:
        reason = f"torchao is not installed ({INSTALL})"
    else:
        code = f"from torchao.quantization import quantize_, {config}\nquantize_(fn, {config}())"
        made = Quantizer(lambda m: by_torchao(m, config), code, "by torchao")
        try:
            made.make(apart(module))
            return made
        except Exception as error:      # whatever torchao misses for this format on this machine
            reason = f"torchao cannot: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return Quantizer(lambda m: weight_only(m, bits), f"from tokamak.tools.quantize import weight_only\nfn = weight_only(fn, {bits})",
                     f"in plain PyTorch, since {reason}")


def by_torchao(module: nn.Module, config: str) -> nn.Module:
    torchao = importlib.import_module("torchao.quantization")
    torchao.quantize_(module, getattr(torchao, config)())
    return module


def apart(module: nn.Module) -> nn.Module:
    """A copy of `module` that shares its parameters and buffers."""
    return copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})


def weight_bytes(module: nn.Module) -> int:
    """Bytes of its parameters and buffers; of torchao's tensors those that they are made of."""
    return sum(plain_bytes(t) for t in (*module.parameters(), *module.buffers()))


def plain_bytes(t: torch.Tensor) -> int:
    parts = t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else ()
    return sum(plain_bytes(getattr(t, name)) for name in parts) if parts else t.numel() * t.element_size()
