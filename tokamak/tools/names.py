"""Names for people: kernels in Inductor's family form, values by the user's names, bytes and times in units."""
from __future__ import annotations

from ..fuse.axes import Group
from ..fuse.plan import Plan
from ..ir.expr import Reduce, Scan, walk
from ..ir.graph import Graph, Origin, Scatter
from .aten import AtenCall
from .dynamo import user_name
from .record import GraphRecord

FAMILIES = {
    "poi": "pointwise",
    "per": "folds whose rows each lie within one parallel iteration",
    "red": "a fold over what runs in parallel: partial results, then combined",
    "scn": "prefix folds",
    "sca": "updates of elements that indices choose",
}
LONGEST = 6         # operations that a kernel's name spells out


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


def group_names(record: GraphRecord, plan: Plan) -> dict[Group, str]:
    """The name of each group's kernel."""
    groups = [s for s in plan.steps if isinstance(s, Group)]
    called = {g: tuple(o.op for o in operations(plan.graph, g.nodes(), record.calls)) for g in groups}
    return {g: kernel_name(family(plan, g), called[g], n) for n, g in enumerate(groups)}


def kernel_name(kind: str, operations: tuple[str, ...], number: int) -> str:
    """`per_fused_add_mul_sum_0`: the family, the operations in alphabetical order, the kernel's number in its graph."""
    words = sorted({op.split(".")[0].strip("_") for op in operations})
    more = [f"{len(words) - LONGEST}_more"] if len(words) > LONGEST else []
    return "_".join([kind, "fused", *words[:LONGEST], *more, str(number)])


def operations(graph: Graph, nodes, calls: tuple[AtenCall, ...]) -> list[Origin]:
    """The aten calls that `nodes` compute, in the order in which eager makes them."""
    position = {c.name: i for i, c in enumerate(calls)}
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


def count_text(count: float) -> str:
    """A number of operations, in thousands, millions, ..."""
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000 or unit == "T":
            return f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError
