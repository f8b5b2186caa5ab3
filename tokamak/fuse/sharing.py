"""Rows that one program of a GPU holds in registers, or several of a cluster between them, and column sums that they carry beside."""
from __future__ import annotations

from ..ir.expr import Load, Reduce, Scan, walk
from ..ir.graph import Scatter
from .axes import Group, fold_of
from .cost import Hints, contiguous_axis
from .legal import Roles, inner_reads
from .sizes import runs_along

HELD = 32768            # elements of a row that one program holds in registers
STAGED = 128 << 10      # bytes of a row that one program holds in registers in the width it has in memory: see `schedule.tile_stages`
SHARE = 64 << 10        # of a longer row that each of the programs of a cluster holds
LEAST_SHARE = 8 << 10   # the same where rows are too few for the multiprocessors: bf16 softmax of 64 rows of 16385 and 16 of 262145 5.2 and 11.6 us,
                        # RMSNorm of 64 of 32768 5.1, Inductor's kernels 12.6, 24.2 and 7.1; LayerNorm of 128 of 32768 8.8, 12.9
RUN = 64                # contiguous elements at least, of a row that is held so: BatchNorm in NCHW 54% in three kernels, 47% so (with 32)
LINE = 128              # contiguous bytes at least of a row along several axes that is held so: a line of the cache
CARRIED = 32768         # elements of partial results that one program carries in registers along a row; along several axes half as many
SHARED_CARRIED = 128 << 10      # bytes of a program's share of a row, and of column sums beside it, where the neighbours of a cluster carry them:
                                # bf16 LayerNorm backward over 16384, 25600 and 65536 columns 74, 58 and 70%, 59, 47 and 49 by one program or in
                                # two kernels. Where one program could, only if more than three quarters of the lanes have a column: over 12288 57, 62
                                # in one program; f32 RMSNorm backward over 20480 and 24576, which none can, 77 and 79, 56 and 55 in two kernels. Nor
                                # of more than SHARED_COLUMNS of 16 bits that begin anywhere: one program spills, RMSNorm backward over 20116 of 498
                                # rows 424 bytes, 57.5 us (H200; two were not timed over 20116; over 16385, of 4095 rows, 120)
CARRIED_BYTES = 256 << 10       # bytes of both that one program holds, the registers of a multiprocessor: f32 RMSNorm backward over 32768 columns 84%
                                # by the programs of a cluster, 42 by one; bf16 over 28672 74; f16 over 32767, which begin anywhere, 45 in two
                                # kernels, 17; f32 LayerNorm backward over 16384 80, over 16383 50 in two kernels, 34
SHARED_COLUMNS = 16384  # columns of that share at most: RMSNorm backward over 25600 by two programs 73%, 65 by one; fewer than WORDS beside them, of
                        # rows that begin anywhere, do not count
WORDS = 8               # elements of 16 bits in the longest access
SHARED_WIDE = 160 << 10         # the same of rows of 32 bits where no cluster holds them with less: f32 LayerNorm backward of 64 rows of 65536, 96 of
                                # 57344 and 300 of 61440 24 us, 29 and 70, RMSNorm of 128 of 81920 43.5, of 64 of 73728 25; 29, 36, 118, 60 and 31 in
                                # two kernels. Of 16 bits, with twice the columns, they spill: LayerNorm of 64 of 131072 52 us, 32.5 in two
FEW_SHARERS = 2         # programs at most that share rows which begin anywhere, or which one could hold: bf16 LayerNorm backward over 16385 columns
                        # 59%, 58 by four, 43 in two kernels; over 65537 by eight 28, 43 in two; RMSNorm over 16385 68, 54 by one; over 25600 by four
                        # 56, 64 by one. Where more share, twice as many: one of a multiprocessor works while the other waits. LayerNorm over 25600
                        # and 28672 62 and 67%, 55 and 61
CARRIED_TURNS = 4       # rows at least for each such cluster, where column sums beside what is written are as quick by a kernel of their own: f32
                        # RMSNorm backward of 256, 128 and 64 rows of 32768 45.8, 27.6 and 17.2 us, 57.1, 32.1 and 17.6 in two kernels; bf16 LayerNorm
                        # backward of 256 of 65536 and 128 of 32768 41.6 and 15.6, 65.5 and 21.4
WIDE_TURNS = 64         # the same of rows of 32 bits that begin anywhere, which more than FEW_SHARERS programs read element by element:
                        # LayerNorm backward of 1000 rows of 30011 147 us, of 4096 of 16383 262, 172 and 361 in two kernels
REACHED = 91            # percent of the multiprocessors that clusters of more than two programs reach, which are bound to groups of them: of an
                        # H200's 132 15 clusters of 8; LayerNorm backward over 65536 columns 63% with 15 of them, 35 with 16, the last of which began
                        # when all had ended


