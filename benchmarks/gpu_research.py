"""What the libraries have no layer for: norms, gates, losses and poolings as researchers write them in PyTorch, for the GPU cases.

No heuristic was made for any of these by name. `gpu_drawn` draws their sizes with `--of research`.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from .gpu_case import Recipe, Spec, bias, family, index, stream, weight
from .gpu_families import layernorm, wide

EPS = 1e-6


def _rows(name: str, group: str, *others):
    """Enters `fn`, of one stream (rows, columns) and what `others` make of (dtype, rows, columns), as the family `name`."""
    def enter(fn):
        family(name, group)(lambda d, rows, cols: Recipe(fn, (stream(d, rows, cols), *(o(d, rows, cols) for o in others))))
        return fn
    return enter


def _stack(name: str, group: str, *others):
    """The same of a stream (batch, length, width)."""
    def enter(fn):
        family(name, group)(
            lambda d, batch, length, width: Recipe(fn, (stream(d, batch, length, width), *(o(d, batch, length, width) for o in others))))
        return fn
    return enter


def _images(name: str, group: str, *others):
    """The same of images (n, c, h, w) in either layout; `others` take (dtype, c)."""
    def enter(fn):
        family(name, group, images=True)(
            lambda d, n, c, h, w, *, layout: Recipe(fn, (stream(d, n, c, h, w, layout=layout), *(o(d, c) for o in others))))
        return fn
    return enter


def _same(d, *sizes) -> Spec:
    return stream(d, *sizes)


def _columns(d, *sizes) -> Spec:
    return weight(d, sizes[-1])


def _shift(d, *sizes) -> Spec:
    return bias(d, sizes[-1])


def _one(d, *sizes) -> Spec:
    return weight(d, 1)


def _each(d, batch, length, width) -> Spec:
    """A number for each of the batch and each column."""
    return Spec((batch, width), d, scale=0.1)


def _lengths(d, batch, length, width) -> Spec:
    return index(length, batch)


def _classes(d, rows, cols) -> Spec:
    return index(cols, rows)


def _channel(d, c) -> Spec:
    return weight(d, 1, c, 1, 1)


def rms(h, axis=-1):
    return h * torch.rsqrt(h.pow(2).mean(axis, keepdim=True) + EPS)


def there(x, lengths):
    """(batch, length, 1): the positions that each of the batch has; one at least."""
    return (torch.arange(x.shape[1], device=x.device) <= lengths[:, None])[:, :, None]


# -- gates, positions --------------------------------------------------------------------------------------------------------
@family("geglu_packed", "pointwise")
def _geglu_packed(d, rows, cols):
    """Both halves of a projection in one tensor."""
    def geglu_packed(x):
        a, b = x.chunk(2, -1)
        return F.gelu(a) * b
    return Recipe(geglu_packed, (stream(d, rows, 2 * cols),))


@_stack("modulate", "pointwise", _each, _each)
def modulate(x, scale, shift):
    return x * (1 + scale[:, None]) + shift[:, None]


@_rows("layer_scale", "pointwise", _same, _columns)
def layer_scale(x, y, gamma):
    return x + gamma * y


@_rows("dynamic_tanh", "pointwise", _one, _columns, _shift)
def dynamic_tanh(x, alpha, gamma, beta):
    """Dynamic tanh, which stands for a norm; its backward pass sums a gradient of one number beside those of columns."""
    return gamma * torch.tanh(alpha * x) + beta


@_images("snake", "pointwise", _channel)
def snake(x, a):
    return x + torch.sin(a * x).pow(2) / (a + EPS)


@_images("squeeze_gate", "pointwise", _channel, _channel)
def squeeze_gate(x, w, b):
    """A gate of each channel's mean."""
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True) * w + b)


