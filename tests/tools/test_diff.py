"""Two profiles compared: kernels are matched by what they compute; the command's exit status says what grew."""
import copy
import json

import pytest
import torch

import tokamak
from tokamak.errors import OptionError
from tokamak.tools import profile as profiling
from tokamak.tools.cli import main
from tokamak.tools.diff import condition, diff
from tokamak.tools.profile import METRICS

from .programs import Block
from .test_profile import PEAKS


class Renamed(torch.nn.Module):
    """The same as a Block, in other words."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

    def forward(self, values):
        return values + self.second(self.first(values)).relu()


class Other(Block):
    def forward(self, x):
        return x + self.fc(self.norm(x)).sigmoid()


@pytest.fixture(scope="module")
def data():
    """data(module, rows): the profile of a module, made once, with times that are given and not measured: a microsecond a byte."""
    made = {}

    def one(module, rows=64):
        if (module, rows) not in made:
            torch._dynamo.reset()
            with pytest.MonkeyPatch.context() as patch, tokamak.scope(strict=True):
                patch.setattr(profiling, "peaks", lambda device: PEAKS)
                found = json.loads(tokamak.profile(module(), torch.randn(rows, 16), seconds=0.0).to_json())
            for d in found["drawings"]:
                for n in d["nodes"]:
                    n["seconds"] = n["bytes"] * 1e-9
            made[module, rows] = found
        return copy.deepcopy(made[module, rows])
    return one


def kernel(data: dict, words: str) -> dict:
    return next(n for d in data["drawings"] for n in d["nodes"] if n["name"].startswith(words))


def test_the_same_program_by_other_names(data):
    found = diff(data(Block), data(Renamed))
    assert {(c.what, c.matched) for c in found.changes} == {("same", "same")} and sum(k.calls for c in found.changes for k in c.before) == 4 + 3
    assert found.totals.keys() == set(METRICS) and found.totals["kernels"] == (4, 4)


def test_what_became_slower_and_faster(data):
    after = data(Block)
    kernel(after, "per_fused_native_layer_norm")["seconds"] *= 3
    kernel(after, "poi_fused_add_relu")["seconds"] /= 3
    kernel(after, "red_fused_native")["seconds"] *= 1.05
    found = diff(data(Block), after)
    assert {c.what: c.before[0].name for c in found.changes if c.what != "same"} == {
        "slower": "per_fused_native_layer_norm_0", "faster": "poi_fused_add_relu_1"} and found.changes[-1].what == "same"
    assert found.changes[0].seconds == pytest.approx(2 * kernel(data(Block), "per_fused_native")["seconds"])
    assert "slower" in str(found) and "per_fused_native_layer_norm_0" in str(found)


def test_other_sizes_are_the_same_operations(data):
    found = diff(data(Block), data(Block, 4096))
    assert {c.matched for c in found.changes} == {"operations"} and {c.what for c in found.changes} == {"slower"}


def test_what_computes_something_else_is_new(data):
    found = diff(data(Block), data(Other))
    whats = {c.what for c in found.changes}
    assert {"new", "gone"} <= whats or "regrouped" in whats
    names = {k.name for c in found.changes if c.what in ("new", "regrouped") for k in c.after}
    assert any("sigmoid" in n for n in names) and not any("native_layer_norm_0" in n for n in names)


def test_what_was_cut_otherwise_is_regrouped(data):
    before, after = data(Block), data(Block)
    whole = kernel(after, "poi_fused_add_relu")
    d = after["drawings"][0]
    d["nodes"].remove(whole)
    for n, operation in enumerate(whole["operations"]):
        d["nodes"].append({**whole, "name": f"poi_part_{n}", "structure": f"part {n}", "operations": [operation], "position": 100 + n})
    changed, = (c for c in diff(before, after).changes if c.what != "same")
    # the parts share a line and an operation with the whole, each
    assert changed.what == "regrouped" and [k.name for k in changed.before] == ["poi_fused_add_relu_1"] and len(changed.after) == 2
    assert changed.bytes == whole["bytes"]


def test_an_unsteady_run_is_known_beside_a_slow_one(data):
    before, after = data(Block), data(Block)
    before["compiled"].update(step=0.01, middle=[0.005, 0.03])
    before["eager"].update(step=1.0, middle=[0.99, 1.01])
    after["eager"].update(step=1.0, middle=[0.99, 1.01])
    after["compiled"].update(step=1.0, middle=[0.99, 1.01])
    assert any("lie 250% of a step apart" in n for n in diff(before, after).notes)
    assert not any("apart" in n for n in diff(after, after).notes)


def test_conditions(data):
    before, after = data(Block), data(Block)
    after["metrics"].update(step_ms=before["metrics"]["step_ms"] * 1.2, kernels=5)
    found = diff(before, after)
    assert found.failures("step_ms>10%, kernels>0, bytes>0%, graphs!=0") == [
        f"step_ms>10%: step_ms went from {before['metrics']['step_ms']:.6g} to {after['metrics']['step_ms']:.6g}",
        "kernels>0: kernels went from 4 to 5"]
    assert found.failures("step_ms>25%, kernels>1") == [] and json.loads(found.to_json())["totals"]["kernels"] == [4, 5]
    with pytest.raises(OptionError, match="is no condition"):
        condition("speed>3%")


def test_the_command(data, tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    after = data(Block)
    after["metrics"]["kernels"] = 9
    for path, found in zip(paths, (data(Block), after)):
        path.write_text(json.dumps(found))
    a, b = map(str, paths)
    assert main(["diff", a, b]) == 0 and "kernels" in capsys.readouterr().out
    assert main(["diff", "--json", "--fail-if", "kernels>4", a, b]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["totals"]["kernels"] == [4, 9] and "kernels went from 4 to 9" in said.err
    assert main(["diff", "--fail-if", "kernels>", a, b]) == 2 and "is no condition" in capsys.readouterr().err
    paths[1].write_text('{"format": "something else"}')
    assert main(["diff", a, b]) == 2 and "is no profile" in capsys.readouterr().err
    assert main(["diff", a, str(tmp_path / "none.json")]) == 2 and "profile --json" in capsys.readouterr().err
