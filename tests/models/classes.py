"""Training steps of every class of models that transformers has, as small as its configuration allows, against eager and float64.

    python -m tests.models.classes [--target interpret] [--autocast] [--limit SECONDS] [--file FILE] [NAME ...]

A line for each: right, WRONG with what is off, FAILED with the error, `left out` where the class can't be built so small or eager can't run it.
Every class runs in a process of its own; those whose line `--file` holds are not run again. The exit status is 1 where one is wrong or failed.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import transformers as tf
from torch import nn
from transformers.models.auto import modeling_auto as known

from .steps import UNIT, compare, eager, exact, train

LARGEST = 30_000_000        # parameters of a model that is run
WORDS, LENGTH, LABELS = 96, 16, 10
KINDS = {"words": known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "masked": known.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
         "sequences": known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "images": known.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES}
SIZES = {size: value for names, value in (
    ("hidden_size d_model n_embd dim embed_dim embedding_size moe_intermediate_size shared_expert_intermediate_size", 32),
    ("intermediate_size ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size", 64),
    ("num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers", 2),
    ("num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads", 4),
    ("num_experts num_local_experts n_routed_experts", 4), ("num_key_value_heads num_experts_per_tok", 2),
    ("head_dim d_kv state_size patch_size sliding_window attention_window qk_rope_head_dim qk_nope_head_dim v_head_dim", 8),
    ("linear_key_head_dim linear_value_head_dim", 8), ("linear_num_key_heads linear_num_value_heads", 2), ("q_lora_rank kv_lora_rank", 16),
    ("max_position_embeddings n_positions n_ctx max_seq_len", 64), ("image_size", 32), ("vocab_size", WORDS), ("n_group topk_group", 1),
    ("first_k_dense_replace bos_token_id decoder_start_token_id", 1), ("pad_token_id zero_expert_num", 0), ("eos_token_id", 2), ("use_cache", False),
) for size in names.split()}


def classes() -> dict[str, str]:
    """Each class -> what it is made for, one of KINDS."""
    found: dict[str, str] = {}
    for kind, names in KINDS.items():
        for name in names.values():
            found.setdefault(name if isinstance(name, str) else name[0], kind)
    return dict(sorted(found.items()))


def shrunk(config):
    """`config` with small sizes and without dropout, and those within it likewise."""
    for name, value in list(vars(config).items()):
        name = name.removeprefix("_")
        if name in SIZES and isinstance(value, int):
            setattr(config, name, SIZES[name])
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0], config.layer_types[-1]]
    for name in getattr(config, "sub_configs", None) or ():
        if getattr(config, name, None) is not None:
            shrunk(getattr(config, name))
    return config


def build(name: str) -> tuple[nn.Module, dict]:
    """(a model of the class in training mode, its inputs). Raises ValueError where it is too large."""
    kind, made, numbers = classes()[name], getattr(tf, name), torch.Generator().manual_seed(1)
    config = shrunk(made.config_class())
    if kind == "images":
        config.num_labels = LABELS
    torch.manual_seed(0)
    model = made(config).train()
    if (size := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise ValueError(f"{size} parameters")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1 and not p.std() >= 1e-3:         # start values from which nothing comes; or none at all
                p.normal_(0, 0.1, generator=numbers)
    if kind == "images":
        side = getattr(config, "image_size", 64) or 64       # of 32, batch norm is over two values at the end: nothing but roundings
        side = min(64, max(32, side[0] if isinstance(side, (list, tuple)) else side))
        return model, {"pixel_values": torch.randn(2, getattr(config, "num_channels", 3), side, side, generator=numbers),
                       "labels": torch.randint(0, LABELS, (2,), generator=numbers)}
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=numbers)
    inputs = {"input_ids": ids, "labels": ids}
    if kind != "sequences":
        inputs["attention_mask"] = torch.ones_like(ids)
        if kind == "masked":
            inputs["attention_mask"][1, LENGTH // 2:] = 0
    return model, inputs


def step(name: str, target: str = "", autocast: bool = False) -> str:
    """What becomes of a training step of the class, in a line."""
    told = lambda e: f"{type(e).__name__} {next(iter(str(e).splitlines()), '')[:160]}"
    try:
        model, inputs = build(name)
        want = eager(model, inputs, UNIT[autocast], autocast=autocast)
    except Exception as e:          # of transformers or of torch, whatever it be
        return f"left out: {told(e)}"
    try:
        true = exact(model, inputs)
    except Exception:               # some cast to float32 on their way: eager is the measure then
        true = want[0]
    if not all(x.isfinite().all() for run in (*want, true) for x in (run.loss, *run.grads.values())):
        return "left out: no finite numbers under eager or in float64"
    try:
        got = train(model, inputs, compiled=True, autocast=autocast, strict=True, target=target)
    except Exception as e:
        return f"FAILED: {told(e)}"
    for absent in got.grads.keys() - want[0].grads.keys():
        if not got.grads[absent].any():
            del got.grads[absent]          # AOTAutograd gives 0 for none behind a break of the graph
    report = compare(got, want, true, UNIT[autocast])
    return f"WRONG: {len(report.wrong)}, {report.wrong[0]}" if report.wrong else f"right, {report.worst:.2f} of what is allowed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="classes; all of them when none is given")
    parser.add_argument("--target", choices=("", "interpret"), default="", help="'interpret': kernels as for a GPU, in Triton's interpreter")
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each")
    parser.add_argument("--file", type=Path, help="where lines are added")
    parser.add_argument("--here", action="store_true", help="in this process, one class")
    o = parser.parse_args()
    if unknown := set(o.names) - classes().keys():
        parser.error(f"no classes of transformers: {', '.join(sorted(unknown))}")
    if o.here:
        tf.logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        print(step(o.names[0], o.target, o.autocast))
        return 0
    done = {line.split()[0] for line in o.file.read_text().splitlines()} if o.file is not None and o.file.exists() else set()
    bad = 0
    for name in (n for n in o.names or classes() if n not in done):
        command = [sys.executable, "-m", "tests.models.classes", name, "--here", "--target", o.target, *(["--autocast"] * o.autocast)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=o.limit, env={**os.environ, "TOKAMAK_STRICT": "1"})
            said = next(iter(ran.stdout.splitlines()[-1:]), f"FAILED: exit status {ran.returncode}")
        except subprocess.TimeoutExpired:
            said = f"left out: more than {o.limit:g} s"
        bad += said.startswith(("WRONG", "FAILED"))
        print(f"{name} {said}", flush=True)
        if o.file is not None:
            with o.file.open("a") as f:
                f.write(f"{name} {said}\n")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
