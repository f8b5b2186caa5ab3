"""Which gradients of weights, sums over very many rows, become kernels: those whose factors a kernel of narrow layers has anyway (`narrow`), and
those that make the gradient of the bias of the same read."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ir.expr import Cast, Load, Reduce, loads
from ..ir.graph import Compute, Graph, Opaque
from .axes import fold_of
from .contraction import LITTLE, NARROW, PITCH, Contraction
from .cost import Hints
from .narrow import CARRIED, fill_two
from .reason import Reason


@dataclass(frozen=True)
class Gradients:
    """Of a machine; pairs are (bytes a second, seconds besides). `vendor`: products of few rows and columns and a depth of very many; `sums`: of the
    columns of one factor, in kernels of their own; `ours`: the product, the sums with it."""
    vendor: tuple[float, float]
    sums: tuple[float, float]
    ours: tuple[float, float]


# Triton's words for a machine -> its rates. H200, bf16, us: 64 by 262144 by 64: the vendor 28 with what adds up its partial results, the bias' sum
# 15; in one kernel 26 and 3 behind it. 128 by 131072 by 256: 45, 15 (of 128) and 22 (of 256); 38 and 4
GRADIENTS: dict[tuple, Gradients] = {("cuda", 90): Gradients(vendor=(3.0e12, 6e-6), sums=(3.1e12, 4e-6), ours=(2.7e12, 4e-6))}
WIDEST = 256            # rows and columns at most
ROWS = 65536            # of the depth at least: below, nothing was measured
LEAST = 0.93            # of the vendor's time, as in `price`
HIDDEN = 64             # widest layers whose gradients a program makes with the values between them, too: a step of 262144 rows of 64, 64 and 64, a
                        # ReLU between, 71 us, 95 with them kept, a SiLU 73, 125 (H100)


def made_again(rows: int, inner: int, hidden: int, columns: int, needed: int) -> bool:
    """Of two narrow layers, does the kernel of their gradients make the values between them again, so that forward need not keep them? Where rows are
    no whole words the vendor makes these. `needed`: how many values of the hidden columns these gradients are made of."""
    extents = inner, hidden, columns
    one = all(LITTLE < n <= HIDDEN for n in extents)
    return rows >= ROWS and all(n % PITCH == 0 for n in extents) and (one or needed == 1 and fill_two(hidden, inner, columns))


def gradients(rates: Gradients, graph: Graph, found: dict[Opaque, Contraction], pairs: Mapping[Opaque, tuple], taken: Mapping,
              hints: Hints) -> dict[Opaque, Reason | None]:
    """None for each gradient of weights that is better a kernel, or why it is not. `pairs`: layers back to back, the second -> (the first, ...);
    `taken`: contractions -> None where they become kernels."""
    long = {n: c for n, c in found.items() if _long(c, hints)}
    sums = [x for n in graph.nodes if isinstance(n, Compute) and (x := _summed(n)) is not None]
    made = {n: _alone(rates, c, sums, hints) for n, c in long.items()}
    for last, (first, *_) in pairs.items():
        if taken.get(last, last) is None:
            beside = [n for n, c in long.items() if _reads(c) & (_reads(found[last]) | _reads(found[first]))]
            narrow = [found[n] for n in beside if max(found[n].sizes(hints)[1:3]) <= NARROW]
            if len(narrow) == len(beside) and sum(m * n for _, m, n, _ in (c.sizes(hints) for c in narrow)) <= CARRIED:
                made.update(dict.fromkeys(beside))
    return made


def in_halves(found: dict[Opaque, Contraction], first: Opaque, last: Opaque, made: Mapping[Opaque, Reason | None], hints: Hints) -> bool:
    """Is what lies between two layers, `first` and `last`, made by the kernel of gradients, of which each of two programs has half?"""
    (*_, hidden, inner), (*_, columns, _) = found[first].sizes(hints), found[last].sizes(hints)
    between = {e.node for e in loads(found[last].left)}
    return fill_two(hidden, inner, columns) and any(why is None and between & _reads(found[n]) for n, why in made.items())


def _long(c: Contraction, hints: Hints) -> bool:
    b, m, n, k = c.sizes(hints)
    return b == 1 and LITTLE < min(m, n) and max(m, n) <= WIDEST and k >= ROWS and len(c.rows) == len(c.columns) == len(c.fold.over) == 1


def _alone(rates: Gradients, c: Contraction, sums: list, hints: Hints) -> Reason | None:
    """The vendor's product, and the sums of its factors' columns in kernels of their own, against one kernel of ours."""
    _, m, n, k = c.sizes(hints)
    beside = sum(2 * k * side / rates.sums[0] + rates.sums[1] for e, side in ((c.left, m), (c.right, n)) if any(x.node in sums for x in loads(e)))
    vendor = 2 * k * (m + n) / rates.vendor[0] + rates.vendor[1]
    ours = 2 * k * (m + n) / rates.ours[0] + rates.ours[1]
    prices = f"{1e6 * ours:.0f} us in one kernel, the vendor {1e6 * vendor:.0f} us and {1e6 * beside:.0f} us for sums of the same factors"
    return None if ours < LEAST * (vendor + beside) else Reason("vendor", "unprofitable", prices)


def _summed(n: Compute):
    """The node whose elements `n` adds up along its first dimension, as they are; or None."""
    fold = fold_of(n.expr)
    if not isinstance(fold, Reduce) or fold.monoid != "sum" or len(fold.over) != 1:
        return None
    read = fold.args[0].arg if isinstance(fold.args[0], Cast) else fold.args[0]
    along = isinstance(read, Load) and read.guard is None and read.index and fold.over[0] in read.index[0].axes()      # a single number has no index
    return read.node if along else None


def _reads(c: Contraction) -> set:
    return {e.node for x in (c.left, c.right) for e in loads(x)}
