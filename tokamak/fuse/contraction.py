"""Contractions: sums of products over a common axis, Reduce(sum, k, a[m, k] * b[k, n]), and which nodes may share a kernel with one on a GPU."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.dtype import F32, DType
from ..ir.expr import Cast, Expr, Load, Op, Reduce, Scan, walk
from ..ir.graph import Graph, Opaque, Scatter
from ..ir.index import Axis
from .axes import Group, Member, as_one, fold_of
from .cost import Hints
from .legal import Roles
from .scales import unpacking
from .sizes import runs_along

NARROW = 128            # widest of two layers that are made back to back
WIDE = 128              # the same of what is held beside weighted means
TURNED = 64             # rows up to which a result is turned: below, the machine's products would be made of idle rows
LITTLE = 32             # rows up to which a kernel reads its weights as fast as memory gives them
SIDE = 16               # least extent of a tile that the machine multiplies
PITCH = 8               # elements of 16 bits, 16 bytes: where every row of a matrix begins that the vendor's fast kernels and the copy engine move
ONES = 16               # columns of ones, by which a tile is multiplied where its rows are added up
SLICE = 512             # elements at most of a slice of the depth, all of which is in a step
DIGIT = 8               # largest extent of a summed axis that is written out, coordinate by coordinate


@dataclass(frozen=True, eq=False)
class Contraction:
    """`fold`: sum over `depth` of left * right, times `scales` that do not differ along it, over `digits`, axes of small constant extents, and
    `outer`, axes that are run through around the depth. `rows`: the axes of `left` alone, `columns` of `right` alone, `batch` of both; by their
    ids. With `exponents` the mean of right, weighted by their exponentials: these, in the type in which they are multiplied, are `left` up to a
    factor that is the same along the depth."""
    fold: Reduce
    left: Expr
    right: Expr
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    depth: Axis
    digits: tuple[Axis, ...] = ()
    outer: tuple[Axis, ...] = ()
    scales: tuple[Expr, ...] = ()
    exponents: Expr | None = None

    def sizes(self, hints: Hints) -> tuple[int, int, int, int]:
        """Extents (batch, rows, columns, depth), as numbers."""
        return tuple(hints.count(a) for a in (self.batch, self.rows, self.columns, self.fold.over))


def contraction(e: Expr) -> Contraction | None:
    """The contraction that `e` is: a sum of a product of two values that both depend on what is summed over last, and of some that do not; or a
    weighted mean."""
    if isinstance(e, Reduce) and e.monoid == "expmean" and e.component == 1:
        return _mean(e)
    if not isinstance(e, Reduce) or e.monoid != "sum" or not isinstance(e.args[0], Op) or e.args[0].name != "mul":
        return None
    factors = factors_of(e.args[0])
    extent = lambda a: a.extent.constant if a.extent.constant is not None else 1 << 62
    depth = ([a for a in e.over if extent(a) > DIGIT] or [max(e.over, key=extent)])[-1]
    sides, scales = [x for x in factors if depth in x.free], tuple(x for x in factors if depth not in x.free)
    before, scaled = e.over[:e.over.index(depth)], {a for x in scales for a in x.free}
    outer = [a for a in before if len(before) == 1 or a in scaled or extent(a) > DIGIT]
    digits = tuple(a for a in e.over if a is not depth and a not in outer)
    if len(sides) != 2 or len(outer) > 1 or any(extent(a) > DIGIT or a in scaled for a in digits):
        return None
    left, right = sides
    if any(x.free - set(e.over) - left.free - right.free for x in scales):
        return None
    return Contraction(e, left, right, *_axes(e, left, right), depth, digits, tuple(outer), scales)


def _mean(e: Reduce) -> Contraction | None:
    """The weighted mean `e`, where its values are of a type that is multiplied and both depend on the one axis."""
    (x, right), kind = e.args, halves(e.args[1])
    if kind is None or len(e.over) != 1 or not x.free & right.free >= set(e.over):
        return None
    left = Cast(F32, Cast(kind, Op("exp", x)))
    return Contraction(e, left, right, *_axes(e, left, right), e.over[0], exponents=x)


def _axes(e: Reduce, left: Expr, right: Expr) -> tuple[tuple[Axis, ...], ...]:
    """The axes of both factors, of the left one alone and of the right one alone, but for those that are folded."""
    pick = lambda axes: tuple(sorted(axes - set(e.over), key=lambda a: a.id))
    return pick(left.free & right.free), pick(left.free - right.free), pick(right.free - left.free)


def factors_of(e: Expr) -> list[Expr]:
    """What is multiplied in a product of products, in order."""
    return [x for a in e.args for x in factors_of(a)] if isinstance(e, Op) and e.name == "mul" else [e]


def halves(e: Expr) -> DType | None:
    """The 16-bit type that a factor is rounded to and multiplied in; None where it is of another."""
    return e.arg.dtype if isinstance(e, Cast) and e.dtype is F32 and e.arg.dtype.is_half else None


def in_tf32(e: Expr) -> Expr | None:
    """What a factor in TF32 is rounded from; None where it is of another type."""
    return e.args[0] if isinstance(e, Op) and e.name == "tf32" and e.dtype is F32 else None


def small(e: Expr) -> Expr | None:
    """The integers of 8 bits, or unpacked from such, that a factor is, which every 16-bit type holds exactly; or None."""
    whole = e.arg if isinstance(e, Cast) and e.dtype is F32 and e.arg.dtype.is_int else None
    return whole if whole is not None and (whole.dtype.bytes == 1 or whole.dtype.bytes == 2 and unpacking(whole) is not None) else None


def product_type(c: Contraction) -> DType | None:
    """The type in which both factors can be multiplied: one of 16 bits, or f32 where they are rounded to TF32; or None."""
    found = {F32 if in_tf32(e) is not None else halves(e) for e in (c.left, c.right) if small(e) is None}
    return next(iter(found)) if len(found) == 1 else None


def multiplied(c: Contraction) -> bool:
    """Can the machine's products of tiles make it: two factors of one such type, with axes of their own?"""
    return product_type(c) is not None and bool(c.rows) and bool(c.columns)


