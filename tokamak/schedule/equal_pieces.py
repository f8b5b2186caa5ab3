"""The last step of a choice: rows of which a tile has several, or which it holds in stages, lie in pieces of one length.

Pieces of different lengths lie in threads each in its own way: what is one number a row, or crosses pieces, is laid out anew for each, through shared
memory. And in equal pieces a thread first folds what it has of each by itself: the shorter they are the fewer threads share a row, so that less is
handed on between them, and fewer compute what is one number a row. An element of each piece to a thread is best where rows begin at no words, since
there is nothing for it to read at once. Where they begin at words and are written, that costs less than shorter accesses do, so those stay as they
are; so do prefixes, which are made piece by piece.

H200, 308 kernels of random cases under 20 to 28 pieces and warps each: the 78 that this changes take 1.32 times less, 5% more than the best. us,
before and so: softmax of 251343 x 33 f32 90.5, 21.1, of 419000 x 25 bf16 30.0, 20.0, of 98816 x 65 f16 15.6, 13.0, cosine similarity's gradient of
480933 x 67 f32 734, 208, of 110031 x 63 bf16 39.4, 24.9, a gated RMSNorm's of 12987 x 257 f32 80.9, 41.0, LayerNorm's of 146542 x 257 f32 175, 126,
of 383547 x 33 f16 with dropout 177, 66, adaptive LayerNorm's of 1063 x 112 x 128 bf16 163, 81, channel LayerNorm's of 56 x 1280 x 32 x 32 f16 390,
275, RMSNorm's along the middle of 65 x 378 x 513 bf16 91.6, 58.0, cosine loss of 32427 x 416 bf16 44.6, 30.0, cross entropy with smoothed labels of
26793 x 129 f16 29.2, 17.0, its gradient of 158145 x 42 bf16 27.0, 13.5, EvoNorm of 41 x 256 x 40 x 40 f32 51.2, 40.1, log-softmax of 262143 x 51 bf16
50.4, 22.1, LayerNorm's gradient of 500001 x 29 f32 151, 53, partial results of 528 over 160 6.4, 5.4.
"""
from __future__ import annotations

import math
from dataclasses import replace

from ..ir.expr import Load, Op, walk
from ..ir.index import Axis
from ..ir.ops import OPS
from .body import exprs_of
from .schedule import strides_of
from .tile_access import begin_anywhere
from .tile_facts import WORDS_OF, TileFacts
from .tile_schedule import TileSchedule, alike
from .tile_stages import evenly, power

LEAST = 8               # elements of a piece at least; twice as many where
COUNT = 5               # there are so many of them, one more down columns, and one lane in
IDLE = 8, 10            # so many idle at most, the second down columns and in stages: RMSNorm's gradient along the middle of 296 x 257 x 552 f16, one
                        # more than 256, 111 us, 127 in nine pieces of 32; else, along rows,
FEW = (3, 4), (3, 3), (2, 3)    # so many pieces at least, and one lane in so many idle at most, the first of these that finds any. In stages only
                        # along rows: BatchNorm's gradient of 40 x 512 x 20 x 20 f16, 40 images as 16 + 16 + 8, 20.0 us, 25.4 as three of 16, 23.8 as
                        # five of 8, GroupNorm in NHWC of 1188 x 512 x 7 x 7 f32 71, 96
DOWN = 128              # rows of columns that are not held in stages, from which on: gradient of a norm of 96 x 191201 f32 117 us, 138 so
WIDE = 32               # columns of a tile from which on fewer of them, of 16 bits, folded at once, are one piece with idle lanes rather than three
ONE_PIECE = 256         # elements of a row up to which one piece is cut up, too; half as many of 32 bits, but of those of which heavy functions are
                        # made, and no sums carried beside them: adaptive LayerNorm of 494 x 127 x 255 f32 40 us, 53 so, two softmaxes of 55254 x 229
                        # 40.5, 76. And up to which those of several lengths of 32 bits are that nothing is carried beside: softmax of 65536 x 257 35,
                        # 37.3
