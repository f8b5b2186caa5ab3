"""The errors of GPU kernels: words in memory that kernels write and the host reads, without waiting for anything."""
from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Mapping
from ctypes import byref, c_int32, c_void_p
from typing import Any

import torch

from . import gpu

_PORTABLE_MAPPED = 3        # of pinned memory: for every device, and at an address there
_PAGE = 1024                # error words that are taken from the driver at once
_pages: dict[int, tuple[memoryview, int]] = {}          # device -> what is left of its last page, and its address there
_pages_lock = threading.Lock()


def error_words(device: str, count: int, driver: Callable[[], gpu.Driver] | None = None) -> tuple[memoryview, int]:
    """(bytes, address): `count` int32 words, zero, that kernels on `device` write and the host reads, at their address there. They are never given
    back: a kernel may still be on its way when its program is gone."""
    if torch.device(device).type == "cpu":
        held = (c_int32 * count)()
        return memoryview(held).cast("B"), ctypes.addressof(held)
    index = torch.device(device).index or 0
    with _pages_lock:
        view, address = _pages.get(index, (memoryview(b""), 0))
        if len(view) < 4 * count:
            view, address = _mapped((driver or gpu.driver)(), index, 4 * max(count, _PAGE))
        _pages[index] = view[4 * count:], address + 4 * count
        return view[:4 * count], address


def _mapped(driver: gpu.Driver, device: int, size: int) -> tuple[memoryview, int]:
    host, there = c_void_p(), c_void_p()
    with driver.within(device):
        driver.call("cuMemHostAlloc", byref(host), size, _PORTABLE_MAPPED)
        driver.call("cuMemHostGetDevicePointer_v2", byref(there), host, 0)
    ctypes.memset(host.value, 0, size)
    return memoryview((ctypes.c_char * size).from_address(host.value)).cast("B"), there.value


def names(program: str, slots: Mapping[str, tuple[str, Mapping[int, int]]],
          fail: Callable[[int, int], None]) -> tuple[dict[str, Any], Callable | None]:
    """What a program's text calls `tk_words_ID` (a device's words as bytes), `tk_zeros_ID`, `tk_xPOSITION` (the address of a launch's word) and
    `tk_look`, which raises what the words say; and a function that warns of errors that no call has raised. `slots`: ID -> device and {position of a
    launch: its first error}; `fail(code, first)` raises. ({}, None) when no launch can fail."""
    made: dict[str, Any] = {}
    held: list[tuple[memoryview, int]] = []
    for id, (device, launches) in slots.items():
        view, address = error_words(device, len(launches))
        made[f"tk_words_{id}"], made[f"tk_zeros_{id}"] = view, bytes(len(view))
        for i, (position, first) in enumerate(launches.items()):
            made[f"tk_x{position}"] = address + 4 * i
            held.append((view[4 * i:4 * i + 4].cast("i"), first))

    def look():
        found = [(word[0], first) for word, first in held if word[0]]
        for word, _ in held:
            word[0] = 0
        for code, first in found:
            fail(code, first)

    def unseen():
        try:
            look()
        except Exception as error:
            warnings.warn(f"tokamak: the last call of {program} failed on the GPU: {type(error).__name__}: {error}", stacklevel=2)
    return ({**made, "tk_look": look}, unseen) if slots else ({}, None)
