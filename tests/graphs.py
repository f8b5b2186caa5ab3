"""Random torch programs for property tests (hypothesis strategies).

    @given(programs())
    def test(program):
        program.fn(*program.inputs)       # tensors in, a tuple of tensors out
        print(program)                    # its source: a failing example is a few lines that run as they are

A program is straight-line source, drawn line by line and run eagerly while it is drawn, so that each line fits the shapes before it; lines that torch
refuses are left out. Views, elementwise operations, folds, scans, gathers and scatters over small shapes (extents 0 and 1, odd ones) in any layout
and type. Values that depend on rounding (after transcendental functions and floating sums) are never compared, floored, cast to integers or used as
indices: a last place would change the answer. `tolerance` says how close results must be.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
MOST = 3000              # elements of one value
LAYOUTS = ("contiguous", "contiguous", "permuted", "padded", "stepped", "expanded", "offset", "overlapping")


@dataclass(frozen=True)
class Given:
    """An input: values of `dtype` and `shape` in `layout`, drawn from `seed`; an index when `bound` is given; some NaN, inf, -0.0 when `special`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    seed: int
    bound: int | None = None
    special: bool = False

    def make(self) -> torch.Tensor:
        g = torch.Generator().manual_seed(self.seed)
        rank = len(self.shape)
        if self.layout == "permuted":
            order = torch.randperm(rank, generator=g).tolist()
            value = self._values([self.shape[d] for d in order], g)
            return value.permute([order.index(d) for d in range(rank)])
        if self.layout == "padded" and rank:
            return self._values([*self.shape[:-1], self.shape[-1] + 3], g)[..., 2:2 + self.shape[-1]]
        if self.layout == "stepped" and rank:
            return self._values([2 * self.shape[0], *self.shape[1:]], g)[::2]
        if self.layout == "expanded" and rank:
            d = self.seed % rank
            return self._values([1 if i == d else s for i, s in enumerate(self.shape)], g).expand(self.shape)
        if self.layout == "offset":
            return self._values([math.prod(self.shape) + 5], g)[5:].view(self.shape)
        if self.layout == "overlapping" and rank:
            return self._values([sum(self.shape) + 1], g).as_strided(self.shape, [1] * rank)
        return self._values(self.shape, g)

    def _values(self, shape, g) -> torch.Tensor:
        if self.bound is not None:
            return torch.randint(0, max(self.bound, 1), tuple(shape), generator=g)
        if self.dtype is torch.bool:
            return torch.rand(tuple(shape), generator=g) < 0.5
        if not self.dtype.is_floating_point:
            return torch.randint(0 if self.dtype is torch.uint8 else -9, 10, tuple(shape), generator=g).to(self.dtype)
        value = torch.randn(tuple(shape), generator=g, dtype=torch.float64).to(self.dtype)
        if self.special and value.numel():
            spots = torch.randint(0, value.numel(), (4,), generator=g)
            value.view(-1)[spots] = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=self.dtype)
        return value


@dataclass
class Program:
    """`fn(*inputs)` returns a tuple of tensors. `rough` says of each whether it depends on rounding, `scale` is the largest finite value met."""
    given: list[Given] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    rough: list[bool] = field(default_factory=list)
    after: list[bool] = field(default_factory=list)         # of each input, which lines may write
    scale: float = 1.0
    least: int = 0           # how few bits of mantissa a value on the way has had

    @property
    def source(self) -> str:
        args = ", ".join(f"x{i}" for i in range(len(self.given)))
        return "\n    ".join([f"def program({args}):", *self.lines, f"return ({', '.join(self.outputs)},)"])

    @property
    def fn(self):
        space: dict = {"torch": torch, "F": torch.nn.functional}
        exec(self.source, space)
        return space["program"]

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [g.make() for g in self.given]

    def __repr__(self) -> str:
        return "\n" + "\n".join([*(f"x{i} = {g}.make()" for i, g in enumerate(self.given)), self.source])

    def _repr_pretty_(self, printer, cycle) -> None:
        printer.text(repr(self))             # what hypothesis shows of a failing example

    def tolerance(self, i: int, like: torch.Tensor) -> dict:
        """rtol, atol for output `i`: none for exact ones; else a few roundings of the coarsest type met, at the largest magnitude met."""
        return self._bound(self.rough[i], like)

    def tolerance_after(self, i: int, like: torch.Tensor) -> dict:
        """The same for input `i` when the program has run."""
        return self._bound(self.after[i], like)

    def _bound(self, rough: bool, like: torch.Tensor) -> dict:
        if not rough or not like.dtype.is_floating_point:
            return {"rtol": 0, "atol": 0}
        eps = max(2.0**-self.least, torch.finfo(like.dtype).eps)
        return {"rtol": 32 * eps, "atol": 32 * eps * self.scale}


