"""Products of matrices of two 16-bit types or of TF32, and integers of few bits on their way into one; front: `triton_lib`."""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import INTERPRETED, bits, for_nvidia, from_bf16, to_bf16
from .triton_math import exp2_short


@triton.jit
def dot(a, b, c):
    """c + a b, carried in f32: a [m, k] and b [k, n] of f16, bf16 or f32 that holds TF32, c [m, n] of f32. Triton's interpreter keeps bf16 as
    integers."""
    if INTERPRETED:
        if a.dtype == tl.bfloat16:
            return tl.dot(from_bf16(a), from_bf16(b), c, input_precision="ieee")
        else:
            return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, c, input_precision="tf32")
    else:
        return tl.dot(a, b, c)


@triton.jit
def settled(x):
    """x, once the products on their way into it are done. (NVIDIA's assembler has each product of a loop wait for the one before where a turn leaves
    some, whose left factor is in registers, to the next.)"""
    if INTERPRETED or not for_nvidia():
        return x
    else:
        return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def weights(x, top, total, scale):
    """Of exponents x scale to the base 2 [m, n], scale > 0, and of rows' greatest x and sum of weights so far [m]: both with these taken in, what was
    carried is multiplied by [m], and the weights [m, n]. Rows without a number above -inf have weights of 0; NaN and inf make theirs NaN.

    A product and a difference are rounded once, so what is taken from the greatest itself is not quite 0, but up to half a unit of the last place of
    zero. Where that is much (rows that hold nothing but what masks add), neighbours of the greatest weigh nothing beside it by any such scale: by
    a power of two zero is exact."""
    best = tl.maximum(top, tl.max(x, 1))
    zero = tl.where(best == float("-inf"), 0.0, best)
    power = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    far = tl.where(tl.abs(zero) < 1.2676506e30, power, 8.6736174e-19)        # 2^100, 2^-60
    by = tl.where(tl.abs(zero * scale) < 1073741824.0, scale, far)
    zero = zero * by
    made = exp2_short(x * by[:, None] - zero[:, None])
    kept = tl.where(best == top, 1.0, exp2_short(top * by - zero))
    return best, total * kept + tl.sum(made, 1), kept, made


@triton.jit
def in_registers(x):
    """x, of 16 bits, for a product that takes it from registers. Triton's pipeline keeps a slot too few of what products read in shared memory while
    something else has it in registers: the next step is read over what a product still reads."""
    if INTERPRETED:
        return x
    elif for_nvidia():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
    else:
        return x


@triton.jit
def in_pairs(x, to: tl.constexpr):
    """f32 in the 16-bit type `to`, to nearest even, two at a time whatever x is: LLVM rounds both sides of a choice (a mask) one by one."""
    if INTERPRETED:
        if to == tl.bfloat16:
            return to_bf16(x)
        else:
            return x.to(to)
    elif for_nvidia():
        if to == tl.bfloat16:
            return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return x.to(to)


@triton.jit
def to_tf32(x):
    """f32 to the nearest of ten bits behind the point, ties to even."""
    if INTERPRETED:
        return _rounded_bits(x)
    elif for_nvidia(90):
        return tl.inline_asm_elementwise("cvt.rn.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return _rounded_bits(x)


@triton.jit
def _rounded_bits(x):
    """As `to_tf32`, in integers."""
    b = bits(x)
    r = ((b + 0xFFF + ((b >> 13) & 1)) & -8192).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), r, x)


