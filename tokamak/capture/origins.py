"""Where a call of the traced graph stands in the user's program."""
from __future__ import annotations

from functools import lru_cache

import torch
from torch import fx

from ..ir.graph import Origin


def origin(node: fx.Node) -> Origin:
    """Source line and module path of an FX node, from the metadata that Dynamo and AOTAutograd carry."""
    file, line, code = _line(node.meta.get("stack_trace") or "")
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    target = node.target
    op = target.__name__ if isinstance(target, torch._ops.OpOverload) else str(getattr(target, "__name__", target))
    return Origin(op, file, line, code, str(path).removeprefix("L['self']").lstrip("."), node.name)


@lru_cache(maxsize=256)
def _line(trace: str) -> tuple[str, int, str]:
    """(file, number, text) of the innermost line of a stack trace: calls of one line follow each other."""
    file, line, code = "", 0, ""
    lines = trace.strip().splitlines()
    for i in range(len(lines) - 1, -1, -1):
        text = lines[i].strip()
        if text.startswith('File "'):
            file, _, rest = text[6:].partition('", line ')
            number = rest.split(",")[0]
            line = int(number) if number.isdigit() else 0
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            break
    return file, line, code
