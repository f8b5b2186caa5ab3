"""When is a row held in stages, by how many programs, in which pieces?

A row that is needed again once a fold over it is known is best read once. In stages (`codegen.tile_stages`) it stays in registers in the width it
has in memory, so one program holds 128 KB; several of a cluster share what is longer. Measured on an H200, percent of a copy, Layer norm / RMS /
softmax of bf16: 2621 rows of 25600: 90 / 92 / 88, against 55 / 66 / 79 with the row held in f32; 1024 of 65536, by one program: 74 / 84 / 69, against
53 / 59 / 48 in two passes; 256 of 262144, by eight: 61 / 77 / 62, against 54 / 58 / 56; softmax of 999 rows of 99991 f32, by eight: 67.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..fuse import sharing
from ..fuse.cost import Hints
from ..fuse.lines import MOST_BESIDE, SHARE, abreast, alone, apart
from ..ir.expr import Load, Op, Reduce, Scan, walk
from ..ir.index import Axis
from ..ir.ops import CARRIERS, OPS
from .body import Body, exprs_of
from .tile_access import fits

FROM = 20 << 10         # bytes of a row from which on it is held in stages: 4096 rows of 32 KB 90 / 95 / 87, against 86 / 94 / 88; 8192 of 24 KB
                        # 86 / - / 97, against 80 / - / 93
FROM_WIDE = 32 << 10    # the same of rows of 32 bits and more: f32 softmax over 16384 and 16385 columns 89 and 88%, 74 and 73 held as they are;
                        # LayerNorm 95 either way. Over 8192 columns 90 and 95, LayerNorm 97 and 95
WIDE = 64 << 10         # of a row, or a share, from which on it takes a multiprocessor's threads, or, along one axis, all of its registers by half as
                        # many (H200): gradients of cosines of 687 x 32767 bf16 74 us, 128 by twice as many, which spill 272 bytes, of weight norm of
                        # 290 x 8700 f32 15.4, 17.6, of a variance of 1302 x 36024 bf16 56.1, 57.9, distillation of 3654 x 9135 f32 188, 230,
                        # log-softmax of 135 x 57979 bf16 21.1, 22.8, LayerNorm and softmax of 182 x 32768 f32 31.9, 32.7; but the gradient of least
                        # and greatest of 486 x 32767 f16 52.7, 49.8
LAST = 1.08             # times the rounds of one such program on each multiprocessor, rounded up, from which on its last ones would idle, and the
LAST_SHARE = 12 << 10   # programs of a cluster share each row, of so many bytes at least to one (H200): log-softmax of 135 x 57979 bf16 16.9 us,
                        # 21.1, LayerNorm and softmax of 182 x 32768 f32 29.2, 31.9, gradients of weight norm of 205 x 32768 bf16 17.2, 19.0,
                        # of least and greatest of 486 x 32767 f16 43.3, 52.7, of cosines of 687 x 32767 bf16 66.7, 74.4; but cosines of 263 x 32767
                        # 28.9, 26.6, a variance of 1302 x 36024 62.2, 56.1, weight norm of 290 x 8700 f32, 9 KB to each, 16.0, 15.4
NARROW = 16 << 10       # of a share up to which it takes half as many threads, so that all clusters of few rows run at once
WARPS = 16              # of a program that holds a row, or a share of one, up to WIDE; a longer one along several axes twice as many. Half of a row
TWO_BYTES = 32000       # to itself (`of_two`), H200: weight norm of 1815 x 10345 bf16 24.6 us, 29.3, LayerNorm of 4000 x 12288 f16 54.0, 57.7,
                        # variance of 553 x 14455 bf16 9.5, 10.7, of 2049 x 14944 21.7, 24.6, GroupNorm in NCHW, a plane of 12544 f16, 12.4, 15.0,
                        # log-softmax of 1562 x 9994 f32 35.5, 38.2; but softmax of 627 x 32769 bf16 27.9, 25.3, of 1801 x 21642 45.4, 43.8, f32 of
                        # 437 x 13488, which begin at words, 19.9, 18.8
TWO = 100 << 10         # bytes of a share of 32-bit elements along several axes up to which it takes half as many threads again, so that a
                        # multiprocessor has two such programs, and one reads while the other computes: EvoNorm of 32 x 256 x 56 x 56 in f32 79 us, 94
                        # by one (H100), of 24 x 512 x 40 x 40 67, 74, GroupNorm 77 and 60, 78 and 65. Of 16 bits twice as many are held, and spill:
                        # 166 and 143, 123 and 99
LANES = 8               # elements of a piece to a thread: 16 bytes of a 16-bit type
NESTED_LANES = 32       # the same where some folds are along some of the axes alone, each of which waits for all warps once a piece: GroupNorm
                        # backward in NCHW of 128 x 1024 x 14 x 19 bf16 99 us, 113 with half as many, 163 with LANES; of 24 x 640 x 20 x 20 19.7, 21.6
KEPT = 64 << 10         # bytes of a row that begins anywhere, and of what is kept beside it for all rows of a program, where two programs share a
                        # multiprocessor: RMS of 4095 rows of 16385 bf16 87, against 65 kept as loaded. With a layer norm's two weights one program
                        # has it, rows under way: 73; two that share each row 63
UNBROKEN = 512          # contiguous elements at least of what a program has of a row that several share
WASTE = 8               # one lane of a row in so many may be idle in its last piece
EVEN_WASTE = 7          # one lane of a row in so many may be idle in equal pieces: bf16 RMSNorm of 131072 rows of 112 as two of 64 16.5 us, 18.5 as
                        # seven of 16
IDLE = 1.25             # lanes to an element of a row, at most
SIDE = 8                # contiguous elements at least, of a row that one program holds anyhow
REGISTERS = 64          # a thread: all of a multiprocessor's are taken then
UNDER_WAY = 3           # rows that are read or worked on at once in a loop: bf16 Layer norm / RMS / softmax of 256 rows of 262144 69 / 84 / 76, 62 /
                        # 77 / 72 with a cluster for each row; of 1024 of 65536, by two, 71 / 85 / 83, 71 / 82 / 81. With 2 no row is under way while
                        # one is worked on: 51 / - / -. LayerNorm backward over 16385 columns 59%, RMSNorm 68; 51 and 54 with one
SHARED = 160 << 10      # bytes of shared memory at most that hold those which are read
FOLDED_WARPS = 4, 8     # of such a program whose rows are only folded, the first where a thread then has up to
FOLDED_HELD = 100       # so many registers of a share: cosines of 744 x 34184 f32 91.6 us by four warps, 97.0 by eight, 116 by 16, of 500 x 80000
                        # bf16 79.7, 87.2 and 102, kurtosis of 800 x 50000 f32 84.8, 91.4 and 104; but where rows are written log-softmax of
                        # 500 x 40000 f32 66.6, 60.8 and 54.3, the gradient of softmax of 1500 x 27400 148, 149 and 127, of weight norm of
                        # 2000 x 20000 142, 143, 151 (H200)
TURNS = 8               # rows at least to a cluster whose programs take one after the other
BESIDE = 3              # bytes of all that is read along a row that way, to a byte of a share's row: a bf16 layer norm's two weights spill 64 bytes
SIDE_WARPS = 4          # of a program that holds rows side by side: with twice as many of half the registers EvoNorm of 32 x 256 x 56 x 56 in bf16 53
                        # us, 47; where it holds two values twice as many: GroupNorm backward of the same 67 us, 72 with half as much to each
SIDE_HELD = 192         # but not where a run is pieces of several lengths, the shortest tile of which more warps would share an element each, up to
                        # so many elements to a thread, OPEN_REGISTERS: of 49 x 1280 x 32 x 32 bf16, runs of 32 + 8, 199 us, 287 (H200)
SIDE_REGISTERS = 128    # of a thread then
OPEN_REGISTERS = 256    # of a thread that has as many as it takes: of 49 x 1280 x 32 x 32 bf16, runs of 32 + 8, 199 us, 250 with MOST_REGISTERS
MOST_REGISTERS = 255    # of a thread,
LITTLE = 32             # where it would hold up to so many elements in pieces along several axes, and more warps idle in the smallest of the tiles
                        # that these make: GroupNorm backward in NHWC of 1200 x 256 x 7 x 7 bf16, 8 x (32 + 16 + 1) x 8, 52 us by two warps, 117 by
                        # eight, EvoNorm in NCHW of 78 x 2048 x 7 x 7 20.3, 29.3; but of f32 2000 x 64 x 7 x 7 27.6 by one, 24 by four,
MUCH = 120              # or more than so many: BatchNorm in NCHW of 37 x 1280 x 40 x 40 f16, 8 x (1024 + 512 + 64) each five times, 141 by eight
                        # warps, 239 by 16, which spill 352 bytes a thread, of 20 x 320 x 56 x 56, 4 x (2048 + 1024 + 64) each five times, 48.5, 57,
                        # GroupNorm backward in NHWC of 18 x 1280 x 56 x 56 253 by four, 287 by eight; but BatchNorm of 524 x 480 x 15 x 15, four
                        # programs a channel, 563 by four, 395 by eight, GroupNorm in NCHW of 32 x 256 x 56 x 56, 98 by eight warps, 40, 44 by four,
                        # BatchNorm backward of 33 x 1280 x 40 x 40, 113, 186, 206 (H100)
TILES = 4               # that the pieces of two axes of a row make, more of which
PLANE_SHORT = 512       # of axes of up to so many elements
PIECE = 64              # have equal pieces, of so many elements at least, half as many of axes of half as many; or one where no more than
PIECE_IDLE = 0.3        # so many lanes of each are idle: BatchNorm backward in NCHW of 51 x 640 x 20 x 20 bf16 34.1 us as 64 and 7 x 64, of
                        # 40 x 512 x 15 x 15 17.2 as 32 + 8 and 2 x 128; 47.7 as 32 + 16 + 4 and 256 + 128 + 16, 18.9 as 32 + 8 and 128 + 64 + 64;
                        # EvoNorm backward of 16 x 2048 x 15 x 14 bf16 34.1, of 16 x 2048 x 15 x 15 66.8, BatchNorm backward of
                        # 120 x 1024 x 14 x 15 65.2, as 7 or 8 x 32; 69.2, 101.7 and 77.5 as 256 or 2 x 128, which spill (H200)
BOTH_WAYS = 32          # elements of a tile along the contiguous axis at least where another is contiguous in what is read or written, too:
                        # GroupNorm of an image whose pixels are tokens then, of 23 x 2048 x 32 x 32 bf16 87.7 us as 256 x 32, 249 as 1024 x 8, of
                        # 64 x 1024 x 32 x 24 54.1, 100, of 40 x 1280 x 24 x 24 f16 50.8, 76.6, of 23 x 1024 x 32 x 32 f32 58.4, 69.1 (H200); as
                        # 512 x 16 and 128 x 64 the first takes 99.1 and 84.5, the second 60.5 and 55.3
MOST_HELD = 128         # and not more than so many: BatchNorm backward in NCHW of 137 x 1280 x 15 x 15 bf16 178 us by 16 warps, 346 by eight, which
                        # spill 832 bytes (H200)
PLANE = 28              # elements to a thread, at most, of a plane that is a program's own: planes of 3136, EvoNorm backward of 32 x 256 x 56 x 56 in
                        # bf16 68 us, 92 and 75 with twice and half the warps; of SiLU behind a GroupNorm 63, 77 and 83; in f32 108, 112 and 116
PLANE_REGISTERS = (2, 64), (8, 96)      # (bytes of what is read, registers of a thread then, more of which fewer programs would run): EvoNorm in bf16
                        # 83 us with 96, in f32 121, 131 with 80, 125 with 128
FILE = 65536            # registers of a multiprocessor
WORD = 16               # bytes of the widest access of a thread
CARRYING = 16           # elements of a row to one thread where column sums are carried beside it
FEW_CARRYING = 4        # warps, more of which are half as many of twice the registers where all that is read has 16 bits, rows begin at words,
EACH_CARRYING = 28      # and a thread then has up to so many elements of a row,
VALUES_CARRYING = 144   # and so many values of them, sums among these: gradients of LayerNorm of 2621 x 25600 bf16 138 us, of 2000 x 21000 f16 99, of
                        # RMSNorm of 1200 x 50000 bf16 128, of 2000 x 40000 f16 161; 169, 102, 148 and 182 by twice as many; but of 2048 x 32768,
                        # 32 elements, 113.5, 115.6, with a sum and a residual of 447 x 32768 32.0, 31.4 (H200)
COPIED = 8              # bytes of a piece to a thread where rows are copied while others are worked on,
MOST_COPIED = 8         # in about so many pieces at most: gradients of weight norm of 1146 x 27400 f32, 4 programs a row, 102 us as 7 x 1024, 138 as
                        # 4096 + 2048 + 1024, of 2000 x 20000 151, 172, softmax of 1500 x 27400 127, 148, LayerNorm of 2000 x 21000 140, 166, of
                        # 3000 x 18000 bf16 118, 159, of 2621 x 25600 171, 187, of 1500 x 30000 96, 101, RMSNorm of 2621 x 20000 f32 164, 177, weight
                        # norm of 800 x 50000 155, 154; LayerNorm of 1024 x 32768 f32 121 so and so (H200)
WORD_LANES = 64         # elements of 16 bits that a warp's threads read as words of 4 bytes


@dataclass(frozen=True)
class Stages:
    """A row of `sharers` programs, which share its axis `shared`; `pieces` of each of its axes to a program. `kept`: they take many rows that begin
    alike, and keep what they read beside them."""
    shared: Axis
    sharers: int
    pieces: dict[Axis, tuple[int, ...]]
    warps: int
    registers: int = REGISTERS
    kept: bool = False
    stages: int = 1             # rows under way at once
    beside: tuple[Axis, int] | None = None      # rows of a program that lie side by side, along that axis


def possible(b: Body, rows: list[Axis], line: Axis | None, hints: Hints, target) -> bool:
    """Are the folds of `b` of rows, whole or along some of their axes, contiguous and of a known length, that are needed again once they are
    known?"""
    if target.ordered or line not in rows or len(rows) > 3 or any(hints.exactly(a.extent) is None for a in rows):
        return False
    read = held(b, frozenset(rows))
    if not read:                # folds of coordinates: nothing is held
        return False
    run = sharing.LINE // min(e.dtype.bytes for e in read)
    short = hints.least(line.extent) < (run if hints.count(rows) > sharing.HELD else SIDE)
    beside = abreast(read, rows, hints, target, MOST_BESIDE)
    if short and beside is None:
        return False
    if b.base is not None or any(s.monoid is not None or s.guard is not None for s in b.stores):
        return False
    whole, folds = frozenset(rows), [e for e in walk(*exprs_of(b)) if isinstance(e, (Reduce, Scan))]
    if any(isinstance(e, Scan) or not whole & set(e.over) for e in folds):
        return False
    nested = any(not whole <= set(e.over) for e in folds)
    if nested and any(e.monoid in CARRIERS for e in folds):
        return False
    if nested and beside is None and hints.count(rows) > sharing.HELD and one_each(b, rows, held(b, whole), hints, target) is None:
        return False
    again = any(isinstance(x, Reduce) for e in folds for a in e.args for x in walk(a)) or \
        any(s.axes & whole and any(isinstance(e, Reduce) for e in walk(s.expr)) for s in b.stores)
    return again and not _elsewhere(b)


def _elsewhere(b: Body) -> bool:
    """Is memory that is written also read at other addresses? Another program may have written there."""
    written = {s.memory: s.address for s in b.stores}
    return any(isinstance(e, Load) and e.node in written and e.index[0] is not written[e.node] for e in walk(*exprs_of(b)))


def held(b: Body, rows: frozenset) -> list[Load]:
    """What stays in registers of a row from its folds on: what they, and what is made of the same values behind them, read."""
    return list({(e.node, e.index): e for f in walk(*exprs_of(b)) if isinstance(f, Reduce) for e in walk(*f.args)
                 if isinstance(e, Load) and rows & e.index[0].axes()}.values())


def stages(b: Body, rows: list[Axis], line: Axis, hints: Hints, target) -> Stages | None:
    """How the rows of a `possible` body are held; None where in no stages."""
    n = {a: hints.exactly(a.extent) for a in rows}
    read = held(b, frozenset(rows))
    found = side_by_side(b, rows, read, hints, target) or one_each(b, rows, read, hints, target)
    if found is not None:
        return found
    whole = max(sum(math.prod(n[a] for a in rows if a in e.index[0].axes()) * e.dtype.bytes for e in read), math.prod(n.values()))
    whole -= whole % 16
    nested = any(not frozenset(rows) <= set(e.over) for e in walk(*exprs_of(b)) if isinstance(e, Reduce))
    least = FROM if any(e.dtype.is_half for e in read) else FROM_WIDE
    sharers = sharing.sharers(whole, target, 0 if nested else hints.count(b.parallel)) if whole > least else 0
    sharers = 0 if nested and sharers > 1 else sharers
    if whole <= least and len(rows) > 1 and WASTE * (_rounded(rows, hints) - hints.count(rows)) > hints.count(rows):
        # GroupNorm of 24 x 640 x 20 x 20 f16 12.7 us, 15.8 as it is, of 64 x 1280 x 16 x 12 bf16 25, 32
        sharers = min(1, sharing.sharers(whole, target))
    narrowest = min(e.dtype.bytes for e in read)
    if len(rows) == 1 and sharers == 1 and whole > WIDE:
        shared = _idles_last(whole, b, hints, target) and not _breaks_words(n[line], target.cluster, narrowest)
        sharers, warps, registers = (target.cluster, max(1, 2 * WARPS // target.cluster), OPEN_REGISTERS) if shared else (1, WARPS, 2 * REGISTERS)
        return Stages(line, sharers, {line: pieces(-(-n[line] // sharers), 64 * WARPS * LANES)}, warps, registers)
    warps = max(1, WARPS // 2) if sharers > 1 and whole <= NARROW * sharers else WARPS if whole <= WIDE * sharers else 2 * WARPS
    if whole <= least:
        warps = min(warps, power(hints.count(rows) // (32 * LANES) + 1))        # rows of 640 by eight warps are half as fast as Inductor's
    others = sorted((a for a in rows if a is not line), key=lambda a: -n[a])
    turned = warps == WARPS and any(e.index[0].coefficient(a) == 1 for e in read for a in others if n[a] < sharing.RUN)
    warps = warps // 2 if turned else warps         # GroupNorm of 32 x 256 x 56 x 56 bf16 from NHWC to NCHW 42.6 us, 45.3 with twice as many
    unbroken = sharers and n[line] >= sharers * UNBROKEN and not _breaks_words(n[line], sharers, narrowest)
    for shared in ((line, *others, line) if unbroken else (*others, line)) if sharers else ():
        elements = 32 * warps * (NESTED_LANES if nested else LANES)
        found = _covered({**n, shared: -(-n[shared] // sharers)}, _order(b, read, line, others, n), line, elements)
        if len(rows) == 1 or math.prod(map(sum, found.values())) * sharers <= IDLE * math.prod(n.values()):
            found = _plain(found, n | {shared: -(-n[shared] // sharers)})
            if turned:
                return Stages(shared, sharers, found, warps, 2 * REGISTERS)
            long = len(rows) == 1 and (n[line] >= sharing.RUN or warps > WARPS)
            two = warps > WARPS and whole <= TWO * sharers and not any(e.dtype.is_half for e in read)
            warps = warps if long else max(1, warps // (4 if two else 2))
            registers = REGISTERS if long else 2 * REGISTERS
            return Stages(shared, sharers, found, *_busy(warps, registers, found, read))
    return None


def _idles_last(whole: int, b: Body, hints: Hints, target) -> bool:
    """Would multiprocessors idle in the last of few rounds of programs that each have all of one, and can a cluster share rows of so many bytes?"""
    rounds = hints.count(b.parallel) / target.threads
    return target.cluster > 1 and whole >= target.cluster * LAST_SHARE and math.ceil(rounds) >= LAST * rounds


def _breaks_words(n: int, sharers: int, size: int) -> bool:
    """Do shares of contiguous rows, n elements of so many bytes each, begin within words of 16 bytes, where rows begin with one?"""
    return n * size % WORD == 0 and -(-n // sharers) * size % WORD != 0


def side_by_side(b: Body, rows: list[Axis], read: list[Load], hints: Hints, target) -> Stages | None:
    """How the programs of a cluster hold rows that lie side by side, of each of which a short piece is in every line: groups of channels in
    channels-last. None where that is not so, or a program by itself does better."""
    beside, whole = abreast(read, rows, hints, target, MOST_BESIDE), set(rows)
    heavy = any(isinstance(e, Op) and OPS[e.name].heavy and whole <= e.free for e in walk(*exprs_of(b)))
    if beside is None or len(rows) != 2:
        return None
    (inner, axis, count, sharers), held_whole = beside, [e for e in read if whole <= e.index[0].axes()]
    pieces_stored = any(whole <= s.axes and s.address.coefficient(inner) == 1 for s in b.stores)
    if not pieces_stored and alone(read, rows, heavy, hints):
        return None
    share = count * hints.count(rows) * sum(e.dtype.bytes for e in held_whole) // sharers
    (shared,), warps = (a for a in rows if a is not inner), SIDE_WARPS * (2 if len(held_whole) > 1 or share > SHARE else 1)
    n, length = -(-hints.exactly(shared.extent) // sharers), hints.exactly(inner.extent)
    inside = tuple(1 << k for k in reversed(range(length.bit_length())) if length >> k & 1)
    most = power(32 * warps * LANES // (count * sum(inside)) + 1) // 2
    found = {shared: pieces(n, max(1, min(most, power(n)))), inner: inside}
    if most < n and any(isinstance(e, Reduce) and e.monoid == "moments" for e in walk(*exprs_of(b))):
        found[shared] = (most,) * -(-n // most)         # with a last one of another length Triton lays all of them out anew, and spills
    if sum(found[shared]) * sharers > IDLE * hints.exactly(shared.extent):
        return None
    elements = count * math.prod(map(sum, found.values())) * len(held_whole)
    if len(inside) > 1 and warps > SIDE_WARPS and elements <= SIDE_HELD * 32 * SIDE_WARPS and all(e.dtype.bytes == 2 for e in held_whole):
        return Stages(shared, sharers, found, SIDE_WARPS, OPEN_REGISTERS, beside=(axis, count))
    return Stages(shared, sharers, found, *_busy(warps, SIDE_REGISTERS, found, held_whole, count), beside=(axis, count))


def _busy(warps: int, registers: int, found: dict[Axis, tuple[int, ...]], read: list[Load], beside: int = 1) -> tuple[int, int]:
    """So many warps and registers of a thread that holds what is `read`, of 16 bits, in pieces along several axes; or fewer warps of more, where a
    thread would hold little and idle in the smallest of the tiles that they make, or would have to hold much."""
    elements = beside * math.prod(map(sum, found.values())) * len(read)
    least = beside * math.prod(map(min, found.values())) // 32
    if len(found) < 2 or any(e.dtype.bytes != 2 for e in read):
        return warps, registers
    if MUCH * 32 * warps < elements <= MOST_HELD * 32 * warps and (least < warps > SIDE_WARPS or warps >= WARPS):
        return warps // 2, MOST_REGISTERS
    if elements > LITTLE * 32 * warps or least >= warps:
        return warps, registers
    return max(1, least, power(-(-elements // (32 * MUCH)))), MOST_REGISTERS


def _rounded(rows: list[Axis], hints: Hints) -> int:
    """Lanes of a tile that holds all of `rows`, each but the longest as a power of two."""
    *others, longest = sorted(map(lambda a: hints.count((a,)), rows))
    return math.prod(map(power, others)) * longest


def one_each(b: Body, rows: list[Axis], read: list[Load], hints: Hints, target) -> Stages | None:
    """How each program of a cluster holds what has one coordinate along one of two axes, where some folds are along the other alone: a plane of a
    group of them. None where no axis is so, or it is too long."""
    folds = [(frozenset(e.over), e.free & frozenset(rows)) for e in walk(*exprs_of(b)) if isinstance(e, Reduce)]
    shared = apart(frozenset(rows), folds, [(e.index[0], e.dtype.bytes) for e in read], hints, target)
    if shared is None or len(rows) != 2:
        return None
    line, = (a for a in rows if a is not shared)
    narrowest = min(e.dtype.bytes for e in read if line in e.index[0].axes())
    warps = power(-(-hints.count((line,)) // (32 * PLANE)))
    cap = next(registers for bytes_, registers in PLANE_REGISTERS if narrowest <= bytes_)
    return Stages(shared, hints.count((shared,)), {line: pieces(hints.count((line,)), 32 * warps * (WORD // narrowest))}, warps,
                  min(cap, FILE // (32 * warps)))


def turns(b: Body, rows: list[Axis], line: Axis, hints: Hints, target) -> Stages | None:
    """How the programs of clusters take long rows of a `possible` body one after the other, the next ones under way while they work on one; None
    where rows are shorter or few, or what is read beside them is too much to keep."""
    loads = {(e.node, e.index): e for e in walk(*exprs_of(b)) if isinstance(e, Load) and line in e.index[0].axes()}.values()
    size = hints.count(rows) * sum(e.dtype.bytes for e in held(b, frozenset(rows)))
    sharers = 1 << (-(-size // sharing.SHARE) - 1).bit_length()
    if rows != [line] or len(b.parallel) != 1 or size < sharing.STAGED or not 1 < sharers <= target.cluster:
        return None
    share = -(-hints.count(rows) // sharers)
    if hints.count(b.parallel) < TURNS * sharing.clusters(sharers, target) or share * sum(e.dtype.bytes for e in loads) > BESIDE * sharing.SHARE:
        return None
    wide = all(e.dtype.bytes >= 4 for e in loads)
    found = in_words(share, _copied(share, 4, WARPS), WARPS) if wide else pieces(share, 32 * WARPS * LANES)
    warps, registers = WARPS, 2 * REGISTERS
    if not any(line in x.axes for x in b.stores):
        each = share * sum(e.dtype.bytes for e in loads) // (4 * 32)            # registers for it, of a thread of a single warp
        warps, registers = FOLDED_WARPS[each > FOLDED_HELD * FOLDED_WARPS[0]], OPEN_REGISTERS
    return Stages(line, sharers, {line: found}, warps, registers, True, UNDER_WAY) if fits(UNDER_WAY, b, {line: found}, b.parallel) else None


def keeping(b: Body, row: Axis, group: int, hints: Hints, target) -> Stages | None:
    """How the rows of a `possible` body are held by programs that keep what they read beside rows that begin anywhere; None where it is too much."""
    read = {(e.node, e.index): e.dtype for e in walk(*exprs_of(b)) if isinstance(e, Load) and row in e.index[0].axes()}
    words = hints.exactly(row.extent) // group * group
    size = words * 2 * len(read)
    alone, sharers = sharing.sharers(words * 2, target), 1 << (-(-size // KEPT) - 1).bit_length()
    if not all(d.is_half for d in read.values()) or words * 2 <= FROM or not alone or sharers > target.cluster:
        return None
    by_itself = {row: pieces(words, 32 * WARPS * LANES)}
    if alone == 1 and KEPT < size <= 2 * KEPT and fits(UNDER_WAY, b, by_itself, b.parallel):
        return Stages(row, 1, by_itself, WARPS, 2 * REGISTERS, True, UNDER_WAY)
    sharers = max(alone, sharers)
    return Stages(row, sharers, {row: pieces(-(-words // sharers), 16 * WARPS * LANES)}, max(1, WARPS // 2), 2 * REGISTERS, True)


def carrying(b: Body, rows: list[Axis], line: Axis | None, crossed: frozenset, hints: Hints, target) -> Stages | None:
    """How the programs of a cluster share rows that they take in a loop, and carry what is folded along `crossed`, the loop, beside them; None where
    a program by itself carries it, or none can. (`gpu.infeasible` lets such a kernel be planned.)"""
    if target.ordered or rows != [line] or hints.exactly(line.extent) is None or hints.least(line.extent) < sharing.RUN or b.base is not None:
        return None
    folds = [e for e in walk(*exprs_of(b)) if isinstance(e, (Reduce, Scan))]
    across = {e.key: e for e in folds if isinstance(e, Reduce) and set(e.over) == crossed}
    if any(isinstance(e, Scan) or set(e.over) not in ({line}, crossed) for e in folds) \
            or len(across) == len({e.key for e in folds}):
        return None
    if any(line not in e.free for e in across.values()) or any(s.monoid is not None or s.guard is not None for s in b.stores) or _elsewhere(b):
        return None
    n = hints.exactly(line.extent)
    read = {(e.node, e.index): e.dtype.bytes for e in walk(*exprs_of(b)) if isinstance(e, Load) and line in e.index[0].axes()}.values()
    aligned, wide = hints.divides(sharing.WORDS, line.extent), sharing.many_wide(min(read, default=4), hints.count(crossed), target)
    sums = sum(len(e.args) for e in across.values())
    sharers = sharing.carrying(n, sums, sum(read), aligned, target, wide, min(read, default=4))
    if sharers < 2:
        return None
    share = -(-(n if aligned or sharers > sharing.FEW_SHARERS else n // sharing.WORDS * sharing.WORDS) // sharers)
    warps = max(1, min(WARPS, power(share) // (32 * CARRYING)))
    long = warps == WARPS and not aligned and max(read) == 2
    each = share / (16 * warps)         # by half of them
    few = aligned and max(read) == 2 and warps > FEW_CARRYING and each <= EACH_CARRYING and each * (sums + len(read)) <= VALUES_CARRYING
    warps = max(1, warps // 2) if long or few else warps
    found = in_words(share, _copied(share, min(read), warps), warps)
    way = sum({(e.node, e.index): e.dtype.bytes for e in walk(*exprs_of(b))
               if isinstance(e, Load) and e.index[0].axes() >= crossed | {line}}.values())
    stages = UNDER_WAY if (UNDER_WAY - 1) * way * sum(found) <= SHARED else 1
    return Stages(line, sharers, {line: found}, warps, MOST_REGISTERS if long or few else 2 * REGISTERS, stages=stages)


def of_two(s: Stages, elements: int, size: int, shifted: bool) -> Stages:
    """`s`, of rows of `elements` of so many bytes, with half the threads where a program has a row to itself and all of a multiprocessor's: two such
    programs, one of which reads while the other computes. Rows of 16 bits that are shorter than TWO_BYTES, of 32 where they begin anywhere."""
    alone = s.sharers == 1 and len(s.pieces) == 1 and (s.warps, s.registers) == (WARPS, REGISTERS) and s.beside is None
    fit = shifted if size > 2 else elements * size < TWO_BYTES
    return replace(s, warps=max(1, WARPS // 2), registers=2 * REGISTERS) if alone and fit else s


def _copied(share: int, size: int, warps: int) -> int:
    """Elements of so many bytes of each piece of a share of a row that is copied while others are worked on."""
    return max(32 * warps * COPIED // min(size, 4), power(share) // MOST_COPIED)


def in_words(n: int, most: int, warps: int) -> tuple[int, ...]:
    """Pieces of at most `most` elements, of each of which a thread of so many warps reads a word of 4 bytes at least, which can be under way."""
    (whole, rest), least = divmod(n, most), WORD_LANES * warps
    found = [most] * whole
    while rest > least and power(rest) - rest > least:
        found.append(power(rest) // 2)
        rest -= power(rest) // 2
    return (*found, *((max(power(rest), least),) if rest else ()))


def _order(b: Body, read: list[Load], line: Axis, others: list[Axis], n: dict[Axis, int]) -> tuple[Axis, ...]:
    """The row axes in the order in which tiles cover them: first one that something is read along side by side, or stored, while the rest lies
    along another."""
    addresses = [e.index[0] for e in read if line in e.index[0].axes()] + [s.address for s in b.stores if s.axes >= {line, *others}]
    turned = [a for a in others if n[a] >= SIDE and any(x.coefficient(a) == 1 for x in addresses)]
    return (*turned[:1], line, *(a for a in others if a not in turned[:1]))


def _covered(n: dict[Axis, int], order: tuple[Axis, ...], line: Axis, most: int) -> dict[Axis, tuple[int, ...]]:
    """Pieces of the axes that make tiles of about `most` elements, those of the first axis as long as may be, but for BOTH_WAYS of the contiguous
    one."""
    found = {}
    for a in order:
        left = min(power(n[line]), BOTH_WAYS) if a is not line and a is order[0] else 1
        found[a] = pieces(n[a], min(max(1, most // left), power(n[a])) if len(order) > 1 else most)
        most = max(1, most // found[a][0])
    return found


def _plain(found: dict[Axis, tuple[int, ...]], n: dict[Axis, int]) -> dict[Axis, tuple[int, ...]]:
    """The pieces of two axes of `n` elements each; fewer lengths where they make many tiles."""
    many = len(found) == 2 and math.prod(map(len, found.values())) > TILES
    return {a: _plainer(n[a], p) for a, p in found.items()} if many else found


def _plainer(n: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The pieces of `n` elements, few enough for a plane of a small image, where they are of three lengths: equal ones, or one with idle lanes."""
    if len(set(lengths)) < (3 if sum(lengths) == n else 2) or len(lengths) < 3 or n > PLANE_SHORT:
        return lengths
    short = evenly(n, PIECE // 2) if n <= PLANE_SHORT // 2 else ()
    return (PIECE // 2,) * (sum(short) * 2 // PIECE) or evenly(n, PIECE) or ((power(n),) if power(n) - n <= PIECE_IDLE * n else lengths)


def pieces(n: int, most: int) -> tuple[int, ...]:
    """Pieces of `most` elements, a power of two, and one to three of what is left: few lanes are idle."""
    whole, rest = divmod(n, most)
    found = [most] * whole
    while rest > LANES and (power(rest) - rest) * WASTE > n and len(found) < whole + 2:
        found.append(power(rest) // 2)
        rest -= power(rest) // 2
    return (*found, *((power(rest),) if rest else ()))


def evenly(n: int, least: int, count: int = 2, waste: int = EVEN_WASTE) -> tuple[int, ...]:
    """The longest equal powers of two, `count` at least and of `least` lanes at least, that cover `n` lanes with one in `waste` idle at most; ()
    where there are none."""
    size = power(n) // 2
    while size >= least:
        needed = -(-n // size)
        if needed >= count and (needed * size - n) * waste <= n:
            return (size,) * needed
        size //= 2
    return ()


def few_idle(n: int, most: int, idle: int, least: int = 1) -> int:
    """The longest power of two, `most` at first and `least` at last, by which tiles of `n` lanes have one in `idle` of these idle at most."""
    while most > least and -n % most * idle > n:
        most //= 2
    return most


def power(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
