"""Programs that run as recordings: cut into pieces, each a `Recorded`, with what no recording holds between them.

What a capture refuses is left out from then on: the program is cut again around it. After `TRIES` of that it runs as if nothing was recorded.
"""
from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from .graphs import Boxed, Counts, Recorded, Recorder
from .pieces import Left, Piece, joined, marked, split
from .program import Call, Program, Watch, assemble

TRIES = 8


def _cuda(device: str) -> Recorder:
    from .cuda_graphs import recorder
    return recorder(device)


RECORDERS: dict[str, Callable[[str], Recorder]] = {"cuda": _cuda}           # kind of device -> what gives the recorder of one


@dataclass(frozen=True)
class Coverage:
    """What of a program is recorded. `pieces`: how many kernels and calls each holds; `left`: those that run by themselves, with the reason;
    `counts`: what calls came to so far, a piece each."""
    pieces: tuple[int, ...]
    left: tuple[Left, ...]
    counts: tuple[Counts, ...] = ()

    @property
    def held(self) -> int:
        return sum(self.pieces)

    @property
    def total(self) -> int:
        return self.held + len(self.left)

    def __str__(self) -> str:
        out = f"{self.held} of {self.total} kernels and calls in {len(self.pieces)} graph{'' if len(self.pieces) == 1 else 's'}"
        reasons: dict[str, list[str]] = {}
        for x in self.left:
            reasons.setdefault(x.reason, []).append(x.name)
        if reasons:
            out += "; left out: " + "; ".join(f"{', '.join(dict.fromkeys(names))} ({reason})" for reason, names in reasons.items())
        return out

    def calls(self) -> str:
        """What the calls so far came to, in words."""
        total = {f: sum(getattr(c, f) for c in self.counts) for f in ("recordings", "replays", "plain", "dropped", "copied", "seconds")}
        return (f"{total['recordings']} recorded in {total['seconds']:.2f} s, {total['replays']} replays, {total['plain']} plain calls, "
                f"{total['dropped']} recordings dropped, {total['copied'] / 2**20:.1f} MiB copied")


class Graphed:
    """`program` as a function that replays recordings. Arguments as for `assemble`; `paused()`: are the calls of now to run plainly?"""

    def __init__(self, program: Program, kernels: Mapping[str, Any], *, synchronous: bool = False, watch: Watch | None = None,
                 other: Boxed | None = None, pool=None, paused: Callable[[], bool] | None = None,
                 recorders: Mapping[str, Callable[[str], Recorder]] = RECORDERS):
        self.program, self.synchronous, self.watch, self.paused, self.recorders = program, synchronous, watch, paused, recorders
        self.assemble = partial(assemble, kernels=kernels, pool=pool)
        self.other = other
        self.refused: dict[int, str] = {}
        self.failures, self.warned = 0, False
        self.lock = threading.Lock()
        self.recorded: tuple[Recorded, ...] = ()
        self._cut()

    @property
    def coverage(self) -> Coverage:
        return Coverage(tuple(len(p.positions) for p in self.cut.pieces), self.cut.left, tuple(r.counts for r in self.recorded))

    def call(self) -> Boxed:
        """A plain function that runs the program as it stands."""
        def run(args: list) -> list:
            return self.fn(args)
        run._boxed_call = True
        return run

    def _cut(self) -> None:
        for r in self.recorded:
            with r.recorder.lock:
                r.clear()
        self.cut = split(self.program, frozenset(self.recorders) if self.failures < TRIES else frozenset(), self.refused)
        made = {piece: self._recorded(piece) for piece in self.cut.pieces}
        self.recorded = tuple(made.values())
        outer, origins = joined(self.cut, made) if made else (self.program, tuple(range(len(self.program.steps))))
        self.fn = self.assemble(outer, synchronous=self.synchronous, watch=self._watching(origins), other=self.other)

    def _recorded(self, piece: Piece) -> Recorded:
        recorder = self.recorders[torch.device(piece.device).type](piece.device)
        inner = self.assemble(piece.program, synchronous=self.synchronous, watch=self._watching(piece.origins))
        names, at = piece.program.inputs, [-1]

        @cache
        def capture() -> Boxed:
            """What is recorded, which tells how far it came."""
            as_recorded = marked(piece, recorder.keep, recorder.share)

            def noting(position: int, function: Callable) -> Callable:
                def run(*args, **kwargs):
                    at[0] = as_recorded.origins[position] if as_recorded.origins[position] >= 0 else at[0]
                    return function(*args, **kwargs)
                return run
            return self.assemble(as_recorded.program, watch=noting)
        written = frozenset(names.index(n) for n in piece.written)
        return Recorded(inner, recorder, len(piece.tensors), written, capture, self._probing(piece, recorder),
                        lambda error: self._failed(piece, at[0], error), self.paused, self.synchronous)

    def _probing(self, piece: Piece, recorder: Recorder) -> Boxed:
        """The piece's first call, in which each call of torch is asked whether it waits for the device."""
        found: list[int] = []

        def looked(position: int, function: Callable) -> Callable:
            def run(*args, **kwargs):
                out, waited = recorder.waited(lambda: function(*args, **kwargs))
                found.extend([piece.origins[position]] if waited else [])
                return out
            return run if isinstance(piece.program.steps[position], Call) else function

        def probe(args: list) -> list:
            fn = self.assemble(piece.program, synchronous=self.synchronous, watch=looked)
            out = fn(args)

            def pending(fn=fn) -> None:         # while it is asked, `fn` lives, whose end would be the end of its words
                fn.pending()
            probe.pending = pending if fn.pending is not None else None
            if found:
                with recorder.lock, self.lock:
                    self.refused.update((p, "it waits for the device") for p in found)
                    self._cut()
            return out
        return probe

    def _failed(self, piece: Piece, position: int, error: Exception) -> None:
        """The step at `position` was not taken: the program is cut anew, for the calls to come."""
        with self.lock:
            words = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not self.warned:
                self.warned = True
                warnings.warn(f"tokamak: a part of {self.program.name} is not recorded and runs as without CUDA graphs: {words}", stacklevel=2)
            self.failures += 1
            for p in (position,) if position >= 0 else piece.positions:
                self.refused[p] = f"a capture refused it: {words}"
            self._cut()

    def _watching(self, origins: tuple[int, ...]) -> Watch | None:
        if self.watch is None:
            return None
        return lambda position, function: self.watch(origins[position], function) if origins[position] >= 0 else function
