"""Printing what was asked for. The topics stand in `options.TOPICS`; `TOKAMAK_LOGS=graph,fusion` chooses. And the line that says how far a build
is."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from .options import TOPICS, Options


def wanted(options: Options, topic: str) -> bool:
    """Is `topic` to be printed? Ask before making a costly text."""
    if topic not in TOPICS:
        raise KeyError(topic)
    return topic in options.logs


def say(options: Options, topic: str, title: str, text: str) -> None:
    """Prints `text` under `title` to stderr when `topic` was asked for."""
    if wanted(options, topic):
        print(f"-- tokamak {topic}: {title}\n{text.rstrip()}", file=sys.stderr, flush=True)


PATIENCE = 1.0              # seconds of building from which on a line says how far it is


class Progress:
    """One live line on `stream`, how many kernels of how many are built, once that takes longer than `PATIENCE`; gone when the `with` block is left.
    Calling it says how far the work is, several times a second. `stream` None: nothing is written."""

    def __init__(self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic):
        self.stream, self.clock, self.start, self.shown = stream, clock, clock(), ""

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` kernels are built."""
        text = f"tokamak: {done} of {total} kernels built"
        if self.stream is not None and text != self.shown and self.clock() - self.start >= PATIENCE:
            self._write(f"\r{text}\x1b[K")
            self.shown = text

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self.shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):       # the terminal is gone: no reason to stop
            self.stream = None


def progress(options: Options) -> Progress:
    """The line for a build: on stderr, if that is a terminal and the user has not said no."""
    return Progress(sys.stderr if options.progress and sys.stderr is not None and sys.stderr.isatty() else None)
