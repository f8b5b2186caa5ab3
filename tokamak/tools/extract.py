"""A kernel as a file of its own: its text, the values that it had, and what it means, so that it can be run, checked and timed without the program
that it comes from. `extracted.py` is what such a file calls."""
from __future__ import annotations

import base64
import os
import pprint
import zlib
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from ..capture.dtypes import TORCH_DTYPES
from ..check import differences
from ..codegen.host import BuiltTiles, host_text, span
from ..fuse.axes import Group
from ..ir.graph import Graph
from ..ir.meaning import bf16_bits
from ..ir.text import print_graph
from ..runtime.build import ROUND_EACH, Unit
from ..runtime.gpu_build import GpuUnit
from ..runtime.program import Alloc, Drop, Let, Program, Ref, Return, TensorSpec
from . import annotate
from .kernel_graph import arguments, part, sizes_of
from .kernels import kernels, launched
from .record import GraphRecord

LONGEST = 1 << 20           # bytes of values, compressed, that stand in the file itself; more stand in one beside it

TEMPLATE = '''"""{title}

Reproduces, checks and times this kernel on the values that it had:

    python {name} [--seconds SECONDS]

Exit status 0 when its results are what GRAPH means on VALUES, else 1. What it does, for people:

{listing}
"""
import sys

import torch

from tokamak.runtime.build import Unit
from tokamak.runtime.gpu_build import GpuUnit
from tokamak.runtime.program import Alloc, Copy, Drop, Host, Launch, Let, Program, Ref, Return, TensorSpec
from tokamak.tools.extracted import main

GRAPH = {graph}

UNITS = {units}

PROGRAM = {program}

ERRORS = {errors}

SIZES = {sizes}

VALUES = {values}

if __name__ == "__main__":
    sys.exit(main(__file__, GRAPH, UNITS, PROGRAM, ERRORS, SIZES, VALUES, {device!r}))
'''


def write(record: GraphRecord, g: Group, path: str) -> str:
    """Writes the kernels of a group and the values of the recorded call; returns `path`."""
    plan, seen = record.values["lower"].plan, record.seen
    values = differences(plan.graph, seen.args, seen.constants, seen.values, lambda node, wrong: None).values
    cut, inputs, made = part(plan.graph, g.nodes(), plan.stores[g])
    pairs = [(x, i) for x, i in zip(launched(record), kernels(record)) if x.group is g]
    program = alone(record.values["program"], g, record, inputs, cut)
    sizes = sizes_of(values)
    text = TEMPLATE.format(
        title=f"{' + '.join(i.name for _, i in pairs)}, of {record.name}", name=os.path.basename(path), graph=quoted(print_graph(cut)),
        listing=safe("\n".join(annotate.kernel_text(record, x, i) for x, i in pairs)),
        units=f"[{', '.join(unit_text(u) for u in units(record, g))}]", program=pprint.pformat(replace(program, errors=()), width=140),
        errors=repr([(kind.__name__, words) for kind, words in program.errors]), sizes=repr(sizes),
        values=packed(path, [storage(n, v) for n, v in zip_longest(inputs, arguments(plan.graph, cut, inputs, values, seen.args))]),
        device=record.values["target"].name if record.values["target"].kind == "gpu" else "C")
    with open(path, "w") as file:
        file.write(text)
    return path


def alone(program: Program, g: Group, record: GraphRecord, inputs: dict, cut: Graph) -> Program:
    """The steps of `program` that run the kernels of `g`, from its inputs to all that it stores."""
    mine = [x for x in launched(record) if x.group is g]
    steps = {id(x.launch) for x in mine}
    name_of = {p.source.node: word for x in mine for p, (_, word) in zip(x.kernel.params, x.launch.words) if p.kind == "memory"}
    used = set(name_of.values())
    plan = record.values["lower"].plan
    given = [name_of.get(n, f"unread_{i}") for i, n in enumerate(inputs)]
    results = [name_of[n] for n in plan.stores[g]]
    into = [name for n, name in zip(plan.stores[g], results) if n in plan.inplace and name not in given]
    kept = [s for s in program.steps if isinstance(s, Let) or isinstance(s, Alloc) and s.name in used and s.name not in given or id(s) in steps]
    numbers = tuple(str(i) for i in cut.inputs[len(inputs):])
    fresh = tuple(alloc_like(n, name) for n, name in zip(plan.stores[g], results) if name in into)
    lets, rest = [s for s in kept if isinstance(s, Let)], [s for s in kept if not isinstance(s, Let)]
    drops = [Drop(n) for n in sorted(used - set(results) - set(given))]
    return Program(program.name, (*given, *numbers), (*lets, *fresh, *rest, *drops, Return(tuple(Ref(r) for r in results))), program.errors)


def alloc_like(node, name: str) -> Alloc:
    """Memory for a result that the program writes into an input which the kernel does not read."""
    spec = TensorSpec(tuple(map(host_text, node.shape)), tuple(map(host_text, node.strides)), TORCH_DTYPES[node.dtype], node.device)
    return Alloc(name, spec, host_text(span(node)), "output")


def units(record: GraphRecord, g: Group) -> list[Unit | GpuUnit]:
    built = record.values["render"][g]
    fast = record.values["target"].fast
    if isinstance(built, BuiltTiles):
        return [replace(p.unit, contract=fast) for p in built.parts]
    return [Unit(built.key, built.text, prelude=("".join(built.prelude),), flags=() if fast else (ROUND_EACH,))]


def unit_text(u: Unit | GpuUnit) -> str:
    """A unit as Python, its text readable."""
    texts = {"text": u.text} | ({"prelude": u.prelude} if isinstance(u, Unit) else {})
    fields = [f"{n}={v!r}" for n, v in vars(u).items() if n not in texts]
    fields += [f"{n}={f'({quoted(v[0])},)' if n == 'prelude' else quoted(v)}" for n, v in texts.items()]
    return f"{type(u).__name__}({', '.join(fields)})"


def quoted(text: str) -> str:
    """`text` as a Python literal over several lines."""
    return 'r"""' + text + '"""' if '"""' not in text and not text.endswith(('"', "\\")) else repr(text)


def safe(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''")


# -- values --------------------------------------------------------------------------------------------------------------
def storage(node, value):
    """A value as plain data: (type, shape, strides in elements, bytes of its elements) of an array, a number as it is."""
    if node is None or not isinstance(value, np.ndarray):
        return value
    bits = bf16_bits(value) if node.dtype.name == "bf16" else value
    strides = tuple(s.constant for s in node.strides)
    return (node.dtype.name, tuple(value.shape), None if None in strides else strides, np.ascontiguousarray(bits).tobytes())


def packed(path: str, values: list) -> str:
    """The Python text of `values`; where they are large, of a reference to a file that is written beside `path`."""
    small = [(*v[:3], base64.b85encode(zlib.compress(v[3], 6)).decode()) if isinstance(v, tuple) else v for v in values]
    text = pprint.pformat(small, width=140)
    if len(text) <= LONGEST:
        return text
    beside = os.path.splitext(path)[0] + ".values"
    with open(beside, "w") as file:
        file.write(repr(small))
    return repr(os.path.basename(beside))
