"""Printing what was asked for. The topics stand in `options.TOPICS`; `TOKAMAK_LOGS=graph,fusion` chooses."""
from __future__ import annotations

import sys

from .options import TOPICS, Options


def wanted(options: Options, topic: str) -> bool:
    """Is `topic` to be printed? Ask before making a costly text."""
    if topic not in TOPICS:
        raise KeyError(topic)
    return topic in options.logs


def say(options: Options, topic: str, title: str, text: str) -> None:
    """Prints `text` under `title` to stderr when `topic` was asked for."""
    if wanted(options, topic):
        print(f"-- tokamak {topic}: {title}\n{text.rstrip()}", file=sys.stderr, flush=True)
