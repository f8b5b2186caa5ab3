"""Programs: the straight-line Python function that a compiled graph becomes.

`assemble` prints a Program (`steps`) as the source of ONE function and executes it. The texts of host integers are pasted into the source, so
constants cost nothing at a call. Names that begin with "tk_" belong to this file.

The function has AOTAutograd's boxed convention: it takes one list, which it empties, so that inputs can be freed at their last use.

Layout is part of a value: what an opaque call returns is compared with what was traced, and copied to the traced strides where it differs. Results
with constant sizes are compared at the first call only, after which the function is printed again with what it learned; others at every call.
torch's traced types can be wrong too (layer_norm's statistics in mixed precision): a kernel gets the traced type, torch's own calls what torch
returned.

On GPUs kernels are launched on torch's current stream, which is asked for once a call, and the device of the next step is torch's current one. Their
errors stand in words that the host reads at the next call, and behind steps that wait for the device; a `synchronous` program waits at its end.
"""
from __future__ import annotations

import ctypes
import keyword
import math
import re
import struct
import weakref
from typing import Callable, Iterable

import torch

from ..errors import InternalError
from . import gpu, gpu_errors, memory
from .runs import Group, grouped, layout, Run, Word
from .steps import BRACED, RESIDENT, Alloc, Call, Copy, Drop, Host, is_int, ints, Launch, Let, Program, read, Ref, Return, Step, TensorSpec

_RESERVED = "tk_"
NO_MEMORY = 63          # what a kernel returns that could not have its scratch memory
Watch = Callable[[int, Callable], Callable]
_WAITING = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
                      torch.ops.aten.masked_select.default, torch.ops.aten.is_nonzero.default})      # calls after which the device is done

# What Python's own interface to torch does with the same arguments as the operator: it takes 2.1 us less of the host's time a call (mm of 4x4 on a
# CPU, 3.9 us instead of 6.0: the operator's interface finds out what each argument is by its schema).
_DIRECT = {torch.ops.aten.mm.default: torch.mm, torch.ops.aten.bmm.default: torch.bmm, torch.ops.aten.addmm.default: torch.addmm,
           torch.ops.aten.baddbmm.default: torch.baddbmm, torch.ops.aten.convolution.default: torch.convolution,
           torch.ops.aten._addmm_activation.default: torch._addmm_activation}


# -- from steps to a function --------------------------------------------------------------------------------------------
def assemble(program: Program, kernels: dict[str, Callable[[bytes, int], int] | gpu.Kernel], pool: memory.Pool | None = None,
             synchronous: bool = False, watch: Watch | None = None, other: Callable[[list], list] | None = None) -> Callable[[list], list]:
    """The boxed function of `program`. `kernels[name](words, threads)` returns 0, or 1 + an index into `program.errors`; a kernel launched with a
    grid is a `gpu.Kernel`, or another with its `on`. `pool` serves large allocations; None: torch's allocator serves all. `synchronous`: a call waits
    for the GPUs, so that errors of their kernels are raised by the call that they are of. `watch(position, function)` gives what is called in place
    of the kernel, or of torch's function, of the step at `position`. `other(args)` answers calls of sizes that the program is not for."""
    for name in (*program.inputs, *program.constants):
        _check_name(name)
    printer = _Printer(program, kernels, pool, synchronous=synchronous, watch=watch)
    slots = {_id(d): (d, {at: program.steps[at].first_error for at in positions}) for d, positions in printer.errors.items()}
    names, unseen = gpu_errors.names(program.name, slots, printer.namespace["tk_fail"])
    printer.namespace.update(names, tk_other=other)
    fn = printer.function(None)
    if printer.learns:
        learned: dict[int | str, tuple[bool, ...]] = {}

        def settle():
            """Called at the end of a first call that went well: the code without the checks takes the place of the code with them."""
            fn.__code__ = _Printer(program, kernels, pool, printer.namespace, synchronous, watch).function(learned).__code__
        printer.namespace.update(tk_first=_first_result(learned), tk_input=_first_input(learned), tk_settle=settle)
    fn._boxed_call = True
    fn.pending = _pending(printer)
    if unseen is not None:
        weakref.finalize(fn, unseen)
    if pool is not None:        # what a model that is gone has left idle goes back to the system
        weakref.finalize(fn, pool.trim).atexit = False
    return fn


def _pending(printer: _Printer) -> Callable[[], None] | None:
    """What raises the errors that kernels on GPUs have left so far; None where they leave none."""
    lines = [f"    if tk_words_{_id(d)} != tk_zeros_{_id(d)}: tk_look()" for d in printer.errors if d != "cpu"]
    exec("\n".join(["def tk_pending():", *lines]) if lines else "tk_pending = None", printer.namespace, made := {})
    return made["tk_pending"]


