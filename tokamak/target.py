"""What the compiler knows of a machine: frozen facts, found once and passed in."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


ORDERED_THREADS = 16        # what plans for an ordered target are made for, whatever machine runs them


@dataclass(frozen=True)
class Target:
    """`vector_bytes`: width of a vector register. `l1`, `l2`: bytes of cache a core has to itself. `threads`: how many run at once.
    `ordered`: the elements of a fold are taken in an order that depends on the fold alone, not on sizes beside it or on threads."""
    name: str = "cpu"
    vector_bytes: int = 64
    threads: int = 2
    l1: int = 32 << 10
    l2: int = 1 << 20
    ordered: bool = False


@functools.cache
def _vector_bytes() -> int:
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": 64, "AVX2": 32}.get(capability, 16)


def target(ordered: bool = False) -> Target:
    """This machine, as it is now (the number of threads may be changed by the user at any time, so an `ordered` target has none to look at)."""
    return Target("cpu", _vector_bytes(), ORDERED_THREADS if ordered else torch.get_num_threads(), ordered=ordered)
