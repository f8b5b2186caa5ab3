"""Calls of torch's that are made before a program runs."""
from __future__ import annotations

import threading
import time

import pytest
import torch

from tokamak.runtime import rehearsal
from tokamak.runtime.rehearsal import calls, make, Memory, Rehearsal
from tokamak.runtime.steps import Alloc, Call, Program, Ref, TensorSpec

aten = torch.ops.aten
ROWS = TensorSpec(("4", "8"), ("8", "1"), torch.float32)
PRODUCT = TensorSpec(("4", "4"), ("4", "1"), torch.float32)


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch):
    monkeypatch.setattr(rehearsal, "_made", set())


def program(*steps) -> Program:
    """Of an input `x`, behind memory `t` of as many rows."""
    return Program("p", ("x",), (Alloc("t", ROWS, "128"), *steps))


def call(target, *args, result: str = "r", spec: TensorSpec | None = PRODUCT, **kwargs) -> Call:
    return Call(target, args, kwargs, ((result, spec),), True)


def finish(rehearsed: Rehearsal) -> None:
    """Waits until all calls were made."""
    thread = rehearsed.thread
    if thread is not None:
        thread.join(60)


def turned(name: str) -> Ref:
    return Ref(name, ("8", "4"), ("1", "8"), "0")


def test_equal_calls_are_one_and_results_are_known_to_those_behind():
    x = torch.randn(4, 8)
    first, again = call(aten.mm.default, Ref("t"), turned("t")), call(aten.mm.default, Ref("x"), turned("t"), result="s")
    behind = call(aten.addmm.default, Ref("r"), Ref("s"), Ref("r"), result="u", beta=2)
    found = calls(program(first, again, behind), [x])
    assert [c[0] for c in found] == [aten.mm.default, aten.addmm.default]
    assert found[0][1] == (Memory((4, 8), (8, 1), torch.float32, "cpu"), Memory((8, 4), (1, 8), torch.float32, "cpu"))
    assert found[1][2] == (("beta", 2),)
    for c in found:
        make(c)


@pytest.mark.parametrize("step", [
    call(aten.index_select.default, Ref("x"), 0, Ref("x")), call(aten.mm.default, Ref("unknown"), Ref("x")),
    call(aten.mm.default, Ref("x", ("n", "8"), ("8", "1"), "0"), turned("x")), call(aten.bernoulli.p, Ref("x"), 0.5)])
def test_what_could_do_harm_or_is_not_known_is_left_alone(step):
    """Indices out of any range, random numbers, memory and sizes of which nothing is known."""
    assert calls(program(step), [torch.randn(4, 8)]) == []


def test_attention_that_drops_at_random_is_left_alone():
    """Its gradient, too: what it would read as the seed is any memory."""
    q = TensorSpec(("1", "1", "4", "8"), ("32", "32", "8", "1"), torch.bfloat16)
    at = [call(aten._scaled_dot_product_flash_attention.default, *[Ref("q")] * 3, *rest, spec=None) for rest in ((), (0.0,), (0.1,))]
    at += [call(aten._scaled_dot_product_flash_attention_backward.default, *[Ref("q")] * 6, None, None, 4, 4, share, False, *[Ref("q")] * 2,
                spec=None) for share in (0.0, 0.1)]
    at += [call(aten._scaled_dot_product_cudnn_attention_backward.default, *[Ref("q")] * 9, None, None, 4, 4, share, False, spec=None)
           for share in (0.0, 0.1)]
    found = calls(Program("p", (), (Alloc("q", q, "64"), *at)), [])
    assert [[a for a in c[1] if isinstance(a, float)] for c in found] == [[], [0.0], [0.0], [0.0]]


@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_of_groups_are_left_alone(groups):
    """What takes long of them is done again in each thread."""
    w = TensorSpec(("4", f"{4 // groups}", "1", "1"), (f"{4 // groups}", "1", "1", "1"), torch.float32)
    conv = call(aten.convolution.default, Ref("x"), Ref("w"), None, [1, 1], [0, 0], [1, 1], False, [0, 0], groups, spec=None)
    found = calls(Program("p", ("x",), (Alloc("w", w, "16"), conv)), [torch.randn(2, 4, 3, 3)])
    assert len(found) == (groups == 1)
    for c in found:
        make(c)


def test_large_arguments_are_not_taken_memory_for(monkeypatch):
    monkeypatch.setattr(rehearsal, "LARGEST", 255)
    assert not calls(program(call(aten.mm.default, Ref("x"), turned("x"))), [torch.randn(4, 8)])


def test_each_call_is_made_once_a_process_and_none_behind_the_end(monkeypatch):
    seen, at, go_on = [], threading.Event(), threading.Event()

    def one(c):
        seen.append(c[2])
        at.set()
        assert go_on.wait(60)
    monkeypatch.setattr(rehearsal, "make", one)
    steps = [call(aten.addmm.default, Ref("x"), Ref("x"), Ref("x"), beta=n) for n in range(4)]
    rehearsed, later = Rehearsal(), Rehearsal()
    rehearsed.add(program(*steps[:2]), [torch.randn(4, 4)])
    assert at.wait(60)
    ending = threading.Thread(target=rehearsed.end)
    ending.start()
    while not rehearsed.over:
        time.sleep(0.001)
    go_on.set()
    ending.join(60)
    rehearsed.add(program(steps[2]), [torch.randn(4, 4)])
    assert seen == [(("beta", 0),)]
    later.add(program(steps[0], steps[3]), [torch.randn(4, 4)])
    finish(later)
    assert seen == [(("beta", 0),), (("beta", 3),)]


def test_a_call_that_fails_is_left_to_the_program(monkeypatch):
    made = []

    def one(c):
        made.append(c)
        raise RuntimeError("no memory")
    monkeypatch.setattr(rehearsal, "make", one)
    rehearsed = Rehearsal()
    rehearsed.add(program(call(aten.mm.default, Ref("x"), turned("x")), call(aten.mm.default, turned("x"), Ref("x"))), [torch.randn(4, 8)])
    finish(rehearsed)
    assert len(made) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_threads_of_their_own_leave_no_workspaces():
    """torch keeps one for each thread's handle; no other thread might take this thread's up."""
    x = torch.randn(4, 8, device="cuda")
    x @ x.T
    held = torch.cuda.memory_allocated()
    rehearsed = Rehearsal()
    rehearsed.add(Program("p", ("x",), (call(aten.mm.default, Ref("x"), turned("x"), spec=None),)), [x])
    finish(rehearsed)
    assert len(rehearsal._made) == 1
    rehearsed.end()
    assert torch.cuda.memory_allocated() <= held
