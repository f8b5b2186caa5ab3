"""Triton text -> machine code without a GPU: three targets, facts about the code, the cache on disk, the processes that compile."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.cubins import dumped
from tokamak import backend
from tokamak.errors import BuildError, CompilerMissing
from tokamak.options import Options
from tokamak.runtime import cache as caching
from tokamak.runtime import gpu_build, gpu_code, gpu_listing, gpu_pool, gpu_worker
from tokamak.runtime.gpu_build import GpuUnit, build
from tokamak.target import Target

HOPPER = ("cuda", 90, 32)
SCALE = """import triton
import triton.language as tl
@triton.jit
def {name}(p0, p1, n0, k0):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(p0 + i, mask=i < n0, other=0)
    tl.store(p1 + i, x * k0.to(tl.float32) + {constant}, mask=i < n0)
"""
# 512 values a thread, needed twice, and 255 registers
SPILLS = """import triton
import triton.language as tl
@triton.jit
def spills(p0, p1):
    i = tl.arange(0, 16384)
    x = tl.load(p0 + i)
    tl.store(p1 + i, x - tl.max(x, 0))
"""


# rows by registers where it reads, by lanes where it adds: LLVM shifts the lane's number and the row's as one vector
ROWS = """import triton
import triton.language as tl
@triton.jit
def rows(n0, n1, n2, n3, n4, p0, n5, p1, k0, n6, p2, err):
    b0 = tl.program_id(0)
    i1 = tl.arange(0, 128)[None, :]
    m2 = i1 < n0
    b3 = b0 % n1
    b4 = b0 // n1
    i5 = b3 * 2 + tl.arange(0, 2)[:, None]
    m6 = i5 < n2
    t7 = tl.load(p0 + n3 * b4 + n4 * i5 + i1, mask=m6 & m2)
    t8 = tl.load(p1 + n5 * i5 + i1, mask=m6 & m2)
    t9 = (t8 < tl.full([], 0, tl.int64))
    t10 = k0.to(tl.int64)
    t12 = tl.where(t9, t8 + t10, t8)
    e13 = m6 & m2 & ((t12 < 0) | (t12 >= n6))
    tl.store(err + e13.to(tl.int32) * 0, 1, mask=e13)
    f14 = tl.minimum(tl.maximum(t12, 0), n6 - 1)
    tl.atomic_add(p2 + b4 + f14 * 4, t7, mask=m6 & m2, sem='relaxed')
"""


def unit(name: str = "scale", constant: int = 1, **fields) -> GpuUnit:
    fields = {"divisible": frozenset({0, 1, 2}), **fields}
    return GpuUnit(name, SCALE.format(name=name, constant=constant), ("*fp32", "*fp32", "i32", "fp64"), **fields)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has made nothing and has not warned."""
    monkeypatch.setattr(gpu_build, "_MADE", {})
    caching.open_cache.cache_clear()
    caching._warn_once.cache_clear()


def forget():
    gpu_build._MADE.clear()
    caching.open_cache.cache_clear()


def how(units, **options) -> list[str]:
    seen = []
    build(units, HOPPER, report=lambda b: seen.append(b.how), **options)
    return seen


@pytest.mark.parametrize("arch, directive, threads", [(HOPPER, ".target sm_90a", 256), (("cuda", 100, 32), ".target sm_100a", 256),
                                                      (("hip", "gfx942", 64), "gfx942", 512)])
def test_compiles_for_a_target_that_is_not_here(arch, directive, threads):
    made = build([unit(warps=8)], arch)["scale"]
    assert made.code[:4] == b"\x7fELF" and made.entry == "scale" and made.threads == threads and made.scratch[0] == 0
    assert made.hidden == 2         # workspaces of the kernel and of a profiler
    assert directive in made.listing and made.registers > 0 and made.spilled == 0


def test_what_is_divisible_by_16_is_read_in_vectors():
    vectors = build([unit()], HOPPER)["scale"].listing
    scalars = build([unit(divisible=frozenset())], HOPPER)["scale"].listing
    assert "ld.global.v4" in vectors and "ld.global.v4" not in scalars
    assert "ld.global.v4" not in build([unit(divisible=frozenset({1}))], HOPPER)["scale"].listing


def test_products_are_rounded_first_where_the_unit_says_so():
    assert "fma.rn.f32" in build([unit()], HOPPER)["scale"].listing
    assert "fma.rn.f32" not in build([unit(contract=False)], HOPPER)["scale"].listing


