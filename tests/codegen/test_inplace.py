"""Mutated inputs: the kernel that computes the new value writes it where the input lies, when nobody can see the difference."""
import pytest
import torch

import tokamak
from tokamak.runtime.program import Alloc, Copy
from tokamak.tools.record import Recorder


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def steps_of(fn, *args, calls: int = 2) -> list:
    """The program's steps of `fn`, whose results and mutated arguments are eager's over some calls."""
    recorder = Recorder()
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    compiled = tokamak.compile(fn, strict=True, recorder=recorder, cache_dir="")
    for _ in range(calls):
        torch.testing.assert_close(compiled(*mine), fn(*theirs))
        for a, b in zip(mine, theirs):
            torch.testing.assert_close(a, b)
            assert a._version > 0 or b._version == 0
    return [s for g in recorder.graphs for s in g.values["program"].steps]


def count(steps, kind) -> int:
    return sum(isinstance(s, kind) for s in steps)


def adam(p, g, m, v):
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(0.01 * m / (v.sqrt() + 1e-8))


@pytest.mark.parametrize("shape", [(1000,), (33, 17), (1,)])
def test_adam_runs_in_place(shape):
    p, g, m = (torch.randn(shape) for _ in range(3))
    steps = steps_of(adam, p, g, m, torch.rand(shape))
    assert count(steps, Copy) == 0 and count(steps, Alloc) == 0


def test_an_old_value_read_at_other_places_is_kept():
    def fn(x):
        x.copy_(x.flip(0) + 1)
    assert count(steps_of(fn, torch.randn(100, 3)), Copy) == 1


def test_an_old_value_that_is_read_later_is_kept():
    def fn(x, w):
        old = x.clone()
        x.mul_(2)
        return torch.cumsum(old, 0) + w
    steps_of(fn, torch.randn(64), torch.randn(64))


def test_a_result_of_the_program_has_memory_of_its_own():
    def fn(x):
        x.add_(1)
        return x * 1, x + 0
    x = torch.randn(100)
    steps_of(fn, x)
    torch._dynamo.reset()
    outs = tokamak.compile(fn, strict=True)(x)
    before = [o.clone() for o in outs]
    x.zero_()
    torch.testing.assert_close(list(outs), before)


def test_swapped_inputs():
    def fn(x, y):
        old = x.clone()
        x.copy_(y + 1)
        y.copy_(old * 2)
    steps_of(fn, torch.randn(200), torch.randn(200))


def test_a_saved_tensor_that_is_written_is_noticed():
    p = torch.randn(50, requires_grad=True)
    loss = (p * p).sum()

    @tokamak.compile
    def step(t):
        t.add_(1)
    with torch.no_grad():
        step(p)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors():
    with torch.inference_mode():
        x = torch.randn(50)
        want = x + 1

        @tokamak.compile
        def step(t):
            t.add_(1)
        step(x)
        torch.testing.assert_close(x, want)


def statistics(x, mean):
    mine = x.mean((0, 2))
    mean.mul_(0.9).add_(mine, alpha=0.1)
    return (x - mine[:, None]) * 2


def test_running_statistics_are_written_where_they_lie():
    assert count(steps_of(statistics, torch.randn(7, 5, 33), torch.randn(5)), Copy) == 0


def test_batchnorm_moves_its_statistics_in_place():
    x, mean, var = torch.randn(4, 6, 5, 5), torch.zeros(6), torch.ones(6)
    steps = steps_of(lambda x, m, v: torch.nn.functional.batch_norm(x, m, v, training=True), x, mean, var)
    assert count(steps, Copy) == 0


def test_statistics_that_the_rows_read_are_kept():
    """Rows read the old mean while another row may have stored the new one."""
    def fn(x, mean):
        out = x - mean
        mean.copy_(x.mean(0) + mean)
        return out
    assert count(steps_of(fn, torch.randn(300, 40), torch.randn(40)), Copy) == 1


