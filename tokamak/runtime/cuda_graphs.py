"""Recording on NVIDIA's GPUs: CUDA graphs, captured by torch, so that random numbers go on from replay to replay as they do from call to call.

Memory of a recording has two homes. What lives beyond the recording (its results) is allocated between `keep` and `share`, in a pool of the
recording's own; all else in one pool for all recordings of the device, whose blocks are free again when a capture ends. A block of that second pool
is only ever written and read within one replay, so it does not matter in which order recordings are replayed, as long as it is one after the other.
"""
from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .graphs import Boxed

_C = torch._C


class CudaRecorder:
    """The recorder of device `index`."""

    def __init__(self, index: int):
        self.index, self.lock, self.owned = index, threading.RLock(), {}
        self.shared = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(index)
        self.own: tuple | None = None               # the pool of the recording that is being made
        self.entered: list[tuple] = []              # the pools that allocations were sent to, each as often
        self.last: int | None = None                # the stream of the last replay

    def busy(self) -> bool:
        return _C._cuda_isCurrentStreamCapturing()

    def wait(self) -> None:
        torch.cuda.synchronize(self.index)

    def waited(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        before = _C._cuda_get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                out = call()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for w in told:
            if "synchronizing CUDA operation" not in str(w.message) and "Synchronization debug mode" not in str(w.message):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return out, any("called a synchronizing CUDA operation" in str(w.message) for w in told)

    def finish(self) -> None:
        """Waits for the current stream."""
        torch.cuda.current_stream(self.index).synchronize()

    # -- recording
    def record(self, fn: Boxed, args: list) -> tuple[Callable[[], None], list[torch.Tensor]]:
        torch.cuda.synchronize(self.index)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.index):
            torch.cuda.current_blas_handle()        # a thread's first is not made while capturing
            with torch.cuda.stream(self.stream), _own_workspaces(), self._capturing(graph):
                torch.cuda.current_blas_handle()    # with a workspace for this stream, from the memory that recordings share
                results = fn(args)
        return self._replaying(graph), results

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        own, self.entered = torch.cuda.graph_pool_handle(), []
        graph.capture_begin(pool=own, capture_error_mode="thread_local")
        self.own = own
        try:
            self.share()
            yield
            self._ended(graph)
        except BaseException:
            with suppress(RuntimeError):            # the capture is spoiled: why, the first error says
                self._ended(graph)
            raise
        finally:
            for pool in self.entered:
                if pool == own:                     # the shared pool stays, whatever becomes of its recordings
                    _C._cuda_releasePool(self.index, pool)

    def _ended(self, graph: torch.cuda.CUDAGraph) -> None:
        own = self.own
        if own is None:
            return
        self.keep()                                 # where the capture began
        self.own = None
        try:
            graph.capture_end()
        except RuntimeError:                        # torch leaves what it began
            with suppress(RuntimeError):
                _C._cuda_endAllocateToPool(self.index, own)
            with suppress(RuntimeError):
                self._again()
            raise

    def _again(self) -> None:
        """A capture that goes well: behind one that did not, torch's generator still takes itself for captured."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=f"cuda:{self.index}")
        graph.capture_end()

    def keep(self) -> None:
        """What is allocated from now on lives as long as the recording."""
        if self.own is not None and self.entered[-1:] == [self.shared]:
            self._send(self.shared, self.own)

    def share(self) -> None:
        """What is allocated from now on is gone when the call ends."""
        if self.own is not None and self.entered[-1:] != [self.shared]:
            self._send(self.own, self.shared)

    def _send(self, before: tuple, pool: tuple) -> None:
        _C._cuda_endAllocateToPool(self.index, before)
        _C._cuda_beginAllocateCurrentThreadToPool(self.index, pool)
        self.entered.append(pool)

    def _replaying(self, graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
        start, stream_of, index = super(torch.cuda.CUDAGraph, graph).replay, _C._cuda_getCurrentRawStream, self.index

        def replay() -> None:
            stream = stream_of(index)
            if stream != self.last:
                self._behind(stream)
            start()
        return replay

    def _behind(self, stream: int) -> None:
        """The current stream waits for what was replayed on the last one: recordings share memory."""
        if self.last is not None:
            event = torch.cuda.Event()
            event.record(_stream(self.last, self.index))
            event.wait(torch.cuda.current_stream(self.index))
        self.last = stream


def _stream(raw: int, index: int) -> torch.cuda.Stream:
    """The stream of that number. The default one's is 0, of which `ExternalStream` makes some other stream."""
    return torch.cuda.ExternalStream(raw, index) if raw else torch.cuda.default_stream(index)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """The vendor's libraries take their workspaces anew within, while it is recorded from the memory of recordings, and let go of them: one that was
    there before would be nobody's afterwards, and be given to others while replays still write it."""
    _C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        _C._cuda_clearCublasWorkspaces()


_recorders: dict[int, CudaRecorder] = {}
_lock = threading.Lock()


def recorder(device: str) -> CudaRecorder:
    """The one of `device` ("cuda:0")."""
    index = torch.device(device).index or 0
    with _lock:
        if index not in _recorders:
            with torch.cuda.device(index):
                _recorders[index] = CudaRecorder(index)
        return _recorders[index]
