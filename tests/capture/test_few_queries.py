"""The library's attention of few queries to many keys (`capture.few_queries`): which calls are written out, and that results stay what they were."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.traceback import annotate

from tests.compiled.linear import TOLERANCE, calls, error, run, schedules, values, wide
from tokamak.capture import aot, few_queries
from tokamak.capture.few_queries import KEYS
from tokamak.schedule.means import MeansSchedule

pytest.importorskip("triton")
LIBRARY = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
attention = F.scaled_dot_product_attention


def cache(rows=1, heads=8, kept=2, length=600, width=32, batch=1, dtype=torch.bfloat16):
    return tuple(values(batch, h, n, width, dtype=dtype) for h, n in ((heads, rows), (kept, length), (kept, length)))


def copied(x, heads):
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def shared(q, k, v, mask=None):
    return attention(q, k, v, attn_mask=mask, enable_gqa=True)


def repeated(q, k, v, mask=None):
    return attention(q, copied(k, q.shape[1]), copied(v, q.shape[1]), attn_mask=mask)


def behind(q, k, v):
    """Queries that lie behind positions, as a projection leaves them."""
    return shared(q.transpose(1, 2).contiguous().transpose(1, 2), k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("fn", [shared, repeated, behind, lambda q, k, v: attention(q, k, v, scale=0.3, enable_gqa=True)],
                         ids=["shared", "repeated", "behind positions", "scaled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_is_one_kernel(fn, rows):
    """Keys are read as they lie, once for the heads that share them; the result lies as torch's does."""
    torch.manual_seed(0)
    inputs = cache(rows)
    got, (record, *_) = run(fn, *inputs, contractions="")
    made, = schedules(record)
    assert isinstance(made, MeansSchedule) and made.programs > 1 and made.sizes(made.dims[0])[0] == 16 and not calls(record)
    lie = lambda x: [s for n, s in zip(x.shape, x.stride()) if n > 1]
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16] and lie(got) == lie(fn(*inputs))


def test_copies_for_many_heads_are_none(monkeypatch):
    """However many heads there are: the library reads the copies."""
    monkeypatch.setattr(few_queries, "HEADS", 4)
    inputs = cache()
    got, (record, *_) = run(repeated, *inputs, contractions="")
    assert not calls(record) and error(got, repeated(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]
    assert calls(run(shared, *cache(kept=8), contractions="")[1][0]) == [LIBRARY]


MASKS = {"of each batch": lambda: torch.rand(2, 1, 1, 600) < 0.3, "of all": lambda: torch.rand(3, 600) < 0.3,
         "a bias of each head": lambda: torch.randn(1, 8, 3, 600, dtype=torch.bfloat16), "of rows alone": lambda: torch.rand(2, 1, 3, 1) < 2}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("fn", [shared, repeated])
def test_masks_and_biases(fn, name):
    """A row of which a mask leaves nothing is 0, as torch has it."""
    torch.manual_seed(1)
    inputs, mask = cache(3, batch=2), MASKS[name]()
    if mask.dtype is torch.bool and mask.shape[-1] > 1:
        mask[..., -1] = True
        mask[0] = False
    got, (record, *_) = run(fn, *inputs, mask, contractions="")
    want = fn(*map(wide, inputs), mask if mask.dtype is torch.bool else wide(mask))
    assert not calls(record) and error(got, want) <= TOLERANCE[torch.bfloat16] and torch.equal(got == 0, want == 0)


LEFT = {
    "few keys": lambda: (shared, cache(length=KEYS - 1)),
    "many queries": lambda: (shared, cache(rows=17)),
    "some queries of many heads": lambda: (shared, cache(rows=20, heads=65, kept=65, width=16)),
    "float32": lambda: (shared, cache(dtype=torch.float32)),
    "wide heads": lambda: (shared, cache(width=136)),
    "causal": lambda: (lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True), cache(3)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_the_librarys(name):
    fn, inputs = LEFT[name]()
    got, (record, *_) = run(fn, *inputs, contractions="")
    assert calls(record) and error(got, fn(*map(wide, inputs))) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("options", [{"policy": "eager"}, {"policy": "strict"}, {"contractions": "vendor"}, {"streaming": False}], ids=str)
def test_options_that_keep_the_library(options):
    inputs = cache()
    _, (record, *_) = run(shared, *inputs, **{"contractions": ""} | options)
    assert calls(record) == [LIBRARY]


def test_training_steps_keep_the_library():
    inputs = [x.requires_grad_() for x in cache()]
    _, records = run(shared, *inputs, contractions="")
    assert any(LIBRARY in calls(r) for r in records)


def test_machines_without_prices_keep_the_library():
    """Nothing but a kernel is faster than the library."""
    kept = []

    def one(graph, inputs, kind):
        kept.append([str(n.target) for n in graph.graph.nodes])
        return aot.eager(graph)

    def backend(gm, example):
        return aot.autograd(gm, example, one, attention=True, decoding=lambda device: device != "cpu")
    torch._dynamo.reset()
    torch.compile(shared, backend=backend)(*cache())
    assert LIBRARY in kept[0]


def test_a_policy_of_its_own_keeps_the_library():
    def fn(q, k, v):
        with annotate({"tokamak_policy": "eager"}):
            return shared(q, k, v)
    _, (record, *_) = run(fn, *cache(), contractions="")
    assert calls(record) == [LIBRARY]
