"""What kills fusing compilers, each by name: compiled code against eager (see `harness.agree`)."""
import gc
import math
import os
import time

import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.harness import Seen, agree, cache, compiled, twins
from tests.threads import in_threads

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def long(shape, target: str) -> None:
    """Skips what takes the interpreter minutes."""
    if target == "interpret" and math.prod(shape) > 10**5:
        pytest.skip("long in the interpreter")


def on(target: str, *tensors):
    """The tensors where `target` wants them."""
    return [t.cuda() if target == "cuda" else t for t in tensors]


def kernel(fn, target: str):
    """`fn` as users compile it."""
    return tokamak.compile(fn, strict=True, cache_dir=cache(), target="interpret" if target == "interpret" else "")


# -- ragged ends -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (17, 3), (33, 65), (5, 1025), (1025, 5), (1, 4099)])
@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_ragged_under_a_prologue_that_is_not_zero_at_zero(shape, dim, target):
    x = torch.randn(shape)
    agree(lambda x: ((x + 1).exp().sum(dim), (x.cos() - 3).amax(dim), (x * 0 + 2).amin(dim), (x.abs() + 1).log1p().mean(dim)), [x], target=target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.float64])
def test_ragged_folds_of_every_type(dtype, target):
    x = (torch.randn(37, 67) * 5).to(dtype)
    agree(lambda x: (x.sum(0), x.sum(1), x.amax(0), x.amin(1), x.any(1), x.all(0)), [x], target=target)


# -- moved reads under a fold ------------------------------------------------------------------------------------------------
MOVES = {"pad": lambda x: F.pad(x, (3, 2, 1, 4), value=2.0), "crop": lambda x: F.pad(x, (-1, -1)), "slice": lambda x: x[3:-2:3, 1::2],
         "roll": lambda x: x.roll((5, -7), (0, 1)), "flip": lambda x: x.flip(0, 1), "cat": lambda x: torch.cat([x, x.flip(1), x[:, :3]], 1),
         "reflect": lambda x: F.pad(x[None], (2, 1), mode="reflect")[0]}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("shape", [(19, 37), (3, 70001), (70001, 3)])
def test_moved_reads_through_a_split_fold(move, shape, target):
    long(shape, target)
    def fn(x):
        y = MOVES[move](x.sin() + 1)
        return y.sum(), y.sum(0), y.amax(1), (y * 2).mean()
    agree(fn, [torch.randn(shape)], target=target)


@pytest.mark.parametrize("shape", [(5, 5, 5), (3, 2, 1, 7)])
def test_a_flat_view_read_backwards(shape, target):
    """A quotient's dividend is negative there, and its remainder is taken again."""
    def fn(x):
        flat = x.reshape(-1)
        return flat.flip(0)[1:] * 2, flat.flip(0)[3:].cumsum(0), flat.roll(-7).reshape(shape)
    agree(fn, [torch.randn(shape)], target=target)


def test_nested_rolls_stay_small(target):
    def fn(x):
        for n in range(20):
            x = x + x.roll(n + 1, 0)
        return x
    assert agree(fn, [torch.randn(257) * 2**-10], target=target).kernels <= 20


# -- layouts -----------------------------------------------------------------------------------------------------------------
def layouts():
    base = torch.randn(40, 50)
    yield "padded", base[:, 3:40]
    yield "overlapping", base.view(-1).as_strided((30, 40), (7, 1), 5)
    yield "expanded", base[:, :1].expand(40, 33)
    yield "views of views", base.t()[5:45:3, 2:].unflatten(1, (19, 2))[:, :, 1]
    yield "storage offset", base.view(-1)[11:].as_strided((20, 30), (31, 1), 17)
    yield "backwards twice", base.flip(0).t().flip(0)
    yield "one row", base[7:8]
    yield "one column", base[:, 9:10]


