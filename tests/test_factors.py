"""Factors that are the same for all that a sum adds are multiplied once, and sums that differ by such factors alone are one."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.compiled.interpreted import check
from tokamak.fuse import lines
from tokamak.fuse.factors import Factors
from tokamak.fuse.plan import plan
from tokamak.ir.expr import walk
from tokamak.ir.graph import Compute, fold
from tokamak.ir.parse import parse_graph
from tokamak.ir.text import print_expr
from tokamak.target import Target

LARGE = Target("cpu", 16, 132, l1=1 << 18, l2=50 << 20, kind="gpu", arch=("cuda", 90, 32), cluster=8, fast=True)

# gradients of channels and of groups of them, in channels-last; %scaled and %both have factors of a channel and of an image
GRADIENTS = """graph gradients {
  input %x: f32[32, 3136, 256](802816, 256, 1)
  input %dy: f32[32, 3136, 256](802816, 256, 1)
  input %w: f32[256](1)
  input %std: f32[32, 32](32, 1)
  %scaled: f32[32, 3136, 256](802816, 256, 1) = mul(%dy[i0, i1, i2], %w[i2])
  %both: f32[32, 3136, 256](802816, 256, 1) = div(mul(sigmoid(%x[i0, i1, i2]), %x[i0, i1, i2]), %std[i0, (i2 // 8)])
  %groups: f32[32, 32](32, 1) for i2<3136, i3<8 = sum[i2, i3](mul(neg(%both[i0, i2, i1*8 + i3]), %scaled[i0, i2, i1*8 + i3]))
  %channels: f32[256](1) for i1<32, i2<3136 = sum[i1, i2](mul(%dy[i1, i2, i0], %both[i1, i2, i0]))
  %dx: f32[32, 3136, 256](802816, 256, 1) = add(%scaled[i0, i1, i2], mul(%both[i0, i1, i2], %groups[i0, (i2 // 8)]))
  return %channels, %dx
}"""


def sums(graph) -> list[str]:
    """What the long sums of `graph` add, with the numbers of its nodes' kinds left out."""
    return [print_expr(part.args[0]) for n in graph.nodes if isinstance(n, Compute) and (part := fold(n)) is not None
            and any(a.extent.constant == 3136 for a in part.over)]


def test_sums_that_differ_by_factors_are_one_sum_of_one_product():
    found = lines.whole_lines(parse_graph(GRADIENTS), LARGE)
    assert len(sums(found)) == 2 and not any("div" in text or "neg" in text or "%w" in text for text in sums(found))
    groups = [s for s in plan(found, LARGE).steps if any((f := fold(m.node)) is not None and len(f.over) == 1 and f.over[0].extent.constant == 3136
                                                         for m in s.members)]
    assert len(groups) == 1


def test_factors_stay_where_each_operation_rounds_as_it_was_written():
    found = lines.whole_lines(parse_graph(GRADIENTS), replace(LARGE, fast=False))
    assert any("neg" in text for text in sums(found))


@pytest.mark.parametrize("value, left", [
    ("mul(%x[i0, i1], %w[i0])", "%x"), ("div(%x[i0, i1], %w[i0])", "%x"), ("neg(%x[i0, i1])", "%x"),
    ("mul(mul(%w[i0], %x[i0, i1]), %x[i0, i1])", "mul(%x"),
    ("div(%w[i0], %x[i0, i1])", None), ("add(%x[i0, i1], %w[i0])", None), ("%x[i0, i1]", None), ("mul(%w[i0], %w[i0])", None),
])
def test_what_counts_as_a_factor(value, left):
    graph = parse_graph(f"""graph one {{
  input %x: f32[64, 64](64, 1)
  input %w: f32[64](1)
  %out: f32[64](1) for i1<64 = sum[i1]({value})
  return %out
}}""")
    part = fold(graph.nodes[-1])
    found = Factors(set()).of(part.args[0], frozenset(part.over))
    assert found is None if left is None else print_expr(found[0]).startswith(left)


@pytest.mark.parametrize("stored, looked_into", [(False, True), (True, False)])
def test_the_rounding_of_a_stored_value_stays(stored, looked_into):
    graph = parse_graph("""graph rounded {
  input %x: bf16[64, 64](64, 1)
  input %w: bf16[64](1)
  %y: bf16[64, 64](64, 1) = bf16~(mul(f32(%x[i0, i1]), f32(%w[i0])))
  %out: f32[64](1) for i1<64 = sum[i1](mul(f32(%y[i0, i1]), f32(%x[i0, i1])))
  return %y, %out
}""")
    y, part = graph.nodes[-2], fold(graph.nodes[-1])
    found = Factors({y} if stored else set()).of(part.args[0], frozenset(part.over))
    assert (found is not None) == looked_into and (found is None or len(walk(found[0])) == 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_factors_left_behind_are_right(monkeypatch, dtype):
    for name, value in (("LEAST", 1), ("RUN", 16), ("HELD", 64)):
        monkeypatch.setattr(lines, name, value)

    def norm(x, v, w, b):
        n, c, h, wide = x.shape
        std = torch.sqrt(x.reshape(n, 4, c // 4, h, wide).var((2, 3, 4), keepdim=True, unbiased=False) + 1e-5)
        std = std.expand(n, 4, c // 4, h, wide).reshape(n, c, h, wide)
        return x * torch.sigmoid(v * x) / std * w + b
    image = (torch.randn(2, 32, 11, 9) + 1).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    check(norm, image, *(torch.randn(1, 32, 1, 1).to(dtype).requires_grad_() for _ in range(3)), tolerance=1e-3)
