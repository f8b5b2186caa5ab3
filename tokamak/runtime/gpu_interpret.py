"""Triton kernels on CPU tensors, by Triton's interpreter: slow, and exact about what the text says. For tests and for machines without a GPU.

Triton decides when it is imported whether its functions are compiled or interpreted. A second copy of its Python modules, and of ours that kernels
import, is therefore made here, interpreted, and stays out of `sys.modules`: the ordinary Triton is not touched.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import struct
import sys
import threading
import types
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..errors import CompilerMissing, InternalError
from . import gpu_worker
from .gpu_launcher import HEAD
from .gpu_build import GpuUnit, triton_version

_SHARED = ("triton.knobs", "triton._C")             # settings and machine code: one for both copies
_OURS = "tokamak.codegen"                           # whose modules triton* hold what kernels may call
_LOCK = threading.RLock()                           # the interpreter keeps the program that it runs in globals


def interpreted(unit: GpuUnit) -> Interpreted:
    """`unit` as something to call. Raises what its text raises when it is executed, CompilerMissing when there is no Triton."""
    if not triton_version():
        raise CompilerMissing("Triton is not installed, and kernels are interpreted by it: `pip install 'triton>=3.6'`")
    with _LOCK:
        copies = _copies()
        with _in_place(copies):
            function = gpu_worker.load(unit.name, unit.text).rewrite()       # of its source, while that is the last of this name
        return Interpreted(unit, function, copies)


class Interpreted:
    """A kernel in the interpreter: `run` it, or give it to a program in place of a `gpu.Kernel`. One program runs after the other, and `resident`
    says so to kernels whose programs wait for each other."""
    address = 0
    resident = 1

    def __init__(self, unit: GpuUnit, function, copies: dict[str, types.ModuleType]):
        self.unit, self._function, self._copies = unit, function, copies

    def on(self, device: str) -> Interpreted:
        if torch.device(device).type != "cpu":
            raise InternalError(f"the interpreter reads memory of the CPU, not of {device}")
        return self

    def launch(self, packed: bytes, stream: int) -> int:
        """As a `gpu.Placed`'s; always 0."""
        floats = (t == "fp64" for t in self.unit.signature)
        boxed = sum(2 + 2 * len(block) for _, block in self.unit.boxes)
        words = struct.unpack("=4q" + "".join("d" if f else "q" for f in floats) + "q" * boxed, packed)
        aligned = frozenset(i for i in self.unit.divisible if words[HEAD + i] % 16 == 0)
        if aligned != self.unit.divisible and self.unit.otherwise:
            interpreted(self.unit.relying(aligned)).run(words[1:HEAD], words[HEAD:len(words) - boxed])
        else:
            self.run(words[1:HEAD], words[HEAD:])
        return 0

    def __call__(self, packed: bytes, stream: int) -> None:
        self.launch(packed, stream)

    def run(self, grid: Sequence[int], words: Sequence[int | float | torch.Tensor]) -> None:
        """The kernel's programs one by one on `words`: for a pointer an address in this process or a CPU tensor."""
        grid = (*grid, 1, 1)[:3]
        if self.unit.cooperative and grid[0] * grid[1] * grid[2] > 1:
            raise InternalError(f"{self.unit.name} waits for other programs, and the interpreter runs one after the other")
        interpreter = self._copies["triton.runtime.interpreter"]
        with _LOCK:
            plain = len(self.unit.signature)
            arguments = [self._argument(t, w) for t, w in zip(self.unit.signature, words)] + self._boxes(words[plain:])
            function = self._function
            interpreter.interpreter_builder.set_grid_dim(*grid)
            places = itertools.product(*map(range, grid))
            if self.unit.cluster > 1:
                self._clusters(lambda: function(*arguments), list(places))
            else:
                for place in places:
                    interpreter.interpreter_builder.set_grid_idx(*place)
                    function(*arguments)

    def _clusters(self, program, places: list) -> None:
        """`program` at all `places`, a cluster after the other."""
        library, place = vars(self._copies["tokamak.codegen.triton_lib"]), self._copies["triton.runtime.interpreter"].interpreter_builder.set_grid_idx
        before = {name: library[name] for name in (*_EXCHANGES, "summed_part")}
        try:
            for start in range(0, len(places), self.unit.cluster):
                cluster = _Cluster(program, places[start:start + self.unit.cluster], place, self._copies["triton.language"])
                library.update({name: functools.partial(cluster.share if name.startswith("share") else cluster.exchange, n)
                                for name, n in _EXCHANGES.items()}, summed_part=cluster.summed_part)
                cluster.run()
        finally:
            library.update(before)

    def _boxes(self, words) -> list:
        """The descriptors."""
        tl, found = self._copies["triton.language"], []
        semantic = self._copies["triton.runtime.interpreter"].interpreter_semantic
        for kind, block in self.unit.boxes:
            element = "fp32" if kind == "tf32" else kind
            base, offset, *rest = words[:2 + 2 * len(block)]
            words = words[2 + 2 * len(block):]
            pointer = self._argument(f"*{element}", base + offset * tl.str_to_ty(element, None).primitive_bitwidth // 8)
            extents, strides = [self._argument("i32", w) for w in rest[:len(block)]], [self._argument("i64", w) for w in rest[len(block):-1]]
            found.append(semantic.make_tensor_descriptor(pointer, extents, [*strides, tl.constexpr(1)], [tl.constexpr(n) for n in block], "zero"))
        return found

    def _argument(self, type: str, word):
        """A scalar of exactly the type that the compiled kernel gets: the low bytes of the word."""
        tl, handle = self._copies["triton.language"], self._copies["triton.runtime.interpreter"].TensorHandle
        typed = tl.str_to_ty(type, None)
        if isinstance(word, torch.Tensor):
            word = word.data_ptr()
        if type == "fp64":
            value = np.array([word], np.float64)
        elif type.startswith("*"):
            value = np.array([word], np.uint64)
        else:
            value = np.array([word], np.int64).astype({"i32": np.int32, "i64": np.int64}[type])
        return tl.tensor(handle(value, typed), typed)


_EXCHANGES = {f"{word}{n}": n for word in ("exchange", "swap", "share") for n in (1, 2, 3, 4)}         # name -> how many values


class _Cluster:
    """Programs that exchange values, as threads of which one runs at a time, up to its next exchange or its end."""

    def __init__(self, program, places: list, place, tl):
        self.program, self.places, self.place, self.tl = program, places, place, tl
        self.back, self.going = threading.Semaphore(0), [threading.Semaphore(0) for _ in places]
        self.mine, self.said, self.heard, self.running = threading.local(), {}, [], set(range(len(places)))
        self.failed: BaseException | None = None

    def run(self) -> None:
        threads = [threading.Thread(target=self._one, args=(rank,), daemon=True) for rank in range(len(self.places))]
        for thread in threads:
            thread.start()
        while self.running:
            self.said = {}
            for rank in sorted(self.running):
                self.place(*self.places[rank])
                self.going[rank].release()
                self.back.acquire()
            if self.running and self.failed is None and len(self.said) < len(threads):
                self.failed = InternalError("a program ended that others wait for")
            self.heard = [self.said.get(rank) for rank in range(len(threads))]
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed

    def _one(self, rank: int) -> None:
        self.mine.rank = rank
        self.going[rank].acquire()
        try:
            if self.failed is None:
                self.program()
        except BaseException as error:      # noqa: BLE001 (raised again by the thread that waits)
            self.failed = self.failed or error
        self.running.discard(rank)
        self.back.release()

    def _told(self, values: tuple) -> list:
        """[the values of each program] for each of `values`, this program's."""
        self.said[self.mine.rank] = values
        self.back.release()
        self.going[self.mine.rank].acquire()
        if self.failed is not None:
            raise self.failed
        return list(zip(*self.heard))

    def share(self, n: int, *arguments):
        """As `triton_share`'s exchanges of n runs of values."""
        made, tl = [], self.tl
        for heard in self._told(arguments[:n]):
            many = len(heard)
            ranks, by_rank = tl.expand_dims(tl.arange(0, many), 1), None
            for rank, value in enumerate(heard):
                row = tl.broadcast_to(tl.expand_dims(value, 0), [many, value.shape[0]])
                by_rank = row if by_rank is None else tl.where(ranks == rank, row, by_rank)
            made.append(by_rank)
        return tuple(made) if len(made) > 1 else made[0]

    def summed_part(self, x, sharers, *_):
        """As `triton_share`'s."""
        (first, *others), = self._told((x,))
        tl, (m, n), parts = self.tl, x.shape, getattr(sharers, "value", sharers)
        total = sum(others, first)
        mine = tl.expand_dims(tl.expand_dims(tl.arange(0, parts), 1), 2) == self.mine.rank
        return tl.sum(tl.where(mine, tl.reshape(total, [parts, m // parts, n]), 0.0), 0)

    def exchange(self, n: int, *arguments):
        """As `triton_share`'s exchanges and swaps of n values."""
        lanes = arguments[n]
        made, where = [], self.tl.where
        for heard in self._told(arguments[:n]):
            by_lane = where(lanes >= 0, heard[0], heard[0])
            for rank, value in enumerate(heard):
                by_lane = where(lanes == rank, value, by_lane)
            made.append(by_lane)
        return tuple(made) if len(made) > 1 else made[0]


class _Int(int):
    """`int` for the interpreter, which asks it for the number in an array of one element: NumPy no longer says."""

    def __new__(cls, value=0, *base):
        return int(value.item() if isinstance(value, np.ndarray) else value, *base)


# -- the second copy -----------------------------------------------------------------------------------------------------
@functools.cache
def _copies() -> dict[str, types.ModuleType]:
    """The modules of an interpreted Triton, and of ours on top of it, by name."""
    importlib.import_module("triton.knobs")
    copies: dict[str, types.ModuleType] = {}
    with _in_place(copies):
        triton = importlib.import_module("triton")
        for name in _SHARED:
            setattr(triton, name.removeprefix("triton."), sys.modules[name])
        interpreter = importlib.import_module("triton.runtime.interpreter")
        vars(interpreter)["int"] = _Int
        interpreter.InterpreterBuilder.binary_op = _typed(interpreter.InterpreterBuilder.binary_op, triton.language.int1)
        _prepare(interpreter, triton.language)
    return copies


def _prepare(interpreter: types.ModuleType, tl: types.ModuleType) -> None:
    """The language made the interpreter's for good: done anew at every call of a function, as Triton does, it is a third of a kernel's time. What
    looks for overflows makes assertions that only a kernel built for debugging would check."""
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: None
    interpreter.ReduceOps.generic_reduce = _reduced
    interpreter.ScanOps.generic_scan = _scanned
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _remember_types(interpreter, tl)


def _remember_types(interpreter: types.ModuleType, tl: types.ModuleType) -> None:
    """What is said of a type of blocks is found out once, where Triton does so for every value: more than half of a kernel's time."""
    core, semantic, blocks, numbers = tl.core, tl.semantic.TritonSemantic, {}, {}
    block_type_, tensor_, np_type_ = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    broadcast_ = semantic.broadcast_impl_value

    def block_type(self, element_ty, shape):
        key = element_ty, *(getattr(n, "value", n) for n in shape)
        if key not in blocks:
            block_type_(self, element_ty, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self, handle, type):
        known = type.__dict__.get("of_tensors")
        if known is None:
            tensor_(self, handle, type)
            known = type.of_tensors = {k: v for k, v in self.__dict__.items() if k != "handle"}
        self.__dict__.update(known)
        self.handle = handle

    def np_type(of):
        key = of.scalar
        if key not in numbers:
            numbers[key] = np_type_(of)
        return numbers[key]

    def broadcast(self, left, right):
        alike = left.type.is_block() and right.type.is_block() and left.type.shape.values == right.type.shape.values
        return (left, right) if alike else broadcast_(self, left, right)
    core.pointer_type.__hash__ = core.dtype.__hash__
    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, np_type
    semantic.broadcast_impl_value = broadcast


def _combined(ops, types: list, left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
    """What a fold makes of blocks, element by element. `ops`: the interpreter's `ReduceOps` or `ScanOps`, whose axes the elements are not of."""
    made = ops.combine_fn.fn(*map(ops.to_tensor, left, types), *map(ops.to_tensor, right, types))
    made = made if isinstance(made, tuple) else (made,)
    return [np.broadcast_to(m.handle.data if hasattr(m, "handle") else m, x.shape).astype(x.dtype) for m, x in zip(made, left)]


def _reduced(self, input) -> list:
    """`ReduceOps.generic_reduce` by whole blocks: neighbours along the axis are combined until one is left, where Triton's takes an element at a
    time."""
    flat, axis = self.unravel(input, self.axis)
    types, parts = [t.dtype for t in flat], [t.handle.data for t in flat]
    every = lambda start: (slice(None),) * axis + (slice(start, None, 2),)
    while parts[0].shape[axis] > 1:
        parts = _combined(self, types, [x[every(0)] for x in parts], [x[every(1)] for x in parts])
    if self.keep_dims:
        parts = [x.reshape([1] * input[0].handle.data.ndim) if self.axis is None else x for x in parts]
    else:
        parts = [x[(slice(None),) * axis + (0,)] for x in parts]
    return list(map(self.to_tensor, parts, types))


def _scanned(self, input) -> list:
    """`ScanOps.generic_scan` by whole blocks, each combined with itself 1, 2, 4, ... elements before."""
    types, parts = [t.dtype for t in input], [t.handle.data for t in input]
    length, step = parts[0].shape[self.axis], 1
    while step < length:
        before = [np.roll(x, step, self.axis) for x in parts]
        inside = (np.arange(length) >= step).reshape([length if k == self.axis else 1 for k in range(parts[0].ndim)])
        parts = [np.where(inside, made, x) for made, x in zip(_combined(self, types, before, parts), parts)]
        step *= 2
    return list(map(self.to_tensor, parts, types))


def _typed(binary_op, int1):
    """`binary_op` of the interpreter, which gives the result of a comparison the type of what is compared: a single one is a number when it is
    spread."""
    def typed(self, lhs, rhs, op):
        made = binary_op(self, lhs, rhs, op)
        if made.data.dtype == np.bool_:
            made.dtype = int1
        return made
    return typed


@contextlib.contextmanager
def _in_place(copies: dict[str, types.ModuleType]) -> Iterator[None]:
    """Within it imports find `copies`, which receives what is imported, and `triton.jit` makes interpreted functions."""
    settings, package = sys.modules["triton.knobs"].runtime.__dict__, importlib.import_module(_OURS)
    before = {name: module for name, module in sys.modules.items() if _copied(name)}
    attributes = {name: value for name, value in vars(package).items() if name.startswith("triton")}
    interpret = settings.get("interpret")
    _replace(before, copies, package, {n.removeprefix(f"{_OURS}."): m for n, m in copies.items() if n.startswith(f"{_OURS}.")})
    settings["interpret"] = True
    try:
        yield
    finally:
        copies.update({name: module for name, module in sys.modules.items() if _copied(name)})
        settings.pop("interpret") if interpret is None else settings.update(interpret=interpret)
        _replace(copies, before, package, attributes)


def _copied(name: str) -> bool:
    ours = name.startswith(f"{_OURS}.triton")
    return ours or (name == "triton" or name.startswith("triton.")) and not name.startswith(_SHARED)


def _replace(old: dict, new: dict, package: types.ModuleType, attributes: dict) -> None:
    for name in old:
        sys.modules.pop(name, None)
    sys.modules.update(new)
    for name in [n for n in vars(package) if n.startswith("triton")]:
        delattr(package, name)
    for name, value in attributes.items():
        setattr(package, name, value)