@pytest.mark.parametrize("name, x", list(layouts()), ids=lambda v: v if isinstance(v, str) else "")
def test_layouts(name, x, target):
    agree(lambda x: (x * 2 + 1, x.sum(0), x.sum(1), x.softmax(-1), x.cumsum(0), x.argmax(1), x.t().contiguous(), x.reshape(-1)), [x], target=target)


def test_channels_last_stays(target):
    x = torch.randn(2, 6, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    agree(lambda x: (F.relu(x) + 1, F.group_norm(x, 3), F.avg_pool2d(x, 2)), [x], grad=True, target=target)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), (), (1,), (1, 1, 1), (1, 5), (5, 1)])
def test_empty_and_small_shapes(shape, target):
    dims = list(range(len(shape)))
    agree(lambda x: (x + 1, x.sum(), x.sum(dims), x.prod(), x.any(), x.exp().mean(), x.reshape(-1).cumsum(0), x.softmax(-1), x.clone()),
          [torch.randn(shape)], target=target)


def test_nothing_beside_something(target):
    agree(lambda x: (x[:0] * 2, x * 1, x[:, :0].sum(1), x.diagonal(1) + 1), [torch.randn(4, 1)], target=target)


def test_expanded_from_nothing(target):
    agree(lambda x: (x.expand(4, 0) + 1, x.expand(4, 0).sum(1), x.expand(4, 0).cumsum(1)), [torch.randn(4, 1)], target=target)


