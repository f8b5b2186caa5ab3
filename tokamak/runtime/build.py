"""C text -> callable kernels.

`build` compiles the units that are neither in this process nor in the cache on disk, in as many compiler processes as there are cores. Units that
begin with the same prelude share a process (a shard): eight small kernels take 61 ms in one, 27 ms each alone. A library is loaded from the bytes
that were built or checked, through a descriptor of its own, so that nothing on disk can come between.
"""
from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping, Sequence

from ..errors import BuildError, CompilerMissing
from . import threads
from .cache import Cache, open_cache

ABI = 1        # of the kernels' calling convention: int64_t NAME(const int64_t *words, int64_t threads), void tk_init(void *, void *)
FLAGS = ("-O2", "-fPIC", "-shared", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fno-strict-aliasing", "-w")
ROUND_EACH = "-ffp-contract=off"           # a product is rounded before it is added to something
_GNU_FLAGS = ("-pipe", "-nostdlib")        # 26 ms a small kernel instead of 43: no temporary files, no start files; libc and libm are in the process
_GNU_LIBS = ("-lgcc",)
_WIDE = ("-mprefer-vector-width=512",)     # for some processors gcc splits loops over a register's lanes into halves that meet in memory: softmax of
                                           # 4096 x 4097 on two cores of a Xeon 7.0 -> 3.8 ms, cross-entropy of 512 x 32000 4.6 -> 1.9

TICK = 0.2                 # seconds after which whoever waits for a build hears how far it is
PATIENCE = 600.0           # seconds that a compiler may take for one shard
QUICK = 30.0               # seconds in which it has to say its version

Kernel = Callable[[bytes, int], int]
Progress = Callable[[int, int], object]         # (kernels compiled, kernels to compile)


@dataclass(frozen=True)
class Unit:
    """C text that defines the kernel `symbol` (by default called `name`). `prelude`: pieces of text that stand before it, each after those that it
    uses; units whose first piece is equal may be compiled as one translation unit that has every piece once, so what `text` defines must be named
    after its symbol.
    Without a prelude `text` is complete and is compiled alone. `flags`: further words for the compiler. Units equal in text, prelude and flags are
    built once."""
    name: str
    text: str
    symbol: str = ""
    prelude: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def entry(self) -> str:
        return self.symbol or self.name

    @property
    def whole(self) -> str:
        return "".join((*self.prelude, self.text))


@dataclass(frozen=True)
class Compiler:
    """`command` starts it, `version` is what it says of itself, `gnu`: it is gcc."""
    command: tuple[str, ...]
    version: str
    gnu: bool = False

    def line(self, output: str, flags: Sequence[str] = ()) -> list[str]:
        """The command that compiles standard input to the library `output`; of `flags` that contradict ours these count."""
        machine = platform.machine()
        native = ("-mcpu=native",) if machine in ("aarch64", "arm64") else ("-march=native", *_WIDE * (machine in ("x86_64", "AMD64")))
        extra, libraries = (_GNU_FLAGS, _GNU_LIBS) if self.gnu else ((), ("-lm",))
        return [*self.command, *FLAGS, *flags, *native, *extra, "-x", "c", "-", "-o", output, *libraries]


@functools.cache
def compiler(choice: str = "") -> Compiler:
    """The C compiler: `choice` (a command), else gcc, cc, clang, or zig from the wheel `ziglang`. Raises CompilerMissing, or BuildError where no
    process can be started."""
    for name in (choice,) if choice.strip() else ("gcc", "cc", "clang"):
        try:
            words = shlex.split(name)
        except ValueError:          # a quotation that does not end
            continue
        path = shutil.which(words[0])
        if path is None:
            continue
        try:
            status, version, _ = run_process([path, *words[1:], "--version"], b"", QUICK)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EAGAIN):         # it says nothing about this compiler: another is not looked for
                raise BuildError(f"the C compiler could not be started: {error}") from None
            continue
        if status != 0:
            continue
        version = version.strip()
        return Compiler((path, *words[1:]), version, "Free Software Foundation" in version)
    if not choice.strip() and importlib.util.find_spec("ziglang") is not None:
        return Compiler((sys.executable, "-m", "ziglang", "cc"), f"ziglang {importlib.metadata.version('ziglang')}")
    found = f"'{choice}' is no C compiler that runs (option cc, or TOKAMAK_CC; empty looks for one)" if choice.strip() else "no C compiler was found"
    raise CompilerMissing(f"{found}; install one: `apt install gcc` (or your system's package), or `pip install ziglang`")


@functools.cache
def target() -> str:
    """The processor, as far as generated code depends on it: architecture, model and instruction set features."""
    facts = [platform.machine(), platform.system()]
    try:
        with open("/proc/cpuinfo") as file:
            for line in itertools.takewhile(str.strip, file):
                field = line.split(":")[0].strip().lower()
                if field in ("vendor_id", "cpu family", "model", "flags", "features", "cpu implementer", "cpu part"):
                    facts.append(" ".join(line.split()))
    except OSError:
        facts.append(platform.processor())
    return "\n".join(facts)


