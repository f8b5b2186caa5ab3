"""The report as one file: the page's parts (`page/`) with the data of a profile as JSON between them. It fetches nothing, and tells the browser."""
from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

SCRIPTS = ("base", "table", "layout", "graph", "fusion", "plots", "timeline", "detail", "head", "cards", "main")


def page(data: Mapping[str, Any]) -> str:
    """The page that shows `data`, as `Profile.data` gives it."""
    parts = files(__package__) / "page"
    read = lambda name: (parts / name).read_text(encoding="utf-8")
    script = "\n".join(read(f"{name}.js") for name in SCRIPTS)
    name = os.path.basename(str(data.get("title", ""))) or "profile"
    filled = {"title": html.escape(f"{name} - tokamak"), "style": read("report.css"), "data": embedded(data),
              "script": f'(() => {{\n"use strict";\n{script}\n}})();'}
    pieces = read("report.html").split("@")
    return "".join(filled.get(piece, piece) for piece in pieces)


def embedded(data: Any) -> str:
    """JSON that may stand in a script element: no `<` that could end it, no number that JSON does not know."""
    return json.dumps(finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """`value` with None in place of infinities and of what is no number."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value
