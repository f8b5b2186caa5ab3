"""Other schedules for kernels that take long by their machine code (GPUs of sm_90).

The heuristics decide before there is code. What the compiler then makes of a kernel says how often a warp waits for memory, how many programs run
beside each other, what spills and what its reads and writes touch, and from that how long it takes (`runtime.gpu_estimate`). A kernel that takes SLOW
times as long as its bytes do, or spills much, is built again in other ways, a few steps from the heuristic's schedule; the quickest is taken if it
takes GAIN times less. Nothing is timed.
"""
from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..errors import BuildError
from ..fuse.axes import Group
from ..fuse.cost import estimates, Hints, node_bytes
from ..fuse.lines import strides
from ..ir.expr import Load
from ..ir.index import Axis, Index
from ..runtime import gpu_access, gpu_build, gpu_code, gpu_estimate, tuned
from ..runtime.gpu_build import Binary, GpuUnit
from ..schedule import neighbours, tile_stages
from ..schedule.body import Body
from ..schedule.schedule import strides_of
from ..schedule.tile_access import begin_anywhere, loops_read_in
from ..schedule.tile_schedule import TileSchedule
from ..schedule.tile_stages import FILE, MOST_REGISTERS
from . import relief, ways
from .host import BuiltTiles, Part
from .stages import Lowered, parts
from .tile_kernel import TileKernel
from .ways import SECTOR, TRADED, length

SMALL = 16              # kernels at most of a graph that is looked at: the first training steps of BERT-large, GPT-2 and ResNet-50 took 25, 22 and
                        # 16 s longer than their capture with all of theirs, and 25.3, 26.4 and 17.5 ms on the device, 25.3, 26.6 and 18.6 before
SLOW = 1.5, 1.25        # times as long as its bytes, or of one that spills: of 183 kernels as the heuristics have them 25 are, as the estimate has
                        # it, and 19 of 25 that have a schedule 1.15 times as fast, as swept
GAP = 4000              # cycles at least by which they are
GAIN = 1.12             # times less, see `gpu_estimate`: of 137 kernels as swept 43 have another schedule so, 1.34 times as fast, eight slower;
                        # 33 by 1.15, 1.43 times, three slower, and the others 1.09
KEPT = 1.3              # the same where the first one keeps what it read for its second way: the estimate is by half too long, and by 1.15 four of
                        # eight were no faster, four 1.03 to 1.08
SHARING = 1.4           # the same where programs that hold rows in stages share them and take one after the other: of eight such kernels, as swept,
                        # what would take 1.06 to 1.19 times less is 0.87 to 1.36 times as fast, and weight norm of 2000 x 20000 f32, 1.35 times
                        # less, 1.03 (H200). And where whole columns are held of lines that begin within sectors and are written: of nine such,
                        # norms along the middle, what would take 1.12 to 1.26 times less is 0.81 to 1.24 times as fast, one of them five.
                        # And beside short rows that begin within sectors: a softmax's gradient and its positions' of 5008 x 1 x 63 f16, 1.15 times
                        # less, 0.95 times as fast, of 1104 x 8 x 58 bf16, 1.13, 0.71
SHORT = 128             # bytes of such a row at most
FURTHER = 1.1           # the same of a step behind another one, and of one that spills half as much at most where the first one spills much: of 19
                        # such kernels that were measured 15 have one so, 1.02 to 10.96 times as fast
TRIED = 12, 8, 6        # ways of a kernel that are built at once: of the heuristic's schedule, of the best of these, and again
MOST = 48               # of all kernels of a graph at first, those that lose most
LIKELY = 1.4, 2.5       # times as many registers as a thread may have, by what the best takes and how much more a thread would hold, from which on a
                        # schedule is not built, where the best does not spill and where it does: what spills takes the compiler longest. Of 3109
                        # ways of 174 kernels one in ten is left out so, and what is taken is as fast without
TIGHT = 160             # registers of a thread from which on fewer threads or larger tiles would spill
IN_CACHE = 4            # part of the second-level cache that keeps what programs read again: see `again`
UNROLLED = 3            # times a tile that a turn of a loop reads, from which on it is several turns: of 183 kernels five read four, five two in two
                        # loops, and the others one at most

