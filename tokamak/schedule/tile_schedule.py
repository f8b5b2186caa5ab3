"""A TileSchedule: how one Body runs as programs over tiles, on a GPU. A small frozen value that prints.

    dims        the axes that are dimensions of a tile, in order; every other axis is one coordinate at a time
    pieces      for each of them the power-of-two lengths that cover it: one for a looped one (its chunk); a held row axis may have several, since 768
                is 512 + 256 and 1025 is 1024 + 16 masked. Those of a parallel axis cover a block (the grid counts blocks): several where blocks of
                one power of two would leave lanes idle, as 3136 = 2048 + 1024 + 64 does
    looped      row axes that are run through in loops; the other row axes are held in registers
    split       parallel axes that a program runs over in a loop, every so many of them: those that folds cross (programs leave partial results, which
                a second kernel combines), or rows that read something which one program can keep
    programs    how many programs share the split axes
    together    held row axes whose lanes a fold across programs takes together at each of its steps; else each lane is carried for itself
    by_thread   folds across programs carry a lane for each thread, which takes in all that it reads: few registers, many bytes under way; a row of
                lanes for every so many rows in a tile that is folded down its columns
    shift       rows that begin at any element, see Shift
    staged      a row axis that is held in the width it has in memory (`tile_stages`): what is computed from it before a fold is computed again behind
                it; where it is no dimension, each program has one coordinate along it, and what is folded along the others is its own
    sharers     programs, neighbours of a cluster, that share each row: the pieces are those of one of them; or the depth of each tile (`matmul`)
    backward    the first program takes the last block: what the kernel before has read last is still in the cache
    kept        of 64 parts of what a program's loop over split axes reads, those that it reads last, which stay in the cache for the next kernel: the
                others leave it first
    descending  programs that share a row are neighbours of the grid, and the last rows come first: the first ones are still in the cache
    ahead       what a turn of the innermost loop reads is read a turn ahead, into registers
    exact       tiled axes whose pieces cover the extent exactly: no mask
    peeled      blocks of the one tiled axis that are whole need no mask either: the last one is a branch of its own
    measured    it has been tried on the device (`tokamak tune`): what it spills was in its time, and it stays
    registers   the most that a thread may have, so that so many programs as are meant to run at once; 0 leaves it open
    reread      held rows are read anew once what they are folded to is known: from the L1 cache, where registers do not hold them beside column sums
    wide        addresses need 64 bits
    flat        rows of a tile, fewer than its lanes have room for, that lie one behind the other and are read as one run of words (`tile_flat`)
    once        what is read is read once, and next to nothing is written: it may leave the second-level cache before anything else
"""
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from ..ir.index import Axis, Index, as_index
from ..ir.normal import floordiv
from .tile_stages import power

EVEN = 64               # bytes of a piece at least where all pieces of rows are alike of which a tile has several: bf16 RMSNorm of 131072 rows of 112
                        # 16.5 us, softmax of 60000 of 160 11.8, logsumexp of 131072 of 112 12.2, f32 log-softmax of 60000 of 200 24.8; 18.9, 13.5,
                        # 15.5 and 28.5 in pieces of 64 + 32 + 16; but bf16 RMSNorm of 60000 of 80 in pieces of 32 bytes 7.7, 6.7
WASTE = 8               # a masked tail may idle one lane in this many


def alike(pieces: tuple[int, ...]) -> bool:
    """Are there several pieces of an axis, all of one length?"""
    return len(pieces) > 1 and len(set(pieces)) == 1


@dataclass(frozen=True)
class Shift:
    """Rows that begin anywhere are read from their first multiple of `group` elements on, in whole 16-byte words: the last piece of `axis` is what
    lies before it and, from lane `group` on, behind the last whole word. `origin`: where a row begins, as an offset in elements without `axis`."""
    axis: Axis
    group: int
    origin: Index

    @property
    def words(self) -> Index:
        """The most elements of a row that its whole words hold."""
        return floordiv(self.axis.extent, as_index(self.group)) * self.group


