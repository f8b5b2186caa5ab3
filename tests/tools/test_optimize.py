"""`tokamak.optimize`: rungs that pay are kept, those that cannot help or spoil numbers are not, and each says why."""
import importlib.util
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tokamak
from tests.test_check import broken
from tokamak.errors import OptionError
from tokamak.tools import optimize as climbing
from tokamak.tools.cli import main
from tokamak.tools.limits import Row
from tokamak.tools.optimize import Staircase, optimize
from tokamak.tools.quantize import WeightOnly, apart, weight_bytes, weight_only
from tokamak.tools.verify import verify
from tokamak.tools.watch import Times

from .measured import PEAKS, quick  # noqa: F401 (a fixture for all tests here)
from .programs import Dropped, softmax


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
                busy = sum(looked.seconds().values())
                return {looked.name: Times(busy, busy, {}, busy)}
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
    assert list(rungs) == ["eager", "fuse", "tf32", "launches"] and found.best is rungs["fuse"] and found.code == rungs["fuse"].code
    assert rungs["fuse"].step == 1.0 and "2.00 times" in rungs["fuse"].why and rungs["fuse"].error < 1e-6 and rungs["fuse"].peak > 0
    assert not rungs["tf32"].kept and rungs["tf32"].step is None and "no tensor cores" in rungs["tf32"].why
    assert "called" in rungs["launches"].why and "of the fused step is contractions at" in found.stopped
    assert "kernels spend" in found.stopped and "not allowed: bf16, int8, int4" in found.stopped and torch.get_float32_matmul_precision() == before


def test_a_rung_that_does_not_pay_is_not(clock):
    clock(1.0, 0.99)
    found, rungs = climbed(softmax, torch.randn(64, 32))
    assert found.best is rungs["eager"] and found.code == "" and "not worth it" in rungs["fuse"].why and "no contractions" in found.stopped
    assert found.stopped.endswith("not allowed: bf16 (allow=)")           # weights are changed in a module


def test_steps_beside_other_work_are_measured_again(clock, monkeypatch):
    """Slower than it was by far, the way before met something else: a rung is not kept for that."""
    clock(1.0, 2.0)
    quiet, turns = climbing.interleaved, []

    def loaded(steps, *rest, **kwargs):
        turns.append(tuple(steps))
        if turns.count(("before", "now")) == 1 and len(steps) == 2:
            return {"before": Times(9.0, 9.0, {}, 9.0), "now": Times(3.0, 3.0, {}, 3.0)}
        return quiet(steps, *rest, **kwargs)
    monkeypatch.setattr(climbing, "interleaved", loaded)
    found = optimize(softmax, torch.randn(8, 16))
    assert [r.kept for r in found.rungs[:2]] == [True, False] and found.rungs[1].step == 2.0 and turns.count(("before", "now")) == 2


def test_what_changes_numbers_is_tried_with_consent_and_on_top_of_what_was_kept(clock):
    clock(4.0, 2.0, 1.0)
    found, rungs = climbed(nn.Linear(32, 32), torch.randn(64, 32), allow=("bf16",))
    assert [r.speedup for r in found.rungs] == [1.0, 2.0, None, None, 4.0] and "4.00 times as fast as eager" in str(found)
    assert found.best is rungs["bf16"] and 1e-4 < rungs["bf16"].error < 1e-1 and rungs["fuse"].error < 1e-6
    assert found.code == 'fn = torch.compile(fn, backend="tokamak")\nfn = torch.autocast("cpu", torch.bfloat16)(fn)'
    with pytest.raises(OptionError, match="allow='int3'"):
        optimize(softmax, torch.randn(4, 4), allow=("int3",))


