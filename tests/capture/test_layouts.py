"""Memory formats: which convolutions run channels-last, and that everything that others see keeps its strides."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import tokamak
from tokamak import backend
from tokamak.capture import layouts, pixels
from tokamak.capture.fx import Unsupported
from tokamak.ir.graph import Opaque
from tokamak.tools.record import recording

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def always(monkeypatch):
    """Every convolution of an image gains channels-last."""
    rates = {(d, t, b): layouts.Rates(1e6, 1e6, product=(1e6, 0.0)) for d in ("cpu",) for t in (torch.float32, torch.bfloat16) for b in (False, True)}
    monkeypatch.setattr(layouts, "RATES", rates)


def convolutions(recorder) -> list[Opaque]:
    return [n for g in recorder.graphs for n in g.values["capture"].nodes if isinstance(n, Opaque) and "convolution" in str(n.target)]


def last(recorder) -> list[bool]:
    """Which convolutions run channels-last."""
    return [n.reason.endswith("channels-last") for n in convolutions(recorder)]


class Ties(TorchFunctionMode):
    """Watches for elements so near to where a gradient jumps that a rounding decides on which side they are: at ReLU's zero, and the two largest of
    a pooling window. (Hardswish's ends are not looked at.) What is equal, or zero, in float64 is so by the way it is made, and as good as any."""
    NEAR = 4e-6
    found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, gaps = getattr(func, "__name__", ""), None
        if name in ("relu", "relu_"):
            gaps = args[0].detach().abs()
        elif name == "max_pool2d":
            gaps = -self.windows(*args, **(kwargs or {})).topk(2, 1).values.diff(dim=1)
        self.found |= gaps is not None and bool(((gaps > 0) & (gaps < self.NEAR)).any())
        return func(*args, **(kwargs or {}))

    @staticmethod
    def windows(x, kernel_size, stride, padding=0, **_):
        x = F.pad(x.detach().flatten(0, 1).unsqueeze(1), [padding] * 4, value=torch.finfo(x.dtype).min)
        return F.unfold(x, kernel_size, stride=stride)


def untied(fn, args):
    """`args`, or others of their kind of which `fn` makes no tie: it is chance then which way a gradient goes, in eager, too, between float32 and
    float64 (1 draw in 16,000 of the first test below, where it moves nearly every element of the input's gradient, through BatchNorm's means)."""
    exact = copy.deepcopy(fn)
    exact, wide = (exact.double(), torch.double) if isinstance(fn, nn.Module) else (exact, torch.float)
    while True:
        with torch.no_grad(), Ties() as ties:
            exact(*(a.to(wide, copy=True) if a.is_floating_point() else a.clone() for a in args))
        if not ties.found:
            return args
        args = [torch.randn_like(a) if a.is_floating_point() else a for a in args]


def like_eager(fn, *args, grad: bool = False, tolerance: float | None = 1e-4, **options):
    """Results, gradients, changed arguments and the strides of all of them as eager's; the recorder. tolerance None: as near the same in float64
    as eager is, but for a factor of two and a hundredth of the largest element (`fn` a module in bf16)."""
    if grad and tolerance is not None:
        args = untied(fn, args)
    twin = [a.detach().clone().requires_grad_(grad and a.is_floating_point()) for a in args]
    mine = [a.detach().clone().requires_grad_(grad and a.is_floating_point()) for a in args]
    parameters = [p for p in getattr(fn, "parameters", list)()]
    runs, found = [(fn, twin), (torch.compile(fn, backend="tokamak", options=options), mine)], []
    if tolerance is None:
        exact = copy.deepcopy(fn).double()
        runs.append((exact, [a.detach().double().requires_grad_(grad) for a in args]))
        parameters += exact.parameters()
    with recording(strict=True) as recorder:
        for one, given in runs:
            with torch.set_grad_enabled(grad):
                made = one(*given)
            made = made if isinstance(made, tuple) else (made,)
            if grad:
                sum((m.float() * torch.linspace(-1, 1, m.numel()).view(m.shape)).sum() for m in made).backward()
            found.append((*made, *(t.grad for t in (*given, *parameters) if t.grad is not None), *given))
            for p in parameters:
                p.grad = None
    for want, got, *exact in zip(*found, strict=True):
        want, got = want.detach(), got.detach()
        if exact:
            off, allowed = ((t.double() - exact[0]).abs().max() for t in (got, want))
            assert off <= 2 * allowed + 1e-2 * exact[0].abs().max()
        else:
            torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
        assert [s for s, n in zip(got.stride(), got.shape) if n > 1] == [s for s, n in zip(want.stride(), want.shape) if n > 1]
    return recorder


KINDS = {"plain": nn.Conv2d(8, 12, 3, padding=1), "groups": nn.Conv2d(8, 12, 3, groups=4), "channels alone": nn.Conv2d(8, 16, 3, groups=8),
         "far apart": nn.Conv2d(8, 12, 3, dilation=2), "steps": nn.Conv2d(8, 12, 3, stride=2, bias=False), "one element": nn.Conv2d(8, 12, 1),
         "transposed": nn.ConvTranspose2d(8, 12, 2, 2), "transposed groups": nn.ConvTranspose2d(8, 12, 3, 2, output_padding=1, groups=2)}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_convolutions(kind, grad, always):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), KINDS[kind], nn.Hardswish(), nn.MaxPool2d(2)).train(grad)
    recorder = like_eager(net, torch.randn(2, 3, 14, 15), grad=grad)
    assert all(last(recorder))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("rank", [1, 3])
