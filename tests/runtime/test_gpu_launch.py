"""Launching without a GPU: a library that stands for the driver and records what it is asked; both launchers; programs."""
from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import replace

import pytest
import torch

from tokamak.errors import BuildError, CompilerMissing
from tests.runtime.driving import binary, device, fake, launch, library         # fixtures, too
from tests.threads import in_threads
from tokamak.runtime import gpu, gpu_errors
from tokamak.runtime.gpu import ASK, Kernel
from tokamak.runtime.gpu_build import Binary, GpuUnit
from tokamak.runtime.program import RESIDENT, Alloc, Call, Host, Launch, Let, Program, Ref, Return, TensorSpec, assemble, source


def call(placed, *words, grid=(5, 2, 3), stream=77):
    """What a program's function does."""
    packed = struct.pack("=6qd", placed.address, *grid, *words)
    if placed.launch(packed, stream):
        placed(packed, stream)


def test_the_launcher_in_c_is_what_runs_where_there_is_a_compiler(monkeypatch):
    assert gpu.launcher() is not gpu.launch_in_python
    gpu.launcher.cache_clear()

    def missing(*_, **__):
        raise CompilerMissing("none")
    monkeypatch.setattr(gpu.c_build, "build", missing)
    assert gpu.launcher() is gpu.launch_in_python
    gpu.launcher.cache_clear()


def test_a_launch_arrives_as_it_was_packed(fake, launch):
    placed = fake.kernel(launch).on("cuda:1")
    for _ in range(2):                  # the first loads
        call(placed, 0x7f0000000010, -3, 2.5)
    assert fake.number("loaded").value == 1
    for seen in fake.launches:
        assert (seen.function, list(seen.shape), seen.stream, seen.together) == (b"k0", [5, 2, 3, 128, 1, 1, 0], 77, 0)
        assert seen.arguments[0] == 0x7f0000000010 and seen.small == -3 and list(seen.arguments[3:5]) == [0, 0]
        assert struct.unpack("d", struct.pack("q", seen.arguments[2])) == (2.5,)
    assert len(fake.launches) == 2


