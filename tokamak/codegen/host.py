"""Plan -> Program: the host's side. Memory for what is stored, one Launch a kernel, one Call an opaque call, in the plan's order."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture.dtypes import TORCH_DTYPES
from ..capture.fx import Unsupported
from ..capture.registry import ACTIVATED, ACTIVATED_ON_CPU, INTO
from ..errors import OutOfRange
from ..fuse.axes import Group
from ..fuse.plan import Plan
from ..fuse.sizes import condition
from ..ir.expr import Const, Scalar
from ..ir.graph import Compute, Graph, Input, Opaque, Result, View, reads
from ..ir.index import Fetch, FloorDiv, Index, Max, Min, Mod, Size, as_index
from ..ir.normal import maximum
from ..runtime.steps import (Alloc, Blocked, Call, Copy, Host, Launch, Let, Program, Ref, Return, Step, TensorSpec, made, named, read,
                             with_drops)
from ..runtime.gpu_build import GpuUnit
from .blame import blamed
from .kernel import Kernel
from .reuse import reused
from .row_blocks import Run, words
from .tile_kernel import TileKernel

ERRORS = {"index": (OutOfRange, "index out of range"), "division": (RuntimeError, "ZeroDivisionError: integer division or modulo by zero")}
FAR = 1 << 40           # bytes: a descriptor's steps are shorter


@dataclass(frozen=True, eq=False)
class Built:
    """A kernel of the plan: its text, which stands behind the pieces of `prelude`, and the `key` that stands for both: the function's name."""
    group: Group
    kernel: Kernel
    text: str
    key: str
    prelude: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """One of the kernels of a group on a GPU."""
    kernel: TileKernel
    unit: GpuUnit


@dataclass(frozen=True, eq=False)
class BuiltTiles:
    """The kernels of a group, in running order."""
    group: Group
    parts: tuple[Part, ...]


def host_program(plan: Plan, built: dict[Group, Built], constants: dict[Input, torch.Tensor], runs: tuple[Run, ...] = (), rows: str = "",
                 captured: Graph | None = None) -> Program:
    """The program of `plan`, whose `runs` may be made by the function `rows`. `captured`: the graph as captured, whose calls errors name.
    Raises Unsupported when the host cannot compute a size it needs."""
    return _Translation(plan, built, constants, captured or plan.graph).program(runs, rows)


def host_text(index: Index) -> str:
    """Python text of an index over sizes."""
    terms = []
    for atoms, factor in index.terms.items():
        parts = [_atom_text(a) for a in atoms]
        terms.append("*".join([*parts, str(factor)] if factor != 1 or not parts else parts))
    return " + ".join(terms) or "0"


def _atom_text(atom) -> str:
    if isinstance(atom, Size):
        return atom.name
    if isinstance(atom, (Min, Max)):
        return f"{type(atom).__name__.lower()}({host_text(atom.a)}, {host_text(atom.b)})"
    if isinstance(atom, (FloorDiv, Mod)):
        return f"(({host_text(atom.a)}) {atom.sign} ({host_text(atom.b)}))"
    raise Unsupported(f"the host cannot compute {atom!r}")


