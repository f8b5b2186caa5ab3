"""The reference itself: where what it says does not follow from one operation alone."""
from __future__ import annotations

import math

import numpy as np
import pytest

from tokamak.errors import InternalError
from tokamak.ir import reference
from tokamak.ir.dtype import BF16, F32, I8, I64
from tokamak.ir.expr import Cast, Const, Coord, Load, Op, Random, Reduce, Scalar, Scan
from tokamak.ir.graph import Compute, Graph, Input, Opaque, Result, Scatter, View, Write
from tokamak.ir.index import Axis, Fetch, Size, as_index, row_major
from tokamak.ir.reference import evaluate


def tensor(name, *shape, dtype=F32):
    shape = tuple(map(as_index, shape))
    return Input(name, shape, row_major(shape), dtype)


def whole(node):
    return View(node, node.shape, node.strides, as_index(0))


def value(node, inputs=(), data=(), **more):
    """The value of one node."""
    return evaluate(Graph(tuple(inputs), (*inputs, node), (whole(node),)), list(data), **more).outputs[0]


X = tensor("x", 4)
I, J = Axis(0, 4), Axis(1, 3)
XI = Load(X, (I,))
IDS = tensor("ids", 4, dtype=I64)
PICK = as_index(Fetch(Load(IDS, (I,)), 4))


@pytest.mark.parametrize("bad", [4, -1])
def test_gather_out_of_range_raises(bad):
    node = Compute((4,), None, Load(X, (PICK,)))
    np.testing.assert_array_equal(value(node, (X, IDS), [np.arange(4.0), [3, 0, 0, 1]]), [3, 0, 0, 1])
    with pytest.raises(IndexError, match=f"index {bad} is out of range for a dimension of size 4"):
        value(node, (X, IDS), [np.arange(4.0), [3, bad, 0, 1]])


def test_a_guard_covers_the_gathers_inside():
    again = as_index(Fetch(Load(IDS, (PICK,)), 4))          # ids[ids[i]]
    node = Compute((4,), None, Load(X, (again,), Op("lt", Coord(as_index(I)), Const(2, I64)), Const(-5.0, F32)))
    np.testing.assert_array_equal(value(node, (X, IDS), [np.arange(4.0), [1, 0, 99, -7]]), [0, 1, -5, -5])
    with pytest.raises(IndexError):
        value(node, (X, IDS), [np.arange(4.0), [2, 0, 99, -7]])


def test_an_unguarded_load_outside_is_a_bug():
    with pytest.raises(InternalError, match="reads outside"):
        value(Compute((4,), None, Load(X, (as_index(I) + 1,))), (X,), [np.arange(4.0)])


def test_integer_division_by_zero_raises():
    node = Compute((4,), None, Op("floordiv", Const(1, I64), Load(IDS, (I,))))
    with pytest.raises(ZeroDivisionError):
        value(node, (IDS,), [[1, 2, 0, 3]])


@pytest.mark.parametrize("monoid, wanted", [("sum", 0), ("prod", 1), ("max", -math.inf), ("min", math.inf)])
def test_empty_folds_are_the_identity(monoid, wanted):
    empty = tensor("e", 0)
    node = Compute((2,), None, Reduce(monoid, (Axis(1, 0),), (Load(empty, (Axis(1, 0),)),)))
    np.testing.assert_array_equal(value(node, (empty,), [np.zeros(0)]), [wanted, wanted])


@pytest.mark.parametrize("data, largest, smallest", [([1, 3, 3, 0], 1, 3), ([1, math.nan, 3, math.nan], 1, 1), ([-0.0, 0.0, 0.0, 0.0], 0, 0)])
def test_argmax_takes_the_first_and_nan(data, largest, smallest):
    for monoid, wanted in (("argmax", largest), ("argmin", smallest)):
        args = (XI, Coord(as_index(I)))
        bound = Axis(7, 4)
        fold = Reduce(monoid, (bound,), (Load(X, (bound,)), Coord(as_index(bound))), 1)
        assert value(Compute((), None, fold), (X,), [data]) == wanted
        assert value(Compute((4,), None, Scan(monoid, I, args, 1)), (X,), [data])[-1] == wanted