def sharers(row: int, target, rows: int = 0) -> int:
    """How many programs hold a row of so many bytes in stages; 0 where none can. What lies beside whole 16-byte words, of rows that begin anywhere,
    does not count. `rows`: how many there are, where that is known; few are shared by more programs than they need."""
    if target.ordered or target.arch[:1] != ("cuda",):
        return 0
    row -= row % 16
    count = 1 if row <= STAGED else 1 << (-(-row // SHARE) - 1).bit_length()
    while 0 < rows * count < target.threads and 2 * count <= target.cluster and row >= 2 * count * LEAST_SHARE:
        count *= 2
    return count if count <= target.cluster else 0


def row_sharers(group: Group, r: Roles, hints: Hints, target) -> int:
    """How many programs will hold a row of `group`, as far as can be told: 0 where one carries what is folded across, it is not needed again, or held
    by none."""
    rows = r.rows(group)
    folds = [m for m in group.members if m.bound & rows]
    if r.accumulating:
        count = column_sharers(group, r, rows, hints, target)
        return count if count and hints.count(r.parallel) >= CARRIED_TURNS * clusters(count, target) else 0
    if not folds or any(m.bound != rows for m in folds) or any(hints.exactly(a.extent) is None for a in rows):
        return 0
    if not any(long_run(e, m.bound, hints) for m in folds for f in walk(*m.roots()) if isinstance(f, Reduce) for e in walk(*f.args)):
        return 0
    reads, behind = inner_reads(group), set()          # what needs a fold of the row
    for m in group.members:
        if any(d in folds or d in behind for d in reads[m]):
            behind.add(m)
    if not any((m.free | m.bound) & rows for m in behind):
        return 0
    wide = max(_read_along(group, m) for m in folds)
    return sharers(wide * hints.count(rows), target, hints.count(r.parallel))


def _read_along(group: Group, fold) -> int:
    """Bytes an element of all that a fold of `group` reads along its row; what other members make for it counts by what they read."""
    made = {m.node: m for m in group.members if not m.bound}
    read, todo = {}, [fold]
    for m in todo:                      # grows
        for e in m.loads:
            if any(i.axes() & fold.bound for i in e.index):
                if e.node not in made:
                    read[e.node] = e.dtype.bytes
                elif made[e.node] not in todo:
                    todo.append(made[e.node])
    return sum(read.values())


def long_run(e, over, hints: Hints) -> bool:
    """Does `e` load elements side by side along one of `over`, many of them?"""
    return isinstance(e, Load) and any(hints.least(a.extent) * e.dtype.bytes >= LINE and runs_along(e, a) for a in over)


def carried_alone(columns: int, sums: int, read: int) -> bool:
    """Can one program hold `read` bytes of each of so many columns, and carry `sums` partial results of it?"""
    return columns * sums <= CARRIED and columns * (4 * sums + read) <= CARRIED_BYTES


def carrying(columns: int, sums: int, read: int, aligned: bool, target, wide: bool = False, narrowest: int = 2) -> int:
    """How many programs of a cluster share rows of so many columns, of each of which they carry `sums` partial results and hold `read` bytes; 0 where
    that is too much. Rows that are not `aligned` begin anywhere; those that are `wide` are read as quickly element by element. `narrowest`: bytes of
    the narrowest of what is read."""
    if target.ordered or target.arch[:1] != ("cuda",):
        return 0
    whole = columns * (4 * sums + read)
    share = SHARED_WIDE if narrowest >= 4 and target.cluster * SHARED_CARRIED < whole <= target.cluster * SHARED_WIDE else SHARED_CARRIED
    count = 1 << (max(-(-whole // share), -(-(columns // WORDS * WORDS) // SHARED_COLUMNS)) - 1).bit_length()
    alone = carried_alone(columns, sums, read)
    share = -(-(columns // WORDS * WORDS) // count)
    spills = not aligned and narrowest < 4 and columns > SHARED_COLUMNS
    if (alone or not (aligned or wide)) and count > FEW_SHARERS or alone and not spills and share * 4 <= 3 << (share - 1).bit_length():
        return 0
    if count > target.cluster:
        return 0
    return min(2 * count, target.cluster) if count > FEW_SHARERS else count


def many_wide(narrowest: int, rows: int, target) -> bool:
    """Are there many rows, of elements of 32 bits and more?"""
    return narrowest >= 4 and rows >= WIDE_TURNS * clusters(target.cluster, target)


def clusters(programs: int, target) -> int:
    """How many clusters of so many programs run at once, a program on each multiprocessor."""
    reached = target.threads if programs <= 2 else target.threads * REACHED // 100
    return max(1, reached // programs)


def partials(r: Roles) -> list[frozenset]:
    """The axes that each partial result is along which programs carry: of a fold of several components all of them, whichever are asked for. The
    number of elements, of moments, is one to a program."""
    found = {}
    for m in r.accumulating:
        e = fold_of(m.expr)
        found[e.key if isinstance(e, Reduce) else m] = [m.free] * (len(e.args) - (e.monoid == "moments") if isinstance(e, Reduce) else 1)
    return [axes for each in found.values() for axes in each]


def carried(r: Roles, hints: Hints) -> int:
    """Elements of all partial results that a program carries."""
    return sum(hints.count(axes - r.parallel) for axes in partials(r))


def column_sharers(group: Group, r: Roles, rows: frozenset, hints: Hints, target) -> int:
    """How many programs of a cluster share the rows of `group` and carry what is folded across them (`schedule.tile_stages.carrying`); 0 where none
    can."""
    v = contiguous_axis(group, hints)
    if rows != {v} or hints.exactly(v.extent) is None or hints.least(v.extent) < RUN or not r.accumulating \
            or any(v not in m.free for m in r.accumulating):
        return 0
    folds = [e for m in r.local for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if not folds or any(isinstance(e, Scan) or set(e.over) != rows for e in folds) or any(isinstance(m.node, Scatter) for m in group.members):
        return 0
    read = held_along(group, v)
    wide = many_wide(min(read, default=4), hints.count(r.parallel), target)
    count = carrying(hints.count(rows), len(partials(r)), sum(read), hints.divides(WORDS, v.extent), target, wide, min(read, default=4))
    return count if count > 1 else 0


def held_along(group: Group, v) -> tuple[int, ...]:
    """Bytes of each value that the members of `group` read for an element of a row along `v`."""
    inside = set(group.nodes())
    return tuple({(e.node, e.index): e.dtype.bytes for m in group.members for e in walk(*m.roots())
                if isinstance(e, Load) and e.node not in inside and any(v in i.axes() for i in e.index)}.values())