class _Translation:
    def __init__(self, plan: Plan, built: dict[Group, Built], constants: dict[Input, torch.Tensor], captured: Graph):
        self.plan, self.graph, self.built, self.constants, self.captured = plan, plan.graph, built, constants, captured
        self.names: dict[Any, str] = {}
        self.sizes_known: set[str] = set(self.graph.sizes)
        self.errors: list[tuple[type, str]] = []
        self.outputs = {o.node for o in self.graph.outputs if isinstance(o, View)}

    def program(self, runs: tuple[Run, ...], rows: str) -> Program:
        graph = self.graph
        inputs = tuple(i.name if isinstance(i, Input) else i for i in graph.inputs)
        self.reused = reused(self.plan, self.built)
        self._name_nodes({*inputs, *graph.sizes})
        steps, places = [], {}
        for s in self.plan.steps:
            made = self._kernel(s) if isinstance(s, Group) else [self._call(s)]
            places[s], steps = made, [*steps, *made]
        blocked = tuple(self._blocked(r, rows, [x for s in r.plan_steps() for x in places[s]]) for r in runs)
        steps += [Copy(Ref(self.names[w.target]), self.value(w.source)) for w in graph.writes if w.source.node not in self.plan.inplace]
        if self.plan.inplace:
            written = tuple(Ref(n.name) for n in self.plan.inplace.values())
            steps.append(Call(torch.autograd.graph.increment_version, (written,), {}, (), False, "autograd counts how often a tensor is written"))
        last = Return(tuple(self.value(o) for o in graph.outputs))
        lets = [Let(k, text) for k, text in graph.sizes.items() if k != text]
        constants = {self.names[n]: t for n, t in self.constants.items()}
        dtypes = {i.name: TORCH_DTYPES[i.dtype] for i in graph.inputs if isinstance(i, Input) and i.dtype in TORCH_DTYPES}
        devices = {i.name: i.device for i in graph.inputs if isinstance(i, Input)}
        spans = {i.name: span(i).constant for i in graph.inputs if isinstance(i, Input) and span(i).constant is not None}
        steps = (*lets, *with_drops((*steps, last), named(steps) - {*constants, *read(last)}))
        return Program(graph.name, inputs, steps, tuple(self.errors), constants, dtypes, condition(graph), devices, spans, blocked)

    def _name_nodes(self, taken: set[str]) -> None:
        self.taken = taken
        for node in self.graph.nodes:
            if isinstance(node, Input):
                self.names[node] = node.name
                taken.add(node.name)
        self.results: dict = {}
        for node in self.graph.nodes:
            if isinstance(node, Result):
                wanted = self.graph.origin(node).name or "t"
                self.names[node] = _fresh(wanted if len(node.opaque.results) == 1 else f"{wanted}_{node.position}", taken)
                self.results.setdefault(node.opaque, {})[node.position] = node
        for s in self.plan.steps:
            for node in self.plan.stores.get(s, ()) if isinstance(s, Group) else ():
                into = self.plan.inplace.get(node)
                self.names[node] = into.name if into is not None else _fresh(self.graph.origin(node).name or "t", taken)
        for node, gone in self.reused.items():          # in running order: the memory may have been taken over before
            self.names[node] = self.names[gone]

    # -- kernels ---------------------------------------------------------------------------------------------------------
    def _kernel(self, g: Group) -> list[Step]:
        made = self.built[g]
        if isinstance(made, BuiltTiles):
            return self._tiles(made)
        steps = self._allocations(g)
        first = len(self.errors)
        for kind, where in made.kernel.errors:
            cls, message = ERRORS[kind]
            self.errors.append((cls, message + self._place(g, kind, where)))
        words = tuple(self._word(p) for p in made.kernel.params)
        steps.append(Launch(made.key, words, first))
        return steps

    def _allocations(self, g: Group) -> list[Step]:
        return [Alloc(self.names[n], self.node_spec(n), self.text(span(n)), "output" if n in self.outputs else "temp")
                for n in self.plan.stores[g] if n not in self.plan.inplace and n not in self.reused]

    def _tiles(self, made: BuiltTiles) -> list[Step]:
        """The kernels of a group one after the other, with memory for what it stores and for what they leave each other."""
        steps = self._allocations(made.group)
        for part in made.parts:
            k, first = part.kernel, len(self.errors)
            for node in k.left:
                self.names[node] = name = _fresh("space", self.taken)
                steps.append(Alloc(name, self.node_spec(node), self.text(span(node)), "temp"))
            for kind, where in k.errors:
                cls, message = ERRORS[kind]
                self.errors.append((cls, message + self._place(made.group, kind, where)))
            words = (*(self._word(p) for p in k.params), *((("error", ""),) if k.errors else ()), *box_words(k, self.names, self.text))
            steps.append(Launch(part.unit.name, words, first, (self.text(k.grid), "1", "1"), made.group.members[0].node.device))
        return steps

    def _place(self, g: Group, kind: str, where: Any) -> str:
        """Where in the user's program the check `where` of the group's kernel comes from, in words."""
        origin = blamed(kind, where, self.graph, self.captured) or self.graph.origin(g.members[0].node)
        at = f"{origin.file}:{origin.line}: {origin.code}" if origin.file else origin.op        # torch's own modules leave no line
        limit = where.bound.constant if isinstance(where, Fetch) else None
        return (f" in {at}" if at else "") + (f" (the dimension has size {limit})" if limit is not None else "")

    def _word(self, p) -> tuple[str, str]:
        if p.kind == "memory":
            return ("ptr", self.names[p.source.node])
        if p.kind == "int":
            return ("int", self.text(p.source))
        if p.kind == "order":
            return order_word(p.source, self.names, self.text)
        if isinstance(p.source, Const):
            return (("float", repr(p.source.value)) if p.kind == "float" else ("int", repr(int(p.source.value))))
        return ("float", p.source.argument) if p.kind == "float" else ("int", p.source.argument)

    def _blocked(self, r: Run, function: str, steps: list[Step]) -> Blocked:
        """The `steps` of a run, and the one call that does the same."""
        last = r.steps[-1].result
        into = Alloc(self.names[last], self.node_spec(last), self.text(span(last)), "output" if last in self.outputs else "temp")
        given = tuple(self._word(x) if kind == "param" else ("kernel", self.built[x].key) if kind == "kernel" else (kind, x)
                      for kind, x in words(r, self.names, self.text))
        values = ", ".join(n for s in steps for n, _ in made(s))
        return Blocked(tuple(steps), (into, Launch(function, given, note=f"{values}: in blocks of {r.rows} rows, what lies between in the cache")))

    # -- opaque calls ------------------------------------------------------------------------------------------------------
    def _call(self, node: Opaque) -> Step:
        made = self.results.get(node, {})
        outs = tuple((self.names[made[i]] if i in made else None, self.spec(s) if s is not None else None) for i, s in enumerate(node.results))
        target = INTO[node.target] if node.target in INTO and self._over(node) else node.target
        return Call(target, self.value(node.args), self.value(node.kwargs), outs, node.single, node.reason)

    def _over(self, call: Opaque) -> bool:
        """May `call` write into its first argument: is that memory of this program's own, which nothing shows, shares or reads later?"""
        kept = call.args[0].node
        others = [n for n in self.graph.nodes if isinstance(n, Opaque) and n is not call and kept in n.reads]
        own = isinstance(kept, Compute) or isinstance(kept, Result) and _fresh_result(kept.opaque)
        shown = kept in self.outputs or any(w.source.node is kept for w in self.graph.writes) or kept in self.plan.inplace
        steps = [s.nodes() if isinstance(s, Group) else (s,) for s in self.plan.steps]
        behind = steps[next(i for i, s in enumerate(steps) if call in s) + 1:]
        read = any(kept in reads(n) for s in behind for n in s)
        return own and not shown and not read and all(map(_fresh_result, others))

    # -- values ------------------------------------------------------------------------------------------------------------
    def spec(self, spec) -> TensorSpec:
        dtype = TORCH_DTYPES.get(spec.dtype) or getattr(torch, spec.dtype.name)
        return TensorSpec(self.texts(spec.shape), self.texts(spec.strides), dtype, spec.device)

    node_spec = spec

    def texts(self, indices) -> tuple[str, ...]:
        return tuple(self.text(i) for i in indices)

    def text(self, index: Index) -> str:
        if any(isinstance(a, Size) and a.name not in self.sizes_known for a in _size_atoms(index)):
            raise Unsupported(f"a size that only the run shows: {index!r}")
        return host_text(index)

    def value(self, value):
        if isinstance(value, View):
            node, name = value.node, self.names[value.node]
            if value.shape == node.shape and value.offset == 0 and value.strides == node.strides:
                return Ref(name)
            if value.shape == node.shape and value.offset == 0 and isinstance(node, (Input, Result)) and \
                    all(a is b or e == 1 for a, b, e in zip(value.strides, node.strides, node.shape)):
                return Ref(name)
            return Ref(name, self.texts(value.shape), self.texts(value.strides), self.text(value.offset))
        if isinstance(value, Index):
            return value.constant if value.constant is not None else Host(self.text(value))
        if isinstance(value, Scalar):
            return Host(value.argument)
        if isinstance(value, fx.Node):
            return Host(value.name)
        if isinstance(value, Const):
            return value.value
        if isinstance(value, (tuple, list)):
            return type(value)(self.value(v) for v in value) if type(value) in (tuple, list) else tuple(self.value(v) for v in value)
        if isinstance(value, dict):
            return {k: self.value(v) for k, v in value.items()}
        return value


