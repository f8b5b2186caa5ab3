"""AOTAutograd: a Dynamo graph becomes functional graphs of aten calls, one for inference or a pair for training, and each is compiled on its own.

The graphs hold exactly the operations that eager runs (but for `DECOMPOSITIONS`). Mutations of inputs stay in the graph as trailing `copy_` calls.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch
import torch._dynamo
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

from .partition import partition

# compile_one(gm, example_inputs, kind) -> boxed function; kind is 'forward', 'backward' or 'inference'
CompileOne = Callable[[fx.GraphModule, Sequence[Any], str], Callable[[list], Any]]


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """log_softmax in its parts, so that the partitioner can save a row's maximum and logarithm in place of all its elements."""
    if any(isinstance(s, int) and s == 0 for s in x.shape):
        return NotImplemented
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    shifted = wide - wide.amax(dim, keepdim=True)
    out = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return out if half_to_float else out.to(x.dtype)


# Whole operators in whose place the joint graph holds their parts, because of what backward then needs to be saved; everything else stays whole.
DECOMPOSITIONS = {torch.ops.aten._log_softmax.default: _log_softmax}


def autograd(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_one: CompileOne) -> Callable:
    """The function that runs Dynamo's graph `gm`, whose forward, backward and inference graphs `compile_one` has compiled."""
    def compiler(kind: str):
        def compile_kind(graph, inputs):
            _keep_saved()
            return _hidden(compile_one)(graph, inputs, kind)
        return compile_kind

    compiled = aot_module_simplified(
        gm, example_inputs, fw_compiler=compiler("forward"), bw_compiler=_backward(compiler("backward")), inference_compiler=compiler("inference"),
        partition_fn=partition, keep_inference_input_mutations=True, decompositions=DECOMPOSITIONS)
    return _hidden(compiled)


def _keep_saved() -> None:
    """No program of ours writes what forward has saved, so backward may be asked for again (retain_graph); torch takes the opposite for granted."""
    context = torch._guards.TracingContext.try_get()
    if getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None):
        context.fw_metadata.bw_donated_idxs = []


def _hidden(fn: Callable) -> Callable:
    """`fn`, whose own Python is not to be captured."""
    return torch._dynamo.disable(fn, reason="code of the compiler")


def _backward(compiler: Callable) -> Callable:
    """The backward graph may be compiled, and is run, while Dynamo is active (in a compiled optimizer step, say): hide both."""
    def hidden(graph, inputs):
        return _hidden(compiler(graph, inputs))
    return hidden


def eager(gm: fx.GraphModule) -> Callable[[list], Any]:
    """`gm` itself, run by torch, in the boxed convention (inputs are freed at their last use)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.set_codegen(fx.graph._BoxedCodeGen())
    copy = fx.GraphModule(gm, graph)

    def run(args: list):
        return copy(args)
    run._boxed_call = True
    return run