def test_other_ranks(rank, grad, always):
    """Those of one dimension stay as they are; of those of three torch has a library for some, which alone keeps the format."""
    conv, norm = (nn.Conv1d, nn.BatchNorm1d) if rank == 1 else (nn.Conv3d, nn.BatchNorm3d)
    net = nn.Sequential(conv(3, 8, 3), norm(8), nn.ReLU(), conv(8, 6, 3, padding=1), nn.ReLU()).train(grad)
    recorder = like_eager(net, torch.randn(2, 3, *[9] * rank), grad=grad)
    assert any(last(recorder)) is (rank == 3)


class Seen(nn.Module):
    """Images between convolutions that are results, as they are, as views, changed and unchanged."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        a = self.a(x)
        b = torch.relu(self.b(a))
        c = self.c(b + a)
        return a, b, b.flatten(1), c.flatten(2).transpose(1, 2), c.permute(0, 2, 3, 1), (c + 1).reshape(-1)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("given", [torch.contiguous_format, LAST], ids=str)
def test_results_have_the_strides_of_eager(given, grad, always):
    assert all(last(like_eager(Seen(), torch.randn(2, 4, 9, 8).to(memory_format=given), grad=grad)))


@pytest.mark.parametrize("given", [torch.contiguous_format, LAST], ids=str)
def test_arguments_that_are_changed(given, always):
    w, v = torch.randn(6, 4, 3, 3), torch.randn(4, 6, 3, 3)

    def fn(x, state):
        y = torch.relu(torch.conv2d(x, w, padding=1))
        state.mul_(0.5).add_(y)
        x.add_(torch.conv2d(state, v, padding=1))
        return y.sum((2, 3))
    assert all(last(like_eager(fn, torch.randn(2, 4, 7, 7).to(memory_format=given), torch.randn(2, 6, 7, 7))))


def test_sizes_that_are_not_known(always):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.SiLU(), nn.Conv2d(8, 4, 1)).eval()
    with recording(strict=True) as recorder, torch.no_grad():
        ours = torch.compile(net, backend="tokamak", dynamic=True)
        for shape in ((2, 3, 12, 14), (5, 3, 11, 9), (4, 3, 16, 16), (3, 3, 5, 30)):
            x = torch.randn(shape)
            want = net(x)
            got = ours(x)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            assert got.stride() == want.stride()
    assert all(last(recorder)) and len(recorder.graphs) <= 2


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_mixed_types(grad, always):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).train(grad)     # a bias's gradient: 0

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x)
    recorder = like_eager(Mixed(), torch.randn(2, 3, 12, 12), grad=grad, tolerance=None)
    assert all(last(recorder))
    weights = [n.args[1] for n in convolutions(recorder) if "backward" not in str(n.target)]
    assert all(w.strides[1] == 1 for w in weights)          # as it is rounded it is laid out


def products(recorder) -> int:
    """How many products of matrices torch is asked for."""
    names = [str(n.target) for g in recorder.graphs for n in g.values["capture"].nodes if isinstance(n, Opaque)]
    return sum(n in ("aten.mm.default", "aten.addmm.default") for n in names)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [2, 3])
def test_windows_of_one_element_are_products(rank, dtype, bias, always):
    """Of an image in training: one forward, two backward, one of them alone where nobody asks for the image's gradient."""
    conv = nn.Conv2d if rank == 2 else nn.Conv3d
    net = nn.Sequential(conv(4, 6, 1, bias=bias), nn.ReLU(), conv(6, 3, 1, bias=bias)).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else None
    recorder = like_eager(net, torch.randn(2, 4, *[5] * rank).to(dtype), grad=True, tolerance=tolerance)
    assert not convolutions(recorder) and products(recorder) == 6
    frozen = nn.Sequential(net, nn.Flatten())
    with torch.no_grad(), recording(strict=True) as recorder:
        torch.compile(frozen, backend="tokamak")(torch.randn(2, 4, *[5] * rank).to(dtype))
    assert products(recorder) == 2


