"""Training steps of whole models: transformers' own classes, random weights, in any size.

A `Step` builds a model and its inputs from a `Size`; everything that makes the structure (blocks, heads, experts, stages, losses) stays, only widths,
depths and lengths change. `SMALL` is the least that keeps each structure.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as tf
from torch import nn

tf.logging.set_verbosity_error()


@dataclass(frozen=True)
class Size:
    """`layers` of `width` (heads of 16 to 64), a batch of sequences of `length` tokens; `vocabulary`; `image`: pixels a side; `channels`: what the
    layouts of the convolution nets are multiplied with (1: as published), `depth` likewise for their stages."""
    batch: int = 2
    layers: int = 2
    width: int = 32
    length: int = 16
    vocabulary: int = 96
    image: int = 64
    channels: float = 0.125
    depth: float = 0.16

    @property
    def heads(self) -> int:
        return max(4, self.width // 64)


SMALL = Size()


@dataclass(frozen=True)
class Step:
    """`model(size, dropout)` in training mode; `inputs(size)` are its keyword arguments, labels included. `images`: its input is one of images."""
    model: Callable[[Size, float], nn.Module]
    inputs: Callable[[Size], dict]
    images: bool = False

    def build(self, size: Size = SMALL, attention: str = "sdpa", dropout: float = 0.0) -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = self.model(size, dropout)
        if hasattr(made, "set_attn_implementation") and not isinstance(made, _CONVOLUTIONS):
            made.set_attn_implementation(attention)
        return made.train()


def _tokens(s: Size) -> dict:
    ids = torch.randint(1, s.vocabulary, (s.batch, s.length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _images(s: Size) -> dict:
    g = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(s.batch, 3, s.image, s.image, generator=g), "labels": torch.randint(0, 10, (s.batch,), generator=g)}


def _bert(s: Size, p: float):
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
                                            intermediate_size=4 * s.width, hidden_dropout_prob=p, attention_probs_dropout_prob=p))


def _gpt2(s: Size, p: float):
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=s.vocabulary, n_embd=s.width, n_layer=s.layers, n_head=s.heads, n_positions=max(s.length, 128),
                                            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, bos_token_id=0, eos_token_id=0, use_cache=False))


def _llama(s: Size, p: float):
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
                                              num_key_value_heads=s.heads // 2, intermediate_size=8 * s.width // 3 // 8 * 8, attention_dropout=p,
                                              use_cache=False))


def _t5(s: Size, p: float):
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=s.vocabulary, d_model=s.width, d_kv=s.width // s.heads, d_ff=4 * s.width,
                                                     num_layers=s.layers, num_heads=s.heads, dropout_rate=p, decoder_start_token_id=0,
                                                     pad_token_id=0, use_cache=False))


def _mixtral(s: Size, p: float):
    return tf.MixtralForCausalLM(tf.MixtralConfig(vocab_size=s.vocabulary, hidden_size=s.width, num_hidden_layers=s.layers,
                                                  num_attention_heads=s.heads, num_key_value_heads=s.heads // 2, intermediate_size=2 * s.width,
                                                  num_local_experts=4, attention_dropout=p, output_router_logits=True, use_cache=False))


def _resnet50(s: Size, p: float):
    wide = lambda n: max(8, int(n * s.channels) // 8 * 8)
    config = tf.ResNetConfig(embedding_size=wide(64), hidden_sizes=[wide(n) for n in (256, 512, 1024, 2048)], num_labels=10,
                             depths=[max(1, round(n * s.depth)) for n in (3, 4, 6, 3)])
    return tf.ResNetForImageClassification(config)


def _efficientnet_b4(s: Size, p: float):
    width = 1.4 * s.channels
    top = max(8, int(1280 * width + 4) // 8 * 8)         # transformers wants what the last stage rounds to, told apart
    config = tf.EfficientNetConfig(image_size=s.image, width_coefficient=width, depth_coefficient=1.8 * s.depth, hidden_dim=top, num_labels=10,
                                   dropout_rate=p, drop_connect_rate=p)
    made = tf.EfficientNetForImageClassification(config)
    for m in made.modules():                            # transformers' own start values vanish on their way through narrow stages
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight)
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.ones_(m.weight)
    return made


def _vit(s: Size, p: float):
    return tf.ViTForImageClassification(tf.ViTConfig(hidden_size=s.width, num_hidden_layers=s.layers, num_attention_heads=s.heads,
                                                     intermediate_size=4 * s.width, image_size=s.image, patch_size=16,
                                                     num_labels=10, hidden_dropout_prob=p, attention_probs_dropout_prob=p))


_CONVOLUTIONS = (tf.ResNetForImageClassification, tf.EfficientNetForImageClassification)
STEPS = {"bert": Step(_bert, _tokens), "gpt2": Step(_gpt2, _tokens), "llama": Step(_llama, _tokens), "t5": Step(_t5, _tokens),
         "mixtral": Step(_mixtral, _tokens), "resnet50": Step(_resnet50, _images, True), "efficientnet_b4": Step(_efficientnet_b4, _images, True),
         "vit": Step(_vit, _images, True)}
CONVOLUTIONS = ("resnet50", "efficientnet_b4")