@dataclass
class _Value:
    name: str
    tensor: torch.Tensor
    rough: bool


class _Writer:
    """A program while it is drawn."""

    def __init__(self, draw, dtypes, special: bool):
        self.draw, self.dtypes, self.special = draw, dtypes, special
        self.program = Program(least=60)
        self.space: dict = {"torch": torch, "F": torch.nn.functional}
        self.values: list[_Value] = []

    # -- drawing -----------------------------------------------------------------------------------------------------
    def choose(self, options):
        return self.draw(st.sampled_from(list(options)))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def dim(self, t: torch.Tensor) -> int:
        return self.integer(-t.dim(), t.dim() - 1) if t.dim() else 0

    def value(self, test=lambda v: True) -> _Value | None:
        """One of the values so far, later ones more often."""
        fitting = [v for v in self.values if test(v)]
        return self.choose((fitting + fitting[-2:])[::-1]) if fitting else None

    def exact(self, kinds: str = "fib") -> _Value | None:
        return self.value(lambda v: not v.rough and _kind(v.tensor) in kinds)

    # -- writing -----------------------------------------------------------------------------------------------------
    def input(self, shape, dtype, bound: int | None = None, layout: str | None = None) -> _Value:
        layout = layout or self.choose(LAYOUTS)
        given = Given(tuple(shape), dtype, layout, self.integer(0, 99), bound, self.special)
        made = _Value(f"x{len(self.program.given)}", given.make(), False)
        self.program.given.append(given)
        self.space[made.name] = made.tensor
        if bound is None:
            self._keep(made)
        return made

    def line(self, text: str, *reads: _Value, rough: bool = False) -> None:
        """Adds `text` as a new value; nothing where torch refuses it or the result is too large."""
        try:
            found = eval(text, self.space)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return
        if not isinstance(found, torch.Tensor) or found.numel() > MOST or found.is_complex():
            return
        rough = (rough and found.dtype.is_floating_point) or any(r.rough for r in reads)
        made = _Value(f"v{len(self.program.lines)}", found, rough)
        self.space[made.name] = found
        self.program.lines.append(f"{made.name} = {text}")
        self._keep(made)

    def write(self, target: _Value, text: str, *reads: _Value) -> None:
        """Adds `text`, which changes `target`: what shares its memory may be as rough as `reads` from now on."""
        before = len(self.values)
        self.line(text, target, *reads)
        if len(self.values) > before:
            rough = self.values.pop().rough
            for v in [v for v in self.values if shared(v.tensor, target.tensor)]:
                v.rough |= rough
                self._measure(v)

    def _keep(self, v: _Value) -> None:
        self.values.append(v)
        self._measure(v)

    def _measure(self, v: _Value) -> None:
        if v.tensor.dtype.is_floating_point:
            self.program.least = min(self.program.least, {2: 7 if v.tensor.dtype is torch.bfloat16 else 10, 4: 23, 8: 52}[v.tensor.element_size()])
            finite = v.tensor.double()[v.tensor.isfinite()].abs()
            self.program.scale = max(self.program.scale, float(finite.max()) if finite.numel() else 0)


def _kind(t: torch.Tensor) -> str:
    return "b" if t.dtype is torch.bool else "f" if t.dtype.is_floating_point else "i"


