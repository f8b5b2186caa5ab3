"""What a kernel on a GPU can hold and keep busy: the questions of `cost` and `plan` whose answers differ from a CPU's."""
from __future__ import annotations

from ..ir.dtype import BOOL, DType
from ..ir.expr import Load, Op, Reduce, Scan, walk
from ..ir.graph import Compute, Scatter
from ..ir.index import Index, as_index
from ..ir.ops import CARRIERS, OPS
from . import narrow
from .axes import Group, fold_of
from .contraction import contraction, held as products, of_vector
from .cost import BLOCK, Hints, contiguous_axis, is_heavy, parallelism
from .legal import Roles, inner_reads
from .lines import MOST_BESIDE, abreast, apart, piece
from .reason import Reason
from .sizes import runs_along

HELD = 32768            # elements of a row that one program holds in registers
STAGED = 128 << 10      # bytes of a row that one program holds in registers in the width it has in memory: see `schedule.tile_stages`
SHARE = 64 << 10        # of a longer row that each of the programs of a cluster holds
LEAST_SHARE = 8 << 10   # the same where rows are too few for the multiprocessors: bf16 softmax of 64 rows of 16385 and 16 of 262145 5.2 and 11.6 us,
                        # RMSNorm of 64 of 32768 5.1, Inductor's kernels 12.6, 24.2 and 7.1; LayerNorm of 128 of 32768 8.8, 12.9
RUN = 64                # contiguous elements at least, of a row that is held so: BatchNorm in NCHW 54% in three kernels, 47% so (with 32)
PASSING = 4096          # elements of a row from which on it is folded in pieces when nothing needs all of it at once
HELD_ACROSS = 1024      # the same of rows that are not contiguous: a tile needs columns for whole sectors of memory beside them
CARRIED = 32768         # elements of partial results that one program carries in registers along a row; along several axes half as many
SHARED_CARRIED = 128 << 10      # bytes of a program's share of a row, and of column sums beside it, where the neighbours of a cluster carry them:
                                # bf16 LayerNorm backward over 16384, 25600 and 65536 columns 74, 58 and 70%, 59, 47 and 49 by one program or in
                                # two kernels. Where one program could, only if more than three quarters of the lanes have a column: over 12288 57, 62
                                # in one program; f32 RMSNorm backward over 20480 and 24576, which none can, 77 and 79, 56 and 55 in two kernels
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
UNHELD = ("accumulators", "no_registers")       # reasons against folds beside others that hold no more once no row is held
MORE = 1.33             # bytes that kernels which hold no rows may move for one of those that do: they reach 86 to 99% of the copy limit,
                        # programs that carry sums of 16384 columns 66
COLUMN = 64             # elements of a column that are held beside folds along rows, where nothing but folds comes of it
FILL = 2                # programs that each multiprocessor should have
NEARLY = 0.95           # of them will do where each sums a long row by many warps: sums of 256 rows of 32768, 65536 and 131072 f32 12.5, 19.6 and
                        # 36.9 us, 14.6, 21.1 and 38.5 shared by four each; of 32768 bf16 7.8, 8.5. Rows of 131071 bf16, which few warps sum, 30.9,
                        # 21.9
LONG_SUM = 32 << 10     # bytes of such a row at least: f32 sums of 4096 rows of 8193 35.0 us, 36.7 with `tile_threads.PASSING_WARPS`; f16 of 32768 of
                        # 4097 74 with twice those, 67
CARRIED_ROW = (256, 8192)       # columns of which one program carries the sums along whole rows, rather than those of a few columns down many rows
DOWN = 4088             # columns from which on programs that sum them beside what they write take blocks of 4096, a row at a time: 95% where tiles
                        # of 64 columns reach 60. Gradients of a bias and a GELU of 16383 rows of 4095 bf16 119 us, 183 in two kernels
LEAST_DOWN = 1016       # the same where rows begin anywhere, and where the columns are nearly a power of two: bf16 65535 rows of 1025 128 us, 254 in
                        # two kernels, f32 32767 of 1025 112, 165; bf16 65536 of 1024 104, 105; of 1536 a quarter more, with idle lanes in a block
