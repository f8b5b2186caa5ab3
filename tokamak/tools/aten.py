"""The graph of aten calls as eager would run it, and the user's names of what goes in and out."""
from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..capture.origins import origin
from ..ir.graph import Origin
from .sources import Source, source_of


@dataclass(frozen=True)
class AtenCall:
    """A call that eager makes. `reads`, `writes`: how many tensors; bytes count each element that a tensor shows once. `view`: it moves nothing."""
    name: str
    op: str
    origin: Origin
    view: bool
    reads: int
    writes: int
    bytes_read: int
    bytes_written: int

    @property
    def source(self) -> Source | None:
        return source_of(self.origin)


def aten_calls(gm: fx.GraphModule) -> Iterator[AtenCall]:
    """The calls of a graph of aten operations. A view moves nothing, nor does the copy into an input with which a functional graph ends: eager's call
    has written there itself. Everything else reads its tensor arguments and writes its results."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
            continue
        target = node.args[0] if node.target is torch.ops.aten.copy.default else None           # it is only written
        read = [v for n in node.all_input_nodes if n is not target for v in tensors(n)]
        wrote = tensors(node)
        storages = {storage(v) for v in read}
        view = bool(wrote) and target is None and all(storage(v) in storages for v in wrote) or not read and not wrote
        view |= node.target is torch.ops.aten.copy_.default
        yield AtenCall(node.name, getattr(node.target, "__name__", str(node.target)), origin(node), view, 0 if view else len(read),
                       0 if view else len(wrote), 0 if view else sum(map(tensor_bytes, read)), 0 if view else sum(map(tensor_bytes, wrote)))


def storage(v: torch.Tensor) -> int:
    """What two tensors that share memory have in common; sparse tensors share none."""
    return v.untyped_storage()._cdata if v.layout is torch.strided else id(v)


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that an FX node stands for."""
    val = node.meta.get("val")
    return [v for v in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(v, torch.Tensor)]


def tensor_bytes(v: torch.Tensor) -> int:
    """Bytes of the elements that `v` shows, each once; symbolic sizes by their hints."""
    count = 1
    for extent, stride in zip(v.shape, v.stride() if v.layout is torch.strided else (1,) * v.dim()):
        count *= 1 if isinstance(stride, int) and stride == 0 else size_hint(extent)
    return count * v.element_size()


def size_hint(extent) -> int:
    """An extent as a number, for estimates: 64 where torch has seen none."""
    if isinstance(extent, int):
        return extent
    hint = extent.node.hint if extent.node.has_hint() else None
    return int(hint) if hint is not None else 64


def labels(gm: fx.GraphModule, inputs: tuple[str, ...]) -> dict[str, str]:
    """Value of the aten graph -> the user's name of it, for inputs and outputs. `inputs`: the names of Dynamo's inputs."""
    found = {n.name: described(n.meta.get("desc"), inputs) for n in gm.graph.nodes if n.op == "placeholder"}
    for node, text in zip(output_nodes(gm), output_labels(gm, inputs)):
        while isinstance(node, fx.Node) and not found.get(node.name):
            found[node.name] = text
            node = viewed(node)
    return {name: label for name, label in found.items() if label}


def output_nodes(gm: fx.GraphModule) -> tuple:
    """What the graph returns: FX nodes and plain values."""
    found = gm.graph.output_node().args[0]
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def output_labels(gm: fx.GraphModule, inputs: tuple[str, ...]) -> tuple[str, ...]:
    """The user's name of each output, '' for what has none."""
    descriptions = gm.graph.output_node().meta.get("desc") or ()
    return tuple(described(d, inputs) or result_name(n) for n, d in zip(output_nodes(gm), descriptions))


def result_name(node) -> str:
    """A name for one result of a call that has several, by which a later graph calls it too."""
    taken = isinstance(node, fx.Node) and node.target is operator.getitem
    return f"{node.name} ({node.args[0].name})" if taken else ""


def viewed(node: fx.Node) -> fx.Node | None:
    """The value of which `node` is a view that shows all of it, in another shape perhaps; or None."""
    made, read = tensors(node), [t for n in node.all_input_nodes for t in tensors(n)]
    whole = len(made) == len(read) == 1 and storage(made[0]) == storage(read[0]) and tensor_bytes(made[0]) == tensor_bytes(read[0])
    return next(n for n in node.all_input_nodes if tensors(n)) if whole else None


def described(desc, inputs: tuple[str, ...]) -> str:
    """AOTAutograd's description of an input or output in the user's words; '' for what has none."""
    kind = type(desc).__name__
    if kind == "PlainAOTInput":
        return inputs[desc.idx] if desc.idx < len(inputs) else ""
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        return desc.target
    if kind == "PlainAOTOutput":
        return f"output {desc.idx}"
    about = getattr(desc, "output", None) or getattr(desc, "grad_of", None)
    inner = described(about, inputs) if kind in ("TangentAOTInput", "GradAOTOutput") else ""
    return f"gradient of {inner}" if inner else ""
