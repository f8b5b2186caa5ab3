"""Contractions of many rows and columns: the vendor's call with a pass over its result behind, against one kernel that does both.

    Behind ::= node <- calls; bytes       what is computed pointwise from the results of calls, and what fusing it would spare

A kernel's time is counted in tiles: each multiprocessor makes about tiles / multiprocessors of them, which take a step for every 64 of the depth and
something at the end. The vendor's is the same with tiles of its own, of which it takes the best, and at least what memory takes.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..ir.dtype import F32, DType
from ..ir.expr import loads
from ..ir.graph import Compute, Graph, Opaque, Result, elements, is_pointwise, reads, readers_of
from ..ir.index import Axis, Index, as_index, dot
from .boxes import places, plain
from .contraction import Contraction
from .cost import Hints, node_bytes, pinned_nodes, weight
from .reason import Reason
from .sizes import runs_along
from .vendor import Own

STEP = 128              # bytes of a step along the depth
LARGE = 128 * 256       # elements that a program carries, of a tile that it may cut
CUT = {1: 1.0, 2: 0.64, 4: 0.58}        # of a tile's time, what one of so many parts of it takes; us, whole, in halves, in quarters, the last being
#   0.39 of a round: 1024x4096x14336 with a residual 188, 171, 187; 0.21: gate of 1024x4096x11008 261, 244, 242, GELU of 2048x1024x11008 92, 88, 85,
#   a residual of 2048x4096x11008 280, 263, 262; 0.15: gate of 4096x4096x14336 1237, 1226, 1225; 0.61: a ReLU of 1024x4096x11008 132, 140, 151
WAVE = 128              # rows and columns of a tile of the vendor's
DEEP = 32 << 10         # bytes of a depth from which on a vector behind a single wave of them is a pass of its own
SURE = 0.985            # of the vendor's time with its pass: a kernel must promise more than this
OVERLAP = 3             # the larger, the better products and reading hide each other


@dataclass(frozen=True)
class Tile:
    """Of a result: `rows` by `columns`; seconds of a `step` of STEP bytes along the depth and of what is left when it is over (`finish`)."""
    rows: int
    columns: int
    step: float
    finish: float


@dataclass(frozen=True)
class Products:
    """Of a machine, factors of so many `bytes`. `tiles`: of a kernel of ours, `pair`: of two products in one kernel, `paired`: where one descriptor
    reads a factor of both, `start`: seconds besides the tiles. `vendor`: what the library is taken to choose from, `call`: seconds besides;
    `shared`: seconds besides, where it shares out the depth, of which partial results go through memory. `copy`: bytes a second; `factors`: the
    same of products that wait for memory; `beside`: for what a tile's end reads and writes beside its result; `pass_`: seconds of a kernel that
    does next to nothing; `held`: bytes of a result that the cache still has for it; `ragged`: bytes a second of what our kernels write besides where
    rows begin anywhere; `operation`: seconds an operation on one element takes one multiprocessor. `tired`: (share, seconds): by how much the machine
    is slower when it multiplies for longer than that; `vendor_tired`: the same of the vendor's."""
    tiles: tuple[Tile, ...]
    pair: Tile
    paired: Tile
    start: float
    vendor: tuple[Tile, ...]
    call: float
    shared: float
    copy: float
    factors: float
    beside: float
    pass_: float
    held: float
    ragged: float
    operation: float
    tired: tuple[float, float]
    vendor_tired: tuple[float, float]
    bytes: int = 2


