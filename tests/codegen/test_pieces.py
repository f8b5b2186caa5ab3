"""Stores in pieces of an axis: what stack, cat and gradients of slices leave of a loop over the axis that they put together."""
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tokamak.schedule.pieces import PIECES
from tokamak.tools.record import recording
from tokamak.tools.show import STAGE_TEXTS


def compiled(fn, *inputs):
    """(result, the C of all kernels) of `fn`, held against eager in values and strides."""
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        got = torch.compile(fn, backend="tokamak")(*inputs)
    wanted = fn(*inputs)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    assert got.stride() == wanted.stride()
    return "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs)


def scan(x, decay):
    h, out = torch.zeros(x.shape[0], x.shape[2]), []
    for t in range(x.shape[1]):
        h = torch.exp(decay) * h + x[:, t]
        out.append(h.square().sum(-1))
    return torch.stack(out, 1)


@pytest.mark.parametrize("steps", [1, 2, 7, 16])
def test_stacked_results_of_a_loop_are_stores_of_their_own(steps):
    text = compiled(scan, torch.randn(64, steps, 48), -torch.rand(48))
    assert "select" not in text


def test_many_steps_are_stores_of_their_own():
    """The steps are more than an axis of few, but what else threads share out is enough."""
    def fn(x, w):
        return torch.stack([torch.sin(w + t) for t in range(24)], 1) * x
    assert "select" not in compiled(fn, torch.randn(70, 24, 48), torch.randn(70, 48))


def test_many_steps_that_one_thread_runs_are_stores_of_their_own():
    def fn(x, w):
        return torch.stack([torch.sin(w + t) for t in range(32)], 1) * x
    assert "select" not in compiled(fn, torch.randn(4, 32, 48), torch.randn(4, 48))


def multiples(x):
    return torch.cat([x, *(f(2.0 ** k * x) for k in range(5) for f in (torch.sin, torch.cos))], -1)


def widths(x):
    return torch.cat([x.exp(), x[:, :2].sin(), x[:, 1:], x[:, :1] * 2, x.cos()], -1)


