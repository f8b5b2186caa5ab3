"""Elementwise operators, views and creation: captured graphs evaluated by the reference against eager, over torch's operator database (a fixed choice
of its samples), and at the values where formulas differ: NaN, infinities, borders, ties, wrapping integers."""
import itertools
import math

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import aot_function
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db

import tokamak
from tests.capture.through_reference import agree, cases, reference_compiler
from tokamak.capture.fx import Capture
from tokamak.capture.promote import every, result_type
from tokamak.capture.registry import TABLE
from tokamak.capture.tensor import Tensor
from tokamak.ir import dtype as dt
from tokamak.ir.expr import Const
from tokamak.ir.graph import Opaque
from tokamak.ir.index import as_index
from tokamak.tools.record import recording

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)

UNARY = """acos acosh asin asinh atan atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 rsqrt sigmoid sin sinh
sqrt tan tanh reciprocal sinc deg2rad special_entr angle logit neg abs sign sgn floor ceil trunc round frac square isnan isinf isposinf isneginf
signbit logical_not relu hardtanh hardswish hardsigmoid hardshrink softshrink silu mish elu celu leaky_relu softplus log_sigmoid_forward
nan_to_num""".split()
BINARY = """add sub mul div maximum minimum fmax fmin fmod remainder floor_divide atan2 hypot copysign logaddexp logaddexp2 xlogy special_xlog1py
heaviside pow eq ne lt le gt ge logical_and logical_or logical_xor sigmoid_backward tanh_backward hardsigmoid_backward _prelu_kernel clamp_min
clamp_max""".split()
DIVISIONS = ["fmod", "remainder", "floor_divide"]
BITWISE = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift rsub".split()
DATABASE = """abs acos add addcdiv addcmul angle arange as_strided atan2 bitwise_and bitwise_left_shift block_diag broadcast_to cat ceil chunk
clamp clone constant_pad_nd copysign diag_embed diagonal diagonal_copy diagonal_scatter diff div dsplit dstack eq erf exp expand eye fill flatten
flip floor_divide fmax fmod full full_like ge gelu heaviside hstack hypot isclose kron ldexp lerp linspace log1p logaddexp logical_xor logit
logspace masked_fill maximum meshgrid movedim mul nan_to_num narrow_copy ne neg new_full new_zeros nn.functional.celu
nn.functional.channel_shuffle nn.functional.elu nn.functional.gelu nn.functional.glu nn.functional.hardshrink nn.functional.hardsigmoid
nn.functional.hardswish nn.functional.hardtanh nn.functional.leaky_relu nn.functional.logsigmoid nn.functional.mish nn.functional.pad
nn.functional.pixel_shuffle nn.functional.pixel_unshuffle nn.functional.prelu nn.functional.relu6 nn.functional.selu nn.functional.silu
linalg.cross nn.functional.softplus nn.functional.softshrink nn.functional.softsign nn.functional.tanhshrink nn.functional.threshold ones_like permute
permute_copy pow ravel reciprocal remainder repeat reshape roll rot90 round rsqrt rsub scalar_tensor select select_scatter sgn sigmoid sign slice
slice_scatter split split_with_sizes sqrt square squeeze stack sub t tan tanh tile to transpose tril triu true_divide trunc unbind unbind_copy
unflatten unfold unsqueeze vander view where xlogy zeros_like float long bool half byte""".split()
STRADDLE = {"as_strided", "narrow_copy"}       # may be opaque: a window on memory that is no dense node, a size that is read from a tensor


def _entries(name: str):
    return [o for o in op_db if o.name == name]


def together(found) -> tuple:
    """Functions of tensors, with the tensors of each, as one function: every capture takes its time, however little it captures."""
    found = list(found)
    counts = [len(tensors) for _, tensors in found]

    def fn(*every):
        rest = iter(every)
        return [one(*itertools.islice(rest, n)) for (one, _), n in zip(found, counts)]
    return fn, [t for _, tensors in found for t in tensors]


@pytest.mark.parametrize("name", DATABASE)
def test_database_forward(name):
    kinds = ((torch.float32, 2), (torch.bfloat16, 1), (torch.int64, 1), (torch.uint8, 1), (torch.bool, 1))
    fn, tensors = together(case for op in _entries(name) for dtype, most in kinds if dtype in op.supported_dtypes("cpu")
                           for case in cases(op, dtype, most))
    refused = agree(fn, tensors)
    assert not refused or name in STRADDLE, refused