Build = Callable[[Sequence[GpuUnit]], Mapping[str, Binary]]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule of a group's body, `changes` from the heuristic's, what is lowered of it, and what is built of the kernel that has it."""
    changes: tuple[str, ...]
    schedule: TileSchedule
    kernels: tuple[TileKernel, ...]
    unit: GpuUnit

    @property
    def kernel(self) -> TileKernel:
        return next(k for k in self.kernels if k.schedule == self.schedule)

    @functools.cached_property
    def folds(self) -> tuple[Part, ...]:
        """The kernels that fold what this one's programs leave."""
        own = self.kernel
        return parts(tuple(k for k in self.kernels if k is not own and type(k.schedule) is TileSchedule))


def others(lowered: Lowered, built: Mapping[Group, object], binaries: Mapping[str, Binary], target, build: Build, taken: dict,
           cache_dir: str = "") -> Lowered:
    """`lowered` with other schedules for kernels that take long by their machine code (`quicker`), or, in large graphs and where that says nothing,
    that spill (`relief`); itself where there are none. `built`: `render_plan` of it; `binaries`: by name; `taken`: what was found in this process."""
    if any(b.waits.cycles for b in binaries.values()) and len(built) <= SMALL:
        groups = wanting(lowered, built, binaries, target)
        return quicker(lowered, groups, target, build, taken, cache_dir) if groups else lowered
    spilling = relief.spilling(lowered, {name: b.spilled for name, b in binaries.items()})
    return relief.relieved(lowered, spilling, target, build, taken) if spilling else lowered


def wanting(lowered: Lowered, built: Mapping[Group, object], binaries: Mapping[str, Binary], target) -> dict[Group, Binary]:
    """The groups that are worth it -> what is built of their kernel. Those first that lose most, with all that have the same one. `built`:
    `render_plan` of `lowered`; `binaries`: by name."""
    hints, found, counted = estimates(lowered.plan.graph, target), {}, {}
    for g, b in built.items():
        body, s = lowered.bodies[g]
        if not isinstance(b, BuiltTiles) or not relief.own(s, lowered.kernels[g]):
            continue
        part = next(p for p in b.parts if p.kernel.schedule == s)
        made = binaries[part.unit.name]
        takes = cycles(body, part.kernel, made, hints, target)
        lost = takes - gpu_estimate.least(moved(body, hints), target.threads)
        if takes and lost >= max(GAP, (SLOW[made.spilled > 0] - 1) * (takes - lost)) or made.spilled >= relief.SPILLED:
            found[g], counted[part.unit.name] = (part.unit.name, lost, made), counted.get(part.unit.name, 0) + 1
    first = sorted(found, key=lambda g: -found[g][1] * counted[found[g][0]])
    return {g: found[g][2] for g in first}


def quicker(lowered: Lowered, groups: Mapping[Group, Binary], target, build: Build, taken: dict, cache_dir: str = "") -> Lowered:
    """`lowered` with quicker schedules for `groups` (`wanting`), where there are some. `taken`: `known_by` of a kernel -> changes of its schedule
    that were found, () where there are none; what is neither in it nor in `cache_dir` is looked for, as far as MOST goes, and entered in both."""
    hints = estimates(lowered.plan.graph, target)
    firsts = {g: Candidate((), lowered.bodies[g][1], lowered.kernels[g], made.unit) for g, made in groups.items()}
    names = {g: known_by(firsts[g], lowered.bodies[g][0], hints) for g in groups}
    new = {names[g]: g for g in reversed(list(groups)) if names[g] not in taken}
    keys = {name: _key(name, firsts[g].unit, target) for name, g in new.items()} if cache_dir else {}
    taken.update((name, found) for name, key in keys.items() if (found := tuned.recall(cache_dir, key)) is not None)
    for name, changes in _sought({n: (lowered.bodies[g][0], firsts[g], groups[g]) for n, g in reversed(new.items()) if n not in taken},
                                 hints, target, build):
        taken[name] = changes
        if cache_dir:
            tuned.remember(cache_dir, keys[name], changes)
    return relief.laid(lowered, {g: taken.get(names[g], ()) for g in groups}, hints, target)


