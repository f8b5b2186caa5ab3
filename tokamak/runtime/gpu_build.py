"""Triton text -> machine code for GPUs.

`build` compiles the units that are neither in this process nor in the cache on disk, on all cores: by the workers of `gpu_pool.py`, or in this
process where no worker can be had, and where there is only one unit and the workers are not up yet. Nothing here needs a GPU.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

from .. import options
from ..errors import BuildError, CompilerMissing
from . import gpu_pool, gpu_worker
from .build import finished, Progress, temporary
from .cache import open_cache
from .gpu_code import resources, Waits

Arch = tuple[str, int | str, int]        # Triton's words for a target: ("cuda", 90, 32), ("hip", "gfx942", 64)
ABI = 8                                  # of what is kept on disk


@dataclass(frozen=True)
class GpuUnit:
    """Triton text that defines the jitted function `name`, whose parameters have the Triton types `signature`, in order; there are no constexprs.
    `divisible`: positions of parameters that are multiples of 16 (pointers: 16-byte aligned, integers: value % 16 == 0); where a call breaks that, a
    variant of the kernel is built that does not rely on it, of the text `otherwise`, without boxes, where there is one.
    `boxes`: (element type, or 'tf32' for f32 that is rounded so on its way; extents of a tile) of the descriptors that stand behind the other
    parameters; a call gives (address, offset in elements, extents, strides in elements) of each. `cooperative`: all programs of the grid are resident
    at once (they wait for each other). `cluster`: so many neighbours of the grid, which it is a multiple of, run side by side and see each other's
    shared memory. `contract`: a product may be added to something without being rounded first. `registers`: the most that a thread may have; 0 leaves
    it open. `few`: programs that a multiprocessor has at most for the sizes as they were traced; 0: many. `name` stands for the text and all other
    fields."""
    name: str
    text: str
    signature: tuple[str, ...]
    divisible: frozenset[int] = frozenset()
    warps: int = 4
    stages: int = 3
    cooperative: bool = False
    contract: bool = True
    registers: int = 0
    cluster: int = 1
    otherwise: str = ""
    boxes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    few: int = 0

    def relying(self, divisible: frozenset[int]) -> GpuUnit:
        """The unit for calls in which only these of its parameters are multiples of 16."""
        return replace(self, divisible=divisible, text=self.otherwise or self.text, otherwise="", boxes=() if self.otherwise else self.boxes)


@dataclass(frozen=True)
class Binary:
    """What was built of `unit` for `arch`. `entry`: the symbol in `code`. `shared`: bytes of shared memory a program. `threads` a program.
    `registers` a thread; `spilled`: bytes of stack a thread. `scratch`: (bytes a program, alignment) of global memory that the kernel wants
    as a workspace of its own; (0, 1) is none. `hidden`: parameters behind the unit's own: that workspace, and others that are null. `maps`: of each
    box (rank, the driver's number of its element type, bytes of one, of its swizzle, extents of what one copy moves). `packed`: `listing`,
    compressed. `waits`: what a warp does, for sm_90; else zeros."""
    unit: GpuUnit
    arch: Arch
    code: bytes = field(repr=False)
    entry: str
    shared: int
    threads: int
    registers: int
    spilled: int
    scratch: tuple[int, int]
    hidden: int
    maps: tuple[tuple[int, int, int, int, tuple[int, ...]], ...]
    packed: bytes = field(repr=False)
    waits: Waits = Waits(0, 0, 0)

    @property
    def listing(self) -> str:
        """The assembly text: PTX, AMDGCN."""
        return zlib.decompress(self.packed).decode()


@dataclass(frozen=True)
class GpuBuild:
    """How one unit came to be: 'process' (it was there already), 'cache' (on disk) or 'compiled', in `seconds`."""
    name: str
    how: str
    seconds: float
    binary: Binary


def warm(arch: Arch = ("cuda", 90, 32)) -> None:
    """Starts the processes that compile, with what a first compile for `arch` loads; they come up in the background and compile for any target. Call
    it when the first graph with a GPU's tensors is seen."""
    if _triton_folder() is not None:
        gpu_pool.pool(_cores(), arch)


# -- building ------------------------------------------------------------------------------------------------------------
_MADE: dict[str, Binary] = {}            # key -> binary, for the life of the process


def build(units: Sequence[GpuUnit], arch: Arch, *, cache_dir: str = "", report: Callable[[GpuBuild], object] | None = None,
          progress: Progress | None = None, meanwhile: Callable[[], None] | None = None) -> dict[str, Binary]:
    """The machine code of each unit by its name. `cache_dir`: where it is kept ('' keeps none). `report` is told of each unit as soon as it is there,
    `progress` several times a second how many of how many are compiled. `meanwhile`: called once if any are, before they are waited for.
    Raises BuildError, which names the kernel, or CompilerMissing when there is no Triton."""
    if units:
        require_triton()
    keys = {u: key(u, arch) for u in units}
    missing = {k: u for u, k in keys.items() if k not in _MADE}
    cache = open_cache(cache_dir) if cache_dir and missing else None
    found = {k: _unpacked(kept, u, arch) for k, u in missing.items() if cache is not None and (kept := cache.get(k)) is not None}
    _MADE.update({k: b for k, b in found.items() if b is not None})
    work = {k: u for k, u in missing.items() if k not in _MADE}
    if report is not None:
        for u, k in keys.items():
            if k not in work:
                report(GpuBuild(u.name, "cache" if k in missing else "process", 0.0, _MADE[k]))
    for k, binary, seconds in _compile_all(work, arch, progress, meanwhile):
        _MADE[k] = binary
        if cache is not None:
            cache.put(k, _packed(binary))
        if report is not None:
            report(GpuBuild(binary.unit.name, "compiled", seconds, binary))
    return {u.name: _MADE[k] for u, k in keys.items()}


def key(unit: GpuUnit, arch: Arch) -> str:
    """What a unit's code is kept under: everything that it depends on."""
    built_by = {"triton": triton_version(), "assembler": assembler(), "library": _library(), "abi": ABI}
    fields = {**asdict(unit), "divisible": sorted(unit.divisible), "arch": arch, **built_by}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _compile_all(work: dict[str, GpuUnit], arch: Arch, progress: Progress | None,
                 meanwhile: Callable[[], None] | None = None) -> Iterator[tuple[str, Binary, float]]:
    """(key, binary, seconds) of each unit, as they are done. After a failure those not begun are left."""
    if not work:
        return
    pool = gpu_pool.started()
    if len(work) > 1:
        pool = gpu_pool.pool(_cores(), arch)
    elif pool is not None and not pool.ready():
        pool = None
    longest = sorted(work, key=lambda k: -len(work[k].text))
    with ThreadPoolExecutor(min(len(work), gpu_pool.MOST)) as asking:
        futures = {asking.submit(_compile, work[k], arch, pool): k for k in longest}
        try:
            if meanwhile is not None:
                meanwhile()
            for done in finished(futures, progress):
                yield futures[done], *done.result()
        finally:
            asking.shutdown(wait=False, cancel_futures=True)


def _compile(unit: GpuUnit, arch: Arch, pool: gpu_pool.Pool | None) -> tuple[Binary, float]:
    """The binary and the seconds it took. Raises BuildError."""
    start = time.perf_counter()
    job = {**asdict(unit), "divisible": sorted(unit.divisible), "arch": arch, "assembler": assembler()}
    try:
        made = pool.run(job) if pool is not None else _here(job)
    except gpu_pool.PoolGone:
        made = _here(job)
    except gpu_pool.WorkerDied as error:
        raise BuildError(f"Triton failed on the kernel {unit.name}: {error}") from None
    if "error" in made:
        raise BuildError(f"Triton failed on the kernel {unit.name}:\n{_shortened(made['error'], made['said'])}")
    listing = made.pop("listing")
    registers, spilled = resources(made["code"], made["entry"], listing)
    facts = {"registers": registers, "spilled": spilled, "hidden": _hidden(unit, listing, made["entry"]), "waits": Waits.read(made.pop("waits"))}
    return Binary(unit, arch, **made, **facts, packed=zlib.compress(listing.encode())), time.perf_counter() - start


def _hidden(unit: GpuUnit, listing: str, entry: str) -> int:
    """How many parameters of its own Triton has put behind the unit's: 2 in version 3.6, which is believed where there is no listing."""
    ptx = re.search(rf"\.entry {re.escape(entry)}\(([^)]*)\)", listing)
    count = ptx[1].count(".param") if ptx is not None else len(re.findall(r"\.value_kind: +(?:global_buffer|by_value)", listing))
    return count - len(unit.signature) - sum(1 + 2 * len(block) for _, block in unit.boxes) if count else 2


_HERE = threading.Lock()


def _here(job: dict) -> dict:
    """The job done in this process."""
    with _HERE, temporary() as folder:
        try:
            return gpu_worker.compile_job(job, folder)
        except Exception as error:
            return {"error": gpu_worker.words(error), "said": ""}


def _in_child() -> None:
    """In a forked child: a thread of the parent may have been compiling."""
    global _HERE
    _HERE, gpu_worker._LOCK = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _shortened(error: str, printed: str) -> str:
    """The compiler's words: its message, at most 16 lines of it, and the first lines of complaint among what it printed."""
    lines = [line.rstrip() for line in error.splitlines() if line.strip()]
    lines = lines if len(lines) <= 16 else [*lines[:4], "...", *lines[-11:]]
    complaints = [line.rstrip() for line in printed.splitlines() if "error" in line.lower()][:6]
    return "\n".join(f"  {line[:300]}" for line in (*lines, *(c for c in complaints if c not in lines)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- what code depends on ------------------------------------------------------------------------------------------------
@functools.cache
def _triton_folder() -> Path | None:
    """Where Triton is installed; it is not imported: what lies in the cache does not need it."""
    found = importlib.util.find_spec("triton")
    return Path(found.origin).parent if found is not None and found.origin else None


def require_triton() -> None:
    """Raises CompilerMissing where there is no Triton."""
    if _triton_folder() is None:
        raise CompilerMissing("Triton is not installed, and kernels for GPUs are built with it: `pip install 'triton>=3.6'`; "
                              "`tokamak doctor` says what else is missing")


@functools.cache
def triton_version() -> str:
    folder = _triton_folder()
    found = re.search(r"__version__ = ['\"](.+?)['\"]", (folder / "__init__.py").read_text()) if folder is not None else None
    return found[1] if found else ""


def assembler() -> str:
    """The assembler that the user has chosen; '' is the one that came with Triton. Inductor enters torch's own in the environment of every process in
    which it compiles: that is nobody's choice, and code would depend on who has compiled before."""
    chosen = options.ptxas()
    return "" if chosen == _torch_assembler() else chosen


@functools.cache
def _torch_assembler() -> str:
    found = importlib.util.find_spec("torch")
    return str(Path(found.origin).absolute().parent / "bin" / "ptxas") if found is not None and found.origin else ""


@functools.cache
def _library() -> str:
    """A hash of the files whose functions a kernel's text may call."""
    folder = Path(__file__).parent.parent / "codegen"
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in sorted(folder.glob("triton*.py")))).hexdigest()


# -- on disk ---------------------------------------------------------------------------------------------------------------
def _packed(binary: Binary) -> bytes:
    """Lengths of two parts; these: facts as JSON, the packed listing; code."""
    facts = {name: getattr(binary, name) for name in ("entry", "shared", "threads", "registers", "spilled", "scratch", "hidden", "maps")}
    parts = json.dumps({**facts, "waits": astuple(binary.waits)}).encode(), binary.packed
    return struct.pack("<2I", *map(len, parts)) + b"".join(parts) + binary.code


def _unpacked(kept: bytes, unit: GpuUnit, arch: Arch) -> Binary | None:
    """None when `kept` is no such thing."""
    try:
        first, second = struct.unpack_from("<2I", kept)
        facts = json.loads(kept[8:8 + first])
        packed, code = kept[8 + first:8 + first + second], kept[8 + first + second:]
        maps = tuple((*m, tuple(block)) for *m, block in facts["maps"])
        facts |= {"scratch": tuple(facts["scratch"]), "maps": maps, "waits": Waits.read(facts["waits"])}
        return Binary(unit, arch, code, **facts, packed=packed)
    except (struct.error, ValueError, TypeError, KeyError):
        return None
