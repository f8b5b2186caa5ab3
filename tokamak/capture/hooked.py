"""Hooks on what autograd saves (`torch.autograd.graph.save_on_cpu`, `saved_tensors_hooks`) may give backward tensors that lie otherwise than what
forward saved: a copy in the order of its extents, say. Kernels read strided memory as it was traced, so such a tensor is laid out anew.

Hooks are seen when forward runs. Until one was there, backward looks at nothing.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx


class Hooked:
    """Of one graph of Dynamo's: have hooks been on when its forward ran?"""

    def __init__(self):
        self.seen = False

    def forward(self, fn: Callable[[list], list]) -> Callable[[list], list]:
        """`fn`, which notes hooks."""
        def run(args: list) -> list:
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                self.seen = True
            return fn(args)
        run._boxed_call = True
        return run

    def backward(self, fn: Callable[[list], list], graph: fx.GraphModule) -> Callable[[list], list]:
        """`fn`, which is handed its arguments as they were traced in `graph`."""
        vals = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
        traced = [_sizes(val) for val in vals]
        kinds = [(val.device, val.dtype) if isinstance(val, torch.Tensor) else None for val in vals]

        def run(args: list) -> list:
            if self.seen:
                for given, kind in zip(args, kinds):
                    if kind is not None and isinstance(given, torch.Tensor) and (given.device, given.dtype) != kind:
                        raise RuntimeError(f"a hook on saved tensors gave {given.dtype} on {given.device} where {kind[1]} on {kind[0]} was saved")
                args[:] = _laid(args, traced)
            return fn(args)
        run._boxed_call = True
        return run


def _sizes(val) -> tuple[tuple, tuple]:
    """The sizes that an argument shows (a number: its own), and its strides."""
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), tuple(val.stride()) if val.layout is torch.strided else ()
    return ((val,) if isinstance(val, torch.SymInt) else ()), ()


def _laid(args: list, traced: list[tuple[tuple, tuple]]) -> list:
    """`args` with the strides that were traced."""
    known = {}
    for a, (sizes, _) in zip(args, traced):
        known.update((s.node.expr, n) for s, n in zip(sizes, a.shape if isinstance(a, torch.Tensor) else (a,)) if isinstance(s, torch.SymInt))
    number = lambda n: int(n.node.expr.subs(known)) if isinstance(n, torch.SymInt) else n
    return [_relaid(a, tuple(map(number, strides))) if strides else a for a, (_, strides) in zip(args, traced)]


def _relaid(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`x`, or a copy of it with `strides`, of which those along extents of 1 are no matter."""
    if all(a == b or e == 1 for a, b, e in zip(x.stride(), strides, x.shape)) or not x.numel():
        return x
    made = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)       # one element stands for all along a stride of 0
    made[once].copy_(x[once])
    return made
