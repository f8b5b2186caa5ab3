"""Tiles of rows beside which something lies along another axis: what is read or written contiguously along the rows, and something else along an axis
that programs run in parallel over (the result of a norm that is transposed, biases of positions whose heads are innermost, tokens of an image). A row
a program would take of each memory sector one element; so programs have several rows, whole sectors of what lies across, and Triton lays each access
out for itself, through shared memory. Long rows are run through, a square at a time.
"""
from __future__ import annotations

from dataclasses import dataclass

from ..fuse.lines import SECTOR, WRITTEN_ABREAST, across, strides, whole_sectors
from ..ir.expr import Expr, Load, Op, Reduce, loads, walk
from ..ir.index import Axis
from .body import Store, exprs_of
from .schedule import strides_of
from .tile_access import begin_anywhere
from .tile_facts import TileFacts
from .tile_schedule import WASTE, cover
from .tile_stages import evenly, power

HELD = 18432            # lanes of a tile that holds those at most, twice as many of one value, half as many of rows that are only folded
LEAST = 8               # rows of a tile at least: of 16 bits half a sector, whose other half is in the cache then, tokens' norm of
                        # 31 x 2048 x 16 x 16 bf16 39.2 us, 41.4 in 16; but whole sectors of what is written: LayerNorm of 52 x 256 x 2192 bf16,
                        # transposed, 85.9 in eight rows, 49.5 in 16, 73.8 run through
MATRIX = 2048           # lanes of a tile that has all rows of what is written across them: LayerNorm of 24092 x 40 x 24 bf16, transposed, 37.6 us,
                        # 44.1 in 32 rows
RUN = 64                # bytes that lie across rows of a tile where there are programs enough, SECTOR where several values are held along them: a
                        # transposed LayerNorm's gradient of 397 x 15 x 513 f32 21.4 us in eight rows, 24.5 in 16
WIDTHS = 128, 64, 32    # lanes of each piece of a row of 16 bits that is no power of two: norms of the sum of 3909 x 16 x 261 bf16 and of one turned
                        # 33.5 us, 44.4 in 256 + 8, tokens' norm of 26 x 640 x 32 x 32 33.1, 38.9 in 512 + 128; but softmax of 40 x 513 x 513 f32 and
                        # its positions' biases 50 in 512 + 1
SHORT = 512             # elements of such a row up to which it has them in any case: scores of 334 x 52 x 1023 bf16 33.4 in one piece, 50.8 in 16
FOLDED_IDLE = 3         # but those that are only folded have one with one lane in so many idle, and no narrow ones else, by WARPS[1] at most:
                        # scores of 50 x 500 x 385 f16 22.0 us, 35.4 in 13 pieces by eight warps, of 60 x 700 x 200 bf16 17.1, 24.2 in seven, of
                        # 42 x 617 x 511 31.1, 60.5 in 16, of 100 x 333 x 129 14.2 in 64 + 64 + 64, 17.2 in five (H200)
PIECES = 2              # pieces of other lengths of a row of 32 bits at most
MOST_PIECES = 16        # of one length
SQUARE = 4096           # lanes of a tile where they are run through, as many along them as across, or more,
EDGE = 64               # across them at most,
FOLDED = 32             # and where they are only folded: scores of 153 x 173 x 2035 bf16 113 us, 125 with 64
FEWEST = 16             # warps of a multiprocessor at least, of rows that are only folded, for which turns are longer, up to SQUARE lanes: scores of
                        # 435 x 9 x 8193 bf16 82.0 us in turns of 256, 170 of EDGE, of 31 x 32 x 2047 f16 8.9 of 512, 26.2 (H200)
STAGES = 4              # tiles under way where they are written, or begin at words, of
UNDER_WAY = 16 << 10    # bytes at most that are read: a LayerNorm of 52 x 256 x 2192 bf16, transposed, 73.8 us, 106 with one tile, of 7 x 257 x 5142
                        # f32 58.9, 83.8 with two; but its gradient of 714 x 32 x 3094 f32, 32 KB a tile, 619, 412 with one; scores of
                        # 465 x 16 x 1568 bf16 20.5, 41.3 with one
