"""Where the tests of compiled code run: C on the CPU, tiles in Triton's interpreter, tiles on a GPU."""
import importlib.util

import pytest
import torch

INTERPRETED = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["c", pytest.param("interpret", marks=INTERPRETED), pytest.param("cuda", marks=CUDA)])
def target(request) -> str:
    """As the harness takes it."""
    return "" if request.param == "c" else request.param
