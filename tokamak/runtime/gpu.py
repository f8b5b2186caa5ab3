"""GPU kernels at work: machine code -> launches, through the driver.

    Kernel       a built kernel; `on(device)` places it there
    Placed       the kernel on one device: what a program's function holds

A program launches through `runs.Run`, which has `Placed.launch(packed, stream)` do in C what every launch needs: find the record, look whether the
arguments are as aligned as the kernel assumes, call the driver. Where there is no C compiler a Python function does the same. It answers 0, or
something else: then `Placed(packed, stream)` does what happens once (loads the code, builds a variant that assumes less) and launches, or raises.
Records of variants hang together in a list, those that assume more first.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p, c_int, c_int32, c_int64, c_uint, c_void_p

import torch

from ..errors import BuildError, CompilerMissing, InternalError
from . import build as c_build
from . import frames, gpu_launcher
from .gpu_build import Arch, Binary, build, GpuBuild, GpuUnit
from .gpu_launcher import HEAD, Attribute, Box, Configuration, Record

ASK = -1                    # what a launch answers when it needs `Placed.__call__`
INVALID_VALUE, INVALID_CONTEXT = 1, 201
_LARGE = 48 << 10           # bytes of shared memory from which on a kernel has to ask
_SHARED, _PROCESSORS, _ANY_CLUSTER = 8, 16, 14          # the driver's numbers of attributes
PORTABLE = 8                # programs of a cluster that every GPU with clusters runs; more have to be asked for
_RELAXED = 2


# -- the driver ----------------------------------------------------------------------------------------------------------
_SIGNATURES = {
    "cuGetErrorName": (c_int, ctypes.POINTER(c_char_p)), "cuGetErrorString": (c_int, ctypes.POINTER(c_char_p)),
    "cuDeviceGet": (c_void_p, c_int), "cuDeviceGetAttribute": (c_void_p, c_int, c_int), "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxGetCurrent": (c_void_p,), "cuCtxSetCurrent": (c_void_p,), "cuCtxPushCurrent_v2": (c_void_p,), "cuCtxPopCurrent_v2": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_char_p), "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuLaunchCooperativeKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p),
    "cuLaunchKernelEx": (c_void_p,) * 4,
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (c_void_p, c_void_p, c_int, ctypes.c_size_t),
    "cuMemHostAlloc": (c_void_p, ctypes.c_size_t, c_uint), "cuMemHostGetDevicePointer_v2": (c_void_p, c_void_p, c_uint),
    "cuThreadExchangeStreamCaptureMode": (c_void_p,),
}
_GRAPHS = ("cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags", "cuGraphExecKernelNodeSetParams_v2", "cuGraphLaunch",
           "cuStreamIsCapturing", "cuThreadExchangeStreamCaptureMode", "cuGraphExecDestroy", "cuGraphDestroy",
           "cuGraphKernelNodeSetAttribute")         # as the launcher has them


class Driver:
    """The driver's functions by name. Those called through `call` raise RuntimeError with the driver's words."""

    def __init__(self, library: ctypes.CDLL):
        self.functions = {}
        for name, arguments in _SIGNATURES.items():
            function = self.functions[name] = library[name]
            function.argtypes, function.restype = arguments, c_int
        self.contexts: dict[int, c_void_p] = {}
        found = [ctypes.cast(getattr(library, name), c_void_p).value for name in _GRAPHS if hasattr(library, name)]
        self.graphs = (c_void_p * len(_GRAPHS))(*found) if len(found) == len(_GRAPHS) else None         # what the launcher makes graphs with

    def call(self, name: str, *arguments) -> None:
        code = self.functions[name](*arguments)
        if code:
            raise RuntimeError(f"{name}: {self.words(code)}")

    def address(self, name: str) -> int:
        return ctypes.cast(self.functions[name], c_void_p).value

    def words(self, code: int) -> str:
        name, text = c_char_p(), c_char_p()
        self.functions["cuGetErrorName"](code, byref(name))
        self.functions["cuGetErrorString"](code, byref(text))
        return f"{(name.value or b'CUDA error').decode()} ({code}): {(text.value or b'unknown').decode()}"

    @contextlib.contextmanager
    def within(self, device: int) -> Iterator[None]:
        """The device's primary context is current, and calls that allocate are allowed although a graph is being captured. A thread that had no
        context keeps this one."""
        wanted, current, mode = self._context(device), c_void_p(), c_int(_RELAXED)
        self.call("cuCtxGetCurrent", byref(current))
        other = current.value is not None and current.value != wanted.value
        if other:
            self.call("cuCtxPushCurrent_v2", wanted)
        elif current.value is None:
            self.call("cuCtxSetCurrent", wanted)
        self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self.call("cuThreadExchangeStreamCaptureMode", byref(mode))
            if other:
                self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _context(self, device: int) -> c_void_p:
        if device not in self.contexts:
            number, context = c_int(), c_void_p()
            self.call("cuDeviceGet", byref(number), device)
            self.call("cuDevicePrimaryCtxRetain", byref(context), number)
            self.contexts[device] = context
        return self.contexts[device]

    def attribute(self, device: int, which: int) -> int:
        number, value = c_int(), c_int()
        self.call("cuDeviceGet", byref(number), device)
        self.call("cuDeviceGetAttribute", byref(value), which, number)
        return value.value


@functools.cache
def driver() -> Driver:
    """NVIDIA's. Raises InternalError where there is none."""
    for name in ("libcuda.so.1", "libcuda.so"):
        with contextlib.suppress(OSError):
            return Driver(ctypes.CDLL(name))
    raise InternalError("there is no CUDA driver (libcuda.so.1) to launch kernels with")


