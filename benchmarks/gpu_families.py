"""What the GPU cases compute: each function as a user writes it in PyTorch, with the shapes of its tensors for any sizes."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .cases import attention, evonorm, gelu_chain, gelu_steps, py_layernorm
from .gpu_case import Recipe, Spec, bias, coded, family, index, matrix, stream, weight

LOW = (torch.float16, torch.bfloat16)


def wide(x):
    """16-bit values as float32, as users write before a sum; wider ones as they are."""
    return x.float() if x.dtype in LOW else x


# -- pointwise ---------------------------------------------------------------------------------------------------------------
@family("gelu_chain", "pointwise")
def _gelu_chain(d, n):
    return Recipe(gelu_chain, (stream(d, n),))


@family("gelu_steps", "pointwise")
def _gelu_steps(d, n):
    return Recipe(gelu_steps, (stream(d, n), stream(d, n)))


@family("bias_gelu", "pointwise")
def _bias_gelu(d, rows, cols):
    return Recipe(lambda x, b: F.gelu(x + b), (stream(d, rows, cols), bias(d, cols)))


@family("swiglu", "pointwise")
def _swiglu(d, rows, cols):
    return Recipe(lambda gate, up: F.silu(gate) * up, (stream(d, rows, cols), stream(d, rows, cols)))


# -- reductions --------------------------------------------------------------------------------------------------------------
def _reduction(name, fn):
    @family(name, "reduction")
    def _(d, rows, cols):
        return Recipe(fn, (stream(d, rows, cols),))


_reduction("sum_inner", lambda x: x.sum(1))
_reduction("sum_outer", lambda x: x.sum(0))
_reduction("var_mean", lambda x: torch.var_mean(x, -1))
_reduction("var", lambda x: x.var(-1))
_reduction("amax_argmax", lambda x: (x.amax(-1), x.argmax(-1)))
_reduction("logsumexp", lambda x: torch.logsumexp(x, -1))
_reduction("l1norm", lambda x: x.norm(p=1, dim=-1))
_reduction("l2norm", lambda x: x.norm(p=2, dim=-1))
_reduction("cumsum", lambda x: x.cumsum(-1))
_reduction("cumsum_outer", lambda x: x.cumsum(0))


@family("sum_all", "reduction")
def _sum_all(d, n):
    return Recipe(lambda x: x.sum(), (stream(d, n),))


@family("sum_middle", "reduction")
def _sum_middle(d, outer, middle, inner):
    return Recipe(lambda x: x.sum(1), (stream(d, outer, middle, inner),))


@family("cumsum_middle", "reduction")
def _cumsum_middle(d, outer, middle, inner):
    return Recipe(lambda x: x.cumsum(1), (stream(d, outer, middle, inner),))


# -- norms -------------------------------------------------------------------------------------------------------------------
def layernorm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b)


def rmsnorm(x, w):
    """RMSNorm as language models write it."""
    h = wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def rmsnorm_middle(x, w):
    """RMSNorm over the middle axis of three: channels before positions."""
    h = wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-6)
    return w[:, None] * h.to(x.dtype)


@family("layernorm", "norm")
def _layernorm(d, rows, cols):
    return Recipe(layernorm, (stream(d, rows, cols), weight(d, cols), bias(d, cols)))


@family("py_layernorm", "norm")
def _py_layernorm(d, rows, cols):
    return Recipe(py_layernorm, (stream(d, rows, cols), weight(d, cols), bias(d, cols)))


@family("rmsnorm", "norm")
def _rmsnorm(d, rows, cols):
    return Recipe(rmsnorm, (stream(d, rows, cols), weight(d, cols)))


@family("rmsnorm_middle", "norm")
def _rmsnorm_middle(d, outer, middle, inner):
    return Recipe(rmsnorm_middle, (stream(d, outer, middle, inner), weight(d, middle)))


@family("softmax", "norm")
def _softmax(d, rows, cols):
    return Recipe(lambda x: torch.softmax(x, -1), (stream(d, rows, cols),))


@family("log_softmax", "norm")
def _log_softmax(d, rows, cols):
    return Recipe(lambda x: torch.log_softmax(x, -1), (stream(d, rows, cols),))


@family("weightnorm", "norm")
def _weightnorm(d, rows, cols):
    return Recipe(lambda v, g: v * (g / v.norm(dim=1, keepdim=True)), (stream(d, rows, cols), weight(d, rows, 1)))


def _channels(d, c):
    return weight(d, c), bias(d, c)


@family("batchnorm", "norm", images=True)
def _batchnorm(d, n=64, c=256, h=56, w=56, *, layout):
    """Training mode; the statistics, in float32, move with every call."""
    state = Spec((c,), torch.float32, "buffer", scale=0.1), Spec((c,), torch.float32, "buffer", scale=0.0, mean=1.0)
    wide_d = torch.promote_types(d, torch.float32)
    return Recipe(lambda x, mean, var, g, b: F.batch_norm(x, mean, var, g, b, training=True),
                  (stream(d, n, c, h, w, layout=layout), *state, *_channels(wide_d, c)))


@family("instancenorm3d", "norm", images=True)
def _instancenorm3d(d, n=4, c=32, depth=64, h=64, w=64, *, layout):
    return Recipe(lambda x, g, b: F.instance_norm(x, weight=g, bias=b), (stream(d, n, c, depth, h, w, layout=layout), *_channels(d, c)))


@family("groupnorm", "norm", images=True)
def _groupnorm(d, n=32, c=256, h=56, w=56, *, layout):
    return Recipe(lambda x, g, b: F.group_norm(x, 32, g, b), (stream(d, n, c, h, w, layout=layout), *_channels(d, c)))


@family("evonorm", "norm", images=True)
def _evonorm(d, n=32, c=256, h=56, w=56, *, layout):
    spec = lambda mean: weight(d, 1, c, 1, 1, mean=mean)
    return Recipe(evonorm, (stream(d, n, c, h, w, layout=layout), spec(1.0), spec(1.0), spec(0.0)))


# -- blocks and losses -------------------------------------------------------------------------------------------------------
def _dropout_block(p):
    def bias_dropout_add_ln(x, b, residual, w, beta):
        return layernorm(F.dropout(x + b, p, training=True) + residual, w, beta)
    return bias_dropout_add_ln


@family("bias_dropout_add_ln", "bert")
def _bias_dropout_add_ln(d, rows, cols):
    """The backward pass needs the norm's input alone, not the two streams that made it."""
    specs = stream(d, rows, cols), bias(d, cols), stream(d, rows, cols), weight(d, cols), bias(d, cols)
    return Recipe(_dropout_block(0.1), specs, saved=1, steady=_dropout_block(0.0), dropped=0.1)


