"""AOTAutograd: a Dynamo graph becomes functional graphs of aten calls, one for inference or a pair for training, and each is compiled on its own.

The graphs hold exactly the operations that eager runs (but for the tables of `decompose`). Mutations of inputs stay in the graph as trailing `copy_`
calls.
"""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Callable

import torch
import torch._dynamo
import torch._functorch.config
from torch import fx
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import OutputType
from torch._functorch.aot_autograd import aot_module_simplified

from ..ir.index import as_index
from .again import Pays
from .attended import attended
from .cudnn_plans import plans_apart
from .decompose import ALWAYS, TRAINING
from .few_queries import few_queries
from .hooked import Hooked
from .layouts import choose_layouts, for_torch
from .partition import partition
from .tensor import overlapping

# compile_one(gm, example_inputs, kind) -> boxed function; kind is 'forward', 'backward' or 'inference'
CompileOne = Callable[[fx.GraphModule, Sequence[Any], str], Callable[[list], Any]]


def autograd(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_one: CompileOne, arithmetic_dropout: bool = False,
             parts: bool = False, layouts: bool = False, attention: bool = False, decoding: Callable[[str], bool] = lambda device: True,
             coming: Callable[[fx.GraphModule], None] | None = None, again: Pays | None = None) -> Callable:
    """The function that runs Dynamo's graph `gm`, whose forward, backward and inference graphs `compile_one` has compiled; it is not `hidden`.
    `arithmetic_dropout`: as for `partition`. `parts`: a training step holds the parts of what `decompose` has in TRAINING; which of them backward
    then computes again is the partitioner's choice by their sizes. `layouts`: convolutions run channels-last where that pays. `attention`:
    written out it is the library's, and the library's of few queries to many keys is written out where it will be a kernel: on devices that
    `decoding` is true of. `coming` is told of a backward graph as soon as there is one, before the forward graph is compiled. `again`: as for
    `partition`."""
    hooked = Hooked()

    def compiler(kind: str):
        def compile_kind(graph, inputs):
            _keep_saved()
            if kind != "backward":
                _mark_views(graph)
            if attention and kind == "inference":
                attended(graph)
                few_queries(graph, decoding)
            if layouts and kind == "inference":
                choose_layouts(graph)
            if kind == "inference":
                plans_apart(graph)
            made = hidden(compile_one)(graph, inputs, kind)
            return hooked.forward(made) if kind == "forward" else hooked.backward(made, graph) if kind == "backward" else made
        return compile_kind

    def cut(joint, joint_inputs, **others):
        forward, backward = partition(joint, joint_inputs, arithmetic_dropout=arithmetic_dropout, parts=parts, layouts=layouts, attention=attention,
                                      again=again, **others)
        plans_apart(forward)
        plans_apart(backward)
        if coming is not None:
            coming(backward)
        return forward, backward

    trains = _trains(gm, example_inputs)
    as_results = torch._functorch.config.guess_tangent_strides_as_outputs and not (trains and _overlapping_results(gm))
    with torch._functorch.config.patch(guess_tangent_strides_as_outputs=as_results), _texts_for_readers():
        compiled = aot_module_simplified(
            gm, example_inputs, fw_compiler=compiler("forward"), bw_compiler=_backward(compiler("backward")),
            inference_compiler=compiler("inference"), partition_fn=cut, keep_inference_input_mutations=True,
            decompositions=TRAINING if parts and trains else ALWAYS)
    return compiled


_TEXTS = {"_log_joint_graph": None, "_log_fw_bw_graphs": (None, None)}        # torch's functions that write graphs as text -> no text
_THEIRS = {name: fn for name in _TEXTS if (fn := getattr(graph_compile, name, None)) is not None}


@contextlib.contextmanager
def _texts_for_readers() -> Iterator[None]:
    """torch writes the graphs of a training step as text, a tenth of the time that it takes to trace them: within, only for logs or a cache. Where
    several threads compile, the first that is done brings the text back for all."""
    try:
        for name, fn in _THEIRS.items():
            setattr(graph_compile, name, partial(_if_read, fn, _TEXTS[name]))
        yield
    finally:
        for name, fn in _THEIRS.items():
            setattr(graph_compile, name, fn)


def _if_read(write: Callable, nothing: Any, *args) -> Any:
    """`write(*args)`, the last of which is AOTAutograd's configuration, if what it writes is read; `nothing` otherwise."""
    logged = any(log.isEnabledFor(logging.INFO) for log in (graph_compile.aot_joint_log, graph_compile.aot_graphs_log))
    return write(*args) if logged or torch._logging._internal.trace_log.handlers or args[-1].cache_info is not None else nothing


def _overlapping_results(gm: fx.GraphModule) -> bool:
    """May two elements of a result be one in memory (windows of an unfold)? torch copies gradients into the strides of results, where they
    would write over each other."""
    results = (n.meta.get("example_value") for n in gm.graph.output_node().all_input_nodes)
    static = (x for x in results if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x._has_symbolic_sizes_strides)
    return any(overlapping([as_index(n) for n in x.shape], [as_index(s) for s in x.stride()]) for x in static)


def _keep_saved() -> None:
    """No program of ours writes what forward has saved, so backward may be asked for again (retain_graph); torch takes the opposite for granted."""
    context = torch._guards.TracingContext.try_get()
    if getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None):
        context.fw_metadata.bw_donated_idxs = []


def _mark_views(gm: fx.GraphModule) -> None:
    """Notes in `gm` (`meta["views"]` of its output) which results are views of a written input where a size says: position -> (the input, a fake
    tensor that lies there, where in the input it begins). torch makes those anew of the input, by the shape, strides and offset of what the graph
    returns; but the graph returns a view of what is copied into the input, which may lie otherwise."""
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if metadata is None or metadata.tokens:
        return
    *given, output = (n for n in gm.graph.nodes if n.op in ("placeholder", "output"))
    found, first = {}, metadata.num_mutated_inp_runtime_indices
    for position, info in enumerate(metadata.output_info, first):
        changes = getattr(getattr(info, "view_meta_sequence", None), "sequence", ())
        written = info.output_type is OutputType.alias_of_input and metadata.input_info[info.base_idx].mutates_data
        if written and any(c.has_symbolic_inputs for c in changes):
            base = given[info.base_idx]
            view = torch._C._functionalization.apply_view_meta_sequence(base.meta["val"], changes)
            found[position] = base.name, view, view.storage_offset() - base.meta["val"].storage_offset()
    output.meta["views"] = found


def _trains(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Will there be a backward graph?"""
    tensors = (x for x in (*example_inputs, *gm.parameters()) if isinstance(x, torch.Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def hidden(fn: Callable) -> Callable:
    """`fn`, whose own Python is not to be captured. Dynamo puts the same around what a backend gives it, in place of one that is outermost; one
    further in would be a second at every call."""
    return torch._dynamo.disable(fn, reason="code of the compiler")


def _backward(compiler: Callable) -> Callable:
    """The backward graph may be compiled, and is run, while Dynamo is active (in a compiled optimizer step, say): hide both."""
    def compile_backward(graph, inputs):
        return hidden(compiler(graph, inputs))
    return compile_backward


def eager(gm: fx.GraphModule) -> Callable[[list], Any]:
    """`gm` itself, run by torch, in the boxed convention (inputs are freed at their last use)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for_torch(graph)
    graph.set_codegen(fx.graph._BoxedCodeGen())
    copy = fx.GraphModule(gm, graph)

    def run(args: list):
        return copy(args)
    run._boxed_call = True
    return run
