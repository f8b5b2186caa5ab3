"""Expressions nest as deeply as a program's chains of operations are long (the norm of 300 gradients, stacked, is a chain of 300 choices), and stages
walk them by recursion. Python's own limit of 1000 frames would be met by chains of 240.
"""
from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

FRAMES = 4000           # chains of 1000 operations. A call of an object with `__call__` takes up to 1 KB of the machine's stack, too, of which a
                        # thread may have no more than 2 MB

_lock = threading.Lock()
_within = 0             # compiles under way, in all threads: the limit is the process's
_usual = 0              # the limit before the first of them


@contextlib.contextmanager
def deep() -> Iterator[None]:
    """Within, functions may call each other FRAMES deep."""
    global _within, _usual
    with _lock:
        if not _within:
            _usual = sys.getrecursionlimit()
            sys.setrecursionlimit(max(_usual, FRAMES))
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within and sys.getrecursionlimit() == FRAMES:
                sys.setrecursionlimit(_usual)
