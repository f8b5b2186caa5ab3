"""The tokens of a graph's text, line by line, and the error that says what was wanted in a line."""
from __future__ import annotations

import re
from typing import Callable

from ..errors import TokamakError

_TOKEN = re.compile(r"""\s*(?:(?P<comment>\#\s.*)|(?P<node>%\w+)|(?P<number>-?(?:inf\b|nan\b|\d+(?:\.\d*)?(?:e[+-]?\d+)?))|(?P<name>[A-Za-z_][\w.]*)
                        |(?P<string>"(?:\\.|[^"\\])*")|(?P<symbol>`[^`]*`)|(?P<mark>->|<-|//|[^\s\w]))""", re.VERBOSE)


class TextError(TokamakError):
    """Text that is no graph: the line, what was found and what was wanted."""


class Line:
    """The tokens of one line."""

    def __init__(self, line: str, number: int):
        self.line, self.number = line, number
        self.tokens: list[str] = []
        at = 0
        while line[at:].strip():
            found = _TOKEN.match(line, at)
            if found is None:
                self.fail(f"'{line[at:].strip()[0]}'")
            if found.lastgroup == "comment":
                break
            self.tokens.append(found.group(found.lastgroup))
            at = found.end()
        self.at = 0

    def fail(self, wanted: str):
        found = self.tokens[self.at] if hasattr(self, "at") and self.at < len(self.tokens) else "the end"
        raise TextError(f"line {self.number}: {wanted} wanted, {found} found\n  {self.line.strip()}")

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def next(self) -> str:
        if self.at >= len(self.tokens):
            self.fail("more")
        self.at += 1
        return self.tokens[self.at - 1]

    def take(self, token: str) -> bool:
        """Whether `token` comes next; it is then passed."""
        if self.peek() != token:
            return False
        self.at += 1
        return True

    def want(self, token: str) -> None:
        if not self.take(token):
            self.fail(f"'{token}'")

    def integer(self) -> int:
        try:
            return int(self.next())
        except ValueError:
            self.at -= 1
            self.fail("an integer")

    def list(self, item: Callable, close: str) -> list:
        """Items between commas up to `close` (the opening mark is passed already)."""
        found = []
        while not self.take(close):
            found.append(item())
            if not self.take(","):
                self.want(close)
                break
        return found
