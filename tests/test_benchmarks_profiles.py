"""benchmarks.profiles without a GPU: steps are what they say, totals that are off are said, and what was measured is kept and shown."""
from __future__ import annotations

import contextlib
import json
import os

import pytest
import torch

import tokamak
from benchmarks import profiles
from benchmarks.profile_cases import CASES, Case, Made, leaves
from benchmarks.profiles import Compared, Pairs, Round, kept, read, table
from tokamak.tools import watch

from .tools.measured import quick  # noqa: F401 (a fixture for all tests here)

TOTALS = (("eager", "step", 1.0e-3, 1.01e-3), ("eager", "busy", 2e-3, 1e-3), ("eager", "peak", 3e6, 1e6), ("compiled", "step", 5e-4, 5e-4))
SEEN = Compared("a step", "a machine", "0", 1.0, 2.0, TOTALS, 1.0, "memory", (Pairs("eager", 40, 0.02, -0.01, 0.035, 9e-4, 1.1e-3),))


@pytest.mark.parametrize("train", [False, True])
def test_a_step_is_measured_both_ways(train, monkeypatch):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8)
    case = Case(lambda device, layers: Made(model, (x,), train=train))
    watched, waited = [], []
    monkeypatch.setattr(profiles, "operator_part", lambda step: watched.append(step) or 0.5)
    found, p = profiles.said(case, case.make("cpu", None), 0.0, lambda: waited.append(True))
    made = profiles.compared("small", [found])
    assert waited == [True] and len(watched) == 2
    assert all(said > 0 and other > 0 for pairs in found.pairs.values() for said, other in pairs)
    assert [(q.side, q.low <= q.off <= q.high, q.least <= q.most) for q in made.pairs] == [("eager", True, True), ("compiled", True, True)]
    assert [(side, what) for side, what, *_ in made.totals] == [("eager", "step"), ("eager", "busy"), ("compiled", "step")]
    named = sum(x.seconds for x in (*p.rows, *p.others)) / p.compiled.busy        # a kernel's time is its own median, that of all of them another
    assert all(said > 0 and found > 0 for *_, said, found in made.totals) and made.named == pytest.approx(named) and named > 0
    assert p.graphs == (2 if train else 1) and made.first == p.first and json.loads(json.dumps(found.said)) == found.said


def test_what_is_measured_beside_a_profile_is_compiled_and_not_watched(monkeypatch):
    torch.manual_seed(0)
    model, x, compiled, backend = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8), [], tokamak.backend.backend
    case = Case(lambda device, layers: Made(model, (x,)))

    def spied(gm, inputs, options):
        compiled.append(tokamak.options.current().recorder)
        return backend(gm, inputs, options=options)
    monkeypatch.setattr(tokamak.backend, "backend", spied)
    profiles.said(case, case.make("cpu", None), 0.0)
    assert [type(r).__name__ for r in compiled] == ["Watcher", "NoneType"]


def test_each_step_that_counts_has_one_beside_it_behind_or_before_by_turns(monkeypatch):
    order, seconds = [], iter(range(1, 100))
    monkeypatch.setattr(profiles, "by_clock", lambda step: order.append("plain") or next(seconds))
    monkeypatch.setattr(watch, "_one", lambda step, device: order.append("profile") or watch.Took(0, next(seconds) * 1e-3, 0.0, {}))
    other = profiles.Beside(dict, list, False)
    other.names, other.plain = {id(order): "eager"}, {"eager": object()}
    found = other.turned(watch._turn)(order, "cpu", 0.0, None)                  # one that does not count, and two that do
    assert order == ["profile", "plain", "plain", "profile", "profile", "plain"] and [t.step for t in found] == [4e-3, 5e-3]
    assert other.pairs == {"eager": [(4e-3, 3), (5e-3, 6)], "compiled": []}


