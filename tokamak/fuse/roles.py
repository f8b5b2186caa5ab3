"""Which of a group's legal choices of parallel axes its kernel takes."""
from __future__ import annotations

from . import gpu
from .axes import Group
from .cost import Hints, cpu_roles
from .legal import Roles, candidates


def best_roles(group: Group, hints: Hints, target) -> Roles | None:
    """The choice for `target`; None when no parallel axes are legal. On an ordered target nothing is folded across threads: shares of a fold are cut by
    sizes beside it."""
    found = [r for r in candidates(group) if not target.ordered or not r.accumulating]
    if not found:
        return None
    return (gpu.best_roles if target.kind == "gpu" else cpu_roles)(group, found, hints, target)
