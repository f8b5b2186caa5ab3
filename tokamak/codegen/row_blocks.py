"""Which products of torch's, and kernels between them, run through the caches together: block after block of their rows, so that what lies between
two products is never written to memory.

    Run ::= product, (kernel?, product) ...         each reads, of what the one before makes, the same rows alone, and nothing else reads that

The steps stay what they are: a product by the vendor, a kernel over all rows. A Run says how the function of `c_rows` does the same in one call. A
kernel is called as if a block were all its rows, so what it reads must move on by the same distance with each row (`_moves`), or not at all.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from ..capture.registry import ACTIVATED_ON_CPU
from ..fuse.axes import Group
from ..fuse.cost import Hints, estimates
from ..ir.dtype import F32
from ..ir.expr import Coord, Load, Random, walk
from ..ir.graph import Opaque, Result, View, reads, shown_nodes
from ..ir.index import Axis, Index, Size, as_index, row_major
from ..schedule.body import Body, exprs_of
from ..schedule.schedule import strides_of
from .c_rows import OUTER, STEPS, WORDS
from .kernel import Kernel

aten = torch.ops.aten
TRAFFIC = 12                # bytes for each element that need not go to memory and back: its line is read, written, and read again
NEAR = 3                    # what that costs less where it would have stayed in the second level
COPY = 12e9                 # bytes a second of a core
PACKED = 0.25e-9            # seconds for each element of a right factor that is packed
MARGIN = 5                  # times that what is saved exceeds what is lost: it is 4 at 512 rows of 256-1024-256, on two cores 3.2 ms one by one and
                            # 3.5 in blocks. Our product is as fast as the vendor's (MKL on a Zen 4) or faster. One core, ms, one by one / in blocks:
                            # attention 4x512x64 4.28 / 3.26, 2048x64 16.0 / 15.7; 16384 rows of 64-64-64 with GELU 4.00 / 3.47, 8192 of 128-256-128
                            # with ReLU 13.9 / 11.0, 2048 of 256-1024-256 27.8 / 23.2, 512 of 768-3072-768 56 / 63
CACHES = 4                  # times the second level that packed factors fill at most


@dataclass(frozen=True, eq=False)
class Product:
    """result[b, row, :] = left[b, row, :] @ right[b], on top of `bias`, with a ReLU behind."""
    call: Opaque
    left: View
    right: View
    bias: View | None
    relu: bool
    result: Result

    def batch(self) -> Index:
        return self.left.shape[0] if len(self.left.shape) == 3 else as_index(1)


@dataclass(frozen=True, eq=False)
class Between:
    """A kernel on rows. `outer`: extents that count batches, outermost first; `within`: how many more the axis of rows runs through, `unit`: its
    steps in a row. `words`: for each parameter what it is of a block: 'plain', 'one', 'rows', 'read' or 'made', or (bytes a row, bytes a step of each
    outer axis)."""
    group: Group
    kernel: Kernel
    outer: tuple[Index, ...]
    within: Index
    unit: int
    words: tuple


@dataclass(frozen=True, eq=False)
class Run:
    """`steps`: Product and Between in order. `rows`: of a block; `floats`: of a buffer."""
    steps: tuple[Product | Between, ...]
    rows: int
    floats: int

    def plan_steps(self) -> tuple:
        return tuple(s.call if isinstance(s, Product) else s.group for s in self.steps)


def runs(lowered, target) -> tuple[Run, ...]:
    """The runs of a plan for a CPU that are worth it."""
    if target.kind != "cpu" or target.ordered:
        return ()
    plan, hints, found, at = lowered.plan, estimates(lowered.plan.graph, target), [], 0
    products, alone = _products(plan), _read_once(plan)
    while at < len(plan.steps):
        steps = _longest(lowered, at, products, alone)
        while steps and not (made := _worth(steps, hints, target)):
            steps = steps[:-2] if len(steps) > 2 and isinstance(steps[-2], Between) else steps[:-1]
            steps = steps if len(steps) > 1 else []
        found += [made] if steps else []
        at += len(steps) or 1
    return tuple(found)


def _longest(lowered, at: int, products: dict[Opaque, Product], alone: Callable) -> list:
    """The steps of the longest run from `at` on; none where there are not two products. `alone`: see `_read_once`."""
    plan = lowered.plan
    steps = [first] if (first := products.get(plan.steps[at])) else []
    while steps and len(steps) + 2 <= STEPS:
        last, more, value = steps[-1], [], steps[-1].result
        rest = plan.steps[at + len(steps):][:2]
        if rest and isinstance(rest[0], Group) and alone(value) and (kernel := _between(lowered, rest[0], last)):
            more, value, rest = [kernel], plan.stores[rest[0]][0], rest[1:]
        following = products.get(rest[0]) if rest and alone(value) else None
        if following is None or not _follows(following, value, last):
            break
        steps += [*more, following]
    return steps if len(steps) > 1 else []


def _read_once(plan):
    """Does one step alone read this value, which nothing shows?"""
    graph = plan.graph
    shown = shown_nodes(graph) | set(plan.inplace)
    count: dict = {}
    for s in plan.steps:
        for r in {r for n in (s.nodes() if isinstance(s, Group) else (s,)) for r in reads(n)}:
            count[r] = count.get(r, 0) + 1
    return lambda n: n not in shown and count.get(n) == 1


_FORMS = {aten.mm.default: (None, 0, 1), aten.bmm.default: (None, 0, 1), aten.addmm.default: (0, 1, 2)}


def _products(plan) -> dict[Opaque, Product]:
    """The calls of torch that are products which we can make."""
    own, made = {x[0]: call for call, x in ACTIVATED_ON_CPU.items()}, {}
    for n in plan.graph.nodes:
        if isinstance(n, Result):
            made.setdefault(n.opaque, []).append(n)
    found = {s: _product(s, made.get(s, []), own) for s in plan.steps if isinstance(s, Opaque)}
    return {s: p for s, p in found.items() if p is not None}


def _product(step: Opaque, made: list[Result], own: dict) -> Product | None:
    """A call of torch, whose results are `made`, as a product: f32, its left factor contiguous along the depth, its results without gaps. `own`: what
    torch calls with a ReLU behind -> the call without."""
    if len(step.results) != 1:
        return None
    form = _FORMS.get(own.get(step.target, step.target))
    if form is None or step.kwargs or len(made) != 1 or len(step.args) != 2 + (form[0] is not None):
        return None
    bias, left, right = (step.args[i] if i is not None else None for i in form)
    views = [v for v in (bias, left, right) if v is not None]
    result, (depth, columns) = made[0], right.shape[-2:]
    plain = all(isinstance(v, View) and v.node.dtype is F32 for v in views) and result.dtype is F32 and result.strides == row_major(result.shape)
    if not plain or depth.constant is None or columns.constant is None or depth.constant < 1 or columns.constant < 1:
        return None
    if left.strides[-1] != 1 and depth != 1 or bias is not None and (bias.shape != (columns,) or bias.strides != (as_index(1),) and columns != 1):
        return None
    return Product(step, left, right, bias, step.target in own, result)


def _follows(p: Product, value, before: Product) -> bool:
    """Does `p` multiply all of `value`, which lies as the result of `before` does, from the left, and nothing of it from the right?"""
    same = all(a is b or e == 1 for a, b, e in zip(p.left.strides, before.result.strides, p.left.shape))
    whole = p.left.offset == 0 and p.left.shape == before.result.shape and same
    others = [v.node for v in (p.right, p.bias) if v is not None]
    return p.left.node is value and whole and before.result not in others and value not in others


def _between(lowered, group: Group, before: Product) -> Between | None:
    """A kernel that makes one value, as large as the result before it, row by row of that."""
    stores, (body, _), kernel = lowered.plan.stores[group], lowered.bodies[group], lowered.kernels[group]
    simple = len(stores) == 1 and len(body.stores) == 1 and body.base is None and not kernel.errors and len(kernel.phases) == 1
    if not simple or kernel.phases[0].partials or body.stores[0].monoid is not None or body.stores[0].guard is not None or len(kernel.params) > WORDS:
        return None
    axes = _rows_of(body, before)
    if axes is None or stores[0].dtype is not F32 or body.stores[0].memory.node is not stores[0]:
        return None
    outer, inner, within, unit = axes
    words = _words(body, kernel, (*outer, inner), unit, before.result, stores[0])
    return Between(group, kernel, tuple(a.extent for a in outer), within, unit, words) if words is not None else None


def _rows_of(body: Body, before: Product) -> tuple[tuple[Axis, ...], Axis, Index, int] | None:
    """(axes that count batches, outermost first, the axis of rows, the batches and the steps of a row that this runs through, too) of a store without
    gaps: None where its axes are others."""
    store, columns = body.stores[0], before.result.shape[-1].constant
    rows, batch = before.result.shape[-2], before.batch()
    left, expected, above = sorted(store.axes, key=lambda a: abs(store.address.coefficient(a).constant or 1 << 62)), as_index(1), []
    while left:
        a = next((x for x in left if store.address.coefficient(x) is expected), None)
        if a is None:
            return None
        left.remove(a)
        end = expected * a.extent
        if above or expected.constant is None or end.constant is None or end.constant > columns:
            above.append((a, expected))
        expected = end
    if not above or expected is not rows * batch * columns or not {a for a, _ in above} <= body.parallel:
        return None
    (inner, step), outer = above[0], tuple(a for a, _ in reversed(above[1:]))
    if step.constant is None or columns % step.constant or len(outer) > OUTER:
        return None
    unit, counted = columns // step.constant, prod((a.extent for a in outer), start=as_index(1))
    both = inner.extent.constant is not None and rows.constant is not None
    within = batch if not outer else as_index(max(inner.extent.constant // (rows.constant * unit), 1) if both else 1)
    whole = inner.extent is rows * within * unit and counted * within is batch
    return (outer, inner, within, unit) if whole else None


def _words(body: Body, kernel: Kernel, axes: tuple[Axis, ...], unit: int, read, made) -> tuple | None:
    """What each parameter of the kernel is of a block of rows; None where something depends on rows in another way than by its address."""
    moves: dict = {}
    for access, address, size in strides_of(body):
        memory = access.memory if not isinstance(access, Load) else access.node
        distance = _moves(address, axes, size, unit)
        if distance is None or moves.setdefault(memory.node, distance) != distance:
            return None
    for e in walk(*exprs_of(body)):
        if isinstance(e, (Coord, Random)) and set(axes) & e.index.axes():
            return None
    if moves.get(read) != moves.get(made):
        return None
    extents, phase = {}, kernel.phases[0]
    for a, extent in (*phase.parallel, *(((phase.vector, phase.extent),) if phase.block else ())):
        sizes = extent.atoms()
        if a in axes and len(sizes) == 1 and isinstance(sizes[0], Size):
            extents[sizes[0].name] = "rows" if a is axes[-1] else "one"
    if len(extents) != len(axes):
        return None
    of = lambda p: {read: "read", made: "made"}.get(p.source.node, moves.get(p.source.node)) if p.kind == "memory" else extents.get(p.name, "plain")
    words = tuple(map(of, kernel.params))
    return words if None not in words and not any(p.kind == "order" for p in kernel.params) else None


def _moves(address: Index, axes: tuple[Axis, ...], size: int, unit: int) -> tuple[Index, ...] | None:
    """(bytes a row, bytes a step of each outer axis) by which `address` moves on; None where that is not the same everywhere."""
    steps = [address.coefficient(a) for a in axes]
    rest = address
    for a, s in zip(axes, steps):
        rest = rest - s * a
    if set(axes) & rest.axes() or any(s.axes() for s in steps):
        return None
    return (steps[-1] * size * unit, *(s * size for s in steps[:-1]))


def _worth(steps: list, hints: Hints, target) -> Run | None:
    """The run of `steps`, where it saves more time than it costs."""
    products = [s for s in steps if isinstance(s, Product)]
    if len(products) < 2:
        return None
    widest = max(p.result.shape[-1].constant for p in products[:-1])
    total = hints(products[0].result.shape[-2]) * hints(products[0].batch())
    elements = total * sum(_width(steps, s) for s in steps[:-1])
    packed = [-(-p.right.shape[-1].constant // 32) * 32 * (p.right.shape[-2].constant + 1) for p in products]
    times = [hints(p.batch()) / target.threads if len(p.right.shape) == 3 else 1 for p in products]
    near = NEAR if elements * 4 <= target.l2 else 1
    saved, lost = elements * TRAFFIC / COPY / target.threads / near, sum(n * t for n, t in zip(packed, times)) * PACKED
    rows = min(target.l2 // 2 // (2 * widest * 4), -(-total // (4 * target.threads))) // 12 * 12
    if rows < 12 or saved <= MARGIN * lost or sum(packed) * 4 > CACHES * target.l2:
        return None
    return Run(tuple(steps), rows, (rows * widest + 31) // 16 * 16)


def _width(steps: list, s: Product | Between) -> int:
    """Columns of what `s` makes: a kernel's are those of the product before it."""
    return (s if isinstance(s, Product) else steps[steps.index(s) - 1]).result.shape[-1].constant