def key(text: str, cc: Compiler, flags: Sequence[str] = ()) -> str:
    """What a kernel is kept under: everything that its library depends on."""
    parts = (str(ABI), target(), cc.version, " ".join(cc.line("", flags)), text)
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()


# -- building ------------------------------------------------------------------------------------------------------------
_LOADED: dict[str, ctypes.CDLL] = {}        # key -> library, for the life of the process
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Build:
    """How one unit came to be callable. `how`: 'process' (it was loaded already), 'cache' (on disk) or 'compiled', in a compiler process that took
    `seconds` for all units of its shard; 'interpreted': nothing was built."""
    name: str
    how: str
    seconds: float = 0.0


def build(units: Sequence[Unit], *, cache_dir: str = "", cc: str = "", report: Callable[[Build], object] | None = None,
          progress: Progress | None = None) -> dict[str, Kernel]:
    """The kernel of each unit by its name. `cache_dir`: where built kernels are kept ('' keeps none). `report` is told of each unit, `progress`
    several times a second how many of how many are compiled. Raises CompilerMissing or BuildError."""
    if not units:
        return {}
    chosen = compiler(cc)
    keys = {u: key(u.whole, chosen, u.flags) for u in units}
    seconds: dict[str, float] = {}
    with _LOCK:
        missing = {k: u for u, k in keys.items() if k not in _LOADED}
        if missing:
            _LOADED.update(_load_all(missing, chosen, open_cache(cache_dir) if cache_dir else None, seconds, progress))
    for u, k in keys.items() if report is not None else ():
        report(Build(u.name, "process" if k not in missing else "compiled" if k in seconds else "cache", seconds.get(k, 0.0)))
    return {u.name: _kernel(_LOADED[k], u.entry) for u, k in keys.items()}


def _kernel(library: ctypes.CDLL, symbol: str) -> Kernel:
    found = library[symbol]
    found.argtypes, found.restype = (ctypes.c_char_p, ctypes.c_int64), ctypes.c_int64
    return found


def _load_all(missing: dict[str, Unit], cc: Compiler, cache: Cache | None, seconds: dict[str, float],
              progress: Progress | None) -> dict[str, ctypes.CDLL]:
    """Libraries for `missing` (key -> unit), from the cache or built now. A shard's library is kept under the key of each of its kernels.
    `seconds` receives what the compiler took for each that was built."""
    libraries = {k: cache.get(k) for k in missing} if cache else dict.fromkeys(missing)
    shards = _shards({k: missing[k] for k, found in libraries.items() if found is None}, _cores())
    for shard, library, took in _compiled([[missing[k] for k in shard] for shard in shards], cc, progress) if shards else ():
        for k in shards[shard]:
            libraries[k], seconds[k] = library, took
            if cache:
                cache.put(k, library)
    loaded = {library: load(library) for library in dict.fromkeys(libraries.values())}
    return {k: loaded[library] for k, library in libraries.items()}


def _compiled(shards: Sequence[Sequence[Unit]], cc: Compiler, progress: Progress | None) -> Iterator[tuple[int, bytes, float]]:
    """(number of the shard, its library, seconds) as they are done. Whatever ends this early ends the compilers, too."""
    running: set[subprocess.Popen] = set()
    with temporary() as folder, ThreadPoolExecutor(min(len(shards), _cores())) as workers:
        one = lambda i: _timed(lambda: compile_text(shard_text(shards[i]), cc, Path(folder) / f"{i}.so", shards[i][0].flags, running))
        try:
            made = {workers.submit(one, i): i for i in range(len(shards))}
            for done in finished(made, progress, {f: len(shards[i]) for f, i in made.items()}):
                yield made[done], *done.result()
        except BaseException as error:
            workers.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                _end(process)
            if isinstance(error, RuntimeError) and "new thread" in str(error):
                raise BuildError(f"the C compiler could not be started: {error}") from None
            raise


def temporary() -> tempfile.TemporaryDirectory:
    """A folder to compile in. Raises BuildError."""
    try:
        return tempfile.TemporaryDirectory(prefix="tokamak-")
    except OSError as error:
        raise BuildError(f"there is no folder for temporary files: {error}; TMPDIR names one") from None


def finished(work: Iterable[Future], progress: Progress | None = None, kernels: Mapping[Future, int] | None = None) -> Iterator[Future]:
    """The futures of `work` as they are done. `progress` hears of it several times a second; `kernels`: how many each makes, if that is not one."""
    left, done = set(work), 0
    count = (lambda f: 1) if kernels is None else kernels.__getitem__
    total = sum(map(count, left))
    while left:
        ready, left = wait(left, TICK if progress is not None else None, FIRST_COMPLETED)
        yield from ready
        done += sum(map(count, ready))
        if progress is not None:
            progress(done, total)


