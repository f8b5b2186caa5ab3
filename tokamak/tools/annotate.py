"""The text of a kernel for people: the generated C or Triton without its vocabulary, under a header that says what the kernel does and what its
parameters are, every statement with the value of the user's program that it computes. The text that is built stays canonical and nameless."""
from __future__ import annotations

from ..codegen import c_listing, triton_listing
from ..codegen.tile_kernel import TileKernel
from .kernels import KernelInfo, Launched
from .names import count_text, resources_text, size_text
from .record import GraphRecord
from .values import register_names


def kernel_text(record: GraphRecord, x: Launched, info: KernelInfo) -> str:
    """The annotated text of a kernel."""
    comments = {**register_names(record, x.group, x.kernel), **parameter_comments(info, x.kernel)}
    if isinstance(x.kernel, TileKernel):
        mark, text = "#", triton_listing.listing(x.kernel, x.name, comments)
    else:
        mark, text = "//", c_listing.listing(x.kernel, comments)
    return "\n".join(f"{mark} {line}" if line else mark for line in header(record, info)) + "\n" + text


def header(record: GraphRecord, info: KernelInfo) -> list[str]:
    """What the kernel is, in lines."""
    where = f" of {info.module}" if info.module else ""
    ratio = f", {info.bytes / info.fewest:.2f} times the fewest possible" if info.bytes > info.fewest else ", the fewest possible"
    read, written = (size_text(sum(a.bytes for a in found)) for found in (info.reads, info.writes))
    return [f"{info.name}: {record.kind}{where}",
            *(f"    {s.file}:{s.line}    {s.code}" for s in info.sources),
            f"operations: {', '.join(info.operations)}",
            f"memory: reads {read}, writes {written}{ratio}; {count_text(info.flops)} floating-point operations",
            f"schedule: {info.schedule}",
            *([f"programs: {info.programs}"] if info.programs else []),
            *([f"takes: {used}"] if (used := resources_text(info)) else [])]


def parameter_comments(info: KernelInfo, kernel) -> dict[str, str]:
    """Parameter -> what it is."""
    types = {a.name: a.type for a in (*info.reads, *info.writes)}
    return {name: f"{text}: {types[text]}" if p.kind == "memory" and text in types else text for p, (name, text) in zip(kernel.params, info.words)}
