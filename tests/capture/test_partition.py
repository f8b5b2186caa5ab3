"""What is kept for backward, against eager: how many tensors and bytes."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tokamak

ROWS, WIDE = 64, 48


class LayerNorm(nn.Module):
    """The norm as nine operations of Python."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDE)), nn.Parameter(torch.zeros(WIDE))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        deviation = torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return centred / deviation * self.weight + self.bias


def saved(fn, *args):
    """Of one call: (how many tensors are kept for backward, their bytes, each memory once). Parameters are among them, though they stay anyway."""
    kept = []

    def pack(t):
        kept.append(t)
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn(*args)
    found = len(kept), sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
    del out
    return found


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_layer_norm_keeps_its_input_and_row_statistics():
    """With the weight, which stays anyway, four tensors and 1 + 2 / WIDE inputs' bytes; eager keeps six and more than two inputs' bytes."""
    module, x = LayerNorm(), torch.randn(ROWS, WIDE, requires_grad=True)
    assert saved(module, x) == (6, 4 * (2 * ROWS * WIDE + ROWS + WIDE))
    count, size = saved(tokamak.compile(module, strict=True), x)
    assert count <= 4
    assert size <= 4 * (ROWS * WIDE + 2 * ROWS + WIDE)


def test_cross_entropy_keeps_its_input():
    """The logits and a number or two a row; eager keeps all logarithms beside what it was given."""
    fn = lambda x, y: nn.functional.cross_entropy(x * 2, y)
    x, y = torch.randn(ROWS, WIDE, requires_grad=True), torch.randint(0, WIDE, (ROWS,))
    _, size = saved(tokamak.compile(fn, strict=True), x, y)
    assert size <= 4 * (ROWS * WIDE + 2 * ROWS + 1) + 8 * ROWS


def test_a_chain_of_pointwise_operations_keeps_its_input():
    fn = lambda x: torch.tanh(torch.sigmoid(x * 3).exp() + x) * x.sin()
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    assert saved(fn, x)[1] > 4 * 4 * ROWS * WIDE
    assert saved(tokamak.compile(fn, strict=True), x)[1] <= 4 * ROWS * WIDE


def test_a_loss_of_16_bit_logits_keeps_no_copy_of_them():
    logits = torch.randn(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, WIDE, (ROWS,))

    def fn(logits, target):
        return torch.nn.functional.cross_entropy(logits.float(), target)
    assert saved(fn, logits, target)[1] > 4 * ROWS * WIDE
    _, size = saved(tokamak.compile(fn, strict=True), logits, target)
    assert size <= 2 * ROWS * WIDE + (4 + 4 + 8) * ROWS + 8        # logits as they came, a maximum, a logarithm and a target a row


def test_a_norm_of_16_bit_values_in_float32_keeps_no_copy_of_them():
    x = torch.randn(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)

    def fn(x):
        return torch.nn.functional.layer_norm(x.float() * 2, (WIDE,)).to(torch.bfloat16)
    _, size = saved(tokamak.compile(fn, strict=True), x)
    assert size <= 2 * ROWS * WIDE + 2 * 4 * ROWS


COMPARED = {"relu": F.relu, "leaky relu": lambda x: F.leaky_relu(x, 0.1), "relu6": F.relu6, "hardtanh": F.hardtanh}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_of_what_a_gradient_only_compares_a_byte_is_kept(name, dtype, dynamic):
    """On a GPU: what the comparison gave, beside nothing; the gradient is eager's, to the bit, on both sides of what is compared with and on it."""
    fn = lambda x, b: COMPARED[name](x + b)
    given = lambda: (torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(1)) * 4).to(dtype).requires_grad_()
    x, b = given(), torch.zeros(WIDE, dtype=dtype)
    with torch.no_grad():
        x[0, :10] = torch.tensor([0.0, -0.0, 1.0, -1.0, 6.0, math.nan, math.inf, -math.inf, 5.96875, 1e-7], dtype=dtype)
    compiled = tokamak.compile(fn, target="interpret", strict=True, dynamic=dynamic, cache_dir="")
    count, size = saved(compiled, x, b)
    assert (count, size) == (1, ROWS * WIDE) and saved(fn, x, b)[1] >= dtype.itemsize * ROWS * WIDE
    g = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(2)).to(dtype)
    (want,), (got,) = (torch.autograd.grad(f(x, b), x, g) for f in (fn, compiled))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_what_is_kept_anyway_is_compared_again():
    """A layer's input is there for its weight's gradient: no byte beside it."""
    x, w = torch.randn(ROWS, WIDE, requires_grad=True), torch.randn(WIDE, 8, requires_grad=True)
    _, size = saved(tokamak.compile(lambda x, w: F.relu(x * 2) @ w, target="interpret", strict=True, cache_dir=""), x, w)
    assert size == 4 * (ROWS * WIDE + WIDE * 8)


