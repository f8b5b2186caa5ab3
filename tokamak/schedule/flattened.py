"""Parallel axes of a body in which nothing is folded, counted as one: its tiles are whole whatever the extents are, and what lies beside the
elements, a bias or positions' cosines, is found by dividing. us on an H200, tiles along the axes and so: heads of 25 x 40 bf16 turned by their
positions (rotary embedding, backward) 60.9 (tiles of 16 x (32 + 8)), 43.9, of 3 x 40 f16 59.4, 41.3, of 12 x 32 16.4, 11.9; squeezed channels 320
wide 37.6, 31.9.

Where the innermost extent is a number of whole 16-byte words the elements of a word stay an axis of their own, the last one of a tile: where a word
lies, and all that depends on that alone, is computed once a word. L2 norm's backward of rows of 112 bf16 12.2 us in tiles of rows, 14.6 element by
element, 11.9 so.
"""
from __future__ import annotations

import math
from itertools import count

from ..fuse.lines import SECTOR
from ..ir.expr import Load, Op, Reduce, Scan, walk
from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv, mod
from ..ir.ops import OPS
from .body import RUN, Body, divided_by_rows, exprs_of, indices_of, rewritten
from .schedule import SLOW, strides_of
from .tile_stages import power

WORD = 16               # bytes
SHORT = 16              # elements of a plane, each way to a power of two; 702 x 2048 x 7 x 7 bf16 46% of the limit as one, 49 along the axes
WHOLE = 1024            # elements, a multiple of which tiles of rows cover as well: bias and GELU of rows of 65536 bf16 6.4 us and 6.5, BatchNorm's
                        # backward in NHWC of 1024 channels 80.8 and 83
FEW = 512               # elements of a row below which a tile of rows computes slow functions of columns once for several, or reads more than so many
VALUES = 2              # values of a column: BatchNorm's backward in NHWC of 256 channels bf16 29.7 us, 34.9 as one, standardized columns' of 40 f16
                        # 4.5, 5.5, EvoNorm of 4 channels a group f32 4.0, 4.2; but FRN of 1280 16.7, 16.0
BESIDE = 2              # axes counted as one of no whole words where slow functions of columns are: RMSNorm along the middle of 3 x 3366 x 5603 bf16
                        # 64.5 us, 78.7 as one of all three. Without such functions modulated rows of 304 x 159 x 214 f16 14.7 us, 12.5 so


def flattened(b: Body) -> Body:
    """`b` with the axes along which all that it stores is contiguous as one, or, where that one is in words, as two; `b` itself where that
    gains nothing."""
    if b.base is not None or any(s.monoid is not None for s in b.stores) or any(isinstance(e, (Reduce, Scan)) for e in walk(*exprs_of(b))):
        return b
    if apart := _apart(b):
        return _as_one(b, apart, 1)
    runs = [contiguous(s.address, b.parallel & s.axes) for s in b.stores]
    axes = _short_of_whole(min(runs, key=len))
    if len(axes) < 2 or any(r[:len(axes)] != axes for r in runs):
        return b
    size = WORD // min(s.memory.dtype.bytes for s in b.stores)
    word = math.gcd(axes[0].extent.constant, size)
    if len(axes) == 2 and axes[0].extent == word:           # words already
        return b
    strewn = len(axes) > 2 and _interleaved_runs(b, axes)
    for each in (1,) if strewn else (word,) if word == size else (1, word) if 2 * word >= size else (1,):
        found = _worth(b, axes, each)
        while len(found) > 1 and not all(_lies(i, found, each) or strewn and set(found) <= i.axes() for i in indices_of(b)):
            found = found[:-1]
        if len(found) > 1:
            return _as_one(b, found, each)
    return b


