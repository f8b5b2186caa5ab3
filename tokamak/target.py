"""What the compiler knows of a machine: frozen facts, found once and passed in."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`vector_bytes`: width of a vector register. `l1`, `l2`: bytes of cache a core has to itself. `threads`: how many run at once."""
    name: str = "cpu"
    vector_bytes: int = 64
    threads: int = 2
    l1: int = 32 << 10
    l2: int = 1 << 20
