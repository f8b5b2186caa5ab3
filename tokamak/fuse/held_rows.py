"""How much of rows along several axes, and of columns beside each other, one program of a GPU holds in registers: less where it does not lie in one
run of memory, or is folded along more than one axis."""
from __future__ import annotations

from . import sharing
from .axes import Group
from .contraction import held as products
from .cost import Hints
from .lines import WORD, one_run

APART_HELD = 16384      # elements of several rows of 16 bits that do not lie one behind the other which one program holds, fewer where they begin
ANYWHERE_HELD = 4096    # anywhere: the gradient of softmax and of its positions' biases of 103 x 3 x 127 x 127 bf16 16.4 us, 32.7 held, of
                        # 115 x 6 x 255 x 255 92, 217, of 123 x 20 x 52 x 52 18.0, 27.7 (H200); by the estimate of its machine code, at words, of
                        # 91 x 12 x 256 x 256 156, 178 (timed held: 195), of 36 x 8 x 512 x 512 182, 226, but of 64 x 1 x 256 x 256 13.9, 13.0
CROSSED_HELD = 1920     # elements of a matrix that one program holds where it is folded along its rows and along its columns, as the gradients of
                        # adaptive LayerNorm and of its scales: of larger ones programs hold some rows and carry the sums of columns. H200, held
                        # and so, of 879 x 8 x 5596 bf16 452 us, 147, of 3000 x 7 x 768 206, 37.6, of 1774 x 132 x 208 f32 315, 207, of
                        # 1500 x 49 x 96 bf16 48.8, 20.5, of 1283 x 1025 x 31 f16 181, 128, of 4000 x 64 x 32 f32 42.1, 37.9; but of 5000 x 30 x 64
                        # f16 27.7, 33.2, of 5000 x 25 x 60 f32 34.2, 44.4; and the gradients of softmax and of its positions' biases, of nine
                        # matrices of 8 x 436 rows f32 44.4, 49.0, of 6 x 577 104, 114, of 20 x 200 bf16 19.2, 15.1, of 40 x 61 f32 17.0, 14.4
CROSSED_LEAST = 1 << 20  # elements of all of them at least, no partial results of other programs: by the estimate of their machine code GroupNorm's
                        # gradient of 322 x 64 tokens of 640 channels f32 116 us held, 157 so
COLUMNS_HELD = 1024     # elements of columns that are held and folded once, beside sums along them which programs carry: of 16 bits, more of which
                        # would be in pieces of half a sector, and of 32 that begin anywhere; and of 16 bits that begin
COLUMNS_HELD_ANYWHERE = 384     # anywhere. RMSNorm's gradient along the middle, H200, by two kernels and so, of 41 x 405 x 511 f16 43.5 us, 54.3, of
                        # 10 x 700 x 2001 bf16 62.7, 74.0, of 41 x 1805 x 511 f16 134, 346, of 30 x 1100 x 1024 95, 124, of 6 x 2831 x 3456 160, 325,
                        # of 114 x 2452 x 256 bf16 190, 249, of 41 x 1205 x 511 f32 150, 185; but of 41 x 305 x 511 f16 38.9, 31.1, of
                        # 80 x 733 x 512 120, 72, of 41 x 1005 x 512 f32 109, 84; and LayerNorm's of channels, two folds of a column, of
                        # 41 x 768 x 31 x 31 f16 215, 174


def held_together(group: Group, rows: frozenset, hints: Hints) -> int:
    """Elements of all that is read along every one of `rows`."""
    along = {(e.node, e.index) for m in group.members for e in m.loads if rows <= frozenset().union(*(i.axes() for i in e.index))}
    return hints.count(rows) * len(along)


def held_apart(group: Group, rows: frozenset, v, hints: Hints) -> int:
    """The most elements of several rows that one program holds: fewer of 16 bits where they are no one run of memory, and still fewer where those
    along `v` begin at no words of WORD bytes; and fewer that are folded along one axis and along another."""
    much = max(hints.count(m.free | m.bound) for m in group.members) >= CROSSED_LEAST
    most = CROSSED_HELD if v in rows and much and _folded_crosswise(group, rows) else sharing.HELD
    for at, size in {(at, e.dtype.bytes) for e in group.outside if e.dtype.bytes < 4 and rows <= (at := e.offset()).axes()}:
        whole = one_run(at, rows, hints)
        if v in whole and whole < rows:
            most = min(most, APART_HELD if _at_words(at, size, whole, hints) else ANYWHERE_HELD)
    return most


def _at_words(at, size: int, run: frozenset, hints: Hints) -> bool:
    """Do runs along the axes `run` of what lies at the offset `at`, of `size` bytes each, begin at words of WORD bytes?"""
    return all(hints.divides(WORD // size, at.coefficient(a)) for a in at.axes() - run)


def _folded_crosswise(group: Group, rows: frozenset) -> bool:
    """Is what has all of `rows` folded over some of them, and over others, so that programs could hold some rows at a time and carry the other sums?
    Not where such sums go on across programs."""
    folds = {m.bound for m in group.members if m.bound & rows and rows <= m.free | m.bound}
    return bool(folds) and all(f < rows for f in folds) and not frozenset.intersection(*folds) and not products(group)


def columns_held(group: Group, rows: frozenset, v, hints: Hints) -> int:
    """Elements at most of columns beside each other along `v` that a program holds while it carries sums along them."""
    read = {(at, e.dtype.bytes) for e in group.outside if rows <= (at := e.offset()).axes() and at.coefficient(v) == 1}
    words = all(_at_words(at, size, frozenset((v,)), hints) for at, size in read)
    narrow = any(size < 4 for _, size in read)
    return sharing.HELD if words and not narrow else COLUMNS_HELD if words or not narrow else COLUMNS_HELD_ANYWHERE
