"""A program cut into pieces that a CUDA graph can hold, and the steps between them.

    Split ::= Piece | Step in order           what runs by itself, with the reason, stands in `left`

A piece is a program of its own: it takes the tensors and numbers that its steps name, and returns what later steps read. Steps that belong to no
device (numbers of the host, counters of writes, drops) never end a piece. What ends one: values on another device than the piece's, numbers that a
step reads from memory, calls that wait for the device or whose result's size only the run shows, and what a capture was seen to refuse.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from .graphs import copied
from .program import _WAITING
from .steps import BRACED, Alloc, Call, Copy, Drop, held, Host, Launch, leaves, Let, made, named, Program, read, Ref, Return, Step, with_drops

LEAST = 2               # launches: one alone takes less time than a graph that holds it
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_WORDS = frozenset("abs min max math inf nan float tk_resident if else and or not".split())
_COUNTING = frozenset({torch.autograd.graph.increment_version})         # calls that touch the host's bookkeeping alone
_SINGLE = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default})
_RANDOM_STATE = ("run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state")
_BRANCHES = ("cond", "while_loop", "scan", "associative_scan", "map_impl")


@dataclass(frozen=True, eq=False)
class Piece:
    """`program` takes `tensors`, then numbers, all on `device`; of the tensors it may write those in `written`. `origins`: for each of its steps the
    position of the step that it was in the program that was cut, -1 for others."""
    program: Program
    device: str
    tensors: tuple[str, ...]
    written: tuple[str, ...]
    origins: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Of its kernels and calls, in the program that was cut."""
        return tuple(p for p, s in zip(self.origins, self.program.steps) if isinstance(s, (Launch, Call, Copy)))


