"""Programs as values.

    Program ::= inputs; Step in order
    Step    ::= Let | Alloc | Launch | Call | Copy | Drop | Return

Host integers are Python expression text over the names of inputs and of earlier Lets ("s0*4").
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

RESIDENT = "tk_resident"
BRACED = re.compile(r"\{(\w+)\}")           # a tensor's address in a text of addresses


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's traced description; `shape` and `strides` (in elements) are texts of integers."""
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def static(self) -> bool:
        return all(is_int(t) for t in (*self.shape, *self.strides))


@dataclass(frozen=True)
class Ref:
    """Tensor `name`, or a strided window on it: `offset` in elements, counted from the tensor's own first element."""
    name: str
    shape: tuple[str, ...] | None = None
    strides: tuple[str, ...] | None = None
    offset: str | None = None


@dataclass(frozen=True)
class Host:
    """A number computed on the host."""
    text: str


@dataclass(frozen=True)
class Let:
    """Host number `name`, a size for the most part, is `text`."""
    name: str
    text: str


@dataclass(frozen=True)
class Alloc:
    """Fresh memory for tensor `name`, uninitialised, with exactly `spec`'s strides; `nbytes_text` covers its largest offset.
    `kind`: 'output' (escapes from the call) or 'temp'."""
    name: str
    spec: TensorSpec
    nbytes_text: str
    kind: str = "output"


@dataclass(frozen=True)
class Launch:
    """One kernel call. Each word is ('ptr' | 'temp', tensor name), ('int', text), ('addresses', text: tensor names in braces are their addresses),
    ('kernel', a kernel in C: its function's address),
    ('float', text: the 8 bytes of a double) or, on a GPU, ('error', ''): the address of an int32 that the kernel sets to 1 + the number of its error.
    `grid`: texts of a GPU kernel's numbers of programs, in which RESIDENT stands for how many of them the device runs at once; None: a kernel in C.
    `device`: where it runs; "cpu" with a grid: the interpreter. `note`: for people."""
    kernel: str
    words: tuple[tuple[str, str], ...]
    first_error: int = 0            # where this kernel's errors begin in the program's
    grid: tuple[str, str, str] | None = None
    device: str = "cpu"
    note: str = ""


@dataclass(frozen=True)
class Call:
    """`target(*args, **kwargs)` by torch. `args` hold Ref, Host and plain values, nested in tuples, lists and dicts. `results` has (name or None,
    TensorSpec or None) for each output; `single`: the target returns its one result bare. `reason` says why no kernel was made of it."""
    target: Any
    args: tuple
    kwargs: dict
    results: tuple[tuple[str | None, TensorSpec | None], ...]
    single: bool
    reason: str = ""


@dataclass(frozen=True)
class Drop:
    """The last use of `name` is past."""
    name: str


@dataclass(frozen=True)
class Copy:
    """`target` (an input, mutated by the user's program) receives `source`."""
    target: Ref
    source: Ref


@dataclass(frozen=True)
class Return:
    """The results: Ref, Host, None and plain values."""
    items: tuple


Step = Let | Alloc | Launch | Call | Drop | Copy | Return


@dataclass(frozen=True)
class Blocked:
    """`steps`, which stand one behind the other, do the same as `instead`; nothing else needs what they make, but for the last one's result."""
    steps: tuple[Step, ...]
    instead: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """`inputs`: argument names in calling order; `errors`: what a kernel's result n + 1 raises: (exception class, message);
    `constants`: tensors that the steps name and that are no inputs; `dtypes`: the traced types of inputs, checked where a kernel reads them.
    `condition`: text over inputs that are numbers: the sizes that it is for; "" are all. `devices`: where the inputs are that are tensors; `spans`:
    the bytes from their first element to behind their last, where they are known. `blocked`: steps that `in_blocks` may exchange."""
    name: str
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    errors: tuple[tuple[type, str], ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    condition: str = ""
    devices: dict[str, str] = field(default_factory=dict)
    spans: dict[str, int] = field(default_factory=dict)
    blocked: tuple[Blocked, ...] = ()


def in_blocks(program: Program) -> Program:
    """`program` with its `blocked` steps exchanged. What was dropped among them is dropped behind them, if it is still made."""
    steps = list(program.steps)
    for b in program.blocked:
        first, last = (next(i for i, s in enumerate(steps) if s is at) for at in (b.steps[0], b.steps[-1]))
        gone = {n for s in b.steps for n, _ in made(s)} - {n for s in b.instead for n, _ in made(s)}
        drops = [s for s in steps[first:last] if isinstance(s, Drop) and s.name not in gone]
        steps[first:last + 1] = [*b.instead, *drops]
        steps = [s for s in steps if not (isinstance(s, Drop) and s.name in gone)]
    return replace(program, steps=tuple(steps), blocked=())


# -- what steps name -----------------------------------------------------------------------------------------------------
def read(step: Step) -> list[str]:
    """The tensors that `step` names, those that it makes aside."""
    if isinstance(step, Launch):
        named = {"ptr": lambda name: [name], "temp": lambda name: [name], "addresses": BRACED.findall}
        return [name for kind, text in step.words if kind in named for name in named[kind](text)]
    if isinstance(step, Drop):
        return []
    return [r.name for r in leaves(held(step)) if isinstance(r, Ref)]


def made(step: Step) -> list[tuple[str, TensorSpec | None]]:
    if isinstance(step, Alloc):
        return [(step.name, step.spec)]
    return [(n, s) for n, s in step.results if n is not None] if isinstance(step, Call) else []


def named(steps: Iterable[Step]) -> set[str]:
    """The tensors that `steps` name or make."""
    return {name for step in steps for name in (*read(step), *(n for n, _ in made(step)))}


def with_drops(steps: Sequence[Step], names: set[str]) -> tuple[Step, ...]:
    """`steps` with a Drop behind the last of them that names each of `names`."""
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        last.update((n, position) for n in (*read(step), *(n for n, _ in made(step))) if n in names)
    behind: dict[int, list[Step]] = {}
    for name, position in last.items():
        behind.setdefault(position, []).append(Drop(name))
    return tuple(x for position, step in enumerate(steps) for x in (step, *behind.get(position, ())))


def held(step: Step) -> Any:
    """The values in `step`, nested."""
    if isinstance(step, Call):
        return step.args, step.kwargs
    return (step.target, step.source) if isinstance(step, Copy) else step.items if isinstance(step, Return) else ()


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for v in value:
            yield from leaves(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from leaves(v)
    else:
        yield value


def is_int(text: str) -> bool:
    return text.isdigit() or text[:1] == "-" and text[1:].isdigit()


def ints(texts: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(int(t) for t in texts)
