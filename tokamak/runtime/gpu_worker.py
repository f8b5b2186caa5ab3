"""One Triton kernel -> machine code, and the processes that do it.

`compile_job` is the work itself; it may run anywhere. Run as a script this file is the nursery: a process that imports Triton once (and neither torch
nor the rest of tokamak) and forks a worker for each of the sockets it was given. A worker reads jobs from its socket and answers them, one at a
time. The nursery speaks for a worker that died. All of them end when the parent closes its ends, which the system does if the parent is killed.

    message ::= length: 8 bytes, little endian; a pickled dict
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import linecache
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable
from functools import partial

_LOCK = threading.Lock()            # Triton's settings are global


# -- the work ------------------------------------------------------------------------------------------------------------
def compile_job(job: dict, folder: str) -> dict:
    """The fields of a Binary beside its unit and its target. `job`: the fields of a GpuUnit as plain values, and `arch`; `assembler`: NVIDIA's to
    use, Triton's own unless there is one. `folder`: where Triton may put its files while it works. Raises what Triton raises."""
    knobs, compiler = importlib.import_module("triton").knobs, importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget(*job["arch"])
    fn = load(job["name"], job["text"])
    attrs = {(i,): [["tt.divisibility", 16]] for i in job["divisible"]}
    boxes = [tuple(box) for box in job.get("boxes", ())]
    types = [*job["signature"], *(f"tensordesc<{_ROUNDED.get(element, element)}{list(block)}>" for element, block in boxes)]
    source = compiler.ASTSource(fn, dict(zip(fn.arg_names, types, strict=True)), constexprs={}, attrs=attrs)
    files, usual = _Files(folder), importlib.import_module("triton.runtime.cache").FileCacheManager
    hopper = tuple(job["arch"][:2]) == ("cuda", 90)
    first = _tokamak("gpu_listing").lines_that_leave_first(job["text"]) if hopper else frozenset()
    manager = lambda key, **other: usual(key, **other) if other else files
    with _LOCK, _instead(knobs.cache, "manager_class", manager), _assembled_by(knobs.nvidia, job.get("assembler", "")):
        looked, code = getattr(knobs.runtime, "add_stages_inspection_hook", None), _tokamak("gpu_code")
        try:
            for lines in dict.fromkeys((first, frozenset())):
                knobs.runtime.add_stages_inspection_hook = partial(_stages, lines, job.get("few", 0) if hopper else None)
                made = _first_that_compiles(partial(compiler.compile, source, target=target), job)
                if not lines or not code.misplaced(made.kernel):
                    went = _tokamak("gpu_access").contention(made.asm["ptx"], 32 * made.metadata.num_warps) if hopper else ()
                    waits = code.waits(made.kernel).contended(*went) if hopper else code.Waits(0, 0, 0)
                    return {**_result(made, [element for element, _ in boxes]), "waits": dataclasses.astuple(waits)}
        finally:
            files.remove()
            knobs.runtime.add_stages_inspection_hook = looked


@contextlib.contextmanager
def _instead(settings, name: str, value):
    """Within it one of Triton's `settings` has this value, however the environment has it."""
    before = settings.__dict__.get(name)
    settings.__dict__[name] = value
    try:
        yield
    finally:
        settings.__dict__.pop(name) if before is None else settings.__dict__.update({name: before})


def _assembled_by(settings, path: str):
    """Within it NVIDIA's assembler is the one at `path`, '' the one that came with Triton, where that says which it is."""
    chosen = path or getattr(vars(type(settings)).get("ptxas"), "default_path", "")
    return _instead(settings, "ptxas", chosen) if chosen else contextlib.nullcontext()


