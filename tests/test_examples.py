"""The demo's counts: eager's as it runs, tokamak's from its plan. They follow the program."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import tokamak

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import demo  # noqa: E402
import programs  # noqa: E402

ROW = re.compile(r"^\| `?([^|`]+)`? \| (\d+) \| (\d+(?: \+ \d+)?) \| (\d+) → (\d+) \|", re.MULTILINE)


def counted(program, args, backward: bool = False) -> tuple[tuple[int, int], tuple[int, int], int]:
    """((operations, memory operations) of eager, the same of tokamak, calls of torch among these)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    before, after, calls, least = demo.count(demo.runner(program, args, backward),
                                             demo.runner(program, args, backward, lambda f: torch.compile(f, backend="tokamak")))
    assert 0 < least <= after.bytes <= before.bytes
    return (before.operations, before.accesses), (after.operations, after.accesses), calls


def test_three_kernels_and_eight_memory_operations_become_one_and_four():
    args = tuple(torch.randn(64, 64) for _ in range(3))
    assert counted(programs.multiply_add_relu, args) == ((3, 8), (1, 4), 0)


def test_another_program_has_other_counts():
    args = tuple(torch.randn(64, 64) for _ in range(3))
    assert counted(lambda a, b, c: torch.relu(a * b + c) - b, args) == ((4, 11), (1, 4), 0)
    assert counted(lambda a, b, c: torch.relu(a * b + c) @ b, args) == ((4, 11), (2, 7), 1)


def test_a_gpu_has_the_same_counts_where_no_fold_is_split():
    pytest.importorskip("triton")
    args = tuple(torch.randn(64, 64) for _ in range(3))
    with tokamak.scope(target="interpret", strict=True):
        assert counted(programs.multiply_add_relu, args) == ((3, 8), (1, 4), 0)
        assert counted(programs.layer_norm, (args[0], args[1][0], args[2][0])) == ((10, 25), (1, 4), 0)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))])
@pytest.mark.parametrize("example", [programs.EXAMPLES[0], programs.EXAMPLES[3], programs.EXAMPLES[9]], ids=lambda e: e.name)
def test_a_row_is_measured_where_it_is_asked_for(example, where, monkeypatch):
    monkeypatch.setattr(programs, "ROWS", 64)
    monkeypatch.setattr(demo, "SECONDS", 0.0)
    row = demo.measure(example, where)
    assert row.fused_ms > 0 and row.fused_error < 2e-6 and row.fused.bytes >= row.least > 0
    assert example.name in demo.sentence(row)


@pytest.mark.parametrize("example", programs.EXAMPLES, ids=lambda e: e.name)
def test_the_examples_agree_with_float64_and_with_the_readme(example, monkeypatch):
    monkeypatch.setattr(programs, "ROWS", 512)
    torch.manual_seed(0)
    program, args = example.make()
    fused = demo.runner(program, args, example.backward, lambda f: torch.compile(f, backend="tokamak"))
    assert demo.error(fused(), demo.exact(program, args, example.backward)) < 2e-6
    for name, operations, kernels, before, after in ROW.findall((ROOT / "README.md").read_text()):
        if name == example.name:
            own, _, calls = kernels.partition(" + ")
            calls = int(calls or 0)
            assert counted(program, args, example.backward) == ((int(operations), int(before)), (int(own) + calls, int(after)), calls)