@dataclass(frozen=True)
class Left:
    """A kernel or call that no piece holds."""
    position: int
    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Split:
    """`program` as `items`."""
    program: Program
    items: tuple[Piece | tuple[int, Step], ...]
    left: tuple[Left, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(i for i in self.items if isinstance(i, Piece))

    @property
    def total(self) -> int:
        """Kernels and calls."""
        return len(self.left) + sum(len(p.positions) for p in self.pieces)


def split(program: Program, kinds: frozenset[str], refused: Mapping[int, str] | None = None, least: int = LEAST) -> Split:
    """`program` cut. `kinds`: the kinds of device that graphs are recorded on; `refused`: position of a step -> why a capture did not take it. Pieces
    of fewer than `least` launches are left out."""
    facts = _Facts(program, kinds, refused or {})
    runs: list[_Run | tuple[int, Step]] = []
    left: list[Left] = []
    run: _Run | None = None
    for position, step in enumerate(program.steps):
        if isinstance(step, Return) or isinstance(step, Drop):
            continue
        if isinstance(step, Let) or isinstance(step, Call) and step.target in _COUNTING:
            runs.append((position, step))           # moved in front of, or behind, the piece it stands in
            continue
        device, reason = facts.place(position, step)
        if reason:
            left.append(Left(position, _name(step), reason))
        if device is None:
            runs.append((position, step))
            run = None
        elif run is not None and run.device == device:
            run.steps.append((position, step))
        else:
            run = _Run(device, [(position, step)])
            runs.append(run)
    return _assembled(program, runs, left, facts, least)


@dataclass
class _Run:
    device: str
    steps: list[tuple[int, Step]]


class _Facts:
    """Where values are, and what a step needs."""

    def __init__(self, program: Program, kinds: frozenset[str], refused: Mapping[int, str]):
        self.kinds, self.refused = kinds, refused
        self.devices: dict[str, str] = {n: str(d) for n, d in program.devices.items()}
        self.devices.update({n: str(t.device) for n, t in program.constants.items() if isinstance(t, torch.Tensor)})
        self.tensors, self.dtypes = set(self.devices), dict(program.dtypes)
        self.numbers = set(program.inputs) - self.tensors
        self.unknown: set[str] = set()              # values whose sizes only the run shows
        for step in program.steps:
            for name, spec in made(step):
                self.tensors.add(name)
                if spec is not None:
                    self.devices[name], self.dtypes[name] = spec.device, spec.dtype
            if isinstance(step, Let):
                self.numbers.add(step.name)

    def place(self, position: int, step: Step) -> tuple[str | None, str]:
        """(device of the piece that may hold `step`, None for none; why not, for a kernel or call)."""
        found = {self.devices.get(n, "") for n in read(step)} | {s.device if s is not None else "" for _, s in made(step)}
        if isinstance(step, Launch):
            found.add(step.device)
        reason = self.refused.get(position) or self._refusal(step) or self._elsewhere(found)
        if reason:
            self.unknown.update(n for n, _ in made(step) if self._open(step))
            return None, reason if isinstance(step, (Launch, Call, Copy)) else ""
        return next(iter(found)), ""

    def _elsewhere(self, found: set[str]) -> str:
        if "" in found:
            return "it makes something that is no tensor"
        if len(found) != 1:
            return f"it uses memory of {' and '.join(sorted(found)) or 'no device'}"
        device, = found
        return "" if device.split(":")[0] in self.kinds else f"it runs on {device}"

    def _refusal(self, step: Step) -> str:
        texts = names_in(step)
        if texts & self.tensors:
            return "it takes a number from memory, or from another call"
        if not texts <= self.numbers or self.unknown & set(read(step)):
            return "a size that only the run shows"
        if isinstance(step, Call):
            tags, name = getattr(step.target, "tags", ()), _name(step)
            if step.target in _WAITING or torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
                return "it waits for the device"
            if name in _RANDOM_STATE:
                return "it sets the state of random numbers"
            if name in _BRANCHES:
                return "the host decides in it by values of the device"
        return ""

    def _open(self, step: Step) -> bool:
        """Is the size of what `step` makes unknown before it has run?"""
        return isinstance(step, Call) and (torch.Tag.dynamic_output_shape in getattr(step.target, "tags", ()) or not names_in(step) <= self.numbers
                                           or bool(self.unknown & set(read(step))))


def _assembled(program: Program, runs: list, left: list[Left], facts: _Facts, least: int) -> Split:
    """The runs as pieces; those that are too short become steps again."""
    items: list[Piece | tuple[int, Step]] = []
    for run in runs:
        counted = [(p, s) for p, s in run.steps if isinstance(s, (Launch, Call, Copy))] if isinstance(run, _Run) else []
        if not isinstance(run, _Run):
            items.append(run)
        elif sum(_launches(s) for _, s in counted) < least:
            items += run.steps
            left += [Left(p, _name(s), "too few between others to pay for a graph") for p, s in counted]
        else:
            behind = len(run.steps) - next(n for n, (_, s) in enumerate(reversed(run.steps)) if not isinstance(s, Alloc))
            items += [_piece(program, replace(run, steps=run.steps[:behind]), facts), *run.steps[behind:]]
    return Split(program, tuple(items), tuple(sorted(left, key=lambda x: x.position)))


def _launches(step: Step) -> int:
    """How many launches a kernel or call is at least likely to be: an operator of torch's that is neither a product nor pointwise is several."""
    many = isinstance(step, Call) and isinstance(step.target, torch._ops.OpOverload) and torch.Tag.pointwise not in step.target.tags
    return LEAST if many and step.target not in _SINGLE else 1


def _piece(program: Program, run: _Run, facts: _Facts) -> Piece:
    own = dict(made_in := [x for _, s in run.steps for x in made(s)])
    inside = {p for p, _ in run.steps}
    later = {n for p, s in enumerate(program.steps) if p not in inside and p > run.steps[0][0] for n in read(s)}
    outer = dict.fromkeys(n for _, s in run.steps for n in read(s) if n not in own and n not in program.constants)
    numbers = sorted({n for _, s in run.steps for n in names_in(s)})
    results = tuple(Ref(n) for n, _ in made_in if n in later)
    steps = (*with_drops(tuple(s for _, s in run.steps), {n for n in own if n not in later}), Return(results))
    origin = {id(s): p for p, s in run.steps}
    inner = replace(program, name=f"{program.name}_at_{run.steps[0][0]}", inputs=(*outer, *numbers), steps=steps, condition="",
                    dtypes={n: facts.dtypes[n] for n in outer if n in facts.dtypes}, devices={n: facts.devices[n] for n in outer})
    changed = written(program) | {s.name for s in program.steps if isinstance(s, Alloc)}        # a kernel does not say what it writes
    return Piece(inner, run.device, tuple(outer), tuple(n for n in outer if n in changed), tuple(origin.get(id(s), -1) for s in steps))


def joined(cut: Split, functions: Mapping[Piece, Callable[[list], list]]) -> tuple[Program, tuple[int, ...]]:
    """The program that calls `functions` in the places of the pieces; and for each of its steps the position of the step that it was, -1 for
    others."""
    program, numbered, last = cut.program, [], cut.program.steps[-1]
    for item in cut.items:
        if isinstance(item, Piece):
            args = [Ref(n) if n in item.tensors else Host(n) for n in item.program.inputs]
            results = tuple((r.name, None) for r in item.program.steps[-1].items)
            numbered.append((-1, Call(functions[item], (args,), {}, results, False, "a piece that is recorded")))
            counted = tuple(Ref(n) for n in item.written if any(isinstance(s, Copy) and s.target.name == n for s in item.program.steps))
            if counted:         # what a replay writes, autograd is told of here
                numbered.append((-1, Call(torch.autograd.graph.increment_version, (counted,), {}, (), False)))
        else:
            numbered.append(item)
    steps = _hoisted(numbered)
    plain = tuple(s for _, s in steps)
    out = list(with_drops((*plain, last), named(plain) - {*program.constants, *read(last)}))
    while len(out) > 1 and isinstance(out[-2], Drop):           # the return that follows lets go of them
        del out[-2]
    origin = {id(s): p for p, s in steps}
    return replace(program, steps=tuple(out)), tuple(origin.get(id(s), -1) for s in out)


def _hoisted(numbered: list[tuple[int, Step]]) -> list[tuple[int, Step]]:
    """Numbers first, which are made of inputs alone; the host's counting last."""
    rank = lambda s: 0 if isinstance(s[1], Let) else 2 if isinstance(s[1], Call) and s[1].target in _COUNTING else 1
    return sorted(numbered, key=rank)


def marked(piece: Piece, keep: Callable[[], None], share: Callable[[], None]) -> Piece:
    """`piece` as it is recorded: `keep` is called before what makes a result, `share` behind it. No result is a view of another value."""
    results = {r.name for r in piece.program.steps[-1].items}
    steps: list[tuple[int, Step]] = []
    for origin, step in zip(piece.origins, piece.program.steps):
        if any(n in results for n, _ in made(step)):
            step = replace(step, target=_Apart(step.target)) if isinstance(step, Call) else step
            steps += [(-1, Call(keep, (), {}, (), False)), (origin, step), (-1, Call(share, (), {}, (), False))]
        else:
            steps.append((origin, step))
    return replace(piece, program=replace(piece.program, steps=tuple(s for _, s in steps)), origins=tuple(p for p, _ in steps))


@dataclass(frozen=True)
class _Apart:
    """`target`, whose results have memory of their own: those that are views of its arguments are copied."""
    target: Callable

    def __call__(self, *args, **kwargs):
        given = {t.untyped_storage().data_ptr() for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = self.target(*args, **kwargs)
        apart = lambda t: copied(t) if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in given else t
        return type(out)(map(apart, out)) if type(out) in (tuple, list) else apart(out)


# -- what steps name -----------------------------------------------------------------------------------------------------
def names_in(step: Step) -> set[str]:
    """The names in texts that `step` computes on the host."""
    texts: list[str] = []
    if isinstance(step, Alloc):
        texts = [*step.spec.shape, *step.spec.strides, step.nbytes_text]
    elif isinstance(step, Launch):
        texts = [BRACED.sub("", t) for kind, t in step.words if kind in ("int", "float", "addresses")] + list(step.grid or ())
    elif isinstance(step, Call):
        texts = [t for _, s in step.results if s is not None for t in (*s.shape, *s.strides)]
    for leaf in leaves(held(step)):
        if isinstance(leaf, Host):
            texts.append(leaf.text)
        elif isinstance(leaf, Ref):
            texts += [*(leaf.shape or ()), *(leaf.strides or ()), leaf.offset or ""]
    return {n for t in texts for n in _NAME.findall(t)} - _WORDS


def written(program: Program) -> set[str]:
    """The tensors that steps write and did not make."""
    found: set[str] = set()
    for s in program.steps:
        if isinstance(s, Copy):
            found.add(s.target.name)
        elif isinstance(s, Call) and s.target in _COUNTING:
            found.update(read(s))
        elif isinstance(s, Call):
            found.update(_mutated(s))
    return found - {n for s in program.steps for n, _ in made(s)}


def _mutated(step: Call) -> Iterator[str]:
    """The tensors in arguments that the operator's schema says it writes."""
    schema = getattr(step.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = step.args[position] if position < len(step.args) else step.kwargs.get(argument.name)
            yield from (r.name for r in leaves(value) if isinstance(r, Ref))


def _name(step: Step) -> str:
    if isinstance(step, Launch):
        return step.kernel
    if isinstance(step, Copy):
        return f"copy into {step.target.name}"
    target = getattr(step, "target", None)
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", None) or str(target)
