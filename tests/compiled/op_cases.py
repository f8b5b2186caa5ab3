"""torch's operator database as cases for the compiler: which operators, types and samples, and what became of each.

    for case in cases(seed=0, most=3): outcome = examine(case)
"""
from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.capture.through_reference import drawn, of_tensors, seeded
from tests.compiled.harness import CompilerFailed, agree, leaves

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)}
RANDOM = ("bernoulli", "multinomial", "normal", "rand", "randint", "randn", "uniform", "cauchy", "exponential", "geometric", "log_normal", "dropout",
          "rrelu", "fractional_max_pool", "empty", "pca_lowrank", "svd_lowrank", "multi_head_attention", "scaled_dot_product_attention")
SKIPPED = {"empty": "values are whatever memory holds", "empty_like": "values are whatever memory holds",
           "new_empty": "values are whatever memory holds",
           "new_empty_strided": "values are whatever memory holds", "empty_strided": "values are whatever memory holds",
           "empty_permuted": "values are whatever memory holds"}


@dataclass(frozen=True)
class Case:
    """Operator `name` (with its variant) of the database in type `dtype`."""
    name: str
    dtype: str
    most: int = 4           # samples, evenly spread over all
    target: str = ""        # as the harness'

    @property
    def op(self):
        return OPS[self.name]


OPS = {o.name + (f".{o.variant_test_name}" if o.variant_test_name else ""): o for o in op_db}


@dataclass
class Outcome:
    """What became of a case. `runs`: samples compared; `failed`: (sample, what); `opaque`: operator -> reason; `skipped`: why nothing ran."""
    name: str
    dtype: str
    runs: int = 0
    graphs: int = 0
    kernels: int = 0
    backward: int = 0
    failed: list = field(default_factory=list)
    opaque: dict = field(default_factory=dict)
    untraced: dict = field(default_factory=dict)
    skipped: str = ""

    def row(self) -> dict:
        return asdict(self)


def cases(names=None, dtypes=None, most: int = 4, part: float = 1.0, seed: int = 0, target: str = "") -> list[Case]:
    """The cases of these operators and types, or of all; with `part` under 1 a sample of that share, stratified by type and fixed by `seed`."""
    out = []
    for dtype in dtypes or DTYPES:
        found = [Case(n, dtype, most, target) for n, o in OPS.items()
                 if (names is None or n in names or o.name in names) and DTYPES[dtype] in o.dtypes]
        if part < 1:
            found = random.Random(f"{seed} {dtype}").sample(found, max(1, round(part * len(found))))
        out += found
    return sorted(out, key=lambda c: (c.name, c.dtype))


def samples(case: Case, grad: bool) -> Iterator[tuple]:
    """(fn, tensors) of up to `case.most` samples."""
    op = case.op
    found = drawn(op, DTYPES[case.dtype], grad)
    step = max(1.0, len(found) / case.most)
    for sample in (found[int(i * step)] for i in range(min(case.most, len(found)))):
        fn, tensors = of_tensors(op, sample)
        if not any(t.layout is not torch.strided or t.is_conj() or t.is_neg() for t in tensors):
            yield fn, tensors


class TooSlow(Exception):
    """A sample took too long."""


def examine(case: Case, seconds: int = 40) -> Outcome:
    """Runs the samples of `case` forward, and backward where there is one."""
    out = Outcome(case.name, case.dtype)
    base = case.op.name.split(".")[-1]
    if base in SKIPPED:
        out.skipped = SKIPPED[base]
        return out
    grads = (False, True) if case.op.supports_autograd and DTYPES[case.dtype] in case.op.supported_backward_dtypes("cpu") else (False,)
    for grad in grads:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for n, (fn, tensors) in enumerate(samples(case, grad)):
                _examine_sample(out, n, fn, tensors, grad, seconds, case.target)
    if not out.runs and not out.failed:
        out.skipped = out.skipped or next(iter(out.untraced.values()), "no sample that eager runs")
    return out


def _examine_sample(out: Outcome, n: int, fn, tensors, grad: bool, seconds: int, target: str) -> None:
    try:
        seeded(0)
        made = leaves(fn(*(t.detach().clone().requires_grad_(t.requires_grad) if t.numel() < 10**6 else t for t in tensors)))
    except Exception:                                      # eager refuses this sample: there is nothing to compare with
        return
    if grad and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in made):
        return
    if any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in made):
        out.untraced[str(n)] = "a layout that is not strided"
        return
    policy = "eager" if any(r in out.name for r in RANDOM) else "fast"

    def late(*_):
        raise TooSlow(f"over {seconds} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        seen = agree(fn, tensors, grad, policy, target=target)
    except AssertionError as wrong:
        out.failed.append((f"{'backward' if grad else 'forward'} {n}", f"wrong: {first_line(wrong)}"))
    except CompilerFailed as error:
        out.failed.append((f"{'backward' if grad else 'forward'} {n}", f"compiler: {first_line(error)}"))
    except TooSlow as error:
        out.failed.append((f"{'backward' if grad else 'forward'} {n}", f"slow: {error}"))
    except Exception as error:
        if _from_us(error):
            out.failed.append((f"{'backward' if grad else 'forward'} {n}", f"run: {type(error).__name__}: {first_line(error)}"))
        else:
            out.untraced[f"{'backward' if grad else 'forward'} {n}"] = f"AOTAutograd: {type(error).__name__}: {first_line(error)}"
    else:
        out.runs += 1
        out.backward += grad
        out.graphs += seen.graphs
        out.kernels += seen.kernels
        out.opaque.update(seen.opaque)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _from_us(error: BaseException) -> bool:
    """Raised while a compiled program ran?"""
    at = error.__traceback__
    while at is not None:
        if "tokamak/" in at.tb_frame.f_code.co_filename or at.tb_frame.f_code.co_filename.startswith("<tokamak"):
            return True
        at = at.tb_next
    return False


def first_line(error) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
