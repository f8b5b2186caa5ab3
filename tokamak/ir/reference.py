"""The language's meaning in NumPy: the oracle of every test.

    evaluate(graph, inputs) -> Evaluation(outputs, values, writes)

Values are arrays of their logical shape; bf16 values are float32 arrays (see `meaning`, which holds the meaning of each operation). A View is
evaluated by laying its node's memory out flat by the node's strides and striding over it. Slow and plain on purpose: one expression at a time over
its whole grid, the axes of a Compute first and those that a fold binds behind them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Callable, Mapping

import numpy as np

from ..errors import InternalError
from . import ops, substitution
from .dtype import F64
from .expr import Cast, Const, Coord, Expr, Load, Op, Random, Reduce, Scalar, Scan, walk
from .graph import Compute, Graph, Input, Opaque, Result, Scatter, View
from .index import Axis, Fetch, Index, Size, as_index
from .meaning import CARRIED, MEANING, PAIRWISE, array_type, convert, fold_type
from .meaning import random as philox_random

GRID_LIMIT = 20_000_000     # elements of a grid that is evaluated at once
_TORCH = SimpleNamespace(sym_float=float, sym_int=int, sym_max=max, sym_min=min, sym_not=lambda x: not x, _sym_sqrt=math.sqrt,
                         sym_ite=lambda x, a, b: a if x else b)         # as texts of sizes call them
_HOST = {"math": math, "min": min, "max": max, "Min": min, "Max": max, "abs": abs, "int": int, "float": float, "round": round, "torch": _TORCH}


@dataclass(frozen=True)
class Evaluation:
    """`outputs` as Graph.outputs, when inputs have received their values: an array for a View, an int for a size, a number for a Scalar, None and
    plain values themselves. `values`: node -> array of its logical shape. `writes`: Input -> the array that it receives."""
    outputs: list
    values: dict
    writes: dict


def evaluate(graph: Graph, inputs: list, *, constants: Mapping[Input, np.ndarray] | None = None,
             opaque: Callable[[Opaque, tuple, dict], tuple] | None = None, sizes: Mapping[str, int] | None = None,
             random: Callable | None = None, observe: Callable | None = None) -> Evaluation:
    """Evaluates `graph`.

    inputs     match graph.inputs: arrays for Input nodes (their logical shape; bf16 as float32), numbers for names
    constants  arrays of Input nodes that are no graph inputs
    opaque     `opaque(call, args, kwargs)` makes an opaque call: Views have become arrays, sizes ints, Scalar expressions numbers; returns one
               array (or None) for each of call.results
    sizes      further sizes, by name
    random     `random(kind, seed, number) -> float32 array` in place of the language's Philox
    observe    `observe(node, value, values) -> array` sees every tensor as it is made, and says what its readers get

    Raises IndexError for a gather or scatter out of range, ZeroDivisionError for an integer division by zero, InternalError for a malformed graph.
    """
    run = _Run(graph, opaque, random or philox_random)
    run.bind(inputs, constants or {}, sizes or {})
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            run.node(node)
            if observe is not None and isinstance(node, (Compute, Scatter, Result)):
                run.values[node] = observe(node, run.values[node], run.values)
        writes, values = {w.target: run.view(w.source) for w in graph.writes}, dict(run.values)
        run.values |= writes
        outputs = [run.argument(o) for o in graph.outputs]
    return Evaluation(outputs, values, writes)


class _Run:
    """One evaluation: the values of nodes, sizes and host numbers so far."""

    def __init__(self, graph: Graph, opaque, random_numbers):
        self.graph = graph
        self.call_opaque = opaque
        self.random = random_numbers
        self.values: dict = {}
        self.sizes: dict[str, int] = {}
        self.numbers: dict[str, Any] = {}
        self.results: dict[Opaque, tuple] = {}

    def bind(self, inputs, constants, sizes) -> None:
        if len(inputs) != len(self.graph.inputs):
            raise InternalError(f"{len(self.graph.inputs)} inputs wanted, {len(inputs)} given")
        self.sizes.update(sizes)
        given = [(g, v) for g, v in zip(self.graph.inputs, inputs) if isinstance(g, Input)]
        tensors = [(g, np.zeros(0) if v is None else v) for g, v in given] + list(constants.items())      # None: the token of an effect
        for given, value in zip(self.graph.inputs, inputs):
            if not isinstance(given, Input):
                self.numbers[given] = value
            elif not given.shape:
                self.numbers[f"{given.name}.item()"] = value
        for node, value in tensors:
            for extent, found in zip(node.shape, np.shape(value)):
                self._solve(extent, int(found))
        for name, text in self.graph.sizes.items():
            self._size(name, text)
        for node, value in tensors:
            shape = self.shape(node.shape)
            if shape != np.shape(value):
                raise InternalError(f"input {node.name} has shape {np.shape(value)}, the graph says {shape}")
            self.values[node] = np.asarray(value) if node.dtype.kind == "x" else np.asarray(value, dtype=array_type(node.dtype))

    def _solve(self, extent: Index, found: int) -> None:
        atoms = extent.atoms()
        if len(atoms) == 1 and isinstance(atoms[0], Size) and extent is as_index(atoms[0]):
            self.sizes.setdefault(atoms[0].name, found)

    def _size(self, name: str, text: str) -> None:
        if name not in self.sizes:
            self.sizes[name] = eval(text, {"__builtins__": {}}, {**_HOST, **self.numbers, **self.sizes})

    # -- sizes -------------------------------------------------------------------------------------------------------
    def size(self, index: Index) -> int:
        """The value of an index over sizes only."""
        return index.constant if index.constant is not None else int(substitution.evaluate(index, _Env(self)))

    def shape(self, shape) -> tuple[int, ...]:
        return tuple(self.size(s) for s in shape)

    # -- nodes -------------------------------------------------------------------------------------------------------
    def node(self, node) -> None:
        if isinstance(node, Input):
            if node not in self.values:
                raise InternalError(f"constant {node.name} has no value")
        elif isinstance(node, Compute):
            self.values[node] = self._compute(node)
        elif isinstance(node, Scatter):
            self.values[node] = self._scatter(node)
        elif isinstance(node, Opaque):
            if self.call_opaque is None:
                raise InternalError(f"no function evaluates the opaque call {node.target}")
            found = tuple(self.call_opaque(node, self.argument(node.args), self.argument(node.kwargs)))
            if len(found) != len(node.results):
                raise InternalError(f"the opaque call {node.target} has {len(node.results)} results, {len(found)} were given")
            self.results[node] = found
        elif isinstance(node, Result):
            value = np.asarray(self.results[node.opaque][node.position])
            self.values[node] = value if node.dtype.kind == "x" else value.astype(array_type(node.dtype))
            if value.shape != self.shape(node.shape):
                wanted = self.shape(node.shape)
                raise InternalError(f"result {node.position} of {node.opaque.target} has shape {value.shape}, the graph says {wanted}")
        else:
            raise InternalError(f"{type(node).__name__} is no node")

    def _compute(self, node: Compute) -> np.ndarray:
        shape = self.shape(node.shape)
        if 0 in shape:
            return np.zeros(shape, array_type(node.dtype))
        bound = _bound(node.expr)
        total = math.prod(shape) * math.prod(self.shape(a.extent for a in bound))
        scanned = {e.along.id for e in walk(node.expr) if isinstance(e, Scan)}
        free = [i for i in range(len(shape)) if i not in scanned and shape[i] > 1]
        if total <= GRID_LIMIT or not free:
            return _Grid(self, node.axes, bound).full(node.expr, shape)
        axis = free[0]
        step = max(1, GRID_LIMIT * shape[axis] // total)
        parts = []
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            piece = tuple(stop - start if i == axis else n for i, n in enumerate(shape))
            parts.append(_Grid(self, node.axes, bound, axis, (start, stop)).full(node.expr, piece))
        return np.concatenate(parts, axis)

    def _scatter(self, node: Scatter) -> np.ndarray:
        shape, domain = self.shape(node.shape), self.shape(node.domain)
        kind = array_type(node.dtype)
        start = np.full(shape, node.base.value, kind) if isinstance(node.base, Expr) else self.values[node.base]
        grid = _Grid(self, node.axes, _bound(node.value))
        value = grid.full(node.value, domain)
        guard = grid.full(node.guard, domain) if node.guard is not None else np.ones(domain, bool)
        where = [np.broadcast_to(i, domain) for i in grid.indices(node.index, guard)]
        for i, n in zip(where, shape):
            if np.any(guard & ((i < 0) | (i >= n))):
                raise InternalError(f"a scatter writes outside its {shape}")
        chosen = guard.reshape(-1)
        spots = tuple(i.reshape(-1)[chosen] for i in where)
        flat = value.reshape(-1)[chosen]
        if node.monoid == "last":
            out = start.copy()
            out[spots] = flat
            return out
        wide = kind if node.dtype.kind != "f" else fold_type(node.dtype)
        out = start.astype(wide)
        PAIRWISE[node.monoid].at(out, spots, flat.astype(wide))
        return out if wide == kind else convert(out, node.dtype, F64)

    # -- views and arguments -----------------------------------------------------------------------------------------
    def view(self, v: View) -> np.ndarray:
        """The array that a View shows, with the View's strides in memory."""
        value = self.values[v.node]
        shape, strides, offset = self.shape(v.shape), self.shape(v.strides), self.size(v.offset)
        if 0 in shape:
            return np.zeros(shape, value.dtype)
        memory = self._memory(v.node, value)
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides))
        if offset < 0 or last >= memory.size:
            raise InternalError(f"a view shows elements {offset}..{last} of a node with {memory.size}")
        step = memory.itemsize
        return np.lib.stride_tricks.as_strided(memory[offset:], shape, [s * step for s in strides])

    def _memory(self, node, value: np.ndarray) -> np.ndarray:
        strides = self.shape(node.strides)
        length = 1 + sum((n - 1) * s for n, s in zip(value.shape, strides)) if value.size else 0
        memory = np.zeros(length, value.dtype)
        if value.size:
            np.lib.stride_tricks.as_strided(memory, value.shape, [s * memory.itemsize for s in strides])[...] = value
        return memory

    def argument(self, x):
        """An output or an opaque call's argument, with Views, sizes and Scalar expressions replaced by their values."""
        if isinstance(x, View):
            return self.view(x)
        if isinstance(x, Index):
            return self.size(x)
        if isinstance(x, Expr):
            return _Grid(self, (), _bound(x)).full(x, ()).item()
        if isinstance(x, (tuple, list)):
            return type(x)(self.argument(v) for v in x)
        if isinstance(x, dict):
            return {k: self.argument(v) for k, v in x.items()}
        return x