def _short_of_whole(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """As many of `axes` as make up a multiple of WHOLE elements, or all."""
    total = as_index(1)
    for n, a in enumerate(axes):
        total = total * a.extent
        if total.constant is not None and total.constant % WHOLE == 0:
            return axes[:n + 1]
    return axes


def _worth(b: Body, axes: tuple[Axis, ...], word: int) -> tuple[Axis, ...]:
    """Those of `axes` that are worth counting as one, in words of so many elements: what a row has to itself is computed once a word then, and read
    once a word, what a column has to itself once an element. BatchNorm's backward in NCHW of 1600 f32 reads five values of a channel beside words of
    4: 24.3 us, 27.6 as one; but response norm, four, of 400 139.8, 123.2. Response norm of 192 x 15 x 15 f16 takes roots of rows: 9.5 us, 16.6."""
    exprs = list(walk(*exprs_of(b)))
    parts = {frozenset(e.free & set(axes)) for e in exprs if isinstance(e, Op) and e.dtype.is_float and (e.name in SLOW or OPS[e.name].heavy)}
    rows, columns = (any(p and len(p) < len(axes) and (axes[0] in p) is along for p in parts) for along in (False, True))
    beside = {e for e in exprs if isinstance(e, Load) and axes[0] in e.axes() and not set(axes) <= e.axes()}
    if axes[0].extent.constant < FEW and (columns or len(beside) > VALUES):
        return ()
    if word == 1:
        return () if rows or divided_by_rows(b, axes[0]) else axes[:BESIDE] if columns else axes
    read = {e for e in exprs if isinstance(e, Load) and axes[0] not in e.axes()}
    return axes if len(read) <= word else ()


def contiguous(address: Index, axes: frozenset[Axis], within: Axis | None = None) -> tuple[Axis, ...]:
    """Those of `axes`, innermost first, that `address` runs along one behind the other. Only the last one may have an extent that is not known.
    `within`: an axis inside of them."""
    found: list[Axis] = []
    weight = as_index(1) if within is None else as_index(within.extent)
    while True:
        a = next((a for a in address.atoms() if isinstance(a, Axis) and a in axes and a not in found and address.coefficient(a) is weight), None)
        if a is None or not found and a.extent.constant is None:
            return tuple(found)
        found.append(a)
        weight = weight * a.extent
        if a.extent.constant is None:
            return tuple(found)


def _apart(b: Body) -> tuple[Axis, ...]:
    """The axes along which lie, in what `b` reads, runs of another axis, shorter than a sector, that it stores apart, in whole words of 4 bytes, or
    in planes of which tiles along the axes idle (`_idles`): a tile has whole runs, however short the planes are that it stores. us on an H200, in
    tiles along the axes and so, with the sums beside: pixels that are shuffled apart of 27 x 192 x 20 x 20 bf16 26.0, 20.9, of 731 x 256 x 14 x 14
    f16 319, 294, of 16 x 192 x 40 x 40 48.8, 44.0, of 56 x 32 x 112 x 112 174, 172, of 60 x 1280 x 9 x 9 bf16 121, 90, x 11 x 11 f16 125, 117, of
    99 x 1280 x 5 x 5 bf16 56, 43; but of 200 x 768 x 15 x 15 314, 403."""
    stored = [contiguous(s.address, b.parallel & s.axes) for s in b.stores]
    words = lambda plane, s: plane[0].extent.constant * s.memory.dtype.bytes % 4 == 0
    if not all(plane and (words(plane, s) or _idles(plane)) for plane, s in zip(stored, b.stores)):
        return ()
    for e, address, size in strides_of(b):
        within = next((a for a in b.parallel if address.coefficient(a) == 1), None)
        if not isinstance(e, Load) or within is None or within.extent.constant is None or within.extent.constant * size >= SECTOR:
            continue
        axes = contiguous(address, b.parallel, within)
        if len(axes) > 2 and all(plane[:1] == axes[:1] and {within, *axes} <= s.axes for plane, s in zip(stored, b.stores)) \
                and all(set(axes) <= i.axes() or not set(axes) & i.axes() for i in indices_of(b)):
            return axes
    return ()


def _idles(plane: tuple[Axis, ...]) -> bool:
    """Has a tile along the innermost axes of what is stored so, in powers of two, few elements, or less than half of its own?"""
    extents = [a.extent.constant for a in plane[:2]]
    if len(extents) < 2 or None in extents:
        return False
    lanes = math.prod(map(power, extents))
    return lanes <= SHORT or 2 * math.prod(extents) < lanes


def _interleaved_runs(b: Body, axes: tuple[Axis, ...]) -> bool:
    """Is what `b` reads interleaved in what it stores along `axes`, no more bytes of it than it stores? us on an H200, in tiles along the axes and
    so: pixels that are shuffled together of 117 x 512 x 20 x 20 f16 133, 108; but a gradient that is shuffled apart, of 56 x 32 x 112 x 112 f16, two
    values, 130, 227, or 160 in the order in which they are read."""
    read = {e for e, address, size in strides_of(b) if isinstance(e, Load) and _interleaved(address, axes, size)}
    return 0 < sum(e.dtype.bytes for e in read) <= sum(s.memory.dtype.bytes for s in b.stores)


def _interleaved(address: Index, axes: tuple[Axis, ...], size: int) -> bool:
    """Does what is stored along `axes`, elements of so many bytes, lie in runs shorter than a sector along the innermost of them, and along the next
    one in the memory of `address`? So pixels are that are shuffled together: neighbours come of a few places that are read one after the other."""
    linear = {a for a in address.atoms() if isinstance(a, Axis)}
    return set(axes) <= linear and address.coefficient(axes[1]) == 1 and axes[0].extent.constant * size < SECTOR


def _lies(i: Index, axes: tuple[Axis, ...], word: int) -> bool:
    """May `i` be read along `axes` as one? Its words have to be words of memory, and elements that make up none have to lie one behind the other."""
    linear = {a for a in i.atoms() if isinstance(a, Axis)}
    used = i.axes() & set(axes)
    if not used <= linear:
        return False
    if len(used) < len(axes):
        return axes[0] not in used or i.coefficient(axes[0]) == 1
    return i.coefficient(axes[0]) == 1 if word > 1 else contiguous(i, frozenset(axes)) == axes


def _as_one(b: Body, axes: tuple[Axis, ...], word: int) -> Body:
    """`b` with `axes`, innermost first, as one, of words of so many elements."""
    fresh = count(max(a.id for a in b.axes) + 1)
    total = as_index(1)
    for a in axes:
        total = total * a.extent
    if total.constant is not None and total.constant >= RUN:
        return b
    within = Axis(next(fresh), word) if word > 1 else None
    number = Axis(next(fresh), floordiv(total, as_index(word)))
    mapping, above, weight = {}, axes[-1], as_index(1)
    for a in axes:
        extent = floordiv(a.extent, as_index(word)) if a is axes[0] else a.extent
        digit = floordiv(as_index(number), weight)
        digit = digit if a is above else mod(digit, extent)
        mapping[a] = digit * word + as_index(within) if a is axes[0] and within is not None else digit
        weight = weight * extent
    new = (number, within) if within is not None else (number,)
    last = max(map(b.axes.index, axes))
    order = [x for place, a in enumerate(b.axes) for x in (new if place == last else () if a in axes else (a,))]
    return rewritten(b, mapping, order, {*(b.parallel - set(axes)), *new})
