"""Memory for outputs and temporaries, without page faults.

A fresh 64 MiB tensor is mapped, faulted in and unmapped at every call, which costs five times what writing it does. The pool keeps such
blocks: a block is handed out again when nobody but the pool holds it, which its storage's use counts tell (views, numpy and DLPack exports,
tensors saved for backward and Python storage objects all count). So an output that escapes never shares memory with anything that is written later.

Blocks come in size classes, eight an octave (at most 12.5 % of a block is unused). What the pool holds in all is bounded by 1.05 times the most
that its users held at once (at least FLOOR); what lay idle for two generations goes back to the system.
"""
from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import Callable

import torch

SMALL = 1 << 20                 # below this many bytes malloc reuses its own memory: no faults, and 0.6 us less (measured: 32 KiB to 1 MiB)
FLOOR = 64 << 20                # the pool may hold this much whatever its users hold
SLACK = 1.05                    # the pool may hold this many times the most its users held at once
GENERATION = 2048               # allocations from the pool
_HUGE = 2 << 20                 # a transparent huge page
_HUGE_FROM = 8 << 20            # from here on the first touch of a 64 MiB block takes 6 ms with huge pages, 34 without; later use is equal
_MADV_HUGEPAGE = 14

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]      # shape, strides in elements, dtype

empty: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cpu
window: Callable[..., torch.Tensor] = torch._C._dynamo.guards._reinterpret_tensor
_use_count = torch._C._storage_Use_Count
_references = sys.getrefcount


def size_class(nbytes: int) -> int:
    """The block size, in bytes, that serves `nbytes`: the next multiple of an eighth of the power of two below."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), 64)
    return -(-nbytes // step) * step


class Block:
    """Memory of one size class. `templates` holds one tensor over it for each layout it has served: `template.data` is a new tensor of that layout in
    0.2 us. `uses` and `refs` are the storage's counts while only the pool holds it."""
    __slots__ = ("storage", "cdata", "address", "templates", "uses", "refs", "tick")

    def __init__(self, nbytes: int):
        self.storage = torch.UntypedStorage(nbytes)
        self.cdata, self.address = self.storage._cdata, self.storage.data_ptr()
        self.templates: dict[Layout, torch.Tensor] = {}
        self.uses = self.refs = 0
        self.tick = 0
        if nbytes >= _HUGE_FROM:
            _advise_huge(self.address, nbytes)

    def idle(self) -> bool:
        """Nobody but the pool holds the memory."""
        return _use_count(self.cdata) == self.uses and _references(self.storage) == self.refs

    def sound(self) -> bool:
        """False when a former holder resized it, moved it to shared memory or pinned its size (numpy export does)."""
        return self.storage.data_ptr() == self.address and self.storage.resizable()

    def tensor(self, layout: Layout) -> torch.Tensor:
        """A new tensor over this idle block: no view, version 0, no autograd history."""
        template = self.templates.get(layout)
        if template is None:
            if len(self.templates) >= 8:
                self.templates.clear()
            template = self._template(layout)
        return template.data

    def _template(self, layout: Layout) -> torch.Tensor:
        shape, strides, dtype = layout
        with torch.inference_mode(False), torch.no_grad():
            made = self.templates[layout] = torch.empty(0, dtype=dtype).set_(self.storage, 0, shape, strides)
        self.uses, self.refs = _use_count(self.cdata), _references(self.storage)
        return made


class Pool:
    """Idle and used blocks by size class. Any thread may call `take`: a block is popped while it is looked at, so two threads never see one."""

    def __init__(self) -> None:
        self.classes: dict[int, deque[Block]] = {}
        self.takes = 0
        self.peak = 0          # the most bytes that users held at once, as seen when a block had to be made

    def take(self, layout: Layout, size: int) -> torch.Tensor:
        """A tensor of `layout` over a block of `size` bytes (a `size_class`); its memory holds anything."""
        blocks = self.classes.get(size)
        if blocks is None:
            blocks = self.classes.setdefault(size, deque())
        self.takes = tick = self.takes + 1
        if not tick % GENERATION:
            self._age()
        block = self._find(blocks)
        if block is None:
            self._make_room(size)
            block = self._made(size)
        made = block.tensor(layout)
        block.tick = tick
        blocks.append(block)
        return made

    def _made(self, size: int) -> Block:
        """A new block; where the system has no memory left, after idle ones were given back to it. Raises what torch raises."""
        try:
            return Block(size)
        except RuntimeError:
            self.trim()
            return Block(size)

    @staticmethod
    def _find(blocks: deque[Block]) -> Block | None:
        """An idle block, taken out; the used ones move behind, so that a run of allocations looks at each once."""
        for _ in range(len(blocks)):
            try:
                block = blocks.popleft()
            except IndexError:      # other threads hold the rest
                return None
            if _use_count(block.cdata) != block.uses or _references(block.storage) != block.refs:
                blocks.append(block)
            elif block.sound():
                return block
        return None

    def held(self) -> tuple[int, int]:
        """(bytes in all, bytes in idle blocks)."""
        total = idle = 0
        for size, blocks in list(self.classes.items()):
            for block in list(blocks):
                total += size
                idle += size if block.idle() else 0
        return total, idle

    def trim(self, keep: int = 0) -> None:
        """Gives idle blocks back to the system, longest unused first, until at most `keep` bytes are held or none is idle."""
        total = self.held()[0]
        candidates = sorted(((b.tick, size) for size, blocks in list(self.classes.items()) for b in list(blocks) if b.idle()), key=lambda c: c[0])
        for tick, size in candidates:
            if total <= keep:
                return
            total -= self._remove(size, lambda b: b.tick == tick and b.idle())

    def _remove(self, size: int, unwanted: Callable[[Block], bool]) -> int:
        """Drops the blocks of one class that are `unwanted`; their bytes."""
        blocks, gone = self.classes[size], 0
        for _ in range(len(blocks)):
            try:
                block = blocks.popleft()
            except IndexError:
                break
            if unwanted(block):
                gone += size
            else:
                blocks.append(block)
        return gone

    def _make_room(self, size: int) -> None:
        total, idle = self.held()
        self.peak = max(self.peak, total - idle + size)
        self.trim(max(FLOOR, int(self.peak * SLACK)) - size)

    def _age(self) -> None:
        """Forgets old peaks slowly and frees what was not used for two generations."""
        self.peak = int(self.peak * 0.95)
        limit = self.takes - 2 * GENERATION
        for size in list(self.classes):
            self._remove(size, lambda b: b.tick < limit and b.idle())


def alloc(pool: Pool | None) -> Callable[[Layout, int], torch.Tensor]:
    """The allocator of programs whose sizes are only known at a call."""
    if pool is None:
        return lambda layout, nbytes: empty(*layout)
    take = pool.take
    return lambda layout, nbytes: take(layout, size_class(nbytes)) if nbytes >= SMALL else empty(*layout)


def _advise_huge(address: int, nbytes: int) -> None:
    """Asks for huge pages over the whole ones inside the block; a system without them says no, which is no loss."""
    if sys.platform != "linux":
        return
    low, high = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    if high > low:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), _MADV_HUGEPAGE)
