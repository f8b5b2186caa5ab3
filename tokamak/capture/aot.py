"""AOTAutograd: a Dynamo graph becomes functional graphs of aten calls, one for inference or a pair for training, and each is compiled on its own.

No decompositions: the graphs hold exactly the operations that eager runs. Mutations of inputs stay in the graph as trailing `copy_` calls.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition

# compile_one(gm, example_inputs, kind) -> boxed function; kind is 'forward', 'backward' or 'inference'
CompileOne = Callable[[fx.GraphModule, Sequence[Any], str], Callable[[list], Any]]


def autograd(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_one: CompileOne) -> Callable:
    """The function that runs Dynamo's graph `gm`, whose forward, backward and inference graphs `compile_one` has compiled."""
    def compiler(kind: str):
        return lambda graph, inputs: _hidden(compile_one)(graph, inputs, kind)

    compiled = aot_module_simplified(
        gm, example_inputs, fw_compiler=compiler("forward"), bw_compiler=_backward(compiler("backward")), inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True)
    return _hidden(compiled)


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
