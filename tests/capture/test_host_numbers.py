"""Numbers that Python computes of symbolic sizes: quotients, roots, comparisons. The host computes them at each call and hands them to kernels."""
import math

import pytest
import torch
import torch.nn.functional as F

import tokamak

SHAPES = (5, 3, 8, 9), (4, 6, 7, 11), (9, 2, 6, 6)          # the comparisons below differ between them
PROGRAMS = {
    "nearest to a size": lambda x: F.interpolate(x, size=(x.shape[0] + 3, x.shape[1] + 5)).relu(),
    "bilinear to a size": lambda x: F.interpolate(x, size=(x.shape[0] + 3, x.shape[1] + 5), mode="bilinear").relu() + 1,
    "bilinear by a factor": lambda x: F.interpolate(x, scale_factor=2.5, mode="bilinear"),
    "nearest of means": lambda x: F.interpolate(F.avg_pool2d(x, 2, padding=1, count_include_pad=False), scale_factor=2, mode="nearest"),
    "nearest of overlapping means": lambda x: F.interpolate(F.avg_pool2d(x, 3, 2, padding=1), scale_factor=3, mode="nearest"),
    "part of a row": lambda x: x[..., :int(x.shape[-1] * 0.75)] * 2,
    "whole part": lambda x: x.sum() * math.floor(x.shape[0] * 0.3),
    "quotient": lambda x: x * (1 - 1 / x.shape[0]),
    "remainder": lambda x: x * (x.shape[0] / 3 % 2) + x.shape[1] / 4 // 1,
    "root": lambda x: x / math.sqrt(x.shape[-1]),
    "power": lambda x: x * x.shape[-1] ** -0.5,
    "greater": lambda x: x * max(x.shape[0] / 2, 2.1),
    "comparison": lambda x: x * (x.shape[0] > x.shape[1]),
    "mask": lambda x: (x > 0) & (x.shape[0] > x.shape[1]),
    "bounds": lambda x: x.clamp(-x.shape[0] / 9, x.shape[1] / 7),
    "filled": lambda x: torch.full_like(x, x.shape[0] / 7) + x,
    "parameters": lambda x: F.leaky_relu(x, 1 / x.shape[0]) + torch.add(x, x, alpha=x.shape[0] / 3),
    "of torch's calls": lambda x: torch.fft.fft(x * (1 / x.shape[0])).real.sort()[0] + F.threshold(x, x.shape[1] / 7, 0.5),
}


def check(fn, grad: bool, **options) -> None:
    """`fn` at several sizes against eager, by one graph that is compiled as a whole."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with tokamak.recording() as seen:
        compiled = tokamak.compile(fn, dynamic=True, strict=True, **options)
        for shape in SHAPES:
            x = torch.randn(shape, requires_grad=grad)
            y = x.detach().clone().requires_grad_(grad)
            got, want = compiled(x), fn(y)
            torch.testing.assert_close(got, want)
            if want.requires_grad:
                g = torch.randn_like(want)
                got.backward(g)
                want.backward(g)
                torch.testing.assert_close(x.grad, y.grad)
    assert seen.graphs and not any(g.eager for g in seen.graphs)        # none runs through torch


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_sizes(name, grad):
    check(PROGRAMS[name], grad)


@pytest.mark.parametrize("name", ["nearest to a size", "nearest of means", "quotient", "comparison", "mask", "bounds"])
def test_numbers_of_sizes_in_kernels_for_a_gpu(name):
    pytest.importorskip("triton")
    check(PROGRAMS[name], False, target="interpret")


@pytest.mark.parametrize("name", ["nearest to a size", "quotient", "greater", "mask", "of torch's calls"])
def test_the_reference_computes_them_too(name):
    """Every stage of the compiler is compared with the one before."""
    check(PROGRAMS[name], False, check=True)


@pytest.mark.parametrize("number", [lambda x: x.shape[0] / 3, lambda x: x.shape[0] > x.shape[1], lambda x: max(x.shape[0] / 2, x.shape[1] / 2)])
def test_numbers_that_are_returned(number):
    torch._dynamo.reset()
    compiled = tokamak.compile(lambda x: (x * 2, number(x)), dynamic=True, strict=True)
    for shape in SHAPES:
        x = torch.randn(shape)
        assert compiled(x)[1] == number(x)


def test_a_bilinear_step_of_a_u_net_to_the_size_of_what_it_meets():
    """Sizes that torch found out to vary by itself, at the second call."""
    torch._dynamo.reset()
    fn = lambda x, other: torch.cat([F.interpolate(x, size=other.shape[-2:], mode="bilinear"), other], 1)
    with tokamak.recording() as seen:
        compiled = tokamak.compile(fn, strict=True)
        for n in (4, 5, 7):
            x, other = torch.randn(2, 3, n, n + 2), torch.randn(2, 5, 2 * n + 1, 2 * n + 3)
            torch.testing.assert_close(compiled(x, other), fn(x, other))
    assert len(seen.graphs) == 2 and not any(g.eager for g in seen.graphs)


def test_a_size_that_only_the_run_shows_is_said():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = tokamak.explain(lambda x: x[x > 0].exp(), torch.randn(8))
    assert "a size that only the run shows: u0" in str(found) and "SymBool" not in str(found)
