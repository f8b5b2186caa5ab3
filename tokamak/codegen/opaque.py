"""Graph -> Program where torch makes every call: no kernels, no plan. What the tests of the runtime compare the compiler with."""
from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..capture.fx import TORCH_DTYPES, Unsupported
from ..ir.expr import Scalar
from ..ir.graph import Graph, Input, Opaque, Result, View
from ..ir.index import FloorDiv, Index, Max, Min, Mod, Size
from ..runtime.program import Call, Copy, Drop, Host, Let, Program, Ref, Return, Step, TensorSpec


def opaque_program(graph: Graph, constants: dict[Input, torch.Tensor]) -> Program:
    """The program of a graph of Inputs, Opaques and Results. Raises Unsupported when it computes anything itself."""
    return _Translation(graph, constants).program()


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
    def __init__(self, graph: Graph, constants: dict[Input, torch.Tensor]):
        self.graph, self.constants = graph, constants
        self.names: dict[Any, str] = {}
        self.sizes_used: set[str] = set()
        self.sizes_known: set[str] = set(graph.sizes)

    def program(self) -> Program:
        graph = self.graph
        inputs = tuple(i.name if isinstance(i, Input) else i for i in graph.inputs)
        taken = set(inputs)
        for node in graph.nodes:
            if isinstance(node, Input):
                self.names[node] = node.name
                taken.add(node.name)
            elif isinstance(node, Result):
                self.names[node] = _fresh(graph.origin(node).name or "t", node, taken)
            elif not isinstance(node, Opaque):
                raise Unsupported(f"a {type(node).__name__} node, where torch was to make every call")
        results = {}
        for node in graph.nodes:
            if isinstance(node, Result):
                results.setdefault(node.opaque, {})[node.position] = node
        steps: list[Step] = [self.call(n, results.get(n, {})) for n in graph.nodes if isinstance(n, Opaque)]
        steps += [Copy(Ref(self.names[w.target]), self.value(w.source)) for w in graph.writes]
        steps.append(Return(tuple(self.value(o) for o in graph.outputs)))
        lets = [Let(k, text) for k, text in graph.sizes.items() if k != text]
        constants = {self.names[n]: t for n, t in self.constants.items()}
        return Program(graph.name, inputs, (*lets, *with_drops(tuple(steps), set(inputs))), constants=constants)

    def call(self, node: Opaque, results: dict[int, Result]) -> Step:
        outs = tuple((self.names[results[i]] if i in results else None, self.spec(s) if s is not None else None) for i, s in enumerate(node.results))
        return Call(node.target, self.value(node.args), self.value(node.kwargs), outs, node.single, node.reason)

    def spec(self, spec) -> TensorSpec:
        dtype = TORCH_DTYPES.get(spec.dtype) or getattr(torch, spec.dtype.name)
        return TensorSpec(self.texts(spec.shape), self.texts(spec.strides), dtype, spec.device)

    def texts(self, indices) -> tuple[str, ...]:
        return tuple(self.text(i) for i in indices)

    def text(self, index: Index) -> str:
        if any(isinstance(a, Size) and a.name not in self.sizes_known for a in _size_atoms(index)):
            raise Unsupported(f"a size that only the run shows: {index!r}")
        return host_text(index)

    def value(self, value):
        if isinstance(value, View):
            node, name = value.node, self.names[value.node]
            if value.shape == node.shape and value.offset == 0 and all(a == b or e == 1 for a, b, e in zip(value.strides, node.strides, node.shape)):
                return Ref(name)
            return Ref(name, self.texts(value.shape), self.texts(value.strides), self.text(value.offset))
        if isinstance(value, Index):
            return value.constant if value.constant is not None else Host(self.text(value))
        if isinstance(value, (Scalar, fx.Node)):
            return Host(value.name)
        if isinstance(value, (tuple, list)):
            return type(value)(self.value(v) for v in value) if type(value) in (tuple, list) else tuple(self.value(v) for v in value)
        if isinstance(value, dict):
            return {k: self.value(v) for k, v in value.items()}
        return value


def _fresh(name: str, node: Result, taken: set[str]) -> str:
    wanted = name if len(node.opaque.results) == 1 else f"{name}_{node.position}"
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


def with_drops(steps: tuple[Step, ...], inputs: set[str]) -> tuple[Step, ...]:
    """`steps` with a Drop behind the last use of each input and each result."""
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in _tensors(step):
            last[name] = position
    out: list[Step] = []
    for position, step in enumerate(steps):
        out.append(step)
        if not isinstance(step, Return):
            defined = {n for n, _ in step.results if n is not None} if isinstance(step, Call) else set()
            out += [Drop(n) for n, p in last.items() if p == position and (n in inputs or n in defined or not n.startswith("constant_"))]
    return tuple(out)


def _tensors(step: Step) -> list[str]:
    """The names of tensors that `step` reads or makes."""
    found: list[str] = []

    def visit(value):
        if isinstance(value, Ref):
            found.append(value.name)
        elif isinstance(value, (tuple, list)):
            for v in value:
                visit(v)
        elif isinstance(value, dict):
            for v in value.values():
                visit(v)
    if isinstance(step, Call):
        visit((step.args, step.kwargs))
        found += [n for n, _ in step.results if n is not None]
    elif isinstance(step, Copy):
        visit((step.target, step.source))
    elif isinstance(step, Return):
        visit(step.items)
    return found
