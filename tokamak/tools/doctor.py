"""`tokamak doctor`: what this machine offers the compiler, and what is missing, with the command that mends it.

    Checkup ::= Fact (one line: what was looked at, what was found, whether it will do, what to do about it) in order
"""
from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import __version__
from ..backend import compile
from ..errors import BuildError, CompilerMissing, TokamakError
from ..options import Options, current
from ..runtime import gpu_launcher, threads
from ..runtime.build import compiler
from ..runtime.cache import open_cache
from ..target import target
from . import machine
from .names import rate_text, size_text

OK, NOTE, MISSING = "ok", "note", "missing"
OLDEST_PYTHON, OLDEST_TORCH, OLDEST_TRITON = (3, 11), (2, 11), (3, 6)
ROOM = 256 << 20            # bytes that the cache's disk should have left: some thousand kernels


@dataclass(frozen=True)
class Fact:
    """`state`: ok, note (it works, but could be better) or missing (something will not work). `mend`: the command that changes that."""
    what: str
    found: str
    state: str = OK
    mend: str = ""


@dataclass(frozen=True)
class Checkup:
    """Everything that was found. Prints as lines; `status` is the command's exit status: 1 when something is missing."""
    facts: tuple[Fact, ...]

    @property
    def status(self) -> int:
        return int(any(f.state == MISSING for f in self.facts))

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({"facts": [asdict(f) for f in self.facts], "status": self.status}, indent=indent)

    def __str__(self) -> str:
        width = max(len(f.what) for f in self.facts)
        lines = []
        for f in self.facts:
            lines.append(f"{f.state:8}{f.what:{width}}  {f.found}")
            if f.mend:
                lines.append(f"{'':8}{'':{width}}    mend: {f.mend}")
        missing = sum(f.state == MISSING for f in self.facts)
        return "\n".join([*lines, f"{missing} missing" if missing else "nothing is missing"]) + "\n"


def examine(measure: bool = False) -> Checkup:
    """Looks at everything, and runs one kernel on each kind of device. `measure`: the devices' peaks are measured now."""
    options = current()
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() and torch.version.hip is None else []
    facts = [*versions(), *c_compiler(options), *processor(), *gpu(gpus), *triton(bool(gpus)), *launching(options, gpus), *cache(options)]
    for device in ("cpu", *gpus[:1]):
        facts += [works(device), *peaks(device, measure)]
    return Checkup(tuple(facts))


