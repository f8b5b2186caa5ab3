"""Which of the three policies of numbers holds where: the compile's own, but for regions that the program marks.

    with torch.fx.traceback.annotate({"tokamak_policy": "eager"}):
        ...

The mark reaches the calls traced within it and their backward.
"""
from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any, get_args

import torch
from torch import fx

from ..options import Policy, one_of

MARK = "tokamak_policy"
_MOVES = frozenset({torch.ops.aten.clone.default, torch.ops.aten.cat.default, torch.ops.aten.where.self, torch.ops.aten.constant_pad_nd.default})


class Regions:
    """`policy[node]` of each call of a traced graph; `all`: every policy that holds somewhere. `rounds`: the calls whose results are rounded as eager
    rounds them: those of regions that are not `fast`, and those whose results go into one. Raises OptionError for a mark that is no policy."""

    def __init__(self, gm: fx.GraphModule, policy: str):
        calls = [n for n in gm.graph.nodes if n.op == "call_function"]
        self.policy = {n: _marked(n, policy) for n in calls}
        self.all = frozenset(self.policy.values()) or frozenset((policy,))
        self.rounds: set[fx.Node] = set()
        for n in reversed(calls):
            if self.policy[n] != "fast" or any(self._eager_reader(u) for u in n.users):
                self.rounds.add(n)

    def _eager_reader(self, user: fx.Node) -> bool:
        """Does `user`, or one to whom it only hands a value on, compute as eager does?"""
        if self.policy.get(user, "fast") != "fast":
            return True
        return user in self.rounds and (aliases(user.target) or user.target in _MOVES)


def _marked(node: fx.Node, policy: str) -> str:
    found = (node.meta.get("custom") or {}).get(MARK, policy)
    one_of(MARK, found, get_args(Policy))
    return found


def storage_of(value: Any) -> int | None:
    """What says which memory a traced tensor has; None for other values."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def aliases(target) -> bool:
    """Does torch's operator return a view of its argument?"""
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def viewed(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, what it is a view of, and so on."""
    yield node
    while aliases(node.target) or node.target is getitem and aliases(node.args[0].target):
        node = node.args[0]
        yield node
