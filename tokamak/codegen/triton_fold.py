"""Device functions that fold along an axis of a block, and random numbers; front: `triton_lib`."""
from __future__ import annotations

import triton
import triton.language as tl

from .triton_base import INTERPRETED, maximum, minimum
from .triton_math import exp, exp2_short, exp_short, log1p, normal_of
from .triton_math64 import log1p64


# -- folds ---------------------------------------------------------------------------------------------------------
@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def sums2(x0, x1, axis: tl.constexpr):
    """Several sums at once: warps wait for each other once for all of them, and what is summed of an element need not be kept."""
    if INTERPRETED:
        return tl.sum(x0, axis), tl.sum(x1, axis)
    else:
        return tl.reduce((x0, x1), axis, _add2)


@triton.jit
def sums3(x0, x1, x2, axis: tl.constexpr):
    """See `sums2`."""
    if INTERPRETED:
        return tl.sum(x0, axis), tl.sum(x1, axis), tl.sum(x2, axis)
    else:
        return tl.reduce((x0, x1, x2), axis, _add3)


@triton.jit
def sums4(x0, x1, x2, x3, axis: tl.constexpr):
    """See `sums2`."""
    if INTERPRETED:
        return tl.sum(x0, axis), tl.sum(x1, axis), tl.sum(x2, axis), tl.sum(x3, axis)
    else:
        return tl.reduce((x0, x1, x2, x3), axis, _add4)


@triton.jit
def sums5(x0, x1, x2, x3, x4, axis: tl.constexpr):
    """See `sums2`."""
    if INTERPRETED:
        return tl.sum(x0, axis), tl.sum(x1, axis), tl.sum(x2, axis), tl.sum(x3, axis), tl.sum(x4, axis)
    else:
        return tl.reduce((x0, x1, x2, x3, x4), axis, _add5)


@triton.jit
def reduce_max(x, axis: tl.constexpr):
    """Maximum along an axis, NaN if any element is."""
    if INTERPRETED and x.dtype.is_floating():
        nan = tl.max((x != x).to(tl.int32), axis) != 0
        return tl.where(nan, float("nan"), tl.max(tl.where(x != x, float("-inf"), x), axis))
    elif x.dtype.is_floating():
        return tl.reduce(x, axis, maximum)
    else:
        return tl.max(x, axis).to(x.dtype)


@triton.jit
def reduce_min(x, axis: tl.constexpr):
    """Minimum along an axis, NaN if any element is."""
    if INTERPRETED and x.dtype.is_floating():
        nan = tl.max((x != x).to(tl.int32), axis) != 0
        return tl.where(nan, float("nan"), tl.min(tl.where(x != x, float("inf"), x), axis))
    elif x.dtype.is_floating():
        return tl.reduce(x, axis, minimum)
    else:
        return tl.min(x, axis).to(x.dtype)


@triton.jit
def reduce_prod(x, axis: tl.constexpr):
    """Product along an axis, in the type of x."""
    return tl.reduce(x, axis, _mul)


@triton.jit
def _first(x, i, best, axis: tl.constexpr):
    """The smallest index along the axis among the elements equal to `best`, or NaN: some are only if `best` is."""
    none = tl.full([], (1 << (i.dtype.primitive_bitwidth - 1)) - 1, i.dtype)
    return tl.min(tl.where((x == tl.expand_dims(best, axis)) | (x != x), i, none), axis)


@triton.jit
def reduce_argmax(x, i, axis: tl.constexpr):
    """(maximum, its smallest index) along an axis; the first NaN wins. Two folds of one value each: a third of the work of a fold of pairs."""
    best = reduce_max(x, axis)
    return best, _first(x, i, best, axis)


@triton.jit
def reduce_argmin(x, i, axis: tl.constexpr):
    """(minimum, its smallest index) along an axis; the first NaN wins."""
    best = reduce_min(x, axis)
    return best, _first(x, i, best, axis)


