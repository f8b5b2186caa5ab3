"""What a kernel on a GPU can hold and keep busy: the questions of `cost` and `plan` whose answers differ from a CPU's."""
from __future__ import annotations

from ..ir.dtype import BOOL, DType
from ..ir.expr import Load, Op, Reduce, Scan, loads, walk
from ..ir.graph import Compute, Scatter
from ..ir.index import as_index
from ..ir.ops import CARRIERS, OPS
from . import narrow, sharing
from .axes import Group, fold_of
from .column_folds import cuts_lines, folds_elsewhere, shares_columns, walked
from .contraction import contraction, factors_of, held as products, of_vector
from .cost import BLOCK, Hints, contiguous_axis, is_heavy, parallelism
from .held_rows import columns_held, held_apart, held_together
from .legal import Roles
from .lines import MOST_BESIDE, SECTOR, WRITTEN_ABREAST, abreast, across, apart, by_columns, in_columns, own_piece, strides, whole_sectors
from .reason import Reason
from .sizes import runs_along

PASSING = 4096          # elements of a row from which on it is folded in pieces when nothing needs all of it at once; of moments, which cost more
MOMENTS = 16384         # in pieces, so many: variance of 3000 rows of 6000 bf16 15.8 us held, 47.2, of 20000 of 4100 f16 58.9, 227, of 2000 of 5000
                        # f32 17.1, 40.6, of 4000 of 12000 71.5, 109 (H100)
HELD_ACROSS = 1024      # the same of rows that are not contiguous: a tile needs columns for whole sectors of memory beside them
UNHELD = ("accumulators", "no_registers")       # reasons against folds beside others that hold no more once no row is held
MORE = 1.33             # bytes that kernels which hold no rows may move for one of those that do: they reach 86 to 99% of the copy limit,
                        # programs that carry sums of 16384 columns 66
COLUMN = 64             # elements of a column that are held beside folds along rows, where nothing but folds comes of it
ABREAST = 4             # times FILL programs where each takes several rows at once, through which something else strides: sums of GroupNorm backward
                        # from NHWC, the gradient in NCHW, of 16 x 256 x 112 x 112 bf16 79.5 us, which programs share, 97 by 512 programs, f32 of
                        # 12 x 256 x 64 x 65 40, 57; of 4 x 512 x 128 x 128 bf16 48, 93 by 128, of 2 x 512 x 160 x 161 41, 207 by 64
FILL = 2                # programs that each multiprocessor should have
NEARLY = 0.72           # of them will do where each sums a long row by many warps: sums of 256 rows of 32768, 65536 and 131072 f32 12.5, 19.6 and
                        # 36.9 us, 14.6, 21.1 and 38.5 shared by four each; of 32768 bf16 7.8, 8.5; of 192 of 65536 20.5, 22.9 (H100). Rows of 131071
                        # bf16, which few warps sum, 30.9, 21.9
NARROWER = 4            # times narrower than BLOCK that a tile of columns may be that are held: standardised columns' backward of 512 x 15531 bf16
                        # 30.4 us, 119 in three kernels, filter response norm in NHWC of 4 x 1280 x 32 x 32 f32 15.6, 21.4; but softmax along the
                        # middle of 25 x 511 x 427 f16 24.3, 19.2, standardised columns of 2843 x 6648 48.6, 39.0 (H200)
LONG_SUM = 32 << 10     # bytes of such a row at least: f32 sums of 4096 rows of 8193 35.0 us, 36.7 with `tile_threads.PASSING_WARPS`; f16 of 32768 of
                        # 4097 74 with twice those, 67
CARRIED_ROW = (256, 8192)       # columns of which one program carries the sums along whole rows, rather than those of a few columns down many rows
SHORT = 16384           # elements that one program works through in the time of a launch: with less to do each, few programs will do
LITTLE = 1 / 32         # of the bytes that two kernels move, which one of both saves: what a fold gives is folded on apart
LEADING = 8             # coordinates of outermost axes, along which programs run in parallel but for a value that lacks them and saves less:
                        # positions' biases of 16 heads of 512 x 512, which later layers read again, and the first one's softmax over a batch of
                        # 16, by the estimate of their machine code for an H200 448 us in three kernels that hold the batch, 7 and 183 apart
