"""Whole programs under `cudagraphs`, against the same programs without: on a GPU with CUDA graphs, on the CPU with a stand-in that replays calls by
address."""
from __future__ import annotations

import contextlib
import functools
import gc
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tokamak
from tests.compiled.world import ACTIONS, Net, World
from tests.runtime.replaying import StandIn
from tests.threads import in_threads
from tokamak.runtime import graphed, graphs
from tokamak.runtime.cuda_graphs import CudaRecorder as RECORDER
from tokamak.tools.record import Recorder

CUDA = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request, monkeypatch):
    torch._dynamo.reset()
    if request.param == "cpu":
        stand_in = StandIn()
        monkeypatch.setitem(graphed.RECORDERS, "cpu", lambda device: stand_in)
    with torch._dynamo.config.patch(recompile_limit=32):
        yield request.param
    torch._dynamo.reset()


def graphed_and_plain(fn, **options):
    """(fn under graphs, fn without, what was recorded of the first)."""
    recorder = Recorder()
    options = {"strict": False, **options}

    def compiled(**more):
        return torch.compile(fn, backend=lambda gm, x: tokamak.backend.backend(gm, x, options={**options, **more}), fullgraph=True)
    return compiled(cudagraphs=True, recorder=recorder), compiled(), recorder


def coverages(recorder) -> list[graphed.Coverage]:
    return [g.values["graphs"].coverage for g in recorder.graphs if "graphs" in g.values]


def replays(recorder) -> int:
    return sum(c.replays for v in coverages(recorder) for c in v.counts)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_calls_gives_what_it_gives_without_graphs(device, seed):
    torch._dynamo.reset()
    torch.manual_seed(0)
    first, second = Net().to(device), Net().to(device)
    second.load_state_dict(first.state_dict())
    with_graphs, _, recorder = graphed_and_plain(first)
    _, without, _ = graphed_and_plain(second)
    worlds = World(first, with_graphs, device), World(second, without, device)
    drawn = random.Random(seed)
    for _ in range(60):
        action, n = drawn.choice(ACTIONS), drawn.randrange(50)
        assert worlds[0].act(action, n) == worlds[1].act(action, n), (action, n)
        for a, b in zip(worlds[0].values(), worlds[1].values(), strict=True):
            assert torch.equal(a, b), (action, n)
    assert replays(recorder) >= 8


def steps(fn, model, count, device):
    """Losses and gradients of `count` training steps."""
    torch.manual_seed(3)
    found = []
    for i in range(count):
        x = torch.randn(8, 16, device=device)
        y, s = fn(x)
        loss = y.square().mean() + s.mean()
        loss.backward()
        found.append((loss.detach().clone(), *(p.grad.clone() for p in model.parameters())))
        model.zero_grad()
    return found


