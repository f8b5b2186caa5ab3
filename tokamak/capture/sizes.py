"""torch's symbolic sizes <-> Index. sympy is met here and nowhere else."""
from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils import _pytree as pytree

from ..ir.index import Index, Max, Min, Size, as_index
from ..ir.normal import floordiv, maximum, minimum, mod
from ..ir.substitution import evaluate


def narrow(gm: fx.GraphModule, most: int = 2**31) -> None:
    """Has torch trace the graph anew where a tensor of symbolic size, which now reaches over fewer than `most` elements, reaches over more (or the
    other way round), and where a number does: kernels are made for one of the two. Says nothing of sizes that only a run shows."""
    asked = set()
    for value in (leaf for n in gm.graph.nodes for leaf in pytree.tree_leaves(n.meta.get("val"))):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride()))
            for count in (value.numel(), reach):
                if isinstance(count, torch.SymInt) and count.node.expr not in asked:
                    asked.add(count.node.expr)
                    guard_or_false(count < most)
        elif isinstance(value, torch.SymInt) and value.node.expr not in asked:
            asked.add(value.node.expr)
            guard_or_false(value < most // 2)
            guard_or_false(value > -most // 2)


class Sizes:
    """Turns SymInts into Index values and remembers, for each Size, how the host computes it.

    `host` maps a size's name to a Python expression over the names of inputs (`s0`) or of other sizes; a sympy function the language has no
    form for becomes a Size of its own, computed on the host by `text`. So do numbers that are no integers (`number`), which the language has as
    Scalar. `hints`: the values of sizes seen while tracing.
    """

    def __init__(self) -> None:
        self.host: dict[str, str] = {}
        self.hints: dict[str, int] = {}
        self._memo: dict = {}
        self._traced: dict[str, object] = {}       # a size's name -> the sympy expression that it stands for
        self._env = None

    def index(self, value) -> Index:
        """An Index of an int, SymInt or sympy integer expression."""
        if isinstance(value, (int, Index)):
            return as_index(value)
        expr = value.node.expr if isinstance(value, torch.SymInt) else value
        if isinstance(value, torch.SymInt) and self._env is None:
            self._env = value.node.shape_env
        found = self._memo.get(expr)
        if found is None:
            found = self._memo[expr] = as_index(1) if self._is_one(expr) else self._convert(expr)
        return found

    def equal(self, a: Index, b: Index) -> bool:
        """Are two sizes equal? Where that is no matter of form torch guards the answer: the graph is traced anew for sizes with another one."""
        if a is b or a.constant is not None and b.constant is not None:
            return a is b
        traced = _Traced(self._traced, self._env, self._values())
        return guard_or_false(evaluate(a, traced) == evaluate(b, traced))

    def _is_one(self, expr) -> bool:
        """Do torch's guards hold the expression `expr` at 1? Its graph then goes on with 1; the language broadcasts the constant alone."""
        if self._env is None or not expr.args or expr.xreplace(self._values()) != 1:
            return False
        return statically_known_true(self._env.create_symintnode(expr, hint=1) == 1)

    def _values(self) -> dict:
        """Symbol -> the value seen while tracing."""
        return self._env.backed_var_to_val if hasattr(self._env, "backed_var_to_val") else self._env.var_to_val      # torch 2.13, before

    def _symbol(self, symbol) -> Index:
        """A size that torch left symbolic: its lower bound, a fact, and its hint, for estimates only, come from torch's shape environment."""
        name, lower = str(symbol), 0
        self._traced[name] = symbol
        if self._env is not None:
            r = self._env.var_to_range.get(symbol)
            if r is not None and r.lower.is_finite and r.lower >= 0:
                lower = int(r.lower)
            hint = self._values().get(symbol)
            if hint is not None:
                self.hints[name] = int(hint)
        return as_index(Size(name, lower))

    def bind(self, expr, text: str | None, hint: int | None = None) -> None:
        """From now on the sympy expression `expr` is a Size of its own: `text` computes it, or (None) an input's shape shows it."""
        if expr not in self._memo:
            name = f"c{len(self._memo)}"
            self._traced[name] = expr
            self._memo[expr] = as_index(Size(name))
            if text is not None:
                self.host[name] = text
            if hint is not None:
                self.hints[name] = hint

    def _convert(self, expr) -> Index:
        if expr.is_integer is not None and expr.is_Integer:
            return as_index(int(expr))
        if expr.is_symbol:
            return self._symbol(expr)
        args = expr.args
        name = type(expr).__name__
        if expr.is_Add or expr.is_Mul:
            total = self.index(args[0])
            for a in args[1:]:
                total = total + self.index(a) if expr.is_Add else total * self.index(a)
            return total
        if expr.is_Pow and args[1].is_Integer and args[1] > 0:
            total = self.index(args[0])
            for _ in range(int(args[1]) - 1):
                total = total * self.index(args[0])
            return total
        if name == "FloorDiv":
            return floordiv(self.index(args[0]), self.index(args[1]))
        if name in ("Mod", "PythonMod", "ModularIndexing"):
            base = self.index(args[0])
            if name == "ModularIndexing":
                return mod(floordiv(base, self.index(args[1])), self.index(args[2]))
            return mod(base, self.index(args[1]))
        if name in ("Max", "Min"):
            total = self.index(args[0])
            for a in args[1:]:
                total = (maximum if name == "Max" else minimum)(total, self.index(a))
            return total
        return self._atom(expr)

    def _atom(self, expr) -> Index:
        name = f"h{len(self.host)}"
        self._traced[name] = expr
        self.host[name] = self._text(expr)
        return as_index(Size(name))

    def _text(self, expr) -> str:
        from torch.utils._sympy.printers import PythonPrinter
        for symbol in sorted(expr.free_symbols, key=str):
            self.index(symbol)
        return PythonPrinter().doprint(expr)

    def _known(self, value: torch.SymInt) -> str | None:
        """Text of a size, if the host can compute it."""
        found = self.index(value)
        size = found.atoms()[0] if found.constant is None else None
        if size is None or isinstance(size, Size) and found is as_index(size):
            return str(found.constant) if size is None else size.name if size.name in self.host else None
        expr = value.node.expr
        return f"({self._text(expr)})" if all(str(s) in self.host for s in expr.free_symbols) else None

    def number(self, call: fx.Node, numbers: Mapping[fx.Node, str]) -> str | None:
        """The name of a number that the host computes: a `call` of Python's, between sizes, numbers of the program and calls whose names are
        `numbers`. None where this is no such call."""
        text = _TEXTS.get(call.target)
        if text is None or call.kwargs:
            return None

        def argument(a) -> str | None:
            if isinstance(a, fx.Node):
                value = a.meta.get("val")
                return numbers.get(a) or (self._known(value) if isinstance(value, torch.SymInt) else argument(value))
            return f"({a!r})" if isinstance(a, (int, float)) and math.isfinite(a) else None
        given = [argument(a) for a in call.args]
        if None in given:
            return None
        name = f"h{len(self.host)}"
        self.host[name] = text.format(*given)
        return name


_TEXTS = {operator.truediv: "{} / {}", operator.mul: "{} * {}", operator.add: "{} + {}", operator.sub: "{} - {}", operator.pow: "{} ** {}",
          operator.floordiv: "{} // {}", operator.mod: "{} % {}", operator.neg: "-{}", operator.pos: "+{}", operator.abs: "abs({})",
          round: "round({})", torch.sym_float: "float({})", torch.sym_max: "max({}, {})", torch.sym_min: "min({}, {})", torch.sym_not: "not {}",
          torch.sym_ite: "{1} if {0} else {2}", torch._sym_sqrt: "math.sqrt({})", operator.lt: "{} < {}", operator.le: "{} <= {}",
          operator.gt: "{} > {}", operator.ge: "{} >= {}", operator.eq: "{} == {}", operator.ne: "{} != {}", operator.and_: "{} & {}",
          operator.or_: "{} | {}"}
"""What torch writes of arithmetic between the sizes of a program -> Python's own."""


class _Traced:
    """What `substitution.evaluate` looks atoms up in for torch's own symbolic integers."""

    def __init__(self, names: dict, env, values: dict):
        self.names, self.env, self.values = names, env, values

    def __contains__(self, atom) -> bool:
        return isinstance(atom, (Size, Max, Min))

    def __getitem__(self, atom):
        if isinstance(atom, (Max, Min)):
            return (torch.sym_max if isinstance(atom, Max) else torch.sym_min)(evaluate(atom.a, self), evaluate(atom.b, self))
        expr = self.names[atom.name]
        hint = expr.xreplace(self.values)
        return self.env.create_symintnode(expr, hint=int(hint) if hint.is_number else None)