def test_descriptors_are_made_of_what_a_call_gives(fake, launch):
    """Two boxes behind three parameters: what describes them in the driver's order, and their extents and strides as parameters."""
    fake.number("count").value = 3 + 2 * 5
    unit = GpuUnit("k", "text", ("*fp32", "i32", "fp64"), frozenset({0}), boxes=(("fp32", (128, 64)),) * 2)
    maps = ((2, 7, 4, 3, (128, 32)),) * 2
    placed = Kernel(binary(unit, maps=maps), None, launch, lambda: fake.driver).on("cuda:0")
    packed = struct.pack("=6qd12q", placed.address, 5, 2, 3, 32, -3, 2.5, 4096, 8, 100, 60, 64, 1, 8192, 0, 70, 50, 56, 1)
    for _ in range(2):
        if launch(packed, 77):
            placed(packed, 77)
    for seen in fake.launches:
        got, expected = list(seen.arguments[:15]), []
        for at, rows, columns, step in ((4096 + 32, 100, 60, 256), (8192, 70, 50, 224)):
            described = 0
            for word in (723, at, columns * 1000 + rows, step, 32 * 1000 + 128):
                described = described * 31 + word
            expected += [described, rows, columns, step // 4, 1]
        assert got[0] == 32 and seen.small == -3 and got[3:13] == expected and got[13:] == [0, 0]
    assert len(fake.launches) == 2


def test_memory_that_boxes_cannot_describe_gets_the_kernel_without(fake, launch):
    unit = GpuUnit("k", "text", ("*fp32", "i32", "fp64"), frozenset({0}), boxes=(("fp32", (128, 64)),), otherwise="other")
    rebuilt = []
    made = Kernel(binary(unit, maps=((2, 7, 4, 3, (128, 32)),)), lambda u: (rebuilt.append(u), binary(u))[1], launch,
                  lambda: fake.driver).on("cuda:0")
    packed = struct.pack("=6qd6q", made.address, 5, 2, 3, 36, -3, 2.5, 36, 0, 100, 60, 64, 1)
    for _ in range(2):
        if launch(packed, 77):
            made(packed, 77)
    assert rebuilt == [GpuUnit("k", "other", ("*fp32", "i32", "fp64"))] and [s.arguments[0] for s in fake.launches] == [36, 36]


def test_once_loaded_the_launcher_needs_nobody(fake, launch):
    placed = fake.kernel(launch).on("cuda:0")
    packed = struct.pack("=6qd", placed.address, 1, 1, 1, 16, 1, 0.0)
    assert launch(packed, 0) == ASK
    placed(packed, 0)
    assert launch(packed, 0) == 0 and len(fake.launches) == 2


def test_no_programs_no_launch(fake, launch):
    placed = fake.kernel(launch).on("cuda:0")
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        call(placed, 0, 1, 0.0, grid=grid)
    assert not fake.launches and not fake.number("loaded").value


def test_cooperative_kernels_are_launched_together(fake, launch):
    placed = fake.kernel(launch, cooperative=True).on("cuda:0")
    call(placed, 16, 1, 0.0)
    call(placed, 16, 1, 0.0)
    assert [s.together for s in fake.launches] == [1, 1]
    assert placed.resident == 2048 // 128 * 132


@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_clusters_are_launched_with_their_size(fake, launch, cluster):
    placed = fake.kernel(launch, cluster=cluster).on("cuda:0")
    for _ in range(2):
        call(placed, 16, -3, 2.5, grid=(32, 1, 1))
    for seen in fake.launches:
        assert (list(seen.shape), seen.stream, seen.together) == ([32, 1, 1, 128, 1, 1, 0], 77, -cluster)
        assert seen.arguments[0] == 16 and seen.small == -3 and list(seen.arguments[3:5]) == [0, 0]
    assert len(fake.launches) == 2 and fake.number("any_cluster").value == (cluster > 8)


def test_much_shared_memory_is_asked_for(fake, launch):
    kernel = fake.kernel(launch)
    kernel.binary = replace(kernel.binary, shared=100_000)
    call(kernel.on("cuda:0"), 16, 1, 0.0)
    assert fake.number("shared_asked").value == 100_000 and fake.launches[0].shape[6] == 100_000


def test_shared_memory_beside_what_a_cluster_exchanges_is_asked_for(fake, launch):
    kernel = fake.kernel(launch, cluster=4)
    kernel.binary = replace(kernel.binary, shared=48 << 10)
    call(kernel.on("cuda:0"), 16, 1, 0.0)
    assert fake.number("shared_asked").value == 48 << 10


def test_a_call_that_breaks_an_assumption_gets_a_variant(fake, launch):
    placed = fake.kernel(launch, divisible=frozenset({0, 1})).on("cuda:0")
    calls = [(16, 32), (8, 32), (16, 3), (8, 3), (32, 48), (24, 16), (48, 1), (4, 5)]
    for pointer, size in calls:
        call(placed, pointer, size, 0.0)
    expected = {(False, False): b"k01", (True, False): b"k1", (False, True): b"k0", (True, True): b"k"}
    assert [s.function for s in fake.launches] == [expected[p % 16 != 0, n % 16 != 0] for p, n in calls]
    assert [u.divisible for u in fake.rebuilt] == [frozenset({1}), frozenset({0}), frozenset()]
    packed = struct.pack("=6qd", placed.address, 1, 1, 1, 8, 3, 0.0)
    assert launch(packed, 0) == 0       # the launcher finds the variants by itself


def test_what_may_be_assumed_less_does_not_depend_on_the_order_of_calls(fake, launch):
    placed = fake.kernel(launch, divisible=frozenset({0, 1})).on("cuda:0")
    for pointer, size in ((8, 3), (8, 32), (16, 32), (16, 3)):
        call(placed, pointer, size, 0.0)
    # the variant that assumes nothing serves what it was there for first
    assert [s.function for s in fake.launches] == [b"k", b"k", b"k01", b"k"]


def test_a_device_loads_its_own_and_the_threads_context_stays(fake, launch):
    kernel = fake.kernel(launch)
    current = ctypes.c_void_p.in_dll(fake.library, "current")
    call(kernel.on("cuda:1"), 16, 1, 0.0)
    assert current.value == 0x1001      # the thread had none
    call(kernel.on("cuda:0"), 16, 1, 0.0)
    assert current.value == 0x1001 and [s.context for s in fake.launches] == [0x1001, 0x1000]
    assert kernel.on("cuda:0") is kernel.on("cuda") and fake.number("loaded").value == 2


def test_code_is_loaded_while_a_graph_is_captured(fake, launch):
    call(fake.kernel(launch).on("cuda:0"), 16, 1, 0.0)
    assert fake.number("relaxed_at_load").value == 2 and fake.number("mode").value == 0


def test_a_workspace_is_taken_for_each_launch(fake, launch, monkeypatch):
    kernel = fake.kernel(launch)
    kernel.binary = replace(kernel.binary, scratch=(100, 128))
    rooms, real = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda n, dtype, device: (rooms.append((n, device)), real(n, dtype=dtype))[1])
    for _ in range(2):
        call(kernel.on("cuda:0"), 16, 1, 0.0)
    assert rooms == [(100 * 30 + 128, "cuda:0")] * 2
    assert all(s.arguments[3] % 128 == 0 and s.arguments[3] and not s.arguments[4] for s in fake.launches)


