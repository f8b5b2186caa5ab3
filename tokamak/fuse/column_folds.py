"""Columns that programs of a GPU fold a row at a time, and write on the way; rows that are shared out where there are few columns."""
from __future__ import annotations

from ..ir.expr import Reduce
from ..ir.index import Index, as_index
from .axes import Group, fold_of
from .cost import Hints, contiguous_axis
from .legal import Roles
from .sharing import WORDS

DOWN = 4088             # columns from which on programs that sum them beside what they write take blocks of 4096, a row at a time: 95% where tiles
                        # of 64 columns reach 60. Gradients of a bias and a GELU of 16383 rows of 4095 bf16 119 us, 183 in two kernels
LEAST_DOWN = 1016       # the same where rows begin anywhere, and where the columns are nearly a power of two: bf16 65535 rows of 1025 128 us, 254 in
                        # two kernels, f32 32767 of 1025 112, 165; bf16 65536 of 1024 104, 105; of 1536 a quarter more, with idle lanes in a block
EACH_DOWN = 1 << 16     # elements of each multiprocessor at least then: about eight rows to a program
WALKED = 32             # rows at most of columns that a program folds and writes on the way, WALKED_FROM columns at least: RMSNorm backward of 16
WALKED_FROM = 32768     # rows of 65537 f32 10.8 us, of 131072 f16 9.9, of 32 of 131072 f32 25.5 and of 262143 f16 33.6; 13.0, 12.5, 28.4 and 38.6
                        # by programs that share the rows and leave partial sums
WALKED_OF = 256         # rows of each of several matrices, so many columns in all: modulation's gradient, H200, of 900 x 5 x 5569 f16 54.5 us, of
                        # 94 x 48 x 5569 52.9, of 23 x 192 x 5569 53.3, of 25191 x 7 x 257 97, of 500 x 5 x 8191 f32 73.5, of 26 x 96 x 8191 66.3, of
                        # 26 x 96 x 8192 63.0, of 64 x 256 x 1152 bf16 32.8; 220, 89, 116, 157, 199, 100, 69.4 and 42.2 shared
ALONE_EACH = 4096       # elements for each multiprocessor from which on few long rows are summed by themselves, and their columns where the gradient
                        # is written: LayerNorm backward of 16 and 64 rows of 131072 bf16 10.9 and 32.9 us, of 8 of 262144 11.5, of 32 of 131073 22.3,
                        # f32 of 16 of 65536 11.7; 15.9, 46.0, 14.4, 33.0 and 13.8 with both sums in one kernel. Of 4 of 65536 8.2, 7.6
UNCUT = 512             # rows one behind the other up to which a program holds them all and folds them, whatever the words; where sums cross its
WIDE = 4                # programs, too, of 4-byte elements alone: RMSNorm along the middle, H100, of 300 x 64 x 500 bf16 18.8 us, of 500 x 48 x 1023
                        # f16 53, of 431 x 130 x 402 f32 82.8 and backward 144; 31.5, 73, 101.6 and 290 in kernels that read whole words; but of
                        # 16 x 1024 x 4095 bf16 225, 160, backward of 300 x 64 x 500 65, 57
SHARED_FROM = 16 << 20  # bytes of columns from which on programs share out their rows, however many columns there are


def shares_columns(group: Group, r: Roles, v, hints: Hints) -> bool:
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


def folds_elsewhere(a: Group, b: Group, hints: Hints) -> bool:
    """Does `a` fold large columns, and `b` something along other axes?"""
    over = _columns(a, contiguous_axis(a, hints), hints)
    return bool(over) and any(m.bound and m.bound != over for m in b.members)


def walked(r: Roles, v, hints: Hints) -> bool:
    """Does a program walk down columns that it folds, and write them on the way, more rows than it holds of many columns?"""
    down = _written_down(r)
    return v in r.parallel and bool(down) and not (_holds_columns(down, v, hints) or _holds_matrices(r, down, hints))


def _written_down(r: Roles) -> frozenset:
    """The axes down which a program folds and writes on the way; none where it does not do both."""
    down = frozenset(a for m in r.local for a in m.bound) - r.parallel
    return down if any(down & m.free and not m.bound for m in r.local) else frozenset()


def _holds_columns(down: frozenset, v, hints: Hints) -> bool:
    """Are columns short and many, so that a program holds some?"""
    return _known(down, WALKED, hints) and hints(v.extent) >= WALKED_FROM


def _holds_matrices(r: Roles, down: frozenset, hints: Hints) -> bool:
    """The same of columns of several matrices, of which nothing is left to fold."""
    return not r.accumulating and len(r.parallel) > 1 and _known(down, WALKED_OF, hints) and hints.count(r.parallel) >= WALKED_FROM


def _known(down: frozenset, most: int, hints: Hints) -> bool:
    """Do columns lie down one axis of so many rows at most, how many is known?"""
    return len(down) == 1 and hints.exactly(next(iter(down)).extent) is not None and hints.count(down) <= most


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


def _only_summed(r: Roles, columns: frozenset, hints: Hints) -> bool:
    """Are the columns of several matrices only summed, beside what is made of each element? H200, modulation's gradient by one kernel and by two: of
    1515 x 408 x 33 bf16 66.9 us, 76.1, of 500 x 400 x 129 69.7, 82.5, of 30 x 5000 x 33 19.3, 21.3, of 10 x 20000 x 97 53.3, 58.7, of 100 x 400 x 513
    f16 55.8, 62.9, snake's of planes of 403 x 128 x 20 x 20 bf16 60.0, 91.9; but by the estimate of its machine code of one matrix, a scale's
    gradient of 100000 x 65 f16, 35, 32."""
    return hints.count(r.parallel - columns) > 1 and not any(m.bound for m in r.local)


def cuts_lines(r: Roles, v, hints: Hints, target) -> bool:
    """Would a fold, within the same program, over rows of `v` that lie one behind the other make accesses short, which are 16-byte words along
    both? Not where long columns are summed beside what is written: those are read in whole words, wherever they begin."""
    crossed = {a for m in r.accumulating for a in m.bound}
    if crossed and walks_down(v.extent, hints.count(crossed), hints, target) and any(crossed | {v} <= m.free and not m.bound for m in r.local):
        return False
    if _holds_columns(_written_down(r), v, hints) or crossed and _only_summed(r, crossed | {v}, hints):
        return False
    for m in r.local:
        for e in m.loads:
            offset = e.offset()
            behind = [a for a in offset.axes() - (r.parallel - crossed) if offset.coefficient(a) is as_index(v.extent)]
            if offset.coefficient(v) == 1 and behind and not hints.divides(max(16 // e.dtype.bytes, 1), v.extent):
                written = any(not x.bound and v in x.free and not x.free.isdisjoint(behind) for x in r.local)
                if written and hints.count(behind) <= UNCUT and (not crossed or e.dtype.bytes >= WIDE):
                    continue
                if any(a in m.free and hints.divides(max(16 // e.dtype.bytes, 1), a.extent * v.extent) for a in behind):
                    return True
    return False
