"""When the machine does not play along: a right result or an error of ours that says what to do, never a hang, a crash or a wrong number.

What is broken is really broken: compilers that crash, hang, lie or are killed; disks that are full or may not be written to; processes killed while
they write; memory that is not there; forks and threads.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch

import tokamak
from tests.threads import in_threads
from tokamak import backend as compiling
from tokamak.errors import BuildError, CompilerMissing, OptionError
from tokamak.runtime import build as building
from tokamak.runtime import cache as caching
from tokamak.runtime.memory import Pool

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has loaded nothing and has not warned."""
    torch._dynamo.reset()
    monkeypatch.setattr(building, "_LOADED", {})
    caching.open_cache.cache_clear()
    caching._warn_once.cache_clear()


def program(x):
    return (x.exp() + 1).sum(-1) * 2


X = torch.linspace(-2, 2, 64 * 640).reshape(64, 640)


def compiled(fn=program, **options):
    torch._dynamo.reset()
    return tokamak.compile(fn, **{"cache_dir": "", **options})


def right(found) -> bool:
    return torch.allclose(found, program(X))


# -- the C compiler ------------------------------------------------------------------------------------------------------
@pytest.fixture
def stand_in(tmp_path):
    """stand_in(shell commands): a C compiler that says its version and then does these; $O is the library that it should write."""
    def make(body: str) -> str:
        path = tmp_path / "cc"
        path.write_text(textwrap.dedent("""\
            #!/bin/sh
            case "$*" in *--version*) echo some compiler 1; exit 0;; esac
            A="$*"
            while [ $# -gt 0 ]; do [ "$1" = -o ] && O="$2"; shift; done
            """) + body + "\n")
        path.chmod(0o755)
        return str(path)
    return make


BROKEN = {"crashes": ("kill -SEGV $$", "was killed by SIGSEGV"), "killed": ("kill -9 $$", "was killed by SIGKILL"),
          "fails": ("echo no room >&2; exit 4", r"exit 4(.|\n)*no room"), "writes nothing": ("exit 0", "left no library"),
          "writes junk": ("echo junk > $O", "damaged library of 5 bytes"),
          "writes a part": ("%s $A && truncate -s 3000 $O", "damaged library of 3000 bytes")}


@pytest.mark.parametrize("how", BROKEN)
def test_a_compiler_that_fails_costs_speed_alone(stand_in, how):
    body, words = BROKEN[how]
    cc = stand_in(body.replace("%s", " ".join(building.compiler("").command)))
    with pytest.warns(UserWarning, match=f"runs eagerly because its kernels could not be built: the C compiler (.|\n)*{words}"):
        assert right(compiled(cc=cc)(X))
    with pytest.raises(Exception) as failed:
        compiled(cc=cc, strict=True)(X)
    assert isinstance(failed.value, BuildError)


def test_a_compiler_that_hangs_is_stopped_with_all_that_it_started(stand_in, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "PATIENCE", 0.5)
    cc = stand_in(f"sleep 1000 & echo $! > {tmp_path}/started; sleep 1000")
    with pytest.warns(UserWarning, match="took longer than 0 s"):
        assert right(compiled(cc=cc)(X))
    assert not alive(int((tmp_path / "started").read_text()))


def alive(process: int) -> bool:
    """Does it still run? (One that nobody has waited for does not.)"""
    for _ in range(50):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:
            return False
        time.sleep(0.1)
    return True


def test_a_compiler_that_does_not_say_its_version_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "QUICK", 0.3)
    path = tmp_path / "mute"
    path.write_text("#!/bin/sh\nsleep 1000")
    path.chmod(0o755)
    with pytest.raises(CompilerMissing, match="no C compiler that runs"):
        building.compiler(str(path))


def test_an_interrupt_ends_the_compilers(stand_in, tmp_path):
    cc = stand_in(f"echo $$ > {tmp_path}/started; sleep 1000")

    def interrupted(done, total):
        if (tmp_path / "started").exists() and (tmp_path / "started").read_text():
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        building.build([building.Unit("k", "long k;")], cc=cc, progress=interrupted)
    assert not alive(int((tmp_path / "started").read_text()))