def test_failures_say_what_was_asked(fake, launch):
    placed = fake.kernel(launch).on("cuda:0")
    with pytest.raises(RuntimeError, match=r"the kernel k .* grid \(2147483648, 1, 1\).*CUDA_ERROR_INVALID_VALUE \(1\): in the driver's words"):
        call(placed, 16, 1, 0.0, grid=(1 << 31, 1, 1))
    call(placed, 16, 1, 0.0)
    fake.number("answer").value = 701
    with pytest.raises(RuntimeError, match="CUDA_ERROR_SOMETHING \\(701\\)"):
        call(placed, 16, 1, 0.0)
    fake.number("answer").value = 0
    kernel = fake.kernel(launch)
    kernel.binary = replace(kernel.binary, code=b"bad")
    with pytest.raises(RuntimeError, match="cuModuleLoadData: .*209"):
        call(kernel.on("cuda:0"), 16, 1, 0.0)


def test_threads_load_and_build_once(fake, launch):
    placed = fake.kernel(launch).on("cuda:0")
    start = threading.Barrier(8)

    def work(pointer: int):
        start.wait()
        call(placed, pointer, 1, 0.0)
    in_threads(work, [(16 + 8 * (i % 2),) for i in range(8)])
    assert fake.number("loaded").value == 2 and len(fake.rebuilt) == 1
    assert sorted(s.function for s in fake.launches) == [b"k"] * 4 + [b"k0"] * 4


def test_equal_units_are_one_kernel_and_variants_are_built():
    pytest.importorskip("triton")
    text = "import triton\nimport triton.language as tl\n@triton.jit\ndef fill(p0):\n    tl.store(p0 + tl.arange(0, 256), 1.0)\n"
    unit, seen = GpuUnit("fill", text, ("*fp32",), frozenset({0})), []
    first = gpu.kernels([unit], ("cuda", 90, 32), report=lambda b: seen.append(b.name))["fill"]
    assert gpu.kernels([replace(unit)], ("cuda", 90, 32))["fill"] is first and gpu.kernels([unit], ("cuda", 100, 32))["fill"] is not first
    less = first.rebuild(replace(unit, divisible=frozenset()))
    assert seen == ["fill"] and "st.global.v" in first.binary.listing and "st.global.v" not in less.listing


# -- error words -----------------------------------------------------------------------------------------------------------
def test_error_words_lie_apart_and_are_zero(fake, monkeypatch):
    monkeypatch.setattr(gpu_errors, "_pages", {})
    held = [gpu_errors.error_words("cuda:0", n, lambda: fake.driver) for n in (1, 3, 1023, 5000)]
    assert [len(view) for view, _ in held] == [4, 12, 4092, 20000] and not any(any(view) for view, _ in held)
    ends = sorted((address, address + len(view)) for view, address in held)
    assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:]))
    ctypes.c_int32.from_address(held[1][1] + 8).value = 5       # as a kernel writes
    assert held[1][0].cast("i")[2] == 5


# -- programs --------------------------------------------------------------------------------------------------------------
def spec(n: str, device: str) -> TensorSpec:
    return TensorSpec((n,), ("1",), torch.float32, device)


def program(*devices: str, error: bool = False) -> Program:
    """x -> for each device: y = k(x, n, 0.5), where k may also take the error word for its size."""
    steps = [Let("n", "x.shape[0]")]
    for i, d in enumerate(devices):
        words = (("ptr", f"y{i}"), ("error", "") if error else ("int", "n"), ("float", "0.5"))
        steps += [Alloc(f"y{i}", spec("n", d), "n*4"), Launch("k", words, first_error=i, grid=("(n + 9)//10", "1", "1"), device=d)]
    steps.append(Return(tuple(Ref(f"y{i}") for i in range(len(devices)))))
    return Program("p", ("x",), tuple(steps), errors=((IndexError, "the first"), (ValueError, "the second")))


