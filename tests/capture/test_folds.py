"""Reductions, norms, softmax, losses and scans: the captured graph evaluated by the reference against eager, forward and backward, over
torch's operator database (a fixed choice of its samples)."""
import operator

import numpy as np
import pytest
import torch
from functorch.compile import aot_function, default_partition
from torch.testing._internal.common_methods_invocations import op_db
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.capture.through_reference import drawn
from tokamak.capture import aten_loss, aten_norm, aten_reduce, aten_scan, tables  # noqa: F401
from tokamak.capture.dtypes import TORCH_DTYPES
from tokamak.capture.fx import Capture
from tokamak.capture.registry import TABLE
from tokamak.ir import substitution
from tokamak.ir.check import check_graph
from tokamak.ir.graph import Opaque, View
from tokamak.ir.index import as_index
from tokamak.ir.reference import evaluate

aten = torch.ops.aten
OWN = {o for o, fn in TABLE.items() if fn.__module__ in {m.__name__ for m in (aten_loss, aten_norm, aten_reduce, aten_scan)}}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.bool)
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float64: (1e-10, 1e-10), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}

NAMES = """
sum mean prod nansum amax amin aminmax max.reduction_no_dim max.reduction_with_dim min.reduction_no_dim min.reduction_with_dim argmax argmin
any all count_nonzero trace var std var_mean std_mean linalg.vector_norm norm norm.inf dist renorm logsumexp cumsum cumprod cummax cummin
logcumsumexp softmax log_softmax softmax.with_dtype nn.functional.layer_norm nn.functional.rms_norm nn.functional.group_norm
nn.functional.instance_norm nn.functional.batch_norm native_layer_norm native_batch_norm _batch_norm_with_update nn.functional.nll_loss
nn.functional.mse_loss nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy
nn.functional.binary_cross_entropy_with_logits nn.functional.soft_margin_loss
""".split()

MADE_OF_OTHERS = """
var.unbiased std.unbiased std_mean.unbiased norm.fro nn.functional.softmin nn.functional.batch_norm.without_cudnn _native_batch_norm_legit
nn.functional.cross_entropy nn.functional.l1_loss nn.functional.kl_div nn.functional.cosine_embedding_loss nn.functional.poisson_nll_loss
nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss nn.functional.normalize nn.functional.cosine_similarity
nn.functional.pairwise_distance masked.softmax masked.sum masked.mean masked.var masked.amax masked.argmax masked.logsumexp masked.cumsum
masked.normalize masked.prod masked.norm masked.log_softmax
""".split()
"""Operators that arrive as several of the above: one type is enough."""

CASES = [(n, d) for n in NAMES for d in (*FLOATS, *INTEGERS) if any(d in o.supported_dtypes("cpu") for o in op_db if n.startswith(o.name))]
CASES += [(n, torch.float32) for n in MADE_OF_OTHERS]


def named(name):
    return [o for o in op_db if (f"{o.name}.{o.variant_test_name}" if o.variant_test_name else o.name) == name]


def array(t):
    """A tensor as the reference wants it."""
    t = t.detach()
    return t.float().numpy() if t.dtype is torch.bfloat16 else t.resolve_neg().resolve_conj().numpy()


def tensor(value, like):
    return torch.from_numpy(np.array(value)).to(like)


def call(node, args, kwargs):
    """An opaque call, made by torch on arrays."""
    def leaf(x):
        if isinstance(x, (tuple, list)):
            return type(x)(leaf(v) for v in x)
        return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x

    def views(x, made):
        if isinstance(x, View):
            return tensor(made, TORCH_DTYPES[x.node.dtype])
        return tuple(views(v, m) for v, m in zip(x, made)) if isinstance(x, (tuple, list)) else made
    made = node.target(*views(node.args, args), **{k: leaf(v) for k, v in kwargs.items()})
    made = (made,) if node.single else made
    return tuple(array(m) if isinstance(m, torch.Tensor) else None for m in made)


class Wide(torch.fx.Interpreter):
    """Runs a graph with every floating-point value in float64: the truth that both eager and we round."""

    def call_function(self, target, args, kwargs):
        args, kwargs = tree_map(self.widened, (args, kwargs))
        return tree_map(self.widened, super().call_function(target, args, kwargs))

    @staticmethod
    def widened(x):
        if isinstance(x, torch.Tensor) and x.dtype in TOLERANCE:
            return x.double()
        return torch.float64 if isinstance(x, torch.dtype) and x in TOLERANCE else x