@pytest.mark.parametrize("cc", ["nonesuch", "gcc '"])
def test_no_compiler_is_an_error_of_ours_without_torchs_frames(cc):
    try:
        compiled(cc=cc)(X)
    except CompilerMissing as error:
        assert str(error).startswith(f"'{cc}' is no C compiler that runs (option cc, or TOKAMAK_CC; empty looks for one); install one: `apt")
        assert "TORCHDYNAMO" not in str(error)
        assert len(traceback.extract_tb(error.__traceback__)) <= 3
    else:
        raise AssertionError("it ran without a compiler")


def test_a_compiler_whose_name_is_no_utf_8(tmp_path):
    """It is a name like any other."""
    folder = os.fsencode(tmp_path) + b"/b\xff"
    os.mkdir(folder)
    cc = os.fsdecode(folder + b"/cc")
    os.symlink(shutil.which("gcc") or shutil.which("cc"), cc)
    torch.testing.assert_close(compiled(cc=cc, cache_dir="")(X), program(X))


def test_a_wrong_option_is_an_error_of_ours():
    with pytest.raises(OptionError, match="did you mean 'policy'"):
        torch.compile(program, backend="tokamak", options={"polcy": "fast"})(X)


@pytest.mark.parametrize("asked", [True, False])
def test_a_process_that_can_start_no_other(monkeypatch, asked):
    """Neither a compiler nor, first, its version; no other compiler is taken for that."""
    def refused(*_, **__):
        raise OSError(12, "Cannot allocate memory")
    if not asked:
        building.compiler.cache_clear()
    before = building.compiler("") if asked else None
    monkeypatch.setattr(building.subprocess, "Popen", refused)
    with pytest.warns(UserWarning, match="could not be started: .*Cannot allocate memory"):
        assert right(compiled()(X))
    monkeypatch.undo()
    assert before in (None, building.compiler(""))


def test_a_system_that_executes_nothing_new(monkeypatch):
    def refused(*_):
        raise OSError("failed to map segment from shared object: Operation not permitted")
    monkeypatch.setattr(building, "_load_from_memory", refused)
    monkeypatch.setattr(building, "_load_from_file", refused)
    with pytest.warns(UserWarning, match="cannot be loaded: .*Operation not permitted"):
        assert right(compiled()(X))