EACH_DOWN = 1 << 16     # elements of each multiprocessor at least then: about eight rows to a program
WALKED = 32             # rows at most of columns that a program folds and writes on the way, WALKED_FROM columns at least: RMSNorm backward of 16
WALKED_FROM = 32768     # rows of 65537 f32 10.8 us, of 131072 f16 9.9, of 32 of 131072 f32 25.5 and of 262143 f16 33.6; 13.0, 12.5, 28.4 and 38.6
                        # by programs that share the rows and leave partial sums
ALONE_EACH = 4096       # elements for each multiprocessor from which on few long rows are summed by themselves, and their columns where the gradient
                        # is written: LayerNorm backward of 16 and 64 rows of 131072 bf16 10.9 and 32.9 us, of 8 of 262144 11.5, of 32 of 131073 22.3,
                        # f32 of 16 of 65536 11.7; 15.9, 46.0, 14.4, 33.0 and 13.8 with both sums in one kernel. Of 4 of 65536 8.2, 7.6
SHORT = 16384           # elements that one program works through in the time of a launch: with less to do each, few programs will do
SHARED_FROM = 16 << 20  # bytes of columns from which on programs share out their rows, however many columns there are
LITTLE = 1 / 32         # of the bytes that two kernels move, which one of both saves: what a fold gives is folded on apart
NESTED = 3              # sums along some row axes that one program makes where it holds the rows of a heavy function: EvoNorm backward in NCHW, five,
                        # of 32 x 256 x 56 x 56 in two kernels 214 us (f32) and 123 (bf16), 333 and 399 before; of SiLU behind a GroupNorm, two, 244
                        # and 117, 149 and 85 by one kernel
MATRIX = 1 << 20        # elements of a matrix from which on its product with a vector has no folds across its programs beside it


def atomic(monoid: str, d: DType) -> bool:
    """Can many programs update one element of type `d` at once?"""
    if d is BOOL:
        return monoid in ("any", "all", "last")
    return monoid == "last" or monoid in ("sum", "prod", "max", "min") and d.bytes >= 4


def updates(group: Group, target) -> bool:
    """May the iterations of `group` update elements of a scatter in any order?"""
    return target.kind == "gpu" and not target.ordered \
        and all(atomic(m.node.monoid, m.node.dtype) for m in group.members if isinstance(m.node, Scatter))


def busy(group: Group, r: Roles, v, hints: Hints, target) -> bool:
    """Are there programs for every multiprocessor, or is each of the few done before another kernel would have begun? Programs that hold long rows
    have half of one's threads at least, or all of them."""
    sharing = _sharers(group, r, hints, target)
    programs = parallelism(r, v, hints) * max(1, sharing)
    work = max(hints.count(m.free | m.bound) for m in group.members)
    enough = FILL * (NEARLY if _sums_long_rows(group, r, v, hints) else 1)
    if programs >= enough * target.threads or work <= SHORT * programs or sharing > 0 and 4 * programs >= 3 * target.threads:
        return True
    beside = _beside(group, r, hints, target)
    return beside is not None and programs * beside[3] // beside[2] >= enough * target.threads


