"""Memory formats: which convolutions of a traced graph run channels-last, and with them the values in between.

The library's convolution takes images as they lie; an image that lies channels-first it copies there and back for itself. So a graph of aten calls is
priced by rates that were measured (`RATES`): what the calls save, what is copied where a value enters or leaves such a region. Where it pays,
convolutions read copies that lie channels-last, and the strides of what follows are those that torch gives then. Kernels of ours read and write any
strides, and copies become part of them. Everything that somebody else sees keeps the traced strides: results of the graph, mutated inputs, what a
call that the tables do not know reads. Where torch has to run such a graph after all, its calls get what was traced (`for_torch`).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .pixels import AS_TRACED, as_products, inherited, is_product
from .regions import MARK, aliases, storage_of
from .registry import TABLE

_aten = torch.ops.aten
IMAGES = {_aten.convolution.default: (0,), _aten.convolution_backward.default: (0, 1)}      # a convolution -> which arguments are images
WEIGHT = {_aten.convolution.default: 1, _aten.convolution_backward.default: 2}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}                               # by rank
_BY_MEMORY = frozenset({_aten.as_strided.default, _aten._reshape_alias.default})            # what they mean depends on how their argument lies


@dataclass(frozen=True)
class Rates:
    """What a call gains channels-last, in ns: an element of its images, of its images where it has groups, of its weights (they are reordered).
    `window`: the largest of one with groups that gains. `product`: of its images, and of its weights, as a product of matrices (`pixels`)."""
    image: float
    grouped: float
    weight: float = 0.0
    window: int = 49
    product: tuple[float, float] = (0.0, 0.0)


# (device, type, backward). CPU: fitted to calls of 16 to 512 channels of 4 to 64 pixels a side, batches of 1 to 16 (one core of a Xeon with AVX-512
# and AMX, torch 2.13). GPU: below what calls of 3 to 2048 channels of 7 to 256 pixels a side gained, batches of 1, 8 and 32 (H200, torch 2.11): in
# TF32 1.0 to 3.3 times forward, 0.9 to 4.1 backward but 0.4 with a window of 7 by 7 a channel; bf16 0.9 to 4.8 and 0.95 to 5. In plain float32 they
# lost, 0.6 to 0.95, unless each channel was by itself.
RATES = {("cpu", torch.float32, False): Rates(0.5, 0.4, 0.7, product=(0.05, 0.05)),
         ("cpu", torch.float32, True): Rates(1.7, 0.7, 2.2, product=(0.4, 0.6)),
         ("cpu", torch.bfloat16, False): Rates(0.65, 0.4, 0.2, product=(0.5, 0.3)),
         ("cpu", torch.bfloat16, True): Rates(0.95, 0.4, 0.9, product=(0.6, 0.6)),
         ("cuda", torch.float32, False): Rates(0.002, 0.002, window=9), ("cuda", torch.float32, True): Rates(0.004, 0.008, window=9),
         ("cuda", torch.bfloat16, False): Rates(0.002, 0.003), ("cuda", torch.bfloat16, True): Rates(0.004, 0.01)}
COPIED = {"cpu": 0.6, "cuda": 0.003}            # ns an element that is copied to the other format


def choose_layouts(gm: fx.GraphModule) -> None:
    """Where it pays, lets convolutions of `gm` run channels-last; `meta["layout"]` of each of them says so."""
    chosen = _chosen(gm.graph)
    if chosen:
        with _faked(chosen[0]):
            there = {n for n in chosen if all(_last(n.args[i].meta["val"]) for i in _relaid(n))}
            relaid = _Relaid(gm.graph, {n: n.meta["val"] if n in there else _channels_last(n) for n in chosen})
            if len(there) < len(chosen):
                relaid.run()
            else:
                relaid.mark()
            products = [*filter(is_product, relaid.chosen)]
            for n in products:
                as_products(gm.graph, n)
        if products or len(there) < len(chosen):
            gm.recompile()


# -- what pays -----------------------------------------------------------------------------------------------------------
def _chosen(graph: fx.Graph) -> list[fx.Node]:
    """The convolutions that are to run channels-last."""
    gains = {n: gain(n) for n in graph.nodes if n.target in IMAGES}
    chosen = [n for n, saved in gains.items() if saved > 0]
    if not chosen or _several_devices(graph):
        return []
    device = chosen[0].args[0].meta["val"].device.type
    return chosen if sum(gains[n] for n in chosen) > COPIED[device] * _copied(graph, set(chosen)) else []


def _several_devices(graph: fx.Graph) -> bool:
    """Does the graph compute on several devices? Then torch runs it (`backend._device`), a call after the other: formats gain nothing."""
    values = [v for n in graph.nodes for v in pytree.tree_leaves(n.meta.get("val"))]
    return len({v.device for v in values if isinstance(v, torch.Tensor)}) > 1


def gain(node: fx.Node) -> float:
    """What a convolution saves channels-last, in ns; negative where it loses or where nothing is known of it."""
    forward = node.target is _aten.convolution.default
    weight, groups = node.args[WEIGHT[node.target]], node.args[-1 if forward else -2]
    value, w = node.args[IMAGES[node.target][-1]].meta["val"], weight.meta["val"]
    rates = RATES.get((value.device.type, value.dtype, not forward))
    marked = (node.meta.get("custom") or {}).get(MARK, "fast") != "fast"
    if rates is None or marked or value.dim() not in FORMATS or value.dtype is not w.dtype or not _library(value):
        return -1.0
    images = elements(value) + elements(node.meta["val"] if forward else node.args[0].meta["val"])
    if groups != 1:
        return rates.grouped * images if math.prod(w.shape[2:]) <= rates.window and value.dim() == 4 else -1.0
    if is_product(node):
        return rates.product[0] * images + rates.product[1] * elements(w)
    computed = weight.op == "call_function"         # then it is written as it is read
    return rates.image * images - (0.0 if computed and forward else rates.weight) * elements(w)


def _library(value: torch.Tensor) -> bool:
    """Does a library convolve such images, by instructions that gain?"""
    if value.device.type == "cpu":
        return torch.backends.mkldnn.enabled
    fast = value.dtype is not torch.float32 or _tf32()
    return torch.version.hip is None and torch.backends.cudnn.enabled and fast and value.dim() == 4


def _tf32() -> bool:
    """May convolutions of float32 use TF32 on a GPU?"""
    asked = getattr(torch.backends.cudnn, "conv", None)     # `allow_tf32` raises where the newer settings were used
    return asked.fp32_precision == "tf32" if hasattr(asked, "fp32_precision") else torch.backends.cudnn.allow_tf32


def elements(value: torch.Tensor) -> int:
    """How many it has, at the sizes at hand."""
    return math.prod(s.node.hint or 1 if isinstance(s, torch.SymInt) else s for s in value.shape)


def _copied(graph: fx.Graph, chosen: set[fx.Node]) -> int:
    """Elements that have to be copied to the other format: images that come from elsewhere, what leaves."""
    within: set[fx.Node] = set()
    copied: set[fx.Node] = set()
    for node in graph.nodes:
        if node in chosen:
            copied.update(a for i in IMAGES[node.target] if (a := node.args[i]) not in within and not _last(a.meta["val"]))
            within.add(node)
        elif node.target is getitem and node.args[0] in within:
            if node.args[0] not in chosen or node.args[1] == 0:
                within.add(node)
        elif node.target in TABLE:
            if any(a in within for a in node.all_input_nodes) and _rank(node) in (None, *FORMATS):
                within.add(node)
        else:
            copied.update(a for a in node.all_input_nodes if a in within and _rank(a) in FORMATS)
    return sum(elements(n.meta["val"]) for n in copied)


def _rank(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else None


def _last(value: torch.Tensor) -> bool:
    """Does it lie channels-last?"""
    return value.is_contiguous(memory_format=FORMATS[value.dim()])


# -- carrying it out -----------------------------------------------------------------------------------------------------
@contextmanager
def _faked(node: fx.Node) -> Iterator[None]:
    """Calls on traced tensors give traced tensors; what is asked about their sizes is no condition of the program."""
    mode = node.args[0].meta["val"].fake_mode
    quiet = mode.shape_env.suppress_guards() if mode.shape_env is not None else nullcontext()
    with torch.no_grad(), torch._C._DisableAutocast(), mode, quiet:
        yield


def _channels_last(node: fx.Node) -> Any:
    """What torch returns of a convolution for images channels-last; where it becomes a product, what that makes."""
    if is_product(node):
        old = node.meta["val"]
        return _like(old) if isinstance(old, torch.Tensor) else (old[0] if old[0] is None else _like(old[0]), *old[1:])
    args = list(node.args)
    for i in IMAGES[node.target]:
        args[i] = _like(args[i].meta["val"])
    return node.target(*fx.map_arg(args, _value))


def _relaid(node: fx.Node) -> tuple[int, ...]:
    """Which arguments of a convolution are to lie channels-last: its images, and weights that are computed (others would be copied for it alone)."""
    weight = WEIGHT[node.target]
    return (*IMAGES[node.target], weight) if node.args[weight].op == "call_function" else IMAGES[node.target]


def _like(value: torch.Tensor) -> torch.Tensor:
    """`value` as it would be channels-last."""
    return torch.empty_like(value, memory_format=FORMATS[value.dim()])


class _Relaid:
    """`graph`, whose `chosen` convolutions read channels-last, a call after the other (convolution -> what it returns then). Of each value that lies
    otherwise now, `traced` has what was traced."""

    def __init__(self, graph: fx.Graph, chosen: dict[fx.Node, Any]):
        self.graph = graph
        self.chosen = {n: value for n, value in chosen.items() if (image := pytree.tree_leaves(value)[0]) is None or _last(image)}
        self.traced: dict[fx.Node, Any] = {}
        self.first: dict[fx.Node, fx.Node] = {}         # a value -> the same with the traced strides
        self.last: dict[fx.Node, fx.Node] = {}          # a value -> the same channels-last
        self.copies: set[fx.Node] = set()               # those
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        seen = [*output.all_input_nodes, *(n for n in graph.nodes if n.op in ("placeholder", "get_attr"))]
        self.seen = {storage_of(n.meta.get("val")) for n in seen} - {None}        # memory that others see

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "output":
                node.args = fx.map_arg(node.args, lambda n: self.as_traced(n, node))
            elif node.op == "call_function":
                self.visit(node)

    def mark(self) -> None:
        """All of `chosen` read channels-last as it is: nothing changes but what is said of them."""
        for node in self.chosen:
            node.meta["layout"] = "channels-last"

    def visit(self, node: fx.Node) -> None:
        """Gives one call its arguments, and the strides that follow."""
        if node.target is getitem:
            if node.args[0] in self.traced:
                self.settle(node, node.args[0].meta["val"][node.args[1]])
            return
        if node in self.chosen:
            relaid = _relaid(node)
            args = [self.channels_last(a, node) if i in relaid else self.as_traced(a, node) if isinstance(a, fx.Node) else a
                    for i, a in enumerate(node.args)]
            node.args, node.meta["layout"] = tuple(args), "channels-last"
            self.settle(node, self.chosen[node])
        elif node.target in TABLE and node.target not in _BY_MEMORY and not self.shows_seen(node):
            before = node.args, node.kwargs
            node.args, node.kwargs = fx.map_arg(before, lambda n: self.last.get(n, n))
            if before == (node.args, node.kwargs) and not any(n in self.traced for n in node.all_input_nodes):
                return
            try:
                self.settle(node, self.follows(node))
            except (RuntimeError, ValueError):          # no view of what lies so
                node.args, node.kwargs = fx.map_arg(before, lambda n: self.as_traced(n, node))
        else:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.as_traced(n, node))

    def settle(self, node: fx.Node, value: Any) -> None:
        """`node` has the strides of `value` from now on, but where others see its memory or it lay in no usual order: kernels write any strides."""
        old, made = node.meta["val"], node.args[0] if node.target is getitem else node
        kept = node not in self.chosen and not aliases(made.target)
        keep = lambda a, b: a if not isinstance(a, torch.Tensor) or a.stride() == b.stride() or kept and (self.held(a) or not _usual(a)) else b
        new = type(old)(map(keep, old, value)) if isinstance(old, (tuple, list)) else keep(old, value)
        if any(a is not b for a, b in zip(pytree.tree_leaves(old), pytree.tree_leaves(new))):
            self.traced[node] = old
            node.meta = {**{k: v for k, v in node.meta.items() if k != "tensor_meta"}, "val": new, AS_TRACED: old}

    def follows(self, node: fx.Node) -> Any:
        """The strides that follow from those of what `node` reads: torch's of views and copies, what a kernel makes of images that lie channels-last
        lies so, too."""
        if aliases(node.target) or "memory_format" in node.kwargs:
            return node.target(*fx.map_arg(node.args, _value), **fx.map_arg(node.kwargs, _value))
        values = [v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), torch.Tensor) and (n in self.traced or n in self.copies)]
        ranks = {v.dim() for v in values if v.dim() in FORMATS and _last(v)}
        lies = lambda v: _like(v) if isinstance(v, torch.Tensor) and v.dim() in ranks and v.is_contiguous() and not _last(v) else v
        old = node.meta["val"]
        return type(old)(map(lies, old)) if isinstance(old, (tuple, list)) else lies(old)

    def held(self, value: torch.Tensor) -> bool:
        """Do others see its memory?"""
        return storage_of(value) in self.seen

    def shows_seen(self, node: fx.Node) -> bool:
        """Is it a view of memory that others see?"""
        value = node.meta.get("val")
        return aliases(node.target) and isinstance(value, torch.Tensor) and self.held(value)

    def as_traced(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """`node` with the strides that were traced, for `reader`."""
        if node not in self.traced:
            return node
        if node not in self.first:
            value = self.traced[node]
            if aliases(node.target):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.as_traced(n, reader))
                self.first[node] = self.call(reader, value, node.target, args, kwargs)
            else:
                kind = torch.contiguous_format if value.is_contiguous() else FORMATS[value.dim()]
                self.first[node] = self.call(reader, value, _aten.clone.default, (node,), {"memory_format": kind})
        return self.first[node]

    def channels_last(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """`node` channels-last, for `reader`."""
        value = node.meta["val"]
        if _last(value):
            return node
        if node not in self.last:
            kind = FORMATS[value.dim()]
            self.last[node] = self.call(reader, _like(value), _aten.clone.default, (node,), {"memory_format": kind})
            self.last[node].meta[AS_TRACED] = self.traced.get(node, value)
            self.copies.add(self.last[node])
        return self.last[node]

    def call(self, reader: fx.Node, value: torch.Tensor, target: Callable, args: tuple, kwargs: dict) -> fx.Node:
        with self.graph.inserting_before(reader):
            made = self.graph.call_function(target, args, kwargs)
        made.meta = {**(inherited(reader) if reader.op == "call_function" else {}), "val": value}
        return made


def for_torch(graph: fx.Graph) -> None:
    """Lets torch run `graph`, whose strides are meant for kernels. Calls that kernels would make get their arguments as they were traced: some of
    torch's take image and gradient for the same format (native_group_norm_backward). What they return is laid as the graph says: others see it."""
    kernels = [n for n in graph.nodes if n.op == "call_function" and n.target in TABLE and not aliases(n.target)]
    for node in kernels:
        with graph.inserting_before(node):
            laid = lambda n: graph.call_function(in_order, (n, _order(n.meta[AS_TRACED]))) if _otherwise(n) else n
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), laid)
    for node in list(graph.nodes):
        made, value = node.args[0] if node.target is getitem else node, node.meta.get("val")
        own = made.op == "call_function" and not aliases(made.target) and isinstance(value, torch.Tensor)
        if own and ("layout" in made.meta or _otherwise(node)):
            with graph.inserting_after(node):
                laid = graph.call_function(in_order, (node, _order(value)))
            node.replace_all_uses_with(laid, delete_user_cb=lambda user, laid=laid: user is not laid)


def _otherwise(node: fx.Node) -> bool:
    """Does its value lie otherwise than traced?"""
    traced, value = node.meta.get(AS_TRACED), node.meta.get("val")
    return isinstance(traced, torch.Tensor) and isinstance(value, torch.Tensor) and traced.dim() == value.dim()


def in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """`x`, whose dimensions lie in memory in this order, the outermost first: itself, or a copy."""
    if x.permute(order).is_contiguous():
        return x
    return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device).copy_(x)


def _order(value: torch.Tensor) -> list[int]:
    """The dimensions of a traced tensor as they lie in memory, the outermost first."""
    stride = [s.node.hint or 1 if isinstance(s, torch.SymInt) else s for s in value.stride()]
    return sorted(range(value.dim()), key=lambda i: -stride[i])


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _usual(value: torch.Tensor) -> bool:
    """Is it contiguous, or channels-last?"""
    return value.is_contiguous() or value.dim() in FORMATS and _last(value)
