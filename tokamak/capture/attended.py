"""Attention written out in a training step, as the library's own, forward and backward.

    s = q k    x = a s + b    p = softmax(x)    y = p v
    dp = dy v'    dv = p' dy    dx = p (dp - sum(p dp))    ds = a dx    dq = ds k'    dk = q' ds         (': transposed)

Where the joint graph has all of these, products of batches of matrices with nothing but a number a, masks and biases that take no gradient (`masks`),
views and changes of type between them, y and the gradients are what the library's attention and its gradient give: p, which backward would need, is
neither kept nor made. Of inference graphs `fuse.weighted` sees to that, with anything between the products.

Weights may be dropped at random: y = d(p) v, dv = d(p)' dy, dp = d(dy v'), where d leaves out what it drew and divides the rest by the chance to
stay. The library draws by torch's generator too, so `torch.manual_seed` makes a step again, with other numbers than as written.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import arg_tree_leaves

from .library_attention import Calls, chosen
from .masks import Between, between, Bias, bias, order_of, passes, readers, Rows, spent, TURNED, turned_once, whole
from .regions import MARK, storage_of
from .replaced import Written, plain

_aten = torch.ops.aten
SHAPED = {_aten.view.default, _aten._unsafe_view.default}
ENDS = {_aten._softmax.default, _aten.div.Tensor}           # what makes a softmax's result, whole or in parts
WIDEST = 256            # columns of a head that the library takes
WIDEST_BIASED = 128     # the same with a bias: 4 x 8 heads of 1024 x 256 bf16, forward, 147 us, 101 as written
LEAST = 1 << 21         # elements of p from which on it was measured to pay: backward of heads of 256 x 64 f16, us, by cuDNN and as written, of 32
                        # 18.2, 20.9, of 64 22.0, 28.2; of 160 of 512 x 64 106, 202 (by FlashAttention 139); of 32 of 2048 x 128 346, 578 (614).
                        # Steps with a bias, causal and as written, heads behind positions, bf16: 16 x 12 of 128 x 64 48, 37, 59; 8 x 16 of 512 x 64
                        # 179, 107, 284
LONG = 256              # columns of p from which on causal attention without gradients is the library's: 16 x 16 heads of 256 x 64 16.3 us, 19.3 by a
                        # kernel of ours; 4 x 16 of 1024 x 64 34.9, 52.1; 4 x 32 of 2048 x 128 255, 605


@dataclass(frozen=True)
class Gradients:
    """The nodes of the result's gradient and of the factors': of `right` as it is multiplied, k'."""
    result: fx.Node
    left: fx.Node
    right: fx.Node
    values: fx.Node


@dataclass(frozen=True)
class Attention:
    """The nodes of one: factors, what stands between, the result. `heads`: as what batches and heads the batches of matrices count. `turned`: where
    there is a gradient, the weights as it takes them; `dropout`: what leaves out some at random."""
    left: fx.Node
    right: fx.Node
    values: fx.Node
    scores: Between
    heads: tuple[int, int]
    made: fx.Node
    turned: fx.Node | None = None
    dropout: fx.Node | None = None
    gradients: Gradients | None = None

    @property
    def dropped(self) -> float:
        """The share of the weights that is left out."""
        return self.dropout.args[1] if self.dropout is not None else 0.0


