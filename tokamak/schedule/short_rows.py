"""Tiles of several short rows whose lengths are no powers of two, read whole. Pieces of different lengths lie in threads differently, and what is one
number a row is laid out anew for each; where rows begin at no words each access is an element or two long, so that few are under way. Equal pieces,
a warp's width or two, fold best; where rows are written, too, one piece with idle lanes does, if they begin at words (`equal_pieces` cuts up others).
Four warps, so that a multiprocessor has many programs.

H100, us, 16 million elements, before and so: bf16 logsumexp of 100, 190, 300 and 421 18.2, 20.4, 19.1, 33.0 and 14.4, 14.2, 14.5, 15.1; amax and
argmax, of 636 and 815, too, 20.3, 17.1, 21.7, 40.0, 24.3, 44.8 and 14.7, 14.4, 14.8, 14.8, 14.7, 15.4; L2 norms of f32 of 40, 100, 190 and 421 35.4,
35.1, 26.2, 30.8 and 24.5, 24.5, 24.5, 25.1. Written: LayerNorm of bf16 of 24, 40, 100 and 190 29.0, 28.5, 29.6, 28.0 and 23.8, 25.9, 24.9, 26.7, f32
of 28 and 51 34.5, 56.6 and 27.4, 47.8; log-softmax backward of 40, 100 and 190 42.6, 42.4, 42.6 and 34.7, 36.0, 36.1.
"""
from __future__ import annotations

import math

from ..ir.index import Axis
from .tile_facts import WORDS_OF, TileFacts
from .tile_schedule import EVEN, cover
from .tile_stages import evenly, power

WARPS = 4               # of a program; one where rows that are written begin at no words, each of which is then a warp's alone, or two
                        # (`tile_facts.WARP_LANES`). Of rows of WIDTHS[0] to WHOLE elements that are only folded, but of those one element
FOLDED_WARPS = 2        # longer, so many where they are of 32 bits, and one of 16: H200, f32 mean and variance of 830416 of 40 42.8 us, 44.5 by
                        # four and more rows, L2 norms of 600000 of 56 35.9, 39.2, place of the greatest of 251013 of 40 14.5, 16.1, logsumexp of
                        # bf16 of 300000 of 40 9.8, 11.6, mean and variance of 500000 of 40 14.7, 18.7; but logsumexp of 793447 of 33 f32 90, 47
BYTES = 3300            # of the rows of a program that are only folded, about
WIDTHS = 32, 64, 128    # lanes of each piece of such a row, of which it has
PIECES = 14             # so many at most
WHOLE = 64              # elements of a row up to which it is covered as rows elsewhere are
SHORTEST = 24           # elements of such a row at least
LONGEST = 1024          # elements of such a row at most; longer ones lie in words (`TileFacts.shifted_from`) or are a program's alone
STORED = 1024           # lanes of the rows of a program that are written, half as many where more than
MANY = 4                # times as many of many rows of a warp's width at most: LayerNorm of 1676822 of 24 bf16 43.7 us, 47.9 (H200)
FEW_READ = 2            # so many values are read along a row, or as many where it begins at no word: weight norm backward of 1099253 and 300000 rows
                        # of 51 f16 184 and 47 us, 223 and 55. Where each row has one of its own, others are as those of one: adaptive
                        # LayerNorm of 2670 x 32 x 160 f16 in equal pieces 22.8, 49.6 in two rows of one piece by four warps (H200)
MOST_READ = 3           # values at most that are read along rows which begin at words
MATRIX = 32             # rows of a matrix up to which a program has all of them where something is read that they share: adaptive LayerNorm of
                        # 10367 x 27 x 48 bf16 21.0 us, 37.7 in tiles of eight rows (H200)
STORED_BYTES = 512      # bytes of such a row at most; of those that begin at words,
STORED_WORDS = 64       # and of which one value is read so many elements: longer ones fold as well in pieces of their own lengths, but log-softmax
                        # backward of 96 and 160 38.2 and 42.3 us, 34.9 and 35.0 as one piece
HALF_WIDE = 128         # elements of a row that begins at no word from which on four warps share them, in pieces where one value is read: RMSNorm of
                        # 15237 of 185 bf16 6.9 us, 7.7 as one piece of a warp's. Of several values one warp has
ROWS_WIDE = 4           # so many, in pieces of a warp's width where one piece has more idle lanes: weight norm backward of 92700 of 157 bf16 32.7 us,
                        # of 60011 of 201 f16 29.8, softmax backward of 149932 of 226 bf16 53.3; 54.7, 43.6 and 61.4 as one piece, two to four warps
                        # (H200)
HEAVY_ROWS = 8          # such rows of a program of two warps of WHOLE elements or some fewer, one lane in so many idle at most, in pieces of a warp's
HEAVY_IDLE = 8          # width, where exponentials are folded: log-softmax of 262143 of 63 bf16 33.5 us, 53.3 as one piece by one warp (H200)
IDLE = 0.8              # lanes of a row that are idle at most, for each that is not
PROGRAMS = 8            # programs for each multiprocessor at least