def source(program: Program) -> str:
    """The text of the settled function, for people to read."""
    return _Printer(program, {}, None).text({})


class _Printer:
    """Prints one version of a program's function. `learned` maps a Call's position, or an input's name, to what the first call showed: for each
    result, must it be made to conform? None prints the version that learns it."""

    def __init__(self, program: Program, kernels, pool, namespace: dict | None = None, synchronous: bool = False, watch: Watch | None = None):
        self.program, self.kernels, self.pool, self.synchronous, self.watch = program, kernels, pool, synchronous, watch
        self.namespace = namespace if namespace is not None else {
            "math": math, "torch": torch, "tk_threads": torch.get_num_threads, "tk_conform": _conform, "tk_fail": _failure(program.errors),
            "tk_window": memory.window, "tk_empty": memory.empty, "tk_alloc": memory.alloc(pool),
            "tk_take": pool.take if pool is not None else None, "tk_empty_gpu": gpu.empty, "tk_exchange": gpu.exchange_device,
            "tk_stream": gpu.raw_stream, "tk_wait": gpu.wait, "tk_uint8": torch.uint8, **program.constants}
        self.block = layout(program)
        self.places = self.block.places if self.block is not None else {}
        self.items = grouped(program, self.places, watch is not None)
        self.gpus = _gpus(program)
        self.errors = _error_slots(program)
        self.constants: dict[int, str] = {}
        self.pointers: dict[str, int] = {}
        for _, item in self.items:
            for name, uses in _pointed(item).items():
                name = "tk_m" if name in self.places else name
                self.pointers[name] = self.pointers.get(name, 0) + uses
        self.typed = {name: dtype for name, dtype in program.dtypes.items() if name in self.pointers}
        self.learns = bool(self.typed) or any(isinstance(s, Call) and _static_results(s) for s in program.steps)

    def function(self, learned: dict | None) -> Callable:
        exec(compile(self.text(learned), f"<tokamak {self.program.name}>", "exec"), self.namespace, made := {})
        return made[f"tk_{self.program.name}"]

    def text(self, learned: dict | None) -> str:
        self.learned, self.lines, self.taken = learned, [], set()
        inputs = self.program.inputs
        if self.program.condition:
            self._sizes(self.program.condition)
        if inputs:
            self.lines.append(f"{', '.join(inputs)}{',' if len(inputs) == 1 else ''} = args")
        self.lines.append("args.clear()")
        for name, dtype in self.typed.items():
            if learned is None:
                self.lines.append(f"{name} = tk_input({name!r}, {name}, {self._value(dtype)})")
            elif learned.get(name, (False,))[0]:
                self.lines.append(f"{name} = {name}.to({self._value(dtype)})")
        self._look(self.errors)
        head, self.lines = self.lines, []
        self.current = self.gpus[0] if self.gpus else None
        self._block()
        for position, item in self.items:
            getattr(self, f"_{type(item).__name__.lower()}")(position, item)
        lines = [*head, *(self._guarded() if self.gpus else self.lines)]
        return f"def tk_{self.program.name}(args):\n    " + "\n    ".join(lines) + "\n"

    def _sizes(self, condition: str) -> None:
        """Hands calls of other sizes on, before anything else holds the arguments."""
        for position, name in enumerate(self.program.inputs):
            if re.search(rf"\b{name}\b", condition):
                self.lines.append(f"{name} = args[{position}]")
        self.lines.append(f"if not ({condition}): return tk_other(args)")

    # -- GPUs
    def _guarded(self) -> list[str]:
        """The body with torch's current device set to the first that it needs, and the current streams at hand."""
        home = self.gpus[0]
        restore = "tk_exchange(tk_back)" if len(self.gpus) > 1 else f"if tk_back != {home}: tk_exchange(tk_back)"
        streams = [f"    tk_s{i} = tk_stream({i})" for i in self.gpus]
        return [f"tk_back = tk_exchange({home})", "try:", *streams, *(f"    {line}" for line in self.lines), "finally:", f"    {restore}"]

    def _enter(self, device: str):
        index = _index(device)
        if index != self.current:
            self.current = index
            self.lines.append(f"tk_exchange({index})")

    def _look(self, devices: Iterable[str]):
        """Raises what kernels have left in the error words of `devices`; a plain read of memory."""
        self.lines += [f"if tk_words_{_id(d)} != tk_zeros_{_id(d)}: tk_look()" for d in devices]

    def _block(self):
        """Memory for the small values that kernels alone see."""
        if self.block is not None:
            take = "tk_empty"
            if torch.device(self.block.device).type == "cuda":
                self._enter(self.block.device)
                take = "tk_empty_gpu"
            self.lines.append(f"tk_m = {take}(({self.block.size},), (1,), tk_uint8)")

    def _group(self, position: int, group: Group):
        """One call for all launches of the group; a comment says what each is."""
        on = group.device
        if on != "cpu":
            self._enter(on)
        values: dict[tuple[str, str], int] = {}
        words = lambda at, step: [self._launch_word(values, at, *w) for w in self._launch_words(at, step)]
        launches = [(self._placed(at, step), words(at, step)) for at, step in group.launches]
        for _, step in group.launches:
            self.lines.append(f"# {step.kernel}[{', '.join(step.grid)}]({', '.join(text or kind for kind, text in step.words)})")
        run = Run(launches, [kind == "float" for kind, _ in values]).call if all(placed is not None for placed, _ in launches) else None
        name = self._bind(run and self._watched(position, run), f"tk_r{position}")
        given = [f"tk_s{_index(on)}" if on != "cpu" else "0", *(self._word(*v) for v in values)]
        self.lines.append(f"{name}({', '.join(given)})")
        if on == "cpu" and on in self.errors:
            self._look((on,))

    def _placed(self, position: int, step: Launch):
        kernel = self.kernels.get(step.kernel)
        placed = kernel.on(step.device) if kernel is not None else None
        self._bind(placed, f"tk_k{position}")
        return placed

    def _launch_words(self, position: int, step: Launch) -> list[tuple[str, str]]:
        return [*(("int", text.replace(RESIDENT, f"tk_k{position}.resident")) for text in step.grid), *step.words]

    def _launch_word(self, values: dict[tuple[str, str], int], position: int, kind: str, text: str) -> Word:
        """What is known of a word before a call; what is not becomes one of `values`."""
        if kind == "error":
            return Word(self.namespace.get(f"tk_x{position}", 0))
        constant = self.places.get(text, 0) if kind in ("ptr", "temp") else _number(kind, text)
        if constant is not None and kind in ("int", "float"):
            return Word(constant)
        wanted = ("ptr", "tk_m" if text in self.places else text) if kind in ("ptr", "temp") else (kind, text)
        return Word(constant or 0, values.setdefault(wanted, len(values)))

    # -- one method a kind of step
    def _let(self, _, step: Let):
        _check_name(step.name)
        self.lines.append(f"{step.name} = {step.text}")

    def _alloc(self, _, step: Alloc):
        _check_name(step.name)
        spec = step.spec
        if step.name in self.places:
            self.lines.append(f"# {step.name}: {_tuple(spec.shape)} of {spec.dtype} in tk_m from byte {self.places[step.name]}")
            return
        shape, strides, dtype = _tuple(spec.shape), _tuple(spec.strides), self._value(spec.dtype)
        if torch.device(spec.device).type == "cuda":
            self._enter(spec.device)
            self.lines.append(f"{step.name} = tk_empty_gpu({shape}, {strides}, {dtype})")
        elif spec.device != "cpu":
            self.lines.append(f"{step.name} = torch.empty_strided({shape}, {strides}, dtype={dtype}, device={spec.device!r})")
        elif self.pool is None or is_int(step.nbytes_text) and int(step.nbytes_text) < memory.SMALL:
            self.lines.append(f"{step.name} = tk_empty({shape}, {strides}, {dtype})")
        else:
            layout, size, take = f"({shape}, {strides}, {dtype})", step.nbytes_text, "tk_alloc"
            if spec.static and is_int(size):
                layout = self._bind((ints(spec.shape), ints(spec.strides), spec.dtype), f"tk_l_{step.name}")
                size, take = memory.size_class(int(size)), "tk_take"
            self.lines.append(f"{step.name} = {take}({layout}, {size})")

    def _launch(self, position: int, step: Launch):
        words = ", ".join(self._word(*w) for w in step.words)
        pack = self._bind(struct.Struct("=" + "".join("d" if kind == "float" else "q" for kind, _ in step.words)).pack, f"tk_w{position}")
        made = self.kernels.get(step.kernel)
        kernel = self._bind(made and self._watched(position, made), f"tk_k_{step.kernel}" if self.watch is None else f"tk_k{position}")
        if step.note:
            self.lines.append(f"# {step.note}")
        self.lines.append(f"tk_e = {kernel}({pack}({words}), tk_threads())")
        self.lines.append(f"if tk_e: tk_fail(tk_e{f', {step.first_error}' if step.first_error else ''})")

    def _call(self, position: int, step: Call):
        target = _DIRECT.get(step.target) or (step.target._op if isinstance(step.target, torch._ops.OpOverload) else step.target)
        args = [self._value(a) for a in step.args] + [f"{k}={self._value(v)}" for k, v in step.kwargs.items()]
        call = f"{self._bind(self._watched(position, target), f'tk_c{position}')}({', '.join(args)})"
        names = [n for n, _ in step.results]
        for n in names:
            _check_name(n) if n is not None else None
        static = _static_results(step)
        if self.learned is None and static:
            specs = ", ".join(f"({self._traced(*r)})" if r in static else "None" for r in step.results)
            call = f"tk_first({position}, {call}, ({specs},), {step.single})"
        if not any(names):
            self.lines.append(call)
        elif step.single:
            self.lines.append(f"{names[0]} = {call}")
        else:
            self.lines.append(f"{', '.join(n or 'tk_u' for n in names)}{',' if len(names) == 1 else ''} = {call}")
            if None in names:
                self.lines.append("del tk_u")
        self._conforming(position, step)
        if step.target in _WAITING:
            self._look(d for d in self.errors if d != "cpu")

    def _conforming(self, position: int, step: Call):
        """Symbolic results are compared at every call; of the others those that the first call found different."""
        needs = (self.learned or {}).get(position, (False,) * len(step.results))
        for (name, spec), need in zip(step.results, needs):
            if name is not None and spec is not None and (need or not spec.static):
                self.lines.append(f"{name} = tk_conform({name}, {self._traced(name, spec)})")

    def _traced(self, name: str, spec: TensorSpec) -> str:
        """The arguments of `_conform`: the type only counts where a kernel reads."""
        return f"{_tuple(spec.shape)}, {_tuple(spec.strides)}, {self._value(spec.dtype) if name in self.pointers else None}"

    def _drop(self, _, step: Drop):
        self.lines.append(f"del {step.name}")

    def _copy(self, _, step: Copy):
        self.lines.append(f"{self._value(step.target)}.copy_({self._value(step.source)})")

    def _return(self, _, step: Return):
        if self.learned is None and self.learns:
            self.lines.append("tk_settle()")
        if self.synchronous and self.gpus:
            self.lines.append(f"tk_wait({', '.join(map(str, self.gpus))})")
            self._look(d for d in self.errors if d != "cpu")
        given = [self._value(i) for i in step.items]
        for position, text in enumerate(given):
            if isinstance(step.items[position], Ref) and not text.isidentifier() and given.count(text) > 1:
                self.lines.append(f"tk_o{position} = {text}")       # one object, as torch's own would be
                given = [f"tk_o{position}" if g == text else g for g in given]
        self.lines.append(f"return [{', '.join(given)}]")

    # -- values
    def _word(self, kind: str, text: str) -> str:
        if kind == "addresses":
            return BRACED.sub(lambda found: self._address(found[1]), text)
        if kind == "kernel":
            return str(ctypes.cast(self.kernels[text], ctypes.c_void_p).value) if text in self.kernels else text
        return self._pointer(text) if kind in ("ptr", "temp") else text

    def _address(self, name: str) -> str:
        return f"({self._pointer('tk_m')} + {self.places[name]})" if name in self.places else self._pointer(name)

    def _pointer(self, name: str) -> str:
        if self.pointers[name] == 1:
            return f"{name}.data_ptr()"
        local = f"tk_p_{name}"
        if name not in self.taken:
            self.taken.add(name)
            self.lines.append(f"{local} = {name}.data_ptr()")
        return local

    def _value(self, value) -> str:
        """`value` as source text; what has no literal becomes a name of the function's globals."""
        if isinstance(value, Ref):
            if value.shape is None:
                return value.name
            return f"tk_window({value.name}, {_tuple(value.shape)}, {_tuple(value.strides)}, {value.offset or 0})"
        if isinstance(value, Host):
            return value.text
        if type(value) in (list, tuple):
            inner = ", ".join(self._value(v) for v in value)
            return f"[{inner}]" if type(value) is list else f"({inner}{',' if len(value) == 1 else ''})"
        if type(value) is dict:
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if type(value) is slice:
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if value is None or type(value) in (bool, int, str) or type(value) is float and math.isfinite(value):
            return repr(value)
        if isinstance(value, torch.dtype):
            return self._bind(value, f"tk_{str(value).removeprefix('torch.')}")
        name = self.constants.get(id(value))
        if name is None:
            name = self.constants[id(value)] = self._bind(value, f"tk_v{len(self.constants)}")
        return name

    def _watched(self, position: int, function: Callable) -> Callable:
        return function if self.watch is None else self.watch(position, function)

    def _bind(self, value, name: str) -> str:
        self.namespace[name] = value
        return name


