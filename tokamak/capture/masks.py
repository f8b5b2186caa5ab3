"""What stands between the two products of attention written out, but for a scale: masks and biases.

    x = a s + b, and c where k does not hold        (s the first product, b added, k a condition, c a number that is as good as -inf)

The library's attention adds a bias that is made of these: b where k holds, -inf elsewhere. Rows that masks leave nothing of need more (`Rows`),
unless all of a mask is made of constants, which are computed here:
- nothing but -inf: weights are NaN, in the library none. The bias becomes NaN.
- nothing but c: weights are equal, and no gradient goes through the scores. The query becomes zero, and so do its bias and its gradient.
- nothing but low numbers b. Where they are so low that scores vanish beside them, those with the greatest b have equal weights; the library, which
  keeps the logarithm of the sum of e^x for backward, keeps b alone: its weights are 1 there, and the gradient that it is given has to be divided by
  their number. Else b is given without what is common to the row.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .replaced import plain

_aten = torch.ops.aten
LOWEST = -60_000.0          # what replaces scores up to here is as good as -inf: scores near it would themselves be beyond f16
LOW = -1e3                  # what is added down to here and common to a row stays
VANISH = -2.0 ** 27         # from here on scores vanish beside what is added
ABSENT = -2.0 ** 100        # such a number, far from the ends of the range
LARGEST = 1 << 26           # elements of a constant that are computed here
VIEWS = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim}
TURNED = {_aten.transpose.int, _aten.permute.default}
_SCALES = {_aten.mul.Tensor: lambda a: a, _aten.div.Tensor: lambda a: 1 / a}
_SIGNS = {_aten.add.Tensor: 1.0, _aten.sub.Tensor: -1.0}
_NUMBERS = {_aten.scalar_tensor.default: 0, _aten.full.default: 1}        # factory -> the place of the number
_FILLED = (_aten.masked_fill.Scalar, _aten.masked_fill.Tensor)


@dataclass(frozen=True)
class Kept:
    """Where `condition` is `holds` a score stays, elsewhere it is `by`, counting the scales behind."""
    condition: fx.Node
    holds: bool
    by: float


@dataclass(frozen=True)
class Between:
    """x of the product `first`: `scale` times it, and `added` (value, number it is multiplied by); where all of `kept` hold. `lead`: the axes of the
    scores before the last two, as masks see them."""
    first: fx.Node
    scale: float = 1.0
    added: tuple[tuple[fx.Node, float], ...] = ()
    kept: tuple[Kept, ...] = ()
    lead: tuple[int, ...] | None = None

    @property
    def masked(self) -> bool:
        return bool(self.added or self.kept)

    @property
    def factors(self) -> tuple[fx.Node, fx.Node]:
        return self.first.args[-2:]


def passes(n: fx.Node) -> bool:
    """Does `n` hand on what it reads, element by element in their order: a view, a copy, or another floating type?"""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], fx.Node) or not plain(n) or not plain(n.args[0]):
        return False
    before, after = n.args[0].meta["val"], n.meta["val"]
    if n.target is _aten._to_copy.default:
        moved = n.kwargs.get("device", before.device) != before.device or not set(n.kwargs) <= {"dtype", "layout", "device"}
        return not moved and before.is_floating_point() and after.is_floating_point()
    if n.target in TURNED:
        order = [d for d in order_of(n) if before.shape[d] != 1]
        return order == sorted(order)
    return n.target is _aten.clone.default or n.target in VIEWS and before.numel() == after.numel()


def order_of(n: fx.Node) -> list[int]:
    """The dimensions of what `n`, one of TURNED, reads in the order in which it has them."""
    order = list(range(n.args[0].meta["val"].dim()))
    if n.target is _aten.permute.default:
        return [order[d] for d in n.args[1]]
    i, j = n.args[1:]
    order[i], order[j] = order[j], order[i]
    return order


def turned_once(graph: fx.Graph) -> None:
    """Permutations of permutations in `graph`, of more axes than products have, are of what these read: einsum's that end where they began are
    none."""
    for n in graph.nodes:
        if n.target in TURNED and n.args[0].target in TURNED and plain(n) and n.meta["val"].dim() > 3:
            within = n.args[0]
            order = order_of(within)
            n.args, n.target = (within.args[0], [order[d] for d in order_of(n)]), _aten.permute.default
            if not within.users:
                graph.erase_node(within)


def factor(n: fx.Node) -> float | None:
    """The positive number that `n` multiplies by; None where it does something else."""
    by = _number(n.args[1]) if n.target in _SCALES and isinstance(n.args[0], fx.Node) else None
    return _SCALES[n.target](by) if by is not None and 0 < by < math.inf and plain(n) else None


def _number(x) -> float | None:
    """The number that `x` is, or the tensor without axes that it names; None where it is none."""
    if isinstance(x, fx.Node) and x.target in _NUMBERS and plain(x) and not x.meta["val"].shape:
        value = x.args[_NUMBERS[x.target]]
        return _rounded(value, x.meta["val"].dtype) if isinstance(value, (int, float)) else None
    return float(x) if isinstance(x, (int, float)) else None


def _rounded(x: float, dtype: torch.dtype) -> float:
    with _disable_current_modes():
        return float(torch.tensor(x, dtype=torch.float64).to(dtype))


def between(x: fx.Node, most: int = 8) -> Between | None:
    """What `x` is made of, back to a product of batches, by at most `most` masks; None where that is something else."""
    scale = 1.0
    while passes(x) or factor(x) is not None:
        scale *= factor(x) or 1.0
        x = x.args[0]
    found = _product(x) or _masked(x, most)
    if found is None or scale == 1:
        return found
    return replace(found, scale=found.scale * scale, added=tuple((m, f * scale) for m, f in found.added),
                   kept=tuple(replace(k, by=k.by * scale) for k in found.kept))


def _product(x: fx.Node) -> Between | None:
    """The product that `x` is, with what is added to it within the call."""
    if x.target is _aten.bmm.default and plain(x):
        return Between(x)
    if x.target is _aten.baddbmm.default and plain(x) and x.kwargs.get("alpha", 1) == 1 and (beta := x.kwargs.get("beta", 1)) in (0, 1):
        lead = tuple(x.meta["val"].shape[:-2])
        return Between(x, added=((x.args[0], 1.0),), lead=lead) if beta else Between(x)
    return None


def _masked(x: fx.Node, most: int) -> Between | None:
    """What `x` is made of by a mask."""
    if most == 0 or not plain(x):
        return None
    if (by := kept(x)) is not None:
        found = _under(x, x.args[by[0]], most)
        return found and replace(found, kept=(*found.kept, by[1]))
    if x.target in _SIGNS and not x.kwargs and all(isinstance(a, fx.Node) and plain(a) for a in x.args):
        for score, other in (x.args, x.args[::-1])[:2 if _SIGNS[x.target] > 0 else 1]:
            if (found := _under(x, score, most)) is not None:
                beside = any(k.by != -math.inf for k in found.kept)         # something is added to c, too
                return None if beside else replace(found, added=(*found.added, (other, _SIGNS[x.target])))
    return None


def _under(x: fx.Node, score: fx.Node, most: int) -> Between | None:
    """What `score` is made of, of which `x` is masked: matrix by matrix, with the same axes before them as all that is masked."""
    shape = tuple(x.meta["val"].shape)
    found = between(score, most - 1) if plain(score) and score.meta["val"].shape == shape else None
    if found is None or shape[-2:] != found.first.meta["val"].shape[-2:] or found.lead not in (None, shape[:-2]):
        return None
    return replace(found, lead=shape[:-2])


def kept(n: fx.Node) -> tuple[int, Kept] | None:
    """(the place of what `n` keeps part of, what it keeps); None where it does something else."""
    if n.target in _FILLED and plain(n):
        by = _number(n.args[2])
        return None if by is None else (0, Kept(n.args[1], False, by))
    if n.target is _aten.where.self and plain(n):
        for place, other in ((1, 2), (2, 1)):
            if (by := _number(n.args[other])) is not None:
                return place, Kept(n.args[0], place == 1, by)
    return None


def readers(n: fx.Node, times: float = 1.0, masks: frozenset = frozenset()) -> Iterator[tuple[fx.Node, int, float, frozenset]]:
    """(node, the place where it reads, the number it reads times, the conditions, and what they are, where it does not read zeros) of all that reads
    `n`, behind views, changes of type, products with numbers, and masks."""
    for u in n.users:
        if passes(u):
            yield from readers(u, times, masks)
        elif factor(u) is not None and u.args[0] is n:
            yield from readers(u, times * factor(u), masks)
        elif (found := kept(u)) is not None and u.args[found[0]] is n and found[1].by == 0 and u.meta["val"].shape == n.meta["val"].shape:
            yield from readers(u, times, masks | {(found[1].condition, found[1].holds)})
        else:
            yield from ((u, i, times, masks) for i, a in enumerate(u.args) if a is n)


# -- what masks hold ----------------------------------------------------------------------------------------------------------------
def levels(n, most: int = 24) -> frozenset[float] | None:
    """The numbers that elements of `n` may be, by how it is made in at most `most` calls; None where they may be any."""
    if (by := _number(n)) is not None:
        return frozenset({by})
    if not isinstance(n, fx.Node) or not plain(n) or most == 0:
        return None
    if n.meta["val"].dtype is torch.bool:
        return frozenset({0.0, 1.0})
    read, combine = _LEVELS.get(n.target, (None, None))
    if read is None or "alpha" in n.kwargs or n.target is _aten.rsub.Scalar and len(n.args) > 2:
        return None
    given = []
    for a in read(*n.args):
        given.append(levels(a, most - 1))
        if given[-1] is None:
            return None
    found = frozenset(_rounded(x, n.meta["val"].dtype) for x in combine(*given))
    return found if len(found) <= 8 else None


_either = lambda *given: frozenset().union(*given)
_pairs = lambda combine: (lambda a, b: (a, b), lambda a, b: {combine(x, y) for x in a for y in b})

# operator -> (arguments -> those that say what its elements are; their levels -> its own)
_LEVELS = {
    **dict.fromkeys((*VIEWS, *TURNED, _aten._to_copy.default, _aten.clone.default, _aten.slice.Tensor, _aten.index.Tensor),
                    (lambda x, *_: (x,), _either)),
    **dict.fromkeys((_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default), (lambda *_: (0,), _either)),
    **dict.fromkeys((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default), (lambda *_: (1,), _either)),
    **dict.fromkeys((_aten.full.default, _aten.full_like.default, _aten.new_full.default), (lambda *given: given[-1:], _either)),
    **dict.fromkeys((_aten.triu.default, _aten.tril.default), (lambda x, *_: (x, 0), _either)),
    **dict.fromkeys(_FILLED, (lambda x, _, by: (x, by), _either)),
    _aten.where.self: (lambda _, a, b: (a, b), _either),
    _aten.mul.Tensor: _pairs(lambda a, b: a * b),
    _aten.add.Tensor: _pairs(lambda a, b: a + b),
    _aten.sub.Tensor: _pairs(lambda a, b: a - b),
    _aten.rsub.Scalar: _pairs(lambda a, b: b - a),
}


def constant(n: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of `n`, on the CPU, where nothing that is given or drawn goes into it; else None. `known`: such values."""
    needed, rest = set(), [n]
    while rest:
        x = rest.pop()
        if x not in known and x not in needed:
            if not _pure(x):
                return None
            needed.add(x)
            rest += x.all_input_nodes
    for x in sorted(needed):
        made = _computed(x, known)
        if made is None:
            return None
        known[x] = made
    return known[n]