MOST = 16               # pieces of a word to each thread
SHORT = 32, 64          # elements of short rows at words that are one piece, half as many where much is folded of several values: a gated RMSNorm of
                        # 2154789 x 16 f32 61 us, 52 as one; of which a thread has SHORT_EACH at least,
SHORT_EACH = 32
SHORT_PIECE = 16        # in pieces of so many where much is folded,
SHORT_WARPS = 8         # by warps of half as much to a thread, so many at most
WIDE_DOWN = 8           # pieces of columns of 32 bits that begin anywhere, are written and were one piece of DOWN rows or twice as many: RMSNorm
                        # along the middle of 60 x 127 x 2001 40.0 us, of 20 x 256 x 4001 55.9, of 200 x 255 x 257 41.1, of 40 x 255 x 2001 56.3,
                        # softmax of 40 x 255 x 1501 43.7; 52.4, 66.5, 49.8, 70.3 and 49.1 as one (H200)
DEEP = 64               # rows at least of each piece of columns of which much is folded
SPARE = 4, 3            # idle lanes, one in so many, from which on equal pieces are others, and what is `_light` is cut up
WARPS = 4, 16           # of a program of rows that begin at no words of `WORDS_OF` bytes, an element of each piece to a thread; more, up to the
                        # second, of two elements; MORE times as many as it would have at most
MORE = 4


def laid(of: TileFacts, s: TileSchedule) -> TileSchedule:
    """`s` with its held rows so; `s` itself where it has none that gain."""
    if s.shift is not None or s.flat or s.sharers > 1 or of.scans() or of.target.ordered:
        return s
    both = sum(len(set(sizes)) > 1 for a, sizes in s.pieces if a in of.rows) > 1
    for a, sizes in s.pieces:
        n = of.hints.exactly(a.extent)
        beside = math.prod(sum(p) for x, p in s.pieces if x is not a)
        if a in of.rows and a not in s.looped and beside > 1 and n is not None:
            along = a is of.line and s.staged is None
            s = _along(of, s, a, n, beside) if along else _others(of, s, a, n, both) if len(set(sizes)) > 1 else _deep(of, s, a, n)
    return s


def equal(n: int, idle: int = IDLE[0]) -> tuple[int, ...]:
    """The longest equal pieces that cover `n` elements of a row with few idle lanes, one in `idle` at most or of fewer pieces a few more; () where
    there are none."""
    ways = (2 * LEAST, COUNT, idle), *((LEAST, *way) for way in FEW)
    return next((found for way in ways if (found := evenly(n, *way))), ())


