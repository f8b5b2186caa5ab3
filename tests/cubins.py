"""What NVIDIA's tool says of kernels that Triton has built, for tests of several folders."""
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def dumped(code: bytes, option: str) -> str:
    """Of a cubin, by cuobjdump; the test is skipped where this Triton comes without it."""
    tool = Path(sys.modules["triton"].__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