def _timed(work: Callable[[], bytes]) -> tuple[bytes, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _shards(work: dict[str, Unit], most: int) -> list[list[str]]:
    """The keys in groups that can be one translation unit, long texts spread evenly over at most `most` groups a prelude."""
    families: dict[tuple, list[str]] = {}
    occurrence: Counter = Counter()
    for k, unit in work.items():
        head = (unit.prelude[:1] or (k,), unit.flags)
        families.setdefault((head, occurrence[head, unit.entry]), []).append(k)
        occurrence[head, unit.entry] += 1
    shards: list[list[str]] = []
    for members in families.values():
        members.sort(key=lambda k: -len(work[k].text))
        shards += [members[i::most] for i in range(min(most, len(members)))]
    return shards


def shard_text(units: Sequence[Unit]) -> str:
    """One translation unit of all: every piece of their preludes once, then their texts."""
    return "".join((*dict.fromkeys(piece for u in units for piece in u.prelude), *(u.text for u in units)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_text(text: str, cc: Compiler, output: Path, flags: Sequence[str] = (), running: set[subprocess.Popen] | None = None) -> bytes:
    """The library that `cc` makes of `text`; it passes through the file `output`. Raises BuildError with the command and the compiler's words."""
    command = cc.line(str(output), flags)
    shown = f"\n  {' '.join(command)}\n"
    try:
        status, _, said = run_process(command, text.encode(), PATIENCE, running)
    except OSError as error:
        raise BuildError(f"the C compiler could not be started: {error}{shown}") from None
    words = "\n".join(said.splitlines()[:12])
    if status is None:
        raise BuildError(f"the C compiler took longer than {PATIENCE:.0f} s for a generated kernel and was stopped{shown}{words}")
    if status < 0:
        raise BuildError(f"the C compiler was killed by {signal_name(-status)}{shown}{words}")
    if status:
        raise BuildError(f"the C compiler failed on a generated kernel (exit {status}){shown}{words}")
    try:
        library = output.read_bytes()
    except OSError as error:
        raise BuildError(f"the C compiler ended well and left no library: {error.strerror}{shown}{words}") from None
    if not whole(library):
        raise BuildError(f"the C compiler ended well and left a damaged library of {len(library)} bytes (is the disk full?){shown}{words}")
    return library


def run_process(command: Sequence[str], given: bytes, seconds: float, running: set[subprocess.Popen] | None = None) -> tuple[int | None, str, str]:
    """(exit status, standard output, standard error) of a command with the standard input `given`. After `seconds` it is ended with all that it
    started, and the status is None. `running` holds it while it runs. Raises OSError when it cannot be started."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0)
    running = set() if running is None else running
    with process:
        running.add(process)
        try:
            out, said = process.communicate(given, seconds)
        except BaseException as error:
            _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, "", ""
            raise
        finally:
            running.discard(process)
    return process.returncode, out.decode(errors="replace"), said.decode(errors="replace")


def _end(process: subprocess.Popen) -> None:
    """Ends a process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def whole(library: bytes) -> bool:
    """Does an ELF file end no earlier than its headers say? The loader would map a truncated one, and the first touch of what is missing would end
    the process. Of other formats the loader is the judge."""
    if sys.platform != "linux" or library[:4] == b"\x7fELF" and library[4:6] != b"\x02\x01":       # not of 64 bits, little endian
        return True
    try:
        segments, sections = struct.unpack_from("<2Q", library, 32)
        size, count, section_size, section_count = struct.unpack_from("<4H", library, 54)
        ends = [sum(struct.unpack_from("<Q16xQ", library, segments + i * size + 8)) for i in range(count)]
    except struct.error:
        return False
    return library[:4] == b"\x7fELF" and max(*ends, sections + section_size * section_count, 64) <= len(library)


# -- loading -------------------------------------------------------------------------------------------------------------
_serial = itertools.count()


def load(library: bytes) -> ctypes.CDLL:
    """`library` in this process, told where torch's threads are. Raises BuildError when the system does not let it be executed."""
    try:
        loaded = _load_from_memory(library)
    except (OSError, AttributeError):       # no memfd here, or its content may not be executed
        try:
            loaded = _load_from_file(library)
        except OSError as error:
            raise BuildError(f"a kernel was built but cannot be loaded: {error}; TMPDIR names a folder whose files may be executed") from None
    _tell_threads(loaded, *threads.entry_points())
    return loaded


def _load_from_memory(library: bytes) -> ctypes.CDLL:
    fd = os.memfd_create("tokamak", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(library)
        return ctypes.CDLL(f"/proc/self/fd{_slashes(next(_serial))}{fd}", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    finally:
        os.close(fd)


def _slashes(number: int) -> str:
    """A path separator that spells `number` ('/' and './' as binary digits): the loader takes equal paths for one library, and numbers come again."""
    return "/" + "".join("./" if digit == "1" else "/" for digit in f"{number:b}")


def _load_from_file(library: bytes) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="tokamak-") as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(library)
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)


def _tell_threads(library: ctypes.CDLL, parallel: int, thread_num: int) -> None:
    init = getattr(library, "tk_init", None)
    if init is not None:
        init.argtypes, init.restype = (ctypes.c_void_p, ctypes.c_void_p), None
        init(parallel or None, thread_num or None)


def _one_thread_only() -> None:
    """In a forked child: libgomp hangs there with more than one thread."""
    global _LOCK
    _LOCK = threading.Lock()
    for library in _LOADED.values():
        _tell_threads(library, *threads.entry_points())


threads.on_fork(_one_thread_only)