def test_registers_and_stack_are_those_that_cuobjdump_reports():
    spilling = GpuUnit("spills", SPILLS, ("*fp32", "*fp32"), warps=1)
    for made in build([unit(), spilling], HOPPER).values():
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", dumped(made.code, "-res-usage")).groups()
        assert (made.registers, made.spilled) == (int(registers), int(stack))
    assert made.spilled > 0


def test_no_more_registers_than_the_unit_allows():
    free, bound = GpuUnit("spills", SPILLS, ("*fp32", "*fp32"), warps=4), GpuUnit("spills", SPILLS, ("*fp32", "*fp32"), warps=4, registers=64)
    assert build([free], HOPPER)["spills"].registers > 64 >= build([bound], HOPPER)["spills"].registers
    assert build([replace(bound, registers=64)], ("hip", "gfx942", 64))["spills"].registers > 0          # no such option there


def test_a_broken_kernel_is_named_with_the_compilers_words():
    broken = GpuUnit("broken", SCALE.format(name="broken", constant="nothing_of_that_name"), unit().signature)
    for others in ([], [unit()]):       # in this process, and in a worker
        with pytest.raises(BuildError, match=r"the kernel broken:\n(?s:.*)nothing_of_that_name is not defined"):
            build([*others, broken], HOPPER)


def test_the_cause_of_an_error_in_a_function_that_a_kernel_calls_is_told():
    called = "@triton.jit\ndef inner(x):\n    return x + nothing_of_that_name\n\n\n"
    text = unit("outer").text.replace("@triton.jit", called + "@triton.jit").replace("x * k0", "inner(x) * k0")
    for others in ([], [unit()]):
        with pytest.raises(BuildError, match=r"the kernel outer:\n(?s:.*)inner\(x\)(?s:.*)nothing_of_that_name is not defined"):
            build([*others, GpuUnit("outer", text, unit().signature)], HOPPER)


def test_a_machine_without_a_folder_for_temporary_files_is_named(monkeypatch):
    def refused(*_, **__):
        raise OSError(28, "No space left on device")
    gpu_pool.close()
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with pytest.raises(BuildError, match="no folder for temporary files: .*No space left.*TMPDIR"):
        build([unit()], HOPPER)


