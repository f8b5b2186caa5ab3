"""Kernels: what a printer turns into text. It decides nothing any more: every loop, register, access mode and parameter is named here.

    Kernel ::= Param in order; Phase in order (each finished before the next starts)
    Phase  ::= parallel axes, vector block; `once` (statements a thread runs first); `body` (statements of one parallel iteration); Partial in order
    Item   ::= Loop(axis, items) | statement

Registers hold `lanes` elements; a value that does not depend on the vector axis holds the same in every lane. Integers (`Index`) are over loop
axes and named integers: parameters (n0, n1, ...) and fetched indices (f0, ...). Names are canonical, so equal kernels have equal text whatever
program they come from.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.dtype import DType
from ..ir.index import Axis, Index


@dataclass(frozen=True)
class Param:
    """`kind` 'memory': address of `source`, a Memory; 'int': `source` an Index that the host computes; 'float': `source` a Const or Scalar, a double;
    'value': the same for integers; 'order': which of two places in memory comes first, see `tile_kernel.Boxed`."""
    kind: str
    name: str
    source: object
    dtype: DType | None = None


@dataclass
class Loop:
    """`axis` over `low` .. `high` - 1 (texts are Index). `vector`: a register at a time, ragged end included. `flush`: accumulators whose f32 part
    moves into their f64 part after every `BLOCK` steps (error stays that of short sums). `tiles`: then the loop runs in
    pieces of ROWS steps inside its vector loop, with the tiles filled before each piece. `piece`: it only counts pieces of so many steps, from c to d
    (before the name of `axis`), through which a loop inside runs."""
    axis: Axis
    low: Index
    high: Index
    vector: bool
    items: list = field(default_factory=list)
    flush: list = field(default_factory=list)
    tiles: list = field(default_factory=list)
    piece: int = 0


@dataclass(frozen=True)
class Tile:
    """A piece of memory turned round: ROWS steps of the loop it belongs to by one register of the vector axis. `address` is that of the first
    element; elements are `step` apart along the vector axis and one apart along the loop's axis."""
    name: str
    memory: str
    dtype: DType
    address: Index
    step: Index


@dataclass(frozen=True)
class Let:
    """var = op(args): a row of ir.ops on registers of `dtype`."""
    var: str
    op: str
    dtype: DType
    args: tuple[str, ...]


@dataclass(frozen=True)
class LaneCompare:
    """var = (base + step * lane) op arg, a comparison of i64; `arg` holds the same in every lane, and with step 0 so does var."""
    var: str
    op: str
    base: Index
    arg: str
    step: int = 1


@dataclass(frozen=True)
class LaneDivide:
    """var = arg // by ('floordiv') or arg % by ('mod'): i64 lanes of an index, below 2^52, and an integer above 0."""
    var: str
    op: str
    arg: str
    by: Index


@dataclass(frozen=True)
class Divisor:
    """var, var + 's' = what division of f32 by `arg` multiplies by, the second first: the reciprocal, and a power of two that
    keeps all in range."""
    var: str
    arg: str


@dataclass(frozen=True)
class Quotient:
    """var = arg / what the Divisor `by` stands for, to 1.5 units in the last place."""
    var: str
    arg: str
    by: str


@dataclass(frozen=True)
class Convert:
    """var = args[0] of type `source` as `dtype`."""
    var: str
    dtype: DType
    source: DType
    arg: str


@dataclass(frozen=True)
class Splat:
    """var = the number `text` (a literal or a parameter) in every lane."""
    var: str
    dtype: DType
    text: str


@dataclass(frozen=True)
class IndexValue:
    """var = i64 lanes of base + step * lane, plus the registers `terms` (each (register, factor Index))."""
    var: str
    base: Index
    step: Index
    terms: tuple[tuple[str, Index], ...] = ()


@dataclass(frozen=True)
class Fetch:
    """A checked index: `arg` (i64) must be in 0 .. bound - 1 where `guard` holds, else error `code`; clamped. `scalar`: var is one integer."""
    var: str
    arg: str
    bound: Index
    guard: str | None
    scalar: bool
    code: int


@dataclass(frozen=True)
class Read:
    """var = memory[address]. `mode`: 'splat' (one element), 'unit' (along the vector axis), 'strided' (`step` apart), 'gather' (`at`: i64 register of
    offsets from `address`), 'window' (the same, of lanes that mostly lie near each other), 'around' (along the vector axis from `step`
    on, and from 0 again behind `turn` elements). With `guard` (a bool register) lanes where it is false are not read and are `other`; 'shared' is
    'splat' with a guard that differs between lanes; `even`: it does not, so that all lanes are read or none. `ahead`: the address in the next
    iteration, `span`: elements that an iteration reads there; where that is much, but not too much to be kept, the next iteration's part is asked for
    now, when this one's is read again and so comes from a cache. `total`: elements that the kernel reads there, one after the other; where
    they are many, what lies FAR behind is asked for."""
    var: str
    memory: str
    dtype: DType
    address: Index
    mode: str
    step: Index | None = None
    at: str | None = None
    guard: str | None = None
    other: str | None = None
    ahead: Index | None = None
    span: Index | None = None
    turn: Index | None = None
    total: Index | None = None
    even: bool = False


