"""Schedules that were found by trying, on disk: one file of the kernel cache a device, sealed and replaced at once as kernels are.

    content ::= JSON {"device": name, "kernels": {structure: {"changes": [text, ...], "before": seconds, "after": seconds}}}

Only `changes` is read again; the rest is for people. A file of another version has another name; one that is no such thing is ignored with a warning.
Schedules that were found by machine code (`codegen.quicker`) are a file a kernel:

    content ::= JSON [text, ...]
"""
from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping

from .cache import open_cache

VERSION = 1


def table(cache_dir: str, device: str) -> dict[str, tuple[str, ...]]:
    """Structure of a kernel -> changes of its schedule, () where none was faster, for the device of that name. Empty where nothing is kept."""
    return {name: tuple(entry["changes"]) for name, entry in _entries(cache_dir, device).items()}


def keep(cache_dir: str, device: str, found: Mapping[str, dict]) -> None:
    """Enters `found` (structure -> entry) beside what is there, in the place of earlier ones."""
    entries = {**_entries(cache_dir, device), **found}
    open_cache(cache_dir).put(_key(device), json.dumps({"device": device, "kernels": entries}).encode())


def _key(device: str) -> str:
    return "tuned-" + hashlib.sha256(repr((VERSION, device)).encode()).hexdigest()[:16]


def _entries(cache_dir: str, device: str) -> dict[str, dict]:
    content = open_cache(cache_dir).get(_key(device)) if cache_dir else None
    if content is None:
        return {}
    try:
        entries = json.loads(content)["kernels"]
        if all(isinstance(c, str) for e in entries.values() for c in e["changes"]):
            return entries
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    warnings.warn(f"tokamak: the tuned schedules for {device} in {cache_dir} cannot be read and are ignored", stacklevel=2)
    return {}


def recall(cache_dir: str, key: str) -> tuple[str, ...] | None:
    """The changes kept under `key`; None where there are none, or nothing that can be read."""
    content = open_cache(cache_dir).get(f"quicker-{key}") if cache_dir else None
    try:
        found = json.loads(content) if content is not None else None
    except ValueError:
        return None
    return tuple(found) if isinstance(found, list) and all(isinstance(c, str) for c in found) else None


def remember(cache_dir: str, key: str, changes: tuple[str, ...]) -> None:
    """Keeps `changes` under `key`, where there is a folder."""
    if cache_dir:
        open_cache(cache_dir).put(f"quicker-{key}", json.dumps(changes).encode())
