"""How long a kernel takes by its machine code: what makes it longer, and where nothing is known."""
from __future__ import annotations

from dataclasses import replace

import pytest

from tokamak.runtime import gpu_estimate
from tokamak.runtime.gpu_build import Binary, GpuUnit
from tokamak.runtime.gpu_code import Waits

WAITS = Waits(2000, 1, 16, 300, 8, 20, 0, Waits(500, 0, 4, 100, 0, 4, 0))
ONE = Binary(GpuUnit("k", "", ()), ("cuda", 90, 32), b"", "k", 0, 128, 64, 0, (0, 1), 2, (), b"", WAITS)
SMS = 132


def cycles(made=ONE, programs=4096, turns=4.0, moved=1 << 30, lines=(40, 10)):
    return gpu_estimate.cycles(made, programs, turns, moved, lines, SMS)


def test_it_is_never_less_than_its_bytes_take():
    assert cycles() > gpu_estimate.least(1 << 30, SMS) > gpu_estimate.least(1 << 20, SMS) >= gpu_estimate.LAUNCH


@pytest.mark.parametrize("worse", [
    {"registers": 128}, {"shared": 100_000}, {"threads": 512, "registers": 255}, {"waits": replace(WAITS, cycles=4000)},
    {"waits": replace(WAITS, issued=900)}, {"waits": replace(WAITS, local=64)}, {"waits": replace(WAITS, shared=80)},
    {"waits": replace(WAITS, again=replace(WAITS.again, cycles=1500))}, {"waits": replace(WAITS, again=replace(WAITS.again, local=64))},
    {"waits": replace(WAITS, again=replace(WAITS.again, shared=64))}])
def test_what_makes_a_kernel_longer(worse):
    """Fewer programs at once, more waiting, more instructions, a stack, shared memory, and all of these in loops."""
    assert cycles(replace(ONE, **worse)) > cycles()


def test_lines_of_the_cache_make_it_longer():
    """Of the whole way through it, and of each further turn."""
    assert cycles(lines=(400, 10)) > cycles(lines=(40, 40)) > cycles() > cycles(lines=(0, 0))


def test_copies_beside_it_hide_memory_and_no_more():
    copied = cycles(replace(ONE, waits=replace(WAITS, copies=3)))
    assert max(gpu_estimate.least(1 << 30, SMS), cycles(moved=0)) < copied < cycles()


def test_a_kernel_that_does_nothing_is_a_launch():
    assert gpu_estimate.combined((1.0, *[0.0] * 10)) == gpu_estimate.LAUNCH


def test_no_exponent_is_too_large():
    assert gpu_estimate.combined((1.0, 1e9, 1e3, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 0.0, 1.0), (*gpu_estimate.FACTORS[:-1], 1e6)) == \
        pytest.approx(gpu_estimate.LAUNCH + 1e9 / gpu_estimate.BYTES)


def test_turns_and_programs_and_bytes_make_it_longer():
    assert cycles(turns=8.0) > cycles(turns=1.0) and cycles(programs=1 << 16) > cycles() and cycles(moved=1 << 31) > cycles()


def test_fewer_turns_or_programs_than_one_are_one():
    """Of what has no elements."""
    assert cycles(turns=0.25) == cycles(turns=1.0) and 0 < cycles(programs=0, turns=0.0, moved=0) <= cycles(programs=1, turns=0.0, moved=0)


def test_where_the_machine_code_does_not_say_nothing_is_known():
    """It is no sm_90's."""
    assert cycles(replace(ONE, waits=Waits(0, 0, 0))) == 0