def test_batch_equal_to_sequence(target):
    x, w = torch.randn(8, 8, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    agree(lambda x, w: F.layer_norm(x.transpose(0, 1), (8,), w) + x.mean(0) + x.sum((1, 2))[:, None], [x, w], grad=True, target=target)


PREFIXES = {            # of what differs along fewer axes than what is stored with it
    "one column": lambda x, y: (x.new_ones(8, 1, 3) * 0.3).cumsum(0),
    "between": lambda x, y: (x.new_ones(12, 3, 2, 2) * 0.3).cumsum(1) - 0.7,
    "long": lambda x, y: (x.new_ones(300, 300) * 0.3).cumsum(0) + (x.new_ones(300, 300) * 0.3).cumsum(1),
    "broadcast": lambda x, y: x.cumsum(1)[None] * y,
    "positions": lambda x, y: (x[:, 0].cummax(0)[1][:, None] + y, x.logcumsumexp(0)[:, 0, None] * y),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_along_fewer_axes(name, target):
    """Triton scans registers whose lanes repeat along another dimension wrongly, or not at all."""
    agree(PREFIXES[name], [torch.randn(40, 5), torch.randn(3, 40, 5)], target=target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_of_running_extremes_of_16_bits(dtype, target):
    """The running value that elements are compared with is rounded as they are."""
    x = torch.randn(21, 40).to(dtype)
    along, down = (r.cpu() for r in compiled(lambda x: ((x * 1.37).cummin(1)[1], (x * 1.37).cummax(0)[1]), Seen(), target=target)(*on(target, x)))
    assert torch.equal(along, (x * 1.37).cummin(1)[1]) and torch.equal(down, (x * 1.37).cummax(0)[1])


@pytest.mark.parametrize("columns", [1, 3])
def test_a_call_of_torch_meets_the_traced_strides_along_extents_of_1(columns):
    """They decide how torch adds up a bag, and what it then leaves for backward."""
    places, rows = torch.randint(0, 8, (7, 3)), torch.randn(8, columns, requires_grad=True)
    agree(lambda places, rows: F.embedding_bag(places, rows * 2, mode="sum"), [places, rows], grad=True)


# -- argmax, NaN -------------------------------------------------------------------------------------------------------------
def test_argmax_of_ties_and_strides(target):
    x = torch.randint(0, 3, (33, 70)).float()
    for view in (x, x.t(), x[::2, 1::3], x.flip(1)):
        agree(lambda x: (x.argmax(), x.argmax(0), x.argmax(1), x.argmin(0), x.argmin(1), x.max(1), x.min(0)), [view], target=target)


@pytest.mark.parametrize("shape", [(17, 256), (17, 16, 16), (25, 333)])
def test_argmax_down_columns(shape, target):
    """A fold of pairs, long enough for sums beside it to lie in a buffer."""
    x = torch.randint(-3, 3, shape)
    agree(lambda x: (x.argmax(0), x.min(0), (x * 0.5).sum(0), x.float().argmin(0)), [x], target=target)


@pytest.mark.parametrize("fn", [lambda x: x.max(0), lambda x: x.min(0), torch.max, torch.min, torch.aminmax], ids=lambda f: f.__name__)
def test_the_extreme_of_nothing_raises(fn, target):
    x, = on(target, torch.zeros(0, 3))
    with pytest.raises((IndexError, RuntimeError)) as eager:
        fn(x)
    with pytest.raises(type(eager.value)):
        compiled(lambda x: fn(x + 1), Seen(), target=target)(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_clamps_at_zero_keep_the_sign_of_a_zero(dtype):
    """On a CPU, where eager does."""
    x = torch.tensor([-0.0, 0.0, -1.0, 1.0, NAN] * 8).to(dtype)
    fn = lambda x: [x.relu(), F.relu6(x), x.clamp(min=0), x.clamp(max=0), x.clamp(0, 1), x.clamp_min(-0.0), x.clamp_max(-0.0)]
    for got, want in zip(compiled(fn, Seen())(x), fn(x)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit()[x == x], want.signbit()[x == x])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("policy", ["fast", "eager"])
def test_a_sum_is_never_minus_zero(dtype, policy):
    """Not of one element either."""
    x = torch.tensor([[-0.0], [0.0], [-0.0], [2.0]]).to(dtype)
    fn = lambda x: [x.sum(1), x.sum(1, keepdim=True), x.mean(1), x.cumsum(1), x.nansum(1), x[:1].sum(), x[:1, 0].cumsum(0), x.sum(0)]
    for got, want in zip(compiled(fn, Seen(), policy)(x), fn(x)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(got.signbit(), want.signbit())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers_of_infinities_and_zeros(dtype):
    """On a CPU torch takes roots for powers of a half, but of f16."""
    x = torch.tensor([-INF, INF, -0.0, 0.0, -1.0, 4.0, NAN] * 5).to(dtype)
    fn = lambda x: [x**e for e in (0.5, -0.5, 1.5, 2, 3, -1, -2, 0)]
    for got, want in zip(compiled(fn, Seen())(x), fn(x)):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got.signbit()[want == 0], want.signbit()[want == 0])


@pytest.mark.parametrize("length", [3, 16, 17, 1000])
def test_nan_wins_and_infinities_stay(length, target):
    x = torch.randn(9, length)
    x[0, 0], x[1, -1], x[2, length // 2], x[3, 0], x[4, -1] = NAN, NAN, NAN, INF, -INF
    x[5, 1:3] = NAN
    agree(lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), x.max(0), x.maximum(x.roll(1, 1)), x.clamp(-1, 1), x.relu(), x.sum(1)),
          [x], target=target)


# -- memory ------------------------------------------------------------------------------------------------------------------
def test_reuse_across_types(target):
    def fn(x):
        a = (x * 3).to(torch.bfloat16)
        b = a.sum(1, keepdim=True).to(torch.float64)
        c = (a.to(torch.float64) - b).to(torch.int32)
        return c.to(torch.float32).softmax(1).to(torch.float16), c.sum(0)
    agree(fn, [torch.randn(61, 83)], policy="eager", calls=3, target=target)


def test_duplicates_scattered_then_gathered(target):
    def fn(x, v, i):
        y = x.index_add(0, i, v)
        z = y.scatter_reduce(0, i[:, None].expand(6, 7), v, "amax")
        last = torch.zeros(5, 7).index_put((i,), torch.arange(6.0)[:, None].expand(6, 7))
        return y[i] + 1, z[i.flip(0)], y.index_put((i,), v, accumulate=True)[i].sum(0), last
    agree(fn, [torch.randn(5, 7, requires_grad=True), torch.randn(6, 7, requires_grad=True), torch.tensor([3, 1, 3, 3, 0, 1])], grad=True,
          target=target)


def test_mutated_inputs_and_views(target):
    def fn(x, y):
        old = x.clone()
        x.mul_(2)
        x[1:3].add_(y[0])
        y.t().copy_(x.t() + old.t())
        return old + x, x[0] * 3, y.sum()
    agree(fn, [torch.randn(5, 6), torch.randn(5, 6)], calls=2, target=target)


def test_an_input_that_is_written_after_it_was_read(target):
    def fn(x):
        y = x.flip(0) * 2
        x.copy_(y + x)
        return y, x.sum(0)
    agree(fn, [torch.randn(301, 7)], calls=2, target=target)


def test_writing_an_input_whose_elements_share_memory(target):
    """Eager's writes are seen through every element that lies there; torch runs the graph."""
    def fn(x):
        x[:1].zero_()
        return x * 2, x.sum()
    windows = torch.randn(43).unfold(0, 31, 1)[:8]
    assert "share memory" in agree(fn, [windows], target=target).opaque["the whole graph"]
    assert not agree(fn, [torch.randn(9, 12)[:, 2:9].t()], target=target).opaque


@pytest.mark.parametrize("loss", [F.smooth_l1_loss, F.huber_loss, F.mse_loss, F.l1_loss])
@pytest.mark.parametrize("odd", [NAN, INF])
def test_gradients_of_targets_that_are_no_numbers(loss, odd, target):
    """A target that diverged is not taken for one that is met."""
    x, y = torch.randn(40), torch.randn(40)
    x[3], y[3], y[7] = odd, odd, NAN
    grads = []
    for fn in (loss, kernel(loss, target)):
        mine, other = on(target, x, y)
        mine = mine.clone().requires_grad_()
        grads.append(torch.autograd.grad(fn(mine, other), mine)[0].cpu())
    torch.testing.assert_close(grads[1], grads[0], equal_nan=True)


@pytest.mark.parametrize("show", [lambda x: x.unfold(0, 4, 1), lambda x: x.as_strided((3, 5), (1, 1), 2)])
def test_gradients_of_results_whose_elements_share_memory(show, target):
    """Windows that overlap: each has a gradient of its own, which torch would keep in one place (aot_eager's gradients are wrong)."""
    base, = on(target, torch.randn(9, 7))
    found = []
    for fn in (plain := lambda x: show(torch.sin(x)), kernel(plain, target)):
        x = base.clone().requires_grad_()
        out = fn(x)
        out.backward(torch.arange(out.numel(), dtype=out.dtype, device=out.device).view(out.shape))
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)


def test_aliased_outputs(target):
    def fn(x):
        y = x * 2
        return y, y.view(-1), y[2], y.chunk(3, 1), x, x.t(), y
    x, = on(target, torch.randn(6, 9))
    run = compiled(fn, Seen(), target=target)
    a, flat, row, chunks, same, turned, again = run(x)
    assert same.data_ptr() == x.data_ptr() and turned.data_ptr() == x.data_ptr()
    a.zero_()
    assert not flat.any() and not row.any() and not chunks[1].any() and not again.any()
    agree(fn, [x], target=target)


@pytest.mark.parametrize("fn", [lambda x: ((y := x.clone()), y.t(), y[1:, ::2]), lambda x: ((y := torch.zeros_like(x)).view(-1), y, y[1]),
                                lambda x: ((y := x + 1).clone(), y, y.mT, y[1:].clone()), lambda x: ((y := x + 1).clone()[2], y[1], y[:, ::2])],
                         ids=["clone", "zeros", "behind its copy", "parts behind its copy"])
def test_views_of_a_copy_or_a_constant(fn, target):
    x, = on(target, torch.randn(6, 9))
    want, got = fn(x), compiled(fn, Seen(), target=target)(x)
    for results in (want, got):
        results[0].add_(3)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    agree(fn, [x], target=target)


@pytest.mark.parametrize("grad", [False, True])
def test_a_loss_by_pixel_behind_an_interpolation(grad, target):
    """What a fetched index holds runs along axes that are split."""
    fn = lambda x, t: F.cross_entropy(F.interpolate(x, size=(16, 16), mode="bilinear"), t, ignore_index=2)
    agree(fn, [torch.randn(2, 3, 4, 4).requires_grad_(grad), torch.randint(0, 3, (2, 16, 16))], grad=grad, target=target)


@pytest.mark.parametrize("made", [lambda x: x.sum(1), lambda x: x.softmax(1), lambda x: x.var(1) + 1,
                                  lambda x: (x - x.mean(1, keepdim=True)).square().sum((1, 2))], ids=["sum", "softmax", "variance", "squares"])
@pytest.mark.parametrize("shape", [(33, 2), (33, 3), (34, 4), (65, 3)])
def test_folds_of_few_behind_a_cat(shape, made, target):
    """Cut where its parts meet, each piece has loops of its own, and columns in common."""
    agree(lambda a, b: made(torch.cat([a, b], 0).view(-1, 2, a.shape[1])), on(target, torch.randn(shape), torch.randn(shape)), target=target)


def test_gradients_of_halves_that_are_repeated(target):
    x, = on(target, torch.randn(34, 3))
    agree(lambda x: F.glu(x.repeat_interleave(2, 0), 0), [x.requires_grad_()], grad=True, target=target)


def test_results_stay_as_they_were(target):
    run = compiled(lambda x: ((x + 1).exp(), x.sum(0)), Seen(), target=target)
    kept = [(run(*on(target, torch.full((300, 400), float(n)))), n) for n in range(4)]
    for (big, column), n in kept:
        assert torch.allclose(big.cpu(), torch.full((300, 400), n + 1.0).exp()) and torch.allclose(column.cpu(), torch.full((400,), 300.0 * n))


@pytest.mark.parametrize("fn", [lambda x: x * 1.0, lambda x: (x * 1.0).view(4, 8), lambda x: (x + 1)[3:] * 1.0], ids=["input", "view", "piece"])
def test_what_a_call_reads_begins_where_torch_would_have_put_it(fn, target):
    """At a multiple of 16 bytes, where eager computes it: attention of an input that began elsewhere read a misaligned address on a GPU."""
    seen = []

    def reads(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.data_ptr() % 16)
        return x.clone()
    op = torch.library.custom_op("killers::reads", reads, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    x, = on(target, torch.randn(33))
    run = compiled(lambda x: op(fn(x)) + 1, Seen(), target=target)
    assert torch.equal(run(x[1:]), fn(x[1:]) + 1) and seen == [0]


def large(bytes_needed: int):
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pytest.mark.skipif(free < bytes_needed, reason="not enough memory")


@large(8 << 30)
def test_more_elements_than_31_bits_count(target):
    long((2**31,), target)
    size = 2**31 + 37
    x = torch.zeros(size, dtype=torch.int8)
    x[-1], x[2**31 + 3] = 5, -2
    x, = on(target, x)
    run = compiled(lambda x: (x.amax(), x.amin(), x.argmax(), x[-40:] * 2, (x != 0).sum()), Seen(), target=target)
    top, low, where, end, count = run(x)
    assert (top.item(), low.item(), where.item(), count.item()) == (5, -2, size - 1, 2) and end[-1].item() == 10 and end[6].item() == -4
    gc.collect()


# -- errors ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fn", [lambda x, i: x[i] * 2, lambda x, i: x.index_select(0, i) + 1, lambda x, i: F.embedding(i, x) * 2,
                                lambda x, i: x.gather(0, i[:, None]) - 1, lambda x, i: x.index_add(0, i, x[:3]), lambda x, i: F.pad(x, (1, 1))[i]],
                         ids=["index", "index_select", "embedding", "gather", "index_add", "padded"])
@pytest.mark.parametrize("bad", [9, 2**40, -10])
def test_an_index_out_of_range_raises(fn, bad, target):
    run = kernel(fn, target=target)
    x, good, wrong, again = on(target, torch.randn(9, 4), torch.tensor([0, 1, 8]), torch.tensor([0, bad, 1]), torch.tensor([2, 3, 4]))
    run(x, good)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        fn(x.cpu(), wrong.cpu())
    with pytest.raises(type(eager.value), match="test_killers.py"):
        run(x, wrong)
    run(x, again)


REFUSED = {
    "mask": (lambda x: x.masked_fill(x > 2, -300), torch.int8), "half": (lambda x: x.masked_fill(x > 2, -1e9), torch.float16),
    "clamp": (lambda x: x.clamp(0, 70000), torch.int16), "fill": (lambda x: x.new_full((3,), 300) + x[:3], torch.uint8),
    "pad": (lambda x: F.pad(x, (1, 1), value=-1), torch.uint8), "factor": (lambda x: torch.add(x, x, alpha=300), torch.int8),
    "large": (lambda x: x.clamp(max=1e39), torch.float32), "power": (lambda x: x ** -1, torch.int32),
    "index": (lambda x: x.index_fill(0, x[:1].long(), 300), torch.int8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_number_that_does_not_fit_its_type_raises(name, target):
    fn, dtype = REFUSED[name]
    x, = on(target, torch.arange(5).to(dtype))
    with pytest.raises(RuntimeError) as eager:
        fn(x)
    with pytest.raises(RuntimeError) as ours:
        compiled(lambda x: fn(x + 0), Seen(), target=target)(x)
    assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_numbers_that_fit_stay_in_the_kernel(target):
    """Infinities fit every floating type; numbers beside tensors are wrapped."""
    x = torch.arange(5)
    seen = agree(lambda x: (x.half().masked_fill(x > 2, -INF), (x + 1).half().clamp(-65504, 65504), x.to(torch.int8) + 300,
                            x.bool().masked_fill(x > 1, 5)),
                 [x], target=target)
    assert not seen.opaque


def test_negative_bounds_of_unsigned_values(target):
    """What these are depends on the version of torch, which makes the call."""
    agree(lambda x: (x.clamp(-1, 3), x.clamp(min=-1) + 1), [torch.tensor([0, 1, 5, 255], dtype=torch.uint8)], target=target)


@pytest.mark.parametrize("fn", [lambda x, y: x // y, lambda x, y: x % y, lambda x, y: torch.div(x, y, rounding_mode="trunc"), torch.fmod])
def test_integer_division_by_zero_raises(fn, target):
    run = kernel(lambda x, y: fn(x, y) + 1, target=target)
    x, y = on(target, torch.arange(-20, 21), torch.full((41,), 3))
    torch.testing.assert_close(run(x, y), fn(x, y) + 1)
    y[17] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(x, y)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_nothing_is_divided_by_zero_where_there_are_no_elements(shape, target):
    x = torch.zeros(shape, dtype=torch.int64)
    agree(lambda x: (x % (x + 1), x // x, torch.fmod(x, x.abs()).sum()), [x], target=target)


def test_the_least_integer_over_minus_one_does_not_trap(target):
    least, minus = on(target, torch.tensor([-2**31] * 20, dtype=torch.int32), torch.full((20,), -1, dtype=torch.int32))
    run = compiled(lambda x, y: (x // y, x % y), Seen(), target=target)
    run(least, minus)


# -- accuracy ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape, dim", [((1, 3_000_000), 1), ((3_000_000, 2), 0), ((3_000_000,), 0)])
def test_large_sums_keep_their_digits(shape, dim, target):
    long(shape, target)
    x, = on(target, torch.rand(shape))
    exact = x.double().sum(dim)
    got = compiled(lambda x: x.sum(dim), Seen(), target=target)(x)
    assert ((got.double() - exact).abs() / exact).max() < 1e-6
    exact = x.double().var(dim)
    got = compiled(lambda x: x.var(dim), Seen(), target=target)(x)
    assert ((got.double() - exact).abs() / exact).max() < 1e-5


@pytest.mark.parametrize("length", [24, 1000, 3000])
def test_a_row_of_equal_values_has_no_variance(length, target):
    """A mean that is off by a last place is multiplied by 1/sqrt(eps)."""
    x, = on(target, torch.full((3, length), 1001.0))
    assert not compiled(lambda x: F.layer_norm(x, (length,)), Seen(), target=target)(x).any()


def test_a_bfloat16_sum_is_carried_wide(target):
    x, = on(target, torch.ones(100_000, dtype=torch.bfloat16))
    assert compiled(lambda x: (x * 1.0).sum(dtype=torch.float32), Seen(), target=target)(x).item() == 100_000


# -- callers -----------------------------------------------------------------------------------------------------------------
def test_several_threads_call_one_function(target):
    def fn(x, i):
        return (x * 2).softmax(1), x.sum(0), x[i].cumsum(0)
    run = compiled(fn, Seen(), target=target)
    given = [on(target, torch.randn(200, 300) + n, torch.randint(0, 200, (50,))) for n in range(6)]
    run(*given[0])
    wrong: list = []

    def work(x, i):
        for _ in range(2 if target == "interpret" else 20):
            for got, want in zip(run(*twins([x, i])), fn(x, i)):
                if not torch.allclose(got, want, rtol=1e-4, atol=1e-4):
                    wrong.append((got, want))
    in_threads(work, given)
    assert not wrong


def write_flat(x):
    """Writes all but the first element, through a flat view."""
    y = x * 1.1
    y.flatten(0)[1:].sub_(0.3)
    return x.argmax(0), y


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fn, shape", [
    (lambda x: (x - x.roll(-1, -1), x.mean(0)), (3, 130)), (lambda x: (F.pad(x[..., 1:], (1, 0)), x.amax(0)), (2, 3, 50)),
    (lambda x: (torch.where(torch.arange(x.shape[-1], device=x.device) == 0, 0.0, x), x.sum(0)), (3, 130)),
    (lambda x: (torch.cat([x[..., :1], x[..., 1:] * 2], -1), x.logsumexp(0)), (4, 64)), (write_flat, (2, 2, 7, 3))],
    ids=["rolled", "padded", "where", "joined", "flat"])
def test_a_fold_along_the_loop_of_another_store_that_has_ends(fn, shape, threads, target):
    """The loop's name is not the fold's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agree(fn, [torch.randn(shape)], cache_dir=cache(), target=target)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fn, shape, places", [
    (lambda w, i: torch.softmax(w[i], 1), (9, 3), (7, 5)), (lambda w, i: torch.softmax(w[i], 1), (50, 2), (30, 3)),
    (lambda w, i: w.double()[i] - w.double()[i].mean(1, keepdim=True), (9, 3), (7, 5))])
def test_columns_of_tiles_of_fewer_elements_than_threads(fn, shape, places, target):
    agree(fn, [torch.randn(shape), torch.randint(0, shape[0], places)], cache_dir=cache(), target=target)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_goes_on(target):
    if target == "cuda":
        pytest.skip("CUDA does not live on in a child")
    run = compiled(lambda x: (x.exp().sum(1), x + 1), Seen(), target=target)
    x = torch.randn(500, 400)
    want = run(x)[0]
    child = os.fork()
    if not child:
        os._exit(0 if torch.allclose(run(x)[0], want) else 1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert status == 0
