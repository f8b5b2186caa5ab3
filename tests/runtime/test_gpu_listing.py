"""What is changed of the assembly before NVIDIA's assembler sees it, and what machine code says of itself. No GPU is asked."""
from __future__ import annotations

import json
import struct
from dataclasses import astuple

import pytest

from tokamak.runtime import gpu_code, gpu_listing
from tokamak.runtime.gpu_build import GpuUnit, build
from tests.runtime.test_gpu_build import forget

FENCE = "\tfence.acq_rel.cta;"
LOAD, ADD = 0x981, 0x221


# -- machine code ----------------------------------------------------------------------------------------------------------
def instruction(op: int, pause: int = 1, frees: int = 7, needs: int = 0, width: int = 4) -> bytes:
    return struct.pack("<2Q", op, width << 9 | pause << 41 | frees << 46 | needs << 52)


def binary(*texts: bytes) -> bytes:
    """An ELF file of which all is unsaid but its executable sections."""
    head, at = bytearray(64), 64 + 64 * len(texts)
    struct.pack_into("<Q", head, 40, 64)
    struct.pack_into("<3H", head, 58, 64, len(texts), 0)
    table = b""
    for text in texts:
        table += struct.pack("<2I4Q2I2Q", 0, 1, 4, 0, at, len(text), 0, 0, 0, 0)
        at += len(text)
    return bytes(head) + table + b"".join(texts)


def serial(count: int) -> bytes:
    """Each element is waited for before the next is asked for."""
    return b"".join(instruction(LOAD, frees=0) + instruction(ADD, needs=1) for _ in range(count))


def at_once(count: int) -> bytes:
    return b"".join(instruction(LOAD, frees=n % 6) for n in range(count)) + instruction(ADD, needs=63)


def test_a_warp_waits_once_for_what_it_asks_for_at_once_and_each_time_else():
    one, each = gpu_code.waits(binary(at_once(8))), gpu_code.waits(binary(serial(8)))
    assert one.rounds == 1 and each.rounds == 8 and one.bytes == each.bytes == 32
    assert each.cycles > 7 * one.cycles


def test_the_longest_function_counts_and_code_without_any_is_nothing():
    found = gpu_code.waits(binary(at_once(2), serial(4)))
    assert found == gpu_code.waits(binary(serial(4))) and gpu_code.waits(binary()) == gpu_code.Waits(0, 0, 0)


def test_waits_that_are_over_are_none():
    """What was asked for long ago, and what is no memory."""
    late = instruction(LOAD, frees=0) + instruction(ADD, pause=15) * 60 + instruction(ADD, needs=1)
    other = instruction(ADD, frees=0) + instruction(ADD, needs=1)
    assert gpu_code.waits(binary(late)).rounds == gpu_code.waits(binary(other)).rounds == 0


def branch(back: int) -> bytes:
    """To the instruction `back` before the next one."""
    far = -4 * back & (1 << 56) - 1
    return struct.pack("<2Q", 0x947 | (far & 0xFF) << 16 | (far >> 8 & (1 << 30) - 1) << 34, 1 << 41 | 7 << 46 | far >> 38)


@pytest.mark.parametrize("length", [30, 300])
def test_what_lies_in_a_loop_is_taken_again(length):
    body = instruction(LOAD, frees=0) + instruction(ADD, needs=1) + instruction(ADD, pause=2) * (length - 3)
    found = gpu_code.waits(binary(instruction(ADD) * 5 + body + branch(length) + instruction(ADD) * 7 + branch(1)))
    assert (found.issued, found.again.issued, found.bytes, found.again.bytes) == (length + 13, length, 4, 4)
    assert found.cycles - found.again.cycles == 13 and found.again.cycles > 700


def test_of_loops_the_innermost_count_and_those_of_functions_do_not():
    inner = instruction(ADD) * 39 + branch(40)
    nest = instruction(ADD) * 100 + inner + inner + instruction(ADD) * 9 + branch(190)
    assert gpu_code.waits(binary(nest)).again.issued == 80
    sine = instruction(ADD) * 12 + branch(13)
    found = gpu_code.waits(binary(instruction(ADD) * 50 + sine + instruction(ADD) * 10 + branch(74)))
    assert found.again.issued == 74          # the loop around it, and not the 13 of the function
    assert gpu_code.waits(binary(instruction(ADD) * 50 + sine)).again.issued == 0


def test_widths_of_loads():
    found = [gpu_code.waits(binary(instruction(LOAD, frees=0, width=w))).bytes for w in range(7)]
    assert found == [1, 1, 2, 2, 4, 8, 16]