# -- lines by family -------------------------------------------------------------------------------------------------
def _view(w: _Writer) -> None:
    v = w.value()
    t, n = v.tensor, v.name
    d, rank = w.dim(t), t.dim()
    size = t.shape[d] if rank else 1
    kind = w.choose("permute transpose unsqueeze squeeze reshape slice flip roll expand select contiguous chunk diagonal unfold as_strided".split())
    if kind == "permute":
        w.line(f"{n}.permute({w.draw(st.permutations(range(rank)))})", v)
    elif kind == "transpose":
        w.line(f"{n}.transpose({d}, {w.dim(t)})", v)
    elif kind == "unsqueeze":
        w.line(f"{n}.unsqueeze({d})", v)
    elif kind == "squeeze":
        w.line(f"{n}.squeeze()", v)
    elif kind == "reshape":
        w.line(f"{n}.reshape({_factors(w, t.numel())})", v)
    elif kind == "slice":
        low, high, step = w.integer(-size - 1, size), w.integer(-size - 1, size + 1), w.integer(1, 3)
        w.line(f"{n}.movedim({d}, 0)[{low}:{high}:{step}].movedim(0, {d})", v)
    elif kind in ("flip", "roll"):
        w.line(f"{n}.flip({d})" if kind == "flip" else f"{n}.roll({w.integer(-3, 3)}, {d})", v)
    elif kind == "expand":
        shape = [w.integer(1, 4) if s == 1 else s for s in t.shape]
        w.line(f"{n}.expand({[w.integer(1, 3)] if w.flag() else []} + {shape})", v)
    elif kind == "select":
        w.line(f"{n}.select({d}, {w.integer(-size, max(size - 1, -size))})", v)
    elif kind == "contiguous":
        w.line(f"{n}.contiguous()", v)
    elif kind == "chunk":
        w.line(f"{n}.chunk({w.integer(1, 3)}, {d})[-1]", v)
    elif kind == "diagonal":
        w.line(f"{n}.diagonal({w.integer(-1, 1)}, {d}, {w.dim(t)})", v)
    elif kind == "unfold":
        w.line(f"{n}.unfold({d}, {w.integer(1, 3)}, {w.integer(1, 2)})", v)
    else:
        w.line(f"{n}.contiguous().as_strided([{w.integer(0, 3)}, 2], [{w.integer(0, 2)}, 1], 1)" if t.numel() > 9 else f"{n}.clone()", v)


def _factors(w: _Writer, count: int) -> list[int]:
    shape = []
    while count > 1 and w.flag():
        f = w.choose([k for k in range(1, count + 1) if count % k == 0])
        shape.append(f)
        count //= f
    return [*shape, count]


def _join(w: _Writer) -> None:
    a = w.value()
    d = w.dim(a.tensor)
    kind = w.choose(("cat", "stack", "pad", "repeat", "tril"))
    b = w.value(lambda v: v.tensor.dtype is a.tensor.dtype and v.tensor.shape == a.tensor.shape) or a
    if kind in ("cat", "stack"):
        w.line(f"torch.{kind}([{a.name}, {b.name}, {a.name}], {d})", a, b)
    elif kind == "pad":
        widths = [w.integer(-1, 2) for _ in range(2 * w.integer(1, max(1, min(2, a.tensor.dim()))))]
        fill = "True" if _kind(a.tensor) == "b" else w.choose((0, 1))
        w.line(f"F.pad({a.name}, {widths}, value={fill})", a)
    elif kind == "repeat":
        w.line(f"{a.name}.repeat({[w.integer(1, 2) for _ in a.tensor.shape]})", a)
    else:
        w.line(f"torch.{w.choose(('tril', 'triu'))}({a.name}, {w.integer(-1, 1)})", a)


_EXACT_UNARY = ("-{0}", "{0}.abs()", "{0}.relu()", "{0}.clone()", "{0}.clamp(-1, 2)", "{0} * {0}", "{0} + 1", "{0} * 2", "{0}.clamp_min(0)",
                "3 - {0}")
