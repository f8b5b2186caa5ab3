"""How long a kernel takes on a GPU of sm_90, by its machine code: good enough to tell schedules of one kernel from each other. Nothing is run.

    cycles   ::=  LAUNCH  +  (memory ^ hidden  +  work ^ hidden) ^ (1 / hidden)
    memory   ::=  bytes / (BYTES x multiprocessors)
    work     ::=  waiting: WAY x a warp's way through the code x turns of programs, rounded up
               +  issuing: ISSUED x instructions of all warps of the fullest multiprocessor / schedulers
               +  stack: LOCAL x bytes that its threads read and write there
               +  shared memory: SHARED x how often its warps go to all banks of it
               +  global memory: LINES x lines of the cache that its warps' reads and writes touch
               +  beginning: PROGRAM x programs of that multiprocessor
    hidden   ::=  1  +  BESIDE x log2 of programs beside each other on a multiprocessor  +  ROUNDS x log2 of how often others take their places
               +  COPIES where memory is copied while warps go on

Nearly a sum: little of what one program waits for is hidden behind another that began when it did, more behind those that begin when others end, and
behind asynchronous copies. The factors are rounded from fits on 96 kernels, most of which take long, under 1589 schedules in all, and on 85 as the
heuristics have them (H200, device time). BENCHMARKS.md, "Schedules by machine code", says how far they are off, and what came of what was taken by
them. `benchmarks/gpu_fit.py` fits factors to what sweeps measured.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

from .gpu_build import Binary
from .gpu_code import resident, Waits

LAUNCH = 6800           # cycles of a kernel of one program
BYTES = 17.5            # a cycle and multiprocessor of what lies in memory
WAY = 0.8
ISSUED = 0.25
SCHEDULERS = 4          # of a multiprocessor
LOCAL = 0.025
SHARED = 1.2
LINES = 0.9
PROGRAM = 25
BESIDE = 0.15
ROUNDS = 0.2
COPIES = 0.5
FACTORS = LAUNCH, 1 / BYTES, WAY, ISSUED, LOCAL, SHARED, LINES, PROGRAM, BESIDE, ROUNDS, COPIES


def least(moved: int, multiprocessors: int) -> float:
    """Cycles of a kernel that does nothing but read and write so many bytes once."""
    return LAUNCH + moved / (BYTES * multiprocessors)


def terms(made: Binary, programs: int, turns: float, moved: int, lines: tuple[int, int], multiprocessors: int) -> tuple[float, ...]:
    """What FACTORS are factors of, for a kernel of so many `programs`, which run through their innermost loops `turns` times, and which reads and
    writes `moved` bytes in all, and each warp so many `lines` (`gpu_access.lines`). () where its machine code does not say: it is no sm_90's."""
    w, warps, each = made.waits, made.threads // 32, max(0.0, turns - 1)
    again = w.again or Waits(0, 0, 0)
    if not w.cycles:
        return ()
    taken = lambda what: getattr(w, what) + each * getattr(again, what)
    held, share = max(1, resident(made.registers, warps, made.shared)), max(1, -(-programs // multiprocessors))
    fullest = share * warps
    return (1.0, moved / multiprocessors, taken("cycles") * math.ceil(programs / (multiprocessors * held)), fullest * taken("issued") / SCHEDULERS,
            fullest * 32.0 * taken("local"), float(fullest * taken("shared")),
            fullest * (lines[0] + each * lines[1]), float(share), math.log2(min(held, share)),
            math.log2(max(1.0, share / held)), float(w.copies > 0))


def cycles(*kernel) -> float:
    """Cycles of a kernel as `terms` has it; 0 where that says nothing."""
    return combined(found) if (found := terms(*kernel)) else 0.0


def combined(terms: Sequence[float], factors: Sequence[float] = FACTORS) -> float:
    """Cycles by these terms."""
    launch, memory, *work, beside, rounds, copies = (factor * term for factor, term in zip(factors, terms))
    hidden, longer = 1 + beside + rounds + copies, max(memory, *work)
    return launch + longer * ((memory / longer) ** hidden + (sum(work) / longer) ** hidden) ** (1 / hidden) if longer else launch
