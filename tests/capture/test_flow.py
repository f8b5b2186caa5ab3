"""Minimum cuts against networkx's: the value, and on which side each node is."""
import math
import random

import networkx
import pytest
import torch

import tokamak
from tokamak.capture import partition
from tokamak.capture.flow import minimum_cut


def shapes(seed: int) -> networkx.DiGraph:
    """A graph at random, with edges that have no limit, some of them by having no capacity."""
    draw = random.Random(seed)
    graph, count = networkx.DiGraph(), draw.randint(2, 24)
    graph.add_nodes_from(["source", "sink", *range(count)])
    for _ in range(draw.randint(1, 4 * count)):
        u, v = draw.choice(["source", *range(count)]), draw.choice(["sink", *range(count)])
        limit = draw.choice([0, 1, 2, 5, draw.randint(1, 1 << 40), math.inf, None])
        graph.add_edge(u, v, **({} if limit is None else {"capacity": limit}))
    return graph


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_the_cut_is_the_one_of_networkx(first):
    for seed in range(first, first + 100):
        graph = shapes(seed)
        try:
            want = networkx.minimum_cut(graph, "source", "sink")
        except networkx.NetworkXUnbounded:
            with pytest.raises(networkx.NetworkXUnbounded):
                minimum_cut(graph, "source", "sink")
            continue
        assert minimum_cut(graph, "source", "sink") == want, seed


def test_the_partitioner_cuts_with_it(monkeypatch):
    cuts, usual = [], networkx.minimum_cut
    monkeypatch.setattr(partition, "minimum_cut", lambda *args: cuts.append(minimum_cut(*args)) or cuts[-1])
    torch._dynamo.reset()
    x = torch.randn(8, 8, requires_grad=True)
    tokamak.compile(lambda x: torch.softmax(x.sin(), -1), strict=True)(x)
    assert cuts and networkx.minimum_cut is usual
