"""Every knob, typed, in one place; the only file that reads the environment.

`Options()` holds the defaults with the environment's choices; `current()` is the innermost `scope`, which is only asked at the border
(`backend`), from where the options travel as an argument.
"""
from __future__ import annotations

import contextlib
import contextvars
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, Literal

from .errors import OptionError

Policy = Literal["fast", "eager", "strict"]
STAGES = {
    "aten": "the graph of aten calls that AOTAutograd traced",
    "capture": "the same as a Graph of the language",
    "simplify": "the Graph rewritten",
    "stream": "chains of folds that would read rows twice, as one fold each",
    "inline": "pointwise producers moved into their readers",
    "contract": "contractions of torch's calls that become kernels, as nodes of the language; the reason beside the others",
    "fuse": "the Plan: groups of values that share a kernel",
    "schedule": "the Body and the schedule of each group",
    "lower": "the Kernel of each group, or the TileKernels that a GPU runs for it",
    "render": "the text of each kernel: C for a CPU, Triton for a GPU",
    "program": "the host's steps",
    "build": "how each kernel was built, and the function that calls them",
}
TOPICS = {
    "graph": "the captured graph of each compile, in the text form of the language",
    "fusion": "the groups, and for every edge that ends in two kernels the reason and its bytes",
    "schedule": "the schedule chosen for each kernel",
    "start": "how the kernels of each graph came to be (compiled, from the cache) and what its stages took",
    "cudagraphs": "what of each program CUDA graphs hold, what is left out and why",
    "output_code": "the C or Triton of each kernel and the Python function that calls them",
}


def _flag(variable: str):
    return field(default_factory=lambda: _read_flag(variable, os.environ.get(variable, "")))


def _on_unless_said(variable: str):
    return field(default_factory=lambda: _read_flag(variable, os.environ.get(variable) or "1"))


def _read_flag(variable: str, text: str) -> bool:
    if text.lower() not in ("", "0", "1", "true", "false", "on", "off", "yes", "no"):
        raise OptionError(f"{variable}={text}: give 0 or 1")
    return text.lower() in ("1", "true", "on", "yes")


def _default_cache() -> str:
    chosen = os.environ.get("TOKAMAK_CACHE_DIR")
    if chosen is not None:
        return chosen
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tokamak")


def ptxas() -> str:
    """Triton's own knob: where NVIDIA's assembler is, at this moment; '' says nothing."""
    return os.environ.get("TRITON_PTXAS_PATH", "")


@dataclass(frozen=True)
class Options:
    """What a compile can be told. Raises OptionError for a value that a knob cannot have."""
    policy: Policy = "fast"                                     # numbers: see the three policies in the documentation
    strict: bool = _flag("TOKAMAK_STRICT")                      # an internal error raises instead of running the graph eagerly
    check: bool | str = _flag("TOKAMAK_CHECK")                  # every call is compared with the reference; "report": the recorder gets its values
    logs: frozenset[str] = field(default_factory=lambda: frozenset(t.strip() for t in os.environ.get("TOKAMAK_LOGS", "").split(",") if t.strip()))
    cache_dir: str = field(default_factory=_default_cache)      # built kernels; "" keeps none
    cc: str = field(default_factory=lambda: os.environ.get("TOKAMAK_CC", ""))      # the C compiler's command; "" looks for one
    progress: bool = _on_unless_said("TOKAMAK_PROGRESS")        # a build of more than a second says on a terminal how far it is
    streaming: bool = True                                      # chains of folds become one fold where that saves a pass over memory (GPUs)
    tuned: bool = True                                          # schedules found for this device, by `tokamak tune` or machine code
    pool: bool = True                                           # large outputs come from blocks that are used again
    cudagraphs: bool = False                                    # programs on GPUs are recorded and replayed: fewer launches (mode="reduce-overhead")
    until: str | None = None                                    # the last stage to run; the graph then runs eagerly
    recorder: Any = None                                        # a `tools.record.Recorder` that keeps what every stage made
    # products of matrices: by their prices; all by the vendor's library; kernels where possible
    contractions: Literal["", "vendor", "kernels"] = ""
    # "": the device of the values; "interpret": Triton's interpreter on the CPU, slow, for tests
    target: Literal["", "interpret"] = ""
    opaque_only: bool = False                                   # every operation is a call of torch: the oracle of the tests

    def __post_init__(self):
        if isinstance(self.logs, str):
            object.__setattr__(self, "logs", frozenset(t.strip() for t in self.logs.split(",") if t.strip()))
        topics = tuple(self.logs) if isinstance(self.logs, Iterable) else (None,)
        if not all(isinstance(t, str) for t in topics):
            raise OptionError(f"logs={self.logs!r}: topics, of {', '.join(TOPICS)}")
        object.__setattr__(self, "logs", frozenset(topics))
        for name, allowed in (("policy", get_args(Policy)), ("until", (None, *STAGES)), ("target", ("", "interpret")),
                              ("contractions", ("", "vendor", "kernels")), ("check", (True, False, "report"))):
            one_of(name, getattr(self, name), allowed)
        for name in ("cache_dir", "cc"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"{name}={getattr(self, name)!r}: a string, {'a folder' if name == 'cache_dir' else 'a command'} or empty")
        for topic in self.logs:
            if topic not in TOPICS:
                raise OptionError(f"there is no log topic '{topic}': {', '.join(TOPICS)}{_nearest(topic, TOPICS)}")
        for name in ("strict", "progress", "streaming", "tuned", "pool", "cudagraphs", "opaque_only"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r}: True or False")
        if self.recorder is not None and not hasattr(self.recorder, "graphs"):
            raise OptionError(f"recorder={self.recorder!r}: a tokamak.tools.record.Recorder; `with tokamak.recording() as seen:` makes one")

    def change(self, changes: Mapping[str, Any]) -> "Options":
        """These options with `changes`; OptionError when a name is unknown."""
        known = [f.name for f in fields(self)]
        if not isinstance(changes, Mapping):
            raise OptionError(f"options={changes!r}: a dictionary from option to value, such as {{'policy': 'eager'}}")
        for name in changes:
            if name not in known:
                raise OptionError(f"there is no option '{name}'{_nearest(name, known)}; the options are {', '.join(known)}")
        return replace(self, **changes)


def one_of(name: str, value: Any, allowed: Iterable) -> None:
    """Raises OptionError when `value`, which the user gave for `name`, is none of `allowed`."""
    if not any(value is a or value == a and type(value) is type(a) for a in allowed):
        raise OptionError(f"{name}={value!r}: one of {', '.join(map(repr, allowed))}{_nearest(value, allowed)}")


def _nearest(name, known) -> str:
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


_scope: contextvars.ContextVar[Options | None] = contextvars.ContextVar("tokamak_options", default=None)


_everywhere: Options | None = None


def current() -> Options:
    """The options of the innermost `scope` of this thread, else those of `everywhere`, else the defaults and the environment."""
    return _scope.get() or _everywhere or Options()


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """Within it the current options are also those of threads that have none of their own."""
    global _everywhere
    before, _everywhere = _everywhere, current()
    try:
        yield
    finally:
        _everywhere = before


@contextlib.contextmanager
def scope(**changes) -> Iterator[Options]:
    """Within it compiles of this thread start from the current options with `changes`."""
    token = _scope.set(current().change(changes))
    try:
        yield _scope.get()
    finally:
        _scope.reset(token)
