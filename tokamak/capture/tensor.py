"""What a captured value is while a graph is being read: a shape and the expression of one element.

    Tensor(shape, expr)      expr over Axis(0, shape[0]) ... Axis(n - 1, shape[n - 1])

A view is a Tensor whose expression is an unguarded Load with changed indices: it costs nothing and is no node. Arithmetic on Tensors only builds
expressions; `Builder.realize` (see `builder`) makes a node of one, and every fold is realized at once. The operator tables (`aten_*`) are written
with these.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

from ..errors import InternalError
from ..ir import dtype as dt
from ..ir.dtype import DType
from ..ir.expr import Cast, Const, Coord, Expr, Load, Rewriter
from ..ir.graph import Compute, Scatter, View
from ..ir.index import Axis, Index, as_index, axis
from ..ir.normal import divide_exact, floordiv, mod, recombine


@dataclass(frozen=True, eq=False)
class Tensor:
    """A lazy tensor. `device` is torch's name of the device; `number` marks a wrapped Python number (it promotes as one)."""
    shape: tuple[Index, ...]
    expr: Expr
    device: str = "cpu"

    @property
    def dtype(self) -> DType:
        return self.expr.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def axes(self) -> tuple[Index, ...]:
        """The coordinates of this tensor as indices (0 along extents of 1)."""
        return tuple(axis(i, s) for i, s in enumerate(self.shape))

    def at(self, index: Sequence[Index | int]) -> Expr:
        """The element at `index` (one Index a dimension, over whatever axes the caller uses)."""
        if len(index) != self.rank:
            raise TypeError(f"{self.rank}-dimensional value indexed with {len(index)} indices")
        mapping = {Axis(i, s): as_index(x) for i, (s, x) in enumerate(zip(self.shape, index)) if s != 1}
        return Rewriter(mapping)(self.expr)

    def view(self, shape: Sequence[Index | int], index: Callable[[tuple[Index, ...]], Sequence[Index | int]]) -> "Tensor":
        """The tensor of `shape` whose element at coords is this one's at `index(coords)`."""
        shape = tuple(as_index(s) for s in shape)
        coords = tuple(axis(i, s) for i, s in enumerate(shape))
        return Tensor(shape, self.at(index(coords)), self.device)

    def with_expr(self, expr: Expr) -> "Tensor":
        return Tensor(self.shape, expr, self.device)

    def cast(self, to: DType, implicit: bool = False) -> "Tensor":
        return self.with_expr(cast(self.expr, to, implicit))

    # the views that every table uses
    def expand(self, shape: Sequence[Index | int]) -> "Tensor":
        """Broadcast to `shape` (-1 keeps an extent), new dimensions in front."""
        lead = len(shape) - self.rank
        full = [s if not (isinstance(s, int) and s == -1) else self.shape[i - lead] for i, s in enumerate(shape)]
        return self.view(full, lambda c: [0 if self.shape[i] == 1 else c[i + lead] for i in range(self.rank)])

    def permute(self, dims: Sequence[int]) -> "Tensor":
        dims = [d % self.rank for d in dims]
        back = [dims.index(i) for i in range(self.rank)]
        return self.view([self.shape[d] for d in dims], lambda c: [c[back[i]] for i in range(self.rank)])

    def unsqueeze(self, dim: int) -> "Tensor":
        dim = dim % (self.rank + 1)
        return self.view([*self.shape[:dim], 1, *self.shape[dim:]], lambda c: [*c[:dim], *c[dim + 1:]])

    def squeeze(self, dims: Sequence[int]) -> "Tensor":
        gone = {d % self.rank for d in dims if self.shape[d % self.rank] == 1} if self.rank else set()
        keep = [i for i in range(self.rank) if i not in gone]
        return self.view([self.shape[i] for i in keep], lambda c: [c[keep.index(i)] if i in keep else 0 for i in range(self.rank)])

    def reshape(self, shape: Sequence[Index | int]) -> "Tensor":
        """Row-major reshape; `shape` has no -1."""
        shape = tuple(as_index(s) for s in shape)
        if any(s == 0 for s in self.shape):
            empty = next(i for i, s in enumerate(shape) if s == 0)     # nothing to divide by; a coordinate without values keeps every load inside
            return self.view(shape, lambda c: [c[empty] if s == 0 else 0 for s in self.shape])
        return self.view(shape, lambda c: reshape_index(shape, c, self.shape))


def reshape_index(new: Sequence[Index], coords: Sequence[Index], old: Sequence[Index]) -> list[Index]:
    """Where element `coords` of a row-major reshape to `new` lies in the `old` shape: dimensions are matched in runs of equal product, so that
    untouched dimensions keep plain coordinates."""
    out: list[Index] = []
    i = j = 0
    while i < len(old) or j < len(new):
        pi = as_index(old[i]) if i < len(old) else as_index(1)
        pj = as_index(new[j]) if j < len(new) else as_index(1)
        a, b = i + 1, j + 1
        while pi is not pj and (a < len(old) or b < len(new)):
            if a < len(old) and (b >= len(new) or _smaller(pi, pj)):
                pi, a = pi * old[a], a + 1
            else:
                pj, b = pj * new[b], b + 1
        if pi is not pj and pi.constant is not None and pj.constant is not None:
            raise InternalError(f"a reshape of {old} to {new}")
        flat = as_index(0)
        for k in range(j, min(b, len(new))):
            flat = flat * new[k] + coords[k]
        run = list(range(i, min(a, len(old))))
        if len(run) == 1:
            out.append(flat)
        else:
            digits = []
            for k in reversed(run):
                digits.append(mod(flat, old[k]) if k != run[0] else flat)
                flat = floordiv(flat, old[k]) if k != run[0] else flat
            out.extend(reversed(digits))
        i, j = a, b
    return out[:len(old)]


