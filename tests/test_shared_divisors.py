"""Divisions by what many elements share, on a GPU: by a reciprocal, rounded once where something is made of the quotient but sums of f32."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compiled.interpreted import compiled, values
from tests.large_gpu import LARGE
from tokamak.codegen import relief
from tokamak.codegen.stages import lower_plan, render_plan, schedule_plan
from tokamak.codegen.triton import render
from tokamak.fuse.cost import Hints
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import target

GPU = target("cpu", interpret=True)


def text(value: str, monoid: str = "sum", policy_fast: bool = True, more: str = "", returned: str = "%out", dtype: str = "f32") -> str:
    """The text of the kernels of a fold of `value` along rows of %x, which share %d."""
    graph = parse_graph(f"""graph quotients {{
  input %x: {dtype}[1000, 700](700, 1)
  input %d: f32[1000](1)
  %out: f32[1000](1) for i1<700 = {monoid}[i1]({value})
  {more}
  return {returned}
}}""")
    on = replace(GPU, fast=policy_fast)
    lowered = lower_plan(schedule_plan(plan(graph, on), on), on)
    return "\n".join(part.unit.text for built in render_plan(lowered).values() for part in built.parts)


X, Q = "%x[i0, i1]", "div(%x[i0, i1], %d[i0])"
STORED = "%all: f32[1000, 700](700, 1) = "


@pytest.mark.parametrize("value", [Q, f"mul({Q}, {X})", f"abs(sub({Q}, 1:f32))", f"div({Q}, %d[i0])", f"where(gt({X}, 0:f32), {Q}, 0:f32)",
                                   f"mul({Q}, {Q})"])
def test_what_nothing_but_sums_is_made_of_is_a_product(value):
    made = text(value)
    assert "tk.near(" in made and "tk.quotient(" not in made and "tl.div_rn(" not in made


@pytest.mark.parametrize("value, monoid", [(Q, "max"), (Q, "prod"), (f"exp({Q})", "sum"), (f"f32(gt({Q}, 1:f32))", "sum"),
                                           (f"div({X}, add({Q}, %d[i0]))", "sum")])
def test_quotients_of_which_something_else_is_made_are_rounded_once(value, monoid):
    assert "tk.quotient(" in text(value, monoid)


def test_quotients_that_are_stored_too_are_rounded_once():
    made = text(Q, more=f"{STORED}{Q}", returned="%out, %all")
    assert "tk.quotient(" in made and "tk.near(" not in made


def test_quotients_of_folds_are_rounded_once():
    """The mean of equal values is that value, from which none of them differs."""
    mean = "%mean: f32[1000](1) = div(%out[i0], 700:f32)"
    off = f"sub({X}, %mean[i0])"
    assert "tk.near(" not in text(X, more=f"{mean}\n  %var: f32[1000](1) for i1<700 = sum[i1](mul({off}, {off}))", returned="%var")
    x = torch.full((7, 700), 0.1) * torch.arange(1, 8)[:, None]
    assert (compiled(lambda x: x.var(-1))(x) <= 1e-14 * x[:, 0] ** 2).all()


def test_other_policies_round_every_quotient_once():
    made = text(Q, policy_fast=False)
    assert "tk.quotient(" in made and "tk.near(" not in made


def columns(value: str, fast: bool = True) -> str:
    """The text of a sum of `value` down columns of %x and %y, each of which has a divisor %d, by programs that take row after row."""
    graph = parse_graph(f"""graph quotients {{
  input %x: f32[3665, 4096](4096, 1)
  input %y: f32[3665, 4096](4096, 1)
  input %d: f32[4096](1)
  %out: f32[4096](1) for i1<3665 = sum[i1]({value})
  return %out
}}""")
    on = replace(LARGE, fast=fast)
    (body, chosen), = schedule_plan(plan(graph, on), on).bodies.values()
    _, kernels = relief.remade(body, chosen, ("tile(i0:1)", "tile(i1:4096)"), Hints({}), on)
    return render(next(k for k in kernels if k.schedule.sizes(k.schedule.dims[0]) == (4096,)), "kernel")


BY_COLUMN = "div(%x[i1, i0], %d[i0])"


def test_a_divisor_that_is_known_before_a_loop_has_its_reciprocal_before_it():
    before, loop = columns(f"mul({BY_COLUMN}, add(%y[i1, i0], {BY_COLUMN}))").split("for ", 1)
    assert "tk.near(" in before and "tk.near(" not in loop and "tl.div_rn(" not in loop and " / " not in loop
    before, loop = columns(f"exp({BY_COLUMN})").split("for ", 1)
    assert "tl.div_rn(1.0" in before and "tk.quotient(" in loop and "tl.div_rn(" not in loop
    assert "tk.quotient(" in columns(BY_COLUMN, fast=False)


def test_a_divisor_of_each_turn_is_divided_by():
    """By the machine's short form where nothing but a sum is made of it."""
    changing = "div(%x[i1, i0], add(abs(%y[i1, i0]), %d[i0]))"
    made = columns(changing)
    assert " / t" in made and "tk.near(" not in made and "tl.div_rn(" not in made
    assert "tl.div_rn(" in columns(f"exp({changing})") and "tl.div_rn(" in columns(changing, fast=False)


@pytest.mark.parametrize("divisor", [3.0, -3.0, 0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 2e38, -3e38, 7e-20])
def test_columns_of_quotients_by_any_divisor(divisor):
    """By programs that take rows in a loop: sums of them, and their greatest."""
    x, y = values(4000, 5).abs() * abs(divisor if abs(divisor) < 1e39 and divisor else 1.0) / 4000, torch.full((5,), divisor)
    fn = lambda x, y: ((x / y).sum(0), (x / y).amax(0))
    for got, want in zip(compiled(fn)(x, y), fn(x, y), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("divisor", [3.0, -3.0, 0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 2e38, -3e38, 7e-20])
def test_sums_of_quotients_by_any_divisor(divisor):
    """None of them vanishes by a divisor whose reciprocal is subnormal: 2^126 and more."""
    x, y = values(6, 700).abs() * abs(divisor if abs(divisor) < 1e39 and divisor else 1.0), torch.full((6,), divisor)
    got = compiled(lambda x, y: (x / y[:, None]).sum(-1))(x, y)
    torch.testing.assert_close(got, (x / y[:, None]).sum(-1), rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("divisor", [2e38, 1e-38, 3.0])
def test_16_bit_quotients_by_any_divisor(divisor):
    x, y = (values(6, 700) * divisor).bfloat16(), torch.full((6,), divisor).bfloat16()
    got, want = compiled(lambda x, y: x / y[:, None])(x, y), x.double() / y.double()[:, None]
    torch.testing.assert_close(got.double(), want, rtol=2 ** -8, atol=0)