def _sums_long_rows(group: Group, r: Roles, v, hints: Hints) -> bool:
    """Does a program sum a long row of whole words, or of 32-bit elements, and nothing else?"""
    folds = [(m, fold_of(m.expr)) for m in group.members if m.bound]
    read = {(e.node, e.index): e.dtype.bytes for m in group.members for e in m.loads if any(v in i.axes() for i in e.index)}
    if r.accumulating or not folds or len(read) != 1 or any(v in m.free for m in group.members):
        return False
    (size,) = read.values()
    return all(m.bound == {v} and isinstance(f, Reduce) and f.monoid == "sum" for m, f in folds) \
        and (size >= 4 or hints.divides(16 // size, v.extent)) and hints(v.extent) * size >= LONG_SUM


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


def _sharers(group: Group, r: Roles, hints: Hints, target) -> int:
    """How many programs will hold a row of `group`, as far as can be told: 0 where one carries what is folded across, it is not needed again, or held
    by none."""
    rows = frozenset(a for m in group.members for a in m.free | m.bound) - r.parallel
    folds = [m for m in group.members if m.bound & rows]
    if r.accumulating:
        count = _sharing_carried(group, r, rows, hints, target)
        return count if count and hints.count(r.parallel) >= CARRIED_TURNS * clusters(count, target) else 0
    if not folds or any(m.bound != rows for m in folds) or any(hints.exactly(a.extent) is None for a in rows):
        return 0
    if not any(_long_run(e, m.bound, hints) for m in folds for f in walk(*m.roots()) if isinstance(f, Reduce) for e in walk(*f.args)):
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


def _row_bytes(part: Reduce) -> int:
    """Bytes an element of what `part` folds."""
    read = {(e.node, e.index): e.dtype.bytes for e in walk(*part.args) if isinstance(e, Load) and any(i.axes() & set(part.over) for i in e.index)}
    return sum(read.values())


def reread(node: Compute, part: Reduce, hints: Hints, target) -> bool:
    """Would a second fold over the axes of `part`, the fold of `node`, that needs its result read everything again? Not where a program holds what it
    folds: a row whose extents are known, contiguous or short, unless rows are so few that programs share them."""
    length, rows = hints.count(part.over), hints.extents(node.shape)
    if any(hints.most(a.extent) is None for a in part.over):
        return True
    contiguous = any(runs_along(e, a) for e in walk(*part.args) if isinstance(e, Load) for a in part.over)
    known = all(hints.exactly(a.extent) is not None for a in part.over) and any(_long_run(e, part.over, hints) for e in walk(*part.args))
    size = _row_bytes(part) * length
    held = sharers(size, target, rows) if known else 0
    if held:
        return size > SHARE // 2 * held and 4 * rows * held < 3 * target.threads
    programs = rows if contiguous else max(1, rows // BLOCK)
    return length > (HELD if contiguous else HELD_ACROSS) or programs < FILL * target.threads and length * rows > SHORT * programs


def _long_run(e, over, hints: Hints) -> bool:
    """Does `e` load elements side by side along one of `over`, many of them?"""
    return isinstance(e, Load) and any(hints.least(a.extent) >= RUN and runs_along(e, a) for a in over)


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
    if (alone or not (aligned or wide)) and count > FEW_SHARERS or alone and share * 4 <= 3 << (share - 1).bit_length():
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


def _sharing_carried(group: Group, r: Roles, rows: frozenset, hints: Hints, target) -> int:
    """How many programs of a cluster share the rows of `group` and carry what is folded across them (`schedule.tile_stages.carrying`); 0 where none
    can."""
    v = contiguous_axis(group, hints)
    if rows != {v} or hints.exactly(v.extent) is None or hints.least(v.extent) < RUN or not r.accumulating \
            or any(v not in m.free for m in r.accumulating):
        return 0
    folds = [e for m in r.local for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if not folds or any(isinstance(e, Scan) or set(e.over) != rows for e in folds) or any(isinstance(m.node, Scatter) for m in group.members):
        return 0
    read = _held(group, v)
    wide = many_wide(min(read, default=4), hints.count(r.parallel), target)
    count = carrying(hints.count(rows), len(r.accumulating), sum(read), hints.divides(WORDS, v.extent), target, wide, min(read, default=4))
    return count if count > 1 else 0


def _held(group: Group, v) -> tuple[int, ...]:
    """Bytes of each value that the members of `group` read for an element of a row along `v`."""
    inside = set(group.nodes())
    return tuple({(e.node, e.index): e.dtype.bytes for m in group.members for e in walk(*m.roots())
                if isinstance(e, Load) and e.node not in inside and any(v in i.axes() for i in e.index)}.values())


def infeasible(group: Group, r: Roles, hints: Hints, target) -> Reason | None:
    """Why no program can run `group` in parallel over `r.parallel`, or None."""
    if narrow.stepped(group, r):
        return narrow.infeasible([x for m in group.members for x in m.roots()], r.parallel, frozenset(group.nodes()))
    if any(c.exponents is not None and c.fold.free == r.parallel for c in products(group)):
        return None                 # a step at a time, see `contraction.chained`
    rows = frozenset(a for m in group.members for a in m.free | m.bound) - r.parallel
    if rows and not any(rows <= m.free | m.bound for m in group.members):         # each would be done again for every step along the others' axes
        return Reason("no_common_axes", "infeasible", "no value has all axes that a program runs through")
    if _sharing_carried(group, r, rows, hints, target):
        return None
    carried = sum(hints.count(m.free - r.parallel) for m in r.accumulating)
    if carried > (CARRIED if len(rows) == 1 else CARRIED // 2):
        return Reason("accumulators", "infeasible", f"{carried} partial results a program")
    v, length = contiguous_axis(group, hints), hints.count(rows)
    if rows == {v} and r.local and 0 < length <= carried and not carried_alone(length, carried // length, sum(_held(group, v))):
        return Reason("accumulators", "infeasible", f"{carried} partial results a program, beside rows of {length}")
    along = any(m.free & rows for m in r.accumulating)          # partial results of a row's length
    beside = side_by_side(group, r, hints, target)
    nested = _nested(group, rows) and not beside and not _planes(group, rows, hints, target)
    if (along or nested) and length > HELD:
        return Reason("no_registers", "infeasible", f"{length} elements of a row are held at once")
    if nested and _beyond_stages(group, rows, hints):
        return Reason("no_registers", "infeasible", "more of several rows than registers hold beside what is computed of them")
    together = _held_together(group, rows, hints) if along and len(rows) > 1 and not beside else 0
    if together > HELD:
        return Reason("no_registers", "infeasible", f"{together} elements of several rows are held at once")
    columns = {a for m in r.local for a in m.bound - r.parallel}
    if r.accumulating and v in r.parallel and hints.count(columns) > COLUMN and all(m.bound for m in r.local):
        return Reason("no_registers", "infeasible", f"columns of {hints.count(columns)} elements are held only to be folded, while rows are")
    crossed = {m.bound & r.parallel for m in r.accumulating}
    if len(crossed) > 1:
        return Reason("no_common_axes", "infeasible", "folds across programs over different axes")
    return None


def _held_together(group: Group, rows: frozenset, hints: Hints) -> int:
    """Elements of all that is read along every one of `rows`."""
    along = {(e.node, e.index) for m in group.members for e in m.loads if rows <= frozenset().union(*(i.axes() for i in e.index))}
    return hints.count(rows) * len(along)


def _beyond_stages(group: Group, rows: frozenset, hints: Hints) -> bool:
    """Is much computed of what `group` reads along all of `rows`, for many sums, and that more than half of what one program holds in stages?"""
    if len({m.node for m in group.members if m.bound & rows and m.bound < rows <= m.free | m.bound}) <= NESTED:
        return False
    inside = set(group.nodes())
    read = {(e.node, e.index): e.dtype.bytes for m in group.members for e in m.loads
            if e.node not in inside and rows <= frozenset().union(*(i.axes() for i in e.index))}
    return _heavy_along(group, rows) and hints.count(rows) * sum(read.values()) > STAGED // 2


def _heavy_along(group: Group, rows: frozenset) -> bool:
    """Is a heavy function computed of every element of `rows`?"""
    return any(isinstance(x, Op) and OPS[x.name].heavy and rows <= x.free for m in group.members for x in walk(*m.roots()))


def _planes(group: Group, rows: frozenset, hints: Hints, target) -> bool:
    """Do the programs of a cluster hold what `group` reads of its rows and needs again, each what is `apart`?"""
    folds = [e for m in group.members for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if any(isinstance(e, Scan) or e.monoid in CARRIERS for e in folds) or any(isinstance(m.node, Scatter) for m in group.members) \
            or not any(rows <= m.free and not m.bound for m in group.members):
        return False
    inside = set(group.nodes())
    read = {(e.node, e.index): (e.offset(), e.dtype.bytes) for m in group.members for e in m.loads if e.node not in inside}
    return apart(rows, [(m.bound, m.free & rows) for m in group.members if m.bound], read.values(), hints, target) is not None


def side_by_side(group: Group, r: Roles, hints: Hints, target) -> bool:
    """Do the programs of clusters hold side by side what `group` reads of its rows, short pieces of lines among them, and needs again? Not where a
    heavy function is computed again for each of many sums of channels: EvoNorm backward of 32 x 256 x 56 x 56 in NHWC, five, in f32 229 us, 157 in
    five kernels, in bf16 178 and 102."""
    return _beside(group, r, hints, target) is not None


def _beside(group: Group, r: Roles, hints: Hints, target) -> tuple | None:
    """How they do (`lines.abreast`)."""
    rows = frozenset(a for m in group.members for a in m.free | m.bound) - r.parallel
    if r.accumulating or not any(rows <= m.free and not m.bound for m in group.members):
        return None
    folds = [e for m in group.members for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if any(isinstance(e, Scan) or e.monoid in CARRIERS and e.monoid != "moments" for e in folds):
        return None
    if len({m.node for m in group.members if m.bound & rows and m.bound < rows}) > NESTED and _heavy_along(group, rows):
        return None
    inside = set(group.nodes())
    read = [e for m in group.members for e in m.loads if e.node not in inside]
    return abreast(read, rows, hints, target, MOST_BESIDE)


def _nested(group: Group, rows: frozenset) -> bool:
    """Is there a fold over some of the row axes, while others stay? Or a prefix along one?"""
    for m in group.members:
        for e in walk(*m.roots()):
            if isinstance(e, Scan) or isinstance(e, Reduce) and rows & set(e.over) and not rows <= set(e.over):
                return len(rows) > 1
    return False


def best_roles(group: Group, found: list[Roles], hints: Hints, target) -> Roles:
    """Of the legal choices of parallel axes the one that fills the machine with the least traffic."""
    if len(found) == 1:
        return found[0]
    v = contiguous_axis(group, hints)

    def rank(r: Roles):
        possible = infeasible(group, r, hints, target) is None
        carried = sum(hints.count(m.free - r.parallel) for m in r.accumulating)
        rows = v is not None and bool(r.accumulating) and len(r.local) > 0 and v not in r.parallel \
            and CARRIED_ROW[0] <= hints.count(frozenset((v,))) <= CARRIED_ROW[1]
        return (possible, _shares_columns(group, r, v, hints), busy(group, r, v, hints, target), not _walked(r, v, hints), not r.accumulating,
                rows, -carried, -len(r.parallel) if r.accumulating else 0, hints.count(r.parallel))
    return max(found, key=rank)


def _shares_columns(group: Group, r: Roles, v, hints: Hints) -> bool:
    """Do programs share out the rows of large columns, of several matrices, of which each carries more than one number?"""
    over = _columns(group, v, hints)
    if not over or len(r.parallel) - len(over) < 2 or v not in r.parallel or any(m.bound != over for m in r.accumulating) \
            or len(r.accumulating) + len(r.final) != len(group.members):
        return False
    folds = [fold_of(m.expr) for m in r.accumulating]
    return all(f.monoid in ("sum", "moments") for f in folds) \
        and len({(f.monoid, f.args) for f in folds}) + any(f.monoid == "moments" for f in folds) > 1


def _columns(group: Group, v, hints: Hints) -> frozenset:
    """The axes along which `group` folds columns of much memory, neighbours along `v`, and nothing else; none where it does not."""
    over = {m.bound for m in group.members if m.bound}
    if len(over) != 1 or any(not isinstance(fold_of(m.expr), Reduce) for m in group.members if m.bound):
        return frozenset()
    bound, = over
    read = {(e.node, e.index): e for m in group.members if m.bound for e in m.loads}.values()
    size = sum(hints.count(frozenset(a for i in e.index for a in i.axes())) * e.dtype.bytes for e in read)
    return bound if v not in bound and size >= SHARED_FROM else frozenset()


def _folds_elsewhere(a: Group, b: Group, hints: Hints) -> bool:
    """Does `a` fold large columns, and `b` something along other axes?"""
    over = _columns(a, contiguous_axis(a, hints), hints)
    return bool(over) and any(m.bound and m.bound != over for m in b.members)


def _walked(r: Roles, v, hints: Hints) -> bool:
    """Does a program walk down columns that it folds, and write them on the way, more rows than it holds of many columns?"""
    down = _written_down(r)
    return v in r.parallel and bool(down) and not _holds_columns(down, v, hints)


def _written_down(r: Roles) -> frozenset:
    """The axes down which a program folds and writes on the way; none where it does not do both."""
    down = frozenset(a for m in r.local for a in m.bound) - r.parallel
    return down if any(down & m.free and not m.bound for m in r.local) else frozenset()


def _holds_columns(down: frozenset, v, hints: Hints) -> bool:
    """Are columns short and many, so that a program holds some?"""
    return len(down) == 1 and hints.exactly(next(iter(down)).extent) is not None and hints.count(down) <= WALKED and hints(v.extent) >= WALKED_FROM


def sums_rows_across(group: Group, r: Roles, hints: Hints, target) -> bool:
    """Do programs that have pieces of rows, whose columns they fold, leave their shares of the rows' sums, too, of more than a little?"""
    v = contiguous_axis(group, hints)
    across = v in r.parallel and any(m.bound == {v} for m in r.accumulating) and any(m.bound and v in m.free for m in r.local)
    return across and max(hints.count(m.free | m.bound) for m in r.accumulating) >= ALONE_EACH * target.threads


def walks_down(columns: Index, rows: int, hints: Hints, target) -> bool:
    """Do programs that sum so many columns beside what they write take long blocks of them, a row at a time?"""
    n, words = hints(columns), hints(columns) // WORDS * WORDS
    if n < LEAST_DOWN or n >= DOWN or n * rows < EACH_DOWN * target.threads:
        return n >= DOWN
    return not hints.divides(WORDS, columns) or 8 * ((1 << (words - 1).bit_length()) - words) <= words


def _cuts_lines(r: Roles, v, hints: Hints, target) -> bool:
    """Would a fold, within the same program, over rows of `v` that lie one behind the other make accesses short, which are 16-byte words along
    both? Not where long columns are summed beside what is written: those are read in whole words, wherever they begin."""
    crossed = {a for m in r.accumulating for a in m.bound}
    if crossed and walks_down(v.extent, hints.count(crossed), hints, target) and any(crossed | {v} <= m.free and not m.bound for m in r.local):
        return False
    if _holds_columns(_written_down(r), v, hints):
        return False
    for m in r.local:
        for e in m.loads:
            offset = e.offset()
            behind = [a for a in offset.axes() - (r.parallel - crossed) if offset.coefficient(a) is as_index(v.extent)]
            if offset.coefficient(v) == 1 and behind and not hints.divides(max(16 // e.dtype.bytes, 1), v.extent):
                if any(a in m.free and hints.divides(max(16 // e.dtype.bytes, 1), a.extent * v.extent) for a in behind):
                    return True
    return False


def _pieces(group: Group, r: Roles, hints: Hints, target) -> bool:
    """Does a program of `group` read short pieces of lines, whose neighbours other programs read?"""
    inside = set(group.nodes())
    rows = {a for m in group.members for a in m.free | m.bound} - r.parallel
    read = [e for m in group.members for e in m.loads if e.node not in inside]
    if piece(read, rows, hints) is None or abreast(read, rows, hints, target, MOST_BESIDE) is not None:
        return False
    return hints.count(rows) > HELD or any(is_heavy(x) for m in group.members if m.free >= rows for x in m.roots())


def _times_vector(m, hints: Hints) -> bool:
    """Is a member the product of a vector with a matrix of many elements?"""
    c = contraction(fold) if (fold := fold_of(m.expr)) is not None else None
    return c is not None and of_vector(c) and hints.count(m.free | m.bound) >= MATRIX


def _in_two_steps(a: Group, b: Group) -> bool:
    """Does one fold, as they are, the results of a fold of the same kind that the other makes?"""
    made = {m.node: f.monoid for m in (*a.members, *b.members) if isinstance(f := fold_of(m.expr), Reduce)}
    parts = [(m.node, f) for m in (*a.members, *b.members) if isinstance(f := fold_of(m.expr), Reduce)]
    return any(len(f.args) == 1 and isinstance(e := f.args[0], Load) and made.get(e.node) == f.monoid and (e.node in a.nodes()) != (n in a.nodes())
               for n, f in parts)


def _apart(a: Group, b: Group) -> bool:
    """Does neither of two groups make what the other reads?"""
    return not any(n in x.reads for x, y in ((a, b), (b, a)) for n in y.nodes())


def _small_fold(a: Group, b: Group, joined: Group, hints: Hints) -> bool:
    """Does one of two groups fold little, along axes that a large matrix has of which the other folds nothing?"""
    most = lambda g: max(hints.count(m.free | m.bound) for m in g.members)
    few, many, small, large = most(a), most(b), set(a.nodes()), set(b.nodes())
    if few > many:
        few, many, small, large = many, few, large, small
    bound = frozenset().union(*(m.bound for m in joined.members if m.node in small))
    return many >= MATRIX and few <= LITTLE * many and all(not m.bound for m in joined.members if m.node in large) \
        and any(bound & m.free for m in joined.members if m.node in large)


def _little_beside(a: Group, b: Group, joined: Group, hints: Hints) -> bool:
    """Do two groups, each as short as a launch, fold different axes, and make nothing that the other reads?"""
    little = max(hints.count(m.free | m.bound) for m in joined.members) <= SHORT
    return little and _apart(a, b) and len({m.bound for m in joined.members if m.bound}) > 1


def _share_a_matrix(a: Group, b: Group, hints: Hints) -> bool:
    """Does anything of as many elements lie between two groups, or do both read it?"""
    touched = [{*g.nodes(), *g.reads} for g in (a, b)]
    return any(hints.extents(n.shape) >= MATRIX for n in touched[0] & touched[1])


def unprofitable(a: Group, b: Group, joined: Group, r: Roles, before: tuple[Roles, Roles], hints: Hints, target, saved: float = 1) -> Reason | None:
    """Why `a` and `b`, whose own roles are `before`, are better two kernels; None when one is. `saved`: of the bytes that they move."""
    reason = infeasible(joined, r, hints, target)
    if reason is not None:
        return reason
    if saved < LITTLE and _in_two_steps(a, b):
        return Reason("no_saving", "unprofitable", "a fold of what another gives, which stand apart so that it can be read beside others")
    if saved < LITTLE and r.accumulating and not any(x.accumulating for x in before) and _apart(a, b):
        return Reason("no_saving", "unprofitable", "a fold would be left across programs for the little that both read")
    if saved < LITTLE and _small_fold(a, b, joined, hints):
        return Reason("no_saving", "unprofitable", "a small fold would shape the kernel of much that needs none")
    fewest = min(target.threads, *(hints.count(x.parallel) for x in before))
    if _little_beside(a, b, joined, hints) and hints.count(r.parallel) < fewest:
        return Reason("no_parallelism", "unprofitable", f"{hints.count(r.parallel)} programs of two small kernels that need nothing of each other")
    if any(hints.count(m.free) >= MATRIX for m in r.final):
        return Reason("no_saving", "unprofitable", "much is made of folds across programs, by a second kernel in any case")
    products = [x for g, x in zip((a, b), before) if any(_times_vector(m, hints) for m in g.members)]
    if r.accumulating and products and not any(x.accumulating for x in products) and not _share_a_matrix(a, b, hints):
        return Reason("no_saving", "unprofitable", "a matrix times a vector is read faster than by programs that carry sums of its results")
    folds = all(any(m.bound for m in g.members) for g in (a, b))
    if products and folds and not _share_a_matrix(a, b, hints) and len({frozenset(m.bound) for m in joined.members if m.bound}) > 1:
        return Reason("no_saving", "unprofitable", "a matrix times a vector is read faster than beside folds of other lengths")
    if _pieces(joined, r, hints, target) and not any(_pieces(g, x, hints, target) for g, x in zip((a, b), before)):
        return Reason("no_saving", "unprofitable", "programs would read short pieces of lines, which are read whole without")
    v = contiguous_axis(joined, hints)
    if any(_folds_elsewhere(x, y, hints) for x, y in ((a, b), (b, a))) and not _share_a_matrix(a, b, hints):
        return Reason("no_saving", "unprofitable", "what columns give is folded on faster by another kernel")
    if v in r.parallel and _cuts_lines(r, v, hints, target):
        return Reason("no_saving", "unprofitable", "rows that begin anywhere would be read one by one, not several as one")
    if not busy(joined, r, v, hints, target) and all(busy(g, x, v, hints, target) for g, x in zip((a, b), before)):
        return Reason("no_parallelism", "unprofitable", f"{hints.count(r.parallel)} rows")
    return None
