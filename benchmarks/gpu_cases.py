"""The list of GPU cases, by group; `case(name)` builds any of them, and any other size of their families."""
from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from itertools import chain

from . import gpu_families, gpu_layouts, gpu_research        # noqa: F401 (fill the families)
from .gpu_case import FAMILIES, Case, parse

ROWS = ("16x4194304", "1024x65536", "65536x1024", "1048576x64", "4194304x17", "777x86021")
NORMS = ("87381x768", "65536x1024", "65600x1023", "65472x1025", "16384x4096", "16388x4095", "16380x4097", "4096x16384", "4095x16385", "2621x25600",
         "1024x65536", "256x262144")
PYTHON_NORMS = ("65536x1024", "16384x4096", "16380x4097")
VOCABULARIES = ("8192x32000", "8192x50257", "8192x128256")


def _listed():
    yield from ("gelu_chain_f32_128Mi", "gelu_steps_f32_128Mi", "bias_gelu_bf16_16384x4096", "swiglu_bf16_8192x14336", "gelu_chain_f32_64Ki",
                "bias_gelu_bwd_bf16_16384x4096")
    yield from (f"sum_{side}_{d}_{s}" for d in ("f32", "f16") for s in ROWS for side in ("inner", "outer"))
    yield from ("sum_all_f32_128Mi", "var_mean_f32_65536x1024", "amax_argmax_bf16_8192x32000")
    for s in NORMS:
        yield from (f"{f}_bf16_{s}" for f in ("layernorm", "rmsnorm", "softmax", "layernorm_bwd", "rmsnorm_bwd"))
    yield from (f"py_layernorm{bwd}_f32_{s}" for s in PYTHON_NORMS for bwd in ("", "_bwd"))
    yield from (f"batchnorm{bwd}_bf16_{layout}" for bwd in ("", "_bwd") for layout in ("nchw", "nhwc"))
    yield from ("instancenorm3d_f16_ncdhw", "instancenorm3d_f16_ndhwc", "evonorm_f32_nchw")
    yield from (f"bias_dropout_add_ln{bwd}_f16_16384x1024" for bwd in ("", "_bwd"))
    yield from (f"cross_entropy{bwd}_bf16_{s}" for s in VOCABULARIES for bwd in ("", "_bwd"))
    yield from (f"linear_bias_relu_bf16_{rows}x4096x4096" for rows in (16, 512, 4096))
    yield from ("linear_bias_gelu_res_bf16_8192", "mlp_bf16_1x1024x4096", "mlp_bf16_32x1024x4096", "mlp_bf16_8192x1024x4096",
                "mlp_small_bf16_262144x64x64", "mlp_small_bf16_131072x128x256", "swiglu_mlp_bf16_4096x4096x14336")
    yield from (f"naive_attention_f16_{s}" for s in ("10x12x512x64", "40x64x512x64", "20x16x256x32", "4x32x4096x128"))
    yield from ("alibi_attention_bf16_4x32x2048x128", "naive_attention_bwd_f16_10x16x512x64", "linear_ce_bf16_8192x4096x32000")


NAMES: tuple[str, ...] = tuple(_listed())

