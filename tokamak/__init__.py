"""tokamak: a fusing compiler for PyTorch.

    torch.compile(model, backend="tokamak")
    tokamak.compile(model, policy="fast")
    tokamak.explain(model, *inputs)
"""
from __future__ import annotations

from .backend import compile
from .errors import BuildError, CompilerMissing, InternalError, OptionError, TokamakError
from .options import Options, scope
from .tools.explain import Explanation, explain
from .tools.record import recording

__all__ = ["compile", "explain", "recording", "scope", "Explanation", "Options",
           "TokamakError", "OptionError", "CompilerMissing", "BuildError", "InternalError"]
__version__ = "0.1.0"
