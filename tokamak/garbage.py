"""No search for cyclic garbage while something is compiled: nearly all that a compile makes lives as long as it, and every search walks all of
torch's objects, too (a fifth of the time of our stages for a model with 24 layers, an eighth of Dynamo's). What was made counts as old behind it, so
that no search for young garbage walks all of it at once; the next search of everything does.

Our own stages are within `uncollected`. Dynamo captures before it calls a back end, so it is told to call us before: `watch_dynamo`.
"""
from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable

from torch._dynamo.callback import callback_handler

_FEW_FROZEN = 1000          # objects: Python 3.12 freezes 375 of its own as it starts; who freezes on purpose freezes all of a program's
_NEAR = 12                  # frames between Dynamo's function that knows the back end and a callback: 6 to 8 in torch 2.10 to 2.13
_WRAPPERS = ("_torchdynamo_orig_backend", "compiler_fn", "func")        # where Dynamo, torch.compile and functools.partial keep what they wrap


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search within."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            _search_again()


def _search_again() -> None:
    if gc.get_freeze_count() < _FEW_FROZEN:
        gc.freeze()
        gc.unfreeze()
    gc.enable()


class _Captures:
    """Dynamo's captures for `backend`: no search while one is under way."""

    def __init__(self, backend: Callable):
        self.backend, self.stopped = backend, False

    def begin(self, _: Any) -> None:
        if gc.isenabled() and wraps(_compiler(sys._getframe(1)), self.backend):
            self.stopped = True
            gc.disable()

    def end(self, _: Any) -> None:
        if self.stopped:
            self.stopped = False
            _search_again()


_captures: _Captures | None = None


def watch_dynamo(backend: Callable) -> None:
    """From now on Dynamo's captures for `backend`, and for no other back end, are without searches, until `torch._dynamo.reset()`."""
    global _captures
    if _captures is None:
        _captures = _Captures(backend)
    if _captures.begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_captures.begin)
        callback_handler.register_end_callback(_captures.end)


def _compiler(frame: FrameType | None) -> Any:
    """The back end for which Dynamo captures: an argument of its function that compiles a frame; None where there is none."""
    for _ in range(_NEAR):
        if frame is None:
            break
        if frame.f_code.co_name == "_compile" and "compiler_fn" in frame.f_code.co_varnames:
            return frame.f_locals.get("compiler_fn")
        frame = frame.f_back
    return None


def wraps(fn: Any, backend: Callable) -> bool:
    """Is `fn` the function `backend`, or one of the objects that torch and functools put around it?"""
    for _ in range(len(_WRAPPERS) + 2):
        if fn is backend or fn is None:
            break
        fn = next((inner for name in _WRAPPERS if (inner := getattr(fn, name, None)) is not None), None)
    return fn is backend