@family("cross_entropy", "loss")
def _cross_entropy(d, rows, classes):
    return Recipe(lambda logits, target: F.cross_entropy(wide(logits), target), (stream(d, rows, classes), index(classes, rows)))


@family("linear_ce", "loss")
def _linear_ce(d, rows, inner, classes):
    return Recipe(lambda x, w, target: F.cross_entropy(wide(F.linear(x, w)), target),
                  (stream(d, rows, inner), matrix(d, classes, inner), index(classes, rows)), flops=2 * rows * inner * classes)


# -- contractions ------------------------------------------------------------------------------------------------------------
@family("linear_bias_relu", "gemm")
def _linear_bias_relu(d, rows, inner, out):
    specs = stream(d, rows, inner), matrix(d, out, inner), bias(d, out)
    return Recipe(lambda x, w, b: F.relu(F.linear(x, w, b)), specs, flops=2 * rows * inner * out)


@family("linear_bias_gelu_res", "gemm")
def _linear_bias_gelu_res(d, rows, inner=4096, out=4096):
    return Recipe(lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
                  (stream(d, rows, inner), matrix(d, out, inner), bias(d, out), stream(d, rows, out)), flops=2 * rows * inner * out)


def _behind(name: str, behind, beside: int = 0, gate: bool = False):
    """Enters `linear_NAME`: `behind` takes the product and the bias; `beside`: 1 adds a tensor of the result's shape, `gate` a second product."""
    def build(d, rows, inner, out):
        specs = (stream(d, rows, inner), matrix(d, out, inner), *((matrix(d, out, inner),) if gate else (bias(d, out),)),
                 *(stream(d, rows, out) for _ in range(beside)))
        return Recipe(lambda x, w, b, *r: behind(F.linear(x, w), F.linear(x, b) if gate else b, *r), specs, flops=2 * rows * inner * out * (1 + gate))
    family(f"linear_{name}", "gemm")(build)


_behind("bias", lambda y, b: y + b)
_behind("bias_gelu", lambda y, b: F.gelu(y + b))
_behind("bias_gelu_tanh", lambda y, b: F.gelu(y + b, approximate="tanh"))
_behind("silu_gate", lambda y, u: F.silu(y) * u, gate=True)
_behind("res", lambda y, b, r: y + b + r, beside=1)
_behind("scale", lambda y, b: y * b)


# weights of few bits, in plain PyTorch: integers and a scale for each column of the result, or for each group of GROUP of its depth
GROUP = 128


def scaled(w, s):
    """Integers (out, inner) times scales (out,) or, a group of the depth each, (out, groups)."""
    return w * s[:, None] if s.dim() == 1 else (w.unflatten(1, (s.shape[1], -1)) * s[:, :, None]).flatten(1)


def linear_int8(x, q, s):
    return F.linear(x, scaled(q.to(x.dtype), s))


def linear_int4(x, p, s):
    """Two integers a byte, the first in its low half."""
    halves = torch.stack([p & 15, p >> 4], -1).flatten(1)
    return F.linear(x, scaled(halves.to(x.dtype) - 8, s))


