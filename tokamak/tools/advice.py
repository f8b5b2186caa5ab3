"""What to do about a graph break or a new capture: a line each, by Dynamo's words. And what to do first, by what a step is bound by."""
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .dynamo import Break

if TYPE_CHECKING:
    from .limits import Row
    from .machine import Peaks
    from .profile import Side

TENSOR = 1.5            # times as fast: where products in another type are, it is worth to try that
LOST = 0.1              # of a step that a single kernel wastes: worth to look at

BREAKS = (
    (r"graph_break\(\)|Call to `torch\._dynamo\.graph_break", "remove the call of torch._dynamo.graph_break()"),
    (r"branches on a tensor's value|generic_jump|[Dd]ata.dependent", "torch.where(condition, a, b) in place of the branch, or torch.cond"),
    (r"\.item\(\)|Tensor\.item|_local_scalar_dense|scalar_outputs", "keep it a tensor, or torch._dynamo.config.capture_scalar_outputs = True"),
    (r"logging\.Logger", "torch._dynamo.config.ignore_logger_methods.add(logging.Logger.warning), or whichever method logs there"),
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


def following(bound: str, side: Side, peaks: Peaks, rows: Sequence[Row], breaks: int, recompiles: int, recorded: bool, device: str) -> str:
    """What to do first about a compiled step that is bound so: what keeps it from being one graph, then by the word."""
    if breaks or recompiles:
        found = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((breaks, "graph break"), (recompiles, "new capture")) if n]
        return f"mend the {' and '.join(found)} below: kernels cannot join what runs apart, and each capture is compiled anew"
    if bound == "overhead":
        if device == "cpu":
            host = f"{side.idle / side.step:.0%}"
            return f"more work a call, such as a larger batch: the host takes {host} of a step of {side.kernels} kernels and calls"
        return ("what CUDA graphs leave out, below; then more work a call, such as a larger batch" if recorded else
                'mode="reduce-overhead": what the host launches is recorded once and replayed')
    products, faster = sum(r.seconds for r in rows if r.dtype == "float32" and r.kind == "arithmetic"), faster_products(peaks)
    if bound == "arithmetic" and faster and 2 * products > sum(r.seconds for r in rows if r.kind == "arithmetic"):
        return faster
    if bound in ("memory", "arithmetic"):
        return 'fewer bits, which change numbers: tokamak.optimize(..., allow=("bf16", "int8")) measures each'
    worst = max(rows, key=lambda r: r.wasted, default=None)
    if worst is None or worst.wasted < LOST * side.step:
        return "more work a call, such as a larger batch: many kernels wait a little each"
    return f"{worst.name} wastes {worst.wasted / side.step:.0%} of the step: " + (
        f"it is torch's own call; {faster}" if worst.opaque and worst.flops and worst.dtype == "float32" and faster else
        "it is torch's own call" if worst.opaque else "tokamak tune tries other schedules" if device != "cpu" else
        f"tokamak verify --extract {worst.name} makes a file that times it alone")


def faster_products(peaks: Peaks) -> str:
    """What makes products of float32 faster on this machine, as measured; '' where nothing does."""
    faster = {k: v / peaks.matmul["float32"] for k, v in peaks.matmul.items()} if peaks.matmul.get("float32") else {}
    if faster.get("tf32", 0) > TENSOR:
        return f'torch.set_float32_matmul_precision("high"): products in TF32 were measured {faster["tf32"]:.1f} times as fast here'
    if faster.get("bfloat16", 0) > TENSOR:
        return f'tokamak.optimize(..., allow="bf16"): products in bfloat16 were measured {faster["bfloat16"]:.1f} times as fast here'
    return ""


def _first(table, reason: str, otherwise: str) -> str:
    return next((advice for pattern, advice in table if re.search(pattern, reason)), otherwise)
