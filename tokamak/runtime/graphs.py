"""Recorded programs: which calls are recorded, into what memory, and when a recording may be replayed. What records is a `Recorder`: on NVIDIA's GPUs
CUDA graphs (`runtime/cuda_graphs.py`), in tests a stand-in.

A recording reads and writes fixed addresses. So it holds what it makes for good and gives the caller new tensors over that memory; it is replayed
when none of those of its last replay is alive, which the storages' use counts tell, as for blocks of `memory.Pool`. Only what dies within a call
shares memory with other recordings: they are replayed one after the other, on one stream or behind an event. When all recordings of a call's sizes
are busy, there are three ways:

    another      a further recording with memory of its own: a result that is held while the next is made (two forwards before a backward)
    copied out   recorded anew, the results that were held now copied to fresh memory by each call: a loss that outlives its step must not cost a
                 second set of all that is saved for backward
    plain        the program runs as if nothing was recorded

An input is read in place as long as calls bring it at few addresses (parameters; what another recording made), each with a recording of its own; one
that comes from ever new addresses has a buffer that calls copy it to, and from, if the program writes it.
"""
from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

Boxed = Callable[[list], list]
WARM = 2                    # calls of a size before it is recorded: they build, load, choose algorithms, and show which addresses stay
SIZES = 16                  # combinations of numbers (sizes) that a piece has recordings for
KEPT = 8                    # recordings for one of them: addresses and generations
GENERATIONS = 3             # of them with the same addresses
MADE = 32                   # recordings that were made for one of them before every input is copied
SMALL, FEW, MORE = 1 << 20, 2, 4        # addresses that an input is taken at before it is copied: FEW below SMALL bytes, MORE from there on
CHEAP = 64 << 20            # bytes of results up to which a further generation is made without asking what holds the others
USED = 8                    # replays that make a recording worth its while

