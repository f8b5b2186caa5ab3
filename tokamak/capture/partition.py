"""The joint graph of forward and backward is cut in two: what forward keeps for backward, and what backward computes again.

torch's min-cut partitioner decides, by bytes and by which operations it takes to be free. It takes an operation that it does not know to fuse for a
reader that needs its argument in memory anyway, and saves that: so nodes that compute nothing are removed first, and it is told of the operators that
the tables build (a loss reads log-probabilities in registers: saving them would keep the logits in float32). Where it keeps a view of an input or a
result, that tensor itself is kept: autograd refuses backward where one has been written since, and knows nothing of views that our programs make.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from operator import getitem

import networkx
import torch
from torch import fx
from torch._functorch import partitioners

from .again import AGAIN, mark, Pays, TAKEN_IN
from .attended import attended
from .compared import keep_compared
from .decompose import TRACED
from .equal import equal_calls_once
from .flow import minimum_cut
from .layouts import choose_layouts
from .regions import viewed
from .registry import TABLE
from .replaced import replace as replace_operators
from .windows import places_in_windows
from .written import copy_written, without_copies

_aten = torch.ops.aten
IDENTITIES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}      # in a functional graph: their argument

_LISTING = threading.Lock()


def partition(joint: fx.GraphModule, joint_inputs, *, num_fwd_outputs: int, arithmetic_dropout: bool = False, parts: bool = False,
              layouts: bool = False, attention: bool = False, again: Pays | None = None, **others) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) graphs of `joint`. The arguments are those of torch's partition functions, whether what dropout leaves may be computed
    again of its mask, whether backward may read `parts` of operators in the place of what they return, and whether convolutions may run
    channels-last (`layouts`), whether attention written out may be the library's (`attention`), and which products between narrow layers backward
    may make `again`."""
    without_identities(joint)
    if attention:
        attended(joint, results=num_fwd_outputs)
    if layouts:
        choose_layouts(joint)
    if parts:
        places_in_windows(joint)
        replace_operators(joint, TRACED)
    if arithmetic_dropout:
        dropout_of_masks(joint)
    if again is not None:
        mark(joint, again)
    keep_compared(joint)
    copies = copy_written(joint)
    with _fusible({getattr(o, "overloadpacket", o) for o in TABLE}):
        forward, backward = partitioners.min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **others)
    without_copies(forward, copies)
    return forward, backward


class _Types(partitioners.OpTypes):
    """What torch's partitioner asks of a node, with the marks of `again`."""

    def is_fusible(self, node: fx.Node) -> bool:
        return TAKEN_IN in node.meta or super().is_fusible(node)

    def is_recomputable(self, node: fx.Node) -> bool:
        return AGAIN in node.meta or super().is_recomputable(node)

    def is_compute_intensive(self, node: fx.Node) -> bool:
        return AGAIN not in node.meta and super().is_compute_intensive(node)


@contextlib.contextmanager
def _fusible(operators: set) -> Iterator[None]:
    """torch's partitioner takes `operators`, too, to be fusible, cuts and finds equal calls our way, and keeps tensors where it would keep views of
    them. These are functions of modules: there is no parameter."""
    with _LISTING:
        theirs, usual_cut, usual_calls = partitioners.get_default_op_list, networkx.minimum_cut, partitioners.fx_graph_cse
        usual_parts = partitioners._extract_fwd_bwd_modules
        known = theirs()
        fusible = known.fusible_ops | (operators - set(known.compute_intensive_ops))
        ours = _Types(**{**vars(known), "fusible_ops": fusible})
        partitioners.get_default_op_list, networkx.minimum_cut, partitioners.fx_graph_cse = lambda: ours, minimum_cut, equal_calls_once
        partitioners._extract_fwd_bwd_modules = functools.partial(_keeping_tensors, usual_parts)
        try:
            yield
        finally:
            partitioners.get_default_op_list, networkx.minimum_cut, partitioners.fx_graph_cse = theirs, usual_cut, usual_calls
            partitioners._extract_fwd_bwd_modules = usual_parts


def _keeping_tensors(extract: Callable, joint: fx.GraphModule, saved: list[fx.Node], saved_sym_nodes: list[fx.Node], *, num_fwd_outputs: int,
                     **others) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's `extract`, by which `joint` falls into forward and backward around what is `saved`. Of views of an input or a result that is the tensor
    itself, and of `saved_sym_nodes` the sizes that backward then makes the view by."""
    results = {n for n in joint.graph.output_node().args[0][:num_fwd_outputs] if isinstance(n, fx.Node)}
    kept = []
    for node in saved:
        chain = list(viewed(node))
        seen = [n for n in chain if n in results or n.op == "placeholder"]
        kept.append(seen[-1] if seen and "saved_tensor_with_no_vc_check" not in node.meta else node)
        asked = [a for n in chain[:chain.index(kept[-1])] for a in n.all_input_nodes if isinstance(a.meta.get("val"), torch.SymInt)]
        saved_sym_nodes += [a for a in dict.fromkeys(asked) if a not in saved_sym_nodes]
    saved[:] = dict.fromkeys(kept)
    return extract(joint, saved, saved_sym_nodes=saved_sym_nodes, num_fwd_outputs=num_fwd_outputs, **others)


def without_identities(joint: fx.GraphModule) -> None:
    """Removes the calls of `joint` that only hand on their argument (what autograd saves, it detaches)."""
    for node in joint.graph.nodes:
        if node.target in IDENTITIES and _same_value(node):
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    joint.recompile()


def _same_value(node: fx.Node) -> bool:
    """The argument may stand in the place of `node`: neither is a result of the graph, whose aliases the caller has been told of."""
    return not any(user.op == "output" for user in node.users)


def dropout_of_masks(joint: fx.GraphModule) -> None:
    """What a dropout of `joint` leaves becomes a product with its mask: numbers that are drawn cannot be computed again, products can."""
    for node in joint.graph.nodes:
        if node.target is _aten.native_dropout.default and isinstance(node.args[1], float) and 0 < node.args[1] < 1 and node.args[2] is not False:
            _arithmetic(joint.graph, node)
    joint.recompile()


def _arithmetic(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrites one dropout whose result and mask are both read."""
    found = {i: [u for u in node.users if u.target is getitem and u.args[1] == i] for i in (0, 1)}
    x, (kept, mask_value) = node.args[0], node.meta["val"]
    if not found[0] or not found[1]:
        return
    wide = torch.float32 if kept.dtype in (torch.float16, torch.bfloat16) else kept.dtype
    at = node

    def call(target, args, kwargs, value) -> fx.Node:
        nonlocal at
        with graph.inserting_after(at):
            at = graph.call_function(target, args, kwargs)
        at.meta = {**node.meta, "val": value}
        return at

    def step(target, *args, **kwargs) -> fx.Node:
        with kept.fake_mode:
            value = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args), **kwargs)
        return call(target, args, kwargs, value)
    mask = call(getitem, (node, 1), {}, mask_value)
    made = step(_aten.mul.Tensor, step(_aten._to_copy.default, x, dtype=wide), step(_aten._to_copy.default, mask, dtype=wide))
    made = step(_aten._to_copy.default, step(_aten.mul.Tensor, made, 1 / (1 - node.args[1])), dtype=kept.dtype)
    if made.meta["val"].stride() != kept.stride():
        return
    for old, new in ((0, made), (1, mask)):
        for user in found[old]:
            user.replace_all_uses_with(new)
            graph.erase_node(user)
