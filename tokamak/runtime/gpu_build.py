"""Triton text -> machine code for GPUs."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Arch = tuple[str, int | str, int]        # Triton's words for a target: ("cuda", 90, 32), ("hip", "gfx942", 64)


@dataclass(frozen=True)
class GpuUnit:
    """Triton text that defines the jitted function `name`, whose parameters have the Triton types `signature`, in order; there are no constexprs.
    `divisible`: positions of parameters that are multiples of 16 (pointers: 16-byte aligned, integers: value % 16 == 0); where a call breaks that, a
    variant of the kernel is built that does not rely on it. `cooperative`: all programs of the grid are resident at once (they wait for each other).
    `contract`: a product may be added to something without being rounded first. `name` stands for the text and all other fields."""
    name: str
    text: str
    signature: tuple[str, ...]
    divisible: frozenset[int] = frozenset()
    warps: int = 4
    stages: int = 3
    cooperative: bool = False
    contract: bool = True


@dataclass(frozen=True)
class Binary:
    """What was built of `unit` for `arch`. `entry`: the symbol in `code`. `shared`: bytes of shared memory a program. `registers` a thread; `spilled`: bytes
    of stack a thread. `scratch`: (bytes a program, alignment) of global memory that the kernel wants as a workspace of its own; (0, 1) is none.
    `listing`: the assembly text (PTX, AMDGCN)."""
    unit: GpuUnit
    arch: Arch
    code: bytes = field(repr=False)
    entry: str
    shared: int
    threads: int
    registers: int
    spilled: int
    scratch: tuple[int, int]
    listing: str = field(repr=False)


@dataclass(frozen=True)
class GpuBuild:
    """How one unit came to be: 'process' (it was there already), 'cache' (on disk) or 'compiled', in `seconds`."""
    name: str
    how: str
    seconds: float
    binary: Binary


def warm() -> None:
    """Starts the processes that compile, in the background: call it when the first graph with a GPU's tensors is seen."""


def build(units: Sequence[GpuUnit], arch: Arch, *, cache_dir: str = "", report: Callable[[GpuBuild], object] | None = None) -> dict[str, Binary]:
    """The machine code of each unit by its name. `cache_dir`: where it is kept ('' keeps none). `report` is told of each unit.
    Raises BuildError, which names the kernel, or CompilerMissing when there is no Triton."""
    raise NotImplementedError
