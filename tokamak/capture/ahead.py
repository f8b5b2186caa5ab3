"""A training step's backward graph is cut when its forward graph is, but torch asks for its function only when backward runs. What is done for it in
between, while this process would wait for others that build the forward's kernels, is kept here until torch hands over the graph itself: if that
still says the same."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


class Ahead:
    """`work(gm)`: what is done for a graph ahead of its time; it may raise, and is then done again when it is due."""

    def __init__(self, work: Callable[[fx.GraphModule], Any]):
        self.work = work
        self.expected: fx.GraphModule | None = None
        self.made: tuple[tuple, Any] | None = None          # what the graph said, and what was done for it

    def expect(self, gm: fx.GraphModule) -> None:
        """`gm` is the graph that torch will ask for next."""
        self.expected, self.made = gm, None

    def now(self) -> None:
        """Does the work for the graph that is expected, once, if it is one that can be known again."""
        gm, self.expected = self.expected, None
        says = said(gm) if gm is not None else None
        if says is not None:
            try:
                self.made = says, self.work(gm)
            except Exception:               # it comes up again, at its place, when the graph is due
                self.made = None

    def take(self, gm: fx.GraphModule) -> Any:
        """What was done for `gm`, given out once; None where nothing was, or for a graph that said something else."""
        made, self.made, self.expected = self.made, None, None
        return made[1] if made is not None and made[0] == said(gm) else None


def said(gm: fx.GraphModule) -> tuple | None:
    """All that decides what becomes of `gm`: equal for graphs of equal calls on equal tensors. None for a graph with symbolic sizes, or with
    attributes or tensors as arguments, which are objects of its own."""
    number = {n: i for i, n in enumerate(gm.graph.nodes)}
    own = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Tensor)
    if any(n.op == "get_attr" for n in number) or any(isinstance(leaf, own) for n in number for leaf in _leaves(n)):
        return None
    numbered = lambda args: fx.map_arg(args, lambda n: _Place(number[n]))
    return tuple((n.op, n.target, _frozen(numbered(n.args)), _frozen(numbered(n.kwargs)), _frozen(pytree.tree_map(_like, n.meta.get("val"))),
                  repr(n.meta.get("custom"))) for n in number)


class _Place(tuple):
    """The place of a node among the others, where a call has the node as argument."""

    def __new__(cls, place: int):
        return super().__new__(cls, ("place", place))


def _leaves(n: fx.Node):
    """Numbers of which symbolic ones would be found: arguments, extents and strides."""
    yield from pytree.tree_leaves((n.args, n.kwargs))
    for value in pytree.tree_leaves(n.meta.get("val")):
        yield from (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) and value.layout is torch.strided else (value,)


def _like(value: Any) -> Any:
    """A tensor by what is known of it before it has values."""
    if not isinstance(value, torch.Tensor):
        return value
    strides = tuple(value.stride()) if value.layout is torch.strided else ()
    return "tensor", tuple(value.shape), strides, value.dtype, str(value.device), value.layout, value.is_conj(), value.is_neg()


def _frozen(value: Any) -> Any:
    """`value` of lists, tuples, dictionaries, with each leaf beside its type: 1, 1.0 and True are different arguments; a NaN is like itself."""
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple(map(_frozen, value))
    if isinstance(value, dict):
        return "dict", tuple((k, _frozen(v)) for k, v in value.items())
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return type(value).__name__, repr(value) if isinstance(value, float) else value