def _first_that_compiles(compile: Callable, job: dict):
    """What `compile` makes of a kernel. Triton's passes fail on some tiles because of how threads lie on them, which another number of warps changes
    (and nothing else: a program computes the same), but where programs of a cluster exchange what their threads have."""
    most, usual = 1024 // job["arch"][2], job["warps"]
    counts = [usual] if job.get("cluster", 1) > 1 else [usual, *(n for n in (2 * usual, 4 * usual, usual // 2, 8 * usual) if 1 <= n <= most)]
    for warps in counts:
        options = {"num_warps": warps, "num_stages": job["stages"], "enable_fp_fusion": job["contract"]}
        if job.get("registers") and job["arch"][0] == "cuda":
            options["maxnreg"] = max(16, min(job["registers"], job["registers"] * usual // warps // 8 * 8))
        try:
            return compile(options=options)
        except RuntimeError as failed:
            if warps == counts[-1] or "PassManager" not in str(failed):
                raise


_UNWRAPPED = re.compile(r"= (shl|add|sub|mul)((?: nuw| nsw)+) (?=<)")


def _stages(first: frozenset[int], few: int | None, backend=None, stages=None, *others):
    """Triton asks for changes of its stages: vectors of integers carry no promise that they do not wrap. LLVM gathers scalars in vectors, which keep
    the promises of some of them; of two in a register of 64 bits, a lane that wraps then reached into its neighbour (an address). On Hopper, where
    `few` is no None, the pipeline's copies that the lines `first` of the kernel's text make say that they leave the cache first, which Triton drops;
    registers are allowed by name and there are fences where `gpu_listing.with_room` and `waiting_together` say so, which have the assembler called
    early."""
    if stages is None:
        return "", ""
    made, printed, assembled = stages.get("llir"), stages.get("ptx"), stages.get("cubin")
    if made is not None:
        stages["llir"] = lambda source, metadata: _UNWRAPPED.sub(r"= \1 ", text) if isinstance(text := made(source, metadata), str) else text
    if printed is None or assembled is None or few is None:
        return
    done: dict[str, bytes] = {}

    def assemble(ptx: str, metadata: dict) -> bytes:
        if ptx not in done:
            done[ptx] = assembled(ptx, metadata)
        return done[ptx]

    def print_so(source, metadata: dict) -> str:
        listing = _tokamak("gpu_listing")
        ptx = listing.leaving_first(printed(source, metadata), first)           # which gives the kernel its name
        name, warps, code = metadata["name"], metadata["num_warps"], lambda text: assemble(text, metadata)
        ptx = listing.with_room(ptx, code, name, warps)
        return listing.waiting_together(ptx, code, name, warps, metadata["shared"], few)

    stages["ptx"], stages["cubin"] = print_so, assemble


def _tokamak(module: str) -> types.ModuleType:
    """A module beside this one: late, for a nursery has first to make them importable."""
    return importlib.import_module(f"tokamak.runtime.{module}")


class _Files:
    """What a compile wants of Triton's cache, which has nothing and keeps nothing: files that it writes and reads again. (Triton's own would make and
    remove a folder for each file, a fifth of a compile's time.)"""

    def __init__(self, folder: str):
        self.start, self.names = os.path.join(folder, f"{os.getpid()}-{threading.get_ident()}-"), set()

    def get_group(self, name: str) -> None:
        return None

    def put_group(self, name: str, group: dict) -> None:
        pass

    def get_file(self, name: str) -> str | None:
        return self.start + name if name in self.names else None

    has_file = get_file

    def put(self, data, name: str, binary: bool = True) -> str:
        with open(self.start + name, "wb") as file:
            file.write(data if isinstance(data, bytes) else str(data).encode())
        self.names.add(name)
        return self.start + name

    def remove(self) -> None:
        for name in self.names:
            os.unlink(self.start + name)


def load(name: str, text: str):
    """The function `name` that `text` defines, jitted; its source can be inspected for as long as the next of that name is not loaded."""
    file = f"<tokamak {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    module = types.ModuleType(f"tokamak_kernel_{name}")
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__[name]


_ELEMENTS = {8: 10, 9: 8, 10: 9}         # a device's number of an element type -> the driver's, where they differ
_ROUNDED = {"tf32": "fp32"}              # memory of the one, which the copy engine rounds to the other
_TF32 = 11                               # the driver's number


def _result(made, elements: list[str]) -> dict:
    facts = made.metadata
    kind = lambda m, element: _TF32 if element == "tf32" else _ELEMENTS.get(m["elem_type"], m["elem_type"])
    listing = made.asm.get("ptx") or made.asm.get("amdgcn") or ""
    return {"code": made.kernel, "entry": facts.name, "shared": facts.shared, "threads": facts.num_warps * facts.target.warp_size, "listing": listing,
            "scratch": (getattr(facts, "global_scratch_size", 0) or 0, getattr(facts, "global_scratch_align", 1) or 1),
            "maps": tuple((len(m["block_size"]), kind(m, element), m["elem_size"], m["swizzle"], tuple(m["block_size"]))
                          for m, element in zip(getattr(facts, "tensordesc_meta", None) or (), elements))}


# -- messages ------------------------------------------------------------------------------------------------------------
def send(channel: socket.socket, message: dict) -> None:
    body = pickle.dumps(message)
    channel.sendall(struct.pack("<Q", len(body)) + body)


def receive(channel: socket.socket) -> dict:
    """The next message. Raises EOFError when the other side is gone, TimeoutError when the channel's time is over."""
    return pickle.loads(_exactly(channel, struct.unpack("<Q", _exactly(channel, 8))[0]))


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = channel.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


_GARBAGE = 20_000           # new objects from which on a worker looks for cyclic garbage, between two jobs; a compile leaves some 2,000, 1 MB


# -- a worker --------------------------------------------------------------------------------------------------------------
def work(channel: socket.socket, folder: str, log: int) -> None:
    """Answers jobs until the parent is gone. What Triton and its tools print goes to the file `log`, whose end is part of a failure's message."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    gc.disable()                        # a seventh of a compile's time
    while True:
        if gc.get_count()[0] > _GARBAGE:
            gc.collect()
        try:
            job = receive(channel)
        except (EOFError, OSError):
            return
        os.ftruncate(log, 0)
        try:
            answer = compile_job(job, folder)
        except Exception as error:
            answer = {"error": words(error), "said": said(log)}
        send(channel, answer)


def words(error: BaseException) -> str:
    """An error and its causes, outermost first: of one in a function that a kernel calls, Triton's outermost says only where the call is."""
    found, cause = [], error
    while cause is not None and len(found) < 8:
        found.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n".join(found)


def said(log: int) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.pread(log, 1 << 16, 0).decode(errors="replace")


# -- the nursery -----------------------------------------------------------------------------------------------------------
_WARM = """import triton
import triton.language as tl
@triton.jit
def warm(p):
    tl.store(p, 0)
"""


def nursery(control: socket.socket, channels: list[socket.socket], setup: dict) -> None:
    """Forks a worker for each channel, and says on the channel of one that died what became of it, until `control` ends or all are dead."""
    without_torch(setup["package"])
    importlib.import_module("tokamak.codegen.triton_lib")
    job = {"name": "warm", "text": _WARM, "signature": ("*i32",), "divisible": (), "warps": 4, "stages": 3, "contract": True, "arch": setup["arch"]}
    compile_job(job, setup["folder"])           # what a first compile loads, every worker then has: 0.1 s instead of 0.45
    gc.freeze()                                 # no search of a worker's walks, and so copies, what it shares with the others
    logs = [os.memfd_create("tokamak") for _ in channels]
    wake, alarm = socket.socketpair()
    alarm.setblocking(False)
    signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    alive: dict[int, int] = {}
    for i, channel in enumerate(channels):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                os.nice(setup["nice"])
            _in_worker(channel, [control, wake, alarm, *(c for c in channels if c is not channel)], setup["folder"], logs[i])
        alive[pid] = i
    control.sendall(b"r")
    while alive:
        ready, _, _ = select.select([control, wake], [], [])
        if control in ready:                    # the parent closed it, or is gone
            break
        wake.recv(4096)
        for pid, status in _ended(alive):
            i = alive.pop(pid)
            with contextlib.suppress(OSError):
                send(channels[i], {"died": os.waitstatus_to_exitcode(status), "said": said(logs[i])})
            channels[i].close()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _in_worker(channel: socket.socket, others: list[socket.socket], folder: str, log: int) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in others:
        other.close()
    try:
        work(channel, folder, log)
    finally:
        os._exit(0)


def _ended(alive: dict[int, int]) -> list[tuple[int, int]]:
    found = []
    for pid in list(alive):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            found.append((pid, status))
    return found


def without_torch(package: str) -> None:
    """Makes the modules of the folder `package` importable as tokamak.*, without the front of the package, which imports torch."""
    for name, folder in (("tokamak", package), *((f"tokamak.{part}", os.path.join(package, part)) for part in ("codegen", "runtime"))):
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [folder]


def main() -> None:
    """Reads one message from standard input, a socket: the parent's sys.path, the package's folder, a folder to work in, the
    target, the channels' descriptors, and how far workers stand back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # a Ctrl-C is the parent's business
    control = socket.socket(fileno=os.dup(0))
    setup = receive(control)
    sys.path[:] = setup["path"]
    try:
        nursery(control, [socket.socket(fileno=fd) for fd in setup["channels"]], setup)
    finally:
        shutil.rmtree(setup["folder"], ignore_errors=True)          # a parent that was killed cannot


if __name__ == "__main__":
    main()
