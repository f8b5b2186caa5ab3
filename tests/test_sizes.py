"""Sizes: the kernels of one size serve others, and programs with symbolic sizes compute what eager computes."""
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import tokamak
from tests.graphs import programs
from tokamak.backend import backend
from tokamak.codegen.stages import schedule_plan
from tokamak.fuse.plan import plan
from tokamak.ir.parse import parse_graph
from tokamak.target import Target
from tokamak.tools.record import recording

F = nn.functional


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Block(nn.Module):
    """Pre-norm attention and MLP, attention spelled out."""

    def __init__(self, width: int = 48, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


def cross_entropy(x):
    return F.cross_entropy(x, (x.detach()[:, 0] > 0).long() + 1)


PROGRAMS = {
    "gelu": (lambda: gelu, [(64, 100), (30, 77), (50, 50), (513, 1025), (2, 3)]),
    "layer_norm": (lambda: nn.LayerNorm(48), [(64, 48), (48, 48), (31, 48), (200, 48)]),
    "softmax": (lambda: lambda x: x.softmax(-1), [(64, 100), (33, 77), (50, 50), (200, 1000)]),
    "cross_entropy": (lambda: cross_entropy, [(64, 100), (33, 77), (50, 50), (200, 1000)]),
    "rms_norm": (lambda: lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), [(6, 64, 48), (5, 77, 48), (48, 48, 48)]),
    "block": (Block, [(8, 64, 48), (7, 33, 48), (20, 20, 48), (48, 48, 48)]),       # rows of up to 16 are folded otherwise
}


def built(fn, shape, **options) -> set[str]:
    """Keys of the kernels that `fn` forward and backward on an input of `shape` is made of; it computes what eager computes."""
    torch._dynamo.reset()
    x = torch.randn(shape)
    with recording(cache_dir="", strict=True) as recorder:
        check(tokamak.compile(fn, **options), fn, x)
    return {b.key for g in recorder.graphs for b in g.values["render"].values()}


def check(mine, fn, x) -> None:
    """Outputs and gradients against eager."""
    found = []
    for f in (mine, fn):
        y = x.clone().requires_grad_()
        out = f(y)
        out.square().sum().backward()
        found.append((out.detach(), y.grad))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_other_sizes_build_no_kernel(name, dynamic):
    make, shapes = PROGRAMS[name]
    fn = make()
    first = built(fn, shapes[0], dynamic=dynamic)
    for shape in shapes[1:]:
        new = built(fn, shape, dynamic=dynamic) - first
        assert not new, f"{len(new)} kernels of {shape} are not those of {shapes[0]}"


def test_symbolic_sizes_share_the_kernels_of_constant_ones():
    assert built(gelu, (40, 50), dynamic=True) == built(gelu, (64, 100))
    softmax = PROGRAMS["softmax"][0]()
    assert built(softmax, (40, 50), dynamic=True) == built(softmax, (64, 100))


@pytest.mark.parametrize("name", ["layer_norm", "block"])
def test_a_batch_of_one_is_a_class_of_its_own(name):
    make, shapes = PROGRAMS[name]
    fn = make()
    known = built(fn, shapes[0]) | built(fn, (1, *shapes[0][1:]))
    if name == "block":
        assert not built(fn, (1, 40, 48)) - known
    assert not built(fn, (9, *shapes[0][1:])) - known


def test_marked_dynamic_sizes_are_captured_once():
    model, calls = Block(), []
    with recording(cache_dir="", strict=True) as recorder:
        mine = tokamak.compile(model)
        for batch, length in ((3, 10), (5, 10), (4, 12), (7, 9)):
            x = torch.randn(batch, length, 48)
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
            torch.testing.assert_close(mine(x), model(x), rtol=1e-4, atol=1e-5)
            calls.append(len(recorder.graphs))
    assert calls == calls[:1] * 4


