"""The language as text, a line a node. `parse.parse_graph` reads it back: print_graph(parse_graph(text)) is the text.

    graph  ::= 'graph' NAME '{' line* '}'
    line   ::= 'input' '%'NAME ':' type  |  'constant' '%'NAME ':' type  |  'number' '$'NAME  |  'size' NAME '=' STRING  |  'hint' NAME '=' value
             | '%'NAME ':' type ('for' axis '<' index, ...)? '=' node  |  'write' '%'NAME '<-' view  |  'return' value, ...
             | '  ' LOCAL '=' expr            a part that the node above uses twice, or that would nest too deep; parts stand in order
    type   ::= DTYPE '[' index, ... ']' '(' index, ... ')' ('@' STRING)? ('#' INT)?        shape, strides, device other than cpu, tag
    node   ::= expr
             | 'scatter' MONOID '%'NAME|const 'at' '[' index, ... ']' 'over' '[' index, ... ']' ('if' expr)? 'of' expr
             | 'call' TARGET '(' value, NAME '=' value, ... ')' '->' ('none' | type | '(' ... ')') STRING        (no type before '=')
             | 'result' '%'NAME INT
    expr   ::= '%'NAME '[' index, ... ('if' expr 'else' const)? ']'  |  number ':' DTYPE  |  '$'NAME ':' DTYPE  |  'coord' '(' index ')'
             | OP '(' expr, ... ')'  |  DTYPE '~'? '(' expr ')'  |  MONOID ('.' INT)? '[' axis, ... ']' '(' expr, ... ')'
             | 'scan_'MONOID ('.' INT)? '[' axis 'reverse'? ']' '(' expr, ... ')'  |  ('uniform' | 'normal') '(' expr, expr, index ')'  |  LOCAL
    index  ::= product ('+' product)*;   product ::= factor ('*' factor)*
    factor ::= INT | axis | NAME ("'" INT)? | '(' index ('//' | '%' | 'min' | 'max') index ')' | '[' expr '<' index ']'
    axis   ::= 'i' INT;  LOCAL ::= 't' INT
    view   ::= '%'NAME ('{' '[' index, ... ']' '(' index, ... ')' '+' index '}')?          without braces: the whole node
    value  ::= view | 'size' '(' index ')' | 'expr' '(' expr ')' | Python literal | '`' text '`' | tuples, lists and dicts of values

`s0'2` is the size s0, at least 2. `bf16~(x)` is an implicit rounding. `[expr < bound]` is a gathered index. Reading raises TextError for malformed
text; an opaque call's target and every argument that is no Python literal come back as Symbol.
"""
from __future__ import annotations

import json

from .dtype import DType
from .expr import Cast, Const, Coord, Expr, Load, Op, Reduce, Scalar, Scan, walk
from .graph import Compute, Graph, Input, Opaque, Result, Scatter, View
from .index import Axis, Fetch, Index, Size

DEEPEST = 40         # nesting beyond which a part gets a line of its own
LONGEST = 400        # sub-expressions (as a tree) up to which print_expr writes everything in place


class Symbol(str):
    """Something that only its text is known of: an opaque target, a torch.dtype, ..."""
    def __repr__(self) -> str:
        return str(self)


def print_expr(e: Expr) -> str:
    """One line of text of an expression, nodes by their own names."""
    return _Words({}).with_parts(e, "; ")


def print_graph(graph: Graph, sources: bool = False) -> str:
    """The text of `graph`; with `sources`, each node's source line as a comment (which reading drops)."""
    return "\n".join(_Lines(graph, sources).lines())


