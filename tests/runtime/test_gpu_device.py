"""Launches on a GPU: results, streams, devices, graphs, error words, alignment. Skipped where there is none."""
from __future__ import annotations

import threading

import pytest
import torch

from tests.threads import in_threads
from tokamak.runtime import gpu
from tokamak.runtime.gpu_build import GpuUnit
from tokamak.runtime.program import RESIDENT, Alloc, Launch, Let, Program, Ref, Return, TensorSpec, assemble

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs an NVIDIA GPU")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

HEAD = """import triton
import triton.language as tl
@triton.jit
"""
SCALE = GpuUnit("scale", HEAD + """def scale(p0, p1, n0, k0):
    i = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    tl.store(p1 + i, tl.load(p0 + i, mask=i < n0, other=0) * k0.to(tl.float32), mask=i < n0)
""", ("*fp32", "*fp32", "i32", "fp64"), frozenset({0, 1, 2}))
GATHER = GpuUnit("gather", HEAD + """def gather(p0, p1, p2, n0, err):
    i = tl.program_id(0).to(tl.int64) * 1024 + tl.arange(0, 1024)
    at = tl.load(p1 + i, mask=i < n0, other=0)
    bad = (at < 0) | (at >= n0)
    tl.store(err + tl.zeros_like(at), 1, mask=bad)
    tl.store(p2 + i, tl.load(p0 + tl.where(bad, 0, at), mask=i < n0, other=0), mask=i < n0)
""", ("*fp32", "*i64", "*fp32", "i32", "*i32"))
# every program adds one and waits until all have: a grid that is not resident as a whole would never end
MEET = GpuUnit("meet", HEAD + """def meet(p0, p1):
    tl.atomic_add(p0, 1)
    count = tl.atomic_add(p0, 0)
    while count < tl.num_programs(0):
        count = tl.atomic_add(p0, 0)
    tl.store(p1 + tl.program_id(0), count)
""", ("*i32", "*i32"), cooperative=True, warps=1)
# 64 x 256 values exchanged between threads: more shared memory than a kernel has without asking
TURN = GpuUnit("turn", HEAD + """def turn(p0, p1):
    i, j = tl.arange(0, 128), tl.arange(0, 256)
    x = tl.load(p0 + i[:, None] * 256 + j[None, :])
    tl.store(p1 + j[:, None] * 128 + i[None, :], tl.trans(x))
""", ("*fp32", "*fp32"), frozenset({0, 1}), warps=8)


def kernels(*units: GpuUnit) -> dict[str, gpu.Kernel]:
    return gpu.kernels(units, gpu.arch("cuda:0"))


def scaling(device: str = "cuda:0", times: int = 1) -> Program:
    """x -> x / 2, `times` times over."""
    spec, steps, source = TensorSpec(("n",), ("1",), torch.float32, device), [Let("n", "x.numel()")], "x"
    for i in range(times):
        words = (("ptr", source), ("ptr", f"y{i}"), ("int", "n"), ("float", "0.5"))
        steps += [Alloc(f"y{i}", spec, "n*4"), Launch("scale", words, grid=("(n + 1023)//1024", "1", "1"), device=device)]
        source = f"y{i}"
    return Program("scaling", ("x",), (*steps, Return((Ref(source),))))


def gathering(device: str = "cuda:0") -> Program:
    spec = TensorSpec(("n",), ("1",), torch.float32, device)
    words = (("ptr", "x"), ("ptr", "at"), ("ptr", "y"), ("int", "n"), ("error", ""))
    steps = (Let("n", "x.numel()"), Alloc("y", spec, "n*4"), Launch("gather", words, grid=("(n + 1023)//1024", "1", "1"), device=device),
             Return((Ref("y"),)))
    return Program("gathering", ("x", "at"), steps, errors=((IndexError, "index out of range"),))


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("size", [0, 1, 16, 1000, 1 << 20])
def test_results(size, in_c):
    kernel = kernels(SCALE)["scale"]
    kernel = kernel if in_c else gpu.Kernel(kernel.binary, kernel.rebuild, gpu.launch_in_python)
    fn = assemble(scaling(), {"scale": kernel})
    for _ in range(2):
        x = torch.randn(size, device="cuda:0")
        assert torch.equal(fn([x])[0], x / 2)


def test_views_that_are_not_aligned():
    fn = assemble(scaling(), kernels(SCALE))
    base = torch.randn(5000, device="cuda:0")
    for start, size in ((0, 4096), (1, 4096), (3, 1001), (4, 1600), (2, 7), (0, 4096)):
        x = base[start:start + size]
        assert torch.equal(fn([x])[0], x / 2)


def test_the_current_stream():
    fn, x = assemble(scaling(), kernels(SCALE)), torch.zeros(1 << 20, device="cuda:0")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)           # what reads x without waiting for this stream reads zeros
        x.fill_(8.0)
        y, = fn([x])
    side.synchronize()
    assert bool((y == 4).all())


def test_a_thread_that_has_used_no_gpu_yet():
    fn, x, seen = assemble(scaling(), kernels(SCALE)), torch.randn(1000, device="cuda:0"), []
    thread = threading.Thread(target=lambda: seen.append(fn([x])[0]))
    thread.start()
    thread.join()
    assert torch.equal(seen[0], x / 2)