def test_a_child_that_is_forked_while_a_thread_compiles_here_can_compile():
    done = run("""
        with gpu_build._HERE, gpu_worker._LOCK:
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)
                build([unit()], HOPPER)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert done.stdout.split() == ["0"], done.stderr


def test_without_triton(monkeypatch):
    monkeypatch.setattr(gpu_build, "_triton_folder", lambda: None)
    with pytest.raises(CompilerMissing, match="pip install 'triton>=3.6'"):
        build([unit()], HOPPER)
    assert build([], HOPPER) == {}              # a program of calls alone needs none


def test_without_triton_the_compile_says_so_and_not_the_first_call(monkeypatch):
    monkeypatch.setattr(gpu_build, "_triton_folder", lambda: None)
    machine = Target("cpu", kind="gpu", arch=("cuda", 90, 32))
    with pytest.raises(CompilerMissing, match="Triton is not installed"):
        backend._begin_kernels({"group": None}, replace(machine, name="cuda:0"), Options(), lambda stage, value: value)


def test_kernels_may_call_the_library():
    text = SCALE.format(name="scale", constant="tk.tanh(x)").replace("@triton.jit", "from tokamak.codegen import triton_lib as tk\n@triton.jit")
    made = build([replace(unit(), text=text), unit("other")], HOPPER)
    assert "ex2.approx" in made["scale"].listing and "ex2.approx" not in made["other"].listing


# -- kept code -----------------------------------------------------------------------------------------------------------
def test_kept_in_the_process_and_on_disk(tmp_path):
    cache = str(tmp_path / "kept")
    assert how([unit()], cache_dir=cache) == ["compiled"]
    first = build([unit()], HOPPER)["scale"]
    assert how([unit()], cache_dir=cache) == ["process"]
    forget()
    assert how([unit()], cache_dir=cache) == ["cache"]
    assert build([unit()], HOPPER)["scale"] == first
    forget()
    assert how([unit()]) == ["compiled"]            # '' keeps none


def test_a_damaged_file_is_built_again(tmp_path):
    cache = tmp_path / "kept"
    how([unit()], cache_dir=str(cache))
    file, = cache.glob("*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    forget()
    with pytest.warns(UserWarning, match="corrupt"):
        assert how([unit()], cache_dir=str(cache)) == ["compiled"]
    forget()
    assert how([unit()], cache_dir=str(cache)) == ["cache"]


def test_something_else_under_the_key_is_built_again(tmp_path):
    cache = str(tmp_path / "kept")
    caching.open_cache(cache).put(gpu_build.key(unit(), HOPPER), b"a library")
    assert how([unit()], cache_dir=cache) == ["compiled"]


def test_the_key_holds_all_that_the_code_depends_on(monkeypatch):
    one = unit()
    changes = [replace(one, text=one.text + "\n"), replace(one, warps=8), replace(one, stages=2), replace(one, divisible=frozenset({0})),
               replace(one, contract=False), replace(one, registers=64), replace(one, signature=("*bf16", "*fp32", "i32", "fp64"))]
    keys = [gpu_build.key(u, HOPPER) for u in (one, *changes)] + [gpu_build.key(one, ("cuda", 100, 32))]
    for name in ("triton_version", "_library"):
        with monkeypatch.context() as patch:
            patch.setattr(gpu_build, name, lambda: "another")
            keys.append(gpu_build.key(one, HOPPER))
    assert len(set(keys)) == len(keys)


def test_the_assembler_is_tritons_whatever_inductor_has_entered(monkeypatch, tmp_path):
    """Inductor enters torch's own in the environment of each process in which it compiles; what the user enters is used."""
    from triton import knobs
    own, one, asked = knobs.nvidia.ptxas.path, unit(), tmp_path / "asked"
    usual, key = build([one], HOPPER)["scale"].code, gpu_build.key(one, HOPPER)
    chosen = tmp_path / "ptxas"
    chosen.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) touch {asked} ;; esac\nexec {own} "$@"\n')
    chosen.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(chosen))
    assert gpu_build.key(one, HOPPER) != key
    forget()
    assert build([one], HOPPER)["scale"].code == usual and asked.exists()
    asked.unlink()
    monkeypatch.setattr(gpu_build, "_torch_assembler", lambda: str(chosen))
    assert gpu_build.key(one, HOPPER) == key
    forget()
    assert build([one], HOPPER)["scale"].code == usual and not asked.exists() and knobs.nvidia.ptxas.path == str(chosen)


def test_the_version_is_known_without_importing_triton():
    import triton
    assert gpu_build.triton_version() == triton.__version__


# -- the processes that compile -------------------------------------------------------------------------------------------
@pytest.fixture
def pool():
    gpu_pool.close()
    gpu_build.warm()
    yield gpu_pool.started()
    gpu_pool.close()


def job(name: str = "scale") -> dict:
    u = unit(name)
    return {"name": u.name, "text": u.text, "signature": u.signature, "divisible": (), "warps": 4, "stages": 3, "contract": True, "arch": HOPPER}


SUICIDE = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"


def test_units_are_reported_when_they_are_there(pool):
    seen = []
    build([unit("first")], HOPPER)
    build([unit("first"), unit("second", 2), unit("third", 3)], HOPPER, report=lambda b: seen.append((b.name, b.how, b.seconds > 0, b.binary.entry)))
    assert seen[0] == ("first", "process", False, "first")
    assert sorted(seen[1:]) == [("second", "compiled", True, "second"), ("third", "compiled", True, "third")]


def test_many_units_at_once(pool):
    units = [unit(f"scale{i}", i) for i in range(6)]
    made = build(units, HOPPER)
    assert [made[u.name].entry for u in units] == [u.name for u in units]
    assert pool.ready()