# -- expressions ---------------------------------------------------------------------------------------------------
class _Words:
    """Text of expressions. `names`: node -> name; `parts`: sub-expression -> LOCAL."""

    def __init__(self, names: dict):
        self.names = names
        self.parts: dict[Expr, str] = {}

    def node(self, n) -> str:
        return "%" + (self.names.get(n) or getattr(n, "name", type(n).__name__.lower()))

    def index(self, i: Index) -> str:
        return " + ".join("*".join([*map(self.atom, k), *([str(v)] if v != 1 or not k else [])]) for k, v in i.terms.items()) or "0"

    def indices(self, found) -> str:
        return ", ".join(map(self.index, found))

    def atom(self, a) -> str:
        if isinstance(a, Size):
            return f"{a.name}'{a.lower}" if a.lower else a.name
        if isinstance(a, Axis):
            return f"i{a.id}"
        if isinstance(a, Fetch):
            return f"[{self.expr(a.expr)} < {self.index(a.bound)}]"
        return f"({self.index(a.a)} {a.sign} {self.index(a.b)})"

    def expr(self, e: Expr) -> str:
        found = self.parts.get(e)
        return found if found is not None else self.whole(e)

    def exprs(self, found) -> str:
        return ", ".join(map(self.expr, found))

    def whole(self, e: Expr) -> str:
        """`e` in full, its parts by name."""
        if isinstance(e, Load):
            guard = f"if {self.expr(e.guard)} else {self.expr(e.other)}" if e.guard is not None else ""
            return f"{self.node(e.node)}[{' '.join(filter(None, (self.indices(e.index), guard)))}]"
        if isinstance(e, Const):
            return f"{str(e.value).lower()}:{e.dtype}"
        if isinstance(e, Scalar):
            return f"${e.argument}:{e.dtype}"
        if isinstance(e, Coord):
            return f"coord({self.index(e.index)})"
        if isinstance(e, Op):
            return f"{e.name}({self.exprs(e.args)})"
        if isinstance(e, Cast):
            return f"{e.dtype}{'~' if e.implicit else ''}({self.expr(e.arg)})"
        component = f".{e.component}" if getattr(e, "component", 0) else ""
        if isinstance(e, Reduce):
            return f"{e.monoid}{component}[{', '.join(map(repr, e.over))}]({self.exprs(e.args)})"
        if isinstance(e, Scan):
            return f"scan_{e.monoid}{component}[{e.along!r}{' reverse' if e.reverse else ''}]({self.exprs(e.args)})"
        return f"{e.kind}({self.expr(e.seed)}, {self.expr(e.offset)}, {self.index(e.index)})"

    def find_parts(self, *roots: Expr) -> None:
        """Names what is used twice and is no trifle, and what nests too deep; inner parts first."""
        self.parts = {}
        order = walk(*roots)
        uses: dict[Expr, int] = dict.fromkeys(roots, 1)
        for e in order:
            for c in e.children():
                uses[c] = uses.get(c, 0) + 1
        depth: dict[Expr, int] = {}
        for e in order:
            depth[e] = 1 + max((depth[c] for c in e.children() if c not in self.parts), default=0)
            if e not in roots and (depth[e] >= DEEPEST or uses[e] > 1 and depth[e] >= 3):
                self.parts[e] = f"t{len(self.parts)}"

    def with_parts(self, e: Expr, separator: str) -> str:
        size: dict[Expr, int] = {}
        for x in walk(e):
            size[x] = 1 + sum(size[c] for c in x.children())
        if size[e] > LONGEST:
            self.find_parts(e)
        return separator.join([self.whole(e), *(f"{name} = {self.whole(part)}" for part, name in self.parts.items())])


# -- graphs --------------------------------------------------------------------------------------------------------
def node_names(graph: Graph) -> dict:
    """A name for each node, unique in the graph: an Input's own, else its first origin's, numbered where taken."""
    names: dict = {}
    taken: set[str] = set()
    for node in (*(n for n in graph.nodes if isinstance(n, Input)), *graph.nodes):
        if node in names:
            continue
        base = getattr(node, "name", "") or graph.origin(node).name or type(node).__name__.lower()
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in base)
        name, count = base, 0
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        taken.add(name)
        names[node] = name
    return names


def spec_parts(spec) -> tuple:
    """(shape, strides, dtype, device) of one of Opaque.results."""
    return tuple(spec) if isinstance(spec, tuple) else (spec.shape, spec.strides, spec.dtype, spec.device)