LEADING_SAVED = 1 / 4   # of the bytes that two kernels move, up to which they are two for that
NESTED = 3              # sums along some row axes that one program makes where it holds the rows of a heavy function: EvoNorm backward in NCHW, five,
                        # of 32 x 256 x 56 x 56 in two kernels 214 us (f32) and 123 (bf16), 333 and 399 before; of SiLU behind a GroupNorm, two, 244
                        # and 117, 149 and 85 by one kernel
ROW_ACROSS = 2048       # elements of rows across which something lies, of which a program holds whole sectors (`schedule.turned_rows`): norms of the
                        # sum of 4 x 272 x 1796 f32 and of one that lies the other way 13.3 us, 20.6 in three kernels, tokens' norm backward of
                        # 36 x 2048 x 14 x 14 f32 113, 207 (H200)
CARRIED_ACROSS = 1024   # elements of 16 bits, half as many of 32, along which programs that hold such rows carry sums: LayerNorm's gradient, turned,
                        # of 19 x 3898 x 512 f16 112 us, 154 in two kernels, of 57395 x 8 x 96 f32 168, 512, tokens' of 20 x 512 x 56 x 56 bf16
                        # 101, 132 (H200)
PLANE_ACROSS = 4096     # elements of all rows across which something lies that programs hold which carry sums: tokens' norm backward of
                        # 35275 x 32 x 8 x 8 f16 122 us, 283 in four kernels (H200)
ROWS_TURNS = 16         # such rows for each of FILL programs that carry sums: LayerNorm's gradient, turned, of 1 x 651 x 3256 bf16 16.3 us in four
                        # kernels, 27.0 by programs with two tiles of 8 rows each (H200)
MATRIX = 1 << 20        # elements of a matrix from which on its product with a vector has no folds across its programs beside it, nor is it made of
                        # such folds that have fewer by the same kernels


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
    sharers = sharing.row_sharers(group, r, hints, target)
    across = _holds_across(group, r, hints)
    narrower = NARROWER if _holds_columns(group, r, v, hints) or across and v in r.parallel else 1
    several = SECTOR // _narrowest(group, r.rows(group)) if across and v not in r.parallel else _abreast(group, r, v, hints)
    programs = parallelism(r, v, hints) * max(1, sharers) * narrower // several
    work = max(hints.count(m.free | m.bound) for m in group.members)
    enough = FILL * (NEARLY if _sums_long_rows(group, r, v, hints) else 1)
    if programs >= enough * target.threads or work <= SHORT * programs or sharers > 0 and 4 * programs >= 3 * target.threads:
        return True
    beside = _beside(group, r, hints, target)
    return beside is not None and programs * beside[3] // beside[2] >= enough * target.threads


def _holds_columns(group: Group, r: Roles, v, hints: Hints) -> bool:
    """Do programs hold columns of few rows, several blocks of them, which they fold (by no heavy function) and then write?"""
    rows = r.rows(group)
    if v not in r.parallel or hints(v.extent) < 2 * BLOCK or hints.count(rows) > HELD_ACROSS or r.accumulating:
        return False
    heavy = any(isinstance(x, Op) and OPS[x.name].heavy or isinstance(x, Reduce) and x.monoid == "expsum"
                for m in group.members if m.bound for x in walk(*m.roots()))
    return not heavy and any(m.bound & rows for m in group.members) \
        and any(rows <= m.free and not m.bound for m in group.members)


def _holds_across(group: Group, r: Roles, hints: Hints) -> bool:
    """Do programs hold rows, and whole sectors of what lies across them (`schedule.turned_rows`)?"""
    most = ROW_ACROSS if not r.accumulating else 2 * CARRIED_ACROSS // _narrowest(group, r.rows(group))
    return hints.count(r.rows(group)) <= most and bool(_read_across(group, r, hints))