def test_a_worker_that_is_killed_costs_nothing_but_time(pool):
    size = len(pool.channels)
    pool.run(job())
    children = Path(f"/proc/{pool.process.pid}/task/{pool.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    for i in range(2 * size):
        assert "code" in pool.run(job(f"scale{i}"))


def test_a_kernel_that_kills_the_compiler_is_named(pool):
    killer = GpuUnit("killer", SUICIDE + SCALE.format(name="killer", constant=1), unit().signature)
    with pytest.raises(BuildError, match="the kernel killer: the compiler's process was killed by signal 9"):
        build([unit(), killer], HOPPER)
    assert build([unit("after"), unit("later", 2)], HOPPER)["after"].entry == "after"        # with a new pool, if that was the last worker


def test_a_kernel_that_never_ends_is_named(monkeypatch):
    gpu_pool.close()
    monkeypatch.setattr(gpu_pool, "PATIENCE", 3.0)
    hanging = GpuUnit("hanging", "import time\ntime.sleep(3600)\n", ())
    with pytest.raises(BuildError, match="the kernel hanging: the compiler took longer"):
        build([unit(), hanging], HOPPER)
    gpu_pool.close()


def test_without_processes_the_work_is_done_here(monkeypatch):
    gpu_pool.close()
    monkeypatch.setattr(gpu_worker, "__file__", "/nowhere/gpu_worker.py")
    made = build([unit(), unit("other", 2)], HOPPER)
    assert made["scale"].entry == "scale" and made["other"].entry == "other"
    gpu_pool.close()


def test_triton_keeps_no_cache_of_its_own(pool):
    import triton
    before = dict(vars(triton.knobs.cache))
    assert "error" not in pool.run(job()) and "error" not in gpu_build._here(job())
    assert vars(triton.knobs.cache) == before
    assert not [f for f in Path(pool.folder).rglob("*") if f.is_file()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_closing_leaves_nothing(pool):
    pool.run(job())
    nursery = pool.process.pid
    workers = [int(p) for p in Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()]
    gpu_pool.close()
    assert workers and not any(map(alive, [nursery, *workers])) and not Path(pool.folder).exists()


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from tests.runtime.test_gpu_build import *
"""


def run(text: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", PROGRAM.format(tests=root) + textwrap.dedent(text)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def gone(pids: list[int]) -> bool:
    for _ in range(200):
        if not any(map(alive, pids)):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_the_processes_end_with_their_parent(ending):
    done = run(f"""
        build([unit(), unit('b', 2)], HOPPER)
        nursery = gpu_pool.started().process.pid
        print(gpu_pool.started().folder, nursery, *open(f'/proc/{{nursery}}/task/{{nursery}}/children').read().split(), flush=True)
        {ending}
    """)
    folder, *pids = done.stdout.split()
    assert len(pids) > 1 and gone(list(map(int, pids))) and not Path(folder).exists(), done.stderr


def test_the_processes_stand_back_behind_their_parent():
    done = run("""
        build([unit(), unit('b', 2)], HOPPER)
        nursery = gpu_pool.started().process.pid
        workers = map(int, open(f'/proc/{nursery}/task/{nursery}/children').read().split())
        print(*(os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, 0) for pid in workers))
    """)
    assert done.stdout.split() and all(int(behind) > 0 for behind in done.stdout.split()), done.stderr


def test_a_worker_searches_for_garbage_between_jobs_only():
    done = run("""
        import gc, socket
        from tokamak.runtime import gpu_worker
        def left(job, folder):
            for _ in range(job["cycles"]):
                cycle = []
                cycle.append(cycle)
            return {"searching": gc.isenabled(), "searched": gc.get_stats()[2]["collections"]}
        gpu_worker.compile_job = left
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            gpu_worker.work(theirs, "", os.memfd_create("said"))
            os._exit(0)
        for cycles in (10, 30_000, 10):
            gpu_worker.send(ours, {"cycles": cycles})
            answer = gpu_worker.receive(ours)
            print(answer["searching"], answer["searched"])
    """)
    (s1, first), (s2, second), (s3, third) = (line.split() for line in done.stdout.splitlines())
    assert (s1, s2, s3) == ("False",) * 3 and int(first) == int(second) < int(third), done.stderr


def test_an_end_while_the_processes_start():
    done = run("gpu_build.warm(HOPPER); print(gpu_pool.started().process.pid, flush=True)")
    assert done.returncode == 0 and gone([int(done.stdout)]), done.stderr


def test_a_forked_child_has_a_pool_of_its_own():
    done = run("""
        build([unit(), unit('b', 2)], HOPPER)
        mine = gpu_pool.started()
        pid = os.fork()
        if pid == 0:
            assert gpu_pool.started() is None
            forget()
            build([unit('c'), unit('d', 2)], HOPPER)
            assert gpu_pool.started() is not mine
            gpu_pool.close()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), mine.run(job('e'))['entry'])
    """)
    assert done.stdout.split() == ["0", "e"], done.stderr


def test_an_interpreted_triton_still_compiles():
    with warnings.catch_warnings():
        done = subprocess.run([sys.executable, "-c", PROGRAM.format(tests=str(Path(__file__).parents[2])) +
                               "print(build([unit(), unit('b', 2)], HOPPER)['b'].entry)"], cwd=Path(__file__).parents[2],
                              env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["b"], done.stderr


def test_no_lane_of_a_vector_reaches_into_its_neighbour():
    """A lane's number, shifted by 31 bits and widened, had stood in a row's number: gradients of a table by 77 x 77 places were wrong."""
    signature = ("i32", "i32", "i32", "i32", "i32", "*fp32", "i32", "*i64", "i64", "i32", "*fp32", "*i32")
    built = build([GpuUnit("rows", ROWS, signature, frozenset({5, 7, 10}), warps=1)], HOPPER)["rows"]
    assert "atom" in built.listing and not re.search(r"mul\.wide\.u32 .*, 2147483648;", built.listing)


# statistics of 16 rows, 4 columns a program: on one warp a pass of Triton 3.6 puts a product before its factor
MOMENTS = """import triton
import triton.language as tl
@triton.jit
def moments(p0, n0, p1, k0, k1, k2, p2, k3, k4, p3, p4, p5):
    b0 = tl.program_id(0)
    i1 = b0 * 4 + tl.arange(0, 4)[None, :]
    i2 = tl.arange(0, 16)[:, None]
    t3 = tl.load(p0 + i1)
    t4 = tl.load(p1 + n0 * i2 + i1)
    t5 = tl.sum(t4, 0)
    t5 = tl.expand_dims(t5, 0)
    t6 = k0.to(tl.float32)
    t7 = (t5 * t6)
    t8 = k1.to(tl.float32)
    t9 = (t7 * t8)
    t10 = (t5 - t9)
    t11 = (t10 * t10)
    t12 = (t11 * t6)
    t13 = (t3 + t12)
    t14 = (t13 * t6)
    t15 = k2.to(tl.float32)
    t16 = (t7 * t15)
    t17 = tl.load(p2 + i1)
    t18 = k3.to(tl.float32)
    t19 = (t17 * t18)
    t20 = (t16 + t19)
    t21 = k4.to(tl.float32)
    t22 = (t14 * t21)
    t23 = (t22 * t15)
    t24 = tl.load(p3 + i1)
    t25 = (t24 * t18)
    t26 = (t23 + t25)
    tl.store(p4 + i1, t14)
    tl.store(p5 + i1, t7)
    tl.store(p2 + i1, t20)
    tl.store(p3 + i1, t26)
