"""Size classes: kernels of symbolic sizes for GPUs are right for every size of their class, and a call of another class gets its own."""
from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import tokamak
from tokamak import backend
from tokamak.fuse import sizes
from tokamak.fuse.sizes import SizeClass, aligned, classified, column, condition, divisor, octave, row, span
from tokamak.ir.index import FloorDiv, Max, Min, Mod, Size, as_index
from tokamak.ir.substitution import evaluate
from tokamak.ir.parse import parse_graph
from tokamak.options import Options
from tokamak.runtime import classes as runtime_classes
from tokamak.target import target
from tokamak.tools.record import recording

POWERS = [2**k + d for k in range(24) for d in (-1, 0, 1)]
NUMBERS = st.one_of(st.integers(0, 70), st.integers(0, 5000), st.integers(0, 2**24), st.sampled_from(POWERS))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def members(c: SizeClass) -> list[int]:
    """Sizes of the class: its ends and some between them."""
    high = c.high if c.high is not None else 4 * c.low
    return [n for n in sorted({*range(c.low, min(c.low + 33, high + 1)), (c.low + high) // 2, *range(max(high - 33, c.low), high + 1)}) if n in c]


# -- the classes -----------------------------------------------------------------------------------------------------------
@settings(max_examples=300, deadline=None)
@given(NUMBERS, st.sampled_from([octave, row, column]), st.sampled_from([(), sizes.TILES, sizes.WORDS]))
def test_every_size_is_in_one_class(n, kind, words):
    one = lambda n: aligned(kind(n), n, words) if words else kind(n)
    c = one(n)
    assert n in c and n in members(SizeClass(n, n))
    assert all(one(m) == c for m in members(c))
    for m in (n, n - 1, n + 1, 2 * n, c.low - 1, n + 16):
        assert m < 0 or bool(eval(c.text("n"), {"n": m})) == (m in c)


def test_classes_of_rows_are_few_and_close():
    found = {row(n) for n in range(1025, 2049)}
    assert len(found) == 24 and all(c.high * 8 <= (c.low - 1) * 9 for c in found)
    assert len({row(n) for n in range(2, 2049)}) < 72
    assert row(1024) == SizeClass(1024, 1024) and row(1025).high == 1031 and row(1032).high == 1151 and octave(5 << 20).high is None


SIZES = (as_index(Size("a")), as_index(Size("b", 2)), as_index(Size("free", 1)))


@st.composite
def indices(draw, depth: int = 3):
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from((*SIZES, as_index(draw(st.integers(0, 40))))))
    a, b = draw(indices(depth - 1)), draw(indices(depth - 1))
    kind = draw(st.sampled_from(["+", "-", "*", FloorDiv, Mod, Min, Max]))
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b}[kind]() if isinstance(kind, str) else as_index(kind(a, b + 1))


@settings(max_examples=400, deadline=None)
@given(indices(), NUMBERS, st.integers(2, 300), st.integers(1, 99))
def test_what_is_said_of_an_index_holds_for_all_sizes_of_a_class(i, a, b, free):
    found = {"a": aligned(row(a), a, sizes.WORDS), "b": aligned(octave(b), b, sizes.TILES)}
    (low, high), by = span(i, found), divisor(i, found)
    for x in members(found["a"])[::7]:
        for y in members(found["b"])[::7]:
            try:
                value = int(evaluate(i, {Size("a"): x, Size("b", 2): y, Size("free", 1): free}))
            except ZeroDivisionError:
                continue
            assert value % by == 0 if by else value == 0
            if value >= 0:          # extents are never negative
                assert low <= value and (high is None or value <= high)


# -- programs, without torch's own ideas of sizes ----------------------------------------------------------------------------
SOFTMAX = """graph softmax {
  number $rows
  number $columns
  input %x: f32[r, c](c, 1)
  size r = "rows"
  size c = "columns"
  hint r = HINT0
  hint c = HINT1
  %top: f32[r](1) for i2<c = max[i2](%x[i0, i2])
  %total: f32[r](1) for i2<c = sum[i2](exp(sub(%x[i0, i2], %top[i0])))
  %y: f32[r, c](c, 1) = div(exp(sub(%x[i0, i1], %top[i0])), %total[i0])
  return %y
}"""


class Compiled:
    """A graph given as text, and which programs were made of it."""

    def __init__(self, text: str, *hints: int, options: Options | None = None, machine=None):
        for n, hint in enumerate(hints):
            text = text.replace(f"HINT{n}", str(hint))
        self.graph, self.machine, self.made = parse_graph(text), machine or target("cpu", interpret=True), []
        rest = partial(backend._kernels_and_program, self.graph, {}, self.machine, options or Options(cache_dir="", strict=True))
        self.fn = backend.by_class(self.graph, self.machine, rest, self.trace, "graph", lambda work: work(self.trace, "graph"), False)

    def trace(self, stage, value):
        if stage == "lower":
            self.made.append(value)
        return value

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn([*x.shape, x])[0]


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 5, 17, 64, 65, 100, 200, 300, 1000, 1024, 1025, 1032])
def test_a_kernel_is_right_for_every_size_of_its_class(columns):
    found = classified(parse_graph(SOFTMAX.replace("HINT0", "5").replace("HINT1", str(columns))), target("cpu", interpret=True)).classes
    sample = members(found["c"])
    softmax = Compiled(SOFTMAX, 5, columns)
    for c in dict.fromkeys((*sample[:2], sample[len(sample) // 2], *sample[-2:])):
        for r in {found["r"].low, found["r"].high}:
            x = torch.randn(r, c)
            torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    assert len(softmax.made) == 1


def test_a_row_of_symbolic_length_is_held():
    schedule = lambda *hints: Compiled(SOFTMAX, *hints).made[0].bodies.values()
    for columns, tile in ((1024, "i1:1024)"), (1000, "i1:512+512?"), (4096, "i1:4096)"), (1025, "shifted(i1 % 4)")):
        (_, s), = schedule(64, columns)
        assert tile in str(s) and not s.looped
    (_, s), = schedule(64, 400000)
    assert s.looped


def test_sizes_of_another_class_get_their_own_program_and_earlier_ones_are_kept():
    softmax = Compiled(SOFTMAX, 5, 100)
    for columns, count in ((100, 1), (99, 2), (101, 2), (300, 3), (100, 3), (301, 4), (300, 4), (1, 5), (0, 6), (100, 6), (1, 6)):
        x = torch.randn(6, columns)
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
        assert len(softmax.made) == count, columns


def test_after_many_classes_one_program_is_for_all(monkeypatch):
    monkeypatch.setattr(runtime_classes, "MOST", 3)
    softmax = Compiled(SOFTMAX, 5, 100)
    for columns in (100, 99, 300, 40, 41, 2000, 7, 0):
        x = torch.randn(6, columns)
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
    assert len(softmax.made) == 4 and not softmax.made[-1].plan.graph.classes


def test_ordered_targets_and_cpus_have_no_classes():
    graph = parse_graph(SOFTMAX.replace("HINT0", "5").replace("HINT1", "100"))
    for machine in (target("cpu"), target("cpu", ordered=True, interpret=True)):
        assert not classified(graph, machine).classes and condition(classified(graph, machine)) == ""


# -- through torch ---------------------------------------------------------------------------------------------------------
def interpreted(fn, **options):
    return tokamak.compile(fn, dynamic=True, target="interpret", strict=True, cache_dir="", **options)


PROGRAMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sums": lambda x: (x.sum(0), x.sum(-1), x.sum()),
    "gelu": lambda x: F.gelu(x * 2 + x.sum(0)),
    "scan": lambda x: x.cumsum(-1),
    "argmax": lambda x: (x.argmax(-1), x.amax(-1)),
    "windows": lambda x: F.pad(x, (1, 2))[:, 2:] + x.flip(-1).roll(3, -1).sum(-1, keepdim=True)[:, :1],
    "middle": lambda x: x.reshape(2, -1, x.shape[-1]).sum(1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_at_many_sizes(name):
    fn = PROGRAMS[name]
    mine = interpreted(fn)
    for shape in ((20, 97), (18, 257), (64, 128), (2, 3), (6, 1029), (4, 5000)):
        x = torch.randn(shape, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        got, want = mine(x), fn(y)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
        (mine_first, *_), (first, *_) = (out if isinstance(out, tuple) else (out,) for out in (got, want))
        if first.requires_grad:
            along = torch.randn(first.shape)
            (g,), (w,) = torch.autograd.grad(mine_first, x, along), torch.autograd.grad(first, y, along)
            torch.testing.assert_close(g / w.abs().max(), w / w.abs().max(), rtol=1e-3, atol=1e-5)


def test_sizes_of_one_class_share_kernels_across_captures():
    def keys(shape):
        torch._dynamo.reset()
        with recording(cache_dir="", strict=True, target="interpret") as recorder:
            x = torch.randn(shape, requires_grad=True)
            tokamak.compile(lambda x: torch.softmax(x, -1) * 2, dynamic=True)(x).sum().backward()
        return {p.unit.name for g in recorder.graphs for b in g.values["render"].values() for p in b.parts}
    first = keys((40, 1000))
    assert keys((50, 1000)) == keys((60, 1016)) == first
    assert not keys((61, 1021)) & first


@pytest.mark.parametrize("columns", [16384, 16385])
def test_long_rows(columns):
    fn, x = lambda x: torch.softmax(x, -1), torch.randn(40, columns, dtype=torch.bfloat16)         # fewer are shared, where their number is known
    found = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        with recording(cache_dir="", strict=True, target="interpret") as recorder:
            got = tokamak.compile(fn, dynamic=dynamic)(x)
        torch.testing.assert_close(got.float(), torch.softmax(x.float(), -1), rtol=2e-2, atol=1e-4)
        found.append([str(p.kernel.schedule) for b in recorder.graphs[0].values["render"].values() for p in b.parts])
    assert columns % 2 or found[0] == found[1]         # the end of a class is a size like a constant one


def test_what_is_compiled_for_another_class_is_explained_too():
    found = tokamak.explain(lambda x: torch.softmax(x, -1), torch.randn(6, 100), also=[(torch.randn(7, 300),), (torch.randn(7, 1100),)])
    assert len(found.graphs) == 2 and str(found)
    with tokamak.scope(target="interpret"):
        found = tokamak.explain(lambda x: torch.softmax(x, -1), torch.randn(6, 100), also=[(torch.randn(7, 300),), (torch.randn(7, 1100),)])
    assert len(found.graphs) == 3 and len(found.frames) == 2 and str(found)
    assert len({k.schedule for k in found.kernels}) == 3 and all(g.seconds["lower"] for g in found.graphs)


def test_checked_calls_of_several_classes():
    mine = interpreted(lambda x: torch.softmax(x, -1), check=True)
    for columns in (100, 101, 300, 100):
        x = torch.randn(6, columns)
        torch.testing.assert_close(mine(x), torch.softmax(x, -1))


def test_a_class_that_does_not_compile_runs_through_torch(monkeypatch):
    mine = tokamak.compile(lambda x: torch.softmax(x, -1), dynamic=True, target="interpret", cache_dir="")
    torch.testing.assert_close(mine(x := torch.randn(6, 100)), torch.softmax(x, -1))

    def fails(*_):
        raise RuntimeError("a bug")
    monkeypatch.setattr(backend, "schedule_plan", fails)
    x = torch.randn(6, 300)
    with pytest.warns(UserWarning, match="a bug"):
        torch.testing.assert_close(mine(x), torch.softmax(x, -1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(mine(x), torch.softmax(x, -1))
        torch.testing.assert_close(mine(x := torch.randn(6, 100)), torch.softmax(x, -1))
