"""Lines of the user's program."""
from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Origin


@dataclass(frozen=True)
class Source:
    """A line of the user's program."""
    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f"  {self.code}" if self.code else "")


def source_of(origin: Origin) -> Source | None:
    return Source(origin.file, origin.line, origin.code) if origin.file else None


def sources_of(origins) -> tuple[Source, ...]:
    """The user's lines of `origins`, each once, in order of file and line."""
    found = {s: None for o in origins if (s := source_of(o)) is not None}
    return tuple(sorted(found, key=lambda s: (s.file, s.line)))
