"""The pages of docs/ run, and what they show is what they print."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from docs import plots, walks
from docs.walks import FOLDER, PAGES, Block, blocks, difference

ROOT = Path(__file__).parent.parent


@pytest.fixture
def one_thread():
    """Several threads on a machine that is busy wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_what_it_prints(name, one_thread, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "FOLDER", tmp_path)
    wrong = [f"{name}:{b.line}: {why}" for b, printed in walks.run(name) if b.span is not None and (why := difference(b, printed))]
    torch._dynamo.reset()
    assert not wrong, "\n\n".join(wrong)
    drawn = sorted(p.name for p in tmp_path.iterdir())
    page = (FOLDER / name).read_text()
    assert drawn == sorted(re.findall(r"\]\(plots/(\w+\.svg)\)", page))
    for plot in drawn:
        assert names(tmp_path / plot) >= names(FOLDER / "plots" / plot) - {"fuse again"}          # tried where fusing did not pay at first


def names(plot: Path) -> set[str]:
    """The words in a plot, without its numbers."""
    return set(re.findall(r'class="(?:name|bold)">([^<]+)<', plot.read_text()))


def test_every_page_is_there_and_in_the_index():
    index = (FOLDER / "README.md").read_text()
    assert sorted(PAGES) == sorted(p.name for p in FOLDER.glob("*.md") if p.name not in ("README.md", "operators.md"))
    assert all(f"]({name})" in index for name in PAGES) and "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_blocks_and_their_output():
    page = "```python\nprint(1)\n```\n\n```text numbers\n1\n```\nwords\n```python\nx = 1\n```\n"
    first, second = blocks(page)
    assert (first.line, first.text, first.kind, first.shown, page[slice(*first.span)]) == (2, "print(1)\n", "numbers", "1\n", "1\n")
    assert (second.line, second.span) == (10, None)


@pytest.mark.parametrize("kind, words, shown, printed, right", [
    ("exact", (), "a 1\n", "a 1\n", True), ("exact", (), "a 1\n", "a 2\n", False),
    ("numbers", (), "a 1.5 ms, 3 kernels\n", "a  12 us, 30 kernels\n", True), ("numbers", (), "a 1 kernel\n", "a 1 call\n", False),
    ("measured", ("a", "b"), "a 1\nb 2\n", "b slow\n  a fast\n", True), ("measured", ("a", "b"), "a 1\nb 2\n", "a 1\n", False),
    ("measured", (), "x\n", "y\n", True), ("measured", (), "x\n", "", False)])
def test_what_counts_as_the_same(kind, words, shown, printed, right):
    assert (difference(Block(1, "", kind, words, shown, (0, 0)), printed) == "") is right


def test_a_plot_says_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "FOLDER", tmp_path / "plots")
    plots.bars("p", "time <of it>", "ms", {"eager": 4.0, "fused": 1.0}, limit=0.5)
    text = (tmp_path / "plots" / "p.svg").read_text()
    assert names(tmp_path / "plots" / "p.svg") == {"time &lt;of it&gt; (ms)", "eager", "fused"} and "the fewest possible, 0.5" in text
    widths = [float(w) for w in re.findall(r'<rect x="210"[^>]* width="([\d.]+)"', text)]
    assert widths == [420.0, 105.0]
