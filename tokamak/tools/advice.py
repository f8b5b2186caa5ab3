"""What to do about a graph break or a new capture: a line each, by Dynamo's words."""
from __future__ import annotations

import os
import re

import torch

from .dynamo import Break

BREAKS = (
    (r"graph_break\(\)|Call to `torch\._dynamo\.graph_break", "remove the call of torch._dynamo.graph_break()"),
    (r"branches on a tensor's value|generic_jump|[Dd]ata.dependent", "torch.where(condition, a, b) in place of the branch, or torch.cond"),
    (r"\.item\(\)|Tensor\.item|_local_scalar_dense|scalar_outputs", "keep it a tensor, or torch._dynamo.config.capture_scalar_outputs = True"),
    (r"\bprint\b|logging|warnings", "print behind the compiled function, or torch._dynamo.config.reorderable_logging_functions.add(print)"),
    (r"nonzero|dynamic.output|dynamic shape operator", "torch._dynamo.config.capture_dynamic_output_shape_ops = True"),
    (r"torch\.compiler\.disable|disable\(|is marked|skip", "call what is kept out of the compiler before or behind the compiled function"),
    (r"numpy|np\.", "torch's function in place of NumPy's"),
    (r"backward", "call backward behind the compiled function"),
    (r"[Gg]enerator|yield", "return a list in place of a generator"),
    (r"[Uu]nsupported context manager|with ", "enter the context around the compiled function"),
)
RECOMPILES = (
    (r"size mismatch|size\(\)|\.shape", "torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic(x, dimension) before the first call"),
    (r"stride mismatch|stride\(\)", "give it one memory layout: x.contiguous()"),
    (r"dtype mismatch", "cast before the call, so that every call has one type"),
    (r"requires_grad|grad_mode|GRAD_MODE|GLOBAL_STATE|autocast", "make every call under one mode (no_grad, autocast, train or eval)"),
    (r"\.training", "model.eval() or model.train() once, or one compiled function for each"),
    (r"rank mismatch|ndim", "give it one number of dimensions"),
    (r"len\(", "pass lists of one length, or a tensor"),
    (r"== -?[\d.]+(e-?\d+)?\b|== True|== False", "pass a number that changes as a tensor"),
    (r"___check_obj_id|is not|___check_type_id", "pass the same object, or an object of one class, in every call"),
)


def mend(b: Break) -> str:
    """What to do about a graph break."""
    own = os.path.abspath(b.place.file).startswith(os.path.dirname(torch.__file__))
    return "it is in torch's own code: nothing to do" if own else for_break(b.reason)


def for_break(reason: str) -> str:
    return _first(BREAKS, reason, "fullgraph=True raises here, with all that Dynamo knows of it")


def for_recompile(reason: str) -> str:
    return _first(RECOMPILES, reason, "make what the guard names equal in every call")


def _first(table, reason: str, otherwise: str) -> str:
    return next((advice for pattern, advice in table if re.search(pattern, reason)), otherwise)
