"""How long a kernel takes by its machine code: what makes it longer, and where nothing is known."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tokamak.runtime import gpu_estimate
from tokamak.runtime.gpu_build import Binary, GpuUnit
from tokamak.runtime.gpu_code import Waits

ONE = Binary(GpuUnit("k", "", ()), ("cuda", 90, 32), b"", "k", 0, 128, 64, 0, (0, 1), 2, (), b"", Waits(2000, 1, 16, 300, 500, 100, 4))
SMS = 132


def cycles(made=ONE, programs=4096, turns=4.0, moved=1 << 30):
    return gpu_estimate.cycles(made, programs, turns, moved, SMS)


def test_it_is_never_less_than_its_bytes_take():
    assert cycles() > gpu_estimate.least(1 << 30, SMS) > gpu_estimate.least(1 << 20, SMS) >= gpu_estimate.LAUNCH


@pytest.mark.parametrize("worse", [
    {"registers": 128}, {"shared": 100_000}, {"spilled": 400}, {"threads": 512, "registers": 255},
    {"waits": replace(ONE.waits, cycles=4000)}, {"waits": replace(ONE.waits, issued=900)}, {"waits": replace(ONE.waits, again=1500)}])
def test_what_makes_a_kernel_longer(worse):
    """Fewer programs at once, a stack, more waiting, more instructions, longer loops."""
    assert cycles(replace(ONE, **worse)) > cycles()


def test_turns_and_programs_and_bytes_make_it_longer():
    assert cycles(turns=8.0) > cycles(turns=1.0) and cycles(programs=1 << 16) > cycles() and cycles(moved=1 << 31) > cycles()


def test_fewer_turns_than_one_are_one():
    assert cycles(turns=0.25) == cycles(turns=1.0)


def test_where_the_machine_code_does_not_say_nothing_is_known():
    """No sm_90, or loops whose turns read far more than there is: LLVM makes several of a loop's turns at once."""
    assert cycles(replace(ONE, waits=Waits(0, 0, 0))) == 0
    unrolled = replace(ONE, waits=replace(ONE.waits, bytes_again=4000))
    assert cycles(unrolled) == 0 < cycles(unrolled, turns=1.0)
