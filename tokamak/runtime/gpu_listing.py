"""Changes of the assembly (PTX) that Triton prints, for sm_90, before NVIDIA's assembler sees it."""
from __future__ import annotations

import re
from collections.abc import Callable

from . import gpu_code

# -- copies that leave the cache first -----------------------------------------------------------------------------------------
_LEAVES_FIRST = "eviction_policy='evict_first'"
_COPY = re.compile(r"(cp\.async\.c[ag]\.shared\.global)(\s+\[[^\]]*\], \[[^\]]*\][^;]*);")
_PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_BASE = re.compile(r"mov\.b32\s+(%r\d+), global_smem;")
_POLICY = """createpolicy.fractional.L2::evict_first.b64 %leaves, 1.0;
	mov.u32 %nothing, %tid.x;
	shr.u32 %nothing, %nothing, 20;
	"""


def lines_that_leave_first(text: str) -> frozenset[int]:
    """The numbers of a text's lines that read what leaves the cache first."""
    return frozenset(n for n, line in enumerate(text.splitlines(), 1) if _LEAVES_FIRST in line)


def leaving_first(ptx: str, lines: frozenset[int]) -> str:
    """Assembly whose asynchronous copies have the policy where they were written in these lines of the kernel's file. Where a copy's address in
    shared memory is the sum of a register and one of the warp's, NVIDIA's assembler (of CUDA 12.8 to 13.3) takes an instruction whose registers
    it writes down wrong (`gpu_code.misplaced`): so the base is no warp's, by a zero that each thread computes."""
    out, here, copied, kernels = [], False, False, re.findall(r'\.file\s+(\d+)\s+"[^"]*<tokamak', ptx)
    for line in ptx.split("\n"):
        if (place := _PLACE.search(line)) is not None:
            here = place[1] in kernels and int(place[2]) in lines
        changed = _COPY.sub(r"\1.L2::cache_hint\2, %leaves;", line) if here else line
        copied = copied or changed is not line
        out.append(_BASE.sub(r"mov.b32 \1, global_smem;\n\tadd.s32 \1, \1, %nothing;", changed))
    text, begin = "\n".join(out), ptx.find(".reg")
    first = text.find("ld.param")
    if not copied or not 0 <= begin < first:
        return ptx
    return f"{text[:begin]}.reg .b64 %leaves;\n\t.reg .b32 %nothing;\n\t{text[begin:first]}{_POLICY}{text[first:]}"


# -- registers that the assembler leaves ---------------------------------------------------------------------------------------
_THREADS = re.compile(r"^\.reqntid .*$", re.M)
MUCH = 0.75             # of the registers that a program may have


def with_room(ptx: str, assemble: Callable[[str], bytes], name: str, warps: int) -> str:
    """`ptx`, or the same with all registers that a program of so many `warps` may have allowed by name. Where NVIDIA's assembler (of CUDA 12.8) finds
    that a thread's values fit no registers, it sometimes takes as few as let a multiprocessor run all threads that it can, and spills the more:
    LayerNorm's gradient modulated of 451 x 9 x 1638 f32 by 32 warps 32 registers and 584 bytes of stack, of 64 allowed ones 64 and 296. Taken where
    that spills less."""
    registers, stack = gpu_code.resources(assemble(ptx), name)
    room = min(255, 65536 // (32 * warps))
    if not stack or registers > MUCH * room or ".maxnreg" in ptx or _THREADS.search(ptx) is None:
        return ptx
    changed = _THREADS.sub(lambda found: f"{found[0]}\n.maxnreg {room}", ptx, count=1)
    return changed if gpu_code.resources(assemble(changed), name)[1] < stack else ptx


# -- reads that are waited for together ---------------------------------------------------------------------------------------
_READS = re.compile(r"\bld\.global")
_BETWEEN = re.compile(r"^\$L|\b(bar|mbarrier|st|red|atom|shfl|bra)\b", re.M)          # what a read does not pass
_END = re.compile(r"\s*// end inline asm")
_FENCE = "\tfence.acq_rel.cta;"
_COPIES_TILES = "cp.async.bulk.tensor"          # fences tried for nothing took 0.27 s of the 0.97 in which a product of 12608 x 768 x 3072 was there
FEWER, GAIN, ENOUGH = 0.9, 1.15, 100


def waiting_together(ptx: str, assemble: Callable[[str], bytes], name: str, warps: int, shared: int, few: int = 0) -> str:
    """`ptx`, or the same with fences behind its reads. NVIDIA's assembler (of CUDA 12.8) puts what uses an element between the reads of others, to
    have few registers alive, and a warp then waits for memory as often as it reads: a fence of the program's scope, one instruction, makes it read
    first. Tried where a warp waits more often than there are rows of reads, and less is read at once than ENOUGH bytes a cycle (the H200's memory
    gives 19). Taken where by the machine code it takes FEWER of the cycles from its beginning to its end, no more stack, and a multiprocessor reads
    GAIN times as much at once. Not where tiles are copied through descriptors: beside those little is read. `warps` and bytes of `shared` memory of a
    program, whose machine code has the symbol `name`; a multiprocessor has `few` at most, or 0: as many as it holds."""
    if _COPIES_TILES in ptx:
        return ptx
    code = assemble(ptx)
    was = gpu_code.waits(code)
    if was.rounds <= len(_rows(ptx.split("\n"))):
        return ptx
    rate = lambda w, registers: min(gpu_code.resident(registers, warps, shared), few or 64) * 32 * warps * w.bytes / w.cycles
    registers, stack = gpu_code.resources(code, name)
    if rate(was, registers) >= ENOUGH or (changed := fenced(ptx)) == ptx:
        return ptx
    try:
        other = assemble(changed)
    except Exception:               # what it refuses it need not have
        return ptx
    now, (more, spilled) = gpu_code.waits(other), gpu_code.resources(other, name)
    return changed if now.cycles <= FEWER * was.cycles and spilled <= stack and rate(now, more) >= GAIN * rate(was, registers) else ptx


def fenced(ptx: str) -> str:
    """Assembly with a fence behind each last of several reads of global memory between which nothing is that a read does not pass."""
    lines, out, begin = ptx.split("\n"), [], 0
    for reads in _rows(lines):
        last = reads[-1]
        end = last + 2 if last + 1 < len(lines) and _END.match(lines[last + 1]) else last + 1
        out += [*lines[begin:end], *([_FENCE] if len(reads) > 1 else [])]
        begin = end
    return "\n".join([*out, *lines[begin:]])


def _rows(lines: list[str]) -> list[list[int]]:
    """Where reads stand, those together between which nothing is that a read does not pass."""
    found: list[list[int]] = []
    for at in (i for i, line in enumerate(lines) if _READS.search(line)):
        if not found or any(_BETWEEN.search(line) for line in lines[found[-1][-1] + 1:at]):
            found.append([])
        found[-1].append(at)
    return found