def test_steps_are_compared_in_pairs():
    drifting = [(1.02 * t, t) for t in (1.0, 1.0, 1.0, 4.0, 4.0)] + [(1.0, 2.0), (3.0, 1.0)]
    found = profiles.paired("eager", drifting)
    assert found.off == pytest.approx(0.02) and found.count == 7 and (found.low, found.high) == pytest.approx((0.02, 0.02))
    assert (found.least, found.most) == (1.0, 4.0) and profiles.paired("eager", [(1.0, 2.0)]).low == -0.5
    assert SEEN.off("eager", "step") == 0.02 and SEEN.off("compiled", "step") == 0.0


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_processes_stand_ready_before_the_first_is_measured(ahead, tmp_path, monkeypatch, capsys):
    asked, times = [], iter([1.0, 2.02, 4.0])
    side, busy = {"step": 2.0, "busy": 1.0, "peak": 0}, {"busy": 1.0, "peak": 0}
    words = {"eager": side, "compiled": side, "device": "a machine", "first": 1.0, "cost": 1.0, "named": 1.0, "bound": "memory"}

    class Here:
        def hear(self):
            asked.append("ready")

        def go(self):
            asked.append("go")
            return Round(words, dict.fromkeys(profiles.SIDES, [(2.0, next(times))]), dict.fromkeys(profiles.SIDES, busy))
    monkeypatch.setattr(profiles, "part", lambda case, args: contextlib.nullcontext(Here()))
    path = str(tmp_path / "kept.json")
    asks = ["--device", "cpu", "--cases", "nn.Linear", "--json", path, "--rounds", "3", "--ahead", str(ahead)]
    assert profiles.main([*asks, "--build"]) == 0 and asked == ["ready"] * 3 and not read(path)
    asked.clear()
    assert profiles.main(asks) == 0
    assert asked == {1: ["ready", "go"] * 3, 2: ["ready", "ready", "go", "go", "ready", "go"], 3: ["ready"] * 3 + ["go"] * 3}[ahead]
    made = read(path)["cpu nn.Linear"]              # ratios of 2, 0.99 and 1/2: the middle one is shown; no bytes of none are as said
    assert made.totals[0] == ("eager", "step", 2.0, 2.02) and made.rounds == 3 and made.pairs[0].off == pytest.approx(2 / 2.02 - 1)
    assert "nn.Linear" in (shown := capsys.readouterr().out) and "found 2020.000 to 2020.000" in shown


def test_each_part_has_a_process_of_its_own():
    args = profiles.arguments(["--device", "cpu", "--cases", "nn.Linear", "--seconds", "0"])
    with profiles.part("nn.Linear", args) as one:
        one.hear()
        assert one.process.pid != os.getpid() and isinstance(one.go(), Round)
    assert one.process.exitcode == 0
    with profiles.part("nn.Linear", args) as one:
        one.hear()
    assert one.process.exitcode == 0                # nobody asks it any more


def test_gradients_are_taken_for_all_that_has_any():
    x, y, z = (torch.randn(3, requires_grad=n != 1) for n in range(3))
    assert {id(t) for t in leaves((x * y + x.sin() * z).sum())} == {id(x), id(z)}
    out, = Made(lambda a: a * 3, (x,), train=True).step(lambda a: a * 3)()
    assert torch.equal(out, torch.full_like(x, 3))


def test_totals_and_costs_that_are_off_are_said():
    assert (profiles.off(0, 0), profiles.off(3, 0), profiles.off(3, 4)) == (0.0, float("inf"), -0.25)
    assert SEEN.far() == ["eager busy +100.0%"]
    assert Compared(*(*vars(SEEN).values(),)[:4], 10.5, (), 1.0, "").far() == ["cost 10.5 s"]


def test_it_is_kept_and_shown(tmp_path, capsys):
    path = str(tmp_path / "kept.json")
    kept(path, {"cpu a step": SEEN})
    assert read(path) == {"cpu a step": SEEN} and read(str(tmp_path / "none")) == {}
    rows = [line.split(" | ") for line in table([SEEN]).splitlines() if line.startswith("| a step")]
    assert rows[0][1:] == ["step ms", "1.00", "1.01 (0.90 to 1.10)", "+2.0% ± 0.7% (-1.0% to +3.5%)", "0.50", "0.50", "+0.0%", "2.0 |"]
    assert profiles.main(["--json", path, "--report"]) == 1


def test_the_cases_are_of_both_kinds():
    assert len(CASES["cuda"]) == 9 and len(CASES["cpu"]) == 13 and not set(CASES["cuda"]) & set(CASES["cpu"])