def test_what_goes_to_the_stack_and_to_shared_memory():
    """Bytes of the stack; of shared memory how often a warp goes there; copies into it, in either form."""
    stack = [gpu_code.waits(binary(instruction(kind, width=w))).local for kind in (0x983, 0x387, 0x987) for w in (4, 6)]
    shared = [gpu_code.waits(binary(instruction(kind, width=w))).shared for kind in (0x984, 0x388, 0x988) for w in (0, 4, 5, 6)]
    assert stack == [4, 16] * 3 and shared == [1, 1, 2, 4] * 3
    found = gpu_code.waits(binary(instruction(0xDAE) + instruction(0xFAE) + instruction(0x983, width=4) + instruction(ADD)))
    assert (found.copies, found.local, found.shared, found.bytes, found.issued) == (2, 4, 0, 0, 4)


def test_waits_are_kept_as_numbers():
    body = instruction(LOAD, frees=0) + instruction(ADD) * 30
    found = gpu_code.waits(binary(body + branch(31) + branch(1)))
    assert found.again.issued == 31 and gpu_code.Waits.read(json.loads(json.dumps(astuple(found)))) == found
    none = gpu_code.Waits(0, 0, 0)
    assert gpu_code.Waits.read(astuple(none)) == none


@pytest.mark.parametrize("registers, warps, shared, found", [(32, 4, 0, 16), (33, 4, 0, 12), (255, 8, 0, 1), (16, 1, 0, 32), (32, 4, 100_000, 2)])
def test_programs_of_a_multiprocessor(registers, warps, shared, found):
    assert gpu_code.resident(registers, warps, shared) == found


# -- fences ----------------------------------------------------------------------------------------------------------------
def read(n: int) -> list[str]:
    return ["\t// begin inline asm", f"\tld.global.b32 {{ %r{n} }}, [ %rd{n} + 0 ];", "\t// end inline asm"]


def test_a_fence_stands_behind_the_last_of_several_reads():
    text = [".entry k", *read(1), "\tadd.s32 %r9, %r1, 1;", *read(2), "\tadd.s32 %r8, %r2, 1;", "\tret;"]
    found = gpu_listing.fenced("\n".join(text)).split("\n")
    assert found == [*text[:8], FENCE, *text[8:]]


@pytest.mark.parametrize("between", ["\tst.global.b32 [ %rd7 + 0 ], { %r1 };", "\tbar.sync 0;", "$L__BB0_2:", "\t@%p1 bra $L__BB0_2;",
                                     "\tshfl.sync.bfly.b32 %r7, %r1, 1, 31, -1;", "\tatom.global.add.u32 %r7, [%rd7], 1;"])
def test_what_a_read_does_not_pass_ends_a_row_of_reads(between):
    """A read alone has no fence."""
    assert FENCE not in gpu_listing.fenced("\n".join([*read(1), between, *read(2)]))
    found = gpu_listing.fenced("\n".join([*read(1), *read(2), between, *read(3), *read(4)])).split("\n")
    assert [i for i, line in enumerate(found) if line == FENCE] == [6, 14]


def chosen(before: bytes, after: bytes, few: int = 0) -> bool:
    """Are there fences, where the assembler makes these of the text without and with them?"""
    text = "\n".join([*read(1), *read(2)])
    return FENCE in gpu_listing.waiting_together(text, lambda ptx: after if FENCE in ptx else before, "k", 4, 0, few)


def test_fences_are_taken_where_a_warp_waits_less_often():
    assert chosen(binary(serial(8)), binary(at_once(8)))
    assert not chosen(binary(at_once(8)), binary(at_once(8))) and not chosen(binary(serial(8)), binary(serial(8)))
    assert not chosen(binary(at_once(8)), binary(serial(8)))


def test_not_where_less_is_read_at_once_for_it(monkeypatch):
    """By more registers a multiprocessor holds a third of the programs: unless it has no more of them anyway, or nothing is gained."""
    before, after = binary(serial(2)), binary(at_once(2))
    monkeypatch.setattr(gpu_code, "resources", lambda code, name: (32, 0) if code == before else (96, 0))
    assert not chosen(before, after) and chosen(before, after, few=2)


def test_not_where_more_is_spilled_and_not_where_enough_is_read(monkeypatch):
    before, after = binary(serial(8)), binary(at_once(8))
    monkeypatch.setattr(gpu_code, "resources", lambda code, name: (32, 8 * (code == after)))
    assert not chosen(before, after)
    monkeypatch.undo()
    monkeypatch.setattr(gpu_listing, "ENOUGH", 0)
    assert not chosen(before, after)