def test_training_replays_forward_and_backward(device):
    model = Net().to(device)
    made, plain, recorder = graphed_and_plain(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    got = steps(made, model, 8, device)
    model.load_state_dict(state)
    want = steps(plain, model, 8, device)
    assert all(torch.equal(a, b) for x, y in zip(got, want) for a, b in zip(x, y))
    forward, backward = coverages(recorder)
    assert not forward.left and not backward.left and len(forward.pieces) == len(backward.pieces) == 1
    assert forward.counts[0].recordings <= 3 and replays(recorder) >= 10


def test_random_numbers_differ_from_replay_to_replay_and_follow_the_seed(device):
    made, plain, recorder = graphed_and_plain(lambda x: (F.dropout(x, 0.5) + torch.rand_like(x)).sin() * x.sum())
    x = torch.rand(64, device=device)
    with torch.no_grad():
        torch.manual_seed(11)
        got = [made(x).clone() for _ in range(8)]
        torch.manual_seed(11)
        want = [plain(x).clone() for _ in range(8)]
        torch.manual_seed(11)
        again = made(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and torch.equal(again, got[0])
    assert not any(torch.equal(a, b) for a, b in zip(got, got[1:]))
    if coverages(recorder)[0].pieces:
        assert replays(recorder)


def test_results_that_are_held_are_never_written_again(device):
    made, plain, recorder = graphed_and_plain(lambda x: (torch.softmax(x, -1) @ x, x.sum(0) @ x))
    with torch.no_grad():
        inputs = [torch.randn(8, 8, device=device) for _ in range(20)]
        held = [made(x) for x in inputs]
        for got, x in zip(held, inputs):
            for a, b in zip(got, plain(x)):
                assert torch.equal(a, b)
    assert replays(recorder) >= 17 and coverages(recorder)[0].counts[0].recordings <= graphs.GENERATIONS + 2


def test_an_output_that_the_next_call_reads(device):
    made, plain, recorder = graphed_and_plain(lambda h, w: torch.tanh(h @ w) @ w + h)
    w = torch.randn(8, 8, device=device) / 8
    with torch.no_grad():
        a = b = torch.randn(4, 8, device=device)
        for _ in range(12):
            a, b = made(a, w), plain(b, w)
            assert torch.equal(a, b)
    assert replays(recorder) >= 4


def test_a_cache_that_is_written_in_place(device):
    def fn(cache, x, at):
        cache.index_copy_(0, at, x)
        return (cache * 2).sum(0) @ cache.t()
    made, plain, recorder = graphed_and_plain(fn)
    caches, version = [torch.zeros(16, 4, device=device) for _ in range(2)], 0
    with torch.no_grad():
        for i in range(10):
            x, at = torch.randn(1, 4, device=device), torch.tensor([i], device=device)
            got, want = made(caches[0], x, at), plain(caches[1], x, at)
            version, before = caches[0]._version, version
            assert torch.equal(got, want) and torch.equal(*caches) and version > before
    if coverages(recorder)[0].pieces:
        assert replays(recorder) >= 6


def test_a_written_input_that_comes_from_ever_new_addresses(device):
    def fn(x, y):
        x.add_((y @ y).sum())
        return (x @ y).exp()
    made, plain, recorder = graphed_and_plain(fn)
    kept = []
    with torch.no_grad():
        for i in range(10):
            x, y = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device) / 4
            other = x.clone()
            kept.append(x)
            assert torch.equal(made(x, y), plain(other, y)) and torch.equal(x, other)
    assert replays(recorder) >= 5


def test_several_sizes_have_their_own_recordings_and_old_ones_go(device, monkeypatch):
    monkeypatch.setattr(graphs, "SIZES", 3)
    recorder = Recorder()
    fn = lambda x: torch.softmax(x @ x.t(), -1) @ x
    made = torch.compile(fn, backend=lambda gm, x: tokamak.backend.backend(gm, x, options={"cudagraphs": True, "recorder": recorder}), dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            for n in (3, 5, 7, 9, 3, 3, 3, 3):
                x = torch.randn(n, 8, device=device)
                torch.testing.assert_close(made(x), fn(x))
    assert replays(recorder) >= 2
    assert all(len(r.entries) <= 3 for g in recorder.graphs for r in g.values["graphs"].recorded)


@torch.library.custom_op("tokamak_test::largest", mutates_args=())
def largest(x: torch.Tensor) -> torch.Tensor:
    """x without what is greater than its largest element, which the host is told."""
    for r in STAND_INS:
        r.told = WAITS[0]
        if r.recording:
            raise RuntimeError("not while recording")
    return x.clamp(max=x.max().item())


@largest.register_fake
def _(x):
    return torch.empty_like(x)


STAND_INS: list = []
WAITS = [True]


@pytest.mark.parametrize("told", [True, False])
def test_what_waits_for_the_device_or_is_refused_splits_the_program(device, told, monkeypatch):
    """The first call shows which calls of torch wait; what does so without torch's knowledge, a capture refuses."""
    if device == "cpu":
        monkeypatch.setattr("tests.compiled.test_graphs.STAND_INS", [graphed.RECORDERS["cpu"]("cpu")])
        monkeypatch.setattr("tests.compiled.test_graphs.WAITS", [told])
    elif not told:
        monkeypatch.setattr(RECORDER, "waited", lambda self, call: (call(), False))
    made, plain, recorder = graphed_and_plain(lambda x, w: torch.softmax(largest(torch.tanh(x @ w) @ w) @ w, -1) @ w)
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(10):
            x, w = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
            assert torch.equal(made(x, w), plain(x, w))
    cover, = coverages(recorder)
    assert sum("is not recorded" in str(w.message) for w in warned) == (not told)
    assert len(cover.pieces) == 2 and [x.name for x in cover.left] == ["tokamak_test.largest.default"], cover
    assert ("it waits for the device" if told else "capture refused it") in str(cover)
    assert f"{cover.held} of {cover.total}" in str(cover) and replays(recorder)
    assert not torch.equal(torch.rand(8, device=device), torch.rand(8, device=device))


def test_numbers_in_the_hosts_memory_split_a_program_on_a_gpu():
    """A recording would keep the number that it saw."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    made, plain, recorder = graphed_and_plain(lambda x, w, n: torch.softmax((torch.tanh(x @ w) @ w) * n, -1) @ w @ w)
    with torch.no_grad():
        for i in range(8):
            x, w = torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
            assert torch.equal(made(x, w, torch.tensor(float(i))), plain(x, w, torch.tensor(float(i))))
    assert replays(recorder)


def test_threads(device):
    made, plain, recorder = graphed_and_plain(lambda x, w: torch.softmax(x @ w, -1) @ w)
    w, x, wrong = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device), []
    with torch.no_grad():
        for _ in range(4):          # of two tensors, as in the threads: Dynamo of torch 2.11 does not compile in several at once
            made(x, w), plain(x, w)

    def run(seed):
        with torch.no_grad():
            for i in range(30):
                x = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * seed + i)).to(device)
                if not torch.equal(made(x, w), plain(x, w)):
                    wrong.append((seed, i))
    in_threads(run, [(n,) for n in range(3)])
    assert not wrong and replays(recorder)


def test_inference_mode_and_training_of_one_function(device):
    lin = nn.Linear(8, 8).to(device)
    made, plain, recorder = graphed_and_plain(lambda x: torch.softmax(lin(x), -1) @ x)
    for i in range(8):
        x = torch.randn(8, 8, device=device)
        with torch.inference_mode():
            assert torch.equal(made(x), plain(x))
        with torch.no_grad():
            y = made(x)
            assert torch.equal(y, plain(x))
        y.requires_grad_().sum().backward()


def test_autocast(device):
    lin = nn.Linear(16, 16).to(device)
    made, plain, recorder = graphed_and_plain(lambda x: F.layer_norm(lin(x), (16,)).relu().float().sum(1))
    for i in range(8):
        x, grads = torch.randn(8, 16, device=device), []
        for fn in (made, plain):
            lin.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                out = fn(x)
            out.sum().backward()
            grads.append((out.detach().clone(), lin.weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert replays(recorder) >= 8


def test_memory_of_a_model_that_is_gone_is_given_back(device):
    made, _, recorder = graphed_and_plain(lambda x: torch.softmax(x @ x, -1) @ x)
    with torch.no_grad():
        for _ in range(5):
            y = made(torch.randn(8, 8, device=device))
    value = y.clone()
    del made, recorder
    torch._dynamo.reset()
    gc.collect()
    assert torch.equal(y, value)


def test_errors_of_kernels_are_raised(device):
    made, _, recorder = graphed_and_plain(lambda x, i: (x @ x)[i] @ x)
    x, good = torch.randn(8, 8, device=device), torch.arange(8, device=device)
    with torch.no_grad():
        for _ in range(5):
            made(x, good)
        good.fill_(99)
        with pytest.raises(IndexError):
            made(x, good)
            if device == "cuda":
                torch.cuda.synchronize()
                made(x, good)
        if device == "cuda":
            torch.cuda.synchronize()
        good.copy_(torch.arange(8))
        try:
            made(x, good)
        except IndexError:          # what the call before had left
            pass
        torch.testing.assert_close(made(x, good), (x @ x)[good] @ x)


def test_a_strict_call_raises_its_own_error(device):
    made, _, recorder = graphed_and_plain(lambda x, i: (x @ x)[i] @ x, strict=True)
    x, good = torch.randn(8, 8, device=device), torch.arange(8, device=device)
    with torch.no_grad():
        for _ in range(5):
            made(x, good)
        for _ in range(2):
            good.add_(99)
            with pytest.raises(IndexError):
                made(x, good)
            good.sub_(99)
            torch.testing.assert_close(made(x, good), (x @ x)[good] @ x)
    assert replays(recorder)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_has_recordings_of_its_own():
    for index in (1, 0):
        made, plain, recorder = graphed_and_plain(lambda x, w: torch.softmax(x @ w, -1) @ w)
        with torch.no_grad():
            for _ in range(6):
                x, w = (torch.randn(8, 8, device=f"cuda:{index}") for _ in range(2))
                assert torch.equal(made(x, w), plain(x, w))
        assert replays(recorder) and not coverages(recorder)[0].left and torch.cuda.current_device() == 0


@CUDA
@pytest.mark.parametrize("one, other, size, times", [
    (lambda x: (torch.softmax(x @ x, -1) @ x).exp() @ x, lambda x: (torch.tanh(x @ x) @ x).sin() @ x, 512, 50),
    (lambda x: functools.reduce(lambda a, _: torch.tanh(a @ x), range(40), x),
     lambda x: functools.reduce(lambda a, _: torch.sin(a @ x), range(40), x), 1024, 5)], ids=["short", "long"])
def test_streams_take_turns(one, other, size, times):
    """Recordings share memory, so one that is replayed on another stream waits for the last, a long one on the default stream, too."""
    (first, _, recorder), (second, _, _) = graphed_and_plain(one), graphed_and_plain(other)
    x, side, wrong = torch.randn(size, size, device="cuda") / 32, torch.cuda.Stream(), []
    with torch.no_grad():
        for _ in range(4):
            a, b = first(x).clone(), second(x).clone()
        torch.cuda.synchronize()
        for n in range(times):
            c = first(x)
            with torch.cuda.stream(side):
                d = second(x)
            torch.cuda.synchronize()
            for name, want, got in (("first", a, c), ("second", b, d)):
                if not torch.equal(want, got):
                    wrong.append((n, name, int((want != got).sum()), float((want - got).abs().max())))
    assert not wrong and replays(recorder) >= times, wrong


def test_a_replay_on_another_stream_is_behind_the_last_on_the_default_stream_too(monkeypatch):
    """Whose number is 0: as an external stream's that is no number, and some idle stream is waited for."""
    class Event:
        def record(self, stream):
            said.append(("behind", stream))

        def wait(self, stream):
            said.append(("waits", stream))
    said, current = [], [0]
    recorder = object.__new__(RECORDER)
    recorder.index, recorder.last = 0, None
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda raw, index: raw or "some other stream")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: "the default stream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[0])
    for current[0] in (0, 7, 0):
        recorder._behind(current[0])
    assert said == [("behind", "the default stream"), ("waits", 7), ("behind", 7), ("waits", 0)] and recorder.last == 0


def test_workspaces_are_taken_within_a_capture_and_let_go_behind_it(monkeypatch):
    """What cuBLAS works in is allocated when its handle is asked for on a stream: where that is before the capture, it is not the recording's."""
    said = []

    @contextlib.contextmanager
    def within(name):
        said.append(f"{name} begins")
        yield
        said.append(f"{name} ends")
    recorder = object.__new__(RECORDER)
    recorder.index, recorder.stream = 0, None
    for name in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("stream"))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: said.append("handle"))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: said.append("cleared"), raising=False)
    monkeypatch.setattr(recorder, "_capturing", lambda graph: within("capture"))
    monkeypatch.setattr(recorder, "_replaying", lambda graph: "replay")
    assert recorder.record(lambda args: said.append("recorded") or args, [1]) == ("replay", [1])
    assert said == ["handle", "stream begins", "cleared", "capture begins", "handle", "recorded", "capture ends", "cleared", "stream ends"]


