"""How often a warp goes to the banks of shared memory, and to how many lines of the cache, by PTX. No GPU is asked."""
from __future__ import annotations

import random

import numpy as np
import pytest

from tokamak.runtime import gpu_access, gpu_code
from tokamak.runtime.gpu_build import build, GpuUnit
from tests.runtime.test_gpu_build import forget

LANES = list(range(32))


def kernel(*lines: str) -> str:
    return "\n".join((".visible .entry k(", "\t.param .u32 k_param_0", ")", "{", "$L__func_begin0:", "\tmov.u32 \t%r1, %tid.x;", *lines, "}"))


def strided(bytes_: int, access: str = "ld.shared.b32 \t%r9, [%r2]") -> str:
    return kernel(f"\tmul.lo.s32 \t%r3, %r1, {bytes_};", "\tadd.s32 \t%r2, %r3, global_smem;", f"\t{access};")


@pytest.mark.parametrize("bytes_, times", [(0, 1), (2, 1), (4, 1), (8, 2), (12, 1), (16, 4), (32, 8), (64, 16), (128, 32), (132, 1), (256, 32)])
def test_words_of_one_bank_take_a_turn_each(bytes_, times):
    assert gpu_access.contention(strided(bytes_), 128) == (times, 1)


@pytest.mark.parametrize("bytes_, access, times", [
    (16, "ld.shared.v4.b32 \t{%r9, %r10, %r11, %r12}, [%r2+64]", 1),
    (32, "st.shared.v4.b32 \t[%r2], {%r9, %r10, %r11, %r12}", 2),
    (128, "st.shared.v2.b64 \t[ %r2 + 0 ], { %rd9, %rd10 }", 8),
    (8, "ld.shared.v2.b32 \t{%r9, %r10}, [%r2]", 1),
    (256, "ld.shared.b16 \t%rs9, [%r2]", 32),
    (2, "st.shared.b16 \t[%r2], %rs9", 1),
    (1, "st.shared.b8 \t[%r2], %rs9", 1),
])
def test_wide_words_go_by_fewer_threads_at_once(bytes_, access, times):
    assert gpu_access.contention(strided(bytes_, access), 128)[0] == times


def test_only_threads_that_take_part_count():
    few = kernel("\tsetp.lt.u32 \t%p1, %r1, 4;", "\tshl.b32 \t%r2, %r1, 7;", "\t@%p1 ld.shared.b32 %r9, [%r2];")
    rest = few.replace("@%p1", "@!%p1")
    none = few.replace("%r1, 4;", "%r1, 0;")
    assert [gpu_access.contention(text, 128)[0] for text in (few, rest, none)] == [4, 28, 1]


def test_innermost_loops_are_counted_apart():
    """What is carried from turn to turn is as it is in the first."""
    text = kernel("\tshl.b32 \t%r2, %r1, 2;", "\tst.shared.b32 \t[%r2], %r1;", "\tshl.b32 \t%r3, %r1, 4;", "\tmov.b32 \t%r4, %r3;", "$L__BB0_1:",
                  "\tld.shared.b32 \t%r9, [%r4];", "\tadd.s32 \t%r4, %r4, 64;", "\tsetp.lt.s32 \t%p1, %r4, 4096;", "\t@%p1 bra \t$L__BB0_1;",
                  "\tld.shared.b32 \t%r9, [%r2];")
    assert gpu_access.contention(text, 128) == (2, 4)


def test_of_two_ways_the_one_is_gone_that_the_first_program_goes():
    """Where that is known, and all of a warp's threads agree."""
    def way(test: str) -> float:
        return gpu_access.contention(kernel(
            "\tmov.u32 \t%r7, %ctaid.x;", "\tshl.b32 \t%r2, %r1, 3;", "\tshl.b32 \t%r3, %r1, 5;", f"\tsetp.{test};", "\t@%p1 bra \t$L__BB0_2;",
            "\tld.shared.b32 \t%r9, [%r2];", "\tbra.uni \t$L__BB0_3;", "$L__BB0_2:", "\tld.shared.b32 \t%r9, [%r3];", "$L__BB0_3:",
            "\tst.shared.b8 \t[%r1], %rs9;"), 128)[0]
    tests = "ne.s32 \t%p1, %r7, 0", "eq.s32 \t%p1, %r7, 0", "lt.s32 \t%p1, %r1, 5", "lt.s32 \t%p1, %r8, 5"
    assert list(map(way, tests)) == [1.5, 4.5, 1.5, 1.5]


