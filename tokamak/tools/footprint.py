"""The memory that compiled graphs need, read off their programs: an estimate, before anything has run.

A program takes memory where it allocates and where a call of torch returns something new, and lets go of it behind the last use. What a forward graph
returns for its backward graph is held in between. What is not known: memory that torch's calls take for themselves, and what allocators round up to.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..runtime.program import Alloc, Call, Copy, Drop, Launch, Program, Ref, Return, TensorSpec
from .aten import output_nodes
from .limits import phase_of
from .record import GraphRecord

UNSEEN = 64         # a size that torch has seen no value of, as elsewhere


@dataclass(frozen=True)
class Held:
    """Bytes held beyond what stood before the step, once the program of `graph` has taken what the step at `position` needs."""
    graph: str
    position: int
    bytes: int


class Sizes(dict):
    """Sizes by name; UNSEEN for what has none."""

    def __init__(self, known: Mapping[str, int]):
        super().__init__(known, min=min, max=max)

    def __missing__(self, name: str) -> int:
        return UNSEEN

    def number(self, text: str) -> int:
        return int(text) if text.lstrip("-").isdigit() else int(eval(text, {"__builtins__": {}}, self))


@dataclass
class Memories:
    """The memories that hold values at a moment: value -> its memory, memory -> bytes. Values that are views of one memory keep it together."""
    of: dict[str, str]
    bytes: dict[str, int]

    def __post_init__(self):
        self.users = Counter(self.of.values())

    def keep(self, name: str, memory: str) -> None:
        """A value is held in `memory` from now on."""
        self.users[self.of.get(name)] -= 1
        self.of[name] = memory
        self.users[memory] += 1

    def let_go(self, names: Iterable[str]) -> int:
        """Bytes of the memories that `names` were the last to keep."""
        gone = [self.of.pop(n) for n in names if n in self.of]
        self.users.subtract(gone)
        return sum(self.bytes.pop(m, 0) for m in set(gone) if not self.users[m])


def predicted(records: Sequence[GraphRecord]) -> tuple[Held, ...]:
    """What is held at each allocation and kernel of a step: forward graphs in order, their backward graphs in the opposite order, the optimizer's."""
    ran = [r for r in records if "program" in r.values and not r.eager]
    stepped = [r for r in ran if phase_of(r) == "optimizer"]
    backward = [r for r in ran if r.kind == "backward" and r not in stepped]
    ahead = [r for r in ran if r.kind != "backward" and r not in stepped]
    saved: dict[int, Memories] = {}
    out: list[Held] = []
    total = 0
    for r in (*ahead, *reversed(backward), *stepped):
        given = saved.get(id(r.frame)) if r.kind == "backward" else None
        total, kept = _run(r, total, given or Memories({}, {}), out)
        if r.kind == "forward":
            saved[id(r.frame)] = kept
        elif r in stepped:
            total -= sum(kept.bytes.values())
    return tuple(out)


def _run(record: GraphRecord, total: int, given: Memories, out: list[Held]) -> tuple[int, Memories]:
    """Runs a program on `total` bytes, of which it may let go the inputs that are `given`. Returns (bytes held behind it, what it returns by the
    names that it has as another graph's input)."""
    program: Program = record.values["program"]
    sizes, held = Sizes(record.values["capture"].hints), Memories({n: given.of[n] for n in program.inputs if n in given.of}, dict(given.bytes))
    for position, step in enumerate(program.steps):
        for name, nbytes, base in taken(step, sizes):
            held.keep(name, held.of.get(base, base) if base else f"{record.name}:{name}")
            if not base:
                held.bytes[held.of[name]] = nbytes
                total += nbytes
        if isinstance(step, (Alloc, Launch, Call, Copy)):
            out.append(Held(record.name, position, total))
        if isinstance(step, Drop):
            total -= held.let_go([step.name])
        if isinstance(step, Return):
            returned = {i.name for i in step.items if isinstance(i, Ref)}
            total -= held.let_go([n for n in held.of if n not in returned])
            names = [getattr(n, "name", "") for n in output_nodes(record.values["aten"])]
            return total, Memories({n: held.of[i.name] for n, i in zip(names, step.items) if isinstance(i, Ref) and i.name in held.of},
                                   held.bytes)
    return total, held


def taken(step, sizes: Sizes) -> Iterator[tuple[str, int, str]]:
    """(name, bytes, '') of what a step of a program takes; (name, 0, argument) of a result that shares memory with an argument."""
    if isinstance(step, Alloc):
        yield step.name, sizes.number(step.nbytes_text), ""
    elif isinstance(step, Call):
        returns = getattr(getattr(step.target, "_schema", None), "returns", ())
        base = next((a.name for a in step.args if isinstance(a, Ref)), "")
        for n, (name, spec) in enumerate(step.results):
            if name is not None and spec is not None:
                shared = n < len(returns) and returns[n].alias_info is not None
                yield name, spec_bytes(spec, sizes), base if shared else ""


def spec_bytes(spec: TensorSpec, sizes: Sizes) -> int:
    """Bytes from a tensor's first element to behind its last."""
    shape, strides = ([sizes.number(t) for t in texts] for texts in (spec.shape, spec.strides))
    return 0 if 0 in shape else (1 + sum((e - 1) * s for e, s in zip(shape, strides))) * spec.dtype.itemsize


def peak(found: Sequence[Held]) -> int:
    return max((h.bytes for h in found), default=0)