def test_a_program_launches_on_its_device_and_stream(fake, device, launch):
    fn = assemble(program("cuda:1"), {"k": fake.kernel(launch)})
    for n in (25, 31):
        y, = fn([torch.empty(n)])
        seen = fake.launches[-1]
        assert seen.arguments[0] == y.data_ptr() and seen.small == n and list(seen.shape[:3]) == [-(-n // 10), 1, 1] and seen.stream == 701
    assert device.log == ["stream 1", "empty on 1"] * 2 and device.current == 3


def test_a_program_over_two_devices(fake, device, launch):
    fn = assemble(program("cuda:0", "cuda:1"), {"k": fake.kernel(launch)})
    fn([torch.empty(8)])
    fn([torch.empty(8)])
    assert device.log == ["stream 0", "stream 1", "empty on 0", "empty on 1"] * 2 and device.current == 3
    assert [s.stream for s in fake.launches] == [700, 701] * 2


def test_the_device_is_set_back_after_a_failure(fake, device, launch):
    fn = assemble(program("cuda:1"), {"k": fake.kernel(launch)})
    fake.number("answer").value = 700
    with pytest.raises(RuntimeError, match="kernel k"):
        fn([torch.empty(8)])
    assert device.current == 3


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_error_of_a_kernel_is_raised_at_the_next_call(fake, device, launch, synchronous):
    fn = assemble(program("cuda:0", "cuda:1", error=True), {"k": fake.kernel(launch)}, synchronous=synchronous)
    fn([torch.empty(8)])
    words = [s.arguments[1] for s in fake.launches]
    ctypes.c_int32.from_address(words[1]).value = 1         # as the second kernel does
    with pytest.raises(ValueError, match="the second"):
        fn([torch.empty(8)])
    assert len(fake.launches) == 2                          # and nothing ran
    fn([torch.empty(8)])
    assert ("wait (0, 1)" in device.log) == synchronous


def test_a_synchronous_call_raises_its_own_error(fake, device, launch, monkeypatch):
    def wait(*_):
        ctypes.c_int32.from_address(fake.launches[0].arguments[1]).value = 2
    monkeypatch.setattr(gpu, "wait", wait)
    fn = assemble(program("cuda:0", error=True), {"k": fake.kernel(launch)}, synchronous=True)
    with pytest.raises(ValueError, match="the second"):
        fn([torch.empty(8)])


def test_an_error_of_the_last_call_is_warned_of(fake, device, launch):
    fn = assemble(program("cuda:0", error=True), {"k": fake.kernel(launch)})
    fn([torch.empty(8)])
    ctypes.c_int32.from_address(fake.launches[0].arguments[1]).value = 1
    with pytest.warns(UserWarning, match="the last call of p failed on the GPU: IndexError: the first"):
        del fn


def test_an_error_shows_behind_a_step_that_waits(fake, device, launch):
    def item(x):
        ctypes.c_int32.from_address(fake.launches[0].arguments[1]).value = 1
        return 5
    steps = (*program("cuda:0", error=True).steps[:-1],
             Call(torch.ops.aten._local_scalar_dense.default, (Ref("y0"),), {}, (("s", None),), True), Return((Host("s"),)))
    p = Program("p", ("x",), steps, errors=((IndexError, "the first"),))
    text = source(p)
    fn = assemble(p, {"k": fake.kernel(launch)})
    fn.__globals__["tk_c3"] = item
    assert "tk_c3(" in text
    with pytest.raises(IndexError, match="the first"):
        fn([torch.empty(8)])


def test_the_grid_may_be_what_the_device_holds(fake, device, launch):
    p = Program("p", ("x",), (Launch("k", (("ptr", "x"), ("int", "1"), ("float", "0.0")), grid=(f"min({RESIDENT}, 5000)", "1", "1"), device="cuda:0"),
                              Return(())))
    assemble(p, {"k": fake.kernel(launch)})([torch.empty(8)])
    assert fake.launches[0].shape[0] == 2048 // 128 * 132


def test_the_text_for_people_needs_no_device():
    text = source(program("cuda:0", error=True))
    assert "tk_exchange(0)" in text and "finally:" in text
    assert "cuda" not in source(Program("p", ("x",), (Return((Ref("x"),)),)))


def test_more_shared_memory_than_there_is_is_refused_before_a_launch(monkeypatch):
    unit = GpuUnit("wide", "", ("*fp32",))
    binary = Binary(unit, ("cuda", 90, 32), b"", "wide", 300_000, 128, 32, 0, (0, 1), 2, (), b"")
    monkeypatch.setattr(gpu, "build", lambda units, arch, **_: {u.name: binary for u in units})
    monkeypatch.setattr(gpu, "launcher", lambda *_: None)
    monkeypatch.setattr(gpu, "_kernels", {})
    monkeypatch.setattr(gpu, "most_shared", lambda: 232_448)
    with pytest.raises(BuildError, match="the kernel wide wants 300000 bytes of shared memory, and a program on this GPU has 232448"):
        gpu.kernels([unit], ("cuda", 90, 32))
    for room in (0, 300_000):
        monkeypatch.setattr(gpu, "most_shared", lambda: room)
        assert set(gpu.kernels([unit], ("cuda", 90, 32))) == {"wide"}