_ROUGH_UNARY = ("{0}.sigmoid()", "{0}.tanh()", "{0}.sin()", "{0}.cos()", "{0}.clamp(-5, 3).exp()", "({0}.abs() + 1).log()", "F.gelu({0})",
                "F.silu({0})", "({0}.abs() + 0.5).rsqrt()", "1 / ({0}.abs() + 1)", "{0} / 3", "{0}.abs().sqrt()", "F.softplus({0})", "{0}.erf()",
                "({0} * 0.1).pow(3)")
_STEPPED = ("{0}.floor()", "{0}.round()", "{0}.sign()", "{0}.trunc()", "{0}.isnan()", "{0} > 0", "{0} == 1", "{0}.signbit()", "{0}.ceil()",
            "{0}.frac()")
_INTEGER = ("{0} // 3", "{0} % 4", "{0} & 6", "{0} | 1", "~{0}", "{0} ^ 5", "{0} << 1", "{0} >> 1", "torch.fmod({0}, 3)",
            "{0}.to(torch.float32) * 0.5", "-{0} // 2", "torch.div({0}, 2, rounding_mode='trunc')")
_BOOL = ("~{0}", "{0}.logical_not()", "{0}.to(torch.float32)", "{0}.to(torch.int64) + 1", "{0} & True")


def _pointwise(w: _Writer) -> None:
    v = w.value()
    kind = _kind(v.tensor)
    if kind == "b":
        return w.line(w.choose(_BOOL).format(v.name), v)
    if kind == "i":
        return w.line(w.choose(_INTEGER + _EXACT_UNARY).format(v.name), v)
    if not v.rough and w.flag():
        return w.line(w.choose(_STEPPED).format(v.name), v)
    rough = w.flag()
    return w.line(w.choose(_ROUGH_UNARY if rough else _EXACT_UNARY).format(v.name), v, rough=rough)


def _binary(w: _Writer) -> None:
    a = w.value()
    b = w.value(lambda v: _broadcasts(v.tensor, a.tensor))
    exact = not (a.rough or b.rough)
    ops = ["{0} + {1}", "{0} - {1}", "{0} * {1}", "torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.add({0}, {1}, alpha=2)"]
    ops += ["{0} < {1}", "{0} == {1}", "{0} >= {1}", "({0} != 0) & ({1} != 0)"] if exact else []
    text = w.choose(ops)
    w.line(text.format(a.name, b.name), a, b, rough=exact and ("alpha" in text))


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(x == y or x == 1 or y == 1 for x, y in zip(a.shape[::-1], b.shape[::-1]))


def _select(w: _Writer) -> None:
    c = w.exact("b") or w.exact("fi")
    condition = c.name if _kind(c.tensor) == "b" else f"({c.name} > 0)"
    a = w.value(lambda v: _broadcasts(v.tensor, c.tensor)) or c
    b = w.value(lambda v: _broadcasts(v.tensor, a.tensor) and _broadcasts(v.tensor, c.tensor)) or a
    if w.flag():
        w.line(f"torch.where({condition}, {a.name}, {b.name})", a, b, c)
    else:
        w.line(f"{a.name}.masked_fill({condition}, 1)", a, c)


def _cast(w: _Writer) -> None:
    to = w.choose(w.dtypes)
    v = w.value() if to.is_floating_point else w.exact("ib")
    if v is not None:
        w.line(f"{v.name}.to({to})", v)


_DISCRETE_FOLDS = ("amax", "amin", "argmax", "argmin", "any", "all", "count_nonzero")


def _fold(w: _Writer) -> None:
    v = w.value()
    dims = w.draw(st.lists(st.integers(0, max(v.tensor.dim() - 1, 0)), unique=True, min_size=1, max_size=3))
    keep = w.flag()
    kind = w.choose(("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "var", "logsumexp", "softmax", "std_mean", "norm",
                     "max"))
    if w.special and kind == "std_mean":        # eager's running mean makes NaN of inf where its sum does not
        kind = "mean"
    if v.rough and kind in ("argmax", "argmin", "any", "all", "max"):
        kind = "amax"
    n = v.name
    text = {"prod": f"{n}.prod({dims[0]}, {keep})", "softmax": f"{n}.softmax({dims[0]})", "std_mean": f"torch.var_mean({n}, {dims}, correction=0)[1]",
            "norm": f"torch.linalg.vector_norm({n}, 2, {dims}, {keep})", "max": f"{n}.max({dims[0]}, {keep})[{w.integer(0, 1)}]"}
    if kind in ("argmax", "argmin"):
        where = f"({dims[0]}, {keep})" if w.flag() else "()"
        return w.line(f"{n}.{kind}{where}", v)
    return w.line(text.get(kind, f"{n}.{kind}({dims}, keepdim={keep})"), v, rough=kind not in _DISCRETE_FOLDS)


