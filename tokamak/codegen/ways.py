"""Ways from a kernel's schedule to others that may be quicker: steps of `schedule.neighbours`, one or several at once, those that mend most first.
`quicker` builds them and says which is, by the machine code.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..ir.expr import Load
from ..ir.index import Axis
from ..schedule.body import Body
from ..schedule.neighbours import MOST_SHARERS, MOST_WARPS, PASSED, SHORTEST_EVEN
from ..schedule.schedule import strides_of
from ..schedule import tile_stages
from ..schedule.tile_schedule import TileSchedule
from ..schedule.tile_stages import power

WARPS = 1, 2, 4, 8, 16  # of a program that are tried whatever it has
EVEN = 16, 8            # equal pieces of a held axis
QUARTERS = 4, 8         # the same of one that is too short for the first of those
LONG_PIECES = 4, 2      # and of one in more than twice as many that is a tile's beside what lies across it: LayerNorm's gradient, turned, of
                        # 75 x 160 x 1704 bf16 141 us as 14 x 128, 86.7 as 4 x 512, 75.4 as 2 x 1024, 72.3 as 2048 (H200)
LOOPED = 1024           # elements of a chunk of a held row that is run through instead
TRADED = 8, 4           # times more of one axis to a program, and less of another
GROWN = 4               # times as much of a tile to a thread
UNDER_WAY = 3           # tiles of a loop: of eleven loops of one as swept seven take 1.12 times less so by the estimate, 0.97 to 2.7 as timed
MANY = 4                # times as many programs as run beside each other
LONGER = 4, 8           # times as much of a row that is run through, by as many more threads
SHORTER = 4, 2          # times, blocks of rows that begin anywhere
LEAST_WARPS = 4         # of each of more programs that hold a row in stages
SECTOR = 32             # bytes of memory that are moved at once: no piece of the contiguous axis becomes shorter


def length(s: TileSchedule, a: Axis) -> int:
    """Elements of `a` of a tile's first pieces."""
    return s.sizes(a)[0] if a in s.dims else 1


def name_of(s: TileSchedule, a: Axis) -> str:
    return f"i{s.order.index(a)}"


