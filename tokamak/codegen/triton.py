"""TileKernel -> Triton text: a Python module with one jitted function. Nothing is decided here."""
from __future__ import annotations

from collections.abc import Iterator

from . import tile_words as words
from .kernel import Param
from .tile_kernel import For, TileKernel

HEAD = "import triton\nimport triton.language as tl\nfrom tokamak.codegen import triton_lib as tk\n\n\n"
INDENT = "    "


def render(k: TileKernel, name: str) -> str:
    """The module that defines `name`, the kernel."""
    body = "\n".join(statements(k.lines, 1))
    return f"{HEAD}@triton.jit\ndef {name}({', '.join(parameters(k))}):\n{body}\n"


def parameters(k: TileKernel) -> list[str]:
    return [p.name for p in k.params] + (["err"] if k.errors else []) + [b.name for b in k.boxes]


def signature(k: TileKernel) -> tuple[str, ...]:
    """The Triton type of each parameter."""
    return tuple(_type(p, k.schedule.wide) for p in k.params) + (("*i32",) if k.errors else ())


def boxes(k: TileKernel) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Element type and tile of each descriptor."""
    return tuple(("tf32" if b.rounds else words.pointer_type(b.memory.dtype)[1:], b.block) for b in k.boxes)


def _type(p: Param, wide: bool) -> str:
    if p.kind == "memory":
        return words.pointer_type(p.dtype)
    return {"int": "i64" if wide else "i32", "float": "fp64", "value": "i64", "order": "i32"}[p.kind]


def divisible(k: TileKernel) -> frozenset[int]:
    """Parameters known to be multiples of 16: memory, whose alignment each call looks at, and integers."""
    return frozenset(n for n, p in enumerate(k.params) if p.kind == "memory" or p.name in k.aligned)


def statements(lines, depth: int) -> Iterator[str]:
    """Indented text of statements and loops."""
    for line in lines:
        if isinstance(line, For):
            yield f"{INDENT * depth}{line.head}:"
            yield from statements(line.lines, depth + 1)
        else:
            yield f"{INDENT * depth}{line}"