def attended(graph: fx.GraphModule, least: int = LEAST, long: int = LONG, results: int | None = None) -> int:
    """Puts the library's calls in the place of attention of `graph` with `least` elements of p, where it has some, forward and backward; where there
    is no backward, of such as is causal, with `long` columns of p. How many. The first `results` of what the graph returns, all without, lie in
    memory as before; gradients lie as the library makes them: naive attention's of 10 x 16 x 512 x 64 f16 otherwise copy one, 6 us of 113 (H200)."""
    behind = [n for n in graph.graph.nodes if n.target is _aten._softmax_backward_data.default and n.meta["val"].dim()]
    ends = [] if behind else [n for n in graph.graph.nodes if n.target in ENDS and n.meta["val"].dim()]
    if behind or ends:
        turned_once(graph.graph)
    known: dict = {}
    with unset_fake_temporarily():
        found = [(a, _masks(a, known)) for a in (*map(trained, behind), *map(attention, ends)) if a is not None and _taken(a, least)]
    returned = frozenset(arg_tree_leaves(*graph.graph.output_node().args)[:results])
    count = sum(_replace(graph.graph, a, m, returned) for a, m in found if m is not None and (a.gradients or m.causal and _long(a) >= long))
    if count:
        dropouts = {a.dropout for a, _ in found}
        graph.graph.eliminate_dead_code(lambda n: n.is_impure() and n not in dropouts)
        graph.recompile()
    return count


def _long(a: Attention) -> int:
    """Columns of p."""
    return a.values.meta["val"].shape[1]


def _taken(a: Attention, least: int) -> bool:
    """Does the library's attention take these types and sizes?"""
    values = [n.meta["val"] for n in (a.left, a.right, a.values)]
    kinds = (torch.float16, torch.bfloat16) if values[0].device.type == "cuda" else (torch.float16, torch.bfloat16, torch.float32)
    widths = [values[0].shape[2], values[2].shape[2]]
    if any(MARK in (n.meta.get("custom") or {}) for n in (a.made, a.scores.first)):         # a region with a policy of its own
        return False
    same = all(v.dtype is values[0].dtype and v.dtype in kinds for v in values) and widths[0] == widths[1] <= WIDEST and widths[0] % 8 == 0
    return same and a.scores.first.meta["val"].numel() >= least


def trained(behind: fx.Node) -> Attention | None:
    """The attention whose softmax has its gradient in `behind`; None where it is none, or something else is made of what lies within."""
    softmax, dim = behind.args[1:3]
    while passes(softmax):
        softmax = softmax.args[0]
    a = attention(softmax, behind) if dim % behind.meta["val"].dim() == behind.meta["val"].dim() - 1 else None
    read = list(readers(a.turned)) if a else []
    if len(read) != 1 or read[0][0].target is not _aten.bmm.default or read[0][1:] != (0, 1, frozenset()):
        return None
    dp = _before_dropout(behind.args[0], a.dropout)
    d_values, d_scores = read[0][0], dp and between(dp)
    if d_scores is None or d_scores.scale != 1 or d_scores.masked:
        return None
    d_weights, gradient = d_scores.first, d_values.args[1]
    if d_weights.meta["val"].shape != a.scores.first.meta["val"].shape:
        return None
    if d_weights.args[0] is not gradient or not _is_turned(d_weights.args[1], a.values):
        return None
    factors = _factors_gradients(behind, a)
    return factors and replace(a, gradients=Gradients(gradient, *factors, d_values))


def attention(softmax: fx.Node, behind: fx.Node | None = None) -> Attention | None:
    """The attention whose weights `softmax` makes; None where it is none, or something else is made of them than a product and, where there is
    `behind`, the softmax's gradient, what these need."""
    x = _exponents(softmax) if plain(softmax) else None
    scores = x and between(x)
    weights, dropout = _weights(softmax) if scores and behind else (softmax, None)
    if weights is None:
        return None
    read = list(readers(weights)) if scores else []
    if dropout is not None:
        beside = [r for r in readers(softmax) if r[0] is not dropout]
        if [r[:2] for r in beside] != [(behind, 1)]:
            return None
        read += beside
    found: dict = {}
    for reader, place, times, masks in read:
        kind = "last" if reader.target is _aten.bmm.default and place == 0 else "behind" if behind and (reader, place) == (behind, 1) else \
            "turned" if behind and _turns(reader) else None
        if times != 1 or masks or kind is None or kind in found:
            return None
        found[kind] = reader
    if len(found) != (3 if behind else 1) or "last" not in found:
        return None
    shape, last = scores.first.meta["val"].shape, found["last"]
    if last.args[0].meta["val"].shape != shape or softmax.meta["val"].shape[-1] != shape[-1]:
        return None
    heads = _heads(softmax.meta["val"].shape, scores)
    return heads and Attention(*scores.factors, last.args[1], scores, heads, last, found.get("turned"), dropout)