# -- launching -----------------------------------------------------------------------------------------------------------
@functools.cache
def launcher(cache_dir: str = "", cc: str = "") -> Callable[[bytes, int], int]:
    """`launch(packed, stream)`: 0, ASK, or the driver's error. In C, or in Python where no C compiler is found. Its `caller` makes the function of a
    `runs.Run`."""
    try:
        launch, launch.caller = gpu_launcher.compiled(cache_dir, cc)
    except (CompilerMissing, BuildError):
        return launch_in_python
    return launch


def launch_in_python(packed: bytes, stream: int) -> int:
    """What the C launcher does, at 4 us instead of 0.3; `frames` does it at 0.4 where nothing is out of the ordinary."""
    words = struct.unpack(_words(len(packed)), packed)
    address, x, y, z = words[:HEAD]
    if x <= 0 or y <= 0 or z <= 0:
        return 0
    if (x | y | z) >> 31:
        return INVALID_VALUE
    while address:
        plan = _plans[address]
        if not any([words[i] & 15 for i in plan.divisible]):
            return plan.submit(packed, x, y, z, stream) if plan.record.ready else ASK
        address = plan.record.next
    return ASK


launch_in_python.caller = frames.caller


@functools.cache
def _words(size: int) -> str:
    return f"={size // 8}q"


