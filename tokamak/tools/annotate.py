"""The C of a kernel for people: the generated text without its vocabulary, under a header that says what the kernel does and what its parameters are,
every statement with the value of the user's program that it computes. The text that is built stays canonical and nameless."""
from __future__ import annotations

from ..codegen.c_listing import listing
from ..fuse.axes import Group
from .kernels import KernelInfo
from .names import count_text, size_text
from .record import GraphRecord
from .values import register_names


def kernel_text(record: GraphRecord, group: Group, info: KernelInfo) -> str:
    """The annotated C of the kernel of `group`."""
    kernel = record.values["lower"].kernels[group]
    comments = {**parameter_comments(info, kernel), **register_names(record, kernel)}
    return "\n".join(f"// {line}" if line else "//" for line in header(record, info)) + "\n" + listing(kernel, comments)


def header(record: GraphRecord, info: KernelInfo) -> list[str]:
    """What the kernel is, in lines."""
    where = f" of {info.module}" if info.module else ""
    ratio = f", {info.bytes / info.fewest:.2f} times the fewest possible" if info.bytes > info.fewest else ", the fewest possible"
    read, written = (size_text(sum(a.bytes for a in found)) for found in (info.reads, info.writes))
    return [f"{info.name}: {record.kind}{where}",
            *(f"    {s.file}:{s.line}    {s.code}" for s in info.sources),
            f"operations: {', '.join(info.operations)}",
            f"memory: reads {read}, writes {written}{ratio}; {count_text(info.flops)} floating-point operations",
            f"schedule: {info.schedule}"]


def parameter_comments(info: KernelInfo, kernel) -> dict[str, str]:
    """Parameter -> what it is."""
    types = {a.name: a.type for a in (*info.reads, *info.writes)}
    return {name: f"{text}: {types[text]}" if p.kind == "memory" and text in types else text for p, (name, text) in zip(kernel.params, info.words)}