# -- one function a question ---------------------------------------------------------------------------------------------
def versions() -> Iterator[Fact]:
    yield Fact("tokamak", __version__)
    old = sys.version_info[:2] < OLDEST_PYTHON
    yield Fact("Python", platform.python_version(), MISSING if old else OK, "install Python 3.11 or later" if old else "")
    old = numbers(torch.__version__) < OLDEST_TORCH
    yield Fact("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}", MISSING if old else OK,
               "pip install --upgrade torch" if old else "")


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of '2.13.0+cpu'."""
    return tuple(int(x) for x in version.split("+")[0].split(".")[:2] if x.isdigit())


def c_compiler(options: Options) -> Iterator[Fact]:
    try:
        found = compiler(options.cc)
    except CompilerMissing as why:
        words, _, advice = str(why).partition("; install one: ")
        mend = "unset TOKAMAK_CC    # then gcc, cc, clang and zig are looked for" if options.cc else advice or "apt install gcc"
        yield Fact("C compiler", words, MISSING, mend.replace("`", ""))
        return
    except BuildError as why:
        yield Fact("C compiler", str(why), MISSING, "ulimit -a    # memory and processes that are allowed")
        return
    yield Fact("C compiler", f"{found.version.splitlines()[0]} ({' '.join(found.command)})")


def processor() -> Iterator[Fact]:
    here = target("cpu")
    yield Fact("CPU", machine.device_name("cpu"))
    yield Fact("vectors", f"{8 * here.vector_bytes} bits ({torch.backends.cpu.get_cpu_capability()})")
    cores, alone = os.cpu_count() or 1, threads.entry_points() == (0, 0)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    words = f"{here.threads} of torch's on {usable} of {cores} cores"
    if alone:
        yield Fact("threads", f"1: torch's libgomp was not found ({words})", NOTE,
                   "pip install --force-reinstall torch    # a build with OpenMP by GNU")
    else:
        few = here.threads < usable // 2
        yield Fact("threads", words, NOTE if few else OK, f"export OMP_NUM_THREADS={usable}" if few else "")


def gpu(devices: list[str]) -> Iterator[Fact]:
    for d in devices:
        p = torch.cuda.get_device_properties(d)
        yield Fact(f"GPU {d}", f"{p.name}, compute capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors, "
                               f"{size_text(p.total_memory)}, second-level cache {size_text(p.L2_cache_size)}")
    if devices:
        return
    if torch.version.hip is not None:
        yield Fact("GPU", "AMD's: graphs on it run through torch", NOTE)
    elif not nvidia_driver():
        yield Fact("GPU", "none: programs run on the CPU")
    elif torch.version.cuda is None:
        yield Fact("GPU", "NVIDIA's driver is here, but this torch has no CUDA", MISSING, "pip install --force-reinstall torch")
    else:
        yield Fact("GPU", "NVIDIA's driver is here, but torch finds no device", MISSING,
                   "nvidia-smi    # what does the driver say? is CUDA_VISIBLE_DEVICES empty?")


def launching(options: Options, devices: list[str]) -> Iterator[Fact]:
    if not devices:
        return
    try:
        gpu_launcher.compiled(options.cache_dir, options.cc)
    except (CompilerMissing, BuildError) as why:
        yield Fact("launches", f"by Python, which takes the host longer than C: {str(why).splitlines()[0]}", NOTE, "apt install gcc")
    else:
        yield Fact("launches", "by C")


def nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version")


def triton(needed: bool) -> Iterator[Fact]:
    try:
        from importlib.metadata import version
        found = version("triton")
    except ImportError:
        found = ""
    mend = "pip install 'triton>=3.6'"
    if not found:
        yield Fact("Triton", "none" + ("" if needed else ": only needed with a GPU"), MISSING if needed else OK, mend if needed else "")
    else:
        old = numbers(found) < OLDEST_TRITON
        yield Fact("Triton", found, (MISSING if needed else NOTE) if old else OK, mend if old else "")


def cache(options: Options) -> Iterator[Fact]:
    where = options.cache_dir
    if not where:
        yield Fact("cache", "none: every process builds its kernels", NOTE, "unset TOKAMAK_CACHE_DIR")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = open_cache(where).reason
    elsewhere = "export TOKAMAK_CACHE_DIR=DIRECTORY    # one that you own and others cannot write to"
    if reason is not None:
        yield Fact("cache", f"{where}: {reason}", MISSING, f"chmod 700 {where}" if "mode 0700" in reason and owned(where) else elsewhere)
        return
    files = [f.stat().st_size for f in os.scandir(where) if f.is_file()]
    held, free = f"{len(files)} files, {size_text(sum(files))}", shutil.disk_usage(where).free
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        yield Fact("cache", f"{where}: nothing can be written: {error.strerror}", MISSING, elsewhere)
        return
    little = free < ROOM
    yield Fact("cache", f"{where}: writable, {held}, {size_text(free)} free", NOTE if little else OK,
               f"rm -r {where}    # or {elsewhere}" if little else "")


def owned(path: str) -> bool:
    return Path(path).stat().st_uid == os.getuid()


def works(device: str) -> Fact:
    """Builds a kernel for `device`, runs it and looks at what it computed."""
    what = f"a kernel on {device}"
    x = torch.linspace(-3, 3, 1000, device=device)
    try:
        torch._dynamo.reset()
        found = compile(_small, strict=True, cache_dir="")(x)
    except TokamakError as error:
        return Fact(what, f"cannot be built: {str(error).splitlines()[0]}", MISSING, "see above")
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        return Fact(what, f"failed: {type(inner).__name__}: {str(inner).splitlines()[0] if str(inner) else ''}", MISSING,
                    "TOKAMAK_STRICT=1 shows where")
    finally:
        torch._dynamo.reset()
    right = torch.allclose(found, _small(x), rtol=1e-5)
    return Fact(what, "was built, ran and is right" if right else "computed something else than eager", OK if right else MISSING)


def _small(x):
    return (x.exp() + 1).sum() * x


def peaks(device: str, measure: bool) -> Iterator[Fact]:
    """What the device was measured to do; measuring needs a kernel that can be built."""
    what = f"peaks of {device}"
    explained: Callable[[Exception], Fact] = lambda e: Fact(what, f"cannot be measured: {e}", NOTE)
    try:
        found = machine.peaks(device, again=True) if measure else machine.known(device)
    except Exception as error:
        yield explained(getattr(error, "inner_exception", error))
        return
    if found is None:
        yield Fact(what, "not measured yet", NOTE, "tokamak doctor --measure")
    else:
        rates = ", ".join(f"{name} {rate_text(rate)}" for name, rate in found.matmul.items())
        yield Fact(what, f"copy {size_text(found.bandwidth)}/s, {rates}, shortest kernel {found.launch * 1e6:.2g} us (measured {found.when})")
