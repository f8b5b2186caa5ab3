"""Counting memory operations: what eager does while it runs."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokamak.tools.kernels import Memory


class _Watch(TorchDispatchMode):
    """Sees every operation that eager runs. Views and bare allocations move nothing and are not counted."""

    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(t): t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)}.values()
        made = {id(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor)}.values()
        storages = {t.untyped_storage()._cdata for t in given}
        is_view = not func._schema.is_mutable and all(t.untyped_storage()._cdata in storages for t in made)
        if made and not is_view and "empty" not in func._schema.name:
            self.memory += Memory(1, len(given) + len(made), sum(map(_bytes, (*given, *made))))
        return out


def _bytes(t: torch.Tensor) -> int:
    """Bytes of the elements that `t` shows, each once."""
    count = 1
    for extent, stride in zip(t.shape, t.stride()):
        count *= extent if stride else 1
    return count * t.element_size()


def eager_memory(fn: Callable[[], object]) -> Memory:
    """What eager does in one call of `fn`, forward and backward."""
    with _Watch() as watch:
        fn()
    return watch.memory
