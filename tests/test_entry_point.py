"""`tokamak.compile` as users call it: options, logs, our own bugs, and what a compile leaves behind."""
import gc
import warnings

import pytest
import torch

import tokamak
from tokamak.garbage import uncollected
from tokamak.ir.expr import Expr


def test_unknown_options_name_the_nearest():
    with pytest.raises(tokamak.OptionError, match="did you mean 'policy'"):
        with tokamak.scope(polcy="fast"):
            pass
    with pytest.raises(tokamak.OptionError, match="did you mean 'strict'"):
        tokamak.compile(lambda x: x, policy="strikt")
    with pytest.raises(tokamak.OptionError, match="log topic"):
        tokamak.compile(lambda x: x, logs="outputcode")


def test_a_bug_of_ours_warns_once_and_runs_eagerly(monkeypatch):
    def broken(*_):
        raise tokamak.InternalError("broken")
    monkeypatch.setattr("tokamak.backend.Capture", broken)
    torch._dynamo.reset()
    with tokamak.scope(strict=False), pytest.warns(UserWarning, match="runs eagerly"):
        got = tokamak.compile(lambda x: x * 2)(torch.ones(3))
    assert got.tolist() == [2, 2, 2]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="broken"):
        tokamak.compile(lambda x: x * 2, strict=True)(torch.ones(3))


@pytest.mark.parametrize("stage", ["capture", "build"])
def test_stopping_after_a_stage_still_runs(stage):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        x = torch.randn(3, requires_grad=True)
        tokamak.compile(lambda x: (x * 2).sin(), until=stage, opaque_only=True)(x).sum().backward()
    assert torch.equal(x.grad, (x.detach() * 2).cos() * 2)


def test_a_compiled_program_keeps_nothing_of_the_language():
    """Expressions are interned, and every one that somebody holds on to is memory for ever."""
    alive = lambda: [e for e in gc.get_objects() if issubclass(type(e), Expr)]
    torch._dynamo.reset()
    gc.collect()
    before, x = alive(), torch.randn(8, 33, requires_grad=True)
    run = tokamak.compile(lambda x: (torch.softmax(x * 3, -1) - torch.var(x, -1, keepdim=True)).sum(), cache_dir="")
    for _ in range(2):
        run(x).backward()
    gc.collect()
    assert {id(e) for e in alive()} <= {id(e) for e in before}


@pytest.mark.parametrize("frozen, old", [(0, True), (375, True), (100_000, False)])
def test_what_a_compile_makes_is_old_behind_it_but_for_a_program_that_has_frozen_its_own(frozen, old, monkeypatch):
    """Python 3.12 has 375 objects frozen as it starts: those do not keep a search for young garbage from walking all that a compile made."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    gc.collect()
    with uncollected():
        made = [[]]
    assert any(o is made for o in gc.get_objects(generation=2)) is old


def test_logs_go_to_stderr(capsys):
    torch._dynamo.reset()
    tokamak.compile(lambda x: x * 2, logs="output_code", opaque_only=True)(torch.ones(3))
    assert "def tk_" in capsys.readouterr().err
