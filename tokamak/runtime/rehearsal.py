"""Calls of torch's libraries made once beforehand, on memory of their own, while graphs are still planned and kernels built.

What a library does at its first call of a kind (load code, make a handle, choose a plan) is done in a thread then, and not in the first call of a
program: on an H200 0.1 s for the first convolution or product of a process, 0.06 for a convolution of another kind; another thread's first calls take
3 ms then. A first call of ResNet-50 takes 4.5 s, 5.7 without (some of it by other kernels). Only calls are made that read their arguments and write
their results: no random numbers, no indices. Convolutions of groups are left out: of EfficientNet-B4's thirty, 18.5 s one after the other on a slow
host, 12.9 are to be done again in each thread, and four threads at once take 11.5.
"""
from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from .steps import Alloc, Call, Host, ints, made, Program, Ref, TensorSpec

aten = torch.ops.aten
_PLAIN = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._addmm_activation.default,
                    aten.convolution.default, aten.convolution_backward.default})
_GROUPS = {aten.convolution.default: 8, aten.convolution_backward.default: 9}       # -> position of the number of groups
_DROPPING = {                           # -> position of the share that is dropped at random
    aten._scaled_dot_product_flash_attention.default: 3, aten._scaled_dot_product_flash_attention_backward.default: 10,
    aten._scaled_dot_product_efficient_attention.default: 5, aten._scaled_dot_product_efficient_attention_backward.default: 9,
    aten._scaled_dot_product_cudnn_attention.default: 5, aten._scaled_dot_product_cudnn_attention_backward.default: 13}
LARGEST = 2 << 30                       # bytes of a call's arguments
_made: set[tuple] = set()               # by this process


class Memory(NamedTuple):
    """A tensor of any values."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str


class Rehearsal:
    """Makes calls of programs that do not run yet, in a thread. Nothing is made any more once `end` was called."""

    def __init__(self) -> None:
        self.waiting: list[tuple] = []
        self.thread: threading.Thread | None = None
        self.over, self.lock = False, threading.Lock()
        self.holds = False              # did a thread's calls leave workspaces of the vendor's?

    def add(self, program: Program, inputs: Iterable[Any]) -> None:
        """Has the calls of `program` made. `inputs`: what is known of each input before it has a value: a tensor, or anything else."""
        found = [c for c in calls(program, inputs) if c not in _made]
        if not found or self.over or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        _made.update(found)
        with self.lock:
            self.waiting += found
            if self.thread is None:
                streams = [torch.cuda.current_stream(d) for d in {m.device for c in found for m in memories(c)} if d != "cpu"]
                self.thread = threading.Thread(target=self._work, args=(streams,))
                self.thread.start()

    def end(self) -> None:
        """Waits for the call that is being made, if one is. Workspaces, which torch keeps for each thread's handle (32 MiB on Hopper), are let go: no
        other thread might take up that handle."""
        self.over, thread = True, self.thread
        if thread is not None:
            thread.join()
        if self.holds and not torch.cuda.is_current_stream_capturing():
            self.holds = False
            torch._C._cuda_clearCublasWorkspaces()

    def _work(self, streams: list[torch.cuda.Stream]) -> None:
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            while not self.over:
                with self.lock:
                    if not self.waiting:
                        self.thread = None
                        return
                    call = self.waiting.pop(0)
                self.holds = self.holds or bool(streams)
                with contextlib.suppress(Exception):            # the program makes it again, and may raise
                    make(call)


# -- calls as values ------------------------------------------------------------------------------------------------------
def calls(program: Program, inputs: Iterable[Any]) -> list[tuple]:
    """The distinct calls of `program` that can be made beforehand, as (function, arguments, keywords) with a Memory for each tensor."""
    known = {n: Memory(tuple(x.shape), tuple(x.stride()), x.dtype, str(x.device)) for n, x in zip(program.inputs, inputs)
             if isinstance(x, torch.Tensor) and x.layout is torch.strided and all(type(n) is int for n in (*x.shape, *x.stride()))}
    found: dict[tuple, None] = {}
    for step in program.steps:
        if isinstance(step, Call) and (step.target in _PLAIN and _whole(step) or step.target in _DROPPING and _keeps_all(step)):
            with contextlib.suppress(KeyError, ValueError, TypeError):             # memory of which nothing is known, symbolic sizes
                call = step.target, _frozen(step.args, known), tuple((k, _frozen(v, known)) for k, v in step.kwargs.items())
                if sum(math.prod(m.shape) * m.dtype.itemsize for m in memories(call)) <= LARGEST:
                    found[call] = None
        if isinstance(step, (Alloc, Call)):
            known.update((n, _of(s)) for n, s in made(step) if s is not None and s.static)
    return list(found)


def make(call: tuple) -> None:
    function, args, kwargs = call
    function(*_thawed(args), **{k: _thawed(v) for k, v in kwargs})


def memories(call: tuple) -> list[Memory]:
    """The tensors of a call."""
    if isinstance(call, Memory):
        return [call]
    return [m for v in call for m in memories(v)] if type(call) is tuple else []


def _of(spec: TensorSpec) -> Memory:
    return Memory(ints(spec.shape), ints(spec.strides), spec.dtype, spec.device)


def _whole(call: Call) -> bool:
    """Is it no convolution of groups of channels?"""
    at = _GROUPS.get(call.target)
    return at is None or call.kwargs.get("groups", call.args[at] if len(call.args) > at else 1) == 1


def _keeps_all(call: Call) -> bool:
    at = _DROPPING[call.target]
    return call.kwargs.get("dropout_p", call.args[at] if len(call.args) > at else 0.0) == 0.0


def _frozen(value: Any, known: Mapping[str, Memory]) -> Any:
    """`value` as one that can be compared. Raises KeyError for memory of which nothing is known, ValueError for symbolic sizes, TypeError for what
    cannot be compared."""
    if isinstance(value, Ref):
        whole = known[value.name]
        return whole if value.shape is None else Memory(ints(value.shape), ints(value.strides), whole.dtype, whole.device)
    if isinstance(value, Host):
        return int(value.text)
    if isinstance(value, (list, tuple)):
        return tuple([_frozen(v, known) for v in value])
    hash(value)
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, Memory):
        return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
    return [_thawed(v) for v in value] if type(value) is tuple else value
