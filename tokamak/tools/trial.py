"""One kernel of a plan by itself, under any schedule, on inputs made up: what `tune` builds, compares and times."""
from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..capture.dtypes import TORCH_DTYPES
from ..codegen.host import Part, box_words, host_text, order_word, span
from ..codegen.scope import Unschedulable
from ..codegen.stages import parts
from ..codegen.tile_kernel import Workspace
from ..codegen.tile_parts import lower_tiles
from ..errors import BuildError
from ..fuse.cost import Hints
from ..fuse.sizes import value
from ..ir.expr import Const, Load, walk
from ..ir.index import Fetch
from ..runtime import gpu
from ..runtime.program import Alloc, Launch, Let, Program, TensorSpec, assemble
from ..schedule import tiles
from ..schedule.body import Body, exprs_of, indices_of
from ..schedule.tile_schedule import TileSchedule
from ..target import Target

NORM = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-12}          # of a difference, against the norm
PEAK = 10               # times as much, of the largest difference against the largest value


@dataclass(frozen=True, eq=False)
class Task:
    """A kernel to be tuned. `structure`: what it is known by. `sizes`: the sizes of its graph, as they were when it was traced."""
    name: str
    structure: str
    body: Body
    schedule: TileSchedule
    hints: Hints
    sizes: Mapping[str, int]
    target: Target

    def parts(self, schedule: TileSchedule) -> tuple[Part, ...] | None:
        """Its kernels under `schedule`, and those that fold what it leaves; None where the schedule does not fit."""
        again = lambda rest: tiles.choose(rest, self.hints, self.target)
        try:
            return parts(lower_tiles(self.body, schedule, self.hints, self.target.name, again, self.target.fast))
        except Unschedulable:
            return None

    def nodes(self) -> tuple[list, list]:
        """(all that it reads or writes, what it writes of these)."""
        stores = [*self.body.stores, *([self.body.base] if self.body.base is not None else [])]
        fetched = [x.expr for i in indices_of(self.body) for x in i.atoms() if isinstance(x, Fetch)]
        written = list(dict.fromkeys(s.memory.node for s in stores))
        return list(dict.fromkeys([*written, *(e.node.node for e in walk(*exprs_of(self.body), *fetched) if isinstance(e, Load))])), written


@dataclass(eq=False)
class Trial:
    """A task under one schedule, built."""
    schedule: TileSchedule
    call: object
    spilled: int


