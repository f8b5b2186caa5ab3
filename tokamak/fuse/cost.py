"""What a fusion is worth: bytes, operations, parallelism, by size hints. Numbers only; nothing here decides legality."""
from __future__ import annotations

from typing import Iterable, Iterator

from ..ir import ops
from ..ir.dtype import F32
from ..ir.expr import Expr, Load, Op, Reduce, Scan, loads, walk
from ..ir.graph import Compute, Graph, Node, Opaque, Scatter, View, fold, readers_of
from ..ir.index import Axis, Fetch, Index
from .axes import Group, Member
from .legal import Roles
from .sizes import SizeClass, divisor, span, value

BLOCK = 64              # coordinates of the vector axis that are one piece of work
PAGE = 4096             # bytes that lie one behind the other, from which on a stretch is read as fast as all of memory
SPREAD = 128 << 10      # bytes from which on reading them in stretches costs more than a kernel
SMALL_PART = 8          # of the bytes that a kernel moves, what is read again rather than all of them in steps. Softmax with a bias gathered from
                        # a table, one core, ms together / apart: 256 x 4 x 49 x 49 6.6 / 3.0, 64 x 3 x 49 x 49 0.70 / 0.55
GRAIN = 32 * 1024       # elements below which one thread is as fast as several


class Hints:
    """Sizes as numbers, for estimates: those of `classes` as their class says, so that all sizes of it are planned alike. `ordered`: are they for a
    target whose folds are taken in an order that depends on the fold alone?"""
    ordered = False

    def __init__(self, hints: dict[str, int], classes: dict[str, SizeClass] | None = None):
        self.hints, self.classes = hints, classes or {}
        self.sizes = {**hints, **{name: c.like for name, c in self.classes.items()}}
        self.bytes: dict = {}               # node -> its bytes: the planner asks again and again
        self.contiguous: dict = {}          # Group -> its contiguous axis

    def __call__(self, i: Index) -> int:
        return value(i, self.sizes)

    def traced(self, i: Index) -> int:
        """`i` as it was traced, whatever the estimates say."""
        return value(i, self.hints)

    def least(self, i: Index) -> int:
        """What extent `i` is at least. A fact, as the next three are."""
        return span(i, self.classes)[0]

    def most(self, i: Index) -> int | None:
        """What extent `i` is at most; None where nothing bounds it."""
        return span(i, self.classes)[1]

    def exactly(self, i: Index) -> int | None:
        """What extent `i` always is, or None."""
        low, high = span(i, self.classes)
        return low if low == high else None

    def divides(self, n: int, i: Index) -> bool:
        """Is `i` always a multiple of `n`?"""
        return divisor(i, self.classes) % n == 0

    def count(self, axes: Iterable[Axis]) -> int:
        return self.extents(a.extent for a in axes)

    def extents(self, shape: Iterable[Index]) -> int:
        """Elements of a value of `shape`."""
        total = 1
        for s in shape:
            total *= self(s)
        return total


class Alike(Hints):
    """Every extent but 1 counts as the same number, constant or not: what is decided with these depends on a program's structure alone."""
    EXTENT = 64
    ordered = True

    def __call__(self, i: Index) -> int:
        return i.constant if i.constant in (0, 1) else self.EXTENT


def estimates(graph, target) -> Hints:
    """Sizes as numbers, for decisions about kernels on `target`."""
    return Alike(graph.hints) if target.ordered else Hints(graph.hints, graph.classes)


def node_bytes(node, hints: Hints) -> int:
    """Bytes of a tensor node."""
    found = hints.bytes.get(node)
    if found is None:
        found = hints.bytes[node] = hints.extents(node.shape) * node.dtype.bytes
    return found


def pinned_nodes(graph: Graph) -> set:
    """Nodes that need memory whatever is fused: outputs, written values, what opaque calls and scatters (as base) are handed."""
    found = {o.node for o in graph.outputs if isinstance(o, View)} | {w.source.node for w in graph.writes}
    for n in graph.nodes:
        if isinstance(n, Opaque):
            found.update(n.reads)
        elif isinstance(n, Scatter):
            found.add(n)
            if not hasattr(n.base, "free"):
                found.add(n.base)
    return found


def rounded_sums(graph: Graph) -> frozenset:
    """Sums of 16-bit values, in f32, that are rounded to 16 bits before anybody sees them, or all that is made of them is."""
    readers, fixed, late, found = readers_of(graph), pinned_nodes(graph), set(), set()
    for n in reversed(graph.nodes):
        if isinstance(n, Compute) and n.dtype is F32 and n not in fixed \
                and all(isinstance(r, Compute) and (r.dtype.is_half or r in late) for r in readers.get(n, ())):
            late.add(n)
    for n in graph.nodes:
        part = fold(n) if n in late else None
        if isinstance(part, Reduce) and part.monoid == "sum" \
                and all(e.dtype.is_half or e.node in found for e in loads(*part.args) if set(part.over) & e.free):
            found.add(n)
    return frozenset(found)


def weight(e: Expr) -> int:
    """Operations one element takes: heavy ones count their FLOPs, moves nothing."""
    return sum(ops.OPS[x.name].flops for x in walk(e) if isinstance(x, Op))


def is_heavy(e: Expr) -> bool:
    return any(isinstance(x, (Reduce, Scan)) or (isinstance(x, Op) and ops.OPS[x.name].heavy) for x in walk(e))


def reads_of(m: Member) -> tuple[Load, ...]:
    return m.loads


def contiguous_axis(group: Group, hints: Hints) -> Axis | None:
    """The axis along which most bytes lie contiguously: the one to vectorise over."""
    if group not in hints.contiguous:
        hints.contiguous[group] = _contiguous_axis(group, hints)
    return hints.contiguous[group]


