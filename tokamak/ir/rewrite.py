"""Rewriting: the rules of `rules` applied to expressions and to whole graphs.

    simplify(graph, policy) -> Graph       every node's expression simplified, copies and nodes that nothing reads gone
    Simplifier(policy)(expr) -> Expr       one expression; one object memoises across expressions

Bottom-up: children first, then the rules of the expression's head until none applies. A node keeps its type: the rounding at its root, of a value
that is stored, stays.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable

from ..errors import InternalError
from .expr import Const, Expr, Load, loads, Op, Reduce, Rewriter, Scan, _fetches, rebuild, walk
from .graph import Compute, Graph, Input, Opaque, Result, Scatter, View, Write, fold, shown_nodes, topological, with_value
from .index import Index, axis
from .ops import OPS
from .substitution import substitute
from .rules import FAST, RULES, Rule, unrounded

STEP_LIMIT = 200        # rules applied to one expression in a row: more is a pair of rules that undo each other


class Simplifier:
    """Simplifies expressions under `policy`. `nodes` maps nodes to those that stand for them now; Loads are moved over."""

    def __init__(self, policy: str = "fast", rules: tuple[Rule, ...] | None = None, nodes: dict | None = None):
        self.fast, self.common = policy == "fast", rules is None
        self.nodes = nodes if nodes is not None else {}
        self.memo: dict[Expr, Expr] = {}
        self.rules = by_head(rules) if rules is not None else _FAST if self.fast else _EXACT

    def __call__(self, e: Expr) -> Expr:
        """`e` simplified, of the same type."""
        how = self._expr
        if e.settled and self.common:
            there = {x.node: self._standing(x.node) for x in loads(e)} if self.nodes else {}
            if all([self.nodes.get(n, n) is n for n in there]):
                return e
            if len({*there.values()}) == len(there) and all([n.dtype is new.dtype and n.shape == new.shape for n, new in there.items()]):
                how = self._moved
        for part in walk(e):            # children first: no deep recursion
            how(part)
        found = how(e)
        if self.common and self.fast or how == self._moved:
            for part in walk(found):
                part.settled = True
        return found

    def _moved(self, e: Expr) -> Expr:
        """`e`, which no rule of ours would change (those of the other policies are among those of `fast`), with its loads moved over: nor would one
        then, since no two of the nodes have become one, and rules ask for nothing of a node but its type and its shape."""
        found = self.memo.get(e)
        if found is None:
            found = self.memo[e] = self._load(e, self._moved) if isinstance(e, Load) else rebuild(e, self._moved, self._moved_index)
        return found

    def _moved_index(self, i: Index) -> Index:
        return substitute(i, {}, self._moved) if i.fetched() else i

    def _standing(self, node):
        """The node that stands for `node`, read through copies."""
        new = self.nodes.get(node, node)
        source = copied(new)
        return new if source is None else source

    def root(self, e: Expr) -> Expr:
        """`e` as the value of a node: read in the compute type by what stores it."""
        found = self(e)
        return unrounded(found) if self.fast else found

    def index(self, i: Index) -> Index:
        return substitute(i, {}, self._expr) if _fetches((i,)) else i

    def _expr(self, e: Expr) -> Expr:
        found = self.memo.get(e)
        if found is None:
            found = self.memo[e] = self._fixed_point(self._children(e))
        return found

    def _children(self, e: Expr) -> Expr:
        return self._load(e, self._expr) if isinstance(e, Load) else rebuild(e, self._expr, self.index)

    def _load(self, e: Load, part: Callable[[Expr], Expr]) -> Expr:
        index = tuple([substitute(i, {}, part) if i.fetched() else i for i in e.index])
        return Load(self._standing(e.node), index, part(e.guard) if e.guard is not None else None, e.other)

    def _fixed_point(self, e: Expr) -> Expr:
        for _ in range(STEP_LIMIT):
            new = self._step(e)
            if new is None:
                return e
            known = self.memo.get(new)
            if known is not None:
                return known
            e = self._children(new)         # a rule's result may hold new sub-expressions
        raise InternalError(f"the rewrite rules find no end at {e!r}")

    def _step(self, e: Expr) -> Expr | None:
        name = e.name if e.__class__ is Op else e.__class__.__name__
        found = self.rules.get(name)
        for rule in self.rules.get("Op", ()) if found is None and e.__class__ is Op else found or ():
            new = rule.apply(e)
            if new is not None and new is not e:
                return new
        return None


def by_head(rules: tuple[Rule, ...]) -> dict[str, list[Rule]]:
    """The rules that each head of an expression can match, in order; those of an operation's name with those of all operations behind them."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        for head in rule.heads.split():
            found.setdefault(head, []).append(rule)
    common = found.get("Op", [])
    return {head: own + common if head in OPS else own for head, own in found.items()}


_FAST, _EXACT = by_head(RULES + FAST), by_head(RULES)


def copied(node):
    """The node that `node` copies element by element, or None."""
    if not isinstance(node, Compute) or not isinstance(node.expr, Load) or node.expr.guard is not None:
        return None
    source, axes = node.expr.node, [axis(i, s) for i, s in enumerate(node.shape)]
    return source if source.shape == node.shape and all(i is a for i, a in zip(node.expr.index, axes)) else None


def simplify(graph: Graph, policy: str = "fast") -> Graph:
    """`graph` with every expression simplified, copies read through, nodes that neither outputs, writes nor opaque calls need gone; extremes whose
    places nobody asks for are folded alone."""
    out = GraphRewrite(graph, policy).result()
    folds = [e for n in out.nodes if isinstance(n, Compute) and (e := fold(n)) is not None and e.monoid in _EXTREMES]
    placed = {_fold_of(e) for e in folds if e.component == 1}
    alone = {e: _extreme(e) for e in folds if e.component == 0 and _fold_of(e) not in placed}
    return replaced(out, lambda n: _folded_alone(n, alone)) if alone else out


_EXTREMES = {"argmax": "max", "argmin": "min"}


def _fold_of(e: Reduce | Scan) -> tuple:
    """What both components of a fold have alike."""
    return e.key if isinstance(e, Reduce) else (e.monoid, e.along, e.reverse, e.args)


def _extreme(e: Reduce | Scan) -> Expr:
    """The value component of `e` by itself."""
    name = _EXTREMES[e.monoid]
    return Reduce(name, e.over, e.args[:1]) if isinstance(e, Reduce) else Scan(name, e.along, e.args[:1], 0, e.reverse)


def _folded_alone(n: Compute, alone: dict) -> Compute | None:
    """`n` with the extreme in `alone` for its fold."""
    new = alone.get(fold(n))
    return new and Compute(n.shape, n.strides, with_value(n.expr, new), n.device, n.tag)


def replaced(graph: Graph, change: Callable[[Compute], Compute | None]) -> Graph:
    """`graph`, simplified, with what `change` makes of Compute nodes (None: nothing else) in their place; it may read new nodes."""
    return GraphRewrite(graph, "eager", change).result()