def test_fusion_is_tried_again_on_top_of_what_made_the_rest_faster(clock):
    clock(4.0, 3.99, 2.0, 1.0)
    found, rungs = climbed(nn.Linear(32, 32), torch.randn(64, 32), allow=("bf16",))
    assert list(rungs) == ["eager", "fuse", "tf32", "launches", "bf16", "fuse again"] and found.best is rungs["fuse again"] and not rungs["fuse"].kept
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
    assert found.best is rungs["eager"] and "further from float64 than before" in rungs["fuse"].why
    assert rungs["fuse"].error == pytest.approx(5e-4, rel=1e-2)


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
    assert "eager" in str(found) and "from float64" in str(found) and all(r.step > 0 for r in found.rungs if r.name not in ("tf32", "launches"))
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


@pytest.mark.parametrize("command, words", [("optimize", "times as fast as eager"), ("profile", "optimizer")])
def test_scripts_that_step_an_optimizer_under_autocast(tmp_path, capsys, command, words, monkeypatch):
    monkeypatch.setattr("tokamak.tools.profile.peaks", lambda device: PEAKS)
    script, out = tmp_path / "script.py", tmp_path / "out.json"
    script.write_text(SCRIPT)
    assert main([command, "--seconds", "0", "--json", str(out), str(script)]) == 0
    assert words in capsys.readouterr().out and json.loads(out.read_text())


# -- weights of few bits -----------------------------------------------------------------------------------------------------
def mlp():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))


@pytest.mark.parametrize("bits, most", [(8, 1e-2), (4, 0.15)])
def test_weights_of_few_bits(bits, most):
    model, x = mlp(), torch.randn(16, 64)
    want, before = model(x), weight_bytes(model)
    small = weight_only(apart(model), bits)
    assert 1e-4 < float((small(x) - want).norm() / want.norm()) < most
    assert before * bits / 32 < weight_bytes(small) < before * bits / 32 + 2000 and torch.equal(model(x), want)
    assert torch.equal(small[0].bias, model[0].bias) and "bits=" in repr(small)
    found = verify(small, x)
    assert found.right, str(found)


def test_what_four_bits_hold_is_exact():
    linear = nn.Linear(8, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.stack([torch.arange(-7.0, 8, 2), torch.zeros(8), torch.tensor([7.0, -7, 1, 0, 3, -3, 5, 2])]))
    torch.testing.assert_close(weight_only(apart(linear), 4)(torch.eye(8)).T, linear.weight)
    with pytest.raises(ValueError, match="8 or 4"):
        weight_only(linear, 3)
    assert type(weight_only(nn.Linear(7, 3), 4)) is nn.Linear and type(weight_only(nn.Linear(7, 3), 8)) is WeightOnly


@pytest.fixture
def torchao(monkeypatch):
    """torchao(function or None): it is installed and quantises by that, or it is not installed."""
    def set(quantize_):
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: (quantize_ and object()) if name == "torchao" else real(name, *rest))
        module = SimpleNamespace(quantize_=quantize_, Int8WeightOnlyConfig=lambda: 8, Int4WeightOnlyConfig=lambda: 4)
        monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    return set


def test_weights_are_tried_with_consent_in_inference_alone(clock, torchao):
    torchao(None)
    clock(4.0, 2.0, 1.0, 0.5)
    model, x = mlp(), torch.randn(16, 64)
    with torch.no_grad():
        found, rungs = climbed(model, x, allow=("int8", "int4"))
    assert found.best is rungs["int4"] and rungs["int8"].error < 1e-2 < rungs["int4"].error < 0.3
    assert "weights 36.5 KiB -> 10 KiB" in rungs["int8"].why and "torchao is not installed (pip install torchao)" in rungs["int8"].why
    names = {"torch": torch, "fn": apart(model)}
    exec(found.code, names)
    assert found.code.count("torch.compile") == found.code.count("weight_only(fn") == 1
    torch.testing.assert_close(names["fn"](x), model(x), rtol=0.3, atol=0.3)
    clock(4.0, 2.0)
    assert "not trained" in climbed(model, x, allow=("int8",))[1]["int8"].why
    clock(4.0, 2.0)
    assert "this is a function" in climbed(softmax, x, allow=("int8",))[1]["int8"].why
    clock(4.0, 2.0)
    with torch.no_grad():
        assert "no linear layer" in climbed(nn.LayerNorm(64), x, allow=("int8",))[1]["int8"].why