def box_words(k: TileKernel, names: dict, text=host_text) -> tuple[tuple[str, str], ...]:
    """What a launch gives of a kernel's descriptors, behind its other words."""
    numbers = lambda *indices: tuple(("int", text(i)) for i in indices)
    found: list[tuple[str, str]] = []
    for b in k.boxes:
        if b.beside is None:
            found += [("ptr", names[b.memory.node]), *numbers(b.offset, *b.extents, *b.strides)]
        else:
            first, second = _places(((b.memory, b.offset), b.beside), names, text)
            step = ("addresses", f"abs({first} - {second}) // {b.memory.dtype.bytes}")
            found += [("addresses", f"min({first}, {second})"), ("int", "0"), *numbers(*b.extents), step, *numbers(*b.strides[1:])]
    return tuple(found)


def order_word(places, names: dict, text=host_text) -> tuple[str, str]:
    """What a launch gives of two places that a descriptor holds, see `Boxed`."""
    first, second = _places(places, names, text)
    return "addresses", f"(0 if {first} < {second} else 16) if 0 < abs({first} - {second}) < {FAR} else 1"


def _places(places, names: dict, text) -> list[str]:
    """The text of addresses; a memory's own stands in braces."""
    return [f"({{{names[m.node]}}} + {m.dtype.bytes} * ({text(offset)}))" for m, offset in places]


def _fresh_result(call: Opaque) -> bool:
    """Does a call give memory that no argument shares? Known of products."""
    return call.meaning is not None or call.target in INTO or any(call.target in own[:2] for t in (ACTIVATED, ACTIVATED_ON_CPU) for own in t.values())


def span(node) -> Index:
    """Bytes from a node's first element to behind its last, by its strides."""
    total = as_index(1)
    for extent, stride in zip(node.shape, node.strides):
        if extent.constant == 0:
            return as_index(0)
        total = total + (extent - 1) * stride
    return maximum(total, as_index(0)) * node.dtype.bytes


def _fresh(wanted: str, taken: set[str]) -> str:
    while wanted in taken:
        wanted += "_"
    taken.add(wanted)
    return wanted


def _size_atoms(index: Index):
    for a in index.atoms():
        if isinstance(a, (FloorDiv, Mod, Min, Max)):
            yield from _size_atoms(a.a)
            yield from _size_atoms(a.b)
        else:
            yield a
