"""Which value of the user's program a register of a kernel holds.

Expressions are rewritten on their way from the captured graph to a kernel: axes are renamed, split and merged, casts dropped, producers moved into
their readers. What stays is the tree of operations over the graph's inputs. `Keys` numbers these trees, regardless of axes and types; a register and
a value of the captured graph with one number are the same value (or the same value at other coordinates).
"""
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping

from ..codegen.kernel import Kernel
from ..codegen.tile_kernel import TileKernel, Workspace
from ..fuse.axes import Group
from ..ir.expr import Cast, Const, Coord, Expr, Load, Op, Reduce, Scalar, walk
from ..ir.graph import Compute, Graph, fold
from ..schedule.body import Memory
from .kernels import memory_name
from .record import GraphRecord


class Keys:
    """Numbers of operation trees. `graphs`: those whose nodes the expressions may load."""

    def __init__(self, *graphs: Graph):
        self.numbers: dict[tuple, int] = {}
        self.memo: dict[Expr, int] = {}
        self.nodes: dict = {}
        for graph in graphs:
            for n in graph.nodes:
                if isinstance(n, Compute):
                    self.nodes[n] = self(n.expr)
                else:
                    self.nodes[n] = self._number("value", getattr(n, "name", "") or graph.origin(n).name, getattr(n, "position", 0))

    def and_of(self, partial: Mapping[Workspace, Expr]) -> Keys:
        """The same, and numbers for what workspaces hold a part of."""
        more = copy.copy(self)
        more.numbers, more.memo, more.nodes = dict(self.numbers), dict(self.memo), dict(self.nodes)
        for node, e in partial.items():
            more.nodes[node] = more(e)
        return more

    def _number(self, *tree) -> int:
        return self.numbers.setdefault(tree, len(self.numbers))

    def __call__(self, e: Expr) -> int:
        found = self.memo.get(e)
        if found is None:
            for x in walk(e):
                self.memo[x] = self._tree(x)
            found = self.memo[e]
        return found

    def _tree(self, e: Expr) -> int:
        known = self.memo
        if isinstance(e, Cast):
            return known[e.arg]
        if isinstance(e, Load):
            node = e.node.node if isinstance(e.node, Memory) else e.node
            plain = self.nodes[node] if node in self.nodes else self._number("value", id(node))
            return plain if e.guard is None else self._number("where", known[e.guard], plain, self(e.other))
        if isinstance(e, Const):
            return self._number("number", repr(float(e.value)))
        if isinstance(e, Scalar):
            return self._number("number", e.argument)
        if isinstance(e, Coord):
            return self._number("coordinate")
        kind = e.name if isinstance(e, Op) else getattr(e, "monoid", "random")
        return self._number(kind, getattr(e, "component", 0), *(known[c] for c in e.children()))


def partial_results(kernels: Kernel | tuple[TileKernel, ...]) -> dict[Workspace, Expr]:
    """What the elements of a workspace are when another kernel reads them: terms of a fold, or the fold itself where one program made all of it."""
    found: dict[Workspace, Expr] = {}
    for k in kernels if isinstance(kernels, tuple) else ():
        for e, _, nodes in k.spaces:
            found.update({node: e.args[n] if k.schedule.programs > 1 else Reduce(e.monoid, e.over, e.args, n) for n, node in enumerate(nodes)})
        found.update(k.fills)
    return found


def register_names(record: GraphRecord, group: Group, kernel: Kernel | TileKernel) -> dict[str, str]:
    """Register of a kernel of `group` -> the value of the user's program that it holds, or ('in ...') that it is a part of; for those that are
    either."""
    known, names = record.once("names of values", lambda: value_names(record))
    partial = partial_results(record.values["lower"].kernels[group])
    keys, found = known.and_of(partial) if partial else known, {}
    for register, e in kernel.sources.items():
        if isinstance(e, Const):
            found[register] = f"{e.value:.6g}" if isinstance(e.value, float) else str(e.value)
        elif isinstance(e, Load) and isinstance(e.node, Memory) and isinstance(e.node.node, Workspace):
            found[register] = memory_name(record, e.node.node)
        elif (name := names.get(keys(e))) is not None:
            found[register] = name
    return found


def value_names(record: GraphRecord) -> tuple[Keys, dict[int, str]]:
    """The numbers of a graph's trees, and number -> the value of the user's program, or ('in ...') that it is a part of one."""
    before = record.values["simplify"]
    keys, names = Keys(before, record.values["lower"].plan.graph), {}
    made = Counter(o[0].name for o in before.origins.values() if o)
    words = {n: described(record, before, n, made) for n in before.nodes if hasattr(n, "dtype")}
    for n, text in words.items():
        names.setdefault(keys.nodes[n], text)
    for n in before.nodes:
        if isinstance(n, Compute):
            for e in walk(n.expr):
                names.setdefault(keys(e), f"in {words[n]}")
    return keys, names


def described(record: GraphRecord, graph: Graph, node, made: Mapping[str, int]) -> str:
    """A value by its name and line; a fold that is only part of a value says so. `made`: how many nodes make the value of a name."""
    at, name = graph.origin(node), record.label(graph, node)
    part = fold(node) if isinstance(node, Compute) else None
    whole = made[at.name] < 2
    text = name if part is None or whole else f"{part.monoid} for {name}"
    return f"{text}, line {at.line}" if at.line else text
