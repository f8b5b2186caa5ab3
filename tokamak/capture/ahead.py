"""A training step's backward graph is cut when its forward graph is, but torch asks for its function only when backward runs. What is done for it in
between, while this process would wait for others that build the forward's kernels, is kept here until torch hands over the graph itself: if that
still says the same."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx


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
    if any(n.op == "get_attr" for n in number):
        return None
    arguments, value = partial(frozen, number), partial(frozen, None)
    try:
        return tuple([(n.op, n.target, arguments(n.args), arguments(n.kwargs), value(n.meta.get("val")), repr(n.meta.get("custom"))) for n in number])
    except Own:
        return None


class Own(Exception):
    """A value that is an object of its graph's own: equal to no other's."""


def frozen(number: dict[fx.Node, int] | None, value: Any) -> Any:
    """`value` of lists, tuples, dictionaries, with each leaf beside its type: 1, 1.0 and True are different arguments; a NaN is like itself. A node
    is its number; without numbers, tensors are what is known of them before they have values. Raises Own."""
    if isinstance(value, fx.Node):
        return "place", number[value]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, tuple([frozen(number, v) for v in value])
    if isinstance(value, dict):
        return "dict", tuple([(k, frozen(number, v)) for k, v in value.items()])
    if isinstance(value, slice):
        return "slice", frozen(number, (value.start, value.stop, value.step))
    if isinstance(value, torch.Tensor) and number is None:
        return like(value)
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Own
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def like(value: torch.Tensor) -> tuple:
    """A tensor by what is known of it before it has values. Raises Own where sizes are symbolic."""
    shape, strides = tuple(value.shape), tuple(value.stride()) if value.layout is torch.strided else ()
    if any([isinstance(s, torch.SymInt) for s in (*shape, *strides)]):
        raise Own
    return "tensor", shape, strides, value.dtype, str(value.device), value.layout, value.is_conj(), value.is_neg()
