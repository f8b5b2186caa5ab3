"""The programs of the table that `examples/demo.py` prints: ordinary PyTorch, nothing of tokamak in them.

Change one and the table's counts change with it.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Example:
    """`make()` returns the program and its arguments; `backward`: the gradients of every argument and parameter are part of it."""
    name: str
    make: Callable[[], tuple[Callable, tuple[torch.Tensor, ...]]]
    backward: bool = False


def multiply_add_relu(a, b, c):
    return torch.relu(a * b + c)


def gelu_chain(a):
    """Nine operations, each a pass over memory in eager."""
    y = torch.pow(a, 3)
    y = y * 0.044715
    y = y + a
    y = 0.5 * y
    y = y * (2.0 / math.sqrt(math.pi))
    y = y * math.sqrt(2.0)
    y = torch.tanh(y)
    y = y + 1.0
    return a * y


def layer_norm(x, weight, bias, eps: float = 1e-5):
    u = x.mean(-1, keepdim=True)
    s = x - u
    s = s * s
    s = s.mean(-1, keepdim=True)
    x = (x - u) / torch.sqrt(s + eps)
    return weight * x + bias


def rms_norm(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def add_multiply_sum(x, y, z):
    return ((x + y) * z).sum(-1)


def linear(features_in: int, features_out: int) -> nn.Module:
    return nn.Linear(features_in, features_out)


def mlp(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))


ROWS, WIDTH = 8192, 1024


def _matrices(count: int, rows: int | None = None, width: int = WIDTH) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(rows or ROWS, width) for _ in range(count))


EXAMPLES = (
    Example("relu(a * b + c)", lambda: (multiply_add_relu, _matrices(3))),
    Example("GELU, nine operations", lambda: (gelu_chain, _matrices(1))),
    Example("LayerNorm in Python", lambda: (layer_norm, (*_matrices(1), torch.randn(WIDTH), torch.randn(WIDTH)))),
    Example("LayerNorm in Python, with backward", lambda: (layer_norm, (*_matrices(1), torch.randn(WIDTH), torch.randn(WIDTH))), backward=True),
    Example("RMSNorm in Python", lambda: (rms_norm, (*_matrices(1), torch.randn(WIDTH)))),
    Example("RMSNorm in Python, with backward", lambda: (rms_norm, (*_matrices(1), torch.randn(WIDTH))), backward=True),
    Example("add, multiply, sum", lambda: (add_multiply_sum, _matrices(3))),
    Example("nn.Linear", lambda: (linear(512, 512), _matrices(1, 512, 512))),
    Example("MLP: linear, GELU, linear", lambda: (mlp(256, 1024), _matrices(1, 512, 256))),
    Example("MLP, with backward", lambda: (mlp(256, 1024), _matrices(1, 512, 256)), backward=True),
)