AHEAD = 2048            # lanes of a tile of several values that is read a turn ahead, where rows that are written begin anywhere or tiles are large,
AHEAD_BYTES = 512       # so many bytes of each row, and
AHEAD_EACH = 8          # so many lanes to a thread: LayerNorm's gradient, turned, of 377 x 44 x 3873 bf16 232 us, 291 with four tiles of SQUARE under
                        # way, of 17 x 1343 x 2380 212, 771, of 405 x 22 x 2570 92.5, 119; of 714 x 32 x 3094 f32 385, 409 with one, 433 in eight
                        # rows. One value by tiles of SQUARE: LayerNorm, transposed, of 39 x 32 x 4095 bf16 28.5, 33.6, of 76 x 93 x 4989 158, 168
                        # (H200)
EACH = 16               # lanes to a thread, about, of tiles of fewer lanes than
LARGE = 8192, 12288     # the first number; those of up to the second, what tiles of more than LEAST rows have at most (of 32 bits HELD / 2), have
WARPS = 8, 4            # the second number of warps, and the first is the most: softmax of 16 x 16 x 512 x 512 bf16 and its positions' biases 94 us
                        # by four, 98 by eight, 151 by 16, of 40 x 513 x 513 f32 50, 57, 81; LayerNorm of 233 x 91 x 128 bf16, transposed, 9.1 by
                        # eight, 9.0 by 16
PIECE = 128             # bytes of each piece of a row beside which sums are carried, at least, where pieces of one length cover it: a LayerNorm's
                        # gradient, turned, of 57395 x 8 x 96 f32 171 us in 32 + 32 + 32, 255 in 64 + 32
SHORTEST = 64           # elements of a row up to which, where what lies across it begins anywhere, it has one piece of 32 bits, or is, where that is
PIECE_OF_SHORT = 16     # written, in pieces of so many of 16: LayerNorm, turned, of 3000 x 129 x 63 f16 43.8 us, 83.4 in 64, of 4000 x 255 x 31 bf16
                        # 51.0, 69.7 in 32, of 3000 x 333 x 48 67.4, 78.1 in 64;
EACH_WIDE = 4, 8        # of 32 bits so many lanes to a thread, the second where rows begin anywhere, too: of 5433 x 255 x 31 f32 123, 158 by half as
                        # many warps, of 2000 x 511 x 24 67.7, 85.5 in 16 + 8 by one; scores of 583 x 2047 x 56 f32 145, 170 in 32 + 32 by two (H200)
CARRIED = 4096          # lanes of such a tile with whole sectors across its rows, those with more of LEAST rows,
CARRIED_EACH = 32       # so many to a thread: tokens' norm backward of 379 x 256 x 8 x 8 bf16 30.1 us by four warps, 42.7 by eight, of
CARRY_STAGES = 3        # 182 x 480 x 16 x 16 f32 105.7, 109.6; of so many warps at least and at most: turned, of 50 x 2810 x 128 bf16 51.2 by four,
CARRYING = 4, 16        # 57.3 by two, of 10774 x 64 x 58 117, 126. Tiles under way where rows begin at words both ways: of 20 x 512 x 56 x 56 bf16
                        # 103.6, 125.7 with one (by eight warps). But not where a sum of nothing but what lies across is carried, in pieces of
ONE_BANK = 64           # so many: that is read from a copied tile along its other side, by all threads of a warp from one bank. LayerNorm's, turned,
                        # of 52 x 256 x 1024 bf16 50.4 with one, 107.9, of 19 x 3898 x 512 f16 107, 327
CARRIED_WHOLE = 64      # bytes across such rows up to which a tile has all of them that are no program's own, whole sectors of more, in equal
CARRIED_PIECES = 8, 3, 4        # pieces of so many lanes at least, so many pieces at least, one lane in so many idle; one in so many of what lies
CARRIED_IDLE = 3        # across idle at most: LayerNorm's gradient, turned, of 44709 x 11 x 45 f32 109 us, 294 in rows along what is summed over, of
                        # 10287 x 33 x 33 bf16 75, 149, of 2832 x 40 x 168 72, 255, of 11782 x 33 x 63 143, 159 (H200)
FILL = 2                # programs for each multiprocessor at least, where rows across can be fewer
IDLE = 4                # lane in so many idle across the rows, from which on there are fewer


