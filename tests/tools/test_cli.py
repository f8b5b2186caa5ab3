"""The command `tokamak`."""
import json
import subprocess
import sys

import pytest
import torch

from tokamak.options import STAGES
from tokamak.tools.cli import main

SCRIPT = """
import sys
import torch
print("hello", sys.argv[1:])
@torch.compile(backend="tokamak")
def f(x):
    return (x * 2).relu()
if __name__ == "__main__":
    f(torch.ones(8))
"""


@pytest.fixture
def run(tmp_path, capsys):
    """run(script text, argument, ...): the arguments with {} for the script's path; returns (status, standard output, standard error)."""
    def call(text: str, *arguments: str):
        torch._dynamo.reset()
        path = tmp_path / "script.py"
        path.write_text(text)
        status = main([a.format(path) for a in arguments])
        return (status, *capsys.readouterr())
    return call


def test_explain(run):
    status, out, err = run(SCRIPT, "explain", "{}", "a", "--b")
    assert status == 0 and "poi_fused_mul_relu_0" in out and "script.py:7" in out
    assert "hello ['a', '--b']" in err and "hello" not in out


def test_explain_as_json(run):
    status, out, _ = run(SCRIPT, "explain", "--json", "{}")
    assert status == 0 and json.loads(out)["graphs"][0]["calls"] == 2


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_prints(run, stage):
    status, out, _ = run(SCRIPT, "compile", "--until", stage, "{}")
    assert status == 0 and out.startswith("-- inference_") and len(out.splitlines()) > 1


def test_the_c_as_it_is_built(run):
    _, out, _ = run(SCRIPT, "compile", "--until", "render", "--exact", "{}")
    assert "typedef" in out and "// operations" not in out


def test_a_script_that_compiles_nothing(run):
    status, out, err = run("print(1)", "explain", "{}")
    assert status == 1 and not out and "compiled nothing with tokamak" in err


def test_a_script_that_fails_shows_its_own_frames_only(run):
    status, _, err = run("def f():\n    raise ValueError('oops')\nf()", "explain", "{}")
    assert status == 1 and "ValueError: oops" in err and "runpy" not in err and "cli.py" not in err


def test_a_scripts_exit_status(run):
    assert run(SCRIPT + "    sys.exit(3)", "explain", "{}")[0] == 3


@pytest.mark.parametrize("arguments, words", [(["explain", "nowhere.py"], "there is no file 'nowhere.py'"),
                                              (["compile", "--until", "fus", "x"], "'fus'")])
def test_wrong_command_lines(arguments, words, capsys):
    with pytest.raises(SystemExit) as leave:
        main(arguments)
    assert leave.value.code == 2 and words in capsys.readouterr().err


def test_a_users_mistake_is_one_line(run, monkeypatch):
    monkeypatch.setenv("TOKAMAK_CC", "nonesuch")
    status, _, err = run(SCRIPT, "explain", "{}")
    assert status == 1 and err.splitlines()[-1].startswith("tokamak: 'nonesuch' is no C compiler that runs") and "Traceback" not in err
    monkeypatch.setenv("TOKAMAK_LOGS", "fusing")
    status, _, err = run(SCRIPT, "explain", "{}")
    assert status == 2 and err == "tokamak: there is no log topic 'fusing': graph, fusion, schedule, output_code; did you mean 'fusion'?\n"


def test_it_is_a_command():
    done = subprocess.run([sys.executable, "-m", "tokamak", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("tokamak ") and done.returncode == 0
