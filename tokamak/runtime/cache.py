"""Built kernels on disk: one file a kernel, named by its key, that any number of processes may read and write at once.

    file ::= library; sha256(key + library); b"tokamak1"

The directory is ours alone: mode 0700, and nobody else can write to it or to a folder above it. A file is opened once, checked, and what was checked
is what gets loaded. Whatever is corrupt or foreign is ignored with one warning, as is a directory that cannot be used; the kernel is then built.
"""
from __future__ import annotations

import functools
import hashlib
import os
import secrets
import stat
import time
import warnings
from pathlib import Path

_MAGIC = b"tokamak1"
_TRAILER = 32 + len(_MAGIC)
LEFT_OVER = 3600.0          # seconds after which a file that was being written is taken for one that nobody writes any more


class Cache:
    """The kernels in `directory`. `reason` says why it cannot be used (nothing is then found or kept), None when it can."""

    def __init__(self, directory: str):
        self.directory = Path(directory)
        self.fd = -1
        self.swept = False
        self.reason: str | None = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.reason = unsafe(self.directory)
            if self.reason is None:
                self.fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self.reason = error.strerror or str(error)
        if self.reason is not None:
            _warn_once(f"no kernel cache in {directory}: {self.reason}; kernels are built in each process. TOKAMAK_CACHE_DIR names another folder")

    def get(self, key: str) -> bytes | None:
        """The library kept under `key`, or None."""
        if self.reason is not None:
            return None
        try:
            fd = os.open(f"{key}.so", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError("what lies under a key is no file")
                with open(fd, "rb", closefd=False) as file:
                    content = file.read()
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(f"kernels in {self.directory} cannot be read: {error.strerror or error}")
            return None
        if info.st_uid != os.getuid() or info.st_mode & 0o022:
            _warn_once(f"kernels in {self.directory} that other users could have written are ignored")
            return None
        library = content[:-_TRAILER]
        if content[-_TRAILER:] != _seal(key, library):
            _warn_once(f"corrupt kernels in {self.directory} are ignored and built again")
            return None
        return library

    def put(self, key: str, library: bytes) -> None:
        """Keeps `library` under `key`; when it cannot be written, one warning."""
        if self.reason is not None:
            return
        self._sweep()
        temporary = f".{key[:16]}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
            try:
                with open(fd, "wb") as file:
                    file.write(library + _seal(key, library))
                os.rename(temporary, f"{key}.so", src_dir_fd=self.fd, dst_dir_fd=self.fd)
            except OSError:
                os.unlink(temporary, dir_fd=self.fd)
                raise
        except OSError as error:
            _warn_once(f"kernels are not kept in {self.directory}: {error.strerror or error}")

    def _sweep(self) -> None:
        """Removes, once, what processes that were killed while they wrote have left."""
        if self.swept:
            return
        self.swept = True
        try:
            with os.scandir(self.fd) as entries:
                for entry in entries:
                    if entry.name.startswith(".") and time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFT_OVER:
                        os.unlink(entry.name, dir_fd=self.fd)
        except OSError:         # another process was faster, or the disk may not be written to, which `put` will say
            pass


def _seal(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest() + _MAGIC


def unsafe(directory: Path) -> str | None:
    """Why someone else could put files into `directory`, or None."""
    me, path = os.getuid(), directory.resolve()
    info = path.stat()
    if info.st_uid != me or info.st_mode & 0o077:
        return f"{path} must belong to you and have mode 0700, not owner {info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}"
    for parent in path.parents:
        info = parent.stat()
        if info.st_uid not in (0, me):
            return f"{parent} belongs to user {info.st_uid}"
        own_group = info.st_mode & 0o020 and not (info.st_uid == me and info.st_gid == me)     # a user's private group has the user's number
        if (own_group or info.st_mode & 0o002) and not info.st_mode & stat.S_ISVTX:
            return f"others may write to {parent}"
    return None


@functools.cache
def open_cache(directory: str) -> Cache:
    return Cache(directory)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(f"tokamak: {message}", stacklevel=3)