GLOBAL = ("\tld.param.b64 \t%rd1, [k_param_1];", "\tld.param.b32 \t%r5, [k_param_0];", "\tmul.lo.s32 \t%r6, %r1, %r5;")


@pytest.mark.parametrize("stride, access, count", [
    (1, "ld.global.b32 { %r9 }, [ %rd3 + 0 ]", 1), (2, "st.global.b32 [ %rd3 + 0 ], { %r9 }", 2), (32, "ld.global.b32 { %r9 }, [ %rd3 + 0 ]", 32),
    (3, "ld.global.L1::evict_last.L2::cache_hint.b32 { %r9 }, [ %rd3 + 0 ], %rd9", 3),
    (4, "ld.global.v4.b32 { %r9, %r10, %r11, %r12 }, [ %rd3 + 0 ]", 4),
    (4, "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd3 + 0 ], 0x10, 0x10", 4), (0, "ld.global.b32 { %r9 }, [ %rd3 + 0 ]", 1),
    (32, "red.global.add.f32 [ %rd3 + 0 ], %f9", 0)])
def test_lines_of_the_cache(stride, access, count):
    """By elements of 4 bytes between threads, of what reads, writes and copies; a second read of the same place is none."""
    text = kernel(*GLOBAL, "\tmad.wide.s32 \t%rd3, %r6, 4, %rd1;", f"\t{access};", f"\t{access};")
    assert gpu_access.lines(text, 128, [stride, 0]) == (count, 0)


def test_lines_of_loops_and_of_what_is_not_known():
    """A loaded index says nothing: as many lines as there are bytes."""
    text = kernel(*GLOBAL, "\tmad.wide.s32 \t%rd3, %r6, 4, %rd1;", "$L__BB0_1:", "\tld.global.b32 { %r9 }, [ %rd3 + 0 ];",
                  "\tmad.wide.s32 \t%rd4, %r9, 4, %rd1;",
                  "\tld.global.v2.b32 { %r10, %r11 }, [ %rd4 + 0 ];", "\tsetp.lt.s32 \t%p1, %r9, 4096;", "\t@%p1 bra \t$L__BB0_1;",
                  "\tst.global.b16 [ %rd3 + 0 ], { %rs9 };")
    assert gpu_access.lines(text, 128, [32, 0]) == (32 + 2 + 32, 32 + 2)


def test_what_is_not_known_takes_what_it_has_to():
    loaded = kernel("\tld.global.b32 \t%r2, [%rd1];", "\tld.shared.b32 \t%r9, [%r2];")
    assert gpu_access.contention(loaded, 128) == gpu_access.contention("", 128) == (1, 1)


def test_parameters_shift_all_threads_alike():
    text = kernel("\tld.param.b32 \t%r5, [k_param_0];", "\tmad.lo.s32 \t%r2, %r1, 8, %r5;", "\tld.shared.b32 \t%r9, [%r2];")
    assert gpu_access.contention(text, 128)[0] == 2


def _signed(x):
    return int(np.array(x & 0xFFFFFFFF).astype("uint32").astype("int32"))


_OPS = {
    "add.s32": lambda a, b: a + b, "sub.s32": lambda a, b: a - b, "mul.lo.s32": lambda a, b: a * b, "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor, "min.s32": np.minimum, "max.s32": np.maximum,
    "min.u32": lambda a, b: np.minimum(a.astype("uint32"), b.astype("uint32")), "rem.u32": lambda a, b: a.astype("uint32") % b.astype("uint32"),
    "div.u32": lambda a, b: a.astype("uint32") // b.astype("uint32"), "div.s32": lambda a, b: np.trunc(a / b), "rem.s32": np.fmod,
    "shl.b32": lambda a, b: a << (b & 31), "shr.u32": lambda a, b: a.astype("uint32") >> (b & 31).astype("uint32"),
    "shr.s32": lambda a, b: a >> (b & 31),
}


