"""benchmarks.gpu_counters without a GPU: what ncu prints is read, and paired with what was said of each kernel."""
from __future__ import annotations

import json

import pytest

from benchmarks import gpu_counters
from benchmarks.gpu_counters import METRICS, Counted, main, paired, rows, table

MIB = 1 << 20
PRINTED = f"""==PROF== Connected to process 1
up 1.0
"ID","Kernel Name","{METRICS[0]}","{METRICS[1]}"
"","","byte","byte"
"0","ka","{512 * MIB:,}","{300 * MIB}"
"1","void at::native::other<4>","10","20"
"2","kb","{400 * MIB:,}","0"
"3","ka","7","{1 * MIB:,}"
"""
SAID = [{"case": "c", "kernel": k, "operations": "mul sum", "said": n * MIB, "fewest": n * MIB} for k, n
        in (("ka", 830), ("kb", 500), ("ka", 1), ("lost", 9))]


def test_kernels_are_paired_by_name_in_order():
    found = list(paired(SAID, list(rows(PRINTED))))
    assert [(c.kernel, c.read, c.written) for c in found] == [("ka", 512 * MIB, 300 * MIB), ("kb", 400 * MIB, 0), ("ka", 7, MIB)]
    assert [c.judged for c in found] == [True, True, False]
    assert found[0].off == pytest.approx(830 / 812 - 1) and found[1].off == pytest.approx(0.25)


def test_the_table_and_the_exit_status(tmp_path, monkeypatch, capsys):
    found = tuple(paired(SAID, list(rows(PRINTED))))
    assert table(found).splitlines()[2:] == ["| c | sum | 830 | 512 | 300 | +2.2% |", "| c | sum | 500 | 400 | 0 | +25.0% |"]
    file = tmp_path / "found.json"
    for kept, status in ((found, 1), (found[:1], 0), (found[2:], 1)):
        file.write_text(json.dumps([c.__dict__ for c in kept]))
        assert main(["--report", "--json", str(file)]) == status
    assert "0 kernels of at least 256 MiB" in capsys.readouterr().out
    assert isinstance(found[0], Counted) and gpu_counters.WITHIN == 0.1
