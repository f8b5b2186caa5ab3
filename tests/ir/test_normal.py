"""The normal form of index expressions: what it says is what was written, and quotients of views behind one another become one."""
from __future__ import annotations

import itertools
import random

import pytest

from tokamak.ir.index import Axis, as_index
from tokamak.ir.normal import floordiv, mod, recombine
from tokamak.ir.substitution import evaluate


@pytest.mark.parametrize("seed", range(8))
def test_quotients_of_quotients(seed):
    """((X // a)*k + b) // c * d + (X + e) % (a*c), at every coordinate."""
    r = random.Random(seed)
    for _ in range(60):
        extents = r.randint(1, 9), r.randint(1, 9)
        x, y = (Axis(n, e) for n, e in enumerate(extents))
        p, q, s = r.randint(-5, 20), r.randint(-3, 9), r.randint(-30, 30)
        a, b, c, d, e, k = r.randint(1, 9), r.randint(-9, 9), r.randint(1, 9), r.randint(1, 9), r.randint(-9, 9), r.choice([1, 1, 2, 3])
        X = as_index(x) * p + as_index(y) * q + s
        made = recombine(floordiv(floordiv(X, as_index(a)) * k + b, as_index(c)) * d + mod(X + e, as_index(a * c)))
        for i, j in itertools.product(*map(range, extents)):
            v = p * i + q * j + s
            assert evaluate(made, {x: i, y: j}) == ((v // a) * k + b) // c * d + (v + e) % (a * c)


def test_a_relative_shift_reads_without_a_division():
    """x of (s, m) as (m, s), without its first row, as (s, m - 1): s = 7, m = 14. Both quotients and both remainders are one position."""
    at = as_index(Axis(0, 7)) * 13 + as_index(Axis(1, 7))
    row, column = floordiv(floordiv(at, as_index(7)) + 1, as_index(2)), mod(at + 7, as_index(14))
    assert row is floordiv(at + 7, as_index(14))
    assert recombine(row * 14 + column) is at + 7