def words(run: Run, names: dict, text) -> tuple[tuple[str, str], ...]:
    """What the function of `c_rows` is handed for `run`; `names`: of nodes, `text`: of an Index. A kernel's function is ('kernel', its group)."""
    number = lambda *values: [("int", text(as_index(v))) for v in values]
    first, made = run.steps[0], [*number(len(run.steps))]
    made += number(first.batch(), first.result.shape[-2], run.rows, run.floats)
    buffer = 0                      # in which the next step reads
    for at, s in enumerate(run.steps):
        into = 1 - buffer if at else 0
        if isinstance(s, Product):
            made += _product_words(s, buffer if at else -1, into if s is not run.steps[-1] else -1, names, text)
        else:
            made += _kernel_words(s, {"read": buffer, "made": into}, names, text)
        buffer = into
    return tuple(made)


def _product_words(p: Product, buffer: int, into: int, names: dict, text) -> list[tuple[str, str]]:
    number = lambda *values: [("int", text(as_index(v))) for v in values]
    place = lambda v: [("addresses", f"{{{names[v.node]}}} + {4}*({text(v.offset)})")] if v is not None else number(0)
    batched = lambda v: v.strides[0] if len(v.shape) == 3 else 0
    rows, columns = p.result.shape[-2:]
    result = View(p.result, p.result.shape, p.result.strides, as_index(0)) if into < 0 else None
    left = [*place(p.left), *number(p.left.strides[-2], batched(p.left))] if buffer < 0 else number(0, columns_of(p), 0)
    made = [*number(0, columns, p.right.shape[-2], buffer), *left]
    made += [*place(p.right), *number(*p.right.strides[-2:], batched(p.right)), *place(p.bias), *number(into)]
    return [*made, *place(result), *number(columns, rows * columns, p.relu)]


def columns_of(p: Product) -> Index:
    """Of the left factor."""
    return p.left.shape[-1]


def _kernel_words(s: Between, buffers: dict[str, int], names: dict, text) -> list[tuple[str, str]]:
    number = lambda *values: [("int", text(as_index(v))) for v in values]
    made = [*number(1), ("kernel", s.group), *number(len(s.words), len(s.outer), *s.outer, s.within, s.unit)]
    nothing = number(*(0 for _ in range(1 + len(s.outer))))
    for p, word in zip(s.kernel.params, s.words):
        if word in buffers:
            made += [*number(4, buffers[word]), *nothing]
        elif word in ("one", "rows"):
            made += [*number(2 if word == "one" else 3, 0), *nothing]
        elif word == "plain":
            made += [*number(0), ("param", p), *nothing]
        else:
            made += [*number(1), ("ptr", names[p.source.node]), *number(*word)]
    return made
