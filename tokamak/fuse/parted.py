"""What lies between two narrow layers, and both the gradient of the rows and those of the weights need, is made twice where no program has room for
all of them: by the kernel of the rows, which need not store it, and by that of the weights, two of whose programs have half of it each
(`narrow.halved`).

    d = f(g v), x' = d w, w' = d x, v' = g h    becomes    x' = f(g v) w    and    d = f(g v), w' = d x, v' = g h

The weights lie in a program's shared memory anyway, and a product more takes less than to write and to read what it makes. 131072 rows, 128 to 256 to
128 with a ReLU, bf16, H200: 67.6 and 71.1 us; 83.3 for the rows with it stored, 33.3 and 31.4 for the two gradients of weights.
"""
from __future__ import annotations

from dataclasses import replace

from ..ir.expr import Expr, Load, Reduce, Rewriter, loads
from ..ir.graph import Compute, Graph, is_pointwise, readers_of, shown_nodes
from ..ir.rewrite import replaced
from . import narrow
from .axes import fold_of

COPY = 2000             # added to a node's tag in its second copy


def parted(graph: Graph, target) -> Graph:
    """`graph` with values between narrow layers made by two kernels each, on a GPU."""
    if target.kind != "gpu" or target.ordered:
        return graph
    readers = readers_of(graph)
    shown = shown_nodes(graph)
    again, copies = {}, {}
    for n in graph.nodes:
        product = _product(n, readers) if isinstance(n, Compute) and n not in shown else None
        sums = _sums(n, readers[n]) if product is not None else []
        if sums and _beside(n, product, readers):
            copies[product] = Compute(product.shape, product.strides, product.expr, product.device, product.tag + COPY)
            copies[n] = Compute(n.shape, n.strides, _reading(n.expr, product, copies[product]), n.device, n.tag + COPY)
            again.update(dict.fromkeys(sums, n))
    if not again:
        return graph
    read_again = lambda m: Compute(m.shape, m.strides, _reading(m.expr, again[m], copies[again[m]]), m.device, m.tag)
    out = replaced(graph, lambda m: read_again(m) if m in again else None)
    return replace(out, origins={**out.origins, **{copy: out.origins[n] for n, copy in copies.items() if n in out.origins}})


def _reading(e: Expr, node: Compute, other: Compute) -> Expr:
    """`e`, which reads `other` in the place of `node`."""
    return Rewriter(leaf=lambda x: Load(other, x.index, x.guard, x.other) if isinstance(x, Load) and x.node is node else None)(e)


def _product(n: Compute, readers: dict) -> Compute | None:
    """The product of rows and weights that `n`, of the wide axis, is pointwise made of, and nothing else reads; or None."""
    if len(n.shape) != 2 or not narrow.fills(n.shape[1], 2) or not is_pointwise(n) or n not in readers:
        return None
    made = list(dict.fromkeys(e.node for e in loads(n.expr) if isinstance(e.node, Compute) and isinstance(fold_of(e.node.expr), Reduce)))
    if len(made) != 1 or made[0].shape != n.shape or readers[made[0]] != [n]:
        return None
    c = narrow.within(fold_of(made[0].expr), frozenset(made[0].axes[:1]))
    return made[0] if c is not None and narrow.fills(c.first.extent, 1) else None


def _sums(n: Compute, readers: list) -> list[Compute]:
    """What is summed over the rows of `n`, by its other readers a product with weights; () where one program carries it, or two of them do not."""
    sums, others = [], []
    for r in readers:
        fold = fold_of(r.expr) if isinstance(r, Compute) else None
        (sums if isinstance(fold, Reduce) and len(fold.over) == 1 and fold.over[0].extent is n.shape[0] else others).append(r)
    products = [c for r in sums if (c := narrow.across(fold_of(r.expr), frozenset(fold_of(r.expr).over))) is not None]
    either_way = lambda c: any(narrow.fills(x.extent, 1) and narrow.fills(y.extent, 2) for x, y in ((c.first, c.second), (c.second, c.first)))
    sizes = [narrow.held(c.first) * narrow.held(c.second) for c in products if either_way(c)]
    read = all(isinstance(x.arg, Load) and x.arg.guard is None for c in products for x in (c.left, c.right))
    fits = read and len(sizes) == len(products) and narrow.CARRIED < sum(sizes) <= 2 * narrow.HALF_CARRIED
    return sums if fits and others and all(_of_rows(r, n) for r in others) else []


def _beside(n: Compute, product: Compute, readers: dict) -> bool:
    """Is there a sum over the rows of products of what `product` and `n` read, such that a kernel of what is summed over the rows of `n` has its
    factors anyway? Alone those are made faster of `n` as it is stored."""
    rows, = {e.node for e in loads(narrow.within(fold_of(product.expr), frozenset(product.axes[:1])).left)}
    beside = {e.node for e in loads(n.expr)} - {product}
    for r in readers[rows]:
        fold = fold_of(r.expr) if isinstance(r, Compute) else None
        c = narrow.across(fold, frozenset(fold.over)) if isinstance(fold, Reduce) else None
        other = {e.node for x in (c.left, c.right) for e in loads(x)} - {rows} if c is not None else set()
        if other and other <= beside:
            return True
    return False


def _of_rows(r: Compute, n: Compute) -> bool:
    """Is `r` a product of the rows of `n` and weights?"""
    fold = fold_of(r.expr) if isinstance(r, Compute) else None
    c = narrow.within(fold, frozenset(r.axes[:1])) if isinstance(fold, Reduce) else None
    return c is not None and any(e.node is n for e in loads(c.left))