def _sought(kernels: Mapping[tuple, tuple[Body, Candidate, Binary]], hints: Hints, target, build: Build) -> Iterator[tuple[tuple, tuple[str, ...]]]:
    """(name, changes found) of the first of `kernels`, as far as MOST goes, and of others that spill."""
    search = {name: _Search(b, first, hints, target, made) for name, (b, first, made) in kernels.items()}
    looked = dict(islice(search.items(), MOST // TRIED[0]))
    for most in TRIED:
        for s in looked.values():
            s.look(most)
        units = {u.name: u for s in looked.values() for u in s.units()}
        made = _built(list(units.values()), build) if units else {}
        for s in looked.values():
            s.take(made)
    for name, s in search.items():
        if name in looked or s.spills:
            yield name, s.relieved(build) or s.best.changes


def known_by(first: Candidate, b: Body, hints: Hints) -> tuple:
    """What is found of a kernel holds for its text, and for so many programs and bytes, to the power of two."""
    return first.unit.name, first.kernel.programs.bit_length(), moved(b, hints).bit_length()


def _key(name: tuple, unit: GpuUnit, target) -> str:
    """What is found is kept under this: the kernel, what builds it, and the rules by which it was found."""
    return hashlib.sha256(repr((name, gpu_build.key(unit, target.arch), target.threads, _rules())).encode()).hexdigest()[:32]


@functools.cache
def _rules() -> str:
    """A hash of the modules that say what is found."""
    files = [Path(inspect.getfile(m)) for m in (relief, ways, gpu_access, gpu_estimate, gpu_code, neighbours, tile_stages)]
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in (Path(__file__), *files))).hexdigest()


def moved(b: Body, hints: Hints) -> int:
    """Bytes that a kernel of `b` reads and writes, each once."""
    most: dict = {}
    for access, address, size in strides_of(b):
        node = access.node.node if isinstance(access, Load) else access.memory.node
        count = min(hints.count(address.axes()) * size, node_bytes(node, hints) or size)
        most[node] = max(most.get(node, 0), count)
    return sum(most.values())