"""


# statistics of 33 rows, 32 and 1, that are stored and go into running ones
PIECES = """import triton
import triton.language as tl
from tokamak.codegen import triton_lib as tk
@triton.jit
def pieces(n0, p0, k0, k1, p3, k2, k3, p4, p5, p6):
    b0 = tl.program_id(0)
    i1 = b0 * 8 + tl.arange(0, 8)[None, :]
    i2 = tl.arange(0, 32)[:, None]
    i3 = 32 + tl.arange(0, 1)[:, None]
    t13 = tl.load(p0 + n0 * i2 + i1)
    t23 = tl.load(p0 + n0 * i3 + i1)
    t24 = tl.sum(t13, 0)
    t24 = tl.expand_dims(t24, 0)
    t25 = tl.sum(t23, 0)
    t25 = tl.expand_dims(t25, 0)
    t26 = (t24 + t25)
    t27 = k0.to(tl.float32)
    t28 = tk.within(t27)
    t29 = t27 * t28
    t30 = tl.div_rn(1.0, t29)
    t31 = tk.quotient(t26, t29, t30, t28)
    t32 = (t13 - t31)
    t33 = (t32 * t32)
    t34 = (t23 - t31)
    t35 = (t34 * t34)
    t36 = tl.sum(t33, 0)
    t36 = tl.expand_dims(t36, 0)
    t37 = tl.sum(t35, 0)
    t37 = tl.expand_dims(t37, 0)
    t38 = (t36 + t37)
    t39 = tk.quotient(t38, t29, t30, t28)
    t40 = k1.to(tl.float32)
    t41 = (t31 * t40)
    t42 = tl.load(p3 + i1)
    t43 = k2.to(tl.float32)
    t44 = (t42 * t43)
    t45 = (t41 + t44)
    t46 = k3.to(tl.float32)
    t47 = (t39 * t46)
    t48 = (t47 * t40)
    t49 = tl.load(p4 + i1)
    t50 = (t49 * t43)
    t51 = (t48 + t50)
    tl.store(p5 + i1, t39)
    tl.store(p6 + i1, t31)
    tl.store(p3 + i1, t45)
    tl.store(p4 + i1, t51)