def _pure(n: fx.Node) -> bool:
    """Does `n` make a tensor of its arguments and nothing else?"""
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload) or n.target.namespace != "aten" or not plain(n):
        return False
    return torch.Tag.nondeterministic_seeded not in n.target.tags and not n.target._schema.is_mutable


def _computed(n: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The value of `n`, of `known` ones; None where it has too many elements. What is the same along an axis is computed once."""
    at_once, shape = torch.Tag.pointwise in n.target.tags, n.meta["val"].shape
    value = lambda a: _thin(known[a]) if at_once else known[a]
    given = n.all_input_nodes
    size = 0 if n.target in VIEWS else torch.broadcast_shapes(*(value(a).shape for a in given)).numel() if at_once and given else shape.numel()
    if size > LARGEST:
        return None
    kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in n.kwargs.items()}
    made = n.target(*fx.map_arg(n.args, value), **fx.map_arg(kwargs, value))
    return made.expand(shape) if at_once else made


def _thin(x: torch.Tensor) -> torch.Tensor:
    """`x` where it is the same along an axis in memory, once."""
    return x[tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())]


def whole(b: Between) -> torch.Tensor | None:
    """Which scores count, as far as masks go, where these are made of constants: bool, of all axes or of size 1; None where they are not, or where a
    bias has other values than zero and such as are as good as -inf."""
    if any(not k.by <= LOWEST for k in b.kept):
        return None
    known: dict = {}
    made = None
    for node, zero in [(k.condition, not k.holds) for k in b.kept] + [(m if _two(m, times) else None, True) for m, times in b.added]:
        value = node and constant(node, known)
        if value is None:
            return None
        counts = (_thin(value) == 0) == zero
        made = counts if made is None else made & counts
    return made


def _amounts(m: fx.Node, times: float) -> frozenset[float] | None:
    """The numbers that `times` `m` may be; None where they may be any."""
    found = levels(m)
    return found and frozenset(x * times for x in found)


def _two(m: fx.Node, times: float) -> bool:
    """Is `times` `m` zero or as good as -inf everywhere?"""
    found = _amounts(m, times)
    return found is not None and all(x == 0 or x <= LOWEST for x in found)


@dataclass(frozen=True)
class Rows:
    """What a kind of masks asks for rows that nothing is left of: NaN; a query of zero; a look at how low what is added is."""
    nan: bool = False
    zero: bool = False
    low: bool = False


def spent(b: Between, left: torch.Tensor | None, dtype: torch.dtype) -> Rows | None:
    """What these masks, as a bias of `dtype`, ask for rows that nothing is left of; None where they are no such bias. `left`: see `whole`."""
    if any(not k.by <= LOWEST for k in b.kept) or not all(_holds(m, times, dtype) for m, times in b.added):
        return None
    if left is not None and bool(left.any(-1).all()):
        return Rows()
    by = {k.by for k in b.kept}
    if by - {-math.inf}:
        return Rows(zero=True) if len(by) == 1 and not b.added else None
    given = [_amounts(m, times) for m, times in b.added]
    low = any(of is None or any(-math.inf < x <= LOW for x in of) for of in given)
    return Rows(nan=bool(b.kept) or any(of is None or -math.inf in of for of in given), low=low)


def _holds(m: fx.Node, times: float, dtype: torch.dtype) -> bool:
    """Does `dtype` hold what `m` adds? Of a wider type only zero and what is far below all scores, and that not beyond f16, which takes nothing off
    a number for scores to vanish beside it."""
    given, of = m.meta["val"].dtype, _amounts(m, times)
    if given is dtype or given.is_floating_point and given.itemsize < dtype.itemsize:
        return True
    if not given.is_floating_point or given.itemsize == dtype.itemsize or of is None:
        return False
    low = of - {0.0}
    within = min(low, default=0.0) >= torch.finfo(dtype).min or dtype is torch.bfloat16 and -math.inf not in low or low == {-math.inf}
    return within and all(x <= -1e4 for x in low)


@dataclass(frozen=True)
class Bias:
    """What the library adds to scores; rows whose queries count, and the numbers that rows' gradients are multiplied by, where they matter."""
    added: torch.Tensor | None = None
    left: torch.Tensor | None = None
    shares: torch.Tensor | None = None


def bias(b: Between, value, dtype: torch.dtype, rows: Rows) -> Bias:
    """The masks of `b`, of which `value(node)` gives values, as a bias of `dtype`."""
    total = condition = None
    for m, times in b.added:
        x = value(m) if times == 1 else value(m) * times
        if x.dtype is not dtype:
            finite = (of := _amounts(m, times)) is not None and -math.inf not in of
            x = (x.clamp(min=torch.finfo(dtype).min) if finite else x).to(dtype)
        total = x if total is None else total + x
    for k in b.kept:
        x = value(k.condition) if k.holds else ~value(k.condition)
        condition = x if condition is None else condition & x
    if condition is not None:
        total = torch.zeros_like(condition, dtype=dtype) if total is None else total
        total = total.masked_fill(~condition, -math.inf)
    columns = b.first.meta["val"].shape[-1]
    if total.shape[-1] != columns:          # one number for a row
        total = total.expand(*total.shape[:-1], columns).contiguous()
    if rows.zero:
        left = condition.any(-1, True)
        return Bias(total.masked_fill(~left, 0.0), left)
    made = Bias(total)
    top = total.amax(-1, True) if rows.nan or rows.low else None
    if rows.low:
        made = _without_common(total, top)
    return Bias(made.added.masked_fill(top == -math.inf, math.nan), None, made.shares) if rows.nan else made


def _without_common(total: torch.Tensor, top: torch.Tensor) -> Bias:
    """`total`, whose rows are at most `top`: less that in rows of low numbers; in rows so low that scores vanish, equal numbers of that kind, and
    their share."""
    away = torch.where(top <= LOW, total - top, total)
    if total.dtype is torch.float16:
        return Bias(away)
    vanish, first = top <= VANISH, total == top
    added = away.masked_fill(vanish & first, ABSENT).masked_fill(vanish & ~first, -math.inf)
    return Bias(added, None, torch.where(vanish, 1 / first.sum(-1, True), 1.0))