@pytest.mark.parametrize("op", list(_OPS))
def test_arithmetic_is_that_of_numpy(op):
    r = random.Random(op)
    for _ in range(40):
        a, b = (np.array([r.choice((r.randrange(-99, 99), r.randrange(-1 << 31, 1 << 31))) for _ in LANES], "int32") for _ in range(2))
        b = b & 31 if op[:2] == "sh" else np.where(b == 0, 7, b).astype("int32")
        with np.errstate(over="ignore"):
            want = _OPS[op](a, b).astype("int64").astype("int32")
        made = gpu_access._value(gpu_access._Instruction(op, ("%r3", "%r1", "%r2"), None, False), {"%r1": a.tolist(), "%r2": b.tolist()})
        assert list(map(_signed, made)) == want.tolist()


@pytest.mark.parametrize("op, operands, want", [
    ("mul.wide.s32", (-3, 1 << 30), -3 << 30), ("mul.wide.u32", (-1, 2), ((1 << 32) - 1) * 2), ("mul.hi.u32", (-1, 1 << 30), (1 << 30) - 1),
    ("mul.hi.s32", (-1, 1 << 30), -1), ("mad.hi.u32", (-1, 16, 5), 20), ("mad.lo.s32", (3, 4, 5), 17), ("neg.s32", (7,), -7),
    ("cvt.s64.s32", (-5,), -5), ("cvt.u64.u32", (-5,), (1 << 32) - 5), ("cvt.u32.u64", ((1 << 40) + 3,), 3), ("cvta.to.global.u64", (16,), 16),
    ("bfe.u32", (0b1011000, 3, 4), 0b1011), ("bfe.s32", (0b1011000, 3, 4), 0b1011 - 16),
    ("bfe.s32", (5, 1, 0), 0), ("bfi.b32", (0b11, 0b1000001, 2, 3), 0b1001101),
    ("lop3.b32", (0b1100, 0b1010, 0b1001, 0x96), 0b1111), ("selp.b32", (4, 5, 1), 4), ("selp.b32", (4, 5, 0), 5), ("mov.b32", (9,), 9),
    ("setp.lt.s32", (-1, 1), 1), ("setp.lt.u32", (-1, 1), 0), ("setp.ge.s64", (1 << 40, 3), 1), ("not.b32", (0,), -1), ("not.pred", (1,), 0),
    ("and.pred", (1, 0), 0),
])
def test_one_instruction(op, operands, want):
    names = [f"%r{n}" for n in range(len(operands))]
    made = gpu_access._value(gpu_access._Instruction(op, ("%r9", *names), None, False), {n: [x] * 32 for n, x in zip(names, operands)})
    assert made == [want] * 32


@pytest.mark.parametrize("op", ["add.f32", "fma.rn.f32", "cvt.rn.f32.s32", "shfl.sync.bfly.b32", "ld.global.b32", "shf.l.wrap.b32", "add.s16x2",
                                "mov.v2", "min.bf16"])
def test_what_is_no_arithmetic_of_integers_is_not_known(op):
    assert gpu_access._value(gpu_access._Instruction(op, ("%r9", "%r1", "%r2"), None, False), {"%r1": LANES, "%r2": LANES}) is None


TURNED = """
import triton
import triton.language as tl


@triton.jit
def turned(p, q, n):
    i, j = tl.arange(0, 256)[:, None], tl.arange(0, 16)[None, :]
    carried = tl.zeros([256, 16], tl.float32)
    for at in tl.range(0, n, num_stages=3):
        carried += tl.load(p + at * 4096 + i * 16 + j).to(tl.float32) * tl.load(q + at * 4096 + i + j * 256).to(tl.float32)
    tl.store(q + i + j * 256, carried.to(tl.bfloat16))
"""


def test_a_tile_read_along_its_other_side_counts_as_often_as_it_is_waited_for():
    """bf16, copied as it lies: each thread's reads of 16-bit elements 256 bytes from the next thread's go to one bank."""
    forget()
    unit = GpuUnit("turned", TURNED, ("*bf16", "*bf16", "i32"), frozenset((0, 1)))
    made = build([unit], ("cuda", 90, 32))["turned"]
    plain, (whole, loops) = gpu_code.waits(made.code), gpu_access.contention(made.listing, made.threads)
    assert loops > 4 and made.waits.again.shared == round(plain.again.shared * loops) > 4 * plain.again.shared
    assert made.waits.shared == round(plain.shared * whole)
