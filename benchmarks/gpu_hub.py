"""Every base model of `transformers` that a small configuration fits, captured and planned for an H200 without one: does the compiler take it?

    python -m benchmarks.gpu_hub [NAME ...] [--part I --of N]

A line a model, by its `model_type`: `ok` and how many graphs and kernels; `bug`, where the compiler raised, and what; `-`, where it was not tried
(the model is large, or eager refuses the small configuration) or ran on what no kernel had computed and gave up. A training step under bfloat16
autocast, random weights, strict mode; kernels are lowered, not built, and do nothing when they are called. Ends with status 1 where there was a bug.
All of them take about ten minutes on two cores, one `--part` each.
"""
from __future__ import annotations

import argparse
import inspect
import sys
import traceback
import warnings

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import tokamak
from tokamak.codegen.stages import render_plan

from .gpu_plans import planning

LARGEST = 60_000_000            # parameters of a model that is tried
BATCH, LENGTH, EDGE = 2, 32, 64
WIDTH, HEADS = 48, 4
SMALL = {**dict.fromkeys("hidden_size d_model n_embd embed_dim dim embedding_size".split(), WIDTH),
         **dict.fromkeys("intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim".split(), 2 * WIDTH),
         **dict.fromkeys("""num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
                         num_experts_per_tok""".split(), 1),
         **dict.fromkeys("num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads".split(), HEADS),
         **dict.fromkeys("num_key_value_heads num_experts num_local_experts type_vocab_size".split(), 2),
         **dict.fromkeys("max_position_embeddings n_positions".split(), 128),
         **dict.fromkeys("max_source_positions max_target_positions".split(), 64),
         **dict.fromkeys("d_kv head_dim".split(), WIDTH // HEADS), **dict.fromkeys("q_lora_rank kv_lora_rank patch_size".split(), 16),
         **dict.fromkeys("rotary_dim state_size num_buckets".split(), 8), **dict.fromkeys("bos_token_id decoder_start_token_id".split(), 1),
         "image_size": EDGE, "vocab_size": 120, "pad_token_id": 0, "eos_token_id": 2, "use_cache": False}


class Refused(Exception):
    """A model is not tried; why."""


def model(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small one of the type `name`, and inputs. Raises Refused."""
    config = transformers.CONFIG_MAPPING[name]()
    for key, value in SMALL.items():
        if hasattr(config, key):
            try:
                setattr(config, key, value)
            except Exception:               # a property of others
                continue
    if isinstance(layers := getattr(config, "layer_types", None), list):
        config.layer_types = layers[:1]
    with torch.device("meta"):
        if sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters()) > LARGEST:
            raise Refused("large")
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(config).train()
    edge = getattr(config, "image_size", EDGE)
    edge = edge if isinstance(edge, int) else EDGE
    every = {"input_ids": lambda: torch.randint(3, 100, (BATCH, LENGTH)), "decoder_input_ids": lambda: torch.randint(3, 100, (BATCH, LENGTH)),
             "pixel_values": lambda: torch.randn(BATCH, getattr(config, "num_channels", 3) or 3, edge, edge),
             "input_features": lambda: torch.randn(BATCH, getattr(config, "num_mel_bins", 80), 128), "input_values": lambda: torch.randn(BATCH, 4000)}
    asked = inspect.signature(made.forward).parameters
    return made, {k: make() for k, make in every.items() if k in asked}


def loss(made: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A number of the first two outputs that have gradients."""
    with torch.autocast("cpu", torch.bfloat16):
        out = made(**inputs)
        found = [x for x in (out.values() if hasattr(out, "values") else out)
                 if isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point()]
        return sum(x.float().pow(2).mean() for x in found[:2])


def tried(name: str) -> tuple[str, str]:
    """('ok', 'bug' or '-', what there is to say)."""
    try:
        made, inputs = model(name)
        loss(made, inputs).backward()
    except Exception as error:
        return "-", str(error) if isinstance(error, Refused) else f"eager: {type(error).__name__}: {first_line(error)}"
    torch._dynamo.reset()
    step = tokamak.compile(lambda **given: loss(made, given), target="interpret", strict=True, dynamic=False)
    with planning() as recorder:
        try:
            step(**inputs).backward()
        except Exception as error:
            if raised_by_the_compiler(error):
                error = getattr(error, "inner_exception", error)            # what Dynamo hands on
                return "bug", f"{type(error).__name__}: {first_line(error)}"
            return "-", f"gave up: {type(error).__name__}: {first_line(error)}"
    kernels = sum(len(b.parts) for g in recorder.graphs for b in render_plan(g.values["lower"]).values() if hasattr(b, "parts"))
    return "ok", f"{len(recorder.graphs)} graphs, {kernels} kernels"


def raised_by_the_compiler(error: BaseException) -> bool:
    """Was it raised while a graph was compiled, not while one ran?"""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if any(f.name == "compile_graph" for f in traceback.extract_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:160]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.gpu_hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", metavar="NAME", help="types of models; all of them where none is given")
    p.add_argument("--part", type=int, default=0, metavar="I", help="only one model in N, from the one at I on")
    p.add_argument("--of", type=int, default=1, metavar="N")
    args = p.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    counted = dict.fromkeys(("ok", "bug", "-"), 0)
    for name in (args.names or sorted(MODEL_MAPPING_NAMES))[args.part::args.of]:
        what, why = tried(name)
        counted[what] += 1
        print(f"{what:4}{name}  {why}", flush=True)
    print(f"{counted['ok']} compiled, {counted['bug']} did not, {counted['-']} were not tried or gave up")
    return int(counted["bug"] > 0)


if __name__ == "__main__":
    sys.exit(main())
