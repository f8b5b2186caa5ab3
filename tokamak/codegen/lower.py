"""(Body, Schedule) -> Kernel: names and parameters, and the phases one after the other. Where things go is `tree`'s, what computes them `emit`'s."""
from __future__ import annotations

from ..fuse.cost import Hints
from ..ir.expr import Expr
from ..ir.index import Axis, Fetch as FetchAtom, Index, Size, as_index
from ..ir.ranges import nonnegative
from ..schedule.body import Body, Memory, Store
from ..schedule.schedule import Schedule
from .kernel import Kernel, Param, Phase
from .scope import Block, Named, Unschedulable, varies
from .tree import Tree


def lower(body: Body, schedule: Schedule, hints: Hints, early: bool = False, apart: bool = False) -> Kernel:
    """The kernel of `body`. `early`: folds that need no other one stand first, so that their loops close none that a store still needs. `apart`: what
    is made of a fold stands right behind it, whatever loops others share with them. Raises Unschedulable when its items do not fit one loop tree."""
    return Lowering(body, schedule, hints, early, apart).kernel()


class Lowering:
    def __init__(self, body: Body, schedule: Schedule, hints: Hints, early: bool = False, apart: bool = False):
        self.body_, self.s, self.hints, self.early, self.apart = body, schedule, hints, early, apart
        self.places = {a: n for n, a in enumerate(schedule.order)}
        self.params: list[Param] = []
        self.keys: dict = {}
        self.natural: set = set()                 # FloorDiv and Mod atoms over parameters whose dividend is never negative
        self.names: dict[Axis, str] = {}
        self.counter = 0
        self.errors: list = []
        self.phases: list[Phase] = []
        self.sources: dict[str, Expr] = {}        # register -> what it holds: for people, no part of the text

    # -- names and parameters ------------------------------------------------------------------------------------------
    def fresh(self, prefix: str = "t") -> str:
        self.counter += 1
        return f"{prefix}{self.counter - 1}"

    def param(self, kind: str, key, source, dtype=None) -> str:
        name = self.keys.get((kind, key))
        if name is None:
            letter = {"memory": "p", "int": "n", "float": "k", "value": "k", "order": "o"}[kind]
            name = f"{letter}{sum(p.name[0] == letter for p in self.params)}"
            self.keys[(kind, key)] = name
            self.params.append(Param(kind, name, source, dtype))
        return name

    def memory(self, m: Memory) -> str:
        return self.param("memory", m, m, m.dtype)

    def extent(self, a: Axis) -> Index:
        """The extent of `a` as a kernel integer: a literal where the schedule unrolls, else a parameter."""
        self.names.setdefault(a, f"i{len(self.names)}")
        if a in self.s.unrolled:
            return a.extent
        return as_index(Size(self.param("int", ("extent", a), a.extent)))

    def integer(self, i: Index, block: Block | None, key=None) -> Index:
        """`i` over loop variables, parameters and fetched indices: what a kernel can compute."""
        parts: dict = {}
        for k, v in i.terms.items():
            atoms = tuple(a for a in k if varies(a))
            rest = Index({tuple(a for a in k if not varies(a)): v})
            parts[atoms] = parts.get(atoms, as_index(0)) + rest
        total = as_index(0)
        for atoms, factor in sorted(parts.items(), key=lambda p: self._depth(p[0])):      # parameters are numbered alike whatever the axes' ids
            term = self._factor(factor, (key, atoms, factor))
            for a in atoms:
                term = term * self._atom(a, block, key)
            total = total + term
        return total

    def _depth(self, atoms) -> tuple[int, ...]:
        """How deep the loops of a term's axes lie, for an order of terms; a term without any is last."""
        return tuple(sorted(self.places.get(a, len(self.places)) for a in atoms)) or (len(self.places) + 1,)

    def _factor(self, factor: Index, key) -> Index:
        if factor.constant in (-1, 0, 1):
            return factor
        return as_index(Size(self.param("int", key, factor)))

    def _atom(self, a, block, key) -> Index:
        if isinstance(a, Axis):
            self.names.setdefault(a, f"i{len(self.names)}")
            return as_index(a)
        if isinstance(a, Named):
            return as_index(a)
        if isinstance(a, FetchAtom):
            raise Unschedulable("a gathered index inside an index expression that differs between lanes")
        made = type(a)(self.integer(a.a, block, key), self._divisor(a.b, block, (key, "b")))
        if nonnegative(a.a):        # a parameter may be any number, so that this can be seen here alone
            self.natural.add(made)
        return as_index(made)

    def _divisor(self, b: Index, block, key) -> Index:
        """What an index is divided by, or its other operand."""
        return self.integer(b, block, key)

    # -- kernel ----------------------------------------------------------------------------------------------------------
    def kernel(self) -> Kernel:
        b = self.body_
        if b.base is not None:
            self._base_phase(b.base)
        tree = Tree(self, self.s.parallel, self.s.vector, self.s.block, b.stores, also=self.s.also)
        self.phases.append(tree.phase())
        if tree.final:
            last = Tree(self, (), _final_vector(tree.final, tree.made), None, tree.final, tree.made)
            self.phases.append(last.phase())
        s = self.s
        return Kernel(tuple(self.params), tuple(self.phases), s.lanes, s.grain, s.stream, dict(self.names), tuple(self.errors), self.sources)

    def _base_phase(self, base: Store) -> None:
        axes = sorted(base.axes, key=lambda a: -self.hints(base.address.coefficient(a)) if base.address.coefficient(a).constant is None
                      else -abs(base.address.coefficient(a).constant))
        vector = next((a for a in axes if base.address.coefficient(a) == 1), None)
        tree = Tree(self, tuple(a for a in axes if a is not vector), vector, 4096 if vector is not None else None, (base,))
        self.phases.append(tree.phase())


def _final_vector(stores, partials) -> Axis | None:
    """The axis that runs along lanes when partial results are combined: contiguous in all that has it."""
    for a in sorted({a for s in stores for a in s.axes}, key=lambda a: a.id):
        if all(s.address.coefficient(a) == 1 for s in stores if a in s.axes) and all(axes[-1] is a for _, axes in partials.values() if a in axes):
            return a
    return None