def of_vector(c: Contraction) -> bool:
    """Is it the product of a matrix and a vector of one 16-bit type, or of f32 where TF32 would do?"""
    return product_type(c) is not None and bool(c.rows) != bool(c.columns) and not c.batch


def of_one_row(c: Contraction) -> bool:
    """Is it a product of matrices and vectors, one of each for a coordinate that both factors have?"""
    return product_type(c) is not None and not c.rows and bool(c.columns)


def few_in_tf32(c: Contraction, hints: Hints) -> bool:
    """Is it a product in TF32 of so few rows that it is made by addresses, both factors as they lie along the depth in memory?"""
    reads = [in_tf32(e) for e in (c.left, c.right)]
    along = all(isinstance(e, Load) and e.guard is None and runs_along(e, c.depth) for e in reads)
    return along and not (c.batch or c.digits or c.outer or c.scales) and min(c.sizes(hints)[1:3]) <= TURNED


def chained(c: Contraction, inner: Contraction | None) -> bool:
    """Can `inner`, in the left factor of `c`, be made within a step of it: its columns are the depth of `c`, and a program can hold its depth and the
    columns of `c`?"""
    if inner is None or not multiplied(inner) and (c.exponents is None or not of_one_row(inner)):
        return False
    if inner.digits or c.digits or inner.batch != c.batch or inner.fold.free - c.fold.free != {c.depth}:
        return False
    held, most = [inner.depth, *c.columns], NARROW if c.exponents is None else WIDE
    rows = set(inner.fold.free) - {c.depth} == {*c.rows, *c.batch}
    return (not c.batch or c.exponents is not None) and len(c.columns) == 1 and rows and all((a.extent.constant or most + 1) <= most for a in held)


def size_text(c: Contraction, hints: Hints) -> str:
    """Extents and type for people: 16x4096x4096 bf16, rows by depth by columns."""
    b, m, n, k = c.sizes(hints)
    return f"{f'{b} of ' if b > 1 else ''}{m}x{k}x{n} {product_type(c) or c.left.dtype}"


