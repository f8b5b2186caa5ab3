"""`tokamak doctor`: what is there, what is missing, and the command that mends it."""
import json
import os

import pytest
import torch

import tokamak
from tokamak.errors import BuildError
from tokamak.runtime import build as building
from tokamak.runtime import cache as caching
from tokamak.tools import doctor, machine
from tokamak.tools.cli import main
from tokamak.tools.machine import Peaks, device_name, known, peaks


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(machine, "_MEASURED", {})
    caching.open_cache.cache_clear()
    caching._warn_once.cache_clear()
    building.compiler.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """Peaks are measured in no time, and how often."""
    made = []

    def measure(device):
        made.append(device)
        return Peaks("some CPU", ((8192, 1e-6), (1 << 20, 1e-4)), {"float32": 1e11}, 1e-6, "2026-01-01")
    monkeypatch.setattr(machine, "_cpu", measure)
    return made


def facts(**options) -> dict:
    with tokamak.scope(**options):
        found = doctor.examine()
    return {f.what: f for f in found.facts} | {"status": found.status}


def test_a_machine_that_has_everything(tmp_path):
    found = facts(cache_dir=str(tmp_path / "cache"))
    assert found["status"] == 0 and {f.state for f in found.values() if f != 0} <= {"ok", "note"}
    assert found["torch"].found.startswith(torch.__version__) and found["CPU"].found == device_name("cpu")
    assert found["a kernel on cpu"].found.endswith("is right") and str(tmp_path) in found["cache"].found
    assert found["peaks of cpu"].state == "note" and found["peaks of cpu"].mend == "tokamak doctor --measure"


def test_no_compiler_is_missing_and_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(building, "_LOADED", {})
    found = facts(cache_dir=str(tmp_path / "cache"))
    assert found["status"] == 1 and found["C compiler"].state == found["a kernel on cpu"].state == "missing"
    assert found["C compiler"].mend.startswith("apt install gcc")


def test_who_launches_kernels(monkeypatch):
    asked = lambda: list(doctor.launching(tokamak.Options(), ["cuda:0"]))
    assert [(f.found, f.state) for f in asked()] == [("by C", "ok")] and not list(doctor.launching(tokamak.Options(), []))

    def fails(*_, **__):
        raise BuildError("the C compiler failed\n  with many words")
    monkeypatch.setattr(building, "build", fails)
    fact, = asked()
    assert fact.state == "note" and fact.found.endswith("longer than C: the C compiler failed") and fact.mend == "apt install gcc"


def test_a_compiler_that_is_none(tmp_path):
    found = facts(cc="nonesuch", cache_dir=str(tmp_path / "cache"))
    assert "'nonesuch' is no C compiler" in found["C compiler"].found and "unset TOKAMAK_CC" in found["C compiler"].mend


def test_a_cache_that_others_may_write_to(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o755)
    found = facts(cache_dir=str(tmp_path / "cache"))
    assert found["cache"].state == "missing" and found["cache"].mend == f"chmod 700 {tmp_path / 'cache'}"
    os.chmod(tmp_path / "cache", 0o700)
    caching.open_cache.cache_clear()
    assert facts(cache_dir=str(tmp_path / "cache"))["cache"].state == "ok"


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    found = facts(cache_dir=str(tmp_path / "cache"))
    assert found["cache"].state == "missing" and "TOKAMAK_CACHE_DIR" in found["cache"].mend


def test_without_a_cache():
    assert facts(cache_dir="")["cache"].state == "note"


def test_a_gpu_without_triton_and_one_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: (_ for _ in ()).throw(ImportError))
    assert [f.state for f in doctor.triton(True)] == ["missing"] and [f.state for f in doctor.triton(False)] == ["ok"]
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    fact, = doctor.gpu([])
    assert fact.state == "missing" and fact.mend.startswith("pip install")


