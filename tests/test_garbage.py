"""When no search for cyclic garbage runs: while Dynamo captures for us, and for nobody else."""
from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch._dynamo.callback import callback_handler

import tokamak
from tokamak.backend import backend
from tokamak.garbage import wraps


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.enable()


@pytest.fixture
def searching(monkeypatch):
    """Whether searches were on each time that Dynamo began to trace a frame."""
    from torch._dynamo import convert_frame
    seen: list[bool] = []
    traced = convert_frame.trace_frame

    @functools.wraps(traced)
    def looked(*args, **kwargs):
        seen.append(gc.isenabled())
        return traced(*args, **kwargs)
    monkeypatch.setattr(convert_frame, "trace_frame", looked)
    return seen


def test_none_while_dynamo_captures_for_us(searching):
    assert tokamak.compile(lambda x: x * 2 + 1)(torch.ones(3))[0] == 3 and gc.isenabled()
    assert searching == [False]


def test_none_for_the_back_end_by_itself_once_it_is_watched(searching):
    tokamak.compile(torch.relu)
    assert torch.compile(lambda x: x * 3 - 1, backend=functools.partial(backend, options={}))(torch.ones(3))[0] == 2 and gc.isenabled()
    assert torch.compile(lambda x: x * 3 - 2, backend=backend)(torch.ones(3))[0] == 1 and gc.isenabled()
    assert searching == [False, False]


def test_other_back_ends_are_left_alone(searching):
    tokamak.compile(torch.relu)
    assert torch.compile(lambda x: x * 2 - 1, backend="eager")(torch.ones(3))[0] == 1
    assert searching == [True] and gc.isenabled()


def test_who_searches_by_hand_goes_on_so(searching):
    gc.disable()
    assert tokamak.compile(lambda x: x * 2 + 5)(torch.ones(3))[0] == 7 and not gc.isenabled()
    assert searching == [False]


def test_searches_go_on_behind_a_capture_that_fails(searching):
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        tokamak.compile(broken, fullgraph=True)(torch.ones(3))
    assert searching and not any(searching) and gc.isenabled()


def test_dynamo_is_asked_once_and_again_behind_a_reset():
    for _ in range(3):
        tokamak.compile(torch.relu)
    once = len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)
    torch._dynamo.reset()
    assert not callback_handler.start_callbacks
    tokamak.compile(lambda x: x + 1)(torch.ones(3))
    assert (len(callback_handler.start_callbacks), len(callback_handler.end_callbacks)) == once == (1, 1)


def test_what_is_put_around_the_back_end_is_seen_through():
    assert wraps(backend, backend) and wraps(functools.partial(functools.partial(backend, mode=None), options={}), backend)
    assert not wraps(None, backend) and not wraps(lambda gm, inputs: gm, backend)
    assert not wraps(functools.partial(torch.relu), backend)