def turns(b: Body, s: TileSchedule, programs: int, hints: Hints) -> float:
    """Tiles that each of so many programs takes, one after the other."""
    return math.prod(-(-hints(a.extent) // _covered(s, a)) for a in s.order) / max(1, programs)


def _covered(s: TileSchedule, a: Axis) -> int:
    """Elements of `a` of a tile, all its pieces."""
    return sum(s.sizes(a)) if a in s.dims and a not in s.looped else length(s, a)


def unrolled(b: Body, s: TileSchedule, made: Binary) -> int:
    """Turns of its tiles that a turn of a kernel's innermost loops is, by what it reads: LLVM makes several at once of a short loop."""
    again = made.waits.again
    lanes = max(made.threads, math.prod(_covered(s, a) for a in s.dims))
    asked = sum(size for access, _, size in strides_of(b) if isinstance(access, Load)) * lanes      # what a tile lacks an axis of each thread reads
    return found if again is not None and asked and (found := round(again.bytes * made.threads / asked)) >= UNROLLED else 1


def cycles(b: Body, k: TileKernel, made: Binary, hints: Hints, target) -> float:
    """`gpu_estimate.cycles` of a kernel of `b`."""
    return gpu_estimate.cycles(*estimated(b, k, made, hints, target))


def estimated(b: Body, k: TileKernel, made: Binary, hints: Hints, target) -> tuple:
    """What `gpu_estimate` asks of a kernel of `b`."""
    left = sum(hints.extents(node.shape) * node.dtype.bytes for node in k.left)         # and is read again by what folds it
    values = [hints(p.source) if p.kind == "int" and isinstance(p.source, Index) else 0 for p in k.params]
    lines = gpu_access.lines(made.listing, made.threads, values) if made.waits.cycles else (0, 0)
    through = turns(b, k.schedule, k.programs, hints) / unrolled(b, k.schedule, made)
    return made, k.programs, through, moved(b, hints) + again(b, k.schedule, k.programs, made, hints, target) + 2 * left, lines, target.threads


def again(b: Body, s: TileSchedule, programs: int, made: Binary, hints: Hints, target) -> int:
    """Bytes that a kernel's later loops over the same rows read from memory again: all, where the programs that run beside each other have more of
    them under way than the second-level cache keeps (IN_CACHE). Distillation of 7804 x 2448 f32 by 4224 programs of 20 KB 98.9 us, by 1584 99.2,
    53.8 where each holds its rows (H200, 60 MB)."""
    row = {a: hints(a.extent) for a in s.looped}
    read = [(e, times - 1) for e, times in loops_read_in(b, s.looped) if times > 1] if row else []
    beside = min(programs, target.threads * max(1, gpu_code.resident(made.registers, s.warps, made.shared)))
    under_way = beside * sum(math.prod(row.get(a, length(s, a)) for a in e.index[0].axes() & set(s.order)) * e.dtype.bytes for e, _ in read)
    return sum(times * hints.count(e.index[0].axes()) * e.dtype.bytes for e, times in read) if under_way * IN_CACHE > target.l2 else 0


def gain_of(b: Body, s: TileSchedule, hints: Hints) -> float:
    """How many times quicker something has to be than a kernel of `b` by the heuristic's schedule `s`."""
    if s.kept:
        return KEPT
    return SHARING if s.staged is not None and s.split or _columns_anywhere(b, s, hints) or _rows_anywhere(b, s, hints) else GAIN


def _columns_anywhere(b: Body, s: TileSchedule, hints: Hints) -> bool:
    """Does a program hold whole columns, and write lines beside each other of them that begin within sectors?"""
    line = next((a for a in s.dims if a in b.parallel and any(x.address.coefficient(a) == 1 for x in b.stores)), None)
    held = not s.looped and not s.split and any(a not in b.parallel for a in s.dims)
    return held and line is not None and begin_anywhere(b, line, hints, SECTOR, written=True)


def _rows_anywhere(b: Body, s: TileSchedule, hints: Hints) -> bool:
    """Do programs that carry sums write held rows of a few sectors, SHORT bytes, that begin within these, each beside another program's, and read
    them as they lie?"""
    held = [a for a in s.dims if a not in b.parallel and a not in s.looped] if s.split else []
    plain = [a for a in held if not any(strides(address, a) for _, address, _ in strides_of(b))]
    alone = [a for a in b.parallel if a not in s.dims and a not in s.split]
    others = [a for a in plain for x in b.stores if x.address.coefficient(a) == 1 and hints(a.extent) * x.memory.dtype.bytes <= SHORT
              and any(x.address.coefficient(y) == a.extent for y in alone)]
    return any(begin_anywhere(b, a, hints, SECTOR, written=True) for a in others)


def asked(gain: float, before: int, after: int) -> float:
    """How many times quicker something has to be that spills `after` bytes, beside what spills `before`: `gain`, or little where it relieves that."""
    return min(gain, FURTHER) if before >= relief.SPILLED and after * relief.LESS <= before else gain


def _built(units: list[GpuUnit], build: Build) -> dict[str, Binary]:
    """Those that compile."""
    try:
        return dict(build(units))
    except BuildError:
        if len(units) == 1:
            return {}
        half = len(units) // 2
        return {**_built(units[:half], build), **_built(units[half:], build)}


class _Search:
    """Goes from a kernel's schedule to quicker ones. `made`: what is built of `first`."""

    def __init__(self, b: Body, first: Candidate, hints: Hints, target, made: Binary):
        self.b, self.hints, self.target = b, hints, target
        self.first = self.best = first
        self.made, self.stack = made, made.spilled
        self.takes, self.gain = cycles(b, first.kernel, made, hints, target), gain_of(b, first.schedule, hints)
        self.folding: float | None = None       # cycles of what folds what the first one leaves, once it is built
        self.seen = {first.unit.name}
        self.ways: list[Candidate] = []
        self.stands = False
        self.accesses = strides_of(b)
        self.across = {a for a in first.schedule.dims for _, address, _ in self.accesses        # by which it is a matrix, not a vector
                       if address.coefficient(a) == 1 and len(address.axes() & set(first.schedule.dims)) > 1}

    def look(self, most: int) -> None:
        """Up to so many `ways` from the best schedule so far; none where the last ones were no better."""
        self.ways = []
        for way in () if self.stands else self._changes():
            changes = (*self.best.changes, *way)
            made = relief.remade(self.b, self.first.schedule, changes, self.hints, self.target)
            if made is None or not relief.own(*made) or self._strews(made[0]) or self._spills(made[0]):
                continue
            found = Candidate(changes, *made, relief.main(made[1], made[0]))
            if found.unit.name not in self.seen:
                self.seen.add(found.unit.name)
                self.ways.append(found)
            if len(self.ways) == most:
                break

    def units(self) -> list[GpuUnit]:
        """What is to be built of `ways`, and once of what folds what the first one leaves."""
        new = [self.first, *self.ways] if self.ways and self.folding is None else self.ways
        return [*(c.unit for c in self.ways), *(p.unit for c in new for p in c.folds)]

    def take(self, made: Mapping[str, Binary]) -> None:
        """The quickest of `ways` that are so much quicker than the best so far; none that spills more than the first: LayerNorm along the middle of
        38 x 512 x 20 x 20 f16, 240 bytes by one warp, 36.3 us, 15.7 by four (H200)."""
        room = max(relief.SHARED, self.made.shared)
        fits = lambda found: found is not None and found.shared <= room and found.spilled <= self.stack
        here = {c: made[c.unit.name] for c in self.ways if fits(made.get(c.unit.name))}
        if self.ways and self.folding is None:
            self.folding = self._folded(self.first, made)
        times = {c: self._times(c, made) for c in here}
        enough = [c for c in times if times[c] and times[c] * asked(self.gain, self.made.spilled, here[c].spilled) <= self.takes]
        quickest = min(enough, key=times.__getitem__, default=None)
        self.stands = quickest is None
        if not self.stands:
            self.best, self.made, self.takes, self.gain = quickest, here[quickest], times[quickest], FURTHER

    def _times(self, c: Candidate, made: Mapping[str, Binary]) -> float:
        """Cycles of it, and how many more what folds what it leaves takes than what folds what the first one does; 0 where nothing is known."""
        alone = cycles(self.b, c.kernel, made[c.unit.name], self.hints, self.target)
        return alone and max(1.0, alone + self._folded(c, made) - self.folding)

    def _folded(self, c: Candidate, made: Mapping[str, Binary]) -> float:
        """Cycles beyond their launch of kernels that fold what one leaves: how many programs leave partial results says how long."""
        folds = (cycles(p.kernel.body, p.kernel, made[p.unit.name], self.hints, self.target) for p in c.folds if p.unit.name in made)
        return sum(max(0.0, each - gpu_estimate.LAUNCH) for each in folds)

    @property
    def spills(self) -> bool:
        return self.made.spilled >= relief.SPILLED

    def relieved(self, build: Build) -> tuple[str, ...]:
        """The changes by which a kernel spills least, where the quickest spills much: an estimate says little of one that does. EvoNorm's gradient of
        432 x 32 x 28 x 28 f16 in NHWC, 3112 bytes as the quickest."""
        return relief.least(self.first.unit, self.b, self.first.schedule, self.hints, self.target, build) if self.spills else ()

    def _changes(self) -> Iterator[tuple[str, ...]]:
        s, made = self.best.schedule, self.made
        tight = made.registers + made.spilled / 4 > TIGHT
        at_once = self.target.threads * max(1, gpu_code.resident(made.registers, s.warps, made.shared))
        if s.staged is None:
            yield from ways.of_one_warp(self.b, s, tight)
        if made.spilled:
            yield from relief.ways(self.b, s)
        if s.shift is not None and s.shift.axis in self.b.parallel:
            yield from ways.in_blocks(s)
        if s.staged is not None:
            yield from ways.held_in_stages(s)
            return
        yield from ways.at_once_alone(self.b, s, self.best.kernel.programs, at_once)
        yield from ways.in_quarters(self.b, s)
        yield from ways.in_long_pieces(self.b, s)
        yield from ways.as_rows_lie(self.b, s)
        yield from ways.read_ahead(self.b, s)
        yield from ways.longer_turns(self.b, s)
        yield from ways.traded(self.b, s, TRADED[0])
        if s.split:
            yield from ways.as_many_threads(s)
        yield from ((c,) for c in ways.near(self.b, s, at_once, tight))
        yield from ways.traded(self.b, s, TRADED[1])

    def _spills(self, s: TileSchedule) -> bool:
        """Will it, and much, as far as can be told?"""
        each = lambda s: math.prod(sum(sizes) for _, sizes in s.pieces) / (32 * s.warps)
        room = min(FILE // (32 * s.warps), MOST_REGISTERS)
        return (self.made.registers + self.made.spilled / 4) * each(s) > LIKELY[self.made.spilled > 0] * room * each(self.best.schedule)

    def _strews(self, s: TileSchedule) -> bool:
        """Has it shorter pieces of an axis along which something lies contiguously, of what it reads or writes most of there, than memory moves at
        once, where the best had longer ones? All pieces of a row that is held are one program's."""
        return any(self._short(s, a) for a in s.dims if (a in self.b.parallel or a in s.looped) and (a is s.dims[-1] or a in self.across))

    def _short(self, s: TileSchedule, line: Axis) -> bool:
        """Has it along `line`? What is written in rows that begin within what memory moves at once is in two of these."""
        before = self.best.schedule
        if line not in before.dims or s.sizes(line)[0] >= before.sizes(line)[0]:
            return False
        sizes = [(self.hints.count(address.axes()) * size, size) for _, address, size in self.accesses if address.coefficient(line) == 1]
        short = min(s.sizes(line)) * max(sizes, default=(0, SECTOR))[1]
        return short < SECTOR or short < 2 * SECTOR and begin_anywhere(self.b, line, self.hints, SECTOR, written=True)
