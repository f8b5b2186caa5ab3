"""torch's element types and the language's."""
from __future__ import annotations

import torch

from ..ir import dtype as dt
from ..ir.dtype import DType

_DTYPES = {torch.bool: dt.BOOL, torch.uint8: dt.U8, torch.int8: dt.I8, torch.int16: dt.I16, torch.int32: dt.I32, torch.int64: dt.I64,
           torch.float16: dt.F16, torch.bfloat16: dt.BF16, torch.float32: dt.F32, torch.float64: dt.F64}
TORCH_DTYPES = {v: k for k, v in _DTYPES.items()}


def to_dtype(d: torch.dtype) -> DType:
    """The language's type for torch's; a foreign type for those it cannot compute in."""
    found = _DTYPES.get(d)
    return found if found is not None else dt.foreign(str(d).removeprefix("torch."), d.itemsize)
