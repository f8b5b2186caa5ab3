"""How long a kernel takes on a GPU of sm_90, by its machine code: good enough to tell schedules of one kernel from each other. Nothing is run.

    cycles ::= LAUNCH  +  memory: bytes / (BYTES x multiprocessors)
             + waiting: a warp's way through the code x (ALONE x turns of programs + WHOLE x the same, rounded up)
             + issuing: ISSUED x instructions of all warps of the fullest multiprocessor / schedulers
             + stack: STACK x bytes of stack of all its threads

A sum, since what one part of a kernel waits for is seldom hidden behind another. The factors are rounded from fits on 94 kernels of 58 cases that
two seeds drew, 2305 schedules in all (H200, device time); they are off by 19% in the mean. Taking of 26 schedules the one that has 1.25 times less
than the heuristic's, 12 kernels have another one, none of them slower, and all together took 1.07 times less (geometric mean), 1.14 if each had its
best (BENCHMARKS.md, "Schedules by machine code"). `benchmarks/gpu_fit.py` fits factors to what sweeps measured.
"""
from __future__ import annotations

import math

from .gpu_build import Binary
from .gpu_code import resident

LAUNCH = 7000           # cycles of a kernel of one program
BYTES = 16.3            # a cycle and multiprocessor of what lies in memory
ALONE, WHOLE = 0.5, 0.25
ISSUED = 0.8
SCHEDULERS = 4          # of a multiprocessor
STACK = 0.13
FACTORS = LAUNCH, 1 / BYTES, ALONE, WHOLE, ISSUED, STACK
AGAIN = 3               # times as many bytes as there are that turns of all loops would read: then a loop's turn is not one of the schedule's, since
                        # LLVM makes several at once, beside a loop for the rest: sums of 1024 x 65536 f32 seemed twice as long as they are (H200)


def least(moved: int, multiprocessors: int) -> float:
    """Cycles of a kernel that does nothing but read and write so many bytes once."""
    return LAUNCH + moved / (BYTES * multiprocessors)


def terms(made: Binary, programs: int, turns: float, moved: int, multiprocessors: int) -> tuple[float, ...]:
    """What FACTORS are factors of, for a kernel of so many `programs`, which run through their innermost loops `turns` times, and which reads and
    writes `moved` bytes in all. () where its machine code does not say: it is no sm_90's, or its loops are others (AGAIN)."""
    w, warps, each = made.waits, made.threads // 32, max(0.0, turns - 1)
    if not w.cycles or each and w.bytes_again * turns * made.threads * programs > AGAIN * moved:
        return ()
    way, issued = w.cycles + each * w.again, w.issued + each * w.issued_again
    rounds = programs / (multiprocessors * max(1, resident(made.registers, warps, made.shared)))
    fullest = -(-programs // multiprocessors) * warps
    return 1.0, moved / multiprocessors, way * max(1.0, rounds), way * math.ceil(rounds), fullest * issued / SCHEDULERS, fullest * 32.0 * made.spilled


def cycles(*kernel) -> float:
    """Cycles of a kernel as `terms` has it; 0 where that says nothing."""
    return sum((factor * term for factor, term in zip(FACTORS, terms(*kernel))), 0.0)
