"""Gathers, scatters, pooling, windows and resampling: every graph that AOTAutograd captures is evaluated by the reference and compared with eager in
dtype, shape, strides and values, forward and backward, over torch's operator database (a few of its samples)."""
import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.capture.through_reference import drawn, of_tensors
from tokamak.capture import aten_scatter, tables  # noqa: F401  (fills the table)
from tokamak.capture.dtypes import TORCH_DTYPES
from tokamak.capture.fx import Capture
from tokamak.ir.expr import Reduce, loads, walk
from tokamak.ir.graph import Compute, Opaque, Scatter, View
from tokamak.ir.reference import evaluate

TOLERANCE = {torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 2e-3), torch.float32: (2e-5, 1e-5), torch.float64: (1e-9, 1e-9)}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
SAMPLES = 3
MASKS = (torch.bool, torch.uint8)       # as an index: the result's size depends on data
NAMES = """gather index_select take take_along_dim __getitem__ nn.functional.embedding scatter scatter_add scatter_reduce.sum scatter_reduce.prod
scatter_reduce.mean scatter_reduce.amax scatter_reduce.amin index_put index_add index_copy index_fill index_reduce.prod index_reduce.mean
index_reduce.amax index_reduce.amin put nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.avg_pool1d
nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d
nn.functional.adaptive_avg_pool3d
nn.functional.adaptive_max_pool1d nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d nn.functional.unfold nn.functional.fold
nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.max_unpool1d nn.functional.max_unpool3d nn.functional.interpolate.nearest
nn.functional.interpolate.nearest-exact nn.functional.interpolate.bilinear""".split()


def array(t):
    """A tensor as the reference wants it (bf16 as float32); other values themselves."""
    if not isinstance(t, torch.Tensor):
        return t
    return (t.detach().float() if t.dtype is torch.bfloat16 else t.detach()).numpy().copy()


def torch_call(call, args, kwargs):
    """An opaque call of the reference, made by torch."""
    def back(given, value):
        if isinstance(given, View):
            return torch.as_tensor(np.array(value)).to(TORCH_DTYPES[given.node.dtype])
        if isinstance(given, (tuple, list)):
            return type(given)(back(g, v) for g, v in zip(given, value))
        return {k: back(given[k], value[k]) for k in given} if isinstance(given, dict) else value
    made = call.target(*back(call.args, args), **back(call.kwargs, kwargs))
    return tuple(array(m) if isinstance(m, torch.Tensor) else None for m in (made if isinstance(made, (tuple, list)) else (made,)))


def compare(capture, graph, args, expected):
    got = evaluate(graph, [array(a) for a in args], constants={k: array(v) for k, v in capture.constants.items()}, opaque=torch_call)
    for view, value, want in zip(graph.outputs, got.outputs, expected):
        if not isinstance(want, torch.Tensor):
            continue
        assert isinstance(view, View) and TORCH_DTYPES[view.node.dtype] is want.dtype and value.shape == tuple(want.shape)
        strides = [s.constant for s in view.strides]
        if want.numel() and None not in strides:
            assert all(a == b for a, b, n in zip(strides, want.stride(), want.shape) if n != 1), (strides, want.stride())
        rtol, atol = TOLERANCE.get(want.dtype, (0, 0))
        found = torch.from_numpy(np.ascontiguousarray(value)).reshape(want.shape).to(want.dtype)
        torch.testing.assert_close(found, want, rtol=rtol, atol=atol, equal_nan=True)


def check(fn, *args, dynamic=False):
    """Runs `fn(*args)` and its backward through AOTAutograd; every captured graph is compared with eager. Returns the graphs."""
    graphs = []

    def compiler(gm, _example):
        capture = Capture(gm)
        graph = capture.graph()
        graphs.append(graph)

        @make_boxed_func
        def run(*given):
            expected = gm(*given)
            compare(capture, graph, given, expected)
            return expected
        return run
    torch.manual_seed(0)
    out = aot_function(fn, fw_compiler=compiler, bw_compiler=compiler, dynamic=dynamic)(*args)
    outs = [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
    if outs:
        torch.autograd.grad(outs, [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor) and a.requires_grad],
                            [torch.rand_like(o) for o in outs], allow_unused=True)
    return graphs


def kinds(graphs, kind):
    return [n for g in graphs for n in g.nodes if isinstance(n, kind)]