"""


def test_a_kernel_whose_warps_triton_cannot_lay_out_has_others():
    signature = ("*fp32", "i32", "*fp32", "fp64", "fp64", "fp64", "*fp32", "fp64", "fp64", "*fp32", "*fp32", "*fp32")
    made = GpuUnit("moments", MOMENTS, signature, frozenset({0, 1, 2, 6, 9, 10, 11}), warps=1)
    assert build([made], HOPPER)["moments"].threads == 64
    with pytest.raises(BuildError, match="PassManager"):
        build([replace(made, cluster=2)], HOPPER)


def test_a_kernel_that_no_near_number_of_warps_builds_has_eight_times_as_many():
    """Training a BatchNorm of 33 rows: one, two and four warps fail."""
    signature = ("i32", "*fp32", "fp64", "fp64", "*fp32", "fp64", "fp64", "*fp32", "*fp32", "*fp32")
    made = GpuUnit("pieces", PIECES, signature, frozenset({0, 1, 4, 7, 8, 9}), warps=1)
    assert build([made], HOPPER)["pieces"].threads == 256


# a product of two factors that come through Triton's pipeline, of which the first may say something
PIPELINE = """import triton
import triton.language as tl
@triton.jit
def pipeline(p0, p1, p2, n0, n1):
    i = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    a = tl.full([16, 16], 0.0, tl.float32)
    for r in tl.range(0, n0, 256, num_stages=4):
        x = tl.load(p0 + n1 * i + r + tl.arange(0, 256)[None, :]{policy})
        y = tl.load(p1 + n1 * j + r + tl.arange(0, 256)[:, None])
        a = tl.dot(x, y, a)
    tl.store(p2 + i * 16 + j, a)
"""
LINE = 9                # of the first factor's


def copies(listing: str) -> list[tuple[int, bool]]:
    """(the line that an asynchronous copy was written in, does it have a policy) of each."""
    found, line = [], 0
    for text in listing.split("\n"):
        if (place := re.search(r"\.loc\s+1\s+(\d+)", text)) is not None:
            line = int(place[1])
        if "cp.async.c" in text and "shared.global" in text:
            found.append((line, "L2::cache_hint" in text))
    return found


def pipeline(policy: str = ", eviction_policy='evict_first'", arch=HOPPER):
    forget()
    signature = ("*bf16", "*bf16", "*fp32", "i32", "i32")
    made = GpuUnit("pipeline", PIPELINE.format(policy=policy), signature, frozenset(range(5)), warps=2, stages=4)
    return build([made], arch)["pipeline"]


def test_copies_of_the_pipeline_leave_the_cache_first_where_the_text_says_so():
    made = pipeline()
    found = copies(made.listing)
    assert {line for line, _ in found} == {LINE, LINE + 1} and all(has == (line == LINE) for line, has in found)
    assert not gpu_code.misplaced(made.code)


@pytest.mark.parametrize("policy, arch", [("", HOPPER), (", eviction_policy='evict_first'", ("cuda", 80, 32)),
                                          (", eviction_policy='evict_first'", ("cuda", 100, 32))])
def test_copies_have_no_policy_where_nothing_asks_or_nothing_was_measured(policy, arch):
    found = copies(pipeline(policy, arch).listing)
    assert found and not any(has for _, has in found)


def test_copies_whose_registers_the_assembler_misplaces_have_no_policy(monkeypatch):
    """Without the zero a copy's address is the sum of two registers of different kinds."""
    seen, looked = [], gpu_code.misplaced
    monkeypatch.setattr(gpu_code, "misplaced", lambda code: seen.append(looked(code)) or seen[-1])
    monkeypatch.setattr(gpu_listing, "_BASE", re.compile("no such (text)"))
    found = copies(pipeline().listing)
    assert seen == [True] and found and not any(has for _, has in found)
