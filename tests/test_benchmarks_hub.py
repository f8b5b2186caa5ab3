"""The tool that plans every model of a library: what it says of one that is taken, of one that is not, and of one that it does not try."""
from __future__ import annotations

import pytest

from benchmarks import gpu_hub
from tokamak import backend

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["bert", "segformer", "vit"])
def test_models_are_taken(name, capsys):
    assert gpu_hub.main([name]) == 0
    assert capsys.readouterr().out.startswith(f"ok  {name}  2 graphs, ")


def test_a_bug_is_told_as_one(monkeypatch, capsys):
    def broken(*_, **__):
        raise KeyError("a node")
    monkeypatch.setattr(backend, "_planned", broken)
    assert gpu_hub.main(["bert"]) == 1
    assert capsys.readouterr().out.startswith("bug bert  KeyError: ")


def test_what_is_not_tried(monkeypatch, capsys):
    monkeypatch.setattr(gpu_hub, "LARGEST", 10)
    assert gpu_hub.main(["bert"]) == 0
    assert capsys.readouterr().out == "-   bert  large\n0 compiled, 0 did not, 1 were not tried or gave up\n"
