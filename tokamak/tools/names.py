"""Names for people: kernels in Inductor's family form, values by the user's names, bytes and times in units."""
from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count

from ..fuse.axes import Group
from ..fuse.plan import Plan
from ..ir.expr import Reduce, Scan, walk
from ..ir.graph import Graph, Origin, Scatter
from ..schedule.body import Body, exprs_of
from ..schedule.tile_schedule import TileSchedule
from .dynamo import user_name
from .record import GraphRecord

FAMILIES = {
    "poi": "pointwise",
    "per": "folds whose rows each lie within one parallel iteration; on a GPU, in registers",
    "red": "a fold over what runs in parallel: partial results, then combined; on a GPU also rows run through in loops",
    "scn": "prefix folds",
    "sca": "updates of elements that indices choose",
}
LONGEST = 6         # operations that a kernel's name spells out
EXAMPLE = "per_fused_add_mul_sum_0"


def family(plan: Plan, group: Group) -> str:
    """The kind of kernel that `group` becomes, a key of FAMILIES."""
    if any(isinstance(m.node, Scatter) for m in group.members):
        return "sca"
    folds = [e for m in group.members for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if not folds:
        return "poi"
    if any(isinstance(e, Scan) for e in folds):
        return "scn"
    roles = plan.roles[group]
    return "per" if roles.parallel and not roles.accumulating else "red"


def tile_family(b: Body, s: TileSchedule) -> str:
    """The kind of kernel that `b` is on a GPU with the schedule `s`, a key of FAMILIES."""
    if any(x.monoid is not None for x in b.stores):
        return "sca"
    folds = [e for e in walk(*exprs_of(b)) if isinstance(e, (Reduce, Scan))]
    if not folds:
        return "poi"
    if any(isinstance(e, Scan) for e in folds):
        return "scn"
    return "red" if any((s.looped | set(s.split)) & set(e.over) for e in folds) else "per"


def kernel_names(record: GraphRecord, plan: Plan) -> dict[Group, tuple[str, ...]]:
    """The names of the kernels of each group of `plan`, as far as the compile has come; a group on a GPU may become several."""
    lowered, scheduled = record.values.get("lower"), record.values.get("lower") or record.values.get("schedule")
    numbers, found = count(), {}
    for g in (s for s in plan.steps if isinstance(s, Group)):
        made = lowered.kernels[g] if lowered is not None else ()
        bodies = [(k.body, k.schedule) for k in made] if isinstance(made, tuple) and made else [scheduled.bodies[g]] if scheduled is not None else []
        kinds = [tile_family(b, s) if isinstance(s, TileSchedule) else family(plan, g) for b, s in bodies] or [family(plan, g)]
        called = tuple(o.op for o in operations(plan.graph, g.nodes(), record.order))
        found[g] = tuple(kernel_name(kind, called, next(numbers)) for kind in kinds)
    return found


def kernel_name(kind: str, operations: tuple[str, ...], number: int) -> str:
    """`per_fused_add_mul_sum_0`: the family, the operations in alphabetical order, the kernel's number in its graph."""
    words = sorted({op.split(".")[0].strip("_") for op in operations})
    more = [f"{len(words) - LONGEST}_more"] if len(words) > LONGEST else []
    return "_".join([kind, "fused", *words[:LONGEST], *more, str(number)])


def is_name(text: str) -> bool:
    """May a kernel be called so?"""
    return re.fullmatch(rf"({'|'.join(FAMILIES)})_fused(_\w+)?_\d+", text) is not None


def operations(graph: Graph, nodes, position: Mapping[str, int]) -> list[Origin]:
    """The aten calls that `nodes` compute, in the order in which eager makes them: each at its `position`."""
    found = {o.name: o for n in nodes for o in graph.origins.get(n, ()) if o.op}
    return sorted(found.values(), key=lambda o: position.get(o.name, len(position)))


def module(origins) -> str:
    """The module path that all of `origins` that have one share."""
    paths = [user_name(o.module).split(".") for o in origins if o.module]
    if not paths:
        return ""
    shared = paths[0]
    for path in paths[1:]:
        shared = shared[:next((i for i, (a, b) in enumerate(zip(shared, path)) if a != b), min(len(shared), len(path)))]
    return ".".join(shared)


def size_text(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def resources_text(kernel) -> str:
    """What a kernel on a GPU takes of a multiprocessor, '' while that is not known. `kernel`: a KernelInfo."""
    if kernel.registers is None:
        return ""
    spilled = f", {kernel.spilled} bytes of stack" if kernel.spilled else ""
    return f"{kernel.registers} registers a thread{spilled}, {size_text(kernel.shared)} of shared memory a program"


def rate_text(rate: float) -> str:
    """Operations a second."""
    text = count_text(rate)
    number = text.rstrip("kMGT")
    return f"{number} {text[len(number):]}FLOP/s"


def count_text(count: float) -> str:
    """A number of operations, in thousands, millions, ..."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000 or unit == "T":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError
