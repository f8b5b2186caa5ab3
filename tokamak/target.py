"""What the compiler knows of a machine: frozen facts, found once and passed in."""
from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """`vector_bytes`: width of a vector register. `l1`, `l2`: bytes of cache a core has to itself. `threads`: how many run at once."""
    name: str = "cpu"
    vector_bytes: int = 64
    threads: int = 2
    l1: int = 32 << 10
    l2: int = 1 << 20


@functools.cache
def _vector_bytes() -> int:
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": 64, "AVX2": 32}.get(capability, 16)


def target() -> Target:
    """This machine, as it is now (the number of threads may be changed by the user at any time)."""
    return Target("cpu", _vector_bytes(), torch.get_num_threads())