@pytest.mark.parametrize("name", DATABASE)
def test_database_backward(name):
    differentiable = [op for op in _entries(name) if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")]
    fn, tensors = together(case for op in differentiable for case in cases(op, torch.float64, 1, grad=True))
    if tensors:
        agree(fn, tensors, grad=True)


@pytest.mark.parametrize("as_results", [True, False])
def test_backward_of_transposed_results(as_results):
    """torch 2.11 lays the gradients of results out as contiguous, later versions as the results."""
    with functorch_config.patch(guess_tangent_strides_as_outputs=as_results):
        for fn in (torch.rot90, lambda x: x.transpose(0, 2) * 2, lambda x: x.flip(1).permute(1, 2, 0).exp()):
            agree(fn, [torch.randn(2, 3, 4, requires_grad=True)], grad=True)


# -- the values where formulas differ --------------------------------------------------------------------------------
EDGES = [0.0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, 2.5, -2.5, 6, -6, 7, 20, 21, -21, 100, -100, 1e-3, 0.1, 1e4, math.nan, math.inf, -math.inf]


def _grid(values, dtype):
    x = torch.tensor(values).to(dtype)
    return x[:, None].expand(len(x), len(x)).contiguous(), x.expand(len(x), len(x)).contiguous()


def _accepted(names, *tensors):
    """For each of the aten operators `names` the overload of as many tensors; those that eager refuses for these tensors are left out."""
    found = []
    for name in names:
        for o in every(name):
            if sum("Tensor" in str(a.type) for a in o._schema.arguments) == len(tensors) and _runs(o, tensors):
                found.append(o)
                break
    return found


def _runs(fn, tensors) -> bool:
    try:
        fn(*tensors)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _agree_each(names, *tensors):
    """Every operator of `names` on `tensors`, in one graph."""
    taken = _accepted(names, *tensors)
    assert len(taken) > len(names) // 2
    agree(lambda *ts: [o(*ts) for o in taken], list(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_special_values(dtype):
    x, y = _grid(EDGES, dtype)
    _agree_each(UNARY, x[:, 0].contiguous())
    _agree_each(BINARY, x, y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_special_values_of_derivatives(dtype):
    def fn(g, x):
        return [aten.threshold_backward(g, x, 0.5), aten.hardtanh_backward(g, x, -1, 1), aten.leaky_relu_backward(g, x, 0.1, False),
                aten.softplus_backward(g, x, 1.0, 20.0), aten.hardshrink_backward(g, x, 0.5), aten.softshrink_backward(g, x, 0.5),
                aten.logit_backward(g, x, 0.1), aten.logit_backward(g, x), aten.elu_backward(g, 0.7, 1.5, 0.8, True, x),
                aten.elu_backward(g, 0.7, 1.5, 0.8, False, x), aten._prelu_kernel_backward(g, x, x)]
    agree(fn, list(reversed(_grid(EDGES, dtype))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_as_operands(dtype):
    x = _grid(EDGES, dtype)[0][:, 0].contiguous()
    names = "eq lt ge fmod remainder add mul div floor_divide".split()

    def fn(a):
        numbers = (0, 1, 2, 3, -1, -2, 0.5, -0.5, 1.5, -3, 0.1)
        made = [getattr(aten, n).Scalar(a, s) for n in names for s in numbers]
        made += [aten.pow.Tensor_Scalar(a, s) for s in numbers] + [aten.pow.Scalar(s, a) for s in numbers]
        made += [aten.clamp(a, lo, hi) for lo, hi in ((-1, 1), (None, 0.5), (1, -1), (math.nan, 1))]
        return made + [aten.div.Scalar_mode(a, 3, rounding_mode=m) for m in ("floor", "trunc")] + [aten.round.decimals(a, decimals=1)]
    agree(fn, [x])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8])
def test_integers(dtype):
    values = [0, 1, 2, 3, 7, 127, 200, 255] if dtype is torch.uint8 else [0, 1, 2, 3, 5, 7, 100, 127, -1, -2, -3, -7, -128]
    x, y = _grid(values, dtype)
    divisor = torch.where(y == 0, 1, y)
    _agree_each(UNARY, x[:, 0].contiguous())
    _agree_each([n for n in BINARY if n not in DIVISIONS] + BITWISE, x, y)
    _agree_each(DIVISIONS, x, divisor)
    agree(lambda a, c: [aten.div.Tensor_mode(a, c, rounding_mode=m) for m in ("floor", "trunc")], [x, divisor])
    agree(lambda a: [a.to(d) for d in (*FLOATS, *INTEGERS, torch.int8)] + [a + 2.5, a * True, a > 1.5, a ** 3, aten.clamp(a, 1, 3.5), ~a], [x])


@pytest.mark.parametrize("left", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_mixed_types(left):
    x, y = _grid([0, 1, 2, 3, 7, 100], left)
    others = [y.to(d) for d in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)]
    others += [torch.tensor(300.3), torch.tensor(5)]
    both = (torch.add, torch.mul, torch.eq, torch.lt, torch.maximum, torch.atan2, torch.div)
    agree(lambda a, *bs: [f(a, c) for c in bs for f in both], [x, *others])
    agree(lambda a, *bs: [torch.where(a > 1, a, c) for c in bs] + [torch.cat([a, c]) for c in bs if c.ndim], [x, *others])


def test_result_type():
    def t(d, rank=1):
        return Tensor((as_index(4),) * rank, Const(0, d))
    assert result_type(t(dt.BF16), t(dt.F16)) is dt.F32
    assert result_type(t(dt.BF16), t(dt.F32, rank=0)) is dt.BF16
    assert result_type(t(dt.I32), t(dt.BF16, rank=0)) is dt.BF16
    assert result_type(t(dt.I8), t(dt.U8)) is dt.I16
    assert result_type(t(dt.I32), 1.5) is dt.F32
    assert result_type(t(dt.U8), 2**40) is dt.U8
    assert result_type(t(dt.BOOL), 2) is dt.I64


# -- layouts -----------------------------------------------------------------------------------------------------------
def test_layouts_of_copies():
    """What torch copies has the copy's layout, for an opaque reader too."""
    x = torch.randn(3, 4, 5, 6)[:, :, 1:, ::2].transpose(1, 3)
    agree(lambda a: [a.flip(1), a.clone(), a.clone(memory_format=torch.contiguous_format), a.roll(1, 2), a.double(), a * 2, a.reshape(3, -1)], [x])
    agree(lambda a: [torch.sort(a.flip(-1).clone()).values, a.contiguous().view(-1), a.expand(2, *a.shape), a.tril(), a.unfold(2, 2, 1)], [x])


def test_views_of_views():
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).permute(2, 0, 3, 1)
    agree(lambda a: [a[1:, :, ::2].flip(0)[..., 1], a.diagonal(0, 1, 3), a.select(1, -1).t() if a.dim() == 2 else a.select(1, -1), a.reshape(8, 15),
                     a.unfold(2, 3, 2).transpose(0, 4), torch.nn.functional.pad(a, (1, -1, -2, 3)), a[:0], torch.cat([a[:, :, :0], a], 2)], [x])


def test_empty_and_scalar():
    agree(lambda a, s: [a.flip(0), torch.cat([a, a]), a.roll(1), s.flip(()), s.roll(3), s.repeat(2, 0), s.expand(2, 2), torch.stack([s, s]),
                        s.unfold(0, 1, 1)], [torch.empty(0, 3), torch.tensor(2.0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_number_is_copied_into_a_tensor(dtype):
    def copied(a):
        b = a.clone()
        b[1:].copy_(1.5)
        return b
    agree(copied, [torch.zeros(2, 3).to(dtype)])


def test_each_view_has_its_copy():
    assert aten.permute_copy.default in TABLE and aten.slice_copy.Tensor in TABLE


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_a_gradient_of_logsigmoid_needs_no_buffer(shape):
    """Which is empty on a GPU."""
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda")
        gm = make_fx(lambda x: aten.log_sigmoid_backward(x, x, aten.log_sigmoid_forward(x)[1]))(x)
    assert not any(isinstance(n, Opaque) for n in Capture(gm).graph().nodes)


@pytest.mark.parametrize("fn, dtype", [(lambda x: x - 1, torch.bool), (lambda x: 1 - x, torch.bool), (lambda x: x - x.long(), torch.bool),
                                       (lambda x: torch.nn.functional.threshold(x, 0, 1), torch.bool), (torch.abs, torch.bool),
                                       (lambda x: torch.nn.functional.max_pool2d(x[None], 2), torch.bool),
                                       (lambda x: torch.nn.functional.avg_pool3d(x[None, None], (1, 2, 2)), torch.bfloat16),
                                       (lambda x: torch.nn.functional.prelu(x, x[0, :1]), torch.int64),
                                       (lambda x: torch.nn.functional.fold(x[:1].T, (2, 2), (2, 2)), torch.int64),
                                       (torch.relu, torch.bool), (torch.argmax, torch.bool), (torch.argmin, torch.bool),
                                       (lambda x: x % x, torch.bool), (lambda x: torch.fmod(x, x), torch.bool),
                                       (lambda x: torch.div(x, x, rounding_mode="trunc"), torch.bool),
                                       (lambda x: torch.addcmul(x, x, x), torch.bool), (lambda x: torch.hypot(x, x), torch.int64),
                                       (torch.nn.functional.silu, torch.int32), (torch.nn.functional.gelu, torch.bool),
                                       (torch.nn.functional.mish, torch.uint8), (lambda x: torch.logaddexp(x, x), torch.int16),
                                       (lambda x: torch.frac(x), torch.int64), (lambda x: x.var(), torch.int64), (torch.bitwise_not, torch.float32),
                                       (lambda x: torch.nn.functional.smooth_l1_loss(x, x), torch.int64),
                                       (lambda x: torch.heaviside(x, x.double()), torch.float32),
                                       (lambda x: torch.linalg.cross(x[:, :3], x[:, :3].double()), torch.float32),
                                       (lambda x: torch.lerp(x, x, 0.5), torch.int32), (lambda x: x.softmax(0), torch.int64),
                                       (lambda x: x.log_softmax(0), torch.uint8),
                                       (lambda x: x.cumsum(0, dtype=torch.bool), torch.float32),
                                       (lambda x: torch.diagonal_scatter(x, x[0, :2]), torch.float32),
                                       (lambda x: torch.slice_scatter(x, x[:1], 0, 0, 2), torch.float32),
                                       (lambda x: torch.slice_scatter(x, x[1:], 0, -3, 7, 3), torch.float32),
                                       (lambda x: torch.select_scatter(x, x[:1], 0, 1), torch.float32),
                                       (lambda x: x.index_put((torch.arange(2),), x), torch.float32),
                                       (lambda x: x.index_put((torch.arange(2),), x[:2, 1:]), torch.float32),
                                       (lambda x: x.index_put((torch.arange(2), torch.arange(2)), x[:1, 1:], accumulate=True), torch.float32),
                                       (lambda x: x.index_add(0, torch.arange(2), x[:2, 1:]), torch.float32),
                                       (lambda x: x.index_reduce(0, torch.arange(2), x, "amax"), torch.float32),
                                       (lambda x: x.index_reduce(1, torch.arange(2), x[:2, :2], "prod"), torch.float32),
                                       (lambda x: x[:, :0].index_select(0, torch.arange(2) + 5), torch.float32),
                                       (lambda x: x[:0, :0].index_select(0, torch.arange(2)), torch.float32),
                                       (lambda x: torch.nn.functional.embedding(torch.arange(2) + 5, x[:, :0]), torch.float32),
                                       (lambda x: torch.nn.functional.adaptive_avg_pool2d(x[None, :, :, None][..., :0], 2), torch.float32)])
def test_what_torch_refuses_is_a_call_that_raises(fn, dtype):
    """Fake tensors let it through."""
    x = torch.ones(3, 4).to(dtype)
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        fn(x)
    with pytest.raises(type(eager.value)) as ours:
        aot_function(fn, fw_compiler=reference_compiler({}))(x)
    assert str(ours.value)[:40] == str(eager.value)[:40]


@pytest.mark.parametrize("fn, right, wrong", [
    (lambda x, s: torch.select_scatter(x, s, 0, 1), (5,), (4,)), (lambda x, s: torch.diagonal_scatter(x, s), (5,), (6,)),
    (lambda x, s: torch.slice_scatter(x, s[1:], 0, 2), (6, 5), (5, 5)), (lambda x, s: x.index_add(0, torch.arange(2), s), (2, 5), (2, 4)),
    (lambda x, s: x.index_copy(0, torch.arange(2), s), (2, 5), (3, 5)), (lambda x, s: x.index_put((torch.arange(2),), s), (2, 5), (3, 5)),
    (lambda x, s: x.index_put((torch.arange(2),), s, accumulate=True), (5,), (4,)),
    (lambda x, s: x.index_reduce(0, torch.arange(2), s, "amin"), (2, 5), (2, 6)),
    (lambda x, s: x.put(torch.arange(2), s), (2,), (3,))])
@pytest.mark.parametrize("first", ["right", "wrong"])
def test_symbolic_sizes_that_torch_refuses(fn, right, wrong, first):
    """Whether the first call has them or a later one: what was compiled for others is not run."""
    torch._dynamo.reset()
    compiled = tokamak.compile(fn, dynamic=True, strict=True, cache_dir="")
    for shape in (right, wrong, right) if first == "right" else (wrong, right, wrong):
        x, s = torch.randn(7, 5), torch.randn(shape)
        if shape == right:
            torch.testing.assert_close(compiled(x, s), fn(x, s))
        else:
            with pytest.raises((RuntimeError, IndexError)):
                compiled(x, s)


def test_slices_of_symbolic_size_that_are_written_become_kernels():
    """Their sizes are equal, though not in form: nothing is left to torch."""
    def fn(x, y):
        x = x.clone()
        x[1:y.shape[0]] += 1
        x[-2:] = y[:2]
        return x
    torch._dynamo.reset()
    x, y = torch.randn(9, 5), torch.randn(6, 5)
    with recording(strict=True, cache_dir="") as recorder:
        torch.testing.assert_close(tokamak.compile(fn, dynamic=True)(x, y), fn(x, y))
    assert not any(isinstance(n, Opaque) for g in recorder.graphs for n in g.values["capture"].nodes)
