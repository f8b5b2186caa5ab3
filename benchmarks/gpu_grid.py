"""Grids of sizes: rows x columns in powers of two, one less and one more, and the hidden sizes of known models.

Grid "gemm": products of rows x depth x columns with what stands behind them. By default any other grid holds what is large enough to be bound by
memory and small enough to be quick: between 2^20 and 2^27 elements.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

from .gpu_case import DTYPES

HIDDEN = {"BERT-Large": (1024, 4096), "GPT-2": (768, 1024, 1280, 1600), "GPT-3": (2048, 2560, 4096, 5120, 12288), "Megatron-1T": (25600,)}


WIDTHS = (1024, 4096, 11008, 14336)         # depth and columns of the products of grid "gemm"


@dataclass(frozen=True)
class Grid:
    """`families` at every (rows, columns) of 2^low to 2^high whose product lies within `elements`."""
    families: tuple[str, ...]
    rows: tuple[int, int] = (0, 22)
    columns: tuple[int, int] = (4, 22)
    elements: tuple[int, int] = (1 << 20, 1 << 27)


GRIDS = {
    "reduction": Grid(("sum_inner", "sum_outer")),
    "layernorm": Grid(("layernorm",), rows=(4, 20), columns=(5, 18)),
    "layernorm_bwd": Grid(("layernorm_bwd",), rows=(4, 20), columns=(5, 18)),
    "softmax": Grid(("softmax",), rows=(4, 20), columns=(5, 18)),
    "rmsnorm": Grid(("rmsnorm", "rmsnorm_bwd"), rows=(4, 20), columns=(5, 18)),
    "gemm": Grid(("linear_bias", "linear_bias_relu", "linear_bias_gelu", "linear_silu_gate", "linear_res", "linear_scale"), rows=(0, 13)),
    "hidden": Grid(("layernorm", "layernorm_bwd", "rmsnorm", "rmsnorm_bwd")),
}


def names(grid: str, dtypes=("bf16",), near=(0,), rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None,
          elements: tuple[int, int] | None = None) -> list[str]:
    """The case names of a grid. `near`: what is added to the columns (-1, 0, 1); `rows` and `columns`: least and most, instead of the grid's;
    `elements`: least and most elements of the input. Raises ValueError for an unknown grid or dtype."""
    if grid not in GRIDS or not set(dtypes) <= set(DTYPES):
        raise ValueError(f"grids: {', '.join(GRIDS)}; dtypes: {', '.join(DTYPES)}")
    g = GRIDS[grid]
    low, high = elements or g.elements
    if grid == "gemm":
        return [f"{f}_{d}_{r}x{k}x{n}" for d in dtypes for k in WIDTHS for n in WIDTHS for r in _powers(rows or _exponents(g.rows))
                for f in g.families]
    if grid == "hidden":
        sizes = [(r, c) for c in sorted({c for cs in HIDDEN.values() for c in cs}) for r in _powers(rows or (1 << 11, 1 << 15))]
    else:
        sizes = [(r, c) for c in _powers(columns or _exponents(g.columns)) for r in _powers(rows or _exponents(g.rows))]
    return [f"{f}_{d}_{r}x{c + n}" for d in dtypes for f in g.families for r, c in sizes for n in near if low <= r * c <= high]


def sample(found: list[str], count: int, seed: int = 0) -> list[str]:
    """`count` of the names, the same ones whenever it is asked."""
    return random.Random(seed).sample(found, min(count, len(found)))


def _exponents(bounds: tuple[int, int]) -> tuple[int, int]:
    return 1 << bounds[0], 1 << bounds[1]


def _powers(bounds: tuple[int, int]) -> list[int]:
    """The powers of two from bounds[0] to bounds[1]."""
    return [1 << e for e in range(64) if bounds[0] <= 1 << e <= bounds[1]]