def test_a_fold_counts_what_does_not_depend_on_its_axes():
    node = Compute((4,), None, Reduce("sum", (J,), (XI,)))
    np.testing.assert_array_equal(value(node, (X,), [np.arange(4.0)]), [0, 3, 6, 9])


def test_sums_are_exact_and_integers_wrap():
    n, wide, small = Axis(0, 3), tensor("w", 3), tensor("s", 3, dtype=I8)
    assert value(Compute((), None, Reduce("sum", (n,), (Load(wide, (n,)),))), (wide,), [[1e8, 1.0, -1e8]]) == 1.0
    assert value(Compute((), None, Reduce("sum", (n,), (Load(small, (n,)),))), (small,), [[100, 100, 0]]) == -56


def test_scan_reverse():
    node = Compute((4,), None, Scan("sum", I, (XI,), reverse=True))
    np.testing.assert_array_equal(value(node, (X,), [[1, 2, 3, 4]]), [10, 9, 7, 4])


def test_large_grids_are_cut(monkeypatch):
    monkeypatch.setattr(reference, "GRID_LIMIT", 10)
    x = tensor("x", 5, 6)
    r, c = Axis(0, 5), Axis(1, 6)
    data = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    np.testing.assert_array_equal(value(Compute((5, 6), None, Op("add", Load(x, (r, c)), Cast(F32, Coord(as_index(r) * 6)))), (x,), [data]),
                                  data + np.arange(5, dtype=np.float32)[:, None] * 6)
    np.testing.assert_array_equal(value(Compute((5,), None, Reduce("max", (c,), (Load(x, (r, c)),))), (x,), [data]), data.max(1))
    np.testing.assert_allclose(value(Compute((5, 6), None, Scan("sum", r, (Load(x, (r, c)),))), (x,), [data]), data.cumsum(0), rtol=1e-5)


def test_scatter_duplicates():
    index = (as_index(Fetch(Load(IDS, (I,)), 3)),)
    ids, data = [0, 2, 0, 2], [1.0, 2.0, 3.0, 4.0]

    def put(monoid, base=Const(10.0, F32), guard=None):
        return value(Scatter(base, (as_index(3),), (as_index(1),), (as_index(4),), index, XI, monoid, guard), (X, IDS), [data, ids])
    np.testing.assert_array_equal(put("last"), [3, 10, 4])
    np.testing.assert_array_equal(put("sum"), [14, 10, 16])
    np.testing.assert_array_equal(put("min"), [1, 10, 2])
    np.testing.assert_array_equal(put("last", guard=Op("lt", Coord(as_index(I)), Const(3, I64))), [3, 10, 2])


