"""The CPU cases: name -> what is run, on what. Everything is built anew from a fixed seed at each use.

A case is (function, inputs, mode): mode 'forward' times calls under no_grad; 'backward' times the backward pass alone (x and dy read, dx written),
with the forward's graph retained. `limit` is the fewest bytes: each input read once, each output written once.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Case:
    """`make()` returns (function, inputs). `bytes`: the fewest that any implementation must move. `bound`: 'memory' or 'arithmetic'."""
    name: str
    make: Callable
    bytes: int
    mode: str = "forward"
    bound: str = "memory"
    tolerance: float = 1e-4


def gelu_chain(x):
    """The sources' tanh GELU, as nine eager operations on one input."""
    y = torch.pow(x, 3)
    y = y * 0.044715
    y = y + x
    y = 0.5 * y
    y = y * (2.0 / math.sqrt(math.pi))
    y = y * math.sqrt(2.0)
    y = torch.tanh(y)
    y = y + 1.0
    return x * y


def gelu_steps(y, a):
    """The same steps on two inputs."""
    y = torch.pow(y, 3)
    y = y * 0.044715
    y = y + a
    y = 0.5 * y
    y = y * (2.0 / math.sqrt(math.pi))
    y = y * math.sqrt(2.0)
    y = torch.tanh(y)
    y = y + 1.0
    return a * y


def py_layernorm(x, weight, bias):
    """LayerNorm as a user writes it."""
    u = x.mean(-1, keepdim=True)
    s = x - u
    s = s * s
    s = s.mean(-1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-5)
    return weight * x + bias


def evonorm(x, v, gamma, beta):
    """EvoNorm-S0 with 32 groups."""
    n, c, h, w = x.shape
    g = x.reshape(n, 32, c // 32, h, w)
    std = torch.sqrt(g.var((2, 3, 4), keepdim=True, unbiased=False) + 1e-5)
    std = std.expand(n, 32, c // 32, h, w).reshape(n, c, h, w)
    return x * torch.sigmoid(v * x) / std * gamma + beta


def attention(q, k, v):
    """Attention written out."""
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def _tensors(*shapes, dtype=torch.float32, grad=False):
    return [torch.randn(*s).to(dtype).requires_grad_(grad) for s in shapes]


def _affine(fn, rows, cols, dtype=torch.float32, grad=False):
    return lambda: (fn, _tensors((rows, cols), (cols,), (cols,), dtype=dtype, grad=grad))


def _layernorm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b)


def _loss(grad):
    return lambda: (F.cross_entropy, [*_tensors((512, 32000), grad=grad), torch.randint(0, 32000, (512,))])


def _batchnorm():
    m = torch.nn.BatchNorm2d(64)
    return m, _tensors((16, 64, 128, 128))


def _mlp():
    m = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    return m, _tensors((512, 256))


_N = 16 << 20                       # elements of the 64 MiB cases
_F = 4 * _N                         # their bytes in f32


CASES: tuple[Case, ...] = (
    Case("gelu_chain_f32_16Mi", lambda: (gelu_chain, _tensors((_N,))), 2 * _F),
    Case("gelu_steps_f32_16Mi", lambda: (gelu_steps, _tensors((_N,), (_N,))), 3 * _F),
    Case("bias_gelu_f32_4096x4096", lambda: (lambda x, b: F.gelu(x + b), _tensors((4096, 4096), (4096,))), 2 * _F),
    Case("bias_gelu_bf16_4096x4096", lambda: (lambda x, b: F.gelu(x + b), _tensors((4096, 4096), (4096,), dtype=torch.bfloat16)), _F, tolerance=3e-2),
    Case("bias_gelu_bwd_f32_4096x4096", lambda: (lambda x, b: F.gelu(x + b), _tensors((4096, 4096), (4096,), grad=True)), 3 * _F, "backward"),
    Case("layernorm_f32_16384x1024", _affine(_layernorm, 16384, 1024), 2 * _F),
    Case("py_layernorm_f32_16384x1024", _affine(py_layernorm, 16384, 1024), 2 * _F),
    Case("py_layernorm_bwd_f32_16384x1024", _affine(py_layernorm, 16384, 1024, grad=True), 3 * _F, "backward"),
    Case("layernorm_bf16_16380x1025", _affine(_layernorm, 16380, 1025, torch.bfloat16), 16380 * 1025 * 4, tolerance=3e-2),
    Case("rmsnorm_bwd_f32_16384x1024",
         lambda: (lambda x, w: F.rms_norm(x, (1024,), w), _tensors((16384, 1024), (1024,), grad=True)), 3 * _F, "backward"),
    Case("softmax_f32_16384x1024", lambda: (lambda x: x.softmax(-1), _tensors((16384, 1024))), 2 * _F),
    Case("softmax_f32_4096x4097", lambda: (lambda x: x.softmax(-1), _tensors((4096, 4097))), 2 * 4096 * 4097 * 4),
    Case("sum_outer_f32_16384x1024", lambda: (lambda x: x.sum(0), _tensors((16384, 1024))), _F),
    Case("sum_inner_f32_16384x1024", lambda: (lambda x: x.sum(1), _tensors((16384, 1024))), _F),
    Case("cross_entropy_f32_512x32000", _loss(False), 512 * 32000 * 4),
    Case("cross_entropy_bwd_f32_512x32000", _loss(True), 2 * 512 * 32000 * 4, "backward"),
    Case("batchnorm_f32_16x64x128x128", _batchnorm, 2 * _F),
    Case("evonorm_f32_16x64x128x128", lambda: (evonorm, _tensors((16, 64, 128, 128), (1, 64, 1, 1), (1, 64, 1, 1), (1, 64, 1, 1))), 2 * _F),
    Case("transpose_add_relu_f32_4096", lambda: (lambda x, y: (x.t() + y).relu(), _tensors((4096, 4096), (4096, 4096))), 3 * _F),
    Case("mlp_f32_512x256x1024", _mlp, 0, bound="arithmetic"),
    Case("naive_attention_f32_4x8x512x64", lambda: (attention, _tensors((4, 8, 512, 64), (4, 8, 512, 64), (4, 8, 512, 64))), 0, bound="arithmetic"),
)
