"""`tokamak.optimize`: rungs that pay are kept, those that cannot help or spoil numbers are not, and each says why."""
import json
import math

import pytest
import torch
from torch import nn

import tokamak
from tests.test_check import broken
from tokamak.errors import OptionError
from tokamak.tools import optimize as climbing
from tokamak.tools.cli import main
from tokamak.tools.machine import Peaks
from tokamak.tools.optimize import Staircase, optimize
from tokamak.tools.watch import Times

from .programs import Dropped, softmax

PEAKS = Peaks("some CPU", ((8192, 1e-6), (1 << 20, 1e-4)), {"float32": 1e11}, 1e-6, "2026-01-01")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setattr(climbing, "peaks", lambda device: PEAKS)
    with tokamak.scope(strict=True):
        yield


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds, ...): the steps of eager, and of each rung that is tried, take so long."""
    def set(*seconds):
        waiting = list(seconds)
        last = []

        def interleaved(steps, device, _, looked=None):
            if looked is not None:
                with looked.step():
                    steps[looked.name]()
                return {looked.name: Times(1.0, 1.0, {}, 1.0)}
            for step in steps.values():
                step()
            now = waiting.pop(0)
            before = last[-1] if last else now
            last.append(now if now <= climbing.PAYS * before else before)
            return {name: Times(t, t, {}, t) for name, t in zip(steps, (before, now) if len(steps) == 2 else (now,))}
        monkeypatch.setattr(climbing, "interleaved", interleaved)
    return set


def climbed(fn, *args, **kwargs) -> tuple[Staircase, dict]:
    found = optimize(fn, *args, seconds=0.0, **kwargs)
    return found, {r.name: r for r in found.rungs}


def test_a_rung_that_pays_is_kept(clock):
    clock(2.0, 1.0)
    before = torch.get_float32_matmul_precision()
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    found, rungs = climbed(model, torch.randn(64, 32))
    assert list(rungs) == ["eager", "fuse", "tf32"] and found.best is rungs["fuse"] and found.code == rungs["fuse"].code
    assert rungs["fuse"].step == 1.0 and "2.00 times" in rungs["fuse"].why and rungs["fuse"].error < 1e-6 and rungs["fuse"].peak > 0
    assert not rungs["tf32"].kept and rungs["tf32"].step is None and "no tensor cores" in rungs["tf32"].why
    assert "contractions are" in found.stopped and "not allowed: bf16" in found.stopped and torch.get_float32_matmul_precision() == before


def test_a_rung_that_does_not_pay_is_not(clock):
    clock(1.0, 0.99)
    found, rungs = climbed(softmax, torch.randn(64, 32))
    assert found.best is rungs["eager"] and found.code == "" and "not worth it" in rungs["fuse"].why and "no contractions" in found.stopped


def test_what_changes_numbers_is_tried_with_consent_and_on_top_of_what_was_kept(clock):
    clock(4.0, 2.0, 1.0)
    found, rungs = climbed(nn.Linear(32, 32), torch.randn(64, 32), allow=("bf16",))
    assert found.best is rungs["bf16"] and 1e-4 < rungs["bf16"].error < 1e-1 and rungs["fuse"].error < 1e-6
    assert found.code == 'fn = torch.compile(fn, backend="tokamak")\nfn = torch.autocast("cpu", torch.bfloat16)(fn)'
    with pytest.raises(OptionError, match="allow='int3'"):
        optimize(softmax, torch.randn(4, 4), allow=("int3",))


def test_fusion_is_tried_again_on_top_of_what_made_the_rest_faster(clock):
    clock(4.0, 3.99, 2.0, 1.0)
    found, rungs = climbed(nn.Linear(32, 32), torch.randn(64, 32), allow=("bf16",))
    assert list(rungs) == ["eager", "fuse", "tf32", "bf16", "fuse again"] and found.best is rungs["fuse again"] and not rungs["fuse"].kept
    assert found.code == 'fn = torch.compile(fn, backend="tokamak")\nfn = torch.autocast("cpu", torch.bfloat16)(fn)'


def test_the_code_that_it_prints_runs(clock):
    clock(4.0, 2.0, 1.0)
    linear, x = nn.Linear(32, 32), torch.randn(64, 32)
    found, _ = climbed(linear, x, allow=("bf16",))
    names = {"torch": torch, "fn": linear}
    exec(found.code, names)
    assert names["fn"](x).dtype is torch.bfloat16
    torch.testing.assert_close(names["fn"](x).float(), linear(x), rtol=3e-2, atol=3e-2)


def test_wrong_numbers_are_not_kept_however_fast(clock, monkeypatch):
    clock(2.0, 1.0)
    broken(monkeypatch, "splat_f32(2.0)", "splat_f32(2.001)")
    with tokamak.scope(cache_dir=""):
        found, rungs = climbed(lambda x: x * 2, torch.randn(64))
    assert found.best is rungs["eager"] and "further from float64 than before" in rungs["fuse"].why and rungs["fuse"].error == pytest.approx(5e-4, rel=1e-2)


def test_infinities_of_a_narrow_type_are_wrong(clock):
    clock(2.0, 1.0)
    climb = climbing._Climb(lambda x: x * 2, (torch.randn(4),), {}, {}, 0.0)
    assert climb.wrong("fp16", math.inf) and climb.wrong("fp16", 0.3) == "" and climb.wrong("fuse", None) == ""


def test_random_numbers_of_our_own_are_not_compared(clock):
    clock(2.0, 1.0)
    _, rungs = climbed(Dropped(), torch.randn(8, 32))
    assert rungs["fuse"].kept and rungs["fuse"].error is None


def test_measured_without_a_fake_clock_it_prints_and_is_json():
    found = optimize(softmax, torch.randn(64, 100), seconds=0.0)
    assert "eager" in str(found) and "from float64" in str(found) and all(r.step > 0 for r in found.rungs if r.name != "tf32")
    assert json.loads(found.to_json())["code"] == found.code


SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="tokamak")
step = torch.compile(optimizer.step, backend="tokamak")
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(4, 8)).sum().backward()
    step()
"""


@pytest.mark.parametrize("command, words", [("optimize", "a step instead of"), ("profile", "optimizer")])
def test_scripts_that_step_an_optimizer_under_autocast(tmp_path, capsys, command, words, monkeypatch):
    monkeypatch.setattr("tokamak.tools.profile.peaks", lambda device: PEAKS)
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    assert main([command, "--seconds", "0", "--json", str(out), str(script)]) == 0
    assert words in capsys.readouterr().out and json.loads(out.read_text())
