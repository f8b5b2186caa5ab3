"""A bias that a table has for each position and head, beside scores of many images: a kernel of its own, laid out as the scores are read."""
import pytest
import torch

from tests.compiled.harness import agree
from tokamak.fuse.inline import inline
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import Target

GRAPH = """graph scores {{
  input %x: f32[{images}, 4, {rows}, {rows}]({image}, {plane}, {rows}, 1)
  input %table: f32[300, 4](4, 1)
  input %at: i64[{plane}](1)
  %bias: f32[{plane}, 4](4, 1) = %table[[%at[i0] < 300], i1]
  %sum: f32[{images}, 4, {rows}, {rows}]({image}, {plane}, {rows}, 1) = add(%x[i0, i1, i2, i3], %bias[i2*{rows} + i3, i1])
  %top: f32[{images}, 4, {rows}]({heads}, {rows}, 1) for i4<{rows} = max[i4](%sum[i0, i1, i2, i4])
  %less: f32[{images}, 4, {rows}, {rows}]({image}, {plane}, {rows}, 1) = sub(%sum[i0, i1, i2, i3], %top[i0, i1, i2])
  return %less
}}"""


def planned(images: int, rows: int):
    plane = rows * rows
    target, text = Target(vector_bytes=32, threads=1), GRAPH.format(images=images, rows=rows, plane=plane, image=4 * plane, heads=4 * rows)
    return plan(inline(parse_graph(text), target), target)


def test_many_images_read_a_bias_that_is_made_once():
    made = planned(64, 49)
    first, second = made.steps
    bias, = made.stores[first]
    assert bias.strides[0] == 1 and bias.strides[1] == 2401         # as the scores are read: position by position
    assert len(made.roles[second].parallel) == 3
    assert [d.reason.code for d in made.decisions if d.reason] == ["no_saving"]


@pytest.mark.parametrize("images,rows", [(2, 128), (8, 16)], ids=["two images", "few bytes"])
def test_a_bias_for_few_images_or_small_is_made_where_it_is_read(images, rows):
    assert len(planned(images, rows).steps) == 1


def test_scores_with_a_gathered_bias_are_right_with_gradients():
    """The table's gradient is a scatter of sums over all images."""
    fn = lambda x, table, at: (x + table[at].view(17, 17, 3).permute(2, 0, 1)).softmax(-1)
    agree(lambda x, table: fn(x, table, torch.arange(289) % 40), [torch.randn(70, 3, 17, 17), torch.randn(40, 3)], grad=True)
