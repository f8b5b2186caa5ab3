"""Reductions, norms, softmax, losses and scans: the captured graph evaluated by the reference against eager, forward and backward, over torch's operator
database (a fixed choice of its samples)."""
import numpy as np
import pytest
import torch
from functorch.compile import aot_function, default_partition
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tokamak.capture import aten_loss, aten_norm, aten_reduce, aten_scan
from tokamak.capture.fx import TORCH_DTYPES, Capture
from tokamak.capture.registry import TABLE
from tokamak.ir.graph import Opaque, View
from tokamak.ir.reference import evaluate

OWN = {o for o, fn in TABLE.items() if fn.__module__ in {m.__name__ for m in (aten_loss, aten_norm, aten_reduce, aten_scan)}}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACT = (torch.int64, torch.bool)
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float64: (1e-10, 1e-10), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}

NAMES = """sum mean prod nansum amax amin aminmax max.reduction_no_dim max.reduction_with_dim min.reduction_no_dim min.reduction_with_dim argmax argmin any all
count_nonzero trace var std var_mean std_mean var.unbiased std_mean.unbiased linalg.vector_norm norm norm.inf norm.fro dist renorm logsumexp cumsum cumprod
cummax cummin logcumsumexp softmax log_softmax softmax.with_dtype nn.functional.softmin nn.functional.layer_norm nn.functional.rms_norm
nn.functional.group_norm nn.functional.instance_norm nn.functional.batch_norm nn.functional.batch_norm.without_cudnn native_layer_norm
native_batch_norm _native_batch_norm_legit _batch_norm_with_update nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss
nn.functional.l1_loss nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy
nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div nn.functional.soft_margin_loss nn.functional.cosine_embedding_loss
nn.functional.poisson_nll_loss nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss
nn.functional.normalize nn.functional.cosine_similarity nn.functional.pairwise_distance masked.softmax masked.sum masked.mean masked.var
masked.amax masked.argmax masked.logsumexp masked.cumsum masked.normalize std.unbiased masked.prod masked.norm masked.log_softmax""".split()


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


def check(graph, args, expected, truth, constants):
    """Type, shape, strides and values of `graph`'s outputs against eager's: the same, or as near to the truth as eager is."""
    found = evaluate(graph, [array(a) if isinstance(a, torch.Tensor) else a for a in args], opaque=call, constants=constants)
    for spec, value, want, exact in zip(graph.outputs, found.outputs, expected, truth):
        if not isinstance(want, torch.Tensor):
            continue
        dtype = TORCH_DTYPES[spec.node.dtype]
        assert dtype is want.dtype and tuple(s.constant for s in spec.shape) == tuple(want.shape)
        if want.numel() > 1:
            assert [s.constant for s, e in zip(spec.strides, want.shape) if e != 1] == [s for s, e in zip(want.stride(), want.shape) if e != 1]
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
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    step = max(1, len(found) // most)
    return found[::step][:most + 1]


@pytest.mark.parametrize("dtype", (*FLOATS, *EXACT), ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_operator_database(name, dtype):
    ops = named(name)
    assert ops, f"torch's operator database has no '{name}'"
    for op in ops:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        grad = dtype.is_floating_point and dtype in op.supported_backward_dtypes("cpu")
        for sample in samples(op, dtype, grad, 3 if dtype is torch.float32 else 1):
            checker = check_sample(op, sample, grad)
            assert not checker.opaque() & OWN
