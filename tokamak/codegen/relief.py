"""Schedules that need fewer registers, for kernels that have turned out to spill.

The heuristics estimate registers before there is code; where they are wrong, the compiler says so, and a kernel of SPILLED bytes of stack a thread or
more is built again in a few other ways: half or a quarter of a tile's rows or columns, few columns in long pieces, held rows in equal pieces, no cap
on registers, twice the threads. The one that spills least is taken, of equal ones the first. Nothing is timed.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat

from ..errors import BuildError
from ..fuse.axes import Group
from ..fuse.cost import estimates, Hints
from ..runtime.gpu_build import Binary, GpuUnit
from ..schedule.body import Body
from ..schedule.neighbours import changed, feasible, MOST_WARPS
from ..schedule.tile_schedule import TileSchedule
from ..schedule.tile_stages import power
from .scope import Unschedulable
from .stages import Lowered, lower_body, parts
from .tile_kernel import TileKernel

SPILLED = 96            # bytes of stack a thread from which on a kernel is built in other ways. H200, us, before and as the first of `ways` that
                        # spills less: gated RMSNorm backward of 524287 x 32 f32, 232 bytes, 153, 94; gradients of rotary angles of
                        # 1114 x 128 x 4 x 112 f32, 112 bytes, 362, 260, of 214 x 257 x 32 x 32 bf16, 208 bytes, 173, 134; global response norm
                        # backward in NHWC of 22 x 2048 x 28 x 28 bf16, 2384 bytes, 594, 135. A masked softmax's backward of 88 x 2048 x 256 f16,
                        # 72 bytes, 112, in half of its 16 columns 164, no sector of memory any more
LESS = 2                # times less that one of the others has to spill
EVEN = 16               # equal pieces of a held axis, last where it is one piece: they take the compiler longest (of LayerNorm backward in BERT-large
                        # 1.7 s, without a cap on registers, where nothing spills either, 0.2),
PIECE = 16              # of so many elements at least: LayerNorm over a middle axis, modulated, backward of 1283 x 1025 x 31 f16 2627 us as
                        # 2048 x 32, 2080 bytes, 181 as 9 x 128 by 16 + 16
TILES = 32              # pieces of all axes at most: each is text of its own
SECTOR = 16             # elements along the contiguous axis that a tile keeps
NARROW = 8              # of them, and half as many, where all else spills: EvoNorm's backward in NHWC of 432 x 32 x 28 x 28 f16, 2016 bytes in 32
                        # columns, 296 us in 16, 273 in eight
TOGETHER = 2048         # elements of each piece of columns that are folded at once,
TOGETHER_EACH = 32      # and of all of them to a thread
AT_ONCE = 2, 4          # ways that are built at once, the first ones and others; these only where all before them spill
SHARED = 48 << 10       # bytes of shared memory that any program may have, and others only where the first one had more

Build = Callable[[Sequence[GpuUnit]], Mapping[str, Binary]]


def ways(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """Changes of `s` (`schedule.neighbours`) that need fewer registers, the most promising first."""
    if s.staged is not None:
        yield from _evenly(b, s)
        if s.registers:
            yield ("registers(0)",)
        return
    least = lambda a: SECTOR if a is s.dims[-1] else 1
    tiled = [a for a in s.dims if (a in b.parallel or a in s.looped) and s.sizes(a)[0] > least(a)]
    rows, line = [a for a in tiled if a is not s.dims[-1]] or tiled, s.dims[-1]
    sized = lambda a, size: f"tile(i{s.order.index(a)}:{size})"
    tile = lambda a, by: sized(a, s.sizes(a)[0] // by)
    yield from _columns_together(s)
    if s.by_thread:
        yield (tile(line, 4),)
    if len(set(s.sizes(line))) > 1 and line in b.parallel:
        yield (sized(line, max(least(line), s.sizes(line)[0] // 2)),)
    yield from ((tile(a, 2),) for a in rows)
    uneven = any(a not in s.exact or len(set(s.sizes(a))) > 1 for a in s.dims if a not in b.parallel and a not in s.looped)
    yield from _evenly(b, s) if uneven else ()
    if s.registers:
        yield ("registers(0)",)
    yield from ((tile(a, 4),) for a in rows if s.sizes(a)[0] > 2 * least(a))
    if 2 * s.warps <= MOST_WARPS:
        yield (f"warps({2 * s.warps})",)
    yield from () if uneven else _evenly(b, s)
    yield from ((tile(a, 2),) for a in tiled if a not in rows)
    if s.registers:
        yield from ((tile(a, 2), "registers(0)") for a in rows)
    yield from ((tile(line, s.sizes(line)[0] // n),) for n in (NARROW, NARROW // 2) if line in tiled and s.sizes(line)[0] > n)


def _columns_together(s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """Few columns of rows that are folded at once beside sums that programs share, in long equal pieces, so that a thread has all of them at once:
    FRN's gradient in NHWC of 21 x 2048 x 20 x 20 bf16 115 us, 410 in 16 columns and pieces of 32 rows, EvoNorm's of 432 x 32 x 28 x 28 f16 77, 270 in
    eight and 64 (H200)."""
    line, held = s.dims[-1], [a for a in s.dims if a in s.together]
    if len(held) != 1 or held[0] is line or len(s.sizes(line)) > 1:
        return
    row, = held
    for columns in (NARROW, NARROW // 2):
        piece = TOGETHER // columns
        count = -(-sum(s.sizes(row)) // piece)
        warps = max(1, power(count * TOGETHER // (32 * TOGETHER_EACH)))
        if columns < s.sizes(line)[0] and count <= EVEN and warps <= MOST_WARPS:
            yield f"tile(i{s.order.index(line)}:{columns})", f"even(i{s.order.index(row)}:{piece})", f"warps({warps})"


def _evenly(b: Body, s: TileSchedule) -> Iterator[tuple[str, ...]]:
    """All held axes in equal pieces, EVEN of each or half as many, and so by half the threads: pieces of different lengths lie in threads
    differently."""
    held = [a for a in s.dims if a not in b.parallel and a not in s.looped and sum(s.sizes(a)) > PIECE]
    for most in (EVEN, EVEN // 2) if held else ():
        sizes = {a: max(PIECE, power(sum(s.sizes(a)) // most)) for a in held}
        if math.prod(-(-sum(s.sizes(a)) // n) for a, n in sizes.items()) > TILES:
            continue
        yield (found := tuple(f"even(i{s.order.index(a)}:{n})" for a, n in sizes.items()))
        if s.warps > 1:
            yield (*found, f"warps({s.warps // 2})")


def spilling(lowered: Lowered, spilled: Mapping[str, int]) -> tuple[Group, ...]:
    """The groups whose kernel spills, and that `ways` may mend. `spilled`: bytes of stack a thread of each kernel, by its name."""
    if max(spilled.values(), default=0) < SPILLED:          # nearly always: no text is made again
        return ()
    found = []
    for g, kernels in lowered.kernels.items():
        s = lowered.bodies[g][1]
        if own(s, kernels) and spilled.get(main(kernels, s).name, 0) >= SPILLED:
            found.append(g)
    return tuple(found)


def own(s, kernels: Sequence[TileKernel]) -> bool:
    """Has one of a group's kernels its schedule `s`, which has axes to tile and nobody timed?"""
    return type(s) is TileSchedule and s.dims != () and not s.flat and not s.measured and any(k.schedule == s for k in kernels)