def near(b: Body, s: TileSchedule, at_once: int, tight: bool) -> Iterator[str]:
    """Changes of `s`, those that mend most first; some may not fit it. `at_once`: programs that run beside each other; `tight`: threads have no
    registers for more."""
    tiled = [(name_of(s, a), length(s, a)) for a in s.order if a in b.parallel or a in s.looped]
    warps = [w for w in WARPS if w != s.warps and (w > s.warps or not tight)]
    held = _held(b, s)
    yield from (f"warps({w})" for w in (s.warps // 2, s.warps * 2) if w in warps)
    yield from ("stages(1)",) if s.stages > 1 else (f"stages({UNDER_WAY})",) if s.looped else ()
    yield from (f"tile({a}:{n // 2})" for a, n in tiled if n > 1)
    yield from (f"even({a}:{n // EVEN[0]})" for a, n in held if n >= EVEN[0] * SHORTEST_EVEN)
    yield from (f"warps({w})" for w in warps if w not in (s.warps // 2, s.warps * 2))
    yield from (f"even({a}:{n // EVEN[1]})" for a, n in held if n >= EVEN[1] * SHORTEST_EVEN)
    yield from (f"tile({a}:{n})" for a, m in tiled for n in (() if tight else (2 * m,)) + (m // 4,) if n)
    yield from _programs(s)
    yield from (f"looped({a}:{LOOPED})" for a, n in held if n > LOOPED)
    yield from (f"shared({a} / {at_once})" for a, _ in tiled[:1] if not s.split)


def traded(b: Body, s: TileSchedule, n: int) -> Iterator[tuple[str, ...]]:
    """The same with an n-th of one parallel axis to a program, and n times as much of another: along which what lies along the first does not vary,
    which is read once then for all of it, or along which something lies contiguously, in pieces shorter than memory moves at once."""
    accesses = strides_of(b)
    read = [address.axes() for e, address, _ in accesses if isinstance(e, Load)]
    strewn = {a for _, address, size in accesses for a in address.axes() if address.coefficient(a) == 1 and length(s, a) * size < SECTOR}
    for one in (a for a in s.dims if a in b.parallel and length(s, a) >= n):
        for other in (a for a in s.order if a in b.parallel and a is not one):
            if other in strewn or any(one in axes and other not in axes for axes in read):
                yield _shaped(s, {one: length(s, one) // n, other: length(s, other) * n}, s.warps)


def of_one_warp(b: Body, s: TileSchedule, tight: bool) -> Iterator[tuple[str, ...]]:
    """The same by programs of one warp, of as much less each, or of GROWN times that unless threads are `tight`, and more of them: what they fold
    takes no shared memory. What nothing lies along contiguously is shortened first."""
    lines = _lines(b, s)
    for less in [max(1, s.warps // n) for n in ((1,) if tight else (1, GROWN)) if s.warps > 1]:
        sizes = {}
        for a in sorted((a for a in s.dims if a in b.parallel or a in s.looped), key=lambda a: a in lines):
            by = min(less, length(s, a))
            sizes[a], less = length(s, a) // by, less // by
        if less == 1:
            yield _shaped(s, {a: n for a, n in sizes.items() if n != length(s, a)}, 1)


def _shaped(s: TileSchedule, sizes: Mapping[Axis, int], warps: int) -> tuple[str, ...]:
    """The changes by which tiles have these `sizes` and programs so many `warps`; of programs that share an axis so many that there are as many
    threads."""
    alone = [a for a in sizes if a not in s.split]
    programs = s.programs * s.warps * math.prod(sizes[a] for a in alone) // (warps * math.prod(length(s, a) for a in alone))
    return (*(f"tile({name_of(s, a)}:{n})" for a, n in sizes.items()), *((f"warps({warps})",) if warps != s.warps else ()),
            *((f"programs({max(1, programs)})",) if s.split and programs != s.programs else ()))


def in_quarters(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where rows are held that are short: in four pieces, or in eight."""
    for n in QUARTERS:
        yield from ((f"even({a}:{m // n})",) for a, m in _held(b, s) if QUARTERS[0] * SHORTEST_EVEN <= m < EVEN[0] * SHORTEST_EVEN)


def in_long_pieces(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where rows are held in many pieces of a tile across which something else lies contiguously: in LONG_PIECES of them, of which each
    thread has words both ways."""
    lines = _lines(b, s)
    for a in s.dims if len(lines) > 1 else ():
        if a not in b.parallel and a not in s.looped and len(s.sizes(a)) > 2 * max(LONG_PIECES):
            yield from ((f"even({name_of(s, a)}:{power(sum(s.sizes(a))) // n})",) for n in LONG_PIECES)


def as_rows_lie(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where rows are held that begin anywhere: read as they lie, in the pieces that make them up and in equal ones, by itself and beside as
    many more. Gradients on an H200, us, so and in words: focal loss's of 53691 x 298 f16 21.0, 34.2, distillation's of 40302 x 397 39.1, 50.9,
    smoothed cross entropy's of 53691 x 298 bf16 21.1, 34.9, of 21333 x 750 23.3, 28.8, of 15655 x 1022 24.8, 28.0; but of 10457 x 1530 24.8, 24.9."""
    if s.shift is None or s.shift.axis in b.parallel:
        return
    line, n = name_of(s, s.shift.axis), power(sum(s.sizes(s.shift.axis)[:-1]))         # but for its ends
    rows = next((f"tile({name_of(s, a)}:{2 * length(s, a)})" for a in reversed(s.order) if a in b.parallel), None)
    equal = [("unshifted()", f"even({line}:{n // EVEN[0]})")] if n >= EVEN[0] * SHORTEST_EVEN else []
    for way in (("unshifted()",), *equal):
        yield way
        yield from ((*way, rows),) if rows else ()


def _lines(b: Body, s: TileSchedule) -> set[Axis]:
    """The axes of a tile along which something lies contiguously."""
    return {a for _, address, _ in strides_of(b) for a in s.dims if address.coefficient(a) == 1}


def _held(b: Body, s: TileSchedule) -> list[tuple[str, int]]:
    """The axes that are held, by name, and their elements, to the power of two."""
    return [(name_of(s, a), power(sum(s.sizes(a)))) for a in s.dims if a not in b.parallel and a not in s.looped]


def in_blocks(s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where programs take blocks of rows that begin anywhere: shorter blocks, by as many fewer threads, and the rows by more programs."""
    line, n = name_of(s, s.shift.axis), s.sizes(s.shift.axis)[0]
    for less in SHORTER:
        block = f"tile({line}:{n // less})", f"warps({max(1, s.warps // less)})"
        yield block
        if s.split:
            yield *block, f"programs({2 * s.programs})"


def longer_turns(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where rows are run through: LONGER times as much at once, by as many more threads."""
    for a in s.looped & set(s.dims):
        for n in LONGER:
            yield f"tile({name_of(s, a)}:{n * length(s, a)})", f"warps({n * s.warps})"


def read_ahead(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where what the next turn of a loop takes is read in the one before, into registers: nothing is copied that lies in pieces of less than
    a word, or whose threads want it otherwise. By itself, and of longer turns."""
    yield ("ahead()",)
    yield from ((*way, "ahead()") for way in longer_turns(b, s))


def as_many_threads(s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where programs carry what they fold of many tiles: half the programs, which leave half as many partial results, of twice the threads,
    and the other way about."""
    for programs, warps in ((s.programs // 2, 2 * s.warps), (2 * s.programs, s.warps // 2)):
        if programs and 0 < warps <= MOST_WARPS:
            yield f"programs({programs})", f"warps({warps})"


def at_once_alone(b: Body, s: TileSchedule, programs: int, at_once: int) -> Iterator[tuple[str, ...]]:
    """The same by no more programs than run beside each other: of those that share an axis where a few wait until the first ones end, of others where
    there are many times more. `programs`: how many there are."""
    most = at_once * s.programs // max(1, programs)
    if s.split and 0 < most < s.programs < 2 * most:
        yield (f"programs({most})",)
    outermost = next((a for a in s.order if a in b.parallel), None)
    if not s.split and outermost is not None and 0 < MANY * at_once < programs:
        yield (f"shared({name_of(s, outermost)} / {at_once})",)


def held_in_stages(s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """The same where rows are held in stages: by fewer threads, by more or fewer programs with as many in all, in other pieces, or run through
    instead."""
    row, most = name_of(s, s.staged), max(s.sizes(s.staged)) if s.staged in s.dims else 0
    yield from ((f"warps({w})",) for w in (s.warps // 2, s.warps // 4) if w)
    for n in (2 * s.sharers, 4 * s.sharers, 8 * s.sharers, s.sharers // 2):
        if 0 < n <= MOST_SHARERS:
            yield f"staged({row} / {n})", f"warps({min(MOST_WARPS, max(LEAST_WARPS, s.warps * s.sharers // n))})"
    if s.registers:
        yield ("registers(0)",)
        yield f"lanes({row}:{most // 2})", "registers(0)"
    yield from ((f"lanes({row}:{n})",) for n in (most // 2, 2 * most) if n)
    yield from ((way,) for way in _programs(s))
    if s.split:
        yield (f"stages({1 if s.stages > 1 else tile_stages.UNDER_WAY})",)
    yield from ((f"looped({row}:{n})",) for n in PASSED)
    if 2 * s.warps <= MOST_WARPS:
        yield (f"warps({2 * s.warps})",)


def _programs(s: TileSchedule) -> Iterator[str]:
    yield from (f"programs({n})" for n in (max(1, s.programs // 2), 2 * s.programs) if s.split)
