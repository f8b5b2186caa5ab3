"""TOKAMAK_CHECK=1: right programs pass, and a wrong kernel or rewrite is named with its source line."""
import pytest
import torch
from torch import nn

import tokamak
from tokamak.codegen import stages
from tokamak.errors import CheckFailed
from tokamak.fuse import contract
from tokamak.ir.expr import Op, Rewriter
from tokamak.ir.graph import Compute


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def checked(fn, **options):
    return tokamak.compile(fn, check=True, strict=True, cache_dir="", **options)


def broken(monkeypatch, old: str, new: str):
    """From now on the C of every kernel has `new` in place of the last `old`."""
    true = stages.render

    def render(kernel, name):
        prelude, text = true(kernel, name)
        at = text.rindex(old)
        return prelude, text[:at] + new + text[at + len(old):]
    monkeypatch.setattr(stages, "render", render)


@pytest.mark.parametrize("policy, dtype", [("fast", torch.float32), ("fast", torch.bfloat16), ("eager", torch.float16), ("strict", torch.float32)])
def test_right_programs_pass(policy, dtype):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.4), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(6, 8, dtype=dtype, requires_grad=True)
    fn = checked(lambda x: torch.cat([model(x).softmax(-1), x[:, ::2]], 1), policy=policy)
    for _ in range(2):
        fn(x).square().sum().backward()
    assert x.grad.isfinite().all()


def test_views_mutation_integers_and_numbers_pass():
    def fn(x, i, s):
        x.add_(s)
        y = x[:, i].cumsum(0).argmax(1)
        return x.t(), y, (x > 0).sum(), x.shape[0], torch.rand_like(x)
    with torch.no_grad():
        checked(fn)(torch.randn(4, 5), torch.tensor([0, 3, 3]), 0.5)
        torch._dynamo.reset()
        checked(fn, dynamic=True)(torch.randn(4, 5), torch.tensor([0, 3, 3]), 0.5)


def test_calls_that_return_complex_numbers_pass():
    """What kernels make of them is compared; the numbers themselves are torch's, NaN, too."""
    fn = checked(lambda x: (torch.fft.fft(x * 2).conj() * 2j).real.abs() + torch.view_as_real(torch.fft.rfft(x)).square().sum())
    for x in (torch.randn(8), torch.full((8,), float("nan"))):
        fn(x)


@pytest.mark.parametrize("fn", [lambda x: x[:int(x.shape[0] * 0.75)] * 2, lambda x: x[:round(x.shape[0] * 0.3)] * 2,
                                lambda x: nn.functional.interpolate(x[None, None], scale_factor=1.7)])
def test_sizes_that_are_made_of_numbers_pass(fn):
    x = torch.randn(8, 3)
    assert torch.allclose(checked(fn, dynamic=True)(x), fn(x))


def test_calls_with_an_effect_pass():
    """They are given a token, which has no value."""
    x = torch.eye(4) * 3
    assert torch.allclose(checked(lambda x: torch.linalg.inv(x) * 2)(x), torch.linalg.inv(x) * 2)


def test_sums_of_what_has_cancelled_pass():
    """The gradient of a norm whose outcome is summed is nothing but rounding."""
    m, x = nn.InstanceNorm2d(6, affine=True), torch.randn(3, 6, 4, 5, requires_grad=True)
    checked(m)(x).sum().backward()
    assert x.grad.abs().max() < 1e-5


def test_a_wrong_sum_of_what_has_cancelled_is_found(monkeypatch):
    def norm(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / centred.square().mean(-1, keepdim=True).sqrt() * 2
    broken(monkeypatch, "splat_f32(2.0)", "splat_f32(2.001)")
    with pytest.raises(CheckFailed):
        checked(norm)(torch.randn(6, 40) + 3)


def test_a_wrong_kernel_behind_complex_numbers_is_found(monkeypatch):
    broken(monkeypatch, "splat_f32(2.0)", "splat_f32(2.001)")
    with pytest.raises(CheckFailed, match="largest error"):
        checked(lambda x: torch.fft.fft(x).real * 2)(torch.randn(100))


def test_a_wrong_kernel_is_named_with_its_line(monkeypatch):
    broken(monkeypatch, "splat_f32(2.0)", "splat_f32(2.001)")
    with pytest.raises(CheckFailed, match=r"mul 'mul'|mul\.Tensor.*test_check\.py.*x \* 2.*largest error"):
        checked(lambda x: x * 2)(torch.ones(100))


def test_a_wrong_integer_is_found(monkeypatch):
    broken(monkeypatch, "splat_i64(2)", "splat_i64(3)")
    with pytest.raises(CheckFailed, match="100 of 100 elements"):
        checked(lambda x: x * 2)(torch.ones(100, dtype=torch.int64))


def test_a_wrong_rewrite_is_found(monkeypatch):
    def wrong(graph):
        flip = Rewriter(leaf=lambda e: Op("sub", *e.args) if isinstance(e, Op) and e.name == "add" else None)
        node, = (n for n in graph.nodes if isinstance(n, Compute))
        new = Compute(node.shape, node.strides, flip(node.expr))
        view = graph.outputs[0]
        return type(graph)(graph.inputs, (*graph.nodes[:-1], new), (type(view)(new, view.shape, view.strides, view.offset),), origins=graph.origins)
    monkeypatch.setattr("tokamak.backend.simplify", wrong)
    with pytest.raises(CheckFailed, match="output 0 differs from the captured program's"):
        checked(lambda x, y: x + y)(torch.rand(9), torch.rand(9))


def test_nothing_is_loaded_unless_asked():
    import subprocess
    import sys
    code = "import sys, torch, tokamak; tokamak.compile(lambda x: x + 1, cache_dir='')(torch.ones(3)); assert 'tokamak.check' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_constant_of_the_program_under_a_gradient():
    """Constants are looked at when a graph is called: while it is compiled every tensor is a fake one."""
    table = torch.tensor(3.0)
    x = torch.rand(5, requires_grad=True)
    checked(lambda x: torch.where(x > 0.5, x * 2, torch.tensor(0.0)) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * table)(x).sum().backward()
    assert x.grad.isfinite().all()


def test_a_product_that_the_vendors_sum_leaves_out_is_seen(monkeypatch):
    """The program's own calls are as the plan says; what it was captured from says that there is one more."""
    pytest.importorskip("triton")
    whole = contract.sums_behind
    monkeypatch.setattr(contract, "sums_behind", lambda *args: dict(list(whole(*args).items())[:-1]))
    inputs = [torch.randn(*s) for s in ((24, 32), (24, 40), (24, 48), (32, 56), (40, 56), (48, 56))]
    fn = lambda a, b, c, u, v, w: a @ u + b @ v + c @ w
    with pytest.raises(CheckFailed, match="captured program's"):
        checked(fn, target="interpret")(*inputs)
    torch._dynamo.reset()
    monkeypatch.setattr(contract, "sums_behind", whole)
    assert torch.allclose(checked(fn, target="interpret")(*inputs), fn(*inputs), atol=1e-4)