class GraphRewrite:
    """One rewriting of a graph, its expressions simplified: `nodes` maps old nodes to new ones, made in order by a method a class of node."""

    def __init__(self, graph: Graph, policy: str, change: Callable[[Compute], Compute | None] | None = None):
        self.graph, self.change = graph, change
        self.nodes: dict = {}
        self.expr = Simplifier(policy, nodes=self.nodes)
        self.shown = shown_nodes(graph)
        self.taken: set = set()              # new nodes whose memory an output or a write shows

    def result(self) -> Graph:
        for node in self.graph.nodes:
            new = getattr(self, _MAKERS[type(node)])(node)
            if self.change is not None and isinstance(new, Compute):
                new = self.change(new) or new
            if node in self.shown:
                new = self._own_memory(new)
            self.nodes[node] = new
        outputs = self.mapped(self.graph.outputs)
        writes = tuple(Write(w.target, self.mapped(w.source)) for w in self.graph.writes)
        calls = [made for n in self.graph.nodes if isinstance(n, Opaque) and isinstance(made := self.nodes[n], Opaque)]
        roots = [*calls, *(o.node for o in outputs if isinstance(o, View)), *(w.source.node for w in writes)]
        inputs = [n for n in self.graph.nodes if isinstance(n, Input)]
        nodes = (*inputs, *(n for n in topological(roots) if not isinstance(n, Input)))
        origins: dict = {}
        for old, found in self.graph.origins.items():
            new = self.nodes.get(old)
            if new is not None:
                origins[new] = tuple(dict.fromkeys(origins.get(new, ()) + tuple(found)))
        kept = set(nodes)
        origins = {n: o for n, o in origins.items() if n in kept}
        return replace(self.graph, nodes=nodes, outputs=outputs, writes=writes, origins=origins)

    def _own_memory(self, node):
        """Two nodes that the caller sees stay two, though their expressions have become equal."""
        while isinstance(node, Compute) and node in self.taken:
            node = Compute(node.shape, node.strides, node.expr, node.device, node.tag + 1000)
        self.taken.add(node)
        return node

    # -- nodes -------------------------------------------------------------------------------------------------------
    def unchanged(self, node):
        return node

    def compute(self, node: Compute) -> Compute:
        """A value without elements is computed of nothing: code that stands before a loop would raise what no element does."""
        nothing = any(s == 0 for s in node.shape) and node.expr.dtype.kind != "x"
        expr = Const(0, node.expr.dtype) if nothing else self.expr.root(node.expr)
        return node if expr is node.expr else Compute(node.shape, node.strides, expr, node.device, node.tag)

    def scatter(self, node: Scatter) -> Scatter:
        base = node.base if isinstance(node.base, Expr) else self.nodes.get(node.base, node.base)
        value = self.expr.root(node.value)
        guard = self.expr(node.guard) if node.guard is not None else None
        index = tuple(self.expr.index(i) for i in node.index)
        if isinstance(guard, Const) and guard.value:
            guard = None
        if (base, value, guard, index) == (node.base, node.value, node.guard, node.index):
            return node
        return Scatter(base, node.shape, node.strides, node.domain, index, value, node.monoid, guard, node.device)

    def opaque(self, node: Opaque) -> Opaque:
        if all(self.nodes[n] is n for n in node.reads):
            return node
        reads = tuple(dict.fromkeys(self.nodes[n] for n in node.reads))
        return Opaque(node.target, self.mapped(node.args), self.mapped(node.kwargs), node.results, node.single, node.reason, reads,
                      self._meaning(node.meaning, reads) if node.meaning is not None else None)

    def _meaning(self, meaning: Expr, reads: tuple) -> Expr:
        """The meaning of a call that reads `reads`, over these: it does not read through a copy which the call is handed (rows that are padded)."""
        new = self.expr(meaning)
        if all(e.node in reads for e in loads(new)):
            return new
        return Rewriter(leaf=lambda e: Load(self.nodes[e.node], e.index, e.guard, e.other) if isinstance(e, Load) else None)(meaning)

    def opaque_result(self, node: Result) -> Result:
        call = self.nodes[node.opaque]
        return node if call is node.opaque else Result(call, node.position, node.shape, node.strides, node.dtype, node.device)

    def mapped(self, x):
        """Outputs and arguments with their Views on the new nodes."""
        if isinstance(x, View):
            node = self.nodes[x.node]
            return x if node is x.node else View(node, x.shape, x.strides, x.offset)
        if isinstance(x, (tuple, list)):
            return type(x)(self.mapped(v) for v in x)
        if isinstance(x, dict):
            return {k: self.mapped(v) for k, v in x.items()}
        return x


_MAKERS: dict[type, str] = {Input: "unchanged", Compute: "compute", Scatter: "scatter", Opaque: "opaque", Result: "opaque_result"}
