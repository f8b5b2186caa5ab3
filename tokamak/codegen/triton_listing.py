"""A kernel's Triton for people to read: the statements that are built, each with what it computes. `triton.render` has the module as it is built."""
from __future__ import annotations

import re

from .tile_kernel import TileKernel
from .triton import INDENT, boxes, parameters, signature, statements

_COLUMN = 72        # where comments begin
_MADE = re.compile(r"\s*(\w+)(?:, \w+)* = ")                            # the register that a line makes
_WRITTEN = re.compile(r"\s*tl\.(?:store|atomic_\w+)\((\w+)")          # the memory that a line writes


def listing(kernel: TileKernel, name: str, comments: dict[str, str]) -> str:
    """The function `name`; `comments`: parameter or register -> what it is."""
    said = {"err": "the error word: a number for each check that may fail", **comments}
    lines = [f"def {name}("]
    types = (*signature(kernel), *(f"descriptor of {' x '.join(map(str, block))} {t}" for t, block in boxes(kernel)))
    lines += [_aligned(f"{INDENT}{p},", f"{said[p]}, {t}" if p in said else t) for p, t in zip(parameters(kernel), types, strict=True)]
    lines.append("):")
    for line in statements(kernel.lines, 1):
        lines.append(_aligned(line, _said(line, said)))
    return "\n".join(lines) + "\n"


def _said(line: str, comments: dict[str, str]) -> str:
    """What a line computes or writes, '' where nobody knows."""
    made, written = _MADE.match(line), _WRITTEN.match(line)
    if made is not None:
        return comments.get(made[1], "an index from memory, checked and clamped" if made[1].startswith("f") else "")
    return comments.get(written[1], "").split(": ")[0] if written is not None else ""


def _aligned(line: str, comment: str) -> str:
    """A line with its comment, which begins at the column."""
    return f"{line:<{_COLUMN - 2}}  # {comment}" if comment else line
