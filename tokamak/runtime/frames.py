"""The launcher in Python: what a call of several launches can have ready before it.

A Frame is memory that the driver reads: the words of all launches, those that a call does not change in place; where each parameter of each kernel
stands; a configuration a launch. A call writes its values, once each, and has the driver launch one after the other. Calls of several threads have
a Frame each. What is not ordinary (code that is not loaded, memory less aligned than a kernel assumes, descriptors, workspaces, grids that only the
call shows) goes launch by launch.
"""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import c_int, c_int64, c_uint64, c_void_p
from typing import Any

from .gpu_launcher import HEAD, Attribute, Configuration

_SUBMIT = ctypes.CFUNCTYPE(c_int, *(c_void_p,) * 4)


class Frame:
    """One of a `Frames`."""

    def __init__(self, frames: Frames, variants: list[Any]):
        self.values = (c_int64 * max(len(frames.slots), 1))()
        self.stream, self.kept, self.launches = 0, [], []
        self.configurations: list[Configuration] = []
        for number, (words, variant) in enumerate(zip(frames.words, variants)):
            record = variant.record
            constants, hidden = self._constants(frames, words[HEAD:]), (c_int64 * max(record.hidden, 1))()
            own, shared = ctypes.addressof(constants), ctypes.addressof(self.values)
            at = [own + 8 * i if w.value is None else shared + 8 * frames.slots[w.value, w.constant] for i, w in enumerate(words[HEAD:])]
            at += range(ctypes.addressof(hidden), ctypes.addressof(hidden) + 8 * record.hidden, 8)
            parameters = (c_uint64 * max(len(at), 1))(*at)
            size = Attribute(4, 0, (record.cluster, 1, 1))
            how = Configuration(tuple(w.constant for w in words[1:HEAD]), (record.threads, 1, 1), record.shared, None,
                                ctypes.pointer(size) if record.cluster > 1 else None, record.cluster > 1)
            self.kept += [constants, hidden, parameters, size]
            self.configurations.append(how)
            self.launches.append((number, ctypes.addressof(how), record.function, ctypes.addressof(parameters)))

    @staticmethod
    def _constants(frames: Frames, words) -> Any:
        """The constants in their places; anything where a value stands."""
        known = [w.constant if w.value is None else 0 for w in words]
        packed = struct.pack("=" + "".join("d" if isinstance(k, float) else "q" for k in known), *known)
        return (c_int64 * max(len(known), 1)).from_buffer_copy(packed or bytes(8))

    def on(self, stream: int) -> None:
        for how in self.configurations:
            how.stream = stream
        self.stream = stream


class Frames:
    """What the calls of a Run have in common. `slots`: (value, what is added to it) -> its place among the values of a Frame."""

    def __init__(self, run: Any):
        self.run, self.words = run, run.words
        self.slots: dict[tuple[int, int | float], int] = {}
        for words in run.words:
            for w in words[HEAD:]:
                if w.value is not None:
                    self.slots.setdefault((w.value, w.constant), len(self.slots))
        self.free: list[Frame] = []
        self.submit: Callable[..., int] | None = None

    def new(self) -> Frame | None:
        """Another Frame; None while the driver's own launch would not do for all."""
        if any(w.value is not None for words in self.words for w in words[1:HEAD]):
            return None
        variants = [self._variant(kernel, words) for kernel, words in zip(self.run.kernels, self.words)]
        if None in variants:
            return None
        self.submit = self.submit or _SUBMIT(variants[0].record.clustered)
        return Frame(self, variants)

    def _variant(self, kernel: Any, words) -> Any:
        """The first variant for which the constants are aligned, if it can be launched as it stands."""
        if not all(0 < w.constant < 1 << 31 for w in words[1:HEAD]):
            return None
        aligned = lambda w: isinstance(w.constant, int) and not w.constant & 15
        found = next((v for v in kernel.variants if all(aligned(words[HEAD + i]) for i in v.divisible)), None)
        record = found and found.record
        return found if record and record.ready and record.function and not record.boxes and not record.cooperative else None

    def aligned(self) -> list[int]:
        """The values that kernels assume to be divisible by 16."""
        return sorted({words[HEAD + i].value for kernel, words in zip(self.run.kernels, self.words) for i in kernel.variants[0].divisible
                       if words[HEAD + i].value is not None})


def caller(run: Any) -> Callable[..., int]:
    """The function of (stream, *values) that makes the launches of a `runs.Run`."""
    frames = Frames(run)
    values = [f"v{i}" for i in range(len(run.floats))]
    bits = " | ".join(f"v{i}" for i in frames.aligned()) or "0"
    given = ", ".join(f"v{i}" if run.floats[i] or not c else f"v{i} + {c}" for i, c in frames.slots)
    pack = struct.Struct("=" + "".join("d" if run.floats[i] else "q" for i, _ in frames.slots)).pack_into
    arguments = ", ".join(["stream", *values])
    text = f"""def launch({arguments}):
    if ({bits}) & 15:
        return rest(0, {arguments})
    try:
        frame = free.pop()
    except IndexError:
        frame = frames.new()
        if frame is None:
            return rest(0, {arguments})
    pack(frame.values, 0{', ' * bool(given)}{given})
    if frame.stream != stream:
        frame.on(stream)
    submit = frames.submit
    for number, how, function, parameters in frame.launches:
        if submit(how, function, parameters, None):
            break
    else:
        free.append(frame)
        return 0
    free.append(frame)
    return rest(number, {arguments})
"""
    exec(compile(text, "<tokamak launches>", "exec"), {"frames": frames, "free": frames.free, "rest": run.rest, "pack": pack}, made := {})
    return made["launch"]
