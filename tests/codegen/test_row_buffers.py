"""What loops of one iteration share lies in row buffers: which values, and how much memory they take."""
import pytest
import torch

import tokamak
from tests.compiled.harness import agree
from tokamak.backend import compile_graph
from tokamak.capture import aot
from tokamak.codegen.kernel import Fetch
from tokamak.codegen.c_loop import loops_of, statements_of


def phase(fn, *inputs):
    """The one phase of the one kernel that `fn` becomes."""
    seen = {}

    def one(graph, inputs, kind):
        return compile_graph(graph, inputs, tokamak.Options(), lambda stage, value: seen.setdefault(stage, value), kind)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=lambda gm, inputs: aot.autograd(gm, inputs, one))(*inputs)
    kernel, = seen["lower"].kernels.values()
    made, = kernel.phases
    return made


def factors(index) -> int:
    """Factors of a product of sizes."""
    (atoms, _), = index.terms.items()
    return len(atoms)


def test_a_buffer_holds_one_row_of_the_loops_around_all_its_uses():
    """Slopes are one a head, so that a head is an iteration, with loops over batch and rows in it: each row is done before the next begins."""
    def fn(x):
        slopes = torch.exp2(-torch.arange(1, 5, dtype=torch.float32))
        return (x + slopes[:, None, None] * torch.arange(48)).softmax(-1)
    x = torch.randn(3, 4, 40, 48)
    made = phase(fn, x)
    assert len(made.parallel) == 1 and made.buffers
    assert all(factors(b.size) == 1 for b in made.buffers)
    agree(fn, [x])


def test_columns_summed_side_by_side_have_a_buffer_each_row():
    """Long sums over a middle axis, in a loop over an outer one."""
    fn = lambda x, y: torch.tanh(x.sum(2) * y) * y
    agree(fn, [torch.randn(2, 3, 600, 80), torch.randn(2, 3, 80)])


def test_what_is_gathered_lane_by_lane_is_gathered_once():
    """Three loops of a softmax need the bias, which a table has for each position."""
    fn = lambda x, table, index: (x + table[:, index]).softmax(-1)
    inputs = [torch.randn(2, 4, 40, 48), torch.randn(4, 95), torch.arange(40)[:, None] - torch.arange(48) + 47]
    assert sum(isinstance(s, Fetch) for s in statements_of(phase(fn, *inputs).body)) == 1
    agree(fn, inputs)


def test_a_gathered_value_that_does_not_differ_between_lanes_is_read_again():
    """A row of an embedding, whose index is one number: no buffer is cheaper than the table's own row."""
    fn = lambda table, tokens: torch.layer_norm(table[tokens], (48,))
    made = phase(fn, torch.randn(20, 48), torch.randint(0, 20, (6, 7)))
    assert not made.buffers


@pytest.mark.parametrize("other", [96, 200], ids=["alike", "apart"])
def test_statistics_of_two_tensors_both_run_along_lanes(other):
    """A plane's statistics in the place of another plane's, of the same or another size: no loop goes element by element."""
    def fn(x, y):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * y.std(-1, keepdim=True) + y.mean(-1, keepdim=True)
    x, y = torch.randn(20, 96), torch.randn(20, other)
    loops = list(loops_of(phase(fn, x, y).body))
    assert len(loops) > 3 and all(loop.vector for loop in loops)
    agree(fn, [x, y], grad=True)


def test_a_product_of_two_rows_has_one_axis_along_lanes():
    """Both axes are in one sum, so that only one of them can fill registers."""
    fn = lambda x, y: ((x[:, :, None] * y[:, None, :]).tanh().sum((1, 2)), y.sum(1), x.sum(1))
    agree(fn, [torch.randn(8, 40), torch.randn(8, 40)])