@dataclass(eq=False)
class Bench:
    """The memory of a task, filled with numbers, and its trials."""
    task: Task
    cache_dir: str = ""
    values: list[torch.Tensor] = field(default_factory=list)
    fresh: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self):
        self.nodes, self.written = self.task.nodes()
        bounds = self._bounds()
        for n, node in enumerate(self.nodes):
            self.values.append(self._filled(node, bounds.get(node), torch.Generator(self.task.target.name).manual_seed(n)))
        self.fresh = [v.clone() if n in self.written else v for n, v in zip(self.nodes, self.values)]

    def _bounds(self) -> dict:
        """Integers that are used as indices -> what they stay below."""
        found: dict = {}
        for i in indices_of(self.task.body):
            for x in (x for x in i.atoms() if isinstance(x, Fetch)):
                for e in (e for e in walk(x.expr) if isinstance(e, Load)):
                    found[e.node.node] = min(found.get(e.node.node, 1 << 62), value(x.bound, self.task.sizes))
        return found

    def _filled(self, node, below: int | None, generator: torch.Generator) -> torch.Tensor:
        """The flat memory of a node."""
        dtype, count = TORCH_DTYPES[node.dtype], max(value(span(node), self.task.sizes) // node.dtype.bytes, 1)
        device = self.task.target.name
        if dtype.is_floating_point:
            return torch.randn(count, generator=generator, device=device, dtype=dtype)
        return torch.randint(0, max(min(below or 2, 1 << 31), 1), (count,), generator=generator, device=device).to(dtype)

    # -- building ----------------------------------------------------------------------------------------------------------
    def build(self, schedules: list[TileSchedule]) -> dict[TileSchedule, Trial]:
        """Those that fit and compile, built on all cores."""
        lowered = {s: made for s in schedules if (made := self.task.parts(s)) is not None}
        units = {p.unit.name: p.unit for made in lowered.values() for p in made}
        kernels = self._kernels(list(units.values()))
        trials = {}
        for s, made in lowered.items():
            if all(p.unit.name in kernels for p in made):
                spilled = max(getattr(getattr(kernels[p.unit.name], "binary", None), "spilled", 0) for p in made)
                trials[s] = Trial(s, assemble(self._program(made), kernels), spilled)
        return trials

    def _kernels(self, units: list) -> dict:
        if self.task.target.name == "cpu":
            interpreted = importlib.import_module("..runtime.gpu_interpret", __package__).interpreted
            return {u.name: interpreted(u) for u in units}
        try:
            return gpu.kernels(units, self.task.target.arch, cache_dir=self.cache_dir)
        except BuildError:
            if len(units) == 1:
                return {}
            half = len(units) // 2
            return {**self._kernels(units[:half]), **self._kernels(units[half:])}

    def _program(self, made: tuple[Part, ...]) -> Program:
        """One call of the kernels, with memory for what they leave each other."""
        names = {node: f"m{n}" for n, node in enumerate(self.nodes)}
        steps: list = [Let(name, str(n)) for name, n in self.task.sizes.items()]
        errors: list = []
        for part in made:
            k, first = part.kernel, len(errors)
            for node in k.left:
                names[node] = f"w{len(names)}"
                steps.append(Alloc(names[node], _spec(node), host_text(span(node)), "temp"))
            errors += [(RuntimeError, kind) for kind, _ in k.errors]
            words = (*(_word(p, names) for p in k.params), *((("error", ""),) if k.errors else ()), *box_words(k, names))
            steps.append(Launch(part.unit.name, words, first, (host_text(k.grid), "1", "1"), self.task.target.name))
        return Program("trial", tuple(names[n] for n in self.nodes), tuple(steps), tuple(errors))

    # -- running -------------------------------------------------------------------------------------------------------------
    def run(self, trial: Trial) -> None:
        trial.call(list(self.values))

    def results(self, trial: Trial) -> list[torch.Tensor]:
        """What it writes, from the same memory each time. Raises what the launch raises."""
        for v, fresh in zip(self.values, self.fresh):
            if v is not fresh:
                v.copy_(fresh)
        self.run(trial)
        return [v.clone() for n, v in zip(self.nodes, self.values) if n in self.written]


def _spec(node: Workspace) -> TensorSpec:
    return TensorSpec(tuple(map(host_text, node.shape)), tuple(map(host_text, node.strides)), TORCH_DTYPES[node.dtype], node.device)


def _word(p, names: dict) -> tuple[str, str]:
    """A launch's word: memory, a size, a number of the program; a number that a call would give is 1."""
    if p.kind == "memory":
        return "ptr", names[p.source.node]
    if p.kind == "int":
        return "int", host_text(p.source)
    if p.kind == "order":
        return order_word(p.source, names)
    number = p.source.value if isinstance(p.source, Const) else 1
    return ("float", repr(float(number))) if p.kind == "float" else ("int", repr(int(number)))


def equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """The same up to the order of sums: integers exactly, floats by norm and largest difference."""
    return all(_close(g, w) for g, w in zip(got, want, strict=True))


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not want.dtype.is_floating_point:
        return torch.equal(got, want)
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite].nan_to_num(0.0), want[~finite].nan_to_num(0.0)):
        return False
    g, w = got[finite].double(), want[finite].double()
    if not w.numel():
        return True
    most, away = NORM[want.dtype], g - w
    return bool(away.norm() <= most * w.norm()) and bool(away.abs().max() <= PEAK * most * w.abs().max())
