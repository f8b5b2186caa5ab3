"""`tokamak.verify`: right programs are right, a wrong kernel is named with its source, and a kernel runs from a file of its own."""
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tokamak
from tests.test_check import broken
from tokamak.errors import OptionError
from tokamak.ir.dtype import F64
from tokamak.ir.expr import Op, Rewriter
from tokamak.ir.graph import Compute
from tokamak.ir.parse import parse_graph
from tokamak.ir.reference import evaluate
from tokamak.tools.cli import main
from tokamak.tools.kernel_graph import exact, part
from tokamak.tools.verify import distance, KernelCheck, Value, Verification, verify

from .programs import Block, Dropped, softmax

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def strict():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with tokamak.scope(strict=True):
        yield


@pytest.fixture
def ran(monkeypatch, capsys):
    """ran(file): (exit status, standard output) of an extracted kernel."""
    def run(path):
        monkeypatch.setattr(sys, "argv", [str(path), "--seconds", "0"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as leave:
            runpy.run_path(str(path), run_name="__main__")
        return leave.value.code, capsys.readouterr().out
    return run


def mutating(x, i):
    x.add_(1)
    return x[:, i].cumsum(0).argmax(1), torch.zeros(8).index_add(0, i, x[0, i])


def test_a_module_forward_and_backward():
    model, x = Block(), torch.randn(8, 16, requires_grad=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = tokamak.verify(model, x)
    assert found.right and found.first is None and not found.notes
    names = [w.name for w in found.whole]
    assert names[:2] == ["output 0", "gradient of argument 0"] and "gradient of norm.weight" in names and all(w.right for w in found.whole)
    assert all(w.exact < 1e-6 and w.eager_exact < 1e-6 and w.eager < 1e-6 for w in found.whole)
    assert {k.graph.split("_")[0] for k in found.kernels} == {"forward", "backward"}
    assert all(v.exact < 1e-6 and not v.wrong and v.line.file.endswith("programs.py") for k in found.kernels for v in k.values)
    assert any(v.eager is not None for k in found.kernels for v in k.values)
    assert x.grad is None and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_16_bits_are_held_against_float64_in_full():
    found = verify(softmax, torch.randn(64, 100).bfloat16())
    value, = found.kernels[0].values
    assert found.right and 1e-4 < value.exact < 4e-3 and found.whole[0].exact <= found.whole[0].eager_exact


def test_mutation_and_integers():
    found = verify(mutating, torch.randn(4, 5), torch.tensor([0, 3, 3]))
    assert found.right and [w.eager for w in found.whole] == [0.0, 0.0] and "does not run in it" in found.notes[0]


def test_random_numbers_of_our_own_are_not_compared_with_eagers():
    found = verify(Dropped(), torch.randn(5, 32))
    assert found.right and {w.right for w in found.whole} == {None} and "random numbers" in found.notes[0]
    values = [v for k in found.kernels for v in k.values]
    assert any(v.random for v in values) and all(v.eager is None or v.eager < 1e-5 for v in values) and " random " in str(found)
    found = verify(Dropped(), torch.randn(5, 32), options={"policy": "eager"})
    assert found.right and {w.right for w in found.whole} == {True} and not found.notes


def test_a_wrong_kernel_is_the_first_and_shows_its_text(monkeypatch):
    broken(monkeypatch, "splat_f32(2.0)", "splat_f32(2.001)")
    linear = nn.Linear(8, 8)
    with tokamak.scope(cache_dir=""):
        found = verify(lambda x: linear(x * 2) * 2, torch.ones(4, 8))
    assert not found.right and found.first is found.kernels[0] and "_mul_" in found.first.name
    assert "largest error 0.001" in found.first.wrong
    assert "test_verify.py" in found.first.text and "// mul, line" in found.first.text
    assert found.first.values[0].exact == pytest.approx(5e-4, rel=1e-3) and "WRONG" in str(found) and found.first.name in str(found)


def test_a_wrong_rewrite_shows_in_the_whole(monkeypatch):
    def wrong(graph):
        flip = Rewriter(leaf=lambda e: Op("sub", *e.args) if isinstance(e, Op) and e.name == "add" else None)
        node, = (n for n in graph.nodes if isinstance(n, Compute))
        new, view = Compute(node.shape, node.strides, flip(node.expr)), graph.outputs[0]
        return type(graph)(graph.inputs, (*graph.nodes[:-1], new), (type(view)(new, view.shape, view.strides, view.offset),), origins=graph.origins)
    monkeypatch.setattr("tokamak.backend.simplify", wrong)
    found = verify(lambda x, y: x + y, torch.rand(9), torch.rand(9))
    assert not found.right and found.whole[0].right is False and found.first is None


def test_it_prints_and_is_json():
    found = verify(Block(), torch.randn(4, 16))
    assert str(found).startswith("right\n") and "from float64" in str(found)
    data = json.loads(found.to_json())
    assert data["right"] is True and data["kernels"][0]["values"][0]["wrong"] == ""


# -- a file of its own -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["", "interpret"])
def test_every_kernel_runs_from_a_file(tmp_path, target, ran):
    found = verify(Block(), torch.randn(8, 16, requires_grad=True), options={"target": target})
    assert found.right
    for n, k in enumerate(dict.fromkeys(name for k in found.kernels for name in k.name.split(" + "))):
        status, text = ran(found.extract(k, str(tmp_path / f"{n}.py")))
        assert status == 0 and "within its policy" in text and "time: " in text


@pytest.mark.parametrize("fn, args", [
    (mutating, lambda: (torch.randn(4, 5), torch.tensor([0, 3, 3]))), (softmax, lambda: (torch.randn(16, 30).bfloat16().t(),)),
    (lambda x: x.add_(x.sum(1, keepdim=True)), lambda: (torch.randn(4, 5),)), (lambda x, s: x * s + 1, lambda: (torch.randn(7), 2.5)),
    (torch.nn.Dropout(0.5), lambda: (torch.randn(40),))])
def test_writes_layouts_numbers_and_seeds_in_a_file(tmp_path, fn, args, ran):
    found = verify(fn, *args())
    assert found.right and found.kernels
    for k in found.kernels:
        assert ran(found.extract(k.name, str(tmp_path / "kernel.py")))[0] == 0


def test_symbolic_sizes_in_a_file(tmp_path, ran):
    with tokamak.tools.record.recording(check="report") as seen:
        f = tokamak.compile(softmax, dynamic=True)
        f(torch.randn(5, 33))
    found = tokamak.tools.verify.examined(seen)
    assert found.right
    status, text = ran(found.extract(found.kernels[0].name, str(tmp_path / "kernel.py")))
    assert status == 0 and "[5, 33]" in text


def test_large_values_stand_in_a_file_beside(tmp_path):
    found = verify(lambda x: x * 2, torch.randn(600, 600))
    path = found.extract(found.kernels[0].name, str(tmp_path / "kernel.py"))
    assert (tmp_path / "kernel.values").exists()
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0 and "within its policy" in done.stdout, done.stderr


def test_a_wrong_kernel_in_a_file_fails(tmp_path, ran):
    found = verify(lambda x: x * 2, torch.randn(600))
    path = Path(found.extract(found.kernels[0].name, str(tmp_path / "kernel.py")))
    text = path.read_text()
    assert text.count("splat_f32(2.0)") == 2            # in the listing for people and in the text that is built
    path.write_text(text.replace("splat_f32(2.0)", "splat_f32(2.5)"))
    status, words = ran(path)
    assert status == 1 and "largest error" in words


def test_an_unknown_kernel():
    with pytest.raises(OptionError, match="there is no kernel 'nonesuch': poi_fused_mul_0"):
        verify(lambda x: x * 2, torch.randn(6)).extract("nonesuch")


# -- the command -----------------------------------------------------------------------------------------------------------
SCRIPT = """
import torch
f = torch.compile(lambda x: (x * 2).relu(), backend="tokamak")
for _ in range(2):
    f(torch.ones(8))
"""


def test_the_command(tmp_path, capsys, monkeypatch, ran):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    target = tmp_path / "kernel.py"
    assert main(["verify", "--extract", "poi_fused_mul_relu_0", "--output", str(target), str(script)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("right\n") and "poi_fused_mul_relu_0" in out and str(target) in err and ran(target)[0] == 0
    torch._dynamo.reset()
    broken(monkeypatch, "splat_f32(2.0)", "splat_f32(2.5)")
    monkeypatch.setenv("TOKAMAK_CACHE_DIR", "")
    assert main(["verify", "--json", str(script)]) == 1 and json.loads(capsys.readouterr().out)["right"] is False
    torch._dynamo.reset()
    assert main(["verify", "--extract", "poi_fused_add_7", str(script)]) == 2 and "there is no kernel" in capsys.readouterr().err


def test_names_are_shown_whole():
    """They are what `extract` is given."""
    name = "red_fused_" + "native_layer_norm_backward_" * 5 + "7"
    value = Value("gradient of " + "module." * 12 + "weight", None, 1e-7, 1e-7, "")
    shown = str(Verification((), (KernelCheck(name, "forward_0", "model.0", (), (value,)),), ()))
    assert "…" not in shown and "within" in shown


# -- parts -----------------------------------------------------------------------------------------------------------------
def test_a_part_in_float64_rounds_nothing():
    graph = parse_graph("""graph example {
  input %x: bf16[4](1)
  %y: bf16[4](1) = bf16(mul(f32(%x[i0]), 1.01171875:f32))
  %z: f32[4](1) = add(f32(%y[i0]), 1.0:f32)
  return %z
}""")
    y, z = graph.nodes[1:]
    cut, inputs, made = part(graph, (z,), (z,))
    assert [i.name for i in cut.inputs] == ["y"] and list(inputs) == [y] and cut.outputs[0].node is made[z]
    whole, inputs, made = part(graph, (y, z), (z,))
    wide, new = exact(whole)
    assert all(n.dtype is F64 for n in wide.nodes)
    x = np.array([1.0, 1.5, 3.0, -2.0], np.float32)
    assert np.array_equal(evaluate(wide, [x]).outputs[0], x.astype(np.float64) * 1.01171875 + 1)


def test_sparse_gradients():
    found = tokamak.verify(torch.nn.Embedding(10, 4, sparse=True), torch.randint(0, 10, (9,)))
    assert found.right and any(w.name == "gradient of weight" for w in found.whole)


def test_distance():
    a = np.array([1.0, np.nan, np.inf])
    assert distance(a, a) == 0 and distance(a, np.array([1.0, 2.0, np.inf])) == np.inf and distance(np.ones(3), np.ones(4)) == np.inf
    assert distance(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1) and distance(np.array([1, 2]), np.array([1, 3])) == 0.5
    assert distance(np.zeros(2), np.zeros(2)) == 0 and distance(np.ones(2), np.zeros(2)) == np.inf


def test_a_function_that_returns_no_tensor():
    """Its kernels are compared, and what could not be is said."""
    found = tokamak.verify(lambda x: float(x.exp().sum()), torch.randn(4, 8))
    assert found.right and found.kernels and any("returns no tensor" in note for note in found.notes)