def _read_across(group: Group, r: Roles, hints: Hints) -> frozenset:
    """The axes along which something that `group` reads lies across its rows."""
    rows = r.rows(group)
    return across((e.offset() for e in group.outside), *rows, r.parallel, hints) if len(rows) == 1 else frozenset()


def _narrowest(group: Group, rows: frozenset) -> int:
    """Bytes of an element of the narrowest that `group` reads along all of `rows`."""
    return min((e.dtype.bytes for e in group.outside if rows <= e.offset().axes()), default=4)


def _holds_plane(group: Group, r: Roles, hints: Hints) -> bool:
    """Do programs that carry sums hold all rows across which something lies, few elements?"""
    rows = r.rows(group)
    few = bool(r.accumulating) and len(rows) == 2 and hints.count(rows) <= PLANE_ACROSS
    return few and any(across((e.offset() for e in group.outside), a, rows - {a}, hints) for a in rows)


def _sums_across(group: Group, r: Roles, hints: Hints, target) -> bool:
    """Do programs carry sums beside rows across which something lies, rows that are few, or too long to be held, or sums apart for each of them?"""
    found = _read_across(group, r, hints) if r.accumulating else frozenset()
    few = hints.count(r.parallel) < ROWS_TURNS * FILL * target.threads
    return bool(found) and (few or not _holds_across(group, r, hints) or any(found & m.free for m in r.accumulating))


def _abreast(group: Group, r: Roles, v, hints: Hints) -> int:
    """By how many rows along `v` fewer programs are a fill: those that one takes at once, since something that it reads strides along them and lies
    contiguously beside them."""
    if v in r.parallel:
        return 1
    read = [e.offset() for m in group.members for e in m.loads]
    return max((ABREAST * min(hints(a.extent), BLOCK) for at in read if strides(at, v) for a in r.parallel if at.coefficient(a) == 1), default=1)


