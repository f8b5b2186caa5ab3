"""The documentation runs: every Python block of README.md and ARCHITECTURE.md, a file's blocks in order in one namespace."""
from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tokamak.fuse.reason import CODES
from tokamak.options import STAGES, TOPICS, Options

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md")
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> list[tuple[int, str]]:
    """(first line, text) of each Python block of a document."""
    text = (ROOT / name).read_text()
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in FENCE.finditer(text)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_blocks_run(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    namespace: dict = {"__name__": name.partition(".")[0].lower()}
    found = blocks(name)
    assert found
    for line, text in found:
        exec(compile("\n" * (line - 1) + text, str(ROOT / name), "exec"), namespace)


def test_every_option_topic_stage_and_reason_is_documented():
    readme, architecture = ((ROOT / name).read_text() for name in DOCUMENTS)
    missing = [w for w in (*(f.name for f in fields(Options)), *TOPICS) if f"`{w}`" not in readme]
    assert missing + [w for w in (*STAGES, *CODES) if f"`{w}`" not in architecture] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_files_exist(name):
    text = re.sub(r"^```.*?^```$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    linked = {m for m in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in m}
    named = set(re.findall(r"`((?:tokamak|tests|examples|benchmarks)/[\w./]*\w(?:\.py|/))`", text))
    missing = [m for m in linked | named if not (ROOT / m).exists()]
    assert not missing