def database():
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if name in NAMES:
            yield from (pytest.param(op, d, id=f"{name}-{str(d)[6:]}") for d in DTYPES if d in op.supported_dtypes("cpu"))


@pytest.mark.parametrize("op, dtype", database())
def test_database(op, dtype):
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = drawn(op, dtype, grad)
    samples = [s for s in samples if not any(isinstance(x, torch.Tensor) and x.dtype in MASKS for x in pytree.tree_leaves(s.args))]
    for s in samples[::max(1, len(samples) // SAMPLES)][:SAMPLES]:
        try:
            fn, tensors = of_tensors(op.op, s)
            check(fn, *tensors)
        except (DynamicOutputShapeException, DataDependentOutputException):
            pass        # torch itself cannot trace it: a size that depends on data


LONG = functools.partial(torch.tensor, dtype=torch.int64)
OUT_OF_RANGE = {
    "gather": lambda x, i: x.gather(0, i.expand(1, 4)),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_select of one row": lambda x, i: x[:1].index_select(0, i),
    "index_select of an expanded row": lambda x, i: x[0].expand(5, 4).index_select(0, i),
    "index": lambda x, i: x[i],
    "index of a computed tensor": lambda x, i: (x * 2)[:, i],
    "embedding": lambda x, i: F.embedding(i, x),
    "take": lambda x, i: x.take(i),
    "scatter": lambda x, i: x.scatter(0, i.expand(1, 4), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i.expand(1, 4), x),
    "scatter_add into zeros": lambda x, i: torch.zeros_like(x).scatter_add(0, i.expand(1, 4), x),
    "index_add": lambda x, i: x.index_add(0, i, x[:1]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:1]),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_put": lambda x, i: x.index_put((i,), x[0], accumulate=True),
    "put": lambda x, i: x.put(i, x[0, :1]),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
@pytest.mark.parametrize("position", [99, -99])
def test_out_of_range_raises(name, position):
    x, i = torch.randn(3, 4), LONG([position])
    graphs = []

    def compiler(gm, _example):
        graphs.append(Capture(gm).graph())
        return make_boxed_func(gm.forward)
    with pytest.raises((IndexError, RuntimeError)):
        aot_function(OUT_OF_RANGE[name], fw_compiler=compiler)(x, i)
    graph, = graphs
    assert not kinds(graphs, Opaque)
    with pytest.raises(IndexError):
        evaluate(graph, [array(x), array(i)])


def test_indices_where_a_dimension_goes():
    x = torch.randn(3, 4, 5, 6, requires_grad=True)
    i, j = LONG([[0, -1], [2, 1]]), LONG([1, -2])
    for fn in (lambda x, i, j: x[i], lambda x, i, j: x[:, i, j], lambda x, i, j: x[i, :, j], lambda x, i, j: x[:, i, :, j], lambda x, i, j: x[..., j],
               lambda x, i, j: x[None, i, :, None, j]):
        check(fn, x, i, j)


def test_masked_index_reads_nothing_under_a_false_mask():
    x, i = torch.randn(4), LONG([0, 3, 77, -50])
    mask = LONG([1, 1, 0, 0]).bool()
    graphs = check(lambda x, m, i: torch.ops.aten._unsafe_masked_index(x, m, [i.clamp(0, 3)], 7.0), x, mask, i)
    assert not kinds(graphs, Opaque)
    traced = make_fx(lambda x, m, i: torch.ops.aten._unsafe_masked_index(x, m, [i], 7.0), tracing_mode="fake")(x, mask, LONG([0, 1, 2, 3]))
    out, = evaluate(Capture(traced).graph(), [array(x), array(mask), array(i)]).outputs
    assert np.array_equal(out, np.array([x[0], x[3], 7, 7], np.float32))


def test_embedding_gradient_skips_padding_and_scales_by_frequency():
    weight, i = torch.randn(5, 3, requires_grad=True), LONG([[0, 1, 1], [4, 1, 2], [3, 3, 4]])
    for kwargs in ({}, {"padding_idx": 1}, {"scale_grad_by_freq": True}, {"padding_idx": 4, "scale_grad_by_freq": True}):
        graphs = check(lambda w, i: F.embedding(i, w, **kwargs), weight, i)
        assert kinds(graphs, Scatter) and not kinds(graphs, Opaque)


FEW_PLACES = {
    "a gather's gradient": lambda x, i: torch.log_softmax(x, -1).gather(1, i[:, :1]),
    "of three": lambda x, i: x.sin().gather(1, i[:, :3]),
    "along the first dimension": lambda x, i: x.t().exp().gather(0, i[:, :2].t()),
    "an index of each row": lambda x, i: x[torch.arange(7), i[:, 0]] * 2,
    "an embedding of few": lambda x, i: F.embedding(i[:2, :4], x).cos(),
    "a number into zeros": lambda x, i: torch.zeros_like(x).scatter(1, i[:, :1], 1.5) + x,
    "values into another number": lambda x, i: torch.full_like(x, float("-inf")).scatter(1, i[:, :1], x[:, :1]),
    "added to ones": lambda x, i: torch.ones_like(x).scatter_add(1, i[:, :4], x[:, :4]),
    "into false": lambda x, i: x * torch.zeros(7, 9, dtype=torch.bool).scatter(1, i[:, :1], True),
    "added to false": lambda x, i: x * torch.zeros(7, 9, dtype=torch.bool).index_put((torch.arange(7), i[:, 1]), x[:, 0] > 0, accumulate=True),
}
SCATTERED = {
    "of nine": lambda x, i: x.sin().gather(1, i),
    "one of two values": lambda x, i: torch.zeros_like(x).scatter(1, i[:, :1].expand(7, 2), x[:, :2]) + x,
    "into values": lambda x, i: x.scatter(1, i[:, :1], 1.0),
    "of fewer rows": lambda x, i: torch.zeros_like(x).scatter(1, i[:5, :1], x[:5, :1]) + x,
    "a product": lambda x, i: torch.ones_like(x).scatter_reduce(1, i[:, :1], x[:, :1].detach(), "prod") + x,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FEW_PLACES, *SCATTERED])
def test_an_element_finds_its_own_among_few_values(name, dtype, monkeypatch):
    """What starts from one number, and of each row of which few positions are met, is compared, and no scatter; twice the same position, NaN and
    infinity beside them."""
    monkeypatch.setattr(aten_scatter, "FEW_ON_CPU", aten_scatter.FEW)
    x, i = torch.randn(7, 9), torch.randint(0, 7, (7, 9))
    i[1], x[2, 3], x[3, 2] = 4, float("nan"), float("inf")
    x = x.to(dtype).requires_grad_()
    graphs = check({**FEW_PLACES, **SCATTERED}[name], x, i)
    assert bool(kinds(graphs, Scatter)) == (name in SCATTERED) and not kinds(graphs, Opaque)


def test_a_cpu_scatters_where_a_gpu_compares_with_several():
    x, i = torch.randn(7, 9, requires_grad=True), torch.randint(0, 9, (7, 3))
    assert kinds(check(lambda x, i: x.sin().gather(1, i), x, i), Scatter)
    assert not kinds(check(lambda x, i: x.sin().gather(1, i[:, :2]), x, i), Scatter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_pool_of_nan_infinity_and_ties(dtype):
    x = torch.tensor([float("-inf"), 1, 1, float("nan"), 0, 2, float("inf"), float("-inf")], dtype=dtype)
    x = torch.stack([x, torch.full_like(x, float("-inf")), torch.zeros_like(x), x.nan_to_num(5)])[None, None].requires_grad_()
    for kwargs in ({"padding": 1}, {"stride": 1, "padding": 1}, {"stride": 3, "dilation": 2, "padding": 1}, {"stride": 2, "ceil_mode": True}):
        check(lambda x: F.max_pool2d(x, 3 if kwargs.get("dilation") != 2 else 2, return_indices=True, **kwargs), x)


def test_pooling_keeps_channels_last():
    x = torch.randn(2, 3, 8, 6).to(memory_format=torch.channels_last).requires_grad_()
    for fn in (lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1), lambda x: F.adaptive_avg_pool2d(x, (4, 4)),
               lambda x: F.interpolate(x, scale_factor=2)):
        assert not kinds(check(fn, x), Opaque)


def test_a_window_past_the_input_folds_what_the_input_has():
    """EfficientNet pools 4 by 4 positions with a window of 1792 by 1792."""
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    for kwargs in ({"kernel_size": 50}, {"kernel_size": (50, 3)}, {"kernel_size": 7, "padding": 2},
                   {"kernel_size": 7, "padding": (3, 1), "stride": 60}):
        graphs = check(lambda x: F.avg_pool2d(x, ceil_mode=True, **kwargs), x)
        graphs += check(lambda x: F.avg_pool2d(x, ceil_mode=True, count_include_pad=False, **kwargs), x)
        graphs += check(lambda x: F.max_pool2d(x, ceil_mode=True, return_indices=True, **kwargs), x)
        assert not kinds(graphs, Opaque)
        assert all(a.extent.constant <= 5 for n in kinds(graphs, Compute) for r in walk(n.expr) if isinstance(r, Reduce) for a in r.over)
    check(lambda x: F.max_pool2d(x, 3, 1, 1, 2, ceil_mode=True, return_indices=True), x[..., :3, :3].detach().requires_grad_())


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 3, 1), (1, 2, 1, 1), (2, 3, 2, 2)])
def test_columns_of_a_window_that_stands_once_along_a_dimension(shape):
    """Unlike a fold's, its positions in the padding are elements of the result."""
    x = torch.randn(shape, requires_grad=True)
    for kwargs in ({"kernel_size": 3, "padding": 1}, {"kernel_size": (3, 2), "padding": (1, 1), "stride": 5},
                   {"kernel_size": 2, "padding": 2, "dilation": 2}):
        assert not kinds(check(lambda x: F.unfold(x, **kwargs), x), Opaque)


