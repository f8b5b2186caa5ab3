"""Sine, cosine and tangent of f32, `tk.NAME`, as the functions of `triton_math`: of every magnitude, and on GPUs of NVIDIA's in PTX of our own."""
from __future__ import annotations

import struct

import triton
import triton.language as tl

from .triton_base import INTERPRETED, for_nvidia

_FAR = "0f48000000"         # 131072: from here on j has too many bits
_TWO_OVER_PI = ("0", "0xa2f9836e", "0x4e441529", "0xfc2757d1", "0xf534ddc0", "0xdb629599", "0x3c439041")         # by 32 bits, behind a whole 0


def _near(k: int) -> str:
    """PTX: r = x - j pi/2, pi/2 in three parts, the first two of which are too small, so that no zero loses its sign; the low bits of q are j's."""
    x = f"${8 + k}"
    return f"""
    fma.rn.f32 t, {x}, 0f3f22f983, 0f4b400000; mov.b32 q{k}, t; add.rn.f32 t, t, 0fcb400000;
    fma.rn.f32 c, t, 0fbfc90fda, {x}; fma.rn.f32 c, t, 0fb3a22168, c; fma.rn.f32 r{k}, t, 0fa7c234c5, c;
    abs.f32 t, {x}; setp.gtu{".or" if k else ""}.f32 far, t, {_FAR}{", far" if k else ""};"""


def _far(k: int) -> str:
    """PTX, for what is large: two bits of j and 62 of what j leaves, of x times the 96 bits of 2/pi that make them; NaN of what is infinite or
    NaN."""
    x, of = f"${8 + k}", _TWO_OVER_PI
    words = "\n".join(f"    selp.b32 w{n}, {of[n + 1]}, {of[n]}, odd; selp.b32 v, {of[n + 3]}, {of[n + 2]}, odd; selp.b32 w{n}, v, w{n}, high;"
                      for n in range(4))
    return f"""
    mov.b32 u, {x}; bfe.u32 e, u, 23, 8; sub.s32 e, e, 128; max.s32 e, e, 0; shl.b32 m, u, 8; or.b32 m, m, 0x80000000;
    and.b32 v, e, 32; setp.ne.u32 odd, v, 0; setp.ge.u32 high, e, 64;
{words}
    shf.l.wrap.b32 w0, w1, w0, e; shf.l.wrap.b32 w1, w2, w1, e; shf.l.wrap.b32 w2, w3, w2, e;
    mul.hi.u32 v, m, w2; mul.wide.u32 a, m, w1; cvt.u64.u32 b, v; add.u64 a, a, b; mov.b64 {{w1, w2}}, a; mad.lo.u32 w0, m, w0, w2;
    mov.b64 a, {{w1, w0}}; add.u64 b, a, 0x2000000000000000; shr.u64 b, b, 62; cvt.u32.u64 v, b; shl.b64 b, b, 62; sub.s64 a, a, b;
    cvt.rn.f64.s64 d, a; mul.rn.f64 d, d, 0d3c1921fb54442d18; cvt.rn.f32.f64 c, d;
    setp.lt.s32 odd, u, 0; neg.s32 w0, v; selp.b32 v, w0, v, odd; neg.f32 t, c; selp.f32 c, t, c, odd;
    and.b32 u, u, 0x7fffffff; setp.ge.u32 odd, u, 0x7f800000; selp.f32 c, 0f7fffffff, c, odd;
    abs.f32 t, {x}; setp.gtu.f32 far, t, {_FAR}; selp.f32 r{k}, c, r{k}, far; selp.b32 q{k}, v, q{k}, far;"""


def _both(k: int) -> str:
    """PTX: sine and cosine of q pi/2 + r."""
    sine, cosine, x = f"${k}", f"${4 + k}", f"r{k}"
    near = lambda *of: "".join(f" fma.rn.f32 {y}, {y}, z, {_number(c)};" for y, c in of)
    return f"""
    mul.rn.f32 z, {x}, {x}; mov.f32 s, {_number(-0.000195172121)}; mov.f32 c, {_number(2.443835e-05)};
   {near(("s", 0.00833217707), ("s", -0.166666552), ("s", 0.0))} fma.rn.f32 s, s, {x}, {x};
   {near(("c", -0.00138873665), ("c", 0.0416666456))} mul.rn.f32 t, z, z; fma.rn.f32 z, z, {_number(-0.5)}, {_number(1.0)};
    fma.rn.f32 c, c, t, z;
    and.b32 v, q{k}, 1; setp.ne.u32 odd, v, 0; selp.f32 t, c, s, odd; selp.f32 c, s, c, odd;
    mov.b32 u, t; and.b32 v, q{k}, 2; shl.b32 v, v, 30; xor.b32 u, u, v; mov.b32 {sine}, u;
    mov.b32 u, c; add.u32 v, q{k}, 1; and.b32 v, v, 2; shl.b32 v, v, 30; xor.b32 u, u, v; mov.b32 {cosine}, u;"""


def _number(x: float) -> str:
    """PTX of a constant of f32."""
    return f"0f{struct.pack('>f', x).hex()}"


_SINE_AND_COSINE = tl.constexpr("""{
    .reg .pred far, odd, high; .reg .f32 t, r<4>, s, c, z; .reg .f64 d; .reg .b32 q<4>, u, v, e, m, w<4>; .reg .b64 a, b;"""
                                + "".join(map(_near, range(4))) + "\n    @!far bra NEAR;" + "".join(map(_far, range(4)))
                                + "\nNEAR:" + "".join(map(_both, range(4))) + "\n}")
_REGISTERS = tl.constexpr(",".join(8 * ["=&f"] + 4 * ["f"]))


@triton.jit
def _sine_and_cosine(x):
    """Of every magnitude. On GPUs of NVIDIA's x = j pi/2 + r with |r| <= pi/4: a branch serves four elements, and both are of one reduction; NVIDIA's
    own reduce their argument each, and took 1.1 to 2.8 times as long in kernels of a sine, or of both (H200)."""
    if INTERPRETED:
        return tl.where(tl.abs(x) < 0.000244140625, x, tl.sin(x)), tl.cos(x)
    elif for_nvidia():
        return tl.inline_asm_elementwise(_SINE_AND_COSINE, _REGISTERS, [x], dtype=(tl.float32, tl.float32), is_pure=True, pack=4)
    else:
        return tl.where(tl.abs(x) < 0.000244140625, x, tl.sin(x)), tl.cos(x)


@triton.jit
def sin(x):
    """Sine."""
    s, c = _sine_and_cosine(x)
    return s


@triton.jit
def cos(x):
    """Cosine."""
    s, c = _sine_and_cosine(x)
    return c


@triton.jit
def tan(x):
    """Tangent."""
    s, c = _sine_and_cosine(x)
    return tl.div_rn(s, c)
