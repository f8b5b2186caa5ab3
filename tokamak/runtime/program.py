"""Programs: the straight-line Python function that a compiled graph becomes.

    Program ::= inputs; Step in order
    Step    ::= Let | Alloc | Launch | Call | Copy | Drop | Return

`assemble` prints a Program as the source of ONE function and executes it. Host integers are Python expression text over the names of inputs and
of earlier Lets ("s0*4"); they are pasted into the source, so constants cost nothing at a call. Names that begin with "tk_" belong to this file.

The function has AOTAutograd's boxed convention: it takes one list, which it empties, so that inputs can be freed at their last use.

Layout is part of a value: what an opaque call returns is compared with what was traced, and copied to the traced strides where it differs. Results
with constant sizes are compared at the first call only, after which the function is printed again with what it learned; others at every call.
torch's traced types can be wrong too (layer_norm's statistics in mixed precision): a kernel gets the traced type, torch's own calls what torch returned.

On GPUs kernels are launched on torch's current stream, which is asked for once a call, and the device of the next step is torch's current one. Their
errors stand in words that the host reads at the next call, and behind steps that wait for the device; a `synchronous` program waits at its end.
"""
from __future__ import annotations

import keyword
import math
import re
import struct
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable

import torch

from ..errors import InternalError
from . import gpu, gpu_errors, memory

_RESERVED = "tk_"
NO_MEMORY = 63          # what a kernel returns that could not have its scratch memory
RESIDENT = "tk_resident"
Watch = Callable[[int, Callable], Callable]
_WAITING = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default,
                      torch.ops.aten.masked_select.default, torch.ops.aten.is_nonzero.default})      # calls after which the device is done


# -- the steps ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TensorSpec:
    """A tensor's traced description; `shape` and `strides` (in elements) are texts of integers."""
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def static(self) -> bool:
        return all(_is_int(t) for t in (*self.shape, *self.strides))


@dataclass(frozen=True)
class Ref:
    """Tensor `name`, or a strided window on it: `offset` in elements, counted from the tensor's own first element."""
    name: str
    shape: tuple[str, ...] | None = None
    strides: tuple[str, ...] | None = None
    offset: str | None = None


@dataclass(frozen=True)
class Host:
    """A number computed on the host."""
    text: str


@dataclass(frozen=True)
class Let:
    """Host integer `name` is `text`."""
    name: str
    text: str


@dataclass(frozen=True)
class Alloc:
    """Fresh memory for tensor `name`, uninitialised, with exactly `spec`'s strides; `nbytes_text` covers its largest offset.
    `kind`: 'output' (escapes from the call) or 'temp'."""
    name: str
    spec: TensorSpec
    nbytes_text: str
    kind: str = "output"


@dataclass(frozen=True)
class Launch:
    """One kernel call. Each word is ('ptr' | 'temp', tensor name), ('int', text), ('addresses', text: tensor names in braces are their addresses),
    ('float', text: the 8 bytes of a double) or, on a GPU, ('error', ''): the address of an int32 that the kernel sets to 1 + the number of its error. `grid`: texts of a GPU kernel's numbers of programs, in which
    RESIDENT stands for how many of them the device runs at once; None: a kernel in C. `device`: where it runs; "cpu" with a grid: the interpreter."""
    kernel: str
    words: tuple[tuple[str, str], ...]
    first_error: int = 0            # where this kernel's errors begin in the program's
    grid: tuple[str, str, str] | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Call:
    """`target(*args, **kwargs)` by torch. `args` hold Ref, Host and plain values, nested in tuples, lists and dicts. `results` has (name or None,
    TensorSpec or None) for each output; `single`: the target returns its one result bare. `reason` says why no kernel was made of it."""
    target: Any
    args: tuple
    kwargs: dict
    results: tuple[tuple[str | None, TensorSpec | None], ...]
    single: bool
    reason: str = ""


@dataclass(frozen=True)
class Drop:
    """The last use of `name` is past."""
    name: str


@dataclass(frozen=True)
class Copy:
    """`target` (an input, mutated by the user's program) receives `source`."""
    target: Ref
    source: Ref


@dataclass(frozen=True)
class Return:
    """The results: Ref, Host, None and plain values."""
    items: tuple


Step = Let | Alloc | Launch | Call | Drop | Copy | Return