def test_torchao_quantises_where_it_can(clock, torchao):
    def quantize_(model, config):
        if config == 4:
            raise ImportError("Requires another package\nand more")
        weight_only(model, config)
    torchao(quantize_)
    clock(4.0, 2.0, 1.0, 0.5)
    with torch.no_grad():
        found, rungs = climbed(mlp(), torch.randn(16, 64), allow=("int8", "int4"))
    assert "by torchao" in rungs["int8"].why and "quantize_(fn, Int8WeightOnlyConfig())" in rungs["int8"].code
    assert "in plain PyTorch, since torchao cannot: Requires another package" in rungs["int4"].why and "weight_only(fn, 4)" in found.code


def test_weights_stay_where_their_products_take_no_time():
    climb = climbing._Climb(mlp(), (torch.randn(4, 64),), {}, {}, 0.0)
    climb.rows = [Row("addmm.default", "inference", "", "", 1, 0.02, 0, 0, 1, 0.01, "memory", opaque="a call")]
    climb.fused = 1.0
    with torch.no_grad():
        assert climb.useless("int8") == "contractions are 2% of the step"
        climb.fused = 0.1
        assert climb.useless("int8") == ""


# -- fewer launches ------------------------------------------------------------------------------------------------------------
def test_launches_are_cut_where_the_device_waits_for_them():
    climb = climbing._Climb(softmax, (torch.randn(4, 4),), {}, {}, 0.0)
    climb.device, climb.busy, climb.fused = "cuda:0", 0.5, 1.0
    assert "not kept" in climb.useless("launches")
    climb.changes = {"compiled": True}
    assert climb.useless("launches") == ""
    climb.busy = 0.98
    assert climb.useless("launches") == "the device works in 98% of the fused step"


def test_what_compiles_stands_once_behind_what_changes_weights():
    def rung(name, code):
        return climbing.Rung(name, 1.0, 0, 0.0, True, "", code)
    found = Staircase("cuda", tuple(rung(n, n) for n in ("eager", "fuse", "tf32", "launches", "bf16", "int8", "int4")), "")
    assert found.code.split() == ["int4", "launches", "eager", "tf32", "bf16"]


def test_a_staircase_says_what_other_work_took():
    found = Staircase("cpu", (climbing.Rung("eager", 1.0, 0, 0.0, True, "where it starts", "", 1.0),), "it stops", 0.7)
    assert "other work took 70% of the cores" in str(found) and "other work" not in str(replace(found, beside=0.05))


def test_it_says_when_nothing_is_left_to_gain():
    climb = climbing._Climb(softmax, (torch.randn(4, 4),), {}, {}, 0.0)
    row = Row("mm.default", "inference", "", "", 1, 0.97, 0, 0, 1, 0.96, "memory", opaque="a call")
    climb.rows, climb.busy, climb.fused = [row], 0.99, 1.0
    assert climb.stopped(tuple(climbing.CONSENT)) == (
        "97% of the fused step is contractions at 99% of their limit; 1% of it is no work of a kernel; kernels spend 1% of it beyond their limits; "
        "nothing that keeps the numbers can gain more than that")


def test_kernels_of_ours_count_among_contractions():
    climb = climbing._Climb(softmax, (torch.randn(4, 4),), {}, {}, 0.0)
    climb.rows = [Row("red_fused_addmm_0", "inference", "", "", 1, 0.5, 0, 0, 1, 0.4, "memory", "tile(i0:32)"),
                  Row("red_fused_sum_0", "inference", "", "", 1, 0.5, 0, 0, 1, 0.4, "memory", "parallel(i0)")]
    climb.busy, climb.fused = 1.0, 1.0
    assert climb.products() == climb.rows[:1] and climb.stopped(()).startswith("50% of the fused step is contractions at 80% of their limit")
