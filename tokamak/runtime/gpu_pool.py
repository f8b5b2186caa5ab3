"""The parent's side of the processes that compile Triton kernels: one pool a process, started in the background, gone with the process.

A pool is a nursery (`gpu_worker.py`) with one worker a core; every worker is at the other end of a channel, and a channel serves one job at a time. A
worker that dies takes its channel with it, and its job is tried on another once: a kernel that ends the compiler twice is at fault itself. A pool
without channels is replaced at the next use. A forked child closes what it inherited and has a pool of its own when it needs one.
"""
from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from . import gpu_worker

MOST = 64                   # workers; each has some 10 MB of its own
PATIENCE = 600.0            # seconds that one kernel may take
NICE = 5                    # how far workers stand back behind this process, which plans the next graph while they are at work


class WorkerDied(Exception):
    """The process that compiled a job ended, or did not come back in time."""


class PoolGone(Exception):
    """There are no workers here (any more)."""


class Pool:
    """`size` workers, which expect jobs for `arch` (and do others). Raises OSError when the nursery cannot be started."""

    def __init__(self, size: int, arch: tuple):
        self.changed = threading.Condition()
        self.control, control = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(size)]
        theirs = [b for _, b in pairs]
        numbers = [s.fileno() for s in theirs]
        self.folder = tempfile.mkdtemp(prefix="tokamak-")
        command = ["env", "-u", "TRITON_INTERPRET", sys.executable, "-P", gpu_worker.__file__]       # an interpreted Triton compiles nothing
        try:
            self.process = subprocess.Popen(command, stdin=control, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=numbers)
        finally:
            for s in (control, *theirs):
                s.close()
        for ours, _ in pairs:
            ours.settimeout(PATIENCE)
        self.idle = [ours for ours, _ in pairs]
        self.channels = set(self.idle)
        self.up = False
        with contextlib.suppress(OSError):
            gpu_worker.send(self.control, {"path": [p or os.getcwd() for p in sys.path], "package": str(Path(__file__).parent.parent),
                                           "folder": self.folder, "arch": arch, "channels": numbers, "nice": NICE})

    def ready(self) -> bool:
        """The workers have started: a job begins at once."""
        if not self.up and select.select([self.control], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                self.up = self.control.recv(1) == b"r"
        return self.up

    def run(self, job: dict) -> dict:
        """A worker's answer to `job`. Raises WorkerDied, or PoolGone when there was none to ask."""
        why = None
        for _ in range(2):
            try:
                channel = self._take()
            except PoolGone:
                if why is None:
                    raise
                break
            answer = _ask(channel, job)
            if "died" not in answer:
                self._give(channel)
                return answer
            self._drop(channel)
            why = answer
            if why["died"] == "late":
                break
        if not self.ready():            # they never started
            raise PoolGone
        raise WorkerDied(_epitaph(why))

    def _take(self) -> socket.socket:
        with self.changed:
            self.changed.wait_for(lambda: self.idle or not self.channels)
            if not self.idle:
                raise PoolGone
            return self.idle.pop()

    def _give(self, channel: socket.socket) -> None:
        with self.changed:
            if channel in self.channels:
                self.idle.append(channel)
                self.changed.notify()

    def _drop(self, channel: socket.socket) -> None:
        with self.changed:
            self.channels.discard(channel)
            channel.close()
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the workers and waits for the nursery, which waits for them."""
        self.forget()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self) -> None:
        """Closes this process's ends of the channels."""
        self.idle.clear()
        for s in (self.control, *self.channels):
            s.close()
        self.channels.clear()


def _ask(channel: socket.socket, job: dict) -> dict:
    try:
        gpu_worker.send(channel, job)
        return gpu_worker.receive(channel)
    except TimeoutError:
        return {"died": "late"}
    except EOFError:
        return {"died": None}
    except OSError:                     # it was gone when asked, but may have left word
        try:
            return gpu_worker.receive(channel)
        except (OSError, EOFError, pickle.UnpicklingError):
            return {"died": None}
    except pickle.UnpicklingError:      # it died while it wrote
        return {"died": None}


def _epitaph(answer: dict) -> str:
    status, last = answer["died"], answer.get("said", "").strip()
    if status == "late":
        return f"the compiler took longer than {PATIENCE:.0f} s"
    how = "ended" if status is None else f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
    return f"the compiler's process {how}" + (f": {last}" if last else "")


# -- the pool of this process --------------------------------------------------------------------------------------------
_lock = threading.Lock()
_pool: Pool | None = None


def pool(size: int, arch: tuple) -> Pool | None:
    """This process's pool, started now if there is none with workers. None where processes cannot be started."""
    global _pool
    with _lock:
        if _pool is not None and not _pool.channels:
            _pool.close()
            _pool = None
        if _pool is None:
            with contextlib.suppress(OSError):
                _pool = Pool(max(1, min(size, MOST)), arch)
        return _pool


def started() -> Pool | None:
    """This process's pool if it has one."""
    return _pool


def close() -> None:
    """Ends this process's pool, if it has one."""
    global _pool
    with _lock:
        gone, _pool = _pool, None
    if gone is not None:
        gone.close()


def _in_child() -> None:
    global _lock, _pool
    _lock = threading.Lock()
    if _pool is not None:
        _pool.forget()
        _pool.process.returncode = 0        # it is the parent's: nothing to wait for here
        _pool = None


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