def rotate(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _angles(d, length: int, width: int) -> tuple[Spec, Spec]:
    """Cosines and sines of positions, which nobody learns."""
    return (Spec((length, width), d, "buffer"),) * 2


@family("rotary", "pointwise")
def _rotary(d, batch, length, heads, width):
    """Positions of heads as a projection leaves them."""
    return Recipe(lambda x, cos, sin: x * cos[:, None] + rotate(x) * sin[:, None],
                  (stream(d, batch, length, heads, width), *_angles(d, length, width)))


@family("norm_rotary", "norm")
def _norm_rotary(d, batch, length, heads, width):
    """Queries that are normed, then turned."""
    def norm_rotary(x, w, cos, sin):
        x = w * rms(wide(x)).to(x.dtype)
        return x * cos[:, None] + rotate(x) * sin[:, None]
    return Recipe(norm_rotary, (stream(d, batch, length, heads, width), weight(d, width), *_angles(d, length, width)))


# -- norms -------------------------------------------------------------------------------------------------------------------
@_rows("scale_norm", "norm", _one)
def scale_norm(x, g):
    return g * F.normalize(x, dim=-1)


@_rows("power_norm", "norm", _columns)
def power_norm(x, w):
    """Rows over the fourth root of their fourth moment."""
    h = wide(x)
    return w * (h / (h.pow(4).mean(-1, keepdim=True) + EPS).pow(0.25)).to(x.dtype)


@_rows("gated_rmsnorm", "norm", _same, _columns)
def gated_rmsnorm(x, z, w):
    return w * rms(wide(x) * F.silu(wide(z))).to(x.dtype)


@_rows("rmsnorm_add", "norm", _same, _columns)
def rmsnorm_add(x, residual, w):
    """The sum of both streams, normed, and the sum."""
    h = x + residual
    return w * rms(wide(h)).to(x.dtype) + h


@_rows("sandwich_norm", "norm", _same, _columns, _columns)
def sandwich_norm(x, residual, w, v):
    """A norm of a branch, added, and a norm of the sum."""
    h = wide(residual) + w * rms(wide(x))
    return (v * rms(h)).to(x.dtype)


@_rows("block_norm", "norm", _columns, _shift)
def block_norm(x, w, b):
    """A norm of what is left of a row when its softmax is taken off."""
    h = wide(x)
    return layernorm((h - torch.softmax(h, -1)).to(x.dtype), w, b)


@_stack("ada_layernorm", "norm", _each, _each)
def ada_layernorm(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]


@_rows("standardize_columns", "norm")
def standardize_columns(x):
    h = wide(x)
    return ((h - h.mean(0)) / (h.std(0) + EPS)).to(x.dtype)


@_rows("min_max", "norm")
def min_max(x):
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - low) / (high - low + EPS)


@_images("layernorm_2d", "norm", _channel, _channel)
def layernorm_2d(x, w, b):
    """Channels of each pixel, as ConvNeXt writes it."""
    h = wide(x)
    u = h.mean(1, keepdim=True)
    s = (h - u).pow(2).mean(1, keepdim=True)
    return w * ((h - u) * torch.rsqrt(s + EPS)).to(x.dtype) + b


@_images("response_norm", "norm", _channel, _channel)
def response_norm(x, w, b):
    """ConvNeXt V2's global response norm."""
    h = wide(x)
    g = h.pow(2).sum((2, 3), keepdim=True).sqrt()
    n = g / (g.mean(1, keepdim=True) + EPS)
    return w * (h * n).to(x.dtype) + b + x


@_images("frn", "norm", _channel, _channel, _channel)
def frn(x, w, b, t):
    """Filter response norm and its thresholded unit."""
    h = wide(x)
    h = (h * torch.rsqrt(h.pow(2).mean((2, 3), keepdim=True) + EPS)).to(x.dtype)
    return torch.maximum(w * h + b, t)


@_stack("softmax_middle", "norm")
def softmax_middle(x):
    return torch.softmax(x, 1)


@_stack("masked_softmax", "norm", _lengths)
def masked_softmax(x, lengths):
    """Weights of positions, down each column."""
    return torch.softmax((x / 0.7).masked_fill(~there(x, lengths), -float("inf")), 1)


@_rows("double_softmax", "norm")
def double_softmax(x):
    """Both ways, as matching does: the product of a softmax along rows and one down columns."""
    h = wide(x)
    return (torch.softmax(h, -1) * torch.softmax(h, 0)).to(x.dtype)