def _few_bits(name, fn, dtype, each, groups):
    @family(name, "quantised")
    def _(d, rows, inner, out):
        scales = weight(d, out, *((max(1, inner // GROUP),) if groups else ()), scale=1e-3, mean=1e-2)
        return Recipe(fn, (stream(d, rows, inner), coded(dtype, out, inner // each), scales), flops=2 * rows * inner * out)


for _groups in (False, True):
    _few_bits(f"linear_int8{'_groups' * _groups}", linear_int8, torch.int8, 1, _groups)
    _few_bits(f"linear_int4{'_groups' * _groups}", linear_int4, torch.uint8, 2, _groups)


def _mlp(activation):
    def build(d, rows, width, hidden):
        return Recipe(lambda x, w1, b1, w2, b2: F.linear(activation(F.linear(x, w1, b1)), w2, b2),
                      (stream(d, rows, width), matrix(d, hidden, width), bias(d, hidden), matrix(d, width, hidden), bias(d, width)),
                      flops=4 * rows * width * hidden)
    return build


family("mlp", "mlp")(_mlp(F.gelu))
family("mlp_small", "mlp")(_mlp(F.relu))


@family("swiglu_mlp", "mlp")
def _swiglu_mlp(d, rows, width, hidden):
    return Recipe(lambda x, gate, up, down: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
                  (stream(d, rows, width), matrix(d, hidden, width), matrix(d, hidden, width), matrix(d, width, hidden)),
                  flops=6 * rows * width * hidden)


# -- attention: the backward pass takes the scores again, so five products to the forward's two --------------------------------
@family("naive_attention", "attention")
def _naive_attention(d, batch, heads, length, width):
    return Recipe(attention, (stream(d, batch, heads, length, width),) * 3, flops=4 * batch * heads * length * length * width, ratio=2.5)


def _in_heads(fn):
    """`fn` of heads that lie behind positions, as a projection leaves them, and back."""
    return lambda q, k, v, *masks: fn(*(x.transpose(1, 2) for x in (q, k, v)), *masks).transpose(1, 2).flatten(2)


def causal_attention(q, k, v):
    """Attention to what came before."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf), -1) @ v


def padded_attention(q, k, v, lengths):
    """Attention to as many keys as each of the batch has, and one."""
    there = torch.arange(k.shape[-2], device=q.device) <= lengths[:, None]
    mask = torch.where(there, torch.zeros((), dtype=q.dtype, device=q.device), torch.finfo(q.dtype).min)[:, None, None]
    return torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask, -1) @ v


@family("causal_attention", "attention")
def _causal_attention(d, batch, heads, length, width):
    return Recipe(_in_heads(causal_attention), (stream(d, batch, length, heads, width),) * 3,
                  flops=2 * batch * heads * length * length * width, ratio=2.5)


@family("padded_attention", "attention")
def _padded_attention(d, batch, heads, length, width):
    return Recipe(_in_heads(padded_attention), (*(stream(d, batch, length, heads, width),) * 3, index(length, batch)),
                  flops=4 * batch * heads * length * length * width, ratio=2.5)


def _dropped_attention(share):
    """Attention written out, of whose weights a share is dropped at random, as in training."""
    return _in_heads(lambda q, k, v: F.dropout(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1), share) @ v)


@family("dropped_attention", "attention")
def _dropped_attention_case(d, batch, heads, length, width):
    return Recipe(_dropped_attention(0.1), (stream(d, batch, length, heads, width),) * 3, flops=4 * batch * heads * length * length * width,
                  ratio=2.5, steady=_dropped_attention(0.0))


def _repeated(x, heads):
    """Keys or values, copied for each of the heads that share them."""
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def cached_attention(q, k, v):
    """Attention of few queries to a cache, written out, as models do: keys are copied for each head."""
    return attention(q, _repeated(k, q.shape[1]), _repeated(v, q.shape[1]))


def cached_sdpa(q, k, v):
    """The same by torch's call."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def cached_sdpa_masked(q, k, v, lengths):
    """The same of as many keys as each of the batch has, and one; keys are copied for each head."""
    there = (torch.arange(k.shape[-2], device=q.device) <= lengths[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, _repeated(k, q.shape[1]), _repeated(v, q.shape[1]), attn_mask=there)


def _cache(fn, *others):
    """`fn` of `rows` queries a head."""
    return lambda d, batch, rows, heads, kept, length, width: Recipe(
        fn, (stream(d, batch, heads, rows, width), *(stream(d, batch, kept, length, width),) * 2, *(o(length, batch) for o in others)),
        flops=4 * batch * heads * rows * length * width)


family("cached_attention", "attention")(_cache(cached_attention))
family("cached_sdpa", "attention")(_cache(cached_sdpa))
family("cached_sdpa_masked", "attention")(_cache(cached_sdpa_masked, index))


def alibi_attention(q, k, v, slopes):
    """Attention with a bias that falls with the distance."""
    at = torch.arange(q.shape[-2], device=q.device)
    distance = (at[:, None] - at[None, :]).abs().to(q.dtype)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) - slopes[:, None, None] * distance
    return torch.softmax(scores, -1) @ v


@family("alibi_attention", "attention")
def _alibi_attention(d, batch, heads, length, width):
    return Recipe(alibi_attention, ((stream(d, batch, heads, length, width),) * 3 + (weight(d, heads, mean=0.3),)),
                  flops=4 * batch * heads * length * length * width, ratio=2.5)