@triton.jit
def argmax_take(va, ia, vb, ib):
    """Whether (vb, ib) replaces (va, ia) as the maximum: greater, or NaN where va is none, or equal and earlier."""
    if va.dtype.is_floating():
        same = (va == vb) | ((va != va) & (vb != vb))
        return (vb > va) | ((vb != vb) & (va == va)) | (same & (ib < ia))
    else:
        return (vb > va) | ((va == vb) & (ib < ia))


@triton.jit
def argmin_take(va, ia, vb, ib):
    """Whether (vb, ib) replaces (va, ia) as the minimum."""
    if va.dtype.is_floating():
        same = (va == vb) | ((va != va) & (vb != vb))
        return (vb < va) | ((vb != vb) & (va == va)) | (same & (ib < ia))
    else:
        return (vb < va) | ((va == vb) & (ib < ia))


@triton.jit
def argmax_later(va, vb):
    """`argmax_take` where every index of b comes after those of a."""
    if va.dtype.is_floating():
        return ~((vb <= va) | (va != va))
    else:
        return vb > va


@triton.jit
def argmin_later(va, vb):
    """`argmin_take` where every index of b comes after those of a."""
    if va.dtype.is_floating():
        return ~((vb >= va) | (va != va))
    else:
        return vb < va


@triton.jit
def argmax_pair(va, ia, vb, ib):
    """The winner of two pairs, for scans."""
    take = argmax_take(va, ia, vb, ib)
    return tl.where(take, vb, va), tl.where(take, ib, ia)


@triton.jit
def argmin_pair(va, ia, vb, ib):
    """The winner of two pairs, for scans."""
    take = argmin_take(va, ia, vb, ib)
    return tl.where(take, vb, va), tl.where(take, ib, ia)


@triton.jit
def logaddexp(a, b):
    """log(e^a + e^b); equal infinities are their own answer."""
    m = maximum(a, b)
    d = tl.abs(a - b) * -1.0
    if a.dtype == tl.float64:
        y = m + log1p64(tl.exp(d))
    else:
        y = m + log1p(exp(d))
    return tl.where((tl.abs(m) == float("inf")) | (m != m), m, y)


@triton.jit
def reduce_logsumexp(x, axis: tl.constexpr):
    """log of the sum of e^x along an axis."""
    return tl.reduce(x, axis, logaddexp)


@triton.jit
def reduce_any(x, axis: tl.constexpr):
    """Whether any bool along an axis is set."""
    return tl.max(x.to(tl.int32), axis) != 0


@triton.jit
def reduce_all(x, axis: tl.constexpr):
    """Whether all bools along an axis are set."""
    return tl.min(x.to(tl.int32), axis) != 0


# -- rescaled carriers: `ir.ops.CARRIERS` ----------------------------------------------------------------------------
@triton.jit
def moments_step(s, q, w, x, m):
    """The moments (s, q, w) with elements x, of weight m: 1, or 0 where x is 0. One division, of as many numbers as w and m have."""
    n, more = tl.maximum(w, 1.0), w + m
    both = 1.0 / (n * tl.maximum(more, 1.0))
    d = x - s * (both * tl.maximum(more, 1.0))
    return s + x, q + d * d * (w * n * m * both), more


@triton.jit
def moments_both(s1, q1, w1, s2, q2, w2):
    """The moments of two sets; one may be empty."""
    w = w1 + w2
    d = s1 / tl.maximum(w1, 1.0) - s2 / tl.maximum(w2, 1.0)
    return s1 + s2, q1 + q2 + d * d * (w1 * w2 / tl.maximum(w, 1.0)), w