@CUDA
def test_workspaces_of_libraries_are_recordings_memory():
    """Nothing that a replay writes is memory that the allocator holds for others, or gives back: products by cuBLAS have a workspace of 32 MiB."""
    from tokamak.runtime.cuda_graphs import recorder as of
    fn, plain, recorder = graphed_and_plain(lambda x: (torch.softmax(x @ x, -1) @ x).exp() @ x)
    x, stream = torch.randn(512, 512, device="cuda") / 32, of("cuda:0").stream.cuda_stream
    with torch.no_grad():
        for _ in range(4):
            out = fn(x).clone()
        assert replays(recorder) >= 1
        others = [s for s in torch.cuda.memory_snapshot() if s["stream"] == stream and tuple(s["segment_pool_id"]) == (0, 0)]
        assert sum(s["allocated_size"] for s in others) <= 1024         # a seed and an offset, which the generator holds while there are recordings
        torch.cuda.empty_cache()
        held = [torch.ones(1 << 20, device="cuda") for _ in range(64)]
        assert torch.equal(fn(x), out) and all(bool((t == 1).all()) for t in held)


def test_the_mode_and_the_option_are_the_same():
    torch._dynamo.reset()
    seen = []
    for how in ({"mode": "reduce-overhead"}, {"options": {"cudagraphs": True}}, {"mode": "max-autotune-no-cudagraphs"}, {}):
        with tokamak.recording() as recorder:
            torch.compile(lambda x: x.sin() @ x, backend="tokamak", **how)(torch.randn(4, 4))
        seen.append("graphs" in recorder.graphs[0].values)
        torch._dynamo.reset()
    assert seen == [True, True, False, False]
