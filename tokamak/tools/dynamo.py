"""What Dynamo says of its captures: inputs by the user's names, graph breaks, and why it captured again."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Callable

import torch
from torch import fx

from ..errors import OptionError
from .sources import Source


def uncompiled(fn: Any) -> Callable:
    """The user's function or module, also where torch.compile has wrapped it. Raises OptionError where it is none."""
    if not callable(fn):
        raise OptionError(f"{fn!r} ({type(fn).__name__}) cannot be called: give a module or a function, and its arguments behind it")
    return getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None) or fn


@dataclass(frozen=True)
class Frame:
    """A graph that Dynamo captured. `id` is Dynamo's: '1/2' is the third capture of the second piece of code. `inputs`: the user's names, in calling
    order. `ended`: why the graph ends; `broken`: it is a graph break, at `place`."""
    id: str
    inputs: tuple[str, ...] = ()
    ended: str = ""
    broken: bool = False
    place: Source | None = None


@dataclass(frozen=True)
class Break:
    """Dynamo could not go on in `code` (a function), at `place`: the graph before it, if there is any, is the capture `id`."""
    id: str
    code: str
    place: Source
    reason: str


@dataclass(frozen=True)
class Recompile:
    """Dynamo captured `code` (a function, at `place`) again, because `reason`."""
    id: str
    code: str
    place: Source
    reason: str


def frame_record(gm: fx.GraphModule) -> Frame:
    """The Frame of a graph that Dynamo hands to the backend. One that takes a list of its inputs apart first (compiled autograd) has no names."""
    names = []
    for node in gm.graph.nodes if isinstance(gm, fx.GraphModule) else ():
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            names.append(user_name(getattr(source, "name", "")) or node.name)
    why = getattr(gm, "compile_subgraph_reason", None)
    stack = why.user_stack if why is not None else ()
    place = Source(stack[-1].filename, stack[-1].lineno, stack[-1].line or "") if stack else None
    current = torch._guards.CompileContext.current_compile_id()
    broken = why is not None and why.graph_break
    return Frame(str(current or ""), tuple(names), why.reason if broken else "", broken, place)


def user_name(source) -> str:
    """What the user would write for Dynamo's name of an argument: L['self']._modules['fc']._parameters['weight'] is fc.weight."""
    name = source() if callable(source) else str(source)
    name = re.sub(r"\b[LG]\['(\w+)'\]", r"\1", name)
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name)
    name = re.sub(r"__import_\w+_dot_|___(?:from_numpy|as_tensor)\b", "", name)
    return name.removeprefix("self.")


# -- when the captures are over ------------------------------------------------------------------------------------------
def recompiles(metrics) -> list[Recompile]:
    """The captures among Dynamo's `metrics` that were not the first of their code."""
    place = lambda m: Source(m.co_filename or "", m.co_firstlineno or 0)
    return [Recompile(str(m.compile_id), code_name(m.co_name or ""), place(m), guard_text(m.recompile_reason))
            for m in metrics if getattr(m, "recompile_reason", None)]


def graph_breaks(metrics: list, frames: dict[str, Frame]) -> list[Break]:
    """Where captures ended early. A capture that found nothing before its break has no graph and no Frame: the function that Dynamo makes of the rest
    tells the line; where there is none, the place of a capture that ended alike, since what a function calls is captured behind it."""
    known, found, unknown = torch._dynamo.utils.counters["graph_break"], [], set()
    rest = {m.co_name for m in metrics if m.co_name}
    for m in metrics:
        frame = frames.get(str(m.compile_id))
        code = code_name(m.co_name or "")
        if frame is not None and frame.broken and m.co_name:
            found.append(Break(frame.id, code, frame.place or Source(m.co_filename or "", 0), break_text(frame.ended)))
        elif frame is None and (reasons := [r for r in m.restart_reasons or () if r in known]):
            function = code.split(" ")[0]
            lines = [int(name.rpartition("_")[2]) for name in rest if re.fullmatch(rf"torch_dynamo_resume_in_{re.escape(function)}_at_\d+", name)]
            line = min((n for n in lines if n > _behind(m)), default=0)
            found.append(Break(str(m.compile_id), code, Source(m.co_filename or "", line or m.co_firstlineno or 0), break_text(reasons[0])))
            unknown |= set() if line else {found[-1]}
    alike = {b.reason: b.place for b in reversed(found) if b not in unknown}
    return [replace(b, place=alike.get(b.reason, b.place)) if b in unknown else b for b in found]


def _behind(metric) -> int:
    """The line behind which a capture began: 0 for the start of a function."""
    line = (metric.co_name or "").rpartition("_at_")[2]
    return int(line) if line.isdigit() else 0


def break_text(reason: str) -> str:
    """Dynamo's words for a graph break, without what is for its developers."""
    said = reason.strip().split("\n\n")[0]
    return f"the program branches on a tensor's value ({said})" if said.startswith("generic_jump") else said


def code_name(name: str) -> str:
    """The name of a function; of the rest of one behind a graph break, for which Dynamo makes a function of its own, in words."""
    return re.sub(r"^torch_dynamo_resume_in_(.+)_at_(\d+)$", r"\1 behind line \2", name)


def guard_text(reason: str) -> str:
    """Dynamo's words for a guard that failed, without the capture's number."""
    return re.sub(r"^\d+/\d+: ", "", reason.strip())
