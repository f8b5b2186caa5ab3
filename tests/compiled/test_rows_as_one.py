"""Contractions whose rows are several axes that lie in memory as one, in Triton's interpreter, against float64: batch and position, an image's
pixels. What stands behind them is one kernel with them where all of it goes through these axes in step."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokamak.schedule.persistent import PersistentSchedule

from .linear import TOLERANCE, error, run, schedules, values, wide
from .test_persistent import persistent
from .test_products import left, stages  # noqa: F401 (a fixture)


BEHIND = {
    "an activation": (lambda x, w, m: F.gelu(F.linear(x, w)), ()),
    "a residual": (lambda x, w, m: F.linear(x, w) + m, (8, 1024, 4096)),
    "a column for each row": (lambda x, w, m: F.relu(F.linear(x, w)) * m, (8, 1024, 1)),
}
APART = {
    "a number for each image": (lambda x, w, m: F.relu(F.linear(x, w)) * m, (8, 1, 1)),
    "the same for all images": (lambda x, w, m: F.relu(F.linear(x, w)) + m, (1024, 4096)),
    "another order": (lambda x, w, m: F.relu(F.linear(x, w)).transpose(0, 1).contiguous(), ()),
}


@pytest.mark.parametrize("name", [*BEHIND, *APART])
def test_rows_of_several_dimensions_that_all_goes_through_in_step(stages, name):  # noqa: F811
    fn, shape = {**BEHIND, **APART}[name]
    seen, = stages(fn, (8, 1024, 1024), (4096, 1024), shape)
    assert len(left(seen)) == (name in APART)


@pytest.mark.parametrize("turned", [False, True], ids=["heads first", "positions first"])
def test_a_factor_that_is_copied_from_heads_stays_with_the_vendor(stages, turned):  # noqa: F811
    """A kernel would read what is copied, whose depth is two axes, or make rows that are pieces of the result's."""
    attended = lambda x: F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(8, 1000, 1024)
    lies = (lambda x: x.view(8, 1000, 16, 64).transpose(1, 2)) if turned else lambda x: x.view(8, 16, 1000, 64)
    seen, = stages(lambda x, w, b, r: r + F.linear(attended(lies(x)), w, b), (8 * 16 * 1000 * 64,), (1024, 1024), (1024,), (8, 1000, 1024))
    assert len(left(seen)) == 2


@pytest.mark.parametrize("shape", [(2, 70, 136), (2, 70, 1), (2, 1, 1), (70, 136)], ids=str)
def test_what_does_not_go_in_step_is_a_kernel_of_its_own(shape):
    def fn(x, w, m):
        made = F.relu(F.linear(x, w))
        return made, made * m
    inputs = [values(2, 70, 72), values(136, 72), values(*shape)]
    (one, other), (record,) = run(fn, *inputs)
    want = fn(*map(wide, inputs))
    assert error(one, want[0]) <= 8e-3 and error(other, want[1]) <= 8e-3
    assert isinstance(schedules(record)[0], PersistentSchedule) and len(schedules(record)) == (1 if shape[0] == 2 and shape[1] == 70 else 2)


def test_one_kernel_of_rows_of_several_dimensions():
    persistent(lambda x, w, r: F.silu(F.linear(x, w)) + r, values(2, 70, 72), values(136, 72), values(2, 70, 136))


# -- convolutions of one element -------------------------------------------------------------------------------------------
def images(*shape, dtype=torch.bfloat16):
    """Images that lie channels-last."""
    return values(*shape, dtype=dtype).to(memory_format=torch.channels_last)


PIXELS = {
    "a ReLU": lambda x, w, b, r: F.relu(F.conv2d(x, w, b)),
    "scales and a ReLU": lambda x, w, b, r: F.relu(F.conv2d(x, w) * b[:, None, None] + b[:, None, None]),
    "a residual": lambda x, w, b, r: F.relu(F.conv2d(x, w) + r),
}


@pytest.mark.parametrize("name, dtype, channels", [("a ReLU", torch.bfloat16, 136), ("scales and a ReLU", torch.float16, 130),
                                                   ("a residual", torch.bfloat16, 72)])
def test_pixels_are_rows(name, dtype, channels):
    fn = PIXELS[name]
    inputs = [images(2, 72, 9, 8, dtype=dtype), values(channels, 72, 1, 1, dtype=dtype), values(channels, dtype=dtype),
              images(2, channels, 9, 8, dtype=dtype)]
    got, (record,) = run(fn, *inputs)
    made, = schedules(record)
    assert error(got, fn(*map(wide, inputs))) <= TOLERANCE[dtype] and isinstance(made, PersistentSchedule)
    assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", PIXELS)
def test_a_convolution_of_one_element_is_priced_as_a_product(stages, name):  # noqa: F811
    """Of images that lie channels-first no kernel of ours moves the pixels as rows."""
    last, first = lambda x: x.permute(0, 3, 1, 2), lambda x: x
    for lies, shapes in (last, ((32, 28, 28, 256), (1024, 256, 1, 1), (1024,), (32, 28, 28, 1024))), \
            (first, ((32, 256, 28, 28), (1024, 256, 1, 1), (1024,), (32, 1024, 28, 28))):
        seen, = stages(lambda x, w, b, r: PIXELS[name](lies(x), w, b, lies(r)), *shapes)
        assert len(left(seen)) == (lies is first)
