"""Which of a group's legal choices of parallel axes its kernel takes."""
from __future__ import annotations

from . import gpu
from .axes import Group
from .contraction import held, shared_roles
from .cost import Hints, cpu_roles
from .legal import Roles, candidates
from .narrow import narrow_roles


def best_roles(group: Group, hints: Hints, target) -> Roles | None:
    """The choice for `target`; None when no parallel axes are legal. On an ordered target nothing is folded across threads: shares of a fold are cut
    by sizes beside it."""
    products = held(group) if target.kind == "gpu" else []
    if products:
        shared = shared_roles(group, products, hints)
        fits = shared is not None and gpu.infeasible(group, shared, hints, target) is None
        return shared if fits or target.ordered else narrow_roles(group) or shared
    found = [r for r in candidates(group, gpu.updates(group, target)) if not target.ordered or not r.accumulating]
    if not found:
        return None
    return (gpu.best_roles if target.kind == "gpu" else cpu_roles)(group, found, hints, target)


def plainest_roles(group: Group, target) -> Roles:
    """The choice for a group of one node that folds nothing across threads: in parallel over as many dimensions of the result as is legal."""
    return max((r for r in candidates(group, gpu.updates(group, target)) if not r.accumulating), key=lambda r: len(r.parallel))