@dataclass(frozen=True)
class Program:
    """`inputs`: argument names in calling order; `errors`: what a kernel's result n + 1 raises: (exception class, message);
    `constants`: tensors that the steps name and that are no inputs; `dtypes`: the traced types of inputs, checked where a kernel reads them.
    `condition`: text over inputs that are numbers: the sizes that it is for; "" are all. `devices`: where the inputs are that are tensors."""
    name: str
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    errors: tuple[tuple[type, str], ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    condition: str = ""
    devices: dict[str, str] = field(default_factory=dict)


# -- from steps to a function --------------------------------------------------------------------------------------------
def assemble(program: Program, kernels: dict[str, Callable[[bytes, int], int] | gpu.Kernel], pool: memory.Pool | None = None,
             synchronous: bool = False, watch: Watch | None = None, other: Callable[[list], list] | None = None) -> Callable[[list], list]:
    """The boxed function of `program`. `kernels[name](words, threads)` returns 0, or 1 + an index into `program.errors`; a kernel launched with a grid
    is a `gpu.Kernel`, or another with its `on`. `pool` serves large allocations; None: torch's allocator serves all. `synchronous`: a call waits for the
    GPUs, so that errors of their kernels are raised by the call that they are of. `watch(position, function)` gives what is called in place of the
    kernel, or of torch's function, of the step at `position`. `other(args)` answers calls of sizes that the program is not for."""
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
            "tk_stream": gpu.raw_stream, "tk_wait": gpu.wait, **program.constants}
        self.gpus = _gpus(program)
        self.errors = _error_slots(program)
        self.constants: dict[int, str] = {}
        self.pointers: dict[str, int] = {}
        for step in program.steps:
            for kind, name in step.words if isinstance(step, Launch) else ():
                for found in re.findall(r"\{(\w+)\}", name) if kind == "addresses" else [name] if kind in ("ptr", "temp") else []:
                    self.pointers[found] = self.pointers.get(found, 0) + 1
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
        for position, step in enumerate(self.program.steps):
            getattr(self, f"_{type(step).__name__.lower()}")(position, step)
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

    def _launch_grid(self, position: int, step: Launch):
        kernel, on = self.kernels.get(step.kernel), step.device
        placed = kernel.on(on) if kernel is not None else None
        name, address = self._bind(placed, f"tk_k{position}"), self._bind(placed and placed.address, f"tk_a{position}")
        own = self.watch is not None or on == "cpu"
        launch = self._bind(placed and self._watched(position, placed.launch), f"tk_launch{position}" if own else "tk_launch")
        stream = f"tk_s{_index(on)}" if on != "cpu" else "0"
        if on != "cpu":
            self._enter(on)
        grid = [text.replace(RESIDENT, f"{name}.resident") for text in step.grid]
        words = [f"tk_x{position}" if kind == "error" else self._word(kind, text) for kind, text in step.words]
        self.lines.append(f"tk_b = {self._pack(position, step, '=4q')}({', '.join((address, *grid, *words))})")
        self.lines.append(f"if {launch}(tk_b, {stream}): {name}(tk_b, {stream})")
        if on == "cpu" and "cpu" in self.errors:
            self._look(("cpu",))

    # -- one method a kind of step
    def _let(self, _, step: Let):
        _check_name(step.name)
        self.lines.append(f"{step.name} = {step.text}")

    def _alloc(self, _, step: Alloc):
        _check_name(step.name)
        spec = step.spec
        shape, strides, dtype = _tuple(spec.shape), _tuple(spec.strides), self._value(spec.dtype)
        if torch.device(spec.device).type == "cuda":
            self._enter(spec.device)
            self.lines.append(f"{step.name} = tk_empty_gpu({shape}, {strides}, {dtype})")
        elif spec.device != "cpu":
            self.lines.append(f"{step.name} = torch.empty_strided({shape}, {strides}, dtype={dtype}, device={spec.device!r})")
        elif self.pool is None or _is_int(step.nbytes_text) and int(step.nbytes_text) < memory.SMALL:
            self.lines.append(f"{step.name} = tk_empty({shape}, {strides}, {dtype})")
        else:
            layout, size, take = f"({shape}, {strides}, {dtype})", step.nbytes_text, "tk_alloc"
            if spec.static and _is_int(size):
                layout = self._bind((_ints(spec.shape), _ints(spec.strides), spec.dtype), f"tk_l_{step.name}")
                size, take = memory.size_class(int(size)), "tk_take"
            self.lines.append(f"{step.name} = {take}({layout}, {size})")

    def _launch(self, position: int, step: Launch):
        if step.grid is not None:
            return self._launch_grid(position, step)
        pack, words = self._pack(position, step, "="), ", ".join(self._word(*w) for w in step.words)
        made = self.kernels.get(step.kernel)
        kernel = self._bind(made and self._watched(position, made), f"tk_k_{step.kernel}" if self.watch is None else f"tk_k{position}")
        self.lines.append(f"tk_e = {kernel}({pack}({words}), tk_threads())")
        self.lines.append(f"if tk_e: tk_fail(tk_e{f', {step.first_error}' if step.first_error else ''})")

    def _call(self, position: int, step: Call):
        target = step.target._op if isinstance(step.target, torch._ops.OpOverload) else step.target
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
        self.lines.append(f"return [{', '.join(self._value(i) for i in step.items)}]")

    # -- values
    def _pack(self, position: int, step: Launch, head: str) -> str:
        return self._bind(struct.Struct(head + "".join("d" if kind == "float" else "q" for kind, _ in step.words)).pack, f"tk_w{position}")

    def _word(self, kind: str, text: str) -> str:
        if kind == "addresses":
            return re.sub(r"\{(\w+)\}", lambda found: self._pointer(found[1]), text)
        return self._pointer(text) if kind in ("ptr", "temp") else text

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


def _is_int(text: str) -> bool:
    return text.isdigit() or text[:1] == "-" and text[1:].isdigit()


def _ints(texts: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(int(t) for t in texts)


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
