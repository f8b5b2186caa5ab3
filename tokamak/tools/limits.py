"""What each kernel and call of torch took against what it could have taken.

    limit      the longer of two times: what its bytes take at the speed of a copy of that size, each memory once; what its operations take at the
               rate of a large product of their type. Both rates are measured on this machine (`machine.py`)
    wasted     time - limit: what is lost, and the order of the table

A kernel's class is the first of these that holds:

    launch      it takes at most twice the shortest kernel there is: to start it is what it costs
    memory      bytes are the longer limit, and it reaches at least half of it
    arithmetic  operations are the longer limit, and it reaches at least half of it
    latency     it reaches half of neither: it waits, for what it loads or for its own results

A step is bound by overhead where the device does nothing in more than a quarter of it (launches count as such); else by the class that takes the
largest part of the time in which it works.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from ..runtime.program import Call, Launch
from ..target import tf32_allowed
from .aten import size_hint
from .kernels import KernelInfo, Opaqued, kernels, launched, opaques
from .machine import Peaks
from .record import GraphRecord

SHORTEST, REACHED, IDLE = 2.0, 0.5, 0.25
ATEN = torch.ops.aten
# operator without a formula of torch's -> one that has it, with the same arguments
COUNTED_AS = {ATEN._scaled_dot_product_flash_attention_for_cpu: ATEN._scaled_dot_product_flash_attention,
              ATEN._scaled_dot_product_flash_attention_for_cpu_backward: ATEN._scaled_dot_product_flash_attention_backward}


@dataclass(frozen=True)
class Row:
    """A kernel, or a call of torch (`opaque`: why it is one), or several equal ones, `calls` of them a step: their seconds, bytes (`fewest`: each
    memory once) and FLOPs (made in `dtype`) together. `phase`: forward, backward, inference or optimizer. `positions`: (graph, position) of each in
    its program."""
    name: str
    phase: str
    module: str
    source: str
    calls: int
    seconds: float
    bytes: int
    fewest: int
    flops: int
    limit: float
    kind: str
    schedule: str = ""
    registers: int | None = None
    spilled: int | None = None
    opaque: str = ""
    dtype: str = "float32"
    positions: tuple[tuple[str, int], ...] = ()

    @property
    def fraction(self) -> float:
        """Of its limit that it reaches, at most 1."""
        return min(1.0, self.limit / self.seconds) if self.seconds else 1.0

    @property
    def wasted(self) -> float:
        return self.seconds * (1 - self.fraction)


def rows(records: Sequence[GraphRecord], seconds: Mapping[tuple[str, int], float], peaks: Peaks) -> list[Row]:
    """Every kernel and call that was timed, equal ones together, the most wasteful first."""
    found: dict[tuple, Row] = {}
    for record in records:
        for key, row in _rows(record, seconds, peaks):
            before = found.get(key)
            found[key] = row if before is None else together(before, row)
    made = [replace(r, kind=kind_of(r, peaks)) for r in found.values()]
    return sorted(made, key=lambda r: -r.wasted)


def _rows(record: GraphRecord, seconds: Mapping, peaks: Peaks):
    program = record.values.get("program")
    if program is None or record.eager:
        return
    phase = phase_of(record)
    infos = {id(x.launch): info for x, info in zip(launched(record), kernels(record), strict=True)}
    calls = iter(opaques(record))
    for position, step in enumerate(program.steps):
        took = seconds.get((record.name, position))
        if isinstance(step, Launch):
            if took is not None:
                info = infos[id(step)]
                yield (phase, info.key, info.bytes), kernel_row(info, phase, (record.name, position), took, peaks)
        elif isinstance(step, Call) and step.target is not torch.autograd.graph.increment_version:
            call = next(calls)
            if took is not None and call.reads + call.writes:
                row = call_row(record, call, phase, (record.name, position), took, peaks)
                yield (phase, call.op, row.bytes, row.flops), row


def kernel_row(info: KernelInfo, phase: str, at: tuple[str, int], took: float, peaks: Peaks) -> Row:
    limit = max(peaks.memory_seconds(info.fewest), peaks.arithmetic_seconds(info.flops, info.dtype))
    return Row(info.name, phase, info.module, str(info.sources[0]) if info.sources else "", 1, took, info.bytes, info.fewest, info.flops, limit, "",
               info.schedule, info.registers, info.spilled, dtype=info.dtype, positions=(at,))


def call_row(record: GraphRecord, call: Opaqued, phase: str, at: tuple[str, int], took: float, peaks: Peaks) -> Row:
    flops, kind = arithmetic(record, call.name)
    limit = max(peaks.memory_seconds(call.bytes), peaks.arithmetic_seconds(flops, kind))
    return Row(call.op, phase, call.module, str(call.source or ""), 1, took, call.bytes, call.bytes, flops, limit, "",
               opaque=call.reason, dtype=kind, positions=(at,))


def together(a: Row, b: Row) -> Row:
    """Equal kernels of several places as one."""
    parts, others = a.module.split("."), b.module.split(".")
    module = ".".join(x if x == y else "*" for x, y in zip(parts, others)) if len(parts) == len(others) else a.module
    return replace(a, module=module, calls=a.calls + b.calls, seconds=a.seconds + b.seconds, bytes=a.bytes + b.bytes, fewest=a.fewest + b.fewest,
                   flops=a.flops + b.flops, limit=a.limit + b.limit, positions=a.positions + b.positions)


def kind_of(r: Row, peaks: Peaks) -> str:
    """The class of a row, by the rule above."""
    each = r.seconds / r.calls
    if each <= SHORTEST * peaks.launch:
        return "launch"
    if r.fraction < REACHED:
        return "latency"
    return "memory" if peaks.memory_seconds(r.fewest / r.calls) >= r.limit / r.calls * (1 - 1e-9) else "arithmetic"


def bound(found: Sequence[Row], step: float, busy: float) -> tuple[str, str]:
    """(what a step is bound by, why in words)."""
    launches = sum(r.seconds for r in found if r.kind == "launch")
    working = max(busy - launches, 0.0)
    idle = 1 - working / step if step else 0.0
    if idle > IDLE:
        return "overhead", f"{idle:.0%} of the step is no work of a kernel: the host, gaps, and kernels that take no longer than to start them"
    shares = {kind: sum(r.seconds for r in found if r.kind == kind) for kind in ("memory", "arithmetic", "latency")}
    kind = max(shares, key=shares.__getitem__)
    total = sum(shares.values())
    return kind, f"{shares[kind] / total:.0%} of the time in kernels is of that class" if total else "no kernel was timed"


def phase_of(record: GraphRecord) -> str:
    """forward, backward or inference, as AOTAutograd says; optimizer, where the code is torch's own."""
    files = [c.origin.file.replace("\\", "/") for c in record.calls if c.origin.file]
    return "optimizer" if files and sum("/torch/optim/" in f for f in files) > len(files) / 2 else record.kind


def arithmetic(record: GraphRecord, name: str) -> tuple[int, str]:
    """(floating-point operations of the aten call `name`, by torch's own formulas; the type they are made in): 0 for what has no formula."""
    return record.once(f"arithmetic of {name}", lambda: _arithmetic(record, name))


def _arithmetic(record: GraphRecord, name: str) -> tuple[int, str]:
    node = record.once("aten nodes", lambda: {n.name: n for n in record.values["aten"].graph.nodes}).get(name)
    operator = getattr(getattr(node, "target", None), "overloadpacket", None)
    formula = flop_registry.get(COUNTED_AS.get(operator, operator))
    if formula is None:
        return 0, "float32"
    value = lambda n: n.meta.get("val")
    out = value(node)
    tensor = next((t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, torch.Tensor)), None)
    kind = str(tensor.dtype).removeprefix("torch.") if tensor is not None else "float32"
    if kind == "float32" and tensor.device.type == "cuda" and tf32_allowed():
        kind = "tf32"
    try:
        return size_hint(formula(*map_arg(node.args, value), **map_arg(node.kwargs, value), out_val=out)), kind
    except (TypeError, AssertionError, AttributeError):         # an overload that the formula was not written for
        return 0, kind