def test_a_number_that_a_comparison_would_round_stays_with_its_operator():
    """0.1 is not the same among bfloat16's: what eager compares with it in float32 is compared so."""
    fn = lambda x: F.hardtanh(x * 1, -0.1, 0.1)
    x = (torch.arange(-64, 64) / 512).to(torch.bfloat16).requires_grad_()
    compiled = tokamak.compile(fn, target="interpret", strict=True, cache_dir="")
    (want,), (got,) = (torch.autograd.grad(f(x), x, torch.ones_like(x)) for f in (fn, compiled))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_the_partitioner_of_others_is_as_it_was():
    from torch._functorch import partitioners
    theirs = partitioners.get_default_op_list
    saved(tokamak.compile(lambda x: torch.softmax(x, -1), strict=True), torch.randn(4, 4, requires_grad=True))
    assert partitioners.get_default_op_list is theirs


class Normed(nn.Module):
    """Convolution, batch norm, SiLU, convolution: what a mobile block repeats."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.second(nn.functional.silu(self.norm(self.first(x))))


def test_batch_norm_keeps_its_input_and_statistics():
    """Of one convolution's result and the next one's input, which is computed between them, nothing else is kept where kernels run on a GPU."""
    pytest.importorskip("triton")
    x, net = torch.randn(4, 3, 10, 10), Normed().train()
    one = 4 * 4 * 8 * 8 * 8                                         # bytes of a convolution's result
    parameters = sum(4 * p.numel() for p in net.parameters())
    assert saved(net, x)[1] >= 3 * one
    assert saved(tokamak.compile(net, strict=True, target="interpret"), x)[1] <= 2 * one + 4 * x.numel() + parameters + 200


def test_the_statistics_of_batch_norm_are_eagers():
    x, nets = torch.randn(4, 3, 10, 10), []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = Normed().train()
        nets.append(net)
        (tokamak.compile(net, strict=True) if compiled else net)(x).square().sum().backward()
    for (name, a), (_, b) in zip(nets[0].state_dict().items(), nets[1].state_dict().items()):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, msg=name)
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-3, atol=1e-4)


def attention(q, k, v):
    return nn.functional.dropout(torch.softmax((q @ k.t()).float(), -1), 0.5, True).to(v.dtype) @ v


def test_dropout_keeps_its_mask():
    """What it leaves is a factor of a product, whose other factor's gradient needs it: it is made again of the scores, which are kept once, and the
    mask, where kernels run on a GPU."""
    pytest.importorskip("triton")
    q, k, v = (torch.randn(ROWS, WIDE).bfloat16().requires_grad_() for _ in range(3))
    square, inputs = ROWS * ROWS, 3 * 2 * ROWS * WIDE
    assert saved(attention, q, k, v)[1] >= inputs + (4 + 2 + 1) * square            # probabilities, those that are multiplied, mask
    assert saved(tokamak.compile(attention, strict=True, target="interpret"), q, k, v)[1] <= inputs + (4 + 1) * square + 4 * 4 * ROWS


def test_gradients_through_dropout_are_those_of_what_it_left():
    run = tokamak.compile(lambda x, w: nn.functional.dropout(torch.tanh(x), 0.5, True) @ w, strict=True)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    out = run(x, torch.eye(WIDE, requires_grad=True))
    kept = out != 0
    assert 0.4 < float(kept.float().mean()) < 0.6
    torch.testing.assert_close(out[kept], (torch.tanh(x) * 2)[kept])
    grad, = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.where(kept, 2 / torch.cosh(x) ** 2, 0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, -float("inf"), float("nan")])
def test_softmax_in_its_parts(value):
    """A row of one value, in training: as eager's, NaN included."""
    x = torch.randn(6, 9)
    x[2] = value
    x[4, 1] = -float("inf")
    grads = []
    for fn in (lambda x: torch.softmax(x, 1), tokamak.compile(lambda x: torch.softmax(x, 1), strict=True)):
        given = x.clone().requires_grad_()
        out = fn(given)
        grads.append([out.detach(), *torch.autograd.grad((out * torch.arange(9.0)).sum(), given)])
    for a, b in zip(*grads):
        torch.testing.assert_close(b, a, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("read", [False, True])
def test_graphs_are_written_as_text_for_readers_alone(read, monkeypatch):
    from torch._functorch._aot_autograd import graph_compile
    texts, write = [], torch.fx.GraphModule.print_readable
    monkeypatch.setattr(torch.fx.GraphModule, "print_readable", lambda *args, **kwargs: texts.append(write(*args, **kwargs)) or texts[-1])
    monkeypatch.setattr(graph_compile.aot_joint_log, "isEnabledFor", lambda level: read)
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [])
    theirs = graph_compile._log_joint_graph
    x = torch.randn(8, 8, requires_grad=True)
    tokamak.compile(lambda x: x.sin().cos(), strict=True)(x)
    assert bool(texts) is read and graph_compile._log_joint_graph is theirs