def test_products_of_batches_that_are_not_known(always):
    net = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1, bias=False))
    with recording(strict=True) as recorder:
        ours = torch.compile(net, backend="tokamak")
        for batch in (2, 5, 7):
            x = torch.randn(batch, 4, 5, 6, requires_grad=True)
            want, = torch.autograd.grad(net(x).square().sum(), x)
            got, = torch.autograd.grad(ours(x).square().sum(), x)
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
    assert not convolutions(recorder)


@pytest.mark.parametrize("how", [{"stride": 2}, {"padding": 1}, {"groups": 2}, "double", "medium"], ids=str)
def test_what_is_no_product(how, always):
    conv = nn.Conv2d(4, 6, 1, **(how if isinstance(how, dict) else {})).to(torch.float64 if how == "double" else torch.float32)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if how == "medium" else "highest")
        with torch.no_grad(), recording(strict=True) as recorder:
            torch.compile(conv, backend="tokamak")(torch.randn(2, 4, 6, 6, dtype=conv.weight.dtype))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(convolutions(recorder)) == 1 and not products(recorder)


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="torch without settings for each library")
def test_settings_of_one_library_are_read(always):
    """torch refuses to say what holds for all."""
    asked = torch.backends.mkldnn.matmul
    before = asked.fp32_precision
    try:
        asked.fp32_precision = "bf16"
        assert not pixels._exact() and isinstance(layouts._tf32(), bool)
        asked.fp32_precision = "ieee"
        assert pixels._exact()
    finally:
        asked.fp32_precision = before


STRIDES = []


@torch.library.custom_op("tests::strides_of", mutates_args=())
def strides_of(x: torch.Tensor) -> torch.Tensor:
    STRIDES.append(x.stride())
    return x.clone()


strides_of.register_fake(lambda x: torch.empty_like(x))


def test_calls_that_are_not_known_read_what_eager_hands_them(always):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    STRIDES.clear()
    assert any(last(like_eager(lambda x: strides_of(torch.relu(net(x))) + torch.as_strided(net(x), (2, 3), (7, 1)).sum(), torch.randn(2, 3, 10, 11))))
    assert STRIDES[0] == STRIDES[1] == (8 * 6 * 7, 6 * 7, 7, 1)


def test_images_that_are_mixed(always):
    """Joined, padded, made larger, viewed by groups of channels."""
    w, v = torch.randn(8, 4, 3, 3), torch.randn(6, 16, 3, 3)

    def fn(x):
        y = torch.conv2d(x, w, padding=1)
        z = torch.cat([y, torch.nn.functional.pad(y[:, :, 1:], (0, 0, 1, 0))], 1)
        z = torch.nn.functional.group_norm(z, 4)
        z = torch.nn.functional.interpolate(z, scale_factor=2)
        n, c, h, u = z.shape
        z = z.view(n, 2, c // 2, h, u).transpose(1, 2).reshape(n, c, h, u)
        return torch.nn.functional.pixel_shuffle(torch.conv2d(z, v, padding=1)[:, :4], 2)
    assert all(last(like_eager(fn, torch.randn(2, 4, 7, 6))))


def chain(channels: int, n: int = 3) -> nn.Module:
    parts = lambda: (nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
    return nn.Sequential(*(m for _ in range(n) for m in parts()))


@pytest.mark.parametrize("channels, size, n, grad, expected", [
    (32, 28, 3, False, True), (32, 28, 3, True, True),          # images are larger than weights
    (256, 4, 3, False, False), (256, 4, 3, True, False),        # weights are
    (32, 28, 1, False, False)])                                 # as much is copied as a call saves
def test_where_it_pays(channels, size, n, grad, expected):
    net, x = chain(channels, n).train(grad), torch.randn(2, channels, size, size)
    with recording(strict=True) as recorder, torch.set_grad_enabled(grad):
        made = torch.compile(net, backend="tokamak")(x)
        if grad:
            made.sum().backward()
    assert set(last(recorder)) == {expected}


@pytest.mark.parametrize("options", [{"policy": "eager"}, {"policy": "strict"}], ids=str)
def test_other_policies_leave_formats_alone(options, always):
    with torch.no_grad(), recording(strict=True) as recorder:
        torch.compile(chain(32).eval(), backend="tokamak", options=options)(torch.randn(2, 32, 28, 28))
    assert not any(last(recorder))


def test_other_types_and_no_library_leave_formats_alone(always):
    with torch.no_grad(), recording(strict=True) as recorder:
        torch.compile(chain(32).double().eval(), backend="tokamak")(torch.randn(2, 32, 28, 28).double())
        torch._dynamo.reset()
        with torch.backends.mkldnn.flags(enabled=False):
            torch.compile(chain(32).eval(), backend="tokamak")(torch.randn(2, 32, 28, 28))
    assert len(last(recorder)) == 6 and not any(last(recorder))


def test_what_is_kept_for_backward_is_kept_once():
    """Three images before the convolutions, three behind them, and the result: none in both formats."""
    kept = []
    net, x = chain(32).train(), torch.randn(2, 32, 28, 28)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        tokamak.compile(net, strict=True)(x)
    images = [t for t in kept if t.dim() == 4 and t.shape[2] == 28]
    assert len(images) <= 7 and sum(t.is_contiguous(memory_format=LAST) for t in images) >= len(images) - 1


@pytest.mark.parametrize("grad", [False, True])
def test_what_lies_so_already_is_only_marked(grad, always, monkeypatch):
    """Nothing is traced again, and every convolution says how it runs."""
    def again(node):
        raise AssertionError("a call was traced again")
    monkeypatch.setattr(layouts, "_channels_last", again)
    net = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3, stride=2)).to(memory_format=LAST)
    recorder = like_eager(net, torch.randn(2, 8, 9, 9).to(memory_format=LAST), grad=grad)
    assert last(recorder) == [True] * (4 if grad else 2)