@triton.jit
def halves(x):
    """The left and the right half of the columns of a tile."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def interleaved(a, b):
    """a and b, element by element in turn along their last axis."""
    shape: tl.constexpr = a.shape[:-1] + [2 * a.shape[-1]]
    return tl.join(a, b).reshape(shape)


@triton.jit
def in_turn(x):
    """The elements of x along its last axis at even places, and those at odd ones."""
    shape: tl.constexpr = x.shape[:-1] + [x.shape[-1] // 2, 2]
    return tl.split(x.reshape(shape))


@triton.jit
def small_to_half(x, to: tl.constexpr):
    """An integer of 8 bits in the 16-bit type `to`, which holds each of them exactly."""
    if x.dtype.is_int_signed():
        return unpacked(x, 0, 255, 128, 0, to)
    else:
        return unpacked(x, 0, 255, 0, 0, to)


@triton.jit
def unpacked(x, shift: tl.constexpr, mask: tl.constexpr, flip: tl.constexpr, minus: tl.constexpr, to: tl.constexpr):
    """The integers (((x >> shift) & mask) ^ flip) - flip - minus in the 16-bit type `to`; x of 8 bits, whose sign is a bit like any other. On
    NVIDIA's GPUs four at a time: a byte is the low half of a float whose step is 1, so that nothing goes through the slow conversions of integers."""
    if INTERPRETED:
        number = ((((x.to(tl.int32) & 255) >> shift) & mask) ^ flip) - flip - minus
        if to == tl.bfloat16:
            return to_bf16(number.to(tl.float32))
        else:
            return number.to(to)
    elif for_nvidia():
        if to == tl.bfloat16:
            return tl.inline_asm_elementwise(_unpacking(shift, mask, flip, minus, True), "=r,=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(_unpacking(shift, mask, flip, minus, False), "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return ((((x.to(tl.int32) & 255) >> shift) & mask ^ flip) - flip - minus).to(to)


@triton.constexpr_function
def _unpacking(shift, mask, flip, minus, bf16):
    """Assembly of `unpacked` for four bytes in $2, to two pairs in $0 and $1."""
    top = mask & (255 >> shift)
    signed = flip == 128 and top == 255
    lines = [".reg .b32 u, t0, t1, a0, a1, b0, b1, one, less, c, d;", f"shr.u32 u, $2, {shift};" if shift else "mov.b32 u, $2;"]
    lines += [f"and.b32 u, u, {_four(top)};"] if top != 255 else []
    lines += [f"xor.b32 u, u, {_four(flip)};"] if flip and not (signed and bf16) else []
    exponent = "0x43434343" if bf16 else "0x64646464"           # of 128 in bf16 and of 1024 in f16
    lines += [f"prmt.b32 t0, u, {exponent}, 0x4140;", f"prmt.b32 t1, u, {exponent}, 0x4342;"]
    kind, least = ("bf16x2", 128) if bf16 else ("f16x2", 1024)
    lines += [f"mov.b32 one, {_pair(1, bf16)};", f"mov.b32 c, {_pair(-(least + flip + minus), bf16)};"]
    if not bf16 or top < 128:
        lines += [f"fma.rn.{kind} ${n}, t{n}, one, c;" for n in (0, 1)]
    else:           # the step is 2 from 256 on: seven bits of a byte, and the eighth by itself
        lines += [f"and.b32 a{n}, t{n}, 0xFF7FFF7F;" for n in (0, 1)] + [f"and.b32 b{n}, t{n}, 0xFF80FF80;" for n in (0, 1)]
        if signed:
            lines += [f"mov.b32 less, {_pair(-1, bf16)};", f"mov.b32 c, {_pair(-minus, bf16)};"]
            lines += [f"fma.rn.{kind} ${n}, b{n}, less, a{n};" for n in (0, 1)] + [f"fma.rn.{kind} ${n}, ${n}, one, c;" for n in (0, 1) if minus]
        else:
            lines += [f"mov.b32 d, {_pair(-128, bf16)};"]
            lines += [f"fma.rn.{kind} a{n}, a{n}, one, c;" for n in (0, 1)] + [f"fma.rn.{kind} b{n}, b{n}, one, d;" for n in (0, 1)]
            lines += [f"fma.rn.{kind} ${n}, a{n}, one, b{n};" for n in (0, 1)]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _four(byte):
    return f"0x{byte * 0x01010101:08X}"


@triton.constexpr_function
def _pair(number, bf16):
    """Two of a number that the 16-bit type holds exactly."""
    import struct
    half = struct.unpack("<I", struct.pack("<f", number))[0] >> 16 if bf16 else struct.unpack("<H", struct.pack("<e", number))[0]
    return f"0x{half * 0x00010001:08X}"