@pytest.mark.parametrize("windows, sizes, dim", [((1, 4, 3), (2, 9), 1), ((4, 1, 3), (9, 2), 0), ((4, 3), (9,), 0)])
def test_windows_are_folded_into_each_row_of_a_batch(windows, sizes, dim):
    """istft folds the squares of its window once, and asks for them in each row."""
    assert not kinds(check(lambda g: torch.ops.aten.unfold_backward(g, sizes, dim, 3, 2), torch.randn(windows)), Opaque)


def test_symbolic_sizes():
    x, i = torch.randn(6, 10, requires_grad=True), LONG([3, -1, 0])
    graphs = check(lambda x, i: (x[i], x.index_select(0, i % 6), x.index_add(0, i % 6, x[:3])), x, i, dynamic=True)
    image = torch.randn(2, 3, 9, 7, requires_grad=True)
    graphs += check(lambda x: (F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.unfold(x, 3)), image, dynamic=True)
    assert not kinds(graphs, Opaque)


KNOWN = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), (2, 3, 4, 6)),
    "nearest by 3": (lambda x: F.interpolate(x, scale_factor=(3.0, 1.0)), (2, 3, 4, 6)),
    "nearest to other sizes": (lambda x: F.interpolate(x, size=(7, 9)), (2, 3, 4, 6)),
    "positions": (lambda x: F.embedding(torch.arange(8), x), (10, 5)),
    "positions of a batch": (lambda x: F.embedding(torch.arange(8).expand(4, 8), x), (10, 5)),
    "a window of rows": (lambda x: x[torch.arange(4) + 2], (10, 5)),
    "index_add of a window": (lambda x: x.index_add(0, torch.arange(4) + 2, x[:4] * 2), (10, 5)),
    "index_copy of a window": (lambda x: x.index_copy(0, torch.arange(4) + 2, x[:4] * 2), (10, 5)),
    "reversed": (lambda x: x[9 - torch.arange(10)], (10, 5)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_positions_are_no_gathers(name):
    """In AOTAutograd's joint graph: index tensors that are computed from nothing become index maps, and their scatters folds."""
    fn, shape = KNOWN[name]
    graphs = []

    def partition(joint, inputs, **kwargs):
        graphs.append(Capture(joint).graph())
        return default_partition(joint, inputs, **kwargs)
    aot_function(fn, fw_compiler=lambda gm, _: gm, partition_fn=partition)(torch.randn(shape, requires_grad=True))
    graph, = graphs
    x = torch.randn(shape, requires_grad=True)
    out = fn(x)
    grad = torch.randn_like(out)
    got = evaluate(graph, [array(x), array(grad)]).outputs
    for value, want in zip(got, (out, *torch.autograd.grad(out, x, grad))):
        torch.testing.assert_close(torch.from_numpy(value.copy()), want.detach())
    assert not kinds(graphs, Opaque)
    assert "[" not in "".join(str(i) for n in kinds(graphs, Compute) for e in loads(n.expr) for i in e.index)
    if "other sizes" not in name and name != "reversed":
        assert not kinds(graphs, Scatter)
