"""What lies along one axis and is read or written along another, as models have it, for the GPU cases: biases of positions, tokens of images, heads
and windows apart, images in both memory formats.

No heuristic was made for any of these by name. `gpu_drawn` draws their sizes with `--of layouts`.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from .gpu_case import Recipe, bias, family, stream, weight
from .gpu_families import layernorm, wide
from .gpu_research import rms

WINDOW = 7


@family("position_softmax", "norm")
def _position_softmax(d, batch, heads, length):
    """Scores and a bias of each two positions and head, heads innermost, as an embedding leaves them (T5, Swin, BEiT)."""
    return Recipe(lambda x, b: torch.softmax(x + b.permute(2, 0, 1), -1), (stream(d, batch, heads, length, length), bias(d, length, length, heads)))


@family("patch_norm", "norm")
def _patch_norm(d, batch, channels, height, width):
    """Channels of an image's patches as tokens, their positions, a LayerNorm (ViT)."""
    return Recipe(lambda x, positions, w, b: layernorm(x.flatten(2).transpose(1, 2) + positions, w, b),
                  (stream(d, batch, channels, height, width), bias(d, height * width, channels), weight(d, channels), bias(d, channels)))


@family("norm_turned", "norm")
def _norm_turned(d, batch, length, width):
    """A LayerNorm whose result is mixed along positions (MLP-Mixer)."""
    return Recipe(lambda x, w, b: layernorm(x, w, b).transpose(1, 2).contiguous(),
                  (stream(d, batch, length, width), weight(d, width), bias(d, width)))


@family("rmsnorm_both", "norm")
def _rmsnorm_both(d, batch, length, width):
    """The sum of a stream and of one that lies the other way, normed."""
    return Recipe(lambda x, y, w: w * rms(wide(x + y.transpose(1, 2))).to(x.dtype),
                  (stream(d, batch, length, width), stream(d, batch, width, length), weight(d, width)))


@family("groupnorm_tokens", "norm")
def _groupnorm_tokens(d, batch, channels, height, width):
    """A GroupNorm of an image, whose pixels are tokens then (the attention of a diffusion model)."""
    return Recipe(lambda x, w, b: F.group_norm(x, 32, w, b).flatten(2).transpose(1, 2).contiguous(),
                  (stream(d, batch, channels, height, width), weight(d, channels), bias(d, channels)))


@family("window_norm", "norm")
def _window_norm(d, batch, windows, channels):
    """A LayerNorm of pixels, then windows apart (Swin)."""
    edge = windows * WINDOW

    def window_norm(x, w, b):
        h = layernorm(x, w, b).view(batch, windows, WINDOW, windows, WINDOW, channels)
        return h.permute(0, 1, 3, 2, 4, 5).contiguous()
    return Recipe(window_norm, (stream(d, batch, edge, edge, channels), weight(d, channels), bias(d, channels)))


@family("heads_apart", "pointwise")
def _heads_apart(d, batch, length, heads, width):
    """A projection's bias, then queries, keys and values of each head."""
    return Recipe(lambda x, b: (x + b).view(batch, length, 3, heads, width).permute(2, 0, 3, 1, 4).contiguous(),
                  (stream(d, batch, length, 3 * heads * width), bias(d, 3 * heads * width)))


@family("heads_joined", "pointwise")
def _heads_joined(d, batch, heads, length, width):
    """Heads side by side again, under a gate."""
    return Recipe(lambda x, gate: x.transpose(1, 2).reshape(batch, length, heads * width) * torch.sigmoid(gate),
                  (stream(d, batch, heads, length, width), stream(d, batch, length, heads * width)))


@family("formats_added", "pointwise")
def _formats_added(d, batch, channels, height, width):
    """An image in NCHW, and one in NHWC."""
    return Recipe(lambda x, y: F.silu(x + y),
                  (stream(d, batch, channels, height, width), stream(d, batch, channels, height, width, layout=torch.channels_last)))


@family("pixels_shuffled", "pointwise")
def _pixels_shuffled(d, batch, channels, height, width):
    """Twice the edge of a quarter of the channels (super-resolution), and its activation."""
    return Recipe(lambda x, b: F.leaky_relu(F.pixel_shuffle(x + b, 2), 0.1),
                  (stream(d, batch, 4 * channels, height, width), bias(d, 4 * channels, 1, 1)))


@family("columns_scored", "reduction")
def _columns_scored(d, batch, length, width):
    """Means along rows of the product of a stream and of one that lies the other way."""
    return Recipe(lambda x, y: (wide(x) * wide(y.transpose(1, 2))).mean(-1), (stream(d, batch, length, width), stream(d, batch, width, length)))
