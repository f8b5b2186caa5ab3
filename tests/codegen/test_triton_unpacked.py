"""Integers of few bits on their way into a 16-bit float: the assembly that four of them take on NVIDIA's GPUs, run here instruction by instruction
for every byte, and what is found of such integers in expressions."""
from __future__ import annotations

import struct

import pytest

from tokamak.fuse.scales import STEP_LOST, unpacking
from tokamak.ir.dtype import I8, I16, U8
from tokamak.ir.expr import Cast, Const, Load, Op
from tokamak.ir.graph import Input
from tokamak.ir.index import axis

pytest.importorskip("triton")
from tokamak.codegen import triton_dot  # noqa: E402

SHAPES = [(0, 255, 128, 0), (0, 255, 0, 0), (0, 255, 0, 128), (0, 15, 0, 8), (4, 15, 0, 8), (4, 15, 8, 0), (0, 3, 0, 2), (6, 3, 0, 1),
          (0, 127, 0, 64), (0, 255, 0, 100), (0, 255, 128, -128)]


def number(half: int, bf16: bool) -> float:
    return struct.unpack("<f", struct.pack("<I", half << 16))[0] if bf16 else struct.unpack("<e", struct.pack("<H", half))[0]


def half(x: float, bf16: bool) -> int:
    """The bits of `x`, which the type has to hold exactly."""
    found = struct.unpack("<I", struct.pack("<f", x))[0] >> 16 if bf16 else struct.unpack("<H", struct.pack("<e", x))[0]
    assert number(found, bf16) == x
    return found


class Machine:
    """The few instructions of PTX that unpacking is made of."""

    def __init__(self, word: int, bf16: bool):
        self.registers, self.bf16 = {"$2": word}, bf16

    def run(self, text: str) -> list[float]:
        for line in (x.strip() for x in text.strip("{} ").split(";")):
            if line and not line.startswith(".reg"):
                name, rest = line.split(" ", 1)
                target, *others = (x.strip() for x in rest.split(","))
                given = (self.registers.get(x) if x in self.registers else int(x, 0) for x in others)
                self.registers[target] = getattr(self, name.split(".")[0])(*given)
        return [number(self.registers[r] >> at & 0xFFFF, self.bf16) for r in ("$0", "$1") for at in (0, 16)]

    mov = staticmethod(lambda a: a)
    shr = staticmethod(lambda a, n: a >> n)
    xor = staticmethod(lambda a, b: a ^ b)
    prmt = staticmethod(lambda a, b, s: sum((((b << 32 | a) >> 8 * (s >> 4 * i & 7)) & 255) << 8 * i for i in range(4)))

    def fma(self, a, b, c):
        parts = [[number(x >> at & 0xFFFF, self.bf16) for x in (a, b, c)] for at in (0, 16)]
        return sum(half(x * y + z, self.bf16) << 16 * i for i, (x, y, z) in enumerate(parts))


setattr(Machine, "and", staticmethod(lambda a, b: a & b))


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("shift, mask, flip, minus", SHAPES)
def test_every_byte(shift, mask, flip, minus, bf16):
    text = triton_dot._unpacking.fn(shift, mask, flip, minus, bf16) if hasattr(triton_dot._unpacking, "fn") else \
        triton_dot._unpacking(shift, mask, flip, minus, bf16)
    for first in range(0, 256, 4):
        word = sum(first + i << 8 * i for i in range(4))
        assert Machine(word, bf16).run(text) == [(((first + i) >> shift & mask) ^ flip) - flip - minus for i in range(4)]


def loaded(d):
    return Load(Input("p", (64,), (1,), d, "cpu"), (axis(0, 64),))


def test_what_is_unpacked():
    p, q = loaded(U8), loaded(I8)
    low, high = Op("and", p, Const(15, U8)), Op("shr", p, Const(4, U8))
    facts = lambda e: (found := unpacking(e)) and (found.shift, found.mask, found.flip, found.minus)
    assert facts(p) == (0, 255, 0, 0) and facts(q) == (0, 255, 128, 0) and facts(low) == (0, 15, 0, 0) and facts(high) == (4, 15, 0, 0)
    assert facts(Op("sub", Cast(I8, low), Const(8, I8))) == (0, 15, 0, 8)
    assert facts(Op("sub", Cast(I16, p), Const(128, I16))) == (0, 255, 0, 128)
    assert facts(Op("shr", q, Const(4, I8))) == (4, 15, 8, 0) and facts(Op("and", q, Const(15, I8))) == (0, 15, 0, 0)
    assert facts(Op("and", Op("shr", p, Const(2, U8)), Const(3, U8))) == (2, 3, 0, 0)


def test_what_is_not():
    p, q = loaded(U8), loaded(I8)
    assert unpacking(Op("sub", Op("and", p, Const(15, U8)), Const(8, U8))) is None          # it wraps
    assert unpacking(Op("sub", Cast(I16, p), Const(STEP_LOST, I16))) is None                # bf16 does not hold all of it
    assert unpacking(Op("add", Cast(I16, p), Const(100, I16))) is None and unpacking(Op("add", Cast(I16, q), Const(200, I16))) is None
    assert unpacking(Op("add", p, p)) is None and unpacking(Op("shl", p, Const(1, U8))) is None
    assert unpacking(Op("sub", Const(1, I8), q)) is None and unpacking(Cast(U8, q)) is None