def contractions(graph: Graph) -> dict[Opaque, Contraction]:
    """The calls of torch that are contractions."""
    return {n: c for n in graph.nodes if isinstance(n, Opaque) and n.meaning is not None and (c := within(n.meaning)) is not None}


def within(meaning: Expr) -> Contraction | None:
    """The one contraction in a call's meaning."""
    folds = [e for e in walk(meaning) if isinstance(e, Reduce)]
    return contraction(folds[0]) if len(folds) == 1 else None


def summed(e: Expr, c: Contraction) -> bool:
    """Is `e` the sum of one of the factors of `c` along its depth, as the gradient of a bias is beside that of the weights?"""
    plain = not (c.batch or c.digits or c.scales)
    return plain and isinstance(e, Reduce) and e.monoid == "sum" and e.over == c.fold.over and e.args[0] in (c.left, c.right)


# -- which groups ----------------------------------------------------------------------------------------------------------
def held(group: Group) -> list[Contraction]:
    """The contractions among the members of a group."""
    found = [c for m in group.members if isinstance(f := fold_of(m.expr), Reduce) and (c := contraction(f)) is not None]
    means = any(c.exponents is not None for c in found)
    return [c for c in found if multiplied(c) or means and of_one_row(c)]


def shared_roles(group: Group, found: list[Contraction], hints: Hints) -> Roles | None:
    """The roles in a group of contractions and of what is computed pointwise from their results, in parallel over all coordinates of these; None for
    a group that holds anything else. One may stand in front of another, see `chained`; beside a single one there may be sums of its factors, and
    what is computed pointwise from these."""
    outer = [c for c in found if c.exponents is not None or not any(c.fold.free - x.fold.free == {x.depth} for x in found)]
    inner = [c for c in found if c not in outer]
    if not outer or len(inner) > 1 or inner and (len(outer) > 1 or not chained(outer[0], inner[0])):
        return None
    first, places = outer[0], {outer[0].fold.free, *(c.fold.free for c in inner)}
    together = all((c.fold.free, c.fold.over, c.rows, c.columns) == (first.fold.free, first.fold.over, first.rows, first.columns) for c in outer)
    sums = _sums_beside(group, first) if len(found) == 1 else []
    folds = sum(isinstance(e, (Reduce, Scan)) for m in group.members for e in walk(*m.roots()))
    apart = sum(isinstance(e, (Reduce, Scan)) for m in sums for e in walk(*m.roots()))
    rest = [m for m in group.members if m not in sums]
    if not together or folds != len(found) + apart or any(m.free not in places or isinstance(m.node, Scatter) for m in rest):
        return None
    if not all(_in_step(group, first, frozenset(axes), hints) for axes in (first.rows, first.columns)):
        return None
    made = {m.node for m in sums}
    if any(e.node in made for m in rest for e in m.loads):
        return None
    return Roles(first.fold.free, group.members, (), ())


def _in_step(group: Group, c: Contraction, axes: frozenset[Axis], hints: Hints) -> bool:
    """Do all members of a group go in step through many rows or columns that are several axes, where the contraction itself does? The kernel of one
    axis is the fast one."""
    if len(axes) < 2 or min(hints.count(c.rows), hints.count(c.columns)) <= TURNED:
        return True
    return as_one(group.members, axes) or not as_one([m for m in group.members if fold_of(m.expr) is c.fold], axes)


def _sums_beside(group: Group, c: Contraction) -> list[Member]:
    """The members of a group that are sums of a factor of `c`, see `summed`, or computed pointwise from such sums alone."""
    found: dict = {}
    for m in group.members:
        places = [found[e.node].free for e in m.loads if e.node in found]
        alone = fold_of(m.expr) is None and places and all(x == m.free for x in places) and not isinstance(m.node, Scatter)
        if summed(fold_of(m.expr), c) or alone and not any(isinstance(e, (Reduce, Scan)) for e in walk(*m.roots())):
            found[m.node] = m
    return list(found.values())
