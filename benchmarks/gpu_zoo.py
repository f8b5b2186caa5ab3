"""The models of `gpu_models`: transformers' and timm's own classes at published sizes, random weights."""
from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Model:
    """`build(dropout, layers)`: the module; `layers` None: as published. `shape`: of its input. `classes`: how many tokens or labels there are.
    `dropout`: whether training drops out at random."""
    build: Callable[[bool, int | None], nn.Module]
    shape: tuple[int, ...]
    classes: int
    modes: tuple[str, ...] = ("infer", "train")
    channels_last: bool = False
    dropout: bool = False

    @property
    def images(self) -> bool:
        return len(self.shape) == 4

    def drops(self, mode: str) -> bool:
        return self.dropout and mode == "train"

    def make(self, dropout: bool = True, layers: int | None = None) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.build(dropout, layers)

    def inputs(self, device: str, seed: int = 1) -> dict[str, torch.Tensor]:
        """'x': images or tokens; 'y': labels, of each image or each token."""
        g = torch.Generator().manual_seed(seed)
        if self.images:
            return {"x": torch.randn(self.shape, generator=g).to(device), "y": torch.randint(self.classes, self.shape[:1], generator=g).to(device)}
        tokens = torch.randint(1, self.classes, self.shape, generator=g).to(device)
        return {"x": tokens, "y": tokens}

    def output(self, model: nn.Module, inputs: dict) -> torch.Tensor:
        """Logits; transformers' classes give them in a record."""
        out = model(inputs["x"])
        return out if isinstance(out, torch.Tensor) else out.logits

    def loss(self, model: nn.Module, inputs: dict) -> torch.Tensor:
        """transformers' own loss over tokens; cross-entropy over images."""
        if self.images:
            return F.cross_entropy(self.output(model, inputs).float(), inputs["y"])
        return model(input_ids=inputs["x"], labels=inputs["y"]).loss


def _bert(attention: str):
    def build(dropout: bool, layers: int | None):
        import transformers as tf
        off = {} if dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = tf.BertConfig(hidden_size=1024, num_hidden_layers=layers or 24, num_attention_heads=16, intermediate_size=4096, **off)
        model = tf.BertForMaskedLM(config)
        model.set_attn_implementation(attention)
        return model
    return build


def _gpt2(dropout: bool, layers: int | None):
    import transformers as tf
    off = {} if dropout else {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=1024, n_layer=layers or 24, n_head=16, use_cache=False, **off))
    model.loss_type = "ForCausalLM"         # which it is without, too; but then transformers logs a warning, for which Dynamo gives up three captures
    return model


def _llama(dropout: bool, layers: int | None):
    import transformers as tf
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers or 16,
                                              num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True, use_cache=False))


def _timm(name: str):
    def build(dropout: bool, layers: int | None):
        import timm
        return timm.create_model(name, pretrained=False)
    return build


MODELS = {
    "bert_large_32x128": Model(_bert("sdpa"), (32, 128), 30522, dropout=True),
    "bert_large_eager_attn_16x512": Model(_bert("eager"), (16, 512), 30522, dropout=True),
    "gpt2_medium_8x512": Model(_gpt2, (8, 512), 50257, dropout=True),
    "llama_1b_4x1024": Model(_llama, (4, 1024), 128256),
    "llama_1b_1x1": Model(_llama, (1, 1), 128256, modes=("infer",)),
    "resnet50_128_nhwc": Model(_timm("resnet50"), (128, 3, 224, 224), 1000, channels_last=True),
    "efficientnet_b4_64_nhwc": Model(_timm("efficientnet_b4"), (64, 3, 320, 320), 1000, channels_last=True),
    "vit_b16_64": Model(_timm("vit_base_patch16_224"), (64, 3, 224, 224), 1000),
}