# Triton's words for a machine -> what was measured. H200, bf16, device time behind a flushed cache; fitted on 97 cases of grid "gemm" (128 to 8192
# rows, widths of 1024, 4096, 11008, 14336) by the profiler's times, of which it is off by 5%, the vendor's and ours, which are wrong together
# us, 8192x1024x4096 (rows, depth, columns): the vendor 100, a pass behind it 34; in one kernel with a ReLU 107, GELU 121, a residual 130
#   4096x4096x4096: 179 and 16, a ReLU 186, a residual 196; 8192x4096x1024: 91 and 13, a residual 101; gate of 4096x1024x4096: 129, 115 in one kernel
#   of two accumulators, 109 paired; of 4096x4096x14336: 1299, 1323, 1268; of 2048x4096x11008: 507, 498, 478; of 1024x4096x14336: 319, 320, 306
# rows of the result that begin anywhere, us: by us, and by the vendor with whole words and a copy: 4096x1024x50257 672 and 887, 4096x768x50257 571
# and 748, 4096x1024x30522 with a bias 471 and 566, 2048x4096x32001 733 and 942, 8192x1024x1001 with a bias 57 and 92
PRODUCTS: dict[tuple, Products] = {
    ("cuda", 90): Products(
        tiles=(Tile(128, 256, 0.605e-6, 2.5e-6), Tile(128, 128, 0.31e-6, 2.2e-6)), pair=Tile(128, 128, 0.651e-6, 2.7e-6),
        paired=Tile(128, 128, 0.63e-6, 0.35e-6), start=5.7e-6,
        vendor=(Tile(128, 256, 0.657e-6, 1.14e-6), Tile(256, 128, 0.657e-6, 1.14e-6), Tile(128, 192, 0.464e-6, 0.87e-6),
                Tile(192, 128, 0.464e-6, 0.87e-6), Tile(128, 168, 0.44e-6, 0.81e-6), Tile(168, 128, 0.44e-6, 0.81e-6),
                Tile(128, 128, 0.314e-6, 0.77e-6), Tile(64, 256, 0.314e-6, 0.77e-6), Tile(128, 112, 0.3e-6, 0.69e-6), Tile(112, 128, 0.3e-6, 0.69e-6),
                Tile(128, 96, 0.276e-6, 0.58e-6), Tile(96, 128, 0.276e-6, 0.58e-6), Tile(64, 128, 0.243e-6, 0.34e-6),
                Tile(128, 64, 0.243e-6, 0.34e-6), Tile(64, 64, 0.124e-6, 0.17e-6)),
        call=3.8e-6, shared=2.4e-6, copy=4.2e12, factors=4.5e12, beside=3.2e12, pass_=1.8e-6, held=13e6, ragged=8e12, operation=3e-12,
        tired=(0.2, 1170e-6), vendor_tired=(0.253, 1400e-6))}

# the same of f32 in TF32, device time behind a flushed cache, us: 4096x4096x4096, the vendor 345 (with a bias 331) and 33 behind it; in one kernel
# with a ReLU 343, a residual 359; 8192x1024x4096: 177 and 66; 196, 241; 2048x4096x4096: 172 and 18; 178, 186; 512x4096x4096: 51 and 6; 59, 63
TF32: dict[tuple, Products] = {
    ("cuda", 90): replace(
        PRODUCTS["cuda", 90], bytes=4, tiles=(Tile(128, 256, 0.571e-6, 6e-6), Tile(128, 128, 0.335e-6, 4.1e-6)),
        paired=Tile(128, 128, 0.593e-6, 3.2e-6), start=9.3e-6,
        vendor=tuple(replace(t, step=1.008 * t.step, finish=0.985 * t.finish) for t in PRODUCTS["cuda", 90].vendor),
        call=7.2e-6, shared=9.6e-6, vendor_tired=(0.093, 1400e-6))}


def prices(target, kind: DType) -> Products | None:
    """What is known of products of a type on a machine: of 16 bits, or f32 in TF32."""
    return (TF32 if kind is F32 else PRODUCTS).get(target.arch[:2])


@dataclass(frozen=True, eq=False)
class Behind:
    """`node`: pointwise in the results of `calls`, which nothing else computes with. `read`: bytes that it reads besides, `written`: its own where
    something but a fold reads it, `kept`: bytes of the results that something else is handed; `apart`: it is a kernel of its own where it is not
    fused; `operations` an element."""
    node: Compute
    calls: tuple[Opaque, ...]
    read: int
    written: int
    kept: int
    apart: bool
    operations: int