@pytest.mark.parametrize("fn", [multiples, widths])
@pytest.mark.parametrize("rows", [5, 300, 70000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_short_pieces_side_by_side_have_values_of_their_own(fn, rows, dtype):
    """Rows run along lanes: along the pieces each lane would compute the values of all. A gradient is read in such pieces."""
    x = torch.randn(rows, 3).to(dtype)
    text = compiled(fn, x) if dtype is torch.float32 else ""
    assert "select" not in text or rows != 300
    x.requires_grad_()
    got = torch.compile(fn, backend="tokamak")(x)
    seed = torch.randn_like(got)
    given, = torch.autograd.grad(got, x, seed)
    wide = x.detach().double().requires_grad_()
    truth = fn(wide)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
    torch.testing.assert_close(got.double(), truth, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(given.double(), torch.autograd.grad(truth, wide, seed.double())[0], rtol=tolerance, atol=20 * tolerance)


def rotated(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def test_pairs_are_rotated_in_one_loop_forward_and_backward():
    inputs = [torch.randn(2, 3, 33, 16), torch.randn(33, 8), torch.randn(33, 8)]
    assert "select" not in compiled(rotated, *inputs)
    ours, eagers = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        torch.compile(rotated, backend="tokamak")(*ours).square().sum().backward()
    rotated(*eagers).square().sum().backward()
    for a, b in zip(ours, eagers):
        torch.testing.assert_close(a.grad, b.grad)
    assert not any(word in "\n".join(STAGE_TEXTS["render"](g) for g in recorder.graphs) for word in ("select", "loadg"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("rows", [1, 17])
def test_pieces_are_right_in_every_type(dtype, rows):
    make = lambda: torch.randn(3, rows, 6).to(dtype) if dtype is not torch.bool else torch.rand(3, rows, 6) > 0.5
    x, y = make(), make()
    if dtype.is_floating_point:
        x[0, 0, 0], x[1, 0, 0], x[2, 0, 0], y[0, 0, 0] = float("nan"), -0.0, float("inf"), float("-inf")
    for dim in (0, 1, 2, 3):
        compiled(lambda x, y: torch.stack([x, y, x], dim), x, y)
    for dim in (0, 1, 2):
        compiled(lambda x, y: torch.cat([x, y, x.roll(1, dim)], dim), x, y)
    compiled(lambda x, y: F.pad(x, (0, 0, 0, 0, 1, 2)), x, y) if dtype is not torch.bool else None


def test_sums_of_rows_in_a_stack():
    x, y = torch.randn(65, 37), torch.randn(65, 37)
    compiled(lambda x, y: torch.stack([x.sum(1), y.amax(1), (x * y).sum(1), x[:, 3]], 1), x, y)
    compiled(lambda x, y: torch.stack([x.sum(0), y.amax(0), (x * y).sum(0), x[3]], 0), x, y)


def test_more_pieces_than_a_kernel_should_say_stay_a_loop():
    text = compiled(lambda *xs: torch.stack(xs, 0), *(torch.randn(40) for _ in range(PIECES + 1)))
    assert text.count("store_f32") < PIECES


def test_large_pieces_of_one_result_go_around_the_caches():
    x, y = torch.randn(2048, 2047), torch.randn(2048, 2047)
    for dim in (0, 1, 2):
        compiled(lambda x, y: torch.stack([x.relu(), y, x + y], dim), x, y)


def test_an_input_that_receives_a_cat_of_itself():
    def turn(x):
        x.copy_(torch.cat([x[1:], x[:1]]))
    for rows in (2, 8, 40):
        x = torch.randn(rows, 5)
        wanted = x.clone()
        turn(wanted)
        torch._dynamo.reset()
        tokamak.compile(turn, strict=True)(x)
        assert torch.equal(x, wanted)


def test_what_a_norm_of_all_gradients_scales_is_not_made_by_one_thread():
    """A clipped step: the update of another tensor than the last one in the sum needs only the sum, and must not stand behind it in its kernel."""
    def step(parameters, gradients):
        total = torch.sqrt(sum(g.square().sum() for g in gradients))
        for p, g in zip(parameters, gradients):
            p.sub_(g * torch.clamp(1 / (total + 1e-6), max=1.0))
        return total
    shapes = [(64, 128), (513,), (100, 77)]
    made = [[torch.randn(s) for s in shapes] for _ in range(2)]
    wanted = [p.clone() for p in made[0]]
    norm = step(wanted, made[1])
    torch._dynamo.reset()
    with recording(strict=True) as recorder:
        torch.testing.assert_close(torch.compile(step, backend="tokamak")(*made), norm)
    torch.testing.assert_close(made[0], wanted)
    planned = recorder.graphs[0].values["fuse"]
    for roles in planned.roles.values():
        assert not any(m.node.shape for m in roles.final), "a tensor is made behind a complete sum"
    assert any(d.reason is not None and d.reason.code == "no_parallelism" for d in planned.decisions)


@pytest.mark.parametrize("widths", [(48, 48, 48, 48), (40, 72), (33, 33)], ids=str)
def test_gates_side_by_side_are_made_in_one_loop(widths):
    """Gradients of chunks, as in an LSTM: each piece is computed where it lies, under no mask, and lanes of the shorter pieces are not left out."""
    fn = lambda g, *parts: torch.cat([g[:, :1] * p * (1 - p) for p in parts], -1)
    text = compiled(fn, torch.randn(37, 5), *(torch.randn(37, w) for w in widths))
    assert len(set(widths)) > 1 or "select" not in text and "loadg" not in text


def test_sums_down_the_columns_of_gates_are_made_with_them():
    fn = lambda a, b: (lambda both: both * both.sum(0))(torch.cat((torch.tanh(a), b * a), -1))
    assert "loadg" not in compiled(fn, torch.randn(37, 64), torch.randn(37, 64))


def test_gates_behind_norms_of_their_rows():
    """The axis of the gates lies inside an iteration, and another value has all of it."""
    def fn(x, w):
        a, b = (x * x.square().mean(-1, keepdim=True).rsqrt()).chunk(2, -1)
        return torch.cat((-b, a), -1) * w + x
    compiled(fn, torch.randn(19, 96), torch.randn(96))


def test_short_pieces_of_lanes_stay_together():
    """Ends of a padded row are no pieces: registers would be filled by a lane or two."""
    compiled(lambda x: F.pad(x, (1, 1)) * 2, torch.randn(9, 62))
