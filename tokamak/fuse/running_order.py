"""The order in which the groups and calls of a plan run."""
from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from ..errors import InternalError
from ..ir.graph import Result
from .axes import Group


def running_order(steps: Sequence, step_of: Mapping, sources: Mapping, position: Mapping) -> list:
    """`steps`, groups and calls, so that producers run first; among those ready the one that stands first in the graph. `step_of`: node -> its step;
    `sources`: node -> what it reads; `position`: node -> where it stands in the graph. Raises InternalError for a circle."""
    nodes = lambda step: step.nodes() if isinstance(step, Group) else (step,)
    needs: dict = {s: set() for s in steps}
    for s in steps:
        for r in (r for n in nodes(s) for r in sources[n]):
            source = step_of.get(r.opaque if isinstance(r, Result) else r)
            if source is not None and source is not s:
                needs[s].add(source)
    users: dict = {s: [] for s in steps}
    for s, read in needs.items():
        for source in read:
            users[source].append(s)
    key = {s: (min(position[n] for n in nodes(s)), i) for i, s in enumerate(steps)}
    left = {s: len(needs[s]) for s in steps}
    ready = [key[s] for s in steps if not left[s]]
    heapq.heapify(ready)
    out = []
    while ready:
        out.append(steps[heapq.heappop(ready)[1]])
        for u in users[out[-1]]:
            left[u] -= 1
            if not left[u]:
                heapq.heappush(ready, key[u])
    if len(out) != len(steps):
        raise InternalError("the groups depend on each other in a circle")
    return out