def _along(of: TileFacts, s: TileSchedule, a: Axis, n: int, beside: int) -> TileSchedule:
    """`s`, which holds `n` elements along the contiguous axis `a` and `beside` along others."""
    sizes, wide = s.sizes(a), of.narrowest() >= 4
    uneven, idle = len(set(sizes)) > 1, sum(sizes) - n
    if not begin_anywhere(of.b, a, of.hints, WORDS_OF):
        if (word := _a_word(of, s, sizes, n, beside) or _short(of, s, sizes, n, beside)) is not None:
            return _covered(s, a, n, *word)
        if wide and len(sizes) == 1 and n <= SHORT[1] and idle and of.heavy(of.folds) and begin_anywhere(of.b, a, of.hints):
            # softmax of 1191755 x 46 f32 108 us, 158 as one, of 600000 x 50 62.4, 72.0, of 500000 x 58 62.1, 63.5
            return _covered(s, a, n, evenly(n, SHORT_PIECE, 3))
        several = len(set(sizes)) > (1 if wide and of.stored_along() else 2)        # sums of 264265 x 44 f32 13.7 us, 15.1 in equal pieces
        return s if of.carries or not wide and of.stored_along() or not several else _covered(s, a, n, equal(n))
    few = n <= (ONE_PIECE // 2 if wide and (of.carries or not of.computes_heavy()) else ONE_PIECE)
    each_its_own = sizes[-1] == 1 and of.stored_along() and beside >= 32 * s.warps      # row to a thread: softmax of 2405381 x 33 bf16 115, 163
    cut = (n <= ONE_PIECE or of.crossed or not wide) and not each_its_own and s.warps <= WARPS[1] if uneven else \
        few and (len(sizes) == 1 or alike(sizes) and idle * SPARE[0] > sum(sizes)) and len(of.rows) == 1
    light = _light(of, len(set(sizes))) and not (len(sizes) == 1 and idle * SPARE[1] > sum(sizes))
    if cut and light and sizes == (2 * SHORT_PIECE,) and of.stored_along() and not of.crossed and not _weights(of, a):
        # a norm without a weight of 872472 x 31 bf16 43.9 us, of 800000 x 29 40.2, of 800000 x 31 f32 54.0; 53.6, 50.6 and 61.5 as one (H200)
        return _covered(s, a, n, (SHORT_PIECE,) * 2, max(s.warps, WARPS[0]))
    if not cut or light:
        return s
    pieces = equal(n)
    each = power(pieces[0] * beside // 32) if pieces else 0
    return _covered(s, a, n, pieces, max(s.warps, min(each, max(WARPS[0], each // 2), WARPS[1], MORE * s.warps)))


def _weights(of: TileFacts, a: Axis) -> bool:
    """Is anything read along `a` that is the same for every row?"""
    return any(a in address.axes() and not address.axes() & of.b.parallel for _, address, _ in strides_of(of.b))


def _a_word(of: TileFacts, s: TileSchedule, sizes: tuple[int, ...], n: int, beside: int) -> tuple[tuple[int, ...], int] | None:
    """Pieces of `beside` rows at words that are folded, and nothing written along them, of a word to each thread, and the warps: so a warp has its
    rows to itself, where those of longer pieces hand on each fold to each other.

    us of 8 rows of 1024 16-bit elements as one piece by 8 warps, and in four pieces: logsumexp of 40000 bf16 32.1, 24.9, variance 26.7, 24.8,
    kurtosis of 30000 25.4, 20.7, entropy of 36750 57.3, 46.3, cosine similarity of 30000 70.5, 58.2; of 8 rows of 512 f32 by 4 warps and in eight
    pieces: kurtosis of 20000 20.2, 15.4, entropy 23.6, 17.6, cosine similarity of 30000 47.3, 40.2. A row of no more than a warp's words has one."""
    warps, word = min(s.warps, beside), 16 // of.narrowest()
    piece = 32 * warps * word // power(beside)
    one = of.only_summed() and len({e.key for e in of.folds}) == 1        # L2 norm of 40000 x 1024 bf16 25.6 us, 25.6
    if len(set(sizes)) > 1 or of.stored_along() or of.crossed or of.carries or one or not 2 * LEAST <= piece < sizes[0] or sizes[0] <= 32 * word:
        return None
    count = -(-n // piece)
    return ((piece,) * count, warps) if count <= MOST and count * piece <= sum(sizes) else None


def _short(of: TileFacts, s: TileSchedule, sizes: tuple[int, ...], n: int, beside: int) -> tuple[tuple[int, ...], int] | None:
    """Pieces of `beside` short rows at words, one piece so far of which a thread has much, and the warps: more of them, and where much is folded,
    SHORT_PIECE elements of each row at a time. Little: LayerNorm of 500000 x 32 bf16 19.7 us, 22.1, weight norm's gradient of 114532 x 32
    10.5, 11.6, gated RMSNorm of 500000 x 64 50.9, 53.6, but RMSNorm of those 36.1, 35.5, log-softmax's gradient of 300000 x 64 f32 59.6, 58.5. Much:
    entropy of 500000 x 64 bf16 38.2, 43.2, softmax of 318991 x 32 14.5, 15.3, of 8192 x 64 f16 2.1, 3.0, cosine similarity's gradient of 200000 x 32
    f32 40.8, 73.7, cosine loss's of 1826665 x 16 f16 70, 101, minimum's and maximum's of 300000 x 64 f32 69, 90; but of 2155856 x 16 bf16 60.2, 58.0,
    cosine similarity's of 131071 x 64 24.2, 23.7."""
    least = SHORT[0] // (2 if _values_folded(of) > 1 and _several(of) else 1)
    warps = min(SHORT_WARPS, power(n * beside // (32 * SHORT_EACH // 2)))
    alone = len(sizes) == 1 and sizes[0] == n and of.rows == [of.line] and not (of.crossed or of.carries)
    if not alone or not least <= n <= SHORT[1] or n * beside < SHORT_EACH * 32 * s.warps:
        return None
    if not _much_folded(of):
        return (sizes, warps) if of.stored_along() else None
    piece = min(SHORT_PIECE, n // 2)
    return (piece,) * (n // piece), warps


def _much_folded(of: TileFacts) -> bool:
    """Are exponentials folded, or other folds than sums made, or several, of several values or more than two?"""
    return of.heavy(of.folds) or _several(of) or any(e.monoid not in ("sum", "moments") for e in of.folds)


def _several(of: TileFacts) -> bool:
    """Are several folds made, of several values or more than two?"""
    return len({e.key for e in of.folds}) > (1 if _values_folded(of) > 1 else 2)


def _values_folded(of: TileFacts) -> int:
    """How many values that are read along the contiguous axis are folded."""
    return len({(x.node, x.index) for e in of.folds for x in walk(*e.args) if isinstance(x, Load) and of.line in x.axes()})


def _deep(of: TileFacts, s: TileSchedule, a: Axis, n: int) -> TileSchedule:
    """`s`, which holds `n` elements along `a` in one piece, or several alike, down columns at words, in shorter ones where much is folded: what a
    thread has of a column it folds first. Softmax along the middle of 500 x 1000 x 24 bf16 33.2 us, 58.8 as two of 512, of 300 x 700 x 48 f16 21.1,
    25.0, under a mask of 1824 x 1204 x 24 bf16 145, 187, standardized columns' gradient of 464 x 16384 f32 38.0, 53.1 as one. In still
    shorter ones where many lanes of those would idle: adaptive LayerNorm's of 1774 x 132 x 208 f32 307, 428 as three of 64; and down columns that
    begin anywhere, of which exponentials are folded, DOWN rows at most: softmax under a mask of 3929 x 63 x 33 bf16 24.6, 35.7, of 327 x 127 x 1031
    76.5, 107.9, two softmaxes' gradient of 70 x 262145 f32 179, 268; but of 204 x 262145 bf16 565, 519."""
    if s.staged is not None or a is of.line or of.crossed or of.carries:
        return s
    anywhere = begin_anywhere(of.b, of.line, of.hints, WORDS_OF)
    much = 2 * LEAST < n <= DOWN and of.heavy(of.folds) if anywhere else _much_folded(of)
    one = len(s.sizes(a)) == 1 and DOWN <= s.sizes(a)[0] <= 2 * DOWN and of.stored_along()
    if anywhere and not much and one and of.narrowest() >= 4:
        piece = s.sizes(a)[0] // WIDE_DOWN
        return _covered(s, a, n, (piece,) * -(-n // piece))
    piece = max(LEAST if anywhere else DEEP, power(-(-n // MOST)))
    if not much or 2 * piece > s.sizes(a)[0]:
        return s
    if not anywhere and -n % piece * SPARE[1] > n:
        piece = next((p for p in (piece // 2, piece // 4) if -n % p * IDLE[0] <= n <= MOST * p), piece)
    return _covered(s, a, n, (piece,) * -(-n // piece))


def _others(of: TileFacts, s: TileSchedule, a: Axis, n: int, both: bool) -> TileSchedule:
    """`s`, which holds `n` elements along `a` in pieces of several lengths, down columns or in stages; `both`: and those along the other axis, which
    are all alike then: adaptive LayerNorm's gradient of 1335 x 40 x 166 bf16 59 us, 130 with 40 as 32 + 8."""
    wide = bool(s.together) and sum(s.sizes(of.line)) >= WIDE
    if s.staged is None and wide and len(set(s.sizes(a))) > 2 and n <= DOWN and of.narrowest() < 4:
        return _covered(s, a, n, (power(n),))           # scale norm's gradient of 82 x 263497 f16 99.9 us, 193 as 64 + 16 + 2
    if s.staged is None:
        return _covered(s, a, n, evenly(n, 4 * LEAST, COUNT + 1, IDLE[1])) if n > DOWN else s
    if a is not of.line:
        return _covered(s, a, n, evenly(n, 2 * LEAST, COUNT + 1, IDLE[1]) or both and evenly(n, LEAST, 2, IDLE[1]) or ())
    one_more = len(set(sizes := s.sizes(a))) == 2 and sizes[-1] == 1        # adaptive LayerNorm's gradient of 2333 x 127 x 33 f16 49, 57
    return s if one_more else _covered(s, a, n, equal(n, IDLE[1]))


def _covered(s: TileSchedule, a: Axis, n: int, pieces: tuple[int, ...], warps: int = 0) -> TileSchedule:
    """`s` with `n` elements along `a` in `pieces`, by so many warps; `s` where there are none."""
    if not pieces or pieces == s.sizes(a) and warps in (0, s.warps):
        return s
    exact = s.exact - {a} | ({a} if sum(pieces) == n else set())
    s = replace(s, pieces=tuple((x, pieces if x is a else p) for x, p in s.pieces), exact=exact)
    return replace(s, warps=warps, registers=0) if warps not in (0, s.warps) else s


def _light(of: TileFacts, lengths: int) -> bool:
    """Are rows written, by the memory's rate as they are: no random numbers drawn, and little made of an element? Pieces of two lengths: one fold,
    unless of 32 bits and by heavy functions or divisions, or none of those. One piece: one fold, and no heavy function folded or of what a row
    has one of; or none, and something read that several rows have, not all.

    us, so and in equal pieces: RMSNorm with an addition of 179898 x 129 f32 72.5, 83.0, a gated one of 230975 x 65 f16 31.2, 36.0, LayerNorm of
    16384 x 129 f32 7.5, 10.6, an adaptive one of 4047 x 64 x 127 f32 82, 141, of 73 x 1064 x 33 bf16 6.5, 8.8, the gradient of preferences of
    701732 x 94 bf16 230, 255; but weight norm's gradient of 2014443 x 33 f32 580, 221, a power norm of 396429 x 29 f16 67.7, 30.1."""
    if of.only_summed():
        return lengths == 1 and of.narrowest() >= 4         # of 262144 x 31 f32 12.5 us, 13.5
    if not of.stored_along() or of.draws() or of.crossed:
        return False
    rows, made = set(of.rows), [e for e in walk(*exprs_of(of.b)) if isinstance(e, Op)]
    heavy = any(OPS[e.name].heavy or e.name == "div" and e.free & rows for e in made)
    one = len({e.key for e in of.folds}) == 1
    if lengths > 1:
        return lengths < 3 and (not heavy or one and of.narrowest() < 4)
    if one:
        return not of.heavy(of.folds) and not any(OPS[e.name].heavy and not e.free & rows for e in made)
    return not heavy and any(isinstance(e, Load) and of.line in e.axes() and set() < e.axes() & of.b.parallel < of.b.parallel
                             for e in walk(*exprs_of(of.b)))
