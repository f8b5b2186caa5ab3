"""Schedules near a TileSchedule: what `tokamak tune` tries, and how what it found is kept and applied.

    Change ::= words of text, one step away from a schedule
        warps(8)  stages(2)  programs(264)      the field; other warps leave the registers of a thread open
    registers(0)                            as many registers as it takes
        tile(i1:2048)                           a parallel or looped axis in tiles of that length; tile(i0:1) is no dimension any more
        looped(i1:4096)                         held rows, run through in a loop instead
        held(i1)                                looped rows, held in registers instead
        even(i1:128)                            a held axis in equal pieces of that length
        shared(i0 / 264)                        a parallel axis shared out among so many programs; shared() gives each its own block
        staged(i1 / 4)                          rows held in stages, shared by so many programs of a cluster
        lanes(i1:4096)                          those in pieces of that length
        unshifted()                             held rows that begin anywhere, read as they lie
        ahead()                                 what a turn of the innermost loop reads is read a turn ahead, into registers

A change means the same for every size of a class: what follows from it (which axes need no mask) is found anew from facts, never kept.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from ..fuse.cost import Hints
from ..ir.expr import Scan, walk
from ..ir.index import Axis
from .body import Body, exprs_of
from .tile_access import fits, loops_read_in
from .tile_schedule import TileSchedule, cover, shifted
from .tile_stages import in_words, pieces, power

MOST_WARPS = 32         # of a program that is tried: the hardware has no more
MOST_STAGES = 4         # steps under way that are tried
SHORTEST_EVEN = 8       # elements of an equal piece of a held axis that is tried
LANES = 256             # elements of a tile to one thread at most: with one live value they are all its registers
LARGEST = 1 << 17       # elements of a tile
PASSED = 4096, 1024     # elements of a chunk of rows held in stages that are run through instead
MOST_SHARERS = 8        # programs of a cluster at most: more than these not every GPU with clusters has
WORDS = re.compile(r"(warps|stages|programs|registers|tile|looped|held|even|shared|staged|lanes|unshifted|ahead)\((?:i(\d+))?(?: ?[:/] ?)?(\d+)?\)$")


def neighbours(b: Body, s: TileSchedule, hints: Hints, target) -> Iterator[tuple[str, TileSchedule]]:
    """(change, schedule) for each schedule that is one step from `s` and that a multiprocessor holds."""
    for change in steps(b, s, hints, target):
        made = changed(b, s, (change,), hints)
        if made is not None and made != s and feasible(b, made):
            yield change, made


def steps(b: Body, s: TileSchedule, hints: Hints, target) -> Iterator[str]:
    """The changes worth trying."""
    yield from (f"warps({w})" for w in (s.warps // 4, s.warps // 2, s.warps * 2, s.warps * 4) if 1 <= w <= MOST_WARPS)
    if s.looped or s.split:
        yield from (f"stages({n})" for n in range(1, MOST_STAGES + 1) if n != s.stages)
    if (s.looped or s.split) and not s.ahead:
        yield "ahead()"
    if s.registers:
        yield "registers(0)"
    if s.shift is not None:
        yield "unshifted()"
    if s.split:
        yield from (f"programs({n})" for n in (s.programs // 4, s.programs // 2, s.programs * 2, s.programs * 4) if n >= 1)
    name = lambda a: f"i{s.order.index(a)}"
    if s.staged is not None:
        if s.staged in s.dims:
            most = max(s.sizes(s.staged))
            yield from (f"staged({name(s.staged)} / {n})" for n in (s.sharers // 2, s.sharers * 2) if 1 <= n <= target.cluster)
            yield from (f"lanes({name(s.staged)}:{n})" for n in (most // 4, most // 2, most * 2) if n)
            yield from (f"looped({name(s.staged)}:{n})" for n in PASSED)
        return
    for a in s.order:
        tiled = a in s.dims
        if a in b.parallel or a in s.looped:
            n = s.sizes(a)[0] if tiled else 1
            yield from (f"tile({name(a)}:{m})" for m in (n // 4, n // 2, n * 2, n * 4) if m >= 1 and m <= 2 * power(hints(a.extent)))
        if tiled and a not in b.parallel and a not in s.looped and len([x for x in s.order if x not in b.parallel]) == 1:
            yield from (f"looped({name(a)}:{m})" for m in (1024, 2048, 4096, 8192) if m < hints(a.extent))
        if tiled and a not in b.parallel and a not in s.looped and s.shift is None:
            yield from (f"even({name(a)}:{m})" for m in (power(sum(s.sizes(a))) // n for n in (4, 8, 16)) if m >= SHORTEST_EVEN)
        if a in s.looped and len(s.looped) == 1 and hints.most(a.extent) is not None:
            yield f"held({name(a)})"
    yield from _shares(b, s, hints, target, name)


def _shares(b: Body, s: TileSchedule, hints: Hints, target, name) -> Iterator[str]:
    """Programs that each take many blocks of a parallel axis that no fold crosses, and the way back."""
    crossed = {a for e in walk(*exprs_of(b)) for a in getattr(e, "over", ()) if a in b.parallel}
    if crossed:
        return
    if s.split:
        yield "shared()"
    elif b.parallel:
        a = max((x for x in s.order if x in b.parallel), key=lambda x: hints(x.extent))
        yield from (f"shared({name(a)} / {target.threads * n})" for n in (1, 2, 4, 8) if target.threads * n < hints(a.extent))


def changed(b: Body, s: TileSchedule, changes: tuple[str, ...], hints: Hints) -> TileSchedule | None:
    """`s` with `changes` one after the other; None where one cannot be made of it."""
    for text in changes:
        found = WORDS.match(text)
        at, n = (int(found[2]) if found[2] else None, int(found[3]) if found[3] else None) if found else (None, None)
        if found is None or at is not None and at >= len(s.order) or s.flat and found[1] != "warps":
            return None
        s = _CHANGES[found[1]](b, s, s.order[at] if at is not None else None, n, hints)
        if s is None:
            return None
        s = settled(b, s, hints)
    return s


def _warps(b: Body, s: TileSchedule, a: Axis | None, n: int | None, hints: Hints) -> TileSchedule | None:
    return replace(s, warps=n, registers=0) if a is None and n and power(n) == n else None


def _stages(b, s, a, n, hints):
    return replace(s, stages=n) if a is None and n and (n == 1 or not _in_order(b, s)) else None


def _registers(b, s, a, n, hints):
    return replace(s, registers=0) if a is None and n == 0 else None


def _programs(b, s, a, n, hints):
    if not s.split or not n:
        return None
    group = s.shift.group if s.shift is not None else 1         # every row of a program begins alike
    return replace(s, programs=-(-n // group) * group)


def _tile(b, s, a, n, hints):
    if a is None or not n or power(n) != n or a not in b.parallel and a not in s.looped or a in _in_order(b, s):
        return None
    pieces = dict(s.pieces)
    if s.shift is not None and a not in s.looped:           # blocks of rows that begin anywhere, with a piece for what stands around whole words
        if a is not s.shift.axis or n < s.shift.group:
            return None
        pieces[a] = (n, *pieces[a][-1:])
        return replace(s, pieces=tuple(pieces.items()))
    if n == 1:
        pieces.pop(a, None)
    else:
        own = pieces.get(a, (n,))
        pieces[a] = (n, *own[1:]) if a in s.looped else (n,) * len(own) if len(set(own)) == 1 else (n,)
    return replace(s, pieces=tuple(pieces.items()))


def _in_order(b: Body, s: TileSchedule) -> frozenset[Axis]:
    """The axes along which updates are made one after the other: of two in a tile that meet in one element, one would be lost."""
    return frozenset(a for x in b.stores if x.monoid is not None for a in x.axes & s.looped)


def _staged(b, s, a, n, hints):
    """A row along one axis, `_laid` anew."""
    return _laid(b, replace(s, sharers=n), a, s.sizes(a)[0], hints) if _in_stages(b, s, a) and n and power(n) == n <= MOST_SHARERS else None


def _lanes(b, s, a, n, hints):
    return _laid(b, s, a, n, hints) if _in_stages(b, s, a) and n and power(n) == n else None


def _in_stages(b: Body, s: TileSchedule, a: Axis | None) -> bool:
    """Is `a` the one axis of rows that are held in stages?"""
    return s.staged is not None and s.staged is a and [x for x in s.order if x not in b.parallel] == [a] and a in s.dims


def _laid(b: Body, s: TileSchedule, a: Axis, n: int, hints: Hints) -> TileSchedule | None:
    """Rows along `a` in pieces of at most `n` elements, each row shared by the schedule's programs."""
    whole, group = hints.exactly(a.extent), s.shift.group if s.shift is not None else 1
    if whole is None:
        return None
    share = -(-(whole // group * group) // s.sharers)
    n = min(n, power(share))
    found = in_words(share, n, s.warps) if s.stages > 1 else pieces(share, n)
    found = (*found, *((2 * group,) if s.shift is not None else ()))
    return replace(s, pieces=tuple((x, found if x is a else p) for x, p in s.pieces))


def _looped(b, s, a, n, hints):
    rows = {x for x in s.order if x not in b.parallel}
    if not n or power(n) != n or rows != {a} or a in s.looped or any(x.monoid is not None for x in b.stores):
        return None
    if s.shift is not None and any(isinstance(e, Scan) and e.along is a for e in walk(*exprs_of(b))):
        return None         # prefixes do not go on from the first elements of rows that begin anywhere
    ends = s.sizes(a)[-1:] if s.shift is not None else ()
    s = replace(s, staged=None, sharers=1, registers=0) if s.staged is not None else s
    once = s.once and all(loops == 1 for _, loops in loops_read_in(b, (a,)))        # what is read again stays in the cache till then
    return replace(s, pieces=tuple((x, (n, *ends) if x is a else p) for x, p in s.pieces), looped=frozenset((a,)), once=once)


def _held(b, s, a, n, hints):
    most = hints.most(a.extent) if a is not None else None
    if most is None or s.looped != {a} or a not in s.dims or any(x.monoid is not None for x in b.stores):
        return None
    whole = (*shifted(most, s.shift.group), *s.sizes(a)[-1:]) if s.shift is not None else cover(most)
    return replace(s, pieces=tuple((x, whole if x is a else p) for x, p in s.pieces), looped=frozenset())


def _even(b, s, a, n, hints):
    most = hints.most(a.extent) if a is not None else None
    if most is None or not n or power(n) != n or a in b.parallel or a in s.looped or a not in s.dims or s.shift is not None or s.sharers > 1:
        return None
    return replace(s, pieces=tuple((x, (n,) * -(-most // n) if x is a else p) for x, p in s.pieces))


def _shared(b, s, a, n, hints):
    if any(x in b.parallel for e in walk(*exprs_of(b)) for x in getattr(e, "over", ())) or any(hints(x.extent) == 0 for x in s.order):
        return None
    if s.shift is not None and a in s.dims:         # rows side by side begin each elsewhere, those of a program like its first
        return None
    if a is None:
        return replace(s, split=(), programs=1) if s.split else None
    return _programs(b, replace(s, split=(a,)), None, n, hints) if a in b.parallel and not s.split else None


def _unshifted(b, s, a, n, hints):
    if a is not None or s.shift is None or s.split or s.looped or s.staged is not None or s.shift.axis in b.parallel:
        return None
    most = hints.most(s.shift.axis.extent)
    whole = cover(most) if most is not None else None
    return replace(s, shift=None, pieces=tuple((x, whole if x is s.shift.axis else p) for x, p in s.pieces)) if whole else None


def _ahead(b, s, a, n, hints):
    """Registers hold what comes: there are no stages of shared memory for it."""
    plain = s.shift is None and s.staged is None and not s.kept and not s.peeled
    return replace(s, ahead=True, stages=1) if a is None and plain and len(s.looped) <= 1 and (s.looped or s.split) and not s.ahead else None


_CHANGES = {"warps": _warps, "stages": _stages, "programs": _programs, "registers": _registers, "tile": _tile, "looped": _looped, "held": _held,
            "even": _even, "shared": _shared, "staged": _staged, "lanes": _lanes, "unshifted": _unshifted,
            "ahead": _ahead}


def settled(b: Body, s: TileSchedule, hints: Hints) -> TileSchedule:
    """`s` with what follows from its pieces: the order of the dimensions, which stays where it is one of its own, and which need no mask."""
    pieces = dict(s.pieces)
    dims = tuple(a for a in s.order if a in pieces)
    if s.dims != tuple(a for a in s.order if a in s.dims):
        dims = (*(a for a in dims if a not in s.dims), *(a for a in s.dims if a in pieces))

    def exact(a: Axis) -> bool:
        if s.shift is not None:
            return False
        if a in b.parallel or a in s.looped:
            return hints.divides(pieces[a][0] if a in s.looped else sum(pieces[a]), a.extent)
        return hints.exactly(a.extent) == sum(pieces[a]) * (s.sharers if a is s.staged else 1)
    return replace(s, dims=dims, pieces=tuple((a, pieces[a]) for a in dims), exact=frozenset(a for a in dims if exact(a)))


def feasible(b: Body, s: TileSchedule) -> bool:
    """Might registers and shared memory hold it, and do most threads have elements of their own of its longest pieces? What the compiler then spills
    is seen when it is built. A softmax's gradient and its positions' of 5008 x 1 x 63 f16 by four rows of 16 + 16 + 16 + 16 a turn 49.9 us, by one,
    whose pieces two warps hold four times over, 88.0, as the estimate has it 38.6 (H200)."""
    elements, tile = (math.prod(of(p) for _, p in s.pieces) for of in (sum, max))
    if len(s.dims) > 3 or elements > LARGEST or elements > LANES * 32 * s.warps or s.warps > 1 and tile < 32 * s.warps // 2:
        return False
    return fits(s.stages, b, dict(s.pieces), {*s.split, *s.looped})
