"""torch's own threads for kernels: the addresses of two functions of the libgomp that torch has loaded.

A kernel that goes parallel calls GOMP_parallel there, so it shares torch's pool of threads and needs no -fopenmp. In a forked child libgomp
hangs with more than one thread, so `on_fork` lets the libraries be told, in the child, to stay on one.
"""
from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Callable

import torch


_forked = False


def entry_points() -> tuple[int, int]:
    """(GOMP_parallel, omp_get_thread_num) as addresses; (0, 0) in a forked child and without a libgomp: kernels then run on one thread."""
    return (0, 0) if _forked else _found()


@cache
def _found() -> tuple[int, int]:
    for path in _candidates():
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LOCAL | os.RTLD_NOW if hasattr(os, "RTLD_NOLOAD") else os.RTLD_NOW)
            return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in ("GOMP_parallel", "omp_get_thread_num"))
        except (OSError, AttributeError):
            continue
    return 0, 0


def _candidates() -> list[Path]:
    """The libgomps that the process has mapped, torch's own first."""
    own = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return own
    mapped = dict.fromkeys(Path(fields[5]) for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6 and "libgomp" in fields[5])
    return [p for p in own if p in mapped] + [p for p in mapped if p not in own] or own


def on_fork(tell: Callable[[], None]) -> None:
    """`tell` runs in every forked child; `entry_points` is (0, 0) there from then on."""
    def in_child():
        global _forked
        _forked = True
        tell()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)