def test_no_folder_for_temporary_files(monkeypatch):
    def refused(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found")
    monkeypatch.setattr(building.tempfile, "TemporaryDirectory", refused)
    with pytest.warns(UserWarning, match="no folder for temporary files: .*TMPDIR"):
        assert right(compiled()(X))


# -- the cache on disk ---------------------------------------------------------------------------------------------------
SCRIPT = """
import torch
import tokamak
def f(x): return (x.exp() + 1).sum(-1) * 2
x = torch.linspace(-2, 2, 64 * 640).reshape(64, 640)
assert torch.allclose(torch.compile(f, backend="tokamak")(x), f(x))
print("right")
"""


def run(text: str, *before: str, **environment: str) -> subprocess.CompletedProcess:
    """A process of its own that runs `text`, behind the words `before`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run([*before, sys.executable, "-c", text], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path, **environment})


@pytest.mark.parametrize("options, words", [("size=8k", "No space left"), ("ro", "Read-only"), ("noexec", "")])
def test_a_disk_of_its_own(tmp_path, options, words):
    """Really full, read-only, or one from which nothing is executed."""
    folder = tmp_path / "cache"
    folder.mkdir()
    inside = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o mode=0700,{options} none {folder} && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    done = run(SCRIPT, *inside, TOKAMAK_CACHE_DIR=str(folder))
    assert done.stdout == "right\n" and "Traceback" not in done.stderr
    assert words in done.stderr if words else done.stderr == ""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_foreign_cache_is_not_read(tmp_path):
    folder = tmp_path / "cache"
    assert right(compiled(cache_dir=str(folder))(X))
    kept, = folder.iterdir()
    os.chown(kept, 12345, -1)
    for broken, words in ((kept, "other users"), (folder, "must belong to you")):
        os.chown(broken, 12345, -1)
        building._LOADED.clear()
        caching.open_cache.cache_clear()
        with pytest.warns(UserWarning, match=words):
            assert right(compiled(cache_dir=str(folder))(X))


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_something_that_is_no_file_under_a_kernels_name(tmp_path, what):
    folder = tmp_path / "cache"
    assert right(compiled(cache_dir=str(folder))(X))
    kept, = folder.iterdir()
    kept.unlink()
    kept.mkdir() if what == "folder" else os.mkfifo(kept)
    building._LOADED.clear()
    caching.open_cache.cache_clear()
    with pytest.warns(UserWarning, match="is no file|are not kept"):
        assert right(compiled(cache_dir=str(folder))(X))


def test_killed_while_it_writes(tmp_path):
    """What a killed process leaves is never read, and is gone when somebody writes an hour later."""
    folder = tmp_path / "cache"
    done = run("""
import os, signal
from tokamak.runtime import cache
cache.os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
""" + SCRIPT, TOKAMAK_CACHE_DIR=str(folder))
    left, = folder.iterdir()
    assert done.returncode == -9 and left.name.startswith(".") and left.stat().st_size > 1000
    assert right(compiled(cache_dir=str(folder))(X)) and left.exists()
    os.utime(left, (time.time() - 7200,) * 2)
    caching.open_cache.cache_clear()
    building._LOADED.clear()
    assert right(compiled(lambda x: program(x) + 0, cache_dir=str(folder))(X))
    assert right(compiled(lambda x: program(x.neg().neg()) * 1.5 / 1.5, cache_dir=str(folder))(X))
    assert not left.exists() and len(list(folder.iterdir())) >= 2


# -- memory ----------------------------------------------------------------------------------------------------------------
def test_out_of_memory_is_torchs_error_and_the_next_call_is_right():
    done = run(SCRIPT + """
import resource
g = torch.compile(lambda x: ((x[:, None] + x[None]) * 2).exp(), backend="tokamak", dynamic=True)
g(torch.randn(64))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
try:
    g(torch.randn(20000))
except RuntimeError as error:
    assert "can't allocate memory" in str(error), error
    print("refused")
y = torch.randn(100)
assert torch.allclose(g(y), ((y[:, None] + y[None]) * 2).exp())
print("right again")
""")
    assert done.stdout == "right\nrefused\nright again\n", done.stderr


def test_idle_memory_of_the_pool_is_given_back_before_a_call_fails(monkeypatch):
    pool, real = Pool(), compiling.memory.Block
    layout = lambda n: ((n,), (1,), torch.float32)
    pool.take(layout(1 << 20), 1 << 22)
    assert pool.held() == (1 << 22, 1 << 22)

    def scarce(size):
        if pool.held()[0]:
            raise RuntimeError("can't allocate memory")
        return real(size)
    monkeypatch.setattr(compiling.memory, "Block", scarce)
    assert pool.take(layout(1 << 21), 1 << 23).numel() == 1 << 21 and pool.held()[0] == 1 << 23


def test_out_of_memory_while_it_compiles(monkeypatch):
    def exhausted(*_):
        raise MemoryError
    monkeypatch.setattr(compiling, "plan", exhausted)
    with pytest.warns(UserWarning, match="runs eagerly because there was not enough memory to compile it"):
        assert right(compiled()(X))


# -- processes and threads -------------------------------------------------------------------------------------------------
def test_forks():
    """A child uses what its parent compiled, compiles, trains; also one that is forked while a thread of the parent compiles. (torch itself hangs in
    a child when it works on several threads there, so the child compares with NumPy; and it compiles nothing when its parent did at the fork, whose
    lock it then waits for.)"""
    done = run("""
import os, threading, time
import numpy as np, torch
import tokamak
used = torch.compile(lambda x: (x.exp() + 1).sum(-1), backend="tokamak")
new = torch.compile(lambda x: x.softmax(-1) * 3, backend="tokamak")
trained = torch.compile(lambda x: (x.softmax(-1) * x).sum(), backend="tokamak")
x = torch.randn(4096, 640)
wanted, shares = used(x), x.softmax(-1) * 3
def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(int(sys_failed()))
    return os.waitpid(pid, 0)[1]
def sys_failed():
    import sys
    return sys.exc_info()[0] is not None
def uses(): np.testing.assert_allclose(used(x).numpy(), wanted.numpy(), rtol=1e-4)
def compiles(): np.testing.assert_allclose(new(x).numpy(), shares.numpy(), rtol=1e-4)
def trains():
    y = torch.from_numpy(x.numpy().copy()).requires_grad_()
    trained(y).backward()
    assert y.grad is not None
print([child(work) for work in (uses, compiles, trains)])
many = [torch.compile(lambda x, i=i: (x * i).exp().sum(-1), backend="tokamak") for i in range(4)]
thread = threading.Thread(target=lambda: [f(x) for f in many], daemon=True)
thread.start()
print([(time.sleep(0.2), child(work))[1] for work in (uses, uses, uses)])
thread.join()
""", TOKAMAK_CACHE_DIR="")
    assert done.stdout == "[0, 0, 0]\n[0, 0, 0]\n", done.stderr


def test_threads_call_one_function_at_once():
    """Its first calls, at several sizes, and its backward."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    infer, train = compiled(), compiled(model)

    def work(rows: int):
        x, y = torch.randn(rows, 640), torch.randn(rows, 64)
        want, = torch.autograd.grad(model(a := y.clone().requires_grad_()).pow(2).sum(), a)
        for _ in range(10):
            torch.testing.assert_close(infer(x), program(x))
            got, = torch.autograd.grad(train(b := y.clone().requires_grad_()).pow(2).sum(), b)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    in_threads(work, [(rows,) for rows in (64, 64, 65, 1)])


# -- what a program works on -------------------------------------------------------------------------------------------------
TYPES = (torch.complex64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types_that_no_kernel_has(dtype):
    """Through torch where torch can, torch's own error where it cannot."""
    x = torch.arange(16.0).reshape(4, 4).to(dtype)
    for fn in (lambda a: a * 2 + 1, lambda a: a.abs(), lambda a: a.sum(), lambda a: torch.cat([a, a]).t()):
        try:
            wanted, refusal = fn(x), None
        except Exception as error:
            wanted, refusal = None, error
        if refusal is None:
            found = compiled(fn, strict=True)(x)
            assert found.dtype == wanted.dtype and torch.equal(found.to(torch.complex128), wanted.to(torch.complex128))
        else:
            with pytest.raises(type(refusal)):
                compiled(fn, strict=True)(x)


def test_layouts_that_no_kernel_has():
    x = torch.arange(16.0).reshape(4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(beta|prototype).*")
        ragged = torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)
        for made in (x.to_mkldnn(), x.to_sparse(), x.to_sparse_csr()):
            assert torch.equal(compiled(lambda a: (a * 2).to_dense(), strict=True)(made), x * 2)
        assert torch.equal(compiled(lambda a: (a * 2).values(), strict=True)(ragged), ragged.values() * 2)


def test_devices_that_do_not_meet():
    x = torch.randn(4, 4)
    for fn in (lambda a, b: a + b, lambda a, b: (a.exp() @ b).relu()):
        with pytest.raises(RuntimeError, match="device"):
            compiled(fn, strict=True)(x, x.to("meta"))


EMPTY = {"sum": lambda a: (a * 2).sum(-1), "mean": lambda a: (a * 2).mean(), "softmax": lambda a: (a * 2).softmax(-1),
         "scan": lambda a: a.cumsum(-1) + 1,
         "cat": lambda a: torch.cat([a, a + 1], -1), "std": lambda a: a.std(), "norm": lambda a: torch.nn.functional.layer_norm(a, a.shape[-1:]),
         "matmul": lambda a: (a @ a.mT).relu(), "maximum": lambda a: (a * 2).amax(0)}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", EMPTY)
def test_nothing_at_all(name):
    for shape in ((4, 0), (3, 0, 5)) if name == "maximum" else ((0, 4), (4, 0), (3, 0, 5)):
        if name == "maximum" and shape[0] == 0:
            continue
        x = torch.zeros(shape)
        torch.testing.assert_close(compiled(EMPTY[name], strict=True)(x), EMPTY[name](x), equal_nan=True)


def test_the_greatest_of_nothing_is_refused():
    with pytest.raises((RuntimeError, IndexError), match="zero-size"):
        compiled(lambda a: a.amax(-1), strict=True)(torch.zeros(4, 0))