@_stack("groups_scaled", "norm")
def groups_scaled(x):
    """Codes of 8 bits, and a scale of each run along the last axis."""
    h = wide(x)
    scale = h.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127
    return (h / scale).round().clamp(-128, 127).to(torch.int8), scale[..., 0]


# -- reductions --------------------------------------------------------------------------------------------------------------
@_stack("pooled_statistics", "reduction")
def pooled_statistics(x):
    """Mean and deviation over positions, side by side."""
    h = wide(x)
    return torch.cat((h.mean(1), h.std(1)), -1)


@_stack("masked_mean", "reduction", _lengths)
def masked_mean(x, lengths):
    keep = there(x, lengths)
    return (wide(x) * keep).sum(1) / keep.sum(1)


@_rows("cosine", "reduction", _same)
def cosine(x, y):
    return F.cosine_similarity(wide(x), wide(y), dim=-1)


@_rows("kurtosis", "reduction")
def kurtosis(x):
    h = wide(x)
    h = h - h.mean(-1, keepdim=True)
    return h.pow(4).mean(-1) / h.pow(2).mean(-1).pow(2)


@_rows("entropy", "reduction")
def entropy(x):
    p = torch.log_softmax(wide(x), -1)
    return -(p.exp() * p).sum(-1)


@_rows("correlations", "reduction", _same)
def correlations(x, y):
    """Of each column of both."""
    x, y = wide(x), wide(y)
    x, y = x - x.mean(0), y - y.mean(0)
    return (x * y).sum(0) / (x.pow(2).sum(0) * y.pow(2).sum(0)).sqrt()


# -- losses ------------------------------------------------------------------------------------------------------------------
@_rows("distillation", "loss", _same)
def distillation(student, teacher):
    p, q = torch.log_softmax(wide(teacher) / 2, -1), torch.log_softmax(wide(student) / 2, -1)
    return (p.exp() * (p - q)).sum(-1).mean()


@_rows("smooth_cross_entropy", "loss", _classes)
def smooth_cross_entropy(x, target):
    """With a share for every class, and a price for large logits."""
    h = wide(x)
    return F.cross_entropy(h, target, label_smoothing=0.1) + 1e-4 * torch.logsumexp(h, -1).pow(2).mean()


@_rows("focal", "loss", _classes)
def focal(x, target):
    logp = torch.log_softmax(wide(x), -1).gather(1, target[:, None])[:, 0]
    return (-(1 - logp.exp()).pow(2) * logp).mean()


@_rows("cosine_loss", "loss", _same)
def cosine_loss(x, y):
    return (1 - (F.normalize(wide(x), dim=-1) * F.normalize(wide(y), dim=-1)).sum(-1)).mean()


@_stack("masked_huber", "loss", _same, _lengths)
def masked_huber(x, y, lengths):
    keep = there(x, lengths)
    return (F.huber_loss(wide(x), wide(y), reduction="none") * keep).sum() / (keep.sum() * x.shape[-1])


@_rows("gaussian_nll", "loss", _same, _same)
def gaussian_nll(mean, log_var, y):
    mean, log_var, y = wide(mean), wide(log_var), wide(y)
    return 0.5 * (log_var + (y - mean).pow(2) * torch.exp(-log_var)).mean()


@family("contrastive", "loss")
def _contrastive(d, n):
    """Cross-entropy along rows and down columns of similarities, of which the diagonal is right."""
    def contrastive(x):
        h = wide(x)
        return (torch.logsumexp(h, 1) + torch.logsumexp(h, 0) - 2 * h.diagonal()).mean() / 2
    return Recipe(contrastive, (stream(d, n, n),))


@_rows("preference", "loss", _classes)
def preference(x, target):
    """How much more likely the targets of the first half are than those of the second."""
    logp = torch.log_softmax(wide(x), -1).gather(1, target[:, None])[:, 0]
    half = x.shape[0] // 2
    return -F.logsigmoid(0.1 * (logp[:half] - logp[half:2 * half])).mean()
