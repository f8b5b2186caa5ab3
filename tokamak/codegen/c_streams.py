"""Several rows folded in step, each from another part of a share: the lines of an iteration for each of them, one after the other."""
from __future__ import annotations

import re

from ..ir import ops
from .c_loop import SHORT, statements_of
from .kernel import Convert, Fold, Let, Loop, Phase, Read, Refill, Splat, Write

STREAMS = 4             # rows that are folded at a time, each from another part of a share: a core asks for more memory at once than along one
                        # stretch
#                         of it. One core, ms, one row / four / torch: sums of 16384x1024 3.95 / 3.36 / 3.45, of 4096x4096 4.57 / 3.29 / 4.05, norms
# of such rows 3.95 / 3.42 / 3.29 and 4.33 / 3.34 / 3.51, largest of 4096x4096 3.83 / 3.37 / 3.38
FEW = 24                # statements of a body that shares packed blocks up to which it is written for STREAMS rows at once: one read of a block for
                        # all of them, and folds that do not wait for each other
_OWN = re.compile(r"\b(?:ot|[atfv])\d\w*\b")        # what an iteration declares: registers, accumulators, fetched indices


def reads_rows(p: Phase) -> bool:
    """Does an iteration along one axis fold a row as it lies in memory, in one short loop?"""
    loops = [s for s in p.body if isinstance(s, Loop)]
    if len(p.parallel) != 1 or p.block or p.partials or p.buffers or len(loops) != 1 or not loops[0].vector or len(loops[0].items) > SHORT:
        return False
    items, (row, _) = loops[0].items, p.parallel[0]
    plain = all(isinstance(s, (Read, Convert, Splat, Fold)) or isinstance(s, Let) and not ops.OPS[s.op].heavy for s in items)
    return plain and any(isinstance(s, Read) and s.mode == "unit" and row in s.address.axes() for s in items)


def rows_in_step(p: Phase) -> bool:
    """Do iterations along the last axis share packed blocks, and nothing else that they fill, in a body that is short enough for several at once?"""
    packed = {s.memory for s in statements_of([s for s in p.body if isinstance(s, Refill)]) if isinstance(s, Write)}
    folds = any(isinstance(s, Fold) for s in statements_of(p.body))
    return bool(p.inside) and folds and not p.partials and {b.name for b in p.buffers} <= packed and len(list(statements_of(p.body))) <= FEW


def in_step(body: list[str], row: str, before: list[str]) -> list[str] | None:
    """The lines `body` of an iteration for STREAMS of them, `q` coordinates of `row` apart, in step; what all say alike once. All of them use the
    names of the lines `before`. None where their control differs."""
    out, common = [], set(_OWN.findall("\n".join(before)))
    named = lambda line, k: _OWN.sub(lambda name: name[0] if name[0] in common else f"{name[0]}_q{k}", line)
    of = lambda line, k: re.sub(rf"\b{row}\b", f"({row} + {k} * q)", named(line, k))
    for line in body:
        each = list(dict.fromkeys(of(line, k) for k in range(STREAMS)))
        if len(each) > 1 and line.count("{") != line.count("}"):
            return None
        out += each
    return out
