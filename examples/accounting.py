"""Counting memory operations: of eager while it runs, and of tokamak from its plan."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.fuse.axes import Group
from tokamak.fuse.cost import Hints
from tokamak.ir.graph import Input, Opaque, Result, View, reads
from tokamak.options import current


@dataclass(frozen=True)
class Traffic:
    """`operations`: kernels that run; `accesses`: tensors that they read or write; `bytes` of those."""
    operations: int = 0
    accesses: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.operations + other.operations, self.accesses + other.accesses, self.bytes + other.bytes)


# -- eager ---------------------------------------------------------------------------------------------------------------
class _Watch(TorchDispatchMode):
    """Sees every operation that eager runs. Views and bare allocations move nothing and are not counted."""

    def __init__(self):
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(t): t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}.values()
        made = {id(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor)}.values()
        storages = {t.untyped_storage()._cdata for t in given}
        is_view = made and not func._schema.is_mutable and all(t.untyped_storage()._cdata in storages for t in made)
        if made and not is_view and "empty" not in func._schema.name:
            self.traffic += Traffic(1, len(given) + len(made), sum(map(_bytes, (*given, *made))))
        return out


def _bytes(t: torch.Tensor) -> int:
    """Bytes of the elements that `t` shows, each once."""
    count = 1
    for extent, stride in zip(t.shape, t.stride()):
        count *= extent if stride else 1
    return count * t.element_size()


def eager_traffic(fn: Callable[[], object]) -> Traffic:
    """What eager does in one call of `fn`, forward and backward."""
    with _Watch() as watch:
        fn()
    return watch.traffic


# -- tokamak -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Planned:
    """What the plans of a program's graphs say: `traffic` of kernels and opaque calls, `opaque` how many of these, `least` the fewest bytes possible."""
    traffic: Traffic
    opaque: int
    least: int


def planned(runner: Callable, program: Callable, args: tuple, backward: bool) -> Planned:
    """Compiles `program`, runs it once and counts in the plans. `runner` as in demo.runner."""
    plans: list = []

    def one(gm, inputs, kind: str):
        def trace(stage: str, value):
            if stage == "lower":
                plans.append(value.plan)
            return value
        return compile_graph(gm, inputs, current(), trace, f"{kind}_{len(plans)}")
    torch._dynamo.reset()
    runner(program, args, backward, partial(torch.compile, backend=partial(aot.autograd, compile_one=one)))()
    torch._dynamo.reset()
    steps = [(p, s) for p in plans for s in p.steps]
    return Planned(sum((_step(p, s) for p, s in steps), Traffic()), sum(isinstance(s, Opaque) for _, s in steps), sum(map(least, plans)))


def _step(plan, step) -> Traffic:
    """One kernel or one opaque call: each tensor that it reads from memory and each that it writes there."""
    size = partial(_node_bytes, hints=Hints(plan.graph.hints))
    if isinstance(step, Group):
        inside = set(step.nodes())
        read = dict.fromkeys(r for n in step.nodes() for r in reads(n) if r not in inside)
        wrote: Iterable = plan.stores[step]
    else:
        read = dict.fromkeys(step.reads)
        wrote = [n for n in plan.graph.nodes if isinstance(n, Result) and n.opaque is step]
    return Traffic(1, len(read) + len(tuple(wrote)), sum(map(size, (*read, *wrote))))


def least(plan) -> int:
    """Bytes of the graph's inputs that it reads and of its outputs."""
    size = partial(_node_bytes, hints=Hints(plan.graph.hints))
    read = {r for n in plan.graph.nodes for r in reads(n) if isinstance(r, Input)}
    made = {o.node for o in plan.graph.outputs if isinstance(o, View) and not isinstance(o.node, Input)} | {w.source.node for w in plan.graph.writes}
    return sum(map(size, read | made))


def _node_bytes(node, hints: Hints) -> int:
    count = 1
    for extent, stride in zip(node.shape, node.strides):
        count *= hints(extent) if stride.constant != 0 else 1
    return count * node.dtype.bytes