def ours(p: Products, processors: int, sizes: tuple[int, int, int, int], products: int = 1, beside: int = 0,
         operations: int = 0, paired: bool = False) -> tuple[float, Tile]:
    """Seconds of one kernel that makes `products` contractions of these extents (batch, rows, columns, depth), reads and writes `beside` bytes behind
    them and does `operations` on each element; and the tile of its result. `paired`: of two it makes one."""
    b, m, n, k = sizes

    def seconds(t: Tile) -> float:
        end = t.finish + operations * p.operation * t.rows * t.columns
        tiles = b * -(-m // t.rows) * -(-n // t.columns)
        rounds = tiles // processors + (CUT[last(t, tiles, processors, paired)] if tiles % processors else 0)
        factors = p.bytes * b * (m * k + products * k * n) / p.factors
        return _tired(p.tired, p.start + _together(rounds * (-(-k * p.bytes // STEP) * t.step + end), factors)) + beside / p.beside
    return min(((seconds(t), t) for t in (p.tiles if products == 1 else (p.paired if paired else p.pair,))), key=lambda x: x[0])


def last(t: Tile, tiles: int, processors: int, paired: bool = False) -> int:
    """Into how many parts a kernel of ours cuts the tiles of its last round, so that more processors have some."""
    large = t.rows * t.columns * (1 + paired) >= LARGE
    rest = tiles % processors
    whole = not large or tiles < processors or rest == 0 or 2 * rest > processors
    return 1 if whole else 2 if 4 * rest > processors else 4


def ragged(p: Products, processors: int, sizes: tuple[int, int, int, int]) -> float:
    """Seconds of one kernel that makes a contraction of these extents whose rows of the result begin anywhere: no engine writes them, so each element
    is stored by itself."""
    b, m, n, _ = sizes
    return ours(p, processors, sizes)[0] + p.bytes * b * m * n / p.ragged


def vendors(p: Products, processors: int, sizes: tuple[int, int, int, int], shares: tuple[int, ...] = (1, 2, 4, 8)) -> float:
    """Seconds of the vendor's call, which shares out the depth among one of `shares`."""
    b, m, n, k = sizes
    found = []
    for t in p.vendor:
        tiles, steps = b * -(-m // t.rows) * -(-n // t.columns), -(-k * p.bytes // STEP)
        for share in shares:
            if share == 1 or tiles * share <= processors and steps >= 4 * share:
                partial = p.shared + 4 * share * b * m * n / p.beside if share > 1 else 0.0
                found.append(_rounds(tiles * share, processors) * (-(-steps // share) * t.step + t.finish) + partial)
    return _tired(p.vendor_tired, p.call + _together(p.bytes * b * (m * k + k * n + m * n) / p.factors, min(found)))


def vector_apart(p: Products, processors: int, sizes: tuple[int, int, int, int]) -> bool:
    """Is the vendor's product faster without a vector that it adds, with a pass behind that does? It does not share out the depth with one, and with
    one takes longer over a single wave of tiles of a long depth: 2048x14336x1024 in TF32 220 us, without 177 and 7 (H100)."""
    b, m, n, k = sizes
    tiles = b * -(-m // WAVE) * -(-n // WAVE)
    apart = vendors(p, processors, sizes) + 2 * p.bytes * b * m * n / p.copy + p.pass_
    return processors < 2 * tiles <= 2 * processors and k * p.bytes >= DEEP or apart < vendors(p, processors, sizes, (1,))


def _together(a: float, b: float) -> float:
    """Seconds of two things that a kernel does at once, neither quite behind the other."""
    return (a ** OVERLAP + b ** OVERLAP) ** (1 / OVERLAP)


def _rounds(tiles: int, processors: int) -> float:
    """How many tiles a multiprocessor of the vendor's makes: the last ones are faster where some have none."""
    return max(1.0, 0.75 * -(-tiles // processors) + 0.25 * tiles / processors)


def _tired(tired: tuple[float, float], seconds: float) -> float:
    share, long = tired
    return seconds * (1 + share * seconds / (seconds + long))


# -- what to fuse ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Choice:
    """Seconds of what stands `behind` contractions and these together: `kernel`: in one of ours; `vendor`: of its calls, and `passed` of what runs
    behind."""
    behind: Behind
    kernel: float
    vendor: float
    passed: float

    @property
    def fused(self) -> bool:
        return self.kernel < SURE * (self.vendor + self.passed) and len(self.behind.calls) <= 2

    def __str__(self) -> str:
        return f"{micro(self.kernel)} in one kernel, the vendor {micro(self.vendor)} and {micro(self.passed)} behind it"


def choices(p: Products, processors: int, graph: Graph, found: dict[Opaque, Contraction], own: Mapping[Opaque, Own],
            hints: Hints, whole: Mapping[Opaque, Contraction] = MappingProxyType({})) -> list[Choice]:
    """For contractions behind which something is computed pointwise. `own`: what the vendor makes behind some; `whole`: what it makes of parts of
    one call."""
    made = []
    for x in behind(graph, found, hints):
        sizes, products = found[x.calls[0]].sizes(hints), len(x.calls)
        result = products * p.bytes * sizes[0] * sizes[1] * sizes[2]
        passed = (result - min(result, p.held) + x.read + x.written) / p.copy + p.pass_ if x.apart else (x.read + x.written) / p.copy
        kernel, _ = ours(p, processors, sizes, products, _beside(p, x, hints), x.operations, _paired([found[n] for n in x.calls]))
        if any(n in own and own[n].node is x.node for n in x.calls):
            passed = x.read / p.copy if any(own[n].kept is not None for n in x.calls if n in own) else 0.0
        calls = {whole.get(n, n): whole.get(n, found[n]).sizes(hints) for n in x.calls}
        made.append(Choice(x, kernel, sum(vendors(p, processors, s) for s in calls.values()), passed))
    return made


def _beside(p: Products, x: Behind, hints: Hints) -> int:
    """Bytes at the ends of tiles besides the result in the factors' type. Where it is wider, a tile leaves in more parts with less under way: counted
    twice. GPT-2's 4096x4096x1024 of bf16 with a residual, both f32: 69 us; the vendor 43 and 8 behind it."""
    wider = max(0, x.node.dtype.bytes - p.bytes) * hints.extents(x.node.shape)
    return (2 if wider else 1) * (x.read + x.kept + wider)


def fused(p: Products, processors: int, graph: Graph, found: dict[Opaque, Contraction], own: Mapping[Opaque, Own],
          hints: Hints, whole: Mapping[Opaque, Contraction] = MappingProxyType({})) -> dict[Opaque, Reason | None]:
    """None for each contraction that is faster in one kernel with what stands behind it, or why it is not. `own`, `whole`: as for `choices`."""
    made = choices(p, processors, graph, found, own, hints, whole)
    return {n: None if x.fused else Reason("vendor", "unprofitable", str(x)) for x in made for n in x.behind.calls}


def micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us"


def behind(graph: Graph, found: dict[Opaque, Contraction], hints: Hints) -> list[Behind]:
    """What is computed pointwise behind contractions, each call at most once."""
    readers = readers_of(graph)
    pinned, taken, made = pinned_nodes(graph), set(), []
    results = {r: r.opaque for r in graph.nodes if isinstance(r, Result) and r.opaque in found}
    for node in (x for x in graph.nodes if is_pointwise(x)):
        alone = lambda r: [x for x in readers[r] if not isinstance(x, Opaque)] == [node]
        whole = lambda r: _whole(node, r) and _in_step(node, r, found[results[r]])
        mine = [r for r in reads(node) if r in results and results[r] not in taken and alone(r) and whole(r)]
        calls = _alike([results[r] for r in mine], found)
        if not calls:
            continue
        taken.update(calls)
        inside = [r for r in mine if results[r] in calls]
        size = hints.extents(node.shape)
        read = sum(min(node_bytes(r, hints), size * r.dtype.bytes) for r in reads(node) if r not in inside)
        behind_it = readers.get(node, [])
        apart = all(isinstance(x, Opaque) for x in behind_it)
        written = node_bytes(node, hints) if apart or node in pinned or len(behind_it) > 1 else 0
        made.append(Behind(node, calls, read, written, sum(node_bytes(r, hints) for r in inside if r in pinned), apart, weight(node.expr)))
    return made


def _whole(node: Compute, r: Result) -> bool:
    """Does `node` have an element for each of `r`, which it reads there alone?"""
    own = {a for a in node.axes if a.extent != 1}
    found = [e for e in loads(node.expr) if e.node is r]
    return all(e.guard is None and {a for i in e.index for a in i.axes()} == own for e in found) and elements(node) is elements(r)


def _in_step(node: Compute, r: Result, c: Contraction) -> bool:
    """Does all that `node` reads and is lie along the axes that it has for one of `c`'s (batch and position for rows) as along one, so that a kernel
    counts them as one?"""
    if any(a not in {Axis(d, n) for d, n in enumerate(r.shape)} for a in (*c.batch, *c.rows, *c.columns)):       # its axes are pieces of the result's
        return False
    lie = [e.offset() for e in loads(node.expr)] + [dot(map(as_index, node.axes), node.strides)]
    return all(_through(i, at) for e in loads(node.expr) if e.node is r for at in _numbers(c, e.index) if len(at.axes()) > 1 for i in lie)


def _numbers(c: Contraction, index: tuple[Index, ...]) -> list[Index]:
    """Of an element of a contraction's result its coordinate along each batch axis, the number of its row and that of its column."""
    together = [x for axes in (c.rows, c.columns) if (x := places(c, axes)) is not None]
    return [index[a.id] for a in c.batch] + [sum((index[a.id] * n for a, n in x.items()), as_index(0)) for x in together]


def _through(i: Index, at: Index) -> bool:
    """Is `i` made of `at`, a number that several axes make up, and of other axes?"""
    last = next((a for a in at.axes() if at.coefficient(a) == 1), None)
    return last is not None and not (i - i.coefficient(last) * at).axes() & at.axes()


def _alike(calls: list[Opaque], found: dict[Opaque, Contraction]) -> tuple[Opaque, ...]:
    """Those of `calls` that one kernel can make: of one left factor and equal extents, like the first; others are read by it."""
    return tuple(n for n in calls if n is calls[0] or _factor(found[n]) == _factor(found[calls[0]]))


def _paired(calls: list[Contraction]) -> bool:
    """Do the right factors of two contractions lie contiguously along the depth, so that one descriptor may hold both?"""
    factors = [plain(c.right) for c in calls]
    return len(calls) == 2 and all(e is not None and runs_along(e, c.depth) for e, c in zip(factors, calls))


def _factor(c: Contraction):
    """The left factor's memory and all extents."""
    return tuple(e.node for e in loads(c.left)), tuple(a.extent for a in (*c.batch, *c.rows, *c.columns, c.depth))