def _contiguous_axis(group: Group, hints: Hints) -> Axis | None:
    score: dict[Axis, int] = {}
    for node, a in _neighbours(group):
        score[a] = score.get(a, 0) + node_bytes(node, hints)
    if not score:
        return max(group.axes, key=lambda a: hints(a.extent), default=None)
    return max(score, key=lambda a: (score[a] if hints(a.extent) >= 4 else 0, hints(a.extent)))


def _neighbours(group: Group) -> Iterator[tuple[Node, Axis]]:
    """What is read or written, with each axis along which neighbours lie side by side in its memory."""
    for m in group.members:
        written = m.dims if isinstance(m.node, Compute) else m.index
        for node, index in (*((e.node, e.index) for e in reads_of(m)), (m.node, written)):
            side_by_side = (i for i, s in zip(index or (), node.strides) if s.constant == 1)
            yield from ((node, a) for i in side_by_side for a in i.atoms() if isinstance(a, Axis) and i.steps_by_one(a))


def cpu_roles(group: Group, found: list[Roles], hints: Hints, target) -> Roles:
    """Of the legal choices of parallel axes the one that keeps the cores busy at the least traffic."""
    if len(found) == 1:
        return found[0]
    v = contiguous_axis(group, hints)

    def rank(r: Roles):
        busy = parallelism(r, v, hints) >= 2 * target.threads
        partial = max((hints.count(m.free) for m in r.accumulating), default=0)
        streams = r.parallel and v in r.parallel and any(m.bound - r.parallel for m in r.local)    # a fold across rows by columns
        strided = streams and hints.count(b for m in r.local for b in m.bound - r.parallel) > 64
        return (busy, partial * 8 <= target.l2 // 2, not strided, v not in r.parallel or not r.accumulating or len(r.parallel) == 1,
                -len(r.accumulating), hints.count(r.parallel), -_down_columns(group, r, hints))
    return max(found, key=rank)


def _down_columns(group: Group, r: Roles, hints: Hints) -> int:
    """Bytes of what an iteration of the parallel loops reads a column of: other lines of memory at every step."""
    made, total = group.nodes(), {}
    for m in group.members:
        for e in reads_of(m):
            if e.node not in made and any(s == 1 and i.axes() & r.parallel for i, s in zip(e.index, e.node.strides)):
                total[e.node] = node_bytes(e.node, hints)
    return sum(total.values())


def scattered(made: Iterable, nodes: Iterable, joined: Group, r: Roles, saved: int, hints: Hints) -> int | None:
    """How often loops inside an iteration of `joined` go through memory in steps, or compute costly values of `made` again, because these are made
    along fewer axes than `nodes`, which read them: a bias by positions beside the scores of every image. None where it is not so, or worth it."""
    v, made = contiguous_axis(joined, hints), set(made)
    members = [m for m in joined.members if m.node in nodes]
    around = frozenset.intersection(*(m.free for m in members)) - r.parallel - {v}
    moved = sum(node_bytes(n, hints) for n in {x.node for m in members for x in reads_of(m)}.difference(made).union(m.node for m in members))
    if hints.count(around) < 2 or moved < SPREAD or saved * SMALL_PART > moved:
        return None
    again = any(m.node in made and v in m.free and (is_heavy(m.expr) or _gathers(m, v)) for m in joined.members)
    largest = max(members, key=lambda m: hints.count(m.free))
    return hints.count(around) if again or _stretch(largest, r, hints) < PAGE else None


def idle_lanes(made: Iterable, joined: Group, hints: Hints, lanes: int) -> int:
    """Operations that the lanes of a register would do besides for pointwise values of `made` that are the same all along lanes in `joined`."""
    v, made = contiguous_axis(joined, hints), set(made)
    members = [m for m in joined.members if m.node in made]
    if any(isinstance(m.node, Scatter) or any(isinstance(e, (Reduce, Scan)) for e in walk(m.expr)) for m in members):
        return 0
    return sum(hints.count(m.free) * weight(m.expr) * (lanes - 1) for m in members if v not in m.free and hints.count(m.free) >= lanes)


def _gathers(m: Member, v: Axis) -> bool:
    """Does it read lane by lane, where an index from memory says?"""
    return any(isinstance(a, Fetch) and v in a.expr.free for x in reads_of(m) for i in x.index for a in i.atoms())


def _stretch(m: Member, r: Roles, hints: Hints) -> int:
    """Bytes of `m` that an iteration goes through one behind the other."""
    run = m.node.dtype.bytes
    for stride, i, extent in sorted(((hints(s), i, hints(e)) for s, i, e in zip(m.node.strides, m.dims, m.node.shape)), key=lambda x: x[0]):
        if extent > 1:
            if stride * m.node.dtype.bytes != run or i.axes() & r.parallel:
                break
            run *= extent
    return run


def parallelism(r: Roles, vector: Axis | None, hints: Hints) -> int:
    """How many independent pieces of work there are; the vector axis counts in blocks."""
    total = 1
    for a in r.parallel:
        n = hints(a.extent)
        total *= max(1, n // BLOCK) if a is vector else n
    return total


def row_bytes(group: Group, r: Roles, hints: Hints) -> int:
    """Bytes that one iteration of the parallel loops touches."""
    total = 0
    seen: dict = {}
    for m in group.members:
        for e in reads_of(m):
            axes = frozenset(a for i in e.index for a in i.axes()) - r.parallel
            seen[e.node] = max(seen.get(e.node, 0), hints.count(axes) * e.node.dtype.bytes)
        seen[m.node] = max(seen.get(m.node, 0), hints.count(m.free - r.parallel) * m.node.dtype.bytes)
    for n in seen.values():
        total += n
    return total
