"""benchmarks.gpu_graphs without a GPU: its sides take turns, and each is right."""
from __future__ import annotations

from benchmarks import gpu_graphs


def test_sides_take_turns():
    made = []
    found = gpu_graphs.times({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, lambda: None)
    changes = sum(x != y for x, y in zip(made, made[1:]))
    assert changes == 2 * gpu_graphs.RUNS - 1 and made.count("a") == made.count("b") == gpu_graphs.RUNS * (gpu_graphs.STEPS + 4)
    assert all(found[side][what] > 0 for side in "ab" for what in ("wall", "host"))


def test_a_case_is_measured_under_each_side(monkeypatch):
    monkeypatch.setattr(gpu_graphs, "STEPS", 1)
    case = gpu_graphs.CASES["mlp_train"]
    found = gpu_graphs.measure(case, ("eager", "tokamak"), "cpu", 1, gpu_graphs.expected(case, "cpu", 1))
    assert list(found) == ["eager", "tokamak"]
    for row in found.values():
        assert row.keys() == {"first", "error", "wall", "host"} and row["error"] < 1e-5
