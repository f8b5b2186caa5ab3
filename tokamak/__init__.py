"""tokamak: a fusing compiler for PyTorch.

    torch.compile(model, backend="tokamak")
    tokamak.compile(model, policy="fast")
"""
from __future__ import annotations

from .backend import compile
from .errors import BuildError, CompilerMissing, InternalError, OptionError, TokamakError
from .options import Options, scope

__all__ = ["compile", "scope", "Options", "TokamakError", "OptionError", "CompilerMissing", "BuildError", "InternalError"]
__version__ = "0.1.0"
