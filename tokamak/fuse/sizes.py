"""Size classes: the sizes for which one set of kernels is made, on a GPU.

    SizeClass ::= low <= n <= high, n a multiple of `multiple` and not of `other`

A symbolic graph is planned and scheduled for the class that the sizes at hand are in, by nothing else of them, so that every size of the class gets
the same kernels: right for all of them (what is held in registers covers `high`), and near what a static size gets. The host looks at each call
which class its sizes are in. Classes are finer the more a kernel depends on a size:

    contiguous rows are folded along it       eighths of an octave, each of their ends alone (no mask), and what is less than a word behind one (4097
                                              is 4096 and one beside whole words); what of 16, 8 and 4 divides it
    neighbours in memory are counted by it    an octave, quarters of one where it is short; what of 16, 8 and 4 divides it
    anything else is folded along it          an octave; what of 64 and 16 divides it
    any other                                 an octave
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.graph import Compute, Graph, Input, Scatter
from ..ir.index import Axis, FloorDiv, Index, Max, Min, Mod, Size, as_index
from ..ir.substitution import evaluate

FINE = 1024             # rows from here on come in eighths of an octave: 1025 as 1024 + 128 lanes idles one in nine
QUARTERS = 256          # in quarters; shorter ones in octaves
LONGEST = 1 << 15       # rows beyond are seldom held: octaves
LARGEST = 1 << 22       # all sizes beyond are one class: no choice looks at more
SMALL = 16              # tensors of so many times fewer elements than the largest are read and written however it comes
WORD = 8                # elements of 16 bytes of a 16-bit type: bf16 LayerNorm over 4097 columns as one of 4097 to 4607 0.87 of what it reaches alone
TILES = (64, 16)        # what a number of rows may be a multiple of: a tile's, which then needs no mask (sums of columns: 89% of the limit, 63 with
                        # one)
WORDS = (16, 8, 4)      # what a row's length may be a multiple of: Triton's word for aligned integers, 16 bytes of 16-bit types, of f32


@dataclass(frozen=True)
class SizeClass:
    """`high` None: without end. `other` 0: none."""
    low: int
    high: int | None
    multiple: int = 1
    other: int = 0

    def __contains__(self, n: int) -> bool:
        return self.low <= n and (self.high is None or n <= self.high) and n % self.multiple == 0 and not (self.other and n % self.other == 0)

    @property
    def like(self) -> int:
        """The size that estimates are made with."""
        return self.high if self.high is not None else 2 * self.low

    def text(self, name: str) -> str:
        """Python text of the condition on `name`."""
        if self.low == self.high:
            return f"{name} == {self.low}"
        parts = [f"{self.low} <= {name}" + (f" <= {self.high}" if self.high is not None else "")]
        parts += [f"not {name} % {self.multiple}"] if self.multiple > 1 else []
        return " and ".join([*parts, *([f"{name} % {self.other}"] if self.other else [])])


def octave(n: int) -> SizeClass:
    """The class of `n` among powers of two: (512, 1024]; 0 and 1 are one."""
    if n > LARGEST:
        return SizeClass(LARGEST + 1, None)
    high = 1 << max(n - 1, 0).bit_length()
    return SizeClass(high // 2 + 1 if high > 1 else 0, high)


def row(n: int) -> SizeClass:
    """The class of `n` as a row's length: a part of its octave, without its end, which is a class alone."""
    whole = octave(n)
    if n > LARGEST:
        return whole
    step = max(whole.like // (16 if FINE < n <= LONGEST else 8 if QUARTERS < n <= LONGEST else 2), 1)
    end = -(-n // step) * step if n else 0
    if n == end:
        return SizeClass(n, n)
    behind = end - step + WORD if QUARTERS < n <= LONGEST and step > 2 * WORD else 0
    return SizeClass(end - step + 1, behind - 1) if n < behind else SizeClass(max(end - step + 1, whole.low, behind), end - 1)


def column(n: int) -> SizeClass:
    """The class of `n` as a number of neighbours in memory: how many fill a line of memory counts."""
    whole = octave(n)
    if not 4 < n <= QUARTERS:
        return whole
    step = whole.like // 8
    end = -(-n // step) * step
    return SizeClass(end - step + 1, end)


def aligned(c: SizeClass, n: int, words: tuple[int, ...]) -> SizeClass:
    """`c` with the first of `words` (descending) that divides `n`, and not the one before it; where none does, not the last."""
    if c.low == c.high:
        return c
    before = 0
    for w in words:
        if n % w == 0:
            return replace(c, multiple=w, other=before)
        before = w
    return replace(c, other=before)


# -- the classes of a graph ----------------------------------------------------------------------------------------------
def classified(graph: Graph, target) -> Graph:
    """`graph` with the class of every size that is one of its inputs, at its hints. A target whose folds have a fixed order has no classes."""
    if target.kind != "gpu" or target.ordered or not graph.hints:
        return graph
    given = {i for i in graph.inputs if not isinstance(i, Input)}
    rows, folded, inner = _roles(graph)
    found: dict[str, SizeClass] = {}
    for name, n in graph.hints.items():
        if graph.sizes.get(name) in given:
            c = row(n) if name in rows else column(n) if name in inner else octave(n)
            found[name] = aligned(c, n, WORDS) if name in inner | rows else aligned(c, n, TILES) if name in folded else c
    return replace(graph, classes=found)


def condition(graph: Graph) -> str:
    """Python text over the names of the graph's inputs: are these sizes in its classes? Empty where there are none."""
    return " and ".join(c.text(graph.sizes[name]) for name, c in graph.classes.items())


def _roles(graph: Graph) -> tuple[set[str], set[str], set[str]]:
    """Names of the sizes (that contiguous rows are folded along, that anything is, that large tensors' neighbours in memory are counted by)."""
    rows, folded, inner = set(), set(), set()
    traced = {node: elements(node, graph.hints) for node in graph.nodes if hasattr(node, "shape")}
    most = max(traced.values(), default=0)
    large = {node for node, n in traced.items() if n * SMALL >= most}
    for node in large:
        for n, s in zip(node.shape, node.strides):
            inner |= _names(s) | (_names(n) if s == 1 else set())
    for node in graph.nodes:
        roots = (node.expr,) if isinstance(node, Compute) else (node.value,) if isinstance(node, Scatter) else ()
        for e in walk(*roots):
            axes = e.over if isinstance(e, Reduce) else (e.along,) if isinstance(e, Scan) else ()
            for a in axes:
                folded |= _names(a.extent)
                if isinstance(e, Scan) or any(runs_along(x, a) for x in walk(*e.args) if isinstance(x, Load) and x.node in large):
                    rows |= _names(a.extent)
    return rows, folded, inner


def runs_along(e: Load, a: Axis) -> bool:
    """Are neighbours along axis `a` neighbours in memory?"""
    step = as_index(0)
    for i, s in zip(e.index, e.node.strides):
        step = step + i.coefficient(a) * s
    return step == 1


def elements(node, hints: dict[str, int]) -> int:
    """How many elements a tensor has at `hints`."""
    return math.prod(value(n, hints) for n in node.shape)


def value(i: Index, sizes: dict[str, int]) -> int:
    """An extent, at `sizes`; 64 for a size that is not among them."""
    c = i.constant
    return c if c is not None else max(int(evaluate(i, {a: sizes.get(a.name, 64) for a in sizes_of(i)})), 0)


def _names(i: Index) -> set[str]:
    return {s.name for s in sizes_of(i)}


def sizes_of(i: Index) -> set:
    """The sizes in `i`, nested ones too."""
    found: set = set()
    for a in i.atoms():
        if isinstance(a, Size):
            found.add(a)
        elif hasattr(a, "a"):
            found |= sizes_of(a.a) | sizes_of(a.b)
    return found


# -- what holds for all sizes of a class -----------------------------------------------------------------------------------
def span(i: Index, classes: dict[str, SizeClass]) -> tuple[int, int | None]:
    """(least, most) of an extent, which is never negative, for all sizes of `classes`; None: no end is known."""
    low, high = _span(i, classes)
    return max(low or 0, 0), None if high is None else max(high, 0)


def _span(i: Index, classes: dict[str, SizeClass]) -> tuple[int | None, int | None]:
    """The same of any index over sizes."""
    low, high = 0, 0
    for atoms, factor in i.terms.items():
        lo, hi = 1, 1
        for a in atoms:
            x, y = _atom_span(a, classes)
            if x is None or x < 0:          # a product's ends are those of its factors where no factor is negative
                return None, None
            lo, hi = lo * x, None if hi is None or y is None else hi * y
        ends = (lo, hi) if factor > 0 else (hi, lo)
        low, high = (None if total is None or end is None else total + factor * end for total, end in zip((low, high), ends))
    return low, high


def _atom_span(a, classes: dict[str, SizeClass]) -> tuple[int | None, int | None]:
    if isinstance(a, Size):
        c = classes.get(a.name)
        return (c.low, c.high) if c is not None else (a.lower, None)
    if not isinstance(a, (FloorDiv, Mod, Min, Max)):
        return None, None
    (alo, ahi), (blo, bhi) = _span(a.a, classes), _span(a.b, classes)
    both = alo is not None and blo is not None
    if isinstance(a, Min):
        return min(alo, blo) if both else None, min((x for x in (ahi, bhi) if x is not None), default=None)
    if isinstance(a, Max):
        return max(alo, blo) if both else None, None if ahi is None or bhi is None else max(ahi, bhi)
    if not both or alo < 0 or blo <= 0:
        return None, None
    if isinstance(a, FloorDiv):
        return 0 if bhi is None else alo // bhi, None if ahi is None else ahi // blo
    return 0, None if bhi is None else bhi - 1


def divisor(i: Index, classes: dict[str, SizeClass]) -> int:
    """A number that divides `i` for all sizes of `classes`; 0 where `i` is always 0."""
    return math.gcd(*(factor * math.prod(_atom_divisor(a, classes) for a in atoms) for atoms, factor in i.terms.items()))


def _atom_divisor(a, classes: dict[str, SizeClass]) -> int:
    if isinstance(a, FloorDiv) and a.b.constant:
        whole = divisor(a.a, classes)
        return whole // a.b.constant if whole % a.b.constant == 0 else 1
    c = classes.get(a.name) if isinstance(a, Size) else None
    if c is None:
        return 1
    return c.low if c.low == c.high else c.multiple