def renormed(x, mean, var):
    """A batch renorm: its statistics are read, and then moved towards the batch's."""
    m, s = x.mean(0), x.std(0, unbiased=False) + 1e-5
    ratio, shift = (s.detach() / var.sqrt()).clamp(1 / 3, 3), ((m.detach() - mean) / var.sqrt()).clamp(-5, 5)
    with torch.no_grad():
        mean.lerp_(m, 0.1)
        var.mul_(0.9).add_(s * s, alpha=0.1)
    return (x - m) / s * ratio + shift


def scaled(x, mean, var):
    """What is written is needed itself, by way of a view, and of another size than what is kept of it."""
    out = x * mean.exp() + x.square() * var.view(1, -1).expand(len(x), -1).sin()
    mean.add_(x.detach().sum(0))
    var.zero_()
    return out


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [renormed, scaled])
def test_backward_sees_written_inputs_as_they_were(fn, dynamic):
    x, state = torch.randn(12, 5, dtype=torch.float64), [torch.rand(5, dtype=torch.float64) + 0.5 for _ in range(2)]
    results = []
    for run in (fn, tokamak.compile(fn, strict=True, dynamic=dynamic)):
        given, held = x.clone().requires_grad_(), [s.clone() for s in state]
        for step in (1, 2):
            (run(given, *held) * torch.arange(60.0).view(12, 5) * step).sum().backward()
        results.append((given.grad, *held))
    for want, got in zip(*results):
        torch.testing.assert_close(got, want)


def test_backward_sees_a_value_of_autograd_as_it_was_before_it_is_written():
    """torch writes it behind forward, and would refuse to go back."""
    def fn(x, w):
        y = w * x.detach().exp()
        x.mul_(2)
        return y
    grads = []
    for run in (fn, tokamak.compile(fn, strict=True)):
        x, w = torch.arange(5.0, requires_grad=True), torch.ones(5, requires_grad=True)
        run(x * 0.5, w).sum().backward()
        grads.append(w.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_statistics_that_backward_does_not_need_are_not_copied():
    module, x = nn.BatchNorm1d(WIDE), torch.randn(ROWS, WIDE, requires_grad=True)
    with tokamak.recording() as seen:
        tokamak.compile(module, strict=True)(x)
    assert all(node.name != "clone" for graph in seen.graphs for node in graph.values["aten"].graph.nodes)


def test_parts_of_a_value_that_was_made_twice():
    """torch makes the packed projections of both calls once, and what backward reads of the second are parts of the first's memory."""
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x, w = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 16)

    def fn(x):
        return attention(x, x, x, need_weights=True)[0] + attention(x, x, x, need_weights=False)[0]
    torch._dynamo.reset()
    results = []
    for f in (fn, torch.compile(fn, backend="tokamak")):
        y = f(x)
        results.append((y, *torch.autograd.grad(y, (x, *attention.parameters()), w)))
    for found, wanted in zip(*reversed(results)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