class Checker:
    """A compiler for AOTAutograd that runs graphs as they are and compares each with what the captured graph means."""

    def __init__(self):
        self.graphs = []

    def __call__(self, gm, _):
        capture = Capture(gm)
        graph = capture.graph()
        self.graphs.append(graph)

        def run(*args):
            expected = gm(*args)
            check(graph, args, expected, Wide(gm).run(*args), {node: array(value) for node, value in capture.constants.items()})
            return expected
        return run

    def opaque(self):
        return {n.target for g in self.graphs for n in g.nodes if isinstance(n, Opaque)}


def check(graph, args, expected, truth, constants, sizes={}):
    """Type, shape, strides and values of `graph`'s outputs against eager's: the same, or as near to the truth as eager is."""
    check_graph(graph)
    found = evaluate(graph, [array(a) if isinstance(a, torch.Tensor) else a for a in args], opaque=call, constants=constants,
                     sizes={a.name: extent for a, extent in sizes.items()})
    for spec, value, want, exact in zip(graph.outputs, found.outputs, expected, truth):
        if not isinstance(want, torch.Tensor):
            continue
        dtype = TORCH_DTYPES[spec.node.dtype]
        assert dtype is want.dtype and np.shape(value) == tuple(want.shape)
        if want.numel() > 1:
            strides = [substitution.evaluate(s, sizes) for s in spec.strides]
            assert [s for s, e in zip(strides, want.shape) if e != 1] == [s for s, e in zip(want.stride(), want.shape) if e != 1]
        got = tensor(value, dtype)
        assert near(got, want, exact) if dtype in TOLERANCE else torch.equal(got, want), f"{got} where eager has {want} and the truth is {exact}"


def near(got, want, exact):
    rtol, atol = TOLERANCE[got.dtype]
    same = torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    error = (want.double() - exact).abs().nan_to_num(0, posinf=float("inf"))
    return bool((same | ((got.double() - exact).abs() <= 4 * error.max())).all()) if got.numel() else True


def detached(value, grad):
    """Fresh leaves of the tensors in `value`, in order of occurrence; and a function that puts them back."""
    flat, spec = tree_flatten(value)
    leaves = [v.detach().clone(memory_format=torch.preserve_format).requires_grad_(grad and v.requires_grad)
              for v in flat if isinstance(v, torch.Tensor)]

    def rebuild(given):
        it = iter(given)
        return tree_unflatten([next(it) if isinstance(v, torch.Tensor) else v for v in flat], spec)
    return leaves, rebuild


def check_sample(op, sample, grad):
    leaves, rebuild = detached((sample.input, sample.args, sample.kwargs), grad)

    def program(*given):
        x, args, kwargs = rebuild(given)
        return op.op(x, *args, **kwargs)
    checker = Checker()
    out = aot_function(program, fw_compiler=checker, bw_compiler=checker, partition_fn=default_partition)(*leaves)
    outs = [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(o, torch.Tensor) and o.requires_grad]
    if outs:
        torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])
    return checker