@dataclass(frozen=True)
class Write:
    """memory[address] = value, modes as in Read. With `monoid` the old value is combined in ('last': replaced); `guard`: only where it holds.
    `total`: elements that the kernel stores there; where they are many they go around the cache. None: never. `widened`: the value is f32,
    what it is added to f64."""
    memory: str
    dtype: DType
    address: Index
    mode: str
    value: str
    step: Index | None = None
    at: str | None = None
    monoid: str | None = None
    guard: str | None = None
    total: Index | None = None
    widened: bool = False


@dataclass(frozen=True)
class Accumulator:
    """Registers that carry a fold: `var` (and var + 'i' for the index of argmax / argmin; var + 'l' and 'h', halves in f64, for f32 sums)."""
    var: str
    monoid: str
    dtype: DType


@dataclass(frozen=True)
class Fold:
    """accumulator = accumulator (+) args. `masked`: in the ragged end of the vector loop the idle lanes count as neutral. `only`: a bool register,
    lanes where it is false count as neutral, and mostly all do."""
    accumulator: Accumulator
    args: tuple[str, ...]
    masked: bool
    only: str | None = None


@dataclass(frozen=True)
class Finish:
    """vars = the fold's components; `across`: lanes are folded together first and the result is in every lane."""
    vars: tuple[str | None, ...]
    accumulator: Accumulator
    across: bool


@dataclass(frozen=True)
class Prefix:
    """var = inclusive prefix: within the register when `along` lanes (the ragged end masked), then with the carried accumulator."""
    vars: tuple[str | None, ...]
    accumulator: Accumulator
    args: tuple[str, ...]
    along: bool


@dataclass(frozen=True)
class Buffer:
    """Scratch of a thread: `size` elements of `dtype` (registers' form)."""
    name: str
    dtype: DType
    size: Index


@dataclass(frozen=True)
class Partial:
    """Partial results of a fold over parallel axes: one copy of `size` elements a thread; f32 sums are kept in f64. `runs`: every iteration adds to
    each element once, so that up to BLOCK iterations are summed in f32 first."""
    name: str
    monoid: str
    dtype: DType
    size: Index
    runs: bool = False


@dataclass(frozen=True)
class PartialUpdate:
    """partial[address] (+)= args, in this thread's copy; 'unit' along the vector axis or 'splat' (one element)."""
    partial: Partial
    address: Index
    mode: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class PartialRead:
    """vars = partial[address] folded over all threads' copies, in order."""
    vars: tuple[str | None, ...]
    partial: Partial
    address: Index
    mode: str


@dataclass(frozen=True)
class RandomValue:
    """var = random numbers of `kind` for counters `index` (i64 register); `seed` an i64 register."""
    var: str
    kind: str
    seed: str
    index: str


@dataclass(frozen=True)
class Refill:
    """`items` are run where the coordinates of `axes` are all 0, and at the beginning of a share: what they fill is the same along these axes."""
    axes: tuple[Axis, ...]
    items: list


@dataclass(frozen=True, eq=False)
class Phase:
    parallel: tuple[tuple[Axis, Index], ...]          # axes and extents, outermost first; the vector axis counts blocks
    vector: Axis | None
    block: int | None
    extent: Index | None                              # of the vector axis
    once: tuple
    body: tuple
    partials: tuple[Partial, ...]
    buffers: tuple[Buffer, ...]
    work: Index                                       # elements, to decide how many threads are worth it
    inside: int = 0                                   # how many of the parallel axes, the last ones, stand inside of the blocks' loop


@dataclass(frozen=True, eq=False)
class Kernel:
    params: tuple[Param, ...]
    phases: tuple[Phase, ...]
    lanes: int
    grain: int
    stream: int                                       # bytes from which a result goes around the cache
    axes: dict                                        # Axis -> loop variable
    errors: tuple[tuple[str, object], ...]            # code n + 1 -> (error kind, the expression's node for its origin)
    sources: dict = field(default_factory=dict)       # register -> the Expr that it holds: for people, no part of the text


ROWS = 128              # steps of a loop that read one tile: long enough stretches of each line, all lines of a tile in the first-level cache
BLOCK = 128             # steps after which an f32 sum moves into f64
NEAR = 32 << 10         # bytes of rows whose columns are folded in registers before what is kept of them is touched, a row at a time / so: sums of
                        # 25088 x 24 0.22 / 0.10 ms on one core, of 25088 x 64 0.38 / 0.33
FEWEST_NEAR = 8         # rows of these at least
AHEAD = (8 << 10, 256 << 10)        # bytes of an iteration that are asked for during the one before: softmax of 4096x4097 9.4 -> 7.9 ms,
                                    # cross-entropy of 512x32000 6.1 -> 4.7; rows of 4 KiB arrive early enough by themselves (5.1 -> 5.6); more
                                    # would not stay in the second level
FAR, FAR_FROM = 6 << 10, 4 << 20    # bytes behind what is read that are asked for, where so many are read from end to end: what is computed is not
                                    # held up by memory then. Ms on two cores of a Xeon, without / with: GELU of 16 Mi elements 8.9 / 2.9 (a copy
                                    # 2.6), of 4096 x 4096 with a bias in bf16 6.9 / 3.9, AdamW 6.3 / 5.0, softmax of 16384 x 1024 5.5 / 4.1,
                                    # LayerNorm of it 4.1 / 3.0; sums the same. 2 KiB and 10 KiB behind do as well