def test_what_copies_tiles_through_descriptors_is_assembled_once_and_as_it_is():
    """Though fences would have a warp wait less often."""
    text, copy = "\n".join([*read(1), *read(2)]), "\tcp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd5];"
    asked = []

    def assemble(ptx: str) -> bytes:
        asked.append(ptx)
        return binary(at_once(8) if FENCE in ptx else serial(8))
    assert FENCE in gpu_listing.waiting_together(text, assemble, "k", 4, 0) and len(asked) == 2
    assert gpu_listing.waiting_together(text + "\n" + copy, assemble, "k", 4, 0) == text + "\n" + copy and len(asked) == 2


def test_what_the_assembler_refuses_is_left_as_it_was():
    text = "\n".join([*read(1), *read(2)])

    def assemble(ptx: str) -> bytes:
        if FENCE in ptx:
            raise RuntimeError("refused")
        return binary(serial(8))

    assert gpu_listing.waiting_together(text, assemble, "k", 4, 0) == text


# -- registers by name -----------------------------------------------------------------------------------------------------
KERNEL = ".visible .entry k(\n)\n.reqntid 1024\n{\n\tret;\n}"


@pytest.mark.parametrize("before, after, taken", [((32, 584), (64, 296), True), ((32, 584), (64, 584), False), ((32, 0), (64, 0), False),
                                                  ((56, 584), (64, 296), False)])
def test_registers_are_allowed_by_name_where_that_spills_less(monkeypatch, before, after, taken):
    """Not where nothing spills, where nearly all are used, and where it does not help."""
    named = ".reqntid 1024\n.maxnreg 64\n"
    monkeypatch.setattr(gpu_code, "resources", lambda code, name: after if named.encode() in code else before)
    assert gpu_listing.with_room(KERNEL, str.encode, "k", 32) == (KERNEL.replace(".reqntid 1024\n", named) if taken else KERNEL)
    limited = KERNEL.replace(".reqntid 1024\n", ".reqntid 1024\n.maxnreg 32\n")
    assert gpu_listing.with_room(limited, str.encode, "k", 32) == limited          # somebody's limit stays


SOFTMAX = """import triton
import triton.language as tl
from tokamak.codegen import triton_lib as tk


@triton.jit
def kernel(n0, n1, p0, n2, n3, p1, k0, n4, n5, p2):
    b0 = tl.program_id(0)
    i1 = tl.arange(0, 64)[None, :]
    m2 = i1 < n0
    i3 = tl.arange(0, 64)[:, None]
    m4 = i3 < n1
    t5 = (i3 + tl.full((), 0, tl.int64))
    t6 = tl.load(p0 + b0)
    t7 = (t5 > t6)
    t8 = tl.load(p1 + n2 * b0 + n3 * i3 + i1, mask=m4 & m2)
    t9 = tk.from_bf16(t8)
    t10 = k0.to(tl.float32)
    t11 = tl.where(tl.abs(t10) < 1e-30, 1e30, 1.0)
    t12 = 1.0 / (t10 * t11)
    t13 = t9 * t12 * t11
    t14 = tl.where(t7, tl.full([], float("-inf"), tl.float32), t13)
    t15 = tl.where(m4, t14, tl.full([], float("-inf"), tl.float32))
    t16 = tk.reduce_max(t15, 0)
    t16 = tl.expand_dims(t16, 0)
    t17 = (t14 - t16)
    t18 = tk.exp_short(t17)
    t19 = tl.where(m4, t18, tl.full([], 0.0, tl.float32))
    t20 = tl.sum(t19, 0)
    t20 = tl.expand_dims(t20, 0)
    t21 = tl.where(tl.abs(t20) < 1e-30, 1e30, 1.0)
    t22 = 1.0 / (t20 * t21)
    t23 = t18 * t22 * t21
    t24 = tk.to_bf16(t23)
    tl.store(p2 + n4 * b0 + n5 * i3 + i1, t24, mask=m4 & m2)
"""


@pytest.mark.parametrize("arch, fences", [(("cuda", 90, 32), True), (("cuda", 80, 32), False), (("cuda", 100, 32), False)])
def test_softmax_under_a_mask_reads_first(arch, fences):
    """Half of the 32 elements of a thread are waited for one by one else; only where it was measured."""
    forget()
    signature = ("i32", "i32", "*i64", "i32", "i32", "*bf16", "fp64", "i32", "i32", "*bf16")
    unit = GpuUnit("kernel", SOFTMAX, signature, frozenset((2, 5, 9)), warps=4, stages=1)
    made = build([unit], arch)["kernel"]
    assert (FENCE in made.listing) == fences
    if fences:
        found = gpu_code.waits(made.code)
        assert found.rounds <= 2 and found.bytes == 32 * 2 + 8 and made.spilled == 0