def test_many_threads_at_once():
    fn, wrong = assemble(scaling(times=4), kernels(SCALE)), []

    def work(seed: int):
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(50):
                x = torch.full((1000 + seed,), float(seed + i), device="cuda:0")
                if not torch.equal(fn([x])[0], x / 16):
                    wrong.append(seed)
    in_threads(work, [(i,) for i in range(8)])
    assert not wrong


@pytest.mark.parametrize("first_call_in_capture", [False, True])
def test_captured_in_a_graph(first_call_in_capture):
    kernel = kernels(SCALE)["scale"]
    fresh = gpu.Kernel(kernel.binary, kernel.rebuild, kernel.launch)
    fn, x = assemble(scaling(times=3), {"scale": fresh}, synchronous=True), torch.randn(3000, device="cuda:0")
    if not first_call_in_capture:
        fn([x])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, = fn([x])
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, x / 8)


def test_an_error_is_raised_at_the_next_call():
    fn = assemble(gathering(), kernels(GATHER))
    x, at = torch.randn(3000, device="cuda:0"), torch.randint(3000, (3000,), device="cuda:0")
    assert torch.equal(fn([x, at])[0], x[at])
    wrong = at.clone()
    wrong[2500] = 3000
    fn([x, wrong])
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="index out of range"):
        fn([x, at])
    assert torch.equal(fn([x, at])[0], x[at])
    at_once = assemble(gathering(), kernels(GATHER), synchronous=True)
    with pytest.raises(IndexError, match="index out of range"):
        at_once([x, wrong])
    assert torch.equal(at_once([x, at])[0], x[at])


def meeting(programs: str) -> Program:
    launch = Launch("meet", (("ptr", "counter"), ("ptr", "seen")), grid=(programs, "1", "1"), device="cuda:0")
    return Program("meeting", ("counter", "seen"), (launch, Return(())))


def test_programs_that_wait_for_each_other():
    made = kernels(MEET)
    resident = made["meet"].on("cuda:0").resident
    counter, seen = torch.zeros(1, dtype=torch.int32, device="cuda:0"), torch.zeros(resident, dtype=torch.int32, device="cuda:0")
    assemble(meeting(RESIDENT), made)([counter, seen])
    assert resident >= torch.cuda.get_device_properties(0).multi_processor_count and bool((seen == resident).all())
    with pytest.raises(RuntimeError, match="the kernel meet could not be launched"):
        assemble(meeting(f"{RESIDENT}*2"), made)([counter, seen])


def test_much_shared_memory():
    made = kernels(TURN)["turn"]
    assert made.binary.shared > 48 << 10
    x, y = torch.randn(128, 256, device="cuda:0"), torch.empty(256, 128, device="cuda:0")
    p = Program("turning", ("x", "y"), (Launch("turn", (("ptr", "x"), ("ptr", "y")), grid=("1", "1", "1"), device="cuda:0"), Return(())))
    assemble(p, {"turn": made})([x, y])
    assert torch.equal(y, x.t())


def test_a_grid_that_is_too_large_is_refused():
    words = (("ptr", "x"), ("ptr", "x"), ("int", "0"), ("float", "1.0"))
    p = Program("wide", ("x",), (Launch("scale", words, grid=("1", "65536", "1"), device="cuda:0"), Return(())))
    with pytest.raises(RuntimeError, match="the kernel scale .*65536.*CUDA_ERROR_INVALID_VALUE"):
        assemble(p, kernels(SCALE))([torch.zeros(16, device="cuda:0")])


@two
def test_another_device_than_the_current_one():
    made = kernels(SCALE)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(3000, device=device)
        y, = assemble(scaling(device), made)([x])
        assert y.device == x.device and torch.equal(y, x / 2) and torch.cuda.current_device() == 0


@two
def test_a_program_over_two_devices():
    a, b = scaling("cuda:0").steps[1:-1], scaling("cuda:1").steps[1:-1]
    rename = {"x": "z", "y0": "w0"}
    second = (Alloc("w0", b[0].spec, b[0].nbytes_text),
              Launch("scale", tuple((k, rename.get(t, t) if k == "ptr" else t) for k, t in b[1].words), grid=b[1].grid, device="cuda:1"))
    p = Program("both", ("x", "z"), (Let("n", "x.numel()"), *a, *second, Return((Ref("y0"), Ref("w0")))))
    fn = assemble(p, kernels(SCALE))
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            x, z = torch.randn(3000, device="cuda:0"), torch.randn(3000, device="cuda:1")
            y, w = fn([x, z])
            assert torch.equal(y, x / 2) and torch.equal(w, z / 2) and torch.cuda.current_device() == current


@two
def test_errors_of_each_device_are_apart():
    made = kernels(GATHER)
    there, here = assemble(gathering("cuda:1"), made), assemble(gathering("cuda:0"), made)
    x, at = torch.randn(100, device="cuda:1"), torch.full((100,), 100, device="cuda:1")
    there([x, at])
    torch.cuda.synchronize(1)
    assert here([x.to("cuda:0"), at.to("cuda:0") - 1])[0].numel() == 100
    with pytest.raises(IndexError):
        there([x, at])