@dataclass(frozen=True)
class Rows:
    """Rows of a program: the pieces of the row and of the axis across, warps, what is run through, tiles under way; `ahead`: the next one is read
    into registers."""
    pieces: dict[Axis, tuple[int, ...]]
    warps: int
    looped: frozenset[Axis] = frozenset()
    stages: int = 1
    ahead: bool = False


def choose(of: TileFacts) -> Rows | None:
    """Rows across which something lies; None where nothing does."""
    if not 1 <= len(of.rows) <= 2 or of.target.ordered or not of.folds or of.scans() or of.b.base is not None \
            or any(s.monoid is not None or s.guard is not None for s in of.b.stores):
        return None
    if len(of.rows) == 2:
        return _groups(of) if not of.crossed else None
    row, = of.rows
    found = _lies_across(of, row)
    if found is None or of.line not in (row, found[0]):
        return None
    axis, size, written = found
    n, length = of.hints.most(row.extent), of.hints(axis.extent)
    pieces = _pieces(n, size, of.begin_anywhere(), of.stored_along()) if n is not None else ()
    if of.crossed:
        pieces = evenly(n, PIECE // size) or pieces if len(set(pieces)) > 1 else pieces
        return _carrying(of, axis, size, pieces) if of.carries and of.stored_along() and pieces else None
    if written and pieces and sum(pieces) * power(length) <= MATRIX:
        return Rows({row: pieces, axis: (power(length),)}, _warps(sum(pieces) * power(length)))
    several, least = _several(of), max(LEAST, SECTOR // size if written else 0)
    room, most = (HELD if several else 2 * HELD, EDGE) if of.stored_along() else (HELD // 2, FOLDED)
    held = bool(pieces) and sum(pieces) * least <= room
    if held:
        most = max(least, min((SECTOR if several else RUN) // size, (LARGE[1] if size < 4 else HELD // 2) // sum(pieces)))
    count = _across(of, axis, min(power(length), power(most + 1) // 2), min(power(length), least))
    short = _short(of, row, axis, size, written) if held and count * size >= RUN else None
    if short is not None:
        lanes = power(n) * count
        return Rows({row: short, axis: (count,)}, _warps(lanes) if size < 4 else _warps_of_wide(lanes, begin_anywhere(of.b, row, of.hints)))
    if held:
        warps = _warps(sum(pieces) * count)
        return Rows({row: pieces, axis: (count,)}, warps if of.stored_along() or size >= 4 or n > SHORT else min(warps, WARPS[1]))
    return _run_through(of, row, axis, count, size if several and of.stored_along() else 0)


def _run_through(of: TileFacts, row: Axis, axis: Axis, count: int, wide: int) -> Rows:
    """`count` rows across `axis` that are run through; of several values of `wide` bytes others if the next tile is read ahead."""
    along = first = min(SQUARE // count if of.stored_along() else EDGE, power(of.hints(row.extent)))
    while not of.stored_along() and along < of.hints(row.extent) and along * count < SQUARE \
            and of.blocks(of.b.parallel, {axis: (count,)}) * _warps(along * count) < FEWEST * of.target.threads:
        along *= 2
    turn = along * count * sum(size for e, address, size in set(strides_of(of.b)) if {row, axis} <= address.axes() and isinstance(e, Load))
    copied = not of.begin_anywhere() or of.stored_along() and of.narrowest() >= 4      # numbers of 32 bits one by one
    if along == first and turn <= UNDER_WAY and copied:
        return Rows({row: (along,), axis: (count,)}, _warps(along * count), frozenset((row,)), STAGES)
    if wide:
        along, count = AHEAD_BYTES // wide, min(count, AHEAD * wide // AHEAD_BYTES)
        return Rows({row: (along,), axis: (count,)}, max(1, along * count // (32 * AHEAD_EACH)), frozenset((row,)), ahead=True)
    return Rows({row: (along,), axis: (count,)}, _warps(along * count), frozenset((row,)), ahead=of.stored_along())


def _carrying(of: TileFacts, axis: Axis, size: int, pieces: tuple[int, ...]) -> Rows | None:
    """The same of rows in those `pieces` beside which sums are carried along the row, over `axis`, too, or over another one. What is not copied while
    a program goes on, since rows begin at no words, or a warp would read one bank of it, is read ahead: LayerNorm's gradient, turned, of
    352 x 592 x 184 bf16 105 us, 196, of 835 x 257 x 127 f32 218, 379, tokens' norm of 2258 x 96 x 15 x 15 bf16 165, 348, of 99 x 128 x 15 x 15 f32
    21.1, 24.5; but where it is copied, of 1333 x 96 x 20 x 20 174, 128. What lies in sectors of 16 bits across them is, of 15546 x 40 x 24 bf16 80,
    169 with tiles under way, of 3000 x 40 x 96 51, 67, but of 6000 x 24 x 80 f16, whole lines, 50.4, 47.5 (H200)."""
    row, lanes, most = of.rows[0], sum(pieces), power(of.hints(axis.extent))
    count = min(most, SECTOR // size if lanes * (SECTOR // size) <= CARRIED else LEAST)
    alone = axis not in of.crossed and count < most
    if alone:
        count, n = most if most * size <= CARRIED_WHOLE and lanes * most <= CARRIED else count, of.hints(axis.extent)
        if -n % count * CARRIED_IDLE > n + -n % count:
            return None
        pieces = evenly(of.hints.most(row.extent), *CARRIED_PIECES) or pieces
    if lanes * count > HELD // 2:
        return None
    warps = max(CARRYING[0], min(CARRYING[1], power(-(-lanes * count // (32 * CARRIED_EACH)))))
    words = not any(begin_anywhere(of.b, a, of.hints) for a in (row, axis))
    one_bank = pieces[0] >= ONE_BANK and _carries_across(of, row, axis)
    copied = words and not one_bank and not (alone and count < most and size < 4)
    return Rows({row: pieces, axis: (count,)}, warps, stages=CARRY_STAGES if copied else 1, ahead=not copied)


def strided(of: TileFacts) -> bool:
    """Are sums carried beside rows that something does not lie contiguously along, as few of it as there may be across them? It is read ahead, too:
    LayerNorm's gradient, turned, of 19927 x 5 x 65 bf16 37.0 us, 75.8, of 60540 x 3 x 94 f32 108, 156 (H200)."""
    beside = of.carries and len(of.rows) == 1 and not of.looped and of.shift is None
    return beside and any(isinstance(e, Load) and strides(address, of.rows[0]) for e, address, _ in strides_of(of.b))


def _carries_across(of: TileFacts, row: Axis, axis: Axis) -> bool:
    """Is a sum carried of nothing but what lies across the rows?"""
    turned = lambda e: {row, axis} <= e.axes() and e.index[0].coefficient(axis) == 1
    carried = [[x for x in loads(*e.args) if row in x.axes()] for e in of.folds if row not in e.over]
    return any(found and all(map(turned, found)) for found in carried)


def _several(of: TileFacts) -> bool:
    """Are several values held along the rows, none of which makes up what all others are for?"""
    read = {e for e in loads(*exprs_of(of.b)) if of.rows[0] in e.axes() and e.axes() & of.b.parallel}
    if len(read) < 2:
        return False
    wholes = {e for e in walk(*exprs_of(of.b)) if isinstance(e, Op) and read <= set(loads(e)) and not any(isinstance(x, Reduce) for x in walk(e))}
    return not any(_only_within(of, read, e) for e in wholes)


def _only_within(of: TileFacts, read: set[Load], whole: Expr) -> bool:
    """Is nothing of `read` used but as part of `whole`?"""
    stack, seen = list(exprs_of(of.b)), {whole}
    while stack:
        e = stack.pop()
        if e in read:
            return False
        if e not in seen:
            seen.add(e)
            stack += e.children()
    return True


def _pieces(n: int, size: int, anywhere: bool, written: bool) -> tuple[int, ...]:
    """Of a row of `n` elements of so many bytes, which begins `anywhere`, and is `written` or only folded."""
    found, short = cover(n), anywhere and WIDTHS[0] < n <= SHORT
    if size >= 4 and len(found) <= PIECES or len(found) == 1 and not short:
        return found
    if n > SHORT and (power(n) - n) * WASTE <= n:
        return (power(n),)
    if short and not written and (power(n) - n) * FOLDED_IDLE <= n:
        return (power(n),)
    widths = WIDTHS if not anywhere else reversed(WIDTHS[:-1] if short and not written else WIDTHS)
    width = min((w for w in widths if n <= MOST_PIECES * w), key=lambda w: -n % w, default=WIDTHS[0])
    return (width,) * -(-n // width)


def _short(of: TileFacts, row: Axis, axis: Axis, size: int, written: bool) -> tuple[int, ...] | None:
    """The pieces of a short row across which something lies that begins anywhere, elements of so many bytes; None where it has others."""
    n = of.hints.exactly(row.extent)
    if n is None or not PIECE_OF_SHORT < n <= SHORTEST or not begin_anywhere(of.b, axis, of.hints) or of.stored_along() and not written:
        return None
    if size < 4:
        return (PIECE_OF_SHORT,) * -(-n // PIECE_OF_SHORT) if written else None
    return (power(n),) if (power(n) - n) * IDLE <= power(n) else None


def _warps_of_wide(lanes: int, anywhere: bool) -> int:
    """Of a tile of so many lanes of 32 bits, of short rows that begin `anywhere` or at words."""
    return max(1, min(WARPS[1], lanes // (32 * EACH_WIDE[anywhere])))


def _across(of: TileFacts, axis: Axis, count: int, least: int) -> int:
    """`count` rows along `axis`, or fewer, `least`, where programs are too few or lanes are idle."""
    n = of.hints(axis.extent)
    while count > least and (-n % count * IDLE > n or of.blocks(of.b.parallel, {axis: (count,)}) < FILL * of.target.threads):
        count //= 2
    return count


def _groups(of: TileFacts) -> Rows | None:
    """The same of rows along two axes, one of which is a short piece of the lines of what lies across: whole sectors of several rows."""
    both = {(address, size) for _, address, size in strides_of(of.b) if set(of.rows) <= address.axes()}
    for c, h in (of.rows, reversed(of.rows)):
        turned = {(address, size) for address, size in both if address.coefficient(c) == 1 and address.coefficient(h) != 1}
        if not turned or not any(address.coefficient(h) == 1 for address, _ in both) or any(of.hints.most(a.extent) is None for a in (c, h)):
            continue
        groups = {a for address, _ in turned for a in of.b.parallel if address.coefficient(a) is c.extent}
        if len(groups) != 1:
            continue
        g, = groups
        row = (power(of.hints.most(c.extent)),), cover(of.hints.most(h.extent))
        count = whole_sectors(of.hints(c.extent) * min(size for _, size in turned), of.hints(g.extent))
        lanes = row[0][0] * sum(row[1]) * count
        if count > 1 and lanes <= WRITTEN_ABREAST:
            return Rows({g: (count,), c: row[0], h: row[1]}, _warps(lanes))
    return None


def _lies_across(of: TileFacts, row: Axis) -> tuple[Axis, int, bool] | None:
    """(the axis along which something lies across `row`, bytes of its elements, is any of it written), or None where nothing does."""
    accesses = strides_of(of.b)
    found = across((address for _, address, _ in accesses), row, of.b.parallel, of.hints)
    axis = next((a for a in reversed(of.order) if a in found), None)
    if axis is None and not of.crossed:
        axis = _whole_planes(of, row)
    if axis is None:
        return None
    turned = [(e, size) for e, address, size in accesses if address.coefficient(axis) == 1 and strides(address, row)]
    return axis, min(size for _, size in turned), any(isinstance(e, Store) for e, _ in turned)


def _whole_planes(of: TileFacts, row: Axis) -> Axis | None:
    """An axis with less of it than a sector of memory, across rows that are read as they lie and written across: planes, which all rows of one make
    up. A LayerNorm of 6325 x 7 x 1134 f32, transposed, wrote 28 bytes at a time row by row, 711 us, Inductor 148 (H200)."""
    accesses = [(e, address, size) for e, address, size in strides_of(of.b) if row in address.axes()]
    return next((a for e, address, size in accesses for a in of.b.parallel
                 if isinstance(e, Store) and address.coefficient(a) == 1 and address.coefficient(row) == a.extent
                 and 1 < of.hints(a.extent) < SECTOR // size and of.hints(row.extent) >= SECTOR // size
                 and any(x.coefficient(row) == 1 and strides(x, a) for _, x, _ in accesses)), None)


def _warps(lanes: int) -> int:
    return WARPS[1] if LARGE[0] <= lanes <= LARGE[1] else max(1, min(WARPS[0], power(lanes // (32 * EACH) + 1) // 2))
