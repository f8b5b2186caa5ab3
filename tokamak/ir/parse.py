"""Reads the text of a graph : the grammar stands at the top of `text`."""
from __future__ import annotations

import json
import re

from . import dtype as dt
from . import ops
from .dtype import DType
from .expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Scalar, Scan
from .graph import Compute, Graph, Input, Opaque, Origin, Result, Scatter, View, Write
from .index import Axis, Fetch, FloorDiv, Index, Max, Min, Mod, Size, as_index
from .text import Symbol
from .tokens import Line

_AXIS, _LOCAL = re.compile(r"i\d+$"), re.compile(r"t\d+$")
_BINARY = {"//": FloorDiv, "%": Mod, "min": Min, "max": Max}
_LITERALS = {"None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan")}


class Parser:
    """One text. `nodes` by name; `axes` by id and `parts` by name belong to the node being read."""

    def __init__(self, text: str):
        self.lines = [Line(t, n) for n, t in enumerate(text.splitlines(), 1) if t.split("# ")[0].strip()]
        self.nodes: dict[str, object] = {}
        self.axes: dict[int, Axis] = {}
        self.parts: dict[str, Expr] = {}
        self.inputs: list = []
        self.sizes: dict[str, str] = {}
        self.hints: dict = {}
        self.writes: list[Write] = []
        self.outputs: tuple = ()
        self.r = self.lines[0] if self.lines else Line("", 1)

    def graph(self) -> Graph:
        r = self.r
        r.want("graph")
        name = r.next()
        r.want("{")
        i = 1
        while i < len(self.lines) and self.lines[i].peek() != "}":
            parts = i + 1
            while parts < len(self.lines) and _LOCAL.match(self.lines[parts].peek()) and self.lines[parts].peek(1) == "=":
                parts += 1
            self.statement(self.lines[i], self.lines[i + 1:parts])
            i = parts
        origins = {n: (Origin(name=k),) for k, n in self.nodes.items() if not isinstance(n, Input)}
        return Graph(tuple(self.inputs), tuple(self.nodes.values()), self.outputs, tuple(self.writes), origins, self.sizes, self.hints, name)

    def statement(self, r: Line, parts: list[Line]) -> None:
        self.r = r
        word = r.peek()
        if word.startswith("%"):
            self.node_line(parts)
            return
        r.next()
        if word in ("input", "constant"):
            name = r.next()[1:]
            r.want(":")
            shape, strides, d, device, _ = self.type()
            self.nodes[name] = Input(name, shape, strides, d, device)
            if word == "input":
                self.inputs.append(self.nodes[name])
        elif word == "number":
            r.want("$")
            self.inputs.append(r.next())
        elif word in ("size", "hint"):
            name = r.next()
            r.want("=")
            (self.sizes if word == "size" else self.hints)[name] = self.value()
        elif word == "write":
            target = self.node()
            r.want("<-")
            self.writes.append(Write(target, self.view()))
        elif word == "return":
            self.outputs = tuple(r.list(self.value, ""))
        else:
            r.at = 0
            r.fail("a statement")
        self.end()

    def end(self) -> None:
        if self.r.peek():
            self.r.fail("the end of the line")

    def node_line(self, parts: list[Line]) -> None:
        r = self.r
        name = r.next()[1:]
        if r.take("="):
            r.want("call")
            self.nodes[name] = self.call()
            self.end()
            return
        r.want(":")
        shape, strides, d, device, tag = self.type()
        self.axes = {i: Axis(i, s) for i, s in enumerate(shape)}
        if r.take("for"):
            self.bound_axes()
        r.want("=")
        word = r.peek()
        if word == "scatter":
            made = self.scatter(shape, strides, device, parts)
        elif word == "result":
            r.next()
            made = Result(self.node(), r.integer(), shape, strides, d, device)
        else:
            self.read_parts(parts)
            made = Compute(shape, strides, self.expr(), device, tag)
        if made.dtype is not d:
            r.fail(f"a value of type {d}, not {made.dtype},")
        self.nodes[name] = made
        self.end()

    def bound_axes(self) -> None:
        while True:
            id = int(self.r.next()[1:])
            self.r.want("<")
            self.axes[id] = Axis(id, self.index())
            if not self.r.take(","):
                return

    def read_parts(self, lines: list[Line]) -> None:
        self.parts = {}
        outer = self.r
        for line in lines:
            self.r = line
            name = line.next()
            line.want("=")
            self.parts[name] = self.expr()
            self.end()
        self.r = outer

    def type(self):
        """(shape, strides, dtype, device, tag)."""
        d = self.dtype()
        self.r.want("[")
        shape = tuple(self.r.list(self.index, "]"))
        self.r.want("(")
        strides = tuple(self.r.list(self.index, ")"))
        device = json.loads(self.r.next()) if self.r.take("@") else "cpu"
        tag = self.r.integer() if self.r.take("#") else 0
        return shape, strides, d, device, tag

    def dtype(self) -> DType:
        name = self.r.next()
        if self.r.take("!"):
            return dt.foreign(name, self.r.integer())
        try:
            return dt.dtype(name)
        except KeyError:
            self.r.at -= 1
            self.r.fail("a type")

    def node(self):
        found = self.nodes.get(self.r.next()[1:])
        if found is None:
            self.r.at -= 1
            self.r.fail("a node that stands above")
        return found

    # -- nodes -------------------------------------------------------------------------------------------------------
    def scatter(self, shape, strides, device, parts) -> Scatter:
        r = self.r
        r.want("scatter")
        monoid = r.next()
        base = self.node() if r.peek().startswith("%") else self.expr()
        r.want("at")
        start = r.at                              # the index is over the domain's axes, which come behind it
        while r.peek() != "over":
            r.next()
        r.want("over")
        r.want("[")
        domain = tuple(r.list(self.index, "]"))
        rest, r.at = r.at, start
        self.axes = {i: Axis(i, s) for i, s in enumerate(domain)}
        self.read_parts(parts)
        r.want("[")
        index = tuple(r.list(self.index, "]"))
        r.at = rest
        guard = self.expr() if r.take("if") else None
        r.want("of")
        return Scatter(base, shape, strides, domain, index, self.expr(), monoid, guard, device)

    def call(self) -> Opaque:
        r = self.r
        target = Symbol(r.next().strip("`"))
        r.want("(")
        args, kwargs = [], {}
        while not r.take(")"):
            if r.peek(1) == "=":
                name = r.next()
                r.want("=")
                kwargs[name] = self.value()
            else:
                args.append(self.value())
            if not r.take(","):
                r.want(")")
                break
        r.want("->")
        single = not r.take("(")
        results = (self.result(),) if single else tuple(r.list(self.result, ")"))
        reads = tuple(dict.fromkeys(_nodes((args, kwargs))))
        reason = json.loads(r.next())
        return Opaque(target, tuple(args), kwargs, results, single, reason, reads, self.meaning(results[0]) if r.take("means") else None)

    def meaning(self, result) -> Expr:
        self.axes = {i: Axis(i, s) for i, s in enumerate(result[0])}
        if self.r.take("for"):
            self.bound_axes()
        self.r.want("=")
        return self.expr()

    def result(self):
        return None if self.r.take("none") else self.type()[:4]

    def view(self) -> View:
        node = self.node()
        if not self.r.take("{"):
            return View(node, node.shape, node.strides, as_index(0))
        self.r.want("[")
        shape = tuple(self.r.list(self.index, "]"))
        self.r.want("(")
        strides = tuple(self.r.list(self.index, ")"))
        self.r.want("+")
        offset = self.index()
        self.r.want("}")
        return View(node, shape, strides, offset)

    def value(self):
        r = self.r
        token = r.peek()
        if token.startswith("%"):
            return self.view()
        r.next()
        if token.startswith('"'):
            return json.loads(token)
        if token.startswith("`"):
            return Symbol(token.strip("`"))
        if token in ("size", "expr"):
            r.want("(")
            found = self.index() if token == "size" else self.expr()
            r.want(")")
            return found
        if token == "[":
            return r.list(self.value, "]")
        if token == "(":
            return tuple(r.list(self.value, ")"))
        if token == "{":
            return dict(r.list(self.item, "}"))
        if token in _LITERALS:
            return _LITERALS[token]
        return float(token) if any(c in token for c in ".en") else int(token)

    def item(self):
        key = json.loads(self.r.next())
        self.r.want(":")
        return key, self.value()

    # -- indices and expressions -------------------------------------------------------------------------------------
    def index(self) -> Index:
        total = self.product()
        while self.r.take("+"):
            total = total + self.product()
        return total

    def product(self) -> Index:
        total = self.factor()
        while self.r.take("*"):
            total = total * self.factor()
        return total

    def factor(self) -> Index:
        r = self.r
        token = r.next()
        if token == "(":
            a = self.index()
            kind = _BINARY.get(r.next())
            if kind is None:
                r.fail("'//', '%', 'min' or 'max'")
            b = self.index()
            r.want(")")
            return as_index(kind(a, b))
        if token == "[":
            e = self.expr()
            r.want("<")
            bound = self.index()
            r.want("]")
            return as_index(Fetch(e, bound))
        if _AXIS.match(token):
            return as_index(self.axis(token))
        if token[0].isalpha() or token[0] == "_":
            return as_index(Size(token, r.integer() if r.take("'") else 0))
        r.at -= 1
        return as_index(r.integer())

    def axis(self, token: str) -> Axis:
        found = self.axes.get(int(token[1:]))
        if found is None:
            self.r.at -= 1
            self.r.fail("an axis of this node")
        return found

    def expr(self) -> Expr:
        r = self.r
        if r.peek().startswith("%"):
            return self.load()
        token = r.next()
        if token == "$":
            name = r.next()
            r.want(":")
            return Scalar(name, self.dtype())
        if r.take(":"):
            d = self.dtype()
            return Const({"true": True, "false": False}.get(token, token) if not d.is_int else int(token), d)
        if token in self.parts:
            return self.parts[token]
        if token == "coord":
            r.want("(")
            index = self.index()
            r.want(")")
            return Coord(index)
        if token in ("uniform", "normal"):
            return self.random(token)
        if token in ops.OPS and r.take("("):
            return Op(token, *r.list(self.expr, ")"))
        if r.peek() in ("(", "~"):
            r.at -= 1
            d, implicit = self.dtype(), r.take("~")
            r.want("(")
            made = Cast(d, self.expr(), implicit)
            r.want(")")
            return made
        return self.fold(token)

    def load(self) -> Load:
        node = self.node()
        r = self.r
        r.want("[")
        index, guard, other = [], None, None
        while not r.take("]"):
            if r.take("if"):
                guard = self.expr()
                r.want("else")
                other = self.expr()
            else:
                index.append(self.index())
                r.take(",")
        return Load(node, tuple(index), guard, other)

    def random(self, kind: str) -> Random:
        self.r.want("(")
        seed = self.expr()
        self.r.want(",")
        offset = self.expr()
        self.r.want(",")
        index = self.index()
        self.r.want(")")
        return Random(kind, seed, offset, index)

    def fold(self, token: str) -> Expr:
        monoid, _, component = token.removeprefix("scan_").partition(".")
        r = self.r
        if monoid not in (ops.MONOIDS if token.startswith("scan_") else ops.WIDTHS):
            r.at -= 1
            r.fail("an expression")
        r.want("[")
        if token.startswith("scan_"):
            along, reverse = self.axis(r.next()), r.take("reverse")
            r.want("]")
            r.want("(")
            return Scan(monoid, along, tuple(r.list(self.expr, ")")), int(component or 0), reverse)
        over = tuple(r.list(lambda: self.axis(r.next()), "]"))
        r.want("(")
        return Reduce(monoid, over, tuple(r.list(self.expr, ")")), int(component or 0))


def _nodes(x) -> list:
    if isinstance(x, View):
        return [x.node]
    if isinstance(x, dict):
        return _nodes(list(x.values()))
    return [n for v in x for n in _nodes(v)] if isinstance(x, (tuple, list)) else []


def parse_graph(text: str) -> Graph:
    """The graph that `text` describes; TextError where it is malformed."""
    return Parser(text).graph()
