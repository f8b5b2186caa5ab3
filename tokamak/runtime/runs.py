"""Kernels that follow each other: one call of the host's for all of them, and one block of memory for small values that only they see.

`grouped` puts the launches of a program that nothing separates into Groups: memory for all is taken before the first, and small memory given back
behind the last. `Layout` has places in one block for small values that kernels alone read: two of them share bytes where no launch needs both, since
a device runs launches of one stream in order. `Run` is a Group at work.
"""
from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .steps import Alloc, Call, Drop, Launch, Program, Step, TensorSpec, ints, is_int, made, read

SMALL = 1 << 20             # bytes: so much may be held for a few kernels longer, and so much a block may take; what torch's allocator calls small
_ALIGN = 512                # as torch's own blocks on GPUs


# -- which launches are one call -----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Group:
    """Launches that are one call, each with its position in the program."""
    launches: tuple[tuple[int, Launch], ...]

    @property
    def device(self) -> str:
        return self.launches[0][1].device


def grouped(program: Program, placed: Collection[str] = (), alone: bool = False) -> tuple[tuple[int, Step | Group], ...]:
    """The steps of `program` with their positions, launches with a grid in Groups: each in one of its own if `alone`. A Group has the position of its
    first launch. What is `placed` in a block is not dropped."""
    sizes, out, group, behind, late = _sizes(program), [], [], [], 0
    for position, step in enumerate(program.steps):
        if isinstance(step, Drop) and step.name in placed:
            continue
        if isinstance(step, Launch) and step.grid is not None and (not group or not alone and step.device == group[0][1].device):
            group.append((position, step))
            continue
        if group and isinstance(step, Drop) and late + sizes.get(step.name, SMALL + 1) <= SMALL:
            behind.append((position, step))
            late += sizes[step.name]
            continue
        if group and not isinstance(step, Alloc):
            out += [(group[0][0], Group(tuple(group))), *behind]
            group, behind, late = [], [], 0
        if isinstance(step, Launch) and step.grid is not None:
            group.append((position, step))
        else:
            out.append((position, step))
    if group:               # of a program that returns nothing
        out += [(group[0][0], Group(tuple(group))), *behind]
    return tuple(out)


def _sizes(program: Program) -> dict[str, int]:
    """Bytes of what the program takes and makes, where they are known."""
    found = {**program.spans, **{s.name: int(s.nbytes_text) for s in program.steps if isinstance(s, Alloc) and is_int(s.nbytes_text)}}
    for step in program.steps:
        if isinstance(step, Call):
            found.update((name, _bytes(spec)) for name, spec in made(step) if spec is not None and spec.static)
    return found


def _bytes(spec: TensorSpec) -> int:
    shape = ints(spec.shape)
    return 0 if 0 in shape else (1 + sum((e - 1) * s for e, s in zip(shape, ints(spec.strides)))) * spec.dtype.itemsize


# -- one block for small values ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Layout:
    """`places`: value -> its first byte in a block of `size` bytes on `device`."""
    device: str
    size: int
    places: Mapping[str, int]


def layout(program: Program) -> Layout | None:
    """The block of `program`: of the device of its first launch with a grid."""
    device = next((s.device for s in program.steps if isinstance(s, Launch) and s.grid is not None), None)
    shown = {n for s in program.steps if not (isinstance(s, Launch) and s.grid is not None) for n in read(s)}
    temporary = [s for s in program.steps if isinstance(s, Alloc) and s.kind == "temp" and s.spec.device == device and s.name not in shown]
    sizes = {s.name: int(s.nbytes_text) for s in temporary if s.spec.static and is_int(s.nbytes_text)}
    spans: dict[str, list[int]] = {}
    for position, step in enumerate(program.steps):
        for name in read(step) if isinstance(step, Launch) else ():
            if name in sizes:
                spans.setdefault(name, [position, position])[1] = position
    places = _places([(*spans[n], n, -(-sizes[n] // _ALIGN) * _ALIGN) for n in spans])
    return Layout(device, max(places[n] + sizes[n] for n in places), places) if len(places) > 1 else None


def _places(wanted: Iterable[tuple[int, int, str, int]]) -> dict[str, int]:
    """First bytes of values (first launch, last launch, name, bytes): the lowest that no other in use has. What would end behind SMALL has none."""
    places: dict[str, int] = {}
    used: list[tuple[int, int, int]] = []           # (begin, end, last launch), by begin
    for first, last, name, size in sorted(wanted):
        used = [u for u in used if u[2] >= first]
        at = 0
        for begin, end, _ in used:
            if at + size <= begin:
                break
            at = max(at, end)
        if size and at + size <= SMALL:
            places[name] = at
            used = sorted([*used, (at, at + size, last)])
    return places


# -- a Group at work -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Word:
    """8 bytes of a packed launch: `constant`, plus the value number `value` of a call. A float has no constant beside a value."""
    constant: int | float = 0
    value: int | None = None


class Run:
    """Launches of kernels (`Placed`, or others with `address`, `launch` and a call of the same meaning), each with its words behind the address.
    `floats`: of each value of a call, is it one? `call(stream, *values)` makes them all."""

    def __init__(self, launches: Sequence[tuple[Any, Sequence[Word]]], floats: Sequence[bool]):
        self.kernels = tuple(kernel for kernel, _ in launches)
        self.words = tuple((Word(kernel.address), *words) for kernel, words in launches)
        self.floats = tuple(floats)
        self.packs = tuple(struct.Struct("=" + "".join("d" if self._float(w) else "q" for w in words)).pack for words in self.words)
        callers = {getattr(kernel.launch, "caller", None) for kernel in self.kernels}
        caller = callers.pop() if len(callers) == 1 else None
        self.call: Callable[..., int] = self.all if caller is None else caller(self)

    def _float(self, word: Word) -> bool:
        return isinstance(word.constant, float) if word.value is None else self.floats[word.value]

    def all(self, stream: int, *values: int | float) -> int:
        return self.rest(0, stream, *values)

    def rest(self, first: int, stream: int, *values: int | float) -> int:
        """The launches from number `first` on, each finished by its kernel where the launcher refuses it."""
        if len(values) != len(self.floats):
            raise TypeError(f"{len(self.floats)} values are expected, not {len(values)}")
        for kernel, words, pack in zip(self.kernels[first:], self.words[first:], self.packs[first:]):
            packed = pack(*[w.constant if w.value is None else values[w.value] + w.constant if w.constant else values[w.value] for w in words])
            if kernel.launch(packed, stream):
                kernel(packed, stream)
        return 0

    def listed(self) -> bytes:
        """The list of the launcher in C."""
        out = struct.pack(f"={2 + len(self.floats)}q", len(self.words), len(self.floats), *self.floats)
        for words, pack in zip(self.words, self.packs):
            fills = [n for at, w in enumerate(words) if w.value is not None for n in (at, w.value)]
            constants = pack(*[0 if w.value is not None and self.floats[w.value] else w.constant for w in words])
            out += struct.pack("=2q", len(words), len(fills) // 2) + constants + struct.pack(f"={len(fills)}q", *fills)
        return out