class _Lines:
    def __init__(self, graph: Graph, sources: bool):
        self.graph, self.sources = graph, sources
        self.names = node_names(graph)
        self.words = _Words(self.names)

    def lines(self):
        g = self.graph
        yield f"graph {g.name} {{"
        for i in g.inputs:
            yield f"  input %{self.names[i]}: {self.type(i)}" if isinstance(i, Input) else f"  number ${i}"
        yield from (f"  size {name} = {json.dumps(text)}" for name, text in g.sizes.items())
        yield from (f"  hint {name} = {value!r}" for name, value in g.hints.items())
        for node in g.nodes:
            if isinstance(node, Input):
                if node not in g.inputs:
                    yield f"  constant %{self.names[node]}: {self.type(node)}"
                continue
            yield from self.node(node)
        yield from (f"  write %{self.names[w.target]} <- {self.view(w.source)}" for w in g.writes)
        yield f"  return {', '.join(map(self.value, g.outputs))}"
        yield "}"

    def type(self, n) -> str:
        return self.type_text(n.shape, n.strides, n.dtype, n.device) + (f" #{n.tag}" if getattr(n, "tag", 0) else "")

    def type_text(self, shape, strides, dtype: DType, device: str) -> str:
        name = f"{dtype}!{dtype.bytes}" if dtype.kind == "x" else str(dtype)
        return f"{name}[{self.words.indices(shape)}]({self.words.indices(strides)})" + (f" @{json.dumps(device)}" if device != "cpu" else "")

    def node(self, n):
        source = self.graph.origin(n)
        comment = f"    # {source.file}:{source.line} {source.code}" if self.sources and source.file else ""
        head = f"  %{self.names[n]}"
        if isinstance(n, Opaque):
            yield f"{head} = {self.call(n)}{comment}"
        elif isinstance(n, Result):
            yield f"{head}: {self.type(n)} = result %{self.names[n.opaque]} {n.position}{comment}"
        else:
            roots = [n.expr] if isinstance(n, Compute) else [x for x in (n.guard, n.value) if x is not None]
            axes = self.bound(*roots)
            self.words.find_parts(*roots)
            text = self.words.whole(n.expr) if isinstance(n, Compute) else self.scatter(n)
            yield f"{head}: {self.type(n)}{axes} = {text}{comment}"
            yield from (f"    {name} = {self.words.whole(part)}" for part, name in self.words.parts.items())
            self.words.parts = {}

    def scatter(self, n: Scatter) -> str:
        words = self.words
        base = words.whole(n.base) if isinstance(n.base, Expr) else words.node(n.base)
        guard = f" if {words.expr(n.guard)}" if n.guard is not None else ""
        return f"scatter {n.monoid} {base} at [{words.indices(n.index)}] over [{words.indices(n.domain)}]{guard} of {words.expr(n.value)}"

    def call(self, n: Opaque) -> str:
        args = ", ".join([*map(self.value, n.args), *(f"{k}={self.value(v)}" for k, v in n.kwargs.items())])
        specs = ["none" if s is None else self.type_text(*spec_parts(s)) for s in n.results]
        results = specs[0] if n.single and len(specs) == 1 else f"({', '.join(specs)})"
        return f"call {self.symbol(n.target)}({args}) -> {results} {json.dumps(n.reason)}{self.meaning(n)}"

    def meaning(self, n: Opaque) -> str:
        return f" means{self.bound(n.meaning)} = {self.words.whole(n.meaning)}" if n.meaning is not None else ""

    def bound(self, *roots: Expr) -> str:
        """The axes that folds in `roots` bind, with their extents."""
        found = dict.fromkeys(a for e in walk(*roots) if isinstance(e, Reduce) for a in e.over)
        return " for " + ", ".join(f"{a!r}<{self.words.index(a.extent)}" for a in found) if found else ""

    def symbol(self, target) -> str:
        text = str(target)
        return text if text.replace(".", "a").replace("_", "a").isalnum() and not text[0].isdigit() else f"`{text}`"

    def view(self, v: View) -> str:
        if v.shape == v.node.shape and v.strides == v.node.strides and v.offset == 0:
            return self.words.node(v.node)
        words = self.words
        return f"{words.node(v.node)}{{[{words.indices(v.shape)}]({words.indices(v.strides)}) + {words.index(v.offset)}}}"

    def value(self, x) -> str:
        if isinstance(x, View):
            return self.view(x)
        if isinstance(x, Index):
            return f"size({self.words.index(x)})"
        if isinstance(x, Expr):
            return f"expr({self.words.whole(x)})"
        if isinstance(x, Symbol):
            return f"`{x}`"
        if isinstance(x, str):
            return json.dumps(x)
        if x is None or isinstance(x, (bool, int, float)):
            return str(x)
        if isinstance(x, list):
            return f"[{', '.join(map(self.value, x))}]"
        if isinstance(x, tuple):
            return f"({''.join(self.value(v) + ', ' for v in x).rstrip() if len(x) == 1 else ', '.join(map(self.value, x))})"
        if isinstance(x, dict):
            return "{" + ", ".join(f"{json.dumps(str(k))}: {self.value(v)}" for k, v in x.items()) + "}"
        return f"`{x!r}`"
