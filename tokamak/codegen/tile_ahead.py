"""A loop over blocks whose loads are a turn ahead: while a program folds what it has read, what it folds next is on its way.

    for b in ...: x = load(b); fold(x)      becomes      xn = load(first); for b in ...: x = xn; xn = load(next b); fold(x)
"""
from __future__ import annotations

import re

from .tile_kernel import For

_SET, _NAME = re.compile(r"(\w+) = (tl\.load\()?"), re.compile(r"\b[a-z]\d+\b")


def read_ahead(loop: For, var: str, first: str, step: int, count: str) -> list:
    """`loop`, over the turns `var` from `first` on below `count`, every `step`-th, and what stands before it; behind the last turn it reads the last
    one's block again, and where there is none, the first of all. The loop as it is where its loads need what it carries."""
    if not all(isinstance(x, str) for x in loop.lines):
        return [loop]
    made = [_SET.match(x) for x in loop.lines]
    sets = {m[1]: n for n, m in enumerate(made) if m is not None}
    needed, todo = set(), [n for n, m in enumerate(made) if m is not None and m[2]]
    loads = set(todo)
    while todo:
        n = todo.pop()
        if n not in needed:
            needed.add(n)
            read = [sets[x] for x in _NAME.findall(loop.lines[n].split(" = ", 1)[1]) if x in sets]
            if any(m >= n for m in read):       # of the turn before
                return [loop]
            todo += read
    if not loads:
        return [loop]
    names = {made[n][1] for n in needed}

    def moved(n: int, turn: str) -> str:
        return _NAME.sub(lambda m: turn if m[0] == var else m[0] + "n" if m[0] in names else m[0], loop.lines[n])
    head = sorted(needed)
    before = [f"{var}n = tl.maximum(tl.minimum({first}, {count} - 1), 0)", *(moved(n, f"{var}n") for n in head)]
    now = [f"{made[n][1]} = {made[n][1]}n" for n in sorted(loads)]
    here = [loop.lines[n] for n in head if n not in loads]
    following = [f"{var}n = tl.minimum({var} + {step}, {count} - 1)", *(moved(n, f"{var}n") for n in head)]
    rest = [x for n, x in enumerate(loop.lines) if n not in needed]
    return [*before, For(loop.head, [*now, *here, *following, *rest])]