def _smaller(a: Index, b: Index) -> bool:
    if a.constant is not None and b.constant is not None:
        return a.constant < b.constant
    return divide_exact(b, a) is not None


# -- expressions ---------------------------------------------------------------------------------------------------
def cast(e: Expr, to: DType, implicit: bool = False) -> Expr:
    if isinstance(e, Const) and to.kind != "x":
        folded = _cast_const(e, to)
        if folded is not None:
            return folded
    return Cast(to, e, implicit)


def _cast_const(e: Const, to: DType) -> Const | None:
    if to.is_float and e.dtype.is_int and abs(e.value) > 2**24:
        return None
    if e.dtype.is_float and to.is_int and not (e.value == e.value and abs(e.value) < 2**31):
        return None
    if e.dtype.is_float and to.is_int and to.kind == "u" and e.value < 0:
        return None
    return Const(int(e.value) if to.is_int else e.value, to)


def compute(e: Expr) -> Expr:
    """`e` in the type arithmetic on it is carried in (f32 for the 16-bit floats)."""
    return cast(e, dt.compute_type(e.dtype))


def size_value(index: Index | int, to: DType) -> Expr:
    """A size (an integer known on the host) as a number of type `to`. Not a Const: kernels take it as an argument, so other sizes build no kernel."""
    return Cast(to, Coord(as_index(index)))


def constant(value, d: DType) -> Expr:
    """A number of the program as an expression of type `d`; a Scalar or size expression is cast."""
    if isinstance(value, Expr):
        return cast(value, d)
    if isinstance(value, Index):
        return size_value(value, d)
    return Const(value, d)


def broadcast_shapes(*shapes: Sequence[Index]) -> tuple[Index, ...]:
    rank = max((len(s) for s in shapes), default=0)
    out = []
    for i in range(rank):
        extent = as_index(1)
        for s in shapes:
            k = i - (rank - len(s))
            if k >= 0 and s[k] != 1:
                extent = s[k]
        out.append(extent)
    return tuple(out)


def broadcast(*tensors: Tensor) -> tuple[tuple[Index, ...], list[Expr]]:
    """The common shape and each tensor's expression over its coordinates."""
    shape = broadcast_shapes(*(t.shape for t in tensors))
    return shape, [t.expand(shape).expr if t.shape != shape else t.expr for t in tensors]


def strided(t: Tensor) -> View | None:
    """`t` as a strided window on one node's memory, or None when it is computed, guarded, gathered or not affine."""
    e = t.expr
    if not isinstance(e, Load) or e.guard is not None:
        return None
    known = e.windows()
    if t.shape not in known:
        known[t.shape] = _window(e, t)
    return known[t.shape]


def _window(e: Load, t: Tensor) -> View | None:
    flat = recombine(e.offset())
    if all([not k or len(k) == 1 and isinstance(k[0], Axis) and k[0].id < t.rank for k in flat.terms]):
        strides = tuple([as_index(flat.terms.get((Axis(i, s),), 0)) for i, s in enumerate(t.shape)])
        found = sum([c.constant != 0 for c in strides]) + (() in flat.terms)
        if found == len(flat.terms):        # a sum of constants times the tensor's own axes
            return View(e.node, t.shape, strides, as_index(flat.terms.get((), 0)))
    strides = []
    for i, s in enumerate(t.shape):
        a = Axis(i, s)
        c = as_index(0) if s == 1 else flat.coefficient(a)
        if s != 1:
            if c.axes():
                return None
            flat = flat.without(a)
        strides.append(c)
    if flat.axes() or any(type(a).__name__ == "Fetch" for a in flat.atoms()):
        return None
    return View(e.node, t.shape, tuple(strides), flat)


def overlapping(shape: Sequence[Index], strides: Sequence[Index]) -> bool:
    """May two elements lie at one place? Seen of constant extents and strides alone, and of interleaved ones it is said, too."""
    reach = 0
    known = [(t.constant, s.constant) for s, t in zip(shape, strides) if s.constant is not None and t.constant is not None]
    for stride, extent in sorted(x for x in known if x[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def relaid(t: Tensor, traced: tuple, device: str) -> Tensor | None:
    """`t`, a view that shows each element of a fresh node once along plain coordinates, with that node laid out so that `t` has the strides
    `traced`; or None."""
    load = t.expr
    node = load.node
    strides = []
    for extent, i in zip(node.shape, load.index):
        atoms = i.atoms()
        if extent == 1 and i == 0:
            strides.append(as_index(1))
        elif len(atoms) == 1 and i is as_index(atoms[0]) and isinstance(atoms[0], Axis) and atoms[0].extent is extent:
            strides.append(traced[atoms[0].id])
        else:
            return None
    if len({a for i in load.index for a in i.atoms()}) != sum(1 for s in t.shape if s != 1):
        return None
    if isinstance(node, Compute):
        node = Compute(node.shape, strides, node.expr, device, node.tag)
    elif isinstance(node, Scatter):
        node = Scatter(node.base, node.shape, tuple(strides), node.domain, node.index, node.value, node.monoid, node.guard, node.device)
    else:
        return None
    return Tensor(t.shape, Load(node, load.index), device)


def laid_out(view: View, traced: tuple) -> bool:
    """Are the strides of `view` those `traced`, where there is more than one element?"""
    return all(n == 1 or p is q for n, p, q in zip(view.shape, view.strides, traced))