def _scan(w: _Writer) -> None:
    v = w.value()
    d = w.dim(v.tensor)
    kind = w.choose(("cumsum", "cumprod", "cummax", "logcumsumexp"))
    if kind == "cummax":
        return w.line(f"{v.name}.{w.choose(('cummax', 'cummin'))}({d})[0]", v)
    return w.line(f"{v.name}.{kind}({d})", v, rough=True)


def _gather(w: _Writer) -> None:
    v = w.value(lambda v: v.tensor.dim() > 0)
    if v is None:
        return None
    d = w.dim(v.tensor)
    bound, n = v.tensor.shape[d], v.name
    if bound == 0:
        return None
    kind = w.choose(("gather", "index_select", "index", "embedding", "take_along_dim", "flat"))
    if kind in ("gather", "take_along_dim"):
        shape = [w.integer(0, 3) if i == d % v.tensor.dim() else s for i, s in enumerate(v.tensor.shape)]
        i = w.input(shape, torch.int64, bound)
        return w.line(f"{n}.gather({d}, {i.name})" if kind == "gather" else f"{n}.take_along_dim({i.name}, {d})", v)
    shape = [w.integer(0, 4)] if kind == "index_select" else [w.integer(0, 3)] * w.integer(1, 2)
    i = w.input(shape, torch.int64, v.tensor.shape[0] if kind == "embedding" else v.tensor.numel() if kind == "flat" else bound)
    return w.line({"index_select": f"{n}.index_select({d}, {i.name})", "index": f"{n}.movedim({d}, 0)[{i.name}]",
                   "embedding": f"F.embedding({i.name}, {n})", "flat": f"{n}.reshape(-1)[{i.name}]"}[kind], v)


def _scatter(w: _Writer) -> None:
    v = w.value(lambda v: v.tensor.dim() > 0 and v.tensor.numel() > 0)
    if v is None:
        return None
    d, t, n = w.dim(v.tensor), v.tensor, v.name
    kind = w.choose(("scatter_add", "scatter", "index_add", "index_put", "accumulate", "scatter_reduce", "select_scatter", "slice_scatter"))
    if kind in ("scatter_add", "scatter", "scatter_reduce"):
        i = w.input(t.shape, torch.int64, t.shape[d], "contiguous")
        more = {"scatter_add": f"{n}.clone()", "scatter": f"{n} + 1", "scatter_reduce": f"{n}, '{w.choose(('sum', 'amax', 'amin', 'prod'))}'"}[kind]
        if kind == "scatter":
            return w.line(f"{n}.scatter({d}, {i.name}, 1)", v)
        return w.line(f"{n}.{kind}({d}, {i.name}, {more})", v, rough=True)
    if kind == "select_scatter":
        return w.line(f"{n}.contiguous().select_scatter({n}.select({d}, 0) * 2, {d}, {t.shape[d] - 1})", v)
    if kind == "slice_scatter":
        return w.line(f"{n}.contiguous().slice_scatter({n}.narrow({d}, 0, 1) + 1, {d}, {t.shape[d] - 1}, {t.shape[d]})", v)
    i = w.input([t.shape[d] if kind == "index_add" else w.integer(0, 4)], torch.int64, t.shape[d] if kind == "index_add" else t.shape[0])
    if kind == "index_add":
        return w.line(f"{n}.index_add({d}, {i.name}, {n})", v, rough=True)
    return w.line(f"{n}.index_put(({i.name},), torch.ones((), dtype={n}.dtype), accumulate={kind == 'accumulate'})", v, rough=True)


def shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do the two lie in one memory?"""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _apart(t: torch.Tensor) -> bool:
    """Has every element a place of its own?"""
    at = torch.zeros((), dtype=torch.int64)
    for size, step in zip(t.shape, t.stride()):
        at = at[..., None] + torch.arange(size) * step
    return at.unique().numel() == t.numel()


_WRITES = ("{0}.add_(1)", "{0}.mul_(2)", "{0}.neg_()", "{0}.clamp_(-1, 2)", "{0}.relu_()", "{0}.abs_()", "{0}.fill_(1)", "{0}.zero_()",
           "{0}.square_()", "{0}.masked_fill_({0} > 0, 0)", "{0}.triu_()", "{0}.t_()", "{0}.unsqueeze_(0)")
_WRITES_OF_TWO = ("{0}.copy_({1})", "{0}.add_({1})", "{0}.sub_({1})", "{0}.mul_({1})", "{0}.copy_({1}.flip(0))", "{0}.copy_({1} + 1)")


def _write(w: _Writer) -> None:
    """Scalars are left out: torch 2.13 traces what is copied into one wrongly, and crashes in eager code that Dynamo has made."""
    a = w.value(lambda v: v.tensor.dim() > 0 and v.tensor.numel() > 0 and _apart(v.tensor))
    if a is None:
        return
    spot = a.name
    if w.flag():
        d = w.dim(a.tensor)
        spot = w.choose((f"{a.name}.narrow({d}, {a.tensor.shape[d] // 2}, {(a.tensor.shape[d] + 1) // 2})", f"{a.name}.movedim({d}, 0)[::2]",
                         f"{a.name}.unsqueeze({d})", f"{a.name}.detach()", *[f"{a.name}.select({d}, -1)"][:a.tensor.dim() - 1]))
    fits = lambda v: _kind(a.tensor) == "f" or _kind(v.tensor) == _kind(a.tensor) and not v.rough
    b = w.value(lambda v: _broadcasts(v.tensor, a.tensor) and fits(v))
    if b is None or w.flag():
        return w.write(a, w.choose(_WRITES).format(spot), a)
    other = f"{b.name}.clone()" if shared(a.tensor, b.tensor) else b.name
    w.write(a, w.choose(_WRITES_OF_TWO).format(spot, other), a, b)


FAMILIES = {"view": _view, "join": _join, "pointwise": _pointwise, "binary": _binary, "select": _select, "cast": _cast, "fold": _fold, "scan": _scan,
            "gather": _gather, "scatter": _scatter}
WRITES = {"write": _write}           # changes values that others may share, inputs among them
OFTEN = ("view", "view", "pointwise", "pointwise", "binary", "binary", "fold")


@st.composite
def programs(draw, families=tuple(FAMILIES), dtypes=DTYPES, lines: int = 8, special: bool | None = None, rank: int = 4) -> Program:
    """Programs of up to `lines` lines of `families` on inputs of `dtypes`; `special`: whether inputs hold NaN, inf and -0.0 (None: drawn)."""
    w = _Writer(draw, dtypes, draw(st.integers(0, 3)) == 0 if special is None else special)
    extents = st.sampled_from((0, 1, 1, 2, 3, 3, 4, 5, 7, 8))
    shape = draw(st.lists(extents, min_size=0, max_size=rank))
    w.input(shape, w.choose(dtypes))
    for _ in range(draw(st.integers(0, 2))):
        w.input([1 if draw(st.integers(0, 3)) == 0 else s for s in shape], w.choose(dtypes))
    chosen = [*families, *(f for f in OFTEN if f in families)]
    for _ in range(draw(st.integers(min(3, lines), lines))):
        (FAMILIES | WRITES)[w.choose(chosen)](w)
    shown = w.values[-draw(st.integers(1, 3)):]
    w.program.outputs = [v.name for v in shown]
    w.program.rough = [v.rough for v in shown]
    given = {v.name: v.rough for v in w.values}
    w.program.after = [given.get(f"x{i}", False) for i in range(len(w.program.given))]
    return w.program
