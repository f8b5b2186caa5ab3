"""Cases at sizes drawn at random, which no threshold was chosen on: extents evenly by their logarithm, a third of the contiguous ones a power of two
or one beside it, a fifth multiples of 8, the rest any number; 2 to 80 million elements.
"""
from __future__ import annotations

import math
import random

ELEMENTS = 2e6, 8e7
DTYPES = "bf16", "bf16", "f16", "f32"
ROWS = tuple("""layernorm layernorm_bwd rmsnorm rmsnorm_bwd softmax softmax_bwd log_softmax log_softmax_bwd logsumexp logsumexp_bwd l1norm l2norm var
var_mean sum_inner sum_outer amax_argmax cumsum cumsum_outer bias_gelu bias_gelu_bwd swiglu swiglu_bwd bias_dropout_add_ln bias_dropout_add_ln_bwd
cross_entropy cross_entropy_bwd py_layernorm py_layernorm_bwd weightnorm weightnorm_bwd l2norm_bwd var_bwd""".split())
STACKS = "sum_middle", "rmsnorm_middle", "rmsnorm_middle_bwd", "cumsum_middle"
IMAGES = "groupnorm", "groupnorm_bwd", "batchnorm", "batchnorm_bwd", "evonorm", "evonorm_bwd"
VOLUMES = "instancenorm3d", "instancenorm3d_bwd"
LAYERS = 2 * ROWS + 2 * STACKS + 2 * IMAGES + VOLUMES
HEADS, WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 25, 32, 40, 64), (16, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)

# of `gpu_research`, forward and backward
RESEARCH_ROWS = tuple("""geglu_packed layer_scale dynamic_tanh scale_norm power_norm gated_rmsnorm rmsnorm_add sandwich_norm standardize_columns
min_max block_norm double_softmax cosine kurtosis entropy correlations distillation smooth_cross_entropy focal cosine_loss
gaussian_nll preference""".split())
RESEARCH_STACKS = tuple("modulate ada_layernorm softmax_middle masked_softmax groups_scaled pooled_statistics masked_mean masked_huber".split())
RESEARCH_IMAGES = tuple("snake squeeze_gate layernorm_2d response_norm frn".split())
RESEARCH_HEADS = "rotary", "norm_rotary"
SQUARES = ("contrastive",)
FORWARD_ALONE = ("groups_scaled",)
RESEARCH = RESEARCH_ROWS + RESEARCH_STACKS + RESEARCH_IMAGES + RESEARCH_HEADS + SQUARES

# of `gpu_layouts`, forward and backward
LAYOUT_STACKS = "norm_turned", "rmsnorm_both", "columns_scored"
LAYOUT_IMAGES = "patch_norm", "groupnorm_tokens", "formats_added", "pixels_shuffled"       # of no layout of their own
LAYOUT_HEADS = "heads_apart", "heads_joined"
LAYOUTS = LAYOUT_STACKS + LAYOUT_IMAGES + LAYOUT_HEADS + ("position_softmax", "window_norm")

OF = {"layers": LAYERS, "research": tuple(f + m for f in RESEARCH for m in ("", "_bwd") if not (m and f in FORWARD_ALONE)),
      "layouts": tuple(f + m for f in LAYOUTS for m in ("", "_bwd"))}

CHANNELS, EDGES = (1, 2, 3, 4, 6, 8, 10, 15, 16, 20, 24, 32, 40, 64), (7, 8, 14, 15, 16, 20, 28, 32, 40, 56, 64, 112)     # channels: times 32
WINDOWS = 1, 2, 4, 8, 16
DEEP_CHANNELS, DEEP_EDGES = (1, 2, 3, 4, 6, 8, 12), (16, 24, 32, 33, 48, 64)                                             # times 8


def drawn(count: int, seed: int = 0, of: str = "layers") -> list[str]:
    """`count` names of cases, perhaps a few twice; the same ones for a seed. `of`: 'layers' (of the list, and norms beyond it), 'research' or
    'layouts'."""
    r = random.Random(seed)
    return [_name(r, OF[of]) for _ in range(count)]


def _name(r: random.Random, families: tuple[str, ...]) -> str:
    dtype, elements = r.choice(DTYPES), math.exp(r.uniform(*map(math.log, ELEMENTS)))
    family = r.choice(families)
    kind = family.removesuffix("_bwd")
    if kind in ROWS + RESEARCH_ROWS:
        columns = _extent(r, 16, min(elements / 2, 3e5))
        rows = max(2, int(elements / columns))
        if r.random() < 0.5:
            rows = _extent(r, max(2, rows // 2 + 1), rows + 2)
        return f"{family}_{dtype}_{rows}x{columns}"
    if kind in STACKS + RESEARCH_STACKS + LAYOUT_STACKS:
        middle = _extent(r, 4, 4000)
        inner = _extent(r, 16, min(8000, max(17, elements / middle)))
        return f"{family}_{dtype}_{max(1, int(elements / middle / inner))}x{middle}x{inner}"
    if kind in SQUARES:
        return f"{family}_{dtype}_{_extent(r, 512, math.sqrt(elements))}"
    if kind in RESEARCH_HEADS + LAYOUT_HEADS:
        length, heads, width = _extent(r, 64, 4096), r.choice(HEADS), r.choice(WIDTHS)
        sizes = (heads, length, width) if kind == "heads_joined" else (length, heads, width)
        return f"{family}_{dtype}_{max(1, int(elements / math.prod(sizes)))}x{'x'.join(map(str, sizes))}"
    if kind == "position_softmax":
        heads, length = r.choice(HEADS), _extent(r, 32, 1024)
        return f"{family}_{dtype}_{max(1, int(elements / heads / length ** 2))}x{heads}x{length}"
    if kind == "window_norm":
        windows, c = r.choice(WINDOWS), 32 * r.choice(CHANNELS)
        return f"{family}_{dtype}_{max(1, int(elements / 49 / windows ** 2 / c))}x{windows}x{c}"
    if kind in LAYOUT_IMAGES:
        c, edge = 32 * r.choice(CHANNELS), r.choice(EDGES)
        return f"{family}_{dtype}_{max(1, int(elements / c / edge ** 2))}x{c}x{edge}x{edge}"
    if kind in IMAGES + RESEARCH_IMAGES:
        c, edge = 32 * r.choice(CHANNELS), r.choice(EDGES)
        layout, sizes = r.choice(("nchw", "nhwc")), (c, edge, edge)
    else:
        c, edge = 8 * r.choice(DEEP_CHANNELS), r.choice(DEEP_EDGES)
        layout, sizes = r.choice(("ncdhw", "ndhwc")), (c, edge, edge, edge)
    return f"{family}_{dtype}_{layout}_{'x'.join(map(str, (max(1, int(elements / math.prod(sizes))), *sizes)))}"


def _extent(r: random.Random, low: float, high: float) -> int:
    x = round(math.exp(r.uniform(math.log(low), math.log(high))))
    kind = r.random()
    if kind < 0.3:
        x = 1 << max(0, round(math.log2(x)))
    if kind < 0.2:
        x += r.choice((-1, 1))
    elif 0.3 < kind < 0.5:
        x = max(int(low), x // 8 * 8)
    return max(x, 2)
