"""What lowering to tiles makes: kernels of a GPU as statements in Triton, by levels."""
from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.dtype import DType
from ..ir.index import Index, as_index
from ..schedule.body import Body, Memory
from ..schedule.tile_schedule import TileSchedule
from .kernel import Param


@dataclass(eq=False)
class Scope:
    """Statements at one level. `open`: the axes that have a coordinate here."""
    lines: list
    open: frozenset
    parent: "Scope | None" = None
    memo: dict = field(default_factory=dict)

    def chain(self):
        s = self
        while s is not None:
            yield s
            s = s.parent


@dataclass
class For:
    head: str
    lines: list


@dataclass(frozen=True)
class Value:
    """A register. `dims`: the tiled axes it differs along; a `block` has a dimension for every tiled axis, others are single numbers."""
    var: str
    dims: frozenset
    scope: Scope
    block: bool


@dataclass(frozen=True, eq=False)
class TileKernel:
    """`grid`: programs in all, as an Index. `sources`: register -> the Expr that it holds, for people. `spaces`: workspace nodes that it fills
    with what its programs carry; `fills`: those that stores of its body do, and what their elements are.
    `programs`: how many for the sizes as they were traced; 0 where it was not asked.
    `aligned`: names of integer parameters that are multiples of 16. `boxes`: its descriptors, parameters behind the others. `otherwise`: the same
    kernel, with the same other parameters, for calls whose memory is aligned to less."""
    params: tuple[Param, ...]
    lines: tuple
    grid: Index
    schedule: TileSchedule
    body: Body
    errors: tuple
    sources: dict
    spaces: tuple
    aligned: frozenset[str]
    boxes: "tuple[Boxed, ...]" = ()
    otherwise: "TileKernel | None" = None
    fills: tuple = ()
    programs: int = 0

    @property
    def left(self) -> tuple:
        """The workspaces that need memory before it runs."""
        return (*(node for _, _, nodes in self.spaces for node in nodes), *(node for node, _ in self.fills))


@dataclass(frozen=True, eq=False)
class Boxed:
    """A parameter that is a descriptor of tiles of `block` elements of `memory`, from element `offset` on. `beside`: of as many elements of another
    memory, from another element on, in the same steps; then the first of `extents` and of `block` is 2, and the first of `strides` unused: the step
    from the one to the other is a fact about addresses. The lower one comes first; a parameter of kind 'order', whose source is both places, says
    which: 0 the first, 16 the other; 1 where one descriptor cannot hold both. `rounds`: f32 is rounded to TF32 on its way."""
    name: str
    memory: Memory
    offset: Index
    extents: tuple[Index, ...]
    strides: tuple[Index, ...]
    block: tuple[int, ...]
    beside: tuple[Memory, Index] | None = None
    rounds: bool = False


@dataclass(frozen=True, eq=False)
class Workspace:
    """Scratch memory between two kernels of one group."""
    shape: tuple[Index, ...]
    dtype: DType
    device: str
    strides: tuple[Index, ...] = (as_index(1),)