# what the list does not try: other norms, other reductions, other sizes
MORE: tuple[str, ...] = (
    "groupnorm_bf16_nchw", "groupnorm_bf16_nhwc", "groupnorm_bwd_bf16_nhwc", "batchnorm_bf16_nhwc_32x96x57x57",
    "batchnorm_bwd_bf16_nchw_128x64x112x112",
    "instancenorm3d_bwd_f16_ndhwc", "evonorm_bf16_nhwc", "evonorm_bwd_f32_nchw", "weightnorm_f32_16384x4096", "weightnorm_bwd_f32_16384x4096",
    "rmsnorm_middle_bf16_16x1024x4096", "rmsnorm_middle_bwd_bf16_16x1024x4096", "log_softmax_bf16_16384x4097", "log_softmax_bwd_bf16_16384x4097",
    "softmax_bwd_bf16_65472x1025", "logsumexp_bf16_8192x50257", "l1norm_f32_1024x65535", "l2norm_f32_1024x65535", "var_f32_16x4194304",
    "cumsum_f32_16384x4096",
    "cumsum_bf16_65535x1025", "cumsum_outer_f32_4096x16384", "cumsum_middle_bf16_64x1024x1024", "evonorm_bwd_f32_nhwc", "log_softmax_f32_1024x65535",
    "logsumexp_f32_65536x1025", "l1norm_f16_1024x65535", "l2norm_bf16_1024x65535", "sum_outer_f16_65536x1025", "sum_outer_f16_1048576x65",
    "sum_outer_f16_1024x65537", "sum_inner_f16_524288x257", "sum_inner_f16_262144x513",
    "sum_middle_f32_64x1024x1024", "sum_middle_bf16_512x257x511", "layernorm_f32_3000x5003", "rmsnorm_f16_20011x3001",
    "softmax_f32_999x99991", "layernorm_bwd_f32_1000x30011", "cross_entropy_f16_4093x65537", "bias_gelu_bwd_bf16_16383x4095",
    "causal_attention_bf16_4x16x1024x64", "causal_attention_bwd_bf16_4x16x1024x64", "padded_attention_bf16_8x16x512x64",
    "padded_attention_bwd_bf16_8x16x512x64", "dropped_attention_bwd_bf16_8x16x512x64", "cached_attention_bf16_1x1x32x8x8192x128",
    "cached_sdpa_bf16_1x16x32x8x8192x128",
    "cached_sdpa_bf16_8x1x32x8x4096x128", "cached_sdpa_masked_bf16_1x1x32x8x8192x128")

# what contractions are asked for beside the list and grid "gemm": few rows, weights of few bits, training steps of narrow layers
CONTRACTIONS: tuple[str, ...] = (
    *(f"linear_bias_relu_bf16_{rows}x4096x4096" for rows in (1, 2, 4, 8, 32, 64)),
    *(f"linear_bias_relu_bf16_{rows}x{size}" for size in ("4096x14336", "14336x4096", "8192x8192") for rows in (1, 4, 16, 64)),
    *(f"linear_{kind}_bf16_{rows}x4096x4096" for kind in ("int8", "int4", "int8_groups", "int4_groups") for rows in (1, 4, 16)),
    "mlp_small_step_bf16_262144x64x64", "mlp_small_step_bf16_131072x128x256")

BEYOND = {"more": MORE, "contractions": CONTRACTIONS}

# a sample of every kind of schedule, for symbolic sizes beside static ones
SYMBOLIC: tuple[str, ...] = (
    "bias_gelu_bf16_16384x4096", "swiglu_bf16_8192x14336", "sum_inner_f32_65536x1024", "sum_outer_f32_65536x1024", "sum_all_f32_128Mi",
    "layernorm_bf16_65536x1024", "layernorm_bf16_16380x4097", "rmsnorm_bf16_87381x768", "softmax_bf16_65472x1025", "softmax_bf16_16384x4096",
    "softmax_bf16_1024x65536", "cross_entropy_bf16_8192x50257", "layernorm_bwd_bf16_65536x1024", "rmsnorm_bwd_bf16_16388x4095",
    "bias_gelu_bwd_bf16_16384x4096")


@cache
def case(name: str) -> Case:
    """The case of that name, listed or not. Raises ValueError."""
    return parse(name)


def chosen(patterns: list[str], groups: list[str]) -> list[str]:
    """Names for `--cases` and `--group`: globs over the list and what lies beyond it; a name that matches nothing is built as it stands.
    Neither: the list. Groups 'more' and 'contractions' (see BEYOND): what lies beyond the list. Raises ValueError."""
    everything = tuple(dict.fromkeys(chain(NAMES, *BEYOND.values())))
    names = [n for n in everything if any(fnmatchcase(n, p) for p in patterns)] if patterns else list(everything if groups else NAMES)
    for p in patterns:
        if not any(c in p for c in "*?[") and p not in names:
            names.append(case(p).name)
    if groups:
        beyond = {n for g in groups for n in BEYOND.get(g, ())}
        names = [n for n in names if n in beyond or (case(n).group in groups and (n in NAMES or patterns))]
    if not names:
        raise ValueError(f"no case matches {' '.join(patterns + groups)}; families: {', '.join(FAMILIES)}")
    return names