def test_views_show_memory():
    node = Compute((2, 3), (as_index(1), as_index(2)), Cast(F32, Coord(as_index(Axis(0, 2)) * 3 + Axis(1, 3))))       # column-major
    flat = View(node, (as_index(6),), (as_index(1),), as_index(0))
    windows = View(node, (as_index(3), as_index(2)), (as_index(1), as_index(2)), as_index(1))
    found = evaluate(Graph((), (node,), (whole(node), flat, windows)), []).outputs
    np.testing.assert_array_equal(found[0], [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(found[1], [0, 3, 1, 4, 2, 5])
    np.testing.assert_array_equal(found[2], [[3, 4], [1, 2], [4, 5]])
    assert found[0].strides == (4, 8)
    with pytest.raises(InternalError, match="a view shows"):
        evaluate(Graph((), (node,), (View(node, (as_index(7),), (as_index(1),), as_index(0)),)), [])


def test_sizes_and_numbers():
    s = Size("s0", 2)
    y = tensor("y", s)
    half = Compute((Size("h0"),), None, Op("mul", Load(y, (Axis(0, Size("h0")),)), Cast(F32, Scalar("alpha", F32))))
    graph = Graph((y, "alpha", "s1"), (y, half), (whole(half), as_index(s) * 2, Scalar("alpha", F32)), sizes={"s1": "s1", "h0": "s0 // 2 + s1 - s1"})
    found = evaluate(graph, [np.arange(7.0), 3.0, 4]).outputs
    np.testing.assert_array_equal(found[0], [0, 3, 6])
    assert found[1:] == [14, 3.0]
    with pytest.raises(InternalError, match="size s9 has no value"):
        value(Compute((Size("s9"),), None, Const(1.0, F32)))
    with pytest.raises(InternalError, match="has shape"):
        value(Compute((4,), None, XI), (X,), [np.zeros(5)])


def test_opaque_calls_writes_and_constants():
    const = tensor("k", 4)
    call = Opaque("twice", (whole(X), 2), {}, ((X.shape, X.strides, F32, "cpu"),), True, "", (X,))
    out = Result(call, 0, X.shape, X.strides, F32)
    total = Compute((4,), None, Op("add", Load(out, (I,)), Load(const, (I,))))
    graph = Graph((X,), (X, const, call, out, total), (whole(total),), (Write(X, whole(out)),))
    found = evaluate(graph, [np.ones(4)], constants={const: np.arange(4.0)}, opaque=lambda call, args, kwargs: (args[0] * args[1],))
    np.testing.assert_array_equal(found.outputs[0], [2, 3, 4, 5])
    np.testing.assert_array_equal(found.writes[X], [2, 2, 2, 2])
    with pytest.raises(InternalError, match="no function evaluates the opaque call twice"):
        evaluate(graph, [np.ones(4)], constants={const: np.arange(4.0)})
    with pytest.raises(InternalError, match="constant k has no value"):
        evaluate(graph, [np.ones(4)])


def test_random_numbers_can_be_given():
    node = Compute((4,), None, Random("uniform", Const(3, I64), Const(12, I64), as_index(I)))
    found = value(node)
    assert found.dtype == np.float32 and np.all((found >= 0) & (found < 1)) and len(set(found.tolist())) == 4
    shifted = Compute((4,), None, Random("uniform", Const(3, I64), Const(8, I64), as_index(I) + 4))
    np.testing.assert_array_equal(found, value(shifted))
    np.testing.assert_array_equal(value(node, random=lambda kind, seed, number: number.astype(np.float32)), [12, 13, 14, 15])


def test_16_bit_values_are_rounded():
    node = Compute((4,), None, Cast(BF16, Op("mul", XI, Const(1.01, F32))))
    found = value(node, (X,), [[1, 2, 3, 4]])
    assert found.dtype == np.float32 and np.all(found.view(np.uint32) & 0xFFFF == 0)
    assert value(Compute((), None, Reduce("all", (Axis(0, 4),), (Op("isnan", Load(X, (Axis(0, 4),))),))), (X,), [[math.nan] * 4]).dtype == bool


def test_carriers():
    """Moments and the sum of exponentials, of elements and of carriers that have been folded before."""
    data = np.array([3, 5, 100, -2, 7, 7], np.float32)
    every, x = Axis(0, 6), tensor("x", 6)
    zero, one = Const(0.0, F32), Const(1.0, F32)
    moments = [value(Compute((), None, Reduce("moments", (every,), (Load(x, (every,)), zero, one), n)), (x,), [data]) for n in range(3)]
    np.testing.assert_allclose(moments, [data.sum(), data.var() * 6, 6], rtol=1e-6)
    parts = np.array([[data[:2].sum(), data[:2].var() * 2, 2], [data[2:].sum(), data[2:].var() * 4, 4], [0, 0, 0]], np.float32)
    half, p = Axis(0, 3), tensor("p", 3, 3)
    args = tuple(Load(p, (half, as_index(n))) for n in range(3))
    again = [value(Compute((), None, Reduce("moments", (half,), args, n)), (p,), [parts]) for n in range(3)]
    np.testing.assert_allclose(again, moments, rtol=1e-6)
    for row, wanted in (([1, 2, 3], (3, 1 + math.exp(-1) + math.exp(-2))), ([-math.inf] * 3, (-math.inf, 0)),
                        ([math.inf, 0, math.inf], (math.inf, 2))):
        r, y = Axis(0, 3), tensor("y", 3)
        found = [value(Compute((), None, Reduce("expsum", (r,), (Load(y, (r,)), one), n)), (y,), [np.array(row, np.float32)]) for n in range(2)]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    with pytest.raises(TypeError, match="floating numbers of one type"):
        Reduce("expsum", (every,), (Coord(as_index(every)), Const(1, I64)))
    with pytest.raises(TypeError, match="'moments' carries None"):
        Scan("moments", every, (Load(x, (every,)), zero, one))