def samples(op, dtype, grad, most):
    found = drawn(op, dtype, grad)
    step = max(1, len(found) // most)
    return found[::step][:most]


@pytest.mark.parametrize("name, dtype", CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_operator_database(name, dtype):
    ops = named(name)
    assert ops, f"torch's operator database has no '{name}'"
    for op in ops:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        grad = dtype.is_floating_point and dtype in op.supported_backward_dtypes("cpu")
        for sample in samples(op, dtype, grad, 2 if dtype is torch.float32 else 1):
            checker = check_sample(op, sample, grad)
            assert not checker.opaque() & OWN


# -- operators and corners that the database's samples do not reach --------------------------------------------------
NAN, INF = float("nan"), float("inf")


def check_call(fn, *args, symbolic=False):
    """`fn` on real arguments, traced as it stands."""
    return check_traced(make_fx(torch.func.functionalize(fn), tracing_mode="symbolic" if symbolic else "fake")(*args), *args)


def check_traced(gm, *args):
    capture = Capture(gm)
    graph = capture.graph()
    assert not [n.target for n in graph.nodes if isinstance(n, Opaque) and n.target in OWN]
    expected, exact = gm(*args), Wide(gm).run(*args)
    many = isinstance(expected, (tuple, list))
    constants = {node: array(value) for node, value in capture.constants.items()}
    check(graph, args, expected if many else (expected,), exact if many else (exact,), constants, host(graph, args))
    return graph


def host(graph, args):
    """Size atom -> value, of a symbolic graph."""
    found = {}
    for given, value in zip(graph.inputs, args):
        for s, extent in zip(given.shape, value.shape):
            found.update({a: extent for a in s.atoms() if s is as_index(a)})
    return found


SPECIAL = torch.tensor([[1.0, 3.0, 3.0, -INF], [NAN, 2.0, NAN, 5.0], [INF, INF, -1.0, 0.0], [-INF, -INF, -INF, -INF]])


@pytest.mark.parametrize("name", "max min argmax argmin cummax cummin cumsum cumprod logcumsumexp logsumexp softmax log_softmax amax amin".split())
@pytest.mark.parametrize("dim", (0, 1))
def test_nan_inf_and_ties(name, dim):
    check_call(lambda x: getattr(torch, name)(x, dim), SPECIAL)


@pytest.mark.parametrize("name", "max min argmax argmin aminmax any all count_nonzero nansum".split())
def test_whole_tensor(name):
    check_call(lambda x: getattr(torch, name)(x.t()), SPECIAL)


def test_rows_of_minus_infinity():
    check_call(lambda x: aten._safe_softmax(x, 1), SPECIAL)


@pytest.mark.parametrize("fn", (
    lambda x: x.sum(1), lambda x: x.mean(1), lambda x: x.prod(1), lambda x: x.var(1), lambda x: torch.var_mean(x, 0, correction=7),
    lambda x: x.any(1), lambda x: x.all(1), lambda x: x.logsumexp(1), lambda x: torch.linalg.vector_norm(x, 0.5, 1), lambda x: x.cumsum(1),
    lambda x: x.mean(), lambda x: x.softmax(1), lambda x: x.amax(0)), ids=range(13))
def test_empty_extent(fn):
    check_call(fn, torch.zeros(3, 0))


@pytest.mark.parametrize("fn", (
    lambda x: x.sum(0), lambda x: x.var(correction=1), lambda x: x.argmax(), lambda x: x.max(0), lambda x: x.cummax(0), lambda x: x.cumsum(0),
    lambda x: x.softmax(0), lambda x: x.any(), lambda x: torch.linalg.vector_norm(x, 0), lambda x: x.logsumexp(0)), ids=range(10))
def test_scalar_tensor(fn):
    check_call(fn, torch.tensor(3.0))


def test_logical_fold_over_no_dimension():
    check_call(lambda x: (aten.any.dims(x, []), aten.all.dims(x, [], True)), SPECIAL)


@pytest.mark.parametrize("correction", (0, 1, 2.5, 4, 6))
def test_degrees_of_freedom(correction):
    check_call(lambda x: (torch.var(x, 1, correction=correction), torch.std(x, 1, correction=correction)), torch.randn(3, 4))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("affine", (True, False))
def test_norms_and_their_backward(dtype, affine):
    torch.manual_seed(1)
    x, grad = torch.randn(4, 6, 5, dtype=dtype), torch.randn(4, 6, 5, dtype=dtype)
    rows = (torch.randn(6, 5, dtype=dtype), torch.randn(6, 5, dtype=dtype)) if affine else ()
    channels = (torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype)) if affine else ()
    mask = [True, affine, affine]

    def layer(x, grad, *affine):
        weight, bias = affine or (None, None)
        out, mean, rstd = aten.native_layer_norm(x, [6, 5], weight, bias, 1e-5)
        return out, mean, rstd, *aten.native_layer_norm_backward(grad, x, [6, 5], mean, rstd, weight, bias, mask)

    def group(x, grad, *affine):
        weight, bias = affine or (None, None)
        out, mean, rstd = aten.native_group_norm(x, weight, bias, 4, 6, 5, 3, 1e-5)
        return out, mean, rstd, *aten.native_group_norm_backward(grad, x, mean, rstd, weight, 4, 6, 5, 3, mask)

    def batch(x, grad, *affine):
        weight, bias = affine or (None, None)
        out, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        return out, mean, rstd, *aten.native_batch_norm_backward(grad, x, weight, None, None, mean, rstd, True, 1e-5, [True, True, True])
    for fn, parameters in ((layer, rows), (group, channels), (batch, channels)):
        check_call(fn, x, grad, *parameters)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm_and_its_backward(dtype):
    """On the CPU tracing takes the forward operator apart, so the graph is written by hand."""
    torch.manual_seed(1)
    args = torch.randn(4, 6, 5, dtype=dtype), torch.randn(4, 6, 5, dtype=dtype), torch.randn(6, 5, dtype=dtype)
    g = torch.fx.Graph()
    x, grad, weight = (g.placeholder(n) for n in ("x", "grad", "weight"))
    both = g.call_function(aten._fused_rms_norm.default, (x, [6, 5], weight, None))
    out, rstd = (g.call_function(operator.getitem, (both, i)) for i in (0, 1))
    back = g.call_function(aten._fused_rms_norm_backward.default, (grad, x, [6, 5], rstd, weight, [True, True]))
    g.output((out, *(g.call_function(operator.getitem, (back, i)) for i in (0, 1))))
    gm = torch.fx.GraphModule(torch.nn.Module(), g)
    FakeTensorProp(gm).propagate(*args)

    def eager(x, grad, weight):
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = torch.nn.functional.rms_norm(x, [6, 5], weight)
        return out.detach(), *torch.autograd.grad(out, (x, weight), grad)
    check(Capture(gm).graph(), args, eager(*args), eager(*(a.double() for a in args)), {})


@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
@pytest.mark.parametrize("training", (True, False))
def test_batch_norm_with_running_statistics(layout, training):
    torch.manual_seed(2)
    x = torch.randn(2, 6, 4, 5).to(memory_format=layout)
    rest = torch.randn(6), torch.randn(6), torch.randn(6), torch.rand(6) + 0.5

    def legit(x, weight, bias, mean, variance):
        out = aten._native_batch_norm_legit_functional(x, weight, bias, mean, variance, training, 0.1, 1e-5)
        return *out, *aten.native_batch_norm_backward(x, x, weight, mean, variance, out[1], out[2], training, 1e-5, [True, True, True])

    def unified(x, weight, bias, mean, variance):
        if not training:
            return aten._batch_norm_no_update(x, weight, bias, mean, variance, 0.1, 1e-5)
        out = aten._batch_norm_with_update_functional(x, weight, bias, mean, variance, 0.1, 1e-5)
        return *out, *aten.batch_norm_backward(x, x, weight, mean, variance, out[1], out[2], True, 1e-5, [True, True, True], out[3])
    for fn in (legit, unified):
        check_call(fn, x, *rest)


@pytest.mark.parametrize("reduction", (0, 1, 2))
@pytest.mark.parametrize("shape", ((7,), (5, 7), (3, 7, 2, 4)))
@pytest.mark.parametrize("weighted", (True, False))
def test_negative_log_likelihood(reduction, shape, weighted):
    torch.manual_seed(3)
    x = torch.randn(shape)
    target = torch.randint(0, 7, [s for i, s in enumerate(shape) if i != min(1, len(shape) - 1)])
    if target.dim():
        target.view(-1)[::3] = -100
    forward, backward = (aten.nll_loss2d_forward, aten.nll_loss2d_backward) if len(shape) == 4 else (aten.nll_loss_forward, aten.nll_loss_backward)

    def fn(x, target, *weights):
        weight = weights[0] if weights else None
        out, total = forward(x, target, weight, reduction, -100)
        return out, total, backward(torch.ones_like(out), x, target, weight, reduction, -100, total)
    check_call(fn, x, target, *([torch.rand(7)] if weighted else []))


def test_weight_norm_and_dropout():
    v, grad = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
    for dim, g in ((0, torch.randn(4, 1, 1)), (2, torch.randn(1, 1, 2))):
        def fn(v, g, grad):
            w, norms = aten._weight_norm_interface(v, g, dim)
            return w, norms, *aten._weight_norm_interface_backward(grad, v, g, norms, dim)
        check_call(fn, v, g, grad)
    check_call(lambda grad, mask: aten.native_dropout_backward(grad, mask, 2.0), grad, v > 0)


@pytest.mark.parametrize("fn", (
    lambda x: x.mean((0, 2)), lambda x: x.var(1), lambda x: x.softmax(-1), lambda x: x.argmax(), lambda x: x.max(1), lambda x: x.cumsum(1),
    lambda x: x.logsumexp((0, 1)), lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    lambda x: torch.nn.functional.group_norm(x, 3), lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
    lambda x: torch.nn.functional.mse_loss(x, x * 2)), ids=range(11))
def test_symbolic_sizes(fn):
    """Sizes stay sizes: the same captured graph is right at other extents."""
    torch.manual_seed(4)
    check_call(fn, torch.randn(4, 6, 5), symbolic=True)