_NOTHING = contextlib.nullcontext()
_use_count, _references = torch._C._storage_Use_Count, sys.getrefcount
_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Recorder(Protocol):
    """What records on one device. Calls of it are made under its `lock`."""
    lock: Any
    owned: dict[int, int]           # address of memory that recordings hold -> how many do

    def keep(self) -> None:
        """While it records: what is allocated from now on lives as long as the recording, and no other recording writes it."""

    def share(self) -> None:
        """While it records: what is allocated from now on is gone when the call ends."""

    def busy(self) -> bool:
        """Is something being recorded on the current stream, by whomever?"""

    def record(self, fn: Boxed, args: list) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """(what runs `fn(args)` again at the same addresses, its results there, in memory that nothing else has). It need not have run. Raises what
        recording raises."""

    def waited(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """(what `call()` gives, did the host wait for the device in it)."""

    def wait(self) -> None:
        """Nothing that was replayed runs any more."""

    def finish(self) -> None:
        """The same of the current stream."""


@dataclass
class Counts:
    """What the calls of one piece came to. `copied`: bytes that replays copied to and from buffers, and out of recordings; `seconds`: recording."""
    plain: int = 0
    replays: int = 0
    recordings: int = 0
    dropped: int = 0
    copied: int = 0
    seconds: float = 0.0


class Recording:
    """One recording: `replay` runs it; `addresses` are those of the inputs, 0 for those that are not `fixed`; `copies` the positions of the others
    with the buffers that it reads, `back` those of them that it may write. `results` (emptied): what it makes, where it makes it; `held`: the
    positions of those that are copied out."""

    def __init__(self, replay: Callable[[], None], results: list[torch.Tensor], fixed: list[int], addresses: list[int],
                 copies: list[tuple[int, torch.Tensor]], written: frozenset[int], held: frozenset[int]):
        self.replay, self.fixed, self.addresses, self.copies = replay, fixed, addresses, copies
        self.back, self.held = [(i, b) for i, b in copies if i in written], sorted(held)
        with torch.inference_mode(False), torch.no_grad():
            self.templates = [_over(t) for t in results]
        results.clear()             # from here on the counts are those of memory that nobody else holds
        self.direct = [i for i in range(len(self.templates)) if i not in held]
        self.storages = [self.templates[i].untyped_storage() for i in self.direct]
        self.cdatas = [s._cdata for s in self.storages]
        self.nbytes = _bytes(self.templates)
        self.replays = 0
        self.uses, self.refs = list(map(_use_count, self.cdatas)), list(map(_references, self.storages))

    def idle(self) -> bool:
        """Nobody holds what the last replay gave."""
        return list(map(_use_count, self.cdatas)) == self.uses and list(map(_references, self.storages)) == self.refs

    def alive(self) -> set[int]:
        """The positions of results that somebody holds."""
        uses, refs = map(_use_count, self.cdatas), map(_references, self.storages)
        return {i for i, a, b, c, d in zip(self.direct, uses, self.uses, refs, self.refs) if a != b or c != d}

    def fits(self, args: list) -> bool:
        if _pointers_equal is not None:
            return _pointers_equal(args, self.addresses, self.fixed)
        return all([args[i].data_ptr() == self.addresses[i] for i in self.fixed])


@dataclass
class Entry:
    """What is known of the calls with the same numbers. `seen`: for each tensor the addresses that it came at; `buffers`: position -> where it is
    copied to; `held`: positions of results that are copied out."""
    seen: list[list[int]]
    calls: int = 0
    made: int = 0
    recordings: list[Recording] = field(default_factory=list)          # the one that was replayed last is last
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    held: frozenset[int] = frozenset()


class Recorded:
    """A boxed function that replays recordings of `fn`, whose first `tensors` arguments are tensors and the others numbers; it may write those at
    `written`. `probe(args)`: the first call in the place of `fn`, where it is to be looked at. `capture()`: the function to record, where it is
    another than `fn`. The `pending()` of each of the three, if it has one, raises what kernels of its earlier calls have left. `failed(error)` is
    called once, when recording raises: from then on `fn` runs. `paused()`: is `fn` to run all the same? `synchronous`: a replay is waited for."""

    def __init__(self, fn: Boxed, recorder: Recorder, tensors: int, written: frozenset[int] = frozenset(), capture: Callable[[], Boxed] | None = None,
                 probe: Boxed | None = None, failed: Callable[[Exception], None] = lambda error: None, paused: Callable[[], bool] | None = None,
                 synchronous: bool = False):
        self.fn, self.recorder, self.tensors, self.written = fn, recorder, tensors, written
        self.probe = probe
        self.threads: set[int] = set()          # those that have called `fn`: a library's handles are a thread's own, and not made while recording
        self.capture, self.failed, self.paused, self.synchronous = capture or (lambda: fn), failed, paused, synchronous
        self.pending: list[Callable[[], None]] = []         # what raises errors that kernels of earlier calls have left
        self._pending_of(fn)
        self.entries: dict[tuple, Entry] = {}
        self.counts, self.broken, self.patience = Counts(), "", WARM
        self.last: tuple | None = None

    def __call__(self, args: list) -> list:
        for look in self.pending:
            look()
        if self.broken or self.recorder.busy() or self.paused is not None and self.paused():
            return self._plain(args)
        with self.recorder.lock:
            r = self._idle(args) or self._recorded(args)
            if r is not None:
                return self._replay(r, args)
        return self._plain(args)

    def _key(self, args: list) -> tuple:
        """The numbers of a call; 0.0 and -0.0 are two."""
        numbers = args[self.tensors:]
        return tuple([repr(n) if type(n) is float else n for n in numbers]) if numbers else ()

    def _plain(self, args: list) -> list:
        self.counts.plain += 1
        self.threads.add(threading.get_ident())
        probe, self.probe = self.probe, None
        if probe is None:
            return self.fn(args)
        out = probe(args)
        self._pending_of(probe)
        return out

    def _pending_of(self, fn: Boxed) -> None:
        look = getattr(fn, "pending", None)
        if look is not None and look not in self.pending:
            self.pending.append(look)

    def _idle(self, args: list) -> Recording | None:
        """A recording that may be replayed for `args`: of those the one that was replayed first, whose results are the most likely to be gone."""
        key = self._key(args)
        entry = self.entries.get(key)
        if entry is None:
            return None
        if key != self.last:
            self.entries[key] = self.entries.pop(key)          # the last is the one that was used last
            self.last = key
        found = entry.recordings
        for n, r in enumerate(found):
            if r.fits(args) and r.idle():
                if len(found) > 1:
                    found.append(found.pop(n))
                return r
        return None

    def _replay(self, r: Recording, args: list) -> list:
        if r.copies:
            self._copy([b for _, b in r.copies], [args[i] for i, _ in r.copies])
        r.replay()
        r.replays += 1
        self.counts.replays += 1
        out = [t.data for t in r.templates]
        if r.back:
            self._copy([args[i] for i, _ in r.back], [b for _, b in r.back])
        for i in r.held:
            out[i] = _like(r.templates[i])
        if r.held:
            self._copy([out[i] for i in r.held], [r.templates[i] for i in r.held])
        if self.synchronous:
            self.recorder.finish()
            for look in self.pending:
                look()
        args.clear()
        return out

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            for t, s in zip(targets, sources) if len(targets) == 1 else ():
                _distinct(t).copy_(_distinct(s))
            if len(targets) > 1:
                torch._foreach_copy_([_distinct(t) for t in targets], [_distinct(s) for s in sources])
        self.counts.copied += sum(t.nbytes for t in targets)

    # -- what to do with a call that no recording serves ---------------------------------------------------------------------
    def _recorded(self, args: list) -> Recording | None:
        """A recording made for this call; None: it runs plainly."""
        key = self._key(args)
        entry = self.entries.get(key)
        if entry is None:
            entry = self._entered(key)
        entry.calls += 1
        for i in range(self.tensors):
            address = args[i].data_ptr()
            if address not in entry.seen[i] and address not in self.recorder.owned and len(entry.seen[i]) <= MORE:
                entry.seen[i].append(address)
        if entry.calls <= self.patience or threading.get_ident() not in self.threads:
            return None
        fitting = [r for r in entry.recordings if r.fits(args)]
        if fitting:
            self._hold(entry, fitting)
        else:
            self._settle(entry, args)
        while len(entry.recordings) >= KEPT:
            self._drop(entry.recordings.pop(0))
        return self._made(entry, args)

    def _entered(self, key: tuple) -> Entry:
        if len(self.entries) >= SIZES:
            oldest = self.entries.pop(next(iter(self.entries)))
            if sum(r.replays for r in oldest.recordings) < USED * len(oldest.recordings):
                self.patience = min(2 * self.patience, 1 << 10)         # sizes that come and go: recording them does not pay
            for r in oldest.recordings:
                self._drop(r)
        self.last = key
        return self.entries.setdefault(key, Entry([[] for _ in range(self.tensors)]))

    def _hold(self, entry: Entry, busy: list[Recording]) -> None:
        """All recordings that fit are busy: shall there be another, or is what is held to be copied out?"""
        alive = set().union(*(r.alive() for r in busy))
        size = _bytes([busy[0].templates[i] for i in alive])
        if len(busy) < GENERATIONS and (busy[0].nbytes <= CHEAP or 8 * size > busy[0].nbytes):
            return
        entry.held |= alive
        for r in busy:
            entry.recordings.remove(r)
            self._drop(r)

    def _settle(self, entry: Entry, args: list) -> None:
        """Which inputs are read where they are: a change starts the entry's recordings anew."""
        def moves(i: int) -> bool:
            if entry.made > MADE:
                return any(args[i].data_ptr() != r.addresses[i] for r in entry.recordings[-1:])
            known = entry.seen[i]
            limit = (FEW if args[i].nbytes < SMALL else MORE) if entry.recordings or entry.made else 1
            return len(known) > limit and args[i].data_ptr() not in self.recorder.owned
        moving = [i for i in range(self.tensors) if i not in entry.buffers and moves(i)]
        for i in moving:
            with torch.inference_mode(False), torch.no_grad():
                entry.buffers[i] = copied(args[i])
        if moving:
            for r in entry.recordings:
                self._drop(r)
            entry.recordings.clear()

    def _made(self, entry: Entry, args: list) -> Recording | None:
        fixed = [i for i in range(self.tensors) if i not in entry.buffers]
        addresses = [0 if i in entry.buffers else args[i].data_ptr() for i in range(self.tensors)]
        given = [entry.buffers.get(i, a) for i, a in enumerate(args)]
        fn, start = self.capture(), time.perf_counter()
        self._pending_of(fn)
        try:
            replay, results = self.recorder.record(fn, given)
        except Exception as error:
            self.broken = f"{type(error).__name__}: {error}"
            self.clear()
            self.failed(error)
            return None
        finally:
            self.counts.seconds += time.perf_counter() - start
        made = Recording(replay, results, fixed, addresses, sorted(entry.buffers.items()), self.written, entry.held)
        entry.recordings.append(made)
        entry.made += 1
        self.counts.recordings += 1
        held = [t.untyped_storage().data_ptr() for t in made.templates]
        for at in held:
            self.recorder.owned[at] = self.recorder.owned.get(at, 0) + 1
        weakref.finalize(made, _disowned, self.recorder.owned, held).atexit = False
        return made

    def _drop(self, r: Recording) -> None:
        """Waits for it, so that it may go."""
        self.counts.dropped += 1
        self.recorder.wait()

    def clear(self) -> None:
        """Drops all recordings."""
        for entry in self.entries.values():
            for r in entry.recordings:
                self._drop(r)
        self.entries.clear()


# -- memory ------------------------------------------------------------------------------------------------------------------
def _disowned(owned: dict[int, int], addresses: list[int]) -> None:
    """The memory at `addresses` is no longer a recording's."""
    for at in addresses:
        owned[at] = owned.get(at, 0) - 1
        if owned[at] <= 0:
            del owned[at]


def _bytes(tensors: list[torch.Tensor]) -> int:
    """Of the memory behind `tensors`."""
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def _over(t: torch.Tensor) -> torch.Tensor:
    """A tensor over t's memory that is no view and no inference tensor."""
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _like(t: torch.Tensor) -> torch.Tensor:
    """Fresh memory with t's shape and strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _distinct(t: torch.Tensor) -> torch.Tensor:
    """`t` with one element in the place of all that a stride of 0 repeats."""
    return t[tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())] if 0 in t.stride() else t


def copied(t: torch.Tensor) -> torch.Tensor:
    """A copy of `t` with its strides."""
    out = _like(t)
    _distinct(out).copy_(_distinct(t))
    return out