class Plan:
    """What Python keeps of a record: where to look for alignment, in a packed launch, and how to hand it to the driver."""

    def __init__(self, record: Record):
        self.record, self.divisible = record, tuple(HEAD + record.divisible[i] for i in range(record.checks))
        self.boxes = record.box[:record.boxes]
        self.all = record.count + sum(2 + 2 * b.rank for b in self.boxes)
        self.words, self.hidden = c_int64 * self.all, c_int64 * max(record.hidden, 1)
        self.parameters = ctypes.c_uint64 * (self.all - record.boxes + record.hidden)
        self.prototype, self.last = (_TOGETHER, ()) if record.cooperative else (_LAUNCH, (None,))
        self.size = Attribute(4, 0, (record.cluster, 1, 1))
        self.function = None

    def submit(self, packed: bytes, x: int, y: int, z: int, stream: int, scratch: int = 0) -> int:
        """The driver's answer. `scratch`: the address of the kernel's own workspace."""
        if self.function is None:
            self.function = self._function()
        record, words, hidden = self.record, self.words.from_buffer_copy(packed, 8 * HEAD), self.hidden(scratch)
        first, beside, maps = ctypes.addressof(words), ctypes.addressof(hidden), ctypes.create_string_buffer(128 * record.boxes + 64)
        described, code = self._described(words, -(-ctypes.addressof(maps) // 64) * 64)
        if code:
            return code
        parameters = self.parameters(*range(first, first + 8 * record.count, 8), *described, *range(beside, beside + 8 * record.hidden, 8))
        if record.cluster > 1:
            how = Configuration((x, y, z), (record.threads, 1, 1), record.shared, stream, ctypes.pointer(self.size), 1)
            return self.function(ctypes.addressof(how), record.function, ctypes.addressof(parameters), None)
        return self.function(record.function, x, y, z, record.threads, 1, 1, record.shared, stream, ctypes.addressof(parameters), *self.last)

    def _described(self, words, maps: int) -> tuple[list[int], int]:
        """(addresses of the parameters that boxes are, the driver's answer): their descriptors are made at `maps`."""
        found, at = [], self.record.count
        for n, b in enumerate(self.boxes):
            rank = b.rank
            extents = (ctypes.c_uint64 * 5)(*(words[i] for i in range(at + 1 + rank, at + 1, -1)))
            steps = (ctypes.c_uint64 * 5)(*(words[i] * b.bytes for i in range(at + 2 * rank, at + 1 + rank, -1)))
            block, ones = (c_uint * 5)(*b.block[rank - 1::-1]), (c_uint * 5)(*[1] * 5)
            start = words[at] + words[at + 1] * b.bytes
            code = _ENCODE(self.record.encode)(maps + 128 * n, b.type, rank, start, extents, steps, block, ones, 0, b.swizzle, 2, 0)
            if code:
                return found, code
            first = ctypes.addressof(words) + 8 * (at + 2)
            found += [maps + 128 * n, *range(first, first + 16 * rank, 8)]
            at += 2 + 2 * rank
        return found, 0

    def _function(self):
        """The driver's function that launches it."""
        record = self.record
        return _CLUSTERED(record.clustered) if record.cluster > 1 else self.prototype(record.together if record.cooperative else record.launch)


_plans: dict[int, Plan] = {}            # by the address of their record
_LAUNCH = ctypes.CFUNCTYPE(c_int, *_SIGNATURES["cuLaunchKernel"])
_TOGETHER = ctypes.CFUNCTYPE(c_int, *_SIGNATURES["cuLaunchCooperativeKernel"])
_ENCODE = ctypes.CFUNCTYPE(c_int, *_SIGNATURES["cuTensorMapEncodeTiled"])
_CLUSTERED = ctypes.CFUNCTYPE(c_int, *_SIGNATURES["cuLaunchKernelEx"])


# -- kernels -------------------------------------------------------------------------------------------------------------
class Kernel:
    """A built kernel. `rebuild` makes the binary of another unit: the same kernel with fewer assumptions. `launch`: see `launcher`."""

    def __init__(self, binary: Binary, rebuild: Callable[[GpuUnit], Binary], launch: Callable[[bytes, int], int] = launch_in_python,
                 driver: Callable[[], Driver] = driver):
        self.binary, self.rebuild, self.launch, self.driver = binary, rebuild, launch, driver
        self._placed: dict[int, Placed] = {}
        self._lock = threading.Lock()

    def on(self, device: str) -> Placed:
        """The kernel on `device` ("cuda:1"); it is loaded there at its first launch."""
        index = torch.device(device).index or 0
        with self._lock:
            if index not in self._placed:
                self._placed[index] = Placed(self, index)
            return self._placed[index]


class Placed:
    """A kernel on one device. `address`: the first word of its launches. Calling it finishes a launch that `launch` refused, or raises."""

    def __init__(self, kernel: Kernel, device: int):
        self.kernel, self.device, self.launch = kernel, device, kernel.launch
        self.lock = threading.Lock()
        self.variants = [Variant(kernel.binary)]
        self.address = self.variants[0].address

    @functools.cached_property
    def resident(self) -> int:
        """How many of its programs the device runs at once."""
        driver, first, count = self.kernel.driver(), self.variants[0], c_int()
        with self.lock, driver.within(self.device):
            first.load(driver)
            record = first.record
            driver.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(count), record.function, record.threads, record.shared)
            return count.value * driver.attribute(self.device, _PROCESSORS)

    def __call__(self, packed: bytes, stream: int) -> None:
        driver, words = self.kernel.driver(), struct.unpack(f"={len(packed) // 8}q", packed)
        with driver.within(self.device):
            with self.lock:
                variant = self._variant(words[HEAD:])
                variant.load(driver)
            size, align = variant.binary.scratch
            if max(words[1:HEAD]) >> 31:
                code = INVALID_VALUE
            elif size:
                room = torch.empty(size * words[1] * words[2] * words[3] + align, dtype=torch.uint8, device=f"cuda:{self.device}")
                code = variant.plan.submit(packed, *words[1:HEAD], stream, -(-room.data_ptr() // align) * align)
            else:
                code = variant.plan.submit(packed, *words[1:HEAD], stream)
        if code:
            raise RuntimeError(f"the kernel {variant.binary.unit.name} could not be launched on cuda:{self.device} with the grid {words[1:HEAD]}, "
                               f"{variant.binary.threads} threads and {variant.binary.shared} bytes of shared memory: {driver.words(code)}")

    def _variant(self, arguments: tuple[int, ...]) -> Variant:
        """The first whose assumptions hold; one is built where none does."""
        for variant in self.variants:
            if not any(arguments[i] & 15 for i in variant.divisible):
                return variant
        unit = self.kernel.binary.unit
        holds = frozenset(i for i in unit.divisible if not arguments[i] & 15)
        made = Variant(self.kernel.rebuild(unit.relying(holds)))
        position = next((i for i, v in enumerate(self.variants) if len(v.divisible) < len(holds)), len(self.variants))
        made.record.next = self.variants[position].address if position < len(self.variants) else None
        self.variants.insert(position, made)
        self.variants[position - 1].record.next = made.address          # only now a launch in another thread can see it
        return made


class Variant:
    """One binary on one device, and its record."""

    def __init__(self, binary: Binary):
        count, begins = len(binary.unit.signature), []
        for rank, *_ in binary.maps:
            begins.append(count)
            count += 2 + 2 * rank
        self.binary, self.divisible = binary, (*sorted(binary.unit.divisible), *begins)
        self.boxes = (Box * max(len(begins), 1))(*(Box(*facts, (c_uint * 5)(*block)) for *facts, block in binary.maps))
        self.positions = (c_int32 * max(len(self.divisible), 1))(*self.divisible)
        self.record = Record(divisible=self.positions, checks=len(self.divisible), count=len(binary.unit.signature), hidden=binary.hidden,
                             threads=binary.threads, shared=binary.shared, cooperative=binary.unit.cooperative, cluster=binary.unit.cluster,
                             box=self.boxes, boxes=len(begins))
        self.address = ctypes.addressof(self.record)
        self.plan = _plans[self.address] = Plan(self.record)
        weakref.finalize(self, _plans.pop, self.address, None).atexit = False

    def load(self, driver: Driver) -> None:
        """Makes the record ready, in the current context."""
        if self.record.function:
            return
        module, function = c_void_p(), c_void_p()
        driver.call("cuModuleLoadData", byref(module), self.binary.code)
        driver.call("cuModuleGetFunction", byref(function), module, self.binary.entry.encode())
        if self.binary.shared > (_LARGE if self.record.cluster == 1 else 0):        # what a cluster exchanges lies beside it, and counts too
            driver.call("cuFuncSetAttribute", function, _SHARED, self.binary.shared)
        if self.record.cluster > PORTABLE:
            driver.call("cuFuncSetAttribute", function, _ANY_CLUSTER, 1)
        self.record.launch, self.record.together = driver.address("cuLaunchKernel"), driver.address("cuLaunchCooperativeKernel")
        self.record.clustered, self.record.encode = driver.address("cuLaunchKernelEx"), driver.address("cuTensorMapEncodeTiled")
        self.record.graphs = ctypes.addressof(driver.graphs) if driver.graphs else None
        self.record.function = function
        self.record.ready = not self.binary.scratch[0]          # a kernel with a workspace is launched from here every time


_kernels: dict[tuple[GpuUnit, Arch], Kernel] = {}
_kernels_lock = threading.Lock()


def arch(device: str) -> Arch:
    """What Triton calls the GPU `device`."""
    if torch.version.hip is not None:
        raise InternalError("kernels are launched on NVIDIA's GPUs only; for AMD's they can be built")
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", 10 * major + minor, 32


def most_shared() -> int:
    """Bytes of shared memory that a program on the current GPU may ask for; 0 where that is not known."""
    if not torch.cuda.is_available():
        return 0
    return getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "shared_memory_per_block_optin", 0)


def kernels(units: Sequence[GpuUnit], arch: Arch, *, cache_dir: str = "", cc: str = "", report: Callable[[GpuBuild], object] | None = None,
            progress: c_build.Progress | None = None, meanwhile: Callable[[], None] | None = None) -> dict[str, Kernel]:
    """The kernel of each unit by its name, built for `arch`; equal units are one kernel, loaded once on each device. `cc`: the C compiler for the
    launcher. Otherwise as `gpu_build.build`, and BuildError where one wants more shared memory than there is."""
    with ThreadPoolExecutor(1) as beside:           # the C compiler runs while Triton does
        found = beside.submit(launcher, cache_dir, cc)
        built = build(units, arch, cache_dir=cache_dir, report=report, progress=progress, meanwhile=meanwhile)
        launch = found.result()
    room = most_shared()
    for name, b in built.items():
        if b.shared > room > 0:
            raise BuildError(f"the kernel {name} wants {b.shared} bytes of shared memory, and a program on this GPU has {room}")

    def rebuild(unit: GpuUnit) -> Binary:
        return build([unit], arch, cache_dir=cache_dir)[unit.name]
    with _kernels_lock:
        return {u.name: _kernels.setdefault((u, arch), Kernel(built[u.name], rebuild, launch)) for u in units}


# -- torch's part --------------------------------------------------------------------------------------------------------
empty: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cuda            # (shape, strides, dtype), on torch's current device
exchange_device: Callable[[int], int] | None = getattr(torch._C, "_cuda_exchangeDevice", None)      # makes it current; returns which was before
raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)      # a device's current stream


def wait(*devices: int) -> None:
    """Waits for the current streams of GPUs, except while a graph is captured: nothing runs then."""
    if not torch.cuda.is_current_stream_capturing():
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
