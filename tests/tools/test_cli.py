"""The command `tokamak`."""
import json
import os
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
                                              (["compile", "--until", "fus", "x"], "'fus'"),
                                              (["explain"], "required: SCRIPT\n"),
                                              (["profile", "--seconds", "inf", "x"], "invalid duration value: 'inf'"),
                                              (["optimize", "--seconds", "nan", "x"], "invalid duration value: 'nan'")])
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
    assert status == 2 and err.startswith("tokamak: there is no log topic 'fusing': graph, fusion, ") and err.endswith("did you mean 'fusion'?\n")


@pytest.mark.parametrize("arguments, words", [(["optimize", "--allow", "bf16,fp4"], "allow='fp4': one of bf16, fp16, int8, int4"),
                                              (["optimize", "--allow", "int8"], "weights are changed in a module"),
                                              (["verify", "--extract", "nope"], "no kernel has such a name"),
                                              (["verify", "--extract", ""], "no kernel has such a name"),
                                              (["verify", "--output", "kernel.py"], "which --extract names"),
                                              (["compile", "--exact"], "which --until render shows"),
                                              (["profile", "--fail-if", "kernel>3"], "is no condition"),
                                              (["profile", "--html", "a", "--trace", "./a"], "that file is to hold something else")])
def test_what_cannot_be_is_refused_before_the_script_runs(run, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(SCRIPT, *arguments, "{}")
    assert status == 2 and not out and words in err and "hello" not in err and len(err.splitlines()) == 1


def test_a_kernel_that_is_not_there_is_known_before_anything_is_compared(run, monkeypatch):
    monkeypatch.setattr("tokamak.tools.cli.examined", None)
    status, out, err = run(SCRIPT, "verify", "--extract", "poi_fused_add_9", "{}")
    assert status == 2 and not out and err.endswith("there is no kernel 'poi_fused_add_9': poi_fused_mul_relu_0\n")


def test_it_is_a_command():
    done = subprocess.run([sys.executable, "-m", "tokamak", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("tokamak ") and done.returncode == 0


# -- scripts that end in other ways ----------------------------------------------------------------------------------------
ONE = """
import os, sys, torch
f = torch.compile(lambda x: x.exp().sum(-1), backend="tokamak")
"""


@pytest.fixture
def alone(tmp_path):
    """alone(script text, argument, ...): the command in a process of its own."""
    def call(text: str, *arguments: str) -> subprocess.CompletedProcess:
        path = tmp_path / "script.py"
        path.write_text(text)
        return subprocess.run([sys.executable, "-m", "tokamak", *(a.format(path) for a in arguments)], capture_output=True, text=True, timeout=300)
    return call


LOUD = """
import atexit, subprocess, threading, time
print("by Python", flush=True)
os.write(1, b"from below\\n")
subprocess.run([sys.executable, "-c", "print('by a child')"])
atexit.register(print, "at the end")
atexit.register(os.write, 1, b"at the very end\\n")
def beside():
    for _ in range(200):
        print("beside", flush=True)
        time.sleep(0.01)
threading.Thread(target=beside, daemon=True).start()
f(torch.ones(4, 8))
"""


@pytest.mark.parametrize("command", [["explain", "--json"], ["verify", "--json"], ["optimize", "--seconds", "0", "--json", "-"],
                                     ["profile", "--seconds", "0", "--json", "-", "--fail-if", "kernels>0"]])
def test_standard_output_is_the_answers_alone(alone, command):
    done = alone(ONE + LOUD, *command, "{}")
    assert done.returncode == ("--fail-if" in command) and isinstance(json.loads(done.stdout), dict)
    for words in ("by Python", "from below", "by a child", "at the end", "at the very end", "beside"):
        assert words in done.stderr
    assert ("tokamak: kernels>0: kernels is 1" in done.stderr) == ("--fail-if" in command)


@pytest.mark.parametrize("command", ["explain", "compile", "verify", "profile", "optimize"])
def test_a_script_that_never_calls_what_it_compiled(run, command):
    status, out, err = run(ONE, command, "{}")
    assert status == 1 and not out and "compiled nothing with tokamak: no call of a function" in err


@pytest.mark.parametrize("command", ["verify", "profile", "optimize"])
def test_a_script_that_fails_behind_a_call_is_still_shown(run, command):
    status, out, err = run(ONE + "f(torch.ones(4, 8))\nraise ValueError('oops')", command, *(() if command == "verify" else ("--seconds", "0")), "{}")
    assert status == 1 and out and "ValueError: oops" in err and "cli.py" not in err


@pytest.mark.parametrize("command", ["profile", "optimize"])
def test_a_call_that_raises_is_none_to_measure(run, command):
    wrong = "g = torch.compile(lambda x, i: x[i] + 1, backend='tokamak')\nf(torch.ones(4, 8))\ng(torch.ones(4), torch.tensor([7]))"
    status, out, err = run(ONE + wrong, command, "--seconds", "0", "{}")
    assert status == 1 and out and "index out of range in" in err and "cli.py" not in err
    status, out, err = run(ONE + wrong.replace("f(torch.ones(4, 8))", ""), command, "{}")
    assert status == 1 and not out and "cli.py" not in err and err.endswith("called nothing that it compiled, or no call came to its end\n")


@pytest.mark.parametrize("command", ["profile", "optimize"])
def test_a_call_that_cannot_be_made_again(run, command):
    """A position that counts up in place, as decoding with a cache does, is soon behind the end."""
    script = "import torch, tokamak\nf = tokamak.compile(lambda i, x: (i.add_(1), x[i])[1])\nf(torch.tensor([1]), torch.randn(3))"
    status, out, err = run(script, command, "--seconds", "0", "{}")
    assert status == 1 and not out and "cli.py" not in err
    assert err.splitlines()[-1].startswith("tokamak: a call cannot be made again with its arguments as they are now: IndexError: index 3 is out of")


def test_a_script_that_is_interrupted_is_shown_until_then(run):
    status, out, err = run(ONE + "f(torch.ones(4, 8))\nraise KeyboardInterrupt", "explain", "{}")
    assert status == 130 and "per_fused_exp_sum_0" in out and err.endswith("script.py was interrupted\n")


def test_a_script_that_does_not_parse(run):
    status, out, err = run("def (", "explain", "{}")
    assert status == 1 and "SyntaxError" in err and "runpy" not in err and "cli.py" not in err


def test_a_forked_process_has_no_answer(alone):
    done = alone(ONE + "f(torch.ones(4, 8))\nchild = os.fork()\nf(torch.ones(4, 8))\nif child: os.waitpid(child, 0)\nelse: print('the child')\n",
                 "explain", "{}")
    assert done.returncode == 0 and done.stdout.count("per_fused_exp_sum_0 ") == 1 and "the child" in done.stderr


def test_a_script_that_leaves_at_once_says_so(alone):
    done = alone(ONE + "f(torch.ones(4, 8))\nos._exit(5)", "explain", "{}")
    assert done.returncode == 5 and not done.stdout and "ended by os._exit(5)" in done.stderr


def test_no_standard_output(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    status, _, err = run("print('hello')", "explain", "{}")
    assert status == 1 and err == "tokamak: the answer cannot be written: there is no standard output\n"


def test_an_answer_that_cannot_be_written(run, tmp_path):
    status, out, err = run(ONE, "profile", "--json", str(tmp_path / "nowhere" / "x.json"), "{}")
    assert status == 2 and "no file can be made there" in err and "compiled nothing" not in err
    (tmp_path / "script.py").write_text(ONE + "f(torch.ones(4, 8))\n")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "tokamak", "explain", str(tmp_path / "script.py")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.endswith("the answer cannot be written: [Errno 28] No space left on device\n")


def test_what_a_thread_of_the_script_compiles(run):
    """Threads that a script starts have its recorder, too."""
    status, out, err = run(SCRIPT.replace("    f(torch.ones(8))", "    import threading\n    t = threading.Thread(target=f, args=(torch.ones(8),))\n"
                                          "    t.start()\n    t.join()"), "explain", "{}")
    assert status == 0 and "poi_fused_mul_relu_0" in out, err


def test_a_source_that_the_terminal_cannot_show(tmp_path):
    """Its letters are written as escapes; the answer stays an answer."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("x * 2", "x * 2 + len('\u00e9')"), encoding="utf-8")
    asked = [sys.executable, "-m", "tokamak", "compile", "--until", "render", str(path)]
    done = subprocess.run(asked, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and b"\\xe9" in done.stdout, done.stderr