def test_a_second_size_is_captured_with_symbols_and_builds_nothing():
    fn = PROGRAMS["layer_norm"][0]()
    mine = tokamak.compile(fn, strict=True, cache_dir="")
    with recording(cache_dir="", strict=True) as recorder:
        mine = tokamak.compile(fn)
        for rows in (64, 30, 17, 100):
            mine(torch.randn(rows, 48)).sum().backward()
    kernels = [{b.key for b in g.values["render"].values()} for g in recorder.graphs if "render" in g.values]
    assert len(recorder.frames) == 2 and set().union(*kernels[len(kernels) // 2:]) <= set().union(*kernels[:len(kernels) // 2])


# -- programs of any kind ------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_any_program_with_symbolic_sizes(program):
    torch._dynamo.reset()
    want = program.fn(*program.inputs)
    got = tokamak.compile(program.fn, dynamic=True, policy="eager", strict=True, cache_dir="")(*program.inputs)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a, b, equal_nan=True, **program.tolerance(i, b))


# -- numbers -------------------------------------------------------------------------------------------------------------
def test_numbers_of_the_program_are_arguments_of_its_kernels():
    with recording(cache_dir="", strict=True) as recorder:
        fn = tokamak.compile(lambda x, a, n: (x * a + n) ** 2, dynamic=True)
        x = torch.randn(20, 30)
        for a, n in ((0.5, 3), (0.25, 4), (7.5, 10), (-1.25, 100)):
            torch.testing.assert_close(fn(x, a, n), (x * a + n) ** 2)
    assert len(recorder.graphs) == 1


def test_numbers_that_torch_captures_build_no_kernel():
    with recording(cache_dir="", strict=True) as recorder:
        fn = tokamak.compile(lambda x, a: x.clamp(max=a) + a)
        x = torch.randn(20, 30)
        for a in (0.75, 0.25, 7.5, -1.25):
            torch.testing.assert_close(fn(x, a), x.clamp(max=a) + a)
    assert len({b.key for g in recorder.graphs[1:] for b in g.values["render"].values()}) == 1


def test_0d_tensors_and_sizes_as_results():
    def fn(x, s):
        return x.shape[0] * 2 + 1, x.numel(), x * s, s + 1, x.sum(), x.shape[1] // 2, [x.shape[0], x.mean() * x.shape[0]]
    mine = tokamak.compile(fn, dynamic=True, strict=True, cache_dir="")
    for shape in ((3, 8), (5, 9), (7, 2)):
        x, s = torch.randn(shape), torch.tensor(1.5)
        got, want = mine(x, s), fn(x, s)
        assert [got[i] for i in (0, 1, 5)] == [want[i] for i in (0, 1, 5)] and got[6][0] == want[6][0]
        torch.testing.assert_close([*got[2:5], got[6][1]], [*want[2:5], want[6][1]])


def test_a_0d_tensor_does_not_widen_what_it_meets():
    def fn(x, s, i):
        return x * s, x + i, i * 2.5, s * i, torch.where(x > 0, s, x)
    args = torch.randn(9).bfloat16(), torch.tensor(1.7, dtype=torch.float64), torch.tensor(3)
    got, want = tokamak.compile(fn, policy="eager", strict=True, cache_dir="")(*args), fn(*args)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_repeated_windows_of_a_fold(dynamic):
    def fn(x):
        return x.argmin(3, True).cumsum(3).unfold(3, 1, 1).repeat(1, 2, 1, 2, 1)
    x = torch.randn(3, 4, 1, 4)
    assert torch.equal(tokamak.compile(fn, dynamic=dynamic, strict=True, cache_dir="")(x), fn(x))


def test_empty_tensors_have_no_address_to_read():
    def fn(x):
        return torch.linalg.vector_norm(x.clamp_min(0), 2, [0], True), x.softmax(0), x.sum()
    mine = tokamak.compile(fn, strict=True, cache_dir="")
    for x in (torch.empty(1).expand(0), torch.randn(5, 3)[:, :1].expand(5, 0), torch.empty(0, 3)):
        torch.testing.assert_close(mine(x), fn(x))


def test_torch_traces_anew_where_sizes_outgrow_31_bits():
    """A kernel for a GPU counts elements in 32 bits: torch is told, and compiles again where a tensor outgrows them."""
    torch._dynamo.reset()
    seen = []

    def watched(gm, inputs, **options):
        seen.extend(x.node.shape_env for x in inputs if isinstance(x, torch.SymInt))
        return backend(gm, inputs, options={"target": "interpret", "strict": True, "cache_dir": ""})
    fn = lambda x: torch.softmax(x, -1) + 1
    x = torch.randn(5, 70)
    torch.testing.assert_close(torch.compile(fn, backend=watched, dynamic=True)(x), fn(x))
    assert seen and any("2147483648" in str(g.expr) or "2147483647" in str(g.expr) for g in seen[0].guards)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("rows, wide", [(2**20, False), (2**23, True)])
def test_offsets_of_64_bits_where_32_do_not_do(rows, wide, ordered):
    graph = parse_graph(f"""graph example {{
  input %x: bf16[{rows}, 512](512, 1)
  %y: bf16[{rows}, 512](512, 1) = %x[i0, 511 + -1*i1]
  return %y
}}""")
    machine = Target("cuda:0", kind="gpu", ordered=ordered)
    (_, schedule), = schedule_plan(plan(graph, machine), machine).bodies.values()
    assert schedule.wide is wide


@pytest.mark.parametrize("fn", [lambda x, y: x[:, :x.shape[1] // 2] * y, lambda x, y: x.split(max(x.shape[1] // 2, 1), 1)[0] + y,
                                lambda x, y: x[:, :x.shape[1] // 2].cumsum(0) * y])
def test_an_expression_of_sizes_that_is_held_at_1_is_broadcast(fn):
    """It was read past its end. 3 // 2 and 2 // 2 are 1, 5 // 2 is not."""
    torch._dynamo.reset()
    run = tokamak.compile(fn, dynamic=True, strict=True, cache_dir="")
    for shape, other in (((6, 3), (6, 5)), ((4, 2), (4, 7)), ((4, 5), (4, 2))):
        x, y = torch.randn(shape), torch.randn(other)
        torch.testing.assert_close(run(x, y), fn(x, y))


@pytest.mark.parametrize("shape", [(2, 13), (13, 2)])
def test_a_product_of_sizes_may_be_a_number_elsewhere(shape):
    """Rows of a loss are counted by their targets, 26, and by two symbolic sizes, whose product a guard holds at 26."""
    def loss(x, target):
        return F.cross_entropy((x * 2).reshape(-1, x.shape[-1]), target)
    mine, target = torch.randn(*shape, 9, requires_grad=True), torch.randint(0, 9, (26,))
    theirs = mine.detach().clone().requires_grad_()
    for dim in range(2):
        torch._dynamo.maybe_mark_dynamic(mine, dim)
    tokamak.compile(loss, strict=True)(mine, target).backward()
    loss(theirs, target).backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("target", ["", "interpret"])
def test_an_axis_of_rows_as_long_as_a_sum_of_sizes(target):
    """A flat axis whose rows are n + 2 long: rows count as s*i + 2*i, two terms of one digit."""
    def fn(x):
        y = F.mish(F.pad(x, (1, 1)))
        return F.cross_entropy(y.flatten(1), torch.zeros(y.shape[0], dtype=torch.int64))
    got, want = (torch.randn(5, 4, 21, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    made, meant = tokamak.compile(fn, dynamic=True, strict=True, cache_dir="", target=target)(got), fn(want)
    torch.testing.assert_close(made, meant)
    torch.testing.assert_close(torch.autograd.grad(made, got), torch.autograd.grad(meant, want))