@triton.jit
def spread(x, m, word: tl.constexpr):
    """The elements x of a tile by (row, lane of m, place in a word): every lane has a word of each row, as the thread that reads it."""
    return tl.reshape(x, [x.numel // (m.numel * word), m.numel, word])


@triton.jit
def rows_of_threads(x, m):
    """The elements x of a tile by (row of a thread, row of m, column): every so many rows are those of one thread."""
    return tl.reshape(x, [x.shape[0] // m.shape[0], m.shape[0], x.shape[1]])


@triton.jit
def of_threads(x, threads: tl.constexpr, word: tl.constexpr):
    """Sums of the elements x of a tile that each of so many threads has, `word` side by side at once."""
    return of_lanes(tl.reshape(x, [x.numel // (threads * word), threads, word]))


@triton.jit
def of_lanes(x):
    """Sums of what `spread` gave each lane."""
    return tl.sum(tl.sum(x, 2), 0)


@triton.jit
def moments_more(s, q, w, total, squares, n):
    """The moments (s, q, w) with those of n elements more, perhaps none. Divisions are of as many numbers as w and n have."""
    least, more = tl.maximum(w, 1.0), w + n
    both = 1.0 / (least * tl.maximum(more, 1.0))
    apart = s * (both * tl.maximum(more, 1.0)) - total * (1.0 / tl.maximum(n, 1.0))
    return s + total, q + squares + apart * apart * (w * n * least * both), more


@triton.jit
def moments_tile(s, q, w, x, word: tl.constexpr):
    """The moments (s, q, w) of a few lanes, all of one weight w, with the elements x of a tile, equally many for each."""
    n: tl.constexpr = 1.0 * (x.numel // s.numel)
    x = spread(x, s, word)
    total = of_lanes(x)
    d = x - tl.expand_dims(tl.expand_dims(total * (1.0 / n), 0), 2)
    return moments_more(s, q, w, total, of_lanes(d * d), n)


@triton.jit
def moments_masked(s, q, w, x, m, word: tl.constexpr):
    """The same with elements of weight m: 1, or 0 where x is 0."""
    x, m = spread(x, s, word), spread(m, s, word)
    total, count = of_lanes(x), of_lanes(m)
    d = x - tl.expand_dims(tl.expand_dims(total / tl.maximum(count, 1.0), 0), 2)
    return moments_both(s, q, w, total, of_lanes(d * d * m), count)


@triton.jit
def reduce_moments(s, q, w, axis: tl.constexpr):
    """The moments of all lanes along an axis: three sums, the second of each lane's squared differences from the mean of all."""
    total, count = tl.sum(s, axis), tl.sum(w, axis)
    d = s / tl.maximum(w, 1.0) - tl.expand_dims(total / tl.maximum(count, 1.0), axis)
    return total, tl.sum(q + d * d * w, axis), count


@triton.jit
def _decay(x):
    """e^x of x <= 0, NaN if it is; subnormal numbers may count as 0."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
        p = x * 1.4426950408889634
        y = exp2_short(p)
        return y + y * ((x * 1.44269502162933349609375 - p + x * 1.925963033500011e-08) * 0.6931471805599453)


@triton.jit
def _share(x, top):
    """e^(x - top) for x <= top, where -inf counts 0 and infinite equals count 1."""
    return tl.where(x == top, tl.where(x == float("-inf"), 0.0, 1.0), _decay(x - top))


@triton.jit
def expsum_step(m, t, x, weight):
    """The maximum m and the sum t of e^(. - m) with elements x; idle lanes hold -inf. One exponential."""
    up = x > m
    e = tl.where(x == m, tl.where(x == float("-inf"), 0.0, 1.0), _decay(-tl.abs(x - m)))
    return maximum(m, x), tl.where(up, t, 1.0) * e + tl.where(up, 1.0, t)


@triton.jit
def _power(x):
    """e^x, off by about |x| + 4 units in the last place; subnormal numbers may count as 0."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return exp_short(x)


@triton.jit
def expsum_share(x, top):
    """e^(x - top) for elements up to `top`, the maximum of many: -inf counts 0, an infinite x = top counts 1. `top` has fewer lanes than x. Off by
    about |x - top| + 4 units in the last place, where it is small against the 1 that the largest element counts."""
    one = tl.where(top == float("-inf"), float("nan"), top)
    return tl.where(x == one, 1.0, _power(x - tl.where(top == float("-inf"), 0.0, top)))


@triton.jit
def lanes(x, m):
    """The elements x of a tile, as many in a row as m has lanes: of a row each lane has one."""
    return tl.reshape(x, [x.numel // m.numel, m.numel])


@triton.jit
def expsum_tile(m, t, x):
    """The maxima m and the sums t of e^(. - m) of a few lanes with the elements x of a tile, of which every so many are one lane's: its maximum
    first, so that an element costs one exponential and the lane one more. The sum is infinite where the maximum is. As exact as `expsum_share`."""
    x = lanes(x, m)
    top = maximum(m, reduce_max(x, 0))
    about = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return top, t * _power(m - about) + tl.sum(_power(x - tl.expand_dims(about, 0)), 0)


@triton.jit
def expsum_both(m1, t1, m2, t2):
    """The maximum of two sets and the sum of e^(x - maximum) over both."""
    top = maximum(m1, m2)
    return top, t1 * _share(m1, top) + t2 * _share(m2, top)


@triton.jit
def reduce_expsum(m, t, axis: tl.constexpr):
    """The maximum along an axis, and the sum of e^(x - maximum)."""
    top = reduce_max(m, axis)
    return top, tl.sum(t * _share(m, tl.expand_dims(top, axis)), axis)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def _left(a, b):
    return a


@triton.jit
def any_of(x, axis: tl.constexpr):
    """One of the equal elements along `axis`, which stays as a dimension of one."""
    return tl.reduce(x, axis, _left, keep_dims=True)


@triton.jit
def scan_sum(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Running sums, in the type of x."""
    return tl.cumsum(x, axis, reverse).to(x.dtype)


@triton.jit
def scan_prod(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Running products, in the type of x."""
    return tl.associative_scan(x, axis, _mul, reverse)


@triton.jit
def scan_max(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Running maximum, NaN from the first NaN on."""
    return tl.associative_scan(x, axis, maximum, reverse)


@triton.jit
def scan_min(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Running minimum, NaN from the first NaN on."""
    return tl.associative_scan(x, axis, minimum, reverse)


@triton.jit
def scan_any(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Whether any bool so far is set."""
    return tl.associative_scan(x.to(tl.int32), axis, _greater, reverse) != 0


@triton.jit
def scan_all(x, axis: tl.constexpr, reverse: tl.constexpr):
    """Whether all bools so far are set."""
    return tl.associative_scan(x.to(tl.int32), axis, _smaller, reverse) != 0


@triton.jit
def scan_logsumexp(x, axis: tl.constexpr, reverse: tl.constexpr):
    """log of the running sum of e^x."""
    return tl.associative_scan(x, axis, logaddexp, reverse)


@triton.jit
def scan_argmax(x, i, axis: tl.constexpr, reverse: tl.constexpr):
    """(running maximum, its smallest index)."""
    return tl.associative_scan((x, i), axis, argmax_pair, reverse)


@triton.jit
def scan_argmin(x, i, axis: tl.constexpr, reverse: tl.constexpr):
    """(running minimum, its smallest index)."""
    return tl.associative_scan((x, i), axis, argmin_pair, reverse)


# -- random numbers ------------------------------------------------------------------------------------------------
@triton.jit
def philox(seed, counter):
    """Philox4x32-10 as `ir.meaning.philox` defines it: four words, uint32. `seed` is i64, `counter` u64."""
    seed = seed.to(tl.uint64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _unit(word):
    """f32 in [0, 1): the high 24 bits, exact."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def uniform(seed, number):
    """The uniform numbers that stand at any `number` (i64): word number % 4 of counter number // 4."""
    at = number.to(tl.uint64)
    a, b, c, d = philox(seed, at >> 2)
    at = at.to(tl.uint32)
    odd, late = (at & 1) != 0, (at & 2) != 0
    return _unit(tl.where(late, tl.where(odd, d, c), tl.where(odd, b, a)))


@triton.jit
def uniform_run(seed, first):
    """Uniform numbers in runs of four along the last axis, each run from one of `first` (i64, multiples of 4) on: what `uniform` gives for first,
    first + 1, first + 2, first + 3, from one counter."""
    a, b, c, d = philox(seed, first.to(tl.uint64) >> 2)
    return _unit(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def normal(seed, counter):
    """f32 of the normal distribution."""
    a, b, c, d = philox(seed, counter.to(tl.uint64))
    return normal_of(a, b)