def test_statistics_that_a_fold_reads_are_kept():
    def fn(x, mean):
        mean.copy_(((x - mean) ** 2).sum(0))
    assert count(steps_of(fn, torch.randn(300, 40), torch.randn(40)), Copy) == 1


def test_statistics_overwritten_without_a_look():
    def fn(x, total):
        total.copy_(x.sum(0) + 1)
        return x * 2
    steps_of(fn, torch.randn(300, 40), torch.randn(40))


# -- scatters: rows of a cache -------------------------------------------------------------------------------------------------
AT, ROWS = torch.tensor([3, 1]), (torch.randn(2, 8), torch.randn(2, 8))


def test_a_row_of_a_cache_is_all_that_is_written():
    def fn(cache, x, at):
        cache.index_copy_(0, at, torch.tanh(x))
        return cache @ x.t(), cache.sum(1)
    steps = steps_of(fn, torch.randn(16, 8), torch.randn(2, 8), AT)
    assert count(steps, Copy) == 0 and count(steps, Alloc) == 1


def test_a_cache_with_axes_of_one():
    def fn(cache, x, at, q):
        cache.index_copy_(2, at, x * 2)
        return torch.nn.functional.scaled_dot_product_attention(q, cache, cache)
    steps = steps_of(fn, torch.randn(1, 2, 16, 8), torch.randn(1, 2, 1, 8), torch.tensor([5]), torch.randn(1, 2, 1, 8))
    assert count(steps, Copy) == 0 and count(steps, Alloc) == 0


def test_sums_into_an_input():
    def fn(total, x, at):
        total.index_add_(0, at, x.exp())
        return total * 2
    assert count(steps_of(fn, torch.randn(16, 8), torch.randn(4, 8), torch.tensor([3, 1, 3, 3])), Copy) == 0


@pytest.mark.parametrize("fn", [
    lambda cache, x, at: cache.index_copy_(0, at, cache[4:6] * 2).sum(),                            # the update reads the cache
    lambda cache, x, at: cache.index_copy_(0, at.clamp(max=1) + (cache[0, :2] > 9).long(), x).sum(),        # where it goes does
    lambda cache, x, at: (cache.clone(), cache.index_copy_(0, at, x))[0].cumsum(0) + 1,             # the old value is read later
    lambda cache, x, at: cache.index_copy_(0, at, x)[:2].clone(),
    lambda cache, x, at: (cache.index_copy_(0, at, x) + 0).t().contiguous(),
    lambda cache, x, at: cache.index_copy_(0, at, x).index_copy_(0, at + 1, x).sum(0),              # two of them
    lambda cache, x, at: cache.index_copy_(0, at, x).mul_(2).sum(0),
    lambda cache, x, at: torch.view_as_complex(cache.index_copy_(0, at, x).view(16, 4, 2)).real.sum(0),
    lambda cache, x, at: cache.scatter_reduce_(0, at[:, None].expand(2, 8), x, "amax").sum(0),
    lambda cache, x, at: torch.ops.aten.alias(cache.index_copy_(0, at, x)).sort(0)[0],
])
def test_what_else_is_made_of_a_written_cache(fn):
    steps_of(fn, torch.randn(16, 8), torch.randn(2, 8), AT)


def test_a_slice_of_a_cache_is_returned():
    def fn(cache, x, at):
        cache.index_copy_(0, at, x)
        return cache[2:4], cache
    compiled, cache, x = tokamak.compile(fn, strict=True), torch.randn(16, 8), torch.randn(2, 8)
    for _ in range(2):
        part, whole = compiled(cache, x, AT)
        assert whole is cache and part.data_ptr() == cache[2:4].data_ptr() and torch.equal(cache[AT], x)


def test_an_index_out_of_range_raises():
    compiled = tokamak.compile(lambda cache, x, at: cache.index_copy_(0, at, x).sum(), strict=True)
    cache, x = torch.zeros(16, 8), torch.ones(2, 8)
    compiled(cache, x, AT)
    with pytest.raises(IndexError):
        compiled(cache, x, torch.tensor([3, 16]))