def relieved(lowered: Lowered, groups: Sequence[Group], target, build: Build, taken: dict[str, tuple[str, ...]]) -> Lowered:
    """`lowered` with other schedules for `groups`, where some spill less as `build` makes them. `taken`: name of a kernel -> changes of its schedule
    that were found, () where there are none; what is not in it is looked for and entered."""
    hints, found = estimates(lowered.plan.graph, target), {}
    for g in groups:
        b, s = lowered.bodies[g]
        first = main(lowered.kernels[g], s)
        if first.name not in taken:
            taken[first.name] = least(first, b, s, hints, target, build)
        found[g] = taken[first.name]
    return laid(lowered, found, hints, target)


def laid(lowered: Lowered, found: Mapping[Group, tuple[str, ...]], hints: Hints, target) -> Lowered:
    """`lowered` with the changes of schedules that were found for groups; itself where there are none."""
    made = {g: other for g, changes in found.items() if changes and (other := remade(*lowered.bodies[g], changes, hints, target)) is not None}
    bodies = {g: (lowered.bodies[g][0], s) for g, (s, _) in made.items()}
    return replace(lowered, bodies=lowered.bodies | bodies, kernels=lowered.kernels | {g: k for g, (_, k) in made.items()}) if made else lowered


def main(kernels: Sequence[TileKernel], s: TileSchedule) -> GpuUnit:
    """What is built of the kernel that has the group's own schedule."""
    return parts((next(k for k in kernels if k.schedule == s),))[0].unit


def remade(b: Body, s: TileSchedule, changes: tuple[str, ...], hints: Hints, target) -> tuple[TileSchedule, tuple[TileKernel, ...]] | None:
    """Schedule and kernels of `s` with `changes`; None where there are none."""
    found = changed(b, s, changes, hints)
    if found is None or found == s or not feasible(b, found):
        return None
    try:
        return found, lower_body(b, found, hints, target)
    except Unschedulable:
        return None


def least(first: GpuUnit, b: Body, s: TileSchedule, hints: Hints, target, build: Build) -> tuple[str, ...]:
    """The changes of `s`, whose kernel is `first`, that spill least; () where none is LESS."""
    made = {way: main(found[1], found[0]) for way in ways(b, s) if (found := remade(b, s, way, hints, target)) is not None}
    spilled, room, left = 0, SHARED, iter(made.items())
    best: tuple[str, ...] = ()
    for most in chain(AT_ONCE[:1], repeat(AT_ONCE[1])):
        if not (batch := dict(islice(left, most))):
            break
        try:
            built = build(list({u.name: u for u in (first, *batch.values())}.values()))
        except BuildError:          # one wants more than there is
            break
        before = built[first.name]
        spilled, room = spilled or before.spilled // LESS + 1, max(room, before.shared)
        for way, u in batch.items():
            if built[u.name].spilled < spilled and built[u.name].shared <= room:
                best, spilled = way, built[u.name].spilled
        if best and not spilled:
            break
    return best
