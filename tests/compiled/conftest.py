"""Where the tests of compiled code run: C on the CPU, tiles in Triton's interpreter, tiles on a GPU.

The interpreter is slow: of the tests that know all three it runs a share, or with TOKAMAK_TEST_INTERPRETED=all every one.
"""
import importlib.util
import os
import random

import pytest
import torch

INTERPRETED = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHARE = 0.15


@pytest.fixture(params=["c", pytest.param("interpret", marks=INTERPRETED), pytest.param("cuda", marks=CUDA)])
def target(request) -> str:
    """As the harness takes it."""
    return "" if request.param == "c" else request.param


def pytest_collection_modifyitems(config, items):
    if os.environ.get("TOKAMAK_TEST_INTERPRETED") == "all":
        return
    slow = [i for i in items if getattr(i, "callspec", None) is not None and i.callspec.params.get("target") == "interpret" and len(items) > 20]
    gone = set(slow) - {i for i in slow if random.Random(i.nodeid).random() < SHARE}
    if gone:
        config.hook.pytest_deselected(items=list(gone))
        items[:] = [i for i in items if i not in gone]
