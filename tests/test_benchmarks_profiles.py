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
from benchmarks.profiles import Compared, Round, kept, read, table

from .tools.measured import quick  # noqa: F401 (a fixture for all tests here)

TOTALS = (("eager", "step", 1.0e-3, 1.01e-3), ("eager", "busy", 2e-3, 1e-3), ("eager", "peak", 3e6, 1e6), ("compiled", "step", 5e-4, 5e-4))
SEEN = Compared("a step", "a machine", "0", 1.0, 2.0, TOTALS, 1.0, "memory", (("eager", 9e-4, 1.1e-3),), 1, (("eager", 1.2e-3),))


@pytest.mark.parametrize("train", [False, True])
def test_a_step_is_measured_both_ways(train, monkeypatch):
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8)
    case = Case(lambda device, layers: Made(model, (x,), train=train))
    steps, asked = profiles.plain(case, case.make("cpu", None)), []
    watched = []
    monkeypatch.setattr(profiles, "operator_time", lambda step: watched.append(step) or 1e-3)
    found, p = profiles.said(case, case.make("cpu", None), 0.0, lambda side: asked.append(side) or profiles.turn(steps[side], False))
    made = profiles.compared("small", [found])
    assert set(asked) == {"eager", "compiled"} and len(watched) == 2 and profiles.totals(steps, False) == {"eager": {}, "compiled": {}}
    assert all(t > 0 for of in (found.steps, found.elsewhere) for times in of.values() for t in times)
    assert all(low <= high for _, low, high in made.spread) and [side for side, _ in made.elsewhere] == ["eager", "compiled"]
    assert [(side, what) for side, what, *_ in made.totals] == [("eager", "step"), ("eager", "busy"), ("compiled", "step")]
    assert all(said > 0 and found > 0 for *_, said, found in made.totals) and made.named == pytest.approx(1.0)
    assert p.graphs == (2 if train else 1) and made.first == p.first and json.loads(json.dumps(found.said)) == found.said


def test_what_is_measured_beside_a_profile_is_compiled_and_not_watched(monkeypatch):
    torch.manual_seed(0)
    model, x, compiled, backend = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8), [], tokamak.backend.backend
    case = Case(lambda device, layers: Made(model, (x,)))

    def spied(gm, inputs, options):
        compiled.append(tokamak.options.current().recorder)
        return backend(gm, inputs, options=options)
    monkeypatch.setattr(tokamak.backend, "backend", spied)
    profiles.said(case, case.make("cpu", None), 0.0, lambda side: [1.0])
    assert [type(r).__name__ for r in compiled] == ["Watcher", "NoneType"]


def test_neither_of_two_turns_is_always_the_first(monkeypatch):
    order, step = [], object()
    monkeypatch.setattr(profiles, "turn", lambda step, gpu: order.append("plain") or [1.0])
    other = profiles.Beside(dict, lambda side: order.append("elsewhere") or [1.0], False)
    other.names, other.plain = {id(step): "eager"}, {"eager": step}
    for _ in range(3):
        other.turned(lambda *args: order.append("profile"))(step, "cpu", 0.1, None)
    assert order == [*("profile", "plain", "elsewhere"), *("plain", "profile", "elsewhere"), *("profile", "plain", "elsewhere")]


def test_turns_are_taken_beside_those_of_each_profile(tmp_path, monkeypatch, capsys):
    asked, times = [], iter([[2.5, 1.0, 2.0, 2.0], [4.0] * 4, [1.0] * 4])
    side, busy = {"step": 2.0, "busy": 1.0, "peak": 0}, {"busy": 1.0}
    words = {"eager": side, "compiled": side, "device": "a machine", "first": 1.0, "cost": 1.0, "named": 1.0, "bound": "memory"}

    class Here:
        """`said` is answered by two turns first."""
        def __init__(self, name):
            self.name, self.turns = name, iter(["eager", "compiled"])

        def ask(self, what):
            asked.append((self.name, what))
            if self.name == "plain":
                return True if what == "ready" else {s: {"peak": 0} for s in profiles.SIDES} if what == "totals" else [1.0]
            if what == "ready":
                return True
            return next(self.turns, None) or Round(words, *(dict.fromkeys(profiles.SIDES, v) for v in (next(times), [3.0], busy)))
    monkeypatch.setattr(profiles, "part", lambda name, case, args: contextlib.nullcontext(Here(name)))
    path = str(tmp_path / "kept.json")
    assert profiles.main(["--device", "cpu", "--cases", "nn.Linear", "--json", path, "--rounds", "3"]) == 0
    turns = [("plain", "eager"), ("profile", [1.0]), ("plain", "compiled"), ("profile", [1.0])]
    assert asked == [("plain", "ready"), ("profile", "ready"), ("profile", "said"), *turns, ("plain", "totals")] * 3
    made = read(path)["cpu nn.Linear"]              # ratios of 1, 1/2 and 2: the middle one is shown; no bytes of none are as said
    assert made.totals[0] == ("eager", "step", 2.0, 2.0) and made.spread == (("eager", 2.0, 2.5), ("compiled", 2.0, 2.5)) and made.rounds == 3
    assert made.elsewhere == (("eager", 3.0), ("compiled", 3.0))
    assert "nn.Linear" in (shown := capsys.readouterr().out) and "(2000.000 to 2500.000)" in shown


def test_each_part_has_a_process_of_its_own():
    args = profiles.arguments(["--device", "cpu", "--cases", "nn.Linear", "--seconds", "0"])
    with profiles.part("plain", "nn.Linear", args) as one:
        assert one.ask("ready") and one.process.pid != os.getpid()
        assert min(one.ask("eager") + one.ask("compiled")) > 0
    assert one.process.exitcode == 0


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
    assert rows[0][1:] == ["step ms", "1.00", "1.01 (0.90 to 1.10)", "-1.0%", "1.20", "0.50", "0.50", "+0.0%", "", "2.0 |"]
    assert profiles.main(["--json", path, "--report"]) == 1


def test_the_cases_are_of_both_kinds():
    assert len(CASES["cuda"]) == 9 and len(CASES["cpu"]) == 13 and not set(CASES["cuda"]) & set(CASES["cpu"])
