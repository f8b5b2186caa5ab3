"""Which call of the user's program an error word of a kernel is about. A kernel's checks stand where fusion has moved them, among other calls' work;
in the graph as captured each stands in a node of its own call."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..ir.expr import Const, Expr, Load, Op, loads, walk
from ..ir.graph import Compute, Graph, Input, Origin, Result, Scatter, reads
from ..ir.index import Fetch
from ..ir.ops import can_fail
from ..schedule.body import Memory
from .scope import all_atoms


def blamed(kind: str, where: Any, graph: Graph, captured: Graph) -> Origin | None:
    """The call in `captured` that asks for the check `where` of a kernel of `graph` (a Fetch, or an Op that divides integers): of the checks of that
    `kind` whose position or divisor is made of the same inputs and results of torch's calls, the first that has the same bound and, since rewriting
    keeps most of them, the most operations and constants in common. None if there is none."""
    wanted, words = _made_of(_watched(where), graph)
    bound, found, least = getattr(where, "bound", None), None, None
    for node in captured.nodes:
        for check in _checks(node, kind):
            names, others = _made_of(_watched(check), captured)
            apart = (getattr(check, "bound", None) is not bound, ((words - others) + (others - words)).total())
            if names == wanted and (least is None or apart < least):
                found, least = captured.origin(node), apart
    return found


def _made_of(e: Expr, graph: Graph) -> tuple[set[str], Counter]:
    """Names of the inputs and of the results of calls that `e` is made of, through the values between; its operations and constants."""
    names, words, seen, left = set(), Counter(_words(e)), set(), [x.node for x in loads(e)]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, (Input, Result)):
            names.add(node.name if isinstance(node, Input) else graph.origin(node).name)
        else:
            left.extend((node.node,) if isinstance(node, Memory) else reads(node))
            words.update(_words(node.expr) if isinstance(node, Compute) else ())
    return names, words


def _words(e: Expr) -> list:
    return [x.name if isinstance(x, Op) else x.value for x in walk(e) if isinstance(x, (Op, Const))]


def _watched(check: Fetch | Op) -> Expr:
    """What a check looks at: a position, or a divisor."""
    return check.expr if isinstance(check, Fetch) else check.args[-1]


def _checks(node: Any, kind: str) -> Iterator[Fetch | Op]:
    """The checks of one kind that a node's value asks for."""
    if isinstance(node, Compute):
        parts, indices = [node.expr], []
    elif isinstance(node, Scatter):
        parts, indices = [node.value, *([node.guard] if node.guard is not None else [])], [*node.index]
    else:
        return
    for e in walk(*parts):
        if kind == "division" and isinstance(e, Op) and can_fail(e.name, e.dtype):
            yield e
        if isinstance(e, Load):
            indices += e.index
    if kind == "index":
        yield from (a for i in indices for a in all_atoms(i) if isinstance(a, Fetch))
