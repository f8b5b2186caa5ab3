"""Equal calls of a traced graph are found as torch's own function finds them."""
import operator
import subprocess
import sys

import pytest
import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

from tokamak.capture import equal


def twice(x, y):
    """Equal calls of several kinds, and what only looks equal."""
    a, b = (x + y).sin(), (x + y).sin()
    one, true = x * 1, x * 1.0
    split, again = torch.split(x, 2), torch.split(x, 2)
    return a + b, one + true, split[0] + again[1], torch.cat([a, b]).sum(), x.mean([0]) + x.mean([0])


def drawn(x, y):
    return torch.bernoulli(x.sigmoid()) + torch.bernoulli(x.sigmoid()), torch.rand_like(y) * torch.rand_like(y)


def written(x, y):
    """A value that is read before and behind a write."""
    before = x.sin() + y
    x.copy_(y.cos())
    return before * y.cos(), (x.sin() + y) * y.cos()


def returned(x, y):
    """Two results that have been computed alike are two."""
    return x.exp(), x.exp(), x.exp() + 1


def views(x, y):
    return x.view(-1) + x.view(-1), torch.empty(4) + torch.empty(4), torch.full((4,), float("inf")) + torch.full((4,), float("inf"))


@pytest.mark.parametrize("fn", [twice, drawn, written, returned, views], ids=lambda fn: fn.__name__)
def test_calls_are_one_where_torch_finds_them_so(fn, monkeypatch):
    graph = make_fx(fn, tracing_mode="fake")(torch.rand(4, 4), torch.rand(4, 4)).graph
    want = str(fx_graph_cse(graph))
    monkeypatch.setattr(equal.compile_utils, "fx_graph_cse", None)
    assert str(equal.equal_calls_once(graph)) == want


DRAWS = {
    "gumbel": lambda x: torch.nn.functional.gumbel_softmax(x), "uniform": lambda x: x * torch.empty_like(x).uniform_(),
    "normal": lambda x: x * torch.empty_like(x).normal_(), "exponential": lambda x: x * torch.empty_like(x).exponential_(),
    "geometric": lambda x: x * torch.empty_like(x).geometric_(0.1), "randint": lambda x: x * torch.randint_like(x, 1000),
    "rrelu": lambda x: torch.nn.functional.rrelu(-x, training=True)}


@pytest.mark.parametrize("policy", ["fast", "eager"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_two_draws_of_a_training_step_are_two(draw, policy):
    """Torch's own rules do not know that these draw."""
    x = torch.ones(40, requires_grad=True)
    fn = torch.compile(lambda x: (draw(x), draw(x)), backend="tokamak", options={"policy": policy})
    torch.manual_seed(0)
    one, other = fn(x)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    draw(x), draw(x)
    assert not torch.equal(one, other)
    assert policy == "fast" or torch.equal(state, torch.get_rng_state())


def test_draws_are_kept_where_the_rest_is_left_to_torch():
    graph = fx.Graph()
    x = graph.placeholder("x")
    own = graph.call_function(torch.sin, (x,))
    draws = [graph.call_function(torch.ops.aten.uniform.default, (x,)) for _ in range(2)]
    graph.output((own, *draws))
    assert sum(n.target is torch.ops.aten.uniform.default for n in equal.equal_calls_once(graph).nodes) == 2


@pytest.mark.parametrize("target", [operator.neg, torch.sin])
def test_other_functions_are_left_to_torch(target):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, (x,)), graph.call_function(target, (x,))))
    assert str(equal.equal_calls_once(graph)) == str(fx_graph_cse(graph))


def test_a_training_step_does_not_import_inductor():
    step = "\n".join(("import sys, torch, tokamak", "x = torch.randn(8, 8, requires_grad=True)",
                      "tokamak.compile(lambda x: torch.softmax(x.sin(), -1), strict=True)(x).sum().backward()",
                      "assert 'torch._inductor.lowering' not in sys.modules"))
    subprocess.run([sys.executable, "-c", step], check=True, timeout=300)
