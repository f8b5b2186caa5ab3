"""When kernels of a large GPU read: what the next pieces need before the pieces in front of them are written, as far as registers go, and what little
they read beside folds before those. A case on either side of each."""
from __future__ import annotations

import pytest

from benchmarks import gpu_plans
from tokamak.codegen.stages import render_plan


def statements(name: str, kernel: int = 0) -> list[str]:
    """'load', 'fold' and 'store' in the order of a kernel's text."""
    found = [p.unit.text for record in gpu_plans.graphs(name) for built in render_plan(record.values["lower"]).values() for p in built.parts]
    words = {"tl.load": "load", "tl.sum": "fold", "tk.moments": "fold", "tl.store": "store"}
    return [word for line in found[kernel].split("\n") for text, word in words.items() if text in line]


def behind(name: str, kernel: int = 0) -> int:
    """Loads that follow the first store."""
    found = statements(name, kernel)
    return found[found.index("store"):].count("load")


@pytest.mark.parametrize("name, loads", [("log_softmax_bwd_f16_57252x304", 10), ("log_softmax_bwd_bf16_4485x16384", 8),
                                         ("rmsnorm_bf16_4096x16384", 8)])
def test_all_pieces_are_read_before_any_is_written(name, loads):
    found = statements(name)
    assert found.count("load") >= loads and behind(name) == 0


@pytest.mark.parametrize("name, most", [("log_softmax_bwd_bf16_129x63720", 7), ("layernorm_bf16_127x131071", 16)])
def test_as_much_as_the_rows_leave_registers_for(name, most):
    """A piece or none ahead, where eight pieces take half of a thread's registers."""
    assert 0 < behind(name) <= most


def test_nothing_ahead_where_programs_are_large():
    assert behind("power_norm_bf16_1525x8944") == 1


@pytest.mark.parametrize("name, before", [("weightnorm_bwd_bf16_2232916x18", True), ("squeeze_gate_bwd_bf16_nhwc_78x2048x16x16", True),
                                          ("rmsnorm_bf16_87381x768", False)])
def test_what_little_is_read_beside_folds_is_read_before_them(name, before):
    """Not where it is more than a few registers hold."""
    found = statements(name)
    assert ("load" not in found[found.index("fold"):]) == before
