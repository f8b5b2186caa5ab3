"""tokamak: a fusing compiler for PyTorch.

    torch.compile(model, backend="tokamak")
    tokamak.compile(model, policy="fast")
    tokamak.explain(model, *inputs)
    tokamak.verify(model, *inputs)
    tokamak.profile(model, *inputs)
    tokamak.optimize(model, *inputs)
    tokamak.tune(model, *inputs)
"""
from __future__ import annotations

import importlib

from .backend import compile
from .errors import BuildError, CompilerMissing, InternalError, OptionError, TokamakError
from .options import Options, scope
from .tools.explain import Explanation, explain
from .tools.record import recording

__all__ = ["compile", "explain", "optimize", "profile", "recording", "scope", "tune", "verify", "Explanation", "Options", "Profile", "Staircase",
           "Verification", "TokamakError", "OptionError", "CompilerMissing", "BuildError", "InternalError"]
__version__ = "0.1.0"

# what programs that only compile need not load
_LATER = {"verify": ".tools.verify", "Verification": ".tools.verify", "profile": ".tools.profile", "Profile": ".tools.profile",
          "optimize": ".tools.optimize", "Staircase": ".tools.optimize", "tune": ".tools.tune"}


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_LATER[name], __name__), name)