def _static_results(step: Call) -> list[tuple[str, TensorSpec]]:
    return [(n, s) for n, s in step.results if n is not None and s is not None and s.static]


def _check_name(name: str):
    if name.startswith(_RESERVED) or not name.isidentifier() or keyword.iskeyword(name) or name in ("args", "math", "torch"):
        raise InternalError(f"'{name}' cannot be the name of a value in a program")


def _gpus(program: Program) -> tuple[int, ...]:
    """The numbers of the GPUs that the program's own steps use."""
    used = [s.device for s in program.steps if isinstance(s, Launch)] + [s.spec.device for s in program.steps if isinstance(s, Alloc)]
    return tuple(dict.fromkeys(_index(d) for d in used if torch.device(d).type == "cuda"))


def _index(device: str) -> int:
    return torch.device(device).index or 0


def _id(device: str) -> str:
    return device.replace(":", "_")


def _error_slots(program: Program) -> dict[str, list[int]]:
    """Device -> the positions of its launches that can fail: each has an error word of its own."""
    slots: dict[str, list[int]] = {}
    for position, step in enumerate(program.steps):
        if isinstance(step, Launch) and any(kind == "error" for kind, _ in step.words):
            slots.setdefault(step.device, []).append(position)
    return slots


def _pointed(item: Step | Group) -> dict[str, int]:
    """The tensors whose addresses an item needs, and how often its text would ask for them."""
    launches = [s for _, s in item.launches] if isinstance(item, Group) else [item] if isinstance(item, Launch) else []
    plain = {name: 1 for s in launches for name in read(s)}
    return plain | {name: 2 for s in launches for kind, text in s.words if kind == "addresses" for name in BRACED.findall(text)}


