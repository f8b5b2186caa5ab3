"""Element types of the language.

A DType is a frozen value; there is one object a type, so `is` compares. Arithmetic on 16-bit floats is carried in f32 (`compute_type`).
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class DType:
    name: str          # short name, as printed: f32
    bytes: int
    kind: str          # 'b' bool, 'i' signed, 'u' unsigned, 'f' floating
    rank: int          # order within promotion
    c: str             # storage type in C
    numpy: str         # numpy dtype name of the storage (bf16 is stored as uint16)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self):
        return (dtype, (self.name,))

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        """True for integers; bool is not one."""
        return self.kind in "iu"

    @property
    def is_half(self) -> bool:
        return self.kind == "f" and self.bytes == 2


BOOL = DType("bool", 1, "b", 0, "uint8_t", "bool")
U8 = DType("u8", 1, "u", 1, "uint8_t", "uint8")
I8 = DType("i8", 1, "i", 2, "int8_t", "int8")
I16 = DType("i16", 2, "i", 3, "int16_t", "int16")
I32 = DType("i32", 4, "i", 4, "int32_t", "int32")
I64 = DType("i64", 8, "i", 5, "int64_t", "int64")
F16 = DType("f16", 2, "f", 6, "uint16_t", "float16")
BF16 = DType("bf16", 2, "f", 7, "uint16_t", "uint16")
F32 = DType("f32", 4, "f", 8, "float", "float32")
F64 = DType("f64", 8, "f", 9, "double", "float64")

ALL = (BOOL, U8, I8, I16, I32, I64, F16, BF16, F32, F64)
_BY_NAME = {d.name: d for d in ALL}


def dtype(name: str) -> DType:
    """The DType called `name` ('f32'); KeyError when there is none."""
    return _BY_NAME[name]


def foreign(name: str, bytes: int) -> DType:
    """A type the language cannot compute in (complex, float8, ...): such values only pass from one opaque call to the next."""
    if name not in _BY_NAME:
        _BY_NAME[name] = DType(name, bytes, "x", -1, "", "")
    return _BY_NAME[name]


def compute_type(d: DType) -> DType:
    """The type in which arithmetic on `d` is carried: f32 for the 16-bit floats, else `d`."""
    return F32 if d.is_half else d