def test_old_versions(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert [f.what for f in doctor.versions() if f.state == "missing"] == ["torch"]


def test_the_command(tmp_path, monkeypatch, capsys, quick):
    monkeypatch.setenv("TOKAMAK_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "C compiler" in text and text.endswith("nothing is missing\n") and not quick
    assert main(["doctor", "--json", "--measure"]) == 0
    found = {f["what"]: f["found"] for f in json.loads(capsys.readouterr().out)["facts"]}
    assert quick == ["cpu"] and "measured 2026-01-01" in found["peaks of cpu"]
    monkeypatch.setenv("TOKAMAK_CC", "nonesuch")
    assert main(["doctor"]) == 1 and "mend: unset TOKAMAK_CC" in capsys.readouterr().out


# -- peaks ---------------------------------------------------------------------------------------------------------------
def test_peaks_are_kept_and_read_back(tmp_path, quick):
    with tokamak.scope(cache_dir=str(tmp_path / "cache")):
        assert known("cpu") is None
        first = peaks("cpu")
        machine._MEASURED.clear()
        assert known("cpu") == peaks("cpu") == first and quick == ["cpu"]
        peaks("cpu", again=True)
        assert quick == ["cpu", "cpu"]


def test_peaks_beside_other_work_say_so_and_are_taken_again(tmp_path, monkeypatch):
    slow = Peaks("some CPU", ((8192, 4e-6), (1 << 20, 1e-4)), {"float32": 1e11}, 4e-6, "2026-01-01", 0.4)
    found = iter([slow, Peaks("some CPU", ((8192, 2e-6), (1 << 20, 3e-4)), {"float32": 2e11}, 2e-6, "2026-01-02", 0.0)])
    monkeypatch.setattr(machine, "_cpu", lambda device: next(found))
    monkeypatch.setattr(machine, "_MEASURED", {})
    with tokamak.scope(cache_dir=str(tmp_path / "cache")):
        assert peaks("cpu") == peaks("cpu") == known("cpu") == slow and slow.when.endswith("other work took 40% of the cores: too low")
        machine._MEASURED.clear()           # another process
        again = peaks("cpu")
        assert again == Peaks("some CPU", ((8192, 2e-6), (1 << 20, 1e-4)), {"float32": 2e11}, 2e-6, "2026-01-02", 0.0) == known("cpu")
        machine._MEASURED.clear()
        assert peaks("cpu") == again and again.when == "2026-01-02"


def test_peaks_measured_again_beside_other_work_replace_no_better_ones(tmp_path, monkeypatch):
    calm, busy, new = (Peaks("some CPU", ((8192, s),), {"float32": 1 / s}, s, "2026-01-01", beside)
                       for s, beside in ((1e-6, 0.0), (9e-6, 0.8), (2e-6, 0.0)))
    found = iter([calm, busy, new])
    monkeypatch.setattr(machine, "_cpu", lambda device: next(found))
    monkeypatch.setattr(machine, "_MEASURED", {})
    with tokamak.scope(cache_dir=str(tmp_path / "cache")):
        assert peaks("cpu") == peaks("cpu", again=True) == known("cpu") == calm
        assert peaks("cpu", again=True) == known("cpu") == new            # nothing was in the way: as it is now


def test_what_other_work_took():
    start = machine.Ran(10.0, 100.0, 5.0)
    cores = os.cpu_count() or 1
    assert machine.others(start, machine.Ran(12.0, 100.0 + 3.0 * cores, 5.0 + 2.0 * cores)) == pytest.approx(0.5)
    assert machine.others(start, machine.Ran(12.0, 101.0, 7.0)) == machine.others(None, start) == machine.others(start, start) == 0.0
    now = machine.Ran.now()
    assert now is None or now.all > 0 and now.own > 0


def test_a_corrupt_file_of_peaks_is_measured_again(tmp_path, quick):
    assert machine._parsed(b"{}") is None and machine._parsed(b"nonsense") is None
    with tokamak.scope(cache_dir=str(tmp_path / "cache")):
        peaks("cpu")
        machine._MEASURED.clear()
        for f in (tmp_path / "cache").iterdir():
            f.write_bytes(b"short")
        with pytest.warns(UserWarning, match="corrupt"):
            assert known("cpu") is None


def test_between_two_sizes_the_curve_is_a_line():
    p = Peaks("x", ((1024, 1e-6), (4096, 2e-6), (1 << 20, 1e-4)), {"float32": 1e9, "bfloat16": 4e9}, 1e-6, "")
    assert p.memory_seconds(0) == 0 and p.memory_seconds(10) == 1e-6 and p.memory_seconds(4096) == pytest.approx(2e-6)
    assert p.memory_seconds(2048) == pytest.approx(2 ** 0.5 * 1e-6)
    assert p.memory_seconds(2 << 20) == pytest.approx(2e-4)
    assert p.arithmetic_seconds(2e9) == 2 and p.arithmetic_seconds(2e9, "bfloat16") == 0.5 and p.arithmetic_seconds(1e9, "float64") == 1


def test_what_is_measured_on_this_cpu_is_monotone(monkeypatch):
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "CPU_SIZES", (1 << 12, 1 << 16, 1 << 20))
    with tokamak.scope(cache_dir="", strict=True):
        found = peaks("cpu")
    seconds = [s for _, s in found.copy]
    assert seconds == sorted(seconds) and all(s > 0 for s in seconds) and found.launch <= seconds[0]
    assert found.matmul.keys() == {"float32", "bfloat16", "float64"} and all(r > 0 for r in found.matmul.values())