@dataclass(frozen=True)
class TileSchedule:
    order: tuple[Axis, ...]
    dims: tuple[Axis, ...]
    pieces: tuple[tuple[Axis, tuple[int, ...]], ...]
    looped: frozenset[Axis]
    split: tuple[Axis, ...]
    programs: int
    exact: frozenset[Axis]
    warps: int
    stages: int = 1
    _: KW_ONLY
    wide: bool = False
    once: bool = False
    unrolled: frozenset[Axis] = frozenset()
    shift: "Shift | None" = None
    staged: "Axis | None" = None
    sharers: int = 1
    registers: int = 0
    together: frozenset[Axis] = frozenset()
    by_thread: bool = False
    reread: bool = False
    backward: bool = False
    kept: int = 0
    flat: int = 0
    ahead: bool = False
    descending: bool = False
    peeled: bool = False
    measured: bool = False

    def __post_init__(self):
        odd = [n for _, sizes in self.pieces for n in sizes if n != power(n)]
        assert not odd, f"pieces of {odd} elements: those of a tile are powers of two"

    def sizes(self, a: Axis) -> tuple[int, ...]:
        """The lengths of the pieces that cover tiled axis `a`."""
        return dict(self.pieces)[a]

    @property
    def abreast(self) -> bool:
        """Does a program take several rows of a tile at once, in equal pieces, into what it carries across them?"""
        return len(self.dims) > 1 and any(a in self.split and alike(sizes) for a, sizes in self.pieces)

    def __str__(self) -> str:
        name = lambda a: f"i{self.order.index(a)}"
        tile = ", ".join(f"{name(a)}:{'+'.join(map(str, sizes))}{'' if a in self.exact else '?'}" for a, sizes in self.pieces)
        parts = [f"tile({tile})"]
        if self.shift is not None:
            parts.append(f"shifted({name(self.shift.axis)} % {self.shift.group})")
        if self.staged is not None:
            parts.append(f"staged({name(self.staged)}{f' / {self.sharers}' if self.sharers > 1 else ''})")
        if self.flat:
            parts.append(f"flat({self.flat})")
        if self.looped:
            parts.append(f"looped({', '.join(name(a) for a in self.order if a in self.looped)})")
        if self.split:
            parts.append(f"split({', '.join(map(name, self.split))} / {self.programs})")
        if self.together:
            parts.append(f"together({', '.join(name(a) for a in self.order if a in self.together)})")
        if self.by_thread:
            parts.append("by_thread")
        most = (f" registers({self.registers})" if self.registers else "") + (" reread" if self.reread else "")
        flags = "".join(f" {name}" for name in ("wide", "once", "backward", "peeled") if getattr(self, name))
        flags += f" kept({self.kept})" if self.kept else ""
        flags += " ahead" if self.ahead else ""
        flags += " descending" if self.descending else ""
        return " ".join((*parts, f"warps({self.warps}) stages({self.stages}){most}{flags}"))


def cover(n: int) -> tuple[int, ...]:
    """Powers of two, longest first, that cover `n` lanes with few idle ones: at most three pieces. A long ragged row is two pieces at least, so that
    half of it needs no mask."""
    found: list[int] = []
    rest = max(n, 1)
    while len(found) < 2 and rest > 16:
        whole = power(rest)
        ragged = whole > rest
        if not ragged or (whole - rest) * WASTE <= n and (found or rest <= 512):
            break
        found.append(whole // 2)
        rest -= whole // 2
    return (*found, power(rest))


def blocks(n: int, most: int) -> tuple[int, ...]:
    """Pieces of one block of those, at most `most` elements each, that cover `n` elements: the longest block that needs no mask, or all of them in
    one block whose last piece is masked; () where there is neither."""
    for count in range(-(-n // most), 4 * -(-n // most) + 1):
        if n % count == 0 and sum(cover(n // count)) == n // count and (count == 1 or cover(n // count)[-1] >= 16):
            return cover(n // count)
    return cover(n) if n <= most else ()


def shifted(n: int, group: int) -> tuple[int, ...]:
    """Pieces for the whole words of a row of `n` elements."""
    words = max(n // group * group, group)
    whole = power(words)
    return (whole,) if (whole - words) * WASTE <= n else cover(words)
