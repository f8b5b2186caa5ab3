"""The installed package: torch finds the backend by name without tokamak being imported first."""
from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

try:
    INSTALLED = importlib.metadata.distribution("tokamak")
except importlib.metadata.PackageNotFoundError:
    INSTALLED = None
pytestmark = pytest.mark.skipif(INSTALLED is None, reason="the package is not installed in this environment; `make test` installs it")

BY_NAME = """
import sys, torch
assert "tokamak" not in sys.modules
f = torch.compile(lambda x: torch.relu(x) * 2, backend="tokamak")
x = torch.randn(8, 9)
assert torch.equal(f(x), torch.relu(x) * 2)
print("tokamak" in sys.modules)
"""


def test_found_by_name_from_any_folder(tmp_path):
    done = subprocess.run([sys.executable, "-c", BY_NAME], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_listed_among_the_backends_of_dynamo():
    found = [e.value for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "tokamak"]
    assert set(found) == {"tokamak.backend:backend"}


def test_metadata():
    meta = INSTALLED.metadata
    assert meta["Requires-Python"] == ">=3.11"
    assert "Apache-2.0" in (meta["License"] or meta["License-Expression"] or "")
    assert any(r.replace(" ", "").startswith("torch>=2.11") for r in INSTALLED.requires)
    assert {"cc", "test"} <= set(meta.get_all("Provides-Extra"))
