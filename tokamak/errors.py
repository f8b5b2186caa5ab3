"""Errors. A user's mistake is a TokamakError with a message that says what was found, where, and what to do. A bug of ours is an InternalError."""
from __future__ import annotations


class TokamakError(Exception):
    """Base of every error meant for a user."""


class OptionError(TokamakError):
    """An option has a value that it cannot have."""


class CompilerMissing(TokamakError):
    """No C compiler was found, or no Triton where kernels for GPUs are wanted."""


class BuildError(TokamakError):
    """The C compiler, or Triton, failed on a generated kernel."""


class OutOfRange(IndexError, RuntimeError):
    """An index lies outside its dimension. Torch raises the one or the other, by the operation."""


class InternalError(Exception):
    """A bug in tokamak: an invariant does not hold. The graph falls back to eager with one warning, or raises under TOKAMAK_STRICT=1."""


class CheckFailed(InternalError):
    """Under TOKAMAK_CHECK=1: a call computed something else than the program means."""
