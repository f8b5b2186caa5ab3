"""The hook between stages. `tracer` gives the function `trace(stage, value)` that the pipeline calls behind every stage: it records what the stage
made and what it took, prints the topics that were asked for, and stops where `options.until` says. Nothing is kept when nobody asked."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from . import log
from .options import STAGES, Options
from .tools import show
from .tools.dynamo import Frame, frame_record
from .tools.record import GraphRecord

Trace = Callable[[str, Any], Any]


class Stopped(Exception):
    """The stage that `options.until` names is done."""


def frame_of(gm: fx.GraphModule, options: Options) -> Frame | None:
    """What Dynamo says of the graph `gm`, if anyone is to see it."""
    if options.recorder is None and not options.logs:
        return None
    frame = frame_record(gm)
    if options.recorder is not None:
        options.recorder.frames.append(frame)
    return frame


def tracer(name: str, kind: str, frame: Frame | None, options: Options) -> Trace:
    """The hook for the graph `name` (`kind`: forward, backward or inference) of `frame`."""
    record = GraphRecord(name, kind, frame) if options.recorder is not None or options.logs else None
    if options.recorder is not None:
        options.recorder.graphs.append(record)

    def trace(stage: str, value):
        if record is not None:
            record.add(stage, value)
            for topic in TOPICS_AT.get(stage, ()):
                if log.wanted(options, topic):
                    log.say(options, topic, name, show.TOPICS[topic](record))
            if stage in STAGES:
                record.resume()
        if stage == options.until:
            raise Stopped
        return value
    return trace


# stage -> the topics that can be printed behind it
TOPICS_AT = {"capture": ("graph",), "lower": ("fusion", "schedule"), "program": ("output_code",), "eager": ("graph",), "graphs": ("cudagraphs",),
             "build": ("start",)}