def _number(kind: str, text: str) -> int | float | None:
    """What `text` is; None where a call shows it."""
    try:
        return float(text) if kind == "float" else int(text)
    except ValueError:
        return None


def _tuple(texts: tuple[str, ...]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


# -- what the function calls at run time ---------------------------------------------------------------------------------
def _failure(errors) -> Callable[[int], None]:
    def fail(code: int, first: int = 0):
        if code == NO_MEMORY:
            raise MemoryError("a kernel could not have its scratch memory")
        code += first
        if not 1 <= code <= len(errors):
            raise InternalError(f"a kernel returned the unknown error {code}")
        kind, message = errors[code - 1]
        raise kind(message)
    return fail


def _first_result(learned: dict[int, tuple[bool, ...]]):
    """tk_first(position, value, specs, single): the call's results as they were traced; records in `learned` which of them differed."""
    def first(position: int, value, specs, single: bool):
        values = (value,) if single else tuple(value)
        out = tuple(v if s is None else _conform(v, *s) for v, s in zip(values, specs, strict=True))
        learned[position] = tuple(a is not b for a, b in zip(values, out))
        return out[0] if single else out
    return first


def _first_input(learned: dict[int | str, tuple[bool, ...]]):
    """tk_input(name, value, dtype): the same for an input that a kernel reads."""
    def first(name: str, value: torch.Tensor, dtype: torch.dtype):
        learned[name] = (value.dtype is not dtype,)
        return value.to(dtype)
    return first


def _conform(value: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """`value` with the traced strides, and type unless that is None: itself when it has them (along extents of 1 and in empty tensors any stride will
    do), else a copy. Raises InternalError when the shape is not the traced one; but a result that torch leaves empty, because nothing needs its
    values, may stay so where no kernel reads it (its type is None)."""
    if dtype is None and isinstance(value, torch.Tensor) and not value.numel():
        return value
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InternalError(f"an opaque call returned {found} where a tensor of shape {shape} was traced")
    if value.layout is not torch.strided:
        return value
    dtype = dtype or value.dtype
    same = value.stride() == strides or 0 in shape or all(e == 1 or a == b for e, a, b in zip(shape, value.stride(), strides))
    if same and value.dtype is dtype and not value.is_neg():
        return value
    out = torch.empty_strided(shape, strides, dtype=dtype, device=value.device)
    window = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)      # one element stands for all along a stride of 0
    out[window].copy_(value[window])
    return out
