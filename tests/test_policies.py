"""The three policies of numbers: what is rounded where, and which sums may change their order. Whole compiles and regions."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.traceback import annotate

import tokamak
from tests.compiled.conftest import INTERPRETED


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(fn, policy="fast", **options):
    torch._dynamo.reset()
    return tokamak.compile(fn, policy=policy, strict=True, cache_dir="", **options)


def bits(a, b):
    """Are these equal bit for bit (NaN is NaN)?"""
    if isinstance(a, (tuple, list)):
        return all(bits(x, y) for x, y in zip(a, b, strict=True))
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)


def chain(x, y):
    a = x * y
    b = a + x
    c = b * 1.3 - a
    d = torch.where(c > 0.5, c / (y + 2), a.abs() * 0.7)
    return d, a.float() * y + 1, torch.addcmul(d, a, b, value=0.5)


# -- eager ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["eager", "strict"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_chains_round_as_eager(policy, dtype):
    x, y = torch.randn(2, 33, 31).to(dtype)
    got, want = compiled(chain, policy)(x, y), chain(x, y)
    assert bits(got[:2], want[:2])
    torch.testing.assert_close(got[2], want[2])        # one operation of eager: its own order of roundings


def test_a_product_is_rounded_before_it_is_added():
    x, y, z = torch.randn(3, 4096)
    assert bits(compiled(lambda x, y, z: x * y + z, "eager")(x, y, z), x * y + z)


def test_gradients_round_as_eager():
    grads = []
    x, y = torch.randn(2, 500).bfloat16()
    for fn in (compiled(lambda x, y: (x * y + x) * y, "eager"), lambda x, y: (x * y + x) * y):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        fn(a, b).backward(x)
        grads.append((a.grad, b.grad))
    assert bits(*grads)


@pytest.mark.parametrize("policy", ["eager", "strict"])
def test_random_numbers_are_torchs(policy):
    def fn(x):
        return nn.functional.dropout(x, 0.3) + torch.rand_like(x), torch.randn(5), torch.bernoulli(x.sigmoid())
    x = torch.randn(40, 10)
    torch.manual_seed(3)
    want = fn(x)
    torch.manual_seed(3)
    assert bits(compiled(fn, policy)(x), want)


# -- fast ----------------------------------------------------------------------------------------------------------------
def test_fast_leaves_roundings_of_its_own_out_and_never_a_casts():
    x, y = torch.randn(2, 1000).bfloat16()
    got = compiled(lambda x, y: x * y + x)(x, y)
    assert bits(got, (x.float() * y.float() + x.float()).bfloat16())
    assert not bits(got, x * y + x)
    wide, other = torch.randn(2, 1000)
    assert bits(compiled(lambda x, y: (x * y).bfloat16().float())(wide, other), (wide * other).bfloat16().float())
    assert bits(compiled(lambda x: x.half().float() * 3)(wide), wide.half().float() * 3)


def test_all_readers_of_a_stored_value_see_it_rounded():
    x, y = torch.randn(2, 64, 50).bfloat16()

    def stored(x, y):
        p = (x * y).sin()
        return p, p * 3 + y, p.float().sum(1), p @ y.t()
    p, q, s, m = compiled(stored)(x, y)
    assert bits(compiled(lambda p, y: p * 3 + y)(p, y), q)
    torch.testing.assert_close(p.float().sum(1), s, rtol=1e-6, atol=1e-5)
    assert bits(p @ y.t(), m)


def test_a_value_is_rounded_before_it_is_compared_picked_quantised_or_used_as_an_index():
    x, y = torch.randn(2, 200, 40).bfloat16()
    table = torch.arange(100.0)

    def fn(x, y):
        p = x * y * 8
        picked = table[(p.clamp(-5, 5) + 6).long()]
        return p > 2, p == p.round(), p.argmax(1), p.to(torch.int32), p.floor(), picked, torch.sign(x * y - 0.5), p.max(1)[1]
    eager_p = (x.float() * y.float() * 8).bfloat16()       # one rounding: of the value that is looked at
    got = compiled(fn)(x, y)
    want = (eager_p > 2, eager_p == eager_p.round(), eager_p.argmax(1), eager_p.to(torch.int32), eager_p.floor())
    assert bits(got[:5], want)
    assert bits(got[7], eager_p.max(1)[1])


# -- strict --------------------------------------------------------------------------------------------------------------
def norms(z, w):
    centred = z - z.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
    return normed, z.softmax(-1), z.sum(-1), (z * w).logsumexp(-1), z.cumsum(-1), normed.amax(-1)


@pytest.mark.parametrize("width", [5, 64, 1003, 20000])
def test_strict_gives_a_row_the_same_bits_alone_and_in_a_batch(width):
    z, w = torch.randn(33, width), torch.randn(width)
    fn = compiled(norms, "strict")
    whole = fn(z, w)
    for rows in (1, 2, 17):
        assert bits(compiled(norms, "strict")(z[:rows].clone(), w), tuple(t[:rows] for t in whole))
    assert bits(compiled(norms, "strict", dynamic=True)(z[:9].clone(), w), tuple(t[:9] for t in whole))


LAID = {"rows": lambda x: x.clone(), "columns": lambda x: x.t().contiguous().t(), "every other": lambda x: torch.stack([x, x], -1)[..., 0]}


@pytest.mark.parametrize("target", ["", pytest.param("interpret", marks=INTERPRETED)])
@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("width", [7, 300, 1024])
def test_strict_does_not_look_at_the_size_of_a_batch_however_it_lies(target, laid, width):
    """Whether a batch is a multiple of a word, or of a tile, said how columns of it are summed, and where prefixes of 16 MiB begin their lines."""
    def fn(x):
        return F.layer_norm(x, (width,)), (x * x).sum(-1), x.cumsum(-1), x.cumprod(-1).amax(-1), x.flip(-1).cumsum(-1), x.var(-1), x.logsumexp(-1)
    z = torch.randn(67, width)
    whole = compiled(fn, "strict", target=target, dynamic=False)(LAID[laid](z))
    for rows in (2, 5, 16, 64):
        torch._dynamo.reset()
        assert bits(compiled(fn, "strict", target=target, dynamic=False)(LAID[laid](z[:rows])), tuple(t[:rows] for t in whole)), rows


@INTERPRETED
def test_strict_combines_halves_of_a_tile():
    """An order of the kernel's own: Triton's depends on the number of threads, and on where memory begins."""
    x, run = torch.randn(5, 256), lambda fn: compiled(fn, "strict", target="interpret", dynamic=False)(x)
    total, prefixes = x, x
    while total.shape[1] > 1:
        total = total[:, :total.shape[1] // 2] + total[:, total.shape[1] // 2:]
    for n in (2 ** k for k in range(8)):
        first, second = prefixes.unflatten(1, (-1, 2, n)).unbind(2)
        prefixes = torch.stack([first, first[..., -1:] + second], 2).flatten(1)
    assert bits(run(lambda x: x.sum(-1)), total[:, 0]) and bits(run(lambda x: x.cumsum(-1)), prefixes)


def test_strict_scans_alike_however_much_is_written():
    z = torch.randn(900, 5000)
    assert bits(compiled(lambda x: x.cumsum(-1), "strict")(z)[:9], compiled(lambda x: x.cumsum(-1), "strict", dynamic=False)(z[:9].clone()))


@pytest.mark.parametrize("dim", [0, 1, (0, 2), (1, 2)])
def test_strict_is_independent_of_a_batch_in_any_place(dim):
    def fn(x):
        return x.sum(dim), (x * x).mean(dim), x.exp().amax(dim)
    x = torch.randn(37, 40, 24)
    batch = next(d for d in range(3) if d not in (dim if isinstance(dim, tuple) else (dim,)))
    whole = compiled(fn, "strict")(x)
    part = compiled(fn, "strict")(x.narrow(batch, 0, 3))
    kept = [d for d in range(3) if d not in (dim if isinstance(dim, tuple) else (dim,))].index(batch)
    assert bits(part, tuple(t.narrow(kept, 0, 3) for t in whole))


@pytest.mark.parametrize("fn, shape", [(lambda x: x.mean((2, 4)), (6, 5, 8, 4, 11)), (lambda x: x.softmax(-1).sum(1), (5, 200, 33))],
                         ids=["windows", "rows, then columns"])
def test_strict_gives_the_same_bits_where_sizes_are_symbolic(fn, shape):
    x = torch.rand(shape)
    assert bits(compiled(fn, "strict", dynamic=True)(x), compiled(fn, "strict")(x))


def test_strict_does_not_depend_on_the_number_of_threads():
    z = torch.randn(300, 1000, requires_grad=True)
    w = torch.randn(1000, requires_grad=True)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            z.grad = w.grad = None
            outs = compiled(lambda z, w: (*norms(z, w), z.sum(), z.sum(0)), "strict")(z, w)
            sum(o.square().sum() for o in outs).backward()
            found.append([t.detach() for t in (*outs, z.grad, w.grad)])
    finally:
        torch.set_num_threads(before)
    assert bits(*found)


def test_strict_lists_the_calls_that_promise_no_order():
    from tokamak.tools.record import recording
    with recording() as recorder:
        compiled(lambda x: (x @ x).relu() + x.sort()[0], "strict")(torch.randn(6, 6))
    assert [c.target for c in recorder.graphs[0].values["strict"]] == [torch.ops.aten.mm.default]


# -- regions -------------------------------------------------------------------------------------------------------------
def test_a_region_rounds_as_eager_within_a_fast_program():
    x, y = torch.randn(2, 1000).bfloat16()

    def marked(x, y):
        p = x * y + x
        with annotate({"tokamak_policy": "eager"}):
            q = p * y + x
            r = q * 1.3 - y
        return r * y + x
    p = (x.float() * y.float() + x.float()).bfloat16()      # rounded where the region reads it, and not within
    r = (p * y + x) * 1.3 - y
    assert bits(compiled(marked)(x, y), (r.float() * y.float() + x.float()).bfloat16())


def test_a_regions_backward_belongs_to_it():
    x, y = torch.randn(2, 1000).bfloat16()

    def fn(x, y):
        return (x * y * 1.3).relu() * y * 0.7       # one path: where gradients of two meet, torch adds them outside of any region

    def marked(x, y):
        with annotate({"tokamak_policy": "eager"}):
            return fn(x, y)
    grads = []
    for f in (compiled(marked), fn, compiled(fn)):
        a = x.clone().requires_grad_()
        f(a, y).backward(y)
        grads.append(a.grad)
    assert bits(grads[0], grads[1]) and not bits(grads[2], grads[1])


def test_a_region_draws_torchs_numbers():
    def fn(x):
        with annotate({"tokamak_policy": "eager"}):
            return torch.rand_like(x)
    x = torch.randn(50)
    torch.manual_seed(5)
    want = torch.rand_like(x)
    torch.manual_seed(5)
    assert bits(compiled(fn)(x), want)


def test_an_unknown_mark_is_refused():
    def fn(x):
        with annotate({"tokamak_policy": "eagre"}):
            return x + 1
    with pytest.raises(Exception, match="tokamak_policy='eagre': one of 'fast', 'eager', 'strict'; did you mean 'eager'"):
        compiled(fn)(torch.ones(3))