def _sums_long_rows(group: Group, r: Roles, v, hints: Hints) -> bool:
    """Does a program sum a long row of whole words, or of 32-bit elements, and nothing else?"""
    folds = [(m, fold_of(m.expr)) for m in group.members if m.bound]
    read = {(e.node, e.index): e.dtype.bytes for m in group.members for e in m.loads if any(v in i.axes() for i in e.index)}
    if r.accumulating or not folds or len(read) != 1 or any(v in m.free for m in group.members):
        return False
    (size,) = read.values()
    return all(m.bound == {v} and isinstance(f, Reduce) and f.monoid == "sum" for m, f in folds) \
        and (size >= 4 or hints.divides(16 // size, v.extent)) and hints(v.extent) * size >= LONG_SUM


def _row_bytes(part: Reduce) -> int:
    """Bytes an element of what `part` folds."""
    read = {(e.node, e.index): e.dtype.bytes for e in walk(*part.args) if isinstance(e, Load) and any(i.axes() & set(part.over) for i in e.index)}
    return sum(read.values())


def reread(node: Compute, part: Reduce, hints: Hints, target) -> bool:
    """Would a second fold over the axes of `part`, the fold of `node`, that needs its result read everything again? Not where a program holds what it
    folds: a row whose extents are known, contiguous or short, unless rows are so few that programs share them, or groups of channels are folded by
    columns."""
    length, rows = hints.count(part.over), hints.extents(node.shape)
    if any(hints.most(a.extent) is None for a in part.over):
        return True
    read = loads(*part.args)
    if by_columns(read, part.over, hints) and abreast(read, part.over, hints, target) is None:
        return True
    contiguous = any(runs_along(e, a) for e in walk(*part.args) if isinstance(e, Load) for a in part.over)
    known = all(hints.exactly(a.extent) is not None for a in part.over) and any(sharing.long_run(e, part.over, hints) for e in walk(*part.args))
    size = _row_bytes(part) * length
    held = sharing.sharers(size, target, rows) if known else 0
    if held:
        return size > sharing.SHARE // 2 * held and 4 * rows * held < 3 * target.threads
    programs = rows if contiguous else max(1, rows // BLOCK)
    return length > (sharing.HELD if contiguous else HELD_ACROSS) or programs < FILL * target.threads and length * rows > SHORT * programs


def infeasible(group: Group, r: Roles, hints: Hints, target) -> Reason | None:
    """Why no program can run `group` in parallel over `r.parallel`, or None."""
    if narrow.stepped(group, r):
        return narrow.infeasible([x for m in group.members for x in m.roots()], r.parallel, frozenset(group.nodes()))
    if any(c.exponents is not None and c.fold.free == r.parallel for c in products(group)):
        return None                 # a step at a time, see `contraction.chained`
    rows = r.rows(group)
    if rows and not any(rows <= m.free | m.bound for m in group.members):         # each would be done again for every step along the others' axes
        return Reason("no_common_axes", "infeasible", "no value has all axes that a program runs through")
    if sharing.column_sharers(group, r, rows, hints, target):
        return None
    carried = sharing.carried(r, hints)
    if carried > (sharing.CARRIED if len(rows) == 1 else sharing.CARRIED // 2):
        return Reason("accumulators", "infeasible", f"{carried} partial results a program")
    v, length = contiguous_axis(group, hints), hints.count(rows)
    if rows == {v} and r.local and 0 < length <= carried and not sharing.carried_alone(length, carried // length, sum(sharing.held_along(group, v))):
        return Reason("accumulators", "infeasible", f"{carried} partial results a program, beside rows of {length}")
    along = any(m.free & rows for m in r.accumulating)          # partial results of a row's length
    beside = side_by_side(group, r, hints, target)
    nested = _nested(group, rows) and not beside and not _planes(group, rows, hints, target)
    if (along or nested) and length > sharing.HELD:
        return Reason("no_registers", "infeasible", f"{length} elements of a row are held at once")
    if nested and length > held_apart(group, rows, v, hints):
        return Reason("no_registers", "infeasible", f"{length} elements of several rows that lie apart are held at once")
    if nested and _beyond_stages(group, rows, hints):
        return Reason("no_registers", "infeasible", "more of several rows than registers hold beside what is computed of them")
    together = held_together(group, rows, hints) if along and len(rows) > 1 and not beside else 0
    if together > sharing.HELD:
        return Reason("no_registers", "infeasible", f"{together} elements of several rows are held at once")
    if along and v in r.parallel and sum(bool(m.bound) for m in r.local) == 1 and length > columns_held(group, rows, v, hints):
        return Reason("no_registers", "infeasible", f"columns of {length} elements are held at once, beside sums along them")
    columns = {a for m in r.local for a in m.bound - r.parallel}
    if r.accumulating and v in r.parallel and hints.count(columns) > COLUMN and all(m.bound for m in r.local):
        return Reason("no_registers", "infeasible", f"columns of {hints.count(columns)} elements are held only to be folded, while rows are")
    crossed = {m.bound & r.parallel for m in r.accumulating}
    if len(crossed) > 1:
        return Reason("no_common_axes", "infeasible", "folds across programs over different axes")
    return None


def _beyond_stages(group: Group, rows: frozenset, hints: Hints) -> bool:
    """Is much computed of what `group` reads along all of `rows`, for many sums, and that more than half of what one program holds in stages?"""
    if len({m.node for m in group.members if m.bound & rows and m.bound < rows <= m.free | m.bound}) <= NESTED:
        return False
    read = {(e.node, e.index): e.dtype.bytes for e in group.outside if rows <= frozenset().union(*(i.axes() for i in e.index))}
    return _heavy_along(group, rows) and hints.count(rows) * sum(read.values()) > sharing.STAGED // 2


def _heavy_along(group: Group, rows: frozenset) -> bool:
    """Is a heavy function computed of every element of `rows`?"""
    return any(isinstance(x, Op) and OPS[x.name].heavy and rows <= x.free for m in group.members for x in walk(*m.roots()))


def _planes(group: Group, rows: frozenset, hints: Hints, target) -> bool:
    """Do the programs of a cluster hold what `group` reads of its rows and needs again, each what is `apart`?"""
    folds = [e for m in group.members for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if any(isinstance(e, Scan) or e.monoid in CARRIERS for e in folds) or any(isinstance(m.node, Scatter) for m in group.members) \
            or not any(rows <= m.free and not m.bound for m in group.members):
        return False
    read = {(e.node, e.index): (e.offset(), e.dtype.bytes) for e in group.outside}
    return apart(rows, [(m.bound, m.free & rows) for m in group.members if m.bound], read.values(), hints, target) is not None


def side_by_side(group: Group, r: Roles, hints: Hints, target) -> bool:
    """Do the programs of clusters hold side by side what `group` reads of its rows, short pieces of lines among them, and needs again? Not where a
    heavy function is computed again for each of many sums of channels: EvoNorm backward of 32 x 256 x 56 x 56 in NHWC, five, in f32 229 us, 157 in
    five kernels, in bf16 178 and 102."""
    return _beside(group, r, hints, target) is not None


def _beside(group: Group, r: Roles, hints: Hints, target) -> tuple | None:
    """How they do (`lines.abreast`)."""
    rows = r.rows(group)
    if r.accumulating or not any(rows <= m.free and not m.bound for m in group.members):
        return None
    folds = [e for m in group.members for e in walk(*m.roots()) if isinstance(e, (Reduce, Scan))]
    if any(isinstance(e, Scan) or e.monoid in CARRIERS and e.monoid != "moments" for e in folds):
        return None
    if len({m.node for m in group.members if m.bound & rows and m.bound < rows}) > NESTED and _heavy_along(group, rows):
        return None
    return abreast(group.outside, rows, hints, target, MOST_BESIDE)


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
    rows = lambda r: v is not None and bool(r.accumulating) and len(r.local) > 0 and v not in r.parallel \
        and CARRIED_ROW[0] <= hints.count(frozenset((v,))) <= CARRIED_ROW[1]
    ranks = (lambda r: infeasible(group, r, hints, target) is None, lambda r: shares_columns(group, r, v, hints),
             lambda r: busy(group, r, v, hints, target), lambda r: _holds_plane(group, r, hints), lambda r: not walked(r, v, hints),
             lambda r: not r.accumulating, rows, lambda r: -sharing.carried(r, hints), lambda r: -len(r.parallel) if r.accumulating else 0,
             lambda r: hints.count(r.parallel))
    for rank in ranks:              # the first that tells choices apart decides, and most are the dearer to tell
        ranked = [(rank(r), r) for r in found]
        best = max(value for value, _ in ranked)
        found = [r for value, r in ranked if value == best]
        if len(found) == 1:
            break
    return found[0]


def _pieces(group: Group, r: Roles, hints: Hints, target) -> bool:
    """Does a program of `group` read short pieces of lines, whose neighbours other programs read?"""
    rows, read = r.rows(group), group.outside
    if in_columns(read, rows, hints):
        return True
    if own_piece(read, rows, hints) is None or abreast(read, rows, hints, target, MOST_BESIDE) is not None:
        return False
    return hints.count(rows) > sharing.HELD or any(is_heavy(x) for m in group.members if m.free >= rows for x in m.roots())


def _writes_pieces(group: Group, r: Roles, hints: Hints) -> bool:
    """Would a program of `group` hold rows that it reads along one axis, and write of them pieces of lines along another, shorter than a sector, so
    many elements that it cannot hold those of its neighbours beside them?"""
    rows = r.rows(group)
    read = [at for e in group.outside if rows <= (at := e.offset()).axes()]
    for m in group.members:
        if m.bound or len(rows) < 2 or not rows <= m.free or not isinstance(m.node, Compute):
            continue
        at = sum((d * s for d, s in zip(m.dims, m.node.strides)), as_index(0))
        c = next((a for a in rows if at.coefficient(a) == 1), None)
        g = next((a for a in r.parallel if c is not None and at.coefficient(a) is c.extent), None)
        if g is not None and any(x.coefficient(a) == 1 for x in read for a in rows if a is not c):
            run, lanes = hints(c.extent) * m.node.dtype.bytes, 1 << max(hints(c.extent) - 1, 0).bit_length()
            if run < SECTOR and lanes * hints.count(rows - {c}) * whole_sectors(run, hints(g.extent)) > WRITTEN_ABREAST:
                return True
    return False


def _interleaved(group: Group, r: Roles, hints: Hints) -> bool:
    """Do programs of `group` fold along an axis whose steps are short runs of another one, of which other programs have the rest (pixels that are
    shuffled apart)?"""
    folded = frozenset().union(*(m.bound for m in group.members))
    read = [(e, e.offset()) for e in group.outside]
    most = max((hints.count(at.axes()) for _, at in read), default=0)
    for e, at in read:
        if hints.count(at.axes()) < most:           # one number a row
            continue
        short = [a for a in at.axes() & r.parallel - folded if at.coefficient(a) == 1 and 1 < hints(a.extent) * e.dtype.bytes < SECTOR]
        if any(at.coefficient(a) is x.extent for x in short for a in at.axes() & folded):
            return True
    return False


def _times_vector(m, hints: Hints) -> bool:
    """Is a member the product of a vector with a matrix of many elements?"""
    c = contraction(fold) if (fold := fold_of(m.expr)) is not None else None
    return c is not None and of_vector(c) and hints.count(m.free | m.bound) >= MATRIX


def _in_two_steps(a: Group, b: Group, joined: Group, hints: Hints) -> bool:
    """Does one fold, as they are, the results of a fold of the same kind that the other makes? Or weighted, where both read short pieces of lines."""
    made = {m.node: f.monoid for m in (*a.members, *b.members) if isinstance(f := fold_of(m.expr), Reduce)}
    parts = [(m.node, f) for m in (*a.members, *b.members) if isinstance(f := fold_of(m.expr), Reduce)]
    bound = frozenset().union(*(m.bound for m in joined.members))
    pieces = own_piece([e for m in joined.members for e in m.loads], bound, hints) is not None
    return any(isinstance(e, Load) and made.get(e.node) == f.monoid and (e.node in a.nodes()) != (n in a.nodes())
               for n, f in parts if len(f.args) == 1 for e in (factors_of(f.args[0]) if pieces else f.args))


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


def _holds_leading(a: Group, b: Group, joined: Group, of: Roles, r: Roles, hints: Hints) -> bool:
    """Does `a` fold nothing, and would programs hold beside it, by the roles `r`, the outermost axes of what `b` makes, along which they run in
    parallel by the roles `of` that it has by itself?"""
    if any(m.bound for m in a.members) or hints.count(of.parallel) < LEADING * hints.count(r.parallel):
        return False
    made = set(b.nodes())
    for m in joined.members:
        if m.node in made and not m.bound and isinstance(m.node, Compute):
            strides = {x: hints(s) for d, s in zip(m.dims, m.node.strides) for x in d.axes()}
            held, others = {x for x in strides if x not in r.parallel}, {x for x in strides if x in r.parallel}
            if held and others and hints.count(held) >= LEADING and min(strides[x] for x in held) > max(strides[x] for x in others):
                return True
    return False


def _share_a_matrix(a: Group, b: Group, hints: Hints) -> bool:
    """Does anything of as many elements lie between two groups, or do both read it?"""
    touched = [{*g.nodes(), *g.reads} for g in (a, b)]
    return any(hints.extents(n.shape) >= MATRIX for n in touched[0] & touched[1])


def _shares_keys(group: Group) -> bool:
    """Is it of weighted means, whose programs share the depth?"""
    return any(c.exponents is not None for c in products(group))


def _only_reads(a: Group, b: Group) -> bool:
    """Does `a` read nothing but what `b` makes?"""
    made = set(b.nodes())
    return all(e.node in made for m in a.members for e in m.loads)


def unprofitable(a: Group, b: Group, joined: Group, r: Roles, before: tuple[Roles, Roles], hints: Hints, target, saved: float = 1) -> Reason | None:
    """Why `a` and `b`, whose own roles are `before`, are better two kernels; None when one is. `saved`: of the bytes that they move."""
    reason = infeasible(joined, r, hints, target)
    if reason is not None or _shares_keys(joined):
        return reason
    if saved < LITTLE and _in_two_steps(a, b, joined, hints):
        return Reason("no_saving", "unprofitable", "a fold of what another gives, which stand apart so that it can be read beside others")
    if saved < LITTLE and r.accumulating and not any(x.accumulating for x in before) and _apart(a, b):
        return Reason("no_saving", "unprofitable", "a fold would be left across programs for the little that both read")
    if saved < LITTLE and _small_fold(a, b, joined, hints):
        return Reason("no_saving", "unprofitable", "a small fold would shape the kernel of much that needs none")
    if saved < LEADING_SAVED and any(_holds_leading(x, y, joined, role, r, hints) for x, y, role in ((a, b, before[1]), (b, a, before[0]))):
        return Reason("no_parallelism", "unprofitable", f"{hints.count(r.parallel)} programs, which hold what one of both lacks")
    fewest = min(target.threads, *(hints.count(x.parallel) for x in before))
    if _little_beside(a, b, joined, hints) and hints.count(r.parallel) < fewest:
        return Reason("no_parallelism", "unprofitable", f"{hints.count(r.parallel)} programs of two small kernels that need nothing of each other")
    if any(hints.count(m.free) >= MATRIX and all(x.free != m.free for x in r.accumulating) for m in r.final):
        return Reason("no_saving", "unprofitable", "much is made of folds across programs, by a second kernel in any case")
    products = [x for g, x in zip((a, b), before) if any(_times_vector(m, hints) for m in g.members)]
    if r.accumulating and products and not any(x.accumulating for x in products) and not _share_a_matrix(a, b, hints):
        return Reason("no_saving", "unprofitable", "a matrix times a vector is read faster than by programs that carry sums of its results")
    folds = all(any(m.bound for m in g.members) for g in (a, b))
    if products and folds and not _share_a_matrix(a, b, hints) and len({frozenset(m.bound) for m in joined.members if m.bound}) > 1:
        return Reason("no_saving", "unprofitable", "a matrix times a vector is read faster than beside folds of other lengths")
    new = lambda asked: asked(joined, r) and not any(asked(g, x) for g, x in zip((a, b), before))
    if new(lambda g, x: _pieces(g, x, hints, target)):
        return Reason("no_saving", "unprofitable", "programs would read short pieces of lines, which are read whole without")
    if new(lambda g, x: _writes_pieces(g, x, hints)):
        return Reason("no_saving", "unprofitable", "programs would write pieces of lines shorter than a sector")
    if new(lambda g, x: _sums_across(g, x, hints, target)):
        return Reason("no_saving", "unprofitable", "a row at a time beside sums, what lies across rows would be read an element of each sector")
    if new(lambda g, x: _interleaved(g, x, hints)):
        return Reason("no_saving", "unprofitable", "what lies interleaved would be folded apart, each program reading every so many elements")
    v = contiguous_axis(joined, hints)
    if any(folds_elsewhere(x, y, hints) for x, y in ((a, b), (b, a))) and not _share_a_matrix(a, b, hints):
        return Reason("no_saving", "unprofitable", "what columns give is folded on faster by another kernel")
    if v in r.parallel and cuts_lines(r, v, hints, target) \
            and not any(_only_reads(x, y) and cuts_lines(role, v, hints, target) for x, y, role in ((a, b, before[1]), (b, a, before[0]))):
        return Reason("no_saving", "unprofitable", "rows that begin anywhere would be read one by one, not several as one")
    if not busy(joined, r, v, hints, target) and all(busy(g, x, v, hints, target) for g, x in zip((a, b), before)):
        return Reason("no_parallelism", "unprofitable", f"{hints.count(r.parallel)} rows")
    return None