def choose(of: TileFacts) -> tuple[dict[Axis, tuple[int, ...]], int] | None:
    """(the pieces of the row and of the axis along which a tile has several rows, warps); None for other rows than short ones of no power of two's
    length."""
    if of.crossed or of.rows != [of.line] or of.target.ordered or not of.b.parallel or of.wide:
        return None
    n, size = of.hints.exactly(of.line.extent), of.narrowest()
    plain = of.b.base is None and not of.scans() and all(e.over == (of.line,) for e in of.folds)
    heavy = n is not None and _heavy(of, n, size)
    if n is None or not SHORTEST <= n <= LONGEST or len(cover(n)) == 1 and not heavy or n >= of.shifted_from() or not plain or size not in (2, 4) \
            or any(s.monoid is not None or s.guard is not None for s in of.b.stores) or not of.folds:
        return None
    beside = [a for a in of.order if a in of.b.parallel][-1]
    pieces, rows, warps = ((WIDTHS[0],) * 2, HEAVY_ROWS, 2) if heavy else (_written if of.stored_along() else _folded)(of, n, size)
    if not pieces or math.prod(of.hints(a.extent) for a in of.b.parallel) < rows * PROGRAMS * of.target.threads or of.hints(beside.extent) < rows:
        return None
    rows = _matrix(of, beside, rows) if len(pieces) == 1 and of.stored_along() and not of.begin_anywhere() else rows
    return {**({beside: (rows,)} if rows > 1 else {}), of.line: pieces}, warps


def _matrix(of: TileFacts, beside: Axis, rows: int) -> int:
    """`rows`, or all of a matrix with few along `beside` where something is read that they share."""
    most = power(of.hints(beside.extent))
    shared = any(index[0].axes() & of.b.parallel and beside not in index[0].axes() for _, index in of.rows_read())
    return most if shared and rows < most <= MATRIX else rows


def _heavy(of: TileFacts, n: int, size: int) -> bool:
    """Are rows of 16 bits, of nearly two warps' width, written that begin at no words, and something heavy folded along them?"""
    return size == 2 and WHOLE - WHOLE // HEAVY_IDLE <= n <= WHOLE and of.stored_along() and of.heavy(of.folds) and not of.begin_at_words(WORDS_OF)


def _folded(of: TileFacts, n: int, size: int) -> tuple[tuple[int, ...], int, int]:
    """(pieces, rows, warps) of rows of `n` elements that are only folded; () for no pieces. Long rows that begin at words fold as well in pieces of
    their own lengths."""
    width = next((w for w in WIDTHS if n <= PIECES * w), 0)
    if not width or n > 2 * WHOLE and not of.begin_anywhere() and (evenly(n, WIDTHS[0]) or n > 4 * WHOLE):
        return (), 0, 0
    whole = WIDTHS[0] <= n <= WHOLE
    pieces = cover(n) if n <= WHOLE else (width,) * -(-n // width)
    longer = n == WIDTHS[0] + 1
    many = 4 if whole and (size == 2 or longer) and of.many_short() else 1
    warps = WARPS if not whole or longer or many > 1 else FOLDED_WARPS if size == 4 else 1
    return pieces, max(WARPS, 1 << round(math.log2(BYTES / size / n))) * many, warps


def _written(of: TileFacts, n: int, size: int) -> tuple[tuple[int, ...], int, int]:
    """The same of rows that are written, too."""
    anywhere = of.begin_anywhere()
    beside = [a for a in of.order if a in of.b.parallel][-1]
    read = len(of.rows_read())
    own = sum(beside in index[0].axes() for _, index in of.rows_read())
    alike = not anywhere and own < FEW_READ and (n > STORED_WORDS or evenly(n, EVEN // size))
    if n * size > STORED_BYTES or power(n) - n > IDLE * n or alike or read > MOST_READ and not anywhere:
        return (), 0, 0
    lanes = STORED // (1 if read <= FEW_READ - anywhere else 2)
    if anywhere and n > HALF_WIDE:
        count = -(-n // WIDTHS[0])
        if read >= FEW_READ:
            return ((WIDTHS[0],) * count if count * WIDTHS[0] < power(n) else (power(n),)), ROWS_WIDE, 1
        return (WIDTHS[1],) * -(-n // WIDTHS[1]), max(1, lanes // power(n)), WARPS
    if anywhere:
        return (power(n),), of.warp_rows(power(n)), 2 if power(n) <= WIDTHS[0] and not of.begin_at_words(WORDS_OF) else 1
    many = MANY if power(n) <= WIDTHS[0] and of.many_short() else 1
    return (power(n),), max(1, lanes // power(n)) * many, WARPS
