"""What the vendor's library makes of a product beyond the product: an activation behind a bias, the sum with a value that was there before."""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..ir.dtype import F32, compute_type
from ..ir.expr import Cast, Expr, Load, Op, loads
from ..ir.graph import Compute, Graph, Opaque, Result, View, is_pointwise, reads, readers_of, shown_nodes
from ..ir.index import as_index, row_major
from ..ir.rewrite import Simplifier
from .contraction import Contraction, product_type
from .cost import pinned_nodes


@dataclass(frozen=True, eq=False)
class Own:
    """`node` is what `target` gives of a product's arguments and `further`; or, with `kept`, what it gives of a value and them: of the value `kept`,
    or of what the call before makes of it. `reshaped`: it has another shape than the product."""
    node: Compute
    target: object
    kwargs: dict
    further: tuple = ()
    reshaped: bool = False
    kept: "View | Opaque | None" = None


def activations_behind(graph: Graph, activated: Mapping, fast: bool) -> dict[Opaque, Own]:
    """Products with a vector, their own or one that is added behind, that nothing reads but an activation which the vendor makes. `fast`: also where
    it leaves out the product's rounding."""
    found = {}
    for call, reader, read in _single_readers(graph, activated):
        own, shaped, functions = activated[call.target]
        if call.kwargs or len(call.args) == 3 and len(call.args[0].shape) != 1:
            continue
        same = reader.shape == read.node.shape
        for value, vector in [(_carried(read), None)] if len(call.args) == 3 else _with_vectors(reader, read):
            for function, kwargs, rounds in functions:
                if (fast or not rounds) and _is(reader, function(value)):
                    kept = View(vector, vector.shape, vector.strides, as_index(0)) if vector is not None else None
                    found[call] = Own(reader, own if same else shaped, kwargs, further=() if same else (reader.shape,), reshaped=not same, kept=kept)
    return found


def _with_vectors(reader: Compute, read: Load) -> list[tuple[Expr, object]]:
    """(what `read` and an element of a vector for each column add up to, the vector), of the vectors that `reader` reads so."""
    found, column = [], as_index(reader.axes[-1]) if reader.axes else None
    for e in loads(reader.expr):
        whole = e.guard is None and e.index == (column,) and e.node.shape == read.node.shape[-1:] == reader.shape[-1:]
        if e is not read and whole and e.dtype is read.dtype and e.node.strides == row_major(e.node.shape):
            found += [(Op("add", *pair), e.node) for pair in ((_carried(read), _carried(e)), (_carried(e), _carried(read)))]
    return found


def vectors_apart(graph: Graph, found: Mapping[Opaque, Contraction], alone: Mapping, faster: Callable[[Contraction], bool]) -> set[Opaque]:
    """Products in TF32 whose vector, or whatever is added to them, is better added behind them: where a pass follows that may do it, or a pass for
    itself is `faster`. `found`: those that stay with the vendor; `alone`: see `capture.registry`."""
    shown, readers = pinned_nodes(graph), readers_of(graph)
    results = {r.opaque: r for r in graph.nodes if isinstance(r, Result)}
    several = {n for n in found if n.target in alone and not n.kwargs and product_type(found[n]) is F32 and n in results}
    passed = lambda r: r not in shown and len(readers.get(r, ())) == 1 and is_pointwise(readers[r][0])
    return {n for n in several if passed(results[n]) or faster(found[n])}


def sums_behind(graph: Graph, added: Mapping, found: Collection[Opaque]) -> dict[Opaque, Own]:
    """Products, of those `found`, that nothing reads but their sum, with each other and with a value which nothing needs any more: the vendor adds to
    it, or to the first product, where it lies. In the order in which they are added."""
    products: dict[Compute, dict] = {}
    for call, reader, read in _single_readers(graph, added):
        if not call.kwargs and call in found:
            products.setdefault(reader, {})[read.node] = call
    sums: dict[Opaque, Own] = {}
    for reader, calls in products.items():
        terms = _terms(reader)
        others = [e for e in terms or () if e.node not in calls]
        if terms is None or len(terms) < 2 or len(others) > 1 or len({e.node for e in terms}) < len(terms):
            continue
        if others and not _over(graph, others[0], reader, list(calls.values())):
            continue
        order = [n for n in graph.nodes if n in calls.values()]
        kept = View(others[0].node, reader.shape, reader.strides, as_index(0)) if others else order.pop(0)
        for call in order:
            sums[call] = Own(reader, added[call.target], {}, reshaped=True, kept=kept)
            kept = call
    return sums


def _terms(reader: Compute) -> list[Load] | None:
    """What `reader` adds up: reads of each element where it writes its own, of one type, without anything else. None where it does another thing."""
    found, waiting = [], [reader.expr.arg if isinstance(reader.expr, Cast) else reader.expr]
    while waiting:
        e = waiting.pop()
        if isinstance(e, Op) and e.name == "add":
            waiting += reversed(e.args)
            continue
        e = e.arg if isinstance(e, Cast) and e.dtype is compute_type(e.arg.dtype) else e
        if not isinstance(e, Load) or e.guard is not None or e.dtype is not reader.dtype or not _in_order(e, reader):
            return None
        found.append(e)
    return found


def _single_readers(graph: Graph, targets: Mapping):
    """(call, reader, its read) for products whose result has one reader, which is pointwise and reads each element where it writes its own."""
    readers = readers_of(graph)
    shown = shown_nodes(graph)
    for r in graph.nodes:
        if isinstance(r, Result) and r.opaque.target in targets and r.opaque.meaning is not None and r not in shown and len(readers.get(r, ())) == 1:
            reader, = readers[r]
            read = [e for e in loads(reader.expr) if e.node is r] if is_pointwise(reader) and reader.dtype is r.dtype else []
            if len(read) == 1 and read[0].guard is None and _in_order(read[0], reader):
                yield r.opaque, reader, read[0]


def _in_order(e: Load, reader: Compute) -> bool:
    """Does `reader` read each element where it writes it, both without gaps?"""
    lie = lambda index, strides: sum((i * s for i, s in zip(index, strides)), as_index(0))
    dense = e.node.strides == row_major(e.node.shape) and reader.strides == row_major(reader.shape)
    return dense and lie(e.index, e.node.strides) is lie(list(map(as_index, reader.axes)), reader.strides)


def _is(reader: Compute, whole: Expr) -> bool:
    """Is `reader` the expression `whole`, rounded to its type?"""
    simplify = Simplifier()
    return any(reader.expr is simplify.root(Cast(reader.dtype, whole, i) if whole.dtype is not reader.dtype else whole) for i in (True, False))


def _carried(e: Expr) -> Expr:
    return Cast(compute_type(e.dtype), e) if e.dtype.is_half else e


def _over(graph: Graph, e: Load, reader: Compute, calls: list[Opaque]) -> bool:
    """Is the value that `e` reads one of the program's own, which nothing shows, and which all but `reader` read before any of `calls`, in whatever
    order steps run: because the calls are made of them?"""
    shown = shown_nodes(graph)
    if not isinstance(e.node, (Compute, Result)) or e.node in shown:
        return False
    others = [n for n in graph.nodes if n is not reader and e.node in reads(n)]
    return all(n in before for before in map(_made_of, calls) for n in others)


def _made_of(call: Opaque) -> set:
    before, waiting = set(), list(reads(call))
    while waiting:
        n = waiting.pop()
        if n not in before:
            before.add(n)
            waiting.extend(reads(n))
    return before