def _weights(softmax: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """(what values are multiplied by, the dropout that leaves it): of `softmax`, or that itself; no node where a dropout is of another kind."""
    found = [r for r in readers(softmax) if r[0].target is _aten.native_dropout.default]
    if not found:
        return softmax, None
    (dropout, *how), *others = found
    share, train = dropout.args[1:3]
    results = {u.args[1]: u for u in dropout.users if u.target is getitem}
    if others or how != [0, 1, frozenset()] or not isinstance(share, float) or not 0 < share < 1 or train is False or \
            len(results) != len(dropout.users) or set(results) != {0, 1} or len(results[1].users) != 1:
        return None, None
    return results[0], dropout


def _before_dropout(dp: fx.Node, dropout: fx.Node | None) -> fx.Node | None:
    """The gradient of what `dropout` leaves, where `dp` is that of what it is given."""
    while dropout is not None and passes(dp):
        dp = dp.args[0]
    if dropout is None:
        return dp
    if dp.target is not _aten.native_dropout_backward.default or not plain(dp) or not all(isinstance(x, fx.Node) for x in dp.args[:2]):
        return None
    _, mask, times = dp.args
    return dp.args[0] if mask.target is getitem and mask.args[0] is dropout and abs(times * (1 - dropout.args[1]) - 1) < 1e-6 else None


def _heads(shape: torch.Size, scores: Between) -> tuple[int, int] | None:
    """The (batches, heads) that `scores` have, whose softmax has `shape`; None where masks are of more axes than that."""
    batches, rows, columns = scores.first.meta["val"].shape
    lead = scores.lead if scores.lead is not None else tuple(shape[:-2]) if shape[-2:] == (rows, columns) else (batches,)
    masks = [m for m, _ in scores.added] + [k.condition for k in scores.kept]
    if len(lead) > 2 and any(n != 1 for m in masks for n in m.meta["val"].shape[:-2]):
        return None
    return lead if len(lead) == 2 else (batches, 1)


def _factors_gradients(behind: fx.Node, a: Attention) -> tuple[fx.Node, fx.Node] | None:
    """The gradients of the factors of `a`'s scores, where `behind` is made nothing but these, by the same number and masks."""
    masks, scale = frozenset((k.condition, k.holds) for k in a.scores.kept), a.scores.scale
    found: dict = {}
    for reader, place, times, kept in readers(behind):
        if reader.target is not _aten.bmm.default or abs(times - scale) > 1e-6 * scale or place in found or kept != masks:
            return None
        found[place] = reader
    if set(found) != {0, 1} or not _is_turned(found[0].args[1], a.right) or not _is_turned(found[1].args[0], a.left):
        return None
    return found[0], found[1]


def _exponents(p: fx.Node) -> fx.Node | None:
    """x where `p` is its softmax along the last dimension, whole or in parts; or None."""
    last = p.meta["val"].dim() - 1
    along = lambda n, target, of: n.target is target and n.args[0] is of and n.args[1:3] in (([last], True), ([-1], True))
    if p.target is _aten._softmax.default:
        return p.args[0] if p.args[1] % (last + 1) == last else None
    two = lambda n, target: n.target is target and all(isinstance(a, fx.Node) for a in n.args[:2])
    if not two(p, _aten.div.Tensor) or p.args[0].target is not _aten.exp.default or not along(p.args[1], _aten.sum.dim_IntList, p.args[0]):
        return None
    away = p.args[0].args[0]
    return away.args[0] if two(away, _aten.sub.Tensor) and along(away.args[1], _aten.amax.default, away.args[0]) else None


def _turns(n: fx.Node) -> bool:
    """Does `n` exchange the last two of three dimensions?"""
    return n.target in TURNED and order_of(n) == [0, 2, 1]


def _is_turned(n: fx.Node, of: fx.Node) -> bool:
    return isinstance(n, fx.Node) and (_turns(n) and n.args[0] is of or _turns(of) and of.args[0] is n)


# -- the library's in their place -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Masks:
    """What the library is told: nothing is masked, or as `causal` says, or by a bias, which does for rows of nothing what `rows` says."""
    causal: bool = False
    rows: Rows | None = None


def _masks(a: Attention, known: dict) -> Masks | None:
    """What the library has to be told of the masks of `a`; None where it cannot be told. `known`: of what layers have in common."""
    if not a.scores.masked:
        return Masks()
    dtype, (rows, columns) = a.left.meta["val"].dtype, a.scores.first.meta["val"].shape[1:]
    key = a.scores.added, a.scores.kept, dtype, rows, columns
    if key not in known:
        left = whole(a.scores)
        if left is not None and bool(left.all()):
            known[key] = Masks()
        elif left is not None and rows == columns and bool((left == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
            known[key] = Masks(causal=True)
        else:
            needed = spent(a.scores, left, dtype) if a.values.meta["val"].shape[2] <= WIDEST_BIASED else None
            known[key] = needed and Masks(rows=needed)
    return known[key]


def _replace(graph: fx.Graph, a: Attention, masks: Masks, returned: frozenset) -> bool:
    """Puts the library's calls in, and the same views behind them as before; False where it has none for these values. `returned`: what lies in
    memory as before."""
    calls, width = _calls(a, masks), a.values.meta["val"].shape[2]
    if calls is None:
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    forward, backward = calls
    (batches, rows, columns), scale, d = a.scores.first.meta["val"].shape, a.scores.scale, a.gradients
    written = Written(graph, a.made)
    heads = lambda n, *of: contiguous_rows(_in_heads(written, n, (*a.heads, *of)))
    with torch.no_grad(), graph.inserting_before(a.made), written:
        q, v = heads(a.left, rows, width), heads(a.values, columns, width)
        k = contiguous_rows(_in_heads(written, a.right, (*a.heads, width, columns)).transpose(2, 3))
        told = bias(a.scores, lambda n: _as_scores(written.value(n), a), q.dtype, masks.rows) if masks.rows else Bias()
        added = told.added if told.added is None else told.added.expand(*a.heads, rows, columns)
        q = q if told.left is None else q.masked_fill(~told.left, 0.0)
        out, kept = forward(q, k, v, added, masks.causal, scale, a.dropped)
        made = {a.made: _forms(out, out.reshape(batches, rows, width))}
    if d is not None:
        first = min((d.left, d.right, d.values), key=order.__getitem__)
        written.within(first)
        with torch.no_grad(), graph.inserting_before(first), written:
            dy = heads(d.result, rows, width)
            dy = dy if told.shares is None else (dy * told.shares).to(dy.dtype)
            dq, dk, dv = backward(dy, q, k, v, out, kept, added, masks.causal, scale, a.dropped)
            dq = dq if told.left is None else dq.masked_fill(~told.left, 0.0)
            made |= {d.left: _forms(dq, dq.reshape(batches, rows, width)), d.values: _forms(dv, dv.reshape(batches, columns, width)),
                     d.right: _forms(dk.transpose(2, 3), dk.reshape(batches, columns, width).transpose(1, 2))}
    for old, forms in made.items():
        _take_place(old, *(written.made[id(x)] for x in forms), returned)
    return True


def _forms(apart: torch.Tensor, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A result with batches and heads apart, as batches of matrices, and as such that are contiguous."""
    return apart, flat, flat.contiguous()


def _calls(a: Attention, masks: Masks) -> Calls | None:
    """The library's calls for `a`."""
    given = [n.meta["val"].unsqueeze(1) for n in (a.left, a.right, a.values)]
    given[1] = given[1].mT
    added = a.scores.first.meta["val"].unsqueeze(1) if masks.rows else None
    return chosen(given, added, masks.causal, a.scores.scale, a.dropped)


def _as_scores(mask: torch.Tensor, a: Attention) -> torch.Tensor:
    """`mask`, which broadcasts to the scores of `a`, with axes of batches and heads."""
    if len(a.scores.lead) > 2:
        return mask.reshape(1, 1, *mask.shape[-2:])
    while mask.dim() < len(a.scores.lead) + 2:
        mask = mask.unsqueeze(0)
    return mask if len(a.scores.lead) == 2 else mask.unsqueeze(1)


def _in_heads(written: Written, n: fx.Node, shape: tuple[int, ...]) -> torch.Tensor:
    """`n`, batches of matrices, in `shape`: batches and heads apart. Where it is but a copy of such a value, that value."""
    found, x, dtype = None, n, n.meta["val"].dtype
    while True:
        value = x.meta["val"]
        if _axes(value.shape) == _axes(shape) and all(s > 0 or size == 1 for s, size in zip(value.stride(), value.shape)):
            found = x
        if not passes(x) or x.args[0].meta["val"].dtype is not dtype:
            made = written.value(found or n)
            return made if made.shape == shape else made.view(shape)
        x = x.args[0]


def _axes(shape) -> list[int]:
    """`shape` without axes of one."""
    return [n for n in shape if n != 1]


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with contiguous rows: the library takes no others."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _take_place(old: fx.Node, new: fx.Node, flat: fx.Node, lies: fx.Node, returned: frozenset) -> None:
    """Lets views of `old` of the axes of `new` be views of that, and puts `flat` in the place of `old` elsewhere, or `lies`, which lies in memory as
    `old`, where that is `returned`."""
    for u in list(old.users):
        if u.target in SHAPED and _axes(u.meta["val"].shape) == _axes(new.meta["val"].shape) and not _shown(u, returned):
            u.replace_input_with(old, new)
    flat = lies if _shown(old, returned) else flat
    old.replace_all_uses_with(flat)
    _lie_anew(new)
    _lie_anew(flat)


def _given_out(n: fx.Node) -> bool:
    """Is `n`, or a view of it, a result of the graph?"""
    return any(u.op == "output" or _is_view(u) and _given_out(u) for u in n.users)


def _shown(n: fx.Node, returned: frozenset) -> bool:
    """Is `n`, or a view of it, among the results `returned`?"""
    return n in returned or any(_is_view(u) and _shown(u, returned) for u in n.users)


def _is_view(n: fx.Node) -> bool:
    return n.target in SHAPED or getattr(n.target, "is_view", False)


def _lie_anew(n: fx.Node) -> None:
    """What views of `n` say of strides. A copy that lies as `n` does already is `n`; where a view cannot be made of its strides there is a copy."""
    for u in list(n.users):
        if u.target is _aten.clone.default and u.meta["val"].stride() == n.meta["val"].stride() and not _given_out(u):
            _no_copy(u)
    for u in list(n.users):
        if u.target in SHAPED and plain(u) and not _fits(n.meta["val"], u.args[1]):
            with n.graph.inserting_before(u), torch.no_grad():
                copy = n.graph.call_function(_aten.clone.default, (n,), {"memory_format": torch.contiguous_format})
                copy.meta = {**n.meta, "val": n.meta["val"].clone(memory_format=torch.contiguous_format)}
            u.replace_input_with(n, copy)
        if getattr(u.target, "is_view", False) and plain(u):
            u.meta = {**u.meta, "val": u.target(*fx.map_arg(u.args, lambda x: x.meta["val"]), **u.kwargs)}
            _lie_anew(u)


def _no_copy(copy: fx.Node) -> None:
    """Puts what it copies in the place of `copy`. What gives that another shape is a view now."""
    for u in copy.users:
        if u.target is _aten._unsafe_view.default:
            u.target = _aten.view.default
    copy.replace_all_uses_with(copy.args[0])


def _fits(x: torch.Tensor, shape: list[int]) -> bool:
    """Can `x` be viewed in `shape`?"""
    return storage_of(x.reshape(shape)) == storage_of(x)
