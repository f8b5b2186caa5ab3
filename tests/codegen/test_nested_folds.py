"""Folds over rows and over planes of one read, in one kernel."""
import pytest
import torch
import torch.nn.functional as F

import tokamak
from tests.compiled.harness import agree


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("batch", [2, 9])
def test_a_mean_per_image_of_a_batch_norm(layout, batch):
    """Sums over everything, then sums for each image: the partial results of every image must have room."""
    def fn(x):
        y = F.silu(F.batch_norm(x, None, None, training=True))
        return y.mean((2, 3), keepdim=True)
    x = torch.randn(batch, 16, 9, 8).to(memory_format=layout)
    torch._dynamo.reset()
    torch.testing.assert_close(tokamak.compile(fn, strict=True)(x), fn(x))


def test_an_index_gathered_by_each_row_scatters():
    """top-k's backward: every row writes to columns of its own choice; rows are many, so they would run along lanes."""
    values, index = torch.randn(64, 2), torch.randn(64, 4).topk(2, 1).indices
    fn = lambda v, i: torch.zeros(64, 4).scatter(1, i, v)
    torch._dynamo.reset()
    torch.testing.assert_close(tokamak.compile(fn, strict=True)(values, index), fn(values, index))


def test_a_buffered_value_is_read_behind_where_it_is_made():
    """A store enters the loop of a fold that ran before its costly value was put into a buffer."""
    def fn(x, y, s, c):
        t = F.softplus(s)
        a = (x * y).sum(-1)
        return x * t[..., None], a * t, (t * c).sum((1, 2))
    for h, n, m, p in ((8, 2, 12, 8), (5, 4, 4, 100)):
        assert agree(fn, [torch.randn(h, n, m, p), torch.randn(h, n, m, p), torch.randn(h, n, m), torch.randn(h, n, m)]).kernels == 1


def test_rows_are_summed_by_the_kernel_of_their_statistics():
    """A mean over positions behind a norm of each: the sums lie in a buffer while row after row passes, in f64 after every 128 rows."""
    norm = lambda x: F.layer_norm(x, x.shape[-1:])
    fns = (lambda x: norm(x).mean(1), lambda x: (norm(x), norm(x).amax(1)), lambda x: norm(norm(x).mean(1)),
           lambda x: (norm(x).sum(1), x.exp().mean(-1).sum(1)), lambda x: (x - x.logsumexp(-1, True)).logsumexp(1))
    for fn in fns:
        assert agree(fn, [torch.randn(3, 300, 24)]).kernels == 1
    assert agree(fns[1], [torch.randn(2, 17, 33)]).kernels == agree(fns[0], [torch.randn(2, 17, 33)], policy="strict").kernels == 1
    agree(lambda x: x.softmax(-1).sum(0), [torch.randn(9, 40, 24)])         # whose rows of one iteration lie apart


def test_sums_over_rows_do_not_take_a_norm_backward_apart():
    """The gradient of a mean is the same for all rows: sums of it, and partial results, close no loop that a store still needs."""
    fn = lambda x, w, b: F.layer_norm(x, (24,), w, b).mean(1)
    assert agree(fn, [torch.randn(s, requires_grad=True) for s in ((5, 17, 24), (24,), (24,))], grad=True).kernels == 2