class Mixed(nn.Module):
    """Convolutions, of single elements, too, beside calls whose results torch lays as their arguments lie."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.groups, self.batch = nn.GroupNorm(2, 8), nn.BatchNorm2d(8)

    def forward(self, x):
        a = self.groups(self.second(self.groups(self.first(x)).relu()))
        b = F.max_pool2d(self.batch(self.third(a)), 3, 2, 1)
        c, d = torch.cat([a, x], 1).chunk(2, 1)
        return a.sigmoid(), b.flatten(1), c[..., ::2] * 2, F.interpolate(d[..., 1:, :], size=a.shape[-2:]) + c[:, :1], b.mT


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("left", [("forward",), ("backward",), ("forward", "backward"), ("inference",)], ids=" and ".join)
def test_what_torch_runs_after_all_is_as_traced(left, dynamic, always, monkeypatch):
    """Whichever graphs fall back, convolutions of the others read what they return."""
    compile_graph = backend.compile_graph

    def some(gm, given, options, trace, name, *others):
        if name.startswith(left):
            raise Unsupported("a test")
        return compile_graph(gm, given, options, trace, name, *others)
    monkeypatch.setattr(backend, "compile_graph", some)
    torch.manual_seed(0)
    net, found = Mixed(), []
    x, grad = torch.randn(2, 3, 13, 11), left != ("inference",)
    with recording() as recorder:
        for f in (net, tokamak.compile(copy.deepcopy(net), dynamic=dynamic, strict=True)):
            mine = x.clone().requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                made = f(mine)
            if grad:
                sum((m * torch.linspace(-1, 1, m.numel()).view(m.shape)).sum() for m in made).backward()
            found.append((*made, *((mine.grad, *(p.grad for p in f.parameters())) if grad else ())))
    assert [g.kind for g in recorder.graphs if g.eager] == [*left]
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert [s for s, n in zip(got.stride(), got.shape) if n > 1] == [s for s, n in zip(want.stride(), want.shape) if n > 1]


def test_graphs_that_stop_before_there_are_kernels_are_as_traced(always):
    def fn(x, first, second):
        h = F.group_norm(F.conv2d(F.conv2d(x, first, None, 1, 1), second, None, 2, 1), 2)
        return F.interpolate(h[..., ::2, ::2], size=h.shape[-2:], mode="nearest") + h
    values, found = (torch.randn(3, 3, 13, 11), torch.randn(3, 3, 3, 3), torch.randn(6, 3, 3, 3)), []
    dy = torch.randn_like(fn(*values))
    for f in (fn, tokamak.compile(fn, until="fuse", cache_dir="")):
        leaves = [v.clone().requires_grad_() for v in values]
        y = f(*leaves)
        found.append((y, *torch.autograd.grad(y, leaves, dy)))
    for got, want in zip(*reversed(found), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride()
