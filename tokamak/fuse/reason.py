"""Why two nodes do not share a kernel: the stable list, and the record of every decision."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# code -> what it means, for people (documented; tools and tests refer to the codes)
CODES: dict[str, str] = {
    "opaque": "one side is a call of torch, not a kernel",
    "misaligned": "the reader uses the value at other coordinates than those it is made at",
    "cycle": "a value between them must be computed by another kernel",
    "no_common_axes": "no axis is common to all members: nothing to run in parallel over",
    "fold_incomplete": "the value is complete only when the whole kernel has run",
    "scan_order": "a scan runs in order along an axis the others need in parallel",
    "scatter": "a scatter's result is complete only when every update is done",
    "accumulators": "the partial results of the threads would not fit the cache",
    "no_registers": "a row is longer than what one program can hold at once",
    "no_cache": "what the members share would have left the cache before it is used again",
    "no_parallelism": "the common axes are too short to keep every core busy",
    "no_saving": "they share no value worth keeping",
    "too_large": "the kernel would grow beyond what compiles quickly",
    "loop_tree": "their loops do not nest in one kernel",
    "device": "they live on different devices",
    "vendor": "left to the vendor's library",
}


@dataclass(frozen=True)
class Reason:
    """None where something is legal; this where it is not. `kind`: illegal, infeasible, unprofitable or not attempted."""
    code: str
    kind: str
    detail: str = ""

    def __post_init__(self):
        if self.code not in CODES:
            raise ValueError(f"'{self.code}' is no documented reason")

    def __str__(self) -> str:
        return CODES[self.code] + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, eq=False)
class Decision:
    """One producer -> consumer edge (or a shared input): fused, or the reason why not and the bytes it costs."""
    producer: Any
    consumer: Any
    reason: Reason | None
    bytes: int