class _Env:
    """Values of atoms, as `substitution.evaluate` asks for them: sizes by name, axes and gathers through the grid."""

    def __init__(self, run: _Run, grid: "_Grid | None" = None, mask=None):
        self.run, self.grid, self.mask = run, grid, mask

    def __contains__(self, atom) -> bool:
        return isinstance(atom, (Size, Axis, Fetch))

    def __getitem__(self, atom):
        if isinstance(atom, Size):
            found = self.run.sizes.get(atom.name)
            if found is None:
                raise InternalError(f"size {atom.name} has no value")
            return found
        if self.grid is None:
            raise InternalError(f"{atom!r} is no size")
        if isinstance(atom, Axis):
            return self.grid.coordinate(atom)
        return self.grid.fetch(atom, self.mask)


def _bound(e: Expr) -> tuple[Axis, ...]:
    """The axes that the folds of `e` bind, each once."""
    return tuple(dict.fromkeys(a for x in walk(e) if isinstance(x, Reduce) for a in x.over))


class _Grid:
    """Expressions over one grid: `axes`, then `bound`, one array dimension each. Arrays broadcast: a dimension that an expression does not depend
    on has extent 1. `cut` = (start, stop) restricts dimension `axis`."""

    def __init__(self, run: _Run, axes, bound, axis: int = 0, cut: tuple[int, int] | None = None):
        self.run = run
        self.rank = len(axes)
        self.dims = {a: d for d, a in enumerate((*axes, *bound))}
        self.extents = run.shape(a.extent for a in self.dims)
        self.axis, self.cut = axis, cut
        self.memo: dict = {}
        self.masks: list = []        # keeps every mask alive while the memo knows its id

    def full(self, e: Expr, shape) -> np.ndarray:
        """The value over the whole grid of `axes` (the folds leave extents of 1 behind), writable and contiguous."""
        value = np.asarray(self(e))
        value = value.reshape(value.shape[:self.rank]) if value.ndim > self.rank else value
        return np.array(np.broadcast_to(value, shape))

    def coordinate(self, a: Axis) -> np.ndarray:
        dim = self.dims.get(a)
        if dim is None:
            raise InternalError(f"axis {a!r} with extent {a.extent!r} is neither an axis of the node nor bound")
        start, stop = self.cut if self.cut is not None and dim == self.axis else (0, self.extents[dim])
        return np.arange(start, stop, dtype=np.int64).reshape([-1 if d == dim else 1 for d in range(len(self.dims))])

    def fetch(self, f: Fetch, mask) -> np.ndarray:
        """A gathered index, clamped to its bound where `mask` is false; IndexError when it is outside where `mask` holds."""
        value, limit = np.asarray(self(f.expr, mask)), self.run.size(f.bound)
        outside = (value < 0) | (value >= limit)
        if np.any(outside & mask if mask is not None else outside):
            wrong = value[outside].flat[0] if value.ndim else value
            raise IndexError(f"index {int(wrong)} is out of range for a dimension of size {limit}")
        return np.clip(value, 0, max(limit - 1, 0))

    def indices(self, indices, mask) -> list[np.ndarray]:
        env = _Env(self.run, self, mask)
        return [np.asarray(substitution.evaluate(i, env), dtype=np.int64) for i in indices]

    def __call__(self, e: Expr, mask=None):
        """The value of `e`. Where `mask` is false nobody asks: gathers there are not checked."""
        key = (e, id(mask))
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = _EVAL[type(e)](self, e, mask)
        return found

    def load(self, e: Load, mask):
        value = self.run.values[e.node]
        if e.guard is not None:
            guard = np.asarray(self(e.guard, mask))
            inside = guard if mask is None else guard & mask
            self.masks.append(inside)
        else:
            inside = mask
        where = self.indices(e.index, inside)
        clamped = []
        for i, n in zip(where, value.shape):
            outside = (i < 0) | (i >= n)
            if np.any(outside & inside if inside is not None else outside):
                raise InternalError(f"{e!r} reads outside a value of shape {value.shape}")
            clamped.append(np.clip(i, 0, max(n - 1, 0)))
        if value.size == 0:                # nothing is read: the checks above passed
            found = np.zeros(np.broadcast_shapes(*(i.shape for i in where)), value.dtype)
        else:
            found = value[tuple(clamped)]
        return found if e.guard is None else np.where(guard, found, np.asarray(e.other.value, value.dtype))

    def const(self, e: Const, mask):
        return np.asarray(e.value, array_type(e.dtype))

    def scalar(self, e: Scalar, mask):
        passed = {**self.run.numbers, **self.run.sizes}
        if e.argument not in passed:
            raise InternalError(f"the host passes no number '{e.argument}'")
        return np.asarray(passed[e.argument]).astype(array_type(e.dtype))

    def coord(self, e: Coord, mask):
        return self.indices((e.index,), mask)[0]

    def op(self, e: Op, mask):
        return np.asarray(MEANING[e.name](*(np.asarray(self(a, mask)) for a in e.args)))

    def cast(self, e: Cast, mask):
        return convert(self(e.arg, mask), e.dtype, e.arg.dtype)

    def random(self, e: Random, mask):
        counter = np.asarray(self(e.offset, mask)) + self.indices((e.index,), mask)[0]
        return self.run.random(e.kind, self(e.seed, mask), counter)

    # -- folds -------------------------------------------------------------------------------------------------------
    def _spread(self, e: Expr, mask, dims) -> np.ndarray:
        """`e` with the dimensions `dims` at their full extent."""
        value = np.asarray(self(e, mask))
        value = value.reshape((1,) * (len(self.dims) - value.ndim) + value.shape) if value.ndim < len(self.dims) else value
        shape = [self._extent(d) if d in dims else n for d, n in enumerate(value.shape)]
        return np.broadcast_to(value, shape)

    def _extent(self, dim: int) -> int:
        return self.cut[1] - self.cut[0] if self.cut is not None and dim == self.axis else self.extents[dim]

    def reduce(self, e: Reduce, mask):
        dims = tuple(self.dims[a] for a in e.over)
        args = [self._spread(a, mask, dims) for a in e.args]
        d = e.args[0].dtype
        if e.monoid in CARRIED:
            wide = [a.astype(fold_type(d)) for a in np.broadcast_arrays(*args)]
            return convert(CARRIED[e.monoid](*wide, dims)[e.component], e.dtype, F64)
        if len(args) == 2:
            return self._arg_reduce(e, args, dims)
        fold = PAIRWISE[e.monoid]
        start = ops.identity(e.monoid, d)
        found = fold.reduce(args[0].astype(fold_type(d)), axis=dims, keepdims=True, initial=start) if dims else args[0]
        return convert(found, e.dtype, F64) if d.is_float and dims else np.asarray(found).astype(array_type(d))

    def _arg_reduce(self, e: Reduce, args, dims):
        """(value, index) of the first extreme element in row-major order of the folded axes."""
        value, index = np.broadcast_arrays(*args)
        keep = [d for d in range(value.ndim) if d not in dims]
        shape = tuple(1 if d in dims else n for d, n in enumerate(value.shape))
        order = (*keep, *dims)
        lead = tuple(value.shape[d] for d in keep)
        value, index = (x.transpose(order).reshape(*lead, math.prod(x.shape[d] for d in dims)) for x in (value, index))
        if value.shape[-1] == 0:
            empty = ops.identity(e.monoid, e.args[0].dtype) if e.component == 0 else 0
            return np.full(shape, empty, array_type(e.dtype))
        spot = (np.argmax if e.monoid == "argmax" else np.argmin)(value, axis=-1)[..., None]
        return np.take_along_axis((value, index)[e.component], spot, -1).reshape(shape)

    def scan(self, e: Scan, mask):
        dim = self.dims[e.along]
        args = [np.asarray(self._spread(a, mask, (dim,))) for a in e.args]
        if e.reverse:
            args = [np.flip(a, dim) for a in args]
        if len(args) == 2:
            out = _arg_scan(e.monoid, *np.broadcast_arrays(*args), dim)[e.component]
        else:
            d = e.args[0].dtype
            out = PAIRWISE[e.monoid].accumulate(args[0].astype(fold_type(d)), axis=dim, dtype=fold_type(d))
            out = convert(out, d, F64) if d.is_float else out
        return np.flip(out, dim) if e.reverse else out


def _arg_scan(monoid: str, value: np.ndarray, index: np.ndarray, dim: int):
    value, index = np.moveaxis(value, dim, 0).copy(), np.moveaxis(index, dim, 0).copy()
    for i in range(1, value.shape[0]):
        better = value[i] > value[i - 1] if monoid == "argmax" else value[i] < value[i - 1]
        keep = ~better & ~(np.isnan(value[i]) & ~np.isnan(value[i - 1])) if value.dtype.kind == "f" else ~better
        value[i] = np.where(keep, value[i - 1], value[i])
        index[i] = np.where(keep, index[i - 1], index[i])
    return np.moveaxis(value, 0, dim), np.moveaxis(index, 0, dim)


_EVAL = {Load: _Grid.load, Const: _Grid.const, Scalar: _Grid.scalar, Coord: _Grid.coord, Op: _Grid.op, Cast: _Grid.cast, Reduce: _Grid.reduce,
         Scan: _Grid.scan, Random: _Grid.random}
