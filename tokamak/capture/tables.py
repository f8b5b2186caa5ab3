"""Importing this module fills `registry.TABLE`: every `aten_*` module of this package is a table of operators."""
from __future__ import annotations

import importlib
import pkgutil

from . import __path__ as _here
from .registry import TABLE

for _module in sorted(m.name for m in pkgutil.iter_modules(_here) if m.name.startswith("aten_")):
    importlib.import_module(f"{__package__}.{_module}")

__all__ = ["TABLE"]
